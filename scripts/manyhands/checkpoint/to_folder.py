"""Write a trained model as a folder that the library transformers loads, with its tokenizer.

    write_folder(shapes, read, metadata, tokenizer, Path("mine"), torch.bfloat16)     # one tensor after the other

Configurations name rotary positions as versions 4 and 5 of transformers do: each reader finds its own. What the format
cannot hold is refused, with what to train instead.
"""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from manyhands.checkpoint.folders import INDEX, ModelFolder, theirs
from manyhands.checkpoint.manifest import CheckpointError
from manyhands.config.model_folder import sizes_in
from manyhands.course.folders import write_whole
from manyhands.data.tokenizer import ForeignTokenizer, tokenizer_from, tokenizer_of_folder
from manyhands.gpt.config import GPTConfig
from manyhands.launch.program import explained

SHARD_BYTES = 5 * 10**9
CARD = """---
{front}library_name: transformers
pipeline_tag: text-generation
---
# {name}

{parameters:,} parameters, written by Many Hands after step {step}{loss}.{base}

Trained on the text `{text}`. Options of the run:

```json
{options}
```
"""


def refuse_config(config: GPTConfig) -> None:
    """Raise CheckpointError for a model that transformers has no kind for, with the cure."""
    gpt, olmo, experts = config.style == "gpt", config.norm == "layer", config.experts > 1
    for wrong, sentence in (
        (gpt and experts, f"a GPT-2 has no experts, and this model has {config.experts}; train with style=llama"),
        (gpt and not config.tie, "a GPT-2 has no bias in its head, and this model has one; train with --model.tie"),
        (olmo and experts, f"an OLMo has no experts, and this model has {config.experts}; train with norm=rms"),
        (olmo and config.head_size * config.n_head != config.n_embd, "an OLMo has no head_dim; leave it out"),
        (not olmo and config.clip_qkv, f"a Llama has no clip_qkv={config.clip_qkv}; train with norm=layer"),
        (experts and config.router != "softmax", "a Mixtral's router is a softmax; train with --model.router softmax"),
        (experts and config.top_k == 1, "a Mixtral with top_k=1 multiplies by 1, and ours by the probability; use 2"),
    ):
        if wrong:
            raise CheckpointError(sentence)


def their_config(config: GPTConfig, dtype: torch.dtype, ids: dict[str, Any]) -> dict[str, Any]:
    """Return the content of config.json. `ids`: those of generation_config.json."""
    name = str(dtype).removeprefix("torch.")
    about = ids | {"vocab_size": config.vocab_size, "dtype": name}
    about |= {"torch_dtype": name, "tie_word_embeddings": config.tie, "use_cache": True}
    if config.style == "gpt":
        return about | {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_positions": config.block_size,
            "n_embd": config.n_embd, "n_layer": config.n_layer, "n_head": config.n_head, "n_inner": None,
            "activation_function": "gelu_new" if config.gelu == "tanh" else "gelu", "layer_norm_epsilon": 1e-5,
            "attn_pdrop": config.dropout, "embd_pdrop": config.dropout, "resid_pdrop": config.dropout,
        }  # fmt: skip
    theta, scaling = {"rope_theta": config.rope_theta}, {"rope_type": "default"}
    if config.rope_factor != 1:
        scaling = {
            "rope_type": "llama3", "factor": config.rope_factor, "low_freq_factor": config.rope_low,
            "high_freq_factor": config.rope_high, "original_max_position_embeddings": config.rope_original,
        }  # fmt: skip
    olmo, mixtral = config.norm == "layer", config.experts > 1
    kind = "Olmo" if olmo else "Mixtral" if mixtral else "Llama"
    own = {"clip_qkv": config.clip_qkv} if olmo else {"rms_norm_eps": config.norm_eps, "head_dim": config.head_size}
    if mixtral:
        own |= {"num_local_experts": config.experts, "num_experts_per_tok": config.top_k, "sliding_window": None}
    return about | own | theta | {
        "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(),
        "hidden_size": config.n_embd, "intermediate_size": config.hidden, "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head, "num_key_value_heads": config.kv_heads, "hidden_act": "silu",
        "max_position_embeddings": config.context, "attention_bias": False, "attention_dropout": 0.0,
        "mlp_bias": False, "rope_parameters": scaling | theta, "pad_token_id": None,
        "rope_scaling": scaling if config.rope_factor != 1 else None,
    }  # fmt: skip


def their_tokenizer(tokenizer) -> tuple[dict, dict]:
    """Return the contents of tokenizer.json and tokenizer_config.json."""
    begin = None if tokenizer.separator is None else tokenizer.vocab[tokenizer.separator]
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if isinstance(tokenizer, ForeignTokenizer):
        return tokenizer.content["tokenizer"], about | tokenizer.named
    about |= {} if begin is None else {"bos_token": begin, "eos_token": begin}
    if tokenizer.kind == "bpe":
        return tokenizer.content, about | {"manyhands": {"format": "bpe"}}
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    # an unknown character raises: none stands for it
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokenizer.vocab)}, unk_token=""))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    inner.add_special_tokens([token for token in tokenizer.vocab if len(token) > 1])
    return json.loads(inner.to_str()), about | {"manyhands": tokenizer.content}


