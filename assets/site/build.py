"""Build the site into outputs/site: lessons with their stored outputs, guides, glossary, search; no request leaves it.

    make site                                       # open outputs/site/index.html, from a disk as well
    python assets/site/build.py --output FOLDER

Pages are Markdown in assets/site, one for each kind of reader. A lesson's notes for instructors are left out, and its
solutions are folded. Lessons, minutes and tracks come from README's table, counts from the notebooks. A warning (a dead
link, a page that no list names) ends the build with status 1.
"""

import argparse
import base64
import json
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError

import nbformat
import pages
from event import read_event
from manyhands.course.folders import version
from manyhands.course.lesson_parameters import least_ranks
from manyhands.course.lesson_parameters import read as read_parameters
from manyhands.course.lessons import Lesson, find_lessons, left_alone
from manyhands.course.pairs import PairError, read

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOR_TEACHERS = (  # pages that `--for attendees` leaves out
    "for_us", "rehearsal", "teach", "versions", "run_book", "first_hour", "predictions", "install", "hub", "listens",
    "contributing", "new_lesson", "new_site", "changes", "corpus",
)  # fmt: skip
PAGES = {  # file of the course: page of the site; files of assets/site and the lessons keep their names
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "jobs/README.md": "jobs.md",
    "data/README.md": "corpus.md",
}
left_out: set[str] = set()  # pages, without ".md"
LICENSE = "the Many Hands authors; code MIT, text and figures CC BY 4.0"
OWN_TRACK = "Of this centre"
GENERATED = {  # pages that files of the course name in italics, since they are only in the site
    "Programs with clock times": "programs.md",
    "All predictions": "predictions.md",
    "The bug zoo": "zoo.md",
}
ROW = re.compile(r"^\| \[(\d\d)\]\(notebooks/(\w+)\.ipynb\) \| ([^|]+) \| (\d+) \| ([^|]+) \|$", re.M)


@dataclass(frozen=True)
class Row:
    """A lesson in README's table."""

    number: str
    name: str
    title: str
    core: int  # minutes of the sections marked CORE
    track: str


def rows():
    """Return the rows of README's table of lessons, in its order."""
    found = [Row(a, b, c, int(d), e) for a, b, c, d, e in ROW.findall((ROOT / "README.md").read_text("utf-8"))]
    lessons = {lesson.name for lesson in find_lessons(ROOT, own=False) if lesson.notebook.exists()}
    if differ := {row.name for row in found} ^ lessons:
        others = "".join(f"; {sentence}" for sentence in left_alone(ROOT))
        raise SystemExit(f"README.md's table of lessons differs from notebooks/: {', '.join(sorted(differ))}{others}")
    return found + [own_row(lesson) for lesson in find_lessons(ROOT) if lesson.own]


def own_row(lesson):
    """Return the Row of a centre's own lesson, from its first cell: README's table does not have it."""
    try:
        text = read(lesson.notebook).cells[0].source
    except PairError as error:
        raise SystemExit(str(error)) from None
    title, core = re.search(rf"^# {lesson.number} (.+)$", text, re.M), re.search(r"\*\*(\d+) minutes\*\*", text)
    for found, wanted in ((title, f"`# {lesson.number} Title`"), (core, "`**50 minutes**`")):
        if not found:
            raise SystemExit(f"notebooks/{lesson.name}.ipynb: its first cell lacks {wanted}")
    return Row(lesson.number, lesson.name, title[1], int(core[1]), OWN_TRACK)


def stored(table):
    """Return {lesson's name: its notebook}; ends the program with a sentence for each one that is broken."""
    found, broken = {}, []
    for row in table:
        try:
            found[row.name] = read(Lesson(row.name, ROOT).notebook)
        except PairError as error:
            broken.append(str(error))
    if broken:
        raise SystemExit("\n".join(broken))
    return found


def page_of(path):
    """Return the page of the site that a file of the course becomes, or None for a file that is not a page."""
    page = PAGES.get(path) or (path.removeprefix("assets/site/") if re.fullmatch(r"assets/site/\w+\.md", path) else "")
    if page:
        return None if page.removesuffix(".md") in left_out else page
    if re.fullmatch(r"notebooks/\d\d_\w+\.ipynb|assets/\w+\.(svg|md)|assets/handbook/\w+\.md", path):
        return path
    return None


