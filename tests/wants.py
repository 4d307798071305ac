"""What a lesson has: one table, for its tests, `make lesson-check` and the page on how to write a lesson.

make lesson-check LESSON=16          # all that lesson 16 lacks, at once
PYTHONPATH=scripts python tests/wants.py --page          # the table, as assets/site/new_lesson.md shows it
"""

import ast
import html
import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import nbformat
from manyhands.course import pairs
from manyhands.course.folders import ROOT
from manyhands.course.lesson_parameters import LAUNCHERS_OWN
from manyhands.course.lesson_parameters import read as parameters_of
from minutes import estimate, of_the_learner, sections, stated
from test_minutes import BUDGETS, NOT_YET, too_much_unseen

WANTS = []
FIRST_MIN, VISIBLE, SHARE = 5.5, 160, 5.5  # the learner's first line, all lines, lines for one of the learner's
RANGE = re.compile(r"at least|at most|[<>]|\d to \d|one of")
APART_MIN, ALT, SOLUTIONS, QUESTIONS = 5, 20, 3, 3


@dataclass(frozen=True)
class Want:
    """A row: the place, what it has, and lacks(lesson) -> sentences on what is missing there."""

    where: str
    what: str
    lacks: Callable
    own: bool  # whether a centre's own lesson has it, too


def want(where, what, own=False):
    """Put the decorated function into the table."""
    return lambda lacks: WANTS.append(Want(where, what, lacks, own)) or lacks


def wants_of(lesson):
    """Return the rows that hold for a lesson: of a centre's own one, those of the skeleton alone."""
    return [one for one in WANTS if one.own or not lesson.own]


def complaints(lesson):
    """Return all that the lesson lacks, each with its place. One cause is said once."""
    told = {}
    for one in wants_of(lesson):
        where = one.where.replace("NN_topic", lesson.name).replace("topic", lesson.name[3:])
        try:
            for sentence in one.lacks(lesson) or []:
                told.setdefault(sentence, where)
        except (Exception, SystemExit) as error:  # what is broken is a want of its own
            told.setdefault(str(error).split("\n")[0] or type(error).__name__, where)
    return [f"{where}: {sentence}" for sentence, where in told.items()]


def page():
    """The table as Markdown."""
    rows = [f"| {one.where} | {one.what} | {'yes' if one.own else ''} |" for one in WANTS]
    return "\n".join(["| where | what | your own, too |", "|---|---|---|", *rows])


def code_of(lesson):
    """The code cells of the stored notebook."""
    return [cell for cell in nbformat.read(lesson.notebook, 4).cells if cell.cell_type == "code"]


def tagged(lesson, tag):
    return [cell for cell in pairs.read(lesson.script).cells if tag in cell.metadata.get("tags", [])]


def of_the_site(module):
    """A module of assets/site."""
    sys.path.insert(0, str(ROOT / "assets" / "site"))
    try:
        return importlib.import_module(module)
    finally:
        sys.path.remove(str(ROOT / "assets" / "site"))


@want(
    "`notebooks/NN_topic.ipynb`, `scripts/NN_topic.py`",
    "the same cells (`make sync`), and no cell for some ranks only",
    own=True,
)
def the_pair(lesson):
    pairs.refuse_some_ranks(lesson)
    if found := pairs.difference(lesson):
        yield f"{found}; run make sync LESSON={lesson.number}"


@want("git", "knows the pair, the checks and their tests: `git add` them, or an attendees' copy lacks them")
def in_git(lesson):
    topic = lesson.name[3:]
    files = [lesson.script, lesson.notebook, lesson.root / "scripts" / "manyhands" / "checks" / f"{topic}.py"]
    files += [lesson.root / "tests" / f"test_checks_{topic}.py"]
    names = [path.relative_to(lesson.root).as_posix() for path in files if path.exists()]
    listed = subprocess.run(["git", "ls-files", *names], cwd=lesson.root, capture_output=True, text=True)
    if listed.returncode == 0 and (left := [name for name in names if name not in listed.stdout.splitlines()]):
        yield f"git add {' '.join(left)}"


