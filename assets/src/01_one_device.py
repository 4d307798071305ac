"""Figures of lesson 01: two reasons to distribute, a GPT, bytes of a parameter, a roofline, what is kept, floats."""

from draw import arrow, cell
from manyhands.plots.looks import BYTES, EDGE, FAINT, FIELDS, GREY, INK, PAPER, QUIET, box, card, rank_box, tint, write

# kinds of bytes have the looks of a memory timeline: they differ by hatching as well as by colour
WEIGHTS, GRADIENTS, MASTER, MOMENTS, CAST = (
    BYTES["parameters"],
    BYTES["gradients"],
    BYTES["copies"],
    BYTES["optimizer"],
    BYTES["other"],
)
KEPT = BYTES["activations"]
SIGN, EXPONENT, FRACTION = FIELDS


def two_reasons():
    figure, axes = card(92, 34, "one device is not enough, for one of two reasons")
    write(axes, 23, 6.6, "too much data: replicas of the model", weight="bold")
    write(axes, 69, 6.6, "too large a model: parts of it", weight="bold")
    axes.plot([46, 46], [5.5, 31.5], color=FAINT, lw=1.2, zorder=1)
    for rank in range(3):
        x = 4 + 13.5 * rank
        for row in range(2):
            cell(axes, x, 9.5 + 3 * row, "text", rank, width=11, height=3, size=10)
        arrow(axes, (x + 5.5, 16), (x + 5.5, 18.4))
        rank_box(axes, rank, x, 18.5, width=11, height=9, label=f"rank {rank}\nall of it")
    write(axes, 23, 30, "each reads its share: speed", colour=QUIET)
    for row in range(2):
        cell(axes, 52, 9.5 + 3 * row, "text", None, width=34, height=3, size=10)
    arrow(axes, (69, 16), (69, 18.4))
    for rank in range(3):
        x = 50.5 + 12.4 * rank
        rank_box(axes, rank, x, 18.5, width=12.2, height=9, label=f"rank {rank}\na third of it")
    write(axes, 69, 30, "each holds its share: memory", colour=QUIET)
    return figure


def gpt():
    figure, axes = card(92, 74, "a GPT, from the bottom to the top, and the shapes of its weights")
    left, width = 8, 42
    write(axes, 61, 6.4, "weights", ha="left", weight="bold")

    def row(y, name, weights, face=PAPER, height=3.6, indent=0):
        box(axes, left + indent, y, width - 2 * indent, height, name, face=face)
        write(axes, 61, y + height / 2, weights, ha="left", size=11)

    row(8.5, "head", "D → V, bias", GREY)
    row(13.5, "last LayerNorm", "scale, shift")
    box(axes, left - 2.5, 18.5, width + 5, 41.3, dotted=True)
    write(axes, left - 4.3, 39, "N layers", rotation=90, size=10, weight="bold")
    for y, name, weights in (
        (22, "MLP down", "4D → D, bias"),
        (25.8, "GELU", "none"),
        (29.6, "MLP up", "D → 4D, bias"),
        (33.4, "LayerNorm", "scale, shift"),
        (42, "attention out", "D → D, bias"),
        (45.8, "attention: H·T scores per token", "none"),
        (49.6, "query, key, value", "D → 3D, no bias"),
        (53.4, "LayerNorm", "scale, shift"),
    ):
        face = GREY if "→" in weights else PAPER  # grey: a matrix
        row(y, name, weights, face, height=3.2, indent=2)
    middle = left + width / 2
    for fork, joint in ((38.1, 20.4), (58.1, 40.4)):  # each half of a layer adds its result to its input
        axes.plot([middle, middle], [fork + 1, fork - 1.4], color=INK, lw=1.6, zorder=2)
        axes.plot([middle, 7.6, 7.6], [fork, fork, joint], color=INK, lw=1.6, zorder=2)
        arrow(axes, (7.6, joint), (middle - 1, joint))
        write(axes, middle, joint, "+", size=15, weight="bold")
    row(62.2, "positions", "a vector for each of T", GREY)
    row(66.5, "tokens", "a vector for each of V", GREY)
    arrow(axes, (left + width + 5.4, 69.7), (left + width + 5.4, 9), colour=QUIET)
    write(axes, middle, 71.7, "ids [B, T]", size=10, colour=QUIET)
    return figure


