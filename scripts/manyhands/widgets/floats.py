"""The bits of a number in fp32, bf16 and fp16: sign, exponent and fraction (IEEE 754; bf16: Google's).

bits(0.1, "fp16")       # Bits(dtype='fp16', sign='0', exponent='01011', fraction='1001100110', value=0.0999755859375)
"""

import html
import math
from dataclasses import dataclass

import torch

from manyhands.plots.looks import FIELDS, INK, PAPER, QUIET, card, tint, write
from manyhands.widgets.display import Controls, is_live, labelled, show_picture

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EXPONENT_BITS = {"fp32": 8, "bf16": 8, "fp16": 5}
EXAMPLES = {
    "pi": math.pi, "a tenth": 0.1, "1 + 1/128": 1 + 2**-7, "1 + 1/256": 1 + 2**-8, "65504, fp16's largest": 65504.0,
    "70000": 70000.0, "1e-5, a small gradient": 1e-5, "6e-8, fp16's smallest": 5.96e-8, "1e-8": 1e-8, "1e-40": 1e-40,
    "infinity": math.inf,
}  # fmt: skip
CHOOSE = "choose"
UNITS = 2.3  # width of a bit in the figure


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
        """Return the power of two of the significand; a subnormal has that of the smallest normal one."""
        bias = 2 ** (len(self.exponent) - 1) - 1
        return max(int(self.exponent, 2), 1) - bias

    @property
    def significand(self):
        """1.fraction of a normal number; 0.fraction of a subnormal one, which so has fewer digits."""
        return int(self.fraction, 2) / 2 ** len(self.fraction) + ("1" in self.exponent)


def bits(value, dtype):
    """The `Bits` of a number in fp32, bf16 or fp16, rounded as torch rounds. Raise ValueError for another format."""
    integer, width = _integer(dtype)
    stored = torch.tensor(float(value), dtype=torch.float64).to(DTYPES[dtype])
    return from_pattern(f"{stored.view(integer).item() % 2**width:0{width}b}", dtype)


def from_pattern(pattern, dtype):
    """The `Bits` of a string of 0 and 1, blanks ignored. Raise ValueError for other letters and another length."""
    (integer, width), pattern = _integer(dtype), "".join(pattern.split())
    if len(pattern) != width or set(pattern) - {"0", "1"}:
        raise ValueError(f"{dtype} has {width} bits, each 0 or 1, not {len(pattern)} letters {pattern!r}")
    value = torch.tensor(int(pattern, 2)).to(integer).view(DTYPES[dtype]).item()
    end = 1 + EXPONENT_BITS[dtype]
    return Bits(dtype, pattern[0], pattern[1:end], pattern[end:], value)


def neighbour(stored, by):
    """The `Bits` of the number `by` places further up (negative: down) among all of its format, up to infinity."""
    if stored.kind == "not a number":
        return stored
    place = int(stored.pattern[1:], 2) * (-1 if stored.sign == "1" else 1) + by  # sign and size, not two's complement
    infinity = int("1" * len(stored.exponent) + "0" * len(stored.fraction), 2)
    place = max(-infinity, min(infinity, place))
    return from_pattern(f"{place < 0:d}{abs(place):0{len(stored.pattern) - 1}b}", stored.dtype)


