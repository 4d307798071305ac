"""The frame around every check, without ranks: verdicts, answers of the wrong type, what the toolkit says."""

import contextlib
import importlib
import math
import os
import pkgutil
import re
import time

import pytest
import torch
from exercises import exercises_of, heard_alike
from manyhands import checks
from manyhands.checks import Wrong, exercise
from manyhands.checks.drawn import in_turn, luck, normal, seeded, sizes
from manyhands.checks.expect import (
    expect_equal,
    expect_number,
    expect_refusal,
    expect_tensor,
    expect_traffic,
    told_apart,
)
from manyhands.checks.stop import NeverEnds, stopped_after
from manyhands.measure.wire import Call, Seen


def test_a_check_without_ranks_judges_in_this_process(capsys):
    @exercise(3, "parameters")
    def parameters(answer, ranks):
        if answer != 38:
            raise Wrong(f"6-4-2 has 38 parameters, not {answer}")

    assert parameters(38) == "correct"
    assert parameters(36) == "6-4-2 has 38 parameters, not 36."
    blanks = (lambda: ____), (lambda: [math.____(x) for x in ()])  # noqa: F821
    assert [parameters(answer) for answer in (None, ..., *blanks, blanks)] == ["not attempted"] * 5
    assert capsys.readouterr().out.splitlines()[:2] == [
        "exercise 3 (parameters): correct",
        "exercise 3 (parameters): not yet. 6-4-2 has 38 parameters, not 36.",
    ]


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("p.grad is off", "p.grad is off."),
        ("add_up: 4 calls", "add_up: 4 calls."),
        ("for 7 it is off", "For 7 it is off."),
        ("step-0006 was there", "step-0006 was there."),
        ("steps are missing", "Steps are missing."),
        ("steps = 20 in the notebook", "steps = 20 in the notebook."),
        ("chunks[1] is another tensor", "chunks[1] is another tensor."),
        ("f should return a tensor", "f should return a tensor."),
    ],
)
def test_a_sentence_begins_with_a_capital_but_a_name_of_code_stays(said, heard):
    @exercise(9, "names")
    def names(answer, ranks=None):
        raise Wrong(said)

    assert names(lambda: None) == heard


def test_a_name_of_the_learners_own_keeps_its_case():
    @exercise(9, "names")
    def names(answer, ranks=None):
        raise Wrong("share is off")

    assert names(lambda share: None) == "share is off."
    assert names((lambda *_: None, lambda rest: None)) == "Share is off."


# ---- twice ----


@exercise(7, "twice as much, in any order")
def twice_as_much(answer, ranks=None):
    n, m = sizes(1, 2)
    for i, x in in_turn([(0, normal(0, n)), (1, normal(1, m))]):
        if not torch.equal(answer(x), 2 * x):
            raise Wrong(f"case {i} is wrong")


def by_the_first(key):
    """An answer that is right, but that finds its first results again."""
    kept = {}

    def answer(x):
        return kept.setdefault(key(x, kept), 2 * x)

    return answer


def right_once():
    """An answer that keeps nothing, and is wrong for the second numbers alone."""
    calls = iter(range(4))
    return lambda x: 2 * x if next(calls) < 2 else 3 * x


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (by_the_first(lambda x, kept: tuple(x.tolist())), "correct"),
        (
            by_the_first(lambda x, kept: x.shape),
            "Case 1 is wrong. The first trial had other numbers and the same result: is it kept?",
        ),
        (by_the_first(lambda x, kept: 0), "Case 1 is wrong."),
        (right_once(), "Case 1 is wrong."),
    ],
)
def test_what_an_answer_keeps_from_one_call_to_the_next_is_found(answer, sentence):
    verdict = twice_as_much(answer)
    assert verdict == sentence or (verdict.startswith(sentence) and "is it kept" not in verdict)


def test_an_answer_is_stopped_but_not_within_an_import_whose_time_does_not_count(tmp_path, monkeypatch):
    """Half a module would stay behind: each later import of it fails."""
    slow = "import time\nend = time.process_time() + 1.6\nwhile time.process_time() < end: pass\nwhole = True\n"
    (tmp_path / "slow_module.py").write_text(slow)
    monkeypatch.syspath_prepend(tmp_path)
    with stopped_after(0.4):
        import slow_module
    assert slow_module.whole

    @stopped_after(0.4)
    def forever():
        while True:
            pass

    with pytest.raises(NeverEnds):
        next(forever() for _ in (0,))  # in a generator: what Python handles in the end is not the next test's


@exercise(8, "nothing to do", timeout_s=0.3)
def nothing_to_do(answer, ranks=None):
    answer()


