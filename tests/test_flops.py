"""The arithmetic of a token is what torch counts; a device's peak is the vendor's dense one, or not known."""

from types import SimpleNamespace

import pytest
import torch
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.measure import timing
from manyhands.predict.machines import dense_peak, listed_peak
from manyhands.predict.models import flops_per_token
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

CONFIGS = {
    "the lessons' GPT": GPTConfig(vocab_size=65),
    "an untied head over many tokens": GPTConfig(vocab_size=1000, block_size=32, n_layer=2, n_head=2, n_embd=64),
    "GPT-2's variant": GPTConfig(
        vocab_size=300, block_size=48, n_layer=3, n_head=4, n_embd=96, tie=True, qkv_bias=True
    ),
    "2 of 6 experts, and a shared one": GPTConfig(
        vocab_size=65, block_size=16, n_layer=3, n_head=2, n_embd=32, experts=6, top_k=2, shared_experts=1
    ),
    "a Llama": GPTConfig(
        vocab_size=65, block_size=16, n_layer=3, n_head=4, n_embd=32, style="llama", n_kv_head=2, n_hidden=50,
        head_dim=10,
    ),
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_tokens_flops_are_those_that_torch_counts_in_forward_and_backward(config):
    torch.manual_seed(0)
    model, ids_BT = GPT(config), torch.randint(config.vocab_size, (2, config.block_size))
    # the plain kernel: torch 2.13 does not count the products inside the CPU's fused one
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids_BT, ids_BT)[1].backward()
    assert counter.get_total_flops() == flops_per_token(config) * ids_BT.numel()


@pytest.mark.parametrize(
    "name, units, kind, tflops",
    [
        ("NVIDIA H100 80GB HBM3", 132, "bf16", 989.4),  # the data sheet's 1,979 needs sparsity
        ("NVIDIA H100 PCIe", 114, "bf16", 756),
        ("NVIDIA H100 NVL", 132, "bf16", 835.5),
        ("NVIDIA H200", 132, "fp32", 66.9),
        ("NVIDIA H200 NVL", 132, "fp32", 60),  # not the H200 of the line above
        ("NVIDIA GH200 480GB", 132, "bf16", 990),
        ("NVIDIA B200", 148, "bf16", 2250),
        ("NVIDIA A100-SXM4-80GB", 108, "bf16", 312),
        ("A100-PCIE-40GB", 108, "tf32", 156),
        ("NVIDIA A100 80GB PCIe", 108, "fp64", 19.5),
        ("Tesla V100-SXM2-16GB", 80, "fp16", 125),
        ("Tesla V100-SXM2-16GB", 80, "tf32", 15.7),  # it has none: torch computes in fp32
        ("AMD Instinct MI250X", 110, "bf16", 191.5),
        ("AMD Instinct MI300X", 304, "bf16", 1307.4),
        ("Intel(R) Data Center GPU Max 1550", 1024, "bf16", 839),
        ("Intel(R) Data Center GPU Max 1550", 512, "bf16", 419.5),  # one stack of two
        ("NVIDIA GeForce RTX 4090", 128, "bf16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, "bf16", None),  # a slice
        ("NVIDIA H100 80GB HBM3", 16, "bf16", None),
        ("NVIDIA H800", 132, "bf16", None),
        ("NVIDIA A100-SXM-64GB", 124, "bf16", None),  # a chip made for one site
        ("AMD Instinct MI300X", 38, "bf16", None),  # one of eight partitions
        ("Tesla V100-SXM2-16GB", 80, "bf16", None),  # no such unit
    ],
)
def test_a_listed_device_has_its_vendors_dense_peak_and_others_are_not_guessed(name, units, kind, tflops):
    assert listed_peak(name, units, kind) == (tflops and pytest.approx(tflops * 1e12))


def test_a_cpu_has_no_listed_peak():
    assert dense_peak(torch.device("cpu"), "fp32") is None


def test_fp32_is_measured_against_tf32_where_torch_may_use_it(monkeypatch):
    h200 = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    module = SimpleNamespace(get_device_properties=lambda device: h200)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert dense_peak(torch.device("cuda", 0), "fp32") == pytest.approx(66.9e12)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert dense_peak(torch.device("cuda", 0), "fp32") == pytest.approx(494.7e12)
    assert dense_peak(torch.device("cuda", 0), "bf16") == pytest.approx(989.4e12)


def test_the_measured_peak_is_of_the_best_size_of_product(monkeypatch):
    def seconds_of(a_nn, b_nn, products, device):  # 1 TFLOP/s at 1024, slower at smaller sizes
        n = len(a_nn)
        return products * 2 * n**3 / (1e12 * min(1, n / 1024))

    monkeypatch.setattr(timing, "_seconds_of", seconds_of)
    assert timing.gemm_peak(torch.device("cpu"), torch.float32, seconds=0.02) == pytest.approx(1e12)


def test_a_peak_can_be_measured_here():
    assert timing.gemm_peak(torch.device("cpu"), torch.float32, seconds=0.02) > 1e8
