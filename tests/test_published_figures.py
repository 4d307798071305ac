"""Every figure that lessons 01, 06 and 11 quote is what the package computes; why, where another is in circulation."""

import ast
import math
from math import ceil
from pathlib import Path

import pytest
import torch
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.measure.tensor_bytes import tensor_bytes
from manyhands.predict.activation_memory import published_bytes, slide_values
from manyhands.predict.machines import listed_peak
from manyhands.predict.memory import RECIPES, zero_bytes
from manyhands.widgets.memory import GIGA, MODELS

CLASS_70B = MODELS["70B class"]
P_70B = 65_288_471_656
SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def test_the_70b_class_takes_130_6_gb_of_weights_and_914_at_14_p_on_23_or_12_devices_in_gb_and_22_or_11_in_gib():
    assert CLASS_70B.num_params() == P_70B and round(2 * P_70B / 1e9, 1) == 130.6
    assert (CLASS_70B.vocab_size, CLASS_70B.n_embd, CLASS_70B.block_size) == (50_280, 8192, 4096)
    assert (CLASS_70B.n_layer, CLASS_70B.n_head) == (80, 64)
    gigabytes = P_70B * RECIPES["14P of many slides"].total / 1e9
    assert round(gigabytes) == 914 and 14 * 65 == 910, "in circulation: P was rounded first"
    for unit, counts in (("GB", [23, 12]), ("GiB", [22, 11])):
        found = [ceil(gigabytes * 1e9 / (size * GIGA[unit])) for size in (40, 80)]
        assert found == counts and [ceil(n / 4) for n in found] == [6, 3], "nodes of 4"


def test_olmos_sizes_give_0_941_and_6_715_billion_and_0_944_is_another_vocabulary():
    assert round(MODELS["1B"].num_params() / 1e9, 3) == 0.941
    assert round(MODELS["7B"].num_params() / 1e9, 3) == 6.715
    padded = GPTConfig(vocab_size=32_768, block_size=2048, n_layer=16, n_head=16, n_embd=2048)
    assert round(padded.num_params() / 1e9, 3) == 0.944


def test_the_first_loss_is_close_to_ln_65():
    torch.manual_seed(1337)
    ids_BT, targets_BT = torch.randint(65, (2, 8, 64))
    with torch.no_grad():
        loss = GPT(MODELS["ShakespeareGPT"])(ids_BT, targets_BT)[1].item()
    assert round(math.log(65), 3) == 4.174 and loss == pytest.approx(4.174, abs=0.05)


def test_a_parameter_takes_8_or_16_bytes_and_18_with_autocasts_copies_or_exact_gradients():
    totals = {"fp32": 16, "bf16": 8, "bf16 + fp32 master": 16, "fp32 + autocast": 18, "14P of many slides": 14}
    totals["bf16 + fp32 master and gradients"] = 18
    assert {name: recipe.total for name, recipe in RECIPES.items()} == totals
    assert RECIPES["14P of many slides"].gradients == 0, "that is what it leaves out"


@pytest.mark.parametrize(
    "billions, at_14, at_16", [(0.3, 4.2, 4.8), (1, 14, 16), (7, 98, 112), (13, 182, 208), (70, 980, 1120)]
)
def test_the_usual_table_is_14_p_and_training_takes_16(billions, at_14, at_16):
    assert billions * RECIPES["14P of many slides"].total == pytest.approx(at_14)
    assert billions * RECIPES["bf16 + fp32 master"].total == pytest.approx(at_16)


def test_its_activations_by_the_slides_are_51_tb_86_per_cent_of_them_scores():
    values = slide_values(CLASS_70B, 256)
    assert round(2 * sum(values.values()) / 1e12) == 51
    assert round(100 * values["attention scores"] / sum(values.values())) == 86
    assert round(2 * sum(slide_values(CLASS_70B, 1).values()) / 1e9) == 200, "even one sequence"


def test_korthikantis_estimate_is_34_t_d_and_5_h_t_squared_per_layer():
    """As they write it: s b h (34 + 5 a s / h) bytes, with s positions, b sequences, width h and a heads."""
    s, b, h, a = 2048, 4, 6144, 64
    config = GPTConfig(vocab_size=51_200, block_size=s, n_layer=48, n_head=a, n_embd=h)
    assert published_bytes(config, b) / 48 == pytest.approx(s * b * h * (34 + 5 * a * s / h))


def test_384_h100_do_380_pflops_in_bf16_and_25_7_in_fp32():
    h100 = {kind: listed_peak("NVIDIA H100 80GB HBM3", 132, kind) / 1e12 for kind in ("fp64", "fp32", "tf32", "bf16")}
    assert h100 == pytest.approx({"fp64": 67, "fp32": 67, "tf32": 494.7, "bf16": 989.4}, abs=0.11)
    assert round(384 * h100["bf16"] / 1e3) == 380
    assert round(384 * h100["fp32"] / 1e3, 1) == 25.7
    assert round(384 * 2 * h100["bf16"] / 1e3) == 760, "the data sheet's 1,979 TFLOP/s needs sparsity"


def test_zeros_figure_is_120_and_31_4_and_16_6_and_1_9_gb():
    gigabytes = [round(zero_bytes(7.5e9, 64, stage, k=12) / 1e9, 1) for stage in range(4)]
    assert gigabytes == [120.0, 31.4, 16.6, 1.9]


def small_network(ranks):
    """Bytes of parameters of an MLP 6-4-2 on this rank, under DDP and under fully_shard."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    copies, shards = (nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)) for _ in range(2))
    fully_shard(shards)
    return tensor_bytes(DistributedDataParallel(copies)).parameters, tensor_bytes(shards).parameters


def test_an_mlp_6_4_2_has_38_parameters_under_ddp_and_19_under_fsdp_on_each_of_2_ranks(pool):
    assert pool.run(2, small_network) == [(4 * 38, 4 * 19)] * 2


def test_with_llama_3s_interruptions_one_saves_every_19_minutes():
    """The lesson's own function: sqrt(2 C MTBF), Young 1974."""
    mtbf_s = 54 * 24 * 3600 / 419
    assert round(mtbf_s / 3600, 1) == 3.1
    assert round(of_lesson("11_when_it_breaks", "best_interval")(60, mtbf_s) / 60) == 19


def of_lesson(lesson, name):
    """A function that a lesson defines, without the rest of the lesson."""
    tree = ast.parse((SCRIPTS / f"{lesson}.py").read_text("utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    names = {"math": math}
    exec(compile(ast.Module([found], []), lesson, "exec"), names)
    return names[name]
