"""The checks of lesson 04 accept its solutions and reject each usual mistake with the sentence that names it."""

import jupytext
import numpy as np
import pytest
import torch
from exercises import Answers, FromLesson
from manyhands.checks import CORRECT, NOT_ATTEMPTED, first_job
from manyhands.course.catch_up import taken_from
from manyhands.launch import recorded_runs

LESSON = "04_first_job"
ours = FromLesson(LESSON, "stale")


def by_counting(need, free_at, previous):
    """A minute after the other: the first at which enough nodes are free."""
    return next(m for m in sorted([*free_at, previous]) if m >= previous and sum(at <= m for at in free_at) >= need)


def sorts_what_it_was_given(need, free_at, previous):
    free_at.sort()
    return np.maximum(free_at[need - 1], previous)


def uses_up_what_it_was_given(need, free_at, previous):
    for _ in range(need):
        soonest = min(free_at)
        free_at.remove(soonest)
    return torch.tensor(max(soonest, previous))


def shares(per_rank, rank_of=lambda node, local, per_node: node * per_node + local, refuse=True, too_few=False):
    """An answer to build B with `per_rank(global_batch, n)` sequences for each rank."""

    def answer(global_batch, nodes, ranks_per_node, node, local_rank):
        n = nodes * ranks_per_node
        if refuse and global_batch % n or too_few and global_batch < n:
            raise ValueError(f"{global_batch} sequences do not split over {n} ranks")
        share, rank = per_rank(global_batch, n), rank_of(node, local_rank, ranks_per_node)
        return range(rank * share, (rank + 1) * share)

    return answer


def evenly(global_batch, n):
    return global_batch // n


def last_takes_the_rest(global_batch, nodes, ranks_per_node, node, local_rank):
    n, rank = nodes * ranks_per_node, node * ranks_per_node + local_rank
    if global_batch % n:
        raise ValueError(f"{global_batch} does not split over {n}")
    begin = rank * (global_batch // n - (n > 4))
    return range(begin, global_batch if rank == n - 1 else begin + global_batch // n - (n > 4))


right = shares(evenly)


def only_rank_0_refuses(global_batch, nodes, ranks_per_node, node, local_rank):
    place = (node, local_rank) == (0, 0)
    return (right if place else shares(evenly, refuse=False))(global_batch, nodes, ranks_per_node, node, local_rank)


def last_rank_refuses_not(global_batch, nodes, ranks_per_node, node, local_rank):
    last = (node, local_rank) == (nodes - 1, ranks_per_node - 1)
    return shares(evenly, refuse=not last)(global_batch, nodes, ranks_per_node, node, local_rank)


def in_reverse(global_batch, nodes, ranks_per_node, node, local_rank):
    right(global_batch, nodes, ranks_per_node, node, local_rank)
    return right(global_batch, nodes, ranks_per_node, nodes - 1 - node, ranks_per_node - 1 - local_rank)


def local_ranks_first(global_batch, nodes, ranks_per_node, node, local_rank):
    share = right(global_batch, nodes, ranks_per_node, node, local_rank)
    rank = local_rank * nodes + node
    return range(rank * len(share), (rank + 1) * len(share))


def like_cards(global_batch, nodes, ranks_per_node, node, local_rank):
    right(global_batch, nodes, ranks_per_node, node, local_rank)
    return range(node * ranks_per_node + local_rank, global_batch, nodes * ranks_per_node)


def backwards(*given):
    return right(*given)[::-1]


def asserts(global_batch, nodes, ranks_per_node, node, local_rank):
    assert global_batch % (nodes * ranks_per_node) == 0
    return right(global_batch, nodes, ranks_per_node, node, local_rank)


def refusing(wording):
    """An answer that refuses with these words."""

    def answer(global_batch, nodes, ranks_per_node, node, local_rank):
        if global_batch % (n := nodes * ranks_per_node):
            raise ValueError(wording.format(batch=global_batch, n=n))
        return right(global_batch, nodes, ranks_per_node, node, local_rank)

    return answer


WORDINGS = (
    "batch={batch} ranks={n}", "{batch}/{n} is no whole number", "{batch}%{n}!=0", "a batch of {batch}, and {n}-fold p",
    "[{batch}] on <{n}>", "'{batch}' over \"{n}\"", "{n}ranks, {batch}sequences",
)  # fmt: skip


RIGHT = {4702: "wait", 4703: "wait", 4704: "wait", 4705: "cancel", 4706: "release", 4708: "ask for less"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({4705: "wait"}, "the job that it waits for has failed, so it would wait forever"),
        ({4706: "wait"}, "scontrol release 4706"),
        ({4708: "wait"}, "asks for a day, and this queue gives an hour"),
        ({4703: "cancel"}, "jobs with a higher priority come first"),
        ({4702: "shout"}, "'shout' for job 4702 is none of wait, release, ask for less, cancel"),
    ],
)
def test_why_it_waits_rejects(change, sentence):
    assert sentence in first_job.why_it_waits(RIGHT | change)


def test_why_it_waits_wants_every_job():
    assert "ob 4708 is missing" in first_job.why_it_waits({job: act for job, act in RIGHT.items() if job != 4708})


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((0, "RuntimeError"), "an echo: its connection was closed because another rank had gone"),
        ((3, "ChildFailedError"), "a report that some rank failed, not the failure"),
        ((0, "SignalException"), "a report that some rank failed, not the failure"),
        ((1, "IndexError"), "1 is its local rank"),
        ((2, "IndexError"), "ank 2 did not raise the IndexError"),
        ((3, "KeyError"), "o rank failed with 'KeyError' first"),
        (("3", "IndexError"), "A rank is a number, and '3' is text"),
        ((3, "RuntimeError"), "A RuntimeError in this log is an echo"),
    ],
)
def test_first_error_rejects(answer, sentence):
    assert sentence in first_job.first_error(answer)


