"""Training on a text of one's own: no document sees another, under any strategy; resumed runs; samples."""

import os
import random
import shutil
from dataclasses import replace
from unittest import mock

import pytest
import torch
from manyhands.checkpoint.export import load_model, tokenizer_of
from manyhands.config.options import (
    CheckpointOptions,
    DataOptions,
    LogOptions,
    ModelOptions,
    OptimizerOptions,
    Options,
    TrainOptions,
    model_config,
    read_options,
)
from manyhands.data.corpus import open_text
from manyhands.data.preparation import PrepareConfig, prepare_text
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from one_process import assert_equal, one_process, options_of, steps_of
from test_strategies import compiled_steps

SEPARATOR = 3
# few tokens, so that most windows hold several documents
CONFIG = GPTConfig(vocab_size=13, block_size=16, n_layer=4, n_head=4, n_embd=32, separator=SEPARATOR)


@pytest.fixture(scope="module")
def gpt():
    torch.manual_seed(1)
    model = GPT(CONFIG).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # attention far from uniform
    return model


def test_no_token_sees_another_document_and_each_sees_its_own(gpt):
    ids = torch.tensor([[5, 6, SEPARATOR, 7, 8, 9, SEPARATOR, SEPARATOR, 10, 11, 4, 5]])
    documents = [0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3]
    with torch.no_grad():
        before, _ = gpt(ids)
        for place in range(ids.shape[1]):
            if ids[0, place] == SEPARATOR:
                continue
            other = ids.clone()
            other[0, place] = 12 if place else 0
            moved = (gpt(other)[0] != before).any(-1)[0].tolist()
            expected = [i >= place and document == documents[place] for i, document in enumerate(documents)]
            assert moved == expected, f"place {place}"


def test_without_a_separator_the_model_is_the_one_it_was(gpt):
    ids = torch.randint(CONFIG.vocab_size, (3, 16), generator=torch.Generator().manual_seed(2))
    plain = GPT(replace(CONFIG, separator=None)).double().eval()
    plain.load_state_dict(gpt.state_dict())
    with torch.no_grad():
        assert not torch.equal(plain(ids)[0], gpt(ids)[0])
        ids[ids == SEPARATOR] = 0
        torch.testing.assert_close(plain(ids)[0], gpt(ids)[0], rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def reference():
    return one_process(options_of(), CONFIG)


CASES = {
    "flat": dict(strategy="ddp", all_reduce="flat", micro_batch=1),
    "fsdp": dict(strategy="fsdp", activation_checkpointing="block"),
    "tp, sequence and loss parallel": dict(strategy="tp", sequence_parallel=True, loss_parallel=True),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.full] * (case != "fsdp")) for case in CASES])
def test_four_ranks_mask_as_one_process_does(pool, reference, case):
    assert_equal(pool.run(4, steps_of, options_of(**CASES[case]), CONFIG), reference)


def compiled_steps_by_blocks(ranks, options, config):
    """As on a GPU, but for its kernels: a CPU's have no backward, so their products are written out in Python."""
    from manyhands.parallel import mesh_strategy
    from torch.nn.attention import flex_attention

    with (
        mock.patch.object(mesh_strategy, "skips_blocks", return_value=True),
        mock.patch.object(flex_attention, "_validate_device"),
        mock.patch.object(mesh_strategy, "document_blocks", wraps=mesh_strategy.document_blocks) as blocks,
    ):
        result, _ = compiled_steps(ranks, options, config, "aot_eager")
    assert blocks.called
    return result


@pytest.mark.full
@pytest.mark.parametrize("case", [dict(strategy="ddp", micro_batch=2), dict(strategy="fsdp")], ids=str)
def test_attention_by_blocks_of_positions_is_that_of_the_whole_mask(pool, case):
    # positions in two blocks of 128, the second not full, and documents that end within either
    config = replace(CONFIG, n_layer=2, n_embd=16, block_size=160, vocab_size=61)
    results = pool.run(2, compiled_steps_by_blocks, options_of(compile=True, **case), config)
    assert_equal(results, one_process(options_of(), config))


WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in ("n", "r", "ée", "ll", "ck")]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    draw = random.Random(1)
    texts = ["\n".join(" ".join(draw.choices(WORDS, k=8)) for _ in range(6)) for _ in range(60)]
    path = tmp_path_factory.mktemp("files") / "mine.txt"
    path.write_text("\n\n\n".join(texts), "utf-8")
    return path


def prepare(ranks, files, folder, tokenizer):
    config = PrepareConfig(tokenizer=tokenizer, vocab_size=300, shard_bytes=4000)
    return prepare_text([files], folder, config, ranks, tell=lambda text: None)


@pytest.fixture(scope="module")
def texts(pool, files, tmp_path_factory):
    """{tokenizer: folder}"""
    folders = {kind: tmp_path_factory.mktemp("data") / f"mine-{kind}" for kind in ("bpe", "char")}
    for kind, folder in folders.items():
        pool.run(1, prepare, files, folder, kind)
    return folders


