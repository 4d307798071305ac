"""Measure a notebook's ranks over Jupyter's protocol, next to other ways to run a cell on many processes.

Each way has a kernel of its own for a while. Its memory is that of the kernel and all that it has started, as shares of
what they map (PSS). A hang is a cell whose last rank skips the all-reduce; three seconds later comes the stop button.
"""

import importlib.metadata
import importlib.util
import json
import queue
import secrets
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.course.folders import SCRIPTS
from manyhands.launch.processes import MARK, Family
from manyhands.launch.settings import environment, for_python
from manyhands.notebook.jupyter import AT_START

RANKS, REPEATS, LINES = 4, 10, 20_000
OLD_S = 10  # age of a kernel in which ranks are started as people do: after they have read a little
STOP_AFTER_S, STOPPED_S, CELL_S = 3, 30, 300
IMPORTS = "import os, torch, torch.distributed as dist\n"
REDUCE = "x = torch.ones(3)\ndist.all_reduce(x)\nprint(x.sum().item())"
SAYS = f"{3.0 * RANKS}"
ROWS = {
    "fresh_s": "first all-reduce in a fresh kernel, s",
    "old_s": f"first all-reduce in a kernel of {OLD_S} s, s",
    "pss_mb": f"memory with {RANKS} ranks, PSS, MB",
    "processes": "processes",
    "print_ms": "a cell that prints, ms",
    "reduce_ms": "a cell with an all-reduce, ms",
    "lines_s": f"{LINES:,} lines on each rank, s",
    "stop_s": "a hang ends after the stop button, s",
    "after": "the ranks after that",
}


@dataclass(frozen=True)
class Way:
    """A way to run cells on ranks. `start` is the cell that starts them, `join` what each of them then runs."""

    package: str
    kernel: tuple  # module and flags
    start: str
    prefix: str  # of a cell for all ranks
    join: str
    environ: dict = field(default_factory=dict)


WAYS = {
    "Many Hands": Way(
        "", ("ipykernel_launcher", *AT_START), f"%load_ext manyhands\n%ranks {RANKS}", "%%ranks\n",
        "from manyhands import join\nrank = join(quiet=True).rank",
    ),
    "jupyter-distributed": Way(
        "jupyter-distributed", ("jupyter_distributed.kernel",), "", "",
        "rank = int(os.environ['RANK'])\ndist.init_process_group('gloo')",
        {"JUPYTER_DISTRIBUTED_WORLD_SIZE": str(RANKS), "JUPYTER_DISTRIBUTED_BASE_KERNEL": "measured_base"},
    ),
    "ipyparallel": Way(
        "ipyparallel", ("ipykernel_launcher",),
        f"import ipyparallel\nclient = ipyparallel.Cluster(n={RANKS}).start_and_connect_sync(activate=True)\n"
        f"client[:].scatter('rank', range({RANKS}), flatten=True).get()",
        "%%px\n", f"dist.init_process_group('gloo', init_method='file://FOLDER/meet', rank=rank, world_size={RANKS})",
    ),
}  # fmt: skip


