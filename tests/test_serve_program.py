"""scripts/serve.py as its user meets it: where the token is and is not, a clean end amid a stream, refusals."""

import importlib.util
import json
import os
import pty
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest
from live_server import make_model, metadata_of, quiet
from manyhands.checkpoint.export import write_export
from manyhands.serve.client import Client, ServerSaid
from manyhands.serve.http import write_address

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def program(root):
    spec = importlib.util.spec_from_file_location("serve_program", root / "scripts" / "serve.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # tyro looks for its text there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model as a file, that never writes a marker: its replies are as long as asked."""
    file = tmp_path_factory.mktemp("model") / "model.safetensors"
    model = quiet(make_model()).float()
    write_export(dict(model.named_parameters()), metadata_of(), file)
    text = file.parent / "text.txt"
    text.write_text("TO BE OR NOT TO BE " * 40)
    return file, text


def start(root, exported, folder, *flags, stdout=None, program="serve.py", **environ):
    """(process, file with its address) of a server of `exported` (none: what the flags say), in `folder`."""
    environ = {k: v for k, v in os.environ.items() if k != "MANYHANDS_SERVE_TOKEN"} | {
        "MANYHANDS_OUTPUTS": str(folder), "OMP_NUM_THREADS": "1", **environ,
    }  # fmt: skip
    file, text = exported or (None, None)
    given = [*([str(file)] if file else []), *(["--gate-text", str(text)] if text else [])]
    command = [sys.executable, str(root / "scripts" / program), *given, *flags]
    log = open(folder / "log", "wb")  # noqa: SIM115 - it belongs to the process
    process = subprocess.Popen(command, stdout=stdout or log, stderr=log, env=environ, cwd=folder)
    deadline = time.monotonic() + 100
    while not (found := list((folder / "serve").glob("serving-*.json"))):
        assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.05)
    return process, found[0]


def test_a_server_without_a_terminal_keeps_its_secret_and_ends_after_what_was_asked(root, exported, tmp_path):
    process, address_file = start(root, exported, tmp_path, "--port", "0", "--cap.running", "2")
    try:
        assert stat.S_IMODE(address_file.stat().st_mode) == 0o600
        client = Client.from_file(address_file)
        assert client.address.startswith("http://127.0.0.1:") and len(client.token) >= 32
        with pytest.raises(ServerSaid, match="401"):
            Client(client.address, "guess" * 8).complete("HO")
        texts = {}

        def ask(i):
            texts[i] = "".join(client.chat([{"role": "user", "content": "HO"}], max_tokens=80, seed=i))

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]  # four of them have to wait
        for thread in threads:
            thread.start()
        while client.metrics()["manyhands_running"] < 2:
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        assert process.wait(60) == 0
        assert {i: len(text) for i, text in texts.items()} == dict.fromkeys(range(6), 80), "none was dropped"
        assert not address_file.exists(), "its address is no address any more"
        log = (tmp_path / "log").read_text()
        assert client.token not in log and "the token is in" in log and "POST /v1/chat/completions 200" in log
        assert "Traceback" not in log and "step 10, validation loss 2.5000" in log
    finally:
        process.kill()


def test_on_a_terminal_the_address_with_its_token_is_shown_once(root, exported, tmp_path):
    token = "chosen-by-the-user-0123456789"
    leader, follower = pty.openpty()
    process, address_file = start(
        root, exported, tmp_path, "--port", "0", stdout=follower, MANYHANDS_SERVE_TOKEN=token
    )  # fmt: skip
    try:
        time.sleep(0.5)
        shown = os.read(leader, 100_000).decode()
        client = Client.from_file(address_file)
        assert client.token == token
        assert shown.count(token) == 1 and f"open {client.address}/#token={token}" in shown
        assert token not in (tmp_path / "log").read_text()
        with open(f"/proc/{process.pid}/cmdline", "rb") as words:
            assert token.encode() not in words.read()
    finally:
        process.kill()
        os.close(leader)
        os.close(follower)


