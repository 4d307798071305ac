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
# **45 minutes** for the sections marked CORE, 86 with those marked MORE.
#
# After this lesson **you can**
# - find the rank that hangs, and the call that it did not make;
# - tell a slow rank from the ranks that wait for it, and a rank that makes NaN from the ranks that receive it;
# - write a checkpoint that is whole or not there;
# - resume a killed run bit for bit, and on a different number of ranks;
# - survive pre-emption and a dead node, and say how often to save.
#
# **You need** the [all-reduce](../assets/glossary.md#all-reduce) ([lesson 02](02_collectives.ipynb)) and [data
# parallel](../assets/glossary.md#data-parallel) training ([lesson 03](03_data_parallel.ipynb)). From lesson 06: under
# *ZeRO* a rank keeps 1/n of the optimizer's memory and updates 1/n of the weights.
#
# **New here:** [flight recorder](../assets/glossary.md#flight-recorder),
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

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Each heading says its minutes. The three builds take about three minutes each; walk around while people write.
#
# *Say:* at 16,000 GPUs something breaks every three hours. The question is never whether, only what it costs you.
# "Find it in a minute, lose ten minutes of work, and go on by itself" is the standard that this lesson reaches.
#
# *Three usual mistakes:* looking at the rank that reports the time-out (it is the healthy one, it waited);
# believing that a checkpoint exists because a file does; testing saving but never resuming.
#
# *When late:* open the solutions of builds A and B at once; keep build C, the killed run and its curve.
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
# ## Start (CORE, 2 min)
#
# The first cell starts the ranks behind this notebook; a cell that begins with `%%ranks` runs on all of them. The failures
# below are real ones, on real processes. Each takes seconds and leaves nothing behind.
#
# In a **Build** the key lines are yours, and the check tells you what is wrong. Short of time? Leave a build
# as it is: the check puts the lesson's own lines in its place. Each section runs after only the cells of this one.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("11_when_it_breaks", globals())

# %%
# %%ranks
import math

import torch
import torch.distributed as dist
from manyhands import Metrics, catch_up, fingerprint, join, leave, say, show
from manyhands.checks import when_it_breaks as checks

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
guilty = min(2, world_size - 1)  # the rank at fault in this lesson
least = math.lcm(12, world_size)  # it splits over all ranks, and over the first two, three and four
global_batch = -(-24 // least) * least  # 24 sequences, or the next number that does

# %% [markdown]
# All sections share the text, a folder that all ranks see, and **groups** of the first one, two, three and four ranks. What
# fails here fails on the CPU, also on a machine with GPUs: a NCCL call that times out takes its process down.

# %%
# %%ranks
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.gpt.model import GPT, GPTConfig
from manyhands.launch.run_folder import run_folder

corpus = load_corpus(ranks)
metrics = Metrics(ranks, corpus, {"steps": steps, "failures": failures})
agreed = [run_folder(ranks) if rank == 0 else None]
dist.broadcast_object_list(agreed)  # all ranks: rank 0 says where
folder = agreed[0]
group_of = {n: dist.new_group(range(n), backend="gloo") for n in (1, 2, 3, 4) if n <= world_size}

# %% [markdown]
# ## Warm-up: four numbers (CORE, 2 min)
#
# Four ranks average gradients, and nothing has been printed for ten minutes. You ask each rank how many all-reduces it has
# *called* so far, and hear: **12, 12, 11, 12**.
#
# **Predict.** Which rank is broken? Which ranks will complain? What does the process table show of all four?
#
# <details><summary>Answer</summary>
#
# Rank 2: the others are *in* number 12, and it never came. The three healthy ranks will complain, because only a rank that
# waits can lose patience. The table shows four living processes. Only the number of calls tells you where to look.
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
# ## A hang, and the call that was not made (CORE, 7 min)
#
# **Why.** A crash tells you a line. A hang tells you nothing: one rank takes a different branch, and all others wait in
# the next collective until their group's [**time-out**](../assets/glossary.md#time-out), 30 minutes with gloo and 10 with
# NCCL. Here it is short. One rank leaves the loop one step early (a classic: files that do not split evenly).


# %%
# %%ranks
import time
from datetime import timedelta


def train_together(group, num_steps):
    """A training loop as the network sees it: one all-reduce per step."""
    for _ in range(num_steps):
        gradient = torch.ones(1000)
        dist.all_reduce(gradient, group=group)


dist.barrier()  # all ranks come at the same time
group = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s), group_desc="training")
begin, heard = time.perf_counter(), "nothing: it was done, and left"
try:
    train_together(group, num_steps=5 if rank == guilty else 6)
except RuntimeError as error:  # on gloo this is the time-out, or a neighbour that hung up
    heard = str(error).split("] ")[-1]
say(f"after {time.perf_counter() - begin:.0f} s I heard: {heard}")

# %% [markdown]
# Ranks that did everything right raise errors; the rank at fault reports nothing.
#
# ### The flight recorder
#
# `torch.distributed` keeps the last calls of each rank in a ring buffer, the
# [**flight recorder**](../assets/glossary.md#flight-recorder). In torch 2.13 it is on and holds 2,000 calls (in older torch set
# `TORCH_NCCL_TRACE_BUFFER_SIZE`). The function that returns it as JSON is private, so look for it before you call it:


# %%
# %%ranks
import json
import math


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


records = [None] * world_size
dist.all_gather_object(records, flight_record(["training"]))  # all ranks, in the default group, which still works
if rank == 0:
    for r, record in enumerate(records):
        say(f"rank {r} called: {' '.join(f'{call} {number}' for _, number, call, _ in record[-2:])}")

# %% [markdown]
# An entry has a `state`, too, but on gloo it says "scheduled" forever. So one rank's record cannot tell you what hangs. The
# comparison can: **same group, same number, every member.**


