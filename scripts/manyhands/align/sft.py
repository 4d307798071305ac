"""Supervised fine-tuning: words with their right answers, and speeches from the corpus."""

import torch

from manyhands.align.chat_template import encode
from manyhands.align.rollouts import masked_sum, rows, shifted
from manyhands.align.stage import Stage
from manyhands.align.tasks import speech_messages, speeches
from manyhands.config.options import OptionError

MOST_SPEECHES = 128  # on which the held-out loss is measured


class Imitation(Stage):
    """Imitate demonstrations."""

    def __init__(self, run):
        super().__init__(run)
        data, longest = self.wanted.data, run.config.block_size + 1
        demos = self.task.draw(data.demos, [run.options.train.seed, 1], held_out=False)
        learned, held_out = encoded_speeches(run.corpus, longest)
        self.num_speeches = round(data.speeches * run.options.train.global_batch)
        if self.num_speeches and not (learned and held_out):
            raise OptionError(
                f"data.speeches={data.speeches:g}, but the corpus has no speeches that this model can read; use 0"
            )
        words = self.encoded_words(demos)
        held_out_words = self.encoded_words(self.words)
        self.num_words = len(words)
        self.ids_NT, self.answer_NT = self._rows(words + learned, longest)
        self.held_out = self._rows(held_out_words + held_out[:MOST_SPEECHES] * bool(self.num_speeches), longest)

    def _rows(self, encoded, longest):
        try:
            return rows(encoded, longest)
        except ValueError as error:
            raise OptionError(f"data.length={self.wanted.data.length}: {error}") from None

    def next_batch(self, step):
        """(inputs_bT, targets_bT, mask_bT, how many targets count on all ranks)."""
        size, speeches = self.run.options.train.global_batch, self.num_speeches
        word_B = self.draws(step, self.num_words, size - speeches)
        row_B = word_B
        if speeches:
            speech_B = self.num_words + self.draws(step, len(self.ids_NT) - self.num_words, speeches, 1)
            row_B = torch.cat((word_B, speech_B))
        ids_BT, answer_BT = self.ids_NT[row_B], self.answer_NT[row_B]
        longest = int(answer_BT.any(0).nonzero().max()) + 1  # padding that all rows share is left out
        num_tokens = int(answer_BT[:, 1:].sum())  # all ranks hold the batch's mask: nothing is sent for it
        own = shifted(self.own(ids_BT[:, :longest]), self.own(answer_BT[:, :longest]))
        return *own, num_tokens

    def gradients(self, batch, timer):
        *tensors, num_tokens = batch

        def loss_of(model, inputs_bT, targets_bT, mask_bT):
            return self.share(num_tokens) * masked_sum(model(inputs_bT)[0], targets_bT, mask_bT)

        return self.parallel.forward_backward_by(loss_of, tensors, timer)

    @torch.no_grad()
    def held_out_loss(self):
        """Nats per token of the assistant, over words and speeches that it has not learned from."""
        inputs_bT, targets_bT, mask_bT = shifted(*map(self.own, self.held_out))
        own = masked_sum(self.parallel.logits(inputs_bT), targets_bT, mask_bT)
        num_tokens = int(self.held_out[1][:, 1:].sum())
        return self.mean({"loss": own * self.parallel.data_size})["loss"] / num_tokens


def encoded_speeches(corpus, longest):
    """([(ids, answer)] to learn from, and held out): the corpus's speeches that fit into `longest` tokens.

    Held out are those of the text's last tenth, as in pre-training. Speeches with tokens that the model does not know
    are left out.
    """
    cut = len(corpus.train_ids)
    both = []
    for text in (corpus.text[:cut], corpus.text[cut:]):
        found = []
        for speaker, line in speeches(text):
            try:
                ids, answer = encode(speech_messages(speaker, line), corpus.vocab)
            except ValueError:
                continue
            if len(ids) <= longest:
                found.append((ids, answer))
        both.append(found)
    return both
