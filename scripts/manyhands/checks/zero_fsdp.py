"""Checks of lesson 06: shares, ZeRO's movements, the global norm, predicted bytes, a model that is never whole, two
levels.

The right answers are known without communicating: gradients are drawn from seeds that say the rank, so that each rank
knows all of them, and the full models of build C and exercise 2 are small enough for a reference. Everything is in the
CPU's memory, where the trial group can send. A unit is like the lesson's own: its parameters are views of a padded row.
"""

import operator
import weakref

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyhands.checks import Wrong, exercise
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
            _judge_share(answer(row_P, n, rank), row_P, before, n, rank)


@exercise("B", "hand in the gradients")
def reduce_scatter(answer, ranks):
    """`answer(unit)` leaves the mean of this rank's piece in `unit.share_p.grad`, and no other gradient, for 1 P."""
    n, rank = ranks.world_size, ranks.rank
    unit = _unit_with_gradients(n, rank)
    before = unit.whole_P.clone()
    with wire.watch() as seen:
        answer(unit)
    _judge_reduced(unit, before, seen, n, rank)


@exercise("C", "gather and free at the right moments")
def gather_when_needed(answer, ranks):
    """`answer(unit, modules, stays)` hooks a freed unit to its modules; a step gathers little, and gives one process's
    gradients."""
    n, rank = ranks.world_size, ranks.rank
    net = Net()
    parts = _freed_units(net, n, rank)
    for unit, modules in parts.values():
        answer(unit, modules, modules == [net])
    units = {name: unit for name, (unit, _) in parts.items()}
    with wire.watch() as seen, Watching(units) as watching:
        loss = net(_rows_of_data(rank))
        _judge_after_forward(units)
        watching.phase = "backward"
        loss.backward()
    _judge_after_backward(units, seen, watching, n, rank)


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
    """`answer(sizes, n)` is (held, whole, gathers, communicated) of fp32, AdamW, ZeRO-3, the root last."""
    cases = [
        ([320, 320, 80], 5),
        ([197_888] * 4 + [25_216], 4),
        ([201_400_000] * 32 + [271_500_000], 20),
        ([24, 240, 48, 12], 12),
        ([96], 4),  # the root alone
    ]
    names = ("bytes held at rest", "bytes whole at once", "number of all-gathers", "bytes communicated")
    for sizes, n in cases:
        given = _parts(answer(list(sizes), n), 4, "four numbers: held, whole, gathers, communicated")
        right = _bytes_of(sizes, n)
        for name, mine, wanted in zip(names, given, right, strict=True):
            mine = _number(mine, f"the {name}")
            if not abs(mine - wanted) <= 1e-9 * wanted:
                case = f"for units of {_short(sizes)} parameters, the last of them the root, on {n} ranks"
                raise Wrong(f"{case} the {name} should be {wanted:,}, not {mine:,.12g}{_hint(name, mine, sizes, n)}")


@exercise(2, "never build the whole model", timeout_s=20.0)
def sharded_from_meta(answer, ranks):
    """`answer(make, mesh)` returns a sharded model with the full model's numbers, of which it never held more than a
    bit."""
    n, rank = ranks.world_size, ranks.rank
    full = _stack()
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
            model = answer(_stack, mesh)
        _set_default_device(default)
        _judge_sharded(model, expected, n, rank)
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
                f"{case}: a rank communicates 1/{per_node} of the gradient between nodes, not {share:.4g}: "
                + why.get(share, "what it communicates is its share, and the shares of a node are the whole")
            )


# ---- builds A to C ----

FLOAT32 = 1e-5  # as far as single precision is off
SHAPES = ((3, 5), (7,), (2, 2))  # of a unit's parameters: 26 numbers
NO_GRADIENT = 1  # the parameter that has none, on any rank


def _flat(tensors):
    """All numbers in one row."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _padded(row_P, n):
    """The row with the fewest zeros behind it that let n divide it."""
    return F.pad(row_P, (0, -len(row_P) % n))


class Unit:
    """The lesson's unit: `parameters` are views of `whole_P`; `share_p` is a view of it too, or, `apart`, a copy."""

    def __init__(self, parameters, n, rank, apart=False):
        self.parameters = list(parameters)
        row_P = _flat(self.parameters)
        self.padding = -len(row_P) % n
        self.whole_P = _padded(row_P, n).clone()
        parts = self.whole_P[: len(row_P)].split([p.numel() for p in self.parameters])
        for p, part in zip(self.parameters, parts, strict=True):
            p.data = part.view_as(p)
        share_p = self.whole_P.chunk(n)[rank]
        self.share_p = nn.Parameter(share_p.clone() if apart else share_p)

    def gradient_row(self):
        """The gradients in one row, padded; zeros for a parameter that has none."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        return F.pad(_flat(gradients), (0, self.padding))

    @property
    def held_bytes(self):
        """Bytes in the row's storage: 0 while it is freed."""
        return self.whole_P.untyped_storage().nbytes()


