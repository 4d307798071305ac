"""Bytes of a number, by precision, and how many numbers an optimizer keeps. Needs no torch."""

PRECISION_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}  # of what is multiplied
MOMENTS = {"adamw": 2, "sgd": 0}  # numbers that the optimizer keeps per parameter; SGD has no momentum here


def weight_bytes(options):
    """Bytes of a number that the optimizer updates: bf16 and fp16 keep theirs in fp32."""
    return max(PRECISION_BYTES[options.train.precision], PRECISION_BYTES["fp32"])
