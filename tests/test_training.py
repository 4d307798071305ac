"""A whole training run: what one number of ranks and one strategy saved, another continues.

And what published trainers got wrong while "the loss went down" (picotron#39, build-nanogpt#30, torchtitan#766): what
concerns gradients is held in `test_strategies`.
"""

import json
import os
import shutil
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from manyhands.checkpoint.manifest import CheckpointError
from manyhands.config.layout import Layout, resolve_layout
from manyhands.config.options import (
    CheckpointOptions,
    LogOptions,
    ModelOptions,
    OptimizerOptions,
    OptionError,
    Options,
    ParallelOptions,
    TrainOptions,
    model_config,
    read_options,
)
from manyhands.data.corpus import Corpus, get_batch
from manyhands.gpt.model import GPT
from manyhands.launch.metrics import fingerprint
from manyhands.train.preemption import PreemptionHandler
from manyhands.train.run import Run
from manyhands.train.start import prompt_ids, random_state, refuse_text, resume, seed_dropout

TEXT = "to be, or not to be: that is the question. " * 40
BUDGET_FP64 = 1e-9  # AdamW divides by roots of small numbers: a little more than plain SGD's 1e-10
BASE = Options(
    model=ModelOptions(n_layer=4, n_head=2, n_embd=16, block_size=8),
    train=TrainOptions(steps=8, global_batch=8, precision="fp64", stall_s=60),
    optimizer=OptimizerOptions(lr=1e-2, warmup=2),
    log=LogOptions(every=1, eval_every=4, eval_batches=1, sample=3, prompt="t", plots=False),
    checkpoint=CheckpointOptions(every=4, keep=9),
)
SHORT = replace(
    BASE, train=replace(BASE.train, steps=4), log=replace(BASE.log, sample=1),
    checkpoint=replace(BASE.checkpoint, every=2),
)  # fmt: skip
ONE = (1, ParallelOptions())
DDP = (2, ParallelOptions())
ZERO1 = (2, ParallelOptions(strategy="zero1"))
FSDP = (4, ParallelOptions(strategy="fsdp"))
HYBRID = (4, ParallelOptions(strategy="fsdp", sharding="hybrid"))
TP = (2, ParallelOptions(strategy="tp", sequence_parallel=True))
PP = (2, ParallelOptions(strategy="pp"))
CONTEXT = (2, ParallelOptions(context=2))
CONTEXT_4 = (4, ParallelOptions(strategy="fsdp", context=4))
FSDP_TP = (4, ParallelOptions(strategy="fsdp", tensor=2))


def begin(ranks, options, outputs):
    """The Run of these options, before it resumes, and the list of all that it will note."""

    os.environ["MANYHANDS_OUTPUTS"] = str(outputs)
    corpus = Corpus.from_text("test", TEXT)
    config = model_config(options, len(corpus.vocab))
    layout = resolve_layout(options, config, ranks.world_size)
    run = Run(options, config, layout, corpus, ranks, PreemptionHandler(ranks))
    notes, note = [], run.report.note
    run.report.note = lambda sentence: (notes.append(sentence), note(sentence))
    return run, notes


def go(run):
    with run.preemption:
        return run.go()


def carry_out(ranks, options, outputs):
    """Train on all ranks; what rank 0 saw, and a fingerprint of this rank's weights."""
    run, notes = begin(ranks, options, outputs)
    resume(run)
    first = run.step
    status = go(run)
    lines = []
    if ranks.rank == 0:
        lines = [json.loads(line) for line in (run.folder / "steps.jsonl").read_text().splitlines()]
    return {
        "status": status,
        "first": first,
        "notes": notes,
        "tokens": {line["step"]: line["tokens"] for line in lines},
        "val_losses": run.val_losses,
        "losses": {line["step"]: line["loss"] for line in lines if line.get("loss") is not None},
        "weights": run.parallel.named_full_parameters(),
        "bits": fingerprint(p.detach() for p in run.tensors().values() if not hasattr(p, "to_local")),
        "checkpoints": str(run.checkpoint_folder),
    }


def train(pool, layout, outputs, options=BASE, folder=None):
    n_ranks, parallel = layout
    options = replace(options, parallel=parallel)
    if folder is not None:
        options = replace(options, checkpoint=replace(options.checkpoint, folder=str(folder)))
    return pool.run(n_ranks, carry_out, options, outputs)


