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
# # 01 One device: where memory, FLOPs and time go
#
# **35 minutes** for the sections marked CORE, 67 with those marked MORE.
#
# After this lesson **you can**
# - predict the parameters, the bytes and the FLOPs of a GPT, with a pencil, to the last digit;
# - say whether a model fits on a device, and if not, what it is that does not fit;
# - read an MFU, and name the peak that it was divided by;
# - trade memory for time and back: 16 bits, accumulation, checkpointing.
#
# **You need** to have seen a training loop in PyTorch, and [rank](../assets/glossary.md#rank) from [lesson
# 00](00_start.ipynb). In two lines: a *rank* is one of n processes that run this same file, and a cell that begins
# with `%%ranks` runs on all of them. In this lesson ranks do not need each other: they share out experiments, one
# each.
#
# **New here:** [FLOP](../assets/glossary.md#flop), [MFU](../assets/glossary.md#mfu),
# [activation](../assets/glossary.md#activation), [optimizer state](../assets/glossary.md#optimizer-state),
# [activation checkpointing](../assets/glossary.md#activation-checkpointing), [mixed
# precision](../assets/glossary.md#mixed-precision), [loss scaling](../assets/glossary.md#loss-scaling),
# [accumulation](../assets/glossary.md#accumulation), [micro-batch](../assets/glossary.md#micro-batch).
#
# The same file is a script, and this time one process is its natural home:
#
# ```bash
# python scripts/01_one_device.py
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/01_one_device.py --sequences 16
# ```

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 1, warm-up 2, why distribute 2, parameters 4,
# bytes per parameter 3, FLOPs 3, MFU 3, activations 4 and the answer 1, checkpointing 3, accumulation 2, sixteen
# bits 3, experiment 2, zoo 2.
#
# *Say:* "Before you use two devices, know what one is doing." Every later lesson divides a number of this lesson by
# n.
#
# *Three usual mistakes:* believing that the weights fill the memory; taking the data sheet's largest FLOP/s for the
# peak; mixing GB and GiB, which is 7 %.
#
# *When late:* skip the loop over recipes and show the stored table; skip accumulation (lesson 03 has it again).
#
# *Ask the room:* "A model has 7 billion parameters. How much memory does training need?" Collect numbers before the
# section on bytes. They will range from 14 GB to 200 GB, and most of them are right about something.
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
sequences = 8  # sequences in a batch, a multiple of 4, 4 to 256
repeats = 10  # samples of each timing, at least 1
peak_s = 0.5  # seconds to measure the fastest matrix product, > 0

# %% [markdown]
# ## Start (CORE, 1 min)
#
# The first cell starts four ranks behind this notebook. What all of them say alike is shown once. **Catching up:**
# each section needs only the cells of this one, and then its own; a cell with `catch_up(...)` defines what it takes
# from earlier ones.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("01_one_device", globals())

# %%
# %%ranks
import itertools
import math
import statistics
import time
from math import ceil

import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands import Metrics, catch_up, fingerprint, join, leave, refuse, say, show
from manyhands.checks import one_device as checks
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.figures.memory_stack import memory_stack
from manyhands.gpt.model import GPT, GPTConfig
from manyhands.measure import saved_activations, timing
from manyhands.measure.tensor_bytes import tensor_bytes
from manyhands.measure.memory_timeline import MemoryTimeline
from manyhands.measure.timing import synchronise
from manyhands.predict import activation_memory, bytes_per_parameter, flops, peaks, rank_memory
from manyhands.runs import recorded_runs
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

# %% [markdown]
# The ranks join; `join` says who is here.

# %%
# %%ranks
ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
if sequences % 4:
    refuse(f"sequences={sequences} does not split into 4 micro-batches; use a multiple of 4")

# %% [markdown]
# Four models accompany us. One you can run here: **ShakespeareGPT** reads 64 characters and guesses the next. The
# others you will only calculate: the same GPT with the width and depth of OLMo 1B and 7B (with a vocabulary of
# 32,100, which is not OLMo's), and of the 70B class.
#
# Letters are sizes: `B` sequences in a batch, `T` positions in each, `V` symbols in the vocabulary, `D` the width,
# `H` heads, `N` layers, and `P` parameters in all. At the end of a name they are its shape. Lines with `metrics` keep
# numbers that tests compare: read past them.

# %%
# %%ranks
corpus = load_corpus(ranks)
shakespeare = GPTConfig(vocab_size=len(corpus.symbols))
olmo_1b = GPTConfig(vocab_size=32_100, block_size=2048, n_layer=16, n_head=16, n_embd=2048)
olmo_7b = GPTConfig(vocab_size=32_100, block_size=2048, n_layer=32, n_head=32, n_embd=4096)
class_70b = GPTConfig(vocab_size=50_280, block_size=4096, n_layer=80, n_head=64, n_embd=8192)
models = {"ShakespeareGPT": shakespeare, "1B": olmo_1b, "7B": olmo_7b, "70B class": class_70b}
metrics = Metrics(ranks, corpus, {"sequences": sequences, "repeats": repeats, "peak_s": peak_s})


def new_model(dtype=torch.float32):
    """ShakespeareGPT with its first weights, the same on every rank."""
    torch.manual_seed(1337)
    return GPT(shakespeare).to(device, dtype)


def batch(step=0):
    """Inputs and targets, both [B, T]: the same on every rank, as if it were alone."""
    return [ids_BT.to(device) for ids_BT in get_batch(corpus.train_ids, step, sequences, 64, 0, 1, seed=1)]


# %% [markdown]
# And one helper. When four experiments are to be made and four ranks are there, each makes one. That is the
# simplest of all ways to use many hands, and it has a name: a *sweep*.


# %%
# %%ranks
def share_out(experiment, cases):
    """[experiment(case) for each case], every rank doing its part of them. All ranks call it."""
    mine = {i: experiment(cases[i]) for i in range(rank, len(cases), world_size)}
    parts = [None] * world_size
    dist.all_gather_object(parts, mine)  # all ranks: each tells the others what it found
    found = {i: result for part in parts for i, result in part.items()}
    return [found[i] for i in range(len(cases))]


# %% [markdown]
# ## Warm-up: a model of four numbers (CORE, 2 min)
#
# **Why.** Everything that follows is multiplication. So take a model that you can multiply in your head: one matrix **W**
# of 2 × 2 numbers, no bias, and three rows of data, **X**, that go through it: **Y** = **X** **W**. Train it with
# Adam, in float32, 4 bytes a number.
#
# **Predict.** How many numbers are in memory at the end of a step, before `zero_grad`? How many multiplications and
# additions does the forward pass take, and how many backward?
#
# <details><summary>Answer</summary>
#
# Adam keeps two numbers beside each weight, the mean of its gradient and of its square (its two *moments*). With the
# gradient that is 4 + 4 + 8 = 16 numbers, **64 bytes for a model of 16 bytes** (12 of the numbers you need in the
# next step, too). Forward: each of the 3 rows meets each of the 4 weights in one multiplication and one addition,
# 2·3·4 = **24 FLOPs**. Backward: the gradient of **W** is one such product, and the gradient of **X** another, 48.
# Together 6 FLOPs for each row and weight: the famous **6·P·rows**.
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
w_22 = nn.Parameter(torch.ones(2, 2, device=device))
x_32 = torch.ones(3, 2, device=device, requires_grad=True)  # in a deeper model, what the layer below has made
adam = torch.optim.Adam([w_22])
with FlopCounterMode(display=False) as counter:
    y_32 = x_32 @ w_22
    forward = counter.get_total_flops()
    y_32.sum().backward()
adam.step()
kept = [w_22, w_22.grad, adam.state[w_22]["exp_avg"], adam.state[w_22]["exp_avg_sq"]]
say(f"bytes kept: {' + '.join(str(t.nbytes) for t in kept)} = {sum(t.nbytes for t in kept)}")
say(f"FLOPs: {forward} forward, {counter.get_total_flops() - forward} backward")

# %% [markdown]
# A [**FLOP**](../assets/glossary.md#flop) is one addition or one multiplication. FLOPs with a small s are many of
# them; FLOP/s is a speed. A third thing has to stay in memory, between forward and backward: **X** itself, because
# the gradient of **W** is made of it. That is an [**activation**](../assets/glossary.md#activation). So there are
# four kinds of bytes: parameters, gradients, [optimizer state](../assets/glossary.md#optimizer-state), activations.
# The first three are counted per parameter, the last per token.

