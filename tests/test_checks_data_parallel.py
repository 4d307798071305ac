"""Each check of lesson 03 accepts right answers and rejects mutants, several of them from published code, by name."""

import contextlib
import functools
import math
from fractions import Fraction

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercises import AnswersOfRanks
from manyhands.checks import data_parallel

# ---- build A: answers hand out rank 0's state ----


def start_of_state_dict(model):  # right: it lists parameters and buffers
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)


def start_by_data(model):  # right
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    for b in model.buffers():
        dist.broadcast(b, src=0)


def start_without_buffers(model):
    for p in model.parameters():
        dist.broadcast(p.detach(), src=0)


def start_of_what_trains(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.requires_grad or tensor in set(model.buffers()):
            dist.broadcast(tensor.detach(), src=0)


def start_in_copies(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor.clone(), src=0)


def start_as_mean(model):
    for tensor in model.parameters():
        dist.all_reduce(tensor.detach())
        tensor.detach().div_(dist.get_world_size())
    for tensor in model.buffers():
        dist.broadcast(tensor, src=0)


def start_from_a_seed(model):
    torch.manual_seed(0)
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor)


def start_of_rank_0_alone(model):
    if dist.get_rank() == 0:
        start_of_state_dict(model)


def start_from_everyone(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=dist.get_rank())


def start_by_gathering(model):
    for tensor in model.state_dict().values():
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        tensor.copy_(parts[0])


def start_in_new_parameters(model):
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            fresh = p.detach().clone()
            dist.broadcast(fresh, src=0)
            setattr(module, name, torch.nn.Parameter(fresh, requires_grad=p.requires_grad))
        for b in module.buffers(recurse=False):
            dist.broadcast(b, src=0)


# ---- build B: answers average after backward ----


def mean_one_flat_message(model):  # right: fewer calls are welcome
    flat = torch.cat([p.grad.flatten() for p in model.parameters()]) / dist.get_world_size()
    dist.all_reduce(flat)
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        p.grad = part.view_as(p)


def mean_after_the_sum(model):  # right
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad.div_(dist.get_world_size())


def mean_of_the_weights(model):
    for p in model.parameters():
        p.data /= dist.get_world_size()
        dist.all_reduce(p.data)


def mean_sum(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)


def mean_of_copies(model):
    for p in model.parameters():
        mean = p.grad / dist.get_world_size()
        dist.all_reduce(mean)


def mean_divided_only(model):
    for p in model.parameters():
        p.grad /= dist.get_world_size()


def mean_returned(model):
    means = []
    for p in model.parameters():
        means.append(p.grad / dist.get_world_size())
        dist.all_reduce(means[-1])
    return means


def mean_on_rank_0(model):
    for p in model.parameters():
        p.grad /= dist.get_world_size()
        dist.reduce(p.grad, 0)


def mean_by_gathering(model):
    for p in model.parameters():
        parts = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, p.grad)
        p.grad.copy_(sum(parts) / len(parts))


def mean_of_matrices(model):
    for p in model.parameters():
        if p.ndim > 1:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad)


# ---- build C: answers attach hooks to a model ----


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


def hooks_average(model):  # right
    def average(p):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

    _hook_each(model, average)


def hooks_never(model):
    model.train()


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


def hooks_gather_all(model):
    def average(p):
        parts = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, p.grad)
        p.grad.copy_(sum(parts) / len(parts))

    _hook_each(model, average)


def hooks_reduce_and_broadcast(model):
    def average(p):
        dist.reduce(p.grad, 0)
        p.grad /= dist.get_world_size()
        dist.broadcast(p.grad, 0)

    _hook_each(model, average)


def hooks_forget_the_gradient(model):
    def average(p):
        dist.all_reduce(p.grad)
        p.grad = None

    _hook_each(model, average)


def hooks_divide_by_zero(model):
    def average(p):
        dist.all_reduce(p.grad)
        p.grad *= math.nan

    _hook_each(model, average)


