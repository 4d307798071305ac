"""Figures that appear where you are: inline in a notebook, as a file in a script."""

from __future__ import annotations

import io

from manyhands.launch.ranks import joined
from manyhands.launch.run_folder import run_folder
from manyhands.launch.screen import say


def show(figure, name: str, alt: str) -> None:
    """Show a matplotlib Figure: inline in a notebook, as `<run folder>/<name>.svg` in a script.

    `alt` says in a sentence what the figure shows. Call it only on the rank that has the figure.
    """
    ranks = joined()
    if ranks is not None and ranks.launcher == "notebook":
        from IPython.display import display

        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=100)
        display(
            {"image/png": picture.getvalue(), "text/plain": f"[figure: {alt}]"},
            metadata={"image/png": {"alt": alt}},
            raw=True,
        )
        return
    path = run_folder(ranks) / f"{name}.svg"
    figure.savefig(path)
    say(f"figure {path}: {alt}")
