"""The bench: real rows on a tiny model, the arithmetic on made-up samples, and what fails is said."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import fake_course
import psutil
import pytest
from manyhands.course.lessons import find_lessons
from manyhands.data.corpus import Corpus
from manyhands.tools import bench, bench_trainer
from manyhands.tools.bench_trainer import APART, PLAIN, Crew, Over, Row, all_rows

pytestmark = pytest.mark.ranks

TINY = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 8}
TEXT = "to be, or not to be: that is the question. " * 20
BROKEN = Row("broken", threads=1, parallel={"strategy": "fsdp", "tensor": 3})


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT)
    return path


def row_of(name):
    return next(row for row in all_rows() if row.name == name)


def workers():
    """Living processes of a bench that this process started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "manyhands.tools.bench_trainer" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for(condition, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- real rows


def test_a_run_measures_its_rows_and_says_why_one_is_missing(tmp_path, corpus, monkeypatch, capsys):
    monkeypatch.setattr("manyhands.data.corpus.load_corpus", lambda: Corpus.from_text("test", TEXT))
    monkeypatch.setattr(bench_trainer, "all_rows", lambda: [row_of(PLAIN), row_of("2 ranks"), row_of(APART), BROKEN])
    monkeypatch.setattr(bench_trainer, "measure", lambda *a, inner=bench_trainer.measure: inner(*a, model=TINY))
    monkeypatch.setattr(bench, "start_up", lambda ranks, folder: bench.Number("start-up", 3.0, "s", 10))
    status = bench.main(["--rounds", "1", "--steps", "12", "--output", str(tmp_path / "bench")], root=tmp_path)
    printed = capsys.readouterr().out
    assert status == 1 and not workers()
    assert "broken: not measured: rank 0 of 1: LayoutError" in printed
    content = json.loads((tmp_path / "bench" / "bench.json").read_text())
    plain, two, apart, broken = content["rows"]
    assert plain["ratio"] == [] and two["tokens_per_s"][0] > 0 and len(two["ratio"]) == 1
    assert two["scaling"] == [two["tokens_per_s"][0] / apart["tokens_per_s"][0]]
    assert broken["tokens_per_s"] == [] and "LayoutError" in broken["error"]
    assert [number["aim"] for number in content["numbers"]] == [1.3, 0.9, 10, 10]
    assert "load before" in content["metadata"]
    table = (tmp_path / "bench" / "bench.txt").read_text()
    assert "2 ranks" in table and "at least 1.3" in table
    # the trainer's own report ran: a line per ten steps in the file of the run
    lines = next((tmp_path / "bench/runs/trainer/row1").glob("train/*/steps.jsonl")).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines[:3]] == [1, 10, 20]


def take_turns(ranks, row, corpus_path):
    """What a process of `row` answers to two bursts of 2 steps; on ranks of a pool."""
    import torch.distributed as dist
    from manyhands.config.options import model_config

    commands, answers = [2, 2], []

    def receive():
        if not commands:
            raise EOFError
        return commands.pop(0)

    pipe = SimpleNamespace(recv=receive, send=answers.append, poll=lambda: False)
    corpus, options = Corpus.from_text("test", corpus_path.read_text()), bench_trainer.options_of(row, TINY)
    config, each = model_config(options, len(corpus.vocab)), bench_trainer.turns(pipe, dist.barrier)
    with pytest.raises(Over):
        bench_trainer.held_run(replace(ranks, lesson="train"), options, config, corpus, each)
    return answers


def test_every_row_of_two_ranks_trains(pool, corpus, tmp_path):
    (tmp_path / "outputs").mkdir()
    for row in all_rows():
        if row.ranks == 2 and not row.compiled:  # test_strategies compiles
            environ = {"MANYHANDS_OUTPUTS": str(tmp_path / "outputs")}
            for answers in pool.run(2, take_turns, row, corpus, environ=environ):
                assert len(answers) == 2 and min(answers) > 0, row.name


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("a process is killed", "rank 0 of 1, world 1 ended with status -9"),
        ("it is silent", "rank 0 of 1, world 0 and rank 0 of 1, world 1 did not answer within 0.2 s"),
    ],
)
def test_a_row_that_fails_says_how_and_leaves_nobody(tmp_path, corpus, how, sentence):
    crew = Crew(row_of(APART), TINY, corpus, tmp_path / "crew", 1)
    try:
        wait_for(lambda: len(workers()) == 2)  # a process has no command line for a moment while it starts
        if how == "a process is killed":
            psutil.Process(crew.pids[1]).kill()
        with pytest.raises(RuntimeError, match=sentence):
            crew.burst(1, timeout_s=0.2 if how == "it is silent" else 120)
        assert not workers()
    finally:
        crew.end()


