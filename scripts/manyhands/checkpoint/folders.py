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
    "tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
}  # fmt: skip
GPT2 = {
    "norm_1": "ln_1", "norm_2": "ln_2", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj",
    "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    "tokens": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head",
}  # fmt: skip
NO_WEIGHTS = re.compile(r".*\.(rotary_emb\.inv_freq|attn\.(masked_)?bias)")  # what older versions wrote beside them
READ = ("F32", "BF16", "F16")


def their_name(name, config):
    """Return the name that transformers has for our parameter `name` in a model of `config`."""
    module, _, kind = name.rpartition(".")
    names, layers = (LLAMA, "model.layers") if config.style == "llama" else (GPT2, "transformer.h")
    if layer := re.match(r"blocks\.(\d+)\.", module):
        return f"{layers}.{layer[1]}.{names[module[layer.end() :]]}.{kind}"
    return f"{names[module]}.{kind}"


def theirs(name, tensor, config):
    """Return our parameter as transformers has it, a view or a copy: a GPT-2's matrices lie across, with q before k."""
    if config.style == "llama" or not name.startswith("blocks.") or ".norm_" in name:
        return tensor
    if ".qkv." in name:  # ours: q, k and v of head 0, then of head 1, ...
        tensor = tensor.unflatten(0, (config.n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
    return tensor.T if tensor.ndim == 2 else tensor


def ours(name, tensor, config):
    """Undo `theirs`."""
    if config.style == "llama" or not name.startswith("blocks.") or ".norm_" in name:
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
        if config.n_layer > len(where):  # before they are built
            raise CheckpointError(f"{path} holds {len(where)} tensors, too few for {config.n_layer} layers")
        with torch.device("meta"):
            weights = dict(GPT(config).named_parameters())
            own = {name: theirs(name, p, config).shape for name, p in weights.items()}
        self.names = {name: their_name(name, config) for name in own}
        if "wte.weight" in where:  # a GPT-2 as its first authors named it
            self.names = {name: other.removeprefix("transformer.") for name, other in self.names.items()}
        head = their_name("head.weight", config)
        if missing := [name for name in self.names.values() if name not in where]:
            raise CheckpointError(f"{path} lacks the tensor {missing[0]}; copy the folder again")
        more = [n for n in where.keys() - set(self.names.values()) if not NO_WEIGHTS.fullmatch(n)]
        if extra := sorted(name for name in more if not (config.tie and name == head)):
            raise CheckpointError(f"{path} holds the tensor {extra[0]}, which its model does not have; name another")
        self._where_is = where
        for name, shape in own.items():
            self._refuse_shape(self.names[name], shape)
        if head in more:
            self._refuse_shape(head, own["tokens.weight"])
            if not torch.equal(self._whole(head), self._whole(self.names["tokens.weight"])):
                why = f"tie_word_embeddings is true, and {head} is not {self.names['tokens.weight']}"
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
        if list(found.get_shape())[:1] > list(shape)[:1] and name == self.names.get("positions.weight"):
            return  # the first ones are read
        if list(found.get_shape()) != list(shape):
            why = f"{name} in {self.path} has the shape {found.get_shape()}, and config.json makes it {list(shape)}"
            raise CheckpointError(f"{why}; use the two that belong together")

    def _rows(self, name):
        return self.config.block_size if name == "positions.weight" else None

    def _whole(self, name):
        return self._files[self._where_is[name]].get_tensor(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Return all of our parameter `name` in the file's precision; a tied head is the embedding."""
        name = "tokens.weight" if name == "head.weight" and self.config.tie else name
        return ours(name, self._whole(self.names[name])[: self._rows(name)], self.config)

    @torch.no_grad()
    def fill(self, parameters) -> int:
        """Copy into {our name: a parameter, or its share as a DTensor} what belongs there, and return the bytes read.

        Raise CheckpointError for a number that is not finite.
        """
        num_bytes = 0
        for name, parameter in parameters.items():
            if (chunk := own_chunk(parameter)) is None:
                continue
            place = (slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            part, own = self.tensor(name)[tuple(place)], local_part(parameter)
            own.copy_(part)
            if not torch.stack(own.aminmax()).isfinite().all():  # the least and the largest: no copy is made
                raise CheckpointError(f"{self.names[name]} in {self.path} holds NaN or infinity; use another copy")
            num_bytes += part.nbytes
        return num_bytes

    def about(self) -> dict:
        """Return what a checkpoint keeps of the model that it began from."""
        card = self.path / "README.md"
        text = card.read_text("utf-8", "replace")[:10_000] if card.is_file() else ""
        licence = re.search(r"^license: *([\w.-]+) *$", text, re.MULTILINE)
        return {"name": self.path.resolve().name, "licence": licence and licence[1]}