@want(
    "first cell", "`**50 minutes**` of CORE, `90 with those marked MORE`, and `**you can**` with a list below", own=True
)
def the_head(lesson):
    text = pairs.read(lesson.script).cells[0].source + "\n"
    for pattern, shown in (
        (r"\*\*\d+ minutes\*\*", "`**50 minutes**`"), (r"\d+ with those marked MORE", "`90 with those marked MORE`"),
        (r"\*\*you can\*\*\n+- ", "`**you can**`, with a list below"),
    ):  # fmt: skip
        if not re.search(pattern, text):
            yield f"its first cell lacks {shown}"


@want("README.md's table of lessons", "a row: number and link, title, the minutes of the head, track")
def in_the_readme(lesson):
    rows = re.findall(r"^\| \[\d\d\]\(notebooks/(\w+)\.ipynb\) \| [^|]+ \| (\d+) \| [^|]+ \|$",
                      (lesson.root / "README.md").read_text("utf-8"), re.M)  # fmt: skip
    said = dict(rows).get(lesson.name)
    if said is None:
        yield f"no row `| [{lesson.number}](notebooks/{lesson.name}.ipynb) | title | minutes | track |`"
    elif int(said) != stated(lesson)[0]:
        yield f"its row says {said} minutes, and its head {stated(lesson)[0]}"


@want("headings `## Title (CORE, 5 min)`", f"minutes that add up to the head's, within {APART_MIN}; "
      "`tests/minutes.py` estimates that CORE fits them")  # fmt: skip
def the_minutes(lesson):
    (core, everything), parts = stated(lesson), {}
    if core > (limit := min(everything, BUDGETS.get(lesson.number, core))):
        yield f"CORE takes {core} minutes, and at most {limit} are there"
    if (takes := estimate(sections(lesson))) > core:
        yield f"CORE takes about {takes:.0f} minutes, and its head says {core}"
    for part in filter(lambda part: part.core, sections(lesson)):
        said, takes = parts.get(part.name, (0, 0.0))
        parts[part.name] = said + (part.stated or 0), takes + part.minutes
    if abs((total := sum(said or takes for said, takes in parts.values())) - core) > APART_MIN:
        yield f"the headings of CORE say {total:.0f} minutes together, and the head {core}"


@want("CORE", f"the learner's first own line within {FIRST_MIN} minutes, at most {VISIBLE} visible lines of code, and "
      f"one in {SHARE} the learner's: a blank `____`, or a line that the stub lacks")  # fmt: skip
def the_learners_lines(lesson):
    first, own, visible = of_the_learner(lesson)
    if first > FIRST_MIN:
        yield f"the learner's first own line comes after {first:.1f} minutes, {FIRST_MIN} are the limit"
    if visible > VISIBLE:
        yield f"{visible} lines of CORE are visible, {VISIBLE} are the limit"
    if visible > SHARE * own:
        yield f"{own} of {visible} visible lines are the learner's: every {SHARE}th at least"


@want("CORE", "what you run is what you read: at most a quarter as many folded as visible lines, no cell over 25 lines")
def nothing_unseen(lesson):
    return [] if lesson.number in NOT_YET else too_much_unseen(lesson)


@want(
    "cell tagged `parameters`",
    "`n_ranks`, and for each name a comment that is its help and states its range; "
    '"at least 2" of `n_ranks` is the fewest that hub, preflight and script start',
    own=True,
)
def the_parameters(lesson):
    known = {one.name: one for one in parameters_of(lesson.script)}
    if LAUNCHERS_OWN not in known:
        yield f"no parameter {LAUNCHERS_OWN}"
    for name, one in known.items():
        if not one.help:
            yield f"{name} has no comment, which would be its help"
        if type(one.default) in (int, float) and name != LAUNCHERS_OWN and not RANGE.search(f"{one.help} {one.limits}"):
            yield f"the comment of {name} states no range, such as `at least 1`"
    if unknown := lesson.short.keys() - known.keys():
        yield f"SHORT in scripts/manyhands/course/lessons.py names {', '.join(sorted(unknown))}, no parameter of it"


