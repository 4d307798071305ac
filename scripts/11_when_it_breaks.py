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
# # 11 When it breaks: hangs, crashes, and a run that survives them
#
# **45 minutes** for the sections marked CORE, 114 with those marked MORE.
#
# A job hangs, and every rank prints an error. Later a rank is killed. In this lesson you find the rank at fault. Then
# you build a checkpoint, so that the killed run goes on with exactly the same losses.
#
# After this lesson **you can**
# - find the rank at fault in a hang, and the call that it did not make;
# - say what a checkpoint must hold, and write one that is complete or absent;
# - resume a killed run bit for bit;
# - say how often to save on your number of GPUs.
#
# **You need** the [all-reduce](../assets/glossary.md#all-reduce) ([lesson 02](02_collectives.ipynb)). From [lesson
# 06](06_zero_fsdp.ipynb): under [FSDP](../assets/glossary.md#fsdp) each rank keeps a shard of the weights and of
# Adam's moments.
#
# **New here:** [flight recorder](../assets/glossary.md#flight-recorder),
# [checkpoint](../assets/glossary.md#checkpoint), [manifest](../assets/glossary.md#manifest),
# [MTBF](../assets/glossary.md#mtbf), and in MORE [straggler](../assets/glossary.md#straggler),
# [resharding](../assets/glossary.md#resharding), [pre-emption](../assets/glossary.md#pre-emption). Tables are in [the
# handbook](../assets/handbook/11_when_it_breaks.md).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 1, the hang 11, what must survive 8, whole or not there 9, kill it 6, how often 4, zoo 5,
# card 1. A build takes about four minutes; walk around while people write.
#
# *Say:* at 16,000 GPUs something breaks every three hours. What matters is what each failure costs you. "Find it in a
# minute, lose ten minutes of work, and go on by itself" is the standard that this lesson reaches.
#
# *Three usual mistakes:* looking at the rank whose error comes first (it waited, like the others); believing that a
# checkpoint exists because a file does; testing the save but never the resume.
#
# *When late:* give solution C at once; keep build B, the kill and its curve.
#
# *Ask the room:* "Who has resumed a run and compared the next ten losses with those of the run that was not
# interrupted?"
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
steps = 24  # training steps of the run that is killed, 16 to 200
wait_s = 1.0  # seconds that a rank waits in a collective before it gives up, 0.2 to 60
state_mib = 8  # MiB that each rank saves when saving is timed, 1 to 1024
repeats = 5  # samples of each timing, at least 1
failures = "two"  # what hits the run: one is kill -9, two is kill -9 and later SIGTERM; one of none, one, two

# %% [markdown]
# ## Start (CORE, 1 min)
#
# The first cell starts four ranks. The failures below are real, on real processes. Most take seconds; the one in which a rank is killed takes a minute.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("11_when_it_breaks", globals())

# %%
# %%ranks
import torch
import torch.distributed as dist
from manyhands import ____, Metrics, card, compare, fingerprint, join, leave, say, show
from manyhands.checks import when_it_breaks as checks

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device

# %% jupyter={"source_hidden": true}
# %%ranks
import json
import math
import warnings

from manyhands.data.corpus import get_batch, load_corpus
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.launch import recorded_runs
from manyhands.launch.run_folder import run_folder
from manyhands.measure.tensor_bytes import local_part
from manyhands.parallel.optimizer import ensure_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

