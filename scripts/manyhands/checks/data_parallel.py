"""Checks of lesson 03: identical starts, and gradients averaged exactly once over all ranks.

Every check computes the right gradients without communicating: rank r's data is drawn from a seed that contains r, so
each rank can compute all ranks' gradients. Models are tiny, in float64, on the CPU, where the trial group can send.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyhands.checks import Wrong, exercise, naming
from manyhands.checks.drawn import Watched, flat, gradients, luck, normal, seeded, sizes
from manyhands.checks.expect import count, expect_number, expect_tensor, expect_traffic, expect_unchanged, number
from manyhands.checks.trial import waits
from manyhands.checks.witness import shown
from manyhands.measure import wire

ONE_ALL_REDUCE = "each gradient needs one all-reduce"
NONE = "dist.all_reduce has no result to assign, it changes its tensor"
SLIPS = {  # in an error: the slip behind it
    "'generator'": "parameters() and buffers() are no lists, but can be unpacked into one: loop over that",
    "a leaf Variable": "that is the weight p: divide and send its gradient, p.grad",
    "incompatible function arguments": "dist.all_reduce takes the tensor alone: it knows the number of ranks",
    "should return None": "PyTorch takes no result from a hook: change p.grad in place",
    "'NoneType' and 'int'": "a gradient is None: a hook is sure of its own p, and a frozen or unused p has none",
}


@exercise("B", "the same start")
def same_start(answer, ranks):
    """`answer(model)` gives every rank the parameters and buffers of rank 0, in the tensors that the model has."""
    model = _with_state(ranks.rank)
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kept = list(model.state_dict(keep_vars=True).values())
    with wire.watch() as seen, naming(SLIPS):
        answer(model)
    if not seen.calls:
        raise Wrong("no broadcast was called here: only rank 0 knows what it has drawn, and all ranks must call")
    buffers, trained = dict(model.named_buffers()), {name for name, p in model.named_parameters() if p.requires_grad}
    for name, tensor in model.state_dict().items():
        why = "it does not train, but the loss depends on it"
        if name in buffers:
            why = "it is a buffer, and a step reads those, too"
        elif name in trained:
            why = "broadcast into the tensor itself, not into a copy"
        slips = {f"it is still this rank's own; {why}": own[name]}
        expect_tensor(tensor, _with_state(0).state_dict()[name], name, slips, "rank 0's")
    if any(a is not b for a, b in zip(model.state_dict(keep_vars=True).values(), kept, strict=True)):
        raise Wrong("the numbers are right, but in new tensors, unseen by the optimizer: write into the model's own")
    enough = sum(tensor.nbytes for tensor in kept)
    expect_traffic(seen, "the start is the same", "broadcast each tensor once", payload=enough)


@exercise("A", "average the gradients")
def mean_gradient(answer, ranks):
    """`answer(model)`, after backward, leaves in each grad the mean over the ranks."""
    model = _after_backward(_mlp(), ranks.rank)
    weights, own = flat(model.parameters()), gradients(model)
    with wire.watch() as seen, naming(SLIPS):
        answer(model)
    expect_unchanged(flat(model.parameters()), weights, "a weight")
    if not seen.calls and ranks.world_size > 1:
        raise Wrong("nothing was sent, so no rank knows the gradients of the others: all-reduce each p.grad")
    of_all = [_gradients(rank, 0) for rank in range(ranks.world_size)]
    _expect_mean(gradients(model, NONE), of_all, seen, own, "send p.grad itself, not p and not a copy")
    padding = 8 * (ranks.world_size - 1) * len(list(model.parameters()))  # padding: a reduce-scatter needs equal parts
    enough = 2 * (weights.nbytes + (padding if seen.count("reduce_scatter") else 0))
    expect_traffic(seen, "the gradients are right", ONE_ALL_REDUCE, volume=enough)


@exercise("F", "gradient hook")
def gradient_hook(answer, ranks):
    """`answer(model)` attaches hooks; after backward each gradient must be the mean over the ranks."""
    model = _mlp()
    weights = flat(model.parameters())
    answer(model)
    for step in range(2):  # hooks are permanent: the second backward must be averaged as well
        model.zero_grad()
        with wire.watch() as seen, naming(SLIPS):
            _loss(model, ranks.rank, step).backward()
        expect_unchanged(flat(model.parameters()), weights, "a weight", ": the hook gets p, and averages p.grad")
        if not seen.calls:
            when = "during the second backward: the hook must stay" if step else "while backward ran"
            raise Wrong(f"nothing was sent {when}; register a hook on every parameter")
        of_all = [_gradients(rank, step) for rank in range(ranks.world_size)]
        hint = "the hook is handed the parameter; send its grad"
        _expect_mean(gradients(model, NONE), of_all, seen, of_all[ranks.rank], hint)
        expect_traffic(seen, "the gradients are right", ONE_ALL_REDUCE, payload=weights.nbytes)


@exercise("C", "start a bucket", in_flight=True)
def bucket_start(answer, ranks):
    """`answer(bucket)` begins one all-reduce of `bucket.flat_P`, divided before; its handle is `bucket.work`."""
    for step in range(2):
        bucket = _bucket(ranks.rank, step)
        flat_P = bucket.flat_P
        with wire.watch() as seen, waits(seen.calls) as waited, _OnItsWay(flat_P) as sent:
            answer(bucket)
        if not seen.calls:
            raise Wrong("nothing was sent: start an all-reduce of bucket.flat_P")
        if bucket.flat_P is not flat_P:
            raise Wrong("bucket.flat_P is another tensor now, and p.grad a view of the old one: divide in place (/=)")
        if waited:
            raise Wrong("your function waited for the other ranks: use async_op=True, leave the waiting to finish()")
        if sent.changed:
            raise Wrong("the bucket was changed while its all-reduce was on its way: divide before you start it")
        if not callable(getattr(bucket.work, "wait", None)):
            raise Wrong(f"bucket.work should be the handle of all_reduce(..., async_op=True), not {shown(bucket.work)}")
        bucket.work.wait()
        of_all = [_gradients(rank, step)[: len(flat_P)] for rank in range(ranks.world_size)]
        hint = "send the bucket itself, not a copy of it"
        _expect_mean(flat_P, of_all, seen, of_all[ranks.rank], hint, "bucket.flat_P")
        expect_traffic(seen, "the gradients are right", "one all-reduce of the bucket", calls=1, payload=flat_P.nbytes)


ORDER = (
    "the n-th all-reduce of a rank meets the n-th of the others, so all start their buckets in the order of `waiting`"
)


@exercise("D", "the hook of a bucket", if_calls_differ=ORDER, in_flight=True)
def bucket_hook(answer, ranks):
    """`answer(waiting, bucket, p)` takes p's gradient into its bucket and starts complete buckets in the given order.

    Backward finishes the gradients in a different order on every rank, as it may if the layers form no chain.
    """
    n = ranks.world_size
    for step in range(2):
        buckets = [Bucket(number, 1 + number % 2, ranks) for number in range(4)]
        waiting, taken = _Line(buckets), []
        arriving = [(bucket, p) for bucket in buckets for p in bucket.parameters]
        luck(100 * step + ranks.rank).shuffle(arriving)
        with wire.watch() as seen:
            for bucket, p in arriving:
                answer(waiting, bucket, p)
                taken.append(p)
                if set(bucket.taken) - set(taken):
                    raise Wrong(f"bucket {bucket.number} took a gradient that is not complete yet: take p, and only p")
                if p not in bucket.taken:
                    raise Wrong("the gradient of p is not in its bucket: call bucket.take(p), whatever else is missing")
                _expect_started(buckets, waiting)
        of_all = [[Bucket.value(number, rank) for rank in range(n)] for number in range(len(buckets))]
        for bucket, values in zip(buckets, of_all, strict=True):
            bucket.work.wait()
            expect_number(bucket.flat_P.item(), sum(values), f"bucket {bucket.number} after its all-reduce", "")
        expect_traffic(seen, "the buckets are right", "start each bucket once", calls=len(buckets))


@exercise("E", "finish")
def finish(answer, ranks):
    """`answer(buckets, waiting)` starts the buckets in `waiting`, in their order, then waits for all buckets."""
    for started in (2, 0, 4):
        buckets, told = [Bucket(number, 1, ranks) for number in range(4)], []
        for bucket in buckets[:started]:
            bucket.start()
        for bucket in buckets:
            bucket.told = told
        with wire.watch() as seen:
            answer(list(buckets), buckets[started:])
        begun, waited = ([number for what, number in told if what == which] for which in ("start", "wait"))
        if late := [bucket.number for bucket in buckets if not bucket.starts]:
            raise Wrong(f"bucket {late[0]} was not started: call start() of each bucket in `waiting`")
        if left := sorted({0, 1, 2, 3} - set(waited)):
            why = "it began in backward, and may still travel" if left[0] < started else "you have started it"
            raise Wrong(f"nobody waited for bucket {left[0]}: {why}; wait for each of `buckets`")
        if "start" in [what for what, _ in told[len(begun) :]]:
            raise Wrong("a bucket was started after a wait for another: start all first, so that they travel together")
        if begun != sorted(begun):
            raise Wrong(f"the buckets were started in the order {begun}: {ORDER}")
        of_all = [[Bucket.value(number, rank) for rank in range(ranks.world_size)] for number in range(4)]
        for bucket, values in zip(buckets, of_all, strict=True):
            what, share = f"bucket {bucket.number} after its all-reduce", sum(values) / ranks.world_size
            expect_number(bucket.flat_P.item(), sum(values), what, "", {"build C has divided already": share})
        expect_traffic(seen, "the buckets are right", "start each bucket of `waiting` once", calls=4 - started)


def _expect_started(buckets, waiting):
    """Raise Wrong unless the buckets that have started are exactly those that are complete and next in order."""
    begun = [bucket for bucket in buckets if bucket.starts]
    for bucket in begun:
        if ("wait", bucket.number) in bucket.told:
            raise Wrong(f"your hook waits for bucket {bucket.number}, and backward with it: leave that to finish()")
        if bucket.missing:
            misses = count(len(bucket.missing), "gradient")
            raise Wrong(f"bucket {bucket.number} was started too early: it misses {misses}")
    due = next((i for i, bucket in enumerate(buckets) if bucket.missing), len(buckets))
    if begun != buckets[: len(begun)]:
        late = next(bucket for bucket in buckets if not bucket.starts)
        raise Wrong(f"bucket {begun[-1].number} was started before bucket {late.number}: {ORDER}")
    if len(begun) < due:
        why = "complete before, it waited for this one" if begun else "it is first, and its `missing`, a set, is empty"
        raise Wrong(f"bucket {len(begun)} was not started: {why}; call its start(), until waiting[0] misses a gradient")
    if waiting != buckets[len(begun) :]:
        raise Wrong("`waiting` should list what has not started yet, in order: remove a bucket from its front, pop(0)")


class _Line(list):
    """Buckets that wait for their turn. Removing one that does not wait is a slip with a sentence, no ValueError."""

    def remove(self, bucket):
        if bucket not in self:
            raise Wrong(f"{bucket} is not in `waiting` any more: only the first in line may start, waiting.pop(0)")
        super().remove(bucket)


class Bucket:
    """A bucket that counts how often it was started and which parameters it took, and tells in `told` what it did."""

    def __init__(self, number, size, ranks):
        self.number, self.ranks, self.starts, self.taken, self.told = number, ranks, 0, [], []
        self.handle, self.work = None, SimpleNamespace(wait=self._wait)
        self.parameters = [nn.Parameter(torch.full((1,), float(i))) for i in range(size)]
        self.missing = set(self.parameters)
        self.flat_P = torch.tensor([self.value(number, ranks.rank)], dtype=torch.float64)

    def __repr__(self):
        return f"bucket {self.number}"

    @staticmethod
    def value(number, rank):
        return float(10 * rank + number)

    def take(self, p):
        self.taken.append(p)
        self.missing.discard(p)

    def start(self):
        if self.starts:
            raise Wrong(f"bucket {self.number} was started twice: start those in `waiting`, and a hook removes them")
        self.starts += 1
        self.told.append(("start", self.number))
        self.handle = dist.all_reduce(self.flat_P, async_op=True)

    def _wait(self):
        if self.handle is None:
            raise Wrong(f"you wait for bucket {self.number}, which has not started: start those in `waiting` first")
        self.told.append(("wait", self.number))
        self.handle.wait()


class _OnItsWay(TorchDispatchMode):
    """Record in `changed` whether memory is written to after a collective on it has begun."""

    def __init__(self, tensor):
        super().__init__()
        self._memory, self._begun, self.changed = tensor.untyped_storage().data_ptr(), False, False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.untyped_storage().data_ptr() == self._memory for tensor in tensors):
            writes = any(a.alias_info and a.alias_info.is_write for a in operator._schema.arguments)
            self.changed |= self._begun and writes
            self._begun |= operator.namespace in ("c10d", "_c10d_functional")
        return operator(*args, **(kwargs or {}))


NO_GRADIENT_HERE = "does one have grad None where its rank did not use the parameter? The others need its zeros"


@exercise(1, "tied, frozen and unused parameters", if_calls_differ=NO_GRADIENT_HERE)
def untidy(answer, ranks):
    """`answer(model)`, after backward, averages each trainable parameter once, even if this rank has no gradient."""
    last = ranks.world_size - 1  # the only rank whose loss uses the rare parameter
    models = [_after_backward(_Untidy(), r, rare=r == last) for r in range(ranks.world_size)]
    of_all = [flat(_grad_or_zeros(p) for p in m.parameters() if p.requires_grad) for m in models]
    model = models[ranks.rank]
    weights = flat(model.parameters())
    before = [_grad_or_zeros(p) for p in model.parameters() if p.requires_grad]
    with wire.watch() as seen, naming(SLIPS):
        answer(model)
    expect_unchanged(flat(model.parameters()), weights, "a weight")
    if model.frozen.grad is not None:
        raise Wrong("the frozen parameter has a gradient now; leave frozen parameters alone")
    if model.rare.weight.grad is None:
        raise Wrong(f"rare.weight has no gradient here, but rank {last} used it: every rank needs its mean")
    trainable = [p for p in model.parameters() if p.requires_grad]
    # a rare gradient that is not averaged is a different fault from one that was left out
    own = [p * torch.nan if p is model.rare.weight else g for p, g in zip(trainable, before, strict=True)]
    _expect_mean(flat(map(_grad_or_zeros, trainable)), of_all, seen, flat(own), "send p.grad itself, not a copy of it")
    sent, enough, tied = seen.payload_bytes(), sum(p.nbytes for p in trainable), model.tied.weight.nbytes
    twice = "a tied matrix has one gradient; send it once"
    cure = twice if sent == enough + tied else "send each gradient once, and nothing else"
    expect_traffic(seen, "the gradients are right", cure, payload=enough)


@exercise(2, "accumulation with no_sync")
def accumulation(answer, ranks):
    """`answer(ddp, micro_batches)` leaves the mean over all micro-batches and ranks, averaged by one set of calls."""
    model = Watched(_mlp())
    ddp, weights = DistributedDataParallel(model), flat(model.parameters())
    for _ in range(2):  # DDP rebuilds its buckets after its first backward, which sends a few bytes
        _loss(ddp, ranks.rank, 0).backward()
    first = 0
    for num in (3, 2, 1):  # a flag that one call leaves set shows in the next call
        steps, first = range(first, first + num), first + num
        micro_batches = [_rows(ranks.rank, step) for step in steps]
        ddp.zero_grad()
        model.begin()
        with wire.watch() as seen:
            answer(ddp, micro_batches)
        expect_unchanged(flat(model.parameters()), weights, "a weight")
        found = gradients(model)
        if not seen.payload_bytes():
            raise Wrong("nothing was averaged: the last micro-batch belongs outside no_sync")
        own = [_gradients(ranks.rank, step) / num for step in steps]
        means = [_mean([_gradients(r, step) for r in range(ranks.world_size)]) / num for step in steps]
        slips = {
            f"that is {num} times too large; each micro-batch's loss is a mean already": num * sum(means),
            "that is the last micro-batch's alone": num * means[-1],
            "that is the last micro-batch's alone, divided by their number": means[-1],
            "only the first was; DDP decides in forward whether the next backward averages": means[0] + sum(own[1:]),
        }
        what = f"with {num} micro-batch{'es' * (num > 1)} the gradients"
        expect_tensor(found, sum(means), what, slips, "the mean over all micro-batches and ranks")
        model.expect_one_at_a_time(len(micro_batches[0][0]), "the gradients are right")
        cure = "all but the last micro-batch belong inside no_sync, their forward pass too, where DDP looks"
        expect_traffic(seen, "the gradients are right", cure, payload=found.nbytes)
        if not ddp.require_backward_grad_sync:
            raise Wrong("right, but DDP is left without averaging: turn require_backward_grad_sync on again")


@exercise(3, "bytes per step")
def bytes_per_step(answer, ranks=None):
    """`answer(num_params, n_ranks, bytes_per_value, micro_batches, no_sync)` is what one rank sends on a ring."""
    for num_params, n, value, micro_batches, no_sync in (
        (816_705, 4, 4, 1, False), (816_705, 1, 4, 1, False),
        (124_000_000, 8, 2, 1, False), (124_000_000, 8, 2, 3, False), (124_000_000, 8, 2, 3, True),
        (luck(1).randint(10**5, 10**9), *sizes(2, 3, least=3, most=40), False),
    ):  # fmt: skip
        found = number(answer(num_params, n, value, micro_batches, no_sync), "bytes")
        payload, times = num_params * value, 1 if no_sync else micro_batches
        right = wire.ring_all_reduce_bytes(payload, n) * times
        slips = {
            "a single rank sends nothing": found if n == 1 else None,
            "that is what it hands to the all-reduce; on the ring it sends 2(n-1)/n of it": payload,
            "that is a whole gradient for every other rank; the ring sends chunks": (n - 1) * payload,
            "that is the reduce-scatter alone; then the finished chunks go round once more": right / 2,
            "each of the 2(n-1) messages is one chunk, 1/n of the gradient; or is that what all ranks send?": right * n,
            "with no_sync only the last micro-batch is averaged": right * micro_batches,
            "without no_sync every micro-batch is averaged": right / micro_batches,
        }
        case = f"for {num_params:,} parameters of {value} bytes on {count(n, 'rank')}"
        case += f", {micro_batches} micro-batches {'with' if no_sync else 'without'} no_sync," * (micro_batches > 1)
        chunks_of_whole_numbers = 2 * n * value * times  # tolerance in bytes
        expect_number(found, right, f"{case} what a rank sends", "bytes", slips, close=chunks_of_whole_numbers)


def _mlp():
    """Return a 6 -> 4 -> 2 network with 38 parameters, always the same initial weights."""
    return seeded(lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)), 38).double()


def _with_state(rank):
    """Return a 6 -> 4 -> 2 network with buffers and a frozen weight, with different numbers on every rank."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double(), 100 + rank)
    model[1].running_mean.copy_(normal(100 + rank, 4))
    model[1].num_batches_tracked.fill_(1 + rank)
    model[2].weight.requires_grad_(False)
    return model


