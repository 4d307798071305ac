"""Pages of the site that follow from the lessons: programs with clock times, all predictions, the zoo."""

import re

SETUP = "Accounts, keys, hub: everybody runs `make doctor`, then the first cell"
COFFEE, LUNCH = ("break", 15), ("lunch", 60)
PROGRAMS = {  # name: days, each with its start and what follows: a lesson, or (words, minutes)
    "Half a day": [("09:00", [(SETUP, 20), "00", "02", COFFEE, "03", "04", COFFEE, "06"])],
    "One day": [("09:00", [(SETUP, 30), "00", "02", COFFEE, "03", LUNCH, "04", "06", COFFEE, "01", "07"])],
    "Two days": [
        ("09:00", [(SETUP, 30), "00", "02", COFFEE, "03", LUNCH, "04", "06", COFFEE, "01", "07"]),
        ("09:00", ["05", "08", COFFEE, "10", LUNCH, "11", COFFEE, "12", "15"]),
    ],
    "Five evenings": [
        ("18:00", [(SETUP, 20), "00", "02"]),
        ("18:00", ["03", ("break", 10), "04"]),
        ("18:00", ["06", ("break", 10), "01"]),
        ("18:00", ["07", ("break", 10), "08"]),
        ("18:00", ["11", ("break", 10), "15"]),
    ],
}


def programs(table):
    """Return a Markdown page of PROGRAMS with clock times; `table`: the rows of README's table of lessons."""
    lesson = {row.number: row for row in table}
    parts = [
        "# Programs with clock times",
        "Copy the one that fits. Minutes are those of sections marked CORE, estimates of what a reader with a watch "
        "takes; with many questions, give each lesson a third more and leave out the last.",
    ]
    for name, days in PROGRAMS.items():
        parts.append(f"## {name}")
        for number, (start, items) in enumerate(days, 1):
            hours, minutes = map(int, start.split(":"))
            now, lines = 60 * hours + minutes, ["| from | to | |", "|---|---|---|"]
            for item in items:
                if isinstance(item, str):
                    row = lesson[item]
                    words, lasts = f"[{row.number} {row.title}](notebooks/{row.name}.ipynb)", row.core
                else:
                    words, lasts = item
                lines.append(f"| {_clock(now)} | {_clock(now + lasts)} | {words} |")
                now += lasts
            parts += [f"**Day {number}**"] * (len(days) > 1) + ["\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _clock(minutes):
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def _from_top(text):
    """Return a lesson's text in one line, with links that start at the top of the site instead of in notebooks/."""
    text = re.sub(r"\]\((?=\d\d_\w+\.ipynb)", "](notebooks/", text)
    return " ".join(text.replace("](../", "](").split())


def predictions(notebooks, table):
    """Return a Markdown page of all questions that lessons ask before a run, without answers: to print."""
    parts = [
        "# All predictions",
        "Every question that a lesson asks before it runs a cell. Answers are in the lessons.",
    ]
    for row in table:
        parts.append(f"## [{row.number} {row.title}](notebooks/{row.name}.ipynb)")
        asked = []
        for cell in notebooks[row.name].cells:
            for found in re.findall(r"\*\*Predict\b\.?\*\*\.? *(.+?)(?=\n\n|\n<details|\Z)", cell.source, re.S):
                if cell.cell_type == "markdown":
                    asked.append("1. " + _from_top(found))
        parts.append("\n".join(asked))
    return "\n\n".join(parts) + "\n"


def zoo(notebooks, table):
    """Return a Markdown page of the bugs from the zoo: the first words of each section, and where it is."""
    parts = ["# The bug zoo", "Real mistakes from published code. Each lesson lets you find one by measuring."]
    for row in table:
        cells = [cell.source for cell in notebooks[row.name].cells if cell.cell_type == "markdown"]
        section = next(text for text in cells if re.match(r"## .*[Zz]oo", text))
        body = [text for text in section.split("\n\n")[1:] if not text.startswith(("#", "<", "!"))]
        first = _from_top(re.sub(r"<details.*", "", body[0], flags=re.S))
        parts.append(f"## [{row.number} {row.title}](notebooks/{row.name}.ipynb)\n\n{first}")
    return "\n\n".join(parts) + "\n"
