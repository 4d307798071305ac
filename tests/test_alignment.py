"""Alignment: the template, the mask, DPO and GRPO by hand, and the same learning on any number of ranks."""

import math
import re
import shutil
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import pytest
import torch
from alignment_runs import ALPHABET, BASE, OF_LLAMA, VOCAB, base, begin, carry_out, chatty, first_gradients, wanted_of
from manyhands.align.chat import END, LetterTask, encode, is_held_out, render, with_markers
from manyhands.align.dpo import dpo_losses, margins
from manyhands.align.grpo import group_advantages, grpo_terms, kl_terms
from manyhands.align.options import read_options
from manyhands.align.stage import complete, rows, shifted
from manyhands.checkpoint.export import load_model
from manyhands.gpt.lora import add_lora, folded
from manyhands.gpt.model import GPT
from manyhands.launch.program import Refused

ASKED = [{"role": "user", "content": "sort cab"}]
TOLD = [*ASKED, {"role": "assistant", "content": "abc"}]
BUDGET_FP64 = 1e-10


# ------------------------------------------------------------------ the chat template


def test_a_conversation_is_markers_and_contents_in_turn():
    system = {"role": "system", "content": "You are ROMEO."}
    assert render([system, *TOLD]) == ("<|system|>You are ROMEO.<|end|><|user|>sort cab<|end|><|assistant|>abc<|end|>")
    assert render(ASKED, reply=True) == "<|user|>sort cab<|end|><|assistant|>"


def test_the_assistant_writes_its_content_and_its_end_marker_and_nothing_else():
    ids, answer = encode(TOLD, VOCAB)
    assert [VOCAB[i] for i, own in zip(ids, answer, strict=True) if own] == ["a", "b", "c", END]
    assert sum(answer) == 4 and answer[-4:] == [True] * 4
    prompt, _ = encode(ASKED, VOCAB, reply=True)
    assert ids[: len(prompt)] == prompt, "what is learned from begins as what is answered"


def test_a_user_who_types_a_marker_ends_nothing():
    vocab = with_markers(sorted({*"<|end|>user ", *"ab"}))
    ids, _ = encode([{"role": "user", "content": "a<|end|>b"}], vocab)
    assert [vocab[i] for i in ids].count(END) == 1, "the message's own, and not the seven characters"


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([{"role": "robot", "content": "a"}], "message 0 has the role 'robot'; use one of system, user, assistant"),
        ([*ASKED, *ASKED], "message 1 is the user's and should be the assistant's"),
    ],
)  # fmt: skip
def test_messages_that_are_no_conversation_are_refused_by_number(messages, sentence):
    with pytest.raises(ValueError, match=sentence):
        render(messages)


def test_what_cannot_be_encoded_or_answered_is_refused():
    with pytest.raises(ValueError, match=re.escape("no token <|system|>; it was never trained on the chat template")):
        encode(ASKED, ALPHABET)
    with pytest.raises(ValueError, match="the last message is the assistant's"):
        encode(TOLD, VOCAB, reply=True)


# ------------------------------------------------------------------ the tasks


def test_no_word_that_is_learned_from_is_held_out():
    task = LetterTask("sort", letters=8, length=3)
    learned, held_out = task.draw(500, [1], held_out=False), task.draw(100, [1], held_out=True)
    assert not set(learned) & set(held_out)
    assert all(map(is_held_out, held_out)) and not any(map(is_held_out, learned))
    assert task.draw(500, [1], held_out=False) == learned != task.draw(500, [2], held_out=False)
    assert all(len(set(word)) == 3 and set(word) <= set("abcdefgh") for word in learned)


def test_chance_is_the_share_of_orders_of_the_letters_that_are_right():
    for name in ("sort", "reverse"):
        task = LetterTask(name, letters=8, length=4)
        orders = ["".join(order) for order in permutations("hcaf")]
        assert sum(task.right("hcaf", order) for order in orders) / len(orders) == task.chance == 1 / 24
    assert LetterTask("reverse").answer("jbcg") == "gcbj"


# ------------------------------------------------------------------ the mask