STEPS, EVERY = 8, 2
OPTIONS = Options(
    model=ModelOptions(n_layer=1, n_head=1, n_embd=8, block_size=32, dropout=0.2),
    train=TrainOptions(steps=STEPS, global_batch=4),
    optimizer=OptimizerOptions(lr=1e-2),
    log=LogOptions(every=1, eval_every=4, eval_batches=1, sample=5, plots=False, progress=False),
    checkpoint=CheckpointOptions(every=EVERY, keep=9),
)


def train(ranks, data, folder):
    """The trainer on `data`, from the newest checkpoint on: (first step, batches, losses, the bits that are left)."""
    from manyhands.config.layout import resolve_layout
    from manyhands.launch.metrics import fingerprint
    from manyhands.train.preemption import PreemptionHandler
    from manyhands.train.run import Run
    from manyhands.train.start import corpus_of, resume

    os.environ["MANYHANDS_OUTPUTS"] = f"{folder}-outputs"
    options = replace(OPTIONS, data=DataOptions(str(data)), checkpoint=replace(OPTIONS.checkpoint, folder=str(folder)))
    corpus = corpus_of(options, ranks)
    config = model_config(options, len(corpus.vocab), corpus.separator)
    layout = resolve_layout(options, config, ranks.world_size)
    run = Run(options, config, layout, corpus, ranks, PreemptionHandler(ranks))
    resume(run)
    began, batch, seen = run.step, run.batch, {}

    def note(ids, step, seed):
        found = batch(ids, step, seed)
        if ids is run.train_ids:
            seen[step] = found[0].tolist()
        return found

    run.batch = note
    assert run.go() == 0
    return began, seen, dict(run.val_losses), fingerprint([*run.tensors().values(), torch.get_rng_state()])


@pytest.fixture(scope="module")
def lives(pool, texts, tmp_path_factory):
    """A run from one go, one that goes on with what it had left at step 4, and their folders."""
    scratch = tmp_path_factory.mktemp("lives")
    whole = pool.run(1, train, texts["bpe"], scratch / "whole")[0]
    for step in (2, 4):
        shutil.copytree(scratch / "whole" / f"step-{step:08}", scratch / "cut" / f"step-{step:08}")
    return whole, pool.run(1, train, texts["bpe"], scratch / "cut")[0], scratch


def test_a_run_that_was_cut_short_goes_on_at_the_very_position_and_ends_with_the_same_bits(lives):
    whole, resumed, _ = lives
    assert (whole[0], resumed[0]) == (0, 4)
    assert sorted(resumed[1]) == [4, 5, 6, 7]
    assert {step: whole[1][step] for step in resumed[1]} == resumed[1]
    assert resumed[2][8] == whole[2][8]
    assert resumed[3] == whole[3]


def test_a_checkpoint_of_another_text_is_refused(lives, texts, pool):
    with pytest.raises(AssertionError, match=r"holds another model|was trained on another text"):
        pool.run(1, train, texts["char"], lives[-1] / "whole")


def test_a_checkpoint_decodes_its_own_samples_without_the_folder(lives, texts, program, capsys, tmp_path):
    from manyhands.checkpoint import export

    assert export.main([str(lives[-1] / "whole"), str(tmp_path / "model.safetensors")]) == 0
    capsys.readouterr()
    for source in (lives[-1] / "whole", tmp_path / "model.safetensors"):
        model, metadata = load_model(source, "best")
        assert model.config.separator == 0
        tokenizer = tokenizer_of(metadata)
        assert program("sample").main([str(source), "--prompt", "dée ", "--length", "40", "--temperature", "1.5"]) == 0
        text = capsys.readouterr().out
        ids = tokenizer.encode("dée ").tolist()
        drawn = program("sample").drawn(model, ids, 40, 1.5, None, 300, torch.Generator().manual_seed(1))
        expected = tokenizer.decode([*ids, *drawn])
        assert text == program("sample").shown(expected) + "\n"
        assert "\ufffd" not in text[:6]
        assert tokenizer.encode("kann bée").tolist() == open_text(texts["bpe"]).encode("kann bée").tolist()


def test_a_folder_that_is_none_is_refused_with_the_cure():
    from manyhands.launch.program import Refused
    from manyhands.train.start import corpus_of

    with pytest.raises(Refused, match=r"nowhere is not a prepared text \(it has no manifest.json\)"):
        corpus_of(read_options(["--data.folder", "nowhere"]))


def test_masks_can_be_switched_off_and_shakespeare_has_none(texts):
    masked, blind = (
        read_options(["--data.folder", str(texts["bpe"]), *flags]) for flags in ([], ["--data.no-mask-documents"])
    )
    assert model_config(masked, 300, 0).separator == 0
    assert model_config(blind, 300, 0).separator is None
    assert model_config(read_options([]), 65).separator is None
