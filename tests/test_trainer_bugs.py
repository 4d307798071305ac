"""Defects of published trainers, each of which let "the loss go down": none of them is here.

Through the trainer's own modules, on two ranks with tiny models. Where a mistake was made is written in each test.
"""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from manyhands.config.layout import Layout, resolve_layout
from manyhands.config.options import OptionError, model_config, read_options
from manyhands.gpt.model import GPT
from manyhands.train.resume import resume

TINY = (
    "--model.n-layer 2 --model.n-head 2 --model.n-embd 16 --model.block-size 8 --train.global-batch 12 --train.steps 6"
    " --log.every 1 --log.eval-every 3 --log.eval-batches 2 --log.sample 5 --log.no-plots --log.no-progress"
)
TEXT = "the quick brown fox jumps over the lazy dog\n" * 40


def read(flags, world_size):
    options = read_options(f"{TINY} {flags}".split())
    config = model_config(options, 28)
    return options, config, resolve_layout(options, config, world_size)


def corpus():
    from manyhands.data.corpus import Corpus

    return Corpus.from_text("offline", TEXT)


def build(ranks, flags, started=True):
    """A `run.Run`, as scripts/train.py makes it; started: ready for single steps."""
    from manyhands.train.run import Run

    options, config, layout = read(flags, ranks.world_size)
    run = Run(options, config, layout, corpus(), ranks)
    if started:
        run.report.start(config.num_params())
    return run


def weights(run):
    return {name: p.clone() for name, p in run.parallel.named_full_parameters().items()}


def one_step_gradients(run):
    run.parallel.forward_backward(*run.batch(run.train_ids, 0, 1))
    return {name: g.clone() for name, g in run.parallel.named_full_gradients().items()}


def assert_equal(mine, expected, tolerance=0.0):
    assert set(mine) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


# ------------------------------------------------------------------ arithmetic