@want("`SHORT` in `scripts/manyhands/course/lessons.py`", "parameters of a short run, about 10 s on two cores")
def a_short_run(lesson):
    if not lesson.short:
        yield f'no row "{lesson.name}": {{...}}'


@want("each `### Build A: ...` and `### Exercise 1: ...`", f"a folded solution, {SOLUTIONS} or more: Markdown tagged "
      "`solution`, with `<details><summary>Solution A</summary>` around one Python block")  # fmt: skip
def solutions(lesson):
    cells, found = pairs.read(lesson.script).cells, tagged(lesson, "solution")
    if len(found) < SOLUTIONS:
        yield f"{len(found)} folded solutions, where {SOLUTIONS} are wanted"
    for number, cell in enumerate(found, 1):
        fold = r"<details><summary>Solution \w+</summary>\n\n```python\n.*\n```\n\n</details>"
        if cell.cell_type != "markdown" or not re.fullmatch(fold, cell.source, re.S):
            yield f"its solution number {number} is not a `<details>` around one Python block"
    asked = re.findall(r"^#+ (?:Build|Exercise) (\w+):", "\n".join(cell.source for cell in cells), re.M)
    there = re.findall(r"<summary>Solution (\w+)", "\n".join(cell.source for cell in found))
    yield from (f"no folded solution {name}" for name in asked if name not in there)


@want("`scripts/manyhands/checks/topic.py`", "the checks, which the lesson imports")
def the_checks(lesson):
    if not (lesson.root / "scripts" / "manyhands" / "checks" / f"{lesson.name[3:]}.py").exists():
        yield "it is missing"
    if not re.search(rf"checks import {lesson.name[3:]} as checks", lesson.script.read_text("utf-8")):
        yield f"the lesson has no `from manyhands.checks import {lesson.name[3:]} as checks`"


@want("`tests/test_checks_topic.py`", "with `tests/exercises.py`: for each check four wrong answers or more, each with "
      "its message, and a right one in another style")  # fmt: skip
def the_tests_of_the_checks(lesson):
    path = ROOT / "tests" / f"test_checks_{lesson.name[3:]}.py"
    if not path.exists():
        yield "the tests of the checks are missing"
    elif "Answers" not in path.read_text("utf-8"):
        yield "no class of it is an `Answers` of tests/exercises.py"


@want("`assets/src/NN_topic.py`", "draws the figures, `make figures`")
def the_drawings(lesson):
    if not (lesson.root / "assets" / "src" / f"{lesson.name}.py").exists():
        yield "the drawings are missing"


@want(
    "pictures",
    f"`![what it shows]` before a file of `assets/`, no `<img`; the sentence has over {ALT} characters",
    own=True,
)
def the_pictures(lesson):
    text = lesson.script.read_text("utf-8")
    if "<img" in text:
        yield "use ![what it shows](../assets/name.svg), not <img"
    for alt, target in re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", text):
        if len(alt) <= ALT:
            yield f"{target} needs a sentence that says what it shows"
        if not (lesson.script.parent / target).resolve().exists():
            yield f"{target} is missing"


@want("predictions", f"at least {QUESTIONS} questions `**Predict.**`, each with a blank `guess_name = ____`, which a "
      'later cell compares: `compare("what", "guess_name", answer)`')  # fmt: skip
def the_predictions(lesson):
    cells = [cell for cell in pairs.read(lesson.script).cells if cell.cell_type == "code"]
    asked = [question for cell in cells for question in questions(cell)]
    if len(asked) < QUESTIONS:
        yield f"{len(asked)} predictions are compared, where {QUESTIONS} are wanted"
    blanks = re.findall(r"^(\w+) = ____", "\n".join(cell.source for cell in cells), re.M)
    yield from (f"no cell has `{blank} = ____`" for _, blank in asked if blank not in blanks)


@want("bug from the zoo", "a section `## A bug from the zoo`, and a row of `ZOO` in `assets/site/pages.py`")
def the_zoo(lesson):
    if not re.search(r"^# ## .*\bzoo\b", lesson.script.read_text("utf-8"), re.M):
        yield "no section is named `## A bug from the zoo`"
    if lesson.number not in [number for bugs in of_the_site("pages").ZOO.values() for number, *_ in bugs]:
        yield f"ZOO has no row of lesson {lesson.number}"


