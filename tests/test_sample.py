"""What a run leaves can be exported, read back without it, and made to write."""

import asyncio
import json
import math
import shutil
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from live_server import Live, ask
from manyhands.checkpoint import export
from manyhands.checkpoint.checkpoints import Checkpoints, whole_tensors
from manyhands.checkpoint.export import load_model
from manyhands.checkpoint.manifest import CheckpointError, read_manifest
from manyhands.config import options
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT, experts_of
from manyhands.launch.program import Refused
from manyhands.train.dry_run import model_from_flags
from rank_pool import run_on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

ALPHABET = list("\n !ABCDEFGHabcdefgh")
# a vocabulary wider than the alphabet, as --model.vocab-size allows
CONFIG = GPTConfig(vocab_size=23, block_size=16, n_layer=2, n_head=2, n_embd=8)
LOSSES = {10: 2.0, 20: 1.5, 30: 1.75}


def gpt(step, config=CONFIG):
    torch.manual_seed(step)
    model = GPT(config)
    with torch.no_grad():  # far from uniform, so that temperature matters
        for parameter in model.parameters():
            parameter.mul_(8)
    return model


def _train(ranks, folder, config):
    mesh = init_device_mesh("cpu", (ranks.world_size,))
    checkpoints = Checkpoints(folder, ranks, keep=9)
    for step, loss in LOSSES.items():
        named = gpt(step, config).named_parameters()
        tensors = {f"model.{name}": distribute_tensor(p.detach(), mesh, [Shard(0)]) for name, p in named}
        tensors["optimizer.norm.weight.exp_avg"] = torch.ones(8)
        corpus = {"name": "test", "sha256": "0" * 64, "alphabet": ALPHABET}
        metadata = {"config": asdict(config), "corpus": corpus, "step": step, "layout": "shard 2", "world_size": 2}
        checkpoints.save(step, tensors, metadata, val_loss=loss)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run's folder with checkpoints of steps 10, 20 (the best) and 30, sharded over two ranks."""
    folder = tmp_path_factory.mktemp("run")
    run_on_ranks(2, _train, folder / "checkpoints", CONFIG)
    return folder


pytestmark = pytest.mark.usefixtures("one_thread")


def same(model, other):
    ours, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def damage(path):
    file = next(path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(("wanted", "step"), [("best", 20), ("newest", 30), ("10", 10)])
def test_one_process_reads_the_best_the_newest_or_a_given_step_whole(wanted, step, trained):
    for source in (trained, trained / "checkpoints"):
        model, metadata = load_model(source, wanted)
        assert same(model, gpt(step)) and not model.training
        assert (metadata["step"], metadata["val_loss"]) == (step, LOSSES[step])
        assert metadata["source"].endswith(f"step-000000{step}")


def test_a_damaged_one_is_passed_over_aloud_and_refused_when_asked_for_by_number(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "checkpoints" / "step-00000020")
    told = []
    assert same(load_model(tmp_path, "best", told.append)[0], gpt(30)), "the best that can be read"
    assert len(told) == 1 and "step 20 is passed over: " in told[0] and "safetensors has" in told[0]
    with pytest.raises(CheckpointError, match="step-00000020.*safetensors has"):
        load_model(tmp_path, "20")
    for step in (10, 30):
        damage(tmp_path / "checkpoints" / f"step-000000{step}")
    with pytest.raises(CheckpointError, match="no checkpoint in .* can be read: .*safetensors has"):
        load_model(tmp_path, "best", told.append)
    assert len(told) == 1, "it is said once"


def test_what_is_not_there_is_said(trained, tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint; name the folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="has no step 15, only 30, 20, 10"):
        load_model(trained, "15")
    with pytest.raises(CheckpointError, match="invalid step='last'; use best, newest or a number"):
        load_model(trained, "last")


def test_an_export_is_the_model_and_needs_nothing_of_the_run(trained, tmp_path, capsys):
    target = tmp_path / "out" / "model.safetensors"
    assert export.main([str(trained), str(target)]) == 0
    said = capsys.readouterr().out
    assert (
        said == f"{target}: {gpt(20).num_params():,} parameters of step 20 from {trained}/checkpoints/step-00000020\n"
    )
    assert sorted(p.name for p in target.parent.iterdir()) == ["model.json", "model.safetensors"]
    model, metadata = load_model(target)
    assert same(model, gpt(20))
    assert (metadata["step"], metadata["val_loss"], metadata["corpus"]["alphabet"]) == (20, 1.5, ALPHABET)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(ids)[0], gpt(20).eval()(ids)[0])


def test_an_export_is_read_by_safetensors_itself_under_the_models_own_names(trained, tmp_path):
    from safetensors.torch import load_file

    assert export.main([str(trained), str(tmp_path / "m.safetensors"), "30"]) == 0
    model = GPT(CONFIG)
    model.load_state_dict(load_file(tmp_path / "m.safetensors"))
    assert same(model, gpt(30))


