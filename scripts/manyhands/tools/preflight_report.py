"""What a preflight leaves: `report.html`, one page that loads nothing, and `junit.xml`, the same for machines."""

import importlib.metadata
import os
import platform
import re
import shlex
import sys
import time
from os.path import relpath

import jinja2
import psutil
import torch
from junitparser import Failure, JUnitXml, TestCase, TestSuite

from manyhands.launch.allocation import find_mpiexec
from manyhands.launch.machine import available_memory_bytes, cores_here
from manyhands.launch.metrics import commit, cpu_name
from manyhands.plots.looks import RANK_COLOURS

PACKAGES = ("torch", "numpy", "mpi4py", "ipyparallel", "jupyterlab", "jupytext", "papermill")
# characters that XML 1.0 cannot hold, which logs have
FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def gather_metadata(root, results=()) -> dict[str, str]:
    """When, where, devices, versions, corpus, commit: name -> text."""
    metadata = {
        "when": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "host": platform.node(),
        "system": platform.platform(terse=True),
        "cores": f"{cores_here()} of {os.cpu_count()}",
        "memory": f"{available_memory_bytes() / 2**30:.1f} GiB free of {psutil.virtual_memory().total / 2**30:.1f} GiB",
        "devices": _devices(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "packages": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "MPI": " ".join(find_mpiexec() or ["none"]),
        "corpus": " and ".join(sorted(corpora(results))) or "none used by these runs",
        "commit": commit(root),
    }
    return {name: text for name, text in metadata.items() if text}


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # such as mpi4py, without which all but MPI works
        return "missing"


def corpora(results) -> set[str]:
    """Names of the corpora that the runs trained on, such as {"shakespeare"}."""
    metrics = [outcome.metrics for result in results for outcome in result.outcomes if outcome.metrics]
    return {m["corpus"]["name"] for m in metrics if m.get("corpus")}


def _devices():
    for backend in (torch.cuda, torch.xpu):
        if backend.is_available():
            return f"{backend.device_count()} x {backend.get_device_name(0)}"
    return f"no GPU, {cpu_name()}"


def verdict_of(results, warnings) -> tuple[str, str]:
    """("ready" | "warned" | "broken", a sentence)."""
    outcomes = [outcome for result in results for outcome in result.outcomes]
    failed = sum(not outcome.ok for outcome in outcomes)
    differing = sum(bool(result.differences) for result in results)
    stale = sum(bool(result.stale) for result in results)
    if failed or differing or stale:
        said = [f"{failed} of {_count(len(outcomes), 'run')} failed"] * bool(failed)
        said += [f"{_count(differing, 'lesson')} with metrics that differ"] * bool(differing)
        said += [f"{_count(stale, 'lesson')} with a stale half"] * bool(stale)
        return "broken", "Not ready: " + ", ".join(said)
    if not results:
        return "broken", "Not ready: nothing was run"
    slow = sum(bool(outcome.slow) for outcome in outcomes)
    if warnings or slow:
        said = [_count(len(warnings), "warning")] * bool(warnings) + [f"{slow} slow"] * bool(slow)
        return "warned", "Ready, with " + " and ".join(said)
    return "ready", "Ready"


def duration(seconds) -> str:
    """6.1 -> "6.1 s", 372 -> "6 min 12 s"."""
    return f"{seconds:.1f} s" if seconds < 100 else f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def _count(n, noun):
    return f"{n} {noun}{'' if n == 1 else 's'}"


def command_again(run) -> str:
    """The command of this run alone, as one would type it, with all that this run was given."""
    flags = "".join(f" --{k.replace('_', '-')}={shlex.quote(str(v))}" for k, v in run.parameters.items())
    hidden = "CUDA_VISIBLE_DEVICES= " if run.device == "cpu" else ""  # as the run was: a script takes what it sees
    asked = f" --ranks {run.n_ranks}" if run.n_ranks else ""
    asked += f" --device {run.device}" if run.device else ""
    asked += " --short" if run.parameters.keys() - {"device"} else ""
    script = f"scripts/{run.lesson.name}.py{flags}"
    return {
        "notebook": f"python scripts/preflight.py --lesson {run.lesson.number} --notebooks{asked}",
        "torchrun": f"{hidden}python -m torch.distributed.run --standalone --nproc-per-node {run.n_ranks} {script}",
        "mpiexec": f"{hidden}mpiexec -n {run.n_ranks} python {script}",
    }[run.way]


# ------------------------------------------------------------------ for people


def write_report(path, results, metadata, warnings, seconds):
    """Write the page. `metadata`: name -> text; `warnings`: sentences; `seconds`: of the whole preflight."""
    path.write_text(page(path.parent, results, metadata, warnings, seconds), encoding="utf-8")


def page(folder, results, metadata, warnings, seconds) -> str:
    """The HTML; links are relative to `folder`."""
    outcomes = [outcome for result in results for outcome in result.outcomes]
    state, verdict = verdict_of(results, warnings)
    slow = [f"{o.run.lesson.name} as a {o.run.title} took {o.slow}" for o in outcomes if o.slow]
    what = f"{_count(len(results), 'lesson')}, {_count(len(outcomes), 'run')} in {duration(seconds)}"
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(PAGE).render(
        state=state, verdict=verdict, sentence=f"{what}, {metadata['when']} on {metadata['host']}",
        notices=[("warning", text) for text in warnings] + [("slow", text) for text in slow],
        columns=list(dict.fromkeys(outcome.run.title for outcome in outcomes)),
        longest_s=max([outcome.ended.seconds for outcome in outcomes], default=1) or 1,
        results=results, cards=[card for result in results for card in _cards(result)], metadata=metadata,
        duration=duration, link=lambda path: relpath(path, folder), colours=RANK_COLOURS, css=CSS,
    )  # fmt: skip


def _cards(result):
    """What broke in a lesson: one card for all that failed in the same way."""
    same = {}
    for outcome in result.outcomes:
        if not outcome.ok:
            same.setdefault(str(outcome.error), []).append(outcome)
    for outcomes in same.values():
        error, titles = outcomes[0].error, ", ".join(outcome.run.title for outcome in outcomes)
        detail = ("the first error in full", error.detail)
        yield result.lesson, titles, error.rank, error.says, detail, [command_again(o.run) for o in outcomes]
    if found := result.differences:
        yield result.lesson, "metrics", None, found[0], (_count(len(found), "difference"), "\n".join(found)), []
    if result.stale:
        again = [f"make sync LESSON={result.lesson.number}"]
        yield result.lesson, "notebook and script", None, result.stale, ("", ""), again


# ------------------------------------------------------------------ for machines


def write_junit(path, results, metadata):
    """JUnit's XML: a test case per run, and one per lesson for the metrics and one for the pair."""
    suite = TestSuite("preflight")
    for name, value in metadata.items():
        suite.add_property(name, FORBIDDEN.sub("", str(value)))
    for result in results:
        cases = [
            (o.run.title, o.ended.seconds, str(o.error or ""), o.error and o.error.detail) for o in result.outcomes
        ]
        if result.compared:
            cases.append(("metrics agree", 0, (result.differences or [""])[0], "\n".join(result.differences)))
        cases.append(("notebook and script hold the same cells", 0, result.stale, ""))
        for name, seconds, message, detail in cases:
            case = TestCase(name, result.lesson.name, seconds)
            if message:
                case.result = [failure := Failure(FORBIDDEN.sub("", message))]
                failure.text = FORBIDDEN.sub("", detail or "")
            suite.add_testcase(case)
    xml = JUnitXml()
    xml.add_testsuite(suite)
    xml.write(str(path), pretty=True)


PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ verdict }} - Many Hands preflight</title><style>{{ css|safe }}</style></head>
<body><main>
<header class="{{ state }}"><p>Many Hands preflight</p><h1>{{ verdict }}</h1><p>{{ sentence }}</p></header>
{% for kind, text in notices %}<p class="notice"><b>{{ kind }}</b> {{ text }}</p>{% endfor %}

