"""Harness and plots of lesson 08: stages that sleep, and its plots."""

import time

import torch
import torch.distributed as dist

from manyhands.measure.virtual_network import Span
from manyhands.plots import looks


def run_asleep(order: list, took_s: dict[str, float]) -> list[Span]:
    """Do `order`, this rank's actions (kind F or B, stage, micro-batch): receive, sleep, send. All ranks call it.

    Rank s is stage s. `took_s` is the time to sleep for each kind. Returns the spans of all ranks on every rank, each
    named "kind stage micro-batch", in seconds after a common start. The clocks of the ranks agree on one machine.
    An order that waits in a circle never ends: simulate it first.
    """
    rank, last, message, own, sent = dist.get_rank(), dist.get_world_size() - 1, torch.zeros(1), [], []
    dist.barrier()
    began_s = time.perf_counter()
    for kind, stage, i in order:
        step, tag = (1, 2 * i) if kind == "F" else (-1, 2 * i + 1)
        if 0 <= stage - step <= last:
            dist.recv(message, stage - step, tag=tag)
        start_s = time.perf_counter()
        time.sleep(took_s[kind])
        own.append(Span(rank, "compute", f"{kind} {stage} {i}", start_s, time.perf_counter()))
        if 0 <= stage + step <= last:
            sent.append(dist.isend(torch.zeros(1), stage + step, tag=tag))
    for work in sent:
        work.wait()
    everybody = [None] * (last + 1)
    dist.all_gather_object(everybody, (began_s, own))
    origin_s = min(began for began, _ in everybody)
    return [
        Span(span.rank, span.lane, span.name, span.start_s - origin_s, span.end_s - origin_s)
        for _, spans in everybody for span in spans
    ]  # fmt: skip


def draw_bubbles(series, published=(), stages=32):
    """Idle share of the time against micro-batches: {name: (ms, measured, predicted)} -> a matplotlib Figure.

    Measured is a marker, predicted a dashed line through all micro-batches. published: dicts with `name` and `points`,
    [[micro-batches, samples/s of each GPU], ...], in a panel on the right; dashed there is what the bubble of 1F1B on
    that many `stages` leaves of its rate, scaled to its last point.
    """
    shape = (1, 2) if published else (1, 1)
    figure, panels = looks.new_figure(10 if published else 7.6, 3.8, *shape, squeeze=False)
    axes = panels[0][0]
    for (name, (ms, measured, predicted)), look in zip(series.items(), looks.ALTERNATIVES, strict=False):
        axes.plot(ms, [100 * b for b in predicted], **looks.PREDICTED)
        axes.plot(ms, [100 * b for b in measured], **{**look, "ls": "none"}, ms=7, mfc="none", mew=1.6, label=name)
    axes.plot([], [], **looks.PREDICTED, label="formula")
    axes.set_xscale("log", base=2)
    ticks = sorted({m for ms, *_ in series.values() for m in ms})
    axes.set_xticks(ticks, [str(m) for m in ticks])
    axes.set(xlabel="micro-batches m", ylabel="idle, % of the ranks' time", ylim=(0, None))
    axes.set_title("here: ranks that sleep, and send real messages", fontsize=11)
    axes.legend(frameon=False)
    for rates in panels[0][1:]:
        _published_rates(rates, published, stages)
    return figure


def _published_rates(axes, published, p):
    """Samples per second of each GPU against micro-batches, and 1F1B's by the formula."""
    for curve, look in zip(published, looks.ALTERNATIVES, strict=False):
        ms, rates = zip(*curve["points"], strict=True)
        axes.plot(ms, rates, ms=5, **look)
        looks.end_label(axes, ms[-1], rates[-1], curve["name"], look["color"])
        if curve["name"].startswith("1F1B"):
            full = rates[-1] * (ms[-1] + p - 1) / ms[-1]
            axes.plot(ms, [full * m / (m + p - 1) for m in ms], **looks.PREDICTED)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ms, ms)
    axes.minorticks_off()
    axes.set(xlabel="micro-batches m", ylabel="samples/s per GPU", xlim=(0.9 * ms[0], 2.4 * ms[-1]))
    axes.set_title(f"published: 28.3B parameters, {p} A100s", fontsize=11)
