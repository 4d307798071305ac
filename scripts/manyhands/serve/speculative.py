"""Speculative decoding: a small model guesses, the large one checks several guesses at once, and nothing is changed.

    ids, told = speculate(target, draft, prompt, n=40, guesses=4, sampling=Sampling(0.8), seed=1)
    told.accepted / told.guessed               # the acceptance rate
    told.target_calls                          # calls of the large model: n without guesses

A guess x is kept with probability min(1, p(x) / q(x)); the first one that is not is replaced by a draw from
max(0, p - q), made to sum to 1. What is written then follows the large model's p exactly, whatever q is (Leviathan
et al. 2023, appendix A.1; Chen et al. 2023). p and q are what is *drawn from*: after temperature, top-k and top-p.
"""

from dataclasses import dataclass

import torch

from manyhands.serve.decoder import cached_logits
from manyhands.serve.kv_cache import KVCache
from manyhands.serve.sampler import Sampling, draw, probabilities, uniforms


@dataclass
class Told:
    """What a run of `speculate` counted."""

    guessed: int = 0
    accepted: int = 0
    target_calls: int = 0


def judged(guesses, q_GV, p_GV, numbers):
    """The symbols that are written: accepted guesses, then one drawn by the target. At least 1, at most G + 1.

    q_GV[i]: what guess i was drawn from. p_GV: the target's, one row more. `numbers`: 2 G + 1 in [0, 1), two for each guess.
    """
    written = []
    for i, guess in enumerate(guesses):
        if numbers[2 * i] * q_GV[i, guess] < p_GV[i, guess]:
            written.append(guess)
            continue
        rest_V = (p_GV[i] - q_GV[i]).clamp(min=0)
        return [*written, int(draw(rest_V[None], [numbers[2 * i + 1]]))]
    return [*written, int(draw(p_GV[len(guesses)][None], [numbers[-1]]))]


@torch.inference_mode()
def speculate(target, draft, prompt, n, guesses=4, sampling=Sampling(), seed=0):  # noqa: B008 - it is frozen
    """(prompt and n symbols as a list of ids, Told). Both models are GPTs with the same vocabulary, in eval mode.

    Raises ValueError if prompt and n do not fit into either model's block_size.
    """
    room = min(target.config.block_size, draft.config.block_size)
    if len(prompt) + n > room:
        raise ValueError(f"{len(prompt)} symbols and {n} more do not fit into {room}; ask for fewer")
    ids, told = list(prompt), Told()
    caches = KVCache(room), KVCache(room)
    numbers = iter(uniforms(seed, n * (3 * guesses + 1)))
    stop = len(prompt) + n
    while len(ids) < stop:
        G = min(guesses, stop - len(ids) - 1)  # the last symbol needs no guess: the target draws one in any case
        guessed, q_GV = _guesses(draft, caches[1], ids, G, sampling, numbers)
        logits_1TV = cached_logits(target, torch.tensor([(ids + guessed)[caches[0].length :]]), caches[0])
        p_GV = probabilities(logits_1TV[0, -G - 1 :], [sampling] * (G + 1))
        written = judged(guessed, q_GV, p_GV, [next(numbers) for _ in range(2 * G + 1)])
        ids += written
        for cache in caches:  # keys of guesses that were refused are wrong, and the last symbol has none yet
            cache.truncate(len(ids) - 1)
        told.guessed += G
        told.accepted += len(written) - 1
        told.target_calls += 1
    return ids, told


def _guesses(draft, cache, ids, G, sampling, numbers):
    """G guesses after `ids`, and the rows of probabilities that they were drawn from."""
    guessed, rows = [], []
    for _ in range(G):
        logits_1TV = cached_logits(draft, torch.tensor([(ids + guessed)[cache.length :]]), cache)
        rows.append(probabilities(logits_1TV[:, -1], [sampling])[0])
        guessed.append(int(draw(rows[-1][None], [next(numbers)])))
    return guessed, torch.stack(rows) if rows else None


def expected_per_call(acceptance, guesses):
    """Symbols per call of the target if each guess is accepted with the same probability (Leviathan et al. 2023, eq. 1)."""
    if acceptance == 1:
        return guesses + 1.0
    return (1 - acceptance ** (guesses + 1)) / (1 - acceptance)
