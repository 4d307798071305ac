"""Choose FSDP's units by `parallel.wrapping`: one rule for building (`parallel.fsdp`) and planning (`predict.memory`),
without torch.

    kind, count = parsed("size:100000")            # ("size", 100000); ("block", 1) where there is no number
    units_of_size({("a",): 5, ("a", "b"): 9}, 8)   # {("a", "b"): [("a", "b")]}
"""

from collections.abc import Collection, Mapping

OUTSIDE = ("tokens", "head")  # the large matrices outside the blocks, which block_and_size makes units
Path = tuple[str, ...]


def parsed(wrapping: str) -> tuple[str, int]:
    """(kind, count) of a wrapping that `layout` has accepted."""
    kind, _, count = wrapping.partition(":")
    return kind, int(count or 1)


def units_of_size(own: Mapping[Path, int], least: int, never: Collection[Path] = ()) -> dict[Path, list[Path]]:
    """{a unit: the modules whose own parameters it gathers}, innermost first.

    A unit is a module with `least` parameters or more that are in no unit further inside. own: {a module's path: its
    parameters without those of modules inside}; never: modules that are no unit, such as lists, which are not called.
    """
    found, left = {}, dict(own)
    for module in sorted(own, key=lambda path: (-len(path), path)):
        inside = [path for path in left if path[: len(module)] == module]
        if module not in never and sum(left[path] for path in inside) >= least:
            found[module] = inside
            for path in inside:
                del left[path]
    return found
