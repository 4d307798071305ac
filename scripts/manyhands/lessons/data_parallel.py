"""Harness and plots of lesson 03: packing, looks at the training, a trained model's text, and its plots."""

import math
import statistics
import time

import torch

from manyhands.checks.predictions import unanswered
from manyhands.launch import recorded_runs
from manyhands.launch.metrics import fingerprint
from manyhands.launch.program import say, say_once
from manyhands.launch.run_folder import show
from manyhands.measure.timing import synchronise, tok_per_s
from manyhands.plots import looks
from manyhands.plots.schedule import gantt
from manyhands.plots.times import compared


def pack(module, bucket_mib):
    """Return the trainable parameters in the order of backward, in lists of at most bucket_mib MiB (or one of them)."""
    packed, room = [], 0
    for p in reversed([p for p in module.parameters() if p.requires_grad]):
        if not packed or p.nbytes > room or p.dtype != packed[-1][-1].dtype:
            packed.append([])
            room = bucket_mib * 2**20
        packed[-1].append(p)
        room -= p.nbytes
    return packed


def expect_equal(found, metrics):
    """Compare all {way: (gradients [P], weights [P], losses [steps])} to 1e-10, and record those of the first way."""
    first, *_ = found.values()
    for name, of_one in found.items():
        for what, mine, theirs in zip(("gradients", "weights", "losses"), first, of_one, strict=True):
            assert (mine - theirs).abs().max() < 1e-10, f"{what} of {name} differ by {(mine - theirs).abs().max():.1e}"
    say_once(f"{', '.join(found)}: gradients, weights and losses are equal to 1e-10")
    gradients, _, losses = first
    metrics.exact(float64_gradient=fingerprint([gradients]), float64_losses=losses)
    metrics.close(float64_losses_close=losses)


