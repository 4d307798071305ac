"""The one table of what a colour, a hatch and a line mean: in every figure, plot, widget and page of the course.

- A **rank** has a colour, and its number is always written beside it. No other thing has one of these colours.
- **What a rank does**: compute is solid, communication hatched //// and nothing else is, reading from a
  file starred, waiting a dotted outline.
- **Kinds of bytes** have muted colours and a hatch each, darkest what lasts longest.
- **Measured** is black points, with whiskers from the least to the most; **predicted** is a dashed grey line; a
  **limit** (a device's memory, a peak) a dash-dotted red one.
- **Alternatives** that are compared (libraries, algorithms, rules) differ by line and marker, then by shade.

Each reads in black and white: colour never stands alone. Plots are white cards on light and on dark pages.
Every colour and hatch that a figure shows comes from here, or is a `tint` of one that does; a test holds all to it.
"""

import statistics

INK = "#1a1a1a"  # lines and text
QUIET = "#666666"  # what is said in passing
EDGE = "#888888"  # the outline of what waits, or is not here
FAINT = "#c8c8c8"  # rules, grids, the edge of a card
GREY = "#d9d9d9"  # a thing that is no rank's
GROUND = "#f4f4f4"  # an area in which other things stand
PAPER = "#ffffff"

RANK_COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#000000",
)  # Okabe and Ito 2008: told apart by colour-blind eyes

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
