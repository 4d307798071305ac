"""Lesson 02 as an attendee meets it: real JupyterLab in real Chromium, by mouse and keyboard."""

import os
import re
import shutil
import urllib.error
import urllib.request

import nbformat
import psutil
import pytest
from course_copy import copy_course
from lab import Lab, chromium, opened
from manyhands.course import pairs
from manyhands.course.lessons import find_lessons
from manyhands.plots.looks import RANK_COLOURS
from notebook_kernel import wait_until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

STUB = "raise NotImplementedError  # your turn"
FEW = {"n_ranks": 2, "largest_mib": 0.1, "repeats": 1, "wait_s": 2.0, "points": 1_000}


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def lesson(tmp_path_factory):
    """Lesson 02 of a copy of the course, with few ranks and small messages.

    As after a clone, its notebook is newer than its script; and the script has a blank line where jupytext puts none.
    """
    (lesson,) = find_lessons(copy_course(tmp_path_factory.mktemp("class") / "course"), ["02"])
    script = lesson.script.read_text("utf-8")
    for parameter, value in FEW.items():
        (line,) = [line for line in script.splitlines() if line.startswith(f"{parameter} = ")]
        script = script.replace(line, f"{parameter} = {value}  #{line.partition('#')[2]}")
    script = script.replace("\n# %% [markdown]\n# ## ", "\n\n\n# %% [markdown]\n# ## ", 1)
    lesson.script.write_text(script, "utf-8")
    lesson.notebook.unlink()
    pairs.sync(lesson)
    os.utime(lesson.script, (1_000_000, 1_000_000))
    return lesson