<h2>Lessons</h2>
<div class="scroll"><table class="lessons">
<thead><tr><th>lesson</th><th>metrics</th>{% for title in columns %}<th>{{ title }}</th>{% endfor %}</tr></thead>
<tbody>
{% for result in results %}
<tr><th>{{ result.lesson.name }}</th>
{% if result.differences %}<td class="failed"><b>differ</b></td>
{% elif not result.compared %}<td class="none">nothing to compare</td>
{% else %}<td class="ok"><b>agree</b><br><small>{{ result.compared }} runs</small></td>{% endif %}
{% for title in columns %}
{% set outcome = result.outcomes|selectattr("run.title", "equalto", title)|first %}
{% if not outcome %}<td class="none">not run</td>{% else %}
<td class="{{ outcome.state }}"><b>{{ outcome.state }}</b>
<span class="time">{{ duration(outcome.ended.seconds) }}</span>
<div class="bar"><i style="width:{{ "%.1f"|format(100 * outcome.ended.seconds / longest_s) }}%"></i></div>
<small>{{ "%.2f"|format(outcome.ended.peak_bytes / 2**30) }} GiB
{% for name, path in outcome.files %}<a href="{{ link(path) }}">{{ name }}</a> {% endfor %}</small></td>
{% endif %}{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
<p class="soft">Seconds from start to end, and the most memory that all processes of the run held together (sampled).
Bars: time, the longest being {{ duration(longest_s) }}.</p>

{% if cards %}<h2>What broke</h2>{% endif %}
{% for lesson, what, rank, says, (summary, detail), again in cards %}
<article><h3>{{ lesson.name }}: {{ what }}</h3>
<p class="first">{% if rank is not none %}
<span class="rank" style="border-color:{{ colours[rank % colours|length] }}">rank {{ rank }}</span> {% endif %}
{{ says }}</p>
{% if detail %}<details><summary>{{ summary }}</summary><pre>{{ detail }}</pre></details>{% endif %}
{% for command in again %}<p class="soft">again: <code>{{ command }}</code></p>{% endfor %}
</article>
{% endfor %}

<h2>Where this ran</h2>
<table class="metadata">
{% for name, text in metadata.items() %}<tr><th>{{ name }}</th><td>{{ text }}</td></tr>{% endfor %}
</table>
</main></body></html>
"""

# light or dark as the reader's system asks, readable from a phone to a projector
CSS = """
:root { color-scheme: light dark; --page:#f6f7f9; --card:#fff; --ink:#1b1f24; --soft:#5b6570; --line:#dde1e6;
  --link:#0a5fb4; --ok:#0b7a53; --slow:#8a5a00; --slow-card:#fdf3dc; --failed:#b3261e; --failed-card:#fdecea; }
@media (prefers-color-scheme: dark) { :root { --page:#14171b; --card:#1d2126; --ink:#e7eaee; --soft:#9aa5b1;
  --line:#333a42; --link:#7db7f2; --ok:#5fd0a2; --slow:#f0bd5c; --slow-card:#362b14;
  --failed:#ff8d84; --failed-card:#3d1f1d; } }
* { box-sizing:border-box }
body { margin:0; background:var(--page); color:var(--ink); font:16px/1.5 system-ui,sans-serif }
main { max-width:1440px; margin:0 auto; padding:24px 20px 64px }
a,summary { color:var(--link) }
h2 { font-size:1.15rem; margin:32px 0 10px }
h3 { font-size:1rem; margin:0 0 6px }
header,article,table { background:var(--card); border:1px solid var(--line); border-radius:10px }
header,article { border-left:8px solid var(--failed); padding:14px 20px; margin:0 0 12px }
header h1 { font-size:1.9rem; line-height:1.2; margin:2px 0 6px }
header p { margin:0; color:var(--soft) }
header.ready { border-left-color:var(--ok) } header.ready h1 { color:var(--ok) }
header.warned { border-left-color:var(--slow) } header.warned h1 { color:var(--slow) }
header.broken h1 { color:var(--failed) }
.notice { margin:6px 0; padding:8px 12px; background:var(--slow-card); border-radius:8px }
.scroll { overflow-x:auto }
table { border-spacing:0; width:100% }
th,td { text-align:left; padding:9px 12px; border-top:1px solid var(--line); vertical-align:top }
tr:first-child > * { border-top:0 }
thead th,.metadata th { color:var(--soft) }
.lessons th { white-space:nowrap } .lessons td { min-width:118px }
.time { float:right }
td.ok b,td.ok .bar { color:var(--ok) } td.slow b,td.slow .bar { color:var(--slow) }
td.failed b,td.failed .bar { color:var(--failed) }
td.slow { background:var(--slow-card) } td.failed { background:var(--failed-card) }
td.none,small,.soft { color:var(--soft) }
.bar { height:5px; background:var(--line); border-radius:3px; margin:5px 0 3px }
.bar i { display:block; height:100%; background:currentColor; border-radius:3px }
.first,code,pre { font-family:ui-monospace,monospace; font-size:.9rem; overflow-wrap:anywhere }
.rank { border:2px solid; border-radius:6px; padding:0 7px; font-weight:700; white-space:nowrap }
pre { background:var(--page); border:1px solid var(--line); padding:12px; overflow-x:auto; max-height:26rem }
.metadata td { overflow-wrap:anywhere }
"""