def test_another_step_than_an_exports_own_is_refused(trained, tmp_path):
    export.main([str(trained), str(tmp_path / "m.safetensors")])
    for step in ("best", "newest", "20"):
        assert load_model(tmp_path / "m.safetensors", step)[1]["step"] == 20
    with pytest.raises(CheckpointError, match=r"m.safetensors holds step 20 alone; ask for it, or .* a folder"):
        load_model(tmp_path / "m.safetensors", "5")


def test_a_changed_export_is_refused_by_name(trained, tmp_path):
    target = tmp_path / "m.safetensors"
    export.main([str(trained), str(target)])
    content = target.read_bytes()
    target.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="m.safetensors has changed since it was written"):
        load_model(target)
    target.write_bytes(content)
    (tmp_path / "m.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"m.json cannot be used \(format: field required\); it says what m.safetensors holds"
    ):
        load_model(target)


def test_an_export_that_cannot_be_written_leaves_nothing_and_is_refused(trained, tmp_path):
    with pytest.raises(Refused, match="does not end in .safetensors"):
        export.main([str(trained), str(tmp_path / "model.pt")])
    (tmp_path / "model.safetensors").mkdir()  # the weights cannot take its place
    with pytest.raises(Refused):
        export.main([str(trained), str(tmp_path / "model.safetensors")])
    assert not (tmp_path / "model.json").exists(), "a description without its weights"


@pytest.fixture
def written(program, trained, capfd):
    """written(*flags) -> (status, text on stdout, text on stderr)"""

    def write(*flags, source=trained):
        try:
            status = program("sample").main([str(source), *map(str, flags)])
        except ValueError as error:  # what the program prints
            print(f"sample.py: {error}", file=sys.stderr)
            status = 2
        return status, *capfd.readouterr()

    return write


def test_text_goes_to_stdout_and_what_was_read_to_stderr(written, trained):
    status, text, told = written("--prompt", "ABBA", "--length", 40, "--device", "cpu")
    assert status == 0
    assert text.startswith("ABBA") and text.endswith("\n") and len(text) == 4 + 40 + 1
    assert set(text) <= set(ALPHABET), "tokens that the alphabet lacks are never drawn"
    assert (
        told == f"{trained}/checkpoints/step-00000020: step 20, validation loss 1.5000,"
        f" {gpt(20).num_params():,} parameters\n"
    )


def test_without_a_prompt_it_starts_with_a_new_line(written):
    assert written("--length", 1)[1].startswith("\n")


def test_the_same_seed_writes_the_same_and_another_seed_another(written):
    first, again, other = (written("--length", 60, "--seed", seed)[1] for seed in (1, 1, 2))
    assert first == again != other


def test_temperature_0_takes_the_likeliest_as_the_model_itself_does(written):
    ids = torch.tensor([[ALPHABET.index("A")]])
    model = gpt(20).eval()
    for _ in range(40):  # longer than the block: it looks at the last 16
        logits = model(ids[:, -CONFIG.block_size :])[0][:, -1, : len(ALPHABET)]
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
    expected = "".join(ALPHABET[i] for i in ids[0].tolist())
    for flags in (["--temperature", 0], ["--top-k", 1, "--temperature", 5]):
        assert written("--prompt", "A", "--length", 40, *flags)[1] == expected + "\n"


def test_weights_of_which_nothing_can_be_drawn_are_one_sentence_with_the_cure(written, tmp_path):
    weights = {name: torch.full_like(p.detach(), 1e38) for name, p in gpt(20).named_parameters()}
    export.write_export(weights, METADATA, tmp_path / "m.safetensors")
    status, text, told = written("--length", 3, source=tmp_path / "m.safetensors")
    assert status == 2 and "sample.py: the model gives NaN or infinity" in told and "use another checkpoint" in told


def _save_tiny(ranks, folder, flags):
    """A checkpoint of the model that each of `flags` asks for, with uneven biases of its experts."""
    for i, flag in enumerate(flags):
        run = model_from_flags(f"{flag} {TINY}", ranks, len(ALPHABET))
        tensors = run.parallel.checkpoint_tensors(run.optimizer)
        for name, tensor in tensors.items():
            if name.endswith("mlp.bias"):
                tensor.copy_(torch.linspace(-1, 1, len(tensor)))
            elif name.startswith("model."):
                tensor.mul_(8)
        checkpoints = Checkpoints(folder / str(i), ranks)
        checkpoints.save(3, tensors, METADATA | {"config": asdict(run.config), "layout": "one rank 1", "world_size": 1})
        checkpoints.close()


TINY = "--model.n-layer 2 --model.n-head 2 --model.n-embd 8 --model.block-size 16 --model.vocab-size 23"
METADATA = {"config": asdict(CONFIG), "corpus": {"name": "test", "sha256": "0" * 64, "alphabet": ALPHABET}, "step": 3}
PRESETS = tomllib.loads((Path(options.__file__).parent / "presets.toml").read_text())
LLAMAS = {name for name, one in PRESETS.items() if one.get("model", {}).get("style") == "llama"}
KINDS = [f"--preset {name}{' --model.n-kv-head 1' * (name in LLAMAS)}" for name in PRESETS] + [
    "--model.experts 4 --model.shared-experts 1 --model.router sigmoid --model.qkv-bias --optimizer.balance-loss 0",
]


