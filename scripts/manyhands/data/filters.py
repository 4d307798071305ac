"""What is dropped of a text: documents that are none to learn from, and those that say the same as an earlier one.

    why = Quality().why_dropped(text)                  # one of REASONS, or None
    clean = normalised(text)
    exact, signature_K = content_hash(clean), minhash(clean)
    copies = copies_among(hashes, signatures)          # {place: (the earlier one, "exact copy" or "near copy")}

Quality: four rules that one can check by eye, after Rae et al. 2021 (Gopher, appendix A), cut down to what holds for
any language.

Copies: the similarity of two documents is that of their sets of shingles (all runs of five words): common ones over all
(Jaccard). For a random order of all shingles, two sets have the same first one with just this probability (Broder
1997), so the share of K = 128 orders in which they agree estimates it, with a standard error of sqrt(s (1 - s) / 128):
0.035 at s = 0.8. Only pairs that agree in a whole band of 6 orders are compared at all: of 21 bands, at s = 0.8 one
pair in 600 has none.
"""

import functools
import hashlib
import re
import sys
import unicodedata
from dataclasses import dataclass

import numpy as np

REASONS = ("too short", "few letters", "repeated lines", "long runs")
RUN = 8  # so many equal characters in a row are no word
ORDERS, BANDS, ROWS = 128, 21, 6
SHINGLE = 5  # words
AT_ONCE = 512  # shingles times ORDERS numbers of 8 bytes stay in a core's cache
MOST_WORDS = 1_000_000  # of which hashes are kept

_words = re.compile(r"\w+").findall
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
# h -> a h + b mod 2^64 orders all numbers anew, where a is odd
_A_K, _B_K = np.random.default_rng(20_1997).integers(0, 2**64, (2, ORDERS), np.uint64)
_A_K |= np.uint64(1)


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
        if _repeated_share(text) > self.max_repeated:
            return "repeated lines"
        if _run_share(inked) > self.max_runs:
            return "long runs"
        return None


@functools.cache
def _table(kinds):
    """For each code point: is it a letter or a mark on one ("LM")? Or is it, for "Z", no blank?"""
    everything = map(chr, range(sys.maxunicode + 1))
    if kinds == "Z":
        return np.fromiter((not one.isspace() for one in everything), bool)
    return np.fromiter((unicodedata.category(one)[0] in kinds for one in everything), bool)


def _repeated_share(text):
    """The share of the characters that stand in lines which occurred before; blank lines count for nothing."""
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    total, once = (sum(map(len, some)) for some in (lines, set(lines)))
    return (total - once) / max(1, total)


def _run_share(points):
    """The share of `points`, an array of code points, that stand in runs of RUN equal ones or more."""
    ends = np.flatnonzero(np.append(points[1:] != points[:-1], True))
    lengths = np.diff(ends, prepend=-1)
    return float(lengths[lengths >= RUN].sum() / len(points))


def normalised(text):
    """`text` without what makes no difference: composed characters, each run of blanks one space."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def content_hash(text):
    """16 bytes of sha256."""
    return hashlib.sha256(text.encode()).digest()[:16]


def minhash(text):
    """The MinHash signature of a text: uint32 [128], the same on every machine. Capitals make no difference."""
    words = _words(text.lower()) or [text]
    h_S = np.fromiter(map(_hashes.__getitem__, words), np.uint64, len(words))
    size = min(SHINGLE, len(words))
    count = len(words) - size + 1
    shingle_S = h_S[:count].copy()
    for i in range(1, size):
        shingle_S = shingle_S * _FACTOR + h_S[i : i + count]
    shingle_S ^= shingle_S >> np.uint64(29)
    shingle_S *= _FACTOR
    shingle_S ^= shingle_S >> np.uint64(32)
    least_K = np.full(ORDERS, 2**64 - 1, np.uint64)
    for begin in range(0, count, AT_ONCE):
        placed_SK = shingle_S[begin : begin + AT_ONCE, None] * _A_K
        placed_SK += _B_K
        np.minimum(least_K, placed_SK.min(axis=0), out=least_K)
    return (least_K >> np.uint64(32)).astype(np.uint32)  # the upper half tells them apart


class _Hashes(dict):
    def __missing__(self, word):
        if len(self) >= MOST_WORDS:
            self.clear()
        found = self[word] = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        return found


_hashes = _Hashes()


def similarity(one_K, other_K):
    """The estimated similarity of two signatures, 0 to 1; of arrays [N, K] and [K]: [N]."""
    return (one_K == other_K).mean(axis=-1)


def copies_among(hashes, signatures, threshold=0.8):
    """{place: (place of the earlier document, "exact copy" or "near copy")}, for documents in order.

    `hashes`: their `content_hash`; `signatures`: uint32 [N, 128]. A document goes if one that stays, before it, is as
    similar as `threshold` by the estimate; above 1, only equal ones go.
    """
    found, first_with = {}, {}
    buckets = [{} for _ in range(BANDS)]  # of each band: what stands there -> places of documents that stay
    for place, content in enumerate(hashes):
        if content in first_with:
            found[place] = (first_with[content], "exact copy")
            continue
        first_with[content] = place
        if threshold > 1:
            continue
        keys = [signatures[place, i * ROWS : (i + 1) * ROWS].tobytes() for i in range(BANDS)]
        maybe = sorted({c for b, key in zip(buckets, keys, strict=True) for c in b.get(key, ())})
        if maybe:
            near = similarity(signatures[maybe], signatures[place])
            if near.max() >= threshold:
                found[place] = (maybe[int(near.argmax())], "near copy")
                continue
        for bucket, key in zip(buckets, keys, strict=True):
            bucket.setdefault(key, []).append(place)
    return found
