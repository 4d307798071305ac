"""scripts/align.py on a folder as transformers writes it: its tokenizer, its template, conversations from a file."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from manyhands.align.options import from_elsewhere, read_options, trainer_options
from manyhands.align.run import Alignment, _begin, learner
from manyhands.align.stage import corpus_of_conversations
from manyhands.checkpoint import export
from manyhands.checkpoint.export import load_model
from manyhands.checkpoint.folders import ModelFolder
from manyhands.checkpoint.manifest import read_manifest
from manyhands.config.layout import resolve_layout
from manyhands.config.options import OptionError
from manyhands.data.shakespeare import DataError
from manyhands.data.tokenizer import tokenizer_of_folder
from manyhands.gpt.lora import add_lora
from manyhands.measure.tensor_bytes import local_part
from manyhands.train.preemption import PreemptionHandler
from manyhands.train.start import resume
from test_chat_templates import CHATML, folder_with, messages

SCRIPTS = Path(__file__).parents[1] / "scripts"
TALKS = [messages(f"What follows {i}?", f"{i + 1}.", "And then?", f"It is {i + 2}.") for i in range(20)]


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama with a tokenizer that puts BOS before a text, and ChatML, whose end its configuration lacks."""
    import transformers

    folder_with(tmp_path / "model", CHATML)
    size = len(tokenizer_of_folder(tmp_path / "model").vocab) + 3  # padded
    sizes = dict(vocab_size=size, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=128, bos_token_id=0, eos_token_id=1)
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    return tmp_path / "model"


@pytest.fixture
def talks(tmp_path):
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    return tmp_path / "talks.jsonl"


