"""Checks of lesson 06: shares, ZeRO's movements, the global norm, predicted bytes, a model that is never whole.

The right answers are known without communicating: gradients are drawn from seeds that say the rank, so that each rank
knows all of them, and the full models of build C and exercise 2 are small enough for a reference. Everything is in the
CPU's memory, where the trial group can send. A unit is like the lesson's own: its parameters are views of a padded row.
"""

import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyhands.checks import Wrong, exercise
from manyhands.checks.drawn import flat, normal
from manyhands.checks.expect import (
    FLOAT32,
    count,
    expect_equal,
    expect_number,
    expect_tensor,
    expect_traffic,
    expect_unchanged,
    number,
    plain,
    shown,
)
from manyhands.checks.witness import said
from manyhands.measure import wire

CLOSE = 1e-10


def _padded(row_P, n):
    """The row with the fewest zeros behind it that let n divide it."""
    return F.pad(row_P, (0, -len(row_P) % n))


def _small_storage(tensor, what):
    """Raise Wrong where a tensor is a view of a larger one, which stays in memory as long as it does."""
    held = tensor.untyped_storage().nbytes()
    if held > tensor.nbytes:
        raise Wrong(
            f"{what} is right, but a view of {held} bytes, all of which stay; have a tensor of {tensor.nbytes} bytes"
        )


# ---- build A ----


@exercise("A", "your share of the row")
def my_share(answer, ranks=None):
    """`answer(row_P, n, rank)` is the rank's piece of the row, padded and cut in n, in memory of its own."""
    for length, n in ((38, 2), (38, 4), (40, 4), (7, 3), (3, 5), (9, 1)):
        before_P = torch.arange(1, length + 1, dtype=torch.float64)
        for rank in range(n):
            row_P = before_P.clone()
            given = answer(row_P, n, rank)
            if row_P.shape == before_P.shape:
                expect_unchanged(row_P, before_P, "the row itself")
            case = f"for a row of {length} numbers on {count(n, 'rank')} the piece of rank {rank}"
            pieces = _padded(before_P, n).chunk(n)
            it_is = f"{count(len(pieces[0]), 'number')}, equally many on all ranks"
            expect_tensor(given, pieces[rank], case, _other_pieces(before_P, n, rank, given), it_is, close=0)
            if given.untyped_storage().data_ptr() == row_P.untyped_storage().data_ptr():
                raise Wrong(f"{case} is a view of the row: copy it")
            _small_storage(given, case)


def _other_pieces(before_P, n, rank, given):
    row_P, missing, size = _padded(before_P, n), -len(before_P) % n, len(before_P) // n
    pieces = row_P.chunk(n)
    slips = {
        f"{n} such pieces leave out the last {len(before_P) % n}; put zeros at the end first": (
            before_P[rank * size : (rank + 1) * size] if missing else None
        ),
        f"n divides {len(before_P)}, so no zeros are needed: -{len(before_P)} % {n} is 0": (
            None if missing else F.pad(before_P, (0, n)).chunk(n)[rank]
        ),
        "that is the whole row; keep this rank's piece": row_P,
        "you took every n-th number; a piece is numbers that follow each other": row_P[rank::n],
        "the zeros belong at the end of the row": F.pad(before_P, (missing, 0)).chunk(n)[rank],
        "pieces must be equally long on all ranks": before_P.tensor_split(n)[rank],
        **{f"that is the piece of rank {r}": piece for r, piece in enumerate(pieces) if r != rank},
    }
    if isinstance(given, torch.Tensor) and given.shape == pieces[rank].shape:
        slips["what fills the end up should be zeros"] = torch.where(pieces[rank] != 0, pieces[rank], given)
    # where n divides the row, some of these are no mistakes
    return {
        why: wrong_p for why, wrong_p in slips.items() if wrong_p is not None and not torch.equal(wrong_p, pieces[rank])
    }


# ---- build B ----

SHAPES = ((3, 5), (7,), (2, 2))  # of a unit's parameters: 26 numbers
NO_GRADIENT = 1  # the parameter that has none, on any rank


