"""Each check of lesson 01 accepts right answers and rejects mutants with the sentence that names their fault."""

import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from exercises import exercises_of
from manyhands.checks import one_device as checks
from manyhands.course.catch_up import taken_from

LESSON = "01_one_device"


@functools.cache
def solution(name):
    return getattr(taken_from(LESSON, name), name)


# ---- exercise 1: (state, activations, devices) ----


def changed(**changes):
    """The solution with its results changed: state, kept, devices as functions of (result, config, arguments)."""

    def answer(config, sequences, per_parameter, device_bytes, flash=False):
        results = solution("does_it_fit")(config, sequences, per_parameter, device_bytes, flash)
        given = dict(zip(("state", "kept", "devices"), results, strict=True))
        for name, change in changes.items():
            given[name] = change(given[name], config, sequences, per_parameter, device_bytes, flash)
        return tuple(given.values())

    return answer


def fits_rounds_parameters_first(config, sequences, per_parameter, device_bytes, flash=False):
    state = max(1, round(config.num_params() / 1e9)) * 1e9 * per_parameter
    _, kept, _ = solution("does_it_fit")(config, sequences, per_parameter, device_bytes, flash)
    return state, kept, math.ceil(state / device_bytes)


def fits_only_blocks(config, sequences, per_parameter, device_bytes, flash=False):
    state = 12 * config.n_layer * config.n_embd**2 * per_parameter
    return state, 0, math.ceil(state / device_bytes)


