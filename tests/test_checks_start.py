"""Lesson 00's checks accept the solutions and reject each wrong answer with the sentence that names its fault."""

import statistics
import time
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exercises import Answers, AnswersOfRanks
from manyhands.checks import start
from manyhands.course.catch_up import taken_from

LESSON = "00_start"

# ---------------------------------------------------------------- build A: who am I?

LESSONS_OWN = {  # in the lesson's order, which is that of the alphabet
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "PALS": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
}
LETTERS = [LESSONS_OWN[name] for name in ("torchrun", "Open MPI", "PALS", "MPICH", "srun")]


def read(letters, environ, as_type=int):
    for names in letters:
        if all(name in environ for name in names):
            return tuple(as_type(environ[name]) for name in names)
    return 0, 1, 0


def lets_the_last_letter_win(environ):
    found = 0, 1, 0
    for names in LESSONS_OWN.values():
        if all(name in environ for name in names):
            found = tuple(int(environ[name]) for name in names)
    return found


def empties_the_letter_box(environ):
    answer = read(LETTERS, environ)
    environ.clear()
    return answer


def asks_for_a_size_that_is_not_there(environ):
    rank, size, local_rank = (environ.get(name) for name in ("RANK", "PMI_SIZE", "LOCAL_RANK"))
    return (0 if rank is None else int(rank)), size, local_rank


def takes_the_batch_script_for_rank_0(environ):
    if "SLURM_STEP_ID" not in environ and "SLURM_NTASKS" in environ:
        return 0, int(environ["SLURM_NTASKS"]), 0
    return read(LETTERS, environ)


# ---------------------------------------------------------------- build B: the roll call


def one_hot(rank, started, **options):
    row = torch.zeros(started, **options)
    row[rank] = 1
    return row


def summed(row, op=dist.ReduceOp.SUM):
    dist.all_reduce(row, op=op)
    return row


def as_whole_numbers(rank, started):  # right
    return summed(torch.nn.functional.one_hot(torch.tensor(rank), started))


def as_a_list_of_float64(rank, started):  # right
    row = one_hot(rank, started, dtype=torch.float64)
    dist.all_reduce(row, op=dist.ReduceOp.SUM, async_op=True).wait()
    return [int(count) for count in row]


def in_one_buffer_again_and_again(rank, started, rows={}):  # right  # noqa: B006
    row = rows.setdefault(started, torch.empty(started))
    row.copy_(torch.arange(started) == rank)
    dist.all_reduce(row)
    return row.numpy()


def gathers_instead(rank, started):
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, rank)
    return torch.tensor([said.count(r) for r in range(started)])


def tells_rank_0_alone(rank, started):
    row = one_hot(rank, started)
    dist.reduce(row, 0)
    return row


# ---------------------------------------------------------------- exercise 1: one world or many?


def every_rank_once(started, said):
    return sorted(rank for rank, _ in said) == list(range(started))


# ---------------------------------------------------------------- exercise 2: whose turn is it?


def in_order(*acts):
    """An answer that does act(ranks) one after the other, and appends those that are text."""

    def answer(append, ranks):
        for act in acts:
            append(act.format(ranks.rank)) if isinstance(act, str) else act(ranks)

    return answer


def takes_the_pen(ranks):
    if ranks.rank > 0:
        dist.recv(torch.zeros(1), ranks.rank - 1)


def hands_it_on(ranks):
    if ranks.rank < ranks.world_size - 1:
        dist.send(torch.zeros(1), ranks.rank + 1)


def waits_for_the_left(ranks):
    dist.recv(torch.zeros(1), (ranks.rank - 1) % ranks.world_size)


def hands_it_round(ranks):
    dist.send(torch.zeros(1), (ranks.rank + 1) % ranks.world_size)


def takes_it_back(ranks):
    if ranks.rank == 0:
        dist.recv(torch.zeros(1), ranks.world_size - 1)


def sleeps(ranks):
    time.sleep(0.6 * ranks.rank)


def sends_to_the_wrong_side(ranks):
    if ranks.rank > 0:
        dist.send(torch.zeros(1), ranks.rank - 1)
    if ranks.rank < ranks.world_size - 1:
        dist.recv(torch.zeros(1), ranks.rank + 1)


def takes_turns_by_barriers(append, ranks):
    for turn in range(ranks.world_size):
        if turn == ranks.rank:
            append(f"rank {ranks.rank}")
        dist.barrier()