# ---- build A ----


def _judge_share(given, row_P, before, n, rank):
    """Raises Wrong unless `given` is piece `rank` of `before`, padded and cut in n, in memory of its own."""
    case = f"for a row of {len(before)} numbers on {n} rank{'s' if n > 1 else ''}, "
    wanted = _padded(before, n).chunk(n)[rank]
    if not isinstance(given, torch.Tensor):
        what = "nothing came back" if given is None else f"what came back is {plain(given)}"
        several = isinstance(given, (tuple, list)) and len(given) == n
        raise Wrong(f"{what}; return {'one piece, that of this rank' if several else 'a piece of the row'}")
    if row_P.shape != before.shape or not torch.equal(row_P, before):
        raise Wrong("the row itself was changed; leave it as it is")
    if given.dim() != 1 or len(given) != len(wanted):
        _judge_length(given, before, n, rank, wanted, case)
    if given.dtype != before.dtype:
        raise Wrong(f"the row is {before.dtype}, the piece {given.dtype}; keep the dtype")
    if not torch.equal(given, wanted):
        _judge_numbers(given, before, n, rank, wanted, case)
    storage = given.untyped_storage()
    if storage.data_ptr() == row_P.untyped_storage().data_ptr() or storage.nbytes() > wanted.nbytes:
        raise Wrong(
            f"{case}the numbers are right, but your piece of {wanted.nbytes} bytes is a view of {storage.nbytes()}, all of "
            "which stay as long as the piece does; copy the piece"
        )


def _judge_length(given, before, n, rank, wanted, case):
    if given.dim() != 1:
        raise Wrong(f"{case}the piece should have the shape {list(wanted.shape)}, not {list(given.shape)}")
    right, found = f"each piece has {len(wanted)} numbers", f"and yours of rank {rank} has {len(given)}"
    why = "pieces must be equally long on all ranks"
    if len(given) == len(before) // n and rank == 0:  # else those of lower ranks were longer
        why = f"{n} such pieces leave out the last {len(before) % n}; put zeros at the end first"
    elif len(before) % n == 0 and len(given) == len(wanted) + 1:
        why = f"n divides {len(before)}, so no zeros are needed: -{len(before)} % {n} is 0"
    elif len(given) == n * len(wanted):
        why = "that is the whole row; keep this rank's piece"
    raise Wrong(f"{case}{right}, {found}: {why}")


def _judge_numbers(given, before, n, rank, wanted, case):
    row_P, k = _padded(before, n), -len(before) % n
    pieces = row_P.chunk(n)
    why = f"they should be {[round(x) for x in wanted.tolist()]}"
    others = [r for r in range(n) if torch.equal(given, pieces[r])]
    if others:
        why = f"they are those of rank {others[0]}"
    elif torch.equal(given, row_P[rank::n]):
        why = "you took every n-th number; a piece is numbers that follow each other"
    elif k and torch.equal(given, F.pad(before, (k, 0)).chunk(n)[rank]):
        why = "the zeros belong at the end of the row"
    elif torch.equal(given[wanted != 0], wanted[wanted != 0]):
        why = "what fills the end up should be zeros"
    raise Wrong(f"{case}rank {rank}'s piece has other numbers: {why}")


# ---- build B ----


def _gradients_of(rank):
    """What backward left on `rank`, None for one parameter."""
    draw = torch.Generator().manual_seed(660 + rank)
    found = [torch.randn(shape, generator=draw, dtype=torch.float64) * (1 + rank) for shape in SHAPES]
    return [None if i == NO_GRADIENT else g for i, g in enumerate(found)]


def _unit_with_gradients(n, rank):
    draw = torch.Generator().manual_seed(66)
    weights = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in SHAPES]
    unit = Unit([nn.Parameter(weight) for weight in weights], n, rank)
    for p, gradient in zip(unit.parameters, _gradients_of(rank), strict=True):
        p.grad = None if gradient is None else gradient.clone()
    return unit


