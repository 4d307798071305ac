"""The corpus as a chat model sees it: tokens with the template's markers behind them, and speeches as messages."""

from dataclasses import replace

from manyhands.align.chat_template import encode, with_markers
from manyhands.align.tasks import speech_messages, speeches
from manyhands.config.options import OptionError
from manyhands.data.tokenizer import CharTokenizer


def chat_corpus(corpus, vocab):
    """`corpus` under the tokens of a model, markers included; its train_ids and val_ids are not of these."""
    return replace(corpus, tokenizer=CharTokenizer(with_markers(vocab)))


def encoded_words(task, words, vocab):
    """[(ids, answer)] of questions with their right answers. Raises OptionError for letters that the model does not know."""
    try:
        return [encode(task.messages(word, task.answer(word)), vocab) for word in words]
    except ValueError as error:
        raise OptionError(f"data.task={task.name}: {error}") from None


def encoded_speeches(corpus, longest):
    """([(ids, answer)] to learn from, and held out): the corpus's speeches that fit into `longest` tokens.

    Held out are those of the text's last tenth, as in pre-training. Speeches with tokens that the model does not know are
    left out.
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
