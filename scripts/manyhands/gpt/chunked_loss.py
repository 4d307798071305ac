"""The mean cross-entropy of a linear head whose logits never exist all at once.

    loss = chunked_loss(x_BD, weight_VD, bias_V, targets_B, tokens=50257, rows=4096)
    loss.backward()

The logits of B positions over V tokens are the largest tensor of a small model's step: 13 GB in float32 for 64
sequences of 1,024 positions and GPT-2's vocabulary. Here a chunk of rows goes through the head, gives its share of the
loss and of the gradients, and is let go. The backward multiplies these gradients by what comes from above; nothing is
computed twice.

Shapes: B positions, b of a chunk, D width, V rows of the weight. The first `tokens` rows are the vocabulary, the
others padding.
"""

import torch
import torch.nn.functional as F

from manyhands.gpt.products import wide_product

NEVER = -1e4  # a logit whose probability is 0 in every precision


def chunked_loss(x_BD, weight_VD, bias_V, targets_B, tokens, rows, share=None):
    """Return the mean cross-entropy in nats, computed from `rows` positions at a time.

    Under autocast the products have its precision, as those of nn.Linear have. Sums over chunks have float32 at least.
    `share`: `chunk_share`, or what torch.compile makes of it.
    """
    learns = torch.is_grad_enabled()  # asked here: within a Function it is always off
    return _ChunkedLoss.apply(x_BD, weight_VD, bias_V, targets_B, tokens, rows, share or chunk_share, learns)


def liger_loss(x_BD, weight_VD, bias_V, targets_B, tokens):
    """Return `chunked_loss` by the kernels of the package liger-kernel (Hsu et al. 2024, arXiv:2410.10989).

    The weight's gradient is rounded to the precision of the products once, after the sum over chunks.
    """
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    low = _low(x_BD, weight_VD)
    if tokens < len(weight_VD):
        bias_V = weight_VD.new_zeros(len(weight_VD)) if bias_V is None else bias_V
        bias_V = bias_V.masked_fill(torch.arange(len(bias_V), device=bias_V.device) >= tokens, NEVER)
    bias_V = None if bias_V is None else bias_V.to(low)
    return liger_fused_linear_cross_entropy(
        x_BD.to(low), weight_VD.to(low), targets_B, bias=bias_V, accum_dtype=torch.promote_types(low, torch.float32)
    )


def _low(x, weight):
    """Return the precision of products: autocast's, or that of the weight."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def chunk_share(logits_bV, targets_b, tokens):
    """Return the sum of a chunk's losses, and its gradient by the logits, in their precision."""
    place_V = torch.arange(logits_bV.shape[1], device=logits_bV.device)
    logits = logits_bV.to(torch.promote_types(logits_bV.dtype, torch.float32))
    if tokens < len(place_V):
        logits = logits.masked_fill(place_V >= tokens, -torch.inf)
    log_p = logits.log_softmax(1)
    gradient = log_p.exp() - (place_V == targets_b[:, None]).to(log_p.dtype)
    return -log_p.gather(1, targets_b[:, None]).sum(), gradient.to(logits_bV.dtype)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BD, weight_VD, bias_V, targets_B, tokens, rows, share, learns):
        low = _low(x_BD, weight_VD)
        x, weight, bias = x_BD.to(low), weight_VD.to(low), None if bias_V is None else bias_V.to(low)
        loss = torch.zeros((), dtype=torch.promote_types(low, torch.float32), device=x.device)
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight, dtype=loss.dtype)
        dbias = None if bias is None else dweight.new_zeros(len(weight))
        for begin in range(0, len(x), rows):
            chunk = slice(begin, begin + rows)
            logits = F.linear(x[chunk], weight, bias)
            part, dlogits = share(logits, targets_B[chunk], tokens)
            loss += part
            if learns:
                dx[chunk] = dlogits @ weight
                dweight += wide_product(dlogits.T, x[chunk])
                if dbias is not None:
                    dbias += dlogits.sum(0, dtype=dbias.dtype)
        if learns:
            ctx.save_for_backward(dx, dweight, dbias)
            ctx.dtype, ctx.count = x_BD.dtype, len(x)
        return loss / len(x)

    @staticmethod
    def backward(ctx, upstream):
        dx, dweight, dbias = ctx.saved_tensors
        scale = upstream / ctx.count
        dx = (dx * scale).to(ctx.dtype)
        return dx, dweight * scale, None if dbias is None else dbias * scale, *[None] * 5
