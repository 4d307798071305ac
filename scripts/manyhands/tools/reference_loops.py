"""Loops that `bench` compares the trainer with, each in a process of its own.

    plain(steps=100, line_steps=10)                        # as nanoGPT's train.py writes it, with the trainer's model
    nanogpt("/path/nanoGPT", steps=100, line_steps=10)     # its train.py, started as its users start it

Each writes lines as the trainer does, into train/latest/steps.jsonl of the outputs folder: the tokens per second of
`line_steps` steps. `preset`: sizes of the trainer's presets, None: MODEL. `kind`: of device, such as cuda.
"""

import json
import math
import pickle
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from manyhands.config.options import PRESETS
from manyhands.launch.run_folder import outputs_folder

SEQUENCES = 12  # per rank and step
GPU_SEQUENCES, GPU_MICRO_BATCH = 64, 16  # of a step with a preset
MODEL = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64}
SIZES = tuple(MODEL)


def sizes_of(preset) -> dict[str, int]:
    """{n_layer, n_head, n_embd, block_size} of a preset."""
    return MODEL if preset is None else {name: PRESETS[preset]["model"][name] for name in SIZES}


@contextmanager
def lines_of_steps(line_steps, tokens_per_step):
    """A function to call after each step, with its seconds, or None: those since the last call."""
    folder = outputs_folder() / "train" / "latest"
    folder.mkdir(parents=True)
    steps, seconds, began = 0, 0.0, time.perf_counter()
    with open(folder / "steps.jsonl", "w") as lines:

        def step_done(step_s=None):
            nonlocal steps, seconds, began
            now = time.perf_counter()
            steps, seconds, began = steps + 1, seconds + (now - began if step_s is None else step_s), now
            if steps % line_steps == 0:
                line = {"step": steps, "tokens_per_s": line_steps * tokens_per_step / seconds}
                lines.write(json.dumps(line) + "\n")
                seconds = 0.0

        yield step_done


def batches(ids, block_size, sequences):
    """Windows drawn at random: inputs and targets [b, T], again and again."""
    import torch

    while True:
        starts = torch.randint(len(ids) - block_size, (sequences,))
        inputs_bT = torch.stack([ids[i : i + block_size] for i in starts])
        yield inputs_bT, torch.stack([ids[i + 1 : i + 1 + block_size] for i in starts])


def plain(compiled=False, *, steps, line_steps):
    """One process, no ranks, nothing of the trainer but its model.

    AdamW as torch gives it (not fused), decay on matrices only; windows drawn by `torch.randint` and stacked; the
    gradients clipped by torch; the loss looked at every 50 steps.
    """
    import torch

    from manyhands.data.corpus import load_corpus
    from manyhands.gpt.config import GPTConfig
    from manyhands.gpt.model import GPT

    corpus = load_corpus()
    torch.manual_seed(1337)
    model = GPT(GPTConfig(len(corpus.vocab), **MODEL))
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    drawn = batches(corpus.train_ids, MODEL["block_size"], SEQUENCES)
    with lines_of_steps(line_steps, SEQUENCES * MODEL["block_size"]) as step_done:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 1e-4 + 0.5 * 9e-4 * (1 + math.cos(math.pi * step / steps))
            _, loss = model(*next(drawn))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 50 == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
            step_done()


def nanogpt(clone, preset=None, kind="cpu", *, steps, line_steps):
    """nanoGPT's train.py (https://github.com/karpathy/nanoGPT), which reports the time of each step itself.

    On a GPU it compiles and computes in bf16, as it does by default; on a CPU it does neither.
    """
    from manyhands.data.corpus import load_corpus

    corpus, sizes, cpu = load_corpus(), sizes_of(preset), kind == "cpu"
    sequences, micro_batch = (SEQUENCES, SEQUENCES) if preset is None else (GPU_SEQUENCES, GPU_MICRO_BATCH)
    clone, folder = Path(clone).resolve(), outputs_folder() / "nanogpt"
    data = folder / "data" / "corpus"
    data.mkdir(parents=True)
    for name, ids in (("train.bin", corpus.train_ids), ("val.bin", corpus.val_ids)):
        ids.numpy().astype("uint16").tofile(data / name)
    if preset is None:  # without it, its own vocabulary of 50,304
        (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(corpus.vocab)}))
    (folder / "configurator.py").symlink_to(clone / "configurator.py")  # which it reads from where it is started
    flags = sizes | {
        "device": kind, "dtype": "float32" if cpu else "bfloat16", "compile": not cpu, "dataset": "corpus",
        "batch_size": micro_batch, "gradient_accumulation_steps": sequences // micro_batch,
        "learning_rate": 1e-3, "min_lr": 1e-4, "beta2": 0.99, "warmup_iters": 0, "lr_decay_iters": steps,
        "max_iters": steps, "log_interval": 1, "eval_iters": 1, "eval_interval": 10**9,
    }  # fmt: skip
    command = [sys.executable, "-u", str(clone / "train.py"), *(f"--{name}={value}" for name, value in flags.items())]
    with (
        lines_of_steps(line_steps, sequences * sizes["block_size"]) as step_done,
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as running,
    ):
        for line in running.stdout:
            print(line, end="", flush=True)
            found = re.match(r"iter (\d+): loss [\d.]+, time ([\d.]+)ms", line)
            if found and found[1] != "0":  # with the first step comes an evaluation
                step_done(float(found[2]) / 1000)
    sys.exit(running.returncode)
