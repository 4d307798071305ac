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
# **45 minutes** for the sections marked CORE, 64 with those marked MORE.
#
# After this lesson **you can**
# - lay ranks out on a grid, and name the groups of each of its axes;
# - count what each axis sends over which link, and place axes on nodes;
# - train with data, tensor and pipeline parallelism at once, with the loss of one process;
# - predict bytes and step time of a layout, and say how far to trust that;
# - choose a layout for a model, a machine and a number of GPUs.
#
# **You need** what the axes do: data parallelism ([lesson 03](03_data_parallel.ipynb)), sharding
# ([06](06_zero_fsdp.ipynb)), tensor parallelism ([07](07_tensor_parallel.ipynb)), pipelines
# ([08](08_pipeline_parallel.ipynb)). One sentence about each is enough; their code is in the package.
#
# **New here:** [mesh](../assets/glossary.md#mesh), [axis](../assets/glossary.md#axis),
# [hierarchical all-reduce](../assets/glossary.md#hierarchical-all-reduce), [planner](../assets/glossary.md#planner),
# [fake backend](../assets/glossary.md#fake-backend), [roofline](../assets/glossary.md#roofline).
#
# The same file is a script:
#
# ```bash
# python -m torch.distributed.run --standalone --nproc-per-node 8 scripts/10_meshes_and_planning.py   # 2 x 2 x 2
# mpiexec -n 4 python scripts/10_meshes_and_planning.py
# python scripts/10_meshes_and_planning.py               # a world of one: the same path, the same loss
# ```

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 2, warm-up 3, grids 9, links 9, all axes at once 4, planner 6, bytes 4, 1,024 ranks 2, published
# runs 3, zoo 3. Builds A to D take about three minutes each and are in these numbers.
#
# *Say:* a layout is two decisions. How many ranks has each axis? Which axis lies inside the node? The first decides whether
# the model fits, the second whether it is fast.
#
# *Three usual mistakes:* taking "axis 0" for the ranks 0, 1, 2, ... (they belong to the *last* axis); giving tensor ranks
# different data; believing a predicted time to three digits.
#
# *When late:* give solutions B and D, show the stored figures, and keep builds A and C and the zoo.
#
# *Ask the room:* "Eight GPUs, the model fits on one. Which axes do you use?" (Data alone. Each further axis needs a reason.)
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; 8 make a grid of 2 x 2 x 2, and want 4 GB; in a script the launcher decides
layers = 4  # layers of the GPT, 2 to 8
sequences = 0  # sequences in a step, at least 4, and a multiple of twice the ranks; 0: 8 or more
gpus = 1024  # ranks of the largest world that is simulated, a multiple of 8, at most 4,096

# %% [markdown]
# ## Start (CORE, 2 min)
#
# The first cell starts four ranks. Cells that begin with `%%ranks` run on all of them. Each section needs the cells
# of this one, and then only its own: a folded cell with `catch_up(...)` defines what is missing from earlier ones.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("10_meshes_and_planning", globals())

# %%
# %%ranks
import math
from dataclasses import replace

import torch
import torch.distributed as dist
from manyhands import Metrics, catch_up, join, leave, refuse, say, show
from manyhands.checks import meshes_and_planning as checks
from manyhands.measure import wire
from torch.distributed.device_mesh import init_device_mesh

# %% [markdown]
# One machine plays two nodes: the first half of the ranks is node 0, the second half node 1. (An odd number of ranks is one
# node.) That is how a launcher numbers ranks, node by node. Nothing is slower between the two; the lesson *counts* what
# crosses.

# %%
# %%ranks
from manyhands.data.corpus import get_batch, load_corpus

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
per_node = world_size if world_size % 2 else world_size // 2  # ranks of a node
least = max(4, 2 * world_size)
sequences = sequences or math.ceil(8 / least) * least
if sequences % least:
    refuse(f"sequences={sequences} does not split over {world_size} ranks; use a multiple of {least}")
