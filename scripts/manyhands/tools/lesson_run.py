"""One run of a lesson: how it is started, what came of it, and what went wrong first, on which rank.

Who runs lessons starts them here: the preflight, the tests.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from manyhands.course.folders import write_whole
from manyhands.course.lessons import Lesson
from manyhands.course.pairs import LANGUAGE
from manyhands.launch.allocation import Allocation, in_image, loopback_mpi, mpi_launcher, torchrun_here
from manyhands.launch.commands import command_for
from manyhands.launch.launchers import without_launchers
from manyhands.launch.processes import Ended, supervise
from manyhands.launch.settings import environment
from manyhands.notebook.jupyter import AT_START

KERNEL = "manyhands"
NOTEBOOK_RANKS = 4  # what a notebook takes unless told otherwise
TIMEOUT_S = 600  # of a run, usually; a notebook's own limits then grow with the machine's load alone
GPU_TIMEOUT_S = 1200  # there kernels are compiled and NCCL joins nodes; ranks and cells then wait longer, too
JOB_LINES = 10  # of a failed job's output, in the report
CELL_S = 60  # the shortest of these, which MANYHANDS_PATIENCE multiplies


def positive(text: str) -> int:
    """The argparse type of a number of ranks, rounds, steps or seconds."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


@dataclass(frozen=True, eq=False)  # two runs are never the same one
class Run:
    """A lesson run in one `way`, notebook, torchrun, srun or mpiexec, on n_ranks (None: the notebook's own)."""

    lesson: Lesson
    way: str
    n_ranks: int | None
    folder: Path  # of this run alone
    parameters: dict = field(default_factory=dict)
    device: str | None = None

    @property
    def title(self) -> str:
        return self.way + (f" on {self.n_ranks} ranks" if self.n_ranks else "")

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def executed(self) -> Path:
        """The executed notebook."""
        return self.folder / f"{self.lesson.name}.ipynb"

    @property
    def source(self) -> Path:
        return self.lesson.notebook if self.way == "notebook" else self.lesson.script

    @property
    def flags(self) -> list[str]:
        return [f"--{name.replace('_', '-')}={value}" for name, value in self.parameters.items()]

    @property
    def nodes(self) -> int:
        """On how many nodes of a job the ranks run: on one where those of a script do not split evenly, else on all."""
        nodes = Allocation.find().num_nodes
        return nodes if self.way == "notebook" or self.n_ranks % nodes == 0 else 1

    def missing(self) -> str:
        """Why this run cannot even start: a sentence, or ""."""
        if not self.source.exists():
            cure = "`make sync` writes it from its pair"
            if not (self.lesson.notebook.exists() or self.lesson.script.exists()):
                cure = f"`make reset LESSON={self.lesson.number}` brings both forms back"
            return f"{self.source.relative_to(self.lesson.root)} is missing; {cure}"
        if self.way == "mpiexec" and mpi_launcher(1) is None:
            return "no mpiexec here: `pip install mpich`, or load the site's MPI module"
        return ""

    def command(self, timeout_s: int = 60) -> list[str]:
        ranks = self.folder / "ranks"  # each rank's output in files of its own
        script = [str(self.source), *self.flags]
        if self.way == "notebook":
            values = self.parameters | ({"n_ranks": self.n_ranks} if self.n_ranks else {})
            words = ["-m", "papermill", self.source, self.executed, "-k", KERNEL, "--cwd", self.source.parent]
            words += ["--no-progress-bar", "--start-timeout", timeout_s, "-y", json.dumps(values)]
            return list(map(str, [sys.executable, *words]))
        in_step = "SLURM_STEP_ID" in environment()  # mpiexec dies in there
        if self.way == "srun" or (self.nodes > 1 and not (self.way == "mpiexec" and in_step)):
            return command_for(script, None, self.n_ranks // self.nodes, self.way)
        if self.way == "torchrun":
            launcher = torchrun_here(
                self.n_ranks, "--redirects=3", f"--log-dir={ranks}", python=in_image(environment())
            )
        else:
            launcher = [*mpi_launcher(self.n_ranks, ranks), *in_image(environment())]
        return list(map(str, [*launcher, *script]))

    def again(self) -> str:
        """The command of this run alone, as one would type it, with all that this run was given."""
        if self.way == "notebook":
            asked = ["--lesson", self.lesson.number, "--notebooks"]
            asked += ["--ranks", str(self.n_ranks)] * bool(self.n_ranks) + ["--device", self.device] * bool(self.device)
            short = self.lesson.short and self.lesson.short.items() <= self.parameters.items()
            return shlex.join(["python", "scripts/preflight.py", *asked, *["--short"] * bool(short)])
        n = str(self.n_ranks)
        hidden = "CUDA_VISIBLE_DEVICES= " if self.device == "cpu" else ""  # a script takes what it sees
        if self.nodes > 1 or self.way == "srun":
            words = ["python", "scripts/launch.py", "--starter", self.way, "--nproc", str(self.n_ranks // self.nodes)]
            return hidden + shlex.join([*words, f"scripts/{self.lesson.name}.py", "--", *self.flags])
        launcher = {
            "torchrun": ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", n],
            "mpiexec": ["mpiexec", "-n", n, "python"],
        }[self.way]
        return hidden + shlex.join([*launcher, f"scripts/{self.lesson.name}.py", *self.flags])

    def environ(self, base=None) -> dict[str, str]:
        # it would take an outer launcher's variables for its own
        environ = without_launchers(environment() if base is None else base)
        environ |= {
            "MANYHANDS_OUTPUTS": str(self.folder / "outputs"),
            "MANYHANDS_LIVE": "0",  # papermill keeps what was shown in between, too
            "MPLBACKEND": "agg",
            "PYTHONUNBUFFERED": "1",
            "JUPYTER_PATH": os.pathsep.join(filter(None, [str(self.folder / "jupyter"), environ.get("JUPYTER_PATH")])),
        }
        if self.n_ranks:
            environ.pop("MANYHANDS_RANKS", None)  # what a site sets for notebooks of which nothing is asked
        if self.device:
            environ["MANYHANDS_DEVICE"] = self.device  # join() obeys it, or refuses
        if self.device == "cpu":  # nor does a lesson see a GPU
            environ |= {"CUDA_VISIBLE_DEVICES": "", "ONEAPI_DEVICE_SELECTOR": "*:cpu"}
        if self.way == "mpiexec":
            alone = loopback_mpi() if Allocation.find().num_nodes == 1 else {}
            environ = {**alone, "OMPI_MCA_rmaps_base_oversubscribe": "1", **environ}
        return environ

    def carry_out(self, timeout_s, stop=None) -> "Outcome":
        """Run it to its end, its time-out, or until `stop` is set."""
        if why := self.missing():
            return Outcome(self, Ended(None, 0.0, 0), FirstError(why))
        patience = {"MANYHANDS_PATIENCE": f"{timeout_s / CELL_S:g}"} if timeout_s > TIMEOUT_S else {}
        for _ in range(3):
            shutil.rmtree(self.folder, ignore_errors=True)
            (self.folder / "ranks").mkdir(parents=True)
            if self.way == "notebook":
                write_kernelspec(self.folder / "jupyter" / "kernels" / KERNEL)
            ended = supervise(
                self.command(timeout_s), log=self.log, timeout_s=timeout_s, environ=patience | self.environ(),
                cwd=self.lesson.root, program=str(self.source), stop=stop,
            )  # fmt: skip
            if not (self.way == "notebook" and ended.status and self.lost_port()):
                break
        texts = rank_output(self.folder / "ranks", self.log)
        metrics = find_metrics(self.folder / "outputs", self.lesson.name)
        outcome = Outcome(self, ended, self.first_error(ended, timeout_s, metrics, texts), metrics)
        if not outcome.error:
            outcome.keep()
        return outcome

    def lost_port(self) -> bool:
        """Return whether another process took a port of the kernel, which Jupyter had chosen, before it came up."""
        said = self.log.read_text(errors="replace")
        return "Kernel died before replying" in said and "Address already in use" in said

    @property
    def kept(self) -> Path:
        """Return where an outcome that went well is noted, for a preflight that goes on with this one."""
        return self.folder / "outcome.json"

    def identity(self) -> list[str]:
        """Return the identity that an earlier outcome must share to count for this run."""
        return [self.again(), hashlib.sha256(self.source.read_bytes()).hexdigest()]

    def earlier(self) -> "Outcome | None":
        """Return this run's earlier Outcome if it succeeded with the same file, parameters and device; or None."""
        kept = json.loads(self.kept.read_text()) if self.kept.exists() and not self.missing() else {"of": None}
        return Outcome(self, Ended(**kept["ended"]), None, kept["metrics"]) if kept["of"] == self.identity() else None

    def forget(self) -> None:
        """From now on there is no earlier outcome: a preflight that begins anew counts only what it makes itself."""
        self.kept.unlink(missing_ok=True)

    def first_error(self, ended, timeout_s, metrics, texts) -> "FirstError | None":
        """Return this run's first error, or None if there is none; `texts`: see `rank_output`."""
        if ended.error:
            return FirstError(ended.error)
        in_notebook = first_error_in_notebook(self.executed)
        if ended.timed_out:
            where = running_cell(self.executed) if self.way == "notebook" else where_ranks_were(texts)
            says = f"did not end within {timeout_s:g} s and was stopped" + (f": {where}" if where else "")
            return FirstError(says, None, in_notebook.detail if in_notebook else "\n".join(texts.values())[-4000:])
        if in_notebook or ended.status != 0:
            first = in_notebook or first_error_in(texts, ended.status)
            return replace(first, detail="\n\n".join([first.detail, *failed_jobs(self.folder / "outputs")]))
        if ended.left_behind:
            return FirstError("left processes behind, killed now: " + "; ".join(ended.left_behind))
        if metrics is None:
            return FirstError("wrote no metrics.json, so there is nothing to compare")
        if self.device not in (None, metrics.get("device")):
            return FirstError(f"ran on {metrics.get('device')} although {self.device} was asked for: too few of them?")
        return None


@dataclass(frozen=True)
class FirstError:
    """The first error of a run. `rank` is None if the output does not name one."""

    says: str  # one line
    rank: int | None = None
    detail: str = ""  # the traceback or the last lines

    def __str__(self):
        return self.says if self.rank is None else f"rank {self.rank}: {self.says}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run. `metrics` is the content of its metrics.json, if it wrote one."""

    run: Run
    ended: Ended
    error: FirstError | None
    metrics: dict | None = None

    def keep(self) -> None:
        """Note it in the run's folder, where `Run.earlier` finds it."""
        kept = {"of": self.run.identity(), "ended": asdict(self.ended), "metrics": self.metrics}
        write_whole(self.run.kept, json.dumps(kept))

    @property
    def state(self) -> str:
        """ "ok", "slow" or "failed"."""
        return "failed" if self.error else "slow" if self.slow else "ok"

    @property
    def words(self) -> str:
        """ "ok, 6.1 s, 0.8 GiB" or "FAILED after 3.0 s: rank 1: ValueError: ..."."""
        if self.error:
            return f"FAILED after {self.ended.seconds:.1f} s: {self.error}"
        slow = f" (slow: {self.slow})" if self.slow else ""
        return f"ok, {self.ended.seconds:.1f} s, {self.ended.peak_bytes / 2**30:.1f} GiB{slow}"

    @property
    def files(self) -> list[tuple[str, Path]]:
        """[(name, path)] of what it left for people."""
        files = {"notebook": self.run.executed, "page": self.run.executed.with_suffix(".html"), "log": self.run.log}
        return [(name, path) for name, path in files.items() if path.exists()]

    @property
    def slow(self) -> str:
        """Slower or larger than a lesson should be: a sentence, or "". On GPUs there are no aims."""
        if self.run.way != "notebook" or self.error or (self.metrics or {}).get("device", "cpu") != "cpu":
            return ""
        return self.run.lesson.beyond_aims(self.ended.seconds, self.ended.peak_bytes)


# ------------------------------------------------------------------ the files of a run


def write_kernelspec(folder):
    """The kernel `manyhands`, run by this Python, in a place of the run's own: no `make kernel` is needed."""
    folder.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", *AT_START]
    spec = {"argv": argv, "display_name": "Many Hands", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))


def write_page(notebook, page):
    """The notebook as HTML; a notebook that cannot be shown is no reason to lose its result."""
    import nbformat
    from nbconvert import HTMLExporter

    with suppress(Exception):
        executed = nbformat.read(notebook, 4)
        executed.metadata["language_info"] = LANGUAGE  # the kernel wrote IPython's, which does not colour our cells
        body, _ = HTMLExporter(embed_images=True).from_notebook_node(executed)
        page.write_text(body, encoding="utf-8")


def find_metrics(outputs, lesson="*") -> dict | None:
    """The metrics.json that a run of `lesson` left below `outputs`, as a dict, or None.

    `latest` is a link to its folder. Lesson 04 needs the name: its notebook starts a job, which leaves lesson 03's too.
    """
    for path in sorted(outputs.glob(f"{lesson}/*/metrics.json")):
        if not path.parent.is_symlink():
            return {**json.loads(path.read_text()), "path": str(path)}
    return None


def rank_output(folder, log) -> dict[int | None, str]:
    """{rank: what it wrote, errors last}, the rank that was silent first, first; last, under None, the launcher's own.

    The log then holds all of it, with "[1] " before each line. torchrun leaves
    `<folder>/<id>/attempt_0/<rank>/stdout.log`, mpiexec by our template `<folder>/<rank>.stdout.log`.
    """
    files = {}
    for path in sorted([*folder.glob("*/attempt_*/*/std*.log"), *folder.glob("*.std*.log")], reverse=True):
        rank = path.name.split(".")[0] if path.parent == folder else path.parent.name
        files.setdefault(int(rank), []).append(path)  # stdout first: the error is at the end
    in_order = sorted(files, key=lambda rank: (max(path.stat().st_mtime for path in files[rank]), rank))
    written = {rank: "\n".join(path.read_text("utf-8", "replace") for path in files[rank]) for rank in in_order}
    written[None] = log.read_text("utf-8", "replace")
    for rank, line in OF_RANK.findall(written[None]):
        written[int(rank)] = written.get(int(rank), "") + line
    with open(log, "a", encoding="utf-8") as whole:
        whole.writelines(f"[{rank}] {line}\n" for rank in in_order for line in written[rank].splitlines())
    written[None] = written.pop(None)  # the launcher's comes last: it only reports what a rank did
    return {rank: LABELS.sub("", text) for rank, text in written.items()}


# ------------------------------------------------------------------ the first error
# When one rank raises, its neighbours lose their connection and raise too. The error to read is the first other one.

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
LABELS = re.compile(rf"{ANSI.pattern}|^(?:\[rank *\d+\]:? ?)+", re.MULTILINE)  # colours; what torch and `say` put first
# a rank's line in the launcher's own log: as Open MPI labels all, and torch those of an exception
OF_RANK = re.compile(r"^\[(?:\d+,|rank)(\d+)\](?:<std(?:out|err)>)?: ?(.*\n)", re.MULTILINE)
TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n(?:(?: .*)?\n)*.*", re.MULTILINE)
LESSON_FRAME = re.compile(r'^\s+File "(?:.*/)?(\d\d_\w+\.py)", (line \d+)', re.MULTILINE)
CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote (process )?.*(exited|closed)|ChildFailedError"
    r"|SignalException|Gloo connectFullMesh failed|KeyboardInterrupt|BAD TERMINATION|recvValue failed|peer",
    re.IGNORECASE,
)
TORCH_LOG = re.compile(r"\[?[EWI]\d{4} \d\d:")  # torch's own log, which follows an error: never the error itself


def first_error_in(texts, status) -> FirstError:
    """The first error in the output of ranks ({rank: text}, see `rank_output`) that ended with `status`."""
    found = [(rank, trace.rstrip()) for rank, text in texts.items() for trace in TRACEBACK.findall(text)]
    if found:
        rank, trace = next((one for one in found if not CONSEQUENCE.search(one[1].splitlines()[-1])), found[0])
        frames = LESSON_FRAME.findall(trace)
        place = f" ({', '.join(frames[-1])})" if frames else ""  # the innermost frame in a lesson
        return FirstError(trace.splitlines()[-1] + place, rank, trace)
    for rank, text in texts.items():
        if lines := [line for line in text.splitlines() if re.search(r"\w", line) and not TORCH_LOG.match(line)]:
            return FirstError(lines[-1].strip(), rank, "\n".join(lines[-15:]))
    return FirstError(f"ended with status {status} and printed nothing")


def where_ranks_were(texts) -> str:
    """From the stacks that a fault handler printed: "rank 0 in 02_collectives.py, line 8; rank 1 in ..."."""
    found = []
    for rank in sorted(texts.keys() - {None}):
        *others, main_thread = re.split(r"^(?:Current thread|Thread 0x)", texts[rank], flags=re.MULTILINE)
        if others and (frame := LESSON_FRAME.search(main_thread)):  # the most recent call is printed first
            found.append(f"rank {rank} in {', '.join(frame.groups())}")
    return "; ".join(found)


def first_error_in_notebook(path) -> FirstError | None:
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


def failed_jobs(outputs):
    """Yield the end of what each job printed that a run has started and that has failed."""
    for status in sorted(outputs.glob("jobs/*.status")):
        name, number = status.stem.rsplit(".", 1)
        printed = status.with_name(f"{name}.o{number}")
        if status.read_text().strip() not in ("", "0") and printed.is_file():
            lines = printed.read_text("utf-8", errors="replace").splitlines()[-JOB_LINES:]
            yield "\n".join([f"job {number} ({name}) failed; its last lines:", *lines])


def running_cell(path) -> str:
    """ "in cell 3": the cell that papermill was about when it was ended, or ""."""
    status = {number: cell.get("metadata", {}).get("papermill", {}).get("status") for number, cell in _cells(path)}
    return next((f"in cell {number}" for number, said in status.items() if said == "running"), "")


def _cells(path):
    """The cells of an executed notebook with their numbers in the notebook as written: papermill adds cells."""
    try:
        cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, LookupError, TypeError):  # there is none, or half of one
        return []
    added = {"injected-parameters", "papermill-error-cell-tag"}
    own = [cell for cell in cells if not added & set(cell.get("metadata", {}).get("tags", []))]
    return list(enumerate(own, 1))
