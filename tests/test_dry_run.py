"""The dry run: a configuration file that means the same, and what follows from it, without weights or ranks."""

import dataclasses
import os
import re
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from manyhands.config.layout import resolve_layout
from manyhands.config.options import PRESETS, OptionError, from_preset, merged, model_config, read_options
from manyhands.course.folders import ROOT
from manyhands.data.corpus import Corpus
from manyhands.predict.memory import bytes_per_rank, with_micro_batch
from manyhands.train import dry_run, start


@pytest.fixture(autouse=True)
def _corpus(monkeypatch):
    """A corpus of these tests, whichever this machine has."""
    monkeypatch.setattr(dry_run, "at_hand", lambda: True)
    text = "To be, or not to be: that's $5 & no less.\n" * 2000
    monkeypatch.setattr(dry_run, "corpus_of", lambda options: Corpus.from_text("test", text))


def described(flags, world_size=1):
    return dry_run.describe(read_options(flags.split()), world_size)


def without_places(options):
    return dataclasses.replace(options, config=None, dry_run=False, ranks=None)


def comments(text):
    return "\n".join(line.removeprefix("# ") for line in text.split("\n") if line.startswith("#"))


@pytest.mark.parametrize("preset", PRESETS)
def test_the_printed_file_means_what_was_asked_for(preset, tmp_path):
    flags = ["--train.steps", "7", "--train.micro-batch", "1", "--optimizer.lr", "1e-5", "--log.prompt", "'$\n&"]
    asked = read_options(["--preset", preset, *flags])
    path = tmp_path / "run.toml"
    path.write_text(dry_run.describe(asked, 1), encoding="utf-8")
    assert without_places(read_options(["--config", str(path)])) == asked


@settings(max_examples=100)
@given(prompt=st.text(), lr=st.floats(0, 1e300), folder=st.none() | st.text(), compile=st.booleans())
def test_any_text_and_number_survives_the_file(prompt, lr, folder, compile):
    values = {
        "log": {"prompt": prompt}, "optimizer": {"lr": lr}, "checkpoint": {"folder": folder},
        "train": {"compile": compile}
    }  # fmt: skip
    options = merged(from_preset("nano"), values, "test")
    assert merged(from_preset("nano"), tomllib.loads(dry_run.to_toml(options)), "file") == options


def test_it_says_how_large_how_much_and_how_many():
    text = comments(described("--model.vocab-size 65 --train.steps 300", 2))
    assert "816,705 parameters" in text
    assert "2 ranks, strategy ddp: replicate 2" in text
    assert "24 sequences of 64 = 1,536 tokens" in text and "share is 12 sequences in 1 micro-batch" in text
    assert "300 steps, 460,800 tokens" in text
    # fp32 AdamW: weights, gradients and two moments, 16 bytes each; a checkpoint leaves the gradients out
    assert f"{816_705 * 16 / 2**20:.2f} MiB" in text
    assert f"a checkpoint: {816_705 * 12 / 2**20:.2f} MiB" in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--ranks 5", "train.global_batch=24 does not split over 5 data-parallel ranks"),
        ("--preset llama-nano --parallel.tensor 3 --ranks 3", "model.n_kv_head=2 does not split over 3 tensor ranks"),
    ],
)
def test_it_refuses_what_the_run_would_refuse_with_status_2(monkeypatch, capsys, flags, words):
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split(), "--dry-run"])
    with pytest.raises(SystemExit) as ended:  # and no traceback
        dry_run.dry_run(read_options(sys.argv[1:]))
    shown = capsys.readouterr()
    assert ended.value.code == 2 and shown.err.count(words) == 1 and shown.out == ""


