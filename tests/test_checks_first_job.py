"""The checks of lesson 04 accept its solutions and reject each usual mistake with the sentence that names it."""

import numpy as np
import pytest
from definitions import taken_from
from exercises import Answers
from manyhands.checks import CORRECT, NOT_ATTEMPTED, first_job
from manyhands.course.catch_up import solutions
from manyhands.course.folders import script_of
from manyhands.launch import recorded_runs

LESSON = "04_first_job"
ACTS = {4702: "wait", 4703: "wait", 4704: "wait", 4705: "cancel", 4706: "release", 4708: "ask for less"}


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (ACTS | {4705: "wait"}, "the job that it waits for has failed, so it would wait forever"),
        (ACTS | {4706: "wait"}, "scontrol release 4706"),
        (ACTS | {4708: "wait"}, "asks for a day, and this queue gives an hour"),
        (ACTS | {4703: "cancel"}, "jobs with a higher priority come first"),
        (ACTS | {4702: "shout"}, "ob 4702: unknown answer 'shout'; use one of wait, release, ask for less, cancel"),
        ({job: act for job, act in ACTS.items() if job != 4708}, "ob 4708 is missing"),
    ],
)
def test_why_it_waits_rejects(answer, sentence):
    assert sentence in first_job.why_it_waits(answer)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((0, "RuntimeError"), "an echo: its connection was closed because another rank had ended"),
        ((3, "torch.distributed.elastic.ChildFailedError"), "a report that some rank failed, not the failure"),
        ((0, "SignalException"), "a report that some rank failed, not the failure"),
        ((1, "IndexError"), "1 is its local rank"),
        ((2, "IndexError"), "ank 2 did not raise the IndexError"),
        ((3, 1), "o rank failed with 1 first"),
        ((3, "KeyError"), "o rank failed with 'KeyError' first"),
    ],
)
def test_first_error_rejects(answer, sentence):
    assert sentence in first_job.first_error(answer)


@pytest.mark.parametrize(
    "answer", [(np.int64(3), " IndexError:"), (3, IndexError), ["[rank3]", "[rank3]: IndexError: x"]]
)
def test_first_error_takes_other_ways_to_say_it(answer):
    assert first_job.first_error(answer) == CORRECT


EARLIEST = "sorted(free_at)[need - 1]"
RANK = "node * ranks_per_node + local_rank"
REFUSES = "if global_batch % n:"
WORDS = "{global_batch} sequences do not split over {n} ranks; use a multiple of {n}"
CELLS = "ours != theirs"
REJECTED = {
    "start_of": [
        (EARLIEST, "min(free_at)", "(2, [3, 2], 0) you say minute 2, when it needs 2 nodes and finds 1 of 2 free"),
        (EARLIEST, "max(free_at)", "you say minute 3, and it could start at 2, with 1 node free"),
        ("max(enough_are_free, previous)", "enough_are_free",
         "start_of(1, [0, 0], 4) you say minute 0: that overtakes the job ahead, which started at 4"),
        ("sorted(free_at)", "free_at", "start_of(1, [3, 2], 0) you say minute 3,"),
        ("max(enough_are_free, previous)", "enough_are_free + previous", "start_of(2, [5, 1, 4], 3) you say minute 7"),
        ("[need - 1]", "[need]", "you say minute 3"),
    ],
    "my_sequences": [
        (RANK, "local_rank", "that is by its local rank; a rank is node * ranks_per_node"),
        (RANK, "node", "of 2, should be range(12, 24), not range(0, 12): those are the sequences of rank 0"),
        (RANK, "2 * node + local_rank", "rank 4 of 8, should be range(12, 15), not"),
        (RANK, "local_rank * nodes + node",
         "should be range(6, 12), not range(12, 18): ranks are counted through node by node"),
        ("range(rank * share, (rank + 1) * share)", "range(rank, global_batch, n)",
         "not range(0, 24, 2): in turn, but a rank takes"),
        ("global_batch // n", "global_batch // 2", "rank 0 of 4, should be range(0, 6), not range(0, 12)"),
        (REFUSES, "if False:", "do not split evenly, and every rank must refuse them"),
        (REFUSES, "if global_batch % n and node + local_rank == 0:",
         "every rank must refuse them; local rank 1 of node 0: raise a ValueError"),
        (REFUSES, "if global_batch < n:", "12 sequences on 4 nodes with 2 ranks each do not split evenly"),
        (REFUSES, "if True:", "split evenly, 12 each, and you refused them"),
        ("raise ValueError(", "raise AssertionError(", "that names 12 and 8; yours was AssertionError"),
        (WORDS, "does not split", "names 12 and 8; yours says does not split"),
        (WORDS, "128 does not split", "names 12 and 8; yours says 128 does not split"),
    ],
    "ask_for": [
        ("math.ceil", "int", "that cuts off the minute that has begun"),
        (" + 2", "", "without the two minutes for the start"),
        ("math.ceil(1.5 * seconds / 60)", "int(1.5 * seconds / 60) + 1",
         "for 2,400 s should be '01:02:00', not '01:03:00': that rounds up whole minutes, too"),
        ("1.5 * ", "", "that is the run and two minutes"),
        ("1.5 * seconds / 60) + 2", "1.5 * (seconds / 60 + 2))", "the two minutes are added after"),
        ("{minutes // 60:02d}", "{minutes // 60 % 24:02d}", "hours do not wrap after a day"),
        ("{minutes // 60:02d}:{minutes % 60:02d}:00", "{minutes // 60}:{minutes % 60}:00", "the walltime for"),
        ('f"{minutes // 60:02d}:{minutes % 60:02d}:00"', "minutes", "the walltime for"),
    ],
    "yesterdays_code": [
        (CELLS, "set(ours) != set(theirs)", "a cell less than the script"),
        (CELLS, "sorted(ours) != sorted(theirs)", "in another order"),
        (CELLS, "[c.split() for c in ours] != [c.split() for c in theirs]", "indented otherwise"),
        (CELLS, "not set(ours) <= set(theirs)", "a cell less than the script"),
        (CELLS, "len(ours) != len(theirs)", "a job would run 10, and you call it fresh"),
        (CELLS, "any(a != b for a, b in zip(ours, theirs))", "a cell more than the script"),
        (CELLS, "notebook.stat().st_mtime > script.stat().st_mtime", "Times and ids do not tell"),
        (CELLS, "ours != theirs and notebook.stat().st_mtime > script.stat().st_mtime", "as in a fresh clone"),
        (CELLS, "notebook.read_text() != script.read_text()", "the cells' sources are the same"),
        ("cell.source for", "cell for", "nothing is stale. Times and ids do not tell"),
        (CELLS, "[ours != theirs, notebook.unlink(), script.unlink()][0]",
         "a file of the pair was changed, or is gone: only read them"),
        ("cell.source for", '(cell.source, str(cell.get("outputs"))) for', "no job runs outputs"),
    ],
}  # fmt: skip


