"""Bytes of each rank while a model is trained: by strategy, number of ranks and recipe, in GB or GiB."""

from manyhands.config.layout import Layout
from manyhands.config.options import from_preset, merged
from manyhands.gpt.model import GPTConfig
from manyhands.plots.looks import BYTES, INK, LIMIT, new_figure
from manyhands.predict.activation_memory import saved_bytes
from manyhands.predict.memory import RECIPES, as_recipe, bytes_per_rank
from manyhands.widgets.display import Controls, is_live, labelled, show_picture

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
    """{kind: bytes} of one rank under a stage of ZeRO (0: DDP), with `sequences` whole sequences per rank and forward.

    Kinds are those of a Recipe, what FSDP unshards (the root and a block, in the precision of the products) and
    activations (flash attention, no recomputation, all in that precision: autocast keeps those of norms in fp32, and
    takes more). Shares are equal parts; `predict.memory.bytes_per_rank` counts the padding too.
    """
    recipe, P = as_recipe(recipe), config.num_params()
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


def memory_figure(model="7B", recipe="bf16 + fp32 master", ranks=64, sequences=1, device=80, unit="GB"):
    """A matplotlib Figure: a bar for each strategy with the bytes of one of `ranks` ranks, by kind.

    `model`: a name in MODELS or a GPTConfig; `recipe`: a name in RECIPES or a Recipe. `device` is the memory of a
    device in `unit` (GB or GiB), a line; 0 leaves it out.
    """
    config, device_bytes = MODELS.get(model, model), device * GIGA[unit]
    bars = _bars(config, recipe, ranks, sequences)
    shown, scale = _shown_unit(bars, unit)
    longest = max(sum(bar.values()) for bar in bars.values()) / scale
    figure, axes = new_figure(8.6, 3.3)
    drawn = {}
    for name, bar in bars.items():
        left = 0
        for kind, n_bytes in bar.items():
            colour, hatch = BYTES[LOOK_OF[kind]]
            drawn[kind] = axes.barh(name, n_bytes / scale, left=left, fc=colour, ec=INK, lw=0.5, hatch=hatch, zorder=2)
            left += n_bytes / scale
        note = "  does not fit" if device and left * scale > device_bytes else ""
        axes.text(left, name, f"  {_number(left)} {shown}{note}", va="center", zorder=4)
    right = longest * 1.32
    if device and device_bytes / scale < right:
        axes.axvline(device_bytes / scale, **LIMIT, zorder=3)
        axes.text(
            device_bytes / scale,
            1.01,
            f"{device:g} {unit}",
            color=LIMIT["color"],
            ha="center",
            transform=axes.get_xaxis_transform(),
        )
    axes.set(xlim=(0, right), xlabel=f"{shown} on {_each_of(ranks)}")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.invert_yaxis()
    axes.tick_params(left=False)
    P = config.num_params()
    size = f"{P / 1e9:,.3g} billion" if P >= 1e9 else f"{P / 1e6:.3g} million"
    figure.suptitle(f"{size} parameters, {_recipe_name(recipe)}", x=0.02, ha="left")
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=7, frameon=False, handleheight=1.3)
    return figure


def show_memory(**settings):
    """Choose model, recipe, ranks, sequences, device and unit (as for `memory_figure`). A picture where nobody can."""
    if not is_live():
        show_picture(memory_figure(**settings), _alt(**settings))
        return
    import ipywidgets as w

    controls = {
        "model": labelled(w.Dropdown, "model", 10, 22, options=list(MODELS), value="7B"),
        "recipe": labelled(w.Dropdown, "recipe", 10, 24, options=list(RECIPES), value="bf16 + fp32 master"),
        "ranks": labelled(w.Dropdown, "ranks", 4, 12, options=[(f"{n:,}", n) for n in RANKS], value=64),
        "sequences": labelled(w.BoundedIntText, "sequences per rank", 10, 22, value=1, min=0, max=16),
        "device": labelled(w.BoundedFloatText, "memory of a device", 10, 24, value=80, min=0, max=1e6),
        "unit": labelled(w.Dropdown, "unit", 4, 12, options=list(GIGA)),
    }
    for name, value in settings.items():
        controls[name].value = value
    chosen = list(controls.values())

    def draw():
        now = {name: control.value for name, control in controls.items()}
        return memory_figure(**now), _alt(**now)

    page = Controls([chosen[:3], chosen[3:]], draw)
    page.redraw_with(*chosen)
    page.show()


def _alt(model="7B", recipe="bf16 + fp32 master", ranks=64, sequences=1, device=80, unit="GB"):
    bars = _bars(MODELS.get(model, model), recipe, ranks, sequences)
    shown, scale = _shown_unit(bars, unit)
    totals = (f"{name} {_number(sum(bar.values()) / scale)}" for name, bar in bars.items())
    batch = f" and {sequences} sequence{'s' * (sequences != 1)} per rank" if sequences else ""
    return f"{shown} on {_each_of(ranks)} for {model}, {_recipe_name(recipe)}{batch}: {', '.join(totals)}"


def _bars(config, recipe, ranks, sequences):
    """{strategy: {kind: bytes}}"""
    return {name: bytes_by_kind(config, recipe, stage, ranks, sequences) for name, stage in STRATEGIES.items()}


def _shown_unit(bars, unit):
    """(name, bytes) of GB or GiB; of MB or MiB where no bar is as long as one of these."""
    longest = max(sum(bar.values()) for bar in bars.values())
    return (unit, GIGA[unit]) if longest >= GIGA[unit] else MEGA[unit]


def _each_of(ranks):
    return f"each of {ranks:,} ranks" if ranks > 1 else "one rank"


def _recipe_name(recipe):
    return recipe if isinstance(recipe, str) else f"{recipe.total:g} bytes per parameter"


def _number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
