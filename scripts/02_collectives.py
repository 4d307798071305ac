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
# **45 minutes** for the sections marked CORE, 90 with those marked MORE.
#
# After this lesson **you can**
# - name each collective, say who holds what afterwards, and what it costs;
# - build the ring all-reduce, which every training step on many GPUs rests on;
# - predict the time of a message by two numbers, α and β, and find both on your machine;
# - recognise a deadlock and a missing rank, say whose fault it is, and go on.
#
# **You need** [rank](../assets/glossary.md#rank) and launcher ([lesson 00](00_start.ipynb)). In two lines: a *rank* is
# one of n processes that all run this same file; `torch.distributed` lets them send tensors to each other.
#
# **New here:** [message](../assets/glossary.md#message), [collective](../assets/glossary.md#collective),
# [all-reduce](../assets/glossary.md#all-reduce) and its relatives, [ring](../assets/glossary.md#ring),
# [deadlock](../assets/glossary.md#deadlock), [latency and bandwidth](../assets/glossary.md#alpha-beta).
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
# Minutes of the CORE: warm-up 5, collectives 9, ring 12 with exercise 1 in
# it, timeouts and deadlocks 8, experiment 7, bug 3.
#
# *Say:* one picture carries the lesson: everybody talks at the same time, and only to the neighbour. Whatever is slow
# later (DDP, FSDP, tensor parallel) is slow because one of these messages is too large, too small, or waits for
# somebody.
#
# *Three usual mistakes:* thinking that rank 0 collects and redistributes; thinking that `send` is fire and forget;
# comparing milliseconds of this machine with those of a GPU node (compare shapes of curves, not heights).
#
# *When late:* skip gather, scatter and all-to-all (the figures suffice) and the fit; keep the ring and the missing rank.
#
# *Ask the room:* "A hundred ranks instead of four, the same gradient. How much more does each rank send?" Vote before
# the ring.
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
largest_mib = 16.0  # largest message of the experiment in MiB, > 0
repeats = 7  # samples of each timing, at least 1
wait_s = 3.0  # seconds that a rank waits for one that is missing, > 0
points = 1_000_000  # random points in the estimate of pi, at least 1

# %% [markdown]
# ## Start (CORE, 1 min)
#
# The first cell starts four ranks behind this notebook. From then on a cell that begins with `%%ranks` runs on all of
# them; in the script that line is a comment, because there a launcher has started the ranks already.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("02_collectives", globals())

# %%
# %%ranks
import functools
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from manyhands import Metrics, catch_up, fingerprint, join, leave, mpi_world, say, show
from manyhands.checks import collectives as checks
from manyhands.figures.gantt import gantt
from manyhands.figures.sweep import against_size, bandwidths
from manyhands.measure import wire
from manyhands.measure.timing import median_s
from manyhands.measure.virtual_network import Link, VirtualNetwork

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
left, right = (rank - 1) % world_size, (rank + 1) % world_size
metrics = Metrics(ranks, parameters={"points": points})

# %% [markdown]
# Each rank knows four things: its own number, how many there are, and who sits to its `left` and `right` when they sit
# in a circle. That is all it needs in this lesson.

# %% tags=["nbval-check-output"]
# %%ranks
say(f"I am rank {rank} of {world_size}; left of me is {left}, right of me {right}")

# %% [markdown]
# ## Warm-up: four numbers by hand (CORE, 5 min)
#
# Four ranks hold 3, 1, 4 and 2, one number each. **Every rank is to know the sum.** No rank can look into another's
# memory: all it can do is *send* a tensor to a rank, and *receive* one from a rank.
#
# ![Send and recv: rank 1 sends its 1 to rank 2; ranks 0 and 3 do not take part.](../assets/02_send_recv.svg)
#
# The most natural way: rank 0 tells its number to rank 1, which adds its own and tells rank 2, and so on.
#
# **Predict.** What does each rank know when rank 3 has added its number? How many
# [messages](../assets/glossary.md#message) were sent, and how many more must follow until *every* rank knows the sum?
#
# <details><summary>Answer</summary>
#
# They know 3, 4, 8 and 10: only rank 3 knows the sum. That took 3 messages; 3 more must carry the 10 back. For n ranks
# it is 2(n-1) messages, **one after the other**: while one rank sends and one receives, all others wait.
#
# </details>

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
# Every rank ran the same lines, and not all of them the same way: `rank` decided. Now what the library has for it. It is one
# call, all ranks make it, and afterwards all of them hold the sum:

# %% tags=["nbval-check-output"]
# %%ranks
total = number.clone()
dist.all_reduce(total)  # all ranks
say(f"the sum is {total.item()}")

# %% [markdown]
# A call that *all* ranks of a group must make, together, is a [collective](../assets/glossary.md#collective). Keep the
# number six in mind: six messages for four ranks. The ring below sends six per rank, and for large tensors it
# is faster. How can that be?

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: warm-up</summary>
#
# 5 minutes. *Say:* act it out with four people in the first row and slips of paper. *Usual
# mistakes:* "rank 0 knows the sum" (it knows 3); "recv returns the tensor" (it fills the one that you give); "`total`
# must be sent back" (all-reduce works in place). *When late:* run both cells without the prediction. *Ask:* "Who is
# idle while rank 1 talks to 2?"
#
# </details>

