"""Checks of lesson 10: coordinates, groups, bytes between nodes, exposed seconds, plans, orders of axes, phases.

Nothing here communicates: every rank judges the same numbers.
"""

import functools
import itertools
from math import isclose, prod

from manyhands.checks import Wrong, exercise
from manyhands.checks.drawn import CLOSE, luck, sizes
from manyhands.checks.expect import expect_equal, expect_number, plain, several
from manyhands.checks.witness import shown
from manyhands.launch.program import say

SHAPES = ((2, 3), (2, 2, 2), (4,), (3, 1, 4), (2, 2, 3, 2), (1, 1), (5, 2, 3))
CUBE = (2, 2, 2)  # the grid that build B draws
_drawn = {}  # {axis: the groups of CUBE that the learner's code returned}


def draws_groups(check):
    """Make the check of the groups print the learner's groups of eight ranks, with a ✗ at wrong ones."""

    @functools.wraps(check)
    def and_draw(answer, ranks=None, **given):
        _drawn.clear()
        verdict = check(answer, ranks, **given)
        if ranks is None or ranks.rank == 0:
            for axis, groups in _drawn.items():
                right = _groups(CUBE, axis)
                cells = [" ".join(map(str, group)) + " ✗" * (group not in right) for group in groups]
                say(f"axis {axis} of 2 x 2 x 2: {' | '.join(cells)}")
        return verdict

    return and_draw


@exercise("A", "from a rank to its coordinates")
def coordinates(answer, ranks=None):
    """`answer(rank, shape)` is the list of coordinates of `rank` on a grid whose last axis runs fastest."""
    for shape in SHAPES:
        for rank in reversed(range(prod(shape))):  # reversed: on rank 1 two likely mistakes agree
            wanted = _place(rank, shape)
            slips = {
                "the last axis runs fastest, yours is the first": _place(rank, shape[::-1])[::-1],
                "these are the coordinates back to front": wanted[::-1],
            }
            case = f"the coordinates of rank {rank} on a grid of {' x '.join(map(str, shape))}"
            expect_equal(answer(rank, shape), wanted, case, slips)


@draws_groups
@exercise("B", "the groups of an axis")
def groups_of(answer, ranks=None):
    """`answer(shape, axis)` is all groups of that axis, in any order; each in the order of its coordinate."""
    drawn = {axis: [list(group) for group in plain(answer(CUBE, axis))] for axis in range(3)}
    _drawn.update(drawn)
    for shape in SHAPES:
        for axis in range(len(shape)):
            found, wanted = sorted(map(list, plain(answer(shape, axis)))), _groups(shape, axis)
            slips = {
                f"these are axis {i}'s groups, equal in coordinate {axis}; axis 0 is the outermost": _groups(shape, i)
                for i in range(len(shape))
            }
            slips["each rank is in exactly one"] = None if sorted(sum(found, [])) == [*range(prod(shape))] else found
            slips["in a group ranks have their order"] = (
                found if sorted(map(sorted, found)) == wanted != found else None
            )
            expect_equal(found, wanted, f"the groups of axis {axis} of a grid of {' x '.join(map(str, shape))}", slips)


@exercise("C", "bytes between nodes")
def slow_bytes(answer, ranks=None):
    """`answer(group, payload, per_node)` is what a ring all-reduce in that order sends between nodes in all."""
    draw = luck(9)
    drawn = [
        (draw.sample(range(20), draw.randint(2, 8)), draw.randint(1, 6), draw.choice((997, 1009, 1013)))
        for _ in range(8)
    ]
    for group, per_node, payload in (
        ([0, 1, 2, 3, 4, 5, 6], 3, 1201),  # the first: every likely mistake gives another number
        ([0, 2, 1, 3], 2, 1001), ([0, 1, 2, 3], 4, 1000), ([5], 2, 640), ([2, 3, 10, 11], 4, 4e9), *drawn,
    ):  # fmt: skip
        n, crossing = len(group), _crossing(group, per_node)
        each = 2 * (n - 1) / n * payload
        slips = {
            f"that is all {n} hops; {crossing} of them cross": n * each,
            "that is one rank's share of them; add up the group": crossing * each / n,
            "that is half; an all-reduce goes around twice": crossing * each / 2,
            "that is what a rank sends, whether it crosses or not": each,
            "that is without the hop from the last rank back to the first": _crossing_on_a_line(group, per_node) * each,
            "that is the whole payload per hop; a ring sends 2 (n-1)/n of it": crossing * payload,
            "that is 2 payloads per hop; of n ranks each sends 2 (n-1)/n of it": 2 * crossing * payload,
        }
        case = f"with {payload:g} bytes in the group {group} on nodes of {per_node}, what goes between nodes"
        slips = slips if payload == 1201 else {}  # later cases repeat these mistakes
        expect_number(answer(list(group), payload, per_node), crossing * each, case, "bytes", slips, CLOSE)


