"""Documents from files of text: plain text and JSON lines, each also as .gz.

    paths = find_files(["essays/", "posts.jsonl.gz"])          # a folder stands for the text files below it
    for raw in raw_documents(paths):                           # in the order of files and lines, numbered from 0
        text = text_of(raw)                                    # UTF-8, line ends as "\\n"

A plain text is cut into documents where `blank_lines` blank lines or more follow each other (0: a file is a document); in JSON
lines each line is one, in its field `text_field`. Cutting costs little, so that every rank can cut all files and decode its
own documents only: a document has the same number on any number of ranks.
"""

import gzip
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from manyhands.data.shakespeare import DataError

TEXTS, RECORDS = (".txt", ".text", ".md", ".rst"), (".jsonl", ".ndjson")
LONGEST_LINE = 16 * 2**20  # bytes; no prose has one, and a file without line ends would fill the memory
UTF_8_MARK = b"\xef\xbb\xbf"
BYTE_ORDER_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16BE"}


@dataclass(frozen=True)
class RawDocument:
    """A document as it lies in its file, not decoded yet."""

    number: int  # among all documents of all files
    path: Path
    line: int  # where it begins, from 1
    begin: int  # the byte at which it begins, of the unpacked file
    content: bytes
    field: str | None = None  # of JSON lines: where the text is


def find_files(names):
    """The files that `names` (files and folders) stand for: [Path], folders in the order of their paths. Raises DataError."""
    found = []
    for path in map(Path, names):
        path = path.expanduser()
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if _kind(p) in (*TEXTS, *RECORDS) and p.is_file())
            if not inside:
                endings = ", ".join((*TEXTS, *RECORDS))
                raise DataError(
                    f"{path} is a folder without text files ({endings}, each also with .gz); name the files themselves"
                )
            found += inside
        elif not path.exists():
            raise DataError(f"{path} is not there; check the name")
        else:
            found.append(path)
    return found


def raw_documents(paths, blank_lines=2, text_field="text"):
    """Yield the RawDocuments of `paths` in order. Raises DataError for a file that is empty, cannot be read or unpacked."""
    number = 0
    for path in paths:
        records = _kind(path) in (*RECORDS, ".json")
        before = number
        lines = _lines(path)
        cut = _records(lines) if records else _texts(lines, blank_lines)
        for line, begin, content in cut:
            yield RawDocument(number, path, line, begin, content, text_field if records else None)
            number += 1
        if number == before:
            raise DataError(f"{path} is empty; leave it out")


def text_of(raw):
    """The text of a RawDocument. Raises DataError, naming file and place, for what is no UTF-8 or no record with text."""
    content = raw.content
    if raw.begin == 0 and (name := BYTE_ORDER_MARKS.get(content[:2])):
        raise DataError(f"{raw.path} is {name}, not UTF-8; convert it: {_iconv(raw.path, name)}")
    if (at := content.find(b"\0")) >= 0:
        raise DataError(
            f"{raw.path} is no text: byte {raw.begin + at:,} is zero; extract its text first, or leave it out"
        )
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        place = raw.begin + error.start
        raise DataError(
            f"{raw.path} is not UTF-8: byte {place:,} is 0x{error.object[error.start]:02x}; if it is Latin-1, convert it: "
            f"{_iconv(raw.path, 'latin1')}"
        ) from None
    if raw.field is not None:
        text = _field_of(text, raw)
    return text.replace("\r\n", "\n")


def _iconv(path, encoding):
    return f"iconv -f {encoding} -t utf-8 {path} > new.txt"


def _field_of(text, raw):
    where = f"{raw.path} line {raw.line:,}"
    try:
        record = json.loads(text)
    except ValueError as error:
        raise DataError(
            f"{where} is no JSON ({error}); mend it, or rename the file to .txt if it is plain text"
        ) from None
    except RecursionError:
        raise DataError(f"{where} is JSON that is nested too deeply; leave the line out") from None
    found = record.get(raw.field) if isinstance(record, dict) else None
    if not isinstance(found, str):
        fields = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise DataError(
            f"{where} has no text in its field {raw.field!r} (it has: {fields}); name another one with --text-field"
        )
    # JSON can spell one half of a surrogate pair, which no UTF-8 can
    return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _kind(path):
    """The suffix that says what is inside, lower case, without .gz."""
    path = Path(path)
    return (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()


def _lines(path):
    """Yield (number from 1, byte at which it begins, line with its end). Raises DataError."""
    begin = 0
    try:
        with gzip.open(path) if Path(path).suffix == ".gz" else open(path, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
                if len(line) > LONGEST_LINE:
                    raise DataError(
                        f"{path} line {number:,} has more than {LONGEST_LINE:,} bytes without a line end; "
                        "break it into lines, or leave it out"
                    )
                if number == 1 and line.startswith(UTF_8_MARK):  # editors of Windows put it in front
                    line, begin = line[len(UTF_8_MARK) :], len(UTF_8_MARK)
                yield number, begin, line
                begin += len(line)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked ({error}); copy or pack it again") from None
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or os.strerror(error.errno or 5)}); leave it out"
        ) from None


def _texts(lines, blank_lines):
    """Yield (line, byte, content) of documents that end at `blank_lines` blank lines or more (0: at the file's end)."""
    held, blank, first = [], 0, (1, 0)
    for number, begin, line in lines:
        if not line.strip():
            blank += 1
        elif held and blank_lines and blank >= blank_lines:
            yield *first, b"".join(held).rstrip()
            held, blank = [], 0
        else:
            blank = 0
        if held or line.strip():
            if not held:
                first = number, begin
                blank = 0
            held.append(line)
    if held:
        yield *first, b"".join(held).rstrip()


def _records(lines):
    """Yield (line, byte, content) of each line that is not blank."""
    for number, begin, line in lines:
        if line.strip():
            yield number, begin, line
