"""Bring what a cell of a lesson needs and nobody has defined yet: functions and classes, as the course has them.

    wanted, stars = reads(cell)                            # names that the cell reads before it binds them
    missing = lacking(globals(), wanted, stars, graph)     # of these, and of what they read in turn, what is not there
    define(globals(), pieces)

So a section runs after the start cells alone, and a stub that nobody has filled in gives way to the folded solution.
What you have written stays. Values are never brought: `x` and `loss` mean other things in each section; nor what the
start cells define. Nothing is written twice: definitions come from the lesson as it was handed out, never from the
script beside the notebook, which holds your answers.

A solution is text in both forms of a lesson: a Python block in `<details>`, which no reader shows before a click.
"""

import ast
import builtins
import contextlib
import difflib
import dis
import functools
import importlib
import linecache
import re
import subprocess
from inspect import CO_OPTIMIZED
from types import CodeType, FunctionType
from typing import NamedTuple

from manyhands.course.folders import script_of
from manyhands.course.lessons import ORIGINALS

BLANK = "____"  # what a learner replaces, in an expression
FOLD = re.compile(r"^# <details><summary>Solution (\w+)</summary>\n#\n# ```python\n(.*?)^# ```$", re.M | re.S)
CELL = re.compile(r"^# %%(| .*)\n((?:(?!# %%(?: |$)).*\n?)*)", re.M)
AT_ONCE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")  # code that runs where it stands
NOT_HERE = object()


class Piece(NamedTuple):
    """A function, a class or an import of a lesson, with what a rank needs to define it."""

    name: str
    file: str  # as a traceback names it
    text: str  # of the cell, or of the solution
    reads: frozenset
    is_import: bool = False


class Outline(NamedTuple):
    """The names of a lesson."""

    pieces: dict[str, Piece]  # of its functions, classes and imports, in their order
    start: frozenset  # what the start cells bind
    headings: dict[str, str]  # {name: the heading below which it is bound}
    begin: str  # the start cells of ranks, which fresh ones run by themselves; not the parameters, which they are given

    def graph(self):
        """{name: (what it reads, whether it is an import)} of what the start cells do not bind, for `lacking`."""
        return {name: (one.reads, one.is_import) for name, one in self.pieces.items() if name not in self.start}


# ------------------------------------------------------------------ a lesson


@functools.cache
def outline(lesson):
    """Return the Outline of a lesson as it was handed out. Raise FileNotFoundError where there is no such lesson."""
    return outline_of(original(script_of(lesson)), lesson)