def dtypes_inside(ranks, flags):
    run = build(ranks, flags)
    found, products = set(), []
    for module in run.parallel.modules[0].modules():
        if isinstance(module, torch.nn.Linear):
            products.append(module.register_forward_hook(lambda m, i, out: found.add(out.dtype)))
    before = weights(run)
    run.train_step()
    after = weights(run)
    changed = sum(not torch.equal(before[name], after[name]) for name in before)
    return {
        "products": found,
        "weights": {p.dtype for p in run.parallel.named_parameters().values()},
        "gradients": {value.dtype for value in run.tensors().values() if value.ndim},
        "changed": changed == len(before),
        "finite": all(value.isfinite().all() for value in after.values()),
    }


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "precision, dtype",
    [("fp64", torch.float64), ("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_each_precision_multiplies_in_what_its_name_says_and_trains_on_a_cpu(
    pool, tmp_path, strategy, precision, dtype
):
    """A table entry mapped bf16 to float16; and a trainer stepped only where a GradScaler existed: on a CPU, never."""
    flags = f"--train.precision {precision} --parallel.strategy {strategy}"
    for found in pool.run(2, dtypes_inside, flags, environ={"MANYHANDS_OUTPUTS": str(tmp_path)}):
        assert found["products"] == {dtype}
        kept = {torch.float64 if precision == "fp64" else torch.float32}
        assert found["weights"] == found["gradients"] == kept
        assert found["changed"], "some weights did not move"
        assert found["finite"]


def overflow(ranks):
    run = build(ranks, "--train.precision fp16")
    run.scale.scale = 2.0**40  # gradients of a loss of 3 times this are infinite in fp16
    before = weights(run)
    run.train_step()
    after = weights(run)
    return run.scale.scale, all(torch.equal(before[name], after[name]) for name in before), run.step


def test_a_step_whose_fp16_gradients_overflow_is_not_taken_on_any_rank(pool, tmp_path):
    for scale, unchanged, step in pool.run(2, overflow, environ={"MANYHANDS_OUTPUTS": str(tmp_path)}):
        assert unchanged and scale == 2.0**39 and step == 1


# ------------------------------------------------------------------ gradients


def gradients_and_weights(ranks, flags):
    run = build(ranks, flags)
    before = weights(run)
    gradients = one_step_gradients(run)
    after = weights(run)
    own = build(ranks, flags).parallel
    # what this rank alone would compute
    model = GPT(own.config).double()
    model.load_state_dict({name: value.double() for name, value in before.items()})
    model(*run.batch(run.train_ids, 0, 1))[1].backward()
    local = {name: p.grad for name, p in model.named_parameters()}
    return gradients, local, all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_what_is_averaged_are_gradients_and_not_parameters(pool, tmp_path, strategy):
    """A post-accumulate hook receives the *parameter* (picotron#39): gradients then differ between ranks."""
    flags = f"--train.precision fp64 --parallel.strategy {strategy}"
    found = pool.run(2, gradients_and_weights, flags, environ={"MANYHANDS_OUTPUTS": str(tmp_path)})
    (mine, first, unmoved), (others, second, _) = found
    assert unmoved, "the backward alone changed weights"
    assert_equal(others, mine)
    assert_equal(mine, {name: (first[name] + second[name]) / 2 for name in first}, 1e-12)
    assert max((first[name] - mine[name]).abs().max() for name in mine) > 1e-3, "the ranks saw the same data"


def accumulate(ranks, flags, count):
    """Gradients of `count` micro-batches, and the bytes that had been sent when each backward was done."""
    from manyhands.measure import wire

    options, _, _ = read(flags, ranks.world_size)
    share = options.train.global_batch // ranks.world_size
    run = build(ranks, f"{flags} --train.micro-batch {share // count}")
    ids, targets = run.batch(run.train_ids, 0, 1)
    run.parallel.forward_backward(ids, targets)  # DDP makes its buckets anew after its first backward
    run.optimizer.zero_grad()
    sent = []
    with wire.watch() as seen:

        class Timer:
            def forward_done(self):
                pass

            def backward_done(self):
                sent.append(sum(call.bytes for call in seen.calls if "reduce" in call.op))

        run.parallel.forward_backward(ids, targets, Timer())
        total = sum(call.bytes for call in seen.calls if "reduce" in call.op)
    return {n: g.clone() for n, g in run.parallel.named_full_gradients().items()}, sent, total


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_micro_batches_add_up_to_the_whole_batch_and_are_sent_once(pool, tmp_path, strategy):
    """no_sync around the backward alone (build-nanogpt#30); a loss divided twice or not at all (torchtitan#2972)."""
    flags = f"--train.precision fp64 --parallel.strategy {strategy}"
    environ = {"MANYHANDS_OUTPUTS": str(tmp_path)}
    whole, _, whole_bytes = pool.run(2, accumulate, flags, 1, environ=environ)[0]
    cut, sent, cut_bytes = pool.run(2, accumulate, flags, 3, environ=environ)[0]
    assert_equal(cut, whole, 1e-13)
    assert len(sent) == 3
    assert sent[:2] == [0, 0], "gradients were sent before the last micro-batch"
    assert cut_bytes == whole_bytes > 0
    model = GPT(read(flags, 1)[1])
    torch.manual_seed(1337)
    model = GPT(model.config).double()
    from manyhands.data.corpus import get_batch

    model(*get_batch(corpus().train_ids, 0, 12, 8, 0, 1, 1))[1].backward()
    assert_equal(whole, {name: p.grad for name, p in model.named_parameters()}, 1e-12)


def clipped(ranks, flags):
    run = build(ranks, flags)
    unclipped = one_step_gradients(run)
    norm = run.parallel.clip(0.01).item()
    gradients = {name: g.clone() for name, g in run.parallel.named_full_gradients().items()}
    from torch.distributed.tensor import DTensor

    own = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in run.parallel.named_parameters().values()
    ]
    return norm, unclipped, gradients, torch.stack([g.norm() for g in own]).norm().item()


def norm_of(gradients):
    return torch.stack([g.norm() for g in gradients.values()]).norm().item()


@pytest.mark.parametrize("flags", ["", "--parallel.strategy fsdp", "--parallel.strategy tp", "--parallel.strategy pp"])
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(pool, tmp_path, flags):
    """The norm of a local shard is smaller (pytorch#170862, torchtitan#766, torchtune#2420)."""
    flags = f"--train.precision fp64 {flags}"
    found = pool.run(2, clipped, flags, environ={"MANYHANDS_OUTPUTS": str(tmp_path)})
    for norm, unclipped, gradients, local in found:
        assert norm == pytest.approx(norm_of(unclipped), rel=1e-12)
        assert norm_of(gradients) == pytest.approx(0.01, rel=1e-3)
        if "strategy" in flags:
            assert local < 0.0099, "each rank was clipped for itself"
    assert found[0][0] == found[1][0]


# ------------------------------------------------------------------ data, seeds, schedule


def test_no_two_ranks_draw_the_same_dropout_and_no_two_seeds_either():
    """seed * (rank + 1) * (local_rank + 1) gave ranks 2 and 8 of two nodes of 6 the same numbers."""
    from manyhands.train.resume import seed_dropout

    @dataclasses.dataclass
    class Who:
        rank: int

    def seeds(layout, seed):
        drawn = {}
        for rank in range(layout.world_size):
            seed_dropout(seed, layout, Who(rank))
            place = layout.coordinates(rank)
            drawn.setdefault((layout.data_rank(rank), place["pipeline"]), set()).add(torch.initial_seed())
        assert all(len(group) == 1 for group in drawn.values()), "tensor ranks must draw the same"
        return [group.pop() for group in drawn.values()]

    for layout in (
        Layout(replicate=96),
        Layout(shard=12, replicate=8),
        Layout(pipeline=4, replicate=6, tensor=2),
    ):
        many = [seed for first in range(3) for seed in seeds(layout, first)]
        assert len(set(many)) == len(many)


