"""The paged cache: keys and values in blocks that are allocated once, so that sequences of any lengths share the room
and common beginnings. `BlockPool` keeps the books, `PagedCache` has the tensors.

    pool = BlockPool(num_blocks=256, block_size=16)
    table = pool.match(digests)                  # blocks of the same beginning, shared: no computation
    table += pool.allocate(3)                        # three more, or None if there are not so many
    pool.seal(table[0], digest)                  # full and computed: others may share it from now on
    pool.deallocate(table)                          # a sealed block stays findable until its room is needed

    cache = PagedCache(config, num_blocks=256, block_size=16)
    attend = cache.attend_for(tables, lengths, positions_N)    # once per step, for all layers
    logits_1NV = decoder.run(model, ids_1N, positions_1N, attend)    # the new positions of all sequences, in a row

Position i of a sequence lies in block table[i // block_size], at place i % block_size. A block is found by a digest of
*everything before its end*: its own tokens and all earlier ones. Where the model changes, all blocks are forgotten.
Attention gathers a sequence's blocks into one tensor: on a GPU a kernel reads them where they lie (Kwon et al. 2023,
PagedAttention); the bookkeeping is the same.
Shapes: N new positions in all, B sequences with T of them each, S gathered positions, P blocks of a table, H heads (E).
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable
from itertools import groupby

import torch
import torch.nn.functional as F


def chained_digests(ids: list[int], block_size: int, known=()) -> list[bytes]:
    """The digests of all full blocks of a list of ids, as bytes; `known` are those of its first blocks.

    Each covers the one before it, so that equal blocks after different beginnings differ.
    """
    digests = list(known)
    for i in range(len(digests), len(ids) // block_size):
        content = array("q", ids[i * block_size : (i + 1) * block_size]).tobytes()
        digests.append(hashlib.sha256(b"".join(digests[-1:]) + content).digest())
    return digests


class BlockPool:
    """Bookkeeping for `num_blocks` blocks of `block_size` positions each. Numbers of blocks count from 0."""

    def __init__(self, num_blocks, block_size):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size} positions are no cache; use at least 1 of each")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.empty = list(range(num_blocks - 1, -1, -1))  # never filled, or forgotten
        self.unused = {}  # sealed blocks that nobody holds, as keys; the first was released first
        self.found_by = {}  # digest -> block
        self.digest_of = {}  # block -> digest
        self.holders = Counter()  # block -> sequences that hold it
        self.taken = []  # since somebody last cleared this list: they hold what others have left there

    def blocks_for(self, positions: int) -> int:
        """How many blocks hold so many positions."""
        return -(-positions // self.block_size)

    def available(self) -> int:
        """Blocks that nobody holds."""
        return len(self.empty) + len(self.unused)

    def held(self) -> int:
        """Blocks that somebody holds, a shared one once."""
        return self.num_blocks - self.available()

    def match(self, digests: list[bytes]) -> list[int]:
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

    def allocate(self, n: int) -> list[int] | None:
        """n blocks of unknown content, or None: then nothing has changed. The longest unused are forgotten first."""
        if n > self.available():
            return None
        blocks = []
        for _ in range(n):
            if self.empty:
                block = self.empty.pop()
            else:
                del self.unused[block := next(iter(self.unused))]
                del self.found_by[self.digest_of.pop(block)]
            self.holders[block] += 1
            blocks.append(block)
        self.taken += blocks
        return blocks

    def seal(self, block: int, digest: bytes) -> None:
        """The block is full and computed. Of two with the same content the first stays the one that is found."""
        if digest not in self.found_by and block not in self.digest_of:
            self.found_by[digest], self.digest_of[block] = block, digest

    def deallocate(self, table: list[int]) -> None:
        """One holder fewer for each block. The last block of a beginning is forgotten before the first one."""
        for block in reversed(table):
            self.holders[block] -= 1
            if self.holders[block] > 0:
                continue
            del self.holders[block]
            if block in self.digest_of:
                self.unused[block] = None
            else:
                self.empty.append(block)

    def forget_all(self) -> None:
        """Nothing is found by its content any more: the model has changed. Who holds a block keeps it."""
        self.empty += self.unused
        self.unused.clear()
        self.found_by.clear()
        self.digest_of.clear()


class PagedCache:
    """The tensors of `num_blocks` blocks for each layer; who holds which is the pool's business."""

    def __init__(self, config, num_blocks, block_size, dtype=torch.float32, device="cpu"):
        # keys and values of a position side by side: one write and one gather for both; one block more stays zero
        shape = (config.n_layer, num_blocks + 1, block_size, config.n_head, 2, config.n_embd // config.n_head)
        self.block_size, self.device, self.zero = block_size, torch.device(device), num_blocks
        self.store = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = self.store.unbind()

    def clear(self, blocks: list[int]) -> None:
        """Zeros where another sequence may have left NaN: a mask adds to scores, and NaN stays NaN."""
        if blocks:
            self.store[:, blocks] = 0

    def attend_for(self, tables: list[list[int]], lengths: list[int], positions_N: torch.Tensor) -> Callable:
        """attend(layer, q, k, v), all [1, H, N, E], for a row of new positions: lengths[b] of one with tables[b].

        Sequences of equal lengths lie side by side and look back as one batch; their tables may differ in length.
        """
        groups, first, begin = [], 0, 0
        for length, some in groupby(lengths):
            B = len(list(some))
            stop = begin + B * length
            positions_BT = positions_N[begin:stop].view(B, length)
            groups.append((slice(begin, stop), self._group(tables[first : first + B], positions_BT)))
            first, begin = first + B, stop
        slots_N = torch.cat([slots for _, (slots, _, _) in groups])

        def attend(layer, q_1HNE, k_1HNE, v_1HNE):
            store_PSH2E = self.layers[layer]
            new_NH2E = torch.stack((k_1HNE[0], v_1HNE[0]), dim=-2).transpose(0, 1)
            store_PSH2E.flatten(0, 1).index_copy_(0, slots_N, new_NH2E)
            found = []
            for part, (_, places_P, mask_B1TS) in groups:
                B = len(mask_B1TS)
                rows_BSH2E = store_PSH2E.index_select(0, places_P).view(B, -1, *store_PSH2E.shape[2:])
                keys_BHSE, values_BHSE = rows_BSH2E.transpose(1, 2).unbind(-2)
                q_BHTE = q_1HNE[0, :, part].unflatten(1, (B, -1)).transpose(0, 1)
                y_BHTE = F.scaled_dot_product_attention(q_BHTE, keys_BHSE, values_BHSE, attn_mask=mask_B1TS)
                found.append(y_BHTE.transpose(0, 1).flatten(1, 2))
            return (found[0] if len(found) == 1 else torch.cat(found, dim=1))[None]

        return attend

    def _group(self, tables, positions_BT):
        """Of sequences with equally many new positions: their places in the store, their tables, and who sees what."""
        longest = max(map(len, tables))
        # what a shorter table lacks reads zeros, and is masked
        tables_BP = torch.tensor([t + [self.zero] * (longest - len(t)) for t in tables], device=self.device)
        slots_BT = tables_BP.gather(1, positions_BT // self.block_size) * self.block_size
        slots_BT += positions_BT % self.block_size
        seen_BTS = torch.arange(longest * self.block_size, device=self.device) <= positions_BT[..., None]
        mask_B1TS = torch.zeros(seen_BTS.shape, dtype=self.layers[0].dtype, device=self.device)
        return slots_BT.flatten(), tables_BP.flatten(), mask_B1TS.masked_fill_(~seen_BTS, -torch.inf)[:, None]

    def num_bytes(self) -> int:
        """Bytes of all blocks, used or not: what the server takes at its start, and never more."""
        return self.store.nbytes
