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
# # 04 Your first job
#
# **30 minutes** for the sections marked CORE, 65 with those marked MORE.
#
# On a cluster you do not start programs. **You ask for nodes, and say what to run on them.** You will do that in two
# minutes, and then ask your job questions while it waits and runs.
#
# After this lesson **you can**
# - submit a job, watch it, look into it, cancel it, and find out how it ended;
# - say why a job waits, and what helps;
# - say what each part of a job file does, and who reads it;
# - find the first error of a failed job, and its rank.
#
# **You need** no terminal habit: every command here can be run from a cell. The job trains the small GPT of
# [lesson 03](03_data_parallel.ipynb) on several [ranks](../assets/glossary.md#rank), which share one *global batch*.
#
# **New here:** [job](../assets/glossary.md#job), [scheduler](../assets/glossary.md#scheduler),
# [queue](../assets/glossary.md#queue), [login node](../assets/glossary.md#login-node),
# [compute node](../assets/glossary.md#compute-node), [directive](../assets/glossary.md#directive),
# [walltime](../assets/glossary.md#walltime), [exit status](../assets/glossary.md#exit-status).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 1, submit 2, why a job waits 7, the job file 8, your own job 4, the failed job 6.
#
# *Before the event:* run `make jobs SITE=... ACCOUNT=... RESERVATION=...` once in the shared course, and submit the job
# yourself from an attendee's account. A wrong account costs the whole room ten minutes. Note how long the job runs, and do the
# sum: 60 people with two nodes each want 120 nodes. In a reservation of 20 nodes ten of these jobs run at a time, so there are
# six rounds. At two minutes a round the last job starts ten minutes after the first, which is why everybody submits early.
# Compare with what the site allows: running jobs per user, jobs per queue, nodes. If the sum does not work, let pairs submit,
# or set the job files to one node.
#
# *Three usual mistakes:* submitting from a folder that is not the course's; reading the last error of a log instead of the
# first; asking for a day "to be safe" and then waiting for a day.
#
# *When late:* submit (everybody), build B, build C. The rest reads well alone.
#
# *Ask the room:* "Your job asks for one node and ten minutes, hundreds are ahead of it in the queue, and it starts at once.
# How can that be?" (Overtaking.)
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
global_batch = 0  # sequences per step, all ranks together; 0: 12, or more where it does not split, at least 0
steps = 60  # training steps that the experiment times, 8 to 2000
job_flags = "--steps 20 --repeats 1"  # flags of lesson 03 in the job that this notebook submits
submit_via = "auto"  # who takes the job, one of auto, slurm, pbs, bash
wait_s = 120  # seconds that a cell watches the job before the lesson goes on, 0 to 3600

# %% [markdown]
# ## Start (CORE, 1 min)
#
# A cell that begins with `%%ranks` runs on all ranks of this notebook. The *other* cells run once, in the notebook's own
# process. **Submit only from those:** four ranks that each submit a job have submitted four jobs.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.course.folders import ROOT
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("04_first_job", globals())

