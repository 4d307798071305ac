"""The planner's widget and the rank grid's: what they draw and say, and what they refuse with the numbers."""

from types import SimpleNamespace

import pytest
from manyhands.predict.layouts import Question
from manyhands.predict.machines import machine_named
from manyhands.predict.models import preset_model
from manyhands.predict.planner import plan
from manyhands.predict.traffic import OnLink, between_nodes, links, partners, payloads_of_7b
from manyhands.widgets import display as display_module
from manyhands.widgets.planner import planner_figure, show_planner
from manyhands.widgets.rank_grid import ORDERS, rank_grid_figure, show_rank_grid

WIDGET = "application/vnd.jupyter.widget-view+json"
SHOWS = [show_planner, show_rank_grid]


def texts(figure):
    return [text.get_text().strip() for text in figure.findobj(match=lambda a: hasattr(a, "get_text"))]


@pytest.fixture
def shown(monkeypatch):
    """The bundles that were displayed, as in a notebook's kernel."""
    import IPython
    from IPython import display

    bundles = []
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=True))
    monkeypatch.setattr(display, "display", lambda bundle, metadata, raw: bundles.append((bundle, metadata)))
    monkeypatch.setenv("MANYHANDS_LIVE", "1")
    return bundles


GRID = {"pipeline": 2, "data": 2, "tensor": 4}


def test_the_partners_of_a_rank_are_those_of_the_lesson():
    assert partners(GRID, 5) == {"pipeline": [5, 13], "data": [1, 5], "tensor": [4, 5, 6, 7]}
    assert partners(dict.fromkeys(GRID, 1), 0) == {"pipeline": [0], "data": [0], "tensor": [0]}


def test_rings_send_on_stages_send_both_ways_and_one_rank_sends_nothing():
    found = links({"pipeline": 3, "tensor": 4}, {"pipeline": 10.0, "tensor": 8.0})
    assert found[0, 4] == found[4, 0] == found[4, 8] == OnLink("pipeline", 10.0) and (8, 0) not in found
    assert found[0, 1] == found[3, 0] == OnLink("tensor", 12.0) and (1, 0) not in found
    assert len(found) == 4 * 4 + 3 * 4
    assert links({"pipeline": 1, "data": 1, "tensor": 1}, payloads_of_7b(GRID)) == {}


@pytest.mark.parametrize("order", [GRID, ("data", "pipeline", "tensor"), ("tensor", "data", "pipeline")])
def test_the_bytes_between_nodes_are_those_that_the_lesson_counts(order):
    from manyhands.course.catch_up import taken_from

    sizes = {axis: GRID[axis] for axis in order}
    payloads = payloads_of_7b(sizes)
    counted = taken_from("10_meshes_and_planning", "coordinates", "groups_of", "slow_bytes", "crossing").crossing(
        order, sizes, payloads, 8
    )
    assert between_nodes(links(sizes, payloads), 8) == pytest.approx(counted)


def test_the_grid_marks_partners_and_says_what_leaves_the_node():
    figure = rank_grid_figure(2, 2, 4, per_node=8, rank=5)
    assert {"rank 5", "4 T", "1 D", "13 P", "node 1"} <= set(found := texts(figure))
    assert "P  pipeline: 2 ranks, over 2 nodes, 0.13 GB a step to its neighbour" in found
    assert "between nodes: 2.1 of 261.9 GB in a step of a 7B model" in found
    image = figure.axes[1].images[0].get_array()
    assert image[4, 5] == pytest.approx(12.9, abs=0.1) and image[5, 4] is not image[4, 5] and image.mask[5, 4]
    assert any("between nodes: 103.1 of" in text for text in texts(rank_grid_figure(2, 2, 4, 8, 5, ORDERS[-1])))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"per_node": 3}, "8 ranks do not fill nodes of 3; use a divisor of 8"),
        ({"rank": 8}, "there is no rank 8 among 8; use 0 to 7"),
        ({"data": 32}, "2 x 32 x 2 = 128 ranks are more than 64; use fewer"),
    ],
)
def test_numbers_that_make_no_grid_are_refused_in_the_picture(settings, sentence):
    assert sentence in texts(rank_grid_figure(**settings))


def test_the_planner_draws_the_recommended_plan_first_and_leaves_offloaded_state_out():
    found = texts(planner_figure("olmo-7b", "h100", 64))
    assert "olmo-7b on 64 h100" in found and "predicted seconds per step" in found
    best = plan(Question(preset_model("olmo-7b"), machine_named("h100"), 64, 512)).best
    (first,) = {text for text in found if text.startswith("1 ")}
    assert best.name in first and first.split()[-2:] == [f"{best.step_s:.2f}", f"{best.mfu:.0%}"]
    assert any(text.split() == ["layout", "GB", "s/step", "MFU"] for text in found)
    (bytes_axes, _) = planner_figure("olmo-7b", "h100", 1).axes
    assert "optimizer" not in [text.get_text() for text in bytes_axes.get_legend().get_texts()]


def test_where_nothing_fits_the_planner_says_on_how_many_gpus_something_would():
    found = texts(planner_figure("llama3-405b", "h100", 8, offload=False))
    assert found[0].startswith("nothing of llama3-405b fits on 8 h100; something fits on ")
    assert texts(planner_figure("olmo-7b", "h100", 12))[0].startswith("12 GPUs do not fill nodes of 8")


@pytest.mark.parametrize("show", SHOWS)
def test_where_nobody_can_use_controls_there_is_a_picture_with_its_text(show, shown, monkeypatch):
    monkeypatch.setenv("MANYHANDS_LIVE", "0")
    show()
    ((bundle, metadata),) = shown
    assert set(bundle) == {"image/png", "text/plain"}
    assert metadata["image/png"]["alt"] in bundle["text/plain"]


@pytest.mark.parametrize("show", SHOWS)
def test_in_a_notebook_there_are_controls_and_the_picture_stays(show, shown):
    show()
    ((bundle, _),) = shown
    assert WIDGET in bundle and bundle["image/png"].startswith(b"\x89PNG")


def test_every_control_says_what_it_is_and_a_new_value_draws_anew(shown, monkeypatch):
    pages = []
    monkeypatch.setattr(display_module.Controls, "show", lambda page: pages.append(page))
    show_planner(gpus=8)
    controls = {c.description: c for row in pages[0].box.children[:-1] for c in row.children}
    assert list(controls) == ["model", "machine", "GPUs", "sequences per step", "offload"]
    before = pages[0].alt
    controls["model"].value = "gpt2"
    assert pages[0].alt != before and pages[0].alt.startswith("gpt2 on 8 h100: best is replicas 8")
