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
# **25 minutes** for the sections marked CORE, 40 with those marked MORE.
#
# After this lesson **you can**
# - submit a job, watch it, find its output and cancel it, from a cell or in a terminal;
# - say what each part of a job file does, and who reads it;
# - say why a job waits, and what helps;
# - find the first error of a failed job, and its rank;
# - move from the notebook to the cluster without running yesterday's code.
#
# **You need** lesson 03 ([Data parallel](03_data_parallel.ipynb)) only as the thing that we run. In two lines: it trains a
# small GPT on Shakespeare on several [ranks](../assets/glossary.md#rank); in each step they share one *global batch* of
# sequences. You need **no terminal habit**: every command here can be run from a cell.
#
# **New here:** [job](../assets/glossary.md#job), [scheduler](../assets/glossary.md#scheduler),
# [queue](../assets/glossary.md#queue), [login node](../assets/glossary.md#login-node),
# [compute node](../assets/glossary.md#compute-node), [directive](../assets/glossary.md#directive),
# [walltime](../assets/glossary.md#walltime), [exit status](../assets/glossary.md#exit-status).
#
# The same file is a script; as a script it does everything but submit:
#
# ```bash
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/04_first_job.py
# mpiexec -n 4 python scripts/04_first_job.py
# ```

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 1, where a job goes 2, terminal 2, four jobs by hand 3, the job file 4, submit 4, while it waits 2,
# exercises 1 to 3 together 5, zoo with exercise 4 2.
#
# *Before the event:* run `make jobs SITE=... ACCOUNT=... RESERVATION=...` once in the shared course, and submit the job
# yourself from an attendee's account. A wrong account costs the whole room ten minutes.
#
# *Say:* "You do not start programs on a cluster. You ask for nodes, and hand in what shall happen on them."
#
# *Three usual mistakes:* submitting from another folder than the course's; reading the last error of a log instead of the
# first; asking for a day "to be safe" and then waiting for a day.
#
# *When late:* submit (everybody), exercise 2, exercise 4. The rest reads well alone.
#
# *Ask the room:* "Your job asks for one node and ten minutes, hundreds are before it in the queue, and it starts at once.
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
# As in every lesson the first cell starts four ranks behind this notebook, and a cell that begins with `%%ranks` runs on all
# of them. This lesson works more with the *other* cells, which run once, in the notebook's own process. **Submitting belongs
# there:** four ranks that each submit a job have submitted four jobs.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("04_first_job", globals())