# %% [markdown]
# ## Why more than one device at all (CORE, 2 min)
#
# ![Two reasons: more data than one device can read in time, so copies of the model read in parallel; or a model larger than one
# device's memory, so its parts lie on several](../assets/01_two_reasons.svg)
#
# For one of two reasons. **There is too much data**: one device would need months. Then give each device a copy and
# a share of the data (lessons 03 and 05). Or **the model is too large**: it does not fit. Then cut it up (lessons 06
# to 10). This lesson gives you the numbers by which you decide.
#
# What the first reason has brought, for one network and one data set (ResNet-50 on ImageNet; Goyal et al. read it 90
# times):
#
# | who | devices | batch | time | accuracy |
# |---|---|---|---|---|
# | the usual baseline | 8 P100 | 256 | 29 h | 75.3 % |
# | Goyal et al. 2017 | 256 P100 | 8,192 | 1 h | 76.3 % |
# | Yamazaki et al. 2019 | 2,048 V100 | 81,920 | 74.7 s | 75.08 % |
#
# (Two notes. The baseline is often credited to He et al. 2016, but the P100 is younger than that paper. And 72 s
# are in circulation for the last row: that is 74.7 s, rounded to 1.2 minutes, and multiplied by 60 again.)
#
# **Predict.** From 8 devices to 2,048 is a factor of 256. What is the speed-up? How can it be so?
#
# <details><summary>Answer</summary>
#
# 104,400 s / 74.7 s = 1,398, more than five times the factor of 256. They are other devices.
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
baseline_s = 29 * 3600
say(f"1 h on 256 P100:     {baseline_s / 3600:5.0f} times as fast on {256 // 8} times the devices")
say(f"74.7 s on 2,048 V100: {baseline_s / 74.7:,.0f} times as fast on {2048 // 8} times the devices")

# %% [markdown]
# 1,398 on 256: no miracle, another generation. A V100 has matrix units and a P100 has none. Divide by 256 and you
# get an "efficiency" of 546 %, which says nothing about scaling. The second row has the same device on both sides: 29
# on 32, **91 %** (Goyal et al. measured about 90 % themselves). Rule: a scaling efficiency needs *the same device
# on both sides*.

# %% [markdown]
# ## Parameters (CORE, 4 min)
#
# **Why.** Every estimate begins with P. Published models are named by a rounded P; you can have the exact number in
# a minute.
#
# ![The decoder-only transformer from the embeddings to the head, with the number of parameters beside each
# box](../assets/01_gpt.svg)
#
# Read the drawing from the bottom. (The arrows to a + go around: each half of a layer adds its result to its input.)
# A linear map from *a* to *b* numbers has *a·b* weights, and *b* more if it has a bias. Adding up a layer: 3D² for
# query, key and value, D² for attention's output, 4D² up and 4D² down are **12D²**; biases (D + 4D + D) and two
# LayerNorms (2·2D) are **10D**. Around the N layers there are two embeddings, a last LayerNorm and the head:
#
# > **P = N (12D² + 10D) + D (V + T) + 2D + V (D + 1)**

# %%
# %%ranks
V, T, D, N = shakespeare.vocab_size, 64, 128, 4  # the sizes of ShakespeareGPT
by_hand = N * (12 * D**2 + 10 * D) + D * (V + T) + 2 * D + V * (D + 1)
counted = sum(p.numel() for p in new_model().parameters())
for term, number in rank_memory.parameter_terms(shakespeare).items():
    say(f"{term:20} {number:9,}")
say(f"{'by the formula':20} {by_hand:9,}\n{'counted':20} {counted:9,}")
assert by_hand == counted == sum(rank_memory.parameter_terms(shakespeare).values())

# %% [markdown]
# Exact, to the last bias, *for this variant*. Others differ in small print. **GPT-2** has biases on query, key and
# value too, so 13D, and its head *is* its embedding ("tied"), so V(D+1) goes. **Llama** and **OLMo** have no biases
# at all, and no learned positions; their MLP has three matrices, not two, mostly narrower ones: Llama 7B and OLMo
# 7B stay near 12D², the real OLMo 1B has 16D². The 12D² is what you should remember, for a model that you know
# nothing about.
#
# **Predict.** The 70B-class model has N = 80 layers, D = 8192, V = 50,280 and T = 4096. How many parameters is
# that? (Start with 12·N·D².)
#
# <details><summary>Answer</summary>
#
# 12·80·8192² = 64.4 billion, and 0.8 for the embedding and the head: **65.3 billion**. "70B" is a class, not a count.
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
for name, config in models.items():
    if name != "ShakespeareGPT":  # its P depends on the corpus
        layers = 12 * config.n_layer * config.n_embd**2
        share = 100 * layers / config.num_params()
        say(f"{name:10} P = {config.num_params():14,}   12 N D^2 is {share:.1f} % of it")
metrics.exact(num_params={name: config.num_params() for name, config in models.items()})

# %% [markdown]
# 0.941 billion for the first. (0.944 is in circulation for the same model: that is V = 32,768, the vocabulary
# padded to a round number.) The smallest one you can run.
#
# **Predict.** What is its very first loss, in nats per character (natural logarithms, what `F.cross_entropy`
# returns), before it has learnt anything?
#
# <details><summary>Answer</summary>
#
# It knows nothing, so it gives each of Shakespeare's 65 symbols about the same probability: the loss is close to ln 65
# = 4.174. A first loss far above says that the initialisation is off. One far below says that the targets leak into
# the input.
#
# </details>

# %%
# %%ranks
x_BT, y_BT = batch()
_, first_loss = new_model()(x_BT, y_BT)
say(f"first loss {first_loss.item():.3f}, ln {len(corpus.symbols)} = {math.log(len(corpus.symbols)):.3f}")
metrics.exact(first_loss=first_loss)
metrics.close(first_loss_close=first_loss)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: parameters</summary>
#
# Let them write the formula from the drawing before you show it. The usual miss
# is the head's bias, then the last LayerNorm. If somebody asks for their own model: "count its matrices; everything
# else is below one per cent at a width of 4096."
#
# </details>

# %% [markdown]
# ## Bytes per parameter (CORE, 3 min)
#
# **Why.** "A 7B model in bf16 is 14 GB" is true, and is no answer to "can I train it?". The warm-up kept four times
# the weights.
#
# ![Five recipes as stacks of boxes, one box per byte: weights, gradients, master weights, Adam's two
# moments](../assets/01_bytes.svg)
#
# Few train in pure bf16: it has 8 significant bits, and a weight near 1 cannot take a step smaller than 1/256. So a
# second, exact copy of the weights is kept, the **master**, and that is where the update goes.
#
# **Predict.** 16-bit weights and gradients look like half of float32. By how much do they shrink the 16 bytes of
# float32 with Adam?
#
# <details><summary>Answer</summary>
#
# With a master and Adam's moments in float32, by nothing: 2 + 2 + 4 + 8 = 16. What 16 bits save is *activations*,
# and time. And PyTorch's autocast keeps float32 weights and gradients, 4 + 4 + 8 = 16, plus a bf16 copy of the
# matrices while they are in use: 18.
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
say(f"{'bytes per parameter':22} weights  gradients  master  moments  cast  total")
for name, r in bytes_per_parameter.RECIPES.items():
    parts = f"{r.weights:7g}  {r.gradients:9g}  {r.master:6g}  {r.moments:7g}  {r.cast:4g}  {r.total:5g}"
    say(f"{name:22} {parts}")

# %% [markdown]
# The last row is what many slides calculate with, **14P**. It has no room for the gradients (or, as others sum it
# up, none for the master weights); 16 is the honest number. Here are both for five sizes. A GB is 10⁹ bytes.

# %% tags=["nbval-check-output"]
# %%ranks
for billions in (0.3, 1, 7, 13, 70):
    at_14 = bytes_per_parameter.state_bytes(billions * 1e9, "14P of many slides")
    at_16 = bytes_per_parameter.state_bytes(billions * 1e9, "bf16 + fp32 master")
    say(f"{billions:5g} billion: {at_14 / 1e9:6.1f} GB at 14P, {at_16 / 1e9:7.1f} GB at 16P")

# %% [markdown]
# Do not believe a formula that nobody has weighed. Three recipes, as real training steps of ShakespeareGPT. The
# third one, with a master, is built from scratch: an Adam that works on a float32 copy.


# %%
# %%ranks
class MasterAdamW:
    """AdamW on float32 copies of 16-bit parameters."""

    def __init__(self, parameters, lr=1e-3):
        self.parameters = list(parameters)
        self.masters = [p.detach().float() for p in self.parameters]
        self.adam = torch.optim.AdamW(self.masters, lr=lr)

    @torch.no_grad()
    def step(self):
        for p, master in zip(self.parameters, self.masters, strict=True):
            master.grad = p.grad.float()
        self.adam.step()
        for p, master in zip(self.parameters, self.masters, strict=True):
            p.copy_(master)  # rounded: the master remembers what the weight cannot hold
            master.grad = None


# %% [markdown]
# The scale: everything that is still there when the step is over.


