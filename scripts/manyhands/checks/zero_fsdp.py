"""Checks of lesson 06: shares, ZeRO's movements, the global norm, predicted bytes, a model that is never whole, two levels.

The right answers are known without communicating: gradients are drawn from seeds that say the rank, so that each rank
knows all of them, and the full models of build C and exercise 2 are small enough for a reference. Everything is in the
CPU's memory, where the trial group can send. What builds A to C are judged by stands in `shards`.
"""

import operator

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from manyhands.checks import Wrong, exercise, shards
from manyhands.checks.never_whole import Peak, judge_sharded, stack
from manyhands.checks.values import plain
from manyhands.measure import wire

CLOSE = 1e-10


@exercise("A", "your share of the row")
def my_share(answer, ranks=None):
    """`answer(row_P, n, rank)` is the rank's piece of the row, padded and cut in n, in memory of its own."""
    for length, n in ((38, 2), (38, 4), (40, 4), (7, 3), (3, 5), (9, 1)):
        before = torch.arange(1, length + 1, dtype=torch.float64)
        for rank in range(n):
            row_P = before.clone()
            shards.judge_share(answer(row_P, n, rank), row_P, before, n, rank)


@exercise("B", "hand in the gradients")
def reduce_scatter(answer, ranks):
    """`answer(unit)` leaves the mean of this rank's piece in `unit.share_p.grad`, and no other gradient, for 1 P."""
    n, rank = ranks.world_size, ranks.rank
    unit = shards.unit_with_gradients(n, rank)
    before = unit.whole_P.clone()
    with wire.watch() as seen:
        answer(unit)
    shards.judge_reduced(unit, before, seen, n, rank)


@exercise("C", "gather and free at the right moments")
def gather_when_needed(answer, ranks):
    """`answer(unit, modules, stays)` hooks a freed unit to its modules; a step gathers little, and gives one process's gradients."""
    n, rank = ranks.world_size, ranks.rank
    net = shards.Net()
    parts = shards.freed_units(net, n, rank)
    for unit, modules in parts.values():
        answer(unit, modules, modules == [net])
    units = {name: unit for name, (unit, _) in parts.items()}
    with wire.watch() as seen, shards.Watching(units) as watching:
        loss = net(shards.rows_of_data(rank))
        shards.judge_after_forward(units)
        watching.phase = "backward"
        loss.backward()
    shards.judge_after_backward(units, seen, watching, n, rank)


@exercise("D", "clip by the global norm")
def clip_by_global_norm(answer, ranks):
    """`answer(shares, max_norm)` scales every share's gradient by one factor, and returns the norm of all of them."""
    n, rank = ranks.world_size, ranks.rank
    norm = _length([g for r in range(n) for g in _share_gradients(r)])
    for max_norm, case in ((0.1 * norm, "a tenth of the norm"), (2 * norm, "twice the norm")):
        shares = _shares(_share_gradients(rank))
        with wire.watch() as seen:
            given = answer(shares, max_norm.item())
        _judge_norm(given, norm, _share_gradients, n, rank)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1)
        _judge_clipped(shares, _share_gradients(rank), factor, case)
    shares = _shares([None if g is None else 0.0 * g for g in _share_gradients(rank)])
    given = answer(shares, 1.0)
    if any(not p.grad.isfinite().all() for p in shares if p.grad is not None):
        raise Wrong("gradients of zeros became nan: the norm is 0 there; add 1e-6 to it before you divide by it")
    if not abs(_number(given, "the norm")) <= CLOSE:
        raise Wrong(f"the norm of gradients of zeros is 0, not {float(given):.4g}")
    _judge_cost(seen, n)
    _judge_a_rank_without_gradients(answer, n, rank)


@exercise(1, "the bytes of a wrapping")
def predict(answer, ranks=None):
    """`answer(sizes, n)` is (held, whole, gathers, handed over) of fp32, AdamW, ZeRO-3, the root last."""
    cases = [
        ([320, 320, 80], 5),
        ([197_888] * 4 + [25_216], 4),
        ([201_400_000] * 32 + [271_500_000], 20),
        ([24, 240, 48, 12], 12),
        ([96], 4),  # the root alone
    ]
    names = ("bytes held at rest", "bytes whole at once", "number of all-gathers", "bytes handed over")
    for sizes, n in cases:
        given = _parts(answer(list(sizes), n), 4, "four numbers: held, whole, gathers, handed over")
        right = _bytes_of(sizes, n)
        for name, mine, wanted in zip(names, given, right, strict=True):
            mine = _number(mine, f"the {name}")
            if not abs(mine - wanted) <= 1e-9 * wanted:
                case = f"for units of {_short(sizes)} parameters, the last of them the root, on {n} ranks"
                raise Wrong(f"{case} the {name} should be {wanted:,}, not {mine:,.12g}{_hint(name, mine, sizes, n)}")


