"""Every lesson says how long it takes, beside an estimate from its words, code, builds and exercises."""

import ast
import re
from types import SimpleNamespace

import pytest
from manyhands.course.folders import ROOT
from manyhands.course.lessons import Lesson, find_lessons
from manyhands.course.pairs import read
from minutes import code_of_core, core_cells, estimate, main, of_the_learner, reached, sections, stated, unseen

LESSONS = find_lessons(ROOT, own=False)
# the minutes of the agenda
BUDGETS = {
    "00": 30, "01": 40, "02": 45, "03": 55, "04": 30, "05": 45, "06": 50, "07": 45, "08": 50,
    "09": 80,  # two halves
    "10": 45, "11": 45, "12": 50, "13": 50, "14": 45, "15": 40,
}  # fmt: skip


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_the_core_fits_the_minutes_that_its_head_states_and_these_fit_the_agenda(lesson):
    core, everything = stated(lesson)
    assert core <= min(everything, BUDGETS.get(lesson.number, core))
    assert estimate(sections(lesson)) <= core


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_people_come_to_do_their_first_line_is_early_and_every_fifth_is_theirs(lesson):
    first, own, visible = of_the_learner(lesson)
    assert first <= 5.5 and visible <= 160
    assert visible <= 5.5 * own, f"{own} lines of {visible} are the learner's"


# what a lesson is named after: its names are defined in visible cells of CORE, and the cell that gives the result uses
# them; its module of the package calls no collective of these
SUBJECTS = {
    "03": (
        ("average_gradients", "broadcast_state", "start_all_reduce", "bucket_hook", "finish", "Bucket", "BucketedDDP"),
        "lesson.expect_equal(found", ("all_reduce", "broadcast"),
    ),
    "06": (
        ("my_share", "Unit", "reduce_scatter", "all_gather", "ShardedOptimizer", "reduce_in_backward", "gather", "free",
         "gather_when_needed", "zero_3"),
        'rungs.climb("ZeRO-3"', ("all_reduce", "all_gather", "reduce_scatter"),
    ),
}  # fmt: skip
NOT_YET = ("00", "01", "05", "07", "08", "09", "10", "11", "12", "13", "14", "15")  # held by tests/sizes.toml
SHOWN = [lesson for lesson in LESSONS if lesson.number not in NOT_YET]


def too_much_unseen(lesson):
    """Sentences on what a learner runs in this lesson's CORE and does not read."""
    cells = read(lesson.script).cells
    (visible, folded, longest), (_, hidden, _) = code_of_core(cells), unseen(lesson)
    told = {
        f"{folded} lines of CORE are folded, and {visible} visible": folded > visible / 4,
        f"{hidden} lines run unseen, and {visible} are visible": hidden > visible,
        f"a cell has {longest} lines": longest > 25,
    }
    return [sentence for sentence, wrong in told.items() if wrong]


@pytest.mark.parametrize("lesson", SHOWN, ids=lambda lesson: lesson.name)
def test_what_you_run_is_what_you_read(lesson):
    assert too_much_unseen(lesson) == []


@pytest.mark.parametrize("number", SUBJECTS)
def test_the_subject_stands_in_the_lesson_and_gives_its_result(number):
    (lesson,) = find_lessons(only=[number])
    names, result, collectives = SUBJECTS[number]
    shown = [
        cell.source.replace("%%ranks", "#") for cell, hidden in core_cells(read(lesson.script).cells) if not hidden
    ]
    defined = {
        node.name: node for source in shown for node in ast.parse(source).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }  # fmt: skip
    assert set(names) <= defined.keys()
    (source,) = [source for source in shown if result in source]
    used, todo = set(), [ast.parse(source)]
    while todo:
        read_here = {node.id for node in ast.walk(todo.pop()) if isinstance(node, ast.Name)} & defined.keys() - used
        used |= read_here
        todo += [defined[name] for name in read_here]
    assert set(names) - {"average_gradients"} <= used, f"{result} does not use {set(names) - used}"
    module = (ROOT / "scripts" / "manyhands" / "lessons" / f"{lesson.name[3:]}.py").read_text("utf-8")
    called = {ast.unparse(node.func) for node in ast.walk(ast.parse(module)) if isinstance(node, ast.Call)}
    assert not called & {f"dist.{name}" for name in collectives}