def _bucket(rank, step):
    """A rank's gradients in one flat tensor; every grad is a view of it."""
    model = _after_backward(_mlp(), rank, step)
    parameters = list(model.parameters())[: 4 - step]  # not always as many as there are ranks
    flat_P = flat(p.grad for p in parameters)
    for p, view in zip(parameters, flat_P.split([p.numel() for p in parameters]), strict=True):
        p.grad = view.view_as(p)
    return SimpleNamespace(parameters=parameters, flat_P=flat_P, work=None)


class _Untidy(nn.Module):
    """A model with one matrix used twice, one frozen, one used by some ranks only, and one unused."""

    def __init__(self):
        super().__init__()
        first = seeded(lambda: nn.ModuleDict({n: nn.Linear(6, 6, bias=False) for n in ("tied", "rare")}), 38).double()
        self.rare, self.tied = first["rare"], first["tied"]
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.tied.weight
        self.frozen = nn.Parameter(torch.ones(6, dtype=torch.float64), requires_grad=False)
        self.nobody = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.out = seeded(lambda: nn.Linear(6, 2), 38).double()

    def forward(self, x_b6, rare=False):
        x_b6 = self.again(torch.tanh(self.tied(x_b6)) * self.frozen)
        return self.out(self.rare(x_b6) if rare else x_b6)


