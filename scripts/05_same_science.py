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
# **45 minutes** for the sections marked CORE, 107 with those marked MORE.
#
# After this lesson **you can**
# - give each rank its own data, and count what was read;
# - get the same losses on any number of ranks, and prove it to ten digits;
# - say how large a batch is useful, and how far its learning rate may grow.
#
# **You need** [data parallel](../assets/glossary.md#data-parallel) ([lesson 03](03_data_parallel.ipynb)): replicas of a model on n
# [ranks](../assets/glossary.md#rank) each read their share of a batch; an [all-reduce](../assets/glossary.md#all-reduce) averages
# the gradients.
#
# **New here:** [epoch](../assets/glossary.md#epoch), [sampler](../assets/glossary.md#sampler), [token-weighted
# loss](../assets/glossary.md#token-weighted-loss), [gradient noise scale](../assets/glossary.md#gradient-noise-scale).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: the wrong curve 5, global batch 4, one deck 9, the loss 11, the trajectory 4, useful batch 8, zoo 3.
#
# *Say:* the number of ranks is a matter of speed, and must not show in the result.
#
# *Three usual mistakes:* thinking of the batch per GPU as *the* batch; averaging averages; calling a run "twice as fast" that
# makes half as many updates.
#
# *When late:* give solutions A and C, keep build B, the trajectory and the zoo.
#
# *Ask the room:* "You double the GPUs and change nothing else. Name everything that is now different in your experiment."
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
micro_batch = 2  # sequences in one forward pass of one rank, at least 1
global_batch = 0  # sequences per update, all ranks together; 0: 48, or more where it does not split, at least 0
steps = 10  # updates of each trajectory, at least 2
sweep_tokens = 12288  # characters that each run of the sweep reads, at least 1024
repeats = 5  # samples of each timing, at least 1

# %% [markdown]
# ## Start (CORE, 1 min)
#
# The first cell starts the ranks. The folded one makes a **small ShakespeareGPT** (32 characters at a time) that we
# can train many times. If you leave a build as it is, the cells below use the lesson's own lines.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("05_same_science", globals())

# %%
# %%ranks
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands import ____, Metrics, card, compare, fingerprint, join, leave, refuse, say, show
from manyhands.checks import same_science as checks
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.launch import recorded_runs
from manyhands.lessons import same_science as lesson
from torch.nn.parallel import DistributedDataParallel as DDP

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device

