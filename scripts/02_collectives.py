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
# **46 minutes** for the sections marked CORE, 88 with those marked MORE.
#
# After this lesson **you can**
# - name each collective, say who holds what afterwards, and what it costs;
# - build the ring all-reduce, and count its messages and bytes;
# - predict the time of a message by two numbers, α and β, and find both on your machine;
# - recognise a deadlock and a missing rank, and recover.
#
# **You need** [rank](../assets/glossary.md#rank) and launcher ([lesson 00](00_start.ipynb)). In two lines: a *rank* is
# one of n processes that all run this same file; `torch.distributed` lets them send tensors to each other.
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
# Minutes of the CORE: warm-up 3, collectives 5, ring 12, time-outs and deadlocks 10, experiment 11,
# bug 2. Each of the four builds has 3 minutes. After that have everybody unfold and run the solution: what follows needs
# it.
#
# *Say:* one picture carries the lesson: everybody talks at the same time, and only to the neighbour. Whatever is slow
# later (DDP, FSDP, tensor parallel) is slow because one of these messages is too large, too small, or waits for
# somebody.
#
# *Three usual mistakes:* thinking that rank 0 collects and redistributes; thinking that `send` is fire and forget;
# comparing milliseconds of this machine with those of a GPU node (compare shapes of curves, not heights).
#
# *When late:* skip gather, scatter and all-to-all (the figures suffice) and build C; keep the ring and the missing rank.
#
# *Ask the room:* "A hundred ranks instead of four, the same gradient. How much more does each rank send?" Vote before
# the ring.
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
# The first cell starts four ranks behind this notebook. From then on, a cell that begins with `%%ranks` runs on all of
# them. (In the script that line is a comment: there, a launcher has started the ranks.)
#
# Two habits of this course: a name such as `x_N` carries its [shape](../assets/glossary.md#shape-suffix), here N numbers. And a folded cell with `catch_up`
# defines what a section needs from earlier ones, so you can begin at any section.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("02_collectives", globals())

# %%
# %%ranks
import torch
import torch.distributed as dist
from manyhands import Metrics, catch_up, fingerprint, join, leave, mpi_world, say, show
from manyhands.checks import collectives as checks

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
left, right = (rank - 1) % world_size, (rank + 1) % world_size
metrics = Metrics(ranks, parameters={"points": points})

# %% [markdown]
# Each rank knows its own number, how many ranks there are, and who sits to its `left` and `right` in a circle. That is
# all it needs in this lesson.

# %% tags=["nbval-check-output"]
# %%ranks
say(f"I am rank {rank} of {world_size}; left of me is {left}, right of me {right}")

# %% [markdown]
# ## Warm-up: four numbers by hand (CORE, 3 min)
#
# Four ranks hold 3, 1, 4 and 2, one number each. **Every rank needs the sum.** No rank can look into another's
# memory. It can only *send* a tensor to a rank, and *receive* one from a rank.
#
# ![Send and recv: rank 1 sends its 1 to rank 2; ranks 0 and 3 do not take part.](../assets/02_send_recv.svg)
#
# The most natural way: rank 0 sends its number to rank 1, which adds its own and sends the sum to rank 2, and so on.
#
# **Predict.** What does each rank know once rank 3 has added its number? How many
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
# Every rank ran the same lines, but `rank` decided which of them did something. The library needs one call. All ranks
# make it, and afterwards all of them hold the sum:

# %% tags=["nbval-check-output"]
# %%ranks
total = number.clone()
dist.all_reduce(total)  # all ranks
say(f"the sum is {total.item()}")

# %% [markdown]
# A call that *all* ranks of a group must make together is a [collective](../assets/glossary.md#collective).
#
# Remember the number six: six messages for four ranks. The ring below sends six *per rank*, and for large tensors it is
# faster. How can that be?

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: warm-up</summary>
#
# 3 minutes. *Say:* act it out with four people in the first row and slips of paper. *Usual
# mistakes:* "rank 0 knows the sum" (it knows 3); "recv returns the tensor" (it fills the one that you give); "`total`
# must be sent back" (all-reduce works in place). *When late:* run both cells without the prediction. *Ask:* "Who is
# idle while rank 1 talks to 2?"
#
# </details>

