"""What a preflight leaves: `report.html`, one page that loads nothing, and `junit.xml`, the same for machines."""

import importlib.metadata
import os
import platform
import re
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

PACKAGES = {"torch", "numpy", "mpi4py", "ipyparallel", "jupyterlab", "jupytext", "papermill"}
# characters that XML 1.0 cannot hold, which logs have
FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def gather_metadata(root, results=()) -> dict[str, str]:
    """When, where, devices, versions, corpus, commit: name -> text."""
    gpu = next((backend for backend in (torch.cuda, torch.xpu) if backend.is_available()), None)
    versions = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    metadata = {
        "when": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "host": platform.node(),
        "system": platform.platform(terse=True),
        "cores": f"{cores_here()} of {os.cpu_count()}",
        "memory": f"{available_memory_bytes() / 2**30:.1f} GiB free of {psutil.virtual_memory().total / 2**30:.1f} GiB",
        "devices": f"{gpu.device_count()} x {gpu.get_device_name(0)}" if gpu else f"no GPU, {cpu_name()}",
        "python": f"{platform.python_version()} ({sys.executable})",
        "packages": ", ".join(f"{name} {versions[name]}" for name in sorted(PACKAGES & versions.keys())),
        "MPI": " ".join(find_mpiexec() or ["none"]),
        "corpus": " and ".join(sorted(corpora(results))) or "none used by these runs",
        "commit": commit(root),
    }
    return {name: text for name, text in metadata.items() if text}


def corpora(results) -> set[str]:
    """Names of the corpora that the runs trained on, such as {"shakespeare"}."""
    metrics = [outcome.metrics for result in results for outcome in result.outcomes if outcome.metrics]
    return {m["corpus"]["name"] for m in metrics if m.get("corpus")}


def verdict_of(results, warnings) -> tuple[str, str]:
    """("ready" | "warned" | "broken", a sentence)."""
    states = [outcome.state for result in results for outcome in result.outcomes]
    failed, slow = states.count("failed"), states.count("slow")
    differing = sum(bool(result.differences) for result in results)
    stale = sum(bool(result.stale) for result in results)
    bad = [f"{failed} of {_count(len(states), 'run')} failed"] * bool(failed)
    bad += [f"{_count(differing, 'lesson')} with metrics that differ"] * bool(differing)
    bad += [f"{_count(stale, 'lesson')} with a stale half"] * bool(stale)
    bad += ["nothing was run"] * (not results)
    worth_a_look = [_count(len(warnings), "warning")] * bool(warnings) + [f"{slow} slow"] * bool(slow)
    if bad:
        return "broken", "Not ready: " + ", ".join(bad)
    return ("warned", "Ready, with " + " and ".join(worth_a_look)) if worth_a_look else ("ready", "Ready")


def _count(n, noun):
    return f"{n} {noun}{'' if n == 1 else 's'}"


def duration(seconds) -> str:
    """6.1 -> "6.1 s", 372 -> "6 min 12 s"."""
    return f"{seconds:.1f} s" if seconds < 100 else f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def page(folder, results, metadata, warnings, seconds) -> str:
    """The HTML; links are relative to `folder`.

    `metadata`: name -> text; `warnings`: sentences; `seconds`: of the whole preflight.
    """
    outcomes = [outcome for result in results for outcome in result.outcomes]
    state, verdict = verdict_of(results, warnings)
    slow = [f"{o.run.lesson.name} as a {o.run.title} took {o.slow}" for o in outcomes if o.slow]
    what = f"{_count(len(results), 'lesson')}, {_count(len(outcomes), 'run')} in {duration(seconds)}"
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(PAGE).render(
        state=state, verdict=verdict, sentence=f"{what}, {metadata['when']} on {metadata['host']}",
        notices=[f"warning: {text}" for text in warnings] + [f"slow: {text}" for text in slow],
        columns=list(dict.fromkeys(outcome.run.title for outcome in outcomes)), results=results,
        cards=[card for result in results for card in _cards(result)], metadata=metadata, duration=duration,
        link=lambda path: relpath(path, folder),
    )  # fmt: skip