class Unit:
    """The lesson's unit: `parameters` are views of `whole_P`; `share_p` is a view of it too, or, `apart`, a copy."""

    def __init__(self, parameters, n, rank, apart=False):
        self.parameters = list(parameters)
        row_P = flat(self.parameters)
        self.padding = -len(row_P) % n
        self.whole_P = _padded(row_P, n).clone()
        parts = self.whole_P[: len(row_P)].split([p.numel() for p in self.parameters])
        for p, part in zip(self.parameters, parts, strict=True):
            p.data = part.view_as(p)
        share_p = self.whole_P.chunk(n)[rank]
        self.share_p = nn.Parameter(share_p.clone() if apart else share_p)

    def gradient_row(self):
        """The gradients in one row, padded; zeros for a parameter that has none."""
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        return F.pad(flat(found), (0, self.padding))

    @property
    def held_bytes(self):
        """Bytes in the row's storage: 0 while it is freed."""
        return self.whole_P.untyped_storage().nbytes()


@exercise("B", "hand in the gradients")
def reduce_scatter(answer, ranks):
    """`answer(unit)` leaves the mean of this rank's piece in `unit.share_p.grad`, and no other gradient, for 1 P."""
    n, rank = ranks.world_size, ranks.rank
    unit = _unit_with_gradients(n, rank)
    before_P = unit.whole_P.clone()
    with wire.watch() as seen:
        answer(unit)
    expect_unchanged(unit.whole_P, before_P, "the row of weights", ": leave the update to the optimizer")
    rows = [_unit_with_gradients(n, r).gradient_row() for r in range(n)]
    total_P = sum(rows)
    slips = {
        f"that is the sum over the ranks; divide by {n}": total_P,
        "that is the piece of this rank's own gradients; those of the others' rows belong to it": rows[rank],
        f"that is this rank's own piece divided by {n}; the others' are missing": rows[rank] / n,
        f"it was divided by {n} twice": total_P / n**2,
    }
    slips = {why: wrong_P.chunk(n)[rank] for why, wrong_P in slips.items()}
    pieces = (total_P / n).chunk(n)
    slips |= {
        f"that is the average of piece {r}, not of piece {rank}": piece for r, piece in enumerate(pieces) if r != rank
    }
    grad = unit.share_p.grad
    expect_tensor(grad, pieces[rank], "unit.share_p.grad", slips, "the average of this rank's piece", close=CLOSE)
    left = sum(p.grad.nbytes for p in unit.parameters if p.grad is not None)
    if left:
        raise Wrong(
            f"share_p.grad is right, but the parameters still hold {left} bytes of gradients, where the share is "
            f"{unit.share_p.nbytes}: set each p.grad to None"
        )
    _small_storage(grad, "share_p.grad")
    cure = "one reduce_scatter of the row, 1 P"
    expect_traffic(seen, "share_p.grad is right", cure, calls=1, volume=unit.whole_P.nbytes)


def _unit_with_gradients(n, rank):
    """A unit of the same weights on all ranks, with what backward left on `rank`: None for one parameter."""
    weights, draw = (
        [normal(66 + i, *shape) for i, shape in enumerate(SHAPES)],
        torch.Generator().manual_seed(660 + rank),
    )
    unit = Unit(map(nn.Parameter, weights), n, rank)
    for i, p in enumerate(unit.parameters):
        gradient = torch.randn(p.shape, generator=draw, dtype=torch.float64) * (1 + rank)
        p.grad = None if i == NO_GRADIENT else gradient
    return unit


# ---- build C ----


