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
# # 02 Collectives: from send and recv to all-reduce
#
# **45 minutes** for the sections marked CORE, 119 with those marked MORE.
#
# After this lesson **you can**
# - name each collective by two questions: who has the data now, and who needs it next?
# - build the ring all-reduce, and count its messages and bytes;
# - predict message times from latency α and bandwidth β;
# - recognise a missing rank and a deadlock, and recover.
#
# **You need** [rank](../assets/glossary.md#rank) and launcher ([lesson 00](00_start.ipynb)): a *rank* is one of n
# processes that all run this same file.
#
# **New here:** [message](../assets/glossary.md#message), [collective](../assets/glossary.md#collective),
# [all-reduce](../assets/glossary.md#all-reduce) and its relatives, [ring](../assets/glossary.md#ring),
# [time-out](../assets/glossary.md#time-out), [deadlock](../assets/glossary.md#deadlock),
# [latency and bandwidth](../assets/glossary.md#alpha-beta).
#
# The same file is a script:
#
# ```bash
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/02_collectives.py --largest-mib 16
# mpiexec -n 4 python scripts/02_collectives.py
# python scripts/02_collectives.py                # a world of one: the same path, nobody to talk to
# ```

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: hook 3, names 6, ring 17, cost 7, break it 7, bug 2, card 1. A build that nobody has touched
# takes the lesson's own lines; a wrong one stays wrong, so have it pasted from the folded solution.
#
# *Say:* everybody talks at the same time, and only to the neighbour. Whatever is slow later is slow because one of
# these messages is too large, too small, or waits for somebody.
#
# *Three usual mistakes:* thinking that rank 0 collects and redistributes; thinking that `send` is fire and forget;
# comparing milliseconds of this machine with those of a GPU node (compare shapes of curves, not heights).
#
# *When late:* give the solution of build D, and only show the deadlock. *Ask the room:* "A hundred ranks instead of
# four, the same gradient. How much more does each rank send?" Vote before the ring.
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
largest_mib = 16.0  # largest message of the experiment in MiB, > 0
repeats = 5  # samples of each timing, at least 1
wait_s = 3.0  # seconds that a rank waits for one that is missing, > 0
points = 1_000_000  # random points in the estimate of pi, at least 1

# %% [markdown]
# ## Start (CORE, 1 min)
#
# The first cell starts four ranks behind this notebook. A cell that begins with `%%ranks` runs on all of them.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("02_collectives", globals())

# %%
# %%ranks
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from manyhands import ____, Metrics, card, compare, fingerprint, join, leave, mpi_world, say, show
from manyhands.checks import collectives as checks
from manyhands.lessons import collectives as lesson
from manyhands.launch.program import say_how_it_ended
from manyhands.measure import wire

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
left, right = (rank - 1) % world_size, (rank + 1) % world_size
metrics = Metrics(ranks, parameters={"points": points})

# %% [markdown]
# ## One rank collects everything (CORE, 3 min)
#
# Four ranks hold a gradient of 40 MB each, and every rank needs the sum. No rank can read another's memory: it can only
# [send a message](../assets/glossary.md#message) to a rank and receive one. The obvious way: rank 0 collects all
# gradients, adds them up, and sends the sum back. (`x_N` is a tensor of N numbers:
# [shapes stand in names](../assets/glossary.md#shape-suffix).)


# %% tags=["nbval-check-output"]
# %%ranks
def all_reduce_by_rank_0(x_N):
    """Sum x_N over all ranks, in place."""
    for other in range(1, world_size):
        if rank == other:
            dist.send(x_N, dst=0)
        if rank == 0:
            dist.recv(gradient_N := torch.empty_like(x_N), src=other)
            x_N += gradient_N
    for other in range(1, world_size):
        if rank == 0:
            dist.send(x_N, dst=other)
        if rank == other:
            dist.recv(x_N, src=0)


lesson.bars(all_reduce_by_rank_0, ranks)

# %% [markdown]
# Rank 0 sends three times as much as anybody else. **Predict.** How many MB does it send with 100 ranks? Fill the blank.

# %%
# %%ranks
guess = ____  # your turn: MB that rank 0 sends with 100 ranks

# %% jupyter={"source_hidden": true} tags=["nbval-check-output"]
# %%ranks
compare("rank 0 with 100 ranks", "guess", 99 * 40, "MB")

# %% [markdown]
# **The goal of this lesson:** the same sum, and no rank sends more than any other, with any number of ranks.

# %% [markdown]
# ## Name that pattern (CORE, 6 min)
#
# A call that *all* ranks of a group must make together is a [collective](../assets/glossary.md#collective). Two questions
# pick the right one: **who has the data now, and who needs it next?** Each picture shows four ranks, one per row.
#
# ![Eight pictures, each with what ranks 0 to 3 hold before and after. 1: rank 0 has 3, then all have it. 2: rank 0 has
# 0, 1, 2, 3, then rank k has k. 3: each has one number, then rank 0 has all four. 4: rank 0 has their sum. 5: all have
# their sum. 6: all have all four. 7: each has four parts, then rank k has the sum of everybody's part k. 8: rank k has
# everybody's part k, in rank order.](../assets/02_plate.svg)
#
# ### Build A: eight names
#
# Replace each `____` by one of `all_gather`, `all_reduce`, `all_to_all_single`, `broadcast`, `gather`, `reduce`,
# `reduce_scatter`, `scatter`. `x` is this rank's one number, `parts` its parts; `whole` and `part` receive results. The
# check shows what each rank holds after your call.


# %%
# %%ranks
def named():
    """{picture: a function that makes its collective}"""
    return {
        1: lambda x: dist.____(x, src=0),
        2: lambda part, parts: dist.____(part, parts, src=0),
        3: lambda x, whole: dist.____(x, whole, dst=0),
        4: lambda x: dist.____(x, dst=0),
        5: lambda x: dist.____(x),
        6: lambda whole, x: dist.____(whole, x),
        7: lambda part, parts: dist.____(part, parts),
        8: lambda whole, parts: dist.____(whole, parts),
    }