PLANTED = "    x = 1\n" * 200


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('# %% jupyter={"source_hidden": true}\n' + "x = 1\n" * 70, "70 lines of CORE are folded"),
        ('# %% tags=["hide-input"]\n' + "x = 1\n" * 70, "70 lines of CORE are folded"),
        ("# %%\n" + "; ".join(["x = 1"] * 26), "a cell has 26 lines"),
        ("# %%\nlesson.planted()", " lines run unseen"),
        ("# %%\nplanted = lesson.Diary", ""),
    ],
)
def test_planted_lines_are_seen_where_they_hide(text, said, tmp_path):
    (lesson,) = find_lessons(only=["03"])
    for kind in ("scripts", "notebooks"):
        (tmp_path / kind).mkdir()
    module = tmp_path / "scripts" / "manyhands" / "lessons" / "data_parallel.py"
    module.parent.mkdir(parents=True)
    own = (ROOT / "scripts" / "manyhands" / "lessons" / "data_parallel.py").read_text("utf-8")
    module.write_text(own + f"\n\ndef planted():\n{PLANTED}")
    script = tmp_path / "scripts" / lesson.script.name
    script.write_text(
        lesson.script.read_text("utf-8").replace(
            "# %% [markdown]\n# ## Recap", f"{text}\n\n# %% [markdown]\n# ## Recap"
        )
    )
    told = too_much_unseen(Lesson(lesson.name, tmp_path))
    assert any(said in sentence for sentence in told) if said else told == []


DRAWINGS = """
def line():
    return 1

def draw():
    line()

class A:
    b = 1

    def draw(self):
        line()
"""


def test_a_drawing_is_counted_apart_with_what_only_it_uses():
    cells = [
        SimpleNamespace(cell_type="code", metadata={}, source=f"from manyhands.lessons import tiny as lesson\n{use}")
        for use in ("lesson.draw()", "lesson.A()", "lesson.line()")
    ]
    found = [reached(cells[: k + 1], "manyhands.lessons.tiny", DRAWINGS) for k in range(3)]
    assert found == [(0, 4), (2, 6), (4, 4)]


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_a_lesson_takes_the_module_of_no_other_lesson(lesson):
    taken = set(re.findall(r"from manyhands\.lessons(?:\.(\w+))? import (\w+)", lesson.script.read_text("utf-8")))
    assert {inner or name for inner, name in taken} <= {lesson.name[3:]}


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_the_minutes_of_the_headings_add_up_to_the_heads(lesson):
    told = {}
    for part in sections(lesson):
        if part.core:
            told.setdefault(part.name, [0, 0.0])
            told[part.name][0] += part.stated or 0
            told[part.name][1] += part.minutes
    # what has no minutes of its own is short
    assert abs(sum(said or minutes for said, minutes in told.values()) - stated(lesson)[0]) <= 5


def test_the_readme_says_the_minutes_of_each_lesson_and_the_sums_of_the_tracks():
    readme = (ROOT / "README.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| \[(\d\d)\]\(\S+\) \|[^|]*\| (\d+) \|", readme, re.M))
    assert {number: int(minutes) for number, minutes in rows.items()} == {
        lesson.number: stated(lesson)[0] for lesson in LESSONS
    }
    tracks = re.findall(r"((?:\b\d\d\b[ ,]*)+)\((\d+) minutes", readme)
    assert tracks
    for lessons, total in tracks:
        assert sum(int(rows[number]) for number in re.findall(r"\d\d", lessons)) == int(total), lessons


def test_the_command_prints_a_line_for_each_section(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["02"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("02_collectives: CORE ") and " estimated; all " in said and "  MORE " in said
