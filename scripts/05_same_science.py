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
# # 05 The same science: the same training on more ranks
#
# **55 minutes** for the sections marked CORE, 90 with those marked MORE.
#
# After this lesson **you can**
# - give each rank its own data, so that nothing is lost, repeated, or read by two ranks by accident;
# - keep the result of a training independent of the number of ranks, and prove it to ten digits;
# - choose batch and learning rate when the number of ranks grows, and say what a larger batch buys;
# - read strong and weak scaling curves, your own and published ones;
# - feed the ranks from files.
#
# **You need** [data parallel](../assets/glossary.md#data-parallel) ([lesson 03](03_data_parallel.ipynb)) and the
# [all-reduce](../assets/glossary.md#all-reduce) ([lesson 02](02_collectives.ipynb)). In two lines: copies of a
# model on n [ranks](../assets/glossary.md#rank) each read their share of a batch; after backward an all-reduce
# gives every copy the same gradient.
#
# **New here:** [epoch](../assets/glossary.md#epoch), [sampler](../assets/glossary.md#sampler), [token-weighted
# loss](../assets/glossary.md#token-weighted-loss), [learning-rate
# warm-up](../assets/glossary.md#learning-rate-warm-up), [gradient noise
# scale](../assets/glossary.md#gradient-noise-scale), [Amdahl's law](../assets/glossary.md#amdahl), [Gustafson's
# law](../assets/glossary.md#gustafson), [straggler](../assets/glossary.md#straggler),
# [prefetch](../assets/glossary.md#prefetch).
#
# The same file is a script:
#
# ```bash
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/05_same_science.py
# mpiexec -n 4 python scripts/05_same_science.py     # with an MPI world: MPI-IO too
# python scripts/05_same_science.py                  # a world of one: the same trajectory
# ```

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 1, warm-up 4, global batch 5, splitting with
# exercise 1 10, resumable order 3, token-weighted loss 7, trajectories 5, learning rate 9, experiment 7, zoo 4.
#
# *Say:* one sentence carries the lesson: "the number of ranks is a matter of speed, and must not show in the result".
#
# *Three usual mistakes:* thinking of the batch per GPU as *the* batch; averaging averages; calling a run "twice as
# fast" that makes half as many updates.
#
# *When late:* skip the resumable order, show the stored picture of the learning rates, keep the zoo.
#
# *Ask the room:* "You double the GPUs and change nothing else. Name everything that is now different in your
# experiment."
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
micro_batch = 2  # sequences in one forward pass of one rank, at least 1
global_batch = 48  # sequences per update, all ranks together, at least 1
steps = 10  # updates of each trajectory, at least 2
sweep_tokens = 98304  # characters that each run of the sweep reads, at least 4096
repeats = 3  # samples of each timing, at least 1

# %% [markdown]
# ## Start (CORE, 1 min)
#
# The first cell starts four ranks behind this notebook; a cell that begins with `%%ranks` runs on all of them.
#
# **Catching up.** Each section needs only the cells of this one, and then its own. Where it uses a function of an
# earlier section, a cell with `catch_up(...)` defines it, unless you have it already.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("05_same_science", globals())

# %%
# %%ranks
import math
import shutil
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands import Metrics, catch_up, fingerprint, join, leave, mpi_world, refuse, say, show
from manyhands.checks import same_science as checks
from manyhands.data import file_shares, token_file
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.data.prefetch import Prefetch
from manyhands.data.samplers import DrawnSampler, PartitionedSampler
from manyhands.figures import many_ranks
from manyhands.figures.heat_map import heat_map
from manyhands.figures.looks import MEASURED, PREDICTED
from manyhands.gpt.model import GPT, GPTConfig
from manyhands.measure import wire
from manyhands.measure.timing import median_s
from manyhands.measure.virtual_network import Link, VirtualNetwork
from manyhands.runs import recorded_runs
from manyhands.runs.run_folder import run_folder
from matplotlib.figure import Figure
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data.distributed import DistributedSampler

# %% [markdown]
# The ranks join. A batch that does not come out even is refused at once, on every rank, so that none is left waiting.

# %%
# %%ranks
ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
if global_batch % (micro_batch * world_size):
    refuse(
        f"global_batch={global_batch} is no multiple of micro_batch={micro_batch} x {world_size} ranks; "
        f"use a multiple of {micro_batch * world_size}"
    )

# %% [markdown]
# The lesson's model is a **small ShakespeareGPT**: two layers, width 64, and 32 characters at a time, so that we
# can afford to train it twenty times. The [global batch](../assets/glossary.md#global-batch), all sequences of one
# update, stays the same here for any number of ranks.
#
# Letters at the end of a name are its shape: `B` sequences in the global batch, `b` this rank's share, `T`
# positions, `V` symbols, `P` parameters in one long row. A small letter is this rank's part of the capital one.
# Lines with `metrics` keep numbers that tests compare: read past them. `wire` counts the bytes that a rank hands
# over.

# %%
# %%ranks
corpus = load_corpus(ranks)
T = 32
config = GPTConfig(vocab_size=len(corpus.symbols), block_size=T, n_layer=2, n_head=2, n_embd=64)
given = {"micro_batch": micro_batch, "global_batch": global_batch, "steps": steps}
metrics = Metrics(ranks, corpus, given | {"sweep_tokens": sweep_tokens})


def new_model(dtype=torch.float32):
    """The small GPT with its first weights, the same on every rank, because the seed is."""
    torch.manual_seed(1337)
    return GPT(config).to(device, dtype)


def flat(tensors):
    """All these numbers in one row."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def everyone(value):
    """The value of each rank, in a list. All ranks call it."""
    values = [None] * world_size
    dist.all_gather_object(values, value)
    return values


say(f"{config.num_params():,} parameters, {len(corpus.train_ids):,} characters to learn from")

# %% [markdown]
# ## Warm-up: four numbers by hand (CORE, 4 min)
#
# **Why.** Ranks report means: of a loss, of an accuracy, of a gradient. Somebody has to make one number of them.
#
# ![Rank 0 holds the losses 1, 2 and 3, rank 1 holds 6: the mean of the two means is 4, the mean of the four numbers is
# 3](../assets/05_token_mean.svg)
#
# Four characters have the losses 1, 2, 3 and 6. The first three are on one rank, the last on another.
#
# **Predict.** What is the mean loss of a character? What comes out if each rank takes its mean, and then you take
# the mean of the two? And if two more ranks take part that hold nothing?
#
# <details><summary>Answer</summary>
#
# (1 + 2 + 3 + 6) / 4 = 3. The means are 2 and 6, and the mean of these is 4: the lonely 6 counts three times as
# much as its colleagues. A rank that holds nothing has no mean at all: 0/0 is nan, and an all-reduce makes it
# everybody's nan.
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
parts = [[1.0, 2.0, 3.0], [6.0]]
# one rank alone holds both parts; rank 2 and later hold nothing
mine = torch.tensor(sum(parts[rank::world_size], []), device=device)

means = everyone(mine.mean().item())
sum_and_count = torch.stack([mine.sum(), torch.tensor(float(len(mine)), device=device)])
dist.all_reduce(sum_and_count)
if rank == 0:
    say(f"the ranks' means: {means}")
    first_two = sum(means[:2]) / len(means[:2])
    say(f"the mean of them all {sum(means) / world_size:g}, of the first two {first_two:g}")
    say(f"{sum_and_count[0]:g} / {sum_and_count[1]:g} = {sum_and_count[0] / sum_and_count[1]:g}")

# %% [markdown]
# The rule for all that follows: **add up sums, add up counts, divide once, at the end.** It gives the same answer
# on any number of ranks, and that is the whole subject: *the number of ranks is a matter of speed; it must not show
# in the result.*

# %% [markdown]
# ## The global batch (CORE, 5 min)
#
# **Why.** You tune a training on one GPU, then get 64, and the loss curve is another one. The first thing to look
# at is how many sequences make one update.
#
# ![Two ranks with three micro-batches each, two sequences in a micro-batch: twelve sequences, one
# update](../assets/05_global_batch.svg)
#
# > **global batch = micro-batch × ranks × accumulation**
#
# The [micro-batch](../assets/glossary.md#micro-batch) is the sequences of one forward pass, as many as fit into a
# device; [accumulation](../assets/glossary.md#accumulation) how many of them a rank adds up before the update. An
# [**epoch**](../assets/glossary.md#epoch) is one pass over the data.
#
# **Predict.** Lesson 03's GPT reads 1,003,854 characters, 64 at a time, 12 sequences per micro-batch. How many
# updates does an epoch have on one rank? On 1,024?
#
# <details><summary>Answer</summary>
#
# 1,003,854 / 64 = 15,685 sequences, divided by 12 that makes 1,307 updates. On 1,024 ranks with the same micro-batch
# 12,288 sequences make an update: the epoch has *one* update, and 3,397 sequences are left over. The model would
# hardly move.
#
# </details>


# %% tags=["nbval-check-output"]
# %%ranks
def updates_per_epoch(sequences, micro, n, accumulate=1):
    return sequences // (micro * n * accumulate)


if rank == 0:
    say("micro x ranks x accumulation = global batch, characters per update, updates per epoch")
    for micro, n, accumulate in [(12, 1, 1), (12, 4, 1), (12, 4, 5), (12, 64, 1), (12, 1024, 1)]:
        batch = micro * n * accumulate
        updates = updates_per_epoch(1_003_854 // 64, micro, n, accumulate)
        say(f"{micro:5} x {n:5} x {accumulate:12} = {batch:12,}, {64 * batch:21,}, {updates:17,}")
    for batch in (256, 8_192, 81_920):
        updates = 1_281_167 / batch
        in_90 = f"{90 * updates:9,.0f} in 90"
        say(f"ImageNet in batches of {batch:6,}: {updates:7,.1f} updates per epoch, {in_90}")

# %% [markdown]
# The last rows are history. 256 images was the batch of the first ResNets; Goyal et al. 2017 used 8,192 on 256 GPUs,
# for 90 epochs; Yamazaki et al. 2019 used 81,920 on 2,048. 32 or 320 times fewer updates must each go further, or you
# need more epochs: that is the learning rate's section below.
#
# When the number of ranks changes for other reasons (a queue that gave you 2 nodes instead of 4), keep the global
# batch and change the accumulation. That must come out even, or the run must refuse to start.


# %% tags=["nbval-check-output"]
# %%ranks
def accumulation(global_batch, micro_batch, n):
    """Micro-batches that each of n ranks adds up for one update. Raises ValueError where that is uneven."""
    together = micro_batch * n
    if global_batch % together:
        raise ValueError(
            f"{global_batch} is no multiple of {micro_batch} x {n}; use a multiple of {together}"
        )
    return global_batch // together


for n in (1, 2, 3, 4, 5):
    try:
        count = accumulation(48, 2, n)
        line = f"n={n}: each rank adds up {count} micro-batches of 2, together {2 * n * count}"
    except ValueError as error:
        line = f"n={n}: refused, {error}"
    if rank == 0:
        say(line)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the global batch</summary>
#
# *Say:* "micro-batch is a memory question, global batch is a science
# question, the rest is division". *Usual mistakes:* `batch_size` in a config file: of what? Let the room guess for
# a framework they know. *When late:* the table only.
#
# </details>

# %% [markdown]
# ## Two ways to split the data (CORE, 10 min)
#
# **Why.** Every rank runs the same file, so every rank would read the same data. There are two ways out:
#
# ![Left: one shuffled deck is dealt to four ranks, each card to one rank. Right: each rank throws its own dice and draws from
# the whole deck](../assets/05_two_splits.svg)
#
# - **Partition:** all ranks shuffle one deck *in the same way* and each takes its own cards. Seeds must be *equal*.
# - **Draw:** each rank draws at random from the whole data. Seeds must *differ*.
#
# First the partition. An epoch's order must depend on the epoch, so the epoch goes into the seed (`SeedSequence`
# mixes the two; why they are not added, you see below).


# %%
# %%ranks
def order_of(length, epoch, seed=0):
    """The order in which an epoch reads 0 ... length-1: the same on every rank."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch,))).permutation(length)


