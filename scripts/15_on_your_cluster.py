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
# # 15 On your cluster
#
# **40 minutes** for the sections marked CORE, 71 with those marked MORE.
#
# A job runs without an error, and trains at half the speed of your neighbour's. The job file is the same. What
# differs is what each job got, and nobody tells you unless you ask.
#
# After this lesson **you can**
# - ask a job four questions before a long run: which cores, which GPUs, which channels, how slow are imports?
# - put each rank on the cores next to its GPU;
# - read in NCCL's log which network carries your data, and find the variable that breaks it;
# - prepare a job for nodes without internet, and copy data once per node;
# - run a sweep that trains every row exactly once.
#
# **You need** a first job ([lesson 04](04_first_job.ipynb)) and what a rank holds under DDP and FSDP
# ([lesson 06](06_zero_fsdp.ipynb)). MORE also uses [lesson 10](10_meshes_and_planning.ipynb)'s fake backend.
#
# **New here:** [module](../assets/glossary.md#module), [container](../assets/glossary.md#container),
# [node-local](../assets/glossary.md#node-local), [NUMA domain](../assets/glossary.md#numa-domain),
# [array job](../assets/glossary.md#array-job). Variables, flags and sources are in
# [the handbook](../assets/handbook/15_on_your_cluster.md).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 1, submit 4, cores 10, GPUs 4, channels 9, imports 7, zoo 2, card 1. The rest is for questions.
#
# *Before the event:* run `make jobs` with your site's account and submit `jobs/doctor.*` on two GPU nodes: its output is the
# best slide of the lesson. Bring the log of one job of your own with `NCCL_DEBUG=INFO` as well.
#
# *Say:* "Nothing in this lesson makes the loss better. It is what stands between you and the numbers of the other lessons."
#
# *Three usual mistakes:* a download inside the job; variables copied from another machine's wiki; a job that uses one core
# of 64.
#
# *When late:* give solution C, and keep the log and the zoo.
#
# *Ask the room:* "Your job is three times slower than the neighbour's, with the same file. What differs?" (What it got: its
# nodes, its cores and its environment variables.)
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
layers = 4  # layers of the presets scaled down, 2 to 12
largest = 1024  # most ranks that the fake backend plays, 64 to 4096
repeats = 5  # samples of each timing, at least 1
submit_via = "auto"  # who takes the job, one of auto, slurm, pbs, bash
wait_s = 60  # seconds that a cell watches the job before the lesson goes on, 0 to 3600

# %% [markdown]
# ## Start (CORE, 1 min)

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("15_on_your_cluster", globals())

# %%
# %%ranks
import torch
import torch.distributed as dist
from manyhands import ____, Metrics, card, compare, join, leave, say, show
from manyhands.checks import on_your_cluster as checks
from manyhands.checks.predictions import unanswered
from manyhands.launch import recorded_runs
from manyhands.lessons import on_your_cluster as lesson

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device

# %% jupyter={"source_hidden": true}
# %%ranks
from types import SimpleNamespace

from manyhands.data.corpus import get_batch, load_corpus
from manyhands.launch.run_folder import run_folder
from manyhands.measure.timing import take_turns

corpus = load_corpus(ranks)
metrics = Metrics(ranks, corpus, {"layers": layers, "largest": largest})
agreed = [run_folder(ranks) if rank == 0 else None]
dist.broadcast_object_list(agreed)  # all ranks: rank 0 says where
folder = agreed[0]

# %% [markdown]
# ## Submit, then ask (CORE, 4 min)
#
# Submit first: a job may wait. This one, `doctor`, asks for two nodes. Each of its ranks
# answers four questions, and then it ends.

# %% tags=["active-ipynb"]
# from manyhands.jobs.submit import scheduler, submit
#
# via = scheduler() or "bash" if submit_via == "auto" else submit_via
# job = submit("doctor", via=via)

# %% [markdown]
# While it waits, look at a recorded job on two nodes of two cores. Its owner had copied one flag from another machine's
# page: `--cpu-bind=map_cpu:0`.

# %% tags=["nbval-check-output"]
# %%ranks
sick = recorded_runs.text("15_doctor_one_core.out").splitlines()
if rank == 0:
    say("\n".join(line for line in sick[1:] if not line.startswith(" " * 20)))

# %% [markdown]
# The job ended with exit status 0. Only the line `cores` shows that two ranks took turns on one core.
#
# Now ask your own job. Without a scheduler it runs here, with two ranks.

# %% tags=["active-ipynb"]
# state = job.watch(wait_s)
# job.tail(14)

