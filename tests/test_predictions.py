"""A committed prediction is one sentence next to the answer, whatever was typed, and stays for the lesson's card."""

import base64
import html
import math
import re
from types import SimpleNamespace

import IPython
import pytest
from manyhands import card, compare
from manyhands.checks import predictions
from manyhands.launch import ranks as ranks_module
from manyhands.launch.run_folder import show
from matplotlib.figure import Figure
from rank_pool import ranks_of, run_on_ranks


@pytest.fixture(autouse=True)
def nothing_asked_before():
    predictions.forget()
    yield
    predictions.forget()


class Unprintable:
    def __float__(self):
        raise OSError("no number")

    def __repr__(self):
        raise OSError("no text")


@pytest.mark.parametrize(
    "guess, sentence",
    [
        (None, "no guess yet: it is 3,960 MB"),
        (400, "you said 400 MB, it is 3,960 MB"),
        (3960, "right, it is 3,960 MB"),
        (4100, "you said 4,100 MB, it is 3,960 MB"),
        ("3,960 MB", "right, it is 3,960 MB"),
        ("many", "a guess is a number here, not the text 'many': it is 3,960 MB"),
        (math.nan, "a guess is a number here, not nan: it is 3,960 MB"),
        (Unprintable(), "it is 3,960 MB"),
    ],
)
def test_whatever_was_typed_gives_one_sentence_with_the_answer(capsys, guess, sentence):
    compare("rank 0 with 100 ranks", guess, 3960, "MB")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("rank 0 with 100 ranks: ") and line.endswith(sentence)


def test_an_answer_may_be_a_text(capsys):
    for guess in (" Ring", "tree", 3.5, None):
        compare("the fastest", guess, "ring")
    said = [line.removeprefix("the fastest: ") for line in capsys.readouterr().out.splitlines()]
    wrong_type = "a guess is a text here, not 3.5: it is 'ring'"
    assert said == ["right, it is 'ring'", "you said 'tree', it is 'ring'", wrong_type, "no guess yet: it is 'ring'"]


guess_typed = 3960


def test_a_guess_may_be_named_and_a_cell_that_was_skipped_is_no_error(capsys):
    compare("rank 0", "guess_typed", 3960, "MB")
    compare("rank 1", "guess_of_a_skipped_cell", 40, "MB")
    assert capsys.readouterr().out.splitlines() == [
        "rank 0: right, it is 3,960 MB",
        "rank 1: no guess yet: it is 40 MB",
    ]


@pytest.fixture
def displayed(monkeypatch):
    """The bundles that this process, a notebook's rank 0, displays."""
    shown, before = [], ranks_module.joined()
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=True))
    monkeypatch.setattr(IPython.display, "display", lambda bundle, **how: shown.append(bundle))
    ranks_module.remember(ranks_of(0, 1, launcher="notebook"))
    yield shown
    ranks_module.remember(before)


def test_in_a_notebook_the_answer_is_folded_where_nobody_has_guessed(capsys, displayed):
    compare("rank <0>", None, 3960, "MB")
    assert displayed == [{
        "text/html": "<details><summary>rank &lt;0&gt;: no guess yet</summary>it is 3,960 MB</details>",
        "text/plain": "rank <0>: no guess yet; the answer is folded",
    }]  # fmt: skip
    card("first", figure="ring.svg", command="srun x")
    compare("rank 1", 40, 3960, "MB")
    said = capsys.readouterr().out
    assert "- rank <0>: no guess yet\n" in said and "you said 40 MB, it is 3,960 MB" in said


def test_the_line_of_a_fold_is_there_only_where_nobody_has_guessed_the_last_question(displayed):
    compare("rank <0>", None, 3960, because="as it has 100 ranks")
    assert displayed[-1]["text/html"].endswith("it is 3,960<br>as it has 100 ranks</details>")
    assert predictions.unanswered() == "rank <0>: the figure"
    compare("rank 0", 40, 3960)
    assert predictions.unanswered() == ""


def test_outside_a_notebook_no_figure_is_folded(capsys):
    compare("rank 0", None, 3960, because="as it has 100 ranks")
    assert predictions.unanswered() == "" and capsys.readouterr().out.endswith("it is 3,960\nas it has 100 ranks\n")


@pytest.mark.parametrize("folded", ["", "rank <0>: the figure"])
def test_a_figure_that_shows_an_answer_is_in_a_closed_fold_its_text_twin_too(displayed, folded):
    show(Figure(), "ring", 'a ring of "4"', folded)
    (bundle,) = displayed
    if not folded:
        assert bundle.keys() == {"image/png", "text/plain"} and bundle["text/plain"] == '[figure: a ring of "4"]'
        return
    assert bundle.keys() == {"text/html", "text/plain"} and bundle["text/plain"] == f"[figure, folded: {folded}]"
    summary, alt, data = re.fullmatch(
        r'<details><summary>(.*)</summary><img alt="(.*)" src="data:image/png;base64,([^"]+)"></details>',
        bundle["text/html"],
    ).groups()
    assert (html.unescape(summary), html.unescape(alt)) == (folded, 'a ring of "4"')
    assert base64.b64decode(data).startswith(b"\x89PNG")


def test_the_card_has_the_lines_and_the_last_guess_of_each_question(capsys):
    compare("rank 0", 400, 3960, "MB")
    compare("messages", 6, 6)
    compare("rank 0", 3960, 3960, "MB")
    capsys.readouterr()
    card("first", "second", figure="ring.svg", command="srun x")
    assert capsys.readouterr().out.splitlines() == [
        "1. first", "2. second", "figure: ring.svg", "on the cluster: srun x", "your predictions:",
        "- rank 0: right, it is 3,960 MB", "- messages: right, it is 6",
    ]  # fmt: skip
    predictions.forget()
    card("first", figure="ring.svg", command="srun x")
    assert "prediction" not in capsys.readouterr().out


def _printed(ranks, launcher):
    """What this rank prints for a guess and the card, as a rank of this launcher."""
    import contextlib
    import io

    ranks_module.remember(ranks_of(ranks.rank, ranks.world_size, launcher=launcher))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        compare("rank 0", 400, 3960, "MB")
        card("first", figure="ring.svg", command="srun x")
    return out.getvalue()


@pytest.mark.ranks
@pytest.mark.parametrize("launcher", ["notebook", "torchrun"])
def test_rank_0_alone_prints_in_a_notebook_and_in_a_script(launcher):
    first, *others = run_on_ranks(3, _printed, launcher)
    assert "you said 400 MB, it is 3,960 MB" in first and "1. first" in first
    assert others == ["", ""]