def _row_of(rank, n):
    """The padded row of what `_gradients_of` says."""
    full = [
        torch.zeros(shape, dtype=torch.float64) if g is None else g
        for shape, g in zip(SHAPES, _gradients_of(rank), strict=True)
    ]
    return _padded(_flat(full), n)


def _judge_reduced(unit, before, seen, n, rank):
    """Raises Wrong unless the unit holds the mean of its piece and nothing else; `before` is its row of weights."""
    if not torch.equal(unit.whole_P, before):
        raise Wrong("the weights were changed; hand in gradients, and leave the update to the optimizer")
    _judge_mean(unit.share_p.grad, n, rank)
    left = sum(p.grad.nbytes for p in unit.parameters if p.grad is not None)
    if left:
        raise Wrong(
            f"share_p.grad is right, but the parameters still hold {left} bytes of gradients, where the share is "
            f"{unit.share_p.nbytes}: set each p.grad to None"
        )
    grad = unit.share_p.grad
    if grad.untyped_storage().nbytes() > grad.nbytes:
        raise Wrong(
            f"share_p.grad is right, but a view of {grad.untyped_storage().nbytes()} bytes, all of which stay; let "
            f"reduce_scatter write into a tensor of {grad.nbytes}"
        )
    volume = sum((2 if call.op == "all_reduce" else 1) * call.bytes for call in seen.calls)
    if n > 1 and (volume > unit.whole_P.nbytes or len(seen.calls) > 1):
        calls = ", ".join(sorted({call.op for call in seen.calls}))
        raise Wrong(
            f"share_p.grad is right, but you communicated {volume / unit.whole_P.nbytes:.2f} P by {calls} (an all_reduce "
            "counts twice); one reduce_scatter of the row is enough, 1 P"
        )


def _judge_mean(grad, n, rank):
    rows = [_row_of(r, n) for r in range(n)]
    total = torch.stack(rows).sum(0)
    mine = [row.chunk(n)[rank] for row in (total / n, total, rows[rank], rows[rank] / n, total / n**2)]
    if grad is None:
        raise Wrong("unit.share_p.grad is still None: the average of this rank's piece belongs there")
    if grad.shape != mine[0].shape:
        raise Wrong(
            f"share_p.grad should have {len(mine[0])} numbers, as share_p has, not the shape {list(grad.shape)}"
        )
    if _near(grad, mine[0], CLOSE):
        return
    why = {
        1: f"that is the sum over the ranks; divide by {n}",
        2: "that is the piece of this rank's own gradients; those of the others' rows belong to it",
        3: f"that is this rank's own piece divided by {n}; the others' are missing",
        4: f"it was divided by {n} twice",
    }
    for i, sentence in why.items():
        if _near(grad, mine[i], CLOSE):
            raise Wrong(f"share_p.grad is not the average: {sentence}")
    for r, piece in enumerate((total / n).chunk(n)):
        if _near(grad, piece, CLOSE):
            raise Wrong(f"rank {rank}'s share_p.grad is the average of piece {r}, not of piece {rank}")
    if _near(grad, mine[0], FLOAT32):
        raise Wrong("share_p.grad is right to float32's accuracy only; keep the dtype of the gradients")
    raise Wrong("share_p.grad is not the average over the ranks of this rank's piece of the row of gradients")


def _near(a, b, relative):
    return bool((a.double() - b).abs().max() <= relative * b.abs().max())


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

    def parts(self):
        """[(name, modules)] of the units, the root last."""
        one, two, three = self.blocks
        return [("block 0", [one]), ("the unit of blocks 1 and 2", [two, three]), ("the root", [self])]


