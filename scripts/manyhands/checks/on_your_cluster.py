"""Checks of lesson 15: the cores beside a GPU, one copy per node, a NCCL log, a job's directives, the rows of a sweep.

Only the copies need messages, and a folder that all ranks see: the nodes are made up, some ranks each.
"""

import re
from pathlib import Path

import torch.distributed as dist

from manyhands.checks import Wrong, exercise
from manyhands.checks.drawn import in_turn, luck
from manyhands.checks.expect import count, expect_equal, expect_refusal, plain
from manyhands.launch import recorded_runs
from manyhands.measure import wire

# Polaris as its guide shows it, and nodes where two or three GPUs share the nearest cores: [(cores, GPUs)]
POLARIS = [(list(range(8 * d, 8 * d + 8)), [3 - d]) for d in range(4)]


def _nodes():
    draw, found = luck(1), [("Polaris", POLARIS)]
    for share, domains in ((2, 2), (3, 2), (2, 4)):
        gpus, first, node = list(range(share * domains)), 0, []
        while gpus == sorted(gpus):
            draw.shuffle(gpus)
        for d in range(domains):
            first += 1  # a core that the system keeps for itself
            own = share * draw.randint(2, 6) + draw.randrange(share)
            node.append((list(range(first, first + own)), gpus[share * d : share * (d + 1)]))
            first += own
        found.append((f"a node of {count(domains, 'domain')} with {share} GPUs each", node))
    return found


@exercise("B", "the cores beside a GPU")
def cores_beside(answer, ranks=None):
    """`answer(gpu, domains)`, domains [(cores, GPUs)]: that GPU's equal share of the cores nearest to it, in order."""
    for name, domains in in_turn(_nodes()):
        every = [core for cores, _ in domains for core in cores]
        each_of_all = len(every) // sum(len(gpus) for _, gpus in domains)
        for gpu, cores, gpus in sorted((gpu, own, its) for own, its in domains for gpu in its):
            each, k, shared = len(cores) // len(gpus), gpus.index(gpu), len(gpus) > 1
            found = sorted(plain(list(answer(gpu, [(list(own), list(its)) for own, its in domains]))))
            counted = every[gpu * each_of_all :][:each_of_all]
            slips = {
                "those are counted off by the GPU's number; look up in which domain it is": (
                    counted if not set(counted) & set(cores) else None
                ),
                f"those are all cores of its domain, which {len(gpus)} GPUs share": cores if shared else None,
                "those are dealt like cards; cores that follow each other share caches": (
                    cores[k :: len(gpus)][:each] if shared else None
                ),
            }
            slips |= {f"those are GPU {other}'s": cores[i * each : (i + 1) * each] for i, other in enumerate(gpus)}
            expect_equal(found, cores[k * each : (k + 1) * each], f"on {name} the cores for GPU {gpu}", slips)


WAITS = ("barrier", "all_reduce", "all_gather", "all_to_all")  # no rank leaves these before all have come


@exercise("A", "one copy per node", if_calls_differ="all ranks wait, also those that copy nothing")
def stage(answer, ranks, folder):
    """`answer(copy, source, target, local_rank)`: one rank of each node copies, and nobody returns before it has.

    What another job left half-written at `target` does not count. `folder`: one that all ranks see.
    """
    n, rank = ranks.world_size, ranks.rank
    for per_node in sorted({1, min(2, n), n}):
        node, local_rank = divmod(rank, per_node)
        content = bytes(luck(per_node).randrange(256) for _ in range(100))
        source, target = Path(folder) / "build A, source", Path(folder) / f"build A, node {node} of {per_node}"
        if local_rank == 0:
            target.write_bytes(content[:50])  # what a killed job left
        if rank == 0:
            source.write_bytes(content)
        dist.barrier()
        made = []
        with wire.watch() as seen:

            def copy(here, there, made=made, seen=seen):
                Path(there).write_bytes(Path(here).read_bytes())
                made.append(len(seen.calls))

            answer(copy, source, target, local_rank)
        waited = [call.op for call in seen.calls[max(made, default=0) :] if call.op in WAITS]
        said = [None] * n
        dist.all_gather_object(said, (len(made), bool(waited)))
        _judge_copies(said, per_node, target, content)


def _judge_copies(said, per_node, target, content):
    """Raise Wrong by what the ranks say: [(copies made, did it wait for the others afterwards)]."""
    nodes = [said[first : first + per_node] for first in range(0, len(said), per_node)]
    case = f"on {count(len(nodes), 'node')} of up to {count(per_node, 'rank')}"
    if not any(made for made, _ in said):
        raise Wrong(f"{case} nobody has called copy: what lay at the target is half a file, of a job that was killed")
    for node, of_ranks in enumerate(nodes):
        copies = sum(made for made, _ in of_ranks)
        if copies == 0:
            raise Wrong(f"{case} node {node} has no copy: rank 0 is one of the whole job, local rank 0 is one per node")
        if copies > 1:
            raise Wrong(f"{case} node {node} made {copies} copies of the same file, and one is enough for its ranks")
        for local_rank, (made, waited) in enumerate(of_ranks):
            if made and not waited:
                who = f"local rank {local_rank} of node {node}"
                raise Wrong(f"{case} nobody waits for {who} after its copy: the others may read half a file")
    if target.read_bytes() != content:
        raise Wrong(f"{case} the file at the target is not the source")


NETWORKS = ("IB", "Socket", "IBext_v8", "AWS Libfabric", "Mellanox Fabric")


