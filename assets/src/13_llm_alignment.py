"""Figures of lesson 13: a conversation and its mask, a group of answers, ranks that draw and ranks that train, DPO."""

from draw import arrow
from manyhands.plots.looks import GREY, GROUND, INK, PAPER, QUIET, box, card, rank_box, rank_colour, tint, write

TALK = ["<|user|>", *"sort jbcg", "<|end|>", "<|assistant|>", *"bcgj", "<|end|>"]


def template():
    figure, axes = card(92, 24, "a conversation is one sequence")
    x = 2.0
    for i, token in enumerate(TALK):
        marker = len(token) > 1
        width = 2.9 if not marker else 1.2 + 0.9 * len(token)
        box(axes, x, 6, width, 4, {" ": "␣"}.get(token, token), face=GREY if marker else PAPER)
        if i:
            box(axes, x, 15, width, 3.4, "?", face=PAPER, edge=QUIET)
        x += width + 0.3
    write(axes, 2, 12.8, "does the prediction of this token count?", ha="left", colour=QUIET)
    write(axes, 2, 21.4, "A grey box is a marker: one token, which no text contains.", ha="left", colour=QUIET)
    return figure


def dpo():
    figure, axes = card(92, 38, "a pair of answers: by how much more than the reference?")
    scale = lambda nats: 12 + (nats + 6) * 15  # noqa: E731
    for y, name, chosen, rejected in ((11, "reference", -4, -4), (22, "policy", -3, -5)):
        axes.plot([scale(-5.6), scale(-2.4)], [y + 1.6, y + 1.6], color=QUIET, lw=1.2, zorder=1)
        write(axes, 3, y + 1.6, name, ha="left", weight="bold")
        for nats, text, up in ((chosen, "chosen", True), (rejected, "rejected", False)):
            at = y - 1.6 if up else y + 4.8
            look = {"marker": "o", "ms": 14, "mfc": PAPER} if up else {"marker": "s", "ms": 7}
            axes.plot([scale(nats)], [y + 1.6], color=INK, zorder=3, **look)
            write(axes, scale(nats), at, text)
    for nats in range(-5, -2):
        axes.plot([scale(nats)] * 2, [30.2, 31], color=QUIET, lw=1.2)
        write(axes, scale(nats), 32.4, f"{nats}".replace("-", "−"))
    write(axes, scale(-2.2), 32.4, "log p of the answer", ha="left", colour=QUIET)
    arrow(axes, (scale(-5) + 1.5, 23.6), (scale(-3) - 1.8, 23.6), "2", style="<|-|>")
    write(axes, 75, 12.6, "difference 0", ha="left")
    write(axes, 75, 23.6, "difference 2", ha="left")
    return figure


