"""`report.html`: one page, nothing to load, that says what is ready, what is slow and what broke."""

import shlex
from html import escape
from os.path import relpath

from manyhands.plots.looks import RANK_COLOURS
from manyhands.preflight.style import CSS


def write_report(path, results, facts, warnings, seconds, command):
    """Write the page. `facts`: name -> text; `warnings`: sentences; `seconds`: of the whole preflight."""
    path.write_text(page(path.parent, results, facts, warnings, seconds, command), encoding="utf-8")


def page(folder, results, facts, warnings, seconds, command):
    """The HTML; links are relative to `folder`."""
    state, verdict = verdict_of(results, warnings)
    runs = sum(len(result.outcomes) for result in results)
    body = [
        f'<header class="{state}"><p class="course">Many Hands preflight</p><h1>{escape(verdict)}</h1>',
        f"<p>{escape(_sentence(results, runs, seconds, facts))}</p></header>",
        *_warnings(warnings, results),
        _lessons(folder, results),
        *_broken(folder, results),
        _facts(facts, command),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(verdict)} - Many Hands preflight</title><style>{CSS}</style></head>\n"
        f"<body><main>\n{chr(10).join(body)}\n</main></body></html>\n"
    )


def verdict_of(results, warnings):
    """("ready" | "warned" | "broken", a sentence)."""
    failed = sum(not outcome.ok for result in results for outcome in result.outcomes)
    differing = sum(bool(result.differences) for result in results)
    stale = sum(bool(result.stale) for result in results)
    if failed or differing or stale:
        runs = sum(len(result.outcomes) for result in results)
        said = [f"{failed} of {_count(runs, 'run')} failed"] * bool(failed)
        said += [f"{_count(differing, 'lesson')} with metrics that differ"] * bool(differing)
        said += [f"{_count(stale, 'lesson')} with a stale half"] * bool(stale)
        return "broken", "Not ready: " + ", ".join(said)
    if not results:
        return "broken", "Not ready: nothing was run"
    slow = sum(bool(outcome.slow) for result in results for outcome in result.outcomes)
    if warnings or slow:
        said = [_count(len(warnings), "warning")] * bool(warnings) + [f"{slow} slow"] * bool(slow)
        return "warned", "Ready, with " + " and ".join(said)
    return "ready", "Ready"


def _sentence(results, runs, seconds, facts):
    what = f"{_count(len(results), 'lesson')}, {_count(runs, 'run')} in {duration(seconds)}"
    return f"{what}, {facts['when']} on {facts['host']}"