# %% [markdown]
# ## The collectives (CORE, 9 min)
#
# **Why.** Nearly all communication in distributed training is one of eight patterns. Libraries make each of them fast,
# on each kind of network, so you will rarely write `send`. You choose a pattern by two questions: who has the data
# before, and who needs it afterwards?
#
# ### From one rank to all
#
# ![Broadcast: rank 0 holds 3, the others nothing; afterwards all four hold 3.](../assets/02_broadcast.svg)
#
# ![Scatter: rank 0 holds the parts 0, 1, 2 and 3; afterwards rank k holds part k and nothing else.](../assets/02_scatter.svg)
#
# [Broadcast](../assets/glossary.md#broadcast) is how ranks start with the same weights.
# [Scatter](../assets/glossary.md#scatter) deals out different parts.
#
# **Predict.** Rank 0 holds a tensor of shape [4] and scatters it to four ranks. What is the shape of the tensor that
# receives?
#
# <details><summary>Answer</summary>
#
# [1]: the shape of *one part*. Who allocates [4] on each rank gets an error, or, with the wrong call, four times the
# memory.
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
number = torch.tensor([(3, 1, 4, 2)[rank % 4]], device=device)  # as in the warm-up
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
# [Gather](../assets/glossary.md#gather) puts tensors side by side (some texts say "aggregates", which sounds like a
# sum; it is a concatenation). [Reduce](../assets/glossary.md#reduce) adds them up, or takes the largest, or the
# product.

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
# ![All-reduce: the ranks hold 3, 1, 4 and 2; afterwards every rank holds their sum, 10.](../assets/02_all_reduce.svg)
#
# ![All-gather: the ranks hold 3, 1, 4 and 2; afterwards every rank holds all four side by
# side.](../assets/02_all_gather.svg)
#
# [All-reduce](../assets/glossary.md#all-reduce) sums gradients in data parallel training (lesson 03);
# [all-gather](../assets/glossary.md#all-gather) puts sharded weights together before a layer runs (lesson 06).

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
# weights (lesson 06). [All-to-all](../assets/glossary.md#all-to-all) is a transposition: tokens on their way to experts
# (lesson 09).
#
# **Predict.** Rank 2 holds 20, 21, 22, 23, and the others alike. What does it hold after each of the two?
#
# <details><summary>Answer</summary>
#
# After the reduce-scatter the sum of everybody's part 2: 2 + 12 + 22 + 32 = 68. After the all-to-all the same four
# numbers side by side, not added: 2, 12, 22, 32.
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
my_sum = torch.empty_like(parts[:1])
dist.reduce_scatter(my_sum, list(parts.split(1)))
column = torch.empty_like(parts)
dist.all_to_all_single(column, parts)
say(f"reduce-scatter: {my_sum.tolist()}, all-to-all: {column.tolist()}")

# %% [markdown]
# Look at the figures of reduce-scatter and all-gather once more, one after the other: first each rank gets one part of
# the sum, then everybody gets all parts. **Together they are an all-reduce.** The ring below is built on that.
#
# And one that carries no data. A [barrier](../assets/glossary.md#barrier) ends on every rank after all have reached it.
# It is for timing and for files, hardly ever for correctness: every collective waits for the data that it needs anyway.
#
# ![Barrier: the ranks arrive one by one, wait for the last, and go on together.](../assets/02_barrier.svg)

# %%
# %%ranks
time.sleep(0.1 * rank)  # the ranks arrive one by one, 0.1 s apart
arrived = time.perf_counter()
dist.barrier()
say(f"I waited {time.perf_counter() - arrived:.1f} s")

# %% [markdown]
# ### The same in MPI
#
# All of this is older than GPUs. MPI, the message passing interface of 1994, has the same patterns under nearly the
# same names, and in Python they come from `mpi4py`. Names with a capital (`Allreduce`) take arrays and are fast; with a
# small letter (`allreduce`) they pickle any Python object.
#
# | pattern | torch.distributed | mpi4py | each rank gives | each rank gets |
# |---|---|---|---|---|
# | send, receive | `send(x, dst)`, `recv(x, src)` | `Send(x, dst)`, `Recv(x, src)` | N | N |
# | broadcast | `broadcast(x, src)` | `Bcast(x, root)` | N on one rank | N |
# | scatter | `scatter(part, parts, src)` | `Scatter(parts, part, root)` | N on one rank | N/n |
# | gather | `gather(x, parts, dst)` | `Gather(x, parts, root)` | N/n | N on one rank |
# | reduce | `reduce(x, dst)` | `Reduce(x, out, root=root)` | N | N on one rank |
# | all-reduce | `all_reduce(x)` | `Allreduce(x, out)` | N | N |
# | all-gather | `all_gather(parts, x)` | `Allgather(x, parts)` | N/n | N |
# | reduce-scatter | `reduce_scatter(part, parts)` | `Reduce_scatter_block(parts, part)` | N | N/n |
# | all-to-all | `all_to_all_single(out, x)` | `Alltoall(x, out)` | N | N |
# | barrier | `barrier()` | `Barrier()` | nothing | nothing |
#
# Two traps between the two: torch works **in place** where MPI takes an input and an output, and torch names the output
# first. Not every launcher makes an MPI world; where there is none, the next cell says so and nothing is missing later.

# %%
# %%ranks
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
# And those in which one rank is special, the *root*. The others may pass None where only the root has something to give
# or to get:

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
# ### Who carries the messages
#
# `torch.distributed` is only the front. A *backend* does the work, and `join()` has chosen it for you:
#
# | library | made by | for tensors on | over | choose it |
# |---|---|---|---|---|
# | NCCL | NVIDIA | NVIDIA GPUs | NVLink, PCIe, InfiniBand, TCP | always, on NVIDIA GPUs |
# | RCCL | AMD | AMD GPUs | Infinity Fabric, PCIe, InfiniBand, TCP | on AMD GPUs; torch calls it `nccl` |
# | oneCCL | Intel | Intel GPUs and CPUs | Xe Link, and MPI or libfabric between nodes | on Intel GPUs; torch calls it `xccl` |
# | gloo | Meta | CPUs | TCP | on CPUs, and beside NCCL for what lives on the CPU |
# | MPI | a standard; MPICH, Open MPI, Cray MPICH | CPUs, GPUs if built for it | whatever the machine has | where your code speaks MPI already |
#
# NCCL had no gather, scatter or all-to-all of its own before version 2.28; torch built them of NCCL's send and receive,
# and they work all the same.

# %%
# %%ranks
if rank == 0:
    say(f"my tensors live on {device}, and {ranks.backend} carries them")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: collectives</summary>
#
# 9 minutes, one per figure. *Say:* "who has it before, who needs it afterwards?" and let
# the room name the pattern. *Usual mistakes:* an output of the whole shape in scatter and reduce-scatter; reading
# `total` on rank 3 after a reduce; a collective under `if rank == 0`. *When late:* broadcast, all-reduce, all-gather,
# reduce-scatter; the rest is in the table. *Ask:* "Which of these does a parameter server need, and which does it make
# superfluous?"
#
# </details>