def original(script):
    """Return the text of a lesson's script as it was handed out: the copy's original, the commit's, else as it is."""
    root = script.parents[1]
    kept = root / ORIGINALS / "scripts" / script.name
    if kept.exists():
        return kept.read_text("utf-8")
    show = ["git", "-C", str(root), "show", f"HEAD:./scripts/{script.name}"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return subprocess.run(show, capture_output=True, check=True, timeout=20).stdout.decode("utf-8")
    return script.read_text("utf-8")


def outline_of(text, lesson="a lesson"):
    """Return the Outline of a script's text. A cell that does not parse is left out."""
    pieces, start, headings, begin = {}, set(), {}, []
    heading, sections = "the lesson's first cells", 0
    for kind, cell in CELL.findall(text):
        if "[markdown]" in kind:
            for level, title in re.findall(r"^# (##+) (.+)", cell, re.M):
                heading, sections = title, sections + (level == "##")
            for label, lines in solutions(cell).items():
                _add(pieces, lines, f"{lesson}.py, solution {label}", solution=True)
            continue
        names = _add(pieces, cell, f"{lesson}.py, below {heading!r}")
        start |= names if sections < 2 else set()
        begin += [cell] if sections == 1 and cell.startswith("# %%ranks") else []
        headings = {**dict.fromkeys(names, heading), **headings}
    return Outline(pieces, frozenset(start), headings, "\n".join(begin))


def _add(pieces, text, file, solution=False):
    """Add a cell's functions, classes and imports to `pieces`; return all names that it binds."""
    try:
        nodes = ast.parse(text).body
    except SyntaxError:
        return set()
    names = set()
    for node in nodes:
        own = _bound_by(node)
        names |= own
        is_import = isinstance(node, (ast.Import, ast.ImportFrom))
        if not is_import and (not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or _is_stub(node)):
            continue
        # a solution is taken with its imports and helpers
        found = reads(ast.Module(nodes if solution else [node], []), in_use=True)[0]
        for name in own:
            if not is_import or name not in pieces:
                pieces[name] = Piece(name, file, text, frozenset(found), is_import)
    return names


def solutions(text):
    """{"A": the lines of the folded solution of build A} of a lesson's script."""
    return {label: re.sub(r"^# ?", "", lines, flags=re.M) for label, lines in FOLD.findall(text)}


def whose(lesson, name):
    """Return a sentence on a name that a cell misses: which cells bind it, or which name is near; "" if none is."""
    known = outline(lesson)
    if heading := known.headings.get(name):
        if task := re.match(r"((Build|Exercise) \w+)\b", heading):
            return f"{name} is {task[1]}'s: run that cell."
        what = "that cell" if name in known.graph() else "the cells there first"
        return f'{name} is defined below "{re.sub(r" [(][^()]*[)]$", "", heading)}": run {what}.'
    near = difflib.get_close_matches(name, known.headings, 1, 0.75)
    return f"{name} is not defined; {near[0]} is. Is it misspelt?" if near else ""


# ------------------------------------------------------------------ what a cell needs


def reads(source, in_use=False):
    """Return (names that a cell reads before it binds them, modules of which it imports all names).

    `source` is text or a tree. What a function or class of the cell reads counts if the cell uses that function, or
    with `in_use`: what is only defined is looked at when a cell calls it. Raise SyntaxError for what is no Python.
    """
    code = compile(source, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    found, bound, stars = _first_uses(code, of_a_cell=not in_use)
    return found - bound, stars


def _first_uses(code, of_a_class=False, of_a_cell=False):
    """(names read first, names bound first, modules imported whole) of code, in the order of its steps."""
    found, bound, later, stars, module, used = set(), set(), {}, set(), "", {"<lambda>"}
    for step in dis.get_instructions(code):
        name = step.argval
        if step.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
            used.add(name)
            found |= {name} - bound
        elif step.opname in ("STORE_NAME", "STORE_GLOBAL") and name not in found:
            bound.add(name)
        elif step.opname == "IMPORT_NAME":
            module = name
        elif "IMPORT_STAR" in (step.opname, step.argrepr.removeprefix("INTRINSIC_")):
            stars.add(module)
        elif isinstance(name, CodeType):
            is_class = not name.co_flags & CO_OPTIMIZED
            inner, _, more = _first_uses(name, of_a_class=is_class)
            stars |= more
            if name.co_name in AT_ONCE:
                used |= inner
                found |= inner - bound
                continue
            if of_a_cell and is_class:  # its body runs now, its methods when they are called
                found |= _first_uses(name, of_a_class=True, of_a_cell=True)[0] - bound
            later.setdefault(name.co_name, set()).update(inner)
    todo = list(used if of_a_cell else later)
    asked = set()
    while todo:
        name = todo.pop()
        new = later.pop(name, set())
        asked |= new
        todo += new
    # the methods of a class do not see what its body binds
    return found | (asked if of_a_class else asked - bound), bound, stars


def lacking(namespace, wanted, stars, graph):
    """Return which of the names in `graph` a cell needs here and does not find, sorted.

    Looked at are the names `wanted`, what each missing one reads, and what functions and classes that are here read.
    """
    alone, todo, seen, missing = set(dir(builtins)), [(name, False) for name in wanted], set(), set()
    for star in stars:
        with contextlib.suppress(Exception):  # the cell itself will say what is wrong with it
            alone.update(vars(importlib.import_module(star)))
    while todo:
        name, is_read_by_ours = todo.pop()
        if name in seen or name in alone:
            continue
        value = namespace.get(name, NOT_HERE)
        found, is_import = graph.get(name, ((), False))
        if value is not NOT_HERE and not _is_unwritten(value):
            seen.add(name)
            todo += [(other, False) for other in _read_by(value, namespace)]
        elif name in graph and (is_read_by_ours or not is_import):
            seen.add(name)
            missing.add(name)
            todo += [(other, True) for other in found]
    return sorted(missing)


def _read_by(value, namespace):
    """The names that a function or a class of this namespace reads."""
    parts = [value, *vars(value).values()] if isinstance(value, type) else [value]
    functions = [getattr(part, "__func__", getattr(part, "fget", part)) for part in parts]
    own = [one.__code__ for one in functions if isinstance(one, FunctionType) and one.__globals__ is namespace]
    return set().union(*(_first_uses(code)[0] for code in own)) if own else set()


def define(namespace, pieces):
    """Define the `pieces`, in their order, each with the imports and helpers that a solution has."""
    for name, file, text, *_ in pieces:
        # with a file and lines that exist, so that a traceback points to them
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
        nodes = [node for node in ast.parse(text).body if _bound_by(node)]
        if "solution" not in file:
            nodes = [node for node in nodes if name in _bound_by(node)]
        taken = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
        nodes = [
            node for node in nodes
            if isinstance(node, taken) and (name in _bound_by(node) or not _bound_by(node) <= namespace.keys())
        ]  # fmt: skip
        exec(compile(ast.Module(nodes, []), file, "exec"), namespace)  # noqa: S102


def bring(namespace, lesson, source):
    """Define what a cell needs in `namespace`; return the names. A cell that is no Python needs nothing."""
    known = outline(lesson)
    try:
        wanted, stars = reads(source)
    except SyntaxError:
        return []
    missing = lacking(namespace, wanted, stars, known.graph())
    define(namespace, [piece for name, piece in known.pieces.items() if name in missing])
    return missing


def said(names, lesson):
    """Return the line that says what was brought, imports left out; "" for none of them."""
    own = [name for name, piece in outline(lesson).pieces.items() if name in names and not piece.is_import]
    return f"not there yet, so as the course has it: {', '.join(own)}" if own else ""


def go_on_without(*functions):
    """Put the lesson's own lines in the place of `functions`, stubs that a check found not attempted.

    Returns the names of those that were replaced in the notebook or script that defines them.
    """
    replaced = []
    for function in functions:
        namespace, name = getattr(function, "__globals__", {}), getattr(function, "__name__", "")
        if "ranks" not in namespace or namespace.get(name) is not function:
            continue
        if piece := outline(namespace["ranks"].lesson).pieces.get(name):
            del namespace[name]
            define(namespace, [piece])
            replaced.append(name)
    return replaced


# ------------------------------------------------------------------ stubs


def _bound_by(node):
    """The names that a statement of a cell binds."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {(one.asname or one.name).split(".")[0] for one in names}
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def has_blanks(value):
    """Return whether a function still holds a blank, the name `____`, as handed out."""
    return isinstance(value, FunctionType) and _names_a_blank(value.__code__)


def _names_a_blank(code):
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return BLANK in code.co_names or any(map(_names_a_blank, inner))


def _is_stub(node):
    """The body of an exercise's stub, after a docstring, is a raise; or it has a blank somewhere."""
    names = (getattr(one, "id", getattr(one, "attr", None)) for one in ast.walk(node))
    if BLANK in names:
        return True
    lines = [line for line in node.body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))]
    return bool(lines) and isinstance(lines[0], ast.Raise)


def _is_unwritten(value):
    """The same of a function that has been defined."""
    if not isinstance(value, FunctionType):
        return False
    if has_blanks(value):
        return True
    steps = [(step.opname, step.argval) for step in dis.get_instructions(value) if step.opname != "RESUME"]
    return steps[:1] == [("LOAD_GLOBAL", "NotImplementedError")] and steps[1][0] == "RAISE_VARARGS"
