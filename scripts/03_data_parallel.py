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
# **55 minutes** for the sections marked CORE, 84 with those marked MORE.
#
# After this lesson **you can**
# - explain why the replicas of a model stay identical on many ranks, and what breaks that;
# - build what `DistributedDataParallel` does: broadcast, hooks, buckets, overlap;
# - train a GPT with the library's DDP, and prove that it computes what one process computes;
# - predict the bytes of a training step, and measure what overlap saves.
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
# Each heading says its minutes. The four builds take about three minutes each; walk around while people write.
#
# *Say:* one sentence carries the lesson: "same start, same averaged gradient, same update, so the replicas never part".
# Come back to it at every section. Each section only makes the averaging cheaper.
#
# *Three usual mistakes:* thinking that DDP averages weights; thinking that rank 0 is a server that the others report to;
# reading the loss of rank 0 as the loss of the batch.
#
# *When late:* open the solutions of builds A and B at once, start the training run before you explain it, keep the zoo.
#
# *Ask the room:* "Rank 2 drew different first weights. After a thousand steps of perfect averaging, what is
# different on rank 2?" Let them vote before the section on the same start.
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
steps = 150  # training steps, at least 1
global_batch = 0  # sequences per step, all ranks together; 0: 12, or more where it does not split, at least 0
bucket_mib = 1.0  # size of a gradient bucket in MiB, > 0
ddp = "library"  # which DDP trains the GPT, one of library, ours
repeats = 5  # samples of each timing, at least 1

# %% [markdown]
# ## Start (CORE, 3 min)
#
# The first cell starts the ranks behind this notebook. From then on a cell that begins with `%%ranks` runs on all of
# them. In the script that line is a comment, because there a launcher has started the ranks already.
#
# In a **Build** the key lines are yours, and the check below them tells you what is wrong. Short of time? Run the folded
# solution and go on.
#
# **Catching up.** Each section runs after only the cells of this one: a folded cell with `catch_up(...)` defines what it
# needs from earlier sections. What you have written stays.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("03_data_parallel", globals())