# %%
# %%ranks
def calls_in(group, records):
    """For each record what its rank called in this group: {number: call}."""
    return [{number: call for name, number, call, _ in record if name == group} for record in records]


def usual(made):
    """The call that most of these ranks made; None stands for a rank that made none."""
    return max(set(made) - {None}, key=made.count)


# %% [markdown]
# ### Build A: the call that was not made
#
# Write `missing_call(calls)`. `calls` has a dictionary `{number: call}` for each rank of one group. Return `(number, ranks)`:
# the first number at which the ranks differ, and the list of those that did not make the call that most of them made. Return
# None if they never differ.
#
# A rank may be missing, or may have made a *different* call. And a buffer keeps only the last calls, so begin where **every**
# buffer has begun. (Of a rank that called nothing, `{}`, all calls are missing.)


# %%
# %%ranks
def missing_call(calls):
    """(number, ranks) of the first call that not all ranks made alike, or None."""
    raise NotImplementedError  # your turn


checks.missing_call(missing_call, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution A</summary>
#
# ```python
# def missing_call(calls):
#     """(number, ranks) of the first call that not all ranks made alike, or None."""
#     begin = max(min(made, default=1) for made in calls)
#     for number in range(begin, max(max(made, default=0) for made in calls) + 1):
#         made = [of_rank.get(number) for of_rank in calls]
#         odd = [r for r, call in enumerate(made) if call != usual(made)]
#         if odd:
#             return number, odd
# ```
#
# </details>

# %% [markdown]
# And now on the hang of a minute ago. (On gloo only that group is lost. With NCCL the watchdog ends the process.)

# %%
# %%ranks
found = missing_call(calls_in("training", records)) if any(records) else None
if rank == 0:
    say("nobody is missing" if found is None else f"call {found[0]} was not made by ranks {found[1]}")

# %% [markdown]
#
# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the hang</summary>
#
# Let the errors stand on the screen and ask who is at fault; most rooms point at the rank with the longest message.
# *Usual mistakes:* raising the time-out ("it needs longer"); `if rank == 0: evaluate()` with a collective inside; reading
# `state`. The course's own trainer compares by itself: a rank that hangs in `scripts/train.py` is named in a sentence after
# `--train.stall-s` seconds (module `manyhands.train.stalls`).
#
# </details>

# %% [markdown]
# ### Exercise 1: three hangs, find the culprit (MORE, 7 min)
#
# With several groups, a rank that is missing in one may itself be waiting in another. Three hangs were recorded on four
# ranks, each with a different mistake. You get `records`, for each rank a list of `(group, number, call, length)`, and
# `members`, the ranks of each group. Write `culprit(records, members)`, which returns `(rank, group, number)`: who did not
# make which call.
#
# **The culprit is missing somewhere and waits nowhere.** It may be missing in two groups, x and y. Then return its *first*
# fault. How to tell: if a rank that waits for it in x is thereby missing in y too, then y stands because of x, and x came
# first. (In each of these hangs exactly one rank is at fault.)
#
# `missing_call` solves hangs 0 and 1, which have one group. The check begins with the three; then it tries hangs of its own,
# with different groups, some on five ranks.

# %%
# %%ranks
from manyhands.launch import recorded_runs

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
# ## A straggler: who is slow, and who only waits (CORE, 3 min)
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
# nobody. Waiting shows it upside down: all wait, except the straggler.
#
# </details>
#
# On the **virtual network** (real messages, computed time, so that it repeats exactly) one rank is slow in steps 4 to 7:

# %%
# %%ranks
from manyhands.plots.heat_map import heat_maps
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
    figure = heat_maps({title: steps_s[kind] for kind, title in titles.items()}, "s", virtual=True)
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
# ### The same with real clocks (MORE, 2 min)
#
# Real ranks, real seconds: one rank's "data loader" needs 20 ms more in steps 4 to 7 (a `sleep`). One clock before the
# collective, one in it. Note the barrier before the loop: without a common start each clock would also measure what came
# before.


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
    figure = heat_maps({"before the all-reduce": before_s, "inside the all-reduce": inside_s}, "s")
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
# A clock *inside* the all-reduce sees waiting and sending together, so it is never quite zero. On a machine with fewer cores
# than ranks, single cells are dark for no other reason than that: look at rows.

# %% [markdown]
# ## NaN: which rank, and in which step (CORE, 3 min)
#
# **Why.** NaN plus anything is NaN. One rank that makes one NaN gives it to all in the next all-reduce, and by the time
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
# **Predict.** It happens to one weight of one rank, before step 3. In which step, and on which ranks, is the *own* gradient
# not finite? And the averaged one?
#
# <details><summary>Answer</summary>
#
# The own gradient: in step 3, on that rank only. (10³⁶ squared is infinite in float32.) The averaged one: in step 3, on all.
# So look **after backward and before the all-reduce**; afterwards it is too late.
#
# </details>


# %%
# %%ranks
def small_gpt(dropout=0.0):
    torch.manual_seed(1337)  # the same first weights on all ranks
    size = {"block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 64, "dropout": dropout}
    return GPT(GPTConfig(vocab_size=len(corpus.vocab), **size))


def gradients(model, step):
    """This rank's own gradients of its share of global batch `step`."""
    model.zero_grad()
    model(*get_batch(corpus.train_ids, step, global_batch, 32, rank, world_size, seed=1))[1].backward()
    return [p.grad for p in model.parameters()]


def who_is_not_finite(tensors):
    """The ranks whose tensors hold NaN or infinity. All ranks call it."""
    fine = [None] * world_size
    dist.all_gather_object(fine, all(tensor.isfinite().all().item() for tensor in tensors))
    return [r for r in range(world_size) if not fine[r]]


# %% tags=["nbval-check-output"]
# %%ranks
model = small_gpt()
for step in range(5):
    if rank == guilty and step == 3:
        flip_bit(model.blocks[1].mlp.up.weight, 100)
    own = gradients(model, step)
    before = who_is_not_finite(own)
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.data -= 0.1 * p.grad / world_size
    after = who_is_not_finite(own)  # the same tensors, now averaged
    if rank == 0 and after:
        say(f"step {step}: not finite before the all-reduce on ranks {before}, after it on {after}")

# %% [markdown]
# One step is all the evidence there is. So look in each step, before averaging: one flag per rank. And never skip NaN on one
# rank alone: without its all-reduce the others hang, without its update the replicas part. Skip the step on **all** ranks, or
# stop before such weights are saved.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: NaN</summary>
#
# *Ask:* "a colleague sets NaN gradients to zero on each rank and trains on. What is wrong?" (It works, and hides a broken GPU
# for weeks.) *Usual mistake:* testing the loss after it was averaged.
#
# </details>

# %% [markdown]
# ### Which layer? (MORE, 2 min)
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
batch = get_batch(corpus.train_ids, 3, global_batch, 32, rank, world_size, seed=1)
where, largest = (
    first_not_finite(model, *batch),
    max(model.named_parameters(), key=lambda p: p[1].abs().max()),
)
if where:
    say(f"the first output that is not finite is that of {where!r}")
    say(f"the largest weight, {largest[1].abs().max().item():.1e}, is in {largest[0]!r}")

# %% [markdown]
# `norm` is the model's last LayerNorm, and innocent. The huge weight's own output is still finite, about 10³⁶; it is a *later*
# operation, the LayerNorm that squares it, that overflows. From where NaN appears go back, towards the input, to a number
# that is too large.

# %% [markdown]
# ## Out of memory, read aloud (MORE, 3 min)
#
# **Why.** It is the error that everybody meets, and its message names a number of bytes. A large one says which
# tensor. **Predict** it for the logits of a batch of 24 million sequences of 2,048 tokens and a vocabulary
# of 50,280 in float32.
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
# allocated already. On a GPU the message goes on:
#
# | it says | what to do |
# |---|---|
# | *z* is allocated by PyTorch | compare with lesson 01's sum. Mostly activations: a smaller micro-batch, or checkpointing (lesson 01). Mostly weights, gradients and optimizer: shard them (lesson 06). Sharding does not shrink activations |
# | the same, and it grows from step to step | something is kept, often a list of losses with their graphs |
# | *u* is reserved by PyTorch but unallocated | if large: fragments. `PYTORCH_ALLOC_CONF=expandable_segments:True` (older torch: `PYTORCH_CUDA_ALLOC_CONF`) |
# | Process *p* has ... in use | somebody else, or your own last run |
#
# **The other kind** has no message. When the *host* runs out of memory, Linux ends a process with signal 9, and nobody raises
# anything. torchrun reports exit code -9, a shell or a container 137 (128 + 9), and the other ranks say "connection closed by
# peer". Under Slurm look for `oom_kill` in the job's output, and for `OUT_OF_MEMORY` in `sacct`.

# %% [markdown]
# ## A checkpoint: whole, or not there (CORE, 12 min)
#
# **Why.** A process that dies takes its memory with it. So write it down: a
# [**checkpoint**](../assets/glossary.md#checkpoint). The trap: a process can also die *while it writes*, and leave a file that
# looks like a checkpoint and is half of one.
#
# First something worth saving: `Trainee`, a small ShakespeareGPT trained by ZeRO. All its weights lie in one row of P numbers,
# of which a rank updates 1/n. (Two folded cells lay the model into that row and do a step.)

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "small_gpt")


def windows(model, n):
    """Lay the model's weights and gradients into two rows, n equal parts long: (row_P, gradient_P)."""
    parameters = list(model.parameters())
    row_P = torch.nn.utils.parameters_to_vector(parameters).detach()
    row_P = torch.nn.functional.pad(row_P, (0, -len(row_P) % n))
    gradient_P, offset = torch.zeros_like(row_P), 0
    for parameter in parameters:
        window = slice(offset, offset + parameter.numel())
        parameter.data = row_P[window].view_as(parameter)
        parameter.grad = gradient_P[window].view_as(parameter)
        offset = window.stop
    return row_P, gradient_P


# %% jupyter={"source_hidden": true}
# %%ranks
def train_step(trainee):
    """One step. Returns the loss of the global batch. All ranks of the trainee call it."""
    group, rank, n = trainee.group, trainee.rank, trainee.n
    trainee.gradient_P.zero_()
    loss = trainee.model(*get_batch(corpus.train_ids, trainee.step, global_batch, 32, rank, n, seed=1))[1]
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


trainee = Trainee()
curve = [train_step(trainee) for _ in range(6)]
if rank == 0:
    say(f"losses {' '.join(f'{loss:.3f}' for loss in curve)}")
    say(f"of {trainee.num_params:,} parameters this rank keeps {len(trainee.state['mean']):,}")

# %% [markdown]
# **Predict.** What must be in the checkpoint, so that the next step is *the same step*, bit for bit? Weights. What else?
#
# <details><summary>Answer</summary>
#
# - Adam's two averages, **of every rank**.
# - The **random numbers**: dropout's next mask. They differ between ranks.
# - The **step count**, for Adam (it divides by 1 - 0.9^step) and for a schedule. It is the position in the data, too: batch k
#   is drawn from (seed, k) alone. A shuffling loader has more: the epoch, its order, the place in it (exercise 3).
#
# </details>
#
# ### Build B: what a step reads
#
# Write `state_of(trainee)`, a dictionary of **tensors** with all that this rank must save, and nothing that another rank saves.
# And `go_on(trainee, state)`, which puts it into a *fresh* trainee. `torch.get_rng_state()` and `torch.set_rng_state(t)` are the
# random numbers. Mind the comment in `Trainee` about the weights.


# %%
# %%ranks
def state_of(trainee):
    """All that this rank must save: {name: tensor}."""
    raise NotImplementedError  # your turn


def go_on(trainee, state):
    """Put what `state_of` returned into a fresh trainee, so that its next step is the same step."""
    raise NotImplementedError  # your turn


checks.trainee_state((state_of, go_on), ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def state_of(trainee):
#     """All that this rank must save: {name: tensor}."""
#     return trainee.state | {"step": torch.tensor(trainee.step), "random": torch.get_rng_state()}
#
#
# def go_on(trainee, state):
#     """Put what `state_of` returned into a fresh trainee, so that its next step is the same step."""
#     for name, part_p in trainee.state.items():
#         part_p.copy_(state[name])  # in place: the model looks at this memory
#     trainee.step = state["step"].item()
#     torch.set_rng_state(state["random"])
# ```
#
# </details>

# %% [markdown]
# ### Many files, one moment
#
# Each rank writes its own shard, but the checkpoint must come into being in **one moment**. One thing on a disk does: a
# *rename*. And a file that nobody has forced onto the disk is only in a cache, so `write` calls `fsync`:


# %%
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


# %% [markdown]
# ### Build C: whole, or not there
#
# Write `save_whole(path, name, content, rank, gather)`. All ranks call it, each with its own shard: the file's name and its
# bytes. Afterwards the folder `path` holds all shards and `manifest.json`, the
# [**manifest**](../assets/glossary.md#manifest): `json.dumps({"files": {name: what write() returned, ...}}).encode()`. At any
# earlier moment there is no `path` at all, and no rank returns before it is there.
#
# `gather(x)` returns the list of every rank's x, once every rank has called it. `path.with_suffix(".partial")` is a name that
# nobody reads; `folder.rename(path)` renames.


# %%
# %%ranks
def save_whole(path, name, content, rank, gather):
    """All ranks' files and a manifest in the folder `path`, or no such folder. All ranks call it."""
    raise NotImplementedError  # your turn


checks.save_whole(save_whole, ranks, folder=folder)

# %% [markdown] tags=["solution"]
# <details><summary>Solution C</summary>
#
# ```python
# def save_whole(path, name, content, rank, gather):
#     """All ranks' files and a manifest in the folder `path`, or no such folder. All ranks call it."""
#     partial = path.with_suffix(".partial")
#     files = gather((name, write(partial / name, content)))  # ends when every shard is on the disk
#     if rank == 0:
#         write(partial / "manifest.json", json.dumps({"files": dict(files)}).encode())
#         partial.rename(path)  # the moment at which the checkpoint exists
#     gather("it is there")
# ```
#
# </details>

# %% [markdown]
# ![Each rank writes its shard into a folder step-0006.partial and syncs it; when all have told rank 0 size and sha256, rank 0 writes the
# manifest and renames the folder to step-0006](../assets/11_save.svg)
#
# Now the two ends. `save` hands your lines what they need:

# %%
# %%ranks
import safetensors.torch


def save(folder, trainee):
    """A checkpoint of all ranks of the trainee, all of it or none. All of them call it; returns its path."""
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


# %% [markdown]
# `restore` fills a trainee, and refuses a different number of ranks:


# %%
# %%ranks
def restore(path, trainee):
    """Fill the trainee from a checkpoint of as many ranks. All ranks of it call this. Raises ValueError."""
    wrote = len(json.loads((path / "manifest.json").read_text())["files"])
    if wrote != trainee.n:
        raise ValueError(f"{path.name} was saved by {wrote} ranks and here are {trainee.n}; reshard it")
    go_on(trainee, safetensors.torch.load((path / f"rank-{trainee.rank}.safetensors").read_bytes()))
    dist.all_gather(list(trainee.row_P.chunk(trainee.n)), trainee.state["weights"].clone(), group=trainee.group)


# %% [markdown]
# The test of a checkpoint is not that it loads, but that **the next losses are the same**, in a fresh `Trainee`:

# %% tags=["nbval-check-output"]
# %%ranks
path = save(folder / "scratch", trainee)  # all ranks
went_on = [train_step(trainee) for _ in range(6)]
fresh = Trainee()
restore(path, fresh)
resumed = [train_step(fresh) for _ in range(6)]
if rank == 0:
    say(f"{path.name} holds {', '.join(sorted(file.name for file in path.iterdir()))}")
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
# ### Exercise 2: is it damaged? (MORE, 7 min)
#
# Disks fill up and copies break off. A full quota cuts a file without telling the program that wrote it. Write `damaged(path, part=0, parts=1)`: the names of the
# files of this checkpoint that are **not as they were written**, by its manifest, as a sorted list. `[]` if all is well,
# `["manifest.json"]` if the manifest itself cannot be read. Of the sorted names look only at number `part`, `part + parts`, and
# so on: reading is what takes long, and n ranks share it. You need the manifest and the bytes; load no tensor.


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
# With it, the newest checkpoint *that can be trusted*. Each rank reads its own share. What it passes over it names; silence
# here is how people lose a week.


# %%
# %%ranks
def newest(folder, trainee):
    """The last checkpoint in `folder` of which every byte is as written, or None. All ranks of the trainee call it."""
    found = [sorted(folder.glob("step-????"), reverse=True)]
    dist.broadcast_object_list(found, group=trainee.group, group_src=0)  # one list for all
    for path in found[0]:
        faults = [None] * trainee.n
        dist.all_gather_object(faults, damaged(path, trainee.rank, trainee.n), group=trainee.group)
        if not any(faults):
            return path
        if trainee.rank == 0:
            names = ", ".join(sorted(set(sum(faults, []))))
            say(f"{path.name} is passed over: {names} is not as it was written")


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
# ## The library's way: DCP, and a different number of ranks (CORE, 3 min)
#
# **Why.** Tomorrow you get three nodes instead of four, and our checkpoint fits as many ranks as wrote it.
# [**Resharding**](../assets/glossary.md#resharding) is reading it with different cuts.
#
# ![One row of numbers, cut for four ranks, for two and for three; each reader takes the pieces that overlap with its own
# part](../assets/11_reshard.svg)
#
# `torch.distributed.checkpoint`, **DCP**, saves what each piece is a piece *of*. It learns that from a
# [**DTensor**](../assets/glossary.md#dtensor): a global shape, and this rank's part of it. The trainee's parts become
# DTensors that share its memory, so loading fills it. `Shard(0)` says "cut along dimension 0, part r on rank r".

# %% jupyter={"source_hidden": true}
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


def new_trainee(n):
    """Of the first n ranks, in float64 and without dropout, so that another n computes the same."""
    return Trainee(group_of[n], dropout=0.0, dtype=torch.float64)


# %% [markdown]
# Four ranks train four steps and save. Two ranks load that and save it, and three load *that*.

# %%
# %%ranks
sizes = [[1, 1], [2, 1], [3, 2], [4, 2, 3]][min(world_size, 4) - 1]
dcp_of = [folder / f"dcp {i}, saved by {n}" for i, n in enumerate(sizes)]
if rank < sizes[0]:  # the group's own ranks only
    first = new_trainee(sizes[0])
    for _ in range(4):
        train_step(first)
    dcp.save(as_dtensors(first), checkpoint_id=dcp_of[0], process_group=first.group)
    wanted = {name: part.full_tensor() for name, part in as_dtensors(first).items()}
dist.barrier()
for i, n in enumerate(sizes[1:]):
    if rank < n:
        trainee = new_trainee(n)
        parts = as_dtensors(trainee)
        for part in parts.values():
            part.to_local().fill_(-1.0)  # so that it cannot be right by chance
        dcp.load(parts, checkpoint_id=dcp_of[i], process_group=trainee.group)
        dcp.save(parts, checkpoint_id=dcp_of[i + 1], process_group=trainee.group)
    dist.barrier()

# %% [markdown]
# Do three ranks now hold what four held, the weights *and* Adam's averages?

# %%
# %%ranks
if rank < sizes[-1]:
    equal = {name: torch.equal(part.full_tensor(), wanted[name]) for name, part in parts.items()}
    if rank == 0:
        say(f"{' -> '.join(map(str, sizes))} ranks: {', '.join(equal)} equal to the last bit: {all(equal.values())}")
    assert all(equal.values()), equal

# %% [markdown]
# Two warnings. DCP's `.metadata` is a pickle, and its reader runs what is in it: load only what you trust. And a byte that
# flipped in a shard loads without a word. `scripts/train.py` puts what you have just built around DCP.

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
    whole_P = list(trainee.row_P.chunk(trainee.n))
    dist.all_gather(whole_P, trainee.state["weights"].clone(), group=trainee.group)
    losses = [train_step(trainee) for _ in range(8)]
    apart = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
    assert apart < 1e-10, f"the losses differ by {apart:.1e}"
    if rank == 0:
        say(f"the next 8 losses on {sizes[0]} and on {sizes[-1]} ranks differ by {apart:.0e} at most")
metrics.exact(float64_losses=reference if rank < sizes[0] else None)
metrics.close(float64_losses_close=reference if rank < sizes[0] else None)

# %% [markdown]
# ### Save while training goes on (MORE, 3 min)
#
# `dcp.async_save` copies the tensors into the CPU's memory and returns; a thread writes them. Training stands still
# for the copy only. It needs a process group that works on the CPU: with `init_process_group("nccl")` it refuses,
# with `cpu:gloo,cuda:nccl`, as `join()` makes it, all is well.
#
# **Predict.** Each rank saves 8 MiB. At about 2 GB/s for a copy in memory, how long does training stand still? And which
# part of a plain save is not the copy?
#
# <details><summary>Answer</summary>
#
# 8.4 MB at 2 GB/s are about 4 ms. A plain save also plans (messages between the ranks), writes and syncs, all of which the
# thread takes over. Nothing is free: on a laptop the thread works on the same cores as the next steps.
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
# What `async_save` takes beyond the copy is work of its own: allocating, starting the thread, a few messages.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: DCP</summary>
#
# *Say:* an asynchronous save makes the best interval between saves shorter, because C gets smaller. *Usual mistake:*
# changing the weights between `async_save` and its staging with a zero-copy stager; forgetting that the last one must be
# waited for.
#
# </details>

# %% [markdown]
# ## Experiment: kill a rank (CORE, 6 min)
#
# **Why.** A restart that was never tried does not work. So: real processes, `kill -9`, and the loss curve as the judge.
#
# ![A run of three lives: it saves every 6 steps, is killed after step 8 and goes on from step 6, is asked to leave after step
# 14 and saves, and goes on from there](../assets/11_restart.svg)
#
# The program goes on from the `newest` checkpoint that is not damaged (exercise 2), trains, saves every `every` steps, and
# writes each loss to a file. If a signal asked *any* rank to leave, **all** hear of it in a small all-reduce, save, and say so in
# `requeue.json`. A rank that left alone would be the hang from above.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "small_gpt", "windows", "Trainee", "train_step", "adam", "state_of", "go_on")
catch_up(globals(), "write", "save_whole", "save", "restore", "damaged", "newest")

# %%
# %%ranks
import hashlib
import json
import os
import time

import safetensors.torch


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
# First the run that nobody interrupts, on two ranks. (Folded: a program for torchrun, and `heard_so_far`, which reads the
# losses that a run has written.)

# %% jupyter={"source_hidden": true}
# %%ranks
PROGRAM = """
import hashlib, json, os, signal, sys, time
from pathlib import Path
import safetensors.torch, torch
import torch.distributed as dist
from manyhands import catch_up, join, leave, say
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.gpt.model import GPT, GPTConfig

ranks = join(name="11_when_it_breaks", device="cpu")
corpus, told, global_batch = load_corpus(ranks), [], 24
signal.signal(signal.SIGTERM, lambda *_: told.append("SIGTERM"))
catch_up(globals(), "small_gpt", "windows", "Trainee", "train_step", "adam", "state_of", "go_on")
catch_up(globals(), "write", "save_whole", "save", "restore", "damaged", "newest", "train")
train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), told, pace_s=0.1)
leave()
"""


def heard_so_far(folder):
    """The lines of losses.jsonl: [{"step", "loss", "processes"}]"""
    file = folder / "losses.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


# %%
# %%ranks
import shutil

n_children, every, where = min(2, world_size), max(2, steps // 4), folder / "killed"
if rank == 0:
    for name in ("undisturbed", "killed"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    (where / "program.py").write_text(PROGRAM)
dist.barrier()
if rank < n_children:
    train(folder / "undisturbed", steps, every, group=group_of[n_children])
dist.barrier()
if rank == 0:
    undisturbed = {line["step"]: line["loss"] for line in heard_so_far(folder / "undisturbed")}
    say(f"{len(undisturbed)} steps, loss {undisturbed[1]:.3f} -> {undisturbed[steps]:.3f}")

# %% [markdown]
# Then the same under `torchrun --max-restarts 1`: when a rank dies, torchrun ends the others and starts **all** of them
# again, once. The last rank gets signal 9, which no process can catch. So all ranks lose the steps since the last checkpoint.

# %%
# %%ranks --timeout 300
import signal

from manyhands.launch.processes import Torchrun

given = (where / "program.py", where, steps, every)
setting = {"n_ranks": n_children, "log": where / "torchrun.txt", "timeout_s": 280}
if rank == 0 and failures != "none":
    with Torchrun(*given, restarts=1, **setting) as child:
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
# After the kill came the **pre-emption**: SIGTERM to torchrun, which passes it on to its ranks. They finish their step, agree,
# save, and leave. A launcher turns every end into a status of its own, so the program says in a *file* that it was not done. A
# job script that finds it puts the job back into the queue, and the next start is this one:

# %%
# %%ranks --timeout 300
if rank == 0 and (where / "requeue.json").exists():
    asked = json.loads((where / "requeue.json").read_text())
    (where / "requeue.json").unlink()  # this start is the answer to it
    with Torchrun(*given, **setting) as child:
        status = child.wait()
    say(f"stopped and saved after step {asked['step']}, started again, ended with status {status}")
dist.barrier()

# %% [markdown]
# What you should see: one grey line, the run that nobody touched, and the lives of the other one on top of it. Below, the
# residual, resumed minus undisturbed. Not small: zero.

# %%
# %%ranks
lines = heard_so_far(where) if rank == 0 else []
processes = list(dict.fromkeys(tuple(line["processes"]) for line in lines))  # of each life
lives = [{line["step"]: line["loss"] for line in lines if tuple(line["processes"]) == life} for life in processes]
if lives:
    from manyhands.plots.results import killed_and_resumed

    figure = killed_and_resumed(undisturbed, lives, f"killed and resumed, {n_children} ranks")
    show(figure, "killed_run", "the losses of all lives lie on the undisturbed curve; the residual is zero")

# %%
# %%ranks
if lives:
    differing = [line["step"] for line in lines if line["loss"] != undisturbed[line["step"]]]
    repeated = len(lines) - len({line["step"] for line in lines})
    say(f"{len(lines)} losses of {len(lives)} {'lives' if len(lives) > 1 else 'life'}, {repeated} of them repeated")
    say(f"different from the undisturbed run: {len(differing)}")
    assert not differing and {line["step"] for line in lines} == set(undisturbed)
metrics.exact(undisturbed=undisturbed if rank == 0 else None)

# %% [markdown]
# On GPUs it need not be zero: some kernels add in an order that changes from run to run.
# `torch.use_deterministic_algorithms(True)` with `CUBLAS_WORKSPACE_CONFIG=:4096:8` forbids that in torch's own kernels.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the experiment</summary>
#
# Let them type the kill themselves in a terminal if there is time: `failures` "none", `pace_s=1` in `PROGRAM`, then
# `python -m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1 program.py . 24 6` in the folder
# `killed` of this run, and `kill -9` one of the processes of `losses.jsonl`. The program takes the lesson's functions from its
# saved script, solutions first. *Usual mistake:* believing that torchrun restarts the dead rank only. *Ask:* "what happens at
# the second kill?" (`--max-restarts 1` is used up: torchrun gives up, and the job script's turn has come.)
#
# </details>

# %% [markdown]
# ## A node dies (CORE, 2 min)
#
# **Why.** torchrun restarts processes. It cannot restart a node. When one of two nodes loses power, the ranks of the other wait
# for it until the time-out, and so does a torchrun that starts them again. Only the scheduler can give you another node.
#
# | | Slurm | PBS |
# |---|---|---|
# | a node dies | the job is ended; with `--requeue` it is queued again | the job's first node: queued again (`-r y`). Another node: your ranks fail, and the job with them |
# | the next start | the same number, the script from its first line | the same |
# | a warning before the end | `--signal=B:USR1@120` | none: `jobs/train.pbs` sets a clock of its own |
# | the job asks to run again | `scontrol requeue $SLURM_JOB_ID` | `qrerun`, mostly for operators; else `qsub` again, with the same folder |
# | keep a bad node out | `sbatch --exclude=node17` | tell the operators; meanwhile ask for one node more, and start on those that pass your test |
#
# So have ready: a job that may be queued again, checkpoints in a folder that all nodes see, and a script that resumes without
# being told. A *sick* node, slow or flipping bits, is given out again: you found the rank, now name its node.

# %%
# %%ranks
import socket

hosts = [None] * world_size
dist.all_gather_object(hosts, socket.gethostname())  # a job prints this at its start, while all nodes live
if rank == 0:
    say(f"rank {guilty} runs on {hosts[guilty]}: sbatch --exclude={hosts[guilty]} keeps the next job away from it")

# %% [markdown]
# ## How often to save (CORE, 2 min)
#
# **Why.** Save too often, and you do nothing else; too rarely, and each failure costs hours. Let C be the cost of one save and M the [**MTBF**](../assets/glossary.md#mtbf), the mean time between failures.
# Saving after every τ seconds costs about C/τ of the time. A failure loses τ/2 on average, so τ/(2M) of the time. The sum is
# least where both are equal: τ = √(2·C·M) (Young 1974).
#
# **Predict.** Llama 3's report counts 419 unexpected interruptions in 54 days on up to 16,384 GPUs. With saves of
# one minute: how often would you save, and what share of the time is lost?
#
# <details><summary>Answer</summary>
#
# M = 54·24/419 = 3.1 hours. τ = √(2·60·11,135) = 1,156 s, 19 minutes. Lost: 5.2 % + 5.2 %, about 10 %. To halve that you need
# saves four times as cheap, or a quarter of the failures.
#
# </details>


# %% tags=["nbval-check-output"]
# %%ranks
def best_interval(save_s, mtbf_s):
    return (2 * save_s * mtbf_s) ** 0.5


def lost_share(interval_s, save_s, mtbf_s):
    return save_s / interval_s + interval_s / (2 * mtbf_s)


mtbf_s, save_s = 54 * 24 * 3600 / 419, 60.0
best_s = best_interval(save_s, mtbf_s)
if rank == 0:
    say(f"MTBF {mtbf_s / 3600:.1f} h, so save every {best_s / 60:.0f} min")
    for minutes in (5, 12, best_s / 60, 30, 75):
        say(f"every {minutes:2.0f} min: {100 * lost_share(60 * minutes, save_s, mtbf_s):.1f} % of the time is lost")

# %% [markdown]
# The floor is *flat*: get the order of magnitude right and do not tune. Not in it: the time from a failure to the next life's
# first step.

# %% [markdown]
# ### Is it so? (MORE, 3 min)
#
# Let failures come at random, as they do, and count. Each interval is tried 4,000 times; the ranks share them, each with its
# own seed.


# %%
# %%ranks
import random


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
import math

from manyhands.plots.looks import INK, LIMIT, MEASURED, PREDICTED
from matplotlib.figure import Figure

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
    for i in (0, 4, 8):
        say(f"{minutes[i]:3.0f} min: formula {100 * formula[i]:.1f} %, exact {100 * whole[i]:.1f} % lost")
metrics.exact(lost=lost)

# %% [markdown]
# **The residual.** Far from the floor the formula promises too much loss on both sides. With short intervals, because a save
# is C of every τ + C, not of every τ. With long ones, because a failure cuts off less than half of an interval on average: the
# first failure to come counts, and it comes early. (Daly 2006 has the next terms.)

# %% [markdown]
# ## Exercises (MORE, 14 min)
#
# Exercises 1 and 2 stand in their sections.
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
# The bit above was one of the exponent, and NaN is loud. What if it is bit 20, in the middle of the fraction? Nothing is
# infinite, no call fails. Here is the loss of the rank that it hits, beside that of a run in which it never happened:

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "flip_bit", "small_gpt", "gradients")


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
    batch = get_batch(corpus.train_ids, 9, 24, 32, 0, 1, seed=1)
    with torch.no_grad():
        say(f"loss without the flip {healthy(*batch)[1].item():.6f}, with it {hit(*batch)[1].item():.6f}")

# %% [markdown]
# No loss curve shows that. Averaging gradients does not bring the replicas together again (lesson 03), so this rank trains a model
# of its own, and what it learns there goes into everybody's average. But data parallel training has something that costs nothing
# extra: n replicas that must be equal.
#
# Write `odd_one_out(model, gather)`. `gather(x)` returns the list of every rank's x, once every rank has called it. Return
# `(rank, name)`: the rank whose copy differs from the others, and the first parameter of `model.named_parameters()` in which it
# does; None if all copies are equal. With two ranks the rank is None: two copies show *that* one is wrong, it takes three to
# say *which*. Weights are too large to travel: `fingerprint(tensors)` is a sha256 of their bits.


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

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "odd_one_out")


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
# ## A bug from the zoo (CORE, 3 min)
#
# A workshop's trainer (ours is a copy in spirit) shards the optimizer over the ranks, and saves like one that shards nothing. It prints
# "saved", it resumes. **What is wrong, and which number shows it?**

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "small_gpt", "windows", "Trainee", "train_step", "adam", "state_of", "go_on")
catch_up(globals(), "write", "save_whole", "save", "restore", "damaged", "newest")

# %%
# %%ranks
import hashlib
import json
import os

import safetensors.torch


def save_as_always(folder, trainee):
    if trainee.rank == 0:
        content = state_of(trainee) | {"all weights": trainee.row_P}
        content = safetensors.torch.save({name: tensor.clone() for name, tensor in content.items()})
        write(folder / "checkpoint.safetensors", content)
        say("saved")


trainee = Trainee()
for _ in range(8):
    train_step(trainee)
save_as_always(folder / "zoo", trainee)
dist.barrier()

# %% [markdown]
# **Predict.** P = 110,145 weights, two numbers of Adam for each, 4 bytes per number, 5,056 bytes of random state per rank. How
# large must a checkpoint of four ranks be? And if you go on from that file on every rank: is there an error?

# %%
# %%ranks
file = folder / "zoo" / "checkpoint.safetensors"
went_on, resumed = [train_step(trainee) for _ in range(6)], Trainee()
saved = safetensors.torch.load(file.read_bytes())
go_on(resumed, saved)  # rank 0's part, on every rank ...
resumed.row_P.copy_(saved["all weights"])  # ... but the weights are right
after = [train_step(resumed) for _ in range(6)]
if rank == 0:
    needed = 12 * trainee.num_params + 5056 * world_size
    say(f"the file has {file.stat().st_size:,} bytes, needed are {needed:,} or more")
    for name, curve in {"went on": went_on, "resumed": after}.items():
        say(f"{name} {' '.join(f'{loss:.3f}' for loss in curve)}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# 12·P + 4·5,056 = 1,341,964 bytes. `if rank == 0` stands around the save. The weights are whole on every rank, so samples look
# fine. But Adam's memory is sharded: rank 0 saved *its* part, and after a resume every rank takes that for its own. No error,
# because the shapes fit, and a loss that you would believe if the right one did not stand beside it. Bytes tell: sharded state is
# saved whole, or something is missing. The cure: **all ranks save.**
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
path = save(folder / "zoo" / "mended", trainee)  # all ranks
if rank == 0:
    say(f"all ranks save: {sum(shard.stat().st_size for shard in path.glob('rank-*')):,} bytes")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# Ask for the bytes *before* the cell that measures. Then: "how large is your last
# checkpoint, and how large should it be?" People look it up, and now and then somebody goes pale.
#
# </details>

# %% [markdown]
# ### One more from the same trainer (MORE, 2 min)
#
# It saves below the folder of the run, and looks for a checkpoint below the folder of the *experiment*:


# %%
# %%ranks
import math


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
    guessing = math.log(len(corpus.vocab))
    say(f"loss before the restart {before[-1]:.2f}, after it {after:.2f}; guessing gives {guessing:.2f}")

# %% [markdown]
# The first loss is that of a model that knows nothing, at step 0, and nobody was told. *Resume if there is
# something* is what you want on the first start and what you must not have on the second. So a restart should be
# able to say **must**: `scripts/train.py` has `--checkpoint.resume must`, which refuses to begin anew, and every
# resumed run says in its first lines from where.

# %% [markdown]
# ## On the cluster
#
# ```bash
# sbatch jobs/train.slurm --preset gpt2 --parallel.strategy fsdp   # warned or pre-empted, it saves and queues again
# qsub -v TRAIN_ARGS="--preset gpt2 --parallel.strategy fsdp" jobs/train.pbs
# # without a job file, inside a job:
# python -m torch.distributed.run --standalone --nproc-per-node 4 --max-restarts 3 --shutdown-timeout 110 \
#     --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
#     scripts/train.py --checkpoint.folder outputs/mine --checkpoint.every 500 --train.stall-s 300
# ```
#
# ![A signal reaches the job script two minutes before the end; the ranks finish their step, save, write requeue.json and leave; the
# job script puts the job back into the queue; what still lives at the end is killed](../assets/11_preemption.svg)
#
# **Who sends what.** Near the end of the time limit Slurm's `--signal=B:USR1@120` signals the **b**atch script, which must pass
# it on: `trap`, the program in the background, and `wait`. On [pre-emption](../assets/glossary.md#pre-emption) Slurm sends
# SIGTERM; how long you have may differ from site to site (`GraceTime`, perhaps nothing). PBS sends no warning.
#
# **What torchrun makes of it.** It passes SIGTERM on, and kills what is left after **30 s** (`--shutdown-timeout`): a save must
# be shorter. SIGUSR1 *ends torchrun at once*, unless `--signals-to-handle` names it.
#
# **What changes on GPUs.** A NCCL time-out ends the process, and the flight recorder is what is left:
# `TORCH_NCCL_DUMP_ON_TIMEOUT=1`, `TORCH_FR_DUMP_TEMP_FILE=/shared/fr_`, and `torchfrtrace` to compare (it reads pickles: your
# own files only). Dropout draws from the GPU's generator: save `torch.cuda.get_rng_state()` too.
#
# **What to look for**: "resumed from step-..." in the first lines of the second life.

# %% [markdown]
# ## Recap
#
# 1. In a hang the ranks that complain are the healthy ones: compare, per group and call number, who did *not* call.
# 2. A straggler waits least, and NaN must be looked for before averaging.
# 3. All ranks save, to a name that nobody reads; a manifest, then one rename. What does not match it is passed over, by name.
# 4. A resumed run is the same run, bit for bit on the same number of ranks, if all that a step reads was saved.
# 5. Save every √(2·C·MTBF). On a signal agree, save, and say so in a file. A sick node is yours to exclude.
#
# ## Further reading
#
# - Llama team 2024, [The Llama 3 herd of models](https://arxiv.org/abs/2407.21783), section 3.3.4: what broke in 54 days, by cause.
# - Young 1974, *A first order approximation to the optimum checkpoint interval*; Daly 2006, *A higher order estimate of the
#   optimum checkpoint interval for restart dumps*.
# - PyTorch, [Flight recorder](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html) and
#   [Distributed checkpoint](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html).
# - Slurm, [sbatch](https://slurm.schedmd.com/sbatch.html): `--signal`, `--requeue`, `--exclude`, `--no-kill`. For what was tried
#   on PBS and Slurm see [jobs/README.md](../jobs/README.md).

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
