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
# **45 minutes** for the sections marked CORE, 64 with those marked MORE.
#
# After this lesson **you can**
# - find the rank that hangs, and the call that it did not make;
# - tell a slow rank from those that wait for it, and a rank that makes NaN from those that got it;
# - write a checkpoint that is whole or not there, and refuse one that is damaged;
# - resume a killed run bit for bit, and on another number of ranks;
# - survive pre-emption, and say how often to save.
#
# **You need** the [all-reduce](../assets/glossary.md#all-reduce) ([lesson 02](02_collectives.ipynb)) and [data
# parallel](../assets/glossary.md#data-parallel) training ([lesson 03](03_data_parallel.ipynb)). From lesson 06 in
# two lines: under *ZeRO* each of n ranks keeps 1/n of the optimizer's memory, updates 1/n of the weights, and an
# all-gather makes them whole again.
#
# **New here:** [time-out](../assets/glossary.md#time-out), [flight recorder](../assets/glossary.md#flight-recorder),
# [straggler](../assets/glossary.md#straggler), [checkpoint](../assets/glossary.md#checkpoint),
# [manifest](../assets/glossary.md#manifest), [resharding](../assets/glossary.md#resharding),
# [pre-emption](../assets/glossary.md#pre-emption), [MTBF](../assets/glossary.md#mtbf).
#
# The same file is a script:
#
# ```bash
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/11_when_it_breaks.py
# mpiexec -n 4 python scripts/11_when_it_breaks.py --steps 48
# python scripts/11_when_it_breaks.py              # a world of one: nobody waits for anybody, the rest is the same
# ```
#
# All failures below are real ones, on real processes. Each takes seconds and leaves none behind.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 1, warm-up 2, hang 9 (exercise 1 in it),
# straggler 4, NaN 4, memory 3, checkpoint 7 (exercise 2 in it), DCP 4, experiment 6, interval 3, zoo 2.
#
# *Say:* with 16,000 GPUs something breaks every three hours. The question is never whether, only what it costs you.
# "Find it in a minute, lose ten minutes of work, and go on by itself" is the standard that this lesson reaches.
#
# *Three usual mistakes:* looking at the rank that reports the time-out (it is the healthy one, it waited);
# believing that a checkpoint exists because a file does; testing saving but never resuming.
#
# *When late:* skip the real straggler and the asynchronous save; keep the killed run and its curve.
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
failures = "two"  # what hits the run: one is kill -9, two is kill -9 and later SIGTERM; one of none, one, two

# %% [markdown]
# ## Start (CORE, 1 min)
#
# The first cell starts four ranks behind this notebook; a cell that begins with `%%ranks` runs on all of them.
#
# **Catching up.** Each section needs only the cells of this one, and then its own. Where it uses a function of an
# earlier section, a cell with `catch_up(...)` defines it, unless you have it already.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("11_when_it_breaks", globals())

# %%
# %%ranks
import functools
import hashlib
import json
import math
import os
import random
import shutil
import signal
import time
from datetime import timedelta

import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands import Metrics, catch_up, join, leave, refuse, say, show
from manyhands.checks import when_it_breaks as checks
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.figures.looks import ALTERNATIVES, FAINT, INK, LIMIT, MEASURED, PREDICTED
from manyhands.gpt.model import GPT, GPTConfig
from manyhands.runs import recorded_runs
from manyhands.runs.run_folder import run_folder
from matplotlib.figure import Figure

# %% [markdown]
# The ranks join. A batch that does not come out even is refused at once, on every rank, so that none is left waiting.

# %%
# %%ranks
ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
if 24 % world_size:
    refuse(f"24 sequences do not split over {world_size} ranks; use 1, 2, 3, 4, 6 or 8")

# %% [markdown]
# Three things that all sections share: the text, a folder that all ranks see, and **groups** of the first one, two,
# three and four ranks, so that a run can end on four ranks and go on with three. The groups use gloo, and what
# fails in this lesson stays on the CPU, also where there are GPUs: a NCCL call that times out takes its process
# down, and "equal to the last bit" is a promise that a CPU keeps more easily.

# %%
# %%ranks
corpus = load_corpus(ranks)
metrics = Metrics(ranks, corpus, {"steps": steps, "failures": failures})
agreed = [run_folder(ranks) if rank == 0 else None]
dist.broadcast_object_list(agreed)  # all ranks: rank 0 says where
folder = agreed[0]
group_of = {n: dist.new_group(range(n), backend="gloo") for n in (1, 2, 3, 4) if n <= world_size}
if rank == 0:
    say(f"groups of {', '.join(map(str, group_of))} ranks")

# %% [markdown]
# ## Warm-up: four numbers (CORE, 2 min)
#
# Four ranks average gradients, once per step, and nothing has been printed for ten minutes. You ask each rank how
# many all-reduces it has *called* so far, and hear: **12, 12, 11, 12**.
#
# **Predict.** Which rank is broken? Which ranks will complain, and what would the process table show of all four?
#
# <details><summary>Answer</summary>
#
# Rank 2: the others are *in* number 12, it never came. The three healthy ones will complain, because only who waits
# can lose patience. And the table shows four living processes; a GPU that waits in NCCL even looks 100 % busy. So
# neither the error nor the load tells you whom to look at. The number of calls does.
#
# </details>
#
# ![Four ranks and the calls that each has made: three have called the twelfth all-reduce and wait in it, rank 2 has
# called eleven](../assets/11_missing_call.svg)

# %% tags=["nbval-check-output"]
# %%ranks
calls_made = [12, 12, 11, 12]
behind = [r for r, calls in enumerate(calls_made) if calls < max(calls_made)]
if rank == 0:
    waiting = len(calls_made) - len(behind)
    say(f"rank {behind[0]} did not make call {max(calls_made)}; {waiting} ranks wait for it")

# %% [markdown]
# ## A hang, and the call that was not made (CORE, 9 min)
#
# **Why.** A crash tells you a line. A hang tells you nothing: one rank takes another turn, and all others wait in
# the next collective, silently. Not for ever: every group has a [**time-out**](../assets/glossary.md#time-out). Its
# default is long, 30 minutes with gloo and 10 with NCCL, because a rank may have good reasons to come late (it
# compiles, it saves).
#
# Here is a hang with a patience of a second. The last rank leaves the loop one step early, as if its share of the
# data were shorter (a classic: files that do not split evenly).


# %%
# %%ranks
def train_together(group, num_steps):
    """A training loop as the network sees it: one all-reduce per step."""
    for _ in range(num_steps):
        gradient = torch.ones(1000)
        dist.all_reduce(gradient, group=group)


dist.barrier()  # all ranks come at the same time
group = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s), group_desc="training")
begin, heard = time.perf_counter(), "nothing: it was done, and left"
try:
    train_together(group, num_steps=5 if rank == world_size - 1 else 6)
except RuntimeError as error:  # on gloo this is the time-out, or a neighbour's that hung up
    heard = str(error).split("] ")[-1]
say(f"after {time.perf_counter() - begin:.0f} s I heard: {heard}")

# %% [markdown]
# Read those lines as the person on call would. Ranks that did everything right raise errors; the rank at fault
# reports nothing. Now and then one says "connection closed by peer" instead: its neighbour lost patience a moment
# earlier, and is blamed for it.
#
# Recovering from this is easy here, because gloo throws the group away and leaves the process alone: the other
# groups still work. With NCCL the watchdog ends the whole process (it cannot know what the GPU has done), so there
# recovery means a restart.

# %% tags=["nbval-check-output"]
# %%ranks
together = torch.ones(1)
dist.all_reduce(together)  # the default group has never noticed
say(f"the other group still works: {together.item() == world_size}")

# %% [markdown]
# ### The flight recorder
#
# Every aeroplane carries one, and so does `torch.distributed`: a ring buffer of the last calls of each rank. In
# torch 2.13 it is on by default and holds the last 2,000; another size is `TORCH_FR_BUFFER_SIZE`, 0 is off (in
# older torch `TORCH_NCCL_TRACE_BUFFER_SIZE`; set it, it may be off there). The variable must be set before the
# process starts. What the buffer holds comes out as JSON:


