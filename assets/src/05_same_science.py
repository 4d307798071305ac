"""Figures of lesson 05: means, batches, decks and dice, an order that goes on, long steps, noise, scaling, reading."""

from draw import arrow, cell
from manyhands.plots.looks import (
    EDGE,
    FAINT,
    GREY,
    HATCH,
    INK,
    QUIET,
    READING,
    box,
    card,
    rank_box,
    rank_colour,
    tint,
    write,
)


def token_mean():
    figure, axes = card(92, 25, "four losses on two ranks: which mean?")
    for rank, y, losses, mean in ((0, 6, (1, 2, 3), 2), (1, 15, (6,), 6)):
        rank_box(axes, rank, 2, y, width=9, height=5)
        for i, loss in enumerate(losses):
            cell(axes, 13 + 5 * i, y + 0.5, loss, rank, width=4.4, height=4, size=12)
        arrow(axes, (29, y + 2.5), (35, y + 2.5), colour=rank_colour(rank))
        box(axes, 35.5, y, 14, 5, f"mean {mean}", edge=EDGE, dotted=True)
        box(axes, 35.5, y + 5.2, 14, 2.8, f"sum {sum(losses)}, count {len(losses)}", size=10)
    write(axes, 70, 8.5, "mean of means: (2 + 6) / 2 = 4", colour=QUIET)
    write(axes, 70, 12.2, "sums and counts:", weight="bold")
    write(axes, 70, 15.4, "(6 + 6) / (3 + 1) = 3", size=13, weight="bold")
    write(axes, 70, 19.5, "divide once, at the end", colour=QUIET, size=10)
    return figure


def global_batch():
    figure, axes = card(92, 26, "global batch = micro-batch × ranks × accumulation")
    for i in range(3):
        write(axes, 24.5 + 19 * i, 5.7, f"micro-batch {i}", size=10, colour=QUIET)
    for rank, y in ((0, 7.5), (1, 14.5)):
        rank_box(axes, rank, 2, y, width=9, height=5)
        for i in range(3):
            for row in range(2):
                cell(axes, 16 + 19 * i + 8.6 * row, y, "sequence", rank, width=8.2, height=5, size=10)
    box(axes, 74.5, 7.5, 7, 12, "all-\nreduce", hatch=HATCH, size=10)
    arrow(axes, (82, 13.5), (84.5, 13.5))
    write(axes, 88, 13.5, "one\nupdate")
    write(axes, 44, 23, "2 sequences × 2 ranks × 3 micro-batches = 12 sequences", weight="bold")
    return figure


def two_splits():
    figure, axes = card(92, 36, "partition: deal one deck; draw: everybody throws dice")
    deck = (7, 2, 10, 5, 0, 8, 3, 11, 6, 1, 9, 4)
    write(axes, 22, 6.2, "the same order on every rank: equal seeds", colour=QUIET, size=10)
    for i, card_number in enumerate(deck):
        cell(axes, 3 + 3.2 * i, 8, card_number, i % 4, width=2.9, height=3.4, size=10)
    for rank in range(4):
        x = 3 + 9.7 * rank
        arrow(axes, (x + 4, 12.4), (x + 4, 16.5), colour=rank_colour(rank))
        rank_box(axes, rank, x, 17, width=8.4, height=3.4)
        for k in range(3):
            cell(axes, x + 2.9 * k - 0.1, 21.4, deck[rank + 4 * k], rank, width=2.7, height=3.4, size=10)
    write(axes, 22, 28, "each sequence once per epoch", weight="bold")
    write(axes, 22, 31, "a new order needs the epoch in the seed", colour=QUIET, size=10)
    axes.plot([45.5, 45.5], [6, 33], color=FAINT, lw=1)
    drawn = ((4, 9, 4), (11, 0, 7), (2, 9, 5), (8, 1, 0))
    write(axes, 68, 6.2, "the whole deck, for everyone", colour=QUIET, size=10)
    for i in range(12):
        cell(axes, 49 + 3.2 * i, 8, i, width=2.9, height=3.4, size=10)
    for rank in range(4):
        x = 49 + 9.7 * rank
        arrow(axes, (x + 4, 12.4), (x + 4, 16.5), colour=rank_colour(rank))
        rank_box(axes, rank, x, 17, width=8.4, height=3.4)
        for k in range(3):
            cell(axes, x + 2.9 * k - 0.1, 21.4, drawn[rank][k], rank, width=2.7, height=3.4, size=10)
    write(axes, 68, 28, "some twice, some not at all", weight="bold")
    write(axes, 68, 31, "streams must differ: a seed per rank", colour=QUIET, size=10)
    return figure