def write_folder(shapes: dict, read, metadata: dict, tokenizer, target: Path, dtype: torch.dtype) -> None:
    """Write what `read` returns for each name of `shapes`, {our name: tensor on meta}, and what belongs to them.

    It is read back before it has its name. Raise CheckpointError; then `target` is as it was.
    """
    config = GPTConfig(**metadata["config"])
    refuse_config(config)
    for name in [name for name in shapes if name.endswith("mlp.bias")]:
        if read(name).any():
            raise CheckpointError(f"{name}: a Mixtral chooses without biases; train with --optimizer.balance-speed 0")
    shapes = {name: shape for name, shape in shapes.items() if not name.endswith("mlp.bias")}
    zeros = torch.zeros(3 * config.n_embd) if config.style == "gpt" and not config.qkv_bias else None
    if zeros is not None:  # GPT-2 has such biases, and zeros change nothing
        shapes |= {f"blocks.{i}.attention.qkv.bias": zeros.to("meta") for i in range(config.n_layer)}

    def tensor(name):
        return zeros if zeros is not None and name.endswith("qkv.bias") else read(name)

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} holds something already; name a new folder")
    partial = target.with_name(f"{target.name}.partial")
    with explained(CheckpointError, "name another place", target, "written"):
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            _write(partial, shapes, tensor, metadata, config, tokenizer, dtype, target.name)
            _read_back(partial, shapes, tensor, tokenizer, dtype)
            if target.exists():
                target.rmdir()
            os.replace(partial, target)
        finally:
            with suppress(OSError):
                shutil.rmtree(partial, ignore_errors=True)


def _write(folder, own, read, metadata, config, tokenizer, dtype, name):
    shards: list[list[str]] = [[]]
    size = 0
    for key, tensor in own.items():
        num_bytes = tensor.numel() * dtype.itemsize
        if shards[-1] and size + num_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += num_bytes
    where = {}
    for i, keys in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        shapes = [(name, part.shape) for key in keys for name, part in theirs(key, own[key], config).items()]
        with open(folder / file, "wb") as stream:
            stream.write(_header(shapes, dtype))
            for key in keys:
                for part in theirs(key, read(key), config).values():
                    stream.write(part.to(dtype).contiguous().flatten().view(torch.uint8).numpy())
        where |= dict.fromkeys((name for name, _ in shapes), file)
    total = sum(tensor.numel() for tensor in own.values())
    about = {"total_parameters": total, "total_size": total * dtype.itemsize}
    content, about_tokenizer = their_tokenizer(tokenizer)
    # an answer ends with what was learnt; a text without answers, before the next document
    ends: Any = list(tokenizer.ends) or tokenizer.separator
    ids = {"bos_token_id": tokenizer.separator, "eos_token_id": ends[0] if tokenizer.ends and len(ends) == 1 else ends}
    files = {
        "config.json": their_config(config, dtype, ids),
        "generation_config.json": ids,
        "tokenizer.json": content,
        "tokenizer_config.json": about_tokenizer | {"model_max_length": config.context},
    } | ({INDEX: {"metadata": about, "weight_map": where}} if len(shards) > 1 else {})
    for file, values in files.items():
        write_whole(folder / file, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
    if tokenizer.template is not None:
        write_whole(folder / "chat_template.jinja", tokenizer.template)
    write_whole(folder / "README.md", _card(metadata, name, total))


def _header(shapes, dtype):
    """Return what a safetensors file begins with: where the bytes of each tensor are."""
    about: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes:
        begin, end = end, end + shape.numel() * dtype.itemsize
        kind = "BF16" if dtype == torch.bfloat16 else "F32"
        about[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(about).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _card(metadata, name, total):
    base, loss = metadata.get("base") or {}, metadata.get("val_loss")
    options = {group: metadata.get("options", {}).get(group, {}) for group in ("train", "optimizer", "parallel")}
    return CARD.format(
        name=name, parameters=total, step=metadata["step"], options=json.dumps(options, indent=1),
        front=f"license: {base['licence']}\n" if base.get("licence") else "",
        loss="" if loss is None else f", validation loss {loss:.4f}",
        base=f" It began from `{base['name']}` (licence: {base.get('licence') or 'not said'})." if base else "",
        text=metadata["corpus"].get("name", "unknown"),
    )  # fmt: skip


def _read_back(folder, shapes, read, tokenizer, dtype):
    """Raise CheckpointError unless `folder` holds the model and the tokenizer again."""
    written = GPTConfig(**sizes_in(folder))
    found = ModelFolder(folder, written)
    for name in shapes:
        if not torch.equal(found.tensor(name), read(name).to(dtype)):
            raise CheckpointError(f"{name} is not as it was when it is read back; name another disk")
    from tokenizers import Tokenizer

    line, ids = "".join(token for token in tokenizer.vocab if len(token) == 1)[:1000], None
    with suppress(Exception):  # the library raises bare ones
        library = Tokenizer.from_file(str(folder / "tokenizer.json"))
        library.encode_special_tokens = True
        ids = library.encode(line, add_special_tokens=False).ids
    before, again = tokenizer_from(tokenizer.content).content, tokenizer_of_folder(folder).content
    if not tokenizer.ends and "ends" in before:  # as of a text that does not say them: the separator is written
        before["ends"] = again.get("ends")
    if before != again or ids != tokenizer.encode(line).tolist():
        raise CheckpointError("the tokenizer is not as it was when it is read back; use another")