# %%
# %%ranks
from manyhands import ____, Metrics, card, compare, join, leave, refuse, say
from manyhands.checks import first_job as checks
from manyhands.data.corpus import load_corpus
from manyhands.launch import recorded_runs

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
if global_batch == 0:
    global_batch = -(-12 // world_size) * world_size
if global_batch % world_size:
    refuse(f"global_batch={global_batch} does not split over {world_size} ranks; use a multiple of {world_size}")
corpus = load_corpus(ranks)
metrics = Metrics(ranks, corpus, {"global_batch": global_batch, "steps": steps})

# %% [markdown]
# ## Submit first, read later (CORE, 2 min)
#
# A job may wait, so submit it now. In a terminal, in the course's folder, you would type what this cell prints after
# the `$`. (Without a scheduler, `bash` runs the job file here, with two ranks. Outputs that need a queue were recorded
# with Slurm.)

# %% tags=["active-ipynb"]
# from manyhands.jobs.submit import scheduler, submit
#
# via = scheduler() or "bash" if submit_via == "auto" else submit_via
# job = submit("ddp_shakespeare", job_flags, via=via)

# %% [markdown]
# ![From your browser to the login node; qsub or sbatch puts the job into the queue; the scheduler starts it on two compute
# nodes with two ranks each; all of them see the same files](../assets/04_cluster.svg)
#
# - The **login node** is where you arrive. Everybody shares it: edit, submit, and try things that take seconds.
# - The **scheduler** (PBS or Slurm) keeps the **queue** of jobs and decides which one is next.
# - **Compute nodes** have the GPUs. They belong to your job for as long as it asked: its **walltime**.
# - The **file system** is the same on all of them.
#
# **Predict.** This job asks for two nodes and starts two ranks on each. They share 12 sequences per step. How many does each
# rank get?

# %%
# %%ranks
guess_share = ____  # your turn: type a number

# %%
# %%ranks
compare("sequences of each rank", "guess_share", 12 // (2 * 2))

# %% [markdown]
# The cell printed the *job ID*, which every later command wants:
#
# ![A job waits (PD or Q), runs (R), tidies up (CG or E), and ends as completed, failed or over time; scancel or qdel cancels it
# while it waits or runs](../assets/04_life_of_a_job.svg)
#
# | | PBS | Slurm | in a cell |
# |---|---|---|---|
# | submit | `qsub jobs/ddp_shakespeare.pbs` | `sbatch jobs/ddp_shakespeare.slurm` | `job = submit(...)` |
# | watch | `qstat -u $USER` | `squeue --me` | `job.watch(60)` |
# | why does it wait? | `qstat -f 4711`, the line `comment` | `squeue --me`, the last column | `job.state()` |
# | cancel | `qdel 4711` | `scancel 4711` | `job.cancel()` |

# %% tags=["active-ipynb"]
# print(*job.state(), sep=": ")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: submission</summary>
#
# Submission fails in a class for four reasons: no account in the file (`make jobs`), a queue that wants a reservation, a queue
# that takes one job of each user (here a second submission fails), or the wrong folder. The scheduler's sentence says which;
# read it aloud together.
#
# While the reservation is busy, show `squeue` on the projector: the whole class is in it, and everybody sees `Priority` and
# `Resources` become `R`.
#
# </details>

# %% [markdown]
# ## Why a job waits (CORE, 7 min)
#
# Two things decide when your job starts: **who is ahead of me, and are enough
# nodes free?** This queue was recorded on a real Slurm. All jobs but the first wait (`PD`), each for the reason in the last
# column:

# %% tags=["nbval-check-output"]
# %%ranks
if rank == 0:
    say(recorded_runs.text("04_pending.out").rstrip())

# %% [markdown]
# | Slurm says | PBS (`qstat`) | it means |
# |---|---|---|
# | `Resources` | `Q`, comment: Insufficient amount of resource | next in line; not enough nodes are free |
# | `Priority` | `Q` | others are ahead |
# | `Dependency` | `H` | waits for another job of yours to end |
# | `DependencyNeverSatisfied` | | that other job has failed |
# | `JobHeldUser` | `H` | you put it on hold; `scontrol release` or `qrls` releases it |
# | `PartitionTimeLimit`, `PartitionNodeLimit` | | more than this queue ever gives |
#
# **Predict.** Which job starts next?

# %%
# %%ranks
guess_next = ____  # your turn: type its number

# %%
# %%ranks
compare("the job that starts next", "guess_next", "4702")

# %% [markdown]
# ### Build A: what helps?
#
# Say for six of these jobs what helps: `"wait"`, `"release"`, `"ask for less"`, or `"cancel"`.

# %%
# %%ranks
acts = {
    4702: ____,
    4703: ____,
    4704: ____,
    4705: ____,
    4706: ____,
    4708: ____,
}

if rank == 0:
    checks.why_it_waits(acts)

# %% [markdown] tags=["solution"]
# <details><summary>Solution A</summary>
#
# ```python
# acts = {4702: "wait", 4703: "wait", 4704: "wait", 4705: "cancel", 4706: "release", 4708: "ask for less"}
# ```
#
# </details>

# %% [markdown]
# ## The job file (CORE, 8 min)
#
# One file says how much a job needs, for how long, and what to do.
#
# ![A job file has four parts: directives that the scheduler reads at submission, a block that you edit, guards that the shell
# runs on the first compute node, and the laptop's own command, which starts the ranks](../assets/04_job_file.svg)
#
# The lines that begin with `#PBS` or `#SBATCH` are **directives**. The scheduler reads them when you submit, *before* any
# shell runs, so **a directive cannot contain a variable**:

# %% tags=["active-ipynb"]
# !grep -h -e "^#PBS" -e "^#SBATCH" "{ROOT}"/jobs/ddp_shakespeare.*

# %% [markdown]
# | PBS | Slurm | what you ask for |
# |---|---|---|
# | `-l select=2:ncpus=2:mpiprocs=1` | `--nodes=2 --ntasks-per-node=1 --cpus-per-task=2` | two nodes with two cores, one process started on each |
# | `-l walltime=00:10:00` | `--time=00:10:00` | ten minutes. Then the scheduler ends the job, finished or not |
# | `-j oe`, `-k doe` | `--output=%x.o%j` | errors and output in one file, written while the job runs |
# | `-A`, `-q` | `--account`, `--partition` or `--qos` | who pays, and which queue |
# | `ngpus=4` in `select` | `--gpus-per-node=4` | GPUs |
#
# `make jobs SITE=polaris ACCOUNT=MyProject` writes your site's lines into the file, once. With a blank, `# SBATCH`, a
# directive is a comment, without any warning. [The handbook](../assets/handbook/04_first_job.md) explains every line,
# and modules, containers and scratch disks.
#
# The last line of the file is the laptop's own command, `python scripts/launch.py`. On two nodes it runs one torchrun
# on each, and each torchrun starts its node's ranks. Without `launch.py` you would write:
#
# ```bash
# # --cpus-per-task again: srun does not inherit it (https://slurm.schedmd.com/srun.html), and ranks may share a core
# HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# srun --ntasks-per-node 1 --cpus-per-task 2 python -m torch.distributed.run --nnodes 2 --nproc-per-node 2 \
#   --rdzv-backend c10d --rdzv-endpoint "$HOST:29500" --rdzv-id "$SLURM_JOB_ID" scripts/03_data_parallel.py
# ```
#
# ### Build B: twice the nodes, the same global batch
#
# `sbatch --nodes=4 jobs/ddp_shakespeare.slurm --global-batch 24`: now four nodes share 24 sequences per step. Which ones does
# one rank take? Ranks are numbered node by node, and rank 0 takes the first ones.


# %%
# %%ranks
def my_sequences(global_batch, nodes, ranks_per_node, node, local_rank):
    """The range of sequences of this rank: number `local_rank` of those on node `node`."""
    n = ____  # ranks in all
    if global_batch % n:
        raise ValueError(f"{global_batch} sequences do not split over {n} ranks; use a multiple of {n}")
    share = global_batch // n
    rank = ____
    return range(____, ____)


checks.my_sequences(my_sequences, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def my_sequences(global_batch, nodes, ranks_per_node, node, local_rank):
#     """The range of sequences of this rank: number `local_rank` of those on node `node`."""
#     n = nodes * ranks_per_node
#     if global_batch % n:
#         raise ValueError(f"{global_batch} sequences do not split over {n} ranks; use a multiple of {n}")
#     share = global_batch // n
#     rank = node * ranks_per_node + local_rank  # not local_rank: that one starts from 0 on each node
#     return range(rank * share, (rank + 1) * share)
# ```
#
# </details>

# %% [markdown]
# ### Is the gradient the same? (MORE, 2 min)
#
# Try it on the ranks of this notebook, as if two of them shared a node. The cell compares the mean of the gradients of
# all shares with the gradient of the whole batch in one process. It uses float64, so that rounding hides nothing.


# %%
# %%ranks
import torch
import torch.distributed as dist
from manyhands.data.corpus import get_batch
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT

torch.manual_seed(0)
model = GPT(GPTConfig(vocab_size=len(corpus.vocab), n_layer=2, n_head=2, n_embd=32)).double().to(device)
whole_batch = get_batch(corpus.train_ids, 0, global_batch, 64, 0, 1, seed=1)  # as in a world of one
x_BT, y_BT = (ids_BT.to(device) for ids_BT in whole_batch)


def gradient(sequences):
    """The gradient of the mean loss of these sequences, all numbers in one row."""
    model.zero_grad()
    model(x_BT[list(sequences)], y_BT[list(sequences)])[1].backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


# %% tags=["nbval-check-output"]
# %%ranks
ranks_per_node = 2 if world_size % 2 == 0 else 1  # imagine nodes of two ranks each
node, local_rank = divmod(rank, ranks_per_node)
mine = my_sequences(global_batch, world_size // ranks_per_node, ranks_per_node, node, local_rank)
mean_P = gradient(mine)
dist.all_reduce(mean_P)  # all ranks: the sum ...
mean_P /= world_size  # ... and the mean
apart = (mean_P - gradient(range(global_batch))).abs().max().item()
say(f"node {node}, local rank {local_rank}: sequences {mine[0]} to {mine[-1]}")
if rank == 0:
    say(f"gradient of all shares = gradient of one process, to 1e-10: {apart < 1e-10}")
metrics.exact(sequences=[mine[0], mine[-1] + 1])
metrics.close(gradient_norm=mean_P.norm())

# %% [markdown]
# ## Ask your job (CORE, 4 min)
#
# Read the first lines of *every* job: they say who is here (n lines of "1 rank" are n separate trainings). This is the
# same job, recorded on two nodes:

# %% tags=["nbval-check-output"]
# %%ranks
run = recorded_runs.numbers("04_ddp_shakespeare.json")
if rank == 0:
    say("\n".join(recorded_runs.text("04_ddp_shakespeare.out").splitlines()[:3]))
    say("submitted {SubmitTime}, started {StartTime}, ended {EndTime}".format(**run["job"]))
    say("on {hardware}".format(**run["conditions"]))

# %% [markdown]
# And yours? Each change of state adds a line, while it waits with the reason:

# %% tags=["active-ipynb"]
# state = job.watch(wait_s)

# %% [markdown]
# With a scheduler, the output lies where you submitted: `ddp_shakespeare.o` and the number. `tail` shows its end, `grep` the
# lines with a word. The numbers lie in `outputs/<lesson>/latest/metrics.json`:

# %% tags=["active-ipynb"]
# job.tail(2)
# job.grep("____")  # your turn: which word finds the line that says who is here?

# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# from manyhands.launch import recorded_runs
#
# assert state != "failed", "the job failed; job.tail(20) shows the end of its output, build C how to read it"
# theirs = recorded_runs.numbers("04_ddp_shakespeare.json")["metrics"]
# for name, found in {"my job": job.metrics("03_data_parallel"), "recorded": theirs}.items():
#     if found is None:
#         print(f"{name:>9}: has not written its metrics yet; run this cell again when it has ended")
#     else:
#         first = "  ".join(f"{loss:.8f}" for loss in found["exact"]["losses"][:3])
#         print(f"{name:>9}: ranks {found['world_size']}, corpus {found['corpus']['name']}, first losses {first}")

# %% [markdown]
# With the same corpus and global batch the losses agree to about six digits.
#
# | while it runs | PBS | Slurm |
# |---|---|---|
# | look into it | `ssh` to a node that `qstat -f` names, then `nvidia-smi` or `top` | `srun --jobid 4711 --overlap nvidia-smi` |
# | work on a compute node yourself | `qsub -I -l select=1,walltime=00:30:00` | `srun --nodes 1 --time 00:30:00 --pty bash` |
#
# **After the end** the job soon vanishes from `squeue` and `qstat`. Ask the history, `sacct -j 4711 -o
# State,ExitCode,Elapsed` or `qstat -xf 4711`, or read `outputs/jobs/ddp_shakespeare.4711.status`, which our job file
# writes. In this file 0 is success, and above 128 it is 128 plus a signal. ([`sacct` and
# PBS](../assets/handbook/04_first_job.md#how-did-it-end) count otherwise.)
#
# **Predict.** A run used too much memory and was killed by SIGKILL, signal 9. What stands in the file?

# %%
# %%ranks
guess_status = ____  # your turn: type a number

# %%
# %%ranks
compare("the exit status after SIGKILL", "guess_status", 128 + 9)

# %% [markdown]
# Cancel what you no longer need: it keeps others waiting. This cell submits a job and cancels it at once, if your first
# has ended:

# %% tags=["active-ipynb"]
# if job.ended():
#     second = submit("ddp_shakespeare", job_flags, via=via)
#     second.cancel()
#     second.watch(20)
# else:
#     print("your first job has not ended: run this cell again when it has")

# %% [markdown]
# ## When a job fails (CORE, 6 min)
#
# Somebody added a line to lesson 03: "print what each rank learns from". It worked on a laptop with two ranks and failed on two
# nodes with two ranks each. There are three logs: the job's own, and one per node. Everybody looks at the end of one:

# %% tags=["active-ipynb"]
# !tail -n 2 "{ROOT}"/assets/recorded/04_failed.node1.out

# %% [markdown]
# *Cancelled*, *ended*? By nobody. **The end of a distributed log is the end of a chain:** one rank fails, the others lose
# their connection, and the launcher stops the rest.
#
# ### Build C: find the first error, and its rank
#
# Search the three logs for words that errors use; try several. Which rank failed *first*, and with which error? An
# error about a *connection* or a *peer* is an *echo*: it follows from the first.

# %% tags=["active-ipynb"]
# !grep -hi "____" "{ROOT}"/assets/recorded/04_failed*.out

# %%
# %%ranks
guess_rank = ____  # your turn: a number
guess_error = ____  # and a name such as "ValueError"

if rank == 0:
    checks.first_error((guess_rank, guess_error))

# %% [markdown] tags=["solution"]
# <details><summary>Solution C</summary>
#
# ```python
# guess_rank = 3  # not 1: that is its local rank, its number on node2
# guess_error = "IndexError"
# ```
#
# </details>

# %% [markdown]
# <details><summary>What happened?</summary>
#
# `x_bT` is this rank's *own share* of the batch: 3 sequences, numbers 0 to 2. The new line indexes it by the rank,
# which works for ranks 0, 1 and 2. With two ranks on the laptop each share had 6 sequences. **A test on two ranks shows
# nothing about four.**
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
node2 = recorded_runs.text("04_failed.node2.out").splitlines()
lines = [*(line for line in node2 if line.startswith("[rank3]") and "^" not in line), node2[-1]]
compare("the rank that failed first", "guess_rank", 3, because=lines)

# %% [markdown]
# The launcher's last line agrees. With NCCL there may be no echo: ranks that no launcher ends wait until a
# time-out does, after ten minutes by [default](https://docs.pytorch.org/docs/stable/distributed.html).

# %% [markdown]
# ## A terminal (MORE, 1 min)
#
# When something is stuck, the helpers will say "open a [terminal](../assets/glossary.md#terminal)". In JupyterLab that is the
# menu *File*, *New*, *Terminal*.
#
# ![A terminal: the prompt says who you are, on which machine and in which folder; you type a command after the dollar sign,
# press Enter, and its output follows](../assets/04_terminal.svg)
#
# | you type | it means |
# |---|---|
# | `cd many-hands` | go into the folder `many-hands`; `cd ..` goes up, `cd` alone goes home |
# | `ls jobs` | list what is in the folder `jobs` |
# | `tail -f FILE` | show the end of a file, and go on as it grows; leave with Ctrl-C |
# | the Tab key, the up arrow | complete a name; bring the last command back |
#
# A cell can do the same after a `!`, if the command ends by itself. `!cd` is forgotten at once, and `!tail -f` blocks your
# notebook: use the terminal. A cell starts in its notebook's folder. In this notebook `{ROOT}` is the course's folder:

# %% tags=["active-ipynb"]
# !ls "{ROOT}"/jobs

# %% [markdown]
# ## A queue by hand (MORE, 8 min)
#
# Two nodes are free. Four jobs arrive, in this order. Each wants **one** node, for 3, 2, 2 and 1 minutes.
#
# **Predict.** When does each of them start? Draw two lines, one per node, and fill them.
#
# <details><summary>Answer</summary>
#
# At 0, 0, 2 and 3. The first two take the nodes. At minute 2 the second job ends and the third takes its node. At minute 3 the
# first ends, and the last one follows.
#
# </details>
#
# ### Exercise 1: when a job starts
#
# A job starts as soon as both are true: as many nodes as it needs are free, and the job ahead of it has started. (Nobody is
# overtaken.) Write `start_of(need, free_at, previous)`. `free_at` is a list with one number per node, in any order: the minute
# from which that node is free. `previous` is the minute at which the job ahead started. A job may need several nodes.


# %%
# %%ranks
def start_of(need, free_at, previous):
    """The first minute at which a job that needs `need` nodes starts."""
    raise NotImplementedError  # your turn


checks.start_of(start_of, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 1</summary>
#
# ```python
# def start_of(need, free_at, previous):
#     """The first minute at which a job that needs `need` nodes starts."""
#     enough_are_free = sorted(free_at)[need - 1]  # by then the `need` nodes that become free first are free
#     return max(enough_are_free, previous)
# ```
#
# </details>

# %% [markdown]
# Your function, called for one job after the other, is a scheduler. Does it agree with your drawing?


# %% tags=["nbval-check-output"]
# %%ranks
def start_times(jobs, nodes):
    """When each of the jobs [(nodes it needs, minutes)] starts, strictly in the order of submission."""
    free_at, starts = [0] * nodes, [0]  # for each node the minute from which on it is free
    for need, minutes in jobs:
        start = start_of(need, free_at, starts[-1])
        free_at.sort()
        free_at[:need] = [start + minutes] * need  # the nodes that became free first
        starts.append(start)
    return starts[1:]


by_hand = start_times([(1, 3), (1, 2), (1, 2), (1, 1)], nodes=2)
if rank == 0:
    say(f"start minutes: {by_hand}")
metrics.exact(by_hand=by_hand)

# %% [markdown]
# Real schedulers order jobs by a *priority* instead. It depends on how long a job has waited, on its size, and on what
# its project has used lately.

# %% [markdown]
# ## How long to ask for (MORE, 10 min)
#
# **Why.** You must name the walltime before you know it. If it is too short, the scheduler ends the job before it is
# done. If it is too long, the job waits longer than it must (the next section shows it). The way out: run a few steps,
# and extend the line.
#
# Time = start-up + steps x time per step. We train ShakespeareGPT for `steps` steps on the ranks of this notebook. That
# takes seconds, so you may do it on a login node. The whole training belongs in a job, and for this job you need the
# walltime.


# %%
# %%ranks
import time

import torch
import torch.distributed as dist
from manyhands import show
from manyhands.data.corpus import get_batch
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from torch.nn.parallel import DistributedDataParallel as DDP


def train(num_steps):
    """Losses of `num_steps` steps, and after each the seconds since the start. All ranks call it."""
    torch.manual_seed(1337)
    model = DDP(GPT(GPTConfig(vocab_size=len(corpus.vocab))).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, seconds, begin = torch.zeros(num_steps), [], time.perf_counter()
    for step in range(num_steps):
        share = get_batch(corpus.train_ids, step, global_batch, 64, rank, world_size, seed=1)
        _, loss = model(*(ids_bT.to(device) for ids_bT in share))
        loss.backward()  # all ranks: DDP averages the gradients in here
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()  # to the CPU: waits for the device, so that the clock below is honest
        seconds.append(time.perf_counter() - begin)
    dist.all_reduce(losses)
    return losses / world_size, seconds


# %%
# %%ranks
losses, measured_s = train(steps)
if rank == 0:
    say(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps; the first took {measured_s[0]:.2f} s")

# %% [markdown]
# **Predict.** We take the time per step from the first ten steps, and test it on all the others. Of these ten, one is left out:
# the very first. Why?
#
# <details><summary>Answer</summary>
#
# The first step also allocates memory, builds DDP's buckets and meets cold caches. (On a GPU it loads kernels, which takes
# seconds.) It is part of the start-up, not of the slope.
#
# </details>

# %%
# %%ranks
seen = min(10, steps // 2)  # the steps that we look at; the others are predicted
step_s = (measured_s[seen - 1] - measured_s[0]) / (seen - 1)
predicted_s, rest_s = (steps - seen) * step_s, measured_s[-1] - measured_s[seen - 1]
ratio = rest_s / predicted_s
single_ms = [1000 * (measured_s[step] - measured_s[step - 1]) for step in range(seen, steps)]
if rank == 0:
    say(f"{steps - seen} more steps: predicted {predicted_s:.2f} s, measured {rest_s:.2f} s, ratio {ratio:.2f}")
    say(f"{1000 * step_s:.0f} ms per step predicted; they took {min(single_ms):.0f} to {max(single_ms):.0f} ms")
metrics.exact(losses=losses)
metrics.close(final_loss=losses[-1])
metrics.measured(step_s=step_s, predicted_over_measured=1 / ratio)

# %% [markdown]
# So ask for more than the line says, but not for a day.
#
# ### Exercise 2: a walltime to ask for
#
# A run should take `seconds`. Write `ask_for(seconds)`: 1.5 times as long, and two minutes for the start, rounded up to
# whole minutes, as the text `HH:MM:SS`. (For a run of 30 hours, HH is more than 24.)


# %%
# %%ranks
def ask_for(seconds):
    """The walltime to ask for, as HH:MM:SS."""
    raise NotImplementedError  # your turn


checks.ask_for(ask_for, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 2</summary>
#
# ```python
# import math
#
#
# def ask_for(seconds):
#     """The walltime to ask for, as HH:MM:SS."""
#     minutes = math.ceil(1.5 * seconds / 60) + 2
#     return f"{minutes // 60:02d}:{minutes % 60:02d}:00"
# ```
#
# </details>

# %%
# %%ranks
if rank == 0:
    say(f"10,000 such steps: {10_000 * step_s:.0f} s, so ask for {ask_for(10_000 * step_s)}")
    say(f"a margin of one half {'covers' if ratio <= 1.5 else 'does not cover'} what happened here")

# %% [markdown]
# In the plot the line comes from the grey part alone. Where the points leave the line, something else may have run on
# the machine.

# %%
# %%ranks
from manyhands.plots.looks import GREY, MEASURED, PREDICTED
from matplotlib.figure import Figure

if rank == 0:
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(0, seen - 1, color=GREY)
    line_s = [measured_s[seen - 1], measured_s[seen - 1] + predicted_s]
    axes.plot([seen - 1, steps - 1], line_s, **PREDICTED)
    axes.plot(measured_s, **MEASURED | {"ls": "none", "ms": 3})
    above = 1 if line_s[1] > measured_s[-1] else -1  # so that the two labels keep apart
    for label, y, side in (("predicted", line_s[1], above), ("measured", measured_s[-1], -above)):
        axes.annotate(label, (steps - 1, y), (6, 6 * side), textcoords="offset points", va="center")
    axes.set(xlabel="step", ylabel="seconds since the start", xlim=(-1, 1.2 * steps), title=f"ranks: {world_size}")
    axes.margins(y=0.1)
    show(figure, "how_long", "measured seconds of each step, and the line that the first steps predict")

# %% [markdown]
# What is *not* in the line: evaluating, sampling, saving. Time these, too.

# %% [markdown]
# ## Overtaking: why a short job starts early (MORE, 6 min)
#
# **Why.** A queue that starts jobs strictly in order wastes nodes. Look at the left half: job B wants both nodes. While
# it waits for A, node 2 stands idle for six minutes.
#
# ![Two nodes, four jobs. In order of submission node 2 stands idle for six minutes, because job B waits for both nodes. With
# overtaking the short jobs C and D run in that gap, and B starts no later](../assets/04_overtaking.svg)
#
# So schedulers let a later job go first **if that delays no job before it**. This is called
# [*backfill*](../assets/glossary.md#backfill). The scheduler cannot know how long C will run. It believes what C asked
# for, its walltime.
#
# **Predict.** In the right half D fills the gap from minute 2 to 5. Suppose its owner had asked for 60 minutes, "to be safe". It
# still runs for 3. When does it start?
#
# <details><summary>Answer</summary>
#
# At minute 9, after B. It *might* run past minute 6 and delay B, so it may not overtake. The long walltime costs it
# seven minutes, more than twice its run time.
#
# </details>

# %% [markdown]
# A scheduler that lets jobs overtake needs to look ahead. This one places each job at the first minute at which it fits beside
# all jobs before it, from start to end:


# %%
# %%ranks
def with_overtaking(jobs, nodes):
    """When each job starts if a later one may go first where that delays no earlier one."""
    placed = []  # (nodes, start, end) of the jobs before

    def fits(start, need, minutes):
        others = [s for _, s, _ in placed if start < s < start + minutes]  # those that start meanwhile
        return all(sum(n for n, s, e in placed if s <= t < e) + need <= nodes for t in [start, *others])

    for need, minutes in jobs:
        ends = sorted({0, *(end for _, _, end in placed)})  # nodes become free only when something ends
        start = next(t for t in ends if fits(t, need, minutes))
        placed.append((need, start, start + minutes))
    return [start for _, start, _ in placed]


# %% [markdown]
# Is that what a real scheduler does? We gave these four jobs to Slurm on two nodes, in three ways, and wrote down when they
# started. If our lines are right, each starts in the minute that they predict:

# %% tags=["nbval-check-output"]
# %%ranks
abcd = [(1, 6), (2, 3), (1, 2), (1, 3)]
predicted = {
    "in order": start_times(abcd, nodes=2),
    "overtaking": with_overtaking(abcd, nodes=2),
    "overtaking, D asks for 60 minutes": with_overtaking([*abcd[:3], (1, 60)], nodes=2),
}
queue = recorded_runs.numbers("04_queue.json")
late_s = {}  # how much later than predicted each job started
for way, minutes in predicted.items():
    measured = queue["start_minutes"][way]
    late_s[way] = [60 * (measured[job] - minute) for job, minute in zip("ABCD", minutes, strict=True)]
if rank == 0:
    for way, minutes in predicted.items():
        jobs = zip("ABCD", minutes, late_s[way], strict=True)
        say(f"{way:<34}" + "".join(f"  {job} minute {m} + {s:.1f} s" for job, m, s in jobs))
    latest = max(second for seconds in late_s.values() for second in seconds)
    say("at most {:.1f} s late; on {hardware}".format(latest, **queue["conditions"]))
metrics.exact(queue=predicted)

# %% [markdown]
# **How that was made.** We told this Slurm to look at its queue every two seconds (`sched_interval`, `bf_interval`),
# and a script asked it twice a second which jobs had started. These two intervals explain delays of a few seconds.
# Slurm's own intervals are [longer](https://slurm.schedmd.com/sched_config.html). And in a long queue PBS protects only
# the first jobs in line from delay, as many as the site's
# [`backfill_depth`](https://community.openpbs.org/t/clarification-on-backfill-depth-and-job-execution-order/4036).
#
# **Ask for what you need plus a margin, not for the maximum**: a short job finds a gap, a long one waits for its turn. (Further
# reading: Mu'alem and Feitelson 2001, *Utilization, predictability, workloads, and user runtime estimates in scheduling the IBM
# SP2 with backfilling*, IEEE TPDS 12(6).)

# %% [markdown]
# ## A bug from the zoo: yesterday's code (MORE, 8 min)
#
# A lesson is two files with the same cells: the notebook that you edit, and the script that the job runs. A JupyterLab that has
# the extension *jupytext* writes both when you save. On many hubs the server does not have it. Then this happens:


# %%
# %%ranks
import subprocess
import sys
import tempfile
from pathlib import Path

import jupytext


def write(path, source):
    """A notebook or a script with one cell."""
    jupytext.write(jupytext.reads(f"# %%\n{source}\n", fmt="py:percent"), path)


if rank == 0:
    with tempfile.TemporaryDirectory() as folder:
        notebook, script = Path(folder) / "lesson.ipynb", Path(folder) / "lesson.py"
        write(script, "steps = 10; print('trained for', steps, 'steps')")
        write(notebook, "steps = 20; print('trained for', steps, 'steps')")  # today's edit, saved
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
        say(f"the notebook says: {jupytext.read(notebook).cells[0].source.split(';')[0]}")
        say(f"the job says:      {done.stdout.strip()}")

# %% [markdown]
# No error anywhere. The job ran the script, and the script is yesterday's: **results that the notebook cannot
# explain.** So a job file should refuse to run a stale pair. Here is somebody's guard:
#
# ```python
# def stale(notebook, script):
#     return notebook.stat().st_mtime > script.stat().st_mtime      # saved later, so it must be newer
# ```
#
# ### Exercise 3: a guard that tells the truth
#
# That guard is wrong in both directions. It stops jobs whose notebook was only *saved* again. And after `git clone` or a copy, all
# files carry the time of the copy, in any order, so it lets yesterday's code run. Write `stale(notebook, script)`, given two
# paths. `jupytext.read(path).cells` lists the cells of either file, each with its `.source`.


# %%
# %%ranks
def stale(notebook, script):
    """Whether a job that runs `script` would run something else than `notebook` shows."""
    raise NotImplementedError  # your turn


if rank == 0:
    checks.yesterdays_code(stale)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 3</summary>
#
# ```python
# def stale(notebook, script):
#     """Whether a job that runs `script` would run something else than `notebook` shows."""
#     ours, theirs = ([cell.source for cell in jupytext.read(path).cells] for path in (notebook, script))
#     return ours != theirs
# ```
#
# </details>

# %% [markdown]
# That is what `python -m manyhands.course.pairs check 03_data_parallel` does in our job file: it stops with exit status
# 2 and says which cell differs. The cure is `make sync`, in a terminal. (jupytext's own `--sync` also trusts the files'
# times, see its [documentation](https://jupytext.readthedocs.io/en/latest/using-cli.html): save the file that you want
# to keep after the other one.)

# %% [markdown]
# ## On the cluster
#
# Once per machine, in a terminal on the login node, and then for every run:
#
# ```bash
# make jobs SITE=perlmutter ACCOUNT=m1234 QUEUE=regular     # a name of jobs/sites, such as lumi
#
# sbatch jobs/ddp_shakespeare.slurm       # Slurm: Perlmutter, Frontier
# qsub jobs/ddp_shakespeare.pbs           # PBS: Polaris, Aurora
# ```
#
# **What changes on GPUs.** One rank per GPU (`make jobs` sets it), NCCL instead of gloo.
#
# **What to look for.** The number of ranks is that of nodes times GPUs per node, on the hosts that you asked for. A
# first loss near ln 65 = 4.17.

# %% [markdown]
# ## Recap

# %%
# %%ranks
card(
    "You ask for nodes, and the scheduler starts the job. Login nodes are for editing and submitting.",
    "A job file: directives for the scheduler, a block for you, guards, and the laptop's own command.",
    "A job waits because others are ahead or nodes are busy. A short walltime finds a gap.",
    "Ask a running job: watch, tail, grep; afterwards sacct or qstat -xf.",
    "Read the first error, not the last.",
    figure="the four parts of a job file",
    command="sbatch jobs/ddp_shakespeare.slurm   (or: qsub jobs/ddp_shakespeare.pbs)",
)

# %% [markdown]
# ## Further reading
#
# - Slurm's [quick start](https://slurm.schedmd.com/quickstart.html), and its
#   [list of reasons](https://slurm.schedmd.com/job_reason_codes.html) for which a job waits.
# - The Altair [PBS user's guide](https://help.altair.com/2022.1.0/PBS%20Professional/PBSUserGuide2022.1.pdf), chapters 2 and 10.
# - Pages of sites are in [the handbook](../assets/handbook/04_first_job.md#further-reading).

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
