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
# # 00 Start: ranks and launchers
#
# **25 minutes** for the sections marked CORE, 55 with those marked MORE.
#
# Work on many GPUs always begins like this: one program is started several times, and each copy finds out who it is.
#
# After this lesson **you can**
# - say what *rank*, *local rank*, *world size* and *SPMD* mean;
# - run one file four ways: in this notebook, under `torchrun`, under `mpiexec`, and alone;
# - read what a launcher tells its processes, and tell one world of four from four worlds of one;
# - check a machine before an event, and time it honestly.
#
# **You need** to have seen a training loop in PyTorch. No MPI, no cluster, no GPU.
#
# **New here:** [rank](../assets/glossary.md#rank), [local rank](../assets/glossary.md#local-rank), [world
# size](../assets/glossary.md#world-size), [SPMD](../assets/glossary.md#spmd), [node](../assets/glossary.md#node),
# [launcher](../assets/glossary.md#launcher), [process group](../assets/glossary.md#process-group), [smoke
# test](../assets/glossary.md#smoke-test), [warm-up](../assets/glossary.md#warm-up).
#
# At *Predict*, commit to a number before you unfold the answer. At *Build*, write a few lines: a check judges them on
# the spot, and a solution is folded below.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start and four copies with the warm-up 4, rank and local rank 2, launchers with build A 5, one
# file four ways with build B 7, smoke test 3, experiment 3, bug 2.
#
# *Say:* "A rank is a process. Not a GPU, not a machine, not a core." Let everyone run the first two cells before
# you talk.
#
# *Three usual mistakes:* looking for the rank that "has the result" of an all-reduce; believing that a variable of
# a plain cell exists on the ranks; reading local rank as rank.
#
# *When late:* show the stored outputs of the smoke test and of the clock; keep both builds.
#
# *On a hub:* sixty people on login nodes get two ranks each, without MPI. Have them start their servers on compute
# nodes before the lesson.
#
# *Ask the room:* "Your job printed *rank 0 of 1* four times and ended with exit status 0. What happened?"
#
# </details>

# %% [markdown]
# ## Start (CORE, 1 min)
#
# The lesson's settings. In a script they are flags: `--iterations 20`.

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
iterations = 100  # steps of the smoke test, 10 to 10000
batch = 64  # samples per rank and step, at least 1

# %% [markdown]
# The next cell starts the processes. From then on a cell that begins with `%%ranks` runs in all of them; any other cell
# runs in your notebook. In the script everything runs in every process. A login node gives you two processes, without
# MPI: on a hub, start your server on a compute node.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("00_start", globals())

# %%
# %%ranks
import os
import time

begun = time.perf_counter()
import torch
import torch.distributed as dist
from manyhands import Metrics, catch_up, fingerprint, join, leave, say, show
from manyhands.checks import start as checks
from manyhands.measure.timing import synchronise

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
metrics = Metrics(ranks, parameters={"iterations": iterations, "batch": batch})
joined_s = time.perf_counter() - begun  # for the experiment

# %% [markdown]
# `join()` found out who started this process, which rank it is, and how to reach the others. You open that box below.
# Every section runs after these cells alone.

# %% [markdown]
# ## Four copies of one program (CORE, 3 min)
#
# ![One file is started as four processes, each with its own memory and its own value of x](../assets/00_spmd.svg)
#
# You do not write four programs for four GPUs. You write *one*, it is started four times, and the copies differ in a
# single number: their **rank**, counted from 0. How many there are is the **world size**. This is called **SPMD**,
# for *single program, multiple data*. Nothing is shared: when rank 1 sets a variable, rank 2 does not notice.
#
# **Predict.** The next cell sets `x` and prints one line. How many lines, process numbers and values of `x` will you
# see?
#
# <details><summary>Answer</summary>
#
# As many of each as there are ranks: `world_size`, which is four, or two on a login node. Every process runs the
# cell. The notebook sorts the lines by rank; in a terminal they come in any order.
#
# </details>

# %%
# %%ranks
x = torch.tensor([rank + 1.0], device=device)
print(f"hello from rank {rank} of {world_size}: process {os.getpid()} holds x = {x.item():g}")

