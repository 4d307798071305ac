"""Answer Tab and Shift-Tab in a `%%ranks` cell: what the kernel knows itself, and the names of the cell's first rank.

The rank answers from a thread, also while it computes or hangs; where it is silent, the kernel answers alone. With
ipykernel 7, whose requests arrive in a thread, that works while a cell of ranks runs; with an older one, after it.
"""

import contextlib
import re
import threading

from IPython.utils.tokenutil import token_at_cursor

TYPES = "_jupyter_types_experimental"  # where JupyterLab looks for what is a function, a class, a module
_FIRST_LINE = re.compile(r"\s*%%ranks(?=\s|$)([^\n]*)")
_PATH = r"[^\W\d]\w*(?:\.\w+|\[(?:-?\d+|'[^'\\\n]*'|\"[^\"\\\n]*\")\])*"
_NAME = re.compile(rf"(?<![\w.)\]%'\"])(?:({_PATH})\.)?((?:[^\W\d]\w*)?)\Z")
_CALLED = re.compile(rf"(?<![\w.)\]])({_PATH})\Z")
_one_at_a_time = threading.Lock()  # IPython's completer is not made for two threads
_cell = None  # the request of the cell of ranks that runs


@contextlib.contextmanager
def while_running(kernel):
    """Within the block, a cell of ranks runs: its kernel answers from another thread."""
    global _cell
    _cell = kernel.get_parent() if kernel else None
    try:
        yield
    finally:
        _cell = None


def install(kernel, flags, manual, look_up):
    """Let the `kernel` answer in cells of ranks. A second call replaces the first.

    flags: of the line `%%ranks`; manual: what Shift-Tab shows there; look_up(line, **question): what `names` answers on
    the rank whose cell begins with that line, None without an answer.
    """
    kernel_completes, kernel_describes = type(kernel).do_complete, type(kernel).do_inspect

    def complete(code, cursor_pos):
        cursor_pos = len(code) if cursor_pos is None else cursor_pos
        line = _FIRST_LINE.match(code)
        if line and line.start(1) < cursor_pos <= line.end(1):
            begin = cursor_pos - len(re.search(r"\S*\Z", code[:cursor_pos])[0])
            fit = [flag for flag in flags if flag.startswith(code[begin:cursor_pos])]
            return _reply({flag: "keyword" for flag in fit}, begin, cursor_pos)
        found, begin = {}, cursor_pos
        if line and cursor_pos > line.end() and (question := _question(code[line.end() : cursor_pos])):
            found, begin = look_up(line[1], **question) or {}, cursor_pos - len(question["prefix"])
        with _one_at_a_time, _without_jedi(kernel.shell.Completer) if line else contextlib.nullcontext():
            known = kernel_completes(kernel, code, cursor_pos)
        return _merged(code, found, begin, known) if found else known

    def describe(code, cursor_pos, detail_level=0, omit_sections=()):
        line, text = _FIRST_LINE.match(code), ""
        if line and cursor_pos <= line.end():
            text = manual
        elif line and (path := token_at_cursor(code, cursor_pos)):
            text = look_up(line[1], path=path, detail=detail_level)
        if text:
            return {"status": "ok", "found": True, "data": {"text/plain": text}, "metadata": {}}
        with _one_at_a_time:
            return kernel_describes(kernel, code, cursor_pos, detail_level, omit_sections)

    kernel.do_complete, kernel.do_inspect = complete, describe


def listen(kernel):
    """Answer requests in a thread while a cell of ranks runs, where the kernel reads them in one (ipykernel 7)."""
    thread = getattr(kernel, "shell_channel_thread", None)
    if thread is None or getattr(kernel, "listens_for_ranks", False):
        return
    kernel.listens_for_ranks = True

    async def receive(frames):
        idents, message = kernel.session.feed_identities(frames, copy=False)
        asked = {"complete_request", "inspect_request"}
        try:
            takes = _cell and kernel.session.deserialize(message, content=False, copy=False)["msg_type"] in asked
        except Exception:  # the kernel will say so
            takes = False
        if takes:
            request = kernel.session.deserialize(message, copy=False)
            threading.Thread(target=_answer, args=(kernel, thread.io_loop, idents, request), daemon=True).start()
        else:
            await kernel.shell_channel_thread_main(frames)

    thread.io_loop.add_callback(kernel.shell_stream.on_recv, receive, copy=False)


def _answer(kernel, loop, idents, request):
    """Answer one request as the kernel's own handlers do; then the kernel is busy with its cell again."""
    kind, content, cell = request["msg_type"].removesuffix("_request"), request["content"], _cell
    kernel._publish_status("busy", "shell", parent=request)
    try:
        if kind == "complete":
            reply = kernel.do_complete(content["code"], content["cursor_pos"])
        else:
            reply = kernel.do_inspect(content["code"], content["cursor_pos"], content.get("detail_level", 0))
    except Exception as error:  # the learner's own class, in the kernel
        reply = {"status": "error", "ename": type(error).__name__, "evalue": str(error), "traceback": []}
    loop.add_callback(kernel.session.send, kernel.shell_stream, f"{kind}_reply", reply, request, idents)
    kernel._publish_status("idle", "shell", parent=request)
    if cell and cell is _cell:
        kernel._publish_status("busy", "shell", parent=cell)


@contextlib.contextmanager
def _without_jedi(completer):
    """Complete from the kernel's variables alone: jedi reads the source of what a cell imports, for torch 16 s."""
    before, completer.use_jedi = completer.use_jedi, False
    try:
        yield
    finally:
        completer.use_jedi = before


def _question(text):
    """Return what to ask the rank about the end of `text`: {"path", "prefix", "call", "detail"}; None for nothing."""
    line = text.rpartition("\n")[2]
    name = _NAME.search(line)
    if not name or re.match(r"\s*(import|from)\s", line):
        return None
    call = "" if name[1] else _called(text[: len(text) - len(name[0])][-2000:])
    return {"path": name[1] or "", "prefix": name[2], "call": call, "detail": None}


def _called(text):
    """Return the path of the function inside whose parentheses `text` ends, "" for none."""
    depth = 0
    for at in range(len(text) - 1, -1, -1):
        if text[at] in ")]}":
            depth += 1
        elif text[at] in "([{":
            if depth == 0:
                called = _CALLED.search(text[:at]) if text[at] == "(" else None
                return called[1] if called else ""
            depth -= 1
    return ""


def _reply(types, begin, end):
    shown = [{"start": begin, "end": end, "text": name, "type": kind} for name, kind in types.items()]
    return {
        "status": "ok",
        "matches": list(types),
        "cursor_start": begin,
        "cursor_end": end,
        "metadata": {TYPES: shown},
    }


def _merged(code, found, begin, known):
    """Return one reply: the rank's names first, then those that the kernel alone knows."""
    start, end = min(begin, known["cursor_start"]), known["cursor_end"]
    own = known["metadata"].get(TYPES) or [{"text": match, "type": ""} for match in known["matches"]]
    types = {code[start:begin] + name: kind for name, kind in found.items()}
    for one in own:
        types.setdefault(code[start : known["cursor_start"]] + one["text"], one.get("type") or "")
    return _reply(types, start, end)