def grpo():
    figure, axes = card(92, 37, "one question, eight answers, drawn by two ranks")
    rewards = (1, 0, 0, 1, 0, 0, 1, 0)
    top, bottom = 13, 27
    mean = bottom - (bottom - top) * sum(rewards) / len(rewards)
    for i, rank in enumerate((2, 3)):
        rank_box(axes, rank, 4 + 38 * i, 5.2, width=36, height=29, label="")
        write(axes, 22 + 38 * i, 8, f"rank {rank}", weight="bold", size=11)
    axes.plot([5.5, 77], [mean, mean], color=INK, lw=1.6, ls="--", zorder=3)
    write(axes, 79.5, mean, "mean of the\ngroup, 3/8", ha="left")
    for i, reward in enumerate(rewards):
        x, y = 8.5 + 9.4 * i - (0.6 if i > 3 else 0), top if reward else bottom
        colour = rank_colour(2 + i // 4)
        axes.plot([x], [y], marker="o" if reward else "s", ms=9, color=colour, mec=INK, zorder=4)
        arrow(axes, (x, mean - 0.4 if reward else mean + 0.4), (x, y + 1.4 if reward else y - 1.4))
        write(axes, x, 31.4, f"{reward}")
    write(axes, 79.5, top, "likelier", ha="left")
    write(axes, 79.5, bottom, "less likely", ha="left")
    write(axes, 79.5, 31.4, "reward", ha="left")
    return figure


def halves():
    figure, axes = card(92, 33, "two ranks train, two ranks draw")
    for rank, x, y, what in (
        (0, 4, 6, "learns"),
        (1, 4, 19, "learns"),
        (2, 66, 6, "draws and judges"),
        (3, 66, 19, "draws and judges"),
    ):
        rank_box(axes, rank, x, y, width=22, height=10, label="")
        write(axes, x + 11, y + 3.4, f"rank {rank}", weight="bold", size=11)
        write(axes, x + 11, y + 7, what)
    arrow(axes, (26.6, 8.5), (65.4, 8.5))
    arrow(axes, (26.6, 10), (65.4, 21))
    write(axes, 46, 6.8, "weights: 4 P bytes to each, in every step")
    arrow(axes, (65.4, 26), (26.6, 26))
    arrow(axes, (65.4, 14), (26.6, 14))
    write(axes, 46, 28.2, "answers, their log p, rewards")
    arrow(axes, (15, 16.4), (15, 18.6), style="<|-|>")
    write(axes, 17, 17.5, "gradients", ha="left")
    write(axes, 46, 31, "drawing is one token after another; learning is one forward and one backward", colour=QUIET)
    return figure


def sharded_reference():
    figure, axes = card(92, 34, "the reference rests in shares, and is whole block by block")
    for rank in range(4):
        x = 4 + 21.5 * rank
        rank_box(axes, rank, x, 5.5, width=19.5, height=24.5, label="")
        write(axes, x + 9.75, 8.2, f"rank {rank}", weight="bold", size=11)
        box(axes, x + 2, 10.5, 15.5, 6.6, "policy, gradients,\nAdam: 16 bytes", face=tint(rank_colour(rank), 0.4))
        box(axes, x + 2, 18.6, 15.5, 3.4, "reference: 1 byte", face=tint(rank_colour(rank), 0.2))
        box(axes, x + 2, 23.4, 15.5, 3.4, "one block, whole", face=GROUND, dotted=True)
    write(axes, 46, 32, "bytes per parameter, not to scale; the dotted block is there while it computes", colour=QUIET)
    return figure


def lora():
    figure, axes = card(92, 33, "an adapter: a thin product beside a frozen matrix")
    write(axes, 7, 17, "x", size=12, weight="bold")
    box(axes, 22, 6.5, 26, 9, "W: o × i, frozen", face=GREY, size=11)
    box(axes, 22, 20.5, 26, 3, "A: r × i", size=11)
    box(axes, 55, 18, 3.4, 9, "")
    write(axes, 56.7, 29.2, "B: o × r, zero at the start", size=11)
    arrow(axes, (9, 16), (21.5, 11))
    arrow(axes, (9, 18), (21.5, 22))
    arrow(axes, (48.5, 22), (54.5, 22))
    arrow(axes, (48.5, 11), (75, 15.6))
    arrow(axes, (58.9, 22), (75, 18), "× alpha / r")
    write(axes, 77, 16.9, "+", size=14, weight="bold")
    arrow(axes, (79, 16.9), (85, 16.9))
    write(axes, 87, 16.9, "y", size=12, weight="bold")
    return figure


def hacked():
    figure, axes = card(92, 27, "sort jbcg: what two rewards say of three answers")
    columns = (("answer", 6), ("letters that ascend", 30), ("the verifier", 62))
    for title, x in columns:
        write(axes, x, 7, title, ha="left", weight="bold")
    for y, text, ascend, right in (
        (12, "bcgj", "3 of 3", "right"),
        (16.5, "bgcj", "2 of 3", "wrong"),
        (21, "adgk", "3 of 3", "wrong"),
    ):
        write(axes, 6, y, text, ha="left", family="monospace", size=11)
        write(axes, 30, y, ascend, ha="left")
        write(axes, 62, y, right, ha="left")
    axes.plot([4, 88], [9.2, 9.2], color=QUIET, lw=1.2)
    write(axes, 6, 25, "adgk is sorted, and has nothing to do with the question", ha="left", colour=QUIET)
    return figure


FIGURES = {
    "13_template": template,
    "13_dpo": dpo,
    "13_grpo": grpo,
    "13_halves": halves,
    "13_reference": sharded_reference,
    "13_lora": lora,
    "13_hacked": hacked,
}
