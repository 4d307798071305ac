"""Draw the figures of the lessons, assets/*.svg, the same bytes on each call.

    make figures                                   # all of them, into assets/
    python assets/src/draw.py /tmp/elsewhere       # into another folder

`NN_topic.py` beside this file holds the figures of lesson NN: `FIGURES = {"02_broadcast": function}`, and the function
returns a matplotlib figure. What a figure shows is said once, where a lesson or the glossary shows it:
`![four ranks ...](../assets/02_broadcast.svg)`; that sentence becomes the title inside the file.
"""

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "scripts")]

from manyhands.plots.looks import (  # noqa: E402
    INK,
    PAPER,
    rank_colour,
    tint,
    write,  # noqa: E402
)


def cell(axes, x, y, text="", rank=None, width=3, height=3, hatch=None, strength=0.25, size=10):
    """One piece of data: a square tinted in the colour of the rank it comes from (white without one)."""
    from matplotlib.patches import Rectangle

    colour = INK if rank is None else rank_colour(rank)
    face = PAPER if rank is None else tint(colour, strength)
    axes.add_patch(Rectangle((x, y), width, height, fc=face, ec=colour, lw=1.2, hatch=hatch, zorder=2))
    if text != "":
        write(axes, x + width / 2, y + height / 2, str(text), size=size)


def arrow(axes, start, end, label=None, colour=INK, bend=0.0, style="-|>", **kwargs):
    """An arrow from start to end, (x, y) each; `bend` curves it, the label stands at its middle on a white ground."""
    from matplotlib.patches import FancyArrowPatch

    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle=style, mutation_scale=12, lw=1.6, color=colour, shrinkA=0, shrinkB=0, zorder=3,
            connectionstyle=f"arc3,rad={bend}", **kwargs,
        )
    )  # fmt: skip
    if label:
        middle = [(a + b) / 2 for a, b in zip(start, end, strict=True)]
        ground = {"boxstyle": "round,pad=0.15", "fc": PAPER, "ec": "none"}
        write(axes, *middle, label, size=10, bbox=ground)


@cache
def drawings():
    """{name: function that returns the figure} of all lessons, in alphabetical order."""
    found = {}
    for path in sorted(HERE.glob("*.py")):
        if path != Path(__file__).resolve():
            spec = importlib.util.spec_from_file_location(f"drawings_{path.stem}", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            found |= module.FIGURES
    return dict(sorted(found.items()))


@cache
def said():
    """{name: what the figure shows}, as the first page that shows it says it: lessons, handbook, glossary, README."""
    found = {}
    others = *sorted(ROOT.glob("assets/handbook/*.md")), ROOT / "assets" / "glossary.md", ROOT / "README.md"
    for path in (*sorted(ROOT.glob("scripts/[0-9]*.py")), *others):
        for alt, name in re.findall(r"!\[([^\]]*)\]\([./]*(?:assets/)?(\w+)\.svg\)", path.read_text("utf-8")):
            found.setdefault(name, " ".join(alt.replace("\n# ", " ").split()))
    return found


def as_frame(axes, number, draw_it):
    """Call `draw_it()`: what it adds to `axes` is shown in frame `number` of a moving figure alone."""
    before = set(axes.get_children())
    draw_it()
    for place, artist in enumerate(one for one in axes.get_children() if one not in before):
        artist.set_gid(f"frame{number}-{place}")


def moving(svg, seconds=2, times=3):
    """Return an SVG whose frames (`as_frame`) follow each other; it ends, and stands still by request, on the last one.

    Seven frames of two seconds, three times, are 42 s. A reader who asks for less motion sees the last frame only.
    """
    frames = sorted({int(number) for number in re.findall(r'id="frame(\d+)-', svg)})
    if not frames:
        return svg
    rules, share = [], 100 / len(frames)
    for number in frames:
        last, start, end = number == frames[-1], number * share, (number + 1) * share
        steps = [f"{start:.2f}%{{opacity:1}}", *([] if last else [f"{end:.2f}%{{opacity:0}}"])]
        rules.append(f"@keyframes frame{number}{{{'' if number == 0 else '0%{opacity:0}'}{''.join(steps)}}}")
        rules.append(f'[id^="frame{number}-"]{{opacity:{int(last)};animation:frame{number} '
                     f"{seconds * len(frames)}s step-end {times}}}")  # fmt: skip
    rules.append('@media (prefers-reduced-motion:reduce){[id^="frame"]{animation:none}}')
    return svg.replace("</metadata>", "</metadata>\n <style>" + "\n ".join(rules) + "</style>", 1)


def save(name, path):
    """Draw figure `name` into an SVG file, with text as text. KeyError: nobody shows it, or it does not exist."""
    import matplotlib

    settings = {"svg.hashsalt": "manyhands", "svg.fonttype": "none", "hatch.linewidth": 0.6, "backend": "agg"}
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **settings}):
        metadata = {"Date": None, "Creator": None, "Title": said()[name]}
        drawings()[name]().savefig(path, format="svg", transparent=True, metadata=metadata)
    path.write_text(moving(path.read_text("utf-8")), "utf-8")


def redraw(folder):
    """Draw every figure into `folder`; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg" for name in drawings()]
    for path in paths:
        save(path.stem, path)
    return paths


if __name__ == "__main__":
    for written in redraw(Path(sys.argv[1]) if sys.argv[1:] else HERE.parent):
        print(written)
