"""The first hour on GPUs, tried on CPU ranks: its records, what fails, what a second start makes."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from manyhands.course.folders import ROOT, SCRIPTS
from manyhands.launch.processes import Ended
from manyhands.tools import gpu_hour
from manyhands.tools.gpu_hour import Hour, Row

WRONG = Row("wrong flags", "--preset nano --train.stepz 3")
BROKEN = Row("a broken test", command="pytest -q -n 0 tests/no_such_test.py")
HOUR = """
import sys
import time
from pathlib import Path
from manyhands.tools.gpu_hour import Hour, Row
if sys.argv[2:]:
    def start(hour, row, command, log, limit_s):  # a stand-in: nothing is trained
        if row.what == "long":
            log.parent.mkdir(parents=True)
            (log.parent / "begun").touch()
            time.sleep(600)
        if row.what in ("wrong flags", "a broken test"):
            raise RuntimeError("ended with status 2: its last line")
        steps = log.parent / "train" / "latest" / "steps.jsonl"
        steps.parent.mkdir(parents=True)
        steps.write_text('{"loss": 2.0, "mfu": null, "memory_gib": 1.0, "tokens_per_s": 10.0}\\n' * 3)
    Hour._start = start
rows = [Row("wrong flags", "--preset nano --train.stepz 3"), Row("a broken test", command="pytest -q no_such_test.py"),
        Row("nano", "--preset nano"), Row("long", "--preset nano --train.steps 100000", gpus=2)]