checks.pictures(named, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution A</summary>
#
# ```python
# def named():
#     """{picture: a function that makes its collective}"""
#     return {
#         1: lambda x: dist.broadcast(x, src=0),
#         2: lambda part, parts: dist.scatter(part, parts, src=0),
#         3: lambda x, whole: dist.gather(x, whole, dst=0),
#         4: lambda x: dist.reduce(x, dst=0),
#         5: lambda x: dist.all_reduce(x),
#         6: lambda whole, x: dist.all_gather(whole, x),
#         7: lambda part, parts: dist.reduce_scatter(part, parts),
#         8: lambda whole, parts: dist.all_to_all_single(whole, parts),
#     }
# ```
#
# </details>

# %% [markdown]
# Look at 7, then at 6: each rank gets one part of the sum, then everybody gets all parts. **Reduce-scatter, then
# all-gather: together they are an [all-reduce](../assets/glossary.md#all-reduce).**

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: hook and names</summary>
#
# 9 minutes. *Say:* "who has it now, who needs it next?" and let the room name each picture. *Usual mistakes:* an output
# of the whole shape in scatter and reduce-scatter; a collective under `if rank == 0`; reading `x` on rank 3 after a
# reduce. *When late:* pictures 1, 5, 6 and 7. *Ask:* "Which of these is the all-reduce through rank 0 made of?"
#
# </details>

# %% [markdown]
# ## Build the ring (CORE, 17 min)
#
# Put the ranks on a [ring](../assets/glossary.md#ring): rank k sends only to rank k+1, and the last rank sends to
# rank 0. Cut the gradient into as many chunks as there are ranks. Each chunk collects its sum while it travels.
#
# ![Four ranks on a ring; rank k sends chunk k to rank k+1, all four at the same time.](../assets/02_ring.svg)
#
# ![Reduce-scatter on the ring: at each of three hops every rank receives one chunk and adds it; then rank k holds the finished
# sum of chunk k+1.](../assets/02_ring_reduce_scatter.svg)
#
# Follow chunk 0. Rank 1 adds its own numbers to it, then rank 2, then rank 3: after three hops rank 3 holds the finished
# sum. In the second half the finished chunks go around once more. They are copied, not added.
#
# ![All-gather on the ring: at each of three hops every rank receives one finished chunk; then all have all
# four.](../assets/02_ring_all_gather.svg)
#
# **Predict.** The gradient has 40 MB again. How many MB does each rank send over all hops, with 100 ranks?

# %%
# %%ranks
guess = ____  # your turn: MB that each rank of a ring sends with 100 ranks

# %% jupyter={"source_hidden": true} tags=["nbval-check-output"]
# %%ranks
compare("each rank of a ring of 100", "guess", 2 * 99 * 40 / 100, "MB")

# %% [markdown]
# 2(n-1) hops of 40/n MB each make 60 MB on 4 ranks, 79.2 MB on 100.
#
# In one hop a rank sends to the right while it receives from the left. `exchange` starts both together, then waits:


# %%
# %%ranks
def exchange(give, to, take, source):
    """Send `give` to rank `to` while receiving `take` from rank `source`."""
    if to == rank:  # a world of one: a message to oneself is a copy
        take.copy_(give)
        return
    both = [dist.P2POp(dist.isend, give, to), dist.P2POp(dist.irecv, take, source)]
    for message in dist.batch_isend_irecv(both):
        message.wait()


# %% [markdown]
# ### Build B: one hop
#
# `chunks[c]` is this rank's chunk c. At the first hop rank k sends chunk k, so chunk `left` arrives. Send
# `chunks[rank]`, then add what arrived to your own chunk of the same number. The check draws the chunks of all
# ranks; a digit stands for the rank whose numbers are in the sum, and ✗ marks a wrong cell.


# %%
# %%ranks
def one_hop(chunks):
    """The first hop of the ring."""
    arrived = torch.empty_like(chunks[left])
    exchange(____, right, arrived, left)
    chunks[____] += arrived


checks.one_hop(one_hop, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def one_hop(chunks):
#     """The first hop of the ring."""
#     arrived = torch.empty_like(chunks[left])
#     exchange(chunks[rank], right, arrived, left)
#     chunks[left] += arrived
# ```
#
# </details>

# %% [markdown]
# ### Build C: the first half
#
# At every later hop you send on the chunk that has just arrived. Hops count from 0. On rank 2 of 4, chunk 2 leaves at
# hop 0, chunk 1 at hop 1 and chunk 0 at hop 2. First write down which chunk leaves and which arrives, modulo
# `world_size`:


# %%
# %%ranks
def which_chunks(hop):
    """(number of the chunk that leaves, number of the chunk that arrives) on this rank"""
    return ____, ____


checks.which_chunks(which_chunks, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution C1</summary>
#
# ```python
# def which_chunks(hop):
#     """(number of the chunk that leaves, number of the chunk that arrives) on this rank"""
#     return (rank - hop) % world_size, (rank - hop - 1) % world_size
# ```
#
# </details>

# %% [markdown]
# Now loop. Each turn is the hop that you wrote, with the chunks of your table:


# %%
# %%ranks
def ring_reduce_scatter(chunks):
    """Afterwards chunks[right] holds the sum over all ranks; the others hold unfinished sums."""
    raise NotImplementedError  # your turn: a loop over hops, with four lines in it


checks.ring_reduce_scatter(ring_reduce_scatter, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution C</summary>
#
# ```python
# def ring_reduce_scatter(chunks):
#     """Afterwards chunks[right] holds the sum over all ranks; the others hold unfinished sums."""
#     for hop in range(world_size - 1):
#         give, mine = chunks[(rank - hop) % world_size], chunks[(rank - hop - 1) % world_size]
#         arrived = torch.empty_like(mine)
#         exchange(give, right, arrived, left)
#         mine += arrived  # the chunk has collected one more rank's numbers
# ```
#
# </details>

# %% [markdown]
# ### Build D: the second half
#
# Add 1 to the table's numbers: at hop 0 the finished chunk `rank + 1` leaves and chunk `rank` arrives. Nothing is
# added, so receive straight into your own chunk.


# %%
# %%ranks
def ring_all_gather(chunks):
    """From chunks[right] finished on each rank to all chunks finished on all ranks."""
    raise NotImplementedError  # your turn: three lines


checks.ring_all_gather(ring_all_gather, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution D</summary>
#
# ```python
# def ring_all_gather(chunks):
#     """From chunks[right] finished on each rank to all chunks finished on all ranks."""
#     for hop in range(world_size - 1):
#         give, take = chunks[(rank + 1 - hop) % world_size], chunks[(rank - hop) % world_size]
#         exchange(give, right, take, left)
# ```
#
# </details>

# %% [markdown]
# ### The same bars, with your ring


# %% tags=["nbval-check-output"]
# %%ranks
def ring_all_reduce(x_N):
    """Sum x_N over all ranks, in place. Sends 2(n-1)/n of its bytes, in 2(n-1) messages."""
    if x_N.numel() % world_size:
        raise ValueError(f"{x_N.numel()} numbers do not split over {world_size} ranks; use a multiple of it")
    chunks = list(x_N.chunk(world_size))  # views
    ring_reduce_scatter(chunks)
    ring_all_gather(chunks)
    return x_N


lesson.bars(ring_all_reduce, ranks)
lesson.agree(ring_all_reduce, ranks)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: ring</summary>
#
# 17 minutes, twelve of them for builds B to D. *Say:* follow chunk 0 with your finger; then the punch line: more messages
# than through rank 0, and yet faster, because they all travel at once and are a quarter as large. *Usual mistakes:*
# adding in the second half too; sending on the chunk that was just *sent*; starting the second half with chunk k. The
# checks name each of them. *When late:* show solution C, let them write D. *Ask:* "What limits the ring with 10,000
# ranks?" (2(n-1) latencies: the tree in the lab, and lesson 10.)
#
# </details>

# %% [markdown]
# ## What does a message cost? (CORE, 7 min)
#
# A message takes about **α + bytes / β**. [α](../assets/glossary.md#alpha-beta), the latency, is what even an empty
# message costs. β, the bandwidth, is bytes per second once they flow.
#
# ![The time of a message against its size is a straight line that starts at alpha and rises by
# 1/beta.](../assets/02_alpha_beta.svg)
#
# One call times a hop for many sizes. No more ranks take part than there are cores.

# %%
# %%ranks --timeout 300
hops = lesson.time_hops(exchange, ranks, largest_mib, repeats)

# %% [markdown]
# Change `alpha` and `beta` until your dashed line lies on the points. Small messages show α, large ones show β. The
# lower plot shows measured time divided by your line.

# %%
# %%ranks
alpha, beta = 1e-3, 1e9  # seconds, bytes per second: change both
lesson.draw_line(hops, alpha, beta, ranks)

# %% [markdown]
# ### Build E: the time of a ring
#
# How many hops does a whole ring all-reduce make, and how many bytes does each carry?


# %%
# %%ranks
def ring_seconds(n_bytes, n, alpha, beta):
    """Seconds of a ring all-reduce of n_bytes over n ranks (alpha in s, beta in bytes/s)."""
    hops = ____
    return hops * ____


checks.ring_seconds(ring_seconds, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution E</summary>
#
# ```python
# def ring_seconds(n_bytes, n, alpha, beta):
#     """Seconds of a ring all-reduce of n_bytes over n ranks (alpha in s, beta in bytes/s)."""
#     hops = 2 * (n - 1)  # n-1 to sum, n-1 to hand around
#     return hops * (alpha + n_bytes / n / beta)  # one chunk each
# ```
#
# </details>

# %% [markdown]
# **Predict.** A model has forty gradients of 100 kB. On this machine, how many times as long do forty all-reduces of
# 100 kB take as one of 4 MB, on 4 ranks?

# %%
# %%ranks
guess = ____  # your turn: times as long

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.measure.timing import take_turns

forty_s = 40 * ring_seconds(100e3, 4, *hops.fitted)
one_s = ring_seconds(4e6, 4, *hops.fitted)
small_N, large_N = torch.zeros(25_000), torch.zeros(1_000_000)
calls = {"forty": lambda: [dist.all_reduce(small_N) for _ in range(40)], "one": lambda: dist.all_reduce(large_N)}
took_s = take_turns(calls, repeats, ranks)
times = sorted(forty / one for forty, one in zip(took_s["forty"], took_s["one"], strict=True))
measured = f"{times[len(times) // 2]:.1f} times as long ({times[0]:.1f} to {times[-1]:.1f})"
said, computed = f"measured, the library's all-reduce on {world_size} ranks: {measured}", float(forty_s / one_s)
compare("forty small all-reduces against one large", "guess", round(computed, 1), "times as long", said)

# %% [markdown]
# Forty all-reduces on 4 ranks pay α 240 times, one only 6. That is why DDP collects gradients in *buckets*
# ([lesson 03](03_data_parallel.ipynb)).
#
# For real machines the next plot shows *bus bandwidth*: bytes that each rank's link carries per second. The curves are
# published ([sources](../assets/handbook/02_collectives.md#published-curves)).

# %%
# %%ranks
lesson.draw_machines(hops, ranks)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: cost</summary>
#
# 7 minutes, four of them for build E. *Say:* two numbers describe a network; below α·β bytes you pay for the message,
# above for the bytes. *Usual mistakes:* reading α off a linear axis; one α for all hops; comparing heights with a GPU
# node instead of shapes. *When late:* use the fitted line. *Ask:* "DDP has 200 small gradients. One message each, or one
# for all?" (That is lesson 03.)
#
# </details>

# %% [markdown]
# ## Break it (CORE, 7 min)
#
# An all-reduce ends when *all* ranks have called it. If one rank does not call, the others wait until the
# [time-out](../assets/glossary.md#time-out) of their [process group](../assets/glossary.md#process-group): 30 minutes
# with gloo, 10 with NCCL, unless you set it. Here it is three seconds, and the last rank does not call.

# %%
# %%ranks
dist.barrier()  # all ranks come at the same time
impatient = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))  # all ranks call this one
if rank != world_size - 1:
    say_how_it_ended(lambda: dist.all_reduce(torch.ones(1), group=impatient))
dist.barrier()

# %% [markdown]
# The error does not say who is missing. To **find the missing rank**, take a roll call: every rank reports to rank 0,
# and rank 0 says who did not. Then destroy the broken groups:

# %%
# %%ranks
roll_call = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))
if rank != world_size - 1:
    timeout = timedelta(seconds=wait_s / 3)
    say_how_it_ended(lambda: dist.monitored_barrier(roll_call, timeout=timeout, wait_all_ranks=True), rank > 0)
dist.barrier()
for broken in (impatient, roll_call):
    dist.destroy_process_group(broken)

# %% [markdown]
# Ranks can also wait forever when nobody is missing. Here everybody first sends to the right, then receives:
#
# ![Four ranks that all send before they receive: each send waits for a receive that never
# starts.](../assets/02_ordered_sends.svg)

# %%
# %%ranks
polite = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s / 2))
if world_size > 1:  # a world of one has no neighbour
    say_how_it_ended(lambda: dist.send(torch.ones(1), right, group=polite))
