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
# # 00 · Ranks and launchers
#
# *CORE 20 minutes · with MORE and all exercises 45*
#
# One machine is never enough for long. Whatever you do about it, with two GPUs or with ten thousand, begins in the same way:
# the same program is started several times, and each copy finds out who it is. This lesson is about that first second. You
# will use it in every other one.
#
# **You can**, at the end:
# - say what *rank*, *local rank*, *world size* and *SPMD* mean;
# - run one file four ways: in this notebook, under `torchrun`, under `mpiexec`, and alone;
# - read what a launcher tells its processes, and tell one world of four from four worlds of one;
# - check a machine before an event, and time what it does without fooling yourself.
#
# **You need** to have seen a training loop in PyTorch. No MPI, no cluster, no GPU.
# **New here**: everything about more than one process.
#
# A question marked **Predict** comes before each answer. Commit to a number, then unfold. Sections marked CORE make up the 20
# minutes; MORE is for the fast and for home. Underlined terms lead to the [glossary](../assets/glossary.md).

# %% [markdown] tags=["notes"]
# *For the instructor.* 20 minutes: sections 0 to 2 take 6, section 3 takes 5, sections 4 to 6 take 9. Exercise 1 is the one to
# do in the room; 2 to 5 are for the fast and for home.
# Say: "a rank is a process, not a GPU and not a machine". Let everyone run the first two cells *before* you talk.
# Usual mistakes: (1) people look for the rank that "has the result" of an all-reduce; (2) they believe that a variable set in a
# plain cell exists on the ranks; (3) they read local rank as rank.
# Late? Skip section 4 (show its output) and the plots of section 5. A question for the room: "your job printed *rank 0 of 1*
# four times and exited with 0. What happened?"

# %% [markdown]
# ## 0. Start · CORE
#
# These numbers are the lesson's settings. Change one, then run from here. In a script they are flags: `--iterations 20`.

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
iterations = 100  # steps of the smoke test, 10 to 10000
batch = 64  # samples per rank and step, >= 1

# %% [markdown]
# The next cell starts four processes on this machine and keeps them. From then on, a cell that begins with `%%ranks` runs in all
# four of them, any other cell runs here, in your notebook. In a script there is no such difference: all of it runs in every process.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.ranks import start_ranks
#
# hands = start_ranks("00_start", globals())

# %%
# %%ranks
import os
import time

import torch
import torch.distributed as dist
from manyhands import join, leave, mpi_world, say, show, wire
from manyhands.checks import start as checks
from manyhands.metrics import Metrics, fingerprint, max_over_ranks, median_s, synchronise
from manyhands.screen import text_plot

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
metrics = Metrics(ranks, parameters={"iterations": iterations, "batch": batch})

# %% [markdown]
# `join()` has answered three questions for you: who started us, which of us am I, and how do we reach each other. The rest of this
# lesson opens that box. Every section below needs only the cells above it in section 0, unless it says otherwise.

# %% [markdown]
# ## 1. Four copies of one program · CORE
#
# ![One file is started as four processes, each with its own memory and its own value of x](../assets/00_spmd.svg)
#
# Nobody writes four programs for four GPUs. You write *one*, it is started four times, and the copies differ in a single number: their
# [rank](../assets/glossary.md#rank), counted from 0. The number of copies is the [world size](../assets/glossary.md#world-size). This
# way of working is called [SPMD](../assets/glossary.md#spmd): single program, multiple data.
#
# Nothing is shared. When rank 1 sets a variable, rank 2 does not notice, just as your editor does not notice what your browser does.
#
# **Predict.** The next cell sets `x` and prints one line. How many lines appear, how many process numbers, and how many different `x`?
#
# <details><summary>Answer</summary>
#
# Four of each. All four processes run the line, and each prints its own rank. The notebook sorts them by rank. In a terminal they
# come in whatever order the processes reach the line, and that order changes from run to run.
#
# </details>

# %%
# %%ranks
x = torch.tensor([rank + 1.0], device=device)
say(f"rank {rank} of {world_size}: process {os.getpid()} holds x = {x.item():g}")

