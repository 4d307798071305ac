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
# **50 minutes** for the sections marked CORE, 89 with those marked MORE.
#
# Your model is too deep for one GPU. So you give each GPU some of its layers, and three of four GPUs wait. You write the
# order in which they work, and the idle time shrinks.
#
# After this lesson **you can**
# - write the schedules GPipe and 1F1B, and predict their idle time and memory;
# - carry gradients across a cut, and prove that your pipeline computes what one process computes;
# - balance the stages, and find a wrong factor that the loss does not show.
#
# **You need** `send` and `recv` ([lesson 02](02_collectives.ipynb)), and
# [accumulation](../assets/glossary.md#accumulation) ([lesson 03](03_data_parallel.ipynb)): gradients of several
# [micro-batches](../assets/glossary.md#micro-batch) add up before one update.
#
# **New here:** [pipeline parallel](../assets/glossary.md#pipeline-parallel), [stage](../assets/glossary.md#stage),
# [bubble](../assets/glossary.md#bubble), [schedule](../assets/glossary.md#schedule),
# [GPipe](../assets/glossary.md#gpipe), [1F1B](../assets/glossary.md#1f1b),
# [in flight](../assets/glossary.md#in-flight), and in MORE [interleaved](../assets/glossary.md#interleaved),
# [zero bubble](../assets/glossary.md#zero-bubble). Tables to look things up are in
# [the handbook](../assets/handbook/08_pipeline_parallel.md).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 1, one rank at a time 3, who waits 6, GPipe 6, 1F1B 9, real clock 4, training 10, uneven
# layers 5, with FSDP 2, zoo 3, card 1.
#
# *Say:* two questions carry the lesson: "who waits for whom?" gives the bubble, and "what must be kept until
# backward?" gives the memory. A schedule is an order of the same actions; it never changes the result.
#
# *Three usual mistakes:* thinking that 1F1B has a smaller bubble than GPipe (it has the same; it holds less);
# thinking that a stage needs the other stages' weights; dividing the loss twice, or not at all.
#
# *When late:* give solutions D2 and E, keep builds A to C, the real clock and the zoo.
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
# ## Start (CORE, 1 min)
#
# The first cell starts four ranks. Rank `s` is **stage** `s` of `p`: it has some consecutive layers of one model. The
# folded cell makes the model and its data.

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
from manyhands import ____, Metrics, card, compare, join, leave, refuse, say, show
from manyhands.checks import pipeline_parallel as checks
from manyhands.measure import wire
from manyhands.lessons import pipeline_parallel as lesson
from manyhands.plots.schedule import chart
from manyhands.predict.pipeline_schedules import orders_of, simulate, slots_of

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
s, p = rank, world_size  # this rank's stage, of p

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.config.layout import layers_of_stages
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.parallel.pipeline import Stage

layers, m = layers or max(4, p), micro_batches or max(8, p)
for name, number in (("layers", layers), ("micro_batches", m)):
    if number < p:
        refuse(f"{name}={number} is less than one for each of {p} ranks; use {p} or more")
corpus = load_corpus(ranks)
config = GPTConfig(vocab_size=len(corpus.vocab), n_layer=layers)
T, D = config.block_size, config.n_embd
metrics = Metrics(ranks, corpus, {"layers": layers, "micro_batches": m, "rows": rows})
BATCH_S = 0.2  # seconds that a whole batch takes each stage, forward a third of it


def new_model():
    """ShakespeareGPT with its first weights, the same on every rank, because the seed is; float64."""
    torch.manual_seed(1337)
    return GPT(config).to(device, torch.float64)


def batch(step):
    """Batch number `step`, whole: m micro-batches of inputs and m of targets, each [b, T]."""
    both = get_batch(corpus.train_ids, step, m * rows, T, 0, 1, seed=1)
    return [ids_BT.to(device).chunk(m) for ids_BT in both]


def my_stage(model):
    """This rank's part of the model: some blocks; the first has the embeddings, the last the norm and the head."""
    return Stage(model, layers_of_stages(layers, p)[s])


def on_the_clock(make, n):
    """Run a schedule on all ranks, n micro-batches of one batch; computing is sleeping. Returns (slots, seconds)."""
    orders = [make(stage, p, n) for stage in range(p)]
    simulate(orders)  # raises ValueError on every rank where an order never ends
    slots = slots_of(lesson.run_asleep(orders[s], {"F": BATCH_S / 3 / n, "B": 2 * BATCH_S / 3 / n}))
    return slots, max(slot.end for slot in slots)


def draw(name, title, slots, alt):
    """Draw what the ranks did when, on rank 0."""
    if rank == 0:
        show(chart([(title, slots, ())], "ms", scale=1e3), name, alt)


