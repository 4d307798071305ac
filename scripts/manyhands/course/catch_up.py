"""Take functions and classes out of a lesson by name, without running the lesson.

    catch_up(globals(), "exchange", "ring_all_reduce")      # define those that are not there yet

A section that needs definitions from above starts with such a call, so that it runs after the start cells alone.
Nothing is written twice: what is defined comes from the cells of the lesson's script. What you have run, or written
yourself, stays. A stub that nobody has filled in counts as missing: the folded solution takes its place.

A solution is text in both forms of a lesson: a Python block in `<details>`, which no reader shows before a click.
"""

import ast
import dis
import functools
import linecache
import re
from types import CodeType, FunctionType

from manyhands.course.folders import script_of

BLANK = "____"  # what a learner replaces, in an expression
FOLD = re.compile(r"^# <details><summary>Solution (\w+)</summary>\n#\n# ```python\n(.*?)^# ```$", re.M | re.S)


def catch_up(lesson, *names):
    """Define the `names` that `lesson` (the caller's globals(), which hold `ranks`) has not defined yet, in this order.

    Rank 0 prints what it has defined and kept; nothing where all of it was there.
    Raises NameError for a name that the lesson does not define.
    """
    missing = [name for name in names if _is_missing(lesson, name)]
    _define(lesson, missing)
    if missing and getattr(lesson["ranks"], "rank", 1) == 0:
        kept = ", ".join(name for name in names if name not in missing)
        print(f"catch_up: {', '.join(missing)} as the course has it" + f"; {kept} as you have it" * bool(kept))


def _define(lesson, names):
    script = script_of(lesson["ranks"].lesson)
    found = _definitions(script) if names else {}
    for name in names:
        if name not in found:
            raise NameError(f"{script.name} defines no {name!r}; it defines {', '.join(sorted(found))}")
        # with a file and lines that exist, so that a traceback points to them
        file, nodes = found[name]
        wanted = [node for node in nodes if getattr(node, "name", name) == name or node.name not in lesson]
        exec(compile(ast.Module(wanted, []), file, "exec"), lesson)  # noqa: S102


def go_on_without(*functions):
    """Put the lesson's own lines in the place of `functions`, stubs that a check found not attempted.

    Returns the names of those that were replaced in the notebook or script that defines them.
    """
    replaced = []
    for function in functions:
        lesson, name = getattr(function, "__globals__", {}), getattr(function, "__name__", "")
        if "ranks" not in lesson or lesson.get(name) is not function:
            continue
        if name in _definitions(script_of(lesson["ranks"].lesson)):
            del lesson[name]
            _define(lesson, [name])
            replaced.append(name)
    return replaced


def solutions(text):
    """{"A": the lines of the folded solution of build A} of a lesson's script."""
    return {label: re.sub(r"^# ?", "", lines, flags=re.M) for label, lines in FOLD.findall(text)}


def whose(script, name):
    """A sentence on where the lesson `script` defines `name`, and which cells to run; "" where it does not.

    Raises OSError or SyntaxError where the script cannot be read.
    """
    text = script.read_text("utf-8")
    for node in ast.parse(text).body:
        if name not in _defined_by(node):
            continue
        headings = re.findall(r"^# #+ (.+)", "\n".join(text.splitlines()[: node.lineno]), re.MULTILINE)
        heading = headings[-1] if headings else "the lesson's first cells"
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            return f'{name} is defined below "{re.sub(r" [(][^()]*[)]$", "", heading)}": run the cells there first.'
        call = f'catch_up(globals(), "{name}")'
        if task := re.match(r"((Build|Exercise) \w+)\b", heading):
            return f"{name} is {task[1]}'s: run that cell, or {call}."
        return f'{name} is defined below "{re.sub(r" [(][^()]*[)]$", "", heading)}": run that cell, or {call}.'
    return ""


def _defined_by(node):
    """The names that a statement of a cell defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {(one.asname or one.name).split(".")[0] for one in names}
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


DEFINITIONS = ast.FunctionDef, ast.ClassDef


def _definitions(script):
    """{name: (file, nodes that define it)} of a lesson; a solution is taken with its imports and helpers."""
    return _definitions_of(script, script.read_text("utf-8"))


@functools.lru_cache(maxsize=1)  # each check of an exercise that is not attempted asks for them
def _definitions_of(script, text):
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, DEFINITIONS) and not _is_stub(node):
            found[node.name] = script, [node]
    for label, lines in solutions(text).items():
        file, nodes = f"{script.name}, solution {label}", ast.parse(lines).body
        linecache.cache[file] = len(lines), None, lines.splitlines(keepends=True), file
        found |= {node.name: (file, nodes) for node in nodes if isinstance(node, DEFINITIONS)}
    return found


def _is_missing(lesson, name):
    return name not in lesson or _is_unwritten(lesson[name])


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
