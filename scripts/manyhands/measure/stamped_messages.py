"""Real messages that carry the virtual time at which they were sent (see `virtual_network`).

The payload travels through host memory, over gloo, behind eight bytes of time. The messages of a process group have to
be received in the order in which they were sent, as with any send and recv; those of another `tag` have an order of
their own.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

_STAMP = 8  # bytes of the time sent, ahead of each message's payload


@dataclass
class Sending:
    """A real message under way, and the buffer that must live until it was sent."""

    work: dist.Work
    buffer: torch.Tensor

    def wait(self):
        self.work.wait()


def post(tensor, dst, sent_s, group=None, tag=0):
    """Begin to send `tensor` to rank `dst` of the group, stamped with `sent_s`; returns a Sending to wait for."""
    stamp = torch.tensor([sent_s], dtype=torch.float64).view(torch.uint8)
    message = torch.cat([stamp, tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)])
    return Sending(dist.isend(message, group=group, tag=tag, group_dst=dst), message)


def take(tensor, src, group=None, tag=0):
    """Receive into `tensor` from rank `src` of the group; returns the virtual time at which it was sent."""
    message = torch.empty(_STAMP + payload_bytes(tensor), dtype=torch.uint8)
    dist.recv(message, group=group, tag=tag, group_src=src)
    payload = message[_STAMP:].clone().view(tensor.dtype)
    tensor.copy_(payload.view(tensor.shape))
    return message[:_STAMP].view(torch.float64).item()


def payload_bytes(tensor):
    """Bytes of a message's content."""
    return tensor.numel() * tensor.element_size()
