"""Lesson 12: merges and signatures are the same on any number of ranks, no token sees another document, a law is found
again.

What is tested is the lesson's own code, taken from its script, and the recorder of its grid.
"""

import json
import math
import random
import re
from collections import Counter
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from definitions import taken_from
from hypothesis import given, settings
from hypothesis import strategies as st
from isoflop import GRID, RECIPE, run_grid
from manyhands.data.corpus import Corpus
from manyhands.data.tokenizer import byte_encoder
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT, within_documents
from manyhands.launch import recorded_runs
from manyhands.lessons import llm_pretraining
from manyhands.measure import wire
from manyhands.predict.models import flops_per_token
from manyhands.train import isoflop
from tokenizers import Tokenizer, models, trainers

LESSON = "12_llm_pretraining"
PRIME, HASHES, EXACT = 2**31 - 1, 128, 1e-10
TEXTS = [
    "the hand that holds the pen, the hands that hold the oar",
    "many hands make light work; no hand is idle here",
    "who holds the thread, and who the other hand?",
    "a band of hands and a banana",
] * 3


def lesson(*names, **given):
    a_K, b_K = np.random.default_rng(0).integers(1, PRIME, size=(2, HASHES))
    words = re.compile(r" ?[a-zA-Z]+| ?[^a-zA-Z\s]+|\s")
    here = {"PRIME": PRIME, "hashes": HASHES, "a_K": a_K, "b_K": b_K, "WORDS": words, "combinations": combinations}
    here |= {"lesson": llm_pretraining} | given
    return SimpleNamespace(**vars(taken_from(LESSON, *names, **here)), a_K=a_K, b_K=b_K, WORDS=words)


BPE = ("most_frequent", "merge", "word_counts", "train_bpe", "encode_word")
DOCUMENTS = (
    "shingle_hashes", "signature", "similarity", "copy_of", "jaccard", "parcels", "colliding", "near_copies"
)  # fmt: skip
PACKED = ("document_mask", "positions_of", "packed_logits", "packed_targets")

# ---- tokens ----


def by_library(counts, merges):
    """The library's tokenizer, trained on words given as bytes; it works on characters, so one for each byte."""
    bpe = Tokenizer(models.BPE())
    alphabet = [chr(i) for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=256 + merges, initial_alphabet=alphabet, show_progress=False, limit_alphabet=256
    )
    bpe.train_from_iterator((word.decode("latin-1") for word in counts.elements()), trainer)
    return bpe


def library_table(bpe):
    model = json.loads(bpe.to_str())["model"]
    return [(model["vocab"][a], model["vocab"][b]) for a, b in model["merges"]]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=60), min_size=1, max_size=6), st.integers(1, 30))
def test_ours_and_the_librarys_merges_are_the_same_for_any_unicode_ties_included(texts, merges):
    ours = lesson(*BPE)
    counts = ours.word_counts(texts)
    assert ours.train_bpe(counts, merges) == library_table(by_library(counts, merges))


TRAINED = lesson(*BPE)
TABLE = TRAINED.train_bpe(TRAINED.word_counts(TEXTS), 40)
LIBRARY = by_library(TRAINED.word_counts(TEXTS), 40)
ENCODE = byte_encoder(TABLE, TRAINED.WORDS)
SPELLED = [bytes([i]) for i in range(256)]
for a, b in TABLE:
    SPELLED.append(SPELLED[a] + SPELLED[b])


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=80))
def test_any_unicode_comes_back_from_its_tokens(text):
    assert b"".join(SPELLED[i] for i in ENCODE(text)).decode() == text


@settings(max_examples=150, deadline=None)
@given(st.text("abdehnort ,", max_size=40))
def test_a_word_encoded_by_hand_has_the_librarys_tokens(text):
    words = TRAINED.word_counts([text])
    for word in words:
        ours = TRAINED.encode_word(word, TABLE)
        assert ours == LIBRARY.encode(word.decode("latin-1")).ids == ENCODE(word.decode())
    assert sum(len(word) * n for word, n in words.items()) == len(text.encode())


def merges_on(ranks):
    ours, gathered = lesson(*BPE), [None] * ranks.world_size
    dist.all_gather_object(gathered, ours.word_counts(TEXTS[ranks.rank :: ranks.world_size]))
    return ours.train_bpe(sum(gathered, Counter()), 40)


