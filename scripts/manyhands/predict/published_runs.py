"""Runs that others have published, predicted: what the planner is held against.

    python scripts/plan.py --published               # the table below with residuals
    fit()                                            # (share of the peak, passes over memory), from FITTED_ON alone

Each run names its source, what was checked and how, and what is assumed because the source leaves it open. TFLOP/s are
per GPU, counted as the source counts them: with the operations that recomputation repeats ("hardware") or without
("model").
"""

from dataclasses import dataclass, replace
from statistics import median

from manyhands.predict.machines import MACHINES, Machine
from manyhands.predict.models import PlannedModel, preset_model
from manyhands.predict.rank_work import Work
from manyhands.predict.step_time import MATMUL_SHARE, MEMORY_PASSES, Assumptions, step_time
from manyhands.predict.traffic import Message


@dataclass(frozen=True)
class PublishedRun:
    """A run: model, machine, layout, and the TFLOP/s per GPU that were published."""

    name: str
    source: str
    model: PlannedModel
    gpus: int
    tensor: int
    pipeline: int
    global_batch: int
    published: float  # TFLOP/s per GPU
    counts: str  # hardware or model
    checked: str
    assumed: str
    machine: Machine = MACHINES["a100-80"]
    micro_batch: int = 1
    stages_per_rank: int = 1
    checkpointing: str = "block"  # block, attention (its core alone) or none
    sequence_parallel: bool = False
    flash: bool = False  # attention's scores are never kept
    sharing: str = "replicas"
    overlap: bool = False
    scattered: bool = True  # tensor ranks share what a stage sends


NARAYANAN = "Narayanan et al. 2021, arXiv:2104.04473, table 1"
KORTHIKANTI = "Korthikanti et al. 2022, arXiv:2205.05198, table 5"
SMITH = "Smith et al. 2022, arXiv:2201.11990, section 2.4"
BLOOM = (
    "BigScience 2022, https://huggingface.co/bigscience/bloom and https://huggingface.co/blog/bloom-megatron-deepspeed"
)
LLAMA = "Grattafiori et al. 2024, arXiv:2407.21783, table 4"


def _gpt(name, n_layer, n_embd, n_head, vocab_size=51200):
    return PlannedModel(name, vocab_size, 2048, n_layer, n_head, n_embd, tie=True, qkv_bias=True)


def _interleaved(layers_per_stage):
    """The least v above 1 that splits them: section 5.1 says that the schedule is interleaved, no table says v."""
    return next((v for v in range(2, layers_per_stage + 1) if layers_per_stage % v == 0), 1)


def _narayanan(billions, n_head, n_embd, n_layer, tensor, pipeline, gpus, batch, tflops, *_):
    """A row of the table. The last two columns check the one before: see tests/test_published_runs.py."""
    return PublishedRun(
        f"GPT {billions}B", NARAYANAN, _gpt(f"{billions}B", n_layer, n_embd, n_head), gpus, tensor, pipeline, batch,
        tflops, "hardware",
        "parameters by their formula; TFLOP/s against the table's last columns, percent of peak and PFLOP/s together;"
        " sizes to 310 B against github.com/aws-samples/awsome-distributed-training, 3.test_cases/megatron, which lists"
        " them from the table",
        "micro-batch 1; v the least above 1 that splits a stage's layers: the table names neither",
        stages_per_rank=_interleaved(n_layer // pipeline) if pipeline > 1 else 1,
    )  # fmt: skip


NARAYANAN_ROWS = (  # billions, heads, width, layers, tensor, pipeline, GPUs, batch, TFLOP/s, % of peak, PFLOP/s in all
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 44, 4.4),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 44, 8.8),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 46, 18.2),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 43, 34.6),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 44, 70.8),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 45, 143.8),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 47, 227.1),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 50, 297.4),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 52, 410.2),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 52, 502.0),
)


KORTHIKANTI_ROWS = (  # billions, layers, width, heads, pipeline, GPUs, batch, micro-batch, v, seconds, MFU in percent
    (22, 48, 6144, 64, 1, 8, 4, 4, 1, 1.10, 41.5),
    (175, 96, 12288, 96, 8, 64, 64, 1, 3, 13.75, 51.4),
    (530, 105, 20480, 128, 35, 280, 280, 1, 3, 37.83, 56.0),
    (1000, 128, 25600, 160, 64, 512, 512, 1, 1, 71.49, 56.3),
)


