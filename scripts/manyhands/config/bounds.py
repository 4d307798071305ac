"""Define the ranges of numeric options as types, and refuse other values with one sentence.

steps: Positive = 300               # in a dataclass
refuse_bounds(options)              # Refused: train.steps=0 is too small; use at least 1
"""

import dataclasses
import functools
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from manyhands.launch.program import Refused

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]  # a generator's is a signed number of 64 bits
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=1e8, allow_inf_nan=False)]  # three years: more overflows in some clock
SENTENCES = {
    "greater_than_equal": "is too small; use at least {ge}", "greater_than": "is too small; use more than {gt}",
    "less_than_equal": "is too large; use at most {le}", "less_than": "is too large; use less than {lt}",
    "finite_number": "is not finite; use a finite number",
}  # fmt: skip


@functools.cache  # one takes 5 ms to make
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind)


def refuse_bounds(options: Any) -> None:
    """Raise Refused for the first value of a dataclass that its type does not allow."""
    kind: Any = type(options)
    try:
        _adapter(kind).validate_python(dataclasses.asdict(options))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = SENTENCES.get(first["type"], "cannot be: " + first["msg"]).format(**first.get("ctx", {}))
        raise Refused(f"{'.'.join(map(str, first['loc']))}={first['input']} {why}") from None
