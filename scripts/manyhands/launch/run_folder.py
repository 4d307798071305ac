"""Create a run's folder and the link `latest`, and show figures inline or save them there."""

import base64
import html
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

# this process's runs: id of the Ranks -> (the Ranks, kept so that the id stays unique; folder)
_folders: dict[int, tuple[Ranks, Path]] = {}


def run_folder(ranks: Ranks, latest: bool = True) -> Path:
    """Return this run's folder, created on the first call: `<outputs>/<lesson>/<stamp>-<launcher>-n<world>-<pid>/`.

    One `join` is one run. `latest` points to rank 0's last one (`latest=False`: not yet, see `point_latest_to`);
    another rank gets its own folder, ending in `-rank2`. Outputs are in MANYHANDS_OUTPUTS, else in the course's
    outputs/, else, if the course is read-only, in ~/.local/share/manyhands/outputs, which is printed once. Only the
    user can read an outputs folder that is created here. Raise Refused if MANYHANDS_OUTPUTS cannot be written, or no
    other place can.
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
    """Make the link `latest`, next to a run's folder, point to it."""
    with suppress(OSError):  # skipped on a file system without links
        link = folder.parent / f".latest-{folder.name}"
        link.symlink_to(folder.name)
        link.replace(folder.parent / "latest")  # atomic: a reader finds the old run or the new one


def outputs_folder() -> Path:
    """Return the folder of all runs' folders, created if needed: see `run_folder`."""
    if named := settings.path("MANYHANDS_OUTPUTS"):
        if not can_be_written(named):
            raise Refused(f"MANYHANDS_OUTPUTS={named} cannot be written; name another folder or unset it")
        return named
    course = ROOT / "outputs"
    # an installed package without the course has no course folder
    if (ROOT / "pyproject.toml").is_file() and can_be_written(course):
        return course
    users = settings.home() / ".local/share/manyhands/outputs"
    if not can_be_written(users):
        raise Refused(f"neither {course} nor {users} can be written; set MANYHANDS_OUTPUTS=/a/folder/of/yours")
    say(f"{course} cannot be written: the outputs of this run go to {users}")
    return users


def can_be_written(folder: Path) -> bool:
    """Return whether files can be created in `folder`, which is created, private to the user, if needed.

    It is tested by writing, because mode bits do not show a read-only disk.
    """
    try:
        make_private(folder)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def save_figure(figure, file, **how) -> None:
    """Write a matplotlib Figure as `Figure.savefig` does, without LaTeX.

    A user's matplotlibrc may ask for LaTeX (`text.usetex: True`), which few machines have.
    """
    from matplotlib import rc_context
    from matplotlib.text import Text

    with rc_context({"text.usetex": False}):  # of texts that are made while it is drawn
        for text in figure.findobj(Text):
            text.set_usetex(False)
        figure.savefig(file, **how)


def show(figure, name: str, alt: str, folded: str = "") -> None:
    """Show a matplotlib Figure: inline in a notebook, as `<run folder>/<name>.svg` in a script.

    `alt` says in a sentence what the figure shows. Call it only on the rank that has the figure. `folded`: the line to
    click in a notebook, where the figure shows the answer to a question that nobody has answered yet.
    """
    ranks = joined()
    if ranks is not None and ranks.launcher == "notebook":
        from IPython.display import display

        picture = io.BytesIO()
        save_figure(figure, picture, format="png", dpi=100)
        if folded:
            data = base64.b64encode(picture.getvalue()).decode()
            image = f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'
            page = f"<details><summary>{html.escape(folded)}</summary>{image}</details>"
            display({"text/html": page, "text/plain": f"[figure, folded: {folded}]"}, raw=True)
            return
        content = {"image/png": picture.getvalue(), "text/plain": f"[figure: {alt}]"}
        display(content, metadata={"image/png": {"alt": alt}}, raw=True)
        return
    assert ranks is not None, "call join() first: a figure is saved in the run's folder"
    path = run_folder(ranks) / f"{name}.svg"
    save_figure(figure, path)
    say(f"figure {path}: {alt}")
