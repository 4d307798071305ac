"""Lesson 11's check of a wrong copy: right answers in any style, and the sentence that each wrong one gets."""

import zlib

import pytest
import torch
from exercises import heard_alike, judge_solutions, not_attempted
from manyhands import fingerprint
from manyhands.checks import when_it_breaks as checks

LESSON = "11_when_it_breaks"


def first_odd(print_of, alone_of_two=None):
    """An answer that sends print_of(parameter) for each, and looks for the one that fewest ranks sent."""

    def answer(model, gather):
        names = [name for name, _ in model.named_parameters()]
        of_all = gather([print_of(p.detach()) for p in model.parameters()])
        for name, *prints in zip(names, *of_all, strict=True):
            if any(given != prints[0] for given in prints):
                alone = min(range(len(prints)), key=lambda r: prints.count(prints[r]))
                return (alone if len(prints) > 2 else alone_of_two), name
        return None

    return answer


def finds_nothing(model, gather):
    return None


def names_no_parameter(model, gather):
    found = first_odd(lambda p: fingerprint([p]))(model, gather)
    return found and found[0]


def takes_rank_0_for_the_right_one(model, gather):
    prints = {name: fingerprint([p]) for name, p in model.named_parameters()}
    of_all = gather(prints)
    return next(((r, n) for n in prints for r, of in enumerate(of_all) if of[n] != of_all[0][n]), None)


def heals_the_model(model, gather):
    found = first_odd(lambda p: fingerprint([p]))(model, gather)
    with torch.no_grad():
        model[0].weight.zero_()
    return found


bits = torch.int32
MUTANTS = {
    "finds nothing": (finds_nothing, "bit 20 of one weight is flipped on rank 2, in 0.weight, and you found nothing"),
    "sums": (first_odd(lambda p: p.sum().item()), "all copies are equal, and you found (0, '2.bias') (nan is not equal to"),
    "sums without nan": (first_odd(lambda p: p.nan_to_num().sum().item()), "and you found nothing: compare all bits"),
    "sums of bits": (
        first_odd(lambda p: p.view(bits).sum().item()), "two weights have changed places on rank 1, so that their sum is",
    ),
    "sums of squares and places": (
        first_odd(lambda p: sum(i * x * x for i, x in enumerate(p.nan_to_num().double().view(-1).tolist()))),
        "a zero has become -0.0 on rank 2",
    ),
    "weights": (first_odd(lambda p: p.view(bits).tolist()), "bytes for 6 tensors: weights travelled; fingerprints fit into"),
    "rank 0 is right": (takes_rank_0_for_the_right_one, "is flipped on rank 0, in 2.weight: the answer is (0, '2.weight'), not (1"),
    "no name": (names_no_parameter, "return (rank, name) or None, not 2"),
    "heals": (heals_the_model, "your function changed the model; look at it only"),
}  # fmt: skip
RIGHT = {
    "crc32": first_odd(lambda p: zlib.crc32(p.numpy().tobytes())),
    "bytes": first_odd(lambda p: bytes.fromhex(fingerprint([p]))),
}


def judge_all(ranks):
    verdicts = {name: checks.odd_one_out(answer, ranks) for name, (answer, _) in MUTANTS.items()}
    verdicts |= {name: checks.odd_one_out(answer, ranks) for name, answer in RIGHT.items()}
    verdicts |= judge_solutions(ranks, checks.__name__, LESSON, {"odd_one_out": "odd_one_out"})
    return verdicts | {"stub": checks.odd_one_out(not_attempted, ranks)}


def judge_with_two(ranks):
    says_which = first_odd(lambda p: fingerprint([p]), alone_of_two=0)
    right = judge_solutions(ranks, checks.__name__, LESSON, {"odd_one_out": "odd_one_out"})
    return right | {"which": checks.odd_one_out(says_which, ranks)}


@pytest.fixture(scope="module")
def verdicts(pool):
    return heard_alike(pool.run(3, judge_all))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_check_rejects_mutant_with_the_right_sentence(verdicts, mutant):
    assert MUTANTS[mutant][1].lower() in verdicts[mutant].lower()


@pytest.mark.parametrize("name", [*RIGHT, "odd_one_out"])
def test_check_accepts_right_answers(verdicts, name):
    assert verdicts[name] == "correct"


def test_unattempted_exercise_is_no_fault(verdicts):
    assert verdicts["stub"] == "not attempted"


def test_of_two_copies_nobody_can_say_which_is_wrong(pool):
    verdicts = heard_alike(pool.run(2, judge_with_two))
    assert verdicts["odd_one_out"] == "correct"
    assert "with two copies nobody can say which is the wrong one; return (None, '0.weight')" in verdicts["which"]


def test_alone_there_is_nothing_to_compare_with(pool):
    (verdicts,) = pool.run(1, judge_solutions, checks.__name__, LESSON, {"odd_one_out": "odd_one_out"})
    assert verdicts["odd_one_out"] == "correct"
