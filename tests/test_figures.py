"""The figures in assets/ are what the code draws, the same bytes each time, and every lesson says what they show."""

import re
import xml.etree.ElementTree as ET

import pytest
from manyhands import figures

LESSONS = sorted((figures.ASSETS.parent / "scripts").glob("[01][0-9]_*.py"))


@pytest.mark.parametrize("name", figures.drawings())
def test_the_stored_figure_is_what_the_code_draws(name, tmp_path):
    figures.save(figures.drawings()[name], tmp_path / "new.svg")
    stored = figures.ASSETS / f"{name}.svg"
    assert stored.exists() and stored.read_bytes() == (tmp_path / "new.svg").read_bytes(), (
        f"{stored.name} is stale: python -m manyhands.figures"
    )


def test_drawing_twice_gives_the_same_bytes(tmp_path):
    first = [path.read_bytes() for path in figures.redraw(tmp_path / "a")]
    assert first == [path.read_bytes() for path in figures.redraw(tmp_path / "b")]


@pytest.mark.parametrize("name", figures.drawings())
def test_a_figure_carries_its_alt_text_as_title(name):
    title = ET.parse(figures.ASSETS / f"{name}.svg").getroot().find("{http://www.w3.org/2000/svg}title")
    assert title.text == figures.drawings()[name].alt
    assert len(title.text) > 20


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_each_picture_of_a_lesson_exists_and_has_alt_text(lesson):
    text = lesson.read_text()
    pictures = re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", text)
    assert "<img" not in text, "use ![what it shows](../assets/name.svg)"
    for alt, target in pictures:
        assert len(alt) > 20, f"{target} needs a sentence that says what it shows"
        assert (lesson.parent / target).resolve().exists(), f"{target} is missing"


def test_tints_stay_between_the_colour_and_white():
    assert figures.tint("#0072B2", 1) == "#0072b2"
    assert figures.tint("#0072B2", 0) == "#ffffff"


def test_rank_colours_repeat_after_eight():
    assert figures.rank_colour(8) == figures.rank_colour(0)
    assert len(set(figures.RANK_COLOURS)) == 8
