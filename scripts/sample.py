#!/usr/bin/env python3
"""Let a trained GPT write.

    python scripts/sample.py outputs/train/latest/checkpoints --prompt "ROMEO:" --length 300
    python scripts/sample.py outputs/train/latest/checkpoints --step newest --temperature 0.8 --top-k 40 --seed 2
    python scripts/sample.py outputs/align/latest --chat --prompt "sort gbad"         # a model that align.py has taught
    python scripts/sample.py SmolLM2-135M --prompt "Water boils"        # a folder as transformers writes it
    python scripts/sample.py model.safetensors --temperature 0 > text.txt   # of python -m manyhands.checkpoint.export

On stdout you see the prompt and what the model makes of it, token by token (a model of documents writes <|document|>
where a new one begins); on stderr what was read: the file, its step and validation loss. The same seed writes the same
text on the same machine. Status 2: there is nothing to read, or a value makes no sense, with the cure.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parent))  # it runs without an install

import manyhands.launch.entry as entry  # first: Ctrl-C in the imports below is a sentence
import tyro
from manyhands.align.chat import chat_of
from manyhands.config.bounds import Count, Positive, Rate, Seed
from manyhands.config.command_line import parsed
from manyhands.launch.program import Refused, write

SMALL = 20e6  # parameters
LEAST = 1e-6  # temperature: what divides by less leaves the range of numbers


@dataclass(frozen=True)
class Options:
    # a folder of checkpoints, a run's, one step's, a .safetensors file, or a folder as transformers writes it
    source: tyro.conf.Positional[Path] = Path("outputs/train/latest/checkpoints")
    prompt: str | None = None  # where the text starts; none: at a new line, where the model knows lines
    chat: bool = False  # the prompt is a user's message; the answer ends where the model ends it (scripts/align.py)
    system: str | None = None  # with --chat: the system's message before it
    length: Count = 300  # tokens to write
    temperature: Rate = 0.8  # 1: as the model has it; less: likelier tokens; 0: always the likeliest
    top_k: Positive | None = None  # draw among the so many likeliest only; none: among all
    seed: Seed = 1  # of the draws
    step: str = "best"  # which checkpoint: best (validation loss), newest, or a number
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"  # where to compute
    dtype: Literal["fp32", "bf16"] = "fp32"  # of weights and products; bf16: half the memory


def drawn(model, ids, length, temperature, top_k, vocab_size, generator):
    """Yield `length` ids below `vocab_size`, one at a time, that follow the list `ids` as the model sees it.

    It looks at as many ids as the model reads. All draws come from `generator`, on the CPU. A vocabulary may be wider
    than the alphabet (`--model.vocab-size`): an id that stands for nothing is not drawn. Raises Refused where a logit
    is NaN or infinite.
    """
    import torch
    from manyhands.gpt.sampling import continued, drawing

    @torch.inference_mode()
    def logits(ids_1T):
        logits_11V = model(ids_1T)[0][:, -1:, :vocab_size].double().cpu()
        if not logits_11V.isfinite().all():
            raise Refused(
                "the model gives NaN or infinity, so nothing can be drawn: its weights hold such numbers, or are too"
                " large; use another checkpoint (--step)"
            )
        return logits_11V

    ids_1T = torch.tensor([ids], device=next(model.parameters()).device)
    return map(int, continued(logits, ids_1T, length, model.config.context, drawing(temperature, generator, top_k)))


def refuse_senseless(options):
    """Raises Refused for values that no model can make sense of."""
    if 0 < options.temperature < LEAST:
        raise Refused(f"--temperature {options.temperature} is too small; use 0 for the likeliest token")
    if options.system is not None and not options.chat:
        raise Refused("--system is for --chat; add it, or leave it out")
    if options.prompt == "":
        raise Refused("--prompt is empty; give the text at least one character to start from")


def asked(prompt, system, chat):
    """Ids of the prompt as a user's message, up to where the assistant's answer begins. Raises ValueError."""
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return chat.encode(messages, reply=True)[0]


def shown(text):
    """Text as a terminal may have it: control characters, which could command it, as their codes."""
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


def write_text(options):
    """Read the model, say on stderr what it is, and write on stdout. Raises Refused."""
    refuse_senseless(options)
    import torch
    from manyhands.checkpoint.export import DTYPES, described, load_model, tokenizer_of
    from manyhands.launch.devices import device_named

    kind = device_named(options.device)
    model, metadata = load_model(options.source, options.step, lambda text: print(text, file=sys.stderr, flush=True))
    tokenizer = tokenizer_of(metadata)
    vocab = tokenizer.vocab
    first = "\n" if tokenizer.kind == "bpe" or "\n" in vocab else min(vocab, key=len)  # a separator is longer
    prompt = options.prompt or first
    try:
        ids = (
            asked(prompt, options.system, chat_of(tokenizer))
            if options.chat
            else [*tokenizer.begin, *tokenizer.encode(prompt).tolist()]
        )
    except ValueError as error:
        raise Refused(f"--prompt: {error}") from None
    print(described(model, metadata), file=sys.stderr, flush=True)
    generator = torch.Generator().manual_seed(options.seed)
    model = model.to(kind, DTYPES[options.dtype])
    if model.num_params() < SMALL:  # sharing such small products costs more than it gains, by far on busy cores
        torch.set_num_threads(1)
    if not options.chat:
        write(prompt)
    text_of = tokenizer.writer()
    for i in drawn(model, ids, options.length, options.temperature, options.top_k, len(vocab), generator):
        if options.chat and i in tokenizer.ends:
            break
        write(shown(text_of(i)))
    write(f"{shown(text_of(None, final=True))}\n")  # what the last tokens began


def main(argv=None):
    write_text(parsed(Options, sys.argv[1:] if argv is None else argv, "sample.py", __doc__))
    return 0


if __name__ == "__main__":
    entry.run_program("sample.py", main, product=True)