def interrupted_at_2(run, folder):
    """A folder that holds of `run`'s checkpoints only the one after 2 steps."""
    folder.mkdir()
    shutil.copytree(Path(run[0]["checkpoints"]) / "step-00000002", folder / "step-00000002")
    return folder


@pytest.fixture(scope="module")
def one_process(pool, tmp_path_factory):
    return train(pool, ONE, tmp_path_factory.mktemp("one"), SHORT)[0]


def assert_same_science(one_process, run):
    for step, loss in run[0]["losses"].items():
        assert loss == pytest.approx(one_process["losses"][step], abs=BUDGET_FP64)
    assert run[0]["val_losses"][4] == pytest.approx(one_process["val_losses"][4], abs=BUDGET_FP64)
    for name, weight in one_process["weights"].items():
        torch.testing.assert_close(run[0]["weights"][name], weight, rtol=0, atol=BUDGET_FP64)


# one among ranks that share the data and one with the model's own axes in `make test`; the others in `make test-full`
ACROSS = {"zero1-fsdp": (ZERO1, FSDP), "pp-tp": (PP, TP)}
MORE = {
    "fsdp-one": (FSDP, ONE), "ddp-zero1": (DDP, ZERO1), "one-fsdp*tp": (ONE, FSDP_TP), "hybrid-ddp": (HYBRID, DDP),
    "fsdp*tp-hybrid": (FSDP_TP, HYBRID), "tp-pp": (TP, PP), "context-fsdp": (CONTEXT, FSDP),
    "one-context": (ONE, CONTEXT_4),
}  # fmt: skip


@pytest.mark.parametrize(
    ("saves", "resumes"),
    [pytest.param(*pair, id=name) for name, pair in ACROSS.items()]
    + [pytest.param(*pair, id=name, marks=pytest.mark.full) for name, pair in MORE.items()],
)
def test_what_one_layout_saved_another_continues(pool, one_process, saves, resumes, tmp_path):
    saved = train(pool, saves, tmp_path, SHORT)
    assert sorted(saved[0]["losses"]) == [1, 2, 3, 4]
    assert_same_science(one_process, saved)
    continued = train(pool, resumes, tmp_path, SHORT, interrupted_at_2(saved, tmp_path / "cut"))
    assert continued[0]["first"] == 2
    assert sorted(continued[0]["losses"]) == [3, 4]
    assert_same_science(one_process, continued)


MIXTURE = replace(
    SHORT, model=replace(BASE.model, experts=4), optimizer=replace(BASE.optimizer, balance_speed=1e-3)
)  # fmt: skip
EXPERTS = {
    "ddp over 2 of 4": (4, ParallelOptions(expert=2)), "fsdp over 2": (2, ParallelOptions(strategy="fsdp", expert=2)),
    "ddp over 4": (4, ParallelOptions(expert=4)), "zero1": ZERO1, "fsdp": FSDP,
    "pp over 2": (4, ParallelOptions(strategy="pp", replicate=2, expert=2)),
    "pp*tp": (4, ParallelOptions("pp", tensor=2)), "fsdp*tp over 2": (4, ParallelOptions("fsdp", tensor=2, expert=2)),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    ("saves", "resumes"),
    [
        ("zero1", "ddp over 4"), ("fsdp over 2", "fsdp"), ("pp over 2", "fsdp*tp over 2"), ("fsdp*tp over 2", "pp*tp"),
        ("pp*tp", "pp over 2"),
    ],
)  # fmt: skip
def test_a_mixture_goes_on_with_its_experts_over_another_number_of_ranks(pool, mixture, saves, resumes, tmp_path):
    saved = train(pool, EXPERTS[saves], tmp_path, MIXTURE)
    assert_same_science(mixture, saved)
    folder = interrupted_at_2(saved, tmp_path / "cut")
    continued = train(pool, EXPERTS[resumes], tmp_path, MIXTURE, folder)
    assert continued[0]["first"] == 2
    assert_same_science(mixture, continued)


@pytest.fixture(scope="module")
def mixture(pool, tmp_path_factory):
    return train(pool, ONE, tmp_path_factory.mktemp("mixture"), MIXTURE)[0]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp over 2", "ddp over 2 of 4", "pp over 2", "fsdp*tp over 2"])
