"""Group relative policy optimisation (Shao et al. 2024, DeepSeekMath, section 4.1): answers that a program judges.

G answers are drawn to each question, and an answer is as good as its reward is above its group's mean.

    advantages_B = group_advantages(rewards_B, group=8)          # of all ranks' rewards: a group may lie on several
    terms_bT = grpo_terms(log_p_bT, old_log_p_bT, advantages_b, reference_log_p_bT, kl=0.02)
    loss = (terms_bT * mask_bT).sum() / num_tokens               # num_tokens: of all ranks

Every token of every answer counts alike (Yu et al. 2025, DAPO, section 3.3). A mean per rank or per micro-batch would
weigh the tokens of short answers more, and depend on how answers are dealt out (open-instruct#1161).

A step draws train.global_batch answers, grpo.group of them to each question. The rows are dealt out like any batch, so
a group may lie on several ranks: rewards and lengths of all answers are gathered, a few bytes, before the advantages
are taken. Shapes: B answers of all ranks, b of this one, T targets.
"""

import torch
import torch.distributed as dist

from manyhands.align.stage import Stage, own_draws, token_log_probs

TINY = 1e-4  # keeps the advantage finite where a group's rewards are nearly equal


def group_advantages(rewards_B, group, scale=True):
    """(reward - mean of its group) / (standard deviation + 1e-4) [B]; answers of one question lie side by side.

    A group in which all rewards are equal teaches nothing: its advantages are 0. `scale` False leaves the deviation out
    (Liu et al. 2025, Dr. GRPO). Raise ValueError for rewards that are no whole groups, or groups of one.
    """
    if group < 2 or rewards_B.numel() % group:
        raise ValueError(f"{rewards_B.numel()} rewards are no groups of {group}; use 2 or more, and a multiple of them")
    rewards_PG = rewards_B.view(-1, group)
    above_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    if scale:
        above_PG = above_PG / (rewards_PG.std(1, keepdim=True) + TINY)
    return above_PG.flatten()


def kl_terms(log_p_bT, reference_log_p_bT):
    """Return the per-token KL estimate (k3), always >= 0: r - log r - 1 with r = p_reference / p.

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


class Reinforcement(Stage):
    """A method that draws answers, judges them and makes good ones more likely."""

    def __init__(self, run):
        super().__init__(run)
        wanted = self.wanted.grpo
        self.reference = self.frozen_start() if wanted.kl else None
        self.reward = {"right": self.task.right, "in_order": self.task.in_order}[wanted.reward]

    def next_batch(self, step):
        """[ids_bT, answer_bT, advantages_b, and with `grpo.kl` the reference's log p [b, T - 1]]."""
        wanted, train = self.wanted.grpo, self.run.options.train
        size, seed = train.global_batch, train.seed
        rank, ranks = self.parallel.data_rank, self.parallel.data_size
        questions = self.task.draw(size // wanted.group, [seed, 3, step], held_out=False)
        words = [word for word in questions for _ in range(wanted.group)]
        own = words[rank * size // ranks : (rank + 1) * size // ranks]
        uniform_bn = own_draws(seed, step, size, self.most, rank, ranks).to(self.run.ranks.device)
        ids_bT, answer_bT, lengths_b = self.completions(self.parallel, own, uniform_bn, wanted.temperature)
        said = self.read(ids_bT, lengths_b)
        # an answer that has not come to its end is too long, and so worth nothing
        judged = [float(self.reward(word, text)) for word, text in zip(own, said, strict=True)]
        rewards_b = torch.tensor(judged, dtype=torch.float64)
        rewards_B, tokens_B = self._gathered(rewards_b, answer_bT.sum(1))
        advantages_B = group_advantages(rewards_B, wanted.group, wanted.scale)
        rewards_PG = rewards_B.view(-1, wanted.group)
        self.numbers = {
            "reward": float(rewards_B.mean()),
            "length": float(tokens_B.mean()),
            "groups_that_teach": float((rewards_PG != rewards_PG[:, :1]).any(1).double().mean()),
            "kl": 0.0,
        }
        batch = [ids_bT, answer_bT, self.own(advantages_B)]
        if self.reference:
            batch.append(self._log_probs(self.reference.logits, ids_bT))
        self.num_tokens = int(tokens_B.sum())
        return batch

    def _gathered(self, rewards_b, tokens_b):
        """(rewards_B, tokens_B) of all data ranks, by one all-reduce: each rank adds zeros to the others' rows."""
        table_b2 = torch.stack((rewards_b.to(tokens_b.device), tokens_b), dim=1)
        table_B2 = table_b2.new_zeros(self.run.options.train.global_batch, 2)
        table_B2.tensor_split(self.parallel.data_size)[self.parallel.data_rank].copy_(table_b2)
        dist.all_reduce(table_B2)
        return (table_B2 / self.run.layout.tensor).unbind(1)  # tensor ranks have the same rows

    def _log_probs(self, logits, ids_bT):
        inputs_bT, targets_bT = ids_bT[:, :-1], ids_bT[:, 1:]
        return token_log_probs(logits(inputs_bT), targets_bT)

    def loss(self, model, ids_bT, answer_bT, advantages_b, reference_bT=None):
        wanted, size = self.wanted.grpo, self.run.options.train.global_batch
        log_p_bT = self._log_probs(lambda ids: model(ids)[0], ids_bT)
        old_bT, mask_bT = log_p_bT.detach(), answer_bT[:, 1:]
        if reference_bT is not None:
            nats = float((kl_terms(old_bT, reference_bT) * mask_bT).sum())
            self.numbers["kl"] += nats * self.parallel.data_size / size  # per answer
        terms_bT = grpo_terms(log_p_bT, old_bT, advantages_b.to(log_p_bT), reference_bT, wanted.kl, wanted.clip)
        return self.share(self.num_tokens) * (terms_bT * mask_bT).sum()

    def held_out_loss(self):
        """Return the share of held-out words with a wrong answer."""
        return 1 - self.accuracy()[0]
