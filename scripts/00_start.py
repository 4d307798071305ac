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
# **20 minutes** for the sections marked CORE, 45 with those marked MORE.
#
# Whatever you will do with many GPUs, it begins in the same way: one program is started several times, and each
# copy finds out who it is. This lesson is about that first second, which every other lesson takes for granted.
#
# After this lesson **you can**
# - say what *rank*, *local rank*, *world size* and *SPMD* mean;
# - run one file four ways: in this notebook, under `torchrun`, under `mpiexec`, and alone;
# - read what a launcher tells its processes, and tell one world of four from four worlds of one;
# - check a machine before an event, and time it without fooling yourself.
#
# **You need** to have seen a training loop in PyTorch. No MPI, no cluster, no GPU.
#
# **New here:** [rank](../assets/glossary.md#rank), [local rank](../assets/glossary.md#local-rank), [world
# size](../assets/glossary.md#world-size), [SPMD](../assets/glossary.md#spmd), [node](../assets/glossary.md#node),
# [launcher](../assets/glossary.md#launcher), [smoke test](../assets/glossary.md#smoke-test),
# [warm-up](../assets/glossary.md#warm-up).
#
# **Predict** stands before an answer: commit to a number, then unfold it. That is how you find out what you did
# not know.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start and four copies with the warm-up 4, rank and
# local rank 2, launchers with exercise 1 5, one file four ways 2, smoke test 3, experiment 2, clock 1, bug 1.
#
# *Say:* "A rank is a process. Not a GPU, not a machine, not a core." Let everyone run the first two cells before
# you talk.
#
# *Three usual mistakes:* looking for the rank that "has the result" of an all-reduce; believing that a variable of
# a plain cell exists on the ranks; reading local rank as rank.
#
# *When late:* show the stored outputs of "one file, four ways" and of the plots; keep exercise 1.
#
# *Ask the room:* "Your job printed *rank 0 of 1* four times and ended with exit status 0. What happened?"
#
# </details>

# %% [markdown]
# ## Start (CORE, 1 min)
#
# These are the settings of the lesson. In a script they are flags: `--iterations 20`.

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
iterations = 100  # steps of the smoke test, 10 to 10000
batch = 64  # samples per rank and step, at least 1

# %% [markdown]
# The next cell starts four processes on this machine and keeps them. From then on a cell that begins with
# `%%ranks` runs in all four; any other cell runs here, in your notebook. In the script the line is a comment:
# there everything runs in every process.

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
from manyhands import Metrics, catch_up, fingerprint, join, leave, mpi_world, say, show
from manyhands.checks import start as checks
from manyhands.launching import devices
from manyhands.measure import wire
from manyhands.measure.timing import max_over_ranks, median_s, synchronise
from manyhands.runs.screen import text_plot

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
metrics = Metrics(ranks, parameters={"iterations": iterations, "batch": batch})

# %% [markdown]
# `join()` has answered three questions: who started us, which of us am I, how do we reach each other. The rest of
# this lesson opens that box. Every section runs after these cells alone.

# %% [markdown]
# ## Four copies of one program (CORE, 3 min)
#
# ![One file is started as four processes, each with its own memory and its own value of x](../assets/00_spmd.svg)
#
# Nobody writes four programs for four GPUs. You write *one*, it is started four times, and the copies differ in a
# single number: their **rank**, counted from 0. How many there are is the **world size**. This way to work is
# called **SPMD**, for *single program, multiple data*.
#
# Nothing is shared. When rank 1 sets a variable, rank 2 does not notice, just as your editor does not notice what
# your browser does.
#
# **Predict.** The next cell sets `x` and prints one line. How many lines, process numbers, and values of `x` will
# you see?
#
# <details><summary>Answer</summary>
#
# Four of each. All four processes run the cell, and each prints its own line. This notebook sorts them by rank. In
# a terminal they come in whatever order the processes get there, and that order changes from run to run.
#
# </details>

# %%
# %%ranks
x = torch.tensor([rank + 1.0], device=device)
print(f"hello from rank {rank} of {world_size}: process {os.getpid()} holds x = {x.item():g}")

# %% [markdown]
# `say` is `print` with two habits. It writes a whole line at once, so that the lines of four processes do not run
# into each other, and in a script it puts the rank in front. What all ranks say alike, the notebook shows once:

# %% tags=["nbval-check-output"]
# %%ranks
say(f"we are {world_size}")

