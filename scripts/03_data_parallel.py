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
# # 03 Data parallel: DDP, built twice, on ShakespeareGPT
#
# **55 minutes** for the sections marked CORE, 100 with those marked MORE.
#
# After this lesson **you can**
# - explain why the copies of a model stay identical on many ranks, and what breaks that;
# - build what `DistributedDataParallel` does: broadcast, hooks, buckets, overlap;
# - train a GPT with the library's DDP, and prove that it computes what one process computes;
# - predict the bytes of a training step, and find by measuring where its time goes;
# - say when more ranks stop helping.
#
# **You need** [rank](../assets/glossary.md#rank) and launcher ([lesson 00](00_start.ipynb)) and the
# [all-reduce](../assets/glossary.md#all-reduce) ([lesson 02](02_collectives.ipynb)). In two lines: a *rank* is one of n
# processes that run this same file; after an *all-reduce* every rank holds the sum of what all ranks held.
#
# **New here:** [data parallel](../assets/glossary.md#data-parallel), [bucket](../assets/glossary.md#bucket),
# [hook](../assets/glossary.md#hook), [overlap](../assets/glossary.md#overlap),
# [no_sync](../assets/glossary.md#no_sync), [weak scaling](../assets/glossary.md#weak-scaling).
#
# The same file is a script:
#
# ```bash
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/03_data_parallel.py --steps 300
# mpiexec -n 4 python scripts/03_data_parallel.py
# python scripts/03_data_parallel.py               # a world of one: the same path, the same losses
# ```

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 1, warm-up 5, same start 4, naive 5, hooks with exercise 1 8, buckets 8, the library 6, training 6,
# where the time goes 3, experiment 5, zoo 4.
#
# *Say:* one sentence carries the lesson: "same start, same averaged gradient, same update, so the copies never part".
# Come back to it at every section; each one only makes the averaging cheaper.
#
# *Three usual mistakes:* thinking that DDP averages weights; thinking that rank 0 is a server that the others report to;
# reading the loss of rank 0 as the loss of the batch.
#
# *When late:* skip the timing of the hooks, show the recorded output of the training run, keep the zoo.
#
# *Ask the room:* "Rank 2 drew other first weights than the rest. After a thousand steps of perfect averaging, what is
# different on rank 2?" Let them vote before the section on the same start.
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
steps = 300  # training steps, at least 1
global_batch = 0  # sequences per step, all ranks together; 0: 12, or more where it does not split, at least 0
bucket_mib = 1.0  # size of a gradient bucket in MiB, > 0
ddp = "library"  # which DDP trains the GPT, one of library, ours
repeats = 5  # samples of each timing, at least 1

# %% [markdown]
# ## Start (CORE, 1 min)
#
# The first cell starts four ranks behind this notebook. From then on a cell that begins with `%%ranks` runs on all of
# them; in the script that line is a comment, because there a launcher has started the ranks already.
#
# **Catching up.** Each section needs only the cells of this one, and then its own. Where it uses a function of an earlier
# section, a cell with `catch_up(...)` defines it, unless you have it already.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("03_data_parallel", globals())