def test_it_counts_for_as_many_ranks_as_it_is_told(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--preset", "gpt-7b", "--ranks", "64", "--dry-run"])
    assert dry_run.dry_run(read_options(sys.argv[1:])) == 0
    shown = comments(capsys.readouterr().out)
    assert "6,715,153,764 parameters" in shown and "64 ranks, strategy fsdp: shard 64" in shown
    assert "1,048,576 tokens" in shown
    assert "--nproc 8 -- --config run.toml\non 8 nodes" in shown
    assert not dist.is_initialized()


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_takes_the_largest_micro_batch_that_fits_on_8_ranks(preset):
    options, room = read_options(["--preset", preset]), 80 * 2**30
    config = model_config(options, 65)
    chosen = with_micro_batch(options, config, 8, 8, room)
    share = options.train.global_batch // 8

    def takes(size):
        tried = dataclasses.replace(options, train=dataclasses.replace(options.train, micro_batch=size))
        return bytes_per_rank(config, resolve_layout(tried, config, 8), tried).on_gpu

    size = chosen.train.micro_batch or share
    assert takes(size) <= 0.9 * room or size == 1
    larger = next((more for more in range(size + 1, share + 1) if share % more == 0), None)
    assert larger is None or takes(larger) > 0.9 * room or larger * config.block_size > 65536


def shown_gib(text, kind):
    number, unit = re.search(rf"^ *{kind} +([\d,.]+) ([GM])iB", text, re.MULTILINE).groups()
    return float(number.replace(",", "")) / (1 if unit == "G" else 1024)


def test_where_state_rests_on_the_host_the_gpu_holds_that_much_less():
    here, there = (comments(described(f"--preset gpt-7b {more}", 8)) for more in ("", "--parallel.offload"))
    spared = shown_gib(here, "at its peak") - shown_gib(there, "at its peak")
    assert spared == pytest.approx(shown_gib(here, "total"), abs=0.02) and "in the host's memory" in there


def test_it_says_what_activations_take_and_with_which_checkpointing():
    flags = "--preset gpt2 --train.micro-batch 8"
    whole = comments(described(flags, 8))
    config, micro_batch = model_config(read_options(["--preset", "gpt2"]), 0), 8
    # bf16: 14 D of products, attention and GELU, 2 D of norms; fp32: the gradient of the head's weight
    least = micro_batch * 1024 * 12 * 16 * 2 * 768 + 4 * config.vocab_size * 768
    assert least / 2**30 == pytest.approx(shown := shown_gib(whole, "activations"), rel=0.02)
    parts = [shown_gib(whole, kind) for kind in ("total", "copies", "activations", "workspace")]
    assert shown_gib(whole, "at its peak") == pytest.approx(sum(parts), abs=0.03)
    less = comments(described(f"{flags} --parallel.activation-checkpointing block", 8))
    assert shown_gib(less, "activations") < 0.6 * shown and "activation checkpointing block" in less


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model.vocab-size 10", "model.vocab_size=10 is less than the corpus's"),
        ("--log.prompt ä", "log.prompt='ä': 'ä' is not among the vocabulary's"),
        ("--gpu-gib 8", "gpu_gib=8 is for --dry-run"),
    ],
)
def test_what_the_corpus_refuses_the_dry_run_refuses_and_a_memory_to_fit_into_is_for_it_alone(flags, words):
    with pytest.raises(OptionError, match=re.escape(words)):
        described(flags)


def run(arguments, cwd, **environ):
    command, env = [sys.executable, *arguments], os.environ | environ
    ran = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=150)
    assert ran.returncode == 0, ran.stderr
    return ran


def test_no_weight_is_allocated_for_the_largest_preset(root):
    """6.7 billion parameters are 25 GiB in fp32: the program's peak stays at what importing torch takes."""
    code = (
        "import resource, sys; from manyhands.train import dry_run; from manyhands.config.options import read_options;"
        "print(dry_run.describe(read_options(sys.argv[1:]), 1));"
        "unit = 1 if sys.platform == 'darwin' else 1024;"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, file=sys.stderr)"
    )
    ran = run(["-c", code, "--preset", "gpt-7b"], root / "scripts")
    assert "6,715,153,764 parameters" in ran.stdout
    assert int(ran.stderr.split()[-1]) < 4 * 2**30


def test_what_is_said_of_the_corpus_is_no_part_of_the_file(root, tmp_path):
    """As a user keeps it: train.py --dry-run > run.toml, without a corpus at hand."""
    nowhere = {"MANYHANDS_SHAKESPEARE_URL": "", "MANYHANDS_SHAKESPEARE": "", "MANYHANDS_DATA": str(tmp_path)}
    nowhere["MANYHANDS_PLAYS"] = ""
    ran = run(["scripts/train.py", "--dry-run"], root, PYTHONPATH="scripts", **nowhere)
    assert "OFFLINE" in ran.stderr and tomllib.loads(ran.stdout)["train"]["steps"] == 300


