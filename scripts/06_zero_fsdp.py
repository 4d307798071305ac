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
# # 06 ZeRO and FSDP: shard what you do not need
#
# **45 minutes** for the sections marked CORE, 87 with those marked MORE.
#
# After this lesson **you can**
# - say what is sharded, when it is whole, and what that costs in messages;
# - build the three stages of ZeRO: optimizer, gradients, parameters;
# - use `fully_shard`, and prove that it computes what one process computes, clipping included;
# - predict the bytes that a rank holds and hands over, for any way to wrap a model;
# - find the rank-local number that somebody took for the global one.
#
# **You need** data parallel training ([lesson 03](03_data_parallel.ipynb)) and the
# [all-gather](../assets/glossary.md#all-gather) and [reduce-scatter](../assets/glossary.md#reduce-scatter) of
# [lesson 02](02_collectives.ipynb). In two lines: under *data parallel* every rank holds the whole model and
# averages gradients by an all-reduce; an all-reduce is a reduce-scatter (each rank gets its part of the sum) and
# then an all-gather (all parts to all).
#
# **New here:** [ZeRO](../assets/glossary.md#zero), [shard](../assets/glossary.md#shard),
# [FSDP](../assets/glossary.md#fsdp), [unit](../assets/glossary.md#unit), [DTensor](../assets/glossary.md#dtensor),
# [reshard](../assets/glossary.md#reshard), [global norm](../assets/glossary.md#global-norm),
# [HSDP](../assets/glossary.md#hsdp), [meta device](../assets/glossary.md#meta-device),
# [offload](../assets/glossary.md#offload).
#
# The same file is a script:
#
# ```bash
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/06_zero_fsdp.py --wrapping block_group:2
# mpiexec -n 4 python scripts/06_zero_fsdp.py
# python scripts/06_zero_fsdp.py                   # a world of one: the same path, the same losses
# ```

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 1, warm-up 5, who needs what 5, stages 1 and 2
# 8, stage 3 8, clipping 4, the library 5, wrapping 2, experiment 4, zoo 3.
#
# *Say:* one question carries the lesson: "who needs this number, and when?" Moments: one rank, once per step.
# Gradients: one rank, after backward. Weights: everybody, but one layer at a time. Each stage of ZeRO is one of
# these three answers.
#
# *Three usual mistakes:* thinking that FSDP splits the *computation* of a layer (that is lesson 07; here every rank
# computes whole layers, on its own rows); thinking that gradients are reduced after backward; mixing up sharding
# and offload.
#
# *When late:* skip ZeRO-2's cell, show the storage figure instead of its cell, keep the three ways and the zoo.
#
# *Ask the room:* "64 GPUs, each holds a 64th of the model. How many whole copies of a layer exist while that layer
# computes?" (64. Sharding saves memory at rest.)
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
layers = 4  # layers of the GPT, 2 to 12
global_batch = 0  # sequences per step, all ranks together; 0: 12, or more where it does not split, at least 0
wrapping = "block"  # how you wrap the model: block, block_and_size, block_group:2, size:100000
steps = 5  # steps of SGD that are compared, at least 1

# %% [markdown]
# ## Start (CORE, 1 min)
#
# The first cell starts four ranks behind this notebook; cells that begin with `%%ranks` run on all of them.
#
# **Catching up.** Each section needs only the cells of this one, and then its own. Where it uses a function of an
# earlier section, a cell with `catch_up(...)` defines it, unless you have it already.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("06_zero_fsdp", globals())

# %%
# %%ranks
import functools
import math
import shlex
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands import Metrics, catch_up, fingerprint, join, leave, refuse, say, show
from manyhands.checks import zero_fsdp as checks
from manyhands.config.layout import resolve_layout
from manyhands.config.options import OptionError, model_config, read_options
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.figures.gantt import gantt
from manyhands.figures.memory_stack import memory_stack
from manyhands.gpt.model import GPT, GPTConfig
from manyhands.measure import wire
from manyhands.measure.tensor_bytes import tensor_bytes
from manyhands.measure.memory_timeline import MemoryTimeline
from manyhands.measure.virtual_network import Link, VirtualNetwork
from manyhands.parallel.fsdp import units
from manyhands.parallel.optimizer import build_optimizer
from manyhands.parallel.parallelize import parallelize
from manyhands.predict import bytes_per_parameter, rank_memory, step_traffic
from manyhands.runs import recorded_runs
from matplotlib.figure import Figure
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

# %% [markdown]
# The ranks join. A batch that does not come out even is refused at once, on every rank, so that none is left waiting.

