"""What was kept of a text and what was dropped: on the screen, as report.json and as report.png."""

import json

from manyhands.course.folders import write_whole

REPORT = ("report.json", "report.png")
EXCERPT = 60  # characters


def excerpt(raw, text):
    """Where a document begins, and how: what a report shows of it."""
    start = " ".join(text[: 4 * EXCERPT].split())[:EXCERPT]
    return {"file": raw.path.name, "line": raw.line, "begins": start}


def write_report(folder, report):
    """report.json and report.png. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from manyhands.plots.kept_and_dropped import kept_and_dropped

    write_whole(folder / REPORT[0], json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    figure = kept_and_dropped(report["documents"], report["characters"], "What was kept, and what was dropped")
    FigureCanvasAgg(figure)
    figure.savefig(folder / REPORT[1], dpi=120)


def shown_report(report):
    """The table that people see, a str: what was dropped and why, with an example of each."""
    documents, characters = report["documents"], report["characters"]
    lines = [f"{'':<16}{'documents':>10}{'characters':>14}"]
    for name, count in documents.items():
        if count or name == "kept":
            lines.append(f"{name:<16}{count:>10,}{characters[name]:>14,}")
            if name in report["examples"]:
                lines += _example(report["examples"][name])
    tokenizer, splits = report["tokenizer"], report["splits"]
    lines += ["", f"tokenizer: {tokenizer['kind']}, a vocabulary of {tokenizer['symbols']:,}"]
    for split, about in splits.items():
        each = about["bytes"] / max(1, about["tokens"])
        lines.append(
            f"{split + ':':<12}{about['documents']:,} documents, {about['tokens']:,} tokens of {each:.2f} bytes on average"
        )
    return "\n".join(lines)


def _example(example):
    def visible(text):
        return "".join(c if c.isprintable() else "." for c in text)

    def place(one):
        return f"{visible(one['file'])} line {one['line']:,}"

    lines = [f"  such as {place(example)}: {visible(example['begins'])!r}"]
    if "like" in example:
        lines.append(f"  which is like {place(example['like'])}")
    return lines
