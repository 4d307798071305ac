"""Harness and plots of lesson 05: samplers that resume, and its plots."""

import math
import statistics

import numpy as np
from torch.utils.data import Sampler

from manyhands.plots import looks


class _Resumable(Sampler):
    """An epoch that can be left and taken up again. It ends at position `end`; its order follows from the rest."""

    def __init__(self, length, rank, world_size, end, seed, **more):
        if length < 0 or not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} of {world_size} has no share of {length} items; use 0 to {world_size - 1}")
        self.length, self.rank, self.world_size, self.seed = length, rank, world_size, seed
        self._end, self._settings = end, {"length": length, "seed": seed, **more}
        self._begin(epoch=0, start=0)

    def _begin(self, epoch, start):
        # start: the position in this epoch where iterating begins
        self.epoch, self.start, self._position = epoch, start, start

    def set_epoch(self, epoch):
        """Take the order of epoch `epoch`. Forget this, and every epoch has the order of the first.

        The epoch that `load_state_dict` named keeps its place, any other begins at its beginning.
        """
        if epoch != self.epoch:
            self._begin(epoch, start=0)

    def _give(self, mine, stride):
        """Yield the indices in `mine`; each moves the position by `stride`, until all ranks are at the end."""
        for taken, index in enumerate(mine, start=1):
            self._position = min(self.start + taken * stride, self._end)
            yield index
        self._position = self._end  # asked for more than there is: the others are at the end, too

    def state_dict(self, position=None):
        """Return where this epoch stands: {"epoch", "position", and what the order follows from}, whole numbers all.

        `position`: how far the training is; None: how far the indices were given; the same where nobody asks ahead.
        """
        return {"epoch": self.epoch, "position": self._position if position is None else position} | self._settings

    def load_state_dict(self, state):
        """Resume from a state. Raise ValueError if the state belongs to another order."""
        for name, own in self._settings.items():
            if state.get(name) != own:
                why = f"the state was saved with {name}={state.get(name)} and this sampler has {name}={own}"
                raise ValueError(f"{why}, which is another order; resume with {name}={state.get(name)}")
        if not 0 <= state["position"] <= self._end:
            raise ValueError(f"position={state['position']} cannot be; use a whole number from 0 to {self._end}")
        self._begin(state["epoch"], start=state["position"])


class PartitionedSampler(_Resumable):
    """This rank's share of the items 0 ... length-1: over the ranks, each item exactly once per epoch.

    All ranks shuffle alike, by (seed, epoch), so the order of an epoch is the same for any number of ranks. They take
    items in turns, as cards are dealt: rank r the r-th, the (r + n)-th, ... So step k trains on the same items on any
    number of ranks, as long as the global batch is the same. A *position* counts items of all ranks together, such as
    steps * global batch; that is why another number of ranks can resume there.

    If `length` is no multiple of `world_size`, some ranks have one item more, and a loop that runs until its own items
    end may hang: the others do not come to its last all-reduce. Choose one:
    - `drop_last=True`: equal lengths, up to world_size - 1 items less per epoch (other ones in each);
    - ceil(rounds / batch size) steps on all ranks: one with no items left adds zeros to the sums of losses and tokens;
    - `torch.distributed.algorithms.Join` around the loop.
    (torch's own DistributedSampler repeats items until the ranks are even.) The order takes 8 bytes per item and rank.
    """

    def __init__(self, length, rank, world_size, seed=0, shuffle=True, drop_last=False):
        """Raise ValueError for numbers that make no sense."""
        super().__init__(length, rank, world_size, end=length, seed=seed, shuffle=shuffle)
        self.shuffle, self.drop_last = shuffle, drop_last

    def order(self):
        """The whole epoch's order, all ranks together: int64 array [length]."""
        if not self.shuffle:
            return np.arange(self.length)
        return _stream(self.seed, self.epoch).permutation(self.length)

    def __iter__(self):
        """Every `iter()` begins at `start`: a second one without `set_epoch` gives the same again."""
        left = self.order()[self.start :]
        if self.drop_last:
            left = left[: self.rounds * self.world_size]
        return self._give(left[self.rank :: self.world_size].tolist(), stride=self.world_size)

    @property
    def rounds(self):
        """Return the number of items that the longest rank has left for the next iteration, equal on all ranks."""
        left = self.length - self.start
        return left // self.world_size if self.drop_last else -(-left // self.world_size)

    def __len__(self):
        """Return how many items this rank has left at the start of the next iteration."""
        if self.drop_last:
            return self.rounds
        return len(range(self.start + self.rank, self.length, self.world_size))


