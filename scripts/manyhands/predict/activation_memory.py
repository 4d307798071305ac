"""Count what a forward keeps for the backward, by formula: for our GPT, for a rank's step, and by the two formulas in
circulation.

    sum(saved_bytes(config, sequences=8).values()) # of our GPT; `measure.tensor_bytes.count_saved` counts the same
    activation_bytes(config, layout, options)      # of the fullest rank, at its fullest moment
    sequences_at_once(layout, options)             # of a micro-batch
    published_bytes(config, sequences=8)           # Korthikanti et al. 2022: another model in another precision
    slide_values(config, sequences=8)              # the formula of many slides, in values, not bytes

`activation_bytes` is `saved_bytes` for the precision, the recomputation, the tensor ranks and the pipeline of a run.
Not counted: masks of dropout, and what one operation needs for the moment, of which the gradient of the logits is the
largest.

Shapes: B sequences, T positions, V tokens in the vocabulary, D width, H heads, N layers.
"""

from dataclasses import replace
from functools import lru_cache

from manyhands.config.layout import logits_at_once
from manyhands.predict.models import model_of
from manyhands.predict.pipeline_schedules import held_at_once
from manyhands.predict.program import TRAIN_PY

PRECISION_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}  # of what is multiplied
AROUND = ("final norm", "head", "loss", "ids")  # the layers
FULL = ("norms", "final norm", "loss")  # what autocast leaves in the weights' precision
WHOLE = ("norms", "qkv", "mlp up", "routing", "final norm", "head", "loss", "ids")  # what tensor ranks hold alike
ID_BYTES = 8  # of a token id, a position or a target: int64
# {what a program saves: terms that selective checkpointing repeats}: all but matrix products and attention
REPEATED = {"autograd": ("norms", "gelu", "mlp down"), "inputs": ("qkv", "mlp up", "mlp down", "experts out")}


def saved_bytes(config, sequences: int, itemsize: int = 4) -> dict[str, float]:
    """{term: bytes} that autograd keeps of our GPT between forward and backward, for `sequences` whole sequences.

    Per token and layer 16 D + H + 4 numbers: each norm keeps its input (D) and two statistics, each linear its input (D
    for qkv and for attention's output, D and 4 D in the MLP), attention q, k, v (3 D) and one number per head, GELU its
    input (4 D). Attention's output and the input of its linear are one storage, and so are the outputs of norms and the
    inputs of linears; a residual addition keeps nothing. Around the layers 2 D + 2 for norm and head and V for the loss
    (its log-probabilities, in 32 bits at least; the logits themselves are let go), and the ids.

    Assumes: flash or memory-efficient attention, so that no T x T scores are kept; targets given; no dropout
    (ValueError), no recomputation, no autocast, whose copies would come on top. `itemsize` is of the model's numbers, 4
    for float32.
    """
    if config.dropout:
        raise ValueError(f"dropout={config.dropout} keeps masks that are not counted here; use dropout=0")
    model = model_of(config)
    N, H, V, T = model.n_layer, model.n_head, model.vocab_size, model.block_size
    tokens = sequences * T
    per_token = _numbers(model)
    terms = {term: count * tokens * itemsize for term, count in per_token.items()}
    terms["attention"] += N * H * tokens * max(itemsize, 4)  # the softmax's sums are never kept in 16 bits
    terms["loss"] = V * tokens * max(itemsize, 4)
    # of each token its id and its target, and each position once: its number, or what turns a head there; the number of
    # targets, as a float, is the loss's
    position = ID_BYTES if model.style == "gpt" else model.attention_width // H * itemsize
    return {**terms, "ids": ID_BYTES * 2 * tokens + position * T + max(itemsize, 4)}


def _numbers(model):
    """{term: numbers per token} of all layers and what is around them.

    A Llama's (see `models`): an RMSNorm keeps one statistic, grouped queries shrink K and V. SwiGLU,
    down(silu(gate) up), keeps both products and silu(gate), and the linear behind it its input: 4 M. Its input is the
    norm's output, kept once for both. What turns queries and keys by their positions is linear: it keeps tables alone.
    What clips them keeps its inputs.

    Where `routed` copies of a token pass through experts: each MLP's terms `routed` times, and for routing the router's
    input (D) and its probabilities (E), and each expert's output for the gradient of its weight. Shared experts have
    the router's input.
    """
    N, D, M, routed = model.n_layer, model.n_embd, model.hidden, model.routed
    passed = routed + model.shared_experts
    statistics, gelu = 2 if model.norm_weights != 1 else 1, (3 if model.style == "llama" else 1) * M
    clipped = 1 if model.clip_qkv is None else 2
    return {
        "norms": N * 2 * (D + statistics),
        "qkv": N * D,
        "attention": N * (model.attention_width + 2 * model.kv_width) * clipped,
        "attention out": N * model.attention_width,
        "mlp up": N * D * routed,
        "gelu": N * gelu * passed,
        "mlp down": N * M * passed,
        "final norm": D + statistics,
        "head": D,
        "loss": model.vocab_size,
    } | ({"routing": N * (D + model.experts + routed * D)} if model.experts > 1 else {})


