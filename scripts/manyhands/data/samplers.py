"""Choose the items of a data set that this rank reads: its share of all, or a random draw.

    sampler = PartitionedSampler(len(dataset), rank, world_size, seed=1)
    loader = DataLoader(dataset, batch_size=b, sampler=sampler)
    for epoch in range(sampler.epoch, epochs):      # sampler.epoch: 0, or where load_state_dict() left off
        sampler.set_epoch(epoch)
        for batch in loader: ...

Both are torch Samplers, follow from their numbers alone (ranks say nothing to each other), and resume from a small
state that fits into JSON. Save rank 0's, load it on every rank.

A DataLoader asks for indices before it needs them, with workers many batches ahead, so what a sampler has *given* is
not what the training has *used*: tell `state_dict(position)` how far the training is.
"""

import numpy as np
from torch.utils.data import Sampler


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
