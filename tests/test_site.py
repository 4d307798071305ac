"""README fits on a screen or two and its links lead somewhere; the site is what `make site` promises."""

import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from course_copy import LEFT_OUT
from lab import chromium
from manyhands.course.folders import ROOT, version
from manyhands.course.lesson_parameters import read_cell
from manyhands.course.lessons import find_lessons
from manyhands.course.new_lesson import write_skeleton

LESSONS = [lesson.name for lesson in find_lessons(ROOT, own=False)]
WIDTHS = (390, 1280)  # of a phone, of a laptop
README = (ROOT / "README.md").read_text("utf-8")


def test_readme_is_short_and_names_both_commands():
    assert len(README) <= 6000
    assert re.search(r"^make lab\b", README, re.M) and re.search(r"^make test\b", README, re.M)


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("assets/site/*.md"))]
)
def test_each_relative_link_of_a_page_leads_to_a_file(page):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text("utf-8"))
    files = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in files if not (ROOT / page).parent.joinpath(target).exists()] == []


@pytest.mark.parametrize("page", sorted(p.name for p in ROOT.glob("assets/site/*.md")))
def test_each_make_command_of_a_page_is_a_target_that_reads_what_it_is_given(page):
    makefile, text = (ROOT / "Makefile").read_text("utf-8"), (ROOT / "assets" / "site" / page).read_text("utf-8")
    shown = re.findall(r"(?:`|^|&& )make ([a-z-]+)((?: [A-Z_]+=(?:\"[^\"]*\"|[^\s`]+))*)", text, re.M)
    unknown = [
        f"make {target} {name}" for target, given in shown for name in ["", *re.findall(r"([A-Z_]+)=", given)]
        if not re.search(rf"^{target}:" if not name else rf"\b{name}\b", makefile, re.M)
    ]  # fmt: skip
    assert unknown == []


def test_readme_shows_the_cell_of_its_picture_and_what_it_printed():
    first, _ = json.loads((ROOT / "assets" / "recorded" / "readme.json").read_text("utf-8"))["cells"]
    assert f"```python\n{first['source']}\n```" in README
    assert "```\n" + "\n".join(first["lines"]) + "\n```" in README


@pytest.fixture(scope="module")
def build():
    """The module assets/site/build.py, and its neighbor `pages` as `build.pages`."""
    folder = ROOT / "assets" / "site"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("build", folder / "build.py")
        module = sys.modules["build"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(folder))
        for name in ("build", "pages"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def lessons(build):
    """({name: notebook as the site shows it}, rows of README's table)."""
    table = build.rows()
    paths = {row.name: f"notebooks/{row.name}.ipynb" for row in table}
    return {name: build.for_the_site(nbformat.read(ROOT / path, 4), path) for name, path in paths.items()}, table


def minute(clock):
    hours, minutes = map(int, clock.split(":"))
    return 60 * hours + minutes


def test_each_program_and_track_runs_on_without_a_gap_and_has_breaks(build, lessons):
    notebooks, table = lessons
    tracks = [text for page, text in build.pages_of_lessons(notebooks, table).items() if page != "map"]
    days = re.split(r"\| from \| to \| \|", "".join([build.pages.programs(table), *tracks]))[1:]
    assert len(days) == 4 + 5 + len(tracks)
    for day in days:
        rows = re.findall(r"^\| (\d\d:\d\d) \| (\d\d:\d\d) \| (.*) \|$", day, re.M)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(rows))
        at_work = 0
        for begin, end, words in rows:
            at_work = 0 if words in ("break", "lunch") else at_work + minute(end) - minute(begin)
            assert at_work <= 125, f"{at_work} minutes without a break, until {end}"
        for begin, end, words in rows:  # sections of a lesson lie between its first and its last minute
            below = day.split(f"| {words} |\n")[-1].split("**[")[0]
            starts = re.findall(r"^\| (\d\d:\d\d) \| \| ", below, re.M) if words.startswith("**") else []
            assert all(minute(begin) <= minute(start) < minute(end) for start in starts)


def test_a_lesson_that_needs_several_ranks_says_so_on_the_page_of_its_track(build, lessons, monkeypatch):
    said = "It needs at least 3 ranks."
    assert not [page for page, text in build.pages_of_lessons(*lessons).items() if "It needs at least" in text]
    monkeypatch.setattr(build, "read_parameters", lambda script: read_cell("n_ranks = 4  # processes, at least 3"))
    assert sum(text.count(said) for text in build.pages_of_lessons(*lessons).values()) == len(lessons[1])
    for broken in ("n_ranks = (", "n_ranks = 2 + 2", "length = '"):
        monkeypatch.setattr(build, "read_parameters", lambda script, broken=broken: read_cell(broken))
        assert "02 " in build.pages_of_lessons(*lessons)["foundations.md"], "a broken cell of parameters stops no site"


def test_every_prediction_is_asked_on_the_page_to_print_and_none_is_answered(build, lessons):
    notebooks, table = lessons
    text = build.pages.predictions(notebooks, table)
    asked = sum(cell.source.count("**Predict") for nb in notebooks.values() for cell in nb.cells)
    assert len(re.findall(r"^1\. \*[^*]+.*:\* \S", text, re.M)) == asked > 100
    assert "<details" not in text and "lank, `____`" not in text


