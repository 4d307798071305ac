"""Run the start cells of a lesson's script once, as a world of one, then each section on a copy of what they define.

python tests/each_section.py scripts/03_data_parallel.py --steps 2
python tests/each_section.py core scripts/03_data_parallel.py --steps 2     # all of CORE, and nothing else, to its end
python tests/each_section.py answers 1 scripts/03_data_parallel.py --steps 2     # all of it, on several ranks too, with
                    # the second answer that each check accepts (the first is 0) in the place of the lesson's own
"""

import importlib
import inspect
import linecache
import re
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from exercises import Answers, is_edit
from manyhands import leave
from manyhands.course import catch_up
from manyhands.course.pairs import read
from shortest import FEWER


def sections(script):
    """The cells of a lesson's script: those up to the end of its start, then those of each section."""
    cells = [cell for cell in read(script).cells if "active-ipynb" not in cell.metadata.get("tags", [])]
    for there, here in FEWER.get(script.stem, ()):
        for cell in cells:
            cell.source = cell.source.replace(there, here)
    begins = [i for i, cell in enumerate(cells) if cell.cell_type == "markdown" and cell.source.startswith("## ")]
    assert cells[begins[0]].source.startswith("## Start")
    return [cells[a:b] for a, b in zip([0, *begins[1:]], [*begins[1:], len(cells)], strict=True)]


def core(script):
    """The code cells of CORE: those below no heading that is marked MORE."""
    found, section, here = [], True, True
    for cell in read(script).cells:
        if cell.cell_type == "markdown":
            for level, title in re.findall(r"^(##+) (.*)$", cell.source, re.M):
                here = "(MORE" not in title and (section or level == "##")
                section = here if level == "##" else section
        elif here and "active-ipynb" not in cell.metadata.get("tags", []):
            found.append(cell)
    return found


def as_main(script):
    """The names of a new module __main__, where torch.compile looks for those of a lesson's functions."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = str(script)
    return vars(module)


def put_answers(namespace, script, number, source):
    """Where a cell has called a check, put the answer of that number that the check accepts in the solution's place."""
    for table in tables_of(script.stem):
        for check, named in table.named_solutions().items():
            right = table.right.get(check, [])
            if f"checks.{check}(" not in source or number >= len(right):
                continue
            names, answer = (named,) if isinstance(named, str) else named, right[number]
            if any(catch_up._is_unwritten(namespace[name]) for name in names):
                continue  # a check that this rank does not call
            if is_edit(answer):
                text = "\n\n".join(inspect.getsource(namespace[name]) for name in names)
                for old, new in zip(answer[::2], answer[1::2], strict=True):
                    assert old in text, f"the lesson's answer to {check} has no {old!r}"
                    text = text.replace(old, new)
                file = f"answer {number} to {check}"
                linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
                exec(compile(text, file, "exec"), namespace)
            else:
                namespace.update(zip(names, answer if isinstance(answer, tuple) else (answer,), strict=True))
            print(f"answer {number} to {check}", flush=True)


def tables_of(lesson):
    """The tables of answers of a lesson's checks."""
    module = importlib.import_module(f"test_checks_{lesson[3:]}")
    return [one for one in vars(module).values()
            if isinstance(one, type) and issubclass(one, Answers) and one.lesson == lesson]  # fmt: skip


def main():
    if sys.argv[1] == "answers":
        number, script = int(sys.argv[2]), Path(sys.argv[3]).resolve()
        sys.argv = [str(script), *sys.argv[4:]]
        cells = [cell for part in sections(script) for cell in part]
        run(cells, as_main(script), script, after=lambda *what: put_answers(what[0], script, number, what[1]))
        leave()
        return
    if sys.argv[1] == "core":
        script = Path(sys.argv[2]).resolve()
        sys.argv = [str(script), *sys.argv[3:]]
        run(core(script), as_main(script), script, to_the_end=True)
        return
    script = Path(sys.argv[1]).resolve()
    sys.argv = [str(script), *sys.argv[2:]]
    begin, *others = sections(script)
    start = as_main(script)
    run(begin, start, script)
    begun = dict(start)
    for section in others:
        start.clear()  # the same dictionary: functions of the start cells look names up in it
        start.update(begun)
        try:
            run(section, start, script)
        except BaseException:
            print(f"does not run after the start cells alone: {section[0].source.splitlines()[0]}", flush=True)
            raise
    leave()


def run(cells, namespace, script, to_the_end=False, after=lambda *_: None):
    known = catch_up.outline_of(script.read_text("utf-8"), script.stem)  # as it is here, not as it was committed
    catch_up.outline = lambda lesson: known
    for cell in cells:
        if cell.cell_type == "code" and (to_the_end or not cell.source.rstrip().endswith("leave()")):
            source, name = cell.source.replace("%%ranks", "#", 1), f"{script}, a cell"
            if brought := catch_up.bring(namespace, script.stem, source):  # as the magic does
                print(catch_up.said(brought, script.stem), flush=True)
            linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # checks read lines
            exec(compile(source, name, "exec"), namespace)
            after(namespace, source)


if __name__ == "__main__":
    main()
