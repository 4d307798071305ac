"""What users get wrong, as they run it: status 2, one sentence with the cure, no traceback, before any training.

Most runs are `scripts/train.py` in processes forked from a server that has imported torch, as ranks 0 and 1 of a
launcher would be; the last ones are whole commands.
"""

import contextlib
import os
import random
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from manyhands.data.corpus import get_batch, open_text
from manyhands.data.documents import Quality
from manyhands.data.preparation import PrepareConfig, prepare_text
from rank_pool import _server

pytestmark = pytest.mark.ranks

TINY = [
    "--model.n-layer=2", "--model.n-head=2", "--model.n-embd=16", "--model.block-size=8", "--train.steps=2",
    "--log.eval-batches=1", "--log.sample=4", "--log.no-plots",
]  # fmt: skip
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "train.py"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Without the web and without a named file: the text that every Python has."""
    return {
        "MANYHANDS_SHAKESPEARE": "",
        "MANYHANDS_SHAKESPEARE_URL": "",
        "MANYHANDS_PLAYS": "",
        "MANYHANDS_DATA": str(tmp_path_factory.mktemp("d")),
    }


def _main(argv, environ, folder):
    """In a forked process: what `python scripts/train.py` does, its output in files."""
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(environ)
    sys.argv = [str(SCRIPT), *argv]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def free_port():
    """Below those that the system gives to whoever asks for any: a rank that waits for it could be given it itself."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 30_000)))
            return free.getsockname()[1]


def run(argv, environ, tmp_path, ranks=1, timeout_s=250):
    """(status of rank 0, all standard output, all errors) of `ranks` processes.

    As a launcher does, the end of the first that fails ends the others.
    """
    port = str(free_port())
    folders, processes = [], []
    for rank in range(ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        folders.append(tmp_path / f"rank{rank}-{time.monotonic_ns()}")
        folders[-1].mkdir()
        for name in ("out", "err"):
            (folders[-1] / name).touch()  # a rank may be ended before it says anything
        everything = {"MANYHANDS_OUTPUTS": str(tmp_path / "out"), **environ, **(place if ranks > 1 else {})}
        processes.append(_server.Process(target=_main, args=(list(argv), everything, str(folders[-1])), daemon=True))
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        while any(p.is_alive() for p in processes) and not any(p.exitcode for p in processes):
            assert time.monotonic() < deadline, f"no end within {timeout_s} s"
            time.sleep(0.05)
        status = next((p.exitcode for p in processes if p.exitcode), 0)
    finally:
        for process in processes:
            process.kill() if process.is_alive() else None
            process.join()
    said = [[(folder / name).read_text(errors="replace") for folder in folders] for name in ("out", "err")]
    return status, *("".join(texts) for texts in said)


def refused(argv, environ, tmp_path, words, ranks=1):
    status, out, errors = run(argv, environ, tmp_path, ranks)
    assert status == 2, (status, out[-500:], errors[-2000:])
    assert "Traceback" not in errors + out
    sentences = [line for line in errors.splitlines() if line.startswith("train.py: ")]
    assert len(sentences) == 1, errors
    for word in words:
        assert word in sentences[0]
    assert "grad_norm" not in out, "it had begun to train"
    return sentences[0]


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--model.n-head 3", ("n_embd=16 does not split over 3 heads", "multiple of 3")),
        ("--parallel.strategy pp --parallel.pipeline 2", ("pipeline 2 = 2 ranks, but 1 were started",)),
        ("--config /nowhere/run.toml", ("/nowhere/run.toml cannot be read",)),
        ("--log.prompt \N{SNOWMAN}", ("log.prompt", "'\N{SNOWMAN}' is not among")),
        ("--model.block-size 100000", ("block_size=100000 needs 100001 tokens", "smaller block_size")),
        ("--model.vocab-size 20", ("vocab_size=20 is less than the corpus's", "leave it out")),
        ("--model.n-layer 9999 --model.n-embd 8192", ("8,053,", "GiB on each rank while it starts", "a smaller model")),
    ],
)
def test_options_that_cannot_be_are_refused_in_one_process(corpus, tmp_path, flags, words):
    refused([*TINY, *flags.split()], corpus, tmp_path, words)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--preset gpt5", ("'gpt5' is unknown",)),
        ("--train.global-batch 25", ("global_batch=25 does not split over 2 data-parallel ranks", "multiple of 2")),
    ],
)
def test_two_ranks_refuse_with_one_sentence(corpus, tmp_path, flags, words):
    refused([*TINY, *flags.split()], corpus, tmp_path, words, ranks=2)


