"""Charts of what each rank does when: a Gantt chart of all ranks, pipeline schedules, their idle time."""

from manyhands.plots import looks

SHADES = {"F": 0.18, "B": 0.78, "I": 0.56, "W": 0.34}  # of the rank's colour
MEANING = {"F": "forward", "B": "backward", "I": "I: the input's gradient", "W": "W: the weights' gradient"}


def face(rank, kind):
    """The colour of a rank's forward, backward, or half of a backward."""
    return looks.tint(looks.rank_colour(rank), SHADES[kind])


def chart(charts, unit="forwards", virtual=False, scale=1.0, wrong=()):
    """One Gantt chart below the other, on one scale: [(title, slots, notes)] -> a matplotlib Figure.

    A slot has `rank`, `action` (kind, stage, micro-batch), `start` and `end`; the micro-batch is written into it, in
    bold for a rank's second stage. `notes` stand at the end of each rank's row. Times are multiplied by `scale` to be
    in `unit`. Empty is idle. Slots in `wrong` get a red frame and a ✗.
    """
    from matplotlib.patches import Patch

    rows = [1 + max(slot.rank for slot in slots) for _, slots, _ in charts]
    height = 0.5 + sum(0.75 + 0.34 * n for n in rows)
    shape = {"sharex": True, "height_ratios": [n + 1 for n in rows]}
    figure, everything = looks.new_figure(9, height, len(charts), 1, squeeze=False, **shape)
    end = max(slot.end for _, slots, _ in charts for slot in slots) * scale
    second = False
    kinds = [k for k in SHADES if any(slot.action[0] == k for _, slots, _ in charts for slot in slots)]
    for axes, (title, slots, notes), n in zip(everything[:, 0], charts, rows, strict=True):
        for slot in slots:
            start, width = slot.start * scale, (slot.end - slot.start) * scale
            kind, stage, micro = slot.action
            fault = slot in wrong
            edge = {"ec": looks.LIMIT["color"], "lw": 2.2, "zorder": 3} if fault else {"ec": looks.INK, "lw": 0.6}
            axes.broken_barh([(start, width)], (slot.rank - 0.42, 0.84), fc=face(slot.rank, kind), **edge)
            text = "✗" if fault else str(micro)
            if width / end * 9 * 72 > 6.5 * len(text):
                bold = {"weight": "bold", "style": "italic"} if stage >= n else {}
                axes.text(start + width / 2, slot.rank, text, fontsize=10, ha="center", va="center", zorder=4, **bold)
        second |= any(slot.action[1] >= n for slot in slots)
        for rank, note in enumerate(notes):
            axes.text(end * 1.01, rank, note, fontsize=10, va="center")
        axes.set_yticks(range(n), [f"rank {rank}" for rank in range(n)])
        axes.set(ylim=(n - 0.4, -0.6), xlim=(0, end * (1.16 if any(any(c[2]) for c in charts) else 1.01)))
        axes.set_title(f"{title} (virtual)" if virtual else title, loc="left", fontsize=11)
        axes.spines["bottom"].set_bounds(0, end)
    last = everything[-1, 0]
    last.set_xticks([tick for tick in last.get_xticks() if 0 <= tick <= end])
    said = f"virtual time, {unit}" if virtual else f"time in {unit}"
    last.set_xlabel(f"{said}; bold: the rank's second stage" if second else said)
    faces = {k: looks.GREY if k == "F" else looks.tint(looks.EDGE, 1.2 * SHADES[k]) for k in kinds}
    keys = [Patch(fc=fc, ec=looks.INK, lw=0.6, label=MEANING[k]) for k, fc in faces.items()]
    keys += [Patch(fc=looks.PAPER, ec=looks.LIMIT["color"], lw=2.2, label="✗ wrong")] if wrong else []
    figure.legend(handles=keys, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _overlapped(span, spans):
    """Return whether another span of this rank and lane lies over this one: their names would hide each other."""
    beside = (other for other in spans if (other.rank, other.lane) == (span.rank, span.lane) and other is not span)
    return any(other.start_s < span.end_s and span.start_s < other.end_s for other in beside)


def gantt(spans, title, virtual=False, until_s=None):
    """A row per rank: compute solid in the rank's colour, communication hatched below it, waiting outlined.

    Returns a matplotlib Figure. A span's name is written into it where it fits. With virtual=True title and axis say
    that the time is virtual; `until_s` ends the axis there, so that two charts have one scale. Where `spans` is a dict,
    {name: spans of one rank}, a row has that name and ends with its time, and no names are written into the spans.
    """
    from matplotlib.patches import Patch

    named = isinstance(spans, dict)
    ranks = sorted({span.rank for span in spans}) if not named else []
    labels = [*spans] if named else [f"rank {rank}" for rank in ranks]
    drawn = [(row, span) for row, own in enumerate(spans.values()) for span in own] if named else [
        (ranks.index(span.rank), span) for span in spans
    ]  # fmt: skip
    longest = until_s or max((span.end_s for _, span in drawn), default=0.0)
    seconds, unit = looks.prefix("s", longest)
    figure, axes = looks.new_figure(8, 1.5 + 0.62 * max(len(labels), 1))
    for row, span in drawn:
        top = row - (0 if span.lane == "communication" else 0.36)
        length = span.end_s - span.start_s
        begin_and_length = (span.start_s / seconds, length / seconds)
        axes.broken_barh([begin_and_length], (top, 0.36), lw=0.7, **looks.of_rank(span.rank, span.lane))
        fits = length > 0.0135 * longest * len(span.name)  # the name into the box
        if fits and not named and span.lane != "waiting" and not _overlapped(span, spans):
            ground = {"boxstyle": "round,pad=0.1", "fc": looks.PAPER, "ec": "none", "alpha": 0.8}
            middle = (span.start_s + length / 2) / seconds
            axes.text(middle, top + 0.18, span.name, fontsize=10, ha="center", va="center", bbox=ground)
    for row, own in enumerate(spans.values() if named else ()):
        end = max(span.end_s for span in own) / seconds
        axes.text(end + 0.01 * longest / seconds, row, f"{end:.1f} {unit}", fontsize=10, va="center")
    axes.set_yticks(range(len(labels)), labels)
    axes.set(xlim=(0, longest / seconds * (1.12 if named else 1.01) or 1), ylim=(len(labels) - 0.4, -0.6))
    axes.set_xlabel(f"virtual time, {unit}" if virtual else f"time, {unit}")
    axes.set_title(f"{title} (virtual)" if virtual and "virtual" not in title else title)
    present = [lane for lane in looks.ACTIVITIES if any(span.lane == lane for _, span in drawn)]
    if present:
        keys = [Patch(**{"fc": looks.GREY, **looks.ACTIVITIES[lane]}, label=lane) for lane in present]
        figure.legend(handles=keys, loc="outside lower center", ncols=3, frameon=False)
    return figure
