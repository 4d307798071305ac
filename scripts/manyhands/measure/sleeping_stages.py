"""Stages of a pipeline that sleep instead of computing: real ranks, real messages, a real clock.

    spans = run_asleep(order, {"F": 5e-3, "B": 10e-3})     # all ranks, each with its own order
    slots_of(spans)                                        # of `predict.pipeline_schedules`: what ran when

A sleeping rank leaves its core to the others, so four stages fit on two cores. What the run takes longer than a
simulation is real: sleeps that end late, messages, and ranks that wait for a core.
"""

import time

import torch
import torch.distributed as dist

from manyhands.measure.virtual_network import Span


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