def test_workers_end_with_a_bench_that_was_killed_during_a_burst(tmp_path, corpus):
    crew = Crew(row_of(PLAIN), TINY, corpus, tmp_path / "crew", 1)
    (_, process, pipe), crew.members = crew.members[0], []
    try:
        pipe.send(10**9)
        log = tmp_path / "crew" / "world0-rank0.log"
        wait_for(lambda: b"step 50 " in log.read_bytes())
        assert process.poll() is None
        pipe.close()  # as the system does when a process is killed
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()


def test_a_start_is_read_from_the_report_of_a_real_run_and_one_that_fails_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("MANYHANDS_SHAKESPEARE_URL", "")
    earlier = tmp_path / "1-ranks" / "train" / "0001" / "steps.jsonl"
    earlier.parent.mkdir(parents=True)
    earlier.write_text('{"start_up_s": 0.0}\n')  # of an earlier bench, whose folder is used again
    number = bench.start_up(1, tmp_path, TINY)
    assert number.value is not None and 0.5 < number.value < 180, number.note
    number = bench.start_up(1, tmp_path / "bad", {**TINY, "n_head": 3})
    assert number.value is None and "ended with status 2" in number.note and "train.log" in number.note


def test_a_lesson_is_timed_and_its_first_answer_is_read_from_the_executed_notebook(tmp_path, monkeypatch):
    measured = {"sizes_b": [1024, 2**24], "all_reduce_s": {"our ring": [1.0, 3.0], "gloo": [1.0, 2.0]}}
    body = f"write_metrics(42, 4.174, measured={measured})\n"
    fake_course.write_lesson(tmp_path, "02_collectives", body)
    fake_course.write_lesson(tmp_path, "04_raises", fake_course.RAISES)
    first, seconds, memory, ring, *failed = bench.lesson_numbers(find_lessons(tmp_path), tmp_path / "runs", 120)
    assert {(n.value, n.verdict) for n in failed} == {(None, "ValueError: rank 1 has 3 numbers, the others 4 (cell 3)")}
    assert seconds.value > 0 and seconds.aim == 90 and memory.unit == "GiB"
    assert (ring.value, ring.verdict) == (1.5, "within")
    assert first.value is None and first.verdict == "not measured"  # this one has no ranks


def test_the_first_answer_is_timed_from_the_first_cell_on(tmp_path):
    def cell(source, start, end):
        times = {"start_time": f"2026-01-01T00:00:{start}+00:00", "end_time": f"2026-01-01T00:00:{end}+00:00"}
        return {"source": [source], "metadata": {"papermill": times}}

    cells = [
        {"source": ["text"], "metadata": {}},
        cell("import os", 10, 12),
        cell("%%ranks\nsay()", 13, 17),
        cell("%%ranks", 18, 30),
    ]
    path = tmp_path / "x.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    assert bench.seconds_to_first_output(path) == 7
    assert bench.seconds_to_first_output(tmp_path / "none.ipynb") is None


# --- the burst, and the arithmetic