# %%
# %%ranks
ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
if global_batch == 0:
    global_batch = -(-12 // world_size) * world_size
if global_batch % world_size:
    refuse(
        f"global_batch={global_batch} does not split over {world_size} ranks; use a multiple of {world_size}"
    )
# %% [markdown]
# Two things that the library will want: who shares (all ranks), and which optimizer.

# %%
# %%ranks
mesh = init_device_mesh(device.type, (world_size,))  # for the library: all ranks share
# it warns of operations in place on what a sharded model returns; there are none
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
adamw = functools.partial(torch.optim.AdamW, lr=1e-3)

# %% [markdown]
# The model is lesson 03's **ShakespeareGPT**: 64 characters in, the next one out. `batch(step)` is this rank's
# share of a [global batch](../assets/glossary.md#global-batch) that is the same for any number of ranks.
#
# Letters at the end of a name are its shape: `P` numbers in a row, `p` this rank's share of them, a P/n; `B`
# sequences in the global batch, `b` this rank's share, `T` positions.

# %%
# %%ranks
corpus = load_corpus(ranks)
config = GPTConfig(vocab_size=len(corpus.symbols), n_layer=layers)
given = {"layers": layers, "global_batch": global_batch, "wrapping": wrapping, "steps": steps}
metrics = Metrics(ranks, corpus, given)
P = config.num_params()
# a large one, for predictions
seven_b = GPTConfig(vocab_size=32100, block_size=2048, n_layer=32, n_head=32, n_embd=4096)


def new_model(dtype=torch.float32, n_layer=layers):
    """ShakespeareGPT with its first weights, the same on every rank, because the seed is."""
    torch.manual_seed(1337)
    return GPT(GPTConfig(vocab_size=config.vocab_size, n_layer=n_layer)).to(device, dtype)


def batch(step, rank=rank, world_size=world_size):
    """This rank's share of global batch number `step`: inputs and targets, both [b, T]."""
    share = get_batch(corpus.train_ids, step, global_batch, config.block_size, rank, world_size, seed=1)
    return [ids_bT.to(device) for ids_bT in share]


def flat(tensors):
    """All these numbers in one row."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


say(f"{P:,} parameters; my share of a batch is {list(batch(0)[0].shape)}")

# %% [markdown]
# ## Warm-up: 38 numbers, then 19 (CORE, 5 min)
#
# **Why.** Under DDP every rank holds everything: all weights, all gradients, all that the optimizer remembers. A
# second GPU makes training faster, and not one parameter larger a model fits. But all ranks hold *the same*. Must
# they?
#
# ![Two ranks and the 38 weights of a network 6-4-2: under DDP both hold all 38, under FSDP the first holds 19 and the
# second the other 19; an all-gather makes them whole for the moment](../assets/06_two_halves.svg)
#
# Take lesson 03's network of 6 inputs, 4 hidden and 2 outputs again: 6·4 + 4 + 4·2 + 2 = 38 parameters. Lay them in
# one row and cut it into n equal pieces, one for each rank: its [**shard**](../assets/glossary.md#shard). If n does
# not divide 38, zeros at the end make it fit.


# %%
# %%ranks
def toy():
    """A network 6-4-2, and 24 rows of data: inputs, targets. The same on every rank."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double().to(device)
    return network, torch.randn(24, 6).double().to(device), torch.randn(24, 2).double().to(device)


mlp, x_B6, y_B2 = toy()
padding = -38 % world_size  # zeros behind the row, so that n divides it
row_P = F.pad(flat(mlp.parameters()), (0, padding))
share_p = row_P.chunk(world_size)[rank].clone()  # what I keep
row_P.zero_()  # the rest goes: from here on I know only my share
if rank == 0:
    for n in (1, 2, 4, 19):
        say(f"{n:2} ranks: a rank keeps {math.ceil(38 / n)} of 38 numbers")

# %% [markdown]
# **Predict.** You are one of two ranks. You hold 19 weights, and the loss of your rows needs 38. After backward you
# have 38 gradients from your rows, and can update 19 weights. Which collective comes before forward, which after
# backward?
#
# <details><summary>Answer</summary>
#
# Before forward an **all-gather**: everybody's 19 to everybody. After backward a **reduce-scatter**: gradients of
# the same weight are added up over the ranks, and each rank gets only the sums for the weights that it holds.
# Together they are one all-reduce, cut open: between its halves you update.
#
# </details>

# %%
# %%ranks
x_b6, y_b2 = x_B6.tensor_split(world_size)[rank], y_B2.tensor_split(world_size)[rank]
dist.all_gather(list(row_P.chunk(world_size)), share_p)  # chunk gives views: this fills the row
for p, part in zip(mlp.parameters(), row_P[:38].split([24, 4, 8, 2]), strict=True):
    p.data = part.view_as(p)

F.mse_loss(mlp(x_b6), y_b2).backward()
gradient_P = F.pad(flat(p.grad for p in mlp.parameters()), (0, padding))
gradient_p = torch.empty_like(share_p)
dist.reduce_scatter(gradient_p, list(gradient_P.chunk(world_size)))  # my share of the sum
share_p -= 0.1 * gradient_p / world_size
say(f"38 gradients of my rows (padded: {len(gradient_P)}), {len(gradient_p)} of all rows to update")

# %% [markdown]
# One more all-gather, and everybody can see what the ranks have made of the network, share by share.

# %% tags=["nbval-check-output"]
# %%ranks
dist.all_gather(list(row_P.chunk(world_size)), share_p)
one_process, _, _ = toy()  # the same step in one process that sees all 24 rows
F.mse_loss(one_process(x_B6), y_B2).backward()
with torch.no_grad():
    whole_P = flat(p - 0.1 * p.grad for p in one_process.parameters())
if rank == 0:
    say(f"same weights as one process, to 1e-12: {torch.allclose(row_P[:38], whole_P, rtol=0, atol=1e-12)}")

# %% [markdown]
# That is all of sharded training. What remains is *when*: which numbers can be cut for how long, so that a model
# that does not fit into one memory fits into many.

# %% [markdown]
# ## Who needs what, and when? (CORE, 5 min)
#
# **Why.** Per parameter a rank in mixed precision holds 2 bytes of weight, 2 of gradient, and K = 12 for Adam: an
# fp32 copy of the weight and two moments, 4 bytes each. [**ZeRO**](../assets/glossary.md#zero) (Rajbhandari et al. 2020)
# asks of each of them who needs it:
#
# | | who needs it | when | so shard it in |
# |---|---|---|---|
# | optimizer state | the rank that updates this weight | once per step | stage 1 |
# | gradient | the same rank, once it is summed | from backward to the update | stage 2 |
# | parameter | every rank | while its layer computes | stage 3 |
#
# ![Three bars per rank for no sharding and the three stages of ZeRO: stage 1 cuts the optimizer's part, stage 2 the gradients
# too, stage 3 everything](../assets/06_stages.svg)
#
# **Predict.** The figure is for 64 GPUs. On 8 of them, how many GB does each hold in stages 1, 2 and 3? (GB are 10⁹
# bytes.)
#
# <details><summary>Answer</summary>
#
# Stage 1: (2 + 2 + 12/8) · 7.5 = 41.2 GB. Stage 2: (2 + 14/8) · 7.5 = 28.1. Stage 3: 16/8 · 7.5 = 15. For 64 the
# same formulas give 31.4, 16.6 and 1.9, the numbers of the paper's figure 1.
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
names = ["none", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
if rank == 0:
    for stage, name in enumerate(names):
        gigabytes = [bytes_per_parameter.zero_bytes(7.5e9, n, stage, k=12) / 1e9 for n in (1, 8, 64, 1024)]
        say(f"{name:6}" + "".join(f"{value:8.1f} GB" for value in gigabytes) + "   on 1, 8, 64, 1,024 ranks")

# %% [markdown]
# The same over the number of ranks. Which stages still help when ranks are added?

# %%
# %%ranks
if rank == 0:
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes, counts = figure.subplots(), [2**k for k in range(11)]
    for stage, (name, style) in enumerate(zip(names, ("-", "--", "-.", ":"), strict=True)):
        gigabytes = [bytes_per_parameter.zero_bytes(7.5e9, n, stage, k=12) / 1e9 for n in counts]
        axes.loglog(counts, gigabytes, style, color="black", label=name)
    axes.axhline(80, color="#D55E00", lw=1, label="a GPU of 80 GB")
    axes.set_xticks(counts, [f"{n:,}" for n in counts])
    axes.minorticks_off()
    axes.set(xlabel="ranks", ylabel="GB on each, 7.5 B parameters")
    axes.legend(fontsize=8)
    alt = "GB per rank over 1 to 1,024 ranks: ZeRO-1 and 2 flatten at 30 and 15, ZeRO-3 keeps falling"
    show(figure, "zero_stages", alt)

# %% [markdown]
# Adam is three quarters of it, so stage 1 takes most of what there is to take. But stages 1 and 2 have a floor, the 2
# bytes of weight (and 2 of gradient) that every rank keeps; only stage 3 goes on shrinking.
#
# Two words that are easily mixed up. ZeRO's stages *partition*: everything stays in the GPUs' memory, each number
# on one of them. [**Offload**](../assets/glossary.md#offload) is another thing: moving what rests to the CPU's
# memory or to NVMe (ZeRO-Offload, ZeRO-Infinity). One can do either without the other.
#
# **And what does it cost?** Count volumes: a reduce-scatter or an all-gather of P numbers is one P, an all-reduce,
# which is both, is two. (On a ring a rank then sends (n-1)/n of each P.)
#
# **Predict.** How many P does a step hand over under DDP, and in each stage?
#
# <details><summary>Answer</summary>
#
# DDP: 2. Stages 1 and 2: also 2, a reduce-scatter of the gradients and an all-gather of the updated weights: the
# two halves of the all-reduce that DDP does anyway, with the update between them. **They save memory, and add no
# volume.** Stage 3: up to 3, because the weights are gathered for forward and, having been thrown away, again for
# backward.
#
# </details>
#
# ![Volumes per step: DDP two P in one all-reduce; ZeRO-1 and ZeRO-2 two P, a reduce-scatter of gradients and an all-gather of
# weights; ZeRO-3 three P, two all-gathers and a reduce-scatter](../assets/06_volume.svg)

# %%
# %%ranks
if rank == 0:
    for stage, name in enumerate(names):
        volume = step_traffic.ideal_volume(stage, P)
        say(f"{name:6} ideal volume {volume / P:.0f} P = {volume:,} numbers")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: who needs what</summary>
#
# Let the room fill in the table's middle column before you show it. *Usual
# mistake:* "stage 2 sends less than stage 1"; no, it holds less. *Ask:* "You have 8 GPUs, and the model fits with
# ZeRO-1. Why not ZeRO-3?" (50 % more volume for memory that you do not need.)
#
# </details>

# %% [markdown]
# ## ZeRO-1 and ZeRO-2: the optimizer, then the gradients (CORE, 8 min)
#
# **Why.** AdamW works number by number: the update of one weight looks at its own gradient and moments, at nothing
# else. So an optimizer that is handed a *piece* of the row does exactly what the whole would do with that piece.
#
# First the row. A [**unit**](../assets/glossary.md#unit) holds some of the model's parameters in one flat piece of
# memory. The parameters become views of it, so that whoever fills the row fills the model. One piece of it is this
# rank's own.


# %%
# %%ranks
class Unit:
    """Some parameters in one row `whole_P`, which n divides, and this rank's `share_p` of it."""

    def __init__(self, parameters, apart=False):
        self.parameters = list(parameters)
        row_P = flat(self.parameters)
        self.padding = -len(row_P) % world_size
        self.whole_P = F.pad(row_P, (0, self.padding))
        self.num_bytes = self.whole_P.nbytes
        parts = self.whole_P[: len(row_P)].split([p.numel() for p in self.parameters])
        for p, part in zip(self.parameters, parts, strict=True):
            p.data = part.view_as(p)
        share_p = self.whole_P.chunk(world_size)[rank]
        self.share_p = nn.Parameter(share_p.clone() if apart else share_p)  # apart: ZeRO-3, below

    def refresh(self):  # after the update everybody needs the new weights
        all_gather(self)


unit = Unit(new_model().parameters())
say(f"{P:,} numbers in a row of {len(unit.whole_P):,}, of which I own {len(unit.share_p):,}")

# %% [markdown]
# Two movements, as in the warm-up. Note what `reduce_scatter` leaves behind: the average of *this rank's share*, in
# the one place where an optimizer looks, and no other gradient.


# %%
# %%ranks
def reduce_scatter(unit):
    """Average the gradients over the ranks; each keeps its share in `share_p.grad`. All ranks call it."""
    if any(p.grad is not None for p in unit.parameters):
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in unit.parameters]
        row_P = F.pad(flat(gradients), (0, unit.padding)) / world_size
        mean_p = torch.empty_like(unit.share_p)
        dist.reduce_scatter(mean_p, list(row_P.chunk(world_size)))
        unit.share_p.grad = mean_p if unit.share_p.grad is None else unit.share_p.grad + mean_p
        for p in unit.parameters:
            p.grad = None


def all_gather(unit):
    """Fill the row, and so the model, from everybody's share. All ranks call it."""
    dist.all_gather(list(unit.whole_P.chunk(world_size)), unit.share_p.detach())


# %% [markdown]
# And the optimizer. `make` builds any optimizer of torch from a list of parameters; it sees only the shares, and so
# remembers only their moments.


# %%
# %%ranks
class ShardedOptimizer:
    """An optimizer of which each rank runs its share: backward(); reduce(); step(); zero_grad()"""

    def __init__(self, units, make):
        self.units, self.shares = units, [unit.share_p for unit in units]
        self.own = make(self.shares)
        self.state = self.own.state  # this rank's moments

    def reduce(self):
        for unit in self.units:  # all ranks, in the same order
            reduce_scatter(unit)

    def step(self):
        self.reduce()  # nothing is left to do if you have called it already
        self.own.step()
        for unit in self.units:
            unit.refresh()

    def zero_grad(self):
        self.own.zero_grad()


# %% [markdown]
# **Predict.** ShakespeareGPT's weights, in fp32, take 3.27 MB. How many MB of Adam's moments does a rank of four
# hold now? What does a step hand over, in P?
#
# <details><summary>Answer</summary>
#
# Two moments are 6.53 MB; a quarter of them is 1.63 MB. One P of gradients in the reduce-scatter, one P of weights
# in the all-gather: 2, as many as DDP's all-reduce.
#
# </details>
#
# Two instruments tell: `wire.watch()` lists this rank's collectives and what it *hands over* to each, and
# `tensor_bytes` adds up the tensors that it holds.

# %%
# %%ranks
model = new_model()
optimizer = ShardedOptimizer([Unit(model.parameters())], adamw)
with wire.watch() as seen:
    model(*batch(0))[1].backward()
    optimizer.step()
moments_bytes = tensor_bytes(model, optimizer).optimizer
if rank == 0:
    say(f"Adam's moments: {moments_bytes / 1e6:.2f} MB, predicted {8 * P / world_size / 1e6:.2f}")
    for op in ("reduce_scatter", "all_gather"):
        say(f"{op}: {seen.count(op)} call, {seen.payload_bytes(op) / (4 * P):.3f} P")

# %% [markdown]
# That is ZeRO-1. When does a rank let go of a gradient that belongs to another? At the step: until then all
# gradients lie there. **ZeRO-2** hands them in *during* backward. Cut the model into several units, and let the
# last hook of each unit call its reduce-scatter: then at most one block's gradients are whole at a time, beside
# those of what is in no block (the head's wait for the embeddings').


# %%
# %%ranks
def reduce_in_backward(unit, then=lambda: None):
    """When backward has all gradients of the unit, reduce them, and call `then`."""
    missing = set(unit.parameters)

    def ready(p):  # the hook: p's gradient is complete
        missing.discard(p)
        if not missing:
            missing.update(unit.parameters)  # for the next backward
            reduce_scatter(unit)
            then()

    for p in unit.parameters:
        p.register_post_accumulate_grad_hook(ready)


def by_block(model):
    """Lists of parameters: one per block, and what is in none of them."""
    blocks = [list(block.parameters()) for block in model.blocks]
    inside = {p for block in blocks for p in block}
    return [*blocks, [p for p in model.parameters() if p not in inside]]


# %% [markdown]
# The same units and the same optimizer; only the hooks are new. After backward, and before the step, look at what
# is left of the gradients:

# %%
# %%ranks
model = new_model()
parts = [Unit(parameters) for parameters in by_block(model)]
for unit in parts:
    reduce_in_backward(unit)
optimizer = ShardedOptimizer(parts, adamw)
with wire.watch() as seen:
    model(*batch(0))[1].backward()
shares = tensor_bytes(model, optimizer).gradients
if rank == 0:
    say(f"{seen.count('reduce_scatter')} reduce-scatters in backward, {seen.payload_bytes() / (4 * P):.3f} P")
    say(f"gradients after it: {shares / 1e6:.2f} MB, a share of {4 * P / 1e6:.2f} MB")
optimizer.step()

# %% [markdown]
# And the weights? Two steps of each stage, in float64, beside two steps of one process that reads the whole batch:


# %%
# %%ranks
def after_two_steps(model, optimizer, **reads):
    """All weights after two steps of `optimizer`."""
    for step in range(2):
        model(*batch(step, **reads))[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model.parameters())


one, first, second = (new_model(torch.float64) for _ in range(3))
expected_P = after_two_steps(one, adamw(one.parameters()), rank=0, world_size=1)

# %% tags=["nbval-check-output"]
# %%ranks
stage_1_P = after_two_steps(first, ShardedOptimizer([Unit(first.parameters())], adamw))
parts = [Unit(parameters) for parameters in by_block(second)]
for unit in parts:
    reduce_in_backward(unit)
stage_2_P = after_two_steps(second, ShardedOptimizer(parts, adamw))
if rank == 0:
    for name, weights_P in {"ZeRO-1": stage_1_P, "ZeRO-2": stage_2_P}.items():
        same = torch.allclose(weights_P, expected_P, rtol=0, atol=1e-10)
        say(f"{name} and one process, to 1e-10: {same}")

# %% [markdown]
# The order matters for the same reason as in lesson 03: the n-th call of one rank meets the n-th call of the
# others. Backward passes through the blocks in the same order on all ranks, so it holds by itself.
#
# ### The library's way, and what it really sends
#
# PyTorch's ZeRO-1 is `ZeroRedundancyOptimizer`, on top of DDP. It deals out whole *tensors*, not pieces of a row,
# the largest first, each to the rank that has the least so far.
#
# **Predict.** DDP has all-reduced the gradients when this optimizer steps. What must the optimizer send after its
# update, and how many P does that make?
#
# <details><summary>Answer</summary>
#
# Each rank broadcasts the tensors that it has updated: one P more. Together with DDP's all-reduce, which is two, **3
# P**, where the ideal is 2. Correct, easy to adopt, and not free.
#
# </details>


# %%
# %%ranks
def volumes(seen, bytes_per_value=4):
    """{collective: volume in P}: an all-reduce counts twice, as it is a reduce-scatter and an all-gather."""
    times = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "broadcast": 1}
    found = {op: k * seen.payload_bytes(op) / (bytes_per_value * P) for op, k in times.items()}
    return {op: value for op, value in found.items() if value}