def resume():
    figure, axes = card(92, 22, "one order, dealt like cards: what was read is its beginning")
    deck = (7, 2, 10, 5, 0, 8, 3, 11, 6, 1, 9, 4)
    for i, number in enumerate(deck):
        rank = i % 3 if i < 6 else i % 2
        cell(axes, 6 + 6.6 * i + (2 if i >= 6 else 0), 8, number, rank, width=6, height=4.4, size=11)
        write(axes, 9 + 6.6 * i + (2 if i >= 6 else 0), 14, f"rank {rank}", size=10)
    axes.plot([46.3, 46.3], [6, 18], color=INK, lw=2.5)
    write(axes, 25, 18, "three ranks, two steps", weight="bold")
    write(axes, 66, 18, "two ranks read the rest", weight="bold")
    write(axes, 46.3, 19.8, "stop: epoch 2, position 6", size=10, colour=QUIET)
    return figure


def one_long_step():
    import numpy as np

    figure, axes = card(92, 34, "eight short steps, or one that is eight times as long")

    titles = ("where the gradient hardly changes", "where it changes on the way")
    for left, title, bend in ((4, titles[0], 0.0), (50, titles[1], 1.0)):
        box(axes, left, 8, 38, 23)
        write(axes, left + 19, 6.2, title, weight="bold")
        x, y, path = left + 3.0, 11.5, [(left + 3.0, 11.5)]
        angle = 0.45
        for step in range(8):
            noise = 0.28 * (-1) ** step
            turn = angle * (1 - bend * step / 4)
            x, y = x + 3.6 * np.cos(turn), y + 3.6 * np.sin(turn) + noise
            path.append((x, y))
        axes.plot(*zip(*path, strict=True), "o-", color=EDGE, lw=1.5, ms=4, zorder=3)
        end = (left + 3 + 8 * 3.6 * np.cos(angle), 11.5 + 8 * 3.6 * np.sin(angle))
        arrow(axes, path[0], end)
        write(axes, left + 27, 28.6, "one step, 8 × the rate", size=10)
        write(axes, left + 26, 9.5 if bend else 15.5, "8 small steps", size=10, colour=QUIET)
    write(axes, 46, 32.6, "early in training the right picture holds: hence the warm-up", size=10, colour=QUIET)
    return figure


def noise():
    import numpy as np

    figure, axes = card(92, 30, "a larger batch: less noise, the same mean")
    angles = 0.3 + np.arange(9) * 2 * np.pi / 9
    draw = np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.array([1.0, 0.6, 1.4] * 3)[:, None]
    for left, size in ((3, 1), (33, 4), (63, 16)):
        box(axes, left, 8, 26, 18)
        write(axes, left + 13, 6.2, f"batches of {size}", weight="bold")
        for dx, dy in draw * 4 / np.sqrt(size):
            arrow(axes, (left + 4, 17), (left + 17 + dx, 17 + 0.8 * dy), colour=EDGE, style="->")
        arrow(axes, (left + 4, 17), (left + 17, 17))
    write(axes, 46, 28.2, "grey: gradients of single batches; black: the gradient of everything", size=10, colour=QUIET)
    return figure


