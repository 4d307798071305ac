"""Each check of lesson 03 accepts right answers and rejects mutants, several of them from published code, by name."""

from fractions import Fraction

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercises import AnswersOfRanks
from manyhands.checks import data_parallel


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def there(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def start_in_new_parameters(model):
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            fresh = p.detach().clone()
            dist.broadcast(fresh, src=0)
            setattr(module, name, torch.nn.Parameter(fresh, requires_grad=p.requires_grad))
        for b in module.buffers(recurse=False):
            dist.broadcast(b, src=0)


def one_flat_message(model, *_):  # right: fewer calls are welcome
    ps = trainable(model)
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in ps])
    dist.all_reduce(flat)
    for p, part in zip(ps, (flat / dist.get_world_size()).split([p.numel() for p in ps]), strict=True):
        p.grad = part.view_as(p).clone()


def scatters_and_gathers(model):  # right
    n = dist.get_world_size()
    for p in model.parameters():
        parts_nK = torch.cat([p.grad.flatten(), p.grad.new_zeros(-p.grad.numel() % n)]).view(n, -1)
        mine_K = torch.empty_like(parts_nK[0])
        dist.reduce_scatter_tensor(mine_K, parts_nK.flatten())
        dist.all_gather_into_tensor(parts_nK.view(-1), mine_K / n)
        p.grad = parts_nK.flatten()[: p.grad.numel()].view_as(p)


def by_flags(model):  # as DDP: first who has which, then what somebody has
    has = torch.tensor([int(p.grad is not None) for p in trainable(model)])
    dist.all_reduce(has)
    for p, users in zip(trainable(model), has.tolist(), strict=True):
        if users:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def gathers_what_is_there(model):
    dist.all_gather([torch.empty_like(there(model)) for _ in range(dist.get_world_size())], there(model))


def accumulate_by_the_flag(late):  # right, if not pretty; late, as in build-nanogpt#30: after forward has looked at it
    def answer(ddp, micro_batches):
        for i, (x, y) in enumerate(micro_batches):
            loss = F.mse_loss(ddp(x), y) if late else None
            ddp.require_backward_grad_sync = i == len(micro_batches) - 1
            ((loss if late else F.mse_loss(ddp(x), y)) / len(micro_batches)).backward()

    return answer


