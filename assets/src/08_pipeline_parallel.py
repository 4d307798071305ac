"""Figures of lesson 08: a cut model, micro-batches, messages, GPipe and 1F1B, stages in turn, B in halves."""

from draw import arrow, as_frame
from manyhands.plots.looks import EDGE, GREY, HATCH, PAPER, QUIET, box, card, rank_box, rank_colour, tint, write
from manyhands.plots.schedule import face

FORWARD, BACKWARD = 1, 2  # lengths


def cut():
    figure, axes = card(92, 31, "a network 6-4-2, cut between its layers")
    for rank, x, layer, numbers in ((0, 4, "6 inputs → 4", "28 parameters"), (1, 58, "4 → 2 outputs", "10 parameters")):
        rank_box(axes, rank, x, 5.5, width=30, height=20, label="")
        write(axes, x + 15, 8.6, f"rank {rank}", weight="bold", size=11)
        box(axes, x + 5, 11.5, 20, 7, layer, face=tint(rank_colour(rank), 0.4), edge=rank_colour(rank), size=11)
        write(axes, x + 15, 22, numbers)
    arrow(axes, (34.5, 12.5), (57.5, 12.5))
    box(axes, 40, 8.4, 12, 2.8, "h: 4 numbers", hatch=HATCH)
    arrow(axes, (57.5, 17.8), (34.5, 17.8))
    box(axes, 38.5, 19.3, 15, 2.8, "dL/dh: 4 numbers", hatch=HATCH)
    write(axes, 46, 28.4, "per row of the batch; weights never move", colour=QUIET)
    return figure


def _gpipe_slots(p, m, forward=FORWARD, backward=BACKWARD):
    """[(rank, kind, micro-batch, start, length)]"""
    turn = (m + p - 1) * forward
    slots = [(s, "F", i, (s + i) * forward, forward) for s in range(p) for i in range(m)]
    return slots + [(s, "B", i, turn + (p - 1 - s + i) * backward, backward) for s in range(p) for i in range(m)]


def _one_f_one_b_slots(p, m):
    """The same for 1F1B, m >= p, in its closed form: from its first backward on a stage repeats itself every 3."""
    slots = []
    for s in range(p):
        first = p + 2 * (p - 1 - s)  # when its first backward begins
        for i in range(m):
            slots.append((s, "B", i, first + 3 * i, BACKWARD))
            waits = first + 3 * (i - (p - s)) + BACKWARD
            slots.append((s, "F", i, s + i if i < p - s else waits, FORWARD))
    return slots


def _rows(axes, slots, x, y, unit, height=3.2, gap=0.5, labels=True, notes=()):
    """One row per rank; the micro-batch's number in each box."""
    p = 1 + max(slot[0] for slot in slots)
    for s in range(p):
        write(axes, x - 1, y + s * (height + gap) + height / 2, f"rank {s}", ha="right")
    for s, kind, i, start, length in slots:
        text = str(i) if labels else ""
        at = y + s * (height + gap)
        box(axes, x + start * unit, at, length * unit, height, text, face=face(s, kind), edge=rank_colour(s))
    end = max(start + length for *_, start, length in slots)
    for s, note in enumerate(notes):
        write(axes, x + end * unit + 1, y + s * (height + gap) + height / 2, note, ha="left")
    return x + end * unit


def _key(axes, x, y):
    for shade, text in (("F", "forward"), ("B", "backward, twice as long")):
        box(axes, x, y, 3, 2.2, face=GREY if shade == "F" else tint(EDGE, 0.9), edge=EDGE)
        write(axes, x + 3.8, y + 1.1, text, ha="left")
        x += 14


def micro_batches():
    figure, axes = card(92, 46, "one batch on four ranks")
    write(axes, 9, 6, "whole: one rank computes at a time, idle 3/4", ha="left", weight="bold")
    unit = 6.4
    end = _rows(axes, _gpipe_slots(4, 1), 9, 8, unit, labels=False)
    write(axes, 9, 25, "in 4 micro-batches, a quarter as long each: idle 3/7", ha="left", weight="bold")
    slots = _gpipe_slots(4, 4, FORWARD / 4, BACKWARD / 4)
    short = _rows(axes, slots, 9, 27, unit)
    arrow(axes, (short + 1, 33.5), (end, 33.5), style="<|-|>")
    write(axes, (short + end) / 2, 31.6, "saved")
    _key(axes, 9, 42.6)
    return figure


def swap():
    figure, axes = card(92, 27, "between two actions: send and receive in one call")
    for rank, x, does in ((1, 4, ("F of 3", "B of 1")), (2, 58, ("B of 1", "F of 3"))):
        rank_box(axes, rank, x, 5.5, width=30, height=4, label=f"rank {rank}")
        for y, text, kind in ((11, does[0], does[0][0]), (18.5, does[1], does[1][0])):
            box(axes, x, y, 30, 4, text, face=face(rank, kind), edge=rank_colour(rank))
    arrow(axes, (34.5, 15.6), (57.5, 17.6))
    arrow(axes, (57.5, 15.6), (34.5, 17.6))
    box(axes, 37.5, 11.4, 17, 2.8, "activation 3 →", hatch=HATCH)
    box(axes, 37.5, 19.2, 17, 2.8, "← gradient 1", hatch=HATCH)
    write(axes, 46, 24.8, "both ranks hand over both messages, and wait for both", colour=QUIET)
    return figure


