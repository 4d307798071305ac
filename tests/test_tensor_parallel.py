"""Lesson 07's tensor and sequence parallelism: as one process, forward and backward; collectives; bytes kept.

What is tested is the lesson's own code, taken from its script, in float64. Gradients are vector-Jacobian products of
the logits with a random v, so that nothing hides behind a sum.
"""

import pytest
import torch
import torch.distributed as dist
from definitions import taken_from
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.measure import wire
from manyhands.measure.tensor_bytes import count_saved
from torch import nn

LESSON = "07_tensor_parallel"
NAMES = (
    "Move", "all_reduced", "f", "g", "column_linear", "row_linear", "share", "Column", "Row", "split_blocks",
    "all_gathered", "reduce_scattered", "own_part", "split", "joined", "gathered", "scattered", "split_stream",
    "add_up", "of_own_positions", "furthest", "VocabularyEmbedding", "split_loss", "norms_of", "by_library",
    "ends_of_the_model", "also_in_heads",
)  # fmt: skip
CONFIG = GPTConfig(vocab_size=65, block_size=8, n_layer=2, n_head=4, n_embd=16)
B, T, D = 3, CONFIG.block_size, CONFIG.n_embd


def ours():
    return taken_from(LESSON, *NAMES)


def new_model(dtype=torch.float64):
    torch.manual_seed(3)
    model = GPT(CONFIG).to(dtype)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)  # no bias is zero, no norm's weight is one
    return model


