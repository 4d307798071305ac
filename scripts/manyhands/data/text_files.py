"""Documents from files of text: plain text and JSON lines, each also as .gz.

    paths = find_files(["essays/", "posts.jsonl.gz"])          # a folder stands for the text files below it
    for raw in raw_documents(paths):                           # in the order of files and lines, numbered from 0
        text = text_of(raw)                                    # UTF-8, line ends as "\\n"

A plain text is cut into documents where `blank_lines` blank lines or more follow each other (0: a file is a document);
in JSON lines each line is one, in its field `text_field`. Cutting costs little, so that every rank can cut all files
and decode its own documents only: a document has the same number on any number of ranks.
"""

import contextlib
import gzip
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from manyhands.data.shakespeare import DataError

TEXTS, RECORDS = (".txt", ".text", ".md", ".rst"), (".jsonl", ".ndjson")
LONGEST_LINE = 16 * 2**20  # bytes; no prose has one, and a file without line ends would fill the memory
BLOCK = 2**20  # bytes that are read at once
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
    """The files that `names` (files and folders) stand for, [Path], a folder's in order. Raises DataError."""
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
    """Yield the RawDocuments of `paths` in order. Raises DataError for a file that is empty or cannot be read."""
    number = 0
    for path in paths:
        records = _kind(path) in (*RECORDS, ".json")
        before = number
        for line, begin, content in _records(path) if records else _texts(path, blank_lines):
            yield RawDocument(number, path, line, begin, content, text_field if records else None)
            number += 1
        if number == before:
            raise DataError(f"{path} is empty; leave it out")


def text_of(raw):
    """The text of a RawDocument. Raises DataError, with file and place, for what is no UTF-8 or no record with text."""
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
            f"{raw.path} is not UTF-8: byte {place:,} is 0x{error.object[error.start]:02x}; if it is Latin-1, "
            f"convert it: {_iconv(raw.path, 'latin1')}"
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


@contextlib.contextmanager
def _opened(path):
    """The file, unpacked, behind Windows' byte-order mark. Raises DataError for what fails inside."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            if file.read(len(UTF_8_MARK)) != UTF_8_MARK:
                file.seek(0)
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked ({error}); copy or pack it again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); leave it out") from None


def _refuse_line(path, number):
    raise DataError(
        f"{path} line {number:,} has more than {LONGEST_LINE:,} bytes without a line end; "
        f"break it into lines, or leave it out"
    )


def _records(path):
    """Yield (line, byte, content) of each line that is not blank."""
    with _opened(path) as file:
        begin = file.tell()
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
            if len(line) > LONGEST_LINE:
                _refuse_line(path, number)
            if line.strip():
                yield number, begin, line
            begin += len(line)


def _texts(path, blank_lines):
    """Yield (line, byte, content) of documents that end at `blank_lines` blank lines or more (0: at the file's end).

    By blocks and a regular expression: line by line, Python would take longer than all that comes after it.
    """
    gap = re.compile(rb"\n(?:[ \t\r\f\v]*\n){%d,}" % blank_lines) if blank_lines else None
    held, first = [], None  # the document that is not over, and where it begins
    blank = b""  # the blank lines at its end so far
    with _opened(path) as file:
        line, begin = 1, file.tell()  # of what is looked at next

        def add(piece):
            nonlocal first
            if not held:
                ahead = piece.rfind(b"\n", 0, len(piece) - len(piece.lstrip())) + 1  # blank lines in front
                first, piece = (line + piece.count(b"\n", 0, ahead), begin + ahead), piece[ahead:]
            if held or piece.strip():
                held.append(piece)

        for block in _blocks(file, path):
            block, start = blank + block, 0
            for stop, after in [m.span() for m in gap.finditer(block)] if gap else ():
                add(block[start:stop])
                if held:
                    yield *first, b"".join(held).rstrip()
                held.clear()
                line, begin, start = line + block.count(b"\n", start, after), begin + after - start, after
            body = block[start:].rstrip()
            add(body)
            stop = start + len(body) if held else len(block)
            line, begin, blank = line + block.count(b"\n", start, stop), begin + stop - start, block[stop:]
    if held:
        yield *first, b"".join(held).rstrip()


def _blocks(file, path):
    """Yield what is in `file`, cut at line ends."""
    number = 1
    while block := file.read(min(BLOCK, LONGEST_LINE)):
        number += block.count(b"\n")
        if not block.endswith(b"\n"):
            open_bytes = len(block) - block.rfind(b"\n") - 1
            rest = file.readline(LONGEST_LINE + 1)
            if open_bytes + len(rest) > LONGEST_LINE:
                _refuse_line(path, number)
            block, number = block + rest, number + 1
        yield block
