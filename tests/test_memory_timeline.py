"""A memory timeline follows every storage of a step, once, and says what it was for: as the formulas have it."""

import contextlib
import gc
import weakref

import pytest
import torch
from manyhands.gpt.model import GPT, GPTConfig, checkpoint_activations
from manyhands.measure.memory_timeline import KINDS, MemoryTimeline, Sample
from manyhands.measure.tensor_bytes import count_saved
from manyhands.plots.memory_stack import memory_stack, memory_stacks
from manyhands.predict.activation_memory import saved_bytes
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

CONFIG = GPTConfig(vocab_size=65, block_size=32, n_layer=3, n_head=2, n_embd=48)


def batch(config=CONFIG, sequences=4):
    generator = torch.Generator().manual_seed(1)
    shape = (sequences, config.block_size)
    return [torch.randint(config.vocab_size, shape, generator=generator) for _ in range(2)]


def end_of(seen, phase):
    """The last Sample of a phase."""
    return next(sample for sample in reversed(seen.samples) if sample.phase == phase)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), fused=True)


def one_step(model, optimizer, **kwargs):
    """The MemoryTimeline of one step."""
    ids_BT, targets_BT = batch()
    with MemoryTimeline(model, optimizer, **kwargs) as seen:
        with seen.phase("forward"):
            _, loss = model(ids_BT, targets_BT)
        with seen.phase("backward"):
            loss.backward()
        with seen.phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
    return seen


