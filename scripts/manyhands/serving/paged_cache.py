"""Keys and values in blocks of a pool that is allocated once: sequences of any lengths share the room and common beginnings.

    cache = PagedCache(config, num_blocks=256, block_size=16)
    attend = cache.attend_for(tables, positions_BT)       # once per step, for all layers
    logits_BTV = run(model, ids_BT, positions_BT, attend)

Position i of a sequence lies in block tables[b][i // block_size], at place i % block_size. Attention gathers a sequence's
blocks into one tensor: on a GPU a kernel reads them where they lie (Kwon et al. 2023); the bookkeeping is the same.
Shapes: B sequences, T new positions, S positions that are gathered, P blocks of a table, H heads of size E.
"""

import torch
import torch.nn.functional as F


class PagedCache:
    """The tensors of `num_blocks` blocks for each layer; who holds which is `block_pool`'s business."""

    def __init__(self, config, num_blocks, block_size, dtype=torch.float32, device="cpu", num_heads=None):
        # keys and values of a position side by side: one write and one gather for both
        shape = (num_blocks, block_size, num_heads or config.n_head, 2, config.n_embd // config.n_head)
        self.block_size, self.device = block_size, torch.device(device)
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layer)]

    def attend_for(self, tables, positions_BT):
        """attend(layer, q, k, v) for new positions of sequences with these tables (lists of blocks, of any lengths)."""
        longest = max(map(len, tables))
        # what a shorter table lacks reads block 0, and is masked
        tables_BP = torch.tensor(
            [table + [0] * (longest - len(table)) for table in tables], device=self.device
        )
        slots_BT = tables_BP.gather(1, positions_BT // self.block_size) * self.block_size
        slots_BT += positions_BT % self.block_size
        seen_BTS = torch.arange(longest * self.block_size, device=self.device) <= positions_BT[..., None]
        mask_B1TS = torch.zeros(seen_BTS.shape, dtype=self.layers[0].dtype, device=self.device)
        mask_B1TS = mask_B1TS.masked_fill_(~seen_BTS, -torch.inf)[:, None]
        slots, blocks = slots_BT.flatten(), tables_BP.flatten()

        def attend(layer, q_BHTE, k_BHTE, v_BHTE):
            store_PSH2E = self.layers[layer]
            new_BTH2E = torch.stack((k_BHTE, v_BHTE), dim=-2).transpose(1, 2)
            store_PSH2E.flatten(0, 1).index_copy_(0, slots, new_BTH2E.flatten(0, 1))
            rows_BSH2E = store_PSH2E.index_select(0, blocks).view(len(tables), -1, *store_PSH2E.shape[2:])
            keys_BHSE, values_BHSE = rows_BSH2E.transpose(1, 2).unbind(-2)
            return F.scaled_dot_product_attention(q_BHTE, keys_BHSE, values_BHSE, attn_mask=mask_B1TS)

        return attend

    def num_bytes(self):
        """Bytes of all blocks, used or not: what the server takes at its start, and never more."""
        return sum(store.nbytes for store in self.layers)