# %% [markdown]
# `say` is `print` with two habits: it writes a whole line at once, so that the lines of four processes do not run together, and in a
# script it puts the rank in front. When all ranks say the same, the notebook shows it once:

# %% tags=["nbval-check-output"]
# %%ranks
say(f"we are {world_size}")

# %% [markdown]
# ### Warm-up: four numbers by hand
#
# Rank *r* holds *r* + 1, so the four hold 1, 2, 3 and 4. Now they add them up, with the most important call of this course:
# [all-reduce](../assets/glossary.md#all-reduce).
#
# **Predict.** What does `x` hold afterwards on rank 0? And on rank 3?
#
# <details><summary>Answer</summary>
#
# 1 + 2 + 3 + 4 = 10, on **every** rank. That is what "all" stands for: there is no master that has the result while the others wait.
# All ranks call it, all ranks get it. (If one of them does not call it, the others wait. Lesson 02 does that on purpose.)
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
total = x.clone()
dist.all_reduce(total)
say(f"the sum is {total.item():g}")
metrics.exact(sum=total.item())

# %% [markdown]
# ## 2. Rank, local rank, node · CORE
#
# ![Two nodes with four ranks each: ranks 0 to 7 in the world, local ranks 0 to 3 on each node](../assets/00_nodes.svg)
#
# A cluster is made of [nodes](../assets/glossary.md#node), machines with a few GPUs each. So there are two ways to count. The **rank** counts
# through the whole world and decides *what* you work on: which part of the data, which piece of the model. The
# [local rank](../assets/glossary.md#local-rank) starts from 0 on every node and decides *where*: `torch.device("cuda", local_rank)`.
#
# **Predict.** Eight ranks on two nodes, as in the figure. On which node is rank 6, and which local rank has it?
#
# <details><summary>Answer</summary>
#
# Node 1, local rank 2: 6 = 1 · 4 + 2. Divide by the number of ranks *per node*, not by the number of nodes.
#
# </details>
#
# From scratch it is one division with remainder. Beside it stands a line from a published multi-node guide, which divides by the number of nodes.
# (Its sister takes the local rank for the rank: [gpt-fast](https://github.com/pytorch-labs/gpt-fast/blob/main/tp.py) reads `LOCAL_RANK`
# and `LOCAL_WORLD_SIZE`, and so can use one node only.)

# %% tags=["nbval-check-output"]
# %%ranks
def node_and_local_rank(rank, ranks_per_node):
    return divmod(rank, ranks_per_node)


