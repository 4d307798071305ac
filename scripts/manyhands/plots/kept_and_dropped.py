"""What became of a text that was prepared for training: kept, or dropped for one of several reasons."""

from manyhands.plots.looks import EDGE, FAINT, INK, QUIET


def kept_and_dropped(documents, characters, title):
    """Two rows of bars, one per reason: documents, and millions of characters. Returns a matplotlib Figure.

    documents, characters: {what became of them: count}, "kept" first.
    """
    from matplotlib.figure import Figure

    names = list(documents)
    figure = Figure(figsize=(7.5, 0.9 + 0.36 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(names))
    for axes, counts, unit in ((left, documents, "documents"), (right, characters, "million characters")):
        scale = 1 if unit == "documents" else 1e6
        values = [counts[name] / scale for name in names]
        fill = [QUIET if name == "kept" else FAINT for name in names]
        axes.barh(places, values, color=fill, edgecolor=EDGE)
        for place, value in zip(places, values, strict=True):
            text = f" {value:,.0f}" if scale == 1 else f" {value:,.3g}"
            axes.text(value, place, text, va="center", fontsize=10, color=INK)
        axes.set(xlabel=unit, xlim=(0, max([*values, 1e-9]) * 1.25))
        axes.spines[["top", "right"]].set_visible(False)
    left.set_yticks(places, names)
    left.invert_yaxis()
    figure.suptitle(title, fontsize=10)
    return figure
