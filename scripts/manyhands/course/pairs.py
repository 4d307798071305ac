"""A lesson is one file in two forms, a notebook and a script, that jupytext keeps the same.

    python -m manyhands.course.pairs check [LESSON ...]       # exit status 2 and the first difference if a pair differs
    python -m manyhands.course.pairs sync [LESSON ...]        # the form that was saved last overwrites the other
    python -m manyhands.course.pairs notebooks [LESSON ...]   # run the notebooks and store their outputs

LESSON is "03" or "03_data_parallel"; none means all. In a folder with notebooks/ they are that folder's lessons.
"""

import argparse
import hashlib
import itertools
import os
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from manyhands.course.folders import write_whole
from manyhands.course.lessons import Lesson, course_here, find_lessons, left_alone
from manyhands.course.ranks_line import read_line

KEPT_METADATA = ("jupytext", "kernelspec")
# What the kernel "Many Hands" says of itself, and what JupyterLab therefore writes into a notebook: one that holds
# something else counts as changed as soon as it is opened. No version, which is another one on another machine. On a
# web page IPython's lexer would leave a cell grey that begins with a magic of ours; Python's colours all but that line.
LANGUAGE = {
    "codemirror_mode": {"name": "ipython", "version": 3}, "file_extension": ".py", "mimetype": "text/x-python",
    "name": "python", "nbconvert_exporter": "python", "pygments_lexer": "python3",
}  # fmt: skip
LAYOUT = "lines_to_next_cell"  # what jupytext notes of blank lines that are not where it would put them
SOME_RANKS = (
    "in the script its lines would run on every rank. Begin it with %%ranks and put the lines under `if rank == ...`, "
    "or move the cell to a notebook of your own"
)
KEPT_CELL_METADATA = ("jupyter", LAYOUT, "tags")  # in the order of a notebook's JSON, which is sorted


class PairError(RuntimeError):
    """Notebook and script do not hold the same cells; the message says where and what to do."""


@contextmanager
def without(module):
    """Import what this thread imports here as if the optional `module` were not installed; others may import it."""

    class Finder:
        thread = threading.get_ident()

        def find_spec(self, name, path=None, target=None):
            if name == module and threading.get_ident() == self.thread:
                raise ModuleNotFoundError(f"{name} is left out", name=name)

    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def read(path):
    """Return the notebook in `path`, whichever of the two forms it is. Raises PairError if it is neither."""
    with without("rfc3987_syntax"):  # with it jsonschema builds 38 grammars of web addresses, which takes 2 s
        import jupytext  # takes half a second, and every script that starts asks for `stale_script`
        import nbformat

    broken = ValueError, LookupError, AttributeError, TypeError, RecursionError, nbformat.ValidationError
    try:
        notebook = jupytext.read(path, fmt="py:percent" if path.suffix == ".py" else "ipynb")
        if notebook.nbformat != 4:
            raise ValueError(f"its format is {notebook.nbformat}, where 4 is wanted")
        [essence(cell) for cell in notebook.cells]
        return notebook
    except broken as error:  # empty, half a JSON, one of other keys, conflict markers, a header that is no YAML
        why = (str(error).split("\n")[0] or type(error).__name__)[:120]
        cure = "delete it, and `make sync LESSON={0}` writes it; or `make reset LESSON={0}` brings both forms back"
        said = f"{path} is neither a notebook nor a script of cells: {why}"
        raise PairError(f"{said}; {cure.format(path.stem[:2])}") from None


def difference(lesson):
    """The first difference between the lesson's two forms as a sentence, or None if they hold the same cells.

    Compared are kind, source and tags of the cells: not outputs, not what is folded, and not the files' times.
    Raises PairError where neither form is there, or one is broken.
    """
    if not (lesson.notebook.exists() or lesson.script.exists()):
        raise PairError(f"{lesson.name} is not here; `make reset LESSON={lesson.number}` brings it back")
    for path in (lesson.notebook, lesson.script):
        if not path.exists():
            return f"{path.relative_to(lesson.root)} is missing"
    notebook, script = (read(path).cells for path in (lesson.notebook, lesson.script))
    for number, (ours, theirs) in enumerate(zip(notebook, script, strict=False), 1):
        if essence(ours) != essence(theirs):
            return f"cell {number} of {lesson.name} differs: {_first_difference(ours, theirs)}"
    if len(notebook) != len(script):
        return f"{lesson.name} has {len(notebook)} cells as a notebook and {len(script)} as a script"
    return None


def essence(cell):
    """Return what makes a cell the same one in both forms: its kind, source and tags."""
    return cell.cell_type, cell.source.strip(), sorted(cell.metadata.get("tags", []))


