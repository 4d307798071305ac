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
# **80 minutes** for the sections marked CORE, 122 with those marked MORE. Two halves of 40 minutes: contexts, then
# experts. After the start cells you can do either half alone.
#
# In the first half a sequence is too long for one rank. In the second half a layer has too many experts for one rank.
# Each time you build what the ranks send each other, and make the work of all ranks equal.
#
# After this lesson **you can**
# - compute exact attention on several ranks, none of which holds all keys;
# - lay out positions so that a causal mask leaves no rank idle;
# - route tokens to experts on other ranks and back, with two all-to-alls;
# - find experts' gradients that are wrong by a factor;
# - balance the experts by a bias.
#
# **You need** send, receive and [all-to-all](../assets/glossary.md#all-to-all) from [lesson 02](02_collectives.ipynb).
#
# **New here:** [context parallel](../assets/glossary.md#context-parallel), [online
# softmax](../assets/glossary.md#online-softmax), [ring attention](../assets/glossary.md#ring-attention),
# [zig-zag](../assets/glossary.md#zig-zag), [mixture of experts](../assets/glossary.md#mixture-of-experts),
# [router](../assets/glossary.md#router), [expert parallel](../assets/glossary.md#expert-parallel), [balancing
# loss](../assets/glossary.md#balancing-loss), and in MORE [ulysses](../assets/glossary.md#ulysses) and
# [capacity](../assets/glossary.md#capacity). Tables are in [the
# handbook](../assets/handbook/09_context_and_experts.md).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 2, own keys alone 3, softmax in blocks 8, the ring 10, backward 7, zig-zag 10; then rows of
# each rank 5, dispatch 8, the way back 8, zoo 8, balance 10, card 1. Builds A to H take about four minutes each and are
# in these numbers. In a class, take one half: the second needs only the start cells.
#
# *Say:* attention mixes positions, so whoever cuts positions must move keys. Experts do not mix tokens, so whoever cuts
# experts must move tokens.
#
# *Three usual mistakes:* forgetting to shrink the *sum* when a larger score arrives; leaving the gradients of keys where
# they were computed; averaging experts' gradients like those of copies, or not dividing them at all.
#
# *When late:* give solutions A and C in the first half, E and F in the second.
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
seeds = 5  # trainings of each way to balance, at least 1

# %% [markdown]
# ## Start (CORE, 2 min)
#
# The first cell starts four ranks. They form a group of c = 4 ranks, `group`. In the first half they share **one
# sequence**, in the second **the experts**.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("09_context_and_experts", globals())

# %%
# %%ranks
import math
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands import ____, Metrics, card, compare, join, leave, refuse, say, show
from manyhands.checks import context_and_experts as checks
from manyhands.measure import wire

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device

# %% [markdown]
# Letters at the end of a name are its shape: `B` sequences, `H` heads, `T` positions, `K` numbers per head; `N`
# tokens, `D` width, `M` hidden units, `E` experts, `k` experts per token. A small letter is this rank's share: `s` =
# T/c, `e` = E/c. Everything is float64, so that we can compare to 1e-10.

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.launch import recorded_runs
from manyhands.measure.virtual_network import Link, VirtualNetwork
from torch.distributed.device_mesh import init_device_mesh

c = math.gcd(world_size, 4)  # on more ranks there are several groups, and each does the same
mesh = init_device_mesh(device.type, (world_size // c, c), mesh_dim_names=("data", "shared"))
group = mesh["shared"].get_group()  # what every function below is given
me = group.rank()
corpus = load_corpus(ranks)  # for the second half
metrics = Metrics(ranks, corpus, {"positions": positions, "tokens": tokens, "steps": steps, "seeds": seeds})

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

N, D, M, E, k_experts = tokens, 16, 32, 8, 2
e = E // c
held = slice(me * e, (me + 1) * e)  # of E, this rank's
router_ED, up_EDM, down_EMD = (0.3 * normal(10 + i, *shape) for i, shape in enumerate(((E, D), (E, D, M), (E, M, D))))
x_ranks = [normal(20 + r, N, D) for r in range(c)]
x_ND = x_ranks[me]

# %% [markdown]
# # First half: one sequence on several ranks
#
# ## Attention over own keys alone (CORE, 3 min)
#
# At a million positions the activations of one layer do not fit on a GPU, even for one sequence. So each rank gets
# some of the positions: [**context parallelism**](../assets/glossary.md#context-parallel). Norms and MLPs look at one
# position at a time, so they need no message. Attention compares a query with *all* earlier keys. The first try
# compares it only with the keys of its own rank. (`at[r]` are the positions of rank r; `mine_of` takes this rank's
# part of a tensor.)


# %% jupyter={"source_hidden": true}
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
alone = F.scaled_dot_product_attention(q, k, v, is_causal=True)
say(f"{list(alone.shape)}, largest difference from full attention: {(alone - whole[:, :, at[me]]).abs().max():.2f}")

# %% [markdown]
# The shapes are right, and no error is raised. But only rank 0's result is right, because no keys come before its
# positions. Each rank could gather all keys, but then every rank needs memory for all of them. **The goal: exact
# attention, and no rank holds the keys of more than two ranks at a time.**

# %% [markdown]
# ## Softmax in blocks (CORE, 8 min)
#
# Softmax subtracts the largest score first, so that `exp` does not overflow. If keys come in blocks, you do not know
# the largest score yet. The [**online softmax**](../assets/glossary.md#online-softmax) ([Milakov and Gimelshein
# 2018](https://arxiv.org/abs/1805.02867)) keeps three things for each query: the largest score so far, the sum of
# exp(score - largest), and the sum of the values weighted by it. When a larger score arrives, multiply both sums by
# exp(old largest - new largest): they **shrink**.
#
# ![Two blocks of scores: the first has the largest score 2 and the sum 1.37; the second brings a 3, so the sum is
# multiplied by exp(2 - 3)](../assets/09_online_softmax.svg)
#
# **Predict.** What is the sum after the second block?

# %%
# %%ranks
guess_sum = ____  # your turn: type a number with two decimals

# %% jupyter={"source_hidden": true}
# %%ranks
first, second = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0])
sum_2 = (first - 2).exp().sum() * math.exp(2 - 3) + (second - 3).exp().sum()
at_once = (torch.cat([first, second]) - 3).exp().sum()
assert torch.isclose(sum_2, at_once)
compare("the sum after two blocks", "guess_sum", round(sum_2.item(), 2))

# %% [markdown]
# The old sum becomes e⁻¹ · 1.37 = 0.50, and the new terms add e⁰ + e⁻³ = 1.05.
#
# ### Build A: take in a block
#
# `largest` and `total` are [B, H, s, 1]. `weighted` is [B, H, s, K], the sum of values times `exp(score - largest)`.
# The new block has scores [B, H, s, u] of u keys. A score of -inf hides a key, and all of a block may be -inf. Return
# the new largest, total and weighted. (If you skip a build, the cells below use the lesson's own lines.)


# %%
# %%ranks
def absorb(state, s_BHsu, v_BHuK):
    """The state (largest, total, weighted) with one more block of scores and values."""
    largest, total, weighted = state
    new = torch.maximum(largest, s_BHsu.amax(-1, keepdim=True))
    shrink = ____  # by how much what is there shrinks
    p_BHsu = ____  # exp(score - largest) of this block
    return new, ____, ____


