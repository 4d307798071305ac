"""A small course of lessons that go well or wrong on purpose, for the tests of those who run lessons.

The lessons use no torch: a rank is who its launcher says it is, and rank 0 writes metrics.json by hand.
"""

import json

import nbformat

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
        content = {"lesson": NAME, "launcher": launcher, "world_size": world_size, "device": "cpu",
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

DIFFERS = "write_metrics(42 + (launcher == 'mpich'), 4.174)\n"


def write_lesson(root, name, body):
    """The pair scripts/<name>.py and notebooks/<name>.ipynb of a lesson that ends with `body`."""
    source = LESSON.replace("NAME", repr(name)) + body
    for folder in ("scripts", "notebooks"):
        (root / folder).mkdir(exist_ok=True)
    (root / "scripts" / f"{name}.py").write_text(source)
    head, rest = source.split('# %% tags=["parameters"]\n')
    parameters, rest = rest.split("# %%\n")
    cells = [nbformat.v4.new_code_cell(text) for text in (head, parameters, rest)]
    cells[1].metadata.tags = ["parameters"]
    metadata = {"kernelspec": {"name": "manyhands", "display_name": "Many Hands", "language": "python"}}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    (root / "notebooks" / f"{name}.ipynb").write_text(json.dumps(notebook))


def write_course(root):
    """Lessons: one is well, one raises on rank 1, one hangs, one's metrics differ, and one more is well."""
    bodies = {"01_good": GOOD, "02_raises": RAISES, "03_hangs": HANGS, "04_differs": DIFFERS, "05_after": GOOD}
    for name, body in bodies.items():
        write_lesson(root, name, body)
