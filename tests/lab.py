"""JupyterLab in a copy of the course, started as `make lab OPEN=no` starts it, and a notebook in it as one sees it.

Cells out of sight do not exist in the page: `NotebookPage.cell` scrolls, as a reader does, until one shows.
"""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from manyhands.tools.lesson_run import write_kernelspec

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
    "--disable-component-update",
    "--disable-quic",
]
ADDRESS = re.compile(r"(http://127\.0\.0\.1:(\d+))/lab\S*[?&]token=(\w+)")

IDLE = """() => Boolean(
    document.querySelector('#jp-main-statusbar')?.innerText.includes('Many Hands | Idle') &&
    document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status == 'idle')"""


@contextmanager
def chromium():
    """A running Chromium. Without one the test is skipped, or fails where CI promises one."""
    missing = None if Path(CHROMIUM).exists() else f"{CHROMIUM} is missing: apt-get install chromium"
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing = "playwright is missing: make test installs it"
    if missing:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)
    with sync_playwright() as play:
        yield play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)


@contextmanager
def opened(browser, lab, name):
    """The NotebookPage of notebooks/`name`.ipynb, with its kernel ready."""
    page = browser.new_page(viewport={"width": 1300, "height": 1000})
    page.set_default_timeout(60_000)
    page.goto(lab.url(name))
    notebook = NotebookPage(page)
    notebook.wait_for_kernel()
    yield notebook
    page.close()


class Lab:
    """`with Lab(course, folder) as lab`: a running server; `address`, `token` and `process` say where it is.

    What the server and its kernels write, settings and outputs, goes below `folder`. Its kernel "Many Hands" is run by
    sys.executable.
    """

    def __init__(self, course, folder):
        self.course, self.log = course, folder / "lab.log"
        places = {"CONFIG_DIR": "config", "DATA_DIR": "data", "RUNTIME_DIR": "runtime"}
        self.environ = {**os.environ, "MANYHANDS_OUTPUTS": str(folder / "outputs"), "MANYHANDS_LIVE": "1"}
        self.environ |= {f"JUPYTER_{name}": str(folder / place) for name, place in places.items()}
        self.environ["JUPYTER_PATH"] = str(folder / "jupyter")  # before the kernel that is installed
        write_kernelspec(folder / "jupyter" / "kernels" / "manyhands")

    def __enter__(self):
        command = [sys.executable, "-m", "manyhands.notebook.jupyter", "lab", "--open", "no"]
        with open(self.log, "w") as log:
            self.started = subprocess.Popen(command, cwd=self.course, env=self.environ, stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while not (found := ADDRESS.search(self.log.read_text())):
            assert self.started.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)
        self.address, self.token = found[1], found[3]
        listening = [c for c in psutil.net_connections("tcp4") if c.status == psutil.CONN_LISTEN]
        (pid,) = {c.pid for c in listening if c.laddr.port == int(found[2])}
        self.process = psutil.Process(pid)  # where programs are forks, another one than that which was started
        return self

    def __exit__(self, *error):
        family = [self.process, *self.process.children(recursive=True)]
        self.process.terminate()
        _, left = psutil.wait_procs(family, timeout=15)
        for process in left:
            process.kill()
        self.started.wait(timeout=60)

    def url(self, lesson):
        return f"{self.address}/lab/tree/notebooks/{lesson}.ipynb?token={self.token}"