def _first_difference(ours, theirs):
    lines = [cell.source.strip().splitlines() for cell in (ours, theirs)]
    for in_notebook, in_script in itertools.zip_longest(*lines, fillvalue=""):
        if in_notebook != in_script:
            shown = (f"{line.strip()[:70]!r}" if line.strip() else "nothing" for line in (in_notebook, in_script))
            return "the notebook has {}, the script {}".format(*shown)
    return "its kind or its tags"


def for_some_ranks(line):
    """Return whether `line` begins a cell for some ranks, such as "%%ranks 0,2"; in a script it follows "# "."""
    magic, *options = line.removeprefix("# ").split(maxsplit=1) or [""]
    with suppress(ValueError):  # the magic refuses it
        return magic == "%%ranks" and read_line("".join(options)).ranks is not None
    return False


def refuse_some_ranks(lesson):
    """Raise PairError if a cell begins with `%%ranks 2`: in the script its lines would run on every rank."""
    for path in (lesson.notebook, lesson.script):
        for number, cell in enumerate(read(path).cells if path.exists() else [], 1):
            first = cell.source.strip().partition("\n")[0]
            if for_some_ranks(first):
                raise PairError(f"cell {number} of {path.name} begins with {first!r}: {SOME_RANKS}")


def check(lesson):
    """Raises PairError if the lesson's notebook and script differ: what would run is not what was written."""
    refuse_some_ranks(lesson)
    if found := difference(lesson):
        cure = f"then `make sync LESSON={lesson.number}` writes what was saved last into the other"
        raise PairError(f"{found}; save the notebook, {cure}")


def stale_script(script: str | Path) -> str:
    """One line if the notebook beside `script` was saved after it and holds other cells, else "".

    Under a launcher the script's old lines would run without a word. What cannot be read is no news. One line, too, if
    a cell of the script is for some ranks only.
    """
    script = Path(script).absolute()
    with suppress(OSError, UnicodeDecodeError):
        if found := next(filter(for_some_ranks, script.read_text("utf-8").splitlines()), None):
            return f"a cell of {script.name} begins with {found.removeprefix('# ')!r}: {SOME_RANKS}"
    lesson = Lesson(script.stem, script.parents[1])
    here = lesson.notebook.exists() and script.exists()  # a program that joins by a lesson's name has none of it
    if not here or lesson.notebook.stat().st_mtime <= script.stat().st_mtime:
        return ""
    with suppress(PairError):
        if found := difference(lesson):
            was = f"{script.name} runs as it was before {lesson.notebook.name} was saved"
            cure = "Save the notebook in JupyterLab, which writes the script"  # somebody's own, which sync leaves alone
            if lesson in find_lessons(lesson.root):
                cure = f"`make sync LESSON={lesson.number}` writes the notebook into the script"
            return f"{was} ({found}). {cure}"
    return ""


def identical(lesson):
    """Return whether the notebook, written as a script, equals the script to the last blank line.

    JupyterLab does not open a notebook that is newer than a script from which it differs. After `git clone` either of
    the two may be newer, so the pairs of the course are identical.
    """
    both_there = lesson.notebook.exists() and lesson.script.exists()
    return both_there and as_script(read(lesson.notebook)) == lesson.script.read_text("utf-8")


def sync(lesson, some_ranks=False):
    """Write the form that was saved last into the other. Returns a sentence about what it did.

    Outputs of the notebook are kept. Raises PairError where both forms were saved within the same second, and where
    a cell is for some ranks only, unless `some_ranks` permits that.
    """
    if not some_ranks:
        refuse_some_ranks(lesson)
    found = difference(lesson)
    if found is None and identical(lesson):
        return f"{lesson.name}: notebook and script are the same"
    if found is None:
        _write_from_script(lesson)
        return f"{lesson.name}: the same cells; blank lines and header of the notebook are now the script's, too"
    times = {path: path.stat().st_mtime for path in (lesson.notebook, lesson.script) if path.exists()}
    if len(times) == 2 and abs(times[lesson.notebook] - times[lesson.script]) < 1:
        raise PairError(f"{found}; both were saved at the same time, so save the one that you want to keep again")
    newer = max(times, key=times.get)
    if newer == lesson.script:
        _write_from_script(lesson)
    else:
        notebook = read(lesson.notebook)
        if lesson.script.exists():  # another kernel chosen in the browser is no change of the lesson
            notebook.metadata = read(lesson.script).metadata
        lesson.script.parent.mkdir(exist_ok=True)
        write_whole(lesson.script, as_script(notebook))
    return f"{lesson.name}: wrote {newer.name} into the {'notebook' if newer == lesson.script else 'script'} ({found})"


