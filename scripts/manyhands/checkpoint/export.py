"""Export a trained GPT: its weights to one safetensors file, its sizes and tokens to a JSON file next to it.

Or to a folder that the library transformers loads.

    python -m manyhands.checkpoint.export outputs/train/latest/checkpoints model.safetensors     # and model.json
    python -m manyhands.checkpoint.export outputs/train/latest/checkpoints model.safetensors 300   # else the best
    python -m manyhands.checkpoint.export outputs/mine model.safetensors --half --characters data/tinyshakespeare.txt
    python -m manyhands.checkpoint.export outputs/mine mine-135m --dtype bf16     # a folder for transformers
    model, metadata = load_model("model.safetensors")                                    # or a folder of checkpoints

You should see one line with the file, the step, and how many parameters it holds. `--half` writes them in 16 bits
(fp16), which halves the file; they are read as 32. `--characters` leaves a model of characters those of a text alone,
sorted as the lessons' corpus has them. Any number of ranks may have saved the checkpoint, under any strategy; one
process reads it, and needs memory for the weights alone, or, for a folder, for one tensor. Status 2: no valid
checkpoint, or no room for the file.
"""

import math
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # first: Ctrl-C in the imports below is a sentence
    from manyhands.launch import entry

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from manyhands.checkpoint import manifest
from manyhands.checkpoint.checkpoints import tensors_in
from manyhands.checkpoint.folders import ModelFolder
from manyhands.checkpoint.manifest import CheckpointError, Export, step_of, steps_in
from manyhands.checkpoint.to_folder import write_folder
from manyhands.config.model_folder import sizes_in
from manyhands.course.folders import ASSETS, write_whole
from manyhands.data.schema import visible
from manyhands.data.tokenizer import CharTokenizer, Tokenizer, tokenizer_from, tokenizer_of_folder
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.lora import A, B, folded
from manyhands.gpt.model import GPT
from manyhands.launch.flags import Flags
from manyhands.launch.program import Refused, explained, reason

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KEPT = ("config", "corpus", "step", "val_loss", "tokens", "options", "base")  # metadata that describe the weights


def find_checkpoint(source, step="best", tell=print):
    """Return the folder of a verified checkpoint in `source`: a folder of checkpoints, a run's folder, or one step's.

    `step`: "best" (the lowest validation loss; without any, the newest), "newest", or a number. A damaged one is
    skipped, and `tell` gets the reason. Raise CheckpointError.
    """
    source = Path(source)
    if step_of(source) is not None or (source / manifest.MANIFEST).exists():
        manifest.verify(source)
        return source
    paths = steps_in(_checkpoints_of(source))
    if not paths:
        raise CheckpointError(f"{source} holds no checkpoint; name the folder in which a run keeps them")
    if str(step).isdecimal():
        there, paths = paths, [path for path in paths if str(step_of(path)) == (str(step).lstrip("0") or "0")]
        if not paths:
            raise CheckpointError(f"{source} has no step {step}, only {', '.join(str(step_of(p)) for p in there)}")
    elif step not in ("best", "newest"):
        raise CheckpointError(f"invalid step={step!r}; use best, newest or a number")
    problems = []
    for path in sorted(paths, key=_loss) if step == "best" else paths:  # of equals the newest
        try:
            manifest.verify(path)
        except CheckpointError as error:
            problems.append((path, error))
            continue
        for other, error in problems:
            tell(f"step {step_of(other)} is passed over: {error}")
        return path
    raise CheckpointError(f"no checkpoint in {source} can be read: {problems[0][1]}")


def _loss(path):
    with suppress(CheckpointError):
        if (loss := manifest.read_manifest(path).val_loss) is not None:
            return loss
    return math.inf


@explained(CheckpointError, "mend that, or name another place")
def newest_in(source: Path | str) -> list[tuple]:
    """Return names, sizes and times that change when `source` (see `load_model`) has a newer or longer file."""
    source = Path(source)
    if source.suffix == ".safetensors":
        paths = [source, source.with_suffix(".json")]
    else:
        paths = [p for step in steps_in(_checkpoints_of(source))[:1] for p in (step, *sorted(step.rglob("*")))]
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.exists()]


