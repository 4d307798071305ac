"""Build the site into outputs/site: lessons with their stored outputs, guides, glossary, search; no request leaves it.

    make site                                       # open outputs/site/index.html, from a disk as well
    python assets/site/build.py --output FOLDER

Pages are Markdown below assets/site, one for each kind of reader. A lesson's notes for instructors are left out, its
solutions folded. A warning (a dead link, a page that no list names) ends the build with status 1.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md", "jobs/README.md": "jobs.md"}
MOVED = {"README.md#your-own-text": "own_text.md", "jobs/README.md": "jobs.md", "data/README.md": "corpus.md"}


def lay_out(target):
    """Write the site's sources into the folder `target`."""
    shutil.copytree(HERE, target, ignore=shutil.ignore_patterns("*.py", "requirements.txt", "__pycache__"))
    shutil.copy(HERE / "conf.py", target)
    for name, page in {**PAGES, "data/README.md": "corpus.md"}.items():
        (target / page).write_text(with_links((ROOT / name).read_text("utf-8"), ""), "utf-8")
    (target / "assets").mkdir()
    for figure in (ROOT / "assets").glob("*.svg"):
        shutil.copy(figure, target / "assets")
    glossary = (ROOT / "assets" / "glossary.md").read_text("utf-8")
    (target / "assets" / "glossary.md").write_text(with_links(glossary, "../"), "utf-8")
    (target / "notebooks").mkdir()
    for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        nbformat.write(for_the_site(nbformat.read(path, 4)), target / "notebooks" / path.name)


def with_links(text, up):
    """Return a page's Markdown whose links lead to pages of the site; `up` leads from the page to the site's top.

    Anchors are lower case there. What is no page (a script, a licence) is named, not linked.
    """

    def moved(match):
        text, target = match[1], match[2]
        bare = target.removeprefix("../")
        if bare in MOVED:
            return f"[{text}]({up}{MOVED[bare]})"
        if "#" in target and not target.startswith("http"):
            name, anchor = target.split("#", 1)
            return f"[{text}]({name}#{anchor.lower()})"
        if not re.match(r"https?:|mailto:", target) and not target.endswith((".md", ".ipynb", ".svg")):
            return text
        return match[0]

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", moved, text)


def for_the_site(notebook):
    """Return a lesson as the site shows it: no notes, folded solutions, one title."""
    cells, titles = [], 0
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if "notes" in tags:
            continue
        if cell.cell_type == "markdown":
            lines = []
            for line in with_links(cell.source, "../").split("\n"):
                titles += line.startswith("# ")
                lines.append(f"#{line}" if line.startswith("# ") and titles > 1 else line)
            cell.source = "\n".join(lines)
        elif "solution" in tags or cell.metadata.get("jupyter", {}).get("source_hidden"):
            cell.metadata["tags"] = [*tags, "hide-input"]
            prompt = "Show the solution" if "solution" in tags else "Show the code"
            cell.metadata["mystnb"] = {"code_prompt_show": prompt, "code_prompt_hide": prompt.replace("Show", "Hide")}
        cells.append(cell)
    notebook.cells = cells
    return notebook


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "site", help="folder of the pages")
    output = parser.parse_args().output.resolve()
    with tempfile.TemporaryDirectory(prefix="manyhands-site-") as folder:
        source = Path(folder) / "source"
        lay_out(source)
        words = ["-b", "html", "-q", "-W", "--keep-going", "-E", "-d", str(Path(folder) / "trees")]
        status = subprocess.run([sys.executable, "-m", "sphinx", *words, source, output]).returncode
    if status == 0:
        print(f"{output / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