def test_a_mixture_resumed_on_its_own_layout_continues_bit_for_bit(pool, layout, tmp_path):
    whole = train(pool, EXPERTS[layout], tmp_path, MIXTURE)
    continued = train(pool, EXPERTS[layout], tmp_path, MIXTURE, interrupted_at_2(whole, tmp_path / "cut"))
    for rank, (one, other) in enumerate(zip(whole, continued, strict=True)):
        assert one["bits"] == other["bits"], f"rank {rank}"
        assert all(torch.equal(weight, other["weights"][name]) for name, weight in one["weights"].items())
    assert all(whole[0]["losses"][step] == continued[0]["losses"][step] for step in (3, 4))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((2, layout), id=layout.strategy, marks=[pytest.mark.full] * (layout.strategy != "fsdp"))
        for _, layout in (DDP, ZERO1, FSDP, TP, PP)
    ],
)
def test_a_run_resumed_on_its_own_layout_continues_bit_for_bit_dropout_included(pool, layout, tmp_path):
    options = replace(SHORT, model=replace(BASE.model, dropout=0.2), train=replace(SHORT.train, precision="fp32"))
    whole = train(pool, layout, tmp_path, options)
    folder = interrupted_at_2(whole, tmp_path / "cut")
    continued = train(pool, layout, tmp_path, options, folder)
    for rank, (one, other) in enumerate(zip(whole, continued, strict=True)):
        assert one["bits"] == other["bits"], f"rank {rank}"
        for name, weight in one["weights"].items():
            assert torch.equal(weight, other["weights"][name]), name
    for step in (3, 4):
        assert whole[0]["losses"][step] == continued[0]["losses"][step]


def test_a_run_that_goes_on_with_other_options_says_so_and_counts_its_tokens_on(pool, tmp_path):
    length = {"steps": 4}
    for options in (BASE, replace(BASE, train=replace(BASE.train, global_batch=4, seed=5))):
        options = replace(options, train=replace(options.train, **length))
        result = train(pool, ONE, tmp_path, options, folder=tmp_path / "run")[0]
        length = {"steps": 6}
    assert result["tokens"] == {5: 4 * 8 * 8 + 4 * 8, 6: 4 * 8 * 8 + 2 * 4 * 8}
    changed = "train.steps=6 (was 4), train.global_batch=4 (was 8), train.seed=5 (was 1337)"
    assert f"it continues with other options: {changed}" in result["notes"]
    again = train(pool, ONE, tmp_path, options, folder=tmp_path / "run")[0]
    assert len(again["notes"]) == 1 and ", saved by 1 rank (" in again["notes"][0]
    longer = replace(options, train=replace(options.train, steps=7))
    assert train(pool, ONE, tmp_path, longer, folder=tmp_path / "run")[0]["tokens"] == {7: 4 * 8 * 8 + 3 * 4 * 8}
    shorter = replace(options, train=replace(options.train, steps=5))
    notes = train(pool, ONE, tmp_path, shorter, folder=tmp_path / "run")[0]["notes"]
    assert "step 7 is already past train.steps=5: nothing is left to train" in notes


def test_a_folder_is_refused_that_holds_another_model_or_is_in_use_or_holds_only_what_is_damaged(pool, tmp_path):
    train(pool, ONE, tmp_path, SHORT, folder=tmp_path / "run")
    wider, tied = (replace(SHORT, model=replace(BASE.model, **change)) for change in ({"n_embd": 32}, {"tie": True}))
    never, must = (replace(SHORT, checkpoint=replace(SHORT.checkpoint, resume=how)) for how in ("never", "must"))
    for options, folder, sentence in (
        (wider, "run", r"holds another model \(n_embd=16; here n_embd=32\)"),
        (tied, "run", r"holds another model \(tie=False; here tie=True\)"),
        (replace(SHORT, optimizer=OptimizerOptions(name="sgd")), "run", r"does not fit this run: optimizer\."),
        (never, "run", "holds step-00000004 already.* name another folder"),
        (must, "empty", "empty holds no complete checkpoint"),
        (SHORT, "run", "only damaged checkpoints"),
    ):
        if options is SHORT:
            for manifest in (tmp_path / "run").glob("*/manifest.json"):
                manifest.unlink()
        with pytest.raises(AssertionError, match=sentence):
            train(pool, ONE, tmp_path, options, folder=tmp_path / folder)


