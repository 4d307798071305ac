"""What MFU is made of: the arithmetic that a token costs, and what vendors state that a device can do.

    flops_per_token(config)                                 # operations of forward and backward, by formula
    dense_peak(device, "bf16")                              # FLOP/s without sparsity; None: not in the table
    listed_peak("NVIDIA H100 80GB HBM3", 132, "bf16")       # the same by name and number of compute units

MFU, model FLOPs utilisation (Chowdhery et al. 2022, PaLM, appendix B), is flops_per_token x tokens/s / peak. What a
device does, `timing.gemm_peak` measures.

Shapes: T positions, V tokens in the vocabulary, D width, N layers, H heads of size E = D / H.
"""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Vendors' peaks in TFLOP/s, dense: where a data sheet gives only "with sparsity", half of it. Matrix units where the
# type has them. Columns: name as torch says it, compute units (a slice of a device, or another cut of the chip, has
# others), fp64, fp32, tf32, fp16, bf16.
PEAKS = (
    # NVIDIA H100 Tensor Core GPU Architecture (white paper, 2022); H100 data sheet (2024) for NVL
    (r"NVIDIA H100 80GB HBM3", 132, 66.9, 66.9, 494.7, 989.4, 989.4),
    (r"NVIDIA H100 PCIe", 114, 51.2, 51.2, 378, 756, 756),
    (r"NVIDIA H100 NVL", 132, 60, 60, 417.5, 835.5, 835.5),
    # NVIDIA H200 data sheet (2024): the H100's chip with more memory
    (r"NVIDIA H200", 132, 66.9, 66.9, 494.7, 989.4, 989.4),
    (r"NVIDIA H200 NVL", 132, 60, 60, 417.5, 835.5, 835.5),
    # NVIDIA GH200 Grace Hopper Superchip data sheet (2023)
    (r"NVIDIA GH200 \w+( HBM3e)?", 132, 67, 67, 494, 990, 990),
    # NVIDIA HGX B200, Blackwell data sheet (2025), per GPU
    (r"NVIDIA B200", 148, 37, 75, 1100, 2250, 2250),
    # NVIDIA A100 data sheet (2021)
    (r"(NVIDIA )?A100-(SXM4|PCIE)-\d+GB|NVIDIA A100 80GB PCIe", 108, 19.5, 19.5, 156, 312, 312),
    # NVIDIA V100 data sheet (2020); it has no bf16
    (r"(Tesla )?V100-SXM2-\d+GB", 80, 7.8, 15.7, None, 125, None),
    (r"(Tesla )?V100-PCIE-\d+GB", 80, 7.0, 14.0, None, 112, None),
    (r"(Tesla )?V100S-PCIE-\d+GB", 80, 8.2, 16.4, None, 130, None),
    # AMD Instinct MI250X data sheet (2021): 383 TFLOP/s in fp16 on two dies, each of which is a device
    (r"AMD Instinct MI250X", 110, 47.85, 47.85, None, 191.5, 191.5),
    # AMD Instinct MI300X data sheet (2023)
    (r"AMD Instinct MI300X( VF)?", 304, 163.4, 163.4, 653.7, 1307.4, 1307.4),
)
KINDS = ("fp64", "fp32", "tf32", "fp16", "bf16")
# Intel Data Center GPU Max 1550: Jiang, Hot Chips 34 (2022), for 1,024 vector engines on two stacks at 1.6 GHz. A stack
# is a device by default and has 512 engines, Aurora's have 448: the peak is in proportion.
MAX_1550 = (52, 52, 419, 839, 839)
MAX_1550_ENGINES = 1024


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
    if re.fullmatch(r"Intel\(R\) Data Center GPU Max 1550", name):
        return dict(zip(KINDS, MAX_1550, strict=True))[kind] * 1e12 * units / MAX_1550_ENGINES
    for pattern, listed_units, *tflops in PEAKS:
        if re.fullmatch(pattern, name) and units == listed_units:
            peak = dict(zip(KINDS, tflops, strict=True))
            if kind == "tf32" and peak["tf32"] is None:
                kind = "fp32"
            return peak[kind] and peak[kind] * 1e12
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
