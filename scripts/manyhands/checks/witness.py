"""Record what the learner's functions returned, and decide whose code raised an error.

A check calls an answer many times, hooks of an answer run long after it has returned, and an answer calls functions of
the check. So the traceback decides: code that belongs neither to the check nor to a library is the learner's.
"""

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
_RETURN_NONE = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "send", "barrier")
_TORCH_DISTRIBUTED = tuple(f"{Path(dist.__file__).parent}/{name}.py" for name in ("distributed_c10d", "c10d_logger"))
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60  # characters
_short.maxlist = _short.maxtuple = _short.maxdict = 12


class Changed(Exception):
    """An answer changed a tensor or an array that it was given."""


class Witness:
    """Record each call of the learner's functions: its last result, what it raised, which group it was given."""

    def __init__(self, body, in_place=False, in_flight=False, earlier=None):
        """Start without records.

        body: the check's function, whose frames are not the learner's; in_place, in_flight: see `exercise`; earlier: in
        the second trial, the witness of the first.
        """
        self.body, self._in_place, self.in_flight, self._answer, self.group = body, in_place, in_flight, None, None
        self._earlier, self._came = earlier, []  # fingerprints of the results
        self._called = self._returned = self._raised = None

    def watched(self, answer):
        """Wrap `answer`, a function or a tuple with functions, for the check; return anything else as it is.

        Each call gets copies of nested containers, and process-wide settings are restored after it. A call raises
        Changed if the answer has changed a tensor or an array that it was given.
        """
        if self._answer is None:
            self._answer = answer
        if type(answer) is tuple:
            return tuple(map(self.watched, answer))
        if not callable(answer) or (isinstance(answer, type) and issubclass(answer, BaseException)):
            return answer  # an exception class is a name

        @functools.wraps(answer)
        def call(*args, **kwargs):
            self._called, self._raised = answer, None
            handed = (part for part in (*args, *kwargs.values()) if isinstance(part, dist.ProcessGroup))
            self.group = next(handed, self.group)
            args, kwargs = tuple(map(own_copy, args)), {k: own_copy(v) for k, v in kwargs.items()}
            before = [] if self._in_place else _numbers(answer, args, kwargs)
            try:
                with unspoilt(SETTINGS):
                    self._returned = answer(*args, **kwargs)
                self._came.append(_print(self._returned))
                if unfinished(self._returned) or (self._returned is None and _is_blank(answer)):
                    raise NotImplementedError  # an exercise before it is attempted
            except BaseException as error:
                self._raised = error
                raise
            for name, now, then in before:
                if not torch.equal(torch.as_tensor(now), then):
                    raise Changed(f"{name} was changed; leave it as it is")
            return self._returned

        return call

    def came_before(self):
        """Return whether the last result also occurred in the first trial."""
        return bool(self._earlier and self._came and self._came[-1] and self._came[-1] in self._earlier._came)

    def is_theirs(self, error):
        """Return whether the learner's code, or code that it called, raised the error."""
        return error is self._raised or any(map(self._learners, _places(error)))

    def where(self, error, text=" ({})"):
        """Return the learner's innermost line when `error` was raised, as " (line 3: x[9])", or "" if there is none.

        text: the template around it.
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
        """Return whether a `raise` in the learner's or the check's code raised it, not a library below."""
        trace = error.__traceback__
        while trace.tb_next is not None:
            trace = trace.tb_next
        path = trace.tb_frame.f_code.co_filename
        ours = not _is_library(trace.tb_frame.f_code) or path.startswith(_CHECKS)
        line = linecache.getline(path, trace.tb_lineno)  # "" for code that was run without a file
        return ours and ("raise" in line or not line)

    def is_running(self):
        """Return whether the learner's code made the running call, directly or through a library."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not self.body.__code__:
            if self._learners(frame.f_code):
                return True
            frame = frame.f_back
        return False

    def begins_async(self):
        """Return whether the learner's own code, not a library, makes the running call with async_op=True."""
        frame, asked, own = sys._getframe(1), False, self.body.__code__.co_consts  # a check may wrap the call
        while frame is not None and frame.f_code.co_filename not in _TORCH_DISTRIBUTED:
            frame = frame.f_back
        while frame is not None and (frame.f_code.co_filename in _TORCH_DISTRIBUTED or frame.f_code in own):
            asked |= frame.f_locals.get("async_op") is True
            frame = frame.f_back
        return asked and frame is not None and self._learners(frame.f_code)

    def names(self):
        """Return the parameter names of the learner's functions."""
        answers = self._answer if type(self._answer) is tuple else (self._answer,)
        codes = [code for code in map(_code, answers) if code]
        return {name for code in codes for name in code.co_varnames[: code.co_argcount]} - {"a"}

    def returned_none(self):
        """Return whether the last call of the learner's functions returned None."""
        return self._called is not None and self._raised is None and self._returned is None

    def what_came_back(self, error):
        """Return a sentence for `error`, which the check's own code raised over an unusable answer."""
        if self._called is None:
            return f"your answer is {shown(self._answer)}, which the check cannot use ({said(error)})"
        if self.returned_none():
            missing = f"your function returned None: {self.why_none()}"
            left = f" If not, the check cannot go on with what your code left behind ({said(error)})"
            return missing + left * ("NoneType" not in str(error))
        return f"your function returned {shown(self._returned)}, which the check cannot use ({said(error)})"

    def why_none(self):
        """Ask for the likely cause of a None, which a collective that the answer calls returns, too."""
        called = [name for name in getattr(_code(self._answer), "co_names", ()) if name in _RETURN_NONE]
        kept = "".join(f"did you keep the result of dist.{name}, which has none, or " for name in called[:1])
        return f"{kept}is a `return` missing?"

    def _learners(self, code):
        return code is not self.body.__code__ and not _is_library(code)


