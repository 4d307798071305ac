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
import subprocess
import sys
import time
import weakref
from pathlib import Path

from manyhands.course import pairs
from manyhands.course.folders import ROOT, make_private
from manyhands.course.lessons import find_lessons
from manyhands.jobs import directives, stamp
from manyhands.launch.launchers import without_launchers
from manyhands.launch.processes import Supervised
from manyhands.launch.run_folder import outputs_folder

PASSED_ON = (
    "MANYHANDS_OUTPUTS", "MANYHANDS_DATA", "MANYHANDS_SHAKESPEARE", "MANYHANDS_DEVICE", "VENV", "NPROC_PER_NODE",
    "MPIEXEC", "MPIEXEC_FLAGS", "STARTER", "IMAGE", "IMAGE_FLAGS", "ENGINE",
)  # fmt: skip
OVER_TIME = "-29"  # JOB_EXEC_KILL_WALLTIME of PBS
KNOWN_END = ("completed", "failed", "cancelled")
ENDED = (*KNOWN_END, "ended")
SLOWEST_S = 30  # seconds between two queries: a whole class queries the scheduler
FRESH_S = 5  # seconds for which one answer serves all jobs of this kernel
TOO_MANY = re.compile("per-user limit|MaxSubmitJob|job submit limit")  # OpenPBS's words, Slurm's reasons
# what schedulers write into a job's output when they end it
KILLED = re.compile(r"=>> PBS: job killed: (.*)|\*\*\* JOB .* CANCELLED AT .* (DUE TO TIME LIMIT) \*\*\*")
CANCELLED = re.compile(r"\*\*\* JOB \S+ ON \S+ CANCELLED AT \S+ \*\*\*")


class SubmitError(RuntimeError):
    """The scheduler rejected the job; the message has its error and what may help."""


def scheduler():
    """ "slurm", "pbs", or None where neither answers here. (Debian's Slurm has a qsub too: Slurm is asked first.)"""
    if shutil.which("sbatch") and _asked("sinfo", "--noheader")[0]:
        return "slurm"
    return "pbs" if shutil.which("qsub") and _asked("qstat", "-Q")[0] else None


def submit(name, flags="", via=None):
    """Submit jobs/<name>.pbs or .slurm with the lesson's `flags`, and return the Job.

    via: "slurm", "pbs" or "bash"; None takes the scheduler that answers, else bash. The lesson that the job runs is
    synced first, so that it is what you saved in the notebook. Raise SubmitError with what the scheduler said, and
    PairError where it is unclear which of the lesson's two files is the newer one.
    """
    _sync(_course(name), name)
    kind = {"slurm": SlurmJob, "pbs": PbsJob, "bash": LocalJob}[via or scheduler() or "bash"]
    return kind(name, shlex.split(flags))