# %%
# %%ranks
def flight_record(groups):
    """What this rank called in the groups of these names: [(group, number of the call in it, call, numbers in it)]."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)  # where torch is too old: nothing
    found = []
    for entry in json.loads(dump()).get("entries", []) if dump else []:
        name, call = entry["process_group"][1], entry["profiling_name"].split(":")[-1]
        if name in groups:
            length = sum(math.prod(size) for size in entry["input_sizes"])
            found.append((name, entry["collective_seq_id"], call, length))
    return found


mine = flight_record(["training"])
say(f"my last two calls: {mine[-2:]}")

# %% [markdown]
# (There is a second dump, `_dump_fr_trace`, that also knows the line of each call. It is a *pickle*, and to read a
# pickle is to run whatever its author wrote into it: fine for bytes that this very process has just made, not for a
# file that somebody sends you.)
#
# **Predict.** Each entry also has a `state`: scheduled, started, completed. Which state has the call that was never
# completed, and which have the five before it?
#
# <details><summary>Answer</summary>
#
# On gloo all of them are "scheduled", for ever: only NCCL's watchdog updates states. `retired` looks better, but
# after the time-out it may say true for a call that failed. And `send` and `recv` are not in it at all. So on gloo
# a rank's own record cannot tell you what hangs. **The comparison of the ranks' records can.**
#
# </details>

# %%
# %%ranks
dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", lambda: b'{"entries": []}')
states = {entry["state"] for entry in json.loads(dump()).get("entries", [])}
records = [None] * world_size
dist.all_gather_object(records, mine)  # all ranks; it travels in the default group, which works
if rank == 0:
    say(f"states in rank 0's record: {states or 'none: the recorder is off, or this torch is too old'}")
    for r, record in enumerate(records):
        say(f"rank {r} called: {' '.join(f'{number}' for _, number, _, _ in record)}")

# %% [markdown]
# Number 6 is missing on one rank. That is the whole method: **same group, same number, every member**. Write it
# down once, for the cases that are less clear than this one.
#
# ### Exercise 1: three hangs, find the culprit
#
# Three hangs were recorded on four ranks, each with another mistake. You get `records`, a list per rank of
# `(group, number, call, length)`, and `members`, which ranks belong to each group. Write
# `culprit(records, members)`, which returns `(rank, group, number)`: who did not make which call.
#
# Three things make it harder than the warm-up. A rank can make *another* call than the others. A buffer keeps the
# last calls only, so records need not begin at 1. And with several groups a rank that is missing in one may itself
# be waiting in another: **the culprit is the one that is missing and waits nowhere.** It may be missing in two
# groups, x and y. Then return its *first* fault. How to tell: somebody who waits for it in x is thereby missing in
# y too. So y stands because of x, and x came first. (If every missing rank also waits, two ranks called two groups
# in opposite order: then the order is the fault. None of these hangs is of that kind.)
#
# The check begins with these three. Then it tries hangs of its own, with groups of other names and sizes, some on
# five ranks.
#
# In a hurry? Write it for one group, which solves hangs 0 and 1, and open the solution for the rest. The check then
# says: not yet, hang 2.

# %%
# %%ranks
hangs = recorded_runs.numbers("11_hangs.json")["hangs"]
if rank == 0:
    for i, hang in enumerate(hangs):
        say(f"hang {i}, groups {hang['members']}")
        for r, calls in enumerate(hang["calls"]):
            last = ", ".join(f"{name} {number} {call}" for name, number, call, _ in calls[-3:])
            say(f"  rank {r}: ... {last}")


# %%
# %%ranks
def culprit(records, members):
    raise NotImplementedError  # your turn


checks.culprit(culprit, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 1
def where_it_stands(records, group, its_ranks):
    """(number, ranks that did not make this call as most did), or None if all made the same calls."""
    calls = [{number: call for name, number, call, _ in records[r] if name == group} for r in its_ranks]
    begins = max((min(made) for made in calls if made), default=1)  # what all buffers still hold
    ends = max((max(made) for made in calls if made), default=0)
    for number in range(begins, ends + 1):
        made = [of_rank.get(number) for of_rank in calls]
        usual = max(set(made) - {None}, key=made.count)
        odd = [r for r, call in zip(its_ranks, made, strict=True) if call != usual]
        if odd:
            return number, odd


def culprit(records, members):
    stands = {group: where_it_stands(records, group, its_ranks) for group, its_ranks in members.items()}
    missing = [(r, group, stand[0]) for group, stand in stands.items() if stand for r in stand[1]]
    waits = {group: set(members[group]) - set(stand[1]) for group, stand in stands.items() if stand}
    waiting, missed = set().union(*waits.values()), {r for r, _, _ in missing}
    own = [fault for fault in missing if fault[0] not in waiting]  # they wait nowhere
    return max(own, key=lambda fault: len(waits[fault[1]] & missed), default=None)  # the first fault


checks.culprit(culprit, ranks, solution=True)

# %% [markdown]
# And now on the hang of a minute ago, this machine's own:

# %%
# %%ranks
found = culprit(records, {"training": list(range(world_size))}) if any(records) else None
if rank == 0:
    sentence = (
        "nobody is missing" if found is None else "rank {0} did not make call {2} of {1!r}".format(*found)
    )
    say(sentence)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the hang</summary>
#
# Let the errors stand on the screen and ask who is at fault; most rooms point at
# the rank with the longest message. *Usual mistakes:* raising the time-out ("it needs longer");
# `if rank == 0: evaluate()` with a collective inside; reading `state`. *When late:* run solution 1 without
# discussing it. The course's own trainer does the comparison by itself: a rank that hangs in `scripts/train.py` is
# named in a sentence after `--train.stall-s` seconds (module `manyhands.trainer.stalls`).
#
# </details>

# %% [markdown]
# ## A straggler: who is slow, and who only waits (CORE, 4 min)
#
# **Why.** Nothing hangs, the loss falls, and the job takes one and a half times as long as last week. One GPU of a
# thousand is hot and has lowered its clock. It is a [**straggler**](../assets/glossary.md#straggler).
#
# ![Four ranks compute and then average: rank 2 computes longer, the three others wait, and the step lasts as long on all
# four](../assets/11_straggler.svg)
#
# **Predict.** One of your ranks becomes twice as slow in computing. By how much does the job slow down, if
# computing is 9/10 of a step? On which ranks do you see it in the time per step, and on which in the time spent
# waiting?
#
# <details><summary>Answer</summary>
#
# By 0.9 of a step, so it takes 1.9 times as long: every step waits for the slowest. The time per step is the same
# on *all* ranks, so it says nothing. Waiting shows it upside down: all wait, except the straggler.
#
# </details>
#
# On the **virtual network** (real messages, computed time, so that it repeats exactly) rank 1 (rank 0, if it is
# alone) is slow in steps 4 to 7:

# %%
# %%ranks
from manyhands.figures.heat_map import heat_map
from manyhands.measure.virtual_network import Link, VirtualNetwork

slow = min(1, world_size - 1)
network = VirtualNetwork(
    ranks,
    inside=Link(latency_s=10e-6, bytes_per_s=1.6e9),  # the all-reduce takes 1 ms: computing is 9/10
    slowdown=lambda r, step: 2.0 if r == slow and 4 <= step < 8 else 1.0,
)
for step in range(12):
    with network.step(step):
        network.compute(9e-3, "forward and backward")
        network.all_reduce(torch.ones(250_000))  # 1 MB of gradients
steps_s = network.gather_steps()  # on rank 0: lists of [ranks][steps]

# %%
# %%ranks
if rank == 0:
    for kind in ("total", "compute", "waiting"):
        figure = heat_map(steps_s[kind], f"{kind} of each step", "s", virtual=True)
        alt = f"virtual {kind} time of each rank at each step; steps 4 to 7 stand out"
        show(figure, f"straggler_{kind}", alt)
    took_s = steps_s["total"][0]
    say(f"a slow step takes {took_s[5] / took_s[0]:.2f} times as long as a usual one")
metrics.exact(straggler=steps_s if rank == 0 else None)

# %% [markdown]
# The first map shows *when*, and cannot show who. The second one names the rank. The third is what you get if you
# only look at collectives, as many profilers do: the rank with the **least** waiting is the one to look at.
#
# ### The same with real clocks (MORE, 3 min)
#
# Real ranks, real seconds: the last rank's "data loader" needs 20 ms more in steps 4 to 7 (a `sleep`, a stand-in
# for a slow disk). One clock before the collective, one after it. Note the barrier before the loop: without a
# common start each rank's clock would also measure what came before.


# %%
# %%ranks
def timed_steps(num_steps):
    """Seconds before and inside the all-reduce of each step: two lists. All ranks call it."""
    before_s, inside_s = [], []
    dist.barrier()
    for step in range(num_steps):
        begin = time.perf_counter()
        if rank == world_size - 1 and 4 <= step < 8:
            time.sleep(0.02)
        gradient = torch.randn(120, 120) @ torch.randn(120, 120)
        called = time.perf_counter()
        dist.all_reduce(gradient)
        before_s.append(called - begin)
        inside_s.append(time.perf_counter() - called)
    return before_s, inside_s


gathered = [None] * world_size
dist.all_gather_object(gathered, timed_steps(12))
if rank == 0:
    for i, title in enumerate(("before the all-reduce", "inside the all-reduce")):
        figure = heat_map([clocks[i] for clocks in gathered], title, "s")
        show(figure, f"real_straggler_{i}", f"seconds {title}: the last rank is slow, the others wait")

# %% [markdown]
# What a clock sees *inside* the all-reduce is waiting and sending together, so it is never quite zero; and on a
# machine with fewer cores than ranks some cells are dark for no other reason than that. With a single step nobody
# could tell. Look at rows.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: stragglers</summary>
#
# *Ask:* "you have the three maps for 1,000 ranks; which one do you open first?"
# (Compute, and sort the rows.) *Usual mistake:* averaging the step time over ranks, which is the same number a
# thousand times.
#
# </details>

# %% [markdown]
# ## NaN: which rank, which step, which layer (CORE, 4 min)
#
# **Why.** NaN plus anything is NaN. So one rank that makes one NaN gives it to all in the next all-reduce, and a
# step later every weight of every rank is NaN. By the time somebody looks, all ranks look guilty.
#
# ![One rank's gradient holds NaN; the all-reduce adds it into the sum, and all ranks receive NaN](../assets/11_nan.svg)
#
# Where does a first NaN come from? A mean over nothing (a batch of padding only), one infinity taken from another
# (a logarithm of zero, a sum beyond 65,504 in fp16), or hardware: **one bit that flips**. Let us flip one. A
# float32 has its exponent in bits 23 to 30:


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
# **Predict.** It happens to one weight, on the last rank, before step 3. In which step does a rank's *own gradient*
# become NaN or infinite, and on which rank? After which call do all ranks have it?
#
# <details><summary>Answer</summary>
#
# In step 3, on the last rank only: a number of 10³⁶ squared is infinite in float32, and the LayerNorm that computes
# with it returns NaN. After that step's all-reduce all ranks have it. So the place to look is **after backward and
# before the all-reduce**, and afterwards it is too late.
#
# </details>


# %%
# %%ranks
def small_gpt(dropout=0.0):
    torch.manual_seed(1337)  # the same first weights on all ranks
    size = {"block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 64, "dropout": dropout}
    return GPT(GPTConfig(vocab_size=len(corpus.symbols), **size))


def gradients(model, step):
    """This rank's own gradients of its share of global batch `step`."""
    model.zero_grad()
    model(*get_batch(corpus.train_ids, step, 24, 32, rank, world_size, seed=1))[1].backward()
    return [p.grad for p in model.parameters()]


