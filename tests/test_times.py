"""Plots of times: a point is a median, its whiskers are the least and the most, and nothing is cut off."""

import pytest
from manyhands.plots.times import against_size, bandwidths


def test_samples_of_a_sweep_become_their_median_with_whiskers_from_the_least_to_the_most():
    samples = [[4e-3, 1e-3, 2e-3], [5e-3, 3e-3, 9e-3]]
    times, ratios = against_size([64, 1024], {"gloo": samples}, {"gloo": [1e-3, 5e-3]}, "a hop").axes
    assert list(ratios.lines[0].get_ydata()) == [2, 1]
    whiskers = [segment[:, 1].tolist() for segment in times.collections[0].get_segments()]
    assert [[pytest.approx(end) for end in whisker] for whisker in whiskers] == [[1, 4], [3, 9]]


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