@exercise("D", "exposed seconds")
def exposed_s(answer, ranks=None):
    """`answer(sent_bytes, bytes_per_s, behind_s)` is the exposed communication time: the seconds beyond `behind_s`."""
    draw = luck(14)
    drawn = [
        (draw.uniform(1e9, 9e10), draw.choice((50e9, 450e9)), draw.choice((0.0, draw.uniform(0.01, 0.3))))
        for _ in range(12)
    ]
    for sent, rate, behind in ((7e9, 50e9, 0.05), (3.35e9, 50e9, 0.11), (7e9, 450e9, 0.0), *drawn):
        seconds = sent / rate
        wanted = max(0.0, seconds - behind)
        slips = {
            "that is all of it; communication hidden behind computation is not waited for": seconds,
            "that is negative: messages that end early do not save time": seconds - behind,
            "that is the part that is hidden": min(seconds, behind),
            "that is the computation left over to hide more communication": behind - seconds,
            "that is the messages and the computing one after the other": seconds + behind,
            "divide the bytes by bytes per second": rate / sent,
        }
        case = f"{sent:g} bytes at {rate:g} bytes/s behind {behind:g} s of computing: what is waited for"
        expect_number(answer(sent, rate, behind), wanted, case, "s", slips, CLOSE)


@exercise("E", "recommend")
def recommend(answer, ranks=None):
    """`answer(plans, memory)` is a name or None: fits, within 5 % of the fastest that does, fewest axes, fastest."""
    draw = luck(10)
    cases = [
        ([("a", 80, 1.0, 3), ("b", 80, 1.04, 1)], "b", "4 % slower with fewer axes"),
        ([("a", 80, 1.0, 3), ("b", 80, 1.1, 1)], "a", "10 % slower is not close"),
        ([("a", 99, 0.5, 1), ("b", 70, 1.04, 1), ("c", 70, 1.0, 2)], "b", "what does not fit sets no limit"),
        ([("a", 90, 1.0, 1), ("b", 99, 2.0, 1)], None, "nothing fits"),
        ([], None, "there is no plan"),
        ([("a", 70, 1.03, 1), ("b", 70, 1.01, 1)], "b", "of equally many axes the faster"),
        ([("a", 70, 20.0, 2), ("b", 70, 20.9, 1)], "b", "5 % of 20 s is 1 s"),
    ]
    cases = [(plans, 80, wanted, why) for plans, wanted, why in cases]
    while len(cases) < 40:
        scale, memory = draw.choice((0.01, 1.0, 30.0)), draw.randint(45, 110)  # s, bytes
        plans = [
            (f"plan {i}", draw.randint(40, 100), round(scale * draw.uniform(1, 1.15), 4), draw.randint(1, 3))
            for i in range(6)
        ]
        if all(abs(a[2] - 1.05 * b[2]) > 1e-9 for a, b in itertools.permutations(plans, 2)):  # 5 % by any arithmetic
            cases.append((plans, memory, _recommended(plans, memory), "by the rule"))
    for plans, memory, wanted, why in cases:
        told = [f"{name} ({held} bytes, {s:g} s, axes: {axes})" for name, held, s, axes in plans]
        case = f"with {memory} bytes of memory and {', '.join(told) or 'no plans'}: what to use ({why})"
        found, right = answer(list(plans), memory), next((plan for plan in plans if plan[0] == wanted), None)
        if right and found is None:
            raise Wrong(f"{case} should be {wanted!r}, and None came: {right[1]} bytes fit into {memory}")
        expect_equal(found, wanted, case, {"return the plan's name alone": right})


