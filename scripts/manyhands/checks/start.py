"""Checks of lesson 00: the sum, the roll call, who am I, is this one world, whose turn is it, a profile, throughput.

The environments below were recorded under the launchers that they name (two Slurm nodes, MPICH's and Open MPI's
mpiexec, torchrun). There are two exceptions: PALS's variables come from the sites' documentation, and in Open MPI's on
a second node the numbers were changed to those of another rank.
"""

import json
import math
import statistics
import time

import torch
import torch.distributed as dist

from manyhands.checks import Wrong, drawn, exercise
from manyhands.checks.expect import count, expect_equal, expect_number, expect_tensor, expect_traffic, truth
from manyhands.checks.witness import shown
from manyhands.launch.run_folder import run_folder
from manyhands.measure import wire


@exercise("A", "the sum over all ranks")
def sum_over_ranks(answer, ranks):
    """answer(x) -> the sum of all ranks' tensors, float32 like x, on every rank, by one all-reduce; x stays."""
    runs = []
    for shape in drawn.in_turn([(1,), (2, 3)]):
        all_ = torch.stack([drawn.normal(10 * r + len(shape), *shape) for r in range(ranks.world_size)]).float()
        mine = all_[ranks.rank].clone()
        with wire.watch() as seen:
            found = answer(mine)
        runs.append((found, mine, all_, seen))
    for found, mine, all_, seen in runs:
        slips = {
            "that is this rank's own": mine,
            "that is the largest, not the sum": all_.amax(0),
            "that is the mean, not the sum": all_.mean(0),
        }
        expect_tensor(found, all_.sum(0), "the tensor that you return", slips, "the sum over all ranks", close=1e-5)
        expect_traffic(seen, "the sum is right", "one all-reduce is enough", calls=1, only=("all_reduce",))


# description, environment, (rank, world size, local rank)
ENVIRONMENTS = [
    (who, dict(pair.split("=") for pair in environ.split()), place)
    for who, environ, place in (
        ("rank 3 of torchrun", "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1", (3, 4, 1)),
        ("rank 3 of MPICH's mpiexec", "PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", (3, 4, 1)),
        ("rank 5 of Open MPI's mpirun, on the second of two nodes",
         "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=6 OMPI_COMM_WORLD_LOCAL_RANK=2 OMPI_COMM_WORLD_LOCAL_SIZE=3 "
         "PMIX_RANK=5", (5, 6, 2)),
        ("rank 5 of PALS", "PALS_RANKID=5 PALS_LOCAL_RANKID=1 PMI_RANK=5 PMI_SIZE=8", (5, 8, 1)),
        ("rank 2 of srun, in a job of 8 tasks that started a step of 4",
         "SLURM_PROCID=2 SLURM_LOCALID=0 SLURM_NTASKS=8 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4", (2, 4, 0)),
        ("the batch script of a Slurm job, which is no rank",
         "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=4 SLURM_JOB_ID=2989", (0, 1, 0)),
        ("rank 1 of mpiexec inside a Slurm job, where Hydra's helper is a step of 2 tasks",
         "PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_ID=1 "
         "SLURM_STEP_NUM_TASKS=2", (1, 4, 1)),
        ("rank 4 of Open MPI's mpirun inside a Slurm job, where its helpers are a step of 2 tasks",
         "OMPI_COMM_WORLD_RANK=4 OMPI_COMM_WORLD_SIZE=6 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=3 "
         "SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2", (4, 6, 1)),
        ("rank 1 of a torchrun that mpiexec started",
         "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 PMI_RANK=0 PMI_SIZE=1 MPI_LOCALRANKID=0", (1, 2, 1)),
        ("a plain python", "PATH=/usr/bin OMP_NUM_THREADS=1", (0, 1, 0)),
    )
]  # fmt: skip


@exercise("C", "who am I")
def who_am_i(answer, ranks):
    """answer(environ) -> (rank, world size, local rank), for every recorded environment."""
    for who, environ, expected in drawn.in_turn(ENVIRONMENTS):
        given, has = dict(environ), ", ".join(f"{name}={value}" for name, value in environ.items())
        found = answer(given)
        if not isinstance(found, tuple) or len(found) != 3:
            raise Wrong(f"return three values, rank, world size and local rank, as a tuple, not {shown(found)}")
        for name, value, wanted in zip(("rank", "world size", "local rank"), found, expected, strict=True):
            as_text = {"variables are text, make numbers of them with int()": str(wanted)}
            expect_equal(value, wanted, f"for {who}, which has {has}, the {name}", as_text)
        if given != environ:
            raise Wrong("do not change the environment: other code reads it later")


