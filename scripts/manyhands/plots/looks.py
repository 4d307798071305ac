"""The one table of what a colour, a hatch and a line mean, in every figure, plot, widget and page; what plots share;
and the cards that widgets and the drawings of the lessons are drawn on.

- A **rank** has a colour, and its number is always written beside it. No other thing has one of these colours.
- **What a rank does**: compute is solid, communication hatched //// and nothing else is, reading from a
  file starred, waiting a dotted outline.
- **Kinds of bytes** have muted colours and a hatch each, darkest what lasts longest.
- **Measured** is black points, with whiskers from the least to the most; **predicted** is a dashed grey line; a
  **limit** (a device's memory, a peak) a dash-dotted red one.
- **Alternatives** that are compared (libraries, algorithms, rules) differ by line and marker, then by shade.

Each reads in black and white: colour never stands alone. Plots are white cards on light and on dark pages; on a card
coordinates are in units of 0.1 inch, from the top left corner, y downwards, and texts are measured in points.
Every colour and hatch that a figure shows comes from here, or is a `tint` of one that does; a test holds all to it.
"""

import statistics

INK = "#1a1a1a"  # lines and text
QUIET = "#666666"  # for remarks
EDGE = "#888888"  # the outline of what waits, or is not here
FAINT = "#c8c8c8"  # rules, grids, the edge of a card
GREY = "#d9d9d9"  # a thing that is no rank's
GROUND = "#f4f4f4"  # an area in which other things stand
PAPER = "#ffffff"

# Okabe and Ito 2008: told apart by colour-blind eyes
RANK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")

SHARED_COLOUR = "#6b7280"  # what all ranks say alike, beside a cell: read on light and on dark pages

HATCH = "////"  # communication
ACTIVITIES = {  # over the rank's colour, see `of_rank`
    "compute": {"ec": INK},
    "communication": {"ec": INK, "hatch": HATCH},
    "reading": {"ec": INK, "hatch": "**"},  # from a file
    "waiting": {"fc": "none", "ec": EDGE, "ls": ":"},
}
READING = ACTIVITIES["reading"]["hatch"]

BYTES = {  # kind: (colour, hatch), bottom to top, what lasts first
    "parameters": ("#4d4d4d", ""),
    "optimizer": ("#8c8c8c", "...."),
    "gradients": ("#a6761d", "\\\\\\\\"),
    "accumulated_gradients": ("#dbc8a5", "++"),
    "activations": ("#c7e0b4", "oo"),
    "unsharded_parameters": ("#b3a2d0", "xxxx"),
    "copies": ("#e6d5ef", "||||"),
    "other": (GROUND, "----"),
}

MEASURED = {"color": INK, "marker": "o", "ms": 5}  # add ls="none" for loose points
WHISKERS = {"color": INK, "lw": 1.2, "capsize": 3}
PREDICTED = {"color": "#777777", "ls": "--", "lw": 1.6}
LIMIT = {"color": "#b2182b", "ls": "-.", "lw": 1.6}
TRAINING = {"color": "#999999", "lw": 1}  # the loss of each step
VALIDATION = {"color": INK, "marker": "o", "ms": 5, "lw": 1.6}

