"""A Jupyter kernel that a test drives cell by cell, in a small course of its own."""

import inspect
import os
import queue
import re
import time

import psutil
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from manyhands.launch.processes import Family
from manyhands.notebook.engine_processes import MARK
from manyhands.tools.lesson_run import write_kernelspec

START = """
import sys; sys.path.insert(0, {scripts!r})
from manyhands.notebook.start import start_ranks
n_ranks, length = {n_ranks}, {length}
hands = start_ranks("90_tiny", globals())
"""
TINY = """
# %% tags=["parameters"]
n_ranks = 4        # processes; in a script the launcher decides
length = 3         # numbers per rank, >= 1

# %% [markdown]
# ## Start (CORE, 1 min)

# %%
# %%ranks
import torch, os, time, signal
import torch.distributed as dist
from manyhands import join, leave, mpi_world, say, show

ranks = join(globals(), quiet=True)
rank = ranks.rank

# %%
# %%ranks
def started():
    return length

# %% [markdown]
# ## Passing on (CORE, 5 min)
#
# ### Build B: hand it on

# %%
def handed_on():
    raise NotImplementedError

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# import math
#
#
# def handed_on():
#     return floor(2.5) + base()
#
#
# def floor(x):
#     return math.floor(x)
# ```
#
# </details>

# %% [markdown]
# ### And weigh it

# %%
from textwrap import indent

def base():
    return int(indent("40", ""))

weight = 3

# %%
half a line (

# %%
class Box:
    def full(self):
        return handed_on()

def sqrt(x):
    return "the lesson's"
"""
JOIN = """%%ranks
import torch, os, time, signal
import torch.distributed as dist
from manyhands import join, leave, mpi_world, say, show
ranks = join(globals(), quiet=True)
rank = ranks.rank
"""


class Output:
    """What a cell put out: `text` (streams and text/plain), `html`, `pictures`, `error` (name, value, lines);
    `live`: the plain text of each display and of each of its updates."""

    def __init__(self):
        self.text, self.html, self.pictures, self.error, self.live = "", "", [], None, []

    def add(self, message):
        kind, content = message["msg_type"], message["content"]
        if kind in ("display_data", "update_display_data"):
            self.live.append(content["data"].get("text/plain", ""))
        if kind == "stream":
            self.text += content["text"]
        elif kind in ("display_data", "execute_result"):
            self.text += content["data"].get("text/plain", "") + "\n"
            self.html += content["data"].get("text/html", "")
            self.pictures += [content["data"]["image/png"]] if "image/png" in content["data"] else []
        elif kind == "clear_output":
            self.text = self.html = ""
        elif kind == "error":
            lines = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"]))
            self.error = (content["ename"], content["evalue"], lines)


class Kernel:
    """`with Kernel(folder) as kernel: kernel.start(4); kernel.run("%%ranks\\nprint(1)").text`."""

    def __init__(self, folder, root, environ=None):
        (folder / "scripts").mkdir(parents=True, exist_ok=True)
        (folder / "notebooks").mkdir(exist_ok=True)
        (folder / "scripts" / "90_tiny.py").write_text(TINY)
        self.folder, self.root = folder, root
        # patience: whatever else runs here, what hangs is freed after the same time
        self.environ = {**os.environ, "MANYHANDS_LIVE": "0", "MANYHANDS_PATIENCE": "2", **(environ or {})}

    def __enter__(self):
        write_kernelspec(self.folder / "kernels" / "manyhands")
        specs = KernelSpecManager(kernel_dirs=[str(self.folder / "kernels")])
        self.manager = KernelManager(kernel_name="manyhands", kernel_spec_manager=specs)
        self.manager.start_kernel(env=self.environ, cwd=str(self.folder / "notebooks"))
        self.client, self.pid = self.manager.blocking_client(), self.manager.provisioner.pid
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)
        return self

    def __exit__(self, *error):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def start(self, n_ranks=4, length=3):
        return self.run(START.format(scripts=str(self.root / "scripts"), n_ranks=n_ranks, length=length))

    def send(self, source):
        return self.client.execute(inspect.cleandoc(source))

    def collect(self, question, timeout_s=120):
        output, deadline = Output(), time.monotonic() + timeout_s
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"the cell did not end within {timeout_s} s") from None
            if message["parent_header"].get("msg_id") != question:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return output
            output.add(message)

    def run(self, source, timeout_s=120):
        return self.collect(self.send(source), timeout_s)

    def answer(self, question, timeout_s=20):
        """The content of the reply to a request on the shell channel."""
        while True:
            message = self.client.get_shell_msg(timeout=timeout_s)
            if message["parent_header"].get("msg_id") == question:
                return message["content"]

    def tab(self, code):
        """What Tab offers at the end of `code`: {text that replaces the last name: its type}."""
        reply = self.answer(self.client.complete(code, len(code)))
        known = reply["metadata"].get("_jupyter_types_experimental", [])
        assert [one["text"] for one in known] == reply["matches"]
        cut = len(code[reply["cursor_start"] :]) - len(re.search(r"[-\w]*\Z", code)[0])
        return {one["text"][cut:]: one["type"] for one in known}

    def shift_tab(self, code):
        """What Shift-Tab shows at the end of `code`, "" for nothing."""
        reply = self.answer(self.client.inspect(code, len(code)))
        return reply["data"].get("text/plain", "") if reply["found"] else ""

    def mark(self):
        return self.run("print(hands.processes.mark)").text.strip()


def wait_until(happened, patience_s=60):
    """Wait until `happened()` holds."""
    deadline = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < deadline, f"it did not happen within {patience_s} s"
        time.sleep(0.05)


def left_behind(mark, patience_s):
    """Processes that still carry the mark after `patience_s` seconds (at once, when there are none)."""
    deadline = time.monotonic() + patience_s
    while (processes := Family(mark, MARK).members()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return processes


def listening_addresses(kernel):
    """Addresses on which a kernel and its processes listen, but for mpiexec's own, which its children inherit.

    All of them are forks of one server, of which no other kernel may have any now; mpiexec carries the mark.
    """
    found, mpiexec = set(), set()
    forks = psutil.Process(int(kernel.run("import os; print(os.getpid())").text)).parent().children()
    assert len(forks) >= 7, "the kernel, its controller and watchdog, and four ranks"
    for process in [*forks, *Family(kernel.mark(), MARK).members()]:
        listening = {c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        (mpiexec if process.name() in ("mpiexec", "hydra_pmi_proxy") else found).update(listening)
    return {address.ip for address in found - mpiexec}
