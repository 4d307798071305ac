"""The curves of a run, in a terminal and as a picture."""

import math

import matplotlib.image
import pytest
from manyhands.train import curves


def rows_of(steps=60):
    """A falling loss, evaluated every 20 steps; two are no numbers, as in a file and as in memory."""
    rows = [
        {
            "step": step,
            "loss": 4.0 - step / 30,
            "val_loss": 4.1 - step / 30 if step % 20 == 0 else None,
            "grad_norm": 1.0,
            "tokens_per_s": 12_000.0,
        }
        for step in range(0, steps + 1, 10)
    ]
    rows[1]["loss"] = math.inf
    rows[2] |= {"loss": "nan", "tokens_per_s": None}
    return rows


@pytest.mark.parametrize("width", [80, 160])
def test_the_terminal_plots_have_titles_and_fit(width):
    text = curves.terminal(rows_of(), width)
    assert "loss (.) and validation loss (x) over steps" in text
    assert "thousand tokens/s over steps" in text
    assert max(map(len, text.splitlines())) <= min(width, curves.PLOT_WIDTH)
    assert "\x1b" not in text


def test_the_terminal_shows_both_losses():
    lines = curves.terminal(rows_of(), 80).splitlines()
    plot = lines[: lines.index("")]
    assert sum(line.count("x") for line in plot[1:]) == 4
    assert sum(line.count(".") for line in plot[1:-1]) > 20  # the points are joined


@pytest.mark.parametrize("latex", [False, True])
def test_the_picture_is_a_png_with_something_drawn_whatever_a_matplotlibrc_asks_for(tmp_path, latex, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # where no latex is
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", latex)
    path = curves.png(rows_of(), tmp_path / "curves.png")
    picture = matplotlib.image.imread(path)
    assert picture.shape[0] > 500 and picture.shape[1] > 500
    assert picture[..., :3].min() < 0.2 and picture[..., :3].max() == 1.0  # ink on white