def ids(seed=0):
    return torch.randint(CONFIG.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def v_of(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def passed(model, seed=0):
    """The logits of `model`, after their random v went backward."""
    logits = model(ids(seed))[0]
    logits.backward(v_of(logits.shape))
    return logits.detach()


def subgroups(ranks, t):
    """This rank's group of t neighbours, and its number among them."""
    made = [dist.new_group(range(first, first + t)) for first in range(0, ranks.world_size, t)]
    return made[ranks.rank // t], ranks.rank // t


def differences(ranks, t):
    """{way: largest distance of logits or any gradient from one process's} of groups of t, each with its own data."""
    lesson, found = ours(), {}
    group, seed = subgroups(ranks, t)
    single = new_model()
    wanted = passed(single, seed)
    models = {
        "tensor": lesson.split_blocks(new_model(), group, lesson.f, lesson.g),
        "sequence": lesson.split_stream(new_model(), group),
    }
    for name, model in models.items():
        logits = passed(model, seed)
        if name == "sequence":
            lesson.add_up(lesson.of_own_positions(model), group)
        found[name] = max((logits - wanted).abs().max().item(), lesson.furthest(model, single, group))
    return found


@pytest.mark.parametrize(("n", "t"), [(1, 1), (2, 2), (4, 4), (4, 2)])
def test_logits_and_every_gradient_are_one_processs_in_forward_and_backward(pool, n, t):
    for found in pool.run(n, differences, t):
        assert set(found) == {"tensor", "sequence"}
        assert max(found.values()) < 1e-10, found


def by_torch(ranks):
    from torch.distributed.device_mesh import init_device_mesh

    lesson, single = ours(), new_model()
    wanted = passed(single)
    mesh = init_device_mesh("cpu", (ranks.world_size,))
    model = lesson.by_library(new_model(), mesh)
    return (passed(model) - wanted).abs().max().item(), lesson.furthest(model, single, mesh.get_group())


def test_so_it_is_by_parallelize_module(pool):
    for found in pool.run(2, by_torch):
        assert max(found) < 1e-10


def vocabulary(ranks, V):
    """With a split vocabulary: distance of loss and gradients from one process's, the pieces, what the loss sends."""
    lesson, group = ours(), dist.group.WORLD
    config = GPTConfig(vocab_size=V, block_size=T, n_layer=1, n_head=4, n_embd=D)
    torch.manual_seed(1)
    single, model = GPT(config).double(), GPT(config).double()
    model.load_state_dict(single.state_dict())
    tokens, targets = (ids(seed) % V for seed in (1, 2))
    wanted = single(tokens, targets)[1]
    wanted.backward()
    lesson.split_blocks(model, group, lesson.f, lesson.g)
    model.tokens = lesson.VocabularyEmbedding(model.tokens, group)
    model.head = lesson.Column(model.head, group, lesson.f)
    logits = model(tokens)[0].flatten(0, 1)
    with wire.watch() as seen:
        loss = lesson.split_loss(logits, targets.flatten(), model.tokens.first, group)
    loss.backward()
    apart = max((loss - wanted).abs().item(), lesson.furthest(model, single, group))
    return apart, logits.shape[1], [call.bytes // 8 for call in seen.calls]


@pytest.mark.parametrize(("V", "n", "pieces"), [(65, 2, [33, 32]), (65, 4, [17, 17, 17, 14]), (7, 4, [2, 2, 2, 1])])
def test_an_uneven_vocabulary_has_the_same_loss_and_gradients_for_three_numbers_per_token(pool, V, n, pieces):
    results = pool.run(n, vocabulary, V)
    assert [v for _, v, _ in results] == pieces
    for apart, _, sent in results:
        assert apart < 1e-10
        assert sent == [B * T] * 3


def collectives(ranks):
    """[(op, numbers)] of a step, by way."""
    lesson, group, found = ours(), dist.group.WORLD, {}
    models = {
        "tensor": lesson.split_blocks(new_model(), group, lesson.f, lesson.g),
        "sequence": lesson.split_stream(new_model(), group),
    }
    for name, model in models.items():
        with wire.watch() as seen:
            passed(model)
        found[name] = [(call.op, call.bytes // 8) for call in seen.calls]
    with wire.watch() as seen:
        lesson.add_up(lesson.of_own_positions(models["sequence"]), group)
    found["norms"] = [(call.op, call.bytes // 8) for call in seen.calls]
    return found


def test_a_layer_makes_four_all_reduces_or_their_halves_of_the_same_numbers(pool):
    layers = CONFIG.n_layer
    for found in pool.run(2, collectives):
        assert found["tensor"] == [("all_reduce", B * T * D)] * 4 * layers
        names = [op for op, _ in found["sequence"]]
        assert (names.count("reduce_scatter"), names.count("all_gather")) == (4 * layers, 4 * layers + 2)
        assert len(names) == 8 * layers + 2 and {numbers for _, numbers in found["sequence"]} == {B * T * D}
        # two norms (weight, bias) and two row biases per layer, and the last norm: in one call
        assert found["norms"] == [("all_reduce", layers * 6 * D + 2 * D)]


def shares_of_6_4_2(ranks):
    lesson, group = ours(), dist.group.WORLD
    torch.manual_seed(0)
    full = nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 2)).double()
    model = nn.Sequential(lesson.Column(full[0], group, lesson.f), nn.GELU(), lesson.Row(full[2], group, lesson.g))
    x = v_of((5, 6))
    return sum(p.numel() for p in model.parameters()), (model(x) - full(x)).abs().max().item()


def test_6_4_2_holds_20_numbers_on_each_of_two_ranks_and_11_on_each_of_four(pool):
    for n, numbers in ((1, 38), (2, 20), (4, 11)):
        for held, apart in pool.run(n, shares_of_6_4_2):
            assert held == numbers and apart < 1e-14


def unfinished(ranks):
    """(names whose gradients are not one process's after backward, those that of_own_positions and norms_of name)."""
    lesson, group, single = ours(), dist.group.WORLD, new_model()
    model = lesson.split_stream(new_model(), group)
    passed(single)
    passed(model)
    wrong = set()
    for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        if p.shape == q.shape and (p.grad - q.grad).abs().max() > 1e-6:
            wrong.add(name)
    names = {p: name for name, p in model.named_parameters()}
    lists = [{names[p] for p in which(model)} for which in (lesson.of_own_positions, lesson.norms_of)]
    return wrong, *lists


def test_norms_and_row_biases_are_unfinished_under_sequence_parallelism_and_the_zoos_list_misses_some(pool):
    for wrong, all_of_them, the_zoos in pool.run(2, unfinished):
        assert wrong == all_of_them
        missed = {"norm.weight", "norm.bias"}
        missed |= {f"blocks.{i}.{bias}" for i in range(2) for bias in ("attention.out.bias", "mlp.down.bias")}
        assert wrong - the_zoos == missed


def test_split_and_joined_share_one_gradient_where_all_ranks_do_the_same(pool):
    for apart in pool.run(2, there_and_back):
        assert apart == 0


def there_and_back(ranks):
    lesson, group = ours(), dist.group.WORLD
    x = v_of((2, 4, 3)).requires_grad_()
    y = lesson.joined(lesson.split(x, group), group)
    y.backward(v_of(y.shape))
    return (x.grad - v_of(y.shape)).abs().max().item() + (y - x).abs().max().item()


def kept(ranks):
    """{way: (bytes that autograd keeps, bytes by the lesson's formula)}."""
    from manyhands.predict.activation_memory import WHOLE

    formula = taken_from(LESSON, "kept_by_formula", config=CONFIG, sequences=B).kept_by_formula
    lesson, group, n = ours(), dist.group.WORLD, ranks.world_size
    ways = {
        "one process": (new_model(torch.float32), set(WHOLE), 1),
        "tensor": (lesson.split_blocks(new_model(torch.float32), group, lesson.f, lesson.g), set(WHOLE), n),
        "sequence": (
            lesson.split_stream(new_model(torch.float32), group), set(WHOLE) - {"norms", "final norm"}, n,
        ),
    }  # fmt: skip
    return {
        name: (count_saved(lambda m=model: m(ids(), ids(1)), model).bytes, sum(formula(whole, parts)))
        for name, (model, whole, parts) in ways.items()
    }


def test_what_a_rank_keeps_for_backward_is_what_the_formula_says_and_less_with_sequence_parallelism(pool):
    for found in pool.run(2, kept):
        for name, (measured, formula) in found.items():
            assert measured == pytest.approx(formula, rel=0.01), name
        assert found["one process"][0] > found["tensor"][0] > found["sequence"][0]


def on_the_virtual_network(ranks, *names):
    """Functions of the lesson for a layer on its machines; a small message that takes as long as the lesson's."""
    from manyhands.measure.virtual_network import Link

    small = 2048 * 4096 / (1 << 14)  # of the lesson's stream, so that a message takes as long
    given = {
        "ranks": ranks, "group": dist.group.WORLD, "t": ranks.world_size, "PARTS": (1 / 9, 2 / 9, 4 / 9, 2 / 9),
        "layer_s": 72 * 2048 * 4096**2 / 400e12, "stream": torch.zeros(1 << 14, dtype=torch.bfloat16),
        "INSIDE": Link(2e-6, 450e9 / small), "BETWEEN": Link(4e-6, 50e9 / small),
    }  # fmt: skip
    return taken_from(LESSON, *names, **given)


def virtual_layer(ranks):
    lesson = on_the_virtual_network(ranks, "layer_on", "by_formula")
    return {per_node: (*lesson.layer_on(per_node), lesson.by_formula(per_node)) for per_node in (4, 2, 1)}


def chunked_layer(ranks):
    lesson = on_the_virtual_network(ranks, "chunked_layer", "chunked_by_formula")
    cases = [(chunks, per_node) for per_node in (4, 2) for chunks in (1, 2, 4, 8, 16)]
    return {case: (*lesson.chunked_layer(*case), lesson.chunked_by_formula(*case)) for case in cases}


def test_two_cards_of_a_node_carry_twice_what_one_does(pool):
    for found in pool.run(4, virtual_layer):
        for total, _, formula in found.values():
            assert total == pytest.approx(formula, rel=1e-6)
        latencies_s = 24 * 4e-6
        two, one = (found[per_node][1] - latencies_s for per_node in (2, 1))
        assert found[4][1] < one / 2 == pytest.approx(two)


def test_four_gpus_of_a_fast_domain_are_3_4_times_as_fast_as_one_and_15_percent_is_communication(pool):
    total, communication, _ = pool.run(4, virtual_layer)[0][4]
    assert round(1e3 * total, 2) == 1.82 and round(communication / total, 2) == 0.15
    assert round(72 * 2048 * 4096**2 / 400e12 / total, 1) == 3.4


def test_chunks_hide_communication_up_to_8_of_them_in_a_fast_domain_and_half_of_it_between_two(pool):
    found = pool.run(4, chunked_layer)[0]
    for total, _, formula in found.values():
        assert total == pytest.approx(formula, rel=1e-6)
    exposed = {case: round(1e3 * seconds, 2) for case, (_, seconds, _) in found.items()}
    assert [exposed[chunks, 4] for chunks in (1, 2, 4, 8, 16)] == [0.27, 0.16, 0.10, 0.08, 0.13]
    assert [exposed[chunks, 2] for chunks in (1, 2, 4, 8, 16)] == [1.10, 0.66, 0.49, 0.63, 1.14]


def test_heads_that_do_not_fit_the_ranks_are_refused_with_the_numbers():
    my_heads = taken_from(LESSON, "my_heads").my_heads
    assert [my_heads(8, 2, 4, rank)[1] for rank in range(4)] == [[0], [0], [1], [1]]
    with pytest.raises(ValueError, match="8 heads do not split over 3 tensor ranks"):
        my_heads(8, 2, 3, 0)
    with pytest.raises(ValueError, match="6 KV heads and 4 tensor ranks: one must divide the other"):
        my_heads(12, 6, 4, 0)


def gradients_of_a_first_try_and_of_the_mend(ranks):
    """What rank 0 prints of the MLP with an all-reduce in both directions, and with f and g."""
    given = {"rank": ranks.rank, "group": dist.group.WORLD, "t": ranks.world_size, "device": "cpu"}
    said = []
    lesson = taken_from(LESSON, *NAMES[:4], "first_try", "mended", "held_against_one_process", **given, say=said.append)
    for mlp in (lesson.first_try, lesson.mended):
        lesson.held_against_one_process(mlp)
    return said


def test_the_first_try_has_the_right_output_and_wrong_gradients_and_f_and_g_mend_it(pool):
    lines = [line.split("  ") for line in pool.run(2, gradients_of_a_first_try_and_of_the_mend)[0]]
    tables = [[part.strip() for part in line if part] for line in lines]
    assert tables[1] == ["output", "right", "right"]
    assert tables[2] == ["gradient of x", "✗ wrong", "✗ wrong"]
    assert tables[3] == ["gradient of up", "✗ 2 times", "✗ 2 times"]
    assert tables[4] == ["gradient of down", "✗ 2 times", "✗ 2 times"]
    assert all(line[1:] == ["right", "right"] for line in tables[6:]) and len(tables) == 10
