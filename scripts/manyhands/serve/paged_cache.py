"""Keep keys and values in blocks that are allocated once, so that sequences of any lengths share memory and common
prefixes. `BlockPool` does the bookkeeping, `PagedCache` has the tensors.

    pool = BlockPool(num_blocks=256, block_size=16)
    table = pool.match(digests)                  # shared blocks of a common prefix: no computation
    table += pool.allocate(3)                        # three more, or None if too few are free
    pool.seal(table[0], digest)                  # full and computed: others may share it from now on
    pool.deallocate(table)                          # a sealed block can be found until it is reused

    cache = PagedCache(config, num_blocks=256, block_size=16)
    attend = cache.attend_for(tables, lengths, positions_N, starts_N)    # once per step, for all layers
    logits_1NV = decoder.run(model, ids_1N, positions_1N, attend)    # the new positions of all sequences, in a row

Position i of a sequence is in block table[i // block_size], at place i % block_size. A block is found by a digest of
*everything before its end*: its own tokens and all earlier ones. When the model changes, all blocks are forgotten.
Attention gathers a sequence's blocks into one tensor; on a GPU a kernel would read them in place (Kwon et al. 2023,
PagedAttention); the bookkeeping is the same.
Shapes: N new positions in all, B sequences with T of them each, S gathered positions, P blocks of a table, H heads of
queries and K of keys (E).
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable
from itertools import groupby

import torch
import torch.nn.functional as F


def chained_digests(ids: list[int], block_size: int, known=()) -> list[bytes]:
    """Return the digests of all full blocks of a list of ids, as bytes; `known` are those of its first blocks.

    Each digest includes the previous one, so that equal blocks after different prefixes differ.
    """
    digests = list(known)
    for i in range(len(digests), len(ids) // block_size):
        content = array("q", ids[i * block_size : (i + 1) * block_size]).tobytes()
        digests.append(hashlib.sha256(b"".join(digests[-1:]) + content).digest())
    return digests


class BlockPool:
    """Bookkeeping for `num_blocks` blocks of `block_size` positions each, numbered from 0."""

    def __init__(self, num_blocks, block_size):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size} positions hold nothing; use at least 1 of each")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.empty = list(range(num_blocks - 1, -1, -1))  # never filled, or forgotten
        self.unused = {}  # sealed blocks without a holder, as keys, in order of release
        self.found_by = {}  # digest -> block
        self.digest_of = {}  # block -> digest
        self.holders = Counter()  # block -> number of sequences that hold it
        self.taken = []  # allocated since this list was last cleared: they contain other sequences' data

    def blocks_for(self, positions: int) -> int:
        """Return the number of blocks for a number of positions."""
        return -(-positions // self.block_size)

    def available(self) -> int:
        """Return the number of blocks without a holder."""
        return len(self.empty) + len(self.unused)

    def held(self) -> int:
        """Return the number of held blocks, counting a shared one once."""
        return self.num_blocks - self.available()

    def match(self, digests: list[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix and add a holder to each."""
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
        """Return n blocks of undefined content, or None without any change. The longest unused are reused first."""
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
        """Mark a block as full and computed. Of two with the same content, the first one is found."""
        if digest not in self.found_by and block not in self.digest_of:
            self.found_by[digest], self.digest_of[block] = block, digest

    def deallocate(self, table: list[int]) -> None:
        """Remove one holder from each block. The last block of a prefix is reused before the first one."""
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
        """Forget all blocks' contents because the model has changed. Held blocks stay held."""
        self.empty += self.unused
        self.unused.clear()
        self.found_by.clear()
        self.digest_of.clear()


FIRST_BLOCKS = 256  # of a cache: it grows when more are in use