# %%
# %%ranks
def weigh(recipe):
    """Bytes that one training step of ShakespeareGPT leaves behind, by the recipe."""
    model = new_model(torch.float32 if recipe == "fp32" else torch.bfloat16)
    with_master = recipe == "bf16 + fp32 master"
    optimizer = (MasterAdamW if with_master else torch.optim.AdamW)(model.parameters())
    model(*batch())[1].backward()
    optimizer.step()
    adam, masters = (optimizer.adam, optimizer.masters) if with_master else (optimizer, [])
    moments = [t for state in adam.state.values() for t in (state["exp_avg"], state["exp_avg_sq"])]
    kept = [*model.parameters(), *(p.grad for p in model.parameters()), *masters, *moments]
    return sum(t.nbytes for t in kept)


# %% [markdown]
# The three are shared out among the ranks. (On a CPU bf16 is slow; that does not matter to a scale.) Then once more
# by the package's own scale, for the first recipe: it finds the tensors by itself.

# %%
# %%ranks
P, recipes = shakespeare.num_params(), ["fp32", "bf16", "bf16 + fp32 master"]
for recipe, weighed in zip(recipes, share_out(weigh, recipes), strict=True):
    predicted = bytes_per_parameter.state_bytes(P, recipe)
    each, ratio = weighed / P, weighed / predicted
    say(f"{recipe:20} weighed {weighed:10,} bytes, {each:g} per parameter, ratio {ratio:.3f}")
    assert weighed == predicted
model = new_model()
optimizer = torch.optim.AdamW(model.parameters())
model(*batch())[1].backward()
optimizer.step()
held = tensor_bytes(model, optimizer)
say(f"the package: {held.parameters:,} + {held.gradients:,} + {held.optimizer:,} bytes")

# %% [markdown]
# (The package finds 200 bytes more in the optimizer: Adam also keeps a step count for each of the 50 tensors.)
#
# Choose another model, recipe, number of ranks. The strategies in it are lessons 03 and 06.

# %% tags=["active-ipynb"]
# from manyhands.widgets.memory import show_memory
#
# show_memory()

# %% [markdown]
# **GB or GiB?** A GB is 10⁹ bytes, a GiB 2³⁰, 7 % more. A "40 GB" A100 has 40 GiB, which is 42.9 GB (of which a
# program sees about 39.5 GiB). Whoever divides GB by "40" buys a device too many now and then; whoever thinks in GiB
# and reads GB runs out of memory.

# %% tags=["active-ipynb"]
# from manyhands.widgets.sizes import show_sizes
#
# show_sizes()

# %% [markdown]
# ## FLOPs (CORE, 3 min)
#
# **Why.** Bytes say whether it runs, FLOPs say for how long. Nearly all of them are in matrix products, and a
# product of an [n, k] with a [k, m] matrix costs 2·n·k·m.
#
# From scratch: PyTorch hands each operator, forward and backward, to a `TorchDispatchMode` if one is active. There
# we can count what we like: calls, FLOPs, and the bytes that an operator reads and writes. (A *view* such as a
# transpose moves none.)


# %%
# %%ranks
class Counter(TorchDispatchMode):
    """What every operator in the block does: rows[name] = [calls, FLOPs, bytes read and written]."""

    products = ("mm", "addmm", "bmm", "baddbmm")

    def __init__(self):
        super().__init__()
        self.rows = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)]
        made = [t for t in tree_leaves(result) if torch.is_tensor(t)]
        # a view lies in the memory of what was given: nothing is moved
        given_at = {t.untyped_storage().data_ptr() for t in given}
        is_view = all(t.untyped_storage().data_ptr() in given_at for t in made) and not op._schema.is_mutable
        row = self.rows.setdefault(op.overloadpacket.__name__, [0, 0, 0])  # "addmm.default" -> "addmm"
        row[0] += 1
        if op.overloadpacket.__name__ in self.products:  # [.., n, k] times [.., k, m]
            row[1] += 2 * given[-2].numel() * given[-1].shape[-1]
        row[2] += 0 if is_view else sum(t.nbytes for t in given + made)
        return result

    def total(self):
        return sum(row[1] for row in self.rows.values())


# %% [markdown]
# **Predict.** ShakespeareGPT has 0.8 million parameters, and a batch of 8 sequences of 64 tokens. Roughly how many
# FLOPs does a training step take, by "6 for each parameter and token"? Will the count be above or below?
#
# <details><summary>Answer</summary>
#
# 6 · 816,705 · 512 = 2.51 billion. The count is 2.64 billion. Two things pull in opposite directions: the
# embeddings are looked up, not multiplied (less), and attention multiplies activations with each other, 12·N·D·T
# per token, where no parameter is (more).
#
# </details>
#
# The exact formula leaves out nothing that is a matrix product: 6·(12ND² + VD) + 12NDT per token.

# %%
# %%ranks
x_BT, y_BT = batch()
with sdpa_kernel(SDPBackend.MATH):  # attention as plain products, so that both counters see them
    with Counter() as ours:
        _, loss = new_model()(x_BT, y_BT)
        forward = ours.total()
        loss.backward()
    with FlopCounterMode(display=False) as library:
        new_model()(x_BT, y_BT)[1].backward()
formula = flops.flops_per_token(shakespeare) * x_BT.numel()
say(f"ours {ours.total():,}, the library {library.get_total_flops():,}, the formula {formula:,}")
say(f"backward / forward: {(ours.total() - forward) / forward:g}")
assert ours.total() == library.get_total_flops() == formula
metrics.exact(flops=ours.total())

# %% [markdown]
# Three ways, one number. Backward costs exactly twice the forward pass, as in the warm-up. One caution: a counter
# sees what it knows. Without `sdpa_kernel(SDPBackend.MATH)` attention runs as *one* fused operator, **flash
# attention**: one kernel for softmax(QKᵀ)V that never stores the T × T *scores*, and computes them again in backward.
# On a CPU the library's counter has no entry for it, and says nothing; on a GPU it has, and counts 5 products
# backward and not 4, because of the scores.

# %%
# %%ranks
with FlopCounterMode(display=False) as library:
    new_model()(x_BT, y_BT)[1].backward()
missing = formula - library.get_total_flops()
attention = 12 * shakespeare.n_layer * shakespeare.n_embd * shakespeare.block_size * x_BT.numel()
say(f"with fused attention the library counts {missing:,} fewer; attention's products are {attention:,}")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: FLOPs</summary>
#
# On GPUs the last cell prints a negative number, see the text. *Ask:* "Why is
# backward twice forward?" (Two products for each one: gradient of the weights and of the input.) *Usual mistake:*
# 2·P for training. That is the forward pass, so inference.
#
# </details>

# %% [markdown]
# ### Which operators calculate, which only carry (MORE, 4 min)
#
# The third column of our counter. A device has two speeds: FLOP/s, and bytes/s between its memory and its cores. An
# H100 does 989 TFLOP/s in bf16 and reads 3.35 TB/s (its data sheet): while it fetches one byte it could do 295
# FLOPs. An operator with fewer FLOPs per byte than that waits for memory.
#
# **Predict.** Which share of the *bytes* is moved by operators that do not multiply matrices at all?
#
# <details><summary>Answer</summary>
#
# About half. An addition reads and writes as many bytes as a small product does, and each of them is a pass through
# memory.
#
# </details>

# %%
# %%ranks
catch_up(globals(), "Counter")

# %%
# %%ranks
model, (x_BT, y_BT) = new_model(), batch()
with Counter() as ours:
    model(x_BT, y_BT)[1].backward()
rows = sorted(ours.rows.items(), key=lambda row: -row[1][2])
moved = sum(row[2] for row in ours.rows.values())
for name, (calls, done, nbytes) in rows[:8]:
    short, per_byte = name.removeprefix("_scaled_dot_product_")[:38], done / max(nbytes, 1)
    say(f"{short:38} {calls:4d} calls {nbytes / 1e6:6.1f} MB {per_byte:6.1f} FLOP/byte")
products = sum(row[2] for name, row in ours.rows.items() if name in Counter.products)
fused = sum(row[2] for name, row in ours.rows.items() if "attention" in name)  # its products we do not see
parts = {"products": products, "fused attention": fused, "the rest": moved - products - fused}
say("bytes: " + ", ".join(f"{name} {100 * part / moved:.0f} %" for name, part in parts.items()))

# %% [markdown]
# Half of the traffic multiplies nothing: additions, norms and GELU are a third, sums and copies the rest. That is
# why compilers fuse them, and why flash attention is fast although it multiplies more: it moves less. The products
# themselves are at 40 FLOP/byte here, in float32; in bf16 the same ones would be at 80, still far below 295. Wider
# matrices do better: FLOPs grow with the cube of the size and bytes with its square.

# %% [markdown]
# ## MFU: how much of the device is used (CORE, 3 min)
#
# **Why.** Tokens per second cannot be compared between models, nor between devices.
# [**MFU**](../assets/glossary.md#mfu), *model FLOPs utilisation*, can: the FLOPs that the *model* needs for those
# tokens, divided by what the device could have done in that time.
#
# ![From the data sheet's peak to MFU: sparse peak, dense peak, the best matrix product, the model](../assets/01_mfu.svg)
#
# Two traps are in the denominator. **Sparse**: for the H100 (SXM) data sheets print 1,979 TFLOP/s in bf16, with a
# star: for matrices in which two of every four numbers are zero. Yours are not. Dense, it is half of it. **Precision**:
# each has a peak of its own.