# %% [markdown]
# ### Warm-up: a few numbers by hand
#
# Rank *r* holds *r* + 1. Now all ranks add these up, with the call that this course uses most: the
# [all-reduce](../assets/glossary.md#all-reduce).
#
# **Predict.** What does `total` hold afterwards on rank 0? And on the last rank?
#
# <details><summary>Answer</summary>
#
# 1 + 2 + ... + *n* for *n* ranks, on **every** rank: 10 with four ranks, 3 with two. That is what "all" stands for: no
# master has the result. Every rank has to make the call; if one does not, the others wait.
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
total = x.clone()
dist.all_reduce(total)
say(f"the sum is {total.item():g}")
metrics.exact(sum=total.item())

# %% [markdown]
# `say` prints whole lines. The notebook shows once what all ranks say.

# %% [markdown]
# ## Rank and local rank (CORE, 2 min)
#
# ![Two nodes with four ranks each: ranks 0 to 7 in the world, local ranks 0 to 3 on each node](../assets/00_nodes.svg)
#
# A cluster is made of **nodes**, machines with a few GPUs each, so there are two ways to count. The rank counts
# through the whole world and decides *what* you work on: which part of the data, which piece of the model. The
# **local rank** starts from 0 on every node and decides *where*: `torch.device("cuda", local_rank)`.
#
# **Predict.** Eight ranks on two nodes, as in the figure. On which node is rank 6, and what is its local rank?
#
# <details><summary>Answer</summary>
#
# Node 1, local rank 2: divide 6 by the 4 ranks *per node*; the remainder is the local rank. On a laptop rank and local
# rank are equal, so whoever mixes them up finds out on the cluster.
#
# </details>

# %%
# %%ranks
say(f"local rank {ranks.local_rank} of {ranks.local_world_size}, works on {device}")

# %% [markdown]
# ### Divided by the wrong number (MORE, 1 min)
#
# [A published multi-node
# guide](https://github.com/LambdaLabsML/distributed-training-guide/blob/108b69569d3396cbef040374faf2074329382750/06-tensor-parallel/train_llm.py)
# divides by the number of *nodes* in a comment, beside code that does it right.


# %% tags=["nbval-check-output"]
# %%ranks
def node_and_local_rank(rank, ranks_per_node):
    return divmod(rank, ranks_per_node)


