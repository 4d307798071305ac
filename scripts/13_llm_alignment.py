# ---
# jupyter:
#   jupytext:
#     formats: notebooks///ipynb,scripts///py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Many Hands
#     language: python
#     name: manyhands
# ---

# %% [markdown]
# # 13 Alignment: from a model that goes on to a model that answers
#
# **50 minutes** for the sections marked CORE, 95 with those marked MORE.
#
# After this lesson **you can**
# - write a conversation as one sequence of symbols, and mask the loss so that only answers are learned;
# - fine-tune on demonstrations on many ranks, and measure what that brings on questions the model has not seen;
# - write the DPO loss, and keep its reference model sharded;
# - draw answers on all ranks, judge them by a program, and learn from their rewards (GRPO);
# - tell a model that has learned the task from one that has learned the reward.
#
# **You need** data parallel training ([lesson 03](03_data_parallel.ipynb)): every rank holds the model, gradients are added
# up by an [all-reduce](../assets/glossary.md#all-reduce). From [lesson 06](06_zero_fsdp.ipynb) you need the
# [shard](../assets/glossary.md#shard), a rank's part of a tensor, and the all-gather that makes it whole.
#
# **New here:** [chat template](../assets/glossary.md#chat-template), [loss mask](../assets/glossary.md#loss-mask),
# [SFT](../assets/glossary.md#sft), [verifier](../assets/glossary.md#verifier), [DPO](../assets/glossary.md#dpo),
# [reference model](../assets/glossary.md#reference-model), [rollout](../assets/glossary.md#rollout),
# [GRPO](../assets/glossary.md#grpo), [advantage](../assets/glossary.md#advantage),
# [KL divergence](../assets/glossary.md#kl-divergence), [reward hacking](../assets/glossary.md#reward-hacking),
# [LoRA](../assets/glossary.md#lora).
#
# The same file is a script:
#
# ```bash
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/13_llm_alignment.py --seeds 1
# mpiexec -n 4 python scripts/13_llm_alignment.py
# python scripts/13_llm_alignment.py                   # a world of one: the same path, the same answers
# ```

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 4, warm-up 3, conversation 9, demonstrations 8, preferences 14, experiment 4, zoo 4. Builds A
# to C take about three minutes each and are in these numbers.
#
# *Say:* three stages, three kinds of teacher. SFT has somebody who writes the answer. DPO has somebody who says which of two
# is better. GRPO has a program that says right or wrong. Each knows less, and each can therefore be asked more often.
#
# *Three usual mistakes:* a loss on the user's symbols too; dividing by this rank's symbols; believing a reward curve.
#
# *When late:* give solution C, and show the stored figure of the experiment. Keep builds A and B, and the zoo.
#
# *Ask the room:* "Which of your own metrics could be had without doing the work?"
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
base_steps = 150  # steps of pre-training before the lesson begins, at least 1
sft_steps = 100  # steps of supervised fine-tuning, at least 1
dpo_steps = 40  # steps of preference optimisation, at least 1
rl_steps = 60  # steps of reinforcement learning, at least 2
seeds = 3  # runs of each stage in the experiment, at least 1

# %% [markdown]
# ## Start (CORE, 4 min)
#
# The first cell starts four ranks. Cells that begin with `%%ranks` run on all of them. Each section needs the cells
# of this one, and then only its own: a folded cell with `catch_up(...)` defines what is missing from earlier ones.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("13_llm_alignment", globals())

# %%
# %%ranks
import copy

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands import Metrics, catch_up, join, leave, say, show
from manyhands.alignment.chat_template import END, MARKERS, answered, encode, render, with_markers
from manyhands.alignment.rollouts import complete, own_draws, texts
from manyhands.alignment.sft import rows
from manyhands.alignment.tasks import LetterTask, speech_messages, speeches
from manyhands.checks import alignment as checks
from manyhands.measure import wire

# %% [markdown]
# The model is a small ShakespeareGPT: 2 layers, width 64. Its symbols are the corpus's, and four **markers** behind them,
# which the text never contains. We need them soon.

# %%
# %%ranks
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.gpt.model import GPT, GPTConfig

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
corpus = load_corpus(ranks)
symbols = with_markers(corpus.symbols)
config = GPTConfig(vocab_size=len(symbols), n_layer=2, n_embd=64)
given = {"base_steps": base_steps, "sft_steps": sft_steps, "dpo_steps": dpo_steps, "rl_steps": rl_steps}
metrics = Metrics(ranks, corpus, given | {"seeds": seeds})
if rank == 0:
    say(f"{len(symbols)} symbols, the last four: {' '.join(symbols[-4:])}; {config.num_params():,} parameters")

# %% [markdown]
# Every stage of this lesson trains by these lines. Each rank's `loss` is its part of a sum over all ranks, so gradients
# are *added up*:


# %%
# %%ranks
def update(model, optimizer, loss, lr):
    """One step. `loss` is this rank's part of the sum over all ranks. All ranks call it."""
    optimizer.zero_grad()
    loss.backward()
    row_P = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(row_P)
    parts = row_P.split([p.numel() for p in model.parameters()])
    for p, part in zip(model.parameters(), parts, strict=True):
        p.grad = part.view_as(p)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for settings in optimizer.param_groups:
        settings["lr"] = lr
    optimizer.step()


def adam(model):
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)


def falling(step, steps, peak):
    """A learning rate that rises for five steps, and then falls to a tenth of its peak."""
    return peak * min(1.0, (step + 1) / 5) * (1 - 0.9 * step / steps)


# %% [markdown]
# A short pre-training, 24 windows of 64 characters per step, dealt out over the ranks. It takes some seconds:


# %%
# %%ranks --timeout 300
def pretrained():
    """A base model: it goes on with text."""
    torch.manual_seed(1337)
    model = GPT(config).to(device)
    optimizer = adam(model)
    for step in range(base_steps):
        batch = get_batch(corpus.train_ids, step, 24, config.block_size, rank, world_size, seed=1)
        ids_bT, targets_bT = (part.to(device) for part in batch)
        loss = model(ids_bT, targets_bT)[1] / world_size
        update(model, optimizer, loss, falling(step, base_steps, 3e-3))
    return model, loss


base, loss = pretrained()
models = {}  # the stages of this lesson, as they come
dist.all_reduce(loss := loss.detach())
if rank == 0:
    say(f"the base model after {base_steps} steps: loss {loss.item():.2f}")
