"""The whole model, the same on every rank: what each strategy cuts its shares from."""

import torch

from manyhands.gpt.model import GPT


def full_model(config, options):
    """The whole GPT on the CPU, from options.train.seed; float64 for precision fp64, else float32."""
    torch.manual_seed(options.train.seed)
    return GPT(config).to(torch.float64 if options.train.precision == "fp64" else torch.float32)
