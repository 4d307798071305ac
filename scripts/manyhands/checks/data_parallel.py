"""Checks of lesson 03: one start, gradients that are averaged, once, over all ranks, and no byte in vain.

Every check knows the right gradients without communicating: the data of rank r is drawn from a seed that says r, so each
rank computes the gradients of all. Models are tiny, in float64, and live on the CPU, where the trial group can send.
"""

import math
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyhands.checks import Wrong, exercise
from manyhands.checks.one_device import LiveGraphs
from manyhands.checks.values import number, shown
from manyhands.checks.waits import Waits
from manyhands.measure import wire

CLOSE = 1e-10


@exercise("A", "the same start")
def same_start(answer, ranks):
    """`answer(model)` gives every rank the parameters and buffers of rank 0, in the tensors that the model has."""
    model, rank_0s = _with_state(ranks.rank), _with_state(0).state_dict()
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kept = list(model.state_dict(keep_vars=True).values())
    with wire.watch() as seen:
        answer(model)
    given = model.state_dict()
    if not seen.calls:
        raise Wrong("no broadcast was called here: only rank 0 knows what it has drawn, and all ranks must call")
    for name, wanted in rank_0s.items():
        if not torch.equal(given[name], wanted):
            raise Wrong(_other_start(model, name, given[name], own[name], wanted, ranks.world_size))
    if any(a is not b for a, b in zip(model.state_dict(keep_vars=True).values(), kept, strict=True)):
        raise Wrong(
            "the numbers are right, but in new tensors: an optimizer that was made before still holds the old ones. "
            "Broadcast into the tensors that the model has"
        )
    enough = sum(tensor.nbytes for tensor in kept)
    _enough(seen.payload_bytes(), enough, "broadcast each tensor once", "the start is the same")


def _other_start(model, name, given, own, wanted, n):
    """Why the tensor `name` of this rank is not rank 0's, as a sentence."""
    if n > 1 and not torch.equal(own, wanted) and torch.equal(given, own):
        why = "broadcast into the tensor itself, not into a copy"
        if name in dict(model.named_buffers()):
            why = "it is a buffer, and a step reads those, too"
        elif not model.get_parameter(name).requires_grad:
            why = "it does not train, but the loss depends on it"
        return f"{name} is still this rank's own: {why}"
    mean = torch.stack([_with_state(rank).state_dict()[name] for rank in range(n)]).double().mean(0)
    if _same(given.double(), mean):
        return f"{name} is the mean of what all ranks drew; take rank 0's, as it is"
    return f"{name} is not rank 0's: it is off by {_apart(given.double(), wanted.double()):.2g}"


@exercise("B", "average the gradients")
def mean_gradient(answer, ranks):
    """`answer(model)`, after backward, leaves in each grad the mean over the ranks."""
    model = _after_backward(_mlp(), ranks.rank)
    weights, own = _numbers(model.parameters()), _numbers(p.grad for p in model.parameters())
    expected = _mean(_gradients(_mlp(), r, 0) for r in range(ranks.world_size))
    with wire.watch() as seen:
        answer(model)
    _weights_stay(model, weights)
    given = _all_gradients(model)
    if not seen.calls and not _same(given, expected):
        raise Wrong("nothing was sent, so no rank knows the gradients of the others: all-reduce each p.grad")
    if _same(given, own) and not _same(given, expected):
        raise Wrong("the gradients still are this rank's own: send p.grad itself, not p and not a copy")
    _compare(given, expected, ranks.world_size)
    _enough(seen.payload_bytes(), weights.nbytes, "each gradient needs one all-reduce")


