"""Plots of lesson 11."""

import math

from manyhands.plots import looks
from manyhands.plots.looks import HEAT, PAPER, new_figure, prefix
from manyhands.plots.times import looks_of

SIZES = (11, 8, 5)  # of the markers: where two lives made the same step both stay in sight
MOST_NUMBERS = 160  # cells with a number in them; beyond that they would touch
MOST_TICKS = 17
MOST_LINES = 40  # between columns, or rows


def draw_failures(published, best_interval):
    """Draw hours between failures against GPUs, both axes logarithmic, and below each curve how often to save.

    published: dicts with `name` and `points`, [[GPUs, hours], ...]; from `projected_from` GPUs on they are hollow. A
    single point is drawn down to 64 GPUs by the rule hours x GPUs = constant. best_interval: a function of the seconds
    between failures. Return a Figure.
    """
    figure, axes = looks.new_figure(8, 3.8)
    by_name = looks_of([one["name"] for one in published])
    for one in published:
        look, points = {**by_name[one["name"]], "ls": "none", "ms": 7}, one["points"]
        for n, hours in points:
            hollow = {"mfc": "none"} if n >= one.get("projected_from", math.inf) else {}
            axes.plot(n, hours, **look | hollow)
        if len(points) == 1:
            ((n, hours),) = points
            points = [[64, hours * n / 64], *points]
        gpus, hours = zip(*points, strict=True)
        axes.plot(gpus, hours, color=look["color"], lw=1)
        axes.plot(gpus, [best_interval(3600 * h) / 3600 for h in hours], **looks.PREDICTED | {"color": look["color"]})
        looks.note(axes, one["name"], (gpus[0], hours[0]), (10, 4), look["color"])
    looks.note(axes, "save every ... hours (dashed)", (gpus[0], best_interval(3600 * hours[0]) / 3600), (0, 12))
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="hours", title="a failure every ... hours")
    axes.set_ylim(top=3000)
    axes.set_xticks([8, 64, 1024, 16384, 131072], ["8", "64", "1,024", "16,384", "131,072"])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    return figure


def draw_killed_and_resumed(undisturbed, lives, title):
    """The losses of all lives over the undisturbed curve; below them each life's loss minus the undisturbed one.

    undisturbed: {step: loss}; lives: for each start of the run {step: loss}, with steps that `undisturbed` has.
    """
    figure, (above, below) = looks.new_figure(8, 4, 2, 1, sharex=True, height_ratios=[3, 1])
    above.plot(list(undisturbed), list(undisturbed.values()), color=looks.FAINT, lw=8)
    first = next(iter(undisturbed))
    looks.note(above, "undisturbed", (first, undisturbed[first]), (12, -2))
    residuals = []
    for i, own in enumerate(lives):
        style = looks.ALTERNATIVES[i % len(looks.ALTERNATIVES)] | {"ms": SIZES[i % len(SIZES)], "mfc": "none"}
        above.plot(list(own), list(own.values()), **style)
        label = {"size": 10, "color": style["color"], "ha": "center", "va": "top"}
        above.text((min(own) + max(own)) / 2, 0.97, f"life {i + 1}", transform=above.get_xaxis_transform(), **label)
        residuals.append([loss - undisturbed[step] for step, loss in own.items()])
        below.plot(list(own), residuals[-1], **style)
    low, high = above.get_ylim()
    above.set(ylim=(low, high + (high - low) / 6), ylabel="loss", title=title)  # room for the labels
    furthest = max((abs(residual) for life in residuals for residual in life), default=0)
    below.set(xlabel="step", ylabel="residual", ylim=(-1.2 * furthest or -1e-6, 1.2 * furthest or 1e-6))
    return figure


def draw_heat_maps(maps, unit, virtual=False):
    """A Figure of several maps {title: values_RS}, one above the other, on one scale; for the rest see `heat_map`."""
    import numpy as np

    rows = {title: [[float(value) for value in row] for row in values_RS] for title, values_RS in maps.items()}
    arrays = {title: np.array(values) for title, values in rows.items()}
    known = np.concatenate([values_RS[np.isfinite(values_RS)] for values_RS in arrays.values()])
    lowest, highest = known.min(initial=0.0), known.max(initial=-np.inf) if known.size else 0.0
    scale, unit = prefix(unit, max(abs(lowest), abs(highest)))
    span = (lowest / scale, highest / scale if highest > lowest else lowest / scale + 1)

    R, S = np.max([values_RS.shape for values_RS in arrays.values()], axis=0)
    wide, tall = min(10.0, max(4.5, 2.0 + 0.62 * S)), min(8.0, len(maps) * (0.7 + 0.42 * R) + 0.7)
    figure, panels = new_figure(wide, tall, len(maps), 1, squeeze=False)
    panels = panels[:, 0]
    for axes, (title, values_RS) in zip(panels, arrays.items(), strict=True):
        title = f"{title} (virtual)" if virtual and "virtual" not in title else title
        image = _draw(axes, values_RS / scale, title, span)
    panels[-1].set_xlabel("step")
    figure.colorbar(image, ax=list(panels), label=f"virtual time, {unit}" if virtual and unit.endswith("s") else unit)
    return figure


def _draw(axes, values_RS, title, span):
    """One map on its axes; returns the image, which the colour bar is made of."""
    R, S = values_RS.shape
    image = axes.imshow(values_RS, cmap=HEAT, vmin=span[0], vmax=span[1], aspect="auto", interpolation="nearest")
    _grid(axes, R, S)
    if R * S <= MOST_NUMBERS:
        _write_numbers(axes, values_RS, image)
    axes.set_yticks(*_ticks(R, lambda r: f"rank {r}"))
    axes.set_xticks(*_ticks(S, str))
    axes.set_title(title)
    return image


def _grid(axes, R, S):
    """White lines between cells that are large enough, no frame."""
    for axis, n in ((axes.xaxis, S), (axes.yaxis, R)):
        if n <= MOST_LINES:
            axis.set_ticks([i - 0.5 for i in range(1, n)], minor=True)
            axis.grid(which="minor", color=PAPER, lw=1.0)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def _write_numbers(axes, values_RS, image):
    """Each number in its cell, dark on light and light on dark, all with as many decimals as the largest needs."""
    import numpy as np

    finite = values_RS[np.isfinite(values_RS)]
    largest = abs(finite).max(initial=0.0)
    decimals = 0 if (finite == finite.round()).all() or largest >= 100 else 1 if largest >= 10 else 2
    size = min(10.0, 90 / max(1, values_RS.shape[1]) + 3.0)
    for (r, s), value in np.ndenumerate(values_RS):
        if np.isfinite(value):
            dark = np.dot((0.2126, 0.7152, 0.0722), image.cmap(image.norm(value))[:3]) < 0.5
            style = {"ha": "center", "va": "center", "fontsize": size, "color": "white" if dark else "black"}
            axes.text(s, r, f"{value:,.{decimals}f}" if value else "0", **style)


def _ticks(n, name):
    """(positions, labels) of n cells: all of them, or every 2nd, 5th, 10th, ..."""
    step = next(k * 10**e for e in range(9) for k in (1, 2, 5) if n <= MOST_TICKS * k * 10**e)
    places = list(range(0, n, step))
    return places, [name(place) for place in places]
