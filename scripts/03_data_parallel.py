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
# **55 minutes** for the sections marked CORE, 107 with those marked MORE.
#
# ![Three timelines of one step: naive averages the gradients in many calls after backward, buckets in a few calls, and
# with overlap all but the last bucket travel while backward still runs](../assets/03_overlap.svg)
#
# All three steps compute the same numbers on the same network. **Why is the last one fastest, and how much speed per GPU is
# left on 512 GPUs?** You build it, prove that it is right, and train a GPT with it.
#
# After this lesson **you can**
# - explain what keeps replicas identical, and what breaks it;
# - build what `DistributedDataParallel` (DDP) does, and prove that it computes what one process computes;
# - predict what overlap saves.
#
# **You need** [rank](../assets/glossary.md#rank) ([lesson 00](00_start.ipynb)): one of n processes that run this same file;
# and [all-reduce](../assets/glossary.md#all-reduce) ([lesson 02](02_collectives.ipynb)): after `dist.all_reduce(x)` every
# rank's `x` is the sum of all.
#
# **New here:** [data parallel](../assets/glossary.md#data-parallel), [bucket](../assets/glossary.md#bucket),
# [hook](../assets/glossary.md#hook), [overlap](../assets/glossary.md#overlap),
# [no_sync](../assets/glossary.md#no_sync), [weak scaling](../assets/glossary.md#weak-scaling).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Let everyone run the first cells before you talk. The six builds take about three minutes each; walk around while
# people write.
#
# *Say:* one sentence carries the lesson: "same start, same averaged gradient, same update, so the replicas never part".
# Come back to it at every section. The rest only makes the averaging cheaper.
#
# *Three usual mistakes:* thinking that DDP averages weights; thinking that rank 0 is a server that the others report to;
# reading the loss of rank 0 as the loss of the batch.
#
# *When late:* open the solutions of builds C to E, start the training run before you explain it, keep the zoo.
#
# *Ask the room:* "Rank 2 drew different first weights. After a thousand steps of perfect averaging, what is
# different on rank 2?" Let them type a guess before the section on the same start.
#
# </details>

# %% [markdown]
# ## Start (CORE, 3 min)
#
# These are the lesson's settings; in a script they are flags, such as `--steps 300`.

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
steps = 150  # training steps, at least 1
global_batch = 0  # sequences per step, all ranks together; 0: 12, or more where it does not split, at least 0
bucket_mib = 1.0  # size of a gradient bucket in MiB, > 0
ddp = "ours"  # which DDP trains the GPT, one of ours, library
repeats = 5  # samples of each timing, at least 1

# %% [markdown]
# The next cell starts the ranks:

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("03_data_parallel", globals())

# %%
# %%ranks
import functools

import torch
import torch.distributed as dist
from manyhands import ____, card, compare, fingerprint, join, leave, say, say_once
from manyhands.checks import data_parallel as checks
from manyhands.lessons import data_parallel as lesson
from manyhands.measure import wire
from manyhands.measure.replicas import flat, spread
from manyhands.train.shakespeare import Shakespeare
from torch.nn.parallel import DistributedDataParallel as DDP

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
shakespeare = Shakespeare(ranks, global_batch, steps=steps, bucket_mib=bucket_mib, ddp=ddp)
new_model, batch, sgd_steps = shakespeare.new_model, shakespeare.batch, shakespeare.sgd_steps

# %% [markdown]
# What every section uses:
#
# - `new_model()` returns **ShakespeareGPT**, which reads 64 characters and guesses the next: 816,705 parameters;
# - `batch(step)` returns this rank's own part of one [**global batch**](../assets/glossary.md#global-batch), the text
#   that all ranks process in one step;
# - `sgd_steps(model, finish)` trains a few steps, and calls `finish()` between `loss.backward()` and the update;
# - `spread(tensors)` is the largest difference between any two ranks. **0.0 means bit-identical.**
#
# `lesson` draws and prints for this lesson.

# %% [markdown]
# **Predict.** A model of 7 billion parameters trains on 8 GPUs, then on 512, with the same work for each GPU. Each must now
# average with 511 others. How much of its speed does a GPU keep, in percent? This one you can only guess. Replace the
# blank, `____`.

# %%
# %%ranks
guess_kept = ____  # your turn: type a number, in %

# %% [markdown]
# ## One averaged step (CORE, 7 min)
#
# In **data parallel** training each rank has a **replica** of the model and its own part of the text. What must the ranks
# exchange so that you end up with one model, not four?
#
# ![Four ranks hold the same weight and one row each; each computes its own gradient, an all-reduce averages the four, and
# all make the same update](../assets/03_two_copies.svg)
#
# Take one weight, y = w·x, and one row of data per rank. The loss is (w·x − y)², so the gradient is 2x·(w·x − y). At w = 1
# the row x = 1, y = 3 gives 2·1·(1 − 3) = −4.

# %%
# %%ranks
w = torch.nn.Parameter(torch.ones((), device=device))
x, y = rank + 1, [3, 4, 7, 6][rank % 4]
((w * x - y) ** 2).backward()
say(f"x = {x}, y = {y}: my gradient is {w.grad.item():.0f}")