def _checkpoints_of(source):
    return source / "checkpoints" if (source / "checkpoints").is_dir() else source


@explained(CheckpointError, "mend that, or name another place")
def load_model(source: Path | str, step: str = "best", tell=print) -> tuple[GPT, dict[str, Any]]:
    """Return (GPT on the CPU in eval mode, metadata) from an exported file or checkpoints: see `find_checkpoint`.

    metadata["source"] is the path that was read. Raise CheckpointError if what is there is damaged or is no GPT.
    """
    names, read, metadata = opened(source, step, tell)
    return _model_of({name: read(name) for name in names}, metadata, metadata["source"]), metadata


def opened(source, step="best", tell=print):
    """Return (names of tensors, a function from one of them to the tensor, metadata): see `load_model`."""
    source = Path(source)
    if (source / "config.json").is_file():
        return _open_folder(source)
    if source.suffix == ".safetensors":
        weights, metadata = read_export(source)
        if step not in ("best", "newest", str(metadata.get("step"))):
            why = f"{source} holds step {metadata.get('step')} alone"
            raise CheckpointError(f"{why}; ask for it, or name a folder of checkpoints")
        names, read = list(weights), weights.__getitem__  # mapped
    else:
        source = find_checkpoint(source, step, tell)
        about = manifest.read_manifest(source)
        (names, read), metadata = tensors_in(source, "model."), about.metadata | {"val_loss": about.val_loss}
    return names, read, metadata | {"source": str(source)}


def one_by_one(source, step, tell):
    """Return ({name: tensor on meta} of a GPT, a function from a name to its tensor, metadata): see `load_model`.

    Adapters are folded. Raise CheckpointError as `load_model` does; no more than one tensor is ever in memory.
    """
    names, read, metadata = opened(source, step, tell)
    lora = metadata.get("lora") or {}

    def tensor(name):
        layer = name.removesuffix(".weight")
        wanted = [one for one in (name, layer + A, layer + B) if one in names]
        found = {one: read(one) for one in wanted}
        found = folded(found, lora["alpha"] / lora["rank"]) if len(wanted) > 1 else found
        return found[name].float() if found[name].dtype == torch.float16 else found[name]

    shapes = {}
    for name in names:
        whole = read(name)
        if not torch.stack(whole.aminmax()).isfinite().all():  # the least and the largest: no copy is made
            raise _holds_none(name, metadata, metadata["source"])
        shapes[name] = whole.to("meta")
    return weights_of(_model_of(shapes, metadata, metadata["source"])), tensor, metadata


def _open_folder(path):
    """`opened` of a folder in transformers' format, up to the longest context that it has."""
    try:
        config = GPTConfig(**sizes_in(path))
        folder, tokenizer = ModelFolder(path, config), tokenizer_of_folder(path)
    except Refused as error:
        raise CheckpointError(str(error)) from None
    with torch.device("meta"):
        buffers = dict(GPT(config).named_buffers())  # biases of experts, which no such folder has

    def read(name):
        return torch.zeros(buffers[name].shape) if name in buffers else folder.tensor(name).float()

    corpus = {"name": path.name, "vocab_size": len(tokenizer.vocab), "vocabulary": tokenizer.content}
    metadata = {"config": asdict(config), "corpus": corpus, "step": 0, "base": folder.about()}
    return [*folder.names, *buffers], read, metadata | {"source": str(path)}


