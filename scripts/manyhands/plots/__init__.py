"""How the workshop's figures look, and the kit they are drawn with.

    python -m manyhands.plots            # redraw assets/*.svg, the same bytes each time

A module of `lessons` holds the figures of one lesson: `FIGURES = {"02_broadcast": Drawing(function, alt), ...}`. A figure
is a white rounded card, so that it reads on light and dark pages; what its colours and hatches mean stands in `looks`.

Coordinates are in units of 0.1 inch, from the top left corner, y downwards; texts are measured in points.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from manyhands.course.folders import ASSETS
from manyhands.plots.looks import FAINT, INK, PAPER, rank_colour, tint


@dataclass(frozen=True)
class Drawing:
    """A figure of a lesson: the function that returns it, and the sentence that says what it shows."""

    draw: Callable
    alt: str


def card(width, height, title=None):
    """(figure, axes): an empty card of width x height units with its title at the top left."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    figure = Figure(figsize=(width / 10, height / 10))
    figure.patch.set_alpha(0)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.axis("off")
    corner = "round,pad=0,rounding_size=1.2"
    axes.add_patch(
        FancyBboxPatch((0.3, 0.3), width - 0.6, height - 0.6, boxstyle=corner, fc=PAPER, ec=FAINT, lw=1, zorder=0)
    )
    if title:
        write(axes, 1.5, 2.4, title, size=12, weight="bold", ha="left")
    return figure, axes


def write(axes, x, y, text, size=10, colour=INK, **kwargs):
    """Text, centred on (x, y) unless told otherwise (ha, va, weight, style of matplotlib)."""
    kwargs = {"ha": "center", "va": "center", "zorder": 4, **kwargs}
    return axes.text(x, y, text, fontsize=size, color=colour, **kwargs)


def rank_box(axes, rank, x, y, width=8, height=4, label=None):
    """A rank: a rounded box in its colour with its number (or `label`) in it; (x, y) is its top left corner."""
    from matplotlib.patches import FancyBboxPatch

    colour = rank_colour(rank)
    box = FancyBboxPatch(
        (x, y),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.8",
        fc=tint(colour, 0.18),
        ec=colour,
        lw=2,
        zorder=1,
    )
    axes.add_patch(box)
    write(axes, x + width / 2, y + height / 2, f"rank {rank}" if label is None else label, weight="bold")


def cell(axes, x, y, text="", rank=None, width=3, height=3, hatch=None, strength=0.25, size=10):
    """One piece of data: a square tinted in the colour of the rank it comes from (white without one)."""
    from matplotlib.patches import Rectangle

    colour = INK if rank is None else rank_colour(rank)
    face = PAPER if rank is None else tint(colour, strength)
    axes.add_patch(Rectangle((x, y), width, height, fc=face, ec=colour, lw=1.2, hatch=hatch, zorder=2))
    if text != "":
        write(axes, x + width / 2, y + height / 2, str(text), size=size)


def box(axes, x, y, width, height, text="", face=PAPER, edge=INK, hatch=None, dotted=False, size=10, **kwargs):
    """A labelled rectangle; on a hatched one the label stands on a white ground."""
    from matplotlib.patches import Rectangle

    style = (0, (2, 2)) if dotted else "-"
    axes.add_patch(Rectangle((x, y), width, height, fc=face, ec=edge, lw=1.2, hatch=hatch, ls=style, zorder=2))
    if text:
        ground = {"boxstyle": "round,pad=0.15", "fc": PAPER, "ec": "none"} if hatch else None
        write(axes, x + width / 2, y + height / 2, text, size=size, bbox=ground, **kwargs)


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


def drawings():
    """{name: Drawing} of every lesson, in alphabetical order."""
    lessons = importlib.import_module(f"{__name__}.lessons")
    found = {}
    for module in pkgutil.iter_modules(lessons.__path__):
        found |= importlib.import_module(f"{lessons.__name__}.{module.name}").FIGURES
    return dict(sorted(found.items()))


def save(drawing, path):
    """Draw it into an SVG file: the same bytes on every call, with text as text and the alt text as its title."""
    import matplotlib

    settings = {
        "svg.hashsalt": "manyhands",
        "svg.fonttype": "none",
        "hatch.linewidth": 0.6,
    }
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **settings, "backend": "agg"}):
        figure = drawing.draw()
        metadata = {"Date": None, "Creator": None, "Title": drawing.alt}
        figure.savefig(path, format="svg", transparent=True, metadata=metadata)


def redraw(folder=ASSETS):
    """Draw every figure into `folder`; returns the paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, drawing in drawings().items():
        paths.append(folder / f"{name}.svg")
        save(drawing, paths[-1])
    return paths
