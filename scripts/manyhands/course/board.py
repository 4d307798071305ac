"""The progress board of a class: who is at which build, and what fails most. Opt-in, over a shared folder.

    make join BOARD=/shared/board               # an attendee takes part, without a name; NAME="Ana" gives one
    make leave                                  # and no longer
    make board FOLDER=/shared/board             # the instructor: prints it, and writes outputs/board.html
    make board FOLDER=/shared/board EVERY=5     # again every 5 s, until Ctrl-C; the page reloads itself

Each check of an attendee who takes part writes one small JSON file into the folder: a number drawn at `make join`, the
name if one was given, which build, and the check's sentence. No process listens anywhere. The files belong to the
attendee's account, so whoever can list the folder can see the account; the page does not show it.
"""

import argparse
import html
import json
import os
import secrets
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from manyhands.course.folders import write_whole
from manyhands.course.lessons import course_here, find_lessons

JOINED = ".manyhands-board"  # in an attendee's course: the folder, the number, the name
MOST_BYTES = 4096  # of one attendee's file: what is larger was not written by a check
MOST_LETTERS = 200  # of a sentence
CORRECT, NOT_ATTEMPTED = "correct", "not attempted"  # as the checks say them


@dataclass(frozen=True)
class Entry:
    """One verdict of one attendee's check."""

    who: str
    name: str
    topic: str  # of the lesson, such as "data_parallel"
    build: str  # "A", "1"
    title: str
    verdict: str
    at: float  # seconds since 1970

    @classmethod
    def read(cls, path):
        """Return the entry in a file, or None if it is not one: everybody in the class can write into the folder."""
        try:
            if not path.is_file() or path.stat().st_size > MOST_BYTES:
                return None
            said = json.loads(path.read_text("utf-8"))
            entry = cls(*(str(said[name])[:MOST_LETTERS] for name in list(cls.__annotations__)[:-1]), float(said["at"]))
            return entry if entry.who and 0 < entry.at < time.time() + 86400 else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def stuck(self):
        return self.verdict not in (CORRECT, NOT_ATTEMPTED)


