"""Checks of lesson 01: does it fit, which pieces to recompute, and a batch that comes in uneven pieces.

None of them communicates: every rank judges the same answer on the same numbers.
"""

import itertools
import math
import weakref
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from manyhands.checks import Wrong, exercise
from manyhands.checks.values import number, shown
from manyhands.gpt.model import GPTConfig

CLOSE = 1e-6  # a count divided by a count is a float32, and right all the same
IGNORED = -100  # the target of a position that does not count, as F.cross_entropy has it


@dataclass(frozen=True)
class Piece:
    """A piece of a network: bytes it keeps for backward if run normally, and if recomputed; FLOPs to recompute it."""

    name: str
    kept: float
    input: float
    flops: float


# ---- exercise 1 ----

CLASS_70B = GPTConfig(vocab_size=50_280, block_size=4096, n_layer=80, n_head=64, n_embd=8192)
OLMO_1B = GPTConfig(vocab_size=32_100, block_size=2048, n_layer=16, n_head=16, n_embd=2048)
SHAKESPEARE = GPTConfig(vocab_size=65)
EXACT_FIT = SHAKESPEARE.num_params() * 4  # at 16 bytes per parameter: four devices, filled to the last byte


@exercise(1, "the 65 billion question")
def does_it_fit(answer, ranks=None):
    """`answer(config, sequences, bytes_per_parameter, device_bytes, flash)` -> (state, activation bytes, devices)."""
    cases = [
        ("the 70B class at 14P on 40 GB", CLASS_70B, 256, 14, 40e9, False),
        ("the 70B class at 14P on 80 GiB", CLASS_70B, 1, 14, 80 * 2**30, True),
        ("OLMo 1B at 16P on 16 GB", OLMO_1B, 4, 16, 16e9, False),
        ("ShakespeareGPT at 16P on devices that it fills exactly", SHAKESPEARE, 12, 16, EXACT_FIT, True),
        ("the 70B class at 16P on 80 GB", CLASS_70B, 2, 16, 80e9, True),
        ("OLMo 1B at 16P on 80 GB", OLMO_1B, 1, 16, 80e9, False),
        ("ShakespeareGPT at 16P on devices one byte smaller", SHAKESPEARE, 2, 16, EXACT_FIT - 1, False),
    ]
    for what, config, sequences, per_parameter, device_bytes, flash in cases:
        state, kept, devices = _three(answer(config, sequences, per_parameter, device_bytes, flash))
        right = config.num_params() * per_parameter
        if not _near(state, right):
            hint = _state_hint(state, right, config)
            raise Wrong(f"for {what} the state is {right:,.0f} bytes, not {state:,.0f}{hint}")
        right = 2 * _slide_values(config, sequences, flash)
        if not _near(kept, right):
            hint = _kept_hint(kept, config, sequences, flash)
            raise Wrong(f"for {what} the activations are {right:,.0f} bytes, not {kept:,.0f}{hint}")
        right = math.ceil(config.num_params() * per_parameter / device_bytes)
        if devices != right:
            raise Wrong(
                f"for {what} it takes {right} devices, not {devices:g}{_devices_hint(devices, right)}"
            )


def _three(given):
    if given is ...:
        raise NotImplementedError
    wanted = "return three numbers, bytes of the state, bytes of activations and devices"
    many = isinstance(given, (tuple, list)) or getattr(given, "ndim", 0) == 1  # a row of numpy or torch
    if not many or len(given) != 3:
        raise Wrong(f"{wanted}, not {shown(given)}")
    return [
        number(value, f"a number of {unit} as the {place} of three values")
        for value, unit, place in zip(
            given, ("bytes", "bytes", "devices"), ("first", "second", "third"), strict=True
        )
    ]


def _near(given, right):
    return abs(given - right) <= 1e-9 * right


def _slide_values(config, sequences, flash):
    B, N, H, D = sequences, config.n_layer, config.n_head, config.n_embd
    T, V = config.block_size, config.vocab_size
    scores = 0 if flash else B * N * H * T**2
    return 5 * N * B * T * D + scores + 2 * B * V * T + 2 * B * T * D + 2 * B * T


def _state_hint(given, right, config):
    N, D, P = config.n_layer, config.n_embd, config.num_params()
    guesses = {
        12 * N * D**2 / P: "; the embeddings, the head, biases and norms count too",
        (P - config.vocab_size * (D + 1)) / P: "; the head has a matrix and a bias of its own",
        (P - config.block_size * D) / P: "; the position embeddings are parameters too",
        round(P / 1e9) * 1e9 / P: "; do not round the number of parameters first",
        2.0**-30: "; that is in GiB, asked were bytes",
        1e-9: "; that is in GB, asked were bytes",
    }
    return next((hint for factor, hint in guesses.items() if factor and _near(given, right * factor)), "")