corpus = load_corpus(ranks)
metrics = Metrics(ranks, corpus, {"layers": layers, "sequences": sequences})
AXES = ("pipeline", "data", "tensor")
tensor, pipeline = math.gcd(world_size, 2), 2 - (world_size % 4 > 0)  # two each, if there are ranks enough
shape = (pipeline, world_size // (pipeline * tensor), tensor)
mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES)  # explained below
say(f"I am rank {rank} of {world_size}, on node {rank // per_node}")

# %% [markdown]
# ## Warm-up: four ranks on a grid (CORE, 3 min)
#
# **Why.** Lessons 03 to 08 each had *one* reason to send. A large model needs several at once: replicas for speed, a split layer
# because the matrices are large, stages because the layers are many. Put the ranks on a grid, with one
# [**axis**](../assets/glossary.md#axis) for each reason. The grid is called a [**mesh**](../assets/glossary.md#mesh).
#
# ![Four ranks on a grid of two rows and two columns: a row is a tensor group, a column a data group](../assets/10_grid.svg)
#
# **Predict.** Rank r holds the number r + 1. Rows 0 1 and 2 3 are tensor groups. Which sums does an all-reduce over the
# tensor groups leave? And one over the data groups, the columns?
#
# <details><summary>Answer</summary>
#
# Rows: 1 + 2 = 3 on ranks 0 and 1, 3 + 4 = 7 on ranks 2 and 3. Columns: 1 + 3 = 4 on ranks 0 and 2, 2 + 4 = 6 on ranks 1
# and 3. The same call with another group means another thing.
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
# ## Rank grids (CORE, 9 min)
#
# **Why.** Everything below hangs on one convention. The *last* axis runs fastest, as in a C array: on a grid of
# pipeline 2 x data 2 x tensor 2, ranks 0 and 1 differ in `tensor`, ranks 0 and 2 in `data`, ranks 0 and 4 in `pipeline`. A
# launcher numbers the ranks of a node in a row, so the last axis stays on the node, and the first one crosses.
#
# ![Eight ranks as a cube, pipeline 2 x data 2 x tensor 2: ranks 0 to 3 are node 0, ranks 4 to 7 node 1; lines join the ranks that
# form a group of each axis](../assets/10_cube.svg)
#
# **Predict.** Where does rank 6 stand on this grid? With whom is it in a data group?
#
# <details><summary>Answer</summary>
#
# 6 = 1·4 + 1·2 + 0: (1, 1, 0). Its data group has the same first and last coordinate: ranks 4 and 6.
#
# </details>
#
# ### Build A: from a rank to its coordinates
#
# `shape` holds the ranks of each axis, the first one outermost. Write the coordinates as a list, by whole division and its
# remainder: `divmod(17, 5)` is `(3, 2)`.


# %%
# %%ranks
def coordinates(rank, shape):
    """Where `rank` stands on a grid of `shape`; the last axis runs fastest."""
    raise NotImplementedError  # your turn


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
# A group of an axis is all ranks that differ in this coordinate *only*. Write all groups of axis number `axis`, each in the
# order of that coordinate. Two ranks belong together if their coordinates without this one are equal.


# %%
# %%ranks
def groups_of(shape, axis):
    """[[ranks that differ in `axis` only], ...] on a grid of `shape`: lists that hold each rank once."""
    raise NotImplementedError  # your turn


