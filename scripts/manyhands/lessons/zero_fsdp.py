"""Harness and plots of lesson 06: a memory limit that holds, a comparison with one process, and printed volumes."""

import warnings
from textwrap import shorten

import torch
from torch import nn

from manyhands.launch import recorded_runs
from manyhands.launch.program import say, say_once
from manyhands.launch.ranks import Agreement
from manyhands.launch.run_folder import show
from manyhands.measure import wire
from manyhands.measure.memory_timeline import KINDS, MemoryTimeline
from manyhands.measure.replicas import flat
from manyhands.measure.tensor_bytes import count_saved, tensor_bytes
from manyhands.plots import bars, looks
from manyhands.plots.memory_stack import memory_stacks
from manyhands.plots.schedule import gantt

# fully_shard warns of operations in place on what a sharded model returns; there are none here
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
SHORT = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "all-reduce"}


class OutOfMemory(RuntimeError):
    """A step had more bytes at once than a rank has memory."""


def adamw(parameters):
    """Return AdamW, of which two moments lie beside each parameter."""
    return torch.optim.AdamW(parameters, lr=1e-3)


class Rungs:
    """Steps under a limit of memory, rung by rung; all ranks call each method."""

    def __init__(self, shakespeare, memory_mb):
        """`memory_mb` 0: a little more than ZeRO-3 needs, so that it depends on the ranks, and is 12 MB on four."""
        self.shakespeare, self.peaks, self.P = shakespeare, {}, shakespeare.config.num_params()
        self.limit = 1e6 * memory_mb or self._enough()

    def _enough(self):
        """Return bytes: a rank's shares, the root, and two blocks with all activations, or five with most of them.

        The first when backward begins, the second in it, where messages and their copies are several blocks.
        """
        model = self.shakespeare.new_model()
        saved = count_saved(lambda: model(*self.shakespeare.batch(0)), model).bytes
        block = sum(p.nbytes for p in model.blocks[0].parameters())
        rest = 16 * self.P / self.shakespeare.ranks.world_size + 4 * self.P - len(model.blocks) * block
        room = 1.04 if self.shakespeare.ranks.device.type == "cpu" else 1.3  # a GPU's kernels need some of their own
        return max(room * (rest + 2 * block + saved), rest + 5 * block + 0.7 * saved)

    def climb(self, name, build):
        """Train what `build(model)` returns, (model, optimizer), and compare its losses with those of one process.

        Print what a rank holds and sends, and draw all rungs up to now. Raise OutOfMemory where the peak of a step
        exceeds the limit on any rank.
        """
        new_model, batch, ranks = self.shakespeare.new_model, self.shakespeare.batch, self.shakespeare.ranks
        model, optimizer = build(new_model())
        for step in range(3):  # Adam's moments come with the first step, DDP's final buckets with the second
            optimizer.zero_grad()
            share = batch(step)
            with (
                wire.watch() as sent,
                MemoryTimeline(getattr(model, "module", model), getattr(optimizer, "own", optimizer)) as seen,
            ):
                with seen.phase("backward"):
                    model(*share)[1].backward()
                    held = tensor_bytes(getattr(model, "module", model), optimizer).total
                optimizer.step()
        apart = off_one_process(self.shakespeare, build)
        self.peaks[name] = seen.peak
        self.shakespeare.metrics.exact(**{f"held_bytes_{name}": held})
        say_once(f"{name}: a rank holds {held / 1e6:.2f} MB when backward is done; {seen.peak.total / 1e6:.1f} at most")
        say_once(f"{name}: a step communicates {in_P(sent, self.P)}")
        say_once(f"{name}: the losses are those of one process, to 1e-10: {apart < 1e-10}")
        self.draw()
        Agreement(ranks, None, OutOfMemory).all(lambda: self._expect_to_fit(name))

    def try_to_climb(self, name, build):
        """Do the same, and print OutOfMemory in the place of failing."""
        try:
            self.climb(name, build)
        except OutOfMemory as error:
            say_once(f"OutOfMemory: {error}")

    def _expect_to_fit(self, name):
        peak = self.peaks[name]
        if peak.total > self.limit:
            kind = max(peak.bytes, key=peak.bytes.get)
            name_of = {"other": "other (messages and copies)"}.get(kind, kind.replace("_", " "))
            raise OutOfMemory(
                f"{name} needs {peak.total / 1e6:.1f} MB at once, and a rank has {self.limit / 1e6:.1f}; "
                f"the largest part: {name_of}, {peak.bytes[kind] / 1e6:.1f} MB"
            )

    def draw(self):
        """Draw a bar for each rung: the bytes of a step's fullest moment, by kind, and where the memory ends."""
        from matplotlib.lines import Line2D

        if self.shakespeare.ranks.rank:
            return
        figure, axes = looks.new_figure(7.5, 1.5 + 0.34 * max(len(self.peaks), 2))
        for i, peak in enumerate(self.peaks.values()):
            parts = [(peak.bytes[kind] / 1e6, *looks.BYTES[kind]) for kind in KINDS]
            total = looks.stacked(axes, i, parts, 0.66)
            ground = {"fc": looks.PAPER, "ec": "none", "pad": 1}
            axes.text(total + 0.15, i, f"{total:.1f}", va="center", bbox=ground)
        axes.axvline(self.limit / 1e6, **looks.LIMIT)
        axes.set_yticks(range(len(self.peaks)), list(self.peaks))
        axes.invert_yaxis()
        most = max(self.limit, *(peak.total for peak in self.peaks.values())) / 1e6
        axes.set(xlabel=f"MB at the fullest moment of a step, on each of {self.shakespeare.ranks.world_size} ranks")
        axes.set(xlim=(0, 1.15 * most))
        there = [kind for kind in KINDS if any(peak.bytes[kind] for peak in self.peaks.values())]
        keys = [*looks.kind_keys(there), Line2D([], [], **looks.LIMIT, label="memory of a rank")]
        figure.legend(handles=keys, loc="outside lower center", ncols=4, frameon=False, handleheight=1.4)
        show(
            figure,
            f"rungs_{len(self.peaks)}",
            "bars of the bytes of a step's fullest moment, a bar per rung, and the limit",
        )


