"""A lesson is one file in two forms, a notebook and a script, that jupytext keeps the same.

    python -m manyhands.pairs check [LESSON ...]       # exit status 2 and the first difference if a pair differs
    python -m manyhands.pairs sync [LESSON ...]        # the form that was saved last overwrites the other
    python -m manyhands.pairs notebooks [LESSON ...]   # run the notebooks and store their outputs
    python -m manyhands.pairs reset LESSON             # the lesson as it was, one's own work kept aside
    python -m manyhands.pairs copy FOLDER              # the course for attendees, without the instructor's notes

LESSON is "03" or "03_data_parallel"; none means all.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat

from manyhands.lessons import ROOT, find_lessons

KEPT_METADATA = ("jupytext", "kernelspec", "language_info")


class PairError(RuntimeError):
    """Notebook and script do not hold the same cells; the message says where and what to do."""


def read(path):
    """The notebook in `path`, whichever of the two forms it is."""
    return jupytext.read(path, fmt="py:percent" if path.suffix == ".py" else "ipynb")


def difference(lesson):
    """The first difference between the lesson's two forms as a sentence, or None if they hold the same cells.

    Compared are kind, source and tags of the cells, not outputs, and not the files' times.
    """
    for path in (lesson.notebook, lesson.script):
        if not path.exists():
            return f"{path.relative_to(lesson.root)} is missing"
    notebook, script = (read(path).cells for path in (lesson.notebook, lesson.script))
    for number, (ours, theirs) in enumerate(zip(notebook, script, strict=False), 1):
        if _essence(ours) != _essence(theirs):
            line = next((x for x in ours.source.splitlines() if x not in theirs.source.splitlines()), "")
            return f"cell {number} of {lesson.name} differs: the notebook has {line.strip()[:70]!r}"
    if len(notebook) != len(script):
        return f"{lesson.name} has {len(notebook)} cells as a notebook and {len(script)} as a script"
    return None


def _essence(cell):
    return cell.cell_type, cell.source.strip(), sorted(cell.metadata.get("tags", []))


def check(lesson):
    """Raises PairError if the lesson's notebook and script differ: what would run is not what was written."""
    if found := difference(lesson):
        number = lesson.number
        raise PairError(
            f"{found}; save the notebook, then `make sync LESSON={number}` writes what was saved last into the other"
        )


def sync(lesson):
    """Write the form that was saved last into the other. Returns a sentence about what it did.

    Outputs of the notebook are kept. Raises PairError where both forms were saved within the same second.
    """
    found = difference(lesson)
    if found is None:
        return f"{lesson.name}: notebook and script are the same"
    if not lesson.notebook.exists() or not lesson.script.exists():
        newer = lesson.script if lesson.script.exists() else lesson.notebook
    else:
        times = {path: path.stat().st_mtime for path in (lesson.notebook, lesson.script)}
        if abs(times[lesson.notebook] - times[lesson.script]) < 1:
            raise PairError(
                f"{found}; both were saved at the same time, so save the one that you want to keep again"
            )
        newer = max(times, key=times.get)
    if newer == lesson.script:
        _write_notebook(lesson, _with_outputs(read(lesson.script), lesson.notebook))
    else:
        _replace(lesson.script, jupytext.writes(read(lesson.notebook), fmt="py:percent"))
    return f"{lesson.name}: wrote {newer.name} into the {'notebook' if newer == lesson.script else 'script'} ({found})"


def _with_outputs(notebook, old_path):
    """`notebook` with the outputs of those code cells that are unchanged in the old file."""
    if old_path.exists():
        old = {}
        for cell in nbformat.read(old_path, 4).cells:
            if cell.cell_type == "code":
                old.setdefault(cell.source, cell)
        for cell in notebook.cells:
            if cell.cell_type == "code" and cell.source in old:
                cell.outputs = old[cell.source].outputs
                cell.execution_count = old[cell.source].execution_count
    return notebook


