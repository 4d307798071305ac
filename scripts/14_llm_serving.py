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
# # 14 Serving: from logits to many users
#
# **45 minutes** for the sections marked CORE, 81 with those marked MORE.
#
# After this lesson **you can**
# - draw the next symbol by temperature, top-k and top-p, and say what each cuts off;
# - build a KV cache, prove that it changes nothing, and predict its bytes;
# - say which part of the work waits for memory and which for arithmetic;
# - speed up decoding by a small model's guesses, and prove that the text's distribution stays the same;
# - serve many users at once, and let a new model in without dropping anyone.
#
# **You need** attention and the parameters of a GPT from [lesson 01](01_one_device.ipynb). The models are trained as in
# [lesson 03](03_data_parallel.ipynb), by averaged gradients.
#
# **New here:** [sampling](../assets/glossary.md#sampling), [kv cache](../assets/glossary.md#kv-cache),
# [prefill and decode](../assets/glossary.md#prefill-and-decode), [arithmetic intensity](../assets/glossary.md#arithmetic-intensity),
# [speculative decoding](../assets/glossary.md#speculative-decoding), [continuous batching](../assets/glossary.md#continuous-batching),
# [paged cache](../assets/glossary.md#paged-cache), [prefix reuse](../assets/glossary.md#prefix-reuse).
#
# The same file is a script:
#
# ```bash
# python -m torch.distributed.run --standalone --nproc-per-node 2 scripts/14_llm_serving.py --steps 200
# mpiexec -n 2 python scripts/14_llm_serving.py
# python scripts/14_llm_serving.py                      # a world of one
# ```

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 3, warm-up 3, sampler 7, cache 9, rooflines 5, guesses 11, batching 5, zoo 2. Builds A to C
# take about three minutes each and are in these numbers.
#
# *Say:* training reads a text once, all positions at a time. Serving writes it, one position at a time. Every section
# is a way to do more than one position for each time that the weights are read.
#
# *Three usual mistakes:* thinking that the cache holds queries; thinking that guesses make the text worse; thinking that a
# batch of 16 takes 16 times as long.
#
# *When late:* give solution A, show the stored table of rooflines, keep builds B and C.
#
# *Ask the room:* "Two users send the same 2,000 words of instructions, then a question each. What must be computed twice?"
# (Only the questions and the answers: keys and values depend on nothing that comes later.)
#
# </details>

# %% tags=["parameters"]
n_ranks = 2  # processes; in a script the launcher decides
steps = 200  # of training of the large model, and of the small one, 2 to 2000
texts = 4  # texts that each rank writes with guesses, for each number of guesses, at least 2
draws = 3000  # symbols that are drawn to compare distributions, 500 to 100000

# %% [markdown]
# ## Start (CORE, 3 min)
#
# The first cell starts two ranks. Cells that begin with `%%ranks` run on all of them. Each section needs the cells of
# this one, and then only its own: a folded cell with `catch_up(...)` defines what is missing from earlier ones.

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

import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands import Metrics, catch_up, join, leave, say, show
from manyhands.checks import llm_serving as checks
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.gpt.model import GPT, GPTConfig
from manyhands.serving.decoder import generate
from manyhands.serving.engine import Engine
from manyhands.serving.sampler import Sampling, uniforms

# %%
# %%ranks
ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
corpus = load_corpus(ranks)
V, T = len(corpus.symbols), 64
metrics = Metrics(ranks, corpus, {"steps": steps, "texts": texts, "draws": draws})

# %% [markdown]
# Two models: ShakespeareGPT, and a small one with 1 layer of width 32 that will make guesses. All ranks train both together.
# From then on each rank has a copy, and serves users of its own: serving scales by copies, as long as a model fits.
#
# All numbers are float64 from here on, so that "equal" can mean 1e-10.


# %%
# %%ranks --timeout 300
def trained(n_layer, n_embd):
    """A GPT after `steps` steps of data-parallel AdamW, the same on all ranks, in float64."""
    torch.manual_seed(1337)
    model = GPT(GPTConfig(V, T, n_layer, 4, n_embd)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 20) * (1 - 0.9 * step / steps)
        optimizer.zero_grad()
        ids_bT, targets_bT = get_batch(corpus.train_ids, step, 24, T, rank, world_size, seed=1)
        model(ids_bT.to(device), targets_bT.to(device))[1].backward()
        parameters = list(model.parameters())
        row_P = torch.cat([p.grad.flatten() for p in parameters])
        dist.all_reduce(row_P)
        for p, part in zip(parameters, row_P.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p) / world_size
        optimizer.step()
    return model.double().eval()


target, draft = trained(4, 128), trained(1, 32)
val_ids = corpus.val_ids.to(device)

# %%
# %%ranks
torch.set_grad_enabled(False)  # nothing is trained any more
for name, model in (("large", target), ("small", draft)):
    loss = model(val_ids[: 32 * T].view(32, T), val_ids[1 : 32 * T + 1].view(32, T))[1].item()
    if rank == 0:
        say(
            f"the {name} model: {model.num_params():,} parameters, validation loss {loss:.2f} nats per symbol"
        )
    metrics.close(tolerance=0.05, **{f"{name}_loss": loss})
prompt = corpus.encode(corpus.text[:20]).tolist()

# %% [markdown]
# A few hundred steps make no poet. But everything below is about *how* a model writes, and not about what.

