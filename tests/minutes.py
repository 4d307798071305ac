"""How many minutes a lesson's CORE takes a learner: an estimate, the same for all lessons, beside what the lesson says.

    PYTHONPATH=scripts python tests/minutes.py [LESSON ...]

What readers with a watch took: 200 words of prose and 12 lines of visible code per minute, 0.75 minutes per prediction,
4 per build, 5 per exercise, 2 for waiting. Solutions, notes, folded code, imports and blank lines do not count.
"""

import ast
import re
import sys
from dataclasses import dataclass

from manyhands.course.pairs import PairError, for_lessons, read

SHARED = "manyhands.train.shakespeare"  # what several lessons take from the package in the place of their own harness

WORDS, LINES = 200, 12  # per minute
PREDICTION, BUILD, EXERCISE, WAIT = 0.75, 4, 5, 2  # minutes each


@dataclass
class Section:
    """A stretch of a section (`##`) that is all CORE or all MORE; its minutes as its heading states, and estimated."""

    name: str
    core: bool
    stated: int | None
    minutes: float = 0.0


def sections(lesson) -> list[Section]:
    """The lesson's stretches of CORE and MORE, its head first. A heading marked MORE ends CORE up to the next."""
    found = [Section("head", True, None)]
    for cell in read(lesson.script).cells:
        tags = cell.metadata.get("tags", [])
        if "notes" in tags or "solution" in tags:
            continue
        if cell.cell_type == "markdown":
            for level, title in re.findall(r"^(##+) (.*)$", cell.source, re.M):
                name, minutes = re.sub(r" \((CORE|MORE).*", "", title), re.search(r"(\d+) min", title)
                if level == "##":
                    section_core = "(MORE" not in title
                core = section_core and "(MORE" not in title
                if level == "##" or core != found[-1].core or minutes:
                    name = name if level == "##" else found[-1].name
                    found.append(Section(name, core, int(minutes[1]) if minutes else None))
            found[-1].minutes += _reading(cell.source)
        elif not cell.metadata.get("jupyter", {}).get("source_hidden"):
            lines = [line for line in cell.source.splitlines() if line.strip()]
            found[-1].minutes += sum(not re.match(r"# %%|%%|import |from .* import ", line) for line in lines) / LINES
    return found


def _reading(text):
    minutes = PREDICTION * len(re.findall(r"\*\*Predict", text))
    minutes += BUILD * len(re.findall(r"^#+ Build [A-Z]\b", text, re.M))
    minutes += EXERCISE * len(re.findall(r"^#+ Exercise \d", text, re.M))
    prose = re.sub(r"!\[.*?\]\(.*?\)|```.*?```", "", text, flags=re.S)
    return minutes + len(prose.split()) / WORDS


def of_the_learner(lesson) -> tuple[float, int, int]:
    """Return (minute of the learner's first own line, number of their own lines, visible lines of code) in CORE.

    The learner writes lines with a blank, `____`, and those of a solution that its stub lacks.
    """
    minutes, first, own, visible, core, stub = float(WAIT) / 2, None, 0, 0, True, set()
    for cell in read(lesson.script).cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "markdown":
            for level, title in re.findall(r"^(##+) (.*)$", cell.source, re.M):
                if level == "##":
                    section_core = "(MORE" not in title
                core = section_core and "(MORE" not in title
        if not core or "notes" in tags:
            continue
        source = re.sub(r"^from \S+ import \([^)]*\).*$|^(import|from) .*$", "", cell.source, flags=re.M)
        code = [line.strip() for line in source.splitlines() if line.strip() and not re.match(r"#|%%", line)]
        if "solution" in tags:
            body = re.search(r"```python\n(.*?)^```", re.sub(r'""".*?"""', "", source, flags=re.S), re.M | re.S)[1]
            body = [line.strip() for line in body.splitlines() if line.strip() and not re.match(r"\s*#", line)]
            own += sum(line not in stub for line in body)
        elif cell.cell_type == "markdown":
            minutes += _reading(cell.source)
        else:
            if re.search(r"NotImplementedError|your turn|____", source):
                first = minutes if first is None else first
                stub = set(code)
                own += sum("____" in line for line in code)
            if not cell.metadata.get("jupyter", {}).get("source_hidden"):
                visible += len(code)
                minutes += len(code) / LINES
    return minutes if first is None else first, own, visible


def core_cells(cells):
    """The code cells of CORE, without notes and solutions, each as (cell, whether a page or JupyterLab hides it)."""
    section = core = True
    for cell in cells:
        meta, tags = cell.metadata, cell.metadata.get("tags", [])
        if cell.cell_type == "markdown":
            for level, title in re.findall(r"^(##+) (.*)$", cell.source, re.M):
                section = "(MORE" not in title if level == "##" else section
                core = section and "(MORE" not in title
        elif core and not {"notes", "solution"} & set(tags):
            jupyter = meta.get("jupyter", {})
            hidden = jupyter.get("source_hidden") or meta.get("collapsed") or {"hide-input", "remove-input"} & set(tags)
            yield cell, bool(hidden or re.search(r"^\s*(exec\(|%run|%load)", cell.source, re.M))


