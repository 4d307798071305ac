"""Who and what runs, in a few lines, before the first step; since when; and how wide the screen is."""

import shutil
import textwrap

import psutil

from manyhands.predict import flops, peaks

LOG_WIDTH = 160  # where there is no terminal: every column


def screen_width():
    """Characters per line: of the terminal, or what COLUMNS says; a log file takes all columns."""
    return shutil.get_terminal_size((LOG_WIDTH, 24)).columns


def run_header(ranks, options, layout, config, corpus, folder, num_params):
    """A few aligned lines. `num_params`: parameters of the whole model."""
    train, size, block = options.train, ranks.world_size, config.block_size
    share = train.global_batch // layout.data
    micro = f" in {layout.micro_batches} micro-batches" if layout.micro_batches > 1 else ""
    tokens = train.global_batch * block
    epochs = train.steps * tokens / max(1, len(corpus.train_ids))
    device = peaks.device_name(ranks.device)
    facts = {
        "run": f"preset {options.preset}, {train.steps:,} steps; files in {folder}",
        "model": f"{num_params:,} parameters: {config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, "
        f"block {block}, a vocabulary of {config.vocab_size}",
        "ranks": f"{size} on {device}, {options.parallel.strategy}: {layout}",
        "batch": f"{train.global_batch} sequences = {tokens:,} tokens per step; {share} per data rank{micro}",
        "corpus": f"{corpus.name}, {len(corpus.train_ids):,} tokens to train on: {epochs:.2g} epochs in this run",
        "arithmetic": f"{train.precision}{', compiled' if train.compile else ''}; "
        f"{flops.flops_per_token(config) / 1e6:,.1f} MFLOP per token",
    }
    whole = {"subsequent_indent": " " * 12, "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(textwrap.fill(f"{name:<11} {fact}", screen_width(), **whole) for name, fact in facts.items())


def shown_text(text, width):
    """Text of unknown content for a screen: control characters as codes, long lines wrapped, a bar at the left."""
    visible = "".join(c if c == "\n" or c.isprintable() else repr(c)[1:-1] for c in text.expandtabs(4))
    lines = []
    for line in visible.split("\n"):
        lines += textwrap.wrap(line, max(20, min(width, 100) - 4), drop_whitespace=False) or [""]
    return "\n".join(f"  | {line}".rstrip() for line in lines)


def launch_time(launcher):
    """When the command was given, as time.time(): the start of the launcher where it is our parent, else of this process."""
    process = psutil.Process()
    if launcher in ("torchrun", "mpich"):
        process = process.parent() or process
    return process.create_time()
