"""Checks of lesson 06: shares, ZeRO's collectives, the global norm, predicted bytes, a model that is never whole.

The right answers need no communication: gradients are drawn from seeds that contain the rank, so that each rank can
compute all of them, and the full models of builds C and D and of exercise 3 are small enough for a reference. All
tensors are on the CPU, where the trial group can send. A unit is like the lesson's: its parameters are views of a
padded row.
"""

import tracemalloc
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyhands.checks import Wrong, exercise, naming
from manyhands.checks.drawn import flat, luck, normal, seeded
from manyhands.checks.expect import count, expect_number, expect_tensor, expect_traffic, expect_unchanged
from manyhands.measure import wire


def _padded(row_P, n):
    """Return the row with the fewest zeros appended that make its length divisible by n."""
    return F.pad(row_P, (0, -len(row_P) % n))


SLIPS = {  # in an error: the slip behind it
    "attribute 'zero_'": "a parameter that nobody used has the grad None: set each p.grad to None, do not fill it",
    "invalid tensor size": "all_gather takes the list of pieces and this rank's own piece, unit.share_p, not the row",
    "must match the size": "== of two tensors compares their numbers, in lists too: compare how many, by len()",
    "'NoneType' object is not callable": "hooks and `then` are called later: pass the function, without parentheses",
    " were given": "a module hands its hooks arguments: register come and go, which take any",
    "function argument": "a reduce-scatter takes a piece, then a list of pieces, an all-gather a list, then a piece",
    "empty sequence": "the root may be the only unit, and then max() has nothing to choose from: give it a default",
    "iterable argument is empty": "the root may be the only unit, and then max() has nothing to choose from",
}


def _small_storage(tensor, what):
    """Raise Wrong if a tensor is a view of a larger one, which it would keep in memory."""
    held = tensor.untyped_storage().nbytes()
    if held > tensor.nbytes:
        raise Wrong(f"{what} is right, but it is a view of {held} bytes, which all stay in memory; clone it")


@exercise("A", "your share of the row")
def my_share(answer, ranks=None):
    """`answer(row_P, n, rank)` is a copy of the rank's piece of the row, padded and cut in n."""
    drawn = luck(1).randrange(20, 60), luck(2).randrange(3, 8)
    for length, n in ((38, 2), (38, 4), (40, 4), (3, 5), (9, 1), drawn):
        row_P = torch.arange(1, length + 1, dtype=torch.float64)
        missing, size, pieces = -length % n, length // n, _padded(row_P, n).chunk(n)
        for rank in range(n):
            found = answer(row_P, n, rank)
            slips = {
                f"{n} such pieces leave out the last {length % n}; put zeros at the end": row_P[rank * size :][:size],
                f"n divides {length}, so add no zeros: -{length} % {n} is 0": (
                    None if missing else F.pad(row_P, (0, n)).chunk(n)[rank]
                ),
                "that is the whole row; keep this rank's piece": _padded(row_P, n),
                "you took every n-th number; a piece is numbers that follow each other": _padded(row_P, n)[rank::n],
                "the zeros belong at the end of the row": F.pad(row_P, (missing, 0)).chunk(n)[rank],
                "pieces must be equally long on all ranks": row_P.tensor_split(n)[rank],
            } | {f"that is the piece of rank {r}": piece for r, piece in enumerate(pieces)}  # fmt: skip
            case = f"for a row of {length} numbers on {count(n, 'rank')} the piece of rank {rank}"
            it_is = f"{count(len(pieces[0]), 'number')}, equally many on all ranks"
            expect_tensor(found, pieces[rank], case, slips, it_is, close=0)
            _small_storage(found, case)


SHAPES = ((3, 5), (7,), (2, 2))  # of a unit's parameters: 26 numbers
NO_GRADIENT = 1  # the parameter without a gradient, on every rank


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
        """Return the gradients in one padded row, with zeros for a parameter that has none."""
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        return F.pad(flat(found), (0, self.padding))

    @property
    def held_bytes(self):
        """Return the bytes in the row's storage, 0 while it is freed."""
        return self.whole_P.untyped_storage().nbytes()


