"""Run the start cells of a lesson's script once, as a world of one, then each section on a copy of what they define.

python tests/each_section.py scripts/03_data_parallel.py --steps 2
python tests/each_section.py core scripts/03_data_parallel.py --steps 2     # all of CORE, and nothing else, to its end
"""

import linecache
import re
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

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


def main():
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


def run(cells, namespace, script, to_the_end=False):
    known = catch_up.outline_of(script.read_text("utf-8"), script.stem)  # as it is here, not as it was committed
    catch_up.outline = lambda lesson: known
    for cell in cells:
        if cell.cell_type == "code" and (to_the_end or not cell.source.rstrip().endswith("leave()")):
            source, name = cell.source.replace("%%ranks", "#", 1), f"{script}, a cell"
            if brought := catch_up.bring(namespace, script.stem, source):  # as the magic does
                print(catch_up.said(brought, script.stem), flush=True)
            linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # checks read lines
            exec(compile(source, name, "exec"), namespace)


if __name__ == "__main__":
    main()