fits_in_gib = changed(state=lambda s, *_: s / 2**30)
fits_without_head = changed(state=lambda s, c, b, per, *_: s - c.vocab_size * (c.n_embd + 1) * per)
fits_activations_in_values = changed(kept=lambda k, *_: k / 2)
fits_activations_in_float32 = changed(kept=lambda k, *_: 2 * k)
fits_one_sequence = changed(kept=lambda k, c, b, *_: k / b)
fits_flash_forgotten = changed(kept=lambda k, c, b, *_: 2 * checks._slide_values(c, b, flash=False))
fits_scores_forgotten = changed(kept=lambda k, c, b, *_: 2 * checks._slide_values(c, b, flash=True))
fits_floor = changed(devices=lambda n, c, b, per, size, f: int(c.num_params() * per // size))
fits_one_more = changed(devices=lambda n, c, b, per, size, f: int(c.num_params() * per // size) + 1)
fits_rounded = changed(devices=lambda n, c, b, per, size, f: round(c.num_params() * per / size))
fits_nearly = changed(devices=lambda n, c, b, per, size, f: math.ceil(round(c.num_params() * per / size, 3)))
fits_not_a_number = changed(kept=lambda k, *_: math.nan)
fits_as_text = changed(state=lambda s, *_: f"{s}")
fits_devices_as_text = changed(devices=lambda n, *_: f"{n}")
fits_no_devices = changed(devices=lambda n, *_: None)
fits_a_list_of_bytes = changed(kept=lambda k, *_: [k])
fits_parts_of_devices = changed(devices=lambda n, c, b, per, size, f: c.num_params() * per / size)


def fits_state_alone(config, sequences, per_parameter, device_bytes, flash=False):
    return config.num_params() * per_parameter


# ---- exercise 2: names to recompute ----


def chooses_everything(pieces, budget):
    return {piece.name for piece in pieces}


def chooses_nothing(pieces, budget):
    return set()


def chooses_the_largest_first(pieces, budget):
    return _greedy(pieces, budget, lambda piece: piece.input - piece.kept)


def chooses_the_cheapest_per_byte(pieces, budget):
    return _greedy(pieces, budget, lambda piece: piece.flops / max(piece.kept - piece.input, 1e-9))


def _greedy(pieces, budget, price):
    chosen, kept = set(), sum(piece.kept for piece in pieces)
    for piece in sorted(pieces, key=price):
        if kept <= budget:
            return chosen
        if piece.input < piece.kept:
            chosen.add(piece.name)
            kept += piece.input - piece.kept
    return chosen if kept <= budget else None


def forgets_the_inputs(pieces, budget):
    return solution("choose")([checks.Piece(p.name, p.kept, 0, p.flops) for p in pieces], budget)


def gives_up_early(pieces, budget):
    return None


def answers_with_indices(pieces, budget):
    return set(range(len(pieces)))


def answers_with_one_name(pieces, budget):
    return pieces[0].name


def answers_with_the_pieces(pieces, budget):
    return pieces


def answers_with_lists_of_names(pieces, budget):
    return [[piece.name] for piece in pieces]


def answers_with_a_dictionary(pieces, budget):
    return {piece.name: True for piece in pieces}


# ---- exercise 3: accumulate ----


def _loss(model, ids, targets, **how):
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=-100, **how)


def mean_of_means(model, micro_batches):  # transformers#34191
    for ids, targets in micro_batches:
        if (targets != -100).any():
            (_loss(model, ids, targets) / len(micro_batches)).backward()
        else:
            (model(ids).sum() * 0).backward()


def weighs_means_that_may_not_exist(model, micro_batches):
    counted = sum((targets != -100).sum() for _, targets in micro_batches)
    for ids, targets in micro_batches:
        counts = (targets != -100).flatten()
        losses = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten().clamp(min=0), reduction="none")
        mean = (losses * counts).sum() / counts.sum()
        (mean * counts.sum() / counted).backward()


def sum_of_means(model, micro_batches):
    for ids, targets in micro_batches:
        _loss(model, ids, targets).backward()


def sum_of_sums(model, micro_batches):
    for ids, targets in micro_batches:
        _loss(model, ids, targets, reduction="sum").backward()


def counts_padding(model, micro_batches):
    positions = sum(targets.numel() for _, targets in micro_batches)
    for ids, targets in micro_batches:
        (_loss(model, ids, targets, reduction="sum") / positions).backward()


def weighs_by_sequences(model, micro_batches):
    sequences = sum(len(ids) for ids, _ in micro_batches)
    for ids, targets in micro_batches:
        loss = _loss(model, ids, targets) if (targets != -100).any() else model(ids).sum() * 0
        (loss * len(ids) / sequences).backward()


def divides_twice(model, micro_batches):
    counted = sum((targets != -100).sum() for _, targets in micro_batches)
    for ids, targets in micro_batches:
        (_loss(model, ids, targets, reduction="sum") / counted / len(micro_batches)).backward()


def whole_batch_at_once(model, micro_batches):
    ids, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    _loss(model, ids, targets).backward()


def one_backward_at_the_end(model, micro_batches):
    counted = sum((targets != -100).sum() for _, targets in micro_batches)
    losses = [_loss(model, ids, targets, reduction="sum") for ids, targets in micro_batches]
    (sum(losses) / counted).backward()


def backward_that_keeps_the_graphs(model, micro_batches):
    counted, losses = sum((targets != -100).sum() for _, targets in micro_batches), []
    for ids, targets in micro_batches:
        losses.append(_loss(model, ids, targets, reduction="sum") / counted)
        losses[-1].backward(retain_graph=True)


def zeroes_the_weights(model, micro_batches):
    solution("accumulate")(model, micro_batches)
    for p in model.parameters():
        p.data.zero_()


def takes_the_step_too(model, micro_batches):
    solution("accumulate")(model, micro_batches)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def zeroes_divided_by_zero(model, micro_batches):
    solution("accumulate")(model, micro_batches)
    for p in model.parameters():
        p.grad = p.grad * math.nan


def a_forward_pass_to_count(model, micro_batches):
    counted = sum(
        (targets != -100).sum() for ids, targets in micro_batches if (model(ids) * 0).sum().backward() is None
    )
    for ids, targets in micro_batches:
        (_loss(model, ids, targets, reduction="sum") / counted).backward()


def never_calls_backward(model, micro_batches):
    for ids, targets in micro_batches:
        _loss(model, ids, targets)


REJECTED = {
    "does_it_fit": {
        "rounds the parameters first": (fits_rounds_parameters_first, "do not round the number of parameters first"),
        "only the blocks": (fits_only_blocks, "the embeddings, the head, biases and norms count too"),
        "GiB for bytes": (fits_in_gib, "that is in GiB, asked were bytes"),
        "no head": (fits_without_head, "the head has a matrix and a bias of its own"),
        "values for bytes": (fits_activations_in_values, "those are values, and in bf16 each has 2 bytes"),
        "float32": (fits_activations_in_float32, "that is float32, asked is bf16"),
        "one sequence": (fits_one_sequence, "that is for one sequence"),
        "flash forgotten": (fits_flash_forgotten, "flash attention keeps no T^2 scores"),
        "scores forgotten": (fits_scores_forgotten, "without flash attention the T^2 scores are kept"),
        "floor": (fits_floor, "it takes 23 devices, not 22: the last one is needed"),
        "one too many": (fits_one_more, "it takes 4 devices, not 5: what fits exactly needs no further device"),
        "parts of devices": (fits_parts_of_devices, "devices come whole"),
        "state alone": (fits_state_alone, "return three numbers, bytes of the state, bytes of activations and devices, not the int"),
        "rounded": (fits_rounded, "it takes 14 devices, not 13: the last one is needed"),
        "nearly fits": (fits_nearly, "it takes 5 devices, not 4: the last one is needed"),
        "nan": (fits_not_a_number, "return a number of bytes as the second of three values, not the float nan"),
        "text": (fits_as_text, "return a number of bytes as the first of three values, not the text '9140"),
        "devices as text": (fits_devices_as_text, "return a number of devices as the third of three values, not the text '23'"),
        "no devices": (fits_no_devices, "a number of devices as the third of three values, not None"),
        "a list": (fits_a_list_of_bytes, "a number of bytes as the second of three values, not the list ["),
        "nothing": (lambda *_: None, "return three numbers, bytes of the state, bytes of activations and devices, not None"),
    },
    "recompute_trade_off": {
        "everything": (chooses_everything, "costs 40 FLOPs; nothing fits for 0"),
        "nothing": (chooses_nothing, "keeps 64 bytes of 34"),
        "the largest first": (chooses_the_largest_first, "costs 100 FLOPs; other, small fits for 90"),
        "the cheapest per byte": (chooses_the_cheapest_per_byte, "FLOPs;"),
        "inputs forgotten": (forgets_the_inputs, "a piece that is recomputed keeps its input"),
        "None": (gives_up_early, "the answer was None"),
        "indices": (answers_with_indices, "is the name of no piece"),
        "one name": (answers_with_one_name, "return a set of names, not the text 'block 0'"),
        "pieces": (answers_with_the_pieces, "return a set of names; the Piece"),
        "lists": (answers_with_lists_of_names, "return a set of names; the list ['block 0'] is the name of no piece"),
        "a dictionary": (answers_with_a_dictionary, "return a set of names, not the dict {'block 0': True"),
    },
    "uneven_accumulation": {
        "mean of means": (mean_of_means, "the mean of the micro-batches' means"),
        "not a number": (weighs_means_that_may_not_exist, "the mean over a micro-batch without counted tokens is 0/0"),
        "sum of means": (sum_of_means, "3 times too large: that is the sum of 3 means"),
        "sum of sums": (sum_of_sums, "30 times too large: divide by the number of counted tokens"),
        "padding counted": (counts_padding, "positions that do not count were counted"),
        "weighs by sequences": (weighs_by_sequences, "the mean of the micro-batches' means"),
        "divides twice": (divides_twice, "3 times too small: they were divided once too often"),
        "whole batch at once": (whole_batch_at_once, "the model was given 6 sequences at once"),
        "one backward at the end": (one_backward_at_the_end, "the activations of 3 micro-batches were in memory at once"),
        "graphs retained": (backward_that_keeps_the_graphs, "the activations of 3 micro-batches were in memory at once"),
        "weights zeroed": (zeroes_the_weights, "the weights have changed"),
        "a step": (takes_the_step_too, "the weights have changed"),
        "nan": (zeroes_divided_by_zero, "the gradients are not finite"),
        "a forward pass to count": (a_forward_pass_to_count, "6 forward passes for 3 micro-batches"),
        "never backward": (never_calls_backward, "run a backward pass for each micro-batch"),
    },
}  # fmt: skip
MUTANTS = [(check, mutant) for check, mutants in REJECTED.items() for mutant in mutants]
SOLUTIONS = {
    "does_it_fit": "does_it_fit",
    "recompute_trade_off": "choose",
    "uneven_accumulation": "accumulate",
}


@pytest.mark.parametrize(("check", "mutant"), MUTANTS, ids=lambda value: value)
def test_check_rejects_mutant_with_the_right_sentence(check, mutant):
    answer, sentence = REJECTED[check][mutant]
    assert sentence.lower() in getattr(checks, check)(answer).lower()


@pytest.mark.parametrize(("check", "name"), SOLUTIONS.items())
def test_check_accepts_the_lessons_solution(check, name):
    assert getattr(checks, check)(solution(name), solution=True) == "correct"


@pytest.mark.parametrize("check", SOLUTIONS)
def test_unattempted_exercise_is_no_fault(check):
    def stub(*_):
        raise NotImplementedError

    assert getattr(checks, check)(stub) == "not attempted"


def test_another_order_of_the_same_cheapest_pieces_is_as_good():
    def answer(pieces, budget):
        chosen = solution("choose")(pieces[::-1], budget)
        return chosen if chosen is None else sorted(chosen)

    assert checks.recompute_trade_off(answer) == "correct"


def test_counting_tokens_without_a_graph_is_no_second_forward_pass():
    def answer(model, micro_batches):
        with torch.no_grad():
            model(micro_batches[0][0])
        solution("accumulate")(model, micro_batches)

    assert checks.uneven_accumulation(answer) == "correct"


def test_a_graph_that_still_has_a_name_but_was_freed_is_not_in_memory():
    def answer(model, micro_batches):
        counted, losses = sum((targets != -100).sum() for _, targets in micro_batches), []
        for ids, targets in micro_batches:
            losses.append(_loss(model, ids, targets, reduction="sum") / counted)
            losses[-1].backward()

    assert checks.uneven_accumulation(answer) == "correct"


def test_gradients_by_autograd_grad_are_gradients():
    def answer(model, micro_batches):
        counted, parameters = (
            sum((targets != -100).sum() for _, targets in micro_batches),
            [*model.parameters()],
        )
        for p in parameters:
            p.grad = torch.zeros_like(p)
        for ids, targets in micro_batches:
            loss = _loss(model, ids, targets, reduction="sum") / counted
            for p, part in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.grad += part

    assert checks.uneven_accumulation(answer) == "correct"


@pytest.mark.parametrize("row", [np.array, lambda row: torch.tensor(row, dtype=torch.float64), list])
def test_a_row_of_three_numbers_is_three_numbers(row):
    assert checks.does_it_fit(lambda *case: row(solution("does_it_fit")(*case))) == "correct"


@pytest.mark.parametrize("number", [np.int64, np.float64, torch.tensor], ids=lambda number: number.__name__)
def test_numbers_of_numpy_and_torch_are_numbers_too(number):
    def answer(*case):
        state, kept, devices = solution("does_it_fit")(*case)
        return number(int(state)), number(int(kept)), number(devices)

    assert checks.does_it_fit(answer) == "correct"


def test_a_weight_that_is_a_count_by_a_count_is_a_float32_and_right():
    def answer(model, micro_batches):
        counts = [(targets != -100).sum() for _, targets in micro_batches]
        for (ids, targets), count in zip(micro_batches, counts, strict=True):
            if count:
                (_loss(model, ids, targets) * (count / sum(counts))).backward()

    assert checks.uneven_accumulation(answer) == "correct"


def test_every_check_of_the_lesson_has_four_mutants_or_more():
    assert exercises_of(checks) == set(REJECTED)
    assert all(len(mutants) >= 4 for mutants in REJECTED.values())