# %% [markdown]
# ### Warm-up: four numbers by hand
#
# Rank *r* holds *r* + 1, so the four hold 1, 2, 3 and 4. Now they add them up, by the call that this course
# returns to more than to any other, the [all-reduce](../assets/glossary.md#all-reduce).
#
# **Predict.** What does `total` hold afterwards on rank 0? And on rank 3?
#
# <details><summary>Answer</summary>
#
# 1 + 2 + 3 + 4 = 10, on **every** rank. That is what "all" stands for: there is no master who has the result while
# the others wait. All ranks make the call, all ranks get the sum. (If one does not make it, the others wait.
# Lesson 02 does that on purpose.)
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
total = x.clone()
dist.all_reduce(total)
say(f"the sum is {total.item():g}")
metrics.exact(sum=total.item())

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
# Node 1, local rank 2, because 6 = 1 · 4 + 2. You divide by the number of ranks *per node*.
#
# </details>
#
# From scratch it is one division with remainder. Beside it stands a line from [a published multi-node
# guide](https://github.com/LambdaLabsML/distributed-training-guide/blob/108b69569d3396cbef040374faf2074329382750/06-tensor-parallel/train_llm.py),
# which divides by the number of *nodes*. (It is a comment there, beside code that does it right. A relative:
# [gpt-fast](https://github.com/pytorch-labs/gpt-fast/blob/main/tp.py) takes `LOCAL_RANK` for the rank and `LOCAL_WORLD_SIZE`
# for the world size, and so can use one node only.)


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
# The published line is wrong on one node too, only that nobody asks for the node number there. On two nodes it
# invents four. This is the usual career of such a bug: it is written on a laptop, where rank and local rank are
# the same number, and found on the cluster.

# %% [markdown]
# ## Who told me? (CORE, 5 min)
#
# ![torchrun, mpiexec and srun start processes and set their own variables; join() reads them and makes one group](../assets/00_launchers.svg)
#
# A process cannot know by itself that it has three siblings. Whoever started it, the **launcher**, has to tell it.
# All launchers use the same letter box for that, the environment variables of the process, but each writes in its
# own words:
#
# | launcher | rank | world size | local rank |
# |---|---|---|---|
# | torchrun | `RANK` | `WORLD_SIZE` | `LOCAL_RANK` |
# | MPICH (Hydra's `mpiexec`) | `PMI_RANK` | `PMI_SIZE` | `MPI_LOCALRANKID` |
# | Open MPI (`mpirun`) | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK` |
# | PALS (Cray's `mpiexec`) | `PALS_RANKID` | none of its own: `PMI_SIZE`, or ask MPI | `PALS_LOCAL_RANKID` |
# | Slurm (`srun`) | `SLURM_PROCID` | `SLURM_STEP_NUM_TASKS` (the whole job's: `SLURM_NTASKS`) | `SLURM_LOCALID` |
#
# **Predict.** Which row have *your* four ranks got? Then look into their letter boxes.

# %%
# %%ranks
words = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCAL")
words += ("OMPI_COMM_WORLD", "PALS_", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
letter = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(words)]
say("  ".join(letter) or "no letter: I am alone")

# %% [markdown]
# **Hello, three times.** The variables are the letter. Two libraries read it for you: MPI, here by way of
# `mpi4py`, which has connected parallel programs since 1994, and `torch.distributed`, which you will use from here
# on. If all is well, all three agree.

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
# Write what `join()` does first: from a dictionary of variables to `(rank, world_size, local_rank)`. Without a
# launcher you are `(0, 1, 0)`. The check hands you environments that were recorded under real launchers. Three of
# them are traps:
# - a `torchrun` that an `mpiexec` started: there are two letters. Whose counts?
# - an `mpiexec` inside a Slurm job: again two letters.
# - the batch script of a Slurm job. It has `SLURM_PROCID=0` and `SLURM_NTASKS=4` and yet is no rank: it is the
#   shell that is about to start the ranks. It lacks one variable of the table.


# %%
# %%ranks
def who_am_i(environ):
    raise NotImplementedError  # your turn


checks.who_am_i(who_am_i, ranks)

# %% [markdown]
# #### Solution 1
#
# Folded. Open it when the check says *correct*, or after ten minutes.