# %% jupyter={"source_hidden": true}
# %%ranks
together = micro_batch * world_size
if global_batch == 0:
    global_batch = -(-48 // together) * together
if global_batch % together:
    refuse(
        f"global_batch={global_batch} is no multiple of micro_batch={micro_batch} x {world_size} ranks; "
        f"use a multiple of {together}"
    )
corpus = load_corpus(ranks)
T = 32
config = GPTConfig(vocab_size=len(corpus.vocab), block_size=T, n_layer=2, n_head=2, n_embd=64)
given = {"micro_batch": micro_batch, "global_batch": global_batch, "steps": steps}
metrics = Metrics(ranks, corpus, given | {"sweep_tokens": sweep_tokens})
group_of = {n: dist.new_group(range(n)) for n in (1, 2, 4, world_size) if n <= world_size}  # the first n ranks
sizes = sorted(group_of)


def new_model(dtype=torch.float32, seed=1337):
    """The small GPT with its first weights, the same on every rank, because the seed is."""
    torch.manual_seed(seed)
    return GPT(config).to(device, dtype)


def flat(tensors):
    """All these numbers in one row."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def everyone(value):
    """The value of each rank, in a list. All ranks call it."""
    values = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def validation(model):
    """The loss on 256 sequences that nobody trains on."""
    with torch.no_grad():
        x_BT, y_BT = get_batch(corpus.val_ids, 0, 256, T, 0, 1, seed=9)
        return model(x_BT.to(device), y_BT.to(device))[1].item()


def curve(n, batch_of):
    """Validation losses of a training on the first n ranks, None on the others. All ranks call it."""
    group = group_of[n]
    if rank >= n:
        return None
    ddp, losses = DDP(new_model(), process_group=group), []
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-3)
    for update in range(4 * steps):
        x_bT, y_bT = batch_of(update)
        optimizer.zero_grad()
        ddp(x_bT.to(device), y_bT.to(device))[1].backward()
        optimizer.step()
        losses.append(validation(ddp.module))
    return losses


# %% [markdown]
# ## Four ranks, and the curve of one (CORE, 5 min)
#
# Somebody has a training script that works on one GPU. Its `loader` returns 12 sequences for each update. Now the same
# script runs on all ranks. DDP averages the gradients, every rank is busy, the loss falls, and there is no error.
# `curve(n, loader)` (folded) trains on the first n ranks and returns the losses:


# %%
# %%ranks --timeout 120
def loader(update):
    return get_batch(corpus.train_ids, update, 12, T, 0, 1, seed=1)


curves = {"1 rank": curve(1, loader), f"{world_size} ranks": curve(world_size, loader)}

# %% jupyter={"source_hidden": true}
# %%ranks
if rank == 0:
    figure = lesson.draw_curves(curves, "validation loss", "the same loader on one rank and on all")
    show(figure, "same_loader", "two curves of validation losses by update: they lie on each other")
    one, many = curves.values()
    say(f"largest difference of the two curves: {max(abs(a - b) for a, b in zip(one, many, strict=True)):.0e}")

# %% [markdown]
# **Predict.** The two curves are the same. On 4 ranks, an update should learn from 4 · 12 = 48 sequences. How many
# *different* sequences does it learn from?

# %%
# %%ranks
guess_different = ____  # your turn: type a number

# %% tags=["nbval-check-output"]
# %%ranks
rows = [tuple(row) for part in everyone(loader(0)[0].tolist()) for row in part]
compare("different sequences in an update of 4 ranks", "guess_different", len(set(rows)))

# %% [markdown]
# Every rank runs the same file with the same seed, so every rank reads the same data. The average of equal gradients
# is the same gradient. You pay for four ranks and get the work of one. **Count what was read**, because no error tells
# you.

# %% [markdown]
# ## The global batch (CORE, 4 min)
#
# ![Two ranks, three micro-batches each, of two sequences: twelve sequences, one update](../assets/05_global_batch.svg)
#
# > **global batch = micro-batch × ranks × accumulation**
#
# A [micro-batch](../assets/glossary.md#micro-batch) is the sequences in one forward pass on one rank.
# [Accumulation](../assets/glossary.md#accumulation) is how many micro-batches a rank adds up before the update. An
# [**epoch**](../assets/glossary.md#epoch) is one pass over the data.
#
# **Predict.** Lesson 03's GPT reads 1,003,854 characters, 64 at a time, 12 sequences per micro-batch: 1,307 updates per epoch on
# one rank. How many on 1,024 ranks?

# %%
# %%ranks
guess_updates = ____  # your turn: type a number

# %% tags=["nbval-check-output"]
# %%ranks
compare("updates per epoch on 1,024 ranks", "guess_updates", 1_003_854 // 64 // (12 * 1024))

# %% [markdown]
# With one update per epoch the model learns almost nothing. There are two ways out: keep the global batch and
# accumulate less, or let each update go further (a later section). So let the user set the *global batch*, compute the
# accumulation from it, and refuse to start if it does not divide.

# %% [markdown]
# ## Deal one deck (CORE, 9 min)
#
# ![A shuffled deck: six cards are dealt to three ranks, the remaining ones to two](../assets/05_resume.svg)
#
# Think of the sequences as cards. All ranks shuffle the deck *in the same way*, and each takes its own cards. The
# order must be the same on every rank, and new in every epoch. So it comes from a key of a seed, here 0, and the
# epoch: `np.random.SeedSequence(0, spawn_key=(epoch,))`.
#
# Jobs stop in the middle of an epoch. If the ranks take cards in turn, then together they have read the first `done`
# cards of the order. So this one number is enough to go on, also with another number of ranks.
#
# ### Build A: your share of what is left
#
# The epoch's order is a permutation of 0 ... `length`-1. All ranks together have read its first `done` numbers. Return
# the list of numbers that rank `rank` of `n` still reads. Each number that is left goes to exactly one rank, also if
# `n` has changed since the stop. The lists' lengths differ by at most one.
#
# `np.random.default_rng(key)` makes a generator, and its `permutation(length)` makes the order.


# %%
# %%ranks
def remaining(length, epoch, done, rank, n):
    ____  # three lines: the key, the order of the whole epoch, this rank's cards of what is left


checks.sharded_order(remaining, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution A</summary>
#
# ```python
# def remaining(length, epoch, done, rank, n):
#     key = np.random.SeedSequence(0, spawn_key=(epoch,))
#     order = np.random.default_rng(key).permutation(length)  # the same on every rank
#     return order[done:][rank::n].tolist()  # dealt like cards: together the ranks read it from its beginning
# ```
#
# </details>

# %% [markdown]
# `dealt` is the loader from above, with `remaining`. Now an update on four ranks learns from four times as many
# sequences, and the curves differ:


# %%
# %%ranks
def dealt(update, n=world_size):
    length = len(corpus.train_ids) // (T + 1)
    mine = [int(i) for i in remaining(length, 0, 12 * n * update, rank, n)][:12]
    ids_bT = torch.stack([corpus.train_ids[i * (T + 1) : (i + 1) * (T + 1)] for i in mine]).long()
    return ids_bT[:, :-1], ids_bT[:, 1:]


# %% jupyter={"source_hidden": true}
# %%ranks --timeout 120
read = [tuple(row) for part in everyone(dealt(0)[0].tolist()) for row in part]
last = curve(1, lambda update: dealt(update, 1)), curve(world_size, dealt)
if rank == 0:
    say(f"an update reads {len(read)} sequences, {len(set(read))} different ones")
    say(f"loss after {4 * steps} updates: 1 rank {last[0][-1]:.2f}, {world_size} ranks {last[1][-1]:.2f}")

# %% [markdown]
# PyTorch's [`DistributedSampler`](../assets/glossary.md#sampler) deals in the same way. Call its `set_epoch(epoch)` on
# every rank before each epoch. Otherwise every epoch has the same order.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: splitting</summary>
#
# *Usual mistakes:* dealing first and shuffling afterwards (each rank keeps its cards forever); `[done:]` after the deal instead of
# before it; `set_epoch` on rank 0 only. *Ask:* "which of these mistakes would you see in the loss?"
#
# </details>

# %% [markdown]
# ## Count every token once (CORE, 11 min)
#
# Ranks have different numbers of tokens. Rank 0 has 3 tokens, with the losses 1, 2 and 3. Rank 1 has one, with a loss of 6.
#
# **Predict.** What is the mean loss of the four tokens?

# %%
# %%ranks
guess_mean = ____  # your turn: type a number

# %% tags=["nbval-check-output"]
# %%ranks
compare("the mean loss of the four tokens", "guess_mean", (1 + 2 + 3 + 6) / 4)

# %% [markdown]
# ![Rank 0 holds the losses 1, 2 and 3, rank 1 holds 6: the mean of the two means is 4, the mean of the four numbers is
# 3](../assets/05_token_mean.svg)
#
# The mean of the two means, 2 and 6, is 4. It counts rank 1's one token three times as much as each of the others.
# DDP takes the mean of the ranks' gradients, so it makes this mistake. Instead, **add up the losses of all ranks, add
# up their counts of tokens, and divide once.**
#
# In our batch each sequence ends after 4 to 32 characters. After its end the targets are -100: `F.cross_entropy`
# ignores them.


# %% jupyter={"source_hidden": true}
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


# %% jupyter={"source_hidden": true}
# %%ranks
x_BT, y_BT = uneven_batch(0)
x_bT, y_bT = x_BT.chunk(world_size)[rank], y_BT.chunk(world_size)[rank]
say(f"my {len(x_bT)} sequences have {(y_bT != -100).sum()} tokens")

# %% [markdown]
# ### Build B: the token-weighted loss
#
# `total` is the sum of the losses of this rank's tokens. `y_bT` are its targets; a token counts if its target is not
# -100. Return the loss on which this rank calls `backward()`. DDP then averages the gradients of all ranks. The result
# must be the gradient of the mean over **all tokens of all ranks**. Send only one integer. A rank may have no token at
# all.


# %%
# %%ranks
def token_mean(total, y_bT):
    ____  # three lines: count my tokens, add up the counts, and undo what DDP will do


checks.token_mean(token_mean, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def token_mean(total, y_bT):
#     tokens = (y_bT != -100).sum()
#     dist.all_reduce(tokens)  # all ranks: one integer
#     return world_size * total / tokens  # DDP will divide by world_size
# ```
#
# </details>

# %% [markdown]
# Compare three gradients of one batch: your loss under DDP, each rank's own mean under DDP, and one process that reads
# the whole batch.

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.measure import wire

yours, naive, single = DDP(new_model(torch.float64)), DDP(new_model(torch.float64)), new_model(torch.float64)
with wire.watch() as seen:  # counts what this rank communicates
    token_mean(loss_sum(yours, x_bT, y_bT), y_bT).backward()
(loss_sum(naive, x_bT, y_bT) / (y_bT != -100).sum()).backward()
(loss_sum(single, x_BT, y_BT) / (y_BT != -100).sum()).backward()
yours_P, naive_P, single_P = (flat(p.grad for p in model.parameters()) for model in (yours, naive, single))
assert (yours_P - single_P).abs().max() < 1e-10
off = ((naive_P - single_P).norm() / single_P.norm()).item()
if rank == 0:
    say("your loss: the gradient of one process, to 1e-10")
    say(f"the mean of means: off by {100 * off:.1f} % of the gradient's length")
    say(f"communicated: {seen.payload_bytes():,} bytes, {8 * config.num_params():,} of them gradients")
metrics.exact(weighted_gradient=fingerprint([yours_P]))
metrics.close(weighted_gradient_norm=yours_P.norm())
metrics.measured(mean_of_means_off=off)

# %% [markdown]
# The same happens when you accumulate micro-batches with different counts. Large libraries mended that in October 2024
# ([transformers#34191](https://github.com/huggingface/transformers/pull/34191),
# [torchtune#1875](https://github.com/pytorch/torchtune/pull/1875)).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the loss</summary>
#
# *Say:* "an average of averages is a weighted average; ask who chose the weights". *Usual mistakes:* dividing by the local count;
# counting padding; forgetting that DDP divides. *Ask:* "our sequences all have the same length. Are we safe?" (Until somebody masks
# prompts.)
#
# </details>

# %% [markdown]
# ## The same trajectory on 1, 2 and 4 ranks (CORE, 4 min)
#
# Now put both builds together: `remaining` deals each global batch to n ranks, and `token_mean` weighs its loss. One, two
# and four ranks must get the same losses. `descend` (folded) is plain SGD on the mean of the ranks' gradients, as DDP
# makes it. Adam divides by the size of the gradient, and so would hide a wrong factor.

# %% jupyter={"source_hidden": true}
# %%ranks
from torch.nn.utils import vector_to_parameters


def descend(model, total, y_bT):
    """A step of SGD on the mean of all ranks' gradients. Returns the loss per token, of all ranks. All ranks call it."""
    of_rank = total.detach(), (y_bT != -100).sum()
    row = torch.cat([flat(p.grad for p in model.parameters()), *(number.to(total.dtype).view(1) for number in of_rank)])
    dist.all_reduce(row)  # gradients, losses and counts in one call
    grad_P, (total, tokens) = row[:-2] / world_size, row[-2:]
    vector_to_parameters(flat(model.parameters()) - 0.5 * grad_P, model.parameters())
    model.zero_grad()
    return total / tokens


# %%
# %%ranks
def trajectory(n, dtype=torch.float64, loss_of=token_mean):
    """Losses per token [steps] on the first n ranks; the others take part without a sequence. All ranks call it."""
    model, losses = new_model(dtype), []
    for step in range(steps):
        x_BT, y_BT = uneven_batch(step)
        mine = [int(i) for i in remaining(global_batch, step, 0, rank, n)] if rank < n else []  # build A
        total = loss_sum(model, x_BT[mine], y_BT[mine])
        loss_of(total, y_BT[mine]).backward()  # build B
        losses.append(descend(model, total, y_BT[mine]))
    return torch.stack(losses)


# %% jupyter={"source_hidden": true} tags=["nbval-check-output"]
# %%ranks --timeout 120
by_n = {n: trajectory(n) for n in sizes}
if rank == 0:
    for n, losses in by_n.items():
        assert (losses - by_n[1]).abs().max() < 1e-10, n
        say(f"n={n}: {steps} losses, equal to those of one rank to 1e-10")

# %% [markdown]
# Which difference is rounding, and which is a bug? Below, each training on all ranks is compared with one rank in the
# same precision.

# %% jupyter={"source_hidden": true}
# %%ranks --timeout 120
single_fp32, all_fp32 = trajectory(1, torch.float32), trajectory(world_size, torch.float32)
unweighted = trajectory(world_size, loss_of=lambda total, y_bT: total / (y_bT != -100).sum())
metrics.exact(trajectory=by_n[world_size], trajectory_fp32=all_fp32)
metrics.close(trajectory_close=by_n[world_size])
if rank == 0 and world_size > 1:
    pairs = {
        "mean of means": (unweighted, by_n[1]),
        "float32": (all_fp32, single_fp32),
        "float64": (by_n[world_size], by_n[1]),
    }
    figure = lesson.draw_differences(pairs, 1e-10, f"{world_size} ranks against one")
    alt = "differences of losses at each update, float64 lowest, the mean of means highest"
    show(figure, "trajectories", alt)

# %% [markdown]
# In float64 a mistake is far larger than rounding. In float32 the two are closer. A missing point means no difference.
# Some things still depend on n: BatchNorm's statistics, dropout's masks, and clipping by each rank's own gradient norm.

# %% [markdown]
# ## How large a batch is useful? (CORE, 8 min)
#
# ![Gradients of single batches scatter around the gradient of everything: widely for batches of 1, less for 4, little for
# 16](../assets/05_noise.svg)
#
# With more ranks you may *want* a larger global batch. The gradient of a batch is a noisy measurement of the gradient
# of all data. With k times the batch the noise's variance falls to 1/k, and the learning rate may grow. How much
# depends on the [**gradient noise scale**](../assets/glossary.md#gradient-noise-scale) (McCandlish et al. 2018):
#
# > B_noise = variance of one sequence's gradient / |mean gradient|², and the best rate for batch B is proportional to
# > 1 / (1 + B_noise / B)
#
# If B is far below B_noise, twice the batch allows twice the rate. If B is far above it, a larger batch does not help.


# %% jupyter={"source_hidden": true}
# %%ranks --timeout 120
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


def noise_scale(model, num=256):
    """B_noise in sequences, from gradients of one sequence each. All ranks call it."""
    grads_bP = gradients(model, num)
    mean_P = summed(grads_bP.sum(0)) / num
    variance = summed(((grads_bP - mean_P) ** 2).sum()) / (num - 1)
    signal = (mean_P**2).sum() - variance / num  # the mean of 256 still carries noise
    return (variance / signal).item()


def train(kind, batch, rate, seed):
    """Validation loss of one training in this process alone; that of knowing nothing if it diverged.

    The first tenth of its updates is a warm-up. Of fewer than 20 updates that is one, at the full rate: none.
    """
    model = new_model(seed=seed)
    optimizer = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}[kind](model.parameters(), lr=rate)
    updates = sweep_tokens // (batch * T)
    warm_up = max(1, updates // 10)
    for step in range(updates):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / warm_up)
        x_BT, y_BT = get_batch(corpus.train_ids, step, batch, T, 0, 1, seed=seed)
        optimizer.zero_grad()
        model(x_BT.to(device), y_BT.to(device))[1].backward()
        optimizer.step()
    knowing_nothing = float(np.log(len(corpus.vocab)))
    loss = validation(model)
    return loss if loss < knowing_nothing else knowing_nothing


