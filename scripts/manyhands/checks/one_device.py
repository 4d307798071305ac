"""Checks of lesson 01: parameters, a ledger, does it fit, recompute; and of its four exercises.

None of them communicates: every rank judges the same answer on the same numbers.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from manyhands.checks import Wrong, exercise
from manyhands.checks.drawn import (
    CLOSE,
    IGNORED,
    Watched,
    expect_token_mean,
    flat,
    generator,
    gradients,
    in_turn,
    luck,
    normal,
    seeded,
    sizes,
)
from manyhands.checks.expect import expect_number, expect_tensor, expect_unchanged, number
from manyhands.checks.witness import shown
from manyhands.gpt.config import GPTConfig

WIDTH = 4  # of a block, and of its rows


@dataclass(frozen=True)
class Piece:
    """A piece of a network: bytes kept for backward if run normally or recomputed, and the FLOPs to recompute it."""

    name: str
    kept: float
    input: float
    flops: float


SIZES = ((11, 5, 8, 3), (7, 16, 4, 1), (65, 64, 128, 4), (32_100, 2048, 2048, 16), (50_280, 4096, 8192, 80))


@exercise("A", "count the parameters")
def parameters(answer, ranks=None):
    """`answer(V, T, D, N)` -> the parameters of a GPT with V tokens, T positions, width D and N layers."""
    for V, T, D, N in in_turn([*SIZES, sizes(1, 4, least=5, most=60)]):
        layers, outside = N * (12 * D**2 + 10 * D), D * (V + T) + 2 * D + V * (D + 1)
        off = {  # {what is missing or too much: by how much}; the smallest size distinguishes all of these
            "the head has a bias: a number for each token": -V,
            "embedding and head are two matrices here": -V * D,
            "the head has a matrix and a bias of its own": -V * (D + 1),
            "positions have an embedding, too": -T * D,
            "a LayerNorm has a scale and a shift": -D,
            "there is a LayerNorm between the last layer and the head": -2 * D,
            "each layer has two LayerNorms, of a scale and a shift each": -2 * N * D,
            "each layer has two LayerNorms of 2 D; or the bias of MLP up, with 4 D, is missing": -4 * N * D,
            "the biases of attention out (D), MLP up (4 D) and MLP down (D) are missing": -6 * N * D,
            "the biases of MLP up (4 D) and MLP down (D) are missing": -5 * N * D,
            "attention out and MLP down have a bias of D each, and one of the two is missing": -N * D,
            "the matrices of a layer are right; its biases and LayerNorms are missing": -10 * N * D,
            "that is the matrices of the layers alone": -10 * N * D - outside,
            f"there are {N} layers, not one": -layers // N * (N - 1),
            "query, key and value are three matrices of D times D": -2 * N * D**2,
            "the MLP has two matrices, up and down": -4 * N * D**2,
            "attention has a matrix for its output as well": -N * D**2,
            "query, key and value have no bias here, and that of MLP down has D numbers": 3 * N * D,
        }
        slips = {why: layers + outside + by for why, by in off.items()}
        what = f"for V={V}, T={T}, D={D}, N={N} the number of parameters"
        expect_number(answer(V, T, D, N), layers + outside, what, slips=slips, rel=0)


OLMO_1B = GPTConfig(vocab_size=32_100, block_size=2048, n_layer=16, n_head=16, n_embd=2048)
OLMO_7B = GPTConfig(vocab_size=32_100, block_size=2048, n_layer=32, n_head=32, n_embd=4096)
SHAKESPEARE = GPTConfig(vocab_size=65)
EXACT = 16 * SHAKESPEARE.num_params() + 12 * 32 * 128 * 4 * 64  # 12 sequences fill it to the last byte


@exercise("B", "the ledger")
def ledger(answer, ranks=None):
    """`answer(config, sequences)` -> {kind: bytes} of a step in float32 with AdamW."""
    for config, sequences in ((SHAKESPEARE, 8), (GPTConfig(11, block_size=6, n_layer=3, n_head=2, n_embd=8), 5)):
        D, N, tokens, P = config.n_embd, config.n_layer, sequences * config.block_size, config.num_params()
        singles, top = config.n_head + 4, 2 * D + 2 + config.vocab_size
        wanted = {"parameters": 4 * P, "gradients": 4 * P, "optimizer": 8 * P}
        wanted["activations"] = 4 * tokens * (N * (16 * D + singles) + top)
        slips = {
            "gradients": {
                "that is how many; each takes 4 bytes": P,
                "every parameter has a gradient of 4 bytes, not 2": 2 * P,
                "that is Adam's share; a gradient is one number per parameter": 8 * P,
            },
            "optimizer": {
                "Adam keeps two numbers per parameter, not one": 4 * P,
                "that is how many; each takes 4 bytes": 2 * P,
                "a master copy is for 16-bit weights; here Adam keeps two numbers per parameter": 12 * P,
            },
            "activations": {
                "each number takes 4 bytes": [wanted["activations"] // 4, wanted["activations"] // 2],
                "all N layers keep theirs": 4 * tokens * (16 * D + singles + top),
                "what the top keeps is missing": 4 * tokens * N * (16 * D + singles),
                "the top is there once, not in every layer": 4 * tokens * N * (16 * D + singles + top),
                "the single numbers of a layer, H + 4, are missing": 4 * tokens * (N * 16 * D + top),
                "a layer keeps 16 vectors, not one": 4 * tokens * (N * (D + singles) + top),
                "two norms keep a mean and a deviation each, so H + 4": 4 * tokens * (N * (16 * D + singles - 4) + top),
            },
        }
        found = answer(config, sequences)
        if not isinstance(found, dict) or set(found) != set(wanted):
            raise Wrong(f"return a dictionary of parameters, gradients, optimizer and activations, not {shown(found)}")
        for kind, right in wanted.items():
            what = f"for {sequences} sequences and a width of {D}, {kind}"
            expect_number(found[kind], right, what, "bytes", slips.get(kind), rel=0)


@exercise("C", "sequences that fit")
def does_it_fit(answer, ranks=None):
    """`answer(config, device_bytes)` -> the most sequences that fit, at 16 bytes per parameter and 16 bf16 vectors."""
    for what, config, device_bytes in (
        ("the 7B on 141 GB", OLMO_7B, 141 * 10**9),
        ("the 1B on 80 GB", OLMO_1B, 80 * 10**9),
        ("ShakespeareGPT on a device that 12 sequences fill exactly", SHAKESPEARE, EXACT),
        ("ShakespeareGPT on a device one byte smaller", SHAKESPEARE, EXACT - 1),
        ("the 7B on 80 GB", OLMO_7B, 80 * 10**9),
    ):
        state = 16 * config.num_params()
        each, left = 32 * config.n_embd * config.n_layer * config.block_size, device_bytes - state
        found = number(answer(config, device_bytes), "sequences")
        slips = {
            "round down to whole sequences": None if found.is_integer() else found,
            "you gave all of the device to activations, and the parameters take 16 bytes each": device_bytes // each,
            "training keeps 16 bytes per parameter": [(device_bytes - state // k) // each for k in (4, 8, 16)],
            "a number in bf16 takes 2 bytes": [left // (2 * each), 2 * left // each],
            "a layer keeps 16 vectors for each token, not one": 16 * left // each,
            "every layer keeps its 16 vectors": left * config.n_layer // each,
            "that is tokens, and a sequence has block_size of them": left * config.block_size // each,
            "the last one does not fit whole": math.ceil(left / each),
        }
        if left < 0:
            slips = {"not even the state fits, so the answer is 0 sequences": found}
        what += f", with {state:,} bytes of state and {each:,} per sequence: what fits"
        expect_number(found, max(0, left // each), what, "sequences", slips, rel=0)


@exercise("D", "the backward that recomputes")
def recompute(answer, ranks=None):
    """`answer(block, x, dy)`, with autograd off, -> x's gradient; the block's parameter gradients accumulate."""
    block, plain = _Block(), _Block()
    for turn in range(2):  # the second gradient is added to the first
        rows, dy = _rows(10 + turn), _rows(20 + turn)
        x, expected, of_sum = (rows.clone().requires_grad_() for _ in range(3))
        old = gradients(plain) if turn else None
        plain(expected).backward(dy)
        _Block()(of_sum).sum().backward()
        block.begin()
        with torch.no_grad():  # as in a backward
            found = answer(block, x, dy)
        if not block.forwards:
            raise Wrong("the block was never run: what was forgotten must be computed again")
        if x.grad is not None:
            raise Wrong("x.grad was filled, and x belongs to the graph above: detach it first, and return the gradient")
        if found is None:
            raise Wrong("None came back: return x.grad, which backward fills if the detached x asks for it")
        slips = {
            "it is dy, the gradient of the block's output; x's is what backward makes of it": dy,
            "it is the gradient of y.sum(); backward must start from dy": of_sum.grad,
        }
        expect_tensor(found, expected.grad, "what comes back", slips, "the gradient of x", CLOSE)
        mine = gradients(block, "the gradient of x is right, but the block's parameters must learn, too")
        right = gradients(plain)
        what = "the gradient of x is right, but what the parameters' grads hold"
        alone = "it is the second one alone; add to their existing grad"
        slips, it_is = ({}, "their gradients") if old is None else ({alone: right - old}, "the sum of two gradients")
        expect_tensor(mine, right, what, slips, it_is, CLOSE)
        if block.forwards > 1:
            raise Wrong(f"right, but the block was run {block.forwards} times, and once is enough")
        if block.graphs:
            raise Wrong("right, but what the block kept is still in memory: let backward free the graph")


def _rows(seed):
    return normal(seed, 2, 3, WIDTH)


class _Block(Watched):
    """A float64 block of width 4."""

    def __init__(self):
        layers = seeded(lambda: (nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)), 5)
        super().__init__(nn.Sequential(*layers).double())

    def forward(self, x):
        if not torch.is_grad_enabled():
            raise Wrong("autograd was off when the block was run: run it under torch.enable_grad()")
        return x + super().forward(x)


@exercise(2, "accumulate")
def accumulation(answer, ranks=None):
    """`answer(model, x, y, pieces)` leaves the gradient of the mean over the batch, one micro-batch at a time."""
    for pieces in (3, 1, 2):
        micro_batches = _micro_batches([10] * pieces)
        ids, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
        model = _Model(pairs=True)
        answer(model, ids, targets, pieces)
        _judge_gradients(f"{pieces} micro-batch{'es' * (pieces > 1)}", model, micro_batches)


@exercise(1, "a master copy", in_place=True)
def master_copy(answer, ranks=None):
    """`answer(parameters, masters, adam)` makes Adam's step on the masters, and rounds them into the parameters."""
    parameters = [nn.Parameter(rows.to(torch.bfloat16)) for rows in (_rows(1)[0], _rows(2)[0, 0])]
    masters = [p.detach().float() for p in parameters]
    right = [master.clone() for master in masters]
    adam, plain = (torch.optim.AdamW(numbers, lr=1e-3) for numbers in (masters, right))
    for turn in range(8):
        for p, exact in zip(parameters, right, strict=True):
            p.grad = (_rows(30 + turn).flatten()[: p.numel()].view_as(p) / 8).to(p.dtype)
            exact.grad = p.grad.float()
        before = [master.clone() for master in masters]
        plain.step()
        answer(list(parameters), list(masters), adam)
        _judge_master(f"after {turn + 1} step{'s' * (turn > 0)}", parameters, masters, before, right)