# %% jupyter={"source_hidden": true} tags=["solution"]
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
# ## One file, four ways (CORE, 2 min)
#
# This lesson is one file in two forms: the notebook that you are in, and `scripts/00_start.py`, which holds the
# same cells. The notebook was the first way. The other three are typed into a terminal, in the course's folder, after
# `source .venv/bin/activate` (`python` and `mpiexec` are then the course's):
#
# ```bash
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/00_start.py    # torchrun
# mpiexec -n 4 python scripts/00_start.py                                                # MPI
# python scripts/00_start.py                                                             # alone: a world of one
# ```
#
# (`python -m torch.distributed.run` *is* `torchrun`, but surely that of this Python, not whichever comes first in
# your PATH.)
#
# The cell below does it with a program of four lines, first with torchrun, then with mpiexec, on two processes
# each, then alone.
#
# **Predict.** Each process says its rank, the world size and who started it. How many lines will there be in all?
#
# <details><summary>Answer</summary>
#
# Five: two, two and one. The program is the same each time; only the letter differs.
#
# </details>

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
# torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# mpiexec = [Path(sys.executable).parent / "mpiexec", "-n", "2", sys.executable]
# here = {**os.environ, "PYTHONPATH": os.path.abspath("../scripts"), "OMP_NUM_THREADS": "1"}
# for start in (torchrun, mpiexec, [sys.executable]) if mpiexec[0].exists() else (torchrun, [sys.executable]):
#     done = subprocess.run([*start, hello], env=here, capture_output=True, text=True, timeout=60)
#     print("\n".join(sorted(done.stdout.splitlines())) or done.stderr[-500:], end="\n\n")

# %% [markdown]
# ### Four processes are not yet a world of four
#
# ![One world of four ranks, and beside it four processes that are each rank 0 of a world of one](../assets/00_worlds.svg)
#
# One mistake costs whole nights. A cluster has two MPIs installed, and `mpiexec` comes from one, `mpi4py` from the
# other; or `srun` was set up without MPI. Then the letter is not read. Each of the four processes believes that it
# is *rank 0 of 1*, each trains on all of the data, each overwrites the same checkpoint, and the job ends with exit
# status 0.
#
# Print who you are in the first line of every log, and you will see it. `join()` prints it, and refuses such a
# start wherever it can notice: the launcher's variables say 4, MPI says 1.

# %% [markdown]
# ### Exercise 2: one world or many?
#
# `started` processes were started, and `said` lists what they said about themselves as `(rank, world_size)`, in no
# particular order. Is it one world? Worlds of one are not the only way to go wrong.


# %%
# %%ranks
def is_one_world(started, said):
    raise NotImplementedError  # your turn


checks.is_one_world(is_one_world, ranks)

# %% [markdown]
# #### Solution 2


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
def is_one_world(started, said):
    # each rank exactly once, and all agree on the size
    return sorted(said) == [(rank, started) for rank in range(started)]


checks.is_one_world(is_one_world, ranks, solution=True)

# %% [markdown]
# ## The smoke test (CORE, 3 min)
#
# Electricians switch a new device on and look whether smoke rises. The smoke test of a training machine is a model
# that nobody cares about, trained for a hundred steps on all ranks. It needs everything to work, from launcher to
# optimizer, and takes less than a minute.
#
# The model is a stack of linear layers, 128-1024-512-256-128-128, without activations. It learns to return its
# input; the loss is the summed squared error. Each rank makes its own random input, 64 samples per step.
#
# **Predict.** How many parameters are that? And how many bytes of gradients has each rank to share in a step, in
# float32?
#
# <details><summary>Answer</summary>
#
# 128·1024 + 1024·512 + 512·256 + 256·128 + 128·128 weights and 1024 + 512 + 256 + 128 + 128 biases make 837,632.
# There is one gradient for each, of 4 bytes: 3,350,528 bytes.
#
# </details>


# %% tags=["nbval-check-output"]
# %%ranks
def mlp():
    torch.manual_seed(0)  # the same start on every rank: copies must be copies
    sizes = [(128, 1024), (1024, 512), (512, 256), (256, 128), (128, 128)]
    return torch.nn.Sequential(*[torch.nn.Linear(a, b) for a, b in sizes]).to(device)


num_params = sum(p.numel() for p in mlp().parameters())
if rank == 0:
    say(f"{num_params:,} parameters, {4 * num_params:,} bytes of gradients per step")

