"""Figures of lesson 12: the life of a model, its appetite for data, MinHash, merges, a packed sequence and its mask."""

from math import log10

from draw import arrow, cell
from manyhands.plots.looks import EDGE, FAINT, GREY, GROUND, INK, PAPER, PREDICTED, QUIET, box, card, rank_box, write

FAMILIES = (  # name, parameters in 1e9 (of experts: active ones), tokens in 1e12, where its name stands
    ("GPT-3", 175, 0.3, (0, -2.4)),
    ("Gopher", 280, 0.3, (0, -2.4)),
    ("Chinchilla", 70, 1.4, (1.6, 1.6)),
    ("LLaMA 65B", 65, 1.4, (-1.6, -2)),
    ("Llama 2 70B", 70, 2.0, (0, -2.6)),
    ("Llama 3 405B", 405, 15.6, (0, -2.6)),
    ("DeepSeek-V3", 37, 14.8, (1.6, 1.6)),
    ("Kimi K2", 32, 15.5, (-1.6, -1.4)),
    ("Qwen3 235B", 22, 36, (0, -2.6)),
)
EXPERTS = ("DeepSeek-V3", "Kimi K2", "Qwen3 235B")
DOCUMENTS = ((3, "A"), (4, "B"), (3, "C"))  # tokens of a packed sequence


def life():
    figure, axes = card(92, 25, "the life of a language model")
    stages = ("collect,\nclean", "pre-train", "fine-tune", "align", "deploy", "monitor,\nre-evaluate")
    for i, name in enumerate(stages):
        x = 2.5 + 14.8 * i
        box(axes, x, 7, 12, 7, name, face=GREY if i == 1 else PAPER, size=11, weight="bold" if i == 1 else "normal")
        if i:
            arrow(axes, (x - 2.6, 10.5), (x - 0.2, 10.5))
    write(axes, 23.3, 16, "the largest stage")
    axes.plot([82.5, 82.5, 8.5], [14.2, 20.4, 20.4], color=INK, lw=1.6, zorder=3)
    arrow(axes, (8.5, 20.4), (8.5, 14.4))
    write(axes, 52, 22.3, "what fails in use becomes data", colour=QUIET)
    write(axes, 23.3, 18.2, "this lesson: the first two", colour=QUIET)
    return figure


def appetite():
    figure, axes = card(92, 44, "parameters and tokens they were trained on")
    left, bottom, width, height = 14, 37, 70, 30

    def place(billions, trillions):
        return left + width * (log10(billions) - 1.2) / 1.6, bottom - height * (log10(trillions) + 0.8) / 2.6

    for billions in (20, 50, 100, 200, 400):
        x, _ = place(billions, 1)
        axes.plot([x, x], [bottom, bottom - height], color=FAINT, lw=0.8, zorder=1)
        write(axes, x, bottom + 1.8, f"{billions} B")
    for trillions in (0.3, 1, 3, 10, 30):
        _, y = place(100, trillions)
        axes.plot([left, left + width], [y, y], color=FAINT, lw=0.8, zorder=1)
        write(axes, left - 1, y, f"{trillions} T", ha="right")
    ends = [place(b, 0.02 * b) for b in (16, 630)]
    axes.plot(*zip(*ends, strict=True), **PREDICTED, zorder=2)
    known = "dashed: 20 tokens per parameter; hollow: experts, by active parameters"
    write(axes, left + width, bottom - 1.6, known, ha="right", colour=QUIET)
    for name, billions, trillions, (dx, dy) in FAMILIES:
        x, y = place(billions, trillions)
        axes.plot(x, y, "o", ms=7, color=INK, mfc=PAPER if name in EXPERTS else INK, mew=1.4, zorder=4)
        ha = "left" if dx > 0 else "right" if dx < 0 else "center"
        ground = {"boxstyle": "square,pad=0.05", "fc": PAPER, "ec": "none"}  # over the grid
        write(axes, x + dx, y + dy, name, ha=ha, size=11, bbox=ground, zorder=3)
    write(axes, left + width / 2, 42, "parameters", colour=QUIET)
    write(axes, 5, bottom - height - 1.8, "tokens", colour=QUIET)
    return figure


def minhash():
    figure, axes = card(92, 36, "two sets of shingles, and one random order")
    left = {"the cat sat": 1, "cat sat on": 1, "sat on the": 1, "on the mat": 1}
    rows = (("A", left), ("B", {"the cat sat": 1, "cat sat on": 1, "sat on a": 1, "on a mat": 1}))
    order = ("sat on a", "cat sat on", "on the mat", "the cat sat", "sat on the", "on a mat")
    write(axes, 9, 7, "order", ha="right", weight="bold")
    for i, shingle in enumerate(order):
        write(axes, 16.5 + 13.4 * i, 7, f"{i + 1}: {shingle}")
    for row, (name, shingles) in enumerate(rows):
        y = 10 + 7.5 * row
        write(axes, 9, y + 2.5, name, ha="right", size=12, weight="bold")
        first = next(s for s in order if s in shingles)
        for i, shingle in enumerate(order):
            x = 10.4 + 13.4 * i
            if shingle in shingles:
                box(axes, x, y, 12.4, 5, shingle, face=GREY if shingle == first else GROUND)
            else:
                box(axes, x, y, 12.4, 5, edge=EDGE, dotted=True)
    write(
        axes,
        10.4,
        27.6,
        "grey: the first of each set. They differ here, since the first of all, 1, lies in B alone.",
        ha="left",
    )
    write(
        axes, 10.4, 31.4,
        "2 of the 6 shingles lie in both, so in a third of all orders the first of all is one of them: J = 1/3",
        ha="left", colour=QUIET,
    )  # fmt: skip
    return figure


