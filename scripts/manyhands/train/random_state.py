"""Random numbers of a training run: a seed per rank that none shares by accident, and states that a checkpoint keeps."""

import numpy as np
import torch


def seed_dropout(seed, layout, ranks, step=0):
    """Seed this rank's masks, for a run that begins at `step`.

    Ranks with other data or another stage draw other dropout masks; tensor ranks draw the same, on the same activations.

    The numbers are mixed, not multiplied: products of ranks collide, so that `seed * (rank + 1) * (local_rank + 1)` gives
    ranks 2 and 8 of two nodes with eight each the same masks.
    """
    place = layout.coordinates(ranks.rank)
    key = (layout.data_rank(ranks.rank), place["pipeline"], step)
    torch.manual_seed(int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)[0] >> 1))


def random_state(device):
    """The states of torch's generators on this rank: {"cpu": uint8 tensor, "device": another, on a GPU}."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_state(states, device):
    """Go on drawing where `random_state` was taken."""
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device"], device)
