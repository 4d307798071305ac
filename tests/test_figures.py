"""The figures in assets/ are what the code draws, the same bytes each time, and every lesson says what they show."""

import re
import sys
import xml.etree.ElementTree as ET

import pytest
from manyhands.course.folders import ASSETS

sys.path.insert(0, str(ASSETS / "src"))
import draw  # noqa: E402

LESSONS = sorted((ASSETS.parent / "scripts").glob("[01][0-9]_*.py"))


@pytest.mark.parametrize("name", draw.drawings())
def test_the_stored_figure_is_what_the_code_draws(name, tmp_path):
    draw.save(name, tmp_path / "new.svg")
    stored = ASSETS / f"{name}.svg"
    assert stored.exists() and stored.read_bytes() == (tmp_path / "new.svg").read_bytes(), (
        f"{stored.name} is stale: make figures"
    )


def test_no_stored_figure_is_left_over():
    assert sorted(path.stem for path in ASSETS.glob("*.svg")) == sorted(draw.drawings())


def test_a_figure_says_in_its_title_what_it_shows():
    for name in draw.drawings():
        title = ET.parse(ASSETS / f"{name}.svg").getroot().find("{http://www.w3.org/2000/svg}title").text
        assert title == draw.said()[name] and len(title) > 20


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_each_picture_of_a_lesson_exists_and_has_alt_text(lesson):
    text = lesson.read_text()
    pictures = re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", text)
    assert "<img" not in text, "use ![what it shows](../assets/name.svg)"
    for alt, target in pictures:
        assert len(alt) > 20, f"{target} needs a sentence that says what it shows"
        assert (lesson.parent / target).resolve().exists(), f"{target} is missing"
