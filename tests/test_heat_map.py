"""Heat maps of numbers of ranks."""

import pytest
import torch
from manyhands.plots.heat_map import heat_map


def _numbers(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_small_times_and_large_sizes_are_shown_in_a_fitting_unit():
    milliseconds = heat_map(torch.tensor([[0.0015, 0.003]]), "t", "s")
    assert (_numbers(milliseconds), milliseconds.axes[1].get_ylabel()) == (["1.50", "3.00"], "ms")
    megabytes = heat_map([[2_500_000, 12_000_000]], "t", "bytes")
    assert (_numbers(megabytes), megabytes.axes[1].get_ylabel()) == (["2.5", "12.0"], "MB")


def test_a_missing_number_is_a_cross_and_a_virtual_map_says_so():
    figure = heat_map([[1.0, float("nan")]], "t", "s", virtual=True)
    assert sorted(_numbers(figure)) == ["1", "×"]
    assert figure.axes[0].get_title() == "t (virtual)"
    assert figure.axes[1].get_ylabel() == "virtual time, s"


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"needs ranks of one length, not of \[1, 2\]"):
        heat_map([[1], [1, 2]], "t", "s")
    with pytest.raises(ValueError, match="not of none"):
        heat_map([], "t", "s")
