"""A colour, a hatch and a line mean one thing in the whole course: each comes from the table in `plots.looks`."""

import ast
import re
from pathlib import Path

import pytest
from manyhands.course.folders import ASSETS, ROOT
from manyhands.course.lessons import Lesson
from manyhands.launch.run_folder import save_figure
from manyhands.plots import looks, times
from matplotlib import rc_context

SOURCES = [
    path for path in sorted([*(ROOT / "scripts").rglob("*.py"), *(ROOT / "assets" / "src").glob("*.py")])
    if path.name not in ("looks.py", "style.py") and "egg-info" not in str(path)
    and not Lesson(path.stem, ROOT).own  # style.py: the sheet of a web page
]  # fmt: skip
COLOUR_ARGUMENTS = {
    "c", "color", "colour", "fc", "ec", "facecolor", "edgecolor", "ecolor", "mfc", "mec", "markerfacecolor", "face",
    "edge", "edgecolors", "facecolors", "cmap", "fill",
}  # fmt: skip
PLOTS = {"plot", "loglog", "semilogx", "semilogy", "errorbar"}
HEX = r"#[0-9a-fA-F]{6}"
FORMAT_WITH_COLOUR = r"(?=.*[bgrcmyk])[bgrcmyk.,ovs^Dx+*:-]+"  # such as "ko-"


def literals(text):
    """[(line, what)]: colours and hatches that a source spells out itself."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(HEX, node.value):
            found.append((node.lineno, node.value))
        given = []
        if isinstance(node, ast.Call):
            given = [(word.arg, word.value) for word in node.keywords]
            if getattr(node.func, "attr", "") in PLOTS:
                found += [
                    (one.lineno, one.value) for one in node.args
                    if isinstance(one, ast.Constant) and re.fullmatch(FORMAT_WITH_COLOUR, str(one.value))
                ]  # fmt: skip
        elif isinstance(node, ast.Dict):
            given = [(getattr(key, "value", None), value) for key, value in zip(node.keys, node.values, strict=True)]
        for name, value in given:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                spelt = value.value not in ("none", "")
                if (name in COLOUR_ARGUMENTS and spelt) or (name == "hatch" and spelt):
                    found.append((value.lineno, f"{name}={value.value!r}"))
    return sorted(set(found))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_source_spells_a_colour_or_a_hatch(path):
    assert literals(path.read_text("utf-8")) == []


def test_a_figure_is_written_where_a_matplotlibrc_wants_latex_and_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with rc_context({"text.usetex": True}):
        figure, axes = looks.new_figure(3, 2)
        axes.plot([1, 1000], [1, 10])
        axes.set(title="50 % of a_b", xscale="log")
        axes.annotate("made later", (1, 1))
        save_figure(figure, tmp_path / "picture.svg")
    assert "<svg" in (tmp_path / "picture.svg").read_text("utf-8")


def table():
    """All colours of the table, lower case."""
    found = set(re.findall(HEX, Path(looks.__file__).read_text("utf-8")))
    return {colour.lower() for colour in found}


@pytest.fixture(scope="module")
def colours():
    return table() | {looks.tint(colour, percent / 100) for colour in table() for percent in range(101)}


@pytest.mark.parametrize("path", sorted(ASSETS.glob("*.svg")), ids=lambda path: path.stem)
def test_the_colours_of_a_figure_are_those_of_the_table(path, colours):
    assert {colour.lower() for colour in re.findall(HEX, path.read_text("utf-8"))} - colours == set()


@pytest.mark.parametrize("path", sorted(ASSETS.glob("*.svg")), ids=lambda path: path.stem)
def test_no_text_of_a_figure_is_smaller_than_it_can_be_read_from_the_back(path):
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", path.read_text("utf-8"))]
    assert sizes and min(sizes) >= 10


def test_a_series_that_ends_early_has_its_name_beside_its_end():
    published = [{"name": "a machine", "points": [[64, 1.0], [2**30, 10.0]]}]
    axes = times.beside_published([64, 4096], [1e-6, 1e-6], 2, published, "").axes[0]
    for text in axes.texts:
        (x,) = (line.get_xdata()[-1] for line in axes.lines if line.get_color() == text.get_color())
        end, _ = axes.transAxes.inverted().transform(axes.transData.transform((x, 1.0)))
        assert 0 < text.get_position()[0] - end < 0.1, text


def test_nothing_but_a_rank_has_a_ranks_colour_and_no_hatch_means_two_things():
    of_ranks = {colour.lower() for colour in looks.RANK_COLOURS}
    kinds = {colour.lower() for colour, _ in looks.BYTES.values()}
    lines = {look["color"].lower() for look in (*looks.ALTERNATIVES, looks.MEASURED, looks.PREDICTED, looks.LIMIT)}
    assert not of_ranks & (kinds | lines)
    hatches = [hatch for _, hatch in looks.BYTES.values()] + [looks.HATCH]
    assert len({hatch[:1] for hatch in hatches}) == len(hatches)
