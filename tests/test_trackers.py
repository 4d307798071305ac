"""TensorBoard and W&B are asked for, work without a network, and never stop a training."""

import sys
from unittest.mock import Mock, call

import pytest
from manyhands.config.options import from_preset, merged
from manyhands.train.trackers import Trackers

ROW = {"step": 10, "loss": 2.5, "val_loss": None, "slowest_rank": 0, "mfu": None}


def started(folder, say=pytest.fail, world_size=1, **log):
    return Trackers(merged(from_preset("nano"), {"log": log}, "test"), folder, world_size, say)


@pytest.fixture
def writer(monkeypatch):
    """A fake torch.utils.tensorboard, and the writer that it makes."""
    module = Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return module.SummaryWriter


@pytest.fixture
def wandb(monkeypatch):
    """A fake wandb where somebody is logged in."""
    module = Mock(Error=type("Error", (Exception,), {}))
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return module


def test_what_is_not_installed_is_imported_only_if_asked_for_and_said_once_with_its_cure(tmp_path, monkeypatch):
    for name in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    started(tmp_path).log(ROW)
    said = []
    both = started(tmp_path, said.append, tensorboard=True, wandb="course")
    for _ in range(3):
        both.log(ROW)
    both.close()
    assert len(said) == 2
    assert "pip install -e '.[tensorboard]'" in said[0] and "pip install -e '.[wandb]'" in said[1]
    assert all(sentence.endswith("Training continues") for sentence in said)


def test_tensorboard_gets_the_numbers_of_a_line_and_the_samples(tmp_path, writer):
    board = started(tmp_path, tensorboard=True)
    board.log(ROW)
    board.text(10, "To be")
    writer.assert_called_once_with(str(tmp_path / "tensorboard"))
    assert call.add_scalar("loss", 2.5, 10) in writer().method_calls
    assert call.add_text("sample", "```\nTo be\n```", 10) in writer().method_calls


def test_a_failure_is_said_once_in_one_line_and_the_other_tracker_goes_on(tmp_path, writer, wandb):
    said, writer().add_scalar.side_effect = [], OSError("add_scalar failed\nand a long story")
    both = started(tmp_path, said.append, tensorboard=True, wandb="course")
    for _ in range(3):
        both.log(ROW)
    both.close()
    assert said == ["TensorBoard is disabled: OSError: add_scalar failed. Training continues"]
    assert [name for name, *_ in wandb.init().method_calls] == ["log", "log", "log", "finish"]


def test_wandb_gets_the_options_and_is_online_where_somebody_is_logged_in(tmp_path, wandb):
    started(tmp_path, wandb="course", world_size=4).log(ROW)
    init = wandb.init.call_args.kwargs
    assert init["project"] == "course" and init["dir"] == str(tmp_path) and "mode" not in init
    assert init["config"]["world_size"] == 4 and init["config"]["optimizer"]["lr"] == 1e-3


def test_wandb_is_offline_where_nobody_is_logged_in_and_says_how_to_upload(tmp_path, wandb):
    said, wandb.login.return_value = [], False
    started(tmp_path, said.append, wandb="course").log(ROW)
    assert wandb.init.call_args.kwargs["mode"] == "offline"
    assert f"works offline: not logged in. Upload later: wandb sync {tmp_path}" in said[0]
