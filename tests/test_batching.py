"""Continuous batching over a paged cache: what is written does not depend on who else is served, blocks or reuse."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from manyhands.gpt.sampling import Sampling
from manyhands.serve.engine import NOT_FINITE, Engine, generate
from manyhands.serve.paged_cache import BlockPool, chained_digests
from manyhands.serve.scheduler import CachedSequence, Scheduler
from test_decoding import gpt

MODEL = gpt()
HOW = Sampling(0.9, top_p=0.95)


pytestmark = pytest.mark.usefixtures("one_thread")


def alone(prompt, n, seed):
    return generate(MODEL, torch.tensor([prompt]), n, HOW, seed)[0].tolist()


def finish(engine, limit=2000):
    """Step until nothing is left; the largest number of blocks that were held."""
    most = 0
    for _ in range(limit):
        if engine.idle():
            return most
        engine.step()
        most = max(most, engine.pool.held())
    raise AssertionError("it does not come to an end")


def compute(scheduler, works):
    """The schedule alone, with made-up tokens."""
    for work in works:
        if work.draws:
            work.sequence.append(9)
        scheduler.computed(work)


def requests(seed, how_many, longest=40):
    """[(prompt, n, seed)], some with a common beginning, none beyond the model's 48 positions."""
    draw = torch.Generator().manual_seed(seed)
    number = lambda low, high: int(torch.randint(low, high + 1, (), generator=draw))  # noqa: E731
    common = torch.randint(11, (20,), generator=draw).tolist()
    found = []
    for i in range(how_many):
        own = torch.randint(11, (number(1, 15),), generator=draw).tolist()
        prompt = common[: number(0, 20)] + own
        found.append((prompt, number(1, min(48 - len(prompt), longest)), i))
    return found


# ---------------------------------------------------------------- blocks


def test_blocks_of_a_common_beginning_are_shared_and_outlive_their_sequence():
    pool = BlockPool(6, 4)
    ids = list(range(10))
    digests = chained_digests(ids, 4)
    assert len(digests) == 2, "only full blocks"
    table = pool.match(digests) + pool.allocate(3)
    for block, digest in zip(table, digests, strict=False):
        pool.seal(block, digest)
    assert pool.match(chained_digests([*ids[:8], 99, 98, 97, 96], 4)) == table[:2]
    assert pool.match(chained_digests([99, *ids[1:]], 4)) == [], "another first token, other keys"
    pool.deallocate(table)
    pool.deallocate(table[:2])
    assert pool.available() == 6 and pool.match(digests) == table[:2]
    assert pool.held() == 2 and pool.allocate(5) is None and pool.available() == 4
    pool.forget_all()
    assert pool.match(digests) == [], "of another model"


# ---------------------------------------------------------------- the schedule


def test_writing_goes_on_while_a_long_prompt_is_read_in_pieces():
    scheduler = Scheduler(BlockPool(40, 4), max_running=4, prefill_tokens=10)
    short, long = CachedSequence([1, 2], 30), CachedSequence(list(range(33)), 5)
    seen = []
    scheduler.add(short)
    for step in range(6):
        if step == 1:
            scheduler.add(long)
        works = scheduler.plan()
        seen.append([(work.sequence is long, work.start, work.stop) for work in works])
        compute(scheduler, works)
    assert seen == [
        [(False, 0, 2)],
        [(False, 2, 3), (True, 0, 10)],
        [(False, 3, 4), (True, 10, 20)],
        [(False, 4, 5), (True, 20, 30)],
        [(False, 5, 6), (True, 30, 33)],
        [(False, 6, 7), (True, 33, 34)],
    ]


def test_who_comes_first_is_admitted_first_and_the_youngest_gives_way():
    scheduler = Scheduler(BlockPool(4, 2), max_running=4, prefill_tokens=100)
    first, second, third = (CachedSequence([i, i, i], 5) for i in range(3))
    for sequence in (first, second, third):
        scheduler.add(sequence)
    compute(scheduler, scheduler.plan())
    assert scheduler.running == [first, second] and list(scheduler.waiting) == [third]
    compute(scheduler, scheduler.plan())
    scheduler.plan()  # five tokens each need a third block: there is none
    assert scheduler.running == [first] and list(scheduler.waiting) == [second, third]
    assert (second.num_preemptions, second.block_table, second.drawn) == (1, [], [9, 9])


def test_while_new_ones_are_held_back_those_that_have_begun_are_finished():
    engine = Engine(MODEL, "a", num_blocks=13, block_size=4)
    begun = [engine.add([1, 2, 3, i], 30, HOW, seed=i) for i in range(3)]
    for _ in range(12):
        engine.step()
    later = engine.add([5, 6], 4, HOW, seed=9)
    engine.scheduler.hold_new = True
    for _ in range(200):
        engine.step()
    assert [s.finish for s in begun] == ["length"] * 3 and sum(s.num_preemptions for s in begun) > 0
    assert later.finish is None and not engine.scheduler.unfinished()


# ---------------------------------------------------------------- what is written


@pytest.mark.parametrize(("reuse", "num_blocks", "prefill_tokens"), [(True, 200, 256), (True, 16, 7), (False, 16, 7)])
def test_in_any_company_a_sequence_is_written_as_if_it_were_alone(reuse, num_blocks, prefill_tokens):
    engine = Engine(MODEL, "a", num_blocks, 4, max_running=6, prefill_tokens=prefill_tokens)
    if not reuse:
        engine.pool.match = lambda digests: []
    asked = requests(1, 14)
    served = []
    for i, (prompt, n, seed) in enumerate(asked):
        served.append(engine.add(prompt, n, HOW, seed))
        if i % 3 == 0:
            engine.step()
    most = finish(engine)
    assert [s.ids for s in served] == [alone(*request) for request in asked]
    assert {s.finish for s in served} == {"length"} and most <= num_blocks
    assert engine.pool.held() == 0 and not engine.pool.holders
    assert (sum(s.num_cached_tokens for s in served) > 0) == reuse
    assert (sum(s.num_preemptions for s in served) > 0) == (num_blocks == 16), "the small pool is there to run out"