def test_the_zoo_has_each_lessons_bug_by_symptom(build, lessons):
    notebooks, table = lessons
    found = re.findall(r"\| \[(\d\d)\]\(notebooks/\w+\.ipynb#\S*zoo\S*\) \|$", build.pages.zoo(notebooks, table), re.M)
    assert sorted(found) == [row.number for row in table]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("**50 minutes**", "`90 with those marked MORE`"),
        ("9 with those marked MORE", "`**you can**`, with a list below"),
    ],
)
def test_a_lesson_whose_head_lacks_something_is_named_with_what_it_lacks(build, text, wanted):
    notebook = SimpleNamespace(cells=[SimpleNamespace(source=text)])
    with pytest.raises(SystemExit, match=re.escape(f"notebooks/16_mine.ipynb: its first cell lacks {wanted}")):
        build.head(notebook, "16_mine")


def test_each_recorded_run_on_a_gpu_is_on_the_page_tested_on():
    rows = re.findall(r"^\| \d{4}-.*$", (ROOT / "assets" / "site" / "tested_on.md").read_text("utf-8"), re.M)
    found = 0
    for path in sorted((ROOT / "assets" / "recorded").glob("*.json")):
        run = json.loads(path.read_text("utf-8"))
        if (run.get("versions") or {}).get("cuda"):
            (row,) = [row for row in rows if path.name in row]
            assert run["date"] in row and all(run["versions"][name] in row for name in ("torch", "cuda", "python"))
            found += 1
    assert found == len(rows) > 0


class Page(HTMLParser):
    """The ids and links of a page."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links = set(), []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids |= {attributes.get("id")}
        self.links += [attributes[name] for name in ("href", "src") if attributes.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of a site, built within 3 minutes from a copy of the course that has no outputs/ of its own."""
    if not importlib.util.find_spec("furo"):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("sphinx and furo are missing: run make site")
    folder, clone = (tmp_path_factory.mktemp("site") / name for name in ("html", "clone"))
    shutil.copytree(ROOT, clone, ignore=LEFT_OUT)
    held = (
        'name = "Summer School & Co"\npage = "https://example.org/school"\nlogo = "logo.svg"\n' + 'place = "Room 5"\n'
    )
    held += "".join(f'[[days]]\ndate = 2027-03-0{day}\nprogram = ["00"]\n' for day in (1, 2))
    (clone / "assets" / "site" / "event.toml").write_text(held)
    shutil.copy(ROOT / "assets" / "site" / "_static" / "favicon.svg", clone / "assets" / "site" / "logo.svg")
    write_skeleton("77_mine", "Our network", clone)
    command = [sys.executable, clone / "assets" / "site" / "build.py", "--output", folder]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@pytest.mark.browser
def test_a_centres_name_page_and_logo_are_on_each_page(site):
    for name in ("index.html", "notebooks/03_data_parallel.html"):
        page = (site / name).read_text("utf-8")
        assert '<a href="https://example.org/school">Summer School &amp; Co</a>, 1 to 2 March 2027, Room 5' in page
        assert re.search(r'<img[^>]* src="(\.\./)?_static/logo\.svg"', page)
        assert f"CC BY 4.0; version {version(ROOT).split()[0]}" in page


@pytest.mark.browser
def test_a_centres_own_lesson_is_a_page_and_stands_in_the_table_of_lessons_in_a_track_of_its_own(site):
    assert "Build A: the mean" in (site / "notebooks" / "77_mine.html").read_text("utf-8")
    table = (site / "lessons.html").read_text("utf-8")
    assert re.search(r'href="of_this_centre.html".*href="notebooks/77_mine.html"[^<]*<[^<]*>Our network<', table, re.S)


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def complaints(browser, site):
    """Every page seen at both widths: what is too wide, hidden commands, what the console said, what it asked for."""
    found, page = [], browser.new_page()
    page.on("console", lambda said: said.type == "error" and found.append((page.url, said.text)))
    page.on("pageerror", lambda error: found.append((page.url, str(error))))
    page.on("request", lambda asked: asked.url.startswith(("file:", "data:")) or found.append((page.url, asked.url)))
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri())
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            wide = page.evaluate("document.documentElement.scrollWidth")
            if wide > width:
                found.append((page.url, f"{wide} pixels wide in a window of {width}"))
        hidden = "blocks => blocks.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText)"
        found += [(page.url, f"hidden: {text}") for text in page.eval_on_selector_all(".highlight-bash pre", hidden)]
    page.close()
    return found


@pytest.mark.browser
def test_no_page_is_too_wide_and_none_complains_or_asks_another_address(complaints):
    assert complaints == []


SAMPLE = [
    "index",
    "zoo",
    "first_hour",
    "notebooks/03_data_parallel",
    "assets/handbook/02_collectives",
    "recipes",
    "troubleshooting",
]