def bytes_per_parameter():
    figure, axes = card(92, 31.5, "bytes for one parameter: a box is a byte")
    recipes = [
        ("fp32", ((4, WEIGHTS), (4, GRADIENTS), (8, MOMENTS)), "16"),
        ("bf16, all of it", ((2, WEIGHTS), (2, GRADIENTS), (4, MOMENTS)), "8"),
        ("bf16 + fp32 master", ((2, WEIGHTS), (2, GRADIENTS), (4, MASTER), (8, MOMENTS)), "16"),
        ("fp32 + autocast", ((4, WEIGHTS), (4, GRADIENTS), (8, MOMENTS), (2, CAST)), "18, later 16"),
    ]
    for i, (name, parts, total) in enumerate(recipes):
        x, y = 22, 6 + 4.8 * i
        write(axes, 2, y + 1.8, name, ha="left", weight="bold")
        for count, (face, hatch) in parts:
            for _ in range(count):
                cell_face(axes, x, y, face, hatch)
                x += 3
            x += 0.5
        write(axes, x + 1, y + 1.8, total, ha="left", size=11)
    names = (("weights", WEIGHTS), ("gradients", GRADIENTS), ("master weights", MASTER), ("Adam's moments", MOMENTS))
    for i, (name, (face, hatch)) in enumerate((*names, ("cast for a while", CAST))):
        cell_face(axes, 3 + 18 * i, 26.5, face, hatch)
        write(axes, 6.8 + 18 * i, 28.1, name, ha="left", size=10)
    return figure


