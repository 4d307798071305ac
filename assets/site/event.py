"""Who holds the course, and when: `event.toml`, and what the site, the decks and a calendar show of it."""

import re
import tomllib
from datetime import date, datetime, time, timedelta
from html import escape
from pathlib import Path
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pages
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

HERE = Path(__file__).resolve().parent
LEAST_CONTRAST = 4.5  # of links on white: WCAG 2.2, level AA


def address(text):
    """Raise ValueError for what is no address of a page; "" is none."""
    if text and not text.startswith(("https://", "http://")):
        raise ValueError("it is no address; begin it with https://")
    return text


def dark_enough(colour):
    """Raise ValueError for what is no colour, or too light to read on white."""
    if not colour:
        return colour
    if not re.fullmatch("#[0-9a-fA-F]{6}", colour):
        raise ValueError("it is no colour; write it as #0a5c99")
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    contrast = 1.05 / (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)
    if contrast < LEAST_CONTRAST:
        raise ValueError(f"its contrast with white is {contrast:.1f} : 1, and links need {LEAST_CONTRAST}; darken it")
    return colour


class Day(BaseModel):
    """A day: when it begins, and what follows, each the number of a lesson, "break", "lunch", or [words, minutes]."""

    model_config = ConfigDict(extra="forbid")
    date: date
    start: Annotated[str, Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")] = "09:00"
    program: list[str | tuple[str, Annotated[int, Field(gt=0)]]] = Field(min_length=1)


class Event(BaseModel):
    """What event.toml says; "" and no days show nothing."""

    model_config = ConfigDict(extra="forbid")
    name: str = ""
    page: Annotated[str, AfterValidator(address)] = ""
    logo: str = ""  # a file in assets/site
    accent: Annotated[str, AfterValidator(dark_enough)] = ""
    place: str = ""
    contact: str = ""
    time_zone: str = "UTC"
    break_minutes: Annotated[int, Field(gt=0)] = 15
    lunch_minutes: Annotated[int, Field(gt=0)] = 60
    days: list[Day] = []

    @field_validator("logo")
    @classmethod
    def _logo(cls, logo):
        if logo and (Path(logo).name != logo or not (HERE / logo).is_file()):
            raise ValueError(f"it is no file in {HERE}")
        return logo

    @field_validator("time_zone")
    @classmethod
    def _zone(cls, name):
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError("it is no time zone; use a name such as Europe/Berlin") from None
        return name

    @model_validator(mode="after")
    def _named(self):
        for key in ("page", "place", "contact", "days"):
            if getattr(self, key) and not self.name:
                raise ValueError(f"{key} needs a name of the event")
        if sorted({day.date for day in self.days}) != [day.date for day in self.days]:
            raise ValueError("days: each date is later than the one before")
        return self

    @property
    def link(self):
        """The name, and the link to its page, as HTML."""
        return f'<a href="{escape(self.page)}">{escape(self.name)}</a>' if self.page else escape(self.name)

    @property
    def when(self):
        """The first and the last date: "1 March 2027", "1 to 2 March 2027"; "" without days."""
        if not self.days:
            return ""
        first, last = self.days[0].date, self.days[-1].date
        if first == last:
            return _written(last)
        short = str(first.day) if (first.year, first.month) == (last.year, last.month) else _written(first)
        return f"{short} to {_written(last)}"

    @property
    def banner(self):
        """The name with its link, dates and place, as HTML."""
        return ", ".join(filter(None, (self.link, self.when, escape(self.place))))

    def items(self, day):
        """Return the items of a day as `pages.timetable` takes them."""
        breaks = {"break": ("break", self.break_minutes), "lunch": ("lunch", self.lunch_minutes)}
        return [breaks.get(item, item) if isinstance(item, str) else item for item in day.program]

    def program(self, table):
        """Return the event's program as Markdown, "" without days. `table`: the rows of the lessons."""
        if not self.days:
            return ""
        known = {row.number for row in table}
        where = f"{self.place}. " * bool(self.place)
        parts = [f"## {self.name}", f"{self.when}. {where}Times are those of {self.time_zone}."]
        for day in self.days:
            if unknown := [one for one in self.items(day) if isinstance(one, str) and one not in known]:
                said = f"days, {day.date}: {unknown[0]!r} is no lesson"
                numbers = ", ".join(sorted(known))
                raise ValueError(f'{said}; use {numbers}, "break", "lunch" or ["words", minutes]')
            begins = pages.timetable(day.start, self.items(day), table)
            parts += [f"**{day.date.strftime('%A')}, {_written(day.date)}**", begins]
        more = [f"Questions: {self.contact}."] * bool(self.contact)
        return "\n\n".join([*parts, *more, '<a href="event.ics">The event as a calendar file</a>'])

    def calendar(self, table):
        """Return an iCalendar file, bytes: an entry for each day."""
        import icalendar

        calendar, minutes = icalendar.Calendar(), {row.number: row.core for row in table}
        calendar.add("prodid", "-//Many Hands//event//EN")
        calendar.add("version", "2.0")
        for number, day in enumerate(self.days, 1):
            lasts = sum(minutes[one] if isinstance(one, str) else one[1] for one in self.items(day))
            begins = datetime.combine(day.date, time.fromisoformat(day.start), ZoneInfo(self.time_zone))
            entry = icalendar.Event()
            entry.add("uid", f"{day.date}-{re.sub('[^a-z0-9]+', '-', self.name.lower())}")
            entry.add("summary", f"{self.name}, day {number}" if len(self.days) > 1 else self.name)
            entry.add("dtstamp", begins)
            entry.add("dtstart", begins)
            entry.add("dtend", begins + timedelta(minutes=lasts))
            for key, value in (("location", self.place), ("url", self.page), ("description", self.contact)):
                if value:
                    entry.add(key, value)
            calendar.add_component(entry)
        calendar.add_missing_timezones()
        return calendar.to_ical()


def _written(day):
    return f"{day.day} {day.strftime('%B %Y')}"


def read_event(path=HERE / "event.toml"):
    """Return the Event that a file describes; ends the program with a sentence that names the key where it is wrong."""
    try:
        return Event.model_validate(tomllib.loads(path.read_text("utf-8")))
    except ValidationError as error:
        raise SystemExit("\n".join(f"{path}: {_sentence(one)}" for one in error.errors())) from None
    except ValueError as error:
        raise SystemExit(f"{path}: {error}") from None


def _sentence(error):
    parts = [part + 1 if isinstance(part, int) else part for part in error["loc"]]
    where = ".".join(str(part) for part in parts if not str(part).startswith(("str", "tuple")))
    if error["type"] == "extra_forbidden":
        of = Day if error["loc"][0] == "days" else Event
        return f"{where} is unknown; use one of {', '.join(of.model_fields)}"
    if error["type"] == "string_pattern_mismatch":
        return f"{where} = {error['input']!r} is no time; write it as 09:00"
    if error["type"] == "value_error":
        said = str(error["ctx"]["error"])
        return f"{where} = {error['input']!r}: {said}" if where else said
    return f"{where} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"
