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
# # 09 Context and experts: long sequences, many experts
#
# **66 minutes** for the sections marked CORE, 90 with those marked MORE. Two halves, at home: contexts in 35, then
# experts in 31. Each stands alone after the start cells.
#
# After this lesson **you can**
# - write softmax over keys that arrive block by block, and the backward of one block;
# - build ring attention, and lay positions out so that a causal mask leaves no rank idle;
# - say what a ring sends and what Ulysses sends, and when each one fits;
# - route tokens to experts on other ranks and back, with two all-to-alls;
# - predict the bytes of a rank from the skew of its experts, and scale their gradients correctly.
#
# **You need** send, receive and [all-to-all](../assets/glossary.md#all-to-all) from [lesson
# 02](02_collectives.ipynb), and `Move` of [lesson 07](07_tensor_parallel.ipynb): a function that does one thing in
# forward and another in backward.
#
# **New here:** [context parallel](../assets/glossary.md#context-parallel), [online
# softmax](../assets/glossary.md#online-softmax), [ring attention](../assets/glossary.md#ring-attention),
# [zig-zag](../assets/glossary.md#zig-zag), [ulysses](../assets/glossary.md#ulysses), [mixture of
# experts](../assets/glossary.md#mixture-of-experts), [router](../assets/glossary.md#router), [expert
# parallel](../assets/glossary.md#expert-parallel), [balancing loss](../assets/glossary.md#balancing-loss),
# [capacity](../assets/glossary.md#capacity).
#
# The same file is a script:
#
# ```bash
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/09_context_and_experts.py --positions 128
# mpiexec -n 4 python scripts/09_context_and_experts.py
# python scripts/09_context_and_experts.py                # a world of one: the same path, no message
# ```

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# This lesson is for home. In a class, take one half: contexts (start to "Who waits for whom") or experts (from "A router"
# on, after the start cells).
#
# *Say:* attention mixes positions, so whoever cuts positions must move keys. Experts do not mix tokens, so whoever cuts
# experts must move tokens.
#
# *Three usual mistakes:* forgetting to shrink the *sum* when a larger score arrives; leaving the gradients of keys where
# they were computed; averaging experts' gradients like those of copies, or not dividing them at all.
#
# *When late:* give solutions B and E, and skip the library's ring.
#
# *Ask the room:* "a model has a million positions and 64 experts. Which of the two all-to-alls, Ulysses' or dispatch, would
# you rather have inside a node?" (Count the bytes of a layer: k rows per token there and back, or four parts of q, k, v
# and the output. Then say which one has unequal parts.)
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
positions = 64  # of the long sequence, a multiple of twice the ranks of a group, at least 8
tokens = 128  # of each rank in the experts' half, at least 32
steps = 40  # of training the router, at least 10
seeds = 5  # trainings with and without the balancing loss, at least 1

# %% [markdown]
# ## Start (CORE, 3 min)
#
# The first cell starts four ranks. Cells that begin with `%%ranks` run on all of them. Each section needs the cells
# of this one, and then only its own: a folded cell with `catch_up(...)` defines what is missing from earlier ones.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("09_context_and_experts", globals())

# %%
# %%ranks
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands import Metrics, catch_up, join, leave, refuse, say, show
from manyhands.checks import context_and_experts as checks
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.measure import wire
from torch.distributed.device_mesh import init_device_mesh

# %% [markdown]
# The ranks join and form groups of `c` ranks. In the first half a group shares **one sequence**, in the second it shares
# **the experts**. c is 1, 2 or 4 here; on more ranks several groups do the same.