checks.absorb(absorb, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution A</summary>
#
# ```python
# def absorb(state, s_BHsu, v_BHuK):
#     largest, total, weighted = state
#     new = torch.maximum(largest, s_BHsu.amax(-1, keepdim=True))
#     shrink = (largest - new).exp()
#     p_BHsu = (s_BHsu - new).exp()
#     return new, total * shrink + p_BHsu.sum(-1, keepdim=True), weighted * shrink + p_BHsu @ v_BHuK
# ```
#
# </details>

# %% [markdown]
# After the last block `weighted / total` is the attention, in any order of the blocks.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: softmax in blocks</summary>
#
# Do the two blocks on the board. *Usual mistake:* shrinking the weighted values and not the sum, or the other way round.
# *Ask:* "what does a block of -inf change?" (Nothing: the largest stays, so `shrink` is 1 and all p are 0.)
#
# </details>

# %% [markdown]
# ## Keys go around a ring (CORE, 10 min)
#
# Queries stay on their rank. Keys and values go around a ring: in step i a rank works on the block of the rank i
# places before it. That is [**ring attention**](../assets/glossary.md#ring-attention) ([Liu et al.
# 2023](https://arxiv.org/abs/2310.01889)).
#
# ![Four ranks in a ring: each keeps its queries; blocks of keys and values move one rank on in each
# step](../assets/09_ring.svg)
#
# The folded cell has three functions. `scores(q, k, q_at, k_at)` returns the scores of queries at the positions `q_at`
# and keys at `k_at`, with -inf where the key comes after the query. `start(q)` returns the state before the first
# block. `post(x, group)` *begins* to send x to the next rank. It returns a function; call it to wait for the tensor
# from the rank before, and to get it.


# %% jupyter={"source_hidden": true}
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


def post(x, group):
    """Begin to send x to the rank ahead; all ranks of the group call it. Returns a function that waits for the
    block from the rank behind. Leave x as it is until then.
    """
    n, i = group.size(), group.rank()
    if n == 1:  # gloo does not send to itself
        return lambda: x
    ahead, behind = (dist.get_global_rank(group, (i + step) % n) for step in (1, -1))
    mine, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    pair = dist.P2POp(dist.isend, mine, ahead, group), dist.P2POp(dist.irecv, received, behind, group)
    works = dist.batch_isend_irecv(list(pair))

    def arrived():
        for work in works:
            work.wait()
        return received

    return arrived


# %% [markdown]
# ### Build B: the ring
#
# `at[r]` are the positions of rank r, `i` is this rank, and `kv[0]`, `kv[1]` are the keys and values of the block that
# is here now. The given line posts it *before* you work on it, so it is sent while you compute. The check compares with
# full attention and counts messages: n - 1 per rank.


# %%
# %%ranks
def ring_forward(q, k, v, at, group):
    """(attention [B, H, s, K], log of the sums [B, H, s, 1]) of this rank's queries."""
    n, i = group.size(), group.rank()
    kv, state = torch.stack([k, v]), start(q)
    for step in range(n):
        arrive = post(kv, group) if step < n - 1 else None
        owner = ____  # whose block this is
        state = ____  # absorb the scores of q and kv[0], and the values kv[1]
        if arrive:
            ____  # the next block
    largest, total, weighted = state
    return weighted / total, largest + total.log()


checks.ring_forward(ring_forward, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def ring_forward(q, k, v, at, group):
#     n, i = group.size(), group.rank()
#     kv, state = torch.stack([k, v]), start(q)
#     for step in range(n):
#         arrive = post(kv, group) if step < n - 1 else None
#         owner = (i - step) % n
#         state = absorb(state, scores(q, kv[0], at[i], at[owner]), kv[1])
#         if arrive:
#             kv = arrive()
#     largest, total, weighted = state
#     return weighted / total, largest + total.log()
# ```
#
# </details>

# %%
# %%ranks
with wire.watch() as seen, torch.no_grad():
    out, log_sums = ring_forward(q, k, v, at, group)
say(f"largest difference from full attention: {(out - whole[:, :, at[me]]).abs().max():.0e}, {seen.messages} messages")

# %% jupyter={"source_hidden": true}
# %%ranks
assert (out - whole[:, :, at[me]]).abs().max() < 1e-10
assert (seen.messages, seen.sent_bytes) == (c - 1, (c - 1) * unit)
square = out.square().sum()
dist.all_reduce(square, group=group)
metrics.close(attention_norm=square.sqrt())  # the same on any number of ranks

# %% [markdown]
# In [grouped-query attention](../assets/glossary.md#gqa) several query heads share one head of keys and values.
#
# **Predict.** If each query head has its own head of keys and values, a rank sends 2 · 3 = 6 times as many numbers as
# its queries have (keys and values, three times). How many times as many, if 16 query heads share one?

# %%
# %%ranks
guess_gqa = ____  # your turn: type a number

# %% jupyter={"source_hidden": true}
# %%ranks
q_16, kv_1 = normal(50, B, 16, T, K), [normal(51 + i, B, 1, T, K) for i in range(2)]
with wire.watch() as seen, torch.no_grad():
    out = ring_forward(*(mine_of(x, at) for x in (q_16, *kv_1)), at, group)[0]
apart = out - F.scaled_dot_product_attention(q_16, *kv_1, is_causal=True, enable_gqa=True)[:, :, at[me]]
assert apart.abs().max() < 1e-10 and seen.sent_bytes / (q_16.nbytes / c) == 2 * (c - 1) / 16
compare("what a rank sends, in units of its queries", "guess_gqa", 2 * (4 - 1) / 16)

# %% [markdown]
# 6 / 16 = 0.375. Does the next block arrive before the rank is done with this one? The virtual network simulates
# layers of Llama 3 8B (32 query heads and 8 KV heads of 128), at 400 TFLOP/s and 50 GB/s, without a mask:

# %% jupyter={"source_hidden": true}
# %%ranks
LINK, FLOPS, HEADS, KV_HEADS, WIDTH = Link(5e-6, 50e9), 400e12, 32, 8, 128


def block_s(s):
    """Seconds of s queries and s keys: two products."""
    return 4 * s**2 * HEADS * WIDTH / FLOPS


def ring_s(s, post_first):
    """Virtual seconds of a forward ring with s positions on each rank."""
    net = VirtualNetwork(ranks, LINK, group=group)
    kv = torch.zeros(2, KV_HEADS, s, WIDTH, dtype=torch.bfloat16)  # on the CPU
    ends = (me + 1) % c, torch.empty_like(kv), (me - 1) % c
    for step in range(c):
        last = step == c - 1
        if post_first and not last:
            with net.asynchronous("the next block") as work:
                net.exchange(kv, *ends)
        net.compute(block_s(s))
        if post_first and not last:
            net.wait(work)
        elif not last:
            net.exchange(kv, *ends)
    return net.clock_s


ring_times = {}
for s in (512, 1024, 2048, 4096):
    afterwards, first = (ring_s(s, way) for way in (False, True))
    message_s = LINK.cost_s(2 * KV_HEADS * s * WIDTH * 2)
    assert math.isclose(afterwards, c * block_s(s) + (c - 1) * message_s)
    assert math.isclose(first, block_s(s) + (c - 1) * max(block_s(s), message_s))
    ring_times[s] = afterwards, first
    if rank == 0:
        hidden = f"{1e3 * first:.2f} ms if posted first, of which compute {1e3 * c * block_s(s):.2f}"
        say(f"{s:5} positions on a rank: sent afterwards {1e3 * afterwards:.2f} ms, {hidden}")
metrics.exact(ring_virtual_s=ring_times)

# %% [markdown]
# The time to compute grows with s², the message with s. From about 2,000 positions per rank, the messages are almost
# hidden. [Llama 3](https://arxiv.org/abs/2407.21783) has no ring: it **all-gathers** K and V before it computes. With
# GQA they are small.

# %% [markdown]
# ## Backward: gradients travel with their keys (CORE, 7 min)
#
# Keeping all scores for backward takes too much memory. So a rank keeps only the output and `log_sums`, which
# `ring_forward` returns, and **computes the scores again**, as FlashAttention does ([Dao et al.
# 2022](https://arxiv.org/abs/2205.14135)). For one block, with P = exp(scores - log_sums):
#
# - the values get dV = Pᵀ dO;
# - the scores get dS = P · (dO Vᵀ - δ) / √K, number by number; δ is one number per query, the sum of dO · O;
# - the queries get dS Kₖ (Kₖ are the keys), and the keys get dSᵀ Q.
#
# ### Build C: one block's gradients
#
# Write these four formulas in code. `s_BHsu` are the block's scores [B, H, s, u]. `log_sums` and `delta` (δ) are [B, H,
# s, 1]; they come from all keys.


# %%
# %%ranks
def block_gradients(q, k, v, s_BHsu, log_sums, d_out, delta):
    """This block's terms (d_q, d_k, d_v), from its masked scores."""
    p_BHsu = ____
    d_s = ____
    return ____, ____, ____


checks.block_gradients(block_gradients, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution C</summary>
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
# The terms of d_q are added up on the rank of the queries. The gradients of keys and values belong to the block, so
# **they are sent on with it**. One more move brings them back to the block's own rank. The folded cell has the loop,
# and compares with full attention.


# %% jupyter={"source_hidden": true}
# %%ranks
def ring_backward(q, k, v, out, log_sums, d_out, at, group):
    """(d_q, d_k, d_v) of this rank's positions. All ranks of the group call it."""
    n, i = group.size(), group.rank()
    delta = (d_out * out).sum(-1, keepdim=True)
    d_q, kv, d_kv = torch.zeros_like(q), torch.stack([k, v]), torch.zeros_like(torch.stack([k, v]))
    come_home = None
    for step in range(n):
        arrive = post(kv, group) if step < n - 1 else None
        s = scores(q, kv[0], at[i], at[(i - step) % n])
        term_q, *terms = block_gradients(q, kv[0], kv[1], s, log_sums, d_out, delta)
        if come_home:
            d_kv = come_home()  # of the block that visits now, from the ranks that it has visited
        d_q, d_kv = d_q + term_q, d_kv + torch.stack(terms)
        come_home = post(d_kv, group)
        if arrive:
            kv = arrive()
    return d_q, *come_home()


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


def far_from_full(at):
    """(largest distance of output and gradients from full attention's under a random v, what backward sent)."""
    full = [x.clone().requires_grad_() for x in (q_BHTK, k_BHTK, v_BHTK)]
    wanted = F.scaled_dot_product_attention(*full, is_causal=True)
    wanted.backward(v_out)
    here = [mine_of(x, at) for x in (q_BHTK, k_BHTK, v_BHTK)]
    found = RingAttention.apply(*here, at, group)
    with wire.watch() as seen:
        found.backward(v_out[:, :, at[me]])
    pairs = [(found, wanted), *((mine.grad, x.grad) for mine, x in zip(here, full, strict=True))]
    return max((mine - x[:, :, at[me]]).abs().max().item() for mine, x in pairs), seen


at = [in_order(T, c, r).to(device) for r in range(c)]
apart, seen = far_from_full(at)
assert apart < 1e-10, f"{apart:.1e} away"
assert seen.sent_bytes == (2 * c - 1 if c > 1 else 0) * unit
if rank == 0:
    say("output, d_q, d_k and d_v: equal to full attention to 1e-10")
    say(f"backward sent {seen.sent_bytes / unit:g} blocks of keys and values, forward {c - 1}")
metrics.exact(ring_backward_bytes=seen.sent_bytes)

# %% [markdown]
# Keys and values move c - 1 times, and their gradients c times: 2c - 1 = 7 blocks.

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
# ## Who waits for whom? (CORE, 10 min)
#
# With a causal mask, rank 0's queries need only block 0. The last rank's queries need all blocks. GPU kernels skip masked
# blocks. (`scores` above does not: it computes all pairs and masks them afterwards.) The ranks wait for each other in
# each step, so a step takes as long as its busiest rank.
#
# **Predict.** Four ranks have positions in order, and a kernel that skips masked blocks. By what factor does the ring take
# longer than with equal work? Count query-key pairs: a rank's own block counts as half a block, because of the mask.

# %%
# %%ranks
guess_wait = ____  # your turn: type a number, such as 1.5

# %% jupyter={"source_hidden": true}
# %%ranks
compare("the ring in order, times perfect balance", "guess_wait", 2 - 1 / 4)

# %% [markdown]
# Step 0 is half a block on all ranks. In each of the three later steps some rank has a full one: together 3.5. All
# ranks together compute 8 blocks, 2 each with equal work: 3.5 / 2 = 1.75. In general it is 2 - 1/c: **with such a kernel,
# almost half of the time is waiting**.
#
# ![Query-key pairs of four ranks: in order, rank 0 has few and rank 3 many; in zig-zag all have the
# same](../assets/09_zig_zag.svg)
#
# [**Zig-zag**](../assets/glossary.md#zig-zag) splits the sequence into 2c chunks. Each rank gets one from the front
# and the matching one from the back: of eight chunks, rank 0 has the first and the last, rank 1 the second and the
# second last.
#
# ### Build D: zig-zag positions
#
# Return the positions of a rank in ascending order, a tensor [T/n].


# %%
# %%ranks
def zig_zag(T, n, rank):
    """Positions of a rank [T/n]: chunk `rank` of 2n, and its mirror image."""
    if T % (2 * n):
        raise ValueError(f"{T} positions do not split into {2 * n} chunks; use a multiple of {2 * n}")
    ____  # cut
    ____  # and join


checks.zig_zag(zig_zag, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution D</summary>
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
# Nothing else changes, because `scores` masks by position. The bars count the pairs that each rank needs in each step: a
# kernel that skips masked blocks computes only these; an own block is a little more than half. Right: a real machine.


# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.lessons import context_and_experts as lesson


def pairs_of(at, group):
    """Query-key pairs that this rank needs in each step of the ring."""
    n, i = group.size(), group.rank()
    keys = [at[(i - step) % n] for step in range(n)]
    return [int((k_at[None, :] <= at[i][:, None]).sum()) for k_at in keys]


layouts, work = {"in order": in_order, "zig-zag": zig_zag}, {}
for name, layout in layouts.items():
    at = [torch.as_tensor(layout(T, c, r)).to(device) for r in range(c)]
    apart = far_from_full(at)[0]
    assert apart < 1e-10, f"{name}: {apart:.1e} away"
    mine = torch.tensor(pairs_of(at, group), device=device)
    everybody = [torch.empty_like(mine) for _ in range(c)]
    dist.all_gather(everybody, mine, group=group)
    work[name] = torch.stack(everybody).tolist()  # [rank][step]
metrics.exact(pairs=work)
if rank == 0:
    fair, curves = T * (T + 1) / 2 / c, recorded_runs.published("09_ring_attention")
    show(lesson.draw_work(work, fair, curves), "work_per_rank", "query-key pairs per rank; right, rates on 8 GPUs")
    for name, rows in work.items():
        ring = sum(max(row[step] for row in rows) for step in range(c))  # the busiest of each step
        say(f"{name}: output and gradients right; the busiest ranks need {ring / fair:.2f} times a fair share of pairs")

# %% [markdown]
# Zig-zag sends the same bytes. But everything that depends on position (mask, position embedding, targets) must use
# `at`. On eight GPUs,
# [ring-flash-attention](https://github.com/zhuzilin/ring-flash-attention/blob/01c8baf5eafc95c1a255690bcdb5359b600d765a/README.md)
# reaches 54 % of eight times one GPU's rate in order, and 90 % in zig-zag. Our formula gives 1 / (2 - 1/8) = 53 % in
# order.

# %% jupyter={"source_hidden": true}
# %%ranks
card(
    "Softmax over blocks: keep largest, sum and weighted values; shrink both when a larger score arrives.",
    "Queries stay, keys and values go around: post the block, work on it, then wait for the next.",
    "Backward computes the scores again. The gradients of keys travel with the keys: 2c - 1 blocks.",
    "With GQA keys are small: then an all-gather of K and V is a simple alternative.",
    "If kernels skip what a causal mask hides, positions in order take 2 - 1/c times as long. Zig-zag is level.",
    figure="a ring of keys; triangles in order and in zig-zag",
    command="python scripts/launch.py --nproc 4 -- --preset nano --parallel.context 4",
)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: zig-zag</summary>
#
# Draw the triangle and let the room cut it fairly before you show the answer. *Usual mistake:* permuting the inputs and
# forgetting the targets: the loss falls to a wrong value. *Ask:* "without a causal mask, which layout would you take?"
# (Any. In order is the simplest.) *When late:* give solution D and show the two bars.
#
# </details>

# %% [markdown]
# # Second half: experts
#
# ## Who gets how many tokens? (CORE, 5 min)
#
# A larger MLP is better, and slower. A [**mixture of experts**](../assets/glossary.md#mixture-of-experts) has E MLPs,
# the *experts*, and each token goes through only k of them. So it has the weights of E experts, and costs the FLOPs of
# k. A small linear layer, the [**router**](../assets/glossary.md#router), chooses the experts. Results are weighted by
# its probabilities, the **gates**:


# %%
# %%ranks
def route(x_ND, router_ED, k):
    """(gates [N, k] that sum to 1, chosen experts [N, k], probabilities [N, E])."""
    probs_NE = (x_ND @ router_ED.T).softmax(-1)
    best_Nk, experts_Nk = probs_NE.topk(k, dim=-1)
    return best_Nk / best_Nk.sum(-1, keepdim=True), experts_Nk, probs_NE


gates_Nk, experts_Nk, probs_NE = route(torch.cat(x_ranks), router_ED, k_experts)
rows_E = experts_Nk.flatten().bincount(minlength=E)
say(f"experts {held.start} to {held.stop - 1} are mine: {rows_E[held].sum()} rows of {rows_E.sum()}")

# %% [markdown]
# In [**expert parallelism**](../assets/glossary.md#expert-parallel) each rank has E/c experts. A row is one token for
# one expert. The numbers of rows differ, and all ranks wait for the one with the most.
#
# **Predict.** Eight experts on four ranks, k = 1. Half of the tokens choose expert 0; the rest choose the other seven
# equally. Rank 0 has experts 0 and 1. How many times the mean of all ranks does rank 0 get?

# %%
# %%ranks
guess_skew = ____  # your turn: type a number, such as 1.5

# %% jupyter={"source_hidden": true}
# %%ranks
compare("rows of rank 0, times the mean", "guess_skew", round(4 * (1 / 2 + 1 / 14), 2))

# %% [markdown]
# Rank 0 gets a half, and a seventh of the other half: 4/7 of all rows. The mean is 1/4. The layer takes 2.29 times as
# long.

# %% [markdown]
# ## Dispatch (CORE, 8 min)
#
# Each rank has its own tokens, as in data parallelism. A token is sent to the ranks of its experts, and the results
# come back: two all-to-alls per layer, **dispatch** and **combine**.
#
# ![Tokens of two ranks sorted by expert, sent to these experts' ranks, sent back and added up with their
# gates](../assets/09_dispatch.svg)
#
# `all_to_all_single` can send parts of unequal size if *both* sides know the sizes. A rank can count only the rows
# that it sends. So the ranks first exchange these counts: E integers from each rank.
#
# ### Build E: the sizes of the parts
#
# `experts_Nk` has the experts that each token of this rank chose. Count the choices of each of the E experts; rank r
# has experts r·e to (r + 1)·e - 1. `.view(n, -1)` turns the E counts into one row for each rank, [n, e]. Exchange them
# with `dist.all_to_all_single(arriving_ne, leaving_ne, group=group)`. Return two lists of n numbers, the rows to and
# from each rank, and `arriving_ne`.


# %%
# %%ranks
def split_sizes(experts_Nk, E, group):
    """(rows to each rank, rows from each rank, rows from each rank for each of my experts [n, e])."""
    leaving_ne = ____  # count the choices of each expert: torch.bincount(..., minlength=E)
    arriving_ne = torch.empty_like(leaving_ne)
    ____  # exchange the counts, in the group
    return ____, ____, arriving_ne  # two lists of n numbers


checks.split_sizes(split_sizes, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution E</summary>
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
# `Exchange.apply(rows, leaving, arriving, group)` (folded) sends the rows. In backward it sends the gradients back,
# with the sizes swapped.


# %% jupyter={"source_hidden": true}
# %%ranks
class Exchange(torch.autograd.Function):
    """Exchange.apply(rows, leaving, arriving, group): rows to their ranks; gradients take the way back."""

    @staticmethod
    def forward(ctx, rows, leaving, arriving, group):
        leaving, arriving = [*map(int, leaving)], [*map(int, arriving)]
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
# The rows that arrived are sorted by rank, and then by expert. `run_experts` (folded) runs each of my experts on its
# rows. The second exchange sends the results back. Then a rank has results for its own rows, in the order in which it
# sent them:


# %% jupyter={"source_hidden": true}
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


# %%
# %%ranks
def expert_parallel(x_ND, router_ED, up_eDM, down_eMD, k, group, exchange=Exchange.apply, choose=route):
    """(the mixture [N, D], probabilities, choices); every rank has tokens and experts of its own. All call it."""
    gates_Nk, experts_Nk, probs_NE = choose(x_ND, router_ED, k)
    leaving, arriving, arriving_ne = split_sizes(experts_Nk, len(router_ED), group)
    order_R = experts_Nk.flatten().argsort(stable=True)
    rows = exchange(x_ND[order_R // k], leaving, arriving, group)
    rows = run_experts(rows, arriving_ne, up_eDM, down_eMD)
    rows = exchange(rows, arriving, leaving, group)
    return combine(rows, order_R, gates_Nk), probs_NE, experts_Nk


# %% [markdown]
# ### Build F: combine
#
# Row j of `rows_RD` [N·k, D] is the result of choice `order_R[j]`. Choice i belongs to token i // k. First make
# `back_RD`, the rows in the order of the choices. Then add up each token's k results times their gates. Return [N, D].


# %%
# %%ranks
def combine(rows_RD, order_R, gates_Nk):
    """[N, D]: for each token the sum of its choices' results times their gates."""
    back_RD = ____  # choice by choice
    return ____


checks.combine(combine, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution F</summary>
#
# ```python
# def combine(rows_RD, order_R, gates_Nk):
#     back_RD = rows_RD[order_R.argsort()]  # choice by choice
#     return (back_RD.view(*gates_Nk.shape, -1) * gates_Nk[..., None]).sum(1)
# ```
#
# </details>

# %% [markdown]
# **Predict.** k = 2. How many rows are exchanged for each token in a layer, forward and backward together? (Count also
# the rows that stay on their rank.)

# %%
# %%ranks
guess_rows = ____  # your turn: type a number

# %% jupyter={"source_hidden": true}
# %%ranks
mine = [w.clone().requires_grad_() for w in (x_ND, router_ED, up_EDM[held], down_EMD[held])]
with wire.watch() as seen:
    y_ND, _, experts_Nk = expert_parallel(*mine, k_experts, group)
    found = [call.bytes for call in seen.calls]  # what a rank keeps for itself included
    y_ND.square().sum().backward()
arriving = split_sizes(experts_Nk, E, group)[1]
assert found == [8 * E, 8 * D * sum(arriving), 8 * D * N * k_experts]  # a row has D numbers of 8 bytes
travelled = torch.tensor((seen.payload_bytes("all_to_all") - 8 * E) / (8 * D * N), device=device)
dist.all_reduce(travelled, group=group)
compare("rows per token and layer", "guess_rows", round(travelled.item() / c, 9))
metrics.exact(expert_bytes=found)

# %% [markdown]
# There are two exchanges in forward and two in backward, with k rows each. The folded cell compares with one process
# in which every expert computes every token, and experts that were not chosen have the gate 0.

# %% jupyter={"source_hidden": true} tags=["nbval-check-output"]
# %%ranks
from torch.distributed import _functional_collectives as functional  # the underscore is torch's


def dense_mixture(x_ND, router_ED, up_EDM, down_EMD, k):
    """Every expert on every token, weighted; what is not chosen has weight 0."""
    gates_Nk, experts_Nk, probs_NE = route(x_ND, router_ED, k)
    weight_NE = torch.zeros_like(probs_NE).scatter(1, experts_Nk, gates_Nk)
    y_END = F.gelu(x_ND @ up_EDM) @ down_EMD
    return (weight_NE.T[..., None] * y_END).sum(0)


def by_library(rows, leaving, arriving, group):
    """Exchange.apply, as torch has it. (Its namesake in torch.distributed has no backward: gradients end there.)"""
    return functional.all_to_all_single(rows.contiguous(), [*map(int, arriving)], [*map(int, leaving)], group)


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


for way, exchange in {"ours": Exchange.apply, "the library's exchange": by_library}.items():
    apart = far_from_dense(exchange)
    assert apart < 1e-10, f"{way} is {apart:.1e} away"
    if rank == 0:
        say(f"{way} and one process: the mixture and all gradients are equal to 1e-10")

# %% [markdown]
# ## A bug from the zoo: whose gradient is it? (CORE, 8 min)
#
# In data-parallel training each rank's loss is the mean over its tokens, and the gradients of replicated weights, such
# as the router's, are averaged over the n ranks. The code calls these weights `copies`. An author thinks: *"Each expert
# is on one rank only. There is nothing to average, so I do not change its gradient."*


# %%
# %%ranks
def theirs(copies, experts, group):
    """Copies are averaged; experts are no copies."""
    for p in copies:
        dist.all_reduce(p.grad, group=group)
        p.grad /= group.size()


# %% [markdown]
# The loss falls. **Predict.** On four ranks, by what factor are the experts' gradients too large?

# %%
# %%ranks
guess_factor = ____  # your turn: type a number


# %% jupyter={"source_hidden": true}
# %%ranks
def gradients(finish):
    """Gradients of router, up and down of this rank after `finish(copies, experts, group)` has had them."""
    router, *experts = (w.clone().requires_grad_() for w in (router_ED, up_EDM[held], down_EMD[held]))
    y, _, _ = expert_parallel(x_ND, router, *experts, k_experts, group)
    y.square().mean().backward()  # the mean over this rank's tokens
    finish([router], experts, group)
    return [w.grad for w in (router, *experts)]


# the judge: the dense mixture, one process, all ranks' tokens, one mean
single = [w.clone().requires_grad_() for w in (router_ED, up_EDM, down_EMD)]
dense_mixture(torch.cat(x_ranks), *single, k_experts).square().mean().backward()
wanted = [single[0].grad, single[1].grad[held], single[2].grad[held]]


def ratios(found):
    """Length of each gradient over that of one process's."""
    return [(a.norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]


found = ratios(gradients(theirs))
assert all(math.isclose(ratio, c) for ratio in found[1:])
because = "theirs: gradient / one process's: router {:.4f}, up {:.4f}, down {:.4f}".format(*found)
compare("experts' gradients on four ranks, times what they should be", "guess_factor", 4, because=because)

# %% [markdown]
# An expert's rows come from *all* ranks, and backward brings the gradients of all n losses. So its gradient is already
# their sum. To make it the mean, divide by n.
#
# ### Build G: finish the gradients
#
# Change each `p.grad` in place, so that it is the gradient of the mean over all ranks' tokens. Send nothing for
# experts.


# %%
# %%ranks
def finish(copies, experts, group):
    """Make each p.grad the gradient of the mean over all ranks' tokens. All ranks of the group call it."""
    ____  # one all-reduce for each copy
    ____  # and what both kinds need


checks.finish(finish, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution G</summary>
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

# %% [markdown]
# Does the loss show the bug? Ten steps of Adam with `theirs`, and with `finish`:


# %% jupyter={"source_hidden": true}
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


apart = max((a - b).abs().max().item() for a, b in zip(gradients(finish), wanted, strict=True))
assert apart < 1e-10, f"{apart:.1e} away"
for name, way in {"theirs": theirs, "mended": finish}.items():
    first, *_, last = losses(way)
    if rank == 0:
        say(f"{name}: loss {first:.4f}, after ten steps {last:.4f}")

# %% [markdown]
# It does not, because Adam divides a gradient by its own size. But clipping by the global norm goes wrong. The bug was
# in [DeepSpeed#6545](https://github.com/deepspeedai/DeepSpeed/issues/6545) and
# [megablocks#20](https://github.com/databricks/megablocks/pull/20), among others. To find it, compare *gradients*, not
# losses, on the same data in one process and in several.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# Let the room vote before the ratios appear: router wrong, experts wrong, by n or by 1/n. *Usual mistake:* an all-reduce
# over the experts, which mixes different experts. *Ask:* "if each rank's loss were a sum and not a mean, who would be
# wrong?" (Nobody, if copies are summed as well.) More of the same: [megablocks#86](https://github.com/databricks/megablocks/issues/86)
# gives the reason, [Megatron-LM#5956](https://github.com/NVIDIA/Megatron-LM/pull/5956) is another case.
#
# </details>

# %% [markdown]
# ## Make it even (CORE, 10 min)
#
# The loss does not make a router use all experts equally. There are two cures:
#
# - a [**balancing loss**](../assets/glossary.md#balancing-loss), or *auxiliary loss* ([Fedus et al.
#   2021](https://arxiv.org/abs/2101.03961)): add E · Σ fᵢ Pᵢ, where fᵢ is expert i's share of the choices and Pᵢ its
#   mean probability. It is 1 if all experts are equal. Its gradient changes the router, also where that makes the
#   model worse.
# - a **bias** ([Wang et al. 2024](https://arxiv.org/abs/2408.15664), used by DeepSeek-V3): add bᵢ to expert i's
#   probability, but *only to choose*. The gates come from the probabilities without it. After each step, subtract a
#   small `speed` from the bias of an expert with more than 1/E of the choices, and add it for one with less.
#
# ### Build H: balance by a bias


# %%
# %%ranks
def biased_route(x_ND, router_ED, k, bias_E):
    """As `route`, but probability + bias chooses; gates [N, k] come from the probabilities and sum to 1."""
    probs_NE = (x_ND @ router_ED.T).softmax(-1)
    experts_Nk = ____
    best_Nk = ____  # probs_NE.gather(...)
    return best_Nk / best_Nk.sum(-1, keepdim=True), experts_Nk, probs_NE


def nudge(bias_E, share_E, speed):
    """The new bias; share_E [E] are the experts' shares of all choices, and sum to 1."""
    return ____  # torch.sign helps


checks.bias((biased_route, nudge), ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution H</summary>
#
# ```python
# def biased_route(x_ND, router_ED, k, bias_E):
#     probs_NE = (x_ND @ router_ED.T).softmax(-1)
#     experts_Nk = (probs_NE + bias_E).topk(k, dim=-1).indices
#     best_Nk = probs_NE.gather(1, experts_Nk)
#     return best_Nk / best_Nk.sum(-1, keepdim=True), experts_Nk, probs_NE
#
#
# def nudge(bias_E, share_E, speed):
#     return bias_E + speed * torch.sign(share_E.mean() - share_E)
# ```
#
# </details>

# %% [markdown]
# Now train a small model with our mixture on Shakespeare, in three ways, from each seed. The balancing loss has the
# coefficient 1 and the bias the speed 0.02, so that a few steps show an effect. (Switch Transformers use 0.01,
# DeepSeek-V3 0.001.)

# %% jupyter={"source_hidden": true}
# %%ranks --timeout 180
V = len(corpus.vocab)


def share_of_choices(experts_Nk, E, group):
    """f [E]: the share of all ranks' choices that each expert got; sums to 1. All ranks of the group call it."""
    chosen_E = torch.bincount(experts_Nk.flatten(), minlength=E).double()
    dist.all_reduce(chosen_E, group=group)
    return chosen_E / chosen_E.sum()


def balance_loss(probs_NE, share_E):
    """E · sum of f · P, with P over this rank's tokens: averaged over ranks it is that of all tokens."""
    return probs_NE.shape[1] * (share_E * probs_NE.mean(0)).sum()


def parameters(seed):
    """(copies: embedding, head, router; experts: up, down) with the same copies on all ranks."""
    whole = [normal(seed, V, D), 0.3 * normal(seed + 1, D, V), 0.3 * normal(seed + 2, E, D)]
    parts = [0.3 * normal(seed + 3, E, D, M)[held], 0.3 * normal(seed + 4, E, M, D)[held]]
    return [[w.clone().requires_grad_() for w in weights] for weights in (whole, parts)]


def train(seed, coefficient, speed):
    """(each expert's share of the choices, loss of all ranks' tokens), means over the last ten steps."""
    copies, experts = parameters(1000 * seed)
    embedding, head, router = copies
    optimizer, shares, losses = torch.optim.Adam([*copies, *experts], lr=1e-2), [], []
    bias_E = torch.zeros(E, dtype=torch.float64, device=device)
    for step in range(steps):
        ids, targets = (x.flatten().to(device) for x in get_batch(corpus.train_ids, step, c, N, me, c, seed))
        x_ND = embedding[ids]
        choose = partial(biased_route, bias_E=bias_E)
        y_ND, probs_NE, chosen_Nk = expert_parallel(x_ND, router, *experts, k_experts, group, choose=choose)
        shares.append(share_of_choices(chosen_Nk, E, group))
        loss = F.cross_entropy((x_ND + y_ND) @ head, targets)
        losses.append(loss.detach())
        optimizer.zero_grad()
        (loss + coefficient * balance_loss(probs_NE, shares[-1])).backward()
        finish(copies, experts, group)
        optimizer.step()
        bias_E = nudge(bias_E, shares[-1], speed)
    last = torch.stack(losses[-10:]).mean()
    dist.all_reduce(last, group=group)
    return torch.stack(shares[-10:]).mean(0).tolist(), last.item() / c


ways = {"no balancing": (0.0, 0.0), "balancing loss": (1.0, 0.0), "bias": (0.0, 0.02)}
runs = {name: [train(seed, *way) for seed in range(seeds)] for name, way in ways.items()}
shares = {name: [sorted(share, reverse=True) for share, _ in rows] for name, rows in runs.items()}

# %% [markdown]
# Left: the bytes that reach a popular expert's rank, divided by the mean of all ranks: five draws, and the prediction.
# Right: the trained routers' experts, busiest first: medians over the seeds, whiskers from the least to the most.

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.lessons import context_and_experts as lesson


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
if rank == 0:
    show(lesson.draw_skew(skewed, shares), "skew", "bytes of rank 0 against skew, and shares of choices")
    plain = [loss for _, loss in runs["no balancing"]]
    for name, rows in runs.items():
        most = sorted(E * max(share) for share, _ in rows)
        extra = sorted(loss - free for (_, loss), free in zip(rows, plain, strict=True))
        said = f"{name}: busiest expert {most[0]:.2f} to {most[-1]:.2f} times the mean"
        price = f", {extra[0]:+.3f} to {extra[-1]:+.3f} against no balancing" if name != "no balancing" else ""
        say(f"{said}; loss {sorted(loss for _, loss in rows)[seeds // 2]:.2f}{price}")

# %% [markdown]
# Both cures make the experts more equal, and both can make the loss a little worse: the last lines print by how much.
# This small training cannot say which is better. Newer models do more: see "Lab: a router of today".

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: balance</summary>
#
# *Ask:* "balance may cost quality and buys speed. How much skew would you accept?" Then: f is counted over *all* ranks.
# Counted on each rank alone it asks for more, balance within every rank's batch, and the loss depends on the number of
# ranks: exercise 2. *Usual mistake in build H:* gates from the biased probabilities; then the bias changes the output.
#
# </details>

# %% [markdown]
# ## Lab: play with ranks and layouts (MORE, 1 min)
#
# A third layout is in the list: *striped* ([Brandon et al. 2023](https://arxiv.org/abs/2311.09431)) gives a rank every
# n-th position. How far from level is it with 16 positions, and with 128?

# %% tags=["active-ipynb"]
# from manyhands.widgets.zigzag import show_zigzag
#
# show_zigzag()

# %% [markdown]
# ## Lab: rotary positions in zig-zag (MORE, 2 min)
#
# A Llama turns each query and key by an angle that grows with its position ([rotary
# positions](../assets/glossary.md#rotary-positions)), so a score depends on the *distance* alone. Below, one query and
# one key stand at every position. Each rank turns its own by your `zig_zag`, and the keys go around. Then every rank
# counts its positions from 0 instead, and no error is raised:


# %% tags=["nbval-check-output"]
# %%ranks
from manyhands.gpt.llama import rotated, rotation
from manyhands.gpt.config import GPTConfig

llama = GPTConfig(vocab_size=len(corpus.vocab), n_embd=H * K, n_head=H, style="llama")


def turned(x_K, at):
    """One vector at each of the positions [s], turned as the trainer's Llama turns it: [s, K]."""
    return rotated(x_K.expand(1, len(at), 1, K), rotation(llama, at.to(device), x_K.dtype))[0, :, 0]


q_K, k_K = normal(30, K), normal(31, K)
by_distance = turned(q_K, torch.arange(1 - T, T)) @ turned(k_K, torch.zeros(1))[0]  # 1 - T to T - 1, from a key at 0
at = [torch.as_tensor(zig_zag(T, c, r)).to(device) for r in range(c)]
wanted_sT = by_distance[at[me][:, None] - torch.cat(at) + T - 1]
for name, places in (("by zig_zag", at), ("from 0 on each rank", [torch.arange(T // c)] * c)):
    scores_sT = turned(q_K, places[me]) @ torch.cat([turned(k_K, there) for there in places]).T
    right = ((scores_sT - wanted_sT).abs() < 1e-4).double().mean().item()
    assert right == 1 or places is not at
    say(f"positions {name}: {100 * right:.0f} % of my scores are those of their distance")

# %% [markdown]
# ## Lab: the library's ring (MORE, 2 min)
#
# Within PyTorch's `context_parallel`, `F.scaled_dot_product_attention` runs on several ranks, in zig-zag by default.
# Three things matter in torch 2.13. It is a *prototype*: its source calls it a legacy API, to be deprecated. It supports
# attention kernels of CUDA only, so it does not run on a CPU. And by default it is **no ring**: it all-gathers keys and
# values, so every rank needs memory for all of them. Ask for the ring:
#
# ```python
# from torch.distributed.tensor.experimental import context_parallel
# from torch.distributed.tensor.experimental._context_parallel import set_rotate_method
#
# set_rotate_method("alltoall")  # the default is "allgather"
# with context_parallel(mesh["shared"], buffers=[x, targets], buffer_seq_dims=[1, 1]):
#     ...  # the buffers are cut here, in place, and whole again afterwards
# ```
#
# Its successor is `_context_parallel_shard` in the same module, private still.
# [torchtitan](https://github.com/pytorch/torchtitan/blob/2fc04c6f6101a0f8f5b8d1f7c5d45f592777f59a/torchtitan/distributed/context_parallel.py)
# uses it, also with `FlexAttention`, for which there is no ring yet.
#
# The all-gather is what Llama 3 does, too. With GQA and contexts that fit, it is a good choice; but know which one you have.

# %% [markdown]
# ## Lab: Ulysses trades positions for heads (MORE, 10 min)
#
# Heads do not look at each other. So before attention, trade: give away *your positions* of the other ranks'
# heads, and get *all positions* of your own heads. It takes one all-to-all each for q, k and v, then any attention
# kernel, unchanged, and one all-to-all back. This is DeepSpeed-[Ulysses](../assets/glossary.md#ulysses) ([Jacobs et al.
# 2023](https://arxiv.org/abs/2309.14509)).
#
# ![A grid of positions by heads on four ranks: before the all-to-all each rank has some rows (positions), after it some columns
# (heads)](../assets/09_ulysses.svg)
#
# **Predict.** On four ranks every query head has its own KV head. How many numbers does a rank send in forward, in
# units of B·H·s·K? The ring sends 2(c - 1) = 6. And if 16 query heads share a KV head, where the ring sends 0.375?
#
# <details><summary>Answer</summary>
#
# Four all-to-alls; in each a rank keeps a c-th: 4 · 3/4 = **3**. In general 4(c - 1)/c, which stays below 4 while the
# ring's grows with c. With 16 query heads per KV head, keys and values shrink, but queries and output do not:
# (2 + 2/16) · 3/4 = **1.59**, four times as much as the ring. So "Ulysses sends less" is right without GQA, and wrong
# here.
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
# The way back is the inverse of `to_heads`. Both only move numbers, so each is the backward of the other:


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
def trade_and_attend(q, k, v):
    """Attention of this rank's positions, heads on their ranks meanwhile."""
    in_heads = [Trade.apply(x, to_heads, to_positions, group) for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*in_heads, is_causal=True, enable_gqa=True)
    return Trade.apply(out, to_positions, to_heads, group)


full = [x.clone().requires_grad_() for x in (q_BHTK, k_BHTK, v_BHTK)]
F.scaled_dot_product_attention(*full, is_causal=True).backward(v_out)
mine = [x.chunk(c, 2)[me].clone().requires_grad_() for x in (q_BHTK, k_BHTK, v_BHTK)]
with wire.watch() as seen:
    out = trade_and_attend(*mine)
out.backward(v_out.chunk(c, 2)[me])
apart = (out - whole.chunk(c, 2)[me]).abs().max().item()
pairs = zip(mine, full, strict=True)
apart = max([apart, *((x.grad - y.grad.chunk(c, 2)[me]).abs().max().item() for x, y in pairs)])
assert apart < 1e-10 and seen.count("all_to_all") == 4
if rank == 0:
    say(f"Ulysses: output and gradients equal to 1e-10; {seen.count('all_to_all')} all-to-alls forward")
    sent = seen.payload_bytes("all_to_all") * (c - 1) // c
    say(f"sent {sent / mine[0].nbytes:g} units; a ring sends {2 * (c - 1)}")

# %% [markdown]
# Now with GQA: 16c query heads share c KV heads, so that each rank gets a KV head.

# %%
# %%ranks
q_64, kv_4 = normal(60, 1, 16 * c, T, K), [normal(61 + i, 1, c, T, K) for i in range(2)]
mine = [x.chunk(c, 2)[me].clone() for x in (q_64, *kv_4)]
with wire.watch() as seen:
    out = trade_and_attend(*mine)
wanted = F.scaled_dot_product_attention(q_64, *kv_4, is_causal=True, enable_gqa=True).chunk(c, 2)[me]
sent = seen.payload_bytes("all_to_all") * (c - 1) / c / mine[0].nbytes
assert (out - wanted).abs().max() < 1e-10 and sent == (2 + 2 / 16) * (c - 1) / c
if rank == 0:
    say(f"with GQA 16:1 Ulysses sends {sent:.2f} units, a ring {2 * (c - 1) / 16:g}")

# %% [markdown]
# ## Lab: one product for all experts (MORE, 4 min)
#
# The loop over experts starts two small products for each. On a GPU 64 experts are 128 launches. Trainers sort the rows by
# expert and make *one* call, a grouped matrix product: `F.grouped_mm` takes all rows, all weights and the place where each
# expert's rows end. It does not support float64, so this cell compares in float32 (in bfloat16 on GPUs).


# %%
# %%ranks
def run_grouped(rows_RD, arriving_ne, up_eDM, down_eMD):
    """As run_experts: sort by expert, two grouped products, and back to the order in which rows came."""
    n, e = arriving_ne.shape
    which_R = torch.arange(e, device=rows_RD.device).repeat(n).repeat_interleave(arriving_ne.flatten())
    order_R = which_R.argsort(stable=True)
    ends_e = arriving_ne.sum(0).cumsum(0).to(torch.int32)
    hidden_RM = F.gelu(F.grouped_mm(rows_RD[order_R], up_eDM, offs=ends_e))
    return F.grouped_mm(hidden_RM, down_eMD, offs=ends_e)[order_R.argsort()]


# %%
# %%ranks
dtype, close = (torch.float32, 1e-5) if device.type == "cpu" else (torch.bfloat16, 5e-2)
_, experts_Nk, _ = route(x_ND, router_ED, k_experts)
leaving, arriving, arriving_ne = split_sizes(experts_Nk, E, group)
rows = Exchange.apply(x_ND[experts_Nk.flatten().argsort(stable=True) // k_experts], leaving, arriving, group)
given = [w.to(dtype) for w in (up_EDM[held], down_EMD[held])]
loop, grouped = (run(rows.to(dtype), arriving_ne, *given) for run in (run_experts, run_grouped))
apart = ((loop - grouped).abs().max() / loop.abs().max()).item()
assert apart < close, f"{apart:.1e} away"
say(f"{len(rows)} rows, {e} experts: {2 * e} products in the loop, 2 grouped; results agree to {close:g}")

# %% [markdown]
# ## Lab: a router of today (MORE, 6 min)
#
# [DeepSeek-V3](https://arxiv.org/abs/2412.19437) differs from our router in four things:
#
# - **sigmoid gates**: each expert's score is a sigmoid, so experts do not compete within the score. The scores of the chosen
#   ones are scaled to sum to 1;
# - a **bias** chooses (build H);
# - a **shared expert** sees every token. It is on every rank, so it needs no exchange, and it can compute while rows travel;
# - **node-limited dispatch**: the number of nodes that a token visits has a limit. First the nodes are chosen, by the
#   sum of the best scores of their experts, and then the experts on these nodes.
#
# **Predict.** 32 experts on 8 nodes, and each token chooses 8. About how many nodes does it visit without a limit?
#
# <details><summary>Answer</summary>
#
# A node with 4 of 32 experts is missed with a chance of (28·27·…·21)/(32·31·…·25) = 0.30 if all experts are equally
# likely. So a token visits about 8 · 0.70 = **5.6** nodes.
#
# </details>


# %%
# %%ranks
def limited(scores_NE, k, nodes, most):
    """Experts [N, k] of at most `most` nodes: those with the largest sum of their k/most best scores."""
    of_node_Nne = scores_NE.unflatten(1, (nodes, -1))
    best_Nn = of_node_Nne.topk(k // most, dim=-1).values.sum(-1)
    allowed = torch.zeros_like(best_Nn).scatter(1, best_Nn.topk(most, dim=-1).indices, 1).bool()
    return of_node_Nne.masked_fill(~allowed[..., None], -1).flatten(1).topk(k, dim=-1).indices


# %%
# %%ranks
scores_NE = (x_ND @ (0.3 * normal(70, 32, D)).T).sigmoid()
free, most_4, most_2 = scores_NE.topk(8).indices, limited(scores_NE, 8, 8, 4), limited(scores_NE, 8, 8, 2)
for name, experts_Nk in {"no limit": free, "at most 4": most_4, "at most 2": most_2}.items():
    visited = F.one_hot(experts_Nk // 4, 8).amax(1).sum(1).double().mean()
    kept_score = scores_NE.gather(1, experts_Nk).sum() / scores_NE.gather(1, free).sum()
    if rank == 0:
        say(f"{name}: {visited:.2f} nodes per token; its experts have {kept_score:.1%} of the best scores")

# %% [markdown]
# A row that goes to several experts of one node can cross the network once and be copied inside the node. So the slow
# network carries a row for each *node*, and the limit bounds it.

# %% [markdown]
# ## Exercises (MORE, 14 min)
#
# Each check runs your answer in a separate process group: you cannot break anything. Exercise 1 is above.
#
# ### Exercise 2: a balancing loss that does not depend on the number of ranks
#
# If each rank takes f from its own tokens, the mean over ranks of Σ fᵢ Pᵢ is not Σ (mean fᵢ)(mean Pᵢ). Write
# `global_balance(probs_NE, experts_Nk, group)`: E · Σ fᵢ Pᵢ over *all* ranks' tokens, the same number on every rank,
# with one all-reduce of at most 2E numbers. Gradients of the loss are *averaged* over the ranks. The average of this
# term's gradients must be the gradient of one process. All ranks have equally many tokens.
#
# You need one new trick: a tensor with the *value* of one and the *gradient* of another. `y - y.detach()` is zero, but
# its gradient is that of y. So `x.detach() + y - y.detach()` has the value of x and the gradient of y:

# %%
# %%ranks
x, y = torch.tensor(3.0, requires_grad=True), torch.tensor(5.0, requires_grad=True)
both = x.detach() + y - y.detach()
both.backward()
if rank == 0:
    say(f"value {both.item():g}, gradient of x {x.grad}, of y {y.grad:g}")


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
# Parts of unequal size cause trouble: the sizes must reach the host, and one rank can run out of memory. Some trainers
# give each expert a [**capacity**](../assets/glossary.md#capacity): at most C rows from each rank. The rest is
# *dropped*: for these tokens the expert adds nothing to the residual stream. Then all parts are equal. Write
# `kept(experts_Nk, E, capacity)`: a bool tensor [N, k], True for the choices that fit. Earlier tokens come first, and
# within a token its first choice. Use no loop over tokens: the check gives you 200,000.


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
# In the course's trainer `--parallel.context 4` is this ring in zig-zag order. The first command prints what would
# run, the second runs here. Then submit [lesson 04](04_first_job.ipynb)'s job with the same flags:
#
# ```bash
# python scripts/train.py --preset gpt-7b --ranks 64 --dry-run --parallel.context 4
# python scripts/launch.py --nproc 4 -- --preset nano --parallel.context 4
# ```
#
# `--parallel.expert 4` puts the experts on four of the data ranks, with the biases of Build H. The column `busiest` is
# the busiest expert's tokens divided by the mean:
#
# ```bash
# python scripts/launch.py --nproc 4 -- --preset shakespeare-moe --parallel.expert 4
# ```
#
# **What changes on GPUs.** An all-to-all is harder to hide than a ring: an expert cannot begin before its rows arrive.
# If you can, keep a group of experts inside a node.
#
# **What to look for**: equal step times on all context ranks; `busiest` close to 1; the norm of all gradients *unchanged*
# when you change the number of expert ranks.

# %% [markdown]
# ## Recap

# %%
# %%ranks
card(
    "Experts: sort by expert, tell the sizes, exchange, work, exchange back, add up with the gates.",
    "A layer moves 4k rows per token in a step, and all ranks wait for the one with the most rows.",
    "The exchange has summed the experts' gradients over ranks already: divide them by the number of ranks.",
    "A loss does not show wrong gradients under Adam: compare gradients with one process.",
    "Balance by a loss or by a bias that only chooses. Both have a price in loss: measure it.",
    figure="dispatch and combine on two ranks",
    command="python scripts/launch.py --nproc 4 -- --preset shakespeare-moe --parallel.expert 4",
)

# %% [markdown]
# Further reading is in [the handbook](../assets/handbook/09_context_and_experts.md).

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