class Job:
    """A submitted job. `number` is the scheduler's, `output` the file with the job's output."""

    slowest_s = SLOWEST_S
    _jobs: weakref.WeakSet = weakref.WeakSet()  # of this kernel
    _answers: dict[str, str] = {}
    _answered_at = 0.0

    def __init__(self, name, flags):
        self.name, self.submitted_at = name, time.time()
        self.course = _course(name)
        self._last = "unknown", ""  # the last state that the scheduler reported
        self._cancelled = False  # by us
        self._outputs = outputs_folder()
        # the Python environment of this kernel is the job's, too
        self._environ = {"VENV": sys.prefix} | os.environ | {"MANYHANDS_OUTPUTS": str(self._outputs)}
        if not (Path(sys.prefix) / "bin" / "activate").is_file():  # conda: the first python in PATH
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
            self._environ |= {"VENV": os.environ.get("VENV", ""), "PATH": path}
        self.number, self.output = self._start(flags)
        self._jobs.add(self)

    def __repr__(self):
        return f"job {self.number} ({self.name}): {self.state()[0]}"

    def _submitted(self, *command, environ=None, first=None):
        """Return the scheduler's number of this command's job. `first`: variables to show in front of it."""
        _show(command, "".join(f"{name}={shlex.quote(value)} " for name, value in (first or {}).items()))
        how = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        done = subprocess.run(command, cwd=self.course, env=environ, **how)
        said = (done.stdout + done.stderr).strip()
        number = re.search(r"\d+", done.stdout)
        if done.returncode or not number:
            raise SubmitError(
                f"the scheduler did not take the job: {said}\n{self._cure(said)}, then run this cell again"
            )
        print(said)
        return number.group()

    def _cure(self, said):
        if not TOO_MANY.search(said):
            return "If it misses an account or a queue: in a terminal, `make jobs SITE=... ACCOUNT=... QUEUE=...`"
        path = self.course / "jobs" / f"{self.name}{self.suffix}"
        most, queue = stamp.jobs_at_once(path, directives.SCHEDULERS[self.suffix])
        here = f"{queue} takes {most} of your jobs at a time" if most else "this queue limits the number of your jobs"
        return f"{here}, waiting ones too: wait until one has ended (`{self.lister}` lists them), or cancel it"

    def state(self):
        """(state, remark): waiting, running, completed, failed, cancelled, ended (nobody knows how), or unknown.

        The remark: why it waits, where it runs, how it ended. A silent scheduler leaves the last state as it was.
        """
        if self._last[0] in KNOWN_END:
            return self._last
        found = self._look()  # None where the scheduler does not answer
        if found is None:
            return self._last[0], "the scheduler does not answer"
        self._last = found
        return found

    def _answer(self):
        """Return the scheduler's answer for this job. One query serves all jobs of this kernel; each uses it once."""
        kind = type(self)
        if self.number not in kind._answers or time.monotonic() - kind._answered_at > FRESH_S:
            live = {job.number for job in self._jobs if isinstance(job, kind) and job._last[0] not in ENDED}
            kind._answers, kind._answered_at = self._ask(sorted(live | {self.number})), time.monotonic()
        return kind._answers.pop(self.number)

    def _forgotten(self):
        """Return the state of a job that the scheduler has forgotten, from the job's output and files."""
        if killed := KILLED.search("\n".join(self._lines())):
            return "failed", killed[1] if killed[1] and "walltime" not in killed[1] else "over time"
        if self._was_cancelled():
            return "cancelled", ""
        own = self._file("status")  # the job file writes its exit status there
        status = own.read_text().strip() if own.exists() else ""
        if status:
            return ("completed", "") if status == "0" else ("failed", f"exit {status}")
        return "ended", "how, the scheduler has forgotten: read its output, job.tail(20)"

    def _file(self, kind):
        return self._outputs / "jobs" / f"{self.name}.{self.number}.{kind}"

    def _was_cancelled(self):
        """Return whether we, qdel or scancel cancelled it: a cancelled job may have saved and ended with status 0."""
        return self._cancelled or self._file("cancelled").exists() or CANCELLED.search("\n".join(self._lines()))

    def ended(self):
        return self.state()[0] in ENDED

    def cancel(self):
        self._cancelled = self.state()[0] not in KNOWN_END
        _show([self.canceller, self.number])
        _asked(self.canceller, self.number)

    def watch(self, seconds):
        """Print a line per change of state until the job ends or `seconds` are over; the last state.

        It queries after 1, 2, 4 ... 30 s, and starts over after a change.
        """
        shown, deadline, pause_s = None, time.monotonic() + seconds, 1
        while True:
            now = self.state()
            if now != shown:
                print(f"{time.time() - self.submitted_at:4.0f} s  {now[0]}" + (f": {now[1]}" if now[1] else ""))
                shown, pause_s = now, 1
            left_s = deadline - time.monotonic()
            if now[0] in ENDED or left_s <= 0:
                break
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, self.slowest_s)
        if now[0] not in ENDED:
            print(f"not ended within {seconds:g} s: go on with the lesson, and run this cell again later")
        return now[0]

    def tail(self, lines=10):
        """Print the last lines of the job's output, as `tail` does."""
        _show(["tail", "-n", str(lines), os.path.relpath(self.output, self.course)])
        none = "no output yet: the file appears when the job runs, or at its end where PBS cannot write here"
        print("\n".join(self._lines()[-lines:]) or none)

    def grep(self, text):
        """Print the lines of the job's output that contain `text`, as `grep` does."""
        _show(["grep", text, os.path.relpath(self.output, self.course)])
        found = [line for line in self._lines() if text in line]
        print("\n".join(found) or ("your turn: a word in place of ____" if text == "____" else "no such line yet"))

    def _lines(self):
        return self.output.read_text(errors="replace").splitlines() if self.output.exists() else []

    def metrics(self, lesson):
        """The metrics.json that this job wrote for `lesson`, as a dict, or None: it has not, or not yet."""
        files = (outputs_folder() / lesson).glob("*/metrics.json")
        newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
        if newest is None or newest.stat().st_mtime < self.submitted_at:
            return None
        return json.loads(newest.read_text())