class TestAnswers(Answers):
    lesson, checks, worlds = LESSON, first_job, (1,)
    rejected, solutions = REJECTED, {"yesterdays_code": "stale"}
    elsewhere = ("why_it_waits", "first_error")
    right = {
        "start_of": [("enough_are_free =", "free_at.sort()\n    enough_are_free =")],
        "my_sequences": [
            ("return range", "return list(range", "+ 1) * share)", "+ 1) * share))"),
            (WORDS, "{global_batch}%{n}!=0"),
            (WORDS, "{n}ranks, {global_batch}sequences"),
        ],
        "ask_for": [("math.ceil(1.5 * seconds / 60) + 2", "-int(-1.5 * seconds // 60) + 2")],
        "yesterdays_code": [(CELLS, "int(ours != theirs)"), (CELLS, "not ours == theirs")],
    }


def test_the_answers_that_are_no_functions_are_correct_or_not_attempted():
    folded, lesson = solutions(script_of("04_first_job").read_text("utf-8")), {}
    for label in "AC":
        exec(folded[label], lesson)
    assert first_job.why_it_waits(lesson["acts"]) == CORRECT
    assert first_job.first_error((lesson["guess_rank"], lesson["guess_error"])) == CORRECT
    assert first_job.why_it_waits({**ACTS, 4705: ...}) == NOT_ATTEMPTED
    assert first_job.first_error((..., ...)) == NOT_ATTEMPTED


def test_the_recorded_logs_hold_what_the_check_asks_for_and_begin_with_an_echo():
    log = [
        line for which in ("", ".node1", ".node2") for line in recorded_runs.text(f"04_failed{which}.out").splitlines()
    ]
    errors = [line for line in log if line.startswith("[rank") and "Error: " in line]
    own = [line for line in errors if not any(echo in line for echo in first_job.ECHOES)]
    assert [line.split(":")[0] for line in own] == [f"[rank{first_job.FAILED_RANK}]"]
    assert first_job.FAILED_ERROR in own[0]
    assert errors[0] != own[0]  # whoever takes the first line of grep is led astray
    assert f"rank {first_job.FAILED_RANK} ended with status 1" in recorded_runs.text("04_failed.node2.out")
    assert own[0] in recorded_runs.text("04_failed.node2.out").splitlines()


def test_the_recorded_queue_holds_the_jobs_that_the_check_asks_for():
    reasons = {"wait": ("Resources", "Priority", "Dependency"), "cancel": ("DependencyNeverSatisfied",),
               "release": ("JobHeldUser",), "ask for less": ("PartitionTimeLimit",)}  # fmt: skip
    shown = {int(line.split()[0]): line.split("(")[-1].rstrip(")") for line in
             recorded_runs.text("04_pending.out").splitlines()[2:]}  # fmt: skip
    for job, (act, why) in first_job.PENDING.items():
        assert shown[job] in reasons[act]
        assert why.startswith(f"{shown[job]}:")


def test_recordings_say_on_what_they_were_made_and_name_no_private_place():
    for name in ("04_queue.json", "04_ddp_shakespeare.json"):
        conditions = recorded_runs.numbers(name)["conditions"]
        assert {"date", "hardware", "torch", "commit", "command"} <= set(conditions)
    for name in (
        "04_ddp_shakespeare.out", "04_failed.out", "04_failed.node1.out", "04_failed.node2.out", "04_pending.out",
    ):  # fmt: skip
        text = recorded_runs.text(name)
        assert "/tmp/" not in text and "/root" not in text and "/work" not in text


def test_the_recorded_starts_are_those_that_the_lessons_schedulers_predict():
    lesson = taken_from(LESSON, "start_of", "start_times", "with_overtaking")
    content = recorded_runs.numbers("04_queue.json")
    jobs = [(job["nodes"], job["minutes"]) for job in content["jobs"].values()]
    predicted = {
        "in order": lesson.start_times(jobs, 2),
        "overtaking": lesson.with_overtaking(jobs, 2),
        "overtaking, D asks for 60 minutes": lesson.with_overtaking([*jobs[:3], (1, 60)], 2),
    }
    for way, starts in content["start_minutes"].items():
        for job, minute in zip("ABCD", predicted[way], strict=True):
            assert 0 <= starts[job] - minute < 0.1, (way, job)
