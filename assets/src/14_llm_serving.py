"""Figures of lesson 14: three knobs, the cache, the roofline, two ranks, draft tokens, batches."""

import math

from draw import arrow, cell
from manyhands.plots.looks import (
    ALTERNATIVES,
    EDGE,
    FAINT,
    GREY,
    GROUND,
    HATCH,
    INK,
    LIMIT,
    PAPER,
    QUIET,
    box,
    card,
    rank_box,
    rank_colour,
    tint,
    write,
)

# no rank has a part here: the large model in one shade, the small one in another
MINE, OTHER = ALTERNATIVES[3]["color"], ALTERNATIVES[1]["color"]


def _bars(axes, x, values, labels, y=36.0, scale=40.0, gone=()):
    """Bars of probabilities that stand on y; those in `gone` are outlines."""
    for i, value in enumerate(values):
        left, height = x + 4.6 * i, scale * value
        kept = i not in gone
        box(
            axes, left, y - height, 4, height, face=GREY if kept else PAPER, edge=INK if kept else EDGE, dotted=not kept
        )
        if kept:
            write(axes, left + 2, y - height - 1.4, labels[i])
        write(axes, left + 2, y + 1.6, "abcd"[i], colour=QUIET)


def sampling():
    figure, axes = card(96, 44, "three knobs for one die")
    p, sharp = (0.4, 0.3, 0.2, 0.1), [x**2 / 0.3 for x in (0.4, 0.3, 0.2, 0.1)]
    cut = (4 / 7, 3 / 7, 0.2, 0.1)
    titles = ("as the model has it", "temperature 0.5", "top-k 2", "top-p 0.6")
    rows = ((p, ()), (sharp, ()), (cut, (2, 3)), (cut, (2, 3)))
    for i, (title, (values, gone)) in enumerate(zip(titles, rows, strict=True)):
        x = 3 + 23.6 * i
        write(axes, x + 9, 8, title, weight="bold")
        _bars(axes, x, values, [f"{value:.2f}" for value in values], gone=gone)
    write(axes, 59, 41.4, "the two likeliest", colour=QUIET)
    write(axes, 83, 41.4, "0.4, then 0.7: b crosses 0.6", colour=QUIET)
    return figure


def cache():
    figure, axes = card(92, 40, "six tokens: what is computed for each")
    for title, x0, cached in (("without a cache", 6, False), ("with a cache", 52, True)):
        write(axes, x0, 6.6, title, ha="left", weight="bold")
        for step in range(6):
            y = 10 + 4 * step
            write(axes, x0 - 2.6, y + 1.6, str(step + 1), colour=QUIET)
            for position in range(step + 1):
                fresh = position == step or not cached
                face = tint(MINE, 0.25) if fresh else GROUND
                box(axes, x0 + 5 * position, y, 4.4, 3.2, face=face, edge=INK if fresh else EDGE, dotted=not fresh)
    write(axes, 6, 36.6, "1 + 2 + ... + 6 = 21 positions", ha="left")
    write(axes, 52, 36.6, "6 positions; dotted: stored keys and values", ha="left")
    return figure


def roofline():
    figure, axes = card(92, 50, "what one call can reach (Llama 3 8B in bf16 on an H100)")
    left, bottom, width, height = 12, 41, 72, 32
    lowest, highest = math.log10(0.5), math.log10(4000)

    def at(intensity, tflops):
        x = left + width * (math.log10(intensity) - lowest) / (highest - lowest)
        y = bottom - height * (math.log10(tflops) - 0.2) / (3.2 - 0.2)
        return x, y

    for tflops in (10, 100, 1000):
        _, y = at(1, tflops)
        axes.plot([left, left + width], [y, y], color=FAINT, lw=1, zorder=0.5)
        write(axes, left - 1, y, f"{tflops:,}", ha="right", colour=QUIET)
    for intensity in (1, 10, 100, 1000):
        x, _ = at(intensity, 10)
        write(axes, x, bottom + 2, f"{intensity:,}", colour=QUIET)
    corner = at(295, 989)
    start, end = at(0.6, 0.6 * 3.35), at(4000, 989)
    axes.plot([start[0], corner[0], end[0]], [start[1], corner[1], end[1]], **LIMIT, zorder=2)
    write(axes, left, 6, "TFLOP/s", ha="left", colour=QUIET)
    write(axes, left + width, bottom + 5.4, "FLOPs per byte read, of weights and caches", ha="right", colour=QUIET)
    for intensity, text, dx, dy in (
        (1, "decode, 1 user", 2, 2.6),
        (24, "decode, 119 users with 4,096 positions", 2, 2.6),
        (295, "corner at 295", -2, -2.4),
        (2048, "prefill of 2,048", 0, 3.2),
    ):
        x, y = at(intensity, min(intensity * 3.35, 989))
        axes.plot([x], [y], marker="o", ms=6, color=INK, zorder=4)
        write(axes, x + dx, y + dy, text, ha="left" if dx > 0 else "right" if dx else "center")
    write(
        axes,
        *(value + shift for value, shift in zip(at(4, 13.4), (-2, -5), strict=True)),
        "waits for memory",
        colour=QUIET,
    )
    write(axes, at(1000, 989)[0], at(1000, 989)[1] - 2.4, "waits for arithmetic", colour=QUIET)
    return figure


