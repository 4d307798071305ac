"""No sentence of lessons 06 to 10 is false: numbers are recomputed, sources have their place, old words are gone."""

import inspect
import json
import math
import re

import pytest
import torch
from definitions import taken_from
from manyhands.course.folders import ASSETS, ROOT
from manyhands.predict.layouts import Question, families
from manyhands.predict.machines import machine_named
from manyhands.predict.memory import RESERVE, bytes_per_rank
from manyhands.predict.models import preset_model
from manyhands.predict.pipeline_schedules import orders_of
from manyhands.predict.planner import plan, program_for
from manyhands.predict.published_runs import RUNS
from torch.utils.flop_counter import FlopCounterMode

# {words that were untrue: where they stood, and why}
OLD = {
    "8,000 at 50 GB/s": "06: a node has eight cards",
    "8,000 tokens": "06: a node has eight cards",
    "and everything shrinks with n": "06: whole gradients of several micro-batches do not",
    "takes as long as in four, because": "07: two ranks of a node have two cards",
    "Two domains of two cost as much": "07: two ranks of a node have two cards",
    "they hide a third. There": "07: two ranks of a node have two cards",
    "The library frees weights after a forward": "08: torch's pipeline keeps them after most backwards",
    "With one stage per rank torch's interleaved order": "08: nobody interleaves one stage per rank",
    "cured by": "08: no English",
    "I frees nothing": "08: attention's own tensors are freed",
    "Messages overlap with computing": "08: not under plain 1F1B",
    "nothing: the next stage needs the activations": "10: interleaved, the next chunk is there",
    "nothing: the next layer needs the sum": "10: unless products are cut",
    "is 2 - 1/c: **almost half of": "09: only if a kernel skips masked blocks",
    "the ring takes 1.": "09: nothing is timed",
    "Under a causal mask, positions in order take": "09: only if a kernel skips masked blocks",
    "so all ranks have the same work": "09: they need the same number of pairs",
    "Two things matter in torch 2.13": "09: it is a prototype, too",
    "experimental._attention": "09: a stub for old imports",
    "waits two seconds per step": "10: two ranks of a node have two cards",
    "waits longer than it computes": "10: it waits 1,031 of 1,331 ms",
    "Nine times less": "10: 4.5 times",
    "has the speed of the slow link": "10: it has a card for each of its ranks on a node",
    "Which was the fastest: 8, 4 or 2 tensor ranks": "10: 4 and 2 are as fast",
    "four tensor ranks are fastest": "10: 4 and 2 are as fast",
    "the layout that Meta used": "10: Meta's data ranks run FSDP",
}
FILES = [
    path
    for pattern in (
        "scripts/*.py",
        "scripts/manyhands/**/*.py",
        "notebooks/*.ipynb",
        "assets/*.svg",
        "assets/**/*.md",
        "assets/**/*.py",
        "README.md",
    )  # fmt: skip
    for path in sorted(ROOT.glob(pattern))
]


def plain(text):
    """Return the words of a file without marks of comments, line ends and backticks, in lower case."""
    return " ".join(re.sub(r"(?m)^\s*#|\\n\",?|`|\"", " ", text).split()).lower()


def words_of(path):
    text = path.read_text("utf-8")
    if path.suffix != ".ipynb":
        return plain(text)
    cells = json.loads(text)["cells"]
    shown = (output.get("data", {}).get("text/plain", "") for cell in cells for output in cell.get("outputs", []))
    return plain("\n".join("".join(part) for part in (*(cell["source"] for cell in cells), *shown)))


@pytest.fixture(scope="module")
def everywhere():
    return {path.relative_to(ROOT).as_posix(): words_of(path) for path in FILES}


@pytest.mark.parametrize("old", OLD)
def test_no_copy_of_an_untrue_sentence_is_left(everywhere, old):
    assert [name for name, words in everywhere.items() if plain(old) in words] == [], OLD[old]


def test_the_search_sees_lessons_notebooks_outputs_handbooks_figures_cards_and_checks(everywhere):
    assert len(everywhere) > 300
    for name, known in {
        "scripts/06_zero_fsdp.py": "Messages hide behind enough tokens per GPU",
        "notebooks/10_meshes_and_planning.ipynb": "of the slowest of BLOOM's trials: no guess yet",
        "assets/handbook/08_pipeline_parallel.md": "Under plain 1F1B a stage waits for its messages",
        "assets/06_volume.svg": "much of it overlaps with computing",
        "assets/glossary.md": "so all ranks need equally many query-key pairs",
        "scripts/manyhands/checks/pipeline_parallel.py": "an I keeps nearly all: count to W",
    }.items():
        assert plain(known) in everywhere[name]


