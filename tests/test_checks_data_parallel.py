"""Each check of lesson 03 accepts right answers and rejects mutants, several of them from published code, by name."""

import contextlib
from fractions import Fraction

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercises import AnswersOfRanks
from manyhands.checks import data_parallel


def summed(x):
    dist.all_reduce(x)
    return x


def averaged(x):
    return summed(x).div_(dist.get_world_size())


def gathered(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return parts


def from_rank_0(tensor):
    dist.broadcast(tensor.detach(), src=0)


def state(model):
    return model.state_dict().values()


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def there(model):
    return [p for p in model.parameters() if p.grad is not None]


def each(act, of=torch.nn.Module.parameters):
    """An answer that does `act` with each parameter of the model, or with each tensor that `of` lists."""

    def answer(model, *_):
        for tensor in of(model):
            act(tensor)

    return answer


def then(*answers):
    """An answer that does what these do, one after the other."""

    def answer(*given):
        for one in answers:
            one(*given)

    return answer


# ---- what one does with a parameter, after backward and in a hook ----


def averages(p):
    averaged(p.grad)


def averages_matrices(p):
    if p.ndim > 1:
        averaged(p.grad)


def gathers(p):
    p.grad.copy_(sum(gathered(p.grad)) / dist.get_world_size())


def reduces_and_broadcasts(p):
    dist.reduce(p.grad, 0)
    p.grad /= dist.get_world_size()
    dist.broadcast(p.grad, 0)


def steps(p):
    p.data -= 0.1 * p.grad


def filled(p):
    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    return p.grad


# ---- build B: answers hand out rank 0's state ----


def start_in_new_parameters(model):
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            fresh = p.detach().clone()
            dist.broadcast(fresh, src=0)
            setattr(module, name, torch.nn.Parameter(fresh, requires_grad=p.requires_grad))
        for b in module.buffers(recurse=False):
            dist.broadcast(b, src=0)


# ---- build A and exercise 1: answers average after backward ----


def one_flat_message(model, *_):  # right: fewer calls are welcome
    flat = averaged(torch.cat([filled(p).flatten() for p in trainable(model)]))
    for p, part in zip(trainable(model), flat.split([p.numel() for p in trainable(model)]), strict=True):
        p.grad = part.view_as(p).clone()


def divides_by_the_users(p):  # mean over the ranks that used it, not over all
    users = torch.tensor([0.0 if p.grad is None else 1.0], dtype=torch.float64)
    summed(filled(p)).div_(summed(users).clamp(min=1))


def by_flags(dtype):
    def answer(model):  # as DDP: first who has which, then what somebody has
        has = summed(torch.tensor([p.grad is not None for p in trainable(model)]).to(dtype))
        for p, users in zip(trainable(model), has.tolist(), strict=True):
            if users:
                averaged(filled(p))

    return answer


# ---- build E: answers attach hooks to a model ----


def hooked(act):
    def hook(p):
        act(p)

    return each(lambda p: p.register_post_accumulate_grad_hook(hook))


def hooks_work_once(model):
    def average(p):
        handles.pop(p).remove()
        averaged(p.grad)

    handles = {p: p.register_post_accumulate_grad_hook(average) for p in model.parameters()}


# ---- build C: answers start the all-reduce of a bucket ----


def send_without_waiting(flat):
    return dist.all_reduce(flat, async_op=True)


def started(send=send_without_waiting, divides=True, keeps=True, after=lambda bucket: None):
    """The right answer, with another way to send, without the division or the handle, or with something after it."""

    def answer(bucket):
        if divides:
            bucket.flat_P /= dist.get_world_size()
        work = send(bucket.flat_P)
        if keeps:
            bucket.work = work
        after(bucket)

    return answer


def bucket_multiplied(bucket):  # right
    bucket.flat_P.mul_(1 / dist.get_world_size())
    bucket.work = dist.all_reduce(bucket.flat_P, op=dist.ReduceOp.SUM, async_op=True)


def bucket_in_new_memory(bucket):
    bucket.flat_P = bucket.flat_P / dist.get_world_size()
    bucket.work = dist.all_reduce(bucket.flat_P, async_op=True)


def bucket_by_gradients(bucket):
    bucket.flat_P /= dist.get_world_size()
    for p in bucket.parameters:
        bucket.work = dist.all_reduce(p.grad, async_op=True)


# ---- build D: answers are the hook of a bucket ----


def hook_without_order(waiting, bucket, p):
    bucket.take(p)
    if not bucket.missing:
        waiting.remove(bucket)
        bucket.start()


def hook_one_at_a_time(waiting, bucket, p):
    bucket.take(p)
    if waiting and not waiting[0].missing:
        waiting.pop(0).start()


def hook_from_the_back(waiting, bucket, p):
    bucket.take(p)
    while waiting and not waiting[-1].missing:
        waiting.pop().start()


def hook_keeps_the_list(waiting, bucket, p):
    bucket.take(p)
    for one in waiting:
        if one.missing:
            break
        one.start()


def hook_at_the_end(waiting, bucket, p):
    bucket.take(p)
    while waiting and not any(one.missing for one in waiting):
        waiting.pop(0).start()


def hook_by_index(waiting, bucket, p):  # right, if not pretty
    bucket.take(p)
    ready = next((i for i, one in enumerate(waiting) if one.missing), len(waiting))
    for one in waiting[:ready]:
        one.start()
    del waiting[:ready]


# ---- exercise 2: answers accumulate ----


def accumulated(share=len, silent=lambda i, k: i < k - 1):
    """The right answer, with another divisor, or with no_sync around other micro-batches i of k."""

    def answer(ddp, micro_batches):
        for i, (x, y) in enumerate(micro_batches):
            with ddp.no_sync() if silent(i, len(micro_batches)) else contextlib.nullcontext():
                (F.mse_loss(ddp(x), y) / share(micro_batches)).backward()

    return answer


def accumulate_no_sync_around_backward_only(ddp, micro_batches):
    for i, (x, y) in enumerate(micro_batches):
        loss = F.mse_loss(ddp(x), y) / len(micro_batches)
        with ddp.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            loss.backward()


def accumulate_by_the_flag(late):  # right, if not pretty; late, as in build-nanogpt#30: after forward has looked at it
    def answer(ddp, micro_batches):
        for i, (x, y) in enumerate(micro_batches):
            loss = F.mse_loss(ddp(x), y) if late else None
            ddp.require_backward_grad_sync = i == len(micro_batches) - 1
            ((loss if late else F.mse_loss(ddp(x), y)) / len(micro_batches)).backward()

    return answer


def accumulate_in_one_batch(ddp, micro_batches):
    x, y = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    F.mse_loss(ddp(x), y).backward()


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
        sends(lambda payload, n, _, times: times * payload * (2 * (n - 1) / n or 1)), "a single rank sends nothing",
    ),
}  # fmt: skip