class DrawnSampler(_Resumable):
    """Each rank draws `num_samples` items per epoch at random, with replacement, from a separate stream.

    An epoch then is a number of draws: some items come twice, and of N items N draws miss (1 - 1/N)^N, about 37 %. In
    return nobody needs a common order. A *position* counts the draws of one rank.

    The stream follows from (seed, epoch, rank), which numpy's SeedSequence takes in side by side and mixes: two ranks
    or epochs never feed it the same, and by chance its 128 bits agree for two of a million streams once in 10^26 tries.

    It resumes bit for bit. With another number of ranks those that stay keep their streams.
    """

    def __init__(self, length, rank, world_size, num_samples, seed=0):
        """`num_samples`: this rank's per epoch. Raise ValueError for numbers that make no sense."""
        super().__init__(length, rank, world_size, end=num_samples, seed=seed, num_samples=num_samples)
        if length == 0:
            raise ValueError("length=0 leaves nothing to draw from; give at least one item")
        self.num_samples = num_samples

    def __iter__(self):
        """Every `iter()` begins at `start`: a second one without `set_epoch` gives the same again."""
        draws = _stream(self.seed, self.epoch, self.rank).integers(0, self.length, self.num_samples)
        return self._give(draws[self.start :].tolist(), stride=1)

    def __len__(self):
        """Return how many draws this rank has left at the start of the next iteration."""
        return self.num_samples - self.start