def _log(name, direct, per_node=2):
    """What NCCL says of two nodes whose channels between them go over `name`, None: of one node."""
    draw, nodes = luck(len(name or "")), 2 if name else 1
    lines, n = [], nodes * per_node
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
            way = "P2P/IPC"
            if other // per_node != node:
                way = f"NET/{name}/{draw.randrange(4)}" + "/GDRDMA" * (direct is True or (direct == "half" and channel))
            send = " [send]" * way.startswith("NET")
            ends = f"{rank}[{gpu}] -> {other}[{other % per_node}]"
            lines.append(begin + f"Channel {channel:02}/0 : {ends}{send} via {way}")
    return "\n".join(lines) + "\n"


@exercise(1, "what the log says")
def network(answer, ranks=None):
    """`answer(log)`: (network that carries data between nodes, do all its channels say GDRDMA?); None on one node."""
    cases = [(f"a log of two nodes over {name}", _log(name, direct), (name, direct is True))
             for name in NETWORKS for direct in (True, False, "half") if name != "Socket" or not direct]  # fmt: skip
    cases.append(("a log of one node, where no channel goes over a network,", _log(None, False), None))
    cases.append(("the published log", recorded_runs.text("15_nccl_sockets.out"), ("Socket", False)))
    for what, log, wanted in in_turn(cases):
        given, slips = plain(answer(log)), {}
        if wanted and isinstance(given, list) and len(given) == 2:
            given[1] = bool(given[1])
            slips = {
                f"{other} is what NCCL has found; what it uses stands behind `via`": [other, given[1]]
                for other in {"IB", "Socket"} - {wanted[0]}
            }
            slips |= {
                "some of its channels do not say GDRDMA: those pass through the host's memory": [wanted[0], True],
            }
        expect_equal(given, wanted, f"of {what} what you return", slips)


SHORT = {"-N": "nodes", "-c": "cpus-per-task", "-t": "time", "-n": "ntasks"}


@exercise(3, "your job's directives")
def directives(answer, ranks=None):
    """`answer(nodes, gpus, cores, minutes)`: lines for sbatch; one torchrun on each node starts a rank per GPU."""
    draw = luck(2)
    for nodes, gpus in in_turn([(2, 4), (16, 4), (3, 8)]):
        cores, minutes = gpus * draw.choice((5, 7, 9)), draw.randint(61, 179)
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
            raise Wrong(f"{case} a line with --time is missing: the job would get what the queue gives by itself")
        if not re.fullmatch(r"(\d+-\d+|\d+)(:\d+){0,2}", asked["time"]):
            raise Wrong(f"{case} --time={asked['time']}: sbatch reads minutes, hours:minutes:seconds and days-hours")
        slips = {"two numbers are minutes and seconds": minutes // 60 + minutes % 60 / 60,
                 "the first of three numbers is hours": 60.0 * minutes}  # fmt: skip
        expect_equal(_minutes(asked["time"]), float(minutes), f"--time for {minutes} minutes, in minutes,", slips)


def _read_directives(lines):
    """{long name of an option: its value}; raise Wrong for a line that sbatch would not read, or not as it is meant."""
    asked = {}
    for line in "\n".join(lines if isinstance(lines, (list, tuple)) else [str(lines)]).splitlines():
        if not line.startswith("#SBATCH "):
            raise Wrong(f"sbatch does not read {line!r}: a directive begins with #SBATCH, without a blank in it")
        if "$" in line:
            raise Wrong(f"{line!r} holds a variable, and sbatch reads it before any shell runs")
        for option, value in re.findall(r"(-\w|--[\w-]+)[ =]?([\w:.-]*)", line.split(" #")[0].removeprefix("#SBATCH")):
            asked[SHORT.get(option, option.removeprefix("--"))] = value
    return asked


def _minutes(text):
    """Slurm's time in minutes: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    days, _, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:
        hours, minutes, seconds = (parts + [0, 0])[:3]
    else:
        hours, minutes, seconds = [0, *parts, 0][:3] if len(parts) == 1 else [0, *parts] if len(parts) == 2 else parts
    return 24 * 60 * int(days or 0) + 60.0 * hours + minutes + seconds / 60


@exercise(2, "each row once")
def flags_of(answer, ranks=None):
    """`answer(lines, task, tasks)`: the flags of task number `task` of an array of `tasks`, the first one 1."""
    draw = luck(3)
    for rows in in_turn([2, 5, 3]):
        values = [[f"{draw.randint(1, 9)}e-{k + 3}", str(12 * (k + 1))] for k in range(rows)]
        table = ["optimizer.lr\ttrain.global-batch", *("\t".join(row) for row in values)]
        lines = ["# a comment", "", table[0], table[1], "", *table[2:], ""]
        words = [["--optimizer.lr", lr, "--train.global-batch", batch] for lr, batch in values]
        for task in range(1, rows + 1):
            found = answer(list(lines), task, rows)
            slips = {f"those are row {k}'s, and row 1 is task 1's": row for k, row in enumerate(words, 1)}
            slips["the header holds names, and is no row"] = [
                "--optimizer.lr", "optimizer.lr", "--train.global-batch", "train.global-batch"]  # fmt: skip
            slips["then this task trains with the defaults, and nobody is told"] = []
            expect_equal(found, words[task - 1], f"of a table of {rows} rows the flags of task {task}", slips)
        for tasks in (rows - 1, rows + 1):
            case = f"an array of {tasks} for {rows} rows leaves a row out, or a task without one"
            expect_refusal(lambda n=tasks, lines=lines: answer(list(lines), 1, n), case, tasks, rows)