@exercise(1, "place the axes")
def best_order(answer, ranks=None):
    """`answer(sizes, payloads, per_node)` is a tuple of axes, outermost first, with the least bytes between nodes."""
    draw, wrong, backwards = luck(11), "", True
    cases = [({"pipeline": 2, "data": 2, "tensor": 4}, {"pipeline": 1.0, "data": 3.0, "tensor": 50.0}, 8)]
    while len(cases) < 20:  # in some cases, putting the axis with the fewest bytes, or ranks, outermost is not best
        axes = ("context", "pipeline", "data", "tensor")[draw.randint(0, 1) :]
        degrees, payloads = ({axis: draw.randint(1, most) for axis in axes} for most in (4, 100))
        if 2 <= (per_node := prod(degrees.values()) // draw.choice((2, 3))) <= 24:
            cases.append((degrees, payloads, per_node))
    for degrees, payloads, per_node in cases:
        given = answer(dict(degrees), dict(payloads), per_node)
        order = tuple(given)
        if sorted(map(str, order)) != sorted(degrees):
            raise Wrong(f"return each of {', '.join(degrees)} once, not {shown(given)}")
        totals = {o: _between(o, degrees, payloads, per_node) for o in itertools.permutations(degrees)}
        best = min(totals, key=totals.get)
        backwards &= isclose(totals[order[::-1]], totals[best])
        if not wrong and not isclose(totals[order], totals[best]):
            wrong = (
                f"{degrees}, payloads {payloads}, {per_node} ranks per node: {' x '.join(order)} sends "
                f"{totals[order]:g} bytes between nodes, {' x '.join(best)} {totals[best]:g}"
            )
    if wrong:
        raise Wrong(wrong + "; your orders are right from the other end: is the outermost axis first?" * backwards)


@exercise(2, "a roofline, with its units")
def roofline(answer, ranks=None):
    """`answer(flop, memory_bytes, link_bytes, peak_tflops, memory_gbs, link_gbits)` is (seconds, what bounds them)."""
    draw, bounds = luck(12), set()
    while len(bounds) < 3 or draw.random() < 0.9:
        flop, memory, link = (10 ** draw.uniform(*span) for span in ((11, 14), (8.5, 11.5), (6.5, 9.5)))
        flop, memory = (flop, memory) if bounds else (flop / 1e7, memory / 1e7)  # the first: the link's slips show
        peak, memory_gbs, link_gbits = draw.uniform(100, 1000), draw.uniform(1000, 5000), draw.choice((100, 200, 400))
        parts = {"compute": flop / peak / 1e12, "memory": memory / memory_gbs / 1e9, "link": link / link_gbits * 8e-9}
        bound = max(parts, key=parts.get)
        bounds.add(bound)
        told = ", ".join(f"{name} {s:.3g} s" for name, s in parts.items())
        slips = {
            "that is their sum; they overlap": sum(parts.values()),
            "a byte has 8 bits: divide link_gbits by 8, once": [parts["link"] * x for x in (1 / 8, 8, 1 / 64)],
            "memory_gbs counts bytes, not bits": parts["memory"] * 8,
            "that is the shortest": min(parts.values()),
            "that is with GB of 2^30 bytes; data sheets count in 10^9": parts["memory"] * 1e9 / 2**30,
            "that is with tera as 2^40; data sheets count in 10^12": parts["compute"] * 1e12 / 2**40,
        }
        for power in (3, -3, 6, -6, 9, -9, 12, -12):
            slips[f"that is off by a factor of 10^{power}: look at the units"] = parts[bound] * 10.0**power
        given = flop, memory, link, peak, memory_gbs, link_gbits
        seconds, said = several(answer(*given), 2, "(seconds, what bounds them)")
        expect_number(seconds, parts[bound], f"{told}: the time", "s", slips)
        expect_equal(said, bound, f"{told}: the seconds are right; what bounds them")


@exercise(3, "an all-reduce in three phases")
def phases(answer, ranks=None):
    """`answer(M, G, N)` is the bytes a rank sends: reduce-scatter inside, all-reduce between, all-gather inside."""
    drawn = sizes(13, 3, 2, 19)
    for M, G, N in ((800, 4, 3), (801, 2, 2), (1201, 8, 2), (640, 1, 4), (640, 8, 1), (4e9, 8, 16), drawn):
        first, second, third = several(answer(M, G, N), 3, "three numbers")
        inside, between = (G - 1) / G * M, 2 * (N - 1) / N * M / G
        of_inside = {
            "that is a whole all-reduce, which is a reduce-scatter and an all-gather": 2 * inside,
            "that is an all-reduce of a G-th; but each rank must receive all that it does not have": 2 * inside / G,
            "that is a G-th of it; but each rank must receive all that it does not have": inside / G,
            "that is one part; a ring has G - 1 hops, each with one": M / G,
        }
        of_between = {
            "that is all M bytes; inside the node M/G is left for each rank": between * G,
            "that is half of it; an all-reduce goes around twice": between / 2,
        }
        for phase, found, wanted, slips in (
            ("the reduce-scatter inside the node", first, inside, of_inside),
            ("the all-reduce between nodes", second, between, of_between),
            ("the all-gather inside the node", third, inside, of_inside),
        ):
            case = f"with M = {M:g}, G = {G} and N = {N} what a rank sends in {phase}"
            expect_number(found, wanted, case, "bytes", slips, CLOSE)


def _place(rank, shape):
    place = []
    for size in reversed(shape):
        rank, here = divmod(rank, size)
        place.append(here)
    return place[::-1]


def _groups(shape, axis):
    groups = {}
    for rank in range(prod(shape)):
        place = _place(rank, shape)
        groups.setdefault((*place[:axis], *place[axis + 1 :]), []).append(rank)
    return sorted(groups.values())


def _crossing(group, per_node):
    return _crossing_on_a_line(group, per_node) + (group[-1] // per_node != group[0] // per_node)


def _crossing_on_a_line(group, per_node):
    return sum(a // per_node != b // per_node for a, b in itertools.pairwise(group))


def _between(order, sizes, payloads, per_node):
    """Return the bytes between nodes, over all axes, with the axes in this order."""
    shape = [sizes[axis] for axis in order]
    return sum(
        _crossing(group, per_node) * 2 * (len(group) - 1) / len(group) * payloads[axis]
        for i, axis in enumerate(order)
        for group in _groups(shape, i)
    )


def _recommended(plans, memory):
    fitting = [plan for plan in plans if plan[1] <= memory]
    limit = 1.05 * min((plan[2] for plan in fitting), default=0)
    close = [plan for plan in fitting if plan[2] <= limit]
    return min(close, key=lambda plan: (plan[3], plan[2]))[0] if close else None
