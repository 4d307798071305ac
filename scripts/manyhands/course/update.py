"""Bring a fix of the course into an attendee's copy, and leave what the attendee wrote as it is.

    make update FROM=/sw/many-hands            # a newer copy of `make copy`: a folder, or a .zip
    python -m manyhands.course.update FROM

A lesson is merged cell by cell. A cell that only the course changed is replaced. A cell that only the attendee changed
stays, with its outputs. Where both changed a cell, the attendee's stays, and a line names the fix that did not arrive.
Any other file of the course is replaced where the attendee did not change it. Files that are not the course's are never
touched, and lessons are kept in outputs/kept before they are written.
"""

import argparse
import difflib
import json
import re
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path

from manyhands.course.folders import VERSION, version, write_whole
from manyhands.course.handouts import MANIFEST, digest, keep, manifest
from manyhands.course.lessons import ORIGINALS, Lesson, course_here, find_lessons, left_alone
from manyhands.course.pairs import PairError, as_notebook, as_script, essence, read, reported, sync

ALIKE = 0.5  # of two cells' text, from 0 to 1: from here on one is a new form of the other


def update(source, root):
    """Bring the newer copy `source` into the copy `root`. Returns lines that say what was done.

    Raises PairError, and touches nothing, where one of the two was not made by `make copy`.
    """
    root = Path(root)
    with _unpacked(Path(source).expanduser()) as new:
        if new.resolve() == root.resolve():
            raise PairError(f"{source} is this copy itself; name the newer one: make update FROM=/path")
        base, wanted = manifest(root), manifest(new)
        said = []
        for lesson in find_lessons(new):
            try:
                said += _update_lesson(lesson, Lesson(lesson.name, root))
            except PairError as error:  # a broken notebook
                said.append(f"did not arrive: lesson {lesson.name}: {error}")
        said += _update_files(new, root, base, wanted)
        if (before := version(root)) != (now := version(new)):
            said.insert(0, f"from version {before} to {now}")
            write_whole(root / VERSION, f"{now}\n")
    return said


@contextmanager
def _unpacked(source):
    """Yield the folder of a copy, also where it is packed in a .zip, at whatever depth and without modes.

    Raises PairError where the zip cannot be read, or holds no copy.
    """
    if source.suffix.lower() != ".zip":
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="manyhands-update-") as folder:
        try:
            with zipfile.ZipFile(source) as packed:
                for one in packed.infolist():
                    path = Path(packed.extract(one, folder))
                    mode = one.external_attr >> 16 & 0o777
                    if not mode:  # packed by a system without modes
                        mode = 0o755 if path.is_dir() or path.read_bytes().startswith(b"#!") else 0o644
                    path.chmod(mode | (0o700 if path.is_dir() else 0o600))
        except (OSError, zipfile.BadZipFile, RuntimeError) as error:  # RuntimeError: it wants a password
            raise PairError(f"{source} is no zip that can be read: {error}") from None
        found = sorted(Path(folder).rglob(MANIFEST), key=lambda path: len(path.parts))
        if not found:
            raise PairError(f"{source} holds no {MANIFEST}, so this version's `make copy` did not make what is in it")
        yield found[0].parents[1]


def _update_files(new, root, base, wanted):
    """Replace the files that are not lessons; the lines that say what was done, and what was left as it is."""
    done, kept = {"replaced": [], "added": [], "removed": []}, []
    for name, right in wanted.items():
        path = root / name
        here = digest(path) if path.is_file() else None
        if here == right:
            continue
        if here != base.get(name):  # the attendee's own, or removed by them
            if base.get(name) != right:
                kept.append(name)
            continue
        done["added" if here is None else "replaced"].append(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (new / name).read_bytes(), (new / name).stat().st_mode & 0o777)
    for name in base.keys() - wanted.keys():
        if (root / name).is_file() and digest(root / name) == base[name]:
            (root / name).unlink()
            done["removed"].append(name)
    # what did not arrive keeps its old entry: the next update says so again, and finds it if it was put back
    told = wanted | {name: base[name] for name in kept if name in base}
    left = {name: right for name, right in told.items() if name in base or name not in kept}
    write_whole(root / MANIFEST, json.dumps(left, indent=0) + "\n")
    said = [f"{what}: {', '.join(sorted(names))}" for what, names in done.items() if names]
    said += [f"did not arrive: {name}, which you changed; yours stays" for name in sorted(kept)]
    package = any(name.startswith("scripts/manyhands/") for names in done.values() for name in names)
    if package and (root / ".manyhands-env").exists():
        said.append("note: your environment is shared and has its own copy of scripts/manyhands; the instructor runs")
        said.append("      make shared PREFIX=... once more, and you restart the kernel")
    return said