def _stream(seed, *key):
    """A generator for each (seed, *key), which SeedSequence lays side by side, the seed in 128 bits, and mixes."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def draw_times_read(readers):
    """Histograms of runs side by side: above how often a sequence was read, below by how many ranks.

    readers: {run: for each sequence the ranks that read it, one for each time}.
    """
    figure, (above, below) = looks.new_figure(9, 4.4, 2, len(readers))
    for top, bottom, (name, by) in zip(above, below, readers.items(), strict=True):
        for axes, numbers, what, ticks in (
            (top, [len(ranks) for ranks in by], "times read", range(2, 13, 2)),
            (bottom, [len(set(ranks)) for ranks in by], "different ranks that read it", range(1, 5)),
        ):
            axes.hist(numbers, bins=[x - 0.5 for x in range(1, 14)], color=looks.GREY, edgecolor=looks.INK)
            axes.set(xlabel=what, ylabel="sequences", title=f"run {name}", ylim=(0, 250), xticks=ticks)
            axes.set_xlim(0.4, ticks[-1] + 0.6)
    return figure


def draw_differences(pairs, limit, title, ylabel="|loss - loss of one rank|"):
    """|losses - those of one rank| at each update, on a logarithmic axis, and a line at `limit`.

    pairs: {name: (losses [steps], losses of one rank [steps])}, four at most. Equal losses have no point.
    """
    figure, axes = looks.new_figure(7.5, 3.6)
    for (name, (losses, of_one)), look in zip(pairs.items(), looks.ALTERNATIVES, strict=False):
        apart = (losses - of_one).abs().cpu().double()
        apart[apart == 0] = math.nan
        axes.semilogy(apart, ms=5, **look)
        if last := [step for step, there in enumerate(apart.isfinite().tolist()) if there][-1:]:
            looks.end_label(axes, last[0], apart[last[0]], name, look["color"])
    end = len(losses) - 1
    axes.axhline(limit, **looks.LIMIT)
    looks.note(axes, f"{limit:,g}", (0, limit), (0, 3), looks.LIMIT["color"])
    axes.set(xlabel="update", ylabel=ylabel, title=title, xlim=(-0.3, 1.35 * end + 0.3))
    axes.set_xticks(range(0, end + 1, max(1, end // 5)))
    return figure


def draw_curves(named, ylabel, title):
    """Draw one line per name, the first one wide, so that equal lines can be told. named: {name: values by update}."""
    figure, axes = looks.new_figure(7.5, 3.4)
    for (name, values), look, width in zip(named.items(), looks.ALTERNATIVES, (5, 1.6, 1.6), strict=False):
        axes.plot(values, **look | {"lw": width, "marker": "none"}, label=name)
    axes.legend(frameon=False)
    axes.set(xlabel="update", ylabel=ylabel, title=title)
    return figure


def draw_batch_growth(here, published, title):
    """Draw this model's noise scale and published batches, in tokens, against tokens read; both axes logarithmic.

    here: [[tokens read, noise scale in tokens], ...]. published: dicts with `name` and `points` of the same kind.
    """
    figure, axes = looks.new_figure(7.5, 3.6)
    series = {"noise scale here": here} | {f"batch of {one['name']}": one["points"] for one in published}
    for (name, points), look in zip(series.items(), looks.ALTERNATIVES, strict=False):
        x, y = zip(*points, strict=True)
        axes.loglog(x, y, **look | {"ms": 5})
        looks.note(axes, name, (x[0], y[0]), (0, 8), look["color"])
    axes.margins(y=0.15)
    axes.set(xlabel="tokens read", ylabel="tokens per update", title=title)
    return figure


def draw_by_rate(losses, advised, title):
    """Validation loss against learning rate: a panel for each optimizer, a curve for each batch.

    losses: {(optimizer, batch, rate): losses of its seeds}; advised: {optimizer: the rate of its dashed line}.
    """
    figure, (panels,) = looks.new_figure(10, 3.8, 1, len(advised), sharey=True, squeeze=False)
    for axes, kind in zip(panels, advised, strict=True):
        batches = list(dict.fromkeys(batch for optimizer, batch, _ in losses if optimizer == kind))
        for batch, look in zip(batches, looks.ALTERNATIVES, strict=False):
            runs = sorted((rate, found) for (o, b, rate), found in losses.items() if (o, b) == (kind, batch))
            middles, errors = looks.errorbars([found for _, found in runs], middle=statistics.mean)
            x = [rate for rate, _ in runs]
            axes.errorbar(x, middles, yerr=errors, **{**looks.WHISKERS, **look, "ms": 5})
            looks.note(axes, f"batch {batch}", (x[0], middles[0]), (2, 14), look["color"])
        axes.axvline(advised[kind], **looks.PREDICTED)
        place = {"xycoords": ("data", "axes fraction")}
        looks.note(axes, "the rule", (advised[kind], 1), (4, -10), looks.PREDICTED["color"], **place)
        axes.set(xscale="log", xlabel="learning rate", title=f"{kind}, {title}")
    panels[0].set_ylabel("validation loss")
    return figure


def draw_noise(sizes, measured, predicted):
    """Squared distance of a batch's gradient from that of everything, against the batch's size: points and a line."""
    figure, axes = looks.new_figure(5.6, 3.4)
    axes.loglog(sizes, predicted, **looks.PREDICTED)
    axes.loglog(sizes, measured, **looks.MEASURED, ls="none")
    known = "predicted: variance of one × (1/B - 1/256)"
    looks.end_label(axes, sizes[0], predicted[0], known, looks.PREDICTED["color"])
    axes.set(xlabel="sequences B", ylabel="squared distance", title="noise of the gradient of B sequences")
    axes.set_xticks(sizes, sizes)
    axes.minorticks_off()
    return figure


def draw_scaling(sizes, virtual_s, curves_s, speed_ups):
    """Left virtual step times on `sizes` ranks and curves up to many ranks, right this machine's speed-ups."""
    figure, (left, right) = looks.new_figure(10, 3.8, 1, 2)
    dotted = {"color": looks.ALTERNATIVES[2]["color"], "ls": ":", "lw": 1.6}
    styles = (looks.PREDICTED, looks.PREDICTED | {"ls": "-."}, dotted)
    for (name, seconds), look, up in zip(curves_s.items(), styles, (0, 1, -1), strict=True):
        left.loglog(range(1, len(seconds) + 1), [1e3 * s for s in seconds], **look)
        looks.end_label(left, len(seconds), 1e3 * seconds[-1], name, look["color"], up)
    left.loglog(sizes, [1e3 * s for s in virtual_s], **looks.MEASURED, ls="none")
    ticks = [1, 2, 4, 8, 16, 32, 64]
    left.set_xticks(ticks, ticks)
    left.set_yticks([2, 5, 10, 20], [2, 5, 10, 20])
    left.set(xlabel="ranks", ylabel="virtual ms per step", title="strong scaling (virtual)", xlim=(0.9, 400))
    left.minorticks_off()
    right.plot(sizes, sizes, **looks.PREDICTED)
    looks.end_label(right, sizes[-1], sizes[-1], "ideal", looks.PREDICTED["color"])
    measured = {name: [by_n[n] for n in sizes] for name, by_n in speed_ups.items()}
    looks.series_with_ends(right, sizes, measured, looks.ALTERNATIVES)
    right.set(xlabel="ranks", ylabel="speed-up", title="this machine", xticks=sizes)
    right.set(ylim=(0, None), xlim=(0.8, 1.25 * sizes[-1] + 0.2))
    return figure