# %% [markdown]
# ## Warm-up: four numbers, three knobs (CORE, 3 min)
#
# A model gives logits; softmax makes probabilities of them; a die is thrown. That is [**sampling**](../assets/glossary.md#sampling).
# Three knobs change the die. Take four symbols with probabilities 0.4, 0.3, 0.2, 0.1:
#
# - **temperature** divides the logits before softmax: below 1 the likely get likelier, at 0 only the likeliest is left;
# - **top-k** keeps the k likeliest symbols;
# - **top-p** keeps the *fewest* likeliest symbols whose probabilities **reach** p together (Holtzman et al. 2020).
#
# ![Four bars 0.4, 0.3, 0.2, 0.1: temperature 0.5 makes them steeper; top-k 2 keeps two; top-p 0.6 keeps two, the second of which
# crosses the line](../assets/14_sampling.svg)
#
# **Predict.** Which symbols does top-p = 0.75 keep, and with which probabilities? And top-p = 0.7?
#
# <details><summary>Answer</summary>
#
# The first two have 0.7 together, which does not reach 0.75. With the third it is 0.9: the symbol that crosses the line is kept.
# So 4/9, 3/9 and 2/9. With p = 0.7 only the first two, 4/7 and 3/7: together they reach it exactly.
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
p_V = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
sharper_V = torch.softmax(p_V.log() / 0.5, -1)
say(f"temperature 0.5: {[round(p, 3) for p in sharper_V.tolist()]}")
for name, kept_V in (("top-k 2, top-p 0.6, top-p 0.7", [1, 1, 0, 0]), ("top-p 0.75", [1, 1, 1, 0])):
    left_V = p_V * torch.tensor(kept_V)
    say(f"{name}: {[round(p, 3) for p in (left_V / left_V.sum()).tolist()]}")

# %% [markdown]
# ## From logits to a symbol (CORE, 7 min)
#
# **Why cut?** Each unlikely symbol is rare, but there are many of them. 50,000 symbols of probability 0.000002 make up a tenth
# together: every tenth draw is one of them, and derails what follows.
#
# ### Build A: what is kept
#
# Write `kept(p_V, top_k, top_p)`: the probabilities that are drawn from, in the order of the symbols, with sum 1. First top-k
# (None: all), then top-p *among what top-k has left*, so of its sum. `p_V.sort(descending=True)` gives sorted values and
# their places. Mind the symbol that crosses the line.


# %%
# %%ranks
def kept(p_V, top_k=None, top_p=1.0):
    """Probabilities [V] of the symbols that are kept, zero elsewhere."""
    raise NotImplementedError  # your turn


checks.kept(kept, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution A
def kept(p_V, top_k=None, top_p=1.0):
    sorted_V, places_V = p_V.sort(descending=True)
    if top_k is not None:
        sorted_V[top_k:] = 0
    before_V = sorted_V.cumsum(0) - sorted_V  # what the likelier ones have together
    if top_p < 1:
        sorted_V[before_V >= top_p * sorted_V.sum()] = 0
    return torch.zeros_like(p_V).scatter(0, places_V, sorted_V / sorted_V.sum())


checks.kept(kept, ranks, solution=True)

# %% [markdown]
# The throw of the die: take a number u between 0 and 1, and the first symbol at which the running sum exceeds it. We draw all
# numbers beforehand, one for each place in the text. So a text does not depend on who else is served.


# %%
# %%ranks
def drawn(p_V, u):
    """The first symbol at which the running sum of p exceeds u."""
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


# %%
# %%ranks
for knobs in ({"temperature": 0.3}, {}, {"temperature": 1.5}, {"temperature": 1.5, "top_p": 0.6}):
    text = corpus.decode(write(target, prompt, uniforms(seed=7, n=43), **knobs)[20:])
    if rank == 0:
        say(f"{', '.join(f'{k} {v}' for k, v in knobs.items()) or 'as it is':30} {text!r}")

# %% [markdown]
# The package's way does a whole batch at once, each row with its own knobs. Same numbers, same text:

# %% tags=["nbval-check-output"]
# %%ranks
numbers = uniforms(seed=rank, n=30)
ours = write(target, prompt, numbers, temperature=0.8, top_k=20, top_p=0.9)
library = generate(target, torch.tensor([prompt], device=device), 30, Sampling(0.8, 20, 0.9), seed=rank)
assert library[0].tolist() == ours
say(f"{len(ours)} symbols, the same by our lines and by the package's")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the sampler</summary>
#
# *Usual mistake:* `cumsum <= top_p`. It drops the symbol that crosses the line, and for a top symbol above p it would keep
# nothing: published code patches that by "at least one". Threads:
# [reasoning-from-scratch#164](https://github.com/rasbt/reasoning-from-scratch/issues/164),
# [esm#360](https://github.com/Biohub/esm/pull/360).
#
# </details>

# %% [markdown]
# ## Do not compute it again: the KV cache (CORE, 9 min)
#
# **Why.** `write` computes all positions for each new symbol, and throws away all logits but the last. In a causal model a
# position never looks ahead. So its keys and values stay what they are, whatever is written later: keep them. This is the
# [**KV cache**](../assets/glossary.md#kv-cache). Queries are not kept: only the newest position asks.
#
# ![Without a cache each new symbol computes all positions, a triangle; with a cache each position is computed once, a
# diagonal, and looks back at stored keys and values](../assets/14_cache.svg)
#
# **Predict.** From one symbol, the model writes 63 more. How many positions does it compute without a cache, and with one?
#
# <details><summary>Answer</summary>
#
# Without: 1 + 2 + ... + 63 = 63·64/2 = **2,016**. With: **63**. The rest of the work, looking back, is small here: it grows with
# the length, not with the model.
#
# </details>
#
# The model's own lines, with attention taken from outside, and a first position that need not be 0:

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "kept", "drawn", "to_draw_from", "write")