ALTERNATIVES = (
    {"color": INK, "marker": "o", "ls": "-"},
    {"color": "#8a8a8a", "marker": "s", "ls": "-"},
    {"color": "#7f1d1d", "marker": "^", "ls": "-"},
    {"color": "#4c1d95", "marker": "D", "ls": "-"},
)
FIELDS = (("sign", QUIET, ""), ("exponent", "#7f1d1d", "++++"), ("fraction", "#4c1d95", ""))  # of a float's bits
HEAT = "YlGnBu"  # ColorBrewer: only ever darker, no red
PREFIXES = {"s": ((1, "s"), (1e-3, "ms"), (1e-6, "µs")), "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))}


def rank_colour(rank):
    """The colour of a rank; after eight they repeat."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def tint(colour, strength=0.25):
    """`colour` mixed into white: strength 1 is the colour, 0 is white. Returns #rrggbb."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - (255 - part) * strength):02x}" for part in parts)


def of_rank(rank, activity="compute"):
    """Patch arguments of matplotlib for what `rank` does: a key of ACTIVITIES."""
    if activity == "waiting":
        return ACTIVITIES[activity]
    colour = rank_colour(rank)
    return ACTIVITIES[activity] | {"fc": colour if activity == "compute" else tint(colour, 0.3)}


def prefix(unit, largest):
    """(how many of `unit` are one of the shown unit, the shown unit) for numbers up to `largest`."""
    choices = PREFIXES.get(unit, ((1, unit),))
    return next((choice for choice in choices if largest >= choice[0]), choices[-1] if largest else choices[0])


def new_figure(width, height, rows=1, columns=1, **subplots):
    """(figure, axes): white panels without the upper and the right line, placed so that no texts collide; in inches.

    `axes` is what `Figure.subplots(rows, columns, **subplots)` returns: one, or an array of them.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(rows, columns, **subplots)


def errorbars(samples, scale=1, middle=statistics.median):
    """(y, yerr) of matplotlib's errorbar: the middle of each list of samples and whiskers to its ends, all scaled."""
    middles = [scale * middle(some) for some in samples]
    below = [y - scale * min(some) for y, some in zip(middles, samples, strict=True)]
    above = [scale * max(some) - y for y, some in zip(middles, samples, strict=True)]
    return middles, [below, above]


def series_with_ends(axes, x, series, styles, scale=1):
    """{name: for each x its samples} as points with whiskers; each named at its end, the highest one above it."""
    ends = [scale * statistics.median(samples[-1]) for samples in series.values()]
    for (name, samples), style, end in zip(series.items(), styles, ends, strict=False):
        middles, errors = errorbars(samples, scale)
        axes.errorbar(x, middles, yerr=errors, **{**WHISKERS, **style, "ms": 5})
        end_label(axes, x[-1], end, name, style["color"], up=1 if end == max(ends) else -1)


def note(axes, text, at, shift, colour=INK, **style):
    """`text` beside the point `at` of the data, shifted by this number of printer's points."""
    axes.annotate(text, at, shift, textcoords="offset points", color=colour, **style)


def end_label(axes, x, y, text, colour, up=0):
    """`text` at the end of a line, a little above (up=1) or below (-1) its last point."""
    va = {1: "bottom", 0: "center", -1: "top"}[up]
    note(axes, text, (x, float(y)), (9, 2 * up), colour, va=va)


def stacked(axes, row, pieces, height=0.8, **style):
    """A bar of `axes` in this row: [(width, colour, hatch[, label])], one after the other. Returns where it ends."""
    start = 0.0
    for width, colour, hatch, *label in pieces:
        axes.barh(row, width, height, left=start, fc=colour, ec=INK, hatch=hatch, label="".join(label), **style)
        start += width
    return start


def kind_keys(kinds, **style):
    """Patches for a legend: one for each of these keys of BYTES."""
    from matplotlib.patches import Patch

    looks = {kind: BYTES[kind] for kind in kinds}
    return [Patch(fc=fc, ec=INK, hatch=h, label=kind.replace("_", " "), **style) for kind, (fc, h) in looks.items()]


def plain_log_ticks(axis, label="{x:g}", subs=(1, 2, 5)):
    """A logarithmic axis with 1, 2, 5, 10, 20, ... written as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(label)
    axis.set_minor_formatter(NullFormatter())


# ------------------------------------------------------------------ cards: units of 0.1 inch, from the top left corner


def card(width, height, title=None):
    """(figure, axes): an empty card of width x height units with its title at the top left."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    figure = Figure(figsize=(width / 10, height / 10))
    figure.patch.set_alpha(0)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.axis("off")
    style = {"boxstyle": "round,pad=0,rounding_size=1.2", "fc": PAPER, "ec": FAINT, "lw": 1, "zorder": 0}
    axes.add_patch(FancyBboxPatch((0.3, 0.3), width - 0.6, height - 0.6, **style))
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
    style = {"boxstyle": "round,pad=0,rounding_size=0.8", "fc": tint(colour, 0.18), "ec": colour, "lw": 2}
    axes.add_patch(FancyBboxPatch((x, y), width, height, zorder=1, **style))
    write(axes, x + width / 2, y + height / 2, f"rank {rank}" if label is None else label, weight="bold")


def box(axes, x, y, width, height, text="", face=PAPER, edge=INK, hatch=None, dotted=False, size=10, **kwargs):
    """A labelled rectangle; on a hatched one the label stands on a white ground."""
    from matplotlib.patches import Rectangle

    style = (0, (2, 2)) if dotted else "-"
    axes.add_patch(Rectangle((x, y), width, height, fc=face, ec=edge, lw=1.2, hatch=hatch, ls=style, zorder=2))
    if text:
        ground = {"boxstyle": "round,pad=0.15", "fc": PAPER, "ec": "none"} if hatch else None
        write(axes, x + width / 2, y + height / 2, text, size=size, bbox=ground, **kwargs)