def scaling():
    figure, axes = card(92, 34, "strong scaling shares the work, weak scaling adds work")
    for left, title, law in (
        (3, "strong: the same batch", "Amdahl: at most 1 / s"),
        (49, "weak: the same per rank", "Gustafson: (1 − s) n + s"),
    ):
        write(axes, left + 20, 6.2, title, weight="bold")
        top = 8.5
        for n in (1, 2, 4):
            write(axes, left + 2, top + n * 0.9 + 0.3, f"n = {n}", size=10)
            box(axes, left + 5.5, top, 4, 1.8 * n + 0.8, "", face=GREY)
            work = 26 / n if left == 3 else 26
            for rank in range(n):
                fill = tint(rank_colour(rank), 0.4)
                box(axes, left + 9.5, top + rank * (1.8 + 0.8 / n), work, 1.8 + 0.8 / n, "", face=fill)
            top += 1.8 * n + 2.6
        write(axes, left + 7.5, 30.3, "s", size=11)
        write(axes, left + 24, 30.3, law, weight="bold")
    write(axes, 46, 32.5, "grey: what no rank can share; time runs to the right", size=10, colour=QUIET)
    return figure


def reading():
    figure, axes = card(92, 32, "four ways from a file to four ranks")
    titles = ("memory map", "a file per rank", "MPI-IO, together", "one reader scatters")
    for i, title in enumerate(titles):
        left = 3 + 22.5 * i
        write(axes, left + 9.5, 6.2, title, weight="bold")
        for rank in range(4):
            x = left + 5 * rank
            rank_box(axes, rank, x, 24, width=4.6, height=4, label=str(rank))
            if i == 1:
                cell(axes, x, 9, "", rank, width=4.4, height=4)
            else:
                cell(axes, left + 4.7 * rank + 0.4, 9, "", rank, width=4.7, height=4)
            here = x + 2.3
            if i < 2:
                arrow(axes, (here, 13.4), (here, 23.6), colour=rank_colour(rank))
            elif i == 2:
                arrow(axes, (here, 13.4), (here, 16.3), colour=rank_colour(rank))
                arrow(axes, (here, 19.8), (here, 23.6), colour=rank_colour(rank))
            elif rank:
                arrow(axes, (left + 2.3, 23.6), (here, 23.6), colour=rank_colour(rank), bend=-0.6)
            else:
                arrow(axes, (here, 13.4), (here, 23.6), colour=rank_colour(0))
        if i == 2:
            box(axes, left, 16.5, 19.6, 3.2, "large pieces", hatch=HATCH, size=10)
    write(axes, 46, 30.2, "above: the file or files; below: the ranks", size=10, colour=QUIET)
    return figure


def prefetch():
    figure, axes = card(92, 24, "read the next batch while this one is computed")
    for y, name, ahead in ((6.5, "one after\nthe other", False), (14.5, "with\nprefetch", True)):
        write(axes, 2, y + 3, name, ha="left", weight="bold")
        x = 17
        for step in range(4):
            if ahead:
                box(
                    axes,
                    17 + (12 * (step - 1) + 8 if step else 0),
                    y + 3.4,
                    8,
                    3.2,
                    f"read {step}",
                    hatch=READING,
                    size=10,
                )
                box(axes, 25 + 12 * step, y, 12, 3.2, f"compute {step}", face=GREY, size=10)
            elif step < 4:
                box(axes, x, y + 3.4, 8, 3.2, f"read {step}", hatch=READING, size=10)
                box(
                    axes,
                    x + 8,
                    y,
                    12 if step < 3 else 6,
                    3.2,
                    f"compute {step}" if step < 3 else "...",
                    face=GREY,
                    size=10,
                )
                x += 20
    return figure


FIGURES = {
    "05_token_mean": token_mean,
    "05_global_batch": global_batch,
    "05_two_splits": two_splits,
    "05_resume": resume,
    "05_one_long_step": one_long_step,
    "05_noise": noise,
    "05_scaling": scaling,
    "05_reading": reading,
    "05_prefetch": prefetch,
}
