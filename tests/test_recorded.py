"""A run on GPUs becomes a file that says on what it was made, and a lesson shows it beside its own numbers."""

import json

import pytest
from manyhands.course import folders
from manyhands.course.lessons import find_lessons
from manyhands.launch import metrics as metrics_module
from manyhands.launch import recorded_runs
from manyhands.launch.processes import Ended
from manyhands.tools.lesson_run import Outcome, Run
from manyhands.tools.preflight import LessonResult, export_recorded
from rank_pool import ranks_of


def metrics(device="cuda", world_size=4, **changes):
    """The content of a metrics.json."""
    return {
        "lesson": "03_data_parallel",
        "launcher": "torchrun",
        "world_size": world_size,
        "device": device,
        "backend": "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        "torch": "2.13.0",
        "python": "3.11.7",
        "corpus": {"name": "shakespeare"},
        "parameters": {"steps": 300},
        "exact": {"bytes": 3_266_820, "losses": [4.17, 3.9]},
        "close": {},
        "measured": {"step_s": 0.0123, "times": {"ddp": 2.5}},
        "conditions": {
            "hardware": f"{world_size} x NVIDIA H200",
            "versions": {"torch": "2.13.0", "cuda": "12.8", "nccl": "2.27.3", "python": "3.11.7"},
            "commit": "1a2b3c4",
            "date": "2026-11-21",
            "command": "python -m torch.distributed.run --nproc-per-node 4 scripts/03_data_parallel.py",
        },
    } | changes  # fmt: skip


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """command(content, *words): (status, what it said) of the command for a run of lesson 03 with this metrics.json."""
    monkeypatch.setattr(recorded_runs, "RECORDED", tmp_path / "to")
    monkeypatch.setenv("MANYHANDS_OUTPUTS", str(tmp_path))

    def call(content, *words):
        latest = tmp_path / "03_data_parallel" / "latest"
        latest.mkdir(parents=True, exist_ok=True)
        (latest / "metrics.json").write_text(json.dumps(content))
        status = recorded_runs.main(["03", *words])
        return status, "".join(capsys.readouterr())

    return call


def test_the_command_writes_the_last_run_as_a_file_that_says_on_what_it_was_made(tmp_path, command):
    path = tmp_path / "to" / "03_data_parallel.h200x4.json"
    assert command(metrics()) == (0, f"{path}\n")
    content = json.loads(path.read_text())
    assert tuple(content) == recorded_runs.FIELDS
    assert (content["lesson"], content["name"], content["world_size"]) == ("03_data_parallel", "h200x4", 4)
    assert content["versions"]["nccl"] == "2.27.3"
    for section in ("parameters", "measured", "exact"):
        assert content[section] == metrics()[section]
    assert [path] == list((tmp_path / "to").iterdir())


def test_a_run_with_uncommitted_changes_is_recorded_and_said_to_be_one(tmp_path, command):
    dirty = metrics()["conditions"] | {"commit": "1a2b3c4 with uncommitted changes"}
    status, said = command(metrics(conditions=dirty))
    assert status == 0 and "the run had uncommitted changes" in said
    assert json.loads((tmp_path / "to" / "03_data_parallel.h200x4.json").read_text())["commit"] == dirty["commit"]


@pytest.mark.parametrize(
    "content, arguments, sentence",
    [
        (metrics("cpu"), [], "this run of 03_data_parallel was on a CPU"),
        (metrics(), ["--name", "../h200"], "invalid name '../h200'"),
        (metrics(), ["--name", "H200"], "invalid name 'H200'"),
        (metrics(lesson="02_collectives"), [], "is a run of 02_collectives, not of 03_data_parallel"),
        ({k: v for k, v in metrics().items() if k != "conditions"}, [], "does not say on what it was made"),
        (metrics(conditions={}), [], "does not say on what it was made"),
    ],
)
def test_what_cannot_be_recorded_is_refused_in_a_sentence(tmp_path, command, content, arguments, sentence):
    status, said = command(content, *arguments)
    assert status == 2 and sentence in said and said.count("\n") == 1
    assert not (tmp_path / "to").exists()