@exercise("B", "average the gradients, keep your piece")
def reduce_scatter(answer, ranks):
    """`answer(unit)` leaves the mean of this rank's piece in `unit.share_p.grad`, and no other gradient, for 1 P."""
    n, rank = ranks.world_size, ranks.rank
    units = [_unit_with_gradients(n, r) for r in range(n)]
    rows, unit = [one.gradient_row() for one in units], units[rank]
    before_P, total_P = unit.whole_P.clone(), sum(rows)
    with wire.watch() as seen, naming(SLIPS):
        answer(unit)
    expect_unchanged(unit.whole_P, before_P, "the row of weights", ": leave the update to the optimizer")
    pieces = (total_P / n).chunk(n)
    slips = {
        f"that is the sum over the ranks; divide by {n}": total_P.chunk(n)[rank],
        "that is the piece of this rank's own gradients alone": rows[rank].chunk(n)[rank],
        f"it was divided by {n} twice": pieces[rank] / n,
    } | {f"that is the average of piece {r}, not of piece {rank}": piece for r, piece in enumerate(pieces)}
    grad = unit.share_p.grad
    expect_tensor(grad, pieces[rank], "unit.share_p.grad", slips, "the average of this rank's piece")
    if left := sum(p.grad.nbytes for p in unit.parameters if p.grad is not None):
        raise Wrong(f"right, but the parameters still hold {left} bytes of gradients: set each p.grad to None")
    _small_storage(grad, "share_p.grad")
    cure = "one reduce_scatter of the row (1 P)"
    expect_traffic(seen, "share_p.grad is right", cure, calls=1, volume=unit.whole_P.nbytes)


@exercise("B", "bring the weights back")
def all_gather(answer, ranks):
    """`answer(unit)` fills the unit's row, of which this rank has only its updated share, for 1 P."""
    n, rank = ranks.world_size, ranks.rank
    unit = Unit([nn.Parameter(normal(66 + i, *shape)) for i, shape in enumerate(SHAPES)], n, rank, apart=True)
    wanted_P = unit.whole_P + 1.0
    with torch.no_grad():
        unit.share_p += 1.0  # as if the optimizer had updated it
    stale_P = unit.whole_P.clone()
    with wire.watch() as seen, naming(SLIPS):
        answer(unit)
    slips = {
        "they are the old weights: fill unit.whole_P, not a copy": stale_P,
        "they are the sum over the ranks; each rank brings its own piece": n * wanted_P,
    } | {f"every piece is that of rank {r}": wanted_P.chunk(n)[r].repeat(n) for r in range(n if n > 1 else 0)}
    expect_tensor(unit.whole_P, wanted_P, "the row of weights", slips, "everybody's updated share, in order of rank")
    expect_tensor(unit.share_p.detach(), wanted_P.chunk(n)[rank], "unit.share_p", it_is="as it was")
    expect_traffic(seen, "the row is right", "one all_gather of the shares (1 P)", calls=1, volume=unit.whole_P.nbytes)


def _unit_with_gradients(n, rank):
    """Return a unit with the same weights on all ranks and the gradients of `rank`, None for one parameter."""
    unit = Unit([nn.Parameter(normal(66 + i, *shape)) for i, shape in enumerate(SHAPES)], n, rank)
    for i, p in enumerate(unit.parameters):
        p.grad = None if i == NO_GRADIENT else (1 + rank) * normal(660 + 10 * rank + i, *p.shape)
    return unit