# %% [markdown]
# ## All-reduce on a ring (CORE, 12 min)
#
# **Why.** Four ranks have computed four gradients of 40 MB each, and every rank needs their sum. The obvious way is to
# send your gradient to everyone: three times 40 MB leave your machine. With a hundred ranks it is 99 times 40 MB, and
# the network, not the GPU, decides how fast you train.
#
# The ring does better, and the idea fits on one hand. Cut your gradient into as many chunks as there are ranks. Pass
# chunks only to your right-hand neighbour, and let each chunk *collect its sum while it travels*.
#
# ![Four ranks on a ring; rank k sends chunk k to rank k+1, all four at the same time.](../assets/02_ring.svg)
#
# First half, **reduce-scatter**: at every hop each rank receives one chunk from its left, adds its own numbers, and
# sends *that* chunk on at the next hop. Follow one chunk: it starts on one rank with that rank's numbers, and after
# three hops it has visited everybody.
#
# ![Reduce-scatter on the ring: at each of three hops every rank receives one chunk and adds it; then rank k holds the finished
# sum of chunk k+1.](../assets/02_ring_reduce_scatter.svg)
#
# Second half, **all-gather**: the finished chunks travel round once more. Nothing is added now, they are only copied.
#
# ![All-gather on the ring: at each of three hops every rank receives one finished chunk; then all have all
# four.](../assets/02_ring_all_gather.svg)

# %% [markdown]
# **Predict, before you run anything.** Four ranks, a 40 MB gradient. How many messages does each rank send, and how
# many MB? And with a hundred ranks?
#
# <details><summary>Answer</summary>
#
# 2(n-1) = 6 messages of 40/4 = 10 MB each: 60 MB. With a hundred ranks 198 messages of 0.4 MB: 79.2 MB. In general it
# is 2(n-1)/n times the gradient, which never exceeds 80 MB, however many ranks join. That is why rings are used: the
# bytes per rank hardly grow. (The *number* of messages does; we come back to that.)
#
# </details>

# %% [markdown]
# The step that everything is made of: give one tensor to the right and take one from the left, **both at once**.
# `P2POp` only describes a message; `batch_isend_irecv` starts them together and gives back one handle for each, to wait
# for.


# %%
# %%ranks
def exchange(give, to, take, source):
    """Send `give` to one rank while receiving `take` from another."""
    if to == rank:  # a world of one: a message to oneself is a copy
        take.copy_(give)
        return
    both = [dist.P2POp(dist.isend, give, to), dist.P2POp(dist.irecv, take, source)]
    for message in dist.batch_isend_irecv(both):
        message.wait()


# %% [markdown]
# Now the first half. At the first hop rank k sends chunk k. At the second it sends the one that has just arrived, chunk
# k-1, and so on: with `hop` counted from 0, rank k sends chunk k - hop and receives chunk k - hop - 1. All of it modulo
# n, because it is a circle.


# %%
# %%ranks
def ring_reduce_scatter(chunks):
    """Afterwards chunks[rank + 1] holds the sum over all ranks; the other chunks hold sums that are unfinished."""
    for hop in range(world_size - 1):
        give, mine = chunks[(rank - hop) % world_size], chunks[(rank - hop - 1) % world_size]
        arrived = torch.empty_like(mine)
        exchange(give, right, arrived, left)
        mine += arrived  # the chunk has collected one more rank's numbers


# %% [markdown]
# Watch it at work on small numbers: rank r holds r in every place, and 0+1+2+3 is 6. One chunk per rank is finished, and
# it is the one to the right of the diagonal, as in the last grid of the figure.

# %% tags=["nbval-check-output"]
# %%ranks
chunks = list(torch.full((world_size,), rank, device=device).chunk(world_size))
ring_reduce_scatter(chunks)
say(f"my chunks: {torch.cat(chunks).tolist()}; chunk {right} is finished")

# %% [markdown]
# The second half is shorter. The chunk arrives where it will stay: `chunks[...]` are *views* of the tensor, so
# receiving into one writes to the tensor itself, and nothing is copied.


# %%
# %%ranks
def ring_all_gather(chunks):
    """From chunks[rank + 1] finished on each rank to all chunks finished on all ranks."""
    for hop in range(world_size - 1):
        give, take = chunks[(rank + 1 - hop) % world_size], chunks[(rank - hop) % world_size]
        exchange(give, right, take, left)


def ring_all_reduce(x_N):
    """Sum x_N over all ranks, in place. Sends 2(n-1)/n of its bytes, in 2(n-1) messages."""
    if x_N.numel() % world_size:
        raise ValueError(f"{x_N.numel()} numbers do not split over {world_size} ranks; use a multiple of it")
    chunks = x_N.chunk(world_size)  # views
    ring_reduce_scatter(chunks)
    ring_all_gather(chunks)
    return x_N


# %% [markdown]
# Four numbers first, so that you can check them by hand: rank r holds `[r, r, r, r]`.

# %% tags=["nbval-check-output"]
# %%ranks
x_N = torch.full((world_size,), float(rank), device=device)
say(f"{x_N.tolist()} becomes {ring_all_reduce(x_N.clone()).tolist()}")

# %% [markdown]
# ### Three ways to one sum
#
# Right for four numbers is not yet right. Take twelve "gradients" of 240,000 random numbers in float64. The ranks share
# them, each sums its own and then all of them sum over the ranks: once by our ring, once by the library. The third way
# is one process that adds up all twelve. Throughout this course a technique has to pass this test: **from scratch =
# library = one process**.

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
# **Predict.** 240,000 numbers of 8 bytes, on 4 ranks: how many messages did each rank send, and how many MB?
#
# <details><summary>Answer</summary>
#
# 6 messages; 1.5 times 1.92 MB is 2.88 MB.
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
predicted_bytes = 2 * (world_size - 1) / world_size * mine_N.nbytes
for name, other_N in {"the library": library_N, "one process": alone_N}.items():
    say(f"agrees with {name} to 1e-10: {torch.allclose(ours_N, other_N, rtol=0, atol=1e-10)}")
say(f"{seen.messages} messages, {seen.sent_bytes / 1e6:.2f} MB; predicted {predicted_bytes / 1e6:.2f} MB")
metrics.exact(ring_sum=fingerprint([ours_N]), messages=seen.messages, sent_bytes=seen.sent_bytes)
metrics.close(tolerance=1e-10, twelve_gradients=ours_N[::10_000])

# %% [markdown]
# The counter saw every message enter the library. Did the bytes also leave the process? The operating system knows: it
# counts what each TCP connection has delivered.
#
# **Predict** the ratio of bytes on the wire to bytes of the tensor, on 4 ranks: for our ring, and for gloo's own
# all-reduce, of which we know nothing.
#
# <details><summary>Answer</summary>
#
# Ours: 2(n-1)/n = 1.5, and a little more for the headers of TCP and gloo. gloo's: let it tell you. If it sent
# everything to everyone it would be 3; a tree that sums at rank 0 and broadcasts would give different ranks different
# numbers.
#
# </details>