def bytes_of_rank_0(num_params, n_ranks, bytes_per_value=4, micro_batches=1, no_sync=False):
    """What rank 0 really sends if the chunks are those of tensor_split: all but one of them, and all but another."""
    sizes = [num_params // n_ranks + (i < num_params % n_ranks) for i in range(n_ranks)]
    numbers = 2 * num_params - sizes[1 % n_ranks] - sizes[2 % n_ranks]
    return numbers * bytes_per_value * (1 if no_sync else micro_batches)


def on_the_ring(of):
    return lambda num_params, n, bytes_per_value=4, micro_batches=1, no_sync=False: of(
        (1 if no_sync else micro_batches) * 2 * (n - 1) / n * num_params * bytes_per_value
    )


ALL, CAST = "[*model.parameters(), *model.buffers()]", "dist.broadcast(tensor.detach(), src=0)"
EACH, DIVIDE, SUM = "    for p in model.parameters():\n", "        p.grad /= world_size\n", "dist.all_reduce(p.grad)"
GATHERS = (
    DIVIDE, "", SUM, "parts = [torch.empty_like(p.grad) for _ in range(world_size)]\n"
    "        dist.all_gather(parts, p.grad)\n        p.grad.copy_(sum(parts) / world_size)",
)  # fmt: skip
DIVIDES_LATER = DIVIDE, "", SUM, f"{SUM}\n        p.grad /= world_size"
SHARE, START = "    bucket.flat_P /= world_size\n", "dist.all_reduce(bucket.flat_P, async_op=True)"
LOOP = "    while waiting and not waiting[0].missing:\n        waiting.pop(0).start()"
HOOK = "p.register_post_accumulate_grad_hook(average)"
LOSS, SILENT = "(F.mse_loss(ddp(x), y) / k).backward()", "            (F.mse_loss(ddp(x), y) / k).backward()\n    x"
LAST = f"    x, y = micro_batches[-1]\n    {LOSS}"
RING = "2 * (n_ranks - 1) / n_ranks"

REJECTED = {
    "same_start": [
        (ALL, "model.parameters()", "1.running_mean should be rank 0's: it is still this rank's own; it is a buffer"),
        (ALL, "[*(p for p in model.parameters() if p.requires_grad), *model.buffers()]",
         "2.weight should be rank 0's: it is still this rank's own; it does not train, but the lo"),
        ("tensor.detach()", "tensor.detach().clone()",
         "0.weight should be rank 0's: it is still this rank's own; broadcast into the tensor itself,"),
        ("    for tensor", "    torch.manual_seed(0)\n    for tensor", ALL, "model.parameters()",
         CAST, "torch.nn.init.normal_(tensor)", "no broadcast was called here: only rank 0 knows what it has drawn"),
        (ALL, f"({ALL} if rank == 0 else [])",
         "no broadcast was called here: only rank 0 knows what it has drawn, and all ranks must"),
        (ALL, "(model.parameters(), model.buffers())", "are no lists, but can be unpacked into one"),
        ("src=0", "src=rank", "call broadcast with different roots: 0, 1 and 2"),
        (CAST, "parts = [torch.empty_like(tensor) for _ in range(world_size)]\n"
         "        dist.all_gather(parts, tensor.detach())\n        tensor.data.copy_(parts[0])",
         "1,320 bytes were communicated in 9 calls of all_gather, where 440 bytes are enough: broad"),
        (start_in_new_parameters, "the numbers are right, but in new tensors"),
    ],
    "mean_gradient": [
        ("p.grad", "p.data",
         "should be the mean over the ranks: what is there is still this rank's own; send p.grad i"),
        (DIVIDE, "", "3 times too large; divide by the number of ranks"),
        (f"{EACH}{DIVIDE}        {SUM}", "    means = [p.grad / world_size for p in model.parameters()]\n"
         "    for mean in means:\n        dist.all_reduce(mean)\n    return means",
         "should be the mean over the ranks: what is there is still this rank's own; send p.grad itself,"),
        (SUM, "pass", "nothing was sent, so no rank knows the gradients of the others"),
        (SUM, "dist.reduce(p.grad, 0)",
         "rank 1: the gradients should be the mean over the ranks: reduce gives the sum to one rank"),
        (*GATHERS, "912 bytes were communicated in 4 calls of all_gather, where 608 bytes are enough: each gra"),
        (DIVIDE, f"        if p.ndim < 2:\n            continue\n{DIVIDE}",
         "6 of 38 numbers, the first at [24], were not averaged: send every"),
        ("model.parameters()", "list(model.parameters())[:-1]",
         "2 of 38 numbers, the first at [36], were not averaged: send every gradient"),
        (SUM, "dist.broadcast(p.grad, 0)", "that is rank 0's; broadcast copies, all-reduce adds up"),
        ("p.grad /=", "p /=", "that is the weight p: divide and send its gradient"),
        ("(p.grad)", "(p.grad, world_size)", "takes the tensor alone: it knows the number of ranks"),
        (SUM, f"p.grad = {SUM}", "some gradients are None: dist.all_reduce has no result to assign"),
    ],
    "bucket_start": [
        (", async_op=True", "", "your function waited for the other ranks: use async_op=True"),
        (START, f"{START}\n    bucket.work.wait()", "leave the waiting to finish()"),
        ("bucket.work = ", "return ", "bucket.work should be the handle of all_reduce(..., async_op=True), not None"),
        (SHARE, "", START, f"{START}\n    bucket.flat_P /= world_size", "changed while its all-reduce was on its way"),
        (SHARE, "", "3 times too large; divide by the number of ranks"),
        ("/= world_size", "/= len(bucket.parameters) - 1", "what came is 1.5 times that"),  # 4 of them, then 3
        ("/= world_size", "= bucket.flat_P / world_size", "bucket.flat_P is another tensor now"),
        (SHARE, "", "(bucket.flat_P", "(bucket.flat_P / world_size",
         "bucket.flat_P should be the mean over the ranks: what is there is still this rank's own;"),
        ("(bucket.flat_P", "(bucket.flat_P.clone()",
         "that is this rank's own, divided by 3; send the bucket itself, not a copy of it"),
        ("    bucket.work", "    for p in bucket.parameters:\n        bucket.work", "(bucket.flat_P", "(p.grad",
         "calls of all_reduce were made, where 1 call is enough: one all-reduce of the bucket"),
        (f"bucket.work = {START}", "pass", "nothing was sent: start an all-reduce of bucket.flat_P"),
    ],
    "bucket_hook": [
        (LOOP, "    if not bucket.missing:\n        waiting.remove(bucket)\n        bucket.start()",
         "before bucket 0: the n-th all-reduce of a rank meets the n-th of the others"),
        ("while", "if", "was not started: complete before, it waited for this one; call its start()"),
        (LOOP, "    while waiting and not waiting[0].missing:\n        waiting.remove(bucket)\n        bucket.start()",
         "is not in `waiting` any more: only the first in line may start, waiting.pop(0)"),
        ("waiting[0]", "waiting[-1]", "pop(0)", "pop()",
         "bucket 0 was not started: it is first, and its `missing`, a set, is empty"),
        (LOOP, "    for one in waiting:\n        if one.missing:\n            break\n        one.start()",
         "`waiting` should list what has not started yet"),
        ("not waiting[0].missing", "not any(one.missing for one in waiting)",
         "bucket 0 was not started: it is first, and its `missing`, a set, is empty"),
        ("    bucket.take(p)\n", "", "the gradient of p is not in its bucket: call bucket.take(p)"),
        ("bucket.take(p)", "[bucket.take(q) for q in bucket.parameters]",
         "took a gradient that is not complete yet"),
        (LOOP, "", "bucket 0 was not started: it is first"),
        (LOOP, "    waiting[0].start()", "was started too early: it misses"),
        (".pop(0).start()", "[0].start()", "bucket 0 was started twice: start those in `waiting`, and a hook removes"),
        (".start()", ".handle = dist.all_reduce(bucket.flat_P, async_op=True)", "was not started: it is first"),
        ("waiting.pop(0).start()", "waiting[0].start() or waiting.pop(0).work.wait()", "your hook waits for bucket"),
    ],
    "finish": [
        ("in waiting", "in buckets", "bucket 0 was started twice: start those in `waiting`"),
        ("in buckets", "in waiting", "nobody waited for bucket 0: it began in backward, and may still travel"),
        ("        bucket.work.wait()", "        pass", "nobody waited for bucket 0: it began in backward"),
        ("        bucket.start()", "        pass", "you wait for bucket 2, which has not started"),
        ("        bucket.start()", "        bucket.start()\n        bucket.work.wait()",
         "a bucket was started after a wait for another: start all first, so that they travel together"),
        ("in waiting", "in reversed(waiting)", "the buckets were started in the order [3, 2]: the n-th"),
        ("in waiting", "in waiting[:1]", "in buckets", "in buckets[:3]", "bucket 3 was not started: call start()"),
        ("work.wait()", "work.wait() or bucket.flat_P.div_(world_size)", "build C has divided already"),
    ],
    "gradient_hook": [
        (DIVIDE, "", SUM, "dist.all_reduce(p)\n        p /= world_size",  # picotron#39
         "the hook is handed the parameter; send its grad"),
        (DIVIDE, "", "3 times too large; divide by the number of ranks"),
        ("/= world_size", "/= world_size**2", "3 times too small; it was divided by the number of ranks twice"),
        (DIVIDE, f"        if p.ndim < 2:\n            return\n{DIVIDE}",
         "6 of 38 numbers, the first at [24], were not averaged"),
        (f"{EACH}        {HOOK}", f"    handles = {{p: {HOOK} for p in model.parameters()}}",
         DIVIDE, f"        handles.pop(p).remove()\n{DIVIDE}", "nothing was sent during the second backward"),
        (HOOK, "pass", "nothing was sent while backward ran"),
        (DIVIDE, "", SUM, "both = torch.stack([p.grad] * 2) / world_size\n        dist.all_reduce(both)\n"
         "        p.grad.copy_(both[0])", "608 bytes were communicated in"),
        (SUM, f"{SUM}\n        p.data -= 0.1 * p.grad\n        p.grad.zero_()",
         "a weight was changed; leave it as it is: the hook gets p, and averages p.grad"),
        (*GATHERS, "912 bytes were communicated in 4 calls of all_gather, where 304 bytes are enough: each grad"),
        (SUM, f"{SUM}\n        return p.grad", "PyTorch takes no result from a hook: change p.grad in place"),
        (SUM, f"{SUM}\n        [q.grad / 2 for q in model.parameters()]", "a gradient is None: a hook is sure of"),
    ],
    "untidy": [
        ("p.requires_grad", "p.grad is not None",  # the rank that has no gradient makes one call less
         "does one have grad None where its rank did not use the parameter?"),
        ("p.requires_grad", "True", "the frozen parameter has a gradient now"),
        ("for p in model.parameters()", "for _, p in model.named_parameters(remove_duplicate=False)",
         "a tied matrix has one gradient; send it once"),
        ("p.grad = torch.zeros_like(p)", "dist.all_reduce(torch.zeros_like(p))\n                continue",
         "rare.weight has no gradient here"),
        ("p.grad /= world_size", "pass", "3 times too large"),
        ("if p.requires_grad", "if True", "p.grad is None", "False", "a frozen or unused p has none"),
        ("in model.parameters()", "in [p for p in model.parameters() if p.requires_grad][:-1]",
         "numbers, the first at [87], were not averaged: send every gradient"),
        ("            if p.grad", "            users = torch.tensor([float(p.grad is not None)]).double()\n"
         "            dist.all_reduce(users)\n            if p.grad", "/= world_size", "/= users.clamp(min=1)",
         "the gradients should be the mean over the ranks: element ["),
        # sizes differ between ranks: gloo would abort the process
        (lambda model: dist.all_reduce(there(model)),
         "ranks 0-2 call all_reduce with 400, 400 and 688 bytes: does one have gr"),
        (gathers_what_is_there, "ranks 0-2 call all_gather with 400, 400 and 688 bytes: does one"),
        (by_flags, "728 bytes were communicated in 5 calls of all_reduce, where 712 bytes are enough: send each gra"),
        (SUM, f"{SUM}\n            p.data -= 0.1 * p.grad", "a weight was changed"),
    ],
    "accumulation": [
        (" / k", "", "3 times too large; each micro-batch's loss is a mean already"),
        ("with ddp.no_sync():", "if True:",
         "bytes were communicated in 3 calls of all_reduce, where 304 bytes are enough"),
        ("with ddp.no_sync():", "if True:", SILENT, "            loss = F.mse_loss(ddp(x), y) / k\n"
         "            with ddp.no_sync():\n                loss.backward()\n    x",
         "their forward pass too, where DDP looks"),
        (accumulate_by_the_flag(late=True), "DDP decides in forward whether the next backward averages"),
        (LAST, "", "[:-1]", "", "nothing was averaged: the last micro-batch belongs outside no_sync"),
        ("    k =", "    micro_batches = micro_batches[-1:]\n    k =", "that is the last micro-batch's alone"),
        (LAST, f"{LAST}\n    ddp.require_backward_grad_sync = False",
         "DDP is left without averaging: turn require_backward_grad_sync on again"),
        ("[:-1]", "[:1]", LAST, f"    for x, y in micro_batches[1:]:\n        {LOSS}",
         "608 bytes were communicated in 2 calls of all_reduce, where 304 bytes"),
        (LAST, f"{LAST}\n    for p in ddp.parameters():\n        dist.all_reduce(p.grad)\n"
         "        p.grad /= world_size", "all but the last micro-batch belong inside no_sync"),
        ("    k =", "    micro_batches = [tuple(map(torch.cat, zip(*micro_batches)))]\n    k =",
         "the model was given 15 rows at once, and a micro-batch has 5"),
        ("    k =", "    losses = []\n    k =", SILENT, "            losses.append(F.mse_loss(ddp(x), y) / k)\n    x",
         f"    {LOSS}", "    (sum(losses) + F.mse_loss(ddp(x), y) / k).backward()",
         "the activations of 3 micro-batches were in memory at once"),
        ("    k =", "    losses = []\n    k =", LOSS,
         "losses.append(F.mse_loss(ddp(x), y) / k) or losses[-1].backward(retain_graph=True)",
         "the activations of 3 micro-batches were in memory at once"),
        (LAST, f"{LAST}\n    for p in ddp.parameters():\n        p.data -= 0.1 * p.grad", "a weight was changed"),
    ],
    "bytes_per_step": [
        (f"times * {RING} * ", "", "what it hands to the all-reduce; on the ring it sends 2(n-1)/n of it"),
        (f"times * {RING}", "(n_ranks - 1)", "a whole gradient for every other rank"),
        ("times * 2 * ", "", "the reduce-scatter alone"),
        (f"times * {RING}", "2 * (n_ranks - 1)", "each of the 2(n-1) messages is one chunk"),
        ("times * ", "", "without no_sync every micro-batch is averaged"),
        ("times * ", "micro_batches * ", "with no_sync only the last micro-batch is averaged"),
        (RING, f"({RING} or 1)", "a single rank sends nothing"),
    ],
}  # fmt: skip
SOLUTIONS = {
    "same_start": "broadcast_state", "mean_gradient": "average_gradients", "bucket_start": "start_all_reduce",
    "finish": "finish", "gradient_hook": "average_by_hooks", "untidy": "average_untidy", "accumulation": "accumulate",
}  # fmt: skip
RIGHT = {
    "same_start": [(ALL, "model.state_dict().values()"), ("tensor.detach()", "tensor.data")],
    "mean_gradient": [one_flat_message, DIVIDES_LATER, scatters_and_gathers],
    "bucket_start": [
        ("/= world_size", "*= 1 / world_size", ", async_op", ", op=dist.ReduceOp.SUM, async_op"),
        ("(bucket.flat_P", "(bucket.flat_P.view(-1)"),
    ],
    "bucket_hook": [
        (LOOP, "    ready = next((i for i, one in enumerate(waiting) if one.missing), len(waiting))\n"
         "    for one in waiting[:ready]:\n        one.start()\n    del waiting[:ready]"),
    ],
    "finish": [
        ("    for bucket in waiting:\n", "    while waiting:\n        bucket = waiting.pop(0)\n"),
    ],
    "gradient_hook": [DIVIDES_LATER],
    "untidy": [one_flat_message],
    "accumulation": [accumulate_by_the_flag(late=False)],
    "bytes_per_step": [
        bytes_of_rank_0,
        *map(
            on_the_ring, (np.int64, np.float64, lambda sent: torch.tensor(sent, dtype=torch.float64), Fraction, round)
        ),
    ],
}  # fmt: skip


class TestAnswers(AnswersOfRanks):
    lesson, checks, worlds = "03_data_parallel", data_parallel, (1, 4)
    rejected, right, solutions = REJECTED, RIGHT, SOLUTIONS
