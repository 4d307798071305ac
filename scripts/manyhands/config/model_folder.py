"""The sizes of a model in a folder as the library transformers writes it, from its config.json alone.

    sizes = sizes_in("SmolLM2-135M")        # {name in ModelOptions: value}; block_size is the longest that it reads

Versions 4 and 5 of transformers spell rotary positions differently, and a missing name is not one that is null.
"""

import json
from pathlib import Path
from typing import Any

from manyhands.launch.program import Refused, explained

# kind: what its configuration stands for where it does not say
KINDS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "MistralForCausalLM": {
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096
    },
    "OlmoForCausalLM": {"max_position_embeddings": 2048},
    "MixtralForCausalLM": {
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "GPT2LMHeadModel": {"n_positions": 1024, "tie_word_embeddings": True},
}  # fmt: skip
LONGEST = 2048  # positions that are trained unless model.block_size says more
GELU = {"gelu": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
# what changes the model, and the only values with which it is ours
PLAIN_GPT2: dict[str, tuple[Any, ...]] = {
    "scale_attn_by_inverse_layer_idx": (False,), "reorder_and_upcast_attn": (False,), "scale_attn_weights": (True,),
    "add_cross_attention": (False,), "layer_norm_epsilon": (1e-5,), "tie_word_embeddings": (True,),
}  # fmt: skip
PLAIN: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,), "partial_rotary_factor": (1,),
    "router_jitter_noise": (0,),
}  # fmt: skip


class ModelFolderError(Refused):
    """A folder that holds no model of ours: one sentence with the file and what is supported."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raise ModelFolderError."""
    if not path.is_file():
        raise ModelFolderError(f"{path.parent} has no {path.name}; name a folder as transformers writes it")
    with explained(ModelFolderError, "copy the folder again", path):
        try:
            content = json.loads(path.read_bytes())
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
    return content


def sizes_in(folder: Path | str) -> dict[str, Any]:
    """Return the sizes of the model in `folder` as ModelOptions name them. Raise ModelFolderError."""
    path = Path(folder) / "config.json"
    config = read_json(path)
    with explained(ModelFolderError, "name another model", path):
        kind = (config.get("architectures") or [None])[0]
        if kind not in KINDS:
            raise ValueError(f"architectures says {kind}, and {', '.join(KINDS)} are read")
        if config.get("quantization_config"):
            raise ValueError("its weights are quantised, and fp32, bf16 and fp16 are read")
        if config.get("auto_map"):
            raise ValueError("auto_map brings code of its own, which nothing here executes")
        return (_gpt2 if kind == "GPT2LMHeadModel" else _llama)(_Values(KINDS[kind] | config))


class _Values:
    def __init__(self, content):
        self.content = content

    def number(self, name, default=None, whole=False):
        """A positive number; `default` where it is null or missing. Raise ValueError for what is none."""
        value = self.content.get(name)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"{name} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or (whole and value % 1):
            raise ValueError(f"{name} is {value!r}, which is no size")
        return int(value) if whole else float(value)

    def whole(self, name, default=None):
        return self.number(name, default, whole=True)

    def table(self, name):
        value = self.content.get(name) or {}
        if not isinstance(value, dict):
            raise ValueError(f"{name} is {value!r}, and no object")
        return value

    def refuse_unlike(self, plain):
        for name, values in plain.items():
            if (value := self.content.get(name)) is not None and value not in values:
                raise ValueError(f"{name} is {value!r}, and {values[0]!r} is supported")


def _gpt2(values):
    width, name = values.whole("n_embd"), values.content.get("activation_function", "gelu_new")
    if name not in GELU:
        raise ValueError(f"activation_function is {name!r}, and {', '.join(GELU)} are supported")
    values.refuse_unlike(PLAIN_GPT2 | {"n_inner": (4 * width,)})
    return {
        "block_size": values.whole("n_positions"),
        "n_layer": values.whole("n_layer"),
        "n_head": values.whole("n_head"),
        "n_embd": width,
        "vocab_size": values.whole("vocab_size"),
        "tie": True,
        "qkv_bias": True,
        "gelu": GELU[name],
    }


def _llama(values):
    values.refuse_unlike(PLAIN)
    width, heads = values.whole("hidden_size"), values.whole("num_attention_heads")
    kind = KINDS[values.content["architectures"][0]]
    olmo, mixtral = "rms_norm_eps" not in kind, "num_local_experts" in kind
    head = None if olmo or values.content.get("head_dim") is None else values.whole("head_dim")
    longest = values.whole("max_position_embeddings")
    window = longest if values.content.get("sliding_window") is None else values.whole("sliding_window")
    own = {
        "block_size": min(longest, window),  # within its window a model attends to all that came before
        "n_layer": values.whole("num_hidden_layers"),
        "n_head": heads,
        "n_embd": width,
        "vocab_size": values.whole("vocab_size"),
        "tie": values.content.get("tie_word_embeddings") is True,
        "style": "llama",
        "n_kv_head": values.whole("num_key_value_heads", heads),
        "n_hidden": values.whole("intermediate_size"),
        "head_dim": None if head is not None and head * heads == width else head,
    }
    if mixtral:
        experts, top_k = values.whole("num_local_experts"), values.whole("num_experts_per_tok")
        if top_k == 1 or experts == 1:  # transformers multiplies by 1 then, and ours by the probability
            raise ValueError(f"num_experts_per_tok is {top_k} of {experts}, and 2 or more are supported")
        own |= {"experts": experts, "top_k": top_k, "router": "softmax"}
    own |= _turns(values, 1e6 if mixtral else 1e4)
    if olmo:
        clip = None if values.content.get("clip_qkv") is None else values.number("clip_qkv")
        return own | {"norm": "layer", "clip_qkv": clip}
    return own | {"norm_eps": values.number("rms_norm_eps", 1e-6)}


def _turns(values, theta):
    """Rotary positions: version 5 has all in rope_parameters, version 4 rope_theta and what slows in rope_scaling."""
    new = values.table("rope_parameters")
    turns = _Values({"rope_theta": values.content.get("rope_theta"), **values.table("rope_scaling"), **new})
    turns.refuse_unlike({"partial_rotary_factor": (1,)})
    old = values.content.get("rope_theta")
    if None not in (old, new.get("rope_theta")) and old != new["rope_theta"]:
        raise ValueError(f"rope_theta is {old}, and within rope_parameters {new['rope_theta']}")
    own = {"rope_theta": turns.number("rope_theta", theta)}
    kind = turns.content.get("rope_type") or turns.content.get("type") or "default"
    if kind == "default":
        return own
    if kind != "llama3":
        raise ValueError(f"rotary positions are scaled by {kind!r}, and 'llama3' is supported")
    return own | {
        "rope_factor": turns.number("factor"),
        "rope_low": turns.number("low_freq_factor"),
        "rope_high": turns.number("high_freq_factor"),
        "rope_original": turns.whole("original_max_position_embeddings"),
    }