# %%
# %%ranks
def forward(model, ids_BT, start, attend):
    """Logits [B, T, V] of positions start, start + 1, ...; `attend(layer, q, k, v)` knows what lies before them."""
    positions_T = torch.arange(start, start + ids_BT.shape[1], device=ids_BT.device)
    x_BTD = model.tokens(ids_BT) + model.positions(positions_T)
    for layer, block in enumerate(model.blocks):
        qkv_BTC, size = block.attention.qkv(block.norm_1(x_BTD)), block.attention.head_size
        q_BHTE, k_BHTE, v_BHTE = qkv_BTC.unflatten(-1, (-1, 3, size)).transpose(1, 2).unbind(-2)
        y_BHTE = attend(layer, q_BHTE, k_BHTE, v_BHTE)
        x_BTD = x_BTD + block.attention.out(y_BHTE.transpose(1, 2).flatten(2))
        x_BTD = x_BTD + block.mlp(block.norm_2(x_BTD))
    return model.head(model.norm(x_BTD))


# %% [markdown]
# ### Build B: attention with a memory
#
# `cache` is a dict: layer -> (keys, values) of all positions so far, empty at first. Write `attend`: put the new keys and values
# behind the old ones (positions are dim 2), keep them in `cache`, and return what the T new queries find among all S positions.
# Query t is position S - T + t, and must not look beyond itself. `F.scaled_dot_product_attention(q, k, v, attn_mask=mask_TS)`
# takes a mask that is True where a query may look. Mind that its `is_causal=True` aligns query 0 with key 0.


# %%
# %%ranks
def attend(cache, layer, q_BHTE, k_BHTE, v_BHTE):
    """What the new positions find among all so far [B, H, T, E]; the cache holds them afterwards."""
    raise NotImplementedError  # your turn


checks.attend(attend, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution B
def attend(cache, layer, q_BHTE, k_BHTE, v_BHTE):
    if layer in cache:
        k_BHTE, v_BHTE = (torch.cat(pair, dim=2) for pair in zip(cache[layer], (k_BHTE, v_BHTE), strict=True))
    cache[layer] = k_BHTE, v_BHTE
    T, S = q_BHTE.shape[2], k_BHTE.shape[2]
    mask_TS = torch.ones(T, S, dtype=torch.bool, device=q_BHTE.device).tril(S - T)
    return F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, attn_mask=mask_TS)


checks.attend(attend, ranks, solution=True)

# %% [markdown]
# With it, writing has two parts. [**Prefill**](../assets/glossary.md#prefill-and-decode) reads the prompt, all positions in one
# call. **Decode** then takes one position at a time.


# %%
# %%ranks
def write_cached(model, prompt, numbers, **knobs):
    """As `write`, with each position computed once: the ids, and the cache."""
    ids, cache, new = list(prompt), {}, list(prompt)
    for u in numbers:
        new_BT, start = torch.tensor([new], device=device), len(ids) - len(new)
        logits_BTV = forward(model, new_BT, start, lambda *layer_qkv: attend(cache, *layer_qkv))
        new = [drawn(to_draw_from(logits_BTV[0, -1], **knobs), u)]
        ids += new
    return ids, cache


# %%
# %%ranks
computed = []
counting = target.tokens.register_forward_hook(lambda _, args, out: computed.append(args[0].numel()))
numbers, seconds = uniforms(seed=3, n=63), {}
for name, how in (("without", write), ("with", write_cached)):
    computed.clear()
    began_s = time.perf_counter()
    text = how(target, prompt[:1], numbers)
    seconds[name] = time.perf_counter() - began_s, sum(computed), text
counting.remove()
assert seconds["without"][2] == seconds["with"][2][0], "the same text"
if rank == 0:
    for name, (took_s, positions, _) in seconds.items():
        say(f"{name:8} a cache: {positions:5,} positions computed, {took_s:.2f} s")

# %% [markdown]
# The same text. And the logits, piece by piece against the model's own forward? Then the bytes: keys and values, N layers, B
# sequences, S positions, D numbers each of 8 bytes: **2 N B S D · 8**.

# %% tags=["nbval-check-output"]
# %%ranks
ids_BT, cache, found = val_ids[: 3 * T].view(3, T), {}, []
for piece in ids_BT.split([40, 1, 1, 22], dim=1):  # a prefill, two decodes, and a second prompt
    start = sum(logits.shape[1] for logits in found)
    found.append(forward(target, piece, start, lambda *layer_qkv: attend(cache, *layer_qkv)))
apart = (torch.cat(found, dim=1) - target(ids_BT)[0]).abs().max().item()
assert apart < 1e-10, apart
num_bytes = sum(part.nbytes for pair in cache.values() for part in pair)
assert num_bytes == 2 * 4 * 3 * T * 128 * 8
say(f"equal to no cache to 1e-10; {num_bytes:,} bytes, as predicted")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the cache</summary>
#
# *Usual mistake:* `is_causal=True` with T = 1: the one query is aligned with key 0, and sees nothing else. The check says so. *Ask:*
# "why may a prefill use it?" (T = S, so both alignments are the same.) *When late:* skip the cell that counts seconds.
#
# </details>

