"""Lesson 13, built by hand: any number of ranks learns the same; a sharded reference; the promised numbers.

What is tested is the lesson's own code, taken from its script, in float64.
"""

import json
import re

import pytest
import torch
import torch.distributed as dist
from alignment_runs import TEXT
from definitions import taken_from
from manyhands.align.chat import END, LetterTask, with_markers
from manyhands.align.dpo import dpo_losses, margins
from manyhands.align.grpo import group_advantages, grpo_terms
from manyhands.checkpoint.export import shipped_model, tokenizer_of
from manyhands.data.corpus import Corpus
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.lessons.llm_alignment import draw_answers_seen

LESSON = "13_llm_alignment"
NAMES = (
    "add_up", "update", "adam", "falling", "loss_mask", "conversations", "gold_words", "imitate", "own", "everyone",
    "log_probs", "sft", "asked", "accuracy", "dpo_loss", "own_share", "whole", "rest_in_shares", "in_shares",
    "pairs_of", "pair_rows", "pair_loss", "dpo", "group_advantages", "clipped", "three_losses", "hand_over", "draw",
    "deliver", "learn", "merged", "reinforce", "without_padding",
)  # fmt: skip
EXACT = 1e-10
VOCAB = with_markers(sorted({*TEXT, *"You are. Speak. sort abcdefghijkl"}))
CONFIG = GPTConfig(vocab_size=len(VOCAB), block_size=64, n_layer=2, n_head=2, n_embd=8)


@torch.no_grad()
def chatty():
    """A model that answers with a few letters and an end: some answers have a reward."""
    torch.manual_seed(5)
    model = GPT(CONFIG).double()
    for token in "abcdefghijkl":
        model.head.bias[VOCAB.index(token)] = 3.0
    model.head.bias[VOCAB.index(END)] = 4.0
    return model