def with_links(text, path):
    """Return the Markdown of the file `path` of the course with links that lead to pages of the site.

    A link to a file that is not a page (a script, a license) becomes plain text. Anchors are lower case on the site.
    """
    here = posixpath.dirname(page_of(path))

    def moved(match):
        picture, words, target = match.groups()
        file, _, anchor = target.partition("#")
        known = posixpath.normpath(posixpath.join(posixpath.dirname(path), file or posixpath.basename(path)))
        if re.match(r"[a-z]+:", target) or not (ROOT / known).exists():
            return match[0]
        if page_of(known) is None:
            return words
        anchor = anchor and f"#{anchor.lower()}"
        return f"{picture}[{words}]({posixpath.relpath(page_of(known), here or '.') if file else ''}{anchor})"

    for title, page in GENERATED.items():
        link = f"[{title}]({posixpath.relpath(page, here or '.')})"
        text = text.replace(f"*{title}*", title if page.removesuffix(".md") in left_out else link)
    return re.sub(r"(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))+)\]\(([^)\s]+)\)", moved, text)


def for_the_site(notebook, path):
    """Return a lesson as the site shows it: no notes, folded solutions, one title."""
    cells, titles = [], 0
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if "notes" in tags:
            continue
        if cell.cell_type == "markdown":
            lines = []
            for line in with_links(cell.source, path).split("\n"):
                titles += line.startswith("# ")
                lines.append(f"#{line}" if line.startswith("# ") and titles > 1 else line)
            cell.source = "\n".join(lines)
        elif cell.metadata.get("jupyter", {}).get("source_hidden"):
            cell.metadata["tags"] = [*tags, "hide-input"]
            cell.metadata["mystnb"] = {"code_prompt_show": "Show the code", "code_prompt_hide": "Hide the code"}
        cells.append(cell)
    notebook.cells = cells
    return notebook


def head(notebook, name):
    """Return (minutes with the sections marked MORE, what you can do afterwards as a Markdown list) of a lesson.

    Raise SystemExit with the file and the words that its first cell lacks.
    """
    text = notebook.cells[0].source
    everything = re.search(r"(\d+) with those marked MORE", text)
    can = re.search(r"\*\*you can\*\*\n+((?:- .*\n(?:  .*\n)*)+)", text + "\n")
    for found, wanted in ((everything, "`90 with those marked MORE`"), (can, "`**you can**`, with a list below")):
        if not found:
            raise SystemExit(f"notebooks/{name}.ipynb: its first cell lacks {wanted}")
    return int(everything[1]), can[1]


def counts(notebooks, table):
    """Return the counts of the opening page: {name in the page: number}."""
    text = ["\n".join(cell.source for cell in one.cells if cell.cell_type == "markdown") for one in notebooks.values()]
    return {
        "lessons": len(table),
        "predictions": sum(len(re.findall(r"\*\*Predict\b", one)) for one in text),
        "builds": sum(len(re.findall(r"^#+ Build [A-Z]", one, re.M)) for one in text),
        "exercises": sum(len(re.findall(r"^#+ Exercise \d", one, re.M)) for one in text),
        "figures": len(list((ROOT / "assets").glob("[0-9][0-9]_*.svg"))),
        "minutes": sum(row.core for row in table),
        "terms": len(re.findall(r"^## ", (ROOT / "assets" / "glossary.md").read_text("utf-8"), re.M)),
    }


