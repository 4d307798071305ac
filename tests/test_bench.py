"""The bench: a real round, the arithmetic on made-up samples, and what fails is said."""

import json
from dataclasses import asdict

import psutil
import pytest
from manyhands.config.options import read_options
from manyhands.data.corpus import load_corpus
from manyhands.tools import bench, notebook_bench
from manyhands.tools.bench import APART, PLAIN, Row, all_rows

pytestmark = pytest.mark.ranks

TRAIN = """
import json, sys
exec(open("configurator.py").read())
json.dump([sys.argv[1:], len(open("data/corpus/train.bin", "rb").read())], open("seen.json", "w"))
for step in range(8):
    print(f"iter {step}: loss 4.1000, time {9000 if step == 0 else 20.0:.2f}ms, mfu 0.10%")
sys.exit(started)
"""


def row_of(name):
    return next(row for row in [*all_rows(), *bench.switch_rows("cpu")] if row.name == name)


@pytest.mark.full
def test_a_round_measures_its_rows_and_says_why_one_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MANYHANDS_SHAKESPEARE_URL", "")
    rows = [row_of(PLAIN), row_of("2 ranks"), row_of(APART), Row("broken", flags=("--parallel.tensor=3",))]
    monkeypatch.setattr(bench, "all_rows", lambda: rows)
    monkeypatch.setattr(bench, "LINE_STEPS", 2)
    before = set(psutil.Process().children(recursive=True))
    status = bench.main(["--only=trainer", "--rounds=1", "--steps=6", f"--output={tmp_path / 'bench'}"], root=tmp_path)
    assert status == 1 and set(psutil.Process().children(recursive=True)) <= before
    assert "broken: not measured: it ended with status 2; see " in capsys.readouterr().out
    content = json.loads((tmp_path / "bench" / "bench.json").read_text())
    plain, two, apart, broken = content["rows"]
    assert plain["ratio"] == [] and two["ratio"] == [two["tokens_per_s"][0] / plain["tokens_per_s"][0]]
    assert two["scaling"] == [two["tokens_per_s"][0] / apart["tokens_per_s"][0]]
    assert broken["tokens_per_s"] == [] and "ended with status 2" in broken["error"]
    assert [number["aim"] for number in content["numbers"]] == [1.3, 0.9, 10]
    assert 0.5 < content["numbers"][-1]["value"] == two["start_up_s"][0]
    assert "load before" in content["metadata"]
    table = (tmp_path / "bench" / "bench.txt").read_text()
    assert "2 ranks" in table and "at least 1.3" in table
    # two worlds of one process each, and the same global batch for each process
    logs = {path.parent.name: path.read_text() for path in (tmp_path / "bench/runs/trainer/row2").rglob("log.txt")}
    assert logs.keys() == {"world0", "world1"}


@pytest.mark.parametrize("only", ["trainer", "switches", "notebook"])
def test_each_part_alone_ends_with_its_table(tmp_path, monkeypatch, only):
    monkeypatch.setattr(bench, "take_turn", lambda row, folder, steps: row.tokens_per_s.append(1.0))
    ways = [{"way": "notebook", "version": "1", "why": "not here"}]
    monkeypatch.setattr(notebook_bench, "all_measured", lambda: ways)
    monkeypatch.setattr(notebook_bench, "table", lambda ways: [way["way"] for way in ways])
    bench.main([f"--only={only}", "--rounds=1", f"--output={tmp_path}"], root=tmp_path)
    assert {"trainer": "2 ranks"}.get(only, bench.PLAIN_SWITCHES if only == "switches" else only) in (
        tmp_path / "bench.txt"
    ).read_text()


def reporting(monkeypatch, reports):
    """Rows whose turns report these tokens per second, turn by turn and world by world; None: the turn fails."""
    given = {name: iter(turns) for name, turns in reports.items()}

    def run_world(row, folder, steps):
        speed = next(given[row.name])
        if speed is None:
            raise RuntimeError("it ended with status 1")
        return [{"tokens_per_s": n, "start_up_s": 3.0} for n in (1.0, 2.0, *([speed] * 3), 10**6)]

    monkeypatch.setattr(bench, "run_world", run_world)
    return [row_of(name) for name in reports]