class PagedCache:
    """The tensors of up to `num_blocks` blocks for each layer, which grow with use; the pool manages holders."""

    def __init__(self, config, num_blocks, block_size, dtype=torch.float32, device="cpu", heads=None):
        """Make a cache of the model's heads of keys, or of fewer where tensor ranks share them out."""
        # keys and values of a position are adjacent: one write and one gather for both; block b is at b + 1, and the
        # first one stays zero
        heads = heads or config.kv_heads
        shape = (config.n_layer, 1 + min(num_blocks, FIRST_BLOCKS), block_size, heads, 2, config.head_size)
        self.block_size, self.device, self.most = block_size, torch.device(device), num_blocks
        self._set(torch.zeros(shape, dtype=dtype, device=device))

    def _set(self, store):
        self.store, self.layers = store, store.unbind()

    def hold(self, blocks: int) -> None:
        """Make room for the first `blocks` blocks: at least twice as many as before, so that few copies are made."""
        if (now := self.store.shape[1] - 1) < blocks:
            more = min(self.most, max(2 * now, blocks)) - now
            self._set(
                torch.cat([self.store, self.store.new_zeros(len(self.store), more, *self.store.shape[2:])], dim=1)
            )

    def clear(self, blocks: list[int]) -> None:
        """Zero blocks in which another sequence may have left NaN: a mask adds to scores, and NaN stays NaN."""
        if blocks:
            self.hold(max(blocks) + 1)
            self.store[:, [block + 1 for block in blocks]] = 0

    def attend_for(
        self, tables: list[list[int]], lengths: list[int], positions_N: torch.Tensor, starts_N: torch.Tensor
    ) -> Callable:
        """Return attend(layer, q, k, v) for a row of new positions: lengths[b] with tables[b].

        Queries are [1, H, N, E], keys and values [1, K, N, E], and H / K neighbouring heads share them.
        Each attends to what stands from its document's start, in `starts_N`, up to itself.
        Sequences of equal lengths are adjacent and attend as one batch; their tables may differ in length.
        """
        self.hold(max(map(max, filter(None, tables)), default=-1) + 1)
        groups, first, begin = [], 0, 0
        for length, some in groupby(lengths):
            B = len(list(some))
            stop = begin + B * length
            both = positions_N[begin:stop].view(B, length), starts_N[begin:stop].view(B, length)
            groups.append((slice(begin, stop), self._group(tables[first : first + B], *both)))
            first, begin = first + B, stop
        slots_N = torch.cat([slots for _, (slots, _, _) in groups])

        def attend(layer, q_1HNE, k_1KNE, v_1KNE):
            store_PSK2E = self.layers[layer]
            grouped = q_1HNE.shape[1] > k_1KNE.shape[1]
            new_NK2E = torch.stack((k_1KNE[0], v_1KNE[0]), dim=-2).transpose(0, 1)
            store_PSK2E.flatten(0, 1).index_copy_(0, slots_N, new_NK2E)
            found = []
            for part, (_, places_P, mask_B1TS) in groups:
                B = len(mask_B1TS)
                rows_BSK2E = store_PSK2E.index_select(0, places_P).view(B, -1, *store_PSK2E.shape[2:])
                keys_BKSE, values_BKSE = rows_BSK2E.transpose(1, 2).unbind(-2)
                q_BHTE = q_1HNE[0, :, part].unflatten(1, (B, -1)).transpose(0, 1)
                y_BHTE = F.scaled_dot_product_attention(
                    q_BHTE, keys_BKSE, values_BKSE, attn_mask=mask_B1TS, enable_gqa=grouped
                )
                found.append(y_BHTE.transpose(0, 1).flatten(1, 2))
            return (found[0] if len(found) == 1 else torch.cat(found, dim=1))[None]

        return attend

    def _group(self, tables, positions_BT, starts_BT):
        """Return the places in the store, the tables and the mask of sequences with equally many new positions."""
        longest = max(map(len, tables))
        # missing blocks of a shorter table read zeros and are masked
        tables_BP = 1 + torch.tensor([t + [-1] * (longest - len(t)) for t in tables], device=self.device)
        slots_BT = tables_BP.gather(1, positions_BT // self.block_size) * self.block_size
        slots_BT += positions_BT % self.block_size
        places_S = torch.arange(longest * self.block_size, device=self.device)
        seen_BTS = (starts_BT[..., None] <= places_S) & (places_S <= positions_BT[..., None])
        mask_B1TS = torch.zeros(seen_BTS.shape, dtype=self.layers[0].dtype, device=self.device)
        return slots_BT.flatten(), tables_BP.flatten(), mask_B1TS.masked_fill_(~seen_BTS, -torch.inf)[:, None]

    def num_bytes(self) -> int:
        """Return the bytes of the blocks that there are so far, used or not."""
        return self.store.nbytes