# %%
# %%ranks
with wire.watch() as ours:
    ring_all_reduce(mine_N.clone())
with wire.watch() as theirs:
    dist.all_reduce(mine_N.clone())
if rank == 0 and theirs.transport_bytes is not None:  # with NCCL hardly a byte passes a socket
    say(f"theory   {2 * (world_size - 1) / world_size:.3f} x the tensor")
    say(f"our ring {ours.transport_bytes / mine_N.nbytes:.3f} x")
    say(f"gloo     {theirs.transport_bytes / mine_N.nbytes:.3f} x")

# %% [markdown]
# Both within a thousandth or two of the theory: what is more are headers. So gloo moves the bytes of a ring, and you have
# ruled out "everything to everyone" without reading a line of it. (That it *is* a ring and not halving and doubling,
# which would move as many, its source says.)

# %% [markdown]
# ### Exercise 1: any length
#
# Our ring refuses 7 numbers on 4 ranks, and real gradients have any number of elements. Write an all-reduce for **any length**,
# also 0 and shorter than the number of ranks, in place. The check wants the right sum, exactly 2(n-1) messages, and chunks no
# larger than needed (a chunk may be empty): sending everything to everyone gives the right sum too. You may use the two halves
# from above.
#
# <details><summary>Hint</summary>
#
# `torch.arange(5).chunk(4)` gives three pieces. Look for a method that always gives four.
#
# </details>


# %%
# %%ranks
def all_reduce_any_length(x_N):
    """Sum x_N over all ranks, in place, and return it."""
    raise NotImplementedError  # your turn


checks.all_reduce_any_length(all_reduce_any_length, ranks)

# %% [markdown]
# #### Solution 1


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
def all_reduce_any_length(x_N):
    """Sum x_N over all ranks, in place, and return it."""
    chunks = x_N.tensor_split(world_size)  # always n views, some of them perhaps empty
    ring_reduce_scatter(chunks)
    ring_all_gather(chunks)
    return x_N


checks.all_reduce_any_length(all_reduce_any_length, ranks, solution=True)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: ring</summary>
#
# 12 minutes, four of them for exercise 1. *Say:* follow chunk 0 with your finger through the
# grids; then the punch line: six messages per rank instead of six in all, and yet faster, because they all travel at
# once and are a quarter as large. *Usual mistakes:* adding in the second half too; sending the chunk that was just
# *sent* instead of the one that arrived; allocating for the first chunk's size when sizes differ. *When late:* show the
# solution of exercise 1, it is one word. *Ask:* "What limits the ring with 10,000 ranks?" (2(n-1) latencies: the tree
# below, and lesson 10.)
#
# </details>

# %% [markdown]
# ## When somebody does not call (CORE, 8 min)
#
# **Why.** An all-reduce ends when *all* ranks have called it. If one does not (it crashed, it took another branch, it is
# still loading data), the others wait. (A broadcast or a reduce may let some ranks go on, so there the missing rank is
# noticed later, at another line.) On a cluster that is the most frequent way to burn node hours, and it looks like
# nothing: no error, no output, GPUs at 100%.
#
# They do not wait forever, as one often reads, but for the *time-out* of the process group: 30 minutes with gloo, 10
# minutes with NCCL, unless you set one. Let the last rank forget to call, in a group of its own that waits for three
# seconds.
#
# **Predict.** How long does each rank wait, and does the error say who is missing?
#
# <details><summary>Answer</summary>
#
# All of them about three seconds, also the one that waits for a rank which itself waits. And no: the library knows on
# which neighbour it waits, not why. (If one rank gives up a moment earlier, its neighbours report "Connection closed by
# peer": even further from the cause.)
#
# </details>

# %%
# %%ranks
dist.barrier()  # all ranks come at the same time
impatient = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))  # all ranks call this one
if rank != world_size - 1:  # the last rank takes another branch
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1), group=impatient)
    except RuntimeError as error:
        say(f"{str(error).split('] ')[-1].splitlines()[0]} (after {time.monotonic() - began:.0f} s)")
dist.barrier()  # only for tidy output; the ranks' main group is not affected

# %% [markdown]
# An honest error, and it does not say who is missing: rank 0 waits for a neighbour, which waits for its neighbour. To
# **name the missing rank**, take a roll call. `monitored_barrier` is a barrier in which every rank reports to rank 0,
# and rank 0 says who did not:

# %%
# %%ranks
roll_call = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))  # the other group is broken
if rank != world_size - 1:
    try:
        dist.monitored_barrier(roll_call, timeout=timedelta(seconds=wait_s / 3), wait_all_ranks=True)
    except RuntimeError as error:
        if rank == 0:
            say(str(error).splitlines()[0])
dist.barrier()

# %% [markdown]
# And **recover**: the broken group stays broken (some ranks are one collective ahead of others; the next answers would be
# mixed up), but every other group goes on. Throw it away and make a new one.
#
# Two warnings for GPUs. On NCCL a time-out ends the *process*, so you cannot catch it as we did here: that is why the
# roll call uses gloo, which works beside NCCL. And a time-out says who *noticed*; the culprit is a rank that has no
# error at all.

# %%
# %%ranks
dist.destroy_process_group(impatient)
dist.destroy_process_group(roll_call)
everybody = torch.ones(1, device=device)
dist.all_reduce(everybody)
say(f"{everybody.item():g} ranks are here again")

# %% [markdown]
# ### A deadlock of good manners
#
# The second way to wait forever needs nobody to be missing. Everybody passes a tensor to the right, and everybody is
# polite: first send, then receive.
#
# ![Four ranks that all send before they receive: each send waits for a receive that never
# starts.](../assets/02_ordered_sends.svg)
#
# **Predict.** With 4 bytes per message, does it pass or hang? With 4 million?
#
# <details><summary>Answer</summary>
#
# On gloo it hangs with both. Run it: each rank gives up after half of `wait_s`.
#
# </details>

# %%
# %%ranks
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
# gloo's `send` ends when the other side receives, whatever the size. So all ranks stand in their first line, a
# [deadlock](../assets/glossary.md#deadlock).
#
# MPI is more treacherous. It copies a small message into a buffer on the other side and lets the sender go on
# ("eager"); a large one waits for its receiver ("rendezvous"). A program with this bug passes all its small tests and
# hangs on the first real run. We ask MPI without hanging: `Isend` starts a message and `Test` asks whether the sender
# could go on, before anybody receives.