@exercise("B", "the roll call")
def roll_call(answer, ranks):
    """answer(rank, started) -> on every rank how many said that they are rank 0, 1, ..., by one all-reduce."""
    n, runs = ranks.world_size, []
    # run every roll on every rank before judging, so that an early fault leaves no rank waiting
    per_node = max(1, n // 2)
    for said, started in (
        (list(range(n)), n),
        (list(range(n)), n + 2),  # two are missing
        ([rank % per_node for rank in range(n)], n),  # two nodes; the local rank was used as the rank
    ):
        with wire.watch() as seen:
            found = torch.as_tensor(answer(said[ranks.rank], started)).tolist()  # the answer may reuse the tensor
        runs.append((said, started, [int(x) if x == int(x) else x for x in found], seen))
    for said, started, counts, seen in runs:
        slips = {
            "return one number for each process that was started": None if len(counts) == started else counts,
            "count both processes if two report the same rank": [int(r in said) for r in range(started)],
            "that is this rank's own 1 alone": [int(r == said[ranks.rank]) for r in range(started)],
            "count what each says, the argument `rank`, not who it is": [int(r < n) for r in range(started)],
            "all put their 1 at the same place": [n] + [0] * (started - 1),
        }
        what = f"where the ranks say {said} and {started} should be there, what every rank holds"
        expect_equal(counts, [said.count(r) for r in range(started)], what, slips)
        if not seen.calls:
            raise Wrong("the roll is right, but no rank was asked: use one all-reduce")
        cure = "one all-reduce is enough, and leaves the roll on every rank"
        expect_traffic(seen, "the roll is right", cure, calls=1, only=("all_reduce",), payload=8 * started)


# number of processes started, and what each reported as (rank, world size)
STARTS = {
    "torchrun --nproc-per-node 4": (4, [(2, 4), (0, 4), (3, 4), (1, 4)]),
    "mpiexec -n 4, but of another MPI": (4, [(0, 1), (0, 1), (0, 1), (0, 1)]),
    "mpiexec -n 2": (2, [(1, 2), (0, 2)]),
    "python": (1, [(0, 1)]),
    "one torchrun --nproc-per-node 2 on each of two nodes, without a common address": (
        4, [(0, 2), (1, 2), (0, 2), (1, 2)],
    ),
    "srun --ntasks 4, and one task died": (4, [(0, 4), (1, 4), (3, 4)]),
    "srun on two nodes, of which one did not start": (2, [(1, 4), (0, 4)]),
    "a script that takes the local rank for the rank, two nodes": (4, [(0, 4), (1, 4), (0, 4), (1, 4)]),
    "srun with a rank that took another's place": (4, [(0, 4), (1, 4), (3, 4), (3, 4)]),
    "srun with two ranks that each took another's place": (4, [(0, 4), (0, 4), (3, 4), (3, 4)]),
    "mpirun whose last process belongs to another MPI": (4, [(0, 4), (1, 4), (2, 4), (3, 2)]),
    "srun --ntasks 4, of which two did not answer and two are another world": (4, [(0, 2), (1, 2)]),
}  # fmt: skip


@exercise(1, "one world or many")
def is_one_world(answer, ranks=None):
    """answer(started, said) -> bool, for correct starts and for starts that went wrong in different ways."""
    for what, (started, said) in STARTS.items():
        expected = sorted(said) == [(rank, started) for rank in range(started)]
        if truth(answer(started, list(said))) != expected:
            verdict = "is one world" if expected else f"is not one world of {started}"
            processes = "1 process was" if started == 1 else f"{started} processes were"
            raise Wrong(f"`{what}` {verdict}: {processes} started and said {said}")


@exercise(2, "whose turn is it")
def in_turn(answer, ranks):
    """answer(append, ranks) appends this rank's line to one file, in rank order, with send and recv alone."""
    # in the run's folder, which is shared by all nodes
    shared = [run_folder(ranks) / f"in_turn.{time.time_ns()}.txt" if ranks.rank == 0 else None]
    dist.broadcast_object_list(shared)
    (path,), lines, made_before = shared, [], []

    def append(line):
        lines.extend(str(line).splitlines() or [""])
        made_before.append(len(seen.calls))
        time.sleep(0.1 * (ranks.world_size - ranks.rank))  # low ranks write slowly, to be overtaken
        with open(path, "a") as file:
            file.write(json.dumps([ranks.rank, str(line)]) + "\n")

    with wire.watch() as seen:
        answer(append, ranks)
    everyone = [None] * ranks.world_size
    dist.all_gather_object(everyone, (len(lines), made_before, [(call.op, call.peer) for call in seen.calls]))
    counts, made_before, calls = zip(*everyone, strict=True)
    if set(counts) != {1}:
        raise Wrong(f"each rank appends one line; yours appended {list(counts)}")
    written = [json.loads(line) for line in path.read_text().splitlines()]
    order = [rank for rank, _ in written]
    if order != sorted(order):
        raise Wrong(f"the lines were written by ranks {order}, in this order: wait until the rank before has written")
    _judge_messages(calls, [made for (made,) in made_before])


def _judge_messages(calls, made_before):
    """Raise Wrong unless messages enforced the order.

    calls: for each rank [(op, peer)]; made_before: how many of them it made before its write.
    """
    n = len(calls)
    if others := sorted({op for of_rank in calls for op, _ in of_rank} - {"send", "recv"}):
        raise Wrong(f"the order is right, but you used {', '.join(others)}; send and recv are enough")
    messages, enough = sum(op == "send" for of_rank in calls for op, _ in of_rank), n - 1
    if messages > enough:
        raise Wrong(f"the order is right, but {messages} messages were sent; {enough} are enough")
    for rank in range(1, n):
        before = calls[rank][: made_before[rank]]
        if ("recv", rank - 1) not in before and ("recv", None) not in before:  # None: from any rank
            raise Wrong(f"the order is right, but by luck: rank {rank} wrote before it received from rank {rank - 1}")
        if ("send", rank) not in calls[rank - 1][made_before[rank - 1] :]:
            raise Wrong(f"the order is right, but by luck: rank {rank - 1} sent to rank {rank} before it wrote")


# depth, function, calls, total seconds (with all that it called): a run of 10 iterations under cProfile,
# torch 2.13 on 2 cores of a virtual machine
PROFILE = [
    (0, "train", 1, 1.528),
    (1, "Adam.__init__", 1, 1.426), (2, "import torch._dynamo", 1, 1.426), (3, "import sympy", 1, 0.393),
    (1, "forward", 10, 0.017), (1, "backward", 10, 0.034), (1, "Adam.step", 10, 0.048),
    (1, "make the batch and the rest", 10, 0.003),
]  # fmt: skip
# one step takes as long as the set-up, so one step more or less shows; deeper rows may have more calls
SLOW = [
    (0, "train", 1, 25.0), (1, "read", 4, 4.0), (1, "compile", 1, 3.0), (2, "parse", 1, 2.0), (1, "step", 4, 16.0),
    (2, "wait", 40, 6.0), (1, "save", 1, 2.0),
]  # fmt: skip


@exercise(3, "read the profile")
def predict_seconds(answer, ranks=None):
    """answer(profile, steps) -> seconds that `steps` iterations take, from rows (depth, function, calls, seconds)."""
    for profile, iterations, steps in (
        (PROFILE, 10, 10), (PROFILE, 10, 1000), (SLOW, 4, 4), (SLOW, 4, 3), (SLOW, 4, 10_000),
    ):  # fmt: skip
        found, whole = answer(list(profile), steps), profile[0][3]
        expected = _seconds(profile, iterations, steps)
        once_below = sum(seconds for depth, _, calls, seconds in profile if depth > 1 and calls == 1)
        slips = {
            **{f"that is the time of {n} steps": _seconds(profile, iterations, n) for n in (steps - 1, steps + 1)},
            "you multiplied everything, including the set-up that happens once": whole * steps / iterations,
            "the set-up, which happens once, is missing": expected - _seconds(profile, iterations, 0),
            "a row's seconds include those of the deeper rows below it": [expected + once_below, expected - once_below],
        }
        what = f"with {iterations} iterations in {whole:g} s the time of {steps}"
        expect_number(found, expected, what, "seconds", slips, rel=0.01)


def _seconds(profile, iterations, steps):
    """Return the seconds of `steps` steps: the set-up once, the rest in proportion."""
    whole = profile[0][3]
    once = sum(total for depth, _, calls, total in profile if depth == 1 and calls == 1)
    return once + (whole - once) / iterations * steps


@exercise(4, "samples per second")
def samples_per_s(answer, ranks=None):
    """answer(batch, step_s) -> samples per second of the world; step_s: seconds of one step, one value per rank."""
    more = [
        (drawn.luck(i).randint(2, 99), [round(drawn.luck(9 * i + j).uniform(0.1, 0.9), 3) for j in range(i)])
        for i in (3, 5)
    ]
    for batch, step_s in drawn.in_turn([
        (64, [0.0707]), (64, [0.05, 0.05, 0.05, 0.05]), (1, [0.25, 0.5, 0.5]), (8, [0.4, 0.1, 0.2]), *more,
    ]):  # fmt: skip
        n, right = len(step_s), batch * len(step_s) / max(step_s)
        means = statistics.fmean(step_s), statistics.median(step_s)
        slips = {
            "these are steps per second, the batch is missing": [m / s for s in step_s for m in (1, n) if batch > 1],
            "that is one rank's share; count all ranks": [batch / s for s in step_s if n > 1],
            "a step ends when the slowest rank has done it": (
                [sum(batch / s for s in step_s), *(batch * n / s for s in (*step_s, *means))]
            ),
            "do not round it": [math.floor(right), math.ceil(right)],
        }
        what = f"for {count(batch, 'sample')} on each rank and steps of {step_s} s, what the world does"
        expect_number(answer(batch, list(step_s)), right, what, "samples per second", slips, rel=1e-6)
