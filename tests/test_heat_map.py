"""Spans of a virtual network become a chart that reads without colour; numbers of ranks become a heat map."""

import pytest
import torch
from manyhands.measure.virtual_network import Span
from manyhands.plots.heat_map import heat_map
from manyhands.plots.schedule import gantt

SPANS = [
    Span(0, "compute", "forward", 0.0, 1e-3),
    Span(1, "communication", "bucket", 5e-4, 2e-3),
    Span(1, "waiting", "wait", 0.0, 5e-4),
]


def test_a_gantt_chart_has_a_row_per_rank_hatches_communication_only_and_says_where_time_is_virtual():
    figure = gantt(SPANS, "a step")
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert [bool(bars.get_hatch()) for bars in axes.collections] == [False, True, False]
    assert axes.get_xlabel() == "time, ms"
    assert axes.get_title() == "a step"
    virtual = gantt(SPANS, "a step", virtual=True).axes[0]
    assert "virtual" in virtual.get_title() and "virtual" in virtual.get_xlabel()


# ---- heat maps ----


def _numbers(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_a_heat_map_has_row_0_on_top_and_its_numbers_in_the_cells():
    figure = heat_map([[1, 2, 3], [4, 5, 6]], "tokens", "tokens")
    axes, bar = figure.axes
    assert _numbers(figure) == ["1", "2", "3", "4", "5", "6"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert axes.get_ylim() == (1.5, -0.5)
    assert (axes.get_title(), axes.get_xlabel(), bar.get_ylabel()) == ("tokens", "step", "tokens")


def test_one_scale_holds_for_all_cells_and_begins_at_zero():
    image = heat_map([[9, 10]], "t", "s").axes[0].images[0]
    assert image.get_clim() == (0, 10)
    assert heat_map([[-1, 1]], "t", "°C").axes[0].images[0].get_clim() == (-1, 1)
    assert heat_map([[0.0, 0.0]], "t", "s").axes[0].images[0].get_clim() == (0, 1)


def test_small_times_and_large_sizes_are_shown_in_a_fitting_unit():
    milliseconds = heat_map(torch.tensor([[0.0015, 0.003]]), "t", "s")
    assert (_numbers(milliseconds), milliseconds.axes[1].get_ylabel()) == (["1.50", "3.00"], "ms")
    megabytes = heat_map([[2_500_000, 12_000_000]], "t", "bytes")
    assert (_numbers(megabytes), megabytes.axes[1].get_ylabel()) == (["2.5", "12.0"], "MB")


def test_darker_is_more_also_in_black_and_white_and_every_number_can_be_read():
    figure = heat_map([list(range(12))], "t", "tokens")
    image = figure.axes[0].images[0]
    weights = (0.2126, 0.7152, 0.0722)
    light = [sum(w * c for w, c in zip(weights, image.cmap(image.norm(v)), strict=False)) for v in range(12)]
    assert light == sorted(light, reverse=True)
    for lightness, text in zip(light, figure.axes[0].texts, strict=True):
        assert abs(lightness - (1 if text.get_color() == "white" else 0)) > 0.4


def test_many_cells_have_no_numbers_few_labels_and_no_lines():
    axes = heat_map([[1.0] * 300] * 64, "t", "s").axes[0]
    assert not axes.texts
    assert len(axes.get_yticklabels()) <= 17
    assert [label.get_text() for label in axes.get_xticklabels()][:3] == ["0", "20", "40"]
    assert len(axes.xaxis.get_minorticklocs()) == len(axes.yaxis.get_minorticklocs()) == 0


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


def test_named_rows_hold_one_ranks_spans_and_end_with_their_time():
    rows = {"1 bucket": [Span(0, "compute", "a", 0, 2e-3)], "8 buckets": [Span(0, "communication", "b", 0, 1e-3)]}
    (axes,) = gantt(rows, "one step").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1 bucket", "8 buckets"]
    assert [text.get_text() for text in axes.texts] == ["2.0 ms", "1.0 ms"]
    assert [box.y0 for path in axes.collections for box in [path.get_paths()[0].get_extents()]] == [-0.36, 1]
