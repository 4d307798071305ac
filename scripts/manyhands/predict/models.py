"""The sizes of a model that is planned and not built: the course's GPT, or one of Llama's kind. Needs no torch.

    model = preset_model("llama3.2-1b")                      # a preset of the trainer
    model = PlannedModel(vocab_size=32100, block_size=2048, n_layer=32, n_head=32, n_embd=4096)
    model.num_params(), model.flops_per_token()

`style="llama"` means RMSNorm, no biases, rotary positions, SwiGLU, grouped queries (Touvron et al. 2023; Grattafiori et
al. 2024). With `experts` above 1 a router sends each token to `top_k` of as many MLPs of the same size (Shazeer et al.
2017, arXiv:1701.06538); `shared_experts` more are one MLP for all.

Shapes: V tokens in the vocabulary, T positions, D width, H heads, K key-value heads, M hidden, N layers, E experts.
"""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, prod
from pathlib import Path
from typing import NamedTuple

from pydantic import ConfigDict, TypeAdapter

from manyhands.config.options import PRESETS, from_preset
from manyhands.gpt.config import GPTConfig

SHAKESPEARE_VOCAB_SIZE = 65  # what a preset without a vocabulary gets from the corpus


class Weight(NamedTuple):
    """A weight of the model, or what a tensor rank has of it."""

    module: str  # its name in the GPT; of a layer's weights the name within the layer
    shape: tuple[int, ...]
    split: int | None = None  # the dim that tensor ranks split; none: each holds it whole
    linear: bool = False  # of a linear layer: autocast keeps a copy in low precision
    expert: bool = False  # of one of several experts, which expert parallelism spreads over ranks
    heads: int | None = None  # of keys or values: more tensor ranks than these hold it whole

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def of_tensor_rank(self, tensor: int) -> "Weight":
        """Return the shard of the first of `tensor` ranks: DTensor gives the first ranks the larger parts."""
        if self.heads and self.heads < tensor:
            return self
        return self._replace(shape=tuple(ceil(n / tensor) if d == self.split else n for d, n in enumerate(self.shape)))