Hour(Path(sys.argv[1]), rows, Path(sys.argv[1]) / "recorded", "cpu", 2).run()
"""


def hour(folder, rows):
    return Hour(folder, rows, folder / "recorded", "cpu", 2)


def kept(folder):
    return [
        one for path in sorted((folder / "recorded").glob("*.json")) for one in json.loads(path.read_text())["rows"]
    ]


def start_and_kill(folder, begun, *stand_in):
    """Start HOUR, kill it once `begun` is there, and return {row: its result}."""
    environ = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, "-c", HOUR, str(folder), *stand_in]
    first = subprocess.Popen(command, env=environ, start_new_session=True)
    while first.poll() is None and not (folder / "outputs/gpu_hour/runs/long_2" / begun).exists():
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert first.returncode == -signal.SIGKILL
    return {one["what"]: one for one in kept(folder)}


def test_what_ran_before_a_kill_is_kept_and_a_second_start_makes_the_rest_alone(tmp_path, monkeypatch):
    rows = start_and_kill(tmp_path, "begun", "stand-in")
    assert {what: one["why"] for what, one in rows.items()} == {
        "wrong flags": "ended with status 2: its last line", "a broken test": "ended with status 2: its last line",
        "nano": "",
    }  # fmt: skip
    again = hour(tmp_path, [WRONG, BROKEN, Row("nano", "--preset nano")])
    assert again.missing() == [] and again.missing(again=True) == [WRONG, BROKEN]
    monkeypatch.setattr(Hour, "_start", lambda *start: pytest.fail("a row that was there ran again"))
    assert again.run() == 2
    more = hour(tmp_path, [*again.rows, Row("nano, fsdp", "--preset nano --parallel.strategy fsdp", gpus=2)])
    assert [row.what for row in more.missing()] == ["nano, fsdp"]
    assert "Not run: nano, fsdp on 2." in more.page() and "## Failed: 2 of 3" in more.page()


def test_rows_that_time_nothing_run_side_by_side_and_end_together(tmp_path, monkeypatch):
    meeting, ended = threading.Barrier(2, timeout=20), []

    def start(hour, row, command, log, limit_s):
        if row.beside:
            meeting.wait()  # neither goes on alone
        elif hour.missing() != [row]:
            raise RuntimeError("others were not done")
        ended.append(row.what)

    monkeypatch.setattr(Hour, "_start", start)
    monkeypatch.setattr(gpu_hour, "CORES", 0.1)
    rows = [Row("timed", command="bench.py"), *(Row(what, command="a.py", beside=True) for what in "xy")]
    assert hour(tmp_path, rows).run() == 0
    assert sorted(ended[:2]) == ["x", "y"] and ended[2] == "timed"

    def interrupted(hour, row, command, log, limit_s):
        if row.what == "z":
            assert hour.stop.wait(20)
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(Hour, "_start", interrupted)
    rows += [Row(what, command="a.py", beside=True) for what in "az"]
    again = hour(tmp_path, rows)
    with pytest.raises(KeyboardInterrupt):
        again.run()
    assert [row.what for row in hour(tmp_path, rows).missing()] == ["a", "z"]


def test_what_went_well_here_under_other_versions_comes_last_and_stays_in_the_record(tmp_path, monkeypatch):
    rows = [Row("known", command="a.py"), Row("base", command="a.py"), Row("failed", command="a.py"),
            Row("new", command="a.py --from {of}", of="base")]  # fmt: skip
    old = hour(tmp_path, rows[:3])
    old.about = old.about | {"versions": {"torch": "2.11.0"}}
    old.found["test"] = [{"what": row.what, "gpus": 1, "why": "it broke" * (row.what == "failed")} for row in rows[:3]]
    old.write()
    started = []

    def supervise(command, log, **how):
        started.append((log.parent.name, command[-1]))
        log.parent.mkdir(parents=True)
        log.write_text(f"a\nb\nc\n\nsee {tmp_path}/outputs\nlast\n")
        return Ended(0, 1.0, 1)

    monkeypatch.setattr(gpu_hour, "supervise", supervise)
    assert hour(tmp_path, rows).run() == 0
    assert [what for what, _ in started] == ["base_1", "failed_1", "new_1", "known_1"]  # the new row needs "base"
    assert started[2][1] == str(tmp_path / "outputs/gpu_hour/runs/base_1")
    (record,) = (json.loads(path.read_text()) for path in (tmp_path / "recorded").iterdir())
    assert [one["what"] for one in record["before"][0]["rows"]] == ["known", "base", "failed"]
    assert record["rows"][0]["said"] == ["b", "c", "see outputs", "last"]
    assert hour(tmp_path, rows).missing() == []


def test_after_its_time_no_row_of_a_quarter_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(Hour, "_start", lambda *start: pytest.fail("a row began"))
    late = Hour(tmp_path, [WRONG, BROKEN], tmp_path / "recorded", "cpu", 2, seconds=-1)
    assert late.run() == 0 and late.missing() == [WRONG, BROKEN]


@pytest.mark.full
@pytest.mark.ranks
def test_so_it_is_with_real_runs(tmp_path):
    rows = start_and_kill(tmp_path, "train/latest/steps.jsonl")
    assert rows.keys() == {"wrong flags", "a broken test", "nano"}
    assert "stepz" in rows["wrong flags"]["why"] and rows["a broken test"]["why"].startswith("ended with status 4: ")
    assert rows["nano"]["why"] == "" and rows["nano"]["loss"] < 4 and len(rows["nano"]["tokens_per_s"]) == 7
    fsdp = Row("nano, fsdp", "--preset nano --parallel.strategy fsdp", gpus=2, like="nano")
    more = hour(tmp_path, [WRONG, BROKEN, Row("nano", "--preset nano"), fsdp])
    assert more.run() == 2
    assert [one["why"] for one in kept(tmp_path) if one["what"] == "nano, fsdp"] == [""]


@pytest.mark.full
@pytest.mark.ranks
def test_a_killed_rank_ends_all_others_and_a_run_goes_on_on_fewer(tmp_path):
    rows = [Row("killed", "--preset nano", gpus=2, kill=True), Row("on", "--preset nano", gpus=2, on=1)]
    assert hour(tmp_path, rows).run() == 0, (kept(tmp_path),)
    assert {one["what"] for one in kept(tmp_path)} == {"killed", "on"}


@pytest.mark.parametrize("text", [None, "", '{"loss": 2.0, "mf', '{"loss": 2.0}'])
def test_a_row_whose_numbers_cannot_be_read_is_a_failed_one_and_the_next_is_made(tmp_path, monkeypatch, text):
    monkeypatch.setattr(Hour, "_start", lambda *start: None)
    mine = hour(tmp_path, [Row("odd", "--preset nano"), Row("next", command="launch.py 03")])
    if text is not None:
        steps = mine._folder("odd") / "train/latest/steps.jsonl"
        steps.parent.mkdir(parents=True)
        steps.write_text(text)
    assert mine.run() == 1
    assert {one["what"]: bool(one["why"]) for one in kept(tmp_path)} == {"odd": True, "next": False}
    assert "Not run: nothing." in mine.page() and "- **odd**, on 1: " in mine.page()


def test_a_loss_that_is_not_that_of_one_gpu_fails_its_row(tmp_path, monkeypatch):
    monkeypatch.setattr(Hour, "_start", lambda *start: None)
    mine = hour(tmp_path, [Row("one", "--preset nano"), Row("two", "--preset nano", gpus=2, like="one")])
    for row, loss in zip(mine.rows, (2.0, 2.1), strict=True):
        steps = mine._folder(row.what, row.gpus) / "train/latest/steps.jsonl"
        steps.parent.mkdir(parents=True)
        steps.write_text(f'{{"loss": {loss}, "mfu": 0.4, "memory_gib": 1.0, "tokens_per_s": 10.0}}\n' * 3)
    assert mine.run() == 1
    assert "| one | 1 | 10 | 40.0 % | 1.0 | 2.0000 |" in mine.page()
    assert "**two**, on 2: its last loss is 2.1000, and 2.0000 in 'one'" in mine.page()


@pytest.mark.parametrize("rows", [gpu_hour.one_gpu(), gpu_hour.several_gpus(4), gpu_hour.several_gpus(2)])
def test_the_rows_of_an_hour_are_runs_that_exist(rows):
    from manyhands.config.options import read_options

    assert len({(row.what, row.gpus) for row in rows}) == len(rows)
    so_far = {"": True}  # {a row on one GPU: does it keep what a later one goes on from?}
    for row in rows:
        assert row.like in so_far and so_far.get(row.of), row
        so_far |= {row.what: row.keeps or bool(row.command)} if row.gpus == 1 else {}
    for row in rows:
        if row.flags:
            read_options(f"{gpu_hour.MEASURED} {row.flags}".split())
        else:
            program, *words = row.command.split()
            files = [word for word in words if word.endswith(".py")] + [program] * program.endswith(".py")
            if not program.endswith(".py"):
                assert importlib.util.find_spec(program), program
            assert all((ROOT / file).exists() or (SCRIPTS / file).exists() for file in files), files
            assert program != "launch.py" or list(SCRIPTS.glob(f"{words[-1]}_*.py"))
    assert sum(row.limit_s for row in rows) < 3 * 3600
