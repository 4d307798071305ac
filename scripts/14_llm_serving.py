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
# # 14 Serving: a cache, and two ranks that share the work
#
# **45 minutes** for the sections marked CORE, 115 with those marked MORE.
#
# A served model reads a prompt, then writes one token after another. You build the cache that makes this cheap, in
# three builds. Then rank 0 reads the prompt and sends the cache, and rank 1 writes.
#
# After this lesson **you can**
# - build a KV cache, and prove that it changes nothing;
# - predict its bytes;
# - say what takes the time of a token: weights, caches or arithmetic;
# - split prefill and decode over two ranks, and count the bytes between them.
#
# **You need** attention from [lesson 01](01_one_device.ipynb), and send and receive from [lesson
# 02](02_collectives.ipynb).
#
# **New here:** [kv cache](../assets/glossary.md#kv-cache), [prefill and
# decode](../assets/glossary.md#prefill-and-decode), [arithmetic
# intensity](../assets/glossary.md#arithmetic-intensity), and in MORE [sampling](../assets/glossary.md#sampling),
# [continuous batching](../assets/glossary.md#continuous-batching), [paged cache](../assets/glossary.md#paged-cache),
# [prefix reuse](../assets/glossary.md#prefix-reuse) and [speculative
# decoding](../assets/glossary.md#speculative-decoding). Tables are in [the
# handbook](../assets/handbook/14_llm_serving.md).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 2, all positions again 4, the cache 15, what a token waits for 12, two ranks 11, card 1. Builds A
# to F take about four minutes each and are in these numbers.
#
# *Say:* training reads a text once, all positions at a time. Serving writes it, one position at a time. So the weights
# and the cache are read for every single token.
#
# *Three usual mistakes:* thinking that the cache holds queries; counting query heads instead of KV heads; thinking that a
# full server is busy computing.
#
# *When late:* give solutions C and E, keep A, B and F.
#
# *Ask the room:* "Two users send the same 2,000 words of instructions, then a question each. What must be computed twice?"
# (Only the questions and the answers: keys and values depend on nothing that comes later.)
#
# </details>

# %% tags=["parameters"]
n_ranks = 2  # processes; in a script the launcher decides
texts = 4  # texts that each rank writes for each number of draft tokens, at least 2
draws = 3000  # tokens that are drawn to compare distributions, 500 to 100000

# %% [markdown]
# ## Start (CORE, 2 min)
#
# The first cell starts two ranks.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("14_llm_serving", globals())

# %%
# %%ranks
import copy
import math
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands import ____, Metrics, card, compare, join, leave, say, show
from manyhands.checks import llm_serving as checks
from manyhands.measure import wire

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device

# %% [markdown]
# The model comes with the course: a GPT with 5 layers and width 256, trained on 36 of Shakespeare's plays
# ([how](../assets/models/README.md)). Its tokens are characters. Each rank loads it in float64, so that we can
# compare to 1e-10.
#
# Letters at the end of a name are its shape: `B` sequences, `H` heads, `T` new positions, `S` all positions so far,
# `E` numbers per head, `V` tokens in the vocabulary.
#
# Expect lines in the style of Shakespeare:


# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.checkpoint.export import shipped_model, tokenizer_of
from manyhands.data.corpus import load_corpus
from manyhands.gpt.sampling import Sampling, uniforms
from manyhands.launch import recorded_runs
from manyhands.measure.timing import synchronise
from manyhands.serve.decoder import run
from manyhands.serve.engine import Engine, generate

corpus = load_corpus(ranks)
torch.set_grad_enabled(False)  # nothing is trained here
target, about = shipped_model("plays")
target = target.to(device).double()
config, tokenizer = target.config, tokenizer_of(about)
V, N, H, D, T = config.vocab_size, config.n_layer, config.n_head, config.n_embd, 64  # T: of the windows we measure on
metrics = Metrics(ranks, corpus, {"texts": texts, "draws": draws})
held_out = "".join(c for c in corpus.text[-100_000:] if c in set(tokenizer.vocab))  # characters that the model knows
val_ids = tokenizer.encode(held_out).to(device)
BANDWIDTH, PEAK = 3.35e12, 989e12  # an H100: bytes/s, and FLOP/s in bf16 without sparsity

# %%
# %%ranks
prompt_BT = tokenizer.encode("ROMEO:\n")[None].to(device)
written = tokenizer.decode(generate(target, prompt_BT, 200, Sampling(0.8), seed=1)[0])
if rank == 0:
    say(f"{target.num_params():,} parameters, up to {config.block_size} positions; it writes:\n{written}")

# %% [markdown]
# ## Every token, all positions again (CORE, 4 min)
#
# The simplest way to write: compute all positions of the text, append the most likely next token, and repeat.


# %%
# %%ranks
def greedy(model, prompt, n):
    """The ids of `prompt` and n more, each the likeliest next one."""
    ids = list(prompt)
    for _ in range(n):
        logits_BTV, _ = model(torch.tensor([ids], device=device))
        ids.append(int(logits_BTV[0, -1].argmax()))
    return ids


# %% jupyter={"source_hidden": true}
# %%ranks
def counted(model, write):
    """(what write() returns, positions that the model computes for it, seconds)"""
    positions = []
    hook = model.tokens.register_forward_hook(lambda _, args, out: positions.append(args[0].numel()))
    began_s = time.perf_counter()
    written = write()
    synchronise(device)
    took_s = time.perf_counter() - began_s
    hook.remove()
    return written, sum(positions), took_s


begin = tokenizer.encode("\n").tolist()
greedy(target, begin, 2)  # warm
plain, plain_positions, plain_s = counted(target, lambda: greedy(target, begin, 63))
if rank == 0:
    say(f"63 tokens after one: {plain_positions:,} positions computed, {plain_positions / 63:g} for each token")

# %% [markdown]
# 1 + 2 + ... + 63 = 2,016. The model computes 32 positions for each new token, and uses the logits of one.
#
# **Predict.** To write 4,000 tokens after one, how many positions does it compute for each token?

# %%
# %%ranks
guess_positions = ____  # your turn: type a number

# %% jupyter={"source_hidden": true}
# %%ranks
compare("positions for each of 4,000 tokens", "guess_positions", sum(range(1, 4001)) / 4000)

# %% [markdown]
# The work grows with the square of the text's length. **The goal: compute each position once.**

# %% [markdown]
# ## Keep keys and values (CORE, 15 min)
#
# In a causal model a position attends only to itself and earlier positions. So its keys and values do not change when
# more text is written. Store them: this is the [**KV cache**](../assets/glossary.md#kv-cache).
#
# ![Without a cache each new token computes all positions, a triangle; with a cache each position is computed once, a
# diagonal, and looks back at stored keys and values](../assets/14_cache.svg)
#
# ### Build A: remember
#
# `cache` is a dict {layer: (keys, values)}, empty at first. `k_BHTE` and `v_BHTE` belong to T new positions. If the
# cache has this layer, put its keys and values before the new ones, along dim 2. Then store the result.


# %%
# %%ranks
def remember(cache, layer, k_BHTE, v_BHTE):
    """(keys, values) of all positions so far, which the cache holds afterwards."""
    if layer in cache:
        ____  # the stored ones first, then the new ones
    ____  # store
    return k_BHTE, v_BHTE