dist.barrier()
dist.destroy_process_group(polite)

# %% [markdown]
# gloo's `send` ends only when the other side receives, so every rank is stuck in its send: a
# [deadlock](../assets/glossary.md#deadlock).
#
# ### Build F: nobody goes first
#
# Mend this with a call that you have seen.


# %%
# %%ranks
def pass_right(mine):
    """Give `mine` to the right-hand neighbour; return the tensor of the left-hand one."""
    theirs = torch.empty_like(mine)
    ____
    return theirs


checks.pass_right(pass_right, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution F</summary>
#
# ```python
# def pass_right(mine):
#     """Give `mine` to the right-hand neighbour; return the tensor of the left-hand one."""
#     theirs = torch.empty_like(mine)
#     exchange(mine, right, theirs, left)
#     return theirs
# ```
#
# </details>

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: waiting</summary>
#
# 7 minutes. *Say:* the rank with the error message is the honest one; look for the silent one. *Usual mistakes:* raising
# the time-out; putting a barrier before each collective "to be safe" (it hangs just the same, one line earlier); mending
# the order with `if rank == 0`. *When late:* only the missing rank. *Ask:* "Your job printed nothing for eight minutes.
# What do you look at first?" (Lesson 11 answers with the flight recorder.)
#
# </details>

# %% [markdown]
# ## A bug from the zoo (CORE, 2 min)
#
# This ring was the *reference solution* of a well-known course (rewritten here). Its sums are right, and so is the number
# of its messages. **Measure before you read it.**


# %% tags=["nbval-check-output"]
# %%ranks
def suspicious_ring(x_N):
    """Sum x_N over all ranks, in place."""
    travelling_N = x_N.clone()
    for _ in range(world_size - 1):  # reduce-scatter
        arrived_N = torch.empty_like(x_N)
        exchange(travelling_N, right, arrived_N, left)
        x_N += arrived_N
        travelling_N = arrived_N
    for _ in range(world_size - 1):  # all-gather
        arrived_N = torch.empty_like(x_N)
        exchange(x_N, right, arrived_N, left)
        x_N.copy_(arrived_N)
    return x_N


lesson.count({"your ring": ring_all_reduce, "suspicious": suspicious_ring}, ranks)

# %% [markdown]
# <details><summary>What is wrong?</summary>
#
# It ships **whole tensors**: n times the bytes. Neither the sum nor the number of messages shows that, only the bytes
# do. It happened in
# [ARENA_3.0#407](https://github.com/callummcdougall/ARENA_3.0/pull/407). Exercise 4 mends it.
#
# </details>

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: zoo</summary>
#
# 2 minutes, in pairs. *Say:* a right sum proves little. *Usual mistakes:* reading the code first; comparing times, which
# depend on the machine. *When late:* run the measurement and ask the room. *Ask:* "Which test of your own code would not
# have noticed?"
#
# </details>

# %% [markdown]
# ## Recap (CORE, 1 min)

# %%
# %%ranks
card(
    "Pick a collective by two questions: who has the data now, who needs it next?",
    "A ring all-reduce is a reduce-scatter and an all-gather: 2(n-1) messages, 2(n-1)/n of the bytes per rank.",
    "A message costs alpha + bytes/beta: many small ones pay alpha, few large ones pay beta.",
    "A rank that does not call leaves the others waiting; look for the rank without an error.",
    "A right sum proves little. Count the messages and the bytes.",
    figure="reduce-scatter on the ring (02_ring_reduce_scatter.svg)",
    command="srun --nodes 2 --ntasks-per-node 4 python scripts/02_collectives.py --largest-mib 256",
)

# %% [markdown]
# Next: [lesson 03](03_data_parallel.ipynb) puts this all-reduce into a training step. Below is the lab.

# %% [markdown]
# ## Lab: the collectives in code (MORE, 10 min)
#
# The lab runs the same eight patterns and prints what each rank holds. A [handbook
# page](../assets/handbook/02_collectives.md) has tables of what each one costs, and of its name in MPI.
#
# ### Four numbers by hand
#
# ![Send and recv: rank 1 sends its 1 to rank 2; ranks 0 and 3 do not take part.](../assets/02_send_recv.svg)
#
# Ranks hold 3, 1, 4 and 2. Rank 0 sends its number to rank 1, which adds its own and sends the sum to rank 2, and so on.

# %% tags=["nbval-check-output"]
# %%ranks
number = torch.tensor([(3, 1, 4, 2)[rank % 4]], device=device)
so_far = number.clone()
if rank > 0:  # rank 0 begins, everybody else waits for the sum so far ...
    dist.recv(so_far, src=rank - 1)
    so_far += number
if rank < world_size - 1:  # ... and passes it on
    dist.send(so_far, dst=rank + 1)
say(f"my number is {number.item()}, the sum so far {so_far.item()}")

# %% [markdown]
# They hold 3, 4, 8 and 10: only rank 3 has the full sum. Three messages, one after the other, and three more would
# carry it back. The library needs one call, and afterwards all ranks hold the sum:

# %% tags=["nbval-check-output"]
# %%ranks
total = number.clone()
dist.all_reduce(total)  # all ranks
say(f"the sum is {total.item()}")

# %% [markdown]
# ### From one rank to all
#
# ![Broadcast: rank 0 holds 3, the others nothing; afterwards all four hold 3.](../assets/02_broadcast.svg)
#
# ![Scatter: rank 0 holds the parts 0, 1, 2 and 3; afterwards rank k holds part k and nothing else.](../assets/02_scatter.svg)
#
# [Broadcast](../assets/glossary.md#broadcast) is how ranks start with the same weights.
# [Scatter](../assets/glossary.md#scatter) deals out rank 0's parts; those of the other ranks do not matter. Its output has
# the shape of *one part*.

# %% tags=["nbval-check-output"]
# %%ranks
number = torch.tensor([(3, 1, 4, 2)[rank % 4]], device=device)
parts = torch.arange(world_size, device=device) + 10 * rank  # rank 2 holds 20, 21, ...: one for each rank
x = number.clone() if rank == 0 else torch.zeros_like(number)
dist.broadcast(x, src=0)

part = torch.empty_like(parts[:1])
dist.scatter(part, list(parts.split(1)) if rank == 0 else None, src=0)
say(f"after broadcast I hold {x.tolist()}, after scatter {part.tolist()}: shape {list(part.shape)}")

# %% [markdown]
# ### From all ranks to one
#
# ![Gather: the ranks hold 3, 1, 4 and 2; afterwards rank 0 holds all four numbers side by side.](../assets/02_gather.svg)
#
# ![Reduce: the ranks hold 3, 1, 4 and 2; afterwards rank 0 holds their sum, 10.](../assets/02_reduce.svg)
#
# [Gather](../assets/glossary.md#gather) puts tensors side by side. [Reduce](../assets/glossary.md#reduce) adds them up,
# or multiplies them, or takes the largest value at each place.

# %% tags=["nbval-check-output"]
# %%ranks
everything = [torch.empty_like(number) for _ in range(world_size)] if rank == 0 else None
dist.gather(number, everything, dst=0)
total = number.clone()
dist.reduce(total, dst=0)  # on the other ranks `total` is scratch space afterwards: do not read it
if rank == 0:
    say(f"gather: {torch.cat(everything).tolist()}, reduce: {total.tolist()}")

# %% [markdown]
# ### From all ranks to all
#
# The cell below uses the list forms, which copy. The tensor forms do not: `all_gather_into_tensor`,
# which torch 2.13 calls `all_gather_single`.
#
# ![All-reduce: the ranks hold 3, 1, 4 and 2; afterwards every rank holds their sum, 10.](../assets/02_all_reduce.svg)
#
# ![All-gather: the ranks hold 3, 1, 4 and 2; afterwards every rank holds all four side by
# side.](../assets/02_all_gather.svg)
#
# [All-reduce](../assets/glossary.md#all-reduce) sums gradients in data parallel training (lesson 03).
# [All-gather](../assets/glossary.md#all-gather) puts sharded weights together before a layer runs (lesson 06).

# %% tags=["nbval-check-output"]
# %%ranks
total = number.clone()
dist.all_reduce(total)
everything = [torch.empty_like(number) for _ in range(world_size)]
dist.all_gather(everything, number)
say(f"all-reduce: {total.tolist()}, all-gather: {torch.cat(everything).tolist()}")

# %% [markdown]
# ![Reduce-scatter: every rank holds four parts; afterwards rank k holds the sum of everybody's part k: 60, 64, 68,
# 72.](../assets/02_reduce_scatter.svg)
#
# ![All-to-all: every rank holds four parts; afterwards rank k holds everybody's part k, in rank
# order.](../assets/02_all_to_all.svg)
#
# [Reduce-scatter](../assets/glossary.md#reduce-scatter) leaves each rank *one part* of the sum: gradients of sharded
# weights (lesson 06). [All-to-all](../assets/glossary.md#all-to-all) transposes: tokens on their way to experts.
#
# **Predict.** Now all four ranks hold the same [1, 2, 3, 4]. What does rank 2 hold after each of these two collectives?
#
# <details><summary>Answer</summary>
#
# After the reduce-scatter the sum of everybody's part 2: 3 + 3 + 3 + 3 = 12. After the all-to-all the same four numbers
# side by side, not added: [3, 3, 3, 3].
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
parts = torch.arange(1, world_size + 1, device=device)  # on every rank
my_sum = torch.empty_like(parts[:1])
dist.reduce_scatter(my_sum, list(parts.split(1)))
column = torch.empty_like(parts)
dist.all_to_all_single(column, parts)
say(f"reduce-scatter: {my_sum.tolist()}, all-to-all: {column.tolist()}")

# %% [markdown]
# ### A call without data
#
# A [barrier](../assets/glossary.md#barrier) releases the ranks when the last one arrives. It is for timing and for
# files, rarely for correctness: every collective waits for the data that it needs anyway.
#
# ![Barrier: the ranks arrive one by one, wait for the last, and go on together.](../assets/02_barrier.svg)

# %%
# %%ranks
time.sleep(0.1 * rank)  # the ranks arrive one by one, 0.1 s apart
arrived = time.perf_counter()
dist.barrier()
say(f"I waited {time.perf_counter() - arrived:.1f} s")

# %% [markdown]
# ### What gloo really sends
#
# The handbook's table has lower bounds. What does the library do? The operating system counts the bytes that each TCP
# connection has delivered, so we can ask gloo, the library for CPUs. (Headers add a little.) The cell measures five
# collectives. Which of them do you expect to send no more than the bound?

# %%
# %%ranks
from manyhands.measure.timing import max_over_ranks

x_N = torch.zeros(240 * 1024 * world_size)  # on the CPU: gloo
parts_N = list(x_N.chunk(world_size))
part_N, out_N = torch.zeros_like(parts_N[0]), torch.zeros_like(x_N)
gloo, bound = dist.new_group(backend="gloo"), (world_size - 1) / world_size
calls = {
    "broadcast": (lambda: dist.broadcast(x_N, 0, group=gloo), 1),
    "all-reduce": (lambda: dist.all_reduce(x_N, group=gloo), 2 * bound),
    "all-gather": (lambda: dist.all_gather(list(out_N.chunk(world_size)), part_N, group=gloo), bound),
    "reduce-scatter": (lambda: dist.reduce_scatter(part_N, parts_N, group=gloo), bound),
    "all-to-all": (lambda: dist.all_to_all_single(out_N, x_N, group=gloo), bound),
}
for name, (call, at_least) in calls.items():
    dist.barrier()
    with wire.watch(sockets=True) as seen:
        call()
    sent_bytes = max_over_ranks(float(seen.transport_bytes or 0), ranks)
    if rank == 0 and sent_bytes:
        say(f"{name:>14}: the busiest rank sends {sent_bytes / x_N.nbytes:.2f} x N, the bound is {at_least:.2f}")

# %% [markdown]
# gloo's broadcast is a tree: on 4 ranks the root sends the whole tensor twice, but the last rank has it after two hops.
# gloo's reduce-scatter sends as many bytes as an all-reduce, because it *is* an all-reduce: gloo sums everything and
# cuts out a part.

# %% [markdown]
# ### The same in MPI
#
# MPI has the same patterns under nearly the same names, and in Python they come from `mpi4py`. Names with a capital
# (`Allreduce`) take arrays and are fast; with a small letter (`allreduce`) they pickle any Python object. Where there is no
# MPI world, the next cell says so.

# %%
# %%ranks
import numpy as np

comm = mpi_world()
if comm is None and rank == 0:
    say("no MPI world here; to see these lines run: mpiexec -n 4 python scripts/02_collectives.py")
if comm is not None:
    mine, my_parts = number.cpu().numpy(), parts.cpu().numpy()
    total, part, whole = np.empty_like(mine), np.empty_like(mine), np.empty_like(my_parts)
    comm.Allreduce(mine, total)
    comm.Allgather(mine, whole)
    comm.Reduce_scatter_block(my_parts, part)
    say(f"Allreduce {total}, Allgather {whole}, Reduce_scatter_block {part}")

# %% [markdown]
# In the next collectives one rank is special, the *root*. The others may pass None where only the root gives or gets
# something:

# %%
# %%ranks
if comm is not None:
    one = mine.copy() if rank == 0 else np.zeros_like(mine)
    comm.Bcast(one, root=0)
    comm.Scatter(my_parts if rank == 0 else None, part, root=0)
    comm.Gather(mine, whole if rank == 0 else None, root=0)
    comm.Reduce(mine, total if rank == 0 else None, root=0)
    comm.Alltoall(my_parts, transposed := np.empty_like(my_parts))
    say(f"Bcast {one}, Scatter {part}, Alltoall {transposed}")
    if rank == 0:
        say(f"Gather {whole}, Reduce {total}")

# %% [markdown]
# ## Lab: is the ring right? (MORE, 10 min)
#
# Take twelve "gradients" of 240,000 random numbers in float64. The ranks share them. Each rank sums its own share. An
# all-reduce then adds up these sums, once with your ring and once with the library. The third way is one process that
# adds up all twelve. Throughout this course a technique has to pass this test: **from scratch = library = one
# process**.

# %%
# %%ranks
generator = torch.Generator().manual_seed(0)  # every rank draws the same twelve, and keeps its share
gradients_12N = torch.randn(12, 240_000, generator=generator, dtype=torch.float64)
mine_N = gradients_12N.tensor_split(world_size)[rank].sum(0).to(device)

with wire.watch() as seen:  # counts what leaves this rank; it knows nothing of our formula
    ours_N = ring_all_reduce(mine_N.clone())
library_N = mine_N.clone()
dist.all_reduce(library_N)
alone_N = gradients_12N.sum(0).to(device)

# %% [markdown]
# The counter saw every message. Here is what it counted, next to the prediction of 2(n-1)/n times the tensor:

# %% tags=["nbval-check-output"]
# %%ranks
predicted_bytes = 2 * (world_size - 1) / world_size * mine_N.nbytes
for name, other_N in {"the library": library_N, "one process": alone_N}.items():
    say(f"agrees with {name} to 1e-10: {torch.allclose(ours_N, other_N, rtol=0, atol=1e-10)}")
say(f"{seen.messages} messages, {seen.sent_bytes / 1e6:.2f} MB; predicted {predicted_bytes / 1e6:.2f} MB")
metrics.exact(ring_sum=fingerprint([ours_N]), messages=seen.messages, sent_bytes=seen.sent_bytes)
metrics.close(tolerance=1e-10, twelve_gradients=ours_N[::10_000])

# %% [markdown]
# ### Did the bytes leave the process?
#
# The counter saw what entered the library. The operating system knows what left: it counts the bytes that each TCP
# connection has delivered.
#
# **Predict** the ratio of bytes on the wire to bytes of the tensor, on 4 ranks: for our ring, and for gloo's own
# all-reduce, which we treat as a black box.
#
# <details><summary>Answer</summary>
#
# Ours: 2(n-1)/n = 1.5, and a little more for the headers of TCP and gloo. gloo's: the cell tells you. If every rank
# sent its tensor to every other, the ratio would be 3; if rank 0 collected and redistributed, different ranks would
# show different numbers.
#
# </details>

# %%
# %%ranks
with wire.watch(sockets=True) as ours:
    ring_all_reduce(mine_N.clone())
with wire.watch(sockets=True) as theirs:
    dist.all_reduce(mine_N.clone())
if rank == 0 and theirs.transport_bytes is not None:  # with NCCL hardly a byte passes a socket
    say(f"theory   {2 * (world_size - 1) / world_size:.3f} x the tensor")
    say(f"our ring {ours.transport_bytes / mine_N.nbytes:.3f} x")
    say(f"gloo     {theirs.transport_bytes / mine_N.nbytes:.3f} x")

# %% [markdown]
# If gloo's number is near the theory, gloo moves as many bytes as a ring. So you have ruled out "everything to
# everyone" without reading its code. (Recursive halving and doubling would move as many bytes. gloo's source shows that
# it is a ring.)

# %% [markdown]
# ### Exercise 1: any length
#
# Our ring refuses 7 numbers on 4 ranks, and real gradients have any number of elements. Write an all-reduce for **any
# length**, also 0 and shorter than the number of ranks, in place. The check wants the right sum, exactly 2(n-1)
# messages, and chunks no larger than needed (a chunk may be empty). You may use the two halves from above.
#
# <details><summary>Hint</summary>
#
# `torch.arange(5).chunk(4)` gives three pieces. Look for a method that always gives four; `list(...)` makes a list of
# them. And what arrives has the size of the chunk to which you add it, not of the one that you send.
#
# </details>


# %%
# %%ranks
def all_reduce_any_length(x_N):
    """Sum x_N over all ranks, in place, and return it."""
    raise NotImplementedError  # your turn


checks.all_reduce_any_length(all_reduce_any_length, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 1</summary>
#
# ```python
# def all_reduce_any_length(x_N):
#     """Sum x_N over all ranks, in place, and return it."""
#     chunks = list(x_N.tensor_split(world_size))  # always n views, some of them perhaps empty
#     ring_reduce_scatter(chunks)
#     ring_all_gather(chunks)
#     return x_N
# ```
#
# </details>

# %% [markdown]
# ## Lab: who waits for a late rank? (MORE, 2 min)
#
# With `--trace` in its first line, a cell draws what each rank did while it ran. Here the last rank comes 0.2 s late, first
# to an all-reduce, then as the receiver of a message from rank 0. (A script ignores the flag; the page *Notebooks of your
# own* has the command that traces a script.)
#
# **Predict.** Who waits for the last rank in the all-reduce, and who in the message?

# %%
# %%ranks --trace
for is_message in (False, True):
    dist.barrier()
    if rank == world_size - 1:
        time.sleep(0.2)
    if not is_message:
        dist.all_reduce(torch.ones(1_000, device=device))
    elif rank == 0 and world_size > 1:
        dist.send(torch.ones(1_000, device=device), dst=world_size - 1)
    elif rank == world_size - 1 > 0:
        dist.recv(torch.ones(1_000, device=device), src=0)

# %% [markdown]
# <details><summary>Answer</summary>
#
# In the all-reduce all the others wait. In the message only rank 0 does: gloo's `send` ends when the other side receives. The
# late rank waits for nobody, so a short wait points to the rank that is slow.
#
# </details>

# %% [markdown]
# ## Lab: sends that hang only when they are large (MORE, 9 min)
#
# gloo's `send` waits for its receiver, whatever the size. MPI hides the bug better: it copies a small message into a
# buffer and lets the sender go on ("eager"), while a large one waits ("rendezvous"). A program with this bug passes all
# its small tests and hangs on the first real run. The next cell tries gloo with 4 bytes, then with 4 million:

# %%
# %%ranks
dist.barrier()  # all ranks come at the same time
for length in (1, 1_000_000) if world_size > 1 else ():  # a world of one has no neighbour
    polite = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s / 2))
    mine, theirs = torch.full((length,), float(rank)), torch.empty(length)
    try:
        dist.send(mine, right, group=polite)
        dist.recv(theirs, left, group=polite)
        say(f"{mine.nbytes:,} bytes: passed, I hold {theirs[0].item():g}")
    except RuntimeError:
        say(f"{mine.nbytes:,} bytes: nobody received what I sent")
    dist.barrier()

