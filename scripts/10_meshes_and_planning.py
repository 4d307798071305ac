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
# # 10 Meshes and planning: all axes together
#
# **45 minutes** for the sections marked CORE, 81 with those marked MORE.
#
# A job on two nodes waits one second per step for messages. You change only the order of its ranks, and most of the
# waiting disappears. Then you ask a planner which layout to use, and see how far to trust it.
#
# After this lesson **you can**
# - lay ranks out on a grid, and name the groups of each of its axes;
# - choose the axes that a model needs, and place them on nodes by what a GPU waits for;
# - read a planner's answer, and say what to measure.
#
# **You need** one fact about each kind of parallelism: data ranks hold replicas of the model ([lesson
# 03](03_data_parallel.ipynb)) or shard it ([06](06_zero_fsdp.ipynb)); tensor ranks split each layer
# ([07](07_tensor_parallel.ipynb)); pipeline ranks hold some layers each ([08](08_pipeline_parallel.ipynb)).
#
# **New here:** [mesh](../assets/glossary.md#mesh), [axis](../assets/glossary.md#axis),
# [planner](../assets/glossary.md#planner), and in MORE [hierarchical
# all-reduce](../assets/glossary.md#hierarchical-all-reduce), [fake backend](../assets/glossary.md#fake-backend),
# [roofline](../assets/glossary.md#roofline). Tables are in [the
# handbook](../assets/handbook/10_meshes_and_planning.md).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 1, one second of waiting 3, grids 11, bytes between nodes 8, exposed seconds 8, all axes
# at once 3, planner 9, zoo 2, card 1. Builds A to E take four minutes each and are in these numbers.
#
# *Say:* a layout is two decisions. How many ranks has each axis? Which axis lies inside the node? The first decides
# whether the model fits, the second whether it is fast.
#
# *Three usual mistakes:* taking "axis 0" for the ranks 0, 1, 2, ... (they belong to the *last* axis); giving tensor
# ranks different data; believing a predicted time to three digits.
#
# *When late:* give solutions A, B and E, keep builds C and D with both rounds of the game, and the planner.
#
# *Ask the room:* "Eight GPUs, the model fits on one. Which axes do you use?" (Data alone. Each further axis needs a
# reason.)
#
# </details>

# %% tags=["parameters"]
n_ranks = 8  # processes: a grid of 2 x 2 x 2, in 4 GB of memory; 4: pairs of axes; in a script the launcher decides
layers = 4  # layers of the GPT, 2 to 8
sequences = 0  # sequences in a step, at least 4, and a multiple of twice the ranks; 0: 8 or more
gpus = 1024  # ranks of the largest world that is simulated, a multiple of 8, at most 4,096

# %% [markdown]
# ## Start (CORE, 1 min)
#
# The first cell starts eight ranks. One machine plays two nodes: ranks 0 to 3 are node 0, ranks 4 to 7 node 1. The
# folded cell describes the job of this lesson.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("10_meshes_and_planning", globals())

# %%
# %%ranks
import math

import torch
import torch.distributed as dist
from manyhands import ____, Metrics, card, compare, join, leave, refuse, say, show
from manyhands.checks import meshes_and_planning as checks
from manyhands.checks.predictions import unanswered
from manyhands.lessons import meshes_and_planning as lesson
from torch.distributed.device_mesh import init_device_mesh

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.data.corpus import get_batch, load_corpus

per_node = world_size if world_size % 2 else world_size // 2  # ranks of a node here; an odd world is one node
least = max(4, 2 * world_size)
sequences = sequences or math.ceil(8 / least) * least
if sequences % least:
    refuse(f"sequences={sequences} does not split over {world_size} ranks; use a multiple of {least}")