# %%
# %%ranks
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import torch
import torch.distributed as dist
from manyhands import Metrics, catch_up, join, leave, refuse, say, show
from manyhands.checks import first_job as checks
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.gpt.model import GPT, GPTConfig
from manyhands.runs import recorded_runs
from matplotlib.figure import Figure
from torch.nn.parallel import DistributedDataParallel as DDP

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
if global_batch == 0:
    global_batch = -(-12 // world_size) * world_size
if global_batch % world_size:
    refuse(
        f"global_batch={global_batch} does not split over {world_size} ranks; use a multiple of {world_size}"
    )

# %%
# %%ranks
corpus = load_corpus(ranks)
metrics = Metrics(ranks, corpus, {"global_batch": global_batch, "steps": steps})
x_bT, y_bT = get_batch(corpus.train_ids, 0, global_batch, 64, rank, world_size, seed=1)
say(f"my share of the global batch of {global_batch}: {len(x_bT)} sequences")

# %% [markdown]
# ## Where a job goes (CORE, 2 min)
#
# **Why.** On your laptop you press a key and a program runs. A cluster has hundreds of machines (*nodes*) and as many users.
# If everybody started programs wherever they liked, nobody would have a quiet GPU. So there is one rule: **you do not start
# programs, you ask for nodes.** What you hand in is called a *job*.
#
# ![From your browser to the login node; qsub or sbatch puts the job into the queue; the scheduler starts it on two compute
# nodes with two ranks each; all of them see the same files](../assets/04_cluster.svg)
#
# - The **login node** is where JupyterLab and the terminal run. Everybody shares it: edit and submit there, never train.
# - The **scheduler** (PBS or Slurm) keeps the **queue** of jobs and decides who is next.
# - **Compute nodes** have the GPUs. What your job asked for it has to itself, for as long as it asked for: its **walltime**.
# - The **file system** is the same everywhere. The job finds your files, and you find its output.
#
# Is there a scheduler where this notebook runs?

# %% tags=["active-ipynb"]
# from manyhands.jobs.submit import scheduler, submit
#
# via = scheduler() or "bash" if submit_via == "auto" else submit_via
# answers = {"slurm": "Slurm: sbatch", "pbs": "PBS: qsub", "bash": "none. Jobs run under bash, here, at once"}
# print("scheduler:", answers[via])

# %% [markdown]
# If there is none, everything below still works: the job file runs under `bash` on this machine, with two ranks, and what only
# a cluster can show was recorded on one.

# %% [markdown]
# ## A terminal in two minutes (CORE, 2 min)
#
# **Why.** When something is stuck, the helpers will say "open a [terminal](../assets/glossary.md#terminal)". In JupyterLab:
# menu **File > New > Terminal**. It looks like 1980 and works like this:
#
# ![A terminal: the prompt says who you are, on which machine and in which folder; you type a command after the dollar sign,
# press Enter, and its output follows](../assets/04_terminal.svg)
#
# | you type | it means |
# |---|---|
# | `cd many-hands` | go into the folder `many-hands`; `cd ..` goes up, `cd` alone goes home |
# | `ls jobs` | list what is in the folder `jobs` |
# | `head -n 6 jobs/ddp_shakespeare.pbs` | show the first 6 lines of a file |
# | `tail -f ddp_shakespeare.o4711` | show the end of a file, and go on as it grows; leave with Ctrl-C |
# | the Tab key | completes a name; the up arrow brings the last command back |
#
# A line in a cell that begins with `!` goes to the same shell. This notebook lives in the folder `notebooks`, so the course is
# one up, `..`:

# %% tags=["active-ipynb"]
# !ls ../jobs
# !head -n 6 ../jobs/ddp_shakespeare.pbs

# %% [markdown]
# ## Warm-up: four jobs by hand (CORE, 3 min)
#
# **Why.** "Why does my job not start?" is the question of every first day. You can answer it with four numbers.
#
# Two nodes are free. Four jobs arrive in this order. Each wants **one** node, for 3, 2, 2 and 1 minutes.
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
# Eight lines of Python do the same: a job starts when as many nodes as it needs are free, and never before the one ahead of it.


# %% tags=["nbval-check-output"]
# %%ranks
def start_times(jobs, nodes):
    """When each of the jobs [(nodes it needs, minutes)] starts, strictly in the order of submission."""
    free_at, starts = [0] * nodes, [0]  # for each node the minute from which on it is free
    for need, minutes in jobs:
        free_at.sort()
        start = max(free_at[need - 1], starts[-1])  # `need` nodes are free, and nobody is overtaken
        free_at[:need] = [start + minutes] * need
        starts.append(start)
    return starts[1:]


by_hand = start_times([(1, 3), (1, 2), (1, 2), (1, 1)], nodes=2)
if rank == 0:
    say(f"start minutes: {by_hand}")

# %% [markdown]
# That is a scheduler. What real ones add is the order: instead of "first come" they compute a *priority* from how long a job
# has waited, its size, and how much its project has used lately. But the two questions stay: **who is ahead of me, and are
# enough nodes free?**

# %% [markdown]
# ## The job file, part by part (CORE, 4 min)
#
# **Why.** A job runs while you are away. So all that it needs must stand in one file: how much, for how long, and what to do.
#
# ![A job file has four parts: directives that the scheduler reads at submission, a block that you edit, guards that the shell
# runs on the first compute node, and the laptop's own command, which starts the ranks](../assets/04_job_file.svg)
#
# Our file trains lesson 03. The lines that begin with `#PBS` are **directives**. To the shell they are comments. The scheduler
# reads them *before* any shell runs, when you submit:

# %% tags=["active-ipynb"]
# !grep "^#PBS" ../jobs/ddp_shakespeare.pbs
# !echo "the same for Slurm:"
# !grep "^#SBATCH" ../jobs/ddp_shakespeare.slurm

# %% [markdown]
# | PBS | Slurm | what you ask for |
# |---|---|---|
# | `-N ddp_shakespeare` | `--job-name=...` | a name, for the queue and for the file with the output |
# | `-l select=2:...` | `--nodes=2 --cpus-per-task=2` | two nodes, and two cores on each |
# | `-l place=scatter` | (nodes are nodes) | really two: PBS may put both parts on one node otherwise |
# | `-l walltime=00:10:00` | `--time=00:10:00` | ten minutes. After that the scheduler ends the job, finished or not |
# | `-j oe` | `--output=%x.o%j` | errors and output into one file, `ddp_shakespeare.o` and the job's number |
# | `-A`, `-q` | `--account`, `--partition` or `--qos` | who pays, and which queue, if your site wants to know |
#
# Because the shell has not run yet, **a directive cannot contain a variable.** Your site's lines are written into the file,
# once, by `make jobs SITE=polaris ACCOUNT=MyProject`. (A classic: `# SBATCH` with a blank is a comment to the scheduler as
# well. It is ignored without a word.) This command reads the files as the scheduler would, and complains:

# %% tags=["active-ipynb"]
# from manyhands.jobs import stamp
#
# stamp.main(["check"]);

# %% [markdown]
# The second part is yours. `${NAME:-value}` means: the value of the variable NAME if somebody has set it, else `value`.

# %% tags=["active-ipynb"]
# !sed -n "/edit here/,/end of what/p" ../jobs/ddp_shakespeare.pbs

# %% [markdown]
# Then come guards and the command itself:

# %% tags=["active-ipynb"]
# !sed -n "/^cd /,$ p" ../jobs/ddp_shakespeare.pbs

# %% [markdown]
# You need not understand each character. Find these five:
#
# 1. `cd "${PBS_O_WORKDIR...` : a PBS job starts in your home folder. This goes to where you were when you submitted.
# 2. `source "$VENV/bin/activate"` : this course's Python. Every guard ends with *stop here*: without it a job would go on with
#    another Python and fail an hour later, elsewhere.
# 3. `manyhands.course.pairs check` : refuses to run when notebook and script differ. You will see why in exercise 4.
# 4. `scripts/launch.py` : it asks the scheduler which nodes are ours and starts `torch.distributed.run`, as on your laptop. On
#    several nodes it starts one of them *per node*; each starts that node's ranks, and they meet on the first node.
# 5. `wait "$step"` : the shell stays until the program has ended. Its exit status becomes the job's.
#
# **Predict.** How many ranks does this job start, and how many of lesson 03's 12 sequences does each get per step?
#
# <details><summary>Answer</summary>
#
# 2 nodes times `NPROC_PER_NODE=2`: 4 ranks. 12 / 4 = 3 sequences each. On a node with four GPUs one would set
# `NPROC_PER_NODE=4` (`make jobs` does), and get 8 ranks. 12 do not split over 8, so the lesson takes 16, the next multiple
# that does: 2 each.
#
# </details>

# %% [markdown]
# ## Submit, watch, cancel (CORE, 4 min)
#
# **Why now.** Because a job waits, one submits first and reads on meanwhile.
#
# ![A job waits (PD or Q), runs (R), tidies up (CG or E), and ends as completed, failed or over time; scancel or qdel cancels it
# while it waits or runs](../assets/04_life_of_a_job.svg)
#
# In a terminal, from the course's folder, you would type the line that this cell prints after `$`. Nothing else is needed:

# %% tags=["active-ipynb"]
# job = submit("ddp_shakespeare", job_flags, via=via)

# %% [markdown]
# That was all. The number is your job's name from now on. What you do with it, in a terminal or here:
#
# | | PBS | Slurm | in a cell |
# |---|---|---|---|
# | submit | `qsub jobs/ddp_shakespeare.pbs` | `sbatch jobs/ddp_shakespeare.slurm` | `job = submit("ddp_shakespeare")` |
# | watch | `qstat -u $USER` | `squeue --me` | `job.watch(60)` |
# | why does it wait? | `qstat -f 4711` (the line `comment`) | `squeue --me` (the last column) | `job.state()` |
# | the end of its output | `tail ddp_shakespeare.o4711` | the same | `job.tail(10)` |
# | lines with a word | `grep loss ddp_shakespeare.o4711` | the same | `job.grep("loss")` |
# | cancel | `qdel 4711` | `scancel 4711` | `job.cancel()` |

# %% tags=["active-ipynb"]
# job.state()

# %% [markdown]
# ### While it waits: a run that we recorded (CORE, 2 min)
#
# This is the same job on two nodes with two ranks each, its output as the scheduler wrote it:

# %%
# %%ranks
printed = recorded_runs.text("04_ddp_shakespeare.out").splitlines()
run = recorded_runs.numbers("04_ddp_shakespeare.json")
if rank == 0:
    say("\n".join(printed[:4]))
    say("   ...")
    say("\n".join(line for line in printed if "validation loss" in line))
    say("on {hardware}, torch {torch}, {date}".format(**run["conditions"]))

# %% [markdown]
# Read the first lines of *every* job's output. They say who is here: 4 ranks, two hosts, two ranks on each. If it says n times
# "1 rank", something started n separate trainings, and the job would still end with success.
#
# **Predict.** The corpus has 65 symbols. What is the loss of a model that guesses blindly, and so the first number of the curve?
#
# <details><summary>Answer</summary>
#
# ln 65 = 4.17. Any other start means that something is wrong before the training has begun.
#
# </details>
#
# The plot should start there, fall steeply while the model learns which letters are common, then slowly.

# %%
# %%ranks
recorded_losses = run["metrics"]["exact"]["losses"]
if rank == 0:
    figure = Figure(figsize=(6, 2.8), layout="constrained")
    axes = figure.subplots()
    axes.plot(recorded_losses, color="black", lw=1)
    axes.axhline(math.log(65), ls="--", color="#999999")
    axes.annotate("ln 65: guessing", (len(recorded_losses) * 0.6, math.log(65) - 0.12), va="top")
    axes.set(xlabel="step", ylabel="training loss", title="the recorded job: two nodes, two ranks each")
    show(figure, "recorded_run", "the loss of the recorded job falls from ln 65, first steeply, then slowly")

# %% [markdown]
# ### Back to your own job
#
# Watch it. Each line is a change; when it waits, the reason stands there.

# %% tags=["active-ipynb"]
# state = job.watch(wait_s)

# %% [markdown]
# Its output is a file. With a scheduler it lies where you submitted, `ddp_shakespeare.o` and the number; it grows while the job
# runs. `tail` shows its end, `grep` the lines that contain a word:

# %% tags=["active-ipynb"]
# job.tail(2)
# job.grep("validation loss")
# assert state != "failed", "the job failed; job.tail(20) shows the end of its output, exercise 3 how to read it"

# %% [markdown]
# The numbers of a run are not only on the screen. Each run has a folder, `outputs/<lesson>/<date and time>...`, with a
# `metrics.json`. Here are the first losses of your job beside those of the recorded one. It had other nodes and perhaps another
# number of ranks, but **the same global batch**:

# %% tags=["active-ipynb"]
# from manyhands.runs import recorded_runs
#
# mine = job.metrics("03_data_parallel")
# theirs = recorded_runs.numbers("04_ddp_shakespeare.json")["metrics"]
# for name, found in {"my job": mine, "recorded": theirs}.items():
#     if found is None:
#         print(f"{name:>9}: has not written its metrics yet; run this cell again when it has ended")
#     else:
#         first = "  ".join(f"{loss:.8f}" for loss in found["exact"]["losses"][:3])
#         print(f"{name:>9}: {found['world_size']} ranks, corpus {found['corpus']['name']}, first losses {first}")

# %% [markdown]
# They agree to six digits or so: with the same corpus, more ranks change *who* computes a sequence, not what is computed. The
# last digits differ because floating-point sums depend on their order.
#
# To cancel is as easy, and nothing to be shy about: a job that you no longer need keeps others waiting. This one lives for a
# moment only:

# %% tags=["active-ipynb"]
# second = submit("ddp_shakespeare", job_flags, via=via)
# second.cancel()
# second.watch(20);

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: submission</summary>
#
# Submission fails in a class for three reasons: no account in the file (`make jobs`), a queue that wants a reservation, or
# the wrong folder. The scheduler's sentence says which; read it aloud together.
#
# When the reservation is busy, show `squeue` on the projector: the whole class is in it, and everybody sees `Priority` and
# `Resources` become `R`.
#
# </details>

# %% [markdown]
# ## How long to ask for (MORE, 6 min)
#
# **Why.** You must name the walltime before you know it. Too little, and the job is ended when it was nearly done. Too much, and
# it waits longer than it must (the next section shows it). The way out: run a few steps, and draw the line.
#
# Time = start-up + steps x time per step. We train ShakespeareGPT for `steps` steps on the ranks of this lesson, take the time
# per step from the **first quarter** only, and see how well that predicts the rest.


# %%
# %%ranks
def train(num_steps):
    """Losses of `num_steps` steps, and after each the seconds since the start. All ranks call it."""
    torch.manual_seed(1337)
    model = DDP(GPT(GPTConfig(vocab_size=len(corpus.symbols))).to(device))
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


losses, measured_s = train(steps)
if rank == 0:
    say(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps; the first took {measured_s[0]:.2f} s")

# %% [markdown]
# **Predict.** The first step is left out of the line. Why, and on which side of the line will it lie?
#
# <details><summary>Answer</summary>
#
# Above: the first step also allocates memory, builds DDP's buckets and meets cold caches (on a GPU it loads kernels, which takes
# seconds). It is part of the start-up, not of the slope. The first line that a job prints tells you when *that* is over.
#
# </details>

# %%
# %%ranks
quarter = steps // 4
step_s = (measured_s[quarter - 1] - measured_s[0]) / (quarter - 1)
predicted_s = [measured_s[0] + step_s * step for step in range(steps)]
ratio = measured_s[-1] / predicted_s[-1]


def ask_for(seconds):
    """A walltime: half as much again, two minutes for the start, in whole minutes."""
    minutes = math.ceil(1.5 * seconds / 60) + 2
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


if rank == 0:
    say(f"predicted {predicted_s[-1]:.2f} s, measured {measured_s[-1]:.2f} s, ratio {ratio:.2f}")
    say(f"10,000 such steps: {10_000 * step_s:.0f} s, so ask for {ask_for(10_000 * step_s)}")

# %%
# %%ranks
if rank == 0:
    figure = Figure(figsize=(6, 2.8), layout="constrained")
    axes = figure.subplots()
    axes.plot(predicted_s, "--", color="#999999", label=f"predicted from the first {quarter} steps")
    axes.plot(measured_s, ".", color="black", ms=4, label="measured")
    axes.axvspan(0, quarter - 1, color="#56B4E9", alpha=0.2)
    axes.set(xlabel="step", ylabel="seconds since the start", title=f"{world_size} ranks on this machine")
    axes.legend()
    show(figure, "how_long", "the measured seconds lie along the line drawn from the first quarter")

# %% [markdown]
# The points should follow the line within some ten percent. Where they leave it, something else ran on the machine: on a laptop
# the notebook's own job, on a cluster the shared network and file system. That is what the margin of one half is for. (What is
# *not* in the line: evaluating, sampling, saving. Lesson 03 shows a published run in which they took 59 %.)

# %% [markdown]
# ## Overtaking: why a short job starts early (MORE, 5 min)
#
# **Why.** Strictly in order wastes nodes. Look at the left half: job B wants both nodes. While it waits for A, node 2 stands
# idle for six minutes.
#
# ![Two nodes, four jobs. In order of submission node 2 stands idle for six minutes, because job B waits for both nodes. With
# overtaking the short jobs C and D run in that gap, and B starts no later](../assets/04_overtaking.svg)
#
# So schedulers let a later job go first **if that delays nobody before it**. It is called
# [*backfill*](../assets/glossary.md#backfill). The scheduler cannot know how long C will run. It believes what C asked for, its
# walltime.
#
# **Predict.** In the right half D fills the gap from minute 2 to 5. Suppose its owner had asked for 60 minutes, "to be safe". It
# still runs for 3. When does it start?
#
# <details><summary>Answer</summary>
#
# At minute 9, after B. It *might* run past minute 6 and delay B, so it may not overtake. To be safe has cost it seven minutes,
# more than twice of what it runs.
#
# </details>


# %% tags=["nbval-check-output"]
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


# %% tags=["nbval-check-output"]
# %%ranks
catch_up(globals(), "start_times", "with_overtaking")
abcd = [(1, 6), (2, 3), (1, 2), (1, 3)]
predicted = {
    "in order": start_times(abcd, nodes=2),
    "overtaking": with_overtaking(abcd, nodes=2),
    "overtaking, D asks for 60 minutes": with_overtaking([*abcd[:3], (1, 60)], nodes=2),
}
if rank == 0:
    for way, minutes in predicted.items():
        say(f"{way:<34} {dict(zip('ABCD', minutes, strict=True))}")

# %% [markdown]
# Is that what a real scheduler does? We handed these four jobs to Slurm on two nodes, three times, and wrote down when they
# started (A at 0; real minutes). If our twenty lines are right, all twelve points lie on the diagonal. Beside it the residual,
# measured minus predicted, in *seconds*:

# %%
# %%ranks
queue = recorded_runs.numbers("04_queue.json")["start_minutes"]
measured = {way: [queue[way][job] for job in "ABCD"] for way in predicted}
if rank == 0:
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([0, 9], [0, 9], "--", color="#999999", zorder=0)
    for way, marker in zip(predicted, "s^o", strict=True):
        residual_s = [60 * (m - p) for m, p in zip(measured[way], predicted[way], strict=True)]
        left.plot(predicted[way], measured[way], marker, ms=9, mfc="none", color="black")
        right.plot(list("ABCD"), residual_s, marker, ms=9, mfc="none", color="black", label=way)
    left.set(
        xlabel="predicted start, minute", ylabel="measured start, minute", title="Slurm, two nodes (recorded)"
    )
    right.set(xlabel="job", ylabel="seconds late", ylim=(-0.3, 4))
    right.legend(fontsize=8)
    show(figure, "queue", "twelve measured starts lie on the diagonal; they are at most 2.5 seconds late")

# %% [markdown]
# The residual is the scheduler's own rhythm: this one looks at its queue every two seconds, and first the job before must be
# tidied up (a job that is started as soon as it arrives, like A, waits for neither). Large machines look less often. **Ask for
# what you need plus a margin, not for the maximum**: a short job finds a gap, a long one waits for its turn.

# %% [markdown]
# ## Exercises (CORE, 5 min)
#
# ### Exercise 1: twice the nodes, the same global batch
#
# `sbatch --nodes=4 jobs/ddp_shakespeare.slurm --global-batch 24`, and four nodes train together. (PBS: `-l select=4:...` in the
# file.) The science should stay the same: 24 sequences per step, whoever computes them.
#
# Write `my_sequences(global_batch, nodes, ranks_per_node, node, local_rank)`: the `range` of sequences that this one rank takes.
# Ranks are counted through: node 0 has the first ones. If the batch does not split evenly, raise a `ValueError` that names the
# batch and the number of ranks: better now than in an hour.


# %%
# %%ranks
def my_sequences(global_batch, nodes, ranks_per_node, node, local_rank):
    raise NotImplementedError  # your turn


checks.twice_the_nodes(my_sequences, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 1
def my_sequences(global_batch, nodes, ranks_per_node, node, local_rank):
    n = nodes * ranks_per_node
    if global_batch % n:
        raise ValueError(f"{global_batch} sequences do not split over {n} ranks; use a multiple of {n}")
    share = global_batch // n
    rank = node * ranks_per_node + local_rank  # not local_rank: that one counts anew on each node
    return range(rank * share, (rank + 1) * share)


checks.twice_the_nodes(my_sequences, ranks, solution=True)

# %% [markdown]
# (That is what `get_batch` does in lesson 03: it refuses 12 sequences on 8 ranks. When you name no batch, the job file takes
# 12, or the next multiple of the ranks, so that it runs on any machine; to compare two runs name one that both split. Hence
# `--global-batch 24`.)
#
# ### Does it stay the same? (MORE, 3 min)
#
# Measure it on the ranks of this notebook: the gradient of the whole batch in one process, against the mean of the gradients of
# all shares. In float64, so that rounding hides nothing.


# %%
# %%ranks
catch_up(globals(), "my_sequences")
torch.manual_seed(0)
model = GPT(GPTConfig(vocab_size=len(corpus.symbols), n_layer=2, n_head=2, n_embd=32)).double().to(device)
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
say(f"node {node}, local rank {local_rank}: sequences {mine.start} to {mine.stop - 1}")
if rank == 0:
    say(f"gradient of all shares = gradient of one process, to 1e-10: {apart < 1e-10}")

# %% [markdown]
# ### Exercise 2: why does it wait?
#
# Here is a queue, recorded on a real Slurm. All jobs but the first wait (`PD`), each for a reason of its own, which stands in the
# last column. In a terminal: `squeue --me`.

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
# | `JobHeldUser` | `H` | you put it on hold (`scontrol hold`, `qhold`) |
# | `BeginTime` | `W` | you asked for a later start |
# | `PartitionTimeLimit`, `PartitionNodeLimit` | | more than this queue gives, ever (most sites refuse it when you submit) |
#
# For the six jobs below: what helps? `"wait"`, `"release"` (`scontrol release`, `qrls`), `"ask for less"` (change the job), or
# `"cancel"`?

# %%
# %%ranks
acts = {4702: ..., 4703: ..., 4704: ..., 4705: ..., 4706: ..., 4708: ...}  # your turn

if rank == 0:
    checks.why_it_waits(acts)

# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 2
acts = {4702: "wait", 4703: "wait", 4704: "wait", 4705: "cancel", 4706: "release", 4708: "ask for less"}

if rank == 0:
    checks.why_it_waits(acts, solution=True)

# %% [markdown]
# Most waiting is ordinary: `Resources` and `Priority` pass by themselves. Learn to see those that never do: a dependency that
# has failed, a hold, and the two limits.
#
# ### Exercise 3: find the first error, and its rank
#
# Somebody added a line to lesson 03: "print what each rank learns from". On the laptop, with two ranks, it worked. As a job with
# four ranks it failed. This is the log of that job, and one looks at the end first, as everybody does:

# %% tags=["nbval-check-output"]
# %%ranks
log = recorded_runs.text("04_failed.out").splitlines()
if rank == 0:
    say(f"{len(log)} lines; the last three:")
    say("\n".join(line[:110] for line in log[-3:]))

# %% [markdown]
# *Signal 15*? You sent no signal. **The end of a distributed log is the end of a chain**: one rank fails, the others lose
# their connection and fail too, and the launcher stops whoever is left. So go back. All lines that speak of an error, in a
# terminal `grep Error ddp_shakespeare.o4712`:

# %% tags=["nbval-check-output"]
# %%ranks
if rank == 0:
    say("\n".join(line[:110] for line in log if "Error" in line))

# %% [markdown]
# Several lines, several ranks, and the order in the file is not the order in time: each node writes when it likes. Which rank
# failed *first*, and with which error? One thing helps: an error that speaks of a *connection* or a *peer* is an echo. Somebody
# else had gone before.

# %%
# %%ranks
first_rank = ...  # your turn: a number
first_error = ...  # and a name such as "ValueError"

if rank == 0:
    checks.first_error((first_rank, first_error))

# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 3
first_rank = 3  # not 1: that is its local rank, its number on node2
first_error = "IndexError"

if rank == 0:
    checks.first_error((first_rank, first_error), solution=True)

# %% [markdown]
# `torchrun` agrees. It keeps the time at which each rank ended, and reports the first under "Root Cause" (in a terminal
# `grep -A 5 "Root Cause" ddp_shakespeare.o4712`):

# %% tags=["nbval-check-output"]
# %%ranks
if rank == 0:
    at = next(n for n, line in enumerate(log) if "Root Cause" in line)
    say("\n".join(log[at : at + 6]))

# %% [markdown]
# Now the reason is one look away: what that rank said.

# %% tags=["nbval-check-output"]
# %%ranks
if rank == 0:
    say("\n".join(line for line in log if line.startswith("[rank3]")))

# %% [markdown]
# `x_bT` is this rank's *own share* of the batch: 3 sequences, numbers 0 to 2. Indexed by the rank it works for ranks 0, 1 and 2.
# With two ranks on the laptop each share had 6 sequences, and nothing was wrong yet. **A program that runs on two ranks has been
# tested on two ranks.**

# %% [markdown]
# ## A bug from the zoo: yesterday's code (CORE, 2 min)
#
# A lesson is two files with the same cells: the notebook that you edit, and the script that the job runs. A JupyterLab that has
# the extension *jupytext* writes both when you save. On many hubs the server does not have it. Then this happens:


# %%
# %%ranks
def write(path, source):
    """A notebook or a script with one cell."""
    jupytext.write(jupytext.reads(f"# %%\n{source}\n", fmt="py:percent"), path)


if rank == 0:
    with tempfile.TemporaryDirectory() as folder:
        notebook, script = Path(folder) / "lesson.ipynb", Path(folder) / "lesson.py"
        write(script, "steps = 10; print('trained for', steps, 'steps')")
        write(notebook, "steps = 20; print('trained for', steps, 'steps')")  # today's edit, saved
        job = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
        say(f"the notebook says: {jupytext.read(notebook).cells[0].source.split(';')[0]}")
        say(f"the job says:      {job.stdout.strip()}")

# %% [markdown]
# No error anywhere. The job ran the script, and the script is yesterday's: **results that the notebook cannot explain.** It
# happens on every hub whose server lacks jupytext. So a job file should refuse to run a stale pair. Somebody's guard:
#
# ```python
# def stale(notebook, script):
#     return notebook.stat().st_mtime > script.stat().st_mtime      # saved later, so it must be newer
# ```
#
# ### Exercise 4: a guard that tells the truth
#
# That guard is wrong in both directions. It stops jobs whose notebook was only *saved* again. And after `git clone` or a copy all
# files carry the time of the copy, in any order, and it lets yesterday's code run. Write `stale(notebook, script)`, given two
# paths. `jupytext.read(path).cells` lists the cells of either file, each with its `.source`.


# %%
# %%ranks
def stale(notebook, script):
    raise NotImplementedError  # your turn


if rank == 0:
    checks.yesterdays_code(stale)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 4
def stale(notebook, script):
    ours, theirs = ([cell.source for cell in jupytext.read(path).cells] for path in (notebook, script))
    return ours != theirs


if rank == 0:
    checks.yesterdays_code(stale, solution=True)

# %% [markdown]
# That is what `python -m manyhands.course.pairs check 03_data_parallel` does in our job file: it stops with [exit
# status](../assets/glossary.md#exit-status) 2 and says which cell differs. The cure is `make sync`, in a terminal. (jupytext's
# own `--sync` also trusts the files' times, see its [documentation](https://jupytext.readthedocs.io/en/latest/using-cli.html):
# save what you want to keep last.)

# %% [markdown]
# ## On the cluster
#
# Once per machine, in a terminal on the login node:
#
# ```bash
# make jobs SITE=polaris ACCOUNT=MyProject                    # or aurora, perlmutter, frontier, generic
# make jobs SITE=perlmutter ACCOUNT=m1234 QUEUE=regular WALLTIME=00:20:00 RESERVATION=class
# ```
#
# Then, for every run, with your own edits in lesson 03:
#
# ```bash
# qsub jobs/ddp_shakespeare.pbs           # PBS: Polaris, Aurora
# sbatch jobs/ddp_shakespeare.slurm       # Slurm: Perlmutter, Frontier
# ```
#
# **What changes on GPUs.** One rank per GPU instead of two per node (`make jobs` sets it), NCCL instead of gloo. The first line
# of the output says so. Compute nodes often have no internet: what a job needs, data and packages, must lie on the file system
# before.
#
# **What to look for.** As many ranks as nodes times GPUs, on as many hosts as you asked for. A first loss near ln 65 = 4.17. The
# job's end: `completed`, not `failed` and not over time. And if it did fail: the *first* error, and its rank.

# %% [markdown]
# ## Recap
#
# 1. You ask for nodes; the scheduler starts the job; login nodes are for editing and submitting.
# 2. A job file: directives for the scheduler, a block for you, guards, and the laptop's own command.
# 3. `qsub` or `sbatch`, `qstat` or `squeue`, `qdel` or `scancel`. Output lies in `name.o<number>`, numbers in `outputs/`.
# 4. It waits because others are ahead or nodes are busy. A short walltime finds a gap.
# 5. Read the first error, not the last. And know which file the job ran.
#
# ## Further reading
#
# - Slurm's [quick start](https://slurm.schedmd.com/quickstart.html), and its
#   [list of reasons](https://slurm.schedmd.com/job_reason_codes.html) for which a job waits.
# - The Altair [PBS user's guide](https://help.altair.com/2022.1.0/PBS%20Professional/PBSUserGuide2022.1.pdf): chapters 2 (submitting)
#   and 10 (checking status).
# - Running jobs on [Polaris](https://docs.alcf.anl.gov/polaris/running-jobs/),
#   [Aurora](https://docs.alcf.anl.gov/aurora/running-jobs-aurora/),
#   [Perlmutter](https://docs.nersc.gov/systems/perlmutter/running-jobs/),
#   [Frontier](https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#running-jobs).
# - Mu'alem and Feitelson 2001, *Utilization, predictability, workloads, and user runtime estimates in scheduling the IBM SP2 with
#   backfilling*, IEEE TPDS 12(6): overtaking, and what people's estimates of their own walltime are worth.

# %%
# %%ranks
metrics.exact(by_hand=by_hand, queue=predicted, losses=losses, sequences=[mine.start, mine.stop])
metrics.close(gradient_norm=mean_P.norm(), final_loss=losses[-1])
metrics.measured(step_s=step_s, predicted_over_measured=1 / ratio)
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