def refused_with_a_random_state_of_garbage(ranks, options, outputs):
    """What a rank hears that resumes from a checkpoint whose hashes are right and whose state of rank 1 is garbage."""
    run, _ = begin(ranks, options, outputs)
    states = random_state(torch.device("cpu"))
    if ranks.rank == 1:
        states["cpu"].fill_(255)
    with mock.patch("manyhands.train.run.random_state", return_value=states):
        go(run)
    run.close()
    again, _ = begin(replace(ranks), options, outputs)
    try:
        resume(again)
    except CheckpointError as error:
        return str(error)
    finally:
        again.close()


def test_a_random_state_that_no_generator_takes_is_one_sentence_on_all_ranks(pool, tmp_path):
    options = replace(SHORT, checkpoint=replace(SHORT.checkpoint, folder=str(tmp_path / "run")))
    said = pool.run(2, refused_with_a_random_state_of_garbage, options, tmp_path)
    sentence = "step-00000004 cannot be resumed from: the state of its random numbers is damaged"
    assert said[0] == said[1] and sentence in said[0] and "remove this checkpoint" in said[0]


@dataclass
class Who:
    rank: int


def test_no_two_data_ranks_stages_seeds_or_restarts_draw_the_same_dropout():
    """seed * (rank + 1) * (local_rank + 1) gave ranks 2 and 8 of two nodes of 6 the same numbers."""

    def seeds(layout, seed, step):
        drawn = {}
        for rank in range(layout.world_size):
            seed_dropout(seed, layout, Who(rank), step)
            place = layout.coordinates(rank)
            drawn.setdefault((layout.data_rank(rank), place["pipeline"]), set()).add(torch.initial_seed())
        assert all(len(group) == 1 for group in drawn.values()), "tensor ranks must draw the same"
        return [group.pop() for group in drawn.values()]

    for layout in (Layout(replicate=96), Layout(shard=12, replicate=8), Layout(pipeline=4, replicate=6, tensor=2)):
        many = [one for seed in range(3) for step in (0, 4) for one in seeds(layout, seed, step)]
        assert len(set(many)) == len(many)


def test_a_text_without_a_newline_is_sampled_from_its_first_token():
    text = Corpus.from_text("short", "to be or not " * 100)
    assert text.decode(prompt_ids(read_options([]), text)) == "t"
    asked = ["--log.prompt", "x"]
    with pytest.raises(OptionError, match="log.prompt='x'"):
        refuse_text(read_options(asked), model_config(read_options(asked), 65), text)
    asked += ["--log.sample", "0"]
    refuse_text(read_options(asked), model_config(read_options(asked), 65), text)


def overflow(ranks, options, outputs):
    run, _ = begin(ranks, options, outputs)
    run.report.start()
    run.scale.scale = 2.0**40  # gradients of a loss of 3 times this are infinite in fp16
    before = run.parallel.named_full_parameters()
    run.train_step()
    after = run.parallel.named_full_parameters()
    return run.scale.scale, all(torch.equal(before[name], after[name]) for name in before), run.step


def test_a_step_whose_fp16_gradients_overflow_is_not_taken_on_any_rank(pool, tmp_path):
    options = replace(BASE, train=replace(BASE.train, precision="fp16"))
    assert pool.run(2, overflow, options, tmp_path) == [(2.0**39, True, 1)] * 2