if rank == 0:
    for num_nodes in (1, 2):
        right = [node_and_local_rank(r, 8 // num_nodes)[0] for r in range(8)]
        published = [r // num_nodes for r in range(8)]
        nodes = "1 node" if num_nodes == 1 else f"{num_nodes} nodes"
        say(f"{nodes}: ranks 0 to 7 are on node {right}; rank // num_nodes says {published}")

# %% [markdown]
# The comment is wrong on one node too, but there nobody asks for the node number. On two nodes it invents four.

# %% [markdown]
# ## Who told me? (CORE, 5 min)
#
# ![torchrun, mpiexec and srun start processes and set their own variables; join() reads them and makes one group](../assets/00_launchers.svg)
#
# A process cannot know by itself that it has siblings. Whoever started it, its **launcher**, leaves a letter in its
# environment variables. Every launcher has its own names for rank, world size and local rank:

# %%
# %%ranks
LETTERS = {
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "PALS": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"),  # HPE Cray's mpiexec: no size of its own
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
}
names = sorted({name for three in LETTERS.values() for name in three})
letter = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
say("  ".join(letter) or "no letter of these five launchers: the notebook started me, or you did")

# %% [markdown]
# ### Build A: who am I?
#
# Write the first thing that `join()` does: turn the variables of a process into `(rank, world_size, local_rank)`,
# three whole numbers. `LETTERS` is given. A letter counts if all three of its names are there; without one you are
# `(0, 1, 0)`. Some processes find two letters, such as the ranks of an `mpiexec` inside a Slurm job, or those of a
# `torchrun` that an `mpiexec` started. The launcher that started *this* process is right.


# %%
# %%ranks
def who_am_i(environ):
    """(rank, world_size, local_rank) from the variables of a process, {name: text}."""
    raise NotImplementedError  # your turn


checks.who_am_i(who_am_i, ranks)

# %% [markdown]
# #### Solution A


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution A
def who_am_i(environ):
    for launcher in ("torchrun", "Open MPI", "PALS", "MPICH", "srun"):  # innermost first
        names = LETTERS[launcher]
        if all(name in environ for name in names):
            return tuple(int(environ[name]) for name in names)
    return 0, 1, 0


checks.who_am_i(who_am_i, ranks, solution=True)

# %% [markdown]
# ### Hello from two libraries (MORE, 1 min)
#
# Two libraries read the letter for you: MPI, here by way of `mpi4py`, and `torch.distributed`. They should agree.

# %%
# %%ranks
from manyhands import mpi_world

world = mpi_world()  # None where the launcher made no MPI world
if world is not None:
    say(f"MPI says: rank {world.Get_rank()} of {world.Get_size()}")
elif rank == 0:
    say("no MPI world here; inside a job this makes one: mpiexec -n 4 python scripts/00_start.py")
say(f"torch.distributed says: rank {dist.get_rank()} of {dist.get_world_size()}")

# %% [markdown]
# ## One file, four ways (CORE, 7 min)
#
# The notebook was the first way to run this lesson. The other three run `scripts/00_start.py`, which holds the same
# cells. Type them on your laptop, or inside a job, in a terminal in the course's folder:
#
# ```bash
# source .venv/bin/activate
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/00_start.py    # torchrun of this Python
# mpiexec -n 4 python scripts/00_start.py                                                # MPI
# python scripts/00_start.py                                                             # alone: a world of one
# ```
#
# All four work because of `join()`. Here is the core of it in bare PyTorch, as many published scripts have it
# ([nanoGPT](https://github.com/karpathy/nanoGPT/blob/master/train.py) is one). It reads only torchrun's letter, which
# also says where the ranks meet and form a **process group**: at `MASTER_ADDR` and `MASTER_PORT`.
#
# **Predict.** Read the next cell before you run it. It starts two processes with torchrun, then two with mpiexec. Which
# ranks will speak?
#
# <details><summary>Answer</summary>
#
# Under torchrun, 0 of 2 and 1 of 2. Under mpiexec, *0 of 1* twice: there is no `RANK` in its letter, so each process
# believes that it is alone.
#
# </details>

# %% tags=["active-ipynb"]
# from manyhands.notebook.small_programs import run_under
#
# bare = """
# import os, torch, torch.distributed as dist
#
# rank, world_size, local_rank = 0, 1, 0
# if "RANK" in os.environ:  # I am one of many
#     rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
#     if torch.cuda.device_count() > local_rank:
#         torch.cuda.set_device(local_rank)  # where I work
#     dist.init_process_group()  # meet the others at MASTER_ADDR:MASTER_PORT
# print(f"rank {rank} of {world_size}, MASTER_ADDR is {os.environ.get('MASTER_ADDR', 'not set')}")
# if dist.is_initialized():
#     dist.destroy_process_group()
# """
# for launcher in ("torchrun", "mpiexec"):
#     print(f"bare, {launcher}:", *run_under(launcher, bare, 2), sep="\n  ")

# %% [markdown]
# ![One world of four ranks, and beside it four processes that are each rank 0 of a world of one](../assets/00_worlds.svg)
#
# No error, exit status 0. In a real job each of these worlds trains on all of the data and overwrites the same
# checkpoint. The same happens when `mpiexec` belongs to one MPI and `mpi4py` to another. The cure is to read every letter:

# %% tags=["active-ipynb"]
# mended = """
# from manyhands import join, leave
# ranks = join(globals(), name="mended", quiet=True)
# print(f"rank {ranks.rank} of {ranks.world_size}, launcher: {ranks.launcher}")
# leave()
# """
# for launcher in ("mpiexec", "python"):
#     print(f"mended, {launcher}:", *run_under(launcher, mended, 2), sep="\n  ")

# %% [markdown]
# ### Build B: call the roll
#
# You asked for `started` processes. Are they one world? Let them find out with a single all-reduce. Return a tensor of
# `started` numbers, the same on every rank: place *r* says how many processes call themselves rank *r*. Each of them
# knows only its own `rank`.


# %%
# %%ranks
def roll_call(rank, started):
    """How many processes call themselves rank 0, 1, ..., started - 1: a tensor, the same on all ranks."""
    raise NotImplementedError  # your turn


checks.roll_call(roll_call, ranks)

# %% [markdown]
# #### Solution B


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution B
def roll_call(rank, started):
    roll = torch.zeros(started)
    roll[rank] = 1  # each rank ticks itself off
    dist.all_reduce(roll)
    return roll


checks.roll_call(roll_call, ranks, solution=True)

# %% tags=["nbval-check-output"]
# %%ranks
say(f"{world_size} started, the roll is {roll_call(rank, world_size).int().tolist()}")

# %% [markdown]
# Only ones: a single world. Each of four worlds of one would read `[1, 0, 0, 0]`. A two means that two processes claim
# the same rank.

# %% [markdown]
# ## The smoke test (CORE, 3 min)
#
# Electricians switch a new device on and look for smoke. The smoke test of a training machine is a model that nobody
# cares about, trained for a hundred steps. It needs everything to work, from launcher to optimizer. Ours is a stack of
# linear layers, 128-1024-512-256-128-128, that learns to return its random input.


# %% tags=["nbval-check-output"]
# %%ranks
def mlp():
    torch.manual_seed(0)  # the same start on every rank: replicas must be equal
    sizes = [(128, 1024), (1024, 512), (512, 256), (256, 128), (128, 128)]
    return torch.nn.Sequential(*[torch.nn.Linear(a, b) for a, b in sizes]).to(device)


num_params = sum(p.numel() for p in mlp().parameters())
if rank == 0:
    say(f"{num_params:,} parameters")

# %% [markdown]
# [DDP](../assets/glossary.md#ddp), the subject of lesson 03, is one line here: it makes `backward` average the gradients
# over the ranks.


# %%
# %%ranks
def build():
    """Model under DDP, its optimizer, and this rank's own random numbers."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    own = torch.Generator().manual_seed(rank)  # seeds differ on purpose: each rank has data of its own
    return torch.nn.parallel.DistributedDataParallel(model), optimizer, own


def clock():
    synchronise(device)  # a GPU queues its work: first let it finish, then look
    return time.perf_counter()


# %% [markdown]
# One step returns the loss, and the seconds of the step `dt`, of its forward `dtf` and of its backward `dtb`.


# %%
# %%ranks
def step(ddp, optimizer, own):
    t0 = clock()
    x_BD = torch.randn(batch, 128, generator=own).to(device)
    loss = (ddp(x_BD) - x_BD).square().sum()
    t1 = clock()
    loss.backward()
    t2 = clock()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), clock() - t0, t1 - t0, t2 - t1


# %%
# %%ranks --timeout 300
begun = time.perf_counter()
parts = build()
start_s = joined_s + time.perf_counter() - begun
losses, dt, dtf, dtb = zip(*[step(*parts) for _ in range(iterations)], strict=True)  # all ranks, all steps
if rank == 0:
    lines = ["step     loss    dt ms   dtf ms   dtb ms  samples/s"]
    for i in sorted({0, 1, *range(0, iterations, max(1, iterations // 5)), iterations - 1}):
        ms = "".join(f"{1e3 * times[i]:9.1f}" for times in (dt, dtf, dtb))
        lines.append(f"{i:4d} {losses[i]:8.0f}{ms} {world_size * batch / dt[i]:10.0f}")
    say("\n".join(lines))

# %% [markdown]
# The ranks saw different data. If the averaging works, all made the same updates, and they hold *one* model, equal to
# the last bit. Fingerprints tell, without sending a model around.

# %% tags=["nbval-check-output"]
# %%ranks
mine, prints = fingerprint(parts[0].parameters()), [None] * world_size
dist.all_gather_object(prints, mine)
say(f"{world_size} ranks, distinct models: {len(set(prints))}")
assert len(set(prints)) == 1
metrics.exact(num_params=num_params, losses=list(losses), model=mine)

# %% [markdown]
# ### What the step sends, and plots for a log file (MORE, 3 min)
#
# **Predict.** How many bytes of float32 gradients do 837,632 parameters have?
#
# <details><summary>Answer</summary>
#
# One gradient of 4 bytes for each: 3,350,528 bytes.
#
# </details>
#
# `wire` counts what a rank gives to the library in one more step, and, on Linux, what its sockets deliver. An all-reduce
# on a ring of *n* ranks sends 2(*n*-1)/*n* times its data; lesson 02 builds it. Headers come on top.

# %%
# %%ranks
from manyhands.measure import wire

with wire.watch() as seen:
    step(*parts)
payload, gradients = seen.payload_bytes("all_reduce"), 4 * num_params
ring = wire.ring_all_reduce_bytes(gradients, world_size)
if rank == 0:
    say(f"all-reduces carry {payload:,} bytes, predicted {gradients:,}, ratio {payload / gradients:.3f}")
    if seen.transport_bytes and ring:
        sent = seen.transport_bytes
        say(f"the sockets delivered {sent:,} bytes, predicted {ring:,.0f}, ratio {sent / ring:.3f}")
metrics.exact(all_reduce_bytes=payload)

# %% [markdown]
# A terminal on a cluster has no pictures, but it has characters. Plots made of them survive in every log file. On one
# device backward takes about twice as long as forward. Anything beyond that is communication and, with more ranks than
# cores, waiting for a core.

# %%
# %%ranks
from statistics import median

from manyhands.launch.program import text_plot

if rank == 0:
    say(text_plot(losses, "loss", height=13))
    for name, times in (("dtf: forward", dtf), ("dtb: backward and communication", dtb)):
        say(text_plot([1e3 * t for t in times], f"{name}, ms", height=9))
    say(f"at the median, dtb is {median(dtb) / median(dtf):.1f} times dtf")

# %% [markdown]
# ## Experiment: what does a short trial tell you? (CORE, 3 min)
#
# How long will a thousand steps take? You time ten with a stopwatch, from start to end, and divide.
#
# **Predict.** Imports, joining and building take 2 s, once; a step takes 40 ms. How far off are you?
#
# <details><summary>Answer</summary>
#
# (2 s + 10 · 0.04 s) / 10 = 240 ms per step: six times too much. Even 450 steps would say 44 ms.
#
# </details>
#
# Below, the first ten steps of the smoke test give two guesses: by stopwatch, and by the median without the first step.
# The points are the steps *after* them, in blocks, with whiskers from the fastest to the slowest.

# %% jupyter={"source_hidden": true}
# %%ranks --timeout 300
catch_up(globals(), "mlp", "build", "clock", "step")
if "dt" not in globals():  # only if you skipped the smoke test
    begun = time.perf_counter()
    parts = build()
    start_s = joined_s + time.perf_counter() - begun
    dt = [step(*parts)[1] for _ in range(iterations)]

# %%
# %%ranks
from statistics import median

from manyhands.plots.times import against_trial

trial = min(10, iterations // 2)
stopwatch_s = (start_s + sum(dt[:trial])) / trial
typical_s = median(dt[1:trial])
if rank == 0:
    figure = against_trial(dt, trial, stopwatch_s, typical_s)
    show(figure, "trial", "ms per step after a trial, and as lines what it said by stopwatch and by median")

# %%
# %%ranks
rest = dt[trial:]
after_s = median(rest)
if rank == 0:
    spread = f"({1e3 * min(rest):.1f} to {1e3 * max(rest):.1f})"
    say(f"start {start_s:.2f} s; median of {len(rest)} later steps {1e3 * after_s:.1f} ms {spread}")
    for how, guess_s in (("stopwatch", stopwatch_s), ("median", typical_s)):
        say(f"the trial by {how}: {1e3 * guess_s:.1f} ms, {guess_s / after_s:.2f} times that")
metrics.measured(startup_s=start_s, median_step_s=after_s, samples_per_s=world_size * batch / after_s)

# %% [markdown]
# The start happens once, but the stopwatch divides it by ten steps. (If yours was short, these ranks had done it before.)
# The median leaves out the first step, which allocates buffers and opens connections: the **warm-up**. The rest spreads,
# because a collective is as slow as its slowest rank. Report the median and the spread.

# %% [markdown]
# ## When to read the clock (MORE, 3 min)
#
# ![Drawn to scale: Python has queued forward and backward after 17 ms of a 284 ms step](../assets/00_clock.svg)
#
# A GPU works through a queue. `loss.backward()` puts work into it and returns, so a clock read then has timed the
# *queueing*. A [published
# transcript](https://github.com/saforem2/personal_site/blob/82205852654c9b504ce732a0aae2e358e9b0bf2d/docs/talks/alcf-hpc-workshop-2024/alcf-hpc-workshop-2024.md)
# shows it: forward and backward of a GPT on four GPUs take 17 ms of a 284 ms step. A CPU does not queue its arithmetic, but
# communication is queued everywhere.
#
# **Predict.** An all-reduce of 16 MB is started with `async_op=True`. What part of its time has passed when the
# call returns?

# %%
# %%ranks
from statistics import median

big, returned_ms, done_ms = torch.ones(4_000_000, device=device), [], []
for _ in range(6):
    dist.barrier()
    begun = time.perf_counter()
    work = dist.all_reduce(big, async_op=True)
    returned_ms.append(1e3 * (time.perf_counter() - begun))
    work.wait()
    synchronise(device)  # on a GPU even `wait` only queues
    done_ms.append(1e3 * (time.perf_counter() - begun))

# %%
# %%ranks
if rank == 0:
    returned, done = median(returned_ms[1:]), median(done_ms[1:])  # the first one warmed up
    say(f"the call returned after {returned:.2f} ms ({min(returned_ms[1:]):.2f} to {max(returned_ms[1:]):.2f})")
    say(f"the sum was there after {done:.1f} ms ({min(done_ms[1:]):.1f} to {max(done_ms[1:]):.1f})")
    say(f"read at the return, the clock makes the network look {done / returned:.0f} times as fast")

# %% [markdown]
# This is why `clock()` synchronises first. On a CPU that does nothing; on a GPU it is the difference between 17 ms
# and 284.

# %% [markdown]
# ## Exercises (MORE, 18 min)
#
# ### Exercise 1: one world or many?
#
# You have only a log: `started` processes were started, and `said` lists what they said about themselves as `(rank,
# world_size)`, in no particular order. Is it one world? Worlds of one are not the only way to go wrong.


# %%
# %%ranks
def is_one_world(started, said):
    raise NotImplementedError  # your turn


checks.is_one_world(is_one_world, ranks)

# %% [markdown]
# #### Solution 1


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
def is_one_world(started, said):
    # each rank exactly once, and all agree on the size
    return sorted(said) == [(rank, started) for rank in range(started)]


checks.is_one_world(is_one_world, ranks, solution=True)

# %% [markdown]
# ### Exercise 2: whose turn is it?
#
# ![Ranks 0 to 3 write their line one after the other; each sends the pen to the next when done](../assets/00_pen.svg)
#
# The notebook sorts what ranks print. A file does not: whoever comes first writes first. Let every rank append one
# line to one file, **in rank order**, with nothing but `dist.send` and `dist.recv`. Call `append("...")` to write
# your line. It is slowest on rank 0, so that a rank that does not wait overtakes. The check reads the file and
# counts messages.


# %%
# %%ranks
def in_turn(append, ranks):
    raise NotImplementedError  # your turn


checks.in_turn(in_turn, ranks)

# %% [markdown]
# #### Solution 2


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
def in_turn(append, ranks):
    pen = torch.zeros(1)
    if ranks.rank > 0:
        dist.recv(pen, ranks.rank - 1)  # wait until the rank before has written
    append(f"rank {ranks.rank} was here")
    if ranks.rank < ranks.world_size - 1:
        dist.send(pen, ranks.rank + 1)


checks.in_turn(in_turn, ranks, solution=True)

# %% [markdown]
# What the pen says does not matter, only that it comes. Much of what is called synchronisation is no more than
# this.
#
# ### Exercise 3: read the profile
#
# Ten steps of the smoke test in one process, under Python's profiler. A deeper row is part of the row above it: the
# seconds of `Adam.__init__` contain those of the import. Of the rows one level below the whole, whatever was called
# once happened once; the others happen in each step.

# %% tags=["nbval-check-output"]
# %%ranks
if rank == 0:
    say("calls  seconds  function")
    for depth, function, calls, total_s in checks.PROFILE:
        say(f"{calls:5d}  {total_s:7.3f}  {'  ' * depth}{function}")

# %% [markdown]
# A colleague concludes: 1.528 s for ten steps, so a thousand take 153 s. Write the function that gives the right
# answer, for any profile of this form and any number of steps.


# %%
# %%ranks
def predict_seconds(profile, steps):
    """profile: rows (depth, function, calls, seconds) as above; the row of depth 0 is the whole."""
    raise NotImplementedError  # your turn


checks.predict_seconds(predict_seconds, ranks)

# %% [markdown]
# #### Solution 3


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
def predict_seconds(profile, steps):
    # deeper rows are inside those of depth 1
    parts = [(calls, total_s) for depth, _, calls, total_s in profile if depth == 1]
    once_s = sum(total_s for calls, total_s in parts if calls == 1)
    each_s = sum(total_s / calls for calls, total_s in parts if calls > 1)
    return once_s + each_s * steps


checks.predict_seconds(predict_seconds, ranks, solution=True)
if rank == 0:
    say(f"1000 steps: {predict_seconds(checks.PROFILE, 1000):.1f} s")

# %% [markdown]
# 11.6 s, not 153. In that profile 93 % of the ten steps was an import: in torch 2.13 the first optimizer loads a part
# of PyTorch's compiler. The transcript of the clock above has the same: 2.0 of the 2.9 s of its profile are the first
# `Adam.__init__`.

# %% [markdown]
# ## A bug from the zoo (CORE, 2 min)
#
# The [zoo](../assets/glossary.md#zoo) collects real mistakes from published code. A [published
# transcript](https://github.com/saforem2/personal_site/blob/82205852654c9b504ce732a0aae2e358e9b0bf2d/docs/talks/alcf-hpc-workshop-2024/alcf-hpc-workshop-2024.md)
# of this very smoke test goes on with a GPT that reports 14 samples per second on four GPUs. In our words:


# %%
# %%ranks
def logged_samples_per_s(step_s):
    return world_size / step_s


# %% [markdown]
# **Find it by measuring.** Count the samples, divide by the seconds, compare.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "mlp", "build", "clock", "step")

# %%
# %%ranks
from manyhands.measure.timing import max_over_ranks

steps, parts = 10, build()
dist.barrier()
begun = clock()
for _ in range(steps):
    step(*parts)
loop_s = max_over_ranks(clock() - begun, ranks)  # all ranks call it: the slowest decides
counted = steps * batch * world_size / loop_s
logged = logged_samples_per_s(loop_s / steps)
if rank == 0:
    say(f"logged {logged:.1f}, counted {counted:.1f} samples per second, ratio {counted / logged:.1f}")

# %% [markdown]
# <details><summary>What is wrong?</summary>
#
# The ratio is `batch`: the line counts one sample per rank and step. In the transcript a step took 0.283 s on four ranks
# with 64 samples each: 4 / 0.283 = 14 were logged, and 64 times as many, 905, were true. The unit gives it away:
# `world_size / step_s` has no samples in it.
#
# </details>

# %% [markdown]
# ### Exercise 4: mend it (MORE, 6 min)
#
# You get the batch of one rank, and how long a step takes on *each* rank. How many samples per second does the
# world do?


# %%
# %%ranks
def samples_per_s(batch, step_s):
    """batch: samples per rank; step_s: list with the seconds of one step on each rank."""
    raise NotImplementedError  # your turn


checks.samples_per_s(samples_per_s, ranks)

# %% [markdown]
# #### Solution 4


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
def samples_per_s(batch, step_s):
    # nobody starts the next step before the slowest rank has done this one
    return batch * len(step_s) / max(step_s)


checks.samples_per_s(samples_per_s, ranks, solution=True)

# %% [markdown]
# ## Threads and cores (MORE, 3 min)
#
# ![Four ranks on two cores: with one thread each two wait for a core, with two threads each six wait](../assets/00_threads.svg)
#
# A single PyTorch process uses all cores of a machine: it cuts a matrix product into one piece per core. With four
# processes, that makes four times too many pieces. So `join()` counts the cores that you may really use, by the
# process's *affinity* and by the limit of its control group (a container with `cpu.max` of 2 cores may see 64),
# and gives ranks that share cores one thread each.
#
# **Predict.** A product of two 256 x 256 matrices on all ranks at once, first with one thread per rank, then with
# two. If there are fewer cores than threads: faster, the same, or slower? By what factor?

# %%
# %%ranks
from statistics import median

from manyhands.launch import devices
from manyhands.measure.timing import median_s

usable = devices.cores(devices.look(os.environ))
a, threads_now, ms = torch.randn(256, 256), torch.get_num_threads(), {1: [], 2: []}
for _ in range(9):
    for threads in ms:  # in turn: what else the machine does meets both
        torch.set_num_threads(threads)
        ms[threads].append(1e3 * median_s(lambda: a @ a, repeats=1, ranks=ranks).slowest_s)
torch.set_num_threads(threads_now)
if rank == 0:
    for threads, times in ms.items():
        spread = f"{median(times):.2f} ms ({min(times):.2f} to {max(times):.2f})"
        say(f"{world_size} ranks x {threads} on {usable} cores: {spread} on the slowest rank")
    say(f"with 2 threads per rank it takes {median(ms[2]) / median(ms[1]):.1f} times as long")

# %% [markdown]
# With more threads than cores the arithmetic is not what costs. The two halves of a product wait for each other, and
# they wait *spinning*: the thread that is done keeps its core busy asking "ready?", while the other half queues for
# that very core. The rule: ranks x threads per rank = cores. Launchers can also bind each rank to cores of its own:
# `mpiexec -bind-to core` (Hydra), `--cpu-bind depth` (PALS), `srun --cpu-bind=cores`.

# %% [markdown]
# ## On the cluster
#
# Inside a job:
#
# ```bash
# # one node
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/00_start.py --iterations 200
# # two nodes: Hydra and PALS; Open MPI wants --map-by ppr:4:node in place of -ppn 4
# mpiexec -n 8 -ppn 4 python scripts/00_start.py --iterations 200
# # two nodes, Slurm
# srun --nodes 2 --ntasks 8 --ntasks-per-node 4 python scripts/00_start.py --iterations 200
# ```
#
# **Before an event**, `make doctor` looks at the machine, this script is the second look, and `make preflight` runs
# everything.
#
# **On GPUs**, `join()` puts each rank on the GPU of its local rank, and the group becomes `cpu:gloo,cuda:nccl`.
#
# **What to look for:** the first lines, with ranks, hosts, devices and launcher. "1 rank" four times is the mistake of
# this lesson. "on cpu because ..." on a GPU node means fewer GPUs than ranks, or a module that is not loaded.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the class on a cluster</summary>
#
# Run this script on the cluster the day before, on as many nodes as the class will use, and keep its output: it is the
# first thing to compare when something is odd. A participant whose first line says `1 rank` under mpiexec has the
# system's mpiexec in front of the environment's in PATH.
#
# </details>

# %% [markdown]
# ## Recap
#
# 1. A rank is a process: one program, started *n* times, each copy with its own memory. This is SPMD.
# 2. The rank says what you work on; the local rank says where.
# 3. A launcher tells each process who it is by environment variables, each launcher by its own.
# 4. Four processes are a world of four only if they found each other: look at the first line of the log.
# 5. Time after a warm-up and a synchronise, report the median and its spread, and give the number its unit.
#
# ## Further reading
#
# - [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html): what it sets, and how nodes find each other.
# - [mpi4py's tutorial](https://mpi4py.readthedocs.io/en/stable/tutorial.html): MPI itself.
# - [srun](https://slurm.schedmd.com/srun.html), "Output environment variables".
# - Next: [lesson 02](02_collectives.ipynb) builds the all-reduce that you have used here; lesson 01 stays on one
#   device.

# %%
# %%ranks
path = metrics.write()
if rank == 0:
    say(f"metrics: {'/'.join(path.parts[-3:])}")
leave()

# %% tags=["active-ipynb"]
# hands.stop()
