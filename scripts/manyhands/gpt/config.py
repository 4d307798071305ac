"""The sizes of a model, for whoever builds it and for whoever only plans it: no torch is imported."""

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT. Raises ValueError, with the numbers, for sizes that make no model."""

    vocab_size: int  # V
    block_size: int = 64  # T, the longest sequence in training
    n_layer: int = 4  # N
    n_head: int = 4  # H
    n_embd: int = 128  # D
    dropout: float = 0.0
    tie: bool = False  # the head *is* the token embedding, and has no bias, as in GPT-2
    qkv_bias: bool = False  # as in GPT-2
    # the token that begins a document, where attention is to stay within documents; None: all is one text
    separator: int | None = None
    experts: int = 1  # E, MLPs per layer; 1: no router
    top_k: int = 2  # with experts: the number of them that each token passes through
    shared_experts: int = 0  # with experts: one MLP for every token, as wide as this number of experts
    router: str = "softmax"  # or sigmoid: what makes an expert's score of a logit
    gelu: str = "exact"  # or tanh, the approximation that GPT-2's published weights were trained with
    style: str = "gpt"  # or llama, which alone has what follows
    n_kv_head: int | None = None  # K, heads of keys and values; None: as many as heads
    n_hidden: int | None = None  # M; None: 4 D
    head_dim: int | None = None  # E, where heads together are not as wide as the model; None: D / H
    norm: str = "rms"  # or layer: OLMo's, without weight and bias
    norm_eps: float = 1e-5  # of rms
    clip_qkv: float | None = None  # the largest size of a number in queries, keys and values; None: any
    rope_theta: float = 10000.0  # the slowest pair of numbers turns once in some 2 pi theta positions
    rope_factor: float = 1.0  # by how much slow pairs turn slower, as in Llama 3.1; 1: not at all
    rope_low: float = 1.0  # turns within rope_original positions: a pair with fewer is slow
    rope_high: float = 4.0  # and one with more stays as it is
    rope_original: int = 8192
    max_positions: int | None = None  # the longest sequence that it reads and writes; None: block_size

    def __post_init__(self):
        for name in AT_LEAST_1:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} is too small; use at least 1")
        if self.head_dim is None and self.n_embd % self.n_head:
            why = f"n_embd={self.n_embd} does not split over {self.n_head} heads; use a multiple of {self.n_head}"
            raise ValueError(why)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is not a probability; use 0 or more and less than 1")
        if self.separator is not None and not 0 <= self.separator < self.vocab_size:
            raise ValueError(f"unknown token separator={self.separator}; use 0 to {self.vocab_size - 1}, or None")
        for fault in (*self._experts_faults(), *self._style_faults()):
            raise ValueError(fault)

    def _experts_faults(self):
        if self.router not in ("softmax", "sigmoid"):
            yield f"router={self.router!r} is unknown; use softmax or sigmoid"
        if self.shared_experts < 0:
            yield f"shared_experts={self.shared_experts} is too small; use 0 or more"
        if self.shared_experts and self.experts == 1:
            yield f"shared_experts={self.shared_experts} need other experts; use experts=2 or more, or leave it out"
        if self.experts > 1 and not 1 <= self.top_k <= self.experts:
            yield f"top_k={self.top_k} of {self.experts} experts is not possible; use 1 to {self.experts}"

    def _style_faults(self):
        if self.gelu not in ("exact", "tanh"):
            yield f"gelu={self.gelu!r} is unknown; use exact or tanh"
        if self.gelu == "tanh" and (self.style == "llama" or self.experts > 1):
            yield "gelu=tanh is for style=gpt without experts; leave it out"
        if self.style not in ("gpt", "llama"):
            yield f"style={self.style!r} is unknown; use gpt or llama"
        if self.style == "gpt":
            own = {"n_kv_head": self.n_head, "n_hidden": 4 * self.n_embd, "max_positions": self.block_size}
            for f in fields(self):
                if f.name in OF_A_LLAMA and (value := getattr(self, f.name)) not in (f.default, own.get(f.name)):
                    yield f"{f.name}={value} is for style=llama; use that, or leave it out"
            return
        if self.shared_experts:
            yield f"shared_experts={self.shared_experts} are for style=gpt; leave them out"
        if self.qkv_bias:
            yield "qkv_bias is for style=gpt, and a llama has no biases; leave it out"
        if self.n_head % self.kv_heads:
            yield f"n_head={self.n_head} does not split over n_kv_head={self.kv_heads}; use a divisor of {self.n_head}"
        if self.head_size % 2:
            yield f"heads of {self.head_size} numbers do not turn in pairs; use an even head_dim"
        if self.norm not in ("rms", "layer"):
            yield f"norm={self.norm!r} is unknown; use rms or layer"
        if self.norm == "layer" and self.norm_eps != 1e-5:
            yield f"norm_eps={self.norm_eps:g} is not that of norm=layer, which is 1e-05; leave it out"
        for name, least in (("norm_eps", 0), ("clip_qkv", 0), ("rope_theta", 1), ("rope_low", 0)):
            if (value := getattr(self, name)) is not None and not least < value < math.inf:
                yield f"{name}={value:g} is no size; use more than {least}"
        if not 1 <= self.rope_factor < math.inf:
            yield f"rope_factor={self.rope_factor:g} makes nothing slower; use 1 or more"
        if not self.rope_low < self.rope_high < math.inf:
            yield f"rope_high={self.rope_high:g} is not above rope_low={self.rope_low:g}; use 4 and 1"
        if self.context < self.block_size:
            yield f"max_positions={self.context} is less than block_size={self.block_size}, which is trained; use more"

    @property
    def kv_heads(self):
        """K: heads of keys and values."""
        return self.n_kv_head or self.n_head

    @property
    def head_size(self):
        """E: the numbers of one head."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def context(self):
        """Positions of the longest sequence that the model reads and writes; training has `block_size`."""
        return self.max_positions or self.block_size

    @property
    def hidden(self):
        """M: the MLP's width."""
        return self.n_hidden or 4 * self.n_embd

    def num_params(self):
        """Parameters of the model, by formula; lesson 01 says where each term comes from."""
        N, D, V, T = self.n_layer, self.n_embd, self.vocab_size, self.block_size
        if self.style == "llama":
            attention = 2 * D * self.head_size * (self.n_head + self.kv_heads)
            norm = D if self.norm == "rms" else 0
            mlp = 3 * D * self.hidden * self.experts + (self.experts > 1) * self.experts * D
            return N * (attention + mlp + 2 * norm) + V * D * (1 if self.tie else 2) + norm
        layer = 4 * D**2 + (8 if self.qkv_bias else 5) * D + self._mlp_params()
        head = 0 if self.tie else V * (D + 1)
        return N * layer + D * (V + T) + 2 * D + head

    def _mlp_params(self):
        """Return the parameters of one layer's MLP, or of its router, its experts and the shared MLP."""
        D, E, S = self.n_embd, self.experts, self.shared_experts
        if E == 1:
            return 8 * D**2 + 5 * D
        return E * D + 8 * E * D**2 + (S > 0) * (8 * S * D**2 + 4 * S * D + D)


OF_A_LLAMA = (
    "n_kv_head", "n_hidden", "head_dim", "norm", "norm_eps", "clip_qkv", "rope_theta", "rope_factor", "rope_low",
    "rope_high", "rope_original", "max_positions",
)  # fmt: skip
AT_LEAST_1 = (
    "vocab_size", "block_size", "n_layer", "n_head", "n_embd", "experts", "n_kv_head", "n_hidden", "head_dim",
    "rope_original", "max_positions",
)  # fmt: skip