@dataclass(frozen=True)
class PlannedModel(GPTConfig):
    """The trainer's sizes, and what only others' models have. Raises ValueError for what makes no model."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: str = "a GPT"
    # what an expert's buffer holds over its mean share, filled up with padding; none: as much as comes, and no padding
    capacity: float | None = None
    # of a llama's experts: each has weights of its own, as others store them; in `train.py` one weight has all of them
    apart: bool = False

    def __post_init__(self):
        super().__post_init__()
        capacity, most = self.capacity, self.experts / self.chosen
        if capacity is not None and self.experts == 1:
            raise ValueError(f"capacity factor {capacity:g} without experts; use 2 experts or more, or leave it out")
        if capacity is not None and not 1 <= capacity <= most:
            why = f"use 1, which holds a balanced share, to {most:g}, which holds all tokens on one of {self.experts}"
            raise ValueError(f"capacity factor {capacity:g}: {why} experts")

    @property
    def chosen(self) -> int:
        """The MLPs that each token passes through."""
        return self.top_k if self.experts > 1 else 1

    @property
    def kv_width(self) -> int:
        """Numbers of a token's key, over all key-value heads."""
        return self.head_size * self.kv_heads

    @property
    def attention_width(self) -> int:
        """Numbers of a token's query, over all heads: D, unless `head_dim` says another width."""
        return self.head_size * self.n_head

    @property
    def norm_weights(self) -> int:
        """Weights of a norm, each as wide as the model."""
        return 2 if self.style == "gpt" else 1 if self.norm == "rms" else 0

    @property
    def routed(self) -> int | float:
        """Copies of a token that a layer's MLPs compute with, padding included: 1 without experts."""
        return self.chosen * (self.capacity or 1)

    @property
    def stacks_experts(self) -> bool:
        """True if one weight has all experts of a layer, as in `train.py`: tensor ranks share out whole experts."""
        return self.experts > 1 and not self.apart

    def layer_weights(self, experts: int | None = None) -> list[Weight]:
        """Return one layer's weights, in the order of `GPT.parameters()`, with this number of experts (None: all)."""
        D, kv, wide, llama = self.n_embd, self.kv_width, self.attention_width, self.style == "llama"
        norms = [[Weight(name, (D,))] * self.norm_weights for name in ("norm_1", "norm_2")]
        if llama:
            linears = [("q", (wide, D), 0), ("k", (kv, D), 0), ("v", (kv, D), 0), ("out", (D, wide), 1)]
        else:
            linears = [("qkv", (3 * D, D), 0), ("out", (D, D), 1), ("out", (D,), None)]
            linears[1:1] = [("qkv", (3 * D,), 0)] if self.qkv_bias else []
        heads = {"k": self.kv_heads, "v": self.kv_heads}
        attention = [Weight(f"attention.{name}", *rest, True, heads=heads.get(name)) for name, *rest in linears]
        experts = self.experts if experts is None else experts
        mlps = self.mlp_weights()
        if self.experts > 1:  # one below the other, as `gpt.experts` stores them
            names = ("mlp", "mlp") if self.stacks_experts else ("router", "mlp.experts")
            rows = [Weight(names[1], (experts * w.shape[0], w.shape[1]), 0, True, True) for w in mlps]
            mlps = [Weight(names[0], (self.experts, D), None, True), *rows]
        shared = _gpt_mlp(D, self.shared_experts * self.hidden) if self.shared_experts else []
        mlps += [Weight(f"mlp.shared.{name}", shape, split, True) for name, shape, split in shared]
        return [*norms[0], *attention, *norms[1], *mlps]

    def mlp_weights(self) -> list[Weight]:
        """Return the weights of one MLP, or of one expert."""
        D, M = self.n_embd, self.hidden
        linears = _gpt_mlp(D, M)
        if self.style == "llama":
            linears = [("gate", (M, D), 0), ("up", (M, D), 0), ("down", (D, M), 1)]
        if self.stacks_experts:  # without biases; of a llama the rows of the gate are in `up`
            linears = [("up", (M * (2 if self.style == "llama" else 1), D), 0), ("down", (M, D), 0)]
        return [Weight(f"mlp.{name}", shape, split, True, self.experts > 1) for name, shape, split in linears]

    def front_weights(self, is_last: bool = True) -> list[Weight]:
        """Before the layers. A tied embedding is the head's weight, too, where the stage `is_last`."""
        positions = [] if self.style == "llama" else [Weight("positions", (self.block_size, self.n_embd))]
        return [Weight("tokens", (self.vocab_size, self.n_embd), 0, self.tie and is_last), *positions]

    def back_weights(self, is_first: bool = True) -> list[Weight]:
        """Behind the layers: the last norm and the head, of a tied model as a copy unless the stage `is_first`."""
        D, V = self.n_embd, self.vocab_size
        shapes = [] if self.tie and is_first else [(V, D)] if self.tie or self.style == "llama" else [(V, D), (V,)]
        return [Weight("norm", (D,))] * self.norm_weights + [Weight("head", shape, 0, True) for shape in shapes]

    @cache  # noqa: B019 - models are few, and asked thousands of times
    def num_params(self) -> int:
        """Parameters, by the shapes; of a gpt as `GPTConfig.num_params` has them."""
        once = self.front_weights() + self.back_weights()
        return self.n_layer * sum(w.numel for w in self.layer_weights()) + sum(w.numel for w in once)

    def active_params(self) -> int:
        """The parameters that one token passes through: all but the experts that it is not sent to."""
        idle = self.n_layer * (self.experts - self.chosen) * sum(w.numel for w in self.mlp_weights())
        return self.num_params() - idle

    @cache  # noqa: B019
    def layer_flops(self) -> int:
        """Floating-point operations of a layer's matrix products per token, forward: 2 per weight, and 4 D T of
        attention.

        As in `flops_per_token`: the causal mask saves nothing. Of experts those that a token passes through.
        """
        products = sum(w.numel for w in self.layer_weights(self.chosen) if len(w.shape) == 2)
        return 2 * products + self.attention_flops()

    def expert_flops(self) -> float:
        """The forward FLOPs of a layer's experts per token, padding included; 0 without experts."""
        if self.experts == 1:
            return 0.0
        return 2 * self.routed * sum(w.numel for w in self.mlp_weights() if len(w.shape) == 2)

    def computed_flops(self) -> float:
        """`layer_flops` and the padding: what a GPU really computes of a layer per token, forward."""
        return self.layer_flops() + self.expert_flops() * (1 - self.chosen / self.routed)

    def attention_flops(self) -> int:
        """The FLOPs of attention besides its linear layers: scores, and their product with V."""
        return 4 * self.attention_width * self.block_size

    def head_flops(self) -> int:
        """The forward FLOPs of the head per token."""
        return 2 * self.vocab_size * self.n_embd

    @cache  # noqa: B019
    def flops_per_token(self) -> int:
        """Model FLOPs of forward and backward: what MFU counts, recomputation left out."""
        return 3 * (self.n_layer * self.layer_flops() + self.head_flops())


