"""Compare an answer with what a check expects: one function per kind of value, with a sentence for a wrong one.

    @exercise("D", "the ring's time")
    def ring_seconds(answer, ranks=None):
        for n_bytes, n, alpha, beta in drawn_cases():
            hops, chunk_s = 2 * (n - 1), n_bytes / n / beta
            slips = {"every hop pays alpha": alpha + hops * chunk_s, "that is one of the two halves": ...}
            found = answer(n_bytes, n, alpha, beta)
            expect_number(found, hops * (alpha + chunk_s), f"the time of {n_bytes} bytes on {n} ranks", "s", slips)

    # The time of 4096 bytes on 4 ranks should be 0.003003 s, not 0.0005031 s: every hop pays alpha.

`what` names the thing and the case, so that "... should be 3, not 4" can follow it. `slips` is {sentence: wrong value}:
the sentence follows a colon, and is printed only if the answer equals that wrong value. Otherwise the check prints the
expected value and the answer. Draw sizes and values at random, unequal and coprime, so that no two slips give the same
value.

Types are checked only where that helps. An error that the check's own code raises over an unusable answer is reported
as "your function returned ..., which the check cannot use". An answer that returns `...` is "not attempted".
"""

import math
import re
import struct
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import torch

from manyhands.checks import FACT, Wrong
from manyhands.checks.witness import listed, said, shown

FLOAT32 = 1e-5  # tolerance for results computed in float32, relative to the largest number


def number(found, unit=""):
    """Return an answer's finite number as a float; numbers of numpy, torch and fractions are accepted.

    unit: "bytes", "s". Raises Wrong for None, text, lists, nan, ...
    """
    try:
        value = math.nan if isinstance(found, (str, bytes, bytearray, bool)) else float(found)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise Wrong(f"return a number{' of ' if unit else ''}{'seconds' if unit == 's' else unit}, not {shown(found)}")
    return value


def truth(found):
    """Return an answer's True or False as a bool, whatever library's type it has."""
    can_say = hasattr(type(found), "__bool__") or hasattr(type(found), "__len__")  # any other object counts as True
    if found is not None and not isinstance(found, (str, bytes)) and can_say:
        with suppress(TypeError, ValueError, RuntimeError):  # an array of several numbers is neither
            value = bool(found)
            if not isinstance(found, (int, float, np.generic, torch.Tensor)) or found == value:
                return value
    raise Wrong(f"return True or False, not {shown(found)}")


def plain(found):
    """Convert numpy and torch numbers to Python's, and arrays, tensors, tuples, iterators to lists; keep the rest."""
    if isinstance(found, (torch.Tensor, np.ndarray, np.generic)):
        return found.tolist()
    return [plain(part) for part in found] if isinstance(found, (list, tuple, range, Iterator)) else found


def several(found, n, what):
    """Return the n values of an answer in a list; raise Wrong, which asks for `what`, if it is anything else."""
    values = list(found) if isinstance(found, (list, tuple, Iterator)) or getattr(found, "ndim", 0) else []
    if len(values) != n:
        raise Wrong(f"return {what}, not {shown(found)}")
    return values


def expect_number(found, wanted, what, unit="", slips=None, rel=1e-9, close=0.0):
    """Return `found` as a float; raise Wrong unless it is `wanted`, up to `rel` of that or up to `close`.

    A fraction that was rounded to float32 is right up to that rounding. A slip's value may also be a list of values.
    """
    value = number(found, unit)

    def is_near(other, rel=rel, close=close):
        if isinstance(other, list):
            return any(is_near(one, rel, close) for one in other)
        return abs(value - other) <= max(rel * abs(other), close)

    if is_near(wanted):
        return value
    why = _slip(slips, lambda other: is_near(other, min(rel, 1e-9), 0)) or _slip(slips, is_near)
    if not why and _is_float32(value) and is_near(wanted, FLOAT32 / 10):
        why = _slip(slips, lambda other: np.abs(value - np.array(other, float)).min() < abs(value - wanted))
        if not why:  # the only cause: torch's default dtype
            return value
    said, right = told_apart(value, wanted)
    unit = f" {unit}" if unit else ""
    raise Wrong(f"{what} should be {right}{unit}, not {said}{unit}{why}")