def cell_face(axes, x, y, face, hatch):
    """One byte."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), 3, 3.4, fc=face, ec=INK, lw=0.9, hatch=hatch, zorder=2))


def roofline():
    from math import log10

    figure, axes = card(92, 38, "a roofline: what an H100 can do in bf16, by the FLOPs per byte that it moves")
    peak, memory = 989, 3.35  # TFLOP/s, TB/s

    def place(per_byte, tflops):
        return 13 + 14 * (log10(per_byte) + 1), 31.5 - 6.4 * (log10(tflops) + 0.5)

    ridge = peak / memory
    roof = [place(0.1, 0.1 * memory), place(ridge, peak), place(10_000, peak)]
    axes.plot(*zip(*roof, strict=True), color=INK, lw=2.2, zorder=3)
    axes.plot([13, 13, 85], [8, 31.5, 31.5], color=INK, lw=1.2)
    for tflops in (1, 10, 100, 1000):
        write(axes, 12, place(1, tflops)[1], f"{tflops:,}", ha="right", colour=QUIET)
    for per_byte in (0.1, 1, 10, 100, 1000, 10_000):
        write(axes, place(per_byte, 1)[0], 33.2, f"{per_byte:,g}", colour=QUIET)
    write(axes, 49, 35.6, "FLOPs per byte: an addition, and products of two sizes", colour=QUIET)
    write(axes, 2, 6.6, "TFLOP/s", ha="left", colour=QUIET)
    x, y = place(ridge, peak)
    axes.plot([x, x], [y, 31.5], color=EDGE, lw=1.2, ls=(0, (4, 2)))
    write(axes, x + 1, 29.6, f"{ridge:.0f}", ha="left", colour=QUIET)
    for name, per_byte in (("an addition", 1 / 6), ("128 x 128", 128 / 3), ("4,096 x 4,096", 4096 / 3)):
        x, y = place(per_byte, min(peak, per_byte * memory))
        axes.plot(x, y, "o", color=INK, ms=7, zorder=4)
        write(axes, x + 4, y if y > 12 else 11, name, ha="left")
    return figure


def saved():
    figure, axes = card(92, 33, "what a layer puts aside for backward, in vectors of width D for each token")
    names = [
        ("norm", "input\noutput", 2), ("q, k, v", "q, k, v", 3), ("attention", "its\noutput", 1),
        ("norm", "input\noutput", 2), ("up", "before\nGELU", 4), ("GELU", "after\nGELU", 4),
    ]  # fmt: skip
    arrow(axes, (3, 7), (88, 7), "forward")
    arrow(axes, (88, 29.5), (3, 29.5), "backward takes them again", colour=QUIET)
    for i, (name, kept, count) in enumerate(names):
        x = 3 + 14.4 * i
        box(axes, x, 9.2, 12, 4.4, name, face=GREY)
        arrow(axes, (x + 6, 14), (x + 6, 16.6))
        for k in range(count):
            box(axes, x + 6 - 1.25 * count + 2.5 * k, 17, 2.2, 4.4, face=KEPT[0], hatch=KEPT[1])
        write(axes, x + 6, 24.8, f"{kept}: {count}", size=10)
    return figure


def recompute():
    from matplotlib.patches import Rectangle

    figure, axes = card(92, 37, "activations over one step of four blocks, to scale")
    block = 4.1  # the height of what a block keeps, 16 vectors; its input is one of them
    full = [1, 2, 3, 4]

    def bar(x, height, width):
        look = {"fc": KEPT[0], "ec": INK, "lw": 0.9, "hatch": KEPT[1]}
        axes.add_patch(Rectangle((x, 31 - height), width, height, **look))
        return x + width

    write(axes, 21.5, 6.4, "keep everything", weight="bold")
    x = 4
    for k in full + full[::-1]:
        x = bar(x, block * k, 4.4)
    write(axes, 68, 6.4, "keep the blocks' inputs", weight="bold")
    x = 48
    for k in full:
        x = bar(x, block / 16 * k, 4.4)
    for k in full[::-1]:
        inputs = block / 16 * k
        x = bar(x, inputs + block * 15 / 32, 2.6)  # half of its forward has run once more
        x = bar(x, inputs + block * 15 / 16, 3)
    axes.plot([4, 88], [31, 31], color=INK, lw=1.4)
    for start, end, name in (
        (4, 21.6, "forward"),
        (21.6, 39.2, "backward"),
        (48, 65.6, "forward"),
        (65.6, 88, "backward"),
    ):
        write(axes, (start + end) / 2, 33.4, name, size=10, colour=QUIET)
    write(axes, 76.8, 20, "a block comes back,\nis used, and goes", size=10)
    return figure


def floats():
    figure, axes = card(92, 32, "three ways to spend bits on a number")
    formats = [("fp32", 8, 23, "3.4e38"), ("bf16", 8, 7, "3.4e38"), ("fp16", 5, 10, "65,504")]
    for i, (name, exponent, fraction, largest) in enumerate(formats):
        x, y = 10, 7 + 6.4 * i
        write(axes, 2, y + 2, name, ha="left", weight="bold", size=12)
        for bits, face, hatch in (
            (1, tint(SIGN[1], 0.35), SIGN[2]),
            (exponent, tint(EXPONENT[1], 0.2), EXPONENT[2]),
            (fraction, tint(FRACTION[1], 0.35), FRACTION[2]),
        ):
            for _ in range(bits):
                box(axes, x, y, 1.75, 4, face=face, hatch=hatch)
                x += 1.75
        write(axes, 77, y + 2, f"to {largest}", ha="center", size=10)
        write(axes, 86, y + 2, f"{fraction + 1} digits", ha="center", size=10)
    write(axes, 77, 5, "range", size=10, colour=QUIET)
    write(axes, 86, 5, "binary", size=10, colour=QUIET)
    for x, name, face, hatch in (
        (10, "sign", tint(SIGN[1], 0.35), SIGN[2]), (24, "exponent: how large", tint(EXPONENT[1], 0.2), EXPONENT[2]),
        (48, "fraction: how exact", tint(FRACTION[1], 0.35), FRACTION[2]),
    ):  # fmt: skip
        box(axes, x, 26.5, 2.4, 3, face=face, hatch=hatch)
        write(axes, x + 3.4, 28, name, ha="left", size=10)
    return figure


FIGURES = {
    "01_two_reasons": two_reasons,
    "01_gpt": gpt,
    "01_bytes": bytes_per_parameter,
    "01_roofline": roofline,
    "01_saved": saved,
    "01_recompute": recompute,
    "01_floats": floats,
}
