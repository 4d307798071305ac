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
from manyhands.widgets.floats import DTYPES, FloatControls, bits, from_pattern, in_words, neighbour, show_floats
from manyhands.widgets.memory import MODELS, bytes_by_kind, memory_picture, show_memory, show_sizes, sizes_picture
from manyhands.widgets.pipeline import pipeline_picture, show_pipeline
from manyhands.widgets.planner import planner_picture, show_planner
from manyhands.widgets.rank_grid import (
    ORDERS,
    OnLink,
    between_nodes,
    links,
    partners,
    payloads_of_7b,
    rank_grid_picture,
    show_rank_grid,
)
from manyhands.widgets.zigzag import owners, pairs_by_step, show_zigzag, zigzag_picture


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_neighbour_is_the_next_number_through_zero_and_up_to_infinity(dtype):
    zero, smallest = bits(0, dtype), from_pattern("0" * (len(bits(0, dtype).pattern) - 1) + "1", dtype)
    assert neighbour(zero, 1).value == smallest.value and neighbour(zero, -1).value == -smallest.value
    assert neighbour(smallest, -2).value == -smallest.value
    one = torch.ones((), dtype=DTYPES[dtype])
    assert neighbour(bits(1, dtype), 1).value == torch.nextafter(one, 2 * one).item()
    largest = bits(torch.finfo(DTYPES[dtype]).max, dtype)
    assert neighbour(largest, 1).value == neighbour(largest, 5).value == math.inf
    assert neighbour(bits(math.nan, dtype), 1).kind == "not a number"


def test_what_is_no_pattern_and_no_format_is_refused():
    with pytest.raises(ValueError, match="bf16 has 16 bits, each 0 or 1, not 3 letters '012'"):
        from_pattern("0 12", "bf16")
    with pytest.raises(ValueError, match="dtype 'fp8' is unknown here; use one of fp32, bf16, fp16"):
        bits(1, "fp8")


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


def test_the_sizes_figure_counts_devices_by_both_units():
    large = texts(sizes_picture(1e6, 40))
    assert any(text.startswith("1,000,000 GB = 931,323 GiB") for text in large)
    found = texts(sizes_picture(914.04, 40))
    assert any("40,000,000,000 bytes each, 23 devices" in text for text in found)
    assert any("42,949,672,960 bytes each, 22 devices" in text for text in found)
    assert any("GiB is 7.4 % more than GB" in text for text in found)
    assert any("1 device" in text and "1 devices" not in text for text in texts(sizes_picture(10, 40)))
    assert "25,000" in large, "too many boxes to draw"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        # v counts for interleaved schedules only
        (("1F1B", 4, 8, 3), ["1F1B, p = 4, m = 8: idle 27 %", "holds 4", "holds 3", "holds 2", "holds 1"]),
        (("Interleaved1F1B", 4, 8, 2), ["Interleaved1F1B, p = 4, m = 8, v = 2: idle 16 %", "holds 11/2", "7"]),
        (("Interleaved1F1B", 4, 2, 2),
         ["Interleaved1F1B, p = 4, m = 2, v = 2: idle 56 % (the formula is for m of p or more: 43 %)"]),
    ],
)  # fmt: skip
def test_the_pipeline_figure_says_what_is_idle_and_what_each_rank_holds(asked, said):
    assert set(said) <= set(texts(pipeline_picture(*asked)))


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


def test_the_zigzag_figure_says_how_long_the_ring_takes_and_why_positions_do_not_split():
    assert "the ring takes 1.00 times a fair share" in texts(zigzag_picture(4, 16, "zig-zag"))
    in_order = texts(zigzag_picture(4, 128, "in order"))
    assert "the ring takes 1.74 times a fair share" in in_order, "2 - 1/4 for many positions"
    assert {"0", "1", "2", "3"} <= set(in_order)
    with pytest.raises(ValueError, match="20 positions do not split into 8 equal chunks; use a multiple of 8"):
        zigzag_picture(4, 20)
    with pytest.raises(ValueError, match="layout 'mirror' is unknown; use one of in order, zig-zag, striped"):
        owners("mirror", 16, 4)


GRID = {"pipeline": 2, "data": 2, "tensor": 4}


def test_the_partners_of_a_rank_are_those_of_the_lesson():
    assert partners(GRID, 5) == {"pipeline": [5, 13], "data": [1, 5], "tensor": [4, 5, 6, 7]}


def test_rings_send_on_stages_send_both_ways_and_one_rank_sends_nothing():
    found = links({"pipeline": 3, "tensor": 4}, {"pipeline": 10.0, "tensor": 8.0})
    assert found[0, 4] == found[4, 0] == found[4, 8] == OnLink("pipeline", 10.0) and (8, 0) not in found
    assert found[0, 1] == found[3, 0] == OnLink("tensor", 12.0) and (1, 0) not in found
    assert len(found) == 4 * 4 + 3 * 4
    assert links({"pipeline": 1, "data": 1, "tensor": 1}, payloads_of_7b(GRID)) == {}


@pytest.mark.parametrize("order", [GRID, ("data", "pipeline", "tensor"), ("tensor", "data", "pipeline")])
def test_the_bytes_between_nodes_are_those_that_the_lesson_counts(order):
    from definitions import taken_from

    sizes = {axis: GRID[axis] for axis in order}
    payloads = payloads_of_7b(sizes)
    counted = taken_from("10_meshes_and_planning", "coordinates", "groups_of", "slow_bytes", "crossing").crossing(
        order, sizes, payloads, 8
    )
    assert between_nodes(links(sizes, payloads), 8) == pytest.approx(counted)