GOLDEN = [  # an, " h", th, and, " th", " hand", " the", " o", ld, old, " hold", " hands"
    (97, 110), (32, 104), (116, 104), (256, 100), (32, 258), (257, 259),
    (260, 101), (32, 111), (108, 100), (111, 264), (257, 265), (261, 115),
]  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_merges_are_the_golden_ones_on_any_number_of_ranks(pool, n):
    assert pool.run(n, merges_on) == [TABLE] * n
    assert TABLE[: len(GOLDEN)] == GOLDEN


# ---- near-duplicates ----


def pages(count=60, words=80):
    """Documents that share hardly anything, the same in each run."""
    draw = random.Random(3)
    alphabet = [
        f"{a}{b}" for a in ("ka", "lo", "mi", "nu", "re", "so") for b in ("ba", "da", "fe", "gu", "ta", "vi", "xe")
    ]
    return [" ".join(draw.choice(alphabet) for _ in range(words)) for _ in range(count)]


def first_near(signed, limit):
    """{document: the first one that it is near to}, by looking at every pair: the result wanted."""
    found = {}
    for j in range(len(signed)):
        for i in range(j):
            same = signed[i] == signed[j]
            if j not in found and same.reshape(16, -1).all(1).any() and same.mean() >= limit:
                found[j] = i
    return found


def pile_of_copies():
    """Signatures [N, 128] of pages and copies: pairs, a chain, threes, and documents that only share a band."""
    ours, dice, kept = lesson(*DOCUMENTS), random.Random(1), pages()
    copies = {len(kept) + k: 5 * k for k in range(10)}
    pile = kept + [ours.copy_of(kept[i], 0.01, dice) for i in copies.values()] + [kept[7], kept[7].upper() + "!"]
    copies |= {len(pile) - 2: 7, len(pile) - 1: 7}
    signed = np.stack([ours.signature(ours.shingle_hashes(text), ours.a_K, ours.b_K) for text in pile])
    truth = {c: ours.jaccard(*(ours.shingle_hashes(pile[i]) for i in (c, o))) for c, o in copies.items()}
    strangers = np.random.default_rng(2).integers(0, PRIME, size=(4, HASHES), dtype=np.int32)
    strangers[1:, :8] = strangers[0, :8]  # all share one band of sixteen; only the last two are copies
    strangers[3, 8:] = strangers[2, 8:]
    return np.concatenate([signed, strangers]), copies, truth


def copies_on(ranks, limit):
    signed, _, _ = pile_of_copies()
    ours = lesson(*DOCUMENTS, world_size=ranks.world_size, device=ranks.device)
    with wire.watch() as seen:
        found = ours.near_copies(np.ascontiguousarray(signed[ranks.rank :: ranks.world_size]), limit)
    return found, [call.bytes for call in seen.calls], {call.op for call in seen.calls}


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_copies_are_those_of_all_pairs_on_any_number_of_ranks_and_no_rank_sees_everything(pool, n):
    signed, copies, truth = pile_of_copies()
    found, received, ops = zip(*pool.run(n, copies_on, 0.6), strict=True)
    merged = {second: first for part in found for second, first in part.items()}
    assert all(second % n == rank for rank, part in enumerate(found) for second in part), "its holder decides"
    assert merged == first_near(signed, 0.6)
    clear = {copy: original for copy, original in copies.items() if truth[copy] >= 0.85}
    assert len(clear) >= 6 and clear.items() <= merged.items()
    assert set(merged) == {*copies} & {*merged} | {len(signed) - 1}, "what is no copy stays"
    assert merged[len(signed) - 1] == len(signed) - 2, "not only the first that shares a band is looked at"
    assert all(op == {"all_to_all"} for op in ops)
    assert sum(calls[1] for calls in received) == 8 * 16 * len(signed), "a record has 8 bytes, and goes to one rank"
    if n > 1:
        assert max(sum(calls) for calls in received) < 4 * HASHES * len(signed), "less than all signatures"


def test_the_estimate_is_the_similarity_within_four_standard_errors_and_unbiased():
    ours, dice, misses = lesson(*DOCUMENTS), random.Random(5), []
    for text in pages(40):
        sets = [ours.shingle_hashes(text), ours.shingle_hashes(ours.copy_of(text, 0.1, dice))]
        true = ours.jaccard(*sets)
        estimate = ours.similarity(*(ours.signature(h, ours.a_K, ours.b_K) for h in sets))
        misses.append((estimate - true) / math.sqrt(true * (1 - true) / HASHES))
    assert max(map(abs, misses)) < 4 and abs(np.mean(misses)) < 4 / math.sqrt(len(misses))


