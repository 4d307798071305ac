"""`%%ranks`: run the cell on every rank and show what they say, in rank order, equal outputs once.

`%%ranks?` shows what its line takes, as `course.ranks_line` says it.
"""

import contextlib
import html
import io
import os
import re
import shlex
import sys
import time

from IPython import get_ipython
from IPython.display import clear_output, display

from manyhands.course.catch_up import bring, outline, said, whose
from manyhands.course.pairs import LANGUAGE
from manyhands.course.ranks_line import CELL_S, FLAGS, PARSER, CellOptions, read_line
from manyhands.launch import settings
from manyhands.launch.allocation import RanksError
from manyhands.launch.ranks import name_ranks, wrapped
from manyhands.launch.run_folder import outputs_folder, save_figure
from manyhands.notebook import completion
from manyhands.notebook.cell import LOST_PEER
from manyhands.notebook.engine_processes import prepare
from manyhands.notebook.rank_pool import current_ranks, lesson_here
from manyhands.plots.looks import RANK_COLOURS, SHARED_COLOUR

LIVE_AFTER_S = 2.0
WHERE_AFTER_S, WHERE_EVERY_S = 10.0, 1.0  # by then people wonder whether it hangs
PYTHON_MAGICS = {"time", "timeit", "capture", "prun"}  # cell magics that run the rest of the cell as Python
START_CELL_S = 300.0  # on a parallel file system the first import of torch alone takes minutes
# JupyterLab's own, so that "Increase Code Font Size" for a projector reaches the outputs too; 13px on a web page
FONT = "font:var(--jp-code-font-size,13px)/1.35 var(--jp-code-font-family,monospace)"
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class CellFailed(Exception):
    """A cell failed on the ranks. Its traceback is the first failing rank's, then a line for each other rank."""

    def __init__(self, message, lines):
        super().__init__(message)
        self.lines = lines

    def _render_traceback_(self):
        return self.lines


def register_ranks(shell):
    """Register `%%ranks`, with Tab and Shift-Tab; returns the kernel, None in a terminal."""
    shell.register_magic_function(ranks, "cell")
    if kernel := getattr(shell, "kernel", None):
        completion.install(kernel, FLAGS, ranks.__doc__, _look_up)
    return kernel


def _look_up(line, **question):
    """Return what the first rank that a cell with this `line` names answers; None without ranks, or an answer."""
    with contextlib.suppress(CellFailed, RanksError):
        pool = current_ranks()
        return pool.look_up((_options(line, CELL_S, pool.world_size).ranks or [0])[0], **question)
    return None


def register(shell):
    """Register `%%ranks` in a kernel whose ranks have started."""
    completion.listen(register_ranks(shell))


def register_lesson():
    """Register what a lesson's cells need once its ranks have started."""
    shell = get_ipython()
    register(shell)
    if catch_up_here not in shell.events.callbacks["pre_run_cell"]:
        shell.events.register("pre_run_cell", catch_up_here)


def catch_up_here(info):
    """Before a cell of the kernel's own runs: define what it needs of the lesson, and say so."""
    shell, lesson = get_ipython(), lesson_here()
    if lesson and not info.raw_cell.lstrip().startswith("%%"):
        with contextlib.suppress(SyntaxError):
            if line := said(bring(shell.user_ns, lesson, shell.transform_cell(info.raw_cell)), lesson):
                print(line)


def load_ipython_extension(shell):
    """Register the magic as the kernel "Many Hands" starts: a cell run before any ranks are there says what to do.

    And the kernel tells JupyterLab of its language what our notebooks hold, so that none is unsaved once it is opened.
    """
    register_ranks(shell).language_info = LANGUAGE
    prepare()


def ranks(line, cell):
    with completion.while_running(getattr(get_ipython(), "kernel", None)):
        _run(line, cell)


ranks.__doc__ = PARSER.format_help()  # what `%%ranks?` and Shift-Tab show


