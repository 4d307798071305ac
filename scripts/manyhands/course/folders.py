"""Find the course's folders, write files atomically, and give a folder one writer."""

import errno
import fcntl
import os
import re
import secrets
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path


def _course():
    """Return the course around this package; if it was copied into an environment, the attendee's copy we are in."""
    around, here = Path(__file__).resolve().parents[3], Path.cwd()
    if not (around / "pyproject.toml").is_file():
        for folder in (here, here.parent):  # a notebook runs in notebooks/
            if (folder / "scripts" / "manyhands").is_dir():
                return folder
    return around


ROOT = _course()
SCRIPTS = ROOT / "scripts"
ASSETS = ROOT / "assets"
DATA = ROOT / "data"
VERSION = ".originals/version"  # of a copy, which has no git: the version that it was made from
WRITER = ".writer"
PATIENCE_S = 5  # a program that was just killed may take this long to release its folder


def named(path):
    """`path` with ~ and ~user as a shell reads them. Raises ValueError where there is no such user, or a pipe."""
    found = Path(os.path.expanduser(path))
    if str(found).startswith("~"):
        raise ValueError(f"{path} cannot be used: there is no user {found.parts[0][1:]}")
    if found.is_fifo():  # to open it would wait for another program
        raise ValueError(f"{path} cannot be used: it is a pipe; name a file")
    return found


def commit(root: Path = ROOT) -> str | None:
    """Return the course's commit at `root`, "1a2b3c4 with uncommitted changes" if files differ, or None."""
    git = ["git", "--no-optional-locks", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + (" with uncommitted changes" if changed.stdout.strip() else "")


def version(root: Path = ROOT) -> str:
    """Return the version of the course at `root`, with its commit if that is known: "1.0.0 (1a2b3c4)"."""
    if (root / VERSION).is_file():
        return (root / VERSION).read_text("utf-8").strip()
    project = root / "pyproject.toml"
    number = re.search(r'^version = "(.+)"', project.read_text("utf-8") if project.is_file() else "", re.MULTILINE)
    state = commit(root)
    return (number[1] if number else "unknown") + (f" ({state})" if state else "")


def script_of(lesson, root=ROOT):
    """The script of "02_collectives": that of the attendee's copy in which we are, else of the course itself.

    Raises FileNotFoundError where there is none.
    """
    here = Path.cwd()
    for folder in (here.parent / "scripts", here / "scripts", root / "scripts"):
        if (folder / f"{lesson}.py").exists():
            return folder / f"{lesson}.py"
    raise FileNotFoundError(f"there is no scripts/{lesson}.py")


def write_whole(path, content, mode=None):
    """Write text (UTF-8) or bytes so that a reader finds the old file or the new one, never half; returns the path.

    `mode`: its permissions, such as 0o644; None keeps those of the old file, or leaves them to the umask. Raises
    OSError, and leaves nothing beside it. A link stays a link: the file that it points to is written.
    """
    path = Path(path).resolve()
    # a name of its own: two users, two nodes or two lessons may do this at once
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        beside.touch(0o666 if mode is None else mode)
        # a name of a file that is no UTF-8 becomes \\udce9, which JSON reads as that name again
        beside.write_bytes(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
        if mode is not None:
            beside.chmod(mode)
        elif path.exists():
            shutil.copymode(path, beside)
        beside.replace(path)
    finally:
        with suppress(OSError):
            beside.unlink()
    return path


def make_private(folder):
    """Make a folder, and the parents that are missing, for this user alone: in a class each home may be open to all.

    What is there already keeps its modes. Raises OSError.
    """
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)  # parents=True would give the parents the usual modes
    folder.mkdir(exist_ok=True)  # an OSError if it is a file


def lock(folder, owner):
    """Make `folder`, and make it ours to write into: an open file that holds the lock until it is closed.

    The system lets go of it however the process ends. On a file system without locks nobody can be asked, and two
    writers are not noticed. Raises OSError; a BlockingIOError's strerror names the `owner` who holds it.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = open(Path(folder) / WRITER, "a+")  # noqa: SIM115 - it is held while the writer lives
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                break
            if time.monotonic() > deadline:
                file.seek(0)
                why = f"another program writes there until it ends: {file.read(200).strip() or 'unknown'}"
                raise BlockingIOError(errno.EAGAIN, why, str(folder)) from None
            time.sleep(0.2)
    file.truncate(0)
    file.write(f"{owner}\n")
    file.flush()
    os.fsync(file.fileno())
    return file
