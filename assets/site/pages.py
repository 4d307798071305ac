"""Pages of the site that follow from the lessons: clock times of programs and tracks, all predictions, the zoo."""

import re

SETUP = "[Accounts, keys, hub](first_hour.md): everybody runs `make doctor`, then the first cell"
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


def programs(table, held=""):
    """Return a Markdown page of PROGRAMS with clock times; `table`: the rows of README's table of lessons.

    `held`: the program of this centre's event, which comes first.
    """
    parts = [
        "# Programs with clock times",
        *[held] * bool(held),
        "Copy the one that fits. Minutes are those of the sections marked CORE. They are estimates from reading speed "
        "and code, not measured with a class. If your class asks many questions, plan a third more time for each "
        "lesson and leave out the last one. A track can also be an event of its own: its page has the time of every "
        "section.",
    ]
    for name, days in PROGRAMS.items():
        parts.append(f"## {name}")
        for number, (start, items) in enumerate(days, 1):
            parts += [f"**Day {number}**"] * (len(days) > 1) + [timetable(start, items, table)]
    return "\n\n".join(parts) + "\n"


def timetable(start, items, table, sections=None):
    """Return a Markdown table of `items` from `start` on, each the number of a lesson or (words, minutes).

    `sections`: {lesson's name: [(heading, minutes)]} adds a row for each section below its lesson.
    """
    hours, minutes = map(int, start.split(":"))
    lesson = {row.number: row for row in table}
    now, lines = 60 * hours + minutes, ["| from | to | |", "|---|---|---|"]
    for item in items:
        if not isinstance(item, str):
            words, lasts = item
        else:
            row = lesson[item]
            words, lasts = f"**[{row.number} {row.title}](notebooks/{row.name}.ipynb)**", row.core
        lines.append(f"| {_clock(now)} | {_clock(now + lasts)} | {words} |")
        begins = now
        for heading, takes in (sections or {}).get(lesson[item].name if isinstance(item, str) else None, []):
            lines.append(f"| {_clock(begins)} | | {heading} |")
            begins += takes
        now += lasts
    return "\n".join(lines)


def core_sections(notebook):
    """Return [(heading, minutes)] of a lesson's sections marked CORE."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return [(words, int(takes)) for words, takes in re.findall(r"^## (.*) \(CORE, (\d+) min\)$", text, re.M)]


def morning(mine, notebooks):
    """Return the timetable of a track's lessons `mine` as an event of its own, with a break after each but the last."""
    items = [one for row in mine for one in (row.number, COFFEE)][:-1]
    return timetable("09:00", items, mine, {row.name: core_sections(notebooks[row.name]) for row in mine})


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
        "Every question that a lesson asks before it runs a cell, after the title of its section. The answers are in "
        "the lessons. Print this page as a quiz before or after a lesson.",
    ]
    for row in table:
        parts.append(f"## [{row.number} {row.title}](notebooks/{row.name}.ipynb)")
        asked, section = [], ""
        for cell in notebooks[row.name].cells:
            if cell.cell_type != "markdown":
                continue
            for heading, question in re.findall(
                r"^#{2,3} ([^\n]+)$|\*\*(Predict\b.+?)(?=\n\n|\n<details|\Z)", cell.source, re.M | re.S
            ):
                section = re.sub(r" \((CORE|MORE)\b.*", "", heading) if heading else section
                if question:
                    asked.append(f"1. *{section.rstrip('?')}:* {_asked(question)}")
        parts.append("\n".join(asked))
    return "\n\n".join(parts) + "\n"


def _asked(question):
    """Return a question without its first word, if that is a sentence, and without where to type the guess."""
    words = re.sub(r"^Predict(\.\*\*|\*\*\.) *", "", _from_top(question)).replace("Predict**", "Predict", 1)
    words = re.sub(r" *(Replace the blank|Fill (in )?the blank|Type an? \w+ in place)[^.]*\.", "", words) or words
    return words[0].upper() + words[1:] if re.match("[a-z]{2}", words) else words


ZOO = {  # kind: [(lesson, what you see, which number shows the bug)]
    "The loss falls, and the training is wrong": [
        ("01", "you asked for bf16, and most small gradients are exactly 0", "the dtype of a tensor inside autocast"),
        (
            "03",
            "data parallel: the weights are equal before each update, the gradients are not",
            "the largest difference of a gradient between ranks, after backward",
        ),
        (
            "06",
            "a sharded optimizer trains another model than one process",
            "the weights after two steps, beside one process",
        ),
        (
            "07",
            "tensor parallel: a parameter that all ranks hold differs",
            "its largest difference between ranks after a few steps",
        ),
        (
            "08",
            "a pipeline accumulates several batches, and its gradients are too small",
            "the gradient, beside one process",
        ),
        ("09", "experts' gradients grow with the number of ranks", "the same data on one process and on several"),
        (
            "11",
            "a run resumes without an error, with a slightly worse loss",
            "the size of the checkpoint, in bytes per parameter",
        ),
        (
            "12",
            "the loss stays higher than it should, and samples are not English",
            "the loss against targets that are moved by one",
        ),
    ],
    "The model writes the wrong thing": [
        ("13", "answers run on until a limit cuts them", "the share of answers that end by themselves"),
        (
            "14",
            "speculative decoding gives other greedy texts than the large model",
            "the distribution of the tokens that are kept",
        ),
    ],
    "The report is wrong": [
        ("00", "far fewer samples per second than the GPUs should reach", "the unit of each factor in the formula"),
        ("02", "an all-reduce gives the right sum, and is slow", "the bytes that each rank sends"),
        ("05", "a speed-up above the number of ranks", "the sequences that were read, counted"),
        (
            "10",
            "a formula for the time is right on nodes of two GPUs and wrong on nodes of eight",
            "real messages, at two sizes",
        ),
    ],
    "The job ran something else": [
        ("04", "results that the notebook cannot explain", "the cells of notebook and script, compared"),
        ("15", "a sweep lacks a setting, and one run has the defaults", "the number of settings that ran"),
    ],
}


def zoo(notebooks, table):
    """Return a Markdown page of the lessons' bugs from the zoo by symptom, each with a link to its section."""
    parts = [
        "# The bug zoo",
        "Real mistakes from published code, by what you see. The second column names the measurement that finds the "
        "bug. What is wrong, and how to fix it, is in the lesson, so that you can look for it yourself first.",
    ]
    lessons = {row.number: row for row in table}
    for kind, bugs in ZOO.items():
        lines = ["| what you see | what shows it | lesson |", "|---|---|---|"]
        for number, seen, shown in bugs:
            name = lessons[number].name
            cells = [cell.source for cell in notebooks[name].cells if cell.cell_type == "markdown"]
            heading = next((found[1] for cell in cells if (found := re.match(r"## (.*\bzoo\b.*)", cell))), None)
            if heading is None:
                raise SystemExit(f"notebooks/{name}.ipynb: no section is named `## A bug from the zoo`")
            anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
            lines.append(f"| {seen} | {shown} | [{number}](notebooks/{name}.ipynb#{anchor}) |")
        parts += [f"## {kind}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"