def _judge_master(when, parameters, masters, before, right):
    for p, master, old, exact in zip(parameters, masters, before, right, strict=True):
        if p.dtype != torch.bfloat16 or master.dtype != torch.float32:
            raise Wrong(f"{when} a parameter is {p.dtype} and its master {master.dtype}: copy numbers, not tensors")
        not_moved = "they have not moved; give each its parameter's gradient, in float32, and let adam take the step"
        from_16_bits = "they hold 16-bit numbers; do not copy the parameters up again, or small steps are lost"
        slips = {not_moved: old, from_16_bits: exact.to(torch.bfloat16).float()}
        right = "one step of adam further, with their parameters' gradients"
        expect_tensor(master, exact, f"{when} the masters", slips, right, close=0)
        if not torch.equal(p.detach(), exact.to(p.dtype)):
            raise Wrong(f"{when} the masters are right, but a parameter is not its master, rounded: copy it down")
        if master.grad is not None:
            raise Wrong(f"{when} all is right, but the masters keep their gradients: 4 bytes per parameter more")


@exercise(3, "which pieces to recompute")
def recompute_trade_off(answer, ranks=None):
    """`answer(pieces, budget)` -> names to recompute, the fewest FLOPs that respect the budget; None if none does."""
    for what, pieces, budget in _trade_offs():
        found, best = answer(list(pieces), budget), _cheapest(pieces, budget)
        if best is None and found is not None:
            raise Wrong(f"{what}: no choice fits into {budget:g} bytes: return None, not {shown(found)}")
        if found is None and best is not None:
            raise Wrong(f"{what}: recomputing {_names(best)} fits into {budget:g} bytes, and the answer was None")
        if found is None:
            continue
        if strange := set(found) - {piece.name for piece in pieces}:
            raise Wrong(f"{what}: return a set of names; {shown(strange.pop())} is the name of no piece")
        kept = sum(piece.input if piece.name in found else piece.kept for piece in pieces)
        if kept > budget:
            without_inputs = sum(piece.kept for piece in pieces if piece.name not in found)
            hint = "; a piece that is recomputed keeps its input" if without_inputs <= budget else ""
            raise Wrong(f"{what}: recomputing {_names(found)} keeps {kept:g} bytes of {budget:g}{hint}")
        cost, lowest = (sum(piece.flops for piece in pieces if piece.name in names) for names in (found, best))
        if cost > lowest:
            done, enough = _names(found), _names(best)
            raise Wrong(f"{what}: recomputing {done} costs {cost:g} FLOPs; recomputing {enough} fits for {lowest:g}")