# %% [markdown]
# Next the optimizer. **Predict.** The cell builds the same Adam twice. Which one takes longer, and by what factor?


# %%
# %%ranks
def seconds(call):
    """What `call()` returns, and how long it took."""
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


model = mlp()
_, startup_s = seconds(lambda: torch.optim.Adam(model.parameters()))
_, second_s = seconds(lambda: torch.optim.Adam(model.parameters()))
if rank == 0:
    say(f"first Adam {startup_s:.4f} s, second Adam {second_s:.4f} s")

# %% [markdown]
# When you ran the cell for the first time, the first Adam took a second or more, the second well below a millisecond. Nothing
# was computed in that second. Building the first optimizer imports `torch._dynamo`, part of PyTorch's compiler, and that is a
# great many files. (Run the cell again, and both are fast.) In a [published
# transcript](https://github.com/saforem2/personal_site/blob/82205852654c9b504ce732a0aae2e358e9b0bf2d/docs/talks/alcf-hpc-workshop-2024/alcf-hpc-workshop-2024.md)
# of this very smoke test, 2.0 of the 2.9 s in the profile are this one call. Who divides the whole by the number of steps
# measures an import. Keep the number, you will need it in the experiment.
#
# Now the library's way to train on several ranks, [DDP](../assets/glossary.md#ddp). It is the subject of lesson
# 03; here it is one line: its `backward` also averages the gradients over the ranks. In `step`, `dtf` is the time
# of forward, `dtb` of backward with its communication, `dt` of the whole step.


