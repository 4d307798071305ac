"""Make the three hangs that lesson 11 shows, on four real ranks: assets/recorded/11_hangs.json.

    python tests/record_hangs.py        # 15 s

Each rank's own flight recorder says what it called. On gloo it does not know the members of a group: those are ours.
"""

import json
import platform
import re
import subprocess
from contextlib import suppress
from datetime import date, timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from definitions import taken_from
from rank_pool import run_on_ranks

ROOT = Path(__file__).resolve().parents[1]
N_RANKS, WAIT_S = 4, 2.0
WORLD = {"world": [0, 1, 2, 3]}
ROWS = {**WORLD, "row 0": [0, 1], "row 1": [2, 3]}


def leaves_the_loop(rank, groups):
    """Rank 2 has no sixth batch."""
    for _ in range(5 if rank == 2 else 8):
        dist.all_reduce(torch.ones(1000), group=groups["world"])


def takes_another_branch(rank, groups):
    """Rank 1 believes that it is time to evaluate."""
    for step in range(8):
        if step == 4 and rank == 1:
            dist.broadcast(torch.ones(1000), src=0, group=groups["world"])
        else:
            dist.all_reduce(torch.ones(1000), group=groups["world"])


def misses_its_row(rank, groups):
    """Rank 3 skips what its row does in step 4; the recorder keeps only the last five calls."""
    row = groups["row 0"] if rank < 2 else groups["row 1"]
    for step in range(8):
        if not (step == 4 and rank == 3):
            dist.all_reduce(torch.ones(50), group=row)
        elif step == 4:
            raise RuntimeError("it does something else")
        dist.all_reduce(torch.ones(1000), group=groups["world"])


HANGS = [
    (leaves_the_loop, WORLD, 2000, [2, "world", 6]),
    (takes_another_branch, WORLD, 2000, [1, "world", 5]),
    (misses_its_row, ROWS, 5, [3, "row 1", 5]),
]


def hang(ranks, action, members):
    patience = timedelta(seconds=WAIT_S)
    groups = {
        name: dist.new_group(who, backend="gloo", timeout=patience, group_desc=name) for name, who in members.items()
    }
    with suppress(RuntimeError):  # the time-out of those that wait
        action(ranks.rank, groups)
    lesson = taken_from("11_when_it_breaks", "flight_record")
    return [list(call) for call in lesson.flight_record(list(members))]


def main():
    recorded = []
    for action, members, size, culprit in HANGS:
        environ = {"TORCH_FR_BUFFER_SIZE": str(size)}
        calls = run_on_ranks(N_RANKS, hang, action, members, environ=environ)
        recorded.append({"members": members, "calls": calls, "culprit": culprit})
    cpu = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    conditions = {
        "date": date.today().isoformat(), "hardware": f"{N_RANKS} ranks on {len(cpu)} cores of {cpu[0].strip()}",
        "python": platform.python_version(), "torch": torch.__version__, "commit": commit.stdout.strip(),
        "command": "python tests/record_hangs.py",
    }  # fmt: skip
    target = ROOT / "assets" / "recorded" / "11_hangs.json"
    hangs = ",\n".join(f"  {json.dumps(one)}" for one in recorded)
    target.write_text(f'{{\n "conditions": {json.dumps(conditions)},\n "hangs": [\n{hangs}\n ]\n}}\n')
    print(f"{target}: {[len(calls) for one in recorded for calls in one['calls']]} calls")


if __name__ == "__main__":
    main()