class Net(nn.Module):
    """A network with a first and a last layer, which belong to the root, and three blocks between them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.double()

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x).square().mean()

    def freed_units(self, n, rank):
        """Return {name: (unit, modules)}, the root last, each with its row freed."""
        one, two, three = self.blocks
        found, ends = {}, [*self.first.parameters(), *self.last.parameters()]
        for name, modules in (("block 0", [one]), ("the unit of blocks 1 and 2", [two, three]), ("the root", [self])):
            unit = Unit(ends if modules == [self] else nn.ModuleList(modules).parameters(), n, rank, apart=True)
            unit.whole_P.untyped_storage().resize_(0)
            found[name] = unit, modules
        return found


@exercise("D", "gather and free at the right moments")
def gather_when_needed(answer, ranks):
    """`answer(unit, modules, stays)` hooks a freed unit to its modules; a step gathers little."""
    n, rank = ranks.world_size, ranks.rank
    net = seeded(Net, 6)
    parts = net.freed_units(n, rank)
    for unit, modules in parts.values():
        answer(unit, modules, modules == [net])
    units = {name: unit for name, (unit, _) in parts.items()}
    with wire.watch() as seen, Watching(units) as watching, naming(SLIPS):
        loss = net(normal(600 + rank, 4, 5))
        for name, unit in units.items():
            if name != "the root" and unit.held_bytes:
                raise Wrong(f"after forward {name} is still whole: free it after its last module")
        watching.phase = "backward"
        loss.backward()
    _judge_step(units, seen, watching, n, rank)


@exercise("C", "reduce during backward")
def reduce_in_backward(answer, ranks):
    """`answer(unit, then)` reduces a unit when its last gradient is there, then calls `then`; in each backward."""
    n, rank = ranks.world_size, ranks.rank
    net = seeded(Net, 6)
    units = {name: Unit(parameters, n, rank) for name, parameters in _two_units(net).items()}
    done = []
    for name, unit in units.items():
        answer(unit, lambda name=name, unit=unit: done.append((name, unit.share_p.grad is not None)))
    for turn in range(2):
        done.clear()
        for unit in units.values():
            unit.share_p.grad = None
        with wire.watch() as seen, naming(SLIPS):
            net(normal(600 + 10 * turn + rank, 4, 5)).backward()
        _judge_reductions(units, done, seen, turn, n, rank)


def _two_units(net):
    *others, late = net.blocks[1:].parameters()  # in such an order neither end is the last that backward reaches
    return {"the unit of blocks 1 and 2": [late, *others], "the unit of the last layer": net.last.parameters()}


def _judge_reductions(units, done, seen, turn, n, rank):
    """Raise Wrong unless backward number `turn` reduced each unit once, complete, and called `then` after it."""
    again = " in the second backward" if turn else ""
    for name, unit in units.items():
        if unit.share_p.grad is None:
            raise Wrong(
                f"after backward{again} {name} has no gradient in its share: call reduce_scatter(unit) when as many "
                f"parameters are ready as the unit has, {len(unit.parameters)}"
            )
    calls = [call for call in seen.calls if call.op == "reduce_scatter"]
    if len(calls) > len(units):
        raise Wrong(
            f"backward{again} made {len(calls)} reduce-scatters for {len(units)} units: reduce a unit once, when the "
            "last of its gradients is there"
        )
    net = seeded(Net, 6)
    for r in range(n):
        (net(normal(600 + 10 * turn + r, 4, 5)) / n).backward()
    same = _two_units(net)
    for name, unit in units.items():
        wanted = Unit(same[name], n, rank)
        found = [each for whose, each in done if whose == name]
        what, it_is = f"the gradient of {name}'s share{again}", "the average of all the unit's gradients"
        expect_tensor(unit.share_p.grad, wanted.gradient_row().chunk(n)[rank], what, it_is=it_is)
        if found != [True]:
            raise Wrong(
                f"the gradients are right, but then() was called {count(len(found), 'time')} for {name}, "
                f"{sum(found)} of them after its reduction: call it once, after reduce_scatter(unit)"
            )


class Watching(TorchDispatchMode):
    """Raise Wrong if an operator uses a freed row, and record the peak bytes of unsharded rows.

    Without this check the process could crash, because such a tensor has no memory.
    """

    def __init__(self, units):
        super().__init__()
        self.units, self.phase, self.most_bytes = units, "forward", 0
        self._rows = {unit.whole_P.untyped_storage()._cdata: name for name, unit in units.items()}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.most_bytes = max(self.most_bytes, sum(unit.held_bytes for unit in self.units.values()))
        if not operator._schema.name.endswith(("_like", "::detach", "::alias")):  # these do not read the data
            for tensor in tree_leaves((args, kwargs)):
                storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) and tensor.numel() else None
                if storage is not None and storage._cdata in self._rows and not storage.nbytes():
                    first, last = ("first", "last") if self.phase == "forward" else ("last", "first")
                    raise Wrong(
                        f"in {self.phase}, {self._rows[storage._cdata]} was used while its row has no memory: gather() "
                        f"it before the {self.phase} of its {first} module, and free it after that of its {last}"
                    )
        return operator(*args, **(kwargs or {}))


def _judge_step(units, seen, watching, n, rank):
    """Raise Wrong unless each share has its mean gradient, all rows are freed, and no gather was unnecessary."""
    for name, unit in units.items():
        if unit.share_p.grad is None:
            raise Wrong(f"after backward {name}'s share has no gradient: reduce_in_backward(unit, ...) does that")
        if unit.held_bytes:
            raise Wrong(f"after backward {name} is still whole: free it `then`, after the reduction")
    net = seeded(Net, 6)
    for r in range(n):
        (net(normal(600 + r, 4, 5)) / n).backward()
    same = net.freed_units(n, rank)  # their parameters keep their gradients
    for name, unit in units.items():
        wanted = same[name][0].gradient_row().chunk(n)[rank]
        it_is = "that of one process: each row must be whole, with all its numbers, when its modules compute"
        expect_tensor(unit.share_p.grad, wanted, f"the gradient of {name}'s share", it_is=it_is)
    inner = [unit.whole_P.nbytes for name, unit in units.items() if name != "the root"]
    most = units["the root"].whole_P.nbytes + max(inner)
    if watching.most_bytes > most:
        raise Wrong(f"right, but {watching.most_bytes} bytes were whole at once; root and largest unit are {most}")
    gathers, least = seen.count("all_gather"), 2 * len(inner) + 1
    if gathers > least:
        raise Wrong(f"right, but a step made {gathers} all-gathers where {least} do: units twice, the root once")


@exercise(1, "clip by the global norm")
def clip_by_global_norm(answer, ranks):
    """`answer(shares, max_norm)` scales every share's gradient by one factor, and returns the norm of all of them."""
    n = ranks.world_size
    of_all = [[*(normal(60 + r, length) * (1 + r) for length in (7, 3 + 2 * r, 0)), None] for r in range(n)]
    norm = _norm(of_all).item()
    zeros = [[g if g is None else 0 * g for g in of_one] for of_one in of_all]
    # in float32, the dtype of a new tensor if no gradient gives another
    last_has_none = [[g if g is None else g.float() for g in of_one] for of_one in of_all[:-1]] + [[None, None]]
    _judge_clipping(answer, ranks, of_all, 0.1 * norm, "where the limit is a tenth of the norm,")
    _judge_clipping(answer, ranks, of_all, 2 * norm, "where the limit is twice the norm,")
    _judge_clipping(answer, ranks, zeros, 1.0, "where all gradients are 0,")
    _judge_clipping(answer, ranks, last_has_none, 1e-3, f"where rank {n - 1} has no gradient at all,")


