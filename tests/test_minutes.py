"""Every lesson says how long it takes, and that is what an estimate of its words, code, builds and exercises says."""

import re

import pytest
from manyhands.course.folders import ROOT
from manyhands.course.lessons import Lesson, find_lessons
from manyhands.course.minutes import BUDGETS, BUILD, EXERCISE, PREDICTION, main, sections, stated

LESSONS = find_lessons()
DONE = [lesson for lesson in LESSONS if lesson.number in BUDGETS]


def estimate(lesson, core_only=True):
    return sum(part.minutes for part in sections(lesson) if part.core or not core_only)


@pytest.mark.parametrize("lesson", DONE, ids=lambda lesson: lesson.name)
def test_the_core_fits_the_minutes_that_its_head_states_and_these_fit_the_agenda(lesson):
    core, everything = stated(lesson)
    assert estimate(lesson) <= core <= BUDGETS[lesson.number]
    assert estimate(lesson, core_only=False) <= everything


@pytest.mark.parametrize("lesson", DONE, ids=lambda lesson: lesson.name)
def test_each_section_fits_the_minutes_that_its_heading_states_and_they_add_up_to_the_heads(lesson):
    by_name = {}
    for part in sections(lesson):
        found = by_name.setdefault((part.name, part.core), [0.0, 0])
        found[0] += part.minutes
        found[1] += part.stated or 0
    short = {name: both for (name, _), both in by_name.items() if both[1] and both[0] > both[1] + 0.5}
    assert short == {}, "estimated, stated"
    untold = sum(minutes for (_, core), (minutes, said) in by_name.items() if core and not said)
    told = sum(said for (_, core), (_, said) in by_name.items() if core)
    assert abs(told + untold - stated(lesson)[0]) <= 4


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


@pytest.fixture
def lesson_of(tmp_path):
    def write(*cells):
        text = "\n\n".join(cells)
        (tmp_path / "scripts").mkdir()
        (tmp_path / "scripts" / "07_topic.py").write_text(text)
        return Lesson("07_topic", tmp_path)

    return write


def markdown(*lines):
    return "\n".join(["# %% [markdown]", *(f"# {line}" for line in lines)])


def test_words_code_predictions_builds_and_exercises_count_solutions_notes_and_imports_do_not(lesson_of):
    lesson = lesson_of(
        markdown("# 07", "**45 minutes** and 60 with those marked MORE."),
        markdown("## Idea (CORE, 7 min)", *["one two three four five six seven eight nine ten"] * 20),
        markdown("**Predict.** How many?", "", "### Build A: the ring"),
        "# %%\n# %%ranks\nimport os\n\n" + "\n".join(f"a{i} = {i}" for i in range(20)),
        '# %% tags=["solution"]\n' + "b = 1\n" * 100,
        '# %% jupyter={"source_hidden": true}\n' + "b = 1\n" * 100,
        '# %% [markdown] tags=["notes"]\n# ' + "word " * 400,
        markdown("### Exercise 1: an aside (MORE, 9 min)"),
        markdown("### Back", *["one two three four five six seven eight nine ten"] * 10),
    )
    _, core, more, back = sections(lesson)
    assert core.minutes == pytest.approx(1 + PREDICTION + BUILD + 1, abs=0.1)
    assert more.minutes == pytest.approx(EXERCISE, abs=0.1)
    assert (core.core, more.core, back.core) == (True, False, True)
    assert (core.stated, more.stated, back.stated) == (7, 9, None)
    assert (core.name, more.name) == ("Idea", "Idea")
    assert back.minutes == pytest.approx(0.5, abs=0.05)
    assert stated(lesson) == (45, 60)


def test_the_command_prints_a_line_for_each_section(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["02"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("02_collectives: CORE ") and " estimated; all " in said and "  MORE " in said


def test_a_lesson_that_does_not_say_its_minutes_is_named(capsys, lesson_of, monkeypatch):
    root = lesson_of(markdown("# 07", "about an hour")).root
    (root / "notebooks").mkdir()
    monkeypatch.chdir(root)
    assert main([]) == 2
    assert "07_topic does not say its minutes: **50 minutes**" in capsys.readouterr().err