def published_bytes(config, sequences: int) -> int:
    """Bytes of activations by Korthikanti et al. 2022 (section 4.1): N B (34 T D + 5 H T^2).

    They assume 16-bit activations, dropout after attention's scores, attention and MLP with masks of a byte, all scores
    kept (no flash attention), and no parallelism; embeddings, last norm, head and loss are left out as small.
    """
    N, D, H, T = config.n_layer, config.n_embd, config.n_head, config.block_size
    return N * sequences * (34 * T * D + 5 * H * T**2)


def slide_values(config, sequences: int) -> dict[str, int]:
    """{term: values} by the formula of many slides, for one forward. Values, not bytes: multiply by the size of one.

    5 N B T D + B N H T^2 + 2 B V T + 2 B T D + 2 B T. It counts attention's scores, which flash attention never keeps,
    and leaves out q, k, v, attention's output and the inputs of the norms.
    """
    B, N, D, H = sequences, config.n_layer, config.n_embd, config.n_head
    V, T = config.vocab_size, config.block_size
    return {
        "feed-forward": 5 * N * B * T * D,
        "attention scores": B * N * H * T**2,
        "logits and their gradient": 2 * B * V * T,
        "norms and head": 2 * B * T * D,
        "loss": 2 * B * T,
    }


def weight_bytes(options) -> int:
    """Bytes of a number that the optimizer updates: bf16 and fp16 keep theirs in fp32."""
    return max(PRECISION_BYTES[options.train.precision], PRECISION_BYTES["fp32"])


def reduce_bytes(options) -> int:
    """Bytes of a number that data ranks sum: a gradient's."""
    return PRECISION_BYTES["bf16"] if options.parallel.reduce_dtype == "bf16" else weight_bytes(options)


def stream_bytes(options) -> int:
    """Bytes of a number that the blocks add to."""
    low = options.train.precision == "bf16" and options.train.low_stream
    return PRECISION_BYTES["bf16"] if low and options.parallel.strategy != "deepspeed" else weight_bytes(options)


def sequences_at_once(layout, options) -> int:
    """Sequences of a rank's micro-batch."""
    return options.train.global_batch // layout.data // layout.micro_batches


def activation_bytes(config, layout, options, program=TRAIN_PY) -> int:
    """Bytes of all micro-batches between their forward and their backward on a rank; with a pipeline at most."""
    config = model_of(config)
    terms = rank_terms(config, layout, options, program)
    a_layer = sum(size for term, size in terms.items() if term not in AROUND) / config.n_layer
    around = sum(terms[term] for term in AROUND)
    kept, again = _kept(config, layout, options, program, terms, a_layer)
    if layout.pipeline == 1:
        return int(config.n_layer * kept + again + around)
    ranks = held_at_once(
        options.parallel.schedule, config.n_layer, layout.pipeline, layout.micro_batches, layout.stages_per_rank
    )
    if program.saves == "inputs":  # the gradient of the logits is made at once
        ranks = [(layers, min(heads, 1)) for layers, heads in ranks]
    return int(max(layers * kept + heads * around for layers, heads in ranks) + again)


def in_chunks(config, layout, options) -> int | None:
    """The logits of a chunk, where the head computes the loss in chunks (see `gpt.chunked_loss`); else None."""
    most, number = logits_at_once(layout, options), sequences_at_once(layout, options) * config.block_size
    return most if most and number // layout.context * config.vocab_size > most else None