class Diary:
    """Looks at a training at four of its steps: the validation loss, and a text that the model makes up."""

    def __init__(self, shakespeare, steps):
        self.shakespeare, self.steps = shakespeare, steps
        self.looks, self.begin_s = [], time.perf_counter()  # (step, validation loss, text)

    def look(self, model, step):
        """Evaluate and write, if it is time. All ranks call it."""
        if step not in [self.steps * third // 3 for third in range(4)]:
            return
        synchronise(self.shakespeare.ranks.device)
        begin_s = time.perf_counter()
        val_loss = self.shakespeare.evaluate(model, num_batches=max(1, self.steps // 20))
        self.looks.append((step, val_loss, self._text(model)))
        say_once(f"step {step:3d}: validation loss {val_loss:.3f}")
        self.begin_s += time.perf_counter() - begin_s  # looking is no training

    def _text(self, model):
        """Return what the model writes after a line break."""
        corpus, device = self.shakespeare.corpus, self.shakespeare.ranks.device
        start_BT, num = corpus.encode("\n")[None].to(device), min(90, self.steps)
        return corpus.decode(model.generate(start_BT, num, generator=torch.Generator().manual_seed(0))[0, 1:])

    def record(self, losses, model):
        """Keep the run's numbers: the mean losses [steps], the weights, and how fast it was."""
        metrics, validation = self.shakespeare.metrics, [loss for _, loss, _ in self.looks]
        metrics.exact(losses=losses, validation=validation, weights=fingerprint(model.parameters()))
        metrics.close(first_losses=losses[:6], first_validation=validation[0])
        metrics.close(tolerance=0.05, last_validation=validation[-1])
        step_s = (time.perf_counter() - self.begin_s) / self.steps
        tokens = self.shakespeare.global_batch, self.shakespeare.config.block_size
        metrics.measured(training_tok_per_s=tok_per_s(*tokens, step_s))

    def draw(self, losses):
        """Draw the loss of each step and the validation losses, and beside them what the model wrote. Rank 0 shows."""
        if self.shakespeare.ranks.rank:
            return
        figure, (axes, beside) = looks.new_figure(10, 4, 1, 2, width_ratios=[1, 1.1])
        validation = looks.VALIDATION | {"ls": "none", "zorder": 3}  # a line through four points would hide the curve
        axes.plot([step for step, _, _ in self.looks], [loss for _, loss, _ in self.looks], **validation)
        axes.lines[-1].set_label("validation")
        axes.plot(range(len(losses)), losses.cpu(), **looks.TRAINING, label="training, mean over the ranks")
        num = self.shakespeare.config.vocab_size
        axes.axhline(math.log(num), **looks.PREDICTED)
        known = f"knowing nothing: ln {num} = {math.log(num):.2f}"
        looks.note(axes, known, (len(losses), math.log(num)), (0, 3), ha="right")
        axes.legend(frameon=False, loc="center right")
        axes.set(xlabel="step", ylabel="loss, nats per character", title=f"ShakespeareGPT on {_ranks(self)}")
        axes.margins(y=0.1)
        beside.axis("off")
        for row, (step, loss, text) in enumerate(self.looks):
            top, line = 1 - 0.26 * row, text.replace("\n", "/")
            beside.text(0, top, f"step {step}, validation {loss:.2f}", weight="bold", va="top")
            font = {"family": "monospace", "va": "top", "parse_math": False}
            beside.text(0, top - 0.07, line[:45] + "\n" + line[45:90], **font)
        show(
            figure,
            "training",
            "the loss falls from ln 65; beside it what the model writes: noise, later shapes of words",
        )


def _ranks(diary):
    n = diary.shakespeare.ranks.world_size
    return f"{n} rank{'s' * (n > 1)}"


def virtual_step(network, k, backward_s=20e-3, numbers=819_200):
    """Return the virtual seconds until k equal buckets are averaged, each started when backward has filled it.

    `numbers` are about as many gradients as ShakespeareGPT has, and split into 32 equal buckets. All ranks call it.
    """
    network.reset()
    works = []
    for i in range(k):
        network.compute(backward_s / k, "backward")
        with network.asynchronous(f"bucket {i}") as work:
            network.all_reduce(torch.ones(numbers // k))
        works.append(work)
    network.wait(*works)
    return network.clock_s


def say_what_a_trained_model_writes(ranks):
    """Print on rank 0 a text of the model that comes with the course."""
    if ranks.rank == 0:
        from manyhands.checkpoint.export import shipped_model, tokenizer_of
        from manyhands.gpt.sampling import Sampling
        from manyhands.serve.engine import generate

        plays, about = shipped_model("plays")
        letters = tokenizer_of(about)
        say(letters.decode(generate(plays, letters.encode("\n")[None], 240, Sampling(0.8), seed=4)[0, 1:]))


def draw_spans(network, counts):
    """Draw when rank 0 computes and sends in `virtual_step` for each number of buckets k. All ranks call it."""
    spans = {}
    for k in counts:
        virtual_step(network, k)
        of_all = network.gather_spans()
        spans[f"{k} bucket{'s' * (k > 1)}"] = [span for span in of_all or () if span.rank == 0]
    if network.rank == 0:
        figure = gantt(spans, "when rank 0 computes and sends", virtual=True)
        alt = "hatched communication under solid backward: 8 buckets end first, 32 pile up behind it"
        show(figure, "buckets", alt, unanswered())


def kept_on_512():
    """Return the speed per GPU on 512 H100, in % of that on 8, as others published it for MPT 7B."""
    (_, on_8), *_, (_, on_512) = recorded_runs.published("03_weak_scaling")[0]["points"]  # tokens/s and GPU
    return round(100 * on_512 / on_8)


def draw_kept_per_gpu(ranks):
    """Draw how much of the speed per GPU is left on more GPUs, in % of that on a curve's fewest."""
    if ranks.rank:
        return
    figure, axes = looks.new_figure(7.5, 3)
    published = recorded_runs.published("03_weak_scaling")
    curves = {one["name"]: tuple(zip(*one["points"], strict=True)) for one in published}
    axes.axhline(100, **looks.PREDICTED)
    for (name, (gpus, rates)), look, up in zip(curves.items(), looks.ALTERNATIVES, (1, -1), strict=False):
        kept = [100 * rate / rates[0] for rate in rates]
        axes.plot(gpus, kept, ms=5, **look)
        looks.end_label(axes, gpus[-1], kept[-1], f"{name}: {kept[-1]:.0f} %", look["color"], up)
    ticks = sorted({n for gpus, _ in curves.values() for n in gpus})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, ticks)
    axes.minorticks_off()
    axes.set(xlabel="GPUs", ylabel="tokens/s per GPU, %", ylim=(80, 102), title="MPT on H100: speed per GPU")
    axes.set_xlim(ticks[0] / 1.2, 2.5 * ticks[-1])
    looks.end_label(axes, ticks[0], 100, "ideal", looks.PREDICTED["color"], up=1)
    alt = "7b keeps 91 % from 8 to 512 GPUs, 1b 90 % from 128 to 512"
    show(figure, "weak_scaling_published", alt, unanswered())


def draw_and_say_times(ranks, step_s):
    """Draw the step times {version: seconds}, and print what averaging adds and what overlap saves."""
    if ranks.rank:
        return

    def in_ms(name, minus):
        ms = [1e3 * (a - b) for a, b in zip(step_s[name], step_s[minus], strict=True)]
        return f"{round(statistics.median(ms))} ms ({round(min(ms))} to {round(max(ms))})"

    show(compared(step_s, "a step, with five ways to average"), "five_ways", "step times of five versions")
    for name in ("naive", "hooks", "buckets"):
        say(f"{name}: averaging adds {in_ms(name, 'no averaging')}")
    say(f"overlap saves {in_ms('buckets', 'buckets, overlap')} of the buckets' (less than 0: it costs)")


def draw_u(ranks, counts, virtual_s, predicted_s):
    """Draw the step time against the number of buckets: the virtual network's points, and the formula's line."""
    if ranks.rank:
        return
    figure, axes = looks.new_figure(6.5, 3.4)
    axes.plot(counts, [1e3 * s for s in predicted_s], **looks.PREDICTED)
    axes.plot(counts, [1e3 * s for s in virtual_s], **looks.MEASURED, ls="none")
    looks.end_label(axes, counts[-1], 1e3 * predicted_s[-1], "predicted", looks.PREDICTED["color"], up=-1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, counts)
    axes.minorticks_off()
    axes.set(xlabel="number of buckets", ylabel="virtual ms per step", ylim=(0, None), xlim=(0.8, 3.2 * counts[-1]))
    show(figure, "bucket_size", "virtual step time against the number of buckets: a U, and the formula on its points")


def draw_weak_scaling(ranks, sizes, samples, tokens_per_rank):
    """Draw tokens per second against ranks, and the line of n times one rank.

    samples: for each of `sizes` the seconds of a step in which every rank reads `tokens_per_rank`.
    """
    if ranks.rank:
        return
    figure, axes = looks.new_figure(5.5, 3.4)
    rates = [[n * tokens_per_rank / s for s in times] for n, times in zip(sizes, samples, strict=True)]
    middles, errors = looks.errorbars(rates)
    axes.errorbar(sizes, middles, yerr=errors, **looks.WHISKERS | looks.MEASURED)
    axes.plot(sizes, [n * middles[0] / sizes[0] for n in sizes], **looks.PREDICTED)
    looks.end_label(axes, sizes[-1], sizes[-1] * middles[0] / sizes[0], "ideal", looks.PREDICTED["color"])
    looks.end_label(axes, sizes[-1], middles[-1], "measured", looks.INK)
    axes.set(xlabel="ranks", ylabel="tokens/s", xticks=sizes, ylim=(0, None), xlim=(0.7, 1.35 * sizes[-1]))
    axes.set(title="weak scaling on this machine")
    show(figure, "weak_scaling", "tokens per second against ranks, measured with whiskers, and the ideal line")
