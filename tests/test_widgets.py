"""Pictures with controls: what they compute, what is shown where nobody can use them, and what their controls do."""

import html
import math
import struct
from types import SimpleNamespace

import ipywidgets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from manyhands.config.layout import Layout
from manyhands.config.options import from_preset, merged
from manyhands.predict.layouts import Question
from manyhands.predict.machines import machine_named
from manyhands.predict.memory import state_of_rank, zero_bytes
from manyhands.predict.models import model_of, preset_model
from manyhands.predict.planner import plan
from manyhands.widgets import display as display_module
from manyhands.widgets.floats import DTYPES, FloatControls, bits, from_pattern, in_words, show_floats
from manyhands.widgets.memory import MODELS, bytes_by_kind, memory_picture, show_memory
from manyhands.widgets.pipeline import show_pipeline
from manyhands.widgets.planner import planner_picture, show_planner
from manyhands.widgets.rank_grid import (
    between_nodes,
    links,
    payloads_of_7b,
    show_rank_grid,
)
from manyhands.widgets.zigzag import owners, pairs_by_step, show_zigzag


@given(value=st.floats(width=32))
def test_the_bits_of_fp32_are_those_in_memory(value):
    stored = bits(value, "fp32")
    assert int(stored.pattern, 2) == struct.unpack("<I", struct.pack("<f", value))[0] or math.isnan(value)
    assert (len(stored.sign), len(stored.exponent), len(stored.fraction)) == (1, 8, 23)


@given(pattern=st.integers(0, 2**16 - 1), dtype=st.sampled_from(["bf16", "fp16"]))
def test_sign_significand_and_power_make_the_value_of_every_pattern(pattern, dtype):
    stored = from_pattern(f"{pattern:016b}", dtype)
    assert stored.pattern == f"{pattern:016b}"
    if stored.kind in ("normal", "subnormal", "zero"):
        assert stored.value == (-1) ** int(stored.sign) * stored.significand * 2.0**stored.power
        assert bits(stored.value, dtype) == stored
        assert (stored.kind == "normal") == (abs(stored.value) >= torch.finfo(DTYPES[dtype]).smallest_normal)
    else:
        assert not math.isfinite(stored.value)


def test_numbers_are_rounded_as_torch_rounds_and_say_what_became_of_them():
    assert bits(0.1, "bf16").value == torch.tensor(0.1, dtype=torch.bfloat16).item()
    assert bits(70000, "fp16").kind == "infinity" and bits(70000, "bf16").value == 70144
    assert bits(1e-5, "fp16").kind == "subnormal" and bits(1e-8, "fp16").kind == "zero"
    assert bits(math.nan, "bf16").kind == "not a number"
    assert bits(1.5, "fp16").fraction == "1000000000" and bits(-1.5, "fp16").sign == "1"
    assert in_words(bits(-6.0, "fp16")) == "normal: -1.5 x 2^2 = -6"


@pytest.mark.parametrize("stage", range(4))
def test_the_bars_are_zeros_stages_and_what_is_unsharded_and_on_one_rank_the_recipe(stage):
    P = MODELS["7B"].num_params()
    for ranks, expected in ((64, zero_bytes(P, 64, stage)), (1, 16 * P)):
        found = bytes_by_kind(MODELS["7B"], "bf16 + fp32 master", stage, ranks)
        assert (found.pop("unsharded parameters", 0) > 0) == (stage == 3)
        assert sum(found.values()) == pytest.approx(expected)


@pytest.mark.parametrize("recipe, precision", [("fp32", "fp32"), ("fp32 + autocast", "bf16")])
@pytest.mark.parametrize("strategy, stage", [("ddp", 0), ("zero1", 1), ("fsdp", 3)])
def test_the_bars_are_what_the_trainer_takes_within_two_per_cent(recipe, precision, strategy, stage):
    settings = {"train": {"precision": precision}, "parallel": {"strategy": strategy}}
    options = merged(from_preset("nano"), settings, "test")
    layout = Layout(shard=16) if strategy == "fsdp" else Layout(replicate=16)
    expected = sum(state_of_rank(model_of(MODELS["7B"]), layout, options))
    assert sum(bytes_by_kind(MODELS["7B"], recipe, stage, 16).values()) == pytest.approx(expected, rel=0.02)


