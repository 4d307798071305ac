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
# **45 minutes** for the sections marked CORE, 66 with those marked MORE.
#
# After this lesson **you can**
# - split linear layers by columns and by rows, and attention by heads;
# - write the two movements f and g, one for forward and one for backward, and say why;
# - add sequence parallelism, and name the gradients that it leaves unfinished;
# - do the same with `parallelize_module`, and count its collectives;
# - say why a tensor-parallel group stays within a node.
#
# **You need** the collectives of [lesson 02](02_collectives.ipynb): all-reduce, and its two halves
# [reduce-scatter](../assets/glossary.md#reduce-scatter) and [all-gather](../assets/glossary.md#all-gather). From
# [lesson 06](06_zero_fsdp.ipynb) you need the word [shard](../assets/glossary.md#shard), a rank's part of a tensor.
#
# **New here:** [tensor parallel](../assets/glossary.md#tensor-parallel),
# [column-parallel](../assets/glossary.md#column-parallel), [row-parallel](../assets/glossary.md#row-parallel),
# [partial sum](../assets/glossary.md#partial-sum), [sequence parallel](../assets/glossary.md#sequence-parallel),
# [vocabulary parallel](../assets/glossary.md#vocabulary-parallel),
# [vector-Jacobian product](../assets/glossary.md#vector-jacobian-product), [gqa](../assets/glossary.md#gqa).
#
# The same file is a script:
#
# ```bash
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/07_tensor_parallel.py --layers 4
# mpiexec -n 4 python scripts/07_tensor_parallel.py
# python scripts/07_tensor_parallel.py                   # a world of one: the same path, the same loss
# ```

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 2, warm-up 3, f and g 7, linears 7, attention 3, sequence parallel 11, three ways 4,
# experiment 5, zoo 3. Builds A to D take about three minutes each and are in these numbers.
#
# *Say:* one question carries the lesson: "do all ranks hold the same here, or partial sums?" Every movement changes
# one into the other, and its backward follows from the answer.
#
# *Three usual mistakes:* giving tensor ranks different data (they work on the *same* sequences); thinking that f does
# nothing, because its forward does; adding the bias before the sum.
#
# *When late:* give solutions B and D, skip attention's figure, and keep builds A and C, the three ways and the zoo.
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
# ## Start (CORE, 2 min)
#
# The first cell starts four ranks. Cells that begin with `%%ranks` run on all of them. Each section needs the cells
# of this one, and then only its own: a folded cell with `catch_up(...)` defines what is missing from earlier ones.

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
from manyhands import Metrics, catch_up, join, leave, say, show
from manyhands.checks import tensor_parallel as checks
from manyhands.measure import wire
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

# %% [markdown]
# The ranks join and form a grid, a *mesh*. Those of a row share every layer: they are a **tensor-parallel group** of
# `t` ranks. Four heads of attention allow t = 1, 2 or 4. On more ranks there are several such groups, and each does
# the same.