def test_a_text_without_a_newline_is_sampled_from_its_first_token():
    from manyhands.data.corpus import Corpus
    from manyhands.train.preconditions import prompt_ids, refuse_text

    text = Corpus.from_text("short", "to be or not " * 100)
    assert text.decode(prompt_ids(read_options([]), text)) == "t"
    asked = ["--log.prompt", "x"]
    with pytest.raises(OptionError, match="log.prompt='x'"):
        refuse_text(read_options(asked), model_config(read_options(asked), 65), text)
    asked += ["--log.sample", "0"]
    refuse_text(read_options(asked), model_config(read_options(asked), 65), text)


def test_every_rank_reads_its_own_share_and_the_next_step_another():
    """Ranks that draw the same data, or the same data every epoch, still let the loss go down."""
    from manyhands.data.corpus import get_batch

    ids = torch.arange(100_000)  # a window is known by its first number
    steps = [[get_batch(ids, step, 24, 8, rank, 6, seed=1)[0][:, 0] for rank in range(6)] for step in range(5)]
    whole = [get_batch(ids, step, 24, 8, 0, 1, seed=1)[0][:, 0] for step in range(5)]
    for shares, expected in zip(steps, whole, strict=True):
        torch.testing.assert_close(torch.cat(shares), expected)
    for one, other in itertools.combinations(itertools.chain(*steps), 2):
        assert not torch.equal(one, other)


def test_the_learning_rate_reaches_its_peak_in_every_run_that_is_accepted():
    """515 steps with 1,000 of warm-up ended below the peak."""
    from manyhands.parallel.optimizer import learning_rate

    with pytest.raises(OptionError, match="warmup=1000.*515"):
        read_options(["--train.steps", "515", "--optimizer.warmup", "1000"])
    for steps, warmup in itertools.product((1, 2, 3, 19, 40, 515, 2000), (None, 0, "most")):
        flags = f"--train.steps {steps} --optimizer.lr 0.5"
        if warmup is not None:
            flags += f" --optimizer.warmup {steps - 1 if warmup == 'most' else warmup}"
        options = read_options(flags.split())
        rates = [learning_rate(step, options) for step in range(steps)]
        assert max(rates) == pytest.approx(0.5), f"{steps} steps, warm-up {warmup}"
        if steps > 2 and warmup != "most":
            assert rates[-1] == pytest.approx(0.05), "it ends at a tenth"


# ------------------------------------------------------------------ evaluation and what is logged


def evaluate(ranks):
    """What each rank did in an evaluation with a sample, and what it left."""
    run = build(ranks, "--model.dropout 0.3")
    seen = []
    run.parallel.modules[0].register_forward_pre_hook(lambda m, args: seen.append(args[0].clone()))
    parts = list(run.parallel.modules[0].modules())
    parts[-1].eval()  # what was in eval mode stays in it
    before = [part.training for part in parts], torch.get_rng_state()
    run.evaluate()
    loss = run.val_losses[0]
    same = [part.training for part in parts] == before[0], torch.equal(torch.get_rng_state(), before[1])
    batches = [ids for ids in seen if ids.shape == (6, 8)]
    model = GPT(run.config)
    model.load_state_dict(run.parallel.named_full_parameters())
    from manyhands.data.corpus import get_batch

    with torch.no_grad():
        expected = [
            model.eval()(*get_batch(run.val_ids, i, 12, 8, 0, 1, 1))[1].item()
            for i in range(run.options.log.eval_batches)
        ]
    return same, batches, len(seen), loss, float(np.mean(expected))


def test_all_ranks_evaluate_each_its_share_and_stay_in_train_mode(pool, tmp_path):
    """Rank 0 evaluated and sampled while the others waited; afterwards the others stayed in eval()."""
    found = pool.run(2, evaluate, environ={"MANYHANDS_OUTPUTS": str(tmp_path)})
    for (modes, randomness), batches, forwards, loss, expected in found:
        assert modes and randomness
        assert len(batches) == 2 and forwards == 2 + 5, "two batches and five tokens"
        assert loss == pytest.approx(expected, abs=1e-6)
    assert found[0][3] == found[1][3]
    assert not any(torch.equal(a, b) for a in found[0][1] for b in found[1][1]), "ranks evaluate the same"