# %% [markdown]
# ## One rank at a time (CORE, 3 min)
#
# Activations go right, from stage to stage. Then the gradients come back. Four ranks do that with one batch. They send
# real messages; instead of computing they *sleep*, so that four stages fit on a laptop's cores:


# %%
# %%ranks
def whole(s, p, m):
    """What stage s of p does with a batch in one piece, in order."""
    return [("F", s, 0), ("B", s, 0)]


slots, took_s = on_the_clock(whole, 1)
idle = 100 * (1 - BATCH_S / took_s)
draw("one_at_a_time", f"one batch in one piece: idle {idle:.0f} %", slots, "one rank works at a time, the others wait")

# %% [markdown]
# One rank computes at a time. On four ranks, three quarters of the machine are idle.
#
# **Predict.** What is idle on eight ranks?

# %%
# %%ranks
guess_idle = ____  # your turn: type %

# %%
# %%ranks
compare("idle on eight ranks, one batch in one piece", "guess_idle", 100 * 7 / 8, "%")

# %% [markdown]
# More ranks make it worse: (p - 1)/p of the machine waits. The cure is to cut the batch into m **micro-batches**. As
# soon as rank 0 has sent the first, it starts on the second.
#
# ![Above: four ranks and one batch, one rank computes at a time. Below: the same batch in four micro-batches, several
# ranks compute at the same time, and the step is shorter](../assets/08_micro_batches.svg)

# %% [markdown]
# ## Who waits for whom? (CORE, 6 min)
#
# What does each action wait for? An action is `("F", s, i)`, the forward of micro-batch i on stage s, or `("B", s, i)`, its
# backward.
#
# ### Build A: what must be done before
#
# Write `needs(action, p)`: the list of the actions that must be *done* before this one can begin. List only what it
# waits for directly: not what another action in the list implies, and not the order in which a stage does its own work.
# The check draws two micro-batches on four stages; actions with wrong rules are framed in red.


# %%
# %%ranks
def needs(action, p):
    """[actions that must be done before this one], on any of p stages."""
    kind, s, i = action
    if kind == "F":
        return ____ if s > 0 else []  # a list: which action made its input?
    gradient_arrives = ____ if s < p - 1 else []  # a list: which action made the gradient of its output?
    return [____, *gradient_arrives]  # which action of its own stage?


