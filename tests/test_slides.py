"""`make slides`: a deck per lesson that fits the screen, keeps answers back, shows no solution and asks no address."""

import importlib.util
import os
import re
import sys
from html import unescape

import nbformat
import pytest
from lab import chromium
from manyhands.course.folders import ROOT
from manyhands.course.lessons import find_lessons

LESSONS = [lesson.name for lesson in find_lessons(ROOT, own=False)]
REVEAL = ROOT / "outputs" / "site" / "slides" / "reveal"  # where `make slides` puts it


@pytest.fixture(scope="module")
def slides():
    """The module assets/site/slides.py."""
    folder = ROOT / "assets" / "site"
    sys.path.insert(0, str(folder))  # it imports its neighbour build.py
    try:
        spec = importlib.util.spec_from_file_location("slides", folder / "slides.py")
        module = sys.modules["slides"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(folder))
        for name in ("slides", "build"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def decks(slides, tmp_path_factory):
    """The folder of the decks, without reveal.js."""
    folder = tmp_path_factory.mktemp("slides") / "site"
    slides.write(folder)
    return folder / "slides"


def sections(page):
    return re.findall(r"<section.*?</section>", page.read_text("utf-8"), re.S)


def seen_at_once(section):
    """The words that a slide shows before the first key: neither fragments nor notes."""
    text = re.sub(r'<div class="fragment answer">.*?</div>|<aside class="notes">.*?</aside>', "", section, flags=re.S)
    return " ".join(unescape(re.sub(r"<[^>]+>", "", text)).split())


def test_a_deck_begins_with_the_event_in_its_colour(slides, tmp_path, monkeypatch):
    event = type(slides.read_event())
    days = [{"date": f"2027-03-{day}", "program": ["00"]} for day in (13, 14)]
    held = event(name="School & Co", place="Room 5", accent="#0a5c99", logo="event.toml", days=days)
    monkeypatch.setattr(slides, "rows", lambda rows=slides.rows: rows()[:1])
    pages = []
    for one in (held, event()):
        monkeypatch.setattr(slides, "read_event", lambda one=one: one)
        slides.write(tmp_path)
        pages.append((tmp_path / "slides" / "00_start.html").read_text("utf-8"))
    shown = '<p class="event"><img src="../assets/event.toml" alt="">School &amp; Co, 13 to 14 March 2027, Room 5'
    assert shown in pages[0] and pages[0].count('class="event"') == 1 and (tmp_path / "assets/event.toml").exists()
    assert "--accent: #0a5c99;" in pages[0] and "--accent: #0b5fa5;" in pages[1] and 'class="event"' not in pages[1]


@pytest.mark.parametrize("name", LESSONS)
def test_a_deck_has_2_to_15_slides_and_neither_solutions_nor_settings(name, decks):
    found = sections(decks / f"{name}.html")
    assert 2 <= len(found) <= 15
    cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", 4).cells
    hidden = [cell for cell in cells if {"solution", "parameters"} & set(cell.metadata.get("tags", []))]
    lines = {line.strip() for cell in hidden for line in cell.source.split("\n") if len(line.strip()) > 24}
    text = unescape(re.sub(r"<[^>]+>", "", "".join(found)))
    assert lines and [line for line in lines if line in text] == []


@pytest.mark.parametrize("name", LESSONS)
def test_answers_are_fragments_and_are_not_seen_before(name, decks, slides):
    found = sections(decks / f"{name}.html")
    asked = [one for one in found if 'class="question' in one]
    assert asked and all("Predict" in seen_at_once(one) and '<div class="fragment answer">' in one for one in asked)
    everything = "".join(map(seen_at_once, found))
    for cell in nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", 4).cells:
        if cell.cell_type == "markdown" and "notes" not in cell.metadata.get("tags", []):
            for fold in slides.FOLD.findall(cell.source):
                words = unescape(re.sub(r"<[^>]+>", "", slides.html(fold)))
                assert " ".join(words.split()) not in everything


def test_cells_tagged_slide_replace_the_choice(slides):
    row = slides.rows()[3]
    notebook = nbformat.read(ROOT / "notebooks" / f"{row.name}.ipynb", 4)
    chosen = next(cell for cell in notebook.cells if re.search(r"\*\*Predict.*<details>", cell.source, re.S))
    chosen.metadata["tags"] = ["slide"]
    title, only, card = slides.deck(row, notebook)
    assert "Predict." in only.words and only.answer and "<details" not in only.words + only.answer
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.metadata["tags"] = ["slide"]
    with pytest.raises(SystemExit, match="cells are tagged `slide`; 13 fit"):
        slides.deck(row, notebook)


def test_a_lesson_without_a_card_is_named(slides):
    row = slides.rows()[3]
    notebook = nbformat.read(ROOT / "notebooks" / f"{row.name}.ipynb", 4)
    notebook.cells = [cell for cell in notebook.cells if not re.search(r"^card\(|^## Recap", cell.source, re.M)]
    with pytest.raises(SystemExit, match=rf"notebooks/{row.name}.ipynb: no cell calls `card\(...\)`"):
        slides.deck(row, notebook)


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def shown(decks):
    """The folder of the decks, with reveal.js."""
    if not REVEAL.exists():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("reveal.js is missing: run make slides")
    (decks / "reveal").symlink_to(REVEAL)
    return decks


@pytest.mark.browser
def test_the_arrow_keys_go_through_a_deck_with_every_answer_and_back_and_s_opens_the_notes(shown, browser):
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.goto((shown / "03_data_parallel.html").as_uri())
    page.wait_for_function("window.Reveal && Reveal.isReady()")
    slides, answers = page.evaluate("Reveal.getTotalSlides()"), page.locator(".fragment").count()
    assert slides > 2 and answers > 0
    for _ in range(slides - 1 + answers):
        assert not page.evaluate("Reveal.isLastSlide()")
        page.keyboard.press("ArrowRight")
    assert page.evaluate("Reveal.isLastSlide()")
    for _ in range(slides - 1 + answers):
        page.keyboard.press("ArrowLeft")
    assert page.evaluate("Reveal.isFirstSlide()")
    page.keyboard.press("End")
    assert page.evaluate("Reveal.isLastSlide()")
    page.keyboard.press("Home")
    with page.expect_popup() as notes:
        page.keyboard.press("s")
    notes.value.locator(".speaker-controls-notes").get_by_text("For the instructor").wait_for(timeout=10_000)
    notes.value.close()
    page.close()


@pytest.mark.browser
@pytest.mark.parametrize("name", LESSONS)
def test_no_slide_overflows_complains_or_asks_another_address(name, shown, browser):
    found, page = [], browser.new_page(viewport={"width": 1280, "height": 720})
    page.on("console", lambda said: said.type == "error" and found.append(said.text))
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("request", lambda asked: asked.url.startswith(("file:", "data:")) or found.append(asked.url))
    page.goto((shown / f"{name}.html").as_uri())
    page.wait_for_function("window.Reveal && Reveal.isReady()")
    for number in range(page.evaluate("Reveal.getTotalSlides()")):
        page.evaluate(f"Reveal.slide({number})")
        slide = page.locator("section.present")
        wide, high = slide.evaluate("element => [element.scrollWidth, element.scrollHeight]")
        if wide > 1280 or high > 720:
            found.append(f"slide {number + 1} takes {wide} x {high}")
        for picture in slide.locator("img").all():
            if picture.evaluate("element => !element.naturalWidth || element.clientHeight < 240"):
                found.append(f"the figure of slide {number + 1} is missing or too small")
        if slide.locator(".answer").count() and "question" in slide.get_attribute("class"):
            answer = slide.locator(".answer")
            if answer.is_visible():
                found.append(f"the answer of slide {number + 1} is seen at once")
            page.keyboard.press("ArrowRight")
            answer.wait_for(state="visible", timeout=5000)
    page.close()
    assert found == []


@pytest.mark.browser
@pytest.mark.parametrize("name", LESSONS)
def test_on_a_phone_slides_stand_one_below_the_other_and_none_is_too_wide(name, shown, browser):
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto((shown / f"{name}.html").as_uri())
    page.wait_for_function("window.Reveal && Reveal.isReady()")
    assert page.evaluate("Reveal.isScrollView()")
    sections = page.locator(".slides section")
    assert sections.count() == page.evaluate("Reveal.getTotalSlides()")
    outside = """all => all.flatMap((one) => [one, ...one.querySelectorAll("p, li, pre, img, h2, table")])
        .map((one) => [one.tagName, one.getBoundingClientRect(), one.textContent.slice(0, 40)])
        .filter(([, box]) => box.width && (box.left < -1 || box.right > 391))
        .map(([tag, box, text]) => [tag, box.right, text])"""
    assert sections.evaluate_all(outside) == []
    page.close()
