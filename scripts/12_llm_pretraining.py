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
# # 12 Pre-training: clean, tokenize and pack on all ranks
#
# **50 minutes** for the sections marked CORE, 107 with those marked MORE.
#
# Each rank removes the copies among its own documents. Most copies stay, and no error says so. You mend that, and no
# rank ever gathers all documents.
#
# After this lesson **you can**
# - find near-duplicates among documents that are spread over ranks, with an all-to-all;
# - train a tokenizer whose merges do not depend on the number of ranks;
# - pack documents into sequences so that no token sees another document, and prove it;
# - say how large a model to train with a given number of FLOPs.
#
# **You need** the all-to-all of [lesson 02](02_collectives.ipynb), data parallel training
# ([lesson 03](03_data_parallel.ipynb)) and the FLOPs of a token ([lesson 01](01_one_device.ipynb)).
#
# **New here:** [pre-training](../assets/glossary.md#pre-training), [shingle](../assets/glossary.md#shingle), [Jaccard
# similarity](../assets/glossary.md#jaccard-similarity), [MinHash](../assets/glossary.md#minhash),
# [BPE](../assets/glossary.md#bpe), [packing](../assets/glossary.md#packing), [document
# mask](../assets/glossary.md#document-mask), [isoFLOP](../assets/glossary.md#isoflop), [scaling
# law](../assets/glossary.md#scaling-law), and in MORE [bits per byte](../assets/glossary.md#bits-per-byte).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 1, the copies that stay 4, signatures 8, one rank for each key 11, tokens 7, packing 7, the
# scaling law 9, zoo 2, card 1. Builds A to F take about three minutes each and are in these numbers.
#
# *Say:* every step of the data pipeline gives the same result on any number of ranks, or nobody can repeat the run.
#
# *Three usual mistakes:* Python's `hash()` for something that ranks compare (it differs in each run and on each node);
# comparing losses per token of two tokenizers; reading a scaling law outside its range.
#
# *When late:* give solutions A and D, and keep builds B, C and E, the grid and the zoo.
#
# *Ask the room:* "Which of these steps needs all documents in one place?" (None.)
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
merges = 256  # merges of the tokenizer, 16 to 2000
hashes = 128  # numbers in a MinHash signature, a multiple of 16, at least 16
live_flops = 6e10  # cost of the model that is trained here, at least 1e9; 6e10 is a recorded point
zoo_steps = 80  # steps of training in which the zoo's bug shows, at least 2
lab_steps = 300  # steps of each small training of the labs, at least 2

# %% [markdown]
# ## Start (CORE, 1 min)
#
# The first cell starts four ranks. The corpus has 1,024 **documents**: 960 speeches of Shakespeare, and 64 planted
# copies in which a few words were replaced. With n ranks, document i is on rank i mod n.

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
from itertools import combinations  # noqa: F401 - for build C

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands import ____, Metrics, card, compare, join, leave, refuse, say, show
from manyhands.checks import llm_pretraining as checks
from manyhands.checks.predictions import unanswered
from manyhands.measure import wire

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.data.documents import content_hash, copies_among, minhash
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.launch import recorded_runs
from manyhands.lessons import llm_pretraining as lesson

if hashes % 16 or hashes < 16:
    refuse(f"hashes={hashes} does not split into 16 bands; use a multiple of 16")
