"""Checks of lesson 10: coordinates, groups, bytes between nodes, a recommendation, orders of axes, a roofline, three phases.

Nothing here needs a message: every rank judges the same numbers, drawn from fixed seeds.
"""

import itertools
import operator
import random
from math import prod

from manyhands.checks import Wrong, exercise
from manyhands.checks.values import number, plain, shown

SHAPES = ((2, 2, 2), (4,), (2, 3), (3, 1, 4), (2, 2, 3, 2), (1, 1))


@exercise("A", "from a rank to its coordinates")
def coordinates(answer, ranks=None):
    """`answer(rank, shape)` is the list of coordinates of `rank` on a grid whose last axis runs fastest."""
    for shape in SHAPES:
        for rank in range(prod(shape)):
            case = f"rank {rank} on a grid of {_grid(shape)}"
            found, wanted = _whole_numbers(answer(rank, shape), case, "its coordinates"), _place(rank, shape)
            if found == wanted:
                continue
            if found == _place(rank, shape[::-1])[::-1]:
                raise Wrong(f"{case} stands at {wanted}, not {found}: the last axis runs fastest, yours is the first")
            if found == wanted[::-1]:
                raise Wrong(f"{case} stands at {wanted}, not {found}: these are the coordinates back to front")
            raise Wrong(f"{case} stands at {wanted}, not {found}")


@exercise("B", "the groups of an axis")
def groups_of(answer, ranks=None):
    """`answer(shape, axis)` is all groups of that axis, in any order; each in the order of its coordinate."""
    for shape in SHAPES:
        for axis in range(len(shape)):
            case = f"axis {axis} of a grid of {_grid(shape)}"
            _judge_groups(_groups(answer(shape, axis), case), shape, axis, case)


@exercise("C", "bytes between nodes")
def slow_bytes(answer, ranks=None):
    """`answer(group, payload, per_node)` is what a ring all-reduce in that order sends between nodes, all ranks together."""
    for group, per_node, payload in (
        ([0, 1, 2, 3, 4, 5], 2, 1200),  # the first: every likely mistake gives another number
        ([0, 1, 2, 3], 2, 1000),
        ([0, 2, 1, 3], 2, 1000),
        ([0, 1, 2, 3], 4, 1000),
        ([0, 4], 4, 640),
        ([5], 2, 640),
        ([0, 3, 6, 9], 3, 800),
        ([4, 5, 6, 7, 8, 9], 4, 1200),
        ([2, 3, 10, 11], 4, 4e9),
    ):
        case = f"group {group} on nodes of {per_node}, {payload:g} bytes"
        found = number(answer(list(group), payload, per_node), "a number of bytes")
        n, crossing = len(group), _crossing(group, per_node)
        wanted = crossing * 2 * (n - 1) / n * payload
        if _near(found, wanted):
            continue
        hints = {
            f"all {n} hops; {crossing} of them cross": n * 2 * (n - 1) / n * payload,
            "one rank's share of them; add up the group": wanted / n,
            "half of that: an all-reduce goes around twice": wanted / 2,
            "what a rank sends, whether it crosses or not": 2 * (n - 1) / n * payload,
            "without the hop from the last rank back to the first": _open_crossing(group, per_node)
            * 2
            * (n - 1)
            / n
            * payload,
            "the whole payload per hop; a ring sends 2 (n-1)/n of it": crossing * payload,
            "2 payloads per hop; of n ranks each sends 2 (n-1)/n of it": 2 * crossing * payload,
        }
        raise Wrong(f"{case}: {wanted:g} bytes go between nodes, not {found:g}{_hint(found, hints)}")


@exercise("D", "recommend")
def recommend(answer, ranks=None):
    """`answer(plans, memory)` is a name or None: fits, within 5 % of the fastest that fits, fewest axes, then fastest."""
    draw = random.Random(10)
    cases = [
        ([("a", 80, 1.0, 3), ("b", 80, 1.04, 1)], 80, "b", "4 % slower with fewer axes"),
        ([("a", 80, 1.0, 3), ("b", 80, 1.1, 1)], 80, "a", "10 % slower is not close"),
        # the fastest of all does not fit: it must not set the limit
        (
            [("a", 99, 0.5, 1), ("b", 70, 1.04, 1), ("c", 70, 1.0, 2)],
            80,
            "b",
            "what does not fit sets no limit",
        ),
        ([("a", 90, 1.0, 1), ("b", 50, 2.0, 1)], 80, "b", "a needs 90 bytes of 80"),
        ([("a", 90, 1.0, 1), ("b", 99, 2.0, 1)], 80, None, "nothing fits"),
        ([], 80, None, "there is no plan"),
        ([("a", 70, 1.03, 1), ("b", 70, 1.01, 1)], 80, "b", "of equally many axes the faster"),
    ]
    for _ in range(40):
        names = [f"plan {i}" for i in range(6)]
        rows = [(name, draw.randint(40, 100), round(draw.uniform(1, 1.15), 3), draw.randint(1, 3)) for name in names]
        cases.append((rows, 80, _recommended(rows, 80), "by the rule"))
    for rows, memory, wanted, why in cases:
        given = answer(list(rows), memory)
        if given is ...:
            raise NotImplementedError
        if given == wanted and isinstance(given, (str, type(None))):
            continue
        if isinstance(given, tuple):
            raise Wrong(f"return the plan's name, not {plain(given)}")
        told = (
            ", ".join(
                f"{name} ({held} bytes, {s:g} s, {axes} {'axis' if axes == 1 else 'axes'})"
                for name, held, s, axes in rows
            )
            or "no plans"
        )
        raise Wrong(f"with {memory} bytes of memory and {told}: {wanted!r} ({why}), not {plain(given)}")


