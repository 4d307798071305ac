"""What an answer may change for the whole process, and that is as before once it has been judged."""

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
    """As it is kept, in bytes: to decode it costs more than many an answer, and this is asked for at each call."""
    return dict(vars(os.environ)["_data"])


# (what it is now, how to set it) of what a function may set and forget to set back
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
    """Afterwards everything of `states`, pairs of a function that reads and one that sets, is as it was."""
    before = [read() for read, _ in states]
    try:
        yield
    finally:
        for (read, put_back), value in zip(states, before, strict=True):
            if states is RANDOM_STATE or read() != value:
                put_back(value)


def own_copy(value):
    """`value` to be handed to an answer: lists and dictionaries that hold further ones are copied with these.

    So an answer that uses up what it is given spoils no table of a check. What holds only numbers, texts or tensors is
    handed over itself: each check makes it anew, and may look whether it was left alone.
    """
    parts = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    nested = any(type(part) in (dict, list, tuple) for part in parts)
    return tree_map(lambda leaf: leaf, value) if nested else value
