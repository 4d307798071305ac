"""Write a deck of slides for each lesson into outputs/site/slides, from the lesson's notebook; they work offline.

    make slides                                     # open outputs/site/slides/03_data_parallel.html; S: speaker notes
    python assets/site/slides.py --output FOLDER

A deck begins with what you can do afterwards and ends with the lesson's card. Between them are the sections marked
CORE: their figures and their predictions, with the folded answer one step later. Cells tagged `slide` replace this
choice. The instructor's notes become speaker notes. Solutions and settings are left out. npm fetches reveal.js once.
"""

import argparse
import ast
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
from build import HERE, ROOT, head, rows, stored
from event import read_event
from markdown_it import MarkdownIt
from markupsafe import Markup

MOST = 15  # slides of a deck
LONG, DENSE = 600, 850  # characters of a slide from which its letters are smaller, and smallest
REVEAL = "reveal.js-6.0.2"
SHA256 = "2f0c20bfb02447a198a1ebe8a8c097a5437d035caa38f2820bf4ba887a3eac91"  # of the package on npm
FILES = ("LICENSE", "dist/reset.css", "dist/reveal.css", "dist/reveal.js", "dist/plugin/notes.js")
FIGURE = re.compile(r"!\[([^\]]*)\]\(\.\./assets/(\w+\.svg)\)")
FOLD = re.compile(r"<details><summary>[^<]*</summary>(.*?)</details>", re.S)
ASKED = re.compile(r"(?:\A|(?<=\n\n))(?:[^\n]+\n)*?[^\n]*\*\*Predict\b.*?(?=\n\n<|\n\n#|\n\n!|\Z)", re.S)
UNFOLDED = "Run the next cells of the notebook: they give the answer."
CELL = "\n\n<!-- next cell -->\n\n"
MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")


@dataclass
class Slide:
    """A slide: HTML of words, answer and notes, a file of assets/ and what it shows, and the section it belongs to."""

    kind: str  # title, section, question, card: a class of the page
    heading: str
    section: int
    words: str = ""
    answer: str = ""
    figure: str = ""
    alt: str = ""
    rank: int = 0  # slides with the largest are left out first
    lead: str = ""  # above a question
    first: bool = False  # a question that begins its section
    notes: str = field(default="", init=False)

    @property
    def size(self):
        """Return the class of the letters' size: the more words, the smaller."""
        page = self.lead + self.words + self.answer
        letters = len(re.sub(r"<[^>]+>", "", page)) + 50 * page.count("<tr") + 25 * page.count("<li")
        return "dense" if letters > DENSE else "long" if letters > LONG else ""


def html(text):
    """Return Markdown as HTML. Figures are gone, and links to the course's own files are plain words."""
    text = re.sub(r"\[([^\[\]]+)\]\((?![a-z]+:)[^)\s]+\)", r"\1", FIGURE.sub("", text))
    return Markup(MARKDOWN.render(re.sub(r"</?(details|summary)>", "", text).strip()))


def sections(cells):
    """Yield (index, heading, whether it is CORE, cell) of each cell without settings and solutions.

    Index 0 is the lesson's head.
    """
    index, heading, core = 0, "", False
    for cell in cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "markdown" and "notes" not in tags:
            for level, words in re.findall(r"^(#+) (.*)$", cell.source, re.M):
                if level == "##" or "(MORE" in words or "(CORE" in words:
                    index, core = index + 1, "(CORE" in words
                    heading = re.sub(r" \((CORE|MORE)[^)]*\)", "", words).replace("`", "")
        if not {"solution", "parameters"} & set(tags):
            yield index, heading, core, cell


def questions(text):
    """Yield (start, end, question, answer) of each prediction of a text; its answer is the fold that follows it."""
    for found in ASKED.finditer(text):
        fold = FOLD.match(text, found.end() + 2)
        question = re.sub(r"\s+(Replace the\s+blank|Type a \w+ in\s+place).*?[.](?=\s|$)", "", found[0], flags=re.S)
        yield found.start(), fold.end() if fold else found.end(), question, fold[1] if fold else UNFOLDED


