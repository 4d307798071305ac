"""The bits of a floating-point number: sign, exponent and fraction, and what they mean (IEEE 754; bf16: Google's).

bits(0.1, "fp16")       # Bits(dtype='fp16', sign='0', exponent='01011', fraction='1001100110', value=0.0999755859375)
"""

from dataclasses import dataclass

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EXPONENT_BITS = {"fp32": 8, "bf16": 8, "fp16": 5}
_AS_INTEGER = {4: (torch.int32, 32), 2: (torch.int16, 16)}


@dataclass(frozen=True)
class Bits:
    """A number as it is stored; the three fields are strings of 0 and 1, the most significant first."""

    dtype: str
    sign: str
    exponent: str
    fraction: str
    value: float  # what is stored: the number that was asked for, rounded

    @property
    def pattern(self):
        return self.sign + self.exponent + self.fraction

    @property
    def kind(self):
        """normal, subnormal, zero, infinity or not a number."""
        if "0" not in self.exponent:
            return "not a number" if "1" in self.fraction else "infinity"
        if "1" in self.exponent:
            return "normal"
        return "subnormal" if "1" in self.fraction else "zero"

    @property
    def power(self):
        """The power of two that the significand is multiplied with. A subnormal has that of the smallest normal one."""
        bias = 2 ** (len(self.exponent) - 1) - 1
        return max(int(self.exponent, 2), 1) - bias

    @property
    def significand(self):
        """1.fraction of a normal number; 0.fraction of a subnormal one, which so has fewer digits."""
        return int(self.fraction, 2) / 2 ** len(self.fraction) + ("1" in self.exponent)


def bits(value, dtype):
    """The `Bits` of `value`, a number, in fp32, bf16 or fp16 (a name or torch's dtype), rounded as torch rounds.

    Raises ValueError for another dtype.
    """
    name = _name(dtype)
    stored = torch.tensor(float(value), dtype=torch.float64).to(DTYPES[name])
    integer, width = _AS_INTEGER[stored.element_size()]
    return _cut(f"{stored.view(integer).item() % 2**width:0{width}b}", name, stored.item())


def from_pattern(pattern, dtype):
    """The `Bits` of a string of 0 and 1, blanks ignored. Raises ValueError for other letters and another length."""
    name, pattern = _name(dtype), "".join(pattern.split())
    integer, width = _AS_INTEGER[DTYPES[name].itemsize]
    if len(pattern) != width or set(pattern) - {"0", "1"}:
        raise ValueError(f"{name} has {width} bits, each 0 or 1, not {len(pattern)} letters {pattern!r}")
    number = int(pattern, 2)
    signed = number - 2**width if number >= 2 ** (width - 1) else number
    return _cut(pattern, name, torch.tensor(signed, dtype=integer).view(DTYPES[name]).item())


def neighbour(stored, by):
    """The `Bits` of the number `by` places further up (negative: down) among all of its format, up to infinity."""
    if stored.kind == "not a number":
        return stored
    place = int(stored.pattern[1:], 2) * (-1 if stored.sign == "1" else 1) + by  # sign and size, not two's complement
    infinity = int("1" * len(stored.exponent) + "0" * len(stored.fraction), 2)
    place = max(-infinity, min(infinity, place))
    return from_pattern(f"{place < 0:d}{abs(place):0{len(stored.pattern) - 1}b}", stored.dtype)


def _cut(pattern, name, value):
    end = 1 + EXPONENT_BITS[name]
    return Bits(name, pattern[0], pattern[1:end], pattern[end:], value)


def _name(dtype):
    for name, known in DTYPES.items():
        if dtype in (name, known):
            return name
    raise ValueError(f"dtype {dtype!r} is unknown here; use one of {', '.join(DTYPES)}")