def _judge_clipping(answer, ranks, of_all, max_norm, case):
    """Raise Wrong unless the answer clips the ranks' gradients; `of_all` lists them, or None, for each rank."""
    mine, n = of_all[ranks.rank], ranks.world_size
    kept = [g for g in mine if g is not None]
    shares = [nn.Parameter(torch.ones(5) if g is None else torch.ones_like(g)) for g in mine]
    for share, g in zip(shares, mine, strict=True):
        share.grad = None if g is None else g.clone()
    with wire.watch() as seen:
        found = answer(shares, max_norm)
    lengths, norm = [_norm([of_one]).item() for of_one in of_all], _norm(of_all)
    slips = {
        "all ranks call all_reduce, also one with a sum of 0": None if kept else 0.0,
        "that is the norm of this rank's shares alone; add the other ranks' squares": lengths[ranks.rank],
        "that is the sum of the ranks' norms; sum their squares, then take the root": sum(lengths),
        "that is its square; take the root": norm.item() ** 2,
        "the squares were averaged over the ranks; sum them": norm.item() / n**0.5,
    }
    rel = 1e-10 if norm.dtype == torch.float64 else 1e-5
    expect_number(found, norm.item(), f"{case} the norm of all gradients, before clipping,", "", slips, rel, rel * 1e-3)
    if [share.grad is None for share in shares] != [g is None for g in mine]:
        raise Wrong(f"{case} a share had no gradient and has one now, or lost it; leave a gradient of None unchanged")
    if not kept:
        return
    own, now = flat(kept), flat(share.grad for share in shares if share.grad is not None)
    if not now.isfinite().all():
        raise Wrong(f"{case} they became nan: add 1e-6 to the norm before you divide by it")
    factor = (max_norm / (norm + 1e-6)).to(own.dtype)
    slips = {
        "they are unchanged; scale share.grad in place": own,
        "scale only gradients with a larger norm, and never up": factor * own,
    }
    one_factor = "scaled by one factor on all ranks, max_norm / (the norm of all + 1e-6)"
    expect_tensor(now, factor.clamp(max=1) * own, f"{case} the row of gradients", slips, one_factor, close=1e-6)
    expect_traffic(seen, "norm and gradients are right", "add up one sum of squares", calls=1, payload=8)