def rank_terms(config, layout, options, program=TRAIN_PY) -> dict[str, float]:
    """{term: bytes} of all layers for one micro-batch, on one of the tensor ranks, without recomputation."""
    if program.saves == "inputs":
        return _inputs(config, layout, options, program)
    parallel, sequences = options.parallel, sequences_at_once(layout, options)
    full = _saved(config, sequences, weight_bytes(options))
    low = _saved(config, sequences, PRECISION_BYTES[options.train.precision])
    if stream_bytes(options) < weight_bytes(options):  # norms keep their input in 16 bits, their statistics in 32
        saved = sequences * config.block_size * config.n_embd * (weight_bytes(options) - stream_bytes(options))
        full = full | {"norms": full["norms"] - 2 * config.n_layer * saved, "final norm": full["final norm"] - saved}
    split = {"norms", "final norm"} if parallel.sequence_parallel else set()
    split |= {"mlp up"} if config.stacks_experts else set()  # the tokens of a tensor rank's own experts
    if in_chunks(config, layout, options):  # what is kept are the gradients: of the head's input and of its weight
        full = full | {"loss": config.vocab_size * (config.n_embd + 1) * PRECISION_BYTES["fp32"]}
    if layout.tensor > 1:  # the rows that are looked up of a split vocabulary, and which of them are others'
        low = low | {"ids": low["ids"] + (ID_BYTES + 1) * sequences * config.block_size}
    whole = set(WHOLE) - split - ({"loss"} if parallel.loss_parallel else set())
    return {term: (full if term in FULL else low)[term] / (1 if term in whole else layout.tensor) for term in low}


@lru_cache(maxsize=4096)
def _saved(config, sequences, itemsize):
    return saved_bytes(replace(config, dropout=0.0), sequences, itemsize)


def _inputs(model, layout, options, program):
    """`rank_terms` of kernels that keep inputs alone, in 16 bits: of norms, of linear layers and of the activation.

    Of attention queries, keys, values and its output. With `flash` False also attention's scores: Korthikanti et al.
    2022, table 2. Tensor ranks that share the positions keep a share of everything.
    """
    D, M, t, routed = model.n_embd, model.hidden * model.routed, layout.tensor, model.routed
    share, low = t if program.sequence_parallel else 1, 1 if program.fp8 else 2
    llama, experts = model.style == "llama", model.experts > 1
    a_layer = {
        "norms": (4 if llama else 6) * D / share,  # a gpt's dropout has two masks of a byte
        "qkv": 2 * D / share,
        "attention": 4 * (model.attention_width + model.kv_width) / t,
        "scores": 0.0 if program.flash else 5 * model.n_head * model.block_size / t,
        "mlp up": 2 * D / share,
        "gelu": low * M * (2 if llama else 1) / t,
        "mlp down": low * M / t,
        "routing": low * D * routed * experts / t,
        "experts out": 2 * D * routed * experts / t,
    }
    around = {
        "final norm": 2 * model.n_embd / t,
        "head": 2 * model.n_embd / t,
        "loss": 4 * model.vocab_size / t,
        "ids": 0.0,
    }
    tokens = sequences_at_once(layout, options) * model.block_size
    return {term: size * tokens * model.n_layer for term, size in a_layer.items()} | {
        term: size * tokens for term, size in around.items()
    }


def repeated_bytes(terms, program) -> float:
    """The bytes of `rank_terms` that selective checkpointing leaves out of what it keeps, and writes again."""
    names = REPEATED[program.saves] if program.flash else ("scores",)
    return sum(terms.get(name, 0.0) for name in names)


def _kept(config, layout, options, program, terms, a_layer):
    """(what a layer keeps, what is there again while a layer's backward runs), in bytes."""
    kind = options.parallel.activation_checkpointing
    if kind == "none":
        return a_layer, 0
    if kind == "selective" and program.saves == "inputs":
        return a_layer - repeated_bytes(terms, program) / config.n_layer, a_layer
    tokens = sequences_at_once(layout, options) * config.block_size
    # the layer's input, of which sequence parallelism leaves each tensor rank a share
    kept = tokens * config.n_embd * stream_bytes(options) / (layout.tensor if options.parallel.sequence_parallel else 1)
    if kind == "selective":  # and what the products and attention gave
        D, wide, routed = config.n_embd, config.attention_width, config.routed
        up = config.hidden * (2 if config.style == "llama" else 1)
        split = 2 * wide + 2 * config.kv_width + up * routed  # over tensor ranks
        # whole on each: with experts also what came to them, so that no token is sent again
        whole = D + routed * D * (2 if config.experts > 1 else 1)
        kept += tokens * (split / layout.tensor + whole) * PRECISION_BYTES[options.train.precision]
    return kept, a_layer
