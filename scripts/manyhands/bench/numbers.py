"""A measured number beside its aim: as a row of a table, as a share of its aim in a plot."""

import json
from dataclasses import asdict, dataclass

from manyhands.course.folders import write_whole


@dataclass(frozen=True)
class Number:
    """One measurement. `aim` is the most it should be, or the least where `at_least`; value None: not measured."""

    what: str
    value: float | None
    unit: str
    aim: float
    at_least: bool = False
    note: str = ""

    @property
    def within(self):
        """Does it keep its aim? None if it was not measured."""
        if self.value is None:
            return None
        return self.value >= self.aim if self.at_least else self.value <= self.aim


def write(output, numbers, load, root):
    """bench.json and bench.svg, each complete or not at all."""
    from manyhands.preflight.facts import gather_facts

    content = {
        "facts": {**gather_facts(root), "load before": round(load, 2)},
        "numbers": [as_json(number) for number in numbers],
    }
    write_whole(output / "bench.json", json.dumps(content, indent=1) + "\n")
    plot(numbers).savefig(output / "bench.svg")


def as_json(number):
    return {**asdict(number), "within": number.within}


def plot(numbers):
    """Each number as a share of its aim: left of the line is better; a ratio that should be large is turned over."""
    from matplotlib.figure import Figure

    from manyhands.plots.looks import EDGE, LIMIT, PAPER

    shown = [number for number in numbers if number.value]
    figure = Figure(figsize=(7, 0.6 + 0.32 * max(1, len(shown))), layout="constrained")
    axes = figure.subplots()
    shares = [number.aim / number.value if number.at_least else number.value / number.aim for number in shown]
    colours = [EDGE if number.within else LIMIT["color"] for number in shown]
    bars = axes.barh([number.what for number in shown], shares, color=colours)
    axes.axvline(1, **LIMIT)
    for label in axes.bar_label(bars, [f"{number.value:.3g} {number.unit}" for number in shown], padding=3, fontsize=8):
        label.set_bbox({"fc": PAPER, "ec": "none", "pad": 1})
    axes.set_xlim(0, max([1.25, *[1.35 * share for share in shares]]))
    axes.set_xlabel("share of the aim (the red line; red bars are beyond it)")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def show(numbers, *paths):
    """Print each number beside its aim, and where it was written."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    for column in ("what", "measured", "aim", ""):
        table.add_column(column, justify="right" if column in ("measured", "aim") else "left")
    for number in numbers:
        sign = "at least" if number.at_least else "at most"
        value = "not measured" if number.value is None else f"{number.value:.3g} {number.unit}".strip()
        verdict = {True: ("within", "green"), False: ("beyond", "yellow"), None: (number.note, "red")}[number.within]
        table.add_row(number.what, value, f"{sign} {number.aim:g}", Text(*verdict))
    console = Console(highlight=False)
    console.print(table)
    console.print(f"written: {', '.join(map(str, paths))}", soft_wrap=True)