@exercise("C", "gradient hook")
def gradient_hook(answer, ranks):
    """`answer(model)` attaches hooks; after backward each gradient must be the mean over the ranks."""
    model = _mlp()
    weights = _numbers(model.parameters())
    answer(model)
    for step in range(2):  # a hook stays: the second backward must be averaged as well
        expected = _mean(_gradients(_mlp(), r, step) for r in range(ranks.world_size))
        model.zero_grad()
        with wire.watch() as seen:
            _loss(model, ranks.rank, step).backward()
        given = _all_gradients(model)
        own = _gradients(_mlp(), ranks.rank, step)
        if not torch.equal(_numbers(model.parameters()), weights) and not _same(given, expected):
            raise Wrong(
                "the weights changed during backward: the hook is handed the parameter, and what is to be averaged is "
                "its grad"
            )
        if not seen.calls:
            when = "during the second backward: the hook must stay" if step else "while backward ran"
            raise Wrong(f"nothing was sent {when}; register a hook on every parameter")
        if _same(given, own) and not _same(given, expected):
            raise Wrong(
                "something was averaged, but the gradients still are this rank's own: the hook is handed the parameter; "
                "send its grad"
            )
        _compare(given, expected, ranks.world_size)
        _enough(seen.payload_bytes(), weights.nbytes, "each gradient needs one all-reduce")


@exercise("D", "start a bucket")
def bucket_start(answer, ranks):
    """`answer(bucket)` begins one all-reduce of `bucket.flat_P`, divided before, and leaves its handle in `bucket.work`."""
    for step in range(2):
        bucket = _bucket(ranks.rank, step)
        flat_P, first = bucket.flat_P, bucket.flat_P.clone()
        expected = _mean(_bucket(rank, step).flat_P for rank in range(ranks.world_size))
        with wire.watch() as seen, Waits(seen.calls) as waits, _OnItsWay(flat_P) as sent:
            answer(bucket)
        if not seen.calls:
            raise Wrong("nothing was sent: start an all-reduce of bucket.flat_P")
        if len(seen.calls) > 1:
            raise Wrong(
                f"{len(seen.calls)} calls were made where 1 is enough: the whole bucket travels at once, which is what it is "
                "for"
            )
        if bucket.flat_P is not flat_P:
            raise Wrong(
                "bucket.flat_P is another tensor now, and every p.grad is a view of the old one: divide in place, with /="
            )
        if waits.after:
            raise Wrong(
                "your function waited for the other ranks, so backward stands still: start with async_op=True, and leave "
                "the waiting to finish()"
            )
        if sent.changed:
            raise Wrong(
                "the bucket was changed while its all-reduce was on its way, so what arrives is a matter of luck: divide "
                "before you start it"
            )
        if not callable(getattr(bucket.work, "wait", None)):
            raise Wrong(
                f"bucket.work should be the handle that all_reduce(..., async_op=True) returns, not {shown(bucket.work)}: "
                "finish() will call its wait()"
            )
        bucket.work.wait()
        if _same(flat_P, first) and not _same(flat_P, expected):
            raise Wrong("bucket.flat_P still holds this rank's own gradients: send it itself, not a copy of it")
        _compare(flat_P, expected, ranks.world_size)
        _enough(seen.payload_bytes(), flat_P.nbytes, "the bucket needs one all-reduce")


class _OnItsWay(TorchDispatchMode):
    """Notes in `changed` whether memory is written to after a collective with it has begun."""

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


@exercise(1, "tied, frozen and unused parameters")
def untidy(answer, ranks):
    """`answer(model)`, after backward, averages what is trainable: once, and also where this rank has no gradient."""
    last = ranks.world_size - 1  # the only rank whose loss uses the rare parameter
    after_backward = [_after_backward(_Untidy(), r, rare=r == last) for r in range(ranks.world_size)]
    given = [[_grad_or_zeros(p) for p in m.parameters() if p.requires_grad] for m in after_backward]
    expected = [sum(parts) / ranks.world_size for parts in zip(*given, strict=True)]
    model = after_backward[ranks.rank]
    weights = _numbers(model.parameters())
    with _Lockstep(ranks) as lockstep, wire.watch() as lockstep.seen:
        answer(model)
    lockstep.meet(None)
    _weights_stay(model, weights)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if model.frozen.grad is not None:
        raise Wrong("the frozen parameter has a gradient now; leave alone what does not train")
    for (name, p), wanted in zip(trainable.items(), expected, strict=True):
        if p.grad is None and wanted.any():
            raise Wrong(
                f"{name} has no gradient here, because this rank did not use it; but rank {last} did, so its mean is "
                "not zero, and without it the replicas part"
            )
    given = _numbers(_grad_or_zeros(p) for p in trainable.values())
    _compare(given, _numbers(expected), ranks.world_size)
    sent, tied = lockstep.seen.payload_bytes(), model.tied.weight.nbytes
    enough = sum(p.nbytes for p in trainable.values())
    why = (
        "a tied matrix has one gradient; send it once"
        if sent == enough + tied
        else "send each gradient once, and nothing else"
    )
    _enough(sent, enough, why)
    if sent < enough and ranks.world_size > 1:  # some rank knew that nobody uses a parameter: it was told so
        raise Wrong(
            f"the gradients are right, but {sent} bytes were handed over where they have {enough}: something else than "
            "gradients was sent, to leave one out. Send each of them once, zeros where there is none, and nothing else"
        )