# %%
# %%ranks
comm = mpi_world()
if comm is not None:
    for n_bytes in (400, 4_000, 40_000, 400_000):
        mine, theirs = np.zeros(n_bytes, np.uint8), np.empty(n_bytes, np.uint8)
        sending, asked_until = comm.Isend(mine, right), time.monotonic() + 0.3
        done = sending.Test()
        while not done and time.monotonic() < asked_until:
            done = sending.Test()
        comm.Barrier()  # until here nobody has received anything
        if rank == 0:
            say(f"{n_bytes:7,} bytes: a send before any receive {'passes' if done else 'would hang'}")
        comm.Recv(theirs, left)
        sending.Wait()
elif rank == 0:
    say("no MPI world here: mpiexec -n 4 python scripts/02_collectives.py shows where sends begin to hang")

# %% [markdown]
# On NCCL even `isend` followed by `recv` may hang around a ring. A group that was made with `device_id`, and two ranks in
# any group, have one stream for both kernels, and the receive is queued behind a send that waits for the neighbour's
# receive. (Otherwise each pair of ranks has a stream of its own.) In one batch they are one operation on all of them; hence
# `batch_isend_irecv`.
#
# ### Exercise 2: mend the polite ring
#
# Every rank has a tensor and wants its left neighbour's. The check wants it to end, for small and large tensors, with
# one message per rank. And nobody may wait for a *turn*: "rank 0 sends first, the others receive first" ends, too, but
# n messages travel one after the other.


# %%
# %%ranks
catch_up(globals(), "exchange")


def pass_right(mine):
    """Give `mine` to the right-hand neighbour; return the tensor of the left-hand one (same shape and dtype)."""
    raise NotImplementedError  # your turn: this was dist.send(mine, right), then dist.recv(theirs, left)


checks.pass_right(pass_right, ranks)

# %% [markdown]
# #### Solution 2


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
def pass_right(mine):
    """Give `mine` to the right-hand neighbour; return the tensor of the left-hand one (same shape and dtype)."""
    theirs = torch.empty_like(mine)
    exchange(mine, right, theirs, left)  # in one batch: nobody has to be first
    return theirs


checks.pass_right(pass_right, ranks, solution=True)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: waiting</summary>
#
# 8 minutes. *Say:* the rank with the error message is the honest one; look for the silent one.
# *Usual mistakes:* raising the time-out; putting a barrier before each collective "to be safe" (it hangs just the same,
# one line earlier); mending the order with `if rank == 0`. *When late:* only the missing rank. *Ask:* "Your job printed
# nothing for eight minutes. What do you look at first?" (Lesson 11 answers with the flight recorder.)
#
# </details>

# %% [markdown]
# ## Experiment: what does a message cost? (CORE, 7 min)
#
# **Why.** One formula decides how large DDP's buckets are, when a tree beats a ring, and whether a model is better
# split within a node or across nodes. It has two numbers, and you can find both for any machine in a minute: a message
# takes **α + bytes / β**.
#
# ![The time of a message against its size is a straight line that starts at alpha and rises by
# 1/beta.](../assets/02_alpha_beta.svg)
#
# [α](../assets/glossary.md#alpha-beta), the latency, is what even an empty message costs: waking the other side,
# software. β, the bandwidth, is bytes per second once they flow. (Some texts write β for its inverse, seconds per
# byte.)
#
# The plan: measure one *hop* (every rank gives to the right and takes from the left) for many sizes. Fit α and β. Then
# **predict** a quantity that was not used in the fit: the ring all-reduce takes 2(n-1) hops of N/n bytes.

# %%
# %%ranks
catch_up(
    globals(), "exchange", "ring_reduce_scatter", "ring_all_gather", "ring_all_reduce"
)  # if you begin here
comm = mpi_world()
sizes_b = [64 * 4**k for k in range(20) if 64 * 4**k <= largest_mib * 2**20] or [64]


def seconds(call, n_bytes):
    """Median time of call(), of the slowest rank; small messages are repeated, so that the clock has something to see."""
    times = 10 if n_bytes < 2**20 else 1
    return median_s(lambda: [call() for _ in range(times)], repeats, ranks).slowest_s / times


# %% [markdown]
# Now measure: one hop by gloo (on GPUs: NCCL) and one by MPI, from 64 bytes up to `largest_mib`.

# %%
# %%ranks --timeout 120
library_name = ranks.library  # gloo on CPUs
hop_s = {library_name: []} if comm is None else {library_name: [], "MPI": []}
for n_bytes in sizes_b:
    give = torch.ones(n_bytes, dtype=torch.uint8, device=device)
    take = torch.empty_like(give)
    hop_s[library_name].append(seconds(functools.partial(exchange, give, right, take, left), n_bytes))
    if comm is not None:
        mine, theirs = np.ones(n_bytes, np.uint8), np.empty(n_bytes, np.uint8)
        swap = functools.partial(comm.Sendrecv, mine, right, recvbuf=theirs, source=left)
        hop_s["MPI"].append(seconds(swap, n_bytes))

# %% [markdown]
# The fit is a least-squares line through (bytes, seconds). One detail decides whether it is any good: bytes span five orders of
# magnitude and seconds up to three, and plain least squares cares only about the largest. Dividing each row by its own time
# makes all *relative* errors count alike.


# %%
# %%ranks
def fit(sizes_b, seconds):
    """(alpha in s, beta in bytes/s) of the line alpha + bytes / beta, with the smallest relative errors."""
    t = torch.tensor(seconds, dtype=torch.float64)
    rows = torch.tensor([[1, b] for b in sizes_b], dtype=torch.float64) / t[:, None]
    alpha, per_byte = torch.linalg.lstsq(rows, torch.ones_like(t)[:, None]).solution.flatten().tolist()
    return max(alpha, 1e-9), 1 / max(per_byte, 1e-15)  # noise must not make them negative


line = {name: fit(sizes_b, measured) for name, measured in hop_s.items()}
for name, (alpha, beta) in line.items():
    if rank == 0:
        say(f"{name}: alpha = {1e6 * alpha:,.0f} µs, beta = {beta / 1e6:,.0f} MB/s")

# %% [markdown]
# Before you look: on a logarithmic plot α + bytes/β is flat on the left, where α rules, and a slope of one on the
# right, where β does. The knee lies at α·β bytes. Below, the *residual*: measured divided by fitted, 1 is perfect.

