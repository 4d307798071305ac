"""Is this a text to learn from? Four rules that one can check by eye; each says what it drops.

    why = Quality().why_dropped(text)        # one of REASONS, or None

After the rules of Rae et al. 2021 (Gopher, appendix A), cut down to what holds for any language.
"""

import functools
import sys
import unicodedata
from dataclasses import dataclass

import numpy as np

REASONS = ("too short", "few letters", "repeated lines", "long runs")
RUN = 8  # so many equal characters in a row are no word


@dataclass(frozen=True)
class Quality:
    """The limits. A share of 0 (least) or 1 (most) turns its rule off."""

    min_characters: int = 100
    min_letters: float = 0.5  # of the characters that are not blank; letters of any script
    max_repeated: float = 0.3  # of the characters stand in lines that the document has had before
    max_runs: float = 0.2  # of the characters that are not blank stand in runs of RUN equal ones or more

    def why_dropped(self, text):
        """The first of REASONS that holds for `text`, or None."""
        if len(text.strip()) < max(1, self.min_characters):
            return "too short"
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        inked = points[_table("Z")[points]]  # at least one: a blank text is too short
        if _table("LM")[inked].mean() < self.min_letters:
            return "few letters"
        if repeated_share(text) > self.max_repeated:
            return "repeated lines"
        if run_share(inked) > self.max_runs:
            return "long runs"
        return None


@functools.cache
def _table(kinds):
    """For each code point: is it a letter or a mark on one ("LM")? Or is it, for "Z", no blank?"""
    everything = map(chr, range(sys.maxunicode + 1))
    if kinds == "Z":
        return np.fromiter((not one.isspace() for one in everything), bool)
    return np.fromiter((unicodedata.category(one)[0] in kinds for one in everything), bool)


def repeated_share(text):
    """The share of the characters that stand in lines which occurred before; blank lines count for nothing."""
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    seen, repeated = set(), 0
    for line in lines:
        if line in seen:
            repeated += len(line)
        seen.add(line)
    return repeated / max(1, sum(map(len, lines)))


def run_share(points):
    """The share of `points`, an array of code points, that stand in runs of RUN equal ones or more."""
    if len(points) < RUN:
        return 0.0
    ends = np.flatnonzero(np.append(points[1:] != points[:-1], True))
    lengths = np.diff(ends, prepend=-1)
    return float(lengths[lengths >= RUN].sum() / len(points))
