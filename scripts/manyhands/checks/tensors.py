"""Two sentences that several checks need: how a tensor differs from the one that is wanted, and how many of what."""

from manyhands.checks import Wrong


def same(found_N, wanted_N, what, name, hint=""):
    """Raise Wrong unless a tensor is `wanted_N`: `what` says for which input, `name` which tensor, `hint` why perhaps."""
    if found_N.dtype != wanted_N.dtype or found_N.shape != wanted_N.shape:
        showns = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (found_N, wanted_N)]
        raise Wrong(f"{what} it returned {showns[0]}, not {showns[1]}")
    differ = (found_N != wanted_N).flatten()  # nan differs as well
    if differ.any():
        i = int(differ.nonzero()[0])
        found, wanted = found_N.flatten()[i].item(), wanted_N.flatten()[i].item()
        if 0 < abs(found - wanted) < 1e-6 * abs(wanted):
            hint = "; digits are lost on the way, so let every tensor have the dtype of the one you were given"
        raise Wrong(f"{what} {name} is wrong: element {i} is {_exact(found)}, not {_exact(wanted)}{hint}")


def _exact(value):
    return f"{value:.17g}" if isinstance(value, float) else str(value)


def count(number, noun):
    """1 message, 2 messages."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