def _numbers(answer, args, kwargs):
    """Return [(parameter name, argument, copy)] for the tensors and arrays among the arguments."""
    code, found = _code(answer), []
    names = code.co_varnames[: code.co_argcount] if code else ()
    for name, given in (*itertools.zip_longest(names, args), *kwargs.items()):
        for leaf in tree_leaves(given):
            if isinstance(leaf, (torch.Tensor, np.ndarray)):
                called = "a weight" if isinstance(leaf, torch.nn.Parameter) else name or "what your code was given"
                found.append((called, leaf, torch.as_tensor(leaf).detach().clone()))
    return found


def _print(found):
    """Return a fingerprint of a result's fractions and tensors, or () if it has none."""
    leaves = [x for x in tree_leaves(found) if isinstance(x, float) or (isinstance(x, torch.Tensor) and x.numel())]
    with suppress(RuntimeError, NotImplementedError):  # a tensor without numbers
        return tuple(_bytes_of(x) if isinstance(x, torch.Tensor) else repr(x) for x in leaves)
    return ()


def _bytes_of(tensor):
    """Return (shape, type, a hash of the bytes)."""
    flat = tensor.detach().cpu().flatten().contiguous()
    return tuple(tensor.shape), tensor.dtype, hash(flat.view(torch.uint8).numpy().tobytes())


def unfinished(found):
    """Return whether a value is, or contains, the `...` or blank `____` of an unattempted exercise."""
    parts = found.values() if type(found) is dict else found if type(found) in (list, tuple) else ()
    return any(part is ... or has_blanks(part) for part in (found, *parts))


def said(error):
    """Return the error's class and the first line of its message, if any."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def shown(found):
    """Describe a value in one short line with its type (the list [3, 4, 1]); omit the type if it is obvious."""
    text = " ".join(_short.repr(found).split())
    if found is None or isinstance(found, (bool, int, float)):
        return text
    return f"the {'text' if isinstance(found, str) else type(found).__name__} {text}"


def listed(values):
    """Join items for a sentence: 0, 1 and 2."""
    *front, last = map(str, values)
    return f"{', '.join(front)} and {last}" if front else last


def _places(error):
    """Return the code objects from where the error was caught to where it was raised."""
    places, trace = [], error.__traceback__
    while trace is not None:
        places.append(trace.tb_frame.f_code)
        trace = trace.tb_next
    return places


def _is_library(code):
    """Return whether code is ours, Python's or an installed package's."""
    return code.co_filename.startswith(_LIBRARIES)


def _is_blank(function):
    """Return whether a function that returned None is as short as an empty one, such as an unattempted exercise."""
    code = _code(function)
    return code is not None and len(code.co_code) == len((lambda: None).__code__.co_code)


def _code(function):
    """Return the code object of a function below its decorators, or None if it is not a Python function."""
    return getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