# %%
# %%ranks
import contextlib
import copy
import functools
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands import Metrics, catch_up, fingerprint, join, leave, refuse, say, show
from manyhands.checks import data_parallel as checks
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.figures.gantt import gantt
from manyhands.gpt.model import GPT, GPTConfig
from manyhands.measure import wire
from manyhands.measure.timeline import Timeline, gather
from manyhands.measure.timing import median_s, synchronise, tok_per_s
from manyhands.measure.virtual_network import Link, VirtualNetwork
from matplotlib.figure import Figure
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
if global_batch == 0:
    global_batch = -(-12 // world_size) * world_size
if global_batch % world_size:
    refuse(
        f"global_batch={global_batch} does not split over {world_size} ranks; use a multiple of {world_size}"
    )

# %% [markdown]
# The lesson's model is **ShakespeareGPT**: it reads 64 characters of Shakespeare and guesses the next. Four layers, four
# heads, width 128. Small enough for a laptop, and a real GPT in every part.
#
# One [**global batch**](../assets/glossary.md#global-batch) is what all ranks together learn from in one step. `batch(step)`
# gives each rank its share of it, and the global batch itself is the same for any number of ranks: that is what will let us
# compare.
#
# Letters at the end of a name are its shape: `B` sequences in the global batch, `b` this rank's share, `T` positions,
# `P` parameters in one long row. A small letter is always this rank's part of the capital one.

# %%
# %%ranks
corpus = load_corpus(ranks)
config = GPTConfig(vocab_size=len(corpus.symbols))
gradient_bytes = 4 * config.num_params()  # one float32 for each parameter
given = {"steps": steps, "global_batch": global_batch, "bucket_mib": bucket_mib, "ddp": ddp}
metrics = Metrics(ranks, corpus, given)


def new_model(dtype=torch.float32):
    """ShakespeareGPT with its first weights, the same on every rank, because the seed is."""
    torch.manual_seed(1337)
    return GPT(config).to(device, dtype)


def batch(step, ids=corpus.train_ids):
    """This rank's share of global batch number `step`: inputs and targets, both [b, T]."""
    share = get_batch(ids, step, global_batch, config.block_size, rank, world_size, seed=1)
    return [ids_bT.to(device) for ids_bT in share]


x_bT, y_bT = batch(0)
say(f"my share of {global_batch} sequences: {list(x_bT.shape)}, beginning {corpus.decode(x_bT[0, :24])!r}")

# %% [markdown]
# Every rank reads *other* text. Two instruments before we begin. `flat` lays tensors end to end in one row, and `spread`
# measures what this lesson is about: how far the ranks have drifted apart. **0.0 means that all copies are identical, to
# the last bit.**


# %%
# %%ranks
def flat(tensors):
    """All these numbers in one row."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def spread(tensors):
    """The largest difference between any two ranks in any of these numbers. All ranks call it."""
    highest_P = flat(tensors).double()
    lowest_P = highest_P.clone()
    dist.all_reduce(highest_P, op=dist.ReduceOp.MAX)
    dist.all_reduce(lowest_P, op=dist.ReduceOp.MIN)
    return (highest_P - lowest_P).max().item()


# %% [markdown]
# ## Warm-up: 38 parameters by hand (CORE, 5 min)
#
# **Why.** You have more text than one process can read in time. So start several, give each a *copy of the model* and its
# own *share of the text*, and let them learn together. What must they tell each other, so that in the end there is one
# model and not several?
#
# ![Two ranks with the same 38 weights and different rows: each computes its own gradient, an all-reduce averages the two,
# and both make the same update](../assets/03_two_copies.svg)
#
# Take a network small enough to write down: 6 inputs, 4 hidden, 2 outputs. It has 6·4 + 4 + 4·2 + 2 = 38 parameters. Its
# 24 rows of data go to the ranks in equal shares.


# %%
# %%ranks
def toy(seed, *middle):
    """A network 6-4-2 with `middle` between its two layers, and 24 rows of data: inputs, targets."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(6, 4), *middle, nn.Linear(4, 2)).double().to(device)
    torch.manual_seed(24)
    return network, torch.randn(24, 6).double().to(device), torch.randn(24, 2).double().to(device)


mlp, x_B6, y_B2 = toy(0, nn.Tanh())  # one seed: every rank draws the same copy and the same rows
x_b6, y_b2 = x_B6.tensor_split(world_size)[rank], y_B2.tensor_split(world_size)[rank]  # and keeps its share

F.mse_loss(mlp(x_b6), y_b2).backward()
mine_P = flat(p.grad for p in mlp.parameters())
say(f"{len(mine_P)} gradients from {len(x_b6)} rows, the last of them {mine_P[-1]:+.4f}")

# %% [markdown]
# The copies are the same, the gradients are not: each rank has seen other rows.
#
# **Predict.** Two ranks hold g₀ and g₁. What must each hold before it may change its weights, and which
# [collective](../assets/glossary.md#collective) of lesson 02 brings that about?
#
# <details><summary>Answer</summary>
#
# The mean, (g₀ + g₁) / 2: the loss of a batch is a mean over its rows, so the gradient of the whole batch is the mean of
# the two halves' gradients (as long as the halves are equal; lesson 05 mends the other case). Every rank needs it, so it
# is an **all-reduce** and a division. A *reduce* would give it to one rank only, and that rank would then have to send
# weights to all others: twice the steps, and all of them through one wire.
#
# </details>

# %%
# %%ranks
mean_P = mine_P.clone()
dist.all_reduce(mean_P)  # all ranks: now the sum over the ranks ...
mean_P /= world_size  # ... and now the mean: (g0 + g1) / 2 on two ranks

one_process = copy.deepcopy(mlp)  # the same step in one process that sees all 24 rows
one_process.zero_grad()
F.mse_loss(one_process(x_B6), y_B2).backward()
whole_P = flat(p.grad for p in one_process.parameters())
say(f"the last gradient, averaged: {mean_P[-1]:+.4f}, in one process: {whole_P[-1]:+.4f}")

# %% [markdown]
# Now every rank holds the gradient of all 24 rows, although it has seen a part of them. The update is each rank's own
# business: nobody sends a weight.

# %% tags=["nbval-check-output"]
# %%ranks
with torch.no_grad():
    for p, g_P in zip(mlp.parameters(), mean_P.split([p.numel() for p in mlp.parameters()]), strict=True):
        p -= 0.1 * g_P.view_as(p)

apart = spread(mlp.parameters())  # all ranks measure, rank 0 speaks
if rank == 0:
    say(f"same gradient as one process, to 1e-12: {torch.allclose(mean_P, whole_P, rtol=0, atol=1e-12)}")
    say(f"the {world_size} copies after the update are {apart} apart")

# %% [markdown]
# 0.0, not "nearly": every rank subtracted the same bits from the same bits. That is all of data parallel training. The rest
# of this lesson makes one line of it, the all-reduce, cheap.

# %% [markdown]
# ## The same start (CORE, 4 min)
#
# **Why.** "The same bits from the same bits" has two halves. The averaged gradient takes care of the first. Who takes care
# of the second, the same weights to begin with?
#
# ![Two paths in the plane of two weights: from different starts the same steps lead to different ends, the gap stays; from
# the same start the paths are one](../assets/03_same_start.svg)
#
# **Predict.** Each rank draws its first weights from a seed of its own. Then 20 steps, with perfectly averaged gradients. Do
# the copies come together, stay as far apart as they were, or run away from each other?
#
# <details><summary>Answer</summary>
#
# They stay exactly as far apart. Every copy is moved by the same amount, so the difference between two copies never
# changes. Averaging gradients keeps copies equal; it never *makes* them equal.
#
# </details>


# %%
# %%ranks
catch_up(globals(), "toy")


# %%
# %%ranks
def averaged_sgd(model, num_steps):
    """Plain SGD on this rank's rows with averaged gradients. All ranks call it."""
    for _ in range(num_steps):
        F.mse_loss(model(x_b6), y_b2).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.data -= 0.1 * p.grad / world_size
            p.grad = None


mlp, x_B6, y_B2 = toy(rank, nn.BatchNorm1d(4))  # the mistake: a seed, and so first weights, for each rank
x_b6, y_b2 = x_B6.tensor_split(world_size)[rank], y_B2.tensor_split(world_size)[rank]
before = spread(mlp.parameters())
averaged_sgd(mlp, 20)
after = spread(mlp.parameters())
if rank == 0:
    say(f"apart before: {before:.6f}, after 20 averaged steps: {after:.6f}")

# %% [markdown]
# So somebody's weights must become everybody's, once, before the first step. Not only the weights: whatever the step reads and
# the gradient does not carry. [*Buffers*](../assets/glossary.md#buffer) are numbers that a layer keeps without learning them
# (BatchNorm's running mean). The *optimizer's state* matters when a run is resumed: Adam divides by what it remembers of
# earlier gradients.


# %%
# %%ranks
def broadcast_state(model, optimizer=None):
    """Every rank takes rank 0's parameters, buffers and optimizer state. All ranks call it."""
    tensors = [*model.parameters(), *model.buffers()]
    if optimizer is not None:  # every rank must hold the same tensors here, if not the same numbers
        tensors += [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0)


optimizer = torch.optim.Adam(mlp.parameters())
F.mse_loss(mlp(x_b6), y_b2).backward()
optimizer.step()  # with a gradient that nobody averaged: the memories differ, as after a bad resume
optimizer.zero_grad()

# %% tags=["nbval-check-output"]
# %%ranks
moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
before = spread(mlp.parameters()), spread(moments)
broadcast_state(mlp, optimizer)
averaged_sgd(mlp, 20)
after = spread(mlp.parameters()), spread(moments)
if rank == 0:
    say(f"apart before: parameters {before[0]:.3f}, Adam's moments {before[1]:.3f}")
    say(f"apart after the broadcast and 20 steps: parameters {after[0]}, Adam's moments {after[1]}")

# %% [markdown]
# (The running means are not in that line. Each rank's BatchNorm goes on averaging its own rows, so its buffers part again at
# the next forward pass; that is why the library's DDP broadcasts buffers before *every* forward pass, and parameters only
# once. ShakespeareGPT has no buffers.)

# %% [markdown]
# ## Naive: average after backward (CORE, 5 min)
#
# **Why.** Now the GPT. The simplest thing that is right: run backward, then go through the parameters and average each
# gradient.


# %%
# %%ranks
def average_gradients(model):
    """Turn each gradient into its mean over the ranks. All ranks call it, after backward."""
    for p in model.parameters():
        p.grad /= world_size  # divide first: in 16 bits a sum over many ranks could overflow
        dist.all_reduce(p.grad)


model = new_model()
_, loss = model(*batch(0))
loss.backward()
length = flat(p.grad for p in model.parameters()).norm()
say(f"my loss is {loss.item():.4f}, my gradient has length {length:.4f}")

# %% [markdown]
# **Predict.** One layer of this GPT has two LayerNorms and four linear maps, one of them without bias: 11 tensors. Around
# its four layers there are two embeddings, a last LayerNorm and the head. How many all-reduces is that per step, and how many
# megabytes does a rank hand over, at 4 bytes for each of the 816,705 parameters?
#
# <details><summary>Answer</summary>
#
# 4·11 + 2 + 2 + 2 = 50 all-reduces of 3.27 MB together. (On the ring of lesson 02 each rank then *sends* 2(n-1)/n of that.
# With another corpus than Shakespeare the alphabet, and so the embedding and the head, have another size.)
#
# </details>

# %%
# %%ranks
with wire.watch() as seen:
    average_gradients(model)
apart = spread(p.grad for p in model.parameters())
if rank == 0:
    handed_over = seen.payload_bytes()
    say(f"{seen.count('all_reduce')} all-reduces of {handed_over / 1e6:.2f} MB together")
    say(f"predicted {gradient_bytes / 1e6:.2f} MB, ratio {handed_over / gradient_bytes:.3f}")
    say(f"the gradients are {apart} apart")

# %% [markdown]
# Right, and wasteful. How wasteful? Time a step without any averaging, then with it. The time that the averaging adds is time
# in which nobody computes.


# %%
# %%ranks
def time_step(model, finish=lambda: None):
    """Median seconds of forward, backward and `finish()` on the slowest rank. All ranks call it."""
    x_bT, y_bT = batch(0)

    def step():
        model(x_bT, y_bT)[1].backward()
        finish()
        for p in model.parameters():
            p.grad = None

    return median_s(step, repeats, ranks).slowest_s


alone_s = time_step(model)
naive_s = time_step(model, functools.partial(average_gradients, model))
if rank == 0:
    say(f"a step without averaging: {1e3 * alone_s:.0f} ms, with naive averaging: {1e3 * naive_s:.0f} ms")

# %% [markdown]
# With several ranks on the cores of a laptop the averaging may well cost more than the learning. It is not the bytes: at the 1
# GB/s that lesson 02 fits here, the 5 MB that each rank sends take 5 ms. It is the *fifty* calls. Each one wakes every process,
# waits for the last of them, and only then does a little work. Two cures follow: **call while there is still something else to
# do**, and **call less often**.

# %% [markdown]
# ## Hooks: begin while backward still runs (CORE, 8 min)
#
# **Why.** Backward walks through the model from the loss to the input. When it has passed a layer, that layer's gradient is
# final, and could travel while the layers below are still being computed.
#
# ![Forward runs from the embedding to the head, backward from the head to the embedding; each layer's gradient is ready when
# backward has passed it, and its hook fires](../assets/03_hooks.svg)
#
# PyTorch tells you the moment: `p.register_post_accumulate_grad_hook(f)` calls `f(p)` as soon as `p.grad` is complete.
#
# **Predict.** Whose gradient is ready first, whose last? When, as a share of backward's time, is the first one ready?
#
# <details><summary>Answer</summary>
#
# The head's bias is first, after a few percent of the time. The two embeddings are last, at 100 %. A gradient that waits for
# the end of backward, as in the naive version, wastes nearly all of that time.
#
# </details>

# %%
# %%ranks
model, ready = new_model(), []
for name, p in model.named_parameters():
    p.register_post_accumulate_grad_hook(lambda p, name=name: ready.append((name, time.perf_counter())))
_, loss = model(*batch(0))
begin = time.perf_counter()
loss.backward()
whole_s = time.perf_counter() - begin
if rank == 0:
    for name, moment in [*ready[:3], *ready[-2:]]:
        say(f"{name:28} ready at {100 * (moment - begin) / whole_s:3.0f} % of backward")

# %% [markdown]
# ### Exercise 1: a gradient hook
#
# Write `average_by_hooks(model)`: give every parameter a hook, so that after `loss.backward()`, with nothing called
# afterwards, each `p.grad` is the mean over the ranks. `world_size` and `dist.all_reduce` are all you need. The check looks
# at the gradients, at the weights, and at what you sent while backward ran.


# %%
# %%ranks
def average_by_hooks(model):
    raise NotImplementedError  # your turn


checks.gradient_hook(average_by_hooks, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 1
def average_by_hooks(model):
    def average(p):  # the hook is handed the parameter, not its gradient
        p.grad /= world_size
        dist.all_reduce(p.grad)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(average)


checks.gradient_hook(average_by_hooks, ranks, solution=True)

# %% [markdown]
# **Predict.** Is a step with these hooks faster than the naive one?
#
# <details><summary>Answer</summary>
#
# Hardly. There are still fifty calls, and each hook *waits* for its all-reduce before backward may go on. Starting early
# helps only if one does not stand still, and if one does not have to start so often.
#
# </details>

# %%
# %%ranks
catch_up(globals(), "time_step")

# %%
# %%ranks
model = new_model()
average_by_hooks(model)
hooks_s = time_step(model)
if rank == 0:
    say(f"a step with averaging by hooks: {1e3 * hooks_s:.0f} ms")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: hooks</summary>
#
# Half of the room writes `p /= world_size` or hands `p` itself to the all-reduce; the check says
# so. Do not correct it yourself: the zoo at the end of the lesson is that very mistake in published code. If somebody asks why
# the hook is called *post accumulate*: an ordinary tensor hook sees the new gradient before it is added to `p.grad`, so with
# accumulation it would send a part.
#
# </details>

# %% [markdown]
# ## Buckets, and not waiting (CORE, 8 min)
#
# **Why.** An all-reduce costs a fixed time to start, then a time per byte (lesson 02's alpha and beta). For a LayerNorm's
# 512 bytes you pay the start and nothing else. So collect gradients in a **bucket**, one flat piece of memory, and send the
# bucket when it is full. And start it *asynchronously*: `all_reduce(..., async_op=True)` returns at once with a handle, and
# `handle.wait()` comes after backward.
#
# ![The parameters from the last to the first fill three buckets; when a bucket is full, one all-reduce
# starts](../assets/03_buckets.svg)
#
# That leaves three ways to arrange a step:
#
# ![Three timelines: naive averages in many calls after backward, buckets in a few, and with overlap all but the last bucket
# travel while backward still runs](../assets/03_overlap.svg)
#
# The buckets are filled in the order in which backward finishes the gradients. That order is nearly the reverse of
# `model.parameters()`, which lists them in the order in which the model defined them.


# %%
# %%ranks
catch_up(globals(), "broadcast_state", "average_gradients", "average_by_hooks", "time_step")


# %%
# %%ranks
def pack(module, bucket_mib):
    """The trainable parameters in the order of backward, in lists of at most bucket_mib MiB (or one parameter)."""
    buckets, room = [], 0
    for p in reversed([p for p in module.parameters() if p.requires_grad]):
        if not buckets or p.nbytes > room or p.dtype != buckets[-1][-1].dtype:
            buckets.append([])
            room = bucket_mib * 2**20
        buckets[-1].append(p)
        room -= p.nbytes
    return buckets


if rank == 0:
    for i, parameters in enumerate(pack(new_model(), bucket_mib)):
        mib = sum(p.nbytes for p in parameters) / 2**20
        say(f"bucket {i}: {len(parameters):2d} gradients, {mib:.2f} MiB")

# %% [markdown]
# One bucket. A parameter's gradient *moves into* it: after `take(p)`, `p.grad` is a view of the bucket's memory, so when the
# all-reduce has averaged the bucket, every `p.grad` is averaged with it, and nothing is copied back.


# %%
# %%ranks
class Bucket:
    """The gradients of some parameters in one flat piece of memory."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.flat_P = torch.zeros_like(flat(parameters))
        views = self.flat_P.split([p.numel() for p in parameters])
        self.view = {p: view.view_as(p) for p, view in zip(parameters, views, strict=True)}
        self.missing = set(parameters)

    def take(self, p):
        """Move p's gradient in; a parameter that this rank's loss did not use gives zeros."""
        if p.grad is None:
            self.view[p].zero_()
        elif p.grad is not self.view[p]:
            self.view[p].copy_(p.grad)
        p.grad = self.view[p]
        self.missing.discard(p)

    def start_all_reduce(self):
        for p in list(self.missing):
            self.take(p)
        self.missing = set(self.parameters)
        self.flat_P /= dist.get_world_size()
        self.work = dist.all_reduce(self.flat_P, async_op=True)  # returns at once


# %% [markdown]
# And the whole. One rule is easy to miss: **all ranks must start their buckets in the same order**, because the n-th
# all-reduce of one rank meets the n-th of the others, whatever is in it. If a bucket fills early on one rank, it waits for
# its turn.


# %%
# %%ranks
class BucketedDDP(nn.Module):
    """Data parallel: loss = model(...); loss.backward(); model.finish(); optimizer.step()"""

    def __init__(self, module, bucket_mib=1.0, overlap=True):
        super().__init__()
        self.module, self.overlap, self.sync, self.started = module, overlap, True, 0
        broadcast_state(module)  # the same start
        self.buckets = [Bucket(parameters) for parameters in pack(module, bucket_mib)]
        for bucket in self.buckets:
            for p in bucket.parameters:
                p.register_post_accumulate_grad_hook(functools.partial(self.ready, bucket))

    def forward(self, *args):
        return self.module(*args)

    def ready(self, bucket, p):  # the hook: backward has finished p's gradient
        if self.sync:
            bucket.take(p)
            self.start(self.buckets if self.overlap else [])

    def start(self, buckets, full_only=True):  # in order, up to the first that still misses a gradient
        while self.started < len(buckets) and not (full_only and buckets[self.started].missing):
            buckets[self.started].start_all_reduce()
            self.started += 1

    def finish(self):  # after backward: all ranks start what is left, and wait
        self.start(self.buckets, full_only=False)
        for bucket in self.buckets:
            bucket.work.wait()
        self.started = 0


# %% [markdown]
# **Predict.** How many all-reduces does a step make now? Which of these is faster, and why: one bucket for everything, or
# several that overlap with backward?
#
# <details><summary>Answer</summary>
#
# One per bucket that `pack` listed. Several buckets can hide their communication behind backward, *if* somebody else than the
# cores that compute does the sending: a network card, or a few of a GPU's many processors, which NCCL's kernel takes for
# itself. Where ranks share cores, as on a laptop, sending is
# work for the same cores, little is hidden, and fewer calls win. The experiment below shows both.
#
# </details>

# %%
# %%ranks
model = BucketedDDP(new_model(), bucket_mib)
with wire.watch() as seen:
    model(*batch(0))[1].backward()
    model.finish()
ours_P = flat(p.grad for p in model.parameters())

naive = new_model()
naive(*batch(0))[1].backward()
average_gradients(naive)
difference = (ours_P - flat(p.grad for p in naive.parameters())).abs().max().item()
if rank == 0:
    say(f"{seen.count('all_reduce')} all-reduces")
    say(f"largest difference to the naive gradients: {difference:.1e}")

# %% [markdown]
# The same numbers with a fraction of the calls. Now the times, all in one picture. Look for two things: how much the buckets
# save over the naive version, and whether overlap, on this machine, saves anything more.

# %%
# %%ranks --timeout 120
step_s = {"no averaging": time_step(new_model())}
for name, overlap in [("buckets", False), ("buckets, overlap", True)]:
    model = BucketedDDP(new_model(), bucket_mib, overlap)
    step_s[name] = time_step(model, model.finish)
model = new_model()
step_s["naive"] = time_step(model, functools.partial(average_gradients, model))
average_by_hooks(model)
step_s["hooks"] = time_step(model)

# %%
# %%ranks
if rank == 0:
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes = figure.subplots()
    names = ["naive", "hooks", "buckets", "buckets, overlap"]
    compute_ms = 1e3 * step_s["no averaging"]
    added_ms = [max(0.0, 1e3 * step_s[name] - compute_ms) for name in names]
    axes.barh(names, [compute_ms] * 4, color="#999999", label="forward and backward alone")
    hatched = {"color": "white", "edgecolor": "black", "hatch": "////", "label": "averaging adds"}
    axes.barh(names, added_ms, left=compute_ms, **hatched)
    axes.invert_yaxis()
    axes.set(xlabel="ms per step, median, slowest rank", title=f"averaging on {world_size} ranks, four ways")
    axes.legend()
    alt = "bars of the step time: naive and hooks are long, the two bucketed versions are short"
    show(figure, "four_ways", alt)
metrics.measured(step_s=step_s)

# %% [markdown]
# If overlap is not the shortest bar on your machine, nothing is broken: the ranks that send and the ranks that compute share the
# same cores here. The experiment below takes that apart.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: buckets</summary>
#
# Draw the two cures on the board as two axes: fewer calls (buckets), no waiting (async). The
# usual question: "why not one bucket?" Answer with the experiment, not now. The usual mistake in their own code: forgetting
# `wait`, which on gloo gives a race that is right most of the time. When late: run the three class cells without reading them,
# spend the time on the picture.
#
# </details>

# %% [markdown]
# ## The library, and three ways to the same gradient (CORE, 6 min)
#
# What you have built is `torch.nn.parallel.DistributedDataParallel`, **DDP**, in its main lines. Its own order of events:
#
# - **at construction** it broadcasts parameters and buffers from rank 0 (not the optimizer's state: that is yours);
# - **in forward** it does nothing but note that a backward will come (and broadcast buffers, if there are any);
# - **in backward** its hooks fill buckets and start all-reduces; the end of backward waits for them, so there is no `finish()`;
# - **each rank updates itself**: `optimizer.step()` knows nothing of ranks.
#
# | | wrap | a step | a backward without averaging |
# |---|---|---|---|
# | ours | `BucketedDDP(model, bucket_mib)` | `loss.backward(); model.finish()` | `with no_sync(model):`, below |
# | PyTorch | `DDP(model, bucket_cap_mb=25)` | `loss.backward()` | `with model.no_sync():` |
# | HF Accelerate | `accelerator.prepare(model)`, a DDP inside | `accelerator.backward(loss)` | `with accelerator.accumulate(model):` |
#
# DDP's buckets hold 25 MiB unless you say otherwise, the first one 1 MiB, so that something is on its way early. A parameter that
# took no part in the loss leaves its bucket waiting; at the next forward DDP stops and asks for `find_unused_parameters=True`.
#
# Three ways now lead to one gradient: ours, the library's, and one process that reads the whole global batch. They must
# agree. Compare *gradients*, under plain SGD, in float64: Adam divides by the gradient's size and so hides a wrong factor, and
# "the loss went down" hides nearly everything.

# %%
# %%ranks
catch_up(globals(), "broadcast_state", "pack", "Bucket", "BucketedDDP", "time_step")


# %%
# %%ranks
def five_steps(model, batch_of):
    """Five steps of SGD: the last gradients [P], the weights [P] after it, and this rank's losses [5]."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(5):
        optimizer.zero_grad()
        _, loss = model(*batch_of(step))
        loss.backward()
        if isinstance(model, BucketedDDP):
            model.finish()
        optimizer.step()
        losses.append(loss.detach())
    return flat(p.grad for p in model.parameters()), flat(model.parameters()), torch.stack(losses)


def whole_batch(step):
    return [ids_BT.to(device) for ids_BT in get_batch(corpus.train_ids, step, global_batch, 64, 0, 1, seed=1)]


# %%
# %%ranks
float64 = functools.partial(new_model, torch.float64)
ours_P, ours_weights_P, losses_5 = five_steps(BucketedDDP(float64(), bucket_mib), batch)
library_P, library_weights_P, _ = five_steps(DDP(float64()), batch)
single_P, single_weights_P, single_losses_5 = five_steps(float64(), whole_batch)
dist.all_reduce(losses_5)  # the loss of the batch is the mean of the ranks' losses
losses_5 /= world_size

# %% tags=["nbval-check-output"]
# %%ranks
pairs = {
    "gradients, ours and the library": (ours_P, library_P),
    "gradients, ours and one process": (ours_P, single_P),
    "weights, ours and one process": (ours_weights_P, single_weights_P),
    "losses, ours and one process": (losses_5, single_losses_5),
}
for name, (a, b) in pairs.items():
    assert (a - b).abs().max() < 1e-10, f"{name} differ by {(a - b).abs().max():.1e}"
    if rank == 0:
        say(f"{name}: equal to 1e-10")
metrics.exact(float64_gradient=fingerprint([ours_P]), float64_losses=losses_5)
metrics.close(float64_losses_close=losses_5)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the library</summary>
#
# Read the four bold lines aloud; they are what people get wrong in interviews. *Ask:* "DDP
# never sends weights after the start. What keeps them equal?" *Usual mistakes:* calling `model.module(...)` in training, which
# goes past DDP; expecting that `DDP(model)` shares out the data; wrapping before `.to(device)`. *When late:* skip the bytes.
#
# </details>

# %% [markdown]
# And the bytes. Two instruments that know nothing of each other: *calls* are what is handed to `torch.distributed`, DDP's own
# buckets included; *transport* is what the operating system says really left this process (Linux only).
#
# **Predict.** 816,705 gradients of 4 bytes. What does a rank of four hand over per step, and what does it send on a ring?
#
# <details><summary>Answer</summary>
#
# 3.27 MB handed over, 2·3/4 = 1.5 times that, 4.90 MB, sent. With n ranks it is 2(n-1)/n: 3.27 MB for two, never above
# 6.53 MB.
#
# </details>

# %%
# %%ranks
for name, model in {"ours": BucketedDDP(new_model(), bucket_mib), "library": DDP(new_model())}.items():
    finish = getattr(model, "finish", lambda: None)
    for _ in range(2):  # DDP sorts its buckets anew after the first backward: watch the second
        with wire.watch() as seen:
            model(*batch(0))[1].backward()
            finish()
    payload = seen.payload_bytes("all_reduce")
    on_ring = wire.ring_all_reduce_bytes(gradient_bytes, world_size)
    sent = "unknown here" if seen.transport_bytes is None else f"{seen.transport_bytes / 1e6:.2f} MB"
    if rank == 0:
        say(f"{name}: {seen.count('all_reduce')} all-reduces")
        say(f"  {payload / 1e6:.2f} MB handed over, predicted {gradient_bytes / 1e6:.2f} MB")
        say(f"  {sent} sent, predicted {on_ring / 1e6:.2f} MB")
    metrics.exact(**{f"{name}_bytes": payload})

# %% [markdown]
# Which of the two is faster, with buckets of the same size? Take turns, so that a busy moment of the machine hits both, and
# compare the medians. Expect a ratio near 1: the work is the same, and a handful of Python calls per bucket is soon paid for.

# %%
# %%ranks --timeout 120
rivals = {"ours": BucketedDDP(new_model(), bucket_mib), "library": DDP(new_model(), bucket_cap_mb=bucket_mib)}
optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in rivals.items()}


def full_step(name):
    rivals[name](*batch(0))[1].backward()
    getattr(rivals[name], "finish", lambda: None)()
    optimizers[name].step()
    optimizers[name].zero_grad()


samples = {name: [] for name in rivals}
for turn in range(4 * repeats):
    for name in rivals:
        step = functools.partial(full_step, name)
        samples[name] += median_s(step, 1, ranks, warm_up=int(turn == 0)).samples
rate = {name: tok_per_s(global_batch, 64, sorted(times)[len(times) // 2]) for name, times in samples.items()}
ratio = rate["ours"] / rate["library"]
if rank == 0:
    say(f"tokens per second: ours {rate['ours']:,.0f}, library {rate['library']:,.0f}, ratio {ratio:.2f}")
metrics.measured(tok_per_s=rate, ours_to_library=ratio)

# %% [markdown]
# ### Half the bytes: a communication hook (MORE, 4 min)
#
# DDP lets you replace what happens to a full bucket by a [communication hook](../assets/glossary.md#communication-hook). It
# gets the bucket and returns a *future* of the averaged one. Here it travels in bf16, 2 bytes per number instead of 4. (PyTorch
# ships this one as `bf16_compress_hook`, for NCCL; ours runs on gloo too.)
#
# **Predict.** bf16 keeps 8 significant bits. How far off, relative to the largest gradient, will the result be at most?
#
# <details><summary>Answer</summary>
#
# One rounding errs by at most 2⁻⁸ of the number, about 0.4 %. Each rank rounds once and every addition on the way rounds
# again, so it can be a little more for the worst number, and it is much less on average.
#
# </details>


# %%
# %%ranks
catch_up(globals(), "average_gradients")


# %%
# %%ranks
def bf16_mean(_, bucket):
    """A communication hook: the mean over the ranks, sent in bf16."""
    half_P = bucket.buffer().to(torch.bfloat16) / world_size
    future = dist.all_reduce(half_P, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


model = DDP(new_model())
model.register_comm_hook(None, bf16_mean)
with wire.watch() as seen:
    model(*batch(0))[1].backward()
exact, half = new_model(), flat(p.grad for p in model.parameters())
exact(*batch(0))[1].backward()
average_gradients(exact)
full = flat(p.grad for p in exact.parameters())
worst = ((half - full).abs().max() / full.abs().max()).item()
if rank == 0:
    share = seen.payload_bytes("all_reduce") / gradient_bytes
    say(f"{share:.2f} of the bytes, worst error {100 * worst:.2f} %")

# %% [markdown]
# ### `no_sync`: average once for several backward passes (MORE, 6 min)
#
# A global batch that does not fit into memory is read in [*micro-batches*](../assets/glossary.md#micro-batch): several
# backward passes add up their gradients in `p.grad` ([**accumulation**](../assets/glossary.md#accumulation)), then comes one
# update. Averaging after each of them would be wasted.
#
# ![Three micro-batches: without no_sync an all-reduce follows each backward, with it only the
# last](../assets/03_no_sync.svg)
#
# Our class has the switch already: `self.sync`.


# %%
# %%ranks
catch_up(globals(), "broadcast_state", "pack", "Bucket", "BucketedDDP")


# %%
# %%ranks
@contextlib.contextmanager
def no_sync(model):
    """Backward passes in this block only add up gradients on their own rank."""
    model.sync = False
    yield
    model.sync = True


model = BucketedDDP(new_model(), bucket_mib)
with wire.watch() as seen:
    with no_sync(model):
        for step in (0, 1):
            (model(*batch(step))[1] / 3).backward()  # each loss is a mean: a third of each
    (model(*batch(2))[1] / 3).backward()  # this one averages, with what the others have left in p.grad
    model.finish()
apart = spread(p.grad for p in model.parameters())
if rank == 0:
    say(f"{seen.payload_bytes() / gradient_bytes:.0f} times the gradient's bytes for 3 passes; {apart} apart")

# %% [markdown]
# **A trap.** The library's DDP decides in *forward* whether the next backward will average. In a well-known training script
# the switch was set after the forward pass, right before `backward()`. It trained; at step 1250 the validation loss was 4.59
# where 3.95 was due ([build-nanogpt#30](https://github.com/karpathy/build-nanogpt/pull/30)). Here are such lines. Before you
# run them: which measurement tells you within one step?

# %%
# %%ranks
model = DDP(new_model())
for step in range(3):
    _, loss = model(*batch(step))
    model.require_backward_grad_sync = step == 2  # too late for this pass, in time for the next
    (loss / 3).backward()
apart = spread(p.grad for p in model.parameters())
largest = flat(p.grad for p in model.parameters()).abs().max().item()
if rank == 0:
    say(f"gradients are {apart:.1e} apart, the largest is {largest:.1e}")

# %% [markdown]
# On several ranks they are apart: the copies part with the first update. Every rank now trains a model of its own on a part of
# the data, which is why the loss still falls, only less. Exercise 3 asks for the right way.

# %% [markdown]
# ## Train ShakespeareGPT (CORE, 6 min)
#
# Everything is in place. The loop below is a loop for one process with one line more, `DDP(...)`. Two habits to copy:
#
# - **Evaluate on all ranks.** Each takes its share of the validation batches, one all-reduce gives the mean.
# - **Keep the loss on the rank until the end.** A rank's own loss is that of its own share, not of the batch. The batch's is
#   the mean over the ranks; 300 of them can be averaged by one all-reduce after the last step.

# %%
# %%ranks
catch_up(globals(), "broadcast_state", "pack", "Bucket", "BucketedDDP")


# %%
# %%ranks
def evaluate(model, num_batches=16):
    """Mean validation loss over num_batches global batches, each rank its share. All ranks call it."""
    model.eval()
    with torch.no_grad():
        losses = [model(*batch(i, corpus.val_ids))[1] for i in range(num_batches)]
    model.train()  # on every rank: dropout must not stay off on some
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean.item() / world_size


def sample(model, seed, num=90):
    """Text that the model makes up, beginning after a line break."""
    start_BT = corpus.encode("\n")[None].to(device)
    return corpus.decode(model.generate(start_BT, num, generator=torch.Generator().manual_seed(seed))[0, 1:])


# %% [markdown]
# **Predict.** Shakespeare has 65 symbols here. What is the loss of a model that has learnt nothing and gives each the same
# probability? A [published
# run](https://github.com/saforem2/personal_site/blob/82205852654c9b504ce732a0aae2e358e9b0bf2d/docs/talks/alcf-hpc-workshop-2024/alcf-hpc-workshop-2024.md)
# of a ShakespeareGPT with 85 million parameters on four GPUs logged validation losses of 4.13, 2.48, 2.15 and 1.71 at steps 0,
# 100, 200 and 300. Will yours be above or below?
#
# <details><summary>Answer</summary>
#
# ln 65 = 4.174, and a fresh model errs a little around it. Yours begins like the published one and then stays above it: it is a
# small model that sees 12·64 = 768 characters per step.
#
# </details>

# %%
# %%ranks --timeout 600
model = BucketedDDP(new_model(), bucket_mib) if ddp == "ours" else DDP(new_model())
finish = getattr(model, "finish", lambda: None)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses, looks, train_s = torch.zeros(steps, device=device), [], 0.0
begin = time.perf_counter()

for step in range(steps + 1):
    if step in [steps * third // 3 for third in range(4)]:  # 0, 100, 200, 300
        synchronise(device)
        train_s += time.perf_counter() - begin
        looks.append((step, evaluate(model.module), sample(model.module, seed=rank)))
        if rank == 0:
            say(f"step {step:3d}: validation loss {looks[-1][1]:.3f}")
        begin = time.perf_counter()
    if step == steps:
        break
    _, loss = model(*batch(step))
    loss.backward()  # all ranks: the gradients are averaged in here
    finish()
    optimizer.step()  # each rank for itself
    optimizer.zero_grad()
    losses[step] = loss.detach()

# %% [markdown]
# A yardstick for the curve: how well can one guess the next letter from the *one* letter before it? Counting pairs tells.

# %%
# %%ranks
V, ids = len(corpus.symbols), corpus.train_ids
pairs_VV = torch.bincount(ids[:-1] * V + ids[1:], minlength=V * V).view(V, V) + 1.0  # no pair is impossible
pairs_loss = F.cross_entropy(pairs_VV.log()[corpus.val_ids[:-1]], corpus.val_ids[1:]).item()
if rank == 0:
    say(f"knowing one letter: {pairs_loss:.2f}, knowing nothing: {torch.tensor(V).log():.2f}")

# %% [markdown]
# What you should see below: a steep fall while the model learns which letters are common, then a slow one towards the yardstick,
# the dotted line, while it learns which follow which. The crosses are the published run. Beside the curve, what rank 0 wrote at
# the four looks.

# %%
# %%ranks
dist.all_reduce(losses)
losses /= world_size
if rank == 0:
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes, text = figure.subplots(1, 2, width_ratios=[1, 1.1])
    axes.plot(range(steps), losses.cpu(), color="#999999", lw=1, label="training, mean over the ranks")
    axes.plot([s for s, _, _ in looks], [v for _, v, _ in looks], "ko-", label="validation")
    if steps == 300:
        axes.plot([0, 100, 200, 300], [4.13, 2.48, 2.15, 1.71], "kx", label="a published run, validation")
    axes.axhline(pairs_loss, color="black", ls=":", label="knowing one letter")
    axes.set(xlabel="step", ylabel="loss, nats per character", title=f"ShakespeareGPT on {world_size} ranks")
    axes.legend()
    text.axis("off")
    for i, (step, val_loss, written) in enumerate(looks):
        top, line = 1 - 0.26 * i, written.replace("\n", "/")
        text.text(0, top, f"step {step}, validation {val_loss:.2f}", weight="bold", va="top")
        style = {"family": "monospace", "fontsize": 9, "va": "top", "parse_math": False}
        text.text(0, top - 0.07, line[:45] + "\n" + line[45:], **style)
    show(figure, "training", "the loss falls from ln 65; beside it samples that turn from noise into words")

# %% [markdown]
# After 300 steps the model is about at the dotted line, or a little below it, and its lines have the shape of words. The
# published run passed that line early. Before you compare two losses, compare what went into them: the size of the model, the
# characters per step, the learning rate. (With `--steps 2000` yours goes on from here.)
#
# Every rank holds the same model. Let each write with a seed of its own:

# %%
# %%ranks
say(sample(model.module, seed=rank, num=150))
rate = tok_per_s(global_batch, 64, train_s / steps)
apart = spread(model.parameters())
if rank == 0:
    say(f"\nafter {steps} steps the copies are {apart} apart; {rate:,.0f} tokens/s")
metrics.exact(losses=losses, validation=[v for _, v, _ in looks], weights=fingerprint(model.parameters()))
metrics.close(first_losses=losses[:6], first_validation=looks[0][1])
metrics.close(tolerance=0.05, last_validation=looks[-1][1])
metrics.measured(training_tok_per_s=rate)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: training</summary>
#
# The run takes a minute on two cores; talk while it runs, about what each rank is doing
# *now*. Ask: "which line of the loop would be different without DDP?" (None but the wrap.) Usual mistakes: printing the loss
# every step with an all-reduce; `if rank == 0: evaluate(...)`, which hangs, because evaluate holds a collective.
#
# </details>

# %% [markdown]
# ## Where the time goes (CORE, 3 min)
#
# The log of that published run shows a training cycle of 69 s on its four GPUs. In each, rank 0 evaluated, sampled and saved,
# while the three others waited at the next all-reduce. That took **59 % of the cycle**.
#
# ![A cycle of 69 seconds on four ranks: 28 s of training on all, then 41 s in which only rank 0 evaluates, samples and
# saves, and three ranks wait](../assets/03_rank_0_evaluates.svg)
#
# **Predict.** On n ranks, what does the evaluation cost if all of them share it?
#
# <details><summary>Answer</summary>
#
# A 1/n of its time, if each rank has cores of its own: of those 41 s about 10 on four GPUs. On a laptop whose ranks share
# cores you gain as many times as there are cores, at best. (If other programs keep those busy, run the cell twice.)
#
# </details>
#
# Now both ways, one after the other, on your ranks. In the picture solid is compute and outlined is waiting.

# %%
# %%ranks
catch_up(globals(), "evaluate", "whole_batch")

# %%
# %%ranks
model = DDP(new_model())
x_BT, y_BT = whole_batch(0)
dist.barrier()
cycle = Timeline(ranks)
for evaluates in ("rank 0", "all ranks"):
    with cycle.span("train"):
        for step in range(3):
            model(*batch(step))[1].backward()
        synchronise(device)
    with cycle.span("evaluate", "compute" if rank == 0 or evaluates == "all ranks" else "waiting"):
        if evaluates == "all ranks":
            evaluate(model.module, num_batches=24)
        elif rank == 0:  # 24 global batches, all by itself; the others run ahead into the barrier
            with torch.no_grad():
                [model.module(x_BT, y_BT) for _ in range(24)]
        synchronise(device)
        dist.barrier()
spans = gather(cycle.spans, ranks)

# %%
# %%ranks
if rank == 0:
    alone, shared = [s.end_s - s.start_s for s in spans if s.rank == 0 and s.name == "evaluate"]
    say(f"evaluating 24 batches: {1e3 * alone:.0f} ms by rank 0 alone, {1e3 * shared:.0f} ms by all ranks")
    figure = gantt(spans, "train, rank 0 evaluates; train, all evaluate")
    show(figure, "evaluation", "two cycles: at the end of the first only rank 0 is busy, then all are")

# %% [markdown]
# ## Experiment: how large should a bucket be? (CORE, 5 min)
#
# Small buckets start early and pay the price of a call many times. One large bucket pays once and starts when backward is over.
# In between lies the best size. Where?
#
# First a machine in which sending costs no core: the **virtual network**. The ranks and the messages are real, the *time* is
# computed: backward takes 20 ms, a message 0.1 ms plus its bytes at 0.4 GB/s, and communication runs beside compute.
#
# **Predict.** Let c be the time of one bucket's ring, and k the number of buckets. Backward takes B. When is all averaged?
#
# <details><summary>Answer</summary>
#
# If the network keeps up, only the last bucket sticks out: B + c. If it does not, it is busy from the first bucket on:
# B/k + k·c. So it is the larger of the two. c has 2(n-1) messages of 1/(k·n) of the bytes: with growing k the bytes of a
# bucket shrink, its latency does not, and k·c grows without end. A U.
#
# </details>


# %%
# %%ranks --timeout 120
link = Link(latency_s=0.1e-3, bytes_per_s=0.4e9)
network = VirtualNetwork(ranks, link)
backward_s = 20e-3
numbers = 819_200  # nearly as many gradients as ShakespeareGPT has, and they split into 32 equal buckets


def virtual_step(k):
    """Virtual seconds until k equal buckets are averaged, each started when backward has filled it."""
    network.reset()
    works = []
    for i in range(k):
        network.compute(backward_s / k, "backward")
        with network.asynchronous(f"bucket {i}") as work:
            network.all_reduce(torch.ones(numbers // k))
        works.append(work)
    network.wait(*works)
    return network.clock_s


def predicted_step(k):
    ring_s = 2 * (world_size - 1) * link.cost_s(4 * numbers / k / world_size)
    return max(backward_s + ring_s, backward_s / k + k * ring_s)


counts = [1, 2, 4, 8, 16, 32]
virtual_s = [virtual_step(k) for k in counts]
predicted_s = [predicted_step(k) for k in counts]

# %% [markdown]
# Now the real thing on this machine, for the same question: `BucketedDDP` at several sizes. The prediction assumes *no* overlap:
# compute, plus each bucket's all-reduce as long as it takes when nothing else runs. Where the measured step is below that
# line, overlap has hidden something.

# %%
# %%ranks
catch_up(globals(), "broadcast_state", "pack", "Bucket", "BucketedDDP", "time_step")

# %%
# %%ranks --timeout 200
sizes_mib, measured_s, alone_s, bucket_counts = [0.05, 0.2, 0.5, 1.0, 4.0], [], [], []
compute_s = time_step(new_model())
for size_mib in sizes_mib:
    model = BucketedDDP(new_model(), size_mib)
    measured_s.append(time_step(model, model.finish))

    def all_buckets(buckets=model.buckets):
        for bucket in buckets:
            dist.all_reduce(bucket.flat_P)

    alone_s.append(compute_s + median_s(all_buckets, repeats, ranks).slowest_s)
    bucket_counts.append(len(model.buckets))

# %%
# %%ranks
if rank == 0:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    virtual, real = figure.subplots(1, 2)
    virtual.plot(counts, 1e3 * torch.tensor(virtual_s), "ko", label="virtual network")
    virtual.plot(counts, 1e3 * torch.tensor(predicted_s), "-", color="#999999", label="predicted")
    virtual.set(xlabel="number of buckets k", ylabel="virtual ms", title="its own network (virtual)")
    real.plot(bucket_counts, 1e3 * torch.tensor(measured_s), "ko-", label="measured, with overlap")
    real.plot(bucket_counts, 1e3 * torch.tensor(alone_s), "--", color="#999999", label="no overlap")
    real.axhline(1e3 * compute_s, color="#999999", ls=":", label="compute alone")
    real.set(xlabel="number of buckets", ylabel="ms per step", title=f"this machine, {world_size} ranks")
    for axes, ticks in ((virtual, counts), (real, bucket_counts)):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, ticks)
        axes.set_ylim(0)
        axes.legend()
    alt = "left a U with its floor at about 8 buckets, right a time that mostly grows with the number of buckets"
    show(figure, "bucket_size", alt)
    worst = max(abs(v / p - 1) for v, p in zip(virtual_s, predicted_s, strict=True))
    say(f"virtual against predicted: {100 * worst:.2f} % off at most")
metrics.exact(virtual_step_s=virtual_s)
metrics.measured(bucket_counts=bucket_counts, bucket_step_s=measured_s, bucket_predicted_s=alone_s)

# %% [markdown]
# **The residual.** On the left there is none: the formula *is* the schedule. On the right the U has lost its left branch, the one
# where a single large bucket comes too late. gloo's all-reduce is work for the very cores that compute, so there is little to
# hide behind, and what you pay for is the number of calls. Measured points *above* the dashed line say that sending and computing
# get into each other's way; points below it, that something was hidden after all. (A single point may step out of line: a few
# samples on shared cores.) On GPUs a few processors and the network card do the sending, and where gradients are large the U is
# real: DDP's 25 MiB are its authors' estimate of where its floor lies (Li et al. 2020).
#
# What overlap looks like, once with 8 buckets, where the network keeps up, and once with 32, where latency piles up:

# %%
# %%ranks
for k in (8, 32):
    took_s = virtual_step(k)
    spans = network.gather_spans()
    if rank == 0:
        figure = gantt(spans, f"{k} buckets: {1e3 * took_s:.1f} virtual ms", virtual=True)
        show(figure, f"overlap_{k}", f"hatched communication under solid backward, {k} buckets on each rank")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the experiment</summary>
#
# *Say:* the left picture is what DDP was built for, the right one is what you have. *Usual
# mistakes:* concluding from the right one that overlap is useless; reading the virtual milliseconds as this machine's. *When
# late:* show the two virtual charts only. *Ask:* "you double the latency; where does the floor of the U move?" (To fewer
# buckets. Let somebody change `latency_s` and run the cell.)
#
# </details>

# %% [markdown]
# ### The same picture from real time (MORE, 3 min)
#
# Our class again, with a clock on each bucket: a span opens when its all-reduce starts and closes, in gloo's own thread, when
# the averaged bucket has arrived. Spans may overlap: the next bucket starts while one is still on its way, and its number stands
# in the middle of its own span. (On GPUs all this happens in streams: a span shows when work was queued, and a bucket's has
# hardly any length, because its future is complete as soon as NCCL has the all-reduce in its stream. `torch.profiler` draws the
# picture of the streams.)

# %%
# %%ranks
catch_up(globals(), "broadcast_state", "pack", "Bucket", "BucketedDDP")


# %%
# %%ranks
def start_watched(i, bucket):
    arrived = clock.start(f"{i}", "communication")
    Bucket.start_all_reduce(bucket)
    bucket.arrived = bucket.work.get_future().then(arrived)


model = BucketedDDP(new_model(), bucket_mib)
for i, bucket in enumerate(model.buckets):
    bucket.start_all_reduce = functools.partial(start_watched, i, bucket)

# %%
# %%ranks
for _ in range(2):  # the first step warms up, the second is kept
    clock = Timeline(ranks)
    with clock.span("forward"):
        _, loss = model(*batch(0))
    with clock.span("backward"):
        loss.backward()
    with clock.span("finish", "waiting"):
        model.finish()
    for bucket in model.buckets:
        bucket.arrived.wait()  # gloo's thread has closed the spans
spans = gather(clock.spans, ranks)
if rank == 0:
    meaning = (
        "forward, backward, waiting" if device.type == "cpu" else "when each was queued, not when it ran"
    )
    figure = gantt(spans, f"one real step: {meaning}")
    show(figure, "real_step", "forward and backward of each rank, and below them its buckets on their way")

# %% [markdown]
# ## Weak scaling: when more ranks stop helping (MORE, 5 min)
#
# **Weak scaling** keeps the work *per rank* and adds ranks: ideal is twice the tokens per second on twice the ranks. (Strong
# scaling keeps the *whole* work. Lesson 05 has both.)
#
# ![Weak scaling: one, two and four ranks, three sequences each; the batch grows with the ranks](../assets/03_weak_scaling.svg)
#
# **Predict.** This machine's first line, at the start, told the number of cores. What efficiency do you expect on 1, 2 and 4
# ranks?
#
# <details><summary>Answer</summary>
#
# Up to as many ranks as there are cores, below 100 %: the averaging is added, and the waiting for each other. Beyond that the
# ranks share cores. Four ranks on two cores can hardly exceed 50 %, whatever DDP does, and an all-reduce also waits for those
# that wait for a core.
#
# </details>

# %%
# %%ranks --timeout 120
three = get_batch(corpus.train_ids, 0, 3, 64, 0, 1, seed=rank)  # sequences for each rank, however many ranks
x_bT, y_bT = (ids_bT.to(device) for ids_bT in three)
sizes, rates = [n for n in (1, 2, 4) if n <= world_size], []
for n in sizes:
    group = dist.new_group(range(n))  # all ranks make it, also those that are not in it
    if rank < n:
        model = DDP(new_model(), process_group=group)
        model(x_bT, y_bT)[1].backward()  # warm up
    synchronise(device)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(2 * repeats if rank < n else 0):
        model(x_bT, y_bT)[1].backward()
    synchronise(device)
    dist.barrier()  # here the ranks that are not in it wait
    rates.append(tok_per_s(3 * n, 64, (time.perf_counter() - begin) / (2 * repeats)))

# %%
# %%ranks
if rank == 0:
    for n, tokens in zip(sizes, rates, strict=True):
        say(f"ranks: {n}, tokens/s: {tokens:7,.0f}, efficiency: {100 * tokens / (n * rates[0]):3.0f} %")
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(sizes, rates, "o-", color="black", label="measured")
    axes.plot(sizes, [n * rates[0] for n in sizes], "--", color="#999999", label="ideal")
    axes.set(xlabel="ranks", ylabel="tokens/s", xticks=sizes, ylim=0, title="weak scaling")
    axes.legend()
    show(figure, "weak_scaling", "tokens per second against ranks; measured falls below ideal")
metrics.measured(weak_scaling={"ranks": sizes, "tok_per_s": rates})

# %% [markdown]
# ## Exercises (MORE, 20 min)
#
# Exercise 1 was the hook. Each check runs your answer in a process group of its own: you cannot break anything.
#
# ### Exercise 2: tied, frozen and unused parameters
#
# Real models are not tidy. A *tied* matrix is embedding and head at once. A *frozen* parameter has `requires_grad=False`. An
# *unused* one took no part in this rank's loss, so its `grad` is None here, while another rank may have used it.
#
# Write `average_untidy(model)`, called after backward: afterwards the **gradient** of every trainable parameter is the mean over
# *all* ranks, where a rank that did not use it counts as zero. Each gradient is sent once, and nothing else.


# %%
# %%ranks
def average_untidy(model):
    raise NotImplementedError  # your turn


checks.untidy(average_untidy, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 2
def average_untidy(model):
    for p in model.parameters():  # lists a tied parameter once
        if p.requires_grad:  # the same on every rank, so all ranks make the same calls ...
            if p.grad is None:
                p.grad = torch.zeros_like(p)  # ... also where this rank has nothing to add
            p.grad /= world_size
            dist.all_reduce(p.grad)


checks.untidy(average_untidy, ranks, solution=True)

# %% [markdown]
# (A parameter that *no* rank used now has a gradient of zeros, where one process would have None. Plain SGD does not mind.
# AdamW does: it decays the weight. DDP with `find_unused_parameters=True` sends one more small all-reduce, of an integer
# per parameter tensor, to keep None.)
#
# ### Exercise 3: accumulate with the library's `no_sync`
#
# `ddp` is a model in the library's DDP, `micro_batches` a list of `(x, y)`. Write `accumulate(ddp, micro_batches)`: one backward
# pass for each, with the loss `F.mse_loss(ddp(x), y)`, so that in the end each gradient is that of the mean over *all*
# micro-batches and ranks, and was averaged over the ranks **once**.


# %%
# %%ranks
def accumulate(ddp, micro_batches):
    raise NotImplementedError  # your turn


checks.accumulation(accumulate, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 3
def accumulate(ddp, micro_batches):
    k = len(micro_batches)
    with ddp.no_sync():  # around forward too: that is where DDP looks
        for x, y in micro_batches[:-1]:
            (F.mse_loss(ddp(x), y) / k).backward()
    x, y = micro_batches[-1]
    (F.mse_loss(ddp(x), y) / k).backward()


checks.accumulation(accumulate, ranks, solution=True)

# %% [markdown]
# ### Exercise 4: predict the bytes of a step
#
# How many bytes does one rank **send** per training step, when gradients are averaged on a ring? Write
# `bytes_per_step(num_params, n_ranks, bytes_per_value=4, micro_batches=1, no_sync=False)`. Try it on GPT-2 (124 million
# parameters), 8 ranks, bf16, 4 micro-batches with and without `no_sync`, before you trust it.
#
# <details><summary>What it should say</summary>
#
# With `no_sync` 2·7/8 · 124e6 · 2 bytes = 434 MB; without it four times that, 1.74 GB.
#
# </details>


# %%
# %%ranks
def bytes_per_step(num_params, n_ranks, bytes_per_value=4, micro_batches=1, no_sync=False):
    raise NotImplementedError  # your turn


checks.bytes_per_step(bytes_per_step, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 4
def bytes_per_step(num_params, n_ranks, bytes_per_value=4, micro_batches=1, no_sync=False):
    times = 1 if no_sync else micro_batches
    return times * 2 * (n_ranks - 1) / n_ranks * num_params * bytes_per_value


checks.bytes_per_step(bytes_per_step, ranks, solution=True)

# %% [markdown]
# ## A bug from the zoo (CORE, 4 min)
#
# A teaching library for distributed training has, beside its bucketed data parallel class, a naive one "for clarity". Its heart
# is below, in our words. It runs, on all ranks, and the loss falls. Run it. **What is wrong, and which of this lesson's
# instruments shows it?** Write down your suspicion before you open the answer.


# %%
# %%ranks
def clear_and_wrong(model):
    def average(gradient):
        dist.all_reduce(gradient)
        gradient /= world_size

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(average)


model = new_model()
clear_and_wrong(model)
optimizer, seen_losses = torch.optim.SGD(model.parameters(), lr=0.1), []
for step in range(8):
    _, loss = model(*batch(step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    seen_losses.append(f"{loss.item():.3f}")
if rank == 0:
    say(f"rank 0's loss: {' '.join(seen_losses)}")

# %% [markdown]
# Now measure, with *your* choice of `spread`: of the weights after a step, or of the gradients after a backward?

# %%
# %%ranks
model(*batch(8))[1].backward()
gradients_apart = spread(p.grad for p in model.parameters())
optimizer.step()
weights_apart = spread(model.parameters())
if rank == 0:
    say(f"after backward the gradients are {gradients_apart:.2e} apart")
    say(f"after the step the weights are {weights_apart:.2e} apart")

# %% [markdown]
# <details><summary>Answer</summary>
#
# A *post-accumulate* hook is handed the **parameter**. So the line that says `gradient` averages the weights, and the gradients
# stay each rank's own. The weights are pulled together at every step, hence the small spread and the falling loss; but each rank
# updates with the gradient of its own share, and the result is not what one process computes. No test had ever run this class.
# It was found by somebody who read the documentation:
# [picotron#39](https://github.com/huggingface/picotron/issues/39). The cure is exercise 1: average `p.grad`.
#
# </details>
#
# The rule to take home: **measure the spread of the gradients after backward.** It must be 0.0. The loss will not tell you.
#
# ### Two more from the same family (MORE, 4 min)
#
# Both from one workshop's trainer. In the first, somebody prepared for fp16: `backward()` and `step()` stand under the
# scaler that fp16 needs. What happens where there is no scaler, as on a CPU?

# %%
# %%ranks
scaler = torch.amp.GradScaler() if device.type == "cuda" else None
model = new_model()
optimizer = torch.optim.AdamW(model.parameters())
first_weights = fingerprint(model.parameters())
for step in range(3):
    _, loss = model(*batch(step))
    if scaler is not None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
if rank == 0:
    say(f"after 3 steps the weights have changed: {fingerprint(model.parameters()) != first_weights}")

# %% [markdown]
# Nothing trains, and nothing says so. One line would have: assert that the first step changes the weights.
#
# In the second, rank 0 draws a sample between two steps. Which rank trains with dropout afterwards?

# %% tags=["nbval-check-output"]
# %%ranks
model = new_model()
model.eval()  # all ranks, before sampling
if rank == 0:
    model.generate(x_bT[:1, :1], 5)
    model.train()  # and here is the mistake
say(f"dropout is {'on' if model.training else 'off'}")

# %% [markdown]
# Only rank 0. Whatever changes the state of a model belongs outside `if rank == 0`. Only files and the screen belong inside.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# Two minutes of silence after the first cell, then hands up: who suspects the division, who the
# hook, who the loss? Only then the cell that measures. The point is not the bug but the instrument. *When late:* keep this, drop
# the two MORE ones.
#
# </details>

# %% [markdown]
# ## On the cluster
#
# The same file, with your own edits, as a job ([lesson 04](04_first_job.ipynb) walks through it):
#
# ```bash
# qsub jobs/ddp_shakespeare.pbs            # PBS
# sbatch jobs/ddp_shakespeare.slurm        # Slurm
# bash jobs/ddp_shakespeare.pbs            # no scheduler: the same on this node
# ```
#
# **What changes on GPUs.** `join()` takes one GPU per rank and NCCL instead of gloo; not a line of this lesson changes. NCCL's
# all-reduce runs on the GPU in a stream of its own, so overlap is real there. (This model's 3.2 MB of gradients travel in well
# under a millisecond over NVLink, so its curve still shows mostly the price of a call; the U needs larger gradients or a slower
# network.) bf16 halves the bytes and is fast. A step of this small model takes a few milliseconds, so everything that is not a
# step weighs more: evaluation, printing, `loss.item()`, which waits for the GPU.
#
# **What to look for** in the job's output: the line that says who is here (as many ranks as you asked for, each on its own
# GPU, not n times "rank 0 of 1"); the same `first_losses` in the run's `metrics.json` as on your laptop, to 1e-3, for the same
# `--global-batch`; and tokens per second on 1, 2 and 4 nodes, from which you compute the efficiency as above.

# %% [markdown]
# ## Recap
#
# 1. Same start, same averaged gradient, same update: the copies stay identical to the last bit.
# 2. Averaging happens in *backward*; DDP broadcasts at construction; each rank updates itself.
# 3. Buckets make calls rare, asynchronous calls hide them; all ranks must make the same calls in the same order.
# 4. A rank sends 2(n-1)/n times the gradient's bytes per step, once per update if you use `no_sync`.
# 5. Trust the spread of the gradients and the equality with one process, not the loss.
#
# ## Further reading
#
# - Li et al. 2020, [PyTorch Distributed: experiences on accelerating data parallel training](https://arxiv.org/abs/2006.15704):
#   buckets, overlap and `no_sync`, with measurements, by those who wrote DDP.
# - PyTorch, [Distributed Data Parallel](https://docs.pytorch.org/docs/stable/notes/ddp.html): the internal design.
# - Patarasuk and Yuan 2009, *Bandwidth optimal all-reduce algorithms for clusters of workstations*: where 2(n-1)/n comes from.
# - Goyal et al. 2017, [Accurate, large minibatch SGD](https://arxiv.org/abs/1706.02677): what happens to learning when n is
#   256; its section 3 lists mistakes in distributed training that do not fail. Lesson 05 goes on from there.

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
