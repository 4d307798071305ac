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
# # 12 Pre-training: from documents to a model
#
# **50 minutes** for the sections marked CORE, 71 with those marked MORE.
#
# After this lesson **you can**
# - find near-duplicates among documents that are spread over ranks, and say how sure you are;
# - train a tokenizer whose merges do not depend on the number of ranks;
# - pack documents into sequences so that no token sees another document, and prove it;
# - compare models with different tokenizers in bits per byte;
# - fit a scaling law to a grid of runs, with its uncertainty, and say where it ends.
#
# **You need** data parallel training ([lesson 03](03_data_parallel.ipynb)) and the FLOPs of a token and
# [MFU](../assets/glossary.md#mfu) ([lesson 01](01_one_device.ipynb)).
#
# **New here:** [pre-training](../assets/glossary.md#pre-training), [shingle](../assets/glossary.md#shingle), [Jaccard
# similarity](../assets/glossary.md#jaccard-similarity), [MinHash](../assets/glossary.md#minhash),
# [BPE](../assets/glossary.md#bpe), [packing](../assets/glossary.md#packing), [document
# mask](../assets/glossary.md#document-mask), [bits per byte](../assets/glossary.md#bits-per-byte),
# [isoFLOP](../assets/glossary.md#isoflop), [scaling law](../assets/glossary.md#scaling-law).
#
# The same file is a script:
#
# ```bash
# python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/12_llm_pretraining.py --merges 256
# mpiexec -n 4 python scripts/12_llm_pretraining.py
# python scripts/12_llm_pretraining.py                   # a world of one: the same path, the same merges
# ```

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Each heading says its minutes. Builds A to D take about three minutes each and are in these numbers.
#
# *Say:* nearly all of the compute goes into one stage, and nearly all of the mistakes happen in the stage before it.
# Every step of the data pipeline must give the same result on any number of ranks, or nobody can repeat the run.
#
# *Three usual mistakes:* Python's `hash()` for something that ranks compare (it differs in each process); comparing
# losses per token of two tokenizers; reading a scaling law outside its range.
#
# *When late:* give solutions A and D, show the first section without reading its table, keep builds B and C, the grid
# and the zoo.
#
# *Ask the room:* "You get ten times the compute. How much of it goes into a larger model?" (About a half, in
# logarithms: the exponent in the grid below.)
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
merges = 256  # merges of the tokenizer, 16 to 2000
hashes = 128  # numbers in a MinHash signature, a multiple of 16, at least 16
live_flops = 6e10  # cost of the model that is trained here, at least 1e9; 6e10 is a recorded point
zoo_steps = 120  # steps of training in which the zoo's bug shows, at least 2

# %% [markdown]
# ## Start (CORE, 2 min)
#
# The first cell starts four ranks. Cells that begin with `%%ranks` run on all of them. Each section needs the cells of
# this one, and then only its own: a folded cell with `catch_up(...)` defines what is missing from earlier ones.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("12_llm_pretraining", globals())

# %%
# %%ranks
import math
import random
import re
import zlib
from collections import Counter

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands import Metrics, catch_up, join, leave, refuse, say, show
from manyhands.checks import llm_pretraining as checks
from manyhands.measure import wire

# %% [markdown]
# The corpus is Shakespeare once more, but now it is a pile of **documents**: the speeches, which blank lines separate.
# Document i belongs to rank i mod n.

# %%
# %%ranks
from manyhands.data.corpus import load_corpus

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
if hashes % 16 or hashes < 16:
    refuse(f"hashes={hashes} does not split into 16 bands; use a multiple of 16")
corpus = load_corpus(ranks)
given = {"merges": merges, "hashes": hashes, "live_flops": live_flops, "zoo_steps": zoo_steps}
metrics = Metrics(ranks, corpus, given)
documents = [text for text in corpus.text.split("\n\n") if text.strip()]
mine = documents[rank::world_size]
say(f"{len(mine):,} of {len(documents):,} documents, {sum(len(text.encode()) for text in mine):,} bytes")

# %% [markdown]
# ## The life of a language model (CORE, 4 min)
#
# ![Six stages in a row: collect and clean, pre-train, fine-tune, align, deploy, monitor and re-evaluate; an arrow leads
# from the last one back to the first; pre-training is marked as nearly all the compute](../assets/12_life.svg)
#
# [**Pre-training**](../assets/glossary.md#pre-training) is one task, guess the next token, on as much text as one can
# get. It takes nearly all of the compute. Fine-tuning and alignment make an assistant of it; then it is deployed,
# watched, and measured again.
#
# Architectures have come close to each other. What differs most is the appetite for data. (B is 10⁹, T is 10¹². Norms,
# positions and MLPs are variants of the parts in [lesson 01](01_one_device.ipynb)'s drawing;
# [GQA](../assets/glossary.md#gqa) shares heads of keys, "latent" compresses them, and of many experts a token uses a
# few.)
#
# | family | norm | positions | MLP | attention | parameters | tokens |
# |---|---|---|---|---|---|---|
# | GPT-3 (Brown et al. 2020) | LayerNorm | learned | GELU | multi-head | 175 B | 0.3 T |
# | Gopher (Rae et al. 2021) | RMSNorm | relative | GELU | multi-head | 280 B | 0.3 T |
# | Chinchilla (Hoffmann et al. 2022) | RMSNorm | relative | GELU | multi-head | 70 B | 1.4 T |
# | LLaMA (Touvron et al. 2023) | RMSNorm | rotary | SwiGLU | multi-head | 65 B | 1.4 T |
# | Llama 2 (Touvron et al. 2023) | RMSNorm | rotary | SwiGLU | GQA | 70 B | 2 T |
# | Llama 3 (Grattafiori et al. 2024) | RMSNorm | rotary | SwiGLU | GQA | 405 B | 15.6 T |
# | DeepSeek-V3 (2024) | RMSNorm | rotary | SwiGLU, experts | latent | 671 B, 37 B active | 14.8 T |
#
# ![Parameters against training tokens of six models on logarithmic axes, with a dashed line of 20 tokens per parameter:
# GPT-3 and Gopher lie far below it, Chinchilla and LLaMA 65B on it, Llama 2 and Llama 3 405B above
# it](../assets/12_appetite.svg)
#
# **Predict.** Training takes about 6 FLOPs per parameter and token. How many FLOPs is Llama 3 405B? How long do 16,000
# GPUs need that reach 400 TFLOP/s each?
#
# <details><summary>Answer</summary>
#
# 6 · 405e9 · 15.6e12 = 3.8e25. 16,000 · 4e14 = 6.4e18 per second, so 5.9e6 s: 69 days, without interruptions.
#
# </details>