# %% tags=["nbval-check-output"]
# %%ranks
h100 = {
    kind: peaks.listed_peak("NVIDIA H100 80GB HBM3", 132, kind) for kind in ("fp64", "fp32", "tf32", "bf16")
}
for kind, peak in h100.items():
    say(f"one H100, dense {kind}: {peak / 1e12:5.1f} TFLOP/s, 384 of them: {384 * peak / 1e15:5.1f} PFLOP/s")

# %% [markdown]
# 384 H100 make **380 PFLOP/s** in bf16, not the 760 that you get from the sparse number. (fp64: 67 in the matrix
# units, 34 without them. fp8 and int8: 1,979, dense.)
#
# Now *this* machine. The peak of a CPU depends on its clock, its cores and its vector units, so we measure it: the
# fastest product that PyTorch manages here. Then a training step, with a warm-up, a synchronise and the median.
# Rank 0 works, the others wait at the barrier: one device.
#
# **Predict.** Small matrices, norms, softmax, an optimizer: how many percent of the best product's FLOP/s will the
# training step reach?
#
# <details><summary>Answer</summary>
#
# About half, on one thread of a quiet CPU (the run below says what it was here). The largest weight matrix is 128
# by 512, many operators only carry bytes, and between two of them Python has to launch the next.
#
# </details>

# %%
# %%ranks --timeout 120
model = new_model()
optimizer = torch.optim.AdamW(model.parameters())
samples = []
for step in range(-2, repeats if rank == 0 else -2):  # the first two warm up
    synchronise(device)
    begin = time.perf_counter()
    model(*batch(step + 2))[1].backward()
    optimizer.step()
    optimizer.zero_grad()
    synchronise(device)
    samples += [time.perf_counter() - begin] if step >= 0 else []
peak = timing.gemm_peak(device, torch.float32, peak_s) if rank == 0 else None
dist.barrier()  # here the others wait

# %%
# %%ranks
if rank == 0:
    tok_per_s, per_token = sequences * 64 / statistics.median(samples), flops.flops_per_token(shakespeare)
    done = per_token * tok_per_s
    listed = peaks.dense_peak(device, "fp32")
    say(f"{tok_per_s:,.0f} tokens/s x {per_token / 1e6:.2f} MFLOP = {done / 1e9:.1f} GFLOP/s")
    say(f"best product here {peak / 1e9:.1f} GFLOP/s: {100 * done / peak:.0f} % of it")
    say(f"MFU {100 * done / listed:.1f} %" if listed else "no vendor lists a peak for this device")
    metrics.measured(tok_per_s=tok_per_s, gemm_peak=peak, share_of_gemm_peak=done / peak)
    here = {"tokens/s": (tok_per_s, "", "tok_per_s"), "best product": (peak, "FLOP/s", "gemm_peak")}
    say(recorded_runs.beside("01", here))

# %% [markdown]
# **How to read an MFU.** Ask three questions. *Which peak?* A "50 %" of half the peak is 25 %. *Which FLOPs?*
# Recomputed activations do not count: they are work for the device, and none for the model. (Counted with them it
# is called HFU, *hardware* FLOPs utilisation, and is never lower.) *Which formula?* A well-known estimate, 6·(all
# parameters but positions) + 12NDT, is made for a head that is tied to the embedding. With a head of its own, as
# ours, it counts the embedding as if it were multiplied:

# %% tags=["nbval-check-output"]
# %%ranks
for name in ("1B", "7B", "70B class"):
    ratio = flops.nanogpt_flops_per_token(models[name]) / flops.flops_per_token(models[name])
    say(f"{name:9} the estimate counts {100 * (ratio - 1):.1f} % too much")

# %% [markdown]
# For scale: PaLM reported an MFU of 46.2 % and an HFU of 57.8 % on 6,144 TPU v4 (Chowdhery et al. 2022).

# %% [markdown]
# ### Where the time goes: the profiler (MORE, 3 min)
#
# `torch.profiler` is the library's version of our counter, with a clock. Do the two agree on what was called?

# %%
# %%ranks
catch_up(globals(), "Counter")

# %%
# %%ranks --timeout 120
model = new_model()
with Counter() as ours:  # also the warm-up
    model(*batch())[1].backward()
gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
with profile(activities=[ProfilerActivity.CPU, *gpu], with_flops=True, acc_events=True) as prof:
    model(*batch())[1].backward()
events = {event.key.removeprefix("aten::"): event for event in prof.key_averages()}
whole_us = sum(event.self_cpu_time_total for event in events.values())
if rank == 0:
    for name, event in sorted(events.items(), key=lambda e: -e[1].self_cpu_time_total)[:5]:
        say(f"{name[:44]:44} {100 * event.self_cpu_time_total / whole_us:3.0f} % of the time")
    for name in ("mm", "addmm"):
        say(f"{name}: {events[name].count} calls, {events[name].flops:,} FLOPs; ours {ours.rows[name][:2]}")

# %% [markdown]
# The same calls, the same FLOPs. On a GPU sort by the device's time, and look for the gaps *between* kernels: in
# them the GPU waits for Python.

# %% [markdown]
# ## Activations (CORE, 4 min)
#
# **Why.** So far a model has a size. But the device runs out of memory when you double the *batch*. What stays in
# memory between forward and backward?
#
# ![Forward passes up through a layer and puts aside what backward will need: inputs of the matrices, of the norms, of
# GELU](../assets/01_saved.svg)
#
# Slides have a formula for it, in *values*: 5NBTD (feed-forward) + BNHT² (attention's scores) + 2BVT (logits and
# their gradient) + 2BTD (last norm and head) + 2BT (loss). Handy, and incomplete: query, key, value, attention's
# output and the norms' inputs are missing. But why guess? Autograd tells everything that it keeps, if you ask:
# `saved_tensors_hooks`.


