"""A mixture of experts in place of a block's MLP: a router sends each token through k of E (Shazeer et al. 2017).

    layer = Experts(width=128, experts=8, top_k=2)
    y_BTD = layer(x_BTD)                                 # no token is dropped: rows are sorted by expert
    ratio = move_biases([layer], chosen_NE, speed=1e-3)  # once per step: the busiest expert over the mean

Experts have no biases of their own. A bias per expert is added to its score, but only to choose. After each step it
moves by a fixed amount: down if the expert got more than its share, up if it got less. There is no gradient in that
(Wang et al. 2024, arXiv:2408.15664). Next to it stands the small balancing loss of DeepSeek-V3 (arXiv:2412.19437,
section 2.1.2). It is a mean over sequences, so ranks with different sequences need not talk about it.

A llama's expert is a SwiGLU: its rows in `up` are those of the gate, then those that it multiplies (Jiang et al. 2024).

Shapes: B sequences, T positions, N = B T tokens, D width, M hidden (4 D), E experts, k experts per token, R = N k rows.
"""

import torch
import torch.nn.functional as F
from torch import nn


def multiplied_in(rows_RD):
    """The dtype of products with `rows_RD`: autocast's, where it is on."""
    kind = rows_RD.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows_RD.dtype


def run_experts(rows_RD, sizes_E, up, down):
    """Take rows, sorted by expert, through their experts: [R, D]. `sizes_E` says how many belong to each.

    `up` and `down` are [E M, D], one expert below the other; of SwiGLUs `up` is [E 2 M, D].
    """
    up_EMD, down_EMD = (weight.unflatten(0, (len(sizes_E), -1)) for weight in (up, down))
    dtype = multiplied_in(rows_RD)
    if rows_RD.device.type == "cuda" and dtype == torch.bfloat16:  # one product; from sm90 without a wait for sizes
        ends_E = sizes_E.cumsum(0).to(torch.int32)
        h_RM = _activated(F.grouped_mm(rows_RD.to(dtype), up_EMD.to(dtype).mT, offs=ends_E), down_EMD.shape[1])
        return F.grouped_mm(h_RM, down_EMD.to(dtype), offs=ends_E)
    parts = rows_RD.split(sizes_E.tolist())
    M = down_EMD.shape[1]
    both = zip(parts, up_EMD, down_EMD, strict=True)
    return torch.cat([_activated(part @ up_MD.T, M) @ down_MD for part, up_MD, down_MD in both])


def _activated(h_R, M):
    """[R, M] of what rows make with `up`: M numbers, or 2 M of a SwiGLU."""
    if h_R.shape[-1] == M:
        return F.gelu(h_R)
    gate_RM, up_RM = h_R.chunk(2, dim=-1)
    return F.silu(gate_RM) * up_RM