def hooks_divide_by_six(model):
    def average(p):
        dist.all_reduce(p.grad)
        p.grad /= 6

    _hook_each(model, average)


# ---- build D: answers start the all-reduce of a bucket ----


def bucket_multiplied(bucket):  # right
    bucket.flat_P.mul_(1 / dist.get_world_size())
    bucket.work = dist.all_reduce(bucket.flat_P, op=dist.ReduceOp.SUM, async_op=True)


def bucket_by_a_view(bucket):  # right: a view of the whole memory
    flat = bucket.flat_P.view(-1)
    flat /= dist.get_world_size()
    bucket.work = dist.all_reduce(flat, async_op=True)


def bucket_blocks(bucket):
    bucket.flat_P /= dist.get_world_size()
    bucket.work = dist.all_reduce(bucket.flat_P)


def bucket_waits_at_once(bucket):
    bucket.flat_P /= dist.get_world_size()
    bucket.work = dist.all_reduce(bucket.flat_P, async_op=True)
    bucket.work.wait()


def bucket_forgets_the_handle(bucket):
    bucket.flat_P /= dist.get_world_size()
    dist.all_reduce(bucket.flat_P, async_op=True)


def bucket_returns_the_handle(bucket):
    bucket.flat_P /= dist.get_world_size()
    return dist.all_reduce(bucket.flat_P, async_op=True)


def bucket_divides_afterwards(bucket):
    bucket.work = dist.all_reduce(bucket.flat_P, async_op=True)
    bucket.flat_P /= dist.get_world_size()


def bucket_sum(bucket):
    bucket.work = dist.all_reduce(bucket.flat_P, async_op=True)


def bucket_in_new_memory(bucket):
    bucket.flat_P = bucket.flat_P / dist.get_world_size()
    bucket.work = dist.all_reduce(bucket.flat_P, async_op=True)


def bucket_sends_a_copy(bucket):
    bucket.work = dist.all_reduce(bucket.flat_P / dist.get_world_size(), async_op=True)


def bucket_by_gradients(bucket):
    for p in bucket.parameters:
        p.grad /= dist.get_world_size()
        bucket.work = dist.all_reduce(p.grad, async_op=True)


def bucket_never_starts(bucket):
    bucket.flat_P /= dist.get_world_size()


def bucket_gathers(bucket):
    parts = [torch.empty_like(bucket.flat_P) for _ in range(dist.get_world_size())]
    bucket.work = dist.all_gather(parts, bucket.flat_P, async_op=True)


# ---- exercise 1: answers average after backward ----


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


def untidy_reduces_what_is_there(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.reduce(p.grad, 0)
            p.grad /= dist.get_world_size()
            dist.broadcast(p.grad, 0)


def untidy_gathers_what_is_there(model):
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, flat)


def _untidy_by_flags(dtype):
    def answer(model):  # as DDP: first who has which, then what somebody has
        trainable = [p for p in model.parameters() if p.requires_grad]
        has = torch.tensor([p.grad is not None for p in trainable]).to(dtype)
        dist.all_reduce(has)
        for p, users in zip(trainable, has.tolist(), strict=True):
            if users:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad /= dist.get_world_size()
                dist.all_reduce(p.grad)

    return answer


untidy_flags_of_few_bytes, untidy_flags = _untidy_by_flags(torch.uint8), _untidy_by_flags(torch.int64)


def untidy_steps_too(model):
    untidy_one_flat_message(model)
    for p in model.parameters():
        if p.grad is not None:
            p.data -= 0.1 * p.grad


def untidy_divides_by_zero(model):
    untidy_one_flat_message(model)
    for p in model.parameters():
        if p.requires_grad:
            p.grad *= math.nan


# ---- exercise 2: answers accumulate ----


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


def accumulate_no_sync_in_the_first_alone(ddp, micro_batches):
    for i, (x, y) in enumerate(micro_batches):
        with ddp.no_sync() if i == 0 else contextlib.nullcontext():
            _backward(ddp, x, y, len(micro_batches))