# fully_shard warns of operations in place on what a sharded model returns; there are none here
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
guilty = min(2, world_size - 1)  # the rank at fault in this lesson
least = math.lcm(12, world_size)  # it splits over all ranks, and over the first two, three and four
global_batch = -(-24 // least) * least  # 24 sequences, or the next number that does
corpus = load_corpus(ranks)
metrics = Metrics(ranks, corpus, {"steps": steps, "failures": failures})
agreed = [run_folder(ranks) if rank == 0 else None]
dist.broadcast_object_list(agreed)  # all ranks: rank 0 says where
folder = agreed[0]
# on the CPU, also on a machine with GPUs: a NCCL call that times out takes its process down
group_of = {n: dist.new_group(range(n), backend="gloo") for n in (1, 2, 3, 4) if n <= world_size}


def flight_record(groups):
    """Return what this rank called in these groups: [(group, number of the call in it, call, numbers in it)]."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)  # private; where torch is too old: nothing
    found = []
    for entry in json.loads(dump()).get("entries", []) if dump else []:
        name, call = entry["process_group"][1], entry["profiling_name"].split(":")[-1]
        if name in groups:
            length = sum(math.prod(size) for size in entry["input_sizes"])
            found.append((name, entry["collective_seq_id"], call, length))
    return found


def calls_in(group, records):
    """Return for each record what its rank called in this group: {number: call}."""
    return [{number: call for name, number, call, _ in record if name == group} for record in records]


def usual(made):
    """Return the call that most of these ranks made; None stands for a rank that made none."""
    return max(sorted(set(made) - {None}), key=made.count)  # sorted: in a tie the same on every rank


# %% [markdown]
# ## A job that hangs (CORE, 11 min)
#
# Training makes one all-reduce per step. After the last step, another group of the same ranks all-reduces the
# validation loss. One rank has less data, so it leaves the loop one step early. The default
# [time-out](../assets/glossary.md#time-out) is 30 minutes with gloo and 10 with NCCL; here it is one second.


# %%
# %%ranks
import time
from datetime import timedelta


def train_together(num_steps, training, validation):
    for _ in range(num_steps):
        dist.all_reduce(torch.ones(1000), group=training)  # a step's gradients
    dist.all_reduce(torch.ones(1), group=validation)


dist.barrier()  # all ranks come at the same time
patience = timedelta(seconds=wait_s)
training, validation = (
    dist.new_group(backend="gloo", timeout=patience, group_desc=name) for name in ("train", "valid")
)
begin = time.perf_counter()
try:
    train_together(5 if rank == guilty else 6, training, validation)
except RuntimeError as error:
    say(f"after {time.perf_counter() - begin:.0f} s: {str(error).split('] ')[-1]}")

# %% [markdown]
# Every rank prints an error, and no message names the rank at fault. A job of 1,000 ranks prints a thousand such
# lines.
#
# **Predict.** Which rank is at fault? Guess.

# %%
# %%ranks
guess_rank = ____  # your turn: type a rank

# %% [markdown]
# On each rank, the [**flight recorder**](../assets/glossary.md#flight-recorder) of `torch.distributed` stores the
# last collective calls with their numbers. `flight_record` (folded above) reads it. The record of one rank does not
# show the fault. So compare, in one group, **what every rank called under the same number:**

# %%
# %%ranks
records = [None] * world_size
dist.all_gather_object(records, flight_record(["train"]))  # in the default group, which still works
if rank == 0:
    for r, record in enumerate(records):
        say(f"rank {r} called: {' '.join(f'{call} {number}' for _, number, call, _ in record[-3:])}")

# %% [markdown]
# ![Four ranks and the calls that each has made in this group: three have called the sixth all-reduce and wait in it,
# one has called only five](../assets/11_missing_call.svg)
#
# ### Build A: the call that was not made
#
# `calls` is a list with a dictionary `{number: call}` for each rank of one group. Find the first number at which the
# ranks differ: a rank has called nothing, or something else. A recorder forgets old calls, so the dictionaries begin at
# different numbers. Begin with the largest of these first numbers: before it, a gap may only mean "forgotten". For an
# empty dictionary take 1. `usual(made)` returns the call that most ranks made.


# %%
# %%ranks
def missing_call(calls):
    """Return (number, ranks) of the first call that not all ranks made, or None."""
    begin = ____  # the largest of the first numbers
    end = max(max(made, default=0) for made in calls)
    for number in range(begin, end + 1):
        made = ____  # what each rank called as this number; None where it called nothing
        odd = ____  # the ranks whose call is not the usual one
        if odd:
            return number, odd


checks.missing_call(missing_call, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution A</summary>
#
# ```python
# def missing_call(calls):
#     """Return (number, ranks) of the first call that not all ranks made, or None."""
#     begin = max(min(made, default=1) for made in calls)
#     end = max(max(made, default=0) for made in calls)
#     for number in range(begin, end + 1):
#         made = [of_rank.get(number) for of_rank in calls]
#         odd = [r for r, call in enumerate(made) if call != usual(made)]
#         if odd:
#             return number, odd
# ```
#
# </details>

# %% [markdown]
# Now on your own hang:

# %%
# %%ranks
found = missing_call(calls_in("train", records)) if any(records) else None
number, odd = found or (0, [])
because = f"call {number} was not made by ranks {odd}" if found else "nobody is missing"
compare("the rank at fault", "guess_rank", odd[0] if odd else "nobody", because=because)

# %% [markdown]
# Now you know the rank. On a cluster look at what it does: `py-spy dump --pid PID` on its node prints its Python stack
# (more in [first aid](../assets/handbook/11_when_it_breaks.md#first-aid)). `scripts/train.py` makes this comparison by
# itself after `--train.stall-s` seconds.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the hang</summary>
#
# Let the errors stand on the screen and ask who is at fault; most rooms point at the rank with the longest message.
# *Usual mistakes:* raising the time-out ("it needs longer"); `if rank == 0: evaluate()` with a collective inside; reading
# `state`. With NCCL the watchdog ends the process, and the record is a file; see "On the cluster".
#
# </details>

# %% [markdown]
# ## What must survive (CORE, 8 min)
#
# The next failure ends a process, and its memory is lost. So save what the next step needs: a
# [**checkpoint**](../assets/glossary.md#checkpoint). Our run is `Trainee`, a small ShakespeareGPT under FSDP with
# AdamW. Its `state` is a dictionary of this rank's shards of weights and of Adam's moments. These tensors share the
# model's memory: if you `copy_` into them, you change the model.


# %% jupyter={"source_hidden": true}
# %%ranks
def small_gpt(dropout=0.0):
    torch.manual_seed(1337)  # the same first weights on all ranks
    vocab_size = -(-len(corpus.vocab) // 12) * 12  # every dimension splits over 2, 3 and 4 ranks
    size = {"block_size": 24, "n_layer": 2, "n_head": 2, "n_embd": 48, "dropout": dropout}
    return GPT(GPTConfig(vocab_size=vocab_size, **size))


def train_step(trainee):
    """Make one step. Returns the loss of the global batch. All ranks of the trainee call it."""
    trainee.optimizer.zero_grad()
    share = get_batch(corpus.train_ids, trainee.step, global_batch, 24, trainee.rank, trainee.n, seed=1)
    loss = trainee.model(*share)[1]
    loss.backward()
    trainee.optimizer.step()
    trainee.step += 1
    mean_loss = loss.detach().double() / trainee.n
    dist.all_reduce(mean_loss, group=trainee.group)
    return mean_loss.item()


# %%
# %%ranks
class Trainee:
    """A small ShakespeareGPT, trained by the ranks of `group` with FSDP and AdamW."""

    def __init__(self, group=None, dropout=0.1, dtype=torch.float32):
        self.group, self.rank, self.n = group, dist.get_rank(group), dist.get_world_size(group)
        self.step = 0
        self.model = small_gpt(dropout).to(dtype)
        fully_shard(self.model, mesh=DeviceMesh.from_group(group or dist.group.WORLD, "cpu"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        ensure_state(self.optimizer)  # Adam's moments, before the first step
        self.parts = {name: p.detach() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            self.parts |= {f"{name}.{slot}": part for slot, part in self.optimizer.state[p].items()}
        self.state = {name: local_part(part) for name, part in self.parts.items()}
        torch.manual_seed(1000 + self.rank)  # dropout: other masks on each rank, by design


trainee = Trainee()
curve = [train_step(trainee) for _ in range(6)]
if rank == 0:
    say(f"losses {' '.join(f'{loss:.3f}' for loss in curve)}")

# %% [markdown]
# ### Build B: all that a step reads
#
# After a restart the next step must be *the same step*, bit for bit. Before you look below: what does a step read,
# besides weights?
#
# <details><summary>Answer</summary>
#
# - Adam's moments, **of every rank**.
# - The **random numbers**: they make dropout's next mask, and they differ between ranks.
# - The **step count**. Here it is the position in the data, too: batch k is drawn from (seed, k) alone. A shuffling
#   loader has more: the epoch, its order, the place in it (exercise 3).
#
# </details>
#
# `state_of` returns all of this as **tensors**. `go_on` puts it into a *fresh* trainee. `torch.get_rng_state()`
# returns the state of the random numbers (dropout draws them), and `torch.set_rng_state(t)` sets it.


# %%
# %%ranks
def state_of(trainee):
    """Return all that this rank must save: {name: tensor}."""
    return trainee.state | {"step": torch.tensor(____), "random": ____}


def go_on(trainee, state):
    """Put what `state_of` returned into a fresh trainee, so that its next step is the same step."""
    for name, part in trainee.state.items():
        ____  # in place
    trainee.step = ____  # a number, not a tensor
    torch.set_rng_state(____)


checks.trainee_state((state_of, go_on), ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def state_of(trainee):
#     """Return all that this rank must save: {name: tensor}."""
#     return trainee.state | {"step": torch.tensor(trainee.step), "random": torch.get_rng_state()}
#
#
# def go_on(trainee, state):
#     """Put what `state_of` returned into a fresh trainee, so that its next step is the same step."""
#     for name, part in trainee.state.items():
#         part.copy_(state[name])  # in place: the model looks at this memory
#     trainee.step = state["step"].item()
#     torch.set_rng_state(state["random"])
# ```
#
# </details>

# %% [markdown]
# ## Saved completely, or not at all (CORE, 9 min)
#
# A process can also die *while it writes*. Then it leaves half of a file. And there are n files, one per rank, which
# are complete at different times. But the checkpoint must appear in **one moment**, or not at all (*atomically*). So
# write all files into a folder with another name, and then *rename* the folder: a rename happens completely or not at
# all.
#
# ![Each rank writes its shard into a folder step-0006.partial; then rank 0 writes the manifest and renames the folder
# to step-0006](../assets/11_save.svg)
#
# ### Build C: one moment
#
# All ranks call `save_whole`, each with its shard's file name and bytes. When it returns, the folder `path` holds all
# shards and the [**manifest**](../assets/glossary.md#manifest), a file that lists them. Before the rename there is no
# `path`.
#
# | given | what it does |
# |---|---|
# | `write(path, content)` | writes bytes; when they are on the disk, returns `{"bytes": ..., "sha256": ...}` |
# | `sync(folder)` | returns when the names in this folder are on the disk; after a rename, sync the folder that holds `path` |
# | `gather(x)` | waits until every rank has called it, and returns every rank's x in a list |
# | `partial.rename(path)` | renames a folder |

# %% jupyter={"source_hidden": true}
# %%ranks
import hashlib
import json
import os


def write(path, content):
    """Write bytes to a file, and return only when they are on the disk: {"bytes", "sha256"} of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def sync(folder):
    """Return when the names in this folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# %%
# %%ranks
def save_whole(path, name, content, rank, gather):
    """Write all ranks' files and a manifest into the folder `path`, or no such folder. All ranks call it."""
    partial = path.with_suffix(".partial")  # a name that nobody reads
    files = dict(gather((name, ____)))  # this rank's shard goes to partial / name
    if rank == 0:
        write(____, json.dumps({"files": files}).encode())  # manifest.json
        ____  # the moment at which the checkpoint exists
        sync(____)  # from here on it exists after a power cut, too
    ____  # no rank returns before it is there


checks.save_whole(save_whole, ranks, folder=folder)

# %% [markdown] tags=["solution"]
# <details><summary>Solution C</summary>
#
# ```python
# def save_whole(path, name, content, rank, gather):
#     """Write all ranks' files and a manifest into the folder `path`, or no such folder. All ranks call it."""
#     partial = path.with_suffix(".partial")
#     files = dict(gather((name, write(partial / name, content))))  # ends when every shard is on the disk
#     if rank == 0:
#         write(partial / "manifest.json", json.dumps({"files": files}).encode())
#         partial.rename(path)  # the moment at which the checkpoint exists
#         sync(path.parent)
#     gather("it is there")
# ```
#
# </details>

# %% [markdown]
# `save` and `restore` (folded) call your functions. A checkpoint that loads can still be wrong. So test that in a new
# `Trainee` **the next losses are the same**:

# %% jupyter={"source_hidden": true}
# %%ranks
import safetensors.torch


def save(folder, trainee):
    """Save a checkpoint of all ranks of the trainee, all of it or none. All of them call it; returns its path."""
    path = folder / f"step-{trainee.step:04d}"
    if trainee.rank == 0 and path.exists():  # damaged, or we would not be here again
        path.rename(path.with_suffix(f".broken{os.urandom(4).hex()}"))

    def gather(mine):
        of_all = [None] * trainee.n
        dist.all_gather_object(of_all, mine, group=trainee.group)
        return of_all

    tensors = {name: tensor.contiguous() for name, tensor in state_of(trainee).items()}
    content = safetensors.torch.save(tensors)  # numbers and names: no pickle
    save_whole(path, f"rank-{trainee.rank}.safetensors", content, trainee.rank, gather)
    return path


def restore(path, trainee):
    """Fill the trainee from a checkpoint of as many ranks. All ranks of it call this. Raises ValueError."""
    wrote = len(json.loads((path / "manifest.json").read_text())["files"])
    if wrote != trainee.n:
        raise ValueError(f"{path.name} was saved by {wrote} ranks and here are {trainee.n}; reshard it")
    go_on(trainee, safetensors.torch.load((path / f"rank-{trainee.rank}.safetensors").read_bytes()))


trainee = Trainee()
for _ in range(6):
    train_step(trainee)

# %% tags=["nbval-check-output"]
# %%ranks
path = save(folder / "scratch", trainee)  # all ranks
went_on = [train_step(trainee) for _ in range(6)]
fresh = Trainee()
restore(path, fresh)
resumed = [train_step(fresh) for _ in range(6)]
if rank == 0:
    say(f"the next 6 losses are equal to the last bit: {resumed == went_on}")
assert resumed == went_on
metrics.exact(shard_bytes=(path / f"rank-{rank}.safetensors").stat().st_size)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the checkpoint</summary>
#
# Build B: half of the room forgets the random numbers, and some write `trainee.state = ...`, which the model does not
# notice. Build C: draw the moment of the rename on the board and ask for each line: "killed here, what is on the disk?"
# *Usual mistakes:* writing into the final name; a `latest` file that is updated before the data is there; `fsync` forgotten
# (the rename can reach the disk before the data does).
#
# </details>

# %% [markdown]
# ## Kill it (CORE, 6 min)
#
# Test the restart: kill a real process, and compare the losses. The program below trains on two ranks, and saves every
# `every` steps. When it starts, it goes on from the newest checkpoint whose files match its manifest.


# %% jupyter={"source_hidden": true}
# %%ranks
def newest(folder, trainee):
    """Return the last checkpoint in `folder` whose bytes are all as written, or None. All ranks of the trainee call it.

    Each rank reads its own share of the files; `damaged` is exercise 2.
    """
    found = [sorted(folder.glob("step-????"), reverse=True)]
    dist.broadcast_object_list(found, group=trainee.group, group_src=0)  # one list for all
    for path in found[0]:
        faults = [None] * trainee.n
        dist.all_gather_object(faults, damaged(path, trainee.rank, trainee.n), group=trainee.group)
        if not any(faults):
            return path
        if trainee.rank == 0:
            names = ", ".join(sorted(set().union(*faults)))
            say(f"{path.name} is passed over: {names} is not as it was written")


def begin_or_resume(folder, group):
    """Return a trainee, filled from the newest checkpoint if there is one. All ranks of the group call it."""
    trainee = Trainee(group)
    path = newest(folder, trainee)
    if path is not None:
        restore(path, trainee)
    trainee.processes = [None] * trainee.n
    dist.all_gather_object(trainee.processes, os.getpid(), group=group)
    return trainee


def note(folder, trainee, loss):
    """Append the loss to losses.jsonl: {"step", "loss", "processes"}."""
    if trainee.rank == 0:
        with open(folder / "losses.jsonl", "a") as file:
            file.write(json.dumps({"step": trainee.step, "loss": loss, "processes": trainee.processes}) + "\n")


def ask_to_requeue(folder, trainee):
    """Say in a file that the run was not done: a launcher turns every exit status into one of its own."""
    if trainee.rank == 0:
        (folder / "requeue.json").write_text(json.dumps({"step": trainee.step}))


def heard_so_far(folder):
    """Return the lines of losses.jsonl: [{"step", "loss", "processes"}]."""
    file = folder / "losses.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


PROGRAM = """
import hashlib, json, os, signal, sys, time, warnings
from pathlib import Path
import safetensors.torch, torch
import torch.distributed as dist
from manyhands import join, leave, say
from manyhands.course.catch_up import bring
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.measure.tensor_bytes import local_part
from manyhands.parallel.optimizer import ensure_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

ranks = join(name="11_when_it_breaks", device="cpu")
corpus, told, global_batch = load_corpus(ranks), [], 24
signal.signal(signal.SIGTERM, lambda *_: told.append("SIGTERM"))
bring(globals(), "11_when_it_breaks", "train")
train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), told, pace_s=0.1)
leave()
"""

# %%
# %%ranks
import hashlib
import json
import os
import time

import safetensors.torch


def train(folder, until, every, told=(), pace_s=0.0, group=None):
    """Train to step `until`. `told` fills when a signal asks this rank to leave. All ranks call it."""
    trainee = begin_or_resume(folder, group)
    while trainee.step < until:
        note(folder, trainee, train_step(trainee))
        stop = torch.tensor(len(told))
        dist.all_reduce(stop, group=group)  # if a signal asked any rank to leave, all hear of it
        if stop or trainee.step % every == 0:
            save(folder, trainee)
        if stop:
            return ask_to_requeue(folder, trainee)
        time.sleep(pace_s)  # so that somebody can watch


# %% [markdown]
# Choose the rank to kill. Its process gets signal 9, which no process can catch. torchrun runs with `--max-restarts
# 1`.
#
# **Predict.** One of the two processes dies. How many new processes does torchrun start?

# %%
# %%ranks
victim = ____  # your turn: 0 or 1
guess_started = ____  # your turn: type a number

# %% jupyter={"source_hidden": true}
# %%ranks --timeout 600
import shutil
import signal
from datetime import timedelta

from manyhands.launch.processes import Torchrun

n_children, every, where = min(2, world_size), max(2, steps // 4), folder / "killed"
if rank == 0:
    for name in ("undisturbed", "killed"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    (where / "program.py").write_text(PROGRAM)
dist.barrier()
if rank < n_children:  # first the run that nobody interrupts
    train(folder / "undisturbed", steps, every, group=group_of[n_children])
dist.barrier()
given = (where / "program.py", where, steps, every)
setting = {"n_ranks": n_children, "log": where / "torchrun.txt", "timeout_s": 280}
patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=600))  # both of rank 0's torchruns may take long
chosen = [victim if victim in range(n_children) else n_children - 1]
dist.broadcast_object_list(chosen)
last = now = {"processes": []}
if rank == 0 and failures != "none":
    with Torchrun(*given, restarts=1, **setting) as child:
        child.until(lambda: any(line["step"] >= every + 2 for line in heard_so_far(where)))
        last = heard_so_far(where)[-1]
        os.kill(last["processes"][chosen[0]], signal.SIGKILL)
        say(f"rank {chosen[0]}, process {last['processes'][chosen[0]]}, was killed after step {last['step']}")
        child.until(lambda: heard_so_far(where)[-1]["processes"] != last["processes"])
        now = next(line for line in heard_so_far(where) if line["processes"] != last["processes"])
        say(f"torchrun started again, and training went on with step {now['step']}")
        if failures == "two":
            child.until(lambda: heard_so_far(where)[-1]["step"] >= 2 * every + 1)
            child.signal(signal.SIGTERM)  # what a scheduler sends first when it wants the node back
        status = child.wait()
        say(f"torchrun ended with status {status}; requeue.json: {(where / 'requeue.json').exists()}")
if rank == 0 and (where / "requeue.json").exists():
    asked = json.loads((where / "requeue.json").read_text())
    (where / "requeue.json").unlink()  # this start is the answer to it
    with Torchrun(*given, **setting) as child:
        status = child.wait()
    say(f"stopped and saved after step {asked['step']}, started again, ended with status {status}")
dist.barrier(patient)

# %%
# %%ranks
if now["processes"]:
    started = [process for process in now["processes"] if process not in last["processes"]]
    compare("processes that torchrun started", "guess_started", len(started), because=f"processes {started}")

# %% [markdown]
# torchrun ends the other rank and starts **all** again. So all ranks lose the steps since the last checkpoint. Later
# the cell sent the signal SIGTERM, as a scheduler does in a [pre-emption](../assets/glossary.md#pre-emption). All
# ranks finished their step, saved, wrote `requeue.json`, and ended. Then the run was started a third time.
#
# ![A run in three parts: it saves every 6 steps, is killed after step 8, goes on from step 6, stops and saves after
# step 14, and goes on](../assets/11_restart.svg)
#
# The grey line below is a run without a failure. On it lie the three parts of the killed run. The lower panel is the
# difference of the two runs. It should be exactly zero.

# %% jupyter={"source_hidden": true}
# %%ranks
lines = heard_so_far(where) if rank == 0 else []
undisturbed = {line["step"]: line["loss"] for line in heard_so_far(folder / "undisturbed")}
processes = list(dict.fromkeys(tuple(line["processes"]) for line in lines))  # of each life
lives = [{line["step"]: line["loss"] for line in lines if tuple(line["processes"]) == life} for life in processes]
if lives:
    from manyhands.lessons import when_it_breaks as lesson

    figure = lesson.draw_killed_and_resumed(undisturbed, lives, f"killed and resumed, {n_children} ranks")
    show(figure, "killed_run", "the losses of all lives lie on the undisturbed curve; the residual is zero")
    differing = [line["step"] for line in lines if line["loss"] != undisturbed[line["step"]]]
    repeated = len(lines) - len({line["step"] for line in lines})
    say(f"{len(lines)} losses of {len(lives)} {'lives' if len(lives) > 1 else 'life'}, {repeated} of them repeated")
    say(f"different from the undisturbed run: {len(differing)}")
    assert not differing and {line["step"] for line in lines} == set(undisturbed)
metrics.exact(undisturbed=undisturbed if rank == 0 else None)

# %% [markdown]
# On GPUs the difference may not be zero: some kernels add in an order that changes from run to run
# ([handbook](../assets/handbook/11_when_it_breaks.md#what-changes-on-gpus)).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the kill</summary>
#
# Let them type the kill themselves in a terminal if there is time: `failures` "none", `pace_s=1` in `PROGRAM`, then
# `python -m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1 program.py . 24 6` in the folder
# `killed` of this run, and `kill -9` one of the processes of `losses.jsonl`. The program takes the lesson's functions from its
# saved script, solutions first. *Usual mistake:* believing that torchrun restarts the dead rank only. *Ask:* "what happens at
# the second kill?" (`--max-restarts 1` is used up: torchrun gives up, and the job script's turn has come.)
#
# </details>

# %% [markdown]
# ## How often to save (CORE, 4 min)
#
# If you save too often, saving takes too much time. If you save too rarely, each failure costs hours. One save takes C
# seconds. The mean time between failures, the [**MTBF**](../assets/glossary.md#mtbf), is M seconds. If you save every
# τ seconds, saving takes C/τ of the time. A failure loses τ/2 seconds on average: τ/(2M) of the time. (R seconds to
# restart cost R/M, for any τ.) The sum C/τ + τ/(2M) is smallest at τ = √(2·C·M) (Young 1974).
#
# Llama 3's [report](https://arxiv.org/abs/2407.21783) (section 3.3.4) counts 419 unexpected interruptions in 54 days on
# 16,384 GPUs: M is 3.1 hours. On n GPUs of the same kind M is 16,384/n times as long.
#
# **Predict.** You have 64 such GPUs, and a save takes a minute. How many minutes lie between two saves?

# %%
# %%ranks
guess_minutes = ____  # your turn: type minutes


# %%
# %%ranks
def best_interval(save_s, mtbf_s):
    return (2 * save_s * mtbf_s) ** 0.5


def lost_share(interval_s, save_s, mtbf_s, restart_s=0):
    return save_s / interval_s + interval_s / (2 * mtbf_s) + restart_s / mtbf_s


mtbf_s, save_s, restart_s = 54 * 24 * 3600 / 419, 60, 600  # of Llama 3's run; C and R are our assumption
compare("minutes between saves on 64 GPUs", "guess_minutes", round(best_interval(60, mtbf_s * 16384 / 64) / 60), "min")

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.lessons import when_it_breaks as lesson

if rank == 0:
    for gpus in (64, 1024, 16384):
        mtbf_of_n_s = mtbf_s * 16384 / gpus
        best_s = best_interval(save_s, mtbf_of_n_s)
        lost = [100 * lost_share(best_s, save_s, mtbf_of_n_s, restart) for restart in (0, restart_s)]
        say(
            f"{gpus:6,} GPUs: a failure every {mtbf_of_n_s / 3600:5.1f} h, save every {best_s / 60:3.0f} min: "
            f"{lost[0]:.1f} % lost, {lost[1]:.1f} % with restarts of 10 min"
        )
    figure = lesson.draw_failures(recorded_runs.published("11_failures"), lambda M_s: best_interval(save_s, M_s))
    show(figure, "failures", "hours between failures against the number of GPUs, and the interval between saves")

# %% [markdown]
# On 64 GPUs that is 33 days between failures, and a save every five hours. The points are real machines: Llama 3's (the
# line is computed from this one point), and [research clusters of A100](https://arxiv.org/abs/2410.21680) (hollow
# points are projections). On 1,024 GPUs these clusters measured 7.9 hours, a sixth of the 49.5 hours computed from
# Llama 3's M. So take M from your own logs. An estimate is enough: near the best τ the lost share hardly changes.

# %% [markdown]
# ## A bug from the zoo (CORE, 5 min)
#
# This trainer comes from another workshop and uses a sharded optimizer. It saves the whole weights, the optimizer,
# the step and the random numbers. It prints "saved", and it resumes without an error. **What is wrong, and which
# number shows it?**

# %%
# %%ranks
import hashlib
import json
import os

import safetensors.torch


def save_as_always(path, trainee):
    whole = {f"whole {name}": p.full_tensor().clone() for name, p in trainee.model.named_parameters()}  # all ranks
    if trainee.rank == 0:
        write(path, safetensors.torch.save(state_of(trainee) | whole))
        say("saved")


# %% jupyter={"source_hidden": true}
# %%ranks
def resume_as_always(path, trainee):
    saved = safetensors.torch.load(path.read_bytes())
    go_on(trainee, saved)
    for name, p in trainee.model.named_parameters():
        local_part(p.detach()).copy_(saved[f"whole {name}"].chunk(trainee.n)[trainee.rank])


owners = group_of[max(group_of)]  # up to four ranks
if rank < max(group_of):
    trainee, file = Trainee(owners), folder / "zoo" / "checkpoint.safetensors"
    for _ in range(8):
        train_step(trainee)
    save_as_always(file, trainee)
    dist.barrier(owners)
    mended = save(folder / "zoo" / "mended", trainee)
    went_on, resumed = [train_step(trainee) for _ in range(6)], Trainee(owners)
    resume_as_always(file, resumed)
    after = [train_step(resumed) for _ in range(6)]
    if rank == 0:
        P = sum(p.numel() for p in trainee.model.parameters())
        say(f"P = {P:,} parameters; the file has {file.stat().st_size:,} bytes")
        for name, curve in {"went on": went_on, "resumed": after}.items():
            say(f"{name} {' '.join(f'{loss:.3f}' for loss in curve)}")

# %% [markdown]
# <details><summary>What is wrong?</summary>
#
# Weights and two moments in float32 are 12·P bytes, and the file has fewer. `if rank == 0` stands around the save.
# The weights are whole, so samples look fine. But Adam's moments are sharded: rank 0 saved *its* shard, and after a
# resume every rank takes that for its own. There is no error, because the shapes fit. Without the correct losses next
# to them you would believe these losses. The cure: **all ranks save.**
#
# Hugging Face's `Trainer` saved only rank 0's optimizer state under FSDP:
# [transformers#23034](https://github.com/huggingface/transformers/issues/23034), mended in
# [#23111](https://github.com/huggingface/transformers/pull/23111).
#
# </details>
#
# The same trainee, saved by all ranks (beside the 12·P bytes there are names and random numbers):

# %% jupyter={"source_hidden": true}
# %%ranks
if rank == 0:
    total = sum(shard.stat().st_size for shard in mended.glob("rank-*"))
    say(f"all ranks save: {total:,} bytes; 12 P = {12 * P:,}")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# Ask for the bytes *before* the cell that measures. Then: "how large is your last
# checkpoint, and how large should it be?" People look it up, and now and then somebody goes pale.
#
# </details>

# %% [markdown]
# ## A straggler: who is slow, and who only waits (MORE, 4 min)
#
# **Why.** Nothing hangs, and the job takes one and a half times as long as last week. One GPU of a thousand is hot and has
# lowered its clock. It is a [**straggler**](../assets/glossary.md#straggler).
#
# ![Four ranks compute and then average: rank 2 computes longer, the three others wait, and the step lasts as long on all
# four](../assets/11_straggler.svg)
#
# **Predict.** One rank becomes twice as slow in computing, and computing is 9/10 of a step. By how much does the job slow
# down? On which ranks do you see it in the time per step, and on which in the time spent waiting?
#
# <details><summary>Answer</summary>
#
# A step takes 1.9 times as long: it waits for the slowest rank. The time per step is the same on *all* ranks, so it names
# nobody. Waiting shows the reverse: all wait, except the straggler.
#
# </details>
#
# On the **virtual network** (real messages, computed time, so that it repeats exactly) one rank is slow in steps 4 to 7:

# %%
# %%ranks
from manyhands.lessons import when_it_breaks as lesson
from manyhands.measure.virtual_network import Link, VirtualNetwork

network = VirtualNetwork(
    ranks,
    inside=Link(latency_s=10e-6, bytes_per_s=1.6e9),  # the all-reduce takes 1 ms: computing is 9/10
    slowdown=lambda r, step: 2.0 if r == guilty and 4 <= step < 8 else 1.0,
)
for step in range(12):
    with network.step(step):
        network.compute(9e-3, "forward and backward")
        network.all_reduce(torch.ones(250_000))  # 1 MB of gradients
steps_s = network.gather_steps()  # on rank 0: lists of [ranks][steps]

# %%
# %%ranks
if rank == 0:
    titles = {"total": "the whole step", "compute": "computing", "waiting": "waiting"}
    figure = lesson.draw_heat_maps({title: steps_s[kind] for kind, title in titles.items()}, "s", virtual=True)
    alt = "virtual time of each step: the whole is alike on all ranks, computing names the slow one, waiting the others"
    show(figure, "straggler", alt)
    took_s = steps_s["total"][0]
    say(f"a slow step takes {took_s[5] / took_s[0]:.2f} times as long as a usual one")
metrics.exact(straggler=steps_s if rank == 0 else None)

# %% [markdown]
# The first map shows *when*, the second *who*. The third is what you get if you only look at collectives: there the rank with
# the **least** waiting is the one to look at.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: stragglers</summary>
#
# *Ask:* "you have the three maps for 1,000 ranks; which one do you open first?" (Compute, and sort the rows.) *Usual
# mistake:* averaging the step time over ranks, which is the same number a thousand times.
#
# </details>

# %% [markdown]
# ### The same with real clocks (MORE, 3 min)
#
# Real ranks, real seconds: one rank's "data loader" needs 20 ms more in steps 4 to 7 (a `sleep`). One clock measures
# the time before the collective, the other the time inside it. Note the barrier before the loop: without a common
# start each clock would also measure what came before.


# %%
# %%ranks
import time


def timed_steps(num_steps):
    """Seconds before and inside the all-reduce of each step: two lists. All ranks call it."""
    before_s, inside_s = [], []
    dist.barrier()
    for step in range(num_steps):
        begin = time.perf_counter()
        if rank == guilty and 4 <= step < 8:
            time.sleep(0.02)
        gradient = torch.randn(120, 120) @ torch.randn(120, 120)
        called = time.perf_counter()
        dist.all_reduce(gradient)
        before_s.append(called - begin)
        inside_s.append(time.perf_counter() - called)
    return before_s, inside_s


# %%
# %%ranks
gathered = [None] * world_size
dist.all_gather_object(gathered, timed_steps(12))
if rank == 0:
    before_s, inside_s = ([clocks[i] for clocks in gathered] for i in (0, 1))
    figure = lesson.draw_heat_maps({"before the all-reduce": before_s, "inside the all-reduce": inside_s}, "s")
    show(
        figure,
        "real_straggler",
        "real seconds before and inside the all-reduce: one rank is slow, the others wait",
    )
    late_ms = [1e3 * sorted(own[4:8])[1] for own in before_s]
    say(
        f"rank {late_ms.index(max(late_ms))} is the slowest: {max(late_ms):.0f} ms before the all-reduce of a slow step"
    )

# %% [markdown]
# A clock *inside* the all-reduce sees waiting and sending together, so it is never quite zero. With fewer cores than
# ranks, a single dark cell may show only that its rank had to wait for a core: look at whole rows.

# %% [markdown]
# ### Who is late, before the time-out? (MORE, 2 min)
#
# One rank does not come to an all-reduce, and after `wait_s` seconds the others give up. `--trace` draws below the cell what
# each rank did until then.
#
# **Predict.** What does the row of the missing rank show, and what do the others' rows?

# %%
# %%ranks --trace --timeout 120
from datetime import timedelta

from manyhands.launch.program import say_how_it_ended

dist.barrier()  # to make a group takes no longer than its time-out
impatient = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))  # all ranks call this one
if rank != guilty:
    say_how_it_ended(lambda: dist.all_reduce(torch.ones(1), group=impatient))
