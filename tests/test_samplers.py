"""Samplers lose and repeat nothing, for any number of ranks, any length, any epoch and any place of resumption."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from manyhands.lessons.same_science import DrawnSampler, PartitionedSampler
from torch.utils.data import DataLoader

lengths = st.one_of(st.integers(0, 12), st.integers(0, 400))
sizes = st.integers(1, 9)
epochs = st.one_of(st.integers(0, 5), st.integers(0, 2**32 - 1))
seeds = st.one_of(st.integers(0, 5), st.integers(0, 2**128 - 1))


def samplers(length, n, epoch=0, state=None, **options):
    made = [PartitionedSampler(length, rank, n, **options) for rank in range(n)]
    for sampler in made:
        if state is not None:
            sampler.load_state_dict(state)
        sampler.set_epoch(epoch)
    return made


def dealt(made):
    """The indices of all ranks in the order in which the ranks take them, in turns."""
    hands = [list(sampler) for sampler in made]
    return [hand[k] for k in range(max(map(len, hands))) for hand in hands if k < len(hand)]


def taken(iterator, k):
    return [index for _, index in zip(range(k), iterator, strict=False)]  # asks k times, not once more


# All items once


@given(lengths, sizes, epochs, seeds, st.booleans())
def test_over_the_ranks_each_item_comes_exactly_once(length, n, epoch, seed, shuffle):
    made = samplers(length, n, epoch, seed=seed, shuffle=shuffle)
    hands = [list(sampler) for sampler in made]
    assert sorted(index for hand in hands for index in hand) == list(range(length))
    assert [len(sampler) for sampler in made] == [len(hand) for hand in hands]
    assert max(map(len, hands)) - min(map(len, hands)) <= 1
    assert {sampler.rounds for sampler in made} == {max(map(len, hands))}


@given(lengths, sizes, sizes, epochs, seeds)
def test_the_order_of_all_ranks_together_does_not_depend_on_their_number(length, n, other_n, epoch, seed):
    order = samplers(length, 1, epoch, seed=seed)[0].order().tolist()
    assert dealt(samplers(length, n, epoch, seed=seed)) == order
    assert dealt(samplers(length, other_n, epoch, seed=seed)) == order


def test_epochs_and_seeds_have_orders_of_their_own_and_a_forgotten_set_epoch_repeats_the_first():
    orders = {
        tuple(samplers(50, 1, epoch, seed=seed)[0]) for epoch in (0, 1, 2, 2**32 - 1) for seed in (0, 1, 2**32, 2**64)
    }
    assert len(orders) == 16
    sampler = PartitionedSampler(50, 0, 2)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_the_order_does_not_change_with_versions():
    assert samplers(10, 1, epoch=2, seed=7)[0].order().tolist() == [1, 8, 7, 0, 9, 3, 6, 2, 4, 5]
    drawn = DrawnSampler(1000, 1, 2, 4, seed=7)
    drawn.set_epoch(2)
    assert list(drawn) == [732, 440, 186, 280]


# Resuming


@settings(max_examples=200)
@given(lengths, st.lists(st.tuples(sizes, st.integers(0, 60)), max_size=4), sizes, epochs, seeds)
def test_a_chain_of_interrupted_runs_on_any_numbers_of_ranks_loses_and_repeats_nothing(
    length, legs, last_n, epoch, seed
):
    used, state = [], None
    for n, rounds in legs:
        made = samplers(length, n, epoch, state, seed=seed)
        iterators = [iter(sampler) for sampler in made]
        hands = [taken(iterator, rounds) for iterator in iterators]
        used += [hand[k] for k in range(rounds) for hand in hands if k < len(hand)]
        state = json.loads(json.dumps(made[0].state_dict()))
        assert state["position"] == len(used)
        assert all(sampler.state_dict() == state for sampler in made)
    used += dealt(samplers(length, last_n, epoch, state, seed=seed))
    assert used == samplers(length, 1, epoch, seed=seed)[0].order().tolist()


def test_at_the_end_of_an_epoch_a_resumed_run_begins_with_the_next():
    made = samplers(50, 3, epoch=1)
    dealt(made)
    again = samplers(50, 3, 1, made[0].state_dict())
    assert dealt(again) == []
    for sampler in again:
        sampler.set_epoch(2)
    assert len(dealt(again)) == 50


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_asks_ahead_resumes_where_the_training_stood(workers):
    """What a loader with workers has asked for is more than what was trained on: the training tells the position."""

    def loader(sampler):
        return DataLoader(range(50), batch_size=4, sampler=sampler, num_workers=workers)

    made = samplers(50, 2, epoch=1)
    batches = [iter(loader(sampler)) for sampler in made]
    used = [index for _ in range(3) for batch in batches for index in next(batch).tolist()]
    if workers:
        assert made[0].state_dict()["position"] > len(used)
    state = made[0].state_dict(position=len(used))
    del batches
    used += [int(i) for sampler in samplers(50, 3, 1, state) for i in torch.cat(list(loader(sampler)))]
    assert sorted(used) == list(range(50))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"length": 11}, "saved with length=11 and this sampler has length=10.*resume with length=11"),
        ({"position": 11}, "position=11 cannot be; use a whole number from 0 to 10"),
    ],
)
def test_a_state_of_another_order_is_refused(change, sentence):
    sampler = PartitionedSampler(10, 0, 2)
    with pytest.raises(ValueError, match=sentence):
        sampler.load_state_dict(sampler.state_dict() | change)


# Drawn at random


@given(st.integers(1, 1000), st.integers(0, 50), epochs, st.data())
def test_draws_resume_bit_for_bit(length, num_samples, epoch, data):
    position = data.draw(st.integers(0, num_samples))
    whole = DrawnSampler(length, 1, 3, num_samples, seed=9)
    whole.set_epoch(epoch)
    expected = list(whole)
    first = DrawnSampler(length, 1, 3, num_samples, seed=9)
    first.set_epoch(epoch)
    iterator = iter(first)
    begun = taken(iterator, position)
    state = json.loads(json.dumps(first.state_dict()))
    assert state["position"] == position and len(expected) == num_samples
    second = DrawnSampler(length, 1, 4, num_samples, seed=9)  # on another number of ranks, too
    second.load_state_dict(state)
    second.set_epoch(epoch)
    assert len(second) == num_samples - position
    assert begun + list(second) == expected
    assert all(0 <= index < length for index in expected)
