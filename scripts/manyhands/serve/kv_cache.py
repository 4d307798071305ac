"""Keys and values of the positions that were computed: the plain cache, one rectangle for a batch of equal lengths.

    cache = KVCache(capacity=64)
    logits_BTV = cached_logits(model, prompt_BT, cache)     # prefill: T positions at once
    logits_B1V = cached_logits(model, next_B1, cache)       # decode: one position, and the cache behind it

Bytes of a full cache: 2 N B T D times the size of a number. `paged_cache` has the one for a server.
Shapes: B sequences, T new positions, S positions in all, H heads of size E, N layers.
"""

import torch
import torch.nn.functional as F


class KVCache:
    """Room for `capacity` positions; `length` of them are filled. Made on first use, as the layers' keys are."""

    def __init__(self, capacity):
        self.capacity, self.length = capacity, 0
        self.layers = {}  # number -> (keys, values), each [B, H, capacity, E]

    def attend(self, layer, q_BHTE, k_BHTE, v_BHTE):
        """Store T new positions of a layer; what attention finds among all positions so far: [B, H, T, E].

        Raises ValueError if there is no room.
        """
        B, H, T, E = k_BHTE.shape
        stop = self.length + T
        if stop > self.capacity:
            raise ValueError(f"{stop} positions do not fit into a cache of {self.capacity}; use a larger one")
        if layer not in self.layers:
            self.layers[layer] = tuple(k_BHTE.new_empty(B, H, self.capacity, E) for _ in range(2))
        keys, values = self.layers[layer]
        keys[:, :, self.length : stop], values[:, :, self.length : stop] = k_BHTE, v_BHTE
        if self.length == 0:  # the same call as without a cache, and so the same bits
            return F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)
        mask_TS = None
        if T > 1:
            positions_T1 = torch.arange(self.length, stop, device=k_BHTE.device)[:, None]
            mask_TS = torch.arange(stop, device=k_BHTE.device) <= positions_T1
        return F.scaled_dot_product_attention(q_BHTE, keys[:, :, :stop], values[:, :, :stop], attn_mask=mask_TS)

    def num_bytes(self):
        """Bytes of the whole cache."""
        return sum(part.nbytes for pair in self.layers.values() for part in pair)
