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
# **40 minutes** for the sections marked CORE, 54 with those marked MORE.
#
# After this lesson **you can**
# - move a run from the laptop to PBS or Slurm, onto nodes without internet;
# - say beforehand whether a preset fits, and choose its wrapping;
# - put each rank on the cores beside its GPU, and each node's data on its own disk;
# - read what NCCL says of the network, and find the variable that spoils it;
# - watch a running job from inside, and run a sweep whose rows are each trained once.
#
# **You need** a first job ([lesson 04](04_first_job.ipynb)), DDP ([lesson 03](03_data_parallel.ipynb)) and FSDP: shards, and
# units that are gathered when they are needed ([lesson 06](06_zero_fsdp.ipynb)).
#
# **New here:** [module](../assets/glossary.md#module), [container](../assets/glossary.md#container),
# [node-local](../assets/glossary.md#node-local), [NUMA domain](../assets/glossary.md#numa-domain),
# [array job](../assets/glossary.md#array-job).
#
# The same file is a script:
#
# ```bash
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/15_on_your_cluster.py
# mpiexec -n 4 python scripts/15_on_your_cluster.py --largest 64
# ```

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# The headings say the minutes. Builds take about four minutes each, exercise 1 five.
#
# *Before the event:* run `make jobs` with your site's account, submit `jobs/train.*` with both presets scaled down, and bring
# the log of one job of your own with `NCCL_DEBUG=INFO`: it teaches more than the published one.
#
# *Say:* "Nothing in this lesson makes the loss better. It is what stands between you and the numbers of the other lessons."
#
# *In pairs, while the builds are checked:* one edits `TRAIN_ARGS` and submits, the other follows with `tail -f`; then a second
# wrapping, and compare tokens per second. Full sizes need the nodes that the dry run names: on two nodes take `--model.n-layer 4`.
#
# *Three usual mistakes:* a download inside the job; variables copied from another machine's wiki; a job that uses one core of 64.
#
# *When late:* skip build A (read the solution), keep the log and the zoo.
#
# *Ask the room:* "Your job is three times slower than the neighbour's, with the same file. What differs?" (The environment.)
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
layers = 4  # layers of the presets scaled down, 2 to 12
largest = 1024  # most ranks that the fake backend plays, 64 to 4096
repeats = 5  # samples of each timing, at least 1

# %% [markdown]
# ## Start (CORE, 2 min)
#
# The first cell starts four ranks, on which cells that begin with `%%ranks` run. Each section needs only the cells of this one.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("15_on_your_cluster", globals())

# %%
# %%ranks
import torch
import torch.distributed as dist
from manyhands import Metrics, join, leave, say, show
from manyhands.checks import on_your_cluster as checks
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.launch.run_folder import run_folder

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
corpus = load_corpus(ranks)
metrics = Metrics(ranks, corpus, {"layers": layers, "largest": largest})
agreed = [run_folder(ranks) if rank == 0 else None]
dist.broadcast_object_list(agreed)  # all ranks: rank 0 says where
folder = agreed[0]

# %% [markdown]
# ## Warm-up: the same step on more ranks (CORE, 2 min)
#
# A preset fixes the step: 512 sequences of 2,048 tokens. The job decides how many ranks share it, and each rank reads 4
# sequences at a time.
#
# **Predict.** On 64 GPUs: how many micro-batches does a rank read per step, and how many tokens is a step? And on two nodes of
# 12 GPUs?
#
# <details><summary>Answer</summary>
#
# 512 / (64 · 4) = 2 micro-batches, and 512 · 2,048 = 1,048,576 tokens on any number of ranks. Over 24 ranks 512 does not split:
# the trainer refuses. Give it `--train.global-batch 480 --train.micro-batch 5`, or 20 of the 24.
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
# ## What a compute node lacks (CORE, 7 min)
#
# **Why.** On the laptop, whatever is missing comes from the internet while you wait. Compute nodes often have no internet, and a
# job that asks for it waits for a time-out, with all its GPUs.
#
# ![The login node loads packages and data from the internet onto the shared file system; compute nodes have no internet, read the
# shared file system, and keep a copy of what they read often on a disk of their own](../assets/15_offline.svg)
#
# So everything is there *before* the job starts:
#
# | what | on the login node | why not in the job |
# |---|---|---|
# | Python, torch, MPI | `make kernel`, or the site's [**modules**](../assets/glossary.md#module) with `SITE_PYTHON=...` | no internet |
# | the corpus | `make kernel` fetches it; yours: `prepare_data.py` | no internet |
# | all of it as one file | `apptainer build manyhands.sif jobs/manyhands.def` | thousands of small files |
# | modules, variables | `site_setup` in the job file; `make jobs SITE=...` writes it | your shell's do not come along under PBS |
#
# A [**container**](../assets/glossary.md#container) holds the environment as one file. Ours installs the course's pinned versions.
# It must also hold what the *network* needs: an image without `libibverbs` made NCCL fall back to TCP, and adding it "greatly
# [speeds up](https://github.com/sgl-project/sglang/pull/1427)" jobs on several nodes.
#
# **Predict.** How many files does `import torch` read? How many are that on 64 nodes with 4 ranks each, at the same time?

