"""One run of a lesson: its command, its environment, its folder, and what came of it."""

import json
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.course.pairs import LANGUAGE
from manyhands.launch.allocation import loopback_mpi, mpi_launcher
from manyhands.launch.launchers import without_launchers
from manyhands.launch.processes import Ended, supervise
from manyhands.launch.settings import environment
from manyhands.tools.first_error import (
    FirstError,
    first_error_in_log,
    first_error_in_notebook,
    running_cell,
    where_ranks_were,
)

KERNEL = "manyhands"
NOTEBOOK_RANKS = 4  # what a notebook takes unless told otherwise


@dataclass(frozen=True, eq=False)  # two runs are never the same one
class Run:
    """A lesson run one way: "notebook" (papermill), "torchrun" or "mpiexec", on n_ranks (None: the notebook's own)."""

    lesson: object
    way: str
    n_ranks: int | None
    folder: Path  # of this run alone
    parameters: dict = field(default_factory=dict)
    device: str | None = None

    @property
    def title(self):
        return self.way + (f" on {self.n_ranks} ranks" if self.n_ranks else "")

    @property
    def log(self):
        return self.folder / "log.txt"

    @property
    def executed(self):
        """The executed notebook."""
        return self.folder / f"{self.lesson.name}.ipynb"

    @property
    def source(self):
        return self.lesson.notebook if self.way == "notebook" else self.lesson.script

    def missing(self):
        """Why this run cannot even start: a sentence, or ""."""
        if not self.source.exists():
            return f"{self.source.relative_to(self.lesson.root)} is missing; `make sync` writes it from its pair"
        if self.way == "mpiexec" and mpi_launcher(1) is None:
            return "no mpiexec here: `pip install mpich`, or load the site's MPI module"
        return ""

    def command(self):
        if self.way == "notebook":
            values = {**self.parameters, **({"n_ranks": self.n_ranks} if self.n_ranks else {})}
            return [
                sys.executable, "-m", "papermill", str(self.lesson.notebook), str(self.executed), "-k", KERNEL,
                "--cwd", str(self.lesson.notebook.parent), "--no-progress-bar", "-y", json.dumps(values),
            ]  # fmt: skip
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self.parameters.items()]
        script = [str(self.lesson.script), *flags]
        if self.way == "torchrun":
            return [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.n_ranks),
                "--redirects", "3", "--log-dir", str(self.folder / "ranks"), *script,
            ]  # fmt: skip
        return [*mpi_launcher(self.n_ranks, self.folder / "ranks"), sys.executable, *script]

    def environ(self, base=None):
        # it would take an outer launcher's variables for its own
        environ = without_launchers(environment() if base is None else base)
        environ |= {
            "MANYHANDS_OUTPUTS": str(self.folder / "outputs"),
            "MANYHANDS_LIVE": "0",  # papermill keeps what was shown in between, too
            "MPLBACKEND": "agg",
            "PYTHONUNBUFFERED": "1",
        }
        if self.device:
            environ["MANYHANDS_DEVICE"] = self.device  # join() obeys it, or refuses
        if self.device == "cpu":  # nor does a lesson see a GPU
            environ |= {"CUDA_VISIBLE_DEVICES": "", "ONEAPI_DEVICE_SELECTOR": "*:cpu"}
        if self.way == "notebook":
            before = environ.get("JUPYTER_PATH")
            environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, [str(self.folder / "jupyter"), before]))
        if self.way == "mpiexec":
            environ = {**loopback_mpi(), "OMPI_MCA_rmaps_base_oversubscribe": "1", **environ}
        return environ

    def carry_out(self, timeout_s, **limits):
        """Run it to its end or its time-out: an Outcome."""
        if why := self.missing():
            return Outcome(self, Ended(None, 0.0, 0), FirstError(why))
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        (self.folder / "ranks").mkdir()
        if self.way == "notebook":
            write_kernelspec(self.folder / "jupyter" / "kernels" / KERNEL)
        ended = supervise(
            self.command(), log=self.log, timeout_s=timeout_s, environ=self.environ(),
            cwd=self.lesson.root, program=str(self.source), **limits,
        )  # fmt: skip
        append_rank_output(self.folder / "ranks", self.log)
        if self.executed.exists():
            write_page(self.executed, self.executed.with_suffix(".html"))
        metrics = find_metrics(self.folder / "outputs", self.lesson.name)
        return Outcome(self, ended, self._error(ended, timeout_s, metrics), metrics)

    def _error(self, ended, timeout_s, metrics):
        """The FirstError of a run that is not well, else None."""
        if ended.error:
            return FirstError(ended.error)
        text = self.log.read_text(errors="replace")
        in_notebook = first_error_in_notebook(self.executed) if self.way == "notebook" else None
        if ended.timed_out:
            where = running_cell(self.executed) if self.way == "notebook" else where_ranks_were(text)
            says = f"did not end within {timeout_s:g} s and was stopped" + (f": {where}" if where else "")
            return FirstError(says, None, in_notebook.detail if in_notebook else text[-4000:])
        if in_notebook or ended.status != 0:
            return in_notebook or first_error_in_log(text, ended.status)
        if ended.left_behind:
            return FirstError("left processes behind, killed now: " + "; ".join(ended.left_behind))
        if metrics is None:
            return FirstError("wrote no metrics.json, so there is nothing to compare")
        if self.device not in (None, metrics.get("device")):
            return FirstError(f"ran on {metrics.get('device')} although {self.device} was asked for: too few of them?")
        return None


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    run: Run
    ended: Ended
    error: FirstError | None
    metrics: dict | None = None

    @property
    def ok(self):
        return self.error is None

    @property
    def state(self):
        """ "ok", "slow" or "failed"."""
        return ("slow" if self.slow else "ok") if self.ok else "failed"

    @property
    def words(self):
        """ "ok, 6.1 s, 0.8 GiB" or "FAILED after 3.0 s: rank 1: ValueError: ..."."""
        if not self.ok:
            return f"FAILED after {self.ended.seconds:.1f} s: {self.error}"
        slow = f" (slow: {self.slow})" if self.slow else ""
        return f"ok, {self.ended.seconds:.1f} s, {self.ended.peak_bytes / 2**30:.1f} GiB{slow}"

    @property
    def files(self):
        """[(name, path)] of what it left for people."""
        files = {"notebook": self.run.executed, "page": self.run.executed.with_suffix(".html"), "log": self.run.log}
        return [(name, path) for name, path in files.items() if path.exists()]

    @property
    def slow(self):
        """Slower or larger than a lesson should be: a sentence, or "". On GPUs there are no aims."""
        if self.run.way != "notebook" or not self.ok or (self.metrics or {}).get("device", "cpu") != "cpu":
            return ""
        return self.run.lesson.beyond_aims(self.ended.seconds, self.ended.peak_bytes)