@exercise(2, "accumulation with no_sync")
def accumulation(answer, ranks):
    """`answer(ddp, micro_batches)` leaves the mean over all micro-batches and ranks, averaged by one set of calls."""
    model = _WatchedMlp()
    ddp, weights = DistributedDataParallel(model), _numbers(model.parameters())
    for _ in range(2):  # DDP arranges its buckets anew after its first backward, and sends a few bytes for that
        _loss(ddp, ranks.rank, 0).backward()
    micro_step = 0
    for num in (3, 2, 1):  # a flag that one call leaves behind shows in the next
        steps = range(micro_step, micro_step + num)
        micro_step += num
        micro_batches = [_rows(ranks.rank, step) for step in steps]
        expected = _mean(_gradients(_mlp(), r, step) for r in range(ranks.world_size) for step in steps)
        ddp.zero_grad()
        with wire.watch() as seen:
            model.begin(seen)
            answer(ddp, [(x.clone(), y.clone()) for x, y in micro_batches])
        _weights_stay(model, weights)
        _judge_accumulation(model, seen, expected, num)


def _judge_accumulation(model, seen, expected, num):
    given = _all_gradients(model, "run a backward pass for each micro-batch")
    rows = len(_rows(0, 0)[0])
    sent, once = seen.payload_bytes(), given.nbytes
    if model.largest > rows:
        raise Wrong(
            f"the model was given {model.largest} rows at once, and a micro-batch has {rows}: one forward pass for each"
        )
    if model.live.most > 1:
        raise Wrong(
            f"the activations of {model.live.most} micro-batches were in memory at once; call backward before the next "
            "forward, and let it free the graph"
        )
    if sent == 0:
        raise Wrong("nothing was averaged: the last micro-batch belongs outside no_sync")
    if _same(given, num * expected) and num > 1:
        raise Wrong(
            f"the gradients are {num} times too large: each micro-batch's loss is a mean already, so divide it by "
            f"their number"
        )
    if (factor := _factor(given, expected)) is not None:
        raise Wrong(
            f"with {num} micro-batches the gradients are {factor:.4g} times what they should be: check by what you divide"
        )
    if sent > once:
        why = (
            "all but the last micro-batch belong inside no_sync, their forward pass too, because that is where DDP looks"
            if model.sent_before_the_last_forward()
            else "DDP has averaged in the last backward already"
        )
        raise Wrong(f"{sent} bytes were averaged where {once} are enough: {why}")
    if not _same(given, expected):
        raise Wrong(
            f"the gradients are off by {_apart(given, expected):.2g}: what was averaged was not the sum of all "
            "micro-batches. DDP decides in forward whether the next backward averages"
        )