# %% [markdown]
# ## Documents that are there twice (CORE, 10 min)
#
# **Why.** Pages of the web are copied, with another header or a changed word. A model that sees them often learns them
# by heart, and one that was trained on its own test looks better than it is. Equal documents are found by a hash of
# their text. For *nearly* equal ones you need a measure.
#
# Cut a document into [**shingles**](../assets/glossary.md#shingle), here three words in a row. Two documents with the
# sets A and B of shingles have the [**Jaccard similarity**](../assets/glossary.md#jaccard-similarity) |A ∩ B| / |A ∪
# B|. But to compare each document with each other is hopeless: a billion documents are 5e17 pairs.
#
# ![Two sets of shingles; a random order of all shingles is laid over both; the first shingle of the union is also the
# first of each set exactly if it lies in both, which happens with probability J](../assets/12_minhash.svg)
#
# [**MinHash**](../assets/glossary.md#minhash) (Broder 1997): put all shingles in a random order. The first shingle of A
# and the first of B are the same exactly if the first of A ∪ B lies in both. So that happens with probability J. Take K
# random orders, and the share of them in which the firsts agree *estimates* J.
#
# A random order is a hash: x → (a·x + b) mod p, smallest first. So a document becomes K small numbers, its
# **signature**.
#
# **Predict.** With K = 128 and J = 0.8, how far off is the estimate typically? (Each order is a coin with probability
# J.)
#
# <details><summary>Answer</summary>
#
# sqrt(J (1 - J) / K) = sqrt(0.16 / 128) = 0.035. Four times the hashes halve it.
#
# </details>

# %%
# %%ranks
PRIME = 2**31 - 1
draw = np.random.default_rng(0)  # the same on all ranks
a_K, b_K = draw.integers(1, PRIME, size=(2, hashes))


def shingle_hashes(text, k=3):
    """The numbers [S] of a text's shingles: k words in a row, in small letters."""
    words = re.findall(r"\w+", text.lower())
    found = {" ".join(words[i : i + k]) for i in range(max(1, len(words) - k + 1))}
    return np.array(sorted(zlib.crc32(shingle.encode()) % PRIME for shingle in found))


# %% [markdown]
# (Not Python's `hash(text)`: it is salted in each process, so four ranks would have four answers.)
#
# ### Build A: signature and estimate
#
# Write `signature(hashes_S, a_K, b_K)`: for each k the smallest of (a_k · x + b_k) mod PRIME over the x of the set, as
# int32 [K]; without a loop, with `PRIME` from above. And `similarity(one_K, other_K)`, the estimate of J as a float.
# (The folded cell below is a solution: whatever you do not build, run there, because the lesson goes on with it.)


# %%
# %%ranks
def signature(hashes_S, a_K, b_K):
    """The smallest hash of the set under each of K hash functions: int32 [K]."""
    raise NotImplementedError  # your turn


def similarity(one_K, other_K):
    """The estimate of the Jaccard similarity of two sets from their signatures."""
    raise NotImplementedError  # your turn


