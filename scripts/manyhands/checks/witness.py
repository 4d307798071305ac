"""Who is to blame: what the learner's functions returned, and whose code raised an error.

A check calls an answer many times, hooks of an answer run long after it has returned, and an answer calls functions of
the check. So an error is told by its traceback: code that is neither the check's nor a library's is the learner's.
"""

import dis
import functools
import inspect
import itertools
import linecache
import reprlib
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from manyhands.checks.unspoilt import SETTINGS, own_copy, unspoilt
from manyhands.course.catch_up import has_blanks

_CHECKS = f"{Path(__file__).parent}/"
_LIBRARIES = tuple(
    {f"{Path(__file__).parents[1]}/", "<frozen "}
    | {f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_TORCH_DISTRIBUTED = tuple(f"{Path(dist.__file__).parent}/{name}.py" for name in ("distributed_c10d", "c10d_logger"))
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60  # characters
_short.maxlist = _short.maxtuple = _short.maxdict = 12


class Changed(Exception):
    """An answer has changed a tensor or an array that it was given."""


class Witness:
    """Sees each call of the learner's functions: what came back last, what they raised, which group they were given."""

    def __init__(self, body, in_place=False, in_flight=False, earlier=None):
        """body: the function of the check, whose frames are not the learner's; in_place, in_flight: see `exercise`;
        earlier: the witness of the first time, when this is the second."""
        self.body, self._in_place, self.in_flight, self._answer, self.group = body, in_place, in_flight, None, None
        self._earlier, self._came = earlier, []  # prints of the numbers that came back
        self._called = self._returned = self._caller = self._raised = None

    def watched(self, answer):
        """`answer` as the check is to call it: a function, or a tuple with functions; anything else as it is.

        Each call gets copies of nested lists and the like, and what it sets for the whole process is put back after it.
        It raises Changed where it has changed a tensor or an array that it was given.
        """
        if self._answer is None:
            self._answer = answer
        if type(answer) is tuple:
            return tuple(map(self.watched, answer))
        if not callable(answer) or (isinstance(answer, type) and issubclass(answer, BaseException)):
            return answer  # the class of an error is a name

        @functools.wraps(answer)
        def call(*args, **kwargs):
            caller = sys._getframe(1)
            self._called, self._caller, self._raised = answer, (caller.f_code, caller.f_lasti), None
            handed = (part for part in (*args, *kwargs.values()) if isinstance(part, dist.ProcessGroup))
            self.group = next(handed, self.group)
            args, kwargs = tuple(map(own_copy, args)), {k: own_copy(v) for k, v in kwargs.items()}
            before = [] if self._in_place else _numbers(answer, args, kwargs)
            try:
                with unspoilt(SETTINGS):
                    self._returned = answer(*args, **kwargs)
                self._came.append(_print(self._returned))
                if unfinished(self._returned) or (self._returned is None and _is_blank(answer)):
                    raise NotImplementedError  # an exercise as it is handed out
            except BaseException as error:
                self._raised = error
                raise
            for name, now, then in before:
                if not torch.equal(torch.as_tensor(now), then):
                    raise Changed(f"{name} was changed; leave it as it is")
            return self._returned

        return call

    def came_before(self):
        """Whether the numbers that came back last had come back the first time as well."""
        return bool(self._earlier and self._came and self._came[-1] and self._came[-1] in self._earlier._came)

    def is_theirs(self, error):
        """Whether the learner's code raised it, or what that called."""
        return error is self._raised or any(self._learners(code) for code, _ in _places(error))

    def where(self, error, text=" ({})"):
        """The learner's innermost line when `error` was raised, as " (line 3: x[9])"; "" where none is known.

        text: what stands around it.
        """
        trace, at = error.__traceback__, None
        while trace is not None:
            at = trace if self._learners(trace.tb_frame.f_code) else at
            trace = trace.tb_next
        if at is None:
            return ""
        source = linecache.getline(at.tb_frame.f_code.co_filename, at.tb_lineno).strip()
        return text.format(f"line {at.tb_lineno}" + f": {source}" * bool(source))

    def said_so(self, error):
        """Whether the learner's code (or the check's) raised it by a statement of its own, not a library below it."""
        code, at = _places(error)[-1]
        statement = any(s.offset == at and s.opname == "RAISE_VARARGS" for s in dis.get_instructions(code))
        return statement and (not _is_library(code) or code.co_filename.startswith(_CHECKS))

    def is_running(self):
        """Whether the learner's code has called what runs now: itself, or through a library."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not self.body.__code__:
            if self._learners(frame.f_code):
                return True
            frame = frame.f_back
        return False

    def begins_async(self):
        """Whether the learner's own code, no library, calls what runs now with async_op=True."""
        frame, asked = sys._getframe(1), False
        while frame is not None and frame.f_code.co_filename not in _TORCH_DISTRIBUTED:
            frame = frame.f_back
        while frame is not None and frame.f_code.co_filename in _TORCH_DISTRIBUTED:
            asked |= frame.f_locals.get("async_op") is True
            frame = frame.f_back
        return asked and frame is not None and self._learners(frame.f_code)

    def names(self):
        """What the learner's functions call their arguments."""
        answers = self._answer if type(self._answer) is tuple else (self._answer,)
        codes = [code for code in map(_code, answers) if code]
        return {name for code in codes for name in code.co_varnames[: code.co_argcount]} - {"a"}

    def forgot_to_return(self):
        """Whether None came back, where the check needs a value, from a function that returns no value anywhere."""
        came_back = self._called is not None and self._raised is None
        return came_back and self._returned is None and self._is_used() and not _returns_something(self._called)

    def what_came_back(self, error):
        """A sentence for `error`, which the check's own code raised because of what it was given."""
        if self.forgot_to_return():
            return "your function returned None: is a `return` missing?"
        if self._called is None:
            return f"your answer is {shown(self._answer)}, which the check cannot use ({said(error)})"
        if not self._is_used():
            return f"the check cannot go on with what your code left behind ({said(error)})"
        return f"your function returned {shown(self._returned)}, which the check cannot use ({said(error)})"

    def _learners(self, code):
        return code is not self.body.__code__ and not _is_library(code)

    def _is_used(self):
        """Whether the check does anything with what it got: a statement `answer(model)` drops it at once."""
        code, at = self._caller
        following = (step.opname for step in dis.get_instructions(code) if step.offset > at)
        return next(following, "") != "POP_TOP"


def _numbers(answer, args, kwargs):
    """[(what the answer calls it, itself, a copy)] of the tensors and arrays among its arguments."""
    code, found = _code(answer), []
    names = code.co_varnames[: code.co_argcount] if code else ()
    for name, given in (*itertools.zip_longest(names, args), *kwargs.items()):
        for leaf in tree_leaves(given):
            if isinstance(leaf, (torch.Tensor, np.ndarray)):
                called = "a weight" if isinstance(leaf, torch.nn.Parameter) else name or "what your code was given"
                found.append((called, leaf, torch.as_tensor(leaf).detach().clone()))
    return found


def _print(found):
    """What tells the fractions and tensors of a result from those of another; () where it holds none."""
    leaves = [x for x in tree_leaves(found) if isinstance(x, float) or (isinstance(x, torch.Tensor) and x.numel())]
    with suppress(RuntimeError, NotImplementedError):  # a tensor without numbers
        return tuple(_bytes_of(x) if isinstance(x, torch.Tensor) else repr(x) for x in leaves)
    return ()


def _bytes_of(tensor):
    """(shape, type, a hash of the bytes)."""
    flat = tensor.detach().cpu().flatten().contiguous()
    return tuple(tensor.shape), tensor.dtype, hash(flat.view(torch.uint8).numpy().tobytes())


def unfinished(found):
    """Whether it is, or holds, the `...` or a blank `____` of an exercise as it is handed out."""
    parts = found.values() if type(found) is dict else found if type(found) in (list, tuple) else ()
    return any(part is ... or has_blanks(part) for part in (found, *parts))


def said(error):
    """The error's class and the first line of what it says, where it says anything."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def shown(found):
    """A value and its type in one short line: the list [3, 4, 1]; without the type where it is plain."""
    text = " ".join(_short.repr(found).split())
    if found is None or isinstance(found, (bool, int, float)):
        return text
    return f"the {'text' if isinstance(found, str) else type(found).__name__} {text}"


def listed(values):
    """0, 1 and 2."""
    *front, last = map(str, values)
    return f"{', '.join(front)} and {last}" if front else last


def _places(error):
    """[(code, offset of the instruction)] from where the error was caught to where it was raised."""
    places, trace = [], error.__traceback__
    while trace is not None:
        places.append((trace.tb_frame.f_code, trace.tb_lasti))
        trace = trace.tb_next
    return places


def _is_library(code):
    """Whether code is ours, Python's or an installed package's."""
    return code.co_filename.startswith(_LIBRARIES)


def _is_blank(function):
    """Whether a function does nothing, as an exercise that is handed out as `...`."""
    code = _code(function)
    return code is not None and _steps(code) == _steps((lambda: None).__code__)


def _returns_something(function):
    """Whether a function has a `return` with a value, as far as one can see."""
    steps = list(dis.get_instructions(_code(function))) if _code(function) else []
    before_returns = [a for a, b in itertools.pairwise(steps) if b.opname == "RETURN_VALUE"]
    return any(a.opname != "LOAD_CONST" or a.argval is not None for a in before_returns)


def _code(function):
    """The code of a function, below its decorators; None where there is none in Python."""
    return getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None


def _steps(code):
    return [step.opname for step in dis.get_instructions(code)]
