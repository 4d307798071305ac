"""Every published curve says where it is from and on what it was measured, and recorded runs of ours replace it."""

import json
import math
from types import SimpleNamespace

import pytest
from manyhands.launch import recorded_runs
from manyhands.plots.bars import held_against_limit, share_of_peak
from manyhands.plots.times import beside_published, between_failures, kept_per_gpu
from test_recorded import metrics

FILES = sorted(recorded_runs.PUBLISHED.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_series_has_its_source_unit_hardware_versions_and_date(path):
    found = json.loads(path.read_text("utf-8"))
    assert found["what"] and found["series"]
    for series in found["series"]:
        for field in ("name", "unit", "hardware", "versions", "date", "source", "note"):
            assert series[field], (series["name"], field)
        assert series["source"].startswith("https://")
        values = [value for point in series["points"] for value in point]
        assert values and all(math.isfinite(value) and value > 0 for value in values)
        assert series["points"] == sorted(series["points"])


def test_the_curves_are_the_published_ones_until_a_run_of_ours_is_recorded(tmp_path):
    names = [curve["name"] for curve in recorded_runs.all_reduce_curves(tmp_path)]
    assert names == ["8 H200", "32 B200, 4 nodes"]
    measured = {"sizes_b": [4_000, 8_000], "all_reduce_s": {"NCCL": [1e-6, 1e-6], "our ring": [2e-6, 2e-6]}}
    recorded_runs.record(metrics(lesson="02_collectives", measured=measured), tmp_path)
    (curve,) = recorded_runs.all_reduce_curves(tmp_path)
    assert curve["name"] == "h200x4" and curve["points"] == [[4_000, pytest.approx(6)], [8_000, pytest.approx(12)]]


def test_the_figure_shows_bus_bandwidth_of_this_machine_below_every_published_curve():
    published = recorded_runs.published("02_all_reduce")
    (axes,) = beside_published([2**20, 2**22], [1e-3, 4e-3], 4, published, "all-reduce").axes
    assert [text.get_text() for text in axes.texts] == ["this machine", "32 B200, 4 nodes", "8 H200"]
    assert list(axes.lines[-1].get_ydata()) == pytest.approx([1.5 * 2**20 / 1e6, 1.5 * 2**20 / 1e6])
    assert list(axes.lines[0].get_ydata()) == [value for _, value in published[0]["points"]]
    alone = beside_published([2**20], [1e-3], 1, published, "a world of one").axes[0]
    assert "this machine" not in [text.get_text() for text in alone.texts]


def test_the_speed_per_gpu_is_drawn_in_percent_of_that_on_the_fewest():
    (axes,) = kept_per_gpu([{"name": "7b", "points": [[8, 200], [16, 150], [512, 50]]}], "here").axes
    ideal, measured = axes.lines
    assert set(ideal.get_ydata()) == {100}
    assert list(measured.get_xdata()) == [8, 16, 512] and list(measured.get_ydata()) == [100, 75, 25]


def test_the_rungs_stand_next_to_published_rates_with_the_limit_of_memory():
    rungs = {"DDP": SimpleNamespace(parameters=3e6, optimizer=6e6, gradients=3e6)}
    published = recorded_runs.published("06_fsdp")
    bars, rates = held_against_limit(rungs, 5e6, "MB", published).axes
    assert sum(bar.get_width() for bar in bars.patches) == pytest.approx(12)
    assert bars.lines[0].get_xdata()[0] == pytest.approx(5)
    assert [list(line.get_ydata()) for line in rates.lines] == [[y for _, y in one["points"]] for one in published]
    assert len(held_against_limit(rungs, 5e6, "MB").axes) == 1


def test_a_single_point_between_failures_gets_a_line_down_to_64_gpus_and_projections_are_hollow():
    published = [
        {"name": "one", "points": [[128, 10]]},
        {"name": "some", "points": [[8, 100], [1024, 2]], "projected_from": 1024},
    ]
    (axes,) = between_failures(published, lambda seconds: seconds / 2).axes
    lines = [(line.get_ls(), list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    assert ("-", [64, 128], [20, 10]) in lines, "hours x GPUs is constant"
    assert ("--", [64, 128], [10, 5]) in lines and ("--", [8, 1024], [50, 1]) in lines, "how often to save"
    points = {line.get_xdata()[0]: line.get_mfc() for line in axes.lines if line.get_ls() == "None"}
    assert points[1024] == "none" and "none" not in (points[8], points[128])


def test_each_machine_has_a_bar_of_its_share_of_the_peak_and_this_one_stands_below():
    published = [{"name": "H100", "points": [[1000, 800]]}, {"name": "A100", "points": [[300, 240]]}]
    (axes,) = share_of_peak({"this machine": 12.5}, published, "peak").axes
    assert [bar.get_width() for bar in axes.patches] == [100, 80, 100, 80, 100, 12.5]
    assert [text.get_text() for text in axes.texts] == [
        "80 %, 800 of 1,000 TFLOP/s", "80 %, 240 of 300 TFLOP/s", "12 %",
    ]  # fmt: skip