def write_kernelspec(folder):
    """The kernel `manyhands`, run by this Python, in a place of the run's own: no `make kernel` is needed."""
    folder.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
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


def find_metrics(outputs, lesson="*"):
    """The metrics.json that a run of `lesson` left below `outputs`, as a dict, or None.

    `latest` is a link to its folder. Lesson 04 needs the name: its notebook starts a job, which leaves lesson 03's too.
    """
    for path in sorted(outputs.glob(f"{lesson}/*/metrics.json")):
        if not path.parent.is_symlink():
            return {**json.loads(path.read_text()), "path": str(path)}
    return None


def append_rank_output(folder, log):
    """Append what each rank wrote to the run's log, "[1] " before each line: the rank that was silent first, first.

    torchrun leaves `<folder>/<id>/attempt_0/<rank>/stdout.log`, mpiexec by our template `<folder>/<rank>.stdout.log`.
    """
    files = {}
    for path in sorted([*folder.glob("*/attempt_*/*/std*.log"), *folder.glob("*.std*.log")], reverse=True):
        rank = path.name.split(".")[0] if path.parent == folder else path.parent.name
        files.setdefault(int(rank), []).append(path)  # stdout first: the error is at the end
    with open(log, "a", encoding="utf-8") as whole:
        for rank, paths in sorted(files.items(), key=lambda item: (max(p.stat().st_mtime for p in item[1]), item[0])):
            for path in paths:
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
                whole.writelines(f"[{rank}] {line}\n" for line in lines)