def sound(tensors):
    return all(tensor.isfinite().all().item() for tensor in tensors)


# %%
# %%ranks
model, first_bad = small_gpt(), {}
for step in range(6):
    if rank == world_size - 1 and step == 3:
        flip_bit(model.blocks[1].mlp.up.weight, 100)
    own = gradients(model, step)
    if not sound(own):
        first_bad.setdefault("own gradient", step)
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.data -= 0.1 * p.grad / world_size
    if not sound(own):  # the same tensors, now averaged
        first_bad.setdefault("averaged gradient", step)
say(f"not finite for the first time: {first_bad}")

# %% [markdown]
# Look at the steps: on the last rank its *own* gradient was bad in the same step as the average, on the others one
# step later. That difference of one step is all the evidence there is, and it is there only if somebody looks at
# each step. So look at each step, before averaging: one flag per rank. (Here as an object, to be short. A trainer
# sends it as one more number with the loss.)


# %%
# %%ranks
def who_is_not_finite(own):
    """The ranks whose own tensors hold NaN or infinity. All ranks call it, before they average."""
    flags = [None] * world_size
    dist.all_gather_object(flags, sound(own))
    return [r for r, fine in enumerate(flags) if not fine]


model = small_gpt()
if rank == world_size - 1:
    flip_bit(model.blocks[1].mlp.up.weight, 100)
guilty = who_is_not_finite(gradients(model, 3))
if rank == 0:
    say(f"not finite before averaging: ranks {guilty}")

# %% [markdown]
# Which layer? On that rank, a *forward hook* on each module says whose output is the first that is not finite. (For
# backward there is `torch.autograd.set_detect_anomaly(True)`: it names the operation, and slows every step, so use
# it for one.)


# %%
# %%ranks
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


batch = get_batch(corpus.train_ids, 3, 24, 32, rank, world_size, seed=1)
largest = max(model.named_parameters(), key=lambda named: named[1].abs().max().item())
say(f"first output that is not finite: {first_not_finite(model, *batch)}")
say(f"largest weight: {largest[1].abs().max().item():.1e} in {largest[0]}")

# %% [markdown]
# (`norm` is the model's last LayerNorm.) The two lines need not name the same module: the huge weight's own output
# is still finite, 10³⁶ or so, and it is a *later* operation, a LayerNorm that squares it, that overflows. From where
# NaN appears go back, towards the input, to a number that is too large.
#
# What to do with it? Never "skip NaN and go on" on one rank alone. If it leaves out the all-reduce, the others wait
# for it: the hang from above. If it leaves out only the update, the copies part. Skip the step on **all** ranks
# (under DDP a gradient scaler does: it looks at the *averaged* gradients, the same on all), or stop, before such
# weights are saved. `scripts/train.py` stops.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: NaN</summary>
#
# *Ask:* "a colleague sets NaN gradients to zero on each rank and trains on. What is
# wrong?" (It works, and hides a broken GPU for weeks.) *Usual mistake:* testing the loss after it was averaged.
#
# </details>

# %% [markdown]
# ## Out of memory, read aloud (CORE, 3 min)
#
# **Why.** It is the error that everybody meets, and its message names a number of bytes. A large one says which
# tensor. **Predict** it for the logits of a batch of 24 million sequences of 2,048 tokens and 50,280 symbols in
# float32.
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
# attention was not used. If it is small, such as the 20 MiB of many messages, it is only the last straw (the GPU's
# allocator rounds up, so it is no shape at all): look at what is allocated already. On a GPU the message goes on;
# in order of what you do about it:
#
# | it says | it means |
# |---|---|
# | Tried to allocate *x* ... *y* is free | x far larger than y: smaller micro-batch, checkpointing (lesson 01), sharding (lesson 06) |
# | *z* is allocated by PyTorch | your tensors. Much more than lesson 01's formula: something is kept |
# | *u* is reserved by PyTorch but unallocated | if large: fragments. `PYTORCH_ALLOC_CONF=expandable_segments:True` |
# | Process *p* has ... in use | somebody else, or your own last run; in a container perhaps this very process |
#
# (Older torch reads `PYTORCH_CUDA_ALLOC_CONF`. "Something is kept": often a list of losses with their graphs.)
#
# **The other kind** has no message. When the *host* runs out of memory, Linux ends the largest process with signal
# 9, and nobody raises anything: the rank is gone. Its launcher reports exit code -9, the log ends in the middle of
# a line, and the other ranks say "connection closed by peer". (Under Slurm look in the job's output for `oom_kill`,
# in older ones `oom-kill`, and in `sacct` for `OUT_OF_MEMORY`.) The next sections are about that: a process that is
# *gone*.

# %% [markdown]
# ## A checkpoint: whole, or not there (CORE, 7 min)
#
# **Why.** What a process held in memory is gone with it. So write it down from time to time: a
# [**checkpoint**](../assets/glossary.md#checkpoint). The trap: a process can also die *while it writes*, and then
# there is a file that looks like a checkpoint and is half of one.
#
# First something worth saving: a small ShakespeareGPT, trained by ZeRO. All its parameters lie in one row of P
# numbers (`windows` turns the model's own tensors into windows onto that row); a rank updates 1/n of the row, p
# numbers, and holds Adam's two averages for that part only. The model is `small_gpt` of the section on NaN.

# %%
# %%ranks
catch_up(globals(), "small_gpt")


# %%
# %%ranks
def windows(model, n):
    """Lay the model's weights and gradients into two rows, n equal parts long: (row_P, gradient_P)."""
    parameters = list(model.parameters())
    row_P = torch.nn.utils.parameters_to_vector(parameters).detach()
    row_P = F.pad(row_P, (0, -len(row_P) % n))
    gradient_P, offset = torch.zeros_like(row_P), 0
    for parameter in parameters:
        window = slice(offset, offset + parameter.numel())
        parameter.data = row_P[window].view_as(parameter)
        parameter.grad = gradient_P[window].view_as(parameter)
        offset = window.stop
    return row_P, gradient_P


