"""Lesson 08's pipeline, built by hand: its gradients are one process's, its messages and bytes held are the formula's.

What is tested is the lesson's own code, taken from its script, in float64.
"""

import pytest
import torch
import torch.distributed as dist
from definitions import taken_from
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.measure import wire
from manyhands.measure.virtual_network import Link, VirtualNetwork
from manyhands.predict.pipeline_schedules import bubble_formula, orders_of, simulate
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

LESSON = "08_pipeline_parallel"
NAMES = (
    "backward_of", "my_stage", "gpipe", "needs", "neighbours", "swap", "forward_of", "train_step", "ahead",
    "one_f_one_b", "mean_loss", "by_library", "library_step", "run_virtual", "idle_share", "in_a_v", "fitting",
)  # fmt: skip
T, D, ROWS = 8, 16, 2
CONFIG = GPTConfig(
    vocab_size=17, block_size=T, n_layer=5, n_head=2, n_embd=D
)  # five layers split evenly over no 2 and no 4
EXACT = 1e-10
LINK = Link(5e-6, 50e9)


def lesson_on(ranks, m):
    """The lesson's definitions, on this rank, with the names that they use."""
    here = {
        "s": ranks.rank, "p": ranks.world_size, "rank": ranks.rank, "world_size": ranks.world_size, "m": m,
        "rows": ROWS, "T": T, "D": D, "device": ranks.device, "config": CONFIG, "layers": CONFIG.n_layer,
        "network": VirtualNetwork(ranks, inside=LINK), "TOOK_S": {"F": 1e-3, "B": 2e-3, "I": 1e-3, "W": 1e-3},
        "STEP": {"F": 1, "B": -1, "I": -1, "W": 0},
    }  # fmt: skip
    return taken_from(LESSON, *NAMES, **here)


def new_model():
    torch.manual_seed(3)
    return GPT(CONFIG).double()


def batch(m, step=0):
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(CONFIG.vocab_size, (m * ROWS, T + 1), generator=draw)
    return ids[:, :-1].chunk(m), ids[:, 1:].chunk(m)


def one_process(m, steps=(0,)):
    """(loss, {name: gradient}) of these batches, added up."""
    model = new_model()
    for step in steps:
        _, loss = model(*map(torch.cat, batch(m, step)))
        loss.backward()
    return loss.detach(), {name: w.grad for name, w in model.named_parameters()}


def furthest(stage, loss, wanted):
    """The largest distance of this rank's gradients, and of the last rank's loss, from one process's."""
    expected, gradients = wanted
    loss = loss.clone()
    dist.broadcast(loss, src=dist.get_world_size() - 1)
    apart = [(w.grad - gradients[name]).abs().max().item() for name, w in stage.named_parameters()]
    return max(*apart, (loss - expected).abs().item())


def apart_on(ranks, m):
    """{way: distance from one process}, and what was counted while our ways ran."""
    ours, wanted = lesson_on(ranks, m), one_process(m)
    p, s = ranks.world_size, ranks.rank
    orders = {"gpipe": ours.gpipe(s, p, m), "1f1b": ours.one_f_one_b(s, p, m), "fitting": ours.fitting(p, m, 2)[s]}
    apart, counted = {}, {}
    for name, order in orders.items():
        stage = ours.my_stage(new_model())
        with wire.watch() as seen:
            loss, most = ours.train_step(stage, order, *batch(m))
        counted[name] = seen.messages, seen.sent_bytes, most, len(seen.calls)
        apart[name] = furthest(stage, loss, wanted)
    kinds = {"torch's gpipe": ScheduleGPipe} | ({"torch's 1f1b": Schedule1F1B} if m >= p else {})
    for name, kind in kinds.items():
        stage = ours.my_stage(new_model())
        loss = ours.library_step(ours.by_library(kind, stage), *batch(m))
        apart[name] = furthest(stage, loss, wanted)
    return apart, counted


