"""Process-wide settings that an answer may change, and that are restored once it has been judged."""

import os
import random
from contextlib import contextmanager, suppress

import numpy as np
import torch
from torch.utils._pytree import tree_map


def _folder():
    with suppress(FileNotFoundError):  # it was removed
        return os.getcwd()


def _go_to(folder):
    with suppress(OSError, TypeError):
        os.chdir(folder)


def _environment():
    """Return the environment in its internal bytes: decoding it at every call would take longer than many an answer."""
    return dict(vars(os.environ)["_data"])


# (read, set) of each setting that a function may change and forget to restore
SETTINGS = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, lambda device: torch.set_default_device(None if device.type == "cpu" else device)),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (_folder, _go_to),
    (_environment, lambda before: (os.environ.clear(), os.environb.update(before))),
)
RANDOM_STATE = (
    (torch.get_rng_state, torch.set_rng_state),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
)


@contextmanager
def unspoilt(states):
    """Restore `states` on exit; each is a pair of functions, one that reads a setting and one that sets it."""
    before = [read() for read, _ in states]
    try:
        yield
    finally:
        for (read, put_back), value in zip(states, before, strict=True):
            if states is RANDOM_STATE or read() != value:
                put_back(value)


def own_copy(value):
    """Copy `value` for an answer if it is a list or dictionary that contains further ones; else return it as it is.

    So an answer that modifies a nested argument does not damage a check's table. A container of only numbers, texts or
    tensors is passed on as it is: each check makes a new one, and may check that it was not changed.
    """
    parts = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    nested = any(type(part) in (dict, list, tuple) for part in parts)
    return tree_map(lambda leaf: leaf, value) if nested else value
