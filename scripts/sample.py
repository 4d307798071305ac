#!/usr/bin/env python3
"""Let a trained GPT write.

    python scripts/sample.py outputs/train/latest/checkpoints --prompt "ROMEO:" --length 300
    python scripts/sample.py outputs/train/latest/checkpoints --step newest --temperature 0.8 --top-k 40 --seed 2
    python scripts/sample.py outputs/align/latest --chat --prompt "sort gbad"         # a model that align.py has taught
    python scripts/sample.py model.safetensors --temperature 0 > text.txt   # of python -m manyhands.checkpoint.export

On stdout you see the prompt and what the model makes of it, token by token (a model of documents writes <|document|>
where a new one begins); on stderr what was read: the file, its step and validation loss. The same seed writes the same
text on the same machine. Status 2: there is nothing to read, or a value makes no sense, with the cure.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parent))  # it runs without an install

if __name__ == "__main__":  # first: Ctrl-C in the imports below is a sentence
    from manyhands.launch import entry

    entry.begin()

import tyro
from manyhands.align.chat import END, encode
from manyhands.checkpoint.manifest import CheckpointError
from manyhands.config.command_line import parsed

SMALL = 20e6  # parameters
LEAST = 1e-6  # temperature: what divides by less leaves the range of numbers


@dataclass(frozen=True)
class Options:
    # a folder of checkpoints, a run's, one step's, or a .safetensors file
    source: tyro.conf.Positional[Path] = Path("outputs/train/latest/checkpoints")
    prompt: str | None = None  # where the text starts; none: at a new line, where the model knows lines
    chat: bool = False  # the prompt is a user's message; the answer ends where the model ends it (scripts/align.py)
    system: str | None = None  # with --chat: the system's message before it
    length: int = 300  # tokens to write, >= 0
    temperature: float = 0.8  # 1: as the model has it; less: likelier tokens; 0: always the likeliest
    top_k: int | None = None  # draw among the so many likeliest only, >= 1; none: among all
    seed: int = 1  # of the draws
    step: str = "best"  # which checkpoint: best (validation loss), newest, or a number
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"  # where to compute


def drawn(model, ids, length, temperature, top_k, vocab_size, generator):
    """Yield `length` ids below `vocab_size`, one at a time, that follow the list `ids` as the model sees it.

    It looks at the last block_size ids. All draws come from `generator`, on the CPU. A vocabulary may be wider than the
    alphabet (`--model.vocab-size`): an id that stands for nothing is not drawn.
    """
    import torch
    from manyhands.gpt.sampling import continued, drawing

    @torch.inference_mode()
    def logits(ids_1T):
        return model(ids_1T)[0][..., :vocab_size].double().cpu()

    ids_1T = torch.tensor([ids], device=next(model.parameters()).device)
    return map(int, continued(logits, ids_1T, length, model.config.block_size, drawing(temperature, generator, top_k)))


def refuse_senseless(options):
    """Raises ValueError for a value that no model can make sense of."""
    length, temperature, top_k = options.length, options.temperature, options.top_k
    faults = {
        f"--length {length} is negative; use 0 or more": length < 0,
        f"--temperature {temperature} is negative; use 0 for the likeliest token": temperature < 0,
        f"--temperature {temperature} is too small; use 0 for the likeliest token": 0 < temperature < LEAST,
        f"--top-k {top_k} leaves nothing to draw; use 1 or more": top_k is not None and top_k < 1,
        f"--temperature {temperature} is not a finite number; use 0 or more": not math.isfinite(temperature),
        "--system is for --chat; add it, or leave it out": options.system is not None and not options.chat,
        "--prompt is empty; give the text at least one character to start from": options.prompt == "",
    }
    for sentence, wrong in faults.items():
        if wrong:
            raise ValueError(sentence)


def encoded(prompt, tokenizer):
    """The ids of a prompt. Raises ValueError for a character that the model was not trained on."""
    try:
        return tokenizer.encode(prompt).tolist()
    except ValueError as error:
        raise ValueError(f"--prompt: {error}") from None


def asked(prompt, system, vocab):
    """Ids of the prompt as a user's message, and the assistant's marker. Raises ValueError where `vocab` has none."""
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return encode(messages, vocab, reply=True)[0]


def shown(text):
    """Text as a terminal may have it: control characters, which could command it, as their codes."""
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


def write_text(options):
    """Read the model, say on stderr what it is, and write on stdout. Raises CheckpointError or ValueError."""
    refuse_senseless(options)
    import torch
    from manyhands.checkpoint.export import load_model, tokenizer_of
    from manyhands.launch.devices import gpus_here
    from manyhands.launch.program import write

    kind = options.device
    if kind == "auto":
        kind, _ = gpus_here()
    elif kind != "cpu" and gpus_here({"MANYHANDS_DEVICE": kind})[0] != kind:
        raise ValueError(f"--device {kind}: torch sees no GPU of that kind here; use --device cpu")
    model, metadata = load_model(options.source, options.step, lambda text: print(text, file=sys.stderr, flush=True))
    tokenizer = tokenizer_of(metadata)
    vocab = tokenizer.vocab
    first = "\n" if tokenizer.kind == "bpe" or "\n" in vocab else min(vocab, key=len)  # a separator is longer
    prompt = options.prompt or first
    ids = asked(prompt, options.system, vocab) if options.chat else encoded(prompt, tokenizer)
    loss = "" if metadata.get("val_loss") is None else f", validation loss {metadata['val_loss']:.4f}"
    print(
        f"{metadata['source']}: step {metadata['step']}{loss}, {model.num_params():,} parameters",
        file=sys.stderr,
        flush=True,
    )
    generator = torch.Generator().manual_seed(options.seed)
    model = model.to(kind)
    if model.num_params() < SMALL:  # sharing such small products costs more than it gains, by far on busy cores
        torch.set_num_threads(1)
    if not options.chat:
        write(prompt)
    text_of = tokenizer.writer()
    for i in drawn(model, ids, options.length, options.temperature, options.top_k, len(vocab), generator):
        if options.chat and vocab[i] == END:
            break
        write(shown(text_of(i)))
    write(f"{shown(text_of(None, final=True))}\n")  # what the last tokens began


def main(argv=None):
    words = sys.argv[1:] if argv is None else argv
    try:
        options = parsed(Options, words, "sample.py", __doc__)
        if "" in words and options.source == Path():  # to a Path "" is the current folder
            raise ValueError("the folder to read is empty (is a variable of the shell unset?)")
        write_text(options)
    except (CheckpointError, ValueError) as error:
        print(f"sample.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    entry.run_program("sample.py", main)
