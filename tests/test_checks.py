"""The frame around every check: verdicts, agreement of the ranks, answers that hang or leave messages behind."""

import time

import pytest
import torch
import torch.distributed as dist
from manyhands.checks import Wrong, exercise
from rank_pool import RankFailed, run_on_ranks

pytestmark = pytest.mark.ranks


@exercise(1, "the sum", timeout_s=4)
def the_sum(answer, ranks):
    total = answer(torch.tensor([float(ranks.rank)]))
    wanted = ranks.world_size * (ranks.world_size - 1) / 2
    if total.item() != wanted:
        raise Wrong(f"the sum is {total.item():g}, not {wanted:g}")


def all_reduced(x):
    dist.all_reduce(x)
    return x


def wrong_on_the_last_rank(x):
    dist.all_reduce(x)
    return x + (dist.get_rank() == dist.get_world_size() - 1)


def hangs(x):
    if dist.get_rank() == 0:
        dist.recv(x, src=1)
    return all_reduced(x)


def unattempted(x):
    raise NotImplementedError


def raises_on_rank_1(x):
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        raise TypeError("unsupported operand")
    return x


def leaves_a_message_behind(x):
    dist.isend(torch.tensor([222.0]), (dist.get_rank() + 1) % dist.get_world_size())
    return torch.zeros(1)


def ring(x):
    size, rank = dist.get_world_size(), dist.get_rank()
    left = torch.empty(1)
    work = dist.isend(x, (rank + 1) % size)
    dist.recv(left, (rank - 1) % size)
    work.wait()
    return all_reduced(left)


def judge(ranks, answers, solution=False):
    before = torch.get_rng_state()
    verdicts = [the_sum(answer, ranks, solution=solution) for answer in answers]
    assert torch.equal(before, torch.get_rng_state())
    after = torch.ones(1)
    dist.all_reduce(after)
    return verdicts, after.item()


def test_a_right_answer_is_correct_and_an_empty_one_not_attempted(capfd):
    for verdicts, _ in run_on_ranks(2, judge, [all_reduced, unattempted, None, ...]):
        assert verdicts == ["correct", "not attempted", "not attempted", "not attempted"]


def test_all_ranks_give_the_sentence_of_the_rank_that_is_wrong():
    for verdicts, _ in run_on_ranks(3, judge, [wrong_on_the_last_rank]):
        assert verdicts == ["Rank 2: The sum is 4, not 3."]


def test_an_answer_that_hangs_is_told_so_and_the_ranks_go_on():
    for verdicts, after in run_on_ranks(2, judge, [hangs, all_reduced]):
        assert "message that never came" in verdicts[0]
        assert verdicts[1] == "correct"
        assert after == 2


def comes_late(ranks):
    if ranks.rank == 0:
        time.sleep(7)  # as if it drew a figure: longer than the others wait within a check
    return the_sum(all_reduced, ranks)


def test_a_rank_that_comes_late_to_a_check_does_not_use_up_the_patience_of_the_others():
    assert run_on_ranks(2, comes_late) == ["correct"] * 2


def test_an_exception_of_the_answer_is_named_with_its_rank():
    for verdicts, _ in run_on_ranks(2, judge, [raises_on_rank_1, all_reduced]):
        assert verdicts == ["Rank 1: Your code raised TypeError: unsupported operand.", "correct"]


def test_a_message_left_behind_does_not_poison_the_next_answer():
    for verdicts, after in run_on_ranks(2, judge, [leaves_a_message_behind, ring, all_reduced]):
        assert verdicts[1:] == ["correct", "correct"]
        assert after == 2


def test_a_wrong_solution_fails_the_run_and_an_unattempted_one_too():
    for answer in (wrong_on_the_last_rank, unattempted):
        with pytest.raises(RankFailed, match="AssertionError: solution 1 \\(the sum\\)"):
            run_on_ranks(2, judge, [answer], True)


def test_a_check_without_ranks_judges_in_this_process(capsys):
    @exercise(3, "parameters")
    def parameters(answer, ranks):
        if answer != 38:
            raise Wrong(f"6-4-2 has 38 parameters, not {answer}")

    assert parameters(38) == "correct"
    assert parameters(36) == "6-4-2 has 38 parameters, not 36."
    assert capsys.readouterr().out.splitlines() == [
        "exercise 3 (parameters): correct",
        "exercise 3 (parameters): not yet. 6-4-2 has 38 parameters, not 36.",
    ]


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("p.grad is off", "p.grad is off."),
        ("add_up: 4 calls", "add_up: 4 calls."),
        ("for 7 it is off", "For 7 it is off."),
    ],
)
def test_a_sentence_begins_with_a_capital_but_a_name_of_code_stays(said, heard):
    @exercise(9, "names")
    def names(answer, ranks=None):
        raise Wrong(said)

    assert names(lambda: None) == heard
