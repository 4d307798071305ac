"""Lesson 11's plot of a killed run: every life is drawn where it was, and a residual that is not zero is in sight."""

import pytest
from manyhands.plots.results import killed_and_resumed

UNDISTURBED = {1: 4.0, 2: 3.0, 3: 2.5, 4: 2.0}


def test_each_life_lies_on_its_steps_and_is_named_above_them():
    above, below = killed_and_resumed(UNDISTURBED, [{1: 4.0, 2: 3.0}, {2: 3.0, 3: 2.5, 4: 2.0}], "two").axes
    _, first, second = above.lines
    assert (list(first.get_xdata()), list(second.get_xdata())) == ([1, 2], [2, 3, 4])
    named = {text.get_text(): text.get_position()[0] for text in above.texts}
    assert (named["life 1"], named["life 2"]) == (1.5, 3)
    assert [set(line.get_ydata()) for line in below.lines] == [{0}, {0}]


def test_a_loss_that_differs_is_not_cut_off():
    _, below = killed_and_resumed(UNDISTURBED, [{3: 2.5, 4: 2.25}], "off").axes
    assert max(below.lines[0].get_ydata()) == pytest.approx(0.25)
    assert below.get_ylim()[1] > 0.25