def accumulate_right(ddp, micro_batches):
    for i, (x, y) in enumerate(micro_batches):
        with ddp.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            _backward(ddp, x, y, len(micro_batches))


def accumulate_by_the_flag(ddp, micro_batches):  # right, if not pretty
    for i, (x, y) in enumerate(micro_batches):
        ddp.require_backward_grad_sync = i == len(micro_batches) - 1
        _backward(ddp, x, y, len(micro_batches))


def accumulate_and_all_reduce_again(ddp, micro_batches):
    accumulate_right(ddp, micro_batches)
    for p in ddp.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def accumulate_in_one_batch(ddp, micro_batches):
    _backward(ddp, *(torch.cat(parts) for parts in zip(*micro_batches, strict=True)), 1)


def accumulate_in_one_backward(ddp, micro_batches):
    with ddp.no_sync():
        losses = [F.mse_loss(ddp(x), y) for x, y in micro_batches[:-1]]
    x, y = micro_batches[-1]
    (sum(losses) + F.mse_loss(ddp(x), y)).div(len(micro_batches)).backward()


def accumulate_and_retain(ddp, micro_batches):
    losses = []
    for i, (x, y) in enumerate(micro_batches):
        with ddp.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            losses.append(F.mse_loss(ddp(x), y) / len(micro_batches))
            losses[-1].backward(retain_graph=True)


def _accumulate_by(divisor):
    def answer(ddp, micro_batches):
        with ddp.no_sync():
            for x, y in micro_batches[:-1]:
                _backward(ddp, x, y, divisor)
        _backward(ddp, *micro_batches[-1], divisor)

    return answer


accumulate_by_three, accumulate_by_ten = _accumulate_by(3), _accumulate_by(10)


def accumulate_and_step(ddp, micro_batches):
    accumulate_right(ddp, micro_batches)
    for p in ddp.parameters():
        p.data -= 0.1 * p.grad


def accumulate_not_finite(ddp, micro_batches):
    accumulate_right(ddp, micro_batches)
    for p in ddp.parameters():
        p.grad *= math.nan


def accumulate_last_only(ddp, micro_batches):
    _backward(ddp, *micro_batches[-1], 1)


# ---- exercise 3: answers predict bytes ----


def sends(formula):
    """An answer by `formula(payload, n_ranks, micro_batches, times)`; times: how often gradients are averaged."""

    def answer(num_params, n_ranks, bytes_per_value=4, micro_batches=1, no_sync=False):
        return formula(num_params * bytes_per_value, n_ranks, micro_batches, 1 if no_sync else micro_batches)

    return answer


def on_the_ring(of=float):
    return sends(lambda payload, n, micro_batches, times: of(2 * (n - 1) / n * payload * times))