def off_one_process(shakespeare, build):
    """Train two steps in float64 and read a third batch; return the largest difference of a loss from one process's."""
    new_model, batch = shakespeare.new_model, shakespeare.batch
    one = new_model(torch.float64)
    found = []
    for (model, optimizer), part in (((one, adamw(one.parameters())), (0, 1)), (build(new_model(torch.float64)), ())):
        losses = []
        for step in range(3):
            losses.append(model(*batch(step))[1].detach())  # of this rank's share, with either weights
            model(*batch(step, *part))[1].backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.stack(losses))
    return (found[0] - found[1]).abs().max().item()


def volumes(seen, P, bytes_per_value=4):
    """Return {collective: volume in P}: an all-reduce counts twice, as it is a reduce-scatter and an all-gather."""
    times = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "broadcast": 1}
    found = {op: k * seen.payload_bytes(op) / (bytes_per_value * P) for op, k in times.items()}
    return {op: value for op, value in found.items() if value}


def in_P(seen, P):
    """Return the volumes in words."""
    return ", ".join(f"{op} {value:.2f} P" for op, value in volumes(seen, P).items()) or "nothing"


def in_words(seen, bytes_per_value=4):
    """Return the collectives in the order of their calls, with their thousands of numbers."""
    return ", ".join(f"{SHORT[call.op]} {call.bytes / bytes_per_value / 1e3:.0f}" for call in seen.calls) or "nothing"


def draw_published(ranks):
    """Draw tokens per second of each GPU against GPUs, as others published it, and print how much is kept."""
    if ranks.rank:
        return
    figure, axes = looks.new_figure(7.5, 3)
    for curve, look in zip(recorded_runs.published("06_fsdp"), looks.ALTERNATIVES, strict=False):
        gpus, rates = zip(*curve["points"], strict=True)
        axes.semilogx(gpus, rates, ms=5, **look)
        looks.end_label(axes, gpus[-1], rates[-1], curve["name"], look["color"])
        kept = f"{100 * rates[-1] / rates[0]:.0f} % of its tokens/s per GPU from {gpus[0]} to {gpus[-1]} GPUs"
        say(f"{curve['name']} keeps {kept}")
    ticks = [8, 32, 128, 512]
    axes.set_xticks(ticks, ticks)
    axes.minorticks_off()
    axes.set(xlabel="H100 GPUs", ylabel="tokens/s per GPU", ylim=(0, None), xlim=(6, 6 * ticks[-1]))
    show(figure, "published", "tokens per second of each GPU from 8 to 512 H100: nearly flat lines")