def lesson_on(ranks):
    """The lesson's definitions, on this rank, with the names that they use."""
    here = {
        "rank": ranks.rank, "world_size": ranks.world_size, "device": ranks.device, "config": CONFIG, "vocab": VOCAB,
        "ASSISTANT": VOCAB.index("<|assistant|>"), "STOP": VOCAB.index(END), "corpus": Corpus.from_text("test", TEXT),
        "task": LetterTask("sort", letters=12, length=4), "base": chatty(), "sft_steps": 2, "dpo_steps": 2,
        "rl_steps": 3, "ANSWERS": 24, "GROUP": 8,
    }  # fmt: skip
    n = ranks.world_size
    trainers = list(range((n + 1) // 2))
    drawers = list(range(len(trainers), n)) or [0]
    here |= {"trainers": trainers, "drawers": drawers, "connected": sorted({0, *drawers})}
    here |= {"weights_group": dist.new_group(here["connected"]), "trainers_group": dist.new_group(trainers)}
    here["held_out"] = here["task"].draw(12, [7], held_out=True)
    return taken_from(LESSON, *NAMES, **here)


def all_stages(ranks):
    """The weights after each stage, and what GRPO told."""
    ours, start = lesson_on(ranks), chatty()
    found, curves, right = {"sft": ours.sft(1), "dpo": ours.dpo(start, 1)}, {}, {}
    for k in (0, 1):
        found[f"rl, staleness {k}"], curves[k], right[k] = ours.reinforce(
            start, 1, LetterTask("sort").in_order, staleness=k
        )
    return {
        "weights": {stage: [p.detach() for p in model.parameters()] for stage, model in found.items()},
        "curve": {k: [(reward, sorted(ratios.tolist()), kl) for reward, ratios, kl in of] for k, of in curves.items()},
        "right": right,
    }


@pytest.fixture(scope="module")
def alone(pool):
    return pool.run(1, all_stages)[0]


@pytest.mark.parametrize("n", [2, 4])
def test_each_stage_of_the_lesson_learns_the_same_on_any_number_of_ranks(pool, alone, n):
    assert any(reward > 0 for reward, *_ in alone["curve"][0]), "something is rewarded"
    for rank, seen in enumerate(pool.run(n, all_stages)):
        for stage, weights in alone["weights"].items():
            apart = max((a - b).abs().max().item() for a, b in zip(weights, seen["weights"][stage], strict=True))
            assert apart < 1e-9, f"{stage}, rank {rank}: {apart}"  # AdamW divides by roots of small numbers
        assert seen["right"] == alone["right"]
        for k, curve in alone["curve"].items():
            for (reward, ratios, kl), (theirs, their_ratios, their_kl) in zip(curve, seen["curve"][k], strict=True):
                assert (theirs, their_kl) == pytest.approx((reward, kl), abs=1e-9)
                assert their_ratios == pytest.approx(ratios, abs=1e-9)


def test_fresh_answers_have_the_ratio_1_and_stale_ones_have_not_once_a_step_has_been_made(alone):
    fresh, stale = ([ratios for _, ratios, _ in alone["curve"][k]] for k in (0, 1))
    assert all(ratios == pytest.approx([1.0] * len(ratios), abs=EXACT) for ratios in fresh)
    assert stale[0] == pytest.approx([1.0] * len(stale[0]), abs=EXACT), "no step has been made when these are drawn"
    assert max(abs(ratio - 1) for ratio in stale[1]) > 1e-4


def losses(ranks):
    """The lesson's losses and the package's on the same rows; and the reference before and after it reads."""
    ours, start = lesson_on(ranks), chatty()
    reference, held = ours.in_shares(start)
    at_rest = sum(p.numel() for p in reference.parameters())
    words = LetterTask("sort").draw(8, [3], False)
    pairs = ours.pair_rows([(word, "lkab") for word in words])
    other = chatty()
    with torch.no_grad():
        for p in other.parameters():
            p += 0.01 * torch.sin(torch.arange(p.numel(), dtype=p.dtype)).view_as(p)
    dpo = ours.pair_loss(other, reference, pairs, 8)
    ids = pairs[:, 1]
    rewards = torch.tensor([0.0, 1, 0, 1, 1, 0, 0, 0], dtype=torch.float64)
    mask = ours.loss_mask(ids, VOCAB.index("<|assistant|>"), VOCAB.index(END))
    log_p, old = ours.log_probs(other, ids), ours.log_probs(start, ids).detach()
    above = ours.group_advantages(rewards, 8)
    rl = ours.three_losses(ours.clipped(log_p, old, above), mask, 8, mask.sum(), 6)[1]
    both = ours.log_probs(other, pairs.flatten(0, 1)), ours.log_probs(start, pairs.flatten(0, 1))
    mask_2 = ours.loss_mask(pairs.flatten(0, 1), VOCAB.index("<|assistant|>"), VOCAB.index(END))
    sums = [(part * mask_2).sum(-1).view(-1, 2) for part in both]
    wanted_dpo = dpo_losses(margins(*sums[0].unbind(1), *sums[1].unbind(1)), 1.0).mean()
    terms = grpo_terms(log_p, old, group_advantages(rewards, 8))
    return {
        "dpo": (dpo - wanted_dpo).abs().item(),
        "rl": (rl - (terms * mask).sum() / mask.sum()).abs().item(),
        "held": held,
        "at rest": at_rest,
        "after": sum(p.numel() for p in reference.parameters()),
    }


@pytest.mark.parametrize("n", [1, 4])
def test_the_lessons_losses_are_the_packages_and_its_reference_rests_in_shares(pool, n):
    P = CONFIG.num_params()
    units = CONFIG.n_layer + 4
    for seen in pool.run(n, losses):
        assert seen["dpo"] < EXACT and seen["rl"] < EXACT
        assert seen["at rest"] == seen["after"] == 0, "whole only while it reads"
        assert P / n <= seen["held"] <= P / n + units


def test_room_for_markers_changes_no_logit_of_the_shipped_model_and_gives_them_the_mean_row():
    draft, about = shipped_model("plays-draft")
    larger = taken_from(LESSON, "with_room", device=torch.device("cpu")).with_room(draft, 69).eval()
    ids = tokenizer_of(about).encode("ROMEO:\nMy ")[None]
    with torch.no_grad():
        before, after = draft(ids)[0], larger(ids)[0]
    torch.testing.assert_close(after[..., :65], before)
    torch.testing.assert_close(after[..., 65:], before.mean(-1, keepdim=True).expand(-1, -1, 4), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(larger.tokens.weight[68], draft.tokens.weight.mean(0))
    assert with_markers(tokenizer_of(about).vocab)[:65] == tokenizer_of(about).vocab


def test_the_stored_run_keeps_the_lessons_promises(root):
    """GRPO beats its control, gold answers beat GRPO, stale answers have other ratios, and a reward is hacked."""
    cells = json.loads((root / "notebooks" / f"{LESSON}.ipynb").read_text())["cells"]
    told = "".join(
        "".join(part.get("text", part.get("data", {}).get("text/plain", "")))
        for cell in cells if cell["cell_type"] == "code" for part in cell["outputs"]
    )  # fmt: skip
    if not told:
        pytest.skip("the notebook has no stored outputs")
    found = re.findall(r"\| ([\w ]+?) +([\d.]+)% to +([\d.]+)%; \d+ gold", told)
    shares = {stage: (float(least), float(most)) for stage, least, most in found}
    assert shares["SFT"][0] > 100 / 24 and sum(shares["SFT"]) < sum(shares["more SFT"]) < sum(shares["GRPO"])
    assert shares["GRPO"][0] >= 90 and sum(shares["GRPO"]) < sum(shares["gold for all"])
    pages = "".join(
        "".join(part.get("data", {}).get("text/html", ""))
        for cell in cells if cell["cell_type"] == "code" for part in cell["outputs"]
    )  # fmt: skip
    outside = {int(k): float(part) for k, part in re.findall(r"staleness (\d): +([\d.]+) % outside", pages)}
    assert outside[0] == 0 < outside[1] < outside[4]
    beta_1, beta_01, imitated = map(float, re.search(
        r"beta 1: ([\d.]+)%.*?beta 0.1: ([\d.]+)%.*?pairs: ([\d.]+)%", told, re.S
    ).groups())  # fmt: skip
    assert beta_01 < beta_1 < imitated
    hacked = re.search(r"letters that ascend: reward ([\d.]+) to ([\d.]+),[^%]*accuracy (\d+)% to (\d+)%", told)
    before, reward, right, still_right = map(float, hacked.groups())
    assert reward > max(before, 0.9) and still_right < right / 4


def test_the_plot_of_answers_seen_has_a_bar_at_the_mean_and_a_point_for_each_seed_over_the_line_of_chance():
    (axes,) = draw_answers_seen({"base": [0.0], "SFT": [0.4, 0.6]}, {"base": (0, 0), "SFT": (80, 3200)}, 1 / 24).axes
    assert [bar.get_height() for bar in axes.patches] == [0, pytest.approx(50)]
    points = [list(line.get_ydata()) for line in axes.lines if line.get_marker() == "o"]
    assert points == [[0.0], [40.0, 60.0]] and axes.lines[-1].get_ydata()[0] == pytest.approx(100 / 24)
    assert "3,200 seen" in axes.get_xticklabels()[1].get_text()
