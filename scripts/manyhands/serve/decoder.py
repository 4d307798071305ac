"""The GPT of gpt/model.py, position by position: the same weights and the same products, with attention from outside.

    logits_BTV = run(model, ids_BT, positions_BT, attend)       # attend(layer, q, k, v) -> y, all [B, H, T, E]
    logits_BTV = cached_logits(model, ids_BT, KVCache(64))      # the new positions only
    ids_BT = generate(model, prompt_BT, 40, Sampling(0.8), seed=1)

`model` is a GPT in eval mode; without a cache its own `forward` gives the same numbers. It may be split by
`parallel.tensor_parallel`: then a rank's layers make its own heads, and its cache holds those. The model's own
forward has no option for this, so that lessons 01 to 11 read it without a word about caches. What is written is one
document: attention has no mask between documents here, and a server ends a text at the separator that would begin
another. Shapes: B sequences, T new positions, S positions in all, D width, V tokens in the vocabulary, H heads (of this
rank) of size E, N layers.
"""

import torch
import torch.nn.functional as F
from torch import nn

from manyhands.gpt.model import GPT
from manyhands.gpt.sampling import Sampling, draw, extended, probabilities, uniforms


def run(model, ids_BT, positions_BT, attend):
    """Logits [B, T, V] of tokens at given positions; what lies before them is `attend`'s to know."""
    x_BTD = model.tokens(ids_BT) + model.positions(positions_BT)
    for layer, block in enumerate(model.blocks):
        attention = block.attention
        qkv_BHT3E = attention.qkv(block.norm_1(x_BTD)).unflatten(-1, (-1, 3, attention.head_size)).transpose(1, 2)
        y_BHTE = attend(layer, *qkv_BHT3E.unbind(-2))
        x_BTD = x_BTD + attention.out(y_BHTE.transpose(1, 2).flatten(2))
        x_BTD = x_BTD + block.mlp(block.norm_2(x_BTD))
    return model.head(model.norm(x_BTD))


class KVCache:
    """Keys and values of positions that were computed, for a batch of equal lengths: 2 N B S D numbers when full.

    Room for `capacity` positions; `length` of them are filled. Made on first use, as the layers' keys are.
    `paged_cache` has the one for a server.
    """

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


def cached_logits(model, ids_BT, cache):
    """Logits [B, T, V] of tokens that follow what the cache holds, and are in it afterwards.

    Raises ValueError if the positions do not fit into the model's block_size.
    """
    stop = cache.length + ids_BT.shape[1]
    if stop > model.config.block_size:
        raise ValueError(f"{stop} positions do not fit into block_size={model.config.block_size}; ask for fewer tokens")
    positions_T = torch.arange(cache.length, stop, device=ids_BT.device)
    logits_BTV = run(model, ids_BT, positions_T, cache.attend)
    cache.length = stop
    return logits_BTV


@torch.inference_mode()
def generate(model, ids_BT, n, sampling=Sampling(), seed=0, use_cache=True):  # noqa: B008 - it is frozen
    """`ids_BT` and n tokens after it: [B, T + n], all B drawn with numbers of their own from one seed.

    `use_cache=False` computes all positions again for each token, and draws the same.
    Raises ValueError if T + n is more than block_size: positions are learned, there are no others.
    """
    B, T = ids_BT.shape
    if T + n > model.config.block_size:
        raise ValueError(
            f"{T} tokens and {n} more do not fit into block_size={model.config.block_size}; ask for at most "
            f"{model.config.block_size - T}"
        )
    cache = KVCache(T + n)
    numbers = iter(torch.tensor(uniforms(seed, n * B)).view(n, B))

    def logits(ids_BT):
        return cached_logits(model, ids_BT[:, cache.length :], cache) if use_cache else model(ids_BT)[0]

    def next_token(logits_BV):
        return draw(probabilities(logits_BV, [sampling] * B), next(numbers))

    return extended(logits, ids_BT, n, model.config.block_size, next_token)


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights and one float scale per output: a weight is off by at most half a step.

    On a GPU a kernel multiplies the 8-bit weights as it reads them; here they are made float again first, so that this
    saves memory and no time.
    """

    def __init__(self, full):
        super().__init__()
        weight_OI = full.weight.detach()
        scale_O1 = (weight_OI.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(weight_OI.dtype).tiny)
        self.register_buffer("weight_OI", (weight_OI / scale_O1).round().to(torch.int8))
        self.register_buffer("scale_O", scale_O1[:, 0])
        self.bias = full.bias

    def forward(self, x):
        return F.linear(x, self.weight_OI.to(x.dtype)) * self.scale_O + (0 if self.bias is None else self.bias)


def quantize(model: GPT) -> GPT:
    """Replace the linear layers in the blocks of a GPT; embeddings, norms and head stay. Returns the model."""
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        for part, name in ((attention, "qkv"), (attention, "out"), (mlp, "up"), (mlp, "down")):
            setattr(part, name, Int8Linear(getattr(part, name)))
    return model


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