model = DDP(new_model())
library_optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
for _ in range(3):  # DDP sorts its buckets anew in the second step: watch the third
    library_optimizer.zero_grad()
    with wire.watch() as seen:
        model(*batch(0))[1].backward()
        library_optimizer.step()
if rank == 0:
    found = volumes(seen)
    say(f"{found}: together {sum(found.values()):.2f} P")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: stages 1 and 2</summary>
#
# *Say:* "the update is a local affair, so let the locals do it". The `Unit`
# class comes back unchanged in stage 3: give it the minute it needs. *Usual question:* "why does stage 1
# reduce-scatter, if all gradients are there anyway?" Because nobody needs the other averages; an all-reduce would
# be a P too many, which is the library's 3 P. *When late:* skip the library's cell and state its 3 P.
#
# </details>

# %% [markdown]
# ## ZeRO-3: gather, use, free (CORE, 8 min)
#
# **Why.** What is left on every rank are the weights. A rank needs block 2's weights while it computes block 2,
# forward and backward, and at no other time. So keep the share, and borrow the rest for the moment.
#
# ![A step of FSDP for one unit on two ranks: all-gather, forward, free; all-gather, backward, reduce-scatter and free; update of the
# own share](../assets/06_fsdp_step.svg)
#
# In words, for each unit: **all-gather, forward, free; later all-gather again, backward, reduce-scatter, free;
# update the own share.** Note where the reduce-scatter stands: *in* backward, unit by unit, not after it.
#
# ### How to free what autograd still wants
#
# "Free" is less simple than it sounds. In forward, autograd notes the weights that backward will need. Give the
# parameter another tensor (`p.data = ...`), and autograd still holds the old one: nothing is freed. So keep the
# tensor, with its shape, and take away the **storage** below it. Everybody who holds a view of the row loses it at
# the same time, autograd included; and gets it back when the same storage is filled again.
#
# ![The row's storage, and on it the views: the parameter and what autograd has saved; when the storage is emptied both views point at
# nothing, when it is gathered again both see the numbers](../assets/06_storage.svg)


# %%
# %%ranks
def gather(unit):
    """Make the row whole, if it is not. All ranks call it."""
    storage = unit.whole_P.untyped_storage()
    if storage.size() == 0:
        storage.resize_(unit.num_bytes)
        all_gather(unit)


def free(unit):
    """Only the share stays; whoever reads a parameter now reads nothing. Local."""
    unit.whole_P.untyped_storage().resize_(0)


# %%
# %%ranks
catch_up(globals(), "Unit", "reduce_scatter", "all_gather", "ShardedOptimizer", "reduce_in_backward")

# %% [markdown]
# **Predict.** Forward of a layer with its weights gathered; free; gather; backward. Does autograd get the right
# weights?

# %% tags=["nbval-check-output"]
# %%ranks
torch.manual_seed(0)
layer, x = (
    nn.Linear(8, 8, dtype=torch.float64).to(device),
    torch.ones(2, 8, dtype=torch.float64, device=device),
)
x.requires_grad_()
(expected,) = torch.autograd.grad(layer(x).square().sum(), x)  # needs the weights in backward

unit = Unit(layer.parameters(), apart=True)  # the share has memory of its own, as the row will be emptied
loss = layer(x).square().sum()
free(unit)
held = unit.whole_P.untyped_storage().size()
gather(unit)
(ours,) = torch.autograd.grad(loss, x)
if rank == 0:
    say(f"while freed the row holds {held} bytes, and weight's shape still is {list(layer.weight.shape)}")
    say(f"gradient right after gathering again: {torch.equal(ours, expected)}")

# %% [markdown]
# It does: what autograd noted is a view of the same storage. The rest is knowing the four moments, and PyTorch has
# a hook for each:
#
# | moment | hook | what happens |
# |---|---|---|
# | before a unit's forward | `register_forward_pre_hook` | gather |
# | after it | `register_forward_hook` | free |
# | before its backward | `register_full_backward_pre_hook` | gather |
# | when its last gradient is there | `register_post_accumulate_grad_hook` | reduce-scatter, free |
#
# The last unit, the **root**, holds what is in no other: embeddings, the final norm, the head. It stays whole after
# forward, because backward begins with it.


# %%
# %%ranks
def gather_when_needed(unit, modules, stays=False):
    """Attach a unit's four moments to the modules that it consists of, and free it."""
    modules[0].register_forward_pre_hook(lambda *_: gather(unit))
    if not stays:
        modules[-1].register_forward_hook(lambda *_: free(unit))
        modules[-1].register_full_backward_pre_hook(lambda *_: gather(unit))
    reduce_in_backward(unit, then=lambda: free(unit))
    unit.refresh = lambda: free(unit)  # after the update a whole row would be yesterday's
    free(unit)


# %% [markdown]
# Now the whole model, from the inner units to the root. (`units` is the trainer's: it lists which modules are
# gathered together. The section on wrapping looks at it.)


# %%
# %%ranks
def zero_3(model, wrapping="block"):
    """ZeRO-3, in place. Returns the units, the root last. `wrapping` says which modules are gathered together."""
    taken, made = set(), []
    for modules in [*units(model, wrapping), [model]]:
        parameters = [p for module in modules for p in module.parameters() if p not in taken]
        parameters = list(dict.fromkeys(parameters))  # a tied weight once
        taken.update(parameters)
        made.append(Unit(parameters, apart=True))
        gather_when_needed(made[-1], modules, stays=modules == [model])
    return made