class Net(nn.Module):
    """A first and a last layer, which are the root's, and three blocks between them."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(6)
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        for p in self.double().parameters():
            p.data = 0.5 * torch.randn(p.shape, generator=draw, dtype=torch.float64)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x).square().mean()

    def freed_units(self, n, rank):
        """{name: (unit, modules)}, the root last, each with its row freed."""
        one, two, three = self.blocks
        inside, found = {p for block in self.blocks for p in block.parameters()}, {}
        for name, modules in (("block 0", [one]), ("the unit of blocks 1 and 2", [two, three]), ("the root", [self])):
            parameters = [p for module in modules for p in module.parameters() if modules != [self] or p not in inside]
            unit = Unit(parameters, n, rank, apart=True)
            unit.whole_P.untyped_storage().resize_(0)
            found[name] = unit, modules
        return found


@exercise("C", "gather and free at the right moments")
def gather_when_needed(answer, ranks):
    """`answer(unit, modules, stays)` hooks a freed unit to its modules; a step gathers little."""
    n, rank = ranks.world_size, ranks.rank
    net = Net()
    parts = net.freed_units(n, rank)
    for unit, modules in parts.values():
        answer(unit, modules, modules == [net])
    units = {name: unit for name, (unit, _) in parts.items()}
    with wire.watch() as seen, Watching(units) as watching:
        loss = net(normal(600 + rank, 4, 5))
        for name, unit in units.items():
            if name != "the root" and unit.held_bytes:
                raise Wrong(
                    f"after forward {name} is still whole, {unit.held_bytes} bytes: free it after its last module"
                )
        watching.phase = "backward"
        loss.backward()
    _judge_step(units, seen, watching, n, rank)


class Watching(TorchDispatchMode):
    """Raises Wrong where an operator uses a row that is freed, and keeps the most bytes of rows that were whole.

    Without it the process could end there: nothing lies under such a tensor.
    """

    def __init__(self, units):
        super().__init__()
        self.units, self.phase, self.most_bytes = units, "forward", 0
        self._rows = {unit.whole_P.untyped_storage()._cdata: name for name, unit in units.items()}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.most_bytes = max(self.most_bytes, sum(unit.held_bytes for unit in self.units.values()))
        if not operator._schema.name.endswith(("_like", "::detach", "::alias")):  # these read no number
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and tensor.numel():
                    self._look_at(tensor.untyped_storage())
        return operator(*args, **(kwargs or {}))

    def _look_at(self, storage):
        where = self._rows.get(storage._cdata)
        if where is not None and not storage.nbytes():
            first, last = ("first", "last") if self.phase == "forward" else ("last", "first")
            raise Wrong(
                f"in {self.phase}, {where} was used while its row has no memory: gather() it before the {self.phase} "
                f"of its {first} module, and free it after that of its {last}"
            )


def _judge_step(units, seen, watching, n, rank):
    """Raise Wrong unless each share has its mean gradient, all rows are freed, and nothing was gathered needlessly."""
    for name, unit in units.items():
        if unit.share_p.grad is None:
            raise Wrong(f"after backward {name}'s share has no gradient: reduce_in_backward(unit, ...) does that")
        if unit.held_bytes:
            raise Wrong(
                f"after backward {name} is still whole, {unit.held_bytes} bytes: free it `then`, after the reduction"
            )
    net = Net()
    for r in range(n):
        (net(normal(600 + r, 4, 5)) / n).backward()
    same = net.freed_units(n, rank)  # their parameters keep their gradients
    for name, unit in units.items():
        wanted = same[name][0].gradient_row().chunk(n)[rank]
        it_is = "that of one process: each row must be whole, with all its numbers, when its modules compute"
        expect_tensor(unit.share_p.grad, wanted, f"the gradient of {name}'s share", it_is=it_is, close=CLOSE)
    inner = [unit.whole_P.nbytes for name, unit in units.items() if name != "the root"]
    most = units["the root"].whole_P.nbytes + max(inner)
    if watching.most_bytes > most:
        raise Wrong(
            f"gradients are right, but at one moment {watching.most_bytes} bytes of rows were whole, where the root "
            f"and the largest unit are {most}: gather each unit for itself, when it is needed"
        )
    gathers, least = seen.count("all_gather"), 2 * len(inner) + 1
    if gathers > least:
        raise Wrong(
            f"gradients are right, but a step made {gathers} all-gathers where {least} do: each unit twice, and once "
            "the root, which stays"
        )


# ---- build D ----


@exercise("D", "clip by the global norm")
def clip_by_global_norm(answer, ranks):
    """`answer(shares, max_norm)` scales every share's gradient by one factor, and returns the norm of all of them."""
    n, rank = ranks.world_size, ranks.rank
    norm = _length([g for r in range(n) for g in _share_gradients(r)])
    for max_norm, case in ((0.1 * norm, "a tenth of the norm"), (2 * norm, "twice the norm")):
        shares = _shares(_share_gradients(rank))
        with wire.watch() as seen:
            given = answer(shares, max_norm.item())
        expect_number(
            given, norm.item(), "the norm of all gradients, before clipping,", slips=_other_norms(n, rank), rel=CLOSE
        )
        factor = (max_norm / (norm + 1e-6)).clamp(max=1)
        _judge_clipped(shares, _share_gradients(rank), factor, case)
    shares = _shares([None if g is None else 0.0 * g for g in _share_gradients(rank)])
    given = answer(shares, 1.0)
    if any(not p.grad.isfinite().all() for p in shares if p.grad is not None):
        raise Wrong("gradients of zeros became nan: the norm is 0 there; add 1e-6 to it before you divide by it")
    expect_number(given, 0, "the norm of gradients of zeros", close=CLOSE)
    if n > 1:
        expect_traffic(seen, "norm and gradients are right", "add up one sum of squares", calls=1, payload=8)
    _judge_a_rank_without_gradients(answer, n, rank)


