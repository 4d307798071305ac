"""Make the recordings of jobs for lessons 04 and 15, on two Slurm nodes of this machine: assets/recorded.

    python tests/record_first_job.py pending        # 15 s: why jobs wait
    python tests/record_first_job.py queue          # 13 min: when four jobs start, in three queues
    python tests/record_first_job.py run            # 2 min: lesson 03's job
    python tests/record_first_job.py failed         # 1 min: the same with a mistake on one rank, a file per node
    python tests/record_first_job.py imports        # 10 s, needs strace: what `import torch` asks the file system
    python tests/record_first_job.py doctor         # 1 min: jobs/doctor.slurm, and again with one core per node

Needs root and Debian's slurm-wlm and munge (see slurm_nodes). Everything is what the real programs printed; only the
folder of the course is written as ~/many-hands.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import torch
from course_copy import copy_course
from manyhands.course import pairs
from manyhands.course.lessons import find_lessons
from slurm_nodes import SlurmNodes

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "assets" / "recorded"
MINUTE_S = 60
JOBS = {"A": (1, 6), "B": (2, 3), "C": (1, 2), "D": (1, 3)}  # nodes, minutes
QUICK = "batch_sched_delay=0,sched_interval=2,bf_interval=2"


def conditions(slurm):
    """On what and with what a recording was made."""
    cpus = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "date": date.today().isoformat(),
        "hardware": f"two Slurm nodes on one machine, on loopback: {len(cpus)} cores of {cpus[0].strip()} in all",
        "slurm": slurm.run("sinfo", "--version").stdout.strip(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "command": f"python tests/record_first_job.py {sys.argv[1]}",
    }


def save(name, content):
    RECORDED.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
    (RECORDED / name).write_text(text)
    print(f"{RECORDED / name}: {len(text)} characters")


def sleeper(slurm, name, seconds, *options):
    return slurm.submit("sbatch", "--output=/dev/null", f"--job-name={name}", *options, f"--wrap=sleep {seconds}")


def pending():
    """`squeue` of a cluster on which each job waits for a reason of its own."""
    settings = {"EnforcePartLimits": "NO", "FirstJobId": "4700", "SchedulerParameters": QUICK}
    with SlurmNodes(settings=settings) as slurm:
        failed = slurm.submit("sbatch", "--output=/dev/null", "--job-name=prepare", "--time=1", "--wrap=exit 1")
        slurm.wait(failed)
        running = sleeper(slurm, "big", 60, "--nodes=2", "--time=30")
        while slurm.state(running) != "RUNNING":
            time.sleep(0.2)
        for name, *options in (
            ("ada_ddp", "--nodes=2"), ("bob_ddp", "--nodes=1"),
            ("average", "--nodes=1", f"--dependency=afterok:{running}"),
            ("plots", "--nodes=1", f"--dependency=afterok:{failed}"), ("sweep", "--nodes=1", "--hold"),
            ("tonight", "--nodes=1", "--begin=now+8hours"), ("all_day", "--nodes=1", "--time=1-00:00:00"),
            ("many", "--nodes=3"),
        ):  # fmt: skip
            sleeper(slurm, name, 1, "--time=10", *options)
        time.sleep(8)
        shown = slurm.run("squeue", "--sort=i", "--format=%.5i %.9j %.2t %.5D %.10l %R").stdout
        save("04_pending.out", shown)


def start_minutes(settings, limits):
    """When each of JOBS started on two real nodes, in minutes since the first; `limits` are their time limits."""
    with SlurmNodes(settings={"SchedulerParameters": QUICK, **settings}) as slurm:
        numbers = {
            name: sleeper(
                slurm, name, minutes * MINUTE_S, f"--nodes={nodes}", f"--time={limits.get(name, minutes + 1)}"
            )
            for name, (nodes, minutes) in JOBS.items()
        }
        starts = {}
        while len(starts) < len(JOBS):
            for name, number in numbers.items():
                if name not in starts and slurm.state(number) != "PENDING":
                    starts[name] = time.monotonic() / MINUTE_S
            time.sleep(0.5)
        slurm.run("scancel", "--user=root")
        return {name: round(start - starts["A"], 3) for name, start in starts.items()}


def queue():
    """Start times of four jobs without overtaking, with it, and with it when D asks for an hour."""
    ways = {
        "in order": ({"SchedulerType": "sched/builtin"}, {}),
        "overtaking": ({"SchedulerType": "sched/backfill"}, {}),
        "overtaking, D asks for 60 minutes": ({"SchedulerType": "sched/backfill"}, {"D": 60}),
    }
    with SlurmNodes() as slurm:
        content = {
            "conditions": conditions(slurm),
            "jobs": {n: {"nodes": k, "minutes": m} for n, (k, m) in JOBS.items()},
        }
    with ThreadPoolExecutor(len(ways)) as pool:
        measured = pool.map(lambda way: start_minutes(*way), ways.values())
        content["start_minutes"] = dict(zip(ways, measured, strict=True))
    save("04_queue.json", content)


@contextmanager
def course(mistake=None):
    """A copy of the course in which a job leaves its files; `mistake` is (line, lines that follow it) in lesson 03."""
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_course(Path(folder) / "many-hands")
        script, notebook = (copy / "scripts" / "03_data_parallel.py", copy / "notebooks" / "03_data_parallel.ipynb")
        if mistake:
            line, lines = mistake
            assert line in script.read_text()
            script.write_text(script.read_text().replace(line, line + lines, 1))
            notebook.unlink()
            pairs.sync(find_lessons(copy, ["03"])[0])
        yield copy


def job_in(folder, slurm, *flags, environ=None, name="ddp_shakespeare"):
    """Submit jobs/<name>.slurm in this copy of the course: (its output as printed, facts of scontrol)."""
    environ = {"VENV": sys.prefix, "MANYHANDS_OUTPUTS": str(folder / "outputs"), **(environ or {})}
    number = slurm.submit("sbatch", f"jobs/{name}.slurm", *flags, cwd=folder, environ=environ)
    print(f"job {number}: {slurm.wait(number, timeout_s=600)}")
    shown = slurm.run("scontrol", "--oneliner", "show", "job", number).stdout
    text = said_from(folder, (folder / f"{name}.o{number}").read_text())
    return text, dict(word.partition("=")[::2] for word in shown.split())


def said_from(folder, text):
    """What a job printed, without the places of this machine."""
    return text.replace(str(folder), "~/many-hands").replace(sys.prefix, "~/many-hands/.venv")


def run():
    """Lesson 03's job on two nodes with two ranks each: what it printed, and its metrics.json."""
    with course() as folder, SlurmNodes(settings={"FirstJobId": "4711"}) as slurm:
        text, facts = job_in(folder, slurm)
        assert facts["JobState"] == "COMPLETED", text
        metrics = json.loads((folder / "outputs/03_data_parallel/latest/metrics.json").read_text())
        save("04_ddp_shakespeare.out", text)
        kept = ("SubmitTime", "StartTime", "EndTime", "NumNodes", "TimeLimit", "ExitCode", "JobId", "JobState")
        content = {"conditions": conditions(slurm), "job": {name: facts[name] for name in kept}, "metrics": metrics}
        save("04_ddp_shakespeare.json", content)