@pytest.fixture(scope="module")
def kinds(pool, tmp_path_factory):
    """{kind: a folder of checkpoints of it}"""
    folder = tmp_path_factory.mktemp("kinds")
    pool.run(1, _save_tiny, folder, KINDS)
    return {kind: folder / str(i) for i, kind in enumerate(KINDS)}


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_of_every_presets_kind_is_read_by_the_sampler_and_the_server_with_equal_logits(
    kind, kinds, tmp_path, program
):
    target = tmp_path / "m.safetensors"
    assert export.main([str(kinds[kind]), str(target)]) == 0
    right, ids = load_model(kinds[kind])[0], [3, 1, 4]
    assert any(layer.bias.any() for layer in experts_of(right)) == (right.config.experts > 1)
    logits_TV, _ = right(torch.tensor([ids]))
    model, _ = load_model(target)
    assert torch.equal(model(torch.tensor([ids]))[0], logits_TV)
    sampled = program("sample").drawn(model, ids, 1, 0, None, len(ALPHABET), torch.Generator())
    log_p_V = logits_TV[0, -1, : len(ALPHABET)].double().log_softmax(-1)
    likeliest = log_p_V.argmax().item()
    assert list(sampled) == [likeliest]
    held_out_ids = torch.arange(400) % len(ALPHABET)
    with Live(*load_model(target), held_out_ids=held_out_ids) as live:
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 0}
        status, content = asyncio.run(ask(live, "/v1/completions", body))
    told = json.loads(content)["choices"][0]["logprobs"]
    assert status == 200 and told["tokens"] == [ALPHABET[likeliest]]
    assert told["token_logprobs"] == pytest.approx([log_p_V[likeliest].item()], abs=1e-5)


def test_an_export_that_would_not_be_read_is_not_called_done(tmp_path):
    lacking = {name: p.detach() for name, p in gpt(20).named_parameters() if name != "norm.bias"}
    with pytest.raises(CheckpointError, match=r"m.safetensors is not the GPT that it says .*norm.bias"):
        export.write_export(lacking, METADATA, tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_nan_in_experts_biases_is_refused_by_its_name(bad, kinds, written, tmp_path, pool):
    folder = tmp_path / "run"
    pool.run(1, _spoil_a_bias, kinds["--preset shakespeare-moe"], folder, bad)
    sentence = f"blocks.1.mlp.bias of step 4 in {folder}/step-00000004 holds NaN or infinity; use another step"
    assert written("--step", "newest", source=folder) == (2, "", f"sample.py: {sentence}\n")
    with pytest.raises(CheckpointError, match="holds NaN or infinity"):
        export.main([str(folder), str(tmp_path / "m.safetensors")])
    assert not (tmp_path / "m.safetensors").exists()


def _spoil_a_bias(ranks, source, folder, bad):
    (path,) = source.glob("step-*")
    tensors = whole_tensors(path)
    tensors["model.blocks.1.mlp.bias"][2] = bad
    checkpoints = Checkpoints(folder, ranks)
    checkpoints.save(4, tensors, read_manifest(path).metadata | {"step": 4})
    checkpoints.close()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--prompt", "AZ"], "--prompt: 'Z' is not among the vocabulary's 19 tokens; leave it out"),
        (["--prompt", ""], "--prompt is empty; give the text at least one character"),
        (["--length", "-1"], "length=-1 is too small; use at least 0"),
        (["--temperature", "-0.1"], "temperature=-0.1 is too small; use at least 0"),
        (["--temperature", "nan"], "temperature=nan is not finite"),
        (["--top-k", "0"], "top_k=0 is too small; use at least 1"),
        (["--device", "xpu"], "--device xpu: torch sees no GPU of that kind here; use --device cpu"),
        (["--step", "15"], "has no step 15, only 30, 20, 10"),
    ],
)
def test_a_value_that_makes_no_sense_is_one_sentence_and_status_2(flags, sentence, written):
    status, text, told = written(*flags)
    assert (status, text) == (2, "")
    assert told.startswith("sample.py: ") and sentence in told and told.count("\n") == 1


def test_the_program_runs_by_itself_and_without_an_install(root, trained, tmp_path):
    command = [sys.executable, "-P", str(root / "scripts" / "sample.py"), str(trained), "--length", "5"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=120)
    assert (done.returncode, len(done.stdout)) == (0, 7), done.stderr
    command[3] = str(tmp_path / "nowhere")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == f"sample.py: {tmp_path}/nowhere holds no checkpoint; name the folder in which a run keeps them\n"
    )


def test_control_characters_of_an_alphabet_do_not_reach_the_terminal(program):
    assert program("sample").shown("\x1b[2Ja\n\t\u00e9\x07") == "\\x1b[2Ja\n\t\u00e9\\x07"