else:
    time.sleep(wait_s)

# %% [markdown]
# <details><summary>Answer</summary>
#
# The others' rows name the rank that they wait for. Its own row shows no waiting: it computes, or sleeps, as if nothing were
# wrong. The error message of a time-out names no rank; the trace does.
#
# </details>

# %% [markdown]
# ## NaN: which rank, and in which step (MORE, 6 min)
#
# **Why.** NaN plus anything is NaN. One rank that makes one NaN gives it to all in the next all-reduce. By the time
# somebody looks, all ranks look guilty.
#
# ![One rank's gradient holds NaN; the all-reduce adds it into the sum, and all ranks receive NaN](../assets/11_nan.svg)
#
# A first NaN comes from a mean over nothing, from an overflow, or from hardware: **one bit that flips**. Let us flip one, in the
# exponent:


# %% tags=["nbval-check-output"]
# %%ranks
def flip_bit(tensor, index, bit=30):
    """Flip one bit of one number of a float32 tensor, in place."""
    bits = tensor.detach().view(-1).view(torch.int32)
    bits[index] ^= 1 << bit


weight = torch.tensor([0.0173])
flip_bit(weight, 0)
say(f"0.0173 with bit 30 flipped: {weight.item():.2e}")

# %% [markdown]
# In the run below, this bit flips in one weight of one rank, before step 3. DDP and FSDP average *inside*
# `backward()`. So afterwards no rank has its own gradient any more. You can still look at three things:
#
# 1. the **own loss**, before backward: one flag per rank;
# 2. under DDP a **comm hook**, which DDP calls with each bucket of gradients before they are averaged;
# 3. a **replay**: every rank computes the step again, alone, and looks at its own gradients.
#
# Keep the flags on the GPU: each `.item()` would stop and wait for it.


