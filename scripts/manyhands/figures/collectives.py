"""Figures of lesson 02."""

from . import Drawing, arrow, card, cell, rank_box


def _broadcast():
    figure, axes = card(60, 22, "broadcast")
    for rank in range(4):
        rank_box(axes, rank, 4 + 14 * rank, 5)
    cell(axes, 6, 12, "A", rank=0)
    arrow(axes, (8, 14), (20, 14), "x")
    return figure


FIGURES = {"02_broadcast": Drawing(_broadcast, "rank 0 hands its A to every rank")}
