"""A decoder-only GPT for one process: every strategy is applied to it from outside, and compared with it.

    model = GPT(GPTConfig(vocab_size=65))          # ShakespeareGPT: 4 layers, 4 heads, width 128, block 64
    logits_BTV, loss = model(ids_BT, targets_BT)   # loss is None without targets

The variant is the one whose parameters are counted exactly by P = N(12D^2 + 10D) + D(V + T) + 2D + V(D + 1):
LayerNorms with bias, the query-key-value projection without, all other linear layers with bias, learned
positions, and an untied output head with bias. Weights start as in GPT-2 (Radford et al. 2019, section 2.3). With
`experts` above 1 a mixture of experts stands in place of each MLP: see `gpt.experts`.

`style="llama"` makes it a Llama (Touvron et al. 2023; Grattafiori et al. 2024) or, with `norm="layer"`, an OLMo
(Groeneveld et al. 2024): no biases, rotary positions, SwiGLU, grouped queries; see `gpt.llama`.

Where documents are packed into one sequence, `separator` keeps attention within them; positions count on.

Shapes: B sequences, T positions, V tokens in the vocabulary, D = n_embd, H heads of size E, of which K have keys and
values, M hidden (4 D), N layers.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from manyhands.gpt.chunked_loss import chunk_share, chunked_loss
from manyhands.gpt.experts import Experts, multiplied_in
from manyhands.gpt.llama import SwiGLU, norm_of, rotated, rotation
from manyhands.gpt.sampling import drawing, extended


def within_documents(ids_BT, separator):
    """Which positions each position attends to, bool [B, 1, T, T]: those of its own document up to itself.

    A document begins at each `separator`, and goes on with the tokens behind it; what stands before the first separator
    is the end of another one. All of it follows from the ids, so that whoever runs the model, in training or to write,
    masks alike. None without a separator: then attention is causal, and nothing else.
    """
    if separator is None:
        return None
    document_BT = (ids_BT == separator).cumsum(1)
    same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    return same_BTT.tril()[:, None]


def document_blocks(ids_BT, separator, make=create_block_mask):
    """The mask of `within_documents` by blocks of positions: FlexAttention skips a block in which none sees another.

    `make`: create_block_mask, which builds the whole mask first unless it is compiled.
    """
    document_BT = (ids_BT == separator).cumsum(1)

    def sees(b, head, t, other):
        return (other <= t) & (document_BT[b, other] == document_BT[b, t])

    B, T = ids_BT.shape
    return make(sees, B, None, T, T, device=ids_BT.device)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config):
        super().__init__()
        self.head_size = config.n_embd // config.n_head
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.qkv_bias)
        self.out = nn.Linear(config.n_embd, config.n_embd)

    def heads(self, x_BTD, turn=None):
        """Queries, keys and values, each [B, H, T, E]."""
        # rows of the projection lie head by head (q, k, v of head 0, then of head 1, ...), as in Megatron-LM:
        # a rank that holds the first rows of the matrix holds whole heads, and runs the same lines
        return self.qkv(x_BTD).unflatten(-1, (-1, 3, self.head_size)).transpose(1, 2).unbind(-2)

    def forward(self, x_BTD, allowed_B1TT=None, turn=None):
        q_BHTE, k_BHTE, v_BHTE = self.heads(x_BTD, turn)
        grouped = k_BHTE.shape[1] < q_BHTE.shape[1]
        if callable(allowed_B1TT):  # the attention itself: context ranks have a part of each sequence
            y_BHTE = allowed_B1TT(q_BHTE, k_BHTE, v_BHTE)
        elif isinstance(allowed_B1TT, BlockMask):
            y_BHTE = flex_attention(q_BHTE, k_BHTE, v_BHTE, block_mask=allowed_B1TT, enable_gqa=grouped)
        else:
            y_BHTE = F.scaled_dot_product_attention(
                q_BHTE, k_BHTE, v_BHTE, attn_mask=allowed_B1TT, is_causal=allowed_B1TT is None,
                dropout_p=self.dropout if self.training else 0.0, enable_gqa=grouped,
            )  # fmt: skip
        return self.out(y_BHTE.transpose(1, 2).flatten(2))


class GroupedAttention(Attention):
    """A Llama's: H / K neighbouring heads of queries share keys and values (Ainslie et al. 2023), and positions turn.

    Keys and values [B, K, T, E] are not copied for each head: on CPUs and, with the kernels that know of groups, on
    GPUs. Elsewhere torch copies them.
    """

    def __init__(self, config):
        nn.Module.__init__(self)
        self.head_size, self.dropout, self.clip = config.head_size, config.dropout, config.clip_qkv
        wide, narrow = config.n_head * config.head_size, config.kv_heads * config.head_size
        self.q = nn.Linear(config.n_embd, wide, bias=False)
        self.k = nn.Linear(config.n_embd, narrow, bias=False)
        self.v = nn.Linear(config.n_embd, narrow, bias=False)
        self.out = nn.Linear(wide, config.n_embd, bias=False)

    def heads(self, x_BTD, turn=None):
        """Queries [B, H, T, E], keys and values [B, K, T, E]."""
        x_BTD = x_BTD.to(multiplied_in(x_BTD))  # once for all three, where autocast would do it for each
        parts = [layer(x_BTD).unflatten(-1, (-1, self.head_size)) for layer in (self.q, self.k, self.v)]
        if self.clip is not None:
            parts = [part.clamp(-self.clip, self.clip) for part in parts]
        q_BTHE, k_BTKE, v_BTKE = parts
        # turned before they are transposed: attention's output lies as q does, and `out` reads it without a copy
        parts = rotated(q_BTHE, turn), rotated(k_BTKE, turn), v_BTKE
        return [part.transpose(1, 2) for part in parts]


class MLP(nn.Module):
    """Two linear layers, four times as wide in between, or `times` that."""

    def __init__(self, config, times=1):
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * times * config.n_embd)
        self.down = nn.Linear(4 * times * config.n_embd, config.n_embd)
        self.approximate = "tanh" if config.gelu == "tanh" else "none"

    def forward(self, x_BTD):
        h_BTM = F.gelu(self.up(x_BTD), approximate=self.approximate)
        return self.down(h_BTM)


def mlp_of(config):
    """The MLP of a block, or the experts in its place."""
    gated = config.style == "llama"
    if config.experts == 1:
        return SwiGLU(config) if gated else MLP(config)
    shared = MLP(config, config.shared_experts) if config.shared_experts else None
    return Experts(config.n_embd, config.experts, config.top_k, config.router, shared, config.hidden, gated)


class Block(nn.Module):
    """One layer: what attention and the MLP find is added to the stream x."""

    def __init__(self, config):
        super().__init__()
        self.norm_1 = norm_of(config)
        self.attention = GroupedAttention(config) if config.style == "llama" else Attention(config)
        self.norm_2 = norm_of(config)
        self.mlp = mlp_of(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x_BTD, allowed_B1TT=None, turn=None):
        # by name: what tensor parallelism does to the inputs of a module, it does to those without one
        x_BTD = x_BTD + self.drop(self.attention(self.norm_1(x_BTD), allowed_B1TT=allowed_B1TT, turn=turn))
        return x_BTD + self.drop(self.mlp(self.norm_2(x_BTD)))


def turn_of(config, x_BTD, positions_T):
    """Return what `rotation` gives blocks that are given x, of a llama; None of a gpt."""
    return rotation(config, positions_T, multiplied_in(x_BTD)) if config.style == "llama" else None


class Head(nn.Linear):
    """The linear layer that gives a logit for each token of the vocabulary."""

    # It computes with rows of zeros up to a multiple of this, and cuts their logits. A GPU multiplies 16-bit numbers
    # fast where rows are a multiple of 64; GPT-2's 50,257 tokens are odd.
    multiple = 1
    # With targets it gives the loss, and holds at most this number of logits at once. None: all of them.
    at_once: int | None = None
    share = staticmethod(chunk_share)  # of a chunk of rows; or what torch.compile makes of it
    fused = None  # another package's in their place: `liger_loss`

    def forward(self, x, targets=None):
        """Logits for each vector of `x` [..., D]; with `targets` [...] their mean cross-entropy, and no logits."""
        more = -self.out_features % self.multiple
        weight, bias = self.weight, self.bias
        if more:
            weight, bias = F.pad(weight, (0, 0, 0, more)), None if bias is None else F.pad(bias, (0, more))
        if targets is None:
            return F.linear(x, weight, bias)[..., : self.out_features]
        if self.fused is not None:
            return self.fused(x.flatten(0, -2), weight, bias, targets.flatten(), self.out_features)
        count = math.ceil(targets.numel() * self.out_features / self.at_once)
        while targets.numel() % count:  # chunks of one size: code is built for it once
            count += 1
        rows = targets.numel() // count
        return chunked_loss(x.flatten(0, -2), weight, bias, targets.flatten(), self.out_features, rows, self.share)

    def chunks(self, tokens):
        """Return whether the loss of this number of tokens is computed in chunks."""
        return self.at_once is not None and tokens * self.out_features > self.at_once


class GPT(nn.Module):
    """Token and position embeddings, N blocks, a last norm and the head. The caller seeds torch before."""

    allowed = staticmethod(within_documents)  # or document_blocks, where blocks are compiled for a GPU
    stream: torch.dtype | None = None  # of what the blocks add to; None: the embeddings'
    balance_loss = 1e-4  # weight of the experts' balancing loss in the gradients

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.block_size, config.n_embd) if config.style == "gpt" else None
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = norm_of(config)
        self.head = Head(config.n_embd, config.vocab_size, bias=config.style == "gpt" and not config.tie)
        if config.tie:
            self.head.weight = self.tokens.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self, draw=nn.init.normal_):
        """Draw all weights from torch's global generator: draw(weight, std=...) fills one, always in the same order."""
        for module in self.modules():
            if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
                module.reset_parameters()
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                draw(module.weight, std=0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
        # 2 N additions into one stream: their variances add up, so each starts smaller by sqrt(2 N)
        std_out = 0.02 / math.sqrt(2 * self.config.n_layer)
        for block in self.blocks:
            draw(block.attention.out.weight, std=std_out)
            mlp = block.mlp
            if isinstance(mlp, Experts):
                mlp.init_weights(0.02, std_out, draw)
                mlp = mlp.shared
            if mlp is not None:
                draw(mlp.down.weight, std=std_out)

    def forward(self, ids_BT, targets_BT=None, positions_T=None, attention=None):
        """Logits [B, T, V], and the mean cross-entropy in nats, in float32 at least (None without targets).

        Where the head computes the loss in chunks (`Head.at_once`), there are no logits: None.
        Where the T tokens are a part of longer sequences, `positions_T` says where they stand, and `attention(q, k, v)`
        attends to the whole. Raises ValueError if the sequences are longer than `config.context`.
        """
        T = ids_BT.shape[1]
        if (most := self.config.context) < T:
            name = "max_positions" if self.config.max_positions else "block_size"
            raise ValueError(f"{T} positions do not fit into {name}={most}; cut the sequences")
        if positions_T is None:
            positions_T = torch.arange(T, device=ids_BT.device)
        x_BTD, turn = self.embed(ids_BT, positions_T)
        x_BTD = self.drop(x_BTD).to(self.stream)
        allowed_B1TT = attention or self.allowed(ids_BT, self.config.separator)
        turned = () if turn is None else (turn,)  # plans of tensor ranks count what a gpt's block is given
        for block in self.blocks:
            x_BTD = block(x_BTD, allowed_B1TT, *turned)
        x_BTD = self.norm(x_BTD)
        if targets_BT is None:
            return self.head(x_BTD), None
        logits_BTV = None if self.head.chunks(targets_BT.numel()) else self.head(x_BTD)
        loss = self.head(x_BTD, targets_BT) if logits_BTV is None else self.loss(logits_BTV, targets_BT)
        if self.training and self.config.experts > 1 and self.balance_loss:
            balance = self.balance_loss * sum(layer.balance_loss for layer in experts_of(self))
            loss = loss + (balance - balance.detach())  # it has gradients, and the loss stays what it says
        return logits_BTV, loss

    def embed(self, ids_BT, positions_T):
        """Return x [B, T, D] of tokens at positions [T] or [B, T], and what `rotation` gives of a llama (else None)."""
        x_BTD = self.tokens(ids_BT)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(positions_T)
        return x_BTD, turn_of(self.config, x_BTD, positions_T)

    @staticmethod
    def loss(logits_BTV, targets_BT):
        """The mean cross-entropy in nats, in float32 at least."""
        logits_BV = logits_BTV.flatten(0, 1)
        if logits_BV.dtype.itemsize < 4:  # 16 bits are too few for the logarithm of a sum over the vocabulary
            logits_BV = logits_BV.float()
        return F.cross_entropy(logits_BV, targets_BT.flatten())

    @torch.no_grad()
    def generate(self, ids_BT, n, temperature=1.0, generator=None):
        """`ids_BT` followed by n sampled tokens: [B, T + n].

        Draws from `generator` (None: a fresh one with seed 0) and never from torch's global one, and leaves
        train mode as it was: sampling does not change a training run. Temperature 0: the likeliest token.
        """
        training = {module: module.training for module in self.modules()}
        self.eval()
        try:
            draw = drawing(temperature, generator)
            return extended(lambda ids: self(ids)[0], ids_BT, n, self.config.context, draw)
        finally:
            for module, was_training in training.items():
                module.training = was_training

    def num_params(self):
        """Parameters in the model, a tied one once."""
        return sum(p.numel() for p in self.parameters())


def experts_of(model):
    """The layers with experts of `model`, in order."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def _keep_what_is_dear(context, operator, *args, **kwargs):
    namespace, name = operator._schema.name.split("::")
    dear = name in ("mm", "addmm", "bmm", "baddbmm", "linear") or name.startswith("_scaled_dot_product")
    keep = dear or namespace == "_c10d_functional"  # messages of tensor parallelism
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(Block):
    """A block that keeps its input alone, for a third more compute."""

    how = {"use_reentrant": False}

    def forward(self, x_BTD, allowed_B1TT=None, turn=None):
        return checkpoint(super().forward, x_BTD, allowed_B1TT, turn, **self.how)


class SelectivelyCheckpointed(Checkpointed):
    """A block that also keeps what is dear to compute, and repeats what is cheap and large: norms, GELU, dropout."""

    how = {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, _keep_what_is_dear)}


def checkpoint_activations(model, kind):
    """The blocks of `model`, a GPT or a stage, recompute (Chen et al. 2016). `kind`: none, block or selective."""
    for block in [module for module in model.modules() if isinstance(module, Block)] if kind != "none" else []:
        # another class for the same object, as fully_shard does it: a module around it would be part of each
        # parameter's name, and a function of its own per block would be compiled anew for each
        block.__class__ = Checkpointed if kind == "block" else SelectivelyCheckpointed