global_batch = -(-24 // world_size) * world_size  # sequences: 24, or the next number that splits
corpus = load_corpus(ranks)
given = {"merges": merges, "hashes": hashes, "live_flops": live_flops, "zoo_steps": zoo_steps, "lab_steps": lab_steps}
metrics = Metrics(ranks, corpus, given)
documents = [text for text in corpus.text.split("\n\n") if text.strip()]


def copy_of(text, share, dice):
    """The text with about this share of its words replaced by others of its own."""
    words = text.split()
    return " ".join(dice.choice(words) if dice.random() < share else word for word in words)


def planted_pile(dice):
    """(texts, {(place, place) of each planted copy and its original}), the same on every rank."""
    speeches = [text for text in documents if len(text.split()) >= 20][:960]
    texts = [(k, text) for k, text in enumerate(speeches)]
    texts += [(k, copy_of(speeches[k], 0.03, dice)) for k in range(0, len(speeches), 15)]
    dice.shuffle(texts)
    places = defaultdict(list)
    for place, (k, _) in enumerate(texts):
        places[k].append(place)
    return [text for _, text in texts], {tuple(both) for both in places.values() if len(both) == 2}


def everyone(value):
    """The value of each rank, in a list. All ranks call it."""
    values = [None] * world_size
    dist.all_gather_object(values, value)
    return values


pile, planted = planted_pile(random.Random(1))
mine = pile[rank::world_size]
PRIME = 2**31 - 1
a_K, b_K = np.random.default_rng(0).integers(1, PRIME, size=(2, hashes))  # of the hashes, the same on all ranks

# %% [markdown]
# ## The copies that stay (CORE, 4 min)
#
# [**Pre-training**](../assets/glossary.md#pre-training) teaches a model to predict the next token of huge amounts of
# text. Many pages on the web are copies, and a model learns by heart what it reads many times. So copies are removed
# first.
#
# `found_by(n)` (folded) lets each of n ranks look for copies among its own documents:

# %% jupyter={"source_hidden": true}
# %%ranks
exact, signed = [content_hash(text) for text in pile], np.stack([minhash(text) for text in pile])


def found_by(n):
    """How many planted copies n ranks find if each of them looks at its own documents only."""
    found = 0
    for r in range(n):
        places = list(range(r, len(pile), n))
        copies = copies_among([exact[i] for i in places], signed[places], 0.5)
        found += sum((places[first], places[second]) in planted for second, (first, _) in copies.items())
    return found


# %%
# %%ranks
if rank == 0:
    for n in (1, 4):
        say(f"{n} rank{'s' * (n > 1)}: {found_by(n)} of {len(planted)} planted copies found")

# %% [markdown]
# **Predict.** How many of the 64 copies do 16 ranks find?

# %%
# %%ranks
guess_found = ____  # your turn: type a number

# %% jupyter={"source_hidden": true}
# %%ranks
compare("planted copies that 16 ranks find, each in its own documents", "guess_found", found_by(16))

# %% [markdown]
# A copy and its original are on the same rank with probability 1/n. So documents of different ranks must be compared,
# but not all pairs: a billion documents make 5e17.

# %% [markdown]
# ## Signatures: a document in 512 bytes (CORE, 8 min)
#
# Cut a document into [**shingles**](../assets/glossary.md#shingle), here three words in a row. Two documents with the
# sets A and B of shingles have the [**Jaccard similarity**](../assets/glossary.md#jaccard-similarity) J = |A ∩ B| / |A ∪
# B|. [**MinHash**](../assets/glossary.md#minhash) (Broder 1997) estimates J:
#
# ![Two sets of shingles in a random order; they have the same first shingle if the first of the union lies in
# both](../assets/12_minhash.svg)
#
# Put all shingles in a random order. A and B have the same first shingle with probability J. So try K random orders.
# The share of orders in which both have the same first shingle is the estimate.
#
# A hash makes a random order: give each shingle a number x, and compute (a·x + b) mod PRIME. The smallest result is
# the first. Another a and b make another order. A document's **signature** is the smallest result of each of K = 128
# orders, 4 bytes each.


# %% jupyter={"source_hidden": true}
# %%ranks
def shingle_hashes(text, k=3):
    """The numbers [S] of a text's shingles: k words in a row, in lower case."""
    words = re.findall(r"\w+", text.lower())
    found = {" ".join(words[i : i + k]) for i in range(max(1, len(words) - k + 1))}
    # not Python's hash(text): its salt is new at each start of Python, so ranks of two nodes would have two answers
    return np.array(sorted(zlib.crc32(shingle.encode()) % PRIME for shingle in found))


# %% [markdown]
# ### Build A: signature and estimate
#
# `hashes_S` has the x of each shingle. The letters at the end of a name are its shape: S shingles, K orders. No loop
# is needed: `hashes_S[:, None] * a_K` is [S, K]. `similarity` returns the share of the K numbers that are equal.


# %%
# %%ranks
def signature(hashes_S, a_K, b_K):
    """The smallest hash of the set in each of K orders: int32 [K]."""
    ordered_SK = ____  # (a x + b) mod PRIME for each x and each k
    return ____.astype(np.int32)  # the smallest of each k


def similarity(one_K, other_K):
    """The estimate of J, a float."""
    return ____


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
# Split each signature into 16 **bands** of 8 numbers. Compare two documents only if all 8 numbers of at least one
# band are equal. For similarity J this has the probability 1 - (1 - J⁸)¹⁶: 0.06 for J = 0.5, and 0.95 for J = 0.8.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: signatures</summary>
#
# *Usual mistake:* believing that a long signature makes the search slow. The search is in the bands; K makes the
# estimate sharp.
#
# </details>

# %% [markdown]
# ## One rank for each key (CORE, 11 min)
#
# Ranks could all-gather the signatures, but then each rank would make all comparisons.
#
# Instead, give each band of each document a **key**: a hash of the band's number and content. Documents with an equal
# band have an equal key. *The key decides to which rank an all-to-all sends it.* So equal keys meet on one rank.
#
# ![Odd keys go to rank 1, even keys to rank 0; documents with equal keys make a pair there](../assets/12_keys.svg)
#
# **Predict.** 1,024 documents on 4 ranks have 16 bands each. A record (key, document) has 8 bytes. With the
# all-gather of signatures, a rank receives 393 kB from the others. How many kB of records does it receive from them
# with the all-to-all?

# %%
# %%ranks
guess_kb = ____  # your turn: type a number

# %% [markdown]
# ### Build B: who gets which record?
#
# `records_N2` is [N, 2]: a row (key, document) for each band of each of this rank's documents. Key k belongs to rank k
# mod n. Return the rows for rank 0, for rank 1, and so on.


# %%
# %%ranks
def parcels(records_N2, n):
    return ____  # a list of n tensors


checks.parcels(parcels, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def parcels(records_N2, n):
#     return [records_N2[records_N2[:, 0] % n == r] for r in range(n)]
# ```
#
# </details>

# %% [markdown]
# ### Build C: who meets whom?
#
# `records` are the [key, document] that arrived at this rank. Return the set of all pairs (i, j) of documents with i < j
# and an equal key: three documents with one key are three pairs. (`combinations(items, 2)` yields all pairs of a sorted
# list.)


# %%
# %%ranks
def colliding(records):
    met = defaultdict(set)
    for key, document in records:
        ____  # the document has this key
    return ____  # the pairs, of all keys


checks.colliding(colliding, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution C</summary>
#
# ```python
# def colliding(records):
#     met = defaultdict(set)
#     for key, document in records:
#         met[key].add(document)
#     return {pair for documents in met.values() for pair in combinations(sorted(documents), 2)}
# ```
#
# </details>

# %% [markdown]
# The rest is given. `mine_eK` has the signatures of this rank's e documents. `near_pairs` sends the signature of each
# pair's first document to the rank of the second. If the estimate of J reaches `limit`, the second is dropped.

# %% jupyter={"source_hidden": true}
# %%ranks
a_K, b_K = np.random.default_rng(0).integers(1, PRIME, size=(2, hashes))

# %%
# %%ranks


def near_copies(mine_eK, limit=0.6):
    """{document of this rank: the first one that it is near to}. All ranks call it."""
    records = lesson.band_records(mine_eK).to(device)
    met = lesson.exchange_rows(parcels(records, world_size))
    return lesson.near_pairs(colliding(met.tolist()), mine_eK, similarity, limit, device)


mine_eK = np.stack([signature(shingle_hashes(text), a_K, b_K) for text in mine])
with wire.watch() as seen:
    dropped = near_copies(mine_eK)

# %% jupyter={"source_hidden": true}
# %%ranks
calls = [call.bytes for call in seen.calls if call.op == "all_to_all"]  # received: counts and rows, three times
n_docs, share = len(pile), (world_size - 1) / world_size  # of what a rank receives, this share is from the others
by_keys_kb, gather_kb = sum(calls) * share / 1e3, 4 * hashes * n_docs * share / 1e3
told = f"this rank received {calls[1]:,} bytes of records, {calls[3]:,} of pairs, {calls[5]:,} of signatures"
told += f"\nfrom the others about {by_keys_kb:.0f} kB; by the all-gather {gather_kb:.0f} kB"
compare("kB of records that a rank of 4 receives", "guess_kb", round(8 * 16 * 1024 * 3 / 16 / 1e3, 1), because=told)
copies = {second: first for part in everyone(dropped) for second, first in part.items()}
found = len({(first, second) for second, first in copies.items()} & planted)
truth = len(planted)
if rank == 0:
    say(f"{world_size} ranks found {found} of {truth} planted copies, and {len(copies) - found} other pairs")
    say(f"for comparison, all texts together: {sum(len(text.encode()) for text in pile) / 1e3:.0f} kB")
    figure = lesson.draw_received(n_docs, hashes, world_size, by_keys_kb)
    alt = "kB that a rank receives against the number of ranks: all-gather stays, keys fall"
    show(figure, "received", alt, unanswered())
metrics.exact(copies=sorted(copies.items()), key_bytes=everyone(calls[1]))

# %% [markdown]
# Any number of ranks finds the same copies, since the same records meet. (The bands miss some of the less similar ones.
# The 56 that one rank found at the start are another search: other hash functions, and a limit of 0.5, not 0.6.) And our
# speeches are shorter than a signature: all texts are fewer bytes than an all-gather of signatures. Web pages are longer. With more ranks, each
# rank receives less, but only with your all-to-all.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: keys</summary>
#
# *Usual mistake:* comparing with the first document of a key only: then a chance meeting hides a copy. *Ask:* "what if a
# thousand pages share one band, such as a licence text?" (Half a million pairs on one rank. Pipelines cap a key's
# documents, or remove such paragraphs first.) *When late:* give C.
#
# </details>

# %% [markdown]
# ## Tokens: byte-pair encoding (CORE, 7 min)
#
# If tokens are characters, sequences are long. If they are words, the vocabulary has no end. Byte-pair encoding
# ([**BPE**](../assets/glossary.md#bpe), Sennrich et al. 2016) is between the two. As in GPT-2, ours begins with the 256
# bytes, so it can encode any text. Then it makes the *most frequent pair of neighbours* a new token, and repeats this.
#
# ![The words banana and bandana; the pair a n occurs four times and becomes one token](../assets/12_bpe.svg)
#
# ### Build D: one merge
#
# `pairs` is {(a, b): how often}. Return the most frequent pair, in a tie the smaller one, so that all ranks choose
# the same. `merge` returns a new list in which `new` replaces each `pair`, from left to right. For the pair (a, a), a
# a a becomes `new` a.


# %%
# %%ranks
def most_frequent(pairs):
    return min(pairs, key=lambda pair: ____)


def merge(ids, pair, new):
    merged, i = [], 0
    while i < len(ids):
        ____  # three lines: is the pair here? what is appended? how far does i go?
    return merged


checks.one_merge((most_frequent, merge), ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution D</summary>
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
# Pairs are counted only within words. So ranks all-gather once how often each *word* occurs. From equal counts, and
# with your rule for ties, all find the same merges. Then each rank tokenizes its own documents into a **shard**. A
# special token, the **separator**, begins each document.

# %% jupyter={"source_hidden": true}
# %%ranks
WORDS = re.compile(r" ?[a-zA-Z]+| ?[^a-zA-Z\s]+|\s")


def word_counts(texts):
    """{word as bytes: how often}"""
    return Counter(word.encode() for text in texts for word in WORDS.findall(text))


def train_bpe(counts, merges):
    """The merges [(a, b), ...]; number i makes the token 256 + i. After a merge only words that changed are counted."""
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


# %%
# %%ranks --timeout 120
own = word_counts(documents[rank::world_size])
with wire.watch() as seen:
    counts = sum(everyone(own), Counter())
table = train_bpe(counts, merges)

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.data.tokenizer import byte_encoder

encode = byte_encoder(table, WORDS)
stream = [i for text in documents[rank::world_size] for i in (256 + len(table), *encode(text))]
text_bytes = sum(len(text.encode()) for text in documents[rank::world_size])
total = torch.tensor([len(stream), text_bytes], device=device)
dist.all_reduce(total)
if rank == 0:
    handed = sum(call.bytes for call in seen.calls)
    say(f"{len(own):,} different words on this rank, {len(counts):,} on all; all-gathered {handed:,} bytes")
    token = {i: bytes([i]) for i in range(256)}
    for i, (a, b) in enumerate(table):
        token[256 + i] = token[a] + token[b]
    say(f"longest tokens {[t.decode('latin-1') for t in sorted(token.values(), key=len)[-6:]]}")
    say(f"all shards: {total[0]:,} tokens, {total[1] / (total[0] - len(documents)):.2f} bytes per token")
metrics.exact(merges=[list(pair) for pair in table], tokens=total.tolist())

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: tokens</summary>
#
# Do banana and bandana by hand with the room. *Usual mistake:* counting pairs across a space, so that `e t` of "the
# the" becomes a token. *When late:* give `merge` and let them write `most_frequent`.
#
# </details>

# %% [markdown]
# ## Packing: many documents in one sequence (CORE, 7 min)
#
# Documents differ in length, and padding wastes compute. So they are [**packed**](../assets/glossary.md#packing):
# joined end to end and cut into sequences of T tokens. Now a token can attend to another document in its sequence.
#
# ![Three documents in one sequence of ten tokens; in the mask three triangles along the diagonal are
# allowed](../assets/12_packing.svg)
#
# A [**document mask**](../assets/glossary.md#document-mask) prevents that. `documents_BT` (B sequences) has the
# number of each position's document, in the figure 1 for A, 2 for B and 3 for C: 1 1 1 2 2 2 2 3 3 3.
#
# ### Build E: the mask
#
# Return bool [B, T, T], without loops. It is True where the query (second dimension) may attend to the key (third): a
# key of the same document that does not come later.


# %%
# %%ranks
def document_mask(documents_BT):
    same_BTT = ____
    return ____


checks.document_mask(document_mask, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution E</summary>
#
# ```python
# def document_mask(documents_BT):
#     same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
#     return same_BTT.tril()
# ```
#
# </details>

# %% [markdown]
# Some trainers have no mask, and only **restart the positions** at 0 with each document. Is that enough? The next
# cell changes the second token of each sequence. Do logits of later documents change?


# %% jupyter={"source_hidden": true}
# %%ranks
def positions_of(documents_BT):
    """0, 1, 2, ... from the beginning of each document; documents are numbered in order."""
    first_BT = torch.searchsorted(documents_BT, documents_BT)  # where each position's document begins
    return torch.arange(documents_BT.shape[1], device=documents_BT.device) - first_BT


def packed_logits(model, ids_BT, mask_BTT, positions_BT):
    """The GPT's logits [B, T, V] under this mask, with these positions; H heads of E numbers each."""
    x_BTD = model.tokens(ids_BT) + model.positions(positions_BT)
    for block in model.blocks:
        attention = block.attention
        qkv_BHT3E = attention.qkv(block.norm_1(x_BTD)).unflatten(-1, (-1, 3, attention.head_size))
        q_BHTE, k_BHTE, v_BHTE = qkv_BHT3E.transpose(1, 2).unbind(-2)
        y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, attn_mask=mask_BTT[:, None])
        x_BTD = x_BTD + attention.out(y_BHTE.transpose(1, 2).flatten(2))
        x_BTD = x_BTD + block.mlp(block.norm_2(x_BTD))
    return model.head(model.norm(x_BTD))


def packed_batch(T=256, B=2):
    """(a GPT in float64, ids [B, T] of this rank's documents with separators, the number of each one's document)."""
    separator = len(corpus.vocab)
    torch.manual_seed(1337)
    gpt = GPT(GPTConfig(vocab_size=separator + 1, block_size=T)).to(device, torch.float64)
    joined = [i for text in documents[rank::world_size][:60] for i in (separator, *corpus.encode(text).tolist())]
    ids_BT = torch.tensor(joined[: B * T], device=device).view(B, T)
    return gpt, ids_BT, (ids_BT == separator).cumsum(1)


gpt, ids_BT, documents_BT = packed_batch()
positions_BT, counting_T = positions_of(documents_BT), torch.arange(256, device=device)

# %%
# %%ranks
mask_BTT = document_mask(documents_BT)
causal_BTT = torch.ones_like(mask_BTT).tril()
other_BT = ids_BT.clone()
other_BT[:, 1] = (other_BT[:, 1] + 1) % len(corpus.vocab)
later_BT = documents_BT != documents_BT[:, :1]
for name, *how in (
    ("plain causal", causal_BTT, counting_T),
    ("restarted positions", causal_BTT, positions_BT),
    ("document mask", mask_BTT, counting_T),
):
    before, after = (packed_logits(gpt, ids, *how) for ids in (ids_BT, other_BT))
    if rank == 0:
        say(f"{name:20} later documents change by {(before - after)[later_BT].abs().max():.1e}")

# %% [markdown]
# Restarted positions [do not help](../assets/handbook/12_llm_pretraining.md#packing-without-wasted-work). With mask *and*
# restarted positions each document has the logits that it has alone:

# %% jupyter={"source_hidden": true}
# %%ranks
packed_BTV, apart = packed_logits(gpt, ids_BT, mask_BTT, positions_BT), 0.0
for row in range(len(ids_BT)):
    for number in documents_BT[row].unique():
        here_T = documents_BT[row] == number
        alone_tV = gpt(ids_BT[row : row + 1, here_T])[0][0]
        apart = max(apart, (packed_BTV[row, here_T] - alone_tV).abs().max().item())
assert apart < 1e-10
if rank == 0:
    share = mask_BTT.sum().item() / causal_BTT.sum().item()
    say(f"packed and alone differ by {apart:.0e}; the mask keeps {share:.0%} of the causal pairs")

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: packing</summary>
#
# Draw the mask of documents of 2, 3 and 1 tokens on the board. *Usual mistake:* a mask of documents without the causal
# half, or one that leaves the separator to the document before. *Ask:* "does a mask of zeros and ones save compute?" (Not by
# itself: all pairs are computed, then masked. The lab on FlexAttention skips blocks.)
#
# </details>

# %% [markdown]
# ## One point of a scaling law (CORE, 9 min)
#
# For the same FLOPs a larger model reads fewer tokens, but learns more from each. Which size is best? Train several
# sizes, each on as many tokens as the budget of FLOPs allows. Their losses are an
# [**isoFLOP**](../assets/glossary.md#isoflop) curve (Hoffmann et al. 2022), and its lowest point is the best size. On
# logarithmic axes the best sizes of several budgets lie on a line: a [**scaling
# law**](../assets/glossary.md#scaling-law).
#
# The course has recorded 6 sizes for each of 3 budgets. Train one of these models now, data parallel on all ranks:

# %%
# %%ranks --timeout 300
from manyhands.train.isoflop import Point, by_budget, power_law, train_point

live = train_point(Point(live_flops, 24), corpus, ranks, sample=120, progress=True)

# %% jupyter={"source_hidden": true}
# %%ranks
points = recorded_runs.numbers("12_isoflop.json")["points"]
same = [p["val_loss"] for p in points if (p["budget_flops"], p["width"]) == (live_flops, 24)]
if rank == 0:
    say(f"{live['params']:,} parameters, {live['tokens']:,} tokens; it writes {live['sample'][:60]!r}")
    beside = f", recorded {same[0]:.3f} on one" if same else ""
    say(f"validation loss {live['val_loss']:.3f} nats per character on {world_size} ranks{beside}")
metrics.close(1e-2, live_loss=live["val_loss"])

# %% [markdown]
# Your model hardly writes a word yet. The same trainer made [this model](../assets/models/README.md) in four minutes on
# one GPU:

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.checkpoint.export import shipped_model, tokenizer_of
from manyhands.gpt.sampling import Sampling
from manyhands.predict.models import flops_per_token
from manyhands.serve.engine import generate

if rank == 0:  # no other rank takes part
    plays, about = shipped_model("plays")
    made, letters = recorded_runs.numbers("plays_models.json")["models"]["plays"], tokenizer_of(about)
    flops_per_step = flops_per_token(plays.config) * 64 * plays.config.block_size  # 64 sequences in a step
    curves = {
        name: [(step * flops_per_step, loss) for step, loss in made[key]]
        for name, key in (("train", "train_loss"), ("val", "val_losses"))
    }
    alt = "loss against FLOPs: training and validation loss of the shipped model fall; your point lies far to the left"
    show(lesson.draw_longer_run(curves, live, f"{plays.num_params():,} parameters, 36 plays"), "longer_run", alt)
    spent = made["kept_step"] * flops_per_step
    say(f"the shipped model: {spent:.1e} FLOPs, {spent / live['flops']:,.0f} times yours; step {made['kept_step']:,}")
    say(f"was kept, where its validation loss was lowest: {made['val_loss']:.3f}. It writes:")
    say(letters.decode(generate(plays, letters.encode("KING:\n")[None], 200, Sampling(0.8), seed=2)[0]))

# %% [markdown]
# ### Build F: the lowest point of a valley
#
# An isoFLOP curve looks like a parabola in x = ln(parameters). `np.polyfit(x, losses, 2)` returns bend, slope and
# height of bend·x² + slope·x + height. Return the parameters (not their logarithm) and the loss of its lowest point.


# %%
# %%ranks
def lowest(params, losses):
    bend, slope, height = np.polyfit(____, losses, 2)
    x = ____  # where the derivative is zero
    return ____, bend * x**2 + slope * x + height


checks.lowest(lowest, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution F</summary>
#
# ```python
# def lowest(params, losses):
#     bend, slope, height = np.polyfit(np.log(params), losses, 2)
#     x = -slope / (2 * bend)
#     return math.exp(x), bend * x**2 + slope * x + height
# ```
#
# </details>

# %% [markdown]
# **Predict.** You get ten times the FLOPs. How many times larger is the best model?

# %%
# %%ranks
guess_times = ____  # your turn: type a number

# %% jupyter={"source_hidden": true}
# %%ranks
valleys = {budget: lowest([p["params"] for p in rows], [p["val_loss"] for p in rows])
           for budget, rows in by_budget(points).items()}  # fmt: skip
exponent = np.polyfit(np.log(list(valleys)), np.log([params for params, _ in valleys.values()]), 1)[0]
published = recorded_runs.published("12_isoflop")
best = {one["budget_flops"]: lowest(*zip(*lesson.by_size(one), strict=True)) for one in published}
their_exponent = np.polyfit(np.log(list(best)), np.log([params for params, _ in best.values()]), 1)[0]
said = "{:.0e} FLOPs: best {:.1e} parameters, {:.0f} tokens each, loss {:.2f}"
lines = [said.format(budget, P, budget / 6 / P**2, loss) for budget, (P, loss) in (valleys | best).items()]
lines.append(f"best size ~ budget^{exponent:.2f} here, budget^{their_exponent:.2f} there")
more = round(10**exponent, 1)
compare("how many times larger the best model is for ten times the FLOPs", "guess_times", more, because=lines)
if rank == 0:
    alt = "loss against parameters: three valleys here, and three of published runs, all go right and down"
    show(lesson.draw_valleys(by_budget(points), valleys, live, published, lowest), "isoflop", alt, unanswered())

# %% [markdown]
# A star is the lowest point of a fitted parabola. The runs on the right (read from a figure of Hoffmann et al.) cost
# about a billion times as much. But our best models read more tokens per parameter, and our tokens are characters. A
# scaling law holds for the data that it was measured on, near its budgets.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the scaling law</summary>
#
# While the point trains, let the room draw the curve. *Usual mistake:* comparing two models that were trained on
# equally many tokens, and calling the larger one better. *Ask:* "what changes if the model will answer a billion
# questions?" (A smaller model trained for longer is cheaper to serve: Llama 3 8B read 15 T tokens, over 1,800 per
# parameter.) *When late:* show the stored figure.
#
# </details>

# %% [markdown]
# ## A bug from the zoo (CORE, 2 min)
#
# Somebody replaces a model's `plain_loss` by a library's `shifted_loss`. The loss falls. **What is wrong, and which
# measurement shows it?** Decide before you open the answer.


# %%
# %%ranks
def shifted_loss(logits_bTV, targets_bT):
    """The library's: position t must guess what stands at t + 1."""
    return F.cross_entropy(logits_bTV[:, :-1].flatten(0, 1), targets_bT[:, 1:].flatten())


def plain_loss(logits_bTV, targets_bT):
    return F.cross_entropy(logits_bTV.flatten(0, 1), targets_bT.flatten())


# %% jupyter={"source_hidden": true}
# %%ranks
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
# Now measure how well the logits at t guess the characters at t to t + 3:

# %% jupyter={"source_hidden": true}
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
# The targets are shifted twice: by the batch and by the loss. The model learns to guess the character *after* the
# next one: the loss at t + 2 is its lowest. It can learn a little, so the loss falls, but it stays higher than that
# of the mended model.
#
# This happens when a library's loss starts to shift while a model's own code still does. [The
# handbook](../assets/handbook/12_llm_pretraining.md#targets-that-are-shifted-twice) names two models that were trained
# like this.
#
# </details>
#
# The rule: **score the model against targets moved by one in both directions.** The true targets must have the lowest
# loss. And read a sample before you trust a curve. (These two models trained too briefly: neither writes English.)

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
# **What changes on GPUs.** Clean and tokenize on CPUs, before the GPU job starts. Run many small trainings as a job
# array.

# %% [markdown]
# ## Recap

# %%
# %%ranks
card(
    "Documents of different ranks must meet: send each band's key to one rank, and no rank ever gathers everything.",
    "Ranks add up counts of words once and find the same merges. Every step gives the same on any number of ranks.",
    "Packed documents see each other unless a document mask forbids it. To prove it, change a token of another document.",
    "For a budget there is a best size. Its law holds in its range, for its data.",
    "Score a new loss against targets moved by one in both directions, and read a sample.",
    figure="valleys of equal cost, here and a billion times as expensive",
    command="mpiexec -n 32 python scripts/prepare_data.py pages/ --vocab-size 8192 --to data/mine",
)

# %% [markdown]
# Next: [lesson 13](13_llm_alignment.ipynb) makes the model answer. Below is the lab: sections to choose from.
# Further reading is in the [handbook](../assets/handbook/12_llm_pretraining.md#further-reading).

# %% [markdown]
# ## How good is the estimate? (MORE, 4 min)
#
# The cell below copies long speeches and replaces some of their words. Each rank copies and signs its share. The true
# J of each pair is known.
#
# **Predict.** Which share of the points lies within one standard deviation, sqrt(J (1 - J) / K)? (For J = 0.8 and K =
# 128 it is 0.035.)
#
# <details><summary>Answer</summary>
#
# About two thirds: each order is a coin toss that agrees with probability J, and the mean of K tosses is nearly normal.
# Four times the hashes halve the deviation.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
a_K, b_K = np.random.default_rng(0).integers(1, PRIME, size=(2, hashes))


# %%
# %%ranks
def jaccard(one_S, other_S):
    both = len(np.intersect1d(one_S, other_S))
    return both / (len(one_S) + len(other_S) - both)


dice, pairs = random.Random(rank), []
long = [text for text in documents[rank::world_size] if len(text.split()) >= 60]
for i, text in enumerate(long[:80]):
    sets = [shingle_hashes(text), shingle_hashes(copy_of(text, 0.004 * (i % 80), dice))]
    estimate = similarity(*(signature(hashes_S, a_K, b_K) for hashes_S in sets))
    pairs.append((jaccard(*sets), estimate))

# %% jupyter={"source_hidden": true}
# %%ranks
true_N, found_N = np.array([pair for pairs in everyone(pairs) for pair in pairs]).T
sigma_N = np.sqrt(true_N * (1 - true_N) / hashes)
inside = int((np.abs(found_N - true_N) <= sigma_N).sum())
if rank == 0:
    alt = "estimated against true similarity of planted copies: points around the diagonal, in a band"
    show(lesson.draw_estimates(true_N, found_N, hashes), "minhash", alt)
    say(f"{inside} of {len(true_N)} estimates are within one standard deviation: {inside / len(true_N):.0%}")
metrics.exact(minhash_inside=inside)

# %% [markdown]
# Real pipelines also **filter**: they drop documents that are too short, have few letters, or repeat their lines
# (`manyhands.data.documents.Quality`).

# %% [markdown]
# ## Contamination: the test is in the training set (MORE, 6 min)
#
# **Why.** A model that was trained on its own test looks better than it is. Here 24 speeches are the test. We plant 12 of
# them in the training set, 16 times each, train, and score both halves. Then we remove what shares 8 words in a row with
# the test, and train again. The test is small, so every rank can have all of it: each rank checks its own documents, and
# no document is sent.
#
# **Predict.** Before the removal, which half has the lower loss? And afterwards?
#
# <details><summary>Answer</summary>
#
# Before, the planted half. Afterwards neither has an advantage: the difference that is left comes from the texts
# themselves.
#
# </details>


# %%
# %%ranks
def runs_of_words(text, n=8):
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


held_out = [text for text in documents[int(0.9 * len(documents)) :] if 250 <= len(text) <= 700][:24]
in_test = set().union(*map(runs_of_words, held_out))
dirty = documents[:150] + held_out[::2] * 16
random.Random(2).shuffle(dirty)
mine_kept = [i for i in range(rank, len(dirty), world_size) if not runs_of_words(dirty[i]) & in_test]
kept = sorted(i for part in everyone(mine_kept) for i in part)
if rank == 0:
    say(f"{len(dirty)} documents, {len(dirty) - len(kept)} share 8 words in a row with the test: removed")
metrics.exact(kept=kept)

# %% jupyter={"source_hidden": true}
# %%ranks --timeout 300


def reader(texts):
    """A function of the step: inputs and targets [24, 32], pieces of these texts."""
    ids = corpus.encode("\n\n".join(texts))

    def batch_of(step):
        begins = torch.randint(len(ids) - 33, (24,), generator=torch.Generator().manual_seed(step))
        rows_BT = torch.stack([ids[begin : begin + 33] for begin in begins])
        return rows_BT[:, :-1], rows_BT[:, 1:]

    return batch_of


scores = {}
for k, (name, texts) in enumerate({"before": dirty, "after": [dirty[i] for i in kept]}.items()):
    if k % world_size == rank:  # two trainings on two ranks
        model = lesson.train_tiny(reader(texts), len(corpus.vocab), lab_steps, device=device)
        halves = [corpus.encode("\n\n".join(held_out[half::2])) for half in (0, 1)]
        scores[name] = [lesson.mean_loss(model, half) for half in halves]
scores = {name: losses for part in everyone(scores) for name, losses in part.items()}
if rank == 0:
    for name in ("before", "after"):
        planted_loss, other_loss = scores[name]
        gain = other_loss - planted_loss
        say(
            f"{name:6} the removal: planted half {planted_loss:.2f}, other half {other_loss:.2f} nats; planted better by {gain:+.2f}"
        )
metrics.close(tolerance=0.1, contamination=[scores["before"], scores["after"]])

# %% [markdown]
# To trust a score you need both: a search for n-grams that test and training set share, and a test text that was
# written after the training data. Copies with changed words escape the search for n-grams; the signatures above find
# these.

# %% [markdown]
# ## Data mixing: how much of what? (MORE, 6 min)
#
# **Why.** A training set is a mixture: web, code, books, mathematics. Its shares are chosen by small runs. Our second
# domain is Python code (three modules of the standard library). Each run reads the same number of bytes; only the
# share of code differs. The runs are independent, so each rank takes its own, as in a job array.
#
# **Predict.** The share of code goes from 0 to 5 %. Which changes more, the loss on code or the loss on plays?
#
# <details><summary>Answer</summary>
#
# The loss on code, by far. The first bytes of a domain teach its alphabet and its commonest words. So even a small
# share of a domain helps, and the best share is found by runs.
#
# </details>

# %%
# %%ranks --timeout 300
import argparse
import difflib
import inspect
import typing


code = "\n".join(inspect.getsource(module) for module in (argparse, difflib, typing))
domains = [torch.tensor(list(text.encode())) for text in (corpus.text, code)]  # plays, code: as bytes
learn, test = zip(*((ids[: int(0.9 * len(ids))], ids[int(0.9 * len(ids)) :][:60000]) for ids in domains), strict=True)


def mixed(share):
    """A function of the step: inputs and targets [24, 32], of which this share is code on average."""

    def batch_of(step):
        dice = np.random.default_rng(step)
        rows = []
        for chance in dice.random(24):
            domain = learn[1] if chance < share else learn[0]
            begin = dice.integers(len(domain) - 33)
            rows.append(domain[begin : begin + 33])
        rows_BT = torch.stack(rows)
        return rows_BT[:, :-1], rows_BT[:, 1:]

    return batch_of


shares = (0.0, 0.05, 0.25, 0.5, 1.0)
mine_losses = {}
for share in shares[rank::world_size]:
    model = lesson.train_tiny(mixed(share), 256, lab_steps, device=device)
    mine_losses[share] = [lesson.mean_loss(model, ids) for ids in test]
losses = {share: both for part in everyone(mine_losses) for share, both in part.items()}

# %% jupyter={"source_hidden": true}
# %%ranks
if rank == 0:
    on_plays, on_code = ([losses[share][k] for share in shares] for k in (0, 1))
    figure = lesson.draw_mixtures(shares, {"plays": on_plays, "code": on_code})
    show(figure, "mixtures", "loss on plays and on code against the share of code: code falls steeply at first")
    for share in shares:
        say(f"{share:4.0%} code: loss on plays {losses[share][0]:.2f}, on code {losses[share][1]:.2f} nats per byte")
metrics.close(tolerance=0.1, mixtures=[losses[share] for share in shares])

# %% [markdown]
# Small runs rank mixtures. Whether a large model has the same ranking must be tested, as with every law in this
# lesson.

# %% [markdown]
# ## Bits per byte (MORE, 9 min)
#
# **Why.** A loss is in nats *per token* (a nat is the unit of the natural logarithm). With longer tokens a model
# makes fewer and harder guesses, so its loss per token is higher even if it knows as much. All models share the text,
# so divide by its **bytes**.
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
# ### Exercise 1: bits per byte
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
# <details><summary>Solution 1</summary>
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
from manyhands.data.tokenizer import byte_encoder

WORDS = re.compile(r" ?[a-zA-Z]+| ?[^a-zA-Z\s]+|\s")
encode = byte_encoder(train_bpe(word_counts(documents), merges), WORDS)


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
characters = [i for text in documents[rank::world_size] for i in corpus.encode(text).tolist()]
tokens = [i for text in documents[rank::world_size] for i in encode(text)]
for name, ids, size in (("characters", characters, len(corpus.vocab)), ("BPE tokens", tokens, 256 + merges)):
    nats, count = by_frequency(ids, size)
    bits = bits_per_byte(nats, count, num_bytes)
    if rank == 0:
        say(f"{name:11} {nats:.2f} nats per token, {bits:.2f} bits per byte, {num_bytes / count:.2f} bytes per token")

# %% [markdown]
# The model with the higher loss per token is better per byte. So never state a loss without its tokenizer.

# %% [markdown]
# ## The mask in the library, and FlexAttention (MORE, 5 min)
#
# The course's GPT builds the mask itself if its configuration names the separator; with `train.py` it does so under
# every strategy. Its positions do not restart: a sequence may begin in the middle of a document, whose true positions
# nobody knows.

# %% jupyter={"source_hidden": true}
# %%ranks
gpt, ids_BT, documents_BT = packed_batch()

# %%
# %%ranks
from dataclasses import replace

library = GPT(replace(gpt.config, separator=len(corpus.vocab))).to(device, torch.float64)
library.load_state_dict(gpt.state_dict())
counting_T = torch.arange(256, device=device)
apart = packed_logits(gpt, ids_BT, document_mask(documents_BT), counting_T) - library(ids_BT)[0]
assert apart.abs().max() < 1e-10
say(f"ours and the package's differ by {apart.abs().max().item():.0e}")

# %% [markdown]
# A dense mask saves no work: all pairs are computed, then masked. FlexAttention takes the mask as a *function* of the
# positions, finds out which blocks of 128 by 128 pairs hold anything, and skips the others:

# %%
# %%ranks --timeout 120
import warnings

from torch.nn.attention.flex_attention import create_block_mask, flex_attention

_, _, numbers_BT = packed_batch(T=1024, B=1)


def may_look(b, h, query, key):
    return (query >= key) & (numbers_BT[b, query] == numbers_BT[b, key])


blocks = create_block_mask(may_look, 1, None, 1024, 1024, device=device.type)
causal = create_block_mask(lambda b, h, query, key: query >= key, 1, None, 1024, 1024, device=device.type)
q, k, v = torch.randn(3, 1, 2, 1024, 16, generator=torch.Generator().manual_seed(3)).to(device)
with warnings.catch_warnings(action="ignore"):  # it would say that it is not compiled
    by_flex = flex_attention(q, k, v, block_mask=blocks)
dense = F.scaled_dot_product_attention(q, k, v, attn_mask=document_mask(numbers_BT)[:, None])
assert (by_flex - dense).abs().max() < 1e-5
say(f"equal to the dense mask; blocks skipped: causal {causal.sparsity():.0f}%, documents {blocks.sparsity():.0f}%")

# %% [markdown]
# We print no time. Without `torch.compile` FlexAttention computes all pairs, on a CPU and on a GPU. Compiled for a
# GPU, its kernel skips the empty blocks. FlashAttention's `varlen` functions take the documents' lengths instead.

# %% [markdown]
# ## How sure is the law? (MORE, 6 min)
#
# The brackets below come from repeated fits of the grid, with noise as large as the scatter of its points about the
# parabolas. Is that scatter only chance? One point, the best width of the smallest budget, was trained with four
# further seeds.
#
# **Predict.** Is the spread of the seeds larger or smaller than the scatter about the parabolas?
#
# <details><summary>Answer</summary>
#
# Smaller (the cell prints both). The points scatter also because a valley is not exactly a parabola, and because the
# learning rate is not equally good for all widths.
#
# </details>

# %%
# %%ranks
from manyhands.train.isoflop import by_budget, parabola, power_law, residuals, spread

grid = recorded_runs.numbers("12_isoflop.json")
points, other_seeds = grid["points"], grid["other_seeds"]
optima = [parabola(rows) for rows in by_budget(points).values()]
law, sure, ten = power_law(optima), spread(points), 10 * optima[-1].budget_flops

# %% jupyter={"source_hidden": true}
# %%ranks
if rank == 0:
    at = other_seeds[0]["budget_flops"], other_seeds[0]["width"]
    seeds = [p["val_loss"] for p in (*points, *other_seeds) if (p["budget_flops"], p["width"]) == at]
    say(f"{len(seeds)} seeds at {at[0]:.0e} FLOPs and width {at[1]}: standard deviation {np.std(seeds, ddof=1):.4f}")
    say(f"the points scatter about their parabolas with a standard deviation of {residuals(points)[0]:.4f}")
    low, high = sure["exponent"]
    say(f"best size ~ budget^{law.exponent:.2f}; 90 % of refits with such scatter: {low:.2f} to {high:.2f}")
    params, loss = law.at(ten)
    (few, many), (least, most) = sure["params"], sure["loss"]
    say(f"ten times the largest budget: {params:,.0f} parameters [{few:,.0f} to {many:,.0f}]")
    say(f"its loss: {loss:.2f} [{least:.2f} to {most:.2f}]")
    times, most = ten / 6 / params / len(corpus.train_ids), max(point["epochs"] for point in points)
    say(f"it would read the corpus {times:.1f} times; the recorded runs read it up to {most:.1f} times")

# %% [markdown]
# The brackets hold the scatter of 18 points, and nothing else. They leave out that:
#
# - the learning rate falls as 1/width and was tuned for the smallest budget only. Badly tuned runs can move a curve's
#   lowest point. muP (Yang et al. 2022) would scale more than that, see
#   [the handbook](../assets/handbook/12_llm_pretraining.md#the-learning-rate-of-a-grid);
# - the corpus has one megabyte, and a token that is read again teaches less;
# - three budgets span a factor of ten. Published laws span a thousand and more, and still disagree: Kaplan et al.
#   (2020) found an exponent of 0.73, Hoffmann et al. (2022) about 0.5;
# - the fit itself can be wrong: Besiroglu et al. (2024) read the points of Hoffmann's third approach off its plots,
#   got other numbers from them, and found the published intervals implausibly narrow.
#
# `train_point` is built from `train.py`'s parts and takes its data-parallel strategies. The next cell trains with a
# thirtieth of the budget under each of them: the loss must be the same, up to rounding. It also prints which share of
# the machine's peak the training uses (MFU).

# %%
# %%ranks --timeout 120
from manyhands.measure.timing import gemm_together
from manyhands.train.isoflop import Point, train_point

short = {}
for strategy in ("ddp", "zero1", "fsdp"):
    short[strategy] = train_point(Point(live_flops / 30, 24), corpus, ranks, strategy)
peak = gemm_together(ranks)  # FLOP/s of large matrix products, all ranks at once
flop_per_s = short["ddp"]["flops"] / short["ddp"]["seconds"]
if rank == 0:
    say(", ".join(f"{strategy} {row['val_loss']:.5f}" for strategy, row in short.items()))
    say(f"{flop_per_s / 1e9:.1f} of {peak / 1e9:.0f} GFLOP/s: MFU {100 * flop_per_s / peak:.2g}%")
ends = [row["val_loss"] for row in short.values()]
assert max(ends) - min(ends) < 1e-3
metrics.measured(flop_per_s=flop_per_s)

# %% [markdown]
# The peak is what large matrix products reach here, in the same precision. This model is 24 numbers wide, so its
# matrix products are far too small for that.

# %% [markdown]
# ## A text of your own (MORE, 4 min)
#
# `scripts/prepare_data.py` cleans and tokenizes files: filter, deduplicate, train the tokenizer, write shards (files
# of 16-bit numbers). The next cell writes a small file of pages, four of which do not belong in a training set, and
# prepares it. Any number of ranks writes the same bytes. (Here rank 0 gathers the signatures, 512 bytes per document,
# and decides. That works for a million documents.)

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
# ## Exercises (MORE, 18 min)
#
# Each check runs your answer in a separate process group: you cannot break anything. Exercise 1 stands above.
#
# ### Exercise 2: encode a word
#
# You have the merges. Which of them apply to a new word, and in which order? Write `encode_word(word, table)`: the
# list of tokens of `word`, which is given as bytes. As long as two neighbours are a pair in the table, take the pair
# that was *learned first* and merge it everywhere in the word. You may use `merge`. `table[i]` makes the token 256 +
# i.


# %%
# %%ranks
def encode_word(word, table):
    """The list of a word's tokens under these merges."""
    raise NotImplementedError  # your turn


checks.encode_word(encode_word, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 2</summary>
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
# ### Exercise 3: what does a packed sequence teach?
#
# With a separator between documents, the last token of a document teaches the model to guess "the end". Without a
# separator the model would have to guess there how another document begins, which is impossible. Write
# `packed_targets(ids_BT, documents_BT)`: for each position the next token of the *same document*, and -100 where
# there is none (`F.cross_entropy` ignores -100). The last position of a sequence has none either. Do not change
# `ids_BT`.


# %%
# %%ranks
def packed_targets(ids_BT, documents_BT):
    """The target of each position, -100 where none counts: [B, T]."""
    raise NotImplementedError  # your turn


checks.packed_targets(packed_targets, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 3</summary>
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
# ### Exercise 4: predict the next loss
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
# <details><summary>Solution 4</summary>
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
# ## End
#
# The last cell writes the run's numbers and stops the ranks.

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
