"""What a run refuses before it begins, beyond what `layout` knows."""

from manyhands.config.options import OptionError


def refuse_text(options, config, corpus):
    """Raises OptionError where the corpus has no window of block_size, or not the prompt's symbols."""
    least = min(len(corpus.train_ids), len(corpus.val_ids))
    if least <= config.block_size:
        raise OptionError(
            f"model.block_size={config.block_size} needs {config.block_size + 1} symbols and the corpus's smaller part has"
            f" {least}; use a smaller block_size"
        )
    try:
        corpus.encode(options.log.prompt)
    except ValueError as error:
        raise OptionError(f"log.prompt={options.log.prompt!r}: {error}") from None