def texts(picture):
    figure, _ = picture
    return [text.get_text().strip() for text in figure.findobj(match=lambda artist: hasattr(artist, "get_text"))]


def test_the_memory_figure_says_what_fits_in_the_unit_that_was_chosen():
    for unit, whole, cut, too_large in (("GB", "107 GB", "14.9 GB", 2), ("GiB", "100 GiB", "13.9 GiB", 1)):
        found = texts(memory_picture("7B", "bf16 + fp32 master", ranks=64, sequences=0, device=27, unit=unit))
        assert f"{whole}  does not fit" in found and cut in found
        assert sum("does not fit" in text for text in found) == too_large, "27.9 GB are 26 GiB"
    small = texts(memory_picture("ShakespeareGPT", "fp32", ranks=1, sequences=0, unit="GiB"))
    assert "0.817 million parameters, fp32" in small and "MiB on one rank" in small
    P = MODELS["ShakespeareGPT"].num_params()
    assert f"{16 * P / 2**20:.3g} MiB" in small and not any("does not fit" in text for text in small)


@given(n=st.integers(1, 8), each=st.integers(1, 5), layout=st.sampled_from(["in order", "zig-zag", "striped"]))
def test_the_pairs_of_all_ranks_and_steps_are_the_causal_mask_counted_one_by_one(n, each, layout):
    T = 2 * n * each
    owner_T = owners(layout, T, n)
    assert [owner_T.count(rank) for rank in range(n)] == [2 * each] * n
    counted = [[0] * n for _ in range(n)]
    for query in range(T):
        for key in range(query + 1):
            counted[owner_T[query]][(owner_T[query] - owner_T[key]) % n] += 1  # keys of rank o visit i in step i - o
    assert pairs_by_step(owner_T, n) == counted
    if layout == "zig-zag":
        assert all(row == counted[0] for row in counted), "every rank has the same work in every step"


GRID = {"pipeline": 2, "data": 2, "tensor": 4}


@pytest.mark.parametrize("order", [GRID, ("data", "pipeline", "tensor"), ("tensor", "data", "pipeline")])
def test_the_bytes_between_nodes_are_those_that_the_lesson_counts(order):
    from definitions import taken_from

    sizes = {axis: GRID[axis] for axis in order}
    payloads = payloads_of_7b(sizes)
    counted = taken_from("10_meshes_and_planning", "coordinates", "groups_of", "slow_bytes", "crossing").crossing(
        order, sizes, payloads, 8
    )
    assert between_nodes(links(sizes, payloads), 8) == pytest.approx(counted)


def test_a_number_that_makes_no_grid_is_refused_in_the_picture(capsys):
    show_rank_grid(rank=8)
    assert capsys.readouterr().out == "[figure: there is no rank 8 among 8; use 0 to 7]\n"


def test_the_planner_draws_the_recommended_plan_first():
    found = texts(planner_picture("gpt-7b", "h100", 64))
    assert {"gpt-7b on 64 h100", "gradients", "whole gradients until the last micro-batch"} <= set(found)
    best = plan(Question(preset_model("gpt-7b"), machine_named("h100"), 64, 512)).best
    (first,) = {text for text in found if text.startswith("1 ")}
    assert best.name in first and first.split()[-2:] == [f"{best.step_s:.2f}", f"{best.mfu:.0%}"]


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


WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.mark.parametrize(("show", "live"), [(show_zigzag, False), (show_zigzag, True), (show_floats, True)])
def test_there_is_a_picture_with_its_text_and_controls_where_somebody_can_use_them(show, live, shown, monkeypatch):
    monkeypatch.setenv("MANYHANDS_LIVE", str(int(live)))
    show()
    ((bundle, metadata),) = shown
    assert set(bundle) == {"image/png", "text/plain"} | ({WIDGET} if live else set())
    assert bundle["image/png"].startswith(b"\x89PNG") and (alt := metadata["image/png"]["alt"])
    assert live or alt in bundle["text/plain"]