def height(paragraph):
    """Return how many lines a paragraph of Markdown takes on a slide, about."""
    kept = re.match(r"[-|>*] |```|\|", paragraph)
    return sum(len(line) // 75 + 1 for line in (paragraph.split("\n") if kept else [paragraph.replace("\n", " ")]))


def fitting(paragraphs, lines):
    """Return the first paragraphs that fit into so many lines; of a first one that is too long, its first sentences."""
    kept, left = [], lines
    for paragraph in paragraphs:
        left -= height(paragraph)
        if left < 0:
            break
        kept.append(paragraph)
    if not kept and paragraphs and not re.match(r"[-|>]|```", paragraphs[0]):
        sentences = re.split(r"(?<=[.?!])\s(?=[A-Z*`\[])", paragraphs[0])
        while sentences and height(" ".join(sentences)) > lines:
            sentences.pop()
        kept = [" ".join(sentences)]
    return kept


def joined(paragraphs):
    """Return paragraphs as HTML, without a last sentence that announces what is not there."""
    kept = []
    for this, following in zip(paragraphs, paragraphs[1:] + [""], strict=False):
        if this.endswith(":") and not re.match(r"[-|>*] |```|\||\d", following):
            this = " ".join(re.split(r"(?<=[.?!])\s(?=[A-Z*`\[])", this)[:-1])
        kept.append(this)
    return html("\n\n".join(kept))


def paragraphs_of(text):
    """Return the paragraphs of a text without headings and figures."""
    return [part for part in re.split(r"\n\n+", FIGURE.sub("", text).strip()) if part.strip() and part[0] not in "#<"]


def of_a_section(index, heading, text):
    """Return the slides of a section in the text's order: its figures and questions, else its first words and builds.

    A question brings the paragraphs of its own cell that lead to it. A warm-up is computed by hand and its figure shows
    the result, so the figure comes after the question.
    """
    folds = [(fold.start(), fold.end()) for fold in FOLD.finditer(text)]
    figures = [one for one in FIGURE.finditer(text) if not any(a < one.start() < b for a, b in folds)]
    asked = list(questions(text))
    late = len(text) if heading.startswith("Warm-up") and asked else 0
    parts = [(one.start() + late, one) for one in figures] + [(one[0], one) for one in asked]
    parts.sort(key=lambda part: part[0])
    opening = re.split(CELL + r"|\n#+ |\*\*Predict", text)[0]
    if not parts:
        words = fitting(paragraphs_of(opening), 8)
        words += [f"**{a}:** {name}" for a, name in re.findall(r"^### (Build [A-Z]): (.*)$", text, re.M)[:3]]
        return [Slide("section", heading, index, joined(words), rank=3)] if words else []
    slides, before = [], 0
    for position, (_, part) in enumerate(parts):
        first = position == 0
        if isinstance(part, re.Match):
            words = fitting(paragraphs_of(opening), 4) if first else []
            alt = part[1].replace("\n", " ")
            slides.append(Slide("section", heading, index, joined(words[:1]), "", part[2], alt, 1 if first else 2))
            before = before if late else part.end()
            continue
        start, end, question, answer = part
        near = paragraphs_of(re.split(CELL + r"|\n#+ .*\n", text[before:start])[-1])
        room = 15 - height(question) - height(answer)
        lead = fitting(near[::-1], room)[::-1] if near and height(near[-1]) <= room else []
        far = fitting(paragraphs_of(opening), 3)[:1] if first else []
        again = any(" ".join(one.split()).startswith(" ".join(far[0].split())) for one in near) if far else True
        if not again and sum(map(height, lead)) + 3 <= room:
            lead = far + lead
        slides.append(Slide("question", heading, index, html(question), html(answer), lead=joined(lead), first=first))
        before = end
    return slides


def of_the_core(cells):
    """Return the slides of the sections marked CORE, but for the start and the card."""
    texts = {}
    for index, heading, core, cell in cells:
        words = cell.cell_type == "markdown" and "notes" not in cell.metadata.get("tags", [])
        if core and words and heading not in ("Start", "Recap", "The end"):
            texts.setdefault((index, heading), []).append(cell.source)
    slides = []
    for (index, heading), found in texts.items():
        slides += of_a_section(index, heading, re.split(r"\(CORE.*\n", CELL.join(found) + "\n", maxsplit=1)[1])
    return slides


def of_the_tag(cells):
    """Return a slide for each cell tagged `slide`: its text or code, with its fold as the answer."""
    slides = []
    for index, heading, _, cell in cells:
        if "slide" in cell.metadata.get("tags", []):
            text = cell.source if cell.cell_type == "markdown" else f"```\n{cell.source}\n```"
            figure, fold = FIGURE.search(text), FOLD.search(text)
            words = re.sub(r"^#+ .*\n*", "", FOLD.sub("", text), flags=re.M)
            slide = Slide("section", heading, index, html(words), html(fold[1]) if fold else "")
            if figure:
                slide.figure, slide.alt = figure[2], figure[1].replace("\n", " ")
            slides.append(slide)
    return slides


def card(cells, name):
    """Return the lines of a lesson's card as Markdown: of its call of `card`, else the list under "Recap".

    Raise SystemExit with the file where there is neither.
    """
    recap = ""
    for cell in cells:
        called = re.search(r"^card\(.*^\)$", cell.source, re.M | re.S) if cell.cell_type == "code" else None
        if called:
            call = ast.parse(called[0], mode="eval").body
            command = [ast.literal_eval(word.value) for word in call.keywords if word.arg == "command"]
            lines = [f"{number}. {ast.literal_eval(line)}" for number, line in enumerate(call.args, 1)]
            return "\n".join(lines + [f"\n```\n{line}\n```" for line in command])
        if found := re.search(r"^## Recap\n+(.*?)(?=\n#|\Z)", cell.source, re.M | re.S):
            recap = recap or found[1]
    if not recap:
        raise SystemExit(f"notebooks/{name}.ipynb: no cell calls `card(...)`, and none has a list under `## Recap`")
    return recap


def deck(row, notebook):
    """Return the slides of a lesson, at most MOST, with its notes on the section that they stand in."""
    cells = list(sections(notebook.cells))
    chosen = of_the_tag(cells)
    if len(chosen) > MOST - 2:
        raise SystemExit(f"{row.name}: {len(chosen)} cells are tagged `slide`; {MOST - 2} fit between title and card")
    chosen = chosen or of_the_core(cells)
    # what goes first: headings alone, then a section's further figures, then its first; within a kind, the last
    ranked = sorted(range(len(chosen)), key=lambda place: (chosen[place].rank, place))
    chosen = [chosen[place] for place in sorted(ranked[: MOST - 2])]
    slides = [
        Slide(
            "title",
            f"{row.number} {row.title}",
            0,
            html(f"**After this lesson you can**\n\n{head(notebook, row.name)[1]}"),
        ),
        *chosen,
        Slide("card", "To take home", cells[-1][0] + 1, html(card(notebook.cells, row.name))),
    ]
    for index, _, _, cell in cells:
        if "notes" in cell.metadata.get("tags", []):
            mine = [slide for slide in slides if slide.section == index]
            slide = mine[0] if mine else [slide for slide in slides if slide.section < index][-1]
            slide.notes += html(cell.source)
    return slides


def get_reveal(folder):
    """Copy what the decks need of reveal.js into `folder` if it is not there yet; npm fetches it."""
    if all((folder / name.removeprefix("dist/")).exists() for name in FILES):
        return
    again = "Install npm (Node.js) and be online for one `make slides`, or unpack a `make bundle FULL=yes`."
    with tempfile.TemporaryDirectory(prefix="manyhands-slides-") as place:
        try:
            command = [
                "npm",
                "pack",
                "--silent",
                "--fetch-retries=0",
                REVEAL.replace("-", "@"),
                "--pack-destination",
                place,
            ]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=180)
        except FileNotFoundError:
            raise SystemExit(f"npm is missing, and the slides need {REVEAL} from it. {again}") from None
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            said = (error.stderr or "no answer").strip().splitlines()[0]
            raise SystemExit(f"npm could not fetch {REVEAL} ({said}). {again}") from None
        package = Path(place) / f"{REVEAL}.tgz"
        if hashlib.sha256(package.read_bytes()).hexdigest() != SHA256:
            raise SystemExit(f"{REVEAL} from npm is not the package of assets/site/slides.py: its SHA-256 differs")
        with tarfile.open(package) as files:
            for name in FILES:
                target = folder / name.removeprefix("dist/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(files.extractfile(f"package/{name}").read())


def write(output):
    """Write all decks and their figures; `output`/slides/reveal is not touched."""
    (output / "slides").mkdir(parents=True, exist_ok=True)
    (output / "assets").mkdir(exist_ok=True)
    template = jinja2.Environment(autoescape=True).from_string((HERE / "slides.html").read_text("utf-8"))
    held = read_event()
    if held.logo:
        shutil.copy(HERE / held.logo, output / "assets")
    table = rows()
    notebooks = stored(table)
    for row in table:
        slides = deck(row, notebooks[row.name])
        for slide in slides:
            if slide.figure:
                shutil.copy(ROOT / "assets" / slide.figure, output / "assets")
        page = template.render(title=f"{row.number} {row.title}", slides=slides, event=held)
        (output / "slides" / f"{row.name}.html").write_text(page, "utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "site", help="folder of the site")
    output = parser.parse_args().output.resolve()
    get_reveal(output / "slides" / "reveal")
    write(output)
    print(f"{output / 'slides'}")


if __name__ == "__main__":
    sys.exit(main())