# %%
# %%ranks
ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
c = math.gcd(world_size, 4)
mesh = init_device_mesh(device.type, (world_size // c, c), mesh_dim_names=("data", "shared"))
group = mesh["shared"].get_group()  # what every function below is given
me = group.rank()
corpus = load_corpus(ranks)  # for the second half
metrics = Metrics(ranks, corpus, {"positions": positions, "tokens": tokens, "steps": steps, "seeds": seeds})
say(f"I am number {me} of the {c} in my group")

# %% [markdown]
# Letters at the end of a name are its shape: `B` sequences, `H` heads, `T` positions, `K` numbers per head; `N`
# tokens, `D` width, `M` hidden units, `E` experts, `k` experts per token. A small letter is this rank's share: `s` =
# T/c, `h` = H/c, `e` = E/c. All is float64: what should be equal is equal to 1e-10.

# %%
# %%ranks
B, H, T, K = 2, 4, positions, 8
if T % (2 * c):
    refuse(f"positions={T} does not split into {2 * c} chunks; use a multiple of {2 * c}")


def normal(seed, *shape):
    """Random numbers that every rank can draw."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64).to(device)


q_BHTK, k_BHTK, v_BHTK, v_out = (normal(seed, B, H, T, K) for seed in range(4))
whole = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)  # the judge: one process
unit = 2 * v_BHTK.nbytes // c  # bytes of one rank's keys and values
if rank == 0:
    say(f"q, k and v: {list(q_BHTK.shape)} each; a rank is to hold {T // c} positions of {T}")

# %% [markdown]
# And for the second half: eight experts, of which a rank holds `e`; and tokens, which differ from rank to rank.

# %%
# %%ranks
N, D, M, E, k_experts = tokens, 16, 32, 8, 2
e = E // c
held = slice(me * e, (me + 1) * e)  # of E, this rank's
router_ED, up_EDM, down_EMD = (0.3 * normal(10 + i, *shape) for i, shape in enumerate(((E, D), (E, D, M), (E, M, D))))
x_ranks = [normal(20 + r, N, D) for r in range(c)]
x_ND = x_ranks[me]
say(f"{N} tokens of my own, and experts {held.start} to {held.stop - 1} of {E}")

# %% [markdown]
# # First half: one sequence on several ranks
#
# ## Warm-up: four scores, two at a time (CORE, 3 min)
#
# **Why.** At a million positions one layer's activations of one sequence do not fit on a GPU. There is nothing left
# to split but the sequence: [**context parallelism**](../assets/glossary.md#context-parallel). Norms and MLPs look at
# one position at a time and do not mind. Attention does: a query needs *all* keys, and softmax needs the sum over all
# of them.
#
# Softmax subtracts the largest score first, so that `exp` does not overflow. But if keys come in blocks, you do not know
# the largest one yet. The way out is the [**online softmax**](../assets/glossary.md#online-softmax) (Milakov and
# Gimelshein 2018): keep the largest so far, the sum so far and the weighted values so far. When a larger score
# arrives, **shrink** what you have.
#
# ![Two blocks of scores: after the first the largest is 2, the sum 1.37; the second brings a 3, so the sum is multiplied by exp(2 - 3)
# before its own terms are added](../assets/09_online_softmax.svg)
#
# **Predict.** The scores are 1 and 2, then 3 and 0. After the first block the largest is 2 and the sum is
# e⁻¹ + e⁰ = 1.37. What are they after the second?
#
# <details><summary>Answer</summary>
#
# The largest is 3. The old sum shrinks by e²⁻³ = 0.37, so it counts 0.50. The new terms are e⁰ + e⁻³ = 1.05. Sum:
# **1.55**.
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
first, second = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0])
sum_1 = (first - 2).exp().sum()
sum_2 = sum_1 * math.exp(2 - 3) + (second - 3).exp().sum()
at_once = (torch.cat([first, second]) - 3).exp().sum()
if rank == 0:
    say(f"in blocks {sum_2:.4f}, at once {at_once:.4f}")

# %% [markdown]
# ## Attention, block by block (CORE, 6 min)
#
# `scores` compares queries at the positions `q_at` with keys at `k_at`. Keys of the future get -inf: the causal mask.
# We pass positions because blocks will come from anywhere in the sequence. `start` is a state that has seen nothing.


# %%
# %%ranks
def scores(q_BHsK, k_BHuK, q_at, k_at):
    """Scaled products [B, H, s, u]; -inf where the key lies in the query's future."""
    raw = q_BHsK @ k_BHuK.mT / math.sqrt(q_BHsK.shape[-1])
    return raw.masked_fill(k_at[None, :] > q_at[:, None], -math.inf)


def start(q_BHsK):
    """(largest, total, weighted) before any key: a finite largest, so that no difference is inf - inf."""
    column = q_BHsK[..., :1]
    least = torch.full_like(column, torch.finfo(column.dtype).min)
    return least, torch.zeros_like(column), torch.zeros_like(q_BHsK)


# %% [markdown]
# ### Build A: take in a block
#
# Write `absorb(state, s_BHsu, v_BHuK)`: the state after one more block of scores and values. `largest` and `total`
# are [B, H, s, 1], `weighted` is [B, H, s, K], a sum of values times `exp(score - largest)`. It must take blocks in
# any order, also one that is -inf throughout, and scores near 1,000. (Whatever you leave as it is, the check
# replaces by the lesson's own lines.)


# %%
# %%ranks
def absorb(state, s_BHsu, v_BHuK):
    """The state (largest, total, weighted) with one more block of keys."""
    raise NotImplementedError  # your turn


checks.absorb(absorb, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution A</summary>
#
# ```python
# def absorb(state, s_BHsu, v_BHuK):
#     largest, total, weighted = state
#     new = torch.maximum(largest, s_BHsu.amax(-1, keepdim=True))
#     shrink, p_BHsu = (largest - new).exp(), (s_BHsu - new).exp()
#     return new, total * shrink + p_BHsu.sum(-1, keepdim=True), weighted * shrink + p_BHsu @ v_BHuK
# ```
#
# </details>

# %% [markdown]
# At the end `weighted / total` is the attention. One process, three blocks of unequal size, against the library's
# attention on everything:

# %%
# %%ranks
everywhere = torch.arange(T, device=device)
state = start(q_BHTK)
for block in everywhere.split([T // 2, T // 4, T - T // 2 - T // 4]):
    s = scores(q_BHTK, k_BHTK[:, :, block], everywhere, block)
    state = absorb(state, s, v_BHTK[:, :, block])
apart = (state[2] / state[1] - whole).abs().max().item()
assert apart < 1e-10, f"{apart:.1e} away"
if rank == 0:
    say("three blocks and scaled_dot_product_attention: equal to 1e-10")

# %% [markdown]
# ## Keys go around: ring attention forward (CORE, 4 min)
#
# **Why.** To gather all keys on every rank would cost the memory that we wanted to save. But `absorb` needs only one block at
# a time, in any order. So queries stay, and keys and values go around a ring: in step i a rank works on the block of the
# rank i places behind it.
# That is [**ring attention**](../assets/glossary.md#ring-attention) (Liu et al. 2023). No rank ever holds more than
# two blocks of keys.
#
# ![Four ranks in a ring: each keeps its queries; blocks of keys and values move one rank on in each step, so after three moves each
# rank has met all four blocks](../assets/09_ring.svg)
#
# **Predict.** How many messages does a rank send in forward, and how many numbers are in each?
#
# <details><summary>Answer</summary>
#
# c - 1 messages (three on four ranks) with keys and values of one block: 2·B·H·s·K numbers. Together nearly 2·B·H·T·K,
# whatever c is.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "scores", "start", "absorb")


# %%
# %%ranks
def pass_on(x, group):
    """What the rank before me has; mine goes to the one after. All ranks of the group call it."""
    n, i = group.size(), group.rank()
    if n == 1:  # gloo does not send to itself
        return x
    ahead, behind = (dist.get_global_rank(group, (i + step) % n) for step in (1, -1))
    mine, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    sends = dist.P2POp(dist.isend, mine, ahead, group), dist.P2POp(dist.irecv, received, behind, group)
    for work in dist.batch_isend_irecv(list(sends)):
        work.wait()
    return received


# %%
# %%ranks
def ring_forward(q, k, v, at, group):
    """(attention [B, H, s, K], log of the sums [B, H, s, 1]); at[r] are the positions of rank r."""
    n, i = group.size(), group.rank()
    kv, state = torch.stack([k, v]), start(q)
    for step in range(n):
        owner = (i - step) % n
        state = absorb(state, scores(q, kv[0], at[i], at[owner]), kv[1])
        if step < n - 1:
            kv = pass_on(kv, group)
    largest, total, weighted = state
    return weighted / total, largest + total.log()


# %% [markdown]
# Each rank takes its positions of the same full tensors. The first layout that comes to mind: in order.


# %%
# %%ranks
def in_order(T, n, rank):
    """Positions of a rank [T/n]: one stretch each."""
    return torch.arange(T).chunk(n)[rank]


def mine_of(x_BHTK, at):
    """This rank's positions of a full tensor, in memory of its own."""
    return x_BHTK[:, :, at[me]].clone().requires_grad_()


# %%
# %%ranks
at = [in_order(T, c, r).to(device) for r in range(c)]
q, k, v = (mine_of(x, at) for x in (q_BHTK, k_BHTK, v_BHTK))
with wire.watch() as seen, torch.no_grad():
    out, log_sums = ring_forward(q, k, v, at, group)
apart = (out - whole[:, :, at[me]]).abs().max().item()
assert apart < 1e-10 and seen.messages == c - 1
if rank == 0:
    say(f"{list(out.shape)} on a rank, equal to full attention to 1e-10")
    say(f"messages: {seen.messages}, predicted {c - 1}")
    say(f"bytes: {seen.sent_bytes:,}, predicted {(c - 1) * unit:,}")
square = out.square().sum()
dist.all_reduce(square, group=group)
metrics.close(attention_norm=square.sqrt())  # the same on any number of ranks

# %% [markdown]
# ## Backward: gradients travel with their keys (CORE, 9 min)
#
# **Why.** A rank could keep what autograd saved for each block. But that is T/c times T scores per head: the very
# memory that we wanted to save. Instead, keep the output and the log of the sums, one number per query, and **compute
# the scores again**. This is how FlashAttention's backward works (Dao et al. 2022).
#
# For one block, with P = exp(scores - log_sums), each row of the *whole* P sums to 1, and
#
# - the values get dV = Pᵀ dO;
# - the probabilities get dP = dO Vᵀ;
# - the scores get dS = P · (dP - δ), number by number, where δ = sum over K of dO · O, one number per query;
# - the queries get dQ = dS Kₖ / √K, and the keys dKₖ = dSᵀ Q / √K.
#
# (Kₖ stands for the keys, K alone for their length.) δ lets a block's backward do without the other blocks. It is the
# sum of P · dP over *all* keys, and the output O already contains it.
#
# ### Build B: one block's gradients
#
# Write these lines. `log_sums` and `delta` are [B, H, s, 1] and already over all keys. Do not run autograd: that
# would normalise over this block alone.


# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "scores", "start", "absorb", "pass_on", "ring_forward", "in_order", "mine_of")


# %%
# %%ranks
def block_gradients(q, k, v, s_BHsu, log_sums, d_out, delta):
    """This block's terms (d_q, d_k, d_v), from its masked scores."""
    raise NotImplementedError  # your turn


checks.block_gradients(block_gradients, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def block_gradients(q, k, v, s_BHsu, log_sums, d_out, delta):
#     p_BHsu = (s_BHsu - log_sums).exp()
#     d_s = p_BHsu * (d_out @ v.mT - delta) / math.sqrt(q.shape[-1])
#     return d_s @ k, d_s.mT @ q, p_BHsu.mT @ d_out
# ```
#
# </details>

# %% [markdown]
# Gradients of queries add up where the queries are. Those of keys and values belong to the block that is visiting. So
# **they travel with it**, and one more move brings them home.
#
# **Predict.** Count in units of one block's keys and values. Forward sends c - 1. What does backward send?
#
# <details><summary>Answer</summary>
#
# In c - 1 moves keys, values and their gradients: two units each. The last move carries only gradients home: one
# unit. That is 2(c - 1) + 1 = 2c - 1 units: **7** on four ranks, where forward sends 3.
#
# </details>


# %%
# %%ranks
def ring_backward(q, k, v, out, log_sums, d_out, at, group):
    """(d_q, d_k, d_v) of this rank's positions. All ranks of the group call it."""
    n, i = group.size(), group.rank()
    delta = (d_out * out).sum(-1, keepdim=True)
    d_q, kv, d_kv = torch.zeros_like(q), torch.stack([k, v]), torch.zeros_like(torch.stack([k, v]))
    for step in range(n):
        s = scores(q, kv[0], at[i], at[(i - step) % n])
        term_q, *terms = block_gradients(q, kv[0], kv[1], s, log_sums, d_out, delta)
        d_q, d_kv = d_q + term_q, d_kv + torch.stack(terms)
        if step < n - 1:
            kv, d_kv = pass_on(torch.stack([kv, d_kv]), group)
    return d_q, *pass_on(d_kv, group)  # the last move: home


# %%
# %%ranks
class RingAttention(torch.autograd.Function):
    """Causal attention over positions on several ranks."""

    @staticmethod
    def forward(ctx, q, k, v, at, group):
        out, log_sums = ring_forward(q, k, v, at, group)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.at, ctx.group = at, group
        return out

    @staticmethod
    def backward(ctx, d_out):
        return *ring_backward(*ctx.saved_tensors, d_out, ctx.at, ctx.group), None, None


# %% [markdown]
# Against full attention on one process: the output, and the [vector-Jacobian
# product](../assets/glossary.md#vector-jacobian-product) with a random v, for all three inputs.


# %%
# %%ranks
def far_from_full(at):
    """(largest distance of output and gradients from full attention's, what backward sent)."""
    full = [x.clone().requires_grad_() for x in (q_BHTK, k_BHTK, v_BHTK)]
    wanted = F.scaled_dot_product_attention(*full, is_causal=True)
    wanted.backward(v_out)
    here = [mine_of(x, at) for x in (q_BHTK, k_BHTK, v_BHTK)]
    found = RingAttention.apply(*here, at, group)
    with wire.watch() as seen:
        found.backward(v_out[:, :, at[me]])
    pairs = [(found, wanted), *((mine.grad, x.grad) for mine, x in zip(here, full, strict=True))]
    return max((mine - x[:, :, at[me]]).abs().max().item() for mine, x in pairs), seen


# %%
# %%ranks
at = [in_order(T, c, r).to(device) for r in range(c)]
apart, seen = far_from_full(at)
assert apart < 1e-10, f"{apart:.1e} away"
if rank == 0:
    say("output, d_q, d_k and d_v: equal to full attention to 1e-10")
    say(f"backward sent {seen.sent_bytes / unit:g} units, predicted {2 * c - 1 if c > 1 else 0}")
metrics.exact(ring_backward_bytes=seen.sent_bytes)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: backward</summary>
#
# Let the room check δ with two keys: sum of P·dP over keys = sum over keys of P (dO · V) = dO · (sum of P V) = dO · O.
#
# *Usual mistake:* d_k of this rank's own block taken from this rank's queries only. The output is right, and
# gradients of shape and size that look right.
# [diffusers#14265](https://github.com/huggingface/diffusers/issues/14265) is a relative of it: in backward every step
# of the ring used the rank's own keys again, because they were what forward had saved.
#
# </details>

# %% [markdown]
# ## Who waits for whom: zig-zag (CORE, 8 min)
#
# **Why.** With a causal mask, rank 0's queries need only block 0. The last rank's need all blocks. But they move in
# step: each step is as long as its busiest rank.
#
# ![Triangles of query-key pairs for four ranks: in order, rank 0 has a small corner and rank 3 a wide strip; in zig-zag each rank has
# one early and one late chunk, of the same total area](../assets/09_zig_zag.svg)
#
# [**Zig-zag**](../assets/glossary.md#zig-zag) cuts the sequence into 2c chunks and gives each rank one from the front
# and its mirror image from the back: of eight chunks rank 0 has the first and the last, rank 1 the second and the
# last but one.
#
# **Predict.** In order on four ranks, how much longer does the ring take than with perfect balance? Count query-key
# pairs, and take the diagonal blocks as half.
#
# <details><summary>Answer</summary>
#
# Step 0 is half a block on all ranks. In steps 1, 2 and 3 somebody has a full block: 3.5 blocks. All ranks together
# need 4 half blocks and 6 full ones: 8, so 2 each. 3.5 / 2 = **1.75**; in general 2 - 1/c.
#
# </details>
#
# ### Build C: zig-zag positions
#
# Write `zig_zag(T, n, rank)`: the positions of a rank, in ascending order, [T/n]. Refuse with a ValueError that names
# both numbers if T is not a multiple of 2n.


# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "scores", "start", "absorb", "pass_on", "ring_forward", "in_order", "mine_of")
catch_up(globals(), "block_gradients", "ring_backward", "RingAttention", "far_from_full")


# %%
# %%ranks
def zig_zag(T, n, rank):
    """Positions of a rank [T/n]: chunk `rank` of 2n, and its mirror image."""
    raise NotImplementedError  # your turn


checks.zig_zag(zig_zag, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution C</summary>
#
# ```python
# def zig_zag(T, n, rank):
#     if T % (2 * n):
#         raise ValueError(f"{T} positions do not split into {2 * n} chunks; use a multiple of {2 * n}")
#     chunks = torch.arange(T).chunk(2 * n)
#     return torch.cat([chunks[rank], chunks[2 * n - 1 - rank]])
# ```
#
# </details>

# %% [markdown]
# Nothing else changes: `scores` masks by position. Now count. A pair is needed if its key is not in the query's
# future; a kernel skips blocks in which no pair is. (Our `scores` computes them all, so we count instead of timing.)


# %%
# %%ranks
def pairs_of(at, group):
    """Query-key pairs that this rank needs in each step of the ring."""
    n, i = group.size(), group.rank()
    keys = [at[(i - step) % n] for step in range(n)]
    return [int((k_at[None, :] <= at[i][:, None]).sum()) for k_at in keys]


# %%
# %%ranks
layouts, work = {"in order": in_order, "zig-zag": zig_zag}, {}
for name, layout in layouts.items():
    at = [layout(T, c, r).to(device) for r in range(c)]
    apart = far_from_full(at)[0]
    assert apart < 1e-10, f"{name}: {apart:.1e} away"
    mine = torch.tensor(pairs_of(at, group), device=device)
    everybody = [torch.empty_like(mine) for _ in range(c)]
    dist.all_gather(everybody, mine, group=group)
    work[name] = torch.stack(everybody).tolist()  # [rank][step]
metrics.exact(pairs=work)

# %% [markdown]
# Expect bars of pairs per rank, one shade per step. In order they form a staircase. In zig-zag they are level, at the
# dashed line of perfect balance. The ring takes as long as the busiest rank of each step, added up.

# %%
# %%ranks
from manyhands.plots.bars import work_per_rank

if rank == 0:
    fair = T * (T + 1) / 2 / c
    show(work_per_rank(work, fair), "work_per_rank", "query-key pairs per rank, in order and in zig-zag")
    for name, rows in work.items():
        ring = sum(max(row[step] for row in rows) for step in range(c))  # the busiest of each step
        say(f"{name}: the ring takes {ring:,} pairs, {ring / fair:.2f} times a fair share")
    say(f"predicted in order, for a long sequence: {2 - 1 / c:.2f}")

# %% [markdown]
# In order, rank 0 cannot run ahead: its next block comes from rank 3, which is still working. Zig-zag sends no byte
# more. All it costs is care: whatever depends on position (the mask, the position embedding, the targets) must use `at`.
#
# ### Play with ranks and layouts (MORE, 1 min)
#
# A third layout is in the list: *striped* ([Brandon et al. 2023](https://arxiv.org/abs/2311.09431)) gives a rank every
# n-th position. How far from level is it with 16 positions, and with 128?

# %% tags=["active-ipynb"]
# from manyhands.widgets.zigzag import show_zigzag
#
# show_zigzag()

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: zig-zag</summary>
#
# Draw the triangle and let the room cut it fairly before you show the answer. *Usual mistake:* permuting the inputs and
# forgetting the targets: the loss falls to a wrong value. *Ask:* "without a causal mask, which layout would you take?"
# (Any. In order is the simplest.) *When late:* give solution C and show the two bars.
#
# </details>

# %% [markdown]
# ## The library's ring (CORE, 2 min)
#
# PyTorch has `context_parallel` in `torch.distributed.tensor.experimental`: within it,
# `F.scaled_dot_product_attention` runs on a ring of keys, with zig-zag on by default. It has handlers for three
# attention kernels, forward and backward. Is the kernel of your device one of them?

# %%
# %%ranks
from torch.distributed.tensor.experimental._context_parallel import _attention  # private: only to look
from torch.utils._python_dispatch import TorchDispatchMode


class Names(TorchDispatchMode):
    """Notes the name of every operator that runs."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        ran.add(operator.name().removeprefix("aten::"))
        return operator(*args, **(kwargs or {}))


ran, handled = set(), {operator.name().removeprefix("aten::") for operator in _attention.custom_ops}
with Names():
    F.scaled_dot_product_attention(*(x.bfloat16() for x in (q_BHTK, k_BHTK, v_BHTK)), is_causal=True)
if rank == 0:
    for name in sorted(handled):
        if "backward" not in name:
            say(f"handled: {name}")
    ran = {name for name in ran if "attention" in name}
    say(f"run here: {', '.join(sorted(ran))}; handled on this device: {bool(ran & handled)}")

# %% [markdown]
# A CPU's kernel is none of them: **there is no `context_parallel` on CPUs**. So full attention on one process is the
# judge here, on GPUs too: the kernels that it takes know 16 and 32 bits, and this lesson compares in 64. The library's way is
#
# ```python
# with context_parallel(mesh["shared"], buffers=[x, targets], buffer_seq_dims=[1, 1]):
#     ...  # the buffers are cut here, in place, and whole again afterwards
# ```

# %% [markdown]
# ## Ulysses: trade positions for heads (MORE, 9 min)
#
# **Why.** Heads do not look at each other. So before attention, trade: give away *your positions* of the other ranks'
# heads, and get *all positions* of yours. One all-to-all each for q, k, v, then any attention kernel, unchanged, and
# one all-to-all back. This is DeepSpeed-[Ulysses](../assets/glossary.md#ulysses) (Jacobs et al. 2023).
#
# ![A grid of positions by heads on four ranks: before the all-to-all each rank has some rows (positions), after it some columns
# (heads)](../assets/09_ulysses.svg)
#
# **Predict.** Four ranks, all heads have keys of their own. How many numbers does a rank send in forward, in units of
# B·H·s·K? By the ring it is 2(c - 1) = 6.
#
# <details><summary>Answer</summary>
#
# Four all-to-alls; in each a rank keeps a c-th: 4 · 3/4 = **3**. In general 4(c - 1)/c, which stays below 4 while the
# ring's grows with c. But the ring hides its messages behind computation, and c may be larger than the number of heads.
#
# </details>
#
# ### Exercise 1: positions to heads
#
# Write `to_heads(x_BHsK, group)`: [B, H, s, K] with this rank's positions in, [B, h, T, K] with this rank's heads
# out. Rank r's heads are `r·h` to `(r+1)·h - 1`, and positions are in the order of ranks. One all-to-all of B·H·s·K
# numbers; no gradient needed.


# %%
# %%ranks
def to_heads(x_BHsK, group):
    """All positions of this rank's heads [B, h, T, K]. All ranks of the group call it."""
    raise NotImplementedError  # your turn


checks.to_heads(to_heads, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 1</summary>
#
# ```python
# def to_heads(x_BHsK, group):
#     parts = torch.stack(x_BHsK.chunk(group.size(), dim=1))  # [n, B, h, s, K], one for each rank
#     received = torch.empty_like(parts)
#     dist.all_to_all_single(received, parts, group=group)
#     return torch.cat(received.unbind(), dim=2)
# ```
#
# </details>

# %% [markdown]
# The way back is its inverse, and as it only moves numbers, each is the other's backward:


# %%
# %%ranks
def to_positions(x_BhTK, group):
    """All heads of this rank's positions [B, H, s, K]: the inverse of to_heads."""
    parts = torch.stack(x_BhTK.chunk(group.size(), dim=2))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(), dim=1)


class Trade(torch.autograd.Function):
    """Trade.apply(x, there, back, group): a move in forward, its inverse in backward."""

    @staticmethod
    def forward(ctx, x, there, back, group):
        ctx.back, ctx.group = back, group
        return there(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient, ctx.group), None, None, None


# %%
# %%ranks
full = [x.clone().requires_grad_() for x in (q_BHTK, k_BHTK, v_BHTK)]
F.scaled_dot_product_attention(*full, is_causal=True).backward(v_out)
mine = [x.chunk(c, 2)[me].clone().requires_grad_() for x in (q_BHTK, k_BHTK, v_BHTK)]
with wire.watch() as seen:
    in_heads = [Trade.apply(x, to_heads, to_positions, group) for x in mine]
    out = F.scaled_dot_product_attention(*in_heads, is_causal=True)
    out = Trade.apply(out, to_positions, to_heads, group)
out.backward(v_out.chunk(c, 2)[me])
apart = (out - whole.chunk(c, 2)[me]).abs().max().item()
pairs = zip(mine, full, strict=True)
apart = max([apart, *((x.grad - y.grad.chunk(c, 2)[me]).abs().max().item() for x, y in pairs)])
assert apart < 1e-10 and seen.count("all_to_all") == 4
if rank == 0:
    say(f"Ulysses: output and gradients equal to 1e-10; {seen.count('all_to_all')} all-to-alls forward")
    sent = seen.payload_bytes("all_to_all") * (c - 1) // c
    say(f"sent {sent:,} bytes; a ring sends {(c - 1) * unit:,}")

# %% [markdown]
# # Second half: experts
#
# ## A router, and a mixture on one process (CORE, 2 min)
#
# **Why.** A larger MLP is better, and slower. A [**mixture of experts**](../assets/glossary.md#mixture-of-experts)
# has E MLPs, the *experts*, and sends each token through k of them: the weights of E, the FLOPs of k. Who chooses is
# a small linear layer, the [**router**](../assets/glossary.md#router): softmax over the experts, take the k largest,
# and scale these so that they sum to 1.
#
# First on one process, the plain way that wastes FLOPs: every expert computes every token, and the unchosen are
# multiplied by zero. This *dense mixture* is the judge of all that follows.


# %%
# %%ranks
def route(x_ND, router_ED, k):
    """(gates [N, k] that sum to 1, chosen experts [N, k], probabilities [N, E])."""
    probs_NE = (x_ND @ router_ED.T).softmax(-1)
    best_Nk, experts_Nk = probs_NE.topk(k, dim=-1)
    return best_Nk / best_Nk.sum(-1, keepdim=True), experts_Nk, probs_NE


def dense_mixture(x_ND, router_ED, up_EDM, down_EMD, k):
    """Every expert on every token, weighted; what is not chosen has weight 0."""
    gates_Nk, experts_Nk, probs_NE = route(x_ND, router_ED, k)
    weight_NE = torch.zeros_like(probs_NE).scatter(1, experts_Nk, gates_Nk)
    y_END = F.gelu(x_ND @ up_EDM) @ down_EMD
    return (weight_NE.T[..., None] * y_END).sum(0)


# %%
# %%ranks
gates_Nk, experts_Nk, _ = route(x_ND, router_ED, k_experts)
y_ND = dense_mixture(x_ND, router_ED, up_EDM, down_EMD, k_experts)
weights = " and ".join(f"{gate:.2f}" for gate in gates_Nk[0].tolist())
say(f"token 0 goes to experts {experts_Nk[0].tolist()} with weights {weights}; results {list(y_ND.shape)}")

# %% [markdown]
# ## Dispatch: who gets how many? (CORE, 7 min)
#
# **Why.** All experts together do not fit on one GPU, and each token needs few of them. So give each rank E/c experts: [**expert
# parallelism**](../assets/glossary.md#expert-parallel). Ranks keep tokens of
# their own, as in data parallelism. A token travels to the ranks of its experts, and its results come back: two
# all-to-alls per layer, **dispatch** and **combine**.
#
# ![Tokens of two ranks sorted by expert, sent to the ranks that hold these experts, worked on, sent back and added up with their
# gates](../assets/09_dispatch.svg)
#
# `all_to_all_single` takes unequal parts, if *both* sides know their sizes. A sender counts its own. What arrives,
# only the others know. So first exchange the counts: E integers from each rank.
#
# **Predict.** Two ranks, four experts, k = 1. Rank 0's five tokens choose 0, 3, 3, 1, 2. How many does it send to
# each rank? Which message tells rank 1 that three arrive?
#
# <details><summary>Answer</summary>
#
# Two to rank 0 itself (experts 0 and 1), three to rank 1. Rank 0's counts are [1, 1, 1, 2]; the second half, [1, 2],
# goes to rank 1 and says both: three rows, of which one is for expert 2 and two are for expert 3.
#
# </details>
#
# ### Build D: the sizes of the parts
#
# Write `split_sizes(experts_Nk, E, group)`. Return three things: how many rows this rank sends to each rank (a list
# of n), how many it receives from each (a list of n), and a tensor `arriving_ne` [n, e]: rows from rank r for my i-th
# expert. One all-to-all of E integers. A token that chooses two experts of one rank travels twice: one row for each
# choice.


# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "route", "dense_mixture")


# %%
# %%ranks
def split_sizes(experts_Nk, E, group):
    """(rows to each rank, rows from each rank, rows from each rank for each of my experts [n, e])."""
    raise NotImplementedError  # your turn


checks.split_sizes(split_sizes, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution D</summary>
#
# ```python
# def split_sizes(experts_Nk, E, group):
#     leaving_ne = torch.bincount(experts_Nk.flatten(), minlength=E).view(group.size(), -1)
#     arriving_ne = torch.empty_like(leaving_ne)
#     dist.all_to_all_single(arriving_ne, leaving_ne, group=group)
#     return leaving_ne.sum(1).tolist(), arriving_ne.sum(1).tolist(), arriving_ne
# ```
#
# </details>

# %% [markdown]
# `.tolist()` makes the host wait for a GPU: it must know the sizes before it can start the exchange. Now the exchange
# itself. Rows that went to a rank come back from it as gradients, so backward has the same sizes, swapped:


# %%
# %%ranks
class Exchange(torch.autograd.Function):
    """Exchange.apply(rows, leaving, arriving, group): rows to their ranks; gradients take the way back."""

    @staticmethod
    def forward(ctx, rows, leaving, arriving, group):
        ctx.sizes, ctx.group = (leaving, arriving), group
        received = rows.new_empty(sum(arriving), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), arriving, leaving, group=group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        leaving, arriving = ctx.sizes
        return Exchange.apply(gradient, arriving, leaving, ctx.group), None, None, None


# %%
# %%ranks
_, experts_Nk, _ = route(x_ND, router_ED, k_experts)
leaving, arriving, arriving_ne = split_sizes(experts_Nk, E, group)
order = experts_Nk.flatten().argsort(stable=True)  # rows sorted by expert, so by rank as well
rows = Exchange.apply(x_ND[order // k_experts], leaving, arriving, group)
say(f"sends {leaving} rows, receives {arriving}, so works on {list(rows.shape)}")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: dispatch</summary>
#
# Play it with four people: each writes three tokens on cards, with an expert's number, and says first how many go to whom.
# *Usual mistake:* one size per expert where the call wants one per rank. *Ask:* "what does a rank do that nobody chose?"
# (It takes part with no rows; whoever stays away hangs the others.)
#
# </details>

# %% [markdown]
# ## Experts, and the way back (CORE, 8 min)
#
# **Why.** An expert must see its rows together, and a token wants its results back. What arrived lies rank by rank, and
# within a rank expert by expert. `arriving_ne` says which rows are whose:


# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "route", "dense_mixture", "split_sizes", "Exchange")


# %%
# %%ranks
def run_experts(rows_RD, arriving_ne, up_eDM, down_eMD):
    """Each row through its expert, in the order in which they came."""
    n, e = arriving_ne.shape
    which_R = torch.arange(e, device=rows_RD.device).repeat(n).repeat_interleave(arriving_ne.flatten())
    out_RD = torch.zeros_like(rows_RD)
    for i in range(e):
        here = (which_R == i).nonzero()[:, 0]
        out_RD = out_RD.index_add(0, here, F.gelu(rows_RD[here] @ up_eDM[i]) @ down_eMD[i])
    return out_RD


# %% [markdown]
# The second exchange swaps the sizes. Then a rank has its own rows again, in the order in which it sent them: sorted
# by expert.
#
# ### Build E: combine
#
# Row j of `rows_RD` is the result of choice `order_R[j]`: choice c belongs to token c // k, and is its choice number
# c % k. Write `combine(rows_RD, order_R, gates_Nk)`: [N, D], each token's k results, times their gates, added up.
# Gradients must reach rows and gates, so write into no tensor that you were given.


# %%
# %%ranks
def combine(rows_RD, order_R, gates_Nk):
    """[N, D]: for each token the sum of its choices' results times their gates."""
    raise NotImplementedError  # your turn


checks.combine(combine, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution E</summary>
#
# ```python
# def combine(rows_RD, order_R, gates_Nk):
#     back_RD = rows_RD[order_R.argsort()]  # choice by choice
#     return (back_RD.view(*gates_Nk.shape, -1) * gates_Nk[..., None]).sum(1)
# ```
#
# </details>

# %% [markdown]
# All together, with the experts that a rank holds:


# %%
# %%ranks
def expert_parallel(x_ND, router_ED, up_eDM, down_eMD, k, group, exchange=Exchange.apply):
    """(the mixture [N, D], probabilities, choices); every rank has tokens and experts of its own. All call it."""
    gates_Nk, experts_Nk, probs_NE = route(x_ND, router_ED, k)
    leaving, arriving, arriving_ne = split_sizes(experts_Nk, len(router_ED), group)
    order_R = experts_Nk.flatten().argsort(stable=True)
    rows = exchange(x_ND[order_R // k], leaving, arriving, group)
    rows = run_experts(rows, arriving_ne, up_eDM, down_eMD)
    rows = exchange(rows, arriving, leaving, group)
    return combine(rows, order_R, gates_Nk), probs_NE, experts_Nk


# %%
# %%ranks
mine = [w.clone().requires_grad_() for w in (router_ED, up_EDM[held], down_EMD[held])]
with wire.watch() as seen:
    y_ND, _, experts_Nk = expert_parallel(x_ND, *mine, k_experts, group)
found = [call.bytes for call in seen.calls]  # what a rank keeps for itself included
arriving = split_sizes(experts_Nk, E, group)[1]
assert found == [8 * E, 8 * D * sum(arriving), 8 * D * N * k_experts]  # a row has D numbers of 8 bytes
counts_bytes, dispatched, combined = found
say(f"bytes of counts {counts_bytes}, of rows that arrived {dispatched:,}, that came back {combined:,}")
metrics.exact(expert_bytes=found)

# %% [markdown]
# The sizes are as predicted: a row has D numbers of 8 bytes, one for each choice.
#
# The library's exchange is `all_to_all_single` of torch's functional collectives. It has a backward like ours. (Its
# namesake in `torch.distributed` has none: gradients end there.) Three ways to one result, then: one process, ours, and
# the library's. Each is given the same random v:


# %%
# %%ranks
from torch.distributed import _functional_collectives as functional  # the underscore is torch's


def by_library(rows, leaving, arriving, group):
    """Exchange.apply, as torch has it."""
    return functional.all_to_all_single(rows.contiguous(), arriving, leaving, group)


# %%
# %%ranks
def far_from_dense(exchange):
    """Largest distance of the mixture and its vector-Jacobian products from one process's; all call it."""
    full = [w.clone().requires_grad_() for w in (torch.cat(x_ranks), router_ED, up_EDM, down_EMD)]
    wanted_y, v_y = dense_mixture(*full, k_experts), normal(40, c * N, D)  # all ranks' tokens, and a random v
    wanted_y.backward(v_y)
    here = slice(me * N, (me + 1) * N)  # my tokens among all
    mine = [w.clone().requires_grad_() for w in (x_ND, router_ED, up_EDM[held], down_EMD[held])]
    y_ND = expert_parallel(*mine, k_experts, group, exchange)[0]
    y_ND.backward(v_y[here])
    dist.all_reduce(mine[1].grad, group=group)  # the router is a copy: add up what ranks found
    wanted = [part.grad[at] for part, at in zip(full, (here, slice(None), held, held), strict=True)]
    pairs = zip([y_ND, *(w.grad for w in mine)], [wanted_y[here], *wanted], strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


# %% tags=["nbval-check-output"]
# %%ranks
for way, exchange in {"ours": Exchange.apply, "the library's": by_library}.items():
    apart = far_from_dense(exchange)
    assert apart < 1e-10, f"{way} is {apart:.1e} away"
    if rank == 0:
        say(f"{way} and one process: the mixture and all gradients are equal to 1e-10")

# %% [markdown]
# ## A bug from the zoo: whose gradient is it? (CORE, 7 min)
#
# Data-parallel training averages: each rank's loss is the mean over its tokens, and gradients of copies are averaged
# over n ranks. An author reasons: *"experts are no copies, each is on one rank. There is nothing to reduce, so leave
# their gradients alone."* The loss falls. **Which gradients are wrong, and by which factor?** Write down your
# suspicion, then measure.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "route", "dense_mixture", "split_sizes", "Exchange", "run_experts", "combine")
catch_up(globals(), "expert_parallel")


# %%
# %%ranks
def gradients(finish):
    """Gradients of router, up and down of this rank after `finish(router, experts, group)` has had them."""
    router, *experts = (w.clone().requires_grad_() for w in (router_ED, up_EDM[held], down_EMD[held]))
    y, _, _ = expert_parallel(x_ND, router, *experts, k_experts, group)
    y.square().mean().backward()  # the mean over this rank's tokens
    finish([router], experts, group)
    return [w.grad for w in (router, *experts)]


def theirs(copies, experts, group):
    """Copies are averaged; experts are no copies."""
    for w in copies:
        dist.all_reduce(w.grad, group=group)
        w.grad /= group.size()


# %% [markdown]
# The judge: the dense mixture, one process, all ranks' tokens, one mean.

# %%
# %%ranks
single = [w.clone().requires_grad_() for w in (router_ED, up_EDM, down_EMD)]
dense_mixture(torch.cat(x_ranks), *single, k_experts).square().mean().backward()
wanted = [single[0].grad, single[1].grad[held], single[2].grad[held]]


def ratios(found):
    """Length of each gradient over that of one process's."""
    return [f"{(a.norm() / b.norm()).item():.4f}" for a, b in zip(found, wanted, strict=True)]


if rank == 0:
    say("gradient / one process's: router, up, down")
found = gradients(theirs)
say(f"theirs {' '.join(ratios(found))}")

# %% [markdown]
# ### Build F: finish the gradients
#
# Write `finish(copies, experts, group)`: parameters that every rank holds, and those that only this rank holds.
# Afterwards each `p.grad` is that of the mean over all ranks' tokens. (All ranks have equally many tokens.) One
# all-reduce per copy, and nothing is sent for experts.


# %%
# %%ranks
def finish(copies, experts, group):
    """Leave in each p.grad that of the mean over all ranks' tokens. All ranks of the group call it."""
    raise NotImplementedError  # your turn


checks.finish(finish, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution F</summary>
#
# ```python
# def finish(copies, experts, group):
#     for p in copies:
#         dist.all_reduce(p.grad, group=group)
#     for p in [*copies, *experts]:
#         p.grad /= group.size()
# ```
#
# </details>

# %%
# %%ranks
found = gradients(finish)
apart = max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))
assert apart < 1e-10, f"{apart:.1e} away"
say(f"mended {' '.join(ratios(found))}")

# %% [markdown]
# Would you have seen it in the loss? Ten steps of Adam each way:


# %%
# %%ranks
def losses(finish):
    """Mean loss of all ranks' tokens in each of ten steps."""
    router, *experts = (w.clone().requires_grad_() for w in (router_ED, up_EDM[held], down_EMD[held]))
    optimizer, seen = torch.optim.Adam([router, *experts], lr=1e-2), []
    for _ in range(10):
        loss = expert_parallel(x_ND, router, *experts, k_experts, group)[0].square().mean()
        optimizer.zero_grad()
        loss.backward()
        finish([router], experts, group)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total, group=group)
        seen.append(total.item() / c)
    return seen


# %%
# %%ranks
for name, way in {"theirs": theirs, "mended": finish}.items():
    first, *_, last = losses(way)
    if rank == 0:
        say(f"{name}: loss {first:.4f}, after ten steps {last:.4f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The experts' gradients are n times too large. Tokens of *all* ranks came here, and backward brought the gradients of
# all n losses: the exchange has summed already. What is missing is the division by n. Adam divides a gradient by its own
# size, so the loss falls as before. What changes is clipping by the global norm, and whatever else reads the gradients.
#
# Expert gradients `ep_size` times too large: [DeepSpeed#6545](https://github.com/deepspeedai/DeepSpeed/issues/6545),
# mended in [#6546](https://github.com/deepspeedai/DeepSpeed/pull/6546);
# [megablocks#20](https://github.com/databricks/megablocks/pull/20), with the reason in
# [megablocks#86](https://github.com/databricks/megablocks/issues/86);
# [Megatron-LM#5956](https://github.com/NVIDIA/Megatron-LM/pull/5956).
#
# </details>
#
# What finds it is the comparison above: the same data on one process and on several, and *gradients*, not losses.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# Let the room vote before the ratios appear: router wrong, experts wrong, by n or by 1/n. *Usual mistake:* an all-reduce
# over the experts, which mixes different experts. *Ask:* "if each rank's loss were a sum and not a mean, who would be
# wrong?" (Nobody, if copies are summed as well.)
#
# </details>

# %% [markdown]
# ## The experiment: skew and balance (CORE, 7 min)
#
# **Why.** All ranks wait for the one with the most rows. Suppose that expert 0 is popular: a share p of the choices
# goes to it, the rest evenly to the other E - 1.
#
# **Predict.** E = 8 experts on four ranks, k = 1, p = 1/2. How many times the mean does rank 0 receive?
#
# <details><summary>Answer</summary>
#
# It has expert 0, a half, and one of seven others, 1/14: 4/7 of all rows. The mean is 1/4. **2.29** times: the layer
# takes that much longer.
#
# </details>
#
# Each rank draws choices of its own and dispatches; `wire` counts the bytes that arrive, those that a rank keeps for
# itself included. Expect black points around the dashed line, which rises with p from 1. They are draws, so they
# scatter; least at the right end, where all tokens have one choice.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "route", "dense_mixture", "split_sizes", "Exchange", "run_experts", "combine")
catch_up(globals(), "expert_parallel", "finish")


# %%
# %%ranks
def arrived_bytes(p, draw):
    """Bytes of rows that reach this rank if a share p of N choices is expert 0."""
    chance_E = torch.full((E,), (1 - p) / (E - 1), dtype=torch.float64)
    chance_E[0] = p
    chosen_N1 = chance_E.multinomial(N, replacement=True, generator=draw)[:, None].to(device)
    leaving, arriving, _ = split_sizes(chosen_N1, E, group)
    with wire.watch() as seen:
        Exchange.apply(x_ND[chosen_N1[:, 0].argsort()], leaving, arriving, group)
    return seen.payload_bytes("all_to_all")


skewed = {}
for p in (1 / E, 0.25, 0.5, 0.75, 1.0):
    draw = torch.Generator().manual_seed(100 + me)
    mine = torch.tensor([arrived_bytes(p, draw) for _ in range(5)], device=device)  # five draws
    everybody = [torch.empty_like(mine) for _ in range(c)]
    dist.all_gather(everybody, mine, group=group)
    by_rank = torch.stack(everybody).double()
    samples = (by_rank[0] / by_rank.mean(0)).tolist()  # rank 0 has the popular expert
    skewed[p] = samples, c * (p + (e - 1) * (1 - p) / (E - 1))  # times the mean: drawn, predicted
metrics.exact(skew={f"{p:.3f}": row[0] for p, row in skewed.items()})

# %% [markdown]
# What does a trained router do? Nothing in the loss asks it to be even. The cure of Switch Transformers (Fedus et al.
# 2021) is a [**balancing loss**](../assets/glossary.md#balancing-loss): E · Σ fᵢ Pᵢ. fᵢ is the share of choices that
# went to expert i, Pᵢ the mean probability that the router gave it. It is 1 if both are even, and grows if both
# favour the same experts. f has no gradient; P has.


# %%
# %%ranks
def share_of_choices(experts_Nk, E, group):
    """f [E]: the share of all ranks' choices that each expert got; sums to 1. All ranks of the group call it."""
    chosen_E = torch.bincount(experts_Nk.flatten(), minlength=E).double()
    dist.all_reduce(chosen_E, group=group)
    return chosen_E / chosen_E.sum()


def balance_loss(probs_NE, share_E):
    """E · sum of f · P, with P over this rank's tokens: averaged over ranks it is that of all tokens."""
    return probs_NE.shape[1] * (share_E * probs_NE.mean(0)).sum()


# %% [markdown]
# Train: an embedding, our mixture, a head, on the next character of Shakespeare. Twice from each seed, with the
# balancing loss and without. Its coefficient is 1 here, so that few steps show it; in Switch Transformers it is 0.01. The
# mean share over the last ten steps is kept. In the plot points are medians over the seeds, whiskers reach from the least to
# the most.

# %%
# %%ranks
V = len(corpus.vocab)


def parameters(seed):
    """(copies: embedding, head, router; experts: up, down) with the same copies on all ranks."""
    whole = [normal(seed, V, D), 0.3 * normal(seed + 1, D, V), 0.3 * normal(seed + 2, E, D)]
    parts = [0.3 * normal(seed + 3, E, D, M)[held], 0.3 * normal(seed + 4, E, M, D)[held]]
    return [[w.clone().requires_grad_() for w in weights] for weights in (whole, parts)]


# %%
# %%ranks
def train(seed, coefficient):
    """(share of choices of each expert in the last ten steps, final loss of this rank)."""
    copies, experts = parameters(1000 * seed)
    embedding, head, router = copies
    optimizer, shares = torch.optim.Adam([*copies, *experts], lr=1e-2), []
    for step in range(steps):
        ids, targets = (x.flatten().to(device) for x in get_batch(corpus.train_ids, step, c, N, me, c, seed))
        x_ND = embedding[ids]
        y_ND, probs_NE, chosen_Nk = expert_parallel(x_ND, router, *experts, k_experts, group)
        shares.append(share_of_choices(chosen_Nk, E, group))
        loss = F.cross_entropy((x_ND + y_ND) @ head, targets)
        optimizer.zero_grad()
        (loss + coefficient * balance_loss(probs_NE, shares[-1])).backward()
        finish(copies, experts, group)
        optimizer.step()
    return torch.stack(shares[-10:]).mean(0).tolist(), loss.item()


# %%
# %%ranks --timeout 120
ways = {"no balancing": 0.0, "balanced": 1.0}
runs = {name: [] for name in ways}
for seed in range(seeds):
    for name, coefficient in ways.items():
        runs[name].append(train(seed, coefficient))
shares = {name: [sorted(share, reverse=True) for share, _ in rows] for name, rows in runs.items()}

# %%
# %%ranks
from manyhands.plots.bars import skew_and_balance

if rank == 0:
    show(skew_and_balance(skewed, shares), "skew", "bytes of rank 0 against skew, and shares of choices")
    off = max(abs(x / predicted - 1) for samples, predicted in skewed.values() for x in samples)
    chance = math.sqrt((c - 1) / (c * N))  # standard deviation of a share 1/c, relative
    say(f"bytes of rank 0: at most {off:.0%} from the prediction; even draws scatter by {chance:.0%}")
    most = {name: [E * max(share) for share, _ in rows] for name, rows in runs.items()}
    for name, rows in runs.items():
        low, high = min(most[name]), max(most[name])
        loss = sorted(loss for _, loss in rows)[seeds // 2]
        say(f"{name}: busiest expert {low:.2f} to {high:.2f} times the mean, median loss {loss:.2f}")
    better = sum(a > b for a, b in zip(*most.values(), strict=True))
    say(f"more even with the balancing loss: {better} of {seeds} seeds")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the experiment</summary>
#
# *Ask:* "the balancing loss may cost quality and buys speed. How much skew would you accept?" Then: f is counted over *all*
# ranks. Counted on each rank alone it asks for more, balance within every rank's batch, and the loss depends on the
# number of ranks: exercise 2.
#
# </details>

# %% [markdown]
# ## Exercises (MORE, 13 min)
#
# Each check runs your answer in a process group of its own: you cannot break anything. Exercise 1 stands above.
#
# ### Exercise 2: a balancing loss that does not depend on the number of ranks
#
# If each rank takes f from its own tokens, the mean over ranks of Σ fᵢ Pᵢ is not Σ (mean fᵢ)(mean Pᵢ). Write
# `global_balance(probs_NE, experts_Nk, group)`: E · Σ fᵢ Pᵢ over *all* ranks' tokens, the same number on every rank,
# for one all-reduce of at most 2E numbers. Its gradient on a rank must be such that gradients *averaged* over ranks
# are one process's, as those of the loss are. All ranks have equally many tokens.


# %%
# %%ranks
def global_balance(probs_NE, experts_Nk, group):
    """E · sum of f · P over all ranks' tokens, with a gradient to be averaged. All ranks call it."""
    raise NotImplementedError  # your turn


checks.global_balance(global_balance, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 2</summary>
#
# ```python
# def global_balance(probs_NE, experts_Nk, group):
#     E = probs_NE.shape[1]
#     own_E = probs_NE.mean(0)
#     chosen_E = torch.bincount(experts_Nk.flatten(), minlength=E).to(own_E)
#     both = torch.stack([chosen_E / chosen_E.sum(), own_E.detach()])
#     dist.all_reduce(both, group=group)
#     f_E, P_E = both / group.size()
#     return E * (f_E * (P_E + own_E - own_E.detach())).sum()  # P's value, own P's gradient
# ```
#
# </details>

# %% [markdown]
# ### Exercise 3: capacity
#
# Unequal parts are a nuisance: sizes must reach the host, and one rank can run out of memory. Many trainers give each
# expert a [**capacity**](../assets/glossary.md#capacity): at most C rows from each rank, the rest is *dropped* and
# passes by the layer on the residual stream. Then all parts are equal. Write `kept(experts_Nk, E, capacity)`: a bool
# tensor [N, k], True for the choices that fit. Earlier tokens first, and of one token its first choice first. No loop
# over tokens: the check gives you 200,000.


# %%
# %%ranks
def kept(experts_Nk, E, capacity):
    """Which choices fit, [N, k] bool: the first `capacity` of each expert."""
    raise NotImplementedError  # your turn


checks.kept(kept, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 3</summary>
#
# ```python
# def kept(experts_Nk, E, capacity):
#     chosen = experts_Nk.flatten()
#     place = F.one_hot(chosen, E).cumsum(0).gather(1, chosen[:, None])[:, 0]  # 1 for an expert's first row
#     return (place <= capacity).view_as(experts_Nk)
# ```
#
# </details>

# %% [markdown]
# How much is dropped, at a capacity of `factor` times the mean?

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "route")

# %%
# %%ranks
_, experts_Nk, _ = route(x_ND, router_ED, k_experts)
for factor in (1.0, 1.25, 2.0):
    capacity = math.ceil(factor * N * k_experts / E)
    dropped = 1 - kept(experts_Nk, E, capacity).double().mean().item()
    if rank == 0:
        say(f"capacity {factor:.2f} times the mean, {capacity} rows: {dropped:.1%} of choices dropped")

# %% [markdown]
# ## On the cluster
#
# Both are axes of the mesh, beside data and tensor. The course's trainer has the first: `--parallel.context 4` is this
# ring, in zig-zag order. It has no experts. This file runs there as [lesson 04](04_first_job.ipynb)'s does: in the job
# file, put it in place of lesson 03's. Inside an allocation, by hand:
#
# ```bash
# python scripts/launch.py scripts/09_context_and_experts.py -- --positions 2048 --tokens 2048
# ```
#
# **What changes on GPUs.** Flash kernels compute a block's attention and return its log of sums, so `absorb` merges
# two *outputs*. A ring's messages can hide behind a block's compute, if blocks are long enough: compute grows with
# s², messages with s. An all-to-all is harder to hide: an expert cannot begin before its rows are there. Keep a
# group of experts inside a node where it fits. Sizes that must reach the host make it wait for the GPU.
#
# **What to look for**: equal step times on all context ranks (unequal: the layout is not zig-zag); the rows of the
# busiest expert over the mean, logged per layer; the share of dropped choices; the norm of the experts' gradients
# *unchanged* when you change the number of expert ranks.

# %% [markdown]
# ## Recap
#
# 1. Softmax over blocks: keep largest, sum and weighted values, and shrink all of them by one factor when a larger score arrives.
# 2. In a ring, keys and values travel, and in backward their gradients travel with them: c - 1 blocks forward, 2c - 1 backward.
# 3. Under a causal mask the layout of positions decides who waits: in order takes 2 - 1/c times as long, zig-zag is level.
# 4. Experts: sort by expert, tell the sizes, exchange, work, exchange back, add up with the gates.
# 5. An exchange has summed the experts' gradients over ranks already: divide them by the number of ranks, and compare with one process.
#
# ## Further reading
#
# - Milakov and Gimelshein 2018, [Online normalizer calculation for softmax](https://arxiv.org/abs/1805.02867): the shrinking sum.
# - Dao et al. 2022, [FlashAttention](https://arxiv.org/abs/2205.14135): blocks, and a backward that computes again.
# - Liu, Zaharia and Abbeel 2023, [Ring attention with blockwise transformers](https://arxiv.org/abs/2310.01889).
# - Jacobs et al. 2023, [DeepSpeed Ulysses](https://arxiv.org/abs/2309.14509): all-to-alls between positions and heads.
# - Fedus, Zoph and Shazeer 2021, [Switch Transformers](https://arxiv.org/abs/2101.03961): capacity and the balancing loss.
# - Zig-zag, with pairs counted: [ring-flash-attention#2](https://github.com/zhuzilin/ring-flash-attention/issues/2).

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