checks.needs(needs, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution A</summary>
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
# In the charts a backward takes twice as long as a forward, because it multiplies twice as many matrices. Messages take
# no time.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: who waits for whom</summary>
#
# Let two people act it out: one says "I have sent F of 0", the other may begin. *Usual mistake:* a backward that needs
# the loss of the last stage directly; that is implied by the gradient that arrives. *Ask:* "which rank knows the loss?"
# Only the last one; it comes back in the zoo.
#
# </details>

# %% [markdown]
# ## GPipe: fill the pipeline (CORE, 6 min)
#
# A [**schedule**](../assets/glossary.md#schedule) is the order in which each stage does its actions. The simplest is
# [**GPipe**](../assets/glossary.md#gpipe) (Huang et al. 2019): all forwards, then all backwards.
#
# ### Build B: GPipe's order
#
# Write the list of all actions of stage s. Micro-batches are numbered from 0.


# %%
# %%ranks
def gpipe(s, p, m):
    """What stage s of p does with m micro-batches, in order."""
    return ____  # a list of 2m actions


checks.gpipe(gpipe, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def gpipe(s, p, m):
#     return [(kind, s, i) for kind in ("F", "B") for i in range(m)]
# ```
#
# </details>

# %% [markdown]
# The white areas of a chart are the [**bubble**](../assets/glossary.md#bubble). Count along its last row: it waits for
# p - 1 forwards, computes m micro-batches, and is done p - 1 backwards before rank 0. So every rank works m units and
# waits p - 1, where a unit is a forward and a backward: the bubble is **(p - 1)/(m + p - 1)** of the time. `simulate`
# runs your orders by your rules:

# %%
# %%ranks
for n in (1, 2, 4, 8, 16, 58):
    run = simulate([gpipe(stage, 4, n) for stage in range(4)], needs=needs)
    if rank == 0:
        say(f"4 stages, m = {n:2}: length {run.length:3}, idle {100 * float(run.bubble):4.1f} %, by formula 3/{n + 3}")

# %% [markdown]
# A bubble below 5 % takes 58 micro-batches. The price: at the end of the forwards each rank **holds** the activations of
# all m. These micro-batches are [**in flight**](../assets/glossary.md#in-flight).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the bubble</summary>
#
# Draw the chart by hand, row by row, while the room says what comes next. *Usual mistake:* expecting another formula
# because a backward is longer; any ratio gives it. *Ask:* "what happens to the bubble if you double p and m?"
#
# </details>

# %% [markdown]
# ## 1F1B: a backward as soon as there is one (CORE, 9 min)
#
# Under GPipe the last stage does m - 1 other forwards before the backward of micro-batch 0.
# [**1F1B**](../assets/glossary.md#1f1b), one forward, one backward (Narayanan et al. 2021), starts backwards as early as
# possible: a stage begins with some forwards, and from then on alternates.
#
# **Predict.** GPipe is idle for 27 % of the time on four stages with eight micro-batches. How much is 1F1B idle?

# %%
# %%ranks
guess_1f1b = ____  # your turn: type %

# %% [markdown]
# ### Build C in two rungs: 1F1B
#
# **C1.** How many forwards does stage s do before its first backward? Micro-batch 0 must reach the last stage, and its
# gradient must come back. There may be fewer micro-batches than stages.


# %%
# %%ranks
def ahead(s, p, m):
    """The number of forwards that stage s of p does before its first backward."""
    return ____


checks.ahead(ahead, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution C1</summary>
#
# ```python
# def ahead(s, p, m):
#     return min(m, p - s)
# ```
#
# </details>

# %% [markdown]
# **C2.** From then on a stage alternates: a backward, then the next forward, until the forwards run out. Micro-batches
# go in order. The first action of each rank that is out of place gets a red frame.


# %%
# %%ranks
def one_f_one_b(s, p, m):
    """What stage s of p does with m micro-batches, in order."""
    order = [("F", s, i) for i in range(ahead(s, p, m))]
    for i in range(m):
        ____  # four lines: the backward of i; then the next forward, if there is one
    return order


checks.one_f_one_b(one_f_one_b, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution C2</summary>
#
# ```python
# def one_f_one_b(s, p, m):
#     order = [("F", s, i) for i in range(ahead(s, p, m))]
#     for i in range(m):
#         order.append(("B", s, i))
#         following = i + ahead(s, p, m)
#         if following < m:
#             order.append(("F", s, following))
#     return order
# ```
#
# </details>

# %%
# %%ranks
run = simulate([one_f_one_b(stage, 4, 8) for stage in range(4)])
compare("idle under 1F1B, 4 stages, 8 micro-batches", "guess_1f1b", round(100 * float(run.bubble)), "%")
if rank == 0:
    say(f"in flight at most: GPipe [8, 8, 8, 8], 1F1B {run.in_flight}")

# %% [markdown]
# **The same bubble**, with less memory. 1F1B holds min(m, p - s) micro-batches on stage s: that depends on the number
# of *stages*, not of micro-batches. So m can grow until the bubble is small. Megatron-LM calls your three parts *warm-up*
# (forwards only), *steady state* and *cool-down* (backwards only).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: 1F1B</summary>
#
# *Say:* same bubble, so this is about memory only. *Usual mistakes:* p - s - 1 forwards (then the last stage begins with
# a backward of nothing: the chart stops there); forgetting min(m, ...). *Ask:* "which stage would you give fewer layers,
# and why?" (Build E.)
#
# </details>

# %% [markdown]
# ## Under a real clock (CORE, 4 min)
#
# The formula ignores messages, and ranks that share cores. So cut one batch into more and more micro-batches, and run
# both schedules on sleeping ranks again. The dashed line is the formula. On the right are 32 A100s and the memory of
# each GPU ([Qi et al. 2024](https://openreview.net/forum?id=tuzTN0eIO5), table 4).

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.launch import recorded_runs

counts = [n for n in (1, 2, 4, 8, 16, 32) if n <= 4 * m]
took = {"GPipe": [on_the_clock(gpipe, n)[1] for n in counts], "1F1B": [on_the_clock(one_f_one_b, n)[1] for n in counts]}
formula = [(p - 1) / (n + p - 1) for n in counts]
if rank == 0:
    series = {name: (counts, [1 - BATCH_S / seconds for seconds in found], formula) for name, found in took.items()}
    alt = "left idle time against micro-batches, measured above the formula; right published samples per second"
    show(lesson.draw_bubbles(series, recorded_runs.published("08_zero_bubble")), "bubbles", alt)
    for name, found in took.items():
        at = min(range(len(counts)), key=found.__getitem__)
        told = f"shortest step with {counts[at]} micro-batches: {1e3 * found[at]:.0f} ms"
        say(f"{name}: {told}, by the formula {1e3 * BATCH_S / (1 - formula[at]):.0f} ms")
metrics.measured(**{f"steps_{name}": found for name, found in took.items()})

# %% [markdown]
# Left: more micro-batches move the points further from the line: each action pays for a message and for a sleep that
# ends late, and on a laptop ranks also wait for a core. So the shortest step is often not at the right end.
#
# Right: the formula of 1F1B with p = 32, scaled to the last point, is within 2 % of the measurement. "Smaller bubbles",
# in MORE, explains interleaved and zero-bubble (ZB) schedules.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the real clock</summary>
#
# *Say:* the left picture differs from laptop to laptop, and that is the point: what is not in the formula is what you
# measure. *Ask:* "a kernel that is too small also costs a fixed time. Does it look like this?" (Yes.)
#
# </details>

# %% [markdown]
# ## Train with your order (CORE, 10 min)
#
# Now the GPT, in float64. Autograd ends at the cut, on both sides: the graph of a stage begins at `x`, which arrived,
# and ends at `y`, which is sent.
#
# ### Build D in two rungs: across the cut
#
# **D1.** Write `backward_of(x, y, dy)`. It adds the gradients of the stage's weights to their `grad`, as any backward
# does (`torch.autograd.backward` takes a tensor and its gradient), and returns what the stage before needs. On the last
# stage `y` is the loss and `dy` is None. On the first stage `x` holds ids, which have no gradient. Do not keep the
# graph.


# %%
# %%ranks
def backward_of(x, y, dy):
    """Backward of one stage for one micro-batch: from the gradient of its output to that of its input."""
    ____  # your turn: two lines


checks.backward_of(backward_of, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution D1</summary>
#
# ```python
# def backward_of(x, y, dy):
#     torch.autograd.backward(y, dy)
#     return x.grad
# ```
#
# </details>

# %% [markdown]
# **D2.** The forward returns both ends of the graph. Only on the last stage `targets_bT` is given, and `y` is this
# micro-batch's part of the loss. The loss of the batch is the *mean* of m cross-entropies, while backward *adds*.
# (`F.cross_entropy` wants [N, V] and [N]: `y.flatten(0, 1)` and `targets_bT.flatten()`.)


# %%
# %%ranks
def forward_of(stage, arrived, targets_bT, m):
    """(x, y) of one micro-batch: where the graph of this stage begins, and where it ends."""
    x = arrived.requires_grad_() if arrived.is_floating_point() else arrived  # a leaf; ids have no gradient
    y = ____
    if targets_bT is not None:
        y = ____
    return x, y


checks.forward_of(forward_of, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution D2</summary>
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
# The folded `train_step` walks through an order: it sends what the last action made, receives what the next one needs, and
# keeps `(x, y)` from forward to backward. `library_step` does the same with torch's `Schedule1F1B` and `ScheduleGPipe`.
# Each rank compares its gradients with those of one process:


# %% jupyter={"source_hidden": true}
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


# %% jupyter={"source_hidden": true}
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


# %% jupyter={"source_hidden": true} tags=["nbval-check-output"]
# %%ranks
orders = {"our GPipe": gpipe(s, p, m), "our 1F1B": one_f_one_b(s, p, m)}
stages, losses, kept = {way: my_stage(new_model()) for way in (*orders, "torch's GPipe", "torch's 1F1B")}, {}, {}
for way, order in orders.items():
    with wire.watch() as seen:
        losses[way], kept[way] = train_step(stages[way], order, *batch(0))
for way, kind in {"torch's GPipe": ScheduleGPipe, "torch's 1F1B": Schedule1F1B}.items():
    losses[way] = library_step(by_library(kind, stages[way]), *batch(0))
model = new_model()
_, expected = model(*[torch.cat(part) for part in batch(0)])
expected.backward()
wanted = {name: w.grad for name, w in model.named_parameters()}
for way, stage in stages.items():
    dist.broadcast(losses[way], src=p - 1)  # all ranks: only the last stage knew it
    apart = max((w.grad - wanted[name]).abs().max().item() for name, w in stage.named_parameters())
    same = max(apart, (losses[way] - expected).abs().item()) < 1e-10
    say(f"{way:13}: the loss and all my gradients are those of one process, to 1e-10: {same}")
metrics.close(float64_loss=expected.detach(), gradient_norm=torch.stack([g.norm() for g in wanted.values()]).norm())

# %% [markdown]
# A schedule changes *when* ranks compute, never *what*.

# %% jupyter={"source_hidden": true}
# %%ranks
say(f"in flight at most: {', '.join(f'{n} under {way}' for way, n in kept.items())}")
metrics.exact(in_flight=kept, messages=seen.messages, bytes=seen.sent_bytes)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: training</summary>
#
# *Usual mistakes:* sending `y` with its graph; `y.sum().backward()`, which is right for the last stage only. Walk
# through `zip([None, *order], [*order, None])` once: it pairs each action with the one before it. Which rank passes what
# to the library's `step` is in the handbook. *Ask:* "why do we compare gradients and not the loss after ten steps?" The
# zoo answers it.
#
# </details>

# %% [markdown]
# ## Uneven layers (CORE, 5 min)
#
# The slowest stage sets the pace. And layers are not equal: an embedding is cheap, a head for a large vocabulary costs as
# much as several blocks.
#
# ### Build E: balance the stages
#
# `costs` are the times of the layers in their order. Write `balance(costs, p)`: how many layers each of p stages gets,
# at least one each, so that the slowest stage is as fast as possible. There are at most 16 layers, so you may try every
# cut: `itertools.combinations(range(1, len(costs)), p - 1)`.


# %%
# %%ranks
def balance(costs, p):
    """[number of layers of stage 0, of stage 1, ...]"""
    raise NotImplementedError  # your turn: about five lines


checks.balance(balance, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution E</summary>
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
# Six layers on two stages, where the head costs two blocks: compare three and three with your balance.

# %% jupyter={"source_hidden": true}
# %%ranks
costs = [0.5, 1, 1, 1, 1, 2]
for sizes in ([3, 3], balance(costs, 2)) if rank == 0 else ():
    front, back = sum(costs[: sizes[0]]), sum(costs[sizes[0] :])
    times = {("F", 0): front, ("B", 0): 2 * front, ("F", 1): back, ("B", 1): 2 * back}
    run = simulate(orders_of("1F1B", 2, 8), times)
    say(f"{sizes} layers: stages take {front:g} and {back:g}, a step {run.length:g}, idle {100 * run.bubble:.0f} %")

# %% [markdown]
# ## With FSDP (CORE, 2 min)
#
# Large runs do both: 64 ranks are 4 stages x 16 shards. [FSDP](../assets/glossary.md#fsdp) gathers a block before it
# computes (lesson 06). But now a block computes once per *micro-batch*. FSDP frees a block after each forward. torch's
# pipeline keeps it after every backward but the last.
#
# **Predict.** Stage 0 of four does 1F1B with eight micro-batches: F F F F, then B F four times, then B B B B. How often
# does it gather each block in a step?

# %%
# %%ranks
guess_gathers = ____  # your turn: type a number

# %% jupyter={"source_hidden": true}
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def gathers(stays):
    """All-gathers of a linear layer that does the order of stage 0 of four with eight micro-batches."""
    layer = torch.nn.Linear(8, 8).to(device)
    fully_shard(layer, mesh=init_device_mesh(device.type, (p,)), reshard_after_forward=not stays)
    kept = {}
    with wire.watch() as seen:
        for kind, _, i in orders_of("1F1B", 4, 8)[0]:
            layer.set_reshard_after_backward(i == 7)  # so does torch's pipeline
            layer.set_requires_gradient_sync(i == 7)
            if kind == "F":
                kept[i] = layer(torch.ones(1, 8, device=device)).sum()
            else:
                kept.pop(i).backward()
    return seen.count("all_gather")


found = {"freed after each forward": gathers(stays=False), "held from first to last": gathers(stays=True)}
because = ", ".join(f"{name}: {count}" for name, count in found.items()) if p > 1 else ""
compare("gathers of a block, 1F1B with 8 micro-batches", "guess_gathers", 9, because=because)

# %% [markdown]
# Every action that finds the weights freed gathers them, here marked: F\* F\* F\* F\* B\* F B\* F B\* F B\* F B\* B B B. These
# are m + 1. The other choice is to hold the stage *whole*, with one gather. `gpt-7b` has 13.4 GB in bf16: one of four
# stages then takes up to 3.5 GB more.
#
# torchtitan holds it whole [by
# default](https://github.com/pytorch/torchtitan/blob/90d017c1308142b7c8e7517d72e05ca49c4f9b13/torchtitan/distributed/fsdp.py)
# where there is a pipeline. [DeepSeek-V3](https://arxiv.org/abs/2412.19437) shards the optimizer alone (ZeRO-1), which is
# Megatron-LM's *distributed optimizer*.

# %% [markdown]
# ## A bug from the zoo (CORE, 3 min)
#
# A trainer runs a pipeline. Its memory allows one batch at a time, so it *accumulates*: two calls of `step`, then one
# update. The lines below do that with torch's schedule and its defaults, and the loss falls. **What is wrong, and which
# measurement shows it?** Write down your suspicion before you open the answer.

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
# Now measure. The folded cell compares the gradients of each batch alone with those of both accumulated; each rank
# looks at its last weight:


# %% jupyter={"source_hidden": true}
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
say(f"of the first batch's gradient {share:.3f} is left; error {wrong:.1e}, after the cure {right:.0e}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# `scale_grads=True` divides by m at the end of *each* step, and it divides all that is in `grad`: the second call divides
# the first batch's gradient once more ([torchtitan#1733](https://github.com/pytorch/torchtitan/issues/1733)). The cure:
# `scale_grads=False`, and divide the *loss*.
#
# AdamW divides by the gradient's size, so it hides the factor. The loss that is *printed* was right all along.
#
# </details>
#
# **Compare the gradient, or its norm, with one process, for the same global batch.**

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# With m = 8 an eighth of the first gradient is left: let the room read it from the printed share. *Ask:* "with plain
# SGD, would the loss have shown it?" Hardly: it looks like a smaller learning rate. *When late:* run only the cell that
# measures.
#
# </details>

# %% [markdown]
# ## The chain rule over ranks (MORE, 4 min)
#
# A pipeline moves no weights. It gives each rank some of the *layers*, and sends what comes out of one rank to the next.
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
# The size of a message does not depend on the number of layers. So in deeper stages messages cost less, compared with
# the computing. That is why pipelines run *between* nodes, where links are slow.
#
# ## What is sent, and what is kept (MORE, 3 min)
#
# Between two actions a rank sends what the first one has made, and receives what the second one needs, both **at
# once**. Otherwise two neighbours can send to each other first, each waits for the other to receive, and nothing moves:
# the deadlock of lesson 02.
#
# ![Rank s and rank s+1: an activation goes right while a gradient comes left; both messages are handed over in one
# call](../assets/08_swap.svg)
#
# **Predict.** How many messages does a rank in the middle send in a step, and how many the first and the last? How
# many bytes is that, for m = 8 on four ranks?
#
# <details><summary>Answer</summary>
#
# In the middle 2m = 16: m activations to the right, m gradients to the left. The first and the last send m = 8. Each
# message has 2·64·128 numbers of 8 bytes, 131 kB, so 2.1 MB and 1.05 MB.
#
# </details>

# %%
# %%ranks
with wire.watch() as seen:
    train_step(my_stage(new_model()), gpipe(s, p, m), *batch(0))
expected = (2 if 0 < s < p - 1 else 1) * m * (p > 1)
say(f"{seen.messages} messages, predicted {expected}; {seen.sent_bytes:,} bytes, {expected * rows * T * D * 8:,}")
metrics.exact(gpipe_messages=seen.messages, gpipe_bytes=seen.sent_bytes)

# %% [markdown]
# `count_saved` (lesson 01) counts what autograd keeps of one micro-batch on this stage. Multiplied by the micro-batches
# in flight, this is the memory of activations:

# %%
# %%ranks
from manyhands.measure.tensor_bytes import count_saved

stage = my_stage(new_model())
x = batch(0)[0][0] if s == 0 else torch.zeros(rows, T, D, dtype=torch.float64, device=device)
one_mb = count_saved(lambda: stage(x), stage).bytes / 1e6  # what autograd keeps of one micro-batch
for name, order in {"GPipe": gpipe(s, p, m), "1F1B": one_f_one_b(s, p, m)}.items():
    _, most = train_step(stage, order, *batch(0))
    say(f"{name + ':':6} in flight at most {most}, {most} · {one_mb:.3f} = {most * one_mb:.1f} MB of activations")
    metrics.exact(**{f"in_flight_{name}": most})

# %% [markdown]
# ### The bubble in a trace (MORE, 2 min)
#
# Your 1F1B once more, with sleeping stages. `--trace` draws below the cell what each rank did, and for whom it waited.
#
# **Predict.** For whom does the last rank wait at the beginning, and rank 0 in the middle? For which share of the time,
# at least, does a rank compute nothing, with p = 4 and m = 8?

# %%
# %%ranks --trace
slots, took_s = on_the_clock(one_f_one_b, m)
if rank == 0:
    say(f"bubble by the formula: {100 * (p - 1) / (m + p - 1):.0f} %")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The last rank waits for the one before it, until the first activation has come through all stages. Rank 0 waits for rank 1,
# which sends the first gradient back. The bubble is (p - 1)/(m + p - 1) = 3/11 = 27 % on every rank. In this time it
# waits or communicates. Messages add to it.
#
# </details>

# %% [markdown]
# ## Smaller bubbles (MORE, 7 min)
#
# **Why.** The bubble is p - 1 stages long. There are three ways to shrink it without more micro-batches.
#
# **Shorter stages.** Give each rank v stages of 1/v the depth, dealt out like cards: rank 0 has stages 0 and p, rank 1
# has 1 and p + 1. A micro-batch goes around v times. The pipeline fills v times as fast: **(p - 1)/(vm + p - 1)**.
# That is [**interleaved**](../assets/glossary.md#interleaved) 1F1B (Narayanan et al. 2021; Megatron-LM's *virtual pipeline
# stages*), at the price of v times the messages and of more activations.
#
# **Split the backward.** A backward makes two things: the gradient of its input, for which the stage before waits, and
# the gradient of the weights, for which nobody waits until the update. Do the first at once (`I`), and the second (`W`)
# when you would be idle. With F, I and W of equal length the bubble is **(p - 1)/(3vm + p - 1)**: this is ZB-H1, one of
# the [**zero bubble**](../assets/glossary.md#zero-bubble) schedules (Qi et al. 2024), torch's `InterleavedZeroBubble`.
#
# ![Left: eight stages on four ranks, dealt out in turn. Right: the backward of a layer in two halves, I for the input's
# gradient and W for the weights'](../assets/08_two_ideas.svg)
#
# **Both, in a V.** Give rank s the stages s and 2p - 1 - s: a micro-batch goes down the ranks and comes up again. Rank
# 0 has the first stage *and* the last one. So it begins the backward itself, and all ranks hold the same amount of
# activations: `ZBVZeroBubble`, by the same authors. DeepSeek-V3 was trained on [16 pipeline
# ranks](https://arxiv.org/abs/2412.19437) with a relative of it, DualPipe, in which the messages of a forward also hide
# behind a backward; torch has a variant as `DualPipeV`.
#
# **Predict.** p = 4, m = 8. What are the bubbles of 1F1B, interleaved with v = 2, ZB-H1 with v = 1, and the V?
#
# <details><summary>Answer</summary>
#
# 3/11 = 27 %, 3/19 = 16 %, 3/27 = 11 %, 3/51 = 6 %: the V has two stages per rank, so v = 2.
#
# </details>
#
# Real ranks do these orders with real messages, but on a *virtual* clock (as in lesson 02): a forward moves it by 1 ms,
# and a message costs 5 µs plus its bytes over 50 GB/s. A loaded machine changes nothing.


# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.measure.virtual_network import Link, VirtualNetwork
from manyhands.predict.pipeline_schedules import bubble_formula
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble

network = VirtualNetwork(ranks, inside=Link(5e-6, 50e9))
TOOK_S = {"F": 1e-3, "B": 2e-3, "I": 1e-3, "W": 1e-3}
STEP = {"F": 1, "B": -1, "I": -1, "W": 0}  # where the result goes: to the right, to the left, nowhere


def run_virtual(order, v=1, owners=None):
    """Do the order on the network, v stages per rank. Returns (all slots, length in s) on rank 0, else None."""
    network.reset()
    owners = owners or [stage % p for stage in range(v * p)]  # the rank of each stage
    message_bTD, sent = torch.zeros(rows, T, D), []
    for kind, stage, i in order:
        step, tag = STEP[kind], int(kind == "F")  # activations and gradients each in an order of their own
        source, target = stage - step, stage + step
        if step and 0 <= source < v * p and owners[source] != s:
            network.recv(message_bTD, owners[source], tag)
        network.compute(TOOK_S[kind] / v, f"{kind} {stage} {i}")
        if step and 0 <= target < v * p and owners[target] != s:
            sent.append(network.isend(message_bTD, owners[target], tag=tag))
    for work in sent:
        work.sending.wait()
    spans = network.gather_spans()
    return (slots_of(spans), max(span.end_s for span in spans)) if rank == 0 else None


def idle_share(slots, length_s):
    """The share of all ranks' time in which nothing was computed."""
    return 1 - sum(slot.end - slot.start for slot in slots) / (p * length_s)


def in_a_v(n):
    """The orders of all ranks under torch's ZBVZeroBubble: rank s has the stages s and 2p - 1 - s."""
    halves = [PipelineStage(torch.nn.Identity(), stage, 2 * p, device) for stage in (s, 2 * p - 1 - s)]
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    found = ScheduleZBVZeroBubble(halves, n_microbatches=n).pipeline_order
    return [
        [(kinds[one.computation_type.name], one.stage_index, one.microbatch_index) for one in found[r] if one]
        for r in range(p)
    ]


# %%
# %%ranks
n = 2 * p  # micro-batches
down_and_up = [*range(p), *reversed(range(p))]
charts, idles = [], {}
for name, orders, v, owners in (
    ("Interleaved1F1B", orders_of("Interleaved1F1B", p, n, 2), 2, None),
    ("InterleavedZeroBubble", orders_of("InterleavedZeroBubble", p, n), 1, None),
    ("ZBVZeroBubble", in_a_v(n), 2, down_and_up),
):
    ran = run_virtual(orders[s], v, owners)
    predicted = float(bubble_formula(name.replace("ZBV", "Interleaved"), p, n, v))
    if rank == 0:
        idles[name] = idle_share(*ran)
        title = f"{name}, v = {v}: idle {100 * idles[name]:.1f} %, formula {100 * predicted:.1f} %"
        notes = [f"holds {k}{f'/{v}' if v > 1 else ''}" for k in simulate(orders).in_flight]
        charts.append((title, ran[0], notes))
if rank == 0:
    alt = "interleaved, zero-bubble and V-shaped on the same ranks: less idle time from top to bottom"
    show(chart(charts, "ms", virtual=True, scale=1e3), "smaller_bubbles", alt)
metrics.exact(idle=idles)

# %% [markdown]
# Bold numbers belong to the rank's second stage. What is held is counted in stages: on four ranks interleaved holds 11
# half-size stages on rank 0, and 1F1B holds 4 of full size. ZB-H1 holds p = 4 on *every* rank: rank 3, which holds 1
# under 1F1B, now keeps more for its late `W`s. The V holds 8 half-size stages on every rank, which is the same amount.
#
# ### One step for any order (MORE, 5 min)
#
# Your 1F1B sends what it has made while it receives what it needs next. With several stages on a rank, and a `W` that
# needs no message at all, that pairing does not work. So a send starts at once and is waited for at the end of the
# step, and a message carries a number, its *tag*, that says which micro-batch it is. NCCL has no tags, so these
# messages go through the CPU's backend, on GPUs too.

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
# An `I` walks back to the input only and keeps the graph; its `W` walks back to the weights. (In this form a `W`
# computes the gradients *inside* its stage a second time. torch's runtime keeps them.)


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
# per rank, and refuse an m that is not a multiple of max(1, m // p). Again, each rank compares the gradients of its own
# weights with those of one process, for a GPT with a block for each of the 2p stages:

# %%
# %%ranks
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

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
# ## Exercises (MORE, 17 min)
#
# ### Exercise 1: a schedule for less memory
#
# Rank 0 has room for the activations of `room` micro-batches only, and so have the others. Write `fitting(p, m, room)`:
# the orders of all p stages, a list of lists of actions. At most `room` are in flight on any stage, and the bubble is
# the smallest that this allows, as far as the check knows. Predict first: what does it cost to use only half of the
# memory of 1F1B?


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
# ### Exercise 2: how many micro-batches?
#
# Each micro-batch pays for its messages, so take as few as the bubble allows. A global batch of `sequences` is cut into m
# equal micro-batches. Write `fewest(p, sequences, most_idle)`: the smallest m for which GPipe or 1F1B on p stages is idle for
# at most `most_idle` of the time, a number from 0 to 1. Return None if no m is enough: the batch is too small for this
# number of stages.


# %%
# %%ranks
def fewest(p, sequences, most_idle):
    """The fewest equal micro-batches of `sequences` with which p stages are idle for at most `most_idle`."""
    raise NotImplementedError  # your turn


checks.fewest(fewest, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 2</summary>
#
# ```python
# def fewest(p, sequences, most_idle):
#     """The fewest equal micro-batches of `sequences` with which p stages are idle for at most `most_idle`."""
#     for m in range(1, sequences + 1):
#         if sequences % m == 0 and (p - 1) / (m + p - 1) <= most_idle:
#             return m
#     return None
# ```
#
# </details>

# %% [markdown]
# ### Exercise 3: what does an order hold?
#
# An order is all you need to know a rank's memory. A stage holds the activations of a micro-batch from its `F` to its `B`. Where
# the backward is split, count it to its `W`: an `I` keeps nearly all, the inputs of the matrices. Write `held(order)`: the
# most that this rank holds at a time. A rank may have several stages, and each pair (stage, micro-batch) counts once.


# %%
# %%ranks
def held(order):
    """The most (stage, micro-batch) pairs whose activations a rank holds at a time."""
    raise NotImplementedError  # your turn


checks.held(held, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 3</summary>
#
# ```python
# def held(order):
#     """The most (stage, micro-batch) pairs whose activations a rank holds at a time."""
#     now, most = set(), 0
#     for kind, stage, i in order:
#         if kind == "F":
#             now.add((stage, i))
#         elif kind in "BW":
#             now.remove((stage, i))
#         most = max(most, len(now))
#     return most
# ```
#
# </details>

# %%
# %%ranks
if rank == 0:
    for name in ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"):
        orders = orders_of(name, 4, 8, 2 if name == "Interleaved1F1B" else 1)
        say(f"{name:22} ranks 0 to 3 hold {[held(order) for order in orders]}")

# %% [markdown]
# ## Recap
#
# The trainer knows these schedules as `--parallel.schedule`. The lab is the sections marked MORE, above.

# %%
# %%ranks
card(
    "Each rank has some layers. Activations go right, their gradients come back; weights stay where they are.",
    "The bubble is (p - 1)/(m + p - 1) of the time. 1F1B has the same bubble as GPipe.",
    "GPipe holds m micro-batches, 1F1B min(m, p - s) on stage s: so m can grow.",
    "The slowest stage sets the pace, and each micro-batch pays for its messages.",
    "A schedule never changes the result. Compare gradients with one process: wrong factors hide in a falling loss.",
    figure="1F1B on four ranks: the same bubble, holds 4, 3, 2 and 1",
    command="sbatch jobs/train.slurm --preset gpt2 --model.no-tie --parallel.strategy fsdp --parallel.pipeline 4",
)

# %% [markdown]
# ## On the cluster
#
# The command is in the card. What to look for is in the
# [handbook](../assets/handbook/08_pipeline_parallel.md#on-a-cluster).
#
# ## Further reading
#
# In the [handbook](../assets/handbook/08_pipeline_parallel.md#further-reading).

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
