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
# - prepare a text of your own, train on it, and compare models in bits per byte;
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
# *When late:* give solutions A and D, skip the table of model families, and keep builds B and C, the grid and the zoo.
#
# *Ask the room:* "You get ten times the compute. How much larger is the model?" (Four times in the grid below, whose
# exponent is 0.6; three times by Hoffmann's 0.5.)
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
merges = 256  # merges of the tokenizer, 16 to 2000
hashes = 128  # numbers in a MinHash signature, a multiple of 16, at least 16
live_flops = 6e10  # cost of the model that is trained here, at least 1e9; 6e10 is a recorded point
zoo_steps = 80  # steps of training in which the zoo's bug shows, at least 2

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
from collections import Counter, defaultdict

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands import Metrics, catch_up, join, leave, refuse, say, show
from manyhands.checks import llm_pretraining as checks
from manyhands.measure import wire

# %% [markdown]
# The corpus is Shakespeare once more, but now it is a pile of **documents**: each speech is one, and a blank line ends
# it. Document i belongs to rank i mod n.

# %%
# %%ranks
from manyhands.data.corpus import load_corpus

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
if hashes % 16 or hashes < 16:
    refuse(f"hashes={hashes} does not split into 16 bands; use a multiple of 16")
global_batch = -(-24 // world_size) * world_size  # sequences: 24, or the next number that splits
corpus = load_corpus(ranks)
given = {"merges": merges, "hashes": hashes, "live_flops": live_flops, "zoo_steps": zoo_steps}
metrics = Metrics(ranks, corpus, given)
documents = [text for text in corpus.text.split("\n\n") if text.strip()]
mine = documents[rank::world_size]
say(f"{len(mine):,} of {len(documents):,} documents, {sum(len(text.encode()) for text in mine):,} bytes")

# %% [markdown]
# ## The life of a language model (CORE, 3 min)
#
# ![Six stages in a row: collect and clean, pre-train, fine-tune, align, deploy, monitor and re-evaluate; an arrow leads
# from the last one back to the first; pre-training is marked as nearly all the compute](../assets/12_life.svg)
#
# [**Pre-training**](../assets/glossary.md#pre-training) has one task: guess the next token, on as much text as you can
# get. It takes nearly all of the compute. Fine-tuning and alignment turn the result into an assistant, which is
# deployed, watched and measured again.
#
# Architectures have become much alike. What differs most is how much data the models were trained on. (B is 10⁹, T is
# 10¹². Norms, positions and MLPs are variants of the parts in [lesson 01](01_one_device.ipynb)'s drawing.
# [GQA](../assets/glossary.md#gqa) shares keys and values among heads, "latent" compresses them, and with experts each
# token uses only a few of many MLPs.)
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
# **Predict.** Training takes about 6 FLOPs per parameter and token. How many FLOPs did Llama 3 405B take? How long would
# 16,000 GPUs need if each reaches 400 TFLOP/s?
#
# <details><summary>Answer</summary>
#
# 6 · 405e9 · 15.6e12 = 3.8e25. 16,000 · 4e14 = 6.4e18 per second, so 5.9e6 s: 69 days, without interruptions.
#
# </details>

# %% [markdown]
# ## Documents that are there twice (CORE, 10 min)
#
# **Why.** Web pages get copied, with another header or a changed word. A model that sees a page many times learns it by
# heart, and a model that was trained on its own test looks better than it is. Equal documents have the same hash. For
# *nearly* equal ones you need a measure.
#
# Cut a document into [**shingles**](../assets/glossary.md#shingle), here three words in a row. Two documents with the
# sets A and B of shingles have the [**Jaccard similarity**](../assets/glossary.md#jaccard-similarity) |A ∩ B| / |A ∪
# B|. But comparing every pair is hopeless: a billion documents make 5e17 pairs.
#
# ![Two sets of shingles; a random order of all shingles is laid over both; the first shingle of the union is also the
# first of each set exactly if it lies in both, which happens with probability J](../assets/12_minhash.svg)
#
# [**MinHash**](../assets/glossary.md#minhash) (Broder 1997): put all shingles in a random order. A and B then have the
# same first shingle exactly if the first shingle of A ∪ B lies in both, which happens with probability J. Do so for K
# random orders: the share of them in which A and B have the same first shingle *estimates* J.
#
# A hash makes a random order: map each shingle's number x to (a·x + b) mod p and sort by the result. The smallest
# result stands for the first shingle, so a document becomes K numbers, its **signature**.
#
# **Predict.** With K = 128 and J = 0.8, how far off is the estimate typically? (Each order is a coin toss that agrees
# with probability J.)
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
    """The numbers [S] of a text's shingles: k words in a row, in lower case."""
    words = re.findall(r"\w+", text.lower())
    found = {" ".join(words[i : i + k]) for i in range(max(1, len(words) - k + 1))}
    return np.array(sorted(zlib.crc32(shingle.encode()) % PRIME for shingle in found))


# %% [markdown]
# (Not Python's `hash(text)`: it is salted in each process, so four ranks would have four answers.)
#
# ### Build A: signature and estimate
#
# Write `signature(hashes_S, a_K, b_K)`: for each k the smallest (a_k · x + b_k) mod PRIME over all x in `hashes_S`, as
# int32 [K], without a loop (broadcast to [S, K]). And `similarity(one_K, other_K)`: the estimate of J, as a float. (Whatever
# you leave as it is, the check replaces by the lesson's own lines.)


# %%
# %%ranks
def signature(hashes_S, a_K, b_K):
    """The smallest hash of the set under each of K hash functions: int32 [K]."""
    raise NotImplementedError  # your turn


def similarity(one_K, other_K):
    """The estimate of the Jaccard similarity of two sets from their signatures."""
    raise NotImplementedError  # your turn


checks.minhash((signature, similarity), ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution A</summary>
#
# ```python
# def signature(hashes_S, a_K, b_K):
#     ordered_SK = (hashes_S[:, None] * a_K + b_K) % PRIME
#     return ordered_SK.min(0).astype(np.int32)
#
#
# def similarity(one_K, other_K):
#     return float((one_K == other_K).mean())
# ```
#
# </details>

# %% [markdown]
# **One experiment.** Copy long speeches and replace some of their words. Each rank copies and signs its share. The true
# J of each pair is known. What should the plot show? Points around the diagonal, about two thirds of them between the
# dashed lines, which are one standard deviation away.


# %%
# %%ranks
def copy_of(text, share, dice):
    """The text with about this share of its words replaced by others of its own."""
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
    from manyhands.plots.results import estimates

    alt = "estimated against true similarity of planted copies: points around the diagonal, in a band"
    show(estimates(gathered, hashes), "minhash", alt)
    say(f"{inside} of {len(true_N)} estimates are within one standard deviation: {inside / len(true_N):.0%}")
metrics.exact(minhash_inside=inside)

# %% [markdown]
# But which pairs do you compare? Cut each signature into 16 **bands**, and compare two documents only if they agree in
# *all* numbers of some band: one dictionary look-up per band finds them. With r numbers in a band, a pair is found with
# probability 1 - (1 - J^r)^16. For r = 8 that is 0.06 at J = 0.5, and 0.95 at J = 0.8.


# %%
# %%ranks
def near_duplicates(signatures_NK, limit=0.6):
    """{document: the earlier one that it copies}; the first of several copies is kept."""
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
# Ranks exchange signatures, never texts. Each rank signs its share, an all-gather gives all signatures to every rank,
# and all ranks come to the same decision:

# %%
# %%ranks
dice = random.Random(1)
pile = [text for text in documents if len(text.split()) >= 20][:1000]
copies = {len(pile) + k: 40 * k for k in range(25)}  # {place of a copy: place of its original}
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
    say(f"found {found} of {len(copies)} planted copies; the bands should find {expected:.1f}")
    say(f"dropped {len(dropped) - found} other documents")
    predicted = 4 * hashes * world_size * each
    say(f"all-gathered {seen.payload_bytes():,} bytes, predicted {predicted:,}")
    say(f"the texts themselves have {sum(len(text.encode()) for text in pile):,} bytes")
    assert seen.payload_bytes() == predicted
metrics.exact(dropped=sorted(dropped.items()))

# %% [markdown]
# Most speeches are shorter than a signature (4 K = 512 bytes); a page of 5 kB is ten times as long. Real pipelines also
# **filter**: they drop what is too short, has few letters, or repeats its lines.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: duplicates</summary>
#
# *Usual mistake:* believing that a long signature makes the search slow. The search is in the bands; K makes the
# estimate sharp. *Ask:* "which of these steps needs all documents in one place?" (None. Even the signatures need not be:
# with bands you could send each band to one rank.) *When late:* skip the plot.
#
# </details>

# %% [markdown]
# ## Tokens: byte-pair encoding (CORE, 10 min)
#
# **Why.** Characters make long sequences. Whole words make endless vocabularies, and a new word is unknown. Byte-pair
# encoding ([**BPE**](../assets/glossary.md#bpe), Sennrich et al. 2016) lies between: begin with the 256 bytes, and
# again and again make the *most frequent pair of neighbours* a new token. Bytes spell every text, so nothing is
# unknown.
#
# ![The words banana and bandana as letters; the pair a n occurs four times and becomes one token; then b with an,
# twice](../assets/12_bpe.svg)
#
# **Predict.** Which pair is merged third? In a tie the pair with the smaller numbers wins: bytes come first (`a` < `b` <
# `d` < `n`), then the new tokens in the order in which they were made.
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
# `pairs` counts the pairs of neighbours: {(a, b): how often}. Write `most_frequent(pairs)`, with the rule for ties from
# above. And `merge(ids, pair, new)`: a new list in which `new` replaces each `pair`, from left to right. Each token is
# used once: in a a a only the first two become one.


# %%
# %%ranks
def most_frequent(pairs):
    """The pair (a, b) that occurs most often; in a tie the smallest."""
    raise NotImplementedError  # your turn


def merge(ids, pair, new):
    """A new list: `ids` with `new` in place of each `pair`."""
    raise NotImplementedError  # your turn


checks.one_merge((most_frequent, merge), ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def most_frequent(pairs):
#     return min(pairs, key=lambda pair: (-pairs[pair], pair))
#
#
# def merge(ids, pair, new):
#     merged, i = [], 0
#     while i < len(ids):
#         both = tuple(ids[i : i + 2]) == pair
#         merged.append(new if both else ids[i])
#         i += 2 if both else 1
#     return merged
# ```
#
# </details>

# %% [markdown]
# Pairs are counted within words only; a word includes the space before it. So it is enough to know how often each *word*
# occurs:


# %%
# %%ranks
WORDS = re.compile(r" ?[a-zA-Z]+| ?[^a-zA-Z\s]+|\s")


def word_counts(texts):
    """{word as bytes: how often}"""
    return Counter(word.encode() for text in texts for word in WORDS.findall(text))


say(WORDS.findall("Who goes there?\nI."))

# %% [markdown]
# After a merge only the words that changed are counted again:


# %%
# %%ranks
def train_bpe(counts, merges):
    """The merges [(a, b), ...]; number i makes the token 256 + i."""
    words = [[list(word), n] for word, n in counts.items()]
    pairs, places, table = Counter(), defaultdict(set), []  # places: the words in which a pair occurs, or did

    def count(i, sign):
        ids, n = words[i]
        for pair in zip(ids, ids[1:], strict=False):
            pairs[pair] += sign * n
            places[pair].add(i)

    for i in range(len(words)):
        count(i, +1)
    while len(table) < merges and any(n > 0 for n in pairs.values()):
        best = most_frequent(pairs)
        for i in places.pop(best):
            count(i, -1)
            words[i][0] = merge(words[i][0], best, 256 + len(table))
            count(i, +1)
        table.append(best)
    return table


# %% [markdown]
# Is your third merge right? (97, 110) are the bytes of `an`, which becomes token 256:

# %% tags=["nbval-check-output"]
# %%ranks
by_hand = train_bpe(Counter({b"banana": 1, b"bandana": 1}), 3)
say(f"merges {by_hand}")

# %% [markdown]
# **Predict.** Each rank has some of the documents, and the merges must not depend on the number of ranks. What should
# ranks exchange: the text, the counts of words, or the counts of pairs at each merge?
#
# <details><summary>Answer</summary>
#
# The counts of words, once: more text brings few new words. Counts of pairs would need a collective per merge. Sums of
# integers are the same in any order, so all ranks find the same merges.
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
    say(f"{len(own):,} different words on this rank, {len(counts):,} on all")
    say(f"all-gathered {handed:,} bytes; the texts have {len(corpus.text.encode()):,}")
    token = {i: bytes([i]) for i in range(256)}
    for i, (a, b) in enumerate(table):
        token[256 + i] = token[a] + token[b]
    say(f"longest tokens {[t.decode('latin-1') for t in sorted(token.values(), key=len)[-6:]]}")
metrics.exact(merges=[list(pair) for pair in table])

# %% [markdown]
# **The library's way** is `tokenizers`. It works on characters, so we give it one per byte. Its merges must equal ours:

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
# Now each rank tokenizes its documents and writes a **shard**: a file of 16-bit numbers that training later maps into
# memory. A special token, the **separator**, begins each document.

# %%
# %%ranks
from manyhands.data.token_files import write_tokens
from manyhands.launch.run_folder import run_folder

SEPARATOR = 256 + len(table)


def encode(text):
    """The tokens of a text, by the library."""
    words = (bpe.encode(word.encode().decode("latin-1")).ids for word in WORDS.findall(text))
    return [i for ids in words for i in ids]


def decode(ids):
    parts = (bpe.id_to_token(i).encode("latin-1") for i in ids if i != SEPARATOR)
    return b"".join(parts).decode("utf-8", "replace")


say(encode(" there, there"))

# %%
# %%ranks
stream = [i for text in mine for i in (SEPARATOR, *encode(text))]
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
# the" becomes a token. *Ask:* "why does training need the counts of words, and encoding only the order of the merges?"
# *When late:* give `merge` and let them write `most_frequent`.
#
# </details>

# %% [markdown]
# ## Packing: many documents in one sequence (CORE, 8 min)
#
# **Why.** Documents differ in length, but all sequences of a batch have the same. Padding wastes compute. So documents
# are [**packed**](../assets/glossary.md#packing): they are joined end to end, and the row is cut into sequences of T
# tokens. Now several documents share a sequence, and attention looks back from the second into the first.
#
# ![Three documents in one sequence of ten tokens, and the mask of ten by ten: three triangles along the diagonal are
# allowed, the rest of the lower half is not](../assets/12_packing.svg)
#
# A [**document mask**](../assets/glossary.md#document-mask) forbids that. `documents_BT` holds the number of each
# position's document, such as 1 1 1 2 2 2 2 3 3 3 in the figure.
#
# ### Build C: the mask
#
# Write `document_mask(documents_BT)`: bool [B, T, T], True where the query (second dimension) may look at the key
# (third): a key of the same document that does not come later. No loops.


# %%
# %%ranks
def document_mask(documents_BT):
    """Which key each query may look at: bool [B, T, T]."""
    raise NotImplementedError  # your turn


checks.document_mask(document_mask, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution C</summary>
#
# ```python
# def document_mask(documents_BT):
#     same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
#     return same_BTT.tril()
# ```
#
# </details>

# %% [markdown]
# The mask goes into attention. `packed_logits` runs the course's GPT part by part with it (H heads of E numbers each),
# and `positions_of` **restarts** the positions with each document:


# %%
# %%ranks
def positions_of(documents_BT):
    """0, 1, 2, ... from the beginning of each document; documents are numbered in order."""
    first_BT = torch.searchsorted(documents_BT, documents_BT)  # where each position's document begins
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
# **The proof** is to run each document alone: its logits must be the same. Each rank tries two packed sequences of its
# own documents (characters, and the separator):

# %%
# %%ranks
from manyhands.gpt.model import GPT, GPTConfig

B, T, separator = 2, 256, len(corpus.vocab)
torch.manual_seed(1337)
gpt = GPT(GPTConfig(vocab_size=separator + 1, block_size=T)).to(device, torch.float64)
joined = [i for text in mine[:50] for i in (separator, *corpus.encode(text).tolist())]
ids_BT = torch.tensor(joined[: B * T], device=device).view(B, T)
documents_BT = (ids_BT == separator).cumsum(1)
mask_BTT = document_mask(documents_BT)
packed_BTV, apart = packed_logits(gpt, ids_BT, mask_BTT, positions_of(documents_BT)), 0.0
for row in range(B):
    for number in documents_BT[row].unique():
        here_T = documents_BT[row] == number
        alone_tV = gpt(ids_BT[row : row + 1, here_T])[0][0]
        apart = max(apart, (packed_BTV[row, here_T] - alone_tV).abs().max().item())
assert apart < 1e-10
share = mask_BTT.sum().item() / (B * T * (T + 1) / 2)
say(f"packed and alone differ by {apart:.0e}; the mask keeps {share:.0%} of the causal pairs")

# %% [markdown]
# **The library's way**: the course's GPT builds the mask itself if its configuration names the separator, and so does
# `train.py` under every strategy. Its positions do not restart: a sequence may begin in the middle of a document, whose
# true positions nobody knows.

# %%
# %%ranks
library = GPT(GPTConfig(vocab_size=separator + 1, block_size=T, separator=separator)).to(device, torch.float64)
library.load_state_dict(gpt.state_dict())
counting_T = torch.arange(T, device=device)
apart = packed_logits(gpt, ids_BT, mask_BTT, counting_T) - library(ids_BT)[0]
assert apart.abs().max() < 1e-10
say(f"ours and the package's differ by {apart.abs().max().item():.0e}")

# %% [markdown]
# One more measurement, which belongs in the tests of any trainer: **change the second token of a sequence. Which logits
# change in the documents after the first?**

# %%
# %%ranks
other_BT = ids_BT.clone()
other_BT[:, 1] = (other_BT[:, 1] + 1) % separator
later_BT = documents_BT != documents_BT[:, :1]
causal_BTT = torch.ones_like(mask_BTT).tril()
for name, *how in (
    ("plain causal", causal_BTT, counting_T),
    ("restarted positions", causal_BTT, positions_of(documents_BT)),
    ("document mask", mask_BTT, counting_T),
):
    before, after = (packed_logits(gpt, ids, *how) for ids in (ids_BT, other_BT))
    leak = (before - after)[later_BT].abs().max().item()
    if rank == 0:
        say(f"{name:20} logits of later documents change by {leak:.1e}")

# %% [markdown]
# Restarting the positions hides nothing. A [pull request for nanoVLM](https://github.com/huggingface/nanoVLM/pull/204)
# measured the same: another prefix changed the next sample's output by 0.4621, with restarted positions by 0.4625. The
# cure was a document mask.
#
# A dense mask saves no work: all pairs are computed, then masked. Kernels that know where documents begin
# (FlashAttention's `varlen`, `flex_attention`) skip the masked ones.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: packing</summary>
#
# Draw the mask of documents of 2, 3 and 1 tokens on the board. *Usual mistake:* a mask of documents without the causal
# half, or one that leaves the separator to the document before. *Ask:* "does a mask of zeros and ones save compute?" (Not by
# itself.)
#
# </details>

# %% [markdown]
# ## Bits per byte (CORE, 6 min)
#
# **Why.** A loss is in nats *per token* (a nat is the unit of the natural logarithm). With longer tokens a model makes
# fewer and harder guesses, so its loss is higher though it knows as much. What all models share is the text: divide by
# its **bytes**.
#
# **Predict.** A model that knows nothing pays ln 65 = 4.17 nats per character of one byte, or ln 512 = 6.24 nats per
# token of 1.95 bytes. Which is less per byte?
#
# <details><summary>Answer</summary>
#
# 4.17 / ln 2 = 6.02 bits per byte, and 6.24 / ln 2 / 1.95 = 4.6. Some knowledge is in the tokenizer: which bytes often
# stand together.
#
# </details>
#
# ### Build D: bits per byte
#
# Write `bits_per_byte(nats_per_token, tokens, num_bytes)`: the mean loss is `nats_per_token` over `tokens` tokens, which
# spell `num_bytes` bytes. A bit is ln 2 nats.


# %%
# %%ranks
def bits_per_byte(nats_per_token, tokens, num_bytes):
    """The loss in bits per byte of text."""
    raise NotImplementedError  # your turn


checks.bits_per_byte(bits_per_byte, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution D</summary>
#
# ```python
# def bits_per_byte(nats_per_token, tokens, num_bytes):
#     return nats_per_token * tokens / math.log(2) / num_bytes
# ```
#
# </details>

# %% [markdown]
# The simplest model knows how often each token occurs, and nothing else. Each rank counts its own tokens, and an
# all-reduce adds up the counts:

# %% jupyter={"source_hidden": true}
# %%ranks --timeout 120
catch_up(globals(), "word_counts", "by_library", "encode")
if "bpe" not in globals():
    from tokenizers import Tokenizer, models, trainers

    WORDS = re.compile(r" ?[a-zA-Z]+| ?[^a-zA-Z\s]+|\s")
    bpe = by_library(word_counts(documents), merges)
    SEPARATOR = 256 + merges


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
for name, ids, size in (("characters", characters, len(corpus.vocab)), ("BPE tokens", tokens, SEPARATOR)):
    nats, count = by_frequency(ids, size)
    bits = bits_per_byte(nats, count, num_bytes)
    if rank == 0:
        say(f"{name:11} {nats:.2f} nats per token, {bits:.2f} bits per byte, {num_bytes / count:.2f} bytes per token")

# %% [markdown]
# The model with the higher loss per token is better per byte. A loss without its tokenizer says nothing.

# %% [markdown]
# ## A text of your own (CORE, 3 min)
#
# `scripts/prepare_data.py` does all of the above to files: filter, deduplicate, train the tokenizer, write shards.
# The next cell writes a small file of pages, four of which do not belong in a training set, and prepares it. Any number
# of ranks writes the same bytes.

# %%
# %%ranks --timeout 120
from manyhands.data.preparation import PrepareConfig, prepare_text
from manyhands.data.preparation import shown_report
from manyhands.launch.run_folder import run_folder

place = [run_folder(ranks) if rank == 0 else None]
dist.broadcast_object_list(place, src=0)
folder = place[0]  # rank 0's, on all ranks
speeches = [text for text in documents if len(text) >= 200][:1200]
bad = [speeches[0].upper(), speeches[1] + " Amen.", "3.14 1.61 2.71 " * 20, "Buy it now!\n" * 20]
if rank == 0:
    (folder / "pages.txt").write_text("\n\n\n".join(speeches + bad), encoding="utf-8")
report = prepare_text([folder / "pages.txt"], folder / "text", PrepareConfig(vocab_size=512), ranks, replace=True)
if rank == 0:
    say(shown_report(report))
metrics.exact(prepared=report["documents"])

# %% [markdown]
# Now train on it and let the model write. In a terminal, in the course's folder, type:
#
# ```bash
# python scripts/launch.py --nproc 2 -- --checkpoint.folder outputs/mine \
#     --data.folder outputs/12_llm_pretraining/latest/text
# python scripts/sample.py outputs/mine --prompt "KING"
# ```
#
# Expect half a minute on two cores: 300 steps, in which the validation loss falls from ln 512 = 6.2 to about 3.8 nats
# per token. At 2.03 bytes each that is 2.7 bits per byte. The samples begin as noise and end as words, many of them
# real; `<|document|>` is the separator. For files of your own, run this first:
#
# ```bash
# python scripts/prepare_data.py essays/ posts.jsonl.gz --to data/mine
# ```

# %% [markdown]
# ## How large, for how long? A scaling law (CORE, 5 min)
#
# **Why.** Your budget is fixed: so many GPUs for so many days. A larger model learns more from each token, but the
# budget buys it fewer tokens. Which size is best? Find out where it is cheap. For one budget train several sizes, each
# on as many tokens as the budget buys: an [**isoFLOP**](../assets/glossary.md#isoflop) curve (Hoffmann et al. 2022),
# whose lowest point is the best size. The best sizes of several budgets lie on a line in logarithms, a [**scaling
# law**](../assets/glossary.md#scaling-law).
#
# We recorded a grid of 3 budgets and 6 sizes, on characters, with `python scripts/isoflop.py`. You train one
# of its models now, data parallel on all ranks.
#
# **Predict.** What does one budget's curve look like? Where does its lowest point go when the budget grows?
#
# <details><summary>Answer</summary>
#
# It is a valley: small models cannot learn more, large ones see too few tokens. The lowest point moves right (a larger
# model) and down (a lower loss).
#
# </details>

# %%
# %%ranks --timeout 300
from manyhands.measure.timing import gemm_together
from manyhands.launch import recorded_runs
from manyhands.train.isoflop import Point, by_budget, parabola, power_law, residuals, spread, train_point

grid = recorded_runs.numbers("12_isoflop.json")
live = train_point(Point(live_flops, 24), corpus, ranks, sample=120)
peak = gemm_together(ranks)  # FLOP/s of large matrix products, all ranks at once
flop_per_s = live["flops"] / live["seconds"]
bits = live["val_loss"] / math.log(2) * len(corpus.text) / len(corpus.text.encode())
if rank == 0:
    say(f"{live['params']:,} parameters, {live['tokens']:,} tokens, {live['steps']} steps")
    say(f"validation loss {live['val_loss']:.3f} nats per character, {bits:.2f} bits per byte")
    say(f"{flop_per_s / 1e9:.1f} of {peak / 1e9:.0f} GFLOP/s: MFU {100 * flop_per_s / peak:.2g}%")
    say(f"it writes {live['sample']!r}")
metrics.close(1e-2, live_loss=live["val_loss"])
metrics.measured(flop_per_s=flop_per_s)

# %% [markdown]
# The peak is what large matrix products reach here, in the same precision. This model is 24 numbers wide, so its own are far
# too small for that; a GPU spends the time on launching them.
#
# `train_point` is built from `train.py`'s parts and takes its data-parallel strategies. A thirtieth of the budget must
# end with the same loss under each of them, up to rounding:

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
    from manyhands.plots.results import isoflop

    alt = "loss against parameters for three budgets, each a valley; the lowest points go right and down"
    show(isoflop(by_budget(points), optima, law, live), "isoflop", alt)
    for best in optima:
        each = best.budget_flops / 6 / best.params**2  # tokens per parameter
        size = f"{best.params:6,.0f} parameters ({each:.0f} tokens for each)"
        say(f"{best.budget_flops:.0e} FLOPs: best {size}, loss {best.loss:.3f}")
    say(f"the points scatter about their parabolas with a standard deviation of {residuals(points)[0]:.3f}")
    low, high = sure["exponent"]
    say(f"best size ~ budget^{law.exponent:.2f}; 90 % of refits with such scatter: {low:.2f} to {high:.2f}")

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
    say(f"its loss: {loss:.2f} [{least:.2f} to {most:.2f}]")
    times, most = ten / 6 / params / len(corpus.train_ids), max(point["epochs"] for point in points)
    say(f"it would read the corpus {times:.1f} times; the recorded runs read it up to {most:.1f} times")

# %% [markdown]
# **How far would you trust it?** The brackets hold the scatter of 18 points around their parabolas, and nothing else.
# They leave out that:
#
# - each point is one run with one seed, so the scatter is guessed from how badly a parabola fits, not measured;
# - the learning rate was tuned for the smallest budget only, and badly tuned runs can move a curve's lowest point;
# - the corpus has one megabyte, and a token that is read again teaches less;
# - three budgets span a factor of ten. Published laws span a thousand and more, and still disagree: Kaplan et al.
#   (2020) found an exponent of 0.73, Hoffmann et al. (2022) about 0.5. GPT-3 has 2 tokens per parameter, Chinchilla 20;
# - the fit itself can be wrong: Besiroglu et al. (2024) read the points of Hoffmann's third approach off its plots,
#   got other numbers from them, and found the published intervals implausibly narrow.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the scaling law</summary>
#
# While the point trains, let the room draw the curve. *Usual mistake:* comparing two models that were trained on
# equally many tokens, and calling the larger one better. *Ask:* "what changes if the model will answer a billion
# questions?" (A smaller model trained for longer is cheaper to serve: Llama 3 8B read the same 15 T tokens, over 1,800
# per parameter.) *When late:* show the stored figure.
#
# </details>

# %% [markdown]
# ## Do abilities emerge? (MORE, 3 min)
#
# Wei et al. (2022) call an ability *emergent* if small models lack it and larger ones have it, so that nobody could have
# predicted it from the small ones. Schaeffer et al. (2023) answer that often the *measure* jumps, not the model: a score
# that counts only answers in which every token is right turns a smooth gain into a sudden one.
#
# Look at the 18 models again. The grid records how often they guess the next character right, and how often five in a
# row.
#
# **Predict.** If guesses were independent, how often would a model that is right 35 % of the time get five in a row
# right? And one that is right 50 % of the time?
#
# <details><summary>Answer</summary>
#
# 0.35⁵ = 0.5 % and 0.5⁵ = 3 %: one score grows by less than a half, the other is six times as high.
#
# </details>

# %%
# %%ranks
from manyhands.launch import recorded_runs

if rank == 0:
    from manyhands.plots.results import emergence

    points = recorded_runs.numbers("12_isoflop.json")["points"]
    alt = "the same 18 models by loss: how often one character is right, and five in a row"
    show(emergence(points), "emergence", alt)
    worst, best = (f(points, key=lambda point: point["val_loss"]) for f in (max, min))
    for name in ("accuracy", "in_a_row"):
        say(f"{name:9} from {worst[name]:.1%} to {best[name]:.1%}: {best[name] / worst[name]:.1f} times")

# %% [markdown]
# Both curves come from the same answers. (The right one scatters because 1 % of 6,144 groups of five are 61, give or
# take 8.) Whether *all* reported jumps are of this kind is still argued about. Report a smooth measure beside a strict
# one.

# %% [markdown]
# ## Exercises (MORE, 18 min)
#
# Each check runs your answer in a process group of its own: you cannot break anything.
#
# ### Exercise 1: encode a word
#
# You have the merges. Which of them apply to a new word, and in which order? Write `encode_word(word, table)`: the list
# of tokens of `word`, given as bytes. As long as two neighbours are a pair in the table, take the pair that was
# *learned first* and merge it everywhere in the word. You may use `merge`. `table[i]` makes the token 256 + i.

# %% jupyter={"source_hidden": true}
# %%ranks
catch_up(globals(), "merge")


# %%
# %%ranks
def encode_word(word, table):
    """The list of a word's tokens under these merges."""
    raise NotImplementedError  # your turn


checks.encode_word(encode_word, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 1</summary>
#
# ```python
# def encode_word(word, table):
#     ids, number = list(word), {pair: i for i, pair in enumerate(table)}
#     while known := [number[pair] for pair in zip(ids, ids[1:], strict=False) if pair in number]:
#         ids = merge(ids, table[min(known)], 256 + min(known))
#     return ids
# ```
#
# </details>

# %% [markdown]
# ### Exercise 2: what does a packed sequence teach?
#
# With a separator between documents, the last token of one learns to guess "the end". Without a separator it would have to guess
# how another document begins, which nobody can. Write `packed_targets(ids_BT, documents_BT)`: for each position the next
# token of the *same document*, and -100 where there is none (`F.cross_entropy` ignores -100). The last position of a
# sequence has none either. Do not change `ids_BT`.


# %%
# %%ranks
def packed_targets(ids_BT, documents_BT):
    """The target of each position, -100 where none counts: [B, T]."""
    raise NotImplementedError  # your turn


checks.packed_targets(packed_targets, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 2</summary>
#
# ```python
# def packed_targets(ids_BT, documents_BT):
#     targets_BT = torch.full_like(ids_BT, -100)
#     goes_on_Bt = documents_BT[:, 1:] == documents_BT[:, :-1]
#     targets_BT[:, :-1] = torch.where(goes_on_Bt, ids_BT[:, 1:], -100)
#     return targets_BT
# ```
#
# </details>

# %% [markdown]
# Ranks now have unequal numbers of targets, so the mean of the ranks' means is not the mean over tokens: [lesson
# 05](05_same_science.ipynb) says what to divide by.
#
# ### Exercise 3: predict the next loss
#
# `points` are dicts with `budget_flops`, `params` and `val_loss`, for two budgets or more. Write `next_best(points,
# budget_flops)`: (parameters, loss) of the best model for a *larger* budget. For each budget fit a parabola of the loss
# in ln(params) (`np.polyfit(x, y, 2)`) and take its lowest point. Then fit two straight lines against ln(budget): one
# through the lowest points' ln(params), one through their ln(loss).


# %%
# %%ranks
def next_best(points, budget_flops):
    """(parameters, loss) of the best model for this budget, by what smaller budgets have shown."""
    raise NotImplementedError  # your turn


checks.next_best(next_best, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 3</summary>
#
# ```python
# def next_best(points, budget_flops):
#     rows = []
#     for budget in sorted({point["budget_flops"] for point in points}):
#         here = [point for point in points if point["budget_flops"] == budget]
#         bend, slope, height = np.polyfit(np.log([p["params"] for p in here]), [p["val_loss"] for p in here], 2)
#         rows.append((np.log(budget), -slope / 2 / bend, np.log(height - slope**2 / 4 / bend)))
#     x, log_params, log_loss = np.array(rows).T
#     return tuple(float(np.exp(np.polyval(np.polyfit(x, y, 1), np.log(budget_flops)))) for y in (log_params, log_loss))
# ```
#
# </details>

# %% [markdown]
# A law is worth what it predicts. Let the two smaller budgets of the grid predict the third:

# %%
# %%ranks
from manyhands.train.isoflop import by_budget, parabola
from manyhands.launch import recorded_runs

if rank == 0:
    *smaller, largest = by_budget(recorded_runs.numbers("12_isoflop.json")["points"]).values()
    seen_points = [point for rows in smaller for point in rows]
    params, loss = next_best(seen_points, largest[0]["budget_flops"])
    best = parabola(largest)
    say(f"predicted {params:,.0f} parameters, loss {loss:.3f}")
    say(f"measured  {best.params:,.0f} parameters, loss {best.loss:.3f}")

# %% [markdown]
# ## A bug from the zoo (CORE, 3 min)
#
# A model computes its loss by `plain_loss`. Somebody replaces it by a library's loss function, `shifted_loss`. Training
# runs, and the loss falls. **What is wrong, and which measurement shows it?** Write down your suspicion before you open
# the answer.


# %%
# %%ranks
def shifted_loss(logits_bTV, targets_bT):
    """The library's: position t must guess what stands at t + 1."""
    return F.cross_entropy(logits_bTV[:, :-1].flatten(0, 1), targets_bT[:, 1:].flatten())


def plain_loss(logits_bTV, targets_bT):
    return F.cross_entropy(logits_bTV.flatten(0, 1), targets_bT.flatten())


# %%
# %%ranks
from manyhands.data.corpus import get_batch
from manyhands.gpt.model import GPT, GPTConfig
from manyhands.parallel.ddp import FlatReplicas


def train(loss_of):
    """A small GPT after `zoo_steps` steps on all ranks, and its last loss."""
    torch.manual_seed(1337)
    model = GPT(GPTConfig(len(corpus.vocab), block_size=32, n_layer=2, n_head=2, n_embd=48)).to(device)
    replicas = FlatReplicas(model)
    optimizer = torch.optim.AdamW([part for part, _ in replicas.parts], lr=5e-3)
    for step in range(zoo_steps):
        # targets_bT[:, t] is the character after ids_bT[:, t]
        ids_bT, targets_bT = get_batch(corpus.train_ids, step, global_batch, 32, rank, world_size, 1)
        loss = loss_of(model(ids_bT.to(device))[0], targets_bT.to(device))
        replicas.backward(loss, last=True)
        optimizer.step()
        optimizer.zero_grad()
    return model, loss.item()


# %%
# %%ranks --timeout 120
wrong, loss = train(shifted_loss)
if rank == 0:
    say(f"loss after {zoo_steps} steps: {loss:.2f}; it began at {math.log(len(corpus.vocab)):.2f}")

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
# The targets are shifted twice: by the batch and by the loss. The model learns to guess the character *after* the next.
# There is something to learn in that too, so the loss falls. But it stays higher, and the samples are not English.
#
# This happens when a library's loss starts to shift while a model's own code still does. In transformers GIT trained
# like this in every release from v4.49 on
# ([transformers#47394](https://github.com/huggingface/transformers/issues/47394), mended in #47395; flattened labels
# even took targets from the next row of the batch). JetMoe had the same bug:
# [transformers#37830](https://github.com/huggingface/transformers/pull/37830).
#
# </details>
#
# The rule to take home: **score the model against targets moved by one in both directions.** The true targets must have
# the lowest loss. And read a sample before you trust a curve.

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
# Each step of this lesson is one command:
#
# ```bash
# mpiexec -n 32 python scripts/prepare_data.py pages/ --vocab-size 8192 --to data/mine
# python scripts/launch.py --nproc 4 -- --data.folder data/mine --parallel.strategy fsdp
# python scripts/isoflop.py --to outputs/isoflop.json
# ```
#
# **What changes on GPUs.** Clean and tokenize on CPUs, before the job: GPUs must not wait for text. Document masks go
# through FlashAttention's `varlen` or `flex_attention`. A grid of small runs is a job array; keep one batch size and
# tune the learning rate for each size, or the curves show your tuning.
#
# **What to look for**: [MFU](../assets/glossary.md#mfu); bits per byte on a fixed held-out text whose copies were
# removed from the training set; the final loss that the scaling law predicts. A run that ends above it has a bug or bad
# data.

# %% [markdown]
# ## Recap
#
# 1. Pre-training takes nearly all of the compute. Cleaning decides what goes in, and must not depend on the number of
#    ranks.
# 2. MinHash estimates similarity from K numbers, with an error of sqrt(J (1 - J) / K). Bands find the candidates.
# 3. BPE merges the most frequent pair again and again. Ranks add up counts of words once, and find the same merges.
# 4. Document masks keep packed documents apart. To prove it, run each one alone, or change a token of another.
# 5. Compare models in bits per byte. A scaling law holds in its range, for its data, and with its interval.
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