# %% [markdown]
# ## The collectives (CORE, 5 min)
#
# **Why.** Nearly all communication in distributed training is one of eight patterns. Libraries make each of them fast
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
# [1]: the shape of *one part*. If you allocate [4] on each rank you get an error.
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
# [Gather](../assets/glossary.md#gather) puts tensors side by side. [Reduce](../assets/glossary.md#reduce) adds them up,
# or takes the largest, or the product.

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
# **Predict.** Now all four ranks hold the same [1, 2, 3, 4]. What does rank 2 hold after each of the two?
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
# ### What each one costs
#
# The tensor as a whole has N bytes, and there are n ranks. The last column is what the busiest rank must send or
# receive at the very least:
#
# | collective | each rank gives | each rank gets | bytes per rank | 40 MB, n = 4 |
# |---|---|---|---|---|
# | broadcast | N, on the root | N | N | 40 MB |
# | scatter | N, on the root | N/n | N(n-1)/n | 30 MB |
# | gather | N/n | N, on the root | N(n-1)/n | 30 MB |
# | reduce | N | N, on the root | N | 40 MB |
# | all-reduce | N | N | **2N(n-1)/n** | **60 MB** |
# | all-gather | N/n | N | N(n-1)/n | 30 MB |
# | reduce-scatter | N | N/n | N(n-1)/n | 30 MB |
# | all-to-all | N | N | N(n-1)/n | 30 MB |
#
# Look at the figures of reduce-scatter and all-gather again: first each rank gets one part of the sum, then everybody
# gets all parts. **Together they are an all-reduce**, and the bytes add up as well. The ring below is built on that.

# %% [markdown]
# ### A call without data (MORE, 1 min)
#
# A [barrier](../assets/glossary.md#barrier) ends on every rank once all have reached it. It is for timing and for
# files, rarely for correctness: every collective waits for the data that it needs anyway.
#
# ![Barrier: the ranks arrive one by one, wait for the last, and go on together.](../assets/02_barrier.svg)

# %%
# %%ranks
import time

time.sleep(0.1 * rank)  # the ranks arrive one by one, 0.1 s apart
arrived = time.perf_counter()
dist.barrier()
say(f"I waited {time.perf_counter() - arrived:.1f} s")

# %% [markdown]
# ### What gloo really sends (MORE, 2 min)
#
# The table has lower bounds. What does the library do? The operating system counts the bytes that each TCP connection
# has delivered, so we can ask gloo, the library for CPUs. (Headers add a little.) Which of the five do you expect at the
# bound?

# %%
# %%ranks
from manyhands.measure import wire
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
    with wire.watch() as seen:
        call()
    sent_bytes = max_over_ranks(float(seen.transport_bytes or 0), ranks)
    if rank == 0 and sent_bytes:
        say(f"{name:>14}: the busiest rank sends {sent_bytes / x_N.nbytes:.2f} x N, the bound is {at_least:.2f}")

# %% [markdown]
# gloo's broadcast is a tree: on 4 ranks the root sends the whole tensor twice, but the last rank has it after two hops.
# And its reduce-scatter sends as many bytes as an all-reduce, because it is one: gloo sums everything and cuts out a
# part.
#
# ### The same in MPI (MORE, 3 min)
#
# All of this is older than GPUs. MPI, the message passing interface of 1994, has the same patterns under nearly the
# same names, and in Python they come from `mpi4py`. Names with a capital (`Allreduce`) take arrays and are fast; with a
# small letter (`allreduce`) they pickle any Python object.
#
# | pattern | torch.distributed | mpi4py |
# |---|---|---|
# | send, receive | `send(x, dst)`, `recv(x, src)` | `Send(x, dst)`, `Recv(x, src)` |
# | broadcast | `broadcast(x, src)` | `Bcast(x, root)` |
# | scatter | `scatter(part, parts, src)` | `Scatter(parts, part, root)` |
# | gather | `gather(x, parts, dst)` | `Gather(x, parts, root)` |
# | reduce | `reduce(x, dst)` | `Reduce(x, out, root=root)` |
# | all-reduce | `all_reduce(x)` | `Allreduce(x, out)` |
# | all-gather | `all_gather(parts, x)` | `Allgather(x, parts)` |
# | reduce-scatter | `reduce_scatter(part, parts)` | `Reduce_scatter_block(parts, part)` |
# | all-to-all | `all_to_all_single(out, x)` | `Alltoall(x, out)` |
# | barrier | `barrier()` | `Barrier()` |
#
# Two traps between the two. torch sums **in place** where MPI takes an input and an output. And MPI always names the
# input first; torch names the output first, except in `gather`. Not every launcher makes an MPI world; where there is
# none, the next cell says so.

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
# ### Who carries the messages (MORE, 2 min)
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
# NCCL had no gather, scatter or all-to-all of its own before version 2.28. torch built them from NCCL's send and
# receive, and they work all the same.

# %%
# %%ranks
if rank == 0:
    say(f"my tensors live on {device}, and {ranks.backend} carries them")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: collectives</summary>
#
# 5 minutes, one per pair of figures. *Say:* "who has it before, who needs it afterwards?" and let
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
# the network decides how fast you train.
#
# The ring does better. Cut your gradient into as many chunks as there are ranks. Send only to your right-hand
# neighbour, and let each chunk *collect its sum while it travels*.
#
# ![Four ranks on a ring; rank k sends chunk k to rank k+1, all four at the same time.](../assets/02_ring.svg)
#
# First half, **reduce-scatter**: at every hop each rank receives one chunk from its left and adds its own numbers. At
# the next hop it sends *that* chunk on. Follow one chunk: it starts with one rank's numbers, and after three hops it has
# visited everybody.
#
# ![Reduce-scatter on the ring: at each of three hops every rank receives one chunk and adds it; then rank k holds the finished
# sum of chunk k+1.](../assets/02_ring_reduce_scatter.svg)
#
# Second half, **all-gather**: the finished chunks travel round once more. Nothing is added now, they are only copied.
#
# ![All-gather on the ring: at each of three hops every rank receives one finished chunk; then all have all
# four.](../assets/02_ring_all_gather.svg)

