"""`make my-report`: what an attendee has built and had checked, from the verdicts that a copy holds."""

import json
from types import SimpleNamespace

import pytest
from manyhands import checks
from manyhands.tools import my_report


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("MANYHANDS_OUTPUTS", str(tmp_path))
    return tmp_path


def test_a_copy_with_three_builds_has_a_page_with_what_is_right_and_nothing_of_the_slips(outputs, capsys):
    for build, title, verdict in (
        ("A", "the mean", "divide by 4, not by 3"), ("A", "the mean", "correct"), ("B", "a <bucket>", "correct"),
        ("C", "overlap", "it waits before it sends"), ("A", "the mean", "a slip after it was right"),
    ):  # fmt: skip
        checks.keep("data_parallel", build, title, verdict)
    with (outputs / checks.RECORD).open("a") as record:
        record.write('half a line\n{"topic": "no such lesson", "build": "A"}\n')
    assert my_report.main(["--name", "Ana & Co"]) == 0
    page = (outputs / "my_report.html").read_text()
    assert "what Ana &amp; Co built" in page and "2 of 3 builds and exercises of 1 lessons are right" in page
    assert "<td>03</td><td>A</td><td>the mean</td>" in page and "a &lt;bucket&gt;" in page
    assert "overlap" not in page and "divide by 4" not in page and "slip" not in page
    assert capsys.readouterr().out.strip() == str(outputs / "my_report.html")


def test_without_a_check_there_is_nothing_to_report(outputs, capsys):
    assert my_report.main([]) == 0
    assert "nothing has been checked here yet" in capsys.readouterr().out and not list(outputs.iterdir())


@pytest.mark.parametrize(("launcher", "kept"), [("notebook", ["correct"]), ("torchrun", [])])
def test_a_check_in_a_notebook_keeps_its_verdict_and_one_in_a_script_does_not(outputs, monkeypatch, launcher, kept):
    monkeypatch.setattr(checks, "_one_turn", lambda *turn: checks.CORRECT)

    @checks.exercise("A", "the mean")
    def body(answer, ranks):
        """A check."""

    body.__wrapped__.__module__ = "manyhands.checks.data_parallel"
    ranks = SimpleNamespace(rank=0, launcher=launcher, lesson="03_data_parallel", world_size=1, joined=True)
    body(lambda: None, ranks)
    record = outputs / checks.RECORD
    lines = record.read_text().splitlines() if record.exists() else []
    assert [json.loads(line)["verdict"] for line in lines] == kept