MISTAKE = (
    "for step in range(steps):\n",
    "    if step == 8:  # an edit of ours: show what each rank learns from\n"
    "        x_bT, _ = batch(step)\n"
    '        say(f"step 8, I learn from {shakespeare.corpus.decode(x_bT[rank, :24])!r}")\n',
)


def failed():
    """The same with an index that only the last of four ranks finds too large; with two ranks it works."""
    with course(MISTAKE) as folder, SlurmNodes(settings={"FirstJobId": "4712"}) as slurm:
        laptop = {**os.environ, "VENV": sys.prefix, "NPROC_PER_NODE": "2", "MANYHANDS_OUTPUTS": str(folder / "outputs")}
        flags = ["--steps", "30", "--repeats", "1"]
        subprocess.run(["bash", "jobs/ddp_shakespeare.slurm", *flags], cwd=folder, env=laptop, check=True)  # it works
        environ = {"SRUN_FLAGS": "--output=%x.o%j.%N"}
        text, facts = job_in(folder, slurm, *flags, environ=environ)
        assert facts["JobState"] == "FAILED", text
        save("04_failed.out", text)
        for node in ("node1", "node2"):
            of_node = (folder / f"ddp_shakespeare.o{facts['JobId']}.{node}").read_text()
            save(f"04_failed.{node}.out", said_from(folder, of_node))


def doctor():
    """The doctor's job on two nodes that bind a task to its cores: as it stands, and with a flag of another machine."""
    flag = {"SRUN_FLAGS": "--cpu-bind=map_cpu:0"}
    settings = {"FirstJobId": "4721", "TaskPlugin": "task/affinity"}
    with course() as folder, SlurmNodes(settings=settings) as slurm:
        slurm.environ.pop("UCX_TLS")  # no job of this one runs MPI
        for which, environ in (("", {}), ("_one_core", flag)):
            text, facts = job_in(folder, slurm, name="doctor", environ=environ)
            assert facts["JobState"] == "COMPLETED", text
            save(f"15_doctor{which}.out", text)
        save("15_doctor.json", {"conditions": conditions(slurm), "one_core": flag})


def imports():
    """How often `import torch` asks the file system, counted by strace; sizes and modules by Python itself."""
    command = ["strace", "-c", "-f", "-e", "trace=file", sys.executable, "-c", "import torch"]
    rows = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stderr
    calls = {name: int(n) for n, name in re.findall(r"^ *[\d.]+ +[\d.]+ +\d* +(\d+) .*?(\w+)$", rows, re.M)}
    count = "import sys, torch; print(sum(bool(getattr(m, '__file__', None)) for m in list(sys.modules.values())))"
    modules = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, timeout=60, check=True)
    libraries = sum(file.stat().st_size for file in Path(torch.__file__).parent.glob("lib/*.so*"))
    content = {
        "calls": calls.pop("total"),
        "by_call": calls,
        "modules": int(modules.stdout),
        "library_bytes": libraries,
        "conditions": {
            "date": date.today().isoformat(), "torch": torch.__version__, "python": platform.python_version(),
            "command": "strace -c -f -e trace=file python -c 'import torch'",
        },
    }  # fmt: skip
    save("15_import_torch.json", content)


if __name__ == "__main__":
    jobs = {"pending": pending, "queue": queue, "run": run, "failed": failed, "doctor": doctor, "imports": imports}
    jobs[sys.argv[1]]()