@pytest.mark.parametrize(
    ("show", "given", "labels", "before", "changes"),
    [
        (show_memory, {"ranks": 8}, ["model", "recipe", "ranks", "sequences per rank", "memory of a device", "unit"],
         "GB on each of 8 ranks for 7B",
         [({"model": "1B", "ranks": 1024, "unit": "GiB"}, "GiB on each of 1,024 ranks for 1B")]),
        (show_pipeline, {"p": 2}, ["schedule", "ranks p", "micro-batches m", "stages per rank v"],
         "ranks hold 2, 1 micro-batches at most",
         [({"schedule": "InterleavedZeroBubble", "micro-batches m": 7}, "7 micro-batches do not split into 3 equal")]),
        (show_zigzag, {"ranks": 2, "positions": 8}, ["ranks c", "positions", "layout"],
         "8 positions zig-zag on 2 ranks: 18, 18 query-key pairs",
         [({"layout": "in order", "ranks c": 3}, "8 positions do not split into 3 equal chunks; use a multiple of 3")]),
        (show_rank_grid, {"pipeline": 2},
         ["pipeline ranks", "data ranks", "tensor ranks", "ranks per node", "look at rank", "outermost first"],
         "rank 0 of data 2 x pipeline 2 x tensor 2 is in the groups data 0 4, pipeline 0 2, tensor 0 1",
         [({"look at rank": 6, "outermost first": "tensor x data x pipeline"}, "between nodes: 549.8 of")]),
        (show_planner, {"gpus": 8}, ["model", "machine", "GPUs", "sequences per step", "offload"], "gpt-7b on 8 h100",
         [({"model": "gpt2"}, "gpt2 on 8 h100: best is replicas 8")]),
    ],
)  # fmt: skip
def test_every_control_says_what_it_is_and_a_new_value_draws_anew(
    show, given, labels, before, changes, shown, monkeypatch
):
    pages = []
    monkeypatch.setattr(display_module.Controls, "show", lambda page: pages.append(page))
    show(**given)
    (page,) = pages
    controls = {c.description: c for row in page.box.children[:-2] for c in row.children}
    assert list(controls) == labels
    assert before in page.alt and f'alt="{html.escape(page.alt)}"' in page.picture.value
    for values, after in changes:
        for label, value in values.items():
            controls[label].value = value
        assert after in page.alt and html.escape(page.alt) in page.picture.value


def test_without_ipywidgets_there_is_a_picture_and_in_a_script_its_text(shown, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "ipywidgets", None)
    show_zigzag()
    assert WIDGET not in shown[0][0]
    monkeypatch.undo()
    show_zigzag(ranks=2, positions=8)
    assert capsys.readouterr().out.startswith("[figure: 8 positions zig-zag on 2 ranks: 18, 18 query-key pairs")


def test_a_number_its_bits_and_its_picture_follow_each_other(shown):
    controls = FloatControls(1.0)
    assert controls.pattern.value == "0 01111111 0000000"
    controls.number.value = "1e-5"
    assert controls.value == 1e-5 and controls.number.value == "1e-05", "not rounded to the bits that are shown"
    assert "the bits of 1e-05" in controls.page.alt
    controls.format.value = "fp16"
    assert controls.pattern.value == "0 00000 0010101000"
    controls.pattern.value = "0 00001 0000000000"
    assert controls.value == float(controls.number.value) == 2**-14
    controls.down.click()
    assert controls.value == 2**-14 - 2**-24 and "subnormal" in controls.page.alt
    controls.up.click()
    assert controls.value == 2**-14
    controls.example.value = math.inf
    assert controls.pattern.value == "0 11111 0000000000"


def test_what_is_no_number_is_said_and_changes_nothing(shown):
    controls = FloatControls(2.0)
    controls.number.value = "<b>two"
    assert "is no number" in controls.said.value and "<b>" not in controls.said.value and controls.value == 2.0
    controls.pattern.value = "01"
    assert "bf16 has 16 bits" in controls.said.value and controls.value == 2.0
    controls.number.value = "3"
    assert controls.said.value == "" and controls.value == 3.0
    assert controls.pattern.value == "0 10000000 1000000"


@pytest.mark.parametrize("value", [-0.0, math.nan, -math.inf, 1e300])
def test_every_number_has_a_picture(value):
    assert isinstance(FloatControls(value).page.box, ipywidgets.VBox)