@exercise(1, "place the axes")
def best_order(answer, ranks=None):
    """`answer(sizes, payloads, per_node)` is a tuple of axes, outermost first, with the least bytes between nodes."""
    draw = random.Random(11)
    cases = [({"pipeline": 2, "data": 2, "tensor": 4}, {"pipeline": 1.0, "data": 3.0, "tensor": 50.0}, 8)]
    for _ in range(12):
        sizes = {
            "pipeline": draw.choice((1, 2, 4)),
            "data": draw.choice((2, 4)),
            "tensor": draw.choice((2, 4)),
        }
        payloads = {axis: float(draw.randint(1, 100)) for axis in sizes}
        cases.append((sizes, payloads, prod(sizes.values()) // 2))
    for sizes, payloads, per_node in cases:
        case = f"{sizes}, payloads {payloads}, {per_node} ranks per node"
        given = answer(dict(sizes), dict(payloads), per_node)
        if given is ...:
            raise NotImplementedError
        try:
            order = tuple(given)
        except TypeError:
            raise Wrong(f"return a tuple of axes, not {shown(given)}") from None
        if sorted(map(str, order)) != sorted(sizes):
            raise Wrong(f"return each of {', '.join(sizes)} once, not {plain(given)}")
        totals = {o: _between(o, sizes, payloads, per_node) for o in itertools.permutations(sizes)}
        least, most = min(totals.values()), max(totals.values())
        if not _near(totals[order], least):
            why = "; no order sends more: is the outermost axis first?" if _near(totals[order], most) else ""
            best = min(totals, key=totals.get)
            raise Wrong(
                f"{case}: {' x '.join(order)} sends {totals[order]:g} bytes between nodes, {' x '.join(best)} {least:g}{why}"
            )


@exercise(2, "a roofline, with its units")
def roofline(answer, ranks=None):
    """`answer(flop, memory_bytes, link_bytes, peak_tflops, memory_gbs, link_gbits)` is (seconds, what bounds them)."""
    draw, seen = random.Random(12), set()
    while len(seen) < 3 or draw.random() < 0.9:
        flop, memory, link = (10 ** draw.uniform(*span) for span in ((11, 14), (8.5, 11.5), (6.5, 9.5)))
        peak, memory_gbs, link_gbits = (
            draw.uniform(100, 1000),
            draw.uniform(1000, 5000),
            draw.choice((100, 200, 400)),
        )
        parts = {
            "compute": flop / peak / 1e12,
            "memory": memory / memory_gbs / 1e9,
            "link": link * 8 / link_gbits / 1e9,
        }
        bound = max(parts, key=parts.get)
        seen.add(bound)
        given = answer(flop, memory, link, peak, memory_gbs, link_gbits)
        _judge_roofline(given, parts, bound)


@exercise(3, "an all-reduce in three phases")
def phases(answer, ranks=None):
    """`answer(M, G, N)` is the bytes that a rank sends: reduce-scatter inside, all-reduce between, all-gather inside."""
    names = (
        "the reduce-scatter inside the node",
        "the all-reduce between nodes",
        "the all-gather inside the node",
    )
    for M, G, N in ((800, 4, 3), (800, 2, 2), (1200, 8, 2), (640, 1, 4), (640, 8, 1), (4e9, 8, 16)):
        given = answer(M, G, N)
        if given is ...:
            raise NotImplementedError
        try:
            found = [number(one, "three numbers of bytes") for one in given]
        except TypeError:
            raise Wrong(f"return three numbers of bytes, not {shown(given)}") from None
        if len(found) != 3:
            raise Wrong(f"return three numbers of bytes, not {len(found)}")
        inside = (G - 1) / G * M
        wanted = inside, 2 * (N - 1) / N * M / G, inside
        for name, mine, right in zip(names, found, wanted, strict=True):
            if not _near(mine, right):
                hints = {
                    "all M bytes; inside the node M/G is left for each rank": 2 * (N - 1) / N * M,
                    "a whole all-reduce, which is a reduce-scatter and an all-gather": 2 * inside,
                    "an all-reduce of a G-th; but each rank must receive all that it does not have": 2 * inside / G,
                    "a G-th of that; but each rank must receive all that it does not have": inside / G,
                    "half of that; an all-reduce goes around twice": right / 2,
                }
                raise Wrong(
                    f"M = {M:g}, G = {G}, N = {N}: a rank sends {right:g} bytes in {name}, not {mine:g}{_hint(mine, hints)}"
                )


# ---- grids ----


def _grid(shape):
    return " x ".join(map(str, shape))


def _place(rank, shape):
    place = []
    for size in reversed(shape):
        rank, here = divmod(rank, size)
        place.append(here)
    return place[::-1]


def _wanted_groups(shape, axis):
    groups = {}
    for rank in range(prod(shape)):
        place = _place(rank, shape)
        groups.setdefault((*place[:axis], *place[axis + 1 :]), []).append(rank)
    return list(groups.values())


def _whole_numbers(given, case, what):
    if given is ...:
        raise NotImplementedError
    try:
        return [operator.index(one) for one in given]
    except TypeError:
        raise Wrong(f"{case}: return {what} as a list of whole numbers, not {plain(given)}") from None


def _groups(given, case):
    if given is ...:
        raise NotImplementedError
    try:
        return [[operator.index(rank) for rank in group] for group in given]
    except TypeError:
        raise Wrong(f"{case}: return a list of lists of ranks, not {plain(given)}") from None


def _judge_groups(found, shape, axis, case):
    wanted, n = _wanted_groups(shape, axis), prod(shape)
    if sorted(found) == sorted(wanted):
        return
    flat = sorted(rank for group in found for rank in group)
    if flat != list(range(n)):
        twice = sorted({rank for rank in flat if flat.count(rank) > 1})
        missing = sorted(set(range(n)) - set(flat))
        if twice:
            raise Wrong(f"{case}: rank {twice[0]} is in {flat.count(twice[0])} groups; each is in exactly one")
        if missing:
            raise Wrong(f"{case}: rank {missing[0]} is in no group; each is in exactly one")
        raise Wrong(f"{case} has ranks 0 to {n - 1}, not {flat[-1]}")
    if sorted(map(sorted, found)) == sorted(wanted):
        raise Wrong(f"{case}: the groups are right; put each in the order of its coordinate, as {wanted[0]}")
    for other in range(len(shape)):
        if other != axis and sorted(found) == sorted(_wanted_groups(shape, other)):
            raise Wrong(f"{case}: these are the groups of axis {other}; axis 0 is the outermost")
    for group in found:
        if group not in wanted:
            size = shape[axis]
            why = f"; a group of this axis has {size} rank{'s' * (size > 1)}" if len(group) != size else ""
            right = next(one for one in wanted if group[0] in one)
            raise Wrong(f"{case}: rank {group[0]} is in the group {right}, not {group}{why}")


# ---- links ----


def _crossing(group, per_node):
    return _open_crossing(group, per_node) + (group[-1] // per_node != group[0] // per_node)


def _open_crossing(group, per_node):
    return sum(a // per_node != b // per_node for a, b in itertools.pairwise(group))


def _between(order, sizes, payloads, per_node):
    """Bytes between nodes of all axes with the axes in this order."""
    shape = [sizes[axis] for axis in order]
    return sum(
        _crossing(group, per_node) * 2 * (len(group) - 1) / len(group) * payloads[axis]
        for i, axis in enumerate(order)
        for group in _wanted_groups(shape, i)
    )


# ---- plans and rooflines ----


def _recommended(plans, memory):
    fitting = [plan for plan in plans if plan[1] <= memory]
    if not fitting:
        return None
    limit = 1.05 * min(plan[2] for plan in fitting)
    return min((plan for plan in fitting if plan[2] <= limit), key=lambda plan: (plan[3], plan[2]))[0]


def _judge_roofline(given, parts, bound):
    if given is ...:
        raise NotImplementedError
    try:
        seconds, said = given
    except (TypeError, ValueError):
        raise Wrong(f"return (seconds, what bounds them), not {shown(given)}") from None
    found, wanted = number(seconds, "seconds, a number, first"), parts[bound]
    told = ", ".join(f"{name} {s:.3g} s" for name, s in parts.items())
    if not _near(found, wanted):
        hints = {
            "their sum; they overlap": sum(parts.values()),
            "an eighth: the link's bits were taken for bytes": parts["link"] / 8,
            "eight times the link's: a byte has 8 bits, so divide the bandwidth once": parts["link"] * 8,
            "the shortest": min(parts.values()),
            "with GB of 2^30 bytes; data sheets count in 10^9": parts["memory"] * 1e9 / 2**30,
            "with tera as 2^40; data sheets count in 10^12": parts["compute"] * 1e12 / 2**40,
        }
        for power in (3, 6, 9, 12):
            for sign in (power, -power):
                hints[f"off by a factor of 10^{sign}: look at the units"] = wanted * 10.0**sign
        raise Wrong(f"{told}: it takes {wanted:.4g} s, not {found:.4g} s{_hint(found, hints)}")
    if said != bound:
        raise Wrong(f"{told}: the seconds are right; what bounds them is {bound!r}, not {plain(said)}")


def _near(found, wanted):
    return abs(found - wanted) <= 1e-9 * max(abs(wanted), 1e-12)


def _hint(found, hints):
    return next((f": that is {why}" for why, value in hints.items() if value and _near(found, value)), "")
