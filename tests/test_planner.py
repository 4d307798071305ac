"""The planner: bytes and messages are those of the course's formulas and of real ranks; honest refusals."""

import dataclasses
import itertools

import pytest
import torch
from manyhands.config.layout import resolve_layout
from manyhands.config.options import PRESETS
from manyhands.gpt.config import GPTConfig
from manyhands.predict.layouts import SCHEDULES, Question, families
from manyhands.predict.machines import LINK_SHARE, MACHINES, Group, listed_peak, machine_from_file, machine_named
from manyhands.predict.memory import bytes_per_rank
from manyhands.predict.models import OTHERS, PlannedModel, flops_per_token, preset_model
from manyhands.predict.pipeline_schedules import bubble_formula, held_at_once, in_flight, orders_of, simulate
from manyhands.predict.planner import plan, weakest_assumption
from manyhands.predict.step_time import Assumptions, planned_work, step_time

ODD = PlannedModel(vocab_size=65, block_size=12, n_layer=5, n_head=6, n_embd=42)  # splits where it must
TINY = PlannedModel(vocab_size=65, block_size=8, n_layer=4, n_head=2, n_embd=16)
H100 = machine_named("h100")


def config_of(model):
    return GPTConfig(**{f.name: getattr(model, f.name) for f in dataclasses.fields(GPTConfig)})


def candidates(model, gpus, batch=24, machine=H100, **kwargs):
    question = Question(model, machine, gpus, batch)
    return [c for family in families(question, **kwargs) for c in family.variants]


def one(model, gpus, name, batch=24, machine=H100, **kwargs):
    """The candidate of that name with the smallest micro-batch."""
    return next(c for c in candidates(model, gpus, batch, machine, **kwargs) if str(c) == name)


def most_whole_gradients(ranks, config, options):
    """Runs a step; the bytes of gradients that are whole at once behind a backward of a unit of FSDP."""
    from manyhands.data.corpus import get_batch
    from manyhands.parallel.strategy import parallelize
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    parallel = parallelize(config, resolve_layout(options, config, ranks.world_size, 2), options, ranks)
    ids, batch = torch.arange(500) % 65, options.train.global_batch
    share = get_batch(ids, 0, batch, config.block_size, parallel.data_rank, parallel.data_size, 1)
    modules = [m for part in parallel.modules for m in part.modules() if isinstance(m, FSDPModule)]
    groups = [group for m in modules if (group := m._get_fsdp_state()._fsdp_param_group)]
    most, real = [0], FSDPParamGroup.post_backward

    def watched(self, *args, **kwargs):
        result = real(self, *args, **kwargs)
        gradients = [p.unsharded_accumulated_grad for group in groups for p in group.fsdp_params]
        gradients += [
            p._unsharded_param.grad for group in groups for p in group.fsdp_params
            if hasattr(p, "_unsharded_param") and p.unsharded_accumulated_grad is None
        ]  # fmt: skip
        most[0] = max(most[0], sum(g.numel() * g.element_size() for g in gradients if g is not None))
        return result

    FSDPParamGroup.post_backward = watched
    try:
        parallel.forward_backward(*share)
    finally:
        FSDPParamGroup.post_backward = real
    return most[0]


def test_fsdp_really_adds_up_whole_gradients_between_micro_batches(pool):
    several = one(TINY, 2, "zero3 2", 8, checkpointing=("none",), most_micro_batch=1)
    planned = bytes_per_rank(TINY, several.layout, several.options)
    measured = pool.run(2, most_whole_gradients, config_of(TINY), several.options, timeout_s=120)
    assert several.layout.micro_batches == 4
    assert planned.accumulated_gradients == 4 * TINY.num_params() == max(measured)
    at_once = [c for c in candidates(TINY, 2, 8) if str(c) == "zero3 2" and c.layout.micro_batches == 1]
    assert bytes_per_rank(TINY, at_once[0].layout, at_once[0].options).accumulated_gradients == 0


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_the_parameters_and_operations_that_the_trainer_counts(preset):
    model = preset_model(preset)
    assert model.num_params() == config_of(model).num_params()
    assert model.flops_per_token() == flops_per_token(config_of(model))


