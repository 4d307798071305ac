"""Each check of lesson 10 accepts right answers in another style and rejects mutants, by name, with the numbers."""

import numpy as np
import torch
from exercises import Answers
from manyhands.checks import meshes_and_planning as checks

ALL, BEST = "list(groups.values())", "min(itertools.permutations(sizes), key=total)"
WAIT = "max(0.0, sent_bytes / bytes_per_s - behind_s)"
REJECTED = {
    "coordinates": [
        ("reversed(shape)", "shape", "insert(0, here)", "append(here)", "the last axis runs fastest, yours is"),
        ("insert(0, here)", "append(here)", "should be [1, 2], not [2, 1]: these are the coordinates back"),
        ("reversed(shape)", "reversed(shape[-2:])", "should be [1, 1, 1], not [1, 1]"),
        ("place.insert(0, here)", "place.insert(0, rank)", "should be [1, 2], not [0, 1]"),
        ("place.insert(0, here)", "place.insert(0, float(here))", "should be [1, 2], not [1.0, 2.0]"),
        ("place.insert(0, here)", "place.insert(0, here + 1)", "should be [1, 2], not [2, 3]"),
        ("divmod(rank, size)", "rank // size, rank // size % size",
         "the coordinates of rank 5 on a grid of 2 x 3 should"),
        ("divmod(rank, size)", "divmod(rank, shape[0])", "the coordinates of rank 5 on a grid of 2 x 3 should be"),
        ("return place", "return place[:-1]", "should be [1, 2], not [1]"),
    ],
    "groups_of": [
        ("place.pop(axis)", "place = [place.pop(axis)]", "equal in coordinate 0"),
        ("tuple(place)", "rank // shape[axis]", "not [[0, 1], [2, 3], [4, 5]]"),
        ("pop(axis)", "pop(-1 - axis)", "of a grid of 2 x 3 should be [[0, 3], [1, 4], [2, 5]], not"),
        (ALL, f"{ALL}[:1]", "not [[0, 3]]: each rank is in exactly one"),
        (ALL, "[[*map(float, group)] for group in groups.values()]", "not [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]."),
        (ALL, "[group for group in groups.values() for _ in group]", "each rank is in exactly one"),
        ("tuple(place)", "0", "not [[0, 1, 2, 3, 4, 5]]"),
        (ALL, "[[coordinates(r, shape)[axis] for r in group] for group in groups.values()]",
         "should be [[0, 3], [1, 4]"),
        ("pop(axis)", "pop(0)", "the groups of axis 1 of a grid of 2 x 3 should be"),
        ("pop(axis)", "pop()", "these are axis 1's groups, equal in coordinate 0; axis 0 is the outermost"),
        ("math.prod(shape)", "sum(shape)", "each rank is in exactly one"),
        (ALL, "[group for group in groups.values() if len(group) > 1]", "should be"),
        (ALL, "[group[::-1] for group in groups.values()]", "in a group ranks have their order"),
    ],
    "slow_bytes": [
        ("return crossing", "return n", "all 7 hops; 3 of them cross"),
        ("return crossing * 2", "return crossing * 4", "should be 6,177 bytes, not 12,353 bytes."),
        ("return crossing * ", "return ", "what a rank sends, whether it crosses or not"),
        ("/ n *", "/ n**2 *", "one rank's share of them"),
        ("crossing * 2", "crossing", "that is half; an all-reduce goes around twice"),
        ("in range(n)", "in range(n - 1)", "without the hop from the last rank"),
        ("2 * (n - 1) / n * payload", "payload", "the whole payload per hop"),
        ("2 * (n - 1) / n * payload", "2 * payload", "2 payloads per hop"),
        ("2 * (n - 1) / n * payload", "2 * (n - 1) * (payload // n)", "what goes between nodes should be"),
        ("rank // per_node for rank in group", "i // per_node for i in range(n)", "what goes between nodes should be"),
        ("for rank in group", "for rank in sorted(group)",
         "what goes between nodes should be 6,006 bytes, not 3,003 bytes."),
        ("!= nodes", "== nodes", "should be 6,177 bytes, not 8,235 bytes."),
        ("rank // per_node", "rank % per_node", "should be 6,177 bytes, not 12,353 bytes."),
        ("    return crossing", "    crossing = len(set(nodes))\n    return crossing",
         "what goes between nodes should be"),
    ],
    "exposed_s": [
        (WAIT, WAIT[9:-1], "should be 0 s, not -0.043 s: that is negative"),
        (WAIT, "sent_bytes / bytes_per_s", "should be 0.09 s, not 0.14 s: that is all of it"),
        (WAIT, "min(behind_s, sent_bytes / bytes_per_s)", "should be 0.09 s, not 0.05 s: that is the part that is"),
        ("sent_bytes / bytes_per_s - behind_s", "behind_s - sent_bytes / bytes_per_s", "should be 0.09 s, not 0 s."),
        ("sent_bytes / bytes_per_s - behind_s", "sent_bytes / bytes_per_s + behind_s", "one after the other"),
        (WAIT, "0.0 if behind_s else sent_bytes / bytes_per_s", "should be 0.09 s, not 0 s."),
        (WAIT, "bytes_per_s / sent_bytes", "divide the bytes by bytes per second"),
        ("max(0.0, ", "max(0.001, ", "should be 0 s, not 0.001 s"),
    ],
    "recommend": [
        ("1.05", "1.0", "(4 % slower with fewer axes) should be 'b', not 'a'"),
        ("1.05", "9.9", "(10 % slower is not close) should be 'a', not 'b'"),
        ("_ in fitting", "_ in plans", "what does not fit sets no limit"),
        ("(plan[3], plan[2])", "plan[1]", "should be 'b', not 'a'"),
        ("(plan[3], plan[2])", "plan[3]", "of equally many axes the faster"),
        ("[0] if", " if", "return the plan's name alone"),
        ("1.05 * fastest", "fastest + 0.05", "(5 % of 20 s is 1 s) should be 'b', not 'a'"),
        ("plan[1] <= memory_bytes", "plan[1] <= 80", "by the rule"),
        ("plan[1] <= memory_bytes", "plan[1] < memory_bytes", "should be 'b', and None came: 80 bytes fit into 80."),
        ("min(close,", "min(fitting,", "(10 % slower is not close) should be 'a', not 'b'"),
        ("(plan[3], plan[2])", "(plan[2], plan[3])", "(4 % slower with fewer axes) should be 'b', not 'a'"),
        (" if close else None", "", "your code raised ValueError"),
    ],
    "best_order": [
        (BEST, "tuple(sizes)", "bytes between nodes, "),
        (BEST, f"{BEST}[::-1]", "is the outermost axis first?"),
        (BEST, "tuple(sorted(sizes, key=payloads.get))", "bytes between nodes, "),
        (BEST, "tuple(sorted(sizes, key=sizes.get))", "bytes between nodes, "),
        (BEST, "tuple(sorted(sizes, key=lambda a: payloads[a] * (sizes[a] - 1) / sizes[a]))", "bytes between nodes, "),
        (BEST, BEST.replace("min", "max"), "bytes between nodes, "),
        ("sum(crossing", "max(crossing", "bytes between nodes, "),
        (BEST, "tuple(sorted(sizes, key=payloads.get, reverse=True))", "bytes between nodes, "),
        (BEST, '("pipeline", "tensor")', "return each of pipeline, data, tensor once"),
    ],
    "roofline": [
        (" / 8", "", "a byte has 8 bits: divide link_gbits by 8, once"),
        ("return seconds[bound]", "return sum(seconds.values())", "that is their sum; they overlap"),
        ("memory_gbs * 1e9", "memory_gbs * 2**30", "with GB of 2^30 bytes"),
        ("1e12", "2**40", "with tera as 2^40"),
        ("return seconds", "return 1e3 * seconds", "look at the units"),
        ("link_gbits * 1e9 / 8", "link_gbits * 1e9 * 8", "a byte has 8 bits: divide link_gbits by 8, once"),
        ("memory_gbs * 1e9", "memory_gbs * 1e9 / 8", "memory_gbs counts bytes, not bits"),
        ("seconds[bound], bound", "seconds[bound]", "return (seconds, what bounds them), not 0."),
        ("return seconds[bound]", "return min(seconds.values())", "that is the shortest"),
        ("[bound], bound", "[bound], min(seconds, key=seconds.get)", "what bounds them should be"),
        ("[bound], bound", '[bound], f"{bound} bound"', "the seconds are right; what bounds them should be"),
        ("seconds[bound], bound", "bound, seconds[bound]", "return a number of seconds, not the text 'link'"),
        ("[bound], bound", "[bound], seconds", "what bounds them should be"),
        ("[bound], bound", '[bound], "compute"', "the seconds are right; what bounds them should be"),
    ],
    "phases": [
        ("inside = ", "inside = 2 * ", "that is a whole all-reduce"),
        ("/ G, inside", "/ G, 2 * inside / G", "in the all-gather inside the node"),
        ("/ G, inside", "/ G, inside / G", "a G-th of it; but each rank must"),
        ("* M / G, inside", "* M, inside", "all M bytes; inside the node M/G is"),
        ("inside, 2 * (N", "inside, (N", "an all-reduce goes around twice"),
        ("inside = (G - 1) / G * M", "inside = (G - 1) * (M // G)", "in the reduce-scatter inside the node should be"),
        ("inside = (G - 1) / G * M", "inside = M / G", "that is one part; a ring has G - 1 hops"),
        ("return inside, 2", "return 2", "return three numbers, not the tuple ("),
        ("(N - 1) / N", "(G - 1) / G", "in the all-reduce between nodes should be 266.7 bytes, not 300 bytes."),
        ("M / G, inside", "M / G, 2 * inside", "that is a whole all-reduce"),
        ("(N - 1) / N * M / G", "(N - 1) * M / G", "in the all-reduce between nodes should be"),
    ],
}  # fmt: skip
RIGHT = {
    "coordinates": [lambda rank, shape: np.unravel_index(rank, shape), ("return place", "return iter(place)")],
    "groups_of": [(ALL, "[tuple(group) for group in groups.values()][::-1]"),
        (ALL, "torch.arange(math.prod(shape)).view(shape).movedim(axis, -1).reshape(-1, shape[axis]).tolist()")],
    "slow_bytes": [lambda group, payload, per_node: sum(
        torch.tensor(group).roll(1) // per_node != torch.tensor(group) // per_node
    ) * (2 * (len(group) - 1) * payload / len(group)), ("crossing * 2 * (n - 1) / n * payload",
     "2 * payload * crossing - 2 * payload * crossing / n")],
    "exposed_s": [(WAIT, f"sorted([0, {WAIT[9:-1]}])[1]"),
        (WAIT, "max(0, sent_bytes - behind_s * bytes_per_s) / bytes_per_s"),
        (WAIT, f"torch.tensor({WAIT})")],
    "recommend": [("min(close,", "sorted(close,", "[2]))[0]", "[2]))[0][0]"), ("plan[2] <= 1.05 * fastest",
    "plan[2] / fastest - 1 <= 0.05")],
    "best_order": [(BEST, f"list({BEST})"), (BEST, "sorted(itertools.permutations(sorted(sizes)), key=total)[0]")],
    "roofline": [("link_gbits * 1e9 / 8", "link_gbits * 125e6"), ("[bound], bound", "[bound], str(bound)")],
    "phases": [("inside, 2 * (N - 1) / N * M / G, inside", "[inside, 2 * (N - 1) * (M / G / N), (G - 1) * (M / G)]"),
        ("return inside, 2", "return torch.tensor(inside), 2")],
}  # fmt: skip


class TestAnswers(Answers):
    lesson, checks, rejected, right = "10_meshes_and_planning", checks, REJECTED, RIGHT
    around = "coordinates", "groups_of", "slow_bytes", "crossing"