def test_it_says_whether_it_fits_into_the_machine_that_is_asked_about_or_into_this_one(monkeypatch):
    flags = "--preset gpt-7b --dry-run"
    assert "it fits: " in comments(described(f"{flags} --gpu-gib 800"))
    assert "IT DOES NOT FIT: " in comments(described(f"{flags} --gpu-gib 8"))
    assert [dry_run.fits(needed * 2**30, 40 * 2**30, "of a GPU").partition(":")[0] for needed in (36, 37, 40, 41)] == [
        "it fits", "it fits, but tightly", "it fits, but tightly", "IT DOES NOT FIT"
    ]  # fmt: skip
    monkeypatch.setattr(start, "available_memory_bytes", lambda: 16 * 2**30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "IT DOES NOT FIT: " in comments(described("--preset gpt-7b --dry-run"))
    said = comments(described("--dry-run", world_size=2))
    assert "it fits: " in said and "into the 8.00 GiB that a rank finds here" in said  # two ranks share it


def test_an_accelerator_that_is_not_cuda_is_asked_for_its_own_memory(monkeypatch):
    """A tile of an XPU has 64 GB beside some 900 GB of the host."""
    tile = SimpleNamespace(mem_get_info=lambda: (60 * 10**9, 64 * 10**9))
    monkeypatch.setattr(start.torch, "get_device_module", lambda kind: {"xpu": tile}[kind])
    monkeypatch.setattr(start, "available_memory_bytes", lambda: 900 * 10**9)
    monkeypatch.setattr(dry_run, "gpus_here", lambda: ("xpu", 12))
    assert start.memory_of_a_rank("xpu", 12) == 64 * 10**9 == dry_run.room_of(None, 12)[0]
    assert start.memory_of_a_rank("cpu", 12) == 75 * 10**9


def test_of_a_gpu_that_others_use_too_a_run_takes_what_is_free(monkeypatch):
    options, taken = read_options(["--preset", "gpt2", "--train.precision", "bf16"]), {}
    config = model_config(options, 50257)
    for others in (1, 70):  # GiB in use: by this process's own context, and by somebody's job
        gpu = SimpleNamespace(mem_get_info=lambda others=others: ((80 - others) * 2**30, 80 * 2**30))
        monkeypatch.setattr(start.torch, "get_device_module", lambda kind, gpu=gpu: gpu)
        room = start.memory_of_a_rank("cuda", 1)
        chosen = with_micro_batch(options, config, 1, 1, room)
        taken[others] = chosen.train.micro_batch
        held = bytes_per_rank(config, resolve_layout(chosen, config, 1, 1), chosen).on_gpu
        assert held < (80 - others) * 2**30, f"{others} GiB are in use, and {held / 2**30:.0f} more are planned"
    assert taken[70] < taken[1], taken


@pytest.mark.ranks
def test_a_small_run_of_two_ranks_imports_nothing_of_the_search(tmp_path):
    script = tmp_path / "without_the_search.py"
    script.write_text(
        "import runpy, sys\nsys.argv = ['train.py', '--train.steps', '1', '--log.sample', '0', '--log.no-plots']\n"
        "for name in ('layouts', 'planner', 'memory', 'traffic', 'step_time', 'published_runs'):\n"
        "    sys.modules[f'manyhands.predict.{name}'] = None  # whoever imports it now fails\n"
        f"runpy.run_path('{ROOT}/scripts/train.py', run_name='__main__')\n"
    )
    command = [sys.executable, f"{ROOT}/scripts/launch.py", "--nproc", "2", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0 and "done: " in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("flags", "cure"),
    [
        ("--model.vocab-size 65", "this model has one; train with --model.tie"),
        ("--model.vocab-size 65 --model.tie", None),
        ("--preset llama-nano", None),
        ("--preset llama-nano --model.experts 4", "without biases; train with --optimizer.balance-speed 0"),
        ("--preset llama-nano --model.experts 4 --optimizer.balance-speed 0", None),
    ],
)
def test_it_says_what_an_export_for_transformers_would_refuse(flags, cure):
    text = comments(described(flags))
    assert ("no folder for transformers can be made of it: " in text) == (cure is not None) and (cure or "") in text
