"""The text of a run: the course's, or one of your own (`--data.folder`)."""

from manyhands.config.options import OptionError
from manyhands.data.corpus import load_corpus
from manyhands.data.own_text import open_text
from manyhands.data.shakespeare import DataError


def corpus_of(options, ranks=None):
    """The corpus that `options.data` names, the same on all ranks. All ranks must call it.

    Raises OptionError, on all of them, for a folder that is no prepared text.
    """
    if options.data.folder is None:
        return load_corpus(ranks)
    try:
        return open_text(options.data.folder, ranks)
    except DataError as error:
        raise OptionError(f"data.folder: {error}") from None