class NotebookPage:
    """A notebook in the browser; methods are what a reader does with mouse and keyboard."""

    def __init__(self, page):
        self.page = page
        self.panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
        self.scroller = self.panel.locator(".jp-WindowedPanel-outer")

    def wait_for_kernel(self, timeout_s=120, busy=False):
        """Wait until the kernel is idle and no cell waits for it, or until it is busy."""
        deadline = time.monotonic() + timeout_s
        while self.page.evaluate(IDLE) == busy:
            asked = self.page.locator(".jp-Dialog").all_inner_texts()
            assert time.monotonic() < deadline, f"not {'busy' if busy else 'idle'} after {timeout_s} s; {asked}"
            self.page.wait_for_timeout(200)

    def cell(self, text):
        """The first cell that shows `text`, scrolled into view."""
        wanted = self.panel.locator(".jp-Cell").filter(has_text=text).first
        self.scroller.evaluate("e => e.scrollTop = 0")
        deadline = time.monotonic() + 60
        while not wanted.count():
            assert time.monotonic() < deadline, f"no cell shows {text!r}"
            self.scroller.evaluate("e => e.scrollTop += e.clientHeight / 2")
            self.page.wait_for_timeout(100)  # what scrolls into view is rendered a moment later
        place = wanted.get_attribute("data-windowed-list-index")
        cell = self.panel.locator(f'.jp-Cell[data-windowed-list-index="{place}"]')
        cell.scroll_into_view_if_needed()
        return cell

    def menu(self, menu, *items):
        """Choose an item of a menu of the menu bar, or of a menu in it."""
        self.page.locator(".lm-MenuBar-item").get_by_text(menu, exact=True).click()
        for item in items:
            self.page.locator(".lm-Menu-itemLabel").get_by_text(item, exact=True).click()

    def select(self, cell):
        """Click beside the cell's code: what the menus and keys mean from now on."""
        cell.locator(".jp-InputPrompt").click()

    def type_over(self, cell, line, lines):
        """Click at the end of `line` of a cell's code, select the line and type `lines` in its place, key by key."""
        cell.locator(".cm-line").filter(has_text=line).click()
        keys = self.page.keyboard
        keys.press("End")
        keys.press("Shift+Home")  # to the first letter
        for text in lines:
            keys.press("Shift+Home")  # to the margin: what the editor indents by itself is typed over
            keys.type(text)
            if text is not lines[-1]:
                keys.press("Enter")

    def run(self, cell, wait=True):
        """Run a cell with Ctrl+Enter."""
        before = cell.locator(".jp-InputPrompt").inner_text()
        self.select(cell)
        self.page.keyboard.press("Control+Enter")
        if wait:
            self.wait_for_number(cell, before)

    def output(self, cell, text):
        """All that the cell has put out, once `text` is in it: outputs are rendered after what they come from."""
        outputs = cell.locator(".jp-Cell-outputArea")
        outputs.filter(has_text=text).wait_for(state="attached")
        return outputs.text_content()

    def rows(self, cell, text):
        """[label, what it said, label, what it said, ...] of a cell's rank output, once `text` is in it."""
        self.output(cell, text)
        return cell.locator(".jp-OutputArea-output div[style*=grid] > *").all_text_contents()

    def wait_for_number(self, cell, before="[*]:", timeout_s=120):
        """Wait until the cell has run: its prompt shows a number again, another than before."""
        prompt = cell.locator(".jp-InputPrompt")
        deadline = time.monotonic() + timeout_s
        while not re.fullmatch(r"\[\d+\]:", text := prompt.inner_text()) or text == before:
            assert time.monotonic() < deadline, f"the cell still runs after {timeout_s} s"
            self.page.wait_for_timeout(50)

    def run_many(self, item, timeout_s):
        """Choose `item` of the menu Run and wait until the cells have run."""
        self.menu("Run", item)
        self.wait_for_kernel(busy=True)
        self.wait_for_kernel(timeout_s)

    def new_cell_below(self, cell, code):
        """Insert a cell below with the key b and type its code."""
        self.select(cell)
        self.page.keyboard.press("b")
        self.page.keyboard.press("Enter")
        new = self.panel.locator(".jp-Cell.jp-mod-active")
        new.locator(".cm-editor.cm-focused").wait_for()  # what is typed before goes nowhere
        self.page.keyboard.insert_text(code)
        place = new.get_attribute("data-windowed-list-index")
        return self.panel.locator(f'.jp-Cell[data-windowed-list-index="{place}"]')

    def delete(self, cell):
        self.select(cell)
        self.page.keyboard.press("d")
        self.page.keyboard.press("d")

    def stop(self):
        """The stop button."""
        self.panel.locator('[data-jp-item-name="interrupt"]').click()

    def save(self):
        """Save with Ctrl+S and wait until the server has it."""
        with self.page.expect_response(
            lambda answer: answer.request.method == "PUT" and "/api/contents/" in answer.url
        ):
            self.page.keyboard.press("Control+s")
