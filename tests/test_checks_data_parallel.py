"""Each check of lesson 03 accepts right answers and rejects mutants, several of them from published code, by name."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercises import exercises_of, heard_alike, judge_solutions, not_attempted
from manyhands.checks import data_parallel as checks

LESSON = "03_data_parallel"
N_RANKS = 3  # not a power of two: divisions round


# ---- exercise 1: answers attach hooks to a model ----


def _hook_each(model, hook):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)


def hooks_the_parameter(model):  # picotron#39
    def average(gradient):
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()

    _hook_each(model, average)


def hooks_sum(model):
    _hook_each(model, lambda p: dist.all_reduce(p.grad))


def hooks_divide_twice(model):
    def average(p):
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

    _hook_each(model, average)


def hooks_forget_all_but_the_weights(model):
    def average(p):
        if p.ndim > 1:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    _hook_each(model, average)


def hooks_work_once(model):
    def average(p, handle):
        handle[0].remove()
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

    for p in model.parameters():
        handle = []
        handle.append(p.register_post_accumulate_grad_hook(functools.partial(average, handle=handle)))


def hooks_never(model):
    pass


def hooks_send_every_gradient_twice(model):
    def average(p):
        twice = torch.stack([p.grad, p.grad])
        dist.all_reduce(twice)
        p.grad.copy_(twice[0] / dist.get_world_size())

    _hook_each(model, average)


def hooks_step_themselves(model):
    def average(p):
        dist.all_reduce(p.grad)
        p.data -= 0.1 * p.grad
        p.grad.zero_()

    _hook_each(model, average)


# ---- exercise 2: answers average after backward ----


def untidy_skips_missing(model):  # the rank that has no gradient makes one call less
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad)


def untidy_sends_frozen(model):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad)


def untidy_sends_tied_twice(model):
    for _, p in model.named_parameters(remove_duplicate=False):
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad /= dist.get_world_size()


def untidy_keeps_none(model):
    for p in model.parameters():
        if p.requires_grad:
            sent = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(sent)
            sent /= dist.get_world_size()


def untidy_sum(model):
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)


def untidy_divides_by_the_users(model):  # mean over the ranks that used it, not over all
    for p in model.parameters():
        if p.requires_grad:
            users = torch.tensor([0.0 if p.grad is None else 1.0], dtype=torch.float64)
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(users)
            dist.all_reduce(p.grad)
            p.grad /= users.clamp(min=1)


def untidy_one_flat_message(model):  # right: fewer calls are welcome
    trainable = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trainable])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, part in zip(trainable, flat.split([p.numel() for p in trainable]), strict=True):
        p.grad = part.view_as(p).clone()


def untidy_flat_message_of_what_is_there(model):  # sizes differ between ranks: gloo would abort the process
    there = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.flatten() for p in there])
    dist.all_reduce(flat)


# ---- exercise 3: answers accumulate ----


def _backward(ddp, x, y, k):
    (F.mse_loss(ddp(x), y) / k).backward()


def accumulate_undivided(ddp, micro_batches):
    with ddp.no_sync():
        for x, y in micro_batches[:-1]:
            _backward(ddp, x, y, 1)
    _backward(ddp, *micro_batches[-1], 1)


def accumulate_always_averaging(ddp, micro_batches):
    for x, y in micro_batches:
        _backward(ddp, x, y, len(micro_batches))


def accumulate_no_sync_around_backward_only(ddp, micro_batches):
    for i, (x, y) in enumerate(micro_batches):
        loss = F.mse_loss(ddp(x), y) / len(micro_batches)
        if i < len(micro_batches) - 1:
            with ddp.no_sync():
                loss.backward()
        else:
            loss.backward()


def accumulate_flag_after_forward(ddp, micro_batches):  # build-nanogpt#30
    for i, (x, y) in enumerate(micro_batches):
        loss = F.mse_loss(ddp(x), y) / len(micro_batches)
        ddp.require_backward_grad_sync = i == len(micro_batches) - 1
        loss.backward()


def accumulate_never_averaging(ddp, micro_batches):
    with ddp.no_sync():
        for x, y in micro_batches:
            _backward(ddp, x, y, len(micro_batches))


def accumulate_last_only(ddp, micro_batches):
    _backward(ddp, *micro_batches[-1], 1)


# ---- exercise 4: answers predict bytes ----


def bytes_of_the_payload(num_params, n_ranks, bytes_per_value=4, micro_batches=1, no_sync=False):
    return num_params * bytes_per_value


def bytes_to_everyone(num_params, n_ranks, bytes_per_value=4, micro_batches=1, no_sync=False):
    return (n_ranks - 1) * num_params * bytes_per_value


def bytes_of_half_the_ring(num_params, n_ranks, bytes_per_value=4, micro_batches=1, no_sync=False):
    return (n_ranks - 1) / n_ranks * num_params * bytes_per_value


def bytes_without_chunks(num_params, n_ranks, bytes_per_value=4, micro_batches=1, no_sync=False):
    return 2 * (n_ranks - 1) * num_params * bytes_per_value


def bytes_always_once(num_params, n_ranks, bytes_per_value=4, micro_batches=1, no_sync=False):
    return 2 * (n_ranks - 1) / n_ranks * num_params * bytes_per_value


def bytes_always_many(num_params, n_ranks, bytes_per_value=4, micro_batches=1, no_sync=False):
    return micro_batches * 2 * (n_ranks - 1) / n_ranks * num_params * bytes_per_value


def bytes_of_one_rank(num_params, n_ranks, bytes_per_value=4, micro_batches=1, no_sync=False):
    factor = 2 * (n_ranks - 1) / n_ranks if n_ranks > 1 else 1
    return factor * num_params * bytes_per_value * (1 if no_sync else micro_batches)


def bytes_as_text(num_params, n_ranks, bytes_per_value=4, micro_batches=1, no_sync=False):
    return "3.27 MB"


REJECTED = {
    "gradient_hook": {
        hooks_the_parameter: "the hook is handed the parameter; send its grad",
        hooks_sum: "3 times too large; divide by the number of ranks",
        hooks_divide_twice: "3 times too small: they were divided by the number of ranks twice",
        hooks_forget_all_but_the_weights: "from the mean over the ranks",
        hooks_work_once: "nothing was sent during the second backward",
        hooks_never: "nothing was sent while backward ran",
        hooks_send_every_gradient_twice: "608 bytes were handed over where 304 are enough",
        hooks_step_themselves: "the weights changed during backward",
    },
    "untidy": {
        untidy_skips_missing: "a parameter that one rank did not use has grad None there",
        untidy_sends_frozen: "the frozen parameter has a gradient now",
        untidy_sends_tied_twice: "a tied matrix has one gradient; send it once",
        untidy_keeps_none: "rare.weight has no gradient here",
        untidy_sum: "3 times too large",
        untidy_divides_by_the_users: "from the mean over the ranks",
        untidy_flat_message_of_what_is_there: "with tensors of different sizes",
    },
    "accumulation": {
        accumulate_undivided: "3 times too large: each micro-batch's loss is a mean already",
        accumulate_always_averaging: "bytes were averaged where 304 are enough",
        accumulate_no_sync_around_backward_only: "their forward pass too, because that is where DDP looks",
        accumulate_flag_after_forward: "DDP decides in forward whether the next backward averages",
        accumulate_never_averaging: "nothing was averaged: the last micro-batch belongs outside no_sync",
        accumulate_last_only: "what was averaged was not the sum of all micro-batches",
    },
    "bytes_per_step": {
        bytes_of_the_payload: "what it hands to the all-reduce; on the ring it sends 2(n-1)/n of it",
        bytes_to_everyone: "a copy for every other rank",
        bytes_of_half_the_ring: "the reduce-scatter alone",
        bytes_without_chunks: "each of the 2(n-1) messages is one chunk",
        bytes_always_once: "without no_sync every micro-batch is averaged",
        bytes_always_many: "with no_sync only the last micro-batch is averaged",
        bytes_of_one_rank: "one rank has nobody to send to",
        bytes_as_text: "return a number of bytes",
    },
}
SOLUTIONS = {
    "gradient_hook": "average_by_hooks",
    "untidy": "average_untidy",
    "accumulation": "accumulate",
    "bytes_per_step": "bytes_per_step",
}
MUTANTS = [(check, mutant) for check, mutants in REJECTED.items() for mutant in mutants]


def judge_all(ranks):
    """Every mutant and every solution, one after the other in the same processes: none poisons the next."""
    verdicts = {}
    for check, mutant in MUTANTS:
        verdicts[mutant.__name__] = getattr(checks, check)(mutant, ranks)
    verdicts |= judge_solutions(ranks, checks.__name__, LESSON, SOLUTIONS)
    verdicts["one flat message"] = checks.untidy(untidy_one_flat_message, ranks)
    verdicts["stub"] = checks.gradient_hook(not_attempted, ranks)
    return verdicts


@pytest.fixture(scope="module")
def verdicts(pool):
    return heard_alike(pool.run(N_RANKS, judge_all, timeout_s=200))


@pytest.mark.parametrize(("check", "mutant"), MUTANTS, ids=[mutant.__name__ for _, mutant in MUTANTS])
def test_check_rejects_mutant_with_the_right_sentence(verdicts, check, mutant):
    # case aside: what is said begins with a capital
    assert REJECTED[check][mutant].lower() in verdicts[mutant.__name__].lower()


@pytest.mark.parametrize("name", SOLUTIONS.values())
def test_check_accepts_the_lessons_solution(verdicts, name):
    assert verdicts[name] == "correct"


def test_check_welcomes_fewer_calls_than_parameters(verdicts):
    assert verdicts["one flat message"] == "correct"


def test_unattempted_exercise_is_no_fault(verdicts):
    assert verdicts["stub"] == "not attempted"


def test_every_check_of_the_lesson_has_three_mutants_or_more():
    assert exercises_of(checks) == set(REJECTED)
    assert all(len(mutants) >= 3 for mutants in REJECTED.values())


def test_solutions_are_accepted_by_a_world_of_one(pool):
    (verdicts,) = pool.run(1, judge_solutions, checks.__name__, LESSON, SOLUTIONS, timeout_s=120)
    assert set(verdicts.values()) == {"correct"}
