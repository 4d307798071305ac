"""Cut files of text into documents, and drop documents of low quality and copies.

    paths = find_files(["essays/", "posts.jsonl.gz"])          # a folder stands for the text files below it
    for raw in raw_documents(paths):                           # in the order of files and lines, numbered from 0
        text = text_of(raw)                                    # UTF-8, line ends as "\\n"
        why = Quality().why_dropped(text)                      # one of REASONS, or None
        exact, signature_K = content_hash(text), minhash(text)
    copies = copies_among(hashes, signatures)                  # {place: (the earlier one, "exact copy" or "near copy")}

A plain text is cut into documents where `blank_lines` blank lines or more follow each other (0: a file is a document);
in JSON lines each line is one, in its field `text_field`. Both may be packed as .gz. Cutting costs little, so that
every rank can cut all files and decode its own documents only: a document has the same number on any number of ranks.

Quality: four rules that one can check by eye, after Rae et al. 2021 (Gopher, appendix A), for any language.

Copies: the similarity of two documents is that of their sets of shingles (all runs of five words): common ones over all
(Jaccard). For a random order of all shingles, two sets have the same first one with just this probability (Broder
1997), so the share of K = 128 orders in which they agree estimates it, with a standard error of sqrt(s (1 - s) / 128):
0.035 at s = 0.8. Only pairs that agree in a whole band of 6 orders are compared at all: of 21 bands, at s = 0.8 one
pair in 600 has none.
"""

import functools
import gzip
import hashlib
import json
import mmap
import os
import re
import sys
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from manyhands.config.bounds import Count
from manyhands.data.schema import open_regular
from manyhands.data.shakespeare import DataError
from manyhands.launch.program import explained

TEXTS, RECORDS = (".txt", ".text", ".md", ".rst"), (".jsonl", ".ndjson")
UTF_8_MARK = b"\xef\xbb\xbf"
# the longer ones first: those of UTF-32 begin like those of UTF-16
BYTE_ORDER_MARKS = {
    b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32BE", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16BE"
}  # fmt: skip
REASONS = ("too short", "few letters", "repeated lines", "long runs")
RUN = 8  # this number of equal characters in a row is not a word
ORDERS, BANDS, ROWS = 128, 21, 6
SHINGLE = 5  # words
AT_ONCE = 512  # shingles times ORDERS numbers of 8 bytes stay in a core's cache

_words = re.compile(r"\w+").findall
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
# h -> a h + b mod 2^64 permutes all numbers if a is odd
_A_K, _B_K = np.random.default_rng(20_1997).integers(0, 2**64, (2, ORDERS), np.uint64)
_A_K |= np.uint64(1)


@dataclass(frozen=True)
class RawDocument:
    """A document as it lies in its file, not decoded yet."""

    number: int  # among all documents of all files
    path: Path
    line: int  # where it begins, from 1
    begin: int  # the byte at which it begins, of the unpacked file
    content: bytes
    field: str | None = None  # of JSON lines: where the text is


def find_files(names: Iterable[str | Path]) -> list[Path]:
    """Return the files that `names` (files and folders) stand for, a folder's in order. Raise DataError."""
    found, endings = [], (*TEXTS, *RECORDS)
    for path in (Path(os.path.expanduser(name)) for name in names):
        with explained(DataError, "check the name, or leave it out", path):
            path.stat()
            inside = [path]
            if path.is_dir():
                os.listdir(path)  # `rglob` says nothing of what it may not read
                inside = sorted(p for p in path.rglob("*") if _kind(p) in endings and p.is_file())
        if not inside:
            why = f"{path} is a folder without text files ({', '.join(endings)}, each also with .gz)"
            raise DataError(f"{why}; name the files themselves")
        found += inside
    return found


def raw_documents(paths: Iterable[Path], blank_lines: int = 2, text_field: str = "text") -> Iterator[RawDocument]:
    """Yield the documents of `paths` in order. Raise DataError for a file that is empty or cannot be read."""
    number = 0
    for path in paths:
        before, records = number, _kind(path) in (*RECORDS, ".json")
        # what lies between two documents; a file that is one has no such gap
        gap = b"\n" if records else rb"\n(?:[ \t\r\f\v]*\n){%d,}" % (blank_lines or 10**9)
        content, line = _content(path), 1
        if content.find(b"\n") < 0 and content.find(b"\r") >= 0:  # Macs until 2001, and Excel's export to this day
            content = content[:].replace(b"\r", b"\n")
        begin = len(UTF_8_MARK) if content[:3] == UTF_8_MARK else 0  # Windows puts it in front
        # the whole file at once: line by line, Python would take longer than for all that comes after it
        for end, after in chain((found.span() for found in re.finditer(gap, content)), [(len(content),) * 2]):
            piece = content[begin:end]
            if piece.strip():
                ahead = piece.rfind(b"\n", 0, len(piece) - len(piece.lstrip())) + 1  # blank lines in front
                first, field = line + piece.count(b"\n", 0, ahead), text_field if records else None
                yield RawDocument(number, path, first, begin + ahead, piece[ahead:].rstrip(), field)
                number += 1
            line += piece.count(b"\n") + content[end:after].count(b"\n")
            begin = after
        if number == before:
            raise DataError(f"{path} is empty; leave it out")


def _kind(path):
    """The suffix that says what is inside, lower case, without .gz."""
    return (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()


def _content(path):
    """Return a file's unpacked content. A file that is not packed is mapped, so that a node's ranks share it."""
    with explained(DataError, "leave it out", path), open_regular(path) as file:
        if path.suffix != ".gz":
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        try:
            return gzip.decompress(file.read())
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path} cannot be unpacked ({error}); copy or pack it again") from None


