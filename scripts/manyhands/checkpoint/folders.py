"""The weights of a model in a folder as the library transformers writes it, under our names and in our order.

    folder = ModelFolder("SmolLM2-135M", GPTConfig(**sizes))      # reads names and shapes alone
    whole = folder.tensor("blocks.0.mlp.up.weight")               # mapped: pages are read when they are looked at
    num_bytes = folder.fill(parallel.named_parameters())          # each rank its own rows, into DTensors too

Nothing in such a folder is executed or unpickled. What does not fit is refused, not skipped: a missing tensor would
stay random, and a random head serves garbage without a word.
"""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from manyhands.checkpoint.checkpoints import own_chunk
from manyhands.checkpoint.manifest import CheckpointError
from manyhands.config.model_folder import read_json
from manyhands.gpt.model import GPT
from manyhands.measure.tensor_bytes import local_part

INDEX = "model.safetensors.index.json"
# our modules and theirs: those of a layer, whose number stands behind "blocks" and "model.layers", and the others
LLAMA = {
    "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm", "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj", "attention.v": "self_attn.v_proj", "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
    "mlp": "block_sparse_moe.gate",  # the router
    "tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
}  # fmt: skip
GPT2 = {
    "norm_1": "ln_1", "norm_2": "ln_2", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj",
    "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    "tokens": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head",
}  # fmt: skip
EXPERTS = {"up": ("w1", "w3"), "down": ("w2",)}  # of a Mixtral; ours lie one below the other in one matrix
NO_WEIGHTS = re.compile(r".*\.(rotary_emb\.inv_freq|attn\.(masked_)?bias)")  # what older versions wrote beside them
READ = ("F32", "BF16", "F16")


def their_names(name, config):
    """Return the names that transformers has for our parameter `name` in a model of `config`: of experts one each."""
    module, _, kind = name.rpartition(".")
    names, layers = (LLAMA, "model.layers") if config.style == "llama" else (GPT2, "transformer.h")
    if layer := re.match(r"blocks\.(\d+)\.", module):
        if kind in EXPERTS:
            start = f"{layers}.{layer[1]}.block_sparse_moe.experts"
            return [f"{start}.{i}.{matrix}.weight" for i in range(config.experts) for matrix in EXPERTS[kind]]
        kind = "weight" if kind == "router" else kind
        return [f"{layers}.{layer[1]}.{names[module[layer.end() :]]}.{kind}"]
    return [f"{names[module]}.{kind}"]


