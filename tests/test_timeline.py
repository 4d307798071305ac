"""Spans share a time zero, arrive on rank 0 in order, and become a chart that reads without colour."""

import time

import pytest
import torch.distributed as dist
from manyhands.timeline import Span, Timeline, gantt, gather
from rank_pool import run_on_ranks


def _record(ranks):
    timeline = Timeline(ranks)
    with timeline.span("forward"):
        time.sleep(0.02)
    end = timeline.start("all-reduce", lane="communication")
    dist.barrier()
    end()
    return timeline.spans, gather(timeline.spans, ranks)


def test_spans_of_all_ranks_arrive_on_rank_0_sorted_and_on_one_clock():
    results = run_on_ranks(3, _record)
    everyone = results[0][1]
    assert [gathered for _, gathered in results[1:]] == [None, None]
    assert [(span.rank, span.name) for span in everyone] == [
        (r, name) for r in range(3) for name in ("forward", "all-reduce")
    ]
    assert everyone == [span for spans, _ in results for span in spans]
    # all ranks are inside the barrier at one moment: that holds on a common clock only
    barriers = [span for span in everyone if span.lane == "communication"]
    assert max(span.start_s for span in barriers) <= min(span.end_s for span in barriers)
    assert all(
        span.start_s >= 0 and span.end_s - span.start_s >= 0.02 for span in everyone if span.name == "forward"
    )


def test_a_span_is_recorded_also_when_its_block_raises():
    timeline = Timeline.__new__(Timeline)
    timeline._rank, timeline._zero, timeline.spans = 0, 0.0, []
    with pytest.raises(KeyError), timeline.span("forward"):
        raise KeyError
    assert timeline.spans[0].name == "forward"


def test_an_unknown_lane_is_refused():
    with pytest.raises(ValueError, match="'comm' is none of compute, communication, waiting"):
        Span(0, "comm", "x", 0, 1)


SPANS = [
    Span(0, "compute", "forward", 0.0, 1e-3),
    Span(1, "communication", "bucket", 5e-4, 2e-3),
    Span(1, "waiting", "wait", 0.0, 5e-4),
]


def test_a_gantt_chart_has_a_row_per_rank_and_hatches_communication_only():
    figure = gantt(SPANS, "a step")
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert [bool(bars.get_hatch()) for bars in axes.collections] == [False, True, False]
    assert axes.get_xlabel() == "time, ms"
    assert axes.get_title() == "a step"


def test_a_virtual_gantt_chart_says_so_in_title_and_axis():
    axes = gantt(SPANS, "a step", virtual=True).axes[0]
    assert "virtual" in axes.get_title()
    assert "virtual" in axes.get_xlabel()


def test_an_empty_chart_is_drawn():
    assert gantt([], "nothing").axes[0].get_title() == "nothing"