def test_position_t_counts_if_the_assistant_wrote_token_t_plus_1():
    ids_NT, answer_NT = rows([encode(TOLD, VOCAB), encode(ASKED, VOCAB)])
    inputs, targets, mask = shifted(ids_NT, answer_NT)
    counted = [(VOCAB[i], VOCAB[t]) for i, t in zip(inputs[0][mask[0]], targets[0][mask[0]], strict=True)]
    assert counted == [("<|assistant|>", "a"), ("a", "b"), ("b", "c"), ("c", END)]
    assert not mask[1].any(), "a question alone, and padding, teach nothing"


# ------------------------------------------------------------------ DPO and GRPO, golden


def test_dpo_losses_are_the_formulas():
    policy, frozen = torch.tensor([[-3.0, -5.0], [-4.0, -4.0]]), torch.tensor([[-4.0, -4.0], [-4.0, -4.0]])
    margins_b = margins(policy[:, 0], policy[:, 1], frozen[:, 0], frozen[:, 1])
    assert margins_b.tolist() == [2.0, 0.0]
    # -log(1 / (1 + exp(-0.1 * 2))) and ln 2
    assert dpo_losses(margins_b, 0.1).tolist() == pytest.approx([0.5981388693815918, math.log(2)], abs=1e-7)
    assert dpo_losses(torch.tensor([-3.0]), 0.5).item() == pytest.approx(math.log(1 + math.exp(1.5)), abs=1e-6)


def test_an_advantage_is_the_distance_from_the_groups_mean_in_standard_deviations():
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1, 0.5, 0, 0.5, 1], dtype=torch.float64)
    found = group_advantages(rewards, 4)
    # means 1/4, 1, 1/2; standard deviations (n - 1) 1/2, 0, sqrt(1/6)
    high, low = 0.75 / 0.5001, -0.25 / 0.5001
    third = 0.5 / (math.sqrt(1 / 6) + 1e-4)
    expected = [high, low, low, low, 0, 0, 0, 0, 0, -third, 0, third]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    assert group_advantages(rewards, 4, scale=False)[:4].tolist() == [0.75, -0.25, -0.25, -0.25]
    for size in (1, 5):
        with pytest.raises(ValueError, match=f"12 rewards are no groups of {size}"):
            group_advantages(rewards, size)


def test_the_kl_estimate_is_never_negative_and_its_mean_is_the_divergence():
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    terms = kl_terms(p.log(), q.log())
    assert (terms >= 0).all() and kl_terms(p.log(), p.log()).abs().max() < 1e-15
    assert (p * terms).sum().item() == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-12)


def test_with_one_update_per_draw_the_gradient_is_that_of_log_p_times_the_advantage():
    log_p = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.5, -0.5], dtype=torch.float64)
    grpo_terms(log_p, log_p.detach(), advantages).sum().backward()
    assert log_p.grad.tolist() == [[-1.5, -1.5], [0.5, 0.5]]


def test_a_ratio_that_has_gone_far_enough_is_clipped_and_one_that_went_wrong_is_not():
    old = torch.zeros(1, 2, dtype=torch.float64)
    log_p = torch.tensor([[math.log(2), math.log(0.5)]], dtype=torch.float64, requires_grad=True)
    good = grpo_terms(log_p, old, torch.tensor([1.0], dtype=torch.float64))
    assert good.tolist() == [pytest.approx([-1.2, -0.5])]
    bad = grpo_terms(log_p, old, torch.tensor([-1.0], dtype=torch.float64))
    assert bad.tolist() == [pytest.approx([2.0, 0.8])]
    with_kl = grpo_terms(log_p, old, torch.tensor([1.0], dtype=torch.float64), old, kl=0.5)
    assert with_kl[0, 0].item() == pytest.approx(-1.2 + 0.5 * (0.5 + math.log(2) - 1))


# ------------------------------------------------------------------ rollouts


def table_model(p_by_last):
    """`logits` of a model that looks at the last token only: {token: probabilities of the next}."""
    table = torch.tensor([p_by_last[i] for i in range(len(p_by_last))], dtype=torch.float64).log()
    return lambda ids_bT: table[ids_bT]


