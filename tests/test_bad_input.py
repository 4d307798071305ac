"""What users get wrong, as they run it: status 2, one sentence with the cure, no traceback, before any training.

Most runs are `scripts/train.py`, in one process or as ranks 0 and 1 of a launcher would be; the last ones are other
programs.
"""

import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from manyhands.data.corpus import get_batch, open_text
from manyhands.data.documents import Quality
from manyhands.data.preparation import PrepareConfig, prepare_text

pytestmark = pytest.mark.ranks

HUGE = "--model.n-layer 9999 --model.n-embd 8192"
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


def free_port():
    """Below those that the system gives to whoever asks for any: a rank that waits for it could be given it itself."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 30_000)))
            return free.getsockname()[1]


def run(argv, environ, tmp_path, ranks=1, timeout_s=250):
    """(status, standard output, errors) of `ranks` processes: as under a launcher, the first that fails ends all."""
    environ = {**os.environ, "MANYHANDS_OUTPUTS": str(tmp_path / "out"), **environ}
    if ranks > 1:
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    processes, deadline = [], time.monotonic() + timeout_s
    with tempfile.TemporaryFile("a+") as out, tempfile.TemporaryFile("a+") as errors:
        try:
            for rank in range(ranks):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
                command = [sys.executable, str(SCRIPT), *argv]
                processes.append(subprocess.Popen(command, env=environ | place, stdout=out, stderr=errors))
            while None in (codes := [process.poll() for process in processes]) and not any(codes):
                assert time.monotonic() < deadline, f"no end within {timeout_s} s"
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        out.seek(0), errors.seek(0)
        return next((code for code in codes if code), 0), out.read(), errors.read()


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
    "flags, words, ranks",
    [
        ("--parallel.strategy pp --parallel.pipeline 2", ("pipeline 2 = 2 ranks, but 1 were started",), 1),
        ("--model.block-size 100000", ("block_size=100000 needs 100001 tokens", "smaller block_size"), 1),
        (f"{HUGE} --parallel.strategy ddp", ("8,053,", "take 30,", "GiB on each rank while it starts", "fsdp"), 2),
        (f"{HUGE} --parallel.strategy fsdp", ("take 15,0", "GiB on each rank while it starts", "a smaller model"), 2),
        ("--train.compile", ("train.compile needs a C++ compiler", "no-compile"), 1),
        ("--preset gpt5", ("'gpt5' is unknown",), 2),
        ("--train.global-batch 25", ("global_batch=25 does not split over 2 data-parallel ranks", "multiple of 2"), 2),
    ],
)
def test_options_that_cannot_be_are_one_sentence_of_one_rank(corpus, tmp_path, flags, words, ranks):
    refused([*TINY, *flags.split()], corpus | {"CXX": "no-such-compiler"}, tmp_path, words, ranks)


def test_data_that_cannot_be_read_and_folders_that_cannot_be_written_are_refused_by_name(tmp_path, corpus):
    (tmp_path / "file").write_text("not by him")
    missing, wrong = ({"MANYHANDS_SHAKESPEARE": str(tmp_path / name)} for name in ("none.txt", "file"))
    refused(TINY, corpus | missing, tmp_path, ("none.txt cannot be read", "unset the variable"))
    refused(TINY, corpus | wrong, tmp_path, ("is not the course's Shakespeare", "10 bytes"))
    nowhere = str(tmp_path / "file" / "out")
    refused(TINY, corpus | {"MANYHANDS_OUTPUTS": nowhere}, tmp_path, (nowhere, "cannot be written"), ranks=2)
    refused([*TINY, "--checkpoint.folder", str(tmp_path / "file")], corpus, tmp_path, (str(tmp_path / "file"),))


def prepared_text(pool, tmp_path):
    """The flags of a run on a prepared text of one symbol."""
    (tmp_path / "a.txt").write_text("\n\n\n".join("a" * n for n in (300, 301)))
    config = PrepareConfig(tokenizer="char", near=2, quality=Quality(0, 0, 1, 1))
    pool.run(1, prepared, tmp_path / "a.txt", tmp_path / "text", config)
    return [*TINY, "--data.folder", str(tmp_path / "text")]


def prepared(ranks, file, folder, config):
    prepare_text([file], folder, config, ranks, tell=lambda text: None)


@pytest.mark.parametrize(
    ("starter", "knows"),
    [("torchrun", 1), *(pytest.param(*case, marks=pytest.mark.full) for case in (("torchrun", 0), ("mpiexec", 1)))],
)
def test_where_one_rank_alone_reads_a_bad_token_it_says_so_and_the_others_say_nothing(
    pool, corpus, root, tmp_path, starter, knows
):
    """What the others know is that a connection broke."""
    flags = [*prepared_text(pool, tmp_path), "--train.global-batch=2"]
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
    assert "train-00000.bin is 65535, and the vocabulary has 2: it has changed; copy it again" in ran.stdout
    assert "Traceback" not in ran.stdout and "gloo/" not in ran.stdout, ran.stdout


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


def test_a_picture_that_cannot_be_written_is_a_line_after_the_plan(root):
    command = [sys.executable, "scripts/plan.py", "--preset", "gpt2", "--plot", "/nowhere/x.svg"]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=250)
    assert (ran.returncode, ran.stderr) == (1, "plan.py: /nowhere/x.svg: No such file or directory\n")
    assert "gpt2: " in ran.stdout
