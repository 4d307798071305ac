"""Submit, watch and cancel a job from a notebook cell; each step first shows the command that does it in a terminal.

    job = submit("ddp_shakespeare", "--steps 20")    # qsub, sbatch, or bash where there is no scheduler
    job.watch(60)                                    # a line per change, until it ends or 60 s are over
    job.tail(5)
    job.cancel()

For the notebook's kernel only. A lesson's `%%ranks` cells never submit: each rank would start a job of its own.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from manyhands.course import pairs
from manyhands.course.folders import ROOT
from manyhands.course.lessons import find_lessons
from manyhands.runs.run_folder import outputs_folder

PASSED_ON = ("MANYHANDS_OUTPUTS", "MANYHANDS_DATA", "MANYHANDS_SHAKESPEARE", "VENV", "NPROC_PER_NODE")
NOT_OF_A_JOB = re.compile(
    r"SLURM_|PBS_|PMI|HYDRA|HYDI|MANYHANDS_(NOTEBOOK|LESSON|.*RANK|.*WORLD_SIZE|MPI|NUM_NODES)"
)


class SubmitError(RuntimeError):
    """The scheduler did not take the job; the message is what it said, and what may help."""


def scheduler():
    """ "slurm", "pbs", or None where neither answers here. (Debian's Slurm has a qsub too: Slurm is asked first.)"""
    if shutil.which("sbatch") and _ask("sinfo", "--noheader"):
        return "slurm"
    return "pbs" if shutil.which("qsub") and _ask("qstat", "-Q") else None


def submit(name, flags="", via=None):
    """Submit jobs/<name>.pbs or .slurm with the lesson's `flags`, and return the Job.

    via: "slurm", "pbs" or "bash"; None takes the scheduler that answers, else bash. The lesson that the job runs is
    synced first, so that it is what you saved in the notebook. Raises SubmitError with what the scheduler said, and
    PairError where it is unclear which of the lesson's two files is the newer one.
    """
    _sync(_course(name), name)
    kind = {"slurm": SlurmJob, "pbs": PbsJob, "bash": LocalJob}[via or scheduler() or "bash"]
    return kind(name, shlex.split(flags))


class Job:
    """What the three kinds share. `number` is the scheduler's, `output` the file that holds what the job prints."""

    def __init__(self, name, flags):
        self.name, self.submitted_at = name, time.time()
        self.course = _course(name)
        self.number, self.output = self._start(flags)

    def __repr__(self):
        return f"job {self.number} ({self.name}): {self.state()[0]}"

    def _submitted(self, *command, environ=None):
        """The number that the scheduler gave to the job of this command."""
        _show(command)
        done = subprocess.run(
            command,
            cwd=self.course,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        said = (done.stdout + done.stderr).strip()
        number = re.search(r"\d+", done.stdout)
        if done.returncode or not number:
            raise SubmitError(
                f"the scheduler did not take the job: {said}\nIf it misses an account or a queue: in a terminal, "
                "`make jobs SITE=... ACCOUNT=... QUEUE=...`, then run this cell again"
            )
        print(said)
        return number.group()

    def state(self):
        """(state, remark): waiting, running, completed, failed or cancelled; why it waits, where it runs, how it ended."""
        raise NotImplementedError

    def ended(self):
        return self.state()[0] in ("completed", "failed", "cancelled")

    def watch(self, seconds):
        """Print a line per change of state until the job ends or `seconds` are over; the last state."""
        shown, deadline = None, time.monotonic() + seconds
        while True:
            now = self.state()
            if now != shown:
                print(
                    f"{time.time() - self.submitted_at:4.0f} s  {now[0]}" + (f": {now[1]}" if now[1] else "")
                )
                shown = now
            if self.ended() or time.monotonic() > deadline:
                break
            time.sleep(1)
        if not self.ended():
            print(f"not ended within {seconds:g} s: go on with the lesson, and run this cell again later")
        return now[0]

    def tail(self, lines=10):
        """Print the last lines of the job's output, as `tail` does."""
        _show(["tail", "-n", str(lines), self._shown_output()])
        print("\n".join(self._lines()[-lines:]) or "no output yet: the file appears when the job runs")

    def grep(self, text):
        """Print the lines of the job's output that contain `text`, as `grep` does."""
        _show(["grep", text, self._shown_output()])
        found = [line for line in self._lines() if text in line]
        print("\n".join(found) or "no such line yet")

    def _lines(self):
        return self.output.read_text(errors="replace").splitlines() if self.output.exists() else []

    def _shown_output(self):
        inside = self.output.is_relative_to(self.course)
        return str(self.output.relative_to(self.course)) if inside else self.output.name

    def metrics(self, lesson):
        """The metrics.json that this job wrote for `lesson`, as a dict, or None: it has not, or not yet."""
        files = (outputs_folder() / lesson).glob("*/metrics.json")
        newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
        if newest is None or newest.stat().st_mtime < self.submitted_at:
            return None
        return json.loads(newest.read_text())


class SlurmJob(Job):
    def _start(self, flags):
        number = self._submitted("sbatch", f"jobs/{self.name}.slurm", *flags, environ=_environment())
        return number, self.course / f"{self.name}.o{number}"

    def state(self):
        said = _ask("scontrol", "--oneliner", "show", "job", self.number)
        if not said:  # forgotten after some minutes; accounting, where there is any, remembers
            said = "JobState=" + (_ask("sacct", "-nXP", "-j", self.number, "-o", "State") or "COMPLETED")
        facts = dict(word.partition("=")[::2] for word in said.split())
        state = facts["JobState"]
        if state in ("PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED"):
            return "waiting", facts.get("Reason", "")
        if state in ("RUNNING", "COMPLETING"):
            return "running", facts.get("NodeList", "")
        if state == "COMPLETED":
            return "completed", ""
        return (
            ("cancelled", "")
            if state.startswith("CANCELLED")
            else ("failed", f"{state}, exit {facts.get('ExitCode')}")
        )

    def cancel(self):
        _show(["scancel", self.number])
        _ask("scancel", self.number)


class PbsJob(Job):
    def _start(self, flags):
        known = _environment()
        text = (self.course / "jobs" / f"{self.name}.pbs").read_text("utf-8")
        arguments = "LESSON_ARGS" if "LESSON_ARGS" in text else "TRAIN_ARGS"
        values = {name: known[name] for name in PASSED_ON if known.get(name)} | {arguments: " ".join(flags)}
        variables = ",".join(f"{name}={value}" for name, value in values.items() if value)
        passed = ("-v", variables) if variables else ()  # PBS does not pass the environment on
        number = self._submitted("qsub", *passed, f"jobs/{self.name}.pbs")
        return number, self.course / f"{self.name}.o{number}"

    def state(self):
        said = _ask("qstat", "-x", "-f", self.number) or "job_state = F"
        facts = dict(re.findall(r"^ *(\w+) = (.*)$", said, re.MULTILINE))
        letter, status = facts["job_state"], facts.get("Exit_status", "0")
        if letter in "RBE":
            return "running", facts.get("exec_host", "")
        if letter != "F":
            return "waiting", facts.get("comment", "")
        if status == "0":
            return "completed", ""
        return (
            ("cancelled", "") if status in ("271", "265") else ("failed", f"exit {status}")
        )  # 256 + the signal

    def cancel(self):
        _show(["qdel", self.number])
        _ask("qdel", self.number)


class LocalJob(Job):
    """No scheduler: the same file under bash, at once and on this machine. It ends with the notebook's kernel."""

    def _start(self, flags):
        folder = outputs_folder() / "jobs"
        folder.mkdir(parents=True, exist_ok=True)
        environ = {k: v for k, v in _environment().items() if not NOT_OF_A_JOB.match(k)}
        command = ["bash", f"jobs/{self.name}.pbs", *flags]
        _show(command)
        with_me = (
            ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        )  # when the kernel dies (Linux)
        self._cancelled = False
        unnamed = folder / f"{self.name}.o{os.getpid()}-{time.monotonic_ns()}"
        with open(unnamed, "wb") as output:
            self._process = subprocess.Popen(
                with_me + command, cwd=self.course, env=environ, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, start_new_session=True,
            )  # fmt: skip
        number = str(self._process.pid)
        print(f"{number}: no scheduler here, so it starts at once, and its number is that of its process")
        return number, unnamed.rename(folder / f"{self.name}.o{number}")

    def state(self):
        status = self._process.poll()
        if status is None:
            return "running", "this machine"
        if self._cancelled:
            return "cancelled", ""
        return ("completed", "") if status == 0 else ("failed", f"exit {status}")

    def cancel(self):
        _show(["kill", self.number])
        self._cancelled = self._process.poll() is None
        for how in (signal.SIGTERM, signal.SIGKILL):  # torchrun passes SIGTERM on to its ranks
            if self._process.poll() is None:
                os.killpg(self._process.pid, how)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(15)


def _course(name):
    """The folder to submit from: the course around this notebook, else the one around the package."""
    for folder in (Path.cwd().parent, Path.cwd(), ROOT):
        if (folder / "jobs" / f"{name}.pbs").is_file():
            return folder
    raise SubmitError(f"there is no jobs/{name}.pbs: open the notebook in the course's own notebooks/ folder")


def _sync(course, name):
    """Write what was saved last of the lesson's notebook and script into the other; says so if that changed anything."""
    lessons = set(re.findall(r"scripts/(\d\d_\w+)\.py", (course / "jobs" / f"{name}.pbs").read_text("utf-8")))
    for lesson in find_lessons(course, lessons):
        if pairs.difference(lesson):
            print(pairs.sync(lesson))


def _environment():
    """This kernel's environment, with the Python environment that it runs in as the job's."""
    environ = dict(os.environ)
    if (Path(sys.prefix) / "bin" / "activate").is_file():
        environ.setdefault("VENV", sys.prefix)
    else:  # conda: the job takes the python that is first in PATH
        environ.setdefault("VENV", "")
        environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', '')}"
    return environ


def _show(command):
    print("$ " + " ".join(word if " " not in word else f'"{word}"' for word in command), flush=True)


def _ask(*command):
    """What a command of the scheduler prints, "" if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