def test_draws_follow_the_probabilities():
    logits = table_model([[0.5, 0.25, 0.25, 0.0]] * 4)
    uniform = ((torch.arange(1000) + 0.5) / 1000)[:, None].double()
    prompts, lengths = torch.zeros(1000, 1, dtype=torch.long), torch.ones(1000, dtype=torch.long)
    ids, _ = complete(logits, prompts, lengths, 1, end=3, uniform_bn=uniform)
    assert ids[:, 1].bincount(minlength=4).tolist() == [500, 250, 250, 0]
    ids, _ = complete(logits, prompts, lengths, 1, end=3, uniform_bn=uniform, temperature=0.5)
    assert ids[:, 1].bincount(minlength=4).tolist() == pytest.approx([667, 167, 167, 0], abs=1)
    ids, _ = complete(logits, prompts, lengths, 1, end=3, uniform_bn=uniform, vocab_size=2)
    assert ids[:, 1].bincount(minlength=4).tolist() == pytest.approx([667, 333, 0, 0], abs=1)


def test_an_answer_stops_at_its_end_marker_and_prompts_may_differ_in_length():
    step = [[0.0, 1.0, 0, 0], [0, 0, 1.0, 0], [0, 0, 0, 1.0], [1.0, 0, 0, 0]]  # 0 -> 1 -> 2 -> 3 -> 0
    prompts, lengths = torch.tensor([[0, 0], [3, 1]]), torch.tensor([1, 2])
    model, computed = table_model(step), []
    ids, answer = complete(lambda ids_bT: computed.append(len(ids_bT)) or model(ids_bT), prompts, lengths, 4, end=3)
    assert computed == [2, 2, 1, 1], "rows that go on; who has none of them calls all the same, with one"
    assert ids.tolist() == [[0, 1, 2, 3, 0, 0], [3, 1, 2, 3, 0, 0]]
    assert answer.long().tolist() == [[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0]]


# ------------------------------------------------------------------ where a run starts


# the numbers in and out of each matrix of a block, over the width 8
@pytest.mark.parametrize(
    ("config", "ends"),
    [
        (BASE, [(1, 3), (1, 1), (1, 4), (4, 1)]),
        (OF_LLAMA, [(1, 1), (1, 0.5), (1, 0.5), (1, 1), (1, 2.5), (1, 2.5), (2.5, 1)]),
        (replace(OF_LLAMA, tie=True), [(1, 1), (1, 0.5), (1, 0.5), (1, 1), (1, 2.5), (1, 2.5), (2.5, 1)]),
    ],
    ids=["gpt", "llama", "llama, tied"],
)
def test_an_adapter_starts_as_nothing_learns_alone_and_folds_into_its_matrix(config, ends):
    model, ids = base(config), torch.randint(len(ALPHABET), (2, 9))
    before = model(ids)[0].detach()
    frozen = {name: p.clone() for name, p in model.named_parameters()}
    add_lora(model, rank=3, alpha=6.0)
    assert torch.equal(model(ids)[0], before)
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in learning.values()) == 2 * 3 * sum(i + o for i, o in ends) * 8
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        model(ids, ids)[1].backward()
        optimizer.step()
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    plain = GPT(config).double()
    plain.load_state_dict(folded(model.state_dict(), 6.0 / 3))
    assert not torch.allclose(plain(ids)[0], before)
    assert torch.allclose(plain(ids)[0], model(ids)[0], rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="lora.rank=9 does not fit a model of width 8"):
        add_lora(base(), rank=9, alpha=1.0)


# ------------------------------------------------------------------ any number of ranks learns the same

METHODS = ("sft", "dpo", "grpo")
LAYOUTS = {
    "ddp 2": (2, {"all_reduce": "buckets"}, {}),
    "flat 4, accumulating": (4, {"all_reduce": "flat"}, {"micro_batch": 1}),
    "zero1 2": (2, {"strategy": "zero1"}, {}),
    "fsdp 4": (4, {"strategy": "fsdp"}, {}),
    "fsdp 2, accumulating": (2, {"strategy": "fsdp"}, {"micro_batch": 2}),
    "tp 2": (2, {"strategy": "tp"}, {}),
}


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory):
    """{method: what a world of one saw}, made when it is first asked for."""
    made = {}

    def run(method):
        if method not in made:
            made[method] = pool.run(1, carry_out, wanted_of(method), tmp_path_factory.mktemp(method))[0]
        return made[method]

    return run


