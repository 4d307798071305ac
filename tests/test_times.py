"""Plots of times: a world of one is drawn too, and bus bandwidth has its factor."""

from manyhands.lessons.collectives import draw_against_size, draw_bandwidths


def test_a_sweep_in_a_world_of_one_has_only_zeros_and_is_drawn(recwarn):
    draw_against_size(
        [64, 1024], {"ring": [0, 0]}, {"ring": [0, 0]}, "nobody to talk to", unit="virtual"
    ).draw_without_rendering()
    draw_bandwidths([64, 1024], {"ring": [0, 0]}, 0, "nobody to talk to").draw_without_rendering()
    # what earlier tests left to the garbage collection may complain here: that is not ours
    assert [w for w in recwarn.list if not issubclass(w.category, ResourceWarning)] == []


def test_bus_bandwidth_is_algorithm_bandwidth_times_its_factor():
    algorithm, bus = draw_bandwidths([2_000_000], {"gloo": [1.0]}, 1.5, "all-reduce").axes
    assert algorithm.lines[0].get_ydata()[0] == 2
    assert bus.lines[0].get_ydata()[0] == 3