# %% [markdown]
# **Predict.** A GPT of two blocks, so two units and the root. How many all-gathers and reduce-scatters does a step
# make? How many P is that?
#
# <details><summary>Answer</summary>
#
# Each block is gathered twice, the root once: 2·2 + 1 = **5 all-gathers**, not 6. Three reduce-scatters. So a
# little less than 3 P: the root's second gather is saved.
#
# </details>


# %%
# %%ranks
def in_words(seen, bytes_per_value=4):
    """The collectives in the order of their calls, with their thousands of numbers."""
    short = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "all-reduce"}
    return ", ".join(f"{short[call.op]} {call.bytes / bytes_per_value / 1e3:.0f}" for call in seen.calls)


model = new_model(n_layer=2)
optimizer = ShardedOptimizer(zero_3(model), adamw)
with wire.watch() as seen:
    _, loss = model(*batch(0))
    forward = len(seen.calls)
    loss.backward()
    optimizer.step()
if rank == 0:
    say(f"thousands of numbers: {in_words(seen)}")
    gathers, reduces = seen.count("all_gather"), seen.count("reduce_scatter")
    say(f"{gathers} all-gathers, {forward} of them in forward; {reduces} reduce-scatters")

# %% [markdown]
# Read the line from left to right and you read the step: root, block 0, block 1 forward; then block 1 and block 0
# backward, each gathered, then reduced; the root's gradients last, because the embeddings' are. Afterwards a rank
# holds its shares and nothing else. (In fp32 a parameter takes 4 + 4 + 8 bytes: 16, as in mixed precision.)

# %%
# %%ranks
model = new_model()
optimizer = ShardedOptimizer(zero_3(model), adamw)
for step in range(2):
    model(*batch(step))[1].backward()
    optimizer.step()
    if step == 0:
        optimizer.zero_grad()
held = tensor_bytes(model, optimizer)  # weight, gradient, two moments of each share
rows = sum(unit.whole_P.untyped_storage().size() for unit in optimizer.units)
measured, formula = held.total, 16 * P / world_size
if rank == 0:
    say(f"held {measured / 1e6:.3f} MB, formula {formula / 1e6:.3f} MB; rows still whole: {rows} bytes")
metrics.exact(ours_zero_3_bytes=measured)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: stage 3</summary>
#
# Act it out with four volunteers and a deck of cards: each holds a quarter of
# every suit; to play hearts all show their hearts, then take them back. *Usual mistakes:* believing that forward of
# a sharded layer computes a share of it; freeing by `p.data = torch.empty(0)`, which frees nothing as long as
# autograd remembers. *Ask:* "what is the least memory in which a step fits?" (The largest unit, whole, with its
# gradients.)
#
# </details>

# %% [markdown]
# ## Clip by the global norm (CORE, 4 min)
#
# **Why.** Nearly every training run of a large model clips: if the gradient of the *whole model* is longer than a
# limit, scale it down. Each rank now holds a share of the gradient, and the length of a share is not the length of
# the whole.
#
# ![A right-angled triangle: rank 0's share has length 3, rank 1's 4, the whole gradient 5, neither 3 nor 4 nor 7](../assets/06_norm.svg)
#
# **Predict.** Rank 0's share of the gradient has length 5, rank 1's has length 12. How long is the gradient?
#
# <details><summary>Answer</summary>
#
# 13: the numbers of the two shares stand at right angles to each other, so their *squares* add up: 25 + 144 = 169.
# On n ranks whose shares are about equally long, the whole is longer than a share by the square root of n.
#
# </details>
#
# ### Exercise 1: clip by the global norm
#
# Write `clip_by_global_norm(shares, max_norm)`. `shares` are this rank's parameters; each number of the model is in
# one share on one rank, and `share.grad` may be None. Scale all gradients by `max_norm / (norm + 1e-6)` if that is
# less than 1, as `torch.nn.utils.clip_grad_norm_` does, and return the norm from before. The check counts what you
# send: one number is enough.


# %%
# %%ranks
def clip_by_global_norm(shares, max_norm):
    raise NotImplementedError  # your turn


checks.clip_by_global_norm(clip_by_global_norm, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 1
def clip_by_global_norm(shares, max_norm):
    gradients = [share.grad for share in shares if share.grad is not None]
    total = torch.zeros((), dtype=shares[0].dtype, device=shares[0].device)
    for gradient in gradients:
        total += gradient.square().sum()
    dist.all_reduce(total)  # all ranks, also one without gradients: squares add up, norms do not
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)  # never up; the same on all ranks
    for gradient in gradients:
        gradient *= factor
    return norm


checks.clip_by_global_norm(clip_by_global_norm, ranks, solution=True)

# %% [markdown]
# ## The library, and three ways to the same weights (CORE, 5 min)
#
# What you have built is PyTorch's **FSDP**, fully sharded data parallel, in its main lines. Today's form, FSDP2, is
# one function, `fully_shard`, called on each unit and then on the whole model: what no unit has taken becomes the
# root. Its `mesh` says which ranks share: a grid of ranks, here one row of all n.


# %%
# %%ranks
catch_up(globals(), "in_words")


# %%
# %%ranks
def by_library(model, **settings):
    """fully_shard, by block, in place; returns the model."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return model


model = by_library(new_model())
p = model.blocks[0].mlp.up.weight
say(
    f"mlp.up.weight is a {type(p).__name__} of shape {list(p.shape)}; I hold {list(p.to_local().shape)} of it"
)

# %% [markdown]
# A [`DTensor`](../assets/glossary.md#dtensor) is a tensor that knows its whole shape and holds a share:
# `p.to_local()` is the share, `p.full_tensor()` gathers the whole. `fully_shard` cuts each weight along its *first
# dim*, not a row of all of them, so shapes stay readable; a dim that n does not divide is padded. Our 6-4-2 again: 38
# parameters under DDP, 19 under FSDP on 2.

# %%
# %%ranks
small = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
fully_shard(small, mesh=mesh)
mine = {name: list(p.to_local().shape) for name, p in small.named_parameters()}
say(f"{sum(p.to_local().numel() for p in small.parameters())} of 38 parameters: {mine}")

# %% [markdown]
# On four ranks the shares are uneven: the second layer has two rows only, and ranks 2 and 3 get none. In a layer of
# thousands of rows nobody notices.
#
# **Predict.** Two blocks and the root: does `fully_shard` make 5 all-gathers or 6? And in which order, compared to
# ours?

# %%
# %%ranks
model = by_library(new_model(n_layer=2))
with wire.watch() as seen:
    model(*batch(0))[1].backward()
if rank == 0:
    say(f"{seen.count('all_gather')} all-gathers, {seen.count('reduce_scatter')} reduce-scatters")
    say(in_words(seen) or "nothing is sent in a world of one")
metrics.exact(library_all_gathers=seen.count("all_gather"))

# %% [markdown]
# Five as well: the root is not gathered twice. (On 4 ranks its row is 771 numbers longer than ours: the 65 rows of embedding,
# head and head's bias are padded to 68.) One difference: in backward the library asks for block 0 *before* it has reduced block 1.
# It fetches ahead, so that on GPUs the next unit is on its way while this one computes.
#
# Now the proof. Three ways: ours, the library's, and one process that reads the whole global batch, in float64,
# with plain SGD, and with clipping, so that a wrong norm would show. (Adam divides by the gradient's size and hides
# a wrong factor.)

# %%
# %%ranks
catch_up(globals(), "Unit", "reduce_scatter", "all_gather", "ShardedOptimizer", "reduce_in_backward")
catch_up(globals(), "gather", "free", "gather_when_needed", "zero_3", "clip_by_global_norm", "by_library")


# %% [markdown]
# One loop for all three. It differs in who clips, and in which rows it reads.


# %%
# %%ranks
def clipped_sgd(model, optimizer, clip, batch_of=batch):
    """`steps` steps with the norm clipped to 0.3: the losses of this rank's share, and the norms."""
    losses, norms = [], []
    for step in range(steps):
        _, loss = model(*batch_of(step))
        loss.backward()
        norms.append(clip(0.3))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), torch.stack(norms)


def library_clip(model, max_norm):
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # a DTensor


sgd = functools.partial(torch.optim.SGD, lr=0.5)

# %% [markdown]
# Same seed, same batches; the one process reads all rows of each batch.

# %%
# %%ranks
ours, library, single = (new_model(torch.float64) for _ in range(3))
optimizer = ShardedOptimizer(zero_3(ours, wrapping), sgd)
found = {"ours": clipped_sgd(ours, optimizer, functools.partial(clip_by_global_norm, optimizer.shares))}
by_library(library)
found["fully_shard"] = clipped_sgd(
    library, sgd(library.parameters()), functools.partial(library_clip, library)
)
clip = functools.partial(library_clip, single)
found["one process"] = clipped_sgd(
    single, sgd(single.parameters()), clip, functools.partial(batch, rank=0, world_size=1)
)
for unit in optimizer.units:
    gather(unit)
weights = {
    "ours": flat(ours.parameters()),
    "fully_shard": flat(p.full_tensor() for p in library.parameters()),
}

# %% [markdown]
# Losses, norms and the weights after the last step, each against the one process:

# %% tags=["nbval-check-output"]
# %%ranks
losses_s, norms_s = found["one process"]
for way in ("ours", "fully_shard"):
    losses, norms = found[way]
    dist.all_reduce(losses)  # the batch's loss is the mean of the ranks'
    differences = {
        "losses": losses / world_size - losses_s,
        "norms": norms - norms_s,
        "weights": weights[way] - flat(single.parameters()),
    }
    for name, difference in differences.items():
        assert difference.abs().max() < 1e-10, f"{way}: {name} differ by {difference.abs().max():.1e}"
    if rank == 0:
        say(f"{way} and one process: losses, norms and weights equal to 1e-10")
if rank == 0:
    say(f"every step was clipped: {bool((norms_s > 0.3).all())}")