checks.minhash((signature, similarity), ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution A
def signature(hashes_S, a_K, b_K):
    ordered_SK = (hashes_S[:, None] * a_K + b_K) % PRIME
    return ordered_SK.min(0).astype(np.int32)


def similarity(one_K, other_K):
    return float((one_K == other_K).mean())


checks.minhash((signature, similarity), ranks, solution=True)

# %% [markdown]
# **One experiment.** Plant copies of long speeches, in which some words are exchanged. Each rank makes and signs its
# share. We know the true J of each pair, so the estimate can be held against it. What should the plot show? Points
# around the diagonal, about two thirds of them within the dashed lines, one standard deviation away.


# %%
# %%ranks
def copy_of(text, share, dice):
    """The text with about this share of its words exchanged for others of its own."""
    words = text.split()
    return " ".join(dice.choice(words) if dice.random() < share else word for word in words)


def jaccard(one_S, other_S):
    both = len(np.intersect1d(one_S, other_S))
    return both / (len(one_S) + len(other_S) - both)


dice, pairs = random.Random(rank), []
long = [text for text in mine if len(text.split()) >= 60]
for i, text in enumerate(long[:80]):
    sets = [shingle_hashes(text), shingle_hashes(copy_of(text, 0.004 * (i % 80), dice))]
    estimate = similarity(*(signature(hashes_S, a_K, b_K) for hashes_S in sets))
    pairs.append((jaccard(*sets), estimate))
gathered = [None] * world_size
dist.all_gather_object(gathered, pairs)

# %%
# %%ranks
true_N, found_N = np.array([pair for pairs in gathered for pair in pairs]).T
sigma_N = np.sqrt(true_N * (1 - true_N) / hashes)
inside = int((np.abs(found_N - true_N) <= sigma_N).sum())
if rank == 0:
    from manyhands.figures.pretraining import estimates

    alt = "estimated against true similarity of planted copies: points around the diagonal, in a band"
    show(estimates(gathered, hashes), "minhash", alt)
    say(f"{inside} of {len(true_N)} estimates are within one standard deviation: {inside / len(true_N):.0%}")
metrics.exact(minhash_inside=inside)

# %% [markdown]
# And the pairs? Cut each signature into 16 **bands**. Only documents that agree in *all* numbers of some band are
# compared: a look into a dictionary. With r numbers in a band that happens with probability 1 - (1 - J^r)^16; for r = 8
# it is 0.06 at J = 0.5, and 0.95 at J = 0.8.


# %%
# %%ranks
def near_duplicates(signatures_NK, limit=0.6):
    """{document: the earlier one of which it is a copy}; who comes first is kept."""
    seen, dropped = {}, {}
    for i, signature_K in enumerate(signatures_NK):
        bands = [(b, part.tobytes()) for b, part in enumerate(np.split(signature_K, 16))]
        twin = next((seen[band] for band in bands if band in seen), None)
        if twin is not None and similarity(signature_K, signatures_NK[twin]) >= limit:
            dropped[i] = twin
        else:
            for band in bands:
                seen.setdefault(band, i)
    return dropped


# %% [markdown]
# Ranks exchange signatures, never texts. Each signs its share, an all-gather hands all signatures to all, and all
# decide the same:

# %%
# %%ranks
dice = random.Random(1)
pile = [text for text in documents if len(text.split()) >= 20][:1000]
copies = {len(pile) + k: 40 * k for k in range(25)}  # where the copy stands: where its original does
pile += [copy_of(pile[i], 0.03, dice) for i in copies.values()]
each = math.ceil(len(pile) / world_size)
mine_eK = np.zeros((each, hashes), np.int32)
for k, text in enumerate(pile[rank * each : (rank + 1) * each]):
    mine_eK[k] = signature(shingle_hashes(text), a_K, b_K)
all_NK = torch.zeros(world_size * each, hashes, dtype=torch.int32, device=device)
with wire.watch() as seen:
    dist.all_gather(list(all_NK.chunk(world_size)), torch.from_numpy(mine_eK).to(device))

# %%
# %%ranks
dropped = near_duplicates(all_NK.cpu().numpy()[: len(pile)])
found = sum(dropped.get(copy) == original for copy, original in copies.items())
truth = [jaccard(shingle_hashes(pile[copy]), shingle_hashes(pile[i])) for copy, i in copies.items()]
expected = sum(1 - (1 - J ** (hashes // 16)) ** 16 for J in truth)
if rank == 0:
    text_bytes = sum(len(text.encode()) for text in pile)
    say(
        f"found {found} of {len(copies)} planted copies, expected {expected:.1f}; and {len(dropped) - found} more"
    )
    predicted = 4 * hashes * world_size * each
    say(f"all-gathered {seen.payload_bytes():,} bytes, predicted {predicted:,}; texts have {text_bytes:,}")
    assert seen.payload_bytes() == predicted
metrics.exact(dropped=sorted(dropped.items()))

# %% [markdown]
# Speeches are short, so that a signature is as long as its text. For pages of 5 kB it is a tenth. Real pipelines also
# **filter**: too short, too few letters, lines that repeat. `prepare_data.py` (at the end) does all of this, and
# reports what it dropped and why.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: duplicates</summary>
#
# *Usual mistake:* believing that a long signature makes the search slow. The search is in the bands; K makes the
# estimate sharp. *Ask:* "which of these steps needs all documents in one place?" (None: only signatures, and with bands
# one could send each band to one rank.) *When late:* skip the plot.
#
# </details>

# %% [markdown]
# ## Tokens: byte-pair encoding (CORE, 10 min)
#
# **Why.** Characters make long sequences, whole words make endless vocabularies and unknown words.
# [**BPE**](../assets/glossary.md#bpe) (Sennrich et al. 2016) lies between: begin with the 256 bytes, and again and
# again make the *most frequent pair of neighbours* a new token. Bytes cover every text, so nothing is unknown.
#
# ![The words banana and bandana as letters; the pair a n occurs four times and becomes one token; then b with an,
# twice](../assets/12_bpe.svg)
#
# **Predict.** Which pair is merged third, after `an` and `b`+`an`? If several are equally frequent, that with the
# smallest numbers wins; numbers are bytes first (`a` < `b` < `d` < `n`), then tokens in their order.
#
# <details><summary>Answer</summary>
#
# `ban an a` and `ban d an a`: `an`+`a` occurs twice, all others once. Without a rule for ties two programs would soon
# disagree.
#
# </details>
#
# ### Build B: one merge
#
# `pairs` counts the pairs of neighbours, as {(a, b): how often}. Write `most_frequent(pairs)`, ties as above; and
# `merge(ids, pair, new)`: the list with each occurrence of `pair` replaced by `new`, from left to right. A token is
# used once: of a a a only the first two become one.


# %%
# %%ranks
def most_frequent(pairs):
    """The pair that occurs most often; of several the smallest."""
    raise NotImplementedError  # your turn


def merge(ids, pair, new):
    """`ids`, a list, with `new` in place of each `pair`, as a new list."""
    raise NotImplementedError  # your turn


checks.one_merge((most_frequent, merge), ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution B
def most_frequent(pairs):
    return min(pairs, key=lambda pair: (-pairs[pair], pair))


def merge(ids, pair, new):
    merged, i = [], 0
    while i < len(ids):
        both = tuple(ids[i : i + 2]) == pair
        merged.append(new if both else ids[i])
        i += 2 if both else 1
    return merged


checks.one_merge((most_frequent, merge), ranks, solution=True)

# %% [markdown]
# Pairs are counted inside words only, each with the space before it. So it suffices to know how often each *word*
# occurs. After a merge only the words that contain the pair are counted anew:


# %%
# %%ranks
WORDS = re.compile(r" ?[a-zA-Z]+| ?[^a-zA-Z\s]+|\s")


def word_counts(texts):
    """{word as bytes: how often}"""
    return Counter(word.encode() for text in texts for word in WORDS.findall(text))


say(list(WORDS.findall("Who goes there?\nI.")))


# %%
# %%ranks
def train_bpe(counts, merges):
    """The merges [(a, b), ...]; number i makes the token 256 + i."""
    words = [[list(word), n] for word, n in counts.items()]
    pairs, table = Counter(), []
    for ids, n in words:
        pairs.update({pair: k * n for pair, k in Counter(zip(ids, ids[1:], strict=False)).items()})
    while len(table) < merges and any(n > 0 for n in pairs.values()):
        table.append(most_frequent(pairs))
        for entry in (entry for entry in words if table[-1][0] in entry[0]):
            old, entry[0] = entry[0], merge(entry[0], table[-1], 255 + len(table))
            for ids, sign in ((old, -1), (entry[0], 1)):
                for pair in zip(ids, ids[1:], strict=False):
                    pairs[pair] += sign * entry[1]
    return table


# %% [markdown]
# Your answer from the figure, now by the code. (97, 110) is `an`, and 256 its token:

# %% tags=["nbval-check-output"]
# %%ranks
by_hand = train_bpe(Counter({b"banana": 1, b"bandana": 1}), 3)
say(f"merges {by_hand}")

# %% [markdown]
# **Predict.** Each rank has some documents. For the same merges on any number of ranks, what should they exchange: the
# text, the counts of words, or at each merge the counts of pairs?
#
# <details><summary>Answer</summary>
#
# The counts of words, once. They grow slowly, as new text brings few new words. Counts of pairs would need a collective
# for each merge. Sums of whole numbers are the same in any order, so all ranks find the same merges.
#
# </details>

# %%
# %%ranks --timeout 120
gathered, own = [None] * world_size, word_counts(mine)
with wire.watch() as seen:
    dist.all_gather_object(gathered, own)
counts = sum(gathered, Counter())
table = train_bpe(counts, merges)
if rank == 0:
    handed = sum(call.bytes for call in seen.calls)
    say(f"{len(own):,} different words of mine, {len(counts):,} of all")
    say(f"gathered: {handed:,} bytes, all texts have {len(corpus.text.encode()):,}")
    token = {i: bytes([i]) for i in range(256)}
    for i, (a, b) in enumerate(table):
        token[256 + i] = token[a] + token[b]
    say(f"first merges {[token[256 + i].decode() for i in range(8)]}")
    say(f"longest tokens {[t.decode('latin-1') for t in sorted(token.values(), key=len)[-6:]]}")
metrics.exact(merges=[list(pair) for pair in table])

# %% [markdown]
# **The library's way** is `tokenizers`, written in Rust. It works on characters, so give it one character per byte. Its
# merges must be ours:

# %%
# %%ranks --timeout 120
import json

from tokenizers import Tokenizer, models, trainers


def by_library(counts, merges):
    """A tokenizer of `tokenizers` for words given as bytes: token i < 256 is the byte i."""
    bpe = Tokenizer(models.BPE())
    alphabet = [chr(i) for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=256 + merges, initial_alphabet=alphabet, show_progress=False, limit_alphabet=256
    )
    bpe.train_from_iterator((word.decode("latin-1") for word in counts.elements()), trainer)
    return bpe


bpe = by_library(counts, merges)
model = json.loads(bpe.to_str())["model"]
theirs = [(model["vocab"][a], model["vocab"][b]) for a, b in model["merges"]]
assert theirs == table, "ours and the library's merges differ"
say(f"{len(table)} merges, the same as the library's")

# %% [markdown]
# Now each rank tokenizes its documents and writes a **shard**: a file of 16-bit numbers that a training maps into
# memory. A token of its own, the **mark**, begins each document.

# %%
# %%ranks
from manyhands.data.token_file import write_tokens
from manyhands.runs.run_folder import run_folder

MARK = 256 + len(table)


def encode(text):
    """The tokens of a text, by the library."""
    words = (bpe.encode(word.encode().decode("latin-1")).ids for word in WORDS.findall(text))
    return [i for ids in words for i in ids]


def decode(ids):
    parts = (bpe.id_to_token(i).encode("latin-1") for i in ids if i != MARK)
    return b"".join(parts).decode("utf-8", "replace")


say(encode(" there, there"))

# %%
# %%ranks
stream = [i for text in mine for i in (MARK, *encode(text))]
shard = write_tokens(run_folder(ranks) / f"train-{rank:05d}.bin", stream)
assert decode(stream) == "".join(mine)
text_bytes = sum(len(text.encode()) for text in mine)
total = torch.tensor([shard.count, text_bytes], device=device)
dist.all_reduce(total)
say(f"{shard.count:,} tokens, {text_bytes / (shard.count - len(mine)):.2f} bytes per token")
metrics.exact(tokens=total.tolist())

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: tokens</summary>
#
# Do banana and bandana by hand with the room. *Usual mistake:* counting pairs across a space, so that `e t` of "the
# the" becomes a token. *Ask:* "why does the training need the words' counts, and encoding the order of the merges?"
# *When late:* give `merge` and let them write `most_frequent`.
#
# </details>

# %% [markdown]
# ## Packing: many documents in one sequence (CORE, 8 min)
#
# **Why.** Documents have all lengths, a batch has one. Padding wastes compute. So documents are
# [**packed**](../assets/glossary.md#packing): one after the other in a row that is cut into sequences of T tokens. Now
# two documents stand in one sequence, and attention looks back from the second into the first.
#
# ![Three documents in one sequence of ten tokens, and the mask of ten by ten: three triangles along the diagonal are
# allowed, the rest of the lower half is not](../assets/12_packing.svg)
#
# A [**document mask**](../assets/glossary.md#document-mask) forbids that. For each position you know the number of its
# document.
#
# ### Build C: the mask
#
# Write `document_mask(documents_BT)`: bool [B, T, T], True where the query (the second dim) may look at the key (the
# third): the same document, and not later. No loops.


# %%
# %%ranks
def document_mask(documents_BT):
    """Which key each query may look at: bool [B, T, T]."""
    raise NotImplementedError  # your turn


checks.document_mask(document_mask, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution C
def document_mask(documents_BT):
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same_BTT.tril()


checks.document_mask(document_mask, ranks, solution=True)

# %% [markdown]
# The mask goes into attention, on the parts of the course's GPT. `positions_of` lets positions **begin anew** with each
# document:


# %%
# %%ranks
def positions_of(documents_BT):
    """0, 1, 2, ... from the beginning of each document; documents are numbered in order."""
    first_BT = torch.searchsorted(documents_BT, documents_BT)  # where its document begins
    return torch.arange(documents_BT.shape[1], device=documents_BT.device) - first_BT


def packed_logits(model, ids_BT, mask_BTT, positions_BT):
    """The GPT's logits [B, T, V] under this mask, with these positions."""
    x_BTD = model.tokens(ids_BT) + model.positions(positions_BT)
    for block in model.blocks:
        attention = block.attention
        qkv_BHT3E = attention.qkv(block.norm_1(x_BTD)).unflatten(-1, (-1, 3, attention.head_size))
        q_BHTE, k_BHTE, v_BHTE = qkv_BHT3E.transpose(1, 2).unbind(-2)
        y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, attn_mask=mask_BTT[:, None])
        x_BTD = x_BTD + attention.out(y_BHTE.transpose(1, 2).flatten(2))
        x_BTD = x_BTD + block.mlp(block.norm_2(x_BTD))
    return model.head(model.norm(x_BTD))


# %% [markdown]
# **The proof** is to run each document alone. Each rank does it with two packed sequences of its own, of characters and
# marks:

# %%
# %%ranks
from manyhands.gpt.model import GPT, GPTConfig

B, T, mark = 2, 256, len(corpus.symbols)
torch.manual_seed(1337)
gpt = GPT(GPTConfig(vocab_size=mark + 1, block_size=T)).to(device, torch.float64)
row = [i for text in mine[:50] for i in (mark, *corpus.encode(text).tolist())]
ids_BT = torch.tensor(row[: B * T], device=device).view(B, T)
documents_BT = (ids_BT == mark).cumsum(1)
mask_BTT = document_mask(documents_BT)
packed_BTV, apart = packed_logits(gpt, ids_BT, mask_BTT, positions_of(documents_BT)), 0.0
for row in range(B):
    for number in documents_BT[row].unique():
        here_T = documents_BT[row] == number
        alone_tV = gpt(ids_BT[row : row + 1, here_T])[0][0]
        apart = max(apart, (packed_BTV[row, here_T] - alone_tV).abs().max().item())
assert apart < 1e-10
share = mask_BTT.sum().item() / (B * T * (T + 1) / 2)
say(
    f"{len(documents_BT.unique())} documents; packed and alone differ by {apart:.0e}; {share:.0%} of causal pairs"
)

# %% [markdown]
# **The library's way**: the package's GPT masks by itself where its configuration names the mark, and so does
# `train.py` under every strategy. Its positions count on through the sequence, because a window may begin in the middle
# of a document, where nobody knows the true position.

# %%
# %%ranks
library = GPT(GPTConfig(vocab_size=mark + 1, block_size=T, document_mark=mark)).to(device, torch.float64)
library.load_state_dict(gpt.state_dict())
counting_T = torch.arange(T, device=device)
apart = packed_logits(gpt, ids_BT, mask_BTT, counting_T) - library(ids_BT)[0]
assert apart.abs().max() < 1e-10
say(f"ours and the package's differ by {apart.abs().max().item():.0e}")

# %% [markdown]
# One more measurement, which belongs into the tests of any trainer: **change the second token of a sequence. What moves
# in the documents behind the first?**

# %%
# %%ranks
other_BT = ids_BT.clone()
other_BT[:, 1] = (other_BT[:, 1] + 1) % mark
later_BT = documents_BT != documents_BT[:, :1]
causal_BTT = torch.ones_like(mask_BTT).tril()
for name, *how in (
    ("plain causal", causal_BTT, counting_T),
    ("positions begin anew", causal_BTT, positions_of(documents_BT)),
    ("document mask", mask_BTT, counting_T),
):
    before, after = (packed_logits(gpt, ids, *how) for ids in (ids_BT, other_BT))
    leak = (before - after)[later_BT].abs().max().item()
    if rank == 0:
        say(f"{name:21} later documents move by {leak:.1e}")

# %% [markdown]
# Positions that begin anew hide nothing. A [pull request for nanoVLM](https://github.com/huggingface/nanoVLM/pull/204)
# measured such a leak: 0.4621 as it was, 0.4625 with positions that restart, and a mask of documents was the cure.
#
# A dense mask saves no work: all pairs are computed, and most thrown away. Kernels that know where documents begin
# (FlashAttention's `varlen`, `flex_attention`) compute only the pairs that count.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: packing</summary>
#
# Draw the mask of documents of 2, 3 and 1 tokens on the board. *Usual mistake:* a mask of documents without the causal
# half, or one that leaves the mark to the document before. *Ask:* "does a mask of zeros and ones save compute?" (Not by
# itself.)
#
# </details>

# %% [markdown]
# ## Bits per byte (CORE, 6 min)
#
# **Why.** A loss is nats *per token*. A tokenizer with longer tokens has fewer and harder guesses, so its loss is
# higher for the same knowledge. What all models share is the text: divide by its **bytes**.
#
# **Predict.** Knowing nothing costs ln 65 = 4.17 nats per character, and ln 512 = 6.24 nats per token of 1.9 bytes.
# Which is less per byte?
#
# <details><summary>Answer</summary>
#
# 4.17 / ln 2 = 6.02 bits per byte, and 6.24 / ln 2 / 1.9 = 4.7. The token model already knows how common merges are.
#
# </details>
#
# ### Build D: bits per byte
#
# Write `bits_per_byte(nats_per_token, tokens, num_bytes)` for a mean loss over `tokens` tokens, which stand for
# `num_bytes` bytes. A bit is ln 2 nats.


# %%
# %%ranks
def bits_per_byte(nats_per_token, tokens, num_bytes):
    """The loss in bits per byte of text."""
    raise NotImplementedError  # your turn


checks.bits_per_byte(bits_per_byte, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution D
def bits_per_byte(nats_per_token, tokens, num_bytes):
    return nats_per_token * tokens / math.log(2) / num_bytes


checks.bits_per_byte(bits_per_byte, ranks, solution=True)

# %% [markdown]
# The simplest model there is knows how often each token occurs, and nothing else. Each rank counts its own tokens, an
# all-reduce adds up:

# %% jupyter={"source_hidden": true}
# %%ranks --timeout 120
catch_up(globals(), "word_counts", "by_library", "encode")
if "bpe" not in globals():
    from tokenizers import Tokenizer, models, trainers

    WORDS = re.compile(r" ?[a-zA-Z]+| ?[^a-zA-Z\s]+|\s")
    bpe = by_library(word_counts(documents), merges)
    MARK = 256 + merges


# %%
# %%ranks
def by_frequency(mine_N, size):
    """Mean nats per token of a model that knows frequencies only, and the number of tokens. All ranks call it."""
    counts_V = torch.bincount(torch.tensor(mine_N), minlength=size).to(device)
    dist.all_reduce(counts_V)
    counts_V = counts_V[counts_V > 0].double()
    share_V = counts_V / counts_V.sum()
    return -(share_V * share_V.log()).sum().item(), int(counts_V.sum())


num_bytes = sum(len(text.encode()) for text in documents)
characters = [i for text in mine for i in corpus.encode(text).tolist()]
tokens = [i for text in mine for i in encode(text)]
for name, ids, size in (("characters", characters, len(corpus.symbols)), ("BPE tokens", tokens, MARK)):
    nats, count = by_frequency(ids, size)
    bits = bits_per_byte(nats, count, num_bytes)
    if rank == 0:
        say(
            f"{name:11} {nats:.2f} nats per token, {bits:.2f} bits per byte, {num_bytes / count:.2f} bytes per token"
        )

# %% [markdown]
# The higher loss belongs to the better model. So a loss without its tokenizer says nothing.

# %% [markdown]
# ## How large, for how long? A scaling law (CORE, 6 min)
#
# **Why.** The budget is fixed: so many GPUs for so many days. A larger model learns more from each token, but sees
# fewer of them. Which size is best? Try it where it is cheap. For one budget train several sizes, each on as many
# tokens as the budget buys: an [**isoFLOP**](../assets/glossary.md#isoflop) curve (Hoffmann et al. 2022). Its lowest
# point is the best size. Some budgets give a line in logarithms, a [**scaling
# law**](../assets/glossary.md#scaling-law).
#
# The grid is recorded: 3 budgets of 6 sizes, on characters, by `python -m manyhands.trainer.isoflop`. One of its models
# is trained here, now, by all ranks, data parallel.
#
# **Predict.** What does one budget's curve look like? Where does its lowest point go when the budget grows?
#
# <details><summary>Answer</summary>
#
# A valley: small models cannot hold more, large ones see too few tokens. It goes right and down.
#
# </details>

# %%
# %%ranks --timeout 300
from manyhands.measure.timing import gemm_peak
from manyhands.predict.scaling import by_budget, parabola, power_law, residuals, spread
from manyhands.runs import recorded_runs
from manyhands.trainer.isoflop import Point, train_point

grid = recorded_runs.numbers("12_isoflop.json")
live = train_point(Point(live_flops, 24), corpus, ranks)
peak = torch.tensor(gemm_peak(device, torch.float32, 0.2), device=device)  # FLOP/s, all ranks at once
dist.all_reduce(peak)
flop_per_s = live["flops"] / live["seconds"]
if rank == 0:
    say(f"{live['params']:,} parameters, {live['tokens']:,} tokens, {live['steps']} steps")
    say(f"validation loss {live['val_loss']:.3f}")
    say(
        f"{flop_per_s / 1e9:.1f} GFLOP/s; against large matrix products here an MFU of {flop_per_s / peak.item():.0%}"
    )
metrics.close(1e-2, live_loss=live["val_loss"])
metrics.measured(flop_per_s=flop_per_s)

# %% [markdown]
# The MFU is low because the matrices are small: this model is 24 numbers wide.
#
# `train.py` takes the strategies of the course as flags, and `train_point` the data-parallel ones by name. A thirtieth of
# the budget under three of them must end with the same loss, but for rounding:

# %%
# %%ranks --timeout 120
losses = {}
for strategy in ("ddp", "zero1", "fsdp"):
    losses[strategy] = train_point(Point(live_flops / 30, 24), corpus, ranks, strategy)["val_loss"]
if rank == 0:
    say(", ".join(f"{strategy} {loss:.5f}" for strategy, loss in losses.items()))
assert max(losses.values()) - min(losses.values()) < 1e-3

# %%
# %%ranks
points = grid["points"]
optima = [parabola(rows) for rows in by_budget(points).values()]
law, sure = power_law(optima), spread(points)
if rank == 0:
    from manyhands.figures.pretraining import isoflop

    alt = "loss against parameters for three budgets, each a valley; the lowest points go right and down"
    show(isoflop(by_budget(points), optima, law, live), "isoflop", alt)
    for best in optima:
        each = best.budget_flops / 6 / best.params**2
        say(f"{best.budget_flops:.0e} FLOPs: best {best.params:7,.0f} parameters, loss {best.loss:.3f}")
        say(f"   that is about {each:.0f} tokens per parameter")
    say(f"the points lie {residuals(points)[0]:.3f} from their parabolas (standard deviation)")
    low, high = sure["exponent"]
    say(f"parameters grow as C^{law.exponent:.2f}, 90 % of refits between {low:.2f} and {high:.2f}")

# %%
# %%ranks
same = [p for p in points if (p["budget_flops"], p["width"]) == (live_flops, 24)]
ten = 10 * optima[-1].budget_flops
if rank == 0:
    if same:
        say(f"live {live['val_loss']:.3f} on {world_size} ranks, recorded {same[0]['val_loss']:.3f} on one")
    params, loss = law.at(ten)
    (few, many), (least, most) = sure["params"], sure["loss"]
    say(f"ten times the largest budget: {params:,.0f} parameters [{few:,.0f} to {many:,.0f}]")
    say(f"its loss {loss:.2f} [{least:.2f} to {most:.2f}]")
    say(f"it would read {ten / 6 / params:,.0f} tokens, and the corpus has {len(corpus.train_ids):,}")

# %% [markdown]
# **How far would you trust it?** The brackets know the scatter of 18 points, and nothing else. They do not know that:
#
# - the learning rate was tuned for the smallest budget only, and a curve of badly tuned runs has its lowest point
#   elsewhere;
# - the corpus has one megabyte. Already these runs read it several times, and a repeated token is worth less;
# - three budgets span a factor of ten. Published laws span a thousand and more, and still disagree: Kaplan et al.
#   (2020) found an exponent of 0.73, Hoffmann et al. (2022) about 0.5. GPT-3 has 2 tokens per parameter, Chinchilla 20;
# - the fit itself can be wrong: Besiroglu et al. (2024) read the points of Hoffmann's third approach off its plots.
#   Their fit to them gives other numbers, and they find the published intervals implausibly narrow.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the scaling law</summary>
#
# While the point trains, let the room draw the curve. *Usual mistake:* comparing two models that were trained on
# equally many tokens, and calling the larger one better. *Ask:* "what changes if the model will answer a billion
# questions?" (A smaller model trained for longer is cheaper to serve: that is why Llama 3 lies far above the line of
# 20.) *When late:* show the stored figure.
#
# </details>

# %% [markdown]
# ## Do abilities emerge? (MORE, 3 min)
#
# Wei et al. (2022) call an ability *emergent* if small models do not have it and larger ones do, so that nobody could
# have predicted it from the small ones. Schaeffer et al. (2023) answer that often the *measure* jumps, not the model: a
# score that counts only answers in which every token is right turns a smooth gain into a sudden one.
#
# Look at the 18 models again. For each we know how often the next character is guessed right, and how often five in a
# row are.
#
# **Predict.** If guesses were independent, a model that is right in 35 % would have five in a row right in how many?
# And one with 50 %?
#
# <details><summary>Answer</summary>
#
# 0.35⁵ = 0.5 %, 0.5⁵ = 3 %. From 35 to 50 % is less than half as much again; 0.5 to 3 % is six times.
#
# </details>

# %%
# %%ranks
from manyhands.runs import recorded_runs

if rank == 0:
    from manyhands.figures.pretraining import emergence

    points = recorded_runs.numbers("12_isoflop.json")["points"]
    alt = "the same 18 models by loss: how often one character is right, and five in a row"
    show(emergence(points), "emergence", alt)
    worst, best = (f(points, key=lambda point: point["val_loss"]) for f in (max, min))
    for name in ("accuracy", "in_a_row"):
        say(f"{name:9} from {worst[name]:.1%} to {best[name]:.1%}, times {best[name] / worst[name]:.1f}")

# %% [markdown]
# Both curves come from the same answers. (There are 6,144 groups of five: 1 % of them are 61, give or take 8, hence the
# scatter.) Whether *all* reported jumps are of this kind is still argued about; the lesson to take home is to report a
# smooth measure beside a strict one.

# %% [markdown]
# ## Exercises (MORE, 18 min)
#
# Each check runs your answer in a process group of its own: you cannot break anything.
#
# ### Exercise 1: encode a word
#
# The merges are known; which of them apply to a new word, and in which order? Write `encode_word(word, table)`: the
# tokens of `word`, given as bytes. As long as neighbours of the word are in the table, merge the pair that was *learned
# first*, everywhere in the word. You may use your `merge`. `table[i]` makes the token 256 + i.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "merge")


# %%
# %%ranks
def encode_word(word, table):
    """The list of a word's tokens under these merges."""
    raise NotImplementedError  # your turn


checks.encode_word(encode_word, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 1
def encode_word(word, table):
    ids, number = list(word), {pair: i for i, pair in enumerate(table)}
    while known := [number[pair] for pair in zip(ids, ids[1:], strict=False) if pair in number]:
        ids = merge(ids, table[min(known)], 256 + min(known))
    return ids


checks.encode_word(encode_word, ranks, solution=True)

# %% [markdown]
# ### Exercise 2: what does a packed sequence teach?
#
# Where a mark stands between documents, the last token of one learns to guess "the end". Without a mark it is followed
# by the first token of another document, which nobody can guess, and nobody should try. Write `packed_targets(ids_BT,
# documents_BT)`: for each position the next token of the *same document*, and -100 where there is none, which
# `F.cross_entropy` leaves out. At the end of the sequence we do not know the next token. Leave `ids_BT` as it is.


# %%
# %%ranks
def packed_targets(ids_BT, documents_BT):
    """The target of each position, -100 where none counts: [B, T]."""
    raise NotImplementedError  # your turn


checks.packed_targets(packed_targets, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 2
def packed_targets(ids_BT, documents_BT):
    targets_BT = torch.full_like(ids_BT, -100)
    goes_on_Bt = documents_BT[:, 1:] == documents_BT[:, :-1]
    targets_BT[:, :-1] = torch.where(goes_on_Bt, ids_BT[:, 1:], -100)
    return targets_BT


checks.packed_targets(packed_targets, ranks, solution=True)

# %% [markdown]
# Ranks now have unequal numbers of targets. A mean of the ranks' means is not the mean over the tokens: lesson 05 says
# what to divide by.
#
# ### Exercise 3: predict the next loss
#
# `points` are dicts with `budget_flops`, `params` and `val_loss`, for two budgets or more. Write `next_best(points,
# budget_flops)`: (parameters, loss) of the best model for a *larger* budget. For each budget a parabola of the loss in
# ln(params) gives its lowest point (`np.polyfit(x, y, 2)`); through the logarithms of the lowest points goes a straight
# line against ln(budget), one for the parameters and one for the loss.


# %%
# %%ranks
def next_best(points, budget_flops):
    """(parameters, loss) of the best model for this budget, by what smaller budgets have shown."""
    raise NotImplementedError  # your turn


checks.next_best(next_best, ranks)


# %% jupyter={"source_hidden": true} tags=["solution"]
# %%ranks
# solution 3
def next_best(points, budget_flops):
    rows = []
    for budget in sorted({point["budget_flops"] for point in points}):
        here = [point for point in points if point["budget_flops"] == budget]
        bend, slope, height = np.polyfit(
            np.log([p["params"] for p in here]), [p["val_loss"] for p in here], 2
        )
        rows.append((np.log(budget), -slope / 2 / bend, np.log(height - slope**2 / 4 / bend)))
    x, log_params, log_loss = np.array(rows).T
    return tuple(
        float(np.exp(np.polyval(np.polyfit(x, y, 1), np.log(budget_flops)))) for y in (log_params, log_loss)
    )


checks.next_best(next_best, ranks, solution=True)

# %% [markdown]
# A law is worth what it predicts. Two budgets of the grid predict the third, which it has not seen:

# %%
# %%ranks
from manyhands.predict.scaling import by_budget, parabola
from manyhands.runs import recorded_runs

if rank == 0:
    *smaller, largest = by_budget(recorded_runs.numbers("12_isoflop.json")["points"]).values()
    seen_points = [point for rows in smaller for point in rows]
    params, loss = next_best(seen_points, largest[0]["budget_flops"])
    best = parabola(largest)
    say(
        f"predicted {params:,.0f} parameters and loss {loss:.3f}; measured {best.params:,.0f} and {best.loss:.3f}"
    )

# %% [markdown]
# ## A bug from the zoo (CORE, 4 min)
#
# A model computes its own loss from logits and targets. Somebody found the same lines in a library's loss function and
# used that one. It runs, and the loss falls. **What is wrong, and which measurement shows it?** Write down your
# suspicion before you open the answer.


# %%
# %%ranks
def shifted_loss(logits_bTV, targets_bT):
    """The library's: position t is to guess what stands at t + 1."""
    return F.cross_entropy(logits_bTV[:, :-1].flatten(0, 1), targets_bT[:, 1:].flatten())


def plain_loss(logits_bTV, targets_bT):
    return F.cross_entropy(logits_bTV.flatten(0, 1), targets_bT.flatten())


# %%
# %%ranks --timeout 120
from manyhands.data.corpus import get_batch
from manyhands.gpt.model import GPT, GPTConfig
from manyhands.parallel.flat_ddp import FlatReplicas

rows = 24 if 24 % world_size == 0 else world_size


def train(loss_of):
    """A small GPT after `zoo_steps` steps on all ranks, and its last loss. Targets are one further than inputs."""
    torch.manual_seed(1337)
    model = GPT(GPTConfig(len(corpus.symbols), block_size=32, n_layer=2, n_head=2, n_embd=48)).to(device)
    replicas = FlatReplicas(model)
    optimizer = torch.optim.AdamW([part for part, _ in replicas.parts], lr=5e-3)
    for step in range(zoo_steps):
        ids_bT, targets_bT = (
            t.to(device) for t in get_batch(corpus.train_ids, step, rows, 32, rank, world_size, 1)
        )
        loss = loss_of(model(ids_bT)[0], targets_bT)
        replicas.backward(loss, last=True)
        optimizer.step()
        optimizer.zero_grad()
    return model, loss.item()


wrong, loss = train(shifted_loss)
if rank == 0:
    say(f"loss after {zoo_steps} steps: {loss:.2f}; it began at {math.log(len(corpus.symbols)):.2f}")

# %% [markdown]
# Now measure: how well do the logits at t guess the character at t, t + 1, t + 2, t + 3?

# %%
# %%ranks --timeout 120
mended, right_loss = train(plain_loss)
text_BT = corpus.val_ids[: 64 * 36].view(64, 36).to(device)
start_11 = torch.zeros(1, 1, dtype=torch.long, device=device)
for name, model, last in (("theirs", wrong, loss), ("mended", mended, right_loss)):
    with torch.no_grad():
        logits_BTV = model(text_BT[:, :32])[0].flatten(0, 1)
    nats = [F.cross_entropy(logits_BTV, text_BT[:, k : k + 32].flatten()).item() for k in range(4)]
    written = corpus.decode(model.generate(start_11, 60)[0])
    if rank == 0:
        say(f"{name}: training loss {last:.2f}; it writes {written!r}")
        say("   nats for the character at " + ", ".join(f"t + {k}: {nats[k]:.2f}" for k in range(4)))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Targets were shifted twice: by the batch, and by the loss. The model learns to guess the character *after* the next.
# There is enough to learn in that, so the loss falls; it stops at a higher value, and what is sampled is no English.
#
# It happens where a library's loss begins to shift and a model's own lines still do. In transformers GIT was trained so
# in every release from v4.49 on, until somebody looked
# ([transformers#47394](https://github.com/huggingface/transformers/issues/47394), mended in #47395; the flattened
# labels even took a target from the next row of the batch). The same in JetMoe:
# [transformers#37830](https://github.com/huggingface/transformers/pull/37830).
#
# </details>
#
# The rule to take home: **score the model against targets moved by one in both directions.** The right ones must win.
# And look at a sample before you look at a curve.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# Let the room look at the sample first. *Ask:* "would a comparison with one process have found it?" (No: one process
# computes the same wrong loss.) *When late:* run only the cell that measures.
#
# </details>

# %% [markdown]
# ## On the cluster
#
# Each step of this lesson is one command. The first one gives each rank its share of the files:
#
# ```bash
# mpiexec -n 4 python scripts/prepare_data.py pages/ --tokenizer bpe --vocab-size 8192 --to data/mine
# python scripts/launch.py --nproc 4 -- --data.folder data/mine --parallel.strategy fsdp
# python -m manyhands.trainer.isoflop --to outputs/isoflop.json
# ```
#
# **What changes on GPUs.** Cleaning and tokenizing stay on CPUs, days before: GPUs must not wait for text. Document
# masks go through FlashAttention's `varlen` or `flex_attention`. A grid of small runs is a job array; keep one batch
# size and tune the learning rate for each size, or the curves are of your tuning.
#
# **What to look for**: [MFU](../assets/glossary.md#mfu); bits per byte on a fixed held-out text that deduplication has
# seen; the loss that the scaling law predicts for this step. A run that is above it has a bug or bad data.

# %% [markdown]
# ## Recap
#
# 1. Nearly all compute is pre-training; what goes in is decided by cleaning, which must not depend on the number of
#    ranks.
# 2. MinHash estimates similarity from K numbers, with an error of sqrt(J (1 - J) / K); bands find the candidates.
# 3. BPE merges the most frequent pair again and again. Ranks add up counts of words once, and find the same merges.
# 4. In a packed sequence each document has a triangle of its own. The proof is to run it alone, and to change a token
#    of another.
# 5. Compare in bits per byte. A scaling law holds in its range, for its data, and with its interval.
#
# ## Further reading
#
# - Sennrich et al. 2016, [Neural machine translation of rare words with subword
#   units](https://arxiv.org/abs/1508.07909): BPE for text.
# - Hoffmann et al. 2022, [Training compute-optimal large language models](https://arxiv.org/abs/2203.15556), and Kaplan
#   et al. 2020, [Scaling laws for neural language models](https://arxiv.org/abs/2001.08361); a
#   [replication](https://arxiv.org/abs/2404.10102) of the former (Besiroglu et al. 2024).
# - Wei et al. 2022, [Emergent abilities](https://arxiv.org/abs/2206.07682); Schaeffer et al. 2023, [Are emergent
#   abilities a mirage?](https://arxiv.org/abs/2304.15004)
# - Sources of the table: [GPT-3](https://arxiv.org/abs/2005.14165), [Gopher](https://arxiv.org/abs/2112.11446),
#   [LLaMA](https://arxiv.org/abs/2302.13971), [Llama 2](https://arxiv.org/abs/2307.09288), [Llama
#   3](https://arxiv.org/abs/2407.21783), [DeepSeek-V3](https://arxiv.org/abs/2412.19437).

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
