"""Every published curve says where it is from and on what it was measured, and recorded runs of ours replace it."""

import json
import math

import pytest
from manyhands.launch import recorded_runs
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
