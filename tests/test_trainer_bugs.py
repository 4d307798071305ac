"""Defects of published trainers, each of which let "the loss go down": none of them is here.

Through the trainer's own modules, with tiny models. What concerns gradients (averaged, accumulated, clipped:
picotron#39, build-nanogpt#30, torchtitan#766) is held in `test_strategies`, what concerns checkpoints in
`test_training`.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from manyhands.config.layout import Layout, resolve_layout
from manyhands.config.options import OptionError, model_config, read_options
from manyhands.gpt.model import GPT

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

    for layout in (Layout(replicate=96), Layout(shard=12, replicate=8), Layout(pipeline=4, replicate=6, tensor=2)):
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