def _run(line, cell):
    pool = current_ranks()
    options = _options(line, CELL_S if pool.joined else START_CELL_S, pool.world_size)
    source, code = _numbered(cell, 1)
    if begin := pool.start_cells(cell):
        print("the ranks are fresh: the start cells were run again")
        if (started := pool.run(begin, CellOptions(START_CELL_S))).failed:
            raise CellFailed(*report(started))
    if caught_up := pool.catch_up(get_ipython().transform_cell(code), options.ranks):
        print(caught_up)
    live = _Live(pool.control) if settings.live() else None
    result = pool.run(source, options, live and live.update)
    shown = sections(result)
    if live:
        live.close(followed=bool(shown))
    for section in shown:
        display(*section[:1], metadata=section[1], raw=True)
    if options.trace:
        show_trace(result)
    if result.failed:
        raise CellFailed(*report(result))


def _numbered(cell, above):
    """Return what to run, and the Python in it, with comments so that line numbers are those of the notebook's cell.

    above: lines of the notebook's cell above this text; `%%ranks` is one, and a magic below it another.
    """
    magic = re.match(r"\s*%%(\w+)[^\n]*(\n|\Z)", cell)
    if not magic:
        return ("#\n" * above + cell,) * 2
    body = cell[magic.end() :]
    if magic[1] not in PYTHON_MAGICS or not body.strip():
        return cell.lstrip(), ""
    source, code = _numbered(body, above + magic[0].count("\n"))
    return magic[0].lstrip() + source, code


