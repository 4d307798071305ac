"""Keep a preflight's record: flight.json, the changes since the last event, and figures worth a commit.

A flight is {"metadata": {name: text}, "finished": bool, "runs": {command of a run: {"name", "error", "seconds",
"peak_bytes", "notebook"}}}. It is written after each run. When a new one begins, the one that had finished goes into
last.json, run by run, so that a run of one lesson keeps the results of the others.
"""

import difflib
import json
import os
import subprocess
import tempfile
from pathlib import Path

from manyhands.course.folders import write_whole
from manyhands.launch.settings import environment

FLIGHT, LAST = "flight.json", "last.json"
SAME_RUNS = ("packages", "python", "MPI", "devices")  # with another of these, what went well says nothing
COMPARED = (*SAME_RUNS, "cores", "system", "corpus")
SLOWER, SLOWER_S = 1.5, 10.0  # a run is slower if it took this factor longer, and this number of seconds more


def read(folder: Path, name: str = FLIGHT) -> dict | None:
    """The flight in `folder`, or None."""
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else None


def write(folder: Path, metadata: dict[str, str], outcomes, finished: bool) -> None:
    """Keep what there is of this flight."""
    runs = {
        outcome.run.again(): {
            "name": f"{outcome.run.lesson.name} {outcome.run.title}", "error": str(outcome.error or ""),
            "seconds": outcome.ended.seconds, "peak_bytes": outcome.ended.peak_bytes,
            "notebook": outcome.run.way == "notebook",
        }
        for outcome in outcomes
    }  # fmt: skip
    flight = {"metadata": metadata, "finished": finished, "runs": runs}
    write_whole(folder / FLIGHT, json.dumps(flight, indent=1) + "\n")


def begin(folder: Path, resume: str | None) -> tuple[bool, dict | None]:
    """(whether this flight goes on with the one in `folder`, the last event's flight or None).

    `resume`: "always", "unfinished" (only with one that was interrupted) or None.
    """
    before, last = read(folder), read(folder, LAST)
    goes_on = bool(before) and (resume == "always" or (resume == "unfinished" and not before["finished"]))
    if before and before["finished"] and not goes_on:
        last = before | {"runs": (last or before)["runs"] | before["runs"]}
        write_whole(folder / LAST, json.dumps(last, indent=1) + "\n")
    return goes_on, last


def changed(before: dict[str, str], now: dict[str, str], names=COMPARED) -> list[str]:
    """Return the differences between two flights' metadata: "packages: torch 2.12.0 then, torch 2.13.0 now"."""
    sentences = []
    for name in names:
        then, here = (metadata.get(name, "none").split(", ") for metadata in (before, now))
        gone, new = ([one for one in these if one not in those] for these, those in ((then, here), (here, then)))
        if gone or new:
            sentences.append(f"{name}: {', '.join(gone) or 'less'} then, {', '.join(new) or 'less'} now")
    return sentences


def worse(last: dict, metadata: dict[str, str], outcomes) -> list[str]:
    """Which runs fail that went well at the last event, and which are slower; times count on like machines alone."""
    sentences, alike = [], not changed(last["metadata"], metadata, ("devices", "cores"))
    for outcome in outcomes:
        then = last["runs"].get(outcome.run.again())
        if then is None or then["error"]:
            continue
        name, seconds = f"{outcome.run.lesson.name} {outcome.run.title}", outcome.ended.seconds
        if outcome.error:
            sentences.append(f"newly failing: {name} went well then")
        elif alike and seconds > max(SLOWER * then["seconds"], then["seconds"] + SLOWER_S):
            sentences.append(f"slower: {name} took {then['seconds']:.0f} s then, {seconds:.0f} s now")
    return sentences


def propose(paths: list[Path], root: Path, branch: str, patch: Path) -> str:
    """Offer `paths` as files of assets/recorded: one commit on a new `branch`, else a `patch`. How to take them.

    What is checked out, and what is staged, stays as it is.
    """
    try:
        return _commit(paths, root, branch)
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or nobody's name for the commit
        lines = []
        for path in paths:
            name, new = f"assets/recorded/{path.name}", path.read_text(encoding="utf-8")
            old = (root / name).read_text(encoding="utf-8") if (root / name).exists() else ""
            places = f"a/{name}" if old else os.devnull, f"b/{name}"
            lines += difflib.unified_diff(old.splitlines(True), new.splitlines(True), *places)
        write_whole(patch, "".join(lines))
        return f"patch -p1 < {patch}"


def _commit(paths, root, branch):
    with tempfile.TemporaryDirectory() as folder:
        environ = environment(GIT_INDEX_FILE=f"{folder}/index")

        def git(*words):
            done = subprocess.run(
                ["git", "-C", root, *words], env=environ, check=True, capture_output=True, text=True, timeout=60
            )
            return done.stdout.strip()

        inside = git("rev-parse", "--show-prefix")
        git("read-tree", "HEAD")
        for path in paths:
            content = git("hash-object", "-w", path.resolve())
            git("update-index", "--add", "--cacheinfo", f"100644,{content},{inside}assets/recorded/{path.name}")
        names = "\n".join(path.name for path in paths)
        message = f"Recorded by a preflight: {len(paths)} lessons on GPUs\n\n{names}\n"
        git("branch", branch, git("commit-tree", git("write-tree"), "-p", "HEAD", "-m", message))
    return f"git cherry-pick {branch}"