def _norm(of_all):
    """Return the norm of all ranks' gradients together, ignoring None."""
    every = [g for of_one in of_all for g in of_one if g is not None]
    return flat(every).norm() if every else torch.zeros(())


@exercise(2, "the bytes of a wrapping")
def predict(answer, ranks=None):
    """`answer(sizes, n)` is (held, whole, gathers, communicated) of fp32, AdamW, ZeRO-3, the root last."""
    for sizes, n in (
        ([320, 320, 80], 5), ([197_888] * 4 + [25_216], 4), ([201_400_000] * 32 + [271_500_000], 20),
        ([24, 240, 48, 12], 12), ([96], 4),  # finally the root alone
        ([7 * luck(i).randint(10, 999) for i in range(luck(9).randint(3, 6))], 7),
    ):  # fmt: skip
        with naming(SLIPS):
            held, whole, gathers, communicated = answer(list(sizes), n)
        units = f"{sizes[0]:,} (x {len(sizes) - 1}) and {sizes[-1]:,}" if len(sizes) > 4 else sizes
        what = _quantities(sizes, n)
        for found, (name, (wanted, slips)) in zip((held, whole, gathers, communicated), what.items(), strict=True):
            case = f"for units of {units} parameters, the last of them the root, on {count(n, 'rank')} the {name}"
            expect_number(found, wanted, case, slips=slips)


def _quantities(sizes, n):
    """Return {quantity: (value, slips)}."""
    *inner, root = sizes
    total, most = sum(sizes), max(inner, default=0)
    communicated = 4 * (2 * sum(inner) + root) + 4 * total
    return {
        "bytes held at rest": (16 * total // n, {
            "that is every rank's under DDP; all of it is cut by n": 16 * total,
            "those are the weights; gradients and two moments belong to it": 4 * total // n,
            "weights and gradients; Adam's two moments belong to it": 8 * total // n,
            "the weights are cut as well: this is ZeRO-3": 4 * total + 12 * total // n,
        }),
        "bytes whole at once": (4 * (root + most), {
            "the root stays whole from forward to backward, beside the unit that computes": 4 * most,
            "the root stays whole from forward to backward, beside the largest unit": 4 * max(sizes),
            "units are freed after computing: at most one is whole, in addition to the root": 4 * total,
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


def _stack():
    """Return eight layers; the first and the last do not split evenly over 2, 3 or 4 ranks."""
    widths = [400, 402, 400, 400, 400, 400, 400, 400, 399]
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)))


