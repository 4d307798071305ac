"""Context parallelism: a group's ranks share each sequence, and keys and values are passed round a ring.

    at_s = zig_zag(T, n, rank)                                   # this rank's positions
    out = ring_attention(q, k, v, group)                         # of them; causal; all ranks of the group
    part = share_of_context(ids_BT, targets_BT, separator, group)
    logits_BsV, loss = model(*part)                              # `loss` is the mean over this rank's positions

Norms, MLPs and the loss look at one position at a time. Only attention needs the other ranks' keys: a rank works on
the block that it has while the next one arrives (Liu et al. 2023, Ring Attention). The forward keeps the output and the
log of each query's sum. The backward computes the scores again; gradients of keys and values travel with them, and one
more message brings them home. Lesson 09 builds all of it.

In zig-zag order a rank has two of 2 n equal pieces of a sequence, one from the front and its mirror image from the
back. Of another rank's block it then needs exactly half of the query-key pairs, so that all have as much to do.

Factors are as wide as the model computes, scores and sums have float32 at least (see `gpt.products`). Scores of one
block are whole for a moment, B h s s numbers, and in the backward their gradients too: a fused kernel would not hold
them.

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
        with torch.autocast(q.device.type, enabled=False):
            kv, wide = torch.stack([k, v]), torch.promote_types(q.dtype, torch.float32)
            # nothing seen yet: the largest is finite, so that no difference is inf - inf
            largest = torch.full_like(q[..., :1], torch.finfo(wide).min, dtype=wide)
            total, weighted = torch.zeros_like(largest), torch.zeros_like(q, dtype=wide)
            for step in range(n):
                owner = (me - step) % n
                arrive = _pass_on(kv, group) if step < n - 1 else None
                rows, columns = _meeting(me, owner, q.shape[-2])
                state = [x[..., rows, :] for x in (largest, total, weighted)]
                keys, values = (x[..., columns, :] for x in kv)
                scores = _scores(q[..., rows, :], keys, rows, columns, me, owner, documents)
                _absorb(state, scores, values)
                if arrive:
                    kv = arrive()
            out, log_sums = (weighted / total).to(q.dtype), largest + total.log()
        # heads contiguous in memory, as the next linear layer needs them, so that it makes no copy
        out = out.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.group, ctx.documents = group, documents
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out):
        q, k, v, out, log_sums = ctx.saved_tensors
        group, n, me = ctx.group, ctx.group.size(), ctx.group.rank()
        with torch.autocast(q.device.type, enabled=False):
            kv, wide = torch.stack([k, v]), log_sums.dtype
            delta = (d_out.to(wide) * out).sum(-1, keepdim=True)  # per query, and already over all keys
            d_q, d_kv = torch.zeros_like(q, dtype=wide), torch.zeros_like(kv, dtype=wide)
            gradients_arrive = None
            for step in range(n):
                owner = (me - step) % n
                arrive = _pass_on(kv, group) if step < n - 1 else None
                rows, columns = _meeting(me, owner, q.shape[-2])
                queries, given = q[..., rows, :], d_out[..., rows, :]
                keys, values = (x[..., columns, :] for x in kv)
                scores = _scores(queries, keys, rows, columns, me, owner, ctx.documents)
                p = scores.sub_(log_sums[..., rows, :]).exp_()
                d_scores = _times(given, values.mT).sub_(delta[..., rows, :]).mul_(p)
                d_scores, p = d_scores.to(q.dtype), p.to(q.dtype)
                d_q[..., rows, :] += _times(d_scores, keys)
                if gradients_arrive:
                    d_kv = gradients_arrive()
                d_kv[0][..., columns, :] += wide_product(d_scores.flatten(2, 3).mT, queries.flatten(2, 3))
                d_kv[1][..., columns, :] += wide_product(p.flatten(2, 3).mT, given.flatten(2, 3))
                if n > 1:  # pass the keys on; after the last step, back to their owner
                    gradients_arrive = _pass_on(d_kv, group)
                if arrive:
                    kv = arrive()
            if gradients_arrive:
                d_kv = gradients_arrive()
            for gradient in (d_q, d_kv[0]):
                gradient *= q.shape[-1] ** -0.5
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


def _scores(q, k, rows, columns, me, owner, documents):
    """Return scores [B, g, h / g, rows, columns], -inf for keys in the future or in another document."""
    scores = _times(q, k.mT).mul_(q.shape[-1] ** -0.5)
    if owner == me:  # both ascend
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(future, -math.inf)
    if documents is not None:
        apart = documents[me][:, None, None, rows, None] != documents[owner][:, None, None, None, columns]
        scores.masked_fill_(apart, -math.inf)
    return scores


def _absorb(state, scores, values):
    """Take a block of scores and values into the state, in place: online softmax (Milakov and Gimelshein 2018)."""
    largest, total, weighted = state
    new = torch.maximum(largest, scores.amax(-1, keepdim=True))
    shrink, p = (largest - new).exp(), scores.sub_(new).exp_()
    largest.copy_(new)
    total.mul_(shrink).add_(p.sum(-1, keepdim=True))
    weighted.mul_(shrink).add_(_times(p.to(values.dtype), values))


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