def theirs(name, tensor, config):
    """Return {their name: tensor}, views or copies: a GPT-2's matrices lie across, with q before k."""
    names = their_names(name, config)
    if len(names) > 1:
        parts = tensor.chunk(len(names))
        return dict(zip(names, [p.T for p in parts] if name.endswith(".down") else parts, strict=True))
    if config.style == "gpt" and name.startswith("blocks.") and ".norm_" not in name:
        if ".qkv." in name:  # ours: q, k and v of head 0, then of head 1, ...
            tensor = tensor.unflatten(0, (config.n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
        tensor = tensor.T if tensor.ndim == 2 else tensor
    return {names[0]: tensor}


def ours(name, tensor, config):
    """Undo `theirs`, for one of the tensors."""
    if config.style == "llama":
        return tensor.T if name.endswith("mlp.down") else tensor
    if not name.startswith("blocks.") or ".norm_" in name:
        return tensor
    tensor = tensor.T if tensor.ndim == 2 else tensor
    if ".qkv." in name:
        tensor = tensor.unflatten(0, (3, config.n_head, -1)).transpose(0, 1).flatten(0, 2)
    return tensor


class ModelFolder:
    """The tensors of a folder, which fit a GPTConfig. Raise CheckpointError, in one sentence, for one that does not."""

    def __init__(self, path, config):
        self.path, self.config = Path(path), config
        self._files = {}
        where = self._where()
        if config.n_layer * config.experts > len(where):  # before they are built
            raise CheckpointError(f"{path} holds {len(where)} tensors, too few for {config.n_layer} layers")
        with torch.device("meta"):
            weights = dict(GPT(config).named_parameters())
        bare = "transformer." if "wte.weight" in where else ""  # a GPT-2 as its first authors named it
        parts = {name: theirs(name, p, config) for name, p in weights.items()}
        self.names = {name: [other.removeprefix(bare) for other in own] for name, own in parts.items()}
        shapes = {other.removeprefix(bare): p.shape for own in parts.values() for other, p in own.items()}
        head = their_names("head.weight", config)[0]
        if missing := [name for name in shapes if name not in where]:
            raise CheckpointError(f"{path} lacks the tensor {missing[0]}; copy the folder again")
        more = [n for n in where.keys() - shapes.keys() if not NO_WEIGHTS.fullmatch(n)]
        if extra := sorted(name for name in more if not (config.tie and name == head)):
            raise CheckpointError(f"{path} holds the tensor {extra[0]}, which its model does not have; name another")
        self._where_is = where
        for name, shape in shapes.items():
            self._refuse_shape(name, shape)
        if head in more:
            tokens = self.names["tokens.weight"][0]
            self._refuse_shape(head, shapes[tokens])
            if not torch.equal(self._whole(head), self._whole(tokens)):
                why = f"tie_word_embeddings is true, and {head} is not {tokens}"
                raise CheckpointError(f"{path}: {why}; say in its config.json which it is")

    def _where(self):
        """Return {their name: file}."""
        single, index = self.path / "model.safetensors", self.path / INDEX
        if single.is_file():
            return dict.fromkeys(self._open(single.name).keys(), single.name)
        if not index.is_file():
            if any(self.path.glob("*.bin")):
                cure = "load it with transformers and save it again (save_pretrained)"
                raise CheckpointError(f"{self.path} has its weights as .bin alone, which can hold code; {cure}")
            raise CheckpointError(f"{self.path} has neither model.safetensors nor {INDEX}; copy the folder again")
        said = read_json(index).get("weight_map")
        if not isinstance(said, dict) or not said or not all(isinstance(file, str) for file in said.values()):
            raise CheckpointError(f"{index} has no weight_map from tensors to files; copy the folder again")
        for file in said.values():
            if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
                raise CheckpointError(f"{index} names {file!r}, which is no file of this folder; use another copy")
        where = {}
        for file in sorted(set(said.values())):
            for name in self._open(file).keys():  # noqa: SIM118 - it is no dict
                if where.setdefault(name, file) != file:
                    raise CheckpointError(f"{self.path} holds {name} twice, in {where[name]} and in {file}")
        if differing := [name for name in said if where.get(name) != said[name]]:
            name = differing[0]
            raise CheckpointError(f"{index} says {said[name]} has {name}, and it has not; copy the folder again")
        return where

    def _open(self, file):
        path = self.path / file
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; copy the folder again")
        try:
            self._files[file] = safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} holds no tensors ({error}); copy the folder again") from None
        return self._files[file]

    def _refuse_shape(self, name, shape):
        found = self._files[self._where_is[name]].get_slice(name)
        if found.get_dtype() not in READ:
            raise CheckpointError(f"{name} in {self.path} is of {found.get_dtype()}, and {', '.join(READ)} are read")
        if list(found.get_shape())[:1] > list(shape)[:1] and [name] == self.names.get("positions.weight"):
            return  # the first ones are read
        if list(found.get_shape()) != list(shape):
            why = f"{name} in {self.path} has the shape {found.get_shape()}, and config.json makes it {list(shape)}"
            raise CheckpointError(f"{why}; use the two that belong together")

    def _rows(self, name):
        return self.config.block_size if name == "positions.weight" else None

    def _whole(self, name):
        return self._files[self._where_is[name]].get_tensor(name)

    def _parts(self, name):
        """Yield (their name, its rows of our parameter), which lie one below the other; mapped as long as possible."""
        for other in self.names[name]:
            yield other, ours(name, self._whole(other)[: self._rows(name)], self.config)

    def tensor(self, name: str) -> torch.Tensor:
        """Return all of our parameter `name` in the file's precision; a tied head is the embedding."""
        name = "tokens.weight" if name == "head.weight" and self.config.tie else name
        parts = [part for _, part in self._parts(name)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @torch.no_grad()
    def fill(self, parameters) -> int:
        """Copy into {our name: a parameter, or its share as a DTensor} what belongs there, and return the bytes read.

        What the folder has not, as adapters, stays as it is. Raise CheckpointError for a number that is not finite.
        """
        num_bytes = 0
        for name, parameter in parameters.items():
            if name not in self.names or (chunk := own_chunk(parameter)) is None:
                continue
            (begin, *_), (count, *_) = chunk.offsets, chunk.sizes
            across = tuple(slice(at, at + size) for at, size in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True))
            own, at = local_part(parameter), 0
            for other, part in self._parts(name):
                low, high = max(begin, at), min(begin + count, at + len(part))
                if low < high:
                    rows, part_own = part[(slice(low - at, high - at), *across)], own[low - begin : high - begin]
                    part_own.copy_(rows)
                    if not torch.stack(part_own.aminmax()).isfinite().all():  # least and largest: no copy is made
                        raise CheckpointError(f"{other} in {self.path} holds NaN or infinity; use another copy")
                    num_bytes += rows.nbytes
                at += len(part)
        return num_bytes

    def about(self) -> dict:
        """Return what a checkpoint keeps of the model that it began from."""
        card = self.path / "README.md"
        text = card.read_text("utf-8", "replace")[:10_000] if card.is_file() else ""
        licence = re.search(r"^license: *([\w.-]+) *$", text, re.MULTILINE)
        return {"name": self.path.resolve().name, "licence": licence and licence[1]}