# %% [markdown]
# One process that reads all four rows would get the mean of these gradients.
#
# ### Build A: average the gradients
#
# Fill in the blanks so that each `p.grad` becomes its mean over the ranks, in place.


# %%
# %%ranks
def average_gradients(model):
    """Turn each gradient into its mean over the ranks. All ranks call it, after backward."""
    for p in model.parameters():  # p.grad is the gradient
        ____  # divide first: in fp16 a sum over many ranks could overflow
        ____  # then add up over the ranks


checks.mean_gradient(average_gradients, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution A</summary>
#
# ```python
# def average_gradients(model):
#     """Turn each gradient into its mean over the ranks. All ranks call it, after backward."""
#     for p in model.parameters():
#         p.grad /= world_size
#         dist.all_reduce(p.grad)
# ```
#
# </details>

# %% [markdown]
# Now every rank makes its own update:

# %% tags=["nbval-check-output"]
# %%ranks
average_gradients(torch.nn.ParameterList([w]))
torch.optim.SGD([w], lr=0.01).step()
say(f"averaged gradient {w.grad.item():.0f}; w is now {w.item():.2f}; the replicas are {spread([w])} apart")

# %% [markdown]
# Exactly 0.0: every rank applied the same update to the same weight, and **no weight was sent**.

# %% [markdown]
# ## The same start (CORE, 7 min)
#
# Replicas stay equal if they *start* equal and apply equal updates. Now break the first half.
#
# **Predict.** Each rank draws its first weights from its own seed. Then the ranks train with perfectly averaged gradients.
# Does the gap between the replicas become smaller, stay the same, or grow?

# %%
# %%ranks
guess_gap = ____  # your turn: type "smaller", "the same" or "larger"


# %%
# %%ranks
model = new_model(seed=rank)  # the mistake
before = spread(model.parameters())
sgd_steps(model, lambda: average_gradients(model), 2 * repeats)
gap = f"{before:.4f} before, {spread(model.parameters()):.4f} after {2 * repeats} steps"
compare("the gap after averaged steps", "guess_gap", "the same", because=gap)

# %% [markdown]
# ![Two paths in the plane of two weights: from different starts the same steps lead to different ends, the gap stays; from
# the same start the paths are one](../assets/03_same_start.svg)
#
# Every replica moves by the same amount, so the gap cannot change. Averaging gradients keeps replicas equal; it never
# *makes* them equal. So every rank first takes rank 0's weights, and its
# [**buffers**](../assets/glossary.md#buffer): numbers that a layer keeps without learning them, such as BatchNorm's
# running mean.
#
# ### Build B: the same start
#
# `model.parameters()` and `model.buffers()` list the tensors. `dist.broadcast(tensor, src=0)` writes rank 0's numbers into
# every rank's `tensor`. Autograd must not see it: pass `tensor.detach()`, which shares memory.


# %%
# %%ranks
def broadcast_state(model):
    """Every rank takes rank 0's parameters and buffers. All ranks call it."""
    for tensor in ____:  # all parameters, all buffers
        ____


checks.same_start(broadcast_state, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def broadcast_state(model):
#     """Every rank takes rank 0's parameters and buffers. All ranks call it."""
#     for tensor in [*model.parameters(), *model.buffers()]:
#         dist.broadcast(tensor.detach(), src=0)
# ```
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
broadcast_state(model)
sgd_steps(model, lambda: average_gradients(model), 2 * repeats)
say(f"after a broadcast and more averaged steps the replicas are {spread(model.parameters())} apart")

# %% [markdown]
# ## Fifty calls (CORE, 2 min)
#
# You have a correct data parallel step. What does its averaging send?

# %%
# %%ranks
model = new_model()
model(*batch(0))[1].backward()
with wire.watch() as seen:
    average_gradients(model)
say(f"{seen.count('all_reduce')} all-reduces of {seen.payload_bytes() / 1e6:.2f} MB together")

# %% [markdown]
# Correct but slow: one call for each gradient, while nobody computes. A call for a LayerNorm's 512 bytes costs almost
# only latency (lesson 02). There are two cures: **call less often**, and **start the call while backward still runs**.

# %% [markdown]
# ## Buckets that leave early (CORE, 13 min)
#
# **Buckets.** Collect gradients in one flat piece of memory, and send it with one call when it is full.
#
# ![The parameters from the last to the first fill four buckets; when a bucket is full, one all-reduce
# starts](../assets/03_buckets.svg)
#
# **Hooks.** When backward has passed a layer, that layer's gradient is final. `p.register_post_accumulate_grad_hook(f)`
# calls `f(p)` at that moment. So the gradient can travel while backward goes on: communication and computing
# [**overlap**](../assets/glossary.md#overlap).
#
# ![Forward runs from the embedding to the head, backward from the head to the embedding; each layer's gradient is ready when
# backward has passed it, and its hook fires](../assets/03_hooks.svg)
#
# A `Bucket` holds the gradients of some parameters in one row, `flat_P`. `take(p)` moves a gradient in; from then on
# `p.grad` is a view of the row. Average the row, and every gradient is averaged.


# %%
# %%ranks
class Bucket:
    """The gradients of some parameters in one flat piece of memory, `flat_P`."""

    def __init__(self, parameters):
        self.parameters, self.missing = parameters, set(parameters)  # those that have not come yet
        self.flat_P = torch.zeros_like(flat(parameters))
        views = self.flat_P.split([p.numel() for p in parameters])
        self.view = {p: view.view_as(p) for p, view in zip(parameters, views, strict=True)}

    def take(self, p):
        self.view[p].copy_(torch.zeros_like(p) if p.grad is None else p.grad)  # None: not used in this rank's loss
        p.grad = self.view[p]
        self.missing.discard(p)

    def start(self):
        for p in list(self.missing):
            self.take(p)
        start_all_reduce(self)  # your build C
        self.missing = set(self.parameters)  # of the next step


# %% [markdown]
# ### Build C: start a bucket
#
# Begin **one** all-reduce that will turn `bucket.flat_P` into its mean over the ranks, and return at once. With
# `async_op=True`, `dist.all_reduce` returns a handle instead of waiting. Nobody may touch `flat_P` while it travels, so
# divide in place *before*.


# %%
# %%ranks
def start_all_reduce(bucket):
    """Begin to average bucket.flat_P over the ranks. All ranks call it."""
    ____
    bucket.work = ____  # somebody calls bucket.work.wait() after backward


checks.bucket_start(start_all_reduce, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution C</summary>
#
# ```python
# def start_all_reduce(bucket):
#     """Begin to average bucket.flat_P over the ranks. All ranks call it."""
#     bucket.flat_P /= world_size
#     bucket.work = dist.all_reduce(bucket.flat_P, async_op=True)
# ```
#
# </details>

# %% [markdown]
# ### Build D: the hook of a bucket
#
# **All ranks must start their buckets in the same order**, because ranks match all-reduces by order, not by content. If
# rank 0 starts bucket 1 first and rank 1 bucket 0, the two are added. So `waiting` lists the buckets that have not
# started, in the order in which they must start. A bucket that fills early waits. When the first is full, several may
# leave at once.


# %%
# %%ranks
def bucket_hook(waiting, bucket, p):
    """Backward has finished p.grad, which belongs in `bucket`."""
    ____  # p's gradient moves into its bucket
    while waiting and ____:  # the first in line has all its gradients
        ____  # remove it from the list, and start it


checks.bucket_hook(bucket_hook, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution D</summary>
#
# ```python
# def bucket_hook(waiting, bucket, p):
#     """Backward has finished p.grad, which belongs in `bucket`."""
#     bucket.take(p)
#     while waiting and not waiting[0].missing:
#         waiting.pop(0).start()
# ```
#
# </details>

# %% [markdown]
# ### Build E: finish
#
# Backward is over. Some buckets may not have started, because this rank's loss did not use all parameters: `waiting`
# lists them. Start these. Then wait for **all** `buckets`, with the handles of build C.


# %%
# %%ranks
def finish(buckets, waiting):
    """Start the buckets that are waiting, in their order, then wait for all. All ranks call it."""
    for bucket in ____:
        ____
    for bucket in ____:
        ____


checks.finish(finish, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution E</summary>
#
# ```python
# def finish(buckets, waiting):
#     """Start the buckets that are waiting, in their order, then wait for all. All ranks call it."""
#     for bucket in waiting:
#         bucket.start()
#     for bucket in buckets:
#         bucket.work.wait()
# ```
#
# </details>

# %% [markdown]
# Now put your pieces together. `lesson.pack` splits the parameters, in the order of backward, into lists of at most
# `bucket_mib`.


# %%
# %%ranks
class BucketedDDP(torch.nn.Module):
    """Data parallel: loss = model(...); loss.backward(); model.finish(); optimizer.step()"""

    def __init__(self, module, bucket_mib=1.0):
        super().__init__()
        broadcast_state(module)  # build B: the same start
        self.module, self.sync = module, True
        self.buckets = [Bucket(parameters) for parameters in lesson.pack(module, bucket_mib)]
        for bucket in self.buckets:
            for p in bucket.parameters:
                p.register_post_accumulate_grad_hook(functools.partial(self.ready, bucket))

    def forward(self, *args):
        self.waiting = list(self.buckets)  # those that have not started in this step
        return self.module(*args)

    def ready(self, bucket, p):  # backward has finished p's gradient
        if self.sync:
            bucket_hook(self.waiting, bucket, p)  # build D

    def finish(self):
        finish(self.buckets, self.waiting)  # build E


# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: buckets</summary>
#
# Draw the two cures on the board as two axes: fewer calls (buckets), no waiting (async). The usual question: "why not one
# bucket?" Answer with the section on the number of buckets. The usual mistake in build C: dividing after the start, which
# is a race that goes well most of the time; the check sees it every time. In build D: `if` in place of `while`. If somebody
# asks why the hook is called *post accumulate*: an ordinary tensor hook sees the new gradient before it is added to
# `p.grad`, so with accumulation it would send a part.
#
# </details>

# %% [markdown]
# ## Three ways to one gradient (CORE, 4 min)
#
# Is it right? Your DDP, the library's and one process that reads the whole global batch must get the same *gradients*, in
# float64, under plain SGD. (Adam divides by the gradient's size, which hides a wrong factor.)

# %% tags=["nbval-check-output"]
# %%ranks
double, found = functools.partial(new_model, torch.float64), {}
for name, model, part in (
    ("ours", BucketedDDP(double(), bucket_mib), {}),
    ("the library", DDP(double()), {}),
    ("one process", double(), {"part": 0, "parts": 1}),
):
    losses = sgd_steps(model, getattr(model, "finish", lambda: None), **part)
    found[name] = flat(p.grad for p in model.parameters()), flat(model.parameters()), losses
lesson.expect_equal(found, shakespeare.metrics)

# %% [markdown]
# You have built the heart of DDP. The [handbook](../assets/handbook/03_data_parallel.md) says what else the library
# does.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the library</summary>
#
# *Ask:* "DDP never sends weights after the start. What keeps them equal?" *Usual mistakes:* calling `model.module(...)` in
# training, which goes past DDP; expecting that `DDP(model)` shares out the data; wrapping before `.to(device)`.
#
# </details>

# %% [markdown]
# ## Train ShakespeareGPT (CORE, 5 min)
#
# The loop is that of one process, with two lines more: `BucketedDDP(...)` and `finish()`. (The library's `DDP` needs no
# `finish()`: its backward waits.) Two habits to copy:
#
# - **Evaluate on all ranks.** Each takes its share of the validation batches; one all-reduce gives the mean.
# - **Average the losses once, at the end.** Until then each rank keeps its own.
#
# At four steps `diary.look` prints the validation loss and lets the model write.


# %%
# %%ranks --timeout 600
model = BucketedDDP(new_model(), bucket_mib) if ddp == "ours" else DDP(new_model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
diary, losses = lesson.Diary(shakespeare, steps), torch.zeros(steps, device=device)
for step in range(steps):
    diary.look(model.module, step)
    _, loss = model(*batch(step))
    loss.backward()  # the library's DDP averages in here
    if ddp == "ours":
        model.finish()
    optimizer.step()  # each rank updates its own replica
    optimizer.zero_grad()
    losses[step] = loss.detach() / world_size  # this rank's part of the mean
diary.look(model.module, steps)

# %% [markdown]
# A model that knows nothing gives each of the 65 characters the same probability: its loss is ln 65 = 4.17.

# %%
# %%ranks
dist.all_reduce(losses)
say_once(f"after {steps} steps the replicas are {spread(model.parameters())} apart")
diary.draw(losses)
diary.record(losses, model)

# %% [markdown]
# After 14,000 steps on 36 plays, four minutes on one GPU, a [larger model](../assets/models/README.md) writes like this:

# %%
# %%ranks
lesson.say_what_a_trained_model_writes(ranks)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: training</summary>
#
# The run takes a quarter of a minute on two cores; talk while it runs, about what each rank is doing
# *now*. Ask: "which line of the loop would be different without DDP?" (None but the wrap and `finish`.) Usual mistakes: printing the loss
# every step with an all-reduce; `if rank == 0: evaluate(...)`, which hangs, because evaluate holds a collective.
#
# </details>

# %% [markdown]
# ## How much can overlap hide? (CORE, 6 min)
#
# Many small buckets start early and pay the latency many times. One large bucket pays once and starts when backward is over.
# A laptop cannot show which is best, because its ranks compute and send on the same cores. The [**virtual
# network**](../assets/glossary.md#virtual-network) can: ranks and messages are real, the *time* is computed. Backward takes
# 20 ms, and a message 0.1 ms plus its bytes at 0.4 GB/s. On four ranks the ring of a bucket has six messages, each a
# quarter of it.
#
# One bucket of 3.3 MB starts after backward: 20 + 6 · (0.1 + 2.05) = 33 ms. Smaller ones are ready at equal intervals
# during backward, and travel one after the other.
#
# **Predict.** Which is fastest: 1, 8 or 32 buckets?

# %%
# %%ranks
guess_buckets = ____  # your turn: type 1, 8 or 32

# %%
# %%ranks --timeout 120
from manyhands.measure.virtual_network import Link, VirtualNetwork

network = VirtualNetwork(ranks, Link(latency_s=0.1e-3, bytes_per_s=0.4e9))
took_s = {k: lesson.virtual_step(network, k) for k in (1, 8, 32)}
compare("the fastest number of buckets", "guess_buckets", min(took_s, key=took_s.get))
lesson.draw_spans(network, took_s)

# %% [markdown]
# 8 buckets travel for 17 ms, of which overlap hides 15: only the last one ends after backward. With 32 the latencies add
# up, and the network is busy until 32 ms. DDP's default is 25 MiB per bucket, and 1 MiB for the first.
#
# **What is left on 512 GPUs?** Others measured it on H100s, with the work per GPU fixed ([**weak
# scaling**](../assets/glossary.md#weak-scaling)). They shard the weights (fully sharded data parallel, lesson 06), which
# sends 1.5 times DDP's bytes and overlaps in the same way.

# %%
# %%ranks
compare("speed per GPU that is left on 512", "guess_kept", lesson.kept_on_512(), "%")
lesson.draw_kept_per_gpu(ranks)

# %% [markdown]
# Source: [MosaicML's benchmarks](https://github.com/mosaicml/llm-foundry/blob/8c8dd48f72/scripts/train/benchmarking/README.md)
# of MPT, last changed in April 2024; the network is not stated. There is no run without overlap, so the 91 % do not show
# what overlap saves.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: overlap</summary>
#
# *Ask:* "you double the latency; which number of buckets is best then?" (Fewer. Let somebody change `latency_s` and run the
# cell.) *Usual mistakes:* reading the virtual milliseconds as this machine's; concluding from a laptop that overlap is
# useless. *When late:* show the two figures only.
#
# </details>

# %% [markdown]
# ## A bug from the zoo (CORE, 6 min)
#
# A teaching library for distributed training has a naive data parallel class next to its bucketed one. Its main lines
# are below, in our words. **What is wrong, and which of this lesson's instruments shows it?**


# %%
# %%ranks
def clear_and_wrong(model):
    def average(gradient):
        dist.all_reduce(gradient)
        gradient /= world_size

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(average)
    return model


for name, model in {"suspect": clear_and_wrong(new_model()), "library": DDP(new_model())}.items():
    losses = " ".join(f"{loss:.3f}" for loss in sgd_steps(model, num_steps=repeats))
    say(f"{name}: losses {losses}; gradients {spread(p.grad for p in model.parameters()):.1e} apart")

# %% [markdown]
# Both losses fall to 3.5. The spread of the **gradients** gives it away.
#
# <details><summary>Answer</summary>
#
# A *post-accumulate* hook is handed the **parameter**. So the line that says `gradient` averages the weights, and each rank
# keeps its own gradient. Right after backward the weights are 0.0 apart, because the hooks have just averaged them.
# ([picotron#39](https://github.com/huggingface/picotron/issues/39))
#
# </details>
#
# ### Build F: mend it
#
# Write the hook so that after `loss.backward()`, with nothing called afterwards, each `p.grad` is the mean over the ranks.


# %%
# %%ranks
def average_by_hooks(model):
    """From now on each backward leaves the mean over the ranks in every grad. All ranks call it, once."""

    def average(p):
        ____
        ____

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(average)


checks.gradient_hook(average_by_hooks, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution F</summary>
#
# ```python
# def average_by_hooks(model):
#     """From now on each backward leaves the mean over the ranks in every grad. All ranks call it, once."""
#
#     def average(p):  # the hook is handed the parameter, not its gradient
#         p.grad /= world_size
#         dist.all_reduce(p.grad)
#
#     for p in model.parameters():
#         p.register_post_accumulate_grad_hook(average)
# ```
#
# </details>

# %% [markdown]
# **Measure the spread of the gradients after backward.** It must be 0.0. The loss will not tell you.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# Two minutes of silence after the first cell, then hands up: who suspects the division, who the
# hook, who the loss? The point is not the bug but the instrument, and the moment at which you read it.
#
# </details>

# %% [markdown]
# ## Recap (CORE, 1 min)

# %%
# %%ranks
card(
    "Same start, same averaged gradient, same update: the replicas stay bit-identical.",
    "DDP broadcasts at construction and averages in backward; each rank updates itself.",
    "Buckets make calls rare, asynchronous calls hide them; all ranks start them in one order.",
    "Overlap hides communication as long as it takes less time than backward.",
    "Trust the spread of the gradients and the equality with one process, not the loss.",
    figure="one step, three ways to average (03_overlap.svg)",
    command="sbatch jobs/ddp_shakespeare.slurm --steps 300",
)

# %% [markdown]
# Next: [lesson 04](04_first_job.ipynb) runs this file as a job. Below is the lab, to pick from. Further reading is in the
# [handbook](../assets/handbook/03_data_parallel.md#further-reading).

# %% [markdown]
# ## Lab: what a step sends, counted twice (MORE, 2 min)
#
# Two independent instruments count. One counts what is handed to `torch.distributed`, DDP's own buckets included
# (*communicated*). The other asks the operating system what really left this process (*sent*, Linux only). The library makes
# two calls, although all fits into 25 MiB: its first bucket is 1 MiB.
#
# **Predict.** The model has 816,705 gradients of 4 bytes. How many MB does each of four ranks communicate per step, and
# how many does it send on a ring?
#
# <details><summary>Answer</summary>
#
# 3.27 MB communicated, 2·3/4 = 1.5 times that, 4.90 MB, sent. With n ranks it is 2(n-1)/n: 3.27 MB for two, never above
# 6.53 MB.
#
# </details>

# %%
# %%ranks
gradient_bytes = 4 * shakespeare.config.num_params()  # one float32 for each parameter
on_ring = wire.ring_all_reduce_bytes(gradient_bytes, world_size)
for name, model in {"ours": BucketedDDP(new_model(), bucket_mib), "library": DDP(new_model())}.items():
    for _ in range(2):  # DDP puts its buckets into another order after the first backward: watch the second
        with wire.watch(sockets=True) as seen:
            model(*batch(0))[1].backward()
            if name == "ours":
                model.finish()
    payload = seen.payload_bytes("all_reduce")
    sent = "unknown here" if seen.transport_bytes is None else f"{seen.transport_bytes / 1e6:.2f} MB"
    say_once(f"{name}: {seen.count('all_reduce')} all-reduces")
    say_once(f"  {payload / 1e6:.2f} MB communicated, predicted {gradient_bytes / 1e6:.2f} MB")
    say_once(f"  {sent} sent, predicted {on_ring / 1e6:.2f} MB")
    shakespeare.metrics.exact(**{f"{name}_bytes": payload})

# %% [markdown]
# ## Lab: time it on this machine (MORE, 10 min)
#
# The cells time all versions of the lesson in turns, so that a busy moment of the machine hits all of them. On GPUs
# expect overlap to save most of the averaging. Where ranks share cores, as on a laptop, sending is work for the same
# cores: fewer calls help more than overlap does.

# %%
# %%ranks
from manyhands.measure.timing import take_turns


def step_of(model, finish=lambda: None, overlap=True):
    """Forward, backward and `finish()` as a function without arguments."""

    def step():
        model.zero_grad()
        model.sync = overlap  # False: `finish` starts all buckets
        model(*batch(0))[1].backward()
        finish()

    return step


# %%
# %%ranks --timeout 120
naive, hooked, buckets, overlapping = new_model(), new_model(), *(BucketedDDP(new_model(), bucket_mib) for _ in "12")
average_by_hooks(hooked)
calls = {
    "no averaging": step_of(new_model()),
    "naive": step_of(naive, lambda: average_gradients(naive)),
    "hooks": step_of(hooked),
    "buckets": step_of(buckets, buckets.finish, overlap=False),
    "buckets, overlap": step_of(overlapping, overlapping.finish),
}
step_s = take_turns(calls, repeats, ranks)
shakespeare.metrics.measured(step_s=step_s)
lesson.draw_and_say_times(ranks, step_s)

# %% [markdown]
# ### See the overlap
#
# The cell runs one step without overlap, then one with it. `--trace` draws below the cell what each rank did.
#
# **Predict.** In which of the two does an all-reduce begin before backward has ended? What do the ranks do at the very end of
# both steps?

# %%
# %%ranks --trace
for name in ("buckets", "buckets, overlap"):
    dist.barrier()
    calls[name]()

# %% [markdown]
# <details><summary>Answer</summary>
#
# In the second: its all-reduces, the bars below the ranks' rows, begin while a rank computes. At the end of both, the ranks
# wait for the last bucket, which is full only when backward is over. (In the first step, too, a bar may begin a little
# before a rank's row ends: the first bucket leaves while that rank still copies gradients into the others.)
#
# </details>

# %% [markdown]
# ### When is a gradient ready?
#
# **Predict.** Which parameter's gradient is ready first, and which last? When, as a share of backward's time, is the first one
# ready?
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
# ## Lab: a formula for the number of buckets (MORE, 5 min)
#
# Let c be the time of one bucket's ring, and k the number of buckets. Backward takes B. If the network keeps up, only
# the last bucket is exposed: averaging finishes at B + c. If it does not, the network is busy from the first bucket on:
# averaging finishes at B/k + k·c. The time is the larger of the two. c has 2(n-1) messages of 1/(k·n) of the bytes:
# with growing k the bytes of a bucket shrink, its latency does not, and k·c grows without end. Plotted against k, the
# time is a U.

# %%
# %%ranks --timeout 120
from manyhands.measure.virtual_network import Link, VirtualNetwork

link = Link(latency_s=0.1e-3, bytes_per_s=0.4e9)
network, backward_s, numbers = VirtualNetwork(ranks, link), 20e-3, 819_200


def predicted_step(k):
    ring_s = 2 * (world_size - 1) * link.cost_s(4 * numbers / k / world_size)
    return max(backward_s + ring_s, backward_s / k + k * ring_s)


counts = [1, 2, 4, 8, 16, 32]
virtual_s = [lesson.virtual_step(network, k, backward_s, numbers) for k in counts]
predicted_s = [predicted_step(k) for k in counts]
worst = max(abs(v / p - 1) for v, p in zip(virtual_s, predicted_s, strict=True))
say_once(f"virtual against predicted: {100 * worst:.2f} % off at most")
shakespeare.metrics.exact(virtual_step_s=virtual_s)
lesson.draw_u(ranks, counts, virtual_s, predicted_s)

# %% [markdown]
# The formula and the virtual network agree. On GPUs a few processors and the network card do the sending, so large
# gradients give such a U. DDP's authors chose 25 MiB as a size at which it is near its lowest (Li et al. 2020).

# %% [markdown]
# ## Lab: where the time goes (MORE, 3 min)
#
# The log of a [published
# run](https://github.com/saforem2/personal_site/blob/82205852654c9b504ce732a0aae2e358e9b0bf2d/docs/talks/alcf-hpc-workshop-2024/alcf-hpc-workshop-2024.md)
# of a ShakespeareGPT shows a training cycle of 69 s on its four GPUs. In each cycle rank 0 evaluated, sampled and
# saved, while the three others waited at the next all-reduce. That took **59 % of the cycle**.
#
# ![A cycle of 69 seconds on four ranks: 28 s of training on all, then 41 s in which only rank 0 evaluates, samples and
# saves, and three ranks wait](../assets/03_rank_0_evaluates.svg)
#
# **Predict.** On n ranks, what does the evaluation cost if all of them share it?
#
# <details><summary>Answer</summary>
#
# 1/n of the time that rank 0 takes alone, if each rank has its own cores. On a laptop whose ranks share cores, the
# speed-up is about the number of cores at best.
#
# </details>
#
# Now measure both ways on your ranks, in turns, with the same batches and the same function.

# %%
# %%ranks
import statistics
from manyhands.measure.timing import take_turns

model, num_batches = new_model(), 2 * repeats


def rank_0_evaluates():
    if rank == 0:  # whole batches, all by itself
        shakespeare.validation_loss(model, num_batches, part=0, parts=1)
    dist.barrier()  # the others wait here


eval_s = take_turns(
    {"alone": rank_0_evaluates, "all": lambda: shakespeare.evaluate(model, num_batches)}, repeats, ranks
)
faster = [alone / together for alone, together in zip(eval_s["alone"], eval_s["all"], strict=True)]
alone_ms, all_ms = (1e3 * statistics.median(eval_s[name]) for name in ("alone", "all"))
say_once(f"{num_batches} batches: {alone_ms:.0f} ms by rank 0 alone, {all_ms:.0f} ms by all")
say_once(f"{statistics.median(faster):.1f} times faster ({min(faster):.1f} to {max(faster):.1f})")
shakespeare.metrics.measured(evaluation_s=eval_s)

# %% [markdown]
# ## Lab: half the bytes: a communication hook (MORE, 3 min)
#
# DDP lets you replace what happens to a full bucket by a [communication
# hook](../assets/glossary.md#communication-hook). The hook gets the bucket and returns a *future* of the averaged one.
# Here the bucket travels in bf16, 2 bytes per number instead of 4. (PyTorch ships this one as `bf16_compress_hook`, for
# NCCL; ours runs on gloo too.)
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
share = seen.payload_bytes("all_reduce") / (4 * len(full))
say_once(f"{share:.2f} of the bytes, worst error {100 * worst:.2f} %")

# %% [markdown]
# ## Lab: `no_sync`: average once for several backward passes (MORE, 4 min)
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
    try:
        yield
    finally:  # also after an error: otherwise no later step would average
        model.sync = True


model = BucketedDDP(new_model(), bucket_mib)
with wire.watch() as seen:
    with no_sync(model):
        for step in (0, 1):
            (model(*batch(step))[1] / 3).backward()  # each loss is a mean: a third of each
    (model(*batch(2))[1] / 3).backward()  # this one averages, with what the others have left in p.grad
    model.finish()
apart = spread(p.grad for p in model.parameters())
whole = 4 * shakespeare.config.num_params()
say_once(f"3 passes communicated {seen.payload_bytes() / whole:.2f} times the gradient's bytes")
say_once(f"the gradients are {apart} apart")

# %% [markdown]
# **A trap.** The library's DDP decides in *forward* whether the next backward will average. In a well-known training
# script the switch was set after the forward pass, right before `backward()`. It trained, but at step 1250 the
# validation loss was 4.59 instead of 3.95 ([build-nanogpt#30](https://github.com/karpathy/build-nanogpt/pull/30)). The
# next cell has the same mistake. Before you run it: which measurement shows it within one step?

# %%
# %%ranks
model = DDP(new_model())
for step in range(3):
    _, loss = model(*batch(step))
    model.require_backward_grad_sync = step == 2  # too late for this pass, in time for the next
    (loss / 3).backward()
apart = spread(p.grad for p in model.parameters())
largest = flat(p.grad for p in model.parameters()).abs().max().item()
say_once(f"gradients are {apart:.1e} apart, the largest is {largest:.1e}")

# %% [markdown]
# On several ranks the gradients differ, so the replicas diverge at the first update. Every rank now trains its own model on a part of
# the data, so the loss still falls, but less. Exercise 2 asks for the right way.

# %% [markdown]
# ## Lab: weak scaling, when more ranks stop helping (MORE, 4 min)
#
# **Weak scaling** keeps the work *per rank* and adds ranks: ideal is twice the tokens per second on twice the ranks. (Strong
# scaling keeps the *whole* work. Lesson 05 has both.)
#
# ![Weak scaling: one, two and four ranks, three sequences each; the batch grows with the ranks](../assets/03_weak_scaling.svg)
#
# **Predict.** The first lines of output show the number of cores. What
# [efficiency](../assets/glossary.md#weak-scaling) do you expect on 1, 2 and 4 ranks: the tokens per second of n ranks, divided
# by n times those of one?
#
# <details><summary>Answer</summary>
#
# With no more ranks than cores, less than 100 %, because the ranks also average and wait for each other. More ranks
# share cores: four ranks on two cores can hardly exceed 50 %, whatever DDP does. Ranks with one GPU each share nothing.
# They lose time only to averaging, to waiting and, for so small a model, to kernel launches.
#
# </details>

# %%
# %%ranks --timeout 120
import functools
from manyhands.measure.timing import take_turns

three = [ids_bT[:1].expand(3, -1) for ids_bT in batch(0)]  # sequences for each rank, however many ranks


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
for n in sizes[1:]:
    best, worst, middle = (f"{100 / f:.0f}" for f in (slower[n][0], slower[n][-1], statistics.median(slower[n])))
    say_once(f"{n} ranks: efficiency {middle} % ({worst} to {best})")
rates = [3 * 64 * n / statistics.median(step_s[n]) for n in sizes]
shakespeare.metrics.measured(weak_scaling={"ranks": sizes, "tok_per_s": rates})
lesson.draw_weak_scaling(ranks, sizes, list(step_s.values()), 3 * 64)

# %% [markdown]
# Find the first number of ranks whose efficiency is far below 100 %; on the CPU compare it with the number of cores. An
# all-reduce waits for its slowest rank, and a rank without a core of its own is always slow, also if it shares that core
# with somebody else's program. On one machine more ranks
# stop helping when there is no free core. Between machines the network is the limit.

# %% [markdown]
# ## Exercises (MORE, 17 min)
#
# Each check runs your answer in a separate process group: you cannot break anything.
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

# %% [markdown] tags=["solution"]
# <details><summary>Solution 1</summary>
#
# ```python
# def average_untidy(model):
#     for p in model.parameters():  # lists a tied parameter once
#         if p.requires_grad:  # the same on every rank, so all ranks make the same calls ...
#             if p.grad is None:
#                 p.grad = torch.zeros_like(p)  # ... also where this rank has nothing to add
#             p.grad /= world_size
#             dist.all_reduce(p.grad)
# ```
#
# </details>

# %% [markdown]
# (A parameter that *no* rank used now has a gradient of zeros, where one process would have None. Plain SGD treats both
# the same. AdamW decays a weight whose gradient is zero, and skips one whose gradient is None. DDP with
# `find_unused_parameters=True` keeps None: it sends one more small all-reduce, of an integer per parameter tensor.)
#
# ### Exercise 2: accumulate with the library's `no_sync`
#
# `ddp` is a model in the library's DDP, `micro_batches` a list of `(x, y)`. Write `accumulate(ddp, micro_batches)`: one backward
# pass for each, with the loss `F.mse_loss(ddp(x), y)`, so that in the end each gradient is that of the mean over *all*
# micro-batches and ranks, and was averaged over the ranks **once**.


# %%
# %%ranks
import torch.nn.functional as F


def accumulate(ddp, micro_batches):
    raise NotImplementedError  # your turn


checks.accumulation(accumulate, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 2</summary>
#
# ```python
# def accumulate(ddp, micro_batches):
#     k = len(micro_batches)
#     with ddp.no_sync():  # around forward too: that is where DDP looks
#         for x, y in micro_batches[:-1]:
#             (F.mse_loss(ddp(x), y) / k).backward()
#     x, y = micro_batches[-1]
#     (F.mse_loss(ddp(x), y) / k).backward()
# ```
#
# </details>

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

# %% [markdown] tags=["solution"]
# <details><summary>Solution 3</summary>
#
# ```python
# def bytes_per_step(num_params, n_ranks, bytes_per_value=4, micro_batches=1, no_sync=False):
#     times = 1 if no_sync else micro_batches
#     return times * 2 * (n_ranks - 1) / n_ranks * num_params * bytes_per_value
# ```
#
# </details>

# %% [markdown]
# ## Lab: two more bugs of the same family (MORE, 3 min)
#
# Both bugs are from one workshop's trainer. In the first, somebody prepared for fp16: `backward()` and `step()` run
# only if there is a scaler, which fp16 needs. What happens without a scaler, as in fp32?

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
say_once(f"after 3 steps the weights have changed: {fingerprint(model.parameters()) != first_weights}")

# %% [markdown]
# Without a scaler nothing trains, and no message says so. One more line would: assert that the first step changes the
# weights.
#
# In the second, rank 0 draws a sample between two steps. Which rank trains with dropout afterwards? A model with dropout gives
# a different loss each time it reads the same batch:

# %% tags=["nbval-check-output"]
# %%ranks
model = new_model(dropout=0.1)
model.eval()  # all ranks, before sampling
if rank == 0:
    model.generate(batch(0)[0][:1, :1], 5)
    model.train()  # and here is the mistake
once, again = (model(*batch(0))[1].item() for _ in range(2))
say(f"the same batch twice: {'the same loss' if once == again else 'another loss'}")

# %% [markdown]
# Only rank 0 trains with dropout. Whatever changes the state of a model belongs outside `if rank == 0`. Only files and
# the screen belong inside.

# %% [markdown]
# ## On the cluster (MORE, 1 min)
#
# The same file, with your own edits, as a job ([lesson 04](04_first_job.ipynb) walks through it):
#
# ```bash
# qsub jobs/ddp_shakespeare.pbs            # PBS
# sbatch jobs/ddp_shakespeare.slurm        # Slurm
# bash jobs/ddp_shakespeare.pbs            # no scheduler: the same on this node
# ```
#
# **What changes on GPUs.** `join()` takes one GPU per rank, and NCCL, which sends on its own stream, so overlap saves
# time. No line of this lesson changes. **What to look for:** as many ranks as you asked for, each on its own GPU; in
# `metrics.json` the same `first_losses` as on your laptop, to 1e-3, for the same `--global-batch`.

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
