"""A folder of checkpoints as one process, rank 0, changes it: who may write, what is left over, what is kept.

Nothing here communicates. The order of renames is such that a kill between any two of them leaves, of each step, the
old checkpoint or the new one, complete and under a name that `manifest.steps_in` lists.
"""

import errno
import fcntl
import os
import shutil
import time
from contextlib import suppress

from manyhands.checkpoint.manifest import (
    CheckpointError,
    read_manifest,
    step_folder,
    step_of,
    steps_in,
    sync_folder,
    write_manifest,
)

PATIENCE_S = 5  # a run that was just killed may take so long to let go of its folder


def lock(folder, owner):
    """Make `folder`, and make it ours to write into: an open file that holds the lock until it is closed.

    The system lets go of it however the process ends. On a file system without locks nobody can be asked, and two runs
    in one folder are not noticed. `owner` is what the other run is told. Raises CheckpointError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".writer", "a+")  # noqa: SIM115 - it is held while the run lives
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror}; name another folder") from None
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
                raise CheckpointError(
                    f"another run ({file.read().strip() or 'unknown'}) writes its checkpoints into {folder}; wait"
                    " until it"
                    " ends, or name another folder"
                ) from None
            time.sleep(0.2)
    file.truncate(0)
    file.write(f"{owner}\n")
    file.flush()
    os.fsync(file.fileno())
    return file


def make_partial(folder, step, broken):
    """Tidy up after a run that was killed, put `broken` checkpoints aside, and make the folder to write into: its path.

    Raises CheckpointError if the folder holds a later step: another run's.
    """
    for path in folder.glob("step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob("step-*.replaced"):
        if path.with_suffix("").exists():
            shutil.rmtree(path, ignore_errors=True)
        else:  # killed between two renames
            path.rename(path.with_suffix(""))
    for path in steps_in(folder):
        if path in broken and step_of(path) != step:
            shutil.rmtree(path.with_suffix(".broken"), ignore_errors=True)
            path.rename(path.with_suffix(".broken"))  # for somebody to look at
        elif step_of(path) > step:
            raise CheckpointError(
                f"{folder} holds step {step_of(path)} of another run, later than this run's step {step}; name another"
                " folder, or resume from that step"
            )
    partial = step_folder(folder, step).with_suffix(".partial")
    try:
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(f"{partial} cannot be made: {error.strerror}; name another folder") from None
    return partial


def complete(partial, step, val_loss, metadata, files, keep):
    """Make the checkpoint in `partial` count, replace one of the same step, and remove those that are not kept."""
    folder = partial.parent
    try:
        write_manifest(partial, step, val_loss, metadata, files)
    except OSError as error:
        raise CheckpointError(
            f"step {step} could not be saved in {folder}: {error.strerror}; free some room, or name another folder"
        ) from None
    sync_folder(partial)
    final = step_folder(folder, step)
    replaced = final.with_suffix(".replaced")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    sync_folder(folder)
    with suppress(OSError):  # what is left over costs only room
        shutil.rmtree(replaced, ignore_errors=True)
        remove_old(folder, keep)


def remove_old(folder, keep):
    """Keep the last `keep` and the one with the lowest validation loss."""
    losses = {}
    for path in steps_in(folder):
        with suppress(CheckpointError):  # one without a readable manifest neither counts nor goes
            losses[path] = read_manifest(path).val_loss
    kept = {*list(losses)[:keep], best_of(losses)}
    for path in losses.keys() - kept:
        path.rename(path.with_suffix(".partial"))  # at once: half a checkpoint never has a complete one's name
        shutil.rmtree(path.with_suffix(".partial"), ignore_errors=True)


def best_of(losses):
    """The path with the lowest loss in {path, newest first: loss or None}; of equals the newest; None without any."""
    measured = {path: loss for path, loss in losses.items() if loss is not None}
    return min(measured, key=measured.get, default=None)
