"""Garbage is collected at chosen steps, on all ranks at the same ones, and as before when a run has ended."""

import gc
import weakref

import pytest
import torch
from manyhands.config.options import read_options
from manyhands.train import garbage, start


class Node:
    """Of a circle, which only a collection frees."""

    def __init__(self):
        self.itself = self


def test_a_circle_is_freed_at_the_hundredth_step_and_not_before():
    with garbage.garbage_held() as collect:
        seen = weakref.ref(Node())
        for step in range(1, garbage.EVERY):
            collect(step)
        assert not gc.isenabled() and seen() is not None
        collect(garbage.EVERY)
        assert seen() is None
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_a_run_that_fails_gives_the_collection_back():
    with pytest.raises(KeyError), garbage.garbage_held():
        raise KeyError
    assert gc.isenabled()


def test_whoever_does_not_want_it_has_pythons_own():
    with garbage.garbage_held(wanted=False) as collect:
        assert gc.isenabled()
        collect(garbage.EVERY)


@pytest.mark.parametrize(
    ("kind", "flags", "expected"),
    [("cuda", "", "high"), ("cuda", "--train.no-tf32", "highest"), ("cuda", "--train.precision bf16", "highest"),
     ("cpu", "", "highest")],
)  # fmt: skip
def test_fp32_is_tf32_on_gpus_unless_a_flag_forbids_it(kind, flags, expected):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        start.choose_tf32(read_options(flags.split()), torch.device(kind))
        assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision(before)
