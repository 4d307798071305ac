"""Matrix products of 16-bit numbers whose sums have 32 bits."""

import torch


def wide_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x [..., a, b] @ y [..., b, c]: of bf16 or fp16 in float32, as the sums are; of other types in their own.

    On NVIDIA's GPUs the factors stay in 16 bits (`out_dtype` of torch.mm and torch.bmm); elsewhere torch has no such
    product, and they are widened first, which gives the same numbers up to the order of the sums.
    """
    if x.dtype not in (torch.bfloat16, torch.float16):
        return x @ y
    if not x.is_cuda or torch.version.hip:
        return x.float() @ y.float()
    if x.ndim == 2:
        return torch.mm(x, y, out_dtype=torch.float32)
    batch = x.shape[:-2]
    return torch.bmm(x.flatten(0, -3), y.flatten(0, -3), out_dtype=torch.float32).unflatten(0, batch)
