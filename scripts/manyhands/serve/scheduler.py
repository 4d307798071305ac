"""Continuous batching: at each step, which sequences compute which positions. Lists and counters only, no torch.

    scheduler = Scheduler(BlockPool(256, 16), max_running=32, prefill_tokens=256)
    scheduler.add(sequence)                        # waits its turn
    for work in scheduler.plan():                  # one step: work.sequence computes positions work.start to work.stop
        ...                                        # and grows by a token if work.draws
        scheduler.computed(work)

Sequences join and leave between any two steps (Yu et al. 2022, Orca, section 3.1). A step has at most `prefill_tokens`
positions of prompts, so that a long prompt does not hold up those that are writing. A sequence is admitted when blocks
for all it has so far, and one more, are free. When blocks run out the youngest gives its own back, and waits; it is
computed again later, and continues as if nothing had been, because its numbers belong to places (`uniforms`).
"""

from collections import deque
from dataclasses import dataclass, field

from manyhands.gpt.sampling import Sequence
from manyhands.serve.paged_cache import BlockPool, chained_digests


@dataclass(eq=False)
class CachedSequence(Sequence):
    """One request's tokens, and where their keys and values lie."""

    num_computed_tokens: int = field(default=0, init=False)  # positions whose keys and values lie in `block_table`
    block_table: list[int] = field(default_factory=list, init=False)
    digests: list[bytes] = field(default_factory=list, init=False)
    num_cached_tokens: int = field(default=0, init=False)  # positions of the prompt that were found in the cache
    num_preemptions: int = field(default=0, init=False)  # times that it gave its blocks back
    siblings: "list[CachedSequence]" = field(default_factory=list, init=False)  # of the same request, itself among them

    @property
    def started(self) -> bool:
        """Whether the request has a token: what follows must come from the same weights."""
        return any(len(s.ids) > s.prompt_length for s in self.siblings or [self])


@dataclass(frozen=True)
class Work:
    """Positions start to stop - 1 of a sequence. With stop == len(ids) the next token is drawn from them."""

    sequence: CachedSequence
    start: int
    stop: int

    @property
    def draws(self) -> bool:
        return self.stop == len(self.sequence.ids)


class Scheduler:
    """Who waits, who runs, and what is next."""

    def __init__(self, pool: BlockPool, max_running: int, prefill_tokens: int):
        self.pool, self.max_running, self.prefill_tokens = pool, max_running, prefill_tokens
        self.waiting: deque[CachedSequence] = deque()
        self.running: list[CachedSequence] = []  # in the order of admission
        self.hold_new = False  # no sequence starts: the model is about to change

    def add(self, sequence: CachedSequence) -> None:
        """Queue a sequence; all blocks together must hold it (`Engine` sees to that)."""
        self.waiting.append(sequence)

    def cancel(self, sequence: CachedSequence) -> None:
        """Take a sequence out wherever it is; its blocks are free at once. One that has finished stays as it is."""
        if sequence.finish is None:
            sequence.finish = "cancelled"
            (self.running if sequence in self.running else self.waiting).remove(sequence)
            self._free(sequence)

    def plan(self) -> list[Work]:
        """The Work of one step: first one position of each that is writing, then prompts. Empty: nothing to do."""
        for sequence in list(self.running):  # the oldest first: it is never the one that gives way
            if sequence in self.running:
                self._make_room(sequence)
        writing = [s for s in self.running if s.num_computed_tokens == len(s.ids) - 1]
        works = [Work(s, s.num_computed_tokens, s.num_computed_tokens + 1) for s in writing]
        reading = [s for s in self.running if s.num_computed_tokens < len(s.ids) - 1]
        budget = self.prefill_tokens
        while budget > 0 and (sequence := reading.pop(0) if reading else self._admit()) is not None:
            stop = min(len(sequence.ids), sequence.num_computed_tokens + budget)
            works.append(Work(sequence, sequence.num_computed_tokens, stop))
            budget -= stop - sequence.num_computed_tokens
        return works

    def computed(self, work: Work) -> None:
        """The positions of `work` lie in the cache; who has finished makes room."""
        sequence, size = work.sequence, self.pool.block_size
        sequence.num_computed_tokens = work.stop
        sequence.digests = chained_digests(sequence.ids, size, sequence.digests)
        for i in range(work.start // size, work.stop // size):
            self.pool.seal(sequence.block_table[i], sequence.digests[i])
        if sequence.finish is not None:
            self.running.remove(sequence)
            self._free(sequence)

    def unfinished(self) -> list[CachedSequence]:
        """Sequences that have drawn or computed something with the present model."""
        return [*self.running, *(s for s in self.waiting if s.started)]

    def _admit(self):
        """The next sequence in the queue, with blocks for all its tokens and one more; None: not now."""
        if not self.waiting or len(self.running) >= self.max_running:
            return None
        sequence = self.waiting[0]
        if self.hold_new and not sequence.started:
            return None
        size = self.pool.block_size
        sequence.digests = chained_digests(sequence.ids, size, sequence.digests)
        # at least the last token is computed: the next one is drawn from its logits
        table = self.pool.match(sequence.digests[: (len(sequence.ids) - 1) // size])
        more = self.pool.allocate(self.pool.blocks_for(len(sequence.ids) + 1) - len(table))
        if more is None:
            self.pool.deallocate(table)
            return None
        self.waiting.popleft()
        self.running.append(sequence)
        sequence.num_computed_tokens = len(table) * size
        if len(sequence.ids) == sequence.prompt_length:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.block_table = table + more
        return sequence

    def _make_room(self, sequence):
        """A block for the position that `sequence` computes next, if need be by taking those of the youngest."""
        while len(sequence.block_table) < self.pool.blocks_for(len(sequence.ids)):
            if block := self.pool.allocate(1):
                sequence.block_table += block
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            assert self.running, "all blocks together must hold one sequence"
            if youngest is sequence:
                return

    def _preempt(self, sequence):
        """Take the blocks of a running sequence. It waits in front of all others, and is computed again."""
        self.running.remove(sequence)
        self._free(sequence)
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _free(self, sequence):
        self.pool.deallocate(sequence.block_table)
        sequence.block_table, sequence.num_computed_tokens = [], 0