def _kept_hint(given, config, sequences, flash):
    right = _slide_values(config, sequences, flash)
    guesses = {
        right: "; those are values, and in bf16 each has 2 bytes",
        4 * right: "; that is float32, asked is bf16",
        2 * right / sequences: "; that is for one sequence",
        2 * _slide_values(config, sequences, not flash): (
            "; flash attention keeps no T^2 scores"
            if flash
            else "; without flash attention the T^2 scores are kept"
        ),
    }
    return next((hint for value, hint in guesses.items() if _near(given, value)), "")


def _devices_hint(given, right):
    if not given.is_integer():
        return ": devices come whole"
    if given == right - 1:
        return ": the last one is needed, however little is on it"
    if given == right + 1:
        return ": what fits exactly needs no further device"
    return ""


# ---- exercise 2 ----


@exercise(2, "which pieces to recompute")
def recompute_trade_off(answer, ranks=None):
    """`answer(pieces, budget)` -> names to recompute, the fewest FLOPs that respect the budget; None if none does."""
    for what, pieces, budget in _trade_offs():
        given = answer(list(pieces), budget)
        best = _cheapest(pieces, budget)
        if given is None:
            if best is not None:
                raise Wrong(
                    f"{what}: recomputing {_names(best)} fits into {budget:g} bytes, and the answer was None"
                )
            continue
        if given is ...:
            raise NotImplementedError
        if isinstance(given, (str, dict)) or not hasattr(given, "__iter__"):
            raise Wrong(f"return a set of names, not {shown(given)}")
        given = list(given)
        names = {piece.name for piece in pieces}
        for name in given:
            if not isinstance(name, str) or name not in names:
                raise Wrong(f"{what}: return a set of names; {shown(name)} is the name of no piece")
        chosen = set(given)
        kept = sum(piece.input if piece.name in chosen else piece.kept for piece in pieces)
        if best is None:
            raise Wrong(
                f"{what}: nothing fits into {budget:g} bytes, so the answer is None, not {_names(chosen)}"
            )
        if kept > budget:
            without_inputs = sum(piece.kept for piece in pieces if piece.name not in chosen)
            hint = "; a piece that is recomputed keeps its input" if without_inputs <= budget else ""
            raise Wrong(f"{what}: recomputing {_names(chosen)} keeps {kept:g} bytes of {budget:g}{hint}")
        cost, lowest = (sum(p.flops for p in pieces if p.name in names) for names in (chosen, best))
        if cost > lowest:
            raise Wrong(
                f"{what}: recomputing {_names(chosen)} fits, but costs {cost:g} FLOPs; {_names(best)} fits for {lowest:g}"
            )