# %%
# %%ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands import Metrics, catch_up, fingerprint, join, leave, refuse, say, show
from manyhands.checks import data_parallel as checks
from manyhands.measure import wire
from torch.nn.parallel import DistributedDataParallel as DDP

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
these_ranks = f"{world_size} rank{'s' * (world_size > 1)}"
if global_batch == 0:
    global_batch = -(-12 // world_size) * world_size
if global_batch % world_size:
    refuse(f"global_batch={global_batch} does not split over {world_size} ranks; use a multiple of {world_size}")

# %% [markdown]
# The lesson's model is **ShakespeareGPT**: it reads 64 characters of Shakespeare and guesses the next. Four layers, four
# heads, width 128: small enough for a laptop, and a real GPT in every part.
#
# One [**global batch**](../assets/glossary.md#global-batch) is what all ranks together learn from in one step. `batch(step)`
# gives each rank its share of it. The global batch is the same for any number of ranks, which is what lets us compare.
#
# Letters at the end of a name are its shape: `B` sequences in the global batch, `b` this rank's share, `T` positions,
# `P` parameters in one long row.

# %%
# %%ranks
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.gpt.model import GPT, GPTConfig

corpus = load_corpus(ranks)
config = GPTConfig(vocab_size=len(corpus.vocab))
gradient_bytes = 4 * config.num_params()  # one float32 for each parameter
given = {"steps": steps, "global_batch": global_batch, "bucket_mib": bucket_mib, "ddp": ddp}
metrics = Metrics(ranks, corpus, given)


def new_model(dtype=torch.float32):
    """ShakespeareGPT with its first weights, the same on every rank, because the seed is."""
    torch.manual_seed(1337)
    return GPT(config).to(device, dtype)


def batch(step, ids=corpus.train_ids, part=rank, parts=world_size):
    """One part of global batch number `step`, this rank's unless told otherwise: inputs and targets, both [b, T]."""
    share = get_batch(ids, step, global_batch, config.block_size, part, parts, seed=1)
    return [ids_bT.to(device) for ids_bT in share]


x_bT, y_bT = batch(0)
say(f"my share of {global_batch} sequences: {list(x_bT.shape)}, beginning {corpus.decode(x_bT[0, :24])!r}")

# %% [markdown]
# Every rank reads *different* text. Two instruments before we begin. `flat` lays tensors end to end in one row. `spread`
# measures how far the ranks have drifted apart. **0.0 means that all replicas are identical, to the last bit.**


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
# ## Warm-up: four rows by hand (CORE, 3 min)
#
# **Why.** You have more text than one process can read in time. So start several, give each a *copy of the model* and its
# own *share of the text*, and let them learn together. What must they tell each other, so that in the end there is one
# model and not several?
#
# ![Two ranks hold the same weight and two rows each; each computes its own gradient, an all-reduce averages the two, and
# both make the same update](../assets/03_two_copies.svg)
#
# Take one weight, y = w·x, and four rows of data. The loss of a row is (w·x − y)², so its gradient is 2x·(w·x − y). The
# weight starts at w = 1.
#
# | row | x | y | gradient at w = 1 |
# |---|---|---|---|
# | 0 | 1 | 3 | 2·1·(1 − 3) = −4 |
# | 1 | 2 | 4 | −8 |
# | 2 | 3 | 7 | −24 |
# | 3 | 4 | 6 | −16 |
#
# **Predict.** Rank 0 has rows 0 and 1, rank 1 has rows 2 and 3, and a loss is the mean over the rows. Compute g₀ and g₁.
# What must each rank hold before it may change w, and which [collective](../assets/glossary.md#collective) of lesson 02
# brings that about?
#
# <details><summary>Answer</summary>
#
# g₀ = (−4 − 8)/2 = −6 and g₁ = (−24 − 16)/2 = −20. Each rank needs the mean, (g₀ + g₁)/2 = −13. That is also the mean of all
# four rows, −52/4, because the shares are equal (lesson 05 mends the other case). Every rank needs it: an
# **all-reduce** and a division.
#
# </details>

# %%
# %%ranks
w = torch.tensor(1.0, device=device, requires_grad=True)
rows = torch.tensor([[1.0, 2, 3, 4], [3, 4, 7, 6]], device=device)
x_B, y_B = rows.repeat_interleave(world_size, dim=1)  # each row n times, so that n ranks can share them
x_b, y_b = x_B.chunk(world_size)[rank], y_B.chunk(world_size)[rank]

((w * x_b - y_b) ** 2).mean().backward()
say(f"my rows have x = {x_b.unique().tolist()}, my gradient is {w.grad.item():.0f}")

# %% tags=["nbval-check-output"]
# %%ranks
mean = w.grad.clone()
dist.all_reduce(mean)  # all ranks: now the sum over the ranks ...
mean /= world_size  # ... and now the mean

whole = (2 * x_B * (w * x_B - y_B)).mean().item()  # one process that sees all rows
with torch.no_grad():
    w -= 0.01 * mean
apart = spread([w])  # all ranks measure, rank 0 speaks
if rank == 0:
    say(f"the averaged gradient is {mean.item():.0f}, that of one process {whole:.0f}")
    say(f"w is now {w.item():.2f}, and the replicas are {apart} apart")

# %% [markdown]
# 0.0, not "nearly": every rank subtracted the same bits from the same bits, and nobody sent a weight. That is all of data
# parallel training. The rest of this lesson makes one line of it, the all-reduce, cheap.

# %% [markdown]
# ## The same start (CORE, 7 min)
#
# **Why.** "The same bits from the same bits" has two halves. The averaged gradient takes care of the first. What takes care
# of the second, the same weights to begin with?
#
# ![Two paths in the plane of two weights: from different starts the same steps lead to different ends, the gap stays; from
# the same start the paths are one](../assets/03_same_start.svg)
#
# **Predict.** Each rank draws its first weights from a seed of its own. Then 20 steps, with perfectly averaged gradients. Do
# the replicas come together, stay as far apart as they were, or run away from each other?
#
# <details><summary>Answer</summary>
#
# They stay as far apart. Every replica moves by the same amount, so the difference between two replicas never changes. Averaging
# gradients keeps replicas equal; it never *makes* them equal. (Weight decay does shrink the gap, by the factor 1 − lr·decay per
# step. With lr 0.001 and decay 0.01 that is 1 % in a thousand steps.)
#
# </details>


# %%
# %%ranks
from torch.nn.utils import vector_to_parameters


def toy(seed):
    """A network 6-4-2 with 38 parameters, and this rank's share of 24 rows, or more: inputs, targets."""
    torch.manual_seed(seed)
    layers = torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    torch.manual_seed(24)
    rows_b8 = torch.randn(-(-24 // world_size) * world_size, 8).chunk(world_size)[rank].double().to(device)
    return torch.nn.Sequential(*layers).double().to(device), rows_b8[:, :6], rows_b8[:, 6:]


def averaged_sgd(network, x_b6, y_b2, num_steps):
    """Plain SGD on this rank's rows with averaged gradients. All ranks call it."""
    for _ in range(num_steps):
        network.zero_grad()
        F.mse_loss(network(x_b6), y_b2).backward()
        sum_P = flat(p.grad for p in network.parameters())
        dist.all_reduce(sum_P)
        vector_to_parameters(flat(network.parameters()) - 0.1 * sum_P / world_size, network.parameters())


# %%
# %%ranks
network, x_b6, y_b2 = toy(seed=rank)  # the mistake: a seed, and so first weights, for each rank
num_steps = 4 * repeats  # 20
before = spread(network.parameters())
averaged_sgd(network, x_b6, y_b2, num_steps)
after = spread(network.parameters())
if rank == 0:
    say(f"apart before: {before:.6f}, after {num_steps} averaged steps: {after:.6f}")

# %% [markdown]
# So the weights of one rank must become everybody's, once, before the first step. Not only the weights: everything that a step
# reads and the gradient does not carry. [*Buffers*](../assets/glossary.md#buffer) are numbers that a layer keeps without
# learning them, such as BatchNorm's running mean.
#
# ### Build A: the same start
#
# Write `broadcast_state(model)`: every rank takes rank 0's parameters and buffers, into the tensors that it has. A module lists
# them with `parameters()` and `buffers()`, and `dist.broadcast(tensor, src=0)` writes rank 0's numbers into every rank's
# `tensor`. It goes behind autograd's back, so hand it `tensor.detach()`, which shares the memory.


# %%
# %%ranks
def broadcast_state(model):
    """Every rank takes rank 0's parameters and buffers. All ranks call it."""
    raise NotImplementedError  # your turn


checks.same_start(broadcast_state, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution A
def broadcast_state(model):
    """Every rank takes rank 0's parameters and buffers. All ranks call it."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


checks.same_start(broadcast_state, ranks, solution=True)

# %% tags=["nbval-check-output"]
# %%ranks
broadcast_state(network)
averaged_sgd(network, x_b6, y_b2, num_steps)
after = spread(network.parameters())
if rank == 0:
    say(f"after the broadcast and {num_steps} more steps the replicas are {after} apart")

# %% [markdown]
# A third kind of state belongs to the *optimizer*: Adam divides by what it remembers of earlier gradients. In a new run that
# memory is empty on every rank. When you resume one, every rank must load the same (lesson 11).

# %% [markdown]
# ## Naive: average after backward (CORE, 6 min)
#
# **Why.** Now the GPT. The simplest thing that is right: run backward, then go through the parameters and average each
# gradient.

# %%
# %%ranks
model = new_model()
_, loss = model(*batch(0))
loss.backward()
length = flat(p.grad for p in model.parameters()).norm()
say(f"my loss is {loss.item():.4f}, my gradient has length {length:.4f}")

# %% [markdown]
# ### Build B: average the gradients
#
# Write `average_gradients(model)`, to be called after `loss.backward()`: afterwards each `p.grad` is its mean over the ranks,
# and no weight has changed. The check counts what you communicate: each gradient once. (In 16 bits a sum over many ranks can
# overflow. Where do you divide?)


# %%
# %%ranks
def average_gradients(model):
    """Turn each gradient into its mean over the ranks. All ranks call it, after backward."""
    raise NotImplementedError  # your turn


checks.mean_gradient(average_gradients, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution B
def average_gradients(model):
    """Turn each gradient into its mean over the ranks. All ranks call it, after backward."""
    for p in model.parameters():
        p.grad /= world_size  # divide first: in 16 bits a sum over many ranks could overflow
        dist.all_reduce(p.grad)


checks.mean_gradient(average_gradients, ranks, solution=True)

# %% [markdown]
# **Predict.** One layer of this GPT has two LayerNorms and four linear maps, one of them without bias: 11 tensors. Around
# its four layers there are two embeddings, a last LayerNorm and the head. How many all-reduces is that per step, and how many
# megabytes does a rank communicate, at 4 bytes for each of the 816,705 parameters?
#
# <details><summary>Answer</summary>
#
# 4·11 + 2 + 2 + 2 = 50 all-reduces of 3.27 MB together. (With a corpus other than Shakespeare the alphabet,
# and so the embedding and the head, have a different size.)
#
# </details>

# %%
# %%ranks
with wire.watch() as seen:
    average_gradients(model)
apart = spread(p.grad for p in model.parameters())
if rank == 0:
    communicated = seen.payload_bytes()
    say(f"{seen.count('all_reduce')} all-reduces of {communicated / 1e6:.2f} MB together")
    say(f"predicted {gradient_bytes / 1e6:.2f} MB, ratio {communicated / gradient_bytes:.3f}")
    say(f"the gradients are {apart} apart")

# %% [markdown]
# Right, and wasteful: *fifty* calls, made while nobody computes. Each one wakes every process, waits for the last of them, and
# only then does a little work; for a LayerNorm's 512 bytes you pay lesson 02's latency and nothing else. Two cures follow:
# **call while there is still something else to do**, and **call less often**.

# %% [markdown]
# ## Hooks: begin while backward still runs (CORE, 6 min)
#
# **Why.** Backward walks through the model from the loss to the input. When it has passed a layer, that layer's gradient is
# final. It could travel while the layers below are still being computed.
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
import time
from manyhands.measure.timing import synchronise


def now():
    synchronise(device)  # a GPU only queues what Python asks for: wait until it is done
    return time.perf_counter()


model, ready = new_model(), []
for name, p in model.named_parameters():
    p.register_post_accumulate_grad_hook(lambda p, name=name: ready.append((name, now())))
_, loss = model(*batch(0))
begin = now()
loss.backward()
whole_s = now() - begin
if rank == 0:
    for name, moment in [*ready[:3], *ready[-2:]]:
        say(f"{name:28} ready at {100 * (moment - begin) / whole_s:3.0f} % of backward")

# %% [markdown]
# ### Build C: a gradient hook
#
# Write `average_by_hooks(model)`: give every parameter a hook, so that after `loss.backward()`, with nothing called
# afterwards, each `p.grad` is the mean over the ranks. The check looks at the gradients, at the weights, and at what you sent
# while backward ran.


# %%
# %%ranks
def average_by_hooks(model):
    """From now on each backward leaves the mean over the ranks in every grad. All ranks call it, once."""
    raise NotImplementedError  # your turn


checks.gradient_hook(average_by_hooks, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution C
def average_by_hooks(model):
    """From now on each backward leaves the mean over the ranks in every grad. All ranks call it, once."""

    def average(p):  # the hook is handed the parameter, not its gradient
        p.grad /= world_size
        dist.all_reduce(p.grad)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(average)


checks.gradient_hook(average_by_hooks, ranks, solution=True)

# %% [markdown]
# There are still fifty calls, and each hook *waits* for its all-reduce before backward may go on. Starting early helps only if
# you do not stand still meanwhile. The next section mends both, and then times all versions together.

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
# ## Buckets, and not waiting (CORE, 11 min)
#
# **Why.** An all-reduce costs a fixed time to start, then a time per byte. So collect gradients in a **bucket**, one flat piece
# of memory, and send the bucket when it is full. And do not wait for it: that can happen after backward.
#
# ![The parameters from the last to the first fill four buckets; when a bucket is full, one all-reduce
# starts](../assets/03_buckets.svg)
#
# ![Three timelines: naive averages in many calls after backward, buckets in a few, and with overlap all but the last bucket
# travel while backward still runs](../assets/03_overlap.svg)
#
# The buckets are filled in the order in which backward finishes the gradients. That is nearly the reverse of
# `model.parameters()`, which lists them in the order in which the model defined them.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "broadcast_state", "average_gradients", "average_by_hooks")


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
# One bucket. A gradient *moves into* it: after `take(p)`, `p.grad` is a view of the bucket's memory. When the all-reduce has
# averaged the bucket, every `p.grad` is averaged with it, and nothing is copied back.


# %%
# %%ranks
class Bucket:
    """The gradients of some parameters in one flat piece of memory, `flat_P`."""

    def __init__(self, parameters):
        self.parameters, self.missing = parameters, set(parameters)
        self.flat_P = torch.zeros_like(flat(parameters))
        views = self.flat_P.split([p.numel() for p in parameters])
        self.view = {p: view.view_as(p) for p, view in zip(parameters, views, strict=True)}

    def take(self, p):
        """Move p's gradient in; a parameter that this rank's loss did not use gives zeros."""
        if p.grad is None:
            self.view[p].zero_()
        elif p.grad is not self.view[p]:
            self.view[p].copy_(p.grad)
        p.grad = self.view[p]
        self.missing.discard(p)

    def start(self):
        for p in list(self.missing):
            self.take(p)
        self.missing = set(self.parameters)
        start_all_reduce(self)


# %% [markdown]
# ### Build D: start a bucket
#
# Write `start_all_reduce(bucket)`: begin **one** all-reduce that will turn `bucket.flat_P` into its mean over the ranks, and
# return at once. With `async_op=True`, `dist.all_reduce` returns a handle instead of waiting. Leave it in `bucket.work`: after
# backward somebody will call `bucket.work.wait()`. What must not happen to `flat_P` while it travels?


# %%
# %%ranks
def start_all_reduce(bucket):
    """Begin to average bucket.flat_P over the ranks; its handle is in bucket.work. All ranks call it."""
    raise NotImplementedError  # your turn


checks.bucket_start(start_all_reduce, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution D
def start_all_reduce(bucket):
    """Begin to average bucket.flat_P over the ranks; its handle is in bucket.work. All ranks call it."""
    bucket.flat_P /= world_size  # before it leaves: nobody may touch it while it travels
    bucket.work = dist.all_reduce(bucket.flat_P, async_op=True)


checks.bucket_start(start_all_reduce, ranks, solution=True)

# %% [markdown]
# One rule is easy to miss: **all ranks must start their buckets in the same order**, because the n-th all-reduce of one rank
# meets the n-th of the others, whatever is in it. A bucket that fills early on one rank waits for its turn.


# %%
# %%ranks
def start_in_order(buckets, started, full_only):
    """Start buckets from number `started` on, up to the first that misses a gradient; how many have started by now."""
    while started < len(buckets) and not (full_only and buckets[started].missing):
        buckets[started].start()
        started += 1
    return started


# %% [markdown]
# And the whole: your broadcast at construction, your hook on every parameter, your buckets.

# %%
# %%ranks
import functools


class BucketedDDP(torch.nn.Module):
    """Data parallel: loss = model(...); loss.backward(); model.finish(); optimizer.step()"""

    def __init__(self, module, bucket_mib=1.0, overlap=True):
        super().__init__()
        broadcast_state(module)  # the same start
        self.module, self.overlap, self.sync, self.started = module, overlap, True, 0
        self.buckets = [Bucket(parameters) for parameters in pack(module, bucket_mib)]
        for bucket in self.buckets:
            for p in bucket.parameters:
                p.register_post_accumulate_grad_hook(functools.partial(self.ready, bucket))

    def forward(self, *args):
        return self.module(*args)

    def ready(self, bucket, p):  # the hook: backward has finished p's gradient
        if self.sync:
            bucket.take(p)
            if self.overlap:
                self.started = start_in_order(self.buckets, self.started, full_only=True)

    def finish(self):  # after backward: all ranks start what is left, and wait
        start_in_order(self.buckets, self.started, full_only=False)
        for bucket in self.buckets:
            bucket.work.wait()
        self.started = 0


# %% [markdown]
# Is it right? The next section proves it. First the times. The versions take turns, so that a busy moment of the machine hits
# all of them.


# %%
# %%ranks
from manyhands.measure.timing import take_turns


def step_of(model, finish=lambda: None):
    """Forward, backward and `finish()` as a function without arguments."""

    def step():
        model.zero_grad()
        model(x_bT, y_bT)[1].backward()
        finish()

    return step


# %%
# %%ranks --timeout 120
naive, hooked = new_model(), new_model()
average_by_hooks(hooked)
buckets, overlapping = (BucketedDDP(new_model(), bucket_mib, overlap) for overlap in (False, True))
calls = {
    "no averaging": step_of(new_model()),
    "naive": step_of(naive, functools.partial(average_gradients, naive)),
    "hooks": step_of(hooked),
    "buckets": step_of(buckets, buckets.finish),
    "buckets, overlap": step_of(overlapping, overlapping.finish),
}
step_s = take_turns(calls, repeats, ranks)
metrics.measured(step_s=step_s)

# %% [markdown]
# **Predict.** Which row of the plot comes closest to "no averaging"? Is it the one with overlap?
#
# <details><summary>Answer</summary>
#
# The fewer calls, the closer. Overlap hides communication behind backward *if* the sending is done by something other than the
# cores that compute: a network card, or a few of a GPU's many processors, which NCCL's kernel takes for itself. Where ranks
# share cores, as on a laptop, sending is work for the same cores, and there is little to hide behind.
#
# </details>


# %%
# %%ranks
import statistics


def in_ms(seconds, minus):
    """By how much `seconds` exceed `minus`, round by round: the median and the range, as 12 ms (11 to 14)."""
    ms = [1e3 * (a - b) for a, b in zip(seconds, minus, strict=True)]
    return f"{round(statistics.median(ms))} ms ({round(min(ms))} to {round(max(ms))})"


if rank == 0:
    from manyhands.plots.times import compared

    num_calls, alone = len(list(naive.parameters())), step_s["no averaging"]
    show(compared(step_s, f"a step on {these_ranks}"), "four_ways", "step times of five versions")
    say(f"naive averaging adds {in_ms(step_s['naive'], alone)} in {num_calls} calls")
    say(f"buckets add {in_ms(step_s['buckets'], alone)} in {len(buckets.buckets)}")
    saved = in_ms(step_s["buckets"], step_s["buckets, overlap"])
    say(f"overlap saves {saved} of that (less than 0: it costs)")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: buckets</summary>
#
# Draw the two cures on the board as two axes: fewer calls (buckets), no waiting (async). The
# usual question: "why not one bucket?" Answer with the experiment, not now. The usual mistake in their own code: dividing after
# the start, which is a race that goes well most of the time; the check sees it every time. When late: run the class cells
# without reading them, spend the time on the picture.
#
# </details>

# %% [markdown]
# ## The library, and three ways to the same gradient (CORE, 5 min)
#
# What you have built is `torch.nn.parallel.DistributedDataParallel`, **DDP**, in its main lines. Its own order of events:
#
# - **at construction** it broadcasts parameters and buffers from rank 0 (not the optimizer's state: that is yours);
# - **in forward** it notes that a backward will come, and broadcasts buffers, if there are any;
# - **in backward** its hooks fill buckets and start all-reduces; the end of backward waits for them, so there is no `finish()`;
# - **each rank updates itself**: `optimizer.step()` knows nothing of ranks.
#
# | | wrap | a step |
# |---|---|---|
# | ours | `BucketedDDP(model, bucket_mib)` | `loss.backward(); model.finish()` |
# | PyTorch | `DDP(model, bucket_cap_mb=25)` | `loss.backward()` |
# | HF Accelerate | `accelerator.prepare(model)`, a DDP inside | `accelerator.backward(loss)` |
#
# DDP's buckets hold 25 MiB unless you say otherwise, the first one 1 MiB, so that something is on its way early.
#
# Three ways now lead to one gradient: ours, the library's, and one process that reads the whole global batch. Compare
# *gradients*, under plain SGD, in float64. Adam divides by the gradient's size and so hides a wrong factor, and "the loss went
# down" hides nearly everything.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(
    globals(),
    *("broadcast_state", "start_all_reduce", "pack", "Bucket", "start_in_order", "BucketedDDP"),
    "average_gradients",
)


# %%
# %%ranks
import functools


def few_steps(model, batch_of, finish=lambda: None):
    """Three steps of SGD: the last gradients [P], the weights [P] after it, and this rank's losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(min(3, repeats)):
        optimizer.zero_grad()
        _, loss = model(*batch_of(step))
        loss.backward()
        finish()
        optimizer.step()
        losses.append(loss.detach())
    return flat(p.grad for p in model.parameters()), flat(model.parameters()), torch.stack(losses)


# %%
# %%ranks
float64 = functools.partial(new_model, torch.float64)
ours = BucketedDDP(float64(), bucket_mib)
ours_P, ours_weights_P, losses = few_steps(ours, batch, ours.finish)
library_P, library_weights_P, _ = few_steps(DDP(float64()), batch)
single_P, single_weights_P, single_losses = few_steps(float64(), functools.partial(batch, part=0, parts=1))
dist.all_reduce(losses)  # the loss of the batch is the mean of the ranks' losses
losses /= world_size

# %% tags=["nbval-check-output"]
# %%ranks
pairs = {
    "gradients, ours and the library": (ours_P, library_P),
    "gradients, ours and one process": (ours_P, single_P),
    "weights, ours and one process": (ours_weights_P, single_weights_P),
    "losses, ours and one process": (losses, single_losses),
}
for name, (a, b) in pairs.items():
    assert (a - b).abs().max() < 1e-10, f"{name} differ by {(a - b).abs().max():.1e}"
    if rank == 0:
        say(f"{name}: equal to 1e-10")
metrics.exact(float64_gradient=fingerprint([ours_P]), float64_losses=losses)
metrics.close(float64_losses_close=losses)

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
# **Predict.** 816,705 gradients of 4 bytes. What does a rank of four communicate per step, and what does it send on a ring?
#
# <details><summary>Answer</summary>
#
# 3.27 MB communicated, 2·3/4 = 1.5 times that, 4.90 MB, sent. With n ranks it is 2(n-1)/n: 3.27 MB for two, never above
# 6.53 MB.
#
# </details>

# %%
# %%ranks
on_ring = wire.ring_all_reduce_bytes(gradient_bytes, world_size)
for name, model in {"ours": BucketedDDP(new_model(), bucket_mib), "library": DDP(new_model())}.items():
    for _ in range(2):  # DDP sorts its buckets anew after the first backward: watch the second
        with wire.watch() as seen:
            model(*batch(0))[1].backward()
            if name == "ours":
                model.finish()
    payload = seen.payload_bytes("all_reduce")
    sent = "unknown here" if seen.transport_bytes is None else f"{seen.transport_bytes / 1e6:.2f} MB"
    if rank == 0:
        say(f"{name}: {seen.count('all_reduce')} all-reduces")
        say(f"  {payload / 1e6:.2f} MB communicated, predicted {gradient_bytes / 1e6:.2f} MB")
        say(f"  {sent} sent, predicted {on_ring / 1e6:.2f} MB")
    metrics.exact(**{f"{name}_bytes": payload})

# %% [markdown]
# ### Which of the two is faster? (MORE, 1 min)
#
# With buckets of the same size, taking turns. Expect a ratio near 1: the work is the same, and a handful of Python calls per
# bucket costs little.

# %%
# %%ranks --timeout 120
import statistics
from manyhands.measure.timing import take_turns, tok_per_s

rivals = {"ours": BucketedDDP(new_model(), bucket_mib), "library": DDP(new_model(), bucket_cap_mb=bucket_mib)}


def full_step(model, optimizer, finish):
    model(*batch(0))[1].backward()
    finish()
    optimizer.step()
    optimizer.zero_grad()


calls = {
    name: functools.partial(
        full_step, model, torch.optim.AdamW(model.parameters()), getattr(model, "finish", lambda: None)
    )
    for name, model in rivals.items()
}
samples = take_turns(calls, repeats, ranks)

# %%
# %%ranks
ratios = [b / a for a, b in zip(samples["ours"], samples["library"], strict=True)]
ratio = statistics.median(ratios)
rate = {name: tok_per_s(global_batch, 64, statistics.median(times)) for name, times in samples.items()}
if rank == 0:
    say(f"tokens per second: ours {rate['ours']:,.0f}, library {rate['library']:,.0f}")
    say(f"ours / library in each round: {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
metrics.measured(tok_per_s=rate, ours_to_library=ratio)

# %% [markdown]
# ### Half the bytes: a communication hook (MORE, 3 min)
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
# ### `no_sync`: average once for several backward passes (MORE, 4 min)
#
# A global batch that does not fit into memory is read in [*micro-batches*](../assets/glossary.md#micro-batch): several
# backward passes add up their gradients in `p.grad` ([**accumulation**](../assets/glossary.md#accumulation)), then comes one
# update. Averaging after each of them would be wasted.
#
# ![Three micro-batches: without no_sync an all-reduce follows each backward, with it only the
# last](../assets/03_no_sync.svg)
#
# Our class has the switch already: `self.sync`. The library's DDP has `with model.no_sync():`.


# %%
# %%ranks
import contextlib


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
    say(f"3 passes communicated {seen.payload_bytes() / gradient_bytes:.2f} times the gradient's bytes")
    say(f"the gradients are {apart} apart")

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
# On several ranks they are apart: the replicas part with the first update. Every rank now trains a model of its own on a part of
# the data, which is why the loss still falls, only less. Exercise 2 asks for the right way.

# %% [markdown]
# ## Train ShakespeareGPT (CORE, 5 min)
#
# Everything is in place. The loop below is a loop for one process with one line more, `DDP(...)`. Two habits to copy:
#
# - **Evaluate on all ranks.** Each takes its share of the validation batches, one all-reduce gives the mean.
# - **Keep the loss on the rank until the end.** A rank's own loss is that of its own share, not of the batch. The batch's is
#   the mean over the ranks; 150 of them can be averaged by one all-reduce after the last step.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "broadcast_state", "start_all_reduce", "pack", "Bucket", "start_in_order", "BucketedDDP")


# %%
# %%ranks
def validation_loss(model, num_batches, part=rank, parts=world_size):
    """Mean loss over one part of each of the first validation batches, this rank's unless told otherwise."""
    model.eval()
    with torch.no_grad():
        losses = [model(*batch(i, corpus.val_ids, part, parts))[1] for i in range(num_batches)]
    model.train()  # on every rank that called eval(): dropout must not stay off on some
    return torch.stack(losses).mean()


def evaluate(model, num_batches):
    """Mean validation loss over num_batches global batches. All ranks call it."""
    mean = validation_loss(model, num_batches)
    dist.all_reduce(mean)
    return mean.item() / world_size


def sample(model, seed, num):
    """Text that the model makes up, beginning after a line break."""
    start_BT = corpus.encode("\n")[None].to(device)
    return corpus.decode(model.generate(start_BT, num, generator=torch.Generator().manual_seed(seed))[0, 1:])


# %% [markdown]
# **Predict.** Shakespeare's vocabulary has 65 tokens here. What is the loss of a model that has learnt nothing and gives each
# the same probability? And after 150 steps: will the model write words, or only something that looks like lines of a play?
#
# <details><summary>Answer</summary>
#
# ln 65 = 4.174, and a fresh model errs a little around it. After 150 steps it has read 150·12·64 = 115,200 characters.
# Expect the shape of lines and short words, and a loss around 2.5.
#
# </details>

# %%
# %%ranks --timeout 600
import functools
import time
from manyhands.measure.timing import synchronise, tok_per_s

model = BucketedDDP(new_model(), bucket_mib) if ddp == "ours" else DDP(new_model())
finish = getattr(model, "finish", lambda: None)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses, looks, looking_s = torch.zeros(steps, device=device), [], 0.0


def look(step):
    """Validation loss and a sample; returns the seconds that it took. All ranks call it."""
    synchronise(device)
    begin = time.perf_counter()
    val_loss = evaluate(model.module, num_batches=max(1, steps // 20))
    looks.append((step, val_loss, sample(model.module, seed=0, num=min(90, steps)) if rank == 0 else None))
    if rank == 0:
        say(f"step {step:3d}: validation loss {val_loss:.3f}")
    return time.perf_counter() - begin


# %%
# %%ranks --timeout 600
begin = time.perf_counter()
for step in range(steps):
    if step in [steps * third // 3 for third in range(3)]:  # 0, 50, 100
        looking_s += look(step)
    _, loss = model(*batch(step))
    loss.backward()  # all ranks: the gradients are averaged in here
    finish()
    optimizer.step()  # each rank for itself
    optimizer.zero_grad()
    losses[step] = loss.detach()
synchronise(device)
train_s = time.perf_counter() - begin - looking_s
looking_s += look(steps)  # and step 150

# %% [markdown]
# What you should see below: a steep fall while the model learns which letters are common, then a slow one while it learns which
# follow which. Beside the curve, what rank 0 wrote at the four looks.

# %%
# %%ranks
dist.all_reduce(losses)
losses /= world_size
if rank == 0:
    from manyhands.plots.times import training

    figure = training(losses.cpu(), looks, len(corpus.vocab), f"ShakespeareGPT on {these_ranks}")
    show(figure, "training", "the loss falls from ln 65; beside it samples that turn from noise into words")

# %% [markdown]
# Every rank holds the same model. Let each write with a seed of its own:

# %%
# %%ranks
say(sample(model.module, seed=rank, num=min(150, steps)))
rate = tok_per_s(global_batch, 64, train_s / steps)
apart = spread(model.parameters())
if rank == 0:
    say(f"\nafter {steps} steps the replicas are {apart} apart; {rate:,.0f} tokens/s")
metrics.exact(losses=losses, validation=[v for _, v, _ in looks], weights=fingerprint(model.parameters()))
metrics.close(first_losses=losses[:6], first_validation=looks[0][1])
metrics.close(tolerance=0.05, last_validation=looks[-1][1])
metrics.measured(training_tok_per_s=rate)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: training</summary>
#
# The run takes a quarter of a minute on two cores; talk while it runs, about what each rank is doing
# *now*. Ask: "which line of the loop would be different without DDP?" (None but the wrap.) Usual mistakes: printing the loss
# every step with an all-reduce; `if rank == 0: evaluate(...)`, which hangs, because evaluate holds a collective.
#
# </details>

# %% [markdown]
# ## Where the time goes (CORE, 2 min)
#
# The log of a [published
# run](https://github.com/saforem2/personal_site/blob/82205852654c9b504ce732a0aae2e358e9b0bf2d/docs/talks/alcf-hpc-workshop-2024/alcf-hpc-workshop-2024.md)
# of a ShakespeareGPT shows a training cycle of 69 s on its four GPUs. In each, rank 0 evaluated, sampled and saved, while the
# three others waited at the next all-reduce. That took **59 % of the cycle**.
#
# ![A cycle of 69 seconds on four ranks: 28 s of training on all, then 41 s in which only rank 0 evaluates, samples and
# saves, and three ranks wait](../assets/03_rank_0_evaluates.svg)
#
# **Predict.** On n ranks, what does the evaluation cost if all of them share it?
#
# <details><summary>Answer</summary>
#
# A 1/n of its time, if each rank has cores of its own: of those 41 s about 10 on four GPUs. On a laptop whose ranks share
# cores you gain as many times as there are cores, at best.
#
# </details>
#
# Now both ways on your ranks, the same batches and the same function, in turns.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "validation_loss", "evaluate")

# %%
# %%ranks
import statistics
from manyhands.measure.timing import take_turns

model, num_batches = new_model(), 2 * repeats


def rank_0_evaluates():
    if rank == 0:  # whole batches, all by itself
        validation_loss(model, num_batches, part=0, parts=1)
    dist.barrier()  # the others wait here


eval_s = take_turns({"alone": rank_0_evaluates, "all": lambda: evaluate(model, num_batches)}, repeats, ranks)
faster = [alone / together for alone, together in zip(eval_s["alone"], eval_s["all"], strict=True)]
if rank == 0:
    alone_ms, all_ms = (1e3 * statistics.median(eval_s[name]) for name in ("alone", "all"))
    say(f"{num_batches} batches: {alone_ms:.0f} ms by rank 0 alone, {all_ms:.0f} ms by {these_ranks}")
    say(f"{statistics.median(faster):.1f} times faster ({min(faster):.1f} to {max(faster):.1f})")
metrics.measured(evaluation_s=eval_s)

# %% [markdown]
# ## Experiment: how large should a bucket be? (CORE, 5 min)
#
# Small buckets start early and pay the price of a call many times. One large bucket pays once and starts when backward is over.
# In between lies the best size. Where?
#
# First a machine in which sending costs no core: the [**virtual network**](../assets/glossary.md#virtual-network). The ranks and the messages are real, the *time* is
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

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(
    globals(),
    *("broadcast_state", "start_all_reduce", "pack", "Bucket", "start_in_order", "BucketedDDP"),
    *("step_of", "in_ms"),
)

# %%
# %%ranks --timeout 120
from manyhands.measure.virtual_network import Link, VirtualNetwork

link = Link(latency_s=0.1e-3, bytes_per_s=0.4e9)
network, backward_s = VirtualNetwork(ranks, link), 20e-3
numbers = 819_200  # about as many gradients as ShakespeareGPT has, and they split into 32 equal buckets


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


# %%
# %%ranks --timeout 120
def predicted_step(k):
    ring_s = 2 * (world_size - 1) * link.cost_s(4 * numbers / k / world_size)
    return max(backward_s + ring_s, backward_s / k + k * ring_s)


counts = [1, 2, 4, 8, 16, 32]
virtual_s, predicted_s = ([step_s(k) for k in counts] for step_s in (virtual_step, predicted_step))
if rank == 0:
    worst = max(abs(v / p - 1) for v, p in zip(virtual_s, predicted_s, strict=True))
    say(f"virtual against predicted: {100 * worst:.2f} % off at most")
metrics.exact(virtual_step_s=virtual_s)

# %% [markdown]
# Now your own class on this machine, at three sizes, with overlap and without. One bucket is complete only when backward is
# over, so there is nothing to overlap: what the first line prints is noise, and a yardstick for the others.

# %%
# %%ranks --timeout 200
import functools
import statistics
from manyhands.measure.timing import take_turns

sizes_mib = [4.0, 1.0, 0.1]
keys = [(size_mib, overlap) for size_mib in sizes_mib for overlap in (False, True)]
models = {key: BucketedDDP(new_model(), *key) for key in keys}
calls = {key: step_of(model, model.finish) for key, model in models.items()}
step_s = take_turns({"no averaging": step_of(new_model()), **calls}, repeats, ranks)
bucket_counts = [len(models[size_mib, True].buckets) for size_mib in sizes_mib]
plain, overlapped = ([step_s[size_mib, overlap] for size_mib in sizes_mib] for overlap in (False, True))
if rank == 0:
    for k, without, with_overlap in zip(bucket_counts, plain, overlapped, strict=True):
        say(f"{k:2d} bucket{'s' * (k > 1)}: overlap saves {in_ms(without, with_overlap)}")
metrics.measured(bucket_counts=bucket_counts, bucket_step_s=overlapped, bucket_no_overlap_s=plain)

# %%
# %%ranks
if rank == 0:
    from manyhands.plots.times import bucket_sizes

    samples = {"no overlap": plain, "overlap": overlapped, "no averaging": step_s["no averaging"]}
    title = f"this machine, {these_ranks}"
    figure = bucket_sizes(counts, virtual_s, predicted_s, bucket_counts, samples, title)
    show(figure, "bucket_size", "step time against the number of buckets: virtual, a U; measured, whiskers")

# %% [markdown]
# **The residual.** On the left there is none: the formula *is* the schedule. On the right, where ranks share cores, gloo's
# all-reduce is work for the very cores that compute: expect little from overlap, and the more from fewer calls. On GPUs a few
# processors and the network card do the sending, and where gradients are large the U is real. DDP's 25 MiB are its authors'
# estimate of where its floor lies (Li et al. 2020).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the experiment</summary>
#
# *Say:* the left picture is what DDP was built for, the right one is what you have. *Usual
# mistakes:* concluding from the right one that overlap is useless; reading the virtual milliseconds as this machine's. *When
# late:* show the virtual U only. *Ask:* "you double the latency; where does the floor of the U move?" (To fewer
# buckets. Let somebody change `latency_s` and run the cell.)
#
# </details>

# %% [markdown]
# ### What the two branches of the U look like (MORE, 1 min)
#
# Once with 8 buckets, where the network keeps up and only the last bucket sticks out, and once with 32, where latency piles up.

# %%
# %%ranks
for k in (8, 32):
    took_s = virtual_step(k)
    spans = network.gather_spans()
    if rank == 0:
        from manyhands.plots.schedule import gantt

        figure = gantt(spans, f"{k} buckets: {1e3 * took_s:.1f} virtual ms", virtual=True)
        show(figure, f"overlap_{k}", f"hatched communication under solid backward, {k} buckets on each rank")

# %% [markdown]
# ## Weak scaling: when more ranks stop helping (MORE, 4 min)
#
# **Weak scaling** keeps the work *per rank* and adds ranks: ideal is twice the tokens per second on twice the ranks. (Strong
# scaling keeps the *whole* work. Lesson 05 has both.)
#
# ![Weak scaling: one, two and four ranks, three sequences each; the batch grows with the ranks](../assets/03_weak_scaling.svg)
#
# **Predict.** The first line of output told the number of cores. What
# [efficiency](../assets/glossary.md#weak-scaling) do you expect on 1, 2 and 4 ranks: the tokens per second of n ranks, divided
# by n times those of one?
#
# <details><summary>Answer</summary>
#
# Up to as many ranks as there are cores, below 100 %: the averaging is added, and the waiting for each other. Beyond that the
# ranks share cores. Four ranks on two cores can hardly exceed 50 %, whatever DDP does.
# Ranks with a GPU each share none: what is left is averaging and waiting, and for a model as small as this, launches.
#
# </details>

# %%
# %%ranks --timeout 120
import functools
from manyhands.measure.timing import take_turns

three = get_batch(corpus.train_ids, 0, 3, 64, 0, 1, seed=rank)  # sequences for each rank, however many ranks
three = [ids_bT.to(device) for ids_bT in three]


def training_step(model, optimizer):
    model(*three)[1].backward()
    optimizer.step()
    optimizer.zero_grad()


sizes, calls = [n for n in (1, 2, 4) if n <= world_size], {}
for n in sizes:
    group = dist.new_group(range(n))  # all ranks make it, also those that are not in it
    calls[n] = lambda: None  # these wait for the others' step to end
    if rank < n:
        model = DDP(new_model(), process_group=group)
        calls[n] = functools.partial(training_step, model, torch.optim.AdamW(model.parameters()))
step_s = take_turns(calls, repeats, ranks)

# %%
# %%ranks
import statistics

slower = {n: sorted(s / one for s, one in zip(step_s[n], step_s[1], strict=True)) for n in sizes}
if rank == 0:
    from manyhands.plots.times import weak_scaling

    for n in sizes[1:]:
        best, worst, middle = (f"{100 / f:.0f}" for f in (slower[n][0], slower[n][-1], statistics.median(slower[n])))
        say(f"{n} ranks: efficiency {middle} % ({worst} to {best})")
    figure = weak_scaling(sizes, list(step_s.values()), 3 * 64, "weak scaling on this machine")
    show(figure, "weak_scaling", "tokens per second against ranks, measured with whiskers, and the ideal line")
rates = [3 * 64 * n / statistics.median(step_s[n]) for n in sizes]
metrics.measured(weak_scaling={"ranks": sizes, "tok_per_s": rates})

# %% [markdown]
# Find the first number of ranks whose efficiency is far below 100 %; on the CPU compare it with the number of cores. An
# all-reduce waits for its slowest rank, and a rank without a core of its own is always slow. On one machine that is when more ranks stop
# helping: nothing is left to compute on. Between machines it is the network.

# %% [markdown]
# ## Exercises (MORE, 17 min)
#
# Each check runs your answer in a process group of its own: you cannot break anything.
#
# ### Exercise 1: tied, frozen and unused parameters
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
# solution 1
def average_untidy(model):
    for p in model.parameters():  # lists a tied parameter once
        if p.requires_grad:  # the same on every rank, so all ranks make the same calls ...
            if p.grad is None:
                p.grad = torch.zeros_like(p)  # ... also where this rank has nothing to add
            p.grad /= world_size
            dist.all_reduce(p.grad)


checks.untidy(average_untidy, ranks, solution=True)

# %% [markdown]
# (A parameter that *no* rank used now has a gradient of zeros, where one process would have None. To plain SGD that is the
# same. AdamW decays the weight of the one and skips the other. DDP with `find_unused_parameters=True` keeps None: it sends one
# more small all-reduce, of an integer per parameter tensor.)
#
# ### Exercise 2: accumulate with the library's `no_sync`
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
# solution 2
def accumulate(ddp, micro_batches):
    k = len(micro_batches)
    with ddp.no_sync():  # around forward too: that is where DDP looks
        for x, y in micro_batches[:-1]:
            (F.mse_loss(ddp(x), y) / k).backward()
    x, y = micro_batches[-1]
    (F.mse_loss(ddp(x), y) / k).backward()


checks.accumulation(accumulate, ranks, solution=True)

# %% [markdown]
# ### Exercise 3: predict the bytes of a step
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
# solution 3
def bytes_per_step(num_params, n_ranks, bytes_per_value=4, micro_batches=1, no_sync=False):
    times = 1 if no_sync else micro_batches
    return times * 2 * (n_ranks - 1) / n_ranks * num_params * bytes_per_value


checks.bytes_per_step(bytes_per_step, ranks, solution=True)

# %% [markdown]
# ## A bug from the zoo (CORE, 2 min)
#
# A teaching library for distributed training has, beside its bucketed data parallel class, a naive one. Its heart is below, in
# our words, and beside it the library's DDP. It runs, on all ranks, and the loss falls. **What is wrong, and which of this
# lesson's instruments shows it?** Write down your suspicion before you open the answer.


# %%
# %%ranks
def clear_and_wrong(model):
    def average(gradient):
        dist.all_reduce(gradient)
        gradient /= world_size

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(average)


suspect = new_model()
clear_and_wrong(suspect)
for name, model in {"suspect": suspect, "library": DDP(new_model())}.items():
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(repeats, device=device)
    for step in range(repeats):
        optimizer.zero_grad()
        _, loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    dist.all_reduce(losses)
    if rank == 0:
        say(f"{name} {' '.join(f'{loss:.3f}' for loss in (losses / world_size).tolist())}")

# %% [markdown]
# Both fall. Without the second line, would you have noticed? Now measure `spread`: of the weights or of the gradients, and when?

# %%
# %%ranks
optimizer = torch.optim.SGD(suspect.parameters(), lr=0.1)
optimizer.zero_grad()
suspect(*batch(0))[1].backward()
weights, gradients = spread(suspect.parameters()), spread(p.grad for p in suspect.parameters())
optimizer.step()
after = spread(suspect.parameters())
if rank == 0:
    say(f"after backward: weights {weights:.1e} apart, gradients {gradients:.1e} apart")
    say(f"after the step: weights {after:.1e} apart")

# %% [markdown]
# <details><summary>Answer</summary>
#
# A *post-accumulate* hook is handed the **parameter**. So the line that says `gradient` averages the weights, and the gradients
# stay each rank's own. There is a trap in the measurement: between backward and the step the weights are 0.0 apart on every
# machine, because the hooks have just averaged them. Look there, and all is well. Then each rank updates with the gradient of
# its own share, and computes the next loss with weights that nobody else has. Somebody who read PyTorch's documentation asked
# about it: [picotron#39](https://github.com/huggingface/picotron/issues/39). The cure is build C: average `p.grad`.
#
# </details>
#
# The rule to take home: **measure the spread of the gradients after backward.** It must be 0.0. The loss will not tell you.
#
# ### Two more from the same family (MORE, 3 min)
#
# Both from one workshop's trainer. In the first, somebody prepared for fp16: `backward()` and `step()` stand under the
# scaler that fp16 needs. What happens where there is no scaler, as in fp32?

# %%
# %%ranks
scaler = None  # fp16 alone makes one: torch.amp.GradScaler()
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
# Without a scaler nothing trains, and nothing says so. One line would have: assert that the first step changes the weights.
#
# In the second, rank 0 draws a sample between two steps. Which rank trains with dropout afterwards? A model with dropout gives
# a different loss each time it reads the same batch:

# %% tags=["nbval-check-output"]
# %%ranks
from dataclasses import replace

model = GPT(replace(config, dropout=0.1)).to(device)
model.eval()  # all ranks, before sampling
if rank == 0:
    model.generate(x_bT[:1, :1], 5)
    model.train()  # and here is the mistake
once, again = (model(*batch(0))[1].item() for _ in range(2))
say(f"the same batch twice: {'the same loss' if once == again else 'another loss'}")

# %% [markdown]
# Only rank 0. Whatever changes the state of a model belongs outside `if rank == 0`. Only files and the screen belong inside.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# Two minutes of silence after the first cell, then hands up: who suspects the division, who the
# hook, who the loss? Only then the cell that measures. The point is not the bug but the instrument, and the moment at which you
# read it. *When late:* keep this, drop the two MORE ones.
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
# all-reduce runs on the GPU in a stream of its own, so overlap is real there. A step of this small model takes a few
# milliseconds, so everything else weighs more: evaluation, printing, and `loss.item()`, which waits for the GPU.
#
# **What to look for** in the job's output: the line that says who is here (as many ranks as you asked for, each on its own
# GPU, not n times "rank 0 of 1"); the same `first_losses` in the run's `metrics.json` as on your laptop, to 1e-3, for the same
# `--global-batch`; and the tokens per second on 1, 2 and 4 nodes.

# %% [markdown]
# ## Recap
#
# 1. Same start, same averaged gradient, same update: the replicas stay identical to the last bit.
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
# - Goyal et al. 2017, [Accurate, large minibatch SGD](https://arxiv.org/abs/1706.02677): what happens to learning when n is
#   256; its section 3 lists mistakes in distributed training that do not fail. Lesson 05 goes on from there.

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