def assert_same_learning(expected, results):
    assert results[0]["val_losses"] == pytest.approx(expected["val_losses"], abs=BUDGET_FP64)
    assert [line["step"] for line in results[0]["numbers"]] == [line["step"] for line in expected["numbers"]]
    for seen, wanted in zip(results[0]["numbers"], expected["numbers"], strict=True):
        assert seen == pytest.approx(wanted, abs=BUDGET_FP64)
    for rank, result in enumerate(results):
        for name, weight in expected["weights"].items():
            apart = (result["weights"][name] - weight).abs().max().item()
            assert apart <= BUDGET_FP64, f"rank {rank}: {name} is {apart} away"


# each method and each strategy in `make test`; every pair of them in `make test-full`
ALWAYS = [("sft", "tp 2"), ("sft", "ddp 2"), ("dpo", "zero1 2"), ("grpo", "fsdp 2, accumulating")]


@pytest.mark.parametrize(
    ("method", "layout"),
    [pytest.param(*pair, marks=[pytest.mark.full] * (pair not in ALWAYS)) for pair in product(METHODS, LAYOUTS)],
)
def test_any_number_of_ranks_under_any_strategy_learns_the_same(pool, alone, method, layout, tmp_path):
    n, parallel, train = LAYOUTS[layout]
    wanted = wanted_of(method, {"parallel": parallel, "train": train})
    assert_same_learning(alone(method), pool.run(n, carry_out, wanted, tmp_path))


@pytest.mark.parametrize(
    ("method", "layout", "lora"), [("sft", "tp 2", 0), ("dpo", "fsdp 2, accumulating", 2), ("grpo", "ddp 2", 0)]
)
def test_a_llama_learns_from_examples_preferences_and_rewards_on_any_number_of_ranks(
    pool, method, layout, lora, tmp_path
):
    n, parallel, train = LAYOUTS[layout]
    alone = pool.run(1, carry_out, wanted_of(method, {"lora": {"rank": lora}}), tmp_path / "1", OF_LLAMA)[0]
    wanted = wanted_of(method, {"parallel": parallel, "train": train, "lora": {"rank": lora}})
    assert_same_learning(alone, pool.run(n, carry_out, wanted, tmp_path / "2", OF_LLAMA))
    before, weights = chatty(OF_LLAMA).state_dict(), alone["weights"]
    learned = [name for name in weights if name not in before or not torch.equal(weights[name], before[name])]
    assert any(name.endswith(".lora_b" if lora else ".k.weight") for name in learned)
    assert method != "grpo" or any(line["groups_that_teach"] for line in alone["numbers"] if "reward" in line)


def test_the_first_gradients_are_those_of_torch_alone(pool, tmp_path):
    """SFT by hand, on one process: the whole batch's cross-entropy over what the assistant wrote."""
    wanted = wanted_of("sft", {"data": {"speeches": 0.5}})
    seen = pool.run(2, first_gradients, wanted, tmp_path)[0]
    run = pool.run(1, whole_batch, wanted, tmp_path)[0]
    model = chatty()
    targets = torch.where(run["mask"], run["targets"], -100)
    assert (targets != -100).sum(1).unique().numel() > 1, "ranks count different numbers of tokens"
    loss = torch.nn.functional.cross_entropy(model(run["inputs"])[0].flatten(0, 1), targets.flatten())
    loss.backward()
    assert seen.pop("loss").item() == pytest.approx(loss.item(), abs=BUDGET_FP64)
    for name, parameter in model.named_parameters():
        assert (seen[name] - parameter.grad).abs().max() <= BUDGET_FP64, name


def whole_batch(ranks, wanted, outputs):
    run = begin(ranks, wanted, outputs)
    inputs, targets, mask = run.next_batch()
    run.checkpoints.close()
    return {"inputs": inputs, "targets": targets, "mask": mask}


# ------------------------------------------------------------------ the reference


