"""Lines carry their rank and do not run together; figures appear where the reader is."""

import sys
from types import SimpleNamespace

import pytest
from manyhands import say, show
from manyhands.launch import ranks as ranks_module
from rank_pool import ranks_of


def become(monkeypatch, rank, world_size, launcher="torchrun"):
    ranks = ranks_of(rank, world_size, launcher)
    monkeypatch.setattr(ranks_module, "_joined", ranks)
    return ranks


@pytest.mark.parametrize(
    ("rank", "world_size", "launcher", "said", "shown"),
    [
        (2, 4, "torchrun", "hello", "[rank 2] hello\n"),
        (2, 4, "torchrun", "one\ntwo", "[rank 2] one\n[rank 2] two\n"),
        (3, 16, "torchrun", "x", "[rank  3] x\n"),  # labels have one width in a world
        (0, 1, "alone", "x", "x\n"),
        (0, 4, "notebook", "x", "x\n"),  # %%ranks labels it
        (None, 0, "", 3, "3\n"),  # before joining
    ],
)
def test_a_text_is_one_write_with_the_rank_in_each_line_of_a_script(
    monkeypatch, rank, world_size, launcher, said, shown
):
    writes = []
    monkeypatch.setattr(ranks_module, "_joined", None if rank is None else ranks_of(rank, world_size, launcher))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=writes.append, flush=lambda: None))
    say(said)
    assert writes == [shown]


@pytest.fixture
def figure():
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(2, 1))
    drawing.subplots().plot([0, 1])
    return drawing


def test_a_figure_of_a_script_is_a_file_in_the_runs_folder(monkeypatch, capsys, figure):
    ranks = become(monkeypatch, 0, 1, "alone")
    show(figure, "line", "a rising line")
    from manyhands.launch.run_folder import run_folder

    assert (run_folder(ranks) / "line.svg").read_text().lstrip().startswith("<?xml")
    assert "line.svg: a rising line" in capsys.readouterr().out


def test_a_figure_of_a_notebook_is_displayed_with_its_text(monkeypatch, figure):
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda data, **options: shown.append((data, options)))
    become(monkeypatch, 1, 4, "notebook")
    show(figure, "line", "a rising line")
    data, options = shown[0]
    assert data["image/png"].startswith(b"\x89PNG")
    assert "a rising line" in data["text/plain"]
    assert options["metadata"]["image/png"]["alt"] == "a rising line"
