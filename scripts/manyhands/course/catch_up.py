"""Take functions and classes out of a lesson by name, without running the lesson.

    catch_up(globals(), "exchange", "ring_all_reduce")      # in a lesson: define those that are not there yet
    ours = taken_from("02_collectives", "exchange", rank=0)    # in a test: a namespace of its own
    ours.exchange

A section that needs definitions from above starts with such a call, so that it runs after the start cells alone. Nothing is
written twice: what is defined comes from the cells of the lesson's script. What you have run, or written yourself, stays;
so in a script nothing happens. Of an exercise's stub and its solution, the solution is taken.
"""

import ast
from types import SimpleNamespace

from manyhands.course.folders import script_of


def catch_up(lesson, *names):
    """Define the `names` that `lesson` (the caller's globals(), which hold `ranks`) has not defined yet, in this order.

    Raises NameError for a name that the lesson does not define.
    """
    missing = [name for name in names if name not in lesson]
    if missing:
        _define(script_of(lesson["ranks"].lesson), missing, lesson)


def taken_from(lesson, *names, **given):
    """A namespace with these definitions of a lesson, over its imports and the globals `given` that they use."""
    script = script_of(lesson)
    namespace = {"__name__": lesson}
    imports = [
        node
        for node in ast.parse(script.read_text("utf-8")).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    exec(compile(ast.Module(imports, []), script, "exec"), namespace)  # noqa: S102
    namespace.update(given)
    _define(script, names, namespace)
    return SimpleNamespace(**{name: namespace[name] for name in names})


def _define(script, names, namespace):
    body = ast.parse(script.read_text("utf-8")).body
    found = {
        node.name: node
        for node in body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not _is_stub(node)
    }
    for name in names:
        if name not in found:
            raise NameError(f"{script.name} defines no {name!r}; it defines {', '.join(sorted(found))}")
        # the file's name and lines stay, so that a traceback points into the lesson
        exec(compile(ast.Module([found[name]], []), script, "exec"), namespace)  # noqa: S102


def _is_stub(node):
    """The body of an exercise's stub, after a docstring, is a raise."""
    lines = [
        line
        for line in node.body
        if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
    ]
    return bool(lines) and isinstance(lines[0], ast.Raise)