def _korthikanti(billions, n_layer, n_embd, n_head, pipeline, gpus, batch, micro_batch, v, seconds, _):
    """With sequence parallelism and attention's core recomputed: TFLOP/s follow from the seconds of an iteration."""
    model = _gpt(f"{billions}B", n_layer, n_embd, n_head)
    tflops = model.flops_per_token() * batch * model.block_size / seconds / gpus / 1e12
    return PublishedRun(
        f"GPT {billions}B, selective", KORTHIKANTI, model, gpus, 8, pipeline, batch, tflops, "model",
        "seconds per iteration, by arithmetic, against the table's MFU, and against calculon/llm/validation.py of"
        " github.com/calculon-ai/calculon, which quotes the table", "nothing", micro_batch=micro_batch,
        stages_per_rank=v, checkpointing="attention", sequence_parallel=True,
    )  # fmt: skip


SMITH_ROWS = (  # GPUs, seconds per iteration, TFLOP/s
    (2240, 60.1, 126),
    (2800, 50.2, 121),
    (3360, 44.4, 113),
)


def _smith(gpus, _, tflops):
    """MT-NLG: DeepSpeed's pipeline, 1F1B; 126 TFLOP/s count the recomputation, as the seconds show."""
    return PublishedRun(
        f"MT-NLG 530B, {gpus} GPUs", SMITH, _gpt("530B", 105, 20480, 128), gpus, 8, 35, 1920, tflops, "hardware",
        "seconds per iteration, by arithmetic with the recomputation, against the TFLOP/s; both against"
        " github.com/cli99/llm-analysis, examples/megatron-turing-nlg, which quotes the section",
        "micro-batch 1, one stage per rank: section 2.4 names neither",
    )  # fmt: skip


def _llama(gpus, batch_per_data_rank, tflops, _):
    return PublishedRun(
        f"Llama 3 405B, {gpus} GPUs", LLAMA, preset_model("llama3-405b"), gpus, 8, 16,
        gpus // 128 * batch_per_data_rank, tflops, "model",
        "TFLOP/s over the peak of 989.4: 43.5 and 40.4 %, where the table says 43 and 41 %; sizes are table 3's",
        "v = 8, the most that 8 layers per rank allow; micro-batch 1; FSDP gathers once per step; 50 GB/s per GPU"
        " between nodes (400 Gb/s, section 3.3.1); attention counted without the causal mask's half",
        MACHINES["h100"], stages_per_rank=8, checkpointing="none", sequence_parallel=True, flash=True, sharing="zero2",
        overlap=True, scattered=False,
    )  # fmt: skip


RUNS = (
    *(_narayanan(*row) for row in NARAYANAN_ROWS),
    *(_korthikanti(*row) for row in KORTHIKANTI_ROWS),
    *(_smith(*row) for row in SMITH_ROWS),
    PublishedRun(
        "BLOOM 176B", BLOOM, _gpt("bloom-176b", 70, 14336, 112, 250680), 384, 4, 12, 2048, 150, "hardware",
        "read on the model's card: about 150 TFLOP/s per GPU, 384 A100 of 80 GB, eight per node with four 100 Gb/s"
        " links",
        "micro-batch 2 and 1F1B, as the run's scripts have it; 150 counts recomputation",
        replace(MACHINES["a100-80"], between_bytes_per_s=50e9 / 8), micro_batch=2, sharing="zero1", scattered=False,
    ),
    _llama(8192, 32, 430, 43),
    _llama(16384, 16, 400, 41),
)  # fmt: skip
FITTED_ON = ("GPT 1.7B", "GPT 1008.0B")  # the ends of the first table: the most memory-bound run, and the least


def published_work(run):
    """The `Work` of a published run. Bytes of activations by Korthikanti et al. 2022, sections 4.1 to 4.3."""
    model, b = run.model, run.micro_batch
    tokens, D, t = b * model.block_size, model.n_embd, run.tensor
    data = run.gpus // (t * run.pipeline)
    layers = model.n_layer / run.pipeline
    scores = 0 if run.flash else 5 * model.n_head * model.block_size
    whole = (10 / t if run.sequence_parallel else 10) * D  # norms, dropouts and the inputs of linears
    mlp = 4 * model.n_hidden if model.style == "llama" else 4 * D
    # 24 of a gpt: 8 in attention, 16 in the MLP; of a Llama twice the numbers that `activation_memory` counts
    shared = (24 * D if model.style == "gpt" else 2 * (2 * D + 2 * model.kv_width + mlp)) + scores
    a_layer = tokens * (whole + shared / t)
    flops = layers * tokens * model.layer_flops() / t
    parameters = model.num_params() / (t * run.pipeline)
    again = {
        "none": (0.0, 0.0),
        "attention": (layers * tokens * model.attention_flops() / t, layers * tokens * scores / t),
        "block": (flops, layers * a_layer),
    }[run.checkpointing]
    return Work(
        micro_batches=run.global_batch // data // b,
        layers=int(layers),
        layers_flops=flops,
        head_flops=tokens * model.head_flops() / t,
        again_flops=again[0],
        layers_bytes=layers * a_layer,
        again_bytes=again[1],
        around_bytes=4 * tokens * (D + model.vocab_size) / t,
        owned=parameters / (1 if run.sharing == "replicas" else data),
        messages=tuple(message for message in _published_messages(run, data, parameters) if message.ranks > 1),
        units=int(layers) + 1,
        bubble=(run.pipeline - 1) / run.stages_per_rank,
    )