def _integer(dtype):
    """(torch's integers as wide as a format, their bits)."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown here; use one of {', '.join(DTYPES)}")
    return (torch.int32, 32) if dtype == "fp32" else (torch.int16, 16)


def floats_picture(value=math.pi):
    """(a matplotlib Figure, its text): sign, exponent and fraction of `value` in each format, and their number."""
    figure, axes = card(98, 39, f"{value:.10g} in three formats")
    told = []
    for i, name in enumerate(DTYPES):
        stored = bits(value, name)
        _row(axes, 8.5 + 10 * i, stored, value)
        told.append(f"{name}: {stored.sign} {stored.exponent} {stored.fraction}, {in_words(stored)}")
    for j, (field, colour, hatch) in enumerate(FIELDS):
        _bit(axes, 40 + 15 * j, 1.2, "", colour, hatch)
        write(axes, 43.2 + 15 * j, 2.4, field, size=10, ha="left")
    return figure, f"the bits of {value:.10g}. {'; '.join(told)}"


def _row(axes, y, stored, value):
    write(axes, 2, y + 1.3, stored.dtype, size=12, weight="bold", ha="left")
    x = 10
    for field, colour, hatch in FIELDS:
        for bit in getattr(stored, field):
            _bit(axes, x, y, bit, colour, hatch)
            x += UNITS
        x += 0.8
    write(axes, 10, y + 4.6, in_words(stored), size=10, ha="left")
    error = _error(stored.value, value)
    if error:
        write(axes, 96.5, y + 4.6, error, size=10, ha="right", colour=QUIET)


def _bit(axes, x, y, bit, colour, hatch):
    from matplotlib.patches import Rectangle

    fill = tint(colour, 0.55 if bit == "1" else 0.12)
    axes.add_patch(Rectangle((x, y), UNITS - 0.2, 2.6, fc=fill, ec=colour, lw=0.8, zorder=2))
    if hatch:
        axes.add_patch(Rectangle((x, y + 2.75), UNITS - 0.2, 0.5, fc=PAPER, ec=colour, lw=0.4, hatch=hatch, zorder=2))
    write(axes, x + UNITS / 2 - 0.1, y + 1.4, bit, size=10, colour=INK, family="monospace")


def in_words(stored):
    """A line that computes the value from the bits: "normal: +1.5707964 x 2^1 = 3.1415927"."""
    sign = "-" if stored.sign == "1" else "+"
    if stored.kind in ("infinity", "zero"):
        return f"{stored.kind}: {sign}{abs(stored.value):g}"
    if stored.kind == "not a number":
        return stored.kind
    digits = {"fp32": 9, "bf16": 4, "fp16": 5}[stored.dtype]  # enough to distinguish all numbers
    return f"{stored.kind}: {sign}{stored.significand:.{digits}g} x 2^{stored.power} = {stored.value:.{digits}g}"


def _error(stored, value):
    if not math.isfinite(value) or value == 0:
        return ""
    if not math.isfinite(stored):
        return "too large"
    if stored == value:
        return "exact"
    return "gone" if stored == 0 else f"off by {abs(stored - value) / abs(value):.1e} of it"


def show_floats(value=math.pi):
    """Type a number, or the bits of one format, and step from a number to the next. A picture where nobody can."""
    if is_live():
        FloatControls(value).page.show()
    else:
        show_picture(*floats_picture(value))


class FloatControls:
    """The input fields and buttons; `value` is the number shown. Invalid input shows a message and changes nothing."""

    def __init__(self, value):
        import ipywidgets as w

        self.value = float(value)
        self.number = labelled(w.Text, "number", 4.5, 16, continuous_update=False)
        self.example = labelled(w.Dropdown, "or take", 11.5, 31.5, options=[(CHOOSE, None), *EXAMPLES.items()])
        self.format = labelled(w.Dropdown, "bits in", 4.5, 16, options=list(DTYPES), value="bf16")
        self.pattern = labelled(w.Text, "sign exponent fraction", 11.5, 31.5, continuous_update=False)
        self.down, self.up = (
            w.Button(
                description=f"one {way}", tooltip=f"the next {other} number of this format", layout={"width": "6.5em"}
            )
            for way, other in (("down", "smaller"), ("up", "larger"))
        )
        self.said = w.HTML()
        rows = [[self.number, self.example], [self.format, self.pattern, self.down, self.up], [self.said]]
        self.page = Controls(rows, lambda: floats_picture(self.value))
        self._fill()
        cure = "is no number; type one such as 0.1 or 1e-8"
        self.number.observe(lambda one: self._attempt(lambda: float(one.new), f"{one.new!r} {cure}"), "value")
        self.pattern.observe(lambda one: self._attempt(lambda: from_pattern(one.new, self.format.value).value), "value")
        self.example.observe(lambda one: one.new is not None and self._attempt(lambda: one.new), "value")
        self.format.observe(lambda _: self._fill(), "value")
        self.down.on_click(lambda _: self._step(-1))
        self.up.on_click(lambda _: self._step(1))

    def _take(self, value):
        self.value = value
        self._fill()
        self.page.redraw()

    def _fill(self):
        """Number, example and bits of the value into their fields; what they say then is not news."""
        stored = bits(self.value, self.format.value)
        self.said.value, self._filling = "", True
        self.number.value = repr(self.value)
        self.example.label = next((name for name, value in EXAMPLES.items() if value == self.value), CHOOSE)
        self.pattern.value = f"{stored.sign} {stored.exponent} {stored.fraction}"
        self._filling = False

    def _attempt(self, read, complaint=None):
        """Show the value that `read` makes of a field, or why it makes none; not where `_fill` has filled it in."""
        if self._filling:
            return
        try:
            self._take(read())
        except ValueError as error:
            self.said.value = html.escape(complaint or str(error))

    def _step(self, by):
        self._take(neighbour(bits(self.value, self.format.value), by).value)