# %% [markdown]
# We can ask MPI without hanging: `Isend` starts a message, and `Test` tells whether the sender could go on before anybody
# receives. (This needs an MPI world, and prints nothing without one.)

# %%
# %%ranks
import numpy as np

comm = mpi_world()
for n_bytes in (400, 4_000, 40_000, 400_000) if comm is not None else ():
    mine, theirs = np.zeros(n_bytes, np.uint8), np.empty(n_bytes, np.uint8)
    sending, asked_until = comm.Isend(mine, right), time.monotonic() + wait_s / 10
    done = sending.Test()
    while not done and time.monotonic() < asked_until:
        done = sending.Test()
    comm.Barrier()  # until here nobody has received anything
    if rank == 0:
        say(f"{n_bytes:7,} bytes: a send before any receive {'passes' if done else 'would hang'}")
    comm.Recv(theirs, left)
    sending.Wait()

# %% [markdown]
# ### Exercise 5: whose turn is it?
#
# Mend the deadlock with nothing but `dist.send` and `dist.recv`: every rank gives `mine` to the right and returns its left
# neighbour's tensor. A round is a set of messages that travel at the same time. "Rank 0 sends first, all others receive
# first" ends, but takes n rounds. Two rounds are enough, three if n is odd, and the check counts them. (In a world of
# one, return a copy.)


