"""What an answer returned: read as a number, or shown to the learner in one short line."""

import math
import reprlib

from manyhands.checks import Wrong

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60  # characters


def shown(found):
    """A returned value and its type in one short line: the list [3, 4, 1]."""
    if found is None:
        return "None (is a `return` missing?)"
    kind = "text" if isinstance(found, str) else type(found).__name__
    return f"the {kind} {' '.join(_short.repr(found).split())}"


def number(found, wanted):
    """The finite number that an answer returned, as a float; one of numpy, torch or fractions will do.

    wanted: what to return, as "a number of bytes". Raises Wrong for None, text, lists, nan, ... and, for the `...` of
    an exercise as it is handed out, NotImplementedError.
    """
    if found is ...:
        raise NotImplementedError
    try:
        value = math.nan if isinstance(found, (str, bytes, bytearray, bool)) else float(found)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise Wrong(f"return {wanted}, not {shown(found)}")
    return value


def plain(given):
    """A value in one short line: with its type where that is not plain."""
    if given is None or isinstance(given, (bool, int, float)):
        return repr(given)
    text = " ".join(repr(given).split())
    return f"the {type(given).__name__} {text if len(text) < 80 else text[:76] + ' ...'}"