def test_a_ring_sends_its_factor_and_crosses_nodes_once_per_node():
    inside, spread = Group(H100, 8), Group(H100, 64, 1)
    assert inside.sent("all_reduce", 8e9).inside == 14e9 and inside.sent("all_reduce", 8e9).between == 0
    sent = spread.sent("all_gather", 64e9)
    assert sent.inside + sent.between == pytest.approx(63e9) and sent.between == pytest.approx(63e9 / 8)
    assert (Group(H100, 16, 8).on_a_node, Group(H100, 16, 8).nodes) == (1, 16)
    # one rank per node has one card; eight of them together have the node's eight, and no more than NVLink
    assert Group(H100, 16, 8).bytes_per_s == pytest.approx(50e9 * LINK_SHARE)
    assert spread.bytes_per_s == pytest.approx(400e9 * LINK_SHARE)
    assert Group(H100, 1).seconds("all_reduce", 1e9) == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bubble_is_that_of_the_schedules_formula(schedule):
    model = PlannedModel(1024, 2048, 16, 16, 2048)
    found = (c for c in candidates(model, 4, 32) if str(c) == "pipeline 4")
    candidate = next(c for c in found if c.options.parallel.schedule == schedule)
    work = planned_work(model, candidate.layout, candidate.options)
    time = step_time(dataclasses.replace(work, head_flops=0.0, around_bytes=0.0, cast_bytes=0.0), H100)
    p, m, v = 4, candidate.layout.micro_batches, candidate.layout.stages_per_rank
    busy = time.compute_s + time.memory_s + time.pipeline_s + time.launch_s
    assert time.bubble_s / (time.bubble_s + busy) == pytest.approx(float(bubble_formula(schedule, p, m, v)))


@pytest.mark.parametrize("n_layer", [16, 19])
@pytest.mark.parametrize("schedule, v", SCHEDULES.items())
def test_layers_in_flight_are_those_of_the_simulated_schedule(schedule, v, n_layer):
    for p, rounds in itertools.product((2, 3, 4, 8), (1, 2, 5, 7)):
        m = p * rounds
        slots = sorted(simulate(orders_of(schedule, p, m, v)).slots, key=lambda slot: slot.start)
        of_stage = [n_layer // (p * v) + (s < n_layer % (p * v)) for s in range(p * v)]
        most = []
        for rank in range(p):
            actions = [slot.action for slot in slots if slot.rank == rank]
            held = itertools.accumulate({"F": 1, "I": 0}.get(kind, -1) * of_stage[stage] for kind, stage, _ in actions)
            most.append(max(held))
        first, last = held_at_once(schedule, n_layer, p, m, v)
        assert (first[0], last[0]) == (most[0], most[-1]) and max(most) == first[0], (p, m)
        heads = in_flight([a for a in orders_of(schedule, p, m, v)[-1] if a.stage == p * v - 1])
        assert (first[1], last[1]) == (0, heads), (p, m)


def test_the_fastest_plan_of_each_schedule_is_told_of_the_first_pipeline():
    assert plan(Question(preset_model("gpt2-xl"), H100, 1, 64)).schedules == (), "one GPU has no pipeline"
    model = preset_model("gpt-1b")
    told = {one.options.parallel.schedule: one for one in plan(Question(model, H100, 4, 64)).schedules}
    assert set(told) == set(SCHEDULES) and len({one.name for one in told.values()}) == 1
    with pytest.raises(ValueError, match="schedule='ZBV' is not planned; use one of 1F1B, GPipe"):
        Question(model, H100, 4, 64, schedule="ZBV")


def test_offload_sends_fp32_weights_up_twice_per_micro_batch_and_gradients_down_once():
    model = preset_model("gpt-7b")
    candidate = one(model, 8, "offload 8", 64)
    work = planned_work(model, candidate.layout, candidate.options)
    time = step_time(work, H100)
    share = model.num_params() / 8 * 4
    copied = next(m for m in time.messages if m.axis == "host")
    assert candidate.layout.micro_batches == 8
    assert time.sent().host == copied.payload_bytes == pytest.approx(share * (2 * 8 + 1), rel=1e-4), "padding included"
    fast = dataclasses.replace(H100, host_bytes_per_s=2 * H100.host_bytes_per_s)
    assert step_time(work, fast).host_s == pytest.approx(time.host_s / 2)


@pytest.mark.parametrize("field", ["inside_bytes_per_s", "between_bytes_per_s", "memory_bytes_per_s", "peak_flops"])
def test_a_faster_machine_never_makes_a_plan_slower(field):
    model = preset_model("gpt2-xl")
    faster = dataclasses.replace(H100, **{field: 2 * getattr(H100, field)})
    slower_here = 0
    for candidate in candidates(model, 32, 512):
        work = planned_work(model, candidate.layout, candidate.options)
        before, after = (step_time(work, machine).total_s for machine in (H100, faster))
        assert after <= before * (1 + 1e-12), candidate
        slower_here += after < before
    assert slower_here > 0, "it makes some faster"


def test_what_overlaps_is_hidden_and_what_does_not_is_not():
    model = preset_model("gpt-7b")
    slow = dataclasses.replace(H100, between_bytes_per_s=1e9, inside_bytes_per_s=1e9)
    candidate = one(model, 16, "zero3 16", 512)
    work = planned_work(model, candidate.layout, candidate.options)
    quick, late = step_time(work, H100), step_time(work, slow)
    sent = sum(m.payload_bytes for m in late.messages) * 15 / 16 / (1e9 * LINK_SHARE)
    assert late.data_s > 0.5 * sent
    # what is hidden takes its share of the GPU
    free = step_time(work, H100, Assumptions(taken=0.0))
    hidden_s = sum(m.payload_bytes for m in quick.messages) * 15 / 16 / Group(H100, 16).bytes_per_s
    assert free.data_s < 0.05 * free.total_s
    assert quick.data_s - free.data_s == pytest.approx(hidden_s * 0.15 / 0.85, rel=0.1)


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "name", "words"),
    [
        (preset_model("gpt2-xl"), 8, 512, "zero3 4 x tensor 2", "model.n_head=25 does not split over 2 tensor ranks"),
        (TINY, 8, 64, "pipeline 8", "8 stages (8 ranks x 1) are more than model.n_layer=4"),
        (dataclasses.replace(preset_model("llama3-8b"), n_head=24, n_embd=3072, n_kv_head=6), 8, 8,
         "zero3 2 x tensor 4", "model.n_kv_head=6 does not split over 4 tensor ranks; use 1, 2, 3, 6, 12 or 24"),
        (TINY, 4, 6, "pipeline 4", "not fill"),
    ],
)  # fmt: skip
def test_refusals_name_the_numbers(model, gpus, batch, name, words):
    assert words in dict(plan(Question(model, H100, gpus, batch)).refused)[name]


