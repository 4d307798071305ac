"""Figures of a text of one's own: documents packed into one window, and how near copies are found."""

from manyhands.plots.looks import EDGE, GREY, GROUND, PAPER, QUIET, box, card, tint, write

WINDOW = ["ran", "off", "sep", "The", "sun", "is", "sep", "To", "be"]
DOCUMENT = [0, 0, 1, 1, 1, 1, 2, 2, 2]
SHADES = (GREY, tint(EDGE, 0.75), tint(EDGE, 0.45))


def packing():
    figure, axes = card(80, 49, "three documents in one window: who attends to whom")
    side, left, top = 4, 18, 11
    for i, (word, document) in enumerate(zip(WINDOW, DOCUMENT, strict=True)):
        write(axes, left + (i + 0.5) * side, top - 1.8, word, rotation=45, weight="bold" if word == "sep" else "normal")
        write(axes, left - 1, top + (i + 0.5) * side, word, ha="right", weight="bold" if word == "sep" else "normal")
        for j in range(len(WINDOW)):
            seen = j <= i and DOCUMENT[j] == document
            box(axes, left + j * side, top + i * side, side, side, face=SHADES[document] if seen else PAPER, edge=EDGE)
    for place, text in ((1, "the end of a document"), (4, "a whole one"), (7.5, "the beginning of another")):
        write(axes, left + len(WINDOW) * side + 1, top + (place + 0.0) * side, text, ha="left", colour=QUIET, size=10)
    return figure


def minhash():
    figure, axes = card(84, 30, "what two documents have in common, from a few numbers")
    rows = (
        ("document A", "3 1 7 2 9 4 | 8 5 2 6 1 3 | 4 4 0 7 2 9"),
        ("document B", "3 1 7 2 9 4 | 8 0 2 6 1 3 | 4 4 5 7 2 9"),
    )
    for i, (name, numbers) in enumerate(rows):
        y = 7 + 6 * i
        write(axes, 14, y + 1.7, name, ha="right", weight="bold")
        for j, (one, other) in enumerate(zip(numbers.split(" | "), rows[1 - i][1].split(" | "), strict=True)):
            x = 17 + 22 * j
            box(axes, x, y, 20, 3.4, face=GREY if one == other else GROUND, edge=EDGE)
            for k, (a, b) in enumerate(zip(one.split(), other.split(), strict=True)):
                write(axes, x + 2 + 3.2 * k, y + 1.7, a, weight="normal" if a == b else "bold")
    write(axes, 17, 19.6, "a band in which all six agree: the pair is compared", ha="left", colour=QUIET)
    write(axes, 17, 23, "16 of 18 numbers agree: about 89 % of all shingles are common", ha="left", colour=QUIET)
    write(
        axes, 17, 26.4, "each number: the least of all shingles' hashes, in one of 128 orders", ha="left", colour=QUIET
    )
    return figure


FIGURES = {"own_text_packing": packing, "own_text_minhash": minhash}
