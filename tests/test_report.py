"""What people see of a run: columns that align, numbers that are true, a JSON line for each line, on rank 0 alone."""

import contextlib
import io
import json
import math
import re
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from manyhands.config.layout import Layout
from manyhands.config.options import from_preset, merged
from manyhands.data.corpus import Corpus
from manyhands.gpt.config import GPTConfig
from manyhands.measure import wire
from manyhands.predict.models import flops_per_token
from manyhands.train import report
from manyhands.train.report import KEYS, Report
from manyhands.train.timing import StepTimer
from rank_pool import ranks_of, run_on_ranks

CONFIG = GPTConfig(vocab_size=65)  # block 64
CORPUS = Corpus.from_text("shakespeare", "To be, or not to be. " * 50)


@pytest.fixture(autouse=True)
def _wide_screen(monkeypatch):
    """Every column has room, whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "160")


class FakeTime:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.s = 100.0

    def __call__(self):
        return self.s

    def sleep(self, seconds):
        self.s += seconds


def options_of(steps=20, log=None, **groups):
    """The nano preset: global batch 24, a line per 10 steps; evaluation after 20."""
    log = {"every": 10, "eval_every": 20, "plots": False, **(log or {})}
    return merged(from_preset("nano"), {"train": {"steps": steps}, "log": log, **groups}, "test")


def report_of(folder, now, ranks=None, options=None, layout=None, **kwargs):
    ranks = ranks or ranks_of(lesson="train")
    layout = layout or Layout(replicate=ranks.world_size)
    return Report(ranks, options or options_of(), layout, CONFIG, CORPUS, Path(folder), now=now, **kwargs)


@pytest.fixture
def started(tmp_path):
    """(a report that has begun, its clock)"""
    now = FakeTime()
    report = report_of(tmp_path, now)
    report.start()
    return report, now


def one_step(report, now, step, step_s=0.5, loss=2.5, grad_norm=1.25):
    """A step of which 30 % is forward and 50 % backward."""
    timer = report.timer
    timer.step_start()
    now.sleep(0.1 * step_s)
    timer.mark("batch")
    now.sleep(0.3 * step_s)
    timer.mark("forward")
    now.sleep(0.5 * step_s)
    timer.mark("backward")
    now.sleep(0.1 * step_s)
    timer.mark("step")
    report.step(step, torch.tensor(loss), torch.tensor(grad_norm), 1e-3)


def a_run(folder, steps=20, **kwargs):
    """A run of `steps` steps of half a second, evaluated after each 20th and at its end; returns the report."""
    now = FakeTime()
    options = kwargs.pop("options", None) or options_of(steps)
    report = report_of(folder, now, options=options, **kwargs)
    report.start()
    for step in range(1, steps + 1):
        one_step(report, now, step)
        if step % 20 == 0 or step == steps:
            now.sleep(7)  # an evaluation
            report.evaluation(step, torch.tensor(2.75))
    report.close(f"{steps} steps done")
    return report


def lines_of(text):
    """The data lines: those that start with a step and a loss."""
    return [line for line in text.splitlines() if re.match(r" *\d+ +(\d+\.\d|-|nan)", line)]


def rows_in(folder):
    return [json.loads(line) for line in (Path(folder) / "steps.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(folder, what was shown) of 30 steps of half a second on one rank, evaluated after 20 and 30 for 7 s."""
    folder, shown = tmp_path_factory.mktemp("ran"), io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "160")
        a_run(folder, options=options_of(30, log={"plots": True}), steps=30).close("again")
    return folder, shown.getvalue()


# The screen