# %% [markdown]
# ## Question 1: which cores? (CORE, 10 min)
#
# `grep` finds a line of your job's output:

# %% tags=["active-ipynb"]
# job.grep("____")  # your turn: the word at the beginning of the line that you want

# %% [markdown]
# **Predict.** Repeat the mistake on this machine: as many ranks as it has cores compute, but all on one core. How
# many times as long does a matrix product take?

# %%
# %%ranks
guess_slower = ____  # your turn: times as long

# %% [markdown]
# The cell measures both cases in turn:

# %%
# %%ranks
shared = lesson.time_on_one_core(ranks, repeats)
metrics.measured(one_core_s=shared.samples[lesson.ONE], all_cores_s=shared.samples[lesson.ALL])
compare("one core instead of all: times as long, measured", "guess_slower", round(shared.ratio, 1), because=str(shared))
lesson.draw_one_core(shared, ranks, unanswered())

# %% [markdown]
# n ranks on one core take turns, so each waits n times as long. With a GPU the matrix products do not suffer, but
# data loading, kernel launches and the threads that feed the network do.
#
# A node's cores, GPUs and network cards sit in [**NUMA domains**](../assets/glossary.md#numa-domain). Within a domain,
# copies are short. So a rank should run on the cores next to its GPU.
#
# ![A node of Polaris: four domains of eight cores; the GPUs are numbered from the other end, GPU 3 in the domain of cores 0 to 7,
# and rank 0, bound to cores 0 to 7 by mistake, reaches GPU 0 across the whole node](../assets/15_affinity.svg)
#
# On [Polaris](https://docs.alcf.anl.gov/polaris/hardware-overview/machine-overview/) **GPU 0 is next to the last cores**,
# GPU 3 next to the first. Ranks that are bound to cores in order are all far from their GPUs. `nvidia-smi topo -m`
# prints this table for your own node.
#
# ### Build A: the cores next to a GPU
#
# `domains` is a list of `(cores, gpus)`. A GPU gets an equal share of its domain's cores, in the order of `gpus`.
# With `[([0, 1, ..., 11], [5, 2])]`, GPU 5 gets cores 0 to 5 and GPU 2 gets cores 6 to 11.


# %%
# %%ranks
def cores_beside(gpu, domains):
    """The cores for the rank of this GPU: a list."""
    for cores, gpus in domains:
        if ____:  # is it in this domain?
            each = ____  # cores for each GPU of the domain
            k = ____  # its place among them: 0, 1, ...
            return ____  # its cores


