"""What learners return in the place of the right result: the same in another form, or the wrong thing.

CHANGES has {name: (a function of the right result and of what the answer was given, whether the check may accept it)}.
A new one joins by a line there, and every check is asked.
"""

import functools
import inspect

import numpy as np
import torch
from torch.utils._pytree import tree_map

OTHER = {
    torch.float64: torch.float32, torch.float32: torch.float64, torch.int64: torch.float64, torch.bool: torch.int64,
}  # fmt: skip


def on(kind, change):
    """Change all parts of a kind in what an answer returns, also in lists, tuples and dictionaries."""

    def changed(part):
        new = change(part) if isinstance(part, kind) else part
        return part if _same(part, new) else new

    return lambda found, given: tree_map(changed, found)


def of_tensors(change):
    return on(torch.Tensor, lambda x: change(x) if x.dim() else x)


def in_rows_of(kind):
    """Make each list and each tuple a row of this kind."""

    def change(found, given=()):
        if type(found) is dict:
            return {key: change(value) for key, value in found.items()}
        return kind(map(change, found)) if type(found) in (list, tuple) else found

    return change


def given_back(found, given):
    """The first thing given of the result's kind, as it came."""
    return next((one for one in given if type(one) is type(found) and not _same(one, found)), found)


def of_masks(change):
    return on(torch.Tensor, lambda x: change(x) if x.dtype == torch.bool and x.numel() > 1 else x)


CHANGES = {
    "None": (lambda found, given: None, False),
    "a tuple for a list": (in_rows_of(tuple), True),
    "a list for a tuple": (in_rows_of(list), True),
    "a view": (of_tensors(lambda x: torch.stack((x, x), -1)[..., 0]), True),
    "numpy": (on(torch.Tensor, lambda x: x.detach().numpy()), True),
    "another dtype": (on(torch.Tensor, lambda x: x.to(OTHER.get(x.dtype, x.dtype))), True),
    "numbers of float32": (on(float, np.float32), True),
    "fractions for whole numbers": (on(int, lambda n: n if isinstance(n, bool) else float(n)), True),
    "what was given": (given_back, False),
    "a mask upside down": (of_masks(torch.logical_not), False),
    "a mask one place on": (of_masks(lambda x: x.roll(1, -1)), False),
    "a mask without a hole": (of_masks(torch.ones_like), False),
    "an empty mask": (of_masks(torch.zeros_like), False),
}


def changed(answer, change, touched):
    """An answer, a function or a tuple of them, with its results changed; `touched` gets a True where one differs."""
    if isinstance(answer, tuple):
        return tuple(changed(one, change, touched) for one in answer)
    if not inspect.isfunction(answer):
        return answer

    @functools.wraps(answer)
    def call(*args, **kwargs):
        found = answer(*args, **kwargs)
        result = change(found, (*args, *kwargs.values()))
        touched.append(not _same(found, result))
        return result

    return call


def _same(a, b):
    """Return whether two results are one: of the same kinds, strides, types and numbers."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        return a is b or (a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b))
    return a is b or (np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b))