# %%
# %%ranks
class Trainee:
    """A small ShakespeareGPT, trained by the ranks of `group`; each keeps 1/n of what Adam remembers."""

    def __init__(self, group=None, dropout=0.1, dtype=torch.float32):
        self.group, self.rank, self.n = group, dist.get_rank(group), dist.get_world_size(group)
        self.step = 0
        self.model = small_gpt(dropout).to(dtype)
        self.num_params = sum(p.numel() for p in self.model.parameters())
        self.row_P, self.gradient_P = windows(self.model, self.n)
        mine_p = self.row_P.chunk(self.n)[self.rank]  # a view: whoever changes it changes the model
        self.state = {"weights": mine_p, "mean": torch.zeros_like(mine_p), "square": torch.zeros_like(mine_p)}
        torch.manual_seed(1000 + self.rank)  # dropout: other masks on each rank, by design


# %% [markdown]
# A step: backward, average, update the own part, all parts to all. (Adam is written out, to show what it remembers.)


# %%
# %%ranks
def train_step(trainee):
    """One step. Returns the loss of the global batch. All ranks of the trainee call it."""
    group, rank, n = trainee.group, trainee.rank, trainee.n
    trainee.gradient_P.zero_()
    loss = trainee.model(*get_batch(corpus.train_ids, trainee.step, 24, 32, rank, n, seed=1))[1]
    loss.backward()
    dist.all_reduce(trainee.gradient_P, group=group)
    trainee.step += 1
    adam(trainee.state, trainee.gradient_P.chunk(n)[rank] / n, trainee.step)
    dist.all_gather(list(trainee.row_P.chunk(n)), trainee.state["weights"].clone(), group=group)
    mean_loss = loss.detach().double() / n
    dist.all_reduce(mean_loss, group=group)
    return mean_loss.item()


def adam(state, gradient_p, step, lr=3e-3, b1=0.9, b2=0.95):
    """Adam's update of this rank's part, in place. Local."""
    state["mean"].lerp_(gradient_p, 1 - b1)
    state["square"].lerp_(gradient_p**2, 1 - b2)
    size_p = (state["square"] / (1 - b2**step)).sqrt() + 1e-8
    state["weights"] -= lr * state["mean"] / (1 - b1**step) / size_p


# %%
# %%ranks
trainee = Trainee()
curve = [train_step(trainee) for _ in range(6)]
mine = {name: len(part_p) for name, part_p in trainee.state.items()}
if rank == 0:
    say(f"losses {' '.join(f'{loss:.3f}' for loss in curve)}")
    say(f"of {trainee.num_params:,} parameters this rank keeps {mine}")

# %% [markdown]
# **Predict.** What must be in the checkpoint, so that the next step is *the same step*, bit for bit, as if nothing
# had happened? Weights, obviously. What else?
#
# <details><summary>Answer</summary>
#
# - Adam's two averages, **of every rank**, and its step count (it divides by 1 - 0.9^step).
# - The **random numbers**: dropout's next mask. The generator's state is 5,056 bytes in torch, and differs between ranks.
# - The **position in the data**. Here batch k is drawn from (seed, k) alone, so the step *is* the position. A shuffling loader has
#   more: the epoch, its order, the place in it (exercise 3).
# - The learning rate's schedule, a loss scale: whatever the step reads and the weights do not hold.
#
# </details>
#
# ### From scratch: all shards, then a manifest, then one rename
#
# ![Each rank writes its shard into a folder step-0006.partial and syncs it; when all have told rank 0 size and sha256, rank 0 writes the
# manifest and renames the folder to step-0006](../assets/11_save.svg)
#
# Each rank writes its own shard, under a name that nobody reads. When **all** are on the disk (not: in a cache),
# rank 0 writes the [**manifest**](../assets/glossary.md#manifest), the list of files with size and sha256, and
# renames the folder. A rename is *atomic*: after it the checkpoint is there, before it there is none. A kill at any
# moment leaves one or the other. (To survive a power cut too, the *folder* needs an `fsync` after the rename.)