def _write_notebook(lesson, notebook):
    """Write without what changes from run to run: times, random cell names, the runner's own notes."""
    header = read(lesson.script).metadata if lesson.script.exists() else notebook.metadata
    notebook.metadata = {key: value for key, value in header.items() if key in KEPT_METADATA}
    seen = {}
    for cell in notebook.cells:
        cell.metadata = {k: v for k, v in cell.metadata.items() if k in ("tags", "jupyter") and v}
        name = hashlib.sha1(f"{cell.cell_type}{cell.source}".encode()).hexdigest()[:10]
        seen[name] = seen.get(name, 0) + 1
        cell["id"] = name if seen[name] == 1 else f"{name}-{seen[name]}"
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    lesson.notebook.parent.mkdir(exist_ok=True)
    _replace(lesson.notebook, nbformat.writes(notebook, 4) + "\n")


def _replace(path, text):
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, suffix=path.suffix) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def store_outputs(lesson, timeout_s=600):
    """Run the lesson's notebook (made from the script) with papermill and store its outputs in it."""
    import papermill

    _write_notebook(lesson, read(lesson.script))
    with tempfile.TemporaryDirectory() as folder:
        executed = Path(folder) / lesson.notebook.name
        os.environ["MANYHANDS_LIVE"] = "0"
        papermill.execute_notebook(
            str(lesson.notebook), str(executed), cwd=str(lesson.notebook.parent), progress_bar=False,
            kernel_name="manyhands", execution_timeout=timeout_s,
        )  # fmt: skip
        notebook = nbformat.read(executed, 4)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                raise PairError(f"{lesson.name}: a cell wrote to stderr: {output.text[:200]!r}")
    _write_notebook(lesson, notebook)


def reset(lesson):
    """The lesson as the course has it; what was there is kept under outputs/kept. Returns the folder kept in."""
    kept = lesson.root / "outputs" / "kept" / f"{lesson.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    originals = {path: _original(path, lesson.root) for path in (lesson.notebook, lesson.script)}
    kept.mkdir(parents=True)
    for path, text in originals.items():
        if path.exists():
            shutil.copy2(path, kept)
        _replace(path, text)
    return kept


def _original(path, root):
    """What the course has for `path`: the last commit, or the shared course beside the installed package."""
    name = path.relative_to(root).as_posix()
    shown = subprocess.run(["git", "show", f"HEAD:./{name}"], cwd=root, capture_output=True, text=True)
    if shown.returncode == 0:
        return shown.stdout
    if root != ROOT and (ROOT / name).exists():
        return (ROOT / name).read_text()
    raise PairError(
        f"there is no original of {name}: this is neither a git clone nor a copy of a shared course"
    )


def copy(target, root=ROOT):
    """Copy the course to `target`, a folder that does not exist yet, leaving out the instructor's notes."""
    target = Path(target)
    if target.exists():
        raise PairError(f"{target} exists already; name a folder that does not")
    left_out = shutil.ignore_patterns(
        ".git", ".venv", "outputs", "__pycache__", "*.egg-info", ".*_cache", ".ci"
    )
    shutil.copytree(root, target, ignore=left_out)
    for lesson in find_lessons(target):
        notebook = read(lesson.notebook)
        notebook.cells = [cell for cell in notebook.cells if "notes" not in cell.metadata.get("tags", [])]
        _replace(lesson.notebook, nbformat.writes(notebook, 4) + "\n")
        _replace(lesson.script, jupytext.writes(notebook, fmt="py:percent"))
    return target


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["check", "sync", "notebooks", "reset", "copy"])
    parser.add_argument("names", nargs="*")
    options = parser.parse_args(arguments)
    try:
        if options.action == "copy":
            print(f"copied to {copy(*options.names)}")
            return 0
        root = Path.cwd() if (Path.cwd() / "notebooks").is_dir() else ROOT
        if options.action == "reset" and not options.names:
            raise PairError("name the lesson to reset: make reset LESSON=03")
        for lesson in find_lessons(root, options.names):
            if options.action == "check":
                check(lesson)
            elif options.action == "sync":
                print(sync(lesson))
            elif options.action == "reset":
                print(f"{lesson.name} is as it was; your work is in {reset(lesson)}")
            else:
                began = time.monotonic()
                store_outputs(lesson)
                print(f"{lesson.name}: outputs stored after {time.monotonic() - began:.0f} s", flush=True)
    except (PairError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