def two_matrices():
    """Return a small network of two matrices, in float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 8, bias=False)).double()


OPTIMIZERS = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.01),
}


def compare_optimizers(ranks, ways):
    """Train two matrices for two steps with each of OPTIMIZERS, and print how far each way is from one process.

    ways: {name: build(net, make)}, which returns the optimizer. All ranks call it.
    """

    def trained(net, optimizer, part=0, parts=1):
        for step in range(2):
            draw = torch.Generator().manual_seed(step)
            x_BD = torch.randn(8 * ranks.world_size, 16, dtype=torch.float64, generator=draw)
            net(x_BD.chunk(parts)[part]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return flat(p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters())

    for name, make in OPTIMIZERS.items():
        one, found = two_matrices(), []
        expected_P = trained(one, make(one.parameters()))
        moved = (expected_P - flat(two_matrices().parameters())).abs().max().item()
        for way, build in ways.items():
            net = two_matrices()
            try:
                apart = (trained(net, build(net, make), ranks.rank, ranks.world_size) - expected_P).abs().max().item()
                found.append(f"{way}: {_judged(apart, moved)}")
            except (RuntimeError, ValueError) as error:
                found.append(f"{way}: error ({shorten(str(error).splitlines()[0], 36, placeholder=' ...')})")
        say_once(f"{name}:\n  {'; '.join(found)}")


def _judged(apart, moved):
    if apart < 1e-10:
        return "as one process"
    off = f"off by {apart:.4f} of {moved:.3f}"
    return f"as one process up to bf16 ({off})" if apart < 0.05 * moved else off


def draw_held_and_sent(ranks, table, P):
    """Draw bytes held and volume communicated, by strategy, on their formulas; return the ratio furthest from 1.

    table: {name: (Bytes held, wire.Seen, Bytes by formula, volumes by formula)}.
    """
    rows, off = {}, []  # ratios of measured to formula
    for name, (held, seen, held_formula, sent_formula) in table.items():
        sent = sum(volumes(seen, P).values())
        both = {op: (2 if op == "all_reduce" else 1) * each.payload_bytes for op, each in sent_formula.items()}
        expected = sum(both.values()) / (4 * P)
        rows[name] = held, held_formula, sent, expected, f"{len(seen.calls)} calls"
        here, there = (sum(getattr(each, kind) for kind in bars.KINDS) for each in (held, held_formula))
        off += [here / there, sent / expected if expected else 1.0]
    if ranks.rank == 0:
        figure = bars.held_and_sent(rows, P, f"rank 0 of {ranks.world_size}, after backward")
        show(figure, "bytes", "bars of bytes held and of volume communicated, by strategy, on their formulas")
    return max(off, key=lambda ratio: abs(ratio - 1))


def draw_memory(ranks, timelines):
    """Draw the memory of a step of several strategies, {name: (MemoryTimeline, gathered bytes by formula)}."""
    if ranks.rank:
        return
    figure = memory_stacks({name: seen.samples for name, (seen, _) in timelines.items()})
    show(figure, "memory", "memory of a step of ddp, fsdp and grad_op on one scale, by kind and phase")
    for name, (seen, formula) in timelines.items():
        gathered, other = seen.highest("unsharded_parameters") / 1e6, seen.highest("other") / 1e6
        say(f"{name:20} gathered {gathered:.2f} MB at most, formula {formula / 1e6:.2f}; other {other:.2f}")
    if recorded_runs.runs("06"):
        peaks = {name: seen.peak.total for name, (seen, _) in timelines.items()}
        here = {f"peak, {name}": (peak, "bytes", f"peak_bytes.{name}") for name, peak in peaks.items()}
        say(recorded_runs.beside("06", here))


def draw_spans(ranks, spans, title, until_s, name):
    """Draw when each rank gathers and computes on the virtual network."""
    if ranks.rank == 0:
        alt = "hatched gathers and solid blocks on each rank, one behind the other or overlapping"
        show(gantt(spans, title, virtual=True, until_s=until_s), name, alt)