def for_a_class(table, attendees=30, gpus_per_node=4, cores=64, gib=256):
    """Return the numbers of the page for whoever decides: {name in the page: number}."""
    from manyhands.course.lessons import AIM_BYTES
    from manyhands.tools import classroom

    core = {row.number: row.core for row in table}
    half = [one for one in pages.PROGRAMS["Half a day"][0][1] if isinstance(one, str)]
    jobs = [classroom.ClassJob.read(*file) for file in classroom.job_files()]
    hours = {job.name: job.node_hours(attendees, gpus_per_node, job.walltime_s) for job in jobs}
    return {
        "hours": f"{sum(core.values()) / 60:.0f}", "halfday": sum(core[one] for one in half),
        "notebook_gib": f"{AIM_BYTES / 2**30:.0f}", "fit_memory": gib * 2**30 // AIM_BYTES,
        "ranks_per_core": classroom.RANKS_PER_CORE,
        "fit_cores": classroom.RANKS_PER_CORE * cores // classroom.NOTEBOOK_RANKS,
        "fit_ports": len(classroom.PORT_RANGE) // classroom.PORTS // 2, "node_hours": f"{sum(hours.values()):.0f}",
        "halfday_node_hours": f"{sum(h for name, h in hours.items() if name.startswith('ddp')):.0f}",
    }  # fmt: skip


def pages_of_lessons(notebooks, table, decks=()):
    """Return {page: Markdown} of a page for each track, and the map of all lessons under "map".

    `decks`: the names of the lessons whose slides are in the site's folder, for links to them.
    """
    found, tracks = {}, list(dict.fromkeys(row.track for row in table))
    lines = ["| | lesson | CORE | with MORE |", "|---|---|--:|--:|"]
    for track in tracks:
        page = track.lower().replace(" ", "_")
        mine = [row for row in table if row.track == track]
        lines.append(f"| | **[{track}]({page}.md)** | **{sum(row.core for row in mine)}** | |")
        parts = [
            f"# {track}",
            "The lessons of this track, then a timetable with the start of each section marked CORE.",
        ]
        names = []
        for row in mine:
            everything, can = head(notebooks[row.name], row.name)
            file = f"notebooks/{row.name}.ipynb"
            slides = f'<a href="slides/{row.name}.html">Slides</a>' if row.name in decks else ""
            title = " · ".join(filter(None, (f"[{row.title}]({file})", slides)))
            lines.append(f"| {row.number} | {title} | {row.core} | {everything} |")
            least = 1
            with suppress(OSError, ValueError, SyntaxError, TokenError):  # a preflight names a broken script
                least = least_ranks(read_parameters(Lesson(row.name, ROOT).script))
            needs = f"It needs at least {least} ranks. " if least > 1 else ""
            intro = f"{row.core} minutes, {everything} with the sections marked MORE. {needs}{slides}"
            intro += "\n\nAfter it you can"
            parts.append(f"## [{row.number} {row.title}]({file})\n\n{intro}\n\n{with_links(can, file)}")
            names.append(f"notebooks/{row.name}")
        parts += ["## Clock times", pages.morning(mine, notebooks)]
        parts.append("```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```")
        found[f"{page}.md"] = "\n\n".join(parts) + "\n"
    lines.append(f"| | all | **{sum(row.core for row in table)}** | |")
    found["map"] = "\n".join(lines)
    return found


def check_that_answered():
    """Return a cell with a wrong answer, and the sentence of its check, as Markdown; the cell ran for readme.json."""
    check = json.loads((ROOT / "assets" / "recorded" / "readme.json").read_text("utf-8"))["check"]
    return "```python\n" + check["source"] + "\n```\n\n> " + " ".join(check["lines"])


def gantt_of(notebook, target):
    """Write the chart of 1F1B that a lesson has stored into the folder `target`. Returns it as Markdown."""
    cell = next(cell for cell in notebook.cells if "show_pipeline()" in cell.source and cell.get("outputs"))
    chart = next(output for output in cell.outputs if "image/png" in output.get("data", {}))
    (target / "assets" / "gantt.png").write_bytes(base64.b64decode(chart.data["image/png"]))
    return f"![{chart.metadata['image/png']['alt']}](assets/gantt.png)"


def without_left_out(text):
    """Return a generated page whose links to pages that are left out are plain words."""
    return re.sub(r"\[([^\[\]]+)\]\((\w+)\.md\)", lambda link: link[1] if link[2] in left_out else link[0], text)