def evaluate(ranks, options, outputs):
    """The shapes and ids that this rank's model saw in an evaluation with a sample, its loss, and that of one model."""
    run, _ = begin(ranks, options, outputs)
    run.report.start()
    seen = []
    run.parallel.modules[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    run.evaluate()
    model = GPT(run.config).double()
    model.load_state_dict(run.parallel.named_full_parameters())
    with torch.no_grad():
        expected = [model.eval()(*get_batch(run.val_ids, i, 8, 8, 0, 1, 1))[1] for i in range(2)]
    return seen, run.val_losses[0], torch.stack(expected).mean().item()


def test_all_ranks_evaluate_each_its_share(pool, tmp_path):
    """Rank 0 evaluated and sampled while the others waited; afterwards the others stayed in eval()."""
    options = replace(BASE, log=replace(BASE.log, eval_batches=2), model=replace(BASE.model, dropout=0.3))
    found = pool.run(2, evaluate, options, tmp_path)
    for seen, loss, expected in found:
        assert [len(ids) for ids in seen] == [4, 4, 1, 1, 1], "two batches and three tokens"
        assert loss == pytest.approx(expected, abs=1e-9) and loss == found[0][1]
    assert not any(torch.equal(a, b) for a in found[0][0][:2] for b in found[1][0][:2]), "ranks evaluate the same"


RARELY = replace(BASE.log, every=100, eval_every=0)


def test_gradients_that_are_no_numbers_end_the_run_before_they_are_saved(pool, tmp_path):
    wild = replace(
        BASE, log=RARELY, checkpoint=CheckpointOptions(),
        optimizer=OptimizerOptions(name="sgd", lr=1e30, warmup=0, clip=0),
    )  # fmt: skip
    with pytest.raises(AssertionError, match="the gradient norm is nan at step 8"):
        train(pool, ONE, tmp_path, wild, folder=tmp_path / "run")
    assert not list((tmp_path / "run").glob("step-*"))


def signalled(ranks, options, outputs, name, step):
    """(status, notes, how it ended, what its folder holds) of a run; rank 0 gets a signal after `step` steps."""
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started these tests ignores
    run, _ = begin(ranks, options, outputs)
    ends, train_step, close = [], run.train_step, run.report.close

    def step_and_signal():
        norm = train_step()
        if run.step == step and ranks.rank == 0:
            os.kill(os.getpid(), getattr(signal, name))
        return norm

    run.train_step = step_and_signal
    run.report.close = lambda reason: (ends.append(reason), close(reason))
    try:
        with mock.patch("manyhands.train.preemption.INTERVAL_S", 0):  # the ranks ask each other after each step
            resume(run)
            status = go(run)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    return status, ends[0], sorted(os.listdir(run.checkpoint_folder))


def test_ctrl_c_saves_where_a_folder_is_named_and_asks_for_no_requeue(pool, tmp_path):
    calm = replace(BASE, train=replace(BASE.train, steps=10_000), log=RARELY, checkpoint=CheckpointOptions())
    named = replace(calm, checkpoint=CheckpointOptions(str(tmp_path / "run")))
    (status, end, left), _ = pool.run(2, signalled, named, tmp_path, "SIGINT", 3)
    step = int(left[-1].removeprefix("step-"))
    assert status == 0 and end == f"stopped by SIGINT and saved at step {step}" and 3 <= step < 10_000
    assert "requeue.json" not in left
    (status, end, left), _ = pool.run(2, signalled, calm, tmp_path, "SIGINT", 3)
    assert status == 130 and "not saved: set --checkpoint.folder" in end
    assert not [name for name in left if "step-" in name]


def signalled_in_evaluation(ranks, options, outputs):
    """(status, the steps at which a validation batch was begun, validation losses); rank 0 gets a SIGTERM in batch 3 of
    step 4.
    """
    run, _ = begin(ranks, options, outputs)
    begun, evaluate = [], run.parallel.evaluate

    def evaluate_and_signal(*share):
        begun.append(run.step)
        if begun.count(4) == 3 and ranks.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*share)

    run.parallel.evaluate = evaluate_and_signal
    before = signal.getsignal(signal.SIGTERM)
    try:
        # they ask each other whenever there is an occasion
        with mock.patch("manyhands.train.preemption.INTERVAL_S", 0):
            resume(run)
            status = go(run)
    finally:
        signal.signal(signal.SIGTERM, before)
    return status, begun, run.val_losses


def test_a_signal_within_an_evaluation_is_heard_before_its_next_batch_and_the_evaluation_is_made_up_for(pool, tmp_path):
    options = replace(
        BASE, log=replace(BASE.log, eval_batches=6), checkpoint=CheckpointOptions(folder=str(tmp_path / "run"))
    )  # fmt: skip
    for status, begun, val_losses in pool.run(2, signalled_in_evaluation, options, tmp_path):
        assert status == 0 and begun == 6 * [0] + 3 * [4] and list(val_losses) == [0]
    assert {"requeue.json", "step-00000004"} <= set(os.listdir(tmp_path / "run"))
    continued = pool.run(2, carry_out, options, tmp_path)[0]
    assert continued["first"] == 4 and list(continued["val_losses"]) == [4, 8]


def test_fp16_takes_steps_on_a_cpu_and_comes_close_to_fp32(pool, tmp_path):
    for precision in ("fp32", "fp16"):
        options = replace(BASE, train=replace(BASE.train, precision=precision))
        results = train(pool, ONE, tmp_path / precision, options)
        losses = results[0]["losses"]
        assert losses[8] < losses[1] - 0.1
        if precision == "fp32":
            reference = losses
        else:
            assert losses[8] == pytest.approx(reference[8], abs=0.05)
            assert losses[8] != reference[8]
