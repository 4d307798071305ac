"""event.toml: what the site, the decks and a calendar show of an event, and what a wrong key says."""

import re
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "assets" / "site"))
event = pytest.importorskip("event")
import build  # noqa: E402 - a program of the site, which finds its neighbours there

TWO_DAYS = """
accent = "#0a5c99"
place = "Room 5"
contact = "the user office"
time_zone = "America/Chicago"
break_minutes = 20
[[days]]
date = 2027-03-13
start = "08:30"
program = [["Accounts", 30], "00", "break", "02"]
[[days]]
date = 2027-03-14
program = ["03", "lunch", "04"]
"""
DAY = "name = 'x'\n[[days]]\ndate = 2027-03-01\n"


def held(tmp_path, text):
    path = tmp_path / "event.toml"
    path.write_text(text)
    return event.read_event(path)


def test_two_days_in_another_zone_are_a_banner_a_program_and_calendar_entries(tmp_path):
    school = held(tmp_path, 'name = "School & Co"\n' + TWO_DAYS)
    assert school.banner == "School &amp; Co, 13 to 14 March 2027, Room 5"
    core = {row.number: row.core for row in build.rows()}
    program = school.program(build.rows())
    assert "**Saturday, 13 March 2027**" in program and "Times are those of America/Chicago" in program
    assert "| 08:30 | 09:00 | Accounts |" in program and "Questions: the user office." in program
    ends = 8 * 60 + 30 + 30 + core["00"] + 20 + core["02"]
    assert f"| {ends // 60:02d}:{ends % 60:02d} |" in program
    icalendar = pytest.importorskip("icalendar")
    first, second = icalendar.Calendar.from_ical(school.calendar(build.rows())).walk("VEVENT")
    assert first["SUMMARY"] == "School & Co, day 1" and first["LOCATION"] == "Room 5"
    assert first.decoded("DTSTART").astimezone(UTC) == datetime(2027, 3, 13, 14, 30, tzinfo=UTC), "winter time"
    assert second.decoded("DTSTART").astimezone(UTC) == datetime(2027, 3, 14, 14, 0, tzinfo=UTC), "summer time began"
    lasts = (first.decoded("DTEND") - first.decoded("DTSTART")).total_seconds() / 60
    assert lasts == ends - 8 * 60 - 30


def test_a_site_has_the_events_program_its_colour_and_a_calendar_file(tmp_path, monkeypatch):
    school = held(tmp_path, 'name = "School & Co"\n' + TWO_DAYS)
    run, seen = subprocess.run, {}

    def without_sphinx(words, *more, **how):
        if "sphinx" not in words:
            return run(words, *more, **how)
        source, output = words[-2:]
        output.mkdir()
        seen["program"] = (source / "programs.md").read_text("utf-8")
        seen["style"] = (source / "_static" / "site.css").read_text("utf-8")
        seen["banner"] = f"html_theme_options.announcement={school.banner}" in words
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", without_sphinx)
    monkeypatch.setattr(build, "read_event", lambda: school)
    monkeypatch.setattr(event.Event, "calendar", lambda self, rows: self.days[1].date.isoformat().encode())
    monkeypatch.setattr(sys, "argv", ["build.py", "--output", str(tmp_path / "site")])
    assert build.main() == 0
    assert (tmp_path / "site" / "event.ics").read_text() == "2027-03-14"
    assert "**Sunday, 14 March 2027**" in seen["program"] and "| 08:30 | 09:00 | Accounts |" in seen["program"]
    assert seen["banner"] and "--color-brand-primary: #0a5c99" in seen["style"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nam = 'x'", "nam is unknown; use one of name, page, logo, accent, place, contact, time_zone, "),
        ("name = 'x'\npage = 'here'", "page = 'here': it is no address; begin it with https://"),
        ("name = 'x'\nlogo = 'no.svg'", "logo = 'no.svg': it is no file in "),
        ("accent = 'blue'", "accent = 'blue': it is no colour; write it as #0a5c99"),
        ("accent = '#ffee00'", "accent = '#ffee00': its contrast with white is 1.2 : 1, and links need 4.5; darken it"),
        ("place = 'Room 5'", "place needs a name of the event"),
        ("time_zone = 'Berlin'", "time_zone = 'Berlin': it is no time zone; use a name such as Europe/Berlin"),
        ("break_minutes = 0", "break_minutes = 0: input should be greater than 0"),
        (
            "name = 'x'\n[[days]]\ndate = 2027-03-01\nstart = '9'\nprogram = ['00']",
            "days.1.start = '9' is no time; write",
        ),
        (
            "name = 'x'\n[[days]]\ndate = 2027-03-01\nlessons = ['00']\nprogram = ['00']",
            "days.1.lessons is unknown; use",
        ),
        (DAY + "program = []", "days.1.program = []: list should have at least 1"),
        ("name = 'x", "event.toml: "),
    ],
)
def test_a_wrong_key_is_named_with_what_is_right(tmp_path, text, said):
    with pytest.raises(SystemExit) as refused:
        held(tmp_path, text)
    assert said in str(refused.value)


def test_an_unknown_lesson_in_a_program_is_named(tmp_path):
    days = DAY + "program = ['00', '99']"
    with pytest.raises(ValueError, match="days, 2027-03-01: '99' is no lesson; use 00, 01"):
        held(tmp_path, days).program(build.rows())


def test_the_site_for_attendees_has_no_page_for_teachers_in_its_lists_and_no_link_to_one(monkeypatch):
    monkeypatch.setattr(build, "left_out", set(build.FOR_TEACHERS))
    index = build.for_attendees((ROOT / "assets" / "site" / "index.md").read_text("utf-8"))
    listed = [line for block in index.split("```{toctree}")[1:] for line in block.split("```")[0].split("\n")]
    assert not set(listed) & set(build.FOR_TEACHERS) and {"start", "programs", "zoo", "serve"} <= set(listed)
    assert "Contribute" not in index and "instructor" not in index and "administrator" not in index
    assert build.page_of("assets/site/teach.md") is None and build.page_of("assets/site/hangs.md") == "hangs.md"
    programs = build.without_left_out(build.pages.programs(build.rows()))
    assert "first_hour.md" not in programs and "Accounts, keys, hub" in programs


def test_each_number_of_the_page_for_whoever_decides_is_computed_from_what_it_is_about():
    page, table = (ROOT / "assets" / "site" / "for_us.md").read_text("utf-8"), build.rows()
    now = build.for_a_class(table)
    shown = set(re.findall(r"@(\w+)@", page))
    assert shown - build.counts({}, table).keys() == now.keys()
    assert "a node of 64 cores and 256 GiB" in page and "If 30 people" in page and "nodes of four\nGPUs" in page

    def changed(table=table, **other):
        return {name for name, number in build.for_a_class(table, **other).items() if number != now[name]}

    longer = [replace(row, core=row.core + 60) for row in table]
    assert changed(longer) == {"hours", "halfday"}
    assert changed(attendees=60) == {"node_hours", "halfday_node_hours"}
    assert changed(cores=8) == {"fit_cores"} and changed(gib=8) == {"fit_memory"}
