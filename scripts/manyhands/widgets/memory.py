"""Bytes of each rank while a model is trained, by strategy, ranks and recipe."""

from manyhands.config.layout import Layout
from manyhands.config.options import from_preset, merged
from manyhands.gpt.config import GPTConfig
from manyhands.plots.looks import BYTES, INK, LIMIT, new_figure
from manyhands.predict.activation_memory import saved_bytes
from manyhands.predict.memory import RECIPES, bytes_per_rank
from manyhands.widgets.display import show_with_controls

MODELS = {
    "ShakespeareGPT": GPTConfig(vocab_size=65),
    "GPT-2": GPTConfig(vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768, tie=True, qkv_bias=True),
    "1B": GPTConfig(vocab_size=32100, block_size=2048, n_layer=16, n_head=16, n_embd=2048),
    "7B": GPTConfig(vocab_size=32100, block_size=2048, n_layer=32, n_head=32, n_embd=4096),
    "70B class": GPTConfig(vocab_size=50280, block_size=4096, n_layer=80, n_head=64, n_embd=8192),
}  # fmt: skip
STRATEGIES = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "FSDP (ZeRO-3)": 3}
RANKS = [2**i for i in range(11)]
GIGA = {"GB": 10**9, "GiB": 2**30}
MEGA = {"GB": ("MB", 10**6), "GiB": ("MiB", 2**20)}  # what is less than one
LOOK_OF = {
    "weights": "parameters", "master": "copies", "moments": "optimizer", "gradients": "gradients", "cast": "other",
    "unsharded parameters": "unsharded_parameters", "activations": "activations",
}  # fmt: skip


def bytes_by_kind(config, recipe, stage, n_ranks, sequences=0):
    """Return {kind: bytes} of one rank under a stage of ZeRO (0: DDP), with `sequences` sequences per rank and forward.

    Kinds are those of a Recipe, what FSDP unshards (the root and a block, in the precision of the products) and
    activations (flash attention, no recomputation, all in that precision: autocast keeps those of norms in fp32, and
    takes more). Shares are equal parts; `predict.memory.bytes_per_rank` counts the padding too.
    """
    recipe, P = RECIPES[recipe], config.num_params()
    share = [1 / n_ranks if stage >= first else 1 for first in (1, 2, 3)]  # optimizer, gradients, weights
    low = min(recipe.weights, recipe.cast or recipe.weights)
    found = {
        "weights": recipe.weights * P * share[2],
        "master": recipe.master * P * share[0],
        "moments": recipe.moments * P * share[0],
        "gradients": recipe.gradients * P * share[1],
        "cast": 0 if stage == 3 else recipe.cast * P,  # FSDP casts what it gathers
        "unsharded parameters": _unsharded(config, low, n_ranks) if stage == 3 else 0,
        "activations": sum(saved_bytes(config, sequences, low).values()) if sequences else 0,
    }
    return {kind: n_bytes for kind, n_bytes in found.items() if n_bytes}


def _unsharded(config, itemsize, n_ranks):
    options = merged(from_preset("nano"), {"parallel": {"strategy": "fsdp"}}, "widget")
    return bytes_per_rank(config, Layout(shard=n_ranks), options).unsharded_parameters * itemsize / 4


def memory_picture(model="7B", recipe="bf16 + fp32 master", ranks=64, sequences=1, device=80, unit="GB"):
    """(a matplotlib Figure, its text): a bar for each strategy with the bytes of one of `ranks` ranks, by kind.

    `model`: a name in MODELS; `recipe`: a name in RECIPES. `device` is the memory of a device in `unit` (GB or GiB), a
    line; 0 leaves it out.
    """
    config, device_bytes = MODELS[model], device * GIGA[unit]
    bars = {name: bytes_by_kind(config, recipe, stage, ranks, sequences) for name, stage in STRATEGIES.items()}
    longest = max(sum(bar.values()) for bar in bars.values())
    shown, scale = (unit, GIGA[unit]) if longest >= GIGA[unit] else MEGA[unit]
    figure, axes = new_figure(8.6, 3.3)
    drawn, totals = {}, []
    for name, bar in bars.items():
        left = 0
        for kind, n_bytes in bar.items():
            colour, hatch = BYTES[LOOK_OF[kind]]
            drawn[kind] = axes.barh(name, n_bytes / scale, left=left, fc=colour, ec=INK, lw=0.5, hatch=hatch, zorder=2)
            left += n_bytes / scale
        note = "  does not fit" if device and left * scale > device_bytes else ""
        size = f"{left:,.0f}" if left >= 100 else f"{left:.3g}"
        axes.text(left, name, f"  {size} {shown}{note}", va="center", zorder=4)
        totals.append(f"{name} {size}")
    right = longest / scale * 1.32
    if device and device_bytes / scale < right:
        axes.axvline(device_bytes / scale, **LIMIT, zorder=3)
        above = {"ha": "center", "transform": axes.get_xaxis_transform()}
        axes.text(device_bytes / scale, 1.01, f"{device:g} {unit}", color=LIMIT["color"], **above)
    where = f"{shown} on " + (f"each of {ranks:,} ranks" if ranks > 1 else "one rank")
    axes.set(xlim=(0, right), xlabel=where)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.invert_yaxis()
    axes.tick_params(left=False)
    P = config.num_params()
    size = f"{P / 1e9:,.3g} billion" if P >= 1e9 else f"{P / 1e6:.3g} million"
    figure.suptitle(f"{size} parameters, {recipe}", x=0.02, ha="left")
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=7, frameon=False, handleheight=1.3)
    batch = f" and {sequences} sequence{'s' * (sequences != 1)} per rank" if sequences else ""
    return figure, f"{where} for {model}, {recipe}{batch}: {', '.join(totals)}"


def show_memory(**settings):
    """Choose model, recipe, ranks, sequences, device and unit (as for `memory_picture`). A picture where nobody can."""
    show_with_controls(
        memory_picture, settings,
        {
            "model": ("Dropdown", "7B", "model", 10, 22, {"options": list(MODELS)}),
            "recipe": ("Dropdown", "bf16 + fp32 master", "recipe", 10, 24, {"options": list(RECIPES)}),
            "ranks": ("Dropdown", 64, "ranks", 4, 12, {"options": [(f"{n:,}", n) for n in RANKS]}),
        },
        {
            "sequences": ("BoundedIntText", 1, "sequences per rank", 10, 22, {"min": 0, "max": 16}),
            "device": ("BoundedFloatText", 80, "memory of a device", 10, 24, {"min": 0, "max": 1e6}),
            "unit": ("Dropdown", "GB", "unit", 4, 12, {"options": list(GIGA)}),
        },
    )  # fmt: skip
