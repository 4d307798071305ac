"""Context parallelism: a group's ranks share each sequence, and keys and values are passed round a ring.

    at_s = zig_zag(T, n, rank)                                   # this rank's positions
    out = ring_attention(q, k, v, group)                         # of them; causal; all ranks of the group
    part = share_of_context(ids_BT, targets_BT, separator, group)
    logits_BsV, loss = model(*part)                              # `loss` is the mean over this rank's positions

Norms, MLPs and the loss look at one position at a time. Only attention needs the other ranks' keys: a rank works on
the block that it has while the next one arrives (Liu et al. 2023, Ring Attention). Each block gives an output and the
log of each query's sum, by which outputs are weighed (Milakov and Gimelshein 2018); the forward keeps both. The
backward computes the scores again; gradients of keys and values travel with them, and one more message brings them
home. Lesson 09 builds all of it.

In zig-zag order a rank has two of 2 n equal pieces of a sequence, one from the front and its mirror image from the
back. Of another rank's block it then needs exactly half of the query-key pairs, so that all have as much to do.

On NVIDIA's GPUs since Ampere FlashAttention works on a block in 16 bits (Dao 2023), and holds no scores. Elsewhere, and
where documents are kept apart, factors are as wide as the model computes, scores and sums have float32 at least (see
`gpt.products`), and the scores of one block are whole for a moment, B h s s numbers, in the backward with their
gradients.

Shapes: B sequences, h heads of this rank, g of them with keys and values, T positions, s = T / n of this rank, K
numbers per head, n ranks. Inside the ring queries are [B, g, h / g, s, K]: those of a group see the same keys.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from manyhands.gpt.products import wide_product


def zig_zag(T: int, n: int, rank: int) -> torch.Tensor:
    """Return a rank's positions [T/n], ascending. Raise ValueError if T is not a multiple of 2 n."""
    if T % (2 * n):
        raise ValueError(f"{T} positions do not split into 2 x {n} equal pieces; use a multiple of {2 * n}")
    pieces = torch.arange(T).chunk(2 * n)
    return torch.cat([pieces[rank], pieces[2 * n - 1 - rank]])


