"""Supervised fine-tuning: examples as padded rows, the loss mask, and a loss whose mean is the global batch's.

    ids_NT, answer_NT = rows([encode(messages, vocab) for messages in examples])
    inputs_bT, targets_bT, mask_bT = shifted(ids_bT, answer_bT)
    loss = masked_sum(logits_bTV, targets_bT, mask_bT) / num_tokens      # num_tokens: of all ranks

The mask says of each *target* whether the assistant wrote it. Between ranks the number of such tokens differs, so a rank
divides by the global number, never by its own (transformers#34191).
Shapes: N examples, b of this rank's share, T tokens (T - 1 once they are shifted), V in the vocabulary.
"""

import torch
import torch.nn.functional as F


def rows(encoded, longest=None):
    """[(ids, answer)] of `chat_template.encode` as (ids_NT, answer_NT): padded behind with id 0, which no mask counts.

    Attention is causal: what stands behind an example changes nothing in it. Raises ValueError for one that is longer than
    `longest` (none: any).
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
    """(inputs, targets, mask), each [b, T - 1]: position t predicts token t + 1, and counts if the assistant wrote *that*."""
    return ids_bT[:, :-1], ids_bT[:, 1:], answer_bT[:, 1:]


def token_log_probs(logits_bTV, targets_bT):
    """log p(target) [b, T] in float32 at least."""
    if logits_bTV.dtype.itemsize < 4:
        logits_bTV = logits_bTV.float()
    return -F.cross_entropy(logits_bTV.flatten(0, 1), targets_bT.flatten(), reduction="none").view(targets_bT.shape)


def masked_sum(logits_bTV, targets_bT, mask_bT):
    """The sum, in nats, of the cross-entropy at the positions that the mask counts: a 0-dim tensor."""
    return -(token_log_probs(logits_bTV, targets_bT) * mask_bT).sum()
