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


def rows(encoded, longest=None):
    """[(ids, answer)] of `chat_template.encode` as (ids_NT, answer_NT): padded behind with id 0, which no mask counts.

    Attention is causal: what stands behind an example changes nothing in it. Raises ValueError for one that is longer
    than `longest` (none: any).
    """
    T = max(len(ids) for ids, _ in encoded)
    if longest is not None and longest < T:
        raise ValueError(f"an example has {T} tokens and the model reads {longest}; use shorter ones")
    ids_NT = torch.zeros(len(encoded), T, dtype=torch.long)
    answer_NT = torch.zeros(len(encoded), T, dtype=torch.bool)
    for i, (ids, answer) in enumerate(encoded):
        ids_NT[i, : len(ids)] = torch.tensor(ids)
        answer_NT[i, : len(ids)] = torch.tensor(answer)
    return ids_NT, answer_NT


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
    `vocab_size` on, which stand for nothing, are never drawn. Every rank calls `logits` n times, so sharded weights are
    gathered by all alike.
    """
    b, P = prompts_bP.shape
    ids_bT = torch.cat((prompts_bP, prompts_bP.new_zeros(b, n)), dim=1)
    answer_bT = torch.zeros_like(ids_bT, dtype=torch.bool)
    rows_b, going_b = (torch.arange(b, device=ids_bT.device), torch.ones(b, dtype=torch.bool, device=ids_bT.device))
    longest = int(lengths_b.max()) if b else P
    for i in range(n):
        at_b = lengths_b + i
        # what stands behind a row's last token is not seen by it: attention is causal
        logits_bV = logits(ids_bT[:, : longest + i])[rows_b, at_b - 1, :vocab_size].double()
        if uniform_bn is None:
            next_b = logits_bV.argmax(-1)
        else:
            up_to_bV = (logits_bV / temperature).softmax(-1).cumsum(-1)
            next_b = torch.searchsorted(up_to_bV, uniform_bn[:, i : i + 1].to(up_to_bV).contiguous(), right=True)
            next_b = next_b.squeeze(1).clamp(max=logits_bV.shape[-1] - 1)
        ids_bT[rows_b, at_b] = torch.where(going_b, next_b, 0)
        answer_bT[rows_b, at_b] = going_b
        going_b = going_b & (next_b != end)
    return ids_bT, answer_bT


def texts(ids_bT, lengths_b, vocab, read):
    """The answers as texts: `read` (`chat_template.answered`) of the ids behind each prompt."""
    return [read(row[length:], vocab) for row, length in zip(ids_bT.tolist(), lengths_b.tolist(), strict=True)]