def _published_messages(run, data, parameters):
    """Of Megatron-LM and its like: 16-bit activations, weights and gradients."""
    model, t, m = run.model, run.tensor, run.global_batch // data // run.micro_batch
    layers = model.n_layer / run.pipeline  # on average
    stream = run.micro_batch * model.block_size * model.n_embd * 2
    calls, units = m * int(layers * (6 if run.checkpointing == "block" else 4)), int(layers) + 1
    yield Message("tensor", "all_reduce", calls, calls * stream, t, 1)
    calls, shared = m * 2 * run.stages_per_rank, t if run.sequence_parallel or run.scattered else 1
    yield Message("pipeline", "send", calls, calls * stream / shared, run.pipeline, t * data)
    gradients = "last backward" if run.overlap else ""
    if run.sharing == "zero2":
        behind = "first forward" if run.overlap else ""
        yield Message("data", "all_gather", units, parameters * 2, data, t, behind)
        yield Message("data", "reduce_scatter", units, parameters * 2, data, t, gradients)
        return
    yield Message("data", "all_reduce", units, parameters * 2, data, t, gradients)
    if run.sharing == "zero1":
        yield Message("data", "broadcast", units, parameters * 2, data, t)


def predicted_tflops(run, assumed=None):
    """TFLOP/s per GPU that the planner predicts, counted as the run's source counts."""
    model, work = run.model, published_work(run)
    flops = model.flops_per_token()
    if run.counts == "hardware":
        flops += model.n_layer * model.layer_flops()
    seconds = step_time(work, run.machine, assumed).total_s
    return flops * run.global_batch * model.block_size / seconds / run.gpus / 1e12


def residual(run, assumed=None):
    """(predicted - published) / published."""
    return predicted_tflops(run, assumed) / run.published - 1


def fit(names=FITTED_ON):
    """The Assumptions under which two runs, and no others, are predicted exactly; by bisection, in turns.

    The first run decides the passes over memory, the second the share of the peak.
    """
    runs = {run.name: run for run in RUNS}
    found = Assumptions()
    for _ in range(40):
        for name, key, low, high in ((names[0], "memory_passes", 0.0, 20.0), (names[1], "matmul_share", 0.2, 1.0)):
            for _ in range(40):
                middle = (low + high) / 2
                # more passes are slower, a larger share is faster
                too_fast = residual(runs[name], replace(found, **{key: middle})) > 0
                up = too_fast if key == "memory_passes" else not too_fast
                low, high = (middle, high) if up else (low, middle)
            found = replace(found, **{key: (low + high) / 2})
    return found


def summary(runs):
    """(median, largest) size of the residuals, those of the fitted runs left out."""
    sizes = [abs(residual(run)) for run in runs if run.name not in FITTED_ON]
    return median(sizes), max(sizes)


def published_text() -> str:
    """The tables of published runs: predicted, published, residual, and what each rests on."""
    head = f"{'run':28}{'GPUs':>6}{'layout':>14}{'published':>11}{'predicted':>11}{'residual':>10}"
    lines = [
        f"Two constants, fitted on {' and '.join(FITTED_ON)} alone: matrix products attain {MATMUL_SHARE:.1%} of the"
        f" peak, kept bytes pass {MEMORY_PASSES:.2f} times through memory.",
        "TFLOP/s per GPU, counted as the source counts them.",
    ]
    for source in dict.fromkeys(run.source for run in RUNS):
        runs = [run for run in RUNS if run.source == source]
        lines += ["", source, head, *(_published_row(run) for run in runs)]
        middle, worst = summary(runs)
        lines.append(f"  not fitted: median error {middle:.1%}, largest {worst:.1%}")
        lines += [f"  checked: {said}" for said in dict.fromkeys(run.checked for run in runs)]
        assumed = dict.fromkeys(run.assumed for run in runs)
        lines += [f"  assumed, as the source leaves it open: {said}" for said in assumed]
    return "\n".join(lines)


def _published_row(run):
    layout, fitted = f"t {run.tensor}, p {run.pipeline}", " (fitted)" * (run.name in FITTED_ON)
    values = f"{run.published:11.1f}{predicted_tflops(run):11.1f}{residual(run):+10.1%}{fitted}"
    return f"{run.name:28}{run.gpus:6,}{layout:>14}{values}"
