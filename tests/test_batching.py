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


# ---------------------------------------------------------------- what is written


@pytest.mark.parametrize(("num_blocks", "prefill_tokens"), [(200, 256), (16, 7)])
def test_in_any_company_a_sequence_is_written_as_if_it_were_alone(num_blocks, prefill_tokens):
    engine = Engine(MODEL, "a", num_blocks, 4, max_running=6, prefill_tokens=prefill_tokens)
    asked = requests(1, 14)
    served = []
    for i, (prompt, n, seed) in enumerate(asked):
        served.append(engine.add(prompt, n, HOW, seed))
        if i % 3 == 0:
            engine.step()
    most = finish(engine)
    assert [s.ids for s in served] == [alone(*request) for request in asked]
    assert {s.finish for s in served} == {"length"} and most <= num_blocks
    assert engine.pool.held() == 0 and sum(s.num_cached_tokens for s in served) > 0
    assert (sum(s.num_preemptions for s in served) > 0) == (num_blocks == 16), "the small pool is there to run out"


def test_a_neighbour_whose_numbers_are_nan_ends_alone_and_its_blocks_harm_nobody():
    """Symbol 10 is the poison: those who have read it fail, and leave NaN in blocks that others get."""
    poisoned = gpt()
    with torch.no_grad():
        poisoned.tokens.weight[10] = torch.nan
        poisoned.head.bias[10] = -50.0  # nobody draws it: only prompts bring it
    engine, served = Engine(poisoned, "a", 16, 4, max_running=6, prefill_tokens=9), []
    for i, (prompt, n, seed) in enumerate(requests(7, 30)):
        prompt = [token % 10 for token in prompt]
        if i % 3 == 1:
            sequence = engine.add([*prompt[1:], 10], n, HOW, seed)
            expected = NOT_FINITE, []
        else:
            sequence = engine.add(prompt, n, HOW, seed)
            expected = "length", generate(poisoned, torch.tensor([prompt]), n, HOW, seed)[0, len(prompt) :].tolist()
        served.append((sequence, expected))
        if i % 2:
            engine.step()
    finish(engine)
    assert all((sequence.finish, sequence.drawn) == expected for sequence, expected in served)
    assert engine.pool.held() == 0 and math.isfinite(engine.prompt_nats)


def test_an_end_token_ends_it_and_tokens_without_a_meaning_are_never_drawn():
    engine = Engine(MODEL, "a", 60, 4, vocab_size=4)
    served = [engine.add([1, 2, 3], 30, Sampling(3.0), seed, stop_ids={2}) for seed in range(6)]
    finish(engine)
    for sequence in served:
        assert set(sequence.drawn) <= {0, 1, 2, 3}
        assert (sequence.finish == "stop") == (2 in sequence.drawn) == (sequence.drawn[-1] == 2)


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