@pytest.mark.parametrize(
    ("flags", "environ", "sentence"),
    [
        (["nowhere"], {}, "nowhere holds no checkpoint; name the folder"),
        (["MODEL", "--step", "newest", "--port", "99999"], {}, "port=99999 is too large; use less than 65536"),
        (["MODEL", "--cap.blocks", "2"], {}, "2 blocks of 16 positions do not hold one sequence of 96; use 6"),
        (["MODEL", "--host", "203.0.113.7"], {}, "address); name another --host"),
        (["MODEL", "--host", "999.1.1.1"], {}, "; name another --host"),
        (
            ["MODEL", "--gate-text", "/nonexistent"], {},
            "/nonexistent cannot be read (No such file or directory); name another --gate-text",
        ),
        (
            ["MODEL", "--tensor", "2"], {},
            "--tensor 2 needs as many ranks, and 1 was started; use scripts/launch.py --nproc 2 scripts/serve.py -- ",
        ),
        (["MODEL", "--tensor", "2", "--watch-s", "5"], {}, "share a model serve one checkpoint; leave --watch-s"),
        (["MODEL"], {"MANYHANDS_SERVE_TOKEN": "short"}, "MANYHANDS_SERVE_TOKEN has fewer than 16 characters"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_one_sentence_and_status_2(
    program, exported, tmp_path, monkeypatch, capfd, flags, environ, sentence
):
    monkeypatch.chdir(tmp_path)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        program.main([str(exported[0]) if flag == "MODEL" else flag for flag in flags])
    assert ended.value.code == 2
    told = capfd.readouterr()
    assert told.err.startswith("serve.py: ") and told.err.count("\n") == 1, told.err
    assert sentence in told.err


def test_without_a_name_the_model_is_what_lesson_13_or_align_made_last_and_before_that_the_shipped_one(
    program, tmp_path, monkeypatch
):
    monkeypatch.setenv("MANYHANDS_OUTPUTS", str(tmp_path))
    assert program.default_source() == program.PLAYS
    run, lesson = (tmp_path / name for name in program.ALIGNED)
    lesson.parent.mkdir(parents=True)
    lesson.touch()
    (run / "step-00000003").mkdir(parents=True)
    for earlier, later in ((lesson, run), (run, lesson)):
        os.utime(earlier, (1, 1))
        os.utime(later, (2, 2))
        assert program.default_source() == later


def test_the_shipped_model_is_served_on_a_machine_that_has_trained_nothing(root, exported, tmp_path):
    process, address_file = start(root, (None, exported[1]), tmp_path, "--port", "0")
    try:
        assert len(Client.from_file(address_file).complete("ROMEO:", max_tokens=40, seed=1)) == 40
        assert "assets/models/plays.safetensors: step 13000" in (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait(10)


def test_whoever_finds_the_address_file_finds_all_of_it_and_nobody_else_can_read_it(tmp_path):
    """A client waits until the file is there, and reads it at once; so here, at each opening of a file."""
    path, texts, modes = tmp_path / "serving-8000.json", [], set()

    def look(event, arguments):
        if event in ("open", "os.rename") and str(arguments[0]).startswith(str(tmp_path)) and texts[-1:] != [None]:
            texts.append(None)  # what is opened to look is not looked at
            texts[-1] = path.read_text() if path.exists() else "{}"
            modes.update(stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir())

    sys.addaudithook(look)
    write_address(path, "http://127.0.0.1:8000", "t" * 20)
    texts.append(None)  # the hook stays, and looks no more
    assert len(texts) > 1 and {json.dumps(json.loads(text)) for text in texts[:-1]} == {"{}"}
    assert modes == {0o600} and json.loads(path.read_text())["token"] == "t" * 20


def test_address_files_of_earlier_servers_are_replaced_or_removed_when_the_next_one_starts(tmp_path):
    killed = subprocess.Popen(["sleep", "100"])
    killed.kill()
    killed.wait()
    mine = {"address": "", "token": "t" * 20, "pid": killed.pid, "host": socket.gethostname()}
    for name, about in {"dead": mine, "lives": mine | {"pid": os.getpid()}, "far": mine | {"host": "other"}}.items():
        (tmp_path / f"serving-{name}.json").write_text(json.dumps(about))
    path = tmp_path / "serving-8000.json"
    path.write_text("{}")
    path.chmod(0o644)
    write_address(path, "http://127.0.0.1:8000", "t" * 20)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    expected = {"address": "http://127.0.0.1:8000", "token": "t" * 20, "pid": os.getpid(), "host": socket.gethostname()}
    assert json.loads(path.read_text()) == expected
    assert {path.stem.removeprefix("serving-") for path in tmp_path.iterdir()} == {"lives", "far", "8000"}