# %%
# %%ranks
import copy

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP


def share_of(step):
    """Return this rank's share of global batch `step`."""
    return get_batch(corpus.train_ids, step, global_batch, 24, rank, world_size, seed=1)


def gradients(model, step):
    """Return this rank's own gradients of its share of global batch `step`."""
    model.zero_grad()
    model(*share_of(step))[1].backward()
    return [p.grad for p in model.parameters()]


def who_is_not_finite(tensors):
    """Return the ranks whose tensors hold NaN or infinity. All ranks call it."""
    fine = [None] * world_size
    mine = torch.stack([tensor.isfinite().all() for tensor in tensors]).all()
    dist.all_gather_object(fine, mine.item())  # the GPU is waited for once
    return [r for r in range(world_size) if not fine[r]]


def look_and_average(seen, bucket):
    """A comm hook: keep the largest gradient of the bucket, which NaN and infinity survive, then average."""
    seen.append(bucket.buffer().abs().max())
    return allreduce_hook(None, bucket)


# %% tags=["nbval-check-output"]
# %%ranks
model, seen = DDP(small_gpt()), []
model.register_comm_hook(seen, look_and_average)
for step in range(4):
    if rank == guilty and step == 3:
        flip_bit(model.module.blocks[1].mlp.up.weight, 100)
    seen.clear()
    model.zero_grad()
    loss = model(*share_of(step))[1]
    by_loss = who_is_not_finite([loss])
    loss.backward()
    by_hook, after = who_is_not_finite(seen), who_is_not_finite([p.grad for p in model.parameters()])
    if after:
        break  # no update: the weights are still those of this step
    for p in model.parameters():
        p.data -= 0.1 * p.grad