def catches_everything():
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            time.sleep(0)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (
            catches_everything,
            r"Your code had not ended after \d+ s: is a loop too long\? It was in line \d+: time.sleep",
        ),
        (lambda: os._exit(3), r"Your code ended the program \(SystemExit\): return instead\."),
        (lambda: rnak, r"Your code raised NameError: name 'rnak' is not defined \(line \d+: .*rnak"),  # noqa: F821
    ],
)
def test_an_answer_that_does_not_end_or_ends_too_much_costs_no_kernel(answer, sentence):
    assert re.match(sentence, nothing_to_do(answer))


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("Resource temporarily unavailable", "ulimit -u or the control group's pids.max allows too few processes"),
        ("Connection closed by peer", "a rank's process ended while its answer was judged: restart the ranks"),
    ],
)
def test_a_check_that_gets_no_group_says_which_limit_was_met_or_that_a_rank_ended(monkeypatch, raised, said):
    @contextlib.contextmanager
    def no_group(*_):
        raise RuntimeError(raised)
        yield

    monkeypatch.setattr(checks, "trial_group", no_group)
    with pytest.raises(RuntimeError, match=said):
        nothing_to_do(lambda: None)


def test_a_check_draws_what_it_asks_from_its_seed_and_its_turn():
    asked = []

    @exercise(8, "what is drawn")
    def what_is_drawn(answer, ranks=None):
        three = sizes(5, 3, least=2, most=9)
        assert math.lcm(*three) == math.prod(three) and len(set(three)) == 3 and {*three} <= {*range(2, 10)}
        asked.append((three, normal(1, 2).tolist(), luck(1).random(), seeded(lambda: torch.rand(1), 1).item()))

    for seed in (0, 0, 1):
        assert what_is_drawn(lambda: None, seed=seed) == "correct"
    (first, second), (again, _), (other, _) = zip(asked[::2], asked[1::2], strict=True)
    assert again == first and first[0] == second[0], "the same sizes"
    assert all(a != b for a, b in zip(first[1:], second[1:], strict=True))
    assert all(a != b for a, b in zip(first, other, strict=True))


# ---- answers of the wrong type ----

STRANGE = {
    "None": None, "text": "0.5", "nan": math.nan, "a list": [1.5, "x"], "a matrix": torch.ones(2, 3),
    "a dictionary": {"a": 1},
}  # fmt: skip
HANDED_IN = ("None", "text")  # instead of a function
# on one rank some of their checks have nothing to ask for
COMMUNICATE = {
    "collectives", "data_parallel", "tensor_parallel", "context_and_experts", "when_it_breaks", "llm_alignment",
    "llm_serving",
}  # fmt: skip
LESSONS = [
    module
    for module in sorted(f"manyhands.checks.{found.name}" for found in pkgutil.iter_modules(checks.__path__))
    if hasattr(importlib.import_module(module), "exercise")
]


def judge_strange(ranks, module):
    """{(check, strange thing): the verdict on a function that returns it}, and on the thing itself for an answer."""
    found = importlib.import_module(module)
    checks = {name: getattr(found, name) for name in sorted(exercises_of(found))}
    returned = {
        (name, strange): check(lambda *_, thing=thing, **given: [thing][0], ranks)
        for name, check in checks.items()
        for strange, thing in STRANGE.items()
    }
    handed_in = {(name, it): check(STRANGE[it], ranks) for name, check in checks.items() for it in HANDED_IN}
    return returned, handed_in


@pytest.mark.ranks
@pytest.mark.parametrize("module", LESSONS)
def test_an_answer_of_the_wrong_type_is_told_so_by_every_check(pool, module, tmp_path):
    environ = {"MANYHANDS_OUTPUTS": str(tmp_path)}
    n = 2 if module.rpartition(".")[2] in COMMUNICATE else 1
    returned, handed_in = heard_alike(pool.run(n, judge_strange, module, environ=environ, timeout_s=280))
    for case, heard in returned.items():
        assert heard not in ("correct", "not attempted") and heard.endswith((".", "?")), (case, heard)
    for case, heard in handed_in.items():
        assert heard != "correct" and (heard == "not attempted") == (case[1] == "None"), (case, heard)


# ---- what the toolkit says ----


def complaint(expect, *args, **kwargs):
    try:
        expect(*args, **kwargs)
    except Wrong as fault:
        return str(fault)
    return None


@pytest.mark.parametrize(
    ("found", "wanted", "texts"),
    [
        (1234567, 1234568.0, ("1,234,567", "1,234,568")),
        (4.12312, 4.12313, ("4.12312", "4.12313")),
        (0.5, 4, ("0.5", "4")),
        (1.5e-7, 2.0e-7, ("1.5e-07", "2e-07")),
        (2**61 + 1, 2**61, ("2,305,843,009,213,693,953", "2,305,843,009,213,693,952")),
    ],
)
def test_two_numbers_are_told_with_as_many_digits_as_differ(found, wanted, texts):
    assert told_apart(found, wanted) == texts