say(f"epoch 0: I read {order_of(12, epoch=0)[rank::world_size].tolist()}")
say(f"epoch 1: I read {order_of(12, epoch=1)[rank::world_size].tolist()}")

# %% [markdown]
# Now 13 sequences. A [**sampler**](../assets/glossary.md#sampler) decides what a rank reads, and in which order.
# PyTorch's `DistributedSampler` shuffles by seed and epoch, and deals, as we do.
#
# **Predict.** 13 cards for 4 ranks. Ours gives one rank four and the others three. The library insists that all ranks
# get the same number. What can it do?
#
# <details><summary>Answer</summary>
#
# Deal some cards twice (16 cards, three of them doubled: its default), or keep some back (12, one is lost:
# `drop_last=True`). Equal shares keep the ranks in step: with unequal ones, the rank that has one batch more waits
# in an all-reduce to which nobody comes.
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
readers = {
    "ours": order_of(13, epoch=0)[rank::world_size].tolist(),
    "DistributedSampler": list(DistributedSampler(range(13), world_size, rank)),
    "DistributedSampler, drop_last": list(DistributedSampler(range(13), world_size, rank, drop_last=True)),
    "the course's PartitionedSampler": list(PartitionedSampler(13, rank, world_size)),
}
for name, mine in readers.items():
    counts = Counter(int(i) for part in everyone(mine) for i in part)
    lost, repeated = 13 - len(counts), sum(times - 1 for times in counts.values())
    if rank == 0:
        say(f"{name}: {lost} lost, {repeated} read twice")

# %% [markdown]
# In training a doubled sequence in a million does no harm. In *evaluation* it does: an accuracy over 50,000 images
# must be over these 50,000. There deal unequal shares, add up sums and counts, and let no rank wait for another in
# the middle.
#
# ### `set_epoch`
#
# `DistributedSampler` cannot know which epoch it is. You tell it, on every rank, before each epoch:
# `sampler.set_epoch(epoch)`. If you do not, nothing fails. Below are three recorded runs of eight epochs over 240
# sequences on four ranks. In one the loop is right, in one `set_epoch` was forgotten, in one a rank called it with
# another number than the rest.

# %%
# %%ranks
runs = checks.three_runs()  # {"A": read, "B": read, "C": read}; read[epoch][rank] lists indices


def who_read(read, i):
    """The rank that read sequence i, for each time that it was read."""
    return [r for epoch in read for r, mine in enumerate(epoch) if i in mine]


if rank == 0:
    found = {name: [who_read(read, i) for i in range(240)] for name, read in runs.items()}
    alt = "histograms of three runs: how often a sequence was read, and by how many ranks"
    show(many_ranks.times_read(found), "three_runs", alt)

# %% [markdown]
# **Predict.** Which run is which? In a right run, by how many of four ranks is a sequence read in eight epochs?
#
# <details><summary>Answer</summary>
#
# A forgot: every sequence stays with one rank for ever. In B some sequences were read less often than eight times,
# others more: one rank deals from another deck. C is right: a sequence misses a given rank with probability (3/4)⁸
# = 10 %, so it meets 4·0.9 = 3.6 ranks on average.
#
# </details>
#
# ### Exercise 1: find the `set_epoch` bug
#
# Write `diagnose(read, length)`, which returns `"fine"`, `"same order"` or `"ranks disagree"`. `read[epoch][rank]`
# is the list of indices that the rank read; there are `length` sequences. Careful: one rank alone reads everything
# in every epoch, and the library doubles a few where the deal does not come out even.


# %%
# %%ranks
def diagnose(read, length):
    raise NotImplementedError  # your turn


checks.diagnose(diagnose, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 1
def diagnose(read, length):
    for epoch in read:
        if len({i for mine in epoch for i in mine}) < length:
            return "ranks disagree"  # one is lost; a doubled one alone is the library's filling
    return "same order" if all(epoch == read[0] for epoch in read) else "fine"


checks.diagnose(diagnose, ranks, solution=True)

# %% [markdown]
# Forgetting it is common: two of many threads are
# [distributed_tutorial#5](https://github.com/yangkky/distributed_tutorial/issues/5), where a reader missed it in a
# tutorial that many had copied, and [pytorch/examples#501](https://github.com/pytorch/examples/issues/501), where a
# user asks what the call is for.
#
# ### Draw, with streams that do not meet
#
# The other way: rank r draws sequences at random, with replacement. No dealing, no epochs to announce, any length.
# nanoGPT reads like this.
#
# **Predict.** 15,685 draws from 15,685 sequences. What share of them is seen at least once?
#
# <details><summary>Answer</summary>
#
# 1 - (1 - 1/N)ᴺ, which is 1 - 1/e = 63 %. The rest comes later; some come several times. For a model that sees its
# data many times, or never finishes one pass, that is no loss.
#
# </details>

# %%
# %%ranks
length = len(corpus.train_ids) // 64
mine = list(DrawnSampler(length, rank, world_size, num_samples=len(range(rank, length, world_size)), seed=1))
drawn = [i for part in everyone(mine) for i in part]
if rank == 0:
    say(f"{len(drawn):,} draws met {100 * len(set(drawn)) / length:.1f} % of {length:,} sequences")

# %% [markdown]
# Here the seeds must differ, and that is where it goes wrong. A launcher for clusters seeds each process with
# `seed * (rank + 1) * (local_rank + 1)`. It looks safe: no two ranks have the same factors.
#
# **Predict.** Two nodes with 8 GPUs each. Which ranks draw the same data?
#
# <details><summary>Answer</summary>
#
# Rank 2 is local rank 2: 3·3 = 9. Rank 8 is local rank 0 of the second node: 9·1 = 9. On two nodes that is the only
# pair. On more nodes there are more. And with `seed = 0` all ranks agree.
#
# </details>


# %% tags=["nbval-check-output"]
# %%ranks
def with_equal_seeds(num_nodes, per_node=8, seed=1):
    """Groups of ranks whose seed is the same."""
    found = {}
    for r in range(num_nodes * per_node):
        found.setdefault(seed * (r + 1) * (r % per_node + 1), []).append(r)
    return [group for group in found.values() if len(group) > 1]


if rank == 0:
    say(f"2 nodes x 8: {with_equal_seeds(2)}")
    for nodes in (4, 16, 64):
        groups = with_equal_seeds(nodes)
        say(f"{nodes} nodes x 8: {sum(map(len, groups))} of {8 * nodes} ranks share a seed with another")
    twins = [np.random.default_rng(9).integers(0, 15_685, 4).tolist() for _ in ("rank 2", "rank 8")]
    say(f"seed 9, on rank 2 and on rank 8, draws {twins[0]} and {twins[1]}")

# %% [markdown]
# Nothing fails here either: the gradient is averaged over 16 shares of which two are equal, and you paid for 16. Do
# not invent arithmetic with seeds; there are generators made for this. numpy's `SeedSequence` takes a *key* beside
# the seed and mixes both: streams of different keys have nothing in common, of different seeds neither (while
# `seed + rank` makes rank 1 of seed 1 the twin of rank 0 of seed 2, so that your three "independent" repetitions
# share most of their data).


# %% tags=["nbval-check-output"]
# %%ranks
def stream(rank, epoch=0, seed=1):
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch, rank)))


