"""Who may import whom: the contracts in pyproject.toml, which import-linter holds, and where a name may come from."""

import ast
import functools
import re
import shutil
import subprocess
import sys

import pytest


def lint_imports(course):
    """(exit status, what it prints) of import-linter in a folder with pyproject.toml and scripts/manyhands."""
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache"],
        cwd=course, capture_output=True, text=True, timeout=120, env={"PYTHONPATH": str(course / "scripts")},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "module, line, broken",
    [
        ("course/lessons.py", "from manyhands.launch import join", "A package imports from itself"),
        ("data/planted.py", "def f():\n    from manyhands.train import run", "A package imports from itself"),
        ("gpt/model.py", "from manyhands.launch.ranks import Ranks", "Model and plots"),
        ("launch/ranks.py", "def f():\n    from manyhands.launch import join", "No circle"),
        ("misc/__init__.py", "", "not listed as layers"),
    ],
)
def test_a_planted_breach_is_found(root, tmp_path, module, line, broken):
    shutil.copytree(root / "scripts" / "manyhands", tmp_path / "scripts" / "manyhands")
    shutil.copy(root / "pyproject.toml", tmp_path)
    planted = tmp_path / "scripts" / "manyhands" / module
    planted.parent.mkdir(exist_ok=True)
    planted.write_text((planted.read_text() if planted.exists() else "") + f"\n{line}\n")
    status, says = lint_imports(tmp_path)
    assert status == 1 and broken in says, says


def test_the_package_keeps_its_contracts(root):
    status, says = lint_imports(root)
    assert status == 0, says


# ------------------------------------------------------------------ names: one path each, private ones at home


def strangers(sources):
    """["file:line takes name from module"]: private names from elsewhere, and names that their module does not define.

    `sources` is {module or file: its text}; modules of ours are named with dots.
    """
    found = []
    for place, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            base = node.module if isinstance(node, ast.ImportFrom) else None
            if base in sources and base != "manyhands":
                found += [
                    f"{place}:{node.lineno} takes {alias.name} from {base}"
                    for alias in node.names
                    if f"{base}.{alias.name}" not in sources
                    and (alias.name not in defined(sources[base]) or re.match("_+[^_]", alias.name))
                ]
    return found


@functools.cache
def defined(text):
    """The names that a module makes itself, at its top level or below an `if` or `try` there."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_every_name_has_one_import_path_and_private_names_stay_at_home(root):
    sources = {}
    for path in [*root.glob("scripts/**/*.py"), *root.glob("assets/src/*.py")]:
        parts = (
            path.relative_to(root / "scripts").with_suffix("").parts
            if root / "scripts" in path.parents
            else [path.stem]
        )
        sources[".".join(parts).removesuffix(".__init__")] = path.read_text("utf-8")
    assert len(sources) > 150
    assert strangers(sources) == []


def test_a_name_from_the_wrong_place_is_found():
    house = {"manyhands.a": "from manyhands.b import say, _quiet", "manyhands.b": "_quiet = 1\ndef say(): pass"}
    assert strangers(house) == ["manyhands.a:1 takes _quiet from manyhands.b"]
    house |= {"lesson": "from manyhands.a import say"}
    assert strangers(house)[1:] == ["lesson:1 takes say from manyhands.a"]
