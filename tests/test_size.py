"""The repository grows only where somebody says what for: sizes, each with a limit in sizes.toml, that ratchet down.

Of each lesson also the code of CORE that runs unseen, and its longest cell: what you run is what you read.

A line counts if a token lies on it: code, comments and docstrings, not blank lines. Statements joined by `;` count as
one line each, and of a line longer than 120 characters each 120 as one, so that no layout hides anything.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import defaultdict
from functools import cache
from math import ceil
from types import SimpleNamespace

import pytest
from manyhands.course.folders import ROOT
from manyhands.course.lessons import Lesson, find_lessons
from manyhands.course.pairs import read
from minutes import code_of_core

LIMITS = "tests/sizes.toml"
SLACK = 0.01  # below its limit a size may lie by this share: then the limit falls, too
LONGEST = 120
SILENT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}
PROGRAMS = [path.stem for path in sorted((ROOT / "scripts").glob("[a-z]*.py"))]

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git here says which files are the course's")


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def count_lines(text: str) -> int:
    """Count the lines of a Python file as the head of this file says."""
    rows, on, joined = text.splitlines(), set(), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            on.update(range(token.start[0], token.end[0] + 1))
            joined += token.type == tokenize.OP and token.string == ";"
    return joined + sum(ceil(len(rows[at - 1]) / LONGEST) for at in on if rows[at - 1].strip())


def count_shell(text: str) -> int:
    return sum(ceil(len(row) / LONGEST) for row in text.splitlines() if row.strip())


def kinds_of(path: str) -> list[str]:
    """Return the sizes to which a tracked file counts."""
    top, _, rest = path.partition("/")
    if top == "scripts" and rest.startswith("manyhands/"):
        package = rest.split("/")[1].removesuffix(".py")
        if package == "lessons":
            return ["lessons", "package and lessons"]
        return [f"package {package}", "package", "package and lessons"]
    if top == "scripts":
        return ["lessons", "package and lessons"] if rest[0].isdigit() else ["programs"]
    return ["tests"] if top == "tests" else ["assets and .ci"]


@cache
def files() -> dict[str, int]:
    """{tracked file: lines} of all Python and of .ci."""
    found = {}
    for path in git("ls-files", "*.py", ".ci").split():
        if (ROOT / path).exists() and not Lesson(path[8:-3], ROOT).own:
            text = (ROOT / path).read_text("utf-8")
            found[path] = count_lines(text) if path.endswith(".py") else count_shell(text)
    return found


def names_met() -> set[tuple[str, str]]:
    """Return the (module, name) that lessons import from the package."""
    nodes = [
        node for one in find_lessons(ROOT, own=False) for node in ast.walk(ast.parse(one.script.read_text("utf-8")))
    ]
    return {
        (node.module, alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "manyhands"
        for alias in node.names
    }


def sizes() -> dict[str, int]:
    found = defaultdict(int)
    for path, lines in files().items():
        for kind in kinds_of(path):
            found[kind] += lines
    found["names that learners meet"] = len(names_met())
    for lesson in find_lessons(ROOT, own=False):
        _, folded, longest = code_of_core(read(lesson.script).cells)
        found[f"folded lines of {lesson.number}"], found[f"longest cell of {lesson.number}"] = folded, longest
    return found


def flags_of(program: str) -> int:
    """Count the flags that a program's --help lists."""
    said = subprocess.run(
        [sys.executable, f"scripts/{program}.py", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    ).stdout
    return len(set(re.findall(r"^[ │]*(?:-\w(?: [A-Z]+)?, )?(--[\w.-]+)", said, re.M)))


def grown(kind: str) -> str:
    """Return the files of a kind that grew since limits were last changed, the most first."""
    since = git("log", "-1", "--format=%H", "--", LIMITS).strip()
    changed = [row.split("\t") for row in git("diff", "--numstat", *[since] * bool(since)).splitlines()]
    more = [
        (int(a) - int(b), path) for a, b, path in changed if a != "-" and path in files() and kind in kinds_of(path)
    ]
    return (
        ", ".join(f"{path} by {n}" for n, path in sorted(more, reverse=True)[:5] if n > 0) or "nothing that git tracks"
    )


def judged(kind: str, size: int, limit: int) -> str:
    """Return what is wrong with a size, or ""."""
    if size > limit:
        return f"{kind}: {size:,}, and the limit is {limit:,}: delete, or raise it in {LIMITS} and say there what for"
    if size < limit * (1 - SLACK):
        return f"{kind}: {size:,} is more than {SLACK:.0%} below the limit of {limit:,}: lower it in {LIMITS} to {size}"
    return ""


def limits_of(text: str) -> tuple[dict, list]:
    content = tomllib.loads(text)
    return content["limits"], content.get("raised", [])


def unexplained(before: str, after: str) -> list[str]:
    """Return a sentence for each limit that is higher in `after` and has no new line there that says what for."""
    (old, said), (new, says) = limits_of(before), limits_of(after)
    fresh = [(one["what"], one["from"], one["to"]) for one in says if one not in said and one["for"].strip()]
    return [
        f"{kind}: the limit rose from {old[kind]:,} to {limit:,}, and no [[raised]] of {LIMITS} says what for"
        for kind, limit in new.items()
        if limit > old.get(kind, limit) and (kind, old[kind], limit) not in fresh
    ]


LIMIT, _ = limits_of((ROOT / LIMITS).read_text("utf-8"))


def test_each_size_is_within_its_limit_and_close_to_it():
    found = sizes()
    assert set(found) == {kind for kind in LIMIT if not kind.startswith("flags of ")}, (
        "a size without limit, or the like"
    )
    wrong = [f"{said}; grown: {grown(kind)}" for kind in found if (said := judged(kind, found[kind], LIMIT[kind]))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.ranks
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_program_has_more_flags_than_its_limit(program):
    assert not judged(f"flags of {program}", flags_of(program), LIMIT[f"flags of {program}"])


def test_a_limit_rises_only_with_a_line_that_says_what_for():
    versions = [git("show", f"{commit}:{LIMITS}") for commit in git("log", "--format=%H", "--", LIMITS).split()]
    versions.insert(0, (ROOT / LIMITS).read_text("utf-8"))
    wrong = [said for after, before in zip(versions, versions[1:], strict=False) for said in unexplained(before, after)]
    assert not wrong, "\n".join(wrong)


def test_what_grows_and_what_shrinks_is_said_with_the_number_and_the_limit():
    assert judged("package", 101, 100).startswith("package: 101, and the limit is 100")
    assert judged("package", 98, 100).startswith("package: 98 is more than 1% below the limit of 100")
    assert judged("package", 99, 100) == judged("package", 100, 100) == ""


def test_a_silent_raise_is_seen_and_an_explained_one_is_not():
    before = '[limits]\n"package" = 100\n'
    line = '[[raised]]\nwhat = "package"\nfrom = 100\nto = 120\nfor = "{}"\n'
    after = before.replace("100", "120")
    assert unexplained(before, after) == unexplained(before, after + line.format(" ")) != []
    assert unexplained(before, after + line.format("a Llama")) == []
    assert unexplained(before, before.replace("100", "90")) == []


def test_no_layout_hides_lines():
    assert count_lines("a = 1\nb = 2\n") == count_lines("a = 1; b = 2\n") == count_lines("a = 1\n\n\nb = 2\n") == 2
    assert count_lines(f"a = '{'x' * 200}'\n") == 2
    assert count_lines('a = """\nb = 1\n\nc = 2\n"""\n') == 4


@pytest.mark.parametrize(
    ("source", "metadata", "counted"),
    [
        ("import torch\nx = 1\ny = 2", {}, (2, 0, 2)),
        ("x = 1\n" * 40, {"jupyter": {"source_hidden": True}}, (0, 40, 40)),
        ("x = 1\n" * 40, {"tags": ["hide-input"]}, (0, 40, 40)),
        ("x = 1\n" * 40, {"collapsed": True}, (0, 40, 40)),
        ("; ".join(["x = 1"] * 40), {}, (40, 0, 40)),
        ("%run helpers.py", {}, (0, 1, 1)),
        ("x = 1", {"tags": ["solution"]}, (0, 0, 0)),
    ],
)
def test_what_runs_unseen_is_counted_however_it_is_hidden(source, metadata, counted):
    head = SimpleNamespace(cell_type="markdown", source="## Start (CORE, 1 min)", metadata={})
    more = SimpleNamespace(cell_type="markdown", source="## More of it (MORE, 1 min)", metadata={})
    cell = SimpleNamespace(cell_type="code", source=source, metadata=metadata)
    assert code_of_core([head, cell]) == counted
    assert code_of_core([more, cell]) == (0, 0, counted[2])


def test_a_lessons_module_counts_with_the_lessons():
    assert kinds_of("scripts/manyhands/lessons/zero_fsdp.py") == kinds_of("scripts/06_zero_fsdp.py")
    assert "package" not in kinds_of("scripts/manyhands/lessons/zero_fsdp.py")
    assert "package" in kinds_of("scripts/manyhands/predict/memory.py")