def rank_0_writes_nothing(append, ranks):
    if ranks.rank > 0:
        if ranks.rank > 1:
            dist.recv(torch.zeros(1), ranks.rank - 1)
        append(f"rank {ranks.rank}")
        if ranks.rank < ranks.world_size - 1:
            dist.send(torch.zeros(1), ranks.rank + 1)


def in_turn_with(append, ranks, line):
    pen = torch.zeros(1)
    if ranks.rank > 0:
        dist.irecv(pen, ranks.rank - 1).wait()
    append(line)
    if ranks.rank < ranks.world_size - 1:
        dist.isend(pen, ranks.rank + 1).wait()


def receives_from_anybody(append, ranks):  # right
    if ranks.rank > 0:
        dist.recv(torch.zeros(1))
    append(ranks.rank)
    if ranks.rank < ranks.world_size - 1:
        dist.send(torch.zeros(1), ranks.rank + 1)


# ---------------------------------------------------------------- exercise 3: read the profile


def right_seconds(profile, steps):
    parts = [(calls, total_s) for depth, _, calls, total_s in profile if depth == 1]
    return sum(total_s if calls == 1 else total_s / calls * steps for calls, total_s in parts)


# ---------------------------------------------------------------- what is said of them


def right_world(started, said):
    return sorted(said) == [(r, started) for r in range(started)]


def right_samples(batch, step_s):
    return batch * len(step_s) / max(step_s)