# %% [markdown]
# **Predict.** Four ranks, a 40 MB gradient. How many messages does each rank send, and how many MB? And with a hundred
# ranks?
#
# <details><summary>Answer</summary>
#
# 2(n-1) = 6 messages of 40/4 = 10 MB each: 60 MB. With a hundred ranks 198 messages of 0.4 MB: 79.2 MB. In general it
# is 2(n-1)/n times the gradient, never more than 80 MB, however many ranks join. The bytes per rank hardly grow. (The
# *number* of messages does; we come back to that.)
#
# </details>

# %% [markdown]
# Every hop is the same step: give one tensor to the right and take one from the left, **both at once**. `P2POp` only
# describes a message; `batch_isend_irecv` starts them together and returns one handle for each, to wait for.


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
# ### Build A: the sum that travels
#
# Write the first half. `chunks[c]` is this rank's chunk c. At the first hop rank k sends chunk k, as in the figure;
# after that it sends the chunk to which it has just added. Receive into a new tensor (`torch.empty_like`), then add it
# to your own chunk in place (`+=`). On a circle, numbers count modulo `world_size`.
#
# <details><summary>Hint</summary>
#
# With `hop` counted from 0, rank k sends chunk k - hop and receives chunk k - hop - 1.
#
# </details>


# %%
# %%ranks
def ring_reduce_scatter(chunks):
    """Afterwards chunks[right] holds the sum over all ranks; the others hold unfinished sums."""
    raise NotImplementedError  # your turn: world_size - 1 times exchange(...), to the right