def _rows_of_data(rank):
    """What `rank` computes on."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(600 + rank), dtype=torch.float64)


def _freed_units(net, n, rank):
    """{name: (unit, modules)} of the net, each with its row freed."""
    inside = {p for block in net.blocks for p in block.parameters()}
    found = {}
    for name, modules in net.parts():
        parameters = [p for module in modules for p in module.parameters()]
        if modules == [net]:
            parameters = [p for p in parameters if p not in inside]
        unit = Unit(parameters, n, rank, apart=True)
        unit.whole_P.untyped_storage().resize_(0)
        found[name] = unit, modules
    return found


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
                    self._look_at(tensor)
        return operator(*args, **(kwargs or {}))

    def _look_at(self, tensor):
        storage = tensor.untyped_storage()
        where = self._rows.get(storage._cdata)
        if where is not None and not storage.nbytes():
            first, last = ("first", "last") if self.phase == "forward" else ("last", "first")
            raise Wrong(
                f"in {self.phase}, {where} was used while its row has no memory: gather() it before the {self.phase} of "
                f"its {first} module, and free it after that of its {last}"
            )


def _judge_after_forward(units):
    for name, unit in units.items():
        if name != "the root" and unit.held_bytes:
            raise Wrong(
                f"after forward {name} is still whole, {unit.held_bytes} bytes: free it when its last module has computed"
            )


def _judge_after_backward(units, seen, watching, n, rank):
    """Raises Wrong unless each share has its mean gradient, all rows are freed, and nothing was gathered needlessly."""
    for name, unit in units.items():
        if unit.share_p.grad is None:
            raise Wrong(f"after backward {name}'s share has no gradient: reduce_in_backward(unit, ...) does that")
    for name, unit in units.items():
        if unit.held_bytes:
            raise Wrong(
                f"after backward {name} is still whole, {unit.held_bytes} bytes: free it `then`, when its gradients are "
                "reduced"
            )
    _judge_unit_gradients(units, n, rank)
    root, inner = (
        units["the root"].whole_P.nbytes,
        [u.whole_P.nbytes for k, u in units.items() if k != "the root"],
    )
    if watching.most_bytes > root + max(inner):
        raise Wrong(
            f"gradients are right, but at one moment {watching.most_bytes} bytes of rows were whole, where the root and "
            f"the largest unit are {root + max(inner)}: gather each unit for itself, when it is needed"
        )
    gathers, least = seen.count("all_gather"), 2 * len(inner) + 1
    if gathers > least:
        raise Wrong(
            f"gradients are right, but a step made {gathers} all-gathers where {least} do: each unit twice, and once "
            "the root, which stays"
        )


def _judge_unit_gradients(units, n, rank):
    net = Net()
    for r in range(n):
        (net(_rows_of_data(r)) / n).backward()
    same = _freed_units(net, n, rank)  # their parameters keep their gradients
    for name, unit in units.items():
        wanted = same[name][0].gradient_row().chunk(n)[rank]
        if not _near(unit.share_p.grad, wanted, CLOSE):
            raise Wrong(
                f"{name}'s share has another gradient than that of one process: each row must be whole, with all its "
                "numbers, when its modules compute"
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
            f"norm and gradients are right, but {sent} bytes were communicated in {len(calls)} call{'s' if len(calls) > 1 else ''} "
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
        "bytes communicated": {
            12 * total: "the root is not gathered twice: it stays from forward to backward",
            8 * total: "units are gathered for forward and again for backward",
            4 * (2 * sum(inner) + root): "the reduce-scatters of the gradients belong to it",
            _bytes_of(sizes, n)[3] // n: "the payload of a collective is the whole row, not a share of it",
        },
    }[name]
    return f": {hints[mine]}" if mine in hints else ""


# ---- exercise 2 ----


def _stack():
    """Eight layers; the first and the last do not split evenly over 2, 3 or 4 ranks."""
    widths = [48, 50, 48, 48, 48, 48, 48, 48, 47]
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)))


def _judge_sharded(model, expected, n, rank):
    if not isinstance(model, nn.Module):
        what = "nothing came back" if model is None else f"what came back is a {type(model).__name__}"
        raise Wrong(f"{what}; return the model")
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
    if n > 1:
        _judge_units(model)
    for name, p in given.items():
        chunks = expected[name].chunk(n)
        wanted = chunks[rank] if rank < len(chunks) else expected[name][:0]
        mine = p.detach().to_local()
        if mine.shape != wanted.shape:
            raise Wrong(
                f"this rank's share of {name} is {list(mine.shape)}, not {list(wanted.shape)}: shard over `mesh`"
            )
        if torch.equal(mine, wanted):
            continue
        why = "draw whole weights in the full model's order, after torch.manual_seed(7), and keep your share"
        if n > 1 and torch.equal(mine, _drawn_as_shares(given)[name]):
            why = "it was drawn as a share, the same on every rank; draw the whole weight, then keep this rank's rows"
        elif torch.allclose(mine, 50 * wanted):
            why = "the full model's weights have std=0.02"
        raise Wrong(f"{name} has other numbers than the full model's: {why}")


def _drawn_as_shares(given):
    torch.manual_seed(7)
    return {name: torch.empty(p.to_local().shape).normal_(std=0.02) for name, p in given.items()}


def _judge_units(model):
    for name, layer in model.named_children():
        if not isinstance(layer, FSDPModule):
            raise Wrong(
                f"layer {name} is no unit of its own, so all layers would be whole at once: fully_shard each layer "
                "before the model"
            )


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