def test_a_gpu_that_is_not_there_is_refused(corpus, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    refused([*TINY, "--train.device", "cuda"], corpus, tmp_path, ("cuda", "device=cpu"))


def test_compiling_without_a_compiler_is_refused_before_anything_is_built(corpus, tmp_path):
    words = ("train.compile needs a C++ compiler", "no-compile")
    refused([*TINY, "--train.compile"], corpus | {"CXX": "no-such-compiler"}, tmp_path, words)


def test_unreadable_data_is_refused_by_name(tmp_path, corpus):
    missing = corpus | {"MANYHANDS_SHAKESPEARE": str(tmp_path / "none.txt")}
    refused(TINY, missing, tmp_path, ("none.txt cannot be read", "unset the variable"))
    refused(TINY, missing, tmp_path, ("none.txt cannot be read",), ranks=2)
    (tmp_path / "other.txt").write_text("not by him")
    wrong = corpus | {"MANYHANDS_SHAKESPEARE": str(tmp_path / "other.txt")}
    refused(TINY, wrong, tmp_path, ("is not the course's Shakespeare", "10 bytes"))


def test_folders_that_cannot_be_written_are_refused_by_name(tmp_path, corpus):
    (tmp_path / "file").write_text("")
    nowhere = corpus | {"MANYHANDS_OUTPUTS": str(tmp_path / "file" / "out")}
    refused(TINY, nowhere, tmp_path, (str(tmp_path / "file" / "out"), "cannot be written"))
    refused(TINY, nowhere, tmp_path, ("cannot be written",), ranks=2)
    refused([*TINY, "--checkpoint.folder", str(tmp_path / "file")], corpus, tmp_path, (str(tmp_path / "file"),))


def broken_text(pool, tmp_path, change):
    """A prepared text of one symbol, whose shard of validation `change`d behind its back."""
    (tmp_path / "a.txt").write_text("\n\n\n".join("a" * n for n in (300, 301)))
    config = PrepareConfig(tokenizer="char", near=2, quality=Quality(0, 0, 1, 1))
    pool.run(1, prepared, tmp_path / "a.txt", tmp_path / "text", config)
    change(tmp_path / "text" / "validation-00000.bin")
    return [*TINY, "--data.folder", str(tmp_path / "text")]


def prepared(ranks, file, folder, config):
    prepare_text([file], folder, config, ranks, tell=lambda text: None)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_token_that_the_vocabulary_lacks_ends_a_run_in_one_sentence(pool, corpus, tmp_path, ranks):
    flags = broken_text(pool, tmp_path, lambda shard: shard.write_bytes(b"\xff" * shard.stat().st_size))
    status, out, errors = run(flags, corpus, tmp_path, ranks)
    assert (status, "Traceback" in errors + out) == (2, False), errors
    said = [line for line in errors.splitlines() if line.startswith("train.py: token ")]
    assert 1 <= len(said) <= ranks, errors
    assert "validation-00000.bin is 65535, and the vocabulary has 2: it has changed; copy it again" in said[0]


@pytest.mark.parametrize(("starter", "knows"), [("torchrun", 0), ("torchrun", 1), ("mpiexec", 1)])
def test_where_one_rank_alone_reads_a_bad_token_it_says_so_and_the_others_say_nothing(
    pool, corpus, root, tmp_path, starter, knows
):
    """What the others know is that a connection broke."""
    flags = [*broken_text(pool, tmp_path, lambda shard: None), "--train.global-batch=2"]
    number = len(open_text(tmp_path / "text").train_ids)
    places = [torch.cat(get_batch(torch.arange(number), 0, 2, 8, rank, 2, 1337)).flatten().tolist() for rank in (0, 1)]
    with open(tmp_path / "text" / "train-00000.bin", "r+b") as shard:
        shard.seek(2 * min(set(places[knows]) - set(places[1 - knows])))
        shard.write(b"\xff\xff")
    ran = subprocess.run(
        [sys.executable, "scripts/launch.py", "--nproc", "2", "--starter", starter, "--", *flags], cwd=root, text=True,
        env=os.environ | corpus, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=250,
    )  # fmt: skip
    assert ran.returncode == 2 or (starter == "mpiexec" and ran.returncode), ran.stdout
    assert ran.stdout.count("train.py: token ") == 1, ran.stdout
    assert "Traceback" not in ran.stdout and "gloo/" not in ran.stdout, ran.stdout


@pytest.fixture(scope="module")
def kept(tmp_path_factory, corpus):
    """A folder with the checkpoint of a run of 2 steps."""
    folder = tmp_path_factory.mktemp("kept")
    status, _, errors = run([*TINY, "--checkpoint.folder", str(folder / "c")], corpus, folder)
    assert status == 0, errors
    return folder / "c"


def test_a_checkpoint_that_must_be_there_and_is_not_is_refused(tmp_path, corpus):
    empty = tmp_path / "empty"
    flags = [*TINY, "--checkpoint.folder", str(empty), "--checkpoint.resume", "must"]
    refused(flags, corpus, tmp_path, (str(empty), "no complete checkpoint"))


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--model.n-embd 32", ("another model", "n_embd=16", "here n_embd=32")),
        ("--model.tie", ("another model", "tie=False")),
        ("--checkpoint.resume never", ("step-00000002", "name another folder")),
        ("--optimizer.name sgd", ("optimizer",)),
    ],
)
def test_a_foreign_checkpoint_is_refused_with_what_differs(tmp_path, corpus, kept, flags, words):
    refused([*TINY, "--train.steps", "4", "--checkpoint.folder", str(kept), *flags.split()], corpus, tmp_path, words)


