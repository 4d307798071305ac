"""Checks of lesson 04: a scheduler's one line, shares of a batch, reasons for waiting, the first error of a log, stale pairs.

They judge reading as much as code, and need no messages: all of them also work with `ranks` None.
"""

import operator
import os
import re
import tempfile
from pathlib import Path

from manyhands.checks import Wrong, exercise
from manyhands.checks.values import number

# What the recorded queue (assets/recorded/04_pending.out) asks for: job -> (what helps, why)
ACTS = ("wait", "release", "ask for less", "cancel")
PENDING = {
    4702: ("wait", "Resources: it is next in line and starts when two nodes are free"),
    4703: ("wait", "Priority: jobs with a higher priority come first"),
    4704: ("wait", "Dependency: it starts when job 4701 has ended well"),
    4705: (
        "cancel",
        "DependencyNeverSatisfied: the job that it waits for has failed, so it would wait forever",
    ),
    4706: ("release", "JobHeldUser: its owner put it on hold; scontrol release 4706 (PBS: qrls) lets it go"),
    4708: ("ask for less", "PartitionTimeLimit: it asks for a day, and this queue gives an hour"),
}
# What the recorded failure (assets/recorded/04_failed*.out) shows
FAILED_RANK, FAILED_LOCAL_RANK, FAILED_ERROR = 3, 1, "IndexError"
REPORTS = ("ChildFailedError", "SignalException")
ECHOES = ("RuntimeError", "DistBackendError", "ConnectionError", "DistNetworkError")


QUEUES = (
    # nodes needed, from when each node is free, when the job ahead started
    (1, [3, 2], 0),
    (2, [3, 2], 0),
    (1, [0, 0], 4),
    (2, [5, 1, 4], 3),
    (2, [7, 7, 2, 9], 7),
    (3, [6, 1, 6], 8),
    (1, [2.5], 0),
)


@exercise("A", "when a job starts")
def start_of(answer, ranks=None):
    """`answer(need, free_at, previous)`: when a job starts that needs so many nodes, if nobody is overtaken."""
    for need, free_at, previous in QUEUES:
        minute = number(answer(need, list(free_at), previous), "a minute, such as 3")
        nodes = f"{need} node{'s' * (need > 1)}"
        said = f"for start_of({need}, {free_at}, {previous}) you say minute {minute:g}"
        if minute < previous:
            raise Wrong(f"{said}: that overtakes the job ahead, which started at {previous}")
        if (free := _free(free_at, minute)) < need:
            raise Wrong(
                f"{said}, when it needs {nodes} and {free} of {len(free_at)} {'is' if free == 1 else 'are'} free"
            )
        wanted = max(previous, min(at for at in free_at if _free(free_at, at) >= need))
        if minute != wanted:
            raise Wrong(
                f"{said}, and it could start at {wanted:g}: then {nodes} {'are' if need > 1 else 'is'} free and the job "
                "ahead has started"
            )


def _free(free_at, minute):
    """How many nodes are free at a minute."""
    return sum(at <= minute for at in free_at)


@exercise("B", "twice the nodes")
def my_sequences(answer, ranks=None):
    """`answer(global_batch, nodes, ranks_per_node, node, local_rank)`: the range of sequences of this one rank."""
    for nodes, ranks_per_node in ((1, 2), (2, 2), (4, 2), (2, 4), (3, 1), (5, 2)):
        for global_batch in (24, 8, 12):
            n, machine = nodes * ranks_per_node, _nodes(nodes, ranks_per_node)
            places = [(node, local) for node in range(nodes) for local in range(ranks_per_node)]
            given = [_ask(answer, global_batch, nodes, ranks_per_node, *place) for place in places]
            if global_batch % n:
                _judge_refusals(given, places, f"{global_batch} sequences on {machine}", global_batch, n)
            else:
                _judge_shares(given, places, machine, global_batch)


def _nodes(nodes, ranks_per_node):
    return f"{nodes} node{'s' * (nodes > 1)} with {ranks_per_node} rank{'s' * (ranks_per_node > 1)} each"


