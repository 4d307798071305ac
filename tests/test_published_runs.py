"""Published runs, predicted: the table is typed in rightly, two runs give two constants, the residuals stay small."""

import re

import pytest
from manyhands.predict import published_runs, step_time
from manyhands.predict.published_runs import FITTED_ON, RUNS, fit, predicted_tflops, published_work, residual, summary

BY_NAME = {run.name: run for run in RUNS}


def runs_of(words):
    return [run for run in RUNS if words in run.source]


@pytest.mark.parametrize("run", runs_of("2104.04473"), ids=lambda run: run.name)
def test_a_row_of_the_first_table_agrees_with_its_own_columns(run):
    layers, width = run.n_layer, run.n_embd
    # their equation 2: 12 l h^2 (1 + 13 / 12 h + (V + s) / 12 l h)
    formula = 12 * layers * width**2 * (1 + 13 / (12 * width) + (51200 + 2048) / (12 * layers * width))
    assert run.model.num_params() == pytest.approx(formula, rel=1e-5)
    assert run.name == f"GPT {round(formula / 1e9, 1)}B"
    percent = run.check["percent of peak"]
    assert round(run.tflops / 312 * 100) in (percent, percent + 1)  # 142 / 312 is 45.5 and 46 there
    assert run.check["PFLOP/s"] == pytest.approx(run.gpus * run.tflops / 1e3, rel=0.005)
    data = run.gpus / run.tensor / run.pipeline
    assert data == int(data) and run.global_batch % data == 0 and layers % run.pipeline == 0
    assert run.n_head % run.tensor == 0
    assert (run.global_batch // data) % run.pipeline == 0, "interleaving asks for a multiple of the stages"
    least = next(v for v in range(2, 99) if layers // run.pipeline % v == 0) if run.pipeline > 1 else 1
    assert run.stages_per_rank == least, "section 5.1 says that the schedule is interleaved, no table says v"
    # their equation 3: F = 96 B s l h^2 (1 + s / 6 h + V / 16 l h); here the head is not computed again
    equation = 96 * layers * width**2 * (1 + 2048 / (6 * width) + 51200 / (16 * layers * width))
    ours = run.model.flops_per_token() + run.model.n_layer * run.model.layer_flops()
    assert ours == pytest.approx(equation, rel=1e-6)


@pytest.mark.parametrize("run", runs_of("2205.05198"), ids=lambda run: run.name)
def test_seconds_of_the_second_table_are_its_mfu(run):
    assert run.published / 312 * 100 == pytest.approx(run.check["MFU in percent"], abs=0.2)


@pytest.mark.parametrize("run", runs_of("2201.11990"), ids=lambda run: run.name)
def test_seconds_of_mt_nlg_are_its_tflops_with_recomputation(run):
    flops = run.model.flops_per_token() + run.model.n_layer * run.model.layer_flops()
    seconds = run.check["seconds of an iteration"]
    assert flops * 1920 * 2048 / seconds / run.gpus / 1e12 == pytest.approx(run.tflops, rel=0.01)


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
    shifted = [run if run.name in FITTED_ON else run.model_copy(update={"gpus": 2 * run.gpus}) for run in RUNS]
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
    assert predicted_tflops(run.model_copy(update={"stages_per_rank": 1})) < 0.97 * predicted_tflops(run)
    assert published_work(run).micro_batches == 512
    slow = run.model_copy(update={"on": "pvc"})
    assert predicted_tflops(slow) < 0.8 * predicted_tflops(run)