def said(lesson):
    return (ROOT / "scripts" / f"{lesson}.py").read_text("utf-8").replace("\n# ", " ")


# ------------------------------------------------------------------ gradients of several micro-batches


def test_fsdp_holds_4_bytes_per_parameter_of_whole_gradients_at_any_number_of_ranks_which_is_16_times_64_shards():
    gpt_7b = preset_model("gpt-7b")
    found = [
        (bytes_per_rank(gpt_7b, one.layout, one.options), one.layout.micro_batches)
        for family in families(Question(gpt_7b, machine_named("h100"), 64, 512, context=1))
        if family.name in ("zero2 64", "zero3 64")
        for one in family.variants
    ]
    assert {count > 1 for _, count in found} == {True, False}
    for held, micro_batches in found:
        assert held.accumulated_gradients == (4 * gpt_7b.num_params() if micro_batches > 1 else 0)
        if micro_batches > 1:
            assert held.accumulated_gradients / held.between_steps == pytest.approx(16, rel=0.01)


def test_lesson_10_accounts_for_the_bytes_of_its_table_and_names_the_whole_gradients():
    notebook = (ROOT / "notebooks" / "10_meshes_and_planning.ipynb").read_text("utf-8")
    kinds = r"(\d).*?: +([\d.]+) GB.*?ons +([\d.]+).*?weights +([\d.]+).*?nts +([\d.]+)"
    rows = re.findall(rf"rank 0 \| zero[23] 64, {kinds}", notebook)
    assert len(rows) == 8
    for micro_batch, *sizes in rows:
        total, activations, gathered, whole = map(float, sizes)
        assert whole == (26.9 if int(micro_batch) < 8 else 0.0)
        assert 0 < total - activations - gathered - whole < 0.12 * total, "state at rest and workspace"


# ------------------------------------------------------------------ pipelines


def test_lesson_08_marks_the_actions_that_gather_under_fsdp_and_there_are_9():
    there, marked = False, []
    order = orders_of("1F1B", 4, 8)[0]
    last = order[-1]
    for kind, *_ in order:
        marked.append(kind if there else f"{kind}*")
        there = kind == "B"  # freed after each forward, kept after a backward
    assert last[0] == "B" and "".join(marked).count("*") == 9
    assert " ".join(marked).replace("*", r"\*") in said("08_pipeline_parallel")
    assert [kind for kind, *_ in order] == [*"FFFF", *"BF" * 4, *"BBBB"]
    assert "F F F F, then B F four times, then B B B B" in said("08_pipeline_parallel")


PLACES = {  # {where something is said of others: the places that one can open}
    "scripts/08_pipeline_parallel.py": ["pytorch/torchtitan/blob/90d017c", "arxiv.org/abs/2412.19437"],
    "assets/handbook/08_pipeline_parallel.md": [
        "pytorch/torchtitan/blob/90d017c1308142b7c8e7517d72e05ca49c4f9b13/torchtitan/distributed/fsdp.py",
        "NVIDIA/Megatron-LM/blob/307dcf37f03d44da131ba21999278abe4112d2ad/megatron/training/arguments.py",
    ],
    "scripts/09_context_and_experts.py": [
        "2fc04c6f6101a0f8f5b8d1f7c5d45f592777f59a/torchtitan/distributed/context_parallel.py"
    ],
    "assets/handbook/06_zero_fsdp.md": ["features/dist_optimizer.md", "features/megatron_fsdp.md"],
    "scripts/06_zero_fsdp.py": ["arxiv.org/abs/2407.21783"],
    "scripts/10_meshes_and_planning.py": ["[table 4](https://arxiv.org/abs/2407.21783)"],
}


@pytest.mark.parametrize("file", PLACES)
def test_what_is_said_of_others_has_its_place(file):
    text = (ROOT / file).read_text("utf-8")
    assert [place for place in PLACES[file] if place not in text] == []


# ------------------------------------------------------------------ attention on several ranks


def test_the_lessons_own_scores_compute_all_pairs_also_of_a_block_that_the_mask_hides():
    scores = taken_from("09_context_and_experts", "scores").scores
    q, first, second = torch.ones(1, 2, 8, 4), torch.arange(8), torch.arange(8, 16)
    flops = []
    for q_at, k_at in ((second, first), (first, second)):  # all pairs needed, and none
        with FlopCounterMode(display=False) as counted:
            found = scores(q, q, q_at, k_at)
        flops.append(counted.get_total_flops())
    assert torch.isinf(found).all() and flops[0] == flops[1] > 0