@exercise(3, "never build the whole model", timeout_s=20.0)
def sharded_from_meta(answer, ranks):
    """`answer(make, mesh)` returns a sharded model with the full model's numbers, and never holds much more.

    Two ranks share it. With four ranks there are two pairs, as the mesh defines.
    """
    full, n = _stack(), 2 if ranks.world_size == 4 else ranks.world_size
    torch.manual_seed(7)
    for p in full.parameters():
        p.data.normal_(std=0.02)
    mesh = init_device_mesh("cpu", (ranks.world_size // n, n), mesh_dim_names=("copies", "shares"))["shares"]
    torch.manual_seed(1)
    try:
        with Peak() as held:
            model = answer(_stack, mesh)
        _judge_sharded(model, full, n, mesh.get_local_rank(), ranks)
    finally:
        # DTensor caches results by mesh, and an equal mesh of the lesson belongs to other groups
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
    largest = max(sum(p.nbytes for p in layer.parameters()) for layer in full)
    limit = sum(-(-len(p) // n) * p[0].nbytes for p in full.parameters()) + 2 * largest
    if held.peak > limit:
        raise Wrong(
            f"the numbers are right, but at one moment you held {held.peak:,} bytes where shares and two layers are "
            f"{limit:,}: build it under torch.device('meta'), shard, then draw one weight at a time"
        )
    whole = sum(p.nbytes for p in full.parameters())
    if held.outside_torch > whole // 2:  # libraries need less than that at their first call
        raise Wrong(
            f"the numbers are right, but lists or numpy's arrays held {held.outside_torch:,} bytes at one moment, and "
            f"the model has {whole:,}: draw one weight at a time, and keep your rows of it alone"
        )


def _judge_sharded(model, full, n, rank, ranks):
    """Raise Wrong unless every layer of the model is a unit and holds this rank's rows of the full model."""
    shares = dict(model.named_parameters())
    for name, p in shares.items():
        if not isinstance(p, DTensor):
            raise Wrong(f"{name} is whole on every rank; call fully_shard on each layer and on the model")
        if p.to_local().is_meta:
            raise Wrong(f"{name} is still on the meta device, without numbers: to_empty(device='cpu') gives it memory")
    for name, layer in model.named_children():
        if n > 1 and not isinstance(layer, FSDPModule):
            raise Wrong(f"layer {name} is no unit of its own: fully_shard each layer before the model")
    of_units = {id(fully_shard.state(layer)) for layer in model.children()}
    if n > 1 and len(of_units) < len(full):
        raise Wrong(f"{len(full)} layers are {len(of_units)} units: call fully_shard for each layer, not for several")
    torch.manual_seed(7)
    drawn = {name: torch.empty(p.to_local().shape).normal_(std=0.02) for name, p in shares.items()}
    for name, whole in full.named_parameters():
        rows = [*whole.chunk(n), *[whole[:0]] * n][rank]  # there may be fewer rows than ranks
        mistake = "it was drawn as a share, the same on every rank; draw the whole weight, then keep this rank's rows"
        it_is = "the full model's: draw whole weights in its order, after torch.manual_seed(7), and keep your share"
        own, of_all = shares[name].to_local(), [*whole.chunk(ranks.world_size), *[whole[:0]] * n][ranks.rank]
        everyone = "it is cut over all ranks, and only those of `mesh` share the model"
        slips = {mistake: drawn[name], everyone: of_all if ranks.world_size > n else None}
        expect_tensor(own, rows, f"this rank's share of {name}", slips, it_is, close=0)


class Peak(TorchDispatchMode):
    """Measure the peak bytes of tensors created in the block, counting each storage once and meta tensors not at all.

    outside_torch: the peak of all other memory, numpy's arrays and Python's objects, set when the block ends.
    """

    def __init__(self):
        super().__init__()
        self.peak, self._alive = 0, weakref.WeakValueDictionary()  # {address: storage}

    def __enter__(self):
        tracemalloc.start()
        return super().__enter__()

    def __exit__(self, *error):
        _, self.outside_torch = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = storage
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._alive.values()))
        return result
