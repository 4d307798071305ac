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
# **50 minutes** for the sections marked CORE, 110 with those marked MORE.
#
# A model does not fit into the memory of a GPU. **How can several GPUs hold it together?** You make it fit in three
# **stages**, the rungs of this lesson: shard the optimizer, then the gradients, then the parameters.
#
# After this lesson **you can**
# - build the three stages of ZeRO, and say what each holds and sends;
# - use `fully_shard`;
# - say when gathering weights costs no time, and which optimizers break on a shard.
#
# **You need** data parallel training ([lesson 03](03_data_parallel.ipynb)), and the two halves of an all-reduce
# ([lesson 02](02_collectives.ipynb)): a [reduce-scatter](../assets/glossary.md#reduce-scatter) gives each rank its
# piece of the sum, an [all-gather](../assets/glossary.md#all-gather) gives all pieces to every rank.
#
# **New here:** [ZeRO](../assets/glossary.md#zero), [shard](../assets/glossary.md#shard),
# [FSDP](../assets/glossary.md#fsdp), [unit](../assets/glossary.md#unit), [DTensor](../assets/glossary.md#dtensor),
# [reshard](../assets/glossary.md#reshard), and in MORE [global norm](../assets/glossary.md#global-norm),
# [HSDP](../assets/glossary.md#hsdp), [meta device](../assets/glossary.md#meta-device),
# [offload](../assets/glossary.md#offload).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 1, a model that does not fit 3, who needs what 2, rungs 13, 6 and 9, real machines 3, the
# library 2, zoo 4, card 1; the rest is for questions. A build takes three to four minutes, and these are in the numbers.
#
# *Say:* one question carries the lesson: "who needs this number, and when?" Adam's moments: one rank, once per step.
# Gradients: one rank, after backward. Weights: every rank, but one layer at a time. Each stage of ZeRO is one of these
# three answers.
#
# *Three usual mistakes:* thinking that FSDP splits the *computation* of a layer (that is lesson 07; here every rank
# computes whole layers, on its own sequences); thinking that gradients are reduced after backward; mixing up sharding
# and offload.
#
# *When late:* give solution C, keep builds B and D and the zoo.
#
# *Ask the room:* "64 GPUs, each holds a 64th of the model. How many whole copies of a layer exist while that layer
# computes?" (64. Sharding saves memory at rest.)
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
layers = 4  # layers of the GPT, 2 to 12
global_batch = 0  # sequences per step, all ranks together; 0: 12, or more where it does not split, at least 0
memory_mb = 0.0  # MB that a rank has in a step; 0: a little more than ZeRO-3 needs, 12 on four ranks, at least 0
wrapping = "block"  # how you wrap the model: block, block_and_size, block_group:2, size:100000
steps = 3  # steps of SGD that are compared, at least 1

# %% [markdown]
# ## Start (CORE, 1 min)
#
# The cells start four ranks and prepare lesson 03's **ShakespeareGPT**, which has `P` parameters. A reduce-scatter or an
# all-gather of all of them counts as 1 P, an all-reduce, which is both, as 2 P.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("06_zero_fsdp", globals())

# %%
# %%ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands import ____, card, compare, fingerprint, join, leave, say, say_once
from manyhands.checks import zero_fsdp as checks
from manyhands.lessons import zero_fsdp as lesson
from manyhands.lessons.zero_fsdp import adamw
from manyhands.measure import wire
from manyhands.measure.replicas import flat
from manyhands.train.shakespeare import Shakespeare
from torch import nn

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
shakespeare = Shakespeare(ranks, global_batch, layers, memory_mb=memory_mb, wrapping=wrapping, steps=steps)
new_model, batch, P = shakespeare.new_model, shakespeare.batch, shakespeare.config.num_params()
rungs = lesson.Rungs(shakespeare, memory_mb)

# %% [markdown]
# ## A model that does not fit (CORE, 3 min)
#
# A GPU may have 80 GB; here each rank has 12 MB. `rungs.climb` trains three steps with AdamW, and says what a rank holds
# and sends. A step that needs more than 12 MB raises `OutOfMemory`, which `try_to_climb` prints. First
# [**DDP**](../assets/glossary.md#ddp):

# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel as DDP

rungs.try_to_climb("DDP", lambda model: (DDP(model, gradient_as_bucket_view=True), adamw(model.parameters())))

# %% [markdown]
# On a GPU you would read `CUDA out of memory`. The 13.07 MB are weights, gradients and Adam's two moments.
#
# **Predict.** On 64 ranks instead of four, how many MB of weights, gradients and moments does each rank hold?

# %%
# %%ranks
guess_64 = ____  # your turn: type MB

# %%
# %%ranks
compare("MB that a rank holds under DDP on 64 ranks", "guess_64", round(16 * P / 1e6, 1), "MB")

# %% [markdown]
# More ranks save no memory. Each holds 16 bytes for each parameter: 4 of weight, 4 of gradient, 8 of Adam's two moments.
# All ranks hold *the same numbers*.

# %% [markdown]
# ## Who needs what, and when? (CORE, 2 min)
#
# [**ZeRO**](../assets/glossary.md#zero) (Rajbhandari et al. 2020) asks this for each kind of number:
#
# | number | who needs it | when | sharded from |
# |---|---|---|---|
# | optimizer state | the rank that updates this weight | at the update | ZeRO-1 |
# | gradient, summed | the same rank | from backward to the update | ZeRO-2 |
# | parameter | every rank | while its layer computes | ZeRO-3 |
#
#
# ![Bytes per rank without sharding and in three stages: stage 1 cuts the optimizer's, stage 2 also the gradients',
# stage 3 all](../assets/06_stages.svg)
#
# (Mixed precision also takes 16 bytes.) Only in stage 3 does everything shrink with the number of ranks.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: who needs what</summary>
#
# Let the room fill in the table's middle column before you show it. *Usual mistake:* "stage 2 sends less than stage
# 1"; no, it holds less. *Ask:* "You have 8 GPUs, and the model fits with ZeRO-1. Why not ZeRO-3?" (50 % more volume
# for memory that you do not need.)
#
# </details>

# %% [markdown]
# ## Rung 1: shard the optimizer (CORE, 13 min)
#
# To update one weight, AdamW needs that weight, its gradient and its moments. So a rank can update a *piece* of the
# model with that piece's moments. Put all parameters into one row, the **flat parameter**, and cut it into n equal pieces.
# Each rank owns one, its [**shard**](../assets/glossary.md#shard) or share. (In names `_P` is the whole row, `_p` this
# rank's share.)
#
# ![38 weights on two ranks: under DDP both hold all, under FSDP each holds 19; an all-gather makes them whole for a
# moment](../assets/06_two_halves.svg)
#
# ### Build A: your share of the row
#
# If n does not divide the row's length, append as few zeros as needed: `F.pad(row, (0, 2))` appends two. Clone your
# piece, because a view keeps the whole row in memory.


# %%
# %%ranks
def my_share(row_P, n, rank):
    """Piece number `rank` of n equal ones, in memory of its own."""
    padding = ____  # how many zeros; 38 numbers on 4 ranks need 2
    return F.pad(row_P, (0, padding)).____  # cut it into n pieces, take yours, clone it


