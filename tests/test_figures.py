"""The figures in assets/ are what the code draws, the same bytes each time, and every lesson says what they show."""

import re
import sys
import xml.etree.ElementTree as ET

import pytest
from manyhands.course.folders import ASSETS

sys.path.insert(0, str(ASSETS / "src"))
import draw  # noqa: E402
from lab import chromium  # noqa: E402


@pytest.mark.full
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


SHOWN = """() => [...new Set([...document.querySelectorAll('[id^="frame"]')]
    .filter((one) => getComputedStyle(one).opacity === "1").map((one) => one.id.split("-")[0]))]"""


@pytest.mark.browser
@pytest.mark.parametrize("name", [name for name in draw.drawings() if name.endswith("_moving")])
def test_a_moving_figure_shows_one_frame_after_the_other_ends_on_the_last_and_stands_still_on_request(name):
    with chromium() as browser:
        for motion in ("no-preference", "reduce"):
            page = browser.new_page(reduced_motion=motion)
            page.goto((ASSETS / f"{name}.svg").as_uri())
            frames = 1 + max(int(one) for one in re.findall(r'id="frame(\d+)-', (ASSETS / f"{name}.svg").read_text()))
            last = [f"frame{frames - 1}"]
            if motion == "reduce":
                assert page.evaluate(SHOWN) == last and page.evaluate("document.getAnimations().length") == 0
                continue
            for number in range(frames):  # the clock of the animations is set, not waited for
                to = f"one.pause(); one.currentTime = {2000 * number + 1000};"
                page.evaluate(f"document.getAnimations().forEach((one) => {{ {to} }})")
                assert page.evaluate(SHOWN) == [f"frame{number}"]
            page.evaluate("document.getAnimations().forEach((one) => one.finish())")
            assert page.evaluate(SHOWN) == last