def train_to_the_end(ranks, flags, folder):
    """A whole run, as `run.train` drives it; what its report wrote is on rank 0."""
    run = build(ranks, f"{flags} --checkpoint.folder {folder}", started=False)
    resume(run)
    began = run.step
    run.go()
    lines = (run.folder / "steps.jsonl").read_text().splitlines()
    return began, run.step, [json.loads(line) for line in lines], weights(run)


def test_samples_per_second_count_the_global_batch_and_all_ranks(pool, tmp_path):
    """14 samples/s were logged and 905 were true: the batch size was left out."""
    environ = {"MANYHANDS_OUTPUTS": str(tmp_path)}
    _, _, lines, _ = pool.run(2, train_to_the_end, "--train.micro-batch 3", tmp_path / "kept", environ=environ)[0]
    timed = [line for line in lines if line["dt_s"]]
    assert len(timed) == 6
    for line in timed:
        assert line["samples_per_s"] * line["dt_s"] == pytest.approx(12)
        assert line["samples_per_s_per_rank"] * line["dt_s"] == pytest.approx(6)
        assert line["tokens_per_s"] * line["dt_s"] == pytest.approx(12 * 8)
        assert line["tokens"] == line["step"] * 12 * 8
        assert line["dtf_s"] + line["dtb_s"] <= line["dt_s"] * 1.01, "a part is longer than the step"
        assert line["dtf_s"] > 0 and line["dtb_s"] > 0


# ------------------------------------------------------------------ checkpoints


def test_a_run_resumes_from_where_it_saves(pool, tmp_path):
    """Resume looked in another directory than save, and started from scratch without a word."""
    environ, kept = {"MANYHANDS_OUTPUTS": str(tmp_path)}, tmp_path / "kept"
    flags = "--checkpoint.every 2 --model.dropout 0.2 --optimizer.warmup 1"
    began, ended, _, _ = pool.run(2, train_to_the_end, f"{flags} --train.steps 6", kept, environ=environ)[0]
    assert (began, ended) == (0, 6)
    began, ended, lines, _ = pool.run(2, train_to_the_end, f"{flags} --train.steps 8", kept, environ=environ)[0]
    assert (began, ended) == (6, 8)
    assert [line["step"] for line in lines if line["loss"]] == [7, 8]


def save(ranks, flags, folder):
    run = build(ranks, f"{flags} --checkpoint.folder {folder}")
    for _ in range(2):
        run.train_step()
    run.save()
    run.checkpoints.wait()
    return weights(run)


def load(ranks, flags, folder):
    run = build(ranks, f"{flags} --checkpoint.folder {folder}")
    resume(run)
    state = {name: value.clone() for name, value in run.tensors().items() if name.startswith("optimizer.")}
    return run.step, weights(run), state


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_a_checkpoint_of_shards_holds_all_of_them(pool, tmp_path, strategy):
    """Under ZeRO rank 0 saved its own shard alone, and the rest was lost."""
    environ = {"MANYHANDS_OUTPUTS": str(tmp_path)}
    expected = pool.run(2, save, f"--parallel.strategy {strategy}", tmp_path / "a", environ=environ)[0]
    step, mine, state = pool.run(1, load, "", tmp_path / "a", environ=environ)[0]
    assert step == 2
    assert_equal(mine, expected)
    # one process that took the same two steps has the same moments
    pool.run(1, save, "", tmp_path / "b", environ=environ)
    _, _, alone = pool.run(1, load, "", tmp_path / "b", environ=environ)[0]
    moments = {name: value for name, value in alone.items() if value.ndim}
    assert len(moments) == 2 * len(expected)
    assert all(value.abs().sum() > 0 for name, value in moments.items() if name.endswith("exp_avg_sq"))
    assert_equal({name: state[name] for name in moments}, moments, 1e-5)
    assert {float(value) for value in state.values() if not value.ndim} == {2.0}


def stepped(ranks, flags):
    run = build(ranks, flags)
    losses = [run.parallel.mean_loss(torch.tensor(float(ranks.rank))).item()]
    dist.barrier()
    return losses


def test_the_loss_shown_is_the_mean_over_ranks_and_read_where_there_is_one(pool, tmp_path):
    """A loss read on a pipeline's stage that has none was -1 (torchtitan#547)."""
    environ = {"MANYHANDS_OUTPUTS": str(tmp_path)}
    assert pool.run(2, stepped, "", environ=environ) == [[0.5], [0.5]]
    assert pool.run(2, stepped, "--parallel.strategy pp", environ=environ) == [[1.0], [1.0]], "stage 0 gives 0"
    _, _, lines, _ = pool.run(2, train_to_the_end, "--parallel.strategy pp", tmp_path / "kept", environ=environ)[0]
    assert all(2.5 < line["loss"] < 4.5 for line in lines if line["loss"] is not None)
