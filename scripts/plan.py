#!/usr/bin/env python3
"""Which layout should this model train with, on these GPUs?

    python scripts/plan.py --preset gpt-7b --machine h100 --gpus 64                      # ranked, with the command
    python scripts/plan.py --preset gpt-7b --machine h100 --gpus 64 --plot plan.png      # and a picture
    python scripts/plan.py --layers 48 --width 6144 --heads 48 --vocab 51200 --positions 2048 \\
        --machine a100-80 --gpus 128 --global-batch 1024 --json                          # your own sizes, for a program
    python scripts/plan.py --from SmolLM2-135M --gpus 8 --global-batch 64        # a folder as transformers writes it
    python scripts/plan.py --preset llama3-70b --machine mine.toml --gpus 512 --global-batch 1024 --all
    python scripts/plan.py --preset llama3-405b --gpus 16384 --global-batch 2048              # as Megatron-LM would do
    python scripts/plan.py --preset deepseek-v3 --gpus 2048 --global-batch 15360 --fp8        # experts, 8 bits
    python scripts/plan.py --preset gpt-7b --gpus 64 --experts 8 --top-k 2 --capacity-factor 1.25
    python scripts/plan.py --published --plot published.png                               # held against published runs
    python scripts/plan.py --machines                                                     # the table, with its sources

You see a table of ways to split the GPUs: bytes per GPU, bytes that a GPU sends inside its node and between nodes
("in", "out"), the pipeline's bubble, predicted time of a step and MFU; what each pipeline schedule would make of it;
why the others are refused, with the numbers; and the assumption that the first row hangs on most. "micro 8x4" is 8
micro-batches of 4 sequences; "interleaved 8" means 8 stages per rank. Names of what data-parallel ranks share:
replicas (DDP), zero1 (optimizer), zero2 (gradients as well; weights stay gathered for the step), zero3 (weights as
well: FSDP), hybrid (zero3 within a node, replicas between), offload (zero3, at rest in the host's memory). "context
4": 4 ranks share each sequence. "experts over 8": each of 8 ranks has an eighth of the experts.

Two programs can be asked for. `--program train.py` plans the course's trainer and prints its command: its bytes are
exact formulas, held to real ranks by tests. `--program megatron` plans what Megatron-LM or torchtitan would do: bf16
weights, fused kernels, long sequences over nodes, experts, fp8. A GPT is planned for train.py, any other model for
megatron. Times are a model with a few constants, fitted on five published runs; `--published` shows how far off it is
on all others, and where the layout that people ran stands among those that are found here.

Not planned: V-shaped schedules, CPUs, and strategies without formulas, which the last line names. Nothing here needs
torch or a GPU. Status 1: nothing fits, and the number of GPUs on which something would; status 2: the question makes no
sense, with the cure.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # it runs without an install

import manyhands.launch.entry as entry  # first: Ctrl-C in the imports below is a sentence
from manyhands.course.folders import named
from manyhands.launch.flags import Flags
from manyhands.launch.run_folder import save_figure
from manyhands.predict.layouts import LONG, SCHEDULES, Question
from manyhands.predict.machines import MACHINES, machine_from_file, machine_named
from manyhands.predict.models import MODELS, PlannedModel, preset_model
from manyhands.predict.planner import plan, program_for
from manyhands.predict.program import PROGRAMS

NOTHING_FITS, SENSELESS = 1, 2
MOST_SEQUENCES = 10**9  # per step; the largest runs have some thousands
SIZES = {"vocab": "vocab_size", "positions": "block_size", "layers": "n_layer", "heads": "n_head", "width": "n_embd"}
MORE_SIZES = {"kv_heads": "n_kv_head", "hidden": "n_hidden"}
# {flag: (field of a Machine, what one of its unit is)}
MACHINE_FLAGS = {
    "peak_tflops": ("peak_flops", 1e12),
    "memory_gb": ("memory_bytes", 1e9),
    "memory_gbs": ("memory_bytes_per_s", 1e9),
    "inside_gbs": ("inside_bytes_per_s", 1e9),
    "between_gbs": ("between_bytes_per_s", 1e9),
    "host_gbs": ("host_bytes_per_s", 1e9),
    "gpus_per_node": ("gpus_per_node", 1),
}


def read(argv):
    parser = Flags(prog="plan.py", description=__doc__)
    model = parser.add_argument_group("the model: a preset, a folder, or sizes")
    model.add_argument("--preset", help=", ".join(MODELS))
    model.add_argument("--from", dest="source", metavar="FOLDER", help="a model as transformers writes it")
    for flag in (*SIZES, *MORE_SIZES):
        model.add_argument(f"--{flag.replace('_', '-')}", type=int)
    model.add_argument(
        "--style", choices=("gpt", "llama"), default="gpt", help="llama: SwiGLU, RMSNorm, grouped queries"
    )
    model.add_argument("--tie", action="store_true", help="one matrix for token embedding and head")
    model.add_argument("--experts", type=int, help="MLPs per layer, of which each token passes through --top-k")
    model.add_argument("--top-k", type=int, help="experts per token (default: 2)")
    model.add_argument(
        "--capacity-factor", type=float, help="an expert's buffer over its mean share; left out: no padding"
    )
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--machine", default="h100", help=f"{', '.join(MACHINES)}, or a .toml file (default: h100)")
    for flag in MACHINE_FLAGS:
        machine.add_argument(f"--{flag.replace('_', '-')}", type=int if flag == "gpus_per_node" else float)
    machine.add_argument("--gpus", type=int, default=8, help="how many (default: 8)")
    layouts = parser.add_argument_group("which layouts")
    layouts.add_argument("--program", choices=PROGRAMS, help="that trains (default: train.py if it has the model)")
    layouts.add_argument("--fp8", action="store_true", help="linear layers multiply in 8 bits (megatron)")
    layouts.add_argument("--no-offload", action="store_true", help="do not consider the host's memory")
    layouts.add_argument("--schedule", choices=SCHEDULES, help="of pipelines; left out: each of them is tried")
    layouts.add_argument(
        "--context", type=int, help=f"ranks that share a sequence; left out: tried from {LONG:,} positions on"
    )
    parser.add_argument("--global-batch", type=int, help="sequences per step (default: the preset's)")
    out = parser.add_argument_group("what to show")
    out.add_argument("--top", type=int, default=8, help="rows of the table (default: 8)")
    out.add_argument("--all", action="store_true", help="every row, and every refusal")
    out.add_argument("--json", action="store_true", help="one JSON object: bytes, seconds, counts")
    out.add_argument("--plot", help="also draw it, into this file (.png, .svg, .pdf)")
    out.add_argument("--published", action="store_true", help="published runs, predicted")
    out.add_argument("--machines", action="store_true", help="the table of machines")
    return parser.parse_args(argv)


def question_of(args):
    """The Question of the flags. Raises ValueError with the cure."""
    machine = machine_from_file(args.machine) if args.machine.endswith(".toml") else machine_named(args.machine)
    changed = {
        field: getattr(args, flag) * unit
        for flag, (field, unit) in MACHINE_FLAGS.items()
        if getattr(args, flag) is not None
    }
    machine = replace(machine, name=f"{machine.name}, changed", **changed) if changed else machine
    model, batch = _with_experts(_model(args), args), args.global_batch
    if batch is None:
        from manyhands.config.options import PRESETS, from_preset

        if args.preset not in PRESETS:
            raise ValueError(f"{model.name} comes without a batch; name --global-batch, in sequences")
        batch = from_preset(args.preset).train.global_batch
    if batch > MOST_SEQUENCES:
        raise ValueError(f"--global-batch {batch:,} is more than any run has; use at most {MOST_SEQUENCES:,}")
    program = program_for(model) if args.program is None else PROGRAMS[args.program]
    if args.fp8:
        if program is PROGRAMS["train.py"]:
            raise ValueError("train.py has no fp8; add --program megatron, or leave --fp8 out")
        if machine.best_fp8_flops is None:
            raise ValueError(f"machine {machine.name} has no best_fp8_flops; leave --fp8 out")
        program = replace(program, fp8=True)
    return Question(
        model, machine, args.gpus, batch, not args.no_offload, args.schedule, args.context, program, args.source
    )


def _model(args):
    flag, place = ("--preset", args.preset) if args.source is None else ("--from", args.source)
    if place is not None:
        others = [*SIZES, *MORE_SIZES, "style", "tie"]
        others += ["preset", "experts", "top_k", "capacity_factor"] * (flag == "--from")
        values = {name: getattr(args, name) for name in others}
        if given := [name for name, value in values.items() if value not in (None, "gpt") and value is not False]:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"{flag} {place} has sizes of its own; leave {names} out")
        return preset_model(place) if flag == "--preset" else _in_folder(place)
    given = {flag: getattr(args, flag) for flag in (*SIZES, *MORE_SIZES) if getattr(args, flag) is not None}
    if missing := [f"--{flag}" for flag in SIZES if flag not in given]:
        raise ValueError(f"no model: name --preset, or {', '.join(missing)}")
    sizes = {(SIZES | MORE_SIZES)[flag]: value for flag, value in given.items()}
    return PlannedModel(name="your model", style=args.style, tie=args.tie, **sizes)


def _in_folder(folder):
    """The model in a folder of transformers', with the positions that train.py trains. Raises ValueError."""
    from manyhands.config.model_folder import LONGEST, sizes_in

    sizes = sizes_in(named(folder))
    sizes["block_size"] = min(sizes["block_size"], LONGEST)
    return PlannedModel(name=f"the model in {folder}", **sizes)


