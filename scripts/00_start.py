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
# **30 minutes** for the sections marked CORE, 60 with those marked MORE.
#
# Every multi-GPU job starts the same way: several copies of one program, and each must find out which one it is. Below,
# that goes wrong, and nothing complains. You will catch it with two lines of your own.
#
# After this lesson **you can**
# - say what *rank*, *local rank*, *world size* and *SPMD* mean;
# - tell one world of four from four worlds of one;
# - run one file four ways: in this notebook, under `torchrun`, under `mpiexec`, and alone;
# - check a machine before an event, and time it honestly.
#
# **You need** to have seen a training loop in PyTorch. No MPI, no cluster, no GPU.
#
# **New here:** [rank](../assets/glossary.md#rank), [local rank](../assets/glossary.md#local-rank), [world
# size](../assets/glossary.md#world-size), [SPMD](../assets/glossary.md#spmd), [node](../assets/glossary.md#node),
# [launcher](../assets/glossary.md#launcher), [process group](../assets/glossary.md#process-group), [smoke
# test](../assets/glossary.md#smoke-test), [warm-up](../assets/glossary.md#warm-up).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 1, one program four times 2, four copies 7, the roll 6, launchers 7, one file four
# ways 2, smoke test 2, bug 1. Let everyone run the first cells before you talk.
#
# *Say:* "A rank is a process. Not a GPU, not a machine, not a core."
#
# *Three usual mistakes:* looking for the rank that "has the result" of an all-reduce; believing that a variable of
# a plain cell exists on the ranks; reading local rank as rank.
#
# *When late:* show the stored outputs of the smoke test; keep the three builds.
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
# These are the lesson's settings. In a script they are flags: `--iterations 20`.

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
iterations = 100  # steps of the smoke test, 10 to 10000
batch = 64  # samples per rank and step, at least 1

# %% [markdown]
# The next cell starts four processes behind this notebook. From then on a cell that begins with `%%ranks` runs in all
# of them; any other cell runs in the notebook itself. Outputs that you see before you run a cell were recorded. (On a
# cluster's [login node](../assets/glossary.md#login-node) you get two processes, without MPI: start your server on a
# [compute node](../assets/glossary.md#compute-node).)

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("00_start", globals())

# %%
# %%ranks
import os
import time

import torch
import torch.distributed as dist
from manyhands import ____, Metrics, card, compare, fingerprint, join, leave, say, show
from manyhands.checks import start as checks

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
metrics = Metrics(ranks, parameters={"iterations": iterations, "batch": batch})

# %% [markdown]
# ## One program, started four times (CORE, 2 min)
#
# Many published training scripts begin like the program in the next cell
# ([nanoGPT](https://github.com/karpathy/nanoGPT/blob/master/train.py) is one). The cell starts it four times with
# `mpiexec`, as your cluster may do.
#
# **Predict.** How many *different* ranks will the four lines name? Replace the blank, `____`, by your guess, and run the
# three cells.

# %%
# %%ranks
guess_ranks = ____  # your turn: type a number
printed = []  # what the four copies print

# %% tags=["active-ipynb"]
# %%ranks --timeout 120
# from manyhands.notebook.small_programs import run_under
#
# bare = """
# import os, torch, torch.distributed as dist
# rank, world_size = 0, 1
# if "RANK" in os.environ:  # I am one of many
#     dist.init_process_group("gloo")  # meet the others
#     rank, world_size = dist.get_rank(), dist.get_world_size()
#     dist.destroy_process_group()
# print(f"rank {rank} of {world_size}")
# """
# printed = run_under("mpiexec", bare, 4) if rank == 0 else []

# %%
# %%ranks
compare("different ranks under mpiexec", "guess_ranks", 1, because=printed)

# %% [markdown]
# ![One world of four ranks, and beside it four processes that are each rank 0 of a world of one](../assets/00_worlds.svg)
#
# There is no error, and the [exit status](../assets/glossary.md#exit-status) is 0. In a real job each of the four
# trains on all of the data and overwrites the same checkpoint.

