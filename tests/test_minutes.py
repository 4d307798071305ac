"""Every lesson says how long it takes, beside an estimate from its words, code, builds and exercises."""

import re

import pytest
from manyhands.course.folders import ROOT
from manyhands.course.lessons import Lesson, find_lessons
from minutes import BUILD, EXERCISE, PREDICTION, estimate, main, of_the_learner, sections, stated

LESSONS = find_lessons()
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
    assert first <= 5.5 and visible <= 140
    assert visible <= 5.5 * own, f"{own} lines of {visible} are the learner's"


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


def solution(code):
    text = markdown("<details><summary>Solution A</summary>", "", "```python", *code, "```", "", "</details>")
    return text.replace("# %% [markdown]", '# %% [markdown] tags=["solution"]')


def test_words_code_predictions_builds_and_exercises_count_solutions_notes_and_imports_do_not(lesson_of):
    lesson = lesson_of(
        markdown("# 07", "**45 minutes** and 60 with those marked MORE."),
        markdown("## Idea (CORE, 7 min)", *["one two three four five six seven eight nine ten"] * 20),
        markdown("**Predict.** How many?", "", "### Build A: the ring"),
        "# %%\n# %%ranks\nimport os\n\n" + "\n".join(f"a{i} = {i}" for i in range(20)),
        solution(["b = 1"] * 100),
        '# %% jupyter={"source_hidden": true}\n' + "b = 1\n" * 100,
        '# %% [markdown] tags=["notes"]\n# ' + "word " * 400,
        markdown("### Exercise 1: an aside (MORE, 9 min)"),
        markdown("### Back", *["one two three four five six seven eight nine ten"] * 10),
    )
    _, core, more, back = sections(lesson)
    assert core.minutes == pytest.approx(1 + PREDICTION + BUILD + 20 / 12, abs=0.1)
    assert more.minutes == pytest.approx(EXERCISE, abs=0.1)
    assert (core.core, more.core, back.core) == (True, False, True)
    assert (core.stated, more.stated, back.stated) == (7, 9, None)
    assert (core.name, more.name) == ("Idea", "Idea")
    assert back.minutes == pytest.approx(0.5, abs=0.05)
    assert stated(lesson) == (45, 60)
    assert estimate(sections(lesson)) == pytest.approx(1 + PREDICTION + BUILD + 20 / 12 + 0.5 + 2, abs=0.2)


def test_the_learners_lines_are_blanks_and_what_a_solution_adds_to_its_stub(lesson_of):
    lesson = lesson_of(
        markdown("# 07", "**45 minutes** and 60 with those marked MORE.", *["word " * 100] * 2),
        "# %%\nguess = ____  # your turn\na = 1",
        "# %%\ndef f(x):\n    y = ____\n    return y\n\n\nchecks.f(f)",
        solution(["def f(x):", "    y = 2 * x", "    y += 1", "    return y"]),
        markdown("## Aside (MORE, 9 min)"),
        "# %%\nb = ____",
    )
    first, own, visible = of_the_learner(lesson)
    assert first == pytest.approx(1 + 208 / 200, abs=0.1)
    assert (own, visible) == (4, 6)


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
