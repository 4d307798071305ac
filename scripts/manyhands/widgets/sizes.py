"""GB or GiB: how many devices it takes, by the one and by the other."""

from math import ceil

from manyhands.plots.cards import card, write
from manyhands.plots.looks import INK, PAPER, QUIET, tint
from manyhands.widgets.display import Controls, is_live, labelled, show_picture

UNITS = {"GB": 10**9, "GiB": 2**30}
PREFIXES = (("kB", "KiB"), ("MB", "MiB"), ("GB", "GiB"), ("TB", "TiB"))
DEVICES = (16, 24, 32, 40, 48, 64, 80, 96, 141, 192)  # what data sheets of accelerators say
MOST_BOXES = 60


def devices_needed(gigabytes, device, unit):
    """How many devices of `device` x `unit` bytes (GB: 10^9, GiB: 2^30) hold `gigabytes` x 10^9 bytes."""
    return ceil(gigabytes * UNITS["GB"] / (device * UNITS[unit]))


def sizes_figure(gigabytes=914.04, device=40, unit="GiB"):
    """A matplotlib Figure: so many GB (10^9 bytes) on devices of `device` GB, and of `device` GiB, one box each.

    `unit` is what the devices really have; its row stands out.
    """
    rows = {name: devices_needed(gigabytes, device, name) * size for name, size in UNITS.items()}
    scale = 88 / max(rows.values())  # the same for both rows: a device of GiB is wider, what is full is as long
    figure, axes = card(92, 36, f"{_both(gigabytes)}, on devices of {device:g}")
    for i, name in enumerate(UNITS):
        chosen = name == unit
        n = devices_needed(gigabytes, device, name)
        y = 8 + 9.5 * i
        each = f"if {device:g} means {name}: {device * UNITS[name]:,} bytes each, {n:,} device{'s' * (n != 1)}"
        write(axes, 2, y - 1.3, each, ha="left", weight="bold" if chosen else "normal", size=10.5)
        _boxes(axes, y, n, gigabytes * UNITS["GB"] / (device * UNITS[name]), chosen, UNITS[name] * scale)
    write(axes, 2, 28, "what one prefix is more than the other:", ha="left", size=10)
    for i, (decimal, binary) in enumerate(PREFIXES, start=1):
        more = f"{binary} is {100 * (1024**i / 1000**i - 1):.1f} % more than {decimal}"
        write(axes, 2 + 46 * ((i - 1) % 2), 30.6 + 2.6 * ((i - 1) // 2), more, ha="left", size=10, colour=QUIET)
    return figure


def _boxes(axes, y, n, filling, chosen, wide):
    """n boxes of width `wide`, `filling` of them full; beyond MOST_BOXES they are one long box."""
    from matplotlib.patches import Rectangle

    fill = tint(INK if chosen else QUIET, 0.45)
    if n > MOST_BOXES:
        axes.add_patch(Rectangle((2, y), wide * filling, 4, fc=fill, ec=INK, lw=0.7, zorder=2))
        write(axes, 46, y + 2, f"{n:,}", weight="bold")
        return
    gap = 0.12 * wide
    for i in range(n):
        x, full = 2 + wide * i, (wide - gap) * min(1.0, filling - i)
        axes.add_patch(Rectangle((x, y), full, 4, fc=fill, lw=0, zorder=2))
        axes.add_patch(  # what is left free
            Rectangle((x + full, y), wide - gap - full, 4, fc=PAPER, lw=0, zorder=2)
        )
        axes.add_patch(Rectangle((x, y), wide - gap, 4, fill=False, ec=INK, lw=0.7, zorder=3))


def _both(gigabytes):
    return " = ".join(f"{_number(gigabytes * UNITS['GB'] / n_bytes)} {unit}" for unit, n_bytes in UNITS.items())


def _number(value):
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _alt(gigabytes=914.04, device=40, unit="GiB"):
    counts = " and ".join(f"{devices_needed(gigabytes, device, name):,} of {device:g} {name}" for name in UNITS)
    return f"{_both(gigabytes)}: that takes {counts}; the devices have {unit}"


def show_sizes(gigabytes=914.04, device=40, unit="GiB"):
    """Choose a size, a device and what its data sheet's unit means. A picture where nobody can."""
    if not is_live():
        show_picture(sizes_figure(gigabytes, device, unit), _alt(gigabytes, device, unit))
        return
    import ipywidgets as w

    controls = [
        labelled(w.BoundedFloatText, "GB to hold", 6.5, 20, value=gigabytes, min=0.001, max=1e7),
        labelled(w.Dropdown, "device", 4, 14, options=DEVICES, value=device),
        labelled(w.Dropdown, "whose unit is", 7.5, 16, options=list(UNITS), value=unit),
    ]

    def draw():
        now = [control.value for control in controls]
        return sizes_figure(*now), _alt(*now)

    page = Controls([controls], draw)
    page.redraw_with(*controls)
    page.show()