def test_the_grid_marks_partners_and_says_what_leaves_the_node():
    picture = rank_grid_picture(2, 2, 4, per_node=8, rank=5)
    assert {"rank 5", "4 T", "13 D", "1 P", "node 1"} <= set(found := texts(picture))
    assert "D  data: 2 ranks, over 2 nodes, 3.4 GB a step to its neighbour" in found
    assert "between nodes: 53.6 of 1,720.0 GB in a step of a 7B model" in found
    assert any("between nodes: 824.6 of" in text for text in texts(rank_grid_picture(2, 2, 4, 8, 5, ORDERS[-1])))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"per_node": 3}, "8 ranks do not fill nodes of 3; use a divisor of 8"),
        ({"rank": 8}, "there is no rank 8 among 8; use 0 to 7"),
        ({"data": 32}, "2 x 32 x 2 = 128 ranks are more than 64; use fewer"),
    ],
)
def test_numbers_that_make_no_grid_are_refused_in_the_picture(settings, sentence, capsys):
    show_rank_grid(**settings)
    assert capsys.readouterr().out == f"[figure: {sentence}]\n"


def test_the_planner_draws_the_recommended_plan_first_with_whole_legends_and_leaves_offloaded_state_out():
    figure, _ = picture = planner_picture("olmo-7b", "h100", 64)
    found = texts(picture)
    assert "olmo-7b on 64 h100" in found and "predicted seconds per step" in found
    best = plan(Question(preset_model("olmo-7b"), machine_named("h100"), 64, 512)).best
    (first,) = {text for text in found if text.startswith("1 ")}
    assert best.name in first and first.split()[-2:] == [f"{best.step_s:.2f}", f"{best.mfu:.0%}"]
    assert any(text.split() == ["layout", "GB", "s/step", "MFU"] for text in found)
    keys = [[text.get_text() for text in legend.get_texts()] for legend in figure.legends]
    assert keys == [["weights", "optimizer", "gradients", "activations"], ["computing", "messages", "bubble"]]
    figure.draw_without_rendering()
    left, right = (legend.get_window_extent() for legend in figure.legends)
    assert 0 <= left.x0 < left.x1 <= right.x0 < right.x1 <= figure.bbox.x1 and min(left.y0, right.y0) >= 0
    bytes_legend, _ = planner_picture("olmo-7b", "h100", 1)[0].legends
    assert "optimizer" not in [text.get_text() for text in bytes_legend.get_texts()]


def test_where_nothing_fits_the_planner_says_on_how_many_gpus_something_would():
    with pytest.raises(ValueError, match="^nothing of llama3-405b fits on 8 h100; something fits on "):
        planner_picture("llama3-405b", "h100", 8, offload=False)
    with pytest.raises(ValueError, match="^12 GPUs do not fill nodes of 8"):
        planner_picture("olmo-7b", "h100", 12)


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


@pytest.mark.parametrize(("show", "live"), [(show_sizes, False), (show_sizes, True), (show_floats, True)])
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
         [({"layout": "in order"}, "8 positions in order on 2 ranks: 10, 26 query-key pairs"),
          ({"ranks c": 3}, "8 positions do not split into 3 equal chunks; use a multiple of 3")]),
        (show_rank_grid, {"pipeline": 2},
         ["pipeline ranks", "data ranks", "tensor ranks", "ranks per node", "look at rank", "outermost first"],
         "rank 0 of data 2 x pipeline 2 x tensor 2 is in the groups data 0 4, pipeline 0 2, tensor 0 1",
         [({"look at rank": 6, "outermost first": "tensor x data x pipeline"}, "between nodes: 549.8 of")]),
        (show_sizes, {"device": 48}, ["GB to hold", "device", "whose unit is"], "20 of 48 GB and 18 of 48 GiB",
         [({"GB to hold": 1718, "device": 64, "whose unit is": "GB"}, "1,718 GB = 1,600 GiB: that takes 27 of 64 GB")]),
        (show_planner, {"gpus": 8}, ["model", "machine", "GPUs", "sequences per step", "offload"], "olmo-7b on 8 h100",
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


def test_a_picture_of_the_last_choice_is_marked_while_the_new_one_is_computed(monkeypatch):
    pages, states = [], []

    def draw(gpus):
        states.extend(page.state.value for page in pages)
        if gpus == 16:
            raise KeyError("stopped")
        return sizes_picture(10, 40)

    monkeypatch.setattr(display_module, "is_live", lambda: True)
    monkeypatch.setattr(display_module.Controls, "show", lambda page: pages.append(page))
    options = {"options": [4, 8, 16]}
    display_module.show_with_controls(draw, {}, {"gpus": ("Dropdown", 4, "GPUs", 4, 11, options)})
    control = pages[0].box.children[0].children[0]
    control.value = 8
    assert "drawing..." in states[0] and "drawing" not in pages[0].state.value
    with pytest.raises(KeyError):
        control.value = 16
    assert "drawing" not in pages[0].state.value


def test_without_ipywidgets_there_is_a_picture_and_in_a_script_its_text(shown, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "ipywidgets", None)
    show_sizes()
    assert WIDGET not in shown[0][0]
    monkeypatch.undo()
    show_sizes(100, 80)
    assert capsys.readouterr().out == (
        "[figure: 100 GB = 93.13 GiB: that takes 2 of 80 GB and 2 of 80 GiB; the devices have GiB]\n"
    )


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