def test_a_prompt_of_full_blocks_still_computes_its_last_token():
    engine = Engine(MODEL, "a", 40, 4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    for _ in range(2):
        sequence = engine.add(prompt, 3, HOW, seed=2)
        finish(engine)
    assert sequence.num_cached_tokens == 4 and sequence.ids == alone(prompt, 3, 2)


@pytest.mark.parametrize("num_blocks", [13, 16, 60])
def test_a_neighbour_whose_numbers_are_nan_ends_alone_and_its_blocks_harm_nobody(num_blocks):
    """Symbol 10 is the poison: those who have read or drawn it fail, and leave NaN in blocks that others get."""
    poisoned = gpt()
    with torch.no_grad():
        poisoned.tokens.weight[10] = torch.nan
        poisoned.head.bias[10] = -50.0  # nobody draws it: only prompts bring it
    engine = Engine(poisoned, "a", num_blocks, 4, max_running=6, prefill_tokens=9)
    asked = requests(7, 30)
    expected, served = [], []
    for i, (prompt, n, seed) in enumerate(asked):
        prompt = [token % 10 for token in prompt]
        if i % 3 == 1:
            prompt[i % len(prompt)] = 10
        expected.append(None if 10 in prompt else generate(poisoned, torch.tensor([prompt]), n, HOW, seed)[0].tolist())
        served.append(engine.add(prompt, n, HOW, seed))
        if i % 2:
            engine.step()
    finish(engine)
    for sequence, ids in zip(served, expected, strict=True):
        if ids is None:
            assert (sequence.finish, sequence.drawn) == (NOT_FINITE, [])
        else:
            assert (sequence.finish, sequence.ids) == ("length", ids)
    assert engine.pool.held() == 0 and math.isfinite(engine.prompt_nats) and engine.prompt_tokens > 0


def test_an_end_token_ends_it_and_tokens_without_a_meaning_are_never_drawn():
    engine = Engine(MODEL, "a", 60, 4, vocab_size=4)
    served = [engine.add([1, 2, 3], 30, Sampling(3.0), seed, stop_ids={2}) for seed in range(6)]
    finish(engine)
    for sequence in served:
        assert set(sequence.drawn) <= {0, 1, 2, 3}
        assert (sequence.finish == "stop") == (2 in sequence.drawn) == (sequence.drawn[-1] == 2)
        assert sequence.drawn.count(2) <= 1


def test_the_loss_on_prompts_is_their_cross_entropy_under_the_model():
    engine = Engine(MODEL, "a", 40, 4, prefill_tokens=7)
    prompts = [requests(4, 1)[0][0] + [3] * 17, [5], [6, 7]]
    for prompt in prompts:
        engine.add(prompt, 2, HOW, seed=1)
    finish(engine)
    expected = 0.0
    for prompt in (p for p in prompts if len(p) > 1):
        ids = torch.tensor([prompt])
        expected += MODEL(ids[:, :-1], ids[:, 1:])[1].item() * (len(prompt) - 1)
    assert engine.prompt_tokens == sum(len(p) - 1 for p in prompts)
    assert engine.prompt_nats == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("prompt", "n", "sentence"),
    [
        ([], 5, "the prompt is empty"),
        ([1] * 40, 9, "40 tokens of the prompt and 9 more do not fit .* context of 48; ask for at most 8"),
        ([1] * 60, 1, "shorten the prompt to 47 or fewer"),
        ([1], 0, "max_tokens must be at least 1, got 0"),
    ],
)
def test_what_the_model_cannot_hold_is_refused_before_it_waits(prompt, n, sentence):
    engine = Engine(MODEL, "a", 12, 4)
    with pytest.raises(ValueError, match=sentence):
        engine.add(prompt, n)
    assert engine.idle()


# ---------------------------------------------------------------- whatever comes


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(12, 40), st.integers(1, 30), st.integers(1, 5))
def test_any_load_ends_and_gives_all_blocks_back(seed, num_blocks, prefill_tokens, max_running):
    """The schedule alone, with made-up tokens: nobody starves, no block is lost, nothing is computed out of order."""
    scheduler = Scheduler(BlockPool(num_blocks, 4), max_running, prefill_tokens)
    draw = torch.Generator().manual_seed(seed)
    sequences = [CachedSequence(prompt, n) for prompt, n, _ in requests(seed, 12)]
    coming, steps = list(sequences), 0
    while coming or scheduler.waiting or scheduler.running:
        if coming and torch.rand((), generator=draw) < 0.5:
            scheduler.add(coming.pop(0))
        if scheduler.running and torch.rand((), generator=draw) < 0.03:
            scheduler.cancel(scheduler.running[0])
        works = scheduler.plan()
        assert sum(w.stop - w.start for w in works if w.stop - w.start > 1) <= prefill_tokens
        assert len({id(w.sequence) for w in works}) == len(works) <= max_running
        for work in works:
            assert work.start == work.sequence.num_computed_tokens < work.stop <= len(work.sequence.ids)
            assert work.stop <= 4 * len(work.sequence.block_table)
        compute(scheduler, works)
        held = [block for s in scheduler.running for block in s.block_table]
        assert scheduler.pool.held() == len(set(held))
        steps += 1
        assert steps < 3000
    assert all(s.finish for s in sequences) and scheduler.pool.available() == num_blocks