# %% [markdown]
# ## Four copies of one program (CORE, 7 min)
#
# ![One file is started as four processes, each with its own memory and its own value of x](../assets/00_spmd.svg)
#
# The figure shows what should happen. You write *one* program and start it four times. The copies differ only in their
# **rank**, counted from 0. The number of copies is the **world size**. That is **SPMD**, *single program, multiple
# data*. They share no memory: when rank 1 sets a variable, rank 2 does not notice.

# %%
# %%ranks
x = torch.tensor([rank + 1.0], device=device)
print(f"hello from rank {rank} of {world_size}: process {os.getpid()} holds x = {x.item():g}")

# %% [markdown]
# **Predict.** Now all ranks add up their `x` with an [all-reduce](../assets/glossary.md#all-reduce). What does rank 0
# hold afterwards?

# %%
# %%ranks
guess_sum = ____  # your turn: type a number

# %% [markdown]
# ### Build A: the sum over all ranks
#
# Fill in the call of `torch.distributed` that adds up `x` over all ranks. A check says whether it is right. A
# solution is folded below.


# %%
# %%ranks
def sum_over_ranks(x):
    total = x.clone()
    dist.____(total)
    return total


checks.sum_over_ranks(sum_over_ranks, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution A</summary>
#
# ```python
# def sum_over_ranks(x):
#     total = x.clone()
#     dist.all_reduce(total)
#     return total
# ```
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
total = sum_over_ranks(x)
compare("the sum on rank 0", "guess_sum", world_size * (world_size + 1) // 2, because=f"rank 0 has {total.item():g}")
metrics.exact(sum=total.item())

# %% [markdown]
# *Every* rank has the sum: that is the "all" in all-reduce. `say` prints a line per rank; identical lines are shown
# once. Every rank must make the call: if one does not, the others wait.

# %% [markdown]
# ## Call the roll (CORE, 6 min)
#
# You started `started` processes. Are they one world? A *roll call* shows who is present. It takes a single all-reduce.
#
# ### Build B: who is here?
#
# Return a tensor of `started` numbers, the same on every rank: element *r* counts the processes that claim rank *r*.


# %%
# %%ranks
def roll_call(rank, started):
    ____  # four lines: an empty roll, your own tick in it, the sum over all ranks, and return it


checks.roll_call(roll_call, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def roll_call(rank, started):
#     roll = torch.zeros(started)
#     roll[rank] = 1
#     dist.all_reduce(roll)
#     return roll
# ```
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
say(f"{world_size} started, the roll is {torch.as_tensor(roll_call(rank, world_size)).int().tolist()}")

# %% [markdown]
# Only ones: one world. Your tick and all-reduce, put into the first program (unfold it), catch the four that are
# alone:

# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# from manyhands.notebook.small_programs import run_under
#
# caught = """
# import os, torch, torch.distributed as dist
# rank, roll = int(os.environ.get("RANK", 0)), torch.zeros(4)
# roll[rank] = 1
# if "RANK" in os.environ:
#     dist.init_process_group("gloo")
#     dist.all_reduce(roll)
#     dist.destroy_process_group()
# print(f"  rank {rank}: the roll is {roll.int().tolist()}")
# """
# for launcher in ("mpiexec", "torchrun"):
#     print(launcher, *run_under(launcher, caught, 4), sep="\n")

# %% [markdown]
# ## Who told me? (CORE, 7 min)
#
# ![torchrun, mpiexec and srun start processes and set their own variables; join() reads them and makes one group](../assets/00_launchers.svg)
#
# A process cannot know by itself that it has siblings. Its **launcher** tells it, through environment variables, and
# every launcher has its own names for rank, world size and local rank. The program above reads only torchrun's.
#
# ### Build C: who am I?
#
# Turn the variables of a process into `(rank, world_size, local_rank)`, three whole numbers. A launcher qualifies only
# if all three of its variables are set; if none does, return `(0, 1, 0)`. Sometimes several qualify: `mpiexec` may have
# started `torchrun`. Then `torchrun` is right, because it started the process itself. The table lists the innermost
# launcher first.


# %%
# %%ranks
VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "PALS": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"),  # HPE Cray's mpiexec
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}


def who_am_i(environ):
    """(rank, world_size, local_rank) from the variables of a process, {name: text}."""
    ____  # three lines: the first launcher whose names are all in `environ` tells
    return 0, 1, 0


checks.who_am_i(who_am_i, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution C</summary>
#
# ```python
# def who_am_i(environ):
#     for names in VARIABLES.values():
#         if all(name in environ for name in names):
#             return tuple(int(environ[name]) for name in names)
#     return 0, 1, 0
# ```
#
# </details>

# %% [markdown]
# `join()`, which you ran at the start, first reads these variables. Then it brings the ranks together in a **process
# group** and says who is here. With `join()` the four programs are one world:

# %% tags=["active-ipynb"]
# from manyhands.notebook.small_programs import run_under
#
# mended = """
# from manyhands import join, leave
# ranks = join(globals(), name="mended", quiet=True)
# print(f"rank {ranks.rank} of {ranks.world_size}, launcher: {ranks.launcher}")
# leave()
# """
# print(*run_under("mpiexec", mended, 4), sep="\n")

# %% [markdown]
# ### Hello from two libraries (MORE, 1 min)
#
# Two libraries read these variables for you: MPI, here through `mpi4py`, and `torch.distributed`. They should agree.

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
# ## One file, four ways (CORE, 2 min)
#
# The notebook is the first way to run this lesson. The other three run `scripts/00_start.py`, which holds the same
# cells. Try them in a terminal, in the course's folder:
#
# ```bash
# source .venv/bin/activate
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/00_start.py    # torchrun of this Python
# mpiexec -n 4 python scripts/00_start.py                                                # MPI
# python scripts/00_start.py                                                             # alone: a world of one
# ```
#
# ![Two nodes with four ranks each: ranks 0 to 7 in the world, local ranks 0 to 3 on each node](../assets/00_nodes.svg)
#
# A cluster is made of **nodes**, machines with a few GPUs each. The rank is unique across the job and decides *what* you
# work on. The **local rank** starts from 0 on every node and decides *where*: on `torch.device("cuda", local_rank)` if
# the process sees all GPUs of its node, on index 0 if the scheduler shows it only its own (`--gpus-per-task=1`).
#
# **Predict.** Eight ranks on two nodes, as in the figure. What is the local rank of rank 6?

# %%
# %%ranks
guess_local = ____  # your turn: type a number

# %% tags=["nbval-check-output"]
# %%ranks
compare("the local rank of rank 6", "guess_local", 6 % 4)

# %% [markdown]
# On a laptop rank and local rank are equal, so code that mixes them up fails only on the cluster.

# %% [markdown]
# ## The smoke test (CORE, 2 min)
#
# Electricians switch a new device on and look for smoke. The smoke test of a training machine is a small model, trained
# for a hundred steps, that needs everything to work, from launcher to optimizer. Ours is a stack of linear layers,
# 128-1024-512-256-128-128, that learns to return its random input. [DDP](../assets/glossary.md#ddp), which lesson 03
# builds, averages the gradients over the ranks. Unfold the next cell to read it.


# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.measure.timing import synchronise


def mlp():
    torch.manual_seed(0)  # the same start on every rank: replicas must be equal
    sizes = [(128, 1024), (1024, 512), (512, 256), (256, 128), (128, 128)]
    return torch.nn.Sequential(*[torch.nn.Linear(a, b) for a, b in sizes]).to(device)


def build():
    """Model under DDP, its optimizer, and this rank's own random numbers."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    own = torch.Generator().manual_seed(rank)  # seeds differ on purpose: each rank has data of its own
    return torch.nn.parallel.DistributedDataParallel(model), optimizer, own


def clock():
    synchronise(device)  # a GPU queues its work: first let it finish, then look
    return time.perf_counter()


def step(ddp, optimizer, own):
    """The loss, and the seconds of the step, of its forward and of its backward."""
    t0 = clock()
    x_BD = torch.randn(batch, 128, generator=own).to(device)
    loss = (ddp(x_BD) - x_BD).square().sum()
    t1 = clock()
    loss.backward()
    t2 = clock()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), clock() - t0, t1 - t0, t2 - t1


def train():
    """Model with its optimizer and data, seconds to build them, then of all steps losses and three durations."""
    begun = clock()
    parts = build()
    start_s = clock() - begun
    return parts, start_s, *zip(*[step(*parts) for _ in range(iterations)], strict=True)


def table(losses, dt, dtf, dtb):
    lines = ["step     loss    dt ms   dtf ms   dtb ms  samples/s"]
    for i in sorted({0, 1, *range(0, iterations, max(1, iterations // 5)), iterations - 1}):
        ms = "".join(f"{1e3 * times[i]:9.1f}" for times in (dt, dtf, dtb))
        lines.append(f"{i:4d} {losses[i]:8.0f}{ms} {world_size * batch / dt[i]:10.0f}")
    if rank == 0:
        say("\n".join(lines))


# %%
# %%ranks --timeout 300
parts, start_s, losses, dt, dtf, dtb = train()  # all ranks
table(losses, dt, dtf, dtb)

# %% [markdown]
# The table shows rank 0's own loss and times. The ranks saw different data. If averaging works, all made the same updates
# and hold *one* model, equal to the last bit. Comparing fingerprints proves it without sending a model.

# %% tags=["nbval-check-output"]
# %%ranks
mine, prints = fingerprint(parts[0].parameters()), [None] * world_size
dist.all_gather_object(prints, mine)
say(f"{world_size} ranks, distinct models: {len(set(prints))}")
assert len(set(prints)) == 1
metrics.exact(losses=list(losses), model=mine)

# %% [markdown]
# How long does a step take? You could time start-up and ten steps, and divide by 10, or take the median of steps
# 2 to 10. The next cell compares both with later steps.


# %% jupyter={"source_hidden": true}
# %%ranks
from statistics import median

from manyhands.lessons import start as lesson

trial = min(10, iterations // 2)
stopwatch_s, typical_s, rest = (start_s + sum(dt[:trial])) / trial, median(dt[1:trial]), dt[trial:]
if rank == 0:
    figure = lesson.draw_against_trial(dt, trial, stopwatch_s, typical_s)
    show(figure, "trial", "ms per step after a trial, and as lines what it said by stopwatch and by median")
    spread = f"({1e3 * min(rest):.1f} to {1e3 * max(rest):.1f})"
    say(f"median of {len(rest)} later steps {1e3 * median(rest):.1f} ms {spread}")
    for how, guess_s in (("stopwatch", stopwatch_s), ("median", typical_s)):
        say(f"the trial by {how}: {1e3 * guess_s:.1f} ms, {guess_s / median(rest):.2f} times that")
metrics.measured(startup_s=start_s, median_step_s=median(rest), samples_per_s=world_size * batch / median(rest))

# %% [markdown]
# The first step allocates buffers and opens connections: the **warm-up**. Leave it out, report the median and the
# spread. (The spread is large where ranks share cores: a collective is as slow as its slowest rank. It may even hide
# the warm-up.)

# %% [markdown]
# ### What the step sends, and plots for a log file (MORE, 3 min)
#
# **Predict.** The model has 837,632 parameters. How many bytes are its float32 gradients?
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

with wire.watch(sockets=True) as seen:
    step(*parts)
payload = seen.payload_bytes("all_reduce")
gradients = 4 * sum(p.numel() for p in parts[0].parameters())
ring = wire.ring_all_reduce_bytes(gradients, world_size)
if rank == 0:
    say(f"all-reduces carry {payload:,} bytes, predicted {gradients:,}, ratio {payload / gradients:.3f}")
    if seen.transport_bytes and ring:
        sent = seen.transport_bytes
        say(f"the sockets delivered {sent:,} bytes, predicted {ring:,.0f}, ratio {sent / ring:.3f}")
metrics.exact(all_reduce_bytes=payload)

# %% [markdown]
# A terminal on a cluster has no pictures, but it has characters. A plot made of them survives in every log file.

# %%
# %%ranks
from manyhands.lessons import start as lesson

if rank == 0:
    say(lesson.draw_as_text(losses, "loss", height=13))

# %% [markdown]
# ## When to read the clock (MORE, 3 min)
#
# ![Drawn to scale: Python has queued forward and backward after 17 ms of a 284 ms step](../assets/00_clock.svg)
#
# A GPU works through a queue. `loss.backward()` puts work into the queue and returns. A clock that you read then has
# timed only the *queueing*. A [published
# transcript](https://github.com/saforem2/personal_site/blob/82205852654c9b504ce732a0aae2e358e9b0bf2d/docs/talks/alcf-hpc-workshop-2024/alcf-hpc-workshop-2024.md)
# shows it: forward and backward of a GPT on four GPUs take 17 ms of a 284 ms step. A CPU does not queue its arithmetic,
# but communication is queued everywhere.
#
# **Predict.** An all-reduce of 16 MB is started with `async_op=True`. What part of its time has passed when the
# call returns?

# %%
# %%ranks
from statistics import median

from manyhands.measure.timing import synchronise

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

# %% [markdown] tags=["solution"]
# <details><summary>Solution 1</summary>
#
# ```python
# def is_one_world(started, said):
#     # each rank exactly once, and all agree on the size
#     return sorted(said) == [(rank, started) for rank in range(started)]
# ```
#
# </details>

# %% [markdown]
# ### Exercise 2: whose turn is it?
#
# ![Ranks 0 to 3 write their line one after the other; each sends the pen to the next when done](../assets/00_pen.svg)
#
# The notebook sorts what ranks print. A file does not: the rank that comes first writes first. Let every rank append
# one line to one file, **in rank order**, with nothing but `dist.send` and `dist.recv`. Call `append("...")` to write
# your line. `append` is slowest on rank 0, so a rank that does not wait writes first. The check reads the file and
# counts messages.


# %%
# %%ranks
def in_turn(append, ranks):
    raise NotImplementedError  # your turn


checks.in_turn(in_turn, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 2</summary>
#
# ```python
# def in_turn(append, ranks):
#     pen = torch.zeros(1)
#     if ranks.rank > 0:
#         dist.recv(pen, ranks.rank - 1)  # wait until the rank before has written
#     append(f"rank {ranks.rank} was here")
#     if ranks.rank < ranks.world_size - 1:
#         dist.send(pen, ranks.rank + 1)
# ```
#
# </details>

# %% [markdown]
# The number in the message does not matter. What matters is that the message arrives: it tells a rank that it may go
# on.
#
# ### Exercise 3: read the profile
#
# The table shows ten steps of the smoke test in one process, under Python's profiler. A row is part of the less
# indented row above it: the seconds of `Adam.__init__` contain those of the import. Look at the rows one level below
# `train`. A row with one call happened once; the other rows happen in each step.

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

# %% [markdown] tags=["solution"]
# <details><summary>Solution 3</summary>
#
# ```python
# def predict_seconds(profile, steps):
#     # deeper rows are inside those of depth 1
#     parts = [(calls, total_s) for depth, _, calls, total_s in profile if depth == 1]
#     once_s = sum(total_s for calls, total_s in parts if calls == 1)
#     each_s = sum(total_s / calls for calls, total_s in parts if calls > 1)
#     return once_s + each_s * steps
# ```
#
# </details>

# %% [markdown]
# 11.6 s, not 153. In that profile 93 % of the ten steps was an import: in torch 2.13 the first optimizer loads a part
# of PyTorch's compiler. The published transcript above shows the same: 2.0 of the 2.9 s of its profile are the first
# `Adam.__init__`.

# %% [markdown]
# ## A bug from the zoo (CORE, 1 min)
#
# The [zoo](../assets/glossary.md#zoo) collects real mistakes from published code. A [published
# transcript](https://github.com/saforem2/personal_site/blob/82205852654c9b504ce732a0aae2e358e9b0bf2d/docs/talks/alcf-hpc-workshop-2024/alcf-hpc-workshop-2024.md)
# trains a GPT on four GPUs, 64 samples each, and reports 14 samples per second. In our words:


# %%
# %%ranks
def logged_samples_per_s(step_s):
    return world_size / step_s


# %% [markdown]
# **Find it.** A step took 0.283 s. What should the log have said?
#
# <details><summary>What is wrong?</summary>
#
# The line counts one sample per rank and step: 4 / 0.283 = 14. The batch is missing: 4 x 64 / 0.283 = 905. The unit gives
# it away: `world_size / step_s` has no samples in it.
#
# </details>

# %% [markdown]
# ### Exercise 4: mend it (MORE, 6 min)
#
# You get the batch of one rank, and how long a step takes on *each* rank. How many samples per second do all ranks
# process together?


# %%
# %%ranks
def samples_per_s(batch, step_s):
    """batch: samples per rank; step_s: list with the seconds of one step on each rank."""
    raise NotImplementedError  # your turn


checks.samples_per_s(samples_per_s, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 4</summary>
#
# ```python
# def samples_per_s(batch, step_s):
#     # nobody starts the next step before the slowest rank has done this one
#     return batch * len(step_s) / max(step_s)
# ```
#
# </details>

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
# With more threads than cores, arithmetic is no longer the bottleneck. The two halves of a product wait for each other,
# and they *spin* while they wait: the thread that is done keeps its core busy asking "ready?", while the other half queues
# for that same core. The rule: ranks x threads per rank = cores. Launchers can also bind each rank to cores of its own:
# `mpiexec -bind-to core` (Hydra), `--cpu-bind depth` (PALS), `srun --cpu-bind=cores`.

# %% [markdown]
# ## On the cluster
#
# Inside a job:
#
# ```bash
# # one node
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/00_start.py --iterations 200
# # two nodes, torchrun: run this on each node; HOST is the first node's name, for example from `scontrol show hostnames`
# python -m torch.distributed.run --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
#   --rdzv-id 1 scripts/00_start.py --iterations 200
# # two nodes, MPI: Hydra and PALS; Open MPI wants --map-by ppr:4:node instead of -ppn 4
# mpiexec -n 8 -ppn 4 python scripts/00_start.py --iterations 200
# # two nodes, Slurm
# srun --nodes 2 --ntasks 8 --ntasks-per-node 4 python scripts/00_start.py --iterations 200
# ```
#
# **Before an event**, run `make doctor`, which looks at the machine, then this script, then `make preflight`, which
# runs everything.
#
# **On GPUs**, `join()` puts each rank on its GPU, and the group becomes `cpu:gloo,cuda:nccl`. Scripts in bare PyTorch
# do this themselves: `torch.cuda.set_device(local_rank)` before `init_process_group`. (With its argument `device_id`
# NCCL connects at once, and makes later groups by splitting. `join()` leaves it out: after
# [`split_group`](https://github.com/pytorch/pytorch/issues/145376) a new group of gloo alone may hang.)
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
# The card to take home:

# %%
# %%ranks
card(
    "A rank is a process: one program, started n times.",
    "The rank says what you work on, the local rank says where.",
    "A launcher tells each process who it is, each launcher by its own variables.",
    "Four processes are one world only if they found each other: call the roll.",
    "Time after a warm-up; report the median, the spread and the unit.",
    figure="one world of four, four worlds of one",
    command="srun --ntasks 8 --ntasks-per-node 4 python scripts/00_start.py",
)

# %% [markdown]
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
