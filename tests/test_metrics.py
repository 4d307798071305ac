"""Run folders that never collide, numbers that keep their bits, what two runs may differ in, honest times."""

import json
import math
import os
import time

import numpy as np
import pytest
import rank_pool
import torch
from manyhands.data.corpus import Corpus
from manyhands.launch import run_folder as run_folder_module
from manyhands.launch.metrics import Metrics, StepLog, compare, fingerprint
from manyhands.launch.run_folder import run_folder
from manyhands.measure.timing import max_over_ranks, median_s
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


def test_outputs_that_cannot_be_written_are_refused_with_the_cure(tmp_path, monkeypatch):
    (tmp_path / "file").touch()  # where no folder can be made, not even by root
    monkeypatch.setenv("MANYHANDS_OUTPUTS", str(tmp_path / "file" / "outputs"))
    with pytest.raises(ValueError, match="MANYHANDS_OUTPUTS=.* cannot be written; name another folder or unset it"):
        run_folder(ranks_of())


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
        (dict(close={"g": [1.0, 2.0]}, tolerance=1e-10), dict(close={"g": [1.0, 2.5]}, tolerance=1e-10),
         ["close g[1]: 2.0 and 2.5 are 0.5 apart, more than the tolerance 1e-10"]),
        (dict(exact={"a": 1}), {}, ["exact a: 1 and missing"]),
        (dict(close={"v": 1.0}), dict(close={"v": math.nan}), ["close v: 1.0 and nan"]),
        (dict(close={"v": [1.0]}), dict(close={"v": [1.0, 2.0]}), ["close v: [1.0] and [1.0, 2.0]"]),
        # on GPUs launchers may add in another order: close, and other bits
        (dict(exact={"l": 2.0, "bits": "a1"}, device="cuda"), dict(exact={"l": 2.001, "bits": "b2"}, device="cuda"),
         []),
    ],
)  # fmt: skip
def test_two_runs_differ_in_exact_bits_at_the_same_number_of_ranks_and_beyond_a_tolerance_at_any(
    one, other, differences
):
    assert compare(run_of(**one), run_of(**other)) == differences


def test_runs_on_other_corpora_or_parameters_are_not_compared_number_by_number():
    one, other = (run_of(corpus=Corpus.from_text("offline", text), exact={"a": text}) for text in ("aab", "abb"))
    assert len(compare(one, other)) == 1 and compare(one, other)[0].startswith("corpus differs")
    one, other = run_of(parameters={"length": 4}), run_of(parameters={"length": 8})
    assert compare(one, other)[0].startswith("parameters differs")
    assert compare(run_of(4, parameters={"n_ranks": 4}), run_of(2, parameters={"n_ranks": 2})) == []


# Steps and times


def test_the_step_log_is_one_json_line_per_step_and_can_be_read_while_it_grows(tmp_path):
    log = StepLog(ranks_of(), tmp_path / "steps.jsonl")
    log.write(step=0, loss=torch.tensor(0.1))
    log.write(step=1, loss=math.nan)
    assert [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()] == [
        {"step": 0, "loss": float(torch.tensor(0.1))},
        {"step": 1, "loss": "nan"},
    ]


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