@pytest.fixture(scope="module")
def lab(lesson, tmp_path_factory):
    with Lab(lesson.root, tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture(scope="module")
def notebook(browser, lab, lesson):
    """The lesson, open, with its kernel ready and no rank yet."""
    with opened(browser, lab, lesson.name) as notebook:
        yield notebook


@pytest.fixture(scope="module")
def exercise(notebook):
    """The cell of exercise 1; all cells above it have run."""
    cell = notebook.cell("all_reduce_any_length(x_N):")
    notebook.select(cell)
    notebook.run_many("Run All Above Selected Cell", timeout_s=240)
    return notebook.cell("all_reduce_any_length(x_N):")


def solution_lines(lesson):
    """The body of the lesson's own solution 1, without its docstring."""
    cells = nbformat.read(lesson.notebook, 4).cells
    (source,) = [
        cell.source
        for cell in cells
        if "solution" in cell.metadata.get("tags", []) and "def all_reduce_any_length" in cell.source
    ]
    body = source.split('"""')[2].split("\n```")[0]
    return [line for line in body.split("\n") if line.strip()]


def test_the_server_listens_on_this_machine_only_and_asks_for_a_token(lab):
    listening = [c for c in lab.process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{lab.address}/api/contents")


def test_the_lesson_opens_with_its_own_kernel_and_asks_nothing(notebook):
    assert notebook.panel.locator(".jp-KernelName").inner_text().strip() == "Many Hands"
    assert notebook.page.locator(".jp-Dialog").count() == 0
    assert notebook.page.get_by_text("official Jupyter news").count() == 0


def test_a_notebook_that_was_only_opened_is_not_unsaved_and_saving_it_changes_no_byte(notebook, lesson):
    assert notebook.page.locator(".lm-TabBar-tab.jp-mod-current").count(), "the tabs are there"
    assert notebook.page.locator(".jp-mod-dirty").count() == 0
    stored = lesson.notebook.read_bytes()
    notebook.save()
    assert lesson.notebook.read_bytes() == stored


def test_a_cell_that_begins_with_our_magic_has_syntax_colours(notebook):
    cell = notebook.cell("from manyhands import")
    notebook.select(cell)
    assert cell.locator(".cm-line").first.inner_text() == "%%ranks"
    word = cell.locator(".cm-line span", has_text=re.compile("^import$")).first
    colour = "element => getComputedStyle(element).color"
    assert word.evaluate(colour) != cell.locator(".cm-line").first.evaluate(colour)


def test_solutions_are_folded_and_open_at_a_click(notebook):
    folded = notebook.cell("Solution 1")
    assert "tensor_split" not in folded.inner_text()
    folded.locator("summary").click()
    folded.locator("pre", has_text="tensor_split").wait_for()
    folded.locator("summary").click()
    assert "tensor_split" not in folded.inner_text()


def test_a_notebook_of_another_person_shows_no_answer_before_a_click(browser, lab, lesson):
    """As it is stored, with its outputs, which JupyterLab trusts only where they came about."""
    name = "03_data_parallel"
    shutil.copy(find_lessons(only=["03"])[0].notebook, lesson.notebook.with_name(f"{name}.ipynb"))
    with opened(browser, lab, name) as notebook:
        outputs = notebook.cell("speed per GPU that is left on 512: no guess yet").locator(".jp-Cell-outputArea")
        assert outputs.locator(".jp-RenderedHTML").count() == 2 and outputs.locator(".jp-mod-trusted").count() == 0
        assert outputs.inner_text().split("\n") == [
            "speed per GPU that is left on 512: no guess yet", "speed per GPU that is left on 512: the figure",
        ]  # fmt: skip
        assert not any(picture.is_visible() for picture in outputs.locator("img").all())
        outputs.locator("summary").first.click()
        assert "it is 91 %" in outputs.inner_text()


def test_an_exercise_turns_to_correct_and_saving_writes_the_answer_into_the_script(notebook, exercise, lesson):
    notebook.run(exercise)
    notebook.output(exercise, "exercise 1 (ring all-reduce): not attempted")
    answer = solution_lines(lesson)
    notebook.type_over(exercise, STUB, answer)
    notebook.run(exercise)
    notebook.output(exercise, "exercise 1 (ring all-reduce): correct")
    before = lesson.script.read_text("utf-8")
    notebook.save()
    above, name, below = before.partition("def all_reduce_any_length")
    assert lesson.script.read_text("utf-8") == above + name + below.replace(f"    {STUB}", "\n".join(answer), 1)
    assert pairs.difference(lesson) is None


def test_the_stop_button_frees_a_hung_cell_and_the_ranks_go_on(notebook, exercise):
    hung = notebook.new_cell_below(exercise, "%%ranks\nif rank == 0:\n    dist.recv(torch.ones(1), src=1)")
    notebook.run(hung, wait=False)
    notebook.output(hung, "running on all ranks for")
    notebook.stop()
    notebook.wait_for_number(hung, timeout_s=60)
    said = notebook.output(hung, "interrupted: the ranks were freed")
    assert "rank 0: waiting in recv, line 3" in said
    assert "running on all ranks" not in said
    again = notebook.new_cell_below(hung, "%%ranks\ndist.barrier()\nsay('still here')")
    notebook.run(again)
    assert notebook.rows(again, "still here") == ["all ranks", "still here"]
    notebook.delete(again)
    notebook.delete(hung)


def test_tab_and_shift_tab_know_what_only_the_ranks_have_and_a_progress_bar_moves(notebook, exercise):
    code = "%%ranks\nonly_on_ranks = torch.ones(2)\n\ndef ours(x_N):\n    'Doubles what it is given.'"
    defines = notebook.new_cell_below(exercise, code)
    notebook.run(defines)
    keys, page = notebook.page.keyboard, notebook.page

    def press(key, there):
        """JupyterLab leaves out what it is told after more than a second: then press it again."""
        keys.press(key)
        page.wait_for_timeout(1500)
        return there.count()

    cell = notebook.new_cell_below(defines, "%%ranks\nonly_on_r")
    offered = page.locator(".jp-Completer-item").filter(has_text="only_on_ranks")
    wait_until(lambda: press("Tab", offered))
    keys.press("Enter")
    cell.locator(".cm-line").filter(has_text="only_on_ranks").wait_for()
    keys.insert_text("\nours(")
    docstring = page.locator(".jp-Tooltip").filter(has_text="Doubles what it is given.")
    wait_until(lambda: press("Shift+Tab", docstring))
    keys.press("Escape")
    code = "%%ranks\nfrom tqdm.auto import tqdm\nfor _ in tqdm(range(60), desc='bar'): time.sleep(0.1)"
    bar = notebook.new_cell_below(cell, code)
    notebook.run(bar, wait=False)
    seen = set()
    wait_until(lambda: seen.update(re.findall(r"bar: +(\d+)%", notebook.output(bar, "bar:"))) or len(seen) >= 3)
    notebook.wait_for_number(bar)
    notebook.output(bar, "bar: 100%")
    for one in (bar, cell, defines):
        notebook.delete(one)


STOPPED = """%%ranks
halves = [rank / 2, rank / 4]
if rank == 1:
    breakpoint()
dist.barrier()
say("all went on")"""


def test_a_stopped_rank_is_stepped_in_a_terminal_of_jupyterlab(notebook, exercise, tmp_path):
    stopped = notebook.new_cell_below(exercise, STOPPED)
    notebook.run(stopped, wait=False)
    said = notebook.output(stopped, "rank 1: stopped at line 4 of this cell: breakpoint()")
    command = re.search(r"In a terminal: (.*? -m manyhands\.notebook\.debug)", said)[1]
    notebook.menu("File", "New", "Terminal")
    keys, screen = notebook.page.keyboard, notebook.page.locator(".jp-Terminal .xterm-helper-textarea")
    screen.wait_for(state="attached")
    screen.focus()
    told = tmp_path / "told"  # what the terminal shows is drawn, not text
    keys.type(f"{command} | tee {told}\n")
    wait_until(lambda: told.exists() and told.read_text().endswith("(Pdb) "))
    for typed, answer in (("n", "-> dist.barrier()"), ("p halves", "[0.5, 0.25]"), ("q", "the cell goes on")):
        keys.type(f"{typed}\n")
        wait_until(lambda answer=answer: answer in told.read_text())
    notebook.page.screenshot(path=tmp_path / "terminal.png")
    notebook.page.locator(".lm-TabBar-tab", has_text=".ipynb").click()
    notebook.output(stopped, "all went on")
    notebook.wait_for_number(stopped)
    notebook.delete(stopped)


def test_run_all_shows_the_ranks_in_order_in_their_colours_and_a_figure(notebook, lesson):
    notebook.menu("Edit", "Clear Outputs of All Cells")
    notebook.run_many("Run All Cells", timeout_s=300)
    greetings = notebook.cell("after broadcast I hold {x.tolist()}")
    assert notebook.rows(greetings, "after scatter [1]") == [
        "rank 0", "after broadcast I hold [3], after scatter [0]: shape [1]",
        "rank 1", "after broadcast I hold [3], after scatter [1]: shape [1]",
    ]  # fmt: skip
    for rank in (0, 1):
        label = greetings.locator(".jp-OutputArea-output").get_by_text(f"rank {rank}", exact=True)
        colour = label.evaluate("e => getComputedStyle(e).borderLeftColor")
        assert colour == "rgb({}, {}, {})".format(*bytes.fromhex(RANK_COLOURS[rank][1:]))
    once = notebook.cell("the sum is {total.item()}")
    assert notebook.rows(once, "the sum is 4") == ["all ranks", "the sum is 4"]
    picture = notebook.cell('show(figure, "hop"').locator(".jp-OutputArea-output img")
    picture.scroll_into_view_if_needed()
    assert picture.evaluate("e => e.decode().then(() => e.naturalWidth)") > 300
    notebook.save()
    stored = nbformat.read(lesson.notebook, 4).cells
    assert [output for cell in stored for output in cell.get("outputs", []) if output.output_type == "error"] == []
    assert [cell.source for cell in stored if cell.cell_type == "code" and not cell.execution_count] == []
