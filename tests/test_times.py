"""Plots of times: a point is a median, its whiskers are the least and the most, and nothing is cut off."""

import pytest
from manyhands.plots.looks import ALTERNATIVES
from manyhands.plots.times import against_size, bandwidths, bucket_sizes, compared, training, weak_scaling


def spans(axes, direction):
    """[(least, most)] of the whiskers along `direction` (0: x, 1: y), in the order in which they were drawn."""
    found = []
    for collection in axes.collections:
        for segment in collection.get_segments():
            found.append((min(segment[:, direction]), max(segment[:, direction])))
    return found


def test_a_row_has_its_median_and_whiskers_from_the_least_to_the_most():
    (axes,) = compared({"naive": [3e-3, 1e-3, 2e-3], "buckets": [4e-3]}, "a step").axes
    assert [float(line.get_xdata()[0]) for line in axes.lines if len(line.get_xdata()) == 1][0] == pytest.approx(2)
    assert spans(axes, 0) == [(pytest.approx(1), pytest.approx(3)), (pytest.approx(4), pytest.approx(4))]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["naive", "buckets"]


def test_the_u_of_the_virtual_network_and_the_whiskers_of_this_machine():
    samples = {"no overlap": [[3e-3], [5e-3, 4e-3, 9e-3]], "overlap": [[2e-3], [3e-3]], "no averaging": [1e-3]}
    virtual, real = bucket_sizes([1, 2], [2e-2, 1e-2], [2e-2, 1e-2], [1, 4], samples, "here").axes
    assert [round(float(y)) for y in virtual.lines[1].get_ydata()] == [20, 10]
    assert (pytest.approx(4), pytest.approx(9)) in spans(real, 1)
    assert real.get_ylim()[0] == 0
    assert {"no overlap", "overlap", "no averaging"} == {text.get_text() for text in real.texts}


def test_weak_scaling_of_one_rank_alone_is_drawn():
    (axes,) = weak_scaling([1], [[0.5, 0.25]], 192, "here").axes
    assert spans(axes, 1) == [(pytest.approx(384), pytest.approx(768))]


def test_the_training_curve_starts_at_the_loss_of_a_guess_and_shows_what_was_written():
    figure = training([4.2, 3.0], [(0, 4.2, "a\nb$x$"), (2, 3.0, "to be")], 65, "GPT")
    figure.draw_without_rendering()
    axes, beside = figure.axes
    assert "ln 65 = 4.17" in " ".join(text.get_text() for text in axes.texts)
    assert "a/b$x$" in " ".join(text.get_text() for text in beside.texts)


def test_a_sweep_shows_measured_over_predicted_below_the_times():
    figure = against_size([64, 1024], {"gloo": [2e-3, 3e-3]}, {"gloo": [1e-3, 3e-3]}, "a hop")
    times, ratios = figure.axes
    assert list(ratios.lines[0].get_ydata()) == [2, 1]
    assert times.get_yscale() == "log"
    assert times.get_ylabel() == "measured time, ms"


def test_samples_of_a_sweep_become_their_median_with_whiskers_from_the_least_to_the_most():
    samples = [[4e-3, 1e-3, 2e-3], [5e-3, 3e-3, 9e-3]]
    times, ratios = against_size([64, 1024], {"gloo": samples}, {"gloo": [1e-3, 5e-3]}, "a hop").axes
    assert list(ratios.lines[0].get_ydata()) == [2, 1]
    whiskers = [segment[:, 1].tolist() for segment in times.collections[0].get_segments()]
    assert [[pytest.approx(end) for end in whisker] for whisker in whiskers] == [[1, 4], [3, 9]]


def test_a_series_looks_the_same_in_each_plot_and_its_name_stands_at_its_end():
    looks = dict(zip(("gloo", "MPI", "our ring"), ALTERNATIVES, strict=False))
    hop = against_size([64, 1024], {"gloo": [1e-3, 2e-3], "MPI": [1e-3, 2e-3]}, {}, "a hop", looks=looks)
    reduce_s = {"our ring": [1e-3, 2e-3], "MPI": [1e-3, 2e-3]}
    for axes in (hop.axes[0], bandwidths([64, 1024], reduce_s, 1.5, "all-reduce", looks=looks).axes[1]):
        colours = {text.get_text(): text.get_color() for text in axes.texts}
        assert colours["MPI"] == looks["MPI"]["color"] == ALTERNATIVES[1]["color"]
        heights = sorted(text.get_position()[1] for text in axes.texts)
        assert heights[1] - heights[0] > 0.05, "names at the same height would cover each other"


def test_a_sweep_in_a_world_of_one_has_only_zeros_and_is_drawn(recwarn):
    against_size(
        [64, 1024], {"ring": [0, 0]}, {"ring": [0, 0]}, "nobody to talk to", unit="virtual"
    ).draw_without_rendering()
    bandwidths([64, 1024], {"ring": [0, 0]}, 0, "nobody to talk to").draw_without_rendering()
    # what earlier tests left to the garbage collection may complain here: that is not ours
    assert [w for w in recwarn.list if not issubclass(w.category, ResourceWarning)] == []


def test_bus_bandwidth_is_algorithm_bandwidth_times_its_factor():
    algorithm, bus = bandwidths([2_000_000], {"gloo": [1.0]}, 1.5, "all-reduce").axes
    assert algorithm.lines[0].get_ydata()[0] == 2
    assert bus.lines[0].get_ydata()[0] == 3