# %% [markdown]
# ## Prefill and decode: two rooflines (CORE, 5 min)
#
# **Why.** A position costs 2 P FLOPs, wherever it stands. But a *call* reads all P weights from memory once, for one position or
# for a thousand. FLOPs per byte that is read is the call's [**arithmetic
# intensity**](../assets/glossary.md#arithmetic-intensity). A GPU has one too: its FLOP/s divided by its bytes/s. Below it a
# call waits for memory, above it for arithmetic.
#
# ![FLOP/s that can be reached against FLOPs per byte on a log scale: a slope up to the corner at 295, then flat; decode of one
# user at 1, 16 users at 16, a prefill of 2,048 positions beyond the corner](../assets/14_roofline.svg)
#
# **Predict.** An H100 computes 989 TFLOP/s in bf16 and reads 3.35 TB/s. How many symbols per second can a 7 B model write
# at most, for one user? For how many users at once does decoding begin to wait for arithmetic?
#
# <details><summary>Answer</summary>
#
# 14 GB of weights per symbol: 3,350/14 = **239** per second, and the GPU's arithmetic is busy 0.3 % of the time. A batch of B has
# intensity 2 P B / 2 P = B. The corner lies at 989/3.35 = **295** users.
#
# </details>

# %%
# %%ranks
PEAK, BANDWIDTH, P = 989e12, 3.35e12, 7e9
if rank == 0:
    for name, positions in (
        ("decode, 1 user", 1),
        ("16 users", 16),
        ("295 users", 295),
        ("prefill of 2,048", 2048),
    ):
        call_s = max(2 * P / BANDWIDTH, 2 * P * positions / PEAK)  # bf16: two bytes per weight
        say(f"{name:17} {call_s * 1e3:6.1f} ms per call, {positions / call_s:9,.0f} positions/s")

# %% [markdown]
# (This leaves out reading the cache. It belongs to each user alone, so a batch does not share it: long texts stay below the corner.)
#
# And here? Your machine's corner is elsewhere, and Python's own time is a third part that each call pays once. Either way: **more
# users for nearly the same time**. In the table the microseconds per symbol should fall with the batch.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "forward", "attend")


# %%
# %%ranks
def decode_s(batch):
    """Seconds of one decode call for `batch` sequences with 32 positions in their caches."""
    ids_BT, cache = val_ids[: 33 * batch].view(batch, 33), {}
    step = lambda *layer_qkv: attend(cache, *layer_qkv)  # noqa: E731
    forward(target, ids_BT[:, :32], 0, step)
    began_s = time.perf_counter()
    forward(target, ids_BT[:, 32:], 32, step)
    return time.perf_counter() - began_s


samples = {batch: [] for batch in (1, 4, 16, 64)}
for _ in range(6):  # interleaved; the first round warms up
    for batch, taken in samples.items():
        taken.append(decode_s(batch))
if rank == 0:
    for batch, taken in samples.items():
        us = sorted(1e6 * s / batch for s in taken[1:])
        say(f"batch {batch:2}: {us[2]:7,.0f} µs per symbol ({us[0]:,.0f} to {us[-1]:,.0f})")
metrics.measured(decode_s={str(b): statistics.median(taken[1:]) for b, taken in samples.items()})

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: rooflines</summary>
#
# 989 TFLOP/s is dense, as in lesson 01; the data sheet's 1,979 is with sparsity. *Ask:* "why does a provider charge more for
# output than for input?" (Input is prefill, at the flat part of the roof.)
#
# </details>

# %% [markdown]
# ## Guess, then check: speculative decoding (CORE, 11 min)
#
# **Why.** For one user, decode reads all weights to write one symbol. A call on five positions takes hardly longer. If only
# we knew the next four symbols! So let a small model *guess* them, and let the large one look at all of them in one call:
# [**speculative decoding**](../assets/glossary.md#speculative-decoding) (Leviathan et al. 2023; Chen et al. 2023).
#
# ![A small model guesses four symbols; one call of the large model gives its probabilities at five places; the first two
# guesses are kept, the third is replaced, the rest is thrown away](../assets/14_guesses.svg)
#
# The small model draws a guess x from its probabilities q. The large one would have drawn from p. Keep x with probability
# **min(1, p(x)/q(x))**. Otherwise draw from what is missing: **max(0, p - q)**, made to sum to 1.
#
# **Predict.** Two symbols: p = (0.5, 0.5), q = (0.9, 0.1). How often is a guess kept? And what is written in the end?
#
# <details><summary>Answer</summary>
#
# Guess 0 (0.9 of the time) is kept with 5/9: 0.5. Guess 1 (0.1) is always kept. Together **0.6**, which is the sum of min(p, q).
# In the other 0.4, max(0, p - q) = (0, 0.4): symbol 1. So symbol 0 comes with 0.5, and symbol 1 with 0.1 + 0.4 = 0.5: exactly p. A bad
# guesser costs time. It never changes the text.
#
# </details>
#
# ### Build C: keep it, or draw another
#
# Write `judged`: the symbol that is written, and whether it is the guess. `u` and `v` are two numbers drawn from [0, 1); `drawn(p_V, u)`
# also takes probabilities that do not sum to 1. The check tries a grid of u and v: the symbols must follow p, *and* as many guesses
# as possible must be kept.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "kept", "drawn", "to_draw_from", "forward", "attend")