def _cards(result):
    """(lesson and runs, what is wrong, in full, commands): what broke in a lesson, one for all that failed alike."""
    name, same = result.lesson.name, {}
    for outcome in result.outcomes:
        if outcome.error:
            same.setdefault(str(outcome.error), []).append(outcome)
    for says, outcomes in same.items():
        titles = ", ".join(outcome.run.title for outcome in outcomes)
        yield f"{name}: {titles}", says, outcomes[0].error.detail, [outcome.run.again() for outcome in outcomes]
    if found := result.differences:
        yield f"{name}: metrics", found[0], "\n".join(found), []
    if result.stale:
        yield f"{name}: notebook and script", result.stale, "", [f"make sync LESSON={result.lesson.number}"]


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


# light or dark as the reader's system asks, readable from a phone to a projector
PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ verdict }} - Many Hands preflight</title><style>
:root { color-scheme:light dark; --ok:light-dark(#0b7a53,#5fd0a2); --slow:light-dark(#8a5a00,#f0bd5c);
  --failed:light-dark(#b3261e,#ff8d84); --soft:light-dark(#5b6570,#9aa5b1) }
body { max-width:1440px; margin:24px auto; padding:0 20px; font:16px/1.5 system-ui,sans-serif }
h1.ready,.ok { color:var(--ok) } h1.warned,.slow { color:var(--slow) } h1.broken,.failed { color:var(--failed) }
small,.soft { color:var(--soft) }
div,pre { overflow-x:auto } pre { max-height:26rem } pre,code { overflow-wrap:anywhere }
table { border-spacing:0 } th,td { text-align:left; padding:8px 12px; border-top:1px solid; vertical-align:top }
</style></head>
<body><p class="soft">Many Hands preflight</p><h1 class="{{ state }}">{{ verdict }}</h1><p>{{ sentence }}</p>
{% for text in notices %}<p class="slow">{{ text }}</p>{% endfor %}

<h2>Lessons</h2>
<div><table>
<thead><tr><th>lesson</th><th>metrics</th>{% for title in columns %}<th>{{ title }}</th>{% endfor %}</tr></thead>
<tbody>
{% for result in results %}
<tr><th>{{ result.lesson.name }}</th>
{% if result.differences %}<td class="failed">differ</td>
{% elif not result.compared %}<td class="soft">nothing to compare</td>
{% else %}<td class="ok">agree<br><small>{{ result.compared }} runs</small></td>{% endif %}
{% for title in columns %}
{% set outcome = result.outcomes|selectattr("run.title", "equalto", title)|first %}
{% if not outcome %}<td class="soft">not run</td>{% else %}
<td><b class="{{ outcome.state }}">{{ outcome.state }}</b> {{ duration(outcome.ended.seconds) }}<br>
<small>{{ "%.2f"|format(outcome.ended.peak_bytes / 2**30) }} GiB
{% for name, path in outcome.files %}<a href="{{ link(path) }}">{{ name }}</a> {% endfor %}</small></td>
{% endif %}{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
<p class="soft">Seconds from start to end, and the most memory that all processes of the run held together.</p>

{% if cards %}<h2>What broke</h2>{% endif %}
{% for what, says, detail, again in cards %}
<h3>{{ what }}</h3><p><code class="failed">{{ says }}</code></p>
{% if detail %}<details><summary>in full</summary><pre>{{ detail }}</pre></details>{% endif %}
{% for command in again %}<p class="soft">again: <code>{{ command }}</code></p>{% endfor %}
{% endfor %}

<h2>Where this ran</h2>
<table>{% for name, text in metadata.items() %}<tr><th>{{ name }}</th><td>{{ text }}</td></tr>{% endfor %}</table>
</body></html>
"""
