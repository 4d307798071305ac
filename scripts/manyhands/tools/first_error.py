"""The first error of a failed run, with its rank: from a log of several ranks, or from an executed notebook.

When one rank raises, its neighbours lose their connection and raise too, often into the same lines of the log. The
error to read is the earliest that is not such a consequence.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

# our log: "[1] "; torch's excepthook: "[rank1]: "; say: "[rank 1] "; Open MPI, of (job, rank): "[1,0]<stderr>:"
LABEL = re.compile(r"^\[(?:rank *|\d+,)?(\d+)\](?:<std(?:out|err)>)?:? ?")
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
TRACEBACK = "Traceback (most recent call last):"
CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote (process )?.*(exited|closed)|ChildFailedError"
    r"|SignalException|Gloo connectFullMesh failed|KeyboardInterrupt|BAD TERMINATION|recvValue failed|peer",
    re.IGNORECASE,
)
LAUNCHER = re.compile(  # lines of torchrun and mpiexec about a failed rank: never the error itself
    r"torch/distributed/(run|elastic|launcher)|\b[EWI]\d{4} \d\d:\d\d|^=+$|^=\s|YOUR APPLICATION TERMINATED|^-+$"
    r"|BAD TERMINATION|This typically refers to a problem|Please see the FAQ|^\W*$|c10d|ProcessGroup|TCPStore"
)


@dataclass(frozen=True)
class FirstError:
    """What went wrong first. `rank` is None where nothing in the output tells."""

    says: str  # one line
    rank: int | None = None
    detail: str = ""  # the traceback or the last lines

    def __str__(self):
        return self.says if self.rank is None else f"rank {self.rank}: {self.says}"


def split_label(line):
    """(rank or None, the line without the labels of launcher, torch and `say`)."""
    rank = None
    while found := LABEL.match(line):
        rank = int(found.group(1))
        line = line[found.end() :]
    return rank, line


def tracebacks(text):
    """[(rank or None, list of lines)] in the order in which they end; a rank's own lines only."""
    done, open_ = [], {}
    for line in ANSI.sub("", text).splitlines():
        rank, rest = split_label(line)
        if rest.strip() == TRACEBACK:
            open_[rank] = [rest]
        elif rank in open_:
            open_[rank].append(rest)
            if rest and not rest.startswith((" ", "Traceback")) and rest.strip():
                done.append((rank, open_.pop(rank)))
    return done + list(open_.items())


def first_error_in_log(text, status=None):
    """The first error in the output of one or many ranks that ended with `status`."""
    found = tracebacks(text)
    causes = [item for item in found if not CONSEQUENCE.search(item[1][-1])]
    if causes or found:
        rank, lines = (causes or found)[0]
        place = _place(lines)
        return FirstError(lines[-1] + (f" ({place})" if place else ""), rank, "\n".join(lines))
    lines = [split_label(line) for line in ANSI.sub("", text).splitlines()]
    lines = [(rank, line) for rank, line in lines if line.strip() and not LAUNCHER.search(line)]
    ended = f"ended with status {status}" if status is not None else "ended"
    if not lines:
        return FirstError(f"{ended} and printed nothing")
    rank, line = lines[-1]
    return FirstError(line.strip(), rank, "\n".join(line for _, line in lines[-15:]))


def where_ranks_were(text):
    """One sentence from the stacks that a fault handler printed: "rank 0 in all_reduce (line 8), rank 1 ..."."""
    stacks, current = {}, {}
    for line in ANSI.sub("", text).splitlines():
        rank, rest = split_label(line)
        if rest.startswith(("Current thread", "Thread 0x")):
            current[rank] = []  # the main thread is printed last
            stacks[rank] = current[rank]
        elif rank in current and (frame := re.match(r'\s+File "(.+)", line (\d+) in (\S+)', rest)):
            current[rank].append(frame.groups())
    parts = []
    for rank, frames in sorted(stacks.items(), key=lambda item: (item[0] is None, item[0] or 0)):
        lesson = [i for i, (file, _, _) in enumerate(frames) if re.search(r"scripts/\d\d_\w+\.py$", file)]
        if lesson:
            called = [name for _, _, name in frames[: lesson[0]] if name != "wrapper"]  # torch wraps each collective
            call = called[-1] if called else frames[lesson[0]][2].replace("<module>", "")
            who = "it" if rank is None else f"rank {rank}"
            parts.append(f"{who} in {call + ', ' if call else ''}line {frames[lesson[0]][1]}")
    return "; ".join(parts)


def first_error_in_notebook(path):
    """The first error output of an executed notebook, or None if there is none."""
    for number, cell in _cells(path):
        for output in cell.get("outputs", []):
            if output.get("output_type") == "error":
                detail = ANSI.sub("", "\n".join(output.get("traceback", [])))
                says = (output.get("evalue", "").strip() or output.get("ename", "error")).splitlines()[0]
                of_rank = re.match(r"rank (\d+): (.*)", says)  # as %%ranks says it
                rank, says = of_rank.groups() if of_rank else (None, f"{output.get('ename')}: {says}")
                return FirstError(f"{says} (cell {number})", int(rank) if rank else None, detail)
    return None


def running_cell(path):
    """ "in cell 3": the cell that papermill was about when it was ended, or ""."""
    for number, cell in _cells(path):
        if cell.get("metadata", {}).get("papermill", {}).get("status") == "running":
            return f"in cell {number}"
    return ""


def _cells(path):
    """The cells of an executed notebook with their numbers in the notebook as written: papermill adds cells."""
    try:
        cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError):
        return []
    added = {"injected-parameters", "papermill-error-cell-tag"}
    own = [cell for cell in cells if not added & set(cell.get("metadata", {}).get("tags", []))]
    return list(enumerate(own, 1))


def _place(lines):
    """ "03_data_parallel.py, line 12": the innermost frame in a lesson."""
    frames = [re.match(r'\s+File "(?:.*/)?(\d\d_\w+\.py)", line (\d+)', line) for line in lines]
    frames = [frame for frame in frames if frame]
    return f"{frames[-1].group(1)}, line {frames[-1].group(2)}" if frames else ""