def _model_of(weights, metadata, source):
    """Return the GPT of weights and metadata that `source` holds. Raise CheckpointError if they make none."""
    try:
        lora = metadata.get("lora") or {}
        ranks = {len(tensor) for name, tensor in weights.items() if name.endswith(A)}
        if ranks != {lora[name] for name in lora if name == "rank"}:
            raise ValueError(f"lora={lora or None}, with adapters of rank {ranks or None}")
        if lora:  # adapters beside the weights that they change: one model again
            weights = folded(weights, lora["alpha"] / lora["rank"])
        weights = {
            name: tensor.float() if tensor.dtype == torch.float16 else tensor for name, tensor in weights.items()
        }
        size, vocab = metadata["config"]["vocab_size"], tokenizer_of(metadata).vocab
        if not 0 < len(vocab) <= size:
            raise ValueError(f"{len(vocab)} tokens for vocab_size={size}")
        model = build(weights, metadata)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        why = visible(" ".join(str(error).split()), 300)  # torch lists every tensor
        raise CheckpointError(f"{source} is not the GPT that it says ({why}); use another") from None
    if not model.tokens.weight.is_meta and (name := not_finite(model)) is not None:
        raise _holds_none(name, metadata, source)
    return model


def _holds_none(name, metadata, source):
    return CheckpointError(f"{name} of step {metadata['step']} in {source} holds NaN or infinity; use another step")


def not_finite(model: GPT) -> str | None:
    """Return the name of the first weight with NaN or infinity, or None."""
    return next((name for name, tensor in weights_of(model).items() if not tensor.isfinite().all()), None)


def weights_of(model: GPT) -> dict[str, torch.Tensor]:
    """Return {name: tensor} of what `build` needs: the parameters, a tied one once, and the biases of experts."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def shipped_model(name: str) -> tuple[GPT, dict[str, Any]]:
    """Return what `load_model` does, of a model that comes with the course: "plays" or "plays-draft"."""
    return load_model(ASSETS / "models" / f"{name}.safetensors")


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of the model that `metadata` describe: see `data.tokenizer`.

    Raise KeyError, TypeError or ValueError for metadata that do not say.
    """
    corpus = metadata["corpus"]
    return tokenizer_from(corpus["vocabulary"]) if "vocabulary" in corpus else CharTokenizer(corpus["alphabet"])


def described(model: GPT, metadata: dict[str, Any]) -> str:
    """Describe a checkpoint: "outputs/x/step-00000300: step 300, validation loss 1.4321, 810,000 parameters"."""
    loss = "" if metadata.get("val_loss") is None else f", validation loss {metadata['val_loss']:.4f}"
    return f"{metadata['source']}: step {metadata['step']}{loss}, {model.num_params():,} parameters"


def build(weights: dict[str, torch.Tensor], metadata: dict[str, Any]) -> GPT:
    """Build a GPT with `weights`, sized by metadata["config"].

    Raise ValueError or RuntimeError for names, types and shapes that do not fit.
    """
    config = GPTConfig(**metadata["config"])
    if config.n_layer > len(weights):  # before they are built, on no matter what
        raise ValueError(f"n_layer={config.n_layer} with {len(weights)} tensors")
    if len(types := {tensor.dtype for tensor in weights.values()}) > 1 or not all(t.is_floating_point for t in types):
        raise ValueError(f"weights of {', '.join(sorted(map(str, types)))}")
    with torch.device("meta"):  # shapes only: the weights are already here
        model = GPT(config)
    tied = {"head.weight": weights["tokens.weight"]} if config.tie else {}
    model.load_state_dict(weights | tied, assign=True)
    if config.tie:
        model.head.weight = model.tokens.weight
    return model.eval()


def write_export(weights, metadata, target):
    """Write {name: tensor} to `target` (.safetensors) and the metadata that belong to them beside it (.json).

    It is read again before it has its name. Raise CheckpointError if there is no room, or if it makes no GPT,
    ValueError for metadata that `load_model` would refuse.
    """
    target = Path(target)
    if target.suffix != ".safetensors":
        raise CheckpointError(f"{target} does not end in .safetensors; name such a file")
    partial = target.with_suffix(".partial")
    kept = {name: metadata[name] for name in KEPT if name in metadata}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, partial, {"format": "pt"})
        file = manifest.describe_file(partial).model_dump()
        about = Export.signed(format="manyhands export 2", metadata=kept, file=file)
        _model_of(load_file(partial), kept, target)
        os.replace(partial, target)
        write_whole(target.with_suffix(".json"), about.content())
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {reason(error)}; name another place") from None
    except SafetensorError as error:  # its own for a full disk
        raise CheckpointError(f"{target} cannot be written: {error}; name another place") from None
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def read_export(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return ({name: tensor}, metadata) that `write_export` wrote. Raise CheckpointError."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; name a file that python -m manyhands.checkpoint.export wrote")
    with explained(CheckpointError, f"it says what {path.name} holds: export it again", path.with_suffix(".json")):
        about = Export.read(path.with_suffix(".json"))
    manifest.verify_file(path, about.file)
    try:
        return load_file(path), about.metadata
    except SafetensorError as error:
        raise CheckpointError(f"{path} holds no tensors ({error}); export it again") from None