def test_a_full_disk_is_a_sentence_and_leaves_nothing_half(tmp_path, corpus):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small tmpfs needs root and the right to mount")
    try:
        flags = [*TINY, "--model.n-embd", "64", "--checkpoint.folder", str(disk / "c")]  # 0.9 MB with Adam's moments
        status, out, errors = run(flags, corpus, tmp_path)
        left = [str(path.relative_to(disk)) for path in disk.rglob("step-*")]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert status == 2, errors
    assert "Traceback" not in errors + out
    assert errors.count("is full") == 1 and "MB are free" in errors
    assert left == []


def test_the_command_itself_ends_with_status_2_and_one_sentence(root, tmp_path):
    environ = os.environ | {"MANYHANDS_OUTPUTS": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "scripts/train.py", "--preset", "gpt5"], cwd=root, env=environ, capture_output=True, text=True,
        timeout=250,
    )  # fmt: skip
    assert ran.returncode == 2 and ran.stdout == ""
    assert len(ran.stderr.splitlines()) == 1 and ran.stderr.startswith("train.py: preset 'gpt5' is unknown")


REFUSED = {
    "sample.py --lenght 3": "there is no flag --lenght; did you mean --length?",
    "sample.py --length": "--length needs a whole number",
    "sample.py --temperature 1e-320": "--temperature 1e-320 is too small; use 0 for the likeliest token",
    "train.py --train.step=4": "there is no flag --train.step; did you mean --train.steps?",
    "train.py --parallel.strategy fdsp": "--parallel.strategy fdsp is not one of ddp, zero1, fsdp, tp, pp, deepspeed;"
    " did you mean fsdp?",
    "train.py --checkpoint.folder ~nosuchuser/x": "checkpoint.folder: ~nosuchuser/x cannot be used: there is no user",
    "train.py --config {folder}/pipe.toml": "pipe.toml cannot be used: it is a pipe; name a file",
    "align.py": "name {sft,dpo,grpo} and --from",
    "align.py sft --from x --data.held-out 99999999999": "data.held_out=99999999999 is too large; use at most 1000000",
    "serve.py --port abc": "--port abc is not a whole number",
    "launch.py --nprocs=2": "unrecognized arguments: --nprocs=2; did you mean --nproc?",
    "launch.py -- --train.stps 3": "there is no flag --train.stps; did you mean --train.steps?",
    "plan.py --gpus 6a": "argument --gpus: invalid int value: '6a'",
    "plan.py --machine none.toml": "none.toml cannot be read: No such file or directory",
    "plan.py --preset gpt2 --plot {folder}": "is no picture; use a name that ends in .png, .svg or .pdf",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_value_that_cannot_be_is_one_line_with_what_is_allowed(root, tmp_path, words):
    os.mkfifo(tmp_path / "pipe.toml")
    program, *flags = words.format(folder=tmp_path).split()
    command = [sys.executable, f"scripts/{program}", *flags]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=250, stdin=subprocess.DEVNULL)
    assert ran.stderr.startswith(f"{program}: ") and REFUSED[words] in ran.stderr
    assert ran.stderr.count("\n") == 1 and (ran.returncode, ran.stdout) == (2, "")


def test_a_picture_that_cannot_be_written_is_a_line_after_the_plan(root, tmp_path):
    (tmp_path / "folder.png").mkdir()
    for place, why in ((tmp_path / "folder.png", "Is a directory"), ("/nowhere/x.svg", "No such file or directory")):
        command = [sys.executable, "scripts/plan.py", "--preset", "gpt2", "--plot", str(place)]
        ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=250)
        assert (ran.returncode, ran.stderr) == (1, f"plan.py: {place}: {why}\n") and "gpt2: " in ran.stdout
