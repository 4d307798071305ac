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
# # 07 Tensor parallelism: split the layer
#
# **45 minutes** for the sections marked CORE, 85 with those marked MORE.
#
# A single layer is too large for a GPU, or too slow. So its matrix products are split over several GPUs. The first
# cells show an MLP that is split like that. Its output is right, but its gradients are wrong. You find out why, and
# mend it.
#
# After this lesson **you can**
# - split linear layers by columns and by rows, and attention by heads, and say what each sends;
# - add sequence parallelism, and sum the gradients that it leaves as partial sums;
# - write the same as a plan for PyTorch;
# - say why a tensor-parallel group stays within a fast domain.
#
# **You need** from [lesson 02](02_collectives.ipynb) the all-reduce, and its two halves
# [reduce-scatter](../assets/glossary.md#reduce-scatter) and [all-gather](../assets/glossary.md#all-gather).
#
# **New here:** [tensor parallel](../assets/glossary.md#tensor-parallel),
# [column-parallel](../assets/glossary.md#column-parallel), [row-parallel](../assets/glossary.md#row-parallel),
# [partial sum](../assets/glossary.md#partial-sum), [sequence parallel](../assets/glossary.md#sequence-parallel), [fast
# domain](../assets/glossary.md#fast-domain), and in MORE [vocabulary
# parallel](../assets/glossary.md#vocabulary-parallel), [vector-Jacobian
# product](../assets/glossary.md#vector-jacobian-product), [gqa](../assets/glossary.md#gqa). Tables are in [the
# handbook](../assets/handbook/07_tensor_parallel.md).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 1, a wrong gradient 6, f and g 8, columns and rows 9, sequence parallel 9, the library 3,
# the fast domain 4, zoo 3, card 1. Builds A to D take three to four minutes each and are in these numbers.
#
# *Say:* one question carries the lesson: "do all ranks hold the same here, or partial sums?" Every movement changes
# one into the other, and its backward follows from the answer.
#
# *Three usual mistakes:* giving tensor ranks different data (they work on the *same* sequences); thinking that f does
# nothing, because its forward does nothing; adding the bias before the sum.
#
# *When late:* give solutions B and D; keep builds A and C and the zoo.
#
# *Ask the room:* "FSDP and tensor parallelism both leave 1/n of each weight on a rank. Which of them sends weights, which
# sends activations?" (FSDP weights, tensor parallelism activations. So one depends on the model, the other on the batch.)
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
layers = 2  # layers of the GPT, 1 to 8
sequences = 4  # sequences in a step; all tensor ranks read the same ones, at least 1
steps = 8  # steps of training in which the zoo's bug shows, at least 2

# %% [markdown]
# ## Start (CORE, 1 min)
#
# The first cell starts four ranks, one **tensor-parallel group** of t = 4, `group`. The folded cell makes lesson 03's
# **ShakespeareGPT**. All ranks of the group read the *same* sequences: each computes a part of each layer.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("07_tensor_parallel", globals())

# %%
# %%ranks
import math
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands import ____, Metrics, card, compare, join, leave, say, show
from manyhands.checks import tensor_parallel as checks
from manyhands.measure import wire
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.launch import recorded_runs
from manyhands.measure.virtual_network import Link, VirtualNetwork