def _with_experts(model, args):
    """The model with the experts of the flags; of a preset that has some, other ones. Raises ValueError."""
    if args.experts is None and model.experts == 1:
        if args.top_k is not None or args.capacity_factor is not None:
            raise ValueError("--top-k and --capacity-factor are about experts; name --experts, too")
        return model
    experts = model.experts if args.experts is None else args.experts
    usual = min(model.top_k, max(1, experts))
    top_k = usual if args.top_k is None else args.top_k
    name = model.name if experts == model.experts else f"{model.name} with {experts} experts"
    name = f"{model.name} without experts" if experts == 1 < model.experts else name
    return replace(model, name=name, experts=experts, top_k=top_k, capacity=args.capacity_factor)


def main(argv=None):
    args = read(argv)
    if args.machines:
        return _show_machines()
    try:
        picture = args.plot and _picture(args.plot)
        if args.published:
            return _show_published(picture)
        if args.top < 1:
            raise ValueError(f"top={args.top} shows nothing; use at least 1")
        answer = plan(question_of(args))
    except ValueError as error:
        print(f"plan.py: {error}", file=sys.stderr)
        return SENSELESS
    from manyhands.predict.report import as_dict, as_text

    print(json.dumps(as_dict(answer), indent=1) if args.json else as_text(answer, args.top, args.all))
    if picture and answer.best:
        _draw(answer, args.top, picture)
    return 0 if answer.best else NOTHING_FITS


