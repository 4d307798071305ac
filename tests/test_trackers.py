"""TensorBoard and W&B are asked for, work without a network, and never stop a training."""

import http.server
import socket
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
from manyhands.config.options import from_preset, merged
from manyhands.train import trackers
from manyhands.train.trackers import Trackers, wandb_mode

ROW = {"step": 10, "loss": 2.5, "val_loss": None, "slowest_rank": 0, "mfu": None}
KEY = "0" * 40


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
def wandb(monkeypatch, tmp_path):
    """A fake wandb where nobody is logged in: a dict with the `run` and what `init` was given."""
    made = {"run": Recorder(), "server": "http://127.0.0.1:9"}

    def init(**kwargs):
        made["init"] = kwargs
        if "error" in made:
            raise made["error"]
        return made["run"]

    module = ModuleType("wandb")
    module.init, module.Settings = init, lambda **kwargs: SimpleNamespace(base_url=made["server"], **kwargs)
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return made


class RefusesAll(http.server.BaseHTTPRequestHandler):
    """A server that knows no method: it answers, with an error."""

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    """The address of such a server."""
    httpd = http.server.HTTPServer(("127.0.0.1", 0), RefusesAll)
    threading.Thread(target=httpd.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()


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
    said.clear()  # that W&B is offline
    for _ in range(3):
        both.log(ROW)
    both.close()
    assert said == ["TensorBoard is not used any more: OSError: add_scalar failed. Training goes on"]
    assert [name for name, *_ in wandb["run"].calls] == ["log", "log", "log", "finish"]


def test_wandb_that_cannot_start_is_said_once(tmp_path, wandb):
    said, wandb["error"] = [], RuntimeError("run initialization timed out")
    one = Trackers(options_of(wandb="course"), tmp_path, 1, said.append)
    one.log(ROW)
    one.close()
    assert [sentence for sentence in said if "timed out" in sentence] == said[1:] and len(said) == 2


def test_wandb_is_offline_where_nobody_is_logged_in_and_says_how_to_upload(tmp_path, wandb):
    said = []
    Trackers(options_of(wandb="course"), tmp_path, 4, said.append).log(ROW)
    assert wandb["init"]["mode"] == "offline"
    assert wandb["init"]["project"] == "course" and wandb["init"]["dir"] == str(tmp_path)
    assert wandb["init"]["config"]["world_size"] == 4
    assert wandb["init"]["config"]["optimizer"]["lr"] == 1e-3
    (sentence,) = said
    assert "works offline: nobody is logged in to 127.0.0.1" in sentence and "wandb sync" in sentence


def test_wandb_is_offline_where_the_server_cannot_be_reached_or_is_silent(wandb, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr(trackers, "REACH_S", 0.3)
    with socket.socket() as nobody_listens, socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, says nothing
        nobody_listens.bind(("127.0.0.1", 0))
        for one in (nobody_listens, silent):
            mode, why = wandb_mode(f"http://127.0.0.1:{one.getsockname()[1]}")
            assert mode == "offline" and "127.0.0.1 cannot be reached" in why


def test_wandb_is_online_where_somebody_is_logged_in_and_the_server_answers(wandb, server, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "REACH_S", 60)
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login user password {KEY}\n")
    (tmp_path / "netrc").chmod(0o600)
    assert wandb_mode(server) == ("online", "")
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert wandb_mode(server) == ("online", "")
    monkeypatch.setenv("WANDB_MODE", "disabled")  # what the environment says holds
    assert wandb_mode("http://127.0.0.1:9") == ("disabled", "")


def test_an_upload_that_never_ends_is_left_behind_and_said(tmp_path, wandb, monkeypatch):
    monkeypatch.setattr(trackers, "FINISH_S", 0.1)
    forever = threading.Event()
    wandb["run"] = SimpleNamespace(finish=forever.wait)
    said = []
    one = Trackers(options_of(wandb="course"), tmp_path, 1, said.append)
    one.close()
    forever.set()
    assert "its uploads did not end within 0.1 s" in said[-1]