# %%
# %%ranks
import subprocess
import sys

if rank == 0:
    count = "print(sum(bool(getattr(m, '__file__', None)) for m in list(sys.modules.values())))"
    command = [sys.executable, "-c", f"import sys, torch; {count}"]
    files = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    say(f"import torch: {files:,} modules, each a file; on 256 ranks {256 * files:,} files are opened")

# %% [markdown]
# A shared file system answers each of these over the network. One container, opened once per node, spares it nearly all of them.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: offline nodes</summary>
#
# Ask who has seen a job hang in `from_pretrained`. *Usual mistakes:* a proxy that works on one node; `pip install` in the job
# file; an environment in `$HOME`, which some sites mount read-only on compute nodes.
#
# </details>

# %% [markdown]
# ### Build A: one copy per node
#
# Data that each epoch reads again belongs on the node's own disk ([**node-local**](../assets/glossary.md#node-local)). One rank
# of each node copies, and nobody reads before the copy is whole. Write `stage(copy, source, target, local_rank)`. `copy(source,
# target)` copies. A job that was killed may have left half a file at `target`. All ranks call `stage`.


# %%
# %%ranks
def stage(copy, source, target, local_rank):
    """Have `source` at `target`, on this node's disk, before any rank returns. All ranks call it."""
    raise NotImplementedError  # your turn


checks.stage(stage, ranks, folder=folder)

# %% [markdown] tags=["solution"]
# <details><summary>Solution A</summary>
#
# ```python
# def stage(copy, source, target, local_rank):
#     """Have `source` at `target`, on this node's disk, before any rank returns. All ranks call it."""
#     if local_rank == 0:  # not rank: rank 0 is on the first node only
#         copy(source, target)  # also over what is there: it may be half a file
#     dist.barrier()  # all ranks
# ```
#
# </details>

# %% [markdown]
# ## Two presets (CORE, 7 min)
#
# **Why.** `scripts/train.py` has two sizes for a cluster. Before you ask for nodes, ask whether they fit:

# %%
# %%ranks
from manyhands.config.options import read_options
from manyhands.train.dry_run import describe

if rank == 0:
    for preset, n in (("olmo-1b", 8), ("olmo-7b", 64)):
        options = read_options(["--preset", preset, "--dry-run", "--ranks", str(n), "--gpu-gib", "80"])
        told = [line[2:] for line in describe(options, n).splitlines() if line.startswith("# ")]
        say("\n".join(line for line in told if line.startswith(("model", "ranks", "a step", "it fits", "IT DOES"))))

# %% [markdown]
# The sizes and learning rates are those of [OLMo](https://github.com/allenai/OLMo/tree/main/configs/official); the model is this
# course's GPT. The 1B fits whole, so it runs under DDP, which averages once per step, after the last micro-batch. (OLMo calls
# that `grad_sync_mode: batch`. Its `find_unused_params` stays false: true makes DDP walk the graph in each step, for models that
# leave parameters out.) The 7B needs FSDP, a unit per block, with gathers in bf16.
#
# **Predict.** Two micro-batches per step. How many bytes do DDP's all-reduces carry per parameter, once per step, and once per
# micro-batch?
#
# <details><summary>Answer</summary>
#
# Gradients are fp32: 4 bytes once per step, 8 once per micro-batch.
#
# </details>
#
# On the ranks of this notebook both presets run for real, scaled down: the same flags, a smaller model.