def test_a_table_has_this_runs_numbers_beside_each_recorded_runs(tmp_path):
    recorded_runs.record(metrics(), tmp_path)
    recorded_runs.record(metrics(world_size=8, measured={"step_s": 4321.5}), tmp_path, name="other")
    here = {
        "step time": (0.25, "s", "step_s"),
        "ddp alone": (3.75, "s", "times.ddp"),
        "bytes": (3_266_820, "", "bytes"),
        "first loss": (4.17, "nats", "losses.0"),
        "last loss": (None, "nats", "losses.7"),
    }
    made = "torch 2.13.0, CUDA 12.8, NCCL 2.27.3; 2026-11-21, commit 1a2b3c4; steps=300"
    assert recorded_runs.beside("03", here, tmp_path).splitlines() == [
        "                       here     h200x4      other",
        "step time, s           0.25     0.0123      4,322",
        "ddp alone, s           3.75        2.5          -",
        "bytes             3,266,820  3,266,820  3,266,820",
        "first loss, nats       4.17       4.17       4.17",
        "last loss, nats           -          -          -",
        f"h200x4: 4 ranks on 4 x NVIDIA H200; {made}",
        f"other: 8 ranks on 8 x NVIDIA H200; {made}",
    ]


def test_where_nothing_is_recorded_a_sentence_says_so_with_the_two_commands(tmp_path):
    said, run, record = recorded_runs.beside("03", {"step time": (0.25, "s", "step_s")}, tmp_path).split("\n")
    assert said.startswith("No GPU run of 03_data_parallel is recorded yet.")
    assert run.endswith("--nproc-per-node 4 scripts/03_data_parallel.py")
    assert record == "python -m manyhands.launch.recorded_runs 03"


def test_every_recorded_run_that_the_course_has_is_complete():
    for lesson in find_lessons(own=False):
        for run in recorded_runs.runs(lesson.name):
            assert tuple(run) == recorded_runs.FIELDS
            assert run["lesson"] == lesson.name
            assert recorded_runs.describe(run)


def ranks(**changes):
    told = {"world_size": 8, "local_world_size": 4, "launcher": "torchrun", "lesson": "03_data_parallel"}
    return ranks_of(**told | changes)


SCRIPT = str(folders.ROOT / "scripts" / "03_data_parallel.py")


@pytest.mark.parametrize(
    ("launcher", "argv", "command"),
    [
        ("torchrun", [SCRIPT, "--steps", "3"],
         "python -m torch.distributed.run --nnodes 2 --nproc-per-node 4 scripts/03_data_parallel.py --steps 3"),
        ("mpich", [SCRIPT], "mpiexec -n 8 python scripts/03_data_parallel.py"),
        ("notebook", ["/usr/lib/ipykernel.py"], "notebooks/03_data_parallel.ipynb with n_ranks = 8"),
        ("alone", ["/home/me/own.py"], "python own.py"),
    ],
)  # fmt: skip
def test_the_command_is_what_starts_the_same_script_again(monkeypatch, launcher, argv, command):
    monkeypatch.setattr("sys.argv", argv)
    assert metrics_module.command(ranks(launcher=launcher)) == command


def test_preflight_exports_the_run_on_most_gpus_of_each_lesson_that_went_well(tmp_path):
    def outcome(way, content, error=None):
        run = Run(find_lessons(only=["03"])[0], way, None, tmp_path)
        return Outcome(run, Ended(0, 1.0, 0), error, content)

    well = LessonResult(None, [
        outcome("notebook", metrics(world_size=4, launcher="notebook")),
        outcome("torchrun", metrics(world_size=2)),
        outcome("torchrun", metrics(world_size=4)),
        outcome("mpiexec", metrics(world_size=8), error="it failed"),
    ])  # fmt: skip
    on_cpu = LessonResult(None, [outcome("torchrun", metrics("cpu", lesson="02_collectives"))])
    untold = LessonResult(None, [outcome("torchrun", metrics(lesson="00_start", conditions={}))])
    paths = export_recorded([well, on_cpu, untold], tmp_path / "recorded")
    assert [path.name for path in paths] == ["03_data_parallel.h200x4.json"]
    assert json.loads(paths[0].read_text())["launcher"] == "torchrun"