REJECTED = {
    "same_start": {
        "without buffers": (each(from_rank_0),
            "1.running_mean should be rank 0's: it is still this rank's own; it is a buffer"),
        "what trains": (each(from_rank_0, lambda model: [*trainable(model), *model.buffers()]),
            "2.weight should be rank 0's: it is still this rank's own; it does not train, but the lo"),
        "in copies": (each(lambda tensor: from_rank_0(tensor.clone()), state),
            "0.weight should be rank 0's: it is still this rank's own; broadcast into the tensor itself,"),
        "from a seed": (then(lambda model: torch.manual_seed(0), each(torch.nn.init.normal_)),
            "no broadcast was called here: only rank 0 knows what it has drawn"),
        "rank 0 alone": (lambda model: each(from_rank_0, state)(model) if dist.get_rank() == 0 else None,
            "no broadcast was called here: only rank 0 knows what it has drawn, and all ranks must"),
        "from everyone": (each(lambda tensor: dist.broadcast(tensor, src=dist.get_rank()), state),
            "call broadcast with different roots: 0, 1 and 2"),
        "by gathering": (each(lambda tensor: tensor.copy_(gathered(tensor)[0]), state),
            "1,320 bytes were communicated in 9 calls of all_gather, where 440 bytes are enough: broad"),
        start_in_new_parameters: "the numbers are right, but in new tensors",
    },
    "mean_gradient": {
        "the weights": (each(lambda p: averaged(p.data)),
            "should be the mean over the ranks: what is there is still this rank's own; send p.grad i"),
        "sum": (each(lambda p: summed(p.grad)), "3 times too large; divide by the number of ranks"),
        "copies": (each(lambda p: averaged(p.grad.clone())),
            "should be the mean over the ranks: what is there is still this rank's own; send p.grad itself"),
        "returned": (lambda model: [averaged(p.grad.clone()) for p in model.parameters()],
            "should be the mean over the ranks: what is there is still this rank's own; send p.grad itself,"),
        "divided only": (each(lambda p: p.grad.div_(dist.get_world_size())),
            "nothing was sent, so no rank knows the gradients of the others"),
        "on rank 0": (each(lambda p: dist.reduce(p.grad.div_(dist.get_world_size()), 0)),
            "rank 1: the gradients should be the mean over the ranks: element [0] should be 0.03214, not 0"),
        "by gathering": (each(gathers),
            "912 bytes were communicated in 4 calls of all_gather, where 608 bytes are enough: each gra"),
        "matrices": (each(averages_matrices), "6 of 38 numbers, the first at [24], were not averaged: send every"),
        "all but the last": (each(averages, lambda model: list(model.parameters())[:-1]),
            "2 of 38 numbers, the first at [36], were not averaged: send every gradient"),
        "rank 0's": (each(lambda p: dist.broadcast(p.grad, 0)),
            "that is rank 0's on all ranks; broadcast copies, all-reduce adds up"),
    },
    "bucket_start": {
        "blocks": (started(lambda flat: dist.all_reduce(flat)),
            "your function waited for the other ranks: use async_op=True"),
        "waits at once": (started(after=lambda bucket: bucket.work.wait()), "leave the waiting to finish()"),
        "returns the handle": (lambda bucket: send_without_waiting(bucket.flat_P.div_(dist.get_world_size())),
            "bucket.work should be the handle of all_reduce(..., async_op=True), not None"),
        "divides afterwards": (
            started(divides=False, after=lambda bucket: bucket.flat_P.div_(dist.get_world_size())),
            "changed while its all-reduce was on its way"),
        "sum": (started(divides=False), "3 times too large; divide by the number of ranks"),
        bucket_in_new_memory: "bucket.flat_P is another tensor now",
        "sends a copy": (started(lambda flat: send_without_waiting(flat / dist.get_world_size()), divides=False),
            "bucket.flat_P should be the mean over the ranks: what is there is still this rank's own;"),
        "divides, and sends a copy": (started(lambda flat: send_without_waiting(flat.clone())),
            "that is this rank's own, divided by 3; send the bucket itself, not a copy of it"),
        bucket_by_gradients: "calls of all_reduce were made, where 1 call is enough: one all-reduce of the bucket",
        "never starts": (started(lambda flat: None, keeps=False),
            "nothing was sent: start an all-reduce of bucket.flat_P"),
    },
    "bucket_hook": {
        hook_without_order: "before bucket 0: the n-th all-reduce of a rank meets the n-th of the others",
        hook_one_at_a_time: "was not started: it was complete before, and waited for this one",
        hook_from_the_back: "bucket 0 was not started: nothing is missing, and it is first",
        hook_keeps_the_list: "`waiting` should list what has not started yet",
        hook_at_the_end: "bucket 0 was not started: nothing is missing, and it is first",
        "never takes": (lambda waiting, bucket, p: len(waiting),
            "p's gradient is not in its bucket: call bucket.take(p) first"),
        "takes all": (lambda waiting, bucket, p: each(bucket.take, lambda b: b.parameters)(bucket),
            "took a gradient that is not complete yet"),
        "never starts": (lambda waiting, bucket, p: bucket.take(p), "bucket 0 was not started: nothing is missing"),
        "starts at once": (lambda waiting, bucket, p: (bucket.take(p), waiting[0].start()),
            "was started too early: it misses"),
    },
    "gradient_hook": {
        "the parameter": (hooked(averaged), "the hook is handed the parameter; send its grad"),  # picotron#39
        "sum": (hooked(lambda p: summed(p.grad)), "3 times too large; divide by the number of ranks"),
        "divide twice": (hooked(lambda p: averaged(p.grad).div_(dist.get_world_size())),
            "3 times too small; it was divided by the number of ranks twice"),
        "matrices": (hooked(averages_matrices), "6 of 38 numbers, the first at [24], were not averaged"),
        hooks_work_once: "nothing was sent during the second backward",
        "never": (lambda model: model.train(), "nothing was sent while backward ran"),
        "every gradient twice": (hooked(lambda p: p.grad.copy_(averaged(torch.stack([p.grad] * 2))[0])),
            "608 bytes were communicated in"),
        "step themselves": (hooked(lambda p: (summed(p.grad), steps(p), p.grad.zero_())),
            "a weight was changed; leave it as it is: the hook gets p, and averages p.grad"),
        "gather all": (hooked(gathers),
            "912 bytes were communicated in 4 calls of all_gather, where 304 bytes are enough: each grad"),
        "forget the gradient": (hooked(lambda p: (averages(p), setattr(p, "grad", None))),
            "some gradients are None"),
    },
    "untidy": {
        "skips missing": (each(averages, there),  # the rank that has no gradient makes one call less
            "does one have grad None where its rank did not use the parameter?"),
        "sends frozen": (each(lambda p: averaged(filled(p))), "the frozen parameter has a gradient now"),
        "sends tied twice": (each(lambda p: averaged(filled(p)),
            lambda model: [p for _, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]),
            "a tied matrix has one gradient; send it once"),
        "keeps None": (each(lambda p: averaged(torch.zeros_like(p) if p.grad is None else p.grad), trainable),
            "rare.weight has no gradient here"),
        "sum": (each(lambda p: summed(filled(p)), trainable), "3 times too large"),
        "all but the last": (each(lambda p: averaged(filled(p)), lambda model: trainable(model)[:-1]),
            "numbers, the first at [87], were not averaged: send every gradient"),
        "by the users": (each(divides_by_the_users, trainable),
            "the gradients should be the mean over the ranks: element ["),
        # sizes differ between ranks: gloo would abort the process
        "a flat message": (lambda model: summed(torch.cat([p.grad.flatten() for p in there(model)])),
            "ranks 0-2 call all_reduce with 400, 400 and 688 bytes: does one have gr"),
        "gathers what is there": (lambda model: gathered(torch.cat([p.grad.flatten() for p in there(model)])),
            "ranks 0-2 call all_gather with 400, 400 and 688 bytes: does one"),
        "flags": (by_flags(torch.int64),
            "728 bytes were communicated in 5 calls of all_reduce, where 712 bytes are enough: send each gra"),
        "steps too": (then(one_flat_message, each(steps, there)), "a weight was changed"),
    },
    "accumulation": {
        "undivided": (accumulated(lambda _: 1), "3 times too large; each micro-batch's loss is a mean already"),
        "always averaging": (accumulated(silent=lambda i, k: False),
            "bytes were communicated in 3 calls of all_reduce, where 304 bytes are enough"),
        accumulate_no_sync_around_backward_only: "their forward pass too, where DDP looks",
        "flag after forward": (accumulate_by_the_flag(late=True),
            "DDP decides in forward whether the next backward averages"),
        "never averaging": (accumulated(silent=lambda i, k: True),
            "nothing was averaged: the last micro-batch belongs outside no_sync"),
        "last only": (lambda ddp, micro_batches: accumulated()(ddp, micro_batches[-1:]),
            "that is the last micro-batch's alone"),
        "averaging left off": (
            then(accumulate_by_the_flag(late=False), lambda ddp, _: setattr(ddp, "require_backward_grad_sync", False)),
            "DDP is left without averaging: turn require_backward_grad_sync on again"),
        "no_sync in the first alone": (accumulated(silent=lambda i, k: i == 0),
            "608 bytes were communicated in 2 calls of all_reduce, where 304 bytes"),
        "all-reduce again": (then(accumulated(), each(averages)),
            "all but the last micro-batch belong inside no_sync"),
        accumulate_in_one_batch: "the model was given 15 rows at once, and a micro-batch has 5",
        accumulate_in_one_backward: "the activations of 3 micro-batches were in memory at once",
        accumulate_and_retain: "the activations of 3 micro-batches were in memory at once",
        "a step": (then(accumulated(), each(steps)), "a weight was changed"),
    },
    "bytes_per_step": BYTES,
}  # fmt: skip
SOLUTIONS = {
    "same_start": "broadcast_state",
    "mean_gradient": "average_gradients",
    "bucket_start": "start_all_reduce",
    "bucket_hook": "bucket_hook",
    "gradient_hook": "average_by_hooks",
    "untidy": "average_untidy",
    "accumulation": "accumulate",
    "bytes_per_step": "bytes_per_step",
}


def scatters_and_gathers(p):
    n = dist.get_world_size()
    parts_nK = torch.cat([p.grad.flatten(), p.grad.new_zeros(-p.grad.numel() % n)]).view(n, -1)
    mine_K = torch.empty_like(parts_nK[0])
    dist.reduce_scatter_tensor(mine_K, parts_nK.flatten())
    dist.all_gather_into_tensor(parts_nK.view(-1), mine_K / n)
    p.grad = parts_nK.flatten()[: p.grad.numel()].view_as(p)


RIGHT = {
    "same_start": [
        each(from_rank_0, state),
        then(each(lambda p: dist.broadcast(p.data, src=0)), each(from_rank_0, torch.nn.Module.buffers)),
    ],
    "mean_gradient": [one_flat_message, each(averages), each(scatters_and_gathers)],
    "bucket_start": [bucket_multiplied, started(lambda flat: send_without_waiting(flat.view(-1)))],
    "bucket_hook": [hook_by_index],
    "gradient_hook": [hooked(averages)],
    "untidy": [one_flat_message],
    "accumulation": [accumulated(), accumulate_by_the_flag(late=False)],
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