def _ask(answer, global_batch, nodes, ranks_per_node, node, local):
    """What this rank takes: a range, or the error with which the answer refused a batch."""
    splits = global_batch % (nodes * ranks_per_node) == 0
    try:
        share = answer(global_batch, nodes, ranks_per_node, node, local)
    except NotImplementedError:
        raise
    except Exception as error:
        if splits and not isinstance(error, ValueError):
            raise  # a slip, which says more by itself
        return error
    if share is None:
        raise Wrong(
            f"{global_batch} sequences on {_nodes(nodes, ranks_per_node)}: for {_place(node, local)} nothing came back; "
            "return a range such as range(3, 6)"
        )
    if not isinstance(share, range):
        raise Wrong(f"return a range such as range(3, 6), not {type(share).__name__} {share!r}")
    return share


def _place(node, local):
    return f"local rank {local} of node {node}"


def _judge_refusals(given, places, where, global_batch, n):
    wanted = f"raise a ValueError that names {global_batch} and {n}"
    taken = [place for place, one in zip(places, given, strict=True) if isinstance(one, range)]
    if len(taken) == n:
        raise Wrong(f"{where} do not split evenly: {wanted}")
    if taken:
        refused = next(place for place in places if place not in taken)
        raise Wrong(
            f"{where}: {_place(*refused)} refuses them and {_place(*taken[0])} does not, and would wait for it: every "
            "rank must refuse"
        )
    for error in given:
        if not isinstance(error, ValueError):
            raise Wrong(f"{where} do not split evenly: {wanted}; yours was {_said(error)}")
        if not {global_batch, n} <= {int(digits) for digits in re.findall(r"\d+", str(error))}:
            raise Wrong(f"{where}: refused, but the error does not name {global_batch} and {n}")


def _said(error):
    return f"{type(error).__name__}{': ' if str(error) else ''}{error}"


def _judge_shares(given, places, machine, global_batch):
    where, owners, each = f"on {machine}", {}, global_batch // len(places)
    for place, share in zip(places, given, strict=True):
        if isinstance(share, ValueError):
            raise Wrong(
                f"{global_batch} sequences {where} split evenly, {each} each, and you refused them: {_said(share)}"
            )
        for sequence in share:
            if sequence not in range(global_batch):
                raise Wrong(
                    f"{where} node {place[0]} takes sequence {sequence}: the global batch ends with {global_batch - 1}"
                    if sequence > 0
                    else f"{where} node {place[0]} takes sequence {sequence}: the global batch begins with 0"
                )
            if sequence in owners:
                raise Wrong(
                    f"{where} sequence {sequence} is taken twice, by {_place(*owners[sequence])} and {_place(*place)}: a "
                    "rank is node * ranks_per_node + local_rank"
                )
            owners[sequence] = place
    if missing := sorted(set(range(global_batch)) - set(owners)):
        raise Wrong(
            f"{where} nobody takes sequence {missing[0]}: the global batch shrank from {global_batch} to {len(owners)}"
        )
    sizes = {len(share) for share in given}
    if len(sizes) > 1:
        raise Wrong(f"{where} the shares have {sorted(sizes)} sequences: the mean over ranks would weigh them wrongly")
    for rank, (place, share) in enumerate(zip(places, given, strict=True)):
        wanted = range(rank * each, (rank + 1) * each)
        if share != wanted:
            raise Wrong(
                f"{where} {_place(*place)} is rank {rank} and takes {wanted}, not {share}: ranks are counted through, and "
                "node 0 has the first sequences"
            )


@exercise(1, "what helps")
def why_it_waits(answer, ranks=None):
    """`answer` is {job: act} for the jobs in PENDING, each act one of ACTS."""
    if not isinstance(answer, dict):
        raise Wrong(f"give a dict such as {{4702: 'wait'}}, not {answer!r}")
    if any(act is None or act is ... for act in answer.values()):
        raise NotImplementedError
    for job, (act, why) in PENDING.items():
        given = answer.get(job)
        if given is None and str(job) in answer:
            raise Wrong(f"a job is a number: write {job}, not {str(job)!r}")
        if given is None:
            raise Wrong(f"job {job} is missing: say what helps it")
        if not isinstance(given, str) or given not in ACTS:
            raise Wrong(f"{given!r} for job {job} is none of {', '.join(ACTS)}")
        if given != act:
            raise Wrong(f"{job}: {given!r} does not help. {why}")


