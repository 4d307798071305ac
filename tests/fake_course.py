"""A small course of lessons that go well or wrong on purpose, for the tests of those who run lessons.

The lessons use no torch: a rank is who its launcher says it is, and rank 0 writes metrics.json by hand.
"""

import json
import re

import nbformat
from manyhands.course import pairs
from manyhands.course.lessons import find_lessons

HEADER = """\
# ---
# jupyter:
#   jupytext:
#     formats: notebooks///ipynb,scripts///py:percent
# ---

"""

LESSON = """\
import json, os, pathlib, subprocess, sys, time

# %% tags=["parameters"]
n_ranks = 2   # processes
length = 4    # numbers per rank, >= 1
# %%
def who():
    for rank, size in (("RANK", "WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")):
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, n_ranks


rank, world_size = who()
launcher = "torchrun" if "RANK" in os.environ else "mpich" if "PMI_RANK" in os.environ else "notebook"


def write_metrics(exact, close, corpus="shakespeare", measured=None):
    folder = pathlib.Path(os.environ["MANYHANDS_OUTPUTS"], NAME, f"{launcher}-{os.getpid()}")
    if rank == 0:
        folder.mkdir(parents=True)
        device = os.environ.get("MANYHANDS_DEVICE") or "cpu"
        versions = dict.fromkeys(("torch", "cuda", "nccl", "python"), "1.0")
        conditions = {"hardware": f"{world_size} x made up", "versions": versions, "commit": None,
                      "date": "2026-11-23", "command": "none"}
        content = {"lesson": NAME, "launcher": launcher, "world_size": world_size, "device": device,
                   "backend": "none", "conditions": conditions if device != "cpu" else {},
                   "corpus": {"name": corpus}, "parameters": {},
                   "exact": {"answer": exact}, "close": {"loss": {"value": close, "tolerance": 1e-3}},
                   "measured": measured or {}}
        (folder / "metrics.json").write_text(json.dumps(content))


print(f"[rank {rank}] hello", flush=True)
"""

GOOD = "write_metrics(42, 4.174)\ntime.sleep(2)  # long enough to be seen in a sample\n"

RAISES = """\
def ring(n):
    raise ValueError(f"rank {n} has 3 numbers, the others 4")


if rank == 0 and launcher != "notebook":
    time.sleep(1)
    raise RuntimeError("Connection closed by peer [127.0.0.1]:4242")
ring(1)
"""

HANGS = """\
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)


def wait_for_a_message():
    here = pathlib.Path(os.environ["MANYHANDS_OUTPUTS"])
    here.mkdir(parents=True, exist_ok=True)
    (here / f"hangs-{rank}").touch()
    while True:
        time.sleep(0.1)


wait_for_a_message()
"""

DIFFERS = GOOD.replace("42", "42 + (launcher == 'mpich')")


HANGS_AS_A_NOTEBOOK = """\
while launcher == "notebook":
    time.sleep(0.1)
write_metrics(42, 4.174)
"""

SLOW = "time.sleep(12 * (launcher == 'notebook'))\nwrite_metrics(42, 4.174)\n"

# what a full disk, a crash, a merge and an old Jupyter leave of a notebook; {} is a whole one
BROKEN = {
    "0 bytes": "", "half": '{"cells": [', "conflict": "<<<<<<< HEAD\n{}\n=======\n{}\n>>>>>>> theirs\n",
    "no JSON": "hello", "a list": "[]",
    "no cells": '{"metadata": {}, "nbformat": 4, "nbformat_minor": 5, "cells": null}',
    "a cell without keys": '{"metadata": {}, "nbformat": 4, "nbformat_minor": 5, "cells": [{}]}',
    "nbformat 3": '{"metadata": {}, "nbformat": 3, "nbformat_minor": 0, "worksheets": [{"cells": [], "metadata": {}}]}',
    "no UTF-8": "\udcff",
}  # fmt: skip


def break_notebook(lesson, how):
    """Write one of BROKEN over the lesson's notebook; returns its text, where surrogates are bytes."""
    text = BROKEN[how].replace("{}", lesson.notebook.read_text()) if how == "conflict" else BROKEN[how]
    lesson.notebook.write_text(text, errors="surrogateescape")
    return text