def duration(seconds):
    """6.1 -> "6.1 s", 372 -> "6 min 12 s"."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def _count(n, noun):
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _warnings(warnings, results):
    slow = [
        f"{outcome.run.lesson.name} as a {outcome.run.title} took {outcome.slow}"
        for result in results
        for outcome in result.outcomes
        if outcome.slow
    ]
    said = [("warning", text) for text in warnings] + [("slow", text) for text in slow]
    if said:
        yield '<section class="notices">'
        yield from (f'<p><span class="tag">{kind}</span> {escape(text)}</p>' for kind, text in said)
        yield "</section>"


def _lessons(folder, results):
    columns = list(dict.fromkeys(outcome.run.title for result in results for outcome in result.outcomes))
    longest_s = max([outcome.ended.seconds for r in results for outcome in r.outcomes], default=1) or 1
    heads = "".join(f"<th>{escape(title)}</th>" for title in columns)
    rows = []
    for result in results:
        of = {outcome.run.title: outcome for outcome in result.outcomes}
        cells = "".join(_cell(folder, of.get(title), longest_s) for title in columns)
        rows.append(f"<tr><th>{escape(result.lesson.name)}</th>{_metrics_cell(result)}{cells}</tr>")
    return (
        f"<h2>Lessons</h2><div class=scroll><table class=lessons><thead><tr><th>lesson</th><th>metrics</th>{heads}</tr>"
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
        "<p class=key>Seconds from start to end, and the most memory that all processes of the run held together "
        f"(sampled). Bars: time, the longest being {duration(longest_s)}.</p>"
    )


def _cell(folder, outcome, longest_s):
    if outcome is None:
        return "<td class=none>not run</td>"
    state = ("slow" if outcome.slow else "ok") if outcome.ok else "failed"
    ended, links = outcome.ended, []
    if outcome.run.executed.exists():
        links.append(_link(folder, outcome.run.executed, "notebook"))
        if outcome.run.page.exists():
            links.append(_link(folder, outcome.run.page, "page"))
    if outcome.run.log.exists():
        links.append(_link(folder, outcome.run.log, "log"))
    width = 100 * ended.seconds / longest_s
    return (
        f'<td class="{state}"><b>{state}</b> <span class=time>{duration(ended.seconds)}</span>'
        f"<div class=bar><i style='width:{width:.1f}%'></i></div>"
        f"<small>{ended.peak_bytes / 2**30:.2f} GiB {' '.join(links)}</small></td>"
    )


def _metrics_cell(result):
    if result.differences:
        return '<td class="failed"><b>differ</b></td>'
    if not result.compared:
        return "<td class=none>nothing to compare</td>"
    return f'<td class="ok"><b>agree</b><br><small>{result.compared} runs</small></td>'


def _link(folder, path, text):
    return f'<a href="{escape(relpath(path, folder))}">{text}</a>'


def _broken(folder, results):
    cards = []
    for result in results:
        same = {}  # one card for what failed in the same way
        for outcome in result.outcomes:
            if not outcome.ok:
                same.setdefault(str(outcome.error), []).append(outcome)
        cards += [_card(folder, outcomes) for outcomes in same.values()]
        cards += [_differences(result)] if result.differences else []
        cards += [_stale(result)] if result.stale else []
    if cards:
        yield f"<h2>What broke</h2>{''.join(cards)}"


def _card(folder, outcomes):
    error, lesson = outcomes[0].error, outcomes[0].run.lesson
    titles = ", ".join(outcome.run.title for outcome in outcomes)
    rank = ""
    if error.rank is not None:
        colour = RANK_COLOURS[error.rank % len(RANK_COLOURS)]
        rank = f'<span class=rank style="border-color:{colour}">rank {error.rank}</span> '
    detail = f"<details><summary>the first error in full</summary><pre>{escape(error.detail)}</pre></details>"
    again = "".join(f"<p class=again>again: <code>{escape(command_again(o.run))}</code></p>" for o in outcomes)
    return (
        f"<article><h3>{escape(lesson.name)}: {escape(titles)}</h3><p class=first>{rank}{escape(error.says)}</p>"
        f"{detail if error.detail else ''}{again}</article>"
    )


def command_again(run):
    """The command of this run alone, as one would type it, with all that this run was given."""
    flags = "".join(f" --{k.replace('_', '-')}={shlex.quote(str(v))}" for k, v in run.parameters.items())
    hidden = "CUDA_VISIBLE_DEVICES= " if run.device == "cpu" else ""  # as the run was: a script takes what it sees
    asked = f" --ranks {run.n_ranks}" if run.n_ranks else ""
    asked += f" --device {run.device}" if run.device else ""
    asked += " --short" if run.parameters.keys() - {"device"} else ""
    return {
        "notebook": f"python scripts/preflight.py --lesson {run.lesson.number} --notebooks{asked}",
        "torchrun": f"{hidden}python -m torch.distributed.run --standalone --nproc-per-node {run.n_ranks} "
        f"scripts/{run.lesson.name}.py{flags}",
        "mpiexec": f"{hidden}mpiexec -n {run.n_ranks} python scripts/{run.lesson.name}.py{flags}",
    }[run.way]


def _differences(result):
    shown = "\n".join(result.differences)
    return (
        f"<article><h3>{escape(result.lesson.name)}: metrics</h3><p class=first>{escape(result.differences[0])}</p>"
        f"<details><summary>{_count(len(result.differences), 'difference')}</summary><pre>{escape(shown)}</pre></details>"
        "</article>"
    )


def _stale(result):
    return (
        f"<article><h3>{escape(result.lesson.name)}: notebook and script</h3><p class=first>{escape(result.stale)}</p>"
        f"<p class=again>mend: <code>make sync LESSON={result.lesson.number}</code></p></article>"
    )


def _facts(facts, command):
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(text))}</td></tr>"
        for name, text in {**facts, "command": command}.items()
    )
    return f"<h2>Where this ran</h2><table class=facts>{rows}</table>"
