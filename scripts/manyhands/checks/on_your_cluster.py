"""Checks of lesson 15: the cores near a GPU, an NCCL log, one copy per node, the rows of a sweep, a job's directives,
the nodes to exclude.

Only the copies communicate. They need a folder that all ranks see; the nodes are simulated, with some ranks each.
"""

import itertools
import re
import string
import time
from pathlib import Path

import torch.distributed as dist

from manyhands.checks import Wrong, exercise
from manyhands.checks.drawn import in_turn, luck
from manyhands.checks.expect import count, expect_equal, expect_number, expect_refusal, plain
from manyhands.checks.witness import listed, said, shown
from manyhands.launch import recorded_runs
from manyhands.measure import wire

# [(cores, GPUs)] of Polaris according to its guide, and of nodes where two or three GPUs share the nearest cores
POLARIS = [(list(range(8 * d, 8 * d + 8)), [3 - d]) for d in range(4)]


def _nodes():
    draw, threads = luck(1), [(list(range(4 * d, 4 * d + 4)) + list(range(8 + 4 * d, 12 + 4 * d)), [d]) for d in (0, 1)]
    found = [("Polaris", POLARIS), ("a node whose cores have two threads", threads)]
    for share, domains in ((2, 2), (3, 2), (2, 4)):
        gpus, first, node = list(range(share * domains)), 0, []
        while gpus == sorted(gpus):
            draw.shuffle(gpus)
        for d in range(domains):
            cores = list(range(first, first + share * draw.randint(3, 6) + draw.randrange(share) + 1))
            first += len(cores)
            cores.remove(draw.choice(cores[1 : len(cores) // share]))  # reserved for the system
            node.append((cores, gpus[share * d : share * (d + 1)]))
        found.append((f"a node of {count(domains, 'domain')} with {share} GPUs each", node))
    return found


@exercise("A", "the cores next to a GPU")
def cores_beside(answer, ranks=None):
    """`answer(gpu, domains)`, domains [(cores, GPUs)]: that GPU's equal share of the cores nearest to it, in order."""
    for name, domains in in_turn(_nodes()):
        every = [core for cores, _ in domains for core in cores]
        each_of_all = len(every) // sum(len(gpus) for _, gpus in domains)
        for gpu, cores, gpus in sorted((gpu, own, its) for own, its in domains for gpu in its):
            each, k, shared = len(cores) // len(gpus), gpus.index(gpu), len(gpus) > 1
            found = answer(gpu, [(list(own), list(its)) for own, its in domains])
            if found is None:
                raise Wrong(f"on {name} you found no cores for GPU {gpu} (None): in which domain's `gpus` is it?")
            if isinstance(found, (str, int)):
                raise Wrong(f"return a list of numbers, not {shown(found)}")
            found = sorted(plain(list(found)))
            counted = every[gpu * each_of_all :][:each_of_all]
            slips = {
                "those are counted off by the GPU's number; look up in which domain it is": (
                    counted if not set(counted) & set(cores) else None
                ),
                f"those are all cores of its domain, which {len(gpus)} GPUs share": cores if shared else None,
                "those are dealt in turn; neighbouring cores share caches": (
                    cores[k :: len(gpus)][:each] if shared else None
                ),
            }
            slips |= {f"those are GPU {other}'s": cores[i * each : (i + 1) * each] for i, other in enumerate(gpus)}
            expect_equal(found, cores[k * each : (k + 1) * each], f"on {name} the cores for GPU {gpu}", slips)


MEET = ("barrier", "all_reduce", "all_gather", "all_to_all", "reduce_scatter")  # barrier
MESSAGES = ("send", "recv")
SLOW_S = 0.15  # extra time of the slow node's copy


@exercise("C", "one copy per node", if_calls_differ="all ranks wait, also those that copy nothing")
def stage(answer, ranks, folder):
    """`answer(copy, source, target, local_rank)`: one rank per node copies; no rank returns before all copies exist.

    Each node is the slow one in turn, and each rank looks at all nodes' files as soon as its call returns. At first, a
    killed job has left half a file with the suffix ".part" on every node; later, all nodes except the slow one have the
    whole file. `folder`: a folder that all ranks see.
    """
    n, rank = ranks.world_size, ranks.rank
    cases = [
        (k, slow, whole) for k in sorted({1, min(2, n), n}) for slow in range(-(-n // k)) for whole in (False, True)
    ]
    for per_node, slow, whole in cases:
        node, local_rank = divmod(rank, per_node)
        content = bytes(luck(10 * per_node + slow).randrange(256) for _ in range(100))
        source = Path(folder) / "build C, source"
        where = f"of {per_node}, {slow} is slow{', others have it' * whole}"  # new names: ranks may still look
        targets = [Path(folder) / f"build C, node {k} {where}" for k in range(-(-n // per_node))]
        has_it = whole and node != slow
        if local_rank == 0:
            targets[node].unlink(missing_ok=True)
            if has_it:
                targets[node].write_bytes(content)
            else:
                targets[node].with_name(targets[node].name + ".part").write_bytes(content[:50])
        if rank == 0:
            source.write_bytes(content)
        dist.barrier()
        made, trusted = [], []
        with wire.watch() as seen:

            def copy(here, there, is_slow=node == slow, target=targets[node], made=made, trusted=trusted, seen=seen):
                time.sleep(SLOW_S * is_slow)
                trusted.append(Path(there) == target)
                Path(there).write_bytes(Path(here).read_bytes())
                made.append(len(seen.calls))

            answer(copy, source, targets[node], local_rank)
            without = [k for k, target in enumerate(targets) if not _holds(target, content)]
        calls = [call.op for call in seen.calls[max(made, default=0) :]]
        said = [None] * n
        dist.all_gather_object(said, (len(made), any(trusted), has_it, without, calls))
        _judge_copies(said, per_node, targets[node], content)


def _holds(target, content):
    return target.exists() and target.read_bytes() == content


def _judge_copies(said, per_node, target, content):
    """Raise Wrong if the ranks' reports show a fault.

    said: for each rank (copies made, whether one was written directly to the target, whether the node already had the
    file, nodes without the file when the rank returned, its calls by then).
    """
    nodes = [said[first : first + per_node] for first in range(0, len(said), per_node)]
    case = f"on {count(len(nodes), 'node')} with up to {count(per_node, 'rank')} each,"
    for node, of_ranks in enumerate(nodes):
        copies, had_it = sum(made for made, *_ in of_ranks), of_ranks[0][2]
        if had_it and copies:
            raise Wrong(f"{case} node {node} has the whole file of an earlier job, and it was copied again")
        if copies == 0 and not had_it:
            why = "rank 0 is one of the whole job, local rank 0 is one per node"
            if node == 0:
                why = "copy where there is no file at the target; a killed job's `.part` is not one"
            raise Wrong(f"{case} node {node} has no copy: {why}")
        if copies > 1:
            raise Wrong(f"{case} node {node} made {copies} copies of the same file, and one is enough for its ranks")
        if any(trusted for _, trusted, *_ in of_ranks):
            raise Wrong(f"{case} node {node} copied to the target itself: killed now, it leaves half a file there")
    if not target.exists():
        raise Wrong(f"{case} there is no file at the target in the end: rename the complete copy, and keep it")
    if target.read_bytes() != content:
        raise Wrong(f"{case} the file at the target is not the source")
    for rank, (*_, without, calls) in enumerate(said):
        if without:
            raise Wrong(f"{case} rank {rank} was back before node {without[0]} had its copy: it may read half a file")
        if calls and not _all_meet(calls, len(said)):
            raise Wrong(f"{case} {listed(sorted(set(calls)))} alone lets some ranks go on before all have come")


def _all_meet(calls, n):
    """Return whether these calls are a barrier for every rank. (The check synchronises each call; a job does not.)"""
    if n == 1 or set(calls) & {*MEET, *MESSAGES}:  # for point-to-point messages, the slow nodes have shown it
        return True
    to_one = [i for i, op in enumerate(calls) if op in ("reduce", "gather")]
    from_one = [i for i, op in enumerate(calls) if op in ("broadcast", "scatter")]
    return len(from_one) >= n or (to_one and from_one and to_one[0] < from_one[-1])


NETWORKS = ("IB", "Socket", "IBext_v8", "AWS Libfabric", "Mellanox Fabric")
WAYS = range(4)  # two nodes, with two channels in each direction


def _log(name, direct, per_node=2, inside="P2P/CUMEM"):
    """Return NCCL's log for two nodes connected over `name`, or for one node if it is None.

    direct: the entries of WAYS used between nodes. inside: the transport of the channels inside a node.
    """
    draw, nodes = luck(len(name or "")), 2 if name else 1
    lines, n, ways = [], nodes * per_node, iter(WAYS)
    for rank in range(n):
        node, gpu = divmod(rank, per_node)
        pid = draw.randint(1000, 9999)
        begin = f"node{node}:{pid}:{pid + 7} [{gpu}] NCCL INFO "
        lines += [
            begin + f"Bootstrap : Using eth0:10.1.2.{node + 1}<0>",
            begin + "NET/IB : No device found." * (name == "Socket")
            + f"NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.1.2.{node + 1}<0>" * (name != "Socket"),
            begin + f"NET/Socket : Using [0]eth0:10.1.2.{node + 1}<0>",
        ]  # fmt: skip
        other = (rank + 1) % n
        for channel in range(2):
            way = inside
            if other // per_node != node:
                way = f"NET/{name}/{draw.randrange(4)}" + "/GDRDMA" * (next(ways) in direct)
            send = " [send]" * way.startswith("NET")
            ends = f"{rank}[{gpu}] -> {other}[{other % per_node}]"
            lines.append(begin + f"Channel {channel:02}/0 : {ends}{send} via {way}")
    return "\n".join(lines) + "\n"


@exercise("B", "which network?")
def network(answer, ranks=None):
    """`answer(log)`: (network that carries data between nodes, do all its channels say GDRDMA?); None on one node."""
    drawn = "".join(luck(5).choices(string.ascii_uppercase, k=4))
    some = [set(), {*WAYS}, *({*WAYS} - {one} for one in WAYS)]  # any one of the channels may be the indirect one
    cases = [(f"a log of two nodes over {name}", _log(name, direct), (name, direct == {*WAYS}))
             for name in (*NETWORKS, drawn) for direct in some if name != "Socket" or not direct]  # fmt: skip
    for inside in ("P2P/IPC", "P2P/CUMEM", "SHM/direct/direct", "P2P/MNNVL"):
        log = _log(None, set(), inside=inside)
        cases.append((f"a log whose channels all go via {inside}", log, None))
    cases.append(("the published log", recorded_runs.text("15_nccl_sockets.out"), ("Socket", False)))
    for what, log, wanted in in_turn(cases):
        given, slips = plain(answer(log)), {}
        if wanted and given is None:
            raise Wrong(f"for {what} you return None, and its channels go `via NET/{wanted[0]}`: to another node")
        if wanted and isinstance(given, list) and len(given) == 2:
            given[1] = bool(given[1])
            slips = {
                f"{other} is what NCCL has found; what it uses stands behind `via`": [other, given[1]]
                for other in {"IB", "Socket"} - {wanted[0]}
            }
            slips |= {
                "some of its channels do not say GDRDMA: those pass through the host's memory": [wanted[0], True],
                "each of its channels to another node has the piece GDRDMA": [wanted[0], False],
            }
        expect_equal(given, wanted, f"for {what}, what you return", slips)


SHORT = {"-N": "nodes", "-c": "cpus-per-task", "-t": "time", "-n": "ntasks"}


@exercise(2, "your job's directives")
def directives(answer, ranks=None):
    """`answer(nodes, gpus, cores, minutes)`: lines for sbatch; one torchrun on each node starts a rank per GPU."""
    draw = luck(2)
    times = [7, 59, 60, 1500, 2880, draw.randint(61, 179)]
    draw.shuffle(times)
    for (nodes, gpus), minutes in zip(in_turn([(2, 4), (16, 4), (3, 8)] * 2), times, strict=True):
        cores = gpus * draw.choice((5, 7, 9))
        asked = _read_directives(answer(nodes, gpus, cores, minutes))
        case = f"for {nodes} nodes with {gpus} GPUs and {cores} cores each"
        for option, wanted, found, slips in (
            ("nodes", nodes, asked.get("nodes"), {}),
            ("ntasks-per-node", 1, asked.get("ntasks-per-node"), {
                f"that starts {gpus} torchruns on each node, and each of them {gpus} ranks": gpus}),
            ("cpus-per-task", cores, asked.get("cpus-per-task"), {
                f"those are one rank's; the one task of a node holds all {gpus} ranks": cores // gpus}),
            ("gpus-per-node", gpus, asked.get("gpus-per-node", asked.get("gres")), {
                "that is the number of the whole job": gpus * nodes}),
        ):  # fmt: skip
            if found is None:
                raise Wrong(f"{case} a line with --{option}={wanted} is missing")
            number = found.rpartition(":")[2]  # gpu:4, a100:4 and gpu:a100:4 are four
            if not number.isdecimal():
                raise Wrong(f"{case} --{option} should be {wanted}, and {found!r} is no number")
            expect_equal(int(number), wanted, f"{case} --{option}", slips)
        if "time" not in asked:
            raise Wrong(f"{case} a line with --time is missing: the job would get the queue's default")
        if not re.fullmatch(r"(\d+-\d+|\d+)(:\d+){0,2}", asked["time"]):
            raise Wrong(f"{case} --time={asked['time']}: sbatch reads minutes, hours:minutes:seconds and days-hours")
        slips = {"one number is minutes, not seconds": 60 * minutes} if asked["time"].isdecimal() else {
            "two numbers are minutes and seconds": minutes // 60 + minutes % 60 / 60,
            "the first of three numbers is hours": 60 * minutes}  # fmt: skip
        expect_number(_minutes(asked["time"]), minutes, f"--time for {minutes} minutes, in minutes,", slips=slips)


def _read_directives(lines):
    """Return {long option: value}; raise Wrong for a line that sbatch would ignore or misread."""
    if not isinstance(lines, (list, tuple, str)):
        raise Wrong(f"return lines, not {shown(lines)}")
    asked = {}
    for line in "\n".join([lines] if isinstance(lines, str) else map(str, lines)).splitlines():
        words = line.split()
        if words and not line.startswith("#"):
            raise Wrong(f"sbatch stops to read directives at the first command, and {line!r} is one")
        if not words or words[0] != "#SBATCH":
            if "SBATCH" in line:
                raise Wrong(f"`sbatch` does not read {line!r}: a directive begins with #SBATCH, without a blank in it")
            continue
        if "$" in line:
            raise Wrong(f"{line!r} holds a variable, and sbatch reads it before any shell runs")
        options = re.findall(r"""(?<!\S)(-\w|--[\w-]+)(?:[ =]?(?!-)["']?([\w:.-]*))""", line.split(" #")[0])
        asked |= {SHORT.get(option, option.removeprefix("--")): value for option, value in options}
    return asked


def _minutes(text):
    """Convert a Slurm time (M, M:S, H:M:S, D-H, D-H:M, D-H:M:S) to minutes."""
    days, _, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:
        hours, minutes, seconds = (parts + [0, 0])[:3]
    else:
        hours, minutes, seconds = [0, *parts, 0][:3] if len(parts) == 1 else [0, *parts] if len(parts) == 2 else parts
    return 24 * 60 * int(days or 0) + 60.0 * hours + minutes + seconds / 60


OPTIONS = ["optimizer.lr", "train.global-batch", "optimizer.beta2", "train.seed"]


@exercise(1, "mend the sweep")
def flags_of(answer, ranks=None):
    """`answer(lines, task, tasks)`: the flags of task number `task` of an array of `tasks`, the first one 1."""
    draw = luck(3)
    for rows, front in in_turn([(2, 1), (5, 0), (1, 2), (3, 2)]):
        names = draw.sample(OPTIONS, draw.randint(1, len(OPTIONS)))
        values = [[f"{draw.randint(1, 9)}e-{10 * k + c}" for c in range(1, len(names) + 1)] for k in range(rows)]
        lines = ["# a comment", ""] * front + ["\t".join(names)]
        for row in values:
            lines += [*(["# another"] if draw.random() < 0.5 else []), "\t".join(row), ""]
        words = [
            [word for pair in zip(names, row, strict=True) for word in (f"--{pair[0]}", pair[1])] for row in values
        ]
        for task in range(1, rows + 1):
            found = _flags(answer, list(lines), task, rows)
            slips = {f"those are row {k}'s, and row 1 is task 1's": row for k, row in enumerate(words, 1)}
            slips["the header holds names, and is not a row"] = [word for name in names for word in (f"--{name}", name)]
            slips["then this task silently trains with the defaults"] = []
            expect_equal(found, words[task - 1], f"of a table of {count(rows, 'row')} the flags of task {task}", slips)
        for tasks in (rows - 1, rows + 1):
            case = f"an array of {tasks} for {count(rows, 'row')} leaves a row out, or a task without one"
            expect_refusal(lambda n=tasks, lines=lines: answer(list(lines), 1, n), case, tasks, rows)


def _flags(answer, lines, task, rows):
    """Return the answer's flags for as many tasks as rows; raise Wrong if it refuses that."""
    try:
        return answer(lines, task, rows)
    except ValueError as error:
        counted = {int(digits) for digits in re.findall(r"\d+", str(error))}
        cause = "the header is not a row, nor is a comment" if rows + 1 in counted else "count the rows"
        raise Wrong(
            f"{count(rows, 'task')} for {count(rows, 'row')} should do: {cause}; yours was {said(error)}"
        ) from None


@exercise(3, "leave out the slow node")
def to_exclude(answer, ranks=None):
    """`answer(measured, least)`, {(node, node): GB/s}: the sorted nodes none of whose pairs reaches `least`."""
    draw = luck(6)
    for num_slow in (1, 0, 2):
        nodes = [f"node{number:03d}" for number in draw.sample(range(1, 400), num_slow + draw.randint(3, 4))]
        slow, least = set(nodes[:num_slow]), draw.randint(30, 40)
        pairs = [tuple(draw.sample(pair, 2)) for pair in itertools.combinations(nodes, 2)]
        draw.shuffle(pairs)
        measured = {pair: least + draw.uniform(*((-20, -5) if slow & {*pair} else (0.5, 8))) for pair in pairs}
        if not slow:
            measured = dict.fromkeys(pairs, float(least))  # that reaches it
        partners = {node for pair, speed in measured.items() if speed < least for node in pair}
        slips = {
            "those are all that were in a slow pair; a slow node makes its partner look slow": partners,
            "those are the nodes to keep": {*nodes} - slow,
        }
        slips = {why: sorted(found) for why, found in slips.items() if found}
        found = answer(dict(measured), least)
        case = f"of {len(nodes)} nodes, {num_slow} of them slow, those to leave out"
        if not isinstance(found, (list, tuple)):
            raise Wrong(f"return a list of names, not {shown(found)}")
        if list(found) != sorted(found):
            raise Wrong(f"{case} are not sorted: {listed(found)}")
        expect_equal(list(found), sorted(slow), case, slips)