def _share_gradients(rank):
    """What rank `rank` holds: shares of other lengths on each, an empty one, and one without a gradient."""
    draw = torch.Generator().manual_seed(60 + rank)
    found = [torch.randn(length, generator=draw, dtype=torch.float64) * (1 + rank) for length in (7, 3 + 2 * rank)]
    return [*found, torch.zeros(0, dtype=torch.float64), None]


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


def _other_norms(n, rank):
    lengths = [_length(_share_gradients(r)).item() for r in range(n)]
    norm = sum(length**2 for length in lengths) ** 0.5
    each = sum(g.norm().item() for r in range(n) for g in _share_gradients(r) if g is not None)
    return {
        "that is the norm of this rank's shares alone; the others' squares belong to it": lengths[rank],
        "that is the sum of the ranks' norms; their squares add up, and the root comes after the sum": sum(lengths),
        "that is its square; the root is missing": norm**2,
        "that is the sum of the shares' norms; add up squares": each,
        "the squares were averaged over the ranks; they add up": norm / n**0.5,
        "that is the norm of the rank that has the longest; the others' squares belong to it": max(lengths),
    }


def _judge_clipped(shares, before, factor, case, accuracy=1e-6):
    if any((p.grad is None) != (g is None) for p, g in zip(shares, before, strict=True)):
        raise Wrong("a share had no gradient and has one now, or lost it; leave None alone")
    if any(not torch.equal(p, torch.ones_like(p)) for p in shares):
        raise Wrong("the weights were changed; scale share.grad, and leave the shares themselves alone")
    if all(g is None for g in before):
        return
    mine, own = flat(p.grad for p in shares if p.grad is not None), flat(g for g in before if g is not None)
    wanted = factor.to(own.dtype) * own
    if torch.allclose(mine, wanted, rtol=accuracy, atol=0):  # whether 1e-6 was added shows in zeros
        return
    if torch.equal(mine, own):
        raise Wrong(f"the limit was {case}, and the gradients are as they were: scale share.grad in place")
    if factor == 1:
        raise Wrong(f"the limit was {case}, and the gradients were changed: scale only what is too long, never up")
    raise Wrong(
        f"the limit was {case}, and this rank's gradients are {(mine.norm() / wanted.norm()).item():.4f} times as long "
        "as they should be: all ranks scale by one factor, max_norm / (the norm of all + 1e-6)"
    )


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
            raise Wrong(f"{here}your code raised {said(error)}") from None
    if rank == n - 1 and n > 1 and not seen.calls:
        raise Wrong(
            f"{here}it made no call, and the other {n - 1} wait for it: all must call all_reduce, also with a sum of 0"
        )
    others = [g for r in range(n - 1) for g in gradients_of(r)]
    norm = _length(others).item() if others else 0.0
    expect_number(given, norm, f"where rank {n - 1} has no gradient at all, the norm of all gradients", rel=FLOAT32)
    case = f"{1e-3:g}, and rank {n - 1} had no gradient at all"
    _judge_clipped(shares, mine, torch.tensor(1e-3 / (norm + 1e-6)).clamp(max=1), case, accuracy=1e-4)


