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
        ("--train.compile", ("train.compile needs a C++ compiler", "no-compile"), 1),
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


REFUSED = {
    "sample.py --lenght 3": "there is no flag --lenght; did you mean --length?",
    "sample.py --length": "--length needs a whole number",
    "train.py --train.step=4": "there is no flag --train.step; did you mean --train.steps?",
    "train.py --parallel.strategy fdsp": "--parallel.strategy fdsp is not one of ddp, zero1, fsdp, tp, pp, deepspeed;"
    " did you mean fsdp?",
    "align.py": "name {sft,dpo,grpo} and --from",
    "serve.py --port abc": "--port abc is not a whole number",
    "launch.py --nprocs=2": "unrecognized arguments: --nprocs=2; did you mean --nproc?",
    "plan.py --machine none.toml": "none.toml cannot be read: No such file or directory",
    "plan.py --preset gpt2 --plot {folder}": "is no picture; use a name that ends in .png, .svg or .pdf",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_value_that_cannot_be_is_one_line_with_what_is_allowed(root, tmp_path, words):
    program, *flags = words.format(folder=tmp_path).split()
    command = [sys.executable, f"scripts/{program}", *flags]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=250, stdin=subprocess.DEVNULL)
    assert ran.stderr.startswith(f"{program}: ") and REFUSED[words] in ran.stderr
    assert ran.stderr.count("\n") == 1 and (ran.returncode, ran.stdout) == (2, "")