def only_characters(weights, metadata, text):
    """Return (weights, metadata) of a character model restricted to those of `text`, sorted as in `data.corpus`.

    Raise CheckpointError where the model reads no characters, or lacks one of them.
    """
    tokenizer, alphabet = tokenizer_of(metadata), sorted(set(text))
    if tokenizer.kind != "char":
        raise CheckpointError(f"the model reads {tokenizer.kind}, not characters; leave --characters out")
    try:
        ids = tokenizer.encode("".join(alphabet))
    except ValueError as error:
        raise CheckpointError(f"--characters: {error}") from None
    rows = ("tokens.weight", "head.weight", "head.bias")  # the vocabulary is their first axis
    weights = {name: tensor[ids] if name in rows else tensor for name, tensor in weights.items()}
    corpus = {name: value for name, value in metadata["corpus"].items() if name != "vocabulary"}
    config = metadata["config"] | {"vocab_size": len(alphabet), "separator": None}
    return weights, metadata | {
        "config": config,
        "corpus": corpus | {"alphabet": alphabet, "vocab_size": len(alphabet)},
    }


def main(argv):
    parser = Flags(prog="export", description=__doc__)
    parser.add_argument("source", help="a folder of checkpoints, a run's, one step's, or a .safetensors file")
    parser.add_argument("target", help="a .safetensors file, or a new folder for transformers")
    parser.add_argument("step", nargs="?", default="best", help="best (the default), newest, or a number")
    parser.add_argument("--half", action="store_true", help="16 bits per number, fp16")
    parser.add_argument("--characters", type=Path, metavar="FILE", help="know the characters of this text alone")
    parser.add_argument("--dtype", choices=DTYPES, help="of a folder: bf16, or fp32 (the default)")
    given = parser.parse_args(argv)
    target, to_file = Path(given.target), given.target.endswith(".safetensors")
    if target.suffix in (".pt", ".pth", ".bin", ".ckpt", ".gguf"):
        raise CheckpointError(f"{target} does not end in .safetensors; name such a file, or a folder")
    if to_file and given.dtype:
        raise CheckpointError(f"--dtype is for a folder, and {target} is a file; use --half, or leave it out")
    if not to_file and given.half:
        raise CheckpointError(f"--half is for a .safetensors file, and {target} is a folder; use --dtype bf16")
    weights, tensor, metadata = one_by_one(given.source, given.step, lambda text: print(text, file=sys.stderr))
    if to_file:
        weights = {name: tensor(name) for name in weights}
    original, text = metadata, None
    if given.characters:
        with explained(CheckpointError, "name a text", given.characters):
            text = given.characters.read_text("utf-8")
        weights, metadata = only_characters(weights, metadata, text)
    if not to_file:

        def read(name):
            own = {name: tensor(name)}
            return (only_characters(own, original, text)[0] if given.characters else own)[name]

        write_folder(weights, read, metadata, tokenizer_of(metadata), target, DTYPES[given.dtype or "fp32"])
    elif given.half:
        weights = {name: tensor.half() for name, tensor in weights.items()}
    if to_file:
        write_export(weights, metadata, target)
    count = sum(tensor.numel() for name, tensor in weights.items() if not name.endswith("mlp.bias"))
    print(f"{given.target}: {count:,} parameters of step {metadata['step']} from {metadata['source']}")
    return 0


if __name__ == "__main__":
    entry.run_program("export", lambda: main(sys.argv[1:]))
