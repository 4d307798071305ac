"""Decoding: how a token is drawn, the plain loop, and the step with which texts of any lengths are written together.

    ids_BT = generate(parallel, prompt_BT, 200, generator=torch.Generator().manual_seed(seed))    # any number of ranks
    for next_B in continued(logits, prompt_BT, 200, context, drawing(temperature=0.8)): ...    # no trace in training

    p_BV = probabilities(logits_BV, [Sampling(temperature=0.8, top_p=0.9), Sampling(temperature=0)])
    ids_B = draw(p_BV, uniform_B)                  # uniform_B in [0, 1): one number per sequence
    sequence = Sequence(prompt_ids, max_tokens=40, sampling=Sampling(0.8), uniforms=uniforms(seed=7, n=40))
    ids = write_next([sequence, another], logits_BV)          # a token for each, whoever has computed the logits

The plain loop draws from a torch.Generator, so that a row's tokens depend on its neighbours. `write_next` gives each
token a number of its own: what a sequence says is the same whoever is written beside it, in a rollout of
`align` as in a server's batch. It draws in float64: the model's own rounding is enough.
Shapes: B sequences, T positions, V tokens in the vocabulary.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

LEAST = 1e-30  # the temperature below which all the probability is on the likeliest anyway


@dataclass(frozen=True)
class Sampling:
    """The settings for drawing tokens. Raises ValueError, with the cure, for a value that makes no sense."""

    temperature: float = 1.0  # 1: as the model has it; less: likelier tokens; 0: always the likeliest
    top_k: int | None = None  # keep only this number of most likely tokens; None: all
    top_p: float = 1.0  # among the fewest likeliest whose probabilities reach top_p together
    presence_penalty: float = 0.0  # taken from the logits of tokens that it has written
    frequency_penalty: float = 0.0  # and this for each time
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these ids
    logprobs: int | None = None  # record log p of each drawn token, and of this number of most likely ones

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature} is not a number >= 0; use 0 to 2")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} leaves nothing to draw; use 1 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is not in (0, 1]; use 1 to keep all tokens")

    @property
    def weighs(self) -> bool:
        """Return whether logits are changed before anything is drawn."""
        return bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)


def probabilities(logits_BV: torch.Tensor, samplings: list[Sampling]) -> torch.Tensor:
    """float64 [B, V] on the CPU: row b as samplings[b] asks for.

    Top-k comes first, then top-p among what it left (Holtzman et al. 2020, section 3.1): the token with which the sum
    reaches top_p is kept. With temperature 0 the whole row is on the first of the likeliest.
    """
    logits_BV = logits_BV.detach().to("cpu", torch.float64)
    temperature_B1 = torch.tensor([[s.temperature] for s in samplings], dtype=torch.float64)
    greedy_B1 = temperature_B1 == 0
    # with a smaller temperature the quotients would not be finite
    p_BV = torch.softmax(logits_BV / temperature_B1.masked_fill(greedy_B1, 1.0).clamp(min=LEAST), dim=-1)
    if any(s.top_k is not None or s.top_p < 1 for s in samplings):
        p_BV = _cut(p_BV, samplings)
    if greedy_B1.any():
        best_BV = torch.zeros_like(p_BV).scatter_(1, logits_BV.argmax(-1, keepdim=True), 1.0)
        p_BV = torch.where(greedy_B1, best_BV, p_BV)
    return p_BV


def _cut(p_BV, samplings):
    V = p_BV.shape[-1]
    sorted_BV, order_BV = p_BV.sort(dim=-1, descending=True, stable=True)
    top_k_B1 = torch.tensor([[s.top_k or V] for s in samplings])
    top_p_B1 = torch.tensor([[s.top_p] for s in samplings], dtype=torch.float64)
    sorted_BV = sorted_BV.masked_fill(torch.arange(V) >= top_k_B1, 0.0)
    total_B1 = sorted_BV.sum(-1, keepdim=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV  # what the likelier ones have together
    sorted_BV = sorted_BV.masked_fill((before_BV >= top_p_B1 * total_B1) & (top_p_B1 < 1), 0.0)
    sorted_BV = sorted_BV / sorted_BV.sum(-1, keepdim=True)
    return torch.zeros_like(p_BV).scatter_(1, order_BV, sorted_BV)


def draw(p_BV: torch.Tensor, uniform_B: list[float]) -> torch.Tensor:
    """Ids [B]: the first token at which row b's running sum exceeds uniform_B[b]. None of probability 0 is drawn."""
    sums_BV = p_BV.cumsum(-1)
    uniform_B1 = torch.as_tensor(uniform_B, dtype=torch.float64)[:, None]
    ids_B1 = torch.searchsorted(sums_BV, uniform_B1 * sums_BV[:, -1:], right=True)
    last_B1 = (sums_BV >= sums_BV[:, -1:]).to(torch.uint8).argmax(-1, keepdim=True)  # rounding must not go past it
    return torch.minimum(ids_B1, last_B1)[:, 0]


