"""Schedule continuous batching: which sequences compute which positions at each step, without torch.

    scheduler = Scheduler(BlockPool(256, 16), max_running=32, prefill_tokens=256)
    scheduler.add(sequence)                        # enters the queue
    for work in scheduler.plan():                  # one step: work.sequence computes positions work.start to work.stop
        ...                                        # and grows by a token if work.draws
        scheduler.computed(work)

Sequences join and leave between any two steps (Yu et al. 2022, Orca, section 3.1). A step has at most `prefill_tokens`
positions of prompts, so that a long prompt does not delay decoding sequences. A sequence is admitted when blocks for
its tokens and one more are free. When blocks run out, the youngest sequence is preempted: it gives its blocks back and
waits. It is recomputed later and continues with the same tokens, because random numbers depend on positions
(`uniforms`).
"""

from collections import deque
from dataclasses import dataclass, field

from manyhands.gpt.sampling import Sequence
from manyhands.serve.paged_cache import BlockPool, chained_digests


@dataclass(eq=False)
class CachedSequence(Sequence):
    """One request's tokens, and the blocks of their keys and values."""

    num_computed_tokens: int = field(default=0, init=False)  # positions whose keys and values are in `block_table`
    block_table: list[int] = field(default_factory=list, init=False)
    digests: list[bytes] = field(default_factory=list, init=False)
    num_cached_tokens: int = field(default=0, init=False)  # positions of the prompt that were found in the cache
    num_preemptions: int = field(default=0, init=False)  # number of preemptions
    siblings: "list[CachedSequence]" = field(default_factory=list, init=False)  # of its request, itself included
    starts: list[int] = field(default_factory=list, init=False)  # of each position: where its document begins

    def starts_of_documents(self, separator: int | None) -> list[int]:
        """Return for each id where its document begins, as `gpt.model.within_documents` has it; all 0 without one."""
        for i in range(len(self.starts), len(self.ids)):
            self.starts.append(i if self.ids[i] == separator else self.starts[-1] if i else 0)
        return self.starts

    @property
    def started(self) -> bool:
        """Return whether the request has a token: its next tokens must come from the same weights."""
        return any(len(s.ids) > s.prompt_length for s in self.siblings or [self])


@dataclass(frozen=True)
class Work:
    """Positions start to stop - 1 of a sequence. If stop == len(ids), the next token is drawn from them."""

    sequence: CachedSequence
    start: int
    stop: int

    @property
    def draws(self) -> bool:
        return self.stop == len(self.sequence.ids)


class Scheduler:
    """The waiting and the running sequences, and the plan of the next step."""

    def __init__(self, pool: BlockPool, max_running: int, prefill_tokens: int):
        self.pool, self.max_running, self.prefill_tokens = pool, max_running, prefill_tokens
        self.waiting: deque[CachedSequence] = deque()
        self.running: list[CachedSequence] = []  # in the order of admission
        self.hold_new = False  # True while no sequence may start, because the model is about to change

    def add(self, sequence: CachedSequence) -> None:
        """Queue a sequence; all blocks together must be able to hold it (`Engine` checks that)."""
        self.waiting.append(sequence)

    def cancel(self, sequence: CachedSequence) -> None:
        """Remove a sequence, waiting or running, and free its blocks immediately. A finished one is unchanged."""
        if sequence.finish is None:
            sequence.finish = "cancelled"
            (self.running if sequence in self.running else self.waiting).remove(sequence)
            self._free(sequence)

    def plan(self) -> list[Work]:
        """Return the Work of one step: first one position of each decoding sequence, then prompts. It may be empty."""
        for sequence in list(self.running):  # oldest first, so that it is never preempted
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
        """Record that the positions of `work` are in the cache, and free finished sequences' blocks."""
        sequence, size = work.sequence, self.pool.block_size
        sequence.num_computed_tokens = work.stop
        sequence.digests = chained_digests(sequence.ids, size, sequence.digests)
        for i in range(work.start // size, work.stop // size):
            self.pool.seal(sequence.block_table[i], sequence.digests[i])
        if sequence.finish is not None:
            self.running.remove(sequence)
            self._free(sequence)

    def unfinished(self) -> list[CachedSequence]:
        """Return the sequences that have drawn or computed something with the current model."""
        return [*self.running, *(s for s in self.waiting if s.started)]

    def _admit(self):
        """Admit the next sequence in the queue, with blocks for its tokens and one more, or return None."""
        if not self.waiting or len(self.running) >= self.max_running:
            return None
        sequence = self.waiting[0]
        if self.hold_new and not sequence.started:
            return None
        size = self.pool.block_size
        sequence.starts.clear()  # another model may have read it before
        sequence.digests = chained_digests(sequence.ids, size, sequence.digests)
        # compute at least the last token: the next one is drawn from its logits
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
        """Provide a block for the next position of `sequence`, if necessary by preempting the youngest."""
        while len(sequence.block_table) < self.pool.blocks_for(len(sequence.ids)):
            if block := self.pool.allocate(1):
                sequence.block_table += block
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            assert self.running, "all blocks together must be able to hold one sequence"
            if youngest is sequence:
                return

    def _preempt(self, sequence):
        """Take the blocks of a running sequence; it waits in front of all others and is recomputed."""
        self.running.remove(sequence)
        self._free(sequence)
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _free(self, sequence):
        self.pool.deallocate(sequence.block_table)
        sequence.block_table, sequence.num_computed_tokens = [], 0
