"""The figures in assets/ are what the code draws, the same bytes each time, and every lesson says what they show."""

import re
import sys
import xml.etree.ElementTree as ET

import pytest
from manyhands.course.folders import ASSETS
from manyhands.plots.looks import RANK_COLOURS, rank_colour, tint

sys.path.insert(0, str(ASSETS / "src"))
import draw  # noqa: E402

LESSONS = sorted((ASSETS.parent / "scripts").glob("[01][0-9]_*.py"))


@pytest.mark.parametrize("name", draw.drawings())
def test_the_stored_figure_is_what_the_code_draws(name, tmp_path):
    draw.save(name, tmp_path / "new.svg")
    stored = ASSETS / f"{name}.svg"
    assert stored.exists() and stored.read_bytes() == (tmp_path / "new.svg").read_bytes(), (
        f"{stored.name} is stale: make figures"
    )


def test_no_stored_figure_is_left_over():
    assert sorted(path.stem for path in ASSETS.glob("*.svg")) == sorted(draw.drawings())


def test_a_figure_says_in_its_title_what_it_shows():
    for name in draw.drawings():
        title = ET.parse(ASSETS / f"{name}.svg").getroot().find("{http://www.w3.org/2000/svg}title").text
        assert title == draw.said()[name] and len(title) > 20


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_each_picture_of_a_lesson_exists_and_has_alt_text(lesson):
    text = lesson.read_text()
    pictures = re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", text)
    assert "<img" not in text, "use ![what it shows](../assets/name.svg)"
    for alt, target in pictures:
        assert len(alt) > 20, f"{target} needs a sentence that says what it shows"
        assert (lesson.parent / target).resolve().exists(), f"{target} is missing"


def test_tints_stay_between_the_colour_and_white():
    assert tint("#0072B2", 1) == "#0072b2"
    assert tint("#0072B2", 0) == "#ffffff"


def test_rank_colours_repeat_after_eight():
    assert rank_colour(8) == rank_colour(0)
    assert len(set(RANK_COLOURS)) == 8


def test_a_sweep_shows_measured_over_predicted_below_the_times():
    from manyhands.plots.times import against_size

    figure = against_size([64, 1024], {"gloo": [2e-3, 3e-3]}, {"gloo": [1e-3, 3e-3]}, "a hop")
    times, ratios = figure.axes
    assert list(ratios.lines[0].get_ydata()) == [2, 1]
    assert times.get_yscale() == "log"
    assert times.get_ylabel() == "measured time, ms"


def test_samples_of_a_sweep_become_their_median_with_whiskers_from_the_least_to_the_most():
    from manyhands.plots.times import against_size

    samples = [[4e-3, 1e-3, 2e-3], [5e-3, 3e-3, 9e-3]]
    times, ratios = against_size([64, 1024], {"gloo": samples}, {"gloo": [1e-3, 5e-3]}, "a hop").axes
    assert list(ratios.lines[0].get_ydata()) == [2, 1]
    whiskers = [segment[:, 1].tolist() for segment in times.collections[0].get_segments()]
    assert [[pytest.approx(end) for end in whisker] for whisker in whiskers] == [[1, 4], [3, 9]]


def test_a_series_looks_the_same_in_each_plot_and_its_name_stands_at_its_end():
    from manyhands.plots.looks import ALTERNATIVES
    from manyhands.plots.times import against_size, bandwidths

    looks = dict(zip(("gloo", "MPI", "our ring"), ALTERNATIVES, strict=False))
    hop = against_size([64, 1024], {"gloo": [1e-3, 2e-3], "MPI": [1e-3, 2e-3]}, {}, "a hop", looks=looks)
    reduce_s = {"our ring": [1e-3, 2e-3], "MPI": [1e-3, 2e-3]}
    for axes in (hop.axes[0], bandwidths([64, 1024], reduce_s, 1.5, "all-reduce", looks=looks).axes[1]):
        colours = {text.get_text(): text.get_color() for text in axes.texts}
        assert colours["MPI"] == looks["MPI"]["color"] == ALTERNATIVES[1]["color"]
        heights = sorted(text.get_position()[1] for text in axes.texts)
        assert heights[1] - heights[0] > 0.05, "names at the same height would cover each other"


def test_a_sweep_in_a_world_of_one_has_only_zeros_and_is_drawn(recwarn):
    from manyhands.plots.times import against_size, bandwidths

    against_size(
        [64, 1024], {"ring": [0, 0]}, {"ring": [0, 0]}, "nobody to talk to", unit="virtual"
    ).draw_without_rendering()
    bandwidths([64, 1024], {"ring": [0, 0]}, 0, "nobody to talk to").draw_without_rendering()
    # what earlier tests left to the garbage collection may complain here: that is not ours
    assert [w for w in recwarn.list if not issubclass(w.category, ResourceWarning)] == []


def test_bus_bandwidth_is_algorithm_bandwidth_times_its_factor():
    from manyhands.plots.times import bandwidths

    algorithm, bus = bandwidths([2_000_000], {"gloo": [1.0]}, 1.5, "all-reduce").axes
    assert algorithm.lines[0].get_ydata()[0] == 2
    assert bus.lines[0].get_ydata()[0] == 3