def _gpt_mlp(D: int, M: int) -> list[tuple]:
    """[(name, shape, the dim that tensor ranks split)] of a gpt's MLP."""
    return [("up", (M, D), 0), ("up", (M,), 0), ("down", (D, M), 1), ("down", (D,), None)]


def flops_per_token(config: GPTConfig) -> int:
    """Floating-point operations per trained token of a model: its matrix products, forward and backward, exactly.

    MFU, model FLOPs utilisation (Chowdhery et al. 2022, PaLM, appendix B), is this x tokens/s / a device's peak.

    Of a GPT 6 (12 N D^2 + V D) + 12 N D T, of a Llama 6 (N (2 H E D + 2 K E D + 3 M D) + V D) + 12 N H E T. Each
    weight of a matrix is multiplied and added once in the forward pass (2 operations) and twice in the backward pass
    (4). Attention's two products with T positions cost 4 D T per layer forward and twice that backward. This is PaLM's
    6N + 12 L H Q T with N = the weights that are in a matrix product. As there, the causal mask saves nothing, and
    recomputed activations do not count twice. Left out: biases, norms, softmax, GELU, the loss, the look-up of
    embeddings, and the optimizer. Of experts those that a token passes through.
    """
    return model_of(config).flops_per_token()


def model_of(config: GPTConfig) -> PlannedModel:
    """The PlannedModel of a GPTConfig; a PlannedModel as it is."""
    return config if isinstance(config, PlannedModel) else PlannedModel(**vars(config))


@cache
def share_of(model: PlannedModel, context: int, tensor: int = 1) -> PlannedModel:
    """Return the model as one of the context ranks sees it: with its share of the positions.

    And with as many heads of keys as `tensor` ranks compute together: each has one, where there are fewer.
    """
    if context == 1 and tensor <= model.kv_heads:
        return model
    sizes = {"block_size": model.block_size // context, "n_kv_head": max(model.kv_heads, tensor)}
    return replace(model, **sizes, max_positions=None)


_rows = tomllib.loads(Path(__file__).with_name("models.toml").read_text("utf-8"))["model"]
OTHERS = {model.name: model for model in TypeAdapter(list[PlannedModel]).validate_python(_rows)}
MODELS = (*PRESETS, *OTHERS)


def preset_model(name: str) -> PlannedModel:
    """The PlannedModel of a preset of the trainer, or of models.toml. Raise ValueError for an unknown name."""
    if name in OTHERS:
        return OTHERS[name]
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is unknown; use one of {', '.join(MODELS)}")
    sizes = from_preset(name).model
    vocab_size = sizes.vocab_size or SHAKESPEARE_VOCAB_SIZE
    return PlannedModel(**vars(sizes) | {"vocab_size": vocab_size}, name=name)