class SlurmJob(Job):
    canceller, lister, suffix = "scancel", "squeue --me", ".slurm"

    def _start(self, flags):
        number = self._submitted("sbatch", f"jobs/{self.name}.slurm", *flags, environ=self._environ)
        return number, self.course / f"{self.name}.o{number}"

    def _ask(self, numbers):
        """Return {number: "state|why it waits or where it runs"}, "" for neither."""
        jobs = f"--jobs={','.join(numbers)}"
        said, _ = _asked("squeue", "--me", "--noheader", "--format=%A|%T|%R", jobs)
        return dict.fromkeys(numbers, "") | dict(line.split("|", 1) for line in said.splitlines())

    def _look(self):
        state, _, place = self._answer().partition("|")
        if not state:  # it has ended
            said, complaint = _asked("scontrol", "--oneliner", "show", "job", self.number)
            if not said:  # forgotten after some minutes; accounting, where there is any, remembers
                if "Invalid job id" not in complaint:
                    return None
                found = _asked("sacct", "-nXP", "-j", self.number, "-o", "State,ExitCode")[0].partition("|")
                if not found[0]:
                    return self._forgotten()
                said = f"JobState={found[0].split()[0]} ExitCode={found[2]}"
            fields = dict(word.partition("=")[::2] for word in said.split())
            state, code = fields["JobState"], fields.get("ExitCode")
        if state in ("PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED"):
            return "waiting", place.strip("()").removeprefix("None")  # Slurm has not looked at it yet
        if place or state in ("RUNNING", "COMPLETING"):
            return "running", place
        if state == "COMPLETED":
            return "completed", ""
        if state == "TIMEOUT":
            return "failed", "over time"
        if state.startswith("CANCELLED"):
            return "cancelled", ""
        return "failed", f"{state}, exit {code}"