checks.groups_of(groups_of, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def groups_of(shape, axis):
#     groups = {}
#     for rank in range(math.prod(shape)):
#         place = coordinates(rank, shape)
#         place.pop(axis)
#         groups.setdefault(tuple(place), []).append(rank)
#     return list(groups.values())
# ```
#
# </details>

# %% [markdown]
# **The library.** `init_device_mesh` makes the same grid and opens a process group for each group of each axis: on every
# rank one per axis, the one that it is in. `mesh["tensor"]` is the axis; `mesh["data", "tensor"]` a grid within the grid.
# The start cell has made one of all ranks that are here:

# %%
# %%ranks
told = []
for number, axis in enumerate(AXES):
    group = dist.get_process_group_ranks(mesh[axis].get_group())
    assert group in groups_of(shape, number)
    told.append(f"{axis} {group}")
assert list(mesh.get_coordinate()) == coordinates(rank, shape)
say(f"I stand at {coordinates(rank, shape)}, in the groups {', '.join(told)}")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: grids</summary>
#
# Let eight people stand up as a cube and call "tensor": everybody points at their partner. *Usual mistake:* groups as ranges
# of ranks. That is true of the last axis only. *Ask:* "how many process groups does a rank of a 4 x 8 x 8 mesh open?"
# (Three. All ranks together: 64 + 32 + 32.)
#
# </details>

# %% [markdown]
# ## What crosses the nodes (CORE, 9 min)
#
# **Why.** Inside a node a GPU sends 450 GB/s, to another node 50 GB/s (NVLink 4 and one 400 Gb/s card, each direction). The
# number of ranks on an axis says *how much* it sends. The place of the axis says *over which link*.
#
# In a ring all-reduce each of n ranks sends 2 (n-1)/n of the payload to its neighbour (lesson 02). Whether that leaves
# the node depends on where the neighbour stands.
#
# ![Two rings of four ranks on two nodes of two: in the order 0 1 2 3 two of the four hops cross between the nodes, in the order
# 0 2 1 3 all four do](../assets/10_rings.svg)
#
# **Predict.** Four ranks on two nodes of two reduce 1 MB in the ring 0 → 1 → 2 → 3 → 0. How many MB leave a node, both nodes
# together? And in the ring 0 → 2 → 1 → 3 → 0?
#
# <details><summary>Answer</summary>
#
# Each hop carries 2·3/4 = 1.5 MB. In the first ring the hops 1 → 2 and 3 → 0 cross: 3 MB. In the second all four cross: 6 MB.
# Same ranks, same sum.
#
# </details>
#
# ### Build C: bytes between nodes
#
# `group` is a ring in its order: each rank sends to the next one, the last to the first. Ranks `0` to `per_node - 1` are node
# 0, and so on. How many bytes does a ring all-reduce of `payload` bytes send between nodes, all ranks of the group together?

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "coordinates", "groups_of")


# %%
# %%ranks
def slow_bytes(group, payload, per_node):
    """Bytes that a ring all-reduce of `payload` bytes in `group` sends from one node to another."""
    raise NotImplementedError  # your turn


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
# Now count real messages. This is lesson 02's ring, over any group; `wire` records to whom each message goes.


# %%
# %%ranks
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


