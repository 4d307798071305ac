"""The `parameters` cell is the only place where a value, its type, its help and its range are written."""

import re

import pytest
from manyhands.course.lesson_parameters import ParameterError, help_text, least_ranks, parse, read, read_cell, validate
from manyhands.launch.allocation import RanksError
from manyhands.notebook.start import ranks_here, told_of_ranks

CELL = """\
n_ranks = 4        # processes; in a script the launcher decides
length = 4         # numbers per rank, >= 1
bucket_mib = 0.1   # bucket size in MiB, > 0
workers = 2        # 1 to 256
kind = "ring"      # which algorithm, one of ring, tree
offset = -3        # may be negative
label = "a to b"   # what the plot says, for example a to b
"""


@pytest.fixture
def known():
    return read_cell(CELL)


def refused(known, *argv):
    with pytest.raises(ParameterError) as error:
        parse(known, argv)
    return str(error.value)


def test_a_cell_gives_name_default_help_and_range(known):
    found = {p.name: (p.default, p.help, p.limits) for p in known}
    assert found["length"] == (4, "numbers per rank", ">= 1")
    assert found["bucket_mib"] == (0.1, "bucket size in MiB", "> 0")
    assert found["workers"] == (2, "", "1 to 256")
    assert found["kind"] == ("ring", "which algorithm", "one of ring, tree")
    assert found["offset"] == (-3, "may be negative", "")
    assert found["label"][2] == "", "prose that looks like a range is prose"


def test_flags_have_the_type_of_the_cells_literal(known):
    argv = ["--length", "8", "--bucket-mib=2", "--kind", "tree", "--offset", "-7"]
    values = parse(known, argv)
    assert values == {"length": 8, "bucket_mib": 2.0, "kind": "tree", "offset": -7}
    assert type(values["bucket_mib"]) is float
    assert parse(known, ["--bucket_mib", "3"]) == {"bucket_mib": 3.0}, "underscores are accepted too"
    assert parse(known, ["--label=x=y"]) == {"label": "x=y"}
    assert parse(known, []) == {}


def test_an_unknown_flag_is_refused_with_the_closest_and_with_all_valid_ones(known):
    message = refused(known, "--lenght", "8")
    assert message.startswith("--lenght is unknown; did you mean --length?")
    for flag in ("--bucket-mib", "--workers", "--kind", "--offset", "--label"):
        assert flag in message
    assert "--n-ranks" not in message
    assert "did you mean" not in refused(known, "--zzz", "8")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--length", "-1"], "--length -1 is not accepted: it takes a whole number >= 1"),
        (["--bucket-mib", "0"], "--bucket-mib 0 is not accepted: it takes a number > 0"),
        (["--workers", "257"], "--workers 257 is not accepted: it takes a whole number 1 to 256"),
        (["--kind", "star"], "--kind star is not accepted: it takes one of ring, tree"),
        (["--length"], "--length needs a value: a whole number >= 1"),
    ],
)
def test_a_malformed_flag_is_refused_with_what_it_takes(known, argv, sentence):
    assert refused(known, *argv).startswith(sentence)


def test_the_number_of_ranks_is_the_launchers(known):
    for flag in ("--n-ranks", "--n_ranks"):
        message = refused(known, flag, "8")
        assert "the launcher decides" in message and "mpiexec -n 4" in message


def test_help_comes_from_the_comments(known):
    text = help_text(known, "scripts/02_collectives.py")
    assert text.splitlines()[0] == "python scripts/02_collectives.py [--flag value ...]"
    assert "--length      numbers per rank; a whole number >= 1 (now 4)" in text
    assert "--kind        which algorithm; one of ring, tree (now ring)" in text
    assert "n-ranks" not in text
    assert "takes no flags" in help_text([], "plain.py")


def test_injected_values_are_checked_as_flags_are(known):
    assert validate(known, {"length": 8, "bucket_mib": 1, "n_ranks": None}) == {
        "length": 8,
        "bucket_mib": 1.0,
        "n_ranks": None,
    }
    for values, sentence in [
        ({"length": 0}, "length = 0 is not accepted: it takes a whole number >= 1"),
        ({"n_ranks": 0}, "n_ranks = 0 is not accepted"),
        ({"lenght": 8}, "lenght is unknown; did you mean length?"),
    ]:
        with pytest.raises(ParameterError) as error:
            validate(known, values)
        assert str(error.value).startswith(sentence)


def test_every_command_that_the_course_shows_is_accepted(root):
    """A command of a lesson, wherever the course shows it, names only flags that the lesson has."""
    pages = [
        root / "README.md",
        *root.glob("assets/site/*.md"),
        *root.glob("jobs/*"),
        *root.glob("scripts/*.py"),
        *root.glob("scripts/manyhands/**/*.py"),
    ]
    commands = [
        (page.name, *command)
        for page in pages
        if page.is_file()
        for command in re.findall(
            r"(?<!\S)scripts/(\d\d_\w+)\.py((?: +(?:-- +)?--[\w-]+[= ][\w.+-]+)+)", page.read_text()
        )
    ]
    assert len(commands) > 8
    for _, lesson, flags in commands:
        parse(read(root / "scripts" / f"{lesson}.py"), [word for word in flags.split() if word != "--"])


@pytest.mark.parametrize(
    ("asked", "own", "ranks"),
    [("", 4, {}), ("2", 4, {"n_ranks": 2}), ("2", 3, {}), ("4", 4, {}), ("1", None, {"n_ranks": 1})],
)
def test_a_site_sets_the_ranks_of_notebooks_whose_parameters_nobody_has_changed(known, monkeypatch, asked, own, ranks):
    monkeypatch.setenv("MANYHANDS_RANKS", asked)
    found = ranks_here(known, {} if own is None else {"n_ranks": own})
    assert found == ranks and bool(told_of_ranks(found)) == bool(ranks)
    assert told_of_ranks(found).startswith(f"MANYHANDS_RANKS={asked}: this starts {asked} rank" * bool(ranks))


def test_a_lesson_says_how_many_ranks_it_needs_and_gets_no_fewer(monkeypatch, capsys):
    known = read_cell("n_ranks = 4  # processes, at least 2")
    assert validate(known, {"n_ranks": 2}) == {"n_ranks": 2}
    for said, least in (("", 1), (", at least 3", 3), (", > 1", 2), (", 2 to 8", 2), (", < 9", 1)):
        assert least_ranks(read_cell(f"n_ranks = 4  # processes{said}")) == least
    with pytest.raises(ParameterError, match="n_ranks = 1 is not accepted: it takes a whole number >= 2"):
        validate(known, {"n_ranks": 1})
    monkeypatch.setenv("MANYHANDS_RANKS", "1")
    assert ranks_here(known, {"n_ranks": 4}) == {}
    assert "MANYHANDS_RANKS=1 does not count: this lesson needs at least 2 ranks" in capsys.readouterr().out
    monkeypatch.setenv("MANYHANDS_RANKS", "2")
    assert ranks_here(known, {"n_ranks": 4}) == {"n_ranks": 2}


@pytest.mark.parametrize("asked", ["0", "two", "-1"])
def test_a_number_of_ranks_that_is_none_is_refused(monkeypatch, asked):
    monkeypatch.setenv("MANYHANDS_RANKS", asked)
    with pytest.raises(RanksError, match=f"MANYHANDS_RANKS='{asked}' is no number of ranks; use 1 or more"):
        ranks_here([], {})
