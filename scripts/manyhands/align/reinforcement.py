"""The stage of group relative policy optimisation: every rank draws answers, a program judges them, and good ones get likelier.

A step draws train.global_batch answers, grpo.group of them to each question. The rows are dealt out like any batch, so a
group may lie on several ranks: rewards and lengths of all answers are gathered, a few bytes, before the advantages are taken.
"""

import torch
import torch.distributed as dist

from manyhands.align.chat_template import answered
from manyhands.align.grpo import group_advantages, grpo_terms, kl_terms
from manyhands.align.policy import reference
from manyhands.align.rollouts import own_draws, texts
from manyhands.align.sft import shifted, token_log_probs
from manyhands.align.stage import Stage


class Reinforcement(Stage):
    """See the module."""

    def __init__(self, run):
        super().__init__(run)
        wanted = self.wanted.grpo
        self.reference = reference(run.base, run.config, run.options, run.ranks) if wanted.kl else None
        self.reward = {"right": self.task.right, "in_order": self.task.in_order}[wanted.reward]

    def next_batch(self, step):
        """(ids_bT, answer_bT, advantages_b, the reference's log p [b, T - 1]) and how many tokens count on all ranks."""
        wanted, train = self.wanted.grpo, self.run.options.train
        size, seed = train.global_batch, train.seed
        rank, ranks = self.parallel.data_rank, self.parallel.data_size
        questions = self.task.draw(size // wanted.group, [seed, 3, step], held_out=False)
        words = [word for word in questions for _ in range(wanted.group)]
        own = words[rank * size // ranks : (rank + 1) * size // ranks]
        uniform_bn = own_draws(seed, step, size, self.most, rank, ranks).to(self.run.ranks.device)
        ids_bT, answer_bT, lengths_b = self.completions(self.parallel, own, uniform_bn, wanted.temperature)
        said = texts(ids_bT, lengths_b, self.vocab, answered)
        # an answer that has not come to its end is too long, and so worth nothing
        judged = [float(self.reward(word, text)) for word, text in zip(own, said, strict=True)]
        rewards_b = torch.tensor(judged, dtype=torch.float64)
        rewards_B, tokens_B = self._gathered(rewards_b, answer_bT.sum(1))
        advantages_B = group_advantages(rewards_B, wanted.group, wanted.scale)
        self._count(rewards_B, tokens_B)
        batch = [ids_bT, answer_bT, self.own(advantages_B)]
        if self.reference:
            batch.append(self._log_probs(self.reference.logits, ids_bT))
        return batch, int(tokens_B.sum())

    def _gathered(self, rewards_b, tokens_b):
        """(rewards_B, tokens_B) of all data ranks, in their order. One all-reduce: each rank adds zeros to the others' rows."""
        size = self.run.options.train.global_batch
        table_B2 = torch.zeros(size, 2, dtype=torch.float64, device=tokens_b.device)
        table_B2.tensor_split(self.parallel.data_size)[self.parallel.data_rank].copy_(
            torch.stack((rewards_b.to(tokens_b.device), tokens_b), dim=1)
        )
        dist.all_reduce(table_B2)
        return (table_B2 / self.run.layout.tensor).unbind(1)  # tensor ranks have the same rows

    def _count(self, rewards_B, tokens_B):
        rewards_PG = rewards_B.view(-1, self.wanted.grpo.group)
        self.numbers = {
            "reward": float(rewards_B.mean()),
            "length": float(tokens_B.mean()),
            "groups_that_teach": float((rewards_PG != rewards_PG[:, :1]).any(1).double().mean()),
            "kl": 0.0,
        }

    def _log_probs(self, logits, ids_bT):
        inputs_bT, targets_bT = ids_bT[:, :-1], ids_bT[:, 1:]
        return token_log_probs(logits(inputs_bT), targets_bT)

    def gradients(self, batch, timer):
        tensors, num_tokens = batch
        wanted, size = self.wanted.grpo, self.run.options.train.global_batch

        def loss_of(model, ids_bT, answer_bT, advantages_b, reference_bT=None):
            log_p_bT = self._log_probs(lambda ids: model(ids)[0], ids_bT)
            mask_bT = shifted(ids_bT, answer_bT)[2]
            if reference_bT is not None:
                nats = float((kl_terms(log_p_bT.detach(), reference_bT) * mask_bT).sum())
                self.numbers["kl"] += nats * self.parallel.data_size / size  # per answer
            terms_bT = grpo_terms(
                log_p_bT, log_p_bT.detach(), advantages_b.to(log_p_bT), reference_bT, wanted.kl, wanted.clip
            )
            return self.share(num_tokens) * (terms_bT * mask_bT).sum()

        return self.parallel.forward_backward_by(loss_of, tensors, timer)

    def held_out_loss(self):
        """The share of held-out words that it answers wrong."""
        return 1 - self.accuracy()[0]