@pytest.fixture(scope="module")
def step():
    """(model, timeline) of a second step, when the optimizer has its state."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    optimizer = adamw(model)
    one_step(model, optimizer)
    return model, one_step(model, optimizer)


def test_parameters_gradients_and_optimizer_have_the_bytes_of_the_formula(step):
    model, seen = step
    P = model.num_params()
    assert {sample.bytes["parameters"] for sample in seen.samples} == {4 * P}
    assert end_of(seen, "forward").bytes["gradients"] == 0
    assert end_of(seen, "backward").bytes["gradients"] == seen.highest("gradients") == 4 * P
    steps = 4 * len(list(model.parameters()))  # AdamW counts its steps, in a number for each parameter
    assert {sample.bytes["optimizer"] for sample in seen.samples} == {8 * P + steps}


def test_activations_at_the_end_of_the_forward_are_what_autograd_has_saved(step):
    model, seen = step
    ids = 2 * 8 * batch()[0].numel()  # saved too, but there before the step
    assert end_of(seen, "forward").bytes["activations"] == count_saved(lambda: model(*batch()), model).bytes - ids
    assert ids < 0.02 * seen.highest("activations")
    assert seen.highest("activations") == end_of(seen, "forward").bytes["activations"]
    assert end_of(seen, "backward").bytes["activations"] == 0


def test_samples_go_through_the_phases_and_leave_what_was_there(step):
    model, seen = step
    phases = list(dict.fromkeys(sample.phase for sample in seen.samples))
    assert phases == ["", "forward", "backward", "optimizer"]
    assert all(set(sample.bytes) == set(KINDS) and min(sample.bytes.values()) >= 0 for sample in seen.samples)
    end = seen.samples[-1].bytes
    assert end["gradients"] == end["activations"] == end["unsharded_parameters"] == end["copies"] == 0
    assert seen.peak == max(seen.samples, key=lambda sample: sample.total)
    assert seen.peak.phase == "backward"  # everything saved, and a result of the moment


def test_the_state_that_the_first_step_makes_belongs_to_the_optimizer():
    model = GPT(CONFIG)
    seen = one_step(model, adamw(model))
    assert end_of(seen, "backward").bytes["optimizer"] == 0
    assert seen.highest("optimizer") == pytest.approx(8 * model.num_params(), rel=0.01)


def test_gradients_are_told_also_without_phases():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters())
    with MemoryTimeline(model, optimizer) as seen:
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen.highest("gradients") == 4 * (64 * 64 + 64)


def test_a_storage_counts_once_however_many_views_and_names_it_has():
    model = GPT(GPTConfig(vocab_size=65, block_size=32, n_layer=1, n_head=2, n_embd=48, tie=True))
    x = torch.ones(1000)
    with MemoryTimeline(model) as seen:
        y = x * 2
        views = [y.view(10, 100), y[5:], y.view(torch.int32), y.detach(), y[None]]
        z = y.add_(1)
    assert seen.samples[-1].bytes["parameters"] == 4 * model.num_params()
    assert seen.samples[-1].bytes["other"] == 4000 + 4000  # x, which was there, and y
    assert len(views) == 5 and z is y


def test_what_ends_is_gone_from_the_next_sample():
    with MemoryTimeline(nn.Linear(1, 1)) as seen:
        for _ in range(3):
            x = torch.zeros(1000)
        del x
        torch.zeros(1)
    assert [sample.bytes["other"] for sample in seen.samples] == [0, 4000, 8000, 8000, 4, 0]


def test_a_timeline_keeps_nothing_alive():
    model = nn.Linear(8, 8)
    gc.disable()
    try:
        with MemoryTimeline(model) as seen:
            with seen.phase("forward"):
                loss = model(torch.ones(4, 8)).relu().sum()
            told = weakref.ref(loss)
            del loss
            assert told() is None
        assert end_of(seen, "forward").bytes["activations"] == 2 * 4 * 4 * 8  # input, and what relu made
        assert seen.samples[-1].bytes["activations"] == seen.samples[-1].bytes["other"] == 0
    finally:
        gc.enable()


def test_recomputed_blocks_keep_their_inputs_alone_and_one_block_at_a_time_in_the_backward():
    results = {}
    for kind in ("none", "block", "selective"):
        torch.manual_seed(0)
        model = GPT(CONFIG)
        checkpoint_activations(model, kind)
        results[kind] = one_step(model, adamw(model))
    forward = {kind: end_of(seen, "forward").bytes["activations"] for kind, seen in results.items()}
    per_block = {kind: forward[kind] / CONFIG.n_layer for kind in forward}
    assert forward["block"] < forward["selective"] < forward["none"]
    assert per_block["block"] > 4 * batch()[0].numel() * CONFIG.n_embd, "the stream"
    # the backward of a block has the activations of that block, and what the others keep
    assert forward["block"] < results["block"].highest("activations") < forward["block"] + per_block["none"]
    assert results["block"].peak.total < results["none"].peak.total
    for kind, seen in results.items():
        # what a recomputed block makes and lets go never counts
        kept = [sample.bytes["activations"] for sample in seen.samples if sample.phase == "forward"]
        assert max(kept) == forward[kind]
        assert end_of(seen, "backward").bytes["activations"] == 0
        assert seen.highest("gradients") == 4 * CONFIG.num_params()


def test_weights_cast_by_autocast_are_copies():
    model = GPT(CONFIG)
    ids_BT, targets_BT = batch()
    with MemoryTimeline(model) as seen, seen.phase("forward"), torch.autocast("cpu", torch.bfloat16):
        model(ids_BT, targets_BT)
    matrices = sum(p.numel() for name, p in model.named_parameters() if "norm" not in name)
    embeddings = (CONFIG.vocab_size + CONFIG.block_size) * CONFIG.n_embd  # looked up, never multiplied
    assert seen.highest("copies") == 2 * (matrices - embeddings)


def test_a_step_computes_the_same_numbers_inside_a_timeline():
    gradients = []
    for kind in ("none", "block", "selective"):
        for inside in (False, True):
            torch.manual_seed(0)
            model = GPT(CONFIG)
            checkpoint_activations(model, kind)
            with MemoryTimeline(model) if inside else contextlib.nullcontext():
                model(*batch())[1].backward()
            gradients.append([p.grad for p in model.parameters()])
    for others in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], others, strict=True))


def test_a_model_of_a_billion_parameters_is_followed_without_its_memory():
    config = GPTConfig(vocab_size=32100, block_size=2048, n_layer=16, n_head=16, n_embd=2048)
    with FakeTensorMode():
        model = GPT(config)
        ids_BT = torch.zeros(1, 2048, dtype=torch.int64)
        with MemoryTimeline(model) as seen:
            with seen.phase("forward"):
                _, loss = model(ids_BT, ids_BT)
            with seen.phase("backward"):
                loss.backward()
    assert config.num_params() > 0.94e9
    assert seen.highest("parameters") == seen.highest("gradients") == 4 * config.num_params()
    assert seen.highest("activations") == pytest.approx(sum(saved_bytes(config, 1).values()), rel=0.02)


def test_an_error_in_the_step_leaves_torch_as_it_was_and_the_samples_so_far():
    original = torch.UntypedStorage.resize_
    model = nn.Linear(8, 8)
    optimizer = adamw(model)
    seen = MemoryTimeline(model, optimizer)
    with pytest.raises(KeyError), seen, seen.phase("forward"):
        assert torch.UntypedStorage.resize_ is not original
        model(torch.ones(8))
        raise KeyError
    assert torch.UntypedStorage.resize_ is original
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert not optimizer._optimizer_step_pre_hooks
    assert end_of(seen, "forward").bytes["parameters"] == 4 * 72


def _sharded(ranks, keep_gathered):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = GPT(CONFIG)
    mesh = init_device_mesh("cpu", (ranks.world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=not keep_gathered)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)
    first = one_step(model, optimizer)
    second = one_step(model, optimizer)
    own = sum(p.to_local().numel() for p in model.parameters())
    block = sum(p.numel() for p in model.blocks[0].parameters())
    return own, block, [[(s.phase, s.bytes) for s in seen.samples] for seen in (first, second)]


@pytest.mark.parametrize("keep_gathered", [False, True])
def test_fully_sharded_weights_are_own_shards_and_unsharded_for_the_moment(pool, keep_gathered):
    P = CONFIG.num_params()
    root = P - 3 * (12 * 48**2 + 10 * 48)
    for own, block, steps in pool.run(2, _sharded, keep_gathered):
        assert own == pytest.approx(P / 2, rel=0.02)
        for samples in steps:
            highest = {kind: max(held[kind] for _, held in samples) for kind in KINDS}
            assert highest["parameters"] == pytest.approx(4 * own, rel=0.02)
            assert highest["gradients"] == pytest.approx(4 * own, rel=0.02)
            assert highest["optimizer"] == pytest.approx(8 * own, rel=0.02)
            # the root stays from its forward on; of the blocks all do, or the one at work alone
            at_end = next(held["unsharded_parameters"] for phase, held in reversed(samples) if phase == "forward")
            assert at_end == pytest.approx(4 * (root + keep_gathered * 3 * block), rel=0.02)
            at_most = 4 * (root + (3 if keep_gathered else 1) * block)
            assert highest["unsharded_parameters"] == pytest.approx(at_most, rel=0.02)
            assert samples[-1][1]["unsharded_parameters"] == 0
            assert samples[0][1]["other"] < 5000  # gloo's own buffers are there when it works, not before


def _summed(ranks):
    whole = torch.ones(2000)
    with MemoryTimeline(nn.Linear(2, 2)) as seen, seen.phase("message"):
        part = torch.zeros(1000)
        work = torch.distributed.reduce_scatter_tensor(part, whole, async_op=True)
        work.wait()
    del work  # gloo's own buffer lived as long
    return part[0].item(), [(s.phase, s.bytes["other"]) for s in seen.samples]


def test_gloos_buffer_of_a_message_was_not_there_before_it(pool):
    for value, samples in pool.run(2, _summed):
        assert value == 2
        assert samples[0] == ("", 8000)  # `whole`, met on the way, was there all the time
        assert ("message", 12_000) in samples
        assert samples[-1][1] == 20_000


def _averaged(ranks, in_buckets):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(GPT(CONFIG), gradient_as_bucket_view=in_buckets)
    seen = one_step(model, adamw(model))
    return seen.highest("gradients"), seen.samples[-1].bytes["other"]


def test_buckets_of_ddp_are_the_gradients_or_come_on_top(pool):
    P = CONFIG.num_params()
    (views, left_by_views), _ = pool.run(2, _averaged, True)
    (apart, left_apart), _ = pool.run(2, _averaged, False)
    assert views == apart == 4 * P
    assert left_apart - left_by_views == 4 * P


def _tensor_parallel(ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = GPT(CONFIG)
    for block in model.blocks:
        split = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block.mlp, init_device_mesh("cpu", (2,)), split)
    own = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
    saved = count_saved(lambda: model(*batch()), model).bytes
    seen = one_step(model, torch.optim.SGD(model.parameters(), momentum=0.9, foreach=False))
    return (own, saved, end_of(seen, "forward").bytes["activations"], {kind: seen.highest(kind) for kind in KINDS})


def test_of_tensors_split_over_ranks_this_ranks_part_counts(pool):
    for own, saved, activations, highest in pool.run(2, _tensor_parallel):
        assert highest["parameters"] == highest["gradients"] == highest["optimizer"] == 4 * own
        assert activations == pytest.approx(saved, rel=0.02)


def _zero1(ranks):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = GPT(CONFIG)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW)
    own = sum(p.numel() for p in optimizer._partition_parameters()[ranks.rank][0]["params"])
    seen = one_step(model, optimizer)
    return own, {kind: seen.highest(kind) for kind in KINDS}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_zero_redundancy_optimizer_has_the_state_of_this_ranks_share(pool):
    P = CONFIG.num_params()
    results = pool.run(2, _zero1)
    assert sum(own for own, _ in results) == P
    for own, highest in results:
        assert highest["optimizer"] == pytest.approx(8 * own, rel=0.02)
        assert highest["parameters"] == highest["gradients"] == 4 * P


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_prediction_is_a_dashed_line_as_high_above_what_lies_under_its_kind():
    samples = [Sample("forward", {"parameters": 1000 * p, "activations": 1000 * a}) for p, a in
               [(4, 0), (4, 2), (4, 6), (4, 6), (4, 1)]]  # fmt: skip
    figure = memory_stack(samples, "t", predicted={"parameters": 4000, "activations": 5000})
    lines = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert [line.get_ydata()[0] for line in lines] == [4.0, 9.0]
    assert "predicted" in legend(figure)
    with pytest.raises(ValueError, match="no kind 'weights' of memory; there are: parameters"):
        memory_stack(samples, "t", predicted={"weights": 1})
    with pytest.raises(ValueError, match="no samples yet"):
        memory_stack([], "t")


def test_predicted_totals_are_dashed_lines_from_the_begin_to_the_end_of_each_phase():
    samples = _phased(("forward", [(4000, 0), (4000, 2000), (4000, 6000)]), ("backward", [(4000, 5000), (4000, 0)]))
    figure = memory_stack(samples, "t", totals={"forward": (4000, 9000), "backward": (9000, 4000)})
    lines = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in lines] == [
        ([0, 2], [4, 9]), ([3, 4], [9, 4]),
    ]  # fmt: skip
    assert "predicted" in legend(figure)


def _phased(*phases):
    """Samples of parameters and activations, from (phase, [(parameters, activations)])."""
    return [Sample(phase, {"parameters": p, "activations": a}) for phase, heights in phases for p, a in heights]


def test_timelines_side_by_side_have_one_scale_and_their_phases_in_the_same_places():
    few = _phased(("forward", [(1e6, 0), (1e6, 2e6)]), ("update", [(1e6, 0)]))
    many = _phased(("", [(9e6, 0)]), ("forward", [(5e5, k * 1e5) for k in range(8)]), ("update", [(5e5, 0)] * 3))
    figure = memory_stacks({"few": few, "many": many})
    assert len({(axes.get_ylim(), axes.get_xlim()) for axes in figure.axes}) == 1
    for axes in figure.axes:
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["forward", "update"]
    assert [axes.get_title() for axes in figure.axes] == ["few\npeak 3.0 MB", "many\npeak 1.2 MB"]
    assert legend(figure) == ["activations", "parameters"], "what is nowhere has no key"


@pytest.mark.parametrize(
    "timelines",
    [{}, {"a": []}, {"a": _phased(("", [(1, 1)]))}, {"a": _phased(("f", [(1, 1)])), "b": _phased(("g", [(1, 1)]))}],
)
def test_timelines_without_phases_or_with_other_ones_are_not_put_side_by_side(timelines):
    with pytest.raises(ValueError, match="need the same phases, one at least"):
        memory_stacks(timelines)