HEADS = 4  # they allow t = 1, 2 or 4: on more ranks there are several groups, and each does the same
t = math.gcd(world_size, HEADS)
mesh = init_device_mesh(device.type, (world_size // t, t), mesh_dim_names=("data", "tensor"))
group = mesh["tensor"].get_group()
corpus = load_corpus(ranks)
config = GPTConfig(vocab_size=len(corpus.vocab), n_layer=layers, n_head=HEADS)
B, T, D, V = sequences, config.block_size, config.n_embd, config.vocab_size
metrics = Metrics(ranks, corpus, {"layers": layers, "sequences": sequences, "steps": steps})
# a layer of a 7 B model, D = 4096, with 2,048 tokens in bf16 at 400 TFLOP/s; links as of an H100 in a node of 8
INSIDE, BETWEEN = Link(2e-6, 450e9), Link(4e-6, 50e9)
stream = torch.zeros(2048 * 4096, dtype=torch.bfloat16)  # B·T·D numbers, on the CPU
layer_s = 72 * 2048 * 4096**2 / 400e12  # 24 D² FLOPs per token forward, twice that backward
PARTS = (1 / 9, 2 / 9, 4 / 9, 2 / 9)  # of it: attention and MLP forward, MLP and attention backward


def new_model(dtype=torch.float32):
    """ShakespeareGPT with the same weights on every rank; shaken a little, so that no bias is zero."""
    torch.manual_seed(1337)
    model = GPT(config)
    for p in model.parameters():
        p.data += 0.02 * torch.randn_like(p)
    return model.to(device, dtype)


def batch(step=0):
    """Inputs and targets [B, T], the same on every rank."""
    return [ids.to(device) for ids in get_batch(corpus.train_ids, step, B, T, 0, 1, seed=1)]


def held_against_one_process(mlp):
    """Run a split MLP forward and backward; rank 0 prints, for each rank, what is as in one process."""
    torch.manual_seed(0)
    sizes = {"x": (3, 8), "up": (16, 8), "down": (8, 16)}
    x, up, down = (torch.randn(size, dtype=torch.float64).to(device).requires_grad_() for size in sizes.values())
    y = F.gelu(x @ up.T) @ down.T
    v = torch.randn_like(y)  # the gradient that comes back from the layers above, the same on all ranks
    wanted = [y, *torch.autograd.grad(y, (x, up, down), v)]
    mine = [x, up.chunk(t, 0)[group.rank()], down.chunk(t, 1)[group.rank()]]
    mine = [part.detach().clone().requires_grad_() for part in mine]
    y = mlp(*mine)
    found = [y, *torch.autograd.grad(y, mine, v)]
    wanted[2], wanted[3] = wanted[2].chunk(t, 0)[group.rank()], wanted[3].chunk(t, 1)[group.rank()]
    column = []
    for a, b in zip(found, wanted, strict=True):
        times = (a.flatten() @ b.flatten() / (b.flatten() @ b.flatten())).item()
        near = (a - times * b).abs().max() < 1e-9
        column.append("right" if near and abs(times - 1) < 1e-9 else f"✗ {times:.3g} times" if near else "✗ wrong")
    columns = [None] * t
    dist.all_gather_object(columns, column, group=group)
    if rank == 0:
        say(f"{'':18}" + "".join(f"rank {r:<9}" for r in range(t)).rstrip())
        for i, name in enumerate(("output", *(f"gradient of {name}" for name in sizes))):
            say(f"{name:18}" + "".join(f"{one[i]:14}" for one in columns).rstrip())


# %% [markdown]
# ## The output is right, the gradient is wrong (CORE, 6 min)
#
# There are two ways to split a matrix product over ranks:
#
# ![A matrix product: by columns each rank gets some columns of the result; by rows each gets a whole matrix, and their
# sum is the result](../assets/07_columns_rows.svg)
#
# **By columns**, each rank gets some columns of the result. **By rows**, each rank gets a matrix of full size, and the
# sum of these is the result. Each of these matrices is a [**partial sum**](../assets/glossary.md#partial-sum).
#
# An MLP has two products, with a GELU in between. Split the first by columns. Each rank gets some hidden units and
# applies GELU to them. Split the second by rows, so that each rank has the rows for its own hidden units. Nothing is
# sent in between:
#
# ![Two ranks compute an MLP: X is on both; f; each multiplies by its columns of A, applies GELU, multiplies by its
# rows of B; g adds up to Y](../assets/07_f_and_g.svg)
#
# An all-reduce adds up the partial sums. `dist.all_reduce` has no backward in autograd, so two helpers are given
# (folded). `all_reduced(x, group)` returns the sum over the group. `Move.apply(x, there, back)` calls `there(x)` in
# forward and `back(gradient)` in backward. The first try calls the all-reduce in both. (Shapes: `B` rows, width `D`,
# `m` hidden units of this rank. torch keeps weights as [outputs, inputs].)


# %% jupyter={"source_hidden": true}
# %%ranks
class Move(torch.autograd.Function):
    """Move.apply(x, there, back): `there(x)` in forward, `back(gradient)` in backward."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None, None


def all_reduced(x, group):
    """The sum over the group in a new tensor; x stays as it is. All ranks of the group call it."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


# %%
# %%ranks
def first_try(x_BD, up_mD, down_Dm):
    partial_BD = F.gelu(x_BD @ up_mD.T) @ down_Dm.T
    add_up_over_group = partial(all_reduced, group=group)
    return Move.apply(partial_BD, add_up_over_group, add_up_over_group)


held_against_one_process(first_try)

# %% [markdown]
# The output is right, so the loss is right too. But the weights' gradients are 4 times too large, for 4 ranks. The
# gradient of x, which goes to the layers before, is wrong, and differs from rank to rank.
#
# **Predict.** Take a smaller case. Ranks 0 to 3 multiply the same number x by 3, 5, 7 and 11. The same `Move` sums
# these: y = 26 x. So dy/dx should be 26. What does rank 0 get?

# %%
# %%ranks
guess_slope = ____  # your turn: type a number

# %% jupyter={"source_hidden": true}
# %%ranks
compare("dy/dx at rank 0 in the first try", "guess_slope", 4 * 3)

# %% [markdown]
# The gradient of y is 1 on each rank. The all-reduce in backward sums these to 4, and rank 0 multiplies by its factor,
# 3. So the all-reduce of backward is in the wrong place.

# %% [markdown]
# ## f and g: mend it (CORE, 8 min)
#
# Megatron-LM ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053)) names two places: **f**, where x enters, and
# **g**, where the result leaves. For each, ask about the gradient: **do all ranks hold the same, or partial sums?**
#
# - *At g*: y is the sum of all partial sums. All ranks hold the gradient of y. What is the gradient of one partial
#   sum?
# - *At f*: each rank has used x with its own columns, so it has only the gradient of x from these. What is missing?
#
# ### Build A: f and g
#
# Each blank is either the tensor itself (`x`, `gradient`), or its sum over the group (`all_reduced(x, group)`,
# `all_reduced(gradient, group)`). The shape stays the same. (If you skip a build, the cells below use the lesson's own
# lines.)


# %%
# %%ranks
def f(x, group):
    """Where x enters: it is the same on all ranks, and each uses it differently."""
    return Move.apply(x, lambda x: ____, lambda gradient: ____)


def g(x, group):
    """Where the result leaves: partial sums become their sum, the same on all ranks."""
    return Move.apply(x, lambda x: ____, lambda gradient: ____)


checks.f_and_g((f, g), ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution A</summary>
#
# ```python
# def f(x, group):
#     return Move.apply(x, lambda x: x, lambda gradient: all_reduced(gradient, group))
#
#
# def g(x, group):
#     return Move.apply(x, lambda x: all_reduced(x, group), lambda gradient: gradient)
# ```
#
# </details>

# %% [markdown]
# The MLP with your f and g:


# %%
# %%ranks
def mended(x_BD, up_mD, down_Dm):
    hidden_Bm = F.gelu(f(x_BD, group) @ up_mD.T)
    return g(hidden_Bm @ down_Dm.T, group)


held_against_one_process(mended)

# %% [markdown]
# This is [**tensor parallelism**](../assets/glossary.md#tensor-parallel). The backward of f is the forward of g, and
# the other way round. Where ranks use the same tensor in different ways, its gradient comes back in partial sums.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: f and g</summary>
#
# Do the prediction on the board with two ranks and the factors 3 and 5: 8 is right, the first try says 6 and 10. *Usual
# question:* "does torch not have an all-reduce that autograd knows?" It does, and its backward is an all-reduce, like the
# first try: there every rank has a loss of its own. Here all ranks have the same one.
#
# </details>

# %% [markdown]
# ## Columns, then rows, in a GPT (CORE, 9 min)
#
# A linear layer also has a bias. In a column-parallel layer each rank has the part of the bias for its outputs. In a
# row-parallel layer every rank has the whole bias.
#
# ### Build B: two linear layers
#
# `enter` and `leave` are functions of one tensor; here they are f and g for our group. The result must contain each
# bias exactly once.


# %%
# %%ranks
def column_linear(x_BTD, w_mD, b_m, enter):
    """This rank's outputs [B, T, m] of a linear layer. b_m may be None."""
    return F.linear(____, w_mD, b_m)


def row_linear(x_BTm, w_Dm, b_D, leave):
    """All outputs [B, T, D] of a linear layer of which this rank has the inputs m."""
    return ____  # F.linear(x_BTm, w_Dm), leave and b_D: in which order?


checks.linears((column_linear, row_linear), ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def column_linear(x_BTD, w_mD, b_m, enter):
#     return F.linear(enter(x_BTD), w_mD, b_m)
#
#
# def row_linear(x_BTm, w_Dm, b_D, leave):
#     return leave(F.linear(x_BTm, w_Dm)) + b_D  # once, after the sum
# ```
#
# </details>

# %% [markdown]
# The folded classes `Column` and `Row` make modules of these functions. Attention is split in the same way. Each rank
# computes whole heads: the projection to q, k and v is split by columns, the output projection by rows.
#
# ![Ranks 0 and 1 hold two heads each of the qkv weight; the output projection is split along its inputs; g adds
# up](../assets/07_heads.svg)


# %% jupyter={"source_hidden": true}
# %%ranks
def share(whole, dim, group):
    """This rank's part of a tensor, cut along `dim`, in memory of its own."""
    part = whole.detach().chunk(group.size(), dim)[group.rank()]
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format))


class Column(nn.Module):
    """A linear layer of which this rank has some outputs."""

    def __init__(self, full, group, enter):
        super().__init__()
        self.weight, self.enter = share(full.weight, 0, group), partial(enter, group=group)
        self.bias = None if full.bias is None else share(full.bias, 0, group)

    def forward(self, x_BTD):
        return column_linear(x_BTD, self.weight, self.bias, self.enter)


class Row(nn.Module):
    """A linear layer of which this rank has some inputs; its bias is whole."""

    def __init__(self, full, group, leave):
        super().__init__()
        self.weight, self.leave = share(full.weight, 1, group), partial(leave, group=group)
        self.bias = nn.Parameter(full.bias.detach().clone())

    def forward(self, x_BTm):
        return row_linear(x_BTm, self.weight, self.bias, self.leave)


# %%
# %%ranks
def split_blocks(model, group, enter, leave):
    """Attention and MLP of each block by columns, then rows, in place. Returns the model."""
    for block in model.blocks:
        block.attention.qkv = Column(block.attention.qkv, group, enter)
        block.attention.out = Row(block.attention.out, group, leave)
        block.mlp.up = Column(block.mlp.up, group, enter)
        block.mlp.down = Row(block.mlp.down, group, leave)
    return model


# %% [markdown]
# **Predict.** How many all-reduces does one layer make in a step, forward and backward together?

# %%
# %%ranks
guess_calls = ____  # your turn: type a number

# %%
# %%ranks
model = split_blocks(new_model(), group, f, g)
with wire.watch() as seen:
    model(*batch())[1].backward()
sums = [call for call in seen.calls if call.op != "all_gather"]  # it ends an all-reduce that began as a reduce-scatter
compare("all-reduces of a layer in a step", "guess_calls", len(sums) / layers)

# %% jupyter={"source_hidden": true}
# %%ranks
numbers = [call.bytes // 4 for call in sums]
if rank == 0:
    say(f"each of {numbers[0]:,} numbers; B·T·D is {B:,} · {T} · {D} = {B * T * D:,}")
assert numbers == [B * T * D] * 4 * layers

# %% [markdown]
# Attention and MLP each make one all-reduce in forward and one in backward. Each has B·T·D numbers: it grows with the
# batch, not with the weights.

# %% [markdown]
# ## Sequence parallelism: cut what is left (CORE, 9 min)
#
# Outside attention and MLP, every rank still holds the activations of all positions, and computes the same norms. A
# norm needs one position only. So each rank can have s = **T/t positions** there: [**sequence
# parallelism**](../assets/glossary.md#sequence-parallel) ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198)).
#
# ![A layer on two ranks: with sequence parallelism each norm sees half of the positions, an all-gather leads into
# attention and MLP, a reduce-scatter out](../assets/07_sequence.svg)
#
# The all-reduce is replaced by its two halves, so the volume stays the same. The folded cell defines them:
# `all_gathered(x, group)` makes [B, T, D] from [B, s, D], and `reduce_scattered(x, group)` makes [B, s, D] from
# partial sums [B, T, D].


# %% jupyter={"source_hidden": true}
# %%ranks
def all_gathered(x_BsD, group):
    """All positions, from everybody's. All ranks of the group call it."""
    mine = x_BsD.contiguous()
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts, dim=1)


def reduce_scattered(x_BTD, group):
    """This rank's positions of the sum over the group. All ranks of the group call it."""
    parts = [part.contiguous() for part in x_BTD.chunk(group.size(), dim=1)]
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts, group=group)
    return mine


def own_part(x_BTD, group):
    """This rank's positions, in memory of their own. Nothing is sent."""
    part = x_BTD.chunk(group.size(), dim=1)[group.rank()]
    return part.clone(memory_format=torch.contiguous_format)


def split(x_BTD, group):
    """This rank's positions of a tensor that is the same on all ranks. Backward joins the ranks' gradients."""
    return Move.apply(x_BTD, lambda x: own_part(x, group), lambda gradient: all_gathered(gradient, group))


def joined(x_BsD, group):
    """All positions, the same on all ranks. Backward takes this rank's part of the gradient."""
    return Move.apply(x_BsD, lambda x: all_gathered(x, group), lambda gradient: own_part(gradient, group))


def split_stream(model, group):
    """Tensor and sequence parallel, in place. Returns the model."""
    model.blocks[0].register_forward_pre_hook(lambda _, args: (split(args[0], group), *args[1:]))
    model.norm.register_forward_hook(lambda _, args, y_BsD: joined(y_BsD, group))
    return split_blocks(model, group, gathered, scattered)


# %% [markdown]
# ### Build C: into the columns, and out of the rows
#
# `gathered` replaces f, and `scattered` replaces g. Each blank is a call of `all_gathered` or `reduce_scattered`. For
# the gradients ask again: do all ranks hold the same, or partial sums?


# %%
# %%ranks
def gathered(x_BsD, group):
    """From this rank's positions to all positions, which each rank then uses differently."""
    return Move.apply(x_BsD, lambda x: ____, lambda gradient: ____)


def scattered(x_BTD, group):
    """From partial sums over all positions to the sum at this rank's positions."""
    return Move.apply(x_BTD, lambda x: ____, lambda gradient: ____)


checks.gathered_and_scattered((gathered, scattered), ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution C</summary>
#
# ```python
# def gathered(x_BsD, group):
#     return Move.apply(x_BsD, lambda x: all_gathered(x, group), lambda gradient: reduce_scattered(gradient, group))
#
#
# def scattered(x_BTD, group):
#     return Move.apply(x_BTD, lambda x: reduce_scattered(x, group), lambda gradient: all_gathered(gradient, group))
# ```
#
# </details>

# %% [markdown]
# One thing is left after backward. A norm's weight is whole on every rank, but each rank's norm has seen only its own
# positions. So its gradient is a partial sum. The same holds for the biases of the row-parallel layers.
#
# ### Build D: finish the norms' gradients
#
# Replace each `p.grad` by its sum over the group. There are many small gradients, so put them into one row `row_P`,
# and call *one* all-reduce. `part` is the piece of the row for `p`, as a flat tensor.


# %%
# %%ranks
def add_up(parameters, group):
    """Sum these parameters' gradients over the group, in one call. All its ranks call it, after backward."""
    row_P = torch.cat([p.grad.flatten() for p in parameters])
    ____  # the call
    for p, part in zip(parameters, row_P.split([p.numel() for p in parameters]), strict=True):
        ____  # the sum goes back to where it belongs


checks.add_up(add_up, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution D</summary>
#
# ```python
# def add_up(parameters, group):
#     row_P = torch.cat([p.grad.flatten() for p in parameters])
#     dist.all_reduce(row_P, group=group)
#     for p, part in zip(parameters, row_P.split([p.numel() for p in parameters]), strict=True):
#         p.grad = part.view_as(p)
# ```
#
# </details>


# %% jupyter={"source_hidden": true}
# %%ranks
def of_own_positions(model):
    """The parameters that are whole on each rank and have worked on its positions only."""
    ends = "norm.weight", "norm.bias", "out.bias", "down.bias"
    return [p for name, p in model.named_parameters() if ".norm_" in name or name.endswith(ends)]


model = split_stream(new_model(), group)
with wire.watch() as seen:
    model(*batch())[1].backward()
found = [seen.count(op) for op in ("all_gather", "reduce_scatter", "all_reduce")]
add_up(of_own_positions(model), group)
if rank == 0:
    volume = sum(call.bytes for call in seen.calls) / (4 * B * T * D)
    say("{} all-gathers, {} reduce-scatters, {} all-reduces".format(*found))
    say(f"volume {volume:g} B·T·D; before, {4 * layers} all-reduces of two halves each: {8 * layers} B·T·D")
    say(f"{len(of_own_positions(model))} of {len(list(model.parameters()))} gradients added up in one call")
assert found == [4 * layers + 2, 4 * layers, 0]

# %% [markdown]
# Per layer, four all-gathers and four reduce-scatters have the volume of four all-reduces. The two ends of the model
# add one all-gather each.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: sequence parallelism</summary>
#
# Put a table on the board: forward and backward of f, g, gathered, scattered, split, joined (the handbook has it). Let the
# room fill in the backward column by the one question. *Usual mistake:* "the backward of an all-gather is: take your
# part". True for `joined`, wrong for `gathered`: the other ranks' partial sums are lost. *Ask:* "why does the embedding
# need no sum?" (`split` gives it the whole gradient.)
#
# </details>

# %% [markdown]
# ## The library: a plan (CORE, 3 min)
#
# In PyTorch a *plan* names modules and says how each is split. A **placement** says what ranks hold: `Shard(1)` (own
# positions), `Replicate()` (the same on all ranks) or `Partial()` (partial sums). From these torch chooses the
# collectives. Seven lines split a layer:

# %%
# %%ranks
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def by_library(model, tensor_mesh):
    """Tensor and sequence parallel by torch, in place. Returns the model."""
    into = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())  # gathered
    out_of = RowwiseParallel(output_layouts=Shard(1))  # a row-parallel layer, and scattered
    plan = {
        "blocks.*.norm_*": SequenceParallel(),
        "blocks.*.attention": into,
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": out_of,
        "blocks.*.mlp": into,
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": out_of,
    }
    return parallelize_module(model, tensor_mesh, plan | ends_of_the_model(), src_data_rank=None)


# %% jupyter={"source_hidden": true}
# %%ranks
def ends_of_the_model():
    """The plan's lines for `split` and `joined`."""
    cut, whole = Shard(1), Replicate()
    return {
        "blocks.0": PrepareModuleInput(
            input_layouts=(whole, None), desired_input_layouts=(cut, None), use_local_output=True
        ),
        "norm": SequenceParallel(),
        "head": PrepareModuleInput(input_layouts=cut, desired_input_layouts=whole, use_local_output=True),
    }


def furthest(model, single, group):
    """The largest difference of a gradient from one process's; a share is compared with its share."""
    found = []
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        mine, wanted = p.grad, q.grad
        mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        cut = [dim for dim in range(wanted.dim()) if mine.shape[dim] != wanted.shape[dim]]
        wanted = share(wanted, cut[0], group) if cut else wanted
        found.append((mine - wanted).abs().max().item())
    return max(found)


# %% [markdown]
# Now compare the loss and **every gradient** with one process, in float64.

# %% jupyter={"source_hidden": true} tags=["nbval-check-output"]
# %%ranks
single = new_model(torch.float64)
loss_1 = single(*batch())[1]
loss_1.backward()
ways = {
    "tensor": split_blocks(new_model(torch.float64), group, f, g),
    "tensor and sequence": split_stream(new_model(torch.float64), group),
    "the library's plan": by_library(new_model(torch.float64), mesh["tensor"]),
}
for name, model in ways.items():
    with wire.watch() as seen:
        loss = model(*batch())[1]
        loss.backward()
    if name == "tensor and sequence":
        add_up(of_own_positions(model), group)
    apart = max((loss - loss_1).abs().item(), furthest(model, single, group))
    assert apart < 1e-10, f"{name} is {apart:.1e} away"
    if rank == 0:
        say(f"{name:19} {len(seen.calls)} calls; loss and all gradients equal to one process's, to 1e-10")
if rank == 0:
    p = model.blocks[0].norm_1.weight
    placement, of_gradient = (type(tensor.placements[0]).__name__ for tensor in (p, p.grad))
    say(f"norm_1.weight of the plan is {placement}, and its gradient is {of_gradient}")
metrics.exact(library_calls=len(seen.calls))
metrics.close(float64_loss=loss_1.detach())

# %% [markdown]
# The plan makes the same calls as your lines. From the placements torch also knows which gradients are partial sums.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the library</summary>
#
# Let somebody break one line (drop `add_up`, or add the bias before `leave`) and run the comparison again: the
# assertion names the model and the distance. *Usual question:* "is it bit-equal?" No: the order of additions differs,
# and so does the last digit. `src_data_rank=None`: every rank has the full weights already, so none needs to send them.
#
# </details>

# %% [markdown]
# ## Stay in the fast domain (CORE, 4 min)
#
# Each of the four all-reduces makes the GPU wait, because the next product needs the sum. A [**fast
# domain**](../assets/glossary.md#fast-domain) is a set of GPUs on a fast link such as NVLink: often the 8 GPUs of a node,
# in some racks 72.
#
# One GPU at 400 TFLOP/s needs 6.2 ms for 2,048 tokens in a layer of a 7 B model (D = 4,096, bf16). Four GPUs share this
# layer. Each sends 450 GB/s in the fast domain. Each has a network card, which sends 50 GB/s between nodes.
#
# **Predict.** All four are in one fast domain. How many times as fast as one GPU are they?

# %%
# %%ranks
guess_faster = ____  # your turn: type a number, such as 2.5


# %% jupyter={"source_hidden": true}
# %%ranks --timeout 120
def layer_on(per_node):
    """Virtual seconds of a layer with `per_node` ranks of the group on each node: (total, communication)."""
    net = VirtualNetwork(ranks, INSIDE, BETWEEN, ranks_per_node=per_node, group=group)
    for part in PARTS:
        net.compute(part * layer_s / t)
        net.all_reduce(stream)
    return net.clock_s, net.clock_s - layer_s / t


def by_formula(per_node, t=t):
    """A ring's 2 (t-1) messages, four times; between nodes a ring for each card of a node, with its part of the sum."""
    link, rings = (INSIDE, 1) if per_node == t else (BETWEEN, per_node)
    return layer_s / t + 4 * 2 * (t - 1) * link.cost_s(stream.nbytes / t / rings)


times = {}
for per_node in (4, 2, 1):
    if t % per_node == 0:
        name = "in one domain" if per_node == t else f"in {t // per_node} domains"
        times[name] = (*layer_on(per_node), by_formula(per_node))
compare("speed-up of four GPUs in a fast domain", "guess_faster", round(layer_s / by_formula(4, 4), 1))

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.lessons import tensor_parallel as lesson

if rank == 0:
    curves = recorded_runs.published("07_tensor_parallel")
    figure = lesson.draw_layer_times(times, layer_s, f"a layer on {t} GPUs, virtual time", curves)
    show(figure, "fast_domain", "left a layer's virtual time, right tokens per second of each GPU by size of the group")
    for name, (total, communication, _) in times.items():
        faster, share_of_it = layer_s / total, communication / total
        say(f"{name}: {1e3 * total:.2f} ms, {faster:.1f} times as fast; {share_of_it:.0%} is communication")
    for curve in curves:
        rates = dict(curve["points"])
        say(f"{curve['name']}: {1 - rates[16] / rates[8]:.0%} less per GPU with 16 than with 8")
metrics.exact(virtual_layer_s={name: row[0] for name, row in times.items()})
assert all(abs(total / formula - 1) < 0.02 for total, _, formula in times.values())

# %% [markdown]
# The links have their stated speed here, so this is the least that a layer waits: real messages reach less ([lesson
# 02](../assets/handbook/02_collectives.md#on-gpus)). In two domains the ranks of a node send over two cards, in four over
# one. On the right is a 3 B model on nodes of 8 GPUs ([Ultra-Scale
# Playbook](https://github.com/vinjn/nanotron-ultrascale-playbook/blob/e3bcfc5c0b177d5f259a65465ddf0f880c71577f/assets/data/benchmarks/tp_scaling.html)).
# The batch is the largest that fits. From 2 to 8 ranks the speed per GPU falls by a fifth. From 8 to 16, on two nodes, it
# falls by almost half.
#
# **So a tensor-parallel group stays within a fast domain.**

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the fast domain</summary>
#
# *Ask:* "what would you change to make the hatched part smaller, without another network?" (Fewer tensor ranks; larger D:
# compute grows with D², the messages with D.)
#
# </details>

# %% [markdown]
# ## A bug from the zoo (CORE, 3 min)
#
# Some models have one more norm, `head_norm`. It normalizes the output of each *head*, before the output projection.
# All heads share its weight. A trainer splits this model over tensor ranks, **without** sequence parallelism. Its
# author knows Build D, and wrote:


# %%
# %%ranks
def partial_sums(model, sequence_parallel=False):
    """The parameters whose gradients are to be added up."""
    return of_own_positions(model) if sequence_parallel else []


# %% [markdown]
# The model trains, and the loss falls. **Which parameter is wrong, and which measurement shows it?** The cell compares
# the parameters that every rank holds whole: they must be *the same* on every rank.


# %% jupyter={"source_hidden": true}
# %%ranks
def with_head_norm(model):
    """Normalize each head's output before the output projection, in place. Returns the model."""
    size = D // HEADS
    for block in model.blocks:
        w = block.attention.out.weight
        norm = block.attention.head_norm = nn.RMSNorm(size, device=w.device, dtype=w.dtype)
        block.attention.out.register_forward_pre_hook(
            lambda _, args, norm=norm: (norm(args[0].unflatten(-1, (-1, size))).flatten(-2),)
        )
    return model


def train(model, which):
    """`steps` steps of Adam; the losses. `which(model)` are the parameters whose gradients are added up."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(*batch(step))[1]
        loss.backward()
        if parameters := which(model):
            add_up(parameters, group)
        optimizer.step()
        losses.append(f"{loss.item():.3f}")
    return losses


def drifted(model, one, group):
    """{parameter: largest distance between ranks} of those that are whole, as in `one` process, and not the same."""
    found = {}
    for (name, p), whole in zip(model.named_parameters(), one.parameters(), strict=True):
        if p.shape == whole.shape:
            most, least = p.detach().clone(), p.detach().clone()
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
            dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
            found[name] = (most - least).max().item()
    return {name: apart for name, apart in found.items() if apart > 0}


def say_drift(title, model, one):
    names = drifted(model, one, group) if t > 1 else {}
    if rank == 0:
        say(f"{title}: {len(names)} parameters have drifted apart, by up to {max(names.values(), default=0):.4f}")
        for name, apart in list(names.items())[:6]:
            say(f"    {name:28} {apart:.4f}")


# %%
# %%ranks
model = with_head_norm(split_blocks(new_model(), group, f, g))
losses = train(model, partial_sums)
if rank == 0:
    say(f"losses: {' '.join(losses)}")
say_drift("theirs", model, with_head_norm(new_model()))

# %% [markdown]
# <details><summary>Answer</summary>
#
# `head_norm.weight`. It lies *inside* the split part: each rank has used it with its own heads, so its gradient is a partial
# sum, with or without sequence parallelism. So each rank updates its copy differently. The mend is to add up these
# gradients always, as the next cell does.
#
# This bug is number 11 in [Megatron-LM#7452](https://github.com/NVIDIA/Megatron-LM/issues/7452).
#
# </details>


# %% jupyter={"source_hidden": true}
# %%ranks
def also_in_heads(model):
    return [p for name, p in model.named_parameters() if "head_norm" in name]


model = with_head_norm(split_blocks(new_model(), group, f, g))
train(model, also_in_heads)
say_drift("mended", model, with_head_norm(new_model()))

# %% [markdown]
# **What is whole on all ranks must stay equal on all ranks.** Compare it after a few steps. The loss does not show it.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# A condition such as `if sequence_parallel` is how such bugs begin, and so is a list of names ("Lab: a list of names"). Let
# the room propose something better: DTensor's `Partial` placement says it by type. *When late:* run only the first cell
# and open the answer.
#
# </details>

# %% [markdown]
# ## Lab: six numbers, two ways (MORE, 4 min)
#
# **Predict.** The next code cell has x and W. Three ranks split W by rows, one row each. Which three matrices do they
# compute? Which collective makes the result?
#
# <details><summary>Answer</summary>
#
# [[1, 2], [4, 8]], [[6, 8], [15, 20]] and [[15, 18], [30, 36]]. An all-reduce adds them up to [[22, 28], [49, 64]].
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
x = torch.tensor([[1.0, 2, 3], [4, 5, 6]], device=device)
W = torch.tensor([[1.0, 2], [3, 4], [5, 6]], device=device)

mine = x @ W.tensor_split(world_size, dim=1)[rank]  # with 4 ranks, two get no column
say(f"by columns {mine.tolist()}")

# %% tags=["nbval-check-output"]
# %%ranks
partial_sum = x.tensor_split(world_size, dim=1)[rank] @ W.tensor_split(world_size, dim=0)[rank]
mine = partial_sum.tolist()
dist.all_reduce(partial_sum)
say(f"by rows my partial sum is {mine}, the sum {partial_sum.tolist()}")

# %% [markdown]
# (With four ranks two have no column, and one has no row: its partial sum is zero.) All ranks compute *at the same
# time*, and then call one all-reduce. Passing a running total from rank to rank gives the same sum, but only one rank
# works at a time.

# %% [markdown]
# **Predict.** Lesson 03's network of 6 inputs, 4 hidden and 2 outputs has 38 parameters. How many does each of two
# ranks hold? And what does a step communicate, for one row of inputs: two numbers forward, and how many backward?
#
# <details><summary>Answer</summary>
#
# 2·6 + 2 of the first layer, 2·2 + 2 of the second, whose bias is on both: **20**, not 19. On four ranks it is 11.
# Backward communicates the gradient of the inputs: 6 numbers. The 4 hidden units are never sent.
#
# </details>

# %%
# %%ranks
torch.manual_seed(0)
full = nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 2)).to(device)
split_mlp = nn.Sequential(Column(full[0], group, f), nn.GELU(), Row(full[2], group, g))
row = torch.ones(1, 6, device=device, requires_grad=True)
with wire.watch() as seen:
    result = split_mlp(row)
    result.sum().backward()
if rank == 0:
    held = sum(p.numel() for p in split_mlp.parameters())
    say(f"{held} of 38 parameters on each of {t} ranks")
    say(f"all-reduces of {[call.bytes // 4 for call in seen.calls]} numbers: forward, then backward")
    say(f"largest difference from the full network: {(result - full(row)).abs().max().item():.0e}")

# %% [markdown]
# ## Lab: what a rank keeps for backward (MORE, 4 min)
#
# Count numbers per token and layer ([lesson 01](01_one_device.ipynb) derives them). A GPT of width D with H heads keeps 16 D + H + 4:
#
# | what | numbers | under tensor parallelism |
# |---|---|---|
# | two norms: input, mean and deviation | 2 D + 4 | all on every rank; with sequence parallelism a t-th |
# | inputs of the two column-parallel layers | 2 D | all on every rank |
# | inside attention and MLP; one number per head of the fused attention | 12 D + H | a t-th |
#
# **Predict.** With D = 128 and H = 4 that is 2,056 numbers. How many does each of four ranks keep under tensor
# parallelism? With sequence parallelism?
#
# <details><summary>Answer</summary>
#
# Tensor parallelism divides what lies inside: 260 + 256 + 1,540/4 = 901. The 516 stay, however many ranks you take. Sequence
# parallelism divides the norms' part too: 256 + (260 + 1,540)/4 = 706. The 256 that stay are the gathered inputs.
# Korthikanti et al. keep only a share of these as well, and gather them again in backward.
#
# </details>

# %%
# %%ranks
from manyhands.measure.tensor_bytes import count_saved
from manyhands.lessons import tensor_parallel as lesson
from manyhands.predict.activation_memory import WHOLE, saved_bytes


def kept_by_formula(whole, t):
    """(bytes that every rank keeps, bytes of which it keeps a share): terms in `whole` are not divided."""
    terms = saved_bytes(config, sequences)
    here = sum(size for term, size in terms.items() if term in whole)
    return here, (sum(terms.values()) - here) / t


norms = {"norms", "final norm"}
ways = {
    "one process": (new_model(), set(WHOLE), 1),
    "tensor": (split_blocks(new_model(), group, f, g), set(WHOLE), t),
    "and sequence": (split_stream(new_model(), group), set(WHOLE) - norms, t),
}
kept = {
    name: (count_saved(lambda model=model: model(*batch()), model).bytes, *kept_by_formula(whole, parts))
    for name, (model, whole, parts) in ways.items()
}
metrics.exact(kept_bytes={name: row[0] for name, row in kept.items()})

# %% jupyter={"source_hidden": true}
# %%ranks
if rank == 0:
    figure = lesson.draw_kept_for_backward(kept, f"one of {t} ranks, {layers} layers")
    show(figure, "kept", "bars of bytes kept for backward: whole on every rank, and divided among ranks")
    for name, (measured, *formula) in kept.items():
        say(f"{name:14} keeps {measured / 1e6:6.2f} MB, measured / formula {measured / sum(formula):.4f}")
apart = max(abs(measured / sum(formula) - 1) for measured, *formula in kept.values())
assert apart < 0.02 or device.type == "xpu"  # an attention that is not fused keeps its scores, too

# %% [markdown]
# ## Lab: hide the communication (MORE, 5 min)
#
# A product can be cut into chunks of tokens. While one chunk's sum travels, the next chunk computes. PyTorch does this
# in `torch.ops.symm_mem.fused_all_gather_matmul` and `fused_matmul_reduce_scatter` ("async TP"), Megatron-LM with
# `--tp-comm-overlap`. Here the virtual network does it, with the layer of "Stay in the fast domain":


# %%
# %%ranks
def chunked_layer(chunks, per_node):
    """Virtual seconds of a layer whose products are cut into chunks: (total, what compute does not hide)."""
    net = VirtualNetwork(ranks, INSIDE, BETWEEN, ranks_per_node=per_node, group=group)
    for part in PARTS:
        works = []
        for piece in stream.chunk(chunks):
            net.compute(part * layer_s / t / chunks)
            with net.asynchronous("a chunk's sum") as work:
                net.all_reduce(piece)
            works.append(work)
        net.wait(*works)  # the next product needs all of them
    return net.clock_s, net.clock_s - layer_s / t


def chunked_by_formula(chunks, per_node, t=t):
    """Of each part: the slower of computing and sending in every chunk, and once the faster."""
    (link, rings), seconds = (INSIDE, 1) if per_node == t else (BETWEEN, per_node), 0
    for part in PARTS:
        both = part * layer_s / t / chunks, 2 * (t - 1) * link.cost_s(stream.nbytes / t / rings / chunks)
        seconds += chunks * max(both) + min(both)
    return seconds


# %% [markdown]
# **Predict.** Does the hatched part shrink with every doubling of the number of chunks?
#
# <details><summary>Answer</summary>
#
# No. In one domain it shrinks up to 8 chunks, and grows with 16. Each message pays its latency, and in the smallest
# product a chunk's sum then takes longer than its compute. In two domains 4 chunks are best, and they hide more than half.
# With more chunks the sums take longer than most of the products, so compute cannot hide them.
#
# </details>

# %%
# %%ranks --timeout 120
chunked = {}
for per_node in (4, 2):
    if t % per_node == 0 and t > 1:
        for chunks in (1, 2, 4, 8, 16):
            name = f"{chunks} in one domain" if per_node == t else f"{chunks} in {t // per_node} domains"
            chunked[name] = (*chunked_layer(chunks, per_node), chunked_by_formula(chunks, per_node))
assert all(abs(total / formula - 1) < 1e-6 for total, _, formula in chunked.values())

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.lessons import tensor_parallel as lesson

if rank == 0 and chunked:
    figure = lesson.draw_layer_times(chunked, None, f"a layer on {t} GPUs by number of chunks, virtual time")
    show(figure, "chunks", "bars of a layer's virtual time by number of chunks; what compute does not hide is hatched")
    for name, (total, exposed, _) in chunked.items():
        say(f"{name}: {1e3 * total:.2f} ms, of which {1e3 * exposed:.2f} ms are not hidden")

# %% [markdown]
# On 256 H100s async TP gives a Llama 3.1 70B with t = 8 about 6 % more: 876 tokens per second and GPU instead of 829
# ([torchtitan](https://github.com/pytorch/torchtitan/blob/31a17bfdb70bab6f62a13d21816a5339b911d6e3/benchmarks/llama3_h100_202412_torchtitan.md)).

# %% [markdown]
# ## Lab: the library counts its own calls (MORE, 2 min)
#
# `CommDebugMode` counts the collectives of DTensors. In torch 2.13 it fails on a module that is called twice in a
# forward, as our dropout is. So here it counts for one MLP, without sequence parallelism:

# %%
# %%ranks
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
library = parallelize_module(new_model(torch.float64).blocks[0].mlp, mesh["tensor"], plan, src_data_rank=None)
x_BTD = torch.ones(B, T, D, dtype=torch.float64, device=device, requires_grad=True)
with CommDebugMode() as counted:
    y_BTD = library(x_BTD)
    forward_calls = counted.get_total_counts()
    y_BTD.sum().backward()
if rank == 0:
    weight = library.down.weight
    say(f"down.weight: {list(weight.shape)}, {weight.placements[0]}, I hold {list(weight.to_local().shape)}")
    say(f"collectives of an MLP: {forward_calls} forward, {counted.get_total_counts()} with backward")

# %% [markdown]
# ## A vocabulary in parts (MORE, 9 min)
#
# **Why.** Embedding and head have V·D weights each, and the logits B·T·V numbers. With V = 128,000 the logits are larger
# than any other single activation. So split the vocabulary too: [vocabulary
# parallel](../assets/glossary.md#vocabulary-parallel). Our V of 65 does not divide evenly: pieces are as equal as `chunk`
# makes them.
#
# ![The 65 rows of the embedding on four ranks: 17, 17, 17 and 14; a token is looked up where its row lies, the other ranks give
# zeros, and g adds up](../assets/07_vocabulary.svg)
#
# **Embedding**: a rank looks up the tokens whose rows it has, and zeros for the others. That is a partial sum, so g
# adds it up. **Head**: it is split by columns, and the logits stay split.


# %%
# %%ranks
class VocabularyEmbedding(nn.Module):
    """An embedding of which this rank has the rows `first`, `first` + 1, ..."""

    def __init__(self, full, group):
        super().__init__()
        self.weight, self.group = share(full.weight, 0, group), group
        self.first = group.rank() * math.ceil(len(full.weight) / group.size())

    def forward(self, ids_BT):
        mine_BT = ids_BT - self.first
        here_BT = (mine_BT >= 0) & (mine_BT < len(self.weight))
        rows_BTD = F.embedding(mine_BT.clamp(0, len(self.weight) - 1), self.weight)
        return g(rows_BTD * here_BT[..., None], self.group)


# %% [markdown]
# ### Exercise 1: the loss of split logits
#
# Cross-entropy of one token is `log(sum of exp(logits)) - logit of its target`. Each rank has some of the logits:
# `logits_Nv` holds the columns `first`, `first` + 1, ... for N tokens. Write `split_loss`: the mean over the tokens, with
# its backward, without gathering logits. Numbers can be large, so subtract the largest logit of each token first; it
# changes nothing, so it needs no gradient (`dist.all_reduce(..., op=dist.ReduceOp.MAX, group=group)`). Use g for sums. The
# check allows three all-reduces of N numbers.


# %%
# %%ranks
def split_loss(logits_Nv, targets_N, first, group):
    """The mean cross-entropy; each rank has some columns of the logits. All ranks of the group call it."""
    raise NotImplementedError  # your turn


checks.split_loss(split_loss, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 1</summary>
#
# ```python
# def split_loss(logits_Nv, targets_N, first, group):
#     largest_N = logits_Nv.detach().amax(-1)
#     dist.all_reduce(largest_N, op=dist.ReduceOp.MAX, group=group)
#     shifted_Nv = logits_Nv - largest_N[:, None]
#     sums_N = g(shifted_Nv.exp().sum(-1), group)
#     mine_N, v = targets_N - first, logits_Nv.shape[-1]
#     here_N = (mine_N >= 0) & (mine_N < v)
#     logit_N = shifted_Nv.gather(-1, mine_N.clamp(0, v - 1)[:, None])[:, 0] * here_N
#     return (sums_N.log() - g(logit_N, group)).mean()
# ```
#
# </details>

# %% [markdown]
# Compare the whole model with its vocabulary split, by our lines and by the library's `loss_parallel` (in
# `sharded_loss`), with one process:

# %%
# %%ranks
from manyhands.parallel.tensor_parallel import apply_tensor_parallel, sharded_loss

ids_BT, targets_BT = batch()
single, ours, library = (new_model(torch.float64) for _ in range(3))
loss_1 = single(ids_BT, targets_BT)[1]
loss_1.backward()
split_blocks(ours, group, f, g)
ours.tokens = VocabularyEmbedding(ours.tokens, group)
ours.head = Column(ours.head, group, f)
first = group.rank() * math.ceil(V / t)
with wire.watch() as seen:
    logits_BTv, _ = ours(ids_BT)
    before = len(seen.calls)
    loss = split_loss(logits_BTv.flatten(0, 1), targets_BT.flatten(), first, group)
    loss_bytes = sum(call.bytes for call in seen.calls[before:])
    loss.backward()

# %%
# %%ranks
apply_tensor_parallel(library, mesh["tensor"], loss_parallel=True)
with sharded_loss(True):
    loss_library = library(ids_BT, targets_BT)[1]
    loss_library.backward()
for name, model, found in (("ours", ours, loss), ("loss_parallel", library, loss_library)):
    apart = max((found - loss_1).abs().item(), furthest(model, single, group))
    assert apart < 1e-10, f"{name} is {apart:.1e} away"
    if rank == 0:
        say(f"{name} and one process: loss and all gradients equal to 1e-10")
rows = len(ours.tokens.weight)
say(f"{rows} of {V} tokens; the loss communicated {loss_bytes:,} bytes, all logits are {8 * B * T * V:,}")

# %% [markdown]
# ## Exercises (MORE, 12 min)
#
# Each check runs your answer in a separate process group: you cannot break anything. Exercise 1 is above.
#
# ### Exercise 2: a test that a wrong backward does not pass
#
# "The output is right" says nothing about backward, and `y.sum().backward()` sends ones, which hide much. Test the
# [**vector-Jacobian product**](../assets/glossary.md#vector-jacobian-product): draw a random v of y's shape, and compare
# the gradients of x under `y.backward(v)`. Write `agree(parallel, single, x, group)`: both are functions of x, in
# float64, whose results and gradients may differ. Return True on every rank if output and gradient agree to 1e-10 on
# *all* ranks, else False on every rank. v must be the same on all ranks, since they share one loss. Leave x and its
# gradient as you found them.


# %%
# %%ranks
def agree(parallel, single, x, group):
    """Whether two functions have the same output and the same random vector-Jacobian product on all ranks."""
    raise NotImplementedError  # your turn


checks.agree(agree, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 2</summary>
#
# ```python
# def agree(parallel, single, x, group):
#     found = []
#     for function in (parallel, single):
#         leaf = x.detach().clone().requires_grad_()
#         y = function(leaf)
#         draw = torch.Generator().manual_seed(7)  # the same on all ranks
#         v = torch.randn(y.shape, dtype=y.dtype, generator=draw).to(y.device)
#         (gradient,) = torch.autograd.grad(y, leaf, v)
#         found.append((y.detach(), gradient))
#     apart = torch.stack([(a - b).abs().max() for a, b in zip(*found, strict=True)]).max()
#     dist.all_reduce(apart, op=dist.ReduceOp.MAX, group=group)
#     return apart.item() <= 1e-10
# ```
#
# </details>

# %% [markdown]
# ### Exercise 3: fewer key heads than ranks
#
# In [grouped-query attention](../assets/glossary.md#gqa), GQA, several query heads share one head of keys and values:
# with 8 query heads and 2 such KV heads, queries 0 to 3 use KV head 0, and 4 to 7 KV head 1. Write `my_heads(num_heads,
# num_kv_heads, t, rank)`: the lists of query heads and of KV heads that this rank holds. Each rank holds consecutive
# query heads, rank 0 the first, and exactly the KV heads that its queries use. Where t is a multiple of `num_kv_heads`,
# that means copies on several ranks. (Their gradients are then partial sums, as in Build D.) Refuse with a ValueError
# that names the two numbers if t does not divide `num_heads`, or if neither of t and `num_kv_heads` divides the other.


# %%
# %%ranks
def my_heads(num_heads, num_kv_heads, t, rank):
    """(query heads, KV heads) of a tensor rank, both as lists."""
    raise NotImplementedError  # your turn


checks.my_heads(my_heads, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 3</summary>
#
# ```python
# def my_heads(num_heads, num_kv_heads, t, rank):
#     if num_heads % t:
#         raise ValueError(f"{num_heads} heads do not split over {t} tensor ranks; use a divisor of {num_heads}")
#     if num_kv_heads % t and t % num_kv_heads:
#         raise ValueError(f"{num_kv_heads} KV heads and {t} tensor ranks: one must divide the other")
#     each, per_kv = num_heads // t, num_heads // num_kv_heads
#     queries = list(range(rank * each, (rank + 1) * each))
#     return queries, sorted({query // per_kv for query in queries})
# ```
#
# </details>

# %% [markdown]
# `train.py --preset llama-nano` has 4 query heads and 2 KV heads. Which of them does the trainer give this rank? The
# cell compares its queries and keys with those of the whole model:

# %% tags=["nbval-check-output"]
# %%ranks
from copy import deepcopy

from manyhands.parallel.tensor_parallel import apply_tensor_parallel


def queries_and_keys(llama):
    """Those of the first layer, a list of heads each."""
    seen = []

    def attention(q_BHTE, k_BKTE, v_BKTE):
        seen.append([q_BHTE.unbind(1), k_BKTE.unbind(1)])
        return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=True)

    llama(batch()[0], attention=attention)
    return seen[0]


torch.manual_seed(1337)
llama = GPT(GPTConfig(V, n_layer=1, n_head=HEADS, style="llama", n_kv_head=2, n_hidden=344)).to(device).double()
shared = deepcopy(llama)
apply_tensor_parallel(shared, mesh["tensor"])
mine = tuple(
    [next(h for h, other in enumerate(heads) if torch.allclose(head, other)) for head in own]
    for own, heads in zip(queries_and_keys(shared), queries_and_keys(llama), strict=True)
)
assert mine == tuple(map(list, my_heads(HEADS, 2, t, group.rank())))
say(f"query heads {mine[0]}, KV heads {mine[1]}: as my_heads says")

# %% [markdown]
# ## Lab: a list of names (MORE, 4 min)
#
# Another trainer uses sequence parallelism. Its author knew that the norms' gradients need a sum, and listed the norms.
# **Which parameters are missing from the list?**


# %%
# %%ranks
def norms_of(model):
    return [p for block in model.blocks for norm in (block.norm_1, block.norm_2) for p in norm.parameters()]


for title, which in (("theirs", norms_of), ("mended", of_own_positions)):
    model = split_stream(new_model(), group)
    train(model, which)
    say_drift(title, model, new_model())

# %% [markdown]
# <details><summary>Answer</summary>
#
# The *last* norm, and the biases of the row-parallel layers, which also work on a rank's own positions.
# `of_own_positions` has them. Such bugs were reported. The last norm, with ranks' gradients printed side by side:
# [Megatron-LM#1446](https://github.com/NVIDIA/Megatron-LM/issues/1446). Norms in general:
# [Megatron-LM#443](https://github.com/NVIDIA/Megatron-LM/issues/443). A library that leaves this sum to its caller:
# [TransformerEngine#435](https://github.com/NVIDIA/TransformerEngine/issues/435).
#
# </details>

# %% [markdown]
# ## On the cluster
#
# The first command prints what would run on 64 ranks. The others run here. Then submit a job with the same flags:
#
# ```bash
# python scripts/train.py --preset gpt-7b --ranks 64 --dry-run --parallel.tensor 4 --parallel.sequence-parallel
# python scripts/launch.py --nproc 4 -- --preset nano --parallel.tensor 2
# python scripts/launch.py --nproc 4 -- --preset nano --parallel.strategy fsdp --parallel.tensor 2
# ```
#
# [The handbook](../assets/handbook/07_tensor_parallel.md#on-a-cluster) says what changes on GPUs.

# %% [markdown]
# ## Recap

# %%
# %%ranks
card(
    "Columns give a part of the result, rows a partial sum. Columns, then rows, need one all-reduce.",
    "Ask of each tensor: the same on all ranks, or partial sums? Ranks that use it differently leave partial gradients.",
    "A layer makes four all-reduces of B·T·D numbers in a step, and the next product waits: stay in a fast domain.",
    "Sequence parallelism cuts each all-reduce into its halves: the same volume, less to keep.",
    "What is whole on all ranks must stay equal: compare it after a few steps.",
    figure="an MLP on two ranks: columns, then rows",
    command="python scripts/train.py --preset gpt-7b --ranks 64 --dry-run --parallel.tensor 8 --parallel.sequence-parallel",
)

# %% [markdown]
# Further reading is in [the handbook](../assets/handbook/07_tensor_parallel.md).

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