by_replay = who_is_not_finite(gradients(copy.deepcopy(model.module), step))
if rank == 0:
    say(f"step {step}, not finite on ranks: own loss {by_loss}, in the hook {by_hook}, after backward {after}")
    say(f"replayed alone: {by_replay}")

# %% [markdown]
# FSDP's place for such a look is `set_custom_reduce_scatter`: what you give it gets each rank's own gradients before
# they are summed. But a bad weight reaches all ranks when its shard is gathered. So look at each rank's shards, too,
# and replay from the last checkpoint. A replay finds a fault that repeats. A bit that
# flipped once does not repeat; then compare replicas (exercise 4).
#
# Never skip NaN on one rank alone: without its all-reduce the others hang, without its update the replicas diverge. Skip
# the step on **all** ranks, or stop before such weights are saved.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: NaN</summary>
#
# *Ask:* "a colleague sets NaN gradients to zero on each rank and trains on. What is wrong?" (It works, and hides a broken GPU
# for weeks.) *Usual mistake:* testing the loss after it was averaged.
#
# </details>

# %% [markdown]
# ### Which layer? (MORE, 3 min)
#
# On that rank, a *forward hook* on each module says whose output is the first that is not finite. (For backward there is
# `torch.autograd.set_detect_anomaly(True)`: it names the operation, and slows every step.)


# %%
# %%ranks
import functools


def first_not_finite(model, *inputs):
    """The name of the module whose output is the first one that holds NaN or infinity, or None."""
    found = []

    def look(name, module, given, output):
        if torch.is_tensor(output) and not output.isfinite().all():
            found.append(name)

    handles = [m.register_forward_hook(functools.partial(look, name)) for name, m in model.named_modules()]
    model(*inputs)
    for handle in handles:
        handle.remove()
    return found[0] if found else None