# %%
# %%ranks
HEADS = 4
ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
t = math.gcd(world_size, HEADS)
mesh = init_device_mesh(device.type, (world_size // t, t), mesh_dim_names=("data", "tensor"))
group = mesh["tensor"].get_group()  # what every function below is given
say(f"I am number {group.rank()} of the {group.size()} in my tensor-parallel group")

# %% [markdown]
# The model is **ShakespeareGPT** again. **All tensor ranks read the same sequences**: they share the work of a layer,
# not the batch. Biases start at zero, where a mistake with them would not show, so all weights are shaken a little.
#
# Letters at the end of a name are its shape: `B` sequences, `T` positions, `D` width, `M` hidden units, `V` tokens
# in the vocabulary. A small letter is this rank's share: `m` = M/t, `s` = T/t, `v` about V/t.

# %%
# %%ranks
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.gpt.model import GPT, GPTConfig

corpus = load_corpus(ranks)
config = GPTConfig(vocab_size=len(corpus.vocab), n_layer=layers, n_head=HEADS)
B, T, D, V = sequences, config.block_size, config.n_embd, config.vocab_size
metrics = Metrics(ranks, corpus, {"layers": layers, "sequences": sequences, "steps": steps})


def new_model(dtype=torch.float32):
    """ShakespeareGPT with the same weights on every rank, none of them zero."""
    torch.manual_seed(1337)
    model = GPT(config)
    for p in model.parameters():
        p.data += 0.02 * torch.randn_like(p)
    return model.to(device, dtype)


def batch(step=0):
    """Inputs and targets [B, T], the same on every rank."""
    return [ids.to(device) for ids in get_batch(corpus.train_ids, step, B, T, 0, 1, seed=1)]


if rank == 0:
    say(f"{config.num_params():,} parameters; a batch is {list(batch()[0].shape)} on every rank")

# %% [markdown]
# ## Warm-up: six numbers, two ways (CORE, 3 min)
#
# **Why.** FSDP cuts weights for storage, and makes a layer whole before it computes. What if a single layer is too
# large, or too slow, for one GPU? Then split the *product* itself. There are two ways.
#
# ![The product of a 2 x 3 and a 3 x 2 matrix: by columns each rank gets some columns of the result; by rows each rank gets a
# whole 2 x 2 matrix, and their sum is the result](../assets/07_columns_rows.svg)
#
# **By columns**: each rank has some columns of W and all of x. It gets some columns of the result. **By rows**: each
# rank has some rows of W and the matching columns of x. It gets a matrix of full size, one term of a sum: a [**partial
# sum**](../assets/glossary.md#partial-sum).
#
# **Predict.** Three ranks split W by rows, one row each. Which three matrices do they compute? Which collective makes
# the result?
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
# time*, then one all-reduce. Passing a running total from rank to rank gives the same sum, but only one rank works at a
# time: that is a relay, and no parallelism.

# %% [markdown]
# ## f and g: the same, or partial sums? (CORE, 7 min)
#
# **Why.** Two products with a GELU in between make an MLP: `gelu(X A) B`. Cut A by columns. GELU works number by
# number, so each rank applies it to its own hidden units. These meet exactly the rows of B that belong to them. So cut
# B by rows, and *nothing is sent between the two*:
#
# ![Two ranks compute an MLP: X is on both; f; each multiplies by its columns of A, applies GELU, multiplies by its rows of B;
# g adds the two partial sums up to Y](../assets/07_f_and_g.svg)
#
# (Cut A by rows instead, and every rank has a partial sum of X A. GELU of a sum is not the sum of GELUs: you would need
# an all-reduce in the middle.)
#
# This is [**tensor parallelism**](../assets/glossary.md#tensor-parallel) as in Megatron-LM (Shoeybi et al. 2019). The
# paper calls the place where X enters **f**, and the place where the result leaves **g**.
#
# **Predict.** In forward, f does nothing and g is an all-reduce. In backward, the gradient of the result arrives at g,
# the same on all ranks. What do g and f have to do with gradients?
#
# <details><summary>Answer</summary>
#
# g: Y = Y₀ + Y₁, so the gradient of each partial sum is that of Y. Nothing is to be done. f: both ranks have used X,
# each with its own columns. Each has only *its partial sum* of the gradient of X: an all-reduce adds them up.
#
# </details>
#
# Autograd does not see inside `dist.all_reduce`, so you say what comes back. `Move` does one thing in forward and
# another in backward:


# %%
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


# %% [markdown]
# ### Build A: f and g
#
# Write both with `Move.apply`. One line each. The check looks at forward and backward, and counts the calls.
# (Whatever you leave as it is, the check replaces by the lesson's own lines.)


# %%
# %%ranks
def f(x, group):
    """Where x, the same on all ranks, enters what each computes differently."""
    raise NotImplementedError  # your turn


def g(x, group):
    """Where partial sums leave as their sum, the same on all ranks."""
    raise NotImplementedError  # your turn


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
# f and g are mirror images: each one's backward is the other's forward. What is the *same* on all ranks has a gradient
# in *partial sums*, as soon as ranks use it differently. The rest of the lesson is this sentence, again and again.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: f and g</summary>
#
# Draw one number x that two ranks multiply by 3 and by 5. The result is 8 x, its derivative 8; rank 0 alone would say
# 3. *Usual mistake:* an all-reduce in both directions of g. `torch.distributed.nn.functional.all_reduce` does that: there
# every rank has a loss of its own, here all have the same one, and the gradient would be t times too large.
#
# </details>

# %% [markdown]
# ## Columns, then rows: a parallel MLP (CORE, 7 min)
#
# torch keeps the weight of a linear layer as [outputs, inputs]. So the *columns* of A are the first dim of `weight`.
#
# ### Build B: two linear layers
#
# `enter` and `leave` are functions of one tensor; here they are f and g for our group. Write both layers. Mind where
# the bias of the second one goes: it is whole on every rank. The check counts bytes in both directions.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "Move", "all_reduced", "f", "g")


# %%
# %%ranks
def column_linear(x_BTD, w_mD, b_m, enter):
    """This rank's outputs [B, T, m] of a linear layer. b_m may be None."""
    raise NotImplementedError  # your turn


def row_linear(x_BTm, w_Dm, b_D, leave):
    """All outputs [B, T, D] of a linear layer of which this rank has the inputs m."""
    raise NotImplementedError  # your turn


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
# As modules they take the place of a full layer. Each rank cuts its share out of the *same* full weights, so that the
# start does not depend on t:


# %%
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


# %% [markdown]
# **Predict.** Lesson 03's network of 6 inputs, 4 hidden and 2 outputs has 38 parameters. How many does each of two
# ranks hold? And what does a step communicate, for one row of inputs: two numbers forward, and how many backward?
#
# <details><summary>Answer</summary>
#
# 2·6 + 2 of the first layer, 2·2 + 2 of the second, whose bias is on both: **20**, not 19. On four ranks it is 11. Backward communicates the
# gradient of the inputs: 6 numbers. The 4 hidden units appear nowhere.
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
    say(f"away from the full network by {(result - full(row)).abs().max().item():.0e}")

# %% [markdown]
# ## Attention by heads (CORE, 3 min)
#
# **Why.** Heads do not look at each other until the output projection. So give each rank whole heads: the projection to
# q, k and v by columns, the output projection by rows. The same pair, the same f and g.
#
# ![The rows of the qkv weight lie head by head; ranks 0 and 1 hold two heads each; the output projection is cut along its inputs;
# the partial sums are added up by g](../assets/07_heads.svg)
#
# One thing to mind: rows of the qkv weight must lie head by head (q, k, v of head 0, then of head 1, ...). Our GPT has
# them so, as Megatron-LM does. Where all q's come first, the first rank would get nothing but queries.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "Move", "all_reduced", "f", "g", "column_linear", "row_linear", "share", "Column", "Row")


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
# The model's own lines run unchanged: `unflatten(-1, (-1, 3, head_size))` finds out how many heads are here. Code that
# writes down `num_heads` instead is wrong for every t but one.
#
# **Predict.** How many all-reduces does a layer make in a step, and of how many numbers each?
#
# <details><summary>Answer</summary>
#
# Four: attention and MLP, forward and backward. Each of B·T·D numbers: the size of the stream between the layers. It
# grows with the batch, not with the weights.
#
# </details>

# %%
# %%ranks
model = split_blocks(new_model(), group, f, g)
with wire.watch() as seen:
    model(*batch())[1].backward()
numbers = [call.bytes // 4 for call in seen.calls]
if rank == 0:
    say(f"{len(numbers)} all-reduces, predicted {4 * layers}; each of {numbers[0]:,}, B·T·D = {B * T * D:,}")
assert numbers == [B * T * D] * 4 * layers

# %% [markdown]
# ## Sequence parallelism: split what is left (CORE, 11 min)
#
# **Why.** Between attention and MLP the stream x_BTD, the norms and the additions are still whole on every rank: the
# same work t times, and the same activations kept t times. A norm looks at one position only. So between the split
# layers let each rank have **T/t positions**. Korthikanti et al. (2022) call this [**sequence
# parallelism**](../assets/glossary.md#sequence-parallel).
#
# ![A layer on two ranks: under tensor parallelism the norms see all positions on both ranks; with sequence parallelism each rank
# has half of the positions there, an all-gather leads into attention and MLP, a reduce-scatter out of them](../assets/07_sequence.svg)
#
# The all-reduce after a row-parallel layer is cut into its two halves. A reduce-scatter sums, and leaves each rank its
# own positions. After the norm, an all-gather makes them whole for the next columns.
#
# The raw movements, along dim 1, the positions:

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "Move", "all_reduced", "f", "g", "column_linear", "row_linear", "share", "Column", "Row")
catch_up(globals(), "split_blocks")


# %%
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


# %% [markdown]
# Two pairs at the ends of the model come first, where **all ranks compute the same**. After the embedding each rank
# takes its positions. Before the head they are joined, and each rank computes all logits:


# %%
# %%ranks
def split(x_BTD, group):
    """Where the stream, the same on all ranks, is cut. Its whole gradient is what the ranks have, joined."""
    return Move.apply(x_BTD, lambda x: own_part(x, group), lambda gradient: all_gathered(gradient, group))


def joined(x_BsD, group):
    """Where all ranks go on with the same: each has the whole gradient, and takes its part."""
    return Move.apply(x_BsD, lambda x: all_gathered(x, group), lambda gradient: own_part(gradient, group))


# %% [markdown]
# ### Build C: into the columns, and out of the rows
#
# `gathered` takes the place of f: all positions enter what **each rank computes differently**. `scattered` takes the
# place of g: partial sums leave, and each rank keeps its positions of the sum. Write both. Ask of each gradient: is
# it the same on all ranks, or a partial sum? The check counts one collective in each direction, and its bytes.


# %%
# %%ranks
def gathered(x_BsD, group):
    """From own positions to all of them, which each rank then uses differently."""
    raise NotImplementedError  # your turn


def scattered(x_BTD, group):
    """From partial sums over all positions to the sum at this rank's positions."""
    raise NotImplementedError  # your turn


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
# (In the paper this pair is g and ḡ, and the pair of Build A is f and f̄. Its g is not the g of 2019, hence our words.)
# The whole model, by two hooks and the modules from above:


# %%
# %%ranks
def split_stream(model, group):
    """Tensor and sequence parallel, in place. Returns the model."""
    model.blocks[0].register_forward_pre_hook(lambda _, args: (split(args[0], group),))
    model.norm.register_forward_hook(lambda _, args, y_BsD: joined(y_BsD, group))
    return split_blocks(model, group, gathered, scattered)


model = split_stream(new_model(), group)
with wire.watch() as seen:
    model(*batch())[1].backward()
found = {op: seen.count(op) for op in ("all_gather", "reduce_scatter", "all_reduce")}
if rank == 0:
    volume = sum(call.bytes for call in seen.calls) / (4 * B * T * D)
    say(", ".join(f"{count} of {op}" for op, count in found.items()))
    say(f"volume {volume:g} B·T·D; before, {4 * layers} all-reduces of two halves each, {8 * layers}")
assert [seen.count(op) for op in found] == [4 * layers + 2, 4 * layers, 0]

# %% [markdown]
# Four of each per layer: the volume of before. The two ends of the model add one all-gather each. But backward is not
# finished.
#
# **Predict.** A norm's weight is whole on every rank, and each rank's norm has seen T/t positions. What is its gradient
# on each rank? Which other parameters are in the same situation?
#
# <details><summary>Answer</summary>
#
# A partial sum: what comes from these positions. Add them up, or the ranks update the same weight
# differently. The same holds for the *biases of the row-parallel layers*, which are added after the reduce-scatter.
#
# </details>
#
# ### Build D: who reduces the norms' gradients?
#
# Nobody, unless you do. Write `add_up(parameters, group)`: afterwards each `p.grad` is the sum over the group. There are
# many small gradients, so use *one* all-reduce for all of them. The check counts.


# %%
# %%ranks
def add_up(parameters, group):
    """Sum these parameters' gradients over the group, in one call. All its ranks call it, after backward."""
    raise NotImplementedError  # your turn


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

# %% [markdown]
# Which parameters need it, in our model:


# %%
# %%ranks
def of_own_positions(model):
    """The parameters that are whole on each rank and have worked on its positions only."""
    ends = "norm.weight", "norm.bias", "out.bias", "down.bias"
    return [p for name, p in model.named_parameters() if ".norm_" in name or name.endswith(ends)]


add_up(of_own_positions(model), group)
if rank == 0:
    say(f"{len(of_own_positions(model))} of {len(list(model.parameters()))} gradients added up in one call")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: sequence parallelism</summary>
#
# Put a table on the board: forward and backward of f, g, gathered, scattered, split, joined. Let the room fill in the
# backward column by the one question. *Usual mistake:* "the backward of an all-gather is: take your part". True for
# `joined`, wrong for `gathered`: the other ranks' partial sums are lost. *Ask:* "why does the embedding need no sum?"
# (`split` gives it the whole gradient.)
#
# </details>

# %% [markdown]
# ## The library, and three ways to the same gradients (CORE, 4 min)
#
# In PyTorch a *plan* names layers and says how each is split. Parameters become DTensors; a DTensor's **placement** is
# `Shard(dim)`, `Replicate()` (the same on all ranks) or `Partial()` (partial sums): the question of this lesson, as a
# type. Conversions between placements insert the collectives, and their backward.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "Move", "all_reduced", "f", "g", "column_linear", "row_linear", "share", "Column", "Row")
catch_up(globals(), "split_blocks", "all_gathered", "reduce_scattered", "own_part", "split", "joined")
catch_up(globals(), "gathered", "scattered", "split_stream", "add_up", "of_own_positions")


# %%
# %%ranks
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def by_library(model, tensor_mesh):
    """The blocks split by torch, in place. Returns the model."""
    plan = {}
    for first, last in (("attention.qkv", "attention.out"), ("mlp.up", "mlp.down")):
        plan[f"blocks.*.{first}"], plan[f"blocks.*.{last}"] = ColwiseParallel(), RowwiseParallel()
    return parallelize_module(model, tensor_mesh, plan, src_data_rank=None)


library = by_library(new_model(torch.float64), mesh["tensor"])
x_BTD = torch.ones(B, T, D, dtype=torch.float64, device=device, requires_grad=True)
with CommDebugMode() as counted:
    y_BTD = library.blocks[0].mlp(x_BTD)
    forward_calls = counted.get_total_counts()
    y_BTD.sum().backward()
if rank == 0:
    weight = library.blocks[0].mlp.down.weight
    held = list(weight.to_local().shape)
    say(f"mlp.down.weight: {list(weight.shape)}, {weight.placements[0]}, I hold {held}")
    say(f"collectives of an MLP: {forward_calls} forward, {counted.get_total_counts()} with backward")

# %% [markdown]
# One all-reduce each way, as yours. `CommDebugMode` of torch 2.13 fails on a module that is called twice in a forward, as
# our dropout is. So it sees an MLP, and `wire` the whole model:

# %%
# %%ranks
library.zero_grad()
with wire.watch() as seen:
    loss = library(*batch())[1]
    loss.backward()
if rank == 0:
    say(f"collectives of {layers} layers: {len(seen.calls)}")
metrics.exact(library_calls=len(seen.calls))

# %% [markdown]
# (`src_data_rank=None`: every rank has the full weights already, so none needs to send them.)
#
# Now the proof, in float64: one process, ours and the library's, without and with sequence parallelism. For
# the latter take what `train.py` uses, `manyhands.parallel.tensor_parallel`, which also splits embedding and head. Compare
# the loss and **every gradient**.


# %%
# %%ranks
from manyhands.parallel.tensor_parallel import apply_tensor_parallel, finish_gradients


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


single = new_model(torch.float64)
loss_1 = single(*batch())[1]
loss_1.backward()

# %% tags=["nbval-check-output"]
# %%ranks
found = {"parallelize_module": (library, loss)}
ours = split_blocks(new_model(torch.float64), group, f, g)
ours_sp, trainers = split_stream(new_model(torch.float64), group), new_model(torch.float64)
apply_tensor_parallel(trainers, mesh["tensor"], sequence_parallel=True)
for name, model in {"ours": ours, "ours, sequence parallel": ours_sp, "the trainer's": trainers}.items():
    found[name] = model, model(*batch())[1]
    found[name][1].backward()
add_up(of_own_positions(ours_sp), group)
finish_gradients(trainers.parameters())
for name, (model, loss) in found.items():
    apart = max((loss - loss_1).abs().item(), furthest(model, single, group))
    assert apart < 1e-10, f"{name} is {apart:.1e} away"
    if rank == 0:
        say(f"{name} and one process: loss and all gradients equal to 1e-10")
metrics.close(float64_loss=loss_1.detach())

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: three ways</summary>
#
# Let somebody break one line (drop `add_up`, or add the bias before `leave`) and run the cell again: the assertion
# names the model and the distance. *Usual question:* "is it bit-equal?" No: the order of additions differs, and so does
# the last digit. In fp32 that is 1e-7 of a gradient, and it grows over steps.
#
# </details>

# %% [markdown]
# ## Experiment: what it saves, and where it hurts (CORE, 5 min)
#
# **What a rank keeps for backward.** In numbers per token and layer (lesson 01 counts them: 16 D + H + 4 in all): norms
# 2 D + 4, inputs of the two column layers 2 D, and what lies inside the split layers, 12 D + H.
#
# **Predict.** With D = 128 and H = 4 that is 2,056 numbers. How many does each of four ranks keep under tensor
# parallelism? With sequence parallelism?
#
# <details><summary>Answer</summary>
#
# Tensor parallelism divides what lies inside: 260 + 256 + 1,540/4 = 901. The 516 stay, however many ranks you take. Sequence
# parallelism divides the norms' part too: 256 + (260 + 1,540)/4 = 706. What stays are our gathered inputs. Korthikanti et
# al. keep only a share of these as well, and gather them again in backward.
#
# </details>
#
# **Where it hurts.** Four all-reduces per layer, in each micro-batch, and the next product waits for each. On the
# virtual network a layer of a 7 B model (D = 4,096) computes 2,048 tokens in bf16 at 400 TFLOP/s. Ranks of a node
# are linked by 150 GB/s, nodes by 50 GB/s.
#
# In the figure expect bars of saved bytes on dashed lines of the formula. On the right, the hatched part should grow
# as soon as the group leaves the node.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "Move", "all_reduced", "f", "g", "column_linear", "row_linear", "share", "Column", "Row")
catch_up(globals(), "split_blocks", "all_gathered", "reduce_scattered", "own_part", "split", "joined")
catch_up(globals(), "gathered", "scattered", "split_stream")

# %%
# %%ranks
from manyhands.measure.tensor_bytes import count_saved
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

# %% [markdown]
# And a layer on three machines that differ in nothing but how many of the group's ranks share a node:

# %%
# %%ranks
from manyhands.measure.virtual_network import Link, VirtualNetwork

INSIDE, BETWEEN = Link(2e-6, 150e9), Link(5e-6, 50e9)
stream = torch.zeros(2048 * 4096, dtype=torch.bfloat16)  # B·T·D numbers, on the CPU
layer_s = 72 * 2048 * 4096**2 / 400e12  # 24 D² FLOPs per token forward, twice that backward


def layer_on(per_node):
    """Virtual seconds of a layer with `per_node` ranks of the group on each node: (total, communication)."""
    net = VirtualNetwork(ranks, INSIDE, BETWEEN, ranks_per_node=per_node, group=group)
    for part in (1 / 9, 2 / 9, 4 / 9, 2 / 9):  # attention and MLP forward, MLP and attention backward
        net.compute(part * layer_s / t)
        net.all_reduce(stream)
    return net.clock_s, net.clock_s - layer_s / t


# %% [markdown]
# By formula, and for each number of ranks on a node:


# %%
# %%ranks --timeout 120
def by_formula(per_node):
    """The ring's 2 (t-1) messages of a t-th each, four times; its slowest link sets the pace."""
    link = INSIDE if per_node == t else BETWEEN
    return layer_s / t + 4 * 2 * (t - 1) * link.cost_s(stream.nbytes / t)


times = {}
for per_node in (4, 2, 1):
    if t % per_node == 0:
        nodes = t // per_node
        name = f"{nodes} node{'' if nodes == 1 else 's'} of {per_node}"
        times[name] = (*layer_on(per_node), by_formula(per_node))
metrics.exact(virtual_layer_s={name: row[0] for name, row in times.items()})

# %%
# %%ranks
from manyhands.plots.bars import kept_and_timed

if rank == 0:
    figure = kept_and_timed(kept, times, layer_s, f"one of {t} ranks, {layers} layers")
    show(figure, "kept_and_timed", "bars of bytes kept for backward, and of a layer's virtual time")
    for name, (measured, *formula) in kept.items():
        say(f"{name:14} keeps {measured / 1e6:6.2f} MB, measured / formula {measured / sum(formula):.4f}")
    for name, (total, communication, _) in times.items():
        faster, share_of_it = layer_s / total, communication / total
        say(f"{name}: {faster:.1f} times as fast as one rank; {share_of_it:.0%} is communication")
apart = max(abs(measured / sum(formula) - 1) for measured, *formula in kept.values())
assert apart < 0.02 or device.type == "xpu"  # an attention that is not fused keeps its scores, too
assert all(abs(total / formula - 1) < 0.02 for total, _, formula in times.values())

# %% [markdown]
# **So tensor parallelism stays within a node.** One hop over the slow network, and the ring runs at its pace. Data
# parallelism and FSDP cross nodes better: they send weights or gradients, once or a few times per step, and can hide
# that behind computation. Here the next product waits.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the experiment</summary>
#
# Two nodes of two cost as much as four of one: let the room say why (a ring is as fast as its slowest link). *Ask:*
# "what would you change to make the hatched part smaller, without another network?" (Fewer tensor ranks; larger D: compute
# grows with D², the messages with D.) *When late:* show the stored figure.
#
# </details>

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
# **Embedding**: a rank looks up the tokens whose rows it has, and zeros for the others. That is a partial sum: g.
# **Head**: by columns; the logits stay cut.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "Move", "all_reduced", "f", "g", "column_linear", "row_linear", "share", "Column", "Row")
catch_up(globals(), "split_blocks", "furthest")


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
# The whole model with its vocabulary split, ours and the library's `loss_parallel` (in `sharded_loss`), against one
# process:

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
# Each check runs your answer in a process group of its own: you cannot break anything. Exercise 1 stands above.
#
# ### Exercise 2: a test that a wrong backward does not pass
#
# "The output is right" says nothing about backward, and `y.sum().backward()` sends ones, which hide much. Test the
# [**vector-Jacobian product**](../assets/glossary.md#vector-jacobian-product): draw a random v of y's shape, and compare
# the gradients of x under `y.backward(v)`. Write `agree(parallel, single, x, group)`: both are functions of x, in float64,
# with equal results and gradients or not. Return True on every rank if output and gradient agree to 1e-10 on *all* ranks, else
# False on every rank. v must be the same on all ranks, since they share one loss. Leave x and its gradient as you found them.


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
# num_kv_heads, t, rank)`: the lists of query heads and of KV heads that this rank holds. Query heads are dealt out in order. A rank
# holds exactly the KV heads that its queries use. Where t is a multiple of `num_kv_heads`, that means copies on
# several ranks. (Their gradients are then partial sums: you know what to do.) Refuse with a ValueError that names the
# two numbers if t does not divide `num_heads`, or if neither of t and `num_kv_heads` divides the other.


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
# ## A bug from the zoo (CORE, 3 min)
#
# A trainer with tensor and sequence parallelism. Its author knew that the norms' gradients need a sum, and wrote one. These
# lines run, and the loss falls. **Which parameters are wrong, and which measurement shows it?** Write down your suspicion
# before you open the answer.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "Move", "all_reduced", "f", "g", "column_linear", "row_linear", "share", "Column", "Row")
catch_up(globals(), "split_blocks", "all_gathered", "reduce_scattered", "own_part", "split", "joined")
catch_up(globals(), "gathered", "scattered", "split_stream", "add_up", "of_own_positions")


# %%
# %%ranks
def norms_of(model):
    return [p for block in model.blocks for norm in (block.norm_1, block.norm_2) for p in norm.parameters()]


def train(model, which):
    """`steps` steps of Adam; the losses. `which(model)` are the parameters whose gradients are added up."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(*batch(step))[1]
        loss.backward()
        add_up(which(model), group)
        optimizer.step()
        losses.append(f"{loss.item():.3f}")
    return losses


wrong = split_stream(new_model(), group)
losses = train(wrong, norms_of)
if rank == 0:
    say(f"losses: {' '.join(losses)}")

# %% [markdown]
# Now measure. What is whole on every rank must be *the same* on every rank. How far apart is it?


# %%
# %%ranks
def drifted(model, group):
    """{parameter: largest distance between ranks} of those that are whole on each rank and not the same."""
    whole_shapes, found = [p.shape for p in new_model().parameters()], {}
    for (name, p), shape in zip(model.named_parameters(), whole_shapes, strict=True):
        if p.shape == shape:
            most, least = p.detach().clone(), p.detach().clone()
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
            dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
            found[name] = (most - least).max().item()
    return {name: apart for name, apart in found.items() if apart > 0}


# %%
# %%ranks
mended = split_stream(new_model(), group)
train(mended, of_own_positions)
for title, model in (("theirs", wrong), ("mended", mended)):
    names = drifted(model, group) if t > 1 else {}
    if rank == 0:
        say(f"{title}: {len(names)} parameters have drifted apart, by up to {max(names.values(), default=0):.4f}")
        for name, apart in list(names.items())[:6]:
            say(f"    {name:28} {apart:.4f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The blocks' norms are added up, but not the *last* norm, and not the biases of the row-parallel layers, which work on
# own positions as well. Each rank updates these with its own partial sum, so after one step the ranks hold different
# models. Nothing crashes, and the loss falls, since each of them is nearly right. `of_own_positions` is the mend.
#
# The last norm, with ranks' gradients printed side by side:
# [Megatron-LM#1446](https://github.com/NVIDIA/Megatron-LM/issues/1446). Norms in general:
# [Megatron-LM#443](https://github.com/NVIDIA/Megatron-LM/issues/443). A library that leaves this sum to its caller:
# [TransformerEngine#435](https://github.com/NVIDIA/TransformerEngine/issues/435).
#
# </details>
#
# The rule to take home: **what is whole on all ranks must stay equal on all ranks.** Compare it after a few steps. That
# test costs two lines, and no loss curve replaces it.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# A list of names is how such bugs begin. Let the room propose something better: DTensor's `Partial` placement says it by
# type (`finish_gradients` in the package looks at nothing else). *When late:* run only the cell that measures.
#
# </details>

# %% [markdown]
# ## On the cluster
#
# The trainer knows all of this lesson as flags. Ask first what would run, then try it here, then submit the job of
# [lesson 04](04_first_job.ipynb) with the same flags:
#
# ```bash
# python scripts/train.py --preset olmo-7b --ranks 64 --dry-run --parallel.tensor 4 --parallel.sequence-parallel
# python scripts/launch.py --nproc 4 -- --preset nano --parallel.tensor 2
# python scripts/launch.py --nproc 4 -- --preset nano --parallel.strategy fsdp --parallel.tensor 2
# ```
#
# **What changes on GPUs.** The group must be ranks of one node, so t is at most the number of its GPUs, and a launcher that
# numbers ranks round-robin over nodes breaks that silently. NCCL has a reduce-scatter of its own. Small matrices run at a
# lower rate, so t times as many GPUs are less than t times as fast even without messages.
#
# **What to look for**: the same losses as without tensor parallelism; `--parallel.sequence-parallel` wherever there is t > 1;
# tokens per second *per GPU* as you raise t: stop when it drops, and use more data parallelism instead.

# %% [markdown]
# ## Recap
#
# 1. By columns you get a part of the result, by rows a partial sum of it. Columns, then rows, need one all-reduce.
# 2. Ask of each tensor: the same on all ranks, or partial sums? Its gradient is the other, where ranks use it differently.
# 3. A layer makes two all-reduces forward and two backward, each of B·T·D numbers; nothing hides them, so stay within a node.
# 4. Sequence parallelism cuts each all-reduce into its halves and keeps 1/t of the norms' activations, for the same bytes.
# 5. What is whole on all ranks must stay equal: sum the gradients of norms and row biases under sequence parallelism.
#
# ## Further reading
#
# - Shoeybi et al. 2019, [Megatron-LM](https://arxiv.org/abs/1909.08053): section 3, columns then rows, f and g.
# - Korthikanti et al. 2022, [Reducing activation recomputation in large transformer models](https://arxiv.org/abs/2205.05198): section
#   4, sequence parallelism and what each layer keeps.
# - PyTorch, [Tensor parallelism](https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html): `parallelize_module`, its styles,
#   `loss_parallel`.

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