def _trade_offs():
    equal = [Piece(f"block {i}", 16, 1, 10) for i in range(4)]
    yield "four equal blocks, and room for all", equal, 64
    yield "four equal blocks, and half of the bytes", equal, 34
    # the cheapest piece per byte frees too little, so the expensive one is needed anyway
    yield "one large and two small pieces", [
        Piece("large", 110, 10, 100), Piece("small", 70, 10, 50), Piece("other", 50, 10, 40),
    ], 150  # fmt: skip
    yield "a piece whose input is larger than what it keeps", [
        Piece("norm", 5, 20, 1), Piece("mlp", 90, 10, 80), Piece("attention", 60, 10, 30),
    ], 85  # fmt: skip
    draw = luck(12)
    for _ in range(5):  # every greedy order fails in one of them
        pieces = [Piece(f"p{i}", 20 + draw.randint(1, 99), draw.randint(1, 19), draw.randint(1, 99)) for i in range(10)]
        yield "ten unequal pieces", pieces, sum(piece.kept for piece in pieces) * draw.uniform(0.4, 0.7) // 1
    yield "four equal blocks, and too little even for their inputs", equal, 3.5


def _cheapest(pieces, budget):
    """Return the set of names with the fewest FLOPs that fits, or None."""
    cheapest = {0: (0, ())}  # bytes kept by the pieces so far: (FLOPs, names to recompute)
    for piece in pieces:
        ways = [
            (kept + more, (flops + cost, names + name))
            for kept, (flops, names) in cheapest.items()
            for more, cost, name in ((piece.kept, 0, ()), (piece.input, piece.flops, (piece.name,)))
        ]
        cheapest = dict(sorted(ways, reverse=True))  # of several ways to keep equally many bytes, keep the cheapest
    fits = [way for kept, way in cheapest.items() if kept <= budget]
    return set(min(fits)[1]) if fits else None