def bytes_of_rank_0(num_params, n_ranks, bytes_per_value=4, micro_batches=1, no_sync=False):
    """What rank 0 really sends if the chunks are those of tensor_split: all but one of them, and all but another."""
    sizes = [num_params // n_ranks + (i < num_params % n_ranks) for i in range(n_ranks)]
    numbers = 2 * num_params - sizes[1 % n_ranks] - sizes[2 % n_ranks]
    return numbers * bytes_per_value * (1 if no_sync else micro_batches)


BYTES = {
    "the payload": (
        sends(lambda payload, *_: payload), "what it hands to the all-reduce; on the ring it sends 2(n-1)/n of it",
    ),
    "to everyone": (sends(lambda payload, n, *_: (n - 1) * payload), "a whole gradient for every other rank"),
    "half the ring": (sends(lambda payload, n, *_: (n - 1) / n * payload), "the reduce-scatter alone"),
    "no chunks": (sends(lambda payload, n, *_: 2 * (n - 1) * payload), "each of the 2(n-1) messages is one chunk"),
    "always once": (
        sends(lambda payload, n, *_: 2 * (n - 1) / n * payload), "without no_sync every micro-batch is averaged",
    ),
    "always many": (
        sends(lambda payload, n, micro_batches, _: micro_batches * 2 * (n - 1) / n * payload),
        "with no_sync only the last micro-batch is averaged",
    ),
    "one rank": (
        sends(lambda payload, n, _, times: times * payload * (2 * (n - 1) / n or 1)), "one rank has nobody to send to",
    ),
}  # fmt: skip

REJECTED = {
    "same_start": {
        start_without_buffers: "1.running_mean should be rank 0's: it is still this rank's own; it is a buffer",
        start_of_what_trains: "2.weight should be rank 0's: it is still this rank's own; it does not train, but the lo",
        start_in_copies: "0.weight should be rank 0's: it is still this rank's own; broadcast into the tensor itself,",
        start_as_mean: "0.weight should be rank 0's: it is the mean of what all ranks drew; take rank 0's",
        start_from_a_seed: "no broadcast was called here: only rank 0 knows what it has drawn",
        start_of_rank_0_alone: "no broadcast was called here: only rank 0 knows what it has drawn, and all ranks must",
        start_from_everyone: "call broadcast with different roots: 0, 1 and 2",
        start_by_gathering: "1,320 bytes were communicated in 9 calls of all_gather, where 440 bytes are enough: broad",
        start_in_new_parameters: "the numbers are right, but in new tensors",
    },
    "mean_gradient": {
        mean_of_the_weights: "should be the mean over the ranks: what is there is still this rank's own; send p.grad i",
        mean_sum: "3 times too large; divide by the number of ranks",
        mean_of_copies: "should be the mean over the ranks: what is there is still this rank's own; send p.grad itself",
        mean_returned: "should be the mean over the ranks: what is there is still this rank's own; send p.grad itself,",
        mean_divided_only: "nothing was sent, so no rank knows the gradients of the others",
        mean_on_rank_0: "rank 1: the gradients should be the mean over the ranks: element [0] should be 0.03214, not 0",
        mean_by_gathering: "912 bytes were communicated in 4 calls of all_gather, where 304 bytes are enough: each gra",
        mean_of_matrices: "the gradients should be the mean over the ranks: element [",
    },
    "bucket_start": {
        bucket_blocks: "your function waited for the other ranks, so backward stands still",
        bucket_waits_at_once: "leave the waiting to finish()",
        bucket_forgets_the_handle: "bucket.work should be the handle that all_reduce(..., async_op=True) returns, not",
        bucket_returns_the_handle: "finish() will call its wait()",
        bucket_divides_afterwards: "changed while its all-reduce was on its way",
        bucket_sum: "3 times too large; divide by the number of ranks",
        bucket_in_new_memory: "bucket.flat_P is another tensor now",
        bucket_sends_a_copy: "bucket.flat_P should be the mean over the ranks: what is there is still this rank's own;",
        bucket_by_gradients: "4 calls were made where 1 is enough",
        bucket_never_starts: "nothing was sent: start an all-reduce of bucket.flat_P",
        bucket_gathers: "what is there is still this rank's own; send the bucket itself, not a copy",
    },
    "gradient_hook": {
        hooks_the_parameter: "the hook is handed the parameter; send its grad",
        hooks_sum: "3 times too large; divide by the number of ranks",
        hooks_divide_twice: "3 times too small; it was divided by the number of ranks twice",
        hooks_forget_all_but_the_weights: "the gradients should be the mean over the ranks: element [",
        hooks_work_once: "nothing was sent during the second backward",
        hooks_never: "nothing was sent while backward ran",
        hooks_send_every_gradient_twice: "608 bytes were communicated in",
        hooks_step_themselves: "the weights changed during backward",
        hooks_gather_all: "912 bytes were communicated in 4 calls of all_gather, where 304 bytes are enough: each grad",
        hooks_reduce_and_broadcast: "608 bytes were communicated in",
        hooks_forget_the_gradient: "some gradients are None",
        hooks_divide_by_zero: "and is nan: is 0 divided by 0",
        hooks_divide_by_six: "the gradients should be the mean over the ranks: what came is 0.5 times that",
    },
    "untidy": {
        untidy_skips_missing: "does one have grad None where its rank did not use the parameter?",
        untidy_sends_frozen: "the frozen parameter has a gradient now",
        untidy_sends_tied_twice: "a tied matrix has one gradient; send it once",
        untidy_keeps_none: "rare.weight has no gradient here",
        untidy_sum: "3 times too large",
        untidy_divides_by_the_users: "the gradients should be the mean over the ranks: element [",
        untidy_flat_message_of_what_is_there: "ranks 0-2 call all_reduce with 400, 400 and 688 bytes: does one have gr",
        untidy_reduces_what_is_there: "does one have grad None where its rank did not use the parameter?",
        untidy_gathers_what_is_there: "ranks 0-2 call all_gather with 400, 400 and 688 bytes: does one",
        untidy_flags: "728 bytes were communicated in 5 calls of all_reduce, where 712 bytes are enough: send each gra",
        untidy_flags_of_few_bytes: "something else than gradients was sent, to leave one out",
        untidy_steps_too: "the weights have changed",
        untidy_divides_by_zero: "and is nan: is 0 divided by 0",
    },
    "accumulation": {
        accumulate_undivided: "3 times too large; each micro-batch's loss is a mean already",
        accumulate_always_averaging: "bytes were communicated in 3 calls of all_reduce, where 304 bytes are enough",
        accumulate_no_sync_around_backward_only: "their forward pass too, because that is where DDP looks",
        accumulate_flag_after_forward: "DDP decides in forward whether the next backward averages",
        accumulate_never_averaging: "nothing was averaged: the last micro-batch belongs outside no_sync",
        accumulate_last_only: "that is the last micro-batch's alone",
        accumulate_no_sync_in_the_first_alone: "608 bytes were communicated in 2 calls of all_reduce, where 304 bytes",
        accumulate_and_all_reduce_again: "where 304 bytes are enough: DDP has averaged in the last",
        accumulate_in_one_batch: "the model was given 15 rows at once, and a micro-batch has 5",
        accumulate_in_one_backward: "the activations of 3 micro-batches were in memory at once",
        accumulate_and_retain: "the activations of 3 micro-batches were in memory at once",
        accumulate_by_three: "what came is 0.6667 times that",
        accumulate_by_ten: "what came is 0.3 times that",
        accumulate_and_step: "the weights have changed",
        accumulate_not_finite: "and is nan: is 0 divided by 0",
    },
    "bytes_per_step": BYTES,
}
SOLUTIONS = {
    "same_start": "broadcast_state",
    "mean_gradient": "average_gradients",
    "bucket_start": "start_all_reduce",
    "gradient_hook": "average_by_hooks",
    "untidy": "average_untidy",
    "accumulation": "accumulate",
    "bytes_per_step": "bytes_per_step",
}
RIGHT = {
    "same_start": [start_of_state_dict, start_by_data],
    "mean_gradient": [mean_one_flat_message, mean_after_the_sum],
    "bucket_start": [bucket_multiplied, bucket_by_a_view],
    "gradient_hook": [hooks_average],
    "untidy": [untidy_one_flat_message],
    "accumulation": [accumulate_right, accumulate_by_the_flag],
    "bytes_per_step": [
        bytes_of_rank_0,
        *map(
            on_the_ring, (np.int64, np.float64, lambda sent: torch.tensor(sent, dtype=torch.float64), Fraction, round)
        ),
    ],
}


class TestAnswers(AnswersOfRanks):
    lesson, checks, worlds = "03_data_parallel", data_parallel, (1, 2, 3, 4)
    rejected, right, solutions = REJECTED, RIGHT, SOLUTIONS