# %%
# %%ranks
model = small_gpt()
if rank == guilty:
    flip_bit(model.blocks[1].mlp.up.weight, 100)
batch = get_batch(corpus.train_ids, 3, global_batch, 24, rank, world_size, seed=1)
where, largest = (
    first_not_finite(model, *batch),
    max(model.named_parameters(), key=lambda p: p[1].abs().max()),
)
if where:
    say(f"the first output that is not finite is that of {where!r}")
    say(f"the largest weight, {largest[1].abs().max().item():.1e}, is in {largest[0]!r}")

# %% [markdown]
# `norm` is the model's last LayerNorm, and it is not at fault. The layer with the huge weight still has a finite
# output, of about 10³⁶. A *later* operation overflows: the LayerNorm, which squares its input. So from the place
# where NaN appears go back towards the input, until you find a number that is too large.

# %% [markdown]
# ## Out of memory, read aloud (MORE, 3 min)
#
# **Why.** It is the error that everybody meets, and its message names a number of bytes. A large number tells you
# which tensor it was. **Predict** it for the logits of a batch of 24 million sequences of 2,048 tokens and a
# vocabulary of 50,280 in float32.
#
# <details><summary>Answer</summary>
#
# 24·10⁶ · 2,048 · 50,280 · 4 bytes = 9.9·10¹⁵, ten petabytes. No machine has them, so the request below is harmless.
#
# </details>

# %%
# %%ranks
B, T, V = 24_000_000, 2048, 50_280
try:
    torch.empty(B, T, V, device=device)
except RuntimeError as error:  # torch.OutOfMemoryError, on a GPU, is one
    if rank == 0:
        say(str(error).split("DefaultCPUAllocator: ")[-1].split("\n")[0])
        say(f"predicted: {B * T * V * 4} bytes, {B * T * V * 4 / 2**50:.2f} PiB")

# %% [markdown]
# So read the number first. If it is large, look for the shape that makes it: the logits, or T·T scores where flash
# attention was not used. If it is small, such as the 20 MiB of many messages, it is only the last straw: look at what is
# allocated already. On a GPU the message goes on; the [handbook](../assets/handbook/11_when_it_breaks.md#out-of-memory)
# says what to do about each of its numbers.
#
# **The other kind** has no message. When the *host* runs out of memory, Linux ends a process with signal 9, and no
# exception is raised. torchrun reports exit code -9, a shell or a container 137 (128 + 9), and the other ranks say
# "connection closed by peer". Under Slurm look for `oom_kill` in the job's output, and for `OUT_OF_MEMORY` in
# `sacct`.

# %% [markdown]
# ## The library's way: DCP, and a different number of ranks (MORE, 4 min)
#
# **Why.** Tomorrow you get three nodes instead of four, but our checkpoint fits only the number of ranks that wrote
# it. [**Resharding**](../assets/glossary.md#resharding) means to read it cut in another way.
#
# ![One row of numbers, cut for four ranks, for two and for three; each reader takes the pieces that overlap with its own
# part](../assets/11_reshard.svg)
#
# `torch.distributed.checkpoint`, **DCP**, saves with each piece which part of which tensor it is. It learns that from
# a [**DTensor**](../assets/glossary.md#dtensor): a global shape, and this rank's part of it. Under FSDP the weights
# and Adam's moments are DTensors already. They are in `trainee.parts`, and loading fills them in place.

# %%
# %%ranks
import torch.distributed.checkpoint as dcp


def new_trainee(n):
    """Return one of the first n ranks, in float64 and without dropout, so that another n computes the same."""
    return Trainee(group_of[n], dropout=0.0, dtype=torch.float64)


def whole(trainee):
    """Return all weights and moments, not cut. All ranks of the trainee call it."""
    return {name: part.full_tensor() for name, part in trainee.parts.items() if hasattr(part, "full_tensor")}


# %% [markdown]
# Four ranks train four steps and save. Two ranks load this checkpoint and save it again. Three ranks load this second
# one.

# %%
# %%ranks
sizes = [[1, 1], [2, 1], [3, 2], [4, 2, 3]][min(world_size, 4) - 1]
dcp_of = [folder / f"dcp {i}, saved by {n}" for i, n in enumerate(sizes)]
if rank < sizes[0]:  # the group's own ranks only
    first = new_trainee(sizes[0])
    for _ in range(4):
        train_step(first)
    dcp.save(first.parts, checkpoint_id=dcp_of[0], process_group=first.group)
    wanted = whole(first)
dist.barrier()
for i, n in enumerate(sizes[1:]):
    if rank < n:
        trainee = new_trainee(n)
        for part in trainee.state.values():
            part.fill_(-1)  # so that it cannot be right by chance
        dcp.load(trainee.parts, checkpoint_id=dcp_of[i], process_group=trainee.group)
        dcp.save(trainee.parts, checkpoint_id=dcp_of[i + 1], process_group=trainee.group)
    dist.barrier()

# %% [markdown]
# Do three ranks now hold what four held, the weights *and* Adam's moments?

# %%
# %%ranks
if rank < sizes[-1]:
    found = whole(trainee)
    equal = [torch.equal(found[name], wanted[name]) for name in wanted]
    if rank == 0:
        say(f"{' -> '.join(map(str, sizes))} ranks: {len(equal)} tensors equal to the last bit: {all(equal)}")
    assert all(equal)

# %% [markdown]
# Two warnings. DCP's `.metadata` is a pickle, and its reader runs what is in it: load only what you trust. And a
# shard in which a byte has flipped loads without an error. `scripts/train.py` puts what you have just built around
# DCP.

# %% [markdown]
# ### And training goes on (MORE, 2 min)
#
# **Predict.** The last group trains on from what it has loaded, and the first as if nothing had happened. How far apart are
# their losses?
#
# <details><summary>Answer</summary>
#
# Not zero: three ranks add their gradients in a different order from four, and float64 rounds at 10⁻¹⁶. "Bit for bit" holds
# **on the same number of ranks**.
#
# </details>

# %%
# %%ranks
if rank < sizes[0]:
    reference = [train_step(first) for _ in range(8)]
if rank < sizes[-1]:
    trainee.step = 4
    losses = [train_step(trainee) for _ in range(8)]
    apart = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
    assert apart < 1e-10, f"the losses differ by {apart:.1e}"
    if rank == 0:
        say(f"the next 8 losses on {sizes[0]} and on {sizes[-1]} ranks differ by {apart:.0e} at most")
metrics.exact(float64_losses=reference if rank < sizes[0] else None)
metrics.close(float64_losses_close=reference if rank < sizes[0] else None)

# %% [markdown]
# ### Save while training goes on (MORE, 4 min)
#
# `dcp.async_save` copies the tensors into the CPU's memory and returns; a thread writes them. Training stands still
# for the copy only. It needs a process group that works on the CPU: it refuses a group of
# `init_process_group("nccl")`, and accepts one of `cpu:gloo,cuda:nccl`, which `join()` makes.
#
# **Predict.** Each rank saves 8 MiB. At about 2 GB/s for a copy in memory, how long does training stand still? And which
# part of a plain save is not the copy?
#
# <details><summary>Answer</summary>
#
# 8.4 MB at 2 GB/s are about 4 ms. A plain save also plans (messages between the ranks), writes and syncs, all of
# which the thread takes over. But the thread is not free: on a laptop it works on the same cores as the next steps.
#
# </details>

# %%
# %%ranks --timeout 120
import time

import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

savers = group_of[max(group_of)]  # up to four ranks
stands_s = {"copy": [], "async_save": [], "save": []}
if rank < max(group_of):
    mine_p = torch.randn(state_mib * 2**18)  # 4 bytes each
    state = {"row": DTensor.from_local(mine_p, DeviceMesh.from_group(savers, "cpu"), [Shard(0)], run_check=False)}
    calls = {"copy": lambda *_, **__: mine_p.clone(), "async_save": dcp.async_save, "save": dcp.save}
    for turn in range(repeats + 1):  # they take turns; the first round warms up
        for kind, call in calls.items():
            dist.barrier(savers)
            begin = time.perf_counter()
            future = call(state, checkpoint_id=folder / "timed" / f"{kind} {turn}", process_group=savers)
            stands_s[kind] += [time.perf_counter() - begin] if turn else []  # from here on training would go on
            if kind == "async_save":
                future.result()  # before the next save, and before the end