def text_of(raw: RawDocument) -> str:
    """The text of a document. Raise DataError, with file and place, for what is no UTF-8 or no record with text."""
    content, convert = raw.content, "convert it: iconv -f {} -t utf-8 " + f"{raw.path} > new.txt"
    name = next((name for mark, name in BYTE_ORDER_MARKS.items() if content.startswith(mark)), None)
    if raw.begin == 0 and name:
        raise DataError(f"{raw.path} is {name}, not UTF-8; {convert.format(name)}")
    if (at := content.find(b"\0")) >= 0:
        why = f"{raw.path} is not text: byte {raw.begin + at:,} is zero; extract its text first, or leave it out"
        raise DataError(why)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        why = f"{raw.path} is not UTF-8: byte {raw.begin + error.start:,} is 0x{content[error.start]:02x}"
        windows = any(0x80 <= byte < 0xA0 for byte in content)  # quotes and dashes there, control characters in Latin-1
        guess, name = ("Windows-1252", "cp1252") if windows else ("Latin-1", "latin1")
        raise DataError(f"{why}; if it is {guess}, {convert.format(name)}") from None
    return (text if raw.field is None else _text_in(text, raw)).replace("\r\n", "\n")


def _text_in(line, raw):
    """The field of a record that holds the text."""
    where = f"{raw.path} line {raw.line:,}"
    unpack = f"jq -c '.[]' {raw.path} > new.jsonl makes a record of each element"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        if line.strip().startswith("["):
            raise DataError(f"{where} begins a JSON array; {unpack}") from None
        why = f"{where} is not JSON ({error}); mend it, or rename the file to .txt if it is plain text"
        raise DataError(why) from None
    if isinstance(record, list):
        raise DataError(f"{where} is a JSON array, not a record; {unpack}")
    found = record.get(raw.field) if isinstance(record, dict) else None
    if not isinstance(found, str):
        fields = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        why = f"{where} has no text in its field {raw.field!r} (it has: {fields}); name another one with --text-field"
        raise DataError(why)
    # JSON can spell one half of a surrogate pair, which no UTF-8 can
    return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


Part = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


@dataclass(frozen=True)
class Quality:
    """The limits. A share of 0 (least) or 1 (most) turns its rule off."""

    min_characters: Count = 100
    min_letters: Part = 0.5  # of the characters that are not blank; letters of any script
    max_repeated: Part = 0.3  # of the characters stand in lines that the document has had before
    max_runs: Part = 0.2  # of the characters that are not blank stand in runs of RUN equal ones or more

    def why_dropped(self, text: str) -> str | None:
        """The first of REASONS that holds for `text`, or None."""
        if len(text.strip()) < max(1, self.min_characters):
            return "too short"
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        inked = points[~_blank()[points]]  # at least one: a blank text is too short
        if _letters()[inked].mean() < self.min_letters:
            return "few letters"
        if _repeated_share(text) > self.max_repeated:
            return "repeated lines"
        return "long runs" if _run_share(inked) > self.max_runs else None


@functools.cache
def _blank():
    """For each code point: is it blank?"""
    return np.fromiter((one.isspace() for one in map(chr, range(sys.maxunicode + 1))), bool)


@functools.cache
def _letters():
    """For each code point: is it a letter, or a mark on one?"""
    return np.fromiter((unicodedata.category(one)[0] in "LM" for one in map(chr, range(sys.maxunicode + 1))), bool)


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


def normalised(text: str) -> str:
    """`text` without what makes no difference: composed characters, each run of blanks one space."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def content_hash(text: str) -> bytes:
    """16 bytes of sha256."""
    return hashlib.sha256(text.encode()).digest()[:16]


def minhash(text: str) -> np.ndarray:
    """The MinHash signature of a text: uint32 [128], the same on every machine. Capitals make no difference."""
    words = _words(text.lower()) or [text]
    h_S = np.fromiter(map(_word_hash, words), np.uint64, len(words))
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


@functools.lru_cache(1_000_000)
def _word_hash(word):
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def similarity(one_K: np.ndarray, other_K: np.ndarray) -> np.ndarray:
    """The estimated similarity of two signatures, 0 to 1; of arrays [N, K] and [K]: [N]."""
    return (one_K == other_K).mean(axis=-1)


def copies_among(hashes: Sequence[bytes], signatures: np.ndarray, threshold: float = 0.8) -> dict[int, tuple[int, str]]:
    """{place: (place of the earlier document, "exact copy" or "near copy")}, for documents in order.

    `hashes`: their `content_hash`; `signatures`: uint32 [N, 128]. A document goes if one that stays, before it, is as
    similar as `threshold` by the estimate; above 1, only equal ones go.
    """
    found, first_with = {}, {}
    bands = {}  # (band, what stands there) -> places of documents that stay
    for place, content in enumerate(hashes):
        if content in first_with:
            found[place] = (first_with[content], "exact copy")
            continue
        first_with[content] = place
        if threshold > 1:
            continue
        keys = [(i, signatures[place, i * ROWS : (i + 1) * ROWS].tobytes()) for i in range(BANDS)]
        if maybe := sorted({candidate for key in keys for candidate in bands.get(key, ())}):
            near = similarity(signatures[maybe], signatures[place])
            if near.max() >= threshold:
                found[place] = (maybe[int(near.argmax())], "near copy")
                continue
        for key in keys:
            bands.setdefault(key, []).append(place)
    return found