@want(
    "last cell of CORE",
    "a call of `card(...)`, or a list under `## Recap`; slides end with it, and ask a prediction",
    own=True,
)
def the_slides(lesson):
    slides, cells = of_the_site("slides"), pairs.read(lesson.script).cells
    told = list(slides.sections(cells))
    if not lesson.own and not any(slide.kind == "question" for slide in slides.of_the_core(told)):
        yield "no slide asks a prediction: a paragraph with **Predict in a section marked CORE"
    slides.card(cells, lesson.name)


@want("last cells", "`metrics.write()`: `make preflight` compares what it wrote", own=True)
def the_metrics(lesson):
    if "metrics.write()" not in lesson.script.read_text("utf-8"):
        yield "no cell has `metrics.write()`, so make preflight would find nothing to compare"


@want("instructor's notes", "Markdown tagged `notes`, `<details><summary>For the instructor: ...</summary>`")
def the_notes(lesson):
    if not any("For the instructor" in cell.source for cell in tagged(lesson, "notes")):
        yield "no cell tagged notes begins `<details><summary>For the instructor: ...`"


@want("ruff", "nothing to say of the script; an import that only a folded solution uses is F401: add the lesson to "
      "`per-file-ignores` in `pyproject.toml`", own=True)  # fmt: skip
def ruff(lesson):
    name = lesson.script.relative_to(lesson.root).as_posix()
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise", name]
    said = subprocess.run(command, cwd=lesson.root, capture_output=True, text=True).stdout
    return [line.removeprefix(name).strip(":") for line in said.splitlines() if line.startswith(name)]


@want("stored outputs", "of Shakespeare, by `make notebooks`: for each cell that says something, no error, warning "
      "or path of a machine, and a picture")  # fmt: skip
def the_outputs(lesson):
    code = code_of(lesson)
    outputs = [output for cell in code for output in cell.outputs]
    silent = [cell for cell in code if not cell.outputs and speaks(cell.source)]
    if silent:
        first = next(line for line in silent[0].source.splitlines() if not line.startswith("%%"))
        yield f"{len(silent)} cells that say something have no output, the first begins {first!r}"
    if any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs):
        yield "an error or a warning is stored"
    if "image/png" not in str([output.get("data") for output in outputs]) and lesson.number != "04":
        yield "no picture is stored"
    if "fall-back" in str(outputs):
        yield "stored outputs are those of Shakespeare, not of the fall-back corpus"
    if nbformat.read(lesson.notebook, 4).metadata.get("kernelspec", {}).get("name") != "manyhands":
        yield "the kernel of the notebook is not `manyhands`"
    for line in dict.fromkeys(line for cell in code for line in text_of(cell.outputs).splitlines()):
        yield from (f"a stored output holds {shown[0]!r}" for one in DEBRIS if (shown := re.search(one, line)))


@want("stored outputs", "the answer of an open question only in the closed `<details>` that `compare` makes; a figure "
      "that shows it is folded with it: `show(..., folded=unanswered())`")  # fmt: skip
def no_early_answers(lesson):
    cells, blank_of = pairs.read(lesson.notebook).cells, {}
    for number, cell in enumerate(cells):
        if cell.cell_type == "code":
            blank_of |= dict.fromkeys(re.findall(r"^(\w+) = ____", cell.source, re.M), number)
            for what, blank in questions(cell):
                between = cells[blank_of.get(blank, number) : number]
                yield from told_too_early(cell, what, [output for one in between for output in one.get("outputs", [])])


@want(
    "`scripts/manyhands/lessons/topic.py`",
    "if the lesson has harness and one-lesson plots; another lesson's is not used",
)
def its_own_module(lesson):
    taken = re.findall(r"from manyhands\.lessons(?:\.(\w+))? import (\w+)", lesson.script.read_text("utf-8"))
    yield from (f"it uses the module of {inner or name}" for inner, name in taken if (inner or name) != lesson.name[3:])