def _picture(plot):
    """Where the picture goes. Raises ValueError where it cannot, before anything is planned."""
    path = named(plot)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {plot} is no picture; use a name that ends in .png, .svg or .pdf")
    return path


def _draw(answer, top, picture):
    from manyhands.plots.bars import plans

    rows = [(one.name, one.held.kinds_on_gpu(), one.time.by_part()) for one in answer.ranked[:top]]
    question = answer.question
    title = f"{question.model.name} on {question.gpus} {question.machine.name}"
    save_figure(plans(rows, question.machine.memory_bytes, title), picture)


def _show_machines():
    for machine in MACHINES.values():
        print(
            f"{machine.name:8} {machine.peak_flops / 1e12:6.1f} TFLOP/s bf16  {machine.memory_bytes / 1e9:4.0f} GB at"
            f" {machine.memory_bytes_per_s / 1e9:5.0f} GB/s  {machine.gpus_per_node:2} per node  inside"
            f" {machine.inside_bytes_per_s / 1e9:4.0f} GB/s  between"
            f" {machine.between_bytes_per_s / 1e9:4.1f} GB/s per GPU"
        )
        print("         " + " ".join(machine.sources))
    return 0


def _show_published(picture):
    from manyhands.predict.published_runs import FITTED_ON, NARAYANAN, RUNS, predicted_tflops, published_text

    print(published_text())
    if picture:
        from manyhands.plots.results import table_and_others

        table, others = [], []
        for run in RUNS:
            rows, label = (table, run.name) if run.source == NARAYANAN else (others, run.source.split(",")[0])
            rows.append((label, run.published, predicted_tflops(run), run.name in FITTED_ON))
        save_figure(table_and_others(table, others, NARAYANAN.split(",")[0]), picture)
    return 0


if __name__ == "__main__":
    entry.run_program("plan.py", main, product=True)
