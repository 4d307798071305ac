"""Describe the program that trains: the one record that memory, traffic, step time and the search take beside a layout.

    bytes_per_rank(model, layout, options, MEGATRON)       # as `planner.plan` asks, for a program other than train.py
    replace(MEGATRON, fp8=True)                            # a variant; a word that none of them knows is refused

A layout says which ranks share what, the options say how large a micro-batch is and what is recomputed, and a Program
says the rest: what its kernels keep for the backward, in which precision state rests, what it sends and what hides it.
"""

from dataclasses import replace
from functools import cache
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

Axis = Literal["tensor", "context", "pipeline", "expert"]
Sharing = Literal["replicas", "zero1", "zero2", "zero3", "hybrid"]  # the simplest first
Checkpointing = Literal["none", "selective", "block"]
Schedule = Literal["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble"]


@dataclass(frozen=True, eq=False, config=ConfigDict(extra="forbid"))  # without eq it is hashed by identity, at once
class Program:
    """The features of a training program. The defaults are Megatron-LM's and torchtitan's today.

    Raise pydantic's ValidationError, a ValueError, for a feature or a word that does not exist.
    """

    name: str
    # what a layer's forward keeps: what torch's autograd saves for each operation, or, with kernels written for it, the
    # inputs of matrix products, norms and activations (Korthikanti et al. 2022, arXiv:2205.05198, section 4)
    saves: Literal["autograd", "inputs"] = "inputs"
    # bf16 weights, and a master copy with Adam's moments that zero1 shares in equal parts; else the optimizer updates
    # fp32 weights, which zero1 shares whole, and autocast copies
    master: bool = True
    fused: bool | None = True  # norms and activations are kernels of their own; None: where train.py compiles
    flash: bool = True  # attention's scores are never kept, and the masked half is not computed
    sequence_parallel: bool = True
    scattered: bool = True  # tensor ranks share what a stage sends
    overlap: bool = True  # messages of data ranks hide behind compute
    overlap_in_pipeline: bool = True  # those of replicas in a pipeline, too
    sums_each: bool = True  # FSDP reduce-scatters after each micro-batch; else whole gradients stay until the last one
    reduce_bytes: Literal[2, 4] = 4  # of a gradient on its way
    fp8: bool = False  # linear layers multiply in 8 bits
    hides_experts: bool = False  # tokens travel to experts while another micro-batch computes (DualPipe)
    data_outside: bool = False  # data ranks are the outermost axis, not pipeline ranks
    far_context: bool = True  # context ranks are tried on several nodes unasked
    # what it has: axes beside data, activation checkpointing, schedules, and ways to share state (train.py's are those
    # that `config.strategies` registers)
    axes: tuple[Axis, ...] = ("tensor", "context", "pipeline", "expert")
    sharings: tuple[Sharing, ...] = ("replicas", "zero1", "zero2", "zero3", "hybrid")
    checkpointings: tuple[Checkpointing, ...] = ("none", "selective", "block")
    schedules: tuple[Schedule, ...] = ("1F1B", "Interleaved1F1B")


MEGATRON = Program("Megatron-LM or torchtitan")
TRAIN_PY = Program(
    "train.py", saves="autograd", master=False, fused=None, scattered=False, overlap_in_pipeline=False,
    sums_each=False, far_context=False,
    schedules=("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble"),
)  # fmt: skip
PROGRAMS = {"train.py": TRAIN_PY, "megatron": MEGATRON}


@cache
def in_both_orders(program: Program) -> tuple[Program, ...]:
    """Return the program with pipeline ranks outside data ranks, and inside."""
    return program, replace(program, data_outside=True)