TOO_FAINT = """() => {  // text whose contrast with what lies behind it is below WCAG's AA: 4.5, or 3 for large letters
  const one = { width: 1, height: 1 };
  const canvas = Object.assign(document.createElement("canvas"), one).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (front, back) => [0, 1, 2].map((i) => front[i] * front[3] + back[i] * (1 - front[3]));
  const behind = (element) => element
    ? over(rgba(getComputedStyle(element).backgroundColor), behind(element.parentElement)) : [255, 255, 255];
  const linear = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = (c) => 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]) + 0.05;
  const found = new Set(), texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let seen = 0;
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement, text = texts.currentNode.data.trim();
    const shown = element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
    if (!text || !shown || element.closest("script, style, svg") || !element.getClientRects().length) continue;
    const style = getComputedStyle(element), back = behind(element), colour = rgba(style.color);
    for (let up = element; up; up = up.parentElement) colour[3] *= getComputedStyle(up).opacity;
    const [dark, bright] = [light(over(colour, back)), light(back)].sort((a, b) => a - b);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    seen += 1;
    if (bright / dark < (large ? 3 : 4.5)) found.add(`${(bright / dark).toFixed(2)} ${element.className}: ${text}`);
  }
  return [seen, [...found]];
}"""

FOCUSED = """() => {
  const element = document.activeElement, style = getComputedStyle(element);
  const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0 && style.opacity > 0;
  return [element.tagName, element.className, ring];
}"""


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", SAMPLE)
def test_text_is_strong_enough_to_read_in_light_and_dark(name, scheme, site, browser):
    page = browser.new_page(color_scheme=scheme)
    page.goto((site / f"{name}.html").as_uri())
    seen, too_faint = page.evaluate(TOO_FAINT)
    assert seen > 60 and too_faint == []
    page.close()


@pytest.mark.browser
@pytest.mark.parametrize("name", SAMPLE)
def test_the_tab_key_reaches_all_of_a_page_and_shows_where_it_is(name, site, browser):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((site / f"{name}.html").as_uri())
    stops = []
    for _ in range(600):
        page.keyboard.press("Tab")
        stop = page.evaluate(FOCUSED)
        if stop[0] == "BODY":
            break
        stops.append(stop)
    assert stops[0][1].startswith("skip-to-content") and [stop for stop in stops if not stop[2]] == []
    kinds = [(tag, classes.split(" ")[0]) for tag, classes, _ in stops]
    assert ("INPUT", "sidebar-search") in kinds and ("BUTTON", "theme-toggle") in kinds
    for tag in ("SUMMARY", "A"):  # folds, and links of text and menu
        there = sum(one.is_visible() for one in page.locator(f"{tag}:not(.headerlink):not(.skip-to-content)").all())
        assert sum(kind == tag for kind, _ in kinds) >= there
    page.close()


@pytest.mark.browser
@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_is_a_page_without_notes_and_its_solutions_show_at_a_click(name, site, browser):
    cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", 4).cells
    notes = [cell.source for cell in cells if "notes" in cell.metadata.get("tags", [])]
    solutions = [cell for cell in cells if "solution" in cell.metadata.get("tags", [])]
    assert notes and solutions
    page = browser.new_page()
    page.goto((site / "notebooks" / f"{name}.html").as_uri())
    assert page.locator("h1").count() == 1
    text = page.locator("body").evaluate("element => element.textContent")
    assert "For the instructor" in "".join(notes) and "For the instructor" not in text
    folds = page.locator("details", has=page.locator("summary", has_text=re.compile("^Solution")))
    shown = folds.locator("pre")
    assert shown.count() == len(solutions)
    assert not any(one.evaluate("element => element.checkVisibility()") for one in shown.all())
    folds.locator("summary").first.click()
    assert shown.first.evaluate("element => element.checkVisibility()")
    answers = page.locator("details", has=page.locator("summary", has_text=re.compile(": (no guess yet|the figure)$")))
    assert answers.count() >= 3 and not any(one.evaluate("element => element.open") for one in answers.all())
    assert not page.get_by_text("no guess yet: it is").count(), "an answer without a fold"
    page.close()


@pytest.mark.browser
def test_each_link_of_a_page_arrives(site):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            address = urlsplit(link)
            if not address.scheme and not link.startswith("#"):
                target = Path(os.path.normpath(path.parent / unquote(address.path)))
                known = pages[target].ids if target in pages else {address.fragment}
                if not target.exists() or (address.fragment and unquote(address.fragment) not in known):
                    dead.append((path.name, link))
            elif link.startswith("#") and len(link) > 1 and unquote(link[1:]) not in page.ids:
                dead.append((path.name, link))
    assert len(pages) > len(LESSONS) + 15 and dead == []


@pytest.mark.browser
def test_the_search_finds_a_term_in_lesson_and_glossary(site, browser):
    page, failed = browser.new_page(), []
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.goto((site / "search.html").as_uri() + "?q=all-reduce")
    page.locator("#search-results li").first.wait_for()
    page.get_by_text("Search finished").wait_for()
    found = {Path(urlsplit(a.get_attribute("href")).path).stem for a in page.locator("#search-results li a").all()}
    assert {"02_collectives", "glossary"} <= found and failed == []
    page.close()