class WithLoss(torch.autograd.Function):
    """WithLoss.apply(x, loss): a copy of `x`; in the backward `loss` has the gradient 1, whatever comes of `x`."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.kind = {"dtype": loss.dtype, "device": loss.device}
        return x.clone()  # torch's split backward takes no views

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones((), **ctx.kind)


class Experts(nn.Module):
    """E experts, of which each token passes through k; and `shared`, a module that every token passes through."""

    bias: torch.Tensor
    # how rows reach the weights; expert parallelism puts an exchange of rows around it
    run = staticmethod(run_experts)

    def __init__(self, width, experts, top_k, router="softmax", shared=None, hidden=None, gated=False):
        super().__init__()
        self.top_k, self.sigmoid = top_k, router == "sigmoid"
        self.router = nn.Parameter(torch.empty(experts, width))
        # rows of all experts below each other: whoever shards a weight by rows can share these out evenly
        rows = experts * (hidden or 4 * width)
        self.up = nn.Parameter(torch.empty(rows * (2 if gated else 1), width))
        self.down = nn.Parameter(torch.empty(rows, width))
        self.shared = shared
        self.register_buffer("bias", torch.zeros(experts))
        # [E] choices since the last `move_biases`. Recomputation counts each of them twice, and their shares stay
        self.chosen = None
        self.balance_loss = None  # of the last forward: 0-dim, 1 if all is even
        # its weight in the gradients, where a layer adds it by itself: a stage of a pipeline gives no loss
        self.loss_weight = 0.0

    @torch.no_grad()
    def init_weights(self, std, std_out, draw=nn.init.normal_):
        """Draw the weights, as `GPT.init_weights` does; `std_out` is for those that write to the stream."""
        for weight, width in ((self.router, std), (self.up, std), (self.down, std_out)):
            draw(weight, std=width)
        self.bias.zero_()

    def route(self, x_BTD):
        """Choose for each token: (gates [N, k], experts [N, k]). Keeps the balancing loss, and counts in training."""
        E, wide = len(self.router), torch.promote_types(x_BTD.dtype, torch.float32)  # 16 bits are too few to choose by
        with torch.autocast(x_BTD.device.type, enabled=False):
            logits_BTE = F.linear(x_BTD.to(wide), self.router.to(wide))
            scores_BTE = logits_BTE.sigmoid() if self.sigmoid else logits_BTE.softmax(-1)
            experts_BTk = (scores_BTE.detach() + self.bias).topk(self.top_k, dim=-1).indices
            gates_BTk = scores_BTE.gather(-1, experts_BTk)
            if self.top_k > 1:  # one gate alone would always be 1, and the router would learn nothing
                gates_BTk = gates_BTk / gates_BTk.sum(-1, keepdim=True)
            chosen_BE = F.one_hot(experts_BTk.flatten(1), E).sum(1)
            probs_BE = (scores_BTE / scores_BTE.sum(-1, keepdim=True)).mean(1)
            shares_BE = chosen_BE / experts_BTk[0].numel()
            self.balance_loss = E * (shares_BE * probs_BE).sum(-1).mean()
            if self.training and self.loss_weight:
                gates_BTk = WithLoss.apply(gates_BTk, self.loss_weight * self.balance_loss)
        if self.training:
            chosen_E = chosen_BE.sum(0)
            self.chosen = chosen_E if self.chosen is None else self.chosen + chosen_E
        return gates_BTk.flatten(0, 1), experts_BTk.flatten(0, 1)

    def forward(self, x_BTD):
        gates_Nk, experts_Nk = self.route(x_BTD)
        y_BTD = self.mix(x_BTD.flatten(0, 1), gates_Nk, experts_Nk).view_as(x_BTD)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)

    def mix(self, x_ND, gates_Nk, experts_Nk):
        """Return what the chosen experts make of each token, weighted by its gates: [N, D]."""
        order_R = experts_Nk.flatten().argsort(stable=True)
        sizes_E = experts_Nk.flatten().bincount(minlength=len(self.router))
        rows_RD = x_ND[order_R // self.top_k]
        rows_RD = self.run(rows_RD, sizes_E, self.up, self.down)
        back_NkD = rows_RD[order_R.argsort()].view(*gates_Nk.shape, -1)
        return (back_NkD * gates_Nk[..., None].to(rows_RD.dtype)).sum(1)


@torch.no_grad()
def move_biases(layers, chosen_NE, speed):
    """Move the biases of N layers by `speed` towards even choices, and begin to count anew.

    `chosen_NE` are the choices of each expert in a step. Returns the busiest expert's choices over the mean, 0-dim, in
    the least even layer.
    """
    mean_N1 = chosen_NE.mean(1, keepdim=True, dtype=torch.float64)
    busiest = (chosen_NE.amax(1, keepdim=True) / mean_N1).max()
    for layer, move_E in zip(layers, (mean_N1 - chosen_NE).sign() * speed, strict=True):
        layer.bias += move_E
        layer.chosen = None
    return busiest
