"""Take functions and classes out of a lesson by name, without running the lesson.

    recall(globals(), "spread", "BucketedDDP")          # in a lesson: define those that are not there yet
    ours = taken_from("03_data_parallel", "pack", "BucketedDDP")    # in a test: a namespace of its own
    ours.BucketedDDP

A lesson's section starts with such a call, so that it runs after the start cells alone. What is defined comes from the
lesson's script, so it is what the lesson shows. What you defined yourself stays. An exercise's stub does not count as a
definition, its solution does.
"""

import ast
from pathlib import Path
from types import SimpleNamespace

SCRIPTS = Path(__file__).resolve().parents[1]


def recall(lesson, *names):
    """Define the `names` that `lesson` (the caller's globals()) has not defined yet, in this order.

    The lesson's script is that of `lesson["ranks"].lesson`. Raises NameError for a name that it does not define.
    """
    missing = [name for name in names if name not in lesson]
    if missing:
        _define(_script(lesson["ranks"].lesson), missing, lesson)


def taken_from(lesson, *names, **given):
    """A namespace with these definitions of a lesson, its imports, and the globals `given` that they use."""
    script = _script(lesson)
    namespace = {"__name__": lesson}
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            exec(compile(ast.Module([node], []), script, "exec"), namespace)  # noqa: S102
    namespace.update(given)
    _define(script, names, namespace)
    return SimpleNamespace(**{name: namespace[name] for name in names})


def _script(lesson):
    """Beside the notebook's folder (the attendee's copy), else in the course."""
    candidates = [Path.cwd().parent / "scripts" / f"{lesson}.py", SCRIPTS / f"{lesson}.py"]
    return next((path for path in candidates if path.exists()), candidates[-1])


def _define(script, names, namespace):
    body = ast.parse(script.read_text(encoding="utf-8")).body
    kinds = (ast.FunctionDef, ast.ClassDef)
    found = {node.name: node for node in body if isinstance(node, kinds) and not _is_stub(node)}
    for name in names:
        if name not in found:
            raise NameError(f"{script.name} defines no {name!r}; it defines {', '.join(sorted(found))}")
        # the file's name and lines stay, so that a traceback points into the lesson
        exec(compile(ast.Module([found[name]], []), script, "exec"), namespace)  # noqa: S102


def _is_stub(node):
    """An exercise's own cell: `def f(x): raise NotImplementedError`, perhaps with a docstring."""
    lines = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return bool(lines) and isinstance(lines[0], ast.Raise)