def one_f_one_b():
    figure, axes = card(92, 48, "8 micro-batches, 4 ranks: equally long, idle 3/11")
    unit = 2.15
    for y, name, slots, held in (
        (6, "GPipe: all forwards, then all backwards", _gpipe_slots(4, 8), (8, 8, 8, 8)),
        (25.5, "1F1B: a backward as soon as there is one", _one_f_one_b_slots(4, 8), (4, 3, 2, 1)),
    ):
        write(axes, 9, y, name, ha="left", weight="bold")
        _rows(axes, slots, 9, y + 2, unit, notes=[f"holds {k}" for k in held])
    _key(axes, 9, 44.6)
    return figure


def _moving_slots(p, m):
    """[{rank: (kind, micro-batch)}] of 1F1B for each slot of time, where a backward is as long as a forward."""
    orders = []
    for s in range(p):
        ahead = min(m, p - s)
        order = [("F", i) for i in range(ahead)]
        for i in range(m):
            order += [("B", i)] + [("F", i + ahead)] * (i + ahead < m)
        orders.append(order)
    slots, done = [], set()
    while any(orders):
        now = {}
        for s, order in enumerate(orders):
            kind, i = order[0] if order else (None, None)
            before = {"F": (s - 1, "F", i), "B": (s + 1, "B", i)}.get(kind)
            if order and (not 0 <= before[0] < p or before in done):
                now[s] = order.pop(0)
        done |= {(s, *action) for s, action in now.items()}
        slots.append(now)
    return slots


def one_f_one_b_moving():
    """1F1B on four ranks, slot by slot: the chart appears, with the messages that arrive and what each rank holds."""
    p, m, unit, left, height, gap = 4, 4, 3.5, 9, 4.2, 1.6
    figure, axes = card(84, 38, "1F1B: four ranks, four micro-batches")
    slots = _moving_slots(p, m)

    def top(s):
        return 9 + s * (height + gap)

    for s in range(p):
        write(axes, left - 1, top(s) + height / 2, f"rank {s}", ha="right")
        for t, now in enumerate(slots):
            if s in now:
                kind, i = now[s]
                colours = {"face": face(s, kind), "edge": rank_colour(s)}
                box(axes, left + t * unit + 0.1, top(s), unit - 0.2, height, f"{kind}{i}", **colours)
    end = left + len(slots) * unit
    write(axes, end + 2, 7.4, "holds", ha="left", colour=QUIET)

    def frame(t, held):
        """The chart up to slot t, the messages that arrived for it, and what the ranks hold then."""
        from matplotlib.patches import Rectangle

        now = left + (t + 1) * unit
        axes.add_patch(Rectangle((now, 8), end - now + 0.5, p * (height + gap) + 0.5, fc=PAPER, ec="none", zorder=5))
        for s, (kind, _) in slots[t].items():
            source = s - 1 if kind == "F" else s + 1
            if 0 <= source < p:
                ends = (top(source) + height, top(s)) if kind == "F" else (top(source), top(s) + height)
                arrow(axes, (now - unit, ends[0]), (now - unit, ends[1]))
        for s in range(p):
            for place, i in enumerate(sorted(held[s])):
                at = end + 2 + 4 * place
                box(axes, at, top(s) + 0.4, 3.4, 3.4, str(i), face=tint(rank_colour(s), 0.3), edge=rank_colour(s))
        busy = len(slots[t])
        write(axes, left, 35, f"slot {t + 1} of {len(slots)}: {busy} of {p} ranks work", ha="left", weight="bold")

    held = [set() for _ in range(p)]
    for t, now in enumerate(slots):
        for s, (kind, i) in now.items():
            if kind == "F":
                held[s].add(i)
        as_frame(axes, t, lambda t=t: frame(t, held))
        for s, (kind, i) in now.items():
            if kind == "B":
                held[s].discard(i)
    return figure


def two_ideas():
    figure, axes = card(92, 34, "two ways to a smaller bubble")
    write(axes, 3, 6, "interleaved: 8 stages on 4 ranks", ha="left", weight="bold")
    for stage in range(8):
        x, y = 5 + 9.2 * (stage % 4), 9.5 + 9.5 * (stage // 4)
        rank = stage % 4
        box(axes, x, y, 8, 5.5, f"stage {stage}", face=tint(rank_colour(rank), 0.3), edge=rank_colour(rank))
        if stage % 4 < 3:
            arrow(axes, (x + 8, y + 2.75), (x + 9.2, y + 2.75))
    arrow(axes, (36.5, 15.2), (9.2, 18.8))
    for rank in range(4):
        write(axes, 9 + 9.2 * rank, 27, f"rank {rank}", weight="bold")
    write(axes, 3, 31, "a micro-batch goes around twice", ha="left", colour=QUIET)
    write(axes, 48, 6, "zero bubble: backward in two halves", ha="left", weight="bold")
    box(axes, 60, 9.5, 15, 4.6, "dL/dy arrives", hatch=HATCH)
    box(axes, 48, 19, 18, 5.5, "I: dL/dx = dL/dy · W", face=face(1, "I"), edge=rank_colour(1))
    box(axes, 70, 19, 18, 5.5, "W: dL/dW = dL/dyᵀ · x", face=face(1, "W"), edge=rank_colour(1))
    arrow(axes, (64, 14.2), (58, 18.8))
    arrow(axes, (71, 14.2), (78, 18.8))
    write(axes, 57, 27, "the stage before waits for it")
    write(axes, 79, 27, "nobody waits: do it later")
    write(axes, 48, 31, "each takes as long as a forward", ha="left", colour=QUIET)
    return figure


FIGURES = {
    "08_cut": cut,
    "08_micro_batches": micro_batches,
    "08_swap": swap,
    "08_1f1b": one_f_one_b,
    "08_1f1b_moving": one_f_one_b_moving,
    "08_two_ideas": two_ideas,
}