# %%
# %%ranks
from manyhands.measure import wire
from manyhands.train.dry_run import model_from_flags

SMALL = (
    f"--model.n-layer {layers} --model.n-head 2 --model.n-embd 32 --model.block-size 32 --model.vocab-size 128 "
    f"--train.global-batch {4 * world_size} --train.micro-batch 2 "
)


def one_step(flags, precision="fp32"):
    """(loss, calls, what is spread) of a step of the preset in `flags`, scaled down. All ranks call it."""
    spread = model_from_flags(f"{SMALL} {flags} --train.precision {precision}", ranks, len(corpus.vocab))
    share = get_batch(corpus.train_ids, 0, 4 * world_size, 32, rank, world_size, seed=1)
    with wire.watch() as seen:
        loss = spread.parallel.forward_backward(*(ids.to(device) for ids in share))
    return spread.parallel.mean_loss(loss).item(), seen, spread


# %%
# %%ranks
loss_1b, seen, spread = one_step("--preset olmo-1b --parallel.all-reduce buckets")
P = spread.config.num_params()
by_ddp = seen.payload_bytes("all_reduce") / P
if rank == 0:
    say(f"olmo-1b scaled to {P:,} parameters: loss {loss_1b:.4f}")
    say(f"2 micro-batches; all-reduces: {seen.count('all_reduce')}, {by_ddp:.2f} bytes per parameter in all")

# %% [markdown]
# ### Wrapping and sharding
#
# The 7B has more to choose. What is gathered at once (`--parallel.wrapping`), in which precision, and for how long
# (`--parallel.sharding`): by block, in pairs of blocks, or all as one unit, the root.
#
# **Predict.** With 2 micro-batches, which of them makes the most all-gathers, and which the fewest? Does the loss change?
#
# <details><summary>Answer</summary>
#
# By block the most: each block before its forward and its backward, in each micro-batch. The root alone is gathered once per
# micro-batch: it is kept for the backward. The loss is the same but for bf16's rounding: wrapping decides *when* weights are
# there, not what they are.
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
    flags = f"--preset olmo-7b --parallel.activation-checkpointing none {flags}"
    losses[name], seen, spread = one_step(flags, "bf16" if "bf16" in name else "fp32")
    gathers, gathered = seen.count("all_gather"), seen.payload_bytes("all_gather")
    formula = spread.sent_by_formula.get("all_gather")  # from the configuration alone
    assert formula is None or (gathers, gathered) == (formula.calls, formula.payload_bytes)
    if rank == 0:
        say(f"{name:20} loss {losses[name]:.4f}; all-gathers: {gathers:2}, {gathered / P:4.1f} bytes per parameter")

# %% [markdown]
# The calls and bytes are those of the dry run's formula. And the loss is that of one process, which reads the whole batch:

# %%
# %%ranks
from manyhands.parallel.strategy import full_model

whole_batch = get_batch(corpus.train_ids, 0, 4 * world_size, 32, 0, 1, seed=1)
alone = full_model(spread.config, spread.options).to(device)
with torch.no_grad():
    expected = alone(*(ids.to(device) for ids in whole_batch))[1].item()
apart = {name: abs(loss - expected) for name, loss in losses.items()}
assert max(gap for name, gap in apart.items() if "bf16" not in name) < 1e-5
if rank == 0:
    say(f"one process: loss {expected:.4f}; in bf16 {apart['by block, in bf16']:.1e} away, the others less than 1e-5")

# %% [markdown]
# Fewer, longer messages cost memory: as one unit, the whole model is there at once. In full
# size, on ranks that are not here, the [fake backend](../assets/glossary.md#fake-backend) of
# [lesson 10](10_meshes_and_planning.ipynb) cuts the real shapes (512 sequences do not split over
# 1,024 ranks, so the step grows):

# %%
# %%ranks --timeout 300
import math

from manyhands.predict.simulated_rank import in_own_process

