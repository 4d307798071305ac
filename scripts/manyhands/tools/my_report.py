"""Write a page of what you have built and had checked in this course, for yourself: outputs/my_report.html.

make my-report NAME="Ana"     # the name is optional
"""

import argparse
import html
import json
import sys
import time
from pathlib import Path

from manyhands.checks import RECORD
from manyhands.course.board import CORRECT
from manyhands.course.folders import ROOT, make_private, version, write_whole
from manyhands.course.lessons import find_lessons
from manyhands.launch.run_folder import outputs_folder

PAGE = """<!doctype html><meta charset="utf-8"><title>Many Hands: {name}</title>
<style>body{{font:16px/1.5 sans-serif;max-width:45em;margin:2em auto}}
td,th{{padding:.2em 1em .2em 0;text-align:left}}</style>
<h1>Many Hands: what {name} built</h1>
<p>{right} of {all} builds and exercises of {lessons} lessons are right, each checked on its day by the course, version
{version}, on this person's own machine. Written {today} by <code>make my-report</code>: nobody else has verified
it.</p>
<table><tr><th>lesson</th><th>build</th><th>what</th><th>checked</th></tr>
{rows}</table>
"""


def entries(path: Path) -> list[dict]:
    """Return the newest verdict on each build, in the order of lessons: what a file cannot hold is left out."""
    newest, number = {}, {lesson.name.partition("_")[2]: lesson.number for lesson in find_lessons(ROOT)}
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        try:
            one = json.loads(line)
            one["lesson"], one["at"] = number[one["topic"]], float(one["at"])
            earlier = newest.get((one["lesson"], str(one["build"])))
            if earlier and earlier["verdict"] == CORRECT:  # what was right once has been built
                continue
            newest[one["lesson"], str(one["build"])] = one
        except (ValueError, KeyError, TypeError):
            continue
    return [newest[key] for key in sorted(newest)]


def page(found: list[dict], name: str) -> str:
    """Return the page as HTML."""
    right = [one for one in found if one["verdict"] == CORRECT]
    cells = [
        (one["lesson"], one["build"], one["title"], time.strftime("%Y-%m-%d", time.localtime(one["at"])))
        for one in right
    ]
    rows = "\n".join("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in cells)
    return PAGE.format(
        name=html.escape(name or "this person"), right=len(right), all=len(found), rows=rows,
        lessons=len({one["lesson"] for one in found}), version=html.escape(version(ROOT)),
        today=time.strftime("%Y-%m-%d"),
    )  # fmt: skip


def main(argv=None) -> int:
    """Write the page and say where it is."""
    parser = argparse.ArgumentParser(prog="my_report", description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="")
    options, outputs = parser.parse_args(argv), outputs_folder()
    found = entries(outputs / RECORD)
    if not found:
        print("nothing has been checked here yet: write a build in a lesson, and run the cell with its check")
        return 0
    make_private(outputs)
    print(write_whole(outputs / "my_report.html", page(found, options.name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
