"""What a cell prints, displays and raises on a rank, in the order in which it appears."""

import base64
import contextlib
import io
import re
import sys
import threading

from IPython.core.displaypub import CapturingDisplayPublisher


class Recorder(io.TextIOBase):
    """Stands in for stdout and stderr, and collects displays and the error of the cell beside the text.

    on_text(text) is called with each piece of text as it comes, or None.
    """

    encoding = "utf-8"

    def __init__(self, on_text=None):
        self.items, self.error, self.on_text, self.lock = [], None, on_text, threading.Lock()
        self.deaf = False  # once a rank is being freed, what it says is about that and no longer the cell's

    def write(self, text):
        if self.deaf:
            return len(text)
        with self.lock:  # autograd's thread prints too
            if self.items and self.items[-1][0] == "text":
                self.items[-1][1].append(text)
            else:
                self.items.append(("text", [text]))
        if self.on_text is not None:
            self.on_text(text)
        return len(text)

    def writable(self):
        return True

    def display(self, data, metadata):
        with self.lock:
            self.items.append(("data", data, metadata))

    def fail(self, kind, value, traceback_lines):
        if self.error is None:
            lines = _lines_of_the_cell(traceback_lines)
            self.error = {"name": kind.__name__, "value": str(value), "traceback": lines}

    def result(self):
        """{"items": [("text", str) | ("data", mime bundle, metadata)], "error": None or name, value, traceback}."""
        joined = [("text", _last_states("".join(i[1]))) if i[0] == "text" else i for i in self.items]
        return {"items": [item for item in joined if item[1]], "error": self.error}


class _Publisher(CapturingDisplayPublisher):
    def publish(self, data, metadata=None, *, transient=None, update=False, **_):
        self.recorder.display(data, metadata or {})


@contextlib.contextmanager
def recording(shell, on_text=None):
    """Within the block everything that IPython's `shell` puts out goes into the Recorder that this yields."""
    recorder = Recorder(on_text)

    def display_value(value):  # of a cell's last line
        if value is not None:
            recorder.display(*shell.display_formatter.format(value))

    saved = shell.display_pub, shell.display_trap.hook, sys.stdout, sys.stderr
    shell.display_pub = _Publisher()
    shell.display_pub.recorder = recorder
    shell.display_trap.hook = display_value
    shell._showtraceback = recorder.fail
    sys.stdout = sys.stderr = recorder
    try:
        yield recorder
        _flush_pyplot(recorder)
    finally:
        shell.display_pub, shell.display_trap.hook, sys.stdout, sys.stderr = saved
        del shell._showtraceback


def show_figures_as_png(shell):
    """What `%matplotlib inline` does, without importing matplotlib before a cell wants it."""
    formatter = shell.display_formatter.formatters["image/png"]
    formatter.for_type_by_name("matplotlib.figure", "Figure", _png)


def _png(figure):
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100, bbox_inches="tight")
    return base64.b64encode(picture.getvalue()).decode()


def _flush_pyplot(recorder):
    """Figures that a cell left open in pyplot appear below it, as in any notebook."""
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        for number in pyplot.get_fignums():
            recorder.display({"image/png": _png(pyplot.figure(number))}, {})
        pyplot.close("all")


def _last_states(text):
    """Text as a terminal shows it in the end: of a line that was rewritten after a carriage return, the last state."""
    text = re.sub(r"\x1b\[\d*[AKJ]", "", text)
    return "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))


def _lines_of_the_cell(traceback_lines):
    """Name the places in a traceback as the reader knows them: lines of the cell, not of `In[1]`."""
    colour = r"((?:\x1b\[[\d;]*m)*)"
    text = "\n".join(traceback_lines)
    text = re.sub(rf"Cell{colour} ?{colour}In ?\[\d+\]{colour}, line", r"\1\2the cell\3, line", text)
    return text.split("\n")