def for_attendees(index):
    """Return the opening page without teachers' pages: in its lists, and its rows for those who teach or install."""
    text = "\n".join(
        line for line in index.split("\n") if line not in left_out and not line.startswith(("| an ", "| deciding"))
    )
    return re.sub(r"```\{toctree\}\n:hidden:\n:caption: .*\n\n*```\n\n?", "", text)


def lay_out(target, held, decks=()):
    """Write the site's sources into the folder `target`, for the Event `held`; `decks`: see `pages_of_lessons`."""
    shutil.copytree(HERE / "_static", target / "_static")
    shutil.copy(HERE / "conf.py", target)
    (target / "assets" / "handbook").mkdir(parents=True)
    for figure in (ROOT / "assets").glob("*.svg"):
        shutil.copy(figure, target / "assets")
    (target / "notebooks").mkdir()
    table, notebooks = rows(), {}
    for name, notebook in stored(table).items():
        path = f"notebooks/{name}.ipynb"
        notebooks[name] = for_the_site(notebook, path)
        nbformat.write(notebooks[name], target / path)
    lessons = pages_of_lessons(notebooks, table, decks)
    numbers = {**counts(notebooks, table), **for_a_class(table), "map": lessons.pop("map")}
    numbers |= {"check": check_that_answered(), "gantt": gantt_of(notebooks["08_pipeline_parallel"], target)}
    try:
        lessons["programs.md"] = pages.programs(table, held.program(table))
    except ValueError as error:
        raise SystemExit(f"{HERE / 'event.toml'}: {error}") from None
    if "predictions" not in left_out:
        lessons["predictions.md"] = pages.predictions(notebooks, table)
    lessons["zoo.md"] = pages.zoo(notebooks, table)
    if held.accent:
        with (target / "_static" / "site.css").open("a", encoding="utf-8") as style:
            style.write(f"\nbody {{ --color-brand-primary: {held.accent}; --color-brand-content: {held.accent}; }}\n")
    for name, text in lessons.items():
        (target / name).write_text(without_left_out(text), "utf-8")
    own = sorted(
        path.relative_to(ROOT).as_posix() for path in [*HERE.glob("*.md"), *(HERE.parent / "handbook").glob("*.md")]
    )
    for path in [name for name in PAGES if name != "README.md"] + own + ["assets/glossary.md"]:
        if page_of(path) is None:
            continue
        text = with_links((ROOT / path).read_text("utf-8"), path)
        text = re.sub(r"@(\w+)@", lambda found: str(numbers[found[1]]), text)
        if path.endswith("/index.md") and table[-1].track == OWN_TRACK:  # its page is in no list
            text = text.replace("\nzoo\n", "\nof_this_centre\nzoo\n")
        if path.endswith("/index.md") and left_out:
            text = for_attendees(text)
        (target / page_of(path)).write_text(text, "utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "site", help="folder of the pages")
    parser.add_argument("--for", dest="reader", choices=("all", "attendees"), default="all", help="who reads it")
    options, held = parser.parse_args(), read_event()
    output = options.output.resolve()
    left_out.update(FOR_TEACHERS if options.reader == "attendees" else ())
    with tempfile.TemporaryDirectory(prefix="manyhands-site-") as folder:
        source = Path(folder) / "source"
        source.mkdir()
        slides = output / "slides"
        lay_out(source, held, {deck.stem for deck in slides.glob("*.html")} if (slides / "reveal").exists() else ())
        shown = [f"project_copyright={LICENSE}; version {version(ROOT)}"]
        shown += [f"html_theme_options.announcement={held.banner}"] * bool(held.name)
        shown += [f"html_logo={HERE / held.logo}"] * bool(held.logo)
        words = ["-b", "html", "-q", "-W", "--keep-going", "-E", "-d", str(Path(folder) / "trees")]
        words += [word for value in shown for word in ("-D", value)]
        status = subprocess.run([sys.executable, "-m", "sphinx", *words, source, output]).returncode
        if status == 0 and held.days:
            (output / "event.ics").write_bytes(held.calendar(rows()))
    if status == 0:
        print("\n".join([*left_alone(ROOT), f"{output / 'index.html'}"]))
    return status


if __name__ == "__main__":
    sys.exit(main())
