"""How many minutes a lesson's CORE takes a learner: an estimate, the same for all lessons, beside what the lesson says.

    PYTHONPATH=scripts python tests/minutes.py [LESSON ...]

What readers with a watch took: 200 words of prose and 12 lines of visible code per minute, 0.75 minutes per prediction,
4 per build, 5 per exercise, 2 for waiting. Solutions, notes, folded code, imports and blank lines do not count.
"""

import re
import sys
from dataclasses import dataclass

from manyhands.course.pairs import PairError, for_lessons, read

WORDS, LINES = 200, 12  # per minute
PREDICTION, BUILD, EXERCISE, WAIT = 0.75, 4, 5, 2  # minutes each


@dataclass
class Section:
    """A stretch of a section (`##`) that is all CORE or all MORE; its minutes as its heading states, and estimated."""

    name: str
    core: bool
    stated: int | None
    minutes: float = 0.0


def sections(lesson) -> list[Section]:
    """The lesson's stretches of CORE and MORE, its head first. A heading marked MORE ends CORE up to the next."""
    found = [Section("head", True, None)]
    for cell in read(lesson.script).cells:
        tags = cell.metadata.get("tags", [])
        if "notes" in tags or "solution" in tags:
            continue
        if cell.cell_type == "markdown":
            for level, title in re.findall(r"^(##+) (.*)$", cell.source, re.M):
                name, minutes = re.sub(r" \((CORE|MORE).*", "", title), re.search(r"(\d+) min", title)
                if level == "##":
                    section_core = "(MORE" not in title
                core = section_core and "(MORE" not in title
                if level == "##" or core != found[-1].core or minutes:
                    name = name if level == "##" else found[-1].name
                    found.append(Section(name, core, int(minutes[1]) if minutes else None))
            found[-1].minutes += _reading(cell.source)
        elif not cell.metadata.get("jupyter", {}).get("source_hidden"):
            lines = [line for line in cell.source.splitlines() if line.strip()]
            found[-1].minutes += sum(not re.match(r"# %%|%%|import |from .* import ", line) for line in lines) / LINES
    return found


def _reading(text):
    minutes = PREDICTION * len(re.findall(r"\*\*Predict", text))
    minutes += BUILD * len(re.findall(r"^#+ Build [A-Z]\b", text, re.M))
    minutes += EXERCISE * len(re.findall(r"^#+ Exercise \d", text, re.M))
    prose = re.sub(r"!\[.*?\]\(.*?\)|```.*?```", "", text, flags=re.S)
    return minutes + len(prose.split()) / WORDS


def of_the_learner(lesson) -> tuple[float, int, int]:
    """Return (minute of the learner's first own line, number of their own lines, visible lines of code) in CORE.

    The learner writes lines with a blank, `____`, and those of a solution that its stub lacks.
    """
    minutes, first, own, visible, core, stub = float(WAIT) / 2, None, 0, 0, True, set()
    for cell in read(lesson.script).cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "markdown":
            for level, title in re.findall(r"^(##+) (.*)$", cell.source, re.M):
                if level == "##":
                    section_core = "(MORE" not in title
                core = section_core and "(MORE" not in title
        if not core or "notes" in tags:
            continue
        source = re.sub(r"^from \S+ import \([^)]*\).*$|^(import|from) .*$", "", cell.source, flags=re.M)
        code = [line.strip() for line in source.splitlines() if line.strip() and not re.match(r"#|%%", line)]
        if "solution" in tags:
            body = re.search(r"```python\n(.*?)^```", re.sub(r'""".*?"""', "", source, flags=re.S), re.M | re.S)[1]
            body = [line.strip() for line in body.splitlines() if line.strip() and not re.match(r"\s*#", line)]
            own += sum(line not in stub for line in body)
        elif cell.cell_type == "markdown":
            minutes += _reading(cell.source)
        else:
            if re.search(r"NotImplementedError|your turn|____", source):
                first = minutes if first is None else first
                stub = set(code)
                own += sum("____" in line for line in code)
            if not cell.metadata.get("jupyter", {}).get("source_hidden"):
                visible += len(code)
                minutes += len(code) / LINES
    return minutes if first is None else first, own, visible


def code_of_core(cells) -> tuple[int, int, int]:
    """Return (visible, folded, longest): lines of code of CORE that one sees, that run unseen, of the longest cell.

    Counted are statements and their comments, not imports; lines joined by `;` count apart. Folded is what a page or
    JupyterLab hides: a collapsed cell, a hidden input, code that `exec`, `%run` or `%load` brings. The longest is
    looked for in MORE as well.
    """
    visible = folded = longest = 0
    section = core = True
    for cell in cells:
        meta, tags = cell.metadata, cell.metadata.get("tags", [])
        if cell.cell_type == "markdown":
            for level, title in re.findall(r"^(##+) (.*)$", cell.source, re.M):
                section = "(MORE" not in title if level == "##" else section
                core = section and "(MORE" not in title
        elif "notes" not in tags and "solution" not in tags:
            source = re.sub(r"^from \S+ import \([^)]*\).*$|^(import|from) .*$", "", cell.source, flags=re.M)
            lines = [line for line in source.splitlines() if line.strip() and not line.startswith("%%")]
            count = len(lines) + sum(line.count(";") for line in lines if not re.search(r"[\"'#].*;", line))
            jupyter = meta.get("jupyter", {})
            hidden = jupyter.get("source_hidden") or meta.get("collapsed") or {"hide-input", "remove-input"} & set(tags)
            hidden = hidden or re.search(r"^\s*(exec\(|%run|%load)", source, re.M)
            longest = max(longest, count)
            visible, folded = visible + count * core * (not hidden), folded + count * core * bool(hidden)
    return visible, folded, longest


def estimate(found, core_only=True) -> float:
    """Minutes of the CORE, or of everything, with the waiting."""
    return WAIT + sum(part.minutes for part in found if part.core or not core_only)


def stated(lesson) -> tuple[int, int]:
    """(minutes of the CORE, minutes of everything) as the lesson's head says. Raises PairError where it does not."""
    head = read(lesson.script).cells[0].source
    said = re.search(r"\*\*(\d+) minutes\*\*", head), re.search(r"(\d+) with those marked MORE", head)
    if None in said:
        raise PairError(f"{lesson.name} does not say its minutes: **50 minutes** ..., 90 with those marked MORE")
    return tuple(int(found[1]) for found in said)


def report(lesson) -> str:
    """The lesson's minutes, stated and estimated, and below them those of its sections."""
    found, (core, everything) = sections(lesson), stated(lesson)
    whole = estimate(found, core_only=False)
    lines = [f"{lesson.name}: CORE {core} min stated, {estimate(found):.0f} estimated; all {everything}, {whole:.0f}"]
    for part in found:
        said = "-" if part.stated is None else part.stated
        lines.append(f"  {'CORE' if part.core else 'MORE'} {part.minutes:5.1f}  stated {said:>2}  {part.name}")
    return "\n".join(lines)


def main(arguments=None):
    return for_lessons(report, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
