"""Group relative policy optimisation (Shao et al. 2024, DeepSeekMath, section 4.1): G answers to each question, and an answer

is as good as its reward is above its group's mean. There is no value model.

    advantages_B = group_advantages(rewards_B, group=8)          # of all ranks' rewards: a group may lie on several
    terms_bT = grpo_terms(log_p_bT, old_log_p_bT, advantages_b, reference_log_p_bT, kl=0.02)
    loss = (terms_bT * mask_bT).sum() / num_tokens               # num_tokens: of all ranks

Every token of every answer counts alike (Yu et al. 2025, DAPO, section 3.3). A mean per rank or per micro-batch would weigh
the tokens of short answers more, and depend on how answers are dealt out (open-instruct#1161).
Shapes: B answers of all ranks, b of this one, T targets.
"""

import torch

TINY = 1e-4  # keeps the advantage finite where a group's rewards are nearly equal


def group_advantages(rewards_B, group, scale=True):
    """(reward - mean of its group) / (standard deviation + 1e-4) [B]; answers of one question lie side by side.

    A group in which all rewards are equal teaches nothing: its advantages are 0. `scale` False leaves the deviation out
    (Liu et al. 2025, Dr. GRPO). Raises ValueError for rewards that are no whole groups, or groups of one.
    """
    if group < 2 or rewards_B.numel() % group:
        raise ValueError(f"{rewards_B.numel()} rewards are no groups of {group}; use 2 or more, and a multiple of them")
    rewards_PG = rewards_B.view(-1, group)
    above_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    if scale:
        above_PG = above_PG / (rewards_PG.std(1, keepdim=True) + TINY)
    return above_PG.flatten()


def kl_terms(log_p_bT, reference_log_p_bT):
    """Of each token, an estimate >= 0 of the divergence from the reference: r - log r - 1, r = p_reference / p.

    Schulman 2020, "Approximating KL divergence", k3: its mean over the policy's own samples is KL(policy, reference).
    """
    log_r_bT = reference_log_p_bT - log_p_bT
    return log_r_bT.exp() - log_r_bT - 1


def grpo_terms(log_p_bT, old_log_p_bT, advantages_b, reference_log_p_bT=None, kl=0.0, clip=0.2):
    """The loss of each token [b, T]: the clipped ratio times the advantage, negative, and `kl` times the KL estimate.

    `old_log_p_bT`: of the policy that drew the answers, without gradient. With one update per draw the ratio is 1 and
    nothing is clipped, but its gradient is that of log p.
    """
    ratio_bT = (log_p_bT - old_log_p_bT).exp()
    advantages_b1 = advantages_b[:, None]
    gain_bT = torch.minimum(ratio_bT * advantages_b1, ratio_bT.clamp(1 - clip, 1 + clip) * advantages_b1)
    if kl == 0.0 or reference_log_p_bT is None:
        return -gain_bT
    return kl * kl_terms(log_p_bT, reference_log_p_bT) - gain_bT
