"""A trained GPT without its run: the weights in one safetensors file, its sizes and tokens in a JSON file beside it.

    python -m manyhands.checkpoint.export outputs/train/latest/checkpoints model.safetensors     # and model.json
    python -m manyhands.checkpoint.export outputs/train/latest/checkpoints model.safetensors 300   # else the best
    model, metadata = load_model("model.safetensors")                                    # or a folder of checkpoints

You should see one line with the file, the step, and how many parameters it holds. Any number of ranks may have saved
the checkpoint, under any strategy; one process reads it, and needs memory for the weights alone. Status 2: there is no
checkpoint that can be trusted, or no room for the file.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from manyhands.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    File,
    RunMetadata,
    describe_file,
    fault,
    read_manifest,
    read_small,
    step_of,
    steps_in,
    verify,
    verify_file,
)
from manyhands.checkpoint.step_folders import best_of
from manyhands.checkpoint.tensor_files import whole_tensors
from manyhands.course.folders import write_whole
from manyhands.data.shakespeare import DataError
from manyhands.data.tokenizer import CharTokenizer, tokenizer_from
from manyhands.gpt.lora import folded
from manyhands.gpt.model import GPT, GPTConfig

FORMAT = "manyhands export 1"
KEPT = ("config", "corpus", "step", "val_loss", "tokens", "options")  # metadata that say what the weights are


class Export(RunMetadata):
    """The file beside exported weights."""

    format: Literal["manyhands export 1"]
    file: File


def find_checkpoint(source, step="best", tell=print):
    """The folder of a verified checkpoint in `source`: a folder of checkpoints, a run's folder, or one step's.

    `step`: "best" (the lowest validation loss; without any, the newest), "newest", or a number. One that is damaged is
    passed over, and `tell` gets the reason. Raises CheckpointError.
    """
    source = Path(source)
    if step_of(source) is not None or (source / MANIFEST).exists():
        verify(source)
        return source
    folder = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    paths = steps_in(folder)
    if not paths:
        raise CheckpointError(f"{source} holds no checkpoint; name the folder in which a run keeps them")
    if str(step).isdigit():
        there = [path for path in paths if step_of(path) == int(step)]
        if not there:
            raise CheckpointError(f"{folder} has no step {step}, only {', '.join(str(step_of(p)) for p in paths)}")
        verify(there[0])
        return there[0]
    if step not in ("best", "newest"):
        raise CheckpointError(f"invalid step={step!r}; use best, newest or a number")
    problems = []
    while paths:
        path = (best_of({path: _loss(path) for path in paths}) if step == "best" else None) or paths[0]
        try:
            verify(path)
            return path
        except CheckpointError as error:
            problems.append(str(error))
            tell(f"step {step_of(path)} is passed over: {error}")
            paths.remove(path)
    raise CheckpointError(f"no checkpoint in {folder} can be read: {problems[0]}")


def newest_in(source):
    """What changes when `source`, as of `load_model`, has something newer: a step, or when the file was written. None:
    nothing.
    """
    source = Path(source)
    if source.is_file():
        return source.stat().st_mtime_ns
    folder = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    return next((step_of(path) for path in steps_in(folder)), None) if folder.is_dir() else None


def _loss(path):
    try:
        return read_manifest(path).val_loss
    except CheckpointError:
        return None


def load_model(source, step="best", tell=print):
    """(GPT on the CPU in eval mode, metadata) from an exported file or from checkpoints; see `find_checkpoint` for
    those.

    metadata["source"] is the path that was read. Raises CheckpointError if what is there is damaged or is no GPT.
    """
    source = Path(source)
    if source.suffix == ".safetensors":
        weights, metadata = read_export(source)
    else:
        source = find_checkpoint(source, step, tell)
        manifest = read_manifest(source)
        weights = whole_tensors(source, "model.")
        metadata = manifest.metadata | {"step": manifest.step, "val_loss": manifest.val_loss}
        if metadata.get("lora"):  # adapters beside the weights that they change: one model again
            weights = folded(weights, metadata["lora"]["alpha"] / metadata["lora"]["rank"])
    believe(metadata, source)
    return build(weights, metadata, source), metadata | {"source": str(source)}


def believe(metadata: dict[str, Any], source: Path | str) -> None:
    """Raises CheckpointError unless the metadata is what a run writes down: whoever shows or uses it trusts it."""
    try:
        RunMetadata.model_validate(metadata)
        size, vocab = metadata["config"]["vocab_size"], tokenizer_of(metadata).vocab
        if not 0 < len(vocab) <= size or type(metadata["step"]) is not int:
            raise ValueError(f"step={metadata['step']!r}, and {len(vocab)} tokens for vocab_size={size}")
    except (LookupError, TypeError, ValueError) as error:
        why = fault(error) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{source} is not what a run writes down ({why}); use another") from None


def tokenizer_of(metadata):
    """What turns text into the ids of the model that `metadata` describe, and back: see `data.tokenizer`.

    Raises KeyError, TypeError or ValueError for metadata that do not say.
    """
    corpus = metadata["corpus"]
    if "vocabulary" in corpus:
        return tokenizer_from(corpus["vocabulary"])
    return CharTokenizer(corpus["alphabet"])


def build(weights, metadata, source):
    """A GPT with {name: tensor}, as sized by metadata["config"]. CheckpointError names what does not fit."""
    try:
        sizes = metadata["config"] | {}
        if "document_mark" in sizes:  # its name in checkpoints of older runs
            sizes["separator"] = sizes.pop("document_mark")
        config = GPTConfig(**sizes)
        if config.n_layer > len(weights):  # before they are built, on no matter what
            raise ValueError(f"n_layer={config.n_layer} with {len(weights)} tensors")
        with torch.device("meta"):  # shapes only: the weights are already here
            model = GPT(config)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:  # metadata may be forged
        raise CheckpointError(
            f"{source} says nothing of a GPT that can be built ({str(error).splitlines()[0]}); use another"
        ) from None
    wanted = {name: list(parameter.shape) for name, parameter in model.named_parameters()}  # a tied matrix once
    there = {name: list(tensor.shape) for name, tensor in weights.items()}
    odd = [name for name in sorted(wanted | there) if wanted.get(name) != there.get(name)]
    if odd:
        name, number = odd[0], f" ({len(odd)} names in all)" if len(odd) > 1 else ""
        raise CheckpointError(
            f"{source} is not the GPT that it says: {name} is {there.get(name, 'missing')} and should be "
            f"{wanted.get(name, 'missing')}{number}; use another"
        )
    tied = {"head.weight": weights["tokens.weight"]} if config.tie else {}
    model.load_state_dict(weights | tied, assign=True)
    if config.tie:
        model.head.weight = model.tokens.weight
    return model.eval()


def write_export(weights, metadata, target):
    """Write {name: tensor} to `target` (.safetensors) and the metadata that belong to them beside it (.json).

    Raises CheckpointError if there is no room.
    """
    target = Path(target)
    if target.suffix != ".safetensors":
        raise CheckpointError(f"{target} does not end in .safetensors; name such a file")
    partial, about_target = target.with_suffix(".partial"), target.with_suffix(".json")
    about_partial = target.with_suffix(".json.partial")
    for path in (target, about_target):
        if path.is_dir():
            raise CheckpointError(f"{path} is a folder; name another place")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, partial, {"format": "pt"})
        about = {name: metadata[name] for name in KEPT if name in metadata}
        content = {"format": FORMAT, **about, "file": describe_file(partial).model_dump()}
        write_whole(about_partial, json.dumps(content, indent=1) + "\n")
        os.replace(partial, target)  # both or none: what can fail has been done
        os.replace(about_partial, about_target)
    except Exception as error:  # safetensors has an error of its own for a full disk
        for path in (partial, about_partial):
            path.unlink(missing_ok=True)
        raise CheckpointError(f"{target} cannot be written: {error}; name another place") from None


def read_export(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """({name: tensor}, metadata) of what `write_export` wrote. Raises CheckpointError."""
    about = path.with_suffix(".json")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; name a file that python -m manyhands.checkpoint.export wrote")
    content = read_small(about, f"it says what {path.name} holds: export it again")
    try:
        expected = Export.read(content).file
        verify_file(path, expected)
        metadata = json.loads(content)
        del metadata["format"], metadata["file"]
        return load_file(path), metadata
    except (DataError, SafetensorError) as error:
        raise CheckpointError(
            f"{about}, which says what {path.name} holds, is damaged ({error}); export it again"
        ) from None


def main(argv):
    if len(argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        if "" in argv:
            raise CheckpointError("one of its words is empty (is a variable of the shell unset?)")
        model, metadata = load_model(
            argv[0], argv[2] if len(argv) == 3 else "best", lambda text: print(text, file=sys.stderr)
        )
        write_export(dict(model.named_parameters()), metadata, argv[1])
    except CheckpointError as error:
        print(f"export: {error}", file=sys.stderr)
        return 2
    print(f"{argv[1]}: {model.num_params():,} parameters of step {metadata['step']} from {metadata['source']}")
    return 0


if __name__ == "__main__":
    from manyhands.launch.program import run_program

    run_program("export", lambda: main(sys.argv[1:]))
