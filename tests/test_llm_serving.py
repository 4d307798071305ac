"""Lesson 14's own lines: its loop with a cache, draft tokens against the exact distribution, counts of steps."""

import itertools

import pytest
import torch
from definitions import taken_from
from manyhands.checkpoint.export import shipped_model
from manyhands.gpt.sampling import Sampling, uniforms
from manyhands.launch import recorded_runs
from manyhands.lessons.llm_serving import draw_reads_and_published
from manyhands.serve.engine import generate
from test_decoding import chi_square_limit, gpt

LESSON = "14_llm_serving"
NAMES = (
    "kept", "drawn", "to_draw_from", "write", "remember", "attend", "forward", "continued", "write_cached", "judged",
    "chi_square", "limit", "cached", "draft_tokens_of", "speculate", "continuous_steps",
)  # fmt: skip


@pytest.fixture(scope="module")
def ours():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        given = {"device": torch.device("cpu"), "target": gpt(2), "draft": gpt(3)}
        found = taken_from(LESSON, *NAMES, **given)
        vars(found).update(given)
        yield found
    torch.set_num_threads(before)


def test_with_and_without_a_cache_and_by_the_package_the_same_is_written(ours):
    model, prompt, numbers = gpt(), [1, 2, 3, 4], uniforms(4, 30)
    plain = ours.write(model, prompt, numbers, temperature=0.8, top_k=6, top_p=0.9)
    cached, cache = ours.write_cached(model, prompt, numbers, temperature=0.8, top_k=6, top_p=0.9)
    library = generate(model, torch.tensor([prompt]), 30, Sampling(0.8, 6, 0.9), seed=4)[0].tolist()
    assert plain == cached == library
    assert sum(part.nbytes for pair in cache.values() for part in pair) == 2 * 2 * 33 * 16 * 8


def test_the_cache_ends_with_what_was_judged_right(ours):
    cache = {}
    ids = [1, 2, 3, 4, 5, 6]
    ours.cached(ours.target, cache, ids, 0)
    found = ours.cached(ours.target, cache, [1, 2, 3, 9, 8], 3)  # the fourth was wrong
    assert (found - ours.target(torch.tensor([[1, 2, 3, 9, 8]]))[0][0, 3:]).abs().max() < 1e-10


def test_a_twin_drafts_everything_right(ours):
    """Every draft token is kept only if both caches hold the same as if there were none."""
    twins = taken_from(LESSON, *NAMES, device=ours.device, target=ours.target, draft=ours.target)
    for k in (1, 3):
        text, calls, made, held = twins.speculate([1, 2, 3], 29, k, seed=5)
        assert made == held and calls == -(-29 // (k + 1))


@pytest.mark.parametrize("k", [1, 3])
def test_what_is_written_with_draft_tokens_follows_the_large_model(ours, k):
    """The first two tokens after a prompt, against their exact probabilities."""
    first_V = torch.softmax(ours.target(torch.tensor([[1, 2]]))[0][0, -1], -1)
    after = ours.target(torch.tensor([[1, 2, a] for a in range(11)]))[0][:, -1]
    pairs_VV = first_V[:, None] * torch.softmax(after, -1)
    found = [ours.speculate([1, 2], 2, k, seed)[0] for seed in range(400)]
    chi, cells = ours.chi_square([11 * a + b for a, b in found], pairs_VV.flatten())
    assert cells > 4 and chi < chi_square_limit(cells)


def test_of_the_shipped_draft_models_tokens_most_are_kept_and_calls_of_the_large_one_saved():
    """Of the 160 that an untrained draft model makes here, 5 are kept."""
    models = {"target": shipped_model("plays")[0].double(), "draft": shipped_model("plays-draft")[0].double()}
    with torch.no_grad():
        shipped = taken_from(LESSON, *NAMES, device=torch.device("cpu"), **models)
        text, calls, made, held = shipped.speculate([0], 60, 3, seed=1)
    assert len(text) == 60 and held > made / 2 and calls < 40


def test_calls_draft_tokens_and_tokens_add_up(ours):
    for k in (1, 4):
        text, calls, made, held = ours.speculate([1, 2], 30, k, seed=1)
        assert len(text) == 30 == calls + held and calls >= 30 / (k + 1) and held <= made <= k * calls


def test_the_chi_square_tells_p_from_something_near_it(ours):
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    q = torch.tensor([0.45, 0.33, 0.17, 0.05], dtype=torch.float64)
    for dice, follows in ((p, True), (q, False)):
        found, cells = ours.chi_square([ours.drawn(dice, u) for u in uniforms(1, 4000)], p)
        assert (found < ours.limit(cells)) == follows


def test_fewer_kv_heads_let_more_users_in_and_a_full_server_reads_mostly_caches():
    """Llama 2 7B and Llama 3 8B on 80 GB, with 4,096 positions each; DeepSeek-V3's MLA."""
    given = {"BANDWIDTH": 3.35e12, "PEAK": 989e12}
    of_lesson = taken_from(LESSON, "cache_bytes", "call_s", **given)
    for P, kv_heads, fit, ms in ((6.74e9, 32, 30, 23), (8.03e9, 8, 119, 24)):
        each = of_lesson.cache_bytes(32, 32, kv_heads, 128, 4096)
        users = int((80e9 - 2 * P) // each)
        assert users == fit and users * each > 3.9 * 2 * P
        step_s = of_lesson.call_s(P, users, users * each)
        assert round(1e3 * step_s) == ms and 2 * P * users / 989e12 < 0.1 * step_s
    assert round(2 * 128 * 128 / (512 + 64)) == 57


def test_the_figure_ends_each_curve_at_the_users_that_fit_and_draws_the_published_latencies():
    published = recorded_runs.published("14_serving")
    left, right = draw_reads_and_published({"a": (10, 1, 30), "b": (16, 0.5, 119)}, published, "reads").axes
    ends = [line.get_xydata()[-1].tolist() for line in left.lines]
    assert [30, 40] in ends and [119, 75.5] in ends
    assert [list(line.get_ydata()) for line in right.lines] == [[y for _, y in one["points"]] for one in published[:2]]


def test_no_order_of_texts_takes_fewer_steps_than_its_tokens_need_or_more_than_static(ours):
    for lengths in itertools.permutations([8, 5, 2, 2, 1, 1]):
        static = sum(max(lengths[i : i + 2]) for i in range(0, 6, 2))
        assert max(8, -(-sum(lengths) // 2)) <= ours.continuous_steps(lengths, 2) <= static
