"""Bytes per parameter by recipe, and how the stages of ZeRO share them: pencil and paper, before any layout.

    state_bytes(65_288_471_656, "bf16 + fp32 master")      # 16 bytes each: 1,045 GB
    zero_bytes(7.5e9, n_ranks=64, stage=3)                 # 1.9e9 bytes on each rank

`rank_memory.bytes_per_rank` says the same for a real configuration, to the byte.
"""

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Recipe:
    """Bytes that training keeps per parameter, by kind."""

    weights: float  # what the forward multiplies with, or is cast from
    gradients: float
    master: float  # the weights once more, exact, where the update goes
    moments: float  # Adam's two
    cast: float = 0  # autocast's copies, which live from the forward to the backward

    @property
    def total(self):
        """Bytes per parameter while a step runs, the copies of a cast included."""
        return sum(astuple(self))


# Adam or AdamW throughout. "bf16 + fp32 master" is the mixed precision of Rajbhandari et al. 2020, section 3.1 (2 + 2 + 12).
# Many slides take its 2 + 12 and leave the gradients out.
RECIPES = {
    "fp32": Recipe(weights=4, gradients=4, master=0, moments=8),
    "bf16": Recipe(weights=2, gradients=2, master=0, moments=4),
    "bf16 + fp32 master": Recipe(weights=2, gradients=2, master=4, moments=8),
    "fp32 + autocast": Recipe(weights=4, gradients=4, master=0, moments=8, cast=2),
    "14P of many slides": Recipe(weights=2, gradients=0, master=4, moments=8),
}


def state_bytes(num_params, recipe):
    """Bytes of weights, gradients, optimizer and copies of `num_params` parameters, on one device that holds all.

    `recipe` is a Recipe, or a name in RECIPES. No activations. Raises ValueError for an unknown name.
    """
    return round(num_params * as_recipe(recipe).total)


def as_recipe(recipe):
    """The Recipe of a name in RECIPES; a Recipe as it is. Raises ValueError."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"recipe {recipe!r} is unknown; use one of {', '.join(RECIPES)}, or a Recipe")
    return RECIPES[recipe]


def zero_bytes(num_params, n_ranks, stage, k=12):
    """Bytes of each of `n_ranks` ranks under a stage of ZeRO (0: none, plain data parallelism).

    Rajbhandari et al. 2020, figure 1: 2 bytes of weights, 2 of gradients and `k` of optimizer state per parameter (12:
    Adam's moments and a master copy, in fp32). Stage 1 partitions the optimizer state, stage 2 the gradients too, stage 3
    the weights too; into parts of equal size, without what is gathered for the moment, without activations.
    Raises ValueError for another stage, or less than one rank.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage} is none of ZeRO's; use 0 (nothing partitioned), 1, 2 or 3")
    if n_ranks < 1:
        raise ValueError(f"n_ranks={n_ranks} is too small; use at least 1")
    weights, gradients, optimizer = 2, 2, k
    share = 1 / n_ranks
    per_parameter = (
        weights * (share if stage >= 3 else 1)
        + gradients * (share if stage >= 2 else 1)
        + optimizer * (share if stage >= 1 else 1)
    )
    return num_params * per_parameter
