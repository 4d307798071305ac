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
# # 08 Pipeline parallel: split the depth
#
# **48 minutes** for the sections marked CORE, 77 with those marked MORE.
#
# After this lesson **you can**
# - cut a model into stages, and carry gradients across the cut;
# - say why naive model parallelism leaves GPUs idle, and how much micro-batches help;
# - build the schedules GPipe and 1F1B, and predict their bubble and their memory;
# - use `torch.distributed.pipelining`, and prove that it computes what one process computes;
# - find a wrong factor that the loss does not show.
#
# **You need** `send` and `recv` ([lesson 02](02_collectives.ipynb)): one rank sends a tensor, another one receives it.
# You also need [accumulation](../assets/glossary.md#accumulation) ([lesson 03](03_data_parallel.ipynb)): gradients of
# several [micro-batches](../assets/glossary.md#micro-batch) add up before one update.
#
# **New here:** [pipeline parallel](../assets/glossary.md#pipeline-parallel), [stage](../assets/glossary.md#stage),
# [bubble](../assets/glossary.md#bubble), [schedule](../assets/glossary.md#schedule),
# [GPipe](../assets/glossary.md#gpipe), [1F1B](../assets/glossary.md#1f1b),
# [in flight](../assets/glossary.md#in-flight), [interleaved](../assets/glossary.md#interleaved),
# [zero bubble](../assets/glossary.md#zero-bubble).
#
# The same file is a script:
#
# ```bash
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/08_pipeline_parallel.py --micro-batches 16
# mpiexec -n 4 python scripts/08_pipeline_parallel.py
# python scripts/08_pipeline_parallel.py           # a world of one: one stage, the same path, the same losses
# ```

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Each heading says its minutes. Builds A to D take about three minutes each and are in these numbers.
#
# *Say:* two questions carry the lesson: "who waits for whom?" gives the bubble, and "what must be kept until
# backward?" gives the memory. A schedule is an order of the same actions; it never changes the result.
#
# *Three usual mistakes:* thinking that 1F1B has a smaller bubble than GPipe (it has the same; it holds less);
# thinking that a stage needs the other stages' weights; dividing the loss twice, or not at all.
#
# *When late:* give solutions B and C, keep builds A and D, the ways to one result and the zoo. Show the experiment's two charts
# without running them.
#
# *Ask the room:* "You may double the micro-batches or halve the stages. Which one makes the bubble smaller, and what
# does each cost?"
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes, and stages; in a script the launcher decides
layers = 0  # layers of the GPT, at least one per rank; 0: 4, or as many as ranks
micro_batches = 0  # micro-batches in a step, at least one per rank; 0: 8, or as many as ranks
rows = 2  # sequences in a micro-batch, at least 1

# %% [markdown]
# ## Start (CORE, 2 min)
#
# The first cell starts four ranks. Cells that begin with `%%ranks` run on all of them. Each section needs the cells
# of this one, and then only its own: a folded cell with `catch_up(...)` defines what is missing from earlier ones.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("08_pipeline_parallel", globals())

# %%
# %%ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands import Metrics, catch_up, join, leave, refuse, say, show
from manyhands.checks import pipeline_parallel as checks
from manyhands.measure import wire

# %% [markdown]
# In this lesson every rank is one **stage** of one model, so its rank `s` says which part of the depth it has. There
# are `p` stages, and a batch is cut into `m` micro-batches.

# %%
# %%ranks
ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
s, p = rank, world_size  # this rank's stage, of p
layers, m = layers or max(4, p), micro_batches or max(8, p)
for name, number in (("layers", layers), ("micro_batches", m)):
    if number < p:
        refuse(f"{name}={number} is less than one for each of {p} ranks; use {p} or more")

# %% [markdown]
# The model is **ShakespeareGPT** again, in float64, so that gradients can be compared to ten digits. All ranks know the
# whole batch, so that each can check its part of the answer.
#
# Letters at the end of a name are its shape: `b` sequences in a micro-batch, `T` positions, `D` numbers per position.

# %%
# %%ranks
from manyhands.config.layout import layers_of_stages
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.gpt.model import GPT, GPTConfig
from manyhands.parallel.pipeline import Stage

corpus = load_corpus(ranks)
config = GPTConfig(vocab_size=len(corpus.vocab), n_layer=layers)
T, D = config.block_size, config.n_embd
metrics = Metrics(ranks, corpus, {"layers": layers, "micro_batches": m, "rows": rows})


def new_model():
    """ShakespeareGPT with its first weights, the same on every rank, because the seed is."""
    torch.manual_seed(1337)
    return GPT(config).to(device, torch.float64)


def batch(step):
    """Batch number `step`, whole: m micro-batches of inputs and m of targets, each [b, T]."""
    both = get_batch(corpus.train_ids, step, m * rows, T, 0, 1, seed=1)
    return [ids_BT.to(device).chunk(m) for ids_BT in both]


say(f"stage {s} of {p}; {m} micro-batches of {list(batch(0)[0][0].shape)}")

# %% [markdown]
# ## Warm-up: the chain rule over ranks (CORE, 9 min)
#
# **Why.** A model may be too large for one GPU even when nothing else is on it. Sharding (lesson 06) gathers its
# weights layer by layer. The older idea moves no weights at all: give each GPU some of the *layers*, and send what
# comes out of one GPU to the next.
#
# ![Two ranks: rank 0 holds the first layer with 28 parameters, rank 1 the second with 10; the activation h goes from
# rank 0 to rank 1, its gradient comes back](../assets/08_cut.svg)
#
# Take the network of 6 inputs, 4 hidden and 2 outputs: 6·4 + 4 = 28 parameters on the first rank, 4·2 + 2 = 10 on the
# second. Forward sends 4 numbers per row to the right. Backward needs one thing from there: the gradient of the loss
# with respect to these 4 numbers.
#
# By hand, with one number per layer: h = w₀·x and y = w₁·h, where x = 1, w₀ = 2, w₁ = 3, and the loss is y itself.
#
# | | rank 0 has w₀ = 2 | rank 1 has w₁ = 3 |
# |---|---|---|
# | forward | h = 2·1 = 2, sends 2 | y = 3·2 = 6 |
# | backward | | dL/dw₁ = h = 2; sends dL/dh = w₁ = 3 |
# | | dL/dw₀ = 3·x = 3 | |
#
# **Predict.** Now p ranks, each with the weight s + 2: 2, 3, 4, 5. What is y on four ranks, and what does rank 0 get
# back?
#
# <details><summary>Answer</summary>
#
# y = 2·3·4·5 = 120. What rank 0 gets is dL/dh of its own output: 3·4·5 = 60, and as x = 1 that is its gradient.
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
w = torch.tensor(s + 2.0, device=device, requires_grad=True)
x, dy = torch.ones((), device=device), torch.ones((), device=device)
if s > 0:
    dist.recv(x, src=s - 1)