if rank == 0:
    for num_nodes in (1, 2):
        right = [node_and_local_rank(r, 8 // num_nodes)[0] for r in range(8)]
        published = [r // num_nodes for r in range(8)]
        say(f"{num_nodes} node(s): ranks 0 to 7 are on node {right}; rank // num_nodes says {published}")

# %% [markdown]
# With one node the published line is wrong too, only nobody looks at the node number there. With two nodes it invents four. This is the
# usual career of such a bug: it is written on a laptop, where rank and local rank are the same number, and it is found on a Friday on the cluster.

# %% [markdown]
# ## 3. Who told me? · CORE
#
# ![torchrun, mpiexec and srun start processes and set their own variables; join() reads them and makes one group](../assets/00_launchers.svg)
#
# A process cannot know that it has three brothers. Whoever started it, the [launcher](../assets/glossary.md#launcher), has to say so, and all
# launchers use the same post box, the environment variables of the process. Unfortunately each has its own words:
#
# | launcher | rank | world size | local rank |
# |---|---|---|---|
# | torchrun | `RANK` | `WORLD_SIZE` | `LOCAL_RANK` |
# | MPICH (Hydra's `mpiexec`) | `PMI_RANK` | `PMI_SIZE` | `MPI_LOCALRANKID` |
# | Open MPI (`mpirun`) | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK` |
# | PALS (Cray's `mpiexec`) | `PALS_RANKID` | none of its own: `PMI_SIZE`, or ask MPI | `PALS_LOCAL_RANKID` |
# | Slurm (`srun`) | `SLURM_PROCID` | `SLURM_STEP_NUM_TASKS` (of the job: `SLURM_NTASKS`) | `SLURM_LOCALID` |
#
# **Predict.** Which row did *your* four ranks get? Look.

# %%
# %%ranks
words = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_", "MPI_LOCAL", "OMPI_COMM_WORLD", "PALS_", "SLURM_PROCID", "SLURM_STEP_")
told = {name: value for name, value in sorted(os.environ.items()) if name.startswith(words) and len(value) < 20}
say("  ".join(f"{name}={value}" for name, value in told.items()) or "nobody told me anything: I am alone")

# %% [markdown]
# **Hello, three times.** The variables are the letter. Two libraries read it for you: MPI (here through `mpi4py`), which has connected parallel
# programs since 1994, and `torch.distributed`, which you will use from here on. If all is well, the letter and both libraries agree.

# %%
# %%ranks
world = mpi_world()
if world is not None:
    say(f"hello from MPI: rank {world.Get_rank()} of {world.Get_size()}")
elif rank == 0:
    say("no MPI world here; for one, run: .venv/bin/mpiexec -n 4 python scripts/00_start.py")

# %% tags=["nbval-check-output"]
# %%ranks
say(f"hello from torch.distributed: rank {dist.get_rank()} of {dist.get_world_size()}")
said = {(rank, world_size), (dist.get_rank(), dist.get_world_size())}
if world is not None:
    said.add((world.Get_rank(), world.Get_size()))
assert len(said) == 1, f"they contradict each other: {said}"

# %% [markdown]
# ### Exercise 1: who am I?
#
# Write what `join()` does first: from a dictionary of variables to `(rank, world_size, local_rank)`. The check hands you environments that
# were recorded under real launchers, and three of them are traps:
# a `torchrun` that was started by an `mpiexec` (whose letter counts?), an `mpiexec` inside a Slurm job, and the batch script of a Slurm job, which has
# `SLURM_PROCID=0` and `SLURM_NTASKS=4` and yet is no rank: it is the shell that will start the ranks. Without a launcher you are `(0, 1, 0)`.

# %%
# %%ranks
def who_am_i(environ):
    raise NotImplementedError  # your turn


checks.who_am_i(who_am_i, ranks)

# %% [markdown]
# **Solution 1** is in the folded cell below. Open it when your check says *correct*, or after ten minutes.

# %% tags=["solution"] jupyter={"source_hidden": true}
# %%ranks
def who_am_i(environ):
    # Innermost first: a torchrun started by mpiexec has both letters, and torchrun started *this* process.
    letters = [
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),  # only a task of a step is a rank
    ]
    for names in letters:
        if all(name in environ for name in names):
            return tuple(int(environ[name]) for name in names)
    return 0, 1, 0


checks.who_am_i(who_am_i, ranks, solution=True)

# %% [markdown]
# ## 4. One file, four ways · CORE
#
# This lesson is one file in two shapes: the notebook you are in, and `scripts/00_start.py`, which holds the same cells. So far you have used the
# first way. The other three are typed into a terminal, in the course's folder:
#
# ```bash
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/00_start.py    # torchrun
# .venv/bin/mpiexec -n 4 python scripts/00_start.py                                      # MPI
# python scripts/00_start.py                                                             # alone
# ```
#
# `python -m torch.distributed.run` *is* `torchrun`, but surely the one of the Python that runs, and not whichever comes first in your PATH. The cell below does the
# same with a program of four lines, from your notebook's own process.
#
# **Predict.** It asks for two processes each time, except the last. Which lines will be the same in all three outputs?

# %% tags=["active-ipynb"]
# import os, subprocess, tempfile
# from pathlib import Path
#
# hello = Path(tempfile.mkdtemp()) / "hello.py"
# hello.write_text("""from manyhands import join, leave, say
# ranks = join(globals(), quiet=True)
# say(f"rank {ranks.rank} of {ranks.world_size}, started by: {ranks.launcher}")
# leave()
# """)
# bin = Path(sys.executable).parent
# torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# for start in (torchrun, [bin / "mpiexec", "-n", "2", sys.executable], [sys.executable]):
#     done = subprocess.run([*start, hello], capture_output=True, text=True, timeout=60,
#                           env=os.environ | {"PYTHONPATH": os.path.abspath("../scripts"), "OMP_NUM_THREADS": "1"})
#     print("\n".join(sorted(done.stdout.splitlines())) or done.stderr[-300:], "\n")

# %% [markdown]
# ### Four processes are not yet a world of four
#
# ![One world of four ranks, and beside it four processes that are each rank 0 of a world of one](../assets/00_worlds.svg)
#
# There is one mistake of this lesson that costs whole nights. A cluster has two MPIs installed, `mpiexec` comes from one and `mpi4py` from the other,
# or `srun` is configured without MPI. Then nobody reads the letter. Each of the four processes believes that it is *rank 0 of 1*, each trains on all of the data, each
# overwrites the others' checkpoint, and the job ends with exit status 0.
#
# You can see it in the first line of the log, if you print it. `join()` refuses such a start where it can notice, because the launcher's variables say 4 and MPI says 1.

# %% [markdown]
# ### Exercise 2: one world or many?
#
# `started` processes were started, and `said` lists what they said about themselves as
# `(rank, world_size)`, in no particular order. Is it one world? Think of more than one way to go wrong.

# %%
# %%ranks
def is_one_world(started, said):
    raise NotImplementedError  # your turn


checks.is_one_world(is_one_world, ranks)

# %% [markdown]
# **Solution 2**, folded:

# %% tags=["solution"] jupyter={"source_hidden": true}
# %%ranks
def is_one_world(started, said):
    # each rank exactly once, and all agree on the size
    return sorted(said) == [(rank, started) for rank in range(started)]


checks.is_one_world(is_one_world, ranks, solution=True)

# %% [markdown]
# ## 5. The smoke test · CORE
#
# An electrician switches a new device on and looks whether smoke rises. The smoke test of a training machine is a model so small that nobody cares about it, trained for a
# hundred steps on all ranks. It needs everything to work: the launcher, the network between the ranks, the libraries, the optimizer. And it takes less than a minute.
#
# The model is a stack of linear layers, 128-1024-512-256-128-128, without activations. Its task is to return its input; the loss is the summed
# squared error. Each rank makes its own random input, 64 samples per step.
#
# **Predict.** How many parameters? And how many bytes are the gradients that each rank has to share in a step, in float32?
#
# <details><summary>Answer</summary>
#
# 128·1024 + 1024·512 + 512·256 + 256·128 + 128·128 weights and 1024 + 512 + 256 + 128 + 128 biases: 837,632. A gradient has as many numbers as the
# parameters, at 4 bytes each: 3,350,528 bytes.
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
torch.manual_seed(0)  # the same start everywhere: the copies must be copies
sizes = [(128, 1024), (1024, 512), (512, 256), (256, 128), (128, 128)]
model = torch.nn.Sequential(*[torch.nn.Linear(a, b) for a, b in sizes]).to(device)
num_params = sum(p.numel() for p in model.parameters())
if rank == 0:
    say(f"{num_params:,} parameters, {4 * num_params:,} bytes of gradients per step")

# %% [markdown]
# Next the optimizer. **Predict.** The cell builds the same Adam twice. Which takes longer, the first or the second, and by what factor?

# %%
# %%ranks
def seconds(call):
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


_, first_s = seconds(lambda: torch.optim.Adam(model.parameters(), lr=1e-3))
optimizer, second_s = seconds(lambda: torch.optim.Adam(model.parameters(), lr=1e-3))
if rank == 0:
    say(f"first Adam {first_s:.2f} s, second Adam {1e6 * second_s:.0f} microseconds")

# %% [markdown]
# If you ran the cell for the first time, the first Adam took a second or more, and the second one a few dozen microseconds. Nothing was computed in that second: building the
# first optimizer imports `torch._dynamo`, thousands of files of the compiler. (Run the cell again: now both are fast.) In a published transcript of this very smoke test, 2.0 of the 2.9 s in its profile
# are this call. Whoever divides the whole by the number of steps measures an import. Exercise 4 lets you read such a profile.
#
# Now the library's way to train on several ranks, [DDP](../assets/glossary.md#ddp). It is lesson 03's subject; here it is one line: `backward` also averages the
# gradients over the ranks. One step, with a clock in each part: `dtf` is forward, `dtb` backward with its communication, `dt` the whole step.

# %%
# %%ranks
ddp = torch.nn.parallel.DistributedDataParallel(model)
mine = torch.Generator().manual_seed(rank)  # seeds differ on purpose: each rank has data of its own


def clock():
    synchronise(device)  # wait until the device has done what it was given, then look at the clock
    return time.perf_counter()


def step():
    """One training step: (loss, dt, dtf, dtb), times in seconds."""
    t0 = clock()
    x_BD = torch.randn(batch, 128, generator=mine).to(device)
    loss = (ddp(x_BD) - x_BD).square().sum()
    t1 = clock()
    loss.backward()
    t2 = clock()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), clock() - t0, t1 - t0, t2 - t1

# %% [markdown]
# All ranks run all steps, rank 0 prints. A step counts `batch` samples on every rank, so samples per second are `world_size * batch / dt`.

# %%
# %%ranks --timeout 300
dist.barrier()
rows = [step() for _ in range(iterations)]
losses, dt, dtf, dtb = (list(column) for column in zip(*rows, strict=True))
if rank == 0:
    lines = ["step     loss    dt ms   dtf ms   dtb ms  samples/s"]
    for i in sorted({0, 1, 2, *range(0, iterations, max(1, iterations // 8)), iterations - 1}):
        ms = "".join(f"{1e3 * t[i]:9.1f}" for t in (dt, dtf, dtb))
        lines.append(f"{i:4d} {losses[i]:8.0f}{ms} {world_size * batch / dt[i]:10.0f}")
    say("\n".join(lines))

# %% [markdown]
# How to read it. The loss falls: the gradients are right enough to learn. `dtf + dtb` is nearly `dt`: what is missing is the optimizer. `dtb` is far more than twice `dtf`,
# the ratio that you know from one device: the difference is communication. And the first steps are slower.
#
# A terminal on a cluster has no pictures, but it has characters. These are [plotext](https://github.com/piccolomo/plotext) plots, and they survive every log file.

# %%
# %%ranks
if rank == 0:
    say(text_plot(losses, "loss"))
    say(text_plot([world_size * batch / t for t in dt], "samples per second, all ranks"))

# %% [markdown]
# And where a step's time goes, the whole and its two parts:

# %%
# %%ranks
if rank == 0:
    for name, times in [("dt: the step", dt), ("dtf: forward", dtf), ("dtb: backward and communication", dtb)]:
        say(text_plot([1e3 * t for t in times], f"{name}, ms", height=8))

# %% [markdown]
# **Do the ranks still hold the same model?** They saw different data. If the averaging works, they have made the same hundred updates, and the parameters are equal to the last bit. A fingerprint tells, without sending a model around.

# %% tags=["nbval-check-output"]
# %%ranks
print_of_mine = fingerprint(model.parameters())
prints = [None] * world_size
dist.all_gather_object(prints, print_of_mine)
say(f"{len(set(prints))} different model(s) on {world_size} ranks")
assert len(set(prints)) == 1
metrics.exact(num_params=num_params, losses=losses, model=print_of_mine)

# %% [markdown]
# **How much left this rank?** You predicted 3,350,528 bytes of gradients. `wire` counts twice: the calls that enter the library with what they carry, and, on Linux, the bytes
# that the sockets of this process delivered. An all-reduce on a ring of *n* ranks sends 2(*n*-1)/*n* times its data; lesson 02 builds it. Watching slows a step down, so this one is not timed.

# %%
# %%ranks
with wire.watch() as seen:
    step()
payload, ring = seen.payload_bytes("all_reduce"), wire.ring_all_reduce_bytes(4 * num_params, world_size)
if rank == 0:
    say(f"{seen.count('all_reduce')} all-reduces carry {payload:,} bytes, predicted {4 * num_params:,}, ratio {payload / (4 * num_params):.3f}")
    if seen.transport_bytes and ring:
        say(f"sockets delivered {seen.transport_bytes:,} bytes, predicted {ring:,.0f}, ratio {seen.transport_bytes / ring:.3f}")
metrics.exact(all_reduce_bytes=payload)

# %% [markdown]
# The first ratio is exactly 1. The second is a little above 1: headers, and what the ranks say to each other besides. With 4 ranks each sends one and a half times its gradients, in every step. This is the price of data parallelism, and half of this course is about paying less.

# %% [markdown]
# ## 6. Experiment: what does one step tell you? · CORE
#
# You want to know how long 100 steps take. You have a few measurements of single steps. **Predict.** Which is the best single number to multiply by 100: the first step's time, the fastest step's, or
# the median? And will it be too small or too large?
#
# In the figure, dots are the steps as measured. The dashed line is the median: if every step took it, the dots would lie on it. What you should see is a few dots far above it at the left, the
# [warm-up](../assets/glossary.md#warm-up), and then a band around the line.

# %%
# %%ranks
median = sorted(dt)[len(dt) // 2]
if rank == 0:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot([1e3 * t for t in dt], "o", ms=4, color="#0072B2", label="measured step")
    axes.axhline(1e3 * median, ls="--", color="#1a1a1a", label=f"predicted: the median, {1e3 * median:.1f} ms")
    axes.set(xlabel="step", ylabel="time of the step, ms", ylim=(0, None), title=f"{iterations} steps on {world_size} ranks")
    axes.legend()
    show(figure, "steps", "time of each step as dots, the median as a dashed line; the first steps lie above it")

# %%
# %%ranks
if rank == 0:
    whole_s = sum(dt)
    for name, each_s in [("the first step", dt[0]), ("the fastest step", min(dt)), ("the median step", median)]:
        say(f"{iterations} x {name:16s} = {iterations * each_s:6.2f} s, measured {whole_s:.2f} s, ratio {whole_s / (iterations * each_s):.2f}")
    slow = sum(t > 1.5 * median for t in dt)
    say(f"{slow} of {iterations} steps took more than 1.5 times the median")
metrics.measured(median_step_s=median, samples_per_s=world_size * batch / median)

# %% [markdown]
# The median comes closest, and the residual, ratio minus 1, is what the median hides: the warm-up at the left, and single slow steps later. On a laptop those come from your browser; with more ranks than cores (four on two, say), from ranks that
# wait for a core while the others wait for *them*. A collective is as slow as its slowest rank. So honest timing in this course means: warm up, synchronise, keep the samples, report the median *and* the
# slowest rank.

# %% [markdown]
# ## 7. When to read the clock · CORE
#
# ![Python has queued forward and backward after 17 ms, the device needs most of a 284 ms step](../assets/00_clock.svg)
#
# A GPU works through a queue. `loss.backward()` puts kernels into it and returns; a clock that is read then has timed the *queueing*. In the transcript mentioned above, forward and backward together take 17 ms of a 284 ms step, and nobody asks where the other 267 are: they wait
# in the first line that needs a number, such as `loss.item()`.
#
# A CPU does not queue its arithmetic. But communication is queued everywhere, so that you can see the effect here. **Predict.** An all-reduce of 16 MB is started with `async_op=True`. What part of its time has passed when the call returns?

# %%
# %%ranks
big = torch.ones(4_000_000, device=device)
dist.all_reduce(big.clone())  # warm up
dist.barrier()
start = clock()
work = dist.all_reduce(big, async_op=True)
returned_s = time.perf_counter() - start
work.wait()
done_s = clock() - start
if rank == 0:
    say(f"the call returned after {1e3 * returned_s:.2f} ms, the sum was there after {1e3 * done_s:.1f} ms: {100 * returned_s / done_s:.0f} % of the time")

# %% [markdown]
# Without `wait()` you would have reported a network that is a hundred times as fast as yours. This is why `clock()` in section 5 synchronises first. On a CPU that line does nothing, on a GPU it is the difference between 17 and 284.

# %% [markdown]
# ## 8. More exercises · MORE
#
# ### Exercise 3: whose turn is it?
#
# ![Ranks 0 to 3 write their line one after the other; each sends the pen to the next when done](../assets/00_pen.svg)
#
# `%%ranks` sorts what you print. A file does not: whoever comes first writes first. Let all ranks append one line to one file, **in rank order**, with nothing but `dist.send` and `dist.recv`. Call `append("...")` to write your line. It is slow on
# purpose, and slowest on rank 0, so that who does not wait overtakes. The check reads the file and counts the messages.

# %%
# %%ranks
def in_turn(append, ranks):
    raise NotImplementedError  # your turn


checks.in_turn(in_turn, ranks)

# %% [markdown]
# **Solution 3**, folded:

# %% tags=["solution"] jupyter={"source_hidden": true}
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
# What the pen *says* does not matter, that it comes does. Most of synchronisation is this.
#
# ### Exercise 4: read the profile
#
# Ten steps of the smoke test in one process, under Python's profiler. A deeper row is part of the row above it: the seconds of `Adam.__init__` hold those of the import.

# %% tags=["nbval-check-output"]
# %%ranks
if rank == 0:
    say("calls  seconds  function")
    for depth, function, calls, total_s in checks.PROFILE:
        say(f"{calls:5d}  {total_s:7.3f}  {'  ' * depth}{function}")

# %% [markdown]
# A colleague concludes: 0.153 s per step, so a thousand steps take 153 s. Write the function that gives the right answer, for any profile of this form and any number of steps.

# %%
# %%ranks
def predict_seconds(profile, steps):
    """profile: rows (depth, function, calls, seconds) as above; the row of depth 0 is the whole."""
    raise NotImplementedError  # your turn


checks.predict_seconds(predict_seconds, ranks)

# %% [markdown]
# **Solution 4**, folded:

# %% tags=["solution"] jupyter={"source_hidden": true}
# %%ranks
def predict_seconds(profile, steps):
    parts = [(calls, total_s) for depth, _, calls, total_s in profile if depth == 1]  # deeper rows are inside these
    once_s = sum(total_s for calls, total_s in parts if calls == 1)
    each_s = sum(total_s / calls for calls, total_s in parts if calls > 1)
    return once_s + each_s * steps


checks.predict_seconds(predict_seconds, ranks, solution=True)
if rank == 0:
    say(f"1000 steps: {predict_seconds(checks.PROFILE, 1000):.1f} s")

# %% [markdown]
# 11.6 s, not 153: thirteen times less, because 93 % of the ten steps' profile was an import that happens once.

# %% [markdown]
# ## 9. A bug from the zoo: fourteen samples per second · CORE
#
# The same published transcript logs 14 samples per second for this smoke test, on a machine that did many more. Here is the line, in our words:

# %%
# %%ranks
def logged_samples_per_s(step_s):
    return 1 / step_s

# %% [markdown]
# **Find it by measuring.** Count the samples, look at a clock on the wall, divide. Then compare with what the line logs.

# %%
# %%ranks
steps = 10
dist.barrier()
_, loop_s = seconds(lambda: [step() for _ in range(steps)])
loop_s = max_over_ranks(loop_s, ranks)  # all ranks call it: the slowest decides
counted = steps * batch * world_size / loop_s
logged = logged_samples_per_s(loop_s / steps)
if rank == 0:
    say(f"logged {logged:.1f}, counted {counted:.1f} samples per second, ratio {counted / logged:.1f}")

# %% [markdown]
# The ratio is a round number: `batch * world_size`. In the transcript it was 64: 14 were logged, 905 were true (on one rank). Nothing crashes, nothing looks odd, and the table ends up in a report. A *unit* gives it away: 1/`step_s` is steps per second.
#
# ### Exercise 5: mend it
#
# You get the batch of one rank and the time of a step on *each* rank. They differ a little. How many samples per second does the world do?

# %%
# %%ranks
def samples_per_s(batch, step_s):
    """batch: samples per rank; step_s: list with the seconds of one step on each rank."""
    raise NotImplementedError  # your turn


checks.samples_per_s(samples_per_s, ranks)

# %% [markdown]
# **Solution 5**, folded:

# %% tags=["solution"] jupyter={"source_hidden": true}
# %%ranks
def samples_per_s(batch, step_s):
    return batch * len(step_s) / max(step_s)  # nobody starts the next step before the slowest has done this one


checks.samples_per_s(samples_per_s, ranks, solution=True)

# %% [markdown]
# ## 10. Threads and cores · MORE
#
# ![Four ranks on two cores: with one thread each two wait for a core, with two threads each six wait](../assets/00_threads.svg)
#
# One PyTorch process uses all cores of a machine: it cuts a matrix product into one piece per core. With four processes that is four times too many pieces. `join()` therefore looks at the cores that you may really use, which is the process's *affinity* and the limit of its control group (a container with `cpu.max` = 2 sees 64 cores and gets 2), and gives ranks that share cores one thread each.
#
# **Predict.** A product of two 256 x 256 matrices, on all ranks at once, first with one thread per rank, then with two. On a machine with fewer cores than 2 · ranks: faster, the same, slower? By what factor?

# %%
# %%ranks
from manyhands import devices

usable = devices.cores(devices.look(os.environ))
a = torch.randn(256, 256)
own = torch.get_num_threads()
for threads in (1, 2):
    torch.set_num_threads(threads)
    timing = median_s(lambda: a @ a, repeats=9, ranks=ranks)
    if rank == 0:
        say(f"{world_size} ranks x {threads} thread(s) on {usable} core(s): {1e3 * timing.slowest_s:7.2f} ms, slowest rank")
torch.set_num_threads(own)

# %% [markdown]
# With more threads than cores it is slower, often by a factor of ten and more, and not because of the arithmetic. The two halves of one product have to wait for each other, but they do so *spinning*: a thread that has finished keeps its core busy asking "ready?", while the thread that it waits for queues for
# that same core. The rule is: ranks x threads per rank = cores. Launchers can also bind each rank to its own cores: `mpiexec --bind-to core` (Hydra), `--cpu-bind` (PALS), `srun --cpu-bind=cores`.

# %% [markdown]
# ## On the cluster
#
# ```bash
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/00_start.py --iterations 200     # one node
# mpiexec -n 8 --ppn 4 python scripts/00_start.py                                                         # PBS, two nodes
# srun --nodes 2 --ntasks 8 --ntasks-per-node 4 python scripts/00_start.py                                # Slurm, two nodes
# ```
#
# `make doctor` checks a machine before an event, this lesson's smoke test is the second look, and `make preflight` runs everything.
# **What changes on GPUs**: `join()` picks `cuda:local_rank` and the group becomes `cpu:gloo,cuda:nccl`, or, on Intel GPUs, `cpu:gloo,xpu:xccl`. The clock needs its synchronise. Steps take a few milliseconds, and the first one longer, because NCCL connects the ranks when they first talk.
# **What to look for**: the first line. It says how many ranks there are, on which hosts, on which devices, with how many cores and threads, and who started them. "1 rank" four times is the mistake of section 4. "cpu because ..." on a GPU node is a module that is not loaded, or fewer GPUs than ranks. Then
# the number of different models, which must be 1.

# %% [markdown] tags=["notes"]
# *For the instructor.* Run this script on the cluster the day before, on as many nodes as the class will use, and keep the output: it is the first thing to compare when something is odd.
# If a participant's first line says `1 rank` under mpiexec, they have a system's mpiexec before the environment's in PATH.

# %% [markdown]
# ## Recap
#
# 1. A rank is a process: the same program, started *n* times, each with a memory of its own. This is SPMD.
# 2. The rank counts through the world and says what you work on; the local rank counts on the node and says where.
# 3. A launcher tells each process who it is, by environment variables; `join()` reads them, from every launcher.
# 4. Four processes are a world of four only if they found each other: look at the first line of the log.
# 5. Time after a warm-up and a synchronise, report the median and the slowest rank, and give the number its unit.
#
# ## Further reading
#
# - [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html): what it sets and how many nodes rendezvous.
# - [mpi4py's tutorial](https://mpi4py.readthedocs.io/en/stable/tutorial.html), and chapter 1 of the [MPI standard](https://www.mpi-forum.org/docs/), for those who want to know what a communicator is.
# - [srun](https://slurm.schedmd.com/srun.html), section "Output environment variables": the long list behind row five of the table.
# - Next: [02 · Collectives](02_collectives.ipynb), where you build the all-reduce that you have used here.

# %%
# %%ranks
path = metrics.write()
if rank == 0:
    say("metrics.json is in this run's folder under outputs/00_start; latest points to it")
leave()

# %% tags=["active-ipynb"]
# hands.stop()
