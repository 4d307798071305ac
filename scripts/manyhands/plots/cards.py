"""Cards that widgets and the drawings of the lessons are drawn on: a white rounded ground, texts, boxes.

A card reads on light and dark pages; what its colours and hatches mean stands in `looks`. Coordinates are in units of
0.1 inch, from the top left corner, y downwards; texts are measured in points.
"""

from manyhands.plots.looks import FAINT, INK, PAPER, rank_colour, tint


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


def box(axes, x, y, width, height, text="", face=PAPER, edge=INK, hatch=None, dotted=False, size=10, **kwargs):
    """A labelled rectangle; on a hatched one the label stands on a white ground."""
    from matplotlib.patches import Rectangle

    style = (0, (2, 2)) if dotted else "-"
    axes.add_patch(Rectangle((x, y), width, height, fc=face, ec=edge, lw=1.2, hatch=hatch, ls=style, zorder=2))
    if text:
        ground = {"boxstyle": "round,pad=0.15", "fc": PAPER, "ec": "none"} if hatch else None
        write(axes, x + width / 2, y + height / 2, text, size=size, bbox=ground, **kwargs)