# %%
# %%ranks
if rank == 0:
    for kind, samples in stands_s.items():
        ms = sorted(1e3 * s for s in samples)
        say(f"{kind:10} stands still for {ms[len(ms) // 2]:5.1f} ms ({ms[0]:.1f} to {ms[-1]:.1f})")
    gained = sorted(slow / fast for slow, fast in zip(stands_s["save"], stands_s["async_save"], strict=True))
    times = f"{gained[len(gained) // 2]:.1f} ({gained[0]:.1f} to {gained[-1]:.1f})"
    say(f"a plain save stands still {times} times as long as async_save")
metrics.measured(stands_ms={kind: [1e3 * s for s in samples] for kind, samples in stands_s.items()})

# %% [markdown]
# `async_save` takes longer than the copy: it also allocates memory, starts the thread and sends a few messages.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: DCP</summary>
#
# *Say:* an asynchronous save makes the best interval between saves shorter, because C gets smaller. *Usual mistake:*
# changing the weights between `async_save` and its staging with a zero-copy stager; forgetting that the last one must be
# waited for.
#
# </details>

# %% [markdown]
# ## A node dies (MORE, 3 min)
#
# torchrun restarts processes. It cannot restart a node. When one of two nodes loses power, the ranks of the other wait
# for it until the time-out. Have ready: a job that may be queued again, checkpoints in a folder that all nodes see, and a
# script that resumes without being told. How to keep a spare node, so that you need not queue again, and what Slurm and
# PBS do, is in [the handbook](../assets/handbook/11_when_it_breaks.md#a-node-dies).
#
# ![A signal reaches the job script two minutes before the end; the ranks finish their step, save, write requeue.json and leave; the
# job script puts the job back into the queue; what still lives at the end is killed](../assets/11_preemption.svg)
#
# A *sick* node (it is slow, or its bits flip) stays in use: the scheduler gives it to the next job. You have found
# the rank; now name its node:

# %%
# %%ranks
import socket

hosts = [None] * world_size
dist.all_gather_object(hosts, socket.gethostname())  # a job prints this at its start, while all nodes live
if rank == 0:
    say(f"rank {guilty} runs on {hosts[guilty]}: sbatch --exclude={hosts[guilty]} keeps the next job away from it")

# %% [markdown]
# ## How often to save: is it so? (MORE, 4 min)
#
# Let failures come at random, and count the lost time; after each failure ten minutes pass until training runs again.
# Each length of the interval is tried 4,000 times; the ranks share these trials, each with its own seed.

# %%
# %%ranks
import random


def simulate(interval_s, save_s, mtbf_s, restart_s, num_intervals, luck):
    """Seconds that `num_intervals` intervals of work take, each repeated until no failure strikes it."""
    took_s = 0.0
    for _ in range(num_intervals):
        while (failure_s := luck.expovariate(1 / mtbf_s)) < interval_s + save_s:
            took_s += failure_s + restart_s  # all of this was in vain
        took_s += interval_s + save_s
    return took_s


luck, share = random.Random(rank), 4000 // world_size
mtbf_s, save_s, restart_s = 54 * 24 * 3600 / 419, 60, 600
best_s = best_interval(save_s, mtbf_s)
intervals_s = [60 * minutes for minutes in (3, 5, 8, 12, 19, 30, 48, 75, 120)]
took_s = torch.tensor([simulate(i, save_s, mtbf_s, restart_s, share, luck) for i in intervals_s], dtype=torch.float64)
dist.all_reduce(took_s)  # all ranks
work_s = torch.tensor(intervals_s, dtype=torch.float64) * share * world_size
lost = (1 - work_s / took_s).tolist()

# %%
# %%ranks
import math

from manyhands.plots.looks import INK, LIMIT, MEASURED, PREDICTED
from matplotlib.figure import Figure

if rank == 0:
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    formula = [lost_share(i, save_s, mtbf_s, restart_s) for i in intervals_s]
    whole = [1 - i / ((mtbf_s + restart_s) * math.expm1((i + save_s) / mtbf_s)) for i in intervals_s]
    minutes = [i / 60 for i in intervals_s]
    axes.plot(minutes, [100 * f for f in formula], **PREDICTED, label="C/τ + τ/(2M) + R/M")
    axes.plot(minutes, [100 * w for w in whole], color=INK, lw=1, label="exact, for random failures")
    axes.plot(minutes, [100 * share for share in lost], **MEASURED, ls="none", label="simulated")
    axes.axvline(best_s / 60, **LIMIT, label=f"√(2CM) = {best_s / 60:.0f} min")
    axes.set(xscale="log", xlabel="minutes between saves", ylabel="lost, % of the time", ylim=0)
    axes.set_xticks(minutes, [f"{m:.0f}" for m in minutes])
    axes.legend()
    alt = "the lost share falls, has its floor at about 19 minutes, and rises again; simulated points on the curve"
    show(figure, "interval", alt)
    worst = max(abs(a - b) for a, b in zip(lost, whole, strict=True))
    say(f"simulated against exact: at most {100 * worst:.1f} points off")
    for i in (0, 4, 8):
        say(f"{minutes[i]:3.0f} min: formula {100 * formula[i]:.1f} %, exact {100 * whole[i]:.1f} % lost")
metrics.exact(lost=lost)

# %% [markdown]
# **The residual.** The formula predicts too much loss everywhere. With short intervals, the reason is that a save takes
# C of every τ + C, not of every τ. With long ones, a failure loses less than half of an interval on average: the first
# failure ends the interval, and it comes more often in the first half. And M is the time between failures *while
# training runs*; a restart adds R to it. (Daly 2006 has the next terms.)

# %% [markdown]
# ## Exercises (MORE, 28 min)

# %% jupyter={"source_hidden": true}
# %%ranks
import hashlib
import json
import os

import safetensors.torch

# %% [markdown]
# ### Exercise 1: three hangs, find the culprit
#
# With several groups, a rank that is missing in one may itself be waiting in another. Three hangs were recorded on four
# ranks, each with a different mistake. You get `records`, for each rank a list of `(group, number, call, length)`, and
# `members`, the ranks of each group. Write `culprit(records, members)`, which returns `(rank, group, number)`: who did not
# make which call.
#
# **In these hangs the culprit is missing somewhere and waits nowhere.** (In CORE's hang it does wait, in the group
# `valid`: there this rule names nobody.) It may be missing in two groups, x and y. Then return its *first* fault. How
# to tell: is a rank that waits for it in x also missing in y? Then y hangs only because of x, and x came first. (In
# each of these hangs exactly one rank is at fault.)
#
# `missing_call` solves hangs 0 and 1, which have one group. The check begins with the three; then it tries hangs of its own,
# with different groups, some on five ranks.

# %%
# %%ranks
hangs = recorded_runs.numbers("11_hangs.json")["hangs"]
if rank == 0:
    for i, hang in enumerate(hangs):
        say(f"hang {i}, groups {', '.join(f'{name} of ranks {who}' for name, who in hang['members'].items())}")
        for r, calls in enumerate(hang["calls"]):
            last = ", ".join(f"{name} {number} {call}" for name, number, call, _ in calls[-3:])
            say(f"  rank {r}: ... {last}")


# %%
# %%ranks
def culprit(records, members):
    raise NotImplementedError  # your turn


