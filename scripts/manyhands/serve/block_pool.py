"""Blocks of a paged cache: who holds which, and which of them can be found again by what they contain. No torch.

    pool = BlockPool(num_blocks=256, block_size=16)
    table = pool.match(digests)                  # blocks of the same beginning, shared: no computation
    table += pool.take(3)                        # three more, or None if there are not so many
    pool.seal(table[0], digest)                  # full and computed: others may share it from now on
    pool.release(table)                          # a sealed block stays findable until its room is needed

A block is found by a digest of *everything before its end*: its own tokens, all earlier ones, and a salt (which model,
and whatever else its contents depend on). Paging: Kwon et al. 2023, PagedAttention.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict


def chained_digests(ids, block_size, salt, known=()):
    """The digests of all full blocks of a list of ids, as bytes; `known` are those of its first blocks.

    Each covers the one before it, so that equal blocks after different beginnings differ.
    """
    digests = list(known)
    for i in range(len(digests), len(ids) // block_size):
        before = digests[-1] if digests else hashlib.sha256(salt.encode()).digest()
        content = array("q", ids[i * block_size : (i + 1) * block_size]).tobytes()
        digests.append(hashlib.sha256(before + content).digest())
    return digests


class BlockPool:
    """Bookkeeping for `num_blocks` blocks of `block_size` positions each. Numbers of blocks count from 0."""

    def __init__(self, num_blocks, block_size):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size} positions are no cache; use at least 1 of each")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.empty = list(range(num_blocks - 1, -1, -1))  # never filled, or forgotten
        self.unused = OrderedDict()  # block -> digest, sealed and held by nobody; the first was released first
        self.found_by = {}  # digest -> block
        self.digest_of = {}  # block -> digest
        self.holders = Counter()  # block -> sequences that hold it

    def blocks_for(self, positions):
        """How many blocks hold so many positions."""
        return -(-positions // self.block_size)

    def available(self):
        """Blocks that nobody holds."""
        return len(self.empty) + len(self.unused)

    def held(self):
        """Blocks that somebody holds, a shared one once."""
        return self.num_blocks - self.available()

    def match(self, digests):
        """The blocks of the longest known beginning, held from now on by one more."""
        table = []
        for digest in digests:
            block = self.found_by.get(digest)
            if block is None:
                break
            self.unused.pop(block, None)
            self.holders[block] += 1
            table.append(block)
        return table

    def take(self, n):
        """n blocks of unknown content, or None: then nothing has changed. The longest unused are forgotten first."""
        if n > self.available():
            return None
        blocks = []
        for _ in range(n):
            if self.empty:
                block = self.empty.pop()
            else:
                block, digest = self.unused.popitem(last=False)
                self._forget(block, digest)
            self.holders[block] += 1
            blocks.append(block)
        return blocks

    def seal(self, block, digest):
        """The block is full and computed. Of two with the same content the first stays the one that is found."""
        if digest not in self.found_by and block not in self.digest_of:
            self.found_by[digest], self.digest_of[block] = block, digest

    def release(self, table):
        """One holder fewer for each block. The last block of a beginning is forgotten before the first one."""
        for block in reversed(table):
            self.holders[block] -= 1
            if self.holders[block] > 0:
                continue
            if self.holders.pop(block) < 0:
                raise AssertionError(f"block {block} was released more often than it was taken")
            if block in self.digest_of:
                self.unused[block] = self.digest_of[block]
            else:
                self.empty.append(block)

    def forget_all(self):
        """Nothing is found by its content any more: the model has changed. Who holds a block keeps it."""
        self.empty += self.unused
        self.unused.clear()
        self.found_by.clear()
        self.digest_of.clear()

    def _forget(self, block, digest):
        del self.found_by[digest], self.digest_of[block]