full_size = {}
if rank == 0:  # nothing is sent: one process plays rank 0 of each world
    worlds = sorted({8, 64, largest})
    batch = ["--train.global-batch", str(4 * math.lcm(64, largest))]
    for preset in ("olmo-1b", "olmo-7b"):
        played = in_own_process(worlds, ["--preset", preset, *batch], timeout_s=240)
        for n, found in zip(worlds, played, strict=True):
            held, planned = (sum(found[key][kind] for kind in found["held"]) for key in ("held", "planned"))
            full_size[f"{preset} {n}"] = held
            say(f"{preset} on {n:5,} ranks, {found['layout']:12} rank 0 holds {held / 1e9:7.3f} GB")
            assert abs(held / planned - 1) < 0.02, "the dry run would say something else"

# %% [markdown]
# DDP's line does not move; FSDP's falls with the number of ranks.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: presets</summary>
#
# The dry run counts activations, the fake backend only what lasts from step to step. *Ask:* "why not one unit, if it makes the
# fewest calls?" (13 GB of weights in bf16 at once, and no overlap: nothing computes while it is gathered.)
#
# </details>

# %% [markdown]
# ### What wrapping costs on many nodes (MORE, 2 min)
#
# A ring's all-gather of B bytes on n ranks takes (n - 1) α + B (n - 1) / (n β). The bytes are the same for any wrapping; the
# first part is paid per call. α = 3.31 µs and β = 4 MiB / 181.7 µs are
# [measured](https://github.com/EESSI/docs/blob/main/docs/blog/posts/2026/05/eessi-cray-slingshot11-part2.md) between two GH200 nodes
# (MPI on Slingshot 11). NCCL's own α is another: put in yours.

# %%
# %%ranks
alpha_s, beta = 3.31e-6, 2**22 / 181.7e-6  # per hop; bytes/s
weights = 2 * 6.715e9  # bytes of 7 B in bf16
if rank == 0:
    for name, calls, gathered in (("by block", 2 * 32 + 1, 2 * weights), ("one unit", 1, weights)):
        for n in (64, 256, 1024):
            latency_s, bytes_s = calls * (n - 1) * alpha_s, gathered * (n - 1) / n / beta
            say(f"{name}, {n:5,} ranks: {latency_s:5.2f} s of latency + {bytes_s:4.2f} s of bytes per micro-batch")

# %% [markdown]
# By block the gathers hide behind computation, and one unit's cannot. So which is faster on how many nodes is a measurement: run
# both on the nodes that you will use.

# %% [markdown]
# ## Cores beside the GPU (CORE, 9 min)
#
# **Why.** A node's cores, GPUs and network cards sit in [**NUMA domains**](../assets/glossary.md#numa-domain). Within one, copies
# are short; from one to another they cross the processor. And a rank without cores of its own waits for somebody else's.
#
# ![A node of Polaris: four domains of eight cores; the GPUs are numbered from the other end, GPU 3 beside cores 0 to 7 and a
# network card, GPU 1 beside cores 16 to 23 and the other card](../assets/15_affinity.svg)
#
# [Polaris](https://docs.alcf.anl.gov/polaris/hardware-overview/machine-overview/), as `nvidia-smi topo -m` shows it:
# **the GPUs are numbered from the other end**. Bind ranks to cores in order, and every one of them is far from its GPU.
#
# ### Build B: the cores beside a GPU
#
# Write `cores_beside(gpu, domains)`. `domains` is a list of `(cores, gpus)`. A GPU gets an equal share of its domain's cores, in
# the order in which the GPUs stand there; what does not divide stays free.


# %%
# %%ranks
def cores_beside(gpu, domains):
    """The cores for the rank of this GPU: a list."""
    raise NotImplementedError  # your turn