# %%
# %%ranks
def kept_for_backward(call, model):
    """(bytes that autograd keeps while call() runs, what it returns): each memory once, no parameters."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):  # autograd is about to put this tensor aside
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor.detach()  # the tensor itself would hold the graph, and the graph holds it: never freed

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()  # must stay alive: freed memory would be counted twice, or once too few
    return sum(kept.values()), result


# %% [markdown]
# **Predict.** ShakespeareGPT, 8 sequences of 64 tokens. Its parameters are 3.3 MB. How many MB of activations?
#
# <details><summary>Answer</summary>
#
# 17.5 MB: five times the weights, for eight short sequences. A layer keeps 16 vectors of width D per token: the
# inputs of two norms and their outputs (4), query, key and value (3), attention's output (1), and twice 4 in the
# MLP (before and after GELU). 16·D·4 bytes · 4 layers · 512 tokens = 16.8 MB; the rest is the head.
#
# </details>

# %% [markdown]
# As a formula, for any size. Beside the 16 vectors a block keeps a few single numbers per token: for each head the
# logarithm of its softmax's sum, so that flash attention can compute its scores again, and mean and deviation for
# both norms.


# %%
# %%ranks
def predict_kept(config, num_sequences, itemsize=4):
    """Bytes that autograd keeps of our GPT: (by one block, by the last norm, the head and the loss)."""
    D, H, V = config.n_embd, config.n_head, config.vocab_size
    tokens = num_sequences * config.block_size
    block = 16 * D + H + 4
    head = 2 * D + 2 + V  # the last norm as the others; the logarithms of the probabilities
    return itemsize * tokens * block, itemsize * tokens * head


model, (x_BT, y_BT) = new_model(), batch()
ours, _ = kept_for_backward(lambda: model(x_BT, y_BT), model)
block, head = predict_kept(shakespeare, sequences)
predicted = shakespeare.n_layer * block + head
say(f"counted {ours:,} bytes, predicted {predicted:,}, ratio {ours / predicted:.4f}")

# %% [markdown]
# (What is over: the token ids and targets, 8,192 bytes, the positions, 512, and a scalar of the loss, 4.) Now the
# package, which counts and calculates the same, and the two formulas in circulation:

# %%
# %%ranks
library = saved_activations.count_saved(lambda: model(x_BT, y_BT), model)
in_package = sum(activation_memory.saved_bytes(shakespeare, sequences).values())
slides = 4 * sum(activation_memory.slide_values(shakespeare, sequences).values())
published = activation_memory.published_bytes(shakespeare, sequences)
say(f"the package counts {library.bytes:,} and predicts {in_package:,}")
say(f"the slides' formula {slides:,}: counted / formula = {ours / slides:.2f}")
say(f"Korthikanti et al.  {published:,}: counted / formula = {ours / published:.2f}")
metrics.exact(saved_bytes=ours)

# %% [markdown]
# Three formulas, three assumptions. **Ours** is exact, for this model in float32. **The slides'** forgets two
# thirds of each layer, and counts attention scores that flash attention never stores. **Korthikanti et al. 2022**,
# N·B·(34TD + 5HT²) bytes, assume 16 bits and dropout. Take from their 34TD the two masks of dropout, which we have
# not: 32TD, in 16 bits. Ours is 16 *values*: the same 32TD in 16 bits. And 5HT² is what flash attention saves you.
# Where that T² leads, you calculate now.
#
# ### Exercise 1: the 65 billion question (MORE, 5 min)
#
# Does the 70B-class model fit? Write `does_it_fit(config, sequences, bytes_per_parameter, device_bytes, flash)`. It
# returns three numbers: the bytes of weights and all that is kept per parameter; the bytes of activations by the *slides'*
# formula, in bf16, without the T² term if `flash`; and how many devices it takes to hold the first alone.


# %%
# %%ranks
def does_it_fit(config, sequences, bytes_per_parameter, device_bytes, flash=False):
    raise NotImplementedError  # your turn


checks.does_it_fit(does_it_fit, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 1
def does_it_fit(config, sequences, bytes_per_parameter, device_bytes, flash=False):
    B, N, H, D = sequences, config.n_layer, config.n_head, config.n_embd
    T, V = config.block_size, config.vocab_size
    state = config.num_params() * bytes_per_parameter
    values = 5 * N * B * T * D + 2 * B * V * T + 2 * B * T * D + 2 * B * T
    if not flash:
        values += B * N * H * T**2
    return state, 2 * values, ceil(state / device_bytes)


checks.does_it_fit(does_it_fit, ranks, solution=True)

# %% [markdown]
# ### The answer (CORE, 1 min)
#
# **Predict**: 65 billion parameters, a batch of 256 sequences of 4,096 tokens. Which
# is larger, all the bytes per parameter or the activations? By what factor?
#
# <details><summary>Answer</summary>
#
# The activations: 49 times the 16P, 56 times the 14P of the slides.
#
# </details>

# %%
# %%ranks
catch_up(globals(), "does_it_fit")

# %% tags=["nbval-check-output"]
# %%ranks
for P_bytes, what in ((2, "the weights alone, 2P"), (14, "14P"), (16, "16P")):
    say(f"{what}: {does_it_fit(class_70b, 1, P_bytes, 40e9)[0] / 1e9:,.1f} GB")
for name, size in (("A100-40", 40), ("H100-80", 80)):
    gb, gib = (does_it_fit(class_70b, 1, 14, size * unit)[2] for unit in (1e9, 2**30))
    nodes, nodes_gib = ceil(gb / 4), ceil(gib / 4)
    say(f"{name} for 14P: {gb} in decimal GB ({nodes} nodes of 4), {gib} in GiB ({nodes_gib} nodes)")
for B, flash in ((256, False), (256, True), (1, False), (1, True)):
    kept = does_it_fit(class_70b, B, 14, 40e9, flash)[1]
    say(f"activations of {B:3d} sequences{', flash attention' * flash}: {kept / 1e9:,.0f} GB")
scores = activation_memory.slide_values(class_70b, 256)
say(f"T^2 is {100 * scores['attention scores'] / sum(scores.values()):.0f} % of them")

# %% [markdown]
# 914 GB for all that is counted per parameter, at 14P (910 is in circulation: P was rounded to 65 billion first),
# and **51 TB** of activations. So with this batch *memory is activations, not weights*. Even one sequence needs 200
# GB. (The slides' formula forgets two thirds of a layer, remember: by our 16 vectors flash attention leaves 22 TB,
# not 7.1, and 86 GB for one sequence, not 28.) Three cures, in the order in which people take them: flash attention
# removes the T² (86 % of it); a smaller batch, many times over, is **accumulation**; and **checkpointing** forgets
# activations and computes them again.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: activations</summary>
#
# Have them say aloud what `pack` is handed, and when. The usual surprise: a
# residual addition keeps nothing, a GELU keeps its input. If nobody attempts exercise 1, run the solution and
# discuss the last cell: it is the most quoted result of the lesson.
#
# </details>

# %% [markdown]
# ## Checkpointing: forget, and compute again (CORE, 3 min)
#
# **Why.** A block of ours keeps 16 vectors per token. From its *input*, one vector, all 16 can be computed again.
# [**Activation checkpointing**](../assets/glossary.md#activation-checkpointing) keeps that one, and runs the
# block's forward a second time when backward gets there (Chen et al. 2016).
#
# ![Memory over a step, with and without checkpointing: without, activations pile up until backward; with, only the blocks' inputs
# pile up, and one block at a time comes back](../assets/01_recompute.svg)
#
# From scratch it is one function with a backward of its own:


# %%
# %%ranks
class Recompute(torch.autograd.Function):
    """y = block(x) that keeps x alone. (Without dropout: the second forward would draw other numbers.)"""

    @staticmethod
    def forward(ctx, block, x_BTD):
        ctx.block = block
        ctx.save_for_backward(x_BTD)
        return block(x_BTD)  # autograd does not look into a Function, so nothing else is kept

    @staticmethod
    def backward(ctx, dy_BTD):
        x_BTD = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y_BTD = ctx.block(x_BTD)  # once more, this time with everything kept
        y_BTD.backward(dy_BTD)  # fills the gradients of the block's parameters, and of x
        return None, x_BTD.grad


def forward_with(model, through, ids_BT, targets_BT):
    """The loss of a GPT whose blocks are run by through(i, block, x)."""
    h_BTD = model.tokens(ids_BT) + model.positions(torch.arange(ids_BT.shape[1], device=ids_BT.device))
    for i, block in enumerate(model.blocks):
        h_BTD = through(i, block, h_BTD)
    return F.cross_entropy(model.head(model.norm(h_BTD)).flatten(0, 1), targets_BT.flatten())


# %% [markdown]
# **Predict.** How many FLOPs does a step take now, compared with 3 forward passes (1 forward + 2 backward)? Which
# share of the bytes stays?
#
# <details><summary>Answer</summary>
#
# One forward pass of the blocks more: 4 instead of 3, **a third more**, a little less because the head is not
# repeated. Of a block's 16 vectors one stays, and in our model the head's part on top.
#
# </details>

# %%
# %%ranks
catch_up(globals(), "kept_for_backward", "Counter")

# %%
# %%ranks
ways = {
    "keep everything": lambda i, block, x_BTD: block(x_BTD),
    "ours": lambda i, block, x_BTD: Recompute.apply(block, x_BTD),
    "the library": lambda i, block, x_BTD: checkpoint(block, x_BTD, use_reentrant=False),
}
gradients = {}
for name, through in ways.items():
    model = new_model(torch.float64)
    with sdpa_kernel(SDPBackend.MATH), Counter() as counter:
        kept, loss = kept_for_backward(lambda m=model, t=through: forward_with(m, t, *batch()), model)
        loss.backward()
    gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters()])
    apart = (gradients[name] - gradients["keep everything"]).abs().max().item()
    assert apart < 1e-10, f"{name}: gradients are {apart:.1e} off"
    say(f"{name:16} {counter.total() / 1e9:.2f} GFLOP, keeps {kept / 1e6:5.1f} MB; gradients {apart} apart")
metrics.exact(recompute_gradient=fingerprint([gradients["ours"]]))

# %% [markdown]
# The same gradients to the last bit, a third more FLOPs, a fraction of the bytes. (In float64, and with plain
# attention, whose T² scores are part of what is kept.) The library needs a little less: it stops the second forward
# as soon as the last tensor that backward wants is there, so the block's last product is not repeated. And it
# restores the random numbers, so that dropout drops the same.
#
# You need not recompute *every* block. A sweep: each rank takes another number of them, and counts. (In float32
# with fused attention, whose own products the counter does not see.)

# %%
# %%ranks
catch_up(globals(), "kept_for_backward", "Counter", "Recompute", "forward_with")


# %%
# %%ranks
def recompute_some(k):
    """(bytes kept, FLOPs of a step) of ShakespeareGPT that recomputes its first k blocks."""
    model = new_model()

    def through(i, block, x_BTD):
        return Recompute.apply(block, x_BTD) if i < k else block(x_BTD)

    with Counter() as counter:
        kept, loss = kept_for_backward(lambda: forward_with(model, through, *batch()), model)
        loss.backward()
    return kept, counter.total()


swept = share_out(recompute_some, range(5))
D, tokens = shakespeare.n_embd, sequences * 64
layer_bytes = (swept[0][0] - swept[4][0]) / 4
for k, (kept, done) in enumerate(swept):
    say(f"{k} of 4 blocks recomputed: keeps {kept / 1e6:5.2f} MB, {done / 1e9:.3f} GFLOP")
vectors = layer_bytes / (4 * D * tokens)
say(f"each block saves {vectors:.2f} vectors per token: its 16, less the input")
metrics.exact(recompute_sweep=swept)

# %% [markdown]
# A straight line: equal blocks are equal bargains, and you stop when it fits. (The 0.06 are the block's few single
# numbers per token, (H + 4)/D.) Exercise 2 has unequal ones.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: checkpointing</summary>
#
# *Ask:* "What is the least that one could keep?" (Only every k-th input;
# then a stretch of k blocks comes back at once: Chen's square root of N.) *Usual mistake:* expecting parameters or
# gradients to shrink.
#
# </details>

# %% [markdown]
# ## Accumulation: a large batch in small pieces (CORE, 2 min)
#
# **Why.** Activations grow with the sequences that are in memory *at once*. Gradients add up in `p.grad`, so the
# batch can come in pieces: [**accumulation**](../assets/glossary.md#accumulation). Each piece, a
# [*micro-batch*](../assets/glossary.md#micro-batch), is forgotten before the next one comes.
#
# **Predict.** Four micro-batches of a quarter each. What happens to the activations, to the FLOPs, to the gradient?
#
# <details><summary>Answer</summary>
#
# A quarter; the same; the same.
#
# </details>

# %%
# %%ranks
catch_up(globals(), "kept_for_backward", "Counter")

# %%
# %%ranks
whole, pieces = new_model(torch.float64), new_model(torch.float64)
x_BT, y_BT = batch()
with Counter() as at_once:
    kept, (_, loss) = kept_for_backward(lambda: whole(x_BT, y_BT), whole)
    loss.backward()
with Counter() as in_pieces:
    for x_bT, y_bT in zip(x_BT.chunk(4), y_BT.chunk(4), strict=True):
        kept_piece, (_, loss) = kept_for_backward(lambda x=x_bT, y=y_bT: pieces(x, y), pieces)
        (loss / 4).backward()  # a mean of 4 equal means; forget the 4, and Adam will hide it
for a, b in zip(whole.parameters(), pieces.parameters(), strict=True):
    assert (a.grad - b.grad).abs().max() < 1e-10
say(f"activations: {kept / 1e6:.2f} MB at once, {kept_piece / 1e6:.2f} MB a piece, 1/{kept / kept_piece:.2f}")
say(f"FLOPs: {at_once.total():,} at once, {in_pieces.total():,} in pieces; gradients equal to 1e-10")

# %% [markdown]
# A quarter of the activations, the same FLOPs, the same gradient. The price is size: small matrices use a device
# less well. And a condition: the pieces must be *equal*. Exercise 3 is the case where they are not.

# %% [markdown]
# ## Sixteen bits (CORE, 3 min)
#
# **Why.** Half the bytes, and on a GPU with matrix units many times the FLOP/s. The price is precision, or range,
# and you choose which.
#
# ![The bits of fp32, bf16 and fp16: sign, exponent, fraction; bf16 has the exponent of fp32, fp16 more
# fraction](../assets/01_floats.svg)
#
# **bf16** is float32 with the last 16 bits cut off: the same range, 8 significant bits. **fp16** has 11 significant
# bits and a narrow range: it ends at 65,504, and below 6·10⁻⁵ it loses digits until it is 0 below 3·10⁻⁸. Set bits
# yourself:

# %% tags=["active-ipynb"]
# from manyhands.widgets.floats import show_floats
#
# show_floats(0.1)

# %% tags=["nbval-check-output"]
# %%ranks
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    info = torch.finfo(dtype)
    subnormal = info.smallest_normal * info.eps
    name, normal = str(dtype).removeprefix("torch."), info.smallest_normal
    say(f"{name:9} largest {info.max:.3g}, smallest normal {normal:.3g}, smallest of all {subnormal:.3g}")
for value in (1.001, 70_000.0, 1e-8):
    halves = [torch.tensor(value).to(dtype).item() for dtype in (torch.bfloat16, torch.float16)]
    say(f"{value:g} becomes {halves[0]:g} in bf16 and {halves[1]:g} in fp16")

# %% [markdown]
# **Predict.** A weight is 1.0 and the optimizer adds 0.001 to it, a hundred times. What is it afterwards, in bf16?
#
# <details><summary>Answer</summary>
#
# 1.0. Each step is rounded away, before the next one comes.
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
weight, master = torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0)
for _ in range(100):
    weight += 0.001
    master += 0.001
say(f"in bf16 {weight.item():g}; the float32 master is {master.item():.3f}")

# %% [markdown]
# It never moved: the next bf16 number after 1 is 1.0078. Hence the master weights.
#
# [**Mixed precision**](../assets/glossary.md#mixed-precision) by `torch.autocast` is another way to the same end.
# Weights stay in float32; *for matrix products* weights and inputs are cast to 16 bits. On a GPU norms, softmax and
# loss are calculated in float32; a CPU's autocast leaves softmax and norms in the type that they are handed. By hand
# it is a line:


# %%
# %%ranks
def cast_by_hand(layers, x, dtype=torch.bfloat16):
    """The layers in mixed precision: linear maps in `dtype`, everything else as it comes."""
    for layer in layers:
        if isinstance(layer, nn.Linear):
            x = F.linear(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))
        else:
            x = layer(x)
    return x


torch.manual_seed(0)
mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
x_B64 = torch.randn(32, 64, device=device)
with torch.autocast(device.type, dtype=torch.bfloat16):
    library = mlp(x_B64)
ours = cast_by_hand(mlp, x_B64)
error = ((ours - mlp(x_B64)).abs().max() / mlp(x_B64).abs().max()).item()
say(f"by hand = autocast: {torch.equal(ours, library)}; result {ours.dtype}, weights {mlp[0].weight.dtype}")
say(f"largest error against float32: {100 * error:.1f} %")

# %% [markdown]
# And the GPT: what does autocast do to its activations? They are in 16 bits now, so half? Count.

# %%
# %%ranks
catch_up(globals(), "kept_for_backward")

# %%
# %%ranks
model, (x_BT, y_BT) = new_model(), batch()
in_fp32, (_, loss_fp32) = kept_for_backward(lambda: model(x_BT, y_BT), model)
with torch.autocast(device.type, dtype=torch.bfloat16):
    in_bf16, (_, loss_bf16) = kept_for_backward(lambda: model(x_BT, y_BT), model)
cast = 2 * sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
say(f"kept for backward: {in_fp32 / 1e6:.2f} MB in fp32, {in_bf16 / 1e6:.2f} MB under autocast")
say(f"that is {in_bf16 / in_fp32:.2f} of it; {cast / 1e6:.2f} MB are weights that were cast")
say(f"loss {loss_fp32.item():.4f} and {loss_bf16.item():.4f}")
metrics.exact(autocast_saved_bytes=in_bf16)

# %% [markdown]
# Two thirds, not half. The stream between the blocks (the x to which every block adds) stays in float32, as do the
# norms' inputs. And autocast keeps what it has cast: 2 bytes for each weight of a matrix until backward is through,
# the 18 bytes per parameter of the table.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: sixteen bits</summary>
#
# The widget is the fun part; let them find 1.0078. *Usual mistake:* "autocast
# halves my memory": it does not touch weights, gradients and optimizer. *Ask:* "Why is fp16 in the zoo of this
# lesson, and bf16 not?"
#
# </details>

# %% [markdown]
# ### Loss scaling, for fp16 (MORE, 6 min)
#
# fp16 has no room below. Take the gradient of the 70B-class model's logits, for one wrong word out of 50,280 in a
# batch of 256·4,096 tokens: before training, when every word is equally likely, it is about 1/50,280/1,048,576 =
# 2·10⁻¹¹. In fp16 that is 0. Only the right words' own gradients, 10⁻⁶, get through, with about four of their eleven
# significant bits.
#
# [**Loss scaling**](../assets/glossary.md#loss-scaling): multiply the *loss* by a large number, and all gradients
# are that much larger; divide them by it before the update, in float32. If it was too much, the gradients are
# infinite: skip the step and halve the number. If all has been well for a while, double it.


# %%
# %%ranks
class LossScaler:
    """(loss * scaler.scale).backward(); scaler.step(optimizer)"""

    def __init__(self, scale=2.0**16, growth_interval=2000):
        self.scale, self.growth_interval, self.good_steps = scale, growth_interval, 0

    def step(self, optimizer):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        for gradient in gradients:
            gradient /= self.scale
        if not all(gradient.isfinite().all() for gradient in gradients):
            self.scale, self.good_steps = self.scale / 2, 0  # and no update
            return
        optimizer.step()
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0


# %% [markdown]
# First, what is lost without it. ShakespeareGPT in fp16, its loss divided by 4,096, as if the mean ran over 4,096
# times as many tokens. How many gradients are exactly 0?


# %%
# %%ranks
def zeros_in_fp16(scale):
    """Percent of ShakespeareGPT's gradients that are 0 in fp16, and whether all are finite."""
    model = new_model()
    with torch.autocast(device.type, dtype=torch.float16):
        _, loss = model(*batch())
    (loss / 4096 * scale).backward()
    gradient_P = torch.cat([p.grad.flatten() for p in model.parameters()])
    return 100 * (gradient_P == 0).float().mean().item(), bool(gradient_P.isfinite().all())


