"""Compare a variable across the ranks of a notebook: equal, or how the ranks differ.

    hands.compare("loss")                # a number, a tensor, or any other value
    hands.compare("model")               # each entry of its state_dict
    hands.compare("x.grad", ranks=[0, 2])

`leaves` and `array` run on the ranks. Only digests travel first; values follow where digests differ.
"""

import hashlib
from dataclasses import dataclass

from IPython import get_ipython

from manyhands.launch.ranks import name_ranks

SHOWN_PARTS = 8  # of a container that differs in many


@dataclass(frozen=True)
class Comparison:
    """The result: `equal`, and the `lines` that say how the ranks differ. It is true where they are equal."""

    equal: bool
    lines: tuple

    def __bool__(self):
        return self.equal

    def __repr__(self):
        return "\n".join(self.lines)


def leaves(expression):
    """{path: {"kind", "digest"}} of the value of `expression` on this rank, or a str: why it has none.

    `kind` says what it is, such as "tensor of shape (2, 3), float32, cpu". A container gives a path for each part.
    """
    try:
        value = eval(expression, get_ipython().user_ns)
        return {path: _describe(leaf) for path, leaf in _parts(value)}
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def array(expression, path):
    """The part `path` of the value of `expression` on this rank as a numpy array, or its repr where it is no array."""
    value = dict(_parts(eval(expression, get_ipython().user_ns)))[path]
    found = _array(value)
    return repr(value) if found is None else found


def _parts(value, path=""):
    """(path, leaf) of dictionaries, lists, tuples, and of what has a state_dict, such as a model."""
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        yield path, value
        return
    for key, part in items:
        yield from _parts(part, f"{path}[{key!r}]")


def _array(value):
    """A tensor (of a DTensor this rank's shard), a numpy array or a number as a numpy array, else None."""
    import numpy as np

    if hasattr(value, "to_local"):
        value = value.to_local()
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        # numpy has no bfloat16 and no 8-bit floats; float32 holds all of their values
        value = value.float() if value.is_floating_point() and value.itemsize < 4 else value
        return value.numpy()
    if isinstance(value, (bool, int, float, complex, np.ndarray, np.generic)):
        found = np.asarray(value)
        return found if found.dtype != object else None
    return None


def _describe(value):
    found = _array(value)
    if found is None:
        return {"kind": type(value).__name__, "digest": _digest(repr(value).encode())}
    kind = type(value).__name__
    if hasattr(value, "detach"):
        # not the device's number: each rank has a GPU of its own
        dtype = str(value.dtype).removeprefix("torch.")
        kind = f"tensor of shape {tuple(value.shape)}, {dtype}, {value.device.type}"
    elif found.ndim:
        kind = f"array of shape {found.shape}, {found.dtype}"
    return {"kind": kind, "digest": _digest(found.tobytes())}


def _digest(data):
    return hashlib.sha256(data).hexdigest()


def compare(views, expression, ranks=None):
    """The Comparison of `expression` on `ranks` (default: all of `views`, ipyparallel's, in rank order).

    Raises ValueError for fewer than two ranks, or for one that does not exist.
    """
    ranks = list(range(len(views))) if ranks is None else sorted(set(ranks))
    if missing := [rank for rank in ranks if rank not in range(len(views))]:
        raise ValueError(f"there is no rank {missing[0]}; the ranks are 0 to {len(views) - 1}")
    if len(ranks) < 2:
        raise ValueError(f"comparing takes at least two ranks, not {ranks}")
    pending = {rank: views[rank].apply_async(leaves, expression) for rank in ranks}
    told = {rank: answer.get() for rank, answer in pending.items()}
    if any(isinstance(answer, str) for answer in told.values()):
        groups = _groups(ranks, lambda rank: told[rank] if isinstance(told[rank], str) else "a value")
        lines = [f"  {name_ranks(group)}: {answer}" for answer, group in groups]
        return Comparison(False, (f"{expression} cannot be compared:", *lines))
    paths = list(dict.fromkeys(path for rank in ranks for path in told[rank]))

    def value_at(path):
        return lambda rank: views[rank].apply_sync(array, expression, path)

    differ = []
    for path in paths:
        lines = _part(ranks, {rank: told[rank].get(path) for rank in ranks}, value_at(path))
        if lines:
            differ.append((path, lines))
    if not differ:
        what = f"{len(paths)} parts" if paths != [""] else told[ranks[0]][""]["kind"]
        if what in ("int", "float", "bool", "str"):
            what = f"{what} {value_at('')(ranks[0])}"
        return Comparison(True, (f"{expression} is equal on {name_ranks(ranks, len(views))}: {what}",))
    of = f" in {len(differ)} of {len(paths)} parts" if paths != [""] else ""
    said = [f"{expression} differs{of}:"]
    for path, lines in differ[:SHOWN_PARTS]:
        said += [f"{path}:"] if path else []
        said += [f"  {line}" for line in lines]
    if len(differ) > SHOWN_PARTS:
        said.append(f"and {len(differ) - SHOWN_PARTS} more parts")
    return Comparison(False, tuple(said))


def _groups(ranks, key):
    """[(key, ranks with that key)] in the order of their lowest rank."""
    found = {}
    for rank in ranks:
        found.setdefault(key(rank), []).append(rank)
    return list(found.items())


def _part(ranks, told, value_of):
    """Return the differences in one part: a line per group of equal ranks. Empty if all are equal."""
    groups = _groups(ranks, lambda rank: told[rank] and (told[rank]["kind"], told[rank]["digest"]))
    if len(groups) == 1:
        return []
    (first, those), *others = groups
    kind = first[0] if first else "nothing"
    lines, base = [f"{name_ranks(those)}: {kind}"], None
    for other, group in others:
        theirs = other[0] if other else "nothing"
        if theirs != kind:
            lines.append(f"{name_ranks(group)}: {theirs}")
            continue
        base = value_of(those[0]) if base is None else base
        if said := _difference(base, value_of(group[0]), those[0], group[0]):
            lines.append(f"{name_ranks(group)}: {said}")
    return lines if len(lines) > 1 else []


def _difference(ours, theirs, us, them):
    """One line on how two values of the same kind differ; "" if they only differ as 0.0 and -0.0 do."""
    import numpy as np

    if isinstance(ours, str):
        return f"{theirs[:60]}, on rank {us} {ours[:60]}"
    differing = (ours != theirs) & ~((ours != ours) & (theirs != theirs))  # NaN on both is no difference
    count = int(differing.sum())
    if not count:
        return ""
    where = np.unravel_index(int(differing.argmax()), ours.shape)
    one, other = ours[where].item(), theirs[where].item()
    if not ours.ndim:
        return f"{other!r}, on rank {us} {one!r}"
    wide = complex if np.iscomplexobj(ours) else float
    gaps = np.abs(ours[differing].astype(wide) - theirs[differing].astype(wide))
    largest = f"largest difference {np.nanmax(gaps):.4g}" if not np.isnan(gaps).all() else "NaN on one side"
    index = ", ".join(str(int(i)) for i in where)
    return (
        f"{count:,} of {ours.size:,} elements differ from rank {us}, first at [{index}]: {other:.8g} on rank {them}, "
        f"{one:.8g} on rank {us}; {largest}"
    )
