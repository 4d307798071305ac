"""Plots of lesson 01."""

from manyhands.plots import looks


def draw_share(here, published, title):
    """Draw a bar per machine: how many % of its peak FLOP/s it reached. Return a Figure.

    here: {name: % of the peak that was measured here}. published: dicts with `name`, `unit` and `points`, [[peak,
    reached]].
    """
    rows = {}
    for one in published:
        ((peak, reached),) = one["points"]
        rows[one["name"]] = 100 * reached / peak, f"{reached:,.0f} of {peak:,} TFLOP/s"
    rows |= {name: (share, "") for name, share in here.items()}
    figure, axes = looks.new_figure(8.6, 1.2 + 0.36 * len(rows))
    for i, (name, (share, said)) in enumerate(rows.items()):
        axes.barh(i, 100, 0.66, fc=looks.PAPER, ec=looks.FAINT)
        axes.barh(i, share, 0.66, fc=looks.INK if name in here else looks.GREY, ec=looks.INK)
        axes.text(102, i, f"{share:.2g} %" + f", {said}" * bool(said), va="center")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set(xlabel="%", title=title, xlim=(0, 150), xticks=range(0, 101, 20))
    return figure