# %% [markdown]
# (The norms, for your own records: every one was above the limit, so every step was scaled.)

# %%
# %%ranks
metrics.exact(float64_weights=fingerprint([weights["ours"]]))
metrics.close(float64_losses=losses_s, float64_norms=norms_s)
if rank == 0:
    say(f"norms before clipping: {' '.join(f'{norm:.3f}' for norm in norms_s.tolist())}")

# %% [markdown]
# ### What gloo does with a reduce-scatter
#
# Two numbers are easily mixed up: what is *handed over*, and what the operating system says was *sent* (Linux). A ring sends
# (n-1)/n of what is handed to an all-gather or a reduce-scatter, twice that for an all-reduce. **Predict**: does
# gloo?

# %%
# %%ranks
row = torch.ones(1_200_000)
mine, parts = torch.empty(1_200_000 // world_size), list(row.chunk(world_size))
calls = {
    "all_reduce": lambda: dist.all_reduce(row.clone()),
    "reduce_scatter": lambda: dist.reduce_scatter(mine, parts),
    "all_gather": lambda: dist.all_gather(parts, mine),
}
for name, call in calls.items() if device.type == "cpu" else ():  # this is about gloo
    with wire.watch() as seen:
        call()
    if rank == 0 and seen.transport_bytes is not None:
        ideal = (2 if name == "all_reduce" else 1) * (world_size - 1) / world_size
        say(
            f"{name:14} sent {seen.transport_bytes / row.nbytes:.2f} of what was handed over; a ring: {ideal:.2f}"
        )

# %% [markdown]
# gloo's reduce-scatter is an all-reduce of everything, of which each rank then cuts out its share: twice the bytes.
# So **never take a time of FSDP on gloo as evidence for or against it.** This lesson times nothing; `wire` shows
# what is handed over, and a ring as NCCL's sends (n-1)/n of it.
#
# ### The old names (MORE, 2 min)
#
# You will meet FSDP1, the class `FullyShardedDataParallel(model, ...)`, in older code. The same choices, by their
# new names:
#
# | FSDP1 | FSDP2 | ZeRO |
# |---|---|---|
# | `FullyShardedDataParallel(module)` | `fully_shard(module)`, in place; a `GPT` becomes an `FSDPGPT` | |
# | `auto_wrap_policy` | a `fully_shard` call per unit | |
# | `ShardingStrategy.FULL_SHARD` | `reshard_after_forward=None`, the default: all but the root | 3 |
# | `SHARD_GRAD_OP` | `reshard_after_forward=False`: whole from forward to backward | 2; at rest weights are shares too |
# | `NO_SHARD` | a mesh (n, 1): copies only; or DDP | none |
# | `HYBRID_SHARD` | a mesh (nodes, ranks per node) | 3 within a node |
# | `MixedPrecision(param_dtype=...)` | `mp_policy=MixedPrecisionPolicy(param_dtype=...)` | |
# | `CPUOffload(offload_params=True)` | `offload_policy=CPUOffloadPolicy()` | offload |
# | `FSDP.clip_grad_norm_(...)` | `torch.nn.utils.clip_grad_norm_(...)` | |
# | one flat parameter per unit, as in our `Unit` | each parameter a DTensor, cut along dim 0 | |
#
# [**Reshard**](../assets/glossary.md#reshard) is what our `free` does: go back from the whole to the share.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the library</summary>
#
# Show `p.shape` against `p.to_local().shape` and let it sink in: code that
# reads `p.shape` still works. *Usual mistakes:* building the optimizer before `fully_shard` (it would hold the old
# parameters); calling `fully_shard` on the root alone and wondering why memory does not fall; taking a
# number of the share for one of the whole (the zoo below). *Ask:* "where in our code is the gradient
# divided by n, and what if it were divided twice?"
#
# </details>

# %% [markdown]
# ## Wrapping: what is gathered at once (CORE, 2 min)
#
# **Why.** A unit is what is whole at the same time. Large units: few, long messages, and much memory. Small units:
# little memory, many short messages. And the *largest* unit must fit, with the root, its whole gradients and the
# messages, beside all shares.
#
# ![The same GPT wrapped four ways: by block; by block and size, with embedding and head apart; in groups of two blocks; in one
# unit](../assets/06_wrapping.svg)
#
# | wrapping | units | its use |
# |---|---|---|
# | `block` | each block, and the root with the embeddings and the head | the usual start |
# | `block_and_size` | the two large matrices outside the blocks apart, too | large vocabularies: the root stays whole from forward to backward |
# | `block_group:2` | two blocks together | many small blocks: fewer, longer messages |
# | `size:N` | any module with N parameters or more outside units further inside (10⁸ for large models) | models without clear blocks |
# | all in one | the root alone | nothing is saved while it computes |
#
# **Predict.** A GPT of 6.7 billion parameters: 32 blocks of 201 million, 32,100 symbols, width 4,096. By block, how
# many numbers are whole at once? How many if embedding and head are units of their own?
#
# <details><summary>Answer</summary>
#
# By block: one block and the root. The root has two matrices of 32,100 x 4,096 = 131.5 million and 8.4 million of
# positions: 201.4 + 271.4 = 472.8 million. With the two apart: 201.4 + 8.4 = 209.8 million, less than half.
#
# </details>


# %%
# %%ranks
def unit_sizes(config, wrapping):
    """Parameters of each unit, the root last."""
    with torch.device("meta"):  # shapes without numbers: any size fits
        model = GPT(config)
    inner = [sum(p.numel() for m in modules for p in m.parameters()) for modules in units(model, wrapping)]
    return [*inner, config.num_params() - sum(inner)]


if rank == 0:
    for name, cfg, least in (("ShakespeareGPT", config, 100_000), ("7 B", seven_b, 10**8)):
        for wrap in ("block", "block_and_size", "block_group:2", f"size:{least}"):
            *inner, root = unit_sizes(cfg, wrap)
            say(
                f"{name}, {wrap}: {len(inner)} units and the root; at most {(max(inner) + root) / 1e6:,.2f} M numbers whole"
            )

# %% [markdown]
# The last line is a trap. An attention layer has 67 million parameters, less than 10⁸, and so has what is left of a
# block when its MLP is a unit: 32 attention layers end up in the root, which is whole from forward to backward: 2.2
# billion numbers, 2.3 with an MLP. Wrap by size only after you have looked at `unit_sizes`.

# %% [markdown]
# ## Experiment: bytes against formulas (CORE, 4 min)
#
# Everything so far was a claim about bytes, so measure them all. For each strategy and wrapping: build the model
# with the trainer's own code (`scripts/train.py` does the same), make three steps, and count what this rank holds
# when the last backward is done, and what it hands over in a step. Beside it the formulas, which look at the
# configuration only: `rank_memory.bytes_per_rank` and `step_traffic.per_step`.
#
# **What you should see**: ratios of 1 within 2 %; DDP's bar 16 bytes per parameter long; zero1's with a shorter
# end; fsdp's a 1/n of everything, whatever the wrapping; and in volumes 2 for DDP, 3 for zero1, just below 3 for
# fsdp (less by size), 2 for `grad_op`, which does not gather again.


# %%
# %%ranks
catch_up(globals(), "volumes")


# %%
# %%ranks
def build(flags):
    """The trainer's way from flags to a spread model, its optimizer, and the bytes that the formulas give."""
    sizes = f"--model.n-layer {layers} --train.global-batch {global_batch} --optimizer.clip 0"
    options = read_options(shlex.split(f"{sizes} {flags}"))
    its_config = model_config(options, config.vocab_size)
    layout = resolve_layout(options, its_config, world_size)
    parallel = parallelize(its_config, layout, options, ranks)
    predicted = (
        rank_memory.bytes_per_rank(its_config, layout, options),
        step_traffic.per_step(its_config, layout, options),
    )
    return parallel, build_optimizer(parallel, options), predicted


# %% [markdown]
# `wire` watches the third step, `tensor_bytes` looks at this rank when backward is done and the optimizer has not
# yet stepped.


# %%
# %%ranks
def measure(flags):
    """(bytes held, bytes handed over, and both by formula) in the third step of a run with these flags."""
    parallel, optimizer, predicted = build(flags)
    for step in range(3):  # DDP sorts its buckets anew in the second
        optimizer.zero_grad()
        with wire.watch() as seen:
            parallel.forward_backward(*batch(step))
            held = tensor_bytes(parallel.model, optimizer)
            optimizer.step()
    return held, seen, *predicted


# %% [markdown]
# Seven ways to train the same model, as flags of `train.py`:

# %%
# %%ranks --timeout 120
fsdp = "--parallel.strategy fsdp --parallel.wrapping"
runs = {
    "ddp": "--parallel.strategy ddp --parallel.copies ddp",
    "zero1": "--parallel.strategy zero1",
    "fsdp block": f"{fsdp} block",
    "fsdp block_and_size": f"{fsdp} block_and_size",
    "fsdp block_group:2": f"{fsdp} block_group:2",
    "fsdp size:100000": f"{fsdp} size:100000",
    "fsdp block, grad_op": f"{fsdp} block --parallel.sharding grad_op",
}
table = {name: measure(flags) for name, flags in runs.items()}

# %% [markdown]
# The table. A ratio is measured over formula; calls are counted and predicted. Beware of the column "handed over":
# an all-reduce stands there once, though it is two volumes. So ddp's 3.27 MB are 2 P, and fsdp's 9.71 just below 3
# P.

# %%
# %%ranks
if rank == 0:
    say(f"{'':22}held, MB  ratio   handed over, MB  ratio   calls")
for name, (held, seen, held_formula, sent_formula) in table.items():
    at_rest = [
        getattr(b, kind) for b in (held, held_formula) for kind in ("parameters", "gradients", "optimizer")
    ]
    held_bytes, formula_bytes = sum(at_rest[:3]), sum(at_rest[3:])
    sent, expected = seen.payload_bytes(), sum(t.payload_bytes for t in sent_formula.values())
    ratios = held_bytes / formula_bytes, sent / expected if expected else 1.0
    if rank == 0:
        calls = f"{len(seen.calls)} of {sum(t.calls for t in sent_formula.values())}"
        say(
            f"{name:22}{held_bytes / 1e6:8.2f} {ratios[0]:6.3f} {sent / 1e6:17.2f} {ratios[1]:6.3f}   {calls}"
        )
        assert all(abs(ratio - 1) < 0.02 for ratio in ratios), f"{name}: ratios {ratios}"

# %% [markdown]
# In pictures: at rest, with the formula as diamonds;

# %%
# %%ranks
if rank == 0:
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes, start = figure.subplots(), [0.0] * len(table)
    for kind, hatch in {"parameters": "", "gradients": "//", "optimizer": ".."}.items():
        sizes = [getattr(held, kind) / 1e6 for held, *_ in table.values()]
        axes.barh(list(table), sizes, left=start, hatch=hatch, color="white", edgecolor="black", label=kind)
        start = [a + b for a, b in zip(start, sizes, strict=True)]
    at_rest = [
        formula.parameters + formula.gradients + formula.optimizer for _, _, formula, _ in table.values()
    ]
    axes.plot([value / 1e6 for value in at_rest], range(len(table)), "D", color="#D55E00", label="formula")
    axes.invert_yaxis()
    axes.set(xlabel=f"MB held by rank 0 of {world_size}", title="at rest")
    axes.legend(fontsize=8)
    show(figure, "held", "stacked bars of bytes held, by strategy and wrapping; a diamond at the end of each")

# %% [markdown]
# And in a step, in volumes, with ZeRO's own count as a mark:

# %%
# %%ranks
if rank == 0:
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes = figure.subplots()
    totals = [sum(volumes(seen).values()) for _, seen, *_ in table.values()]
    axes.barh(list(table), totals, color="#999999", label="measured")
    stages = [1 if name in ("ddp", "zero1") or "grad_op" in name else 3 for name in table]
    ideal = [step_traffic.ideal_volume(stage, P) / P for stage in stages]
    axes.plot(ideal, range(len(table)), "k|", ms=16, label="by ZeRO's count")
    axes.invert_yaxis()
    axes.set(xlabel="P handed over in a step", title="volume", xlim=(0, 4.8))
    axes.legend(fontsize=8)
    show(
        figure,
        "handed_over",
        "bars of the volume handed over in a step, by strategy and wrapping; a mark at ZeRO's count",
    )
metrics.exact(held={name: vars(row[0]) for name, row in table.items()})
metrics.exact(handed_over={name: row[1].payload_bytes() for name, row in table.items()})

# %% [markdown]
# **The residual.** To three decimals there is none; what is left are Adam's step counters, 4 bytes per tensor. The
# formula knows of the padding: on 4 ranks the 65 rows of token embedding and head do not come out even, so
# `fully_shard` stores 17 of each.
#
# In volumes the bars of stage 3 stop short of the mark by what the root saves, which is gathered once. Under
# `size:100000` the root is large, as all that is below the limit piles up in it; so it saves most, and has most
# gathered at once. `grad_op` falls back to 2: it pays with memory for the third P. zero1 passes its mark by the P that
# it broadcasts. Otherwise the wrapping changes *calls*, hardly bytes.
#
# ### Memory over a step
#
# At rest all wrappings are alike. The difference is what is whole *during* the step. Record one step that is not
# timed, event by event.
#
# **Predict.** By block, how many MB does the gathered part reach? Under `grad_op`?
#
# <details><summary>Answer</summary>
#
# By block the root and one block: 25 + 198 thousand numbers of 4 bytes, 0.9 MB. Under `grad_op` nothing is freed
# before its backward, so at the end of forward everything is whole: 3.27 MB.
#
# </details>


# %%
# %%ranks
def watched_step(flags):
    """A MemoryTimeline of the second step under these flags."""
    parallel, optimizer, (predicted, _) = build(flags)
    parallel.forward_backward(*batch(0))
    optimizer.step()
    optimizer.zero_grad()
    share = batch(1)  # read before: the corpus is not the model's memory
    with MemoryTimeline(parallel.model, optimizer) as seen:
        with seen.phase("forward and backward"):
            parallel.forward_backward(*share)
        with seen.phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
    return seen, predicted


# %% [markdown]
# For three of the ways:

# %%
# %%ranks --timeout 120
timelines = {name: watched_step(runs[name]) for name in ("ddp", "fsdp block", "fsdp block, grad_op")}
for name, (seen, predicted) in timelines.items():
    if rank == 0:
        say(
            f"{name:20} peak {seen.peak.total / 1e6:6.2f} MB; gathered at most {seen.highest('gathered') / 1e6:5.2f} MB,"
            f" by formula {predicted.gathered / 1e6:5.2f} MB"
        )

# %% [markdown]
# What you should see: in DDP a high floor, which gets its last step up at once, and a hill of activations on it;
# under FSDP a lower floor, and a thin band of gathered weights that comes and goes.

# %%
# %%ranks
if rank == 0:
    for name in ("ddp", "fsdp block"):
        seen, _ = timelines[name]
        highest = timelines["ddp"][0].peak.total  # one scale for both
        figure = memory_stack(seen.samples, f"{name}, {world_size} ranks: one step", highest=highest)
        show(
            figure,
            f"memory_{name.replace(' ', '_')}",
            f"memory of a step under {name}, stacked by kind, event by event",
        )

# %% [markdown]
# DDP's picture stands on a high floor of weights, moments and, nearly from the first moment on, gradients: they are
# views of its buckets, which it lays out anew in this second step. FSDP's floor is a share of it. The gathered part
# is the thin band that rises and falls unit by unit, and gradients appear as shares, when backward has passed a
# block. On top lies "other", at its peak more than all that is gathered: the messages' own memory, among it the
# next block's, which is fetched early, and a block's whole gradients before they are cut. The formula for
# "gathered" knows none of these.
#
# At this size activations are the largest part, and **FSDP leaves activations as they are**: each rank computes
# whole layers, on its own rows. In a large model they come next: the 7 B model below keeps 1.7 GB of shares on each
# of 64 ranks, but one sequence of 2,048 tokens makes 9 GB of activations even with flash attention (34TD bytes per
# layer, lesson 01).
#
# Beside your numbers stands a GPU run of this lesson, as soon as one is recorded. And as a formula the 7 B model
# on 64 ranks: the total of `train.py --preset olmo-7b --ranks 64 --dry-run` (there in GiB).

# %%
# %%ranks
if rank == 0:
    peaks = {name: seen.peak.total for name, (seen, _) in timelines.items()}
    metrics.measured(peak_bytes=peaks)
    here = {f"peak, {name}": (peak, "bytes", f"peak_bytes.{name}") for name, peak in peaks.items()}
    say(recorded_runs.beside("06", here))
    options = read_options(shlex.split("--preset olmo-7b"))
    large = model_config(options, 0)
    held = rank_memory.bytes_per_rank(large, resolve_layout(options, large, 64), options)
    whole = bytes_per_parameter.zero_bytes(large.num_params(), 64, 0)
    each, gathered = held.total / 1e9, held.gathered / 1e9
    say("7 B, shards in fp32, gathered in bf16, on 64 ranks, by formula:")
    say(f"{each:.2f} GB on each, {gathered:.2f} of it gathered;")
    say(f"without sharding {whole / 1e9:.0f} GB, before any activation")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the experiment</summary>
#
# Let somebody add a row to `runs` (`--parallel.wrapping size:1000000`
# leaves the root alone) and predict its two numbers first. *Usual mistake:* reading the volumes as times. *When
# late:* show the stored table and the two timelines. *Ask:* "grad_op sends less and holds more. On which machine
# would you use it?" (Slow network, memory to spare.)
#
# </details>

# %% [markdown]
# ## Fetch the next unit early (MORE, 4 min)
#
# An all-gather that starts when its unit is needed makes everybody wait. One that starts a unit *earlier* hides
# behind the computation of the unit before, and costs the memory of one more unit. On the virtual network: each
# block computes 1 ms, its weights travel on a ring.
#
# **Predict.** N blocks, c ms to compute, g < c ms to gather. How long is a forward pass without prefetch, how long
# with it?
#
# <details><summary>Answer</summary>
#
# Without: N (g + c). With: the first gather cannot hide, all others do: g + N c. If g > c, the network sets the
# pace: N g + c.
#
# </details>

# %%
# %%ranks
catch_up(globals(), "unit_sizes")

# %%
# %%ranks
network = VirtualNetwork(ranks, inside=Link(latency_s=2e-5, bytes_per_s=1e9))
block_P = torch.zeros(unit_sizes(config, "block")[0] // world_size * world_size)


def start_gather(k):
    """Start the ring all-gather of unit k on the communication clock."""
    chunks = list(block_P.chunk(world_size))
    with network.asynchronous(f"gather {k}") as work:
        for hop in range(world_size - 1):
            give, take = chunks[rank - hop], chunks[rank - hop - 1]  # negative numbers count from the end
            network.exchange(give, (rank + 1) % world_size, take, (rank - 1) % world_size)
    return work


# %% [markdown]
# Forward with and without prefetch differs in one thing: whether the next gather starts before or after this
# block's computation.


# %%
# %%ranks
def virtual_forward(prefetch):
    """Virtual seconds of a forward pass over all blocks."""
    network.reset()
    work = start_gather(0)
    for k in range(layers):
        network.wait(work)
        if prefetch and k + 1 < layers:
            work = start_gather(k + 1)
        network.compute(1e-3, f"block {k}")
        if not prefetch and k + 1 < layers:
            work = start_gather(k + 1)
    return network.clock_s


# %% [markdown]
# Expect the hatched gathers *between* the blocks in the first chart, and *under* them in the second.

# %%
# %%ranks
gather_s = (world_size - 1) * network.inside.cost_s(block_P.nbytes // world_size)
for prefetch in (False, True):
    took_s = virtual_forward(prefetch)
    spans = network.gather_spans()
    predicted_s = layers * (gather_s + 1e-3)
    if prefetch:  # the longer of the two sets the pace
        predicted_s = gather_s + max(gather_s, 1e-3) * (layers - 1) + 1e-3
    metrics.exact(**{f"virtual_forward_prefetch_{prefetch}": took_s})
    if rank == 0:
        title = f"{'with' if prefetch else 'without'} prefetch: {1e3 * took_s:.3f} virtual ms"
        say(f"{title}, predicted {1e3 * predicted_s:.3f}")
        alt = "hatched gathers and solid blocks on each rank, one behind the other or overlapping"
        until_s = layers * (gather_s + max(gather_s, 1e-3))  # both charts on one scale
        show(gantt(spans, title, virtual=True, until_s=until_s), f"prefetch_{prefetch}", alt)

# %% [markdown]
# FSDP does this on GPUs by itself, in the order in which units ran; `set_modules_to_forward_prefetch` and
# `..._backward_prefetch` fetch more of them early, each at the price of one more unit in memory.
#
# ## Lower precision, offload, two levels (MORE, 6 min)
#
# Three switches of `fully_shard`, each with what it changes on the wire.
#
# **Mixed precision**: the shards and the optimizer stay fp32; what is gathered and multiplied is bf16; gradients
# are summed in what you say.
#
# **Predict.** bf16 for parameters, fp32 for the sums of gradients. Which of the two volumes halves?

# %%
# %%ranks
catch_up(globals(), "by_library", "volumes", "in_words")

# %%
# %%ranks
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
model = by_library(new_model(), mp_policy=policy)
with wire.watch() as seen:
    _, loss = model(*batch(0))
    loss.backward()
share = model.head.weight.to_local()
if rank == 0:
    found = {op: round(value, 2) for op, value in volumes(seen).items()}
    say(f"volumes in P of 4 bytes: {found}")
    say(f"loss {loss.item():.3f} in {loss.dtype}, shards in {share.dtype}")

# %% [markdown]
# The gathers' bytes halve, the reduce-scatter's stay. (No autocast and no copy of the weights in bf16 beside the
# whole: what is gathered *is* the copy.) Reducing in bf16 would halve the rest, and add up n gradients in 8
# significant bits.
#
# **Offload**: shards, gradients and optimizer rest in the CPU's memory; a unit's share goes to the GPU to be
# gathered, and its gradient comes back, each over PCIe. The update runs on the CPU. A last resort, but a model that
# fits beats one that does not.

# %%
# %%ranks
# pinned memory, from which a GPU can read by itself, exists only where there is a GPU
model = by_library(new_model(), offload_policy=CPUOffloadPolicy(pin_memory=device.type != "cpu"))
optimizer = adamw(model.parameters())
model(*batch(0))[1].backward()
optimizer.step()
on = {tensor.device.type for p in model.parameters() for tensor in (p.to_local(), p.grad.to_local())}
if rank == 0:
    say(f"ranks compute on {device.type}; shards and gradients rest on {', '.join(on)}")

# %% [markdown]
# **HSDP**, hybrid sharding: between nodes the network is slow, and gathering a layer twice per step over it hurts.
# So shard *within* a node, where links are fast, and keep copies *between* nodes, as DDP does. The mesh says who
# does what.
#
# ![Two nodes of four GPUs: the weights are cut into four within each node; ranks with the same share in both nodes average its
# gradients](../assets/06_hsdp.svg)
#
# **Predict.** Two nodes of two ranks. What does a rank call for each unit in backward, besides the all-gather?
#
# <details><summary>Answer</summary>
#
# A reduce-scatter with the other rank of its node, then an all-reduce of its share with the same place in the other node.
#
# </details>

# %%
# %%ranks
nodes = 2 if world_size % 4 == 0 else 1  # as if this machine were two
two_levels = init_device_mesh(
    device.type, (nodes, world_size // nodes), mesh_dim_names=("replicate", "shard")
)
model = new_model()
for module in (*model.blocks, model):
    fully_shard(module, mesh=two_levels)
with wire.watch() as seen:
    model(*batch(0))[1].backward()
if rank == 0:
    say(f"{nodes} x {world_size // nodes}: " + ", ".join(f"{seen.count(op)} {op}" for op in volumes(seen)))
    say(f"volumes in P: { {op: round(value, 2) for op, value in volumes(seen).items()} }")
    say(f"a rank keeps {sum(p.to_local().numel() for p in model.parameters()) / P:.3f} of the parameters")

# %% [markdown]
# A reduce-scatter within the node, then an all-reduce *of the share* between nodes: each rank hands only 1/(ranks
# per node) of the gradient to the slow network, and no weights. (The 1.0 above is half a P, counted twice: an all-reduce
# is two volumes.) The price is memory: shards are as many times
# larger as there are nodes.
#
# ## DeepSpeed's ZeRO (MORE, 5 min)
#
# The paper's own authors wrote DeepSpeed. There a stage is a number in a configuration; the engine it returns owns
# the backward pass and the step.
#
# | | PyTorch | DeepSpeed |
# |---|---|---|
# | wrap | `fully_shard(block)`, ..., `fully_shard(model)` | `engine, *_ = deepspeed.initialize(model=model, config=config)` |
# | stage | `reshard_after_forward`, the mesh | `{"zero_optimization": {"stage": 3}}` |
# | a step | `loss.backward(); optimizer.step()` | `engine.backward(loss); engine.step()` |
# | what is cut | each weight along dim 0 | each weight, or the row of all, in equal pieces |
# | clipping | `clip_grad_norm_`, you call it | in `engine.step()`, to `"gradient_clipping"`: 1.0 *unless you say 0* (0.19) |
#
# It is an optional extra: `pip install -e .[deepspeed]` in the course's folder, then run this section again. The
# trainer drives it behind the same interface as everything else, so that one function compares all stages with one
# process.


# %%
# %%ranks
def deepspeed_losses(stage):
    """Losses of 3 clipped steps under DeepSpeed's ZeRO. Raises OptionError where it is not installed."""
    sizes = f"--model.n-layer {layers} --train.global-batch {global_batch}"
    plain = "--optimizer.name sgd --optimizer.weight-decay 0"
    engine = f"--parallel.strategy deepspeed --parallel.zero-stage {stage}"
    options = read_options(shlex.split(f"{sizes} {plain} {engine}"))
    its_config = model_config(options, config.vocab_size)
    parallel = parallelize(its_config, resolve_layout(options, its_config, world_size), options, ranks)
    optimizer, losses = build_optimizer(parallel, options), []
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    for step in range(3):
        losses.append(parallel.mean_loss(parallel.forward_backward(*batch(step))))
        parallel.clip(0.3)
        optimizer.step()
    return torch.stack(losses)


# %% [markdown]
# The reference: one process, the same three steps.

# %%
# %%ranks
single = new_model()
sgd_single, expected = torch.optim.SGD(single.parameters(), lr=0.5), []
for step in range(3):
    sgd_single.zero_grad()
    _, loss = single(*batch(step, 0, 1))
    loss.backward()
    nn.utils.clip_grad_norm_(single.parameters(), 0.3)
    sgd_single.step()
    expected.append(loss.detach())

# %% [markdown]
# All three stages against it, in fp32:

# %%
# %%ranks --timeout 180
try:
    for stage in (1, 2, 3):
        difference = (deepspeed_losses(stage) - torch.stack(expected)).abs().max().item()
        assert difference < 1e-4, f"stage {stage} differs by {difference:.1e}"
        if rank == 0:
            say(f"DeepSpeed ZeRO-{stage}: losses of 3 steps equal to one process's, within {difference:.0e}")
except OptionError as error:
    if rank == 0:
        say(f"not here: {error}")

# %% [markdown]
# ## Exercises (MORE, 25 min)
#
# Exercise 1 was the norm. Each check runs your answer in a process group of its own: you cannot break anything.
#
# ### Exercise 2: predict the bytes of a wrapping
#
# `sizes` are the numbers of parameters of each unit, the root last; n ranks, fp32, AdamW, everything sharded
# (ZeRO-3). Write `predict(sizes, n)` that returns four numbers for one rank: the bytes it holds at rest (weights,
# gradients, moments); the bytes of the rows that are whole at the same time, at most; how many all-gathers a step
# makes; and the bytes handed over in a step, all collectives together. Every size is a multiple of n.


# %%
# %%ranks
def predict(sizes, n):
    raise NotImplementedError  # your turn


checks.predict(predict, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 2
def predict(sizes, n):
    *inner, root = sizes
    held = 16 * sum(sizes) // n  # 4 of weight, 4 of gradient, 8 of moments
    whole = 4 * (root + max(inner, default=0))  # the root stays while the others take turns
    gathers = 2 * len(inner) + 1
    handed_over = 4 * (2 * sum(inner) + root) + 4 * sum(sizes)
    return held, whole, gathers, handed_over


checks.predict(predict, ranks, solution=True)

# %% [markdown]
# Against reality, with the `wrapping` of this run's parameters:

# %%
# %%ranks
catch_up(globals(), "build", "measure", "unit_sizes")

# %%
# %%ranks
held, seen, _, _ = measure(f"--parallel.strategy fsdp --parallel.wrapping {wrapping}")
held_bytes, whole_bytes, gathers, handed_over = predict(unit_sizes(config, wrapping), world_size)
if rank == 0:
    say(f"{wrapping}: held {held.total / held_bytes:.3f} of the prediction, which knows no padding")
    say(
        f"{seen.count('all_gather')} all-gathers, predicted {gathers}; {seen.payload_bytes():,} bytes, predicted {handed_over:,}"
    )

# %% [markdown]
# (A world of one sends nothing; the library knows.)
#
# ### Exercise 3: never build the whole model
#
# All models above were built whole on every rank, and then cut. With `init_device: cuda` in a 7 B configuration
# every GPU first holds all weights, 26.9 GB in fp32, to keep a 64th of them. (OLMo's own file says
# [`meta`](https://github.com/allenai/OLMo/blob/main/configs/official/OLMo-7B.yaml).) Where they do not fit, it runs
# out of memory before step 1, and no sharding helps. The cure is the [**meta
# device**](../assets/glossary.md#meta-device): tensors with shape and dtype, but without numbers.

# %%
# %%ranks
with torch.device("meta"):
    large = GPT(seven_b)
if rank == 0:
    in_all = sum(p.nbytes for p in large.parameters())
    say(
        f"7 B in fp32: {in_all / 1e9:.1f} GB whole, {in_all / 64 / 1e9:.2f} GB to keep on each of 64 ranks; here 0"
    )

# %% [markdown]
# Write `sharded_from_meta(make, mesh)`: it returns the model of `make()`, an `nn.Sequential`, with each of its
# layers a unit, sharded over `mesh`, on the CPU, so that its weights are *the same numbers* as those of the full
# model:
#
# ```python
# full = make()
# torch.manual_seed(7)
# for p in full.parameters():
#     p.data.normal_(std=0.02)
# ```
#
# The check follows every allocation: at no moment may this rank hold more than its shares and two layers.
# `model.to_empty(device="cpu")` gives memory to a sharded meta model. You may draw one whole weight at a time.


# %%
# %%ranks
def sharded_from_meta(make, mesh):
    raise NotImplementedError  # your turn


checks.sharded_from_meta(sharded_from_meta, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 3
def sharded_from_meta(make, mesh):
    with torch.device("meta"):
        model = make()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")  # memory for the shares only
    torch.manual_seed(7)
    k = mesh.get_local_rank()
    with torch.no_grad():
        for p in model.parameters():  # in the full model's order; every rank draws all numbers
            whole = torch.empty(p.shape).normal_(std=0.02)  # one weight at a time
            parts = whole.chunk(mesh.size())  # along dim 0; fewer than ranks where there are too few rows
            if k < len(parts):
                p.to_local().copy_(parts[k])
    return model


checks.sharded_from_meta(sharded_from_meta, ranks, solution=True)

# %% [markdown]
# (All ranks draw everything and keep a share, so the start does not depend on the number of ranks. Real runs often
# load a checkpoint instead, share by share: lesson 11.)
#
# ### Exercise 4: two nodes of four
#
# 8 ranks on 2 nodes: 0 to 3 on the first. Write `hybrid(num_nodes, per_node)` for any such numbers. It returns the
# groups of ranks that *shard* together, the groups that hold *copies* of the same share, both as lists of lists in
# order of rank, and the share of the gradient's bytes that one rank hands to the all-reduce between nodes.


# %%
# %%ranks
def hybrid(num_nodes, per_node):
    raise NotImplementedError  # your turn


checks.hybrid(hybrid, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 4
def hybrid(num_nodes, per_node):
    grid = torch.arange(num_nodes * per_node).view(num_nodes, per_node)  # a row is a node
    return grid.tolist(), grid.T.tolist(), 1 / per_node


checks.hybrid(hybrid, ranks, solution=True)

# %% [markdown]
# ## A bug from the zoo (CORE, 3 min)
#
# Code that clipped well under DDP moves to FSDP. Parameters are DTensors now, so take what is here, `to_local()`,
# and clip it as before. These lines run, on all ranks, and the loss falls. **What is wrong, and which measurement
# shows it?** Write down your suspicion before you open the answer.

# %%
# %%ranks
catch_up(globals(), "by_library", "library_clip")


# %%
# %%ranks
def clip_my_share(model, max_norm):
    gradients = [p.grad.to_local() for p in model.parameters()]
    norm = nn.utils.get_total_norm(gradients)
    for gradient in gradients:
        gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm


# %% [markdown]
# Eight steps with it:

# %%
# %%ranks
model = by_library(new_model())
optimizer, seen_losses = torch.optim.SGD(model.parameters(), lr=0.5), []
for step in range(8):
    _, loss = model(*batch(step))
    loss.backward()
    clip_my_share(model, 0.3)
    optimizer.step()
    optimizer.zero_grad()
    seen_losses.append(f"{loss.item():.3f}")
if rank == 0:
    say(f"rank 0's loss: {' '.join(seen_losses)}")

# %% [markdown]
# Now measure: let *every* rank say its norm, and compare with the library's and with the square root of n.

# %%
# %%ranks
model(*batch(8))[1].backward()
theirs = nn.utils.get_total_norm([p.grad.to_local() for p in model.parameters()]).item()
right = library_clip(model, max_norm=float("inf")).item()  # a limit that changes nothing
say(
    f"my norm is {theirs:.4f}, the model's is {right:.4f}, ratio {right / theirs:.2f}; sqrt(n) is {world_size**0.5:.2f}"
)

# %% [markdown]
# The ratios differ, because the shares are not equally long. What fits are the squares: those of the ranks' norms
# add up to the model's. And what does the clipping leave? The limit is 0.3. Then mend it: the same gradient,
# clipped by a norm that all ranks share.

# %%
# %%ranks
clip_my_share(model, 0.3)
after = library_clip(model, max_norm=float("inf")).item()
optimizer.zero_grad()
model(*batch(8))[1].backward()
library_clip(model, 0.3)
mended = library_clip(model, max_norm=float("inf")).item()
if rank == 0:
    say(
        f"clipped by each rank's own norm the gradient has length {after:.3f}, by the global norm {mended:.3f}"
    )

# %% [markdown]
# <details><summary>Answer</summary>
#
# `to_local()` is this rank's share, and its length is not the gradient's. Every rank computes another norm, all of
# them too small, and scales its share by its own factor: what remains is up to the square root of n times longer
# than the limit, and it is *turned*, because its parts are scaled differently. The more ranks, the weaker the
# clipping: a run that was stable on 8 GPUs need not be on 512. On one rank the lines are right, and no test on one
# GPU finds them.
#
# The library's own `clip_grad_norm_` is right for DTensors. The norm that it *returns* is a DTensor, too. In torch 2.13
# its local part is the global norm; in older versions it was the local one, and `norm.item()` read that.
# `norm.full_tensor()` is right in both. That is how people came to report a norm that differs between ranks:
# [torchtitan#766](https://github.com/pytorch/torchtitan/issues/766), and, as a bug of torch,
# [pytorch#170862](https://github.com/pytorch/pytorch/issues/170862). Together with tensor parallelism the call can
# fail outright: [torchtune#2420](https://github.com/meta-pytorch/torchtune/issues/2420).
#
# </details>
#
# The rule to take home: **a number that a rank computes from its share is a rank's number.** Let all ranks say it;
# a global one is the same everywhere.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# The loss falls in all versions: let the room say what it would take to see the
# bug in a loss curve (an unstable run, weeks later). *When late:* skip the training cell, run the one that
# measures.
#
# </details>

# %% [markdown]
# ## On the cluster
#
# The trainer knows all of this lesson as flags. First ask what would run, and whether it fits; then submit the job of
# [lesson 04](04_first_job.ipynb) with the same flags:
#
# ```bash
# python scripts/train.py --preset olmo-7b --ranks 64 --dry-run
# python scripts/train.py --preset olmo-7b --ranks 64 --dry-run --parallel.sharding hybrid --parallel.shard 4
# python scripts/launch.py --nproc 4 -- --preset nano --parallel.strategy fsdp --parallel.wrapping block_group:2
# ```
#
# **What changes on GPUs.** `join()` takes NCCL, whose reduce-scatter is one; gathers run in a stream of their own
# and hide behind computation, if a unit takes longer to compute than to gather. Both grow with its weights, only
# computing grows with a rank's tokens: give it enough of them. bf16 for what is gathered. Activations are sharded
# by nothing in this lesson; `--parallel.recompute block` is the remedy (lesson 01).
#
# **What to look for**: `torch.cuda.max_memory_allocated` against the dry run's total plus activations; the same
# losses as DDP for the same global batch; tokens per second by wrapping, measured, not guessed, on as many nodes as
# you will use (on one machine wrapping by block *slowed* a 7 B model beyond 32 nodes: lesson 15).

# %% [markdown]
# ## Recap
#
# 1. Moments, gradients, weights: each number needs one owner; only weights are needed by all, and only while their layer computes.
# 2. Stages 1 and 2 cost nothing over DDP in volume, 2 P; stage 3 costs up to 3 P and shrinks everything with n.
# 3. All-gather, forward, free; all-gather, backward, reduce-scatter, free; update the own share. Per unit, in backward.
# 4. Wrapping decides what is whole at once, and how many calls that takes; the root is gathered once.
# 5. A norm of a share is not the norm. Prove equality with one process, in float64, clipping included.
#
# ## Further reading
#
# - Rajbhandari et al. 2020, [ZeRO: memory optimizations toward training trillion parameter models](https://arxiv.org/abs/1910.02054): the
#   stages, figure 1, and section 7 on volumes.
# - Zhao et al. 2023, [PyTorch FSDP: experiences on scaling fully sharded data parallel](https://arxiv.org/abs/2304.11277): units, prefetch,
#   hybrid sharding, by those who wrote it.
# - PyTorch, [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html): the reference of today's form.
# - Ren et al. 2021, [ZeRO-Offload](https://arxiv.org/abs/2101.06840), and Rajbhandari et al. 2021,
#   [ZeRO-Infinity](https://arxiv.org/abs/2104.07857): the CPU's memory and NVMe, which are not stages.

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
