"""What MFU is made of: the arithmetic that a token costs, and what vendors state that a device can do (gpus.toml).

    flops_per_token(config)                                 # operations of forward and backward, by formula
    dense_peak(device, "bf16")                              # FLOP/s without sparsity; None: not in the table
    listed_peak("NVIDIA H100 80GB HBM3", 132, "bf16")       # the same by name and number of compute units

MFU, model FLOPs utilisation (Chowdhery et al. 2022, PaLM, appendix B), is flops_per_token x tokens/s / peak. What a
device does, `timing.gemm_peak` measures.

Shapes: T positions, V tokens in the vocabulary, D width, N layers, H heads of size E = D / H.
"""

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    import torch


class Gpu(BaseModel):
    """A row of gpus.toml: what a vendor states of a device."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str  # a regular expression
    units: PositiveInt
    tflops: dict[Literal["fp64", "fp32", "tf32", "fp16", "bf16"], PositiveFloat]
    proportional: bool = False  # a slice with fewer units does as many of these


GPUS = [Gpu(**row) for row in tomllib.loads(Path(__file__).with_name("gpus.toml").read_text("utf-8"))["gpu"]]


def dense_peak(device: "torch.device", precision: str) -> float | None:
    """The device's dense peak in FLOP/s for matrix products in `precision`, or None where no vendor's number is known.

    `precision`: fp64, fp32, bf16, fp16. fp32 means TF32 where torch is allowed to use it. A CPU is never known.
    """
    if device.type == "cpu":
        return None
    import torch  # late: who asks by name needs none

    properties = torch.get_device_module(device).get_device_properties(device)
    units = getattr(properties, "multi_processor_count", None) or getattr(properties, "max_compute_units", None)
    if precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        precision = "tf32"
    return listed_peak(properties.name, units, precision)


def listed_peak(name: str, units: int, kind: str) -> float | None:
    """FLOP/s of a device by its name and number of compute units, None if the table has no such device or kind."""
    for gpu in GPUS:
        if re.fullmatch(gpu.name, name) and (gpu.proportional or units == gpu.units):
            tflops = gpu.tflops.get("fp32" if kind == "tf32" and "tf32" not in gpu.tflops else kind)
            return tflops and tflops * 1e12 * (units / gpu.units if gpu.proportional else 1)
    return None


def device_name(device: "torch.device") -> str:
    """What torch calls the device: "NVIDIA H200", "cpu"."""
    if device.type == "cpu":
        return "cpu"
    import torch

    return torch.get_device_module(device).get_device_name(device)


def flops_per_token(config) -> int:
    """Floating-point operations per trained token of a GPT: its matrix products, forward and backward, exactly.

    6 (12 N D^2 + V D) + 12 N D T. Each weight of a matrix is multiplied and added once in the forward pass (2
    operations) and twice in the backward pass (4). Attention's two products with T positions cost 4 D T per layer
    forward and twice that backward. This is PaLM's 6N + 12 L H Q T (appendix B) with N = the weights that are in a
    matrix product. As there, the causal mask saves nothing, and recomputed activations do not count twice. Left out:
    biases, norms, softmax, GELU, the loss, the look-up of embeddings, and the optimizer.
    """
    N, D, V, T = config.n_layer, config.n_embd, config.vocab_size, config.block_size
    return 6 * (12 * N * D**2 + V * D) + 12 * N * D * T
