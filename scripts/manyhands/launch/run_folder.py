"""Where a run leaves its files: a folder of its own, `latest` beside it; and figures, which appear where you are."""

import io
import os
import tempfile
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

from manyhands.course.folders import ROOT, make_private
from manyhands.launch import settings
from manyhands.launch.program import Refused, say
from manyhands.launch.ranks import Ranks, joined

# of this process's runs: id of the Ranks -> (the Ranks, so that the id stays theirs; folder)
_folders: dict[int, tuple[Ranks, Path]] = {}


def run_folder(ranks: Ranks, latest: bool = True) -> Path:
    """This run's folder, made on the first call: `<outputs>/<lesson>/<stamp>-<launcher>-n<world>-<pid>/`.

    One `join` is one run. `latest` points to rank 0's last one (`latest=False`: not yet, see `point_latest_to`);
    another rank gets its own folder, ending in `-rank2`. Outputs lie where MANYHANDS_OUTPUTS says, else in the course's
    outputs/, else (a course that cannot be written) in ~/.local/share/manyhands/outputs, which is said once. A folder
    of outputs that is made here can be read by its user alone. Raises Refused if MANYHANDS_OUTPUTS, or none of the
    other places, can be written.
    """
    if id(ranks) not in _folders:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{ranks.launcher}-n{ranks.world_size}-{os.getpid()}"
        name += f"-rank{ranks.rank}" * (ranks.rank > 0)
        folder = _new_folder(outputs_folder() / (ranks.lesson or "untitled"), name)
        if ranks.rank == 0 and latest:
            point_latest_to(folder)
        _folders[id(ranks)] = (ranks, folder)
    return _folders[id(ranks)][1]


def _new_folder(lesson, name):
    for attempt in count(1):
        folder = lesson / (name if attempt == 1 else f"{name}-{attempt}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def point_latest_to(folder: Path) -> None:
    """`latest` beside a run's folder names it from now on."""
    with suppress(OSError):  # a file system without links has no `latest`
        link = folder.parent / f".latest-{folder.name}"
        link.symlink_to(folder.name)
        link.replace(folder.parent / "latest")  # at once: a reader finds the old run or the new one


def outputs_folder() -> Path:
    """Where all runs leave their folders, made if need be: see `run_folder`."""
    if named := settings.path("MANYHANDS_OUTPUTS"):
        if not can_be_written(named):
            raise Refused(f"MANYHANDS_OUTPUTS={named} cannot be written; name another folder or unset it")
        return named
    course = ROOT / "outputs"
    # a package that was installed without the course around it has no place of its own
    if (ROOT / "pyproject.toml").is_file() and can_be_written(course):
        return course
    users = Path("~/.local/share/manyhands/outputs").expanduser()
    if not can_be_written(users):
        raise Refused(f"neither {course} nor {users} can be written; set MANYHANDS_OUTPUTS=/a/folder/of/yours")
    say(f"{course} cannot be written: the outputs of this run go to {users}")
    return users


def can_be_written(folder: Path) -> bool:
    """Whether files can be made in `folder`, which is made if need be, for its user alone.

    It is tried: modes do not know a read-only disk.
    """
    try:
        make_private(folder)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def show(figure, name: str, alt: str) -> None:
    """Show a matplotlib Figure: inline in a notebook, as `<run folder>/<name>.svg` in a script.

    `alt` says in a sentence what the figure shows. Call it only on the rank that has the figure.
    """
    ranks = joined()
    if ranks is not None and ranks.launcher == "notebook":
        from IPython.display import display

        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=100)
        content = {"image/png": picture.getvalue(), "text/plain": f"[figure: {alt}]"}
        display(content, metadata={"image/png": {"alt": alt}}, raw=True)
        return
    assert ranks is not None, "join first: a figure lies in the run's folder"
    path = run_folder(ranks) / f"{name}.svg"
    figure.savefig(path)
    say(f"figure {path}: {alt}")