# real ranks, which meet wherever they are; `hosts` says where that was
NODES = """\
# %% tags=["parameters"]
n_ranks = None  # processes: all slots of the allocation
# %% tags=["active-ipynb"]
# from manyhands.notebook.start import start_ranks
# hands = start_ranks("05_nodes", globals())
# %%
# %%ranks
import os, torch.distributed as dist
from manyhands import Metrics, join, leave
ranks = join(globals(), device="cpu", quiet=True)
hosts = [None] * ranks.world_size
dist.all_gather_object(hosts, ranks.host)
metrics = Metrics(ranks)
metrics.exact(hosts=sorted(hosts))
metrics.content["device"] = os.environ.get("MANYHANDS_DEVICE") or "cpu"
path = metrics.write()
leave()
# %% tags=["active-ipynb"]
# hands.stop()
"""

# before main() of scripts/preflight.py: it believes that each node has two GPUs
GPUS = """\
import torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
torch.cuda.get_device_name = lambda *_: "made up"


"""


def write_lesson(root, name, body):
    """The pair scripts/<name>.py and notebooks/<name>.ipynb of a lesson that ends with `body`."""
    source = LESSON.replace("NAME", repr(name)) + body
    for folder in ("scripts", "notebooks"):
        (root / folder).mkdir(exist_ok=True)
    (root / "scripts" / f"{name}.py").write_text(HEADER + source)
    head, rest = source.split('# %% tags=["parameters"]\n')
    parameters, rest = rest.split("# %%\n")
    cells = [nbformat.v4.new_code_cell(text) for text in (head, parameters, rest)]
    cells[1].metadata.tags = ["parameters"]
    metadata = {"kernelspec": {"name": "manyhands", "display_name": "Many Hands", "language": "python"}}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    (root / "notebooks" / f"{name}.ipynb").write_text(json.dumps(notebook))


def write_course(root):
    """Lessons: one raises on rank 1, one hangs, and one's metrics differ under mpiexec."""
    bodies = {"02_raises": RAISES, "03_hangs": HANGS, "04_differs": DIFFERS}
    for name, body in bodies.items():
        write_lesson(root, name, body)


def take_the_place_of_the_lessons(course):
    """A copy of the course without lessons, on nodes with GPUs that are none: `jobs/preflight.*` runs made-up lessons.

    One is well, one raises on rank 1, one hangs as a notebook, one is slow as a notebook, one says on which nodes its
    ranks are.
    """
    bodies = {"01_good": GOOD, "02_raises": RAISES, "03_hangs": HANGS_AS_A_NOTEBOOK, "04_slow": SLOW}
    for name, body in bodies.items():
        write_lesson(course, name, body)
    nodes = course / "scripts" / "05_nodes.py"
    nodes.write_text(HEADER + NODES)
    (lesson,) = find_lessons(course, only=["05"])
    pairs.sync(lesson)
    (course / "scripts" / "prepare_data.py").write_text("print('the corpus is made up, too')\n")
    program = course / "scripts" / "preflight.py"
    program.write_text(program.read_text().replace("def main():", GPUS + "def main():", 1))
    return course


def remember_an_event(output, commands):
    """From here on this preflight compares with one at which each of `commands` took a second, with an older torch."""
    flight = json.loads((output / "flight.json").read_text())
    packages = re.sub(r"torch [^,]*", "torch 1.0.0", flight["metadata"]["packages"])
    went = {"error": "", "seconds": 1.0, "peak_bytes": 1, "notebook": True}
    flight["metadata"] |= {"packages": packages, "when": "last spring"}
    flight["runs"] = {command: {"name": command, **went} for command in commands}
    (output / "last.json").write_text(json.dumps(flight | {"finished": True}))


def assert_named(output, notebook, scripts):
    """That the reports in `output` name the broken lesson, the hanging and the slow one, and no other."""
    runs = json.loads((output / "flight.json").read_text())["runs"]
    failed = {run["name"]: run["error"] for run in runs.values() if run["error"]}
    broken = [f"02_raises {title}" for title in (notebook, *scripts)]
    assert sorted(failed) == sorted([*broken, f"03_hangs {notebook}"])
    assert all("rank 1 has 3 numbers" in failed[name] for name in broken)
    assert "did not end within" in failed[f"03_hangs {notebook}"]
    report, junit = (output / name for name in ("report.html", "junit.xml"))
    for said in (f"slower: 04_slow {notebook}", f"newly failing: 02_raises {notebook}", "torch 1.0.0 then"):
        assert said in report.read_text()
    assert 'failures="4"' in junit.read_text()