checks.cores_beside(cores_beside, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution A</summary>
#
# ```python
# def cores_beside(gpu, domains):
#     """The cores for the rank of this GPU: a list."""
#     for cores, gpus in domains:
#         if gpu in gpus:
#             each = len(cores) // len(gpus)
#             k = gpus.index(gpu)
#             return cores[k * each : (k + 1) * each]
# ```
#
# </details>

# %% [markdown]
# In a job a flag does this: `torchrun --numa-binding node`, or Slurm's `--gpu-bind=closest` if Slurm
# starts each rank. The handbook has PBS's flags.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: cores</summary>
#
# 10 minutes, four of them for build A. *Say:* `print(os.sched_getaffinity(0))` in the first minute of a job. *Usual mistakes:*
# counting cores by the GPU's number; giving all cores of a domain to each of its GPUs. *Usual question:* "does numa-binding
# matter?" PyTorch's page says 1 to 10 % in practice, more for some, nothing for others. One core for all ranks costs far more.
# *When late:* give solution A.
#
# </details>

# %% [markdown]
# ## Question 2: which GPUs? (CORE, 4 min)

# %% tags=["active-ipynb"]
# job.grep("GPUs  ")

# %% [markdown]
# Expect as many ranks as GPUs, a GPU for each, and nearly all of its memory free. Memory decides what you can train.
# `scripts/train.py` has two **presets** for a cluster, sets of flags under one name: `gpt-1b` runs under DDP, `gpt-7b`
# under FSDP. Both hold fp32 weights, gradients and Adam's two moments: 16 bytes per parameter.
#
# **Predict.** The 1B preset has 0.94 billion parameters. How many GB of this state does each of 64 GPUs hold under DDP?

# %%
# %%ranks
guess_gb = ____  # your turn: GB

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.config.options import model_config, read_options
from manyhands.lessons import on_your_cluster as lesson

P_of = {
    name: model_config(read_options(["--preset", name]), len(corpus.vocab)).num_params()
    for name in ("gpt-1b", "gpt-7b")
}


def on_a_gpu(preset, n=1):
    """GB on each of n GPUs that share the model, as the picture wants it."""
    gb = P_of[preset] / n / 1e3
    return SimpleNamespace(parameters=4 * gb, gradients=4 * gb, optimizer=8 * gb)


# %%
# %%ranks
compare("GB on each of 64 GPUs, 1B under DDP", "guess_gb", round(16 * P_of["gpt-1b"] / 1e9, 1), "GB")
if rank == 0:
    rungs = {"1B, DDP": on_a_gpu("gpt-1b"), "7B, DDP": on_a_gpu("gpt-7b")}
    rungs |= {f"7B, FSDP on {n}": on_a_gpu("gpt-7b", n) for n in (8, 64, 1024)}
    figure = lesson.draw_held_against_limit(rungs, 80e6, "GB on each GPU")
    show(figure, "presets", "GB on each GPU: the 7B needs FSDP", unanswered())

# %% [markdown]
# DDP's memory stays the same; FSDP's shrinks as ranks are added. Activations come on top: `train.py --dry-run` counts
# them too.

# %% [markdown]
# ## Question 3: which channels? (CORE, 9 min)

# %% tags=["active-ipynb"]
# job.grep("channels")

# %% [markdown]
# NCCL takes the best network that it finds. If it finds none, it falls back to TCP, and only `NCCL_DEBUG=INFO` shows
# that. The doctor sets it, and counts NCCL's *channels* by what follows `via`. (A channel is one of the parallel
# paths along which NCCL sends.)
#
# | `via` | it means |
# |---|---|
# | `NET/IB/0/GDRDMA` | another node: network `IB`, card 0, straight from the GPU's memory (GPUDirect RDMA) |
# | `NET/IB/0` | another node, through the host's memory: slower |
# | `NET/Socket/0` | another node over TCP: much slower, and fine only where there is no other network |
# | `P2P/CUMEM`, `P2P/IPC` | a GPU of the same node, directly |
# | `SHM/direct` | a GPU of the same node, through the host's memory: slower |
#
# Here are two nodes with a V100 each, from the administrator's manual of NVIDIA's Base Command Manager. Newer versions write
# `Channel 00/0 : 0[0] -> 1[0]`. The arrows are ours:

# %% tags=["nbval-check-output"]
# %%ranks
log = recorded_runs.text("15_nccl_sockets.out")
if rank == 0:
    for line in log.replace(" NCCL INFO", "").splitlines()[1:9]:
        say(("-> " if any(word in line for word in ("DISABLE", "Using network", "via")) else "   ") + line)

# %% [markdown]
# `NCCL_IB_DISABLE` is set, so NCCL did not look for InfiniBand. **The log cannot tell whether there was any.** Unset
# the variable, run again, and look for `NET/IB : Using`.
#
# ### Build B: which network?
#
# Return the name of the network between nodes (`"IB"`), and whether *all* its channels say `GDRDMA`. Return
# None if there is no `via NET/`. Then no channel leaves the node, but for `P2P/MNNVL` in a rack whose nodes NVLink joins.


# %%
# %%ranks
def network(log):
    """(name of the network between nodes, do all its channels reach the GPUs' memory directly?), or None."""
    ways = [line.split(" via ")[1] for line in log.splitlines() if " via " in line]  # "NET/IB/0/GDRDMA", "P2P/CUMEM"
    between = [way.split("/") for way in ways if ____]  # those to another node, in pieces
    if between:
        name = ____
        direct = ____
        return name, direct


checks.network(network, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def network(log):
#     """(name of the network between nodes, do all its channels reach the GPUs' memory directly?), or None."""
#     ways = [line.split(" via ")[1] for line in log.splitlines() if " via " in line]  # what is used, not what was found
#     between = [way.split("/") for way in ways if way.startswith("NET/")]
#     if between:
#         name = between[0][1]
#         direct = all("GDRDMA" in way for way in between)
#         return name, direct
# ```
#
# </details>

# %% [markdown]
# NCCL also reads `/etc/nccl.conf` and the file in `NCCL_CONF_FILE`, which `env` does not show. NVIDIA's
# [manual](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html) says of debugging variables: use them
# "only as workaround", and remove them "as soon as the issue is resolved". The handbook lists some.
#
# The right network may still be slow. Before a long run, time an all-reduce on the nodes that you *got*, with
# [nccl-tests](https://github.com/NVIDIA/nccl-tests), built with `make MPI=1`: `srun all_reduce_perf -b 32K -e 4G -f 2`.
# (Built by plain `make`, each task is [a world of one](https://github.com/NVIDIA/nccl-tests/issues/27), and its bandwidth
# means nothing: the header must list all ranks.) If one node is slow, exclude it (`sbatch --exclude`). The curves are published; your nodes should show the same shape.

# %% jupyter={"source_hidden": true}
# %%ranks --timeout 120
from statistics import median

from manyhands.plots.times import beside_published


def time_all_reduce(sizes_b=(2**15, 2**18, 2**21, 2**23)):
    """Draw the bus bandwidth of an all-reduce here next to published machines. All ranks call it."""
    tensors = {b: torch.ones(b // 4, device=device) for b in sizes_b}
    samples = take_turns({b: lambda b=b: dist.all_reduce(tensors[b]) for b in sizes_b}, repeats, ranks)
    if rank == 0:
        curves = recorded_runs.all_reduce_curves()
        seconds = [median(samples[b]) for b in sizes_b]
        figure = beside_published(sizes_b, seconds, world_size, curves, "an all-reduce on the nodes that you got")
        show(figure, "all_reduce", "bus bandwidth against bytes: GPU nodes and, far below, this machine")
        say("; ".join(f"{curve['name']}: {curve['hardware']}" for curve in curves))


# %%
# %%ranks --timeout 120
time_all_reduce()

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the log</summary>
#
# 9 minutes, four for build B. Let pairs read the log aloud before the table. *Usual mistakes:* taking `Bootstrap : Using eth0`
# for the data's way (ranks always meet over TCP); taking the GPU in brackets for the rank; believing `NET/IB : Using`, which
# says what was found. *Usual question:* "is a missing GDRDMA an error?" No: it works through the host's memory, slower.
#
# </details>

# %% [markdown]
# ## Question 4: how slow are imports? (CORE, 7 min)

# %% tags=["active-ipynb"]
# job.grep("imports")

# %% [markdown]
# `import torch` asks the file system for thousands of files. On the laptop they come from memory. On a cluster each call
# goes over the network to one shared file system.
#
# **Predict.** How many calls (open a file, or look whether it exists: *metadata operations*) does `import torch`
# make, when 64 nodes x 4 ranks all start at once?

# %%
# %%ranks
guess_calls = ____  # your turn: calls

# %%
# %%ranks
traced = recorded_runs.numbers("15_import_torch.json")
because = f"one process: {traced['calls']:,} calls for {traced['modules']:,} modules"
compare("file-system calls of 256 ranks that import torch", "guess_calls", 256 * traced["calls"], because=because)

# %% [markdown]
# ([strace](https://strace.io) counted them on one machine.) A [**container**](../assets/glossary.md#container) image is one
# file: once a node has opened it, most of these calls stay on the node.
#
# Compute nodes often have **no internet**. A library that tries to use it waits for a time-out, and so do all your
# GPUs:
#
# ![The login node loads packages and data from the internet onto the shared file system; compute nodes have no internet, read the
# shared file system, and keep a copy of what they read often on a disk of their own](../assets/15_offline.svg)
#
# So download on the login node, and tell the libraries in the job not to try:
#
# ```bash
# export HF_HOME=/shared/hf HF_HUB_OFFLINE=1 WANDB_MODE=offline
# ```
#
# ### Build C: one copy per node
#
# Data that you reread every epoch belongs on the node's local disk ([**node-local**](../assets/glossary.md#node-local)). One
# rank per node copies, and no rank reads until the copy is complete. A killed job may leave half a file, an earlier job
# the whole one. So copy to `part`, and rename it when it is complete: a file at `target` is always whole.


# %%
# %%ranks
def stage(copy, source, target, local_rank):
    """Have `source` at `target`, on this node's disk, before any rank returns. All ranks call it."""
    part = target.with_name(target.name + ".part")  # the name of a copy that is not complete
    if ____:  # which rank copies, and when is there nothing to do?
        copy(source, ____)
        ____  # complete: give it its name (part.rename)
    ____  # all ranks


checks.stage(stage, ranks, folder=folder)

# %% [markdown] tags=["solution"]
# <details><summary>Solution C</summary>
#
# ```python
# def stage(copy, source, target, local_rank):
#     """Have `source` at `target`, on this node's disk, before any rank returns. All ranks call it."""
#     part = target.with_name(target.name + ".part")
#     if local_rank == 0 and not target.exists():  # not rank: rank 0 is on the first node only
#         copy(source, part)  # also over what a killed job left
#         part.rename(target)
#     dist.barrier()  # all ranks
# ```
#
# </details>

# %% [markdown]
# A barrier has a time-out, 10 minutes with NCCL. For terabytes, copy before the ranks start: `sbcast` or one `cp` per node.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: imports and offline nodes</summary>
#
# 7 minutes, four for build C. Ask who has seen a job hang in `from_pretrained`. *Usual mistakes:* a proxy that works on one
# node; `pip install` in the job file; an environment in `$HOME`, which some sites mount read-only on compute nodes; `rank == 0`
# for `local_rank == 0`. *When late:* give solution C.
#
# </details>

# %% [markdown]
# ## A bug from the zoo: each row once (CORE, 2 min)
#
# A sweep is an [**array job**](../assets/glossary.md#array-job): one file, many tasks, and each takes a row of a
# table by its number. Below, `flags_of_task` takes the row, for tasks 1 to 6. **What is wrong, and what would
# show it?**

# %%
# %%ranks
from manyhands.course.folders import ROOT

table = [line for line in (ROOT / "jobs" / "sweep.tsv").read_text().splitlines() if not line.startswith("#")]
names, *rows = [line.split() for line in table]


def flags_of_task(task):
    row = rows[task : task + 1]
    return [word for values in row for pair in zip(names, values, strict=True) for word in (f"--{pair[0]}", pair[1])]


if rank == 0:
    for task in (1, 5, 6):
        say(f"task {task}: train.py {' '.join(flags_of_task(task))}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Tasks count from 1, Python from 0. The first row is never trained. Task 6 gets no flags, trains with the defaults,
# and ends with status 0. No loss curve shows it. Count the different settings that ran.
#
# </details>

# %% [markdown]
# ## Recap (CORE, 1 min)

# %%
# %%ranks
card(
    "Ask first: cores, GPUs, channels, imports. A job that got too little ends with status 0.",
    "A rank runs on the cores next to its GPU. GPU 0 may be next to the last cores.",
    "`via NET/...` in NCCL's log is the network in use. Unset what your site does not ask for.",
    "Compute nodes have no internet: environment, data and caches are there before the job.",
    "Local rank 0 copies for its node, under another name until the copy is complete; then a barrier.",
    figure="a node's cores, GPUs and network cards (15_affinity.svg)",
    command="sbatch jobs/doctor.slurm   (or: qsub jobs/doctor.pbs)",
)

# %% [markdown]
# Below is the lab to choose from. Variables, flags and links are in [the
# handbook](../assets/handbook/15_on_your_cluster.md).

# %% [markdown]
# ## Lab: two presets at full size (MORE, 10 min)
#
# A preset fixes the global batch: 512 sequences of 2,048 tokens. The job decides how many ranks share it. Let each rank
# read 4 sequences at a time (`--train.micro-batch 4`).
#
# **Predict.** On 64 GPUs: how many micro-batches does a rank read per step, and how many tokens is a step? And on two nodes of
# 12 GPUs?
#
# <details><summary>Answer</summary>
#
# 512 / (64 · 4) = 2 micro-batches, and 512 · 2,048 = 1,048,576 tokens on any number of ranks. Over 24 ranks 512 does not split:
# the trainer refuses. Give it `--train.global-batch 480 --train.micro-batch 5`, or use 16 of the 24.
#
# </details>


# %% tags=["nbval-check-output"]
# %%ranks
def micro_batches(global_batch, n, micro_batch):
    """Micro-batches of each rank in a step, or why there is no such number."""
    share, left = divmod(global_batch, n * micro_batch)
    return f"{n} ranks: {share} per step" if not left else f"{n} ranks x {micro_batch} do not divide {global_batch}"


if rank == 0:
    say("; ".join(micro_batches(512, n, 4) for n in (8, 64, 24)))
    say(micro_batches(480, 24, 5))

# %% [markdown]
# Before you ask for nodes, ask whether the model fits. If no flag gives a micro-batch, the trainer takes the largest one
# that fits into a GPU:

# %% tags=["nbval-check-output"]
# %%ranks
from manyhands.config.options import read_options
from manyhands.train.dry_run import describe

if rank == 0:
    for preset, n in (("gpt-1b", 8), ("gpt-7b", 64)):
        options = read_options(["--preset", preset, "--dry-run", "--ranks", str(n), "--gpu-gib", "80"])
        told = [line[2:] for line in describe(options, n).splitlines() if line.startswith("# ")]
        say("\n".join(line for line in told if line.startswith(("model", "ranks", "a step", "it fits", "IT DOES"))))

# %% [markdown]
# The sizes follow
# [OLMo](https://github.com/allenai/OLMo/blob/0bb7f7dbd0c54e26fdfb0c7deeb1324ed2c84662/configs/official/OLMo-7B.yaml)
# of 2024; the model is this course's GPT, with a smaller vocabulary and a smaller step. So OLMo's learning rate,
# which the preset takes, may not be the best here ([lesson 05](05_same_science.ipynb)). The handbook has all
# differences.
#
# The ranks of this notebook run both presets for real, scaled down: the same flags, a smaller model, and two micro-batches per
# step.
#
# **Predict.** How many bytes per parameter do DDP's all-reduces carry in a step, if it averages once per step? And if
# it averages once per micro-batch?
#
# <details><summary>Answer</summary>
#
# Gradients are fp32: 4 bytes once per step, 8 once per micro-batch. The trainer averages once, after the last micro-batch.
#
# </details>

# %%
# %%ranks
from manyhands.measure import wire
from manyhands.train.dry_run import model_from_flags

SMALL = (
    f"--model.n-layer {layers} --model.n-head 2 --model.n-embd 32 --model.block-size 32 --model.vocab-size 128 "
    f"--train.global-batch {4 * world_size} --train.micro-batch 2 "
)


def one_step(flags, precision="fp32"):
    """(loss, calls, the model spread over the ranks) of a step of the preset in `flags`, scaled down. All ranks call it."""
    placed = model_from_flags(f"{SMALL} {flags} --train.precision {precision}", ranks, len(corpus.vocab))
    share = get_batch(corpus.train_ids, 0, 4 * world_size, 32, rank, world_size, seed=1)
    with wire.watch() as seen:
        loss = placed.parallel.forward_backward(*(ids.to(device) for ids in share))
    return placed.parallel.mean_loss(loss).item(), seen, placed


# %%
# %%ranks
loss_1b, seen, placed = one_step("--preset gpt-1b --parallel.all-reduce buckets")
P = placed.config.num_params()
by_ddp = seen.payload_bytes("all_reduce") / P
if rank == 0:
    say(f"gpt-1b scaled to {P:,} parameters: loss {loss_1b:.4f}")
    say(f"2 micro-batches; all-reduces: {seen.count('all_reduce')}, {by_ddp:.2f} bytes per parameter in all")

# %% [markdown]
# ### Wrapping and sharding
#
# The 7B has more to choose: what is gathered at once (`--parallel.wrapping`: each block, two blocks, or all as one
# unit, the root), in which precision, and for how long it is kept (`--parallel.sharding`).
#
# **Predict.** With 2 micro-batches, which choice makes the fewest all-gathers, and which gathers the fewest bytes? Does the
# loss change?
#
# <details><summary>Answer</summary>
#
# One unit makes the fewest calls: one per micro-batch. (The unit is kept until its backward.) By block there is a
# call for each block before its forward and before its backward, in each micro-batch. If units are kept after forward
# (`grad_op`), the fewest bytes are gathered: each unit once per step, because it stays whole over both micro-batches.
# Apart from bf16 rounding the loss is the same: wrapping changes when weights are gathered, not their values.
#
# </details>

# %%
# %%ranks
WAYS = {
    "by block": "",
    "by block, in bf16": "",
    "in pairs of blocks": "--parallel.wrapping block_group:2",
    "one unit, the root": "--parallel.wrapping size:1000000000000",
    "kept after forward": "--parallel.sharding grad_op",
}
losses = {}
for name, flags in WAYS.items():
    flags = f"--preset gpt-7b --parallel.activation-checkpointing none {flags}"
    losses[name], seen, placed = one_step(flags, "bf16" if "bf16" in name else "fp32")
    gathers, gathered = seen.count("all_gather"), seen.payload_bytes("all_gather")
    formula = placed.sent_by_formula.get("all_gather")  # from the configuration alone
    assert formula is None or (gathers, gathered) == (formula.calls, formula.payload_bytes)
    if rank == 0:
        say(f"{name:20} loss {losses[name]:.4f}; all-gathers: {gathers:2}, {gathered / P:4.1f} bytes per parameter")

# %% [markdown]
# The calls and bytes are those of the dry run's formula. And the loss is equal to that of one process that reads the
# whole batch:

# %%
# %%ranks
from manyhands.parallel.strategy import full_model

whole_batch = get_batch(corpus.train_ids, 0, 4 * world_size, 32, 0, 1, seed=1)
alone = full_model(placed.config, placed.options).to(device)
with torch.no_grad():
    expected = alone(*(ids.to(device) for ids in whole_batch))[1].item()
apart = {name: abs(loss - expected) for name, loss in losses.items()}
assert max(gap for name, gap in apart.items() if "bf16" not in name) < 1e-5
if rank == 0:
    say(f"one process: loss {expected:.4f}; in bf16 {apart['by block, in bf16']:.1e} away, the others less than 1e-5")

# %% [markdown]
# Fewer, longer messages cost memory: as one unit, the whole model is in memory at once. At full size, for ranks we do
# not have, the [fake backend](../assets/glossary.md#fake-backend) of [lesson 10](10_meshes_and_planning.ipynb) shards
# the real shapes (512 sequences do not split over 1,024 ranks, so the step grows):

# %%
# %%ranks --timeout 300
import math

from manyhands.predict.simulated_rank import in_own_process

full_size = {}
if rank == 0:  # nothing is sent: one process plays rank 0 of each world
    worlds = sorted({8, 64, largest})
    batch = ["--train.global-batch", str(4 * math.lcm(64, largest))]
    for preset in ("gpt-1b", "gpt-7b"):
        played = in_own_process(worlds, ["--preset", preset, *batch], timeout_s=240)
        for n, found in zip(worlds, played, strict=True):
            held, planned = (sum(found[key][kind] for kind in found["held"]) for key in ("held", "planned"))
            full_size[f"{preset} {n}"] = held
            say(f"{preset} on {n:5,} ranks, {found['layout']:12} rank 0 holds {held / 1e9:7.3f} GB")
            assert abs(held / planned - 1) < 0.02, "the dry run would say something else"
metrics.exact(by_ddp=by_ddp, full_size=full_size, losses=[loss_1b, *losses.values()])

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: presets</summary>
#
# The dry run counts activations, the fake backend only what lasts from step to step. *Ask:* "why not one unit, if it makes the
# fewest calls?" (13 GB of weights in bf16 at once, and no overlap: nothing computes while it is gathered.)
#
# </details>

# %% [markdown]
# ### What wrapping costs on many nodes
#
# A flat ring's all-gather of B bytes on n ranks takes at most (n - 1) α + B (n - 1) / (n β). The bytes are the same for any
# wrapping; the first part is paid per call. α = 3.31 µs and β = 4 MiB / 181.7 µs are
# [measured](https://github.com/EESSI/docs/blob/main/docs/blog/posts/2026/05/eessi-cray-slingshot11-part2.md) between two GH200
# nodes (MPI on Slingshot 11). This is an **upper bound**: most hops of a ring stay within a node, where α is smaller, and NCCL
# can also use trees, with about log₂ n hops ([PAT](https://arxiv.org/abs/2506.20252)).

# %%
# %%ranks
alpha_s, beta = 3.31e-6, 2**22 / 181.7e-6  # per hop; bytes/s
weights = 2 * 6.715e9  # bytes of 7 B in bf16
if rank == 0:
    for name, calls, gathered in (("by block", 2 * 32 + 1, 2 * weights), ("one unit", 1, weights)):
        for n in (64, 256, 1024):
            latency_s, bytes_s = calls * (n - 1) * alpha_s, gathered * (n - 1) / n / beta
            say(
                f"{name}, {n:5,} ranks: {latency_s:5.2f} s of latency at most + {bytes_s:4.2f} s of bytes per micro-batch"
            )

# %% [markdown]
# By block, the gathers can hide behind computation; the gather of one unit cannot. So only a measurement tells which
# is faster: run both on the nodes that you will use.

# %% [markdown]
# ## Exercises (MORE, 18 min)
#
# ![Six tasks and six rows: shifted by one, the first row is never taken and the last task has none; counted from one, each task has
# its row](../assets/15_sweep.svg)
#
# Our `jobs/sweep.*` refuse an array that is not as long as its table, and print each row. (Another bug of this kind:
# a configuration whose warm-up was 1,000 steps in a run of 515, so that the learning rate never reached its peak.
# `train.py` refuses that too.)
#
# ### Exercise 1: mend the sweep
#
# Write `flags_of(lines, task, tasks)` for the lines of such a file. Comments begin with `#`, lines may be empty, and the first
# other line is the header. If `tasks`, the length of the array, is not the number of rows, raise a `ValueError` that names both
# numbers.


# %%
# %%ranks
def flags_of(lines, task, tasks):
    """The flags of task number `task` (the first is 1) of an array of `tasks`: a list of words."""
    raise NotImplementedError  # your turn


checks.flags_of(flags_of, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 1</summary>
#
# ```python
# def flags_of(lines, task, tasks):
#     """The flags of task number `task` (the first is 1) of an array of `tasks`: a list of words."""
#     names, *rows = [line.split() for line in lines if line.strip() and not line.startswith("#")]
#     if tasks != len(rows):
#         raise ValueError(f"an array of {tasks} tasks for {len(rows)} rows; submit it with --array=1-{len(rows)}")
#     return [word for name, value in zip(names, rows[task - 1], strict=True) for word in (f"--{name}", value)]
# ```
#
# </details>

# %% [markdown]
# ### Exercise 2: your job's directives
#
# Write `directives(nodes, gpus, cores, minutes)`: the `#SBATCH` lines, as a list, of a job in which one torchrun on each node
# starts a rank per GPU. `gpus` and `cores` are those of one node, and the job gets all of them. `--time` is written HH:MM:SS.


# %%
# %%ranks
def directives(nodes, gpus, cores, minutes):
    """Lines for the head of a Slurm job file: --nodes, --ntasks-per-node, --cpus-per-task, --gpus-per-node, --time."""
    raise NotImplementedError  # your turn


checks.directives(directives, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 2</summary>
#
# ```python
# def directives(nodes, gpus, cores, minutes):
#     """Lines for the head of a Slurm job file: --nodes, --ntasks-per-node, --cpus-per-task, --gpus-per-node, --time."""
#     asked = {"nodes": nodes, "ntasks-per-node": 1, "cpus-per-task": cores, "gpus-per-node": gpus}
#     asked["time"] = f"{minutes // 60:02d}:{minutes % 60:02d}:00"
#     return [f"#SBATCH --{option}={value}" for option, value in asked.items()]
# ```
#
# </details>

# %% [markdown]
# ### Exercise 3: leave out the slow node
#
# You have timed `all_reduce_perf` on pairs of the nodes that you got. A pair is as slow as the slower of the two, so one slow
# pair does not say which node it is. `measured` has GB/s for each pair: `{("node03", "node17"): 45.1, ...}`. Write
# `to_exclude(measured, least)`: the names, sorted, of the nodes of which *no* pair reaches `least` GB/s.


# %%
# %%ranks
def to_exclude(measured, least):
    """The nodes to leave out (`sbatch --exclude`): a sorted list."""
    raise NotImplementedError  # your turn


checks.to_exclude(to_exclude, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 3</summary>
#
# ```python
# def to_exclude(measured, least):
#     """The nodes to leave out (`sbatch --exclude`): a sorted list."""
#     nodes = {node for pair in measured for node in pair}
#     fine = {node for pair, speed in measured.items() if speed >= least for node in pair}
#     return sorted(nodes - fine)
# ```
#
# </details>

# %% [markdown]
# ## On the cluster (MORE, 3 min)
#
# Work in pairs, in the course's folder on the login node. You edit this block of the job file:

# %% tags=["active-ipynb"]
# from manyhands.course.folders import ROOT
#
# !sed -n "/edit here/,/end of what/p" "{ROOT}"/jobs/train.slurm

# %% [markdown]
# Submit, follow the log, and try one option at a time:
#
# ```bash
# make jobs SITE=polaris ACCOUNT=MyProject GPUS=4 NODES=2            # your site's lines, once
# sbatch jobs/doctor.slurm                                           # what did we get?
# sbatch jobs/train.slurm --preset gpt-1b --model.n-layer 4         # DDP
# sbatch jobs/train.slurm --preset gpt-7b --model.n-layer 4 --parallel.wrapping block_group:2
# qsub -v TRAIN_ARGS="--preset gpt-7b --model.n-layer 4" jobs/train.pbs
# tail -f train.o4711                                                # Ctrl-C leaves the job running
# sbatch jobs/sweep.slurm --preset shakespeare                       # qsub jobs/sweep.pbs: a task per row
# ```
#
# To get into a running job: `srun --jobid=4711 --overlap --pty bash`, or under PBS `ssh` to a node that `qstat -f
# 4711` names, where the site allows it. Then look at `nvidia-smi` and `top`. Does the log grow?
#
# **What changes on GPUs.** Everything: one rank per GPU, no internet, pinned cores, the fast network.
#
# **What to look for.** As many ranks as GPUs; the loss of the first step near ln of the vocabulary; `via NET/` with your site's
# network; `nvidia-smi` with all GPUs busy; tokens per second that hardly fall from one node to two.

# %% [markdown]
# ## Further reading
#
# Sites' and vendors' pages are in the [handbook](../assets/handbook/15_on_your_cluster.md#further-reading).

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
