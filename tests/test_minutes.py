"""Every lesson says how long it takes, beside an estimate from its words, code, builds and exercises."""

import re

import pytest
from manyhands.course.folders import ROOT
from manyhands.course.lessons import find_lessons
from minutes import estimate, main, of_the_learner, sections, stated

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


def test_the_command_prints_a_line_for_each_section(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["02"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("02_collectives: CORE ") and " estimated; all " in said and "  MORE " in said