x.requires_grad_()  # a leaf: here this rank's graph begins
y = w * x
if s < p - 1:
    dist.send(y.detach(), dst=s + 1)
    dist.recv(dy, src=s + 1)
y.backward(dy)  # from dL/dy: dL/dw and dL/dx
if s > 0:
    dist.send(x.grad, dst=s - 1)
say(f"got x = {x.item():g}, made y = {y.item():g}, got dy = {dy.item():g}; my gradient is {w.grad.item():g}")

# %% [markdown]
# ### Build A: backward across the cut
#
# Autograd ends at the cut, on both sides. The graph of a stage begins at `x`, which arrived, and ends at `y`, which
# was sent. Write `backward_of(x, y, dy)`. It adds the gradients of the stage's weights to their `grad`, as any backward
# does, and returns what the stage before needs. Two special cases: on the last stage `y` is the loss and `dy` is
# None; on the first stage `x` holds ids, which have no gradient, and None goes back. The graph must not outlive the
# call.


# %%
# %%ranks
def backward_of(x, y, dy):
    """Backward of one stage for one micro-batch: from the gradient of its output to that of its input."""
    raise NotImplementedError  # your turn


checks.backward_of(backward_of, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution A</summary>
#
# ```python
# def backward_of(x, y, dy):
#     torch.autograd.backward(y, dy)
#     return x.grad
# ```
#
# </details>

# %% [markdown]
# Now cut the GPT. A [**stage**](../assets/glossary.md#stage) is some consecutive blocks; the first one also has the
# embeddings, the last one the final norm and the head. `Stage` is the trainer's: its weights keep the names that they
# have in the whole model.


# %%
# %%ranks
def my_stage(model):
    """This rank's part of the model."""
    return Stage(model, layers_of_stages(layers, p)[s])


stage = my_stage(new_model())
held = sum(w.numel() for w in stage.parameters())
say(f"blocks {', '.join(stage.blocks)}: {held:,} of {config.num_params():,} parameters")

# %% [markdown]
# **Predict.** In float64 the whole model has 6.5 MB of weights. How many kB cross one cut, forward, for a
# micro-batch of 2 sequences of 64 positions with 128 numbers each?
#
# <details><summary>Answer</summary>
#
# 2·64·128·8 bytes = 131 kB, and as many come back. It does not depend on the number of layers: the deeper the stages,
# the cheaper is what crosses. That is why pipelines run *between* nodes, where links are slow.
#
# </details>

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the cut</summary>
#
# Let two people act it out with the table's numbers on paper. *Usual mistake:* sending `y` with its graph, or
# calling `y.sum().backward()`, which is right for the last stage only. *Ask:* "which rank knows the loss?" The last
# one, and nobody else; it comes back in the zoo.
#
# </details>

# %% [markdown]
# ## The idle half, and micro-batches (CORE, 7 min)
#
# **Why.** The warm-up has a flaw. While rank 1 computes, rank 0 waits, and the other way round. With two ranks half of
# the machine is always idle; with p ranks (p - 1)/p of it.
#
# The cure: cut the batch into m [micro-batches](../assets/glossary.md#micro-batch). As soon as rank 0 has sent the
# first, it starts on the second. Only while the pipeline fills and while it drains do ranks wait. This idle time is
# the [**bubble**](../assets/glossary.md#bubble).
#
# ![Above: four ranks and one batch, one rank computes at a time. Below: the same batch in four micro-batches, several
# ranks compute at the same time, and the step is shorter](../assets/08_micro_batches.svg)
#
# Count in the lower chart. Rank 0 works for m forwards and m backwards. The last rank starts p - 1 forwards later, and
# when it is done p - 1 backwards are still to come. So everybody works m and waits p - 1, in units of a forward and a
# backward: the bubble is **(p - 1)/(m + p - 1)** of the time. (Some papers divide by the work instead of the time:
# (p - 1)/m.)
#
# **Predict.** Four stages. What is the bubble for m = 1, 4, 8 and 16? How large must m be for less than 5 %?
#
# <details><summary>Answer</summary>
#
# 75 %, 43 %, 27 %, 16 %. Less than 5 % needs 3/(m + 3) < 0.05, so m > 57. But more micro-batches in the same batch are
# smaller ones, and small ones use a GPU badly.
#
# </details>
#
# A [**schedule**](../assets/glossary.md#schedule) is the order in which each stage does its actions. An action is
# `("F", s, i)`, forward of micro-batch i on stage s, or `("B", s, i)`, its backward. All forwards first, then all
# backwards, is [**GPipe**](../assets/glossary.md#gpipe) (Huang et al. 2019):


# %%
# %%ranks
def gpipe(s, p, m):
    """What stage s of p does with m micro-batches, in order."""
    return [(kind, s, i) for kind in ("F", "B") for i in range(m)]


say(gpipe(s, p, 2))

# %% [markdown]
# ### Build B: who waits for whom?
#
# To know how long a schedule takes you need no GPU. You need to know what each action waits for. Write
# `needs(action, p)`: the list of the actions that must be *done* before this one can begin. Do not list what follows
# from the order in which a stage does its own work, nor what is implied by another action in the list.


# %%
# %%ranks
def needs(action, p):
    """[actions that must be done before this one], on any of p stages."""
    raise NotImplementedError  # your turn


checks.needs(needs, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def needs(action, p):
#     kind, s, i = action
#     if kind == "F":
#         return [("F", s - 1, i)] if s > 0 else []
#     gradient_arrives = [("B", s + 1, i)] if s < p - 1 else []
#     return [("F", s, i), *gradient_arrives]  # the last stage's own forward has made the loss
# ```
#
# </details>

# %% [markdown]
# `simulate` lets each rank do its actions in order, each as soon as your `needs` allow. A forward takes 1, a backward
# 2, because it multiplies twice as many matrices; messages take nothing. Then the bubble is what was idle:

# %%
# %%ranks
from manyhands.predict.pipeline_schedules import simulate

if rank == 0:
    for n in (1, 2, 4, 8, 16):
        run = simulate([gpipe(stage, 4, n) for stage in range(4)], needs=needs)
        say(f"4 stages, m = {n:2}: length {run.length:2}, bubble {run.bubble}, formula 3/{n + 3}")

# %% [markdown]
# The formula *is* the schedule: nothing was fitted. (`simulate` reduces its fractions.)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the bubble</summary>
#
# Draw the lower chart by hand, row by row, while the room says what comes next. *Usual mistake:* counting the
# backward as long as the forward, and then being surprised that the formula still holds: any ratio gives it. *Ask:*
# "what happens to the bubble if you double p and m?"
#
# </details>

# %% [markdown]
# ## GPipe, from scratch (CORE, 9 min)
#
# **Why.** The order is decided; now run it. Between two actions a rank sends what the first one has made, and
# receives what the second one needs. Do both **at once**. Otherwise two neighbours can send to each other first, each
# waits for the other to receive, and nothing moves: the deadlock of lesson 02.
#
# ![Rank s and rank s+1: an activation goes right while a gradient comes left; both messages are handed over in one
# call](../assets/08_swap.svg)
#
# `dist.batch_isend_irecv` takes a list of sends and receives and starts them together, with any backend.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "backward_of", "my_stage", "gpipe")


# %%
# %%ranks
def neighbours(action, stages=p):
    """(stage that this action's input comes from, stage that its result goes to), None where there is none."""
    kind, s, _ = action
    step = 1 if kind == "F" else -1
    return [stage if 0 <= stage < stages else None for stage in (s - step, s + step)]


def swap(done, result, action):
    """Send the result of `done`, receive what `action` needs, both at once; returns what arrived, or None."""
    messages, arrived = [], None
    if done is not None and (target := neighbours(done)[1]) is not None:
        messages.append(dist.P2POp(dist.isend, result, target))
    if action is not None and (source := neighbours(action)[0]) is not None:
        arrived = torch.empty(rows, T, D, dtype=torch.float64, device=device)
        messages.append(dist.P2POp(dist.irecv, arrived, source))
    for work in dist.batch_isend_irecv(messages) if messages else []:
        work.wait()
    return arrived


# %% [markdown]
# ### Build C: forward of one micro-batch
#
# Write `forward_of(stage, arrived, targets_bT, m)` for one micro-batch. It returns two things for backward: `x`, the
# leaf at which this stage's graph begins, and `y`. `arrived` is what the stage before has sent, or on the first stage
# ids, which can have no gradient. On the last stage `targets_bT` is given, and `y` is this micro-batch's part of the
# loss; elsewhere it is None, and `y` is the stage's output. The loss of the batch is the *mean* of the m micro-batches'
# cross-entropies, while backward *adds*. (`F.cross_entropy` wants [N, V] and [N]: `logits_bTV.flatten(0, 1)`.)


# %%
# %%ranks
def forward_of(stage, arrived, targets_bT, m):
    """(x, y) of one micro-batch: where the graph of this stage begins, and where it ends."""
    raise NotImplementedError  # your turn


checks.forward_of(forward_of, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution C</summary>
#
# ```python
# def forward_of(stage, arrived, targets_bT, m):
#     x = arrived.requires_grad_() if arrived.is_floating_point() else arrived
#     y = stage(x)
#     if targets_bT is not None:
#         y = F.cross_entropy(y.flatten(0, 1), targets_bT.flatten()) / m
#     return x, y
# ```
#
# </details>

# %% [markdown]
# The step puts everything together. `kept` holds what backward will need, from the forward of a micro-batch to its
# backward: these micro-batches are [**in flight**](../assets/glossary.md#in-flight).


# %%
# %%ranks
def train_step(stage, order, ids, targets):
    """Do the order: gradients of the mean loss. Returns that loss (0 but on the last stage), and most in flight."""
    kept, most, result = {}, 0, None
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for done, action in zip([None, *order], [*order, None], strict=True):
        arrived = swap(done, result, action)
        if action is None:
            return loss, most
        kind, _, i = action
        if kind == "F":
            last = s == p - 1
            kept[i] = forward_of(stage, ids[i] if s == 0 else arrived, targets[i] if last else None, m)
            result = kept[i][1].detach()
            loss += result if last else 0
            most = max(most, len(kept))
        else:
            result = backward_of(*kept.pop(i), arrived)


# %% [markdown]
# **Predict.** How many messages does a rank in the middle send in a step, and how many the first and the last? How
# many bytes is that, for m = 8 on four ranks?
#
# <details><summary>Answer</summary>
#
# In the middle 2m = 16: m activations to the right, m gradients to the left. The first and the last send m = 8. Each
# message is 131 kB, so 2.1 MB and 1.05 MB.
#
# </details>

# %%
# %%ranks
stage = my_stage(new_model())
with wire.watch() as seen:
    loss, most = train_step(stage, gpipe(s, p, m), *batch(0))
expected = (2 if 0 < s < p - 1 else 1) * m * (p > 1)
say(f"{seen.messages} messages, predicted {expected}; {seen.sent_bytes:,} bytes, {expected * rows * T * D * 8:,}")
metrics.exact(gpipe_messages=seen.messages, gpipe_bytes=seen.sent_bytes)

# %% [markdown]
# Who knows the loss, and how much was kept?

# %%
# %%ranks
say(f"loss {loss.item():.4f}; in flight at most {most}")

# %% [markdown]
# Only the last stage has a loss; the others return 0. At the end of the forwards every rank holds the activations of **all
# m** micro-batches, the whole batch. Micro-batches must not become too small for a GPU, so a smaller bubble takes a larger
# batch, and under GPipe that takes more memory. Does it have to be so?

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: GPipe</summary>
#
# Walk through `zip([None, *order], [*order, None])` once: it pairs each action with the one before it. *Usual
# question:* "why not send at once, without waiting?" One may, if somebody keeps the buffer until it has gone; the
# library does. *When late:* skip the predicted bytes.
#
# </details>

# %% [markdown]
# ## 1F1B: the same bubble, less memory (CORE, 7 min)
#
# **Why.** The last stage could run the backward of micro-batch 0 as soon as its forward is done. Under GPipe it first
# does m - 1 other forwards, and keeps what they made. [**1F1B**](../assets/glossary.md#1f1b), one forward, one backward
# (Narayanan et al. 2021), starts backwards as early as possible.
#
# ![Two charts of four ranks and eight micro-batches, equally long: under GPipe all ranks hold eight micro-batches, under
# 1F1B ranks 0 to 3 hold four, three, two and one](../assets/08_1f1b.svg)
#
# Read the lower chart row by row. Stage s begins with some forwards. From then on it alternates, a backward for each
# forward, until the forwards run out.
#
# **Predict.** Four stages, eight micro-batches: with how many forwards does stage 0 begin, with how many stage 3?
# Which formula gives both? What if there are only two micro-batches?
#
# <details><summary>Answer</summary>
#
# Stage 0 with 4: micro-batch 0 must reach stage 3 before its backward can come back. Stage 3 with 1: it has the loss at
# once. In general p - s. With two micro-batches there are no more than two to begin with: min(m, p - s). That is also
# how many are in flight at most, however large m is.
#
# </details>
#
# ### Build D: 1F1B's order
#
# Write `one_f_one_b(s, p, m)`, the list of actions of stage s. Micro-batches go in order, forward and backward. The
# check simulates all p stages: every action once, nobody waits in a circle, at most min(m, p - s) in flight, and
# GPipe's bubble.


# %%
# %%ranks
def one_f_one_b(s, p, m):
    """What stage s of p does with m micro-batches, in order."""
    raise NotImplementedError  # your turn


checks.one_f_one_b(one_f_one_b, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution D</summary>
#
# ```python
# def one_f_one_b(s, p, m):
#     first = min(m, p - s)
#     order = [("F", s, i) for i in range(first)]
#     for i in range(m):
#         order.append(("B", s, i))
#         if i + first < m:
#             order.append(("F", s, i + first))
#     return order
# ```
#
# </details>

# %% [markdown]
# The step stays as it is; only the order differs. `count_saved` (lesson 01) counts what autograd keeps of one
# micro-batch on this stage; times what is in flight, that is the memory of activations:

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "backward_of", "my_stage", "gpipe", "neighbours", "swap", "forward_of", "train_step")

# %%
# %%ranks
from manyhands.measure.tensor_bytes import count_saved

stage = my_stage(new_model())
x = batch(0)[0][0] if s == 0 else torch.zeros(rows, T, D, dtype=torch.float64, device=device)
one_mb = count_saved(lambda: stage(x), stage).bytes / 1e6  # what autograd keeps of one micro-batch
for name, order in {"GPipe": gpipe(s, p, m), "1F1B": one_f_one_b(s, p, m)}.items():
    _, most = train_step(stage, order, *batch(0))
    say(f"{name + ':':6} in flight at most {most}, {most} · {one_mb:.1f} = {most * one_mb:.1f} MB of activations")
    metrics.exact(**{f"in_flight_{name}": most})

# %% [markdown]
# Under 1F1B memory depends on the number of *stages*, not of micro-batches. So m can grow until the bubble is small. The
# first stage holds most: min(m, p). Its memory is the one to watch.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: 1F1B</summary>
#
# *Say:* same bubble, so this is about memory only. *Usual mistakes:* p - s - 1 forwards (then the last stage begins with
# a backward of nothing: the check says that it waits forever); forgetting min(m, ...). *Ask:* "which stage would you
# give fewer layers, and why?" (Exercise 3.)
#
# </details>

# %% [markdown]
# ## The library, and one result (CORE, 4 min)
#
# **Why.** `torch.distributed.pipelining` has these schedules and more. A `PipelineStage` wraps your part of the model,
# a schedule drives it. `step` takes the *whole* batch on the first stage and the targets on the last, and cuts them
# itself. By default it divides the gradients by m at the end (`scale_grads=True`), so `loss_fn` is the plain mean.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "backward_of", "my_stage", "gpipe", "neighbours", "swap", "forward_of", "train_step")
catch_up(globals(), "one_f_one_b")


# %%
# %%ranks
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe


def mean_loss(logits_bTV, targets_bT):
    return F.cross_entropy(logits_bTV.flatten(0, 1), targets_bT.flatten())


def by_library(kind, stage, loss_fn=mean_loss, **settings):
    """A schedule of torch's that drives this rank's stage."""
    return kind(PipelineStage(stage, s, p, device), n_microbatches=m, loss_fn=loss_fn, **settings)


def library_step(schedule, ids, targets):
    """One step of the schedule; returns the mean loss, 0 but on the last stage."""
    losses = []
    inputs = [torch.cat(ids)] if s == 0 else []
    last = {"target": torch.cat(targets), "losses": losses} if s == p - 1 else {}
    schedule.step(*inputs, **last, return_outputs=False)
    return sum(losses, torch.zeros((), dtype=torch.float64, device=device)).detach() / m


# %% [markdown]
# Four ways to the gradients of one batch, and one process that never heard of pipelines. Each rank compares the
# gradients of *its* weights, by name:

# %%
# %%ranks
stages = {way: my_stage(new_model()) for way in ("our GPipe", "our 1F1B", "torch's GPipe", "torch's 1F1B")}
ours = {"our GPipe": gpipe(s, p, m), "our 1F1B": one_f_one_b(s, p, m)}
losses = {way: train_step(stages[way], order, *batch(0))[0] for way, order in ours.items()}
for way, kind in {"torch's GPipe": ScheduleGPipe, "torch's 1F1B": Schedule1F1B}.items():
    losses[way] = library_step(by_library(kind, stages[way]), *batch(0))

# %%
# %%ranks
model = new_model()
_, expected = model(*[torch.cat(part) for part in batch(0)])
expected.backward()
wanted = {name: w.grad for name, w in model.named_parameters()}


def furthest(stage):
    """The largest difference of any gradient of this stage from one process's."""
    return max((w.grad - wanted[name]).abs().max().item() for name, w in stage.named_parameters())


# %% tags=["nbval-check-output"]
# %%ranks
for way, stage in stages.items():
    dist.broadcast(losses[way], src=p - 1)  # all ranks: only the last stage knew it
    apart = max(furthest(stage), (losses[way] - expected).abs().item())
    assert apart < 1e-10, f"{way} is {apart:.1e} away"
    say(f"{way:13} and one process: the loss and all my gradients are equal to 1e-10")
metrics.close(float64_loss=expected.detach(), gradient_norm=torch.stack([g.norm() for g in wanted.values()]).norm())

# %% [markdown]
# So a schedule is about *when*, never about *what*. (Unlike asynchronous pipelines such as the first PipeDream, where
# weights change while micro-batches are in flight.)
#
# Two things to know about torch 2.13. It refuses 1F1B with fewer micro-batches than stages. And the order that a
# `Schedule1F1B` *prints* for the last stage misnumbers its forwards; what it *executes* is your build D, as a test of
# this course holds for p up to 8 and m up to 32.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the library</summary>
#
# *Say:* which rank passes what to `step` is the part that people get wrong first: inputs on the first stage,
# targets and the list of losses on the last, nothing in between. *Ask:* "why do we compare gradients and not the
# loss after ten steps?" The zoo answers it.
#
# </details>

# %% [markdown]
# ## Experiment: a pipeline with a clock (CORE, 5 min)
#
# On one laptop the stages share the cores, so a real stopwatch would measure the sharing. So real ranks do the real
# schedule with real messages, and only *computing* is virtual: each rank has a logical clock (as in lesson 02), a
# forward moves it by 1 ms, a backward by 2 ms. A message carries its time, and costs 5 µs plus its bytes over 50 GB/s.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "gpipe", "one_f_one_b")


# %%
# %%ranks
from manyhands.measure.virtual_network import Link, VirtualNetwork
from manyhands.predict.pipeline_schedules import bubble_formula, in_flight, slots_of

network = VirtualNetwork(ranks, inside=Link(5e-6, 50e9))
TOOK_S = {"F": 1e-3, "B": 2e-3, "I": 1e-3, "W": 1e-3}
STEP = {"F": 1, "B": -1, "I": -1, "W": 0}  # where the result goes: to the right, to the left, nowhere


def run_virtual(order, v=1):
    """Do the order on the network, v stages per rank. Returns (all slots, length in s) on rank 0, else None."""
    network.reset()
    message_bTD, sent = torch.zeros(rows, T, D), []
    for kind, stage, i in order:
        step, tag = STEP[kind], int(kind == "F")  # activations and gradients each in an order of their own
        source, target = stage - step, stage + step
        if step and 0 <= source < v * p and source % p != s:
            network.recv(message_bTD, source % p, tag)
        network.compute(TOOK_S[kind] / v, f"{kind} {stage} {i}")
        if step and 0 <= target < v * p and target % p != s:
            sent.append(network.isend(message_bTD, target % p, tag=tag))
    for work in sent:
        work.sending.wait()
    spans = network.gather_spans()
    return (slots_of(spans), max(span.end_s for span in spans)) if rank == 0 else None


def idle(slots, length_s):
    """The share of all ranks' time in which nothing was computed."""
    return 1 - sum(slot.end - slot.start for slot in slots) / (p * length_s)


# %% [markdown]
# **Predict.** Before the charts appear: which is longer, GPipe or 1F1B? On which rank do they differ most in what is held?
#
# <details><summary>Answer</summary>
#
# They are equally long. On the last rank: m under GPipe, 1 under 1F1B.
#
# </details>

# %%
# %%ranks
orders = {"GPipe": gpipe, "1F1B": one_f_one_b}
charts = []
for name, make in orders.items():
    if (ran := run_virtual(make(s, p, m))) is not None:
        held = [in_flight(slot.action for slot in ran[0] if slot.rank == r) for r in range(p)]  # of what ran
        charts.append((f"{name}: idle {100 * idle(*ran):.1f} %", ran[0], [f"holds {k}" for k in held]))
if rank == 0:
    from manyhands.plots.schedule import chart

    figure = chart(charts, "ms", virtual=True, scale=1e3)
    show(figure, "what_ran", f"what {p} ranks ran under GPipe and 1F1B: equally long, in different orders")

# %% [markdown]
# Now the bubble against the number of micro-batches. The points should lie on the dashed line, a little above it: the
# formula knows no messages.

# %%
# %%ranks
counts, measured = [1, 2, 4, 8, 16], {name: [] for name in orders}
for n in counts:
    for name, make in orders.items():
        if (ran := run_virtual(make(s, p, n))) is not None:
            measured[name].append(idle(*ran))
formula = [float(bubble_formula("1F1B", p, n)) for n in counts]
if rank == 0:
    from manyhands.plots.schedule import bubbles

    figure = bubbles({name: (counts, found, formula) for name, found in measured.items()})
    show(
        figure,
        "bubbles",
        "idle time against micro-batches: both schedules on the line of the formula",
    )
    off = max(abs(a - b) for found in measured.values() for a, b in zip(found, formula, strict=True))
    assert off < 0.03
    say(f"measured and formula differ by {100 * off:.2f} percentage points at most")
metrics.exact(bubbles=measured)

# %% [markdown]
# **The residual** is messages. Each cut costs a few microseconds on the way forward and on the way back. With a link a
# hundred times slower it would no longer be small; try `Link(5e-4, 50e9)`.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the experiment</summary>
#
# *Say:* this clock is exact, so every run on every machine gives the same picture. What it leaves out: stages that take
# unequal time, and kernels that slow down on small micro-batches. *When late:* the first chart is enough.
#
# </details>

# %% [markdown]
# ## Interleaved and zero bubble (MORE, 5 min)
#
# **Why.** The bubble is p - 1 stages long. There are two ways to shrink it without more micro-batches.
#
# **Shorter stages.** Give each rank v stages of 1/v the depth, dealt out like cards: rank 0 has stages 0 and p, rank 1
# has 1 and p + 1. A micro-batch goes around v times. The pipeline fills v times as fast: **(p - 1)/(vm + p - 1)**.
# That is [**interleaved**](../assets/glossary.md#interleaved) 1F1B (Narayanan et al. 2021), at the price of v times the
# messages and of more activations.
#
# **Split the backward.** A backward makes two things: the gradient of its input, for which the stage before waits, and
# the gradient of the weights, for which nobody waits until the update. Do the first at once (`I`), and the second (`W`)
# when you would be idle. With F, I and W of equal length the bubble is **(p - 1)/(3vm + p - 1)**: this is ZB-H1, one of
# the [**zero bubble**](../assets/glossary.md#zero-bubble) schedules (Qi et al. 2024).
#
# ![Left: eight stages on four ranks, dealt out in turn. Right: the backward of a layer in two halves, I for the input's
# gradient and W for the weights'](../assets/08_two_ideas.svg)
#
# **Predict.** p = 4, m = 8, v = 2. What are the bubbles of 1F1B, interleaved, and ZB-H1 with v = 1?
#
# <details><summary>Answer</summary>
#
# 3/11 = 27 %, 3/19 = 16 %, 3/27 = 11 %.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "run_virtual", "idle")

# %%
# %%ranks
from manyhands.measure.virtual_network import Link, VirtualNetwork
from manyhands.predict.pipeline_schedules import bubble_formula, orders_of, simulate, slots_of

network = VirtualNetwork(ranks, inside=Link(5e-6, 50e9))
TOOK_S, STEP = {"F": 1e-3, "B": 2e-3, "I": 1e-3, "W": 1e-3}, {"F": 1, "B": -1, "I": -1, "W": 0}
charts, n = [], 2 * p  # micro-batches
for name, v in (("1F1B", 1), ("Interleaved1F1B", 2), ("InterleavedZeroBubble", 1)):
    orders = orders_of(name, p, n, v)
    ran, predicted = run_virtual(orders[s], v), float(bubble_formula(name, p, n, v))
    held = simulate(orders).in_flight
    if rank == 0:
        title = f"{name}, v = {v}: idle {100 * idle(*ran):.1f} %, formula {100 * predicted:.1f} %"
        charts.append((title, ran[0], [f"holds {k}{f'/{v}' if v > 1 else ''}" for k in held]))

# %%
# %%ranks
if rank == 0:
    from manyhands.plots.schedule import chart

    figure = chart(charts, "ms", virtual=True, scale=1e3)
    show(
        figure,
        "four_schedules",
        "1F1B, interleaved and zero-bubble on the same ranks: less idle time from top to bottom",
    )

# %% [markdown]
# (A number with a ′ belongs to the rank's second stage.) What is held is counted in stages: on four ranks interleaved holds 11 halves on rank 0, where 1F1B holds 4 wholes. With
# one stage per rank torch's interleaved order holds 7, because it begins with 2(p - 1 - s) forwards and one more.
# ZB-H1 holds p = 4 on *every* rank: what rank 3 has saved in 1F1B it now keeps for its late `W`s.
#
# ### One step for any order (MORE, 5 min)
#
# Your 1F1B sends what it has made while it receives what it needs next. With several stages on a rank, and a `W` that
# needs no message at all, that pairing is gone. So a send starts at once and is waited for at the end of the step, and a
# message carries a number, its *tag*, that says which micro-batch it is. NCCL knows no tags: this goes through the CPU's
# backend, on GPUs too.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "backward_of", "my_stage", "gpipe", "neighbours", "swap", "forward_of", "train_step")


# %%
# %%ranks
STEP = {"F": 1, "B": -1, "I": -1, "W": 0}  # where the result goes: to the right, to the left, nowhere


def receive(kind, stage, i, here):
    """What `stage` needs for micro-batch i: from the other rank, or from `here`, where the stage before is ours too."""
    if p == 1:
        return here.pop((STEP[kind], stage, i))
    arrived = torch.empty(rows, T, D, dtype=torch.float64)
    dist.recv(arrived, (stage - STEP[kind]) % p, tag=2 * i + (kind == "F"))
    return arrived.to(device)


def send(kind, stage, i, result, here):
    """Start to send what `stage` has made of micro-batch i; returns what to wait for later."""
    if p == 1:
        here[STEP[kind], stage + STEP[kind], i] = result
        return []
    result = result.cpu()
    return [(dist.isend(result, (stage + STEP[kind]) % p, tag=2 * i + (kind == "F")), result)]


# %% [markdown]
# An `I` walks back to the input only and keeps the graph; its `W` walks back to the weights. (Written so, a `W` computes
# the gradients *inside* its stage once more. torch's runtime keeps them.)


# %%
# %%ranks
def run_any(parts, order, ids, targets):
    """One step of `parts`, {stage: this rank's part of the model}, in any order. Gradients add up in the weights."""
    last, kept, gradients, sent, here = len(parts) * p - 1, {}, {}, [], {}
    for kind, stage, i in order:
        step, weights, result = STEP[kind], list(parts[stage].parameters()), None
        arrived = receive(kind, stage, i, here) if step and 0 <= stage - step <= last else None
        if kind == "F":
            x, target = (ids[i] if stage == 0 else arrived), (targets[i] if stage == last else None)
            kept[stage, i] = forward_of(parts[stage], x, target, len(ids))
            result = kept[stage, i][1].detach()
        elif kind == "B":
            result = backward_of(*kept.pop((stage, i)), arrived)
        elif kind == "I":
            x, y = kept[stage, i]
            gradients[stage, i] = arrived
            if stage > 0:  # ids have no gradient
                torch.autograd.backward(y, arrived, inputs=[x], retain_graph=True)
                result = x.grad
        else:
            torch.autograd.backward(kept.pop((stage, i))[1], gradients.pop((stage, i)), inputs=weights)
        if step and 0 <= stage + step <= last:
            sent += send(kind, stage, i, result, here)
    for work, _ in sent:
        work.wait()


# %% [markdown]
# In torch these schedules are `ScheduleInterleaved1F1B` and `ScheduleInterleavedZeroBubble`. They take a *list* of stages
# per rank, and refuse m that is no multiple of max(1, m // p). Again, each rank compares the gradients of its own weights
# with those of one process, for a GPT with a block for each of the 2p stages:

# %%
# %%ranks
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from manyhands.predict.pipeline_schedules import orders_of

deep = GPTConfig(vocab_size=len(corpus.vocab), n_layer=max(layers, 2 * p))
n = m - m % max(1, m // p)  # micro-batches
ids, targets = (part[:n] for part in batch(0))


def parts_of(v):
    """{stage: part} of this rank, of a fresh model: stages s, s + p, ... of v * p."""
    torch.manual_seed(1337)
    model, cuts = GPT(deep).to(device, torch.float64), layers_of_stages(deep.n_layer, v * p)
    return {stage: Stage(model, cuts[stage]) for stage in range(s, v * p, p)}


def by_torch(kind, parts):
    """The same step by torch's schedule."""
    stages = [PipelineStage(part, stage, len(parts) * p, device) for stage, part in parts.items()]
    schedule = kind(stages, n_microbatches=n, loss_fn=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()))
    last = {"target": torch.cat(targets)} if s == p - 1 else {}
    schedule.step(*([torch.cat(ids)] if s == 0 else []), **last, return_outputs=False)


# %% tags=["nbval-check-output"]
# %%ranks
torch.manual_seed(1337)
whole = GPT(deep).to(device, torch.float64)
whole(torch.cat(ids), torch.cat(targets))[1].backward()
wanted = {name: w.grad for name, w in whole.named_parameters()}
for kind, name, v in (
    (ScheduleInterleaved1F1B, "Interleaved1F1B", 2),
    (ScheduleInterleavedZeroBubble, "InterleavedZeroBubble", 1),
):
    ours, torchs = parts_of(v), parts_of(v)
    run_any(ours, orders_of(name, p, n, v)[s], ids, targets)
    by_torch(kind, torchs)
    weights = [pair for parts in (ours, torchs) for part in parts.values() for pair in part.named_parameters()]
    apart = max((w.grad - wanted[name]).abs().max().item() for name, w in weights)
    assert apart < 1e-10, f"{name} is {apart:.1e} away"
    say(f"{name}: ours, torch's and one process agree to 1e-10 in every gradient")

# %% [markdown]
# ### Play with p, m and v (MORE, 1 min)

# %% tags=["active-ipynb"]
# from manyhands.widgets.pipeline import show_pipeline
#
# show_pipeline()

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: two more schedules</summary>
#
# *Usual mistake:* believing that zero-bubble costs nothing; let the room find the rank whose memory grew. *Ask:*
# "which of the two ideas would you use on a slow network?" (Not interleaving: it sends v times as much.)
#
# </details>

# %% [markdown]
# ## Exercises (MORE, 18 min)
#
# Each check runs your answer in a process group of its own: you cannot break anything.
#
# ### Exercise 1: a schedule for less memory
#
# Rank 0 has room for the activations of `room` micro-batches only, and so have the others. Write `fitting(p, m, room)`:
# the orders of all p stages, a list of lists of actions. At most `room` are in flight on any stage, and the bubble is
# the smallest that this allows, as far as the check knows. Predict first: what does it cost to have half of the memory
# that 1F1B takes?


# %%
# %%ranks
def fitting(p, m, room):
    """[order of stage 0, order of stage 1, ...], of which none holds more than `room` micro-batches."""
    raise NotImplementedError  # your turn


checks.fitting(fitting, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 1</summary>
#
# ```python
# def fitting(p, m, room):
#     orders = []
#     for s in range(p):
#         ahead = min(m, p - s, room)  # 1F1B, which starts its backwards earlier where it must
#         order = [("F", s, i) for i in range(ahead)]
#         for i in range(m):
#             order += [("B", s, i)] + [("F", s, i + ahead)] * (i + ahead < m)
#         orders.append(order)
#     return orders
# ```
#
# </details>

# %% [markdown]
# ### Exercise 2: a share of the loss
#
# Not every position counts: where the target is -100, `F.cross_entropy` leaves it out. So micro-batches have unequal
# numbers of targets, and the mean of their means is not the batch's mean. Write `loss_share(logits_bTV, targets_bT,
# all_targets)`, the loss that the last stage calls backward on. `all_targets` is the list of all micro-batches'
# targets. All micro-batches together must give the gradients of the mean over all positions that count. A micro-batch
# may have none.


# %%
# %%ranks
def loss_share(logits_bTV, targets_bT, all_targets):
    """What this micro-batch adds to the mean loss over all targets that count."""
    raise NotImplementedError  # your turn


checks.loss_share(loss_share, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 2</summary>
#
# ```python
# def loss_share(logits_bTV, targets_bT, all_targets):
#     counted = sum((targets != -100).sum() for targets in all_targets)
#     return F.cross_entropy(logits_bTV.flatten(0, 1), targets_bT.flatten(), reduction="sum") / counted
# ```
#
# </details>

# %% [markdown]
# ### Exercise 3: balance uneven layers
#
# The slowest stage sets the pace: everybody waits for it, once per micro-batch. `costs` are the times of the layers in
# their order: an embedding, which is cheap, blocks, and a head, which for a large vocabulary costs as much as several
# blocks. Write `balance(costs, p)`: how many layers each of p stages gets, at least one each, so that the slowest stage
# is as fast as possible. There are at most 16 layers, so you may try everything.


# %%
# %%ranks
def balance(costs, p):
    """[number of layers of stage 0, of stage 1, ...]"""
    raise NotImplementedError  # your turn


checks.balance(balance, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 3</summary>
#
# ```python
# def balance(costs, p):
#     from itertools import combinations
#
#     def slowest(cuts):
#         return max(sum(costs[a:b]) for a, b in zip((0, *cuts), (*cuts, len(costs)), strict=True))
#
#     cuts = min(combinations(range(1, len(costs)), p - 1), key=slowest)
#     return [b - a for a, b in zip((0, *cuts), (*cuts, len(costs)), strict=True)]
# ```
#
# </details>

# %% [markdown]
# What does balance change? Six layers on two stages, three and three or four and two, where the head costs two blocks:

# %%
# %%ranks
if rank == 0:
    from manyhands.predict.pipeline_schedules import orders_of, simulate

    costs = [0.5, 1, 1, 1, 1, 2]
    for sizes in ([3, 3], [4, 2]):
        front, back = sum(costs[: sizes[0]]), sum(costs[sizes[0] :])
        times = {("F", 0): front, ("B", 0): 2 * front, ("F", 1): back, ("B", 1): 2 * back}
        run = simulate(orders_of("1F1B", 2, 8), times)
        say(f"{sizes} layers: stages take {front:g} and {back:g}, a step {run.length:g}, idle {100 * run.bubble:.0f} %")

# %% [markdown]
# ## A bug from the zoo (CORE, 3 min)
#
# A trainer runs a pipeline. Its memory allows one batch at a time, so it *accumulates*: two calls of `step`, then one
# update. The lines below do that with torch's schedule and its defaults. They run, on all ranks, and the loss falls.
# **What is wrong, and which measurement shows it?** Write down your suspicion before you open the answer.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "my_stage", "mean_loss", "by_library", "library_step")

# %%
# %%ranks
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

stage = my_stage(new_model())
schedule = by_library(Schedule1F1B, stage)
optimizer, seen_losses = torch.optim.AdamW(stage.parameters(), lr=3e-4), []
for step in range(6):
    loss = sum(library_step(schedule, *batch(2 * step + k)) for k in range(2)) / 2
    for w in stage.parameters():
        w.grad /= 2  # the mean of both
    optimizer.step()
    optimizer.zero_grad()
    dist.broadcast(loss, src=p - 1)
    seen_losses.append(f"{loss.item():.3f}")
if rank == 0:
    say(f"loss: {' '.join(seen_losses)}")

# %% [markdown]
# Now measure. Gradients of each batch alone, and of both accumulated; each rank looks at its last weight:


# %%
# %%ranks
def gradient_after(steps, loss_fn=mean_loss, **settings):
    """The last weight's gradient after these batches, added up."""
    stage = my_stage(new_model())
    schedule = by_library(Schedule1F1B, stage, loss_fn, **settings)
    for step in steps:
        library_step(schedule, *batch(step))
    return list(stage.parameters())[-1].grad


def divided(logits_bTV, targets_bT):
    return mean_loss(logits_bTV, targets_bT) / m


first, second, both = (gradient_after(steps) for steps in ((0,), (1,), (0, 1)))
share = ((both - second).norm() / first.norm()).item()
mended = gradient_after((0, 1), divided, scale_grads=False)
wrong, right = ((found - first - second).norm().item() for found in (both, mended))
say(f"of the first batch's gradient {share:.3f} is left; off by {wrong:.1e}, cured by {right:.0e}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# `scale_grads=True` divides by m at the end of *each* step, and it divides all that is in `grad`: the second call divides
# the first batch's gradient once more. Of k batches the first counts m^(k-1) times less than the last. So it happened
# in a trainer for large models: [torchtitan#1733](https://github.com/pytorch/torchtitan/issues/1733). The cure is the
# one above: `scale_grads=False`, and divide the *loss*.
#
# The same family: gradients summed over micro-batches where the mean was meant
# ([DeepSpeed#7773](https://github.com/deepspeedai/DeepSpeed/issues/7773), found when somebody logged the gradient
# norm); a loss divided for the log after backward, and not before
# ([torchtitan#2972](https://github.com/pytorch/torchtitan/issues/2972)).
#
# AdamW divides by the gradient's size, so it hides the factor, and a loss that falls proves nothing. The loss that is
# *printed* was right all along. (If it is read on the right stage: on a stage without a loss,
# [torchtitan#547](https://github.com/pytorch/torchtitan/issues/547) logged -1.)
#
# </details>
#
# The rule to take home: **compare the gradient, or its norm, with one process, for the same global batch.** Do it once
# for every new combination of micro-batches, accumulation and stages.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# With m = 8 an eighth of the first gradient is left: let the room read it from the printed share. *Ask:* "with plain
# SGD, would the loss have shown it?" Hardly: it looks like a smaller learning rate. *When late:* run only the cell that
# measures.
#
# </details>

# %% [markdown]
# ## On the cluster
#
# The trainer knows these schedules as flags. Ask first what would run, then submit the job of
# [lesson 04](04_first_job.ipynb) with the same flags:
#
# ```bash
# python scripts/launch.py --nproc 4 -- --preset nano --parallel.strategy pp --parallel.schedule 1F1B
# python scripts/train.py --preset olmo-7b --ranks 64 --dry-run --parallel.strategy fsdp --parallel.pipeline 4
# sbatch jobs/train.slurm --preset gpt2 --model.no-tie --parallel.strategy fsdp --parallel.pipeline 4
# ```
#
# `--parallel.schedule` takes the names of this lesson. A tied matrix, embedding and head at once, would be on the first
# and the last stage: hence `--model.no-tie`.
#
# **What changes on GPUs.** NCCL sends and receives GPU to GPU. Two ranks that send to each other outside a batch may
# wait forever there, also for small messages. Messages overlap with computing, so put pipeline neighbours on
# *different* nodes, and what talks most (tensor parallelism) inside a node.
#
# **What to look for**: the dry run's memory of the *first* stage; tokens per second for a few values of m, beside
# m/(m + p - 1); the same losses and gradient norms as without a pipeline for the same global batch; a log that reads the
# loss on the last stage.

# %% [markdown]
# ## Recap
#
# 1. Each rank has some layers. Activations go right, their gradients come back; weights stay where they are.
# 2. The bubble is (p - 1)/(m + p - 1) of the time. Micro-batches shrink it; 1F1B has the same bubble as GPipe.
# 3. GPipe holds m micro-batches, 1F1B min(m, p - s) on stage s. That is why 1F1B is the trainer's default.
# 4. Interleaving divides the bubble by about v and sends v times as much; zero bubble fills it with weight gradients.
# 5. A schedule never changes the result. Compare gradients with one process: wrong factors hide in a falling loss.
#
# ## Further reading
#
# - Huang et al. 2019, [GPipe](https://arxiv.org/abs/1811.06965): micro-batches, the bubble, recomputation of activations.
# - Narayanan et al. 2021, [Efficient large-scale language model training on GPU clusters](https://arxiv.org/abs/2104.04473):
#   1F1B and interleaving, with tensor and data parallelism around them.
# - Qi et al. 2024, [Zero bubble pipeline parallelism](https://arxiv.org/abs/2401.10241): the split backward.
# - PyTorch, [torch.distributed.pipelining](https://docs.pytorch.org/docs/stable/distributed.pipelining.html).

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