checks.cores_beside(cores_beside, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def cores_beside(gpu, domains):
#     """The cores for the rank of this GPU: a list."""
#     for cores, gpus in domains:
#         if gpu in gpus:
#             each, k = len(cores) // len(gpus), gpus.index(gpu)
#             return cores[k * each : (k + 1) * each]
# ```
#
# </details>

# %% [markdown]
# In a job the launcher does it: `--cpu-bind list:24-31:16-23:8-15:0-7` (PALS), `--gpu-bind=closest` (Slurm). With torchrun one
# process is bound, and its ranks inherit what it got. If that is **one core**, all ranks of the node share it.
#
# **Predict.** Here: all ranks on one core against all on the cores that there are. How many times as long does a matrix product
# take?
#
# <details><summary>Answer</summary>
#
# n ranks on c cores take turns n / c times, or not at all; on one core n times. So min(n, c) times as long.
#
# </details>

# %%
# %%ranks
import os

from manyhands.launch import devices
from manyhands.measure.timing import take_turns

spread_over = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
everyones = [None] * world_size
dist.all_gather_object(everyones, (ranks.host, spread_over))
neighbours = [set(cores) for host, cores in everyones if host == ranks.host]
common = sorted(set.intersection(*neighbours))  # empty where ranks are bound apart already, or on a Mac
matrix, threads = torch.randn(256, 256), torch.get_num_threads()


def multiply_on(cores):
    """Ten products by one thread that may run on these cores."""
    if cores:
        os.sched_setaffinity(0, cores)
    for _ in range(10):
        matrix @ matrix


# %%
# %%ranks
torch.set_num_threads(1)
calls = {"on all cores": lambda: multiply_on(spread_over), "on one core": lambda: multiply_on(common[:1])}
times = take_turns(calls, repeats, ranks)
multiply_on(spread_over)
torch.set_num_threads(threads)
n_here, usable = len(neighbours), devices.cores(devices.look(os.environ))
predicted = min(n_here, usable) if common else 1

# %% [markdown]
# Expect the lower row's point at the dashed line, which is the upper row's times the prediction.

# %%
# %%ranks
from statistics import median

from manyhands.plots.looks import PREDICTED
from manyhands.plots.times import compared

if rank == 0:
    all_ms, one_ms = (1e3 * median(times[name]) for name in calls)
    figure = compared(times, f"{n_here} ranks of a node, {usable} cores", "ms for ten products, slowest rank")
    figure.axes[0].axvline(predicted * all_ms, **PREDICTED)
    show(figure, "one_core", "times of ten products on all cores and on one, and the predicted line for one")
    ratio, samples = one_ms / all_ms, len(times["on one core"])
    beside = "as predicted" if 0.8 < ratio / predicted < 1.2 else "more than a fifth off: look at the whiskers"
    say(f"{ratio:.1f} times as long ({samples} samples); predicted {predicted}: {beside}")

# %% [markdown]
# No error, no warning, and a fraction of the speed. `print(os.sched_getaffinity(0))` in the first minute of a job shows it. On
# GPUs the arithmetic does not suffer; data loading, launches and gradients on their way to the network do.

# %% [markdown]
# ## What NCCL says (CORE, 8 min)
#
# **Why.** NCCL takes the best network that it *finds*. If it finds none, it takes TCP, and says so only if asked:
# `NCCL_DEBUG=INFO`. Here are two nodes with a V100 each, from the administrator's manual of NVIDIA's Base Command Manager (chapter
# on workload management, page 342; some lines left out):

# %% tags=["nbval-check-output"]
# %%ranks
from manyhands.launch import recorded_runs

log = recorded_runs.text("15_nccl_sockets.out")
if rank == 0:
    say(log.replace(" NCCL INFO", "").rstrip())

# %% [markdown]
# | line | it means |
# |---|---|
# | `node001:175945:175945 [0]` | host, process, thread, GPU *of this node* |
# | `Bootstrap : Using ens3` | how ranks meet: always TCP, and no sign of trouble |
# | `NET/Plugin : No plugin found` | no library of the site (`libnccl-net.so`); on Slingshot or EFA there must be one |
# | `NCCL_IB_DISABLE set by environment to 1` | **somebody's variable**: InfiniBand is not even looked for |
# | `NET/Socket : Using [0]ens3` | found: a network card for TCP |
# | `Using network Socket` | chosen |
# | `Channel 00 : 0[60] -> 1[60] [send] via NET/Socket/0` | rank 0 sends to rank 1, over TCP. Good: `NET/IB/0/GDRDMA`, straight from the GPU's memory |
#
# The manual's test reached 0.81 GB/s. Two A100 nodes with a working network reach
# [185](https://github.com/oracle-quickstart/oci-hpc-oke) (16 GPUs, large messages).
#
# A variable in a wiki was right for one machine, on one day. NVIDIA's
# [manual](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html) keeps some for the system's configuration; those for
# debugging "should not be used in production nor retained in scripts". So look what you have inherited, `env | grep -E
# "^(NCCL|FI|GLOO|UCX)_"`, and unset what your site's own page does not ask for:
#
# | variable | what it does | when to unset |
# |---|---|---|
# | `NCCL_IB_DISABLE=1`, `NCCL_P2P_DISABLE=1` | TCP for all; no NVLink | always, unless you are debugging |
# | `NCCL_SOCKET_IFNAME`, `GLOO_SOCKET_IFNAME` | which card the ranks meet on | where it names a card that your nodes lack |
# | `NCCL_NET`, `NCCL_CROSS_NIC`, `NCCL_NET_GDR_LEVEL`, `NCCL_COLLNET_ENABLE` | Polaris's settings for its plugin | where a program [hangs](https://docs.alcf.anl.gov/polaris/applications-and-libraries/libraries/nccl/) with them |
#
# And a *plugin* decides for itself: with `NCCL_IB_DISABLE=1` one user still
# [saw](https://github.com/NVIDIA/nccl-tests/issues/373) every channel go `via NET/IBext_v8`, a plugin below `/opt/hpcx`.
#
# ### Exercise 1: what the log says
#
# Write `network(log)`. It returns `(name, direct)`: the network over which channels send between nodes, such as `"IB"` or
# `"IBext_v8"`, and whether *all* of these channels say `GDRDMA`. On one node no channel says `via NET/...`: return None.


# %%
# %%ranks
import re


def network(log):
    """(name of the network between nodes, do all its channels reach the GPUs' memory directly?), or None."""
    raise NotImplementedError  # your turn


checks.network(network, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 1</summary>
#
# ```python
# def network(log):
#     """(name of the network between nodes, do all its channels reach the GPUs' memory directly?), or None."""
#     ways = re.findall(r"via NET/([^/\n]+)/(\S+)", log)  # what is used, not what was found
#     if ways:
#         return ways[0][0], all("GDRDMA" in device for _, device in ways)
# ```
#
# </details>

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the log</summary>
#
# Let pairs read the log aloud, line by line, before the table. *Usual mistakes:* taking `Bootstrap : Using eth0` for the data's
# way; taking the GPU in brackets for the rank; believing `NET/IB : Using`, which says what was found. *Usual question:* "is
# GDRDMA missing an error?" No: it works through the host's memory, slower.
#
# </details>

# %% [markdown]
# ## A bug from the zoo: each row once (CORE, 2 min)
#
# A sweep is an [**array job**](../assets/glossary.md#array-job): one file, many tasks, and each takes a row of a table by its number.
# Somebody's line for it, in a workshop's array job, for tasks 1 to 6. **What is wrong, and what would show it?**

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
# Tasks count from 1, Python from 0. Row 1 is never trained, and task 6 gets nothing: it trains with the defaults, and ends well.
# Count what ran: as many different settings as rows. No loss curve shows it.
#
# </details>
#
# ![Six tasks and six rows: shifted by one, the first row is never taken and the last task has none; counted from one, each task has
# its row](../assets/15_sweep.svg)
#
# Our `jobs/sweep.*` refuse an array that is not as long as its table, and print each row. (Another one of this kind: a
# configuration whose warm-up was 1,000 steps in a run of 515, so that the learning rate never reached its peak. `train.py` refuses
# that too.)
#
# ### Exercise 2: mend it (MORE, 6 min)
#
# Write `flags_of(lines, task, tasks)`, for the lines of such a file: comments begin with `#`, lines may be empty, the first other
# line is the header. Where the array has not as many `tasks` as there are rows, raise a `ValueError` that names both numbers.


# %%
# %%ranks
def flags_of(lines, task, tasks):
    """The flags of task number `task` (the first is 1) of an array of `tasks`: a list of words."""
    raise NotImplementedError  # your turn


checks.flags_of(flags_of, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 2</summary>
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
# ### Exercise 3: your job's directives (MORE, 6 min)
#
# Write `directives(nodes, gpus, cores, minutes)`: the `#SBATCH` lines, as a list, of a job in which one torchrun on each node
# starts a rank per GPU. A node has so many `gpus` and `cores`; the job gets all of them, for so many `minutes`.


# %%
# %%ranks
def directives(nodes, gpus, cores, minutes):
    """Lines for the head of a Slurm job file: --nodes, --ntasks-per-node, --cpus-per-task, --gpus-per-node, --time."""
    raise NotImplementedError  # your turn


checks.directives(directives, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 3</summary>
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
# ## On the cluster (CORE, 2 min)
#
# In pairs, from the course's folder on the login node. This block of the job file is yours to edit:

# %% tags=["active-ipynb"]
# !sed -n "/edit here/,/end of what/p" ../jobs/train.slurm

# %% [markdown]
# Submit, follow the log, and try one option at a time:
#
# ```bash
# make jobs SITE=polaris ACCOUNT=MyProject GPUS=4 NODES=2            # your site's lines, once
# qsub -v TRAIN_ARGS="--preset olmo-7b --model.n-layer 4" jobs/train.pbs
# sbatch jobs/train.slurm --preset olmo-7b --model.n-layer 4 --parallel.wrapping block_group:2
# sbatch jobs/train.slurm --preset olmo-1b --model.n-layer 4         # DDP
# tail -f train.o4711                                                # Ctrl-C leaves the job running
# sbatch jobs/sweep.slurm --preset shakespeare                       # qsub jobs/sweep.pbs: a task per row
# ```
#
# | | PBS | Slurm |
# |---|---|---|
# | nodes for you, now | `qsub -I -l select=1:system=polaris -l walltime=0:30:00 ...` | `salloc --nodes=1 --gpus-per-node=4 --time=0:30:00 ...` |
# | then, there | `NPROC_PER_NODE=4 bash jobs/train.pbs --train.steps 20` | `bash jobs/train.slurm --train.steps 20` |
# | look into a running job | `qstat -f 4711` names its nodes (`exec_host`): `ssh` there, where the site allows it | `srun --jobid=4711 --overlap --pty bash` |
# | once inside | `nvidia-smi`, `top`, `ls -l` of the log: does it grow? | the same |
# | one variable for one job | `NCCL_DEBUG=INFO qsub -v NCCL_DEBUG ...` | `NCCL_DEBUG=INFO sbatch ...` |
#
# **What changes on GPUs.** All of it: one rank per GPU, offline, bound, over the right network.
#
# **What to look for.** As many ranks as GPUs; the loss of the first step near ln of the vocabulary; `via NET/` with your site's
# network; `nvidia-smi` with all GPUs busy; tokens per second that hardly fall from one node to two.
#
# In the container: the same command behind `apptainer exec --nv manyhands.sif` (AMD: `--rocm`), as the head of `jobs/manyhands.def`
# says. It was not built by us.

# %% [markdown]
# ## Recap
#
# 1. Compute nodes may have no internet: environment, data and container are there before the job starts.
# 2. Ask the dry run whether it fits, the fake backend what a rank holds, and the machine which wrapping is faster.
# 3. Local rank 0 copies for its node; everybody waits; GPUs may be numbered against the cores.
# 4. `NCCL_DEBUG=INFO`: what the channels go `via` is the network. Unset what your site does not ask for.
# 5. A sweep is right when each row has run once. Count them.
#
# ## Further reading
#
# - NCCL's [environment variables](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html) and its page on troubleshooting.
# - Apptainer's [user guide](https://apptainer.org/docs/user/main/): definition files, GPUs, MPI.
# - Slurm's [job arrays](https://slurm.schedmd.com/job_array.html) and [CPU management](https://slurm.schedmd.com/cpu_management.html).
# - Your site's own pages: `jobs/sites/*.toml` name those that we have read, and when.

# %%
# %%ranks
metrics.exact(by_ddp=by_ddp, full_size=full_size, losses=[loss_1b, *losses.values()])
metrics.measured(one_core_s=times["on one core"], all_cores_s=times["on all cores"])
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