checks.my_share(my_share, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution A</summary>
#
# ```python
# def my_share(row_P, n, rank):
#     padding = -len(row_P) % n  # 0 where n divides the row
#     return F.pad(row_P, (0, padding)).chunk(n)[rank].clone()
# ```
#
# </details>

# %% [markdown]
# A [**unit**](../assets/glossary.md#unit) is a set of parameters in one row. They become views of it: filling the row fills
# the model. Only `share_p` goes to the optimizer.


# %%
# %%ranks
class Unit:
    """Some parameters in one row `whole_P`, which n divides, and this rank's `share_p` of it."""

    def __init__(self, parameters, apart=False):  # apart: the share has memory of its own, as ZeRO-3 needs it
        self.parameters = list(parameters)
        row_P = flat(self.parameters)
        self.padding = -len(row_P) % world_size
        self.whole_P = F.pad(row_P, (0, self.padding))
        parts = self.whole_P[: len(row_P)].split([p.numel() for p in self.parameters])
        for p, part in zip(self.parameters, parts, strict=True):
            p.data = part.view_as(p)
        view_p = self.whole_P.chunk(world_size)[rank]
        self.share_p = nn.Parameter(my_share(row_P, world_size, rank) if apart else view_p)

    def gradient_row(self):  # this rank's gradients, flattened and padded to the length of `whole_P`
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        return F.pad(flat(gradients), (0, self.padding))

    def refresh(self):  # after the update everybody needs the new weights
        all_gather(self)


# %% [markdown]
# ### Build B: the two halves
#
# After backward, every rank has gradients of all weights, from its own sequences. In `reduce_scatter`:
#
# 1. Call the half of the all-reduce that writes this rank's piece of the sum into `sum_p`.
# 2. Put the *average* over the ranks into `unit.share_p.grad`.
# 3. Set each parameter's own `grad` to None, which frees its memory.
#
# After the update, `all_gather` calls the other half.


# %%
# %%ranks
def reduce_scatter(unit):
    """Average the gradients over the ranks; each rank keeps its share. All ranks call it."""
    sum_p = torch.empty_like(unit.share_p)
    pieces = list(unit.gradient_row().chunk(world_size))
    dist.____(sum_p, pieces)
    unit.share_p.grad = ____
    for p in unit.parameters:
        ____


def all_gather(unit):
    """Fill the row, and so the model, from everybody's share. All ranks call it."""
    pieces = list(unit.whole_P.chunk(world_size))  # views: filling them fills the row
    dist.____(pieces, ____.detach())


checks.reduce_scatter(reduce_scatter, ranks)
checks.all_gather(all_gather, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def reduce_scatter(unit):
#     sum_p = torch.empty_like(unit.share_p)
#     pieces = list(unit.gradient_row().chunk(world_size))
#     dist.reduce_scatter(sum_p, pieces)
#     unit.share_p.grad = sum_p / world_size
#     for p in unit.parameters:
#         p.grad = None
#
#
# def all_gather(unit):
#     pieces = list(unit.whole_P.chunk(world_size))  # views: filling them fills the row
#     dist.all_gather(pieces, unit.share_p.detach())
# ```
#
# </details>

# %% [markdown]
# That is ZeRO-1. A step calls your two halves, with AdamW on the share between them. Here the whole model is one unit.


# %%
# %%ranks
class ShardedOptimizer:
    """An optimizer of which each rank runs its share: backward(); step(); zero_grad()."""

    def __init__(self, units, make=adamw):
        self.units, self.shares = units, [unit.share_p for unit in units]
        self.own = make(self.shares)
        self.zero_grad = self.own.zero_grad

    def step(self):
        for unit in self.units:  # all ranks, in the same order; what backward has reduced is done
            if any(p.grad is not None for p in unit.parameters):
                reduce_scatter(unit)
        self.own.step()
        for unit in self.units:
            unit.refresh()


rungs.try_to_climb("ZeRO-1", lambda model: (model, ShardedOptimizer([Unit(model.parameters())])))

# %% [markdown]
# Each rank has a quarter of the moments, but all gradients, and a row of them. The step sends 2 P, as under DDP.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: rung 1</summary>
#
# *Say:* "each rank updates one piece, so it needs the moments of that piece only". Build B is where most people divide
# by n twice or not at all; the check says which. *Usual question:* "why does stage 1 reduce-scatter, if all gradients
# are there anyway?" Because nobody needs the other averages; an all-reduce would be a P too many, as in the library's 3
# P (in MORE).
#
# </details>

# %% [markdown]
# ## Rung 2: shard the gradients (CORE, 6 min)
#
# Each rank holds all gradients until backward ends. But backward finishes block by block, and a finished block can be
# reduced at once. So each block becomes a unit. Embeddings, final norm and head are one more, the **root**.
#
# ### Build C: reduce during backward
#
# PyTorch calls `gradient_is_there(p)` when the gradient of parameter `p` is complete. `ready` lists these parameters. When
# it has all of the unit, reduce the unit with build B. (`then()` is for rung 3.)


# %%
# %%ranks
def reduce_in_backward(unit, then=lambda: None):
    """When backward has all gradients of the unit, reduce them, and call `then`."""
    ready = []

    def gradient_is_there(p):
        ready.append(p)
        if ____:  # this was the last one
            ready.clear()  # for the next backward
            ____
            then()

    for p in unit.parameters:
        p.register_post_accumulate_grad_hook(gradient_is_there)


checks.reduce_in_backward(reduce_in_backward, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution C</summary>
#
# ```python
# def reduce_in_backward(unit, then=lambda: None):
#     ready = []
#
#     def gradient_is_there(p):
#         ready.append(p)
#         if len(ready) == len(unit.parameters):
#             ready.clear()  # for the next backward
#             reduce_scatter(unit)
#             then()
#
#     for p in unit.parameters:
#         p.register_post_accumulate_grad_hook(gradient_is_there)
# ```
#
# </details>

# %%
# %%ranks
from manyhands.parallel.fsdp import parameters_by_unit


def zero_2(model):
    made = [Unit(parameters) for parameters in parameters_by_unit(model, "block")]  # the root last
    for unit in made:
        reduce_in_backward(unit)
    return made


rungs.try_to_climb("ZeRO-2", lambda model: (model, ShardedOptimizer(zero_2(model))))

# %% [markdown]
# Each unit's full gradients are freed as soon as they are reduced.

# %% [markdown]
# ## Rung 3: shard the parameters (CORE, 9 min)
#
# Only the weights are still whole. Every rank needs all of them, but **not at the same time**. So it gathers each unit
# before the unit computes, in forward and in backward, and frees it afterwards.
#
# ![One unit, one step: all-gather, forward, free; all-gather, backward, reduce-scatter, free; update of the
# share](../assets/06_fsdp_step.svg)
#
# The library calls `gather` **unshard**, and `free` [**reshard**](../assets/glossary.md#reshard):


# %%
# %%ranks
def gather(unit):
    """Make the row whole, if it is not. All ranks call it."""
    storage = unit.whole_P.untyped_storage()
    if storage.size() == 0:
        storage.resize_(unit.whole_P.nbytes)
        all_gather(unit)


def free(unit):  # only the share stays; whoever reads a parameter now reads nothing; local
    unit.whole_P.untyped_storage().resize_(0)


# %% [markdown]
# ### Build D: gather and free at the right moments
#
# Register `come` and `go` so that the unit is whole while its modules compute, and empty otherwise. `modules[0]` is the
# first in forward and the last in backward. With `stays=True` the unit stays whole from forward to backward (in the
# library: `reshard_after_forward=False`).
#
# | this | calls f |
# |---|---|
# | `module.register_forward_pre_hook(f)`, `module.register_forward_hook(f)` | before and after its forward |
# | `module.register_full_backward_pre_hook(f)` | before its backward |
# | `reduce_in_backward(unit, then=f)` | when the unit's gradients are reduced |


# %%
# %%ranks
def gather_when_needed(unit, modules, stays=False):
    """Gather this unit before its modules compute, and free it afterwards; it is freed now."""

    def come(*_):  # hooks of a module pass arguments that you do not need
        gather(unit)

    def go(*_):
        free(unit)

    modules[____].register_forward_pre_hook(____)
    if not stays:
        modules[____].register_forward_hook(____)
        modules[____].register_full_backward_pre_hook(____)
    reduce_in_backward(unit, then=____)


checks.gather_when_needed(gather_when_needed, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution D</summary>
#
# ```python
# def gather_when_needed(unit, modules, stays=False):
#     def come(*_):
#         gather(unit)
#
#     def go(*_):
#         free(unit)
#
#     modules[0].register_forward_pre_hook(come)
#     if not stays:
#         modules[-1].register_forward_hook(go)
#         modules[-1].register_full_backward_pre_hook(come)  # backward begins with the last
#     reduce_in_backward(unit, then=go)
# ```
#
# </details>

# %% [markdown]
# The root stays whole, because backward begins with it. (`units` lists each unit's modules: here one block.)


# %%
# %%ranks
from manyhands.parallel.fsdp import parameters_by_unit, units


def zero_3(model, wrapping="block"):
    """ZeRO-3, in place; `wrapping` says what is gathered together. Returns the units, the root last."""
    modules_of, made = [*units(model, wrapping), [model]], []
    for modules, parameters in zip(modules_of, parameters_by_unit(model, wrapping), strict=True):
        unit = Unit(parameters, apart=True)
        gather_when_needed(unit, modules, stays=modules == [model])
        unit.refresh = lambda unit=unit: free(unit)  # after the update a whole row would be out of date
        free(unit)
        made.append(unit)
    return made


rungs.climb("ZeRO-3", lambda model: (model, ShardedOptimizer(zero_3(model))))  # out of memory, this cell would fail

# %% [markdown]
# It fits. The largest part now is activations, which no stage shards.
#
# **Predict.** A GPT of two blocks: two units and the root. How many all-gathers does one step make?

# %%
# %%ranks
guess_gathers = ____  # your turn: type a number

# %%
# %%ranks
model = new_model(n_layer=2)
zero_3(model)
with wire.watch() as seen:
    model(*batch(0))[1].backward()
calls = f"in thousands of numbers: {lesson.in_words(seen)}"
compare("all-gathers of two blocks and the root", "guess_gathers", seen.count("all_gather"), because=calls)

# %% [markdown]
# Forward gathers the root, block 0 and block 1. Backward gathers and reduces block 1, then block 0, and reduces the root
# last. The root is gathered only once, so a step sends a little less than 3 P.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: rung 3</summary>
#
# Act it out with four volunteers and a deck of cards: each holds a quarter of every suit; to play hearts all show
# their hearts, then take them back. *Usual mistakes:* believing that forward of a sharded layer computes a share of
# it; in build D, hooking the backward to `modules[0]`, whose backward comes last. *Ask:* "what is the least memory in
# which a step fits?" (At least the root and the largest unit, whole, with the unit's gradients, beside all shares; and
# activations.)
#
# </details>

# %% [markdown]
# ## What it costs on real machines (CORE, 3 min)
#
# ZeRO-3 sends 1 P more than DDP. This costs no time if each gather runs while the unit before it computes. A unit of w
# parameters gathers 2w bytes in bf16. Its forward takes 2w FLOPs per token. So a gather hides if
#
# tokens per GPU ≥ (FLOP/s of the GPU) / (bytes/s of the network).
#
# **Predict.** A GPU reaches 400 TFLOP/s. A node has 8 GPUs, each with a network card of 50 GB/s. A gather over many nodes
# enters each node once, over all 8 cards. How many tokens does each GPU need per micro-batch?

# %%
# %%ranks
guess_tokens = ____  # your turn: type a number

# %%
# %%ranks
compare("tokens per GPU that hide a gather", "guess_tokens", 400e12 / (8 * 50e9), "tokens")

# %% [markdown]
# Backward sets the limit: 4w FLOPs per token, 2w bytes to gather, and 4w bytes of fp32 gradients to reduce. That makes
# 1,500 tokens per GPU. Llama 3 405B had 1,024 tokens per GPU ([16 M per step on 16,384
# GPUs](https://arxiv.org/abs/2407.21783)). So FSDP alone could not hide its messages; it took tensor and pipeline ranks,
# too.
#
# Others published FSDP on up to 512 H100s ([MPT
# 7B](https://github.com/mosaicml/llm-foundry/blob/8c8dd48f72168c5d51e2f7b151595892a8fba43d/scripts/train/benchmarking/README.md),
# [Llama 3.1
# 8B](https://github.com/pytorch/torchtitan/blob/31a17bfdb70bab6f62a13d21816a5339b911d6e3/benchmarks/llama3_h100_202412_torchtitan.md)).
# Each GPU of the MPT run had 12,288 tokens, far more than 1,500. So expect a nearly flat line:

# %%
# %%ranks
lesson.draw_published(ranks)

# %% [markdown]
# ## The library (CORE, 2 min)
#
# PyTorch's [**FSDP**](../assets/glossary.md#fsdp), fully sharded data parallel: call `fully_shard` on each unit, then on
# the model, whose remaining parameters become the root.

# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def by_library(model, mesh=None, **settings):
    """fully_shard, by block, in place; returns the model. `mesh`: who shares, by default all ranks."""
    mesh = mesh or init_device_mesh(device.type, (world_size,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, **settings)
    return model


model = by_library(new_model(n_layer=2))
with wire.watch() as seen:
    model(*batch(0))[1].backward()
weight = model.head.weight
say_once(f"in thousands of numbers: {lesson.in_words(seen)}")
say_once(f"head.weight is a {type(weight).__name__} {list(weight.shape)}; here {list(weight.to_local().shape)}")
rungs.try_to_climb("fully_shard", lambda model: (by_library(model), adamw(model.parameters())))

# %% [markdown]
# Again five all-gathers. In backward the library gathers block 0 *before* it reduces block 1, so that the gather can
# hide. Each weight is a [**DTensor**](../assets/glossary.md#dtensor): a rank holds some of its rows. Your share is a
# piece of one long row instead.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the library</summary>
#
# Show `p.shape` against `p.to_local().shape` and let it sink in: code that reads `p.shape` still works. *Usual
# mistakes:* building the optimizer before `fully_shard` (it would hold the old parameters); calling `fully_shard` on
# the root alone and wondering why memory does not fall. On 4 ranks the library's root is longer than ours: the 65 rows
# of embedding and head, and the head's bias, are padded to 68. *Ask:* "where in our code is the gradient divided by n,
# and what if it were divided twice?"
#
# </details>

# %% [markdown]
# ## A bug from the zoo (CORE, 4 min)
#
# "Any optimizer of torch works on a share." Four optimizers train two matrices in three ways: in one process, with your
# flat share, with `fully_shard`.
#
# | optimizer | its update |
# |---|---|
# | SGD with momentum | a running mean of the gradient |
# | AdamW | that mean, divided by the root of a running mean of its square |
# | Adafactor | as AdamW, but of the squares it keeps only the means of each row and column of the matrix |
# | Muon | the orthogonal matrix that is nearest to the running mean |
#
# **Find it.** Which of the four go wrong on a flat share? Decide, then run the cell. ("Off by 0.004 of 0.008": the weights
# moved by 0.008.)


# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (world_size,))
lesson.compare_optimizers(ranks, {
    "flat share": lambda net, make: ShardedOptimizer([Unit(net.parameters())], make),
    "fully_shard": lambda net, make: make(fully_shard(net, mesh=mesh).parameters()),
})  # fmt: skip

# %% [markdown]
# <details><summary>What is wrong?</summary>
#
# SGD and AdamW work number by number. **Adafactor** needs the means of a matrix's rows and columns, **Muon** the whole
# matrix. A piece of a long row has neither. Muon raises an error. Adafactor silently uses another rule for
# one-dimensional tensors: the loss falls, but the updates are wrong.
#
# With DTensors Muon is right up to bf16; the Adafactor of torch 2.13 raises an error. One cure is to gather each matrix for the
# update ([Megatron-LM#5533](https://github.com/NVIDIA/Megatron-LM/issues/5533)).
#
# </details>

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# Let the room vote before the table appears; most suspect SGD with momentum. *Ask:* "which state of Adafactor is smaller
# than Adam's, and what does it need to compute it?" (Row and column means instead of a moment per weight.)
#
# </details>

# %% [markdown]
# ## Recap (CORE, 1 min)

# %%
# %%ranks
card(
    "Each number needs one owner. Only weights are needed by all ranks, and only while their layer computes.",
    "ZeRO-1 and 2 communicate 2 P, like DDP. ZeRO-3 communicates 3 P, and all that lasts between steps shrinks with n.",
    "Per unit: all-gather, forward, free; all-gather, backward, reduce-scatter, free; update your share.",
    "Messages hide behind enough tokens per GPU: FLOP/s divided by bytes/s into a node, in backward 1.5 times that.",
    "Before you shard an optimizer, ask: one number at a time, or the whole tensor?",
    figure="one unit, two ranks, one step",
    command="python scripts/train.py --preset gpt-7b --ranks 64 --dry-run",
)

# %% [markdown]
# Next: [lesson 07](07_tensor_parallel.ipynb) splits the layers themselves. Below is the lab, to pick from. Further reading
# is in the [handbook](../assets/handbook/06_zero_fsdp.md#further-reading).

# %% [markdown]
# ## How to free what autograd still wants (MORE, 3 min)
#
# In forward, autograd saves the weights that backward will need. If you give the parameter another tensor (`p.data =
# ...`), autograd still holds the old one, and nothing is freed. So `free` keeps the tensor, with its shape, and empties
# the **storage** below it. Every view of the row loses its numbers at the same time, autograd's too, and gets them back
# when the same storage is filled again.
#
# ![The row's storage, and on it the views: the parameter and what autograd has saved; when the storage is emptied both
# views point at nothing, when it is gathered again both see the numbers](../assets/06_storage.svg)
#
# The cell computes forward with gathered weights. Then it frees them, gathers them again, and computes backward:

# %% tags=["nbval-check-output"]
# %%ranks
torch.manual_seed(0)
layer = nn.Linear(8, 8, dtype=torch.float64, device=device)
x = torch.ones(2, 8, dtype=torch.float64, device=device, requires_grad=True)
(expected,) = torch.autograd.grad(layer(x).square().sum(), x)  # needs the weights in backward

unit = Unit(layer.parameters(), apart=True)  # the share has memory of its own, as the row will be emptied
loss = layer(x).square().sum()
free(unit)
held = unit.whole_P.untyped_storage().size()
gather(unit)
(ours,) = torch.autograd.grad(loss, x)
say_once(f"while freed the row holds {held} bytes, and the weight's shape still is {list(layer.weight.shape)}")
say_once(f"the gradient after gathering again is right: {torch.equal(ours, expected)}")

# %% [markdown]
# ## Bytes and volumes of every stage (MORE, 3 min)
#
# 7.5 billion parameters in mixed precision: 2 bytes of weight, 2 of gradient, and 12 for Adam, an fp32 copy of the weight
# and two moments. In GB (10⁹ bytes):

# %% tags=["nbval-check-output"]
# %%ranks
from manyhands.predict.memory import zero_bytes

say_once("GB on each of        1       8      64   1,024 ranks")
for stage, name in enumerate(("none", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
    gigabytes = [zero_bytes(7.5e9, n, stage, k=12) / 1e9 for n in (1, 8, 64, 1024)]
    say_once(f"{name:14}" + "".join(f"{value:8.1f}" for value in gigabytes))

# %% [markdown]
# Read the rows: stages 1 and 2 reach a floor, because the weights (in stage 1 also the gradients) stay whole. Only
# stage 3 keeps falling with n.
#
# ![Volumes per step: DDP two P in one all-reduce; ZeRO-1 and ZeRO-2 two P, a reduce-scatter of gradients and an
# all-gather of weights; ZeRO-3 three P, two all-gathers and a reduce-scatter](../assets/06_volume.svg)
#
# This holds for one micro-batch per step. With m of them DDP and ZeRO-1 still need 2 P, if they communicate after
# the last one only. ZeRO-2 reduce-scatters after each micro-batch: (m + 1) P. ZeRO-3 also gathers for each: up to 3m P, or
# (2m + 1) P if whole gradients add up locally until the last.

# %% [markdown]
# ## The library's ZeRO-1, and what it really sends (MORE, 2 min)
#
# PyTorch's ZeRO-1 is `ZeroRedundancyOptimizer`, on top of DDP. It deals out whole *tensors*, not pieces of a row:
# the largest first, each to the rank that has the least so far.
#
# **Predict.** DDP has all-reduced the gradients when this optimizer steps. What must the optimizer send after its
# update, and how many P does that make?
#
# <details><summary>Answer</summary>
#
# Each rank broadcasts the tensors that it has updated: one P more. Together with the 2 P of DDP's all-reduce this makes
# **3 P**. Your ZeRO-1 sends 2 P.
#
# </details>

# %%
# %%ranks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(new_model())
library_optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
for _ in range(3):  # DDP sorts its buckets anew in the second step: watch the third
    library_optimizer.zero_grad()
    with wire.watch() as seen:
        model(*batch(0))[1].backward()
        library_optimizer.step()
say_once(f"{lesson.in_P(seen, P)}: together {sum(lesson.volumes(seen, P).values()):.2f} P")

# %% [markdown]
# ## Clip by the global norm (MORE, 6 min)
#
# Most training runs of large models clip: if the gradient of the *whole model* is longer than a limit,
# scale it down. Each rank now holds a share of the gradient, and the length of a share is not the length of the
# whole. The shares of two ranks stand at right angles to each other:
#
# ![A right-angled triangle: rank 0's share has length 3, rank 1's 4, the whole gradient 5, neither 3 nor 4 nor
# 7](../assets/06_norm.svg)
#
# ### Exercise 1: clip by the global norm
#
# Write `clip_by_global_norm(shares, max_norm)`. `shares` are this rank's parameters. Each number of the model is in
# one share on one rank. `share.grad` may be None, even for all shares of a rank. Scale all gradients by `max_norm /
# (norm + 1e-6)` if that is less than 1, and return the norm from before, as `torch.nn.utils.clip_grad_norm_` does.
# The check counts what you send: one number is enough.


# %%
# %%ranks
def clip_by_global_norm(shares, max_norm):
    """Scale this rank's gradients in place; returns the norm of all ranks' gradients from before."""
    raise NotImplementedError  # your turn


checks.clip_by_global_norm(clip_by_global_norm, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 1</summary>
#
# ```python
# def clip_by_global_norm(shares, max_norm):
#     gradients = [share.grad for share in shares if share.grad is not None]
#     total = torch.zeros((), dtype=shares[0].dtype, device=shares[0].device)
#     for gradient in gradients:
#         total += gradient.square().sum()
#     dist.all_reduce(total)  # all ranks, also one without gradients: squares add up, norms do not
#     norm = total.sqrt()
#     for gradient in gradients:
#         gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)  # never up; the same on all ranks
#     return norm
# ```
#
# </details>

# %% [markdown]
# ### Three ways to the same weights, clipped (MORE, 3 min)
#
# We train the same model with our ZeRO-3, with `fully_shard`, and in one process that reads the whole global batch: in
# float64, and with plain SGD, so that a wrong norm would show. (Adam divides by the gradient's size, which hides a
# wrong factor. If your norm adds up in float32, it is off by 1e-7.)

# %%
# %%ranks
from manyhands.parallel.fsdp import parameters_by_unit, units
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def library_clip(model, max_norm):
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # a DTensor


def clipped_sgd(model, optimizer, clip, **reads):
    """`steps` steps with the norm clipped to 0.3: the losses of the rows that were read, and the norms."""
    losses, norms = [], []
    for step in range(steps):
        _, loss = model(*batch(step, **reads))
        loss.backward()
        norms.append(torch.tensor(float(clip(0.3)), dtype=torch.float64))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), torch.stack(norms)


# %%
# %%ranks
ours, library, single = (new_model(torch.float64) for _ in range(3))
optimizer = ShardedOptimizer(zero_3(ours, wrapping), sgd)
found = {"ours": clipped_sgd(ours, optimizer, lambda limit: clip_by_global_norm(optimizer.shares, limit))}
for unit in optimizer.units:
    gather(unit)
by_library(library)
found["fully_shard"] = clipped_sgd(library, sgd(library.parameters()), lambda limit: library_clip(library, limit))
losses_1, norms_1 = clipped_sgd(
    single, sgd(single.parameters()), lambda limit: library_clip(single, limit), part=0, parts=1
)
weights = {
    "ours": flat(ours.parameters()),
    "fully_shard": flat(p.full_tensor() for p in library.parameters()),
}

# %% [markdown]
# Compare the losses, the norms and the weights after the last step with those of one process:

# %% tags=["nbval-check-output"]
# %%ranks
for way, (losses, norms) in found.items():
    dist.all_reduce(losses)  # the batch's loss is the mean of the ranks'
    differences = {
        "losses": losses / world_size - losses_1,
        "norms": norms - norms_1,
        "weights": weights[way] - flat(single.parameters()),
    }
    for name, difference in differences.items():
        assert difference.abs().max() < 1e-6, f"{way}: {name} differ by {difference.abs().max():.1e}"
    say_once(f"{way} and one process: losses, norms and weights equal to 1e-6")
say_once(f"every step was clipped: {bool((norms_1 > 0.3).all())}")
shakespeare.metrics.exact(float64_weights=fingerprint([weights["ours"]]))
shakespeare.metrics.close(float64_losses=losses_1, float64_norms=norms_1)

# %% [markdown]
# ### The norm of a share (MORE, 3 min)
#
# Somebody moves code that clipped correctly under DDP to FSDP. Parameters are DTensors now, so the code takes this
# rank's share, `to_local()`, and clips it as before. It runs on all ranks, and the loss falls. What is wrong, and which
# measurement shows it?


# %%
# %%ranks
def clip_my_share(model, max_norm):
    gradients = [p.grad.to_local() for p in model.parameters()]
    norm = nn.utils.get_total_norm(gradients)
    for gradient in gradients:
        gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm


model = by_library(new_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

# %% [markdown]
# Here *every* rank prints its own norm, and the library's. (Clipping to infinity returns the norm and changes nothing.)

# %%
# %%ranks
model(*batch(8))[1].backward()
right = library_clip(model, max_norm=float("inf")).item()
theirs = clip_my_share(model, 0.3).item()
after = library_clip(model, max_norm=float("inf")).item()
optimizer.zero_grad()
model(*batch(8))[1].backward()
library_clip(model, 0.3)  # mended: the same gradient, one norm for all ranks
mended = library_clip(model, max_norm=float("inf")).item()
part = (theirs / right) ** 2
say(f"my norm is {theirs:.4f}, the model's is {right:.4f}; my shard holds {part:.0%} of the squared norm")
say_once(f"limit 0.3: clipped by the ranks' own norms to {after:.3f}, by the global norm to {mended:.3f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# `to_local()` is this rank's share, and its length is not the gradient's. Every rank computes a different norm, which
# is too small, and scales its share by its own factor. The clipped gradient is up to the square root of n times longer
# than the limit. Its *direction* is wrong as well, because its parts are scaled differently. The more ranks, the weaker
# the clipping. On one rank the lines are right, so no test on one GPU finds the bug.
#
# The library's own `clip_grad_norm_` is right for DTensors. The norm that it *returns* is a DTensor, too. In torch 2.13
# its local part is the global norm; in older versions it was the local one, and `norm.item()` read that.
# `norm.full_tensor()` is right in both. People reported a norm that differs between ranks:
# [torchtitan#766](https://github.com/pytorch/torchtitan/issues/766), and, as a bug of torch,
# [pytorch#170862](https://github.com/pytorch/pytorch/issues/170862).
#
# </details>
#
# The rule to take home: **a number that a rank computes from its share is that rank's number.** Print it on all ranks:
# a global number is the same everywhere.

# %% [markdown]
# ## What gloo sends for a reduce-scatter (MORE, 2 min)
#
# Two numbers are easily mixed up: what is *communicated*, and what the operating system says was *sent* (on Linux). A
# ring sends (n-1)/n of what is handed to an all-gather or a reduce-scatter, twice that for an all-reduce. **Predict**:
# does gloo send the same?

# %%
# %%ranks
row = torch.ones(1_200_000)
mine, parts = torch.empty(1_200_000 // world_size), list(row.chunk(world_size))
calls = {
    "all_reduce": lambda: dist.all_reduce(row.clone()),
    "reduce_scatter": lambda: dist.reduce_scatter(mine, parts),
    "all_gather": lambda: dist.all_gather(parts, mine),
}
for name, call in calls.items():  # with tensors of the CPU, which gloo sends, on a machine with GPUs as well
    with wire.watch(sockets=True) as seen:
        call()
    if rank == 0 and seen.transport_bytes is not None:
        sent = seen.transport_bytes / row.nbytes
        ring = (2 if name == "all_reduce" else 1) * (world_size - 1) / world_size
        say(f"{name:14} gloo put {sent:.2f} times the payload on the wire; a ring: {ring:.2f}")

# %% [markdown]
# gloo's reduce-scatter is an all-reduce of which each rank keeps its piece, so it sends twice what a ring sends.
#
# ## Micro-batches, and one gather less (MORE, 3 min)
#
# With m micro-batches per step, `set_requires_gradient_sync(False)` before all but the last keeps whole gradients on
# each rank and reduces once. And the last block is freed after its forward, only to be gathered again at once:
# `set_reshard_after_forward(False)` on that block keeps it.
#
# **Predict.** m = 2, by block. About how many P does a step communicate with and without the sync? What does keeping the
# last block save, and what does it cost?
#
# <details><summary>Answer</summary>
#
# With the sync after each micro-batch up to 3m = 6 P, without it up to 2m + 1 = 5 P. Both are a little less, because
# the root is gathered once per micro-batch. But without the sync every rank keeps whole gradients until the last
# micro-batch: 4 bytes per parameter in fp32, on any number of ranks. Keeping the last block saves one gather per
# micro-batch. It costs the memory of one block while the loss is computed.
#
# </details>

# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

for title, sync, keep in (
    ("sync after each", True, False),
    ("sync after the last", False, False),
    ("and the last block kept", False, True),
):
    model = by_library(new_model())
    model.blocks[-1].set_reshard_after_forward(not keep)
    with wire.watch() as seen:
        for i in range(2):
            model.set_requires_gradient_sync(sync or i == 1)
            (model(*batch(i))[1] / 2).backward()
    say_once(f"{title:24}{sum(lesson.volumes(seen, P).values()):5.2f} P in {len(seen.calls)} calls")

# %% [markdown]
# ## Wrapping: what is gathered at once (MORE, 4 min)
#
# A unit is what is whole at the same time. Large units mean few, long messages, and much memory; small ones
# the opposite. In addition to its shares, a rank must have room for *at least* the largest unit and the root, both
# whole.
#
# ![The same GPT wrapped four ways: by block; by block and size, with embedding and head apart; in groups of two
# blocks; in one unit](../assets/06_wrapping.svg)
#
# | wrapping | units | its use |
# |---|---|---|
# | `block` | each block | the usual start |
# | `block_and_size` | each block, the embedding, the head | large vocabularies: the root stays whole from forward to backward |
# | `block_group:2` | two blocks together | many small blocks: fewer, longer messages |
# | `size:N` | every module that still has N parameters or more after its inner units are taken out | models without clear blocks |
#
# A GPT of 6.7 billion parameters has 32 blocks of 201 million each. Outside the blocks it has two matrices of 32,100
# tokens x 4,096 numbers, 131 million each, the embedding and the head. Which wrapping leaves the least whole?

# %%
# %%ranks
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.parallel.fsdp import parameters_by_unit


def unit_sizes(config, wrapping):
    """Parameters of each unit, the root last."""
    with torch.device("meta"):  # shapes without numbers: any size fits
        model = GPT(config)
    return [sum(p.numel() for p in part) for part in parameters_by_unit(model, wrapping)]


seven_b = GPTConfig(vocab_size=32100, block_size=2048, n_layer=32, n_head=32, n_embd=4096)
for wrap in ("block", "block_and_size", "block_group:2", "size:100000000"):
    *inner, root = unit_sizes(seven_b, wrap)
    whole = (max(inner) + root) / 1e6
    say_once(f"7 B, {wrap:15} {len(inner)} units and the root; at least {whole:8,.1f} M numbers whole at once")

# %% [markdown]
# By block, one block and the root are whole, and both large matrices are in the root. As units of their own, the two
# matrices are whole one after the other. The last line is a trap: each attention has 67 million parameters, less than
# 10⁸, so all 32 end up in the root.

# %% [markdown]
# ## Experiment: bytes against formulas (MORE, 5 min)
#
# For each strategy and wrapping you measure what a rank holds when backward is done, and what it communicates in a
# step. `model_from_flags` builds the model as `scripts/train.py` does. It also predicts both numbers by formulas, from
# the configuration alone.

# %%
# %%ranks
from manyhands.measure.tensor_bytes import tensor_bytes
from manyhands.train.dry_run import model_from_flags


def build(flags):
    """The trainer's model, spread as its flags say, and its optimizer."""
    sizes = f"--model.n-layer {layers} --train.global-batch {shakespeare.global_batch} --optimizer.clip 0"
    return model_from_flags(f"{sizes} {flags}", ranks, shakespeare.config.vocab_size)


def measure(flags):
    """What a rank holds, what it calls, and both by formula, in the last of a few steps with these flags."""
    spread = build(flags)
    parallel, optimizer = spread.parallel, spread.optimizer
    for step in range(2 if "fsdp" in flags else 3):  # DDP sorts its buckets anew in the second
        optimizer.zero_grad()
        with wire.watch() as seen:
            parallel.forward_backward(*batch(step))
            held = tensor_bytes(parallel.model, optimizer)
            optimizer.step()
    return held, seen, spread.held_by_formula, spread.sent_by_formula


# %% [markdown]
# **Predict**, for 4 ranks. How many bytes per parameter does DDP hold? ZeRO-1? FSDP? How many P does each communicate?
# (`grad_op`, FSDP's SHARD_GRAD_OP, is `reshard_after_forward=False`: what forward has gathered stays until backward has
# used it.)
#
# <details><summary>Answer</summary>
#
# DDP 16, if its gradients are views of its buckets (the trainer sets `gradient_as_bucket_view=True`; else 20).
# ZeRO-1 4 + 4 + 8/4 = 10. FSDP 16/4 = 4, whatever the wrapping. Volumes: DDP 2. The library's ZeRO-1 3, because it
# all-reduces gradients and then broadcasts weights. FSDP just below 3, and 2 under `grad_op`.
#
# </details>

# %%
# %%ranks --timeout 120
fsdp = "--parallel.strategy fsdp --parallel.wrapping"
runs = {
    "ddp": "--parallel.strategy ddp --parallel.all-reduce buckets",
    "zero1": "--parallel.strategy zero1",
    "fsdp block": f"{fsdp} block",
    "fsdp block_and_size": f"{fsdp} block_and_size",
    "fsdp block_group:2": f"{fsdp} block_group:2",
    "fsdp size:100000": f"{fsdp} size:100000",
    "fsdp block, grad_op": f"{fsdp} block --parallel.sharding grad_op",
}
table = {name: measure(flags) for name, flags in runs.items()}
shakespeare.metrics.exact(held={name: vars(row[0]) for name, row in table.items()})
shakespeare.metrics.exact(communicated={name: row[1].payload_bytes() for name, row in table.items()})

# %%
# %%ranks
worst = lesson.draw_held_and_sent(ranks, table, P)
say_once(f"the ratio of measured to formula that is furthest from 1: {worst:.4f}")
assert abs(worst - 1) < 0.02, f"a formula is off by {worst}"

# %% [markdown]
# The difference that is left is Adam's step counters, 4 bytes per tensor; the formulas include the padding. FSDP needs
# a little less than 3 P, because the root is gathered once. Under `size:100000` a third of the model is in the root, so
# this wrapping sends the least of the four. `grad_op` saves the third P, and pays with memory. Otherwise the wrapping
# changes the number of *calls*, and hardly the bytes.
#
# What the bars do not show are activations. **FSDP leaves them as they are**: each rank computes whole layers, on
# its own rows.

# %% [markdown]
# ### Memory over a step (MORE, 4 min)
#
# At rest all wrappings hold the same. They differ in what is whole *during* a step. The next cell records a step, event
# by event.
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
# %%ranks --timeout 120
from manyhands.measure.memory_timeline import MemoryTimeline


def watched_step(flags):
    """A MemoryTimeline of the second step under these flags, and by formula the bytes gathered at once."""
    spread = build(flags)
    optimizer, replicas = spread.optimizer, spread.parallel.replicas
    spread.parallel.forward_backward(*batch(0))
    optimizer.step()
    optimizer.zero_grad()
    share = batch(1)  # read before: the corpus is not the model's memory
    with MemoryTimeline(spread.parallel.model, optimizer) as seen:
        with seen.phase("forward"):
            loss = replicas(*share)[1]
        with seen.phase("backward"):
            replicas.backward(loss)
        with seen.phase("update"):
            optimizer.step()
            optimizer.zero_grad()
    return seen, spread.held_by_formula.unsharded_parameters


timelines = {name: watched_step(runs[name]) for name in ("ddp", "fsdp block", "fsdp block, grad_op")}

# %%
# %%ranks
shakespeare.metrics.measured(peak_bytes={name: seen.peak.total for name, (seen, _) in timelines.items()})
lesson.draw_memory(ranks, timelines)

# %% [markdown]
# DDP has a high floor of weights and moments, and its gradients are there nearly from the start: they are views of its
# buckets. FSDP's floor is an n-th of that. Its gathered part is the thin band that rises and falls unit by unit; under
# `grad_op` it only grows until backward. "Other" comes on top of what the formula counts: messages, the next unit,
# which is fetched early, and a unit's whole gradients before they are cut. So the formula gives the least.

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
from manyhands.measure.virtual_network import Link, VirtualNetwork
from manyhands.parallel.fsdp import parameters_by_unit

network = VirtualNetwork(ranks, inside=Link(latency_s=2e-5, bytes_per_s=1e9))
block_P = torch.zeros(unit_sizes(shakespeare.config, "block")[0] // world_size * world_size)


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
until_s = layers * (gather_s + max(gather_s, 1e-3))  # both charts on one scale
for prefetch in (False, True):
    took_s = virtual_forward(prefetch)
    spans = network.gather_spans()
    predicted_s = layers * (gather_s + 1e-3)
    if prefetch:  # the longer of the two sets the pace
        predicted_s = gather_s + max(gather_s, 1e-3) * (layers - 1) + 1e-3
    shakespeare.metrics.exact(**{f"virtual_forward_prefetch_{prefetch}": took_s})
    title = f"{'with' if prefetch else 'without'} prefetch: {1e3 * took_s:.3f} virtual ms"
    say_once(f"{title}, predicted {1e3 * predicted_s:.3f}")
    lesson.draw_spans(ranks, spans, title, until_s, f"prefetch_{prefetch}")

# %% [markdown]
# FSDP does this on GPUs by itself. In backward it asks for the next unit explicitly, in the reverse order of forward. In
# forward the CPU runs ahead: it queues the next gather while the GPU still computes. `set_modules_to_forward_prefetch` and
# `set_modules_to_backward_prefetch` fetch more of them early, each at the price of one more unit in memory.
#
# ## Lower precision, offload, two levels (MORE, 5 min)
#
# Three switches of `fully_shard`, each with what it changes on the wire.
#
# **Mixed precision**: the shards and the optimizer stay fp32. What is gathered and multiplied is bf16. Gradients are
# summed in the precision that you name.
#
# **Predict.** bf16 for parameters, fp32 for the sums of gradients. Which of the two volumes halves?

# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
model = by_library(new_model(), mp_policy=policy)
with wire.watch() as seen:
    logits, loss = model(*batch(0))
    loss.backward()
share = model.head.weight.to_local()
say_once(f"in P of 4 bytes: {lesson.in_P(seen, P)}")
say_once(f"shards in {share.dtype}, logits in {logits.dtype}, loss {loss.item():.3f} in {loss.dtype}")

# %% [markdown]
# The gathers' bytes halve, the reduce-scatter's stay. There is no autocast, and no copy of all weights in bf16: what
# is gathered *is* the copy. Reducing in bf16 would halve the rest, and add up n gradients in 8 significant bits. The
# model computes the loss in fp32 from 16-bit logits.
#
# **Offload**: shards, gradients and optimizer rest in the CPU's memory. A unit's share goes to the GPU to be
# gathered, and its gradient comes back, each over PCIe. The update runs on the CPU. Use it as a last resort, when the
# model does not fit otherwise.

# %%
# %%ranks
# pinned memory, from which a GPU can read by itself, exists only where there is a GPU
model = by_library(new_model(), offload_policy=CPUOffloadPolicy(pin_memory=device.type != "cpu"))
optimizer = adamw(model.parameters())
model(*batch(0))[1].backward()
optimizer.step()
on = {tensor.device.type for p in model.parameters() for tensor in (p.to_local(), p.grad.to_local())}
say_once(f"ranks compute on {device.type}; shards and gradients rest on {', '.join(on)}")

# %% [markdown]
# **HSDP**, hybrid sharding: the network between nodes is slow, and FSDP gathers each layer over it twice per step. So
# shard *within* a node, where links are fast, and keep replicas *between* nodes, as DDP does. The mesh says which ranks
# do what.
#
# ![Two nodes of four GPUs: the weights are cut into four within each node; ranks with the same share in both nodes
# average its gradients](../assets/06_hsdp.svg)
#
# **Predict.** Two nodes of two ranks. What does a rank call for each unit in backward, besides the all-gather?
#
# <details><summary>Answer</summary>
#
# A reduce-scatter with the other rank of its node, then an all-reduce of its share with the rank that holds the same
# share in the other node.
#
# </details>

# %%
# %%ranks
nodes = 2 if world_size % 4 == 0 else 1  # as if this machine were two
shape = nodes, world_size // nodes
two_levels = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
model = by_library(new_model(), two_levels)
with wire.watch() as seen:
    model(*batch(0))[1].backward()
say_once(f"{nodes} x {world_size // nodes} ranks: {lesson.in_P(seen, P)}")
say_once(f"a rank keeps {sum(p.to_local().numel() for p in model.parameters()) / P:.3f} of the parameters")

# %% [markdown]
# A reduce-scatter within the node, then an all-reduce *of the share* between nodes. Each rank hands only 1/(ranks per
# node) of the gradient to the slow network, and no weights. (On four ranks the all-reduce of half a P counts as 1 P,
# because an all-reduce is two volumes.) The price is memory: the weights are divided by the ranks of a node, not by all
# ranks.
#
# ## DeepSpeed's ZeRO (MORE, 3 min)
#
# The authors of the ZeRO paper wrote DeepSpeed. There a stage is a number in a configuration; the engine it returns
# owns the backward pass and the step.
#
# | | PyTorch | DeepSpeed |
# |---|---|---|
# | wrap | `fully_shard(block)`, ..., `fully_shard(model)` | `engine, *_ = deepspeed.initialize(model=model, config=config)` |
# | stage | `reshard_after_forward`, the mesh | `{"zero_optimization": {"stage": 3}}` |
# | a step | `loss.backward(); optimizer.step()` | `engine.backward(loss); engine.step()` |
# | what is cut | each weight along dim 0 | each weight, or the row of all, in equal pieces |
# | clipping | `clip_grad_norm_`, you call it | in `engine.step()`, to `"gradient_clipping"` |
#
# Always write `"gradient_clipping"` down. Its default was 0, no clipping, until
# [DeepSpeed#8068](https://github.com/microsoft/DeepSpeed/pull/8068) made it 1.0 (in 0.19.8, tested here, it is 1.0).
#
# DeepSpeed is an optional extra: `pip install -e .[deepspeed]` in the course's folder, then run this section again.
# The trainer uses it through the same interface as every other strategy, so one function compares all stages with one
# process.

# %%
# %%ranks
from manyhands.config.options import OptionError
from manyhands.train.dry_run import model_from_flags


def deepspeed_losses(stage):
    """Losses of 3 clipped steps under DeepSpeed's ZeRO. Raises OptionError where it is not installed."""
    sizes = f"--model.n-layer {layers} --train.global-batch {shakespeare.global_batch}"
    plain = "--optimizer.name sgd --optimizer.weight-decay 0"
    engine = f"--parallel.strategy deepspeed --parallel.zero-stage {stage}"
    spread = model_from_flags(f"{sizes} {plain} {engine}", ranks, shakespeare.config.vocab_size)
    for group in spread.optimizer.param_groups:
        group["lr"] = 0.5
    losses = []
    for step in range(3):
        losses.append(spread.parallel.mean_loss(spread.parallel.forward_backward(*batch(step))))
        spread.parallel.clip(0.3)
        spread.optimizer.step()
    return torch.stack(losses)


# %% [markdown]
# First the same three steps in one process:

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
# Now the losses of all three stages, compared with those, in fp32:

# %%
# %%ranks --timeout 180
try:
    for stage in (1, 2, 3):
        difference = (deepspeed_losses(stage) - torch.stack(expected)).abs().max().item()
        assert difference < 1e-4, f"stage {stage} differs by {difference:.1e}"
        say_once(f"DeepSpeed ZeRO-{stage}: losses of 3 steps equal to one process's, within {difference:.0e}")
except OptionError as error:
    say_once(f"not here: {error}")

# %% [markdown]
# ## Exercises (MORE, 12 min)
# Each check runs your answer in a separate process group: you cannot break anything.
#
# ### Exercise 2: predict the bytes of a wrapping
#
# `sizes` are the numbers of parameters of each unit, the root last; n ranks, fp32, AdamW, everything sharded
# (ZeRO-3). There may be no unit but the root. Write `predict(sizes, n)` that returns four numbers for one rank: the bytes it holds at rest (weights,
# gradients, moments); the bytes of the rows that are whole at the same time, at most; how many all-gathers a step
# makes; and the bytes communicated in a step, all collectives together. Every size is a multiple of n.


# %%
# %%ranks
def predict(sizes, n):
    """(bytes at rest, bytes whole at once, number of all-gathers, bytes communicated in a step) of one rank."""
    raise NotImplementedError  # your turn


checks.predict(predict, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 2</summary>
#
# ```python
# def predict(sizes, n):
#     *inner, root = sizes
#     held = 16 * sum(sizes) // n  # 4 of weight, 4 of gradient, 8 of moments
#     whole = 4 * (root + max(inner, default=0))  # the root stays while the others take turns
#     gathers = 2 * len(inner) + 1
#     communicated = 4 * (2 * sum(inner) + root) + 4 * sum(sizes)
#     return held, whole, gathers, communicated
# ```
#
# </details>

# %% [markdown]
# Compare your prediction with a measured step. (`wrapping` is set at the top of the lesson.)

# %%
# %%ranks
from manyhands.parallel.fsdp import parameters_by_unit
from manyhands.train.dry_run import model_from_flags

held, seen, _, _ = measure(f"--parallel.strategy fsdp --parallel.wrapping {wrapping}")
held_bytes, whole_bytes, gathers, communicated = predict(unit_sizes(shakespeare.config, wrapping), world_size)
say_once(f"{wrapping}: held {held.total / held_bytes:.3f} of the prediction, which knows no padding")
say_once(f"{seen.count('all_gather')} all-gathers, predicted {gathers}")
say_once(f"{seen.payload_bytes():,} bytes communicated, predicted {communicated:,}")

# %% [markdown]
# (On one rank nothing is sent.)
#
# ### Exercise 3: never build the whole model
#
# Your models above were built whole on every rank, and then cut. (`train.py` avoids that.) If each of 64 GPUs builds a
# 7 B model whole, it first holds all weights, 26.9 GB in fp32, to keep a 64th of them. A GPU that is too small for them
# runs out of memory before step 1, and sharding does not help. The cure, also in [OLMo's own
# configuration](https://github.com/allenai/OLMo/blob/main/configs/official/OLMo-7B.yaml), is the [**meta
# device**](../assets/glossary.md#meta-device): tensors with shape and dtype, but without numbers.

# %%
# %%ranks
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from torch.distributed.fsdp import fully_shard

with torch.device("meta"):
    large = GPT(GPTConfig(vocab_size=32100, block_size=2048, n_layer=32, n_head=32, n_embd=4096))
in_all = sum(p.nbytes for p in large.parameters())
say_once(f"7 B in fp32: {in_all / 1e9:.1f} GB whole, {in_all / 64e9:.2f} on each of 64 ranks; here 0")

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
    """The model of `make()`, sharded over `mesh`, with the full model's numbers; it is never whole."""
    raise NotImplementedError  # your turn


checks.sharded_from_meta(sharded_from_meta, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 3</summary>
#
# ```python
# def sharded_from_meta(make, mesh):
#     with torch.device("meta"):
#         model = make()
#     for layer in model:
#         fully_shard(layer, mesh=mesh)
#     fully_shard(model, mesh=mesh)
#     model.to_empty(device="cpu")  # memory for the shares only
#     torch.manual_seed(7)
#     k = mesh.get_local_rank()
#     with torch.no_grad():
#         for p in model.parameters():  # in the full model's order; every rank draws all numbers
#             whole = torch.empty(p.shape).normal_(std=0.02)  # one weight at a time
#             parts = whole.chunk(mesh.size())  # along dim 0; fewer than ranks where there are too few rows
#             if k < len(parts):
#                 p.to_local().copy_(parts[k])
#     return model
# ```
#
# </details>

# %% [markdown]
# ## On the cluster (MORE, 1 min)
#
# `--dry-run` prints what would run, and whether it fits. Then submit [lesson 04](04_first_job.ipynb)'s job with the
# same flags:
#
# ```bash
# python scripts/train.py --preset gpt-7b --ranks 64 --dry-run
# python scripts/launch.py --nproc 4 -- --preset nano --parallel.strategy fsdp --parallel.wrapping block_group:2
# ```

# %% [markdown]
# ## End
#
# The last cell writes the run's numbers and stops the ranks.

# %%
# %%ranks
shakespeare.metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