def expect_equal(found, wanted, what, slips=None):
    """Raise Wrong unless `found` equals the number, text or list `wanted`; a tuple or an array counts as a list."""
    simple = (lambda value: value) if isinstance(found, range) and isinstance(wanted, range) else plain
    given, right = simple(found), simple(wanted)
    if _same(given, right):
        return
    why = _slip(slips, lambda value: _same(given, simple(value)))
    if isinstance(wanted, tuple):  # say it as it is asked for
        given, right = tuple(given) if isinstance(given, list) else given, tuple(right)
    came = _brief(given) if type(given) is type(right) else shown(found)
    raise Wrong(f"{what} should be {_brief(right)}, not {came}{why}")


def expect_tensor(found, wanted, what, slips=None, it_is="", close=1e-10):
    """Raise Wrong unless `found` is a tensor of the shape, the dtype and the numbers of `wanted`.

    `close`: the tolerance, relative to the largest number if that exceeds 1; 0 demands equality.
    `it_is`: a description of the tensor, such as "the sum over the ranks".
    """
    should_be = f"{what} should be {it_is}" if it_is else f"{what} is wrong"
    if not isinstance(found, torch.Tensor):
        raise Wrong(f"{what} should be {it_is or 'a tensor'}, not {shown(found)}")
    found, wanted = found.detach(), wanted.detach()

    def is_near(other):
        if isinstance(other, list):
            return any(map(is_near, other))
        return found.shape == other.shape and _near(found, other.detach(), close)

    if is_near(wanted) and found.dtype == wanted.dtype:
        return
    if not is_near(wanted) and (why := _slip(slips, is_near)):
        raise Wrong(should_be + why)
    if found.shape != wanted.shape:
        what_it_is = f": it is {it_is}" if it_is else ""
        raise Wrong(f"{what} should have the shape {list(wanted.shape)}, not {list(found.shape)}{what_it_is}")
    if found.dtype != wanted.dtype:
        as_given = "" if wanted.dtype == torch.bool else ", as what you were given"
        raise Wrong(f"{what} should be {_name(wanted.dtype)}{as_given}, not {_name(found.dtype)}")
    raise Wrong(f"{should_be}: {_first_difference(found, wanted, close)}")


def expect_scalar(found, what, not_finite=""):
    """Return `found`, a loss; raise Wrong unless it is a finite tensor of one number with its graph."""
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        came = f"one of the shape {list(found.shape)}" if isinstance(found, torch.Tensor) else shown(found)
        raise Wrong(f"{what} should be one number with its graph, a tensor, not {came}")
    if not found.isfinite().all():
        raise Wrong(f"{what} is {found.item()}{not_finite}")
    if not found.requires_grad:
        raise Wrong(f"{what} has no graph, so backward finds nothing: do not detach it")
    return found


def expect_unchanged(now, before, name, cure=""):
    """Raise Wrong if an answer changed the numbers of a tensor that it was given."""
    if not torch.equal(now, before):
        raise Wrong(f"{name} was changed; leave it as it is{cure}")


def expect_refusal(ask, case, *numbers):
    """Raise Wrong unless `ask()` raises a ValueError whose text names the numbers; of a tuple, one is enough."""
    choices = [one if isinstance(one, tuple) else (one,) for one in numbers]
    cure = "raise a ValueError" + f" that names {listed(one[0] for one in choices)}" * bool(choices)
    try:
        found = ask()
    except NotImplementedError:
        raise
    except ValueError as error:
        named = {int(digits) for digits in re.findall(r"\d+", str(error))}
        if all(named & set(one) for one in choices):
            return
        raise Wrong(f"{case}: {cure}; yours says {str(error)[:80] or 'nothing'}") from None
    except Exception as error:
        raise Wrong(f"{case}: {cure}; yours was {said(error)}") from None
    raise Wrong(f"{case}: {cure}, and do not return {shown(found)}")