@pytest.fixture(scope="module")
def shared():
    """(question, plan) of a model that is shared over nodes with fast links."""
    question = Question(preset_model("gpt-7b"), H100, 64, 512)
    return question, plan(question)


def test_slow_links_between_nodes_move_the_plan_to_less_traffic_between_nodes(shared):
    question, before = shared
    assert before.best.sharing in ("zero2", "zero3") and before.best.layout.tensor == 1
    after = plan(dataclasses.replace(question, machine=dataclasses.replace(H100, between_bytes_per_s=0.2e9)))
    unchanged = next(p for p in after.ranked if p.name == before.best.name)
    assert after.best.time.sent().between < unchanged.time.sent().between
    assert after.best.step_s < unchanged.step_s


def test_the_weakest_assumption_is_the_one_that_costs_most(shared):
    question, found = shared
    sentence, seconds = weakest_assumption(question, found.best)
    assert (
        sentence.startswith("matrix products reach 77% of a GPU's best product") and seconds > 1.2 * found.best.step_s
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_kv_head": 4, "style": "llama"}, "n_head=6 does not split over n_kv_head=4"),
        ({"n_layer": 0}, "n_layer=0 is too small"),
        ({"style": "moe"}, "style='moe' is unknown"),
        ({"capacity": 1.0}, "capacity factor 1 without experts"),
    ],
)
def test_sizes_that_make_no_model_are_refused_with_the_numbers(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(ODD, **changes)


def test_models_of_the_table_have_the_parameters_that_their_authors_state():
    billions = {"llama3-70b": 70.55, "llama3-405b": 405.85, "mixtral-8x7b": 46.70, "olmo2-7b": 7.30,
                "olmo2-13b": 13.72}  # fmt: skip
    found = {name: round(model.num_params() / 1e9, 2) for name, model in OTHERS.items()}
    assert billions.items() <= found.items()
    # by near sizes
    assert found["nemotron-4-340b"] == pytest.approx(341, rel=0.01)
    assert found["deepseek-v3"] == pytest.approx(671, rel=0.06)


def test_every_machine_names_sources_and_a_site_that_there_is():
    from manyhands.jobs.stamp import sites

    for machine in MACHINES.values():
        assert machine.sources and all(source.startswith("https://") for source in machine.sources)
        assert machine.site in sites()
    devices = {"a100-80": ("A100-SXM4-80GB", 108), "h100": ("NVIDIA H100 80GB HBM3", 132), "h200": ("NVIDIA H200", 132)}
    devices |= {"mi250x": ("AMD Instinct MI250X", 110), "pvc": ("Intel(R) Data Center GPU Max 1550", 448)}
    for name, device in devices.items():
        assert MACHINES[name].peak_flops == listed_peak(*device, "bf16"), name


def test_a_machine_comes_from_a_file_over_one_of_the_table(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text('base = "h100"\nbetween_bytes_per_s = 12.5e9\n')
    expected = dataclasses.replace(H100, name="mine", between_bytes_per_s=12.5e9, sources=(str(mine),))
    assert machine_from_file(mine) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('base = "h100"\nbetween = 3', "mine.toml: between: unexpected keyword argument; a machine has name,"),
        ('base = "h100"\ngpus_per_node = 0', "gpus_per_node=0; use a number above 0"),
        ("= 3", "cannot be read"),
    ],
)
def test_a_file_that_describes_no_machine_is_refused(tmp_path, text, words):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ValueError, match=words):
        machine_from_file(tmp_path / "mine.toml")