def test_a_ratio_is_that_of_one_round(monkeypatch, tmp_path):
    """The machine gets faster from round to round. What warms up, and a line that is far off, do not count."""
    reports = {PLAIN: [100.0, 200, 400], "2 ranks": [130.0, 280, 480], APART: [67.5, 67.5, 140, 140, 250, 250]}
    rows = reporting(monkeypatch, reports)
    plain, two, apart = bench.measure(tmp_path, 3, 100, rows)
    assert plain.ratio == [] and plain.tokens_per_s == [100, 200, 400]
    assert two.ratio == [1.3, 1.4, 1.2]  # of the means it would be 297 / 233
    assert apart.tokens_per_s == [135, 280, 500], "worlds add up"
    assert two.scaling == [130 / 135, 1.0, 480 / 500] and apart.scaling == []
    ratio, scaling, start_up = bench.trainer_numbers(rows)
    assert (ratio.value, ratio.verdict, ratio.aim) == (1.3, "within", 1.3)
    # beside two processes that share the machine as they do, not beside one that has it for itself
    assert (scaling.value, scaling.verdict) == (130 / 135, "within")
    assert (start_up.value, start_up.unit, start_up.verdict) == (3.0, "s", "within")
    # a compiled row is compared with the compiled loop
    reports = {PLAIN: [100.0], f"{PLAIN}, compiled": [125.0], "2 ranks": [130.0], "2 ranks, compiled": [150.0]}
    *_, two, compiled = bench.measure(tmp_path, 1, 100, reporting(monkeypatch, reports))
    assert two.ratio == [1.3] and compiled.ratio == [1.2]
    # a row that fails has no more turns, and what is compared with it is missing
    rows = reporting(monkeypatch, {PLAIN: [None], "2 ranks": [130.0, 260.0]})
    loop, two = bench.measure(tmp_path, 2, 100, rows)
    assert loop.error == "it ended with status 1" and two.tokens_per_s == [130.0, 260.0] and two.ratio == []
    ratio, _, _ = bench.trainer_numbers(rows)
    assert ratio.value is None and ratio.verdict == "what it is compared with has failed"
    bench.trainer_table(rows)  # and it can be shown


def test_each_switch_is_held_against_all_of_them_on(monkeypatch, tmp_path):
    reports = {bench.PLAIN_SWITCHES: [400.0, 500], "not compiled": [200.0, 400]}
    on, off = bench.measure(tmp_path, 2, 100, reporting(monkeypatch, reports))
    assert on.ratio == [] and off.ratio == [0.5, 0.8]
    for kind, model in (("cuda", "gpt2"), ("cpu", "nano")):
        first, *others = (read_options(list(row.flags)) for row in bench.switch_rows(kind))
        assert first.preset == model and first.train.device == kind
        changed = [[n for n, v in asdict(one.train).items() if v != getattr(first.train, n)] for one in others]
        assert all(len(names) == 1 for names in changed), "each row has one switch of its own"
        assert len({names[0] for names in changed}) == len(bench.SWITCHES)


def test_a_clone_of_nanogpt_runs_on_the_same_sizes_and_its_steps_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "LINE_STEPS", 2)
    clone = tmp_path / "nanogpt"
    clone.mkdir()
    (clone / "train.py").write_text(TRAIN)
    (clone / "configurator.py").write_text("started = 0\n")
    (theirs,) = bench.reference_rows(clone)
    lines = bench.run_world(theirs, tmp_path / "a", 7)
    assert [line["tokens_per_s"] for line in lines] == [pytest.approx(12 * 64 / 0.02)] * 3
    (seen,) = (tmp_path / "a").rglob("seen.json")
    flags, size = json.loads(seen.read_text())
    assert {"--n_layer=4", "--n_embd=128", "--block_size=64", "--batch_size=12", "--device=cpu"} <= set(flags)
    assert size == 2 * len(load_corpus().train_ids)
    (clone / "configurator.py").write_text("started = 3\n")
    with pytest.raises(RuntimeError, match="it ended with status 3"):
        bench.run_world(theirs, tmp_path / "c", 7)
    two, gpt = Row("2 ranks", 2, tokens_per_s=[150.0, 250.0]), Row(bench.NANOGPT, tokens_per_s=[100.0, 200.0])
    (number,) = [n for n in bench.trainer_numbers(bench.compared([two, gpt])) if "nanoGPT" in n.what]
    assert (number.value, number.aim, number.verdict) == (1.375, 1.25, "within")


def test_the_page_that_compares_notebooks_shows_the_recorded_run(root):
    record = json.loads((root / "assets/recorded/notebook_compared.json").read_text("utf-8"))
    assert {row["way"] for row in record["ways"]} == notebook_bench.WAYS.keys()
    page = (root / "assets/site/notebook_compared.md").read_text("utf-8")
    assert "\n".join(notebook_bench.table(record["ways"])) in page
    for row in record["ways"]:
        assert row["version"] in page


@pytest.mark.full
def test_ranks_of_a_notebook_are_measured_and_what_is_not_installed_is_left_out(tmp_path, monkeypatch, capsys):
    ours = notebook_bench.WAYS["Many Hands"]
    missing = notebook_bench.Way("no-such-package", (), "", "", "")
    monkeypatch.setattr(notebook_bench, "WAYS", {"Many Hands": ours, "another": missing})
    monkeypatch.setattr(notebook_bench, "OLD_S", 1)
    before = set(psutil.Process().children(recursive=True))
    assert bench.main(["--only=notebook", f"--output={tmp_path}"], root=tmp_path) == 0
    assert set(psutil.Process().children(recursive=True)) <= before
    (row,) = json.loads((tmp_path / "bench.json").read_text())["ways"]
    assert row.keys() - {"way", "version"} == notebook_bench.ROWS.keys()
    assert row["after"] == "usable" and 0 < row["stop_s"] < 30 and row["processes"] > 4
    assert f"| the ranks after that | {row['after']} |" in capsys.readouterr().out