def share_of_context(
    ids_BT: torch.Tensor, targets_BT: torch.Tensor, separator: int | None, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Callable[..., torch.Tensor]]:
    """Return this rank's arguments of `GPT.forward`: ids and targets [B, s], positions [s], attention. Local."""
    n, T = group.size(), ids_BT.shape[1]
    at = [zig_zag(T, n, rank).to(ids_BT.device) for rank in range(n)]
    documents = None
    if separator is not None:  # of all ranks: each has the whole sequence's ids
        document_BT = (ids_BT == separator).cumsum(1)
        documents = [document_BT[:, at_s] for at_s in at]
    own = at[group.rank()]
    return ids_BT[:, own], targets_BT[:, own], own, partial(ring_attention, group=group, documents=documents)


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup,
    documents: list[torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return causal attention [B, h, s, K] of this rank's queries over all keys. All ranks of `group` call it.

    Each holds its zig-zag share of the sequences. Keys and values may have fewer heads: [B, g, s, K]. `documents[r]`,
    [B, s], numbers the documents at the positions of rank r: a query sees the keys of its own one. None: all is one
    document.
    """
    return _Ring.apply(q.unflatten(1, (k.shape[1], -1)), k, v, group, documents).flatten(1, 2)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, group, documents):
        n, me = group.size(), group.rank()
        block, ctx.block_gradients = FLASH if _is_flash(q, documents) else PLAIN
        with torch.autocast(q.device.type, enabled=False):
            kv, wide = torch.stack([k, v]), torch.promote_types(q.dtype, torch.float32)
            sums = torch.zeros_like(q, dtype=wide)
            logs = torch.full_like(sums[..., :1], -math.inf)  # nothing is seen yet
            for step in range(n):
                owner = (me - step) % n
                arrive = _pass_on(kv, group) if step < n - 1 else None
                rows, columns = _meeting(me, owner, q.shape[-2])
                hidden = _hidden(rows, columns, me, owner, documents)
                keys, values = kv[..., columns, :]
                out, log = block(q[..., rows, :], keys, values, owner == me, hidden)
                new = torch.logaddexp(logs[..., rows, :], log)
                sums[..., rows, :] *= (logs[..., rows, :] - new).exp()
                sums[..., rows, :] += out * (log - new).exp()
                logs[..., rows, :] = new
                if arrive:
                    kv = arrive()
            out = sums.to(q.dtype)
        # heads contiguous in memory, as the next linear layer needs them, so that it makes no copy
        out = out.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
        ctx.save_for_backward(q, k, v, out, logs)
        ctx.group, ctx.documents = group, documents
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out):
        q, k, v, out, logs = ctx.saved_tensors
        group, n, me = ctx.group, ctx.group.size(), ctx.group.rank()
        with torch.autocast(q.device.type, enabled=False):
            kv = torch.stack([k, v])
            d_q, d_kv = torch.zeros_like(q, dtype=logs.dtype), torch.zeros_like(kv, dtype=logs.dtype)
            gradients_arrive = None
            for step in range(n):
                owner = (me - step) % n
                arrive = _pass_on(kv, group) if step < n - 1 else None
                rows, columns = _meeting(me, owner, q.shape[-2])
                hidden = _hidden(rows, columns, me, owner, ctx.documents)
                of_rows = [x[..., rows, :] for x in (d_out, q, out, logs)]
                keys, values = kv[..., columns, :]
                d_rows, *d_columns = ctx.block_gradients(*of_rows, keys, values, owner == me, hidden)
                d_q[..., rows, :] += d_rows
                if gradients_arrive:
                    d_kv = gradients_arrive()
                for own, more in zip(d_kv, d_columns, strict=True):
                    own[..., columns, :] += more
                if n > 1:  # pass the keys on; after the last step, back to their owner
                    gradients_arrive = _pass_on(d_kv, group)
                if arrive:
                    kv = arrive()
            if gradients_arrive:
                d_kv = gradients_arrive()
        return d_q.to(q.dtype), *d_kv.to(q.dtype), None, None


def _meeting(me, owner, s):
    """Return slices (this rank's queries, the owner's keys) of the pairs that the causal mask allows."""
    front, back, everything = slice(0, s // 2), slice(s // 2, s), slice(0, s)
    if owner == me:
        return everything, everything
    # an earlier rank's first piece precedes both of ours and its second follows both; a later rank's are between ours
    return (everything, front) if owner < me else (back, everything)


def _times(x, y):
    """x [B, g, h / g, rows, any] times y [B, g, any, columns]: the heads of a group see the same keys."""
    return wide_product(x.flatten(2, 3), y).unflatten(2, (x.shape[2], -1))


def _hidden(rows, columns, me, owner, documents):
    """Return which keys a query must not see for being in another document, or None."""
    if documents is None:
        return None
    return documents[me][:, None, None, rows, None] != documents[owner][:, None, None, None, columns]


# --- attention to a block of keys: by products, and by a kernel


def _scores(q, k, causal, hidden):
    """Return scores [B, g, h / g, rows, columns], -inf for keys in the future or hidden."""
    scores = _times(q, k.mT).mul_(q.shape[-1] ** -0.5)
    if causal:  # both ascend
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return scores if hidden is None else scores.masked_fill_(hidden, -math.inf)


def _plain(q, k, v, causal, hidden):
    """Return attention to these keys alone, and the logs of its sums, [..., rows, 1]: -inf where none is seen."""
    scores = _scores(q, k, causal, hidden)
    largest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)  # finite: no inf - inf
    p = scores.sub_(largest).exp_()
    total = p.sum(-1, keepdim=True)
    weighted = _times(p.to(v.dtype), v)
    return weighted.div_(total.clamp(min=torch.finfo(total.dtype).tiny)), largest + total.log()


def _plain_gradients(d_out, q, out, logs, k, v, causal, hidden):
    """Return gradients of q, k and v by this block; `out` and `logs` are over all keys."""
    scale = q.shape[-1] ** -0.5
    p = _scores(q, k, causal, hidden).sub_(logs).exp_()
    delta = (d_out.to(logs.dtype) * out).sum(-1, keepdim=True)
    d_scores = _times(d_out, v.mT).sub_(delta).mul_(p).to(q.dtype)
    q, d_out, by_key, p = (x.flatten(2, 3) for x in (q, d_out, d_scores, p.to(q.dtype)))
    return _times(d_scores, k) * scale, wide_product(by_key.mT, q) * scale, wide_product(p.mT, d_out)


def _is_flash(q, documents):
    if documents is not None or not q.is_cuda or torch.version.hip or q.element_size() != 2:
        return False
    return torch.cuda.get_device_capability(q.device) >= (8, 0) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _flash(q, k, v, causal, _):
    """Return what `_plain` does, by FlashAttention."""
    out, logs, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q.flatten(1, 2), k, v, 0.0, causal)
    return out.unflatten(1, q.shape[1:3]), logs.unflatten(1, q.shape[1:3])[..., None]


def _flash_gradients(d_out, q, out, logs, k, v, causal, _):
    """Return what `_plain_gradients` does, by FlashAttention."""
    d_out, queries, out = (x.flatten(1, 2) for x in (d_out, q, out))
    logs, seed = logs.flatten(1, 2).squeeze(-1).contiguous(), torch.zeros(2, dtype=torch.uint64, device=q.device)
    d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        d_out, queries, k, v, out, logs, None, None, q.shape[-2], k.shape[-2], 0.0, causal, seed, seed
    )  # fmt: skip
    return d_q.unflatten(1, q.shape[1:3]), d_k, d_v


PLAIN, FLASH = (_plain, _plain_gradients), (_flash, _flash_gradients)


def _pass_on(x, group):
    """Start sending `x` to the next rank; return a function that waits for the tensor of the previous one.

    `x` must stay as it is until then.
    """
    n, me = group.size(), group.rank()
    ahead, behind = (dist.get_global_rank(group, (me + step) % n) for step in (1, -1))
    x, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    operations = [dist.P2POp(dist.isend, x, ahead, group), dist.P2POp(dist.irecv, received, behind, group)]
    works = dist.batch_isend_irecv(operations)

    def arrived():
        for work in works:
            work.wait()
        return received

    return arrived