@pytest.mark.parametrize(
    "answer",
    [(np.int64(3), "IndexError"), (torch.tensor(3), " IndexError:"), (3, IndexError), [3, "IndexError: index 3"]],
)
def test_first_error_takes_other_ways_to_say_it(answer):
    assert first_job.first_error(answer) == CORRECT


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (["wait"] * 6, "give a dict such as"),
        ("wait", "give a dict such as"),
        ({str(job): act for job, act in RIGHT.items()}, "A job is a number: write 4702, not '4702'"),
        (RIGHT | {4702: ["wait"]}, "['wait'] for job 4702 is none of"),
        (RIGHT | {4702: np.zeros(3)}, "for job 4702 is none of"),
    ],
)
def test_why_it_waits_says_what_is_no_answer(answer, sentence):
    assert sentence.lower() in first_job.why_it_waits(answer).lower()


def compares_files(notebook, script):
    return notebook.read_text() != script.read_text()


def compares_numbers_of_cells(notebook, script):
    return len(jupytext.read(notebook).cells) != len(jupytext.read(script).cells)


def compares_outputs_too(notebook, script):
    def whole(path):
        return [(cell.source, str(cell.get("outputs"))) for cell in jupytext.read(path).cells]

    return whole(notebook) != whole(script)


def looks_at_common_cells_only(notebook, script):
    pairs = zip(jupytext.read(notebook).cells, jupytext.read(script).cells, strict=False)
    return any(ours.source != theirs.source for ours, theirs in pairs)


def compares(what):
    """An answer that compares `what(list of sources)` of both files."""

    def answer(notebook, script):
        ours, theirs = ([cell.source for cell in jupytext.read(path).cells] for path in (notebook, script))
        return what(ours) != what(theirs)

    return answer


def has_new_cells(notebook, script):
    ours, theirs = ({cell.source for cell in jupytext.read(path).cells} for path in (notebook, script))
    return not ours <= theirs