scales = [1.0, 2.0**8, 2.0**16, 2.0**40]
for scale, (zeros, finite) in zip(scales, share_out(zeros_in_fp16, scales), strict=True):
    infinite = "" if finite else ", and some are infinite"
    say(f"loss times 2^{math.log2(scale):.0f}: {zeros:4.1f} % of the gradients are 0{infinite}")
model = new_model()
model(*batch())[1].backward()
zeros = sum((p.grad == 0).sum().item() for p in model.parameters())
say(f"all in float32: {100 * zeros / shakespeare.num_params():.1f} %")

# %% [markdown]
# Of the 0.3 % at 2¹⁶ nearly all are true zeros, as the last line says: symbols that do not occur in this batch have
# no gradient in float32 either. So 2¹⁶ lost next to nothing, and 2⁴⁰ was too much.
#
# Now ours against the library's `torch.amp.GradScaler`, on a small problem that begins with a scale that is too
# large. The same scales, and the same weights to the last bit:


# %%
# %%ranks
def train_in_fp16(library):
    """The scales and last weights of 12 steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    x_B8, optimizer = torch.randn(64, 8).to(device), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, 2.0**18, growth_interval=4)
    if not library:
        scaler = LossScaler(2.0**18, growth_interval=4)
    scales = []
    for _ in range(12):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            guess_B1 = model(x_B8)
        loss = F.mse_loss(guess_B1.float(), x_B8[:, :1])
        (scaler.scale(loss) if library else loss * scaler.scale).backward()
        scaler.step(optimizer)
        if library:
            scaler.update()
        scales.append(scaler.get_scale() if library else scaler.scale)
    return scales, torch.cat([p.detach().flatten() for p in model.parameters()])


# %%
# %%ranks
(our_scales, ours_P), (scales, library_P) = train_in_fp16(False), train_in_fp16(True)
say("log2 of the scale: " + " ".join(f"{math.log2(scale):.0f}" for scale in our_scales))
say(f"as the library's: {our_scales == scales}, the same weights: {torch.equal(ours_P, library_P)}")

# %% [markdown]
# It fell from 2¹⁸ until the gradients were finite, and after four good steps it tries the next larger one. (2¹⁷ was
# too much at first and is not later: the loss has fallen, and the gradients with it.) bf16 needs none of this: its
# range is float32's. That is why nearly everybody trains in bf16 now.

# %% [markdown]
# ## Experiment: a training step, byte by byte (CORE, 2 min)
#
# All four kinds in one picture. `MemoryTimeline` follows every tensor of a step, from its birth to its end. It is a
# `TorchDispatchMode` like our counter, and it slows the step down, so the step is not timed.
#
# Four cases for four ranks: a plain step, twice the batch, four micro-batches, and checkpointing. Each rank
# predicts first, by nothing but the formulas of this lesson.
#
# **Predict.** Which of the kinds differ between the four cases? When in the step is the sum largest? And what comes
# and goes in the optimizer's turn?
#
# <details><summary>Answer</summary>
#
# Only activations. In a plain step the sum is largest when backward has just begun: all activations are there, and
# the first gradients of activations on top. With checkpointing it is largest in the last hump, because gradients
# have piled up below. In the optimizer's turn nothing stays: each update needs a copy or two of one tensor.
#
# </details>

# %%
# %%ranks
catch_up(globals(), "predict_kept", "Recompute", "forward_with")


# %%
# %%ranks
def predict_bytes(case):
    """The most bytes of each kind during a step of ShakespeareGPT with AdamW in float32, by formula."""
    P, N = shakespeare.num_params(), shakespeare.n_layer
    at_once = {"twice the batch": 2 * sequences, "4 micro-batches": sequences // 4}.get(case, sequences)
    block, head = predict_kept(shakespeare, at_once)
    stream = 4 * at_once * 64 * shakespeare.n_embd  # the input of a block: 1 of its 16 vectors
    kept = N * stream + block - stream if case == "checkpointing" else N * block + head
    return {"parameters": 4 * P, "gradients": 4 * P, "optimizer": 8 * P, "activations": kept}


# %%
# %%ranks
def step_of(case, model, optimizer, x_BT, y_BT, seen):
    """One training step in three phases."""
    pieces = 4 if case == "4 micro-batches" else 1
    for x_bT, y_bT in zip(x_BT.chunk(pieces), y_BT.chunk(pieces), strict=True):
        with seen.phase("forward"):
            if case == "checkpointing":
                loss = forward_with(model, lambda i, block, h_BTD: Recompute.apply(block, h_BTD), x_bT, y_bT)
            else:
                _, loss = model(x_bT, y_bT)
        with seen.phase("backward"):
            (loss / pieces).backward()
    with seen.phase("optimizer"):
        optimizer.step()
        optimizer.zero_grad()


# %%
# %%ranks
def record(case):
    """{"samples", "highest": {kind: bytes}} of the second step: the first one makes the optimizer's state."""
    model, (x_BT, y_BT) = new_model(), batch()
    if case == "twice the batch":
        x_BT, y_BT = torch.cat([x_BT, x_BT]), torch.cat([y_BT, y_BT])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with MemoryTimeline(model, optimizer) as seen:
            step_of(case, model, optimizer, x_BT, y_BT, seen)
    return {"samples": seen.samples, "highest": {kind: seen.highest(kind) for kind in predict_bytes(case)}}