def _rows(rank, step):
    """Return a rank's inputs [5, 6] and targets [5, 2] at a step."""
    return tuple(normal(1000 * step + 10 * rank + width, 5, width) for width in (6, 2))


def _loss(model, rank, step, **how):
    x, y = _rows(rank, step)
    return F.mse_loss(model(x, **how), y)


def _gradients(rank, step):
    return gradients(_after_backward(_mlp(), rank, step))


def _after_backward(model, rank, step=0, **how):
    _loss(model, rank, step, **how).backward()
    return model


def _grad_or_zeros(p):
    return torch.zeros_like(p) if p.grad is None else p.grad.clone()


def _mean(rows):
    return torch.stack(list(rows)).mean(0)


def _expect_mean(given, of_all, seen, own=None, hint="", what="the gradients"):
    """Raise Wrong unless `given` is the mean of the rows `of_all`.

    `own`: this rank's row. `hint`: why `given` might still equal it. `seen`: the calls that the answer has made.
    """
    n, mean = len(of_all), _mean(of_all)
    slips = {
        "that is rank 0's; broadcast copies, all-reduce adds up": [of_all[0], of_all[0] / n] * seen.count("broadcast"),
        "reduce gives the sum to one rank, all-reduce to every rank": given if seen.count("reduce") else None,
        f"what is there is still this rank's own; {hint}": own,
        f"that is this rank's own, divided by {n}; {hint}": None if own is None else own / n,
        f"that is the sum over the ranks, {n} times too large; divide by the number of ranks": n * mean,
        f"that is {n} times too small; it was divided by the number of ranks twice": mean / n,
    }
    if own is not None and isinstance(given, torch.Tensor) and given.shape == mean.shape:
        still_own = given.isclose(own, rtol=0, atol=1e-10) & ~given.isclose(mean, rtol=0, atol=1e-10)
        others = given[~still_own].isclose(mean[~still_own], rtol=0, atol=1e-10)
        if still_own.any() and others.numel() and others.all():
            first, number_own = still_own.nonzero()[0].item(), int(still_own.sum())
            part = f"{number_own} of {count(given.numel(), 'number')}, the first at [{first}]"
            raise Wrong(f"{what} should be the mean over the ranks: {part}, were not averaged: send every gradient")
    expect_tensor(given, mean, what, slips, "the mean over the ranks")
