"""A heat map: one number for each rank and step, darker where it is larger.

    show(heat_map(steps["waiting"], "waiting time", "s", virtual=True), "waiting", alt="...")

The colours (ColorBrewer's YlGnBu, pale yellow to dark blue) only ever get darker and have no red in them, so that they
read in black and white and by colour-blind eyes. Where cells are few, the numbers stand in them.
"""

from manyhands.plots.looks import HEAT, PAPER, QUIET, new_figure, prefix

MOST_NUMBERS = 160  # cells with a number in them; beyond that they would touch
MOST_TICKS = 17
MOST_LINES = 40  # between columns, or rows


def heat_map(values_RS, title, unit, virtual=False):
    """A matplotlib Figure of `values_RS` (R ranks of S steps, as lists, an array or a tensor), rank 0 at the top.

    `unit` is that of the numbers; "s" and "bytes" are shown in ms, MB, ... as fits. One scale for all cells: from 0
    where no number is negative, so that a difference looks as large as it is. NaN is an empty cell with a cross. With
    virtual=True the title says that the time is virtual.
    Raise ValueError where ranks differ in length or there are no numbers.
    """
    return heat_maps({title: values_RS}, unit, virtual)


def heat_maps(maps, unit, virtual=False):
    """A Figure of several maps {title: values_RS}, one above the other, on one scale; for the rest see `heat_map`."""
    import numpy as np

    rows = {title: [[float(value) for value in row] for row in values_RS] for title, values_RS in maps.items()}
    for values in rows.values():
        lengths = sorted({len(row) for row in values})
        if len(lengths) != 1 or lengths[0] == 0:
            raise ValueError(f"a heat map needs ranks of one length, not of {lengths or 'none'}")
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
    import numpy as np

    R, S = values_RS.shape
    image = axes.imshow(values_RS, cmap=HEAT, vmin=span[0], vmax=span[1], aspect="auto", interpolation="nearest")
    _grid(axes, R, S)
    for r, s in np.argwhere(~np.isfinite(values_RS)):
        axes.text(s, r, "×", ha="center", va="center", color=QUIET)
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