# %%
# %%ranks
def pass_in_rounds(mine):
    """Give `mine` to the right-hand neighbour; return the tensor of the left-hand one (same shape and dtype)."""
    raise NotImplementedError  # your turn: this was dist.send(mine, right), then dist.recv(theirs, left)


checks.pass_in_rounds(pass_in_rounds, ranks)


# %% [markdown] tags=["solution"]
# <details><summary>Solution 5</summary>
#
# ```python
# def pass_in_rounds(mine):
#     """Give `mine` to the right-hand neighbour; return the tensor of the left-hand one (same shape and dtype)."""
#     theirs = mine.clone()
#     if rank % 2:  # odd ranks receive first: in the first round their left neighbours send
#         dist.recv(theirs, left)
#         dist.send(mine, right)
#     elif world_size > 1:
#         dist.send(mine, right)
#         dist.recv(theirs, left)
#     return theirs
# ```
#
# </details>

# %% [markdown]
# Ordered sends do not hang, but in each round every rank uses only one direction of its links. `exchange` uses both,
# and in one batch nobody has to be first. On GPUs prefer it even to `isend` followed by `recv`: NCCL wants the two [in
# one group](https://github.com/NVIDIA/nccl/issues/479), and some process groups [run point-to-point calls one after the
# other](https://github.com/pytorch/pytorch/pull/154132), so separate calls may hang.