class PbsJob(Job):
    canceller, lister, suffix = "qdel", "qstat -u $USER", ".pbs"

    def _start(self, flags):
        known = self._environ
        text = (self.course / "jobs" / f"{self.name}.pbs").read_text("utf-8")
        arguments = "LESSON_ARGS" if "LESSON_ARGS" in text else "TRAIN_ARGS"
        values = {name: known[name] for name in PASSED_ON if known.get(name)} | {arguments: " ".join(flags)}
        values = {name: value for name, value in values.items() if value}
        # PBS passes no environment on. A comma would end a value, so that one is named and qsub takes it from its own.
        by_name = {name: value for name, value in values.items() if set(value) & set(",'\"\\")}
        variables = [name if name in by_name else f"{name}={value}" for name, value in values.items()]
        command = ["qsub", "-v", ",".join(variables), f"jobs/{self.name}.pbs"]
        number = self._submitted(*command, environ=os.environ | by_name, first=by_name)
        return number, self.course / f"{self.name}.o{number}"

    def _ask(self, numbers):
        """Return {number: qstat's output for the job, or its error}."""
        said = complaint = ""
        # one that has ended is in the history; where there is none, -x answers nothing, for live jobs too
        for flags in (["-f"], ["-x", "-f"]):
            if left := [number for number in numbers if f"Job Id: {number}." not in said]:
                more, why = _asked("qstat", *flags, *left)
                said, complaint = f"{said}\n{more}", complaint + why
        parts = re.split(r"^Job Id: (\d+)", said.replace("\n\t", ""), flags=re.MULTILINE)  # it wraps at 80 columns
        return dict.fromkeys(numbers, complaint) | dict(zip(parts[1::2], parts[2::2], strict=True))

    def _look(self):
        said = self._answer()
        fields = dict(re.findall(r"^ *(\w+) = (.*)$", said, re.MULTILINE))
        if "job_state" not in fields:
            return self._forgotten() if "Unknown Job Id" in said or "Job has finished" in said else None
        letter, status = fields["job_state"], fields.get("Exit_status")
        if letter in "RBE":
            return "running", fields.get("exec_host", "")
        if letter not in "FX":
            return "waiting", fields.get("comment", "")
        if status == OVER_TIME:
            return "failed", "over time"
        if status in (None, "271", "265") or self._was_cancelled():  # deleted while it waited; 256 + the signal
            return "cancelled", ""
        return ("completed", "") if status == "0" else ("failed", f"exit {status}")


class LocalJob(Job):
    """No scheduler: the same file under bash, at once and on this machine. It ends with the notebook's kernel."""

    slowest_s = 1  # nobody is asked

    def _start(self, flags):
        folder = self._outputs / "jobs"
        make_private(folder)
        environ = without_launchers(self._environ, "SLURM_", "PBS_", "MANYHANDS_MPI")  # no job, no rank of one
        if stamp.stamped_site((self.course / "jobs" / f"{self.name}.pbs").read_text("utf-8")) != "generic":
            environ.setdefault("NPROC_PER_NODE", "2")  # the site's number is for its nodes
        command = ["bash", f"jobs/{self.name}.pbs", *flags]
        _show(command)
        unnamed = folder / f"{self.name}.o{os.getpid()}-{time.monotonic_ns()}"
        with open(unnamed, "wb") as output:
            self._run = Supervised(command, output, environ, self.course, grace_s=15)
        number = str(self._run.process.pid)
        print(f"{number}: no scheduler here, so it starts at once, and its number is that of its process")
        return number, unnamed.rename(folder / f"{self.name}.o{number}")

    def _look(self):
        status = self._run.process.poll()
        if status is None:
            return "running", "this machine"
        if self._cancelled:
            return "cancelled", ""
        return ("completed", "") if status == 0 else ("failed", f"exit {status}")

    def cancel(self):
        _show(["kill", self.number])
        self._cancelled = self._run.process.poll() is None
        self._run.end()


def _course(name):
    """Return the folder to submit from: the course around this notebook, else the one around the package."""
    for folder in (Path.cwd().parent, Path.cwd(), ROOT):
        if (folder / "jobs" / f"{name}.pbs").is_file():
            return folder
    raise SubmitError(f"there is no jobs/{name}.pbs: open the notebook in the course's own notebooks/ folder")


def _sync(course, name):
    """Write what was saved last of the lesson's notebook and script into the other; say so if that changed anything."""
    lessons = set(re.findall(r"scripts/(\d\d_\w+)\.py", (course / "jobs" / f"{name}.pbs").read_text("utf-8")))
    for lesson in find_lessons(course, lessons) if lessons else ():  # a job may run another program
        if pairs.difference(lesson):
            print(pairs.sync(lesson))


def _show(command, first=""):
    print(f"$ {first}" + " ".join(word if " " not in word else f'"{word}"' for word in command), flush=True)


def _asked(*command):
    """Return (stdout, stderr) of a scheduler's command."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    return done.stdout.strip(), done.stderr
