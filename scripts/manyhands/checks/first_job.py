"""Checks of lesson 04: a scheduler's one line, shares of a batch, why jobs wait, the first error of a log, walltimes,
stale pairs.

They judge how well a log or a queue was read as well as code. None communicates, so all work with `ranks` None.
"""

import itertools
import math
import os
import re
import tempfile
from pathlib import Path

from manyhands.checks import Wrong, exercise
from manyhands.checks.drawn import in_turn, luck
from manyhands.checks.expect import count, expect_equal, expect_refusal, number, truth
from manyhands.checks.witness import said

# Answers for the recorded queue (assets/recorded/04_pending.out): job -> (what helps, why)
ACTS = ("wait", "release", "ask for less", "cancel")
PENDING = {
    4702: ("wait", "Resources: it is next in line and starts when two nodes are free"),
    4703: ("wait", "Priority: jobs with a higher priority come first"),
    4704: ("wait", "Dependency: it starts when job 4701 has ended well"),
    4705: ("cancel", "DependencyNeverSatisfied: the job that it waits for has failed, so it would wait forever"),
    4706: ("release", "JobHeldUser: its owner put it on hold; scontrol release 4706 (PBS: qrls) lets it go"),
    4708: ("ask for less", "PartitionTimeLimit: it asks for a day, and this queue gives an hour"),
}
# Answers for the recorded failure (assets/recorded/04_failed*.out)
FAILED_RANK, FAILED_LOCAL_RANK, FAILED_ERROR = 3, 1, "IndexError"
REPORTS = ("ChildFailedError", "SignalException")
ECHOES = ("RuntimeError", "DistBackendError", "ConnectionError", "DistNetworkError")


QUEUES = (  # nodes needed, from when each node is free, when the job ahead started
    (1, [3, 2], 0), (2, [3, 2], 0), (1, [0, 0], 4), (2, [5, 1, 4], 3), (2, [7, 7, 2, 9], 7), (3, [6, 1, 6], 8),
)  # fmt: skip


@exercise(1, "when a job starts")
def start_of(answer, ranks=None):
    """`answer(need, free_at, previous)`: when a job that needs `need` nodes starts, if no job overtakes another."""
    draw = luck(1)
    drawn = [(draw.randint(1, 4), [draw.randint(0, 9) for _ in range(4)], draw.randint(0, 9)) for _ in range(12)]
    for need, free_at, previous in in_turn([*QUEUES, *drawn]):
        minute = number(answer(need, list(free_at), previous), "minutes")
        nodes = f"{need} node{'s' * (need > 1)}"
        said = f"for start_of({need}, {free_at}, {previous}) you say minute {minute:g}"
        if minute < previous:
            raise Wrong(f"{said}: that overtakes the job ahead, which started at {previous}")
        if (free := _free(free_at, minute)) < need:
            raise Wrong(f"{said}, when it needs {nodes} and finds {free} of {len(free_at)} free")
        wanted = max(previous, min(at for at in free_at if _free(free_at, at) >= need))
        if minute != wanted:
            raise Wrong(f"{said}, and it could start at {wanted:g}, with {nodes} free and the job ahead started")


def _free(free_at, minute):
    """Return how many nodes are free at a minute."""
    return sum(at <= minute for at in free_at)


@exercise("B", "twice the nodes")
def my_sequences(answer, ranks=None):
    """`answer(global_batch, nodes, ranks_per_node, node, local_rank)`: the range of sequences of this one rank."""
    for (nodes, per_node), global_batch in itertools.product(
        ((1, 2), (2, 2), (4, 2), (2, 4), (3, 1), (5, 2)), (24, 8, 12)
    ):
        for node, local in itertools.product(range(nodes), range(per_node)):
            _judge_share(answer, global_batch, nodes, per_node, node, local)


def _judge_share(answer, global_batch, nodes, per_node, node, local):
    n, rank, each = nodes * per_node, node * per_node + local, global_batch // (nodes * per_node)
    case = f"{global_batch} sequences on {count(nodes, 'node')} with {count(per_node, 'rank')} each"
    place = f"local rank {local} of node {node}"
    if global_batch % n:
        case += f" do not split evenly, and every rank must refuse them; {place}"
        expect_refusal(lambda: answer(global_batch, nodes, per_node, node, local), case, global_batch, n)
        return
    try:
        share = answer(global_batch, nodes, per_node, node, local)
    except ValueError as error:
        raise Wrong(f"{case} split evenly, {each} each, and you refused them: {said(error)}") from None
    begins = {
        "that is by its local rank; a rank is node * ranks_per_node + local_rank": local,
        "ranks are counted through node by node": local * nodes + node,
    } | {f"those are the sequences of rank {other}": other for other in range(n)}
    slips = {why: range(begin * each, (begin + 1) * each) for why, begin in begins.items()}
    slips["in turn, but a rank takes consecutive sequences"] = range(rank, global_batch, n)
    what = f"of {case} what {place} takes, rank {rank} of {n},"
    expect_equal(share, range(rank * each, (rank + 1) * each), what, slips)


@exercise("A", "what helps")
def why_it_waits(answer, ranks=None):
    """`answer` is {job: act} for the jobs in PENDING, each act one of ACTS."""
    if any(act is None or act is ... for act in answer.values()):
        raise NotImplementedError
    for job, (act, why) in PENDING.items():
        if job not in answer:
            raise Wrong(f"job {job} is missing: say what helps it")
        if answer[job] not in ACTS:
            raise Wrong(f"job {job}: unknown answer {answer[job]!r}; use one of {', '.join(ACTS)}")
        if answer[job] != act:
            raise Wrong(f"{job}: {answer[job]!r} does not help. {why}")


