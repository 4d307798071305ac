"""The trainer's part of the bench: real rows on a tiny model, the arithmetic on made-up bursts, and what fails is said."""

import json
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
from manyhands import bench
from manyhands.bench import compared_runs, comparison, start_up, trainer, trainer_report, worker
from manyhands.bench.comparison import Burst
from manyhands.bench.crew import Crew, CrewError
from manyhands.bench.other_load import Others
from manyhands.config.options import ModelOptions, ParallelOptions

pytestmark = pytest.mark.ranks

TINY = ModelOptions(n_layer=2, n_head=2, n_embd=8, block_size=8)
TEXT = "to be, or not to be: that is the question. " * 20
BROKEN = compared_runs.Row("broken", threads=1, parallel=ParallelOptions(strategy="fsdp", tensor=3))


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT)
    return "test", str(path)


def job_of(row, corpus, timeout_s=120.0):
    return compared_runs.Job(row.kind, 0, 1, 1, "", corpus, compared_runs.options_of(row, TINY, timeout_s))


def workers():
    """Living processes of a bench that this process started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "manyhands.bench.worker" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
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
    monkeypatch.setattr(trainer, "write_corpus", lambda folder: corpus)
    monkeypatch.setattr(trainer, "PATIENCE_S", 0)
    output, chosen = (
        tmp_path / "bench",
        (compared_runs.PLAIN, compared_runs.ONE_THREAD, compared_runs.TWO, BROKEN),
    )
    status = trainer.measure_trainer(output, tmp_path, rounds=1, steps=12, rows=chosen, model=TINY, starts=())
    printed = capsys.readouterr().out
    assert status == 1 and not workers()
    assert "broken: not measured" in printed and "LayoutError" in printed
    content = json.loads((output / "trainer.json").read_text())
    plain, one, two, broken = content["rows"]
    assert plain["ratio"] is None and two["tokens_per_s"]["median"] > 0 and two["mfu"] > 0
    assert two["ratio"]["median"] == pytest.approx(two["ratio"]["least"])  # there was one round
    assert two["scaling"]["median"] == pytest.approx(two["tokens_per_s"]["median"] / 2 / one["tokens_per_s"]["median"])
    assert all(row["peak_gib"] > 0.05 for row in (plain, one, two))
    assert broken["tokens_per_s"] is None and "LayoutError" in broken["error"]
    assert [number["aim"] for number in content["numbers"]] == [1.3, 0.9]
    assert "quiet:" in content["facts"]["quiet"] and content["facts"]["peak_flop_per_s"] > 1e8
    assert (output / "trainer.svg").read_text().count("<!-- 2 ranks -->") == 1
    # the trainer's own report ran: a line per ten steps in the file of the run
    lines = next((output / "runs" / "trainer").glob("row3/train/*/steps.jsonl")).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines[:3]] == [1, 10, 20]


def take_turns(ranks, row, corpus_of_row):
    """What a worker of `row` answers to two bursts of 2 steps; on ranks of a pool."""
    import torch.distributed as dist

    commands, answers = [2, 2], []

    def receive():
        if not commands:
            raise EOFError
        return commands.pop(0)

    pipe = SimpleNamespace(recv=receive, send=answers.append, poll=lambda: False)
    job = job_of(row, corpus_of_row)
    with pytest.raises(worker.Over):
        worker.run_trainer(replace(ranks, lesson="train"), job, worker.turns(pipe, dist.barrier))
    return answers


def test_every_row_of_two_ranks_trains(pool, corpus, tmp_path):
    (tmp_path / "outputs").mkdir()
    for row in compared_runs.ROWS:
        if row.ranks == 2 and not row.compiled:  # test_strategies compiles
            environ = {"MANYHANDS_OUTPUTS": str(tmp_path / "outputs")}
            for answers in pool.run(2, take_turns, row, corpus, environ=environ):
                assert [sorted(answer) for answer in answers] == 2 * [["peak_gib", "seconds"]], row.name


def test_a_crew_whose_rank_is_killed_says_so_and_leaves_nobody(tmp_path, corpus):
    crew = Crew(compared_runs.APART, job_of(compared_runs.APART, corpus), tmp_path / "crew")
    try:
        wait_for(lambda: len(workers()) == 2)  # a process has no command line for a moment while it starts
        psutil.Process(crew.pids[1]).kill()
        with pytest.raises(CrewError, match="rank 0 of 1, world 1 (ended|has ended)"):
            crew.burst(1, timeout_s=120)
        assert not workers()
    finally:
        crew.end()


def test_a_crew_that_is_silent_is_ended_after_the_time_out(tmp_path, corpus):
    crew = Crew(compared_runs.PLAIN, job_of(compared_runs.PLAIN, corpus), tmp_path / "crew")
    try:
        with pytest.raises(CrewError, match="rank 0 of 1 did not answer within 0.2 s"):
            crew.burst(10**9, timeout_s=0.2)
        assert not workers()
    finally:
        crew.end()


def test_workers_end_with_a_bench_that_was_killed_during_a_burst(tmp_path, corpus):
    crew = Crew(compared_runs.PLAIN, job_of(compared_runs.PLAIN, corpus), tmp_path / "crew")
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


def test_a_start_is_read_from_the_report_of_a_real_run(tmp_path, corpus, monkeypatch):
    monkeypatch.setenv("MANYHANDS_SHAKESPEARE_URL", "")
    number = start_up.measure(start_up.STARTS[0], tmp_path, TINY)
    assert number.value is not None and 0.5 < number.value < 180, number.note


def test_a_run_that_ends_badly_is_no_start_up(tmp_path):
    number = start_up.measure(start_up.STARTS[0], tmp_path, replace(TINY, n_head=3))
    assert number.value is None and "ended with status 2" in number.note and "train.log" in number.note


# --- the burst


def test_a_burst_times_its_steps_and_not_the_first(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(worker.time, "perf_counter", lambda: float(next(clock)))
    done, answers, commands = [], [], [3, 5]

    def receive():
        done.append("told")
        if not commands:
            raise EOFError
        return commands.pop(0)

    pipe = SimpleNamespace(recv=receive, send=answers.append, poll=lambda: False)
    for _ in worker.turns(pipe, lambda: done.append("barrier")):
        next(clock)  # a step takes a second
        done.append("step")
    first = ["told", "step", "barrier", *3 * ["step"], "barrier"]
    assert done == [*first, "told", "step", "barrier", *5 * ["step"], "barrier", "told"]
    assert [answer["seconds"] for answer in answers] == [4.0, 6.0]  # a reading of this clock takes one too


def test_worlds_add_up_and_the_slowest_rank_of_each_counts():
    def summed(row, seconds):
        crew = SimpleNamespace(row=row, job=SimpleNamespace(options=compared_runs.options_of(row)))
        return Crew._summed(crew, 10, [{"seconds": s, "peak_gib": s / 10} for s in seconds])

    tokens = 10 * 12 * 64
    assert summed(compared_runs.TWO, [2.0, 4.0]) == {"tokens_per_s": 2 * tokens / 4, "peak_gib": 0.4}
    assert summed(compared_runs.APART, [2.0, 4.0]) == {
        "tokens_per_s": tokens / 2 + tokens / 4,
        "peak_gib": 0.4,
    }


def test_what_others_use_is_not_what_we_use():
    def work(seconds):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    began = time.perf_counter()
    with Others([]) as others:
        work(1.0)
    wall_s = time.perf_counter() - began  # not less than the seconds that `others` divides by
    ours = others.cores
    with Others([]) as others:
        child = os.fork()
        if not child:
            work(1.0)
            os._exit(0)
        os.waitpid(child, 0)
    assert others.cores > 0.1 and ours < os.cpu_count() - 0.6 / wall_s


# --- the arithmetic


def made_up_rounds():
    """Plain loops at 100, 200 and 400 tokens/s while the machine gets faster; the rows keep their ratios, nearly."""
    speeds = (100.0, 200.0, 400.0)
    ratios = {
        compared_runs.PLAIN: (1, 1, 1),
        compared_runs.ONE_THREAD: (0.7, 0.7, 0.7),
        compared_runs.TWO: (1.3, 1.4, 1.2),
        compared_runs.APART: (1.35, 1.4, 1.25),
    }
    return [
        {row: Burst(speed * ratios[row][i], 0.5 + i, 0.01 * (i + 1), plain=speed) for row in ratios}
        for i, speed in enumerate(speeds)
    ]


def test_a_ratio_is_that_of_neighbours_in_time():
    chosen = (compared_runs.PLAIN, compared_runs.ONE_THREAD, compared_runs.TWO, compared_runs.APART)
    found = comparison.compare(chosen, made_up_rounds(), {}, 1e6, 1000)
    two = found[compared_runs.TWO]
    # of the medians it would be 280 / 200 too; of the means 293 / 233
    assert two.ratio == comparison.Range(1.3, 1.2, 1.4)
    assert two.tokens_per_s == comparison.Range(280.0, 130.0, 480.0)
    assert two.scaling.median == pytest.approx(1.3 / 1.4) and two.scaling.least == pytest.approx(1.2 / 1.4)
    assert two.mfu == pytest.approx(280 * 1000 / 1e6) and two.peak_gib == 2.5 and two.others == 0.03
    assert found[compared_runs.PLAIN].ratio is None and found[compared_runs.ONE_THREAD].scaling is None
    ratio, scaling = comparison.numbers(found)
    assert (ratio.value, ratio.within, ratio.aim) == (1.3, True, 1.3)
    # beside two processes that share the machine as they do, not beside one that has it for itself
    assert (scaling.value, scaling.within, scaling.aim) == (pytest.approx(1.3 / 1.35), True, 0.9)
    assert found.loud == 0 and trainer_report.quiet(found).startswith("The machine was quiet")


def test_what_a_failed_row_is_needed_for_is_missing_too():
    failed = [
        {row: b for row, b in measured.items() if row in (compared_runs.PLAIN, compared_runs.TWO)}
        for measured in made_up_rounds()
    ]
    chosen = (compared_runs.PLAIN, compared_runs.ONE_THREAD, compared_runs.TWO)
    found = comparison.compare(chosen, failed, {compared_runs.ONE_THREAD: "it fell asleep"}, None, 1000)
    assert found[compared_runs.ONE_THREAD].error == "it fell asleep"
    assert (
        found[compared_runs.TWO].ratio.median == 1.3
        and found[compared_runs.TWO].scaling is None
        and found[compared_runs.TWO].mfu is None
    )
    ratio, scaling = comparison.numbers(found)
    assert ratio.within and scaling.value is None and "failed" in scaling.note


def test_a_row_without_the_plain_loop_has_speed_and_no_ratio():
    rounds = [{compared_runs.TWO: Burst(130.0, 0.5, 0.0, plain=None)}]
    found = comparison.compare(
        (compared_runs.PLAIN, compared_runs.TWO), rounds, {compared_runs.PLAIN: "no torch"}, 1e6, 1000
    )
    assert found[compared_runs.TWO].tokens_per_s.median == 130.0 and found[compared_runs.TWO].ratio is None
    assert comparison.numbers(found)[0].value is None
    trainer_report.plot(found)  # and it can be drawn


def test_a_loud_machine_is_said():
    rounds = [{compared_runs.PLAIN: Burst(100.0, 0.5, 1.25)}, {compared_runs.PLAIN: Burst(100.0, 0.5, 0.0)}]
    found = comparison.compare((compared_runs.PLAIN,), rounds, {}, 1e6, 1000)
    assert "NOT quiet: others used more than 0.1 cores during 1 of 2 bursts, up to 1.2" in trainer_report.quiet(found)


# --- bursts that are done again


class FakeCrew:
    """Bursts of `row` at these speeds; others use so many cores meanwhile."""

    pids = ()

    def __init__(self, speeds):
        self.speeds = iter(speeds)

    def burst(self, steps, timeout_s):
        speed = next(self.speeds)
        if speed is None:
            raise CrewError("rank 1 of 2: RuntimeError: no more")
        return {"tokens_per_s": speed, "peak_gib": 0.1}


def fake_bursts(crews, loads, monkeypatch):
    load = iter(loads)

    class FakeOthers(Others):
        def __exit__(self, *_):
            self.cores = next(load)

    monkeypatch.setattr(trainer, "Others", FakeOthers)
    bursts = trainer.Bursts.__new__(trainer.Bursts)
    bursts.rows, bursts.burst_s, bursts.patience_s = (compared_runs.PLAIN, compared_runs.TWO), 10, 60
    bursts.crews, bursts.failures, bursts.flop_per_s = crews, {}, None
    return bursts


def test_a_loud_burst_is_done_again_and_the_quietest_counts(monkeypatch):
    crews = {
        compared_runs.PLAIN: FakeCrew([100.0, 110.0]),
        compared_runs.TWO: FakeCrew([1.0, 2.0, 3.0, 4.0, 5.0]),
    }
    bursts = fake_bursts(crews, [0.0, 0.0, 0.9, 0.3, 0.5, 0.4], monkeypatch)
    measured = bursts.round(0, 1, 40)
    assert measured[compared_runs.TWO] == Burst(2.0, 0.1, 0.3, plain=110.0)  # four attempts, none of them quiet
    assert measured[compared_runs.PLAIN].tokens_per_s == 100.0


def test_a_compiled_row_is_compared_with_the_compiled_loop(monkeypatch):
    crews = {
        compared_runs.PLAIN: FakeCrew([100.0] * 2),
        compared_runs.PLAIN_COMPILED: FakeCrew([125.0] * 2),
        compared_runs.TWO: FakeCrew([130.0]),
        compared_runs.TWO_COMPILED: FakeCrew([150.0]),
    }
    bursts = fake_bursts(crews, [0.0] * 6, monkeypatch)
    bursts.rows = tuple(crews)
    measured = bursts.round(0, 1, 40)
    found = comparison.compare(bursts.rows, [measured], {}, None, 1)
    assert found[compared_runs.TWO].ratio.median == 1.3
    assert found[compared_runs.TWO_COMPILED].ratio.median == 1.2


def test_a_row_that_fails_has_no_more_turns_and_the_others_go_on(monkeypatch):
    crews = {compared_runs.PLAIN: FakeCrew([100.0] * 4), compared_runs.TWO: FakeCrew([130.0, None])}
    bursts = fake_bursts(crews, [0.0] * 20, monkeypatch)
    rounds = [bursts.round(i, 2, 40) for i in range(2)]
    assert [sorted(row.name for row in measured) for measured in rounds] == [
        sorted([compared_runs.PLAIN.name, compared_runs.TWO.name]),
        [compared_runs.PLAIN.name],
    ]
    found = comparison.compare((compared_runs.PLAIN, compared_runs.TWO), rounds, bursts.failures, 1e6, 1)
    assert "no more" in found[compared_runs.TWO].error and found[compared_runs.TWO].tokens_per_s is None


# --- the command


@pytest.mark.parametrize(
    "flags, parts",
    [
        ([], (True, True)),
        (["--trainer"], (False, True)),
        (["--lessons"], (True, False)),
        (["--lesson", "03"], (True, False)),
        (["--starts", "0"], (True, False)),
        (["--rounds", "2"], (False, True)),
        (["--lessons", "--trainer"], (True, True)),
    ],
)
def test_both_parts_run_unless_one_is_named(flags, parts):
    options = bench._parsed(flags)
    assert (options.lessons, options.trainer) == parts
    assert (options.rounds, options.timeout) == (2 if "--rounds" in flags else 5, 600)