# %%
# %%ranks
def write(path, content):
    """Write bytes to a file, and return only when they are on the disk: {"bytes", "sha256"} of it."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


# %% [markdown]
# `save` is called by all ranks: each writes, rank 0 signs.


# %%
# %%ranks
def save(folder, trainee):
    """A checkpoint of all ranks of the trainee, all of it or none. All of them call it; returns its path."""
    path = folder / f"step-{trainee.step:04d}"
    partial = path.with_suffix(".partial")  # a name that nobody reads
    partial.mkdir(parents=True, exist_ok=True)
    tensors = trainee.state | {"random": torch.get_rng_state()}
    name = f"rank-{trainee.rank}.safetensors"  # numbers and names: no pickle
    about = write(partial / name, safetensors.torch.save({k: t.contiguous() for k, t in tensors.items()}))
    files = [None] * trainee.n
    # all ranks: ends only after each has told, and so after every shard is on the disk
    dist.all_gather_object(files, (name, about), group=trainee.group)
    if trainee.rank == 0:
        manifest = {"step": trainee.step, "n": trainee.n, "files": dict(files)}
        write(partial / "manifest.json", json.dumps(manifest, indent=1).encode())
        if path.exists():  # damaged, or we would not be here again
            path.rename(path.with_suffix(f".broken{time.time_ns()}"))
        partial.rename(path)  # atomic: this is the moment at which the checkpoint exists
    dist.barrier(trainee.group)
    return path


# %% [markdown]
# And back. `restore` fills what is there, in place. It refuses another number of ranks before it has changed
# anything. That the bytes are as written is not its business, but that of `newest`, below.


# %%
# %%ranks
def restore(path, trainee):
    """Fill the trainee from a checkpoint of as many ranks. All ranks of it call this. Raises ValueError."""
    manifest = json.loads((path / "manifest.json").read_text())
    if manifest["n"] != trainee.n:
        wrote = manifest["n"]
        raise ValueError(f"{path.name} was saved by {wrote} ranks and here are {trainee.n}; reshard it")
    saved = safetensors.torch.load((path / f"rank-{trainee.rank}.safetensors").read_bytes())
    for name, part_p in trainee.state.items():
        part_p.copy_(saved[name])
    torch.set_rng_state(saved["random"])
    trainee.step = manifest["step"]
    dist.all_gather(list(trainee.row_P.chunk(trainee.n)), saved["weights"], group=trainee.group)


# %% [markdown]
# The test of a checkpoint is not that it loads. It is that **the next losses are the same**. In a fresh `Trainee`,
# as after a restart, against the one that simply goes on:

# %% tags=["nbval-check-output"]
# %%ranks
scratch = folder / "scratch"
path = save(scratch, trainee)  # all ranks
went_on = [train_step(trainee) for _ in range(6)]
fresh = Trainee()
restore(path, fresh)
resumed = [train_step(fresh) for _ in range(6)]
if rank == 0:
    say(f"{path.name}: the next 6 losses are equal to the last bit: {resumed == went_on}")
assert resumed == went_on

# %% [markdown]
# **Predict** the bytes of a shard: P = 110,145 parameters (65 symbols), three numbers of 4 bytes for each, n ranks,
# and the random state.
#
# <details><summary>Answer</summary>
#
# 12·P/n + 5,056, with P/n rounded up: 335,500 bytes on four ranks, and some hundred for the names. All shards
# together have 12·P = 1.32 MB and the random states, however many ranks there are. A checkpoint with fewer bytes
# than that has lost something: the zoo at the end of this lesson keeps one.
#
# </details>

# %%
# %%ranks
predicted_bytes = 12 * -(-trainee.num_params // world_size) + 5056
found_bytes = (path / f"rank-{rank}.safetensors").stat().st_size
if rank == 0:
    names = sorted(file.name for file in path.iterdir())
    say(f"{path.name} holds {', '.join(names)}")
    ratio = found_bytes / predicted_bytes
    say(f"a shard has {found_bytes} bytes, predicted {predicted_bytes}, ratio {ratio:.4f}")
metrics.exact(shard_bytes=found_bytes)

# %% [markdown]
# ### Exercise 2: is it damaged?
#
# Disks fill up, copies break off, and a full quota cuts a file without telling the program that wrote it. Write
# `damaged(path)`: the names of the files of this checkpoint that are **not as they were written**, by its manifest,
# as a sorted list; `[]` if all is well, `["manifest.json"]` if the manifest itself cannot be read. Nothing but the
# manifest and the bytes are needed; load no tensor.


# %%
# %%ranks
def damaged(path):
    raise NotImplementedError  # your turn


checks.damaged(damaged, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 2
def damaged(path):
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
    except (OSError, ValueError, KeyError):
        return ["manifest.json"]

    def as_written(name, about):
        file = path / name
        if not file.exists() or file.stat().st_size != about["bytes"]:  # cheap: no need to read it
            return False
        return hashlib.sha256(file.read_bytes()).hexdigest() == about["sha256"]

    return sorted(name for name, about in files.items() if not as_written(name, about))


checks.damaged(damaged, ranks, solution=True)

# %% [markdown]
# With it, the newest checkpoint *that can be trusted*. What it passes over it names; silence here is how people
# lose a week.


# %%
# %%ranks
def newest(folder, trainee):
    """The last checkpoint in `folder` of which every byte is as written, or None. All ranks of the trainee call it."""
    found = [None]
    if trainee.rank == 0:
        for path in sorted(folder.glob("step-????"), reverse=True):
            if not (faults := damaged(path)):
                found = [path]
                break
            say(f"{path.name} is passed over: {', '.join(faults)} is not as it was written")
    dist.broadcast_object_list(found, group=trainee.group, group_src=0)
    return found[0]


# %%
# %%ranks
later = save(scratch, fresh)
if rank == 0:
    shard = later / f"rank-{world_size - 1}.safetensors"
    os.truncate(shard, shard.stat().st_size // 2)  # as after "disk full"
dist.barrier()
trusted = newest(scratch, fresh)
if rank == 0:
    say(f"{later.name} is newer, {trusted.name} is the one to go on from")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the checkpoint</summary>
#
# Draw the moment of the rename on the board and ask for each line of
# `save`: "killed here, what is on the disk?" *Usual mistakes:* writing into the final name; a `latest` file that is
# updated before the data is there; `fsync` forgotten (the rename can reach the disk before the data does). *When
# late:* skip exercise 2's own work, run its solution.
#
# </details>

# %% [markdown]
# ## The library's way: DCP, and another number of ranks (CORE, 4 min)
#
# **Why.** Our checkpoint fits as many ranks as wrote it. Tomorrow you get three nodes instead of four.
# [**Resharding**](../assets/glossary.md#resharding) is reading it with other cuts.
#
# ![One row of numbers, cut for four ranks, for two and for three; each reader takes the pieces that overlap with its own
# part](../assets/11_reshard.svg)
#
# `torch.distributed.checkpoint`, **DCP**, saves what each piece is a piece *of*. It learns that from a
# [**DTensor**](../assets/glossary.md#dtensor): a global shape, and this rank's part of it. Here the trainee's rows
# become DTensors; they share memory with the trainee, so loading fills it.
#
# Three words of the code: a *mesh* is the group with a shape, here a line of n ranks; `Shard(0)` says "cut along
# dimension 0, part r on rank r"; `run_check=False` spares a message that would compare the parts.

# %%
# %%ranks
catch_up(globals(), "small_gpt", "windows", "Trainee", "train_step", "adam")

# %%
# %%ranks
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def as_dtensors(trainee):
    """{name: this trainee's part of the row, as a piece of a DTensor of P numbers}"""
    mesh = DeviceMesh.from_group(trainee.group, "cpu")
    P, p = trainee.num_params, len(trainee.state["weights"])
    mine = max(0, min(p, P - trainee.rank * p))  # without the padding at the end of the row
    how = {"shape": torch.Size([P]), "stride": (1,), "run_check": False}
    return {k: DTensor.from_local(t[:mine], mesh, [Shard(0)], **how) for k, t in trainee.state.items()}


# %%
# %%ranks
sizes = [[1], [2, 1], [3, 2], [4, 2, 3]][min(world_size, 4) - 1]  # 4 ranks save, 2 load and save, 3 load
if rank == 0:
    shutil.rmtree(folder / "dcp", ignore_errors=True)
dist.barrier()
for before, n in zip([None, *sizes], sizes, strict=False):
    if rank < n:  # the group's own ranks only
        trainee = Trainee(group_of[n])
        parts = as_dtensors(trainee)
        if before:
            for part in parts.values():
                part.to_local().fill_(-1.0)  # so that it cannot be right by chance
            dcp.load(parts, checkpoint_id=folder / "dcp" / f"from-{before}", process_group=group_of[n])
        dcp.save(parts, checkpoint_id=folder / "dcp" / f"from-{n}", process_group=group_of[n])
    dist.barrier()

# %% [markdown]
# Is the row the same, after all these cuts? On the ranks of the last group: everything, in one piece, against a
# fresh trainee.

# %%
# %%ranks
if rank < sizes[-1]:
    row_P = parts["weights"].full_tensor()  # an all-gather in the group
    unchanged = torch.equal(row_P, Trainee(group_of[sizes[-1]]).row_P[: trainee.num_params])
    if rank == 0:
        say(f"saved and loaded by {' -> '.join(map(str, sizes))} ranks: equal to the last bit: {unchanged}")
    assert unchanged

# %% [markdown]
# **Three ways to the same training.** (1) It is never interrupted. (2) It is saved and restored by our functions.
# (3) It is saved by DCP and goes on **on half of the ranks**. Dropout is off, because another number of ranks draws
# other masks, and it is in float64, because another order of additions rounds differently.
#
# **Predict.** How large is the difference between (1) and (2), and between (1) and (3)?
#
# <details><summary>Answer</summary>
#
# (1) and (2): zero, the same operations on the same bits. (1) and (3): not zero. Two ranks add their gradients in
# another order than four, and rounding in float64 is about 10⁻¹⁵. "Bit for bit" holds **on the same number of
# ranks**.
#
# </details>

# %%
# %%ranks
catch_up(globals(), "write", "save", "restore")

# %%
# %%ranks
several = max(n for n in group_of if 24 % n == 0)
half = max(1, several // 2)
exact_trainee = functools.partial(Trainee, dropout=0.0, dtype=torch.float64)
losses = {}
if rank < several:
    one = exact_trainee(group_of[several])
    for _ in range(4):
        train_step(one)
    path = save(folder / "three", one)
    dcp.save(as_dtensors(one), checkpoint_id=folder / "three" / "dcp", process_group=group_of[several])
    losses["never interrupted"] = [train_step(one) for _ in range(8)]
    ours = exact_trainee(group_of[several])
    restore(path, ours)
    losses["our save"] = [train_step(ours) for _ in range(8)]
if rank < half:
    fewer = exact_trainee(group_of[half])
    dcp.load(as_dtensors(fewer), checkpoint_id=folder / "three" / "dcp", process_group=group_of[half])
    fewer.step = 4
    dist.all_gather(list(fewer.row_P.chunk(half)), fewer.state["weights"].clone(), group=fewer.group)
    losses["DCP, half of the ranks"] = [train_step(fewer) for _ in range(8)]
dist.barrier()

# %% tags=["nbval-check-output"]
# %%ranks
if rank == 0:
    reference = losses["never interrupted"]
    for name, given in losses.items():
        apart = max(abs(a - b) for a, b in zip(given, reference, strict=True))
        assert apart < 1e-10, f"{name} differs by {apart:.1e}"
        say(f"{name}: {'equal to the last bit' if apart == 0 else 'equal to 1e-10'}")
    assert losses["our save"] == reference
metrics.exact(float64_losses=losses.get("never interrupted"))
metrics.close(float64_losses_close=losses.get("never interrupted"))

# %%
# %%ranks
if rank == 0:
    pairs = zip(losses["DCP, half of the ranks"], losses["never interrupted"], strict=True)
    say("(3) minus (1), step by step: " + " ".join(f"{abs(a - b):.0e}" for a, b in pairs))

# %% [markdown]
# Two warnings. DCP's `.metadata` is a pickle, and its reader runs what is in it: load only what you trust. And a
# byte that flipped in a shard loads without a word. `scripts/train.py` uses DCP for the tensors, with what you have
# just built around it: manifest, sha256, rename, and an unpickler with a list of what may appear
# (`manyhands.checkpoints.checkpoints`).
#
# ### Save while training goes on (MORE, 4 min)
#
# `dcp.async_save` copies the tensors into the CPU's memory and returns; a thread writes them. Training stands still
# for the copy only. It needs a process group that works on the CPU: with `init_process_group("nccl")` it refuses,
# with `cpu:gloo,cuda:nccl`, as `join()` makes it, all is well.
#
# **Predict.** How much shorter is the stand-still, for a few MiB per rank, on this machine?
#
# <details><summary>Answer</summary>
#
# As many times as memory is faster than the disk, at best. For small states most of a plain save is planning, a few
# messages between the ranks; the thread does that too. But on a laptop it takes its time from the same cores.
# Nothing is free: it is only moved.
#
# </details>

# %%
# %%ranks
largest = group_of[max(group_of)]  # up to four ranks
if rank < max(group_of):
    mesh = DeviceMesh.from_group(largest, "cpu")
    mine_p = torch.randn(state_mib * 2**18)  # 4 bytes each
    state = {"row": DTensor.from_local(mine_p, mesh, [Shard(0)], run_check=False)}
    dcp.save(state, checkpoint_id=folder / "timed" / "warm-up", process_group=largest)
    dcp.async_save(state, checkpoint_id=folder / "timed" / "warm-up, async", process_group=largest).result()
    stands_s = {}
    for kind, call in {"save": dcp.save, "async_save": dcp.async_save}.items():
        dist.barrier(largest)
        begin = time.perf_counter()
        future = call(state, checkpoint_id=folder / "timed" / kind, process_group=largest)
        stands_s[kind] = time.perf_counter() - begin  # from here on training would go on
        if kind == "async_save":
            mine_p.fill_(0.0)  # it may be changed at once: what is written is the copy
            future.result()  # before the next save, and before the end
    if rank == 0:
        say(", ".join(f"{kind}: training stands still for {1e3 * s:.0f} ms" for kind, s in stands_s.items()))
        shown = {kind: (1e3 * s, "ms", f"stands_ms.{kind}") for kind, s in stands_s.items()}
        say(recorded_runs.beside("11_when_it_breaks", shown))
        metrics.measured(stands_ms={kind: 1e3 * s for kind, s in stands_s.items()})

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: DCP</summary>
#
# *Say:* an asynchronous save makes the interval of the section after next shorter,
# because C gets smaller. *Usual mistake:* changing the weights between `async_save` and its staging with a
# zero-copy stager; forgetting that the last one must be waited for.
#
# </details>

# %% [markdown]
# ## Experiment: kill a rank (CORE, 6 min)
#
# **Why.** A restart that was never tried does not work. So: real processes, `kill -9`, and the loss curve as the
# judge.
#
# ![A run saves at steps 6 and 12; it is killed after step 14, starts again from step 12, and repeats two
# steps](../assets/11_restart.svg)
#
# This is the program: go on from the newest checkpoint, train, save every `every` steps, write each loss to a file.
# If a signal asked *any* rank to leave, **all** ranks hear of it in a small all-reduce, save after the same step, and
# say so in `requeue.json`.

# %%
# %%ranks
catch_up(globals(), "small_gpt", "windows", "Trainee", "train_step", "adam")
catch_up(globals(), "write", "save", "restore", "damaged", "newest")


# %%
# %%ranks
def train(folder, until, every, told=(), pace_s=0.0, group=None):
    """Train a Trainee to step `until`. `told` fills when a signal asks this rank to leave. All ranks call it."""
    trainee = Trainee(group)
    path = newest(folder, trainee)
    if path is not None:
        restore(path, trainee)
    here = [None] * trainee.n
    dist.all_gather_object(here, os.getpid(), group=group)
    while trainee.step < until:
        loss = train_step(trainee)
        stop = torch.tensor(len(told))
        dist.all_reduce(stop, group=group)  # if a signal asked any rank to leave, all hear of it
        if trainee.rank == 0:
            with open(folder / "losses.jsonl", "a") as file:
                file.write(json.dumps({"step": trainee.step, "loss": loss, "processes": here}) + "\n")
        if stop or trainee.step % every == 0:
            save(folder, trainee)
        if stop:
            if trainee.rank == 0:
                (folder / "requeue.json").write_text(json.dumps({"step": trainee.step}))
            return
        time.sleep(pace_s)  # so that somebody can watch


# %% [markdown]
# What the run has said so far is read from its file, as you would with `tail -f`.


# %%
# %%ranks
def heard_so_far(folder):
    """The lines of losses.jsonl: [{"step", "loss", "processes"}]"""
    file = folder / "losses.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


# %% [markdown]
# First the run that nobody interrupts, on the first two ranks of this lesson (or the only one):

# %%
# %%ranks
n_children, every = min(2, world_size), max(2, steps // 4)
if rank == 0:
    for name in ("undisturbed", "killed"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
dist.barrier()
if rank < n_children:
    train(folder / "undisturbed", steps, every, group=group_of[n_children])
dist.barrier()
if rank == 0:
    undisturbed = {line["step"]: line["loss"] for line in heard_so_far(folder / "undisturbed")}
    say(f"{len(undisturbed)} steps, loss {undisturbed[1]:.3f} -> {undisturbed[steps]:.3f}")

# %% [markdown]
# Then the same in processes of their own, that torchrun starts. `catch_up` takes the functions from this lesson's
# script. (If you changed one of them in the notebook, save the notebook first.)

# %%
# %%ranks
PROGRAM = """
import hashlib, json, os, signal, sys, time
from pathlib import Path
import safetensors.torch, torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands import catch_up, join, leave, say
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.gpt.model import GPT, GPTConfig

ranks = join(name="11_when_it_breaks", device="cpu")
corpus, told = load_corpus(ranks), []
signal.signal(signal.SIGTERM, lambda *_: told.append("SIGTERM"))
catch_up(globals(), "small_gpt", "windows", "Trainee", "train_step", "adam")
catch_up(globals(), "write", "save", "restore", "damaged", "newest", "train")
train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), told, pace_s=0.1)
leave()
"""
if rank == 0:
    program = folder / "killed" / "program.py"
    program.write_text(PROGRAM)

# %% [markdown]
# `torchrun --max-restarts 1`: when a rank dies, torchrun ends the others and starts **all** of them again, once.
# (All: the survivors sit in a broken group, and their state is some steps ahead of the checkpoint.) Rank 0 of the
# lesson is the executioner; the others wait.
#
# **Predict.** The last rank is killed with signal 9 when the losses of a few steps after a checkpoint have been
# written. Which ranks lose work, and how much?
#
# <details><summary>Answer</summary>
#
# All lose the steps since the last checkpoint; at most `every` of them, half of that on average. With `kill -9`
# nobody can save a last time: a process cannot catch signal 9.
#
# </details>

# %%
# %%ranks --timeout 120
from manyhands.launching.torchrun_child import Torchrun

where = folder / "killed"
if rank == 0 and failures != "none":
    given = (program, where, steps, every)
    with Torchrun(*given, n_ranks=n_children, restarts=1, log=where / "torchrun.txt") as child:
        child.until(lambda: any(line["step"] >= every + 2 for line in heard_so_far(where)))
        last = heard_so_far(where)[-1]
        os.kill(last["processes"][-1], signal.SIGKILL)
        say(f"rank {n_children - 1}, process {last['processes'][-1]}, was killed after step {last['step']}")
        child.until(lambda: heard_so_far(where)[-1]["processes"] != last["processes"])
        say(f"torchrun started all ranks again; they went on with step {heard_so_far(where)[-1]['step']}")
        if failures == "two":
            child.until(lambda: heard_so_far(where)[-1]["step"] >= 2 * every + 1)
            child.signal(signal.SIGTERM)  # what a scheduler sends first when it wants the node back
        status = child.wait()
        say(f"torchrun ended with status {status}; requeue.json: {(where / 'requeue.json').exists()}")
dist.barrier()

# %% [markdown]
# After the kill came the **pre-emption**: SIGTERM to torchrun, which passes it on to its ranks and waits 30 s for
# them. The ranks finish their step, agree, save, and leave. A launcher turns every end into a status of its own, so
# the program says in a *file* that it was not done. A job script that finds it puts the job back into the queue,
# and the next start is this one:

# %%
# %%ranks --timeout 120
if rank == 0 and (where / "requeue.json").exists():
    asked = json.loads((where / "requeue.json").read_text())
    (where / "requeue.json").unlink()  # this start is the answer to it
    with Torchrun(*given, n_ranks=n_children, log=where / "torchrun.txt") as child:
        status = child.wait()
    say(f"stopped and saved after step {asked['step']}, started again, ended with status {status}")
dist.barrier()

# %% [markdown]
# What you should see: one grey line, the run that nobody touched, and on top of it the lives of the other one.
# Where a life was killed, the next one **repeats** some steps: they carry two marks, one inside the other. Below,
# the residual: resumed minus undisturbed. It should be zero; not small, zero.

# %%
# %%ranks
if rank == 0:
    lines = heard_so_far(where)
    lives = [line["processes"] for line in lines]
    numbers = {tuple(life): i for i, life in enumerate(dict.fromkeys(map(tuple, lives)))}
    figure = Figure(figsize=(8, 4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    above.plot(list(undisturbed), list(undisturbed.values()), color=FAINT, lw=6, label="undisturbed")
    for life, i in numbers.items():
        own = [line for line in lines if tuple(line["processes"]) == life]
        at = [line["step"] for line in own]
        residual = [line["loss"] - undisturbed[line["step"]] for line in own]
        style = {**ALTERNATIVES[i % 3], "ms": (13, 10, 8)[i % 3], "mfc": "none", "lw": 1.5}
        above.plot(at, [line["loss"] for line in own], label=f"life {i + 1}", **style)
        below.plot(at, residual, **style)
    above.set(ylabel="loss", title=f"killed and resumed on {n_children} ranks")
    below.set(xlabel="step", ylabel="residual", ylim=(-1e-6, 1e-6))
    above.legend()
    show(figure, "killed_run", "the losses of all lives lie on the undisturbed curve; the residual is zero")

# %%
# %%ranks
if rank == 0 and lines:
    differing = [line["step"] for line in lines if line["loss"] != undisturbed[line["step"]]]
    repeated = len(lines) - len({line["step"] for line in lines})
    say(f"{len(lines)} losses of {len(numbers)} lives, {repeated} of them repeated")
    say(f"different from the undisturbed run: {len(differing)}")
    assert not differing and {line["step"] for line in lines} == set(undisturbed)
metrics.exact(undisturbed=undisturbed if rank == 0 else None)

# %% [markdown]
# **The residual** is zero because everything a step reads was in the checkpoint, and because the order of every
# addition is the same on the same number of ranks. Give up one of the two and it is not: without the random state
# the next masks are others; on another number of ranks it is rounding, as above. On GPUs it need not be zero with
# the same n: some kernels add in an order that changes from run to run.
# `torch.use_deterministic_algorithms(True)` with `CUBLAS_WORKSPACE_CONFIG=:4096:8` forbids it in torch's own; what
# NCCL does is another matter.
#
# One more: the *newest* checkpoint of that run is now cut in half. Which one is used, and does the curve still fit?

# %%
# %%ranks
if rank < n_children:
    if rank == 0:
        for path in sorted(where.glob("step-????"))[-1:]:
            shard = path / "rank-0.safetensors"
            os.truncate(shard, shard.stat().st_size // 2)
    dist.barrier(group_of[n_children])
    trainee = Trainee(group_of[n_children])
    path = newest(where, trainee)
    if path is not None:
        restore(path, trainee)
        loss = train_step(trainee)
        if rank == 0:
            same = loss == undisturbed[trainee.step]
            say(f"{path.name} was used, and step {trainee.step} has the same loss, to the last bit: {same}")
dist.barrier()

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the experiment</summary>
#
# Let them type the kill themselves in a terminal if there is time:
# `failures` "none", `pace_s=1` in `PROGRAM`, then
# `python -m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1 program.py . 24 6` in the folder
# `killed` of this run, and `kill -9` one of the processes of `losses.jsonl`. *Usual mistake:* believing that
# torchrun restarts the dead rank only. *Ask:* "what happens at the second kill?" (`--max-restarts 1` is used up:
# torchrun gives up, and the job script's turn has come.)
#
# </details>

# %% [markdown]
# ## How often should one save? (CORE, 3 min)
#
# **Why.** Save too often, and you do nothing else; too rarely, and each failure throws away hours. In between is a
# best interval, and it is a square root.
#
# Let C be the cost of one save and M the [**MTBF**](../assets/glossary.md#mtbf), the mean time between failures.
# Saving after every τ seconds of work costs about C/τ of the time (C/(τ+C), to be exact). A failure loses τ/2 on
# average, so τ/(2M) of the time. The sum is least where both are equal: τ = √(2·C·M) (Young 1974; Daly 2006 has the
# next terms).
#
# **Predict.** Llama 3's report counts 419 unexpected interruptions in 54 days on up to 16,384 GPUs. With saves of
# one minute: how often would you save, and what share of the time is lost at best?
#
# <details><summary>Answer</summary>
#
# M = 54·24/419 = 3.1 hours. τ = √(2·60·11,135) = 1,156 s, 19 minutes. Lost: C/τ + τ/(2M) = 5.2 % + 5.2 %, about 10
# %. To halve that you need saves four times as cheap (asynchronous), or a quarter of the failures.
#
# </details>


# %% tags=["nbval-check-output"]
# %%ranks
def best_interval(save_s, mtbf_s):
    return math.sqrt(2 * save_s * mtbf_s)


def lost_share(interval_s, save_s, mtbf_s):
    return save_s / interval_s + interval_s / (2 * mtbf_s)


mtbf_s, save_s = 54 * 24 * 3600 / 419, 60.0
best_s = best_interval(save_s, mtbf_s)
if rank == 0:
    say(f"MTBF {mtbf_s / 3600:.1f} h, so save every {best_s / 60:.0f} min")
    say(f"lost: {100 * lost_share(best_s, save_s, mtbf_s):.1f} % of the time")

# %% [markdown]
# Is it so? Let failures come at random, as they do, and count. Each interval is tried 4,000 times; the ranks share
# them, each with its own seed.


# %%
# %%ranks
def simulate(interval_s, save_s, mtbf_s, num_intervals, luck):
    """Seconds that `num_intervals` intervals of work take, each repeated until no failure strikes it."""
    took_s = 0.0
    for _ in range(num_intervals):
        while (failure_s := luck.expovariate(1 / mtbf_s)) < interval_s + save_s:
            took_s += failure_s  # all of this was in vain
        took_s += interval_s + save_s
    return took_s


luck, share = random.Random(rank), 4000 // world_size
intervals_s = [60 * minutes for minutes in (3, 5, 8, 12, 19, 30, 48, 75, 120)]
took_s = torch.tensor([simulate(i, save_s, mtbf_s, share, luck) for i in intervals_s], dtype=torch.float64)
dist.all_reduce(took_s)  # all ranks
work_s = torch.tensor(intervals_s, dtype=torch.float64) * share * world_size
lost = (1 - work_s / took_s).tolist()

# %%
# %%ranks
if rank == 0:
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    formula = [lost_share(i, save_s, mtbf_s) for i in intervals_s]
    whole = [1 - i / (mtbf_s * math.expm1((i + save_s) / mtbf_s)) for i in intervals_s]
    minutes = [i / 60 for i in intervals_s]
    axes.plot(minutes, [100 * f for f in formula], **PREDICTED, label="C/τ + τ/(2M)")
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
    for i in (0, 3, 4, 5, 8):
        say(f"{minutes[i]:3.0f} min: formula {100 * formula[i]:.1f} %, exact {100 * whole[i]:.1f} % lost")
metrics.exact(lost=lost)

# %% [markdown]
# **The residual.** Around the floor the simple formula is good to a point or so, and the floor is *flat*: 12
# minutes or 30 cost only a point more than 19. So do not tune the interval; get its order of magnitude right. Far
# from the floor the formula promises too much loss on both sides. At 3 minutes 34 % against 26 %: a save is C of
# every τ + C, not of every τ. At two hours 33 % against 30 %: a failure cuts off less than half of a long interval
# on average, because the first failure to come counts, and it comes early.
#
# What is *not* in it: the time from a failure to the first step of the next life, which is queueing, starting,
# compiling and reading. Measure yours. If it is 20 minutes and you are near the floor, making it 10 helps more than
# any interval.

# %% [markdown]
# ## Exercises (MORE, 10 min)
#
# Exercises 1 and 2 were the culprit and the damaged checkpoint.
#
# ### Exercise 3: nothing forgotten
#
# A training loop with everything that real ones have: a shuffled order that is drawn anew each epoch, dropout,
# AdamW, a learning rate that falls with the step. Its parts:
#
# | part | what it is |
# |---|---|
# | `loop.model`, `loop.optimizer` | as usual, with their `state_dict()` |
# | `loop.order`, `loop.position` | this epoch's order of the rows, a tensor, and how many of them have been used |
# | `loop.shuffle` | the `torch.Generator` that draws the next epoch's order |
# | `loop.step` | steps made; the learning rate follows it |
#
# Dropout draws from torch's global generator. Write `state_of(loop)`, a dict of tensors, numbers and dicts of them,
# and `go_on(loop, state)`, which puts it into a *fresh* loop, so that it goes on as if nothing had happened. The
# check saves your state to a file, in the middle of an epoch, and reads it with `weights_only=True`.


# %%
# %%ranks
def state_of(loop):
    raise NotImplementedError  # your turn


def go_on(loop, state):
    raise NotImplementedError  # your turn


checks.resume((state_of, go_on), ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 3
def state_of(loop):
    return {
        "model": loop.model.state_dict(),
        "optimizer": loop.optimizer.state_dict(),
        "order": loop.order,
        "position": loop.position,
        "step": loop.step,
        "shuffle": loop.shuffle.get_state(),
        "random": torch.get_rng_state(),
    }


def go_on(loop, state):
    loop.model.load_state_dict(state["model"])
    loop.optimizer.load_state_dict(state["optimizer"])
    loop.order, loop.position, loop.step = state["order"], state["position"], state["step"]
    loop.shuffle.set_state(state["shuffle"])
    torch.set_rng_state(state["random"])


checks.resume((state_of, go_on), ranks, solution=True)

# %% [markdown]
# ## A bug from the zoo (CORE, 2 min)
#
# A workshop's trainer (ours is a copy in spirit, not in words) shards the optimizer over the ranks, and saves as
# one always did. It runs, it prints "saved", it resumes. **What is wrong, and which number of this lesson shows
# it?**

# %%
# %%ranks
catch_up(globals(), "small_gpt", "windows", "Trainee", "train_step", "adam")
catch_up(globals(), "write")


# %%
# %%ranks
def save_as_always(folder, trainee):
    if trainee.rank == 0:
        folder.mkdir(exist_ok=True)
        content = trainee.state | {"all weights": trainee.row_P, "random": torch.get_rng_state()}
        content = safetensors.torch.save({name: tensor.clone() for name, tensor in content.items()})
        write(folder / "checkpoint.safetensors", content)
        say("saved")


trainee = Trainee()
for _ in range(8):
    train_step(trainee)
save_as_always(folder / "zoo", trainee)
dist.barrier()

# %% [markdown]
# Measure: how many bytes should a checkpoint have whose state is P weights and two rows of P for Adam?

# %%
# %%ranks
if rank == 0:
    has = (folder / "zoo" / "checkpoint.safetensors").stat().st_size
    say(f"{has:,} bytes, expected {12 * trainee.num_params + 5056:,} or more")
saved = safetensors.torch.load((folder / "zoo" / "checkpoint.safetensors").read_bytes())
lacking = not torch.equal(saved["square"], trainee.state["square"])
say(f"Adam's memory of my part is lost: {lacking}")

# %% [markdown]
# **Predict.** Go on from that file, on every rank. Is there an error? Does the loss curve show that something is
# wrong?

# %%
# %%ranks
went_on, resumed = [train_step(trainee) for _ in range(6)], Trainee()
resumed.row_P.copy_(saved["all weights"])  # the weights are right on every rank
for name in ("mean", "square"):
    resumed.state[name].copy_(saved[name])  # rank 0's part, on every rank
resumed.step = 8
torch.set_rng_state(saved["random"])  # also rank 0's
after = [train_step(resumed) for _ in range(6)]
if rank == 0:
    for name, curve in {"went on": went_on, "resumed": after}.items():
        say(f"{name} {' '.join(f'{loss:.3f}' for loss in curve)}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# `if rank == 0` around the save, as in a trainer of another workshop. The weights are whole on every rank, so the
# model is there and samples look fine. But Adam's memory is sharded: rank 0 saved *its* part, and the parts of the
# others are lost. After a resume every rank loads rank 0's part as its own. No error: the shapes fit. On four ranks
# the losses differ by about 0.02 at most. On two, one step differs by 0.24, and there the *broken* run has the lower
# loss. So no curve shows it. Bytes tell: a checkpoint of sharded state is as large as the whole state, or something
# is missing. The cure is `save` above: **all ranks save.**
#
# Hugging Face's `Trainer` saved only rank 0's optimizer state under FSDP:
# [transformers#23034](https://github.com/huggingface/transformers/issues/23034), mended in
# [#23111](https://github.com/huggingface/transformers/pull/23111).
#
# </details>
#
# **Mend it**, and measure again: the same trainee, saved by all ranks.

# %%
# %%ranks
catch_up(globals(), "write", "save")
path = save(folder / "zoo" / "mended", trainee)  # all ranks
if rank == 0:
    say(f"all ranks save: {sum(file.stat().st_size for file in path.glob('rank-*')):,} bytes")

# %% [markdown]
# ### One more from the same trainer (MORE, 2 min)
#
# It saves below the folder of the run, and looks for a checkpoint below the folder of the *experiment*:

# %%
# %%ranks
catch_up(globals(), "small_gpt", "windows", "Trainee", "train_step", "adam")
catch_up(globals(), "write", "save", "restore", "damaged", "newest")


# %%
# %%ranks
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
    guessing = math.log(len(corpus.symbols))
    say(f"loss before the restart {before[-1]:.2f}, after it {after:.2f}; guessing gives {guessing:.2f}")

# %% [markdown]
# The first loss is that of a model that knows nothing, at step 0, and nobody was told. *Resume if there is
# something* is what one wants on the first start and what one must not have on the second. So a restart should be
# able to say **must**: `scripts/train.py` has `--checkpoint.resume must`, which refuses to begin anew, and every
# resumed run says in its first lines from where.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# Ask for the bytes *before* the cell that measures. Then: "how large is your last
# checkpoint, and how large should it be?" People look it up, and now and then somebody goes pale.
#
# </details>

# %% [markdown]
# ## On the cluster
#
# ```bash
# sbatch jobs/train.slurm --preset gpt2 --parallel.strategy fsdp   # pre-empted, it saves and queues again
# python -m torch.distributed.run --standalone --nproc-per-node 4 --max-restarts 3 --shutdown-timeout 110 \
#     --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
#     scripts/train.py --checkpoint.folder outputs/mine --checkpoint.every 500 --train.stall-s 300
# ```
#
# ![The scheduler sends USR1 two minutes before the end; the ranks finish their step, save, write requeue.json and leave; the job script
# puts the job back into the queue; what still lives at the end is killed](../assets/11_preemption.svg)
#
# **Who sends what.** [Pre-emption](../assets/glossary.md#pre-emption) and the end of the walltime look alike: a
# signal, some time, signal 9. At the end of the walltime `#SBATCH --signal=B:USR1@120` makes Slurm send SIGUSR1 to
# the **b**atch script 120 s before; `B:TERM@120` works the same. On pre-emption Slurm's manual speaks of SIGTERM.
# Whether it reaches the batch script, and how long you have (`GraceTime`, perhaps nothing), may differ from site to
# site: ask. The script must pass the signal on (`jobs/train.slurm` does so with both): `trap`, the program in the
# background, and `wait` (bash runs no trap while a program is in the foreground).
#
# **What torchrun makes of it.** SIGTERM it passes on to its ranks, and kills what is left after **30 s** (newer
# ones: `--shutdown-timeout`), so a save must be shorter than that. SIGUSR1 it passes on only if
# `--signals-to-handle` names it (torch 2.13 has that flag). Without, SIGUSR1 *ends torchrun at once*, and its ranks
# live on with nobody to look after them.
#
# **What changes on GPUs.** A NCCL time-out ends the process. Then the flight recorder is what is left: set
# `TORCH_NCCL_DUMP_ON_TIMEOUT=1` (newer torch does it by itself) and `TORCH_FR_DUMP_TEMP_FILE=/shared/fr_` (each
# rank's number is added), and compare with `torchfrtrace` (it reads pickles: your own files only). States are real
# there, and time-outs are 10 minutes. Dropout draws from the GPU's generator: save `torch.cuda.get_rng_state()`
# too. Async checkpoints need `cpu:gloo,cuda:nccl`. Checkpoints need a folder that all nodes see.
#
# **What to look for** in the output: "resumed from step-..." in the first lines of the second life; the same loss,
# at the same step, in both; and the size of the checkpoint.

# %% [markdown]
# ## Recap
#
# 1. In a hang the ranks that complain are the healthy ones: compare, per group and call number, who did *not* call.
# 2. A straggler waits least; NaN must be looked for before averaging; a *large* number in an out-of-memory message is a shape.
# 3. All ranks save, to a name that nobody reads; a manifest, then one rename. What does not match its sha256 is passed over, by name.
# 4. A resumed run is the same run, bit for bit on the same number of ranks: weights, optimizer, order, random numbers, step.
# 5. Save every √(2·C·MTBF); on a signal finish the step, agree, save, say so in a file, and let the queue do the rest.
#
# ## Further reading
#
# - Llama team 2024, [The Llama 3 herd of models](https://arxiv.org/abs/2407.21783), section 3.3.4: what broke in 54 days, by cause.
# - Young 1974, *A first order approximation to the optimum checkpoint interval*, and Daly 2006, *A higher order estimate of the
#   optimum checkpoint interval for restart dumps*: the square root, and what comes after it.
# - PyTorch, [Flight recorder](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html) and
#   [Distributed checkpoint](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html).
# - Slurm, [sbatch](https://slurm.schedmd.com/sbatch.html): `--signal`, `--requeue`.

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