def expect_traffic(seen, done, cure="", calls=None, only=(), payload=None, volume=None):
    """Raise Wrong if a rank communicated more than it needed to.

    seen: the calls that `wire.watch` recorded; done: the start of the sentence, as "the gradients are right"; calls:
    the most calls; only: names of the permitted calls; payload: the most bytes of all calls together; volume: the
    same, with an all-reduce counted twice (a reduce-scatter and an all-gather).
    """
    made = [call for call in seen.calls if call.op != "recv"]
    ops = sorted({call.op for call in made})
    if others := [op for op in ops if only and op not in only]:
        raise Wrong(f"{done}, but it calls {listed(others)}{cure and ': '}{cure}")
    limit, twice = (payload, False) if volume is None else (volume, True)
    sent = sum((2 if twice and call.op == "all_reduce" else 1) * call.bytes for call in made)
    if (calls is None or len(made) <= calls) and (limit is None or sent <= limit):
        if made:
            FACT.set(f"It made {count(len(made), 'call')} of {listed(ops)} with {count(sent, 'byte')} on this rank.")
        return
    many, made = calls is not None and len(made) > calls, count(len(made), "call")
    counted = " (an all_reduce counts twice)" if twice and "all_reduce" in ops else ""
    told = f"{made} of {listed(ops)} were made" if many else ""
    enough = [count(calls, "call")] if many else []
    if limit is not None and sent > limit:
        told = f"{count(sent, 'byte')} were communicated in {made} of {listed(ops)}{counted}"
        enough.append(count(limit, "byte"))
    is_enough = f"{listed(enough)} {'is' if enough == ['1 call'] else 'are'} enough"
    raise Wrong(f"{done}, but {told}, where {is_enough}{cure and ': '}{cure}")


def told_apart(found, wanted):
    """Format two different numbers with just enough digits to tell them apart, and at least four."""
    if all(isinstance(x, int) or (x.is_integer() and abs(x) < 2**53) for x in (found, wanted)):
        return f"{int(found):,}", f"{int(wanted):,}"
    for digits in range(4, 18):
        texts = _rounded(found, digits), _rounded(wanted, digits)
        if texts[0] != texts[1]:
            break
    return texts


def count(number, noun):
    """Format a number with its noun: 1 message, 2 messages."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _rounded(value, digits):
    if value and not 1e-3 <= abs(value) < 1e9:
        return f"{value:.{digits}g}"
    places = max(0, digits - 1 - (math.floor(math.log10(abs(value))) if value else 0))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _brief(value):
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:196]} ..."


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _slip(slips, came):
    """Return ": sentence" of the first slip whose value was found, or "". Slips with the value None are skipped."""
    return next((f": {why}" for why, value in (slips or {}).items() if value is not None and came(value)), "")


def _is_float32(value):
    """Return whether a value is a fraction that was rounded to float32; whole numbers are counts."""
    return abs(value) < 3e38 and not value.is_integer() and struct.unpack("f", struct.pack("f", value))[0] == value


def _same(a, b):
    """Return whether two plain values are equal; a float or a bool never equals a whole number."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    of_a_kind = all(isinstance(a, kind) <= isinstance(b, kind) for kind in (float, bool))
    return of_a_kind and type(a == b) is bool and a == b


def _near(a, b, close):
    if a.numel() == 0:
        return True
    if close == 0 or not (a.is_floating_point() and b.is_floating_point()):
        return torch.equal(a, b) if a.dtype == b.dtype else bool((a == b).all())
    return torch.allclose(a.double(), b.double(), rtol=0, atol=close * _largest(b), equal_nan=True)


def _largest(b):
    return max(1.0, b.double().abs().nan_to_num(0.0, 0.0).max().item())


def _first_difference(found, wanted, close):
    """Return, as the end of a sentence, where two tensors of one shape and dtype differ, and by how much."""
    wrong = found != wanted  # nan counts as different, and large whole numbers do not fit into doubles
    if close:
        wrong &= ~torch.isclose(found.double(), wanted.double(), rtol=0, atol=close * _largest(wanted))
    i = int(wrong.flatten().nonzero()[0])
    at = ", ".join(str(int(index)) for index in np.unravel_index(i, tuple(found.shape) or (1,)))
    a, b = found.flatten()[i].item(), wanted.flatten()[i].item()
    if not (math.isfinite(a) and math.isfinite(b)):
        zero = ": is it 0 / 0, 0 times infinity, or infinity - infinity?" if math.isnan(a) else ""
        return f"element [{at}] should be {b:.4g}, and is {a:.4g}{zero}"
    said, right = told_apart(a, b)
    differ = f"element [{at}] should be {right}, not {said}"
    if not found.is_floating_point():
        return differ
    if _near(found, wanted, FLOAT32):
        return f"{differ}, which is float32's accuracy; keep the dtype of what you were given, all the way"
    b_N, a_N = wanted.double().flatten(), found.double().flatten()
    factor = (a_N @ b_N / (b_N @ b_N)).item() if (b_N != 0).sum() > 1 else math.nan
    if math.isfinite(factor) and factor and f"{factor:.4g}" != "1" and _near(a_N, factor * b_N, 1e-9):
        return f"what came is {factor:.4g} times that"
    return differ