def keys():
    figure, axes = card(92, 40, "each key to one rank: key mod 2")
    held = (((0, (6, 3)), (2, (8, 5))), ((1, (6, 7)), (3, (8, 5))))  # (document, its keys), by rank
    for rank, documents in enumerate(held):
        x = 4 + 46 * rank
        rank_box(axes, rank, x, 6, width=38, height=4)
        for i, (document, numbers) in enumerate(documents):
            box(axes, x + 19.5 * i, 11, 18.5, 4, f"document {document}: keys {numbers[0]}, {numbers[1]}")
            for key in numbers:
                to = key % 2
                start = x + 19.5 * i + (6 if key % 2 == 0 else 13)
                arrow(axes, (start, 15.4), (4 + 46 * to + 5 + 9 * (2 * rank + i), 23.6))
    met = ("key 6: 0, 1;  key 8: 2, 3", "key 3: 0;  key 5: 2, 3;  key 7: 1")
    for rank, text in enumerate(met):
        rank_box(axes, rank, 4 + 46 * rank, 24, width=38, height=4)
        box(axes, 4 + 46 * rank, 28.6, 38, 4, text, face=GREY)
    write(axes, 46, 35.8, "pairs to compare: (0, 1) and (2, 3), the latter found twice")
    return figure


def bpe():
    figure, axes = card(92, 33, "the most frequent pair becomes a token")
    steps = (
        ("letters", (list("banana"), list("bandana")), "a n: 4 times"),
        ("1st merge", (["b", "an", "an", "a"], ["b", "an", "d", "an", "a"]), "b an: twice; an a: twice"),
        ("2nd merge", (["ban", "an", "a"], ["ban", "d", "an", "a"]), "?"),
    )
    for row, (name, words, most) in enumerate(steps):
        y = 6.5 + 8.4 * row
        write(axes, 3, y + 2, name, ha="left", weight="bold")
        x = 15
        for word in words:
            for token in word:
                width = 2.2 + 1.6 * len(token)
                cell(axes, x, y, token, width=width, height=4, size=12)
                x += width
            x += 3
        write(axes, 70, y + 2, most, ha="left", colour=QUIET)
    write(axes, 70, 4.6, "most frequent", ha="left", weight="bold")
    return figure


def packing():
    figure, axes = card(92, 45, "three documents in one sequence")
    owner = [name for count, name in DOCUMENTS for _ in range(count)]
    shades = dict(zip("ABC", (GREY, PAPER, GREY), strict=True))
    place = [i for count, _ in DOCUMENTS for i in range(count)]
    for i, name in enumerate(owner):
        box(axes, 6 + 3.2 * i, 9, 3.2, 4, f"{name}", face=shades[name], size=11)
        write(axes, 7.6 + 3.2 * i, 15.2, str(place[i]))
    write(axes, 22, 6.8, "tokens, by document", colour=QUIET)
    write(axes, 22, 17.8, "their positions begin anew", colour=QUIET)
    x0, y0, side = 56, 8.5, 3.1
    for q, mine in enumerate(owner):
        for k, other in enumerate(owner):
            allowed = mine == other and k <= q
            leaks = k <= q and not allowed
            box(
                axes, x0 + side * k, y0 + side * q, side, side, "×" if leaks else "", face=EDGE if allowed else PAPER,
                edge=FAINT,
            )  # fmt: skip
        write(axes, x0 - 1.6, y0 + side * (q + 0.5), mine, weight="bold")
        write(axes, x0 + side * (q + 0.5), y0 - 1.6, mine, weight="bold")
    write(axes, x0 + 5 * side, y0 + 10 * side + 2, "keys →", colour=QUIET)
    write(axes, x0 - 6.5, y0 + 5 * side, "queries\n↓", colour=QUIET)
    box(axes, 6, 23, 3.1, 3.1, face=EDGE, edge=FAINT)
    write(axes, 10.4, 24.6, "may look: same document, not later", ha="left")
    box(axes, 6, 28, 3.1, 3.1, "×", edge=FAINT)
    write(axes, 10.4, 29.6, "causal alone would allow it", ha="left")
    write(axes, 6, 35, "22 of 55 pairs are left to compute", ha="left", colour=QUIET)
    return figure


FIGURES = {
    "12_life": life,
    "12_appetite": appetite,
    "12_minhash": minhash,
    "12_keys": keys,
    "12_bpe": bpe,
    "12_packing": packing,
}
