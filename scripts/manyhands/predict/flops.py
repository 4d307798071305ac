"""How much arithmetic a token costs: what MFU is made of, beside `peaks`.

    flops_per_token(config)            # floating-point operations of forward and backward, by formula

MFU, model FLOPs utilisation (Chowdhery et al. 2022, PaLM, appendix B), is flops_per_token x tokens/s / peak.

Shapes: T positions, V tokens in the vocabulary, D width, N layers, H heads of size E = D / H.
"""


def flops_per_token(config):
    """Floating-point operations per trained token of a GPT: its matrix products, forward and backward, exactly.

    6 (12 N D^2 + V D) + 12 N D T. Each weight of a matrix is multiplied and added once in the forward pass (2
    operations) and twice in the backward pass (4). Attention's two products with T positions cost 4 D T per layer
    forward and twice that backward. This is PaLM's 6N + 12 L H Q T (appendix B) with N = the weights that are in a
    matrix product. As there, the causal mask saves nothing, and recomputed activations do not count twice. Left out:
    biases, norms, softmax, GELU, the loss, the look-up of embeddings, and the optimizer.
    """
    N, D, V, T = config.n_layer, config.n_embd, config.vocab_size, config.block_size
    return 6 * (12 * N * D**2 + V * D) + 12 * N * D * T


def nanogpt_flops_per_token(config):
    """The estimate 6N + 12 L H Q T as nanoGPT computes it (model.py, estimate_mfu), for comparison with its MFU.

    N is the number of parameters without position embeddings. It counts biases and norms as if they were matrices, and
    with an untied head the token embedding too, which is a look-up: 7 % too much for `olmo-1b`.
    """
    positions = config.block_size * config.n_embd
    return 6 * (config.num_params() - positions) + 12 * config.n_layer * config.n_embd * config.block_size