# %%
# %%ranks
def build():
    """Model under DDP, its optimizer, and this rank's own random numbers."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    own = torch.Generator().manual_seed(rank)  # seeds differ on purpose: each rank has data of its own
    return torch.nn.parallel.DistributedDataParallel(model), optimizer, own


def clock():
    synchronise(device)  # first let the device finish what it was given, then look at the clock
    return time.perf_counter()


def step(ddp, optimizer, own):
    """One training step: loss, dt, dtf, dtb; times in seconds."""
    t0 = clock()
    x_BD = torch.randn(batch, 128, generator=own).to(device)
    loss = (ddp(x_BD) - x_BD).square().sum()
    t1 = clock()
    loss.backward()
    t2 = clock()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), clock() - t0, t1 - t0, t2 - t1


# %% [markdown]
# All ranks make all steps, rank 0 prints. In a step every rank works through `batch` samples, so the world does
# `world_size * batch / dt` samples per second.

# %%
# %%ranks --timeout 300
parts = build()
losses, dt, dtf, dtb = zip(*[step(*parts) for _ in range(iterations)], strict=True)
if rank == 0:
    lines = ["step     loss    dt ms   dtf ms   dtb ms  samples/s"]
    for i in sorted({0, 1, *range(0, iterations, max(1, iterations // 8)), iterations - 1}):
        ms = "".join(f"{1e3 * times[i]:9.1f}" for times in (dt, dtf, dtb))
        lines.append(f"{i:4d} {losses[i]:8.0f}{ms} {world_size * batch / dt[i]:10.0f}")
    say("\n".join(lines))

# %% [markdown]
# How to read it. The loss falls, so the gradients are good enough to learn from. `dtf + dtb` is most of `dt`; the rest
# is the optimizer. On one device backward takes about twice as long as forward. Here `dtb` is typically much more than
# twice `dtf` (look at the plots; in single rows it was forward that had to wait): the difference is communication and,
# with more ranks than cores, waiting for a core.
#
# A terminal on a cluster has no pictures, but it has characters. Plots made of them survive in every log file.
# This one is the loss:

# %%
# %%ranks
if rank == 0:
    say(text_plot(losses, "loss", height=12))

# %% [markdown]
# And the speed, then where a step's time goes: the whole and its two parts. Look at the numbers at the axes, the
# three scales differ.

# %%
# %%ranks
if rank == 0:
    say(text_plot([world_size * batch / t for t in dt], "samples per second, all ranks", height=10))
    for name, times in [
        ("dt: the step", dt),
        ("dtf: forward", dtf),
        ("dtb: backward and communication", dtb),
    ]:
        say(text_plot([1e3 * t for t in times], f"{name}, ms", height=10))

# %% [markdown]
# **Do the ranks still hold the same model?** They saw different data. If the averaging works, all have made the
# same updates, and their parameters are equal to the last bit. A fingerprint tells, without sending a model
# around.

# %% tags=["nbval-check-output"]
# %%ranks
mine = fingerprint(parts[0].parameters())
prints = [None] * world_size
dist.all_gather_object(prints, mine)
say(f"{world_size} ranks, distinct models: {len(set(prints))}")
assert len(set(prints)) == 1
metrics.exact(num_params=num_params, losses=list(losses), model=mine)

# %% [markdown]
# **How much left this rank?** You predicted 3,350,528 bytes of gradients. `wire` counts twice: the calls that
# enter the library with what they carry, and, on Linux, the bytes that the sockets of this process delivered. An
# all-reduce on a ring of *n* ranks sends 2(*n*-1)/*n* times its data; lesson 02 builds it. Counting slows a step
# down, so this one is not timed.

# %%
# %%ranks
with wire.watch() as seen:
    step(*parts)
payload, gradients = seen.payload_bytes("all_reduce"), 4 * num_params
ring = wire.ring_all_reduce_bytes(gradients, world_size)
if rank == 0:
    calls, ratio = seen.count("all_reduce"), payload / gradients
    say(f"{calls} all-reduces carry {payload:,} bytes, predicted {gradients:,}, ratio {ratio:.3f}")
    if seen.transport_bytes and ring:
        sent = seen.transport_bytes
        say(f"the sockets delivered {sent:,} bytes, predicted {ring:,.0f}, ratio {sent / ring:.3f}")
metrics.exact(all_reduce_bytes=payload)

# %% [markdown]
# The first ratio is exactly 1. The second is a little above 1 for headers. With 4 ranks, each sends one and a half
# times its gradients, in every step. This is the price of data parallelism, and much of this course is about
# paying less.

# %% [markdown]
# ## Experiment: what does a short trial tell you? (CORE, 2 min)
#
# You are asked how long a thousand steps will take. You try *k* steps with a stopwatch, from start to end, and
# divide by *k*. Two numbers should describe what you find: the start *a*, which happens once, and a step *b*.
# Predicted is *a/k + b* per step.
#
# **Predict.** With *a* the seconds of the first Adam and *b* the median of `dt`: how many steps must your trial
# have before the start is less than a tenth of your result?
#
# <details><summary>Answer</summary>
#
# *a/k* must be below *b*/9, so *k* > 9 *a/b*. With 2 s for the start and 40 ms for a step that is 450 steps. A
# trial of 10 steps would say 240 ms per step: six times too much.
#
# </details>
#
# In the figure, expect a straight fall at the left, where the start is shared by ever more steps, and at the right
# a bend towards the dashed line, the step itself.

# %%
# %%ranks --timeout 300
catch_up(globals(), "mlp", "build", "clock", "step", "seconds")
if "dt" not in globals():  # only if you skipped the smoke test
    parts, startup_s = seconds(build)
    dt = [step(*parts)[1] for _ in range(iterations)]
median = sorted(dt)[len(dt) // 2]
trials = [k for k in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if k <= iterations]
measured = [(startup_s + sum(dt[:k])) / k for k in trials]
predicted = [startup_s / k + median for k in trials]
metrics.measured(startup_s=startup_s, median_step_s=median, samples_per_s=world_size * batch / median)

# %%
# %%ranks
if rank == 0:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.loglog(trials, [1e3 * t for t in measured], "o", color="#0072B2", label="measured: all time / steps")
    axes.loglog(trials, [1e3 * t for t in predicted], color="#0072B2", label="predicted: a/k + b")
    axes.axhline(1e3 * median, ls="--", color="#1a1a1a", label=f"b: the median step, {1e3 * median:.1f} ms")
    axes.set(
        xlabel="steps k of the trial", ylabel="ms per step", title=f"Short trials on {world_size} rank(s)"
    )
    axes.legend()
    show(
        figure,
        "trials",
        "time per step falls in a straight line with the length of the trial, then bends to the median step",
    )

# %%
# %%ranks
if rank == 0:
    for k, m, p in zip(trials, measured, predicted, strict=True):
        each, guess = f"{1e3 * m:7.1f} ms per step", f"predicted {1e3 * p:7.1f}"
        say(f"{k:4d} steps: {each}, {guess}, ratio {m / p:.2f}, {m / median:5.1f} x b")

# %% [markdown]
# Two numbers describe the curve well. What remains is ratio minus 1. At the left it is small in any case, because the
# start is nearly everything. Where it is more than a few per cent at the right, it shows what the median hides: the first
# steps, which are slower because buffers are
# allocated and connections opened (the **warm-up**), and single slow steps. On a laptop those come from your browser,
# and with more ranks than cores from ranks that wait for a core while the others wait for *them*: a collective is as
# slow as its slowest rank. So honest timing means: warm up, keep the samples, report the median *and* the slowest
# rank. (If your start was short, you have run these cells before. Restart the ranks, run from the top, look again.)

# %% [markdown]
# ## When to read the clock (CORE, 1 min)
#
# ![Python has queued forward and backward after 17 ms, the device needs most of a 284 ms step](../assets/00_clock.svg)
#
# A GPU works through a queue. `loss.backward()` puts work into it and returns; a clock that is read then has timed the *queueing*.
# The transcript mentioned above goes on with a GPT on four GPUs: forward and backward together take 17 ms of a 284 ms step
# (16.7, to be exact), and nobody asks where the other 267 are. They are spent in the first line that needs a number, such as
# `loss.item()`.
#
# A CPU does not queue its arithmetic. But communication is queued everywhere, so you can see the effect here too.
#
# **Predict.** An all-reduce of 16 MB is started with `async_op=True`. What part of its time has passed when the
# call returns?

# %%
# %%ranks
catch_up(globals(), "clock")
big = torch.ones(4_000_000, device=device)
dist.all_reduce(big.clone())  # warm up
dist.barrier()
start = clock()
work = dist.all_reduce(big, async_op=True)
returned_s = time.perf_counter() - start
work.wait()
done_s = clock() - start
if rank == 0:
    returned, done, part = 1e3 * returned_s, 1e3 * done_s, returned_s / done_s
    say(f"the call returned after {returned:.2f} ms, the sum was there after {done:.1f} ms: {part:.1%}")

# %% [markdown]
# About one per cent, or less. Without `wait()` you would have reported a network a hundred times as fast as yours.
# This is why `clock()` synchronises first: on a CPU that does nothing, on a GPU it is the difference between 17 ms
# and 284.

# %% [markdown]
# ## Exercises (MORE, 15 min)
#
# ### Exercise 3: whose turn is it?
#
# ![Ranks 0 to 3 write their line one after the other; each sends the pen to the next when done](../assets/00_pen.svg)
#
# The notebook sorts what ranks print. A file does not: who comes first writes first. Let every rank append one
# line to one file, **in rank order**, with nothing but `dist.send` and `dist.recv`. Call `append("...")` to write
# your line. It is slow, and slowest on rank 0, so that who does not wait overtakes. The check reads the file and
# counts messages.


# %%
# %%ranks
def in_turn(append, ranks):
    raise NotImplementedError  # your turn


checks.in_turn(in_turn, ranks)

# %% [markdown]
# #### Solution 3


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
# ### Exercise 4: read the profile
#
# Ten steps of the smoke test in one process, under Python's profiler. A deeper row is part of the row above it:
# the seconds of `Adam.__init__` contain those of the import. Of the rows one level below the whole, what was called once
# happened once; the others happen in each step.

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
# #### Solution 4


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
# 11.6 s, not 153: thirteen times less. 93 % of those ten steps was an import, and it happens once.

# %% [markdown]
# ## A bug from the zoo (CORE, 1 min)
#
# The GPT of that transcript reports 14 samples per second on its four GPUs, which did many more. Here is the line, in
# our words:


# %%
# %%ranks
def logged_samples_per_s(step_s):
    return world_size / step_s


# %% [markdown]
# **Find it by measuring.** Count the samples, look at a clock on the wall, divide. Then compare with what the line
# logs.

# %%
# %%ranks
catch_up(globals(), "mlp", "build", "clock", "step", "seconds")
steps, parts = 10, build()
dist.barrier()
_, loop_s = seconds(lambda: [step(*parts) for _ in range(steps)])
loop_s = max_over_ranks(loop_s, ranks)  # all ranks call it: the slowest decides
counted = steps * batch * world_size / loop_s
logged = logged_samples_per_s(loop_s / steps)
if rank == 0:
    say(f"logged {logged:.1f}, counted {counted:.1f} samples per second, ratio {counted / logged:.1f}")

# %% [markdown]
# <details><summary>What is wrong?</summary>
#
# The ratio is a whole number, `batch`: the line counts one sample per rank and step. In the transcript a step took
# 0.283 s on four ranks with 64 samples each: 4 / 0.283 = 14 were logged, and 64 times as many, 905, were true. Nothing
# crashes, nothing looks odd, and the table ends up in a report. The unit gives it away: `world_size / step_s` is ranks
# per second, and has no samples in it.
#
# </details>
#
# ### Exercise 5: mend it
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
# #### Solution 5


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
def samples_per_s(batch, step_s):
    # nobody starts the next step before the slowest rank has done this one
    return batch * len(step_s) / max(step_s)


checks.samples_per_s(samples_per_s, ranks, solution=True)

# %% [markdown]
# ## Threads and cores (MORE, 5 min)
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
usable = devices.cores(devices.look(os.environ))
a, threads_now = torch.randn(256, 256), torch.get_num_threads()
for threads in (1, 2):
    torch.set_num_threads(threads)
    slowest_s = median_s(lambda: a @ a, repeats=9, ranks=ranks).slowest_s
    if rank == 0:
        count = f"{world_size} x {threads} thread(s) on {usable} core(s)"
        say(f"{count}: {1e3 * slowest_s:7.2f} ms on the slowest rank")
torch.set_num_threads(threads_now)

# %% [markdown]
# With more threads than cores it is slower, often by a factor of ten or more, and not because of the arithmetic.
# The two halves of a product have to wait for each other, and they wait *spinning*: the thread that is done keeps
# its core busy asking "ready?", while the other half queues for that very core. The rule: ranks x threads per rank
# = cores. Launchers can also bind each rank to cores of its own: `mpiexec -bind-to core` (Hydra), `--cpu-bind
# depth` (PALS), `srun --cpu-bind=cores`.

# %% [markdown]
# ## On the cluster
#
# ```bash
# # one node
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/00_start.py --iterations 200
# # two nodes, PBS
# mpiexec -n 8 --ppn 4 python scripts/00_start.py --iterations 200
# # two nodes, Slurm
# srun --nodes 2 --ntasks 8 --ntasks-per-node 4 python scripts/00_start.py --iterations 200
# ```
#
# **Before an event**: `make doctor` looks at the machine, this script is the second look, `make preflight` runs
# everything.
#
# **What changes on GPUs.** `join()` puts each rank on the GPU of its local rank, and the group becomes
# `cpu:gloo,cuda:nccl` (on Intel GPUs `cpu:gloo,xpu:xccl`). The clock needs its synchronise. The first step takes
# many times as long as the others.
#
# **What to look for.** The first lines: how many ranks, on which hosts, on which devices, with how many cores and
# threads, started by whom. "1 rank" four times is the mistake of this lesson. "on cpu because ..." on a GPU node
# means fewer GPUs than ranks, or a module that is not loaded. And the number of distinct models must be 1.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the class on a cluster</summary>
#
# Run this script on the cluster the day before, on as many nodes as the class will use,
# and keep its output: it is the first thing to compare when something is odd. A participant whose first line says
# `1 rank` under mpiexec has the system's mpiexec in front of the environment's in PATH.
#
# </details>

# %% [markdown]
# ## Recap
#
# 1. A rank is a process: one program, started *n* times, each copy with a memory of its own. This is SPMD.
# 2. The rank counts through the world and says what you work on; the local rank counts on the node and says where.
# 3. A launcher tells each process who it is, by environment variables; `join()` reads them, whoever the launcher
#    was.
# 4. Four processes are a world of four only if they found each other: look at the first line of the log.
# 5. Time after a warm-up and a synchronise, report the median and the slowest rank, and give the number its unit.
#
# ## Further reading
#
# - [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html): what it sets, and how many nodes find each
#   other.
# - [mpi4py's tutorial](https://mpi4py.readthedocs.io/en/stable/tutorial.html), for those who want to know MPI
#   itself.
# - [srun](https://slurm.schedmd.com/srun.html), "Output environment variables": the long list behind the last row
#   of the table.
# - Next: [lesson 02](02_collectives.ipynb) builds the all-reduce that you have used here; lesson
#   01 stays on one device and asks where memory and time go.

# %%
# %%ranks
path = metrics.write()
if rank == 0:
    say(f"metrics: {'/'.join(path.parts[-3:])}")
leave()

# %% tags=["active-ipynb"]
# hands.stop()
