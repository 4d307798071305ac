"""Who stopped, and who only waits? Rules over what the ranks last said; nothing here communicates (see `stalls`)."""

import linecache
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

TORCH = str(Path(torch.__file__).parent) + os.sep
# inside these files of torch a rank waits for the others, or for a GPU that does
WAITING_FILES = (
    "distributed" + os.sep,
    os.path.join("nn", "parallel", "distributed.py"),
    "autograd" + os.sep,
)
WAITING_LINES = re.compile(
    r"\.(wait|item|tolist|synchronize|cpu)\(|all_reduce|all_gather|reduce_scatter|broadcast|barrier|all_to_all"
    r"|\b(i?send|i?recv|gather|scatter)\b"
)

CURE = "If it is only slow, raise --train.stall-s."


@dataclass
class Heard:
    """What a rank last said about itself, and how long ago. One that never spoke has only its number."""

    rank: int
    host: str = "?"
    pid: int | None = None
    born: float = 0.0  # when its process began: a number is used again
    beats: int = 0  # how often it has spoken
    ats: int = 0  # calls of `StallWatch.at`: how far it has got
    step: int | None = None
    phase: str = "start"
    idle_s: float = 0.0  # since its last call of `at`, when it spoke
    patience_s: float = 0.0  # how long that phase may take
    where: str = ""  # once it is idle for longer: file, line and function
    busy: bool = False  # it does not look as if it waited for another rank
    left: bool = False  # it has left the watch in order
    silent_s: float = 0.0  # since it last said something new

    @property
    def place(self):
        return self.phase if self.step is None else f"step {self.step}, {self.phase}"


def judged(heard, stall_s):
    """(sentence, the silent ranks) if the run has stalled, else (None, []). `heard` are all ranks.

    Silent for `stall_s`: its process is stopped or its node is gone; that alone is no stall while the others go on.
    Otherwise the culprits are those that got least far, once they are idle for longer than they may be; among several,
    those that do not wait for a message.
    """
    present = [one for one in heard if not one.left]
    silent = [one for one in present if one.silent_s > stall_s]
    others = [one for one in present if one.silent_s <= stall_s]
    if silent and all(one.idle_s > min(stall_s, one.patience_s) / 2 for one in others):
        return _sentence(silent, others, len(heard), "gave no sign of life", "silent_s"), silent
    if silent or not present:
        return None, []
    least = min(one.ats for one in present)
    last = [one for one in present if one.ats == least]
    if any(one.idle_s + one.silent_s <= one.patience_s for one in last):
        return None, []
    culprits = [one for one in last if one.busy] or last
    waiting = [one for one in present if one not in culprits]
    return f"{_sentence(culprits, waiting, len(heard), 'has not moved', 'idle_s')} {CURE}", []


def _sentence(culprits, waiting, world_size, what, clock):
    """Each culprit in a sentence of its own; those that wait together."""
    said = []
    for one in culprits[:8]:
        where = f", in {one.where}" if one.where else ""
        stands = "it was last" if clock == "silent_s" else "it stands"
        said.append(
            f"rank {one.rank} of {world_size} ({one.host}, process {one.pid}) {what} for {getattr(one, clock):.0f} s:"
            f" {stands} at {one.place}{where}."
        )
    if len(culprits) > 8:
        said.append(f"So {len(culprits) - 8} more.")
    places = {}
    for one in waiting:
        places.setdefault(one.place, []).append(one.rank)
    for place, ranks in places.items():
        several = len(ranks) > 1
        said.append(f"Rank{'s' * several} {numbers(ranks)} wait{'s' * (not several)} at {place}.")
    return " ".join(said)


def numbers(ranks):
    """[0, 2, 3, 4] as "0, 2-4"."""
    spans = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def place_of(frame):
    """("loader.py line 33, read", whether it looks busy rather than waiting) of a thread's innermost frame."""
    if frame is None:
        return "", False
    innermost, waiting = frame, False
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):  # torch's own lines say nothing to a reader
        inside = frame.f_code.co_filename[len(TORCH) :]
        waiting = waiting or inside.startswith(WAITING_FILES)
        frame = frame.f_back
    frame = frame or innermost
    file, line = frame.f_code.co_filename, frame.f_lineno
    if not waiting and frame is innermost:
        waiting = bool(WAITING_LINES.search(linecache.getline(file, line)))
    return f"{Path(file).name} line {line}, {frame.f_code.co_name}", not waiting
