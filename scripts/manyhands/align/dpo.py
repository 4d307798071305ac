"""Direct preference optimisation (Rafailov et al. 2023, equation 7): prefer one answer to another.

Of two answers, prefer the chosen one by more than the reference does. Here the chosen one is the right answer, and the
rejected one a wrong answer that the reference gave itself.

    log_ratio_b = beta * ((log_p(chosen) - log_p(rejected)) - (reference's, likewise))
    loss = -log sigmoid(log_ratio_b), the mean over the pairs of all ranks

The policy and the frozen reference read every pair. The reference holds no gradients and no optimizer state, so it can
lie sharded over all ranks (`stage.reference`), whatever serves the policy. Shapes: b pairs, T targets.
"""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from manyhands.align.stage import Stage, own_draws, rows, shifted, token_log_probs
from manyhands.config.options import OptionError

HELD_OUT = 8  # one pair in 8 is not trained on
TIE = 1e-4  # nats: a margin this small is rounding, as in the first step, where the policy is the reference


def margins(chosen_b, rejected_b, reference_chosen_b, reference_rejected_b):
    """Return by how much more than the reference the policy prefers the chosen answer, in nats [b]; 0 at the start."""
    return (chosen_b - rejected_b) - (reference_chosen_b - reference_rejected_b)


def dpo_losses(margins_b, beta):
    """Return the loss of each pair [b]; ln 2 if the policy equals the reference."""
    return -F.logsigmoid(beta * margins_b)


class Preference(Stage):
    """Prefer the right answer."""

    def __init__(self, run):
        super().__init__(run)
        self.reference = self.frozen_start()
        pairs_N2T, answer_N2T = self._pairs()
        num_held_out = max(1, len(pairs_N2T) // HELD_OUT)
        self.learned = pairs_N2T[num_held_out:], answer_N2T[num_held_out:]
        self.held_out = pairs_N2T[:num_held_out], answer_N2T[:num_held_out]

    def _pairs(self):
        """(ids_N2T, answer_N2T), chosen first. The reference draws them, the same on all ranks and when resumed."""
        said = self._said()
        # an answer with a marker in it cannot be written as a message
        known = {word: text for word, text in said.items() if self.chat.knows(text)}
        wrong = {word: text for word, text in known.items() if not self.task.right(word, text)}
        if len(wrong) < 2:
            why = f"the model gives {len(wrong)} wrong answers to {len(said)} questions: there is nothing to prefer"
            raise OptionError(f"{why}; ask more dpo.questions, or choose a harder data.length")
        chosen = self.encoded_words(wrong)
        rejected = [self.chat.encode(self.task.messages(word, text)) for word, text in wrong.items()]
        return tuple(torch.stack(part.chunk(2), dim=1) for part in rows(chosen + rejected))

    def _said(self):
        """Return {word: an answer drawn from the reference}; each rank generates its share of the words."""
        questions, seed = self.wanted.dpo.questions, self.run.options.train.seed
        # the reference's ranks are all of them, whatever serves the policy
        rank, size = self.reference.data_rank, self.reference.data_size
        words = np.array_split(self.task.draw(questions, [seed, 2], held_out=False), size)[rank].tolist()
        uniform_bn = own_draws(seed, 0, questions, self.most, rank, size).to(self.run.ranks.device)
        answers, told = self.answers(self.reference, words, uniform_bn), [None] * size
        dist.all_gather_object(told, list(zip(words, answers, strict=True)))
        said = {}
        for word, text in (pair for each in told for pair in each):
            said.setdefault(word, text)  # a word may be drawn twice: its first answer counts
        return said

    def next_batch(self, step):
        """(ids_b2T, answer_b2T, the reference's log p of each answer [b, 2])."""
        pair_B = self.draws(step, len(self.learned[0]), self.run.options.train.global_batch)
        ids_b2T, answer_b2T = (self.own(part[pair_B]) for part in self.learned)
        self.numbers = {"margin": 0.0, "preferred": 0.0}
        return ids_b2T, answer_b2T, self._log_probs(self.reference.logits, ids_b2T, answer_b2T)

    def loss(self, model, ids_b2T, answer_b2T, reference_b2):
        # chosen and rejected in one forward: with FSDP each forward gathers all weights
        policy_b2 = self._log_probs(lambda ids: model(ids)[0], ids_b2T, answer_b2T)
        margins_b = margins(*policy_b2.unbind(1), *reference_b2.unbind(1))
        size = self.run.options.train.global_batch
        for name, sum_of in (("margin", margins_b.detach()), ("preferred", (margins_b > TIE).double())):
            self.numbers[name] += float(sum_of.sum()) * self.parallel.data_size / size
        return self.share(size) * dpo_losses(margins_b, self.wanted.dpo.beta).sum()

    def _log_probs(self, logits, ids_b2T, answer_b2T):
        """log p of whole answers [b, 2]: the *sum* over the positions that count, not their mean."""
        inputs_rT, targets_rT, mask_rT = shifted(ids_b2T.flatten(0, 1), answer_b2T.flatten(0, 1))
        return (token_log_probs(logits(inputs_rT), targets_rT) * mask_rT).sum(-1).view(-1, 2)

    @torch.no_grad()
    def held_out_loss(self):
        """Return the mean DPO loss of held-out pairs. Every rank evaluates all of them, as they are few."""
        ids_N2T, answer_N2T = (part.to(self.run.ranks.device) for part in self.held_out)
        policy_N2 = self._log_probs(self.parallel.logits, ids_N2T, answer_N2T)
        reference_N2 = self._log_probs(self.reference.logits, ids_N2T, answer_N2T)
        margins_N = margins(*policy_N2.unbind(1), *reference_N2.unbind(1))
        return float(dpo_losses(margins_N, self.wanted.dpo.beta).mean())