def uniforms(seed: int | None, n: int, which: int = 0) -> list[float]:
    """n numbers in [0, 1) that depend on the seed, and on which of its texts it is. None: drawn from the system."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(which,) * bool(which))).random(n).tolist()


@dataclass(eq=False)
class Sequence:
    """A text in the making: `ids` starts as the prompt and grows by what is drawn."""

    ids: list[int]
    max_tokens: int  # tokens to draw, at least 1
    sampling: Sampling = Sampling()
    uniforms: list[float] = field(default_factory=list)  # one number for each token that is drawn
    stop_ids: Collection[int] = frozenset()  # a drawn one of these ends it
    prompt_length: int = field(init=False)
    finish: str | None = field(default=None, init=False)  # "stop" or "length"
    # of each drawn token, if `sampling.logprobs` asks for it: log p, and {id: log p} of the likeliest
    logprobs: list[tuple[float, dict[int, float]]] = field(default_factory=list, init=False)

    def __post_init__(self):
        self.prompt_length = len(self.ids)

    @property
    def drawn(self) -> list[int]:
        """The tokens after the prompt."""
        return self.ids[self.prompt_length :]

    def append(self, next_id: int) -> None:
        """Take a token that was drawn; `finish` says whether it was the last one, and why."""
        self.ids.append(next_id)
        if next_id in self.stop_ids:
            self.finish = "stop"
        elif len(self.ids) == self.prompt_length + self.max_tokens:
            self.finish = "length"


def write_next(sequences: list[Sequence], logits_BV: torch.Tensor) -> list[int]:
    """One step of a batch: draw the next token of each sequence from its row of logits, and append it. The tokens."""
    numbers = [sequence.uniforms[len(sequence.ids) - sequence.prompt_length] for sequence in sequences]
    told = [(b, sequence) for b, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
    if told:  # the model's own, whatever is asked for
        log_p_BV = logits_BV.detach().to("cpu", torch.float64).log_softmax(-1)
    if any(sequence.sampling.weighs for sequence in sequences):
        logits_BV = torch.stack([_weighed(*pair) for pair in zip(logits_BV, sequences, strict=True)])
    ids = draw(probabilities(logits_BV, [sequence.sampling for sequence in sequences]), numbers).tolist()
    for sequence, next_id in zip(sequences, ids, strict=True):
        sequence.append(next_id)
    for b, sequence in told:
        best = log_p_BV[b].topk(min(sequence.sampling.logprobs, log_p_BV.shape[-1]))
        likeliest = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        sequence.logprobs.append((log_p_BV[b, ids[b]].item(), likeliest))
    return ids


def _weighed(logits_V, sequence):
    """The logits under OpenAI's penalties and biases."""
    how, logits_V = sequence.sampling, logits_V.detach().to("cpu", torch.float64)
    count_V = torch.tensor(sequence.drawn, dtype=torch.long).bincount(minlength=len(logits_V))
    logits_V = logits_V - how.frequency_penalty * count_V - how.presence_penalty * (count_V > 0)
    ids, biases = list(how.logit_bias), list(how.logit_bias.values())
    return logits_V.index_add(0, torch.tensor(ids, dtype=torch.long), torch.tensor(biases, dtype=torch.float64))


def generate(parallel, ids_BT, n, temperature=1.0, generator=None):
    """`ids_BT` [B, any length] and n sampled tokens after it, the same on all ranks. All ranks must call it.

    Every rank draws the same from its own `generator`: equal states on all ranks.
    """
    with parallel.gathered():
        return extended(parallel.logits, ids_BT, n, parallel.config.context, drawing(temperature, generator))


def extended(logits, ids_BT, n, context, draw):
    """`ids_BT` followed by n tokens, [B, T + n]: see `continued`."""
    return torch.cat([ids_BT, *(next_B[:, None] for next_B in continued(logits, ids_BT, n, context, draw))], dim=1)


def continued(logits: Callable, ids_BT: torch.Tensor, n: int, context: int, draw: Callable) -> Iterator[torch.Tensor]:
    """Yield the next token of each row, [B], n times.

    `logits`: of the last `context` ids, [B, T, V]; `draw`: of the last position's logits [B, V], ids [B].
    """
    for _ in range(n):
        next_B = draw(logits(ids_BT[:, -context:])[:, -1]).to(ids_BT.device)
        yield next_B
        ids_BT = torch.cat((ids_BT, next_B[:, None]), dim=1)


def drawing(temperature: float = 1.0, generator: torch.Generator | None = None, top_k: int | None = None) -> Callable:
    """A function logits_BV -> ids [B], drawn among the `top_k` likeliest (None: all).

    Draws from `generator` (None: a fresh one with seed 0), never torch's global one. Temperature 0: the likeliest.
    Raises ValueError for a negative one.
    """
    if temperature < 0:
        raise ValueError(f"temperature={temperature} is negative; use 0 for the most likely token, 1 to sample")
    generator = torch.Generator().manual_seed(0) if generator is None else generator

    def draw(logits_BV):
        if temperature == 0:
            return logits_BV.argmax(-1)
        if top_k is not None and top_k < logits_BV.shape[-1]:
            least_B1 = logits_BV.topk(top_k).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
        p_BV = F.softmax(logits_BV / max(temperature, LEAST), dim=-1)
        # drawn where the generator lives: with one on the CPU, a GPU samples as the CPU does
        return torch.multinomial(p_BV.to(generator.device), 1, generator=generator)[:, 0]

    return draw