def note(topic, build, title, verdict):
    """Add a verdict to the board if this attendee takes part. Errors are ignored: a check must not fail over them."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        file = next(
            (folder / JOINED for folder in (Path.cwd(), Path.cwd().parent) if (folder / JOINED).is_file()), None
        )
        if file is None:
            return
        joined = json.loads(file.read_text("utf-8"))
        verdict = str(verdict)[:MOST_LETTERS]
        entry = Entry(joined["who"], joined["name"], topic, str(build), title, verdict, time.time())
        name = f"{joined['who']}-{time.time_ns()}.json"
        write_whole(Path(joined["folder"]) / name, json.dumps(asdict(entry)), 0o644)


def join(folder, name, course):
    """Take part: write JOINED into the course. Raises OSError where the folder cannot be written."""
    folder = Path(folder).expanduser().absolute()
    trial = folder / f".{secrets.token_hex(8)}"
    trial.touch()
    trial.unlink()
    joined = {"folder": str(folder), "who": secrets.token_hex(4), "name": name.strip()[:40]}
    write_whole(Path(course) / JOINED, json.dumps(joined), 0o600)
    return joined


def read_folder(folder):
    """Return (entries in the order of their times, how many files are not entries)."""
    found = [Entry.read(path) for path in Path(folder).glob("*.json")]
    return sorted(filter(None, found), key=lambda entry: entry.at), found.count(None)


def where_they_are(entries):
    """Return [(last entry of an attendee, how many builds are correct)], those who wait longest first.

    A build that was not attempted, as by Run All, counts only for those who have attempted none.
    """
    last, done = {}, defaultdict(set)
    for entry in entries:
        if entry.verdict != NOT_ATTEMPTED or last.get(entry.who, entry).verdict == NOT_ATTEMPTED:
            last[entry.who] = entry
        if entry.verdict == CORRECT:
            done[entry.who].add((entry.topic, entry.build))
    return [(entry, len(done[who])) for who, entry in sorted(last.items(), key=lambda item: item[1].at)]


def what_fails(entries):
    """Return [((topic, build, title), attendees stuck now, attendees who are done, the most frequent sentence)].

    An attendee is stuck if the last verdict on that build is a sentence. The build with most of them comes first.
    """
    last = {(entry.who, entry.topic, entry.build): entry for entry in entries}
    builds = defaultdict(list)
    for entry in last.values():
        builds[entry.topic, entry.build, entry.title].append(entry)
    rows = []
    for build, group in builds.items():
        sentences = Counter(entry.verdict for entry in group if entry.stuck)
        done = sum(entry.verdict == CORRECT for entry in group)
        rows.append((build, sum(sentences.values()), done, sentences.most_common(1)[0][0] if sentences else ""))
    return sorted(rows, key=lambda row: (-row[1], -row[2], row[0]))


def tables(entries, now, lessons):
    """Return [(title, heads, rows)] of the board, as text. `lessons`: {topic: number}."""

    def build(topic, letter, title):
        return f"{lessons.get(topic, '')} {letter} {title}".strip()

    fails = [(build(*which), str(stuck), str(done), said) for which, stuck, done, said in what_fails(entries)]
    where = [
        (e.name or e.who, build(e.topic, e.build, e.title), f"{(now - e.at) / 60:.0f}", str(done), e.verdict)
        for e, done in where_they_are(entries)
    ]
    return [
        ("What fails most", ("build", "stuck", "correct", "what the check says most"), fails),
        ("Where everybody is", ("attendee", "last build", "minutes ago", "correct", "verdict"), where),
    ]


def page(board, every, note_below):
    """Return the board as a web page that loads nothing."""
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Progress board</title>',
        f'<meta http-equiv="refresh" content="{every:g}">' if every else "",
        "<style>body{font:16px sans-serif;margin:2em}td,th{text-align:left;padding:.2em 1em .2em 0}"
        "tr:nth-child(even){background:#f2f2f2}</style>",
    ]
    for title, heads, rows in board:
        cells = ["".join(f"<th>{html.escape(head)}</th>" for head in heads)]
        cells += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
        parts.append(f"<h1>{title}</h1><table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>")
    return "\n".join([*parts, f"<p>{html.escape(note_below)}</p></html>\n"])


def show(folder, every, output):
    """Print the board once and write its page."""
    entries, strange = read_folder(folder)
    lessons = {lesson.name.split("_", 1)[1]: lesson.number for lesson in find_lessons(course_here())}
    board = tables(entries, time.time(), lessons)
    people = len({entry.who for entry in entries})
    counts = [f"{n} {word}{'s' * (n != 1)}" for n, word in ((people, "attendee"), (len(entries), "check"))]
    below = f"{', '.join(counts)}, as of {time.strftime('%H:%M:%S')}"
    wrong = "1 file is" if strange == 1 else f"{strange} files are"
    below += f"; {wrong} not a check's and left out" * bool(strange)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, page(board, every, below))
    for title, heads, rows in board:
        print(f"{title}\n" + "\n".join("  " + " | ".join(row) for row in [heads, *rows]))
    print(f"{below}\n{output}", flush=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["join", "leave", "show"])
    parser.add_argument("folder", nargs="?", default="")
    parser.add_argument("--name", default="", help="shown on the board; none: a number")
    parser.add_argument("--every", type=float, default=0, help="seconds after which the board is written again")
    parser.add_argument("--output", type=Path, help="the page; default: outputs/board.html")
    options = parser.parse_args(arguments)
    course = course_here()
    try:
        if options.action == "leave":
            (course / JOINED).unlink(missing_ok=True)
            print("your checks no longer write to the board; what they wrote is still there")
            return 0
        if not Path(options.folder).is_dir() or not options.folder:
            usage = "make join BOARD=/shared/folder" if options.action == "join" else "make board FOLDER=/shared/folder"
            print(f"{options.folder or 'no folder'}: there is no such folder; say {usage}", file=sys.stderr)
            return 2
        if options.action == "join":
            joined = join(options.folder, options.name, course)
            print(
                f"your checks now write to {joined['folder']}, as {joined['name'] or joined['who']}; make leave ends it"
            )
            return 0
        output = options.output or course / "outputs" / "board.html"
        show(options.folder, options.every, output)
        while options.every:
            time.sleep(options.every)
            show(options.folder, options.every, output)
    except OSError as error:
        print(f"{error.filename}: {os.strerror(error.errno)}" if error.errno else error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    from manyhands.launch.entry import run_program

    run_program("board", main)
