"""scripts/align.py as its user runs it: sample.py reads what a stage leaves; what cannot be is refused in one line."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
from alignment_runs import ALPHABET, base
from manyhands.align.chat import MARKERS
from manyhands.checkpoint.checkpoints import tensors_in
from manyhands.checkpoint.export import load_model, write_export
from manyhands.checkpoint.manifest import MANIFEST
from manyhands.launch.program import Refused

SHORT = [
    "--train.steps", "2", "--train.global-batch", "8", "--log.no-plots", "--data.speeches", "0",
    "--data.held-out", "16", "--data.letters", "6",
]  # fmt: skip


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model that has never seen the template, as `python -m manyhands.checkpoint.export` leaves it."""
    model = base().float()
    metadata = {"config": asdict(model.config), "corpus": {"name": "test", "alphabet": ALPHABET}, "step": 3}
    target = tmp_path_factory.mktemp("base") / "model.safetensors"
    write_export(dict(model.named_parameters()), metadata, target)
    return target


def align(root, outputs, *words):
    # without a corpus at hand: the manual that every Python carries
    environ = os.environ | {
        "MANYHANDS_OUTPUTS": str(outputs), "MANYHANDS_SHAKESPEARE_URL": "", "MANYHANDS_DATA": str(outputs),
        "MANYHANDS_PLAYS": "",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    environ.pop("MANYHANDS_SHAKESPEARE", None)
    command = [sys.executable, root / "scripts" / "align.py", *map(str, words)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)


@pytest.mark.ranks
def test_a_stage_leaves_what_sample_reads_and_the_next_stage_starts_from(root, program, exported, tmp_path, capsys):
    folder = tmp_path / "sft"
    run = align(root, tmp_path, "sft", "--from", exported, "--checkpoint.folder", folder, "--lora.rank", 2, *SHORT)
    assert run.returncode == 0, run.stderr
    assert "step 2: 0.0% of 16 held-out words right (chance: 4.2%)" in run.stdout
    model, metadata = load_model(folder)
    assert metadata["corpus"]["alphabet"] == [*ALPHABET, *MARKERS]
    assert model.config.vocab_size == len(ALPHABET) + len(MARKERS)
    lines = [json.loads(line) for line in (tmp_path / "align" / "latest" / "alignment.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "accuracy" in line] == [0, 2]

    words = [str(folder), "--prompt", "sort cab", "--length", "5", "--device", "cpu"]
    assert program("sample").main([*words, "--chat"]) == 0
    assert len(capsys.readouterr().out) <= 5 * len("<|assistant|>") + 1, "the answer alone, and no prompt"
    with pytest.raises(Refused, match="--system is for --chat"):
        program("sample").main([*words, "--system", "You are a fool."])
    capsys.readouterr()

    words = ["--from", "gone", "--checkpoint.folder", folder, "--lora.rank", 2, *SHORT, "--train.steps", 3]
    resumed = align(root, tmp_path, "sft", *words)
    assert "resumed from" in resumed.stdout, resumed.stderr
    # the markers' rows learn beside the adapters, as before
    learning = [tensors_in(folder / f"step-{step:08}", "optimizer.")[0] for step in (2, 3)]
    assert learning[1] == learning[0] and "tokens.weight.exp_avg" in learning[1]

    again = align(root, tmp_path, "grpo", "--from", exported, "--checkpoint.folder", folder, *SHORT)
    assert again.returncode == 2
    assert "holds checkpoints of sft, not of grpo" in again.stderr and "Traceback" not in again.stderr
    assert (folder / "step-00000002" / MANIFEST).exists(), "what is there stays"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--from", "nowhere"], "nowhere holds no checkpoint; name the folder in which a run keeps them"),
        (["--from", "nowhere", "--parallel.strategy", "pp"], "alignment needs whole logits on a rank"),
    ],
)
def test_what_cannot_be_ends_with_status_2_and_one_sentence(root, tmp_path, flags, sentence):
    run = align(root, tmp_path, "sft", *flags)
    assert run.returncode == 2
    assert run.stderr.startswith("align.py: ") and sentence in run.stderr
    assert "Traceback" not in run.stderr
