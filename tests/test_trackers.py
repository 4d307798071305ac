"""TensorBoard and W&B are asked for, work without a network, and never stop a training."""

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
from manyhands.config.options import from_preset, merged
from manyhands.train import trackers
from manyhands.train.trackers import Trackers

ROW = {"step": 10, "loss": 2.5, "val_loss": None, "slowest_rank": 0, "mfu": None}


def options_of(**log):
    return merged(from_preset("nano"), {"log": log}, "test")


class Recorder:
    """A fake tracker: remembers calls; `failing` names the method that raises."""

    def __init__(self, failing=None):
        self.calls, self.failing = [], failing

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, *args, *sorted(kwargs.items())))
            if name == self.failing:
                raise OSError(f"{name} failed\nand a long story")

        return call


@pytest.fixture
def tensorboard(monkeypatch):
    """A fake torch.utils.tensorboard: a dict with the `writer` that was made."""
    made = {"writer": Recorder()}

    def summary_writer(folder):
        made["folder"] = folder
        return made["writer"]

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = summary_writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return made


@pytest.fixture
def wandb(monkeypatch):
    """A fake wandb where somebody is logged in: a dict with the `run`, what each `init` was given, and its `errors`."""
    made = {"run": Recorder(), "logged in": True, "inits": [], "errors": []}

    class Error(Exception):
        pass

    def init(**kwargs):
        made["inits"].append(kwargs)
        if made["errors"]:
            raise made["errors"].pop(0)
        return made["run"]

    module = ModuleType("wandb")
    module.init, module.Error, module.Settings = init, Error, lambda **kwargs: SimpleNamespace(**kwargs)
    module.login = lambda prompt: made["logged in"]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    made["Error"] = Error
    return made


def test_nothing_is_imported_unless_it_is_asked_for(tmp_path, monkeypatch):
    for name in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    said = []
    asked_for_none = Trackers(options_of(), tmp_path, 1, said.append)
    asked_for_none.log(ROW)
    asked_for_none.close()
    assert said == []


def test_a_tracker_that_is_not_installed_is_said_once_with_its_cure(tmp_path, monkeypatch):
    for name in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    said = []
    both = Trackers(options_of(tensorboard=True, wandb="course"), tmp_path, 1, said.append)
    for _ in range(3):
        both.log(ROW)
    both.close()
    assert len(said) == 2
    assert "pip install -e '.[tensorboard]'" in said[0] and "pip install -e '.[wandb]'" in said[1]
    assert all(sentence.endswith("Training goes on") for sentence in said)


def test_tensorboard_gets_the_numbers_of_a_line_and_the_samples(tmp_path, tensorboard):
    board = Trackers(options_of(tensorboard=True), tmp_path, 1, pytest.fail)
    board.log(ROW)
    board.text(10, "To be")
    board.close()
    assert tensorboard["folder"] == str(tmp_path / "tensorboard")
    assert tensorboard["writer"].calls == [
        ("add_scalar", "loss", 2.5, 10),
        ("add_scalar", "slowest_rank", 0, 10),
        ("add_text", "sample", "```\nTo be\n```", 10),
        ("close",),
    ]


def test_a_failure_is_said_once_in_one_line_and_the_other_tracker_goes_on(tmp_path, tensorboard, wandb):
    said, tensorboard["writer"] = [], Recorder(failing="add_scalar")
    both = Trackers(options_of(tensorboard=True, wandb="course"), tmp_path, 1, said.append)
    for _ in range(3):
        both.log(ROW)
    both.close()
    assert said == ["TensorBoard is not used any more: OSError: add_scalar failed. Training goes on"]
    assert [name for name, *_ in wandb["run"].calls] == ["log", "log", "log", "finish"]


def test_wandb_gets_the_options_and_is_online_where_somebody_is_logged_in(tmp_path, wandb):
    Trackers(options_of(wandb="course"), tmp_path, 4, pytest.fail).log(ROW)
    (init,) = wandb["inits"]
    assert init["project"] == "course" and init["dir"] == str(tmp_path) and "mode" not in init
    assert init["config"]["world_size"] == 4 and init["config"]["optimizer"]["lr"] == 1e-3


@pytest.mark.parametrize("why", ["nobody is logged in", "Timed out while retrying"])
def test_wandb_is_offline_where_nobody_is_logged_in_or_nothing_answers_and_says_how_to_upload(tmp_path, wandb, why):
    said, wandb["logged in"] = [], "logged" not in why
    if wandb["logged in"]:
        wandb["errors"] = [wandb["Error"](f"{why}\nand a long story")]
    Trackers(options_of(wandb="course"), tmp_path, 1, said.append).log(ROW)
    assert wandb["inits"][-1]["mode"] == "offline"
    (sentence,) = said
    assert f"works offline: {why}. Upload later: wandb sync {tmp_path}" in sentence
    assert [name for name, *_ in wandb["run"].calls] == ["log"]


def test_wandb_that_cannot_start_is_said_once(tmp_path, wandb):
    said, wandb["errors"] = [], [RuntimeError("no room")]
    one = Trackers(options_of(wandb="course"), tmp_path, 1, said.append)
    one.log(ROW)
    one.close()
    assert said == ["W&B is not used any more: RuntimeError: no room. Training goes on"]


def test_what_the_environment_says_about_wandb_holds(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    wandb["logged in"] = False
    Trackers(options_of(wandb="course"), tmp_path, 1, pytest.fail)
    assert "mode" not in wandb["inits"][0], "it reads the variable itself"


def test_uploads_that_fail_at_the_end_are_said_in_one_line(tmp_path, wandb, capsys):
    said, wandb["run"] = [], Recorder(failing="finish")
    Trackers(options_of(wandb="course"), tmp_path, 1, said.append).close()
    assert said == ["W&B is not used any more: OSError: finish failed. Training goes on"]
    assert "Traceback" not in capsys.readouterr().err


def test_an_upload_that_never_ends_is_left_behind_and_said(tmp_path, wandb, monkeypatch):
    monkeypatch.setattr(trackers, "FINISH_S", 0.1)
    forever = threading.Event()
    wandb["run"] = SimpleNamespace(finish=forever.wait)
    said = []
    one = Trackers(options_of(wandb="course"), tmp_path, 1, said.append)
    one.close()
    forever.set()
    assert "its uploads did not end within 0.1 s" in said[-1]