def _update_lesson(new, mine):
    """Merge one lesson; the lines that say what was done."""
    base = Lesson(new.name, mine.root / ORIGINALS)
    if not base.notebook.exists():
        if mine.notebook.exists() or mine.script.exists():
            return [f"did not arrive: lesson {new.name}, since you have a file of that name"]
        for path, target in ((new.notebook, mine.notebook), (new.script, mine.script)):
            write_whole(target, path.read_bytes())
        _new_originals(new, mine.root)
        return [f"added: lesson {new.name}"]
    before, after = read(base.notebook).cells, read(new.notebook)
    note = mine.root / ORIGINALS / f"{new.name}.missed.json"  # what did not arrive: [a line, the cell that it is about]
    if [essence(cell) for cell in before] == [essence(cell) for cell in after.cells]:
        here = (
            {repr(essence(cell)) for cell in read(mine.notebook).cells}
            if note.exists() and mine.notebook.exists()
            else {}
        )
        return [line for line, fix in json.loads(note.read_text("utf-8")) if fix not in here] if here else []
    if not (mine.notebook.exists() or mine.script.exists()):
        cure = f"`make reset LESSON={new.number}`, then `make update` again, brings it back"
        return [f"did not arrive: lesson {new.name}, which you removed or renamed; {cure}"]
    kept = keep(mine)
    sync(mine, some_ranks=True)  # what the attendee saved last
    notebook = read(mine.notebook)
    notebook.cells, arrived, missed = merge(before, notebook.cells, after.cells)
    notebook.metadata = after.metadata  # another kernel chosen in the browser is no change of the lesson
    write_whole(mine.script, as_script(notebook))
    write_whole(mine.notebook, as_notebook(notebook))
    _new_originals(new, mine.root)
    said = [f"{new.name}: {cell}" for cell in arrived]
    told = [(f"did not arrive: {new.name}: {cell}", repr(fix)) for cell, fix in missed]
    write_whole(note, json.dumps(told))
    said += [line for line, _ in told]
    return said + [f"{new.name}: as it was before, in {kept.relative_to(mine.root)}"]


def _new_originals(new, root):
    for path in (new.notebook, new.script):
        name = Path(ORIGINALS) / path.relative_to(new.root)
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(root / name, (new.root / name).read_bytes())


def merge(base, mine, theirs):
    """Merge cells. Returns (the cells with the fixes, lines of what arrived, [(line, fix)] of what did not)."""
    (ours, our_new), (fixed, their_new) = _paired(base, mine), _paired(base, theirs)
    merged, arrived, missed = [], [], []
    for i in range(len(base) + 1):
        known = [essence(cell) for cell in our_new.get(i, [])]
        for cell in their_new.get(i, []):
            if essence(cell) not in known:
                merged.append(cell)
                arrived.append(f"new cell {len(merged)}: {_title(cell)}")
        merged += our_new.get(i, [])
        if i == len(base):
            return merged, arrived, missed
        was, own, fix = (cells and essence(cells) for cells in (base[i], ours.get(i), fixed.get(i)))
        if own == was and fix != was:
            if fix is not None:
                merged.append(fixed[i])
                arrived.append(f"cell {len(merged)}: {_title(fixed[i])}")
            else:
                arrived.append(f"removed: {_title(base[i])}")
            continue
        if own is not None:
            merged.append(ours[i])
        if fix not in (was, own):
            where = f"cell {len(merged)}, which you changed" if own is not None else "a cell that you removed"
            missed.append((f"{where}: {_title(base[i])}", fix))


def _title(cell):
    """A cell in a few words: its first line that says something, without markup."""
    lines = [re.sub(r"^(#+ |%%\w+.*)", "", line).strip() for line in cell.source.splitlines()]
    first = next((line for line in lines if line), "an empty cell")
    return first if len(first) <= 60 else f"{first[:57]}..."


def _paired(base, other):
    """({index in base: its form in `other`}, {index in base: the cells that `other` has new before it})."""
    found, new = {}, {}
    words = [[essence(cell) for cell in cells] for cells in (base, other)]
    matcher = difflib.SequenceMatcher(None, *([repr(word) for word in side] for side in words), autojunk=False)
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        if kind == "equal":
            found |= {i + k: other[j + k] for k in range(i_end - i)}
            continue
        if i_end - i == j_end - j:  # as many as before: each is the form of its neighbor
            found |= dict(zip(range(i, i_end), other[j:j_end], strict=True))
            continue
        for cell in other[j:j_end]:  # in order, each to the next cell of base that it is a form of
            at = next((k for k in range(i, i_end) if _is_form(base[k], cell)), None)
            if at is None:
                new.setdefault(i, []).append(cell)
            else:
                found[at] = cell
                i = at + 1
    return found, new


def _is_form(one, other):
    """Return whether two cells are forms of one: they define the same name, or most of their text is the same."""
    if one.cell_type != other.cell_type:
        return False
    defined = [re.search(r"^(?:def|class) (\w+)", cell.source, re.M) for cell in (one, other)]
    if all(defined) and defined[0][1] == defined[1][1]:
        return True
    return difflib.SequenceMatcher(None, one.source, other.source, autojunk=False).ratio() >= ALIKE


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="FROM", help="the newer copy, a folder or a .zip")
    options = parser.parse_args(arguments)

    def act():
        if not options.source:
            raise PairError("say where the newer copy is: make update FROM=/path")
        done = update(options.source, course_here()) or ["nothing to do: this copy has all of that already"]
        return "\n".join([*done, *left_alone(course_here())])

    return reported(act)


if __name__ == "__main__":
    from manyhands.launch.entry import run_program

    run_program("update", main)
