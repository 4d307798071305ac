"""Rows of tokens that are learned from, or drawn from the model itself: padded, masked, judged by their log p.

    ids_NT, answer_NT = rows([encode(messages, vocab) for messages in examples])
    inputs_bT, targets_bT, mask_bT = shifted(ids_bT, answer_bT)
    loss = masked_sum(logits_bTV, targets_bT, mask_bT) / num_tokens      # num_tokens: of all ranks

    uniform_bn = own_draws(seed, step, B, n, data_rank, data_size)
    ids_bT, answer_bT = complete(parallel.logits, prompt_ids_bP, lengths_b, n, end, uniform_bn)

The mask says of each *target* whether the assistant wrote it. Between ranks the number of such tokens differs, so a
rank divides by the global number, never by its own (transformers#34191).

A drawn token is the first one at which the cumulated probability passes a number between 0 and 1. Those numbers are
drawn for the whole batch from (seed, step), and a rank keeps its rows: which rank completes an answer does not change
it. Shapes: N examples, B rows of all ranks, b of this one, P tokens of the longest prompt, n drawn at most, T = P + n,
V tokens in the vocabulary.
"""

import numpy as np
import torch
import torch.nn.functional as F

from manyhands.gpt.sampling import Sampling, Sequence, write_next


def rows(encoded, longest=None, length=None):
    """[(ids, answer)] of `chat_template.encode` as (ids_NT, answer_NT): padded behind with id 0, which no mask counts.

    T is `length`, else that of the longest. Attention is causal: what stands behind an example changes nothing in it.
    Raises ValueError for one that is longer than `longest` (none: any).
    """
    T = length or max(len(ids) for ids, _ in encoded)
    if longest is not None and longest < T:
        raise ValueError(f"an example has {T} tokens and the model reads {longest}; use shorter ones")
    ids_NT = torch.tensor([ids + [0] * (T - len(ids)) for ids, _ in encoded])
    return ids_NT, torch.tensor([answer + [False] * (T - len(answer)) for _, answer in encoded])


def shifted(ids_bT, answer_bT):
    """(inputs, targets, mask), each [b, T - 1]: position t predicts token t + 1, counted if it is the assistant's."""
    return ids_bT[:, :-1], ids_bT[:, 1:], answer_bT[:, 1:]


def token_log_probs(logits_bTV, targets_bT):
    """log p(target) [b, T] in float32 at least."""
    if logits_bTV.dtype.itemsize < 4:
        logits_bTV = logits_bTV.float()
    return -F.cross_entropy(logits_bTV.flatten(0, 1), targets_bT.flatten(), reduction="none").view(targets_bT.shape)


def masked_sum(logits_bTV, targets_bT, mask_bT):
    """The sum, in nats, of the cross-entropy at the positions that the mask counts: a 0-dim tensor."""
    return -(token_log_probs(logits_bTV, targets_bT) * mask_bT).sum()


def own_draws(seed, step, num_rows, n, rank, size):
    """This rank's rows of [num_rows, n] numbers in [0, 1), float64, drawn from (seed, step)."""
    draw = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(step, 1)))
    return torch.from_numpy(np.array_split(draw.random((num_rows, n)), size)[rank])


@torch.no_grad()
def complete(logits, prompts_bP, lengths_b, n, end, uniform_bn=None, temperature=1.0, vocab_size=None):
    """(ids_bT, answer_bT): the prompts and n tokens behind each, and which the model has written: up to its end marker.

    `logits`: of ids [b, any length], [b, T, V]. Row i's prompt is its first lengths_b[i] ids. `end`: the id of the end
    marker; what would follow it is 0. `uniform_bn`: the draws; none: the likeliest token each time. Ids from
    `vocab_size` on, which stand for nothing, are never drawn. Every rank calls `logits` n times, whatever has ended, so
    sharded weights are gathered by all alike.
    """
    how = Sampling(temperature if uniform_bn is not None else 0)
    numbers = [[0.0] * n] * len(prompts_bP) if uniform_bn is None else uniform_bn.tolist()
    prompts = [ids[:length] for ids, length in zip(prompts_bP.tolist(), lengths_b.tolist(), strict=True)]
    texts_b = [Sequence(ids, n, how, row, {end}) for ids, row in zip(prompts, numbers, strict=True)]
    device, P = prompts_bP.device, max(map(len, prompts))
    for i in range(n):
        ids_bT, _ = rows([(text.ids, []) for text in texts_b], length=P + i)
        going = [j for j, text in enumerate(texts_b) if text.finish is None]
        last = [len(texts_b[j].ids) - 1 for j in going]
        # what stands behind a row's last token is not seen by it: attention is causal
        logits_bV = logits(ids_bT.to(device))[going, last, :vocab_size]
        if going:
            write_next([texts_b[j] for j in going], logits_bV)
    written = [(text.ids, [False] * text.prompt_length + [True] * len(text.drawn)) for text in texts_b]
    return tuple(part.to(device) for part in rows(written, length=prompts_bP.shape[1] + n))


def texts(ids_bT, lengths_b, vocab, read):
    """The answers as texts: `read` (`chat_template.answered`) of the ids behind each prompt."""
    return [read(row[length:], vocab) for row, length in zip(ids_bT.tolist(), lengths_b.tolist(), strict=True)]