# %%
# %%ranks
payload = torch.ones(4096 * world_size, device=device)  # on 4 ranks 65,536 bytes
for axis in AXES:
    group = mesh[axis].get_group()
    with wire.watch() as seen:
        ring_sum(payload.clone(), group)
    sent = [(call.bytes, call.peer // per_node) for call in seen.calls if call.op == "send"]
    mine = sum(size for size, node in sent if node != rank // per_node)
    between = torch.tensor([mine], device=device)
    dist.all_reduce(between)  # over all ranks
    expected = sum(slow_bytes(g, payload.nbytes, per_node) for g in groups_of(shape, AXES.index(axis)))
    assert abs(between.item() - expected) < 1
    if rank == 0:
        say(f"{axis:8} of {group.size()}: {int(between):,} bytes between nodes, predicted {expected:,.0f}")
    metrics.exact(**{f"{axis}_between": int(between)})

# %% [markdown]
# Only the outermost axis of more than one rank crosses. Now with what a training step really hands to each axis. A 7B model (32 layers of
# width 4,096), one sequence of 2,048 tokens per micro-batch and 8 micro-batches in bf16, on 16 GPUs: pipeline 2 x data 2 x
# tensor 4, two nodes of 8. Turn the axes around, and see what changes.

# %%
# %%ranks
token_bytes = 2 * 2048 * 4096  # B·T·D numbers of two bytes
sizes = {"pipeline": 2, "data": 2, "tensor": 4}
step_payloads = {
    "pipeline": 8 * token_bytes,  # activations there, gradients back: as an all-reduce of two
    "data": 4 * 6.7e9 / (2 * 4),  # gradients in fp32 of this rank's share
    "tensor": 8 * 4 * 16 * token_bytes,  # four all-reduces in each of this stage's 16 layers
}


def crossing(order, sizes, payloads, per_node):
    """{axis: bytes between nodes in a step} with the axes in this order, the outermost first."""
    shape = [sizes[axis] for axis in order]
    return {
        axis: sum(slow_bytes(group, payloads[axis], per_node) for group in groups_of(shape, number))
        for number, axis in enumerate(order)
    }


# %%
# %%ranks
if rank == 0:
    for order in (
        ("pipeline", "data", "tensor"),
        ("data", "pipeline", "tensor"),
        ("tensor", "data", "pipeline"),
    ):
        found = crossing(order, sizes, step_payloads, 8)
        each = ", ".join(f"{axis} {size / 1e9:.1f}" for axis, size in found.items())
        say(f"{' x '.join(order):24} {sum(found.values()) / 1e9:6.1f} GB between nodes: {each}")

# %% [markdown]
# **Tensor inside, pipeline outside.** The axis that sends most goes innermost: tensor ranks within a node, stages between
# nodes, replicas where there is room, since their gradients can travel behind the backward pass. (And not every byte is
# waited for: the planner knows which.)
#
# Below, the same counted link by link: left a rank and its partners, right what each rank sends to each. What lies outside of
# the two frames goes between nodes. Change the order of the axes and watch the dark squares move out.

# %% tags=["active-ipynb"]
# from manyhands.widgets.rank_grid import show_rank_grid
#
# show_rank_grid(pipeline=2, data=2, tensor=4, per_node=8, rank=5)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: links</summary>
#
# *Usual mistake:* counting what crosses per rank and then per node. Ask for the whole group, always. *Ask:* "why does an
# all-reduce over 2 ranks cost as much as one message there and one back?" (2·(2-1)/2 = 1 payload from each rank.) *When late:*
# leave out the ring's code, run the count.
#
# </details>

# %% [markdown]
# ## All axes at once (CORE, 4 min)
#
# **Why it must agree.** Each axis alone gives the numbers of one process. Their product must too, and that is where bugs
# live: a gradient that is averaged over the tensor ranks, a loss that is divided twice. So hold the whole to one process, in
# float64: loss and *every* gradient.
#
# `parallelize` is what `train.py` uses: `Layout` has the axes pipeline x replicate x shard x tensor; the two in the middle are
# the data axis, replicas or FSDP.
#
# **Predict.** Pipeline 2 x tensor 2 and no data axis: how many different batches do the four ranks read?
#
# <details><summary>Answer</summary>
#
# One. Tensor ranks compute parts of the same layer, stages parts of the same depth. Only `data` reads other sequences.
#
# </details>
#
# On four ranks the cells below try each pair of axes, on eight (`n_ranks = 8` at the top) all three at once: 2 x 2 x 2.

# %%
# %%ranks
from manyhands.config.layout import resolve_layout
from manyhands.config.options import Options, ParallelOptions, TrainOptions
from manyhands.gpt.model import GPTConfig
from manyhands.parallel.strategy import full_model, parallelize

config = GPTConfig(vocab_size=len(corpus.vocab), n_layer=layers, n_head=4)
both = {"tensor": shape[2], "pipeline": shape[0]}
PRODUCTS = {
    1: [{}],
    2: [{"tensor": 2}, {"pipeline": 2}, {"strategy": "fsdp"}],
    4: [
        {"strategy": "fsdp", "tensor": 2},
        {"strategy": "ddp", "pipeline": 2},
        {"strategy": "tp", **both},
    ],
}.get(world_size, [{"strategy": "fsdp", **both}])  # on 8 ranks all three: 2 x 2 x 2


# %%
# %%ranks
def options_of(**parallel):
    """The trainer's options in float64: `sequences` per step, over all ranks."""
    train = TrainOptions(global_batch=sequences, precision="fp64")
    return Options(train=train, parallel=ParallelOptions(**parallel))


def data_share(first, of):
    """Inputs and targets of share number `first` of `of` equal ones of the same `sequences` sequences."""
    pair = get_batch(corpus.train_ids, 0, sequences, config.block_size, 0, 1, seed=1)
    return [ids.to(device).chunk(of)[first] for ids in pair]


# %%
# %%ranks
single = full_model(config, options_of()).to(device)
loss_1 = single(*data_share(0, 1))[1]
loss_1.backward()
metrics.close(float64_loss=loss_1.detach())
for product in PRODUCTS:
    options = options_of(**product)
    layout = resolve_layout(options, config, world_size)
    parallel = parallelize(config, layout, options, ranks)
    loss = parallel.forward_backward(*data_share(parallel.data_rank, parallel.data_size))
    apart = [(parallel.mean_loss(loss) - loss_1).abs().item()]  # all ranks
    gradients = parallel.named_full_gradients()  # all ranks
    apart += [(gradients[name] - p.grad.cpu()).abs().max().item() for name, p in single.named_parameters()]
    assert max(apart) < 1e-10, f"{layout}: {max(apart):.1e} away"
    if rank == 0:
        say(f"{layout}: loss and {len(apart) - 1} gradients are one process's, to {max(apart):.0e}")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: all axes at once</summary>
#
# With 8 ranks this is the full 2 x 2 x 2; with 4, all pairs of axes. Let somebody change `chunk(of)[first]` to share 0 for
# everybody: the loss still looks right, the assertion says how far it is off. *Ask:* "why float64?" (In fp32 a wrong factor
# on a small gradient hides in rounding.)
#
# </details>

# %% [markdown]
# ## Choosing: a guide, and a planner (CORE, 6 min)
#
# **Why.** A thousand GPUs split over four axes in hundreds of ways, with micro-batches and recomputation in thousands. A
# rule of thumb comes first:
#
# | where | the model | take |
# |---|---|---|
# | one GPU | fits | train |
# | | does not fit | ZeRO with offload to CPU or NVMe |
# | | not even its largest layer | memory-centric tiling: that layer in pieces |
# | one node | fits on one GPU | DDP or ZeRO |
# | | does not, fast links | PP, ZeRO or TP: comparable |
# | | does not, slow links | PP before ZeRO and TP |
# | several nodes | fast network | ZeRO (hardly any change to the code), or PP + TP + DP (less communication, more work) |
# | | slow network, short of memory | DP + PP + TP + ZeRO-1 |
#
# And always: TP at most as many as the GPUs of a node. (The questions, and most answers, are those of the [Transformers
# documentation](https://huggingface.co/docs/transformers/perf_train_gpu_many).)
#
# A [**planner**](../assets/glossary.md#planner) does the sums instead: for each layout the bytes of the fullest GPU; what does not
# fit is out, and of the rest it predicts the time of a step.
#
# ![A planner takes every split of the GPUs, refuses what does not go together or fit, and ranks the rest by time](../assets/10_plan.svg)
#
# ### Build D: recommend
#
# Predictions are not right to 5 %, so the fastest is not simply the best: among plans within 5 % of the fastest that fits, take
# the one with the fewest axes. Each plan is `(name, bytes, seconds, axes)`. Write `recommend`: a name, or None if nothing fits.


# %%
# %%ranks
def recommend(plans, memory_bytes):
    """The name of the plan with the fewest axes (then the fastest) within 5 % of the fastest that fits, or None."""
    raise NotImplementedError  # your turn


checks.recommend(recommend, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution D</summary>
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
# The course's planner is `scripts/plan.py`. It knows the guide's axes, ways to share the state of data ranks, micro-batches,
# schedules and recomputation. (And context parallelism, for which it gives no command, so it is left out here.) Five
# questions that people bring along:

# %%
# %%ranks
from manyhands.predict.machines import machine_named
from manyhands.predict.layouts import Question
from manyhands.predict.models import preset_model
from manyhands.predict.planner import plan, smallest_fit, weakest_assumption

if rank == 0:
    for name, count in (("olmo-1b", 1), ("olmo-7b", 1), ("olmo-7b", 8), ("olmo-7b", 64), ("llama3-70b", 64)):
        question = Question(preset_model(name), machine_named("h100"), count, 512, context=1)
        best = plan(question).best
        held, step_s = best.held.on_gpu / 1e9, best.step_s
        said = f"{held:2.0f} GB, {step_s:6.1f} s per step, MFU {best.mfu:.0%}"
        say(f"{name:10} on {count:2} H100: {best.name:31} {said}")

# %% [markdown]
# It also says on which assumption its answer depends most, and on how many GPUs something fits:

# %%
# %%ranks
if rank == 0:
    question = Question(preset_model("olmo-7b"), machine_named("h100"), 64, 512)
    answer = plan(question)
    say(f"{answer.tried:,} layouts tried, {len(answer.ranked)} families fit, {len(answer.refused)} are refused")
    say(weakest_assumption(question, answer.best)[0])
    big = Question(preset_model("llama3-405b"), machine_named("h100"), 8, 512, offload=False)
    say(f"llama3-405b on 8: {len(plan(big).ranked)} families fit; on {smallest_fit(big)} GPUs something does")

# %% [markdown]
# Try your own model, and turn the knobs:

# %% tags=["active-ipynb"]
# from manyhands.widgets.planner import show_planner
#
# show_planner(model="olmo-7b", gpus=64)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: choosing</summary>
#
# Let the room vote on olmo-7b on 64 H100 before the cell runs. Most say TP x PP x DP. *Then ask* what each further axis would
# buy. The guide is older than fast networks; that a planner disagrees with it is no fault of either. *When late:* build D is
# the one to give away.
#
# </details>

# %% [markdown]
# ## Experiment: predicted bytes, and real ranks (CORE, 4 min)
#
# A plan that does not fit wastes a night in the queue. So hold the planner's bytes to what ranks *hold*: build up to eight
# layouts of a small GPT, run a step, and add up the storages of parameters, gradients and Adam's state.
#
# Expect bars that end at their dashed lines, within 2 %. They cannot all be exact shares: DTensor and FSDP pad, and some
# weights (norms, biases) are whole on every tensor rank.
#
# **Predict.** Which of `replicas 4` and `zero3 4` holds more, and by what factor?
#
# <details><summary>Answer</summary>
#
# Copies: 16 bytes per parameter in fp32 with Adam (4 + 4 + 8), on each rank. zero3 a quarter of that, and padding.
#
# </details>

# %%
# %%ranks
from manyhands.gpt.model import GPTConfig
from manyhands.measure.tensor_bytes import tensor_bytes
from manyhands.parallel.optimizer import build_optimizer
from manyhands.parallel.strategy import parallelize
from manyhands.predict.machines import machine_named
from manyhands.predict.layouts import Question, families
from manyhands.predict.memory import bytes_per_rank
from manyhands.predict.models import PlannedModel

tiny = PlannedModel("tiny", vocab_size=65, block_size=8, n_layer=4, n_head=4, n_embd=32)
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
from manyhands.plots.bars import planned_and_held

if rank == 0:
    figure = planned_and_held(rows, f"the fullest of {world_size} ranks, {tiny.num_params():,} parameters")
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
# ## 1,024 ranks in one process (CORE, 2 min)
#
# You cannot start 1,024 ranks here. But torch can be told that it is rank 0 of 1,024: the [**fake
# backend**](../assets/glossary.md#fake-backend) has a process group whose collectives return at once and move nothing. With weights
# on the meta device, which have a shape and no numbers, `fully_shard` and `parallelize_module` cut a 7B model as they would
# on the machine. Then count bytes. (It runs in a process of its own: a process has one default group.)
#
# **Predict.** 6.7 B parameters with fp32 Adam, 16 bytes each, tensor 8: rank 0 of 8 holds 13.4 GB and a little. Of 1,024?
#
# <details><summary>Answer</summary>
#
# The 128 data ranks share that: 13.4 / 128 = 0.105 GB.
#
# </details>

# %%
# %%ranks --timeout 180
from manyhands.predict.simulated_rank import in_own_process

flags = ["--preset", "olmo-7b", "--parallel.tensor", "8"]
if rank == 0:  # nothing communicates in there
    worlds = sorted({8, min(64, gpus), gpus})
    for count, found in zip(worlds, in_own_process(worlds, flags), strict=True):
        held = sum(found["held"].values()) / 1e9
        planned = sum(found["planned"][kind] for kind in found["held"]) / 1e9
        took = f"{found['seconds']:.0f} s to build"
        say(f"{count:5} ranks, {found['layout']:20} {held:6.3f} GB on rank 0, planned {planned:6.3f}; {took}")
        assert abs(held / planned - 1) < 0.02

# %% [markdown]
# What you get: bytes at rest, and every refusal that torch has in store, days before the machine has time for you. What you do
# not get: time, and what a forward keeps.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: 1,024 ranks</summary>
#
# *Ask:* "why not exactly 16 times less from 64 to 1,024 ranks?" Padding: norms and biases of a few numbers, cut over 128 ranks,
# are padded to one row each. The fake backend lives under `torch.testing._internal`: no interface, it may move.
#
# </details>

# %% [markdown]
# ## Held against published runs (CORE, 3 min)
#
# Bytes can be counted; time is a model. This one has two fitted constants: the share of its peak that a GPU's matrix products
# attain, and how often kept bytes pass through its memory. Table 1 of Narayanan et al. 2021 has ten runs on A100, from 32
# GPUs to 3,072. Two of them, the smallest and the largest, fix the constants. The other eight, and ten runs of other papers, are
# *predicted*. Expect points along the dashed line. The two hollow ones were fitted: they lie on it, and prove nothing.

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
    alt = "predicted against published TFLOP/s per GPU: left ten runs of one table, right ten of other papers"
    show(figure, "published", alt)

# %% [markdown]
# Is that good? Hold it to a *baseline* that knows nothing of layouts: the mean of the two fitted runs, for all.

# %%
# %%ranks
from statistics import mean, median

fitted = [run for run in table if run.name in FITTED_ON]
guess = mean(run.published for run in fitted)
plain = [abs(guess / run.published - 1) for run in table if run not in fitted]
if rank == 0:
    say(f"fitted on {' and '.join(FITTED_ON)}: share of the peak and passes over memory")
    for name, runs in (
        (f"other {len(plain)} of the table", table),
        (f"{len(others)} of other papers", others),
    ):
        say(f"{name:21} half are within {summary(runs)[0]:.1%}, the worst off by {summary(runs)[1]:.1%}")
    say(f"the baseline, {guess:.0f}:    half are within {median(plain):.1%}, the worst off by {max(plain):.1%}")
    worst = max(others, key=lambda run: abs(residual(run)))
    say(f"worst of all: {worst.name}: {predicted_tflops(worst):.0f} predicted, {worst.published:g} published")
    say(f"    assumed, since the paper does not say: {worst.assumed}")
    fast = sum(residual(run) > 0 for run in others)
    say(f"{fast} of the {len(others)} others are predicted too fast, {len(others) - fast} too slow")

# %% [markdown]
# **How to use that.** A layout that is predicted to take half as long is faster. One that is predicted to be 5 % faster has to be
# measured. Let the planner name three candidates, run each for 20 steps, keep the best.

# %% [markdown]
# ## Exercises (MORE, 19 min)
#
# Each check runs your answer in a process group of its own: you cannot break anything.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "coordinates", "groups_of", "slow_bytes", "crossing")

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
# nodes; an all-gather inside the node makes it whole. All by rings. Write `phases(M, G, N)`: the bytes that one rank sends in
# each of the three. (The zoo's bug below is a mistake in exactly this.)


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
# ## A bug from the zoo (CORE, 3 min)
#
# A published simulator prices a hierarchical all-reduce: reduce-scatter inside the nodes of G ranks, all-reduce of M/G bytes
# between them, and back. It took the time of a full ring all-reduce of M bytes for the first phase and, "by symmetry", for
# the third. Then a change made the third phase an all-reduce of M/G bytes, since "only the shard" goes back: 8 times
# faster on nodes of 8. **Which of the two is right?** Do not argue. Measure: run the third phase with real messages. The
# ranks' clocks are virtual, a 450 GB/s link and no latency, so that nothing else disturbs them.

# %%
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


# %%
# %%ranks
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
# Neither. On the way back each rank must *receive* the (G-1)/G of the M bytes that it does not have, whatever the algorithm. The
# first formula counts twice that: an all-reduce is a reduce-scatter *and* an all-gather. The changed one counts 2/G of it: right
# at G = 2, by accident; on nodes of 8 it is 4 times too fast. The first phase, too, was priced as a full all-reduce, and the
# change left it so. The symmetry of phases one and three was right; their factor of 2 was not.
#
# The thread: [cs249r_book#1530](https://github.com/harvard-edge/cs249r_book/pull/1530). It puts the effect at about 220 µs, for 32 GB of
# gradients on nodes of 8 H100. Do the sum: 7/8 of 32 GB at 450 GB/s are 62 **milli**seconds for that phase alone.
#
# </details>
#
# The rule to take home: **a cost formula has a lower bound and a test.** The bound is what each rank must receive. The test is a
# run with real messages at *two* sizes, since at G = 2 the wrong formula is right.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# Most of a room believes the change: "a shard is smaller". Draw four people with a card each who all need all four cards.
# *Usual question:* "does NCCL do that?" It chooses between rings, trees and in-network sums. The lower bound without a
# summing switch holds for all.
#
# </details>

# %% [markdown]
# ## On the cluster
#
# Ask for ranked layouts, with the command for the first; for another machine; how far off the planner is; what would run. Then
# submit the job of [lesson 04](04_first_job.ipynb) with these flags:
#
# ```bash
# python scripts/plan.py --preset olmo-7b --machine h100 --gpus 64
# python scripts/plan.py --preset olmo-7b --machine mine.toml --gpus 64 --all
# python scripts/plan.py --published
# python scripts/train.py --preset olmo-7b --ranks 64 --dry-run --parallel.tensor 8
# sbatch jobs/train.slurm --preset olmo-7b --parallel.tensor 8
# ```
#
# **What changes on GPUs.** The order of ranks is the launcher's. One that deals ranks to nodes in turn (`--distribution=cyclic`
# of Slurm, `--map-by node` of Open MPI) puts your tensor groups on the network. Print `rank, hostname` once. NCCL is
# [topology-aware](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/overview.html): it orders its rings itself, so what
# goes between nodes depends on which ranks are in a group, not on their order.
#
# **What to look for**: the peak of `torch.cuda.max_memory_allocated()` against the plan; tokens per second per GPU of the three
# best plans over 20 steps each; the same loss in all of them.

# %% [markdown]
# ## Recap
#
# 1. A mesh is a grid of ranks; the last axis runs fastest, so it stays on the node. Groups of an axis differ in it alone.
# 2. How many ranks an axis has decides what fits; where it lies decides over which link it sends. Tensor inside, pipeline outside.
# 3. The product of all axes still has one process's loss and gradients, to 1e-10 in float64. Test that, not the loss curve.
# 4. Bytes can be predicted to 1 %, also for 1,024 ranks in one process; time to some 5 to 25 %, so measure the best three.
# 5. Each further axis needs a reason. Of plans that are close, take the simplest.
#
# ## Further reading
#
# - Narayanan et al. 2021, [Efficient large-scale language model training on GPU clusters](https://arxiv.org/abs/2104.04473): section 3,
#   how to combine the axes; table 1, the runs above.
# - Rajbhandari et al. 2020, [ZeRO](https://arxiv.org/abs/1910.02054): what sharding saves, and what it sends.
# - Grattafiori et al. 2024, [The Llama 3 herd of models](https://arxiv.org/abs/2407.21783): section 3.3, four axes on 16,384 GPUs and
#   the order in which they lie on the network.
# - PyTorch, [DeviceMesh](https://docs.pytorch.org/tutorials/recipes/distributed_device_mesh.html).

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
