"""Run folders that never collide, numbers that keep their bits, what two runs may differ in, honest times."""

import errno
import json
import math
import os
import tempfile
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import rank_pool
import torch
from manyhands.data.corpus import Corpus
from manyhands.launch import run_folder as run_folder_module
from manyhands.launch.metrics import Metrics, StepLog, compare, fingerprint
from manyhands.launch.run_folder import run_folder
from manyhands.measure.timing import Timing, max_over_ranks, median_s, peak_memory_gib, tok_per_s
from rank_pool import run_on_ranks


def ranks_of(rank=0, world_size=4, launcher="torchrun", lesson="05_test"):
    return rank_pool.ranks_of(rank, world_size, launcher, lesson)


# The run's folder


def test_each_run_has_its_own_folder_and_latest_points_to_the_last(tmp_path):
    first, second = ranks_of(), ranks_of()  # equal, and still two joins
    assert run_folder(first) == run_folder(first) != run_folder(second)
    lesson = tmp_path / "outputs" / "05_test"
    assert run_folder(first).parent == lesson
    assert f"-torchrun-n4-{os.getpid()}" in run_folder(first).name
    assert (lesson / "latest").resolve() == run_folder(second)
    assert sorted(p.name for p in lesson.iterdir()) == sorted(
        ["latest", run_folder(first).name, run_folder(second).name]
    )


def test_another_ranks_folder_says_whose_it_is_and_leaves_latest_alone(tmp_path):
    assert run_folder(ranks_of(rank=2)).name.endswith("-rank2")
    assert not (tmp_path / "outputs" / "05_test" / "latest").exists()


