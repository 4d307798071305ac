"""Published runs, predicted: the table is typed in rightly, two runs give two constants, the residuals stay small."""

import dataclasses
import re

import pytest
from manyhands.predict import published_runs, step_time
from manyhands.predict.published_runs import (
    FITTED_ON,
    KORTHIKANTI_ROWS,
    NARAYANAN_ROWS,
    RUNS,
    SMITH_ROWS,
    fit,
    predicted_tflops,
    published_work,
    residual,
    summary,
)

BY_NAME = {run.name: run for run in RUNS}


def runs_of(words):
    return [run for run in RUNS if words in run.source]


@pytest.mark.parametrize("row", NARAYANAN_ROWS, ids=lambda row: f"{row[0]}B")
def test_a_row_of_the_first_table_agrees_with_its_own_columns(row):
    billions, heads, width, layers, tensor, pipeline, gpus, batch, tflops, percent, petaflops = row
    model = BY_NAME[f"GPT {billions}B"].model
    # their equation 2: 12 l h^2 (1 + 13 / 12 h + (V + s) / 12 l h)
    formula = 12 * layers * width**2 * (1 + 13 / (12 * width) + (51200 + 2048) / (12 * layers * width))
    assert model.num_params() == pytest.approx(formula, rel=1e-5)
    assert round(formula / 1e9, 1) == billions
    assert round(tflops / 312 * 100) in (percent, percent + 1)  # 142 / 312 is 45.5 and 46 there, 135 / 312 is 43.3
    assert petaflops == pytest.approx(gpus * tflops / 1e3, rel=0.005)
    data = gpus / tensor / pipeline
    assert data == int(data) and batch % data == 0 and layers % pipeline == 0 and heads % tensor == 0
    assert (batch // data) % pipeline == 0, "interleaving asks for a multiple of the stages"


def test_operations_are_those_of_the_papers_equation():
    """Equation 3: F = 96 B s l h^2 (1 + s / 6 h + V / 16 l h), recomputation included; here the head is not computed
    again."""
    for billions, _, h, layers, *_ in NARAYANAN_ROWS:
        model = BY_NAME[f"GPT {billions}B"].model
        equation = 96 * layers * h**2 * (1 + 2048 / (6 * h) + 51200 / (16 * layers * h))
        ours = model.flops_per_token() + model.n_layer * model.layer_flops()
        assert ours == pytest.approx(equation, rel=1e-6)


@pytest.mark.parametrize("row", KORTHIKANTI_ROWS, ids=lambda row: f"{row[0]}B")
def test_seconds_of_the_second_table_are_its_mfu(row):
    billions, *_, mfu = row
    assert BY_NAME[f"GPT {billions}B, selective"].published / 312 * 100 == pytest.approx(mfu, abs=0.2)


@pytest.mark.parametrize("gpus, seconds, tflops", SMITH_ROWS)
def test_seconds_of_mt_nlg_are_its_tflops_with_recomputation(gpus, seconds, tflops):
    model = BY_NAME[f"MT-NLG 530B, {gpus} GPUs"].model
    flops = model.flops_per_token() + model.n_layer * model.layer_flops()
    assert flops * 1920 * 2048 / seconds / gpus / 1e12 == pytest.approx(tflops, rel=0.01)


def test_every_run_has_a_source_that_one_can_open_and_says_what_was_checked_and_assumed():
    assert len(RUNS) == 20 and len(BY_NAME) == 20
    for run in RUNS:
        assert re.search(r"arXiv:\d{4}\.\d{5}|https://", run.source)
        assert len(run.checked) > 20 and run.assumed


def test_the_two_constants_are_what_two_runs_give():
    found = fit()
    assert found.matmul_share == pytest.approx(step_time.MATMUL_SHARE, abs=0.001)
    assert found.memory_passes == pytest.approx(step_time.MEMORY_PASSES, abs=0.01)
    for name in FITTED_ON:
        assert abs(residual(BY_NAME[name], found)) < 1e-6


def test_only_the_fitted_runs_decide_the_constants(monkeypatch):
    before = fit()
    shifted = [run if run.name in FITTED_ON else dataclasses.replace(run, published=2 * run.published) for run in RUNS]
    monkeypatch.setattr(published_runs, "RUNS", tuple(shifted))
    assert fit() == before


def test_runs_are_predicted_within_the_bounds_that_the_report_shows():
    middle, worst = summary(runs_of("2104.04473"))
    assert middle < 0.04 and worst < 0.07
    assert summary(runs_of("2205.05198"))[1] < 0.12
    assert summary(runs_of("2407.21783"))[1] < 0.10
    assert summary(runs_of("BigScience"))[1] < 0.10
    # DeepSpeed's pipeline is slower than this model of it: said by the report, and not mended by a constant of its own
    assert 0.15 < summary(runs_of("2201.11990"))[0] < 0.26


def test_the_fitted_runs_are_left_out_of_the_summary():
    middle, worst = summary([BY_NAME[name] for name in (*FITTED_ON, "GPT 7.5B")])
    assert middle == worst == abs(residual(BY_NAME["GPT 7.5B"]))


def test_the_layout_matters_to_the_prediction():
    run = BY_NAME["GPT 1008.0B"]
    assert predicted_tflops(dataclasses.replace(run, stages_per_rank=1)) < 0.97 * predicted_tflops(run)
    assert published_work(run).micro_batches == 512
    slow = dataclasses.replace(run.machine, inside_bytes_per_s=30e9)
    assert predicted_tflops(dataclasses.replace(run, machine=slow)) < 0.8 * predicted_tflops(run)
