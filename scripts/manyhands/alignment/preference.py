"""The stage of direct preference optimisation: the right answer against a wrong one that the reference gave itself."""

import torch
import torch.distributed as dist

from manyhands.alignment.chat_corpus import encoded_words
from manyhands.alignment.dpo import dpo_losses, margins, sequence_log_probs
from manyhands.alignment.policy import reference
from manyhands.alignment.rollouts import own_draws
from manyhands.alignment.sft import rows, shifted, token_log_probs
from manyhands.alignment.stage import Stage
from manyhands.config.options import OptionError

HELD_OUT = 8  # one pair in so many is not learned from
TIE = 1e-4  # nats: a margin this small is rounding, as in the first step, where the policy is the reference


class Preference(Stage):
    """See the module."""

    def __init__(self, run):
        super().__init__(run)
        self.reference = reference(run.base, run.config, run.options, run.ranks)
        pairs_N2T, answer_N2T = self._pairs()
        num_held_out = max(1, len(pairs_N2T) // HELD_OUT)
        self.learned = pairs_N2T[num_held_out:], answer_N2T[num_held_out:]
        self.held_out = pairs_N2T[:num_held_out], answer_N2T[:num_held_out]

    def _pairs(self):
        """(ids_N2T, answer_N2T), chosen first, the same on all ranks; the reference draws, so a resumed run finds the same."""
        data, seed = self.wanted.dpo, self.run.options.train.seed
        words = self.task.draw(data.questions, [seed, 2], held_out=False)
        # the reference's ranks are all of them: each asks its share of the words
        rank, size = self.reference.data_rank, self.reference.data_size
        own = words[rank::size] + words[:1] * (
            -(-len(words) // size) - len(words[rank::size])
        )  # as many for each
        uniform_bn = own_draws(seed, 0, len(words), self.task.length + 2, 0, 1)
        place = {word: i for i, word in reversed(list(enumerate(words)))}
        answers = self.answers(
            self.reference, own, uniform_bn[[place[word] for word in own]].to(self.run.ranks.device)
        )
        told = [None] * size
        dist.all_gather_object(told, dict(zip(own, answers, strict=True)))
        said = {word: answer for each in told for word, answer in each.items()}
        wrong = [word for word in dict.fromkeys(words) if not self.task.right(word, said[word])]
        wrong = [word for word in wrong if set(said[word]) <= set(self.symbols)]
        if len(wrong) < 2:
            raise OptionError(
                f"the model answers {len(said) - len(wrong)} of {len(said)} questions right: there is nothing to prefer; ask"
                " more dpo.questions, or choose a harder data.length"
            )
        chosen = encoded_words(self.task, wrong, self.symbols)
        rejected = self._encoded(wrong, said)
        ids_NT, answer_NT = rows(chosen + rejected)
        return tuple(torch.stack(part.chunk(2), dim=1) for part in (ids_NT, answer_NT))

    def _encoded(self, words, said):
        from manyhands.alignment.chat_template import encode

        return [encode(self.task.messages(word, said[word]), self.symbols) for word in words]

    def next_batch(self, step):
        """(ids_b2T, answer_b2T, the reference's log p of each answer [b, 2])."""
        pair_B = self.draws(step, len(self.learned[0]), self.run.options.train.global_batch)
        ids_b2T, answer_b2T = (self.own(part[pair_B]) for part in self.learned)
        return ids_b2T, answer_b2T, self._log_probs(self.reference.logits, ids_b2T, answer_b2T)

    def gradients(self, batch, timer):
        self.numbers, size = {"margin": 0.0, "preferred": 0.0}, self.run.options.train.global_batch

        def loss_of(model, ids_b2T, answer_b2T, reference_b2):
            # chosen and rejected in one forward: with FSDP each forward gathers all weights
            policy_b2 = self._log_probs(lambda ids: model(ids)[0], ids_b2T, answer_b2T)
            margins_b = self._margins(policy_b2, reference_b2)
            for name, sum_of in (("margin", margins_b.detach()), ("preferred", (margins_b > TIE).double())):
                self.numbers[name] += float(sum_of.sum()) * self.parallel.data_size / size
            return self.share(size) * dpo_losses(margins_b, self.wanted.dpo.beta).sum()

        return self.parallel.forward_backward_by(loss_of, batch, timer)

    def _log_probs(self, logits, ids_b2T, answer_b2T):
        inputs_rT, targets_rT, mask_rT = shifted(ids_b2T.flatten(0, 1), answer_b2T.flatten(0, 1))
        return sequence_log_probs(token_log_probs(logits(inputs_rT), targets_rT), mask_rT).view(-1, 2)

    def _margins(self, policy_b2, reference_b2):
        return margins(policy_b2[:, 0], policy_b2[:, 1], reference_b2[:, 0], reference_b2[:, 1])

    @torch.no_grad()
    def held_out_loss(self):
        """The mean DPO loss of pairs that it has not learned from. Every rank reads them all: they are few."""
        ids_N2T, answer_N2T = (part.to(self.run.ranks.device) for part in self.held_out)
        policy_N2, reference_N2 = (
            self._log_probs(model.logits, ids_N2T, answer_N2T) for model in (self.parallel, self.reference)
        )
        return float(dpo_losses(self._margins(policy_N2, reference_N2), self.wanted.dpo.beta).mean())