def test_a_burst_times_its_steps_and_not_the_first(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(bench_trainer.time, "perf_counter", lambda: float(next(clock)))
    done, answers, commands = [], [], [3, 5]

    def receive():
        done.append("told")
        if not commands:
            raise EOFError
        return commands.pop(0)

    pipe = SimpleNamespace(recv=receive, send=answers.append, poll=lambda: False)
    for _ in bench_trainer.turns(pipe, lambda: done.append("barrier")):
        next(clock)  # a step takes a second
        done.append("step")
    first = ["told", "step", "barrier", *3 * ["step"], "barrier"]
    assert done == [*first, "told", "step", "barrier", *5 * ["step"], "barrier", "told"]
    assert answers == [4.0, 6.0]  # a reading of this clock takes one too


@pytest.mark.parametrize(("name", "tokens_per_s"), [("2 ranks", 2 * 7680 / 4), (APART, 7680 / 2 + 7680 / 4)])
def test_worlds_add_up_and_the_slowest_rank_of_each_counts(name, tokens_per_s, monkeypatch):
    monkeypatch.setattr(Crew, "__init__", lambda crew: None)
    crew = Crew()
    crew.row, crew._ask = row_of(name), lambda steps, timeout_s: [2.0, 4.0]
    crew.tokens_per_step = 12 * crew.row.ranks * 64
    assert crew.burst(10, 60) == tokens_per_s


class FakeCrew:
    """A row whose bursts have these speeds; None: it fails."""

    def __init__(self, *speeds):
        self.speeds = iter(speeds)

    def burst(self, steps, timeout_s):
        speed = next(self.speeds)
        if speed is None:
            raise RuntimeError("rank 1 of 2: no more")
        return speed


def measured(rounds, **speeds):
    """The rows of these names after so many rounds."""
    rows = [row_of(name.replace("_", " ").replace(" compiled", ", compiled")) for name in speeds]
    crews = {row.name: FakeCrew(*found) for row, found in zip(rows, speeds.values(), strict=True)}
    for _ in range(rounds):
        bench_trainer.one_round(crews, rows, 40)
    return rows


def test_a_ratio_is_that_of_neighbours_in_time():
    """The plain loop runs before each row, here at 100, 200 and 400 tokens/s while the machine gets faster."""
    plain = [100.0, 100, 100, 200, 200, 200, 400, 400, 400]
    speeds = {"plain_loop": plain, "2_ranks": [130.0, 280, 480], "2_that_never_communicate": [135.0, 280, 500]}
    rows = bench_trainer.with_scaling(measured(3, **speeds))
    loop, two, apart = rows
    assert loop.ratio == [] and loop.tokens_per_s == [100, 200, 400]
    assert two.ratio == [1.3, 1.4, 1.2]  # of the means it would be 297 / 233
    assert two.scaling == [130 / 135, 1.0, 480 / 500] and apart.scaling == []
    ratio, scaling = bench.trainer_numbers(rows)
    assert (ratio.value, ratio.verdict, ratio.aim) == (1.3, "within", 1.3)
    # beside two processes that share the machine as they do, not beside one that has it for itself
    assert (scaling.value, scaling.verdict) == (130 / 135, "within")


def test_a_compiled_row_is_compared_with_the_compiled_loop():
    speeds = {
        "plain_loop": [100.0] * 2,
        "plain_loop_compiled": [125.0] * 2,
        "2_ranks": [130.0],
        "2_ranks_compiled": [150.0],
    }
    *_, two, compiled = measured(1, **speeds)
    assert two.ratio == [1.3] and compiled.ratio == [1.2]


def test_a_row_that_fails_has_no_more_turns_and_the_others_go_on():
    loop, two = measured(2, plain_loop=[100.0] * 4, **{"2_ranks": [130.0, None]})
    assert two.error == "rank 1 of 2: no more" and two.ratio == [1.3] and loop.tokens_per_s == [100.0, 100.0]


def test_what_is_compared_with_a_loop_that_failed_is_missing():
    rows = measured(1, plain_loop=[None], **{"2_ranks": [130.0]})
    assert rows[1].tokens_per_s == [130.0]
    ratio, _ = bench.trainer_numbers(rows)
    assert ratio.value is None and ratio.verdict == "what it is compared with has failed"
    bench_trainer.table(rows)  # and it can be shown


@pytest.mark.parametrize(
    "flags, parts",
    [
        ([], (True, True)),
        (["--trainer"], (False, True)),
        (["--lesson", "03"], (True, False)),
        (["--rounds", "2"], (False, True)),
        (["--lessons", "--trainer"], (True, True)),
    ],
)
def test_both_parts_run_unless_one_is_named(flags, parts):
    options = bench.parsed(flags)
    assert (options.lessons, options.trainer) == parts
    assert (options.rounds, options.timeout) == (2 if "--rounds" in flags else 5, 600)