def test_a_run_shows_its_legend_once_a_line_per_interval_and_how_it_ended(ran):
    folder, shown = ran
    assert shown.count("what it says") == shown.count("optimizer steps done") == shown.count("30 steps done") == 1
    by_step = {line.split()[0]: line.split()[2] for line in lines_of(shown)}
    assert by_step == {"1": "-", "10": "-", "20": "2.7500", "30": "2.7500"}  # an evaluation stands in its step's line
    assert "30 steps done: 29.0 s, 51.7% of them in steps" in shown and "again" not in shown
    assert "lowest val_loss 2.7500 after step 20" in shown and str(folder / "steps.jsonl") in shown
    assert "loss (.) and validation loss (x) over steps" in shown
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "/rank" not in shown and "dt_min" not in shown and "mem_mean" not in shown  # there is one rank


def test_every_line_is_json_with_every_column(ran):
    folder, shown = ran
    rows = rows_in(folder)
    assert all(tuple(row) == KEYS for row in rows)
    everything = report.all_columns(options_of(), CONFIG, Layout(replicate=2), torch.device("cuda"), None)
    assert {column.key for column in everything} <= set(KEYS)
    assert [row["step"] for row in rows] == [1, 10, 20, 30]
    assert [row["tokens"] for row in rows] == [24 * 64 * row["step"] for row in rows]
    assert [row["val_loss"] for row in rows] == [None, None, 2.75, 2.75]
    for row in rows:  # a step of 24 sequences of 64 tokens
        assert (row["samples_per_s"], row["tokens_per_s"]) == pytest.approx((48, 48 * 64))
        assert row["mfu"] is None
    assert "500.0ms 150.0ms 250.0ms      48.0     3072" in shown and "unknown device" in shown
    since_launch = time.time() - psutil.Process().create_time()
    assert 0 < rows[0]["start_up_s"] <= since_launch and rows[1]["start_up_s"] is None
    assert f"start-up: {rows[0]['start_up_s']:.1f} s from launch" in shown


@pytest.mark.parametrize("width", [80, 160])
def test_lines_align_with_the_header_and_fit_the_screen(tmp_path, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    # only the parts that a world of two adds are of interest: nobody communicates
    a_run(tmp_path, ranks=ranks_of(world_size=2, lesson="train"))
    shown = capsys.readouterr().out
    (header,) = [line for line in shown.splitlines() if line.lstrip().startswith("step ")][1:]
    assert {len(line) for line in lines_of(shown)} == {len(header)}
    assert max(len(line) for line in shown.splitlines() if str(tmp_path) not in line) <= width
    assert ("dt_min" in header and "samples/s/rank" in header) == (width == 160)
    assert ("80 characters have no room for dt_min, dt_mean, dtf, dtb, " in " ".join(shown.split())) == (width == 80)


def test_a_terminal_gets_a_bar_below_the_same_lines_unless_it_is_left_out_and_a_log_no_escape_codes(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    a_run(tmp_path / "log")
    assert "\x1b" not in capsys.readouterr().out
    a_run(tmp_path / "no bar", terminal=True, options=options_of(log={"progress": False}))
    assert "20/20" not in capsys.readouterr().out
    a_run(tmp_path / "bar", terminal=True)
    shown = capsys.readouterr().out
    assert "20/20" in shown and "━" in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "\n")
    assert [int(line.split()[0]) for line in lines_of(plain) if "steps" not in line] == [1, 10, 20]


def test_what_the_model_wrote_cannot_steer_the_terminal(started, capsys):
    report, _ = started
    report.sample(20, "ROMEO:\n\x1b[31mred\rover\tand " + "out " * 60)
    shown = capsys.readouterr().out
    sample = shown[shown.index("sample after step 20") :]
    assert "\x1b" not in sample and "\r" not in sample
    assert "\\x1b[31mred\\rover" in sample
    assert max(map(len, sample.splitlines())) <= 100


# The numbers


def test_forward_and_backward_add_up_over_micro_batches_and_leave_the_batch_out():
    now = FakeTime()
    timer = StepTimer(now=now)
    for _ in range(3):
        timer.step_start()
        now.sleep(0.25)
        timer.mark("batch")
        for _ in range(4):
            now.sleep(0.5)
            timer.mark("forward")
            now.sleep(1.0)
            timer.mark("backward")
        now.sleep(0.125)
        timer.mark("step")
    timing = timer.take()
    assert (timing.steps, timing.step_s, timing.forward_s, timing.backward_s) == (3, 6.375, 2.0, 4.0)
    assert timer.take().steps == 0


def test_mfu_is_the_models_flops_over_16_bit_peaks_of_all_ranks_in_any_precision(tmp_path, monkeypatch):
    monkeypatch.setattr("manyhands.train.report.dense_peak", lambda device, precision: {"bf16": 2e12}.get(precision))
    now = FakeTime()
    report = report_of(tmp_path, now, ranks=ranks_of(world_size=2, lesson="train"))
    assert report.options.train.precision == "fp32"
    report.start()
    one_step(report, now, 1)
    assert rows_in(tmp_path)[0]["mfu"] == pytest.approx(3072 * flops_per_token(CONFIG) / (2 * 2e12))


# JSON lines


def test_a_loss_that_is_no_number_is_shown_and_written(started, tmp_path, capsys):
    report, now = started
    one_step(report, now, 1, loss=math.nan, grad_norm=math.inf)
    assert [(row["loss"], row["grad_norm"]) for row in rows_in(tmp_path)] == [("nan", "inf")]
    assert re.search(r"^ +1 +nan ", capsys.readouterr().out, re.M)


def test_a_full_disk_does_not_stop_the_run_and_is_said_once(tmp_path, capsys, monkeypatch):
    def full(self, **values):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.StepLog, "write", full)
    a_run(tmp_path)
    shown = capsys.readouterr().out
    assert shown.count("No space left on device") == 1
    assert len(lines_of(shown)) == 3