def code_lines(source) -> int:
    """Count a cell's statements and comments, not imports; lines joined by `;` count apart."""
    source = re.sub(r"^from \S+ import \([^)]*\).*$|^(import|from) .*$", "", source, flags=re.M)
    lines = [line for line in source.splitlines() if line.strip() and not line.startswith("%%")]
    return len(lines) + sum(line.count(";") for line in lines if not re.search(r"[\"'#].*;", line))


def code_of_core(cells) -> tuple[int, int, int]:
    """Return (visible, folded, longest): lines of code of CORE that one sees, that run unseen, of the longest cell.

    The longest is looked for in MORE as well. Drawings count like all else.
    """
    told = [(code_lines(cell.source), hidden) for cell, hidden in core_cells(cells)]
    code = [
        cell for cell in cells
        if cell.cell_type != "markdown" and not {"notes", "solution"} & set(cell.metadata.get("tags", []))
    ]  # fmt: skip
    visible, folded = (sum(count for count, hidden in told if hidden == which) for which in (False, True))
    return visible, folded, max((code_lines(cell.source) for cell in code), default=0)


def reached(cells, module: str, text: str) -> tuple[int, int]:
    """Return (lines of a module that CORE runs, lines of its drawings): of what cells use, and what that uses in turn.

    A function or method named `draw...` is a drawing, and so is what only drawings use. Docstrings do not count.
    """
    defined = {node.name: node for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    lines = "\n".join(cell.source for cell, _ in core_cells(cells)).splitlines()
    used = _taken(ast.parse("\n".join(line for line in lines if not re.match(r"\s*[%!]", line))), module)
    plain = _closure({one for one in used if not one.startswith("draw")}, defined)
    drawn = _closure(used, defined, drawings=True) - plain
    drawings = [defined[one] for one in drawn] + [part for one in plain for part in _drawings(defined[one])]
    return sum(_count(defined[one]) for one in plain), sum(_count(one, drawings=True) for one in drawings)


def _taken(tree, module):
    """The names of `module` that a lesson imports, or takes as attributes of the name under which it has the module."""
    package, name = module.rsplit(".", 1)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    known_as = {a.asname or a.name for node in imports if node.module == package for a in node.names if a.name == name}
    taken = {alias.name for node in imports if node.module == module for alias in node.names}
    return taken | {
        node.attr for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known_as
    }  # fmt: skip


def _closure(names, defined, drawings=False):
    found, todo = set(), [name for name in names if name in defined]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        skipped = [] if drawings else [id(inner) for part in _drawings(defined[name]) for inner in ast.walk(part)]
        read = {node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name) and id(node) not in skipped}
        todo += [other for other in read if other in defined]
    return found


def _drawings(node):
    """The methods of a class that draw."""
    inner = node.body if isinstance(node, ast.ClassDef) else []
    return [one for one in inner if isinstance(one, ast.FunctionDef) and one.name.startswith("draw")]


def _count(node, drawings=False):
    """The lines of a definition, without docstrings, and without the drawings of a class."""
    bare = ast.parse(ast.unparse(node)).body[0]
    if isinstance(bare, ast.ClassDef) and not drawings:
        bare.body = [one for one in bare.body if not (isinstance(one, ast.FunctionDef) and one.name.startswith("draw"))]
    for one in ast.walk(bare):
        if isinstance(one, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(one) is not None:
            one.body = one.body[1:] or [ast.Pass()]
    return sum(bool(line.strip()) for line in ast.unparse(bare).splitlines())


def unseen(lesson) -> tuple[int, int, int]:
    """Return (visible, unseen, drawing) lines of CORE; unseen is folded, or in the lesson's module of the package.

    What a lesson takes from SHARED in the place of its own harness counts as unseen, too.
    """
    cells = read(lesson.script).cells
    visible, folded, _ = code_of_core(cells)
    found = [0, 0]
    for module in (f"manyhands.lessons.{lesson.script.stem[3:]}", SHARED):
        path = lesson.root / "scripts" / f"{module.replace('.', '/')}.py"
        if path.exists():
            found = [a + b for a, b in zip(found, reached(cells, module, path.read_text("utf-8")), strict=True)]
    return visible, folded + found[0], found[1]


def estimate(found, core_only=True) -> float:
    """Minutes of the CORE, or of everything, with the waiting."""
    return WAIT + sum(part.minutes for part in found if part.core or not core_only)


def stated(lesson) -> tuple[int, int]:
    """(minutes of the CORE, minutes of everything) as the lesson's head says. Raises PairError where it does not."""
    head = read(lesson.script).cells[0].source
    said = re.search(r"\*\*(\d+) minutes\*\*", head), re.search(r"(\d+) with those marked MORE", head)
    if None in said:
        raise PairError(f"{lesson.name} does not say its minutes: **50 minutes** ..., 90 with those marked MORE")
    return tuple(int(found[1]) for found in said)


def report(lesson) -> str:
    """The lesson's minutes, stated and estimated, and below them those of its sections."""
    found, (core, everything) = sections(lesson), stated(lesson)
    whole = estimate(found, core_only=False)
    lines = [f"{lesson.name}: CORE {core} min stated, {estimate(found):.0f} estimated; all {everything}, {whole:.0f}"]
    for part in found:
        said = "-" if part.stated is None else part.stated
        lines.append(f"  {'CORE' if part.core else 'MORE'} {part.minutes:5.1f}  stated {said:>2}  {part.name}")
    return "\n".join(lines)


def main(arguments=None):
    return for_lessons(report, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