first_draws = [tuple(stream(r).integers(0, 2**62, 2)) for r in range(4096)]
first_draws += [tuple(stream(r, seed=2).integers(0, 2**62, 2)) for r in range(4096)]
if rank == 0:
    say(f"{len(first_draws)} streams of two seeds, {len(set(first_draws))} different ones")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: splitting</summary>
#
# *Say:* "equal seeds for the deck, different seeds for the dice". Half of the
# room will have a training script in which one of them is wrong; let them look. *Usual mistakes:* shuffling per
# rank after dealing (each rank keeps its cards for ever); `set_epoch` on rank 0 only. *When late:* drop the
# SeedSequence cell. *Ask:* "which of these mistakes would you see in the loss?"
#
# </details>

# %% [markdown]
# ## An order that can be resumed (CORE, 3 min)
#
# **Why.** Jobs end in the middle of an epoch. A run that starts the epoch again reads its beginning twice and its
# end less often; after nine restarts the model may have seen the first tenth of the deck ten times.
#
# ![A shuffled deck: the first six cards have been dealt to three ranks, the remaining ones are dealt to
# two](../assets/05_resume.svg)
#
# If the order is a function of seed and epoch, and dealt like cards, then what was read is the *beginning* of the
# order, and one number says where to go on, on any number of ranks. The course's sampler keeps exactly this:

# %% tags=["nbval-check-output"]
# %%ranks
deck = PartitionedSampler(1000, rank, world_size, seed=7)
deck.set_epoch(2)
cards = iter(deck)
before = [next(cards) for _ in range(100)]  # each rank reads 100, then the job ends
saved = deck.state_dict()  # goes into the checkpoint
say(f"saved: {saved}")

new_size = world_size + 1  # the next job gets another number of ranks; here we play all of them
after = []
for r in range(new_size):
    resumed = PartitionedSampler(1000, r, new_size, seed=7)
    resumed.load_state_dict(saved)
    after += list(resumed)
times = Counter([i for part in everyone(before) for i in part] + after)
if rank == 0:
    say(f"{len(times)} of 1000 read, none more than {max(times.values())} time")

# %% [markdown]
# Exercise 2, at the end, asks for such an order.

# %% [markdown]
# ## A loss that counts every token once (CORE, 7 min)
#
# **Why.** Sentences differ in length. A batch is padded, and the padding does not count, so every rank has *another
# number of tokens*. The mean loss of a rank is then a mean over its own number, and averaging gradients, as DDP
# does, is the warm-up's mean of means.
#
# Here is such a batch: the targets of each sequence end after 4 to 32 characters; what is beyond has the target -100,
# which `F.cross_entropy` leaves out.


# %%
# %%ranks
def uneven_batch(step):
    """Inputs and targets [B, T] of an update: sequences of 4 to T characters, -100 where one has ended."""
    x_BT, y_BT = get_batch(corpus.train_ids, step, global_batch, T, 0, 1, seed=5)
    draw = np.random.default_rng(np.random.SeedSequence(6, spawn_key=(step,)))
    length_B1 = torch.from_numpy(np.sort(draw.integers(4, T + 1, global_batch)))[:, None]  # short ones first
    return x_BT.to(device), y_BT.masked_fill(torch.arange(T) >= length_B1, -100).to(device)


def loss_sum(model, x_bT, y_bT):
    """The losses of all tokens that count, added up."""
    logits_bTV, _ = model(x_bT)
    return F.cross_entropy(logits_bTV.flatten(0, 1), y_bT.flatten(), ignore_index=-100, reduction="sum")


x_BT, y_BT = uneven_batch(0)
x_bT, y_bT = x_BT.chunk(world_size)[rank], y_BT.chunk(world_size)[rank]
my_tokens = (y_bT != -100).sum()
say(f"my {len(x_bT)} sequences have {my_tokens} tokens")

# %% [markdown]
# (Sorting by length saves padding. Where each rank then takes a contiguous part, the counts differ as much as here;
# in a shuffled batch they differ less, but they differ.)
#
# **Predict.** Rank r has k_r tokens. The gradient should be that of the mean over all tokens of all ranks. What
# must a rank divide its *sum* by, and what then happens between the ranks: a sum or a mean?
#
# <details><summary>Answer</summary>
#
# By the number of tokens of *all* ranks, which one all-reduce of one integer tells, before backward. Then gradients
# are *added* over the ranks. DDP takes means, so with DDP multiply the loss by the number of ranks.
#
# </details>

# %%
# %%ranks
catch_up(globals(), "uneven_batch", "loss_sum")

# %%
# %%ranks
x_BT, y_BT = uneven_batch(0)
x_bT, y_bT = x_BT.chunk(world_size)[rank], y_BT.chunk(world_size)[rank]
all_tokens = (y_bT != -100).sum()
dist.all_reduce(all_tokens)  # all ranks: one integer

ours = new_model(torch.float64)  # from scratch: sums, divided by the count of all
(loss_sum(ours, x_bT, y_bT) / all_tokens).backward()
for p in ours.parameters():
    dist.all_reduce(p.grad)

library = DDP(new_model(torch.float64))  # the library's means
with wire.watch() as seen:
    (world_size * loss_sum(library, x_bT, y_bT) / all_tokens).backward()

naive = DDP(new_model(torch.float64))  # the usual way: each rank its own mean
(loss_sum(naive, x_bT, y_bT) / (y_bT != -100).sum()).backward()

single = new_model(torch.float64)  # one process that reads it all
(loss_sum(single, x_BT, y_BT) / (y_BT != -100).sum()).backward()

# %% tags=["nbval-check-output"]
# %%ranks
ours_P, library_P, naive_P, single_P = (
    flat(p.grad for p in m.parameters()) for m in (ours, library, naive, single)
)
for name, grad_P in {"ours": ours_P, "the library, weighted": library_P}.items():
    assert (grad_P - single_P).abs().max() < 1e-10, name
    if rank == 0:
        say(f"{name}: equal to one process to 1e-10")
metrics.exact(weighted_gradient=fingerprint([ours_P]))
metrics.close(weighted_gradient_norm=ours_P.norm())

# %% [markdown]
# And the mean of means? Not noise, which would average out, but a *bias*: it weighs the tokens of short sequences
# more, in every step. The other lines are what the cure costs: the gradient, as before, and one integer.

# %%
# %%ranks
off = ((naive_P - single_P).norm() / single_P.norm()).item()
gradient_bytes = 8 * config.num_params()
if rank == 0:
    say(f"mean of means: {100 * off:.1f} % of the gradient's length off")
    say(f"weighted: {seen.payload_bytes():,} bytes of gradients, predicted {gradient_bytes:,}")
    say(f"and {all_tokens.nbytes} bytes of a count")
metrics.measured(mean_of_means_off=off)

# %% [markdown]
# The same happens *in time*: accumulation over micro-batches with different counts is a mean of means on one GPU. The
# largest libraries did this for years; in October 2024 it was mended in
# [transformers#34191](https://github.com/huggingface/transformers/pull/34191) and in
# [torchtune#1875](https://github.com/pytorch/torchtune/pull/1875), and
# [torchtune#1917](https://github.com/pytorch/torchtune/pull/1917) shows that ranks and micro-batches are one problem.
# Exercise 3 has both at once.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the loss</summary>
#
# *Say:* "an average of averages is a weighted average; ask who chose the
# weights". *Usual mistakes:* dividing by the local count and fixing it with the number of ranks; counting padding. *When
# late:* skip reading the code, show the three lines of output. *Ask:* "our sequences all have the same length. Are
# we safe?" (Yes, until somebody masks prompts.)
#
# </details>