REJECTED = {
    "start_of": [
        (lambda need, free_at, previous: max(min(free_at), previous),
         "or start_of(2, [3, 2], 0) you say minute 2, when it needs 2 nodes and 1 of 2 is free"),
        (lambda need, free_at, previous: max(*free_at, previous), "you say minute 3, and it could start at 2: then 1"),
        (lambda need, free_at, previous: sorted(free_at)[need - 1],
         "start_of(1, [0, 0], 4) you say minute 0: that overtakes the job ahead, which started at 4"),
        (lambda need, free_at, previous: max(free_at[need - 1], previous), "start_of(1, [3, 2], 0) you say minute 3,"),
        (lambda need, free_at, previous: previous + sorted(free_at)[need - 1], "start_of(2, [5, 1, 4], 3) you say min"),
        (lambda need, free_at, previous: max(sorted(free_at)[need % len(free_at)], previous), "you say minute 3"),
        (lambda need, free_at, previous: max(sorted(free_at, reverse=True)[need - 1], previous), "you say minute 3"),
        (lambda need, free_at, previous: max(sorted(free_at)[need], previous), "you say minute 3"),
        (lambda need, free_at, previous: free_at[need], "IndexError"),
    ],
    "my_sequences": [
        (shares(evenly, rank_of=lambda node, local, _: local), "that is by its local rank; a rank is node * ranks_per"),
        (shares(evenly, rank_of=lambda node, local, _: node), "that is by its node; a rank is node * ranks_per_node"),
        (shares(evenly, rank_of=lambda node, local, _: 2 * node + local), "rank 4 of 8, should be range(12, 15), not"),
        (shares(evenly, refuse=False), "do not split evenly, and every rank must refuse them"),
        (shares(lambda batch, n: batch // n - 1), "should be range(0, 12), not range(0, 11)"),
        (shares(lambda batch, n: batch // 2), "rank 0 of 4, should be range(0, 6), not range(0, 12)"),
        (last_takes_the_rest, "rank 0 of 8, should be range(0, 3), not range(0, 2)"),
        (lambda batch, nodes, per_node, node, local: list(shares(evenly)(batch, nodes, per_node, node, local)),
         "eturn a range such as range(3, 6), not the list"),
        (lambda *_: (_ for _ in ()).throw(ValueError("no")), "split evenly, 12 each, and you refused them"),
        (lambda *_: (_ for _ in ()).throw(ValueError), "and you refused them: ValueError."),
        (only_rank_0_refuses, "every rank must refuse them; local rank 1 of node 0: raise a ValueError"),
        (last_rank_refuses_not, "every rank must refuse them; local rank 1 of node 3: raise a ValueError"),
        (shares(evenly, rank_of=lambda node, local, per_node: -1 - node * per_node - local), "not range(-12, 0)"),
        (in_reverse, "should be range(0, 12), not range(12, 24)"),
        (like_cards, "not range(0, 24, 2): like cards, and a rank takes"),
        (local_ranks_first, "should be range(6, 12), not range(12, 18): ranks are counted through node by node"),
        (backwards, "should be range(0, 12), not range(11, -1, -1)"),
        (asserts, "raise a ValueError that names 12 and 8; yours was AssertionError"),
        (shares(evenly, refuse=False, too_few=True), "12 sequences on 4 nodes with 2 ranks each do not split evenly"),
        (refusing("does not split"), "names 12 and 8; yours says does not split"),
        (refusing("128 does not split"), "names 12 and 8; yours says 128 does not split"),
    ],
    "yesterdays_code": [
        (compares(set), "a cell less than the script"),
        (compares(lambda cells: (set(cells), len(cells))), "in another order"),
        (compares(sorted), "in another order"),
        (compares(lambda cells: (cells[0], set(cells))), "a cell less than the script"),
        (compares(lambda cells: (list(dict.fromkeys(cells)), len(cells))), "comes twice in the notebook"),
        (compares(lambda cells: (cells[0], len(cells))), "in another order"),
        (compares(lambda cells: (cells[0], cells[-1], len(cells))), "in another order"),
        (compares(lambda cells: (cells[:-1], len(cells))), "nly the last of four cells differs"),
        (compares(lambda cells: [cell.split() for cell in cells]), "indented otherwise"),
        (compares(lambda cells: [cell.split("\n")[0] for cell in cells]), "indented otherwise"),
        (has_new_cells, "a cell less than the script"),
        (lambda notebook, script: notebook.stat().st_mtime > script.stat().st_mtime, "Times do not tell"),
        (compares_files, "their cells are the same: nothing is stale"),
        (compares_numbers_of_cells, "a job would run 10, and you call it fresh"),
        (compares_outputs_too, "no job runs outputs"),
        (looks_at_common_cells_only, "a cell more than the script"),
        (lambda notebook, script: False, "a job would run 10"),
        (
            lambda notebook, script: (
                ours.stale(notebook, script) and notebook.stat().st_mtime > script.stat().st_mtime
            ),
            "as in a fresh clone",
        ),
    ],
}  # fmt: skip


class TestAnswers(Answers):
    lesson, checks, worlds = LESSON, first_job, (1,)
    rejected, solutions = REJECTED, {"yesterdays_code": "stale"}
    elsewhere = ("why_it_waits", "first_error")
    right = {
        "start_of": [by_counting, sorts_what_it_was_given, uses_up_what_it_was_given],
        "my_sequences": [right, *map(refusing, WORDINGS)],
        "yesterdays_code": [
            lambda *pair, of=of: of(ours.stale(*pair)) for of in (np.bool_, int, lambda differ: ["steps = 20"] * differ)
        ],
    }


def test_the_answers_that_are_no_functions_are_correct_or_not_attempted():
    assert first_job.why_it_waits(RIGHT, solution=True) == CORRECT
    assert first_job.first_error((3, "IndexError"), solution=True) == CORRECT
    assert first_job.why_it_waits({**RIGHT, 4705: ...}) == NOT_ATTEMPTED
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
    assert f"rank {first_job.FAILED_RANK} ended with status 1" in recorded_runs.text("04_failed.out")
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
