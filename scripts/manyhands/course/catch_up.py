"""Take functions and classes out of a lesson by name, without running the lesson.

    catch_up(globals(), "exchange", "ring_all_reduce")      # define those that are not there yet

A section that needs definitions from above starts with such a call, so that it runs after the start cells alone.
Nothing is written twice: what is defined comes from the cells of the lesson's script. What you have run, or written
yourself, stays; so in a script nothing happens. Of an exercise's stub and its solution, the solution is taken, also in
the place of a stub that you have run and not filled in. In an attendee's copy the solutions lie in SOLUTIONS, where
nobody stumbles upon them; `show_solution(globals(), "exchange")` prints one.
"""

import ast
import base64
import dis
import re
import zlib
from types import CodeType, FunctionType

from manyhands.course.folders import script_of, write_whole

BLANK = "____"  # what a learner replaces, in an expression
SOLUTIONS = ".solutions"  # beside scripts/ in an attendee's copy: each lesson as the course has it, packed


def catch_up(lesson, *names):
    """Define the `names` that `lesson` (the caller's globals(), which hold `ranks`) has not defined yet, in this order.

    Rank 0 prints what it has defined and kept; nothing where all of it was there.
    Raises NameError for a name that the lesson does not define.
    """
    missing = [name for name in names if name not in lesson or _is_unwritten(lesson[name])]
    if missing:
        script = script_of(lesson["ranks"].lesson)
        found = _found(script, missing)
        for name in missing:
            # the file's name and lines stay, so that a traceback points into the lesson
            exec(compile(ast.Module([found[name][1]], []), script, "exec"), lesson)  # noqa: S102
        if getattr(lesson["ranks"], "rank", 1) == 0:
            kept = ", ".join(name for name in names if name not in missing)
            print(f"catch_up: {', '.join(missing)} as the course has it" + f"; {kept} as you have it" * bool(kept))


def show_solution(lesson, name):
    """Print the course's own lines of `name`; `lesson` is the caller's globals(). On several ranks rank 0 prints them.

    Raises NameError for a name that the lesson does not define.
    """
    script = script_of(lesson["ranks"].lesson)
    text, node = _found(script, [name])[name]
    if lesson["ranks"].rank == 0:
        print(ast.get_source_segment(text, node))


def pack_solutions(text, script):
    """Keep `text`, the whole lesson, for catch_up in the copy in which `script` is the lesson without solutions."""
    packed = _packed(script)
    packed.parent.mkdir(exist_ok=True)
    write_whole(packed, base64.b64encode(zlib.compress(text.encode(), 9)))


def _packed(script):
    return script.parent.parent / SOLUTIONS / script.stem


def _found(script, names):
    """{name: (text of the lesson, node)}: solutions win over stubs. Raises NameError."""
    text = script.read_text("utf-8")
    found = _definitions(text)
    if _packed(script).exists() and any(name not in found for name in names):
        packed = zlib.decompress(base64.b64decode(_packed(script).read_bytes())).decode()
        found = _definitions(packed) | found
    for name in names:
        if name not in found:
            raise NameError(f"{script.name} defines no {name!r}; it defines {', '.join(sorted(found))}")
    return found


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
            return f"{name} is {task[1]}'s: run that cell, its solution, or {call}."
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


def _definitions(text):
    return {
        node.name: (text, node)
        for node in ast.parse(text).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not _is_stub(node)
    }


def has_blanks(value):
    """Whether a function still holds a blank, the name `____`, as it is handed out."""
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
