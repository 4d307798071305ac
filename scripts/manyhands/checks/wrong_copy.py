"""Check of lesson 11: which rank's copy of the model is not that of the others, told by what fits into a fingerprint."""

import operator
import pickle

import torch
import torch.distributed as dist
from torch import nn

from manyhands.checks import Wrong, exercise
from manyhands.checks.values import plain

PRINT_BYTES = 160  # for each tensor and rank, its name included: a sha256 in hexadecimal digits fits


@exercise(4, "which copy is wrong?")
def odd_one_out(answer, ranks):
    """`answer(model, gather)` is (rank, name) of the parameter in which one rank differs from the others, or None.

    With two ranks the rank is None: nobody can say which of two copies is the wrong one.
    """
    n = ranks.world_size
    for what, culprit, name, change in _cases(n):
        model = _model()
        if ranks.rank == culprit:
            change(model.get_parameter(name))
        before = [p.detach().clone() for p in model.parameters()]
        exchange = _Exchange(n)
        given = answer(model, exchange)
        if any(not torch.equal(_bits(p), _bits(q)) for p, q in zip(model.parameters(), before, strict=True)):
            raise Wrong(f"{what}: your function changed the model; look at it only")
        _compare(what, given, None if culprit is None or n == 1 else (culprit if n > 2 else None, name), n)
        exchange.judge(len(before))


def _cases(n):
    """(what happened, the rank, the parameter, what happens to it) of some worlds of n ranks."""

    def flipped(index, bit):
        return lambda p: _bits(p).view(-1)[index].bitwise_xor_(1 << bit)

    def swapped(p):
        flat = p.detach().view(-1)
        flat[:2] = flat[:2].flip(0)

    last, biases = n - 1, "1.bias"
    yield "all copies are equal", None, biases, None
    yield f"bit 20 of one weight is flipped on rank {last}", last, "0.weight", flipped(100, 20)
    yield "the lowest bit of one weight is flipped on rank 0", 0, "2.weight", flipped(7, 0)
    yield (
        f"two weights have changed places on rank {last // 2}, so that their sum is as before",
        last // 2,
        "0.weight",
        swapped,
    )
    yield (
        f"a zero has become -0.0 on rank {last}: equal to the eye, one bit apart",
        last,
        biases,
        flipped(0, 31),
    )


def _model():
    """The same on all ranks: weights drawn by themselves, a bias of zeros, and one that is nan on every rank."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 24), nn.LayerNorm(24), nn.Linear(24, 16))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
        model[1].bias.zero_()
        model[2].bias.fill_(float("nan"))
    return model


def _bits(p):
    return p.detach().view(torch.int32)


class _Exchange:
    """The `gather` of an answer: what each rank hands over comes back to all, in rank order; its bytes are counted."""

    def __init__(self, n):
        self._n, self._bytes, self._calls = n, 0, 0

    def __call__(self, mine):
        self._calls += 1
        self._bytes += len(pickle.dumps(mine))
        of_all = [None] * self._n
        dist.all_gather_object(of_all, mine)
        return of_all

    def judge(self, num_tensors):
        enough = num_tensors * PRINT_BYTES
        if self._bytes > enough:
            raise Wrong(
                f"right, but this rank handed over {self._bytes:,} bytes for {num_tensors} tensors: weights travelled; "
                f"fingerprints fit into {enough:,}"
            )


def _compare(what, given, wanted, n):
    if given is not None:
        try:
            odd, name = given
            given = (None if odd is None else operator.index(odd), str(name))
        except (TypeError, ValueError):
            raise Wrong(f"return (rank, name) or None, not {plain(given)}") from None
    if given == wanted:
        return
    if wanted is None:
        alike = " (nan is not equal to itself, but its bits are)" if given[1] == "2.bias" else ""
        raise Wrong(f"{what}, and you found {given}{alike}")
    if given is None:
        raise Wrong(f"{what}, in {wanted[1]}, and you found nothing: compare all bits")
    if n == 2 and given[1] == wanted[1]:
        raise Wrong(f"{what}: with two copies nobody can say which is the wrong one; return (None, {wanted[1]!r})")
    raise Wrong(f"{what}, in {wanted[1]}: the answer is {wanted}, not {given}")