# ---- packing ----


def packed_model():
    torch.manual_seed(2)
    gpt = GPT(GPTConfig(vocab_size=12, block_size=16, n_layer=2, n_head=2, n_embd=16)).double()
    for p in gpt.parameters():
        p.data += 0.1 * torch.randn_like(p)
    ids_BT = torch.tensor(
        [[11, 3, 4, 11, 5, 5, 5, 11, 11, 9, 8, 7, 1, 2, 3, 4], [4, 4, 11, 2, 2, 2, 2, 2, 2, 11, 1, 0, 1, 0, 1, 0]]
    )
    return gpt, ids_BT, (ids_BT == 11).cumsum(1)


def each_document(documents_BT):
    for row in range(len(documents_BT)):
        for number in documents_BT[row].unique():
            yield row, documents_BT[row] == number


def test_packed_documents_have_the_logits_and_gradients_of_documents_alone():
    ours, (gpt, ids_BT, documents_BT) = lesson(*PACKED), packed_model()
    mask_BTT, positions_BT = ours.document_mask(documents_BT), ours.positions_of(documents_BT)
    logits_BTV = ours.packed_logits(gpt, ids_BT, mask_BTT, positions_BT)
    targets_BT = ours.packed_targets(ids_BT, documents_BT)
    F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum").backward()
    packed = [p.grad.clone() for p in gpt.parameters()]
    gpt.zero_grad()
    for row, here_T in each_document(documents_BT):
        ids_1t = ids_BT[row : row + 1, here_T]
        alone_tV = gpt(ids_1t)[0][0]
        assert (logits_BTV[row, here_T] - alone_tV).abs().max() < EXACT
        F.cross_entropy(alone_tV[:-1], ids_1t[0, 1:], reduction="sum").backward()
    assert max((p.grad - g).abs().max().item() for p, g in zip(gpt.parameters(), packed, strict=True)) < EXACT


def test_no_token_moves_another_document_and_every_token_moves_its_own():
    ours, (gpt, ids_BT, documents_BT) = lesson(*PACKED), packed_model()
    mask_BTT, positions_BT = ours.document_mask(documents_BT), ours.positions_of(documents_BT)
    before = ours.packed_logits(gpt, ids_BT, mask_BTT, positions_BT)
    for row, here_T in each_document(documents_BT):
        first = int(here_T.nonzero()[0])
        changed_BT = ids_BT.clone()
        changed_BT[row, first] = 6
        moved_T = (ours.packed_logits(gpt, changed_BT, mask_BTT, positions_BT) - before)[row].abs().amax(-1) > 0
        assert torch.equal(moved_T, here_T)


def test_the_lessons_mask_is_the_packages_and_its_model_too():
    ours, (gpt, ids_BT, documents_BT) = lesson(*PACKED), packed_model()
    mask_BTT = ours.document_mask(documents_BT)
    assert torch.equal(mask_BTT[:, None], within_documents(ids_BT, 11))
    masked = GPT(GPTConfig(vocab_size=12, block_size=16, n_layer=2, n_head=2, n_embd=16, separator=11)).double()
    masked.load_state_dict(gpt.state_dict())
    apart = ours.packed_logits(gpt, ids_BT, mask_BTT, torch.arange(16)) - masked(ids_BT)[0]
    assert apart.abs().max() < EXACT


# ---- bits per byte, and the zoo ----


def test_bits_per_byte_do_not_depend_on_how_the_text_is_cut():
    bits = lesson("bits_per_byte").bits_per_byte
    assert bits(math.log(256), 1000, 1000) == pytest.approx(8), "knowing nothing about bytes"
    assert bits(2 * math.log(256), 500, 1000) == pytest.approx(8), "the same in pairs of bytes"


def frequencies_on(ranks):
    ours = lesson("by_frequency", device=ranks.device)
    return ours.by_frequency([0, 0, 1, 3, 0, 1, 0, 0][ranks.rank :: ranks.world_size], 5)


@pytest.mark.parametrize("n", [1, 2])
def test_frequencies_are_those_of_all_ranks_tokens(pool, n):
    p = [5 / 8, 2 / 8, 1 / 8]
    for nats, count in pool.run(n, frequencies_on):
        assert nats == pytest.approx(-sum(x * math.log(x) for x in p)) and count == 8


