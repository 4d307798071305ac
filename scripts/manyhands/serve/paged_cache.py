"""Keys and values in blocks of a pool that is allocated once: sequences of any lengths share the room and common beginnings.

    cache = PagedCache(config, num_blocks=256, block_size=16)
    attend = cache.attend_for(tables, lengths, positions_N)    # once per step, for all layers
    logits_1NV = run(model, ids_1N, positions_1N, attend)      # the new positions of all sequences, one after another

Position i of a sequence lies in block tables[b][i // block_size], at place i % block_size. Attention gathers a sequence's
blocks into one tensor: on a GPU a kernel reads them where they lie (Kwon et al. 2023); the bookkeeping is the same.
Shapes: N new positions in all, B sequences with T of them each, S positions that are gathered, P blocks of a table, H heads of size E.
"""

from itertools import groupby

import torch
import torch.nn.functional as F


class PagedCache:
    """The tensors of `num_blocks` blocks for each layer; who holds which is `block_pool`'s business."""

    def __init__(self, config, num_blocks, block_size, dtype=torch.float32, device="cpu", num_heads=None):
        # keys and values of a position side by side: one write and one gather for both
        shape = (num_blocks, block_size, num_heads or config.n_head, 2, config.n_embd // config.n_head)
        self.block_size, self.device = block_size, torch.device(device)
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layer)]

    def attend_for(self, tables, lengths, positions_N):
        """attend(layer, q, k, v), all [1, H, N, E], for one row of new positions: lengths[b] of a sequence with tables[b].

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
            for part, (_, tables_BP, mask_B1TS) in groups:
                B = len(tables_BP)
                rows_BSH2E = store_PSH2E.index_select(0, tables_BP.flatten()).view(B, -1, *store_PSH2E.shape[2:])
                keys_BHSE, values_BHSE = rows_BSH2E.transpose(1, 2).unbind(-2)
                q_BHTE = q_1HNE[0, :, part].unflatten(1, (B, -1)).transpose(0, 1)
                y_BHTE = F.scaled_dot_product_attention(q_BHTE, keys_BHSE, values_BHSE, attn_mask=mask_B1TS)
                found.append(y_BHTE.transpose(0, 1).flatten(1, 2))
            return (found[0] if len(found) == 1 else torch.cat(found, dim=1))[None]

        return attend

    def _group(self, tables, positions_BT):
        """Of sequences with equally many new positions: their places in the store, their tables, and who sees what."""
        longest = max(map(len, tables))
        # what a shorter table lacks reads block 0, and is masked
        tables_BP = torch.tensor([table + [0] * (longest - len(table)) for table in tables], device=self.device)
        slots_BT = tables_BP.gather(1, positions_BT // self.block_size) * self.block_size
        slots_BT += positions_BT % self.block_size
        seen_BTS = torch.arange(longest * self.block_size, device=self.device) <= positions_BT[..., None]
        mask_B1TS = torch.zeros(seen_BTS.shape, dtype=self.layers[0].dtype, device=self.device)
        return slots_BT.flatten(), tables_BP, mask_B1TS.masked_fill_(~seen_BTS, -torch.inf)[:, None]

    def num_bytes(self):
        """Bytes of all blocks, used or not: what the server takes at its start, and never more."""
        return sum(store.nbytes for store in self.layers)
