"""Checks of lesson 00: who am I, whose turn is it, is this one world, what does a profile say, how fast are we.

The environments below were recorded under the launchers that they name (two Slurm nodes, MPICH's and Open MPI's
mpiexec, torchrun), but for PALS, whose variables are those of the sites' documentation.
"""

import time

import torch.distributed as dist

from manyhands.checks import Wrong, exercise
from manyhands.measure import wire
from manyhands.runs.run_folder import run_folder

# what it is, its environment, and (rank, world size, local rank)
ENVIRONMENTS = [
    (
        "rank 3 of torchrun",
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"},
        (3, 4, 1),
    ),
    (
        "rank 3 of MPICH's mpiexec",
        {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        (3, 4, 1),
    ),
    (
        "rank 1 of Open MPI's mpirun",
        {
            "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_RANK": "1",
        },
        (1, 4, 1),
    ),
    ("rank 5 of PALS", {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PMI_RANK": "5", "PMI_SIZE": "8"}, (5, 8, 1)),
    (
        "rank 2 of srun, in a job of 8 tasks that started a step of 4",
        {
            "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "4",
        },
        (2, 4, 0),
    ),
    (
        "the batch script of a Slurm job, which is no rank",
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "2989"},
        (0, 1, 0),
    ),
    (
        "rank 1 of mpiexec inside a Slurm job, where Hydra's helper is a step of 2 tasks",
        {
            "PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
            "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "2",
        },
        (1, 4, 1),
    ),
    (
        "rank 1 of a torchrun that mpiexec started",
        {
            "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "PMI_RANK": "0", "PMI_SIZE": "1",
            "MPI_LOCALRANKID": "0",
        },
        (1, 2, 1),
    ),
    ("a plain python", {"PATH": "/usr/bin", "OMP_NUM_THREADS": "1"}, (0, 1, 0)),
]  # fmt: skip


@exercise(1, "who am I")
def who_am_i(answer, ranks):
    """answer(environ) -> (rank, world size, local rank), for every recorded environment."""
    for what, environ, expected in ENVIRONMENTS:
        given = dict(environ)
        found = answer(given)
        if found is None or found is ...:
            raise NotImplementedError
        if not isinstance(found, tuple) or len(found) != 3:
            raise Wrong(f"return three values, rank, world size and local rank, not {found!r}")
        if any(type(value) is not int for value in found):
            raise Wrong(
                f"for {what} you return {found!r}; variables are text, make numbers of them with int()"
            )
        for name, value, wanted in zip(("rank", "world size", "local rank"), found, expected, strict=True):
            if value != wanted:
                raise Wrong(f"for {what} the {name} is {wanted}, you say {value}; it has {_names(environ)}")
        if given != environ:
            raise Wrong("leave the environment as it is: somebody else reads it after you")


def _names(environ):
    return ", ".join(f"{name}={value}" for name, value in environ.items())


@exercise(3, "whose turn is it")
def in_turn(answer, ranks):
    """answer(append, ranks) appends this rank's line to one file, in rank order, with send and recv alone."""
    path = _shared_path(ranks)
    lines = []

    def append(line):
        lines.append(str(line))
        time.sleep(
            0.1 * (ranks.world_size - ranks.rank)
        )  # low ranks write slowly: who does not wait overtakes
        with open(path, "a") as file:
            file.write(f"{line}\n")

    with wire.watch() as seen:
        if answer(append, ranks) is ...:
            raise NotImplementedError
    everyone = [None] * ranks.world_size
    dist.all_gather_object(
        everyone, (lines, seen.messages, sorted({c.op for c in seen.calls} - {"send", "recv"}))
    )
    written = path.read_text().splitlines() if path.exists() else []
    wanted = [line for said, _, _ in everyone for line in said]
    counts = [len(said) for said, _, _ in everyone]
    if set(counts) != {1}:
        raise Wrong(f"each rank appends one line; yours appended {counts}")
    if written != wanted:
        raise Wrong(
            f"the file says {written}, in rank order it is {wanted}: wait until the rank before you has written"
        )
    if others := sorted({op for _, _, ops in everyone for op in ops}):
        raise Wrong(f"the order is right, but you used {', '.join(others)}; send and recv are enough")
    messages, enough = sum(sent for _, sent, _ in everyone), ranks.world_size - 1
    if messages > enough:
        raise Wrong(f"the order is right, but {messages} messages were sent; {enough} are enough")


def _shared_path(ranks):
    """A new file that all ranks can reach: in the run's folder, which is on a shared disk where nodes are many."""
    path = [run_folder(ranks) / f"in_turn.{time.time_ns()}.txt" if ranks.rank == 0 else None]
    dist.broadcast_object_list(path)
    return path[0]


# how many processes were started, what each said as (rank, world size), and whether that is one world
STARTS = {
    "torchrun --nproc-per-node 4": (4, [(2, 4), (0, 4), (3, 4), (1, 4)], True),
    "mpiexec -n 4, but of another MPI": (4, [(0, 1), (0, 1), (0, 1), (0, 1)], False),
    "mpiexec -n 2": (2, [(1, 2), (0, 2)], True),
    "python": (1, [(0, 1)], True),
    "one torchrun --nproc-per-node 2 on each of two nodes, without a common address": (
        4, [(0, 2), (1, 2), (0, 2), (1, 2)], False,
    ),
    "srun --ntasks 4, and one task died": (4, [(0, 4), (1, 4), (3, 4)], False),
    "srun on two nodes, of which one did not start": (2, [(1, 4), (0, 4)], False),
    "a script that takes the local rank for the rank, two nodes": (4, [(0, 4), (1, 4), (0, 4), (1, 4)], False),
}  # fmt: skip


@exercise(2, "one world or many")
def is_one_world(answer, ranks=None):
    """answer(started, said) -> bool, for starts that went well and starts that went wrong in different ways."""
    for what, (started, said, expected) in STARTS.items():
        found = answer(started, list(said))
        if found is None or found is ...:
            raise NotImplementedError
        if bool(found) != expected:
            verdict = "is one world" if expected else f"is not one world of {started}"
            raise Wrong(f"`{what}` {verdict}: {started} processes were started and said {said}")


# depth, function, calls, total seconds (with all that it called): a run of 10 iterations under cProfile,
# torch 2.13 on 2 cores of a virtual machine
PROFILE = [
    (0, "train", 1, 1.528),
    (1, "Adam.__init__", 1, 1.426),
    (2, "import torch._dynamo", 1, 1.426),
    (3, "import sympy", 1, 0.393),
    (1, "forward", 10, 0.017),
    (1, "backward", 10, 0.034),
    (1, "Adam.step", 10, 0.048),
    (1, "make the batch and the rest", 10, 0.003),
]


def _seconds(profile, steps):
    """What the whole takes for so many steps: what happens once, once, the rest in proportion."""
    whole, iterations = profile[0][3], max(calls for _, _, calls, _ in profile)
    once = sum(total for depth, _, calls, total in profile if depth == 1 and calls == 1)
    return once + (whole - once) / iterations * steps


@exercise(4, "read the profile")
def predict_seconds(answer, ranks=None):
    """answer(profile, steps) -> seconds that `steps` iterations take, from rows (depth, function, calls, seconds)."""
    other = [
        (0, "train", 1, 9.0),
        (1, "download", 1, 3.0),
        (2, "read", 40, 1.0),
        (1, "compile", 1, 4.0),
        (1, "step", 20, 2.0),
    ]
    for profile, iterations, steps in [(PROFILE, 10, 10), (PROFILE, 10, 1000), (PROFILE, 10, 100)]:
        _compare(answer, profile, iterations, steps, _seconds(profile, steps))
    # a function deep in a download may be called more often than there are steps: the steps are at depth 1
    _compare(answer, other, 20, 200, 3.0 + 4.0 + 2.0 / 20 * 200)


def _compare(answer, profile, iterations, steps, expected):
    found = answer(list(profile), steps)
    if found is None or found is ...:
        raise NotImplementedError
    whole = profile[0][3]
    hint = "add up what happened once, and multiply the rest"
    if abs(found - whole * steps / iterations) < 1e-3 and steps != iterations:
        hint = "you multiplied all of it, also what happens once"
    elif found < expected - 1e-6:
        hint = (
            "something is missing or subtracted twice: a row's seconds hold those of the deeper rows below it"
        )
    if abs(found - expected) > 0.01 * expected:
        raise Wrong(
            f"with {iterations} iterations in {whole:g} s, {steps} take {expected:.2f} s, you say {found:.2f} s: {hint}"
        )


@exercise(5, "samples per second")
def samples_per_s(answer, ranks=None):
    """answer(batch, step_s) -> samples per second of the world; step_s: seconds of one step, one value per rank."""
    cases = [(64, [0.0707]), (64, [0.05, 0.05, 0.05, 0.05]), (32, [0.04, 0.05]), (1, [0.25, 0.5, 0.5])]
    for batch, step_s in cases:
        found = answer(batch, list(step_s))
        if found is None or found is ...:
            raise NotImplementedError
        n, slowest = len(step_s), max(step_s)
        expected = batch * n / slowest
        if abs(found - expected) < 1e-6 * expected:
            continue
        said = f"for {batch} samples on each of {n} ranks that take {step_s} s it is {expected:.1f}, you say {found:.1f}"
        raise Wrong(f"{said}: {_what_is_missing(found, batch, step_s)}")


def _what_is_missing(found, batch, step_s):
    n, near = len(step_s), lambda value: abs(found - value) < 1e-6 * abs(value)
    if any(near(n / s) or near(1 / s) for s in step_s) and batch > 1:
        return "these are steps per second, the batch is missing"
    if n > 1 and any(near(batch / s) for s in step_s):
        return "that is one rank's share, all of them work"
    if (
        near(sum(batch / s for s in step_s))
        or near(batch * n / min(step_s))
        or near(batch * n * n / sum(step_s))
    ):
        return "a step ends when the slowest rank has done it"
    return "count the samples of one step on all ranks, divide by the time of the slowest"
