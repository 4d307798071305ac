"""Lesson 00's checks accept the solutions and reject each wrong answer with the sentence that names its fault."""

import pytest
import torch
import torch.distributed as dist
from definitions import taken_from
from exercises import Answers, AnswersOfRanks
from manyhands.checks import start

LESSON = "00_start"
VARIABLES = {  # in the lesson's order: innermost first
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "PALS": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}
LOOP = "in VARIABLES.values()"
IN_JOB = "for rank 1 of mpiexec inside a Slurm job, where Hydra's helper is a step of 2 tasks"
TWO = "    each_s", "    deeper_s = sum(t for depth, _, n, t in profile if depth > 1 and n == 1)\n    each_s"
RIGHT_WORLD = "sorted(said) == [(rank, started) for rank in range(started)]"
RANKS_ONCE = "sorted(rank for rank, _ in said) == list(range(started))"

REJECTED = {
    "who_am_i": [
        ("        if all", '        names = [n.replace("STEP_NUM_", "N") for n in names]\n        if all',
         "for rank 2 of srun, in a job of 8 tasks that started a step of 4, which has SLURM_PROCI"),
        ("int(environ[name])", "environ[name]",
         "the rank should be 3, not the text '3': variables are text, make numbers of them with int()"),
        (LOOP, 'in (VARIABLES[n] for n in ("Open MPI", "PALS", "MPICH", "torchrun", "srun"))',
         "PMI_SIZE=1, MPI_LOCALRANKID=0, the rank should be 1, not 0"),
        (LOOP, "in [VARIABLES[n] for n in sorted(VARIABLES)]",
         "for rank 1 of a torchrun that mpiexec started, which has RANK=1"),
        (LOOP, 'in (VARIABLES[n] for n in ("srun", "torchrun", "Open MPI", "PALS", "MPICH"))', IN_JOB),
        ("        if all",
         '        names = [n.replace("WORLD_LOCAL_RANK", "WORLD_RANK") for n in names]\n        if all',
         "on the second of two nodes, which has OMPI_COMM_WORLD_RANK=5"),
        ("        if all",
         '        names = [n.replace("COMM_WORLD_SIZE", "COMM_WORLD_LOCAL_SIZE") for n in names]\n        if all',
         "the world size should be 6, not 3"),
        (LOOP, 'in (VARIABLES[n] for n in ("torchrun", "PALS", "MPICH", "srun", "Open MPI"))',
         "for rank 4 of Open MPI's mpirun inside a Slurm job, where its helpers are a step of 2 tasks"),
        ("environ[name]) for name in names)", "environ[names[i]]) for i in (0, 1, 0))",
         "GROUP_RANK=1, the local rank should be 1, not 3"),
        (LOOP, 'in (VARIABLES[n] for n in VARIABLES if n != "PALS")', "for rank 5 of PALS, which has PALS_RANKID=5"),
        ("return 0, 1, 0", 'return 0, int(environ.get("SLURM_NTASKS", 1)), 0',
         "the batch script of a Slurm job, which is no rank, which has SLURM_PROCID="),
        ("if all(name in environ for name in names)", "if True", "your code raised KeyError"),
        ("in names)\n    return", "in names)[:2]\n    return", "return three values, rank, world size and local rank"),
        ("environ[name])", "environ.pop(name))", "do not change the environment"),
    ],
    "is_one_world": [
        (RIGHT_WORLD, "len(said) == started", "`mpiexec -n 4, but of another MPI` is not one world of 4"),
        (RIGHT_WORLD, "all(size == started for _, size in said)", "one task died` is not one world of 4"),
        (RIGHT_WORLD, "len(said) == started and all(size == started for _, size in said)",
         "takes the local rank for the rank, two nodes` is not one world of 4"),
        (RIGHT_WORLD, RANKS_ONCE, "one did not start` is not one world"),
        ("sorted(said)", "said", "nproc-per-node 4` is one world"),
        ("return ", "return started > 1 and ", "`python` is one"),
        (RIGHT_WORLD, "max(r for r, _ in said) == started - 1 and all(n == started for _, n in said)",
         "one task died` is not one world of 4"),
        (RIGHT_WORLD, "sum(r for r, _ in said) == started * (started - 1) // 2 and all(n == started for _, n in said)",
         "two ranks that each took another's place` is not one world of 4"),
        (RIGHT_WORLD, "sum(r == 0 for r, _ in said) == 1 and all(n == started for _, n in said)",
         "one task died` is not one world of 4"),
        (RIGHT_WORLD, "said[0][1] == started and {r for r, _ in said} == set(range(started))",
         "last process belongs to another MPI` is not one world of 4"),
        (RIGHT_WORLD, "all(n == len(said) for _, n in said) and len(dict(said)) == len(said)",
         "two are another world` is not one world of 4"),
        (RIGHT_WORLD, "torch.ones(2)", "return True or False, not the Tensor"),
    ],
    "predict_seconds": [
        ("once_s + each_s * steps", "profile[0][3] / 10 * steps", "you multiplied everything, including the set-up"),
        ("once_s + ", "", "the set-up, which happens once, is missing"),
        (*TWO, "return once_s", "return deeper_s + once_s", "a row's seconds include those of the dee"),
        ("if depth == 1", "", "of 10 should be 1.528 seconds, not"),
        ("each_s * steps", "each_s * (steps - 1)", "that is the time of 3 steps"),
        ("each_s * steps", "each_s * (steps + 1)", "that is the time of 5 steps"),
    ],
    "samples_per_s": [
        ("batch * len(step_s)", "1", "these are steps per second, the batch is missing"),
        ("batch * ", "", "these are steps per second, the batch is missing"),
        (" * len(step_s)", "", "that is one rank's share; count all ranks"),
        ("batch * len(step_s) / max(step_s)", "sum(batch / s for s in step_s)", "a step ends when the slowest"),
        ("max(step_s)", "min(step_s)", "a step ends when the slowest rank has done it"),
        ("max(step_s)", "sum(step_s) * len(step_s)", "a step ends when the slowest rank"),
        ("max(step_s)", "step_s[-1]", "a step ends when the slowest"),
        ("/ max", "// max", "do not round it"),
        ("/ max", "* max", "should be 905.2 samples per second, not 4.525"),
    ],
}  # fmt: skip
RIGHT = {
    "who_am_i": [("int(environ[name])", "torch.tensor(int(environ[name]))")],
    "is_one_world": [
        (RIGHT_WORLD, f"{RANKS_ONCE} and {{size for _, size in said}} == {{started}}"),
        ("return ", "return torch.ones(1, dtype=int) * "),
    ],
    "predict_seconds": [("once_s + each_s * steps", "torch.tensor(once_s + each_s * steps)")],
    "samples_per_s": [
        ("return ", "return 1.0 * "),
        ("batch * len(step_s) / max(step_s)", "torch.tensor(batch * len(step_s) / max(step_s))"),  # in float32
    ],
}