@pytest.mark.parametrize("p, m", [(1, 4), (2, 4), (4, 4), (4, 8), (3, 2)])
def test_ours_and_torchs_schedules_are_one_process_and_send_and_hold_what_the_formulas_say(pool, p, m):
    for s, (apart, counted) in enumerate(pool.run(p, apart_on, m)):
        assert max(apart.values()) < EXACT, apart
        ends = (2 if 0 < s < p - 1 else 1) * (p > 1)
        for name, held in {"gpipe": m, "1f1b": min(m, p - s), "fitting": min(m, p - s, 2)}.items():
            messages, n_bytes, most, calls = counted[name]
            assert messages == ends * m and n_bytes == messages * ROWS * T * D * 8, name
            assert calls == 2 * messages, f"{name}: each message is a send here and a receive there, nothing else"
            assert most == held, name


def accumulated(ranks, m):
    """How far two accumulated batches are from one process: by the library's default, by the cure, undivided."""
    ours, (_, wanted) = lesson_on(ranks, m), one_process(m, steps=(0, 1))
    _, first = one_process(m)
    found = []
    for loss_fn, settings in ((ours.mean_loss, {}), (lambda *a: ours.mean_loss(*a) / m, {"scale_grads": False})):
        stage = ours.my_stage(new_model())
        schedule = ours.by_library(Schedule1F1B, stage, loss_fn, **settings)
        for step in (0, 1):
            ours.library_step(schedule, *batch(m, step))
        found.append({name: w.grad - wanted[name] for name, w in stage.named_parameters()})
    by_default, cured = found
    lost = {name: first[name] * (1 - 1 / m) for name in by_default}
    default_is_explained = max((by_default[name] + lost[name]).abs().max().item() for name in by_default)
    return default_is_explained, max(difference.abs().max().item() for difference in cured.values())


def test_the_zoos_bug_leaves_one_mth_of_the_first_batchs_gradient_and_the_cure_leaves_all(pool):
    for explained, cured in pool.run(2, accumulated, 4):
        assert explained < EXACT and cured < EXACT


def virtual(ranks, schedule, m, v):
    ours = lesson_on(ranks, m)
    orders = orders_of(schedule, ranks.world_size, m, v)
    ran = ours.run_virtual(orders[ranks.rank], v)
    return None if ran is None else (ours.idle_share(*ran), ran[1], [tuple(slot.action) for slot in ran[0]])


@pytest.mark.parametrize(
    "schedule, m, v",
    [("GPipe", 8, 1), ("1F1B", 8, 1), ("1F1B", 2, 1), ("Interleaved1F1B", 8, 2), ("InterleavedZeroBubble", 8, 1)],
)
def test_what_real_ranks_run_is_the_simulation_to_the_microsecond_and_the_formula_within_3_percent(
    pool, schedule, m, v
):
    idle, length_s, actions = pool.run(4, virtual, schedule, m, v)[0]
    orders = orders_of(schedule, 4, m, v)
    took = {kind: s / v for kind, s in {"F": 1e-3, "B": 2e-3, "I": 1e-3, "W": 1e-3}.items()}
    run = simulate(orders, took, message=LINK.cost_s(ROWS * T * D * 4))
    assert length_s == pytest.approx(run.length, abs=1e-9) and idle == pytest.approx(run.bubble, abs=1e-6)
    assert idle == pytest.approx(float(bubble_formula(schedule, 4, m, v)), rel=0.03)
    assert actions == [tuple(action) for order in orders for action in order]


def two_tags(ranks):
    network = VirtualNetwork(ranks, inside=LINK)
    if ranks.rank == 0:
        works = [network.isend(torch.tensor([i + 10.0 * tag]), 1, tag=tag) for tag in (1, 0) for i in range(2)]
        network.wait(*works)
        return None
    found = [torch.zeros(1) for _ in range(4)]
    for number, tag in zip(found, (0, 1, 1, 0), strict=True):
        network.recv(number, 0, tag)
    return [number.item() for number in found]


def test_messages_of_another_tag_have_an_order_of_their_own(pool):
    assert pool.run(2, two_tags)[1] == [0.0, 10.0, 11.0, 1.0]