def test_a_slip_is_named_only_where_its_value_came():
    slips = {"that is the sum": 8.0, "that is one of two": [1.0, 3.0], "no slip": None}
    assert complaint(expect_number, 2, 2.0, "the mean", "s", slips) is None
    assert (
        complaint(expect_number, 8, 2.0, "the mean", "s", slips) == "the mean should be 2 s, not 8 s: that is the sum"
    )
    assert complaint(expect_number, 3, 2.0, "the mean", "", slips) == "the mean should be 2, not 3: that is one of two"
    assert complaint(expect_number, 5, 2.0, "the mean", "s", slips) == "the mean should be 2 s, not 5 s"
    assert complaint(expect_number, torch.tensor(0.1), 0.1, "it") is None, "it is 0.1 in torch's default dtype"
    near = {"that is with 1e-7 more": 0.1 + 1e-7}
    assert complaint(expect_number, torch.tensor(0.1 + 1e-7), 0.1, "it", "", near) == (
        "it should be 0.1, not 0.1000001: that is with 1e-7 more"
    )
    assert complaint(expect_number, torch.tensor(1e8), 1e8 + 1, "it") == "it should be 100,000,001, not 100,000,000"
    assert complaint(expect_equal, (2, 1), [1, 2], "it", {"back to front": [2, 1]}) == (
        "it should be [1, 2], not [2, 1]: back to front"
    )
    assert complaint(expect_equal, 3.0, 3, "it") == "it should be 3, not 3.0"
    assert complaint(expect_equal, torch.tensor([1, 2]), [1, 2], "it") is None


def test_a_tensor_is_told_by_its_slip_its_shape_its_dtype_its_factor_or_its_first_wrong_number():
    wanted = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)

    def said(found):
        return complaint(expect_tensor, found, wanted, "x", {"that is -x": -wanted}, "the sum")

    assert said(wanted.clone()) is None
    assert said(-wanted) == "x should be the sum: that is -x"
    assert said(wanted[:2]) == "x should have the shape [3], not [2]: it is the sum"
    assert said(wanted.float()) == "x should be float64, as what you were given, not float32"
    assert said(wanted / 3) == "x should be the sum: what came is 0.3333 times that"
    assert said(wanted + torch.tensor([0, 1e-7, 0])) == (
        "x should be the sum: element [1] should be 2, not 2.0000001, which is float32's accuracy; keep the dtype of "
        "what you were given, all the way"
    )
    assert said(wanted * math.nan).startswith("x should be the sum: element [0] should be 1, and is nan")
    assert said(wanted + torch.tensor([0, 0, 1])) == "x should be the sum: element [2] should be 4, not 5"
    assert said([1.0, 2.0, 4.0]) == "x should be the sum, not the list [1.0, 2.0, 4.0]"


def test_a_refusal_names_its_numbers():
    def refuse(text):
        raise ValueError(text)

    assert complaint(expect_refusal, lambda: refuse("12 does not split over 8"), "12 on 8", 12, (8, 16)) is None
    assert complaint(expect_refusal, lambda: refuse("no"), "12 on 8", 12, 8) == (
        "12 on 8: raise a ValueError that names 12 and 8; yours says no"
    )
    assert complaint(expect_refusal, lambda: 3, "12 on 8", 12) == (
        "12 on 8: raise a ValueError that names 12, and do not return 3"
    )


def test_traffic_is_told_with_what_was_made_and_what_is_enough():
    seen = Seen([Call("all_reduce", 8), Call("recv", 4), Call("broadcast", 8)])
    assert complaint(expect_traffic, seen, "right", calls=2, payload=16) is None
    assert complaint(expect_traffic, seen, "right", volume=24) is None
    assert complaint(expect_traffic, seen, "right", "sum only", only=("all_reduce",)) == (
        "right, but it calls broadcast: sum only"
    )
    assert complaint(expect_traffic, seen, "right", "one will do", calls=1, volume=16) == (
        "right, but 24 bytes were communicated in 2 calls of all_reduce and broadcast (an all_reduce counts twice), "
        "where 1 call and 16 bytes are enough: one will do"
    )
    few = "24 bytes were communicated in 2 calls of all_reduce and broadcast (an all_reduce counts twice)"
    assert complaint(expect_traffic, seen, "right", calls=1, volume=24) == (
        "right, but 2 calls of all_reduce and broadcast were made, where 1 call is enough"
    )
    assert complaint(expect_traffic, seen, "right", calls=2, volume=8) == f"right, but {few}, where 8 bytes are enough"


def test_a_right_answer_is_told_what_it_communicated_and_the_next_check_forgets_it(capsys):
    seen = Seen([Call("all_reduce", 8), Call("recv", 4), Call("broadcast", 8)])
    exercise(3, "two calls")(lambda answer, ranks: expect_traffic(seen, "the sum is right", calls=2))(1)
    exercise(4, "no call")(lambda answer, ranks: expect_traffic(Seen([]), "the sum is right", calls=2))(1)
    assert capsys.readouterr().out.splitlines() == [
        "exercise 3 (two calls): correct. It made 2 calls of all_reduce and broadcast with 16 bytes on this rank.",
        "exercise 4 (no call): correct",
    ]