@exercise("C", "the first error")
def first_error(answer, ranks=None):
    """`answer` is (rank, name of the exception) that failed first in the recorded log."""
    if any(one is None or one is ... for one in answer):
        raise NotImplementedError
    rank, error = answer
    rank = (re.findall(r"\d+", str(rank)) or [rank])[0]  # 3, or as the log writes it: "[rank3]"
    # the error's name, with or without label and message, or the exception itself
    error = (re.findall(r"\w+(?:Error|Exception)\b", repr(error)) or [error])[0]
    if error in REPORTS:
        raise Wrong(f"{error} is torchrun's: a report that some rank failed, not the failure")
    if error in ECHOES:
        raise Wrong(f"a {error} in this log is an echo: its connection was closed because another rank had ended")
    if error != FAILED_ERROR:
        raise Wrong(f"no rank failed with {error!r} first; copy a name such as ValueError")
    if rank == str(FAILED_LOCAL_RANK):
        raise Wrong(f"{rank} is its local rank, which counts on its own node; the rank counts over all nodes")
    if rank != str(FAILED_RANK):
        raise Wrong(f"rank {rank} did not raise the {FAILED_ERROR}: look at the label in front of that line")


@exercise(2, "a walltime to ask for")
def ask_for(answer, ranks=None):
    """`answer(seconds)`: the walltime for a run of that length, times 1.5, plus two minutes, as HH:MM:SS."""
    draw = luck(2)
    drawn = [40 * draw.randint(0, 60) + draw.randint(3, 37) for _ in range(4)]  # odd: x 1.5 has half minutes
    for seconds in in_turn([10, 610, 2400, 2530, 108_050, *drawn]):
        whole, begun = math.floor(1.5 * seconds / 60), math.ceil(1.5 * seconds / 60)
        slips = {
            "that rounds up whole minutes, too": whole + 3,
            "that cuts off the minute that has begun; round up": whole + 2,
            "that is half as much again, without the two minutes for the start": begun,
            "that is the run and two minutes; ask for half as much again": math.ceil(seconds / 60) + 2,
            "the two minutes are added after the half as much again": math.ceil(1.5 * (seconds / 60 + 2)),
        }
        slips = {why: _walltime(minutes) for why, minutes in slips.items()}
        slips["hours do not wrap after a day"] = _walltime((begun + 2) % (24 * 60))
        expect_equal(answer(seconds), _walltime(begun + 2), f"the walltime for {seconds:,} s", slips)


def _walltime(minutes):
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


@exercise(3, "yesterday's code")
def yesterdays_code(answer, ranks=None):
    """`answer(notebook, script)`, two paths of a pair: True if a job would not run what the notebook shows."""
    with tempfile.TemporaryDirectory() as folder:
        for case, (cells, newer, with_outputs, stale, sentence) in enumerate(_PAIRS):
            pair = notebook, script = _pair(Path(folder) / str(case), cells, newer, with_outputs)
            before = [path.read_bytes() for path in pair]
            if truth(answer(notebook, script)) != stale:
                raise Wrong(sentence)
            if [path.read_bytes() if path.exists() else None for path in pair] != before:
                raise Wrong("a file of the pair was changed, or is gone: only read them")


_FIRST, _LOOP, _LAST = "steps = 10", "for _ in range(3):\n    steps *= 2\n    print(steps)", "print(steps)"
_SCRIPT = [_FIRST, _LAST, _LOOP, _LAST]
_PAIRS = [
    # the notebook's cells, which file is newer, whether outputs are stored, whether it is stale, the hint if wrong
    (_SCRIPT, "notebook", False, False,
     "the notebook was saved later, but the cells' sources are the same: nothing is stale. Times and ids do not tell"),
    (["steps = 20", *_SCRIPT[1:]], "notebook", False, True,
     "steps = 20 in the notebook, 10 in the script, as many cells in both: a job would run 10, and you call it fresh"),
    (["steps = 20", *_SCRIPT[1:]], "script", False, True,
     "the cells differ although the script is newer, as in a fresh clone: compare what the cells say, not times"),
    (_SCRIPT, "script", True, False,
     "only stored outputs differ, and no job runs outputs: compare the sources of the cells"),
    ([*_SCRIPT, "print('new')"], "script", False, True,
     "the notebook has a cell more than the script, and you call it fresh"),
    (_SCRIPT[:-1], "script", False, True, "the notebook has a cell less than the script, and you call it fresh"),
    ([_FIRST, _LOOP, _LAST, _LAST], "notebook", False, True,
     "both have the same cells, but in another order, and a job runs them in order: you call it fresh"),
    ([_FIRST, _LAST, _LOOP.replace("    print", "print"), _LAST], "notebook", False, True,
     "one line of the third cell is indented otherwise, so the loop prints less often, and you call it fresh"),
]  # fmt: skip


def _pair(folder, cells, newer, with_outputs):
    """Write a pair into `folder` and return (notebook, script): the script holds _SCRIPT, the notebook `cells`."""
    import jupytext  # imported late because they take seconds
    import nbformat

    folder.mkdir()
    notebook, script = folder / "lesson.ipynb", folder / "lesson.py"
    for path, sources in ((notebook, cells), (script, _SCRIPT)):
        content = jupytext.reads("".join(f"# %%\n{source}\n\n" for source in sources), fmt="py:percent")
        if with_outputs and path == notebook:
            content.cells[1].outputs = [nbformat.v4.new_output("stream", text="10\n")]
        jupytext.write(content, path, fmt="ipynb" if path == notebook else "py:percent")
    earlier, later = (script, notebook) if newer == "notebook" else (notebook, script)
    os.utime(earlier, (1_700_000_000, 1_700_000_000))
    os.utime(later, (1_700_000_060, 1_700_000_060))
    return notebook, script