checks.culprit(culprit, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 1</summary>
#
# ```python
# def where_it_stands(records, group, its_ranks):
#     """(number, ranks that did not make this call as most did), or None if all made the same calls."""
#     found = missing_call(calls_in(group, [records[r] for r in its_ranks]))
#     return found and (found[0], [its_ranks[i] for i in found[1]])
#
#
# def culprit(records, members):
#     stands = {group: where_it_stands(records, group, its_ranks) for group, its_ranks in members.items()}
#     missing = [(r, group, stand[0]) for group, stand in stands.items() if stand for r in stand[1]]
#     waits = {group: set(members[group]) - set(stand[1]) for group, stand in stands.items() if stand}
#     waiting, missed = set().union(*waits.values()), {r for r, _, _ in missing}
#     own = [fault for fault in missing if fault[0] not in waiting]  # they wait nowhere
#     return max(own, key=lambda fault: len(waits[fault[1]] & missed), default=None)  # the first fault
# ```
#
# </details>

# %% [markdown]
# ### Exercise 2: is it damaged?
#
# Disks fill up, and copies stop halfway. A full quota can cut a file short, and the program that wrote it gets no
# error. Write `damaged(path, part=0, parts=1)`: the names of the files of this checkpoint that are **not as they were
# written**, by its manifest, as a sorted list. `[]` if all is well, `["manifest.json"]` if the manifest itself cannot
# be read. Of the sorted names look only at number `part`, `part + parts`, and so on: reading is what takes long, and
# n ranks share it. You need the manifest and the bytes; load no tensor.


# %%
# %%ranks
def damaged(path, part=0, parts=1):
    raise NotImplementedError  # your turn


checks.damaged(damaged, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 2</summary>
#
# ```python
# def damaged(path, part=0, parts=1):
#     try:
#         files = json.loads((path / "manifest.json").read_text())["files"]
#     except (OSError, ValueError, KeyError):
#         return ["manifest.json"]
#
#     def as_written(name, about):
#         file = path / name
#         if not file.exists() or file.stat().st_size != about["bytes"]:  # cheap: no need to read it
#             return False
#         return hashlib.sha256(file.read_bytes()).hexdigest() == about["sha256"]
#
#     return [name for name in sorted(files)[part::parts] if not as_written(name, files[name])]
# ```
#
# </details>

# %% [markdown]
# `newest`, which the killed run uses, goes on from the last checkpoint that passes this test. Each rank reads its own
# share. It names each checkpoint that it skips; silent skipping costs people weeks.

# %%
# %%ranks
fresh = Trainee()
save(folder / "refused", fresh)
train_step(fresh)
later = save(folder / "refused", fresh)
if rank == 0:
    shard = later / f"rank-{guilty}.safetensors"
    os.truncate(shard, shard.stat().st_size // 2)  # as after "disk full"
dist.barrier()
trusted = newest(folder / "refused", fresh)
if rank == 0:
    say(f"{later.name} is newer, {trusted.name} is the one to go on from")

# %% [markdown]
# ### Exercise 3: nothing forgotten
#
# A training loop with everything that real ones have: a shuffled order that is drawn again for each epoch, dropout,
# AdamW, a learning rate that falls with the step. Its parts:
#
# | part | what it is |
# |---|---|
# | `loop.model`, `loop.optimizer` | as usual, with their `state_dict()` |
# | `loop.order`, `loop.position` | this epoch's order of the rows, a tensor, and how many of them have been used |
# | `loop.shuffle` | the `torch.Generator` that draws the next epoch's order |
# | `loop.step` | steps made; the learning rate follows it |
#
# Dropout draws from torch's global generator. Write `all_of(loop)`, a dict of tensors, numbers and dicts of them,
# and `put_back(loop, state)`, which puts it into a *fresh* loop, so that it goes on as if nothing had happened. The
# check saves your state to a file, in the middle of an epoch, and reads it with `weights_only=True`.


# %%
# %%ranks
def all_of(loop):
    raise NotImplementedError  # your turn


def put_back(loop, state):
    raise NotImplementedError  # your turn


checks.resume((all_of, put_back), ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 3</summary>
#
# ```python
# def all_of(loop):
#     return {
#         "model": loop.model.state_dict(),
#         "optimizer": loop.optimizer.state_dict(),
#         "order": loop.order,
#         "position": loop.position,
#         "step": loop.step,
#         "shuffle": loop.shuffle.get_state(),
#         "random": torch.get_rng_state(),
#     }
#
#
# def put_back(loop, state):
#     loop.model.load_state_dict(state["model"])
#     loop.optimizer.load_state_dict(state["optimizer"])
#     loop.order, loop.position, loop.step = state["order"], state["position"], state["step"]
#     loop.shuffle.set_state(state["shuffle"])
#     torch.set_rng_state(state["random"])
# ```
#
# </details>

# %% [markdown]
# ### Exercise 4: which copy is wrong?
#
# In the section on NaN a bit of the exponent flipped, and NaN is easy to see. What if bit 20 flips, in the middle of
# the fraction? Nothing is infinite, and no call fails. This is **silent corruption**: 6 of Llama 3's 419
# interruptions (the handbook lists them all). Here is the loss of the rank that it hits, and the loss without the
# flip:


# %%
# %%ranks
def trained(hit, num_steps=6):
    """A model after some steps of averaged gradients; before step 3 a bit of one weight flips on rank `hit`."""
    model = small_gpt()
    for step in range(num_steps):
        if step == 3 and rank == hit:
            flip_bit(model.blocks[1].mlp.up.weight, 100, bit=20)
        gradients(model, step)
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.data -= 0.1 * p.grad / world_size
    return model


healthy, hit = trained(None), trained(guilty)
if rank == guilty:
    batch = get_batch(corpus.train_ids, 9, 24, 24, 0, 1, seed=1)
    with torch.no_grad():
        say(f"loss without the flip {healthy(*batch)[1].item():.6f}, with it {hit(*batch)[1].item():.6f}")

# %% [markdown]
# No loss curve shows that. Averaging gradients does not bring the replicas together again (lesson 03), so this rank
# goes on with a different model, and its gradients go into everybody's average. But under DDP there are n replicas
# anyway, and they must be equal. (HSDP has replicas of each shard. FSDP alone, such as our `Trainee`, has none: a
# flipped weight is gathered by all, and all copies of it are equal and wrong.)
#
# Write `odd_one_out(model, gather)`. `gather(x)` returns the list of every rank's x, once every rank has called it.
# Return `(rank, name)`: the rank whose copy differs from the others, and the first parameter of
# `model.named_parameters()` in which it does; None if all copies are equal. If the list has two x, the rank is None:
# two copies show *that* one is wrong, it takes three to say *which*. Weights are too large to travel:
# `fingerprint(tensors)` is a sha256 of their bits.


# %%
# %%ranks
def odd_one_out(model, gather):
    raise NotImplementedError  # your turn


checks.odd_one_out(odd_one_out, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 4</summary>
#
# ```python
# def odd_one_out(model, gather):
#     of_all = gather({name: fingerprint([p]) for name, p in model.named_parameters()})
#     for name in of_all[0]:
#         prints = [of_one[name] for of_one in of_all]
#         if len(set(prints)) > 1:
#             alone = min(range(len(prints)), key=lambda r: prints.count(prints[r]))
#             return (alone if len(prints) > 2 else None), name
#     return None
# ```
#
# </details>

# %% [markdown]
# And on the two models from above:


# %%
# %%ranks
def everyone(value):
    """The value of each rank, in a list. All ranks call it."""
    values = [None] * world_size
    dist.all_gather_object(values, value)
    return values


found = {"without the flip": odd_one_out(healthy, everyone), "with it": odd_one_out(hit, everyone)}
if rank == 0:
    for name, odd in found.items():
        say(f"{name}: {odd}")

# %% [markdown]
# ## One more from the same trainer (MORE, 3 min)
#
# The trainer of the zoo saves below the folder of the run, and looks for a checkpoint below the folder of the
# *experiment*:

# %%
# %%ranks
import hashlib
import json
import os

import safetensors.torch


def save_folder(run):
    return folder / "zoo" / run / "checkpoints"


def resume_folder(run):
    return folder / "zoo" / "checkpoints"


trainee = Trainee()
before = [train_step(trainee) for _ in range(12)]
save(save_folder("run1"), trainee)
fresh = Trainee()
path = newest(resume_folder("run1"), fresh)
if path is not None:
    restore(path, fresh)
after = train_step(fresh)
if rank == 0:
    guessing = math.log(fresh.model.config.vocab_size)
    say(f"loss before the restart {before[-1]:.2f}, after it {after:.2f}; guessing gives {guessing:.2f}")

# %% [markdown]
# The loss after the restart is that of an untrained model at step 0, and no message says so. *Resume if there is
# something* is right for the first start and wrong for the second. So a restart should be able to say **must**:
# `scripts/train.py` has `--checkpoint.resume must`, which refuses to begin anew, and every resumed run says in its
# first lines from where.

# %% [markdown]
# ## On the cluster
#
# ```bash
# sbatch jobs/train.slurm --preset gpt2 --parallel.strategy fsdp   # warned or pre-empted, it saves and queues again
# qsub -v TRAIN_ARGS="--preset gpt2 --parallel.strategy fsdp" jobs/train.pbs
# ```
#
# After a restart, look for "resumed from step-..." in the first lines. Signals and time-outs are in [the
# handbook](../assets/handbook/11_when_it_breaks.md#signals).

# %% [markdown]
# ## Recap

# %%
# %%ranks
card(
    "In a hang all ranks complain. Compare, per group and call number, who did not call.",
    "A checkpoint holds all that a step reads: weights, moments of every rank, random numbers, step.",
    "All ranks write to a name that nobody reads; then a manifest, one rename, and a sync of the folder.",
    "A resumed run is the same run, bit for bit on as many ranks. Test it: kill it.",
    "Save every sqrt(2 C M); M falls with the number of GPUs.",
    figure="killed and resumed: the residual is zero",
    command="sbatch jobs/train.slurm --preset gpt2 --parallel.strategy fsdp",
)

# %% [markdown]
# ## Further reading
#
# - PyTorch, [Flight recorder](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html) and
#   [Distributed checkpoint](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html).
# - [The handbook of this lesson](../assets/handbook/11_when_it_breaks.md): first aid, spares, signals, causes of failures,
#   out of memory, and more to read. [jobs/README.md](../jobs/README.md) says what was tried on PBS and Slurm.

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
