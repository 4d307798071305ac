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


def takes_the_jobs_tasks(environ):
    return read([*LETTERS[:4], ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")], environ)


def forgets_int(environ):
    return read(LETTERS, environ, str)


def asks_mpi_before_torchrun(environ):
    return read([*LETTERS[1:], LETTERS[0]], environ)


def takes_the_table_as_it_stands(environ):
    return read(LESSONS_OWN.values(), environ)


def lets_the_last_letter_win(environ):
    found = 0, 1, 0
    for names in LESSONS_OWN.values():
        if all(name in environ for name in names):
            found = tuple(int(environ[name]) for name in names)
    return found


def asks_slurm_first(environ):
    return read([LETTERS[4], *LETTERS[:4]], environ)


def takes_the_rank_for_the_local_rank(environ):
    rank, size, _ = read(LETTERS, environ)
    return rank, size, rank


def knows_no_pals(environ):
    return read([LETTERS[0], LETTERS[1], *LETTERS[3:]], environ)


def needs_a_launcher(environ):
    return int(environ["RANK"]), int(environ["WORLD_SIZE"]), int(environ["LOCAL_RANK"])


def returns_two(environ):
    return read(LETTERS, environ)[:2]


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


def as_whole_numbers(rank, started):  # right
    row = torch.nn.functional.one_hot(torch.tensor(rank), started)
    dist.all_reduce(row)
    return row


def as_a_list_of_float64(rank, started):  # right
    row = one_hot(rank, started, dtype=torch.float64)
    dist.all_reduce(row, op=dist.ReduceOp.SUM, async_op=True).wait()
    return [int(count) for count in row]


def in_one_buffer_again_and_again(rank, started, rows={}):  # right  # noqa: B006
    row = rows.setdefault(started, torch.empty(started))
    row.copy_(torch.arange(started) == rank)
    dist.all_reduce(row)
    return row.numpy()


def adds_nobody_else(rank, started):
    return one_hot(rank, started)


def counts_who_is_there(rank, started):
    row = one_hot(dist.get_rank(), started)
    dist.all_reduce(row)
    return row


def takes_the_largest(rank, started):
    row = one_hot(rank, started)
    dist.all_reduce(row, op=dist.ReduceOp.MAX)
    return row


def has_room_for_the_world_alone(rank, started):
    row = one_hot(rank, dist.get_world_size())
    dist.all_reduce(row)
    return row


def puts_all_at_the_start(rank, started):
    row = one_hot(0, started)
    dist.all_reduce(row)
    return row


def gathers_instead(rank, started):
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, rank)
    return torch.tensor([said.count(r) for r in range(started)])


def tells_rank_0_alone(rank, started):
    row = one_hot(rank, started)
    dist.reduce(row, 0)
    return row


def sums_place_by_place(rank, started):
    row = one_hot(rank, started)
    for place in row:
        dist.all_reduce(place)
    return row


def has_room_for_thousands(rank, started):
    row = one_hot(rank, 4096)
    dist.all_reduce(row)
    return row[:started]


def only_rank_0_asks(rank, started):
    row = one_hot(rank, started)
    if rank == 0:
        dist.all_reduce(row)
    return row


# ---------------------------------------------------------------- exercise 1: one world or many?


def every_rank_once(started, said):
    return sorted(rank for rank, _ in said) == list(range(started))


# ---------------------------------------------------------------- exercise 2: whose turn is it?


def everybody_at_once(append, ranks):
    append(f"rank {ranks.rank}")


def hands_the_pen_on_before_writing(append, ranks):
    pen = torch.zeros(1)
    if ranks.rank > 0:
        dist.recv(pen, ranks.rank - 1)
    if ranks.rank < ranks.world_size - 1:
        dist.send(pen, ranks.rank + 1)
    append(f"rank {ranks.rank}")


def takes_turns_by_barriers(append, ranks):
    for turn in range(ranks.world_size):
        if turn == ranks.rank:
            append(f"rank {ranks.rank}")
        dist.barrier()


def everybody_waits_first(append, ranks):
    dist.recv(torch.zeros(1), (ranks.rank - 1) % ranks.world_size)
    append(f"rank {ranks.rank}")
    dist.send(torch.zeros(1), (ranks.rank + 1) % ranks.world_size)


def goes_round_the_ring(append, ranks):
    pen = torch.zeros(1)
    if ranks.rank > 0:
        dist.recv(pen, ranks.rank - 1)
    append(f"rank {ranks.rank}")
    dist.send(pen, (ranks.rank + 1) % ranks.world_size)
    if ranks.rank == 0:
        dist.recv(pen, ranks.world_size - 1)


def rank_0_writes_nothing(append, ranks):
    if ranks.rank > 0:
        if ranks.rank > 1:
            dist.recv(torch.zeros(1), ranks.rank - 1)
        append(f"rank {ranks.rank}")
        if ranks.rank < ranks.world_size - 1:
            dist.send(torch.zeros(1), ranks.rank + 1)


def sleeps_instead_of_waiting(append, ranks):
    time.sleep(0.6 * ranks.rank)
    append(f"rank {ranks.rank}")


def all_write_the_same_line(append, ranks):
    append("one of us was here")


def hands_the_pen_on_and_writes_in_time(append, ranks):
    pen = torch.zeros(1)
    if ranks.rank > 0:
        dist.recv(pen, ranks.rank - 1)
    if ranks.rank < ranks.world_size - 1:
        dist.send(pen, ranks.rank + 1)
    time.sleep(0.6 * ranks.rank)
    append(f"rank {ranks.rank}")


def sends_to_the_wrong_side_and_sleeps(append, ranks):
    time.sleep(0.6 * ranks.rank)
    append(f"rank {ranks.rank}")
    if ranks.rank > 0:
        dist.send(torch.zeros(1), ranks.rank - 1)
    if ranks.rank < ranks.world_size - 1:
        dist.recv(torch.zeros(1), ranks.rank + 1)


def ends_its_line(append, ranks):  # right: whoever writes to a file ends lines
    in_turn_with(append, ranks, f"rank {ranks.rank}\n")


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


def writes_two_lines_at_once(append, ranks):
    in_turn_with(append, ranks, f"rank {ranks.rank}\nwas here")


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
        takes_the_jobs_tasks: "For rank 2 of srun, in a job of 8 tasks that started a step of 4, which has SLURM_PROCI",
        forgets_int: "the rank should be 3, not the text '3': variables are text, make numbers of them with int()",
        asks_mpi_before_torchrun: "PMI_SIZE=1, MPI_LOCALRANKID=0, the rank should be 1, not 0",
        takes_the_table_as_it_stands: "For rank 1 of a torchrun that mpiexec started, which has RANK=1",
        lets_the_last_letter_win: "For rank 1 of mpiexec inside a Slurm job, where Hydra's helper is a step of 2 tasks",
        asks_slurm_first: "For rank 1 of mpiexec inside a Slurm job, where Hydra's helper is a step of 2 tasks",
        takes_the_rank_for_the_local_rank: "GROUP_RANK=1, the local rank should be 1, not 3",
        knows_no_pals: "For rank 5 of PALS, which has PALS_RANKID=5",
        takes_the_batch_script_for_rank_0: "the batch script of a Slurm job, which is no rank, which has SLURM_PROCID=",
        needs_a_launcher: "Your code raised KeyError",
        returns_two: "Return three values, rank, world size and local rank",
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
            adds_nobody_else: "what every rank holds should be [1, 1, 1], not [1, 0, 0]: that is this rank's own 1",
            counts_who_is_there: "count what each says, the argument `rank`, not who it is",
            takes_the_largest: "should be [3, 0, 0], not [1, 0, 0]: of two that say the same",
            has_room_for_the_world_alone: "not [1, 1, 1]: return one number for each that was started",
            puts_all_at_the_start: "not [3, 0, 0]: all put their 1 at the same place",
            gathers_instead: "the roll is right, but it calls all_gather: one all-reduce is enough",
            tells_rank_0_alone: "it calls reduce: one all-reduce is enough, and leaves the roll on every rank",
            sums_place_by_place: "12 bytes were communicated in 3 calls of all_reduce, where 1 call and 24 bytes",
            has_room_for_thousands: "16,384 bytes were communicated in 1 call of all_reduce, where 1 call and 24 bytes",
            only_rank_0_asks: "Rank 1: Where the ranks say [0, 1, 2] and 3 were started, what every rank holds",
        },
        "in_turn": {
            everybody_at_once: "wait until the rank before you has written",
            hands_the_pen_on_before_writing: "wait until the rank before you has written",
            takes_turns_by_barriers: "The order is right, but you used barrier; send and recv are enough",
            goes_round_the_ring: "The order is right, but 3 messages were sent; 2 are enough",
            rank_0_writes_nothing: "Each rank appends one line; yours appended [0, 1, 1]",
            everybody_waits_first: "A rank waited 5 s for a message that never came",
            sleeps_instead_of_waiting: "rank 1 had received nothing from rank 0 when it wrote",
            all_write_the_same_line: "were written by ranks [2, 1, 0], in this order: wait until",
            hands_the_pen_on_and_writes_in_time: "rank 0 sent its message to rank 1 before it wrote; write first",
            sends_to_the_wrong_side_and_sleeps: "rank 1 had received nothing from rank 0 when it wrote",
            writes_two_lines_at_once: "Each rank appends one line; yours appended [2, 2, 2]",
        },
    }
    right = {
        "roll_call": [as_whole_numbers, as_a_list_of_float64, in_one_buffer_again_and_again],
        "in_turn": [ends_its_line, receives_from_anybody],
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