def as_script(notebook):
    """The text of `notebook` as a script; what the browser and papermill note in cells stays out."""
    import jupytext

    for cell in notebook.cells:
        cell.metadata = _only(cell.metadata, KEPT_CELL_METADATA)
    return jupytext.writes(notebook, fmt="py:percent")


def as_notebook(notebook):
    """The text of `notebook` as an .ipynb file, without what changes from run to run: times, random cell names.

    Where there are outputs, the cells have numbers in their order: nbval takes a cell without one for a cell that never
    ran.
    """
    import nbformat

    notebook.metadata = {**_only(notebook.metadata, KEPT_METADATA), "language_info": LANGUAGE}
    # saved in JupyterLab, a notebook does not say how its script is written
    notebook.metadata["jupytext"] = {
        name: value for name, value in notebook.metadata.get("jupytext", {}).items() if name != "text_representation"
    }
    seen, code = {}, [cell for cell in notebook.cells if cell.cell_type == "code"]
    ran = any(cell.outputs for cell in code)
    for number, cell in enumerate(code, 1):
        cell.execution_count = number if ran else None
        for result in (output for output in cell.outputs if output.output_type == "execute_result"):
            result.execution_count = cell.execution_count
    for cell in notebook.cells:
        cell.metadata = _only(cell.metadata, KEPT_CELL_METADATA)
        name = hashlib.sha1(f"{cell.cell_type}{cell.source}".encode()).hexdigest()[:10]
        seen[name] = seen.get(name, 0) + 1
        cell["id"] = name if seen[name] == 1 else f"{name}-{seen[name]}"
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return nbformat.writes(notebook, 4) + "\n"


def _only(metadata, names):
    return {name: metadata[name] for name in names if metadata.get(name) not in (None, [], {})}


def _with_outputs(notebook, old_path):
    """`notebook` with the outputs of those code cells that are unchanged in the old file, in their order."""
    old = {}
    if old_path.exists():
        for cell in read(old_path).cells:
            if cell.cell_type == "code":
                old.setdefault(cell.source, []).append(cell)
    for cell in notebook.cells:
        if cell.cell_type == "code" and old.get(cell.source):
            cell.outputs = old[cell.source].pop(0).outputs
    return notebook


def _write_from_script(lesson):
    """Write the notebook from the script, and the script as saving that notebook would write it."""
    notebook = read(lesson.script)
    text = as_script(notebook)
    if text != lesson.script.read_text("utf-8"):
        write_whole(lesson.script, text)
    lesson.notebook.parent.mkdir(exist_ok=True)
    write_whole(lesson.notebook, as_notebook(_with_outputs(notebook, lesson.notebook)))


def store_outputs(lesson, timeout_s=600):
    """Run the lesson's notebook (made from the script) with papermill and store its outputs in it."""
    import nbformat
    import papermill

    began = time.monotonic()
    _write_from_script(lesson)
    with tempfile.TemporaryDirectory() as folder:
        executed = Path(folder) / lesson.notebook.name
        os.environ["MANYHANDS_LIVE"] = "0"
        papermill.execute_notebook(
            str(lesson.notebook), str(executed), cwd=str(lesson.notebook.parent), progress_bar=False,
            kernel_name="manyhands", execution_timeout=timeout_s,
        )  # fmt: skip
        text = executed.read_text("utf-8").replace(sys.executable, "python").replace(f"{lesson.root}/", "")
        notebook = nbformat.reads(text, 4)  # without the paths of this machine
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                raise PairError(f"{lesson.name}: a cell wrote to stderr: {output.text[:200]!r}")
    notebook.metadata = read(lesson.script).metadata
    write_whole(lesson.notebook, as_notebook(notebook))
    return f"{lesson.name}: outputs stored after {time.monotonic() - began:.0f} s"


def reported(act) -> int:
    """Print what `act()` returns, and return 0; or print why it cannot be, and return 2."""
    try:
        if text := act():
            print(text, flush=True)
    except (PairError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def for_lessons(action, names) -> int:
    """Print what `action(lesson)` returns for each lesson named, or for all: status 0, or 2 and what went wrong.

    A lesson that goes wrong does not stop those that follow. What is no lesson is named.
    """
    try:
        status = max((reported(partial(action, lesson)) for lesson in find_lessons(course_here(), names)), default=0)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for sentence in left_alone(course_here(), names):
        print(sentence, flush=True)
    return status


def main(arguments=None):
    actions = {"check": check, "sync": sync, "notebooks": store_outputs}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=actions)
    parser.add_argument("names", nargs="*", metavar="LESSON")
    options = parser.parse_args(arguments)
    return for_lessons(actions[options.action], options.names)


if __name__ == "__main__":
    from manyhands.launch.entry import run_program

    run_program("pairs", main)