# %% [markdown]
# ## The same trajectory on 1, 2 and 4 ranks (CORE, 5 min)
#
# **Why.** Now all of it together: the same global batch, dealt to n ranks, in micro-batches, weighted by tokens. If
# everything is right, the losses on one rank and on four are the same numbers. This is the test that a change of your
# training code must pass before you trust it with a thousand GPU hours.
#
# We train on the first rank, the first two, and so on, while the others wait. Plain SGD: Adam divides by the size
# of the gradient, and so would hide a wrong factor.
#
# **Predict.** "The same numbers": how many digits, in float64 and in float32? Does the difference stay, or grow
# from step to step?
#
# <details><summary>Answer</summary>
#
# Not to the last bit: sums are taken in another order. Float64 carries 16 digits, float32 seven, and each update
# passes its rounding on to the next, so the difference grows, slowly here and faster with a larger learning rate.
# 1e-10 in float64 is a limit that only rounding can keep.
#
# </details>

# %%
# %%ranks
catch_up(globals(), "uneven_batch", "loss_sum")


# %%
# %%ranks
def gradient_row(model, x_bT, y_bT, divisor):
    """Gradients and loss of this rank's share, added up over its micro-batches, in one row [P + 1]."""
    loss = 0
    for x, y in zip(x_bT.split(micro_batch), y_bT.split(micro_batch), strict=True):
        part = loss_sum(model, x, y) / divisor
        part.backward()  # adds up: accumulation
        loss = loss + part.detach()
    return torch.cat([flat(p.grad for p in model.parameters()), loss.view(1)])


# %% [markdown]
# (Note `/ divisor` with an integer: `1 / divisor` first would be a float32, and float64 training would carry seven
# digits.)


# %%
# %%ranks
def trajectory(n, dtype=torch.float64, count_all=True):
    """Losses [steps] of SGD on the first n ranks, None on the others. All ranks call it."""
    group = dist.new_group(range(n))
    if rank >= n:
        return None
    model, losses = new_model(dtype), []
    sizes = [p.numel() for p in model.parameters()]
    for step in range(steps):
        x_bT, y_bT = (ids_BT.chunk(n)[rank] for ids_BT in uneven_batch(step))
        tokens = (y_bT != -100).sum()
        if count_all:
            dist.all_reduce(tokens, group=group)
        divisor = tokens if count_all else tokens * n  # the latter makes the mean of the ranks' means
        row = gradient_row(model, x_bT, y_bT, divisor)
        dist.all_reduce(row, group=group)  # gradients and loss in one call
        for p, grad in zip(model.parameters(), row.split([*sizes, 1]), strict=False):
            p.data -= 0.5 * grad.view_as(p)
            p.grad = None
        losses.append(row[-1])
    return torch.stack(losses)


# %% [markdown]
# Three times on each number of ranks: in float64, in float32, and in float64 with the mean of the ranks' means.

# %%
# %%ranks --timeout 120
sizes = sorted({n for n in (1, 2, 4, world_size) if n <= world_size})
by_n = {n: trajectory(n) for n in sizes}
in_float32 = {n: trajectory(n, torch.float32) for n in sizes}
wrong = {1: by_n[1]} | {n: trajectory(n, count_all=False) for n in sizes[1:]}
if rank == 0:
    for n, losses in by_n.items():
        say(f"n={n}: {global_batch // micro_batch // n:2d} micro-batches each, last loss {losses[-1]:.15f}")

# %% tags=["nbval-check-output"]
# %%ranks
if rank == 0:
    for n, losses in by_n.items():
        apart = (losses - by_n[1]).abs().max().item()
        assert apart < 1e-10, f"n={n} is {apart:.1e} off"
        say(f"n={n}: {steps} losses, equal to those of one rank to 1e-10")
    metrics.exact(trajectory=by_n[world_size], trajectory_fp32=in_float32[world_size])
    metrics.close(trajectory_close=by_n[world_size])

# %% [markdown]
# The picture: float64 stays below 1e-13, float32 below 1e-5, and the mean of the ranks' means rises to 0.1 and more. At
# update 0 it is smaller: all characters then cost nearly ln 65, and weights hardly show. On two ranks float32's
# rounding would nearly hide it there; in float64 it stands out at every update.

# %%
# %%ranks
if rank == 0 and world_size > 1:
    kinds = {"mean of the ranks' means": wrong, "float32": in_float32, "float64": by_n}
    alt = "differences of losses: float64 below 1e-13, float32 below 1e-5, the mean of ranks' means up to 0.2"
    show(many_ranks.differences(kinds, limit=1e-10), "trajectories", alt)

# %% [markdown]
# Points that are missing: there the two losses were equal to the last bit.

# %% [markdown]
# ## Learning rate against batch (CORE, 9 min)
#
# **Why.** With more ranks you may *want* a larger global batch: fewer updates, less communication per character.
# What must change with it?
#
# First, what a larger batch buys. You may have heard that it "smooths the landscape". It does not: the function
# that is minimised is the same. The gradient of a batch is a *noisy measurement* of the gradient of everything, and
# a mean over B sequences has 1/B of the **variance**.
#
# ![Gradients of single batches scatter around the gradient of everything: widely for batches of 1, less for 4, little for
# 16](../assets/05_noise.svg)
#
# Measure it: 256 gradients, each of one sequence; means over groups of B; how far are they from the mean of all?


# %%
# %%ranks
def gradients(model, num=256):
    """This rank's share of `num` gradients, each of one sequence: [b, P]."""
    x_BT, y_BT = (ids.to(device) for ids in get_batch(corpus.train_ids, 0, num, T, 0, 1, seed=11))
    rows = []
    for i in range(rank, num, world_size):
        model.zero_grad()
        model(x_BT[i : i + 1], y_BT[i : i + 1])[1].backward()
        rows.append(flat(p.grad for p in model.parameters()))
    return torch.stack(rows)


def summed(value):
    """The sum over the ranks, as a tensor. All ranks call it."""
    value = torch.as_tensor(value, dtype=torch.float32, device=device)
    dist.all_reduce(value)
    return value


grads_bP = gradients(new_model())
mean_P = summed(grads_bP.sum(0)) / 256
variance = (summed(((grads_bP - mean_P) ** 2).sum()) / 255).item()  # of one sequence, all parameters together

# %% [markdown]
# A prediction without a free number: the variance of one sequence, divided by B (less 1/256, as the mean of all
# contains the group).