@exercise(2, "never build the whole model", timeout_s=20.0)
def sharded_from_meta(answer, ranks):
    """`answer(make, mesh)` returns a sharded model with the full model's numbers, of which it never held more than a bit."""
    n, rank = ranks.world_size, ranks.rank
    full = stack()
    torch.manual_seed(7)
    for p in full.parameters():
        p.data.normal_(std=0.02)
    expected = {name: p.detach() for name, p in full.named_parameters()}
    whole = sum(p.nbytes for p in expected.values())
    largest = max(sum(p.nbytes for p in layer.parameters()) for layer in full)
    shares = sum(-(-len(p) // n) * p[0].nbytes for p in expected.values())
    mesh = init_device_mesh("cpu", (n,))
    torch.manual_seed(1)
    default = torch.get_default_device()
    try:
        with Peak() as held:
            model = answer(stack, mesh)
        _set_default_device(default)
        judge_sharded(model, expected, n, rank)
    finally:
        # DTensor remembers results together with their mesh, and an equal mesh of the lesson stands for other groups
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _set_default_device(default)
        _clear_sharding_prop_cache()
    limit = shares + 2 * largest
    if held.peak > limit:
        raise Wrong(
            f"the numbers are right, but at one moment you held {held.peak:,} bytes where shares and two layers are "
            f"{limit:,} (the whole model is {whole:,}): build it under torch.device('meta'), shard, then draw one "
            "weight at a time"
        )


def _set_default_device(device):
    """An answer may have left "meta", on which nobody could tell the others a verdict."""
    if torch.get_default_device() != device:
        torch.set_default_device(None if device.type == "cpu" else device)


@exercise(3, "two nodes of four")
def hybrid(answer, ranks=None):
    """`answer(num_nodes, per_node)` is (groups that shard, groups of copies, share that crosses between nodes)."""
    for num_nodes, per_node in ((2, 4), (2, 2), (3, 4), (4, 1)):
        what = "three things: the groups that shard, the groups of copies, the share between nodes"
        shard, copies, share = _parts(answer(num_nodes, per_node), 3, what)
        nodes = [list(range(node * per_node, (node + 1) * per_node)) for node in range(num_nodes)]
        across = [list(group) for group in zip(*nodes, strict=True)]
        case = f"{num_nodes} nodes of {per_node}"
        shard, copies = (_groups(name, groups, case) for name, groups in (("shard", shard), ("copy", copies)))
        _judge_groups(shard, copies, nodes, across, case)
        share = _number(share, f"{case}: the share between nodes")
        if not abs(share - 1 / per_node) <= 1e-9:
            why = {1.0: "the reduce-scatter in the node comes first, so each rank has only its share to send"}
            raise Wrong(
                f"{case}: a rank hands over 1/{per_node} of the gradient between nodes, not {share:.4g}: "
                + why.get(share, "what it hands over is its share, and the shares of a node are the whole")
            )


# ---- what came back ----


def _number(given, name):
    """What came back as a float, from any kind of one real number; raises Wrong, with its name, if it is none."""
    try:
        if not isinstance(given, (str, bytes, bool)):
            return float(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor of several numbers
        pass
    raise Wrong(f"{name} should be a number, not {plain(given)}; return a number")


def _parts(given, count, what):
    """What came back as a list of `count` parts; raises Wrong, which says `what` they are, if it is something else."""
    given = _listed(given)
    if isinstance(given, (tuple, list)) and len(given) == count:
        return given
    raise Wrong(f"return {what}; what came back is {plain(given)}")


def _listed(given):
    """An array or a tensor as a list; all else as it is."""
    return given.tolist() if isinstance(given, (np.ndarray, torch.Tensor)) else given


# ---- build D ----


def _share_gradients(rank):
    """What rank `rank` holds: shares of other lengths on each, an empty one, and one without a gradient."""
    draw = torch.Generator().manual_seed(60 + rank)
    gradients = [torch.randn(length, generator=draw, dtype=torch.float64) * (1 + rank) for length in (7, 3 + 2 * rank)]
    return [*gradients, torch.zeros(0, dtype=torch.float64), None]


def _shares(gradients):
    """Parameters of ones, of the gradients' lengths and dtypes; None is a parameter without a gradient."""
    dtype = next((g.dtype for g in gradients if g is not None), torch.float32)
    shares = []
    for gradient in gradients:
        share = nn.Parameter(torch.ones(5 if gradient is None else len(gradient), dtype=dtype))
        share.grad = None if gradient is None else gradient.clone()
        shares.append(share)
    return shares


def _length(gradients):
    """The norm of all of them together, those that are None left out."""
    return torch.stack([g.square().sum() for g in gradients if g is not None]).sum().sqrt()


def _judge_a_rank_without_gradients(answer, n, rank):
    """The last rank has none at all. In float32, which is what a new tensor is made of where no gradient says more."""

    def gradients_of(r):
        return [None, None] if r == n - 1 else [g if g is None else g.float() for g in _share_gradients(r)]

    mine = gradients_of(rank)
    shares = _shares(mine)
    here = "where this rank has no gradient at all, "
    with wire.watch() as seen:
        try:
            given = answer(shares, 1e-3)
        except NotImplementedError:
            raise
        except Exception as error:
            if rank < n - 1 or seen.calls:  # it may be the echo of what another rank did
                raise
            said = ": ".join([type(error).__name__, *str(error).split("\n")[:1]]).removesuffix(": ")
            raise Wrong(f"{here}your code raised {said}") from None
    if rank == n - 1 and n > 1 and not seen.calls:
        raise Wrong(
            f"{here}it made no call, and the other {n - 1} wait for it: all ranks must call all_reduce, also with a sum of 0"
        )
    others = [g for r in range(n - 1) for g in gradients_of(r)]
    norm = _length(others).item() if others else 0.0
    if not abs(_number(given, "the norm") - norm) <= 1e-5 * norm:
        raise Wrong(
            f"where rank {n - 1} has no gradient at all, the norm of all gradients is {norm:.4f}, not {float(given):.4g}"
        )
    case = f"{1e-3:g}, and rank {n - 1} had no gradient at all"
    _judge_clipped(shares, mine, torch.tensor(1e-3 / (norm + 1e-6)).clamp(max=1), case, accuracy=1e-4)


def _judge_norm(given, norm, gradients_of, n, rank):
    if given is None:
        raise Wrong("nothing came back: return the norm from before clipping")
    given, norm = _number(given, "the norm"), float(norm)
    if abs(given - norm) <= CLOSE * norm:
        return
    lengths = [_length(gradients_of(r)).item() for r in range(n)]
    each = [g.norm().item() for r in range(n) for g in gradients_of(r) if g is not None]
    for value, why in {
        lengths[rank]: "that is the norm of this rank's shares alone; the others' squares belong to it",
        sum(lengths): "that is the sum of the ranks' norms; their squares add up, and the root comes after the sum",
        norm**2: "that is its square; the root is missing",
        sum(each): "that is the sum of the shares' norms; add up squares",
        norm / n**0.5: "the squares were averaged over the ranks; they add up",
        max(lengths): "that is the norm of the rank that has the longest; the others' squares belong to it",
    }.items():
        if abs(given - value) <= CLOSE * norm:
            raise Wrong(f"the norm of all gradients is {norm:.4f}, not {given:.4f}: {why}")
    if abs(given - norm) <= 1e-5 * norm:
        raise Wrong("the norm is right to float32's accuracy only; add up in the dtype of the shares, here float64")
    raise Wrong(f"the norm of all gradients, before clipping, is {norm:.4f}, not {given:.4f}")


def _judge_clipped(shares, before, factor, case, accuracy=1e-6):
    if any((p.grad is None) != (g is None) for p, g in zip(shares, before, strict=True)):
        raise Wrong("a share had no gradient and has one now, or lost it; leave None alone")
    if any(not torch.equal(p, torch.ones_like(p)) for p in shares):
        raise Wrong("the weights were changed; scale share.grad, and leave the shares themselves alone")
    if all(g is None for g in before):
        return
    mine = torch.cat([p.grad for p in shares if p.grad is not None])
    whole = torch.cat([g for g in before if g is not None])
    if torch.allclose(
        mine, factor.to(whole.dtype) * whole, rtol=accuracy, atol=0
    ):  # whether 1e-6 was added shows in zeros
        return
    if torch.equal(mine, whole):
        raise Wrong(f"the limit was {case}, and the gradients are as they were: scale share.grad in place")
    if factor == 1:
        raise Wrong(f"the limit was {case}, and the gradients were changed: scale only what is too long, never up")
    ratio = (mine.norm() / (factor * whole.norm())).item()
    raise Wrong(
        f"the limit was {case}, and this rank's gradients are {ratio:.4f} times as long as they should be: all ranks scale "
        "by one factor, max_norm / (the norm of all + 1e-6)"
    )


def _judge_cost(seen, n):
    if n == 1:
        return
    sent, calls = seen.payload_bytes(), [call.op for call in seen.calls]
    if sent > 8 or len(calls) > 1:
        raise Wrong(
            f"norm and gradients are right, but {sent} bytes were handed over in {len(calls)} call{'s' if len(calls) > 1 else ''} "
            f"({', '.join(sorted(set(calls)))}); one all-reduce of one number is enough: the sum of squares"
        )


# ---- exercise 1 ----


def _bytes_of(sizes, n):
    *inner, root = sizes
    total = sum(sizes)
    return (
        16 * total // n,
        4 * (root + max(inner, default=0)),
        2 * len(inner) + 1,
        4 * (2 * sum(inner) + root) + 4 * total,
    )


def _short(sizes):
    return f"{sizes[0]:,} (x {len(sizes) - 1}) and {sizes[-1]:,}" if len(set(sizes)) == 2 and len(sizes) > 3 else sizes


def _hint(name, mine, sizes, n):
    *inner, root = sizes
    total, most = sum(sizes), max(sizes)
    hints = {
        "bytes held at rest": {
            16 * total: "that is every rank's under DDP; all of it is cut by n",
            4 * total // n: "those are the weights; gradients and two moments belong to it",
            8 * total // n: "weights and gradients; Adam's two moments belong to it",
            12 * total // n: "count again: weights, gradients, and two moments, 4 bytes each",
            4 * total + 12 * total // n: "the weights are cut as well: this is ZeRO-3",
        },
        "bytes whole at once": {
            4 * max(inner, default=0): "the root stays whole from forward to backward, beside the unit that computes",
            4 * most: "the root stays whole from forward to backward, beside the largest unit",
            4 * total: "units are freed when they have computed: at most one, and the root",
            4 * (root + max(inner, default=0)) // n: "what is gathered is whole, not a share",
        },
        "number of all-gathers": {
            2 * len(sizes): "the root is not gathered twice: it stays from forward to backward",
            len(sizes): "a unit was freed after forward, so backward has to gather it again",
        },
        "bytes handed over": {
            12 * total: "the root is not gathered twice: it stays from forward to backward",
            8 * total: "units are gathered for forward and again for backward",
            4 * (2 * sum(inner) + root): "the reduce-scatters of the gradients belong to it",
            _bytes_of(sizes, n)[3] // n: "the payload of a collective is the whole row, not a share of it",
        },
    }[name]
    return f": {hints[mine]}" if mine in hints else ""


# ---- exercise 3 ----


def _groups(name, groups, case):
    try:
        return [[operator.index(rank) for rank in group] for group in _listed(groups)]
    except TypeError:
        raise Wrong(f"{case}: the {name} groups are no lists of lists of ranks, but {plain(groups)}") from None


def _judge_groups(shard, copies, nodes, across, case):
    if shard == nodes and copies == across:
        return
    everyone = sorted(rank for node in nodes for rank in node)
    for name, groups in (("groups that shard", shard), ("groups of copies", copies)):
        if sorted(rank for group in groups for rank in group) != everyone:
            raise Wrong(f"{case}: the {name} are {groups}; every rank is in exactly one of them")
    if shard == across and copies == nodes:
        raise Wrong(
            f"{case}: the two are the wrong way round: gathering is the frequent traffic, so shard within a node"
        )
    for name, groups, right in (("groups that shard", shard, nodes), ("groups of copies", copies, across)):
        if groups != right and sorted(map(sorted, groups)) == right:
            raise Wrong(f"{case}: the {name} are right, but not in order of rank: {right}, not {groups}")
    if shard != nodes:
        raise Wrong(f"{case}: shard within a node: {nodes}, not {shard}")
    raise Wrong(f"{case}: ranks that hold the same share, one of each node, are copies: {across}, not {copies}")