def _names(names):
    return ", ".join(sorted(names)) or "nothing"


@exercise(4, "accumulation over uneven token counts")
def uneven_accumulation(answer, ranks=None):
    """`answer(model, micro_batches)` leaves the gradient of the mean over all counted tokens, one piece at a time."""
    for what, counts in {  # tokens of each micro-batch that count, out of 2 x 5
        "equal counts": (10, 10, 10), "uneven counts": (10, 3, 1), "a micro-batch of padding": (7, 0, 2),
        "one micro-batch": (4,),
    }.items():  # fmt: skip
        micro_batches = _micro_batches(counts)
        model = _Model()
        answer(model, micro_batches)
        _judge_gradients(what, model, micro_batches)


def _judge_gradients(what, model, micro_batches):
    """Raise Wrong unless `model` has the gradient of the mean over all counted tokens, computed piece by piece."""
    cure = ": leave gradients, and no step, behind"
    expect_unchanged(flat(model.parameters()), flat(_Model().parameters()), f"{what}: a weight", cure)
    expect_token_mean(gradients(model), _Model, [micro_batches], f"{what}: the row of all gradients")
    model.expect_one_at_a_time(len(micro_batches[0][0]), f"{what}: the gradients are right")
    if model.forwards > len(micro_batches):
        raise Wrong(f"{what}: right, but {model.forwards} forward passes; count the tokens from the targets")


def _micro_batches(counts):
    made = []
    for i, count in enumerate(counts):
        draw = generator(100 + i)
        ids, targets = (torch.randint(7, (2, 5), generator=draw) for _ in range(2))
        targets.view(-1)[count:] = IGNORED
        made.append((ids, targets))
    return made


class _Model(Watched):
    """A model with a vocabulary of 7, in float64.

    With `pairs`, model(ids, targets) returns (logits, mean loss) as the lesson's GPT does; else model(ids) the logits.
    """

    def __init__(self, pairs=False):
        super().__init__(seeded(lambda: nn.Sequential(nn.Embedding(7, 6), nn.Tanh(), nn.Linear(6, 7)).double(), 3))
        self.pairs = pairs

    def forward(self, ids, targets=None):
        logits = super().forward(ids)
        if not self.pairs:
            return logits
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