# %% [markdown]
# ## Lab: the whole experiment (MORE, 8 min)
#
# Measure one *hop* for many sizes with gloo (on GPUs: NCCL) and with MPI where there is an MPI world. Fit α and β. Then
# **predict** something that was not used in the fit: the ring all-reduce. All ranks take part here, also where they
# share cores. The measurements take turns, so a slow moment hits all of them alike, and the slowest rank counts.
#
# On GPUs the cell's MPI calls send from the *host's* memory, and NCCL sends from GPU to GPU: do not compare the two.

# %%
# %%ranks --timeout 300
from functools import partial
from statistics import median

import numpy as np

sizes_b = lesson.sizes(largest_mib)
comm, library_name, measured_s = mpi_world(), ranks.library, {}  # the library is gloo on CPUs
mpi_name = "MPI" if device.type == "cpu" else "MPI, host memory"
for n_bytes in sizes_b:
    give = torch.ones(n_bytes, dtype=torch.uint8, device=device)
    x_N = torch.zeros(-(-n_bytes // 4 // world_size) * world_size, device=device)
    calls = {
        ("hop", library_name): partial(exchange, give, right, torch.empty_like(give), left),
        ("all-reduce", library_name): partial(dist.all_reduce, x_N),
        ("all-reduce", "our ring"): partial(ring_all_reduce, x_N),
    }
    if comm is not None:
        mine, theirs = np.ones(n_bytes, np.uint8), np.empty(n_bytes, np.uint8)
        part, total = np.zeros(x_N.numel(), np.float32), np.empty(x_N.numel(), np.float32)
        calls["hop", mpi_name] = partial(comm.Sendrecv, mine, right, recvbuf=theirs, source=left)
        calls["all-reduce", mpi_name] = partial(comm.Allreduce, part, total)
    for key, samples in lesson.sample_times(calls, n_bytes, repeats, ranks).items():
        measured_s.setdefault(key, []).append(samples)

# %% [markdown]
# The fit is a least-squares line through (bytes, seconds). Each row is divided by its own time, so that all *relative*
# errors count alike: bytes span five orders of magnitude, and plain least squares cares only about the largest. (All
# ranks take part here, in CORE no more than there are cores. Where that differs, so does α.)

# %%
# %%ranks
hop_samples_s = {name: samples for (what, name), samples in measured_s.items() if what == "hop"}
hop_s = {name: [median(samples) for samples in of_sizes] for name, of_sizes in hop_samples_s.items()}

# %%
# %%ranks
line = {name: lesson.fit(sizes_b, measured) for name, measured in hop_s.items()}
for name, (alpha, beta) in line.items():
    if rank == 0:
        knee = f"latency and bandwidth cost the same at {alpha * beta / 1e3:,.0f} kB"
        say(f"{name}: alpha = {1e6 * alpha:,.0f} µs, beta = {beta / 1e6:,.0f} MB/s; {knee}")

# %% [markdown]
# On a logarithmic plot α + bytes/β is flat on the left, where α rules, and has slope one on the right, where β does.
# Between them lies the knee, at α·β bytes. Whiskers go from the fastest sample to the slowest. The lower panel shows
# measured divided by fitted: 1 is perfect. MPI switches
# from eager to rendezvous sends inside this range; one straight line cannot follow that, and the residual shows it.

# %%
# %%ranks
from manyhands.plots.looks import ALTERNATIVES

looks = dict(zip((library_name, mpi_name, "our ring"), ALTERNATIVES, strict=False))  # the same in each plot
if rank == 0:
    fitted = {name: [alpha + b / beta for b in sizes_b] for name, (alpha, beta) in line.items()}
    title = f"one hop on the ring, {world_size} ranks on this machine"
    figure = lesson.draw_against_size(sizes_b, hop_samples_s, fitted, title, looks=looks, formula="fitted")
    show(figure, "hop", alt="Time of one hop against bytes: medians and whiskers around the fitted line.")

# %% [markdown]
# A point off the line need not be the network's fault. Where ranks share cores (the start cell says how many there are),
# a rank whose message has arrived may still wait for a core. So α is a property of network, software *and* load:
# measure it where you will run, and more than once.

# %% [markdown]
# **Predict.** α and β come from the hop. Will the measured ring lie on your prediction, above it, or below?
#
# <details><summary>Answer</summary>
#
# On a machine that is otherwise idle, expect it somewhat above. The formula has no term for the *adding*, which half of
# the hops do, and it takes the median of one hop, whereas a ring of six hops waits six times for whichever rank is
# slowest. On a busy machine α is noisy, and points fall on both sides.
#
# </details>

# %%
# %%ranks
reduce_samples_s = {name: samples for (what, name), samples in measured_s.items() if what == "all-reduce"}
predicted_s = [ring_seconds(b, world_size, *line[library_name]) for b in sizes_b]
if rank == 0:
    title = f"all-reduce over {world_size} ranks on this machine"
    figure = lesson.draw_against_size(sizes_b, reduce_samples_s, {"our ring": predicted_s}, title, looks=looks)
    show(figure, "all_reduce", alt="Time of an all-reduce against bytes, measured and predicted.")

# %% [markdown]
# In numbers:

# %%
# %%ranks
reduce_s = {name: [median(samples) for samples in of_sizes] for name, of_sizes in reduce_samples_s.items()}
metrics.measured(hop_s=hop_s, all_reduce_s=reduce_s, alpha_beta=line, sizes_b=sizes_b)
if rank == 0 and world_size > 1:
    ratios = [m / p for m, p in zip(reduce_s["our ring"], predicted_s, strict=True)]
    low, middle, high = min(ratios), median(ratios), max(ratios)
    say(f"our ring takes {low:.1f} to {high:.1f} times the prediction, in the median {middle:.1f}")
    for name, seconds in reduce_s.items():
        say(f"{name} takes {1e3 * seconds[-1]:,.1f} ms for {sizes_b[-1] / 2**20:g} MiB")
    one_by_one, at_once = (1e3 * k * ring_seconds(4e6 / k, world_size, *line[library_name]) for k in (40, 1))
    say(f"40 gradients of 100 kB: predicted {one_by_one:,.0f} ms one by one, {at_once:,.0f} ms in one piece")

# %% [markdown]
# gloo's all-reduce is a ring too; it cuts each chunk into pieces and adds one
# while the next is under way.

# %% [markdown]
# ### Algorithm bandwidth and bus bandwidth
#
# "All-reduce at 100 GB/s" can mean two things. *Algorithm bandwidth* is the bytes of the tensor divided by the time:
# what you feel. [*Bus bandwidth*](../assets/glossary.md#bus-bandwidth) multiplies that by 2(n-1)/n, the bytes that each rank of a ring sends: what the link
# feels. Only bus bandwidth can be compared with a data sheet, or between numbers of ranks. nccl-tests prints both
# (`algbw`, `busbw`).

# %%
# %%ranks
if rank == 0:
    factor = 2 * (world_size - 1) / world_size
    figure = lesson.draw_bandwidths(sizes_b, reduce_s, factor, "all-reduce on this machine", looks=looks)
    show(figure, "bandwidth", alt=f"Algorithm and bus bandwidth of {', '.join(reduce_s)} against bytes.")

# %% [markdown]
# The plot shows the same data as bandwidth. Far to the left of the knee nearly all of the bandwidth is lost to α, and a
# network with a larger β would not help.

# %% [markdown]
# ## Lab: other shapes, on a virtual network (MORE, 14 min)
#
# **Why.** The ring has the fewest bytes but many hops: with 1,000 ranks it pays 1,998 latencies in a row. Other shapes
# send more bytes in fewer hops. Whether that is faster depends on the network, and one machine has only one network. So
# we take a [**virtual network**](../assets/glossary.md#virtual-network): the messages are real, the sums are real, and
# a wrong algorithm hangs or gives wrong numbers, as on any network. Only *time* is computed. Every rank has a logical
# clock, and a message moves it by α + bytes/β of the link that it takes. No real clock is read, so each run gives the
# same times to the last digit.
#
# Two nodes. Inside, NVLink at 150 GB/s per direction and peer; between them, InfiniBand NDR: 400 Gb/s, that is 50 GB/s.
# Those bandwidths are from data sheets; the latencies of 2 and 5 µs are assumed.

# %%
# %%ranks
from manyhands.measure.virtual_network import Link, VirtualNetwork

nvlink, infiniband = Link(latency_s=2e-6, bytes_per_s=150e9), Link(latency_s=5e-6, bytes_per_s=50e9)
per_node = world_size // 2 if world_size % 2 == 0 else world_size  # two nodes, where the ranks divide
net = VirtualNetwork(ranks, inside=nvlink, between=infiniband, ranks_per_node=per_node)


def virtual_s(algorithm, *args):
    """Virtual seconds of algorithm(*args) on the slowest rank. All ranks call it."""
    net.reset()
    algorithm(*args)
    clocks = [None] * world_size
    dist.all_gather_object(clocks, net.clock_s)
    return max(clocks)


# %% [markdown]
# ### A tree
#
# ![Broadcast by a binomial tree: in rounds 1, 2 and 3 the ranks that have the data double from 1 to 2, 4 and
# 8.](../assets/02_tree.svg)
#
# Rank 0 could send to everybody in turn: n-1 messages in a row. In a **binomial tree** whoever has the data passes it on,
# so the number of ranks that have it doubles each round. **Predict** the rounds for 4 ranks, and for 1,000.
#
# <details><summary>Answer</summary>
#
# log₂ n, rounded up: 2 rounds for 4 ranks, 10 for 1,000 (instead of 999). So it costs α·log₂ n, and every message carries
# the whole tensor. For large tensors a ring, or a tree fed in small pieces, is better.
#
# </details>


# %%
# %%ranks
def flat_broadcast(x):
    """Rank 0 sends to everybody in turn."""
    for other in range(1, world_size):
        if rank == 0:
            net.send(x, other)
        elif rank == other:
            net.recv(x, 0)


def tree_broadcast(x):
    """In each round every rank that has x sends it to one that has not."""
    have = 1
    while have < world_size:
        if rank < have and rank + have < world_size:
            net.send(x, rank + have)
        elif have <= rank < 2 * have:
            net.recv(x, rank - have)
        have *= 2


# %% [markdown]
# Run both on the virtual network. These times are the same in every run, on every machine:

# %% tags=["nbval-check-output"]
# %%ranks
x = torch.full((1000,), 7.0) if rank == 0 else torch.zeros(1000)
times = {"one by one": virtual_s(flat_broadcast, x.clone()), "tree": virtual_s(tree_broadcast, x)}
if rank == 0:
    for name, t in times.items():
        say(f"broadcast of 4 kB, {name}: {1e6 * t:.2f} virtual µs")
assert (x == 7).all()  # virtual time, real numbers: they have arrived
metrics.exact(broadcast_virtual_s=times)

# %% [markdown]
# Both send three messages. One by one, rank 0 sends all three in a row, two of them over the slow link. In the tree,
# ranks 0 and 1 send at the same time in round 2, and the last rank waits for only one slow message.

# %% [markdown]
# ### All-to-all, in pairs
#
# Every rank has something for every other: n-1 messages each. What can go wrong is the *order*: if all start with rank 0,
# the others wait for it. So in step s everybody sends to the rank s places to the right and receives from s places to
# the left. In every step each rank sends one message and receives one.


# %% tags=["nbval-check-output"]
# %%ranks
def pairwise_all_to_all(parts):
    """parts[k] goes to rank k; returns everybody's part for this rank, in rank order."""
    got = [torch.empty_like(parts[rank]) for _ in range(world_size)]
    got[rank].copy_(parts[rank])
    for step in range(1, world_size):
        to, source = (rank + step) % world_size, (rank - step) % world_size
        net.exchange(parts[to], to, got[source], source)
    return got


parts, library = torch.arange(world_size) + 10 * rank, torch.empty(world_size, dtype=torch.int64)
net.reset()
got = pairwise_all_to_all(list(parts.split(1)))
dist.all_to_all_single(library, parts)
say(f"{torch.cat(got).tolist()} after {1e6 * net.clock_s:.2f} virtual µs; the library: {library.tolist()}")

# %% [markdown]
# ### All-reduce in log₂ n hops, and one that knows its nodes
#
# **Recursive doubling**: swap the whole tensor with the rank whose number differs in the last bit, and add; then in the
# second-last bit, and so on. After log₂ n hops everybody has the sum: few hops, many bytes. (Here n must be a power of
# two.)
#
# **Hierarchical**: bytes are cheap inside a node and expensive between nodes. So sum inside first.
#
# ![Hierarchical all-reduce on 2 nodes of 2 ranks: reduce-scatter inside the nodes, all-reduce across, all-gather
# inside.](../assets/02_hierarchical.svg)
#
# Its parts are the two halves of the ring that you know, now among some ranks only: the `team`.


# %%
# %%ranks
def team_reduce_scatter(chunks, team):
    """The ring's first half among the ranks of `team`, on the virtual network; returns the finished chunk."""
    n, me = len(team), team.index(rank)
    for hop in range(n - 1):
        mine = chunks[(me - hop - 1) % n]
        arrived = torch.empty_like(mine)
        net.exchange(chunks[(me - hop) % n], team[(me + 1) % n], arrived, team[(me - 1) % n])
        mine += arrived
    return chunks[(me + 1) % n]


def team_all_gather(chunks, team):
    """The ring's second half among the ranks of `team`."""
    n, me = len(team), team.index(rank)
    for hop in range(n - 1):
        give, take = chunks[(me + 1 - hop) % n], chunks[(me - hop) % n]
        net.exchange(give, team[(me + 1) % n], take, team[(me - 1) % n])


# %% [markdown]
# These two functions make three all-reduces, which differ only in who talks to whom:


# %%
# %%ranks
def ring(x_N, team):
    """All-reduce among the ranks of `team`."""
    chunks = x_N.tensor_split(len(team))
    team_reduce_scatter(chunks, team)
    team_all_gather(chunks, team)


def doubling(x_N):
    """All-reduce in log2 n hops; n must be a power of two."""
    for bit in range(world_size.bit_length() - 1):
        arrived = torch.empty_like(x_N)
        net.exchange(x_N, rank ^ 2**bit, arrived, rank ^ 2**bit)
        x_N += arrived


def hierarchical(x_N):
    """Reduce-scatter inside the node, all-reduce of that part across nodes, all-gather inside."""
    node = [other for other in range(world_size) if other // per_node == rank // per_node]
    peers = [other for other in range(world_size) if other % per_node == rank % per_node]
    chunks = x_N.tensor_split(per_node)
    ring(team_reduce_scatter(chunks, node), peers)
    team_all_gather(chunks, node)


# %% [markdown]
# **Predict**, for 4 ranks on these two nodes: which of the three is fastest for 4 KiB, and which for 4 MiB? At which
# size do they cross?
#
# | algorithm | hops | time for N bytes |
# |---|---|---|
# | ring | 6, each waits for the slow link | 6 · (5 µs + N/4 / 50 GB/s) |
# | doubling | 1 inside, 1 across | 2 µs + N / 150 GB/s + 5 µs + N / 50 GB/s |
# | hierarchical | 2 inside, 2 across | 2 · (2 µs + N/2 / 150 GB/s) + 2 · (5 µs + N/4 / 50 GB/s) |
#
# <details><summary>Answer</summary>
#
# 4 KiB: doubling, 7.1 µs against 14.1 and 30.1. 4 MiB: hierarchical, 84 µs against 119 and 156. They cross where
# 7 µs + N·(1/150 + 1/50) ns/B = 14 µs + N·(1/150 + 1/100) ns/B: at N = 700 kB.
#
# </details>

# %%
# %%ranks
virtual_sizes_b = [4096 * 4**k for k in range(6)]
algorithms = {"ring": lambda x_N: ring(x_N, list(range(world_size))), "hierarchical": hierarchical}
if world_size & (world_size - 1) == 0:  # a power of two
    algorithms["doubling"] = doubling
shapes_s = {name: [] for name in algorithms}
for n_bytes in virtual_sizes_b:
    for name, algorithm in algorithms.items():
        x_N = torch.full((n_bytes // 4,), float(rank))
        shapes_s[name].append(virtual_s(algorithm, x_N))
        assert (x_N == world_size * (world_size - 1) / 2).all()  # virtual time, real sums
metrics.exact(all_reduce_virtual_s=shapes_s)

# %% [markdown]
# Expect two crossing lines, and above them one that never wins. The formulas for 4 ranks are dashed. The ratio below
# them is 1 if the formulas count the hops correctly.

# %%
# %%ranks
from manyhands.plots.schedule import gantt

if rank == 0:
    fast, slow = nvlink.cost_s, infiniband.cost_s  # alpha + bytes / beta
    formula = {
        "ring": [6 * slow(b / 4) for b in virtual_sizes_b],
        "hierarchical": [2 * fast(b / 2) + 2 * slow(b / 4) for b in virtual_sizes_b],
        "doubling": [fast(b) + slow(b) for b in virtual_sizes_b],
    }
    formula = formula if world_size == 4 else {}  # the table is for 2 nodes of 2
    title = "all-reduce on a virtual network of two nodes"
    figure = lesson.draw_against_size(virtual_sizes_b, shapes_s, formula, title, unit="virtual", formula="formula")
    show(figure, "shapes", alt="Virtual time against bytes: doubling first, then hierarchical wins.")

# %% [markdown]
# On 4 ranks doubling wins up to 700 kB, and the hierarchical one above. The flat ring loses everywhere here: half of its
# links are fast, but in every hop *some* rank uses a slow one, and at the next hop all others wait for it. That is why
# real libraries look at the topology first, and switch algorithm with the size (`NCCL_ALGO` names NCCL's choices: Ring, Tree, NVLS, CollNet, PAT).
#
# The next figures show where the time goes, for 1 MiB. The flat ring makes six hops at the pace of the slow link, the
# hierarchical all-reduce two short hops and two long ones.

# %%
# %%ranks
for name in ("ring", "hierarchical"):
    virtual_s(algorithms[name], torch.ones(2**18))
    spans = net.gather_spans()  # all ranks
    if rank == 0:
        figure = gantt(spans, f"all-reduce of 1 MiB, {name}", virtual=True, until_s=70e-6)
        show(figure, f"gantt_{name}", alt=f"Each rank's messages in virtual time: {name}.")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: other shapes</summary>
#
# 14 minutes, for a long course or a quick group. *Say:* virtual time, real messages; the
# plot repeats to the last digit. *Usual mistakes:* reading virtual microseconds as this machine's; thinking that a tree
# sends fewer bytes; forgetting that the slowest link sets the pace of a ring. *When late:* only the last plot. *Ask:*
# "Where does the crossing move when the network between the nodes gets ten times slower?"
#
# </details>

# %% [markdown]
# ## Exercises (MORE, 19 min)
#
# Exercises 1 and 5 are in the labs above. These three need only the start cells.

# %% [markdown]
# ### Exercise 2: pi, with one reduce
#
# Throw points at random into the unit square; the share that falls into the quarter circle is π/4. Points do not depend
# on each other, so the ranks can share them. `count_hits(points, seed)` throws and counts. Write the code around it:
# **split** the points over the ranks (1,003 points on 4 ranks: none may be lost), give every rank **different random
# numbers**, and bring the hits to rank 0 with **one reduce**.


# %%
# %%ranks
def count_hits(points, seed):
    """How many of `points` random points of the unit square lie in the quarter circle."""
    xy_P2 = torch.rand(points, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return int((xy_P2.square().sum(1) < 1).sum())


def estimate_pi(points, count_hits):
    """pi on rank 0, None on the others."""
    raise NotImplementedError  # your turn


checks.estimate_pi(estimate_pi, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 2</summary>
#
# ```python
# def estimate_pi(points, count_hits):
#     """pi on rank 0, None on the others."""
#     share = points // world_size + (rank < points % world_size)  # the first ranks take one more each
#     hits = torch.tensor(count_hits(share, seed=rank), dtype=torch.int64)
#     dist.reduce(hits, dst=0)
#     return 4 * hits.item() / points if rank == 0 else None
# ```
#
# </details>

# %% [markdown]
# The standard error of such an estimate is 1.64 / √points, however many ranks throw them: 0.0016 for a million.

# %%
# %%ranks
estimate = estimate_pi(points, count_hits)
if rank == 0:
    say(f"pi is about {estimate:.5f}, from {points:,} points on {world_size} ranks")
metrics.exact(pi=estimate)

# %% [markdown]
# ### Exercise 3: speed-up and efficiency
#
# ![Strong scaling: eight pieces of work on one rank take 8.03 s; shared by 2, 4 and 8 ranks 4.21, 2.09 and 1.06
# s.](../assets/02_strong_scaling.svg)
#
# Somebody ran such a program on 1, 2, 4 and 8 ranks, always with the same number of points in all ([strong
# scaling](../assets/glossary.md#strong-scaling)), and measured 8.03, 4.21, 2.09 and 1.06 s. The *speed-up* on n ranks
# is the time on one rank divided by the time on n; the *efficiency* is the speed-up divided by n. Write a function that
# returns both.
#
# **Predict** first, by eye: are 8 ranks more or less efficient than 2?
#
# <details><summary>Answer</summary>
#
# Neither: 95% both. 8.03/1.06 = 7.58, and 7.58/8 = 0.947; 8.03/4.21 = 1.91, and 1.91/2 = 0.954.
#
# </details>


# %%
# %%ranks
def scaling(seconds):
    """{n: (speed-up, efficiency)} from {n: seconds on n ranks}."""
    raise NotImplementedError  # your turn


checks.speed_up(scaling, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 3</summary>
#
# ```python
# def scaling(seconds):
#     """{n: (speed-up, efficiency)} from {n: seconds on n ranks}."""
#     return {n: (seconds[1] / s, seconds[1] / s / n) for n, s in seconds.items()}
# ```
#
# </details>

# %% [markdown]
# 95%, 96% and 95%: as good as constant. An efficiency that *rises* from 2 to 4 ranks hints at single measurements: the
# differences may be noise, and the table should say so.

# %% [markdown]
# ### Exercise 4: mend the suspicious ring
#
# Change as few lines as you can. (The number of ranks divides the length.)


# %%
# %%ranks
def mended_ring(x_N):
    """Sum x_N over all ranks, in place; as suspicious_ring, with a quarter of the bytes on 4 ranks."""
    raise NotImplementedError  # your turn: begin with a copy of suspicious_ring


checks.mended_ring(mended_ring, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 4</summary>
#
# ```python
# def mended_ring(x_N):
#     """Sum x_N over all ranks, in place; as suspicious_ring, with a quarter of the bytes on 4 ranks."""
#     chunks = list(x_N.chunk(world_size))  # only chunks travel, a different one at each hop
#     for hop in range(world_size - 1):
#         arrived = torch.empty_like(chunks[0])
#         exchange(chunks[(rank - hop) % world_size], right, arrived, left)
#         chunks[(rank - hop - 1) % world_size].add_(arrived)
#     for hop in range(world_size - 1):
#         exchange(chunks[(rank - hop + 1) % world_size], right, chunks[(rank - hop) % world_size], left)
#     return x_N
# ```
#
# </details>

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: exercises</summary>
#
# 19 minutes, or at home. *Say:* exercise 2 is the pattern of every parallel evaluation:
# share, work, one reduce. *Usual mistakes:* `points // n` and the remainder is gone; one seed for all ranks, so that n
# ranks find one rank's answer n times; an all-reduce where one rank needs the result. *When late:* skip 3. *Ask:* "With
# one seed for all, is the estimate wrong?" (No: it is as good as one rank's. That is why nobody notices.)
#
# </details>

# %% [markdown]
# ## On the cluster (MORE, 1 min)
#
# The same file, on two nodes, inside a job:
#
# ```bash
# srun --nodes 2 --ntasks-per-node 4 python scripts/02_collectives.py --largest-mib 256      # Slurm
# mpiexec -n 8 -ppn 4 python scripts/02_collectives.py --largest-mib 256                     # PBS, PALS
# ```
#
# `join()` puts each rank on its GPU, and NCCL carries the messages. α and β are different there. What to expect of a
# node's links, and what to look for, is in the [handbook](../assets/handbook/02_collectives.md).

# %% [markdown]
# ## Further reading
#
# In the [handbook](../assets/handbook/02_collectives.md#further-reading).

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