checks.ring_reduce_scatter(ring_reduce_scatter, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution A
def ring_reduce_scatter(chunks):
    """Afterwards chunks[right] holds the sum over all ranks; the others hold unfinished sums."""
    for hop in range(world_size - 1):
        give, mine = chunks[(rank - hop) % world_size], chunks[(rank - hop - 1) % world_size]
        arrived = torch.empty_like(mine)
        exchange(give, right, arrived, left)
        mine += arrived  # the chunk has collected one more rank's numbers


checks.ring_reduce_scatter(ring_reduce_scatter, ranks, solution=True)

# %% [markdown]
# Watch it at work. Rank r puts 10^r everywhere, so the digits of a sum show whose numbers are in it: 1101 holds those of
# ranks 3, 2 and 0. One chunk per rank is finished, as in the last grid of the figure.

# %% tags=["nbval-check-output"]
# %%ranks
chunks = list(torch.full((world_size,), 10 ** (rank % 10), device=device).chunk(world_size))
ring_reduce_scatter(chunks)
say(f"my chunks: {torch.cat(chunks).tolist()}; chunk {right} is finished")

# %% [markdown]
# ### Build B: hand the sums around
#
# Write the second half. Rank k starts with the chunk that is finished there, k+1, and at each later hop sends on the
# chunk that has just arrived. It arrives where it will stay: `chunks[c]` is a *view* of the gradient, so receive
# straight into it.


# %%
# %%ranks
def ring_all_gather(chunks):
    """From chunks[right] finished on each rank to all chunks finished on all ranks."""
    raise NotImplementedError  # your turn


checks.ring_all_gather(ring_all_gather, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution B
def ring_all_gather(chunks):
    """From chunks[right] finished on each rank to all chunks finished on all ranks."""
    for hop in range(world_size - 1):
        give, take = chunks[(rank + 1 - hop) % world_size], chunks[(rank - hop) % world_size]
        exchange(give, right, take, left)


checks.ring_all_gather(ring_all_gather, ranks, solution=True)

# %% [markdown]
# One half after the other is the all-reduce:


# %%
# %%ranks
def ring_all_reduce(x_N):
    """Sum x_N over all ranks, in place. Sends 2(n-1)/n of its bytes, in 2(n-1) messages."""
    if x_N.numel() % world_size:
        raise ValueError(f"{x_N.numel()} numbers do not split over {world_size} ranks; use a multiple of it")
    chunks = x_N.chunk(world_size)  # views
    ring_reduce_scatter(chunks)
    ring_all_gather(chunks)
    return x_N


# %% [markdown]
# ### Three ways to one sum
#
# Take twelve "gradients" of 240,000 random numbers in float64. The ranks share them. Each rank sums its own, then all
# ranks sum over the ranks: once with our ring, once with the library. The third way is one process that adds up all
# twelve. Throughout this course a technique has to pass this test: **from scratch = library = one process**.

# %%
# %%ranks
from manyhands.measure import wire

generator = torch.Generator().manual_seed(0)  # every rank draws the same twelve, and keeps its share
gradients_12N = torch.randn(12, 240_000, generator=generator, dtype=torch.float64)
mine_N = gradients_12N.tensor_split(world_size)[rank].sum(0).to(device)

with wire.watch() as seen:  # counts what leaves this rank; it knows nothing of our formula
    ours_N = ring_all_reduce(mine_N.clone())
library_N = mine_N.clone()
dist.all_reduce(library_N)
alone_N = gradients_12N.sum(0).to(device)

# %% [markdown]
# The counter saw every message. Here is what it counted, beside your prediction of 2(n-1)/n times the tensor:

# %% tags=["nbval-check-output"]
# %%ranks
predicted_bytes = 2 * (world_size - 1) / world_size * mine_N.nbytes
for name, other_N in {"the library": library_N, "one process": alone_N}.items():
    say(f"agrees with {name} to 1e-10: {torch.allclose(ours_N, other_N, rtol=0, atol=1e-10)}")
say(f"{seen.messages} messages, {seen.sent_bytes / 1e6:.2f} MB; predicted {predicted_bytes / 1e6:.2f} MB")
metrics.exact(ring_sum=fingerprint([ours_N]), messages=seen.messages, sent_bytes=seen.sent_bytes)
metrics.close(tolerance=1e-10, twelve_gradients=ours_N[::10_000])

# %% [markdown]
# ### Did the bytes leave the process? (MORE, 2 min)
#
# The counter saw what entered the library. The operating system knows what left: it counts the bytes that each TCP
# connection has delivered.
#
# **Predict** the ratio of bytes on the wire to bytes of the tensor, on 4 ranks: for our ring, and for gloo's own
# all-reduce, of which we know nothing.
#
# <details><summary>Answer</summary>
#
# Ours: 2(n-1)/n = 1.5, and a little more for the headers of TCP and gloo. gloo's: let it tell you. If it sent
# everything to everyone it would be 3; if rank 0 collected and redistributed, different ranks would show different
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
# If gloo's number is near the theory, it moves as many bytes as a ring, and you have ruled out "everything to everyone"
# without reading a line of it. (Halving and doubling would move as many. That it is a ring, its source says.)

# %% [markdown]
# ### Exercise 1: any length (MORE, 6 min)
#
# Our ring refuses 7 numbers on 4 ranks, and real gradients have any number of elements. Write an all-reduce for **any
# length**, also 0 and shorter than the number of ranks, in place. The check wants the right sum, exactly 2(n-1)
# messages, and chunks no larger than needed (a chunk may be empty). You may use the two halves from above.
#
# <details><summary>Hint</summary>
#
# `torch.arange(5).chunk(4)` gives three pieces. Look for a method that always gives four. And what arrives has the size
# of the chunk to which you add it, not of the one that you send.
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
# 12 minutes, six of them for builds A and B. *Say:* follow chunk 0 with your finger through the
# grids; then the punch line: six messages per rank instead of six in all, and yet faster, because they all travel at
# once and are a quarter as large. *Usual mistakes:* adding in the second half too; sending the chunk that was just
# *sent* instead of the one that arrived; starting the second half with chunk k. The checks name each of them. *When
# late:* show solution A, let them write B. *Ask:* "What limits the ring with 10,000 ranks?" (2(n-1) latencies: the tree
# below, and lesson 10.)
#
# </details>

# %% [markdown]
# ## When somebody does not call (CORE, 10 min)
#
# **Why.** An all-reduce ends when *all* ranks have called it. If one does not (it crashed, it took another branch, it is
# still loading data), the others wait. On a cluster that burns node hours, and it looks like nothing: no error, no
# output, GPUs at 100%.
#
# They wait until the *time-out* of their [process group](../assets/glossary.md#process-group): the set of ranks that
# call collectives together. The [time-out](../assets/glossary.md#time-out) is 30 minutes with gloo and 10 minutes with
# NCCL, unless you set one. `join()` made a group of all ranks. We make another one, which waits for three seconds, and
# let the last rank forget to call.
#
# **Predict.** How long does each rank wait, and does the error say who is missing?
#
# <details><summary>Answer</summary>
#
# All of them wait about three seconds, also the one that waits for a rank which itself waits. And no: the library knows
# on which neighbour it waits, not why. (If one rank gives up a moment earlier, its neighbours report "Connection closed
# by peer": even further from the cause.)
#
# </details>

# %%
# %%ranks
import time
from datetime import timedelta

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
# An honest error, but it does not say who is missing: rank 0 waits for a neighbour, which waits for its neighbour. To
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
# To **recover**, throw the broken group away and make a new one. In the old one some ranks are one collective ahead, so
# its next answers would be mixed up. Every other group goes on as before:

# %%
# %%ranks
dist.destroy_process_group(impatient)
dist.destroy_process_group(roll_call)
everybody = torch.ones(1, device=device)
dist.all_reduce(everybody)
say(f"here again: {everybody.item():g} of {world_size}")

# %% [markdown]
# Two warnings for GPUs. On NCCL a time-out ends the *process*, so you cannot catch it as we did here; that is why the
# roll call uses gloo, which works beside NCCL. And a time-out tells you who *noticed*. Look for the rank that has no
# error at all.
#
# ### A deadlock of good manners
#
# Ranks can wait forever although nobody is missing. Everybody passes a tensor to the right, and everybody is polite:
# first send, then receive.
#
# ![Four ranks that all send before they receive: each send waits for a receive that never
# starts.](../assets/02_ordered_sends.svg)
#
# **Predict.** With 4 bytes per message, does it pass or hang? With 4 million?
#
# <details><summary>Answer</summary>
#
# On gloo it hangs with both. Each rank gives up after half of `wait_s`.
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
# gloo's `send` ends when the other side receives, whatever the size. So all ranks stand in their first line: a
# [deadlock](../assets/glossary.md#deadlock).
#
# MPI is more treacherous. It copies a small message into a buffer and lets the sender go on ("eager"); a large one waits
# for its receiver ("rendezvous"). A program with this bug passes all its small tests and hangs on the first real run. We
# can ask MPI without hanging: `Isend` starts a message, and `Test` tells whether the sender could go on before anybody
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
# ### Build C: whose turn is it?
#
# Mend it with nothing but `dist.send` and `dist.recv`: every rank gives `mine` to the right and returns its left
# neighbour's tensor. "Rank 0 sends first, all others receive first" ends, but then n messages travel one after the
# other. Two rounds are enough, three if n is odd, and the check counts them. (In a world of one, return a copy.)


# %%
# %%ranks
def pass_right(mine):
    """Give `mine` to the right-hand neighbour; return the tensor of the left-hand one (same shape and dtype)."""
    raise NotImplementedError  # your turn: this was dist.send(mine, right), then dist.recv(theirs, left)


checks.pass_right(pass_right, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution C
def pass_right(mine):
    """Give `mine` to the right-hand neighbour; return the tensor of the left-hand one (same shape and dtype)."""
    theirs = mine.clone()
    if rank % 2:  # odd ranks receive first: in the first round their left neighbours send
        dist.recv(theirs, left)
        dist.send(mine, right)
    elif world_size > 1:
        dist.send(mine, right)
        dist.recv(theirs, left)
    return theirs


checks.pass_right(pass_right, ranks, solution=True)

# %% [markdown]
# It ends, but in each round every rank uses only one direction of its links. `exchange` uses both, and in one batch
# nobody has to be first. On GPUs prefer it even to `isend` followed by `recv`: NCCL wants the two
# [in one group](https://github.com/NVIDIA/nccl/issues/479), and some process groups
# [run point-to-point calls one after the other](https://github.com/pytorch/pytorch/pull/154132), so separate calls may
# hang.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: waiting</summary>
#
# 10 minutes, three of them for build C. *Say:* the rank with the error message is the honest one; look for the silent
# one. *Usual mistakes:* raising the time-out; putting a barrier before each collective "to be safe" (it hangs just the
# same, one line earlier); mending the order with `if rank == 0`. *When late:* only the missing rank. *Ask:* "Your job
# printed nothing for eight minutes. What do you look at first?" (Lesson 11 answers with the flight recorder.)
#
# </details>

# %% [markdown]
# ## Experiment: what does a message cost? (CORE, 11 min)
#
# **Why.** One formula decides how large DDP's buckets are, when a tree beats a ring, and whether a model is better
# split within a node or across nodes. It has two numbers, and you can find both on any machine in a minute: a message
# takes **α + bytes / β**.
#
# ![The time of a message against its size is a straight line that starts at alpha and rises by
# 1/beta.](../assets/02_alpha_beta.svg)
#
# [α](../assets/glossary.md#alpha-beta), the latency, is what even an empty message costs: waking the other side,
# software. β, the bandwidth, is bytes per second once they flow. (Some texts write β for its inverse.)
#
# The plan: measure one *hop* (every rank gives to the right and takes from the left) for many sizes. Fit α and β. Then
# **predict** something that was not used in the fit: the ring all-reduce.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "exchange", "ring_reduce_scatter", "ring_all_gather", "ring_all_reduce")

# %% [markdown]
# Timings that are compared take turns, so that a slow moment of the machine meets all of them. The slowest rank counts.

# %%
# %%ranks
from functools import partial
from statistics import median

import numpy as np
from manyhands.measure.timing import median_s

sizes_b = [64 * 4**k for k in range(20) if 64 * 4**k <= largest_mib * 2**20] or [64]


def several(call, times):
    for _ in range(times):
        call()


def in_turn(calls, n_bytes):
    """{name: seconds of each sample}; small messages go ten at a time, so that the clock has something to see."""
    times, found = 10 if n_bytes < 2**20 else 1, {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            timed = median_s(partial(several, call, times), 1, ranks, warm_up=0)
            found[name].append(timed.slowest_s / times)
    return {name: samples[1:] for name, samples in found.items()}  # the first round was the warm-up


# %% [markdown]
# One loop measures it all, so that hops and all-reduces meet the same machine: with gloo (on GPUs: NCCL), with our ring,
# and with MPI where there is an MPI world. You will see the all-reduces only after you have predicted them.
# On GPUs MPI sends what lies in the *host's* memory, the others from GPU to GPU: do not compare these two. A *GPU-aware* MPI
# would take a GPU's memory, too; the course leaves that off.

# %%
# %%ranks --timeout 300
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
    for key, samples in in_turn(calls, n_bytes).items():
        measured_s.setdefault(key, []).append(samples)

# %% [markdown]
# First the hops:

# %%
# %%ranks
hop_samples_s = {name: samples for (what, name), samples in measured_s.items() if what == "hop"}
hop_s = {name: [median(samples) for samples in of_sizes] for name, of_sizes in hop_samples_s.items()}

# %% [markdown]
# The fit is a least-squares line through (bytes, seconds). One detail matters: bytes span five orders of magnitude, and
# plain least squares cares only about the largest. Dividing each row by its own time makes all *relative* errors count
# alike.


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
        knee = f"they weigh the same at {alpha * beta / 1e3:,.0f} kB"
        say(f"{name}: alpha = {1e6 * alpha:,.0f} µs, beta = {beta / 1e6:,.0f} MB/s; {knee}")

# %% [markdown]
# On a logarithmic plot α + bytes/β is flat on the left, where α rules, and has slope one on the right, where β does.
# Between them lies the knee, at α·β bytes. Whiskers go from the fastest sample to the slowest. The lower panel shows
# measured divided by fitted: 1 is perfect.

# %%
# %%ranks
from manyhands.plots.looks import ALTERNATIVES
from manyhands.plots.times import against_size

looks = dict(zip((library_name, mpi_name, "our ring"), ALTERNATIVES, strict=False))  # the same in each plot
if rank == 0:
    fitted = {name: [alpha + b / beta for b in sizes_b] for name, (alpha, beta) in line.items()}
    title = f"one hop on the ring, {world_size} ranks on this machine"
    figure = against_size(sizes_b, hop_samples_s, fitted, title, looks=looks, formula="fitted")
    show(figure, "hop", alt="Time of one hop against bytes: medians and whiskers around the fitted line.")

# %% [markdown]
# A point off the line need not be the network's fault. Where ranks share cores (the start cell says how many there are),
# a rank whose message has arrived may still wait for a core. So α is a property of network, software *and* load:
# measure it where you will run, and more than once.
#
# ### Build D: predict the ring
#
# A hop of b bytes takes alpha + b / beta. Write the seconds of a whole ring all-reduce: how many hops does it make, and
# how many bytes has each?


# %%
# %%ranks
def ring_seconds(n_bytes, n, alpha, beta):
    """Seconds of a ring all-reduce of n_bytes over n ranks (alpha in s, beta in bytes/s)."""
    raise NotImplementedError  # your turn


checks.ring_seconds(ring_seconds, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution D
def ring_seconds(n_bytes, n, alpha, beta):
    """Seconds of a ring all-reduce of n_bytes over n ranks (alpha in s, beta in bytes/s)."""
    hops = 2 * (n - 1)  # n-1 to sum, n-1 to hand around
    return hops * (alpha + n_bytes / n / beta)  # one chunk each


checks.ring_seconds(ring_seconds, ranks, solution=True)

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
    figure = against_size(sizes_b, reduce_samples_s, {"our ring": predicted_s}, title, looks=looks)
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
# The last line is why DDP does not send gradients one by one, but first collects 25 MiB of them in a *bucket*
# ([lesson 03](03_data_parallel.ipynb)). gloo's all-reduce is a ring too; it cuts each chunk into pieces and adds one
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
from manyhands.plots.times import bandwidths

if rank == 0:
    factor = 2 * (world_size - 1) / world_size
    figure = bandwidths(sizes_b, reduce_s, factor, "all-reduce on this machine", looks=looks)
    show(figure, "bandwidth", alt=f"Algorithm and bus bandwidth of {', '.join(reduce_s)} against bytes.")

# %% [markdown]
# The same medians, seen from the other side. Far to the left of the knee nearly all of the bandwidth is lost to α, and a
# network with a larger β would not help.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: experiment</summary>
#
# 11 minutes, three of them for build D. *Say:* two numbers describe a network; below α·β bytes you pay for the message,
# above for the bytes. *Usual mistakes:* timing without a barrier; one sample; reading α off a plot with a linear axis;
# one α for all hops. *When late:* show the stored output, skip the fit. *Ask:* "DDP has 200 small gradients. One message
# each, or one for all?" (That is lesson 03.)
#
# </details>

# %% [markdown]
# ## Other shapes, on a virtual network (MORE, 11 min)
#
# **Why.** The ring has the fewest bytes and the most hops: with 1,000 ranks 1,998 latencies in a row. Other shapes
# trade bytes for hops. Whether that pays depends on the network, and one machine has only one. So we take a [**virtual
# network**](../assets/glossary.md#virtual-network): the messages are real, the sums are real, and a wrong algorithm hangs or gives wrong numbers as ever. Only
# *time* is computed. Every rank has a logical clock, and a message moves it by α + bytes/β of the link that it takes. No
# real clock is read, so each run gives the same times to the last digit.
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
# Three messages in both. One by one, rank 0 sends all three in a row, two of them over the slow link. In the tree, ranks
# 0 and 1 send at the same time in round 2, and the last rank waits for only one slow message.

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
# Expect two crossing lines, and above them one that never wins. The formulas for 4 ranks are dashed. The ratio below
# them is 1, unless one of us has miscounted a hop.

# %%
# %%ranks
from manyhands.plots.schedule import gantt
from manyhands.plots.times import against_size

if rank == 0:
    fast, slow = nvlink.cost_s, infiniband.cost_s  # alpha + bytes / beta
    formula = {
        "ring": [6 * slow(b / 4) for b in virtual_sizes_b],
        "hierarchical": [2 * fast(b / 2) + 2 * slow(b / 4) for b in virtual_sizes_b],
        "doubling": [fast(b) + slow(b) for b in virtual_sizes_b],
    }
    formula = formula if world_size == 4 else {}  # the table is for 2 nodes of 2
    title = "all-reduce on a virtual network of two nodes"
    figure = against_size(virtual_sizes_b, shapes_s, formula, title, unit="virtual", formula="formula")
    show(figure, "shapes", alt="Virtual time against bytes: doubling first, then hierarchical wins.")

# %% [markdown]
# On 4 ranks doubling wins up to 700 kB, and the hierarchical one above. The flat ring loses everywhere here: half of its
# links are fast, but in every hop *some* rank uses a slow one, and at the next hop all others wait for it. That is why
# real libraries look at the topology first, and switch algorithm with the size (`NCCL_ALGO` names NCCL's choices).
#
# Where the time goes, for 1 MiB. Flat ring: six hops at the pace of the slow link. Hierarchical: two short hops and two
# long ones.

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
# 11 minutes, for a long course or a quick group. *Say:* virtual time, real messages; the
# plot repeats to the last digit. *Usual mistakes:* reading virtual microseconds as this machine's; thinking that a tree
# sends fewer bytes; forgetting that the slowest link sets the pace of a ring. *When late:* only the last plot. *Ask:*
# "Where does the crossing move when the network between the nodes gets ten times slower?"
#
# </details>

# %% [markdown]
# ## Exercises (MORE, 13 min)
#
# Exercise 1 stands with the ring, exercise 4 with the zoo. These two need only the start cells.

# %% [markdown]
# ### Exercise 2: pi, with one reduce
#
# Throw points at random into the unit square; the share that falls into the quarter circle is π/4. Points do not depend
# on each other, so the ranks can share them. `count_hits(points, seed)` throws and counts. Write what is around it:
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

# %% [markdown]
# #### Solution 2


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
# scaling](../assets/glossary.md#strong-scaling)), and measured 8.03, 4.21, 2.09 and 1.06 s. The *speed-up* on n ranks is
# the time on one rank divided by the time on n; the *efficiency* is the speed-up divided by n. Write both as a function.
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

# %% [markdown]
# #### Solution 3


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
def scaling(seconds):
    """{n: (speed-up, efficiency)} from {n: seconds on n ranks}."""
    return {n: (seconds[1] / s, seconds[1] / s / n) for n, s in seconds.items()}


checks.speed_up(scaling, ranks, solution=True)
if rank == 0:
    for n, (ratio, efficiency) in scaling({1: 8.03, 2: 4.21, 4: 2.09, 8: 1.06}).items():
        say(f"{n} rank{'s' * (n > 1)}: speed-up {ratio:.2f}, efficiency {efficiency:.0%}")

# %% [markdown]
# 95%, 96% and 95%: as good as constant. An efficiency that *rises* from 2 to 4 ranks hints at single measurements: the
# differences may be noise, and the table should say so.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: exercises</summary>
#
# 13 minutes, or at home. *Say:* exercise 2 is the pattern of every parallel evaluation:
# share, work, one reduce. *Usual mistakes:* `points // n` and the remainder is gone; one seed for all ranks, so that n
# ranks find one rank's answer n times; an all-reduce where one rank needs the result. *When late:* skip 3. *Ask:* "With
# one seed for all, is the estimate wrong?" (No: it is as good as one rank's. That is why nobody notices.)
#
# </details>

# %% [markdown]
# ## A bug from the zoo (CORE, 2 min)
#
# This ring all-reduce was the *reference solution* of a well-known course (ours is written anew, the mistake is the
# same). It has a ring, two phases and 2(n-1) hops, and its sums are right. **Find what is wrong with it by measuring**,
# before you read the lines closely. You have three instruments: the sum, the number of messages, and the bytes.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "exchange", "ring_reduce_scatter", "ring_all_gather", "ring_all_reduce")

# %% [markdown]
# The suspect:


# %%
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


# %% [markdown]
# And the instruments:

# %% tags=["nbval-check-output"]
# %%ranks
from manyhands.measure import wire

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
# around what everybody has. It sends 2(n-1) messages of N bytes instead of N/n: **n times the bytes**. Neither the sum
# nor the number of messages shows that; only the bytes do. For large tensors it is four times slower than it should be
# on 4 ranks, and sixty-four times on 64.
#
# It happened in [ARENA_3.0#407](https://github.com/callummcdougall/ARENA_3.0/pull/407). The exercise had a test, but it
# was called without an argument and raised a `TypeError` before it reached the solution. That is why the checks here
# count messages and bytes, and are themselves tested with wrong answers that they must reject.
#
# </details>

# %% [markdown]
# ### Exercise 4: mend it (MORE, 6 min)
#
# Change as few lines as you can. (For lengths that the number of ranks divides.)


# %%
# %%ranks
def mended_ring(x_N):
    """Sum x_N over all ranks, in place; as suspicious_ring, with a quarter of the bytes on 4 ranks."""
    raise NotImplementedError  # your turn: begin with a copy of suspicious_ring


checks.mended_ring(mended_ring, ranks)

# %% [markdown]
# #### Solution 4


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

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: zoo</summary>
#
# 2 minutes. *Say:* a right sum proves little. *Usual mistakes:* reading the code first; comparing times, which depend
# on the machine. *When late:* run the measurement and ask the room. *Ask:* "Which test of your own code would not have
# noticed?"
#
# </details>

# %% [markdown]
# ## On the cluster
#
# The same file, on two nodes, inside a job:
#
# ```bash
# srun --nodes 2 --ntasks-per-node 4 python scripts/02_collectives.py --largest-mib 256      # Slurm
# mpiexec -n 8 --ppn 4 python scripts/02_collectives.py --largest-mib 256                    # PBS, PALS
# ```
#
# **What changes on GPUs.** `join()` puts each rank on its GPU and the tensors of this lesson with it; NCCL carries
# them. α and β are different there, so look for the knee. What the data sheets say of a current node's links, and
# what that means for our 40 MB gradient on a flat ring of four:
#
# | link | per direction | 60 MB per rank take at least |
# |---|---|---|
# | NVLink 4, board of 4 GPUs | 150 GB/s to each of 3 peers | 0.4 ms on one ring; 0.13 ms with all three peers (450 GB/s) |
# | InfiniBand NDR | 400 Gb/s = 50 GB/s | 1.2 ms |
#
# One flat ring is our model. NCCL looks at the topology, orders its rings by it, and
# [runs several at once](https://github.com/NVIDIA/nccl/issues/43).
#
# **What to look for.** With large messages on NVLink 4, NCCL's ring reaches a
# [bus bandwidth of about 370 GB/s](https://github.com/NVIDIA/nccl-tests/issues/212) of the 450, because the protocol
# takes its share. With 8 GPUs you may see 480: there the switch adds (NVLink SHARP), and bus bandwidth is no longer what
# is on the wire. A tenth of that means NCCL may have fallen back to TCP; `NCCL_DEBUG=INFO` says which transport it
# chose. And set a time-out that you are willing to pay for: 10 minutes on 512 GPUs are 85 GPU hours.

# %% [markdown]
# ## Recap
#
# 1. A collective is a call that all ranks make; choose it by who has the data before and who needs it afterwards.
# 2. The ring all-reduce is a reduce-scatter and an all-gather: 2(n-1) messages, 2(n-1)/n of the bytes, for any number of ranks.
# 3. A message costs α + bytes/β; many small ones pay α, few large ones pay β.
# 4. A rank that does not call leaves the others waiting until the time-out; look for the one without an error.
# 5. A right sum proves little. Count the messages and the bytes.
#
# ## Further reading
#
# - Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations* (2009): the ring, and why it
#   is optimal.
# - Thakur, Rabenseifner and Gropp, *Optimization of collective communication operations in MPICH* (2005): trees, doubling,
#   and when.
# - [nccl-tests, PERFORMANCE.md](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): the two bandwidths,
#   and the bytes per rank of our table.
# - Next: [lesson 03](03_data_parallel.ipynb) puts this all-reduce into a training step.

# %%
# %%ranks
metrics.write()
if rank == 0:
    say("metrics.json is in this run's folder under outputs/02_collectives; `latest` points to it")
leave()

# %% tags=["active-ipynb"]
# hands.stop()
