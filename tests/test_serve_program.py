"""scripts/serve.py as its user meets it: where the token is and is not, a clean end amid a stream, refusals."""

import importlib.util
import json
import logging
import os
import pty
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest
from live_server import CONFIG, make_model, metadata_of, quiet
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


def start(root, exported, folder, *flags, stdout=None, **environ):
    file, text = exported
    environ = {k: v for k, v in os.environ.items() if k != "MANYHANDS_SERVE_TOKEN"} | {
        "MANYHANDS_OUTPUTS": str(folder), "OMP_NUM_THREADS": "1", **environ,
    }  # fmt: skip
    program = str(root / "scripts" / "serve.py")
    command = [sys.executable, program, *([str(file)] if file else []), "--gate-text", str(text), *flags]
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
        assert len(client.complete("HO", max_tokens=5)) == 5
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
        with pytest.raises(OSError):
            client.complete("HO")
        log = (tmp_path / "log").read_text()
        assert client.token not in log and "the token is in" in log and "POST /v1/chat/completions 200" in log
        assert "Traceback" not in log and re.search(
            r"step 10, validation loss 2.5000, [\d,]+ parameters, context 96", log
        )
        assert (CONFIG.block_size, "chat template" in log) == (96, True)
    finally:
        process.kill()


def test_on_a_terminal_the_address_with_its_token_is_shown_once_and_a_second_ctrl_c_ends_it_in_silence(
    root, exported, tmp_path
):
    token = "chosen-by-the-user-0123456789"
    leader, follower = pty.openpty()
    with socket.socket() as other:  # somebody else's 8000, unless it is really taken
        try:
            other.bind(("127.0.0.1", 8000))
            other.listen()
        except OSError:
            pass
        process, address_file = start(root, exported, tmp_path, stdout=follower, MANYHANDS_SERVE_TOKEN=token)
    try:
        time.sleep(0.5)
        shown = os.read(leader, 100_000).decode()
        client = Client.from_file(address_file)
        assert client.token == token and not client.address.endswith(":8000")
        assert shown.count(token) == 1 and f"open {client.address}/#token={token}" in shown
        assert token not in (tmp_path / "log").read_text()
        with open(f"/proc/{process.pid}/cmdline", "rb") as words:
            assert token.encode() not in words.read()
        host, port = client.address.removeprefix("http://").split(":")
        head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nX-Api-Key: {token}\r\nContent-Length: 9\r\n\r\n{{"
        with socket.create_connection((host, int(port))) as unfinished:
            unfinished.sendall(head.encode())
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            assert process.poll() is None, "it waits for what was asked"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        assert (tmp_path / "log").read_text().splitlines() == ["serve.py: ended by Ctrl-C"]
    finally:
        process.kill()
        os.close(leader)
        os.close(follower)


@pytest.mark.parametrize(
    ("flags", "environ", "sentence"),
    [
        (["nowhere"], {}, "nowhere holds no checkpoint; name the folder"),
        (["MODEL", "--step", "newest", "--port", "99999"], {}, "port=99999 is too large; use less than 65536"),
        (["MODEL", "--watch-s", "0"], {}, "watch_s=0.0 is too small; use at least 1"),
        (["MODEL", "--cap.running", "0"], {}, "cap.running=0 is too small; use at least 1"),
        (["MODEL", "--cap.blocks", "2"], {}, "2 blocks of 16 positions do not hold one sequence of 96; use 6"),
        (["MODEL", "--host", "203.0.113.7"], {}, "cannot listen on 203.0.113.7:8000"),
        (["MODEL", "--gate-text", "TINY"], {}, "tokens of TINY are known to the model; name a text by --gate-text"),
        (["MODEL"], {"MANYHANDS_SERVE_TOKEN": "short"}, "MANYHANDS_SERVE_TOKEN has fewer than 16 characters"),
        (["MODEL", "--device", "xpu"], {}, "--device xpu: torch sees no GPU of that kind here"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_one_sentence_and_status_2(
    program, exported, tmp_path, monkeypatch, capfd, flags, environ, sentence
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "TINY").write_text("HO")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert program.main([str(exported[0]) if flag == "MODEL" else flag for flag in flags]) == 2
    told = capfd.readouterr()
    assert told.err.startswith("serve.py: ") and told.err.count("\n") == 1, told.err
    assert sentence in told.err


def test_without_a_name_the_model_is_what_lesson_13_or_align_made_last_and_before_that_the_shipped_one(
    program, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("MANYHANDS_OUTPUTS", str(tmp_path))
    assert program.default_source() == program.PLAYS
    assert capfd.readouterr().out.startswith("no model named, and none aligned yet: assets/models/plays.safetensors ")
    run, lesson = (tmp_path / name for name in program.ALIGNED)
    lesson.parent.mkdir(parents=True)
    lesson.touch()
    run.mkdir(parents=True)
    os.utime(lesson, (1, 1))
    assert program.default_source() == lesson, "a run without a checkpoint has made nothing yet"
    (run / "step-00000003").mkdir()
    for earlier, later in ((lesson, run), (run, lesson)):
        os.utime(earlier, (1, 1))
        os.utime(later, (2, 2))
        assert program.default_source() == later
        assert str(later) in capfd.readouterr().out.splitlines()[-1]


def test_the_shipped_model_is_served_on_a_machine_that_has_trained_nothing(root, exported, tmp_path):
    process, address_file = start(root, (None, exported[1]), tmp_path, "--port", "0")
    try:
        client = Client.from_file(address_file)
        text = client.complete("ROMEO:", max_tokens=40, seed=1)
        chat = "".join(client.chat([{"role": "user", "content": "my lord"}], max_tokens=20, seed=1))
        log = (tmp_path / "log").read_text()
        assert len(text) == 40 and len(chat) == 20, (text, chat)
        assert "assets/models/plays.safetensors: step 13000" in log and "4,044,353 parameters, context 256" in log
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
    kept = {"lives": mine | {"pid": os.getpid()}, "elsewhere": mine | {"host": "another node"}, "odd": [], "old": {}}
    for name, about in {"dead": mine, **kept}.items():
        (tmp_path / f"serving-{name}.json").write_text(json.dumps(about))
    (tmp_path / "serving-cut.json").write_text('{"addr')
    path = tmp_path / "serving-8000.json"
    path.write_text("{}")
    path.chmod(0o644)
    write_address(path, "http://127.0.0.1:8000", "t" * 20)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    expected = {"address": "http://127.0.0.1:8000", "token": "t" * 20, "pid": os.getpid(), "host": socket.gethostname()}
    assert json.loads(path.read_text()) == expected
    left = {path.stem.removeprefix("serving-") for path in tmp_path.iterdir()}
    assert left == {*kept, "cut", "8000"}


def test_a_server_that_cannot_start_says_so_ends_with_status_2_and_leaves_no_address(
    program, exported, tmp_path, monkeypatch, capfd
):
    from manyhands.serve.service import Service

    async def broken(self):
        raise MemoryError("no room")

    monkeypatch.setenv("MANYHANDS_OUTPUTS", str(tmp_path))
    monkeypatch.setattr(Service, "start", broken)
    for name in ("manyhands.serve", "uvicorn.error"):  # as they are now, for later tests
        for of_a_logger in ("handlers", "filters", "propagate", "level"):
            logger = logging.getLogger(name)
            monkeypatch.setattr(logger, of_a_logger, getattr(logger, of_a_logger))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    assert program.main([str(exported[0]), "--port", "0"]) == 2
    for number, handler in handlers.items():
        signal.signal(number, handler)
    told = capfd.readouterr()
    assert "no room" in told.err and told.err.endswith("could not start; see the lines above\n")
    assert "listening" not in told.out and not list(tmp_path.rglob("serving-*"))