def align(tmp_path, *words, nproc=1):
    environ = os.environ | {"MANYHANDS_OUTPUTS": str(tmp_path / "outputs"), "OMP_NUM_THREADS": "1"}
    launch = (
        [SCRIPTS / "launch.py", "--nproc", nproc, SCRIPTS / "align.py", "--"] if nproc > 1 else [SCRIPTS / "align.py"]
    )
    words = [*words, "--log.no-plots", "--log.sample", "6", "--train.device", "cpu"]
    return subprocess.Popen(
        list(map(str, [sys.executable, *launch, *words])), env=environ, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def done(process):
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    return out


@pytest.mark.full
@pytest.mark.ranks
def test_a_folder_is_taught_on_ranks_killed_resumed_without_it_and_transformers_has_the_loss(folder, talks, tmp_path):
    import transformers

    kept, words = tmp_path / "kept", ["--data.file", talks, "--train.global-batch", "8", "--optimizer.lr", "0.01"]
    words += ["--from", folder, "--checkpoint.folder", kept, "--checkpoint.every", "2", "--parallel.strategy", "fsdp"]
    began = align(tmp_path, "sft", *words, "--train.steps", "4000", nproc=2)
    limit = time.monotonic() + 200
    while not list(kept.glob("step-*/manifest.json")):
        assert began.poll() is None and time.monotonic() < limit
        time.sleep(0.1)
    began.send_signal(signal.SIGKILL)
    began.communicate(timeout=60)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    shutil.rmtree(folder)
    step = int(max(kept.glob("step-*/manifest.json")).parent.name.partition("-")[2]) + 4
    said = done(align(tmp_path, "sft", *words, "--train.steps", step, nproc=2))
    assert "resumed from" in said and "And then? -> " in said
    about = read_manifest(kept / f"step-{step:08d}").metadata
    assert about["base"] == {"name": "model", "licence": "apache-2.0"} and about["corpus"]["name"] == "talks"

    assert export.main([str(kept), str(tmp_path / "out"), str(step)]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == CHATML and model.generation_config.eos_token_id == [1, 3]
    nats, count = 0.0, 0
    for talk in TALKS[18:]:
        ids = tokenizer.apply_chat_template(talk, return_tensors="pt")["input_ids"]
        assert ids[0].tolist() == theirs.apply_chat_template(talk)["input_ids"]
        labels = torch.full_like(ids, -100)
        for i in (1, 3):
            begin = len(tokenizer.apply_chat_template(talk[:i], add_generation_prompt=True)["input_ids"])
            end = len(tokenizer.apply_chat_template(talk[: i + 1])["input_ids"]) - 1  # without the line feed at its end
            assert ids[0, end - 1] == 3, "the end is learnt"
            labels[:, begin:end] = ids[:, begin:end]
        with torch.no_grad():
            loss, n = model(ids, labels=labels).loss.item(), int((labels[:, 1:] != -100).sum())
        nats, count = nats + loss * n, count + n
    assert nats / count == pytest.approx(about["val_loss"], abs=1e-4)
    again, metadata = load_model(tmp_path / "out")
    assert metadata["corpus"]["vocabulary"] == about["corpus"]["vocabulary"]
    taught = load_model(kept, str(step))[0].state_dict()
    assert all(torch.equal(tensor, taught[name]) for name, tensor in again.state_dict().items())


@pytest.mark.ranks
def test_a_taught_checkpoint_answers_by_its_template_and_adapters_learn_too(folder, talks, tmp_path, program, capsys):
    words = ["--data.file", talks, "--train.global-batch", "4", "--train.steps", "2", "--lora.rank", "2"]
    said = done(align(tmp_path, "sft", "--from", folder, *words, "--checkpoint.folder", tmp_path / "kept"))
    assert "held-out words" not in said, "there are none"
    shutil.rmtree(folder)
    model, metadata = load_model(tmp_path / "kept")
    assert (model.config.block_size, metadata["base"]["name"]) == (128, "model")
    flags = ["--prompt", "Who?", "--length", "5", "--temperature", "0", "--device", "cpu", "--chat"]
    assert program("sample").main([str(tmp_path / "kept"), *flags]) == 0
    tokenizer = export.tokenizer_of(metadata)
    ids = tokenizer.encode(
        "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n"
        "<|im_start|>assistant\n",
        special=True,
    )
    with torch.no_grad():
        new = model.generate(ids[None], 5, temperature=0)[0, len(ids) :].tolist()
    end = next((k for k, i in enumerate(new) if i in (1, 3)), 5)
    assert capsys.readouterr().out == f"{program('sample').shown(tokenizer.decode(new[:end]))}\n"


def taught(ranks, words, tmp_path, whole):
    """The run of these words, from the folder's shares or, as what has new tokens, from the whole model."""
    os.environ["MANYHANDS_OUTPUTS"] = str(tmp_path)
    wanted = read_options([*words, "--log.no-plots", "--train.device", "cpu"])
    base, metadata = _begin(wanted, print)
    assert isinstance(base, ModelFolder), "nobody has read a weight"
    config, tokenizer = learner(wanted, base.config, metadata)
    corpus = corpus_of_conversations(wanted.data.file, tokenizer, config.block_size, print)
    layout = resolve_layout(trainer_options(wanted, config), config, ranks.world_size)
    base = load_model(wanted.source)[0] if whole else base
    run = Alignment(wanted, base, config, layout, corpus, ranks, PreemptionHandler(ranks), metadata)
    notes, held = [], sum(local_part(p).numel() for p in run.parallel.named_parameters().values())
    run.report.note = notes.append
    resume(run)
    run.go()
    read = re.search(r"has read ([\d.]+) MB", " ".join(notes))
    return run.val_losses, run.parallel.named_full_parameters(), held, read and float(read[1])


@pytest.mark.parametrize(
    ("flags", "share"),
    [
        ("--parallel.strategy fsdp", 1 / 2),
        pytest.param("--parallel.strategy tp", 1 / 2, marks=pytest.mark.full),
        ("--lora.rank 2", 1),
    ],
)
def test_a_rank_reads_what_it_holds_of_a_folder_and_learns_the_same(flags, share, folder, talks, tmp_path, pool):
    words = ["sft", "--from", str(folder), "--data.file", str(talks), "--train.global-batch", "8"]
    words += ["--train.steps", "3", "--optimizer.lr", "0.01", *flags.split()]
    num_params = load_model(folder)[0].num_params()
    whole, shares = (pool.run(2, taught, words, tmp_path, whole) for whole in (True, False))
    for (before, old, *_), (losses, weights, held, read_mb) in zip(whole, shares, strict=True):
        assert losses == before and losses[3] < losses[0]
        assert weights.keys() == old.keys() and all(torch.equal(weights[name], old[name]) for name in old)
        assert share * num_params <= held < (share + 0.2) * num_params
        assert read_mb == pytest.approx(4e-6 * share * num_params, abs=0.06)


@pytest.mark.ranks
@pytest.mark.parametrize("method", [pytest.param("dpo", marks=pytest.mark.full), "grpo"])
def test_a_folder_learns_from_its_own_answers_to_the_task(method, folder, tmp_path):
    words = ["--train.global-batch", "8", "--train.steps", "2", "--data.held-out", "8", "--dpo.questions", "10"]
    said = done(align(tmp_path, method, "--from", folder, *words))
    assert "step 2: 0.0% of 8 held-out words right" in said


def test_what_comes_from_elsewhere_is_taught_gently_at_first_and_when_it_goes_on(folder, tmp_path):
    def rates(*words):
        options = read_options(["sft", *map(str, words)])
        return options.optimizer.lr, options.train.micro_batch, options.optimizer.warmup

    assert rates("--from", folder) == (2e-5, 1, 3) and rates("--from", "elsewhere") == (3e-3, None, None)
    assert rates("--from", folder, "--train.steps", "1000", "--optimizer.lr", "0.1") == (0.1, 1, 30)
    assert rates("--from", folder, "--optimizer.warmup", "7") == (2e-5, 1, 7)
    (tmp_path / "kept" / "step-00000002").mkdir(parents=True)
    manifest = tmp_path / "kept" / "step-00000002" / "manifest.json"
    manifest.write_text(json.dumps({"metadata": {"base": None}}))
    assert not from_elsewhere(tmp_path / "kept")
    manifest.write_text(json.dumps({"metadata": {"base": {"name": "model"}}}))
    assert rates("--from", "gone", "--checkpoint.folder", tmp_path / "kept") == (2e-5, 1, 3)
    assert rates("--from", tmp_path / "kept") == (2e-5, 1, 3), "the next stage"


def test_conversations_that_do_not_fit_are_counted_and_a_line_that_the_template_refuses_is_named(folder, talks):
    tokenizer, told = tokenizer_of_folder(folder), []
    corpus = corpus_of_conversations(talks, tokenizer, 200, told.append)
    assert (len(corpus.learned), len(corpus.held_out), told) == (18, 2, [])
    assert [talk for *_, talk in corpus.held_out] == TALKS[18:] and corpus.epochs(9, 64) == 0.5
    with open(talks, "a") as file:
        file.write(json.dumps({"messages": messages("long " * 200, "b")}) + "\n")
    assert corpus_of_conversations(talks, tokenizer, 200, told.append).sha256 != corpus.sha256
    assert told == ["1 of 21 conversations have more than 200 tokens and are left out"]
    with pytest.raises(DataError, match="has 0 conversations of at most 3 tokens; use two or more"):
        corpus_of_conversations(talks, tokenizer, 3, told.append)
    (folder / "chat_template.jinja").write_text(
        "{% if messages[0].content == 'bad' %}{{ raise_exception('bad') }}" + CHATML + "{% endif %}"
    )
    with pytest.raises(DataError, match="talks.jsonl, line 1, cannot be used .the chat template writes no end token"):
        corpus_of_conversations(talks, tokenizer_of_folder(folder), 200, told.append)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["dpo", "--data.file", "a.jsonl"], "data.file=a.jsonl holds answers to imitate, for sft; dpo asks the task"),
        (["sft", "--data.file", ""], "data.file is empty .is a variable of the shell unset.*name one, or leave it out"),
    ],
)
def test_a_file_that_cannot_be_is_refused(words, sentence):
    with pytest.raises(OptionError, match=sentence):
        read_options([*words, "--from", "nowhere"])


