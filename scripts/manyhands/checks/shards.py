"""What lesson 06's builds are judged by: a unit with gradients that all ranks know, a network of units, and who reads what.

All is in the CPU's memory and in float64. A unit is like the lesson's own: its parameters are views of a padded row.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyhands.checks import Wrong
from manyhands.checks.values import plain

CLOSE = 1e-10
FLOAT32 = 1e-5  # as far as single precision is off
SHAPES = ((3, 5), (7,), (2, 2))  # of a unit's parameters: 26 numbers
NO_GRADIENT = 1  # the parameter that has none, on any rank


def flat(tensors):
    """All numbers in one row."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def padded(row_P, n):
    """The row with the fewest zeros behind it that let n divide it."""
    return F.pad(row_P, (0, -len(row_P) % n))


class Unit:
    """The lesson's unit: `parameters` are views of `whole_P`; `share_p` is a view of it too, or, `apart`, a copy."""

    def __init__(self, parameters, n, rank, apart=False):
        self.parameters = list(parameters)
        row_P = flat(self.parameters)
        self.padding = -len(row_P) % n
        self.whole_P = padded(row_P, n).clone()
        parts = self.whole_P[: len(row_P)].split([p.numel() for p in self.parameters])
        for p, part in zip(self.parameters, parts, strict=True):
            p.data = part.view_as(p)
        share_p = self.whole_P.chunk(n)[rank]
        self.share_p = nn.Parameter(share_p.clone() if apart else share_p)

    def gradient_row(self):
        """The gradients in one row, padded; zeros for a parameter that has none."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        return F.pad(flat(gradients), (0, self.padding))

    @property
    def held_bytes(self):
        """Bytes in the row's storage: 0 while it is freed."""
        return self.whole_P.untyped_storage().nbytes()


# ---- build A ----


def judge_share(given, row_P, before, n, rank):
    """Raises Wrong unless `given` is piece `rank` of `before`, padded and cut in n, in memory of its own."""
    case = f"for a row of {len(before)} numbers on {n} rank{'s' if n > 1 else ''}, "
    wanted = padded(before, n).chunk(n)[rank]
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
    row_P, k = padded(before, n), -len(before) % n
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


def gradients_of(rank):
    """What backward left on `rank`, None for one parameter."""
    draw = torch.Generator().manual_seed(660 + rank)
    found = [torch.randn(shape, generator=draw, dtype=torch.float64) * (1 + rank) for shape in SHAPES]
    return [None if i == NO_GRADIENT else g for i, g in enumerate(found)]


def unit_with_gradients(n, rank):
    draw = torch.Generator().manual_seed(66)
    weights = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in SHAPES]
    unit = Unit([nn.Parameter(weight) for weight in weights], n, rank)
    for p, gradient in zip(unit.parameters, gradients_of(rank), strict=True):
        p.grad = None if gradient is None else gradient.clone()
    return unit


def row_of(rank, n):
    """The padded row of what `gradients_of` says."""
    full = [
        torch.zeros(shape, dtype=torch.float64) if g is None else g
        for shape, g in zip(SHAPES, gradients_of(rank), strict=True)
    ]
    return padded(flat(full), n)


def judge_reduced(unit, before, seen, n, rank):
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
            f"share_p.grad is right, but you handed over {volume / unit.whole_P.nbytes:.2f} P by {calls} (an all_reduce "
            "counts twice); one reduce_scatter of the row is enough, 1 P"
        )


def _judge_mean(grad, n, rank):
    rows = [row_of(r, n) for r in range(n)]
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


def rows_of_data(rank):
    """What `rank` computes on."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(600 + rank), dtype=torch.float64)


def freed_units(net, n, rank):
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


def judge_after_forward(units):
    for name, unit in units.items():
        if name != "the root" and unit.held_bytes:
            raise Wrong(
                f"after forward {name} is still whole, {unit.held_bytes} bytes: free it when its last module has computed"
            )


def judge_after_backward(units, seen, watching, n, rank):
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
    _judge_gradients(units, n, rank)
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


def _judge_gradients(units, n, rank):
    net = Net()
    for r in range(n):
        (net(rows_of_data(r)) / n).backward()
    same = freed_units(net, n, rank)  # their parameters keep their gradients
    for name, unit in units.items():
        wanted = same[name][0].gradient_row().chunk(n)[rank]
        if not _near(unit.share_p.grad, wanted, CLOSE):
            raise Wrong(
                f"{name}'s share has another gradient than that of one process: each row must be whole, with all its "
                "numbers, when its modules compute"
            )