cases = ["plain", "twice the batch", "4 micro-batches", "checkpointing"]
recorded_steps = dict(zip(cases, share_out(record, cases), strict=True))

# %% [markdown]
# What you should see: a staircase up in forward, down in backward while the gradients come up beside it, and a flat
# end. Dashed lines are predictions. With checkpointing the staircase is low, and backward has one hump for each
# block.

# %%
# %%ranks
if rank == 0:
    highest = max(sample.total for sample in recorded_steps["plain"]["samples"])  # one scale for both
    for case in ("plain", "checkpointing"):
        samples = recorded_steps[case]["samples"]
        figure = memory_stack(samples, f"one step, {case}", predict_bytes(case), highest=highest)
        alt = "parameters and optimizer stay, activations rise and fall, gradients rise in backward"
        show(figure, f"memory_{case}", f"{alt} ({case})")

# %%
# %%ranks
kinds, worst = ["parameters", "gradients", "optimizer", "activations"], {}
say(f"{'MB (ratio)':16}" + "".join(f"{kind:>17}" for kind in kinds))
for case, step in recorded_steps.items():
    predicted = predict_bytes(case)
    ratios = {kind: step["highest"][kind] / predicted[kind] for kind in kinds}
    say(f"{case:16}" + "".join(f"{step['highest'][kind] / 1e6:8.2f} ({ratios[kind]:.4f})" for kind in kinds))
    worst[case] = max(abs(ratio - 1) for ratio in ratios.values())
metrics.exact(highest_bytes={case: step["highest"] for case, step in recorded_steps.items()})
metrics.measured(worst_residual=worst)

# %% [markdown]
# **The residual.** Parameters, gradients and optimizer are exact, but for the optimizer's 50 step counts.
# Activations are right to one part in ten thousand: what the formula leaves out is the loss's own scalar and the
# positions. What it does *not* predict is the part of the stack called "other": results that live for one operator,
# and the gradients of activations on their way down. They are what makes the peak lie in *backward*, above the
# highest dashed line. An allocator adds its own on top, so leave it some room.
#
# Two things to take from the four cases. Only activations differ: twice the batch doubles them, four micro-batches
# quarter them, checkpointing leaves 29 % (four inputs, and the other 15 vectors of the one block that has come back).
# And with the 13 MB that are counted per parameter nothing of this lesson helps, which is where lesson 06 begins.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the experiment</summary>
#
# Ask where the peak is before you show the picture; most say "in the
# optimizer". Then ask what each strategy of the course will cut: data parallel nothing, ZeRO-1 the optimizer,
# ZeRO-2 the gradients, ZeRO-3 the parameters, tensor parallel everything. *When late:* only the plain picture.
#
# </details>

# %% [markdown]
# ## Exercises (MORE, 14 min)
#
# Exercise 1 was the 65 billion question. Each check names the first fault that it finds.
#
# ### Exercise 2: which pieces to recompute
#
# You have a budget of bytes to be kept between forward and backward, and pieces of a network: each has a `name`,
# the `kept` bytes if it is run normally, the `input` bytes that it keeps if it is recomputed, and the `flops` that
# recomputing it costs. Write `choose(pieces, budget)`: the set of names to recompute so that everything fits into
# the budget, **for the fewest FLOPs**; None if even recomputing all of them does not fit. There are at most 12
# pieces. (A greedy choice is not always the cheapest.)


# %%
# %%ranks
def choose(pieces, budget):
    raise NotImplementedError  # your turn