# %%
# %%ranks
sizes_B, measured, predicted = (1, 2, 4, 8, 16, 32), [], []
for size in sizes_B:
    groups = grads_bP[: len(grads_bP) // size * size].unflatten(0, (-1, size)).mean(1)
    total, count = summed(((groups - mean_P) ** 2).sum()), summed(len(groups))
    measured.append((total / count).item())
    predicted.append(variance * (1 / size - 1 / 256))  # 1/256: the groups are part of the 256
if rank == 0:
    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.loglog(sizes_B, measured, **MEASURED, ls="none", label="measured")
    axes.loglog(sizes_B, predicted, **PREDICTED, label="predicted: variance of one x (1/B - 1/256)")
    axes.set(xlabel="sequences B", ylabel="squared distance", title="noise of the gradient of B sequences")
    axes.set_xticks(sizes_B, sizes_B)
    axes.legend()
    show(figure, "variance", "the noise falls as 1/B, points on a straight line")
    ratios = [m / p for m, p in zip(measured, predicted, strict=True)]
    say(f"measured / predicted: {min(ratios):.2f} to {max(ratios):.2f}")

# %% [markdown]
# The points lie on the line. The scatter at the right end is that of few groups (eight of 32); it has no trend.
#
# Now the rules. Take a batch k times as large, so k times fewer updates for the same data:
#
# ![Eight short steps along a valley, each from its own gradient, and one step eight times as long, from the mean of eight
# gradients at the start](../assets/05_one_long_step.svg)
#
# | rule | learning rate | for | argument |
# |---|---|---|---|
# | keep | η | | nothing to tune; after the same data the model has moved k times less |
# | linear | kη, with [warm-up](../assets/glossary.md#learning-rate-warm-up) | SGD, Goyal et al. 2017 | k small steps ≈ one long step, *if the gradient hardly changes on the way*; early it does, hence the warm-up |
# | square root | √k·η | Adam, Malladi et al. 2022 | Adam divides by the gradient's size; where that is mostly noise, noise √k times smaller makes steps √k times longer already; k times fewer steps need k in all, so √k is left for the rate (the paper's rule moves β₁, β₂ and ε too, we do not) |
# | per layer | from ‖w‖/‖g‖ | LARS (You et al. 2017), LAMB (You et al. 2020) | each layer moves by the same share of its weights; for batches of tens of thousands |
#
# **Warm-up** here means the learning rate: it grows from near 0 over the first tenth of the updates, in all runs but
# the two called *no warm-up*.
#
# **Predict.** Batch 4, then 32 (k = 8), the same 98,304 characters, so 768 updates and 96. Which rule comes closest
# to the small batch: for SGD, for Adam? Will any reach it?
#
# <details><summary>Answer</summary>
#
# With these settings: for SGD the linear rule, even better without warm-up; it does not quite reach the small
# batch. For Adam the square root and the linear rule with warm-up, a tie. Without warm-up Adam's linear rule ends
# where keeping the rate ends, and that is last: 96 short steps do not lead far.
#
# </details>
#
# Each run is small, so no run needs two ranks: **every rank takes other settings**. That is the cheapest
# parallelism there is, and on a cluster it is an array job (`jobs/sweep.pbs`).


# %%
# %%ranks
def train(kind, batch, lr, warm_up):
    """(training loss of each update, validation loss) of one training in this process alone."""
    model = new_model()
    make = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}[kind]
    optimizer, losses = make(model.parameters(), lr=lr), []
    updates = sweep_tokens // (batch * T)
    for step in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / (warm_up * updates + 1e-9))
        x_BT, y_BT = (ids.to(device) for ids in get_batch(corpus.train_ids, step, batch, T, 0, 1, seed=5))
        optimizer.zero_grad()
        loss = model(x_BT, y_BT)[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        val = [ids.to(device) for ids in get_batch(corpus.val_ids, 0, 256, T, 0, 1, seed=9)]
        return torch.stack(losses).tolist(), model(*val)[1].item()


# %%
# %%ranks --timeout 300
k, base = 8, {"SGD": 0.025, "Adam": 5e-4}
rules = {"small batch": 1, "keep": 1, "square root": math.sqrt(k), "linear": k, "linear, no warm-up": k}
# of 4 ranks the last two get two runs, not three: those of the small batch, which are long
order = ["keep", "small batch", *list(rules)[2:]]
settings = [(kind, rule) for rule in order for kind in base]

results = {}
for kind, rule in settings[rank::world_size]:  # no communication at all
    batch = 4 if rule == "small batch" else 4 * k
    warm_up = 0.0 if rule == "linear, no warm-up" else 0.1
    results[kind, rule] = train(kind, batch, rules[rule] * base[kind], warm_up)
results = {name: result for part in everyone(results) for name, result in part.items()}

# %%
# %%ranks
if rank == 0:
    titles = {kind: f"{kind}: batch 4, and {4 * k} by rule" for kind in base}
    alt = (
        "the small batch is lowest; nearest are linear without warm-up for SGD, "
        "linear and square root for Adam"
    )
    show(many_ranks.by_rule(results, titles, list(rules), sweep_tokens), "rules", alt)
val = {f"{kind}, {rule}": results[kind, rule][1] for kind, rule in settings}
metrics.close(tolerance=0.1, sweep=[value if math.isfinite(value) else 0.0 for value in val.values()])

# %%
# %%ranks
if rank == 0:
    for kind in base:
        best = val[f"{kind}, small batch"]
        say(f"{kind}, batch 4, rate {base[kind]:g}: validation {best:.3f}")
        for rule in list(rules)[1:]:
            value = val[f"{kind}, {rule}"]
            rate = rules[rule] * base[kind]
            say(f"  batch {4 * k}, {rule:19} rate {rate:.4f}: {value:.3f}, {value - best:+.3f}")

# %% [markdown]
# **The residual.** No rule reaches the small batch. A rule promises the same curve in the limit of small steps, and
# k = 8 is not small: the warm-up alone takes a tenth of the 96 updates, and one long step is not eight short ones
# where the valley bends. Warm-up decides for Adam here; this SGD it only costs updates, because this small model
# bears a rate of 0.2 from the start. Two more things to take home. The rules say how to change a learning rate that
# was *good*; if yours was too small, a larger batch "wins" by any rule. And one run per setting has no error bar:
# differences of some hundredths mean nothing. (The two base rates were picked so that the rules come apart; from
# others they may end in another order.)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: learning rate</summary>
#
# The sweep takes about ten seconds; collect bets before it. *Say:* "the
# rules are for crossing the street, not the ocean: from there, tune". *Usual mistakes:* comparing at equal numbers
# of updates instead of equal data; scaling the rate for accumulation as if it were another batch. *When late:* the
# stored picture. *Ask:* "where is the batch so large that no rule helps?" (Next section.)
#
# </details>

# %% [markdown]
# ### How large may a batch be? The gradient noise scale (MORE, 6 min)
#
# While noise is larger than the gradient itself, twice the batch is worth nearly two updates. Where the noise is
# small, the second half of the batch tells what the first half has told. The border is the [**gradient noise
# scale**](../assets/glossary.md#gradient-noise-scale) (McCandlish et al. 2018): B_noise = (variance of one
# sequence's gradient) / |mean gradient|². Data parallel training gives it away for nothing: the ranks' own
# gradients, before the all-reduce, and their mean, after it.
#
# **Predict.** Is it larger at the first step, or after some training?
#
# <details><summary>Answer</summary>
#
# After some training. At first all sequences agree on what is wrong (the frequencies of letters): a strong
# gradient. Later they disagree, the mean shrinks and the noise stays. So the useful batch *grows* during training.
#
# </details>

# %%
# %%ranks
catch_up(globals(), "gradients", "summed")


# %%
# %%ranks --timeout 120
def noise_scale(model, num=256):
    """B_noise in sequences, from gradients of one sequence each. All ranks call it."""
    grads_bP = gradients(model, num)
    mean_P = summed(grads_bP.sum(0)) / num
    variance = summed(((grads_bP - mean_P) ** 2).sum()) / (num - 1)
    signal = (mean_P**2).sum() - variance / num  # the mean of 256 still carries noise
    return (variance / signal).item()


model = DDP(new_model())
optimizer, scales = torch.optim.Adam(model.parameters(), lr=2e-3), {0: noise_scale(model.module)}
for step in range(1, 5 * steps + 1):
    x_bT, y_bT = get_batch(corpus.train_ids, step, global_batch, T, rank, world_size, seed=5)
    optimizer.zero_grad()
    model(x_bT.to(device), y_bT.to(device))[1].backward()
    optimizer.step()
    if step in (steps, 5 * steps):
        scales[step] = noise_scale(model.module)

# %% [markdown]
# What follows from it, in the paper's formulas: with a batch of B a target takes S_min·(1 + B_noise/B) updates,
# which read E_min·(1 + B/B_noise) data. S_min is the fewest updates, with a huge batch; E_min the least data, with
# a tiny one.

# %%
# %%ranks
if rank == 0:
    for step, scale in scales.items():
        say(f"after {step:2d} updates: noise scale {scale:6.1f} sequences, {scale * T:8,.0f} characters")
    for ratio in (1 / 8, 1 / 2, 1, 2, 8):
        say(f"batch = {ratio:5g} B_noise: {1 + 1 / ratio:4.2f} S_min updates read {1 + ratio:4.2f} E_min")
metrics.close(tolerance=0.2, noise_scale=list(scales.values()))

# %% [markdown]
# (Rough numbers: at a noise scale of 136 the mean of 256 gradients is itself off by √(136/256) = 73 % of its
# length. The formula subtracts that, and what is left is rough.) A batch equal to the noise scale, the **critical
# batch**, needs twice the minimum of both. Far below it you waste time, far above it data. A batch of 32 would be
# far above it in the first updates, which is where Adam's linear rule needed its warm-up, and below it soon after.

# %% [markdown]
# ## Experiment: strong and weak scaling (CORE, 7 min)
#
# **Why.** "How much faster on more ranks?" is two questions. [*Strong
# scaling*](../assets/glossary.md#strong-scaling): the same global batch, shared by more ranks. [*Weak
# scaling*](../assets/glossary.md#weak-scaling): the same micro-batch on each, the global batch grows.
#
# ![Strong scaling: a block of work is cut into ever thinner slices while a part that cannot be cut stays. Weak scaling: the
# slices keep their size and their number grows](../assets/05_scaling.svg)
#
# Let s be the share of a step that does not get faster with ranks.
#
# - **Amdahl 1967**, strong: speed-up = 1 / (s + (1-s)/n). It never exceeds 1/s.
# - **Gustafson 1988**, weak: n ranks do (1-s)·n + s times the work in the same time. It never stops.
#
# **Predict.** s = 5 %, 64 ranks. What do the two say?
#
# <details><summary>Answer</summary>
#
# Amdahl 1/(0.05 + 0.95/64) = 15.4, Gustafson 64 - 0.05·63 = 60.9. Both are right; they answer different questions.
# (s is a share of the step on *one* rank for Amdahl, of the step on *n* ranks for Gustafson.)
#
# </details>
#
# Neither knows about communication, which grows with n. First on the **virtual network**: ranks send real messages,
# but time is computed, so that runs repeat exactly. A step has 20 ms that can be shared and 1 ms that cannot; then
# comes a ring all-reduce of our gradient, on links with 50 µs and 1 GB/s.

# %%
# %%ranks
link, work_s, serial_s = Link(latency_s=50e-6, bytes_per_s=1e9), 20e-3, 1e-3
num_params = config.num_params()


def virtual_step(n, strong):
    """Virtual seconds of a step on the first n ranks, 0 on the others. All ranks call it."""
    group = dist.new_group(range(n))
    if rank >= n:
        return 0.0
    network = VirtualNetwork(ranks, link, group=group)
    network.compute(serial_s, "serial")
    network.compute(work_s / n if strong else work_s, "work")
    network.all_reduce(torch.ones(num_params))
    return network.clock_s


def ring_s(n):
    return 2 * (n - 1) * link.cost_s(4 * math.ceil(num_params / n))


sizes = list(range(1, world_size + 1))
virtual = {strong: [virtual_step(n, strong) for n in sizes] for strong in (True, False)}

# %% [markdown]
# Fit Amdahl's law, T(n) = a + b/n, to these few points, as people do with a few nodes, and extrapolate to 64.
# Beside it the formula with the ring in it, which nobody had to fit.


# %%
# %%ranks
def amdahl_fit(sizes, times_s):
    """(a, b) of T(n) = a + b/n by least squares; s = a / (a + b)."""
    columns = np.stack([np.ones(len(sizes)), 1 / np.array(sizes)], axis=1)
    a, b = np.linalg.lstsq(columns, np.array(times_s), rcond=None)[0]
    return a, b


a, b = amdahl_fit(sizes, virtual[True])
if rank == 0:
    for n, strong_s, weak_s in zip(sizes, virtual[True], virtual[False], strict=True):
        exact_s = serial_s + work_s / n + ring_s(n)
        strong_ms, exact_ms, weak_ms = (1e3 * seconds for seconds in (strong_s, exact_s, weak_s))
        say(f"n={n}: strong {strong_ms:6.3f} ms, by formula {exact_ms:6.3f}; weak {weak_ms:6.3f} ms")
    say(f"Amdahl's fit: s = {100 * a / (a + b):.1f} %, on 64 ranks {1e3 * (a + b / 64):.2f} ms")
    exact_s = serial_s + work_s / 64 + ring_s(64)
    say(f"with the ring: on 64 ranks {1e3 * exact_s:.2f} ms, {exact_s / (a + b / 64):.1f} times as long")
metrics.exact(virtual_strong_s=virtual[True], virtual_weak_s=virtual[False])

# %% [markdown]
# Now the same two questions on this machine, with real DDP.
#
# **Predict.** Where do the two speed-ups stop rising?
#
# <details><summary>Answer</summary>
#
# At the number of cores, which the second line of the run tells: beyond it ranks share them, and messages come on
# top.
#
# </details>


# %%
# %%ranks
def step_of(n, sequences):
    """A function: one step of the first n ranks with `sequences` on each, averaged. All ranks call both."""
    group = dist.new_group(range(n))
    model = DDP(new_model(), process_group=group) if rank < n else None
    x_bT, y_bT = (ids.to(device) for ids in get_batch(corpus.train_ids, 0, sequences, T, 0, 1, seed=rank))

    def step():
        if rank < n:
            model(x_bT, y_bT)[1].backward()

    return step


calls = {("strong", n): step_of(n, 96 // n) for n in sizes} | {("weak", n): step_of(n, 96) for n in sizes}

# %% [markdown]
# All settings take turns, so that a busy moment of the machine hits each of them, and the median forgets it.

# %%
# %%ranks --timeout 120
samples = {key: [] for key in calls}
for turn in range(2 * repeats + 1):
    for key, call in calls.items():
        samples[key].append(median_s(call, 1, ranks, warm_up=int(turn == 0)).slowest_s)
strong_s = [float(np.median(samples["strong", n])) for n in sizes]
weak_s = [float(np.median(samples["weak", n])) for n in sizes]
a, b = amdahl_fit(sizes, strong_s)

# %%
# %%ranks
if rank == 0:
    many, fit = np.arange(1, 65), amdahl_fit(sizes, virtual[True])
    curves_s = {
        "predicted, with the ring": [serial_s + work_s / n + ring_s(n) for n in many],
        "Amdahl, fitted to the points": fit[0] + fit[1] / many,
        "ideal": (serial_s + work_s) / many,
    }
    speed_ups = {
        "strong, measured": [strong_s[0] / t for t in strong_s],
        f"Amdahl, s = {100 * a / (a + b):.0f} %": [(a + b) / (a + b / n) for n in sizes],
        "weak, measured": [n * weak_s[0] / t for n, t in zip(sizes, weak_s, strict=True)],
    }
    alt = (
        "left: virtual step time falls, then rises from 14 ranks on, Amdahl's fit goes on falling; "
        "right: speed-ups here"
    )
    show(many_ranks.scaling(sizes, virtual[True], curves_s, speed_ups), "scaling", alt)
metrics.measured(strong_s=strong_s, weak_s=weak_s)

# %% [markdown]
# **The residual.** Left: the points lie on the formula exactly, because the formula *is* the schedule. Amdahl's line
# passes within one per cent of the same points and is still wrong at 64 ranks, by the factor printed above: the
# ring's latency grows with n, and a fit to a few small n cannot know that. It took the ring for a serial share, which
# is why its s is not the 1/21 = 4.8 % that we put in. Extrapolate from a model of what happens, not from a curve.
#
# Right: up to as many ranks as you have cores both curves rise; beyond that ranks share cores, weak scaling stays
# where it was and strong scaling may fall, and the fitted "serial share" is then not serial work at all, but
# missing hardware (a share above 100 % says that more ranks made it slower). A fit always gives a number. What it *means*
# you must know from elsewhere.
#
# Beside it a GPU run, as soon as one is recorded:

# %%
# %%ranks
if rank == 0:
    here = {f"strong, n={n}": (strong_s[n - 1], "s", f"strong_s.{n - 1}") for n in sizes}
    here |= {f"weak, n={n}": (weak_s[n - 1], "s", f"weak_s.{n - 1}") for n in sizes}
    say(recorded_runs.beside("05", here))

# %% [markdown]
# ### A published series, read with care
#
# Somebody measured weak scaling, images per second on 1, 2, 4, 8 and 16 GPUs: **281, 382, 689, 1341, 3627**. Each
# is a mean of 10 steps; at one GPU it says ± 76. The table, a published one, gives no more. From such a table people
# quote 136 %, 60 % and 81 %.
#
# **Predict.** Where do these three percentages come from? Which of them is an efficiency?
#
# <details><summary>Answer</summary>
#
# 382/281 = 136 % is two GPUs' *throughput*; as efficiency it is half of that, 68 %. 1341/(8·281) = 60 % and
# 3627/(16·281) = 81 % are efficiencies. So it goes 100, 68, 61, 60, 81: an efficiency that rises by a third from 8
# to 16 GPUs.
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
images_per_s = {1: 281, 2: 382, 4: 689, 8: 1341, 16: 3627}
error = 76 / math.sqrt(10)  # of a mean of 10 steps, if 76 is the standard deviation of one
readings = {"the error of the mean": 76, "the spread of one step": error, "1.96 such spreads": error / 1.96}
if rank == 0:
    for name, off in readings.items():
        say(f"if 76 is {name}, one GPU does 281 +- {off:.0f}, and the efficiencies are")
        for n, rate in list(images_per_s.items())[1:]:
            middle, low, high = (100 * rate / n / (281 + shift) for shift in (0, off, -off))
            say(f"  {n:2d} GPUs: {middle:3.0f} %, {low:3.0f} to {high:3.0f} %")
    say(f"from 8 to 16 GPUs: {3627 / 1341:.2f} times as fast")

# %% [markdown]
# What does "± 76" mean? The error of the mean, the standard deviation of one step, or 1.96 of them (as Horovod's
# benchmark script prints)? The table does not say. "60 %" lies between 47 and 82, or 55 and 65, or 57 and 62 (one
# standard error each way: expect one in three outside); the last two hold if the ten steps are independent.
#
# But do not compare 60 % with 81 % by these intervals: both have the *one-GPU* number below the line. Its error
# shifts all efficiencies together, and cancels in their ratio, 1.35. What would decide is the error of the other
# numbers, and none is given. Look at the last line: 16 GPUs are 2.7 times as fast as 8. More than twice is no
# scaling law. Something else was different: a cold start inside the ten steps, another node, another batch. **± 27
# % over ten steps says: warm up, measure longer, repeat, and give every point its error bar.**

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: scaling</summary>
#
# *Say:* "every scaling plot has a denominator; ask for its error bar". *Usual
# mistakes:* 136 % "superlinear!"; mixing up whose share s is; extrapolating. *When late:* the published series
# only. *Ask:* "your supervisor wants one number. Which?" (Time to the same loss, for a given cost.)
#
# </details>

# %% [markdown]
# ### One slow rank (MORE, 4 min)
#
# An all-reduce ends when the last rank has come. One rank that computes 3 times as slowly, a
# [**straggler**](../assets/glossary.md#straggler), slows down *all*.
#
# ![Four ranks: one computes three times as long, and the three others wait for it](../assets/05_straggler.svg)
#
# **Predict.** Rank 1 is 3 times as slow in updates 3 to 5 (without a rank 1: rank 0). In the map of *waiting*
# times, who is dark?
#
# <details><summary>Answer</summary>
#
# All others. The culprit is the one that never waits: look for the *light* row.
#
# </details>


# %%
# %%ranks
def slowdown(r, step):
    return 3.0 if r == min(1, world_size - 1) and 3 <= step <= 5 else 1.0


network = VirtualNetwork(ranks, Link(50e-6, 1e9), slowdown=slowdown)
for step in range(8):
    with network.step(step):
        network.compute(10e-3, "forward and backward")
        network.all_reduce(torch.ones(config.num_params()))
spent = network.gather_steps()  # all ranks
if rank == 0:
    figure = heat_map(spent["waiting"], "time spent waiting", "s", virtual=True)
    show(figure, "straggler", "waiting by rank and step: in steps 3 to 5 all ranks but the slow one wait")
    total = sum(spent["total"][0])
    say(f"8 updates took {1e3 * total:.0f} virtual ms instead of {1e3 * (total - 3 * 20e-3):.0f}")
    metrics.exact(straggler_waiting_s=spent["waiting"])

# %% [markdown]
# ## Feed the ranks (MORE, 10 min)
#
# **Why.** A GPU that waits for a file computes nothing, and 500 ranks that open one file at the same moment are
# what file systems fear. Four ways to bring its share of a file to each rank:
#
# ![Four ways: every rank maps one file; every rank has its own file; all ranks read one file together by MPI-IO; one reader
# reads and sends the others their parts](../assets/05_reading.svg)
#
# - **Memory map:** every rank opens the same file, and the operating system fetches the pages that are touched. Nothing to
#   prepare.
# - **A file per rank:** no two ranks touch one file. But 4 ranks' files are no use to 8, and a million small files are worse
#   than one large.
# - **MPI-IO:** the ranks read *together*; the library lets a few of them fetch large pieces and passes them on.
# - **Reader ranks:** do that yourself: one rank per node reads, then scatters.

# %%
# %%ranks
where = [str(run_folder(ranks) / "tokens")] if rank == 0 else [None]
dist.broadcast_object_list(where, src=0)  # all ranks must name one folder
folder, tokens = Path(where[0]), corpus.train_ids.repeat(8)
if rank == 0:
    folder.mkdir()
    token_file.write_tokens(folder / "all.bin", tokens)
    file_shares.write_own_files(folder, tokens, world_size)
    say(f"{len(tokens):,} tokens, {(folder / 'all.bin').stat().st_size / 1e6:.1f} MB")
dist.barrier()
mine = file_shares.share(len(tokens), rank, world_size)
say(f"my share: tokens {mine.start:,} to {mine.stop - 1:,}")

# %% [markdown]
# **Predict.** Which is the fastest on this machine, where the file is in memory already?
#
# <details><summary>Answer</summary>
#
# The memory map: it copies what is in the page cache, and asks nobody. (A rank's own file is checked against its
# sha256, which is what most of its time goes into; a flipped bit in the data is worth the time.) The other two move
# data between processes. What they save, thousands of ranks that ask one file server, you cannot see here.
#
# </details>

# %%
# %%ranks
ways = {
    "memory map": lambda: token_file.memory_map(folder / "all.bin")[mine].clone(),
    "own file": lambda: file_shares.read_own_file(folder, rank, world_size),
    "1 reader scatters": lambda: file_shares.scatter_from_readers(folder / "all.bin", 1, ranks),
}
comm = mpi_world()
if comm is not None:
    ways["MPI-IO"] = lambda: file_shares.read_mpi_io(folder / "all.bin", comm)
elif rank == 0:
    say("MPI-IO needs an MPI world: mpiexec -n 4 python scripts/05_same_science.py")
for name, read in ways.items():
    assert torch.equal(read().long(), tokens[mine]), name
    took_s = median_s(read, repeats, ranks).slowest_s
    if rank == 0:
        say(f"{name:18} {1e3 * took_s:7.2f} ms, {2 * len(tokens) / took_s / 1e9:6.2f} GB/s all together")
    metrics.measured(**{f"read {name}": took_s})

# %%
# %%ranks
dist.barrier()
if rank == 0:
    shutil.rmtree(folder)

# %% [markdown]
# All of them gave the same tokens. On a cluster: large files on **Lustre** lie on one server each unless you, or your
# site's default, *stripe* them (`lfs getstripe -d` tells), and then all ranks queue at that one. Before you copy a
# large shared file into a folder, let it be spread over eight servers in pieces of 4 MiB; it holds for files written
# afterwards:
#
# ```bash
# lfs setstripe --stripe-count 8 --stripe-size 4M data/tokens/     # large files that many ranks read
# lfs getstripe data/tokens/all.bin                               # how it lies
# ```
#
# Small files want no striping. What is read many times and fits belongs near the rank: copied to the node's own
# disk or `/dev/shm` at the start of the job ("preload"), once per node, not once per rank.
#
# ### Read ahead
#
# "Computation stalls during communication", says many a profile, and likewise during reading. The cure is the same
# as for gradients: begin earlier. `Prefetch` lets a thread read the next batches while this one is computed.
#
# ![Reading and computing one after the other; below, each read under the computation before](../assets/05_prefetch.svg)
#
# **Predict.** Reading a batch takes 8 ms, a step 12 ms. How long do 20 steps take one after the other, how long with
# prefetch? And with a disk that takes 20 ms?
#
# <details><summary>Answer</summary>
#
# 20·(8 + 12) = 400 ms; with prefetch 20·12 + 8 = 248 ms, the larger of the two and the first batch. With 20 ms the
# disk is the slower part: 20·20 + 12 = 412 ms, and no depth of prefetch helps.
#
# </details>


# %%
# %%ranks
def slow_batches(read_s, num=20):
    for step in range(num):
        time.sleep(read_s)  # a disk of `read_s` per batch; a sleeping thread leaves the core to the others
        yield step


def train_on(batches, compute_s=12e-3):
    begin = time.perf_counter()
    for _ in batches:
        time.sleep(compute_s)  # a GPU that is busy
    return time.perf_counter() - begin


# %% [markdown]
# With and without, on the two disks:

# %%
# %%ranks
for read_s in (8e-3, 20e-3):
    plain_s = train_on(slow_batches(read_s))
    with Prefetch(slow_batches(read_s)) as ahead:
        ahead_s = train_on(ahead)
    predicted_s = 20 * max(read_s, 12e-3) + min(read_s, 12e-3)
    if rank == 0:
        plain_ms, ahead_ms = 1e3 * plain_s, 1e3 * ahead_s
        say(f"read {1e3 * read_s:2.0f} ms: one after the other {plain_ms:.0f} ms, ahead {ahead_ms:.0f} ms")
        say(f"  predicted {20e3 * (read_s + 12e-3):.0f} and {1e3 * predicted_s:.0f}")
    metrics.measured(**{f"prefetch_{read_s}": [plain_s, ahead_s]})

# %% [markdown]
# (Disk and GPU are *simulated* here, by sleeping; the thread is real.) The measured times are a little above the
# prediction: a sleep ends late, a hand-over between threads costs some tens of microseconds, and a busy machine
# adds to both.

# %% [markdown]
# ## Exercises (MORE, 15 min)
#
# Exercise 1 was `diagnose`. Each check runs your answer in a process group of its own: you cannot break anything.
#
# ### Exercise 2: a sharded order that loses and repeats nothing
#
# An epoch's order is dealt like cards: of n ranks, rank r reads numbers r, r+n, r+2n, ... of it. Write
# `remaining(length, epoch, done, rank, n)`: the list of the sequences that rank `rank` of `n` still has to read in
# this epoch, in order, after *all ranks together* have read the first `done` of that order. For any `n`, also another
# one than before the stop: nothing lost, nothing read twice, shuffled anew in each epoch, shares that differ by at
# most one. No messages.


# %%
# %%ranks
def remaining(length, epoch, done, rank, n):
    raise NotImplementedError  # your turn


checks.sharded_order(remaining, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 2
def remaining(length, epoch, done, rank, n):
    # a generator of its own, that no other code in the process can move
    generator = np.random.default_rng(np.random.SeedSequence(0, spawn_key=(epoch,)))
    order = generator.permutation(length)  # the same on every rank ...
    return order[done:][rank::n].tolist()  # ... dealt like cards, so that what was read is its beginning


checks.sharded_order(remaining, ranks, solution=True)

# %% [markdown]
# ### Exercise 3: token-weighted loss, with accumulation
#
# `ddp` is a classifier in the library's DDP, `micro_batches` a list of `(x, y)`; targets of -100 do not count. Write
# `weighted_backward(ddp, micro_batches)`, so that in the end each gradient is that of the mean over *all tokens of
# all ranks and micro-batches*. Only one micro-batch goes through the model at a time. Gradients travel once
# (`ddp.no_sync()`, lesson 03). A micro-batch, or a whole rank, may have no token at all.


# %%
# %%ranks
def weighted_backward(ddp, micro_batches):
    raise NotImplementedError  # your turn


checks.token_weighted(weighted_backward, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 3
def weighted_backward(ddp, micro_batches):
    tokens = sum((y != -100).sum() for _, y in micro_batches)
    dist.all_reduce(tokens)  # all ranks: one integer, before the first backward

    def backward(x, y):
        total = F.cross_entropy(ddp(x), y, ignore_index=-100, reduction="sum")
        (world_size * total / tokens).backward()  # DDP will divide by world_size

    with ddp.no_sync():
        for x, y in micro_batches[:-1]:
            backward(x, y)
    backward(*micro_batches[-1])


checks.token_weighted(weighted_backward, ranks, solution=True)

# %% [markdown]
# ## A bug from the zoo (CORE, 4 min)
#
# Somebody measures how a training script scales. The configuration asks for 8 micro-batches of 12 sequences per
# update, on every rank, so an update on n ranks should read n times as many sequences. Below are the relevant lines
# in our words; in the original they lie a page apart. It runs, the loss falls. **Look at the reported speed-up.
# What is wrong, and what do you measure to find out?**


# %%
# %%ranks
def update_of(n, accumulate=8):
    """(a function: one update on the first n ranks; a list: what this rank read in it). All ranks call it."""
    group = dist.new_group(range(n))
    model = DDP(new_model(), process_group=group) if rank < n else None
    accumulate //= n
    x_bT, y_bT = (ids.to(device) for ids in get_batch(corpus.train_ids, 0, 12, T, 0, 1, seed=rank))
    read = []

    def update():
        read.clear()
        for i in range(accumulate if rank < n else 0):
            model.require_backward_grad_sync = i == accumulate - 1  # what no_sync() sets, before forward
            (model(x_bT, y_bT)[1] / accumulate).backward()
            read.append(len(x_bT))

    return update, read


updates = {n: update_of(n) for n in sorted({n for n in (1, 2, 4, world_size) if n <= world_size})}

# %%
# %%ranks --timeout 120
samples = {n: [] for n in updates}
for turn in range(2 * repeats + 1):  # they take turns
    for n, (update, _) in updates.items():
        samples[n].append(median_s(update, 1, ranks, warm_up=int(turn == 0)).slowest_s)
update_s = {n: float(np.median(times)) for n, times in samples.items()}
if rank == 0:
    for n, seconds in update_s.items():
        reported = 8 * 12 * n / seconds  # what was asked for, divided by the time
        say(f"n={n}: {reported:6,.0f} sequences/s, speed-up {n * update_s[1] / seconds:.1f}")

# %% [markdown]
# A speed-up above the number of ranks, or of cores (the run's second line tells how many), is too good to be true.
# The rate divides what was *asked for* by the time. Count what was *read*:

# %%
# %%ranks
for n, (_, read) in updates.items():
    counted = torch.tensor(sum(read), device=device)
    dist.all_reduce(counted)
    if rank == 0:
        say(f"n={n}: asked for {8 * 12 * n} sequences per update, read {counted}")
        say(f"  so the speed-up is {counted / 96 * update_s[1] / update_s[n]:.1f}")
if rank == 0:
    say(f"n=16: each rank would read {8 // 16} micro-batches")

# %% [markdown]
# <details><summary>Answer</summary>
#
# `accumulate //= n`. The setting is meant for all ranks *together*; each gets its part of it, silently. That keeps
# the global batch constant, which is a good idea; but who believes to have asked for 8 per rank gets another batch
# than that, and a scaling curve of updates that shrink. On 3 ranks 8 // 3 = 2 loses a quarter, on 16 nothing is
# left. It is [nanoGPT#354](https://github.com/karpathy/nanoGPT/issues/354) (there an assertion demands that it
# comes out even): somebody wants to measure scaling, finds the line, sets 5 times the number of GPUs, and still
# wonders about the times.
#
# </details>
#
# **Mend it:** let the *global batch* be what one asks for, compute the rest, and say it.
# `accumulation(global_batch, micro_batch, n)` from the beginning of this lesson refuses what does not come out
# even; and log the sequences that were counted, not those that were configured.

# %%
# %%ranks
catch_up(globals(), "accumulation")

# %% tags=["nbval-check-output"]
# %%ranks
for n in (1, 2, 4, 16):
    try:
        count = accumulation(16, 2, n)
        line = f"global batch 16, n={n}: {count} micro-batches of 2 each, together {n * count * 2}"
    except ValueError as error:
        line = f"global batch 16, n={n}: refused, {error}"
    if rank == 0:
        say(line)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# Let them bet on what is wrong from the speed-ups alone. Most suspect the timing.
# The instrument is a counter of what was read, the same as for samplers. *Ask:* "is it a bug at all?" (The
# arithmetic is what its author wanted; the silence is the bug.)
#
# </details>

# %% [markdown]
# ## On the cluster
#
# The trainer keeps this lesson's rules: `--train.global-batch` is what you ask for, the accumulation follows from
# `--train.micro-batch` and the number of ranks, and a batch that does not split is refused before the first step.
#
# ```bash
# qsub -v TRAIN_ARGS="--train.global-batch 96 --train.micro-batch 12" jobs/train.pbs     # PBS
# TRAIN_ARGS="--train.global-batch 96 --train.micro-batch 12" sbatch jobs/train.slurm    # Slurm
# qsub jobs/sweep.pbs                                    # learning rates and batches of jobs/sweep.tsv, a job each
# sbatch jobs/sweep.slurm                                # the same for Slurm
# NPROC_PER_NODE=2 bash jobs/train.pbs --train.steps 20  # no scheduler: the same on this machine
# ```
#
# **What changes on GPUs.** The micro-batch is as large as memory allows; below some size a GPU is not busy, so
# strong scaling ends sooner than here. In bf16 rounding alone moves the third digit: test in float64, on a small
# model, on two GPUs, before the long run. Reading matters more: a GPU eats far more tokens per second than this
# machine.
#
# **What to look for:** the same `trajectory_close` in the run's `metrics.json` from `mpiexec -n 8` as on your
# laptop, to 1e-10; the sequences that were counted beside those that were asked for; a time per step whose *spread*
# you know, on 1, 2, 4 nodes, before anyone computes an efficiency.

# %% [markdown]
# ## Recap
#
# 1. Global batch = micro-batch × ranks × accumulation; ask for the global batch, and let the rest follow or refuse.
# 2. Deal one deck with equal seeds and `set_epoch`, or throw dice with streams of their own; count what was read.
# 3. Add up sums and counts over ranks and micro-batches, divide once: equal to one process to 1e-10 in float64.
# 4. A larger batch has less noise, not another landscape: linear with warm-up for SGD, square root for Adam, up to the noise
#    scale.
# 5. Amdahl asks about the same work, Gustafson about more; neither knows the network, and no efficiency is better than its
#    error bar.
#
# ## Further reading
#
# - Goyal et al. 2017, [Accurate, large minibatch SGD](https://arxiv.org/abs/1706.02677): the linear rule, warm-up, and a list
#   of subtle mistakes.
# - McCandlish et al. 2018, [An empirical model of large-batch training](https://arxiv.org/abs/1812.06162): the noise scale.
# - Malladi et al. 2022, [On the SDEs and scaling rules for adaptive gradient algorithms](https://arxiv.org/abs/2205.10287):
#   the square root for Adam.
# - You et al. 2017, [LARS](https://arxiv.org/abs/1708.03888); You et al. 2020, [LAMB](https://arxiv.org/abs/1904.00962);
#   Yamazaki et al. 2019, [Yet another accelerated SGD](https://arxiv.org/abs/1903.12650): 81,920 images per update.
# - Amdahl 1967, *Validity of the single processor approach*; Gustafson 1988, *Reevaluating Amdahl's law*.
# - PyTorch,
#   [`DistributedSampler`](https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler),
#   and for unequal numbers of batches [`Join`](https://docs.pytorch.org/tutorials/advanced/generic_join.html).

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