def numbers(text):
    """Bytes "between two steps" and "at its peak" of a line."""
    return [float(number) * 2**20 for number in re.findall(r"([\d.]+) MiB (?:between|at)", text)]


@pytest.mark.ranks
def test_a_dry_run_says_what_it_takes_with_lora_and_without(folder, talks, tmp_path):
    words = ["--from", folder, "--data.file", talks, "--ranks", "2", "--parallel.strategy", "fsdp", "--dry-run"]
    model = load_model(folder)[0]
    whole, thin = (done(align(tmp_path, "sft", *words, *more)) for more in ([], ["--lora.rank", "8"]))
    assert f"{model.num_params():,} parameters" in whole and "2 ranks, strategy fsdp" in whole
    with_lora = re.search("with LoRA alone .align.py, --lora.rank 8. a rank keeps (.*)", whole)[1]
    without = re.search("without LoRA a rank keeps (.*)", thin)[1]
    assert numbers(without)[0] == pytest.approx(16 * model.num_params() / 2, rel=0.1)
    adapters = add_lora(model, 8, 8.0)
    learn = sum(p.numel() for p in adapters.parameters() if p.requires_grad)
    all_of = sum(p.numel() for p in adapters.parameters())
    assert numbers(with_lora)[0] == pytest.approx((4 * all_of + 12 * learn) / 2, rel=0.1)
    for text, line in ((whole, without), (thin, with_lora)):  # each stands in the other's table, too
        between = float(re.search(r"total +([\d.]+) MiB", text)[1]) * 2**20
        assert between == pytest.approx(numbers(line)[0])
    assert "it fits: " in thin and not (tmp_path / "outputs").exists()
    plays = ["--from", SCRIPTS.parent / "assets" / "models" / "plays.safetensors", "--dry-run", "--gpu-gib", "0.001"]
    said = done(align(tmp_path, "dpo", *plays))
    assert "IT DOES NOT FIT" in said and "with LoRA alone" in said and "the reference takes" in said


@pytest.mark.ranks
@pytest.mark.parametrize("broken", ["template", pytest.param("line", marks=pytest.mark.full)])
def test_what_cannot_be_taught_is_one_sentence_before_the_first_step(broken, folder, talks, tmp_path):
    if broken == "template":
        (folder / "chat_template.jinja").unlink()
    else:
        talks.write_text(talks.read_text() + "{\n")
    process = align(tmp_path, "sft", "--from", folder, "--data.file", talks)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2 and err.count("\n") == 1 and err.startswith("align.py: ")
    expected = {
        "template": "the model has no chat template; put its chat_template.jinja",
        "line": "line 21, cannot be used",
    }
    assert expected[broken] in err