checks.recompute_trade_off(choose, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 2
def choose(pieces, budget):
    best, best_flops = None, math.inf
    for again in itertools.product([False, True], repeat=len(pieces)):  # at most 2^12 choices: try them all
        kept = sum(piece.input if a else piece.kept for piece, a in zip(pieces, again, strict=True))
        cost = sum(piece.flops for piece, a in zip(pieces, again, strict=True) if a)
        if kept <= budget and cost < best_flops:
            best, best_flops = {piece.name for piece, a in zip(pieces, again, strict=True) if a}, cost
    return best


checks.recompute_trade_off(choose, ranks, solution=True)

# %% [markdown]
# Put it to work. A block has two halves, attention and MLP. By FLOPs per byte, which of them is the better bargain?
# Measure both halves of a block of ShakespeareGPT, and let your function choose for half of the bytes.

# %%
# %%ranks
catch_up(globals(), "kept_for_backward", "Counter", "choose")

# %%
# %%ranks
block, x_BTD = new_model().blocks[0], torch.randn(sequences, 64, 128, device=device, requires_grad=True)
halves = {
    "attention": lambda: block.attention(block.norm_1(x_BTD)),
    "mlp": lambda: block.mlp(block.norm_2(x_BTD)),
}
pieces = []
for name, half in halves.items():
    kept, result = kept_for_backward(half, block)
    with sdpa_kernel(SDPBackend.MATH), Counter() as counter:
        half()
    saved = kept - x_BTD.nbytes  # recomputed, a half still keeps its input
    price = counter.total() / saved
    say(f"{name:9} keeps {kept / 1e6:.2f} MB; to save {saved / 1e6:.2f} costs {price:.0f} FLOPs a byte")
    for i in range(4):
        pieces.append(checks.Piece(f"{name} {i}", kept, x_BTD.nbytes, counter.total()))
everything = sum(piece.kept for piece in pieces)
say(f"to keep half of {everything / 1e6:.1f} MB, recompute {sorted(choose(pieces, everything / 2))}")

# %% [markdown]
# The MLP is the slightly better bargain: with flash attention nothing is cheap at this size. Before flash attention
# one part was: the T² scores were many bytes for few FLOPs, and recomputing just them is the *selective*
# recomputation of Korthikanti et al. 2022. (`train.py` has `--parallel.recompute selective`: it keeps products and
# repeats norms and GELU.)
#
# ### Exercise 3: accumulation over uneven token counts
#
# Real batches have padding. A target of -100 marks a position that does not count. `micro_batches` is a list of (ids
# [b, T], targets [b, T]), and `model(ids)` returns logits [b, T, V]. Write `accumulate(model, micro_batches)`, so
# that in the end each `p.grad` is that of **the mean over all counted tokens of the whole batch**. Only one
# micro-batch may be in memory at a time, and each goes through the model once. A micro-batch may be nothing but
# padding.


# %%
# %%ranks
def accumulate(model, micro_batches):
    raise NotImplementedError  # your turn


checks.uneven_accumulation(accumulate, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 3
def accumulate(model, micro_batches):
    counted = sum((targets != -100).sum() for _, targets in micro_batches)
    for ids, targets in micro_batches:
        logits = model(ids).flatten(0, 1)
        total = F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")
        (total / counted).backward()  # a sum over few tokens weighs little, as it should


checks.uneven_accumulation(accumulate, ranks, solution=True)

# %% [markdown]
# The mean of means was in a much-used trainer until October 2024, when users compared accumulation with the full
# batch ([transformers#34191](https://github.com/huggingface/transformers/pull/34191)). Lesson 05 meets it again,
# between ranks.

# %% [markdown]
# ## A bug from the zoo (CORE, 2 min)
#
# From a workshop's trainer, in our words. The log below is that of a run that somebody started with `dtype="bf16"`.
# The loss falls. **What is wrong, and what does it cost?** Read the code and the log before you open the answer.


# %%
# %%ranks
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.float16, "tf32": torch.float32}


def train(dtype, num_steps=4, head_times=1.0):
    """The first losses under autocast, as this trainer has them."""
    model, used = new_model(), PRECISIONS[dtype]
    with torch.no_grad():
        model.head.weight *= head_times
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    say(f"precision: {dtype}; autocast to {used}")
    for step in range(num_steps):
        with torch.autocast(device.type, dtype=used):
            _, loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.3f}")
    say(f"losses: {' '.join(losses)}")


if rank == 0:
    train("bf16")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The log's first line says it: *precision: bf16; autocast to torch.float16*. One entry of the table maps to the
# wrong type. Nobody read the line, because the loss fell. What it costs: fp16 ends at 65,504, and there is no loss
# scaling, because "bf16 needs none". Gradients below 3·10⁻⁸ are lost without a word, and one large activation ends
# the run. [The transcript with that line](https://github.com/saforem2/personal_site/blob/82205852654c9b504ce732a0aae2e358e9b0bf2d/docs/talks/alcf-hpc-workshop-2024/alcf-hpc-workshop-2024.md)
# is a workshop's own.
#
# </details>
#
# Do not trust a name, ask a tensor. And see what is at stake: the same training with a head whose weights are a
# million times larger, in fp16, and then with the table mended: fp16 gives nan at once, and from nan weights no run
# comes back; bf16 gives an absurd loss, but a number. (Such logits are absurd. But a long run needs only one of
# them.)

# %%
# %%ranks
if rank == 0:
    with torch.autocast(device.type, dtype=PRECISIONS["bf16"]):
        logits_BTV, _ = new_model()(batch()[0])
    say(f"the logits are {logits_BTV.dtype}")
    train("bf16", 2, head_times=1e6)
    PRECISIONS["bf16"] = torch.bfloat16  # mended
    train("bf16", 2, head_times=1e6)

# %% [markdown]
# The rule to take home: **print what is used, not what was asked for**, and assert it once, on a real tensor.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# Show the log for ten seconds, hide it, and ask what the precision was. Everybody
# says bf16. That is the point. Other members of the family: a batch size per device that is reported as the global
# one; a learning rate that the scheduler has overwritten before the first step.
#
# </details>

# %% [markdown]
# ## On the cluster
#
# ```bash
# python scripts/01_one_device.py --sequences 64 --repeats 50     # one process, one GPU
# python scripts/train.py --preset olmo-7b --ranks 64 --dry-run   # what each of 64 ranks keeps
# ```
#
# **What changes on GPUs.** The formulas do not. But AdamW updates all tensors at once there (`foreach`), and needs
# about 4 bytes per parameter more for the moment. Flash attention wants 16 bits: in float32 PyTorch takes another
# fused kernel, which keeps its sums padded, a few more bytes per head and token. The share of the peak falls at
# first, because ShakespeareGPT is far too small for a GPU: its matrices are done before Python has launched the
# next one. Wider models do better.
#
# **What to look for.** `torch.cuda.max_memory_allocated()` is what your tensors had at the most; compare it with
# the peak of the experiment. `nvidia-smi` shows more: what PyTorch's allocator keeps for later, and CUDA itself. If
# a run ends with "out of memory" while much is "reserved but unallocated", memory is in pieces, and
# `PYTORCH_ALLOC_CONF=expandable_segments:True` helps. And `torch.get_float32_matmul_precision()`: "highest" means
# that float32 products do not use TF32, and MFU must be divided by another peak.

# %% [markdown]
# ## Recap
#
# 1. P = N(12D² + 10D) + the ends; 12ND² is what you should remember, and 6 FLOPs for each parameter and token.
# 2. Training keeps 16 bytes per parameter, in float32 and in mixed precision alike; 14 is what slides say.
# 3. Activations grow with tokens, 16 vectors per layer here; with 256 long sequences they exceed everything else.
# 4. Time buys memory: checkpointing costs a third more FLOPs, accumulation costs small matrices.
# 5. Count, then trust the formula: bytes by hooks, FLOPs by operators, precision by asking a tensor.
#
# ## Further reading
#
# - Korthikanti et al. 2022, [Reducing activation recomputation in large transformer models](https://arxiv.org/abs/2205.05198): where
#   34TD + 5HT² comes from, term by term.
# - Rajbhandari et al. 2020, [ZeRO](https://arxiv.org/abs/1910.02054), section 3: where did all the memory go?
# - Chowdhery et al. 2022, [PaLM](https://arxiv.org/abs/2204.02311), appendix B: MFU, defined.
# - Chen et al. 2016, [Training deep nets with sublinear memory cost](https://arxiv.org/abs/1604.06174): checkpointing.
# - Micikevicius et al. 2018, [Mixed precision training](https://arxiv.org/abs/1710.03740): master weights and loss scaling.
# - Yamazaki et al. 2019, [Yet another accelerated SGD](https://arxiv.org/abs/1903.12650), and Goyal et al. 2017,
#   [Accurate, large minibatch SGD](https://arxiv.org/abs/1706.02677): the table at the beginning.

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