ddp = DDP(new_model())
optimizer, scales = torch.optim.SGD(ddp.parameters(), lr=0.16), {0: noise_scale(ddp.module)}
for step in range(1, 40 * steps + 1):  # with batches of 4 sequences, on every rank the same
    x_BT, y_BT = get_batch(corpus.train_ids, step, 4, T, 0, 1, seed=5)
    optimizer.zero_grad()
    ddp(x_BT.to(device), y_BT.to(device))[1].backward()
    optimizer.step()
    if step in (5 * steps, 40 * steps):
        scales[step] = noise_scale(ddp.module)
metrics.close(tolerance=0.2, noise_scale=list(scales.values()))

# %% jupyter={"source_hidden": true}
# %%ranks
if rank == 0:
    for step, scale in scales.items():
        say(f"after {step:3d} updates of 4 sequences: B_noise = {scale:.1f} sequences")

# %% [markdown]
# ### Build C: how much further?
#
# Return the factor by which the best rate grows if the batch grows from `batch` to `k * batch`. `noise` is B_noise.
# Divide the formula at `k * batch` by the formula at `batch`.


# %%
# %%ranks
def gain(k, batch, noise):
    return ____


checks.gain(gain, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution C</summary>
#
# ```python
# def gain(k, batch, noise):
#     return (1 + noise / batch) / (1 + noise / (k * batch))
# ```
#
# </details>

# %% [markdown]
# Two rules are common: k times the rate (Goyal et al. 2017, for SGD), and √k times (usual for Adam). Our batch grows
# from 4 to 32 sequences, so k = 8: 8 times the rate, or 2.8 times.
#
# **Predict.** What does your formula say, with the middle one of the three B_noise above? Give one digit after the
# point.

# %%
# %%ranks
guess_gain = ____  # your turn: type a number

# %%
# %%ranks
typical = float(np.median(list(scales.values())))
compare("how much the rate may grow for 8 times the batch", "guess_gain", round(gain(8, 4, typical), 1))

# %% [markdown]
# Try all of them. Every run reads the same number of characters. The rate 0.16 was tuned for batch 4.

# %%
# %%ranks --timeout 600
factors = {"batch 4": 1, "the same": 1, "by the noise scale": gain(8, 4, typical), "square root": 8**0.5, "linear": 8}
runs = [(name, seed) for name in factors for seed in range(min(3, repeats))]
mine = [(name, train("SGD", 4 if name == "batch 4" else 32, 0.16 * factors[name], seed))
        for name, seed in runs[rank::world_size]]  # fmt: skip

# %% jupyter={"source_hidden": true}
# %%ranks
found = {name: [loss for part in everyone(mine) for run, loss in part if run == name] for name in factors}
if rank == 0:
    for name, losses in found.items():
        what = name if name == "batch 4" else f"batch 32, {name}"
        spread = f"({min(losses):.2f} to {max(losses):.2f})"
        diverged = min(losses) >= np.log(len(corpus.vocab))  # `train` says no more of it
        found_loss = "diverged" if diverged else f"loss {np.mean(losses):.2f} {spread}"
        say(f"{what:30} rate x {factors[name]:.1f}: {found_loss}")
    say(f"updates: {sweep_tokens // (4 * T)} with batch 4, {sweep_tokens // (32 * T)} with batch 32")
metrics.close(tolerance=0.1, sweep=[float(np.mean(losses)) for losses in found.values()])

# %% [markdown]
# At equal data the large batch makes an eighth of the updates, and no rate made up for that. With the linear rule the
# training diverged. That is no test of the rule: it asks for a warm-up (Goyal et al.), and a run of 12 updates has no
# room for one. Nor does this run tell the rate by the noise scale from the same rate.
#
# The noise scale was small, and grew. [Merrill et al. 2025](https://arxiv.org/abs/2505.23971) doubt it as a guide, and
# measured which batches help: near 0 at the start, then a rise and a plateau. So they let the batch grow, a **batch-size
# warm-up**, and trained OLMo 1B in 43 % fewer steps. Below, our three values, and the schedule that BLOOM was given:

# %% jupyter={"source_hidden": true}
# %%ranks
if rank == 0:
    here = [[max(1, step) * 4 * T, scale * T] for step, scale in scales.items()]
    figure = lesson.draw_batch_growth(here, recorded_runs.published("05_batch_growth"), "a noise scale, and a schedule")
    show(figure, "batch_growth", "noise scale of our model, and the batches that BLOOM-176B was given, in tokens")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: useful batches</summary>
#
# Collect bets on the linear rule before the run. *Usual mistakes:* comparing at equal numbers of updates instead of equal data;
# scaling the rate for accumulation as if it were a larger batch. *Ask:* "your job asks for 512 GPUs. What do you do with the batch?"
#
# </details>

# %% [markdown]
# ## A bug from the zoo (CORE, 3 min)
#
# Somebody measures how a training script scales. The configuration says: 8 micro-batches of 12 sequences per update on
# every rank. So an update on n ranks should read n · 96 sequences. **Look at the reported speed-up. What is wrong, and
# what do you measure to find out?**


# %%
# %%ranks
def update_on(n, accumulate=8):
    """(a function: one update on the first n ranks; a list: what this rank read in it). All ranks call it."""
    group = group_of[n]
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


# %% jupyter={"source_hidden": true}
# %%ranks --timeout 120
from manyhands.measure.timing import take_turns

updates = {n: update_on(n) for n in (1, 2, 4) if n <= world_size}
update_s = take_turns({n: update for n, (update, _) in updates.items()}, repeats, ranks)
if rank == 0:
    for n, taken in update_s.items():
        ups = sorted(n * one / t for one, t in zip(update_s[1], taken, strict=True))
        say(f"n={n}: reported speed-up {np.median(ups):.1f} ({ups[0]:.1f} to {ups[-1]:.1f})")

# %% [markdown]
# A speed-up above the number of ranks, or of the CPU's cores, cannot be right. The script divides the sequences that
# were *asked for* by the time. Count those that were *read*:

# %% jupyter={"source_hidden": true}
# %%ranks
for n, (_, read) in updates.items():
    counted = torch.tensor(sum(read), device=device)
    dist.all_reduce(counted)
    if rank == 0:
        say(f"n={n}: asked for {8 * 12 * n} sequences per update, read {counted}")
        ups = [counted.item() / 96 * one / t for one, t in zip(update_s[1], update_s[n], strict=True)]
        say(f"  so the speed-up is {np.median(ups):.1f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The line is `accumulate //= n`. The script takes the setting for all ranks *together*, and silently gives each rank
# its part. If you meant 8 per rank, your updates do not grow with the ranks. This is
# [nanoGPT#354](https://github.com/karpathy/nanoGPT/issues/354) (there an assertion demands that it divides).
#
# </details>
#
# **Mend it:** let the user ask for the *global batch*, compute the rest, and refuse what does not divide. Log the
# sequences that were counted, not those that were configured.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# Let them bet on what is wrong from the speed-ups alone. Most suspect the timing.
# The instrument is a counter of what was read, the same as for samplers. *Ask:* "is it a bug at all?" (The
# arithmetic is what its author wanted; the silence is the bug.)
#
# </details>

# %% [markdown]
# ## Recap

# %%
# %%ranks
card(
    "Global batch = micro-batch x ranks x accumulation. Ask for the global batch; refuse what does not come out even.",
    "Deal one deck: equal seeds, the epoch in the key, a share per rank. Count what was read.",
    "Add up sums and counts, divide once: equal to one process to 1e-10 in float64.",
    "A larger batch helps up to a critical size, small at first. Let it grow with the training.",
    "Test 1, 2 and 4 ranks for the same losses before the long run.",
    figure="4 ranks against one: float64 below 1e-10, the mean of means far above",
    command='qsub -v TRAIN_ARGS="--train.global-batch 96 --train.micro-batch 12" jobs/train.pbs',
)

# %% [markdown]
# Next: [lesson 06](06_zero_fsdp.ipynb) shards what all ranks hold. Below is the lab, to pick from.

# %% [markdown]
# ## The library's sampler, and the two ways to split (MORE, 4 min)
#
# ![Left: one shuffled deck is dealt to four ranks, each card to one rank. Right: each rank throws its own dice and draws from
# the whole deck](../assets/05_two_splits.svg)
#
# - **Partition:** all ranks shuffle one deck *in the same way* and each takes its own cards. Seeds must be *equal*.
# - **Draw:** each rank draws at random from the whole data. Seeds must *differ*.

# %% [markdown]
# A [**sampler**](../assets/glossary.md#sampler) decides what a rank reads. PyTorch's `DistributedSampler` shuffles by
# seed and epoch, and deals, as you do. With 13 cards for 4 ranks your function gives one rank four and the others
# three. The library insists on equal numbers, so that no rank waits in an all-reduce that others do not call. Either it
# deals some cards twice, or it drops some:

# %% tags=["nbval-check-output"]
# %%ranks
from collections import Counter
from torch.utils.data.distributed import DistributedSampler

readers = {
    "yours": [int(i) for i in remaining(13, 0, 0, rank, world_size)],
    "DistributedSampler": list(DistributedSampler(range(13), world_size, rank)),
    "DistributedSampler, drop_last": list(DistributedSampler(range(13), world_size, rank, drop_last=True)),
}
for name, mine in readers.items():
    counts = Counter(i for part in everyone(mine) for i in part)
    lost, repeated = 13 - len(counts), sum(times - 1 for times in counts.values())
    if rank == 0:
        say(f"{name}: {lost} lost, {repeated} read twice")

# %% [markdown]
# A doubled sequence hardly matters in training. In *evaluation* it does: there, deal unequal shares, and add up sums and counts.
#
# **Two traps.** `DistributedSampler` cannot know the epoch: call `sampler.set_epoch(epoch)` on every rank before each
# one. If you forget, nothing fails, and every epoch has the same order
# ([distributed_tutorial#5](https://github.com/yangkky/distributed_tutorial/issues/5); exercise 1 finds it). And a
# `DataLoader` with workers asks for indices ahead of the training: save how many sequences the *training* has read.
# (The course's `PartitionedSampler` is your function as a sampler; give that number to its `state_dict(position)`.)
#
# ### Throw dice, from streams that do not meet (MORE, 3 min)
#
# In the other way, each rank draws at random, with replacement. nanoGPT reads like this. Now the seeds must differ. A
# launcher library seeds each process with `seed * (rank + 1) * (local_rank + 1)` ([ezpz,
# `setup_torch`](https://github.com/saforem2/ezpz/blob/17569fe2184e27a472773f94d2bde8e98eb40bd3/src/ezpz/distributed.py)).
# Each pair (rank, local rank) is unique, so this looks safe.
#
# **Predict.** Two nodes with 8 GPUs each, `seed = 1`. Which ranks draw the same data?
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

# %% [markdown]
# Nothing fails here either: you pay for 16 shares, and two are equal. Where ranks must differ, do not invent arithmetic with
# seeds. Put the rank into the key: `SeedSequence(seed, spawn_key=(epoch, rank))`. (Even `seed + rank` is a trap: rank 1
# of seed 1 draws what rank 0 of seed 2 draws. `DistributedSampler` seeds with `seed + epoch`. That
# is safe for its ranks, which all need the same order. But epoch 1 of seed 0 has the order of epoch 0 of seed 1.)

# %% [markdown]
# ### What draws miss, and streams that differ (MORE, 2 min)
#
# **Predict.** 15,685 draws from 15,685 sequences. What share of them is seen at least once?
#
# <details><summary>Answer</summary>
#
# 1 - (1 - 1/N)ᴺ, which is 1 - 1/e = 63 %. Some of these are seen several times. For a model that sees its
# data many times, or never finishes one pass, that is no loss.
#
# </details>

# %%
# %%ranks
from manyhands.lessons import same_science as lesson

length = len(corpus.train_ids) // 64
mine = list(lesson.DrawnSampler(length, rank, world_size, num_samples=len(range(rank, length, world_size)), seed=1))
drawn = [i for part in everyone(mine) for i in part]
if rank == 0:
    say(f"{len(drawn):,} draws met {100 * len(set(drawn)) / length:.1f} % of {length:,} sequences")

# %% [markdown]
# And the cure: streams of different keys or seeds have nothing in common.


# %% tags=["nbval-check-output"]
# %%ranks
def stream(rank, epoch=0, seed=1):
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch, rank)))


