"""The bars of what ranks hold and communicate: as long as the numbers, hatched by kind, the formula beside each."""

from types import SimpleNamespace

import pytest
from manyhands.plots.bars import KINDS, held_and_sent
from manyhands.plots.looks import BYTES


def test_bars_are_as_long_as_the_bytes_per_parameter_and_the_volume():
    held = SimpleNamespace(parameters=400, optimizer=800, gradients=400)
    formula = SimpleNamespace(parameters=400, optimizer=800, gradients=300)
    figure = held_and_sent({"ddp": (held, formula, 2.0, 1.9, "2 calls")}, 100, "after backward")
    left, right = figure.axes
    bars = [(bar.get_x(), bar.get_width(), bar.get_hatch() or "") for bar in left.patches]
    assert bars == [(0, 4, BYTES["parameters"][1]), (4, 8, BYTES["optimizer"][1]), (12, 4, BYTES["gradients"][1])]
    assert [bar.get_width() for bar in right.patches] == [2.0]
    assert [axes.lines[0].get_xdata()[0] for axes in (left, right)] == [15, 1.9]
    assert [text.get_text() for text in right.texts] == ["2.00 P, 2 calls"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*KINDS, "by formula"]


@pytest.mark.parametrize("volume", [0.0, 3.0])
def test_a_world_of_one_that_sends_nothing_is_drawn_too(volume):
    held = SimpleNamespace(parameters=4, optimizer=8, gradients=4)
    held_and_sent({"fsdp": (held, held, volume, 0.0, "0 calls")}, 1, "t").draw_without_rendering()