def test_many_runs_that_start_in_one_second_do_not_collide(tmp_path):
    folders = []
    threads = [threading.Thread(target=lambda: folders.append(run_folder(ranks_of()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 8
    assert (tmp_path / "outputs" / "05_test" / "latest").resolve() in folders


def test_a_course_that_cannot_be_written_sends_outputs_home_and_says_so(tmp_path, monkeypatch, capsys):
    course = tmp_path / "course"
    course.mkdir()
    (course / "pyproject.toml").touch()
    (course / "outputs").touch()  # where no folder can be made, not even by root
    monkeypatch.delenv("MANYHANDS_OUTPUTS")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(run_folder_module, "ROOT", course)
    folder = run_folder(ranks_of())
    assert folder.is_relative_to(tmp_path / "home" / ".local" / "share" / "manyhands" / "outputs" / "05_test")
    assert capsys.readouterr().out.count("cannot be written: the outputs of this run go to") == 1


def test_outputs_that_are_made_here_are_their_users_alone_and_others_keep_their_modes(tmp_path, monkeypatch):
    monkeypatch.delenv("MANYHANDS_OUTPUTS", raising=False)
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(run_folder_module, "ROOT", tmp_path)
    outputs = run_folder_module.outputs_folder()
    assert (outputs, outputs.stat().st_mode & 0o777) == (tmp_path / "outputs", 0o700)
    outputs.chmod(0o750)
    assert run_folder_module.outputs_folder().stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("why", ["named", "neither", "read-only disk"])
def test_outputs_that_cannot_be_written_are_refused_with_the_cure(why, tmp_path, monkeypatch):
    (tmp_path / "file").touch()  # where no folder can be made, not even by root
    sentence = "MANYHANDS_OUTPUTS=.* cannot be written; name another folder or unset it"
    if why == "named":
        monkeypatch.setenv("MANYHANDS_OUTPUTS", str(tmp_path / "file" / "outputs"))
    if why == "neither":
        sentence = "neither .* nor .* can be written; set MANYHANDS_OUTPUTS="
        monkeypatch.delenv("MANYHANDS_OUTPUTS")
        monkeypatch.setenv("HOME", str(tmp_path / "file"))
        monkeypatch.setattr(run_folder_module, "ROOT", tmp_path / "file")
    if why == "read-only disk":  # found by trying, whatever the modes say
        monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(ValueError, match=sentence):
        run_folder(ranks_of())


def refused(dir):
    raise OSError(errno.EROFS, "Read-only file system")


# metrics.json


def test_rank_0_writes_who_ran_what_on_which_corpus():
    corpus = Corpus.from_text("offline", "to be or not to be")
    metrics = Metrics(ranks_of(), corpus=corpus, parameters={"n_ranks": 4, "length": 8})
    metrics.exact(losses=[1.5])
    metrics.close(loss=2.5)
    metrics.measured(step_s=0.1)
    content = json.loads(metrics.write().read_text())
    assert (content["lesson"], content["launcher"], content["world_size"]) == ("05_test", "torchrun", 4)
    assert content["torch"] == torch.__version__
    assert content["corpus"] == corpus.metadata()
    assert content["parameters"] == {"length": 8}
    assert content["exact"] == {"losses": [1.5]}
    assert content["close"] == {"loss": {"value": 2.5, "tolerance": 1e-3}}
    assert content["measured"] == {"step_s": 0.1}
    assert sorted(p.name for p in run_folder(metrics.ranks).iterdir()) == ["metrics.json"]
    assert Metrics(ranks_of(rank=1)).write() is None


def test_numbers_keep_every_bit_through_json():
    floats = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, float(torch.tensor(0.1)), math.pi * 1e-7]
    metrics = Metrics(ranks_of())
    metrics.exact(
        floats=floats,
        fp32=torch.tensor([0.1, 1 / 3]),
        scalar=torch.tensor(7),
        numpy=np.float32(0.1),
        nested={"a": (1, True, None, "text")},
        not_finite=[math.nan, math.inf, -math.inf],
    )
    exact = json.loads(metrics.write().read_text())["exact"]
    assert [x.hex() for x in exact["floats"]] == [x.hex() for x in floats]
    assert torch.equal(torch.tensor(exact["fp32"]), torch.tensor([0.1, 1 / 3]))
    assert (exact["scalar"], exact["numpy"]) == (7, float(np.float32(0.1)))
    assert exact["nested"] == {"a": [1, True, None, "text"]}
    assert exact["not_finite"] == ["nan", "inf", "-inf"]


def test_a_value_that_json_cannot_hold_is_named():
    with pytest.raises(TypeError, match="metric shape: Size|metric thing: object is not a number"):
        Metrics(ranks_of()).exact(thing=object())


def test_a_fingerprint_changes_with_one_bit_a_dtype_or_a_shape():
    zeros = torch.zeros(2, 3)
    flipped = zeros.clone()
    flipped.view(torch.int32)[1, 2] = 1
    others = [
        [flipped], [zeros.double()], [zeros.T], [zeros.flatten()], [zeros, zeros], [-zeros],
        [torch.zeros(2, 3, dtype=torch.bfloat16)], [torch.tensor(0.0)], [torch.zeros(0)],
    ]  # fmt: skip
    prints = [fingerprint(tensors) for tensors in others]
    assert len({fingerprint([zeros]), *prints}) == 10
    assert fingerprint([zeros.clone()]) == fingerprint([zeros])


# Comparing two runs


def run_of(
    world_size=4, exact=None, close=None, tolerance=None, corpus=None, parameters=None, device="cpu", **measured
):
    metrics = Metrics(ranks_of(world_size=world_size), corpus=corpus, parameters=parameters)
    metrics.content["device"] = device
    metrics.exact(**(exact or {}))
    metrics.close(tolerance, **(close or {}))
    metrics.measured(**measured)
    return metrics.content


NEXT_UP = math.nextafter(1.0, 2)


@pytest.mark.parametrize(
    "one, other, differences",
    [
        (dict(exact={"a": [1, 2.5]}, step_s=0.1), dict(exact={"a": [1, 2.5]}, step_s=9.9), []),
        (dict(exact={"l": [2.0, 1.0]}), dict(exact={"l": [2.0, NEXT_UP]}), ["exact l[1]: 1.0 and 1.0000000000000002"]),
        (dict(exact={"l": [2.0, 1.0]}), dict(exact={"l": [2.0, NEXT_UP]}, world_size=2), []),
        (dict(exact={"a": 0.0}), dict(exact={"a": -0.0}), ["exact a: 0.0 and -0.0"]),
        (dict(exact={"a": 1}), dict(exact={"a": 1.0}), ["exact a: 1 and 1.0"]),
        (dict(exact={"a": math.nan}), dict(exact={"a": math.nan}), []),
        (dict(close={"g": [1.0, 2.0]}, tolerance=1e-10), dict(close={"g": [1.0, 2.5]}, tolerance=1e-10),
         ["close g[1]: 2.0 and 2.5 are 0.5 apart, more than the tolerance 1e-10"]),
        (dict(exact={"a": 1}), {}, ["exact a: 1 and missing"]),
        ({}, dict(close={"b": 1.5}, world_size=2), ["close b: missing and 1.5"]),
        (dict(close={"v": 1.0}), dict(close={"v": math.nan}), ["close v: 1.0 and nan"]),
        (dict(close={"v": [1.0]}), dict(close={"v": [1.0, 2.0]}), ["close v: [1.0] and [1.0, 2.0]"]),
        (dict(close={"v": {"x": 1.0}}), dict(close={"v": {"y": 1.0}}), ["close v: {'x': 1.0} and {'y': 1.0}"]),
        (dict(close={"v": 1.0}), dict(close={"v": "text"}), ["close v: 1.0 and text"]),
        # on GPUs launchers may add in another order: close, and other bits
        (dict(exact={"l": 2.0, "bits": "a1"}, device="cuda"), dict(exact={"l": 2.001, "bits": "b2"}, device="cuda"),
         []),
        (dict(exact={"l": 2.0, "n": 4000}, device="cuda"), dict(exact={"l": 2.1, "n": 4001}, device="cuda"),
         ["exact l: 2.0 and 2.1 are 0.1 apart, more than the tolerance 0.001", "exact n: 4000 and 4001"]),
        (dict(exact={"a": 1.0}, close={"b": 1.0}, device="cuda"), dict(exact={"a": 1.5}, close={"b": 1.5}),
         ["close b: 1.0 and 1.5 are 0.5 apart, more than the tolerance 0.001"]),
    ],
)  # fmt: skip
def test_two_runs_differ_in_exact_bits_at_the_same_number_of_ranks_and_beyond_a_tolerance_at_any(
    one, other, differences
):
    assert compare(run_of(**one), run_of(**other)) == differences


@pytest.mark.parametrize(
    "dtype, allowed, too_much", [(torch.float32, 9e-4, 2e-3), (torch.float64, 9e-11, 1e-9), (torch.bfloat16, 0, 0.1)]
)
def test_close_values_have_the_tolerance_of_their_dtype(dtype, allowed, too_much):
    def with_loss(loss, n):
        return run_of(n, close={"loss": torch.tensor(loss, dtype=dtype)})

    assert compare(with_loss(0.5, 4), with_loss(0.5 + allowed, 2)) == []
    assert len(compare(with_loss(0.5, 4), with_loss(0.5 + too_much, 2))) == 1
    assert compare(with_loss(500.0, 4), with_loss(500.0 * (1 + allowed), 2)) == []


def test_runs_on_other_corpora_or_parameters_are_not_compared_number_by_number():
    one, other = (run_of(corpus=Corpus.from_text("offline", text), exact={"a": text}) for text in ("aab", "abb"))
    assert len(compare(one, other)) == 1 and compare(one, other)[0].startswith("corpus differs")
    one, other = run_of(parameters={"length": 4}), run_of(parameters={"length": 8})
    assert compare(one, other)[0].startswith("parameters differs")
    assert compare(run_of(4, parameters={"n_ranks": 4}), run_of(2, parameters={"n_ranks": 2})) == []


def test_files_are_compared_as_they_are():
    one, other = Metrics(ranks_of()), Metrics(ranks_of())
    one.exact(a=0.1)
    other.exact(a=0.1)
    assert compare(one.write(), str(other.write())) == []


# Steps and times


def test_the_step_log_is_one_json_line_per_step_and_can_be_read_while_it_grows(tmp_path):
    log = StepLog(ranks_of(), tmp_path / "steps.jsonl")
    log.write(step=0, loss=torch.tensor(0.1))
    log.write(step=1, loss=math.nan)
    assert [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()] == [
        {"step": 0, "loss": float(torch.tensor(0.1))},
        {"step": 1, "loss": "nan"},
    ]


def test_the_step_log_of_another_rank_writes_nothing(tmp_path):
    StepLog(ranks_of(rank=1), tmp_path / "steps.jsonl").write(step=0)
    assert not (tmp_path / "steps.jsonl").exists()


def _timing(ranks):
    calls = []

    def call():
        calls.append(ranks.rank)
        time.sleep(0.02 * ranks.rank)

    timing = median_s(call, 3, ranks, warm_up=2)
    return timing, len(calls), max_over_ranks(ranks.rank * 1.5, ranks)


def test_the_slowest_rank_decides_and_the_warm_up_does_not_count():
    results = run_on_ranks(3, _timing)
    timings = [timing for timing, _, _ in results]
    assert {timing.slowest_s for timing in timings} == {max(timing.median_s for timing in timings)}
    assert timings[2].median_s >= 0.04  # it slept that long: a bound that no load breaks
    for timing, calls, largest in results:
        assert len(timing.samples) == 3 and calls == 5
        assert timing.median_s == sorted(timing.samples)[1]
        assert largest == 3.0


def test_a_process_without_a_group_is_timed_too():
    assert isinstance(median_s(lambda: None, 1, replace(ranks_of(world_size=1), launcher="alone")), Timing)
    with pytest.raises(ValueError, match="repeats=0 leaves nothing to measure"):
        median_s(lambda: None, 0, ranks_of(world_size=1))


def test_throughput_counts_every_ranks_sequences():
    assert tok_per_s(global_batch=24, block=64, step_s=0.5) == 3072


def test_peak_memory_is_of_this_process_in_gib():
    before = peak_memory_gib(ranks_of())
    block = bytearray(os.urandom(1)) * (300 << 20)
    grown = peak_memory_gib(ranks_of())
    del block
    assert 0.05 < before < 64
    assert grown >= 0.3  # at least the block; this process's peak may have been higher before
    assert grown >= 0.99 * before and peak_memory_gib(ranks_of()) >= 0.99 * grown  # Linux counts in rough steps