class Notebook:
    """A kernel of a Way, driven as a page would."""

    def __init__(self, way, folder):
        from jupyter_client.kernelspec import KernelSpecManager
        from jupyter_client.manager import KernelManager

        for name, module in (("measured", way.kernel), ("measured_base", ("ipykernel_launcher",))):
            (folder / "kernels" / name).mkdir(parents=True)
            spec = {"argv": [sys.executable, "-m", module[0], "-f", "{connection_file}", *module[1:]]}
            text = json.dumps(spec | {"display_name": name, "language": "python"})
            (folder / "kernels" / name / "kernel.json").write_text(text)
        self.way, self.folder, self.began, self.text = way, folder, time.monotonic(), ""
        specs = KernelSpecManager(kernel_dirs=[str(folder / "kernels")])
        self.manager = KernelManager(kernel_name="measured", kernel_spec_manager=specs)
        environ = for_python(environment(), SCRIPTS) | {"JUPYTER_PATH": str(folder), "IPYTHONDIR": str(folder / "i")}
        self.family = Family(secrets.token_hex(8))
        self.manager.start_kernel(env=environ | way.environ | {MARK: self.family.mark}, cwd=str(folder))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=CELL_S)

    def cell(self, source, patience_s=CELL_S, says="") -> float:
        """Run a cell; return its seconds. Raise RuntimeError if it fails, TimeoutError if it does not end."""
        self.text, began = "", time.monotonic()
        reply = self.client.execute_interactive(source, timeout=patience_s, output_hook=self._hear, store_history=False)
        if reply["content"]["status"] != "ok" or says not in self.text:
            raise RuntimeError(f"{source!r} failed: {reply['content'].get('evalue')} {self.text[-500:]}")
        return time.monotonic() - began

    def _hear(self, message):
        content = message["content"]
        self.text += content.get("text", "") + content.get("data", {}).get("text/plain", "")

    def first_reduce(self) -> float:
        """Start the ranks, join them and let them meet; return the seconds."""
        began = time.monotonic()
        if self.way.start:
            self.cell(self.way.start)
        self.cell(self.way.prefix + IMPORTS + self.way.join.replace("FOLDER", str(self.folder)))
        self.cell(self.way.prefix + REDUCE, says=SAYS)
        return time.monotonic() - began

    def stop_a_hang(self):
        """Return (seconds from the stop button to the cell's end, or None; what the ranks are then good for)."""
        self.client.execute(f"{self.way.prefix}if rank != {RANKS - 1}: dist.all_reduce(x)")
        time.sleep(STOP_AFTER_S)
        began = time.monotonic()
        self.manager.interrupt_kernel()
        stopped_s = None
        with suppress(queue.Empty):
            self.client.get_shell_msg(timeout=STOPPED_S)
            stopped_s = time.monotonic() - began
        with suppress(Exception):
            self.cell(self.way.prefix + REDUCE, STOPPED_S, SAYS)
            return stopped_s, "usable"
        return stopped_s, "lost"

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.family.kill()


def measured(name, way) -> dict:
    """Return what ROWS names of a way, and its version."""
    row = {"way": name, "version": importlib.metadata.version(way.package) if way.package else ""}
    for key, age_s in (("fresh_s", 0), ("old_s", OLD_S)):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            notebook = Notebook(way, Path(folder))
            try:
                row[key] = time.monotonic() - notebook.began if not age_s else 0.0
                time.sleep(age_s)
                row[key] += notebook.first_reduce()
                if not age_s:
                    continue
                row["pss_mb"] = notebook.family.memory_bytes() / 1e6
                row["processes"] = len(notebook.family.members())
                for what, source in (("print_ms", "print(1)"), ("reduce_ms", REDUCE)):
                    times = [notebook.cell(way.prefix + source) for _ in range(REPEATS)]
                    row[what] = 1000 * statistics.median(times)
                row["lines_s"] = notebook.cell(f"{way.prefix}for i in range({LINES}): print(i)")
                row["stop_s"], row["after"] = notebook.stop_a_hang()
            finally:
                notebook.close()
    return row


def all_measured() -> list[dict]:
    """Return the rows of this course's ranks, and of the other ways that are installed here."""
    found = []
    for name, way in WAYS.items():
        if not way.package or importlib.util.find_spec(way.package.replace("-", "_")):
            print(f"{name} ...", flush=True)
            found.append(measured(name, way))
    return found


def table(rows) -> list[str]:
    """Return the lines of a Markdown table, a column for each way."""
    lines = ["| | " + " | ".join(f"{row['way']} {row['version']}".strip() for row in rows) + " |"]
    lines.append("|---|" + "---|" * len(rows))
    for key, says in ROWS.items():
        digits = 1 if key.endswith("_s") else 0
        shown = [f"{v:,.{digits}f}" if isinstance(v := row.get(key), int | float) else v or "never" for row in rows]
        lines.append(f"| {says} | " + " | ".join(shown) + " |")
    return lines