@exercise(3, "bytes per step")
def bytes_per_step(answer, ranks=None):
    """`answer(num_params, n_ranks, bytes_per_value, micro_batches, no_sync)` is what one rank sends on a ring."""
    cases = [
        (816_705, 4, 4, 1, False),
        (816_705, 2, 4, 1, False),
        (816_705, 1, 4, 1, False),
        (124_000_000, 8, 2, 1, False),
        (124_000_000, 8, 2, 4, False),
        (124_000_000, 8, 2, 4, True),
    ]
    for num_params, n, value, micro_batches, no_sync in cases:
        given = answer(num_params, n, bytes_per_value=value, micro_batches=micro_batches, no_sync=no_sync)
        given = number(given, "a number of bytes")
        payload, times = num_params * value, 1 if no_sync else micro_batches
        right = wire.ring_all_reduce_bytes(payload, n) * times
        # a rank that sends whole numbers sends chunks of P/n, rounded down or up
        least, most = (2 * (n - 1) * whole * value * times for whole in (num_params // n, math.ceil(num_params / n)))
        if least * (1 - 1e-9) <= given <= most * (1 + 1e-9):
            continue
        case = f"for {num_params:,} parameters of {value} bytes on {n} ranks"
        case += f", {micro_batches} micro-batches {'with' if no_sync else 'without'} no_sync" * (micro_batches > 1)
        hint = _bytes_hint(given, right, payload, n, micro_batches)
        raise Wrong(f"{case} a rank sends {right:,.0f} bytes, not {given:,.0f}{hint}")


def _bytes_hint(given, right, payload, n, micro_batches):
    if n == 1:
        return ": one rank has nobody to send to"
    for factor, why in {
        payload: "that is what it hands to the all-reduce; on the ring it sends 2(n-1)/n of it",
        (n - 1) * payload: "that is a copy for every other rank; the ring sends chunks",
        right / 2: "that is the reduce-scatter alone; then the finished chunks go round once more",
        right * n: "each of the 2(n-1) messages is one chunk, 1/n of the gradient",
        right * micro_batches: "with no_sync only the last micro-batch is averaged",
        right / micro_batches: "without no_sync every micro-batch is averaged",
    }.items():
        if factor != right and abs(given - factor) <= 1e-9 * factor:
            return f": {why}"
    return ""


# ---- tiny models and their data, the same on every rank ----


def _mlp():
    """6 -> 4 -> 2, 38 parameters, always the same first weights."""
    return _seeded(lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)))