# Two ranks


def run_of_two(ranks, folder):
    """What each rank showed and sent, and rank 0 wrote, where rank 1 takes twice as long and holds three times more."""
    sys.modules["manyhands.train.report"].peak_memory_gib = lambda ranks: 1.0 + 2.0 * ranks.rank
    now, shown, per_step = FakeTime(), io.StringIO(), []
    with contextlib.redirect_stdout(shown):
        report = report_of(folder, now, ranks=ranks, options=options_of(steps=12), mean_loss=mean_over_ranks)
        report.start()
        for step in range(1, 13):
            with wire.watch() as seen:
                one_step(report, now, step, step_s=0.5 * (1 + ranks.rank), loss=2.0 + ranks.rank)
            per_step.append(len(seen.calls))
        report.evaluation(12, torch.tensor(2.75))
        report.sample(12, "To be")
        report.close("12 steps done")
    return shown.getvalue(), per_step, sorted(p.name for p in Path(folder).iterdir())


def mean_over_ranks(loss):
    dist.all_reduce(loss)
    return loss / 2


def test_numbers_are_told_over_ranks_and_rank_0_shows_them_for_one_collective_beside_the_loss(tmp_path):
    results = run_on_ranks(2, run_of_two, str(tmp_path), environ={"COLUMNS": "160"})
    for row in rows_in(tmp_path):
        assert (row["dt_min_s"], row["dt_mean_s"], row["dt_s"]) == pytest.approx((0.5, 0.75, 1.0))
        assert row["slowest_rank"] == 1 and row["loss"] == 2.5
        assert (row["samples_per_s"], row["samples_per_s_per_rank"]) == pytest.approx((24, 12))
        assert (row["dtf_s"], row["dtb_s"]) == pytest.approx((0.225, 0.375))
        assert (row["memory_min_gib"], row["memory_mean_gib"], row["memory_gib"]) == (1.0, 2.0, 3.0)
    (shown, _, files), (silent, _, _) = results
    assert len(lines_of(shown)) == 3 and silent == "" and set(files) <= {"steps.jsonl", "outputs"}
    for _, per_step, _ in results:
        assert per_step == [2 if step in (1, 10, 12) else 0 for step in range(1, 13)]
