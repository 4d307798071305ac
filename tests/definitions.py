"""Functions and classes of a lesson in a namespace of their own: `ours = taken_from("02_collectives", "exchange")`."""

import ast
from types import SimpleNamespace

from manyhands.course.catch_up import define, outline_of
from manyhands.course.folders import script_of


def taken_from(lesson, /, *names, **given):
    """A namespace with these definitions of a lesson, over its imports and the globals `given` that they use."""
    script = script_of(lesson)
    namespace = {"__name__": lesson}
    body = ast.parse(script.read_text("utf-8")).body
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    exec(compile(ast.Module(imports, []), script, "exec"), namespace)  # noqa: S102
    namespace.update(given, ranks=given.get("ranks"))
    for name in names:
        namespace.pop(name, None)
    known = outline_of(script.read_text("utf-8"), lesson).pieces
    define(namespace, [known[name] for name in names])
    return SimpleNamespace(**{name: namespace[name] for name in names})