class TestAnswers(Answers):
    lesson, checks, worlds = LESSON, start, (1,)
    rejected, right, given = REJECTED, RIGHT, {"VARIABLES": VARIABLES}
    elsewhere = ("sum_over_ranks", "roll_call", "in_turn")


SLEEP = "pen =", "time.sleep(0.6 * ranks.rank)\n    pen ="
SILENT = "dist.recv(pen, ranks.rank - 1)", "pass", "dist.send(pen, ranks.rank + 1)", "pass"
SENT_FIRST = 'append(f"rank {ranks.rank} was here")\n', "\n"
AT_THE_END = "dist.send(pen, ranks.rank + 1)", 'dist.send(pen, ranks.rank + 1)\n    append("me")'


class TestAnswersOfRanks(AnswersOfRanks):
    lesson, checks, worlds = LESSON, start, (1, 4)
    rejected = {
        "sum_over_ranks": [
            ("    dist.all_reduce(total)\n", "", "should be the sum over all ranks: that is this rank's own"),
            ("(total)", "(total, dist.ReduceOp.MAX)", "that is the largest, not the sum"),
            ("return total", "return total / dist.get_world_size()", "that is the mean, not the sum"),
            ("all_reduce(total)", "broadcast(total, 0)", "that is this rank's own"),
            ("dist.all_reduce(total)", "dist.reduce(total, 0)", "but it calls reduce: one all-reduce is enough"),
            ("dist.all_reduce(total)", "dist.reduce(total, 0); dist.broadcast(total, 0)",
             "but it calls broadcast and reduce: one all-reduce is enough"),
            ("x.clone()", "x", "changed"),
            ("    dist.all", "    total = dist.all", "keep the result of dist.all_reduce, which has none, or is a `r"),
            ("return total", "return total.tolist()", "should be the sum over all ranks, not the"),
        ],
        "roll_call": [
            ("    dist.all_reduce(roll)\n", "",
             "what every rank holds should be [1, 1, 1], not [1, 0, 0]: that is this rank's own 1"),
            ("[rank]", "[dist.get_rank()]", "count what each says, the argument `rank`, not who it is"),
            ("(roll)", "(roll, dist.ReduceOp.MAX)", "should be [3, 0, 0], not [1, 0, 0]: count both processes if two"),
            ("zeros(started", "zeros(dist.get_world_size()", "not [1, 1, 1]: return one number for each"),
            ("[rank]", "[0]", "not [3, 0, 0]: all put their 1 at the same place"),
            ("all_reduce(roll)", "reduce(roll, 0)",
             "it calls reduce: one all-reduce is enough, and leaves the roll on every rank"),
            ("dist.all_reduce(roll)", "[dist.all_reduce(one) for one in roll]",
             "3 calls of all_reduce were made, where 1 call is enough"),
            ("zeros(started", "zeros(4096", "return roll", "return roll[:started]",
             "16,384 bytes were communicated in 1 call of all_reduce, where 24 bytes"),
        ],
        "in_turn": [
            (*SILENT, "wait until the rank before has written"),
            (*SENT_FIRST, *AT_THE_END, "wait until the rank before has written"),
            (*SENT_FIRST, *AT_THE_END, 'append("me")', 'time.sleep(0.6 * ranks.rank)\n    append("me")',
             "the order is right, but by luck: rank 0 sent to rank 1 before it wrote"),
            (*SLEEP, *SILENT, "the order is right, but by luck: rank 1 wrote before it received from rank 0"),
            ("dist.send(pen, ranks.rank + 1)", "dist.send(pen, ranks.rank + 1)\n    dist.barrier()",
             "the order is right, but you used barrier; send and recv are enough"),
            ("if ranks.rank < ranks.world_size - 1", "if True", "ranks.rank + 1)", "(ranks.rank + 1) % 3)\n"
             "    if ranks.rank == 0:\n        dist.recv(pen, 2)",
             "the order is right, but 3 messages were sent; 2 are enough"),
            ("ranks.rank > 0", "True", "rank - 1)", "rank - 1 if ranks.rank else 2)",
             "waited 5 s for a message that never arrived"),
            ("rank {ranks.rank} was", "rank {ranks.rank}\\nwas", "appends one line; yours appended [2, 2, 2]"),
        ],
    }  # fmt: skip
    right = {
        "sum_over_ranks": [("x.clone()", "0 + x")],
        "roll_call": [
            lambda rank, started: summed(torch.nn.functional.one_hot(torch.tensor(rank), started)),
            ("return roll", "return roll.double().numpy()"),
        ],
        "in_turn": [("was here", "was here\\n"), ("recv(pen, ranks.rank - 1)", "recv(pen)")],
    }
    given, elsewhere = {"device": "cpu"}, tuple(REJECTED)


def summed(row):
    dist.all_reduce(row, async_op=True).wait()
    return [int(count) for count in row]


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
