"""How much arithmetic a token costs: what MFU is made of, beside `peaks`.

    flops_per_token(config)            # floating-point operations of forward and backward, by formula
    forward_flops(config, sequences)   # {term: those of one forward}; the backward takes twice as many

MFU, model FLOPs utilisation (Chowdhery et al. 2022, PaLM, appendix B), is flops_per_token x tokens/s / peak.

Shapes: T positions, V symbols, D width, N layers, H heads of size E = D / H.
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


def forward_flops(config, sequences):
    """{term: FLOPs of one forward over `sequences` whole sequences}: the same products as in `flops_per_token`.

    Terms are called as in `rank_memory.parameter_terms`; "attention scores" are the two products with T positions, which have no
    weights. The backward takes twice as many of each (a gradient for each factor), so forward and backward are three times
    the sum, and four times where everything is recomputed once (Chen et al. 2016).
    """
    N, D, V, T = config.n_layer, config.n_embd, config.vocab_size, config.block_size
    per_token = {
        "qkv": N * 3 * D**2,
        "attention scores": N * 2 * T * D,
        "attention out": N * D**2,
        "mlp up": N * 4 * D**2,
        "mlp down": N * 4 * D**2,
        "head": V * D,
    }
    return {term: 2 * products * sequences * T for term, products in per_token.items()}


def nanogpt_flops_per_token(config):
    """The estimate 6N + 12 L H Q T as nanoGPT computes it (model.py, estimate_mfu), for comparison with its MFU.

    N is the number of parameters without position embeddings. It counts biases and norms as if they were matrices, and
    with an untied head the token embedding too, which is a look-up: 7 % too much for `olmo-1b`.
    """
    positions = config.block_size * config.n_embd
    return 6 * (config.num_params() - positions) + 12 * config.n_layer * config.n_embd * config.block_size