def two_ranks():
    figure, axes = card(106, 54, "a prompt of 8,192 tokens arrives while 32 users read their answers")
    left, slot = 20, 4.0  # a slot is a decode step of 10 ms

    def steps(y, first, last, face, new=()):
        for i in range(first, last):
            box(axes, left + slot * i, y, slot - 0.5, 4, face=tint(face, 0.7 if i in new else 0.25))

    write(axes, 2, 10, "in one call", ha="left", weight="bold")
    steps(8, 0, 2, GREY)
    box(axes, left + 2 * slot, 8, 13.4 * slot - 0.5, 4, "prefill: nobody else gets a token", face=GREY)
    for i in range(4):
        box(axes, left + slot * (15.4 + i), 8, slot - 0.5, 4, face=tint(GREY, 0.25))
    write(axes, 2, 21, "in 16 chunks", ha="left", weight="bold")
    steps(19, 0, 2, GREY)
    for i in range(2, 18):
        box(axes, left + slot * i, 19, slot - 0.5, 4, face=tint(GREY, 0.25))
        box(axes, left + slot * i, 19, slot - 0.5, 2.4, face=GREY)
    steps(19, 18, 20, GREY)
    write(axes, left + 2 * slot, 26, "each step computes 512 positions of the prompt, too", ha="left", colour=QUIET)
    write(axes, 2, 33, "on two ranks", ha="left", weight="bold")
    for rank, y in ((0, 31), (1, 39)):
        rank_box(axes, rank, left - 9.4, y + (6 if rank == 0 else 6), width=8, height=4)
    own = rank_colour(0)
    box(axes, left + 2 * slot, 37, 13.3 * slot - 0.5, 4, "prefill", face=tint(own, 0.3), edge=own)
    box(axes, left + 15.3 * slot, 37, 2.1 * slot - 0.5, 4, face=PAPER, edge=own, hatch=HATCH)
    arrow(axes, (left + 17.4 * slot, 41.4), (left + 18 * slot, 44.8))
    write(axes, left + 17.6 * slot, 39, "the cache, 1.07 GB", ha="left", colour=QUIET)
    for i in range(20):
        mine = rank_colour(1)
        box(axes, left + slot * i, 45, slot - 0.5, 4, face=tint(mine, 0.5 if i >= 18 else 0.25), edge=mine)
    write(axes, left, 51.6, "time →   small boxes: decode steps of 10 ms", ha="left", colour=QUIET)
    return figure


def draft_tokens():
    figure, axes = card(92, 42, "four draft tokens, one call of the large model")
    write(axes, 2, 9, "small model", ha="left", weight="bold")
    write(axes, 2, 20, "large model", ha="left", weight="bold")
    write(axes, 2, 33, "written", ha="left", weight="bold")
    text, drafted, written = "TH", "E KI", "E C"
    for i, letter in enumerate(text):
        cell(axes, 20 + 8 * i, 7, letter, width=6, height=4, size=12)
    for i, letter in enumerate(drafted):
        x = 36 + 8 * i
        box(axes, x, 7, 6, 4, {" ": "␣"}.get(letter, letter), face=tint(OTHER, 0.3), edge=OTHER, size=12)
        verdict, gone = (("keep", False), ("keep", False), ("refuse", False), ("not looked at", True))[i]
        arrow(axes, (x + 3, 11.4), (x + 3, 16.4), colour=EDGE if gone else INK)
        write(axes, x + 3, 25.4, verdict if i != 3 else "", colour=QUIET)
    box(axes, 34, 17, 42, 6, "p at five places, in one call", face=tint(MINE, 0.3), edge=MINE)
    write(axes, 69, 25.4, "thrown away", colour=QUIET)
    for i, letter in enumerate(text):
        cell(axes, 20 + 8 * i, 31, letter, width=6, height=4, size=12)
    for i, letter in enumerate(written):
        colour = MINE if i == 2 else OTHER
        box(axes, 36 + 8 * i, 31, 6, 4, {" ": "␣"}.get(letter, letter), face=tint(colour, 0.3), edge=colour, size=12)
    write(axes, 55, 37.6, "drawn from max(0, p - q)", colour=QUIET)
    write(axes, 62, 33, "three tokens for one call", ha="left")
    return figure


def batching():
    figure, axes = card(96, 46, "texts of 8, 2, 2, 2, 8, 2, 2, 2 tokens on four places")
    lengths = (8, 2, 2, 2, 8, 2, 2, 2)
    static = [(i % 4, 8 * (i // 4), length, i) for i, length in enumerate(lengths)]
    flowing = [
        (0, 0, 8, 0),
        (1, 0, 2, 1),
        (2, 0, 2, 2),
        (3, 0, 2, 3),
        (1, 2, 8, 4),
        (2, 2, 2, 5),
        (3, 2, 2, 6),
        (2, 4, 2, 7),
    ]
    for title, y0, rows, steps in (("static", 7, static, 16), ("continuous", 26, flowing, 10)):
        write(axes, 2, y0 - 1, title, ha="left", weight="bold")
        box(axes, 6, y0 + 1, 4.8 * steps, 14, face=GROUND, edge=EDGE, dotted=True)
        for place, start, length, number in rows:
            face = tint(MINE, 0.25) if length == 8 else GREY
            box(axes, 6 + 4.8 * start, y0 + 1.2 + 3.4 * place, 4.8 * length, 3, str(number + 1), face=face)
        write(axes, 7 + 4.8 * steps, y0 + 8, f"{steps} steps", ha="left")
    write(axes, 6, 43.6, "time →   empty: a place that does nothing", ha="left", colour=QUIET)
    return figure


FIGURES = {
    "14_sampling": sampling,
    "14_cache": cache,
    "14_roofline": roofline,
    "14_two_ranks": two_ranks,
    "14_draft_tokens": draft_tokens,
    "14_batching": batching,
}