def _seeded(make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(38)
        return make().double()


def _with_state(rank):
    """6 -> 4 -> 2 with buffers and a frozen weight, and other numbers on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100 + rank)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
        model[1].running_mean.normal_()
        model[1].num_batches_tracked.fill_(1 + rank)
        model[2].weight.requires_grad_(False)
    return model


def _bucket(rank, step):
    """The gradients of a rank in one piece of memory, of which every grad is a view."""
    model = _after_backward(_mlp(), rank, step)
    parameters = list(model.parameters())
    flat_P = _numbers(p.grad for p in parameters)
    for p, view in zip(parameters, flat_P.split([p.numel() for p in parameters]), strict=True):
        p.grad = view.view_as(p)
    return SimpleNamespace(parameters=parameters, flat_P=flat_P, work=None)


class _WatchedMlp(nn.Sequential):
    """The same, which watches what it is given and keeps, and what has been sent when it is called."""

    def __init__(self):
        super().__init__(*_mlp())

    def begin(self, seen):
        self.seen, self.live, self.largest, self.sent_at_forward = seen, LiveGraphs(), 0, []

    def forward(self, x):
        if not hasattr(self, "seen"):
            return super().forward(x)
        self.largest = max(self.largest, len(x))
        self.sent_at_forward.append(self.seen.payload_bytes())
        return self.live.run(super().forward, x)

    def sent_before_the_last_forward(self):
        return any(self.sent_at_forward)


class _Untidy(nn.Module):
    """One matrix used twice, one frozen, one that only some ranks use, one that nobody uses."""

    def __init__(self):
        super().__init__()
        first = _seeded(lambda: nn.ModuleDict({name: nn.Linear(6, 6, bias=False) for name in ("tied", "rare")}))
        self.rare, self.tied = first["rare"], first["tied"]
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.tied.weight
        self.frozen = nn.Parameter(torch.ones(6, dtype=torch.float64), requires_grad=False)
        self.nobody = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.out = _seeded(lambda: nn.Linear(6, 2))

    def forward(self, x_b6, rare=False):
        x_b6 = self.again(torch.tanh(self.tied(x_b6)) * self.frozen)
        return self.out(self.rare(x_b6) if rare else x_b6)


def _rows(rank, step):
    """Inputs [5, 6] and targets [5, 2] of a rank at a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return tuple(torch.randn(5, width, generator=generator, dtype=torch.float64) for width in (6, 2))


def _loss(model, rank, step, **how):
    x, y = _rows(rank, step)
    return F.mse_loss(model(x, **how), y)


def _gradients(model, rank, step):
    return _numbers(p.grad for p in _after_backward(model, rank, step).parameters())


def _after_backward(model, rank, step=0, **how):
    _loss(model, rank, step, **how).backward()
    return model


def _grad_or_zeros(p):
    return torch.zeros_like(p) if p.grad is None else p.grad.clone()


# ---- judging ----


def _numbers(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


def _all_gradients(model, hint="leave a mean in each grad"):
    gradients = [p.grad for p in model.parameters()]
    if any(gradient is None for gradient in gradients):
        raise Wrong(f"some gradients are None: {hint}")
    given = _numbers(gradients)
    _finite(given)
    return given


def _finite(given):
    if not given.isfinite().all():
        raise Wrong("the gradients are not finite: is something divided by zero?")


def _weights_stay(model, weights):
    if not torch.equal(_numbers(model.parameters()), weights):
        raise Wrong("the weights have changed; only the gradients are to be averaged")


def _mean(rows):
    return torch.stack(list(rows)).mean(0)


def _apart(a, b):
    return (a - b).abs().max().item()


def _same(a, b):
    return _apart(a, b) <= CLOSE


def _compare(given, expected, n):
    """Raises Wrong with the factor between the two, if there is one."""
    _finite(given)
    if _same(given, expected):
        return
    if _same(given, n * expected):
        raise Wrong(f"the gradients are the sum over the ranks, {n} times too large; divide by the number of ranks")
    if _same(n * given, expected):
        raise Wrong(f"the gradients are {n} times too small: they were divided by the number of ranks twice")
    if (factor := _factor(given, expected)) is not None:
        raise Wrong(f"the gradients are {factor:.4g} times the mean over the ranks: check by what you divide")
    raise Wrong(f"the gradients are off by {_apart(given, expected):.2g} from the mean over the ranks")


def _factor(given, expected):
    """The number by which `expected` was multiplied, None if it was not, or by 1."""
    factor = ((given @ expected) / (expected @ expected)).item()
    return factor if not _same(given, expected) and _same(given, factor * expected) else None


def _enough(sent, enough, why, what="the gradients are right"):
    if sent > enough:
        raise Wrong(f"{what}, but {sent} bytes were handed over where {enough} are enough: {why}")


class _Lockstep(TorchDispatchMode):
    """Lets a collective begin only where all ranks call the same one next; where not, all of them raise Wrong.

    For real, calls that do not match wait forever, or end a rank: gloo aborts the process when sizes differ.

    with _Lockstep(ranks) as lockstep, wire.watch() as lockstep.seen:
        answer(model)
    lockstep.meet(None)     # this rank is done
    """

    def __init__(self, ranks):
        super().__init__()
        self.ranks, self.seen, self.met = ranks, wire.Seen(), 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if len(self.seen.calls) > self.met:  # the watch inside this one has just counted it
            self.met = len(self.seen.calls)
            call = self.seen.calls[-1]
            if call.op not in ("send", "recv"):  # in these, ranks differ as they should
                self.meet(call)
        return operator(*args, **(kwargs or {}))

    def meet(self, call):
        """Compare this rank's next call, None if there is none, with that of all others."""
        calls = [None] * self.ranks.world_size
        dist.all_gather_object(calls, call)
        for rank, other in enumerate(calls):
            if other != calls[0]:
                raise Wrong(
                    f"when rank 0 {_does(calls[0])}, rank {rank} {_does(other)}, and such calls wait forever or end in an "
                    "error: a parameter that one rank did not use has grad None there; the others still need its zeros"
                )


def _does(call):
    return f"calls {call.op} for {call.bytes} bytes" if call else "has made all its calls"