@exercise(2, "the first error")
def first_error(answer, ranks=None):
    """`answer` is (rank, name of the exception) that failed first in the recorded log."""
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        raise Wrong(f"give two things, the rank and the name of its error, not {answer!r}")
    if any(one is None or one is ... for one in answer):
        raise NotImplementedError
    rank, error = _rank(answer[0]), _name(answer[1])
    if error in REPORTS:
        raise Wrong(
            f"{error} comes from a torchrun that was told to stop: a report that some rank failed, not the failure"
        )
    if error in ECHOES:
        raise Wrong(
            f"a {error} in this log is an echo: its connection was closed because another rank had gone. Whose error does "
            "not speak of connections?"
        )
    if error != FAILED_ERROR:
        raise Wrong(f"no rank failed with {error!r} first; copy the name before the colon, such as ValueError")
    if rank == FAILED_LOCAL_RANK:
        raise Wrong(f"{rank} is its local rank, which counts on its own node; the rank counts over all nodes")
    if rank != FAILED_RANK:
        raise Wrong(f"rank {rank} did not raise the {FAILED_ERROR}: look at the label in front of that line")


def _rank(given):
    if isinstance(given, str):
        hint = "first the rank, then the error" if not given.strip().isdigit() else f"write {given.strip()}"
        raise Wrong(f"a rank is a number, and {given!r} is text: {hint}")
    try:
        return operator.index(given)
    except TypeError:
        raise Wrong(f"a rank is a whole number, not {given!r}") from None


def _name(given):
    """The name of an error, given as text, with or without what it said, or as the exception itself."""
    if isinstance(given, type):
        return given.__name__
    if not isinstance(given, str):
        raise Wrong(f'give the name of the error as text, such as "ValueError", not {given!r}')
    return given.split(":")[0].strip()


@exercise(3, "yesterday's code")
def yesterdays_code(answer, ranks=None):
    """`answer(notebook, script)`, two paths of a pair: True if a job would not run what the notebook shows."""
    with tempfile.TemporaryDirectory() as folder:
        for case, (cells, newer, with_outputs, stale, sentence) in enumerate(_PAIRS):
            notebook, script = _pair(Path(folder) / str(case), cells, newer, with_outputs)
            if _truth(answer(notebook, script)) != stale:
                raise Wrong(sentence)


def _truth(given):
    if given is None:
        raise Wrong("nothing came back: return True or False")
    try:
        if not isinstance(given, (str, bytes)):
            return bool(given)
    except (TypeError, ValueError, RuntimeError):  # arrays of more than one number are neither
        pass
    raise Wrong(f"return True or False, not {type(given).__name__} {given!r}")


_FIRST, _LOOP, _LAST = "steps = 10", "for _ in range(3):\n    steps *= 2\n    print(steps)", "print(steps)"
_SCRIPT = [_FIRST, _LAST, _LOOP, _LAST]
_PAIRS = [
    # cells of the notebook, which file is newer, are outputs stored, is it stale, what to say of a wrong answer
    (_SCRIPT, "notebook", False, False,
     "the notebook was saved after the script, but their cells are the same: nothing is stale. Times do not tell"),
    (["steps = 20", *_SCRIPT[1:]], "notebook", False, True,
     "steps = 20 in the notebook, 10 in the script, as many cells in both: a job would run 10, and you call it fresh"),
    (["steps = 20", *_SCRIPT[1:]], "script", False, True,
     "the cells differ although the script is newer, as in a fresh clone: compare what the cells say, not times"),
    (_SCRIPT, "script", True, False,
     "only stored outputs differ, and no job runs outputs: compare the sources of the cells"),
    ([*_SCRIPT, "print('new')"], "script", False, True,
     "the notebook has a cell more than the script, and you call it fresh"),
    (_SCRIPT[:-1], "script", False, True,
     "the notebook has a cell less than the script, and you call it fresh"),
    ([_FIRST, _LOOP, _LAST, _LAST], "notebook", False, True,
     "both have the same cells, but in another order, and a job runs them in order: you call it fresh"),
    ([*_SCRIPT[:-1], "print(steps + 1)"], "notebook", False, True,
     "only the last of four cells differs, and you call it fresh"),
    ([_FIRST, _LAST, _LOOP, _LOOP], "notebook", False, True,
     "one cell comes twice in the notebook and once in the script, as many cells in both, and you call it fresh"),
    ([_FIRST, _LAST, _LOOP.replace("    print", "print"), _LAST], "notebook", False, True,
     "one line of the third cell is indented otherwise, so the loop prints less often, and you call it fresh"),
]  # fmt: skip


def _pair(folder, cells, newer, with_outputs):
    """(notebook, script) in `folder`: the script holds _SCRIPT, the notebook `cells`."""
    import jupytext  # late: they take seconds to import
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