# ---- exercise 1 ----


@exercise(1, "the bytes of a wrapping")
def predict(answer, ranks=None):
    """`answer(sizes, n)` is (held, whole, gathers, communicated) of fp32, AdamW, ZeRO-3, the root last."""
    for sizes, n in (
        ([320, 320, 80], 5),
        ([197_888] * 4 + [25_216], 4),
        ([201_400_000] * 32 + [271_500_000], 20),
        ([24, 240, 48, 12], 12),
        ([96], 4),  # the root alone
    ):
        given = plain(answer(list(sizes), n))
        what = _quantities(sizes, n)
        if not isinstance(given, list) or len(given) != len(what):
            raise Wrong(f"return four numbers: {', '.join(what)}; what came back is {shown(given)}")
        units = f"{sizes[0]:,} (x {len(sizes) - 1}) and {sizes[-1]:,}" if len(sizes) > 4 else sizes
        for found, (name, (wanted, slips)) in zip(given, what.items(), strict=True):
            case = f"for units of {units} parameters, the last of them the root, on {count(n, 'rank')} the {name}"
            expect_number(found, wanted, case, slips=slips)


def _quantities(sizes, n):
    """{what is asked for: (how much, slips)}"""
    *inner, root = sizes
    total, most = sum(sizes), max(inner, default=0)
    communicated = 4 * (2 * sum(inner) + root) + 4 * total
    return {
        "bytes held at rest": (16 * total // n, {
            "that is every rank's under DDP; all of it is cut by n": 16 * total,
            "those are the weights; gradients and two moments belong to it": 4 * total // n,
            "weights and gradients; Adam's two moments belong to it": 8 * total // n,
            "count again: weights, gradients, and two moments, 4 bytes each": 12 * total // n,
            "the weights are cut as well: this is ZeRO-3": 4 * total + 12 * total // n,
        }),
        "bytes whole at once": (4 * (root + most), {
            "the root stays whole from forward to backward, beside the unit that computes": 4 * most,
            "the root stays whole from forward to backward, beside the largest unit": 4 * max(sizes),
            "units are freed when they have computed: at most one, and the root": 4 * total,
            "what is gathered is whole, not a share": 4 * (root + most) // n,
        }),
        "number of all-gathers": (2 * len(inner) + 1, {
            "the root is not gathered twice: it stays from forward to backward": 2 * len(sizes),
            "a unit was freed after forward, so backward has to gather it again": len(sizes),
        }),
        "bytes communicated": (communicated, {
            "the root is not gathered twice: it stays from forward to backward": 12 * total,
            "units are gathered for forward and again for backward": 8 * total,
            "the reduce-scatters of the gradients belong to it": 4 * (2 * sum(inner) + root),
            "the payload of a collective is the whole row, not a share of it": communicated // n,
        }),
    }  # fmt: skip


# ---- exercise 2 ----


def _stack():
    """Eight layers; the first and the last do not split evenly over 2, 3 or 4 ranks."""
    widths = [48, 50, 48, 48, 48, 48, 48, 48, 47]
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)))