def show_trace(result):
    """Show what the ranks of a cell did when: a chart, a line per rank, and the file for Perfetto."""
    from manyhands.measure.timeline import Timeline  # late: they bring matplotlib
    from manyhands.plots.trace import chart

    timeline = Timeline(result.traces)
    if not timeline.rows:
        print("no rank sent a trace")
        return
    folder = outputs_folder() / "traces"
    folder.mkdir(exist_ok=True)
    path = timeline.write(folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-cell-{result.number}.json")
    picture = io.BytesIO()
    save_figure(chart(timeline.spans, timeline.arrows, "what each rank did"), picture, format="png", dpi=100)
    text = "\n".join(timeline.lines())
    bundle = {"image/png": picture.getvalue(), "text/plain": text}
    display(bundle, metadata={"image/png": {"alt": text}}, raw=True)
    print(f"{text}\ntrace: {path}; open it in https://ui.perfetto.dev")


def _options(line, timeout_s, world_size):
    """Return the CellOptions of the magic's line. Raises CellFailed if it is wrong, or a rank is not there."""
    try:
        options = read_line(line, timeout_s)
    except ValueError:
        _refuse(
            "%%ranks takes only ranks (such as 2, or 0,2, or 0-2), --timeout SECONDS (> 0), --all and --trace, "
            f"not {line.strip()!r}"
        )
    if missing := [rank for rank in options.ranks or [] if rank >= world_size]:
        _refuse(f"{name_ranks(missing)} cannot run this cell: this notebook has only {name_ranks(range(world_size))}")
    return options


def _refuse(sentence):
    raise CellFailed(sentence, wrapped(sentence))


def groups(result):
    """Ranks with the same output, in the order of their lowest rank: [(ranks, items)]; silent ranks are left out."""
    found = []
    for rank in range(result.world_size):
        items = result.items(rank)
        same = next((group for group, known in found if known == items), None)
        if same:
            same.append(rank)
        elif items:
            found.append(([rank], items))
    return found


def sections(result):
    """Return the displays, in order: [(mime bundle, metadata)]. Text up to the next figure is one bundle."""
    out, rows = [], []

    def flush():
        if rows:
            out.append((_text_bundle(rows), {}))
            rows.clear()

    for group, items in groups(result):
        label = name_ranks(group, result.world_size)
        colour = RANK_COLOURS[group[0] % len(RANK_COLOURS)] if len(group) == 1 else SHARED_COLOUR
        for item in items:
            if item[0] == "text":
                rows.append((label, colour, item[1].rstrip("\n")))
            elif set(item[1]) <= {"text/plain"}:
                rows.append((label, colour, item[1].get("text/plain", "")))
            else:
                if group != [0] and len(group) < result.world_size and (not rows or rows[-1][0] != label):
                    rows.append((label, colour, "shows:"))  # whose figure it is
                flush()
                out.append((item[1], item[2]))
    flush()
    return out


def _text_bundle(rows):
    """Rows (label, colour, text) as HTML and as plain text, which says the same without colour."""
    width = max(len(label) for label, _, _ in rows)
    plain = "\n".join(
        f"{label:<{width}} | {text_line}" for label, _, text in rows for text_line in _ANSI.sub("", text).split("\n")
    )
    cells = "".join(
        f'<div style="{_bar(colour)};white-space:nowrap">{label}</div>'
        '<pre style="margin:0;padding:0 0 0 12px;white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere;'
        'background:none;font:inherit">'
        f"{html.escape(_ANSI.sub('', text))}</pre>"
        for label, colour, text in rows
    )
    page = f'<div style="display:grid;grid-template-columns:max-content 1fr;row-gap:3px;{FONT}">{cells}</div>'
    return {"text/plain": plain, "text/html": page}


def _bar(colour):
    """The coloured bar before a label; its grey edge shows a black one on a dark page."""
    return f"border-left:4px solid {colour};box-shadow:-1px 0 #8888;padding-left:8px"


class _Live:
    """The display of a cell that runs longer than two seconds: elapsed time and the first rank's output.

    After ten seconds, or once a rank has stopped at a breakpoint, it also shows where each rank is, and how to stop the
    cell.
    """

    def __init__(self, control):
        self.control, self.handle, self.last = control, None, 0.0
        self.asked, self.where = 0.0, ""
        control.said = ""

    def update(self, elapsed_s, cell):
        stopped = bool(self.control.stopped)
        if (elapsed_s < LIVE_AFTER_S - 0.25 and not stopped) or time.monotonic() - self.last < 0.25:
            return
        self.last, speaker = time.monotonic(), cell.ranks[0]
        self.control.tell([speaker], "said")  # the answer is shown at the next update
        if elapsed_s < LIVE_AFTER_S and not stopped:
            return
        shown = _ANSI.sub("", self.control.said).rstrip()
        if (elapsed_s >= WHERE_AFTER_S or stopped) and self.last - self.asked >= WHERE_EVERY_S:
            self.asked, self.where = self.last, waiting(cell)
        where = f"\n{self.where}" if self.where else ""
        colour = RANK_COLOURS[speaker % len(RANK_COLOURS)]
        page = {
            "text/plain": f"{shown}\n... {elapsed_s:.0f} s{where}",
            "text/html": f'<pre style="margin:0;word-break:normal;{FONT};{_bar(colour)}">'
            f"{html.escape(shown)}\n"
            f"<i>running on {name_ranks(cell.ranks, cell.world_size)} for {elapsed_s:.0f} s; "
            f"this is rank {speaker}{html.escape(where)}</i></pre>",
        }
        if self.handle is None:
            self.handle = display(page, raw=True, display_id=True)
        else:
            self.handle.update(page, raw=True)

    def close(self, followed):
        if self.handle is not None:
            clear_output(wait=followed)  # without output of the ranks nothing would follow that clears it


def waiting(cell):
    """Return lines of text: where the ranks of a running cell are, which are done, and how to stop it."""
    at, n, stopped = {}, cell.world_size, dict(cell.pool.control.stopped)
    for rank, place in cell.places().items():
        at.setdefault(_stop(stopped[rank]) if rank in stopped else _place(place), []).append(rank)
    lines = [f"{name_ranks(ranks, n)}: {place}" for place, ranks in at.items()]
    if cell.done:
        lines.append(f"{name_ranks(sorted(cell.done), n)}: done (output is shown when all ranks are)")
    if stopped:
        nodes = sorted({stop["node"] for stop in stopped.values() if not stop["attached"]})
        where = f" on {', '.join(nodes)}" if nodes and cell.pool.allocation.num_nodes > 1 else ""
        step = f"In a terminal{where}: {shlex.quote(sys.executable)} -m manyhands.notebook.debug"
        who = f"{name_ranks(sorted(stopped))} {'is' if len(stopped) == 1 else 'are'} stopped"
        hold = (
            f"While {who}, no time-out ends this cell, and waiting is no hang. The square button above stops the cell."
        )
        return "\n".join(lines + [step] * bool(nodes) + [hold])
    limit_s = cell.limit.seconds * cell.limit.times
    return "\n".join(
        [*lines, f"The square button above stops the cell; otherwise it is stopped after {limit_s:.0f} s."]
    )


def _stop(stop):
    """Return where a rank stopped at a breakpoint; `stop` is what `debug.Debugger` tells."""
    how = "stepped in a terminal, at" if stop["attached"] else "stopped at"
    return f"{how} line {stop['line']} of {stop['cell']}: {stop['source']}"


def report(result):
    """A failed cell as (one sentence, lines): the first traceback, a line per rank, and what state they are in."""
    lines = []
    if result.dead:
        message = f"{name_ranks(sorted(result.dead), 0)} died (killed, out of memory, or crashed)"
        if ended := sorted(result.ended):  # the cause, if others died, too
            itself = "itself" if len(ended) == 1 else "themselves"
            message = f"{name_ranks(ended, 0)} ended {itself} (os._exit({result.ended[ended[0]]}))"
    elif result.errors:
        first = result.first_error
        error = result.done[first]["error"]
        message = f"rank {first}: {error['name']}: {error['value']}"
        lines += [f"--- rank {first} failed first ---", *error["traceback"]]
        if error.get("missing") and (hint := _whose(error["missing"], result.pool.lesson)):
            lines += wrapped(hint)
        lines.append("")
    elif result.interrupted:
        message = "interrupted: the ranks were freed"
    else:
        message = f"the cell did not end within {result.timed_out} (%%ranks --timeout)"
    if not lines:
        lines += wrapped(message)
    for rank in range(result.world_size):
        lines += wrapped(f"  rank {rank}: {_state(result, rank)}", indent="    ")
    if result.where and len(result.ranks) < result.world_size:
        lines += wrapped(
            f"Only {name_ranks(result.ranks)} ran this cell. A collective ends once all ranks of its group have called "
            "it: run the cell on all of them, or make a group of these ranks with dist.new_group, which all ranks call."
        )
    lines += wrapped(_outlook(result))
    return message, lines


def _whose(name, lesson):
    """Return where the lesson defines the `name` that a cell misses, "" if unknown."""
    with contextlib.suppress(OSError):
        return whose(lesson, name) if lesson else ""
    return ""


def _state(result, rank):
    if rank in result.dead:
        return "died"
    if rank not in result.ranks:
        return "does not run this cell"
    if rank in result.where:
        return _place(result.where[rank])
    error = result.done[rank]["error"]
    if error is None:
        return "done"
    if result.dead and LOST_PEER.search(error["value"]):
        return "lost its connection to a rank that died"
    if not result.dead and rank == result.first_error:
        return f"{error['name']} (above)"
    first = result.done[result.first_error]["error"]
    if not result.dead and (error["name"], error["value"]) == (first["name"], first["value"]):
        return "same error"
    return f"{error['name']}: {error['value'].splitlines()[0][:120] if error['value'] else ''}"


def _place(place):
    if place == "silent":
        return "does not answer: it is held in code that keeps Python's lock"
    if place is None:
        return "between two steps"
    doing = f"waiting in {place['call']}, " if place["call"] else ""
    return f"{doing}line {place['line']}: {place['source']}" if place["line"] else doing.rstrip(", ") or "running"


def _outlook(result):
    if result.dead and not result.pool.lesson:
        return f"The other ranks were stopped. Run %ranks {result.world_size}, then your cells again."
    if result.dead and not result.restarted:
        return (
            "The other ranks were stopped. Run the cell with start_ranks(...) again, then every cell of Start below it."
        )
    if result.restarted:
        held = ""
        if result.stuck:
            held = f" ({name_ranks(result.stuck, 0)} could not be woken in time, as in MPI or NCCL over nodes)"
        cells = "Run every cell of Start below start_ranks(...), then those of this section, again."
        if not result.pool.lesson:
            cells = "Run your cells again."
        elif outline(result.pool.lesson).begin:
            cells = "The next cell runs those of Start by itself. Run this section's cells again."
        return f"All ranks were restarted{held}: their variables are gone. {cells}"
    if result.rejoined:
        return (
            "The waiting ranks were freed and all joined a fresh process group. Variables are kept; groups made with "
            "new_group, and models wrapped in DDP, need making again."
        )
    return "The ranks are ready for the next cell; variables are kept."