REJECTED = {
    "who_am_i": {
        "takes the job's tasks": (
            lambda environ: read([*LETTERS[:4], ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")], environ),
            "For rank 2 of srun, in a job of 8 tasks that started a step of 4, which has SLURM_PROCI"),
        "forgets int": (lambda environ: read(LETTERS, environ, str),
            "the rank should be 3, not the text '3': variables are text, make numbers of them with int()"),
        "asks mpi before torchrun": (lambda environ: read([*LETTERS[1:], LETTERS[0]], environ),
            "PMI_SIZE=1, MPI_LOCALRANKID=0, the rank should be 1, not 0"),
        "takes the table as it stands": (lambda environ: read(LESSONS_OWN.values(), environ),
            "For rank 1 of a torchrun that mpiexec started, which has RANK=1"),
        lets_the_last_letter_win: "For rank 1 of mpiexec inside a Slurm job, where Hydra's helper is a step of 2 tasks",
        "asks slurm first": (lambda environ: read([LETTERS[4], *LETTERS[:4]], environ),
            "For rank 1 of mpiexec inside a Slurm job, where Hydra's helper is a step of 2 tasks"),
        "takes the rank for the local rank": (lambda environ: (*read(LETTERS, environ)[:2], read(LETTERS, environ)[0]),
            "GROUP_RANK=1, the local rank should be 1, not 3"),
        "knows no pals": (lambda environ: read([*LETTERS[:2], *LETTERS[3:]], environ),
            "For rank 5 of PALS, which has PALS_RANKID=5"),
        takes_the_batch_script_for_rank_0: "the batch script of a Slurm job, which is no rank, which has SLURM_PROCID=",
        "needs a launcher": (lambda environ: tuple(int(environ[name]) for name in LESSONS_OWN["torchrun"]),
            "Your code raised KeyError"),
        "returns two": (lambda environ: read(LETTERS, environ)[:2],
            "Return three values, rank, world size and local rank"),
        asks_for_a_size_that_is_not_there: "the world size should be 4, not None",
        empties_the_letter_box: "Leave the environment as it is",
    },
    "is_one_world": [
        (lambda started, said: len(said) == started, "`mpiexec -n 4, but of another MPI` is not one world of 4"),
        (lambda started, said: all(size == started for _, size in said), "one task died` is not one world of 4"),
        (
            lambda started, said: len(said) == started and all(size == started for _, size in said),
            "takes the local rank for the rank, two nodes` is not one world of 4",
        ),
        (lambda started, said: {r for r, _ in said} == set(range(len(said))), "one did not start` is not one world"),
        (lambda started, said: said == [(r, started) for r in range(started)], "nproc-per-node 4` is one world"),
        (lambda started, said: started > 1 and right_world(started, said), "`python` is one"),
        (lambda started, said: right_world(len(said), said), "of 1: 1 process was started and said [(0, 2), (1, 2)]"),
        (lambda started, said: every_rank_once(started, said) and said[0][1] == started, "[(2, 3), (0, 1), (1, 2)]"),
        (lambda started, said: every_rank_once(started, said) and said[-1][1] == started, "[(2, 3), (0, 1), (1, 3)]"),
        (lambda started, said: every_rank_once(started, said) and max(said)[1] == started, "is not one world of 3"),
        (
            lambda started, said: every_rank_once(started, said)
            and statistics.median(size for _, size in said) == started, "is not one world of 3",
        ),
        (
            lambda started, said: len(said) == started and all(size == started for _, size in said)
            and sum(rank for rank, _ in said) == sum(range(started)), "said [(1, 3), (1, 3), (1, 3)]",
        ),
        (
            lambda started, said: {r for r, _ in said} == set(range(started)) == set(range(said[0][1]))
            and all(size == started for _, size in said), "said [(0, 3), (1, 3), (2, 3), (0, 3)]",
        ),
        (lambda started, said: torch.ones(2), "Return True or False, not the Tensor"),
    ],
    "predict_seconds": [
        (lambda profile, steps: profile[0][3] / 10 * steps, "you multiplied all of it, also what happens once"),
        (
            lambda profile, steps: profile[0][3] + sum(t / n for d, _, n, t in profile if n > 1) * (steps - 10)
            - sum(t for d, _, n, t in profile if d == 2), "what happens once is missing",
        ),
        (
            lambda profile, steps: sum(t for d, _, n, t in profile if d > 0 and n == 1)
            + sum(t / n for d, _, n, t in profile if d == 1 and n > 1) * steps, "a row's seconds hold those of the dee",
        ),
        (
            lambda profile, steps: sum(t / n for d, _, n, t in profile if d == 1 and n > 1) * steps,
            "what happens once is missing",
        ),
        (
            lambda profile, steps: sum(t for d, _, n, t in profile if d == 1 and n == 1)
            + sum(t / n for d, _, n, t in profile if n > 1) * steps, "with 20 iterations in 9 s the time of 200 should",
        ),
        (lambda profile, steps: right_seconds(profile, steps - 1), "that is the time of 3 steps"),
        (lambda profile, steps: right_seconds(profile, steps + 1), "that is the time of 5 steps"),
    ],
    "samples_per_s": [
        (lambda batch, step_s: 1 / step_s[0], "these are steps per second, the batch is missing"),
        (lambda batch, step_s: len(step_s) / max(step_s), "these are steps per second, the batch is missing"),
        (lambda batch, step_s: batch / max(step_s), "that is one rank's share, all of them work"),
        (lambda batch, step_s: sum(batch / s for s in step_s), "a step ends when the slowest rank has done it"),
        (lambda batch, step_s: batch * len(step_s) / min(step_s), "a step ends when the slowest rank has done it"),
        (lambda batch, step_s: batch * len(step_s) ** 2 / sum(step_s), "a step ends when the slowest rank"),
        (lambda batch, step_s: batch * max(step_s), "should be 905.2 samples per second, not 4.525"),
        (lambda batch, step_s: batch * len(step_s) / statistics.median(step_s), "a step ends when the slowest"),
        (lambda batch, step_s: batch * len(step_s) / sorted(step_s)[len(step_s) // 2], "a step ends when the slowest"),
        (lambda batch, step_s: batch * len(step_s) / step_s[-1], "a step ends when the slowest"),
        (lambda batch, step_s: batch * len(step_s) / step_s[0], "a step ends when the slowest"),
        (lambda batch, step_s: batch * len(step_s) // max(step_s), "do not round it"),
    ],
}  # fmt: skip
RIGHT = {
    "who_am_i": [lambda environ: read(LETTERS, environ, np.int64)],
    "is_one_world": [
        lambda started, said: every_rank_once(started, said) and {size for _, size in said} == {started},
        lambda started, said: set(said) == {(r, started) for r in range(started)} and len(said) == started,
        lambda started, said: len(set(said)) == len(said) == started and all(s == started for _, s in said),
        lambda started, said: np.array(right_world(started, said)),
        lambda started, said: int(right_world(started, said)),
    ],
    "predict_seconds": [
        lambda profile, steps, of=of: of(right_seconds(profile, steps)) for of in (np.float64, torch.tensor, Fraction)
    ],
    "samples_per_s": [lambda batch, step_s: torch.tensor(right_samples(batch, step_s), dtype=torch.float64)],
}


class TestAnswers(Answers):
    lesson, checks, worlds = LESSON, start, (1,)
    rejected, right, given, elsewhere = REJECTED, RIGHT, {"LETTERS": LESSONS_OWN}, ("roll_call", "in_turn")


class TestAnswersOfRanks(AnswersOfRanks):
    lesson, checks, worlds = LESSON, start, (1, 2, 4)
    rejected = {
        "roll_call": {
            "adds nobody else": (one_hot,
                "what every rank holds should be [1, 1, 1], not [1, 0, 0]: that is this rank's own 1"),
            "counts who is there": (lambda rank, started: summed(one_hot(dist.get_rank(), started)),
                "count what each says, the argument `rank`, not who it is"),
            "takes the largest": (lambda rank, started: summed(one_hot(rank, started), dist.ReduceOp.MAX),
                "should be [3, 0, 0], not [1, 0, 0]: of two that say the same"),
            "has room for the world alone": (lambda rank, started: summed(one_hot(rank, dist.get_world_size())),
                "not [1, 1, 1]: return one number for each that was started"),
            "puts all at the start": (lambda rank, started: summed(one_hot(0, started)),
                "not [3, 0, 0]: all put their 1 at the same place"),
            gathers_instead: "the roll is right, but it calls all_gather: one all-reduce is enough",
            tells_rank_0_alone: "it calls reduce: one all-reduce is enough, and leaves the roll on every rank",
            "sums place by place": (lambda rank, started: torch.stack([*map(summed, one_hot(rank, started))]),
                "12 bytes were communicated in 3 calls of all_reduce, where 1 call and 24 bytes"),
            "has room for thousands": (lambda rank, started: summed(one_hot(rank, 4096))[:started],
                "16,384 bytes were communicated in 1 call of all_reduce, where 1 call and 24 bytes"),
            "only rank 0 asks": (lambda rank, started: (one_hot if rank else as_whole_numbers)(rank, started),
                "Rank 1: Where the ranks say [0, 1, 2] and 3 were started, what every rank holds"),
        },
        "in_turn": {
            "everybody at once": (in_order("rank {}"), "wait until the rank before you has written"),
            "hands the pen on before writing": (in_order(takes_the_pen, hands_it_on, "rank {}"),
                "wait until the rank before you has written"),
            takes_turns_by_barriers: "The order is right, but you used barrier; send and recv are enough",
            "goes round the ring": (in_order(takes_the_pen, "rank {}", hands_it_round, takes_it_back),
                "The order is right, but 3 messages were sent; 2 are enough"),
            rank_0_writes_nothing: "Each rank appends one line; yours appended [0, 1, 1]",
            "everybody waits first": (in_order(waits_for_the_left, "rank {}", hands_it_round),
                "A rank waited 5 s for a message that never came"),
            "sleeps instead of waiting": (in_order(sleeps, "rank {}"),
                "rank 1 had received nothing from rank 0 when it wrote"),
            "all write the same line": (in_order("one of us was here"),
                "were written by ranks [2, 1, 0], in this order: wait until"),
            "hands the pen on and writes in time": (in_order(takes_the_pen, hands_it_on, sleeps, "rank {}"),
                "rank 0 sent its message to rank 1 before it wrote; write first"),
            "sends to the wrong side and sleeps": (in_order(sleeps, "rank {}", sends_to_the_wrong_side),
                "rank 1 had received nothing from rank 0 when it wrote"),
            "writes two lines at once": (
                lambda append, ranks: in_turn_with(append, ranks, f"rank {ranks.rank}\nwas here"),
                "Each rank appends one line; yours appended [2, 2, 2]"),
        },
    }  # fmt: skip
    right = {
        "roll_call": [as_whole_numbers, as_a_list_of_float64, in_one_buffer_again_and_again],
        "in_turn": [
            lambda append, ranks: in_turn_with(append, ranks, f"rank {ranks.rank}\n"),
            receives_from_anybody,
        ],
    }
    given, elsewhere = {"device": "cpu"}, tuple(REJECTED)


def test_the_environments_of_the_check_are_read_alike_by_the_course_itself():
    from manyhands.launch.launchers import resolve

    for what, environ, expected in start.ENVIRONMENTS:
        extra = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "node[1-2]"} if "SLURM_STEP_ID" in environ else {}
        if "GROUP_RANK" in environ or "torchrun" in what:
            extra = {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2"}
        place = resolve(environ | extra)
        assert (place.rank, place.world_size, place.local_rank) == expected, what


def test_the_parts_of_the_profile_add_up():
    whole, parts = start.PROFILE[0][3], [row[3] for row in start.PROFILE if row[0] == 1]
    assert sum(parts) == pytest.approx(whole, abs=1e-9)


def test_the_smoke_test_has_the_parameters_that_the_lesson_says():
    model = taken_from(LESSON, "mlp", device="cpu").mlp()
    assert sum(p.numel() for p in model.parameters()) == 837_632