@pytest.mark.parametrize("c", [2, 4, 8])
def test_in_order_the_busiest_ranks_need_2_minus_1_over_c_times_a_fair_share_of_pairs_and_zig_zag_is_level(c):
    lesson = taken_from("09_context_and_experts", "in_order", "zig_zag")
    T = 64 * c
    busiest = {}
    for name in ("in_order", "zig_zag"):
        at = [getattr(lesson, name)(T, c, rank) for rank in range(c)]
        pairs = [[(at[(r - step) % c][None, :] <= at[r][:, None]).sum().item() for step in range(c)] for r in range(c)]
        busiest[name] = sum(map(max, zip(*pairs, strict=True))) / (T * (T + 1) / 2 / c)
    assert busiest["in_order"] == pytest.approx(2 - 1 / c, rel=0.02)
    assert busiest["zig_zag"] == pytest.approx(1, rel=0.02)


def test_torchs_context_parallel_is_the_prototype_that_lesson_09_calls_it_and_its_imports_exist():
    from torch.distributed.tensor.experimental import _context_parallel, context_parallel

    source = inspect.getsource(inspect.getmodule(_context_parallel.set_rotate_method))
    assert "prototype feature" in context_parallel.__doc__
    assert "legacy API" in source and "We will deprecate this API" in source
    assert "FlexAttention CP doesn't support alltoall yet" in source
    assert hasattr(_context_parallel, "_context_parallel_shard")
    snippet = (ROOT / "scripts" / "09_context_and_experts.py").read_text("utf-8")
    imports = re.findall(r"(?m)^# (from torch\.distributed\.tensor\.experimental\S* import \w+)$", snippet)
    assert len(imports) == 2
    for line in imports:
        exec(line)  # noqa: S102


# ------------------------------------------------------------------ layouts


def test_among_blooms_trials_8_tensor_ranks_are_clearly_slowest_and_4_and_2_are_within_3_percent():
    trials = json.loads((ASSETS / "published" / "10_layouts.json").read_text("utf-8"))["series"]
    best = {t: max(v for one in trials for tp, v in one["points"] if tp == t) for t in (8, 4, 2)}
    assert best[8] == min(value for one in trials for _, value in one["points"])
    assert best[4] / best[2] < 1.03 and min(best, key=best.get) == 8
    assert f"4 and 2 tensor ranks reach {best[4]:.0f} and {best[2]:.0f}" in said("10_meshes_and_planning")
    (twice,) = (sorted(v for _, v in one["points"]) for one in trials if len(one["points"]) == 2)
    assert round(100 * (twice[1] / twice[0] - 1)) == 3


def test_lesson_10_says_what_its_gpus_send():
    text = said("10_meshes_and_planning")
    given = {}
    folded = (ROOT / "scripts" / "10_meshes_and_planning.py").read_text("utf-8")
    exec(folded[folded.index("SIZES, PER_NODE =") : folded.index("def draw_waits")], given)  # noqa: S102
    sent = {axis: size / 1e9 for axis, size in given["SENT"].items()}
    told = f"{sent['data']:.1f} GB for data, {sent['pipeline']:.1f} GB for pipeline, {sent['tensor']:.0f} GB for tensor"
    assert told in text and f"{given['BEHIND_S']['data']:.2f} s for data, else 0" in text
    waits_s = sent["tensor"] / 100
    assert math.isclose(waits_s, 1.03, rel_tol=0.01) and 0.7 < waits_s / (8 * given["MICRO_S"]) < 0.8


def test_the_planners_first_plan_for_llama_has_metas_numbers_of_ranks_and_41_percent():
    meta = next(run for run in RUNS if run.name == "Llama 3 405B, 16384 GPUs")
    model = preset_model("llama3-405b")
    best = plan(Question(model, machine_named("h100"), 16384, 2048, context=1, program=program_for(model))).ranked[0]
    layout = best.layout
    assert (layout.tensor, layout.pipeline, layout.data) == (meta.tensor, meta.pipeline, 16384 // 8 // 16)
    assert meta.check["MFU in percent"] == 41


def test_the_reserve_is_the_tenth_that_lesson_10_names():
    assert RESERVE == 0.1 and "leaves a tenth of the memory as a reserve" in said("10_meshes_and_planning")
