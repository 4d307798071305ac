"""Is a script older than the notebook that it is a pair with? Asked at every start: plain JSON, no jupytext."""

import json
import re
from pathlib import Path

MARKER = re.compile(r"# %%(?: (?P<title>.*))?$")  # "# %% [markdown]", but not the magic "# %%ranks"
MAGIC = re.compile(r"# ?(?=[%!])")  # jupytext makes a comment of it


def stale_script(script):
    """One line if the notebook beside `script` was saved after it and holds other cells, else "".

    Under a launcher the script's old lines would run without a word. What cannot be read is no news.
    """
    script = Path(script).absolute()
    notebook = script.parent.parent / "notebooks" / f"{script.stem}.ipynb"
    try:
        if notebook.stat().st_mtime <= script.stat().st_mtime:
            return ""
        cells = json.loads(notebook.read_text("utf-8"))["cells"]
        ours = [_lines("".join(cell["source"]).splitlines()) for cell in cells]
        theirs = [_lines(lines) for lines in _cells(script.read_text("utf-8"))]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    if ours == theirs:
        return ""
    pairs = enumerate(zip(ours, theirs, strict=False), 1)
    number = next((n for n, (one, other) in pairs if one != other), min(len(ours), len(theirs)) + 1)
    lesson = script.stem.split("_")[0]
    return (
        f"{script.name} runs as it was before {notebook.name} was saved: they differ from cell {number} on. "
        f"`make sync LESSON={lesson}` writes the notebook into the script"
    )


def _cells(text):
    """The lines of each cell of a script in percent format, as the notebook has them."""
    cells = []
    commented = False
    for line in text.splitlines():
        if marker := MARKER.match(line):
            title = marker["title"] or ""
            commented = title.startswith(("[markdown]", "[raw]")) or '"active-ipynb"' in title
            cells.append([])
        elif cells:
            cells[-1].append(re.sub("^# ?", "", line) if commented else line)
    return cells


def _lines(lines):
    """What must be equal: blank lines and blanks at the end of a line are not."""
    return [MAGIC.sub("", line).rstrip() for line in lines if line.strip()]