corpus = load_corpus(ranks)
metrics = Metrics(ranks, corpus, {"layers": layers, "sequences": sequences})
AXES = ("data", "pipeline", "tensor")
tensor, pipeline = math.gcd(world_size, 2), 2 - (world_size % 4 > 0)  # two each, if there are ranks enough
shape = (world_size // (pipeline * tensor), pipeline, tensor)

# the job: a 7B model on 16 H100s in two nodes of 8; steps of 8 micro-batches, each of 8 sequences of 2,048 tokens
SIZES, PER_NODE = {"data": 2, "pipeline": 2, "tensor": 4}, 8
FAST, SLOW = 450e9, 50e9  # bytes per second of a GPU in each direction: NVLink 4, and one 400 Gb/s card
LAYERS, WIDTH, PARAMETERS, TOKENS, MICRO_BATCHES = 32, 4096, 6.7e9, 8 * 2048, 8
stream, own = 2 * TOKENS * WIDTH, PARAMETERS / 8  # bytes of a micro-batch between two layers in bf16; a GPU's weights
PAYLOADS = {
    "data": 4 * own,  # gradients in fp32
    "pipeline": MICRO_BATCHES * stream,  # activations there and gradients back: an all-reduce of two
    "tensor": MICRO_BATCHES * 4 * LAYERS / 2 * stream,  # four all-reduces in each of this stage's 16 layers
}
SENT = {axis: 2 * (n - 1) / n * PAYLOADS[axis] for axis, n in SIZES.items()}
MICRO_S = 6 * own * TOKENS / (0.5 * 989.4e12)  # forward and backward of one, at half of the peak
BEHIND_S = {"data": 2 / 3 * MICRO_S, "pipeline": 0.0, "tensor": 0.0}  # only gradients travel behind a backward


def draw_waits(rows, title, name, folded=""):
    """Draw {order: {axis: ms}} on rank 0; `folded` as for `show`."""
    if rank == 0:
        told = "; ".join(f"{order} {sum(row.values()):,.0f} ms" for order, row in rows.items())
        alt = f"milliseconds of a step that a GPU waits for messages: {told}"
        show(lesson.draw_waits(rows, title), name, alt, folded)


# %% [markdown]
# ## One second of waiting (CORE, 3 min)
#
# A 7B model trains on 16 H100s, two nodes of 8. There are 2 **data** replicas of the model. Each is split over 2
# **pipeline** stages of half the layers, and each stage over 4 **tensor** ranks. The loss is right. The ranks are
# numbered in the order tensor x pipeline x data. This is a step of one GPU:

# %% jupyter={"source_hidden": true}
# %%ranks
first = {"data": 0.0, "pipeline": 1e3 * SENT["pipeline"] / FAST, "tensor": 1e3 * SENT["tensor"] / (2 * SLOW)}
draw_waits({"tensor x pipeline x data": first}, f"computing {8e3 * MICRO_S:,.0f} ms, and waiting", "waiting")

# %% [markdown]
# It waits nearly as long as it computes. Tensor ranks all-reduce four times per layer and micro-batch. In this order each
# tensor group has two ranks on each node. Each GPU has a network card of 50 GB/s, so the two send 100 GB/s to the other
# node. Inside a node a GPU sends 450 GB/s (NVLink 4).
#
# **Predict.** In another order, the four ranks of a tensor group are on one node. How many ms does a step now wait for
# tensor messages?

# %%
# %%ranks
guess_inside = ____  # your turn: type ms

# %%
# %%ranks
compare("waiting for tensor messages inside a node", "guess_inside", round(1e3 * SENT["tensor"] / FAST), "ms")

# %% [markdown]
# 4.5 times less, by another order of the ranks. So this lesson asks: **which kind of parallelism goes inside a node,
# and which goes between nodes?**

# %% [markdown]
# ## Ranks on a grid (CORE, 11 min)
#
# Arrange the ranks on a grid, a [**mesh**](../assets/glossary.md#mesh), with one [**axis**](../assets/glossary.md#axis)
# for each kind of parallelism. From rank to rank the *last* coordinate changes fastest, as in a C array. Launchers
# number ranks node by node. So the last axis stays inside a node, and the first one crosses between nodes.
#
# ![Eight ranks as a cube, data 2 x pipeline 2 x tensor 2: ranks 0 to 3 are node 0, 4 to 7 node 1; lines join the
# groups](../assets/10_cube.svg)
#
# ### Build A: from a rank to its coordinates
#
# `shape` holds the size of each axis, the first (outermost) axis first. Rank 6 on [2, 2, 2] is at [1, 1, 0], because 6
# = 1·4 + 1·2 + 0. In the loop, from the last axis to the first, divide `rank` by `size`. The remainder is the
# coordinate on this axis: put it at the front of `place`. Go on with the quotient. (`divmod(17, 5)` is `(3, 2)`:
# quotient, remainder.)


# %%
# %%ranks
def coordinates(rank, shape):
    """Where `rank` stands on a grid of `shape`; the last axis runs fastest."""
    place = []
    for size in reversed(shape):
        ____  # your turn: two lines
    return place


checks.coordinates(coordinates, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution A</summary>
#
# ```python
# def coordinates(rank, shape):
#     place = []
#     for size in reversed(shape):
#         rank, here = divmod(rank, size)
#         place.insert(0, here)
#     return place
# ```
#
# </details>

# %% [markdown]
# ### Build B: the groups of an axis
#
# Ranks that differ *only* in one coordinate form a group of this axis, such as a tensor group. Write all groups of
# axis number `axis`; in a group, ranks keep their order. Use the other coordinates, as a tuple, as the key in
# `groups`: ranks with the same key are one group.


# %%
# %%ranks
def groups_of(shape, axis):
    """[[ranks that differ in `axis` only], ...] on a grid of `shape`: lists that hold each rank once."""
    groups = {}
    for rank in range(math.prod(shape)):
        ____  # your turn: three lines, a key and its list
    return list(groups.values())


checks.groups_of(groups_of, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def groups_of(shape, axis):
#     groups = {}
#     for rank in range(math.prod(shape)):
#         place = list(coordinates(rank, shape))
#         place.pop(axis)
#         groups.setdefault(tuple(place), []).append(rank)
#     return list(groups.values())
# ```
#
# </details>

# %% [markdown]
# **The library** makes the same grid, and a process group for each group:

# %%
# %%ranks
mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
mine = {axis: dist.get_process_group_ranks(mesh[axis].get_group()) for axis in AXES}
same = all(group in map(list, groups_of(shape, number)) for number, group in enumerate(mine.values()))
at = [int(i) for i in coordinates(rank, shape)]
say(f"at {at}; my groups: {mine}; yours are the same: {same}".replace("'", ""))

# %% jupyter={"source_hidden": true}
# %%ranks
assert same and list(mesh.get_coordinate()) == at

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: grids</summary>
#
# Let eight people stand up as a cube and call "tensor": everybody points at their partner. *Usual mistake:* groups as
# ranges of ranks. That is true of the last axis only. *Ask:* "how many process groups does a rank of a 4 x 8 x 8 mesh
# open?" (Three. All ranks together: 64 + 32 + 32.)
#
# </details>

# %% [markdown]
# ## Bytes between nodes (CORE, 8 min)
#
# In a ring all-reduce of M bytes each of n ranks sends 2(n - 1)/n · M bytes to its neighbour (lesson 02). If the
# neighbour is on the other node, these bytes use the slow link.
#
# ![Two rings of four ranks on two nodes: in the order 0 1 2 3 two hops cross, in the order 0 2 1 3 all
# four](../assets/10_rings.svg)
#
# ### Build C: slow bytes
#
# In the ring `group`, each rank sends to the next one, and the last to the first. Rank r is on node `r // per_node`.
# Return the bytes that a ring all-reduce of `payload` bytes sends between nodes, all ranks of the group together.


# %%
# %%ranks
def slow_bytes(group, payload, per_node):
    """Bytes that a ring all-reduce of `payload` bytes in `group` sends from one node to another."""
    n = len(group)
    ____  # your turn: three lines; how many of the n hops cross, and what does each carry?


checks.slow_bytes(slow_bytes, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution C</summary>
#
# ```python
# def slow_bytes(group, payload, per_node):
#     n = len(group)
#     nodes = [rank // per_node for rank in group]
#     crossing = sum(nodes[i] != nodes[(i + 1) % n] for i in range(n))
#     return crossing * 2 * (n - 1) / n * payload
# ```
#
# </details>

# %% [markdown]
# Check it with real messages: the folded cell runs lesson 02's ring in every group of the mesh above, and counts the
# bytes to the other node.

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.measure import wire


def ring_sum(x, group):
    """The sum of x over the group, by a ring, in place. len(x) is a multiple of the group's size. All its ranks call it."""
    n, me = group.size(), group.rank()
    right, left = (dist.get_global_rank(group, (me + step) % n) for step in (1, -1))
    parts = x.chunk(n)
    for hop in range(2 * (n - 1)):
        give, take = parts[(me - hop) % n], torch.empty_like(parts[0])
        sends = dist.P2POp(dist.isend, give, right), dist.P2POp(dist.irecv, take, left)
        for work in dist.batch_isend_irecv(list(sends)):
            work.wait()
        here = parts[(me - hop - 1) % n]
        here.copy_(here + take if hop < n - 1 else take)
    return x


mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
payload = torch.ones(4096 * world_size, device=device)  # on 8 ranks 131,072 bytes
for axis in AXES:
    group = mesh[axis].get_group()
    with wire.watch() as seen:
        ring_sum(payload.clone(), group)
    sent = [(call.bytes, call.peer // per_node) for call in seen.calls if call.op == "send"]
    between = torch.tensor([sum(size for size, node in sent if node != rank // per_node)], device=device)
    dist.all_reduce(between)  # over all ranks
    expected = sum(slow_bytes(g, payload.nbytes, per_node) for g in groups_of(shape, AXES.index(axis)))
    assert abs(between.item() - expected) < 1
    if rank == 0:
        say(f"{axis:8} of {group.size()}: {int(between):,} bytes between nodes, predicted {expected:,.0f}")
    metrics.exact(**{f"{axis}_between": int(between)})

# %% [markdown]
# ### Round 1: the fewest bytes
#
# Back to the job on 16 GPUs. `crossing` adds up the bytes between the two nodes of 8. Set `guess_fewest` to the
# order of the axes with the fewest bytes.


# %%
# %%ranks
def crossing(order, sizes, payloads, per_node):
    """{axis: bytes between nodes in a step} with the axes in this order, the outermost first."""
    shape = [sizes[axis] for axis in order]
    return {
        axis: sum(slow_bytes(group, payloads[axis], per_node) for group in groups_of(shape, number))
        for number, axis in enumerate(order)
    }


guess_fewest = ____  # your turn: all three axes in order, such as "tensor x pipeline x data"

# %% jupyter={"source_hidden": true}
# %%ranks
from itertools import permutations

sums, lines = {}, []
for order in permutations(AXES):
    found = {axis: float(size) / 1e9 for axis, size in crossing(order, SIZES, PAYLOADS, PER_NODE).items()}
    told = ", ".join(f"{axis} {size:.1f}" for axis, size in found.items() if size)
    sums[name := " x ".join(order)] = round(sum(found.values()), 6)
    lines.append(f"{name}: {sums[name]:.1f} GB between nodes: {told}")
least = min(sums, key=lambda name: (sums[name], name != guess_fewest))  # of two that are equal, yours
compare("the order with the fewest bytes between nodes", "guess_fewest", least, because=lines)

# %% [markdown]
# Tensor outermost is by far the worst. With the **pipeline** outermost the fewest bytes cross, three times fewer than
# with data outermost.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: links</summary>
#
# *Usual mistake:* counting what crosses per rank and then per node. Ask for the whole group, always. *Ask:* "why does an
# all-reduce over 2 ranks cost as much as one message there and one back?" (2·(2-1)/2 = 1 payload from each rank.)
# *When late:* leave out the count of real messages.
#
# </details>

# %% [markdown]
# ## Bytes are not seconds (CORE, 8 min)
#
# A byte costs time only if a GPU waits for it.
#
# | axis | sends | what the GPU computes meanwhile |
# |---|---|---|
# | tensor | in every layer | nothing, unless products are cut in pieces ([lesson 07](07_tensor_parallel.ipynb)'s lab) |
# | pipeline | per micro-batch | nothing under plain 1F1B; the next chunk if it is interleaved |
# | data | gradients, once per step | the backward of the last micro-batch |
#
# ### Build D: exposed seconds
#
# A GPU sends `sent_bytes` at `bytes_per_s`, and computes for `behind_s` seconds meanwhile. Return the seconds that it
# still waits, never less than 0.


# %%
# %%ranks
def exposed_s(sent_bytes, bytes_per_s, behind_s):
    """Seconds that a GPU waits for messages that travel while it computes for `behind_s` seconds."""
    return ____


checks.exposed_s(exposed_s, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution D</summary>
#
# ```python
# def exposed_s(sent_bytes, bytes_per_s, behind_s):
#     return max(0.0, sent_bytes / bytes_per_s - behind_s)
# ```
#
# </details>

# %% [markdown]
# ### Round 2: the fewest seconds
#
# A group on both nodes sends 50 GB/s for each rank that it has on a node: each has a card. `SENT` has the bytes that a
# GPU sends: 3.4 GB for data, 1.1 GB for pipeline, 103 GB for tensor. `BEHIND_S` has the seconds that it computes
# meanwhile: 0.11 s for data, else 0. Set `guess_fastest` to the order with the least waiting, written as above.


# %%
# %%ranks
def waited_ms(order):
    """{axis: ms that a GPU waits for messages in a step}, with the axes in this order, the outermost first."""
    found = {}
    for number, axis in enumerate(order):
        group = min(map(list, groups_of([SIZES[name] for name in order], number)))  # rank 0 is in it
        cards = sum(rank < PER_NODE for rank in group)  # its ranks on node 0, each with a network card
        link = FAST if cards == len(group) else cards * SLOW
        found[axis] = 1e3 * float(exposed_s(SENT[axis], link, BEHIND_S[axis]))
    return found


guess_fastest = ____  # your turn: all three axes in order, the outermost first

# %% jupyter={"source_hidden": true}
# %%ranks
from itertools import permutations

rows = {" x ".join(order): waited_ms(order) for order in permutations(AXES)}
sums = {name: round(sum(row.values()), 6) for name, row in rows.items()}
least = min(sums, key=lambda name: (sums[name], name != guess_fastest))  # of two that are equal, yours
compared = dict.fromkeys(["pipeline x data x tensor", "data x pipeline x tensor", str(guess_fastest)])
told = "pipeline outermost: 17 GB between nodes, {:.0f} ms; data outermost: 54 GB, {:.0f} ms"
told = told.format(*(sums[name] for name in list(compared)[:2]))
compare("the order with the least waiting", "guess_fastest", least, because=told)
named = {name: {axis: rows[name][axis] for axis in AXES} for name in compared if name in rows}
draw_waits(named, "waiting for messages in a step", "game", unanswered())
metrics.exact(waited_ms=sums)

# %% [markdown]
# **Three times the bytes, and less waiting**: with data outermost, the gradients travel while backward computes. Llama
# 3 has data outermost as well ([section 3.3](https://arxiv.org/abs/2407.21783)). Megatron-LM has the pipeline
# outermost by default. Both have tensor inside ([more
# orders](../assets/handbook/10_meshes_and_planning.md#orders-of-the-axes)).
#
# Count seconds for *your* job. With one sequence per micro-batch, instead of 8, the last backward is too short to hide
# the gradients. Then put the pipeline outermost:

# %% jupyter={"source_hidden": true}
# %%ranks
if rank == 0:
    for many in (1, 8):
        part = many / 8
        outside = 1e3 * part * SENT["pipeline"] / SLOW, 1e3 * part * SENT["pipeline"] / FAST
        hidden = [1e3 * float(exposed_s(SENT["data"], link, part * BEHIND_S["data"])) for link in (FAST, SLOW)]
        told = f"pipeline outermost {outside[0] + hidden[0]:3.0f} ms, data outermost {outside[1] + hidden[1]:3.0f} ms"
        say(f"{many} sequence{'s' * (many > 1)} per micro-batch: pipeline and data wait with {told}")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: exposed seconds</summary>
#
# Most of the room places the pipeline outermost in round 2 as well. Let them say what each axis waits for. *Ask:* "what if
# gradients went in bf16?" (Half the bytes: 34 ms, hidden behind an even shorter backward.) *Usual mistake:* negative
# seconds. With FSDP weights are gathered, too; they come before a layer is needed, and hide in the same way.
#
# </details>

# %% [markdown]
# ## All axes at once (CORE, 3 min)
#
# All axes together must still compute what one process computes. The folded cells train data 2 x pipeline 2 x tensor 2
# as `train.py` does, and compare the loss and *every* gradient with one process, in float64.
#
# **Predict.** How many different batches do the eight ranks read?

# %%
# %%ranks
guess_batches = ____  # your turn: type a number

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.config.layout import resolve_layout
from manyhands.config.options import Options, ParallelOptions, TrainOptions
from manyhands.gpt.config import GPTConfig
from manyhands.parallel.strategy import full_model, parallelize

config = GPTConfig(vocab_size=len(corpus.vocab), n_layer=layers, n_head=4)
both = {"tensor": shape[2], "pipeline": shape[1]}
PRODUCTS = {
    1: [{}],
    2: [{"tensor": 2}, {"pipeline": 2}, {"strategy": "fsdp"}],
    4: [
        {"strategy": "fsdp", "tensor": 2},
        {"strategy": "ddp", "pipeline": 2},
        {"strategy": "tp", **both},
    ],
}.get(world_size, [{"strategy": "fsdp", **both}])  # on 8 ranks all three: 2 x 2 x 2


def options_of(**parallel):
    """The trainer's options in float64: `sequences` per step, over all ranks."""
    train = TrainOptions(global_batch=sequences, precision="fp64")
    return Options(train=train, parallel=ParallelOptions(**parallel))


def data_share(first, of):
    """Inputs and targets of share number `first` of `of` equal ones of the same `sequences` sequences."""
    pair = get_batch(corpus.train_ids, 0, sequences, config.block_size, 0, 1, seed=1)
    return [ids.to(device).chunk(of)[first] for ids in pair]


# %% jupyter={"source_hidden": true}
# %%ranks
single = full_model(config, options_of()).to(device)
loss_1 = single(*data_share(0, 1))[1]
loss_1.backward()
metrics.close(float64_loss=loss_1.detach())
lines = []
for product in PRODUCTS:
    options = options_of(**product)
    layout = resolve_layout(options, config, world_size)
    parallel = parallelize(config, layout, options, ranks)
    loss = parallel.forward_backward(*data_share(parallel.data_rank, parallel.data_size))
    apart = [(parallel.mean_loss(loss) - loss_1).abs().item()]  # all ranks
    gradients = parallel.named_full_gradients()  # all ranks
    apart += [(gradients[name] - p.grad.cpu()).abs().max().item() for name, p in single.named_parameters()]
    assert max(apart) < 1e-10, f"{layout}: {max(apart):.1e} away"
    lines.append(f"{layout}: loss and {len(apart) - 1} gradients are one process's, to {max(apart):.0e}")
compare("different batches that 2 x 2 x 2 ranks read", "guess_batches", 2, because=lines)

# %% [markdown]
# Only the two data ranks read different sequences. Tensor ranks and pipeline stages compute parts of the model on the
# same ones. (*shard* is the data axis.)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: all axes at once</summary>
#
# With 8 ranks this is the full 2 x 2 x 2; with 4, all pairs of axes. Let somebody change `chunk(of)[first]` to share 0
# for everybody: the loss still looks right, the assertion says how far it is off. *Ask:* "why float64?" (In fp32 a wrong
# factor on a small gradient hides in rounding.)
#
# </details>

# %% [markdown]
# ## Which axes? Ask the planner (CORE, 9 min)
#
# A rule of thumb: if the model does not fit on one GPU with its optimizer, shard it over data ranks (FSDP). If that is
# not enough, add tensor ranks within a node, then a pipeline
# ([all rows](../assets/handbook/10_meshes_and_planning.md#which-axes-a-rule-of-thumb)).
#
# A [**planner**](../assets/glossary.md#planner) computes instead: it tries every split of the GPUs into axes, drops
# what does not fit into memory, and predicts the time of a step for the rest. Layouts with the same axes are a
# **family**, and the planner shows the fastest of each.
#
# ![A planner takes every split of the GPUs, refuses what does not fit, and ranks the rest by
# time](../assets/10_plan.svg)
#
# ### Build E: recommend
#
# Predictions can be off by 5 % or more, so a plan that is 5 % slower may be as good, and simpler. A plan is `(name,
# bytes, seconds, axes)`, where `axes` is a number. `fitting`: the plans that fit into `memory_bytes`. `close`: those of
# them within 5 % of `fastest`. Return the name of the close plan with the fewest axes; of several, the fastest.


# %%
# %%ranks
def recommend(plans, memory_bytes):
    """The name of the plan to use, or None if nothing fits."""
    fitting = [plan for plan in plans if ____]
    fastest = min((seconds for _, _, seconds, _ in fitting), default=None)
    close = ____
    return ____ if close else None


checks.recommend(recommend, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution E</summary>
#
# ```python
# def recommend(plans, memory_bytes):
#     fitting = [plan for plan in plans if plan[1] <= memory_bytes]
#     fastest = min((seconds for _, _, seconds, _ in fitting), default=None)
#     close = [plan for plan in fitting if plan[2] <= 1.05 * fastest]
#     return min(close, key=lambda plan: (plan[3], plan[2]))[0] if close else None
# ```
#
# </details>

# %% [markdown]
# `scripts/plan.py` uses this rule, but of several with equally many axes it takes the one that shards least: below, for
# the 70B model, zero1, although it is slower than zero2. (zero1, 2 and 3 say what the data ranks shard, lesson 06.)

# %% jupyter={"source_hidden": true} tags=["nbval-check-output"]
# %%ranks
from manyhands.predict.layouts import Question
from manyhands.predict.machines import machine_named
from manyhands.predict.models import preset_model
from manyhands.predict.planner import plan, program_for

for name, n_gpus, batch in (("gpt-7b", 64, 512), ("llama3-70b", 64, 512), ("llama3-405b", 16384, 2048)):
    model = preset_model(name)
    question = Question(model, machine_named("h100"), n_gpus, batch, context=1, program=program_for(model))
    if rank == 0:
        answer = plan(question)
        fit = f"{len(answer.ranked)} families fit, {len(answer.refused)} do not"
        say(f"{name} on {n_gpus:,} H100: {answer.tried:,} layouts, {fit}")
        for one in answer.ranked[:3]:
            size = f"{one.held.on_gpu / 1e9:3.0f} of 80 GB"
            say(f"    {one.name:36} {size}  {one.step_s:6.2f} s per step  MFU {one.mfu:.0%}")

# %% [markdown]
# The 7B model needs data parallelism alone. For the 405B the first row has the numbers of ranks that Meta used, at 41 %
# MFU ([table 4](https://arxiv.org/abs/2407.21783)). Meta's data ranks ran FSDP, not zero1.
#
# Can you trust this? Before BLOOM (176B), its team timed [five
# layouts](https://github.com/bigscience-workshop/bigscience/blob/9dcfdde07e059202cad97179f82567aa107dc3b5/train/tr11-176B-ml/chronicles-prequel.md)
# of one model on 384 A100s. Our planner was not fitted on them.
#
# **Predict.** Which was the slowest: 8, 4 or 2 tensor ranks?

# %%
# %%ranks
guess_tensor = ____  # your turn: type 8, 4 or 2

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.launch import recorded_runs
from manyhands.predict.published_runs import RUNS, PublishedRun, predicted_tflops

bloom = next(run for run in RUNS if run.name == "BLOOM 176B").model_dump()
trials = recorded_runs.published("10_layouts")
trial = {"n_layer": 72, "n_head": 64}
planned = [
    predicted_tflops(PublishedRun(**bloom | trial | {k: one[k] for k in ("tensor", "pipeline")})) for one in trials
]
compare("tensor ranks of the slowest of BLOOM's trials", "guess_tensor", 8)
if rank == 0:
    figure = lesson.draw_layouts(trials, planned, "181B parameters on 384 A100s, February 2022")
    alt = "published and predicted TFLOP/s per GPU of five layouts; eight tensor ranks are slowest"
    show(figure, "layouts", alt, unanswered())
    off = [guess / one["points"][-1][1] - 1 for guess, one in zip(planned, trials, strict=True)]
    say(f"the planner is between {min(off):+.0%} and {max(off):+.0%} off")

# %% [markdown]
# The planner finds the slow layouts, but cannot tell the fast ones apart. Nor can the trials: 4 and 2 tensor ranks reach
# 146 and 143, and the team measured one layout twice, 3 % apart. So **let the planner name three candidates, run each for
# 20 steps, keep the fastest.**
#
# Its bytes of weights, gradients and optimizer are right to 2 %: "What ranks hold", in MORE, measures them.
# Activations and buffers are not measured. So the planner leaves a tenth of the memory as a reserve.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: choosing</summary>
#
# Let the room vote on gpt-7b on 64 H100 before the cell runs. Most say TP x PP x DP. *Then ask* what each further axis
# would buy. *Ask:* "why does 8-way tensor lose to 4-way inside the same node?" (By the planner's parts
# it sends twice as much between tensor ranks, and has twice as many micro-batches per replica.)
#
# </details>

# %% [markdown]
# ## A bug from the zoo (CORE, 2 min)
#
# A published simulator computes the time of an all-reduce of M bytes in three phases: reduce-scatter inside nodes of G
# ranks, all-reduce of M/G bytes between nodes, all-gather inside nodes. **First** it gave the third phase the time of
# a ring all-reduce of M bytes. Then a **change** replaced M by M/G, because "only the shard" goes back. **Which is
# right?** The folded cell measures the third phase, at 450 GB/s:

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.measure.virtual_network import Link, VirtualNetwork

NVLINK, M = Link(0.0, 450e9), 2**20 * world_size  # no latency; bytes
whole = torch.zeros(M // 4)


def back_inside(group):
    """Virtual seconds of the third phase: each rank has a G-th, and a ring hands the parts around."""
    net, parts = VirtualNetwork(ranks, NVLINK, group=group), whole.chunk(group.size())
    for hop in range(net.world_size - 1):
        give, take = (parts[(net.rank - hop - step) % net.world_size] for step in (0, 1))
        net.exchange(give, (net.rank + 1) % net.world_size, take, (net.rank - 1) % net.world_size)
    return net.clock_s


def ring_s(n_bytes, G):
    """A ring all-reduce of G ranks."""
    return 2 * (G - 1) / G * n_bytes / NVLINK.bytes_per_s


node_size = math.gcd(world_size, 2)
grid = (world_size // node_size, node_size)
pair = init_device_mesh(device.type, grid, mesh_dim_names=("nodes", "node"))["node"]
for group in (pair.get_group(), dist.group.WORLD)[: 1 + (world_size > 2)]:
    G, measured = group.size(), back_inside(group)
    theirs = {"first": ring_s(M, G), "changed": ring_s(M / G, G)}
    if rank == 0:
        said = ", ".join(f"{name} {1e6 * s:5.1f} µs" for name, s in theirs.items())
        say(f"G = {G}: measured {1e6 * measured:5.1f} µs (virtual); {said}")
    assert abs(measured - (G - 1) / G * M / NVLINK.bytes_per_s) < 1e-12

# %% [markdown]
# <details><summary>Answer</summary>
#
# Neither. Each rank must *receive* the (G-1)/G of the M bytes that it does not have. The first formula counts twice that;
# the changed one counts 2/G of it: right at G = 2, by accident, and 4 times too fast on nodes of 8.
# The thread: [cs249r_book#1530](https://github.com/harvard-edge/cs249r_book/pull/1530).
#
# </details>
#
# **Test a cost formula with real messages at two sizes**: at G = 2 the change looks right.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# Most of a room believes the change: "a shard is smaller". Draw four people with a card each who all need all four
# cards. The first phase, too, was priced as a whole all-reduce; the thread puts the effect at about 220 µs for 32 GB of
# gradients on nodes of 8 H100, but 7/8 of 32 GB at 450 GB/s are 62 **milli**seconds. *Usual question:* "does NCCL do
# that?" It chooses between rings, trees and in-network sums. The lower bound without a summing switch holds for all.
#
# </details>

# %% [markdown]
# ## Four ranks by hand (MORE, 2 min)
#
# ![Four ranks on a grid of two rows and two columns: a row is a tensor group, a column a data
# group](../assets/10_grid.svg)
#
# **Predict.** Rank r holds the number r + 1. Rows 0 1 and 2 3 are tensor groups. Which sums does an all-reduce over the
# tensor groups leave? And one over the data groups, the columns?
#
# <details><summary>Answer</summary>
#
# Rows: 1 + 2 = 3 on ranks 0 and 1, 3 + 4 = 7 on ranks 2 and 3. Columns: 1 + 3 = 4 on ranks 0 and 2, 2 + 4 = 6 on ranks
# 1 and 3. The same call on another group gives another sum. (On eight ranks the grid has four rows.)
#
# </details>

# %%
# %%ranks
columns = math.gcd(world_size, 2)
small = init_device_mesh(device.type, (world_size // columns, columns), mesh_dim_names=("data", "tensor"))
sums = {}
for axis in ("tensor", "data"):
    number = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(number, group=small[axis].get_group())
    sums[axis] = int(number)
say(f"I hold {rank + 1}; the sum over my tensor group is {sums['tensor']}, over my data group {sums['data']}")

# %% [markdown]
# ## What ranks hold (MORE, 6 min)
#
# A plan that does not fit wastes a night in the queue. So compare the planner's bytes with what ranks *hold*: build up to
# eight layouts of a small GPT, run a step, and add up the storages of parameters, gradients and Adam's state.
#
# Expect bars that end at their dashed lines, within 2 %. Not all of them are exact shares: DTensor and FSDP pad, and
# some weights (norms, biases) are whole on every tensor rank. This is state *at rest*. What a forward keeps, what FSDP
# gathers for a moment and the buffers of a step come on top. The planner has formulas for these, which this cell does
# not check.
#
# **Predict.** Which of the layouts `replicas` and `zero3` over all ranks holds more, and by what factor?
#
# <details><summary>Answer</summary>
#
# `replicas` holds 16 bytes per parameter in fp32 with Adam (4 + 4 + 8), on each rank. On n ranks `zero3` holds an n-th
# of that, and padding.
#
# </details>

# %%
# %%ranks
from dataclasses import replace

from manyhands.gpt.config import GPTConfig
from manyhands.measure.tensor_bytes import tensor_bytes
from manyhands.parallel.optimizer import build_optimizer
from manyhands.parallel.strategy import parallelize
from manyhands.predict.machines import machine_named
from manyhands.predict.layouts import Question, families
from manyhands.predict.memory import bytes_per_rank
from manyhands.predict.models import PlannedModel

tiny = PlannedModel(vocab_size=65, block_size=8, n_layer=4, n_head=4, n_embd=32)
node = replace(machine_named("h100"), gpus_per_node=per_node)

# %%
# %%ranks
half = world_size // 2
WANTED = [f"{sharing} {world_size}" for sharing in ("replicas", "zero1", "zero2", "zero3")]
WANTED += [
    f"hybrid 2 x {half}",
    f"replicas {half} x pipeline 2",
    f"zero3 {half} x tensor 2",
    f"tensor 2 x pipeline {half}",
]
WANTED += ["pipeline 2", "one GPU"]  # where there are no more ranks
all_families = families(Question(tiny, node, world_size, sequences), ("none",), most_micro_batch=2)
chosen = [family.variants[0] for family in all_families if family.name in WANTED and family.variants]


# %%
# %%ranks
def held_after_a_step(candidate):
    """This rank's {kind: bytes} after a step of a real model in this layout. All ranks call it."""
    fields = {name: getattr(tiny, name) for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")}
    small_config = GPTConfig(**fields)
    parallel = parallelize(small_config, candidate.layout, candidate.options, ranks)
    optimizer = build_optimizer(parallel, candidate.options)
    ids = get_batch(corpus.train_ids % 65, 0, sequences, 8, parallel.data_rank, parallel.data_size, 1)
    parallel.forward_backward(*(part.to(device) for part in ids))
    optimizer.step()
    held = tensor_bytes(torch.nn.ModuleList(parallel.modules), optimizer)
    states = getattr(optimizer, "optim", optimizer).state.values()
    counters = sum(4 for state in states if "step" in state)  # Adam's count of steps, 4 bytes per weight
    return {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer": held.optimizer - counters,
    }


# %%
# %%ranks --timeout 180
rows = []
for candidate in chosen:
    everyone = [None] * world_size
    dist.all_gather_object(everyone, held_after_a_step(candidate))
    fullest = max(everyone, key=lambda held: sum(held.values()))
    planned = bytes_per_rank(tiny, candidate.layout, candidate.options)
    rows.append((str(candidate), fullest, planned.parameters + planned.gradients + planned.optimizer))
metrics.exact(held_bytes={name: sum(held.values()) for name, held, _ in rows})

# %%
# %%ranks
if rank == 0:
    figure = lesson.draw_planned_and_held(rows, f"the fullest of {world_size} ranks, {tiny.num_params():,} parameters")
    show(
        figure,
        "planned_and_held",
        "bars of bytes held by the fullest rank in each layout, and the planner's dashed line",
    )
    errors = {name: abs(sum(held.values()) / planned - 1) for name, held, planned in rows}
    worst = max(errors, key=errors.get)
    say(f"{len(rows)} layout{'s' * (len(rows) > 1)}: the planner is off by {errors[worst]:.2%} at most ({worst})")
    assert errors[worst] < 0.02

# %% [markdown]
# ## 1,024 ranks in one process (MORE, 3 min)
#
# You cannot start 1,024 ranks here. But torch can be told that it is rank 0 of 1,024: the [**fake
# backend**](../assets/glossary.md#fake-backend) has a process group whose collectives return at once and move nothing. With weights
# on the meta device, which have a shape and no numbers, `fully_shard` and `parallelize_module` cut a 7B model as they would
# on the machine. Then count bytes. (It runs in a separate process, because a process has only one default group.)
#
# **Predict.** 6.7 B parameters with fp32 Adam, 16 bytes each, tensor 8: rank 0 of 8 holds a little more than 13.4 GB.
# How much does rank 0 of 1,024 hold?
#
# <details><summary>Answer</summary>
#
# The 128 data ranks share that: 13.4 / 128 = 0.105 GB.
#
# </details>

# %%
# %%ranks --timeout 180
from manyhands.predict.simulated_rank import in_own_process

flags = ["--preset", "gpt-7b", "--parallel.tensor", "8"]
if rank == 0:  # nothing communicates in there
    worlds = sorted({8, min(64, gpus), gpus})
    for count, found in zip(worlds, in_own_process(worlds, flags), strict=True):
        held = sum(found["held"].values()) / 1e9
        planned = sum(found["planned"][kind] for kind in found["held"]) / 1e9
        took = f"{found['seconds']:.0f} s to build"
        say(f"{count:5} ranks, {found['layout']:20} {held:6.3f} GB on rank 0, planned {planned:6.3f}; {took}")
        assert abs(held / planned - 1) < 0.02

# %% [markdown]
# This gives you the bytes at rest, and errors that torch would raise when it cuts the model, before you wait in a
# queue. It does not give you times, nor what a forward keeps.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: 1,024 ranks</summary>
#
# *Ask:* "why not exactly 16 times less from 64 to 1,024 ranks?" Padding: norms and biases of a few numbers, cut over 128 ranks,
# are padded to one row each. The fake backend lives under `torch.testing._internal`: no interface, it may move.
#
# </details>

# %% [markdown]
# ## Held against published runs (MORE, 4 min)
#
# Bytes can be counted; times come from a model. The planner's model has a few fitted constants, such as the speed of a
# training's matrix products as a share of the GPU's fastest product. Table 1 of Narayanan et al. 2021 has ten runs on
# A100, from 32 GPUs to 3,072; 38 runs come from other sources, up to 16,384 H100. Five of the 48 fix the constants. The
# others are *predicted*. Expect points along the dashed line. The hollow ones were fitted: they lie on it, and prove
# nothing.

# %%
# %%ranks
from manyhands.plots.results import table_and_others
from manyhands.predict.published_runs import FITTED_ON, NARAYANAN, RUNS, predicted_tflops, residual, summary

table = [run for run in RUNS if run.source == NARAYANAN]
others = [run for run in RUNS if run.source != NARAYANAN]


def row(run, label):
    return label, run.published, predicted_tflops(run), run.name in FITTED_ON


if rank == 0:
    figure = table_and_others(
        [row(run, run.name.removeprefix("GPT ")) for run in table],
        [row(run, run.source.split(",")[0]) for run in others],
        "table 1 of Narayanan et al. 2021",
    )
    alt = (
        f"predicted against published TFLOP/s per GPU: left ten runs of one table, right {len(others)} of other sources"
    )
    show(figure, "published", alt)

# %% [markdown]
# Is that good? Compare it with a *baseline* that ignores the layout: for each run of the table it predicts the mean of
# the two fitted ones.

# %% tags=["nbval-check-output"]
# %%ranks
from statistics import mean, median

fitted = [run for run in table if run.name in FITTED_ON]
guess = mean(run.published for run in fitted)
plain = [abs(guess / run.published - 1) for run in table if run not in fitted]
if rank == 0:
    for name, runs in (
        (f"other {len(plain)} of the table", table),
        (f"{len(others)} of other sources", others),
    ):
        say(f"{name:21} half are within {summary(runs)[0]:.1%}, the worst off by {summary(runs)[1]:.1%}")
    say(f"the baseline, {guess:.0f}:    half are within {median(plain):.1%}, the worst off by {max(plain):.1%}")
    worst = max(others, key=lambda run: abs(residual(run)))
    say(f"worst of all: {worst.name}: {predicted_tflops(worst):.0f} predicted, {worst.published:g} published")
    say(f"    assumed, since the source does not say: {worst.assumed}")
    fast = sum(residual(run) > 0 for run in others)
    say(f"{fast} of the {len(others)} others are predicted too fast, {len(others) - fast} too slow")

# %% [markdown]
# A layout that is predicted to take half as long is faster. One that is predicted to be 5 % faster has to be measured.
#
# And does it *choose* well? For each of these runs, `python scripts/plan.py --published` searches the layouts that the
# program of its time could do. It prints at which place the published layout comes.

# %% [markdown]
# ## Turn the knobs (MORE, 2 min)
#
# This is the grid again, with the links: left a rank and its partners, right what each rank sends to every other.
# Squares outside of the two frames are sent between nodes. Change the order of the axes and watch the dark squares move
# out.

# %% tags=["active-ipynb"]
# from manyhands.widgets.rank_grid import show_rank_grid
#
# show_rank_grid(pipeline=2, data=2, tensor=4, per_node=8, rank=5)

# %% [markdown]
# And this is the planner. A row is the best plan of its family:

# %% tags=["active-ipynb"]
# from manyhands.widgets.planner import show_planner
#
# show_planner(model="gpt-7b", gpus=64)

# %% [markdown]
# `zero3` shards more than `zero2`, so **why does its row hold more bytes?** `zero2` keeps the weights whole ("gathered")
# for the whole step. That leaves room for smaller micro-batches only. `zero3` gathers block by block, and its fastest
# variant uses the room for a larger micro-batch. With the same micro-batch it holds less. Both stages shard gradients only
# after the last micro-batch. Until then **every rank keeps the whole sum, 4 bytes per parameter** ("accumulated"):

# %% tags=["nbval-check-output"]
# %%ranks
from manyhands.predict.layouts import Question, families
from manyhands.predict.machines import machine_named
from manyhands.predict.memory import bytes_per_rank
from manyhands.predict.models import preset_model

gpt_7b = preset_model("gpt-7b")
for family in families(Question(gpt_7b, machine_named("h100"), 64, 512, context=1)) if rank == 0 else ():
    if family.name not in ("zero2 64", "zero3 64"):
        continue
    for one in family.variants:
        held = bytes_per_rank(gpt_7b, one.layout, one.options)
        if one.options.parallel.activation_checkpointing == "none" and held.on_gpu < 120e9:
            parts = (
                f"activations {held.activations / 1e9:4.1f}, gathered weights {held.unsharded_parameters / 1e9:4.1f}"
            )
            parts += f", accumulated gradients {held.accumulated_gradients / 1e9:4.1f}"
            say(f"{family.name}, {one.micro_batch} per micro-batch: {held.on_gpu / 1e9:5.1f} GB, of which {parts}")

# %% [markdown]
# ## Exercises (MORE, 19 min)
#
# Each check runs your answer in a separate process group: you cannot break anything.

# %% [markdown]
# ### Exercise 1: place the axes
#
# `sizes` has the ranks of each axis, `payloads` the bytes of its all-reduces in a step, for one rank. Write
# `best_order(sizes, payloads, per_node)`: the axes as a tuple, outermost first, so that the fewest bytes in total go between
# nodes. `crossing` above counts them. Where several orders are equally good, any of them will do.


# %%
# %%ranks
def best_order(sizes, payloads, per_node):
    """Axes, outermost first, with the fewest bytes between nodes."""
    raise NotImplementedError  # your turn


checks.best_order(best_order, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 1</summary>
#
# ```python
# import itertools
#
#
# def best_order(sizes, payloads, per_node):
#     def total(order):
#         return sum(crossing(order, sizes, payloads, per_node).values())
#
#     return min(itertools.permutations(sizes), key=total)
# ```
#
# </details>

# %% [markdown]
# ### Exercise 2: a roofline, with its units
#
# A layer does `flop` operations, moves `memory_bytes` to and from the GPU's memory and sends `link_bytes`. If the three overlap
# fully, it takes as long as the slowest: a [roofline](../assets/glossary.md#roofline). Data sheets give `peak_tflops` in 10¹²
# operations per second, `memory_gbs` in 10⁹ *bytes* per second, `link_gbits` in 10⁹ *bits* per second. Write
# `roofline(...)`: (seconds, and what bounds it: "compute", "memory" or "link"). The check draws its numbers at random.


# %%
# %%ranks
def roofline(flop, memory_bytes, link_bytes, peak_tflops, memory_gbs, link_gbits):
    """(seconds, what bounds them) of work whose three parts overlap."""
    raise NotImplementedError  # your turn


checks.roofline(roofline, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 2</summary>
#
# ```python
# def roofline(flop, memory_bytes, link_bytes, peak_tflops, memory_gbs, link_gbits):
#     seconds = {
#         "compute": flop / (peak_tflops * 1e12),
#         "memory": memory_bytes / (memory_gbs * 1e9),
#         "link": link_bytes / (link_gbits * 1e9 / 8),
#     }
#     bound = max(seconds, key=seconds.get)
#     return seconds[bound], bound
# ```
#
# </details>

# %% [markdown]
# ### Exercise 3: an all-reduce in three phases
#
# ![An all-reduce of four ranks on two nodes: sums inside each node, then between the nodes, then all parts to all
# ranks](../assets/10_hierarchical.svg)
#
# A [**hierarchical all-reduce**](../assets/glossary.md#hierarchical-all-reduce) of M bytes on N nodes of G ranks: a reduce-scatter
# inside each node leaves every rank a G-th of the sum; rank i of each node all-reduces its part with rank i of the other
# nodes; an all-gather inside the node makes it whole. All three use rings. Write `phases(M, G, N)`: the bytes that one
# rank sends in each of the three. (The bug from the zoo, above, is a mistake in the third.)


# %%
# %%ranks
def phases(M, G, N):
    """Bytes that a rank sends in the reduce-scatter, the all-reduce between nodes, and the all-gather."""
    raise NotImplementedError  # your turn


checks.phases(phases, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 3</summary>
#
# ```python
# def phases(M, G, N):
#     inside = (G - 1) / G * M
#     return inside, 2 * (N - 1) / N * M / G, inside
# ```
#
# </details>

# %% [markdown]
# ### What else the planner says
#
# It says on which assumption its answer depends most, and on how many GPUs a model fits:

# %%
# %%ranks
from manyhands.predict.layouts import Question
from manyhands.predict.machines import machine_named
from manyhands.predict.models import preset_model
from manyhands.predict.planner import plan, smallest_fit, weakest_assumption
from manyhands.predict.program import MEGATRON

if rank == 0:
    question = Question(preset_model("gpt-7b"), machine_named("h100"), 64, 512)
    say(weakest_assumption(question, plan(question).best)[0])
    big = Question(preset_model("llama3-405b"), machine_named("h100"), 8, 512, program=MEGATRON)
    say(
        f"llama3-405b on 8: {len(plan(big).ranked)} families fit; the smallest number of GPUs on which one fits: {smallest_fit(big)}"
    )

# %% [markdown]
# ## Recap

# %%
# %%ranks
card(
    "A mesh is a grid of ranks. The last axis runs fastest, so it stays on the node; its groups differ in it alone.",
    "Tensor inside, always. Pipeline or data outermost: count the seconds that are waited for, not the bytes.",
    "Gradients hide behind the backward if it is long enough. Then data goes outermost.",
    "The product of all axes has one process's loss and gradients, to 1e-10 in float64. Test that.",
    "A planner's bytes at rest are right to 2 %, its times to some 10 %: keep a reserve, and time the best three.",
    figure="game: three times the bytes between nodes, and less waiting",
    command="python scripts/plan.py --preset gpt-7b --machine h100 --gpus 64",
)

# %% [markdown]
# ## On the cluster
#
# The job's flags are in the [handbook](../assets/handbook/10_meshes_and_planning.md#on-a-cluster).
#
# ## Further reading
#
# In the [handbook](../assets/handbook/10_meshes_and_planning.md#further-reading).

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