def speaks(source):
    """Whether a cell says, shows or judges something when it runs, not only in a function that it defines."""
    source = re.sub(r"^\s*[%!].*$", "", source, flags=re.M)
    later = (ast.FunctionDef, ast.ClassDef, ast.Lambda)
    found, nodes = [], [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        nodes += [child for child in ast.iter_child_nodes(node) if not isinstance(child, later)]
        if isinstance(node, ast.Call):
            found.append(ast.unparse(node.func))
    return any(re.fullmatch(r"print|say|show|compare|card|checks\.\w+", name) for name in found)


DEBRIS = (
    "No GPU run", "fall-back", "object at 0x", r"defaultdict\(", r"\{'\w+':", r"Warning:", r"<bound method",
    r"(?<![\d.,])1 (?:ranks|times|nodes|calls|messages|updates|steps|buckets|hops|copies|losses|lines|processes)\b",
    r"\bnode\(s\)", r"\x1b\[", r"(?<![\w.])/(?:home|root|tmp|work)/",
    r": the figure'$",
)  # fmt: skip


def text_of(outputs):
    """What a reader sees of a cell's outputs, without markup."""
    shown = []
    for output in outputs:
        data = output.get("data", {})
        shown.append(html.unescape(re.sub(r"<[^>]+>", "\n", data.get("text/html", ""))) or output.get("text", ""))
        shown.append(data.get("text/plain", ""))
    return "\n".join(shown)


EVIDENCE = {"the rank at fault"}  # what each rank has called stands open below the blank: in it one finds the answer
FOLD = re.compile(r"<details><summary>(.*?)</summary>(.*?)</details>", re.S)


def questions(cell):
    """The calls of `compare` in a code cell: (what is asked, the name of the blank)."""
    tree = ast.parse(re.sub(r"^\s*[%!].*$", "", cell.source, flags=re.M))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "compare"]
    return [tuple(map(ast.literal_eval, call.args[:2])) for call in calls]


def numbers(text):
    """The numbers in a text, without those of ranks at the beginning of lines."""
    text = re.sub(r"^(?:all ranks|ranks? [\d, -]+) *\|", "", text, flags=re.M)
    found = re.findall(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)", text)
    return [float(one.replace(",", "")) for one in found]


def told_too_early(cell, what, since=()):
    """Sentences on what is shown of the answer to a cell's question. since: outputs from the blank to the cell."""
    wrong, bundles = [], [output.get("data", {}) for output in (*since, *cell.outputs)]
    pages = "".join("".join(bundle.get("text/html", "")) for bundle in bundles)
    folds = {html.unescape(line): html.unescape(inside) for line, inside in FOLD.findall(pages)}
    beside = html.unescape(re.sub(r"<[^>]+>", " ", FOLD.sub("", pages)))
    beside += "\n".join(["", *(output.get("text", "") for output in (*since, *cell.outputs))])
    beside += "\n".join(["", *(bundle.get("text/plain", "") for bundle in bundles)])
    answer = folds.get(f"{what}: no guess yet", "")
    if not answer.startswith("it is ") or f"{what}: no guess yet; the answer is folded" not in beside:
        wrong.append(f"{what}: not folded")
    said = beside.replace(what, "")
    first = answer.partition("<br>")[0]
    right = [] if "'" in first or what in EVIDENCE else numbers(first)[:1]
    if any(abs(one - number) <= 0.02 * number for one in numbers(said) for number in right):
        wrong.append(f"{what}: the answer stands beside")
    if any("image/png" in output.get("data", {}) for output in cell.outputs):
        wrong.append(f"{what}: a figure stands beside")
    return wrong


def report(lesson):
    """All that the lesson lacks, as lines. Raises PairError if there is any."""
    if found := complaints(lesson):
        raise pairs.PairError("\n".join([f"{lesson.name} lacks {len(found)}:", *(f"  {one}" for one in found)]))
    kind = "a lesson of your own" if lesson.own else "a lesson"
    return f"{lesson.name} has all {len(wants_of(lesson))} things that {kind} has"


if __name__ == "__main__":
    if sys.argv[1:] == ["--page"]:
        print(page())
    else:
        sys.exit(pairs.for_lessons(report, sys.argv[1:]))
