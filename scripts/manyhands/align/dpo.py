"""Direct preference optimisation (Rafailov et al. 2023, equation 7): of two answers, prefer the chosen one, by more than the

reference does.

    log_ratio_b = beta * ((log_p(chosen) - log_p(rejected)) - (reference's, likewise))
    loss = -log sigmoid(log_ratio_b), the mean over the pairs of all ranks

The policy and the frozen reference read every pair. The reference holds no gradients and no optimizer state, so it can lie
sharded over all ranks (`policy.reference`), whatever serves the policy.
Shapes: b pairs, T targets.
"""

import torch.nn.functional as F


def sequence_log_probs(log_p_bT, mask_bT):
    """log p of whole answers [b]: the *sum* over the positions that count, not their mean."""
    return (log_p_bT * mask_bT).sum(-1)


def margins(chosen_b, rejected_b, reference_chosen_b, reference_rejected_b):
    """By how much more than the reference the policy prefers the chosen answer, in nats [b]. 0 at the start."""
    return (chosen_b - rejected_b) - (reference_chosen_b - reference_rejected_b)


def dpo_losses(margins_b, beta):
    """The loss of each pair [b]; ln 2 where the policy is the reference."""
    return -F.logsigmoid(beta * margins_b)