first_draws = [tuple(stream(r).integers(0, 2**62, 2)) for r in range(4096)]
first_draws += [tuple(stream(r, seed=2).integers(0, 2**62, 2)) for r in range(4096)]
if rank == 0:
    say(f"{len(first_draws)} streams of two seeds, {len(set(first_draws))} different ones")

# %% [markdown]
# ## Two rules of thumb, on a grid of rates (MORE, 9 min)
#
# A batch k times as large makes k times fewer updates from the same data. So each update must go further:
#
# ![Eight short steps along a valley, each from its own gradient, and one step eight times as long, from the mean of eight
# gradients at the start](../assets/05_one_long_step.svg)
#
# - **Linear**, Goyal et al. 2017, for SGD: rate k·η, with [warm-up](../assets/glossary.md#learning-rate-warm-up). k
#   small steps are about one long step, *if the gradient hardly changes on the way*. Early in training it does change,
#   so the rate needs a warm-up.
# - **Square root**, Malladi et al. 2022, for Adam: rate √k·η. Adam divides by the gradient's size. Where that size is
#   mostly noise, the larger batch makes it √k times smaller, so Adam's steps are √k times longer already. (Their rule
#   changes β₁, β₂ and ε too; we do not.)
#
# ### Exercise 4: the rule, with warm-up
#
# Write `learning_rate(kind, base, k, step, updates)`: the rate of update `step` = 0, 1, ... of `updates`. `base` is the
# rate for the small batch, our batch is `k` times as large; `kind` is "SGD" (linear) or "Adam" (square root). Over the
# first `updates // 10` updates (at least one) the rate climbs in equal steps from near 0, but not 0, to its full size.
# There it stays.