checks.remember(remember, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution A</summary>
#
# ```python
# def remember(cache, layer, k_BHTE, v_BHTE):
#     if layer in cache:
#         old_k, old_v = cache[layer]
#         k_BHTE = torch.cat([old_k, k_BHTE], dim=2)
#         v_BHTE = torch.cat([old_v, v_BHTE], dim=2)
#     cache[layer] = k_BHTE, v_BHTE
#     return k_BHTE, v_BHTE
# ```
#
# </details>

# %% [markdown]
# ### Build B: who may look where
#
# There are T new queries and S keys, and S ≥ T. Query t is at position S - T + t, and may attend to keys up to this
# position. `mask_TS` is bool [T, S], True where a query may attend. Return `F.scaled_dot_product_attention(q, k, v,
# attn_mask=mask_TS)`. (`is_causal=True` is wrong here: it puts query 0 at key 0.)


# %%
# %%ranks
def attend(cache, layer, q_BHTE, k_BHTE, v_BHTE):
    """Attention of the new queries over all positions so far [B, H, T, E]."""
    k_BHSE, v_BHSE = remember(cache, layer, k_BHTE, v_BHTE)
    T, S = q_BHTE.shape[2], k_BHSE.shape[2]
    mask_TS = ____
    return ____


checks.attend(attend, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def attend(cache, layer, q_BHTE, k_BHTE, v_BHTE):
#     k_BHSE, v_BHSE = remember(cache, layer, k_BHTE, v_BHTE)
#     T, S = q_BHTE.shape[2], k_BHSE.shape[2]
#     mask_TS = torch.ones(T, S, dtype=torch.bool, device=q_BHTE.device).tril(S - T)
#     return F.scaled_dot_product_attention(q_BHTE, k_BHSE, v_BHSE, attn_mask=mask_TS)
# ```
#
# </details>

# %% [markdown]
# Your mask, when three positions arrive, then one, then two:

# %% jupyter={"source_hidden": true}
# %%ranks
if rank == 0:
    cache, S, rows = {}, 0, []
    for new in (3, 1, 2):
        v_11TE = torch.eye(6, dtype=torch.float64, device=device)[S : S + new][None, None]  # value s is unit vector s
        seen_TE = attend(cache, 0, *(torch.zeros_like(v_11TE) for _ in range(2)), v_11TE)[0, 0] > 0
        rows += [
            f"query {S + t}: " + "".join("█" if one else "·" for one in row) for t, row in enumerate(seen_TE.tolist())
        ]
        S += new
    say("\n".join(rows))

# %% [markdown]
# ### Build C: prefill, then decode
#
# With a cache, writing has two phases. [**Prefill**](../assets/glossary.md#prefill-and-decode) computes all positions
# of the prompt in one call. **Decode** computes one position per call.
#
# `step(new, start)` computes the list of ids `new` at positions start, start + 1, ..., puts their keys and values
# into the cache, and returns the next id. `known` is how many positions the cache holds. In each turn of the loop,
# call `step` with the ids that the cache does not hold yet, and update `known`.


# %%
# %%ranks
def continued(step, ids, n, known=0):
    """The ids and n more, each position computed once."""
    ids = list(ids)
    for _ in range(n):
        token = ____  # compute what is not known
        known = ____
        ids.append(token)
    return ids


checks.continued(continued, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution C</summary>
#
# ```python
# def continued(step, ids, n, known=0):
#     """The ids and n more, each position computed once."""
#     ids = list(ids)
#     for _ in range(n):
#         token = step(ids[known:], known)
#         known = len(ids)
#         ids.append(token)
#     return ids
# ```
#
# </details>

# %% [markdown]
# `greedy_step(model, cache)` (folded) returns such a `step`: the model's forward with your `attend` in each layer.
#
# **Predict.** With the cache, 63 positions are computed instead of 2,016, 32 times fewer. How many times faster is it
# here?

# %%
# %%ranks
guess_faster = ____  # your turn: type a number


# %% jupyter={"source_hidden": true}
# %%ranks
def forward(model, ids_BT, start, attend):
    """Logits [B, T, V] of positions start, start + 1, ...; `attend(layer, q, k, v)` knows what lies before them."""
    positions_T = torch.arange(start, start + ids_BT.shape[1], device=ids_BT.device)
    return run(model, ids_BT, positions_T, attend)


def greedy_step(model, cache):
    """step(new, start): compute these ids with this cache, and return the likeliest next one."""

    def step(new, start):
        logits_BTV = forward(model, torch.tensor([new], device=device), start, partial(attend, cache))
        return int(logits_BTV[0, -1].argmax())

    return step


def call_ms(T):
    """Milliseconds of a call on T positions without a cache, the least of five."""
    ids_BT = val_ids[:T][None]
    return 1e3 * min(counted(target, lambda: forward(target, ids_BT, 0, partial(attend, {})))[2] for _ in range(5))


begin = tokenizer.encode("\n").tolist()
continued(greedy_step(target, {}), begin, 2)  # warm
plain, plain_positions, plain_s = counted(target, lambda: greedy(target, begin, 63))
found, positions, took_s = counted(target, lambda: continued(greedy_step(target, {}), begin, 63))
assert found == plain, "another text"
assert (plain_positions, positions) == (2016, 63)
calls_ms = {T: call_ms(T) for T in (1, 16, 64)}
metrics.measured(plain_s=plain_s, cached_s=took_s, call_ms={str(T): ms for T, ms in calls_ms.items()})

# are the logits, computed in pieces, those of the model's own forward? And the bytes of the cache?
ids_BT, cache, pieces = val_ids[: 3 * T].view(3, T), {}, []
for piece in ids_BT.split([40, 1, 1, 22], dim=1):  # a prefill, two decodes, and a second prompt
    pieces.append(forward(target, piece, sum(logits.shape[1] for logits in pieces), partial(attend, cache)))
assert (torch.cat(pieces, dim=1) - target(ids_BT)[0]).abs().max() < 1e-10
num_bytes = sum(part.nbytes for pair in cache.values() for part in pair)
assert num_bytes == 2 * N * 3 * T * D * 8

compare("times faster, measured", "guess_faster", round(plain_s / took_s, 1))
if rank == 0:
    say(f"the same text, {positions} positions instead of {plain_positions:,}; logits equal to 1e-10:")
    say(tokenizer.decode(found))
    say("one call: " + ", ".join(f"{ms:.2f} ms for {T} position{'s' * (T > 1)}" for T, ms in calls_ms.items()))

# %% [markdown]
# Why not 32? Both ways make **63 calls**, and each call has a fixed cost: Python starts every operation of every
# layer, and each operation reads its weights from memory. The last line shows it: a call on 64 positions takes far
# less time than 64 calls on one. On a GPU, reading the weights is almost all of the time. The rest of this lesson is
# about that.
#
# (Without random draws a model soon repeats itself.)

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the cache</summary>
#
# *Usual mistake:* `is_causal=True` with T = 1: the one query is aligned with key 0, and sees nothing else. The check says so. *Ask:*
# "why may a prefill use it?" (T = S, so both alignments are the same.)
#
# </details>

# %% [markdown]
# ## What does a token wait for? (CORE, 12 min)
#
# A cache takes memory, and each decode step reads all of it. In [grouped-query attention](../assets/glossary.md#gqa)
# several query heads share the keys and values of one **KV head**, and only KV heads are stored.
#
# ### Build D: the bytes of a cache
#
# There are N layers, H query heads, `KV` KV heads, E numbers per head, S positions, and `size` bytes per number.
# Return the bytes of the keys and values of one sequence.


# %%
# %%ranks
def cache_bytes(N, H, KV, E, S, size=2):
    """Bytes of the keys and values of one sequence."""
    return ____


checks.cache_bytes(cache_bytes, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution D</summary>
#
# ```python
# def cache_bytes(N, H, KV, E, S, size=2):
#     return 2 * N * KV * E * S * size
# ```
#
# </details>

# %% [markdown]
# Now the time of a call. It reads the weights once (2 bytes each), and the `caches` bytes of all users. It computes 2
# FLOPs per weight for each position. Reading and arithmetic happen at the same time, so the call takes as long as the
# slower of the two. (Attention's own FLOPs are left out.) An H100 has `BANDWIDTH` = 3.35e12 bytes/s and `PEAK` =
# 989e12 FLOP/s.
#
# ### Build E: the seconds of a call


# %%
# %%ranks
def call_s(P, positions, caches):
    """Seconds of a call on so many positions; P weights, `caches` bytes of all caches together."""
    memory_s = ____
    arithmetic_s = ____
    return ____


checks.call_s(call_s, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution E</summary>
#
# ```python
# def call_s(P, positions, caches):
#     memory_s = (2 * P + caches) / BANDWIDTH
#     arithmetic_s = 2 * P * positions / PEAK
#     return max(memory_s, arithmetic_s)
# ```
#
# </details>

# %% [markdown]
# The FLOPs for each byte that is read are the [**arithmetic intensity**](../assets/glossary.md#arithmetic-intensity).
# At 989 / 3.35 = 295 FLOPs per byte, reading and arithmetic take the same time. Without caches, a call on 295
# positions reaches that. But each user also has a cache, which is read for this user only.
#
# ![FLOP/s against FLOPs per byte, on log scales: a slope up to 295, then flat; 119 users with 8 KV heads reach
# 24](../assets/14_roofline.svg)
#
# Fill an H100 (80 GB) with users who have 4,096 positions each, until no more fit:

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.lessons import llm_serving as lesson

MODELS = {  # weights, layers, query heads, KV heads, numbers per head
    "Llama 2 7B, 32 KV heads": (6.74e9, 32, 32, 32, 128),
    "Llama 3 8B, 8 KV heads": (8.03e9, 32, 32, 8, 128),
}
curves, full = {}, {}
for name, (P, *shape) in MODELS.items():
    each = cache_bytes(*shape, 4096)
    users = int((80e9 - 2 * P) // each)
    curves[name] = 2 * P / 1e9, each / 1e9, users  # GB
    step_s, busy_s = call_s(P, users, users * each), 2 * P * users / PEAK
    full[name] = users, step_s
    if rank == 0:
        ratio = users * each / (2 * P)
        say(
            f"{name}: {users} users; caches are {ratio:.1f} times the weights; {1e3 * step_s:.0f} ms per step, "
            f"{users / step_s:,.0f} tokens/s; arithmetic busy {busy_s / step_s:.0%}"
        )
mla = (2 * 128 * 128) / (512 + 64)  # DeepSeek-V3, numbers per layer and position: 128 heads, or what MLA stores
if rank == 0:
    say(f"MLA stores {mla:.0f} times fewer bytes than the same heads without it")
metrics.exact(full=full, mla=mla)
if rank == 0:
    published = recorded_runs.published("14_serving")
    figure = lesson.draw_reads_and_published(curves, published, "read per step, caches of 4,096")
    show(figure, "reads_and_published", "left, bytes read per step by users; right, published latencies by users")
    _, gaps, rates = (dict(one["points"]) for one in published)
    say(f"published, 250 users: {gaps[250] / 1e3 * rates[250]:.0f} texts are written at a time, the others wait")

# %% [markdown]
# **A full server spends its time on reading.** Memory is full long before 295 users, and most bytes that are read are
# caches. With four times fewer KV heads, four times as many users fit. DeepSeek's MLA, multi-head
# latent attention ([2024](https://arxiv.org/abs/2412.19437)), stores one short vector for all heads.
#
# The right panel is a real server ([source](https://docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance)). Its
# tokens per second, times its seconds per token, are the 86 texts that it writes at the same time (Little's law).
# Between 50 and 100 users it becomes full. With more users the time per token stays the same, but the **time to first
# token** grows fast, because new users wait in a queue.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: what a token waits for</summary>
#
# 989 TFLOP/s is dense, as in lesson 01; the data sheet's 1,979 is with sparsity. *Ask:* "why does a provider charge more for
# output than for input?" (Input is prefill, at the flat part of the roof.) *Ask:* "what would an 8-bit cache change?" (Twice as
# many users, and the same time per step: the server is full again.)
#
# </details>

# %% [markdown]
# ## Rank 0 prefills, rank 1 decodes (CORE, 11 min)
#
# Llama 3 8B decodes for 32 users with 4,096 positions each. A step takes 10 ms. Now somebody sends a prompt of 8,192
# tokens, and the server prefills it in one call.
#
# **Predict.** For how many milliseconds do the other users get no token? (Use Build E; the model has 8e9 weights.)

# %%
# %%ranks
guess_pause = ____  # your turn: type a number

# %% jupyter={"source_hidden": true}
# %%ranks
P, shape, users, S, chunk = 8.03e9, (32, 32, 8, 128), 32, 8192, 512
others = users * cache_bytes(*shape, 4096)
alone_s, step_s = call_s(P, S, 0), call_s(P, users, others)
whole_s = call_s(P, S + users, others)
chunks_s = [call_s(P, chunk + users, others + cache_bytes(*shape, done)) for done in range(0, S, chunk)]
travels_s = cache_bytes(*shape, S) / 50e9  # one InfiniBand link of 400 Gb/s
ways = {
    "in one call": (whole_s, whole_s),
    f"in {len(chunks_s)} chunks of {chunk}": (max(chunks_s), sum(chunks_s)),
    "on another GPU": (step_s, alone_s + travels_s),
}
said = "{:19} longest gap of the others {:4.0f} ms, time to first token {:4.0f} ms"
lines = [said.format(name, 1e3 * pause_s, 1e3 * first_s) for name, (pause_s, first_s) in ways.items()]
compare("the pause", "guess_pause", round(1e3 * float(whole_s)), "ms", lines)
metrics.exact(ways=ways)

# %% [markdown]
# There are two cures. **Chunked prefill** adds 512 positions of the prompt to each decode step. The step hardly gets
# longer, because its arithmetic units waited for memory anyway. The other cure is to prefill on **another GPU** and
# send the cache. (These are times at peak rates.)
#
# ![Three time lines: a prefill in one call leaves a gap between the tokens of others; in chunks, or on another rank,
# there is none](../assets/14_two_ranks.svg)
#
# ### Build F: hand the cache over
#
# Your ranks form pairs: 0 and 1, 2 and 3. In a pair, rank `src` prefills and rank `dst` decodes. Both call
# `hand_over`. Rank `src` stacks the keys and values of all layers, in the order of the layers, into one tensor of
# shape [N, 2, B, H, S, E], and sends it with **one** `dist.send`. Rank `dst` receives it into `packed`, and makes a
# cache like that of Build A. (A rank without a partner does both itself.)


# %%
# %%ranks
def hand_over(cache, shape, src, dst):
    """Return the cache of rank src on rank dst. shape: [N, 2, B, H, S, E]."""
    if rank == src:
        ____  # stack, and send to dst
    if rank == dst:
        packed = torch.empty(shape, dtype=torch.float64, device=device)
        ____  # receive from src
        cache = ____  # {layer: (keys, values)}
    return cache


checks.hand_over(hand_over, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution F</summary>
#
# ```python
# def hand_over(cache, shape, src, dst):
#     if rank == src:
#         packed = torch.stack([torch.stack(cache[layer]) for layer in range(shape[0])])
#         dist.send(packed, dst)
#     if rank == dst:
#         packed = torch.empty(shape, dtype=torch.float64, device=device)
#         dist.recv(packed, src)
#         cache = {layer: (keys, values) for layer, (keys, values) in enumerate(packed)}
#     return cache
# ```
#
# </details>

# %% [markdown]
# Now rank `src` prefills and rank `dst` decodes. The prefill also returns the first token, so it is sent, too.

# %%
# %%ranks
src, dst = rank - rank % 2, rank - rank % 2 + 1
paired = dst < world_size
prompt, n, cache = val_ids[40 * src : 40 * src + 40].tolist(), 24, {}
shape = (N, 2, 1, H, 40, D // H)
step = greedy_step(target, cache)
with wire.watch() as seen:
    if rank == src:
        text = continued(step, prompt, 1)  # prefill
        first = torch.tensor(text[-1:], device=device)
    if rank == src and paired:
        hand_over(cache, shape, src, dst)
        dist.send(first, dst)
    if rank == dst:
        cache = hand_over({}, shape, src, dst)
        dist.recv(first := torch.empty(1, dtype=torch.int64, device=device), src)
    if rank == dst or not paired:
        text = continued(greedy_step(target, cache), prompt + first.tolist(), n - 1, known=40)  # decode

# %% jupyter={"source_hidden": true}
# %%ranks
assert text == greedy(target, prompt, len(text) - 40), "the pair writes another text"
wanted = cache_bytes(N, H, H, D // H, 40, size=8) + 8
assert seen.sent_bytes == (wanted if paired and rank == src else 0)
if not paired:
    say("no partner: prefilled 40 positions and decoded 23 myself, nothing was sent")
elif rank == src:
    say(f"prefilled 40 positions, sent {seen.sent_bytes:,} bytes: your formula's {wanted - 8:,}, and 8 for a token")
else:
    say(f"received, decoded {n - 1} positions: the same {n} tokens as one rank alone, {seen.sent_bytes} bytes sent")
    say(f"    {tokenizer.decode(prompt)!r} goes on: {tokenizer.decode(text[40:])!r}")
metrics.exact(hand_over_bytes=seen.sent_bytes)

# %% [markdown]
# In large services some GPUs prefill and others decode; how many of each depends on the requests ([DistServe,
# 2024](https://arxiv.org/abs/2401.09670)).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: two ranks</summary>
#
# *Ask:* "which of the two sides wants more memory, which more FLOP/s?" (Decode keeps the caches. Prefill computes.) *Ask:*
# "when do chunks win?" (Where no fast link lies between the two, or where there is one GPU.) The two cures go together.
#
# </details>

# %% [markdown]
# ## Draw instead of taking the likeliest (MORE, 11 min)
#
# A model returns logits; softmax turns them into probabilities; the next token is drawn at random from those. That is
# [**sampling**](../assets/glossary.md#sampling). Three knobs change the probabilities. Take four tokens with
# probabilities 0.4, 0.3, 0.2 and 0.1:
#
# - **temperature** divides the logits before softmax: below 1 likely tokens get likelier, and towards 0 only the likeliest is left;
# - **top-k** keeps the k likeliest tokens;
# - **top-p** keeps the *fewest* likeliest tokens whose probabilities together **reach** p (Holtzman et al. 2020).
#
# The kept probabilities are divided by their sum.
#
# ![Four bars 0.4, 0.3, 0.2, 0.1: temperature 0.5 makes them steeper; top-k 2 keeps two; top-p 0.6 keeps two, the second of which
# crosses the line](../assets/14_sampling.svg)
#
# **Predict.** Which tokens does top-p = 0.75 keep, and with which probabilities? And top-p = 0.7?
#
# <details><summary>Answer</summary>
#
# The first two have 0.7 together, which does not reach 0.75. With the third it is 0.9: the token that crosses the
# line is kept. This gives 4/9, 3/9 and 2/9. With p = 0.7 only two are kept: 0.4 + 0.3 reach it exactly, which gives
# 4/7 and 3/7.
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
p_V = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
sharper_V = torch.softmax(p_V.log() / 0.5, -1)
say(f"temperature 0.5: {[round(p, 3) for p in sharper_V.tolist()]}")
for name, number in (("top-k 2, or top-p 0.7", 2), ("top-k 3, or top-p 0.75", 3)):
    kept_V = p_V * (torch.arange(4) < number)
    say(f"{name}: {[round(p, 3) for p in (kept_V / kept_V.sum()).tolist()]}")

# %% [markdown]
# **Why cut?** Each unlikely token is rare, but there are many of them. 50,000 tokens with a probability of 0.000002 each add up
# to 0.1: one draw in ten is one of them, and the rest of the text has to follow from it.
#
# ### Build G: what is kept
#
# Write `kept(p_V, top_k, top_p)`. It returns probabilities in the order of the tokens, with sum 1. Apply top-k first
# (None keeps all), then top-p to what is left: the kept tokens must reach `top_p` times the sum of *what is left*.
# `p_V.sort(descending=True)` gives the sorted values and their places; `torch.zeros_like(p_V).scatter(0, places_V,
# sorted_V)` puts them back. Keep the token that crosses the line.


# %%
# %%ranks
def kept(p_V, top_k=None, top_p=1.0):
    """Probabilities [V] of the tokens that are kept, zero elsewhere."""
    raise NotImplementedError  # your turn


checks.kept(kept, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution G</summary>
#
# ```python
# def kept(p_V, top_k=None, top_p=1.0):
#     sorted_V, places_V = p_V.sort(descending=True)
#     if top_k is not None:
#         sorted_V[top_k:] = 0
#     before_V = sorted_V.cumsum(0) - sorted_V  # what the likelier ones have together
#     if top_p < 1:
#         sorted_V[before_V >= top_p * sorted_V.sum()] = 0
#     return torch.zeros_like(p_V).scatter(0, places_V, sorted_V / sorted_V.sum())
# ```
#
# </details>

# %% [markdown]
# To draw, take a random number u in [0, 1) and the first token at which the running sum of probabilities exceeds u.
# We draw one u per place in the text beforehand, so that a text does not depend on the other texts that are served.


# %%
# %%ranks
def drawn(p_V, u):
    """The first token at which the running sum of p exceeds u."""
    return int(torch.searchsorted(p_V.cumsum(0), u * p_V.sum(), right=True).clamp(max=len(p_V) - 1))


def to_draw_from(logits_V, temperature=1.0, top_k=None, top_p=1.0):
    """Probabilities [V], on the CPU, after all three knobs."""
    return kept(torch.softmax(logits_V.cpu() / temperature, -1), top_k, top_p)


def write(model, prompt, numbers, **knobs):
    """The ids of `prompt`, and one more for each of `numbers`. All positions are computed each time."""
    ids = list(prompt)
    for u in numbers:
        logits_BTV, _ = model(torch.tensor([ids], device=device))
        ids.append(drawn(to_draw_from(logits_BTV[0, -1], **knobs), u))
    return ids


def write_cached(model, prompt, numbers, **knobs):
    """As `write`, with each position computed once: the ids, and the cache."""
    cache, left = {}, iter(numbers)

    def step(new, start):
        logits_BTV = forward(model, torch.tensor([new], device=device), start, partial(attend, cache))
        return drawn(to_draw_from(logits_BTV[0, -1], **knobs), next(left))

    return continued(step, prompt, len(numbers)), cache


# %%
# %%ranks
prompt = tokenizer.encode("JULIET:\nMy ").tolist()  # many words may follow
logits_V = target(torch.tensor([prompt], device=device))[0][0, -1]
for knobs in ({"temperature": 0.3}, {}, {"temperature": 1.5}, {"temperature": 1.5, "top_p": 0.6}):
    p_V = to_draw_from(logits_V, **knobs)
    if rank == 0:
        name = ", ".join(f"{k} {v}" for k, v in knobs.items()) or "as it is"
        say(f"{name:30} {int((p_V > 0).sum()):2} of {V} tokens can come, the likeliest with {p_V.max():.2f}")

# %% [markdown]
# The package's `generate` writes a whole batch at once, each row with its own knobs. The same numbers u give the same text,
# with and without a cache:

# %% tags=["nbval-check-output"]
# %%ranks
numbers = uniforms(seed=rank, n=30)
knobs = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
ours, (ours_cached, _) = (how(target, prompt, numbers, **knobs) for how in (write, write_cached))
library = generate(target, torch.tensor([prompt], device=device), 30, Sampling(0.8, 20, 0.9), seed=rank)
assert library[0].tolist() == ours == ours_cached
say(f"{len(ours)} tokens, the same by our lines and by the package's")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the sampler</summary>
#
# *Usual mistake:* `cumsum <= top_p`. It drops the token that crosses the line, and for a top token above p it would keep
# nothing: published code patches that by "at least one". Threads:
# [reasoning-from-scratch#164](https://github.com/rasbt/reasoning-from-scratch/issues/164),
# [esm#360](https://github.com/Biohub/esm/pull/360).
#
# </details>

# %% [markdown]
# ## Many users: continuous batching (MORE, 7 min)
#
# **Why.** Users arrive at any time and want texts of any length. A batch that waits for its longest text leaves places empty. So
# let texts join and leave the batch **between any two steps**: [continuous batching](../assets/glossary.md#continuous-batching) (Yu et
# al. 2022, Orca).
#
# ![Four places over time: with a static batch all wait for the longest; with continuous batching a place is filled as soon as a
# text is finished](../assets/14_batching.svg)
#
# **Predict.** The figure has four places. How many steps does each way take for the same texts (8, 2, 2, 2, 8, 2, 2,
# 2 tokens) on *two* places?
#
# <details><summary>Answer</summary>
#
# Static: the pairs (8, 2), (2, 2), (8, 2), (2, 2) take 8 + 2 + 8 + 2 = **20**. Continuous: three short texts run next
# to the first long one, and three next to the second: **14**, which is 28 tokens on 2 places that are never empty.
#
# </details>


# %% tags=["nbval-check-output"]
# %%ranks
def continuous_steps(lengths, places):
    """Steps until all texts are written, if each place is filled as soon as it is free."""
    waiting, running, steps_taken = list(lengths), [], 0
    while waiting or running:
        while waiting and len(running) < places:
            running.append(waiting.pop(0))
        running = [left - 1 for left in running if left > 1]
        steps_taken += 1
    return steps_taken


lengths = [8, 2, 2, 2, 8, 2, 2, 2]
for places in (4, 2):
    static = sum(max(lengths[i : i + places]) for i in range(0, len(lengths), places))
    say(f"{places} places: static {static} steps, continuous {continuous_steps(lengths, places)}")

# %% [markdown]
# Each text's cache grows at its own pace. So memory is cut into **blocks** of, say, 16 positions; a text takes blocks from one pool
# as it grows, and a table lists which: a [paged cache](../assets/glossary.md#paged-cache) (Kwon et al. 2023, vLLM). Nothing is reserved
# for text that is never written, and texts with the same beginning can share its blocks: [prefix
# reuse](../assets/glossary.md#prefix-reuse). The package's engine does both. Eight texts with 40 tokens in common, four at a time, must
# come out as if each were written alone:

# %%
# %%ranks
engine = Engine(target, "lesson 14", num_blocks=40, block_size=8, max_running=4)
common = val_ids[-40:].tolist()
asked = [common + val_ids[5 * i : 5 * i + 4].tolist() for i in range(8)]
served = [engine.add(prompt, 4 + 2 * i, Sampling(0.8), seed=i) for i, prompt in enumerate(asked)]
steps_taken = 0
while not engine.idle():
    engine.step()
    steps_taken += 1
for i, sequence in enumerate(served):
    alone = generate(target, torch.tensor([asked[i]], device=device), 4 + 2 * i, Sampling(0.8), seed=i)
    assert sequence.ids == alone[0].tolist(), "another text in the batch has changed it"
if rank == 0:
    say(f"8 texts in {steps_taken} steps, each as if it were alone")
    say(f"of the {len(asked[0])} positions of each prompt, found in the cache: {[s.num_cached_tokens for s in served]}")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: batching</summary>
#
# The first texts share nothing: what they have in common is not computed yet when they begin. *Ask:* "what must a block be
# found by?" Its own tokens are not enough: keys depend on *everything* before, on the model, and on an adapter if there is one
# ([vllm#3264](https://github.com/vllm-project/vllm/issues/3264)). Exercise 2 is about this.
#
# </details>

# %% [markdown]
# On your machine each call has a fixed cost, too: **expect the microseconds per token to fall** as the batch grows.


# %%
# %%ranks
def decode_s(batch):
    """Seconds of one decode call for `batch` sequences with 32 positions in their caches."""
    ids_BT, cache = val_ids[: 33 * batch].view(batch, 33), {}
    step = lambda *layer_qkv: attend(cache, *layer_qkv)  # noqa: E731
    forward(target, ids_BT[:, :32], 0, step)
    synchronise(device)  # a GPU only queues what Python asks for
    began_s = time.perf_counter()
    forward(target, ids_BT[:, 32:], 32, step)
    synchronise(device)
    return time.perf_counter() - began_s


samples = {batch: [] for batch in (1, 4, 16, 64)}
for _ in range(6):  # interleaved; the first round warms up
    for batch, taken in samples.items():
        taken.append(decode_s(batch))
if rank == 0:
    for batch, taken in samples.items():
        us = sorted(1e6 * s / batch for s in taken[1:])
        say(f"batch {batch:2}: {us[2]:7,.0f} µs per token ({us[0]:,.0f} to {us[-1]:,.0f})")
metrics.measured(decode_s={str(b): statistics.median(taken[1:]) for b, taken in samples.items()})

# %% [markdown]
# ## Draft, then check: speculative decoding (MORE, 14 min)
#
# **Why.** For one user, decode reads all weights to write one token. A call on five positions takes hardly longer, but needs the
# next four tokens in advance. So let a small model *draft* them, and let the large one judge all of them in one call:
# [**speculative decoding**](../assets/glossary.md#speculative-decoding) (Leviathan et al. 2023; Chen et al. 2023).
#
# The draft model comes with the course, too: 4 layers and width 128, from the same 36 plays.
#
# ![A small model drafts four tokens; one call of the large model gives its probabilities at five places; the first two
# draft tokens are kept, the third is replaced, the rest is thrown away](../assets/14_draft_tokens.svg)
#
# The small model draws a draft token x from its probabilities q. The large one would have drawn from its own, p. Keep
# x with probability **min(1, p(x)/q(x))**. Otherwise draw a token from the part of p that q lacks: **max(0, p - q)**,
# divided by its sum.
#
# **Predict.** Two tokens: p = (0.5, 0.5), q = (0.9, 0.1). How often is a draft token kept? And what is written in the end?
#
# <details><summary>Answer</summary>
#
# Token 0 is drafted with 0.9 and kept with 5/9, together 0.5. Token 1 is drafted with 0.1 and always kept. In all **0.6** are kept, which
# is the sum of min(p, q). In the other 0.4, max(0, p - q) = (0, 0.4) gives token 1. So token 0 is written with probability 0.5, and
# token 1 with 0.1 + 0.4 = 0.5: exactly p. A bad draft model costs time, but never changes the distribution of the text.
#
# </details>
#
# ### Build H: keep it, or draw another
#
# Write `judged`: it returns the token to write, and whether that is the draft token. `u` and `v` are two random numbers in [0, 1), one
# for each decision; `drawn(p_V, u)` also takes values that do not sum to 1. The check tries a grid of u and v: the tokens must follow p,
# *and* as many draft tokens as possible must be kept.

# %% jupyter={"source_hidden": true}
# %%ranks
draft = shipped_model("plays-draft")[0].to(device).double()
prompt = val_ids[-20:].tolist()
if rank == 0:
    say(f"the large model has {target.num_params():,} parameters, the draft model {draft.num_params():,}")


# %%
# %%ranks
def judged(draft_token, p_V, q_V, u, v):
    """(token, was it the draft token?) for a draft token that was drawn from q, so that the token follows p."""
    raise NotImplementedError  # your turn


checks.judged(judged, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution H</summary>
#
# ```python
# def judged(draft_token, p_V, q_V, u, v):
#     if u * q_V[draft_token] < p_V[draft_token]:
#         return draft_token, True
#     return drawn((p_V - q_V).clamp(min=0), v), False
# ```
#
# </details>

# %% [markdown]
# **Does it follow p?** "The text looks fine" proves nothing. Take one place in a text, with our models' own p and q
# over all tokens. Draw many times, count each token, and compare with p by a **chi-square test**: add up (count -
# expected)²/expected. If the draws follow p, the sum is about the number of different tokens (rare ones count as
# one), and it rarely exceeds the limit that the cell prints. For comparison, the cell also draws from p directly, and
# from q.


# %%
# %%ranks
def chi_square(tokens, p_V):
    """(chi-square of the counts against p, cells); tokens that p expects less than 5 times are one cell."""
    counts_V = torch.bincount(torch.tensor(tokens), minlength=len(p_V)).double()
    expected_V = len(tokens) * p_V
    rare_V = expected_V < 5
    counts, expected = (torch.cat((x[~rare_V], x[rare_V].sum()[None])) for x in (counts_V, expected_V))
    return ((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum().item(), len(counts) - 1


def limit(cells):
    """Chi-square exceeds this once in 30,000 times if tokens follow p (4 sigma, after Wilson and Hilferty)."""
    return cells * (1 - 2 / (9 * cells) + 4 * math.sqrt(2 / (9 * cells))) ** 3


# %%
# %%ranks
place_BT = tokenizer.encode("JULIET:\nMy ")[None].to(device)  # many words may follow
p_V, q_V = (torch.softmax(model(place_BT)[0][0, -1].cpu(), -1) for model in (target, draft))
three = torch.tensor(uniforms(seed=100 + rank, n=3 * draws)).view(draws, 3).tolist()
ways = {
    "p itself": [drawn(p_V, u) for u, _, _ in three],
    "draft tokens, judged": [judged(drawn(q_V, w), p_V, q_V, u, v)[0] for u, v, w in three],
    "q, unjudged": [drawn(q_V, w) for _, _, w in three],
}
for name, tokens in ways.items():
    found, cells = chi_square(tokens, p_V)
    verdict = "follows p" if found < limit(cells) else "does not follow p"
    if rank == 0:
        say(f"{name:20} chi-square {found:8,.1f}, limit {limit(cells):.1f}: {verdict}")
    assert found < limit(cells) or name == "q, unjudged"

# %% [markdown]
# Now the whole loop. Both models have a cache, from which the keys and values of rejected draft tokens must be cut off again.


# %%
# %%ranks
def cached(model, cache, ids, start):
    """Logits [T, V], on the CPU, of ids from `start` on; what the cache holds from there on is dropped."""
    start = min(start, cache[0][0].shape[2]) if cache else 0  # it may lack the last draft token
    for layer, (k_BHTE, v_BHTE) in list(cache.items()):
        cache[layer] = k_BHTE[:, :, :start], v_BHTE[:, :, :start]
    new_BT = torch.tensor([ids[start:]], device=device)
    return forward(model, new_BT, start, lambda *layer_qkv: attend(cache, *layer_qkv))[0].cpu()


def draft_tokens_of(cache, ids, number, numbers, judged_to):
    """(draft tokens after `ids`, the probabilities that each was drawn from)"""
    ids, rows, start = list(ids), [], judged_to
    for _ in range(number):
        rows.append(to_draw_from(cached(draft, cache, ids, start)[-1]))
        start = len(ids)
        ids.append(drawn(rows[-1], next(numbers)))
    return ids[len(ids) - number :], rows


# %% [markdown]
# One round of `speculate`: k draft tokens, one call of the large model, and a verdict on each until the first is rejected. If all are
# kept, the call has also given the probabilities for one more token.


# %%
# %%ranks
def speculate(prompt, n, k, seed):
    """(n tokens after the prompt, calls of the large model, draft tokens made, draft tokens kept)"""
    ids, caches, numbers = list(prompt), ({}, {}), iter(uniforms(seed, 4 * (k + 1) * n))
    calls = made = held = done = 0  # done: positions whose keys stay as they are
    while len(ids) < len(prompt) + n:
        room = min(k, len(prompt) + n - len(ids) - 1)
        drafted, q = draft_tokens_of(caches[1], ids, room, numbers, done)
        p = [to_draw_from(row_V) for row_V in cached(target, caches[0], ids + drafted, done)[-room - 1 :]]
        calls, made, done = calls + 1, made + room, len(ids)
        for draft_token, p_V, q_V in zip(drafted, p, q, strict=False):
            token, right = judged(draft_token, p_V, q_V, next(numbers), next(numbers))
            ids.append(token)
            held, done = held + right, done + right
            if not right:
                break
        else:
            ids.append(drawn(p[-1], next(numbers)))  # all kept: one more, for free
    return ids[len(prompt) :], calls, made, held


# %% [markdown]
# **The experiment: what is a draft model worth?** If each draft token is kept with probability α, a call writes (1 - α^(k+1))/(1 - α)
# tokens on average (Leviathan et al., equation 1). You can measure α without speculating: it is the sum of min(p, q), averaged over
# the places of a text. We take the *validation text* for that; then each rank writes texts of its own with k draft tokens. **Expect**
# points near the dashed line, which flattens because the k-th draft token counts only if all before it were kept.

# %%
# %%ranks --timeout 180
both = [torch.softmax(model(val_ids[: 16 * T].view(16, T))[0], -1) for model in (target, draft)]
alpha = torch.minimum(*both).sum(-1).mean().item()
KS, n = (1, 2, 4, 8), 40
rates, seconds = {k: [] for k in (0, *KS)}, {k: [] for k in (0, *KS)}  # 0: without draft tokens
held_made = torch.zeros(2, device=device)
for i in range(texts):
    for k in rates:
        began_s = time.perf_counter()
        _, calls, made, held = speculate(prompt, n, k, seed=1000 * rank + i)
        seconds[k].append(time.perf_counter() - began_s)
        rates[k].append(n / calls)
        held_made += torch.tensor([held, made], device=device)
mine = [rates[k] for k in KS]
dist.all_reduce(held_made)
kept_share = (held_made[0] / held_made[1]).item()
assert kept_share > 0, "no draft token was kept"
gathered = [None] * world_size
dist.all_gather_object(gathered, mine)
per_call = {k: [rate for rates in gathered for rate in rates[i]] for i, k in enumerate(KS)}
predicted = {k: (1 - alpha ** (k + 1)) / (1 - alpha) for k in KS}
metrics.exact(per_call=mine)
metrics.measured(speculate_s={str(k): statistics.median(taken) for k, taken in seconds.items()})

# %%
# %%ranks
from manyhands.lessons import llm_serving as lesson

if rank == 0:
    show(lesson.draw_tokens(per_call, predicted, alpha), "tokens_per_call", "tokens per call against draft tokens")
    ratios = {k: statistics.mean(rates) / predicted[k] for k, rates in per_call.items()}
    say(
        f"alpha {alpha:.2f} on the validation text; measured / predicted: "
        + ", ".join(f"k={k} {ratio:.2f}" for k, ratio in ratios.items())
    )
    odd = max(ratios, key=lambda k: abs(ratios[k] - 1))
    side = "more" if ratios[odd] > 1 else "fewer"
    say(f"furthest off at k={odd}: {abs(ratios[odd] - 1):.0%} {side} tokens per call than the formula says")
    plain_s, *drafted_s = (statistics.median(taken) for taken in seconds.values())
    gains = ", ".join(f"k={k} {plain_s / s:.2f}" for k, s in zip(KS, drafted_s, strict=True))
    say(f"{kept_share:.0%} of the draft tokens were kept; times as fast as without them, here: {gains}")

# %% [markdown]
# The formula gives every draft token the same α. But real texts have easy and hard places, our models write other
# texts than the validation text, and a few texts are a small sample. To save *time*, k calls of the small model and
# one call on k + 1 positions must cost less than the calls that they replace. The last line says whether they did.
# Here one core does the arithmetic, so k + 1 positions cost more than one. Does a full server have time for this
# arithmetic? `call_s` says:

# %% jupyter={"source_hidden": true}
# %%ranks
for users, S in ((119, 4096), (1900, 256)):
    caches = users * cache_bytes(32, 32, 8, 128, S)
    one_ms, five_ms = (1e3 * call_s(8.03e9, users * k, caches) for k in (1, 5))
    if rank == 0:
        say(
            f"Llama 3 8B, {users:,} users with {S:,} positions: {one_ms:.0f} ms per step, {five_ms:.0f} with 4 draft tokens each"
        )

# %% [markdown]
# With long caches draft tokens are nearly free, also when the server is full. With short ones arithmetic is the limit, and every
# rejected draft token is paid for.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: draft tokens</summary>
#
# *Draw* the bars of p and q over each other: what is common is kept, what sticks out of p is drawn instead. *Usual mistake:* drawing
# again from p after a refusal. The check says what that does. *When late:* show the stored plot.
#
# </details>

# %% [markdown]
# ## A bug from the zoo (MORE, 2 min)
#
# A published script for speculative decoding drafts the small model's *likeliest* token, instead of drawing one, and judges it by
# the rule of Build H, with q from softmax. The text looks fine. **What is wrong?** The cell measures theirs, and a mended one.

# %% jupyter={"source_hidden": true}
# %%ranks
draft = shipped_model("plays-draft")[0].to(device).double()

# %%
# %%ranks
place_BT = tokenizer.encode("JULIET:\nMy ")[None].to(device)  # many words may follow
p_V, q_V = (torch.softmax(model(place_BT)[0][0, -1].cpu(), -1) for model in (target, draft))
likeliest = int(q_V.argmax())
pairs = torch.tensor(uniforms(seed=200 + rank, n=2 * draws)).view(draws, 2).tolist()
certain_V = F.one_hot(torch.tensor(likeliest), V).double()
for name, said_V in (("theirs", q_V), ("mended", certain_V)):
    tokens = [judged(likeliest, p_V, said_V, u, v)[0] for u, v in pairs]
    found, cells = chi_square(tokens, p_V)
    if rank == 0:
        share, wanted = tokens.count(likeliest) / draws, p_V[likeliest].item()
        say(
            f"{name}: chi-square {found:,.1f}, limit {limit(cells):.1f}; "
            f"{tokenizer.vocab[likeliest]!r} drawn with {share:.3f}, p has {wanted:.3f}"
        )

# %% [markdown]
# <details><summary>Answer</summary>
#
# The rule is exact for draft tokens that are *drawn from the q that it is given*. Here the likeliest token is drafted
# with certainty, so its q is 1, not softmax's; with the smaller q it is kept too often. Give the rule the
# distribution that you draw from, after temperature, top-k, top-p or argmax. The author confirmed it when a reader
# asked why greedy texts differed: [speculative-sampling#3](https://github.com/jaymody/speculative-sampling/issues/3).
# A similar bug, a draft model that ignores the temperature: [dflash#74](https://github.com/z-lab/dflash/issues/74).
#
# </details>

# %% [markdown]
# ## A model on several ranks (MORE, 6 min)
#
# **Why.** A model that does not fit on one GPU, or is too slow there, is split as in [lesson 07](07_tensor_parallel.ipynb): each rank has
# some heads, and **the cache of those heads only**.
#
# **Predict.** How many bytes does each of t ranks keep for a sequence? And how many all-reduces does one token cost?
#
# <details><summary>Answer</summary>
#
# 2 N S D · 8 divided by t. Two all-reduces per layer, and one for the embedding, which is split over the vocabulary. Each moves only
# B·D numbers, but costs a latency for which the next layer waits. So keep such a group on the fastest links, within a node.
#
# </details>

# %%
# %%ranks --timeout 120
from manyhands.parallel.tensor_parallel import apply_tensor_parallel
from torch.distributed.device_mesh import init_device_mesh

t = math.gcd(world_size, 4)
mesh = init_device_mesh(device.type, (world_size // t, t), mesh_dim_names=("data", "tensor"))
split_model = copy.deepcopy(target)
apply_tensor_parallel(split_model, mesh["tensor"])
prompt, numbers = val_ids[:20].tolist(), uniforms(seed=5, n=12)
alone, _ = write_cached(target, prompt, numbers)
with wire.watch() as seen:
    together, cache = write_cached(split_model, prompt, numbers)
assert together == alone, "the ranks write another text"
num_bytes = sum(part.nbytes for pair in cache.values() for part in pair)
assert num_bytes == 2 * N * 31 * D * 8 // t
say(f"the same text; {num_bytes:,} bytes of cache per rank, {seen.count('all_reduce') / 12:g} all-reduces per token")

# %% [markdown]
# ## Weights in 8 bits (MORE, 5 min)
#
# **Why.** If decode waits for the weights, make them smaller. Each output of a linear layer gets one scale, its largest weight
# divided by 127, and each weight becomes an integer from -127 to 127.
#
# **Predict.** By how much is a weight off at most? What happens to tokens per second of decode, if memory is all that counts?
#
# <details><summary>Answer</summary>
#
# By half a step: its row's largest weight divided by 254. From bf16 to 8 bits, tokens per second double for one user. Where
# arithmetic is the limit, as in prefill, nothing is gained unless the products are computed in 8 bits too.
#
# </details>

# %%
# %%ranks
from manyhands.serve.decoder import quantize, weight_bytes

small = quantize(copy.deepcopy(target))
windows, answers = val_ids[: 16 * T].view(16, T), val_ids[1 : 16 * T + 1].view(16, T)
before, after = (model(windows, answers)[1].item() for model in (target, small))
if rank == 0:
    say(f"weights: {weight_bytes(target):,} bytes in float64, {weight_bytes(small):,} with blocks in 8 bits")
    say(f"validation loss {before:.4f}, then {after:.4f}: a difference of {after - before:+.1e}")

# %% [markdown]
# ## Deploy: a server, a gate, a gauge (MORE, 8 min)
#
# `scripts/serve.py` puts all of this behind OpenAI's API. In a terminal:
#
# ```bash
# make serve                             # lesson 13's model, else this one; prints the address of a chat page
# make serve MODEL=outputs/train/latest  # or a run of yours
# python -m manyhands.serve.load_test --address-file outputs/serve/serving-8000.json --clients 64
# curl -H "Authorization: Bearer TOKEN" http://127.0.0.1:8000/metrics
# ```
#
# The official client works: `OpenAI(base_url="http://127.0.0.1:8000/v1", api_key=TOKEN)`. Behind a JupyterHub the page is at
# `/user/YOU/proxy/8000/`, if the hub has jupyter-server-proxy. If not, chat in a notebook:
# `Client.from_file("../outputs/serve/serving-8000.json").show_chat()`.
#
# The next cell starts that server on the large model, in a separate process. The notebook's `Client` asks it twice to
# go on with the same prompt. **Expect** the second time to find the prompt's first block of 16 in the cache, and the
# server to refuse a prompt that is too long.

# %%
# %%ranks --timeout 150
import tempfile
from pathlib import Path

from manyhands.serve.client import Client, ServerSaid
from manyhands.serve.load_test import started

if rank == 0:  # no other rank takes part
    with tempfile.TemporaryDirectory() as folder, started(about["source"], Path(folder)) as address_file:
        client = Client.from_file(address_file)
        for seed in (1, 2):
            reply = client.complete("ROMEO:\nWhat light is this", max_tokens=80, temperature=0.8, seed=seed)
            found = client.metrics()['manyhands_tokens_total{kind="reused"}']
            say(f"{reply!r}\n{found:.0f} positions of prompts found so far")
        try:
            client.complete("a" * 2 * config.block_size)
        except ServerSaid as refusal:
            say(str(refusal))

# %% [markdown]
# A server has more to do than a loop: **refuse** requests that are too long, too many or too late, with a status
# (400, 413, 429, 504); take the texts of clients who leave **out of the batch**; finish accepted requests when it is
# told to stop; and keep the token out of every log.
#
# **The gate.** The next checkpoint may be worse: its run diverged, or it was trained on another text. So it is
# evaluated on a held-out text before it serves. Texts that are being written are finished by the old model, waiting
# ones get the new model, and no request is dropped.

# %%
# %%ranks
from manyhands.serve import gate
from manyhands.serve.decoder import quantize

live = copy.deepcopy(target).cpu()  # the model that serves
noisy = copy.deepcopy(live)
torch.manual_seed(0)
for p in noisy.parameters():
    p += 0.02 * torch.randn_like(p)
candidates = {"the same in 8 bits": quantize(copy.deepcopy(live)), "noise on its weights": noisy}
if rank == 0:  # no other rank takes part
    for name, candidate in candidates.items():
        verdict = gate.judge(candidate, about, live, about, val_ids[:2048].cpu(), tolerance=0.02)
        say(f"{name}: {'passes' if verdict.passed else 'is refused'}, {verdict.sentence}")

# %% [markdown]
# **Drift.** The model may stay the same while its users change. A prefill computes the logits of the whole prompt
# anyway, so the server gets the loss on users' prompts for free. It reports this as `manyhands_prompt_nats`, next to
# `manyhands_held_out_nats`. Here are two groups of users: one sends Shakespeare, the other the alphabet.

# %%
# %%ranks
engine = Engine(target, "drift", num_blocks=40, block_size=8)
expected = gate.loss_on(target, val_ids[:2048])
for name, text in (
    ("Shakespeare", tokenizer.decode(val_ids[:480])),
    ("the alphabet", "".join(tokenizer.vocab[-26:]) * 19),
):
    before = engine.prompt_nats, engine.prompt_tokens
    for i in range(0, 480, 48):
        engine.add(tokenizer.encode(text[i : i + 48]).tolist(), 1)
    while not engine.idle():
        engine.step()
    nats = (engine.prompt_nats - before[0]) / (engine.prompt_tokens - before[1])
    if rank == 0:
        say(f"{name}: {nats:.2f} nats per token; the held-out text: {expected:.2f}")

# %% [markdown]
# ## Exercises (MORE, 17 min)
#
# ### Exercise 1: how many users fit?
#
# A GPU has `memory` bytes. The model has P parameters, N layers, and KV heads of E numbers. Weights, keys and values take `size`
# bytes per number. Each user may have up to S positions. Write `users_that_fit`: how many users' caches fit beside the weights, as an
# integer, at least 0.


# %%
# %%ranks
def users_that_fit(memory, P, N, KV, E, S, size=2):
    """Whole users whose caches of S positions fit beside the weights."""
    raise NotImplementedError  # your turn


checks.users_that_fit(users_that_fit, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 1</summary>
#
# ```python
# def users_that_fit(memory, P, N, KV, E, S, size=2):
#     return max(0, (memory - P * size) // (2 * N * KV * E * S * size))
# ```
#
# </details>

# %% [markdown]
# ### Exercise 2: which blocks can be shared?
#
# `known` is a set of tuples, one for each block of `size` positions in the cache: `(salt, *ids)`, where the salt names the model and
# ids are *all ids from the beginning of the text to the block's end*. Write `reusable(ids, known, size, salt)`: how many positions of a
# new prompt need not be computed. Only whole blocks are shared, from position 0 on and without a gap. The last position is always
# computed, because the next token is drawn from its logits.


# %%
# %%ranks
def reusable(ids, known, size, salt):
    """Positions at the beginning of `ids` whose keys and values are in the cache."""
    raise NotImplementedError  # your turn


checks.reusable(reusable, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 2</summary>
#
# ```python
# def reusable(ids, known, size, salt):
#     end = 0
#     while end + size < len(ids) and (salt, *ids[: end + size]) in known:
#         end += size
#     return end
# ```
#
# </details>

# %% [markdown]
# ### Exercise 3: worse, or only unlucky?
#
# The gate compares two means. On a few windows a good candidate may look worse by chance. Both models have read the *same* windows, so
# look at the differences: `new` and `old` are lists of losses, one per window. Write `may_serve(new, old, z)`: False if the mean
# difference exceeds z standard errors, or if any number is not finite; otherwise True. The standard error is `statistics.stdev` of the
# differences divided by the square root of their number.


# %%
# %%ranks
def may_serve(new, old, z=2.0):
    """Whether the new model is not significantly worse on the same windows."""
    raise NotImplementedError  # your turn


checks.may_serve(may_serve, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 3</summary>
#
# ```python
# def may_serve(new, old, z=2.0):
#     worse = [a - b for a, b in zip(new, old, strict=True)]
#     if not all(map(math.isfinite, worse)):
#         return False
#     return statistics.mean(worse) <= z * statistics.stdev(worse) / math.sqrt(len(worse))
# ```
#
# </details>

# %% [markdown]
# ## On the cluster
#
# ```bash
# # in a job, on a compute node:
# python scripts/serve.py outputs/mine --device cuda --host 0.0.0.0 --port 8000 --cap.running 64 --watch-s 60
# # on your own machine, for the page at http://127.0.0.1:8000:
# ssh -L 8000:COMPUTE_NODE:8000 LOGIN_NODE
# ```
#
# **What to look for**: tokens per second *and* the 99th percentile of the time to the first token. More users improve
# the first and worsen the second. [The handbook](../assets/handbook/14_llm_serving.md#on-gpus) says what changes on
# GPUs.

# %% [markdown]
# ## Recap

# %%
# %%ranks
card(
    "Keys and values never change in a causal model: store them, and compute each position once.",
    "A call has a price of its own. For a large model it is reading the weights.",
    "A cache holds 2 · layers · KV heads · numbers per head · positions numbers. A full server reads mostly caches.",
    "A long prefill stops all other users: cut it into chunks, or give it to another GPU and send the cache.",
    "Watch two times: to the first token, and per token. A full server shows in the first.",
    figure="two ranks: one prefills, the cache travels, one decodes",
    command="python scripts/serve.py outputs/mine --device cuda --host 0.0.0.0 --port 8000",
)

# %% [markdown]
# Published numbers and further reading are in [the handbook](../assets/handbook/14_llm_serving.md).

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