# ---- the grid and its law ----


def grid(exponent=0.5, noise=0.0, budgets=(1e10, 1e11, 1e12)):
    draw = np.random.default_rng(1)
    points = []
    for budget in budgets:
        best = 0.3 * budget**exponent
        for factor in (0.2, 0.4, 0.8, 1.5, 3.0, 6.0):
            loss = 10 * budget**-0.06 + 0.06 * math.log(factor) ** 2 + draw.normal(0, noise)
            points.append({"budget_flops": budget, "params": best * factor, "val_loss": loss})
    return points


def test_a_law_without_noise_is_found_again_and_its_range_is_a_point():
    points = grid(exponent=0.5)
    optima = [isoflop.parabola(rows) for rows in isoflop.by_budget(points).values()]
    law = isoflop.power_law(optima)
    assert law.exponent == pytest.approx(0.5, abs=1e-9) and law.loss_exponent == pytest.approx(-0.06, abs=1e-9)
    assert law.at(1e13) == pytest.approx((0.3 * 1e13**0.5, 10 * 1e13**-0.06))
    low, high = isoflop.spread(points, draws=20)["exponent"]
    assert low == pytest.approx(high, abs=1e-6) and low == pytest.approx(0.5, abs=1e-6)


def small_corpus():
    draw = random.Random(0)
    return Corpus.from_text("small", "".join(draw.choice("abcdefgh \n") for _ in range(6000)))


def test_every_point_costs_its_budget_by_the_exact_count():
    for budget, widths in GRID.items():
        for width in widths:
            options = isoflop.Point(budget, width).options(65)
            per_token = flops_per_token(GPTConfig(65, isoflop.BLOCK, isoflop.LAYERS, isoflop.HEADS, width))
            flops = options.train.steps * isoflop.GLOBAL_BATCH * isoflop.BLOCK * per_token
            assert flops == pytest.approx(budget, rel=0.01)


def trained_on(ranks, strategy="ddp"):
    return isoflop.train_point(isoflop.Point(3e8, 8), small_corpus(), ranks, strategy, sample=20)


@pytest.mark.full
def test_a_point_is_the_same_on_one_rank_and_two_under_each_strategy(pool):
    (alone,) = pool.run(1, trained_on)
    for strategy in ("ddp", "zero1", "fsdp"):
        one, other = pool.run(2, trained_on, strategy)
        assert {**one, "seconds": 0} == {**other, "seconds": 0}, "all ranks know the same"
        assert len(one["sample"]) == 20 and set(one["sample"]) <= set("abcdefgh \n")
        assert one["val_loss"] == pytest.approx(alone["val_loss"], abs=1e-3), strategy
        same = ("params", "tokens", "steps", "flops")
        assert [one[name] for name in same] == [alone[name] for name in same]


def resumed(ranks, folder):
    from pathlib import Path

    corpus, path = small_corpus(), Path(folder) / "grid.json"
    points = [isoflop.Point(1e8, width) for width in (8, 12)]
    first = run_grid(points[:1], path, corpus, ranks)
    kept = json.loads(path.read_text())["points"][0]
    content = run_grid(points, path, corpus, ranks)
    try:
        run_grid(points, path, Corpus.from_text("other", "ab " * 2000), ranks)
    except ValueError as error:
        return (
            len(first["points"]),
            content["points"][0] == kept,
            [row["width"] for row in content["points"]],
            str(error),
        )


def test_a_grid_goes_on_where_it_stopped_and_refuses_another_corpus(pool, tmp_path):
    ((count, same, widths, said),) = pool.run(1, resumed, str(tmp_path))
    assert (count, same, widths) == (1, True, [8, 12]), "seconds too: the first point was not run again"
    assert "was made with another recipe or corpus; name another file with --to" in said


def test_the_recorded_grid_is_whole_and_each_budget_has_a_valley():
    content = recorded_runs.numbers("12_isoflop.json")
    points = content["points"]
    assert {(p["budget_flops"], p["width"]) for p in points} == {(b, w) for b, ws in GRID.items() for w in ws}
    assert content["recipe"] == RECIPE and "uncommitted" not in content["conditions"]["commit"]
    for rows in isoflop.by_budget(points).values():
        losses = [row["val_loss"] for row in rows]
        assert 0 < losses.index(min(losses)) < len(losses) - 1, "the best size is inside of the grid"
