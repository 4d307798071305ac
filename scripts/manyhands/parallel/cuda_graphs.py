"""Record forward and backward of a micro-batch as one CUDA graph: the host launches it once, not each kernel.

    recorded = Recorded(forward_backward, ids_bT, targets_bT)    # forward_backward adds to `.grad`, returns the loss
    loss = recorded(ids_bT, targets_bT)                          # the same kernels, on these ids

The kernels of a small model take less time than Python needs to launch them, so that the GPU idles. A graph replays the
recorded kernels: shapes and addresses are fixed, and gradients must stay attached. Dropout draws new masks in each
replay.
"""

from collections.abc import Callable

import torch

WARM_UP = 3  # calls before the recording, so that one-time compilation and allocation are not recorded


class Recorded:
    """A recorded `forward_backward(ids_bT, targets_bT)`, which must neither wait for the GPU nor allocate outside."""

    def __init__(self, forward_backward: Callable, ids_bT: torch.Tensor, targets_bT: torch.Tensor) -> None:
        self.batch = ids_bT.clone(), targets_bT.clone()
        device = ids_bT.device
        random_state = torch.cuda.get_rng_state(device)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                forward_backward(*self.batch)
        torch.cuda.current_stream(device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # NCCL's thread queries the GPU meanwhile
            self.loss = forward_backward(*self.batch)
        torch.cuda.set_rng_state(random_state, device)  # the first step draws the same numbers as without recording

    def __call__(self, ids_bT: torch.Tensor, targets_bT: torch.Tensor) -> torch.Tensor:
        for own, new in zip(self.batch, (ids_bT, targets_bT), strict=True):
            own.copy_(new)
        self.graph.replay()
        return self.loss.clone()