# %%
# %%ranks
if rank == 0:
    fitted = {name: [alpha + b / beta for b in sizes_b] for name, (alpha, beta) in line.items()}
    figure = against_size(sizes_b, hop_s, fitted, f"one hop on the ring, {world_size} ranks on this machine")
    show(figure, "hop", alt="Time of one hop against bytes: points around the fitted line.")

# %% [markdown]
# At the largest sizes the line holds. Elsewhere points scatter, by a factor of two or more at times, and that is not the
# network. Your ranks share cores (the start cell says how many), and a rank whose message is there may still have to
# wait for a core.
#
# gloo and MPI wait in different ways, and α tells. gloo's ranks sleep, and the kernel wakes them: 0.47 to 0.75 ms in
# eight runs of this lesson, four ranks on two cores. MPICH's ranks ask again and again, without a pause: 0.04 to 0.11 ms
# in four of the same runs and 1 to 2.8 ms in the four others, when the rank that asked held the very core that the
# sender needed. So α is a property of network, software *and* load: measure it where you will run, more than once.

# %%
# %%ranks --timeout 120
reduce_s = {library_name: [], "our ring": []} | ({} if comm is None else {"MPI": []})
for n_bytes in sizes_b:
    x_N = torch.ones(-(-n_bytes // 4 // world_size) * world_size, device=device)
    reduce_s[library_name].append(seconds(functools.partial(dist.all_reduce, x_N), n_bytes))
    reduce_s["our ring"].append(seconds(functools.partial(ring_all_reduce, x_N), n_bytes))
    if comm is not None:
        mine, total = np.ones(n_bytes // 4, np.float32), np.empty(n_bytes // 4, np.float32)
        reduce_s["MPI"].append(seconds(functools.partial(comm.Allreduce, mine, total), n_bytes))

# %% [markdown]
# **Predict** the ring from the hop: 2(n-1)·(α + N/n / β), with the α and β of gloo from above. Will the measured ring
# lie on the line, above it, or below?
#
# <details><summary>Answer</summary>
#
# Above, mostly by a tenth to a half; as α is noisy, single points may fall below. The formula has no term for the
# *adding*, which half of the hops do, and it takes the median of one hop, where a ring of six hops waits for the slowest
# rank six times.
#
# </details>

# %%
# %%ranks
alpha, beta = line[library_name]
predicted_s = [2 * (world_size - 1) * (alpha + b / world_size / beta) for b in sizes_b]
if rank == 0:
    figure = against_size(sizes_b, reduce_s, {"our ring": predicted_s}, f"all-reduce over {world_size} ranks")
    show(figure, "all_reduce", alt="Time of an all-reduce against bytes, measured and predicted.")
    ours_ms, library_ms = 1e3 * reduce_s["our ring"][-1], 1e3 * reduce_s[library_name][-1]
    say(f"at {sizes_b[-1] / 2**20:g} MiB our ring takes {ours_ms:.0f} ms, {library_name} {library_ms:.0f} ms")
metrics.measured(hop_s=hop_s, all_reduce_s=reduce_s, alpha_beta=line, sizes_b=sizes_b)

# %% [markdown]
# The prediction has the right shape and the right knee. What is left over is what the answer says: work between the
# messages, and the luck of the slowest rank.
#
# gloo's own all-reduce is a ring as well, and a little cleverer: it cuts each chunk into smaller pieces and adds one
# while the next is still under way. The printed line says what that is worth at the largest size. MPI changes its
# algorithm with the size: few hops for small messages, few bytes for large ones (the MORE section below has both).
#
# A recorded run of a GPU node does not come with this lesson yet. On one, look for the knee, not for the milliseconds:
# α and β are others there.

# %% [markdown]
# ### Algorithm bandwidth and bus bandwidth
#
# "All-reduce at 100 GB/s" can mean two things. *Algorithm bandwidth* is bytes of the tensor by time: what you feel.
# *Bus bandwidth* multiplies it by 2(n-1)/n, the bytes that each rank really sends: what the link feels, and the only
# one that can be compared with a data sheet, or between numbers of ranks. Benchmarks such as nccl-tests print both
# (`algbw`, `busbw`).

# %%
# %%ranks
if rank == 0:
    figure = bandwidths(sizes_b, reduce_s, 2 * (world_size - 1) / world_size, "all-reduce on this machine")
    show(
        figure,
        "bandwidth",
        alt=f"Algorithm and bus bandwidth of the all-reduce: {library_name}, our ring and MPI.",
    )

# %% [markdown]
# The same measurements, seen from the other side. Far below the knee, for gloo and our ring up to some 100 kB, nearly
# all of the bandwidth is wasted on α, and no faster network would help. (MPI is rid of it earlier where its α is
# smaller.) That is why DDP does not send gradients one by one, but collects 25 MiB of them in a
# *bucket* first ([lesson 03](03_data_parallel.ipynb)).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: experiment</summary>
#
# 7 minutes. *Say:* two numbers describe a network; below α·β bytes you pay for the message,
# above for the bytes. *Usual mistakes:* timing without a barrier; one sample; reading α off a plot with a linear axis.
# *When late:* show the stored output, skip the fit. *Ask:* "DDP has 200 small gradients. One message each, or one for
# all?" (That is lesson 03.)
#
# </details>

# %% [markdown]
# ## Other shapes, on a virtual network (MORE, 15 min)
#
# **Why.** The ring has the fewest bytes and the most hops: with 1,000 ranks 1,998 latencies in a row. Other shapes
# trade bytes for hops. Whether that pays depends on the network, and this laptop has only one, a bad one. So we take a
# **virtual network**: the messages are real, the sums are real, a wrong algorithm hangs or gives wrong numbers as ever;
# only *time* is computed. Every rank has a logical clock, a message moves it by α + bytes/β of the link that it takes.
# No real clock is read, so each run gives the same times to the last digit.
#
# Two nodes. Inside, NVLink at 150 GB/s per direction and peer; between them, InfiniBand NDR: 400 Gb/s, that is 50 GB/s.
# Those are data-sheet numbers; the latencies of 2 and 5 µs are assumed.

# %%
# %%ranks
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
# ![Broadcast by a tree: in rounds 1, 2 and 3 the ranks that have the data double from 1 to 2, 4 and
# 8.](../assets/02_tree.svg)
#
# Rank 0 could send to everybody in turn: n-1 messages in a row. In a **binary tree** whoever has the data passes it on,
# so the number of those who have it doubles each round. **Predict** the rounds for 4 ranks, and for 1,000.
#
# <details><summary>Answer</summary>
#
# log₂ n, rounded up: 2 rounds for 4 ranks, 10 for 1,000 (instead of 999). That is a tree's charm: α·log₂ n. Its price is
# that every message carries the whole tensor, so for large ones a ring, or a tree fed in small pieces, is better.
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
# Both on the virtual network. These times are the same in every run, on every machine:

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
# Three messages in both. But one by one rank 0 sends all three in a row, two of them over the slow link; in the tree
# rank 0 and rank 1 send at the same time in round 2, and only one slow message is in the way of the last rank.

# %% [markdown]
# ### All-to-all, in pairs
#
# Every rank has something for every other: n-1 messages each, and no way around that. What can go wrong is the *order*:
# if all start with rank 0, rank 0 is a bottleneck and the others wait. In step s let everybody send to the rank s
# places to the right and receive from s places to the left. In every step each rank then sends one message and receives
# one.


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
# **Recursive doubling**: swap the whole tensor with the rank whose number differs in the last bit, add; then in the
# second-last bit, and so on. After log₂ n hops everybody has the sum. Few hops, many bytes: n must be a power of two
# here.
#
# **Hierarchical**: bytes are cheap inside a node and dear between nodes. So sum inside first.
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
# With these two, three all-reduces that differ only in who talks to whom:


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
# **Predict**, for 4 ranks on these two nodes: which of the three is fastest for 4 KiB, and which for 4 MiB? From which
# size on?
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
# Expect two crossing lines, and above them one that never wins. The formulas for 4 ranks are dotted; the ratio below
# them is 1, or one of us has miscounted a hop.

# %%
# %%ranks
if rank == 0:
    fast, slow = nvlink.cost_s, infiniband.cost_s  # alpha + bytes / beta
    formula = {
        "ring": [6 * slow(b / 4) for b in virtual_sizes_b],
        "hierarchical": [2 * fast(b / 2) + 2 * slow(b / 4) for b in virtual_sizes_b],
        "doubling": [fast(b) + slow(b) for b in virtual_sizes_b],
    }
    formula = formula if world_size == 4 else {}  # the table is for 2 nodes of 2
    title = "all-reduce on a virtual network of two nodes"
    figure = against_size(virtual_sizes_b, shapes_s, formula, title, unit="virtual")
    show(figure, "shapes", alt="Virtual time against bytes: doubling first, then hierarchical wins.")

# %% [markdown]
# Doubling wins up to 700 kB, the hierarchical one above. The flat ring loses everywhere here: half of its links are
# fast, but in every hop *some* rank uses a slow one, and at the next hop all others wait for it. That is why real
# libraries look at the topology first, and switch algorithm with the size (`NCCL_ALGO` names NCCL's choices).
#
# Where the time goes, for 1 MiB: six hops at the pace of the slow link above; two short and two long ones below.

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
# 15 minutes, for a long course or a quick group. *Say:* virtual time, real messages; the
# plot repeats to the last digit. *Usual mistakes:* reading virtual microseconds as this machine's; thinking that a tree
# sends fewer bytes; forgetting that the slowest link sets the pace of a ring. *When late:* only the last plot. *Ask:*
# "Where does the crossing move when the network between the nodes gets ten times slower?"
#
# </details>

# %% [markdown]
# ## Exercises (MORE, 15 min)
#
# Exercises 1 and 2 are above, where their idea is, and exercise 5 is below. These two need only the start cells.

# %% [markdown]
# ### Exercise 3: pi, with one reduce
#
# Throw points at random into the unit square; the share that falls into the quarter circle is π/4. Points do not depend
# on each other, so n ranks throw n times as many. `count_hits(points, seed)` throws and counts. Write what is around
# it: **share** the points over the ranks (1,003 points on 4 ranks: nothing may be lost), give every rank **other random
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

# %% [markdown]
# #### Solution 3


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
def estimate_pi(points, count_hits):
    """pi on rank 0, None on the others."""
    share = points // world_size + (rank < points % world_size)  # the first ranks take one more each
    hits = torch.tensor(count_hits(share, seed=rank), dtype=torch.int64)
    dist.reduce(hits, dst=0)
    return 4 * hits.item() / points if rank == 0 else None


checks.estimate_pi(estimate_pi, ranks, solution=True)

# %% [markdown]
# The error of such an estimate is about 1.64 / √points, whoever throws them: 0.0016 for a million.

# %%
# %%ranks
estimate = estimate_pi(points, count_hits)
if rank == 0:
    say(f"pi is about {estimate:.5f}, from {points:,} points on {world_size} ranks")
metrics.exact(pi=estimate)

# %% [markdown]
# ### Exercise 4: speed-up and efficiency
#
# ![Strong scaling: eight pieces of work on one rank take 8.03 s; shared by 2, 4 and 8 ranks 4.21, 2.09 and 1.06
# s.](../assets/02_strong_scaling.svg)
#
# Somebody ran such a program on 1, 2, 4 and 8 ranks, always with the same number of points in all ([strong
# scaling](../assets/glossary.md#strong-scaling)), and measured 8.03, 4.21, 2.09 and 1.06 s. *Speed-up* on n ranks is
# the time on one by the time on n; *efficiency* is the speed-up by n. Write both as a function.
#
# **Predict** first, by eye: are 8 ranks more or less efficient than 2?
#
# <details><summary>Answer</summary>
#
# Neither, 95% both. 8.03/1.06 = 7.58, by 8 is 0.947; 8.03/4.21 = 1.91, by 2 is 0.954.
#
# </details>


# %%
# %%ranks
def scaling(seconds):
    """{n: (speed-up, efficiency)} from {n: seconds on n ranks}."""
    raise NotImplementedError  # your turn


checks.speed_up(scaling, ranks)

# %% [markdown]
# #### Solution 4


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
def scaling(seconds):
    """{n: (speed-up, efficiency)} from {n: seconds on n ranks}."""
    return {n: (seconds[1] / s, seconds[1] / s / n) for n, s in seconds.items()}


checks.speed_up(scaling, ranks, solution=True)
if rank == 0:
    for n, (ratio, efficiency) in scaling({1: 8.03, 2: 4.21, 4: 2.09, 8: 1.06}).items():
        say(f"{n} ranks: speed-up {ratio:.2f}, efficiency {efficiency:.0%}")

# %% [markdown]
# 95%, 96% and 95%: as good as constant. An efficiency that *rises* from 2 to 4 ranks is a hint that these are single
# measurements: the differences are noise, and the table should have said so. (Lesson 05 asks that of a famous one.)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: exercises</summary>
#
# 15 minutes, or at home. *Say:* exercise 3 is the pattern of every parallel evaluation:
# share, work, one reduce. *Usual mistakes:* `points // n` and the remainder is gone; one seed for all ranks, so that n
# ranks find one rank's answer n times; an all-reduce where one rank needs the result. *When late:* skip 4. *Ask:* "With
# one seed for all, is the estimate wrong?" (No: it is as good as one rank's. That is why nobody notices.)
#
# </details>

# %% [markdown]
# ## A bug from the zoo (CORE, 3 min)
#
# This ring all-reduce was the *reference solution* of a well-known course (ours is written anew, the mistake is the
# same). It has a ring, two phases and 2(n-1) hops, and its sums are right. **Find what is wrong with it by measuring**,
# before you read the lines closely. You have three instruments: the sum, the number of messages, and the bytes.


# %%
# %%ranks
catch_up(
    globals(), "exchange", "ring_reduce_scatter", "ring_all_gather", "ring_all_reduce"
)  # if you begin here


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


# %% [markdown]
# Measure before you read on:

# %% tags=["nbval-check-output"]
# %%ranks
for name, algorithm in {"our ring": ring_all_reduce, "suspicious": suspicious_ring}.items():
    x_N = torch.full((100_000 * world_size,), float(rank), device=device)
    with wire.watch() as seen:
        algorithm(x_N)
    if rank == 0:
        sent = f"{seen.messages} messages, {seen.sent_bytes / 1e6:.1f} MB"
        say(f"{name:>10}: the sum is {x_N[0].item():g}, {sent}")

# %% [markdown]
# <details><summary>What is wrong?</summary>
#
# It ships **whole tensors**. After the first loop every rank already holds the full sum, and the second loop hands
# around what everybody has. 2(n-1) messages of N instead of N/n: **n times the bytes**. The sum cannot tell, the number
# of messages cannot tell; only the bytes can. On 4 ranks it is four times slower than it should be, on 64 ranks
# sixty-four times.
#
# It happened in [ARENA_3.0#407](https://github.com/callummcdougall/ARENA_3.0/pull/407). The test that came with the
# exercise raised a `TypeError` before it called the solution, so the cell had been run and nothing had been checked.
# That is why the checks here count messages and bytes, and why each of them is itself tested with wrong answers that it
# must reject.
#
# </details>
#
# ### Exercise 5: mend it
#
# Change as few lines as you can. (For lengths that the number of ranks divides.)


# %%
# %%ranks
def mended_ring(x_N):
    """Sum x_N over all ranks, in place; as suspicious_ring, with a quarter of the bytes on 4 ranks."""
    raise NotImplementedError  # your turn: begin with a copy of suspicious_ring


checks.mended_ring(mended_ring, ranks)

# %% [markdown]
# #### Solution 5


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
def mended_ring(x_N):
    """Sum x_N over all ranks, in place; as suspicious_ring, with a quarter of the bytes on 4 ranks."""
    chunks = x_N.chunk(world_size)  # what travels is a chunk, and each hop has another one
    for hop in range(world_size - 1):
        arrived = torch.empty_like(chunks[0])
        exchange(chunks[(rank - hop) % world_size], right, arrived, left)
        chunks[(rank - hop - 1) % world_size].add_(arrived)
    for hop in range(world_size - 1):
        exchange(chunks[(rank - hop + 1) % world_size], right, chunks[(rank - hop) % world_size], left)
    return x_N


checks.mended_ring(mended_ring, ranks, solution=True)

# %% [markdown]
# ## On the cluster
#
# The same file, on two nodes:
#
# ```bash
# srun --nodes 2 --ntasks-per-node 4 python scripts/02_collectives.py --largest-mib 256      # Slurm
# mpiexec -n 8 --ppn 4 python scripts/02_collectives.py --largest-mib 256                    # PBS, PALS
# ```
#
# **What changes on GPUs.** `join()` puts each rank on its GPU and the tensors of this lesson with it; NCCL carries
# them, over NVLink within a node. α and β are other numbers there, so the knee of the curve moves: look for it. What
# the links of a current node are good for, from the data sheets, and what that means for our 40 MB gradient on a ring
# of four:
#
# | link | per direction | 60 MB per rank take at least |
# |---|---|---|
# | NVLink 4 on a board of 4 GPUs | 150 GB/s to each of 3 peers (x 3 peers x 2 directions = the 900 GB/s of the data sheet) | 0.4 ms on one ring; 0.13 ms if several rings use all three peers (450 GB/s) |
# | InfiniBand NDR | 400 Gb/s = 50 GB/s | 1.2 ms |
#
# **What to look for.** Bus bandwidth near what a GPU can send (there 450 GB/s; 50 per InfiniBand card) for large messages: if
# it is a tenth of it, NCCL may have fallen back to TCP (`NCCL_DEBUG=INFO` says which transport it chose). A sharp drop from one
# node to two: are the ranks of one node neighbours on the ring? And set a time-out that you are willing to pay for: 10 minutes
# on 512 GPUs are 85 GPU hours.

# %% [markdown]
# ## Recap
#
# 1. A collective is a call that all ranks make; choose it by who has the data before and who needs it afterwards.
# 2. The ring all-reduce is a reduce-scatter and an all-gather: 2(n-1) messages, 2(n-1)/n of the bytes, for any number of ranks.
# 3. A message costs α + bytes/β; many small ones pay α, few large ones pay β.
# 4. A rank that does not call leaves the others waiting until the time-out; the one without an error is the culprit.
# 5. A right sum proves little. Count the messages and the bytes.
#
# ## Further reading
#
# - Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations* (2009): the ring, and why it
#   is optimal.
# - Thakur, Rabenseifner and Gropp, *Optimization of collective communication operations in MPICH* (2005): trees, doubling,
#   and when.
# - [nccl-tests, PERFORMANCE.md](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): the two bandwidths.
# - [nccl#479](https://github.com/NVIDIA/nccl/issues/479): ordered sends on GPUs, asked and answered.
# - Next: [lesson 03](03_data_parallel.ipynb) puts this all-reduce into a training step.

# %%
# %%ranks
metrics.write()
if rank == 0:
    say("metrics.json is in this run's folder under outputs/02_collectives; `latest` points to it")
leave()

# %% tags=["active-ipynb"]
# hands.stop()