@exercise(2, "never build the whole model", timeout_s=20.0)
def sharded_from_meta(answer, ranks):
    """`answer(make, mesh)` returns a sharded model with the full model's numbers, and never held more than a bit."""
    n = ranks.world_size
    full = _stack()
    torch.manual_seed(7)
    for p in full.parameters():
        p.data.normal_(std=0.02)
    expected = {name: p.detach() for name, p in full.named_parameters()}
    mesh = init_device_mesh("cpu", (n,))
    torch.manual_seed(1)
    try:
        with Peak() as held:
            model = answer(_stack, mesh)
        _judge_sharded(model, expected, n, ranks.rank)
    finally:
        # DTensor remembers results together with their mesh, and an equal mesh of the lesson stands for other groups
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
    largest = max(sum(p.nbytes for p in layer.parameters()) for layer in full)
    limit = sum(-(-len(p) // n) * p[0].nbytes for p in expected.values()) + 2 * largest
    if held.peak > limit:
        raise Wrong(
            f"the numbers are right, but at one moment you held {held.peak:,} bytes where shares and two layers are "
            f"{limit:,} (the whole model is {sum(p.nbytes for p in expected.values()):,}): build it under "
            "torch.device('meta'), shard, then draw one weight at a time"
        )


def _judge_sharded(model, expected, n, rank):
    if not isinstance(model, nn.Module):
        raise Wrong(f"what came back is {shown(model)}; return the model")
    given = dict(model.named_parameters())
    if set(given) != set(expected):
        raise Wrong(f"the model has other parameters than make()'s: {', '.join(sorted(given)[:3])}")
    for name, p in given.items():
        if not isinstance(p, DTensor):
            raise Wrong(
                f"{name} is whole on every rank; call fully_shard on each layer and on the model, with this mesh"
            )
        if p.to_local().is_meta:
            raise Wrong(f"{name} is still on the meta device, without numbers: to_empty(device='cpu') gives it memory")
    for name, layer in model.named_children():
        if n > 1 and not isinstance(layer, FSDPModule):
            raise Wrong(
                f"layer {name} is no unit of its own, so all layers would be whole at once: fully_shard each layer "
                "before the model"
            )
    torch.manual_seed(7)
    of_shares = {name: torch.empty(p.to_local().shape).normal_(std=0.02) for name, p in given.items()}
    for name, p in given.items():
        chunks = expected[name].chunk(n)
        wanted, mine = chunks[rank] if rank < len(chunks) else expected[name][:0], p.detach().to_local()
        slips = {
            "it was drawn as a share, the same on every rank; draw the whole weight, then keep this rank's rows": (
                of_shares[name] if n > 1 else None
            ),
            "the full model's weights have std=0.02": mine if _is_50_times(mine, wanted) else None,
        }
        it_is = "the full model's: draw whole weights in its order, after torch.manual_seed(7), and keep your share"
        expect_tensor(mine, wanted, f"this rank's share of {name}", slips, it_is, close=0)


def _is_50_times(mine, wanted):
    return mine.shape == wanted.shape and torch.allclose(mine, 50 * wanted)


class Peak(TorchDispatchMode):
    """The most bytes that tensors made in the block have held at the same time; each storage once, meta ones not."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._alive = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and not tensor.is_meta:
                self._follow(tensor.untyped_storage())
        return result

    def _follow(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._ended(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def _ended(self, key, size):
        del self._alive[key]
        self.now -= size


# ---- exercise 3 ----


@exercise(3, "two nodes of four")
def hybrid(answer, ranks=None):
    """`answer(num_nodes, per_node)` is (groups that shard, groups of replicas, share that crosses between nodes)."""
    for num_nodes, per_node in ((2, 4), (2, 2), (3, 4), (4, 1)):
        given = answer(num_nodes, per_node)
        if not isinstance(given, (tuple, list)) or len(given) != 3:
            raise Wrong(
                "return three things: the groups that shard, the groups of replicas, the share between nodes; what "
                f"came back is {shown(given)}"
            )
        nodes = [list(range(node * per_node, (node + 1) * per_node)) for node in range(num_nodes)]
        across = [list(group) for group in zip(*nodes, strict=True)]
        case = f"for {num_nodes} nodes of {per_node} the"
        swapped = "the two are the wrong way round: gathering is the frequent traffic, so shard within a node"
        for found, wanted, other, what in (
            (given[0], nodes, across, "groups that shard, each within a node,"),
            (given[1], across, nodes, "groups of replicas, the ranks of each node that hold the same share,"),
        ):
            slips = {swapped: other, "they are right, but not in order of rank": wanted[::-1]}
            expect_equal(found, wanted, f"{case} {what}", slips)
        slips = {"the reduce-scatter in the node comes first, so each rank has only its share to send": 1.0}
        number(given[2])
        expect_number(
            given[2], 1 / per_node, f"{case} share of the gradient that a rank communicates between nodes", slips=slips
        )