def look_at_reference(ranks, outputs):
    from manyhands.measure.tensor_bytes import tensor_bytes

    run = begin(ranks, wanted_of("dpo"), outputs)
    ids = torch.randint(len(ALPHABET), (2, 9), generator=torch.Generator().manual_seed(ranks.rank))
    apart = (run.stage.reference.logits(ids) - chatty()(ids)[0]).abs().max().item()
    held = tensor_bytes(run.stage.reference.modules[0]).total
    run.checkpoints.close()
    return apart, held / (8 * run.config.num_params())


def test_of_the_reference_each_rank_holds_its_share_and_nothing_else(pool, tmp_path):
    for apart, share in pool.run(4, look_at_reference, tmp_path):
        assert apart <= 1e-12 and 1 / 4 <= share <= 1.1 / 4, "rows that do not split are padded"


# ------------------------------------------------------------------ checkpoints


def cut_to(result, step, folder):
    folder.mkdir()
    name = f"step-{step:08}"
    shutil.copytree(Path(result["checkpoints"]) / name, folder / name)
    return folder


@pytest.mark.parametrize("method", [*(pytest.param(name, marks=pytest.mark.full) for name in ("sft", "dpo")), "grpo"])
def test_a_run_that_was_cut_short_goes_on_to_the_same_bits(pool, method, tmp_path):
    plain = {"train": {"precision": "fp32"}, "optimizer": {"name": "adamw", "lr": 1e-2, "clip": 1.0}}
    keep = {"checkpoint": {"every": 1, "keep": 9}}
    whole = pool.run(2, carry_out, wanted_of(method, plain, keep), tmp_path)
    folder = cut_to(whole[0], 2, tmp_path / "cut")
    resumed = wanted_of(method, plain, {"checkpoint": {"folder": str(folder)}})
    for before, after in zip(whole, pool.run(2, carry_out, resumed, tmp_path), strict=True):
        assert after["first"] == 2
        for name, weight in before["weights"].items():
            assert torch.equal(after["weights"][name], weight), name


def test_a_checkpoint_of_adapters_is_read_as_one_model(pool, tmp_path):
    lora = {"lora": {"rank": 2}, "parallel": {"strategy": "fsdp"}, "checkpoint": {"every": 2, "keep": 9}}
    whole = pool.run(2, carry_out, wanted_of("grpo", lora), tmp_path)[0]
    model, metadata = load_model(whole["checkpoints"], "newest")
    assert metadata["alignment"]["method"] == "grpo" and metadata["corpus"]["alphabet"] == VOCAB
    weights = {name: p.detach() for name, p in model.named_parameters()}
    expected = folded(whole["weights"], 8.0 / 2)
    assert weights.keys() == expected.keys() and not any("lora" in name for name in weights)
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


# ------------------------------------------------------------------ options


def test_a_method_has_defaults_and_flags_win(tmp_path):
    wanted = read_options(["dpo", "--from", "x", "--train.steps", "7", "--dpo.beta", "0.3"])
    assert (wanted.method, wanted.source, wanted.train.steps) == ("dpo", Path("x"), 7)
    assert wanted.dpo.beta == 0.3 and wanted.optimizer.lr == 3e-4
    (tmp_path / "a.toml").write_text("[grpo]\ngroup = 4\n[train]\nsteps = 3\n")
    wanted = read_options(["grpo", "--from", "x", "--config", str(tmp_path / "a.toml"), "--train.steps", "9"])
    assert (wanted.grpo.group, wanted.train.steps) == (4, 9)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("grpo --train.global-batch 20", "train.global_batch=20 answers are no groups of grpo.group=8"),
        ("sft --parallel.strategy pp", "alignment needs whole logits on a rank: not pp"),
        ("sft --parallel.context 2", "parallel.context=2: alignment needs whole sequences on a rank; leave it out"),
        ("dpo --lora.rank 2 --parallel.strategy tp", "lora.rank=2: adapters are not split over tensor ranks"),
        ("sft --data.length 13", "data: words of 13 different letters out of 12"),
        ("dpo --dpo.beta 0", "dpo.beta=0.0 is too small; use at least 1e-06"),
    ],
)
def test_options_that_make_no_run_are_refused_with_the_cure(flags, sentence):
    with pytest.raises(Refused, match=sentence):
        read_options([*flags.split(), "--from", "x"])
