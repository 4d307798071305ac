"""Numbers and models that every rank can draw by itself, from seeds that say the rank: so all know the right answer."""

import torch


def normal(seed, *shape, dtype=torch.float64):
    """Normally distributed numbers of a shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def seeded(make, seed):
    """What `make()` draws after this seed; the generator of the process is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def flat(tensors):
    """All numbers of some tensors in one row, a copy."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def gradients(model):
    """The gradients of a model's parameters in one row; None where one has none."""
    found = [p.grad for p in model.parameters()]
    return None if any(gradient is None for gradient in found) else flat(found)