# %%
# %%ranks
def learning_rate(kind, base, k, step, updates):
    """The learning rate of update number `step` for a batch k times as large as that of `base`."""
    raise NotImplementedError  # your turn


checks.rate_rule(learning_rate, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 4</summary>
#
# ```python
# def learning_rate(kind, base, k, step, updates):
#     """The learning rate of update number `step` for a batch k times as large as that of `base`."""
#     full = base * (k if kind == "SGD" else k**0.5)
#     warm_up = max(1, updates // 10)
#     return full * min(1, (step + 1) / warm_up)
# ```
#
# </details>

# %% [markdown]
# Now test the rules on our model, at batch 4 and at batch 32 (k = 8), with rates a factor √8 apart and three seeds
# each. Every run reads the same number of characters. The square-root rule moves the rate one step to the right, the
# linear rule two.
#
# **Predict.** By how many steps does the best rate of SGD move, by how many that of Adam? Does batch 32, at its best rate, reach
# the loss of batch 4?
#
# <details><summary>Answer</summary>
#
# The rules say two for SGD and one for Adam. Both are limits for small steps, and the best rate of a short training is
# not small: expect less where the large rate nearly diverges. And here no rate makes up for having an eighth of the
# updates.
#
# </details>
#
# Each run is small, so **every rank takes different settings**. On a cluster that is an array job (`jobs/sweep.pbs`).

# %%
# %%ranks --timeout 600
k, seeds = 8, range(min(3, repeats))
columns = range(2 + len(seeds))
rates = {kind: [lowest * k ** (c / 2) for c in columns] for kind, lowest in (("SGD", 0.02), ("Adam", 2e-4))}
runs = [(kind, batch, rate) for batch in (4, 4 * k) for kind in rates for rate in rates[kind]]
mine = {run: [train(*run, seed) for seed in seeds] for run in runs[rank::world_size]}  # no communication at all
losses = {run: found for part in everyone(mine) for run, found in part.items()}

# %% [markdown]
# Points are means of the seeds, whiskers reach from the lowest to the highest. The dashed line shows where the rule
# moves batch 4's best rate.

# %%
# %%ranks
best = {
    (kind, batch): min(rates[kind], key=lambda rate: np.mean(losses[kind, batch, rate]))
    for kind in rates
    for batch in (4, 4 * k)
}
advised = {kind: learning_rate(kind, best[kind, 4], k, 1, 2) for kind in rates}
if rank == 0:
    figure = lesson.draw_by_rate(losses, advised, f"{len(seeds)} seeds")
    show(figure, "rules", "validation loss against learning rate for two batches, a panel for each optimizer")
    for kind, batch in best:
        found = losses[kind, batch, best[kind, batch]]
        say(f"{kind}, batch {batch}: {np.mean(found):.2f} ({min(found):.2f} to {max(found):.2f}) at its best rate")
    for kind in rates:
        moved, rule = best[kind, 4 * k] / best[kind, 4], advised[kind] / best[kind, 4]
        say(f"{kind}: {4 * k} likes {moved:.1f} times the rate of 4, the rule says {rule:.1f}")
metrics.close(tolerance=0.1, sweep=[np.mean(losses[kind, batch, best[kind, batch]]) for kind, batch in best])

# %% [markdown]
# Where whiskers overlap, this run does not tell which rate is better. Two things to take home. A rule starts from a rate that was
# **tuned** at the small batch; if yours was too small, a larger batch "wins" by any rule. And compare at equal *data*: after
# equally many updates the larger batch has read k times as much. (The rules ask for a warm-up. Batch 32 makes 12 updates
# here, without one, so this is no test of the linear rule.)

# %% [markdown]
# ### The noise of a gradient, measured (MORE, 2 min)
#
# Take 256 gradients, each of one sequence, and their means over groups of B. How far are these means from the mean of
# all? The prediction has no free number: the variance of one sequence, times 1/B - 1/256. (The 1/256 is there because
# the mean of all contains the group.)


# %%
# %%ranks
grads_bP = gradients(new_model())
mean_P = summed(grads_bP.sum(0)) / 256
variance = (summed(((grads_bP - mean_P) ** 2).sum()) / 255).item()  # of one sequence, all parameters together

# %%
# %%ranks
sizes_B, measured, predicted = (1, 2, 4, 8, 16, 32), [], []
for size in sizes_B:
    groups = grads_bP[: len(grads_bP) // size * size].unflatten(0, (-1, size)).mean(1)
    total, count = summed(((groups - mean_P) ** 2).sum()), summed(len(groups))
    measured.append((total / count).item())
    predicted.append(variance * (1 / size - 1 / 256))
if rank == 0:
    show(lesson.draw_noise(sizes_B, measured, predicted), "variance", "the noise falls as 1/B, a straight line")
    ratios = [m / p for m, p in zip(measured, predicted, strict=True)]
    say(f"measured / predicted: {min(ratios):.2f} to {max(ratios):.2f}")

# %% [markdown]
# The groups of 32 are few (eight in all), so the right end scatters most.

# %% [markdown]
# ### Time against data (MORE, 2 min)
#
# In the paper's formulas a batch of B needs S_min·(1 + B_noise/B) updates to reach a target, which read E_min·(1 + B/B_noise) data.
# S_min is the fewest updates, with a huge batch; E_min the least data, with a tiny one.

# %% tags=["nbval-check-output"]
# %%ranks
if rank == 0:
    for ratio in (1 / 8, 1 / 2, 1, 2, 8):
        say(f"batch = {ratio:5g} B_noise: {1 + 1 / ratio:4.2f} S_min updates read {1 + ratio:4.2f} E_min")

# %% [markdown]
# A batch equal to the noise scale, the **critical batch**, needs twice the minimum of both. Far below it you waste
# time, far above it you waste data.

# %% [markdown]
# ## Strong and weak scaling (MORE, 8 min)
#
# **Why.** "How much faster on more ranks?" is two questions. [*Strong scaling*](../assets/glossary.md#strong-scaling) shares the
# same global batch. [*Weak scaling*](../assets/glossary.md#weak-scaling) keeps the micro-batch, so the global batch grows.
#
# ![Strong scaling: a block of work is cut into ever thinner slices while a part that cannot be cut stays. Weak scaling: the
# slices keep their size and their number grows](../assets/05_scaling.svg)
#
# Let s be the share of a step that does not get faster with ranks.
#
# - **Amdahl 1967**, strong: speed-up = 1 / (s + (1-s)/n). It never exceeds 1/s.
# - **Gustafson 1988**, weak: n ranks do (1-s)·n + s times the work in the same time. It grows without limit.
#
# With s = 5 % on 64 ranks Amdahl says 15.4 and Gustafson 60.9. Both are right: they answer different questions. Neither knows about communication, which grows with n. First strong scaling on the **virtual network**: ranks send real
# messages, but time is computed. A step has 20 ms that can be shared and 1 ms that cannot; then comes a ring all-reduce of our
# gradient, on links with 50 µs and 1 GB/s.

# %%
# %%ranks
import math
from manyhands.measure.virtual_network import Link, VirtualNetwork

link, work_s, serial_s = Link(latency_s=50e-6, bytes_per_s=1e9), 20e-3, 1e-3
num_params = config.num_params()


def virtual_step(n):
    """Virtual seconds of a step that the first n ranks share, 0 on the others. All ranks call it."""
    group = group_of[n]
    if rank >= n:
        return 0.0
    network = VirtualNetwork(ranks, link, group=group)
    network.compute(serial_s + work_s / n, "work")
    network.all_reduce(torch.ones(num_params))
    return network.clock_s


sizes = sorted(group_of)
virtual_s = [virtual_step(n) for n in sizes]
metrics.exact(virtual_strong_s=virtual_s)

# %% [markdown]
# Fit Amdahl's law, T(n) = a + b/n, to these few points and extrapolate to 64. Next to it are two formulas, not fitted: the ring and
# a pipelined double tree. NCCL has both, and chooses by [the nodes, the size and the
# bandwidths](https://github.com/NVIDIA/nccl/issues/754).


# %%
# %%ranks
def ring_s(n):
    return 2 * (n - 1) * link.cost_s(4 * math.ceil(num_params / n))


def tree_s(n):
    """Up and down a pipelined tree: all bytes twice, and a latency per level."""
    return 2 * link.cost_s(4 * num_params) + 2 * (math.ceil(math.log2(n)) - 1) * link.latency_s if n > 1 else 0.0


def amdahl_fit(sizes, times_s):
    """(a, b) of T(n) = a + b/n by least squares; s = a / (a + b)."""
    columns = np.stack([np.ones(len(sizes)), 1 / np.array(sizes)], axis=1)
    a, b = np.linalg.lstsq(columns, np.array(times_s), rcond=None)[0]
    return a, b


a, b = amdahl_fit(sizes, virtual_s)
if rank == 0:
    for n, step_s in zip(sizes, virtual_s, strict=True):
        say(f"n={n}: {1e3 * step_s:.3f} ms, by formula {1e3 * (serial_s + work_s / n + ring_s(n)):.3f}")
    fitted_ms = 1e3 * (a + b / 64)
    ring_ms, tree_ms = (1e3 * (serial_s + work_s / 64 + send_s(64)) for send_s in (ring_s, tree_s))
    say(
        f"64 ranks: Amdahl's fit says {fitted_ms:.2f} ms, the formula with a ring {ring_ms:.2f}, with a tree {tree_ms:.2f}"
    )

# %% [markdown]
# Now the same two questions on this machine, with real DDP and a step of the optimizer.
#
# **Predict.** Where do the two speed-ups stop rising?
#
# <details><summary>Answer</summary>
#
# At about the number of cores, which the run's second line shows: with more ranks, they share cores, and messages come
# on top. With a GPU for each rank no cores are shared. But this model is too small for a GPU: launching its kernels
# takes as long for few sequences as for many, so strong scaling gains hardly anything from the start.
#
# </details>


# %%
# %%ranks
def step_on(n):
    """A function: one step of the first n ranks with this many sequences on each. All ranks call both."""
    group = group_of[n]
    model = DDP(new_model(), process_group=group) if rank < n else new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x_bT, y_bT = (ids.to(device) for ids in get_batch(corpus.train_ids, 0, 96, T, 0, 1, seed=rank))

    def step(sequences):
        if rank < n:
            model(x_bT[:sequences], y_bT[:sequences])[1].backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


# %%
# %%ranks --timeout 120
import functools
from manyhands.measure.timing import take_turns

calls = {}
for n in sizes:
    step = step_on(n)
    calls["strong", n] = functools.partial(step, max(1, 96 // n))
    calls["weak", n] = functools.partial(step, 96)
samples = take_turns(calls, repeats, ranks)  # in turns: a busy moment of the machine hits them all

ups = {"strong": {}, "weak": {}}  # how much faster, round by round
for (kind, n), taken in samples.items():
    work = n if kind == "weak" else 1
    ups[kind][n] = sorted(work * one / t for one, t in zip(samples[kind, 1], taken, strict=True))
metrics.measured(
    strong_s=[float(np.median(samples["strong", n])) for n in sizes],
    weak_s=[float(np.median(samples["weak", n])) for n in sizes],
)

# %%
# %%ranks
if rank == 0:
    for kind, by_n in ups.items():
        for n in sizes[1:]:
            low, middle, high = by_n[n][0], np.median(by_n[n]), by_n[n][-1]
            say(f"{kind}, n={n}: {middle:.2f} times as fast ({low:.2f} to {high:.2f})")
    many = range(1, 65)
    curves_s = {
        "with the ring": [serial_s + work_s / n + ring_s(n) for n in many],
        "with a tree": [serial_s + work_s / n + tree_s(n) for n in many],
        "Amdahl's fit": [a + b / n for n in many],
    }
    alt = "left: virtual step times and three curves to 64 ranks; right: speed-ups on this machine with whiskers"
    show(lesson.draw_scaling(sizes, virtual_s, curves_s, ups), "scaling", alt)

# %% [markdown]
# **The residual.** Left: the points lie on the formula, because the virtual network computes its time from the same
# costs. Amdahl's line passes close to the same points and is still wrong at 64 ranks: the ring's latency grows with n,
# a tree's with log n, and a fit to a few small n cannot know either. Extrapolate from a model of what happens, not from
# a curve.
#
# Right: whiskers reach over all rounds. Beyond the number of cores no core is free, and a fitted "serial share" would
# only measure missing hardware. A fit always gives a number, but does not say what it *means*.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: scaling</summary>
#
# *Say:* "every scaling plot has a denominator; ask for its error bar". *Usual
# mistakes:* mixing up whose share s is; extrapolating. *When late:* the virtual half only. *Ask:* "your supervisor wants one
# number. Which?" (Time to the same loss, for a given cost.)
#
# </details>

# %% [markdown]
# ### A scaling table, read with care (MORE, 3 min)
#
# Here is a weak-scaling table of the kind that slides show, images per second on 1, 2, 4, 8 and 16 GPUs: **281, 382, 689, 1341,
# 3627**. Each is a mean of 10 steps. Only the one-GPU number has an error, ± 76. From such a table
# people quote 136 %, 60 % and 81 %. (We know no paper behind it, so take it as an exercise, not as a result.)
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
        middle, low, high = (100 * images_per_s[8] / 8 / (281 + shift) for shift in (0, off, -off))
        say(f"8 GPUs, if 76 is {name}: {middle:3.0f} %, {low:3.0f} to {high:3.0f} %")
    say(f"from 8 to 16 GPUs: {3627 / 1341:.2f} times as fast")

# %% [markdown]
# What does "± 76" mean? The error of the mean, the standard deviation of one step, or 1.96 of them (as Horovod's
# benchmark script prints)? The table does not say. "60 %" lies between 47 and 82, or 55 and 65, or 57 and 62 (one
# standard error each way: expect one in three outside); the last two hold if the ten steps are independent.
#
# But do not compare 60 % with 81 % by these intervals: both are divided by the *one-GPU* number. Its error shifts all
# efficiencies together, and cancels in their ratio, 1.35. To compare them, you need the errors of the other numbers,
# which the table does not give. Look at the last line: 16 GPUs are 2.7 times as fast as 8. No scaling law gives more
# than twice. Something else was different: a cold start inside the ten steps, another node, another batch. **± 27 %
# over ten steps says: warm up, measure longer, repeat, and give every point its error bar**, as above.

# %% [markdown]
# ## Feed the ranks (MORE, 7 min)
#
# **Why.** A GPU that waits for a file computes nothing, and 500 ranks that open one file at the same moment can
# overload a file system. There are four ways to bring each rank its share of a file:
#
# ![Four ways: every rank maps one file; every rank has its own file; all ranks read one file together by MPI-IO; one reader
# reads and sends the others their parts](../assets/05_reading.svg)
#
# - **Memory map:** every rank opens the same file, and the operating system fetches the pages that are touched. Nothing to
#   prepare.
# - **A file per rank:** no two ranks touch one file. But files for 4 ranks do not suit 8 ranks, and a million small
#   files are worse than one large file.
# - **MPI-IO:** the ranks read *together*; the library lets a few of them fetch large pieces and passes them on.
# - **Reader ranks:** MPI-IO's way, by hand: one rank per node reads, then scatters.

# %%
# %%ranks
from pathlib import Path
from manyhands.data import token_files
from manyhands.launch.run_folder import run_folder

where = [str(run_folder(ranks) / "tokens")] if rank == 0 else [None]
dist.broadcast_object_list(where, src=0)  # all ranks must name one folder
folder, tokens = Path(where[0]), corpus.train_ids.repeat(8)
if rank == 0:
    folder.mkdir()
    token_files.write_tokens(folder / "all.bin", tokens)
    token_files.write_own_files(folder, tokens, world_size)
    say(f"{len(tokens):,} tokens, {(folder / 'all.bin').stat().st_size / 1e6:.1f} MB")
dist.barrier()
mine = token_files.share(len(tokens), rank, world_size)
say(f"my share: tokens {mine.start:,} to {mine.stop - 1:,}")

# %% [markdown]
# **Predict.** Which is the fastest on this machine, where the file is in memory already?
#
# <details><summary>Answer</summary>
#
# The memory map: it copies from the page cache, and needs no other process. (The second way also checks each file
# against its sha256, which takes most of its time, but finds a flipped bit.) The other two move data between processes.
# Their gain is that not thousands of ranks ask one file server. You cannot see that here.
#
# </details>

# %%
# %%ranks
from manyhands import mpi_world
from manyhands.measure.timing import take_turns

ways = {
    "memory map": lambda: token_files.memory_map(folder / "all.bin")[mine].clone(),
    "own file": lambda: token_files.read_own_file(folder, rank, world_size),
    "1 reader scatters": lambda: token_files.scatter_from_readers(folder / "all.bin", 1, ranks),
}
comm = mpi_world()
if comm is not None:
    ways["MPI-IO"] = lambda: token_files.read_mpi_io(folder / "all.bin", comm)
elif rank == 0:
    say("MPI-IO needs an MPI world: mpiexec -n 4 python scripts/05_same_science.py")
assert all(torch.equal(read().long(), tokens[mine]) for read in ways.values())
read_s = take_turns(ways, repeats, ranks)
if rank == 0:
    for name, taken in read_s.items():
        middle, low, high = (1e3 * pick(taken) for pick in (np.median, min, max))
        say(f"{name:18} {middle:.2f} ms ({low:.2f} to {high:.2f}), {2 * len(tokens) / middle / 1e6:.2f} GB/s")
metrics.measured(**{f"read {name}": float(np.median(taken)) for name, taken in read_s.items()})

# %%
# %%ranks
import shutil

dist.barrier()
if rank == 0:
    shutil.rmtree(folder)

# %% [markdown]
# All of them gave the same tokens. On a cluster with **Lustre**, a large file is on one server, and all ranks queue at
# that server, unless you or your site's default *stripe* the file (`lfs getstripe -d` shows it). Before you copy a
# large shared file into a folder, set the folder's stripes: here pieces of 4 MiB, over eight servers. This holds for
# files written afterwards:
#
# ```bash
# lfs setstripe --stripe-count 8 --stripe-size 4M data/tokens/     # large files that many ranks read
# lfs getstripe data/tokens/all.bin                               # how it lies
# ```
#
# Small files need no striping. Data that is read many times belongs near the rank, if it fits: copy it to the node's
# own disk or `/dev/shm` at the start of the job ("preload"), once per node, not once per rank.
#
# ### Read ahead
#
# Computation waits for data, as it waits for communication. The cure is the same as for gradients: begin earlier.
# `Prefetch` lets a thread read the next batches while this one is computed.
#
# ![Reading and computing one after the other; below, each read under the computation before](../assets/05_prefetch.svg)
#
# **Predict.** Reading a batch takes 8 ms, a step 12 ms. How long do 20 steps take one after the other, how long with
# prefetch? And with a disk that takes 20 ms?
#
# <details><summary>Answer</summary>
#
# 20·(8 + 12) = 400 ms; with prefetch 20·12 + 8 = 248 ms: 20 times the longer of the two, and the first read. With 20 ms
# the disk is the slower part: 20·20 + 12 = 412 ms, and no depth of prefetch helps.
#
# </details>


# %%
# %%ranks
import time
from manyhands.data.token_files import Prefetch


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
# Run it with and without prefetch, on the two disks:

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
# ## Exercises (MORE, 21 min)
#
# Each check runs your answer in a separate process group: you cannot break anything.
#
# ### Exercise 1: find the `set_epoch` bug
#
# Below are three recorded runs of eight epochs over 240 sequences on four ranks. In one of them the loop is right. In
# another, `set_epoch` was forgotten. In the third, one rank called it with a different number from the rest.

# %%
# %%ranks
runs = checks.three_runs()  # {"A": read, "B": read, "C": read}; read[epoch][rank] lists indices


def who_read(read, i):
    """The rank that read sequence i, for each time that it was read."""
    return [r for epoch in read for r, mine in enumerate(epoch) if i in mine]


if rank == 0:
    found = {name: [who_read(read, i) for i in range(240)] for name, read in runs.items()}
    alt = "histograms of three runs: how often a sequence was read, and by how many ranks"
    show(lesson.draw_times_read(found), "three_runs", alt)

# %% [markdown]
# **Predict.** Which run is which? In a right run, by how many of four ranks is a sequence read in eight epochs?
#
# <details><summary>Answer</summary>
#
# In A `set_epoch` was forgotten: every sequence stays with one rank forever. In B some sequences were read less often
# than eight times, others more: one rank deals from another deck. C is right: a sequence misses a given rank with
# probability (3/4)⁸ = 10 %, so it meets 4·0.9 = 3.6 ranks on average.
#
# </details>
#
# Write `diagnose(read, length)`, which returns `"fine"`, `"same order"` or `"ranks disagree"`. `read[epoch][rank]` is
# the list of indices that the rank read; there are `length` sequences. Careful: in a world of one, the rank reads
# everything in every epoch; and the library doubles a few sequences if they do not divide by the ranks.


# %%
# %%ranks
def diagnose(read, length):
    raise NotImplementedError  # your turn


checks.diagnose(diagnose, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 1</summary>
#
# ```python
# def diagnose(read, length):
#     for epoch in read:
#         if len({i for mine in epoch for i in mine}) < length:
#             return "ranks disagree"  # one is lost; if one is only doubled, that is the library's padding
#     return "same order" if all(epoch == read[0] for epoch in read) else "fine"
# ```
#
# </details>

# %% [markdown]
# ### Exercise 2: token-weighted loss, with accumulation
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

# %% [markdown] tags=["solution"]
# <details><summary>Solution 2</summary>
#
# ```python
# def weighted_backward(ddp, micro_batches):
#     tokens = sum((y != -100).sum() for _, y in micro_batches)
#     dist.all_reduce(tokens)  # all ranks: one integer, before the first backward
#
#     def backward(x, y):
#         total = F.cross_entropy(ddp(x), y, ignore_index=-100, reduction="sum")
#         (world_size * total / tokens).backward()  # DDP will divide by world_size
#
#     with ddp.no_sync():
#         for x, y in micro_batches[:-1]:
#             backward(x, y)
#     backward(*micro_batches[-1])
# ```
#
# </details>

# %% [markdown]
# ### Exercise 3: spot the rank count
#
# Somebody trained three small classifiers, A, B and C, each once on one rank and once on four. Does any of them depend on the
# number of ranks?

# %%
# %%ranks
trainings = checks.three_trainings()  # {"A": (losses on one rank, losses on four, dtype), ...}
if rank == 0:
    for name, (one, many, dtype) in trainings.items():
        ends = [" ".join(f"{loss:.2f}" for loss in (*losses[::4], losses[-1])) for losses in (one, many)]
        say(f"{name}, {dtype}: on one rank {ends[0]}, on four {ends[1]}")

# %% [markdown]
# **Predict.** To two decimals they all agree. One of them weighs its ranks wrongly, as the naive version above did. What does the
# difference of two losses look like if it is rounding, in float32 and in float64, and if it is not?
#
# <details><summary>Answer</summary>
#
# Rounding is *relative*: a multiple of the loss times eps, 10⁻⁷ in float32 and 2·10⁻¹⁶ in float64. It starts with the first sums
# and grows slowly. A mistake has a size of its own, far above that, in either precision. (It may be absent at update 0: that loss
# is computed before anything was updated.)
#
# </details>

# %%
# %%ranks
if rank == 0:
    pairs = {}
    for name, (one, many, dtype) in trainings.items():
        one, many = (torch.tensor(losses, dtype=torch.float64) for losses in (one, many))
        in_eps = torch.finfo(dtype).eps * one  # the rounding of one operation
        pairs[f"{name}, {str(dtype).removeprefix('torch.')}"] = many / in_eps, one / in_eps
    figure = lesson.draw_differences(pairs, 1000, "four ranks against one", "difference, in eps of the loss")
    show(figure, "three_trainings", "differences in eps: those of A and C are below 10, those of B above 1,000")

# %% [markdown]
# Write `betrays(one, many, dtype)` for a test of your own code. Given are the losses of a training on one rank and on many, two
# lists of floats. Return the number of the first update at which they differ by more than **1,000 eps of the loss**
# (`torch.finfo(dtype).eps`), or None if they never do. Losses may be large, and one of them may be nan.


# %%
# %%ranks
def betrays(one, many, dtype):
    raise NotImplementedError  # your turn


checks.betrays(betrays, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 3</summary>
#
# ```python
# def betrays(one, many, dtype):
#     eps = torch.finfo(dtype).eps
#     for update, (a, b) in enumerate(zip(one, many, strict=True)):
#         # "not <=" and not ">": a comparison with nan is always False
#         if not abs(a - b) <= 1000 * eps * abs(a):
#             return update
#     return None
# ```
#
# </details>

# %% [markdown]
# ## On the cluster (MORE, 1 min)
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
# **What changes on GPUs.** Below some micro-batch a GPU is not busy, and there strong scaling ends. In bf16 rounding alone moves
# the third digit, so test in float64, on a small model, on two GPUs, before the long run.
#
# **What to look for:** the same `trajectory_close` in the run's `metrics.json` from `mpiexec -n 8` as on your
# laptop, to 1e-10; the sequences that were counted beside those that were asked for; a time per step whose *spread*
# you know, on 1, 2, 4 nodes, before anyone computes an efficiency.

# %% [markdown]
# ## Further reading
#
# The papers are in the [handbook](../assets/handbook/05_same_science.md#batch-and-learning-rate).

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