# %%
# %%ranks
def judged(guess, p_V, q_V, u, v):
    """(symbol, was it the guess?) for a guess that was drawn from q, so that the symbol follows p."""
    raise NotImplementedError  # your turn


checks.judged(judged, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution C
def judged(guess, p_V, q_V, u, v):
    if u * q_V[guess] < p_V[guess]:
        return guess, True
    return drawn((p_V - q_V).clamp(min=0), v), False


checks.judged(judged, ranks, solution=True)

# %% [markdown]
# **Does it follow p?** "The text looks fine" proves nothing. Take one place in the text, with our models' real p and q over all
# symbols. Draw many times, count, and compare with what p expects by a **chi-square test**: the sum of (count - expected)²/expected.
# If the counts follow p, it is about the number of cells, with a spread of the root of twice that. For scale, draw from p directly, and
# from q.


# %%
# %%ranks
def chi_square(symbols, p_V):
    """(chi-square of the counts against p, cells); symbols that p expects less than 5 times are one cell."""
    counts_V = torch.bincount(torch.tensor(symbols), minlength=len(p_V)).double()
    expected_V = len(symbols) * p_V
    rare_V = expected_V < 5
    counts, expected = (torch.cat((x[~rare_V], x[rare_V].sum()[None])) for x in (counts_V, expected_V))
    return ((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum().item(), len(counts) - 1


def limit(cells):
    """Counts that follow p stay below this but for once in 30,000 times (4 standard deviations, after Wilson and Hilferty)."""
    return cells * (1 - 2 / (9 * cells) + 4 * math.sqrt(2 / (9 * cells))) ** 3


# %%
# %%ranks
place_BT = val_ids[:T][None]
p_V, q_V = (torch.softmax(model(place_BT)[0][0, -1].cpu(), -1) for model in (target, draft))
three = torch.tensor(uniforms(seed=100 + rank, n=3 * draws)).view(draws, 3).tolist()
ways = {
    "p itself": [drawn(p_V, u) for u, _, _ in three],
    "guesses, judged": [judged(drawn(q_V, w), p_V, q_V, u, v)[0] for u, v, w in three],
    "q, unjudged": [drawn(q_V, w) for _, _, w in three],
}
for name, symbols in ways.items():
    found, cells = chi_square(symbols, p_V)
    verdict = "follows p" if found < limit(cells) else "does not follow p"
    if rank == 0:
        say(f"{name:16} chi-square {found:8,.1f}, limit {limit(cells):.1f}: {verdict}")
    assert found < limit(cells) or name == "q, unjudged"

# %% [markdown]
# Now the whole loop. Both models have a cache. Keys of guesses that were thrown away are cut off again.


# %%
# %%ranks
def cached(model, cache, ids, start):
    """Logits [T, V], on the CPU, of ids from `start` on; what the cache has from there on was wrong."""
    start = min(start, cache[0][0].shape[2]) if cache else 0  # it may lack the last guess
    for layer, (k_BHTE, v_BHTE) in list(cache.items()):
        cache[layer] = k_BHTE[:, :, :start], v_BHTE[:, :, :start]
    new_BT = torch.tensor([ids[start:]], device=device)
    return forward(model, new_BT, start, lambda *layer_qkv: attend(cache, *layer_qkv))[0].cpu()


def guesses_of(cache, ids, number, numbers, judged_to):
    """(guesses after `ids`, the probabilities that each was drawn from)"""
    ids, rows, start = list(ids), [], judged_to
    for _ in range(number):
        rows.append(to_draw_from(cached(draft, cache, ids, start)[-1]))
        start = len(ids)
        ids.append(drawn(rows[-1], next(numbers)))
    return ids[len(ids) - number :], rows


def speculate(prompt, n, k, seed):
    """(n symbols after the prompt, calls of the large model, guesses made, guesses kept)"""
    ids, caches, numbers = list(prompt), ({}, {}), iter(uniforms(seed, 4 * (k + 1) * n))
    calls = made = held = done = 0  # done: positions whose keys stay as they are
    while len(ids) < len(prompt) + n:
        room = min(k, len(prompt) + n - len(ids) - 1)
        guessed, q = guesses_of(caches[1], ids, room, numbers, done)
        p = [to_draw_from(row_V) for row_V in cached(target, caches[0], ids + guessed, done)[-room - 1 :]]
        calls, made, done = calls + 1, made + room, len(ids)
        for guess, p_V, q_V in zip(guessed, p, q, strict=False):
            symbol, right = judged(guess, p_V, q_V, next(numbers), next(numbers))
            ids.append(symbol)
            held, done = held + right, done + right
            if not right:
                break
        else:
            ids.append(drawn(p[-1], next(numbers)))  # all kept: one more, for nothing
    return ids[len(prompt) :], calls, made, held


# %% [markdown]
# **The experiment: what is a guesser worth?** If each guess is kept with probability α, a call writes (1 - α^(k+1))/(1 - α)
# symbols on average (Leviathan et al., equation 1). And α needs no speculation: it is the mean of the sum of min(p, q) over
# places of a text. We measure it on the *validation text*, and let each rank write texts of its own with k guesses. **Expect** points
# near the dashed line, which flattens: the k-th guess counts only if all before it were kept.

# %%
# %%ranks --timeout 180
both = [torch.softmax(model(val_ids[: 16 * T].view(16, T))[0], -1) for model in (target, draft)]
alpha = torch.minimum(*both).sum(-1).mean().item()
KS, n = (1, 2, 4, 8), 40
mine = [[n / speculate(prompt, n, k, seed=1000 * rank + i)[1] for i in range(texts)] for k in KS]
gathered = [None] * world_size
dist.all_gather_object(gathered, mine)
per_call = {k: [rate for rates in gathered for rate in rates[i]] for i, k in enumerate(KS)}
predicted = {k: (1 - alpha ** (k + 1)) / (1 - alpha) for k in KS}
metrics.exact(per_call=mine)

# %%
# %%ranks
from manyhands.figures.guesses import symbols_per_call

if rank == 0:
    show(symbols_per_call(per_call, predicted, alpha), "symbols_per_call", "symbols per call against guesses")
    ratios = {k: statistics.mean(rates) / predicted[k] for k, rates in per_call.items()}
    say(
        f"alpha {alpha:.2f} on the validation text; measured / predicted: "
        + ", ".join(f"k={k} {ratio:.2f}" for k, ratio in ratios.items())
    )
    odd = max(ratios, key=lambda k: abs(ratios[k] - 1))
    side = "more" if ratios[odd] > 1 else "fewer"
    say(
        f"furthest off at k={odd}: {abs(ratios[odd] - 1):.0%} {side} symbols than if each guess were kept alike"
    )

# %% [markdown]
# The formula treats all guesses alike. Real ones come in easy stretches and hard places, and what our models write is not the
# validation text. Both show in the residual. In seconds, a call on k + 1 positions and k calls of the small model must cost less than what
# they save: with large models and small batches they do; a full server has no idle arithmetic to spend on guesses.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: guesses</summary>
#
# *Draw* the bars of p and q over each other: what is common is kept, what sticks out of p is drawn instead. *Usual mistake:* drawing
# again from p after a refusal. The check says what that does. *When late:* show the stored plot.
#
# </details>

# %% [markdown]
# ## Many users: continuous batching (CORE, 5 min)
#
# **Why.** Users come at any time and want texts of any length. A batch that waits for its longest text leaves places empty. So
# let sequences join and leave **between any two steps**: [continuous batching](../assets/glossary.md#continuous-batching) (Yu et
# al. 2022, Orca).
#
# ![Four places over time: with a static batch all wait for the longest; with continuous batching a place is filled as soon as a
# text is finished](../assets/14_batching.svg)
#
# **Predict.** Now texts of 6, 2, 4, 2, 6, 4, 2, 2 symbols. How many steps does each way take on four places?
#
# <details><summary>Answer</summary>
#
# Static: 6 + 6 = 12. Continuous: after 2 steps two places are free, and the next two texts enter; in all **8**.
# (28 symbols on 4 places: no way takes less than 7.)
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


lengths = [6, 2, 4, 2, 6, 4, 2, 2]
static = sum(max(lengths[i : i + 4]) for i in range(0, len(lengths), 4))
say(f"static {static} steps, continuous {continuous_steps(lengths, 4)}")

# %% [markdown]
# Where do caches of changing lengths lie? In **blocks** of, say, 16 positions, taken from one pool and listed in a table for each
# sequence: a [paged cache](../assets/glossary.md#paged-cache) (Kwon et al. 2023, vLLM). Nothing is reserved for text that is never
# written. And two texts with the same beginning can share its blocks: [prefix
# reuse](../assets/glossary.md#prefix-reuse). The package's engine does both. It must write what a sequence would be alone:

# %%
# %%ranks
engine = Engine(target, "lesson 14", num_blocks=24, block_size=8, max_running=4)
common = corpus.encode(corpus.text[:40]).tolist()
asked = [common + val_ids[5 * i : 5 * i + 4].tolist() for i in range(8)]
served = [engine.add(prompt, 4 + 2 * i, Sampling(0.8), seed=i) for i, prompt in enumerate(asked)]
steps_taken = 0
while not engine.idle():
    engine.step()
    steps_taken += 1
for i, sequence in enumerate(served):
    alone = generate(target, torch.tensor([asked[i]], device=device), 4 + 2 * i, Sampling(0.8), seed=i)
    assert sequence.ids == alone[0].tolist(), "company has changed a text"
if rank == 0:
    say(f"8 texts in {steps_taken} steps, each as if it were alone")
    say(
        f"positions of prompts: {sum(map(len, asked))}, of which found in blocks: {[s.reused for s in served]}"
    )

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: batching</summary>
#
# The first texts share nothing: what they have in common is not computed yet when they begin. *Ask:* "what must a block be
# found by?" Its own symbols are not enough: keys depend on *everything* before, on the model, and on an adapter if there is one
# ([vllm#3264](https://github.com/vllm-project/vllm/issues/3264)). Exercise 2 is about this.
#
# </details>

# %% [markdown]
# ## A bug from the zoo (CORE, 2 min)
#
# A script for speculative decoding, written to be read. Guesses are the small model's *likeliest* symbol; they are judged by the
# rule of Build C. The text looks fine, and more guesses are kept than before. **What is wrong?** Measure it.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "drawn", "judged", "chi_square", "limit")

# %%
# %%ranks
place_BT = val_ids[:T][None]
p_V, q_V = (torch.softmax(model(place_BT)[0][0, -1].cpu(), -1) for model in (target, draft))
likeliest = int(q_V.argmax())
pairs = torch.tensor(uniforms(seed=200 + rank, n=2 * draws)).view(draws, 2).tolist()
certain_V = F.one_hot(torch.tensor(likeliest), V).double()
for name, said_V in (("theirs", q_V), ("mended", certain_V)):
    symbols = [judged(likeliest, p_V, said_V, u, v)[0] for u, v in pairs]
    found, cells = chi_square(symbols, p_V)
    if rank == 0:
        share, wanted = symbols.count(likeliest) / draws, p_V[likeliest].item()
        say(
            f"{name}: chi-square {found:,.1f}, limit {limit(cells):.1f}; {corpus.symbols[likeliest]!r} {share:.3f}, p has {wanted:.3f}"
        )

# %% [markdown]
# <details><summary>Answer</summary>
#
# The rule is exact for guesses that are *drawn from the q that it is given*. The likeliest symbol is drawn with certainty, so
# its q is 1, and not softmax's: with the wrong q it is kept too often. Give the rule the distribution that you draw from, after
# temperature, top-k, top-p or argmax. The author confirmed it when a reader asked why greedy texts differed:
# [speculative-sampling#3](https://github.com/jaymody/speculative-sampling/issues/3). A relative, a guesser that ignores the temperature:
# [dflash#74](https://github.com/z-lab/dflash/issues/74).
#
# </details>

# %% [markdown]
# ## A model on several ranks (MORE, 6 min)
#
# **Why.** A model that does not fit on one GPU, or is too slow there, is split as in [lesson 07](07_tensor_parallel.ipynb): each rank has
# some heads, and **the cache of those heads only**.
#
# **Predict.** How many bytes does each of t ranks keep for a sequence? And how many all-reduces does one symbol cost?
#
# <details><summary>Answer</summary>
#
# A t-th of 2 N S D · 8. Two all-reduces per layer, one for the embedding, which is split over the vocabulary, each of B·D numbers: tiny, but
# each costs its latency, and the next product waits. That is why serving wants the fastest links of all.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "kept", "drawn", "to_draw_from", "forward", "attend", "write_cached")

# %%
# %%ranks --timeout 120
from manyhands.measure import wire
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
assert num_bytes == 2 * 4 * 31 * 128 * 8 // t
say(
    f"the same text; {num_bytes:,} bytes of cache per rank, {seen.count('all_reduce') / 12:g} all-reduces per symbol"
)

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
# By half a step: its row's largest weight divided by 254. From bf16 to 8 bits it doubles, for one user; nothing is gained where
# arithmetic counts, as in prefill, unless the products are in 8 bits too.
#
# </details>

# %%
# %%ranks
from manyhands.serving.quantized import quantize, weight_bytes

small = quantize(copy.deepcopy(target))
windows, answers = val_ids[: 32 * T].view(32, T), val_ids[1 : 32 * T + 1].view(32, T)
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
# make serve                             # lesson 13's aligned model; prints the address of a chat page, token included
# make serve MODEL=outputs/train/latest  # any other run's
# python -m manyhands.serving.load_test --address-file outputs/serve/serving-8000.json --clients 64
# curl -H "Authorization: Bearer TOKEN" http://127.0.0.1:8000/metrics
# ```
#
# or from any program with the official client: `OpenAI(base_url="http://127.0.0.1:8000/v1", api_key=TOKEN)`. In a notebook,
# `Client.from_file("../outputs/serve/serving-8000.json").show_chat()` from `manyhands.serving.client`.
#
# What a server must do that a
# loop need not: **refuse** what is too long, too much or too late, with a status (400, 413, 429, 504); take those who leave **out of the
# batch**; finish what was asked when it is told to stop; and keep the token out of every log.
#
# **The gate.** Tomorrow's checkpoint may be worse: diverged, or trained on another text. So it is judged on a held-out text
# before it serves. What is being written is finished by the old model, what waits gets the new one, and nobody is dropped.

# %%
# %%ranks
from dataclasses import asdict

from manyhands.serving import gate
from manyhands.serving.quantized import quantize

live = copy.deepcopy(target).cpu()  # who serves today
facts = {"config": asdict(live.config), "corpus": {"alphabet": corpus.symbols}, "step": steps}
noisy = copy.deepcopy(live)
torch.manual_seed(0)
for p in noisy.parameters():
    p += 0.05 * torch.randn_like(p)
candidates = {"the same in 8 bits": quantize(copy.deepcopy(live)), "noise on its weights": noisy}
for name, candidate in candidates.items():
    verdict = gate.judge(candidate, facts, live, facts, corpus.val_ids[:4096], tolerance=0.02)
    if rank == 0:
        say(f"{name}: {'passes' if verdict.passed else 'is refused'}, {verdict.sentence}")

# %% [markdown]
# **Drift.** The model may stay the same while its users change. A prefill computes the logits of the whole prompt anyway. So the
# server knows, for nothing, how surprised the model is by what people write: nats per symbol, beside those of the held-out text.

# %%
# %%ranks
engine = Engine(target, "drift", num_blocks=24, block_size=8)
expected = gate.loss_on(target, val_ids[:4096])
for name, text in (
    ("Shakespeare", corpus.decode(val_ids[:480])),
    ("other users", "".join(corpus.symbols[-26:]) * 19),
):
    before = engine.prompt_nats, engine.prompt_symbols
    for i in range(0, 480, 48):
        engine.add(corpus.encode(text[i : i + 48]).tolist(), 1)
    while not engine.idle():
        engine.step()
    nats = (engine.prompt_nats - before[0]) / (engine.prompt_symbols - before[1])
    if rank == 0:
        say(f"{name}: {nats:.2f} nats per symbol; the held-out text has {expected:.2f}")

# %% [markdown]
# ## Exercises (MORE, 17 min)
#
# ### Exercise 1: how many users fit?
#
# A GPU has `memory` bytes. The model has P parameters, N layers and width D, and weights, keys and values take `size` bytes per number.
# Each user may have up to S positions. Write `users_that_fit`: how many users' caches fit beside the weights, as an integer, at least 0.


# %%
# %%ranks
def users_that_fit(memory, P, N, D, S, size=2):
    """Whole users whose caches of S positions fit beside the weights."""
    raise NotImplementedError  # your turn


checks.users_that_fit(users_that_fit, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 1
def users_that_fit(memory, P, N, D, S, size=2):
    return max(0, (memory - P * size) // (2 * N * S * D * size))


checks.users_that_fit(users_that_fit, ranks, solution=True)
if rank == 0:
    say(f"7 B on 80 GB, 4,096 positions: {users_that_fit(80 * 10**9, 7 * 10**9, 32, 4096, 4096)} users")

# %% [markdown]
# ### Exercise 2: which blocks can be shared?
#
# `known` is a set of tuples: for each block of `size` positions that lies in the cache, *all ids from the beginning to its
# end*, after a salt that names the model. Write `reusable(ids, known, size, salt)`: how many positions of a new prompt need not be
# computed. Blocks are shared whole. The run must begin at position 0 and have no gap. And at least the last position is
# always computed: the next symbol is drawn from its logits.


# %%
# %%ranks
def reusable(ids, known, size, salt):
    """Positions at the beginning of `ids` whose keys and values are known; an entry is (salt, *ids up to a block's end)."""
    raise NotImplementedError  # your turn


checks.reusable(reusable, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 2
def reusable(ids, known, size, salt):
    end = 0
    while end + size < len(ids) and (salt, *ids[: end + size]) in known:
        end += size
    return end


checks.reusable(reusable, ranks, solution=True)

# %% [markdown]
# ### Exercise 3: worse, or only unlucky?
#
# The gate compares two means. But on a few windows a good candidate may look worse by chance. Both models have read the *same* windows, so
# look at the differences: `new` and `old` are lists of losses, one per window. Write `may_serve(new, old, z)`: False if the mean
# difference is above z standard errors (the standard deviation of the differences, divided by the root of their number; `statistics.stdev`), or if
# any number is not finite; else True.


# %%
# %%ranks
def may_serve(new, old, z=2.0):
    """Whether the new model is not significantly worse on the same windows."""
    raise NotImplementedError  # your turn


checks.may_serve(may_serve, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 3
def may_serve(new, old, z=2.0):
    worse = [a - b for a, b in zip(new, old, strict=True)]
    if not all(map(math.isfinite, worse)):
        return False
    return statistics.mean(worse) <= z * statistics.stdev(worse) / math.sqrt(len(worse))


checks.may_serve(may_serve, ranks, solution=True)

# %% [markdown]
# ## On the cluster
#
# ```bash
# python scripts/serve.py outputs/mine --device cuda --cap.running 64 --watch-s 60     # on a compute node, in a job
# ssh -L 8000:COMPUTE_NODE:8000 LOGIN_NODE                  # with --host 0.0.0.0; or the page by a hub's jupyter-server-proxy
# ```
#
# **What changes on GPUs.** A kernel reads blocks where they lie, instead of gathering them. Weights and cache are bf16 or less, where
# company may change a text: sums in another order, another last digit, once in a while another symbol. Many copies behind a
# load balancer should send the same user to the same copy, where the beginning of the conversation is cached.
#
# **What to look for**: symbols per second *and* time to the first symbol, at the 99th percentile, since they pull in opposite directions;
# blocks held, and how often sequences are put back; nats per symbol of prompts.

# %% [markdown]
# ## Recap
#
# 1. Temperature, top-k, top-p change the die; the symbol that crosses top-p belongs to the kept ones.
# 2. Keys and values never change in a causal model: store 2 N B S D numbers, compute each position once.
# 3. Prefill waits for arithmetic, decode for memory: whatever adds positions to a call is nearly free.
# 4. Guesses kept with min(1, p/q), else redrawn from max(0, p - q), leave p exact, if q is what they were drawn from.
# 5. Sequences join and leave between steps, share blocks of equal beginnings, and must not notice each other.
#
# ## Further reading
#
# - Leviathan et al. 2023, [Fast inference from transformers via speculative decoding](https://arxiv.org/abs/2211.17192): sections 2 and 3.
# - Kwon et al. 2023, [PagedAttention](https://arxiv.org/abs/2309.06180): sections 3 and 4, blocks and sharing.
# - Holtzman et al. 2020, [The curious case of neural text degeneration](https://arxiv.org/abs/1904.09751): section 3.1, top-p.
# - Yu et al. 2022, [Orca](https://www.usenix.org/conference/osdi22/presentation/yu): iteration-level scheduling.

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
