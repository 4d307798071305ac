"""The trainer's part on the screen and in files: rows beside the plain loop, promises beside their aims."""

import json
from dataclasses import asdict

from manyhands.bench.comparison import TWO_AIM
from manyhands.bench.numbers import as_json, show
from manyhands.bench.other_load import QUIET_CORES
from manyhands.course.folders import write_whole

CORES = 2  # that the aims were set for


def write_trainer(output, root, found, numbers, settings):
    """trainer.json and trainer.svg, each complete or not at all."""
    from manyhands.preflight.facts import gather_facts

    content = {
        "facts": {
            **gather_facts(root),
            **settings,
            "quiet": quiet(found),
            "peak_flop_per_s": found.flop_per_s,
        },
        "rows": [row_json(one) for one in found.rows],
        "numbers": [as_json(number) for number in numbers],
    }
    write_whole(output / "trainer.json", json.dumps(content, indent=1) + "\n")
    plot(found).savefig(output / "trainer.svg")


def row_json(found):
    row = found.row
    numbers = {name: value for name, value in asdict(found).items() if name != "row"}
    return {"name": row.name, "ranks": row.ranks, "worlds": row.worlds, "threads": row.threads, **numbers}


def quiet(found):
    """Whether others used the machine during the bursts: a sentence."""
    if not found.loud:
        return f"The machine was quiet: others used at most {QUIET_CORES:g} cores during each burst"
    most = max(one.others for one in found.rows if one.others is not None)
    return (
        f"The machine was NOT quiet: others used more than {QUIET_CORES:g} cores during {found.loud} of {found.bursts}"
        f" bursts, up to {most:.1f}; measure again when nothing else runs"
    )


def show_trainer(output, found, numbers, settings):
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1), header_style="bold")
    table.add_column("", no_wrap=True)
    for column in ("tokens/s", "/ plain", "range", "MFU", "scaling", "GiB", "others"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in found.rows:
        if one.error:
            table.add_row(one.row.name, Text("missing", "red"))
        else:
            table.add_row(one.row.name, *cells(one))
    console = Console(highlight=False)
    console.print(table)
    peak = "not measured" if not found.flop_per_s else f"{found.flop_per_s / 1e9:,.0f} GFLOP/s"
    rounds = f"{settings['rounds']} rounds of {settings['steps']} steps"
    notes = [
        f"Medians of {rounds}; a ratio is taken to the burst of the plain loop directly before. MFU: of {peak}, the best"
        " matrix product here on all threads. Scaling: tokens/s / (ranks x one rank of one thread). GiB: of the largest"
        " process. Others: the most cores that others used. Ranks have one thread each, one process has all of them.",
        *(f"{one.row.name}: not measured: {one.error}" for one in found.rows if one.error),
        f"{quiet(found)}.",
    ]
    if settings["cores"] != CORES:
        notes.append(
            f"The aims are for {CORES} cores and here are {settings['cores']}: `taskset -c 0,1 make bench` takes two."
        )
    for note in notes:
        console.print(Text(note, "yellow" if "NOT" in note or "not measured: " in note else ""), soft_wrap=True)
    show(numbers, output / "trainer.json", output / "trainer.svg")


def cells(one):
    def formed(value, form):
        return "-" if value is None else form.format(value)

    ratio = one.ratio
    return (
        f"{one.tokens_per_s.median:,.0f}",
        formed(ratio and ratio.median, "{:.2f}"),
        f"{ratio.least:.2f}-{ratio.most:.2f}" if ratio else "-",
        formed(one.mfu, "{:.0%}"),
        formed(one.scaling and one.scaling.median, "{:.0%}"),
        f"{one.peak_gib:.2f}",
        f"{one.others:.2f}",
    )


def plot(found):
    """Bars: tokens/s as a multiple of the plain loop's, with the range of the rounds."""
    from matplotlib.figure import Figure

    from manyhands.plots.looks import EDGE, INK, LIMIT, PAPER, QUIET

    shown = [one for one in found.rows if one.ratio]
    figure = Figure(figsize=(7, 0.9 + 0.32 * max(1, len(shown))), layout="constrained")
    axes = figure.subplots()
    medians = [one.ratio.median for one in shown]
    spread = [
        [one.ratio.median - one.ratio.least for one in shown],
        [one.ratio.most - one.ratio.median for one in shown],
    ]
    axes.barh([one.row.name for one in shown], medians, color=EDGE, xerr=spread, ecolor=QUIET, capsize=2)
    reach = max([1.2, *[one.ratio.most for one in shown]])
    for i, one in enumerate(shown):
        label = f"{one.ratio.median:.2f}: {one.tokens_per_s.median:,.0f} tokens/s"
        text = axes.text(one.ratio.most + 0.02 * reach, i, label, va="center", size=8)
        text.set_bbox({"fc": PAPER, "ec": "none", "pad": 1})
    axes.axvline(1, color=INK, lw=1.2)
    axes.axvline(TWO_AIM, **LIMIT)
    axes.set_xlim(0, 1.4 * reach)
    axes.set_xlabel(f"tokens/s / the plain loop's; red: the aim of 2 ranks, {TWO_AIM:g}")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return figure