def _trade_offs():
    equal = [Piece(f"block {i}", 16, 1, 10) for i in range(4)]
    yield "four equal blocks, and room for all", equal, 64
    yield "four equal blocks, and half of the bytes", equal, 34
    # the best price per byte frees too little, so that one needs the dear piece anyway
    yield "one large and two small pieces", [
        Piece("large", 110, 10, 100), Piece("small", 70, 10, 50), Piece("other", 50, 10, 40),
    ], 150  # fmt: skip
    yield "a piece whose input is larger than what it keeps", [
        Piece("norm", 5, 20, 1), Piece("mlp", 90, 10, 80), Piece("attention", 60, 10, 30),
    ], 85  # fmt: skip
    generator = torch.Generator().manual_seed(12)
    numbers = torch.randint(1, 100, (10, 3), generator=generator).tolist()
    yield (
        "ten unequal pieces",
        [Piece(f"p{i}", 20 + a, b // 5, c) for i, (a, b, c) in enumerate(numbers)],
        320,
    )
    yield "four equal blocks, and too little even for their inputs", equal, 3.5


def _cheapest(pieces, budget):
    """The set of names with the fewest FLOPs that fits, None if there is none."""
    found = None
    for chosen in itertools.product((False, True), repeat=len(pieces)):
        pairs = list(zip(pieces, chosen, strict=True))
        cost = sum(piece.flops for piece, again in pairs if again)
        if sum(piece.input if again else piece.kept for piece, again in pairs) <= budget and (
            found is None or cost < found[0]
        ):
            found = cost, {piece.name for piece, again in pairs if again}
    return found and found[1]


def _names(names):
    return ", ".join(sorted(names)) or "nothing"


# ---- exercise 3 ----


@exercise(3, "accumulation over uneven token counts")
def uneven_accumulation(answer, ranks=None):
    """`answer(model, micro_batches)` leaves the gradient of the mean over all counted tokens, one piece at a time."""
    for what, counts in _batches().items():
        micro_batches = _micro_batches(counts)
        expected = _full_batch(micro_batches)
        model, fresh = _Watched(), _Watched()
        answer(model, [(ids.clone(), targets.clone()) for ids, targets in micro_batches])
        if not all(map(torch.equal, model.parameters(), fresh.parameters())):
            raise Wrong(f"{what}: the weights have changed; leave gradients, and no step, behind")
        given = _gradient(model)
        if given is None:
            raise Wrong(f"{what}: some gradients are None; run a backward pass for each micro-batch")
        if not given.isfinite().all():
            raise Wrong(
                f"{what}: the gradients are not finite; the mean over a micro-batch without counted tokens is 0/0"
            )
        if (given - expected).abs().max() > CLOSE:
            raise Wrong(f"{what}: {_gradient_hint(given, expected, micro_batches)}")
        if model.largest > max(len(ids) for ids, _ in micro_batches):
            raise Wrong(
                f"{what}: right, but the model was given {model.largest} sequences at once, and a micro-batch has at most "
                f"{max(len(ids) for ids, _ in micro_batches)}: that is the memory of the whole batch"
            )
        if model.live.most > 1:
            raise Wrong(
                f"{what}: right, but the activations of {model.live.most} micro-batches were in memory at once; call "
                "backward before the next forward, and let it free the graph"
            )
        if model.forwards > len(micro_batches):
            raise Wrong(
                f"{what}: right, but {model.forwards} forward passes for {len(micro_batches)} micro-batches; count the "
                "tokens from the targets"
            )


def _batches():
    """Counted tokens of each micro-batch, out of 2 x 5."""
    return {
        "equal counts": (10, 10, 10),
        "uneven counts": (10, 3, 1),
        "a micro-batch of padding": (7, 0, 2),
        "one micro-batch": (4,),
    }


def _micro_batches(counts):
    made = []
    for i, count in enumerate(counts):
        generator = torch.Generator().manual_seed(100 + i)
        ids = torch.randint(7, (2, 5), generator=generator)
        targets = torch.randint(7, (2, 5), generator=generator)
        targets.view(-1)[count:] = IGNORED
        made.append((ids, targets))
    return made


class LiveGraphs:
    """Counts forward passes whose activations are in memory at the same time.

    live = LiveGraphs()
    logits = live.run(module, ids)     # module(ids)
    live.most                          # the most graphs that were alive at once, this one included

    A graph lives until a backward pass frees what it saved, so one that is retained does not count as done.
    """

    def __init__(self):
        self.alive, self.most = weakref.WeakSet(), 0

    def run(self, forward, *inputs):
        graph = _Graph()
        self.alive.add(graph)
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: (graph, saved), lambda kept: kept[1]):
            outputs = forward(*inputs)
        if outputs.requires_grad:  # else nothing keeps it
            self.most = max(self.most, len(self.alive))
        return outputs


class _Graph:
    """Of one forward pass: whatever it saves for backward holds this as well, and nobody else does."""


class _Watched(nn.Module):
    """A model of 7 symbols, in float64, that watches what it is given and what it keeps for backward."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.tokens, self.head = nn.Embedding(7, 6).double(), nn.Linear(6, 7).double()
        self.live, self.forwards, self.largest = LiveGraphs(), 0, 0

    def forward(self, ids):
        logits = self.live.run(lambda ids: self.head(torch.tanh(self.tokens(ids))), ids)
        if logits.requires_grad:
            self.forwards += 1
            self.largest = max(self.largest, len(ids))
        return logits


def _full_batch(micro_batches):
    """The gradient in one process with all of the batch in memory."""
    model = _Watched()
    ids, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=IGNORED).backward()
    return _gradient(model)


def _gradient(model):
    if any(p.grad is None for p in model.parameters()):
        return None
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def _gradient_hint(given, expected, micro_batches):
    k = len(micro_batches)
    counted = sum(int((targets != IGNORED).sum()) for _, targets in micro_batches)
    positions = sum(targets.numel() for _, targets in micro_batches)
    for factor, hint in {
        k: f"the gradients are {k} times too large: that is the sum of {k} means",
        1 / k: f"the gradients are {k} times too small: they were divided once too often",
        counted: f"the gradients are {counted} times too large: divide by the number of counted tokens",
        counted
        / positions: "positions that do not count were counted: divide by those whose target is not -100",
    }.items():
        if factor != 1 and (given - factor * expected).abs().max() <= CLOSE * max(1, factor):
            return hint
    means = _mean_of_means(micro_batches)
    if means is not None and (given - means).abs().max() <= CLOSE:
        return "that is the mean of the micro-batches' means: a micro-batch with few tokens weighs as much as one with many"
    return f"the gradients are off by {(given - expected).abs().max():.2g} from those of the whole batch"


def _mean_of_means(micro_batches):
    """The gradient of the widespread mistake; None where a mean does not exist."""
    if any((targets == IGNORED).all() for _, targets in micro_batches):
        return None
    model = _Watched()
    for ids, targets in micro_batches:
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        (loss / len(micro_batches)).backward()
    return _gradient(model)
