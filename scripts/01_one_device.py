# ---
# jupyter:
#   jupytext:
#     formats: notebooks///ipynb,scripts///py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Many Hands
#     language: python
#     name: manyhands
# ---

# %% [markdown]
# # 01 One device: what fills its memory, and what fills its time
#
# **40 minutes** for the sections marked CORE, 106 with those marked MORE.
#
# A model has 3.3 MB of parameters. One training step of it holds more. In this lesson you find where these bytes are.
# You write a function, the **ledger**, that predicts them for any GPT, and you make the peak smaller.
#
# After this lesson **you can**
# - predict the parameters, bytes and FLOPs of a GPT with a pencil;
# - say whether a model fits on a device, and if not, what is too large;
# - build activation checkpointing, and say what it costs;
# - compute an MFU, the share of the device's peak that a training reaches.
#
# **You need** to have seen a training loop in PyTorch. A cell that begins with `%%ranks` runs on several processes,
# the [ranks](../assets/glossary.md#rank) of [lesson 00](00_start.ipynb). Here each rank works alone.
#
# **New here:** [activation](../assets/glossary.md#activation), [optimizer
# state](../assets/glossary.md#optimizer-state), [activation
# checkpointing](../assets/glossary.md#activation-checkpointing), [FLOP](../assets/glossary.md#flop),
# [MFU](../assets/glossary.md#mfu), and in MORE [mixed precision](../assets/glossary.md#mixed-precision), [loss
# scaling](../assets/glossary.md#loss-scaling), [accumulation](../assets/glossary.md#accumulation),
# [micro-batch](../assets/glossary.md#micro-batch).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Minutes of the CORE: start 1, what a step holds 4, ledger 14, does it fit 5, forget 7, time 5, zoo 3, card 1. A build
# takes about three minutes; walk around while people write.
#
# *Say:* "Before you use two devices, know what one is doing." Every later lesson divides a number of this lesson by n.
#
# *Three usual mistakes:* believing that the weights fill the memory; taking the data sheet's largest FLOP/s for the peak;
# mixing GB and GiB, which differ by 7 %.
#
# *When late:* give solution A at once, and keep the ledger, its picture and the zoo.
#
# *Ask the room:* "A model has 7 billion parameters. How much memory does training need?" Collect numbers before the ledger.
# They range from 14 GB to 200 GB, and most of them are right about something.
#
# </details>

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
sequences = 8  # sequences in a batch, a multiple of 4, 4 to 256
repeats = 5  # samples of each timing, at least 1
peak_s = 0.2  # seconds for each measurement of the fastest matrix product, > 0

# %% [markdown]
# ## Start (CORE, 1 min)
#
# In a **build** you replace each `____` and run the cell; its check says what is wrong. If you leave a build as it is,
# the cells below use the lesson's own lines.

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("01_one_device", globals())

# %%
# %%ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands import ____, Metrics, card, compare, fingerprint, join, leave, refuse, say, show
from manyhands.checks import one_device as checks

ranks = join(globals())
rank, world_size, device = ranks.rank, ranks.world_size, ranks.device

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.measure.memory_timeline import MemoryTimeline

if sequences % 4:
    refuse(f"sequences={sequences} does not split into 4 micro-batches; use a multiple of 4")
corpus = load_corpus(ranks)
shakespeare = GPTConfig(vocab_size=len(corpus.vocab))
gpt_1b = GPTConfig(vocab_size=32_100, block_size=2048, n_layer=16, n_head=16, n_embd=2048)
gpt_7b = GPTConfig(vocab_size=32_100, block_size=2048, n_layer=32, n_head=32, n_embd=4096)
class_70b = GPTConfig(vocab_size=50_280, block_size=4096, n_layer=80, n_head=64, n_embd=8192)
large_models = {"1B": gpt_1b, "7B": gpt_7b, "70B class": class_70b}
metrics = Metrics(ranks, corpus, {"sequences": sequences, "repeats": repeats, "peak_s": peak_s})
metrics.exact(num_params={name: config.num_params() for name, config in large_models.items()})


def new_model(dtype=torch.float32):
    """Make ShakespeareGPT with its first weights, the same on every rank."""
    torch.manual_seed(1337)
    return GPT(shakespeare).to(device, dtype)


def batch(step=0):
    """Return inputs and targets, both [B, T]: the same on every rank, as if it were alone."""
    return [ids_BT.to(device) for ids_BT in get_batch(corpus.train_ids, step, sequences, 64, 0, 1, seed=1)]


# %% [markdown]
# ## What a step holds (CORE, 4 min)
#
# **ShakespeareGPT** reads 64 characters and guesses the next one. It has 0.8 million parameters of 4 bytes: 3.3 MB. It takes
# one training step with AdamW, on 8 sequences.
#
# **Predict.** How many MB does the step hold at its peak?

# %%
# %%ranks
guess_peak = ____  # your turn: type a number


# %% jupyter={"source_hidden": true}
# %%ranks
def keep_all(block, x_BTD):
    """Run a block in the usual way."""
    return block(x_BTD)


def forward_with(model, run_block, ids_BT, targets_BT):
    """Return the loss of a GPT whose blocks are run by run_block(block, x)."""
    h_BTD = model.tokens(ids_BT) + model.positions(torch.arange(ids_BT.shape[1], device=ids_BT.device))
    for block in model.blocks:
        h_BTD = run_block(block, h_BTD)
    return F.cross_entropy(model.head(model.norm(h_BTD)).flatten(0, 1), targets_BT.flatten())


def watch_step(run_block):
    """Return the MemoryTimeline of a training step of ShakespeareGPT whose blocks are run by run_block(block, x)."""
    model, (x_BT, y_BT) = new_model(), batch()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # the first step makes the optimizer's state; the second one is kept
        with MemoryTimeline(model, optimizer) as seen:
            with seen.phase("forward"):
                loss = forward_with(model, run_block, x_BT, y_BT)
            with seen.phase("backward"):
                loss.backward()
            with seen.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
    return seen


# %% [markdown]
# `watch_step` (folded) runs the step, and notes when each tensor is allocated and freed.

# %%
# %%ranks
seen = watch_step(keep_all)
weights = 4 * shakespeare.num_params()
times = f"{weights / 1e6:.1f} MB of parameters; the peak is {seen.peak.total / weights:.1f} times that"
compare("peak of the step", "guess_peak", round(seen.peak.total / 1e6, 1), "MB", times)

# %% [markdown]
# What else is in memory? There are four kinds:
#
# | kind | what | how many |
# |---|---|---|
# | parameters | the weights | P numbers |
# | gradients | from backward until `zero_grad` | P numbers |
# | [optimizer state](../assets/glossary.md#optimizer-state) | Adam's running means of the gradient and of its square | two numbers per parameter |
# | [activations](../assets/glossary.md#activation) | results of forward that backward will need | grows with the tokens |
#
# The first three depend only on the model. Activations depend on the batch, too.

# %% [markdown]
# ## The ledger (CORE, 14 min)
#
# Letters are sizes: `V` tokens in the vocabulary, `T` positions in a sequence, width `D`, `H` heads, `N` layers, `P`
# parameters. First count P.
#
# ![A decoder-only transformer, with the shape of the weights beside each box](../assets/01_gpt.svg)
#
# - A linear map from *a* to *b* numbers, *a → b*, has *a·b* weights, and *b* more if it has a bias.
# - A LayerNorm has a scale and a shift, each a vector of width D.
# - An embedding holds a vector of width D for each token, or for each position.
#
# ### Build A: count the parameters
#
# Fill in the four blanks from the drawing, as formulas in V, T, D and N. `attention`, `mlp` and the LayerNorms are for
# one layer.


# %%
# %%ranks
def count_parameters(V, T, D, N):
    """Return the number of parameters of a GPT with V tokens, T positions, width D and N layers."""
    attention = ____  # query, key and value; attention out
    mlp = ____  # up and down
    layer = attention + mlp + ____  # its LayerNorms
    ends = ____  # tokens, positions, last LayerNorm, head
    return N * layer + ends


checks.parameters(count_parameters, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution A</summary>
#
# ```python
# def count_parameters(V, T, D, N):
#     """Return the number of parameters of a GPT with V tokens, T positions, width D and N layers."""
#     attention = D * 3 * D + D * D + D
#     mlp = D * 4 * D + 4 * D + 4 * D * D + D
#     layer = attention + mlp + 2 * 2 * D
#     ends = V * D + T * D + 2 * D + (D * V + V)
#     return N * layer + ends
# ```
#
# </details>

# %% [markdown]
# A layer has 12D² + 10D parameters. So a good estimate for large models is **12·N·D²**:

# %% tags=["nbval-check-output"]
# %%ranks
assert count_parameters(shakespeare.vocab_size, 64, 128, 4) == sum(p.numel() for p in new_model().parameters())
for name, c in large_models.items():
    P = count_parameters(c.vocab_size, c.block_size, c.n_embd, c.n_layer)
    say(f"{name:10} P = {P:14,}   12 N D^2 is {100 * 12 * c.n_layer * c.n_embd**2 / P:.1f} % of it")

# %% [markdown]
# Now the activations. The drawing shows what one layer keeps for backward, for **one token**:
#
# ![What forward keeps in a layer for backward: inputs of the matrices, norms and GELU](../assets/01_saved.svg)
#
# These are 16 vectors of width D. There are also H + 4 single numbers: one per head, and the mean and deviation of
# each of the two norms. After the layers, the last norm, the head and the loss keep `top` numbers per token.
#
# ### Build B: the ledger
#
# Fill in the bytes of each kind, with AdamW. All numbers are float32: 4 bytes each. `layer` counts numbers per token,
# and there are N layers and `tokens` tokens.


# %%
# %%ranks
def ledger(config, num_sequences):
    """Return the bytes of each kind in a training step in float32 with AdamW, each at its most."""
    D, H, V, N = config.n_embd, config.n_head, config.vocab_size, config.n_layer
    P, tokens = config.num_params(), num_sequences * config.block_size
    layer = ____  # numbers that one layer keeps for each token
    top = 2 * D + 2 + V
    return {
        "parameters": 4 * P,
        "gradients": ____,
        "optimizer": ____,
        "activations": ____,
    }


checks.ledger(ledger, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution B</summary>
#
# ```python
# def ledger(config, num_sequences):
#     """Return the bytes of each kind in a training step in float32 with AdamW, each at its most."""
#     D, H, V, N = config.n_embd, config.n_head, config.vocab_size, config.n_layer
#     P, tokens = config.num_params(), num_sequences * config.block_size
#     layer = 16 * D + H + 4
#     top = 2 * D + 2 + V
#     return {
#         "parameters": 4 * P,
#         "gradients": 4 * P,
#         "optimizer": 2 * 4 * P,
#         "activations": 4 * tokens * (N * layer + top),
#     }
# ```
#
# </details>

# %% [markdown]
# Compare it with the measured step. Parameters and optimizer state are there all the time. Activations grow in
# forward. Backward frees them, and allocates gradients. The dashed line is your ledger:

# %%
# %%ranks
mine, seen = ledger(shakespeare, sequences), watch_step(keep_all)
always = mine["parameters"] + mine["optimizer"]
peak, end = always + mine["activations"], always + mine["gradients"]
totals = {"forward": (always, peak), "backward": (peak, end), "optimizer": (end, end)}

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.plots.memory_stack import memory_stack

rest = seen.peak.total - peak
if rank == 0:
    for kind, size in mine.items():
        say(f"{kind:12} {size / 1e6:5.2f} MB by the ledger, {seen.highest(kind) / 1e6:5.2f} measured")
    say(f"peak         {peak / 1e6:5.2f} MB by the ledger, {seen.peak.total / 1e6:5.2f} measured")
    say(f"left over    {rest / 1e6:5.2f} MB; the peak is in '{seen.peak.phase}'")
    alt = "parameters and optimizer stay, activations rise in forward and fall in backward, gradients rise in backward"
    show(memory_stack(seen.samples, "one training step", totals=totals), "ledger", alt)
metrics.exact(saved_bytes=seen.highest("activations"))

# %% [markdown]
# Each kind is right within one percent. The measured peak is a few percent higher, because of "other": results that
# only the next operator needs, and gradients of activations. A GPU's allocator needs more, so leave room.
#
# Parameters, gradients and optimizer state are 16 bytes per parameter. Large models train in bf16, with 2 bytes for a
# weight and 2 for a gradient. But bf16 has only 8 significant bits: the next number after 1 is 1 + 1/128, and most
# updates are smaller than that. So the optimizer updates a float32 copy of each weight, the **master**. Its two
# running means are float32 as well.
#
# **Predict.** How many bytes per parameter is that?

# %%
# %%ranks
guess_bytes = ____  # your turn: type a number

# %% tags=["nbval-check-output"]
# %%ranks
from manyhands.predict.memory import RECIPES

mixed = RECIPES["bf16 + fp32 master"]
said = "{}: {:,.1f} GB of weights, {:,.1f} GB of state"
num_params = {name: config.num_params() for name, config in large_models.items()}
lines = [said.format(name, 2 * P / 1e9, mixed.total * P / 1e9) for name, P in num_params.items()]
compare("bytes per parameter with bf16 weights", "guess_bytes", mixed.total, because=lines)

# %% [markdown]
# 2 + 2 + 4 + 8 = **16 again**. So bf16 saves nothing here. It makes activations smaller, and matrix products
# faster. ([Other recipes](../assets/handbook/01_one_device.md#bytes-per-parameter))

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the ledger</summary>
#
# Build A: the usual miss is the head's bias, then the last LayerNorm; the check names either. Build B: *ask* which kinds grow
# when you double the batch (only activations). Ask where the peak is before you show the picture; most say "in the optimizer".
# *Usual surprise:* a residual addition keeps nothing, a GELU keeps its input. Then ask what each strategy of the course will
# cut: data parallel nothing, ZeRO-1 the optimizer, ZeRO-2 the gradients, ZeRO-3 the parameters.
#
# </details>

# %% [markdown]
# ## Does it fit? (CORE, 5 min)
#
# The 16 bytes per parameter are called the **state**. How many sequences fit into the memory that is left?
#
# ### Build C: sequences that fit
#
# Every parameter takes 16 bytes. Every token keeps 16 vectors of width D in each layer, in bf16 (2 bytes a number).
# Ignore the rest. Return a whole number, and 0 if not even the state fits. A `config` has `num_params()`, `n_layer`,
# `n_embd` and `block_size`.


# %%
# %%ranks
def sequences_that_fit(config, device_bytes):
    """Return the most sequences of config.block_size tokens that fit next to 16 bytes per parameter."""
    left = ____
    a_sequence = ____  # bytes
    return ____


checks.does_it_fit(sequences_that_fit, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution C</summary>
#
# ```python
# def sequences_that_fit(config, device_bytes):
#     """Return the most sequences of config.block_size tokens that fit next to 16 bytes per parameter."""
#     left = device_bytes - 16 * config.num_params()
#     a_sequence = 2 * 16 * config.n_embd * config.n_layer * config.block_size  # 2 bytes in bf16
#     return max(0, int(left // a_sequence))
# ```
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
for name, config in large_models.items():
    fit = ", ".join(f"{sequences_that_fit(config, gb * 1e9)} on {gb} GB" for gb in (40, 80, 141))
    a_sequence = 32 * config.n_embd * config.n_layer * config.block_size
    say(f"{name:9} sequences that fit: {fit}; each takes {a_sequence / 1e9:.1f} GB")

# %% [markdown]
# The **1B** fits, and memory limits the *batch*. The *state* of the **7B** alone exceeds 80 GB. The **70B** class fits
# nowhere: even if you split its state over a thousand devices, the activations of *one* sequence still need 86 GB.
# Sharding ([lesson 06](06_zero_fsdp.ipynb)) makes the state on each device smaller. The next section makes activations
# smaller.

# %% [markdown]
# ## Forget, and compute again (CORE, 7 min)
#
# A block (one layer) keeps 16 vectors per token. All of them can be computed again from its *input*, which is one
# vector. [**Activation checkpointing**](../assets/glossary.md#activation-checkpointing) keeps only that input. When
# backward reaches the block, it runs the block's forward a second time ([Chen et al.
# 2016](https://arxiv.org/abs/1604.06174)).
#
# ![Memory over a step: without checkpointing all activations add up until backward; with it only the blocks' inputs,
# and one block at a time comes back](../assets/01_recompute.svg)
#
# `Recompute` (folded) tells autograd to keep only the input x. In backward it calls the function that you write now.


# %% jupyter={"source_hidden": true}
# %%ranks
class Recompute(torch.autograd.Function):
    """y = block(x) that keeps x alone. (Without dropout: the second forward would draw other numbers.)"""

    @staticmethod
    def forward(ctx, block, x_BTD):
        ctx.block = block
        ctx.save_for_backward(x_BTD)
        return block(x_BTD)

    @staticmethod
    def backward(ctx, dy_BTD):
        return None, recompute_backward(ctx.block, ctx.saved_tensors[0], dy_BTD)  # the block has no gradient


# %% [markdown]
# ### Build D: the backward that recomputes
#
# `dy_BTD` is the gradient of the loss with respect to the block's output. `y.backward(dy)` starts from it: it adds to the
# gradients of the block's parameters, and fills `x.grad`. `x.detach()` has the numbers of `x` without its history, and
# `.requires_grad_()` asks for its gradient.


# %%
# %%ranks
def recompute_backward(block, x_BTD, dy_BTD):
    """Run block(x_BTD) once more; add to its parameters' gradients and return that of x_BTD."""
    x_BTD = ____  # its numbers, without a history; we want its gradient
    with torch.enable_grad():  # inside a backward autograd is off
        y_BTD = ____
    ____  # backward through this block alone
    return x_BTD.grad


checks.recompute(recompute_backward, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution D</summary>
#
# ```python
# def recompute_backward(block, x_BTD, dy_BTD):
#     """Run block(x_BTD) once more; add to its parameters' gradients and return that of x_BTD."""
#     x_BTD = x_BTD.detach().requires_grad_()  # the graph above x ends here
#     with torch.enable_grad():
#         y_BTD = block(x_BTD)  # this time everything is kept
#     y_BTD.backward(dy_BTD)  # and freed again
#     return x_BTD.grad
# ```
#
# </details>

# %% [markdown]
# **Predict.** A step costs three forward passes: one forward, and a backward that costs as much as two. How many percent more
# FLOPs does a step take with your function?

# %%
# %%ranks
guess_more = ____  # your turn: type a number

# %% jupyter={"source_hidden": true}
# %%ranks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode


def gradient_and_flops(run_block):
    """Return (all gradients in a row, FLOPs) of a step of ShakespeareGPT in float64."""
    model = new_model(torch.float64)
    # attention as plain products: the counter has no entry for the fused kernel of a CPU
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        counter.mod_tracker.__exit__()  # we need the total alone; per module, a backward in a backward may not count
        forward_with(model, run_block, *batch()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), counter.get_total_flops()


# %%
# %%ranks
ways = {
    "keep everything": keep_all,
    "ours": Recompute.apply,
    "the library": lambda block, x_BTD: checkpoint(block, x_BTD, use_reentrant=False),
}
found = {name: gradient_and_flops(run_block) for name, run_block in ways.items()}
gradient_P, num_flops = found["keep everything"]
more = {name: 100 * (done / num_flops - 1) for name, (_, done) in found.items()}
said = "{:16} {:2.0f} % more FLOPs, gradients {:.1g} apart"
lines = [said.format(name, more[name], (of_it - gradient_P).abs().max()) for name, (of_it, _) in found.items()]
compare("more FLOPs with recomputation", "guess_more", round(more["ours"]), "%", lines)

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.plots.memory_stack import memory_stacks

assert max((other_P - gradient_P).abs().max() for other_P, _ in found.values()) < 1e-10
metrics.exact(recompute_gradient=fingerprint([found["ours"][0]]))
timelines = {"keep everything": watch_step(keep_all), "ours": watch_step(Recompute.apply)}
kept = {name: seen.highest("activations") for name, seen in timelines.items()}
if rank == 0:
    say(f"activations: {kept['keep everything'] / 1e6:.1f} MB, with recomputation {kept['ours'] / 1e6:.1f} MB")
    figure = memory_stacks({name: seen.samples for name, seen in timelines.items()})
    show(
        figure,
        "recomputed",
        "the same step twice: with recomputation activations stay low, and come back block by block",
    )

# %% [markdown]
# The gradients are the same. The step takes a third more FLOPs, and under a third of the activations is left. Here one
# block is a quarter of the model; with 80 layers much less is left. The library recomputes a little less: it stops the
# second forward as soon as backward has what it needs.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: checkpointing</summary>
#
# *Ask:* "What is the least that one could keep?" (Only every k-th input; then a stretch of k blocks comes back at once:
# Chen's square root of N.) *Usual mistakes:* expecting parameters or gradients to shrink; `x.grad` of the old x.
#
# </details>

# %% [markdown]
# ## What fills the time (CORE, 5 min)
#
# A [**FLOP**](../assets/glossary.md#flop) is one addition or multiplication. The product of an [n, k] and a [k, m]
# matrix costs 2·n·k·m. So forward costs 2 FLOPs for each parameter and token. Backward makes two such products for
# each one of forward. The rule is **6 FLOPs for each parameter and token**. Embeddings need none, because they are
# looked up. Attention needs more, because it multiplies activations with each other. The exact formula is 6·(12ND² +
# VD) + 12NDT per token.

# %%
# %%ranks
from manyhands.predict.models import flops_per_token

tokens = sequences * 64
rule, step_flops = 6 * shakespeare.num_params() * tokens, flops_per_token(shakespeare) * tokens
say(f"a step: {step_flops / 1e9:.2f} GFLOP by the formula, {rule / 1e9:.2f} by the rule")

# %% [markdown]
# The [**MFU**](../assets/glossary.md#mfu), *model FLOPs utilisation*, is the model's FLOP/s divided by the peak of the
# device. But which peak? For the H100 the data sheet prints 1,979 TFLOP/s in bf16. That is for matrices in which two
# of every four numbers are zero. For **dense** matrices it is half: 989 TFLOP/s in bf16. Each **precision** has its
# own peak: 495 in TF32, 67 in float32.
#
# **Predict.** A well-tuned training of a 7B model runs on 8 H100. Which MFU does it reach, in percent?

# %%
# %%ranks
guess_mfu = ____  # your turn: type a number

# %% [markdown]
# The folded cell measures the fastest float32 matrix product on this machine, and our step. The other bars are
# published.

# %% jupyter={"source_hidden": true}
# %%ranks --timeout 120
import statistics
import time

from manyhands.checks.predictions import unanswered
from manyhands.launch import recorded_runs
from manyhands.measure import timing
from manyhands.lessons import one_device as lesson
from manyhands.predict.machines import dense_peak

model, step_s, peaks = new_model(), [], []
optimizer = torch.optim.AdamW(model.parameters())
for turn in range(-2, repeats if rank == 0 else -2):  # rank 0 alone; the first two turns warm up
    timing.synchronise(device)
    begin = time.perf_counter()
    model(*batch())[1].backward()
    optimizer.step()
    optimizer.zero_grad()
    timing.synchronise(device)
    if turn >= 0:  # they take turns, so that a busy moment hits both
        step_s.append(time.perf_counter() - begin)
        peaks.append(timing.gemm_peak(device, torch.float32, peak_s))  # FLOP/s
dist.barrier()  # here the others wait
((data_sheet, reached),) = recorded_runs.published("01_peak")[-1]["points"]
compare("MFU of a 7B model on 8 H100", "guess_mfu", round(100 * reached / data_sheet), "%")
if rank == 0:
    speed, fastest = step_flops / statistics.median(step_s), statistics.median(peaks)
    say(f"a step does {speed / 1e9:,.1f} GFLOP/s, the fastest product here {fastest / 1e9:,.1f}")
    if listed := dense_peak(device, "fp32"):
        say(f"MFU {100 * speed / listed:.2g} % of the {listed / 1e12:.0f} TFLOP/s on the data sheet")
    here = {"here: our step / best product": 100 * speed / fastest}
    figure = lesson.draw_share(here, recorded_runs.published("01_peak"), "FLOP/s, in % of the peak or best product")
    show(figure, "share_of_peak", "best products reach 70 to 90 % of the peak, training a model 46 %", unanswered())
    rate = tokens / statistics.median(step_s)
    metrics.measured(tok_per_s=rate, gemm_peak=fastest, share_of_gemm_peak=speed / fastest)

# %% [markdown]
# Even the best product does not reach the peak, and a well-tuned training reaches about half of it ([the 7B's
# table](https://github.com/mosaicml/llm-foundry/blob/061f2c7ce6/scripts/train/benchmarking/README.md); the products
# are from [this one](https://github.com/stas00/ml-engineering/blob/744d01e18b/compute/accelerator/README.md)). The
# rest of the time goes to operators that only move bytes, and to gaps between kernels. When you read an MFU, ask
# *which peak*, and *which FLOPs*: recomputed ones do not count.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: time</summary>
#
# *Ask:* "Why is backward twice forward?" (Two products for each one: gradient of the weights and of the input.) *Usual
# mistake:* 2·P for training. That is the forward pass, so inference.
#
# </details>

# %% [markdown]
# ## A bug from the zoo (CORE, 3 min)
#
# One line of this trainer is from a published one. It is started with `dtype="bf16"`. We give it a batch of 2 million
# tokens, which it reads in 4,096 pieces of 512, so each loss is divided by 4,096. The loss falls. **What is wrong?**

# %%
# %%ranks
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.float16, "tf32": torch.float32}


def train(dtype, num_steps=8, pieces=4096):
    """Print the losses under autocast."""
    model, used, losses = new_model(), PRECISIONS[dtype], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    say(f"precision: {dtype}; autocast to {used}")
    for step in range(num_steps):
        with torch.autocast(device.type, dtype=used):
            logits_BTV, loss = model(*batch(step))
        logits_BTV.retain_grad()
        (loss / pieces).backward()
        for p in model.parameters():
            p.grad *= pieces  # as if all of them had come
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    say(f"losses: {' '.join(f'{loss:.2f}' for loss in losses)}")
    return logits_BTV


logits_BTV = train("bf16")

# %% [markdown]
# <details><summary>Answer</summary>
#
# *precision: bf16; autocast to torch.float16*: one entry of the table maps to the wrong type. Gradients below 3·10⁻⁸
# become 0 in fp16, and here nobody [scales the loss](../assets/glossary.md#loss-scaling), because bf16 does not need
# that. [A workshop's log](https://github.com/saforem2/personal_site/blob/82205852654c9b504ce732a0aae2e358e9b0bf2d/docs/talks/alcf-hpc-workshop-2024/alcf-hpc-workshop-2024.md)
# has that entry. There the batch was one piece, and the loss fell as it should: with one piece nothing is lost.
#
# </details>
#
# Look at a tensor's dtype. Then mend the table:

# %%
# %%ranks
zeros = (logits_BTV.grad == 0).float().mean()
say(f"the logits are {logits_BTV.dtype}; {100 * zeros:.0f} % of their gradients are exactly 0")
PRECISIONS["bf16"] = torch.bfloat16  # mended
mended_BTV = train("bf16")

# %% [markdown]
# Almost all gradients were lost, but the loss still fell a little. With one piece the same entry does no harm that you
# could see: such a bug sleeps until you scale. **Print the precision that is used, not the one that was asked for.**

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the zoo</summary>
#
# Show the log for ten seconds, hide it, and ask what the precision was. Everybody says bf16. That is the point. Other
# members of the family: a batch size per device that is reported as the global one; a learning rate that the scheduler has
# overwritten before the first step.
#
# </details>

# %% [markdown]
# ## Recap (CORE, 1 min)

# %%
# %%ranks
card(
    "Training keeps 16 bytes per parameter between steps, in float32 and in mixed precision.",
    "Activations grow with tokens: 16 vectors per token and layer here. They peak as backward begins.",
    "P is about 12 N D^2; a step costs 6 FLOPs for each parameter and token.",
    "Checkpointing keeps one vector per token and layer, for up to a third more FLOPs.",
    "An MFU is the model's FLOP/s divided by a peak: name the peak, dense, in your precision.",
    figure="one training step, byte by byte, under your ledger's dashed line",
    command="python scripts/train.py --preset gpt-7b --ranks 64 --dry-run   # what each of 64 ranks keeps",
)

# %% [markdown]
# Below is the lab: sections to choose from.

# %% [markdown]
# ## Lab: a model of four numbers (MORE, 4 min)
#
# Take a model that you can compute in your head: one matrix **W** of 2 × 2 numbers, and three rows of data, **X**. The
# result is **Y** = **X** **W**. Train it with Adam, in float32, 4 bytes a number.
#
# **Predict.** How many numbers are in memory at the end of a step, before `zero_grad`, data included? How many FLOPs does the
# forward pass take, how many backward, if a multiplication with its addition counts as two?
#
# <details><summary>Answer</summary>
#
# Adam keeps two numbers for each weight, running means of its gradient and of the square (its *moments*). With weights and
# gradients that is 16 numbers, **64 bytes for a model of 16 bytes**. **X**, its gradient and **Y** are 6 numbers each: 18 more,
# which grow with the rows of data. Forward: each of the 3 rows meets each of the 4 weights, 12 times 2 = **24**. Backward: the
# gradient of **W** is one such product, that of **X** another, 48. Together 6 for each row and weight: **6·P·rows**. (Counted
# one by one, forward has 12 multiplications and only 6 additions. The field counts an addition with each multiplication.)
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
from torch.utils.flop_counter import FlopCounterMode

w_22 = torch.nn.Parameter(torch.ones(2, 2, device=device))
x_32 = torch.ones(3, 2, device=device, requires_grad=True)  # in a deeper model, what the layer below has made
adam = torch.optim.Adam([w_22])
with FlopCounterMode(display=False) as counter:
    y_32 = x_32 @ w_22
    forward = counter.get_total_flops()
    y_32.sum().backward()
adam.step()
kept = [w_22, w_22.grad, adam.state[w_22]["exp_avg"], adam.state[w_22]["exp_avg_sq"]]
say(f"bytes kept: {' + '.join(str(t.nbytes) for t in kept)} = {sum(t.nbytes for t in kept)}")
say(f"and of the data: {' + '.join(str(t.nbytes) for t in (x_32, x_32.grad, y_32))}")
say(f"FLOPs: {forward} forward, {counter.get_total_flops() - forward} backward")

# %% [markdown]
# **X** stays in memory from forward to backward, because the gradient of **W** is made of it: an activation.

# %% [markdown]
# ### Why more than one device at all
#
# ![Two reasons: more data than one device can read in time, so replicas of the model read in parallel; or a model larger than one
# device's memory, so its parts lie on several](../assets/01_two_reasons.svg)
#
# For one of two reasons. **There is too much data**: one device would need months. Then give each device a copy and
# a share of the data (lessons 03 and 05). Or **the model is too large**: it does not fit. Then cut it up (lessons 06
# to 10). This lesson gives you the numbers by which you decide.
#
# Here is what more devices did for one network and one data set, ResNet-50 on ImageNet ([Goyal et
# al.](https://arxiv.org/abs/1706.02677), [Yamazaki et al.](https://arxiv.org/abs/1903.12650)):
#
# | who | devices | batch | time | accuracy |
# |---|---|---|---|---|
# | the usual baseline | 8 P100 | 256 | 29 h | 75.3 % |
# | Goyal et al. 2017 | 256 P100 | 8,192 | 1 h | 76.3 % |
# | Yamazaki et al. 2019 | 2,048 V100 | 81,920 | 74.7 s | 75.08 % |
#
# **Predict.** From 8 devices to 2,048 is a factor of 256. What is the speed-up, and why?
#
# <details><summary>Answer</summary>
#
# 104,400 s / 74.7 s = 1,398, more than five times the factor of 256. The devices differ: a V100 has matrix units, a
# P100 has none.
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
baseline_s = 29 * 3600
say(f"1 h on 256 P100:     {baseline_s / 3600:5.0f} times as fast on {256 // 8} times the devices")
say(f"74.7 s on 2,048 V100: {baseline_s / 74.7:,.0f} times as fast on {2048 // 8} times the devices")

# %% [markdown]
# The last row divided by 256 is an "efficiency" of 546 %, which says nothing about scaling. The second row compares
# P100s with P100s: 29 times as fast on 32 times the devices, **91 %**. Rule: a scaling efficiency compares *the same
# device*.

# %% [markdown]
# ## Lab: other models, other recipes (MORE, 15 min)
#
# ### Other GPTs, and the very first loss
#
# Your formula is exact *for this variant*. **GPT-2** has biases on query, key and value too, so 13D, and its head *is*
# its embedding ("tied"), so it has V(D + 1) fewer. **Llama** has no biases, no learned positions, and a norm without a
# shift. Two more things differ, and both change the matrices:
#
# - **GQA**, grouped queries: K heads of keys and values serve H heads of queries. Query and output have D² weights each, key and
#   value D·D·K/H each.
# - **SwiGLU**: the MLP has three matrices of D by M, not two of D by 4D.


# %% tags=["nbval-check-output"]
# %%ranks
def count_llama(V, D, N, H, K, M):
    """Return the parameters of a Llama with H heads of queries, K of keys and values, and M hidden numbers."""
    layer = 2 * D**2 + 2 * D * D * K // H + 3 * D * M + 2 * D
    return V * D + N * layer + D + D * V


published = {"Llama 3 8B": (128_256, 4096, 32, 32, 8, 14_336), "Llama 3 70B": (128_256, 8192, 80, 64, 8, 28_672)}
for name, sizes in published.items():
    say(f"{name:11} P = {count_llama(*sizes):14,}; 12 N D^2 would be {12 * sizes[2] * sizes[1] ** 2:14,}")

# %% [markdown]
# `train.py --preset llama-nano` trains a Llama of ShakespeareGPT's size. Four steps lead to it from your own count:

# %% tags=["nbval-check-output"]
# %%ranks
V, T, D, N, H, K, M = len(corpus.vocab), 64, 128, 4, 4, 2, 344
llama = GPT(GPTConfig(V, T, N, H, D, style="llama", n_kv_head=K, n_hidden=M))
P = count_parameters(V, T, D, N)
say(f"{P:9,}  your count of the GPT")
for name, more in {
    "no biases, norms without a shift": -N * 8 * D - D - V,
    "rotary positions instead of learned ones": -T * D,
    f"{K} heads of keys and values for {H} of queries": -N * 2 * D * D * (H - K) // H,
    f"three matrices of D by {M} in the MLP": N * D * (3 * M - 8 * D),
}.items():
    P += more
    say(f"{more:+9,}  {name}")
assert sum(p.numel() for p in llama.parameters()) == P
say(f"{P:9,}  the parameters of the trainer's Llama")

# %% [markdown]
# **Predict.** What is ShakespeareGPT's very first loss, in nats per character (natural logarithms, what
# `F.cross_entropy` returns), before it has learnt anything?
#
# <details><summary>Answer</summary>
#
# It knows nothing, so it gives each of Shakespeare's 65 characters about the same probability: the loss is close to ln 65
# = 4.174. A first loss far above says that the initialisation is off. One far below says that the targets leak into
# the input.
#
# </details>

# %%
# %%ranks
import math

x_BT, y_BT = batch()
_, first_loss = new_model()(x_BT, y_BT)
say(f"first loss {first_loss.item():.3f}, ln {len(corpus.vocab)} = {math.log(len(corpus.vocab)):.3f}")
metrics.exact(first_loss=first_loss)
metrics.close(first_loss_close=first_loss)

# %% [markdown]
# ### Recipes
#
# ![Four recipes as stacks of boxes, one box per byte: weights, gradients, master weights, Adam's two
# moments](../assets/01_bytes.svg)

# %% tags=["nbval-check-output"]
# %%ranks
from manyhands.predict.memory import RECIPES

say(f"{'':34} bytes per parameter" + "".join(f"{name:>12}" for name in large_models))
for name in ("fp32", "bf16", "bf16 + fp32 master", "bf16 + fp32 master and gradients", "fp32 + autocast"):
    total = RECIPES[name].total
    sizes = (f"{total * config.num_params() / 1e9:9,.0f} GB" for config in large_models.values())
    say(f"{name:34} {total:19g}" + "".join(sizes))

# %% [markdown]
# Trainers that add up many micro-batches often keep the *gradients* in float32 as well: 18. Autocast keeps float32
# weights and gradients, 4 + 4 + 8 = 16, plus a bf16 copy of the matrices while they are in use: 18. Except for this
# copy, the table counts what stays *between* steps; within a step it can be more. An optimizer that turns all 16-bit
# gradients into float32 at once holds 4 bytes more, so it peaks at 20. (Some slides calculate with 14: they leave out
# the gradients.)
#
# ### One more copy under DDP
#
# [DDP](../assets/glossary.md#ddp) averages gradients in *buckets*, which are memory of their own. With
# `gradient_as_bucket_view=True` each `p.grad` is a part of a bucket. By default it is off, and every gradient is there
# twice.

# %%
# %%ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


def gradient_bytes(as_view):
    """Return the bytes of gradients and buckets of a DDP step, per parameter: each memory once. All ranks call it."""
    memory = {}

    def note_and_average(group, bucket):
        storage = bucket.buffer().untyped_storage()
        memory[storage.data_ptr()] = storage.nbytes()
        return allreduce_hook(group, bucket)

    ddp = DistributedDataParallel(new_model(), gradient_as_bucket_view=as_view)
    ddp.register_comm_hook(None, note_and_average)
    ddp(*batch())[1].backward()
    for p in ddp.parameters():
        storage = p.grad.untyped_storage()
        memory[storage.data_ptr()] = storage.nbytes()
    return sum(memory.values()) / shakespeare.num_params()


for as_view in (False, True):
    say(f"gradient_as_bucket_view={as_view}: {gradient_bytes(as_view):.1f} bytes per parameter for gradients")

# %% [markdown]
# ### Exercise 1: a master copy
#
# Write the step of mixed precision: `master_step(parameters, masters, adam)`. The `parameters` are in bf16 and have
# gradients. `masters` are float32 copies, in the same order, which the optimizer `adam` updates. Afterwards the masters
# have taken the step, and each parameter is its master, rounded. Between two steps there are 16 bytes per parameter and
# no more. (Write under `torch.no_grad()`.)


# %%
# %%ranks
def master_step(parameters, masters, adam):
    raise NotImplementedError  # your turn


checks.master_copy(master_step, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 1</summary>
#
# ```python
# def master_step(parameters, masters, adam):
#     with torch.no_grad():
#         for p, master in zip(parameters, masters, strict=True):
#             master.grad = p.grad.float()
#         adam.step()
#         for p, master in zip(parameters, masters, strict=True):
#             p.copy_(master)  # rounded: the master remembers what the weight cannot hold
#             master.grad = None  # 4 bytes per parameter, of no use until the next step
# ```
#
# </details>

# %% [markdown]
# Put your step into an optimizer, and measure the bytes that it holds. `MemoryTimeline` follows every tensor from its
# allocation until it is freed. It does not know the recipes.

# %%
# %%ranks
from manyhands.measure.memory_timeline import MemoryTimeline


class MasterAdamW:
    """AdamW on float32 copies of 16-bit parameters."""

    def __init__(self, parameters, lr=1e-3):
        self.parameters = list(parameters)
        self.masters = [p.detach().float() for p in self.parameters]
        self.adam = torch.optim.AdamW(self.masters, lr=lr)

    def step(self):
        master_step(self.parameters, self.masters, self.adam)


# %%
# %%ranks
def weigh(recipe):
    """Bytes per parameter, activations aside: (when a step of ShakespeareGPT has ended, at most within it)."""
    model = new_model(torch.float32 if recipe == "fp32" else torch.bfloat16)
    optimizer = (MasterAdamW if "master" in recipe else torch.optim.AdamW)(model.parameters())
    for _ in range(2):  # the first step makes the optimizer's state
        model.zero_grad()
        with MemoryTimeline(model, getattr(optimizer, "adam", optimizer)) as seen:
            with seen.phase("forward and backward"):
                model(*batch())[1].backward()
            with seen.phase("optimizer"):
                optimizer.step()
    kinds = ("parameters", "gradients", "optimizer")
    held = [sum(sample.bytes[kind] for kind in kinds) for sample in seen.samples]
    return held[-1] / shakespeare.num_params(), max(held) / shakespeare.num_params()


for recipe in ("fp32", "bf16", "bf16 + fp32 master"):
    ended, most = weigh(recipe)
    say(f"{recipe:20} {ended:.2f} bytes per parameter at the end, {most:.2f} at most")

# %% [markdown]
# 16 between steps, up to 20 within. A step that goes through the tensors one by one would need hardly more than 16.

# %% [markdown]
# ### A calculator
#
# Choose a model, a recipe, a number of ranks. The strategies in it are those of lessons 03 and 06.

# %% tags=["active-ipynb"]
# from manyhands.widgets.memory import show_memory
#
# show_memory()

# %% [markdown]
# ## Lab: where the time goes (MORE, 8 min)
#
# ### The counter and the formula
#
# The library's counter sees every matrix product of a step. Does it agree with the formula, and with the rule of 6·P?

# %%
# %%ranks
from manyhands.predict.models import flops_per_token
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

x_BT, y_BT = batch()
with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
    new_model()(x_BT, y_BT)[1].backward()
counted, formula = counter.get_total_flops(), flops_per_token(shakespeare) * x_BT.numel()
rule = 6 * shakespeare.num_params() * x_BT.numel()
say(f"counted {counted:,}, the formula {formula:,}; the rule gives {rule / counted:.3f} of it")
assert counted == formula
metrics.exact(flops=counted)

# %% [markdown]
# ### Which operators calculate, which only move bytes
#
# How does such a counter work? PyTorch hands each operator, forward and backward, to a `TorchDispatchMode` if one is
# active. There we can count what we like: calls, FLOPs, and the bytes that an operator reads and writes. (A *view* such as
# a transpose moves none.)

# %%
# %%ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counter(TorchDispatchMode):
    """What every operator in the block does: rows[name] = [calls, FLOPs, bytes read and written]."""

    products = ("mm", "addmm", "bmm", "baddbmm")

    def __init__(self):
        super().__init__()
        self.rows = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)]
        made = [t for t in tree_leaves(result) if torch.is_tensor(t)]
        # a view lies in the memory of what was given: nothing is moved
        given_at = {t.untyped_storage().data_ptr() for t in given}
        is_view = all(t.untyped_storage().data_ptr() in given_at for t in made) and not op._schema.is_mutable
        row = self.rows.setdefault(op.overloadpacket.__name__, [0, 0, 0])  # "addmm.default" -> "addmm"
        row[0] += 1
        if op.overloadpacket.__name__ in self.products:  # [.., n, k] times [.., k, m]
            row[1] += 2 * given[-2].numel() * given[-1].shape[-1]
        row[2] += 0 if is_view else sum(t.nbytes for t in given + made)
        return result

    def total(self):
        return sum(row[1] for row in self.rows.values())


# %% [markdown]
# A device has two speeds: FLOP/s, and bytes/s between its memory and its cores. An H100 does 989 TFLOP/s in bf16 and reads
# 3.35 TB/s (its data sheet): while it fetches one byte it could do 295 FLOPs. An operator with fewer FLOPs per byte than
# that waits for memory.
#
# ![A roofline of an H100 in bf16: a sloping line of memory speed up to 295 FLOPs per byte, then a flat one at 989 TFLOP/s; an
# addition lies at the far left, a product of 128 by 128 matrices in the middle, one of 4,096 on the flat part](../assets/01_roofline.svg)
#
# This picture is called a **roofline**: below the roof, an operator can go as fast as memory feeds it. A product of n by n
# matrices in bf16 has n/3 FLOPs per byte.
#
# **Predict.** Which share of the *bytes* is moved by operators that do not multiply matrices at all?
#
# <details><summary>Answer</summary>
#
# About half. An addition reads and writes as many bytes as a small product does, and each of them is a pass through
# memory.
#
# </details>

# %%
# %%ranks
model, (x_BT, y_BT) = new_model(), batch()
with Counter() as ours:
    model(x_BT, y_BT)[1].backward()
rows = sorted(ours.rows.items(), key=lambda row: -row[1][2])
moved = sum(row[2] for row in ours.rows.values())
for name, (calls, done, nbytes) in rows[:8]:
    short, per_byte = name.removeprefix("_scaled_dot_product_")[:38], done / max(nbytes, 1)
    say(f"{short:38} {calls:4d} calls {nbytes / 1e6:6.1f} MB {per_byte:6.1f} FLOP/byte")
products = sum(row[2] for name, row in ours.rows.items() if name in Counter.products)
fused = sum(row[2] for name, row in ours.rows.items() if "attention" in name)  # its products we do not see
parts = {"products": products, "fused attention": fused, "the rest": moved - products - fused}
say("bytes: " + ", ".join(f"{name} {100 * part / moved:.0f} %" for name, part in parts.items()))

# %% [markdown]
# Much of the traffic comes from operators that multiply no matrices: additions, norms, GELU, sums and copies. That is
# why compilers fuse them, and why **flash attention** is fast: one kernel for softmax(QKᵀ)V that never stores the T × T
# *scores*. It computes them again in backward, so it multiplies more, and moves less. (On a GPU the library's counter
# knows flash attention, and counts 5 products in backward instead of 4.) Wider matrices have more FLOPs per byte: FLOPs
# grow with the cube of the size, bytes with its square.

# %% [markdown]
# ### Where the time goes: the profiler
#
# `torch.profiler` is a counter with a clock. Do it and our counter agree on what was called?

# %%
# %%ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# %%
# %%ranks --timeout 120
from torch.profiler import ProfilerActivity, profile

model = new_model()
with Counter() as ours:  # also the warm-up
    model(*batch())[1].backward()
gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
with profile(activities=[ProfilerActivity.CPU, *gpu], with_flops=True, acc_events=True) as prof:
    model(*batch())[1].backward()
calls = [event for event in prof.key_averages() if event.device_type == torch.autograd.DeviceType.CPU]  # no kernels
events = {event.key.removeprefix("aten::"): event for event in calls}
clock = "self_device_time_total" if gpu else "self_cpu_time_total"  # on a GPU the CPU only launches
used_us = {name: getattr(event, clock) for name, event in events.items()}
whole_us = sum(used_us.values()) or 1
if rank == 0:
    for name in sorted(events, key=used_us.get, reverse=True)[:5]:
        say(f"{name[:44]:44} {100 * used_us[name] / whole_us:3.0f} % of the time")
    for name in ("mm", "addmm"):
        say(f"{name}: {events[name].count} calls, {events[name].flops:,} FLOPs; ours {ours.rows[name][:2]}")

# %% [markdown]
# The same calls, the same FLOPs. On a GPU the shares are shares of the GPU's own time, without the gaps *between*
# kernels. In these gaps the GPU waits for Python: look for them in the trace.

# %% [markdown]
# ### Reading an MFU
#
# *Which peak?* An MFU of 50 % against half the real peak is an MFU of 25 %. *Which FLOPs?* Recomputed activations are
# work for the device, and none for the model. (With them it is called HFU, *hardware* FLOPs utilisation.) And 12NDT
# counts every pair of positions: kernels that skip what the causal mask hides do about half of these, so with long
# sequences MFU flatters them. For scale: PaLM reported an MFU of 46.2 % and an HFU of 57.8 % ([Chowdhery et al.
# 2022](https://arxiv.org/abs/2204.02311)).

# %% [markdown]
# ## Lab: activations (MORE, 14 min)
#
# ### How to ask autograd, and two other formulas
#
# `saved_tensors_hooks` shows you everything that autograd puts aside for backward.

# %%
# %%ranks
from torch.autograd.graph import saved_tensors_hooks


def kept_for_backward(call, model):
    """(bytes that autograd keeps while call() runs, what it returns): each memory once, no parameters."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):  # autograd is about to put this tensor aside
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor.detach()  # the tensor itself would hold the graph, and the graph holds it: never freed

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()  # must stay alive: freed memory would be counted twice, or once too few
    return sum(kept.values()), result


# %% [markdown]
# Two other formulas are in circulation. One, from slides, counts *values*:
# 5NBTD (feed-forward) + BNHT² (attention's scores) + 2BVT (logits and their gradient) + 2BTD (last norm and head) + 2BT
# (loss). The other, from Korthikanti et al. 2022, counts bytes: N·B·(34TD + 5HT²).


# %%
# %%ranks
from manyhands.measure.tensor_bytes import count_saved
from manyhands.predict import activation_memory

model, (x_BT, y_BT) = new_model(), batch()
kept, _ = kept_for_backward(lambda: model(x_BT, y_BT), model)
library = count_saved(lambda: model(x_BT, y_BT), model)
in_package = sum(activation_memory.saved_bytes(shakespeare, sequences).values())
slides = 4 * sum(activation_memory.slide_values(shakespeare, sequences).values())
published = activation_memory.published_bytes(shakespeare, sequences)
say(f"ours counts {kept:,}, the package {library.bytes:,}; it predicts {in_package:,}")
say(f"the slides' formula {slides:,}: counted / formula = {kept / slides:.2f}")
say(f"Korthikanti et al.  {published:,}: counted / formula = {kept / published:.2f}")
c = class_70b
vectors, scores = (n * c.n_layer for n in (34 * c.block_size * c.n_embd, 5 * c.n_head * c.block_size**2))
say(f"one sequence of the 70B class: 34TD is {vectors / 1e9:.0f} GB, 5HT^2 is {scores / 1e9:.0f} GB")

# %% [markdown]
# The slides' formula leaves out query, key, value, attention's output and the norms' inputs, and counts scores that
# flash attention never stores. Korthikanti et al. assume 16 bits and dropout. Without the two dropout masks their 34TD
# becomes 32TD bytes. Ours is 16 *values*: the same 32TD in 16 bits. Flash attention saves the 5HT², which is most of
# the memory where sequences are long.

# %% [markdown]
# ### Not every block
#
# You need not recompute every block: stop when the model fits. (The cell uses float32 and fused attention, whose
# products the counter does not see on a CPU.)

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.measure.tensor_bytes import count_saved
from torch.utils.flop_counter import FlopCounterMode


# %%
# %%ranks
def recompute_some(k):
    """(bytes kept, FLOPs of a step) of ShakespeareGPT that recomputes its first k blocks."""
    model = new_model()

    def run_block(block, x_BTD):
        return Recompute.apply(block, x_BTD) if block in [*model.blocks[:k]] else block(x_BTD)

    with FlopCounterMode(display=False) as counter:
        counter.mod_tracker.__exit__()  # the total alone, as above
        kept = count_saved(lambda: forward_with(model, run_block, *batch()), model)
        kept.result.backward()
    return kept.bytes, counter.get_total_flops()


swept = [recompute_some(k) for k in range(5)]
for k, (kept, done) in enumerate(swept):
    say(f"{k} of 4 blocks recomputed: keeps {kept / 1e6:5.2f} MB, {done / 1e9:.3f} GFLOP")
vectors = (swept[0][0] - swept[4][0]) / 4 / (4 * shakespeare.n_embd * sequences * 64)
say(f"each block saves {vectors:.2f} vectors per token: its 16, less the input")
metrics.exact(recompute_sweep=swept)

# %% [markdown]
# A straight line: each block saves the same bytes for the same FLOPs. (The 0.06 are the block's few single numbers per
# token, (H + 4)/D.) The pieces of exercise 3 differ.

# %% [markdown]
# ### A large batch in small pieces
#
# Activations grow with the sequences that are in memory *at once*. Gradients add up in `p.grad`, so the
# batch can come in pieces: [**accumulation**](../assets/glossary.md#accumulation). Each piece, a
# [*micro-batch*](../assets/glossary.md#micro-batch), is forgotten before the next one comes.
#
# ### Exercise 2: accumulate
#
# `model(x, y)` returns `(logits, loss)`, where the loss is the *mean* over the tokens that it was given. Write
# `accumulate(model, x_BT, y_BT, pieces)`: cut the batch into `pieces` equal micro-batches, go through the model once with
# each, and leave in `p.grad` the gradient of the mean over the whole batch. The check also looks how many micro-batches
# are in memory at once. (`x_BT.chunk(4)` is a list of four.)


# %%
# %%ranks
def accumulate(model, x_BT, y_BT, pieces):
    """Leave the gradients of the batch's mean loss, with one micro-batch in memory at a time."""
    raise NotImplementedError  # your turn


checks.accumulation(accumulate, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 2</summary>
#
# ```python
# def accumulate(model, x_BT, y_BT, pieces):
#     """Leave the gradients of the batch's mean loss, with one micro-batch in memory at a time."""
#     for x_bT, y_bT in zip(x_BT.chunk(pieces), y_BT.chunk(pieces), strict=True):
#         _, loss = model(x_bT, y_bT)
#         (loss / pieces).backward()  # a mean of equal means; if you forget to divide, Adam hides it
# ```
#
# </details>

# %% [markdown]
# Accumulation needs a quarter of the activations (the next section measures it), for the same FLOPs and the same
# gradient. The price: small matrices use a device less well. And the pieces must be *equal*: exercise 4 is the case
# where they are not.

# %% [markdown]
# ### Three steps, byte by byte
#
# Compare three steps: a plain one, one of four micro-batches (exercise 2), and one with checkpointing (build D).
# Predictions come from the formulas alone.


# %%
# %%ranks
def predict_kept(config, num_sequences, itemsize=4):
    """Return the bytes that autograd keeps of our GPT: (by one block, by the last norm, the head and the loss)."""
    D, H, V = config.n_embd, config.n_head, config.vocab_size
    tokens = num_sequences * config.block_size
    return itemsize * tokens * (16 * D + H + 4), itemsize * tokens * (2 * D + 2 + V)


def predict_bytes(case):
    """The most bytes of each kind during a step of ShakespeareGPT with AdamW in float32, by formula."""
    P, N = shakespeare.num_params(), shakespeare.n_layer
    at_once = sequences // 4 if case == "4 micro-batches" else sequences
    block, head = predict_kept(shakespeare, at_once)
    stream = 4 * at_once * 64 * shakespeare.n_embd  # the input of a block: 1 of its 16 vectors
    kept = N * stream + block - stream if case == "checkpointing" else N * block + head
    return {"parameters": 4 * P, "gradients": 4 * P, "optimizer": 8 * P, "activations": kept}


# %%
# %%ranks
def step_of(case, model, optimizer, x_BT, y_BT, seen):
    """One training step in its phases."""
    if case == "4 micro-batches":
        with seen.phase("4 x forward, backward"):
            accumulate(model, x_BT, y_BT, pieces=4)
    else:
        run_block = Recompute.apply if case == "checkpointing" else lambda block, x_BTD: block(x_BTD)
        with seen.phase("forward"):
            loss = forward_with(model, run_block, x_BT, y_BT)
        with seen.phase("backward"):
            loss.backward()
    with seen.phase("optimizer"):
        optimizer.step()
        optimizer.zero_grad()


# %%
# %%ranks
from manyhands.measure.memory_timeline import MemoryTimeline

steps = dict.fromkeys(("plain", "4 micro-batches", "checkpointing"))
for case in steps:
    model, (x_BT, y_BT) = new_model(), batch()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # the first step makes the optimizer's state; the second one is kept
        with MemoryTimeline(model, optimizer) as steps[case]:
            step_of(case, model, optimizer, x_BT, y_BT, steps[case])

# %% [markdown]
# **Predict.** Which kinds of bytes differ between the cases? When in a plain step is the sum largest?
#
# <details><summary>Answer</summary>
#
# Only activations. The sum is largest when backward has just begun: all activations are there, and the first gradients of
# activations on top.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from manyhands.plots.memory_stack import memory_stack

if rank == 0:
    case = "4 micro-batches"
    figure = memory_stack(steps[case].samples, f"one step, {case}", predict_bytes(case), steps["plain"].peak.total)
    show(figure, "memory_4_micro_batches", "activations rise and fall four times, gradients stay from the first one on")

# %%
# %%ranks
highest, worst = {}, {}
for case, seen in steps.items():
    predicted = predict_bytes(case)
    highest[case] = {kind: seen.highest(kind) for kind in predicted}
    say(f"{case}: " + ", ".join(f"{kind} {n / 1e6:.2f} MB" for kind, n in highest[case].items()))
    worst[case] = max(abs(highest[case][kind] / predicted[kind] - 1) for kind in predicted)
    say(
        f"   each kind at most {100 * worst[case]:.2f} % from the prediction; the sum is largest in '{seen.peak.phase}'"
    )
    there = seen.peak.total - seen.peak.bytes["other"]
    say(
        f"   peak {seen.peak.total / 1e6:.2f} MB, of which the four kinds explain {100 * there / seen.peak.total:.0f} %"
    )
share = highest["checkpointing"]["activations"] / highest["plain"]["activations"]
say(f"checkpointing leaves {100 * share:.0f} % of the activations")
metrics.exact(highest_bytes=highest)
metrics.measured(worst_residual=worst)

# %% [markdown]
# **The residual.** No formula here predicts the part called "other": results that live for one operator, and the
# gradients of activations. It lifts the peak above the highest dashed line, and an allocator needs more on top: leave
# room. Nothing in this lesson cuts the bytes that are counted per parameter. That is where lesson 06 begins.

# %% [markdown]
# ## Sixteen bits (MORE, 8 min)
#
# **Why.** Sixteen bits take half the bytes, and a GPU with matrix units does many times the FLOP/s. The price is
# precision (bf16) or range (fp16).
#
# ![The bits of fp32, bf16 and fp16: sign, exponent, fraction; bf16 has the exponent of fp32, fp16 more
# fraction](../assets/01_floats.svg)
#
# **bf16** is float32 with the last 16 bits cut off: the same range, 8 significant bits. **fp16** has 11 significant
# bits and a narrow range: it ends at 65,504, and below 6·10⁻⁵ it loses digits until it is 0 below 3·10⁻⁸. Set bits
# yourself:

# %% tags=["active-ipynb"]
# from manyhands.widgets.floats import show_floats
#
# show_floats(0.1)

# %% [markdown]
# **Predict.** A weight is 1.0 and the optimizer adds 0.001 to it, a hundred times. What is it afterwards, in bf16?
#
# <details><summary>Answer</summary>
#
# 1.0. Each step is rounded away before the next one comes: the next bf16 number after 1 is 1 + 1/128, or 1.0078.
#
# </details>

# %% tags=["nbval-check-output"]
# %%ranks
weight, master = torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0)
for _ in range(100):
    weight += 0.001
    master += 0.001
say(f"in bf16 {weight.item():g}; the float32 master is {master.item():.3f}")

# %% [markdown]
# That is what master weights are for. [**Mixed precision**](../assets/glossary.md#mixed-precision) by `torch.autocast`
# is another way to the same end: weights stay in float32, and *for matrix products* weights and inputs are cast to 16
# bits. Around forward, nothing else changes:
#
# ```python
# with torch.autocast(device.type, dtype=torch.bfloat16):
#     _, loss = model(x_BT, y_BT)
# ```

# %% [markdown]
# ### What autocast casts, and what it keeps
#
# What a format can hold, in numbers:

# %% tags=["nbval-check-output"]
# %%ranks
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn):
    info = torch.finfo(dtype)
    subnormal = info.smallest_normal * info.eps
    name, normal = str(dtype).removeprefix("torch."), info.smallest_normal
    say(f"{name:13} largest {info.max:.3g}, smallest normal {normal:.3g}, smallest of all {subnormal:.3g}")
for value in (1.001, 70_000.0, 1e-8):
    halves = [torch.tensor(value).to(dtype).item() for dtype in (torch.bfloat16, torch.float16)]
    say(f"{value:g} becomes {halves[0]:g} in bf16 and {halves[1]:g} in fp16")

# %% [markdown]
# The last two are **fp8**: E4M3 has 4 bits of exponent and 3 of fraction, and ends at 448; E5M2 has fp16's range and 2
# bits of fraction. They are used only in matrix products, with a scale for each tensor or block, and double the FLOP/s
# again: the [handbook](../assets/handbook/01_one_device.md#peaks) has the peaks.
#
# On a GPU autocast calculates norms, softmax and loss in float32; on a CPU it leaves softmax and norms in the type of
# their input. Written by hand, the cast is one line:


# %%
# %%ranks
from torch import nn


def cast_by_hand(layers, x, dtype=torch.bfloat16):
    """The layers in mixed precision: linear maps in `dtype`, everything else as it comes."""
    for layer in layers:
        if isinstance(layer, nn.Linear):
            x = F.linear(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))
        else:
            x = layer(x)
    return x


torch.manual_seed(0)
mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
x_B64 = torch.randn(32, 64, device=device)
with torch.autocast(device.type, dtype=torch.bfloat16):
    library = mlp(x_B64)
ours = cast_by_hand(mlp, x_B64)
error = ((ours - mlp(x_B64)).abs().max() / mlp(x_B64).abs().max()).item()
say(f"by hand = autocast: {torch.equal(ours, library)}; result {ours.dtype}, weights {mlp[0].weight.dtype}")
say(f"largest error against float32: {100 * error:.1f} %")

# %% [markdown]
# Now the GPT. Its products take and give 16 bits. Does it keep half of the activations? Count.

# %%
# %%ranks
from torch.autograd.graph import saved_tensors_hooks

# %%
# %%ranks
model, (x_BT, y_BT) = new_model(), batch()
in_fp32, (_, loss_fp32) = kept_for_backward(lambda: model(x_BT, y_BT), model)
with torch.autocast(device.type, dtype=torch.bfloat16):
    in_bf16, (_, loss_bf16) = kept_for_backward(lambda: model(x_BT, y_BT), model)
cast = 2 * sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
say(f"kept for backward: {in_fp32 / 1e6:.2f} MB in fp32, {in_bf16 / 1e6:.2f} MB under autocast")
say(f"that is {in_bf16 / in_fp32:.2f} of it; {cast / 1e6:.2f} MB are weights that were cast")
say(f"loss {loss_fp32.item():.4f} and {loss_bf16.item():.4f}")
metrics.exact(autocast_saved_bytes=in_bf16)

# %% [markdown]
# It keeps more than half. The stream between the blocks (the x to which every block adds) stays in float32, as do the
# norms' inputs. And autocast keeps what it has cast: 2 bytes for each weight of a matrix until backward has ended. That
# makes the 18 bytes per parameter of the table.

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: sixteen bits</summary>
#
# The widget is the fun part; let them find 1.0078. *Usual mistake:* "autocast
# halves my memory": it does not touch weights, gradients and optimizer. *Ask:* "Why is fp16 in the zoo of this
# lesson, and bf16 not?"
#
# </details>

# %% [markdown]
# ### Loss scaling, for fp16
#
# fp16 cannot represent very small numbers. Take the gradient of the 70B-class model's logits, for one wrong word out of
# 50,280 in a batch of 256·4,096 tokens: before training, when every word is equally likely, it is about
# 1/50,280/1,048,576 = 2·10⁻¹¹. In fp16 that is 0. Only the gradients of the right words, about 10⁻⁶, are not 0, and
# keep about four of their eleven significant bits.
#
# [**Loss scaling**](../assets/glossary.md#loss-scaling) ([Micikevicius et al. 2018](https://arxiv.org/abs/1710.03740)):
# multiply the *loss* by a large number, and all gradients are that much larger; divide them by it before the update, in
# float32. If the number is too large, gradients become infinite: skip the step and halve it. After many steps without
# that, double it.


# %%
# %%ranks
class LossScaler:
    """(loss * scaler.scale).backward(); scaler.step(optimizer)"""

    def __init__(self, scale=2.0**16, growth_interval=2000):
        self.scale, self.growth_interval, self.good_steps = scale, growth_interval, 0

    def step(self, optimizer):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        for gradient in gradients:
            gradient /= self.scale
        if not all(gradient.isfinite().all() for gradient in gradients):
            self.scale, self.good_steps = self.scale / 2, 0  # and no update
            return
        optimizer.step()
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0


# %% [markdown]
# First, what is lost without loss scaling. Run ShakespeareGPT in fp16, with its loss divided by 4,096, as if the mean
# ran over 4,096 times as many tokens. How many gradients are exactly 0?


# %%
# %%ranks
import math


def zeros_in_fp16(scale):
    """Percent of ShakespeareGPT's gradients that are 0 in fp16, and whether all are finite."""
    model = new_model()
    with torch.autocast(device.type, dtype=torch.float16):
        _, loss = model(*batch())
    (loss / 4096 * scale).backward()
    gradient_P = torch.cat([p.grad.flatten() for p in model.parameters()])
    return 100 * (gradient_P == 0).float().mean().item(), bool(gradient_P.isfinite().all())


scales = [1.0, 2.0**8, 2.0**16, 2.0**40]
for scale in scales:
    zeros, finite = zeros_in_fp16(scale)
    infinite = "" if finite else ", and some are infinite"
    say(f"loss times 2^{math.log2(scale):.0f}: {zeros:4.1f} % of the gradients are 0{infinite}")
model = new_model()
model(*batch())[1].backward()
zeros = sum((p.grad == 0).sum().item() for p in model.parameters())
say(f"all in float32: {100 * zeros / shakespeare.num_params():.1f} %")

# %% [markdown]
# Compare the line of 2¹⁶ with the last one: tokens that do not occur in this batch have no gradient in float32 either,
# so 2¹⁶ lost next to nothing. 2⁴⁰ was too much.
#
# Now compare ours with the library's `torch.amp.GradScaler`, on a small problem that begins with a scale that is too
# large. Both find the same scales, and the same weights to the last bit:


# %%
# %%ranks
from torch import nn


def train_in_fp16(library):
    """The scales and last weights of 12 steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    x_B8, optimizer = torch.randn(64, 8).to(device), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, 2.0**18, growth_interval=4)
    if not library:
        scaler = LossScaler(2.0**18, growth_interval=4)
    scales = []
    for _ in range(12):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            guess_B1 = model(x_B8)
        loss = F.mse_loss(guess_B1.float(), x_B8[:, :1])
        (scaler.scale(loss) if library else loss * scaler.scale).backward()
        scaler.step(optimizer)
        if library:
            scaler.update()
        scales.append(scaler.get_scale() if library else scaler.scale)
    return scales, torch.cat([p.detach().flatten() for p in model.parameters()])


# %%
# %%ranks
(our_scales, ours_P), (scales, library_P) = train_in_fp16(False), train_in_fp16(True)
say("log2 of the scale: " + " ".join(f"{math.log2(scale):.0f}" for scale in our_scales))
say(f"as the library's: {our_scales == scales}, the same weights: {torch.equal(ours_P, library_P)}")

# %% [markdown]
# The scale falls from 2¹⁸ until the gradients are finite, and after four good steps it doubles. (A scale that was too
# large at first may fit later: the loss has fallen, and the gradients with it.) bf16 needs none of this: its range is
# float32's. That is why nearly everybody trains in bf16 now.

# %% [markdown]
# ## Exercises (MORE, 11 min)
#
# Exercises 1 and 2 are above. Each check names the first fault that it finds.
#
# ### Exercise 3: which pieces to recompute
#
# You have a budget of bytes to be kept between forward and backward, and pieces of a network: each has a `name`,
# the `kept` bytes if it is run normally, the `input` bytes that it keeps if it is recomputed, and the `flops` that
# recomputing it costs. Write `choose(pieces, budget)`: the set of names to recompute so that everything fits into
# the budget, **for the fewest FLOPs**; None if even recomputing all of them does not fit. There are at most 12
# pieces. (A greedy choice is not always the cheapest.)


# %%
# %%ranks
def choose(pieces, budget):
    raise NotImplementedError  # your turn


checks.recompute_trade_off(choose, ranks)


# %% [markdown] tags=["solution"]
# <details><summary>Solution 3</summary>
#
# ```python
# import itertools
# import math
#
#
# def choose(pieces, budget):
#     best, best_flops = None, math.inf
#     for again in itertools.product([False, True], repeat=len(pieces)):  # at most 2^12 choices: try them all
#         kept = sum(piece.input if a else piece.kept for piece, a in zip(pieces, again, strict=True))
#         cost = sum(piece.flops for piece, a in zip(pieces, again, strict=True) if a)
#         if kept <= budget and cost < best_flops:
#             best, best_flops = {piece.name for piece, a in zip(pieces, again, strict=True) if a}, cost
#     return best
# ```
#
# </details>

# %% [markdown]
# Use your function. A block has two halves, attention and MLP. Which of them costs fewer FLOPs for each byte that it
# saves? Measure both halves of a block of ShakespeareGPT, and let your function choose for half of the bytes.

# %%
# %%ranks
import math

from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# %%
# %%ranks
from torch.nn.attention import SDPBackend, sdpa_kernel

block, x_BTD = new_model().blocks[0], torch.randn(sequences, 64, 128, device=device, requires_grad=True)
halves = {
    "attention": lambda: block.attention(block.norm_1(x_BTD)),
    "mlp": lambda: block.mlp(block.norm_2(x_BTD)),
}
pieces = []
for name, half in halves.items():
    kept, result = kept_for_backward(half, block)
    with sdpa_kernel(SDPBackend.MATH), Counter() as counter:
        half()
    saved = kept - x_BTD.nbytes  # recomputed, a half still keeps its input
    price = counter.total() / saved
    say(f"{name:9} keeps {kept / 1e6:.2f} MB; to save {saved / 1e6:.2f} costs {price:.0f} FLOPs a byte")
    for i in range(4):
        pieces.append(checks.Piece(f"{name} {i}", kept, x_BTD.nbytes, counter.total()))
everything = sum(piece.kept for piece in pieces)
say(f"to keep half of {everything / 1e6:.1f} MB, recompute {sorted(choose(pieces, everything / 2))}")

# %% [markdown]
# With flash attention the two halves cost about the same per byte. The cheapest vectors are *inside* them: the outputs
# of norms and of GELU, 6 of the 16, come back without a matrix product. `train.py` has
# `--parallel.activation-checkpointing selective` for that. Before flash attention the T² scores were the cheapest, many
# bytes for few FLOPs. The *selective* recomputation of Korthikanti et al. 2022 recomputes only these.
#
# ### Exercise 4: accumulation over uneven token counts
#
# Real batches have padding. A target of -100 marks a position that does not count. `micro_batches` is a list of (ids
# [b, T], targets [b, T]), and `model(ids)` returns logits [b, T, V]. Write `accumulate_uneven(model, micro_batches)`, so
# that in the end each `p.grad` is that of **the mean over all counted tokens of the whole batch**. Only one
# micro-batch may be in memory at a time, and each goes through the model once. A micro-batch may be nothing but
# padding.


# %%
# %%ranks
def accumulate_uneven(model, micro_batches):
    raise NotImplementedError  # your turn


checks.uneven_accumulation(accumulate_uneven, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution 4</summary>
#
# ```python
# def accumulate_uneven(model, micro_batches):
#     counted = sum((targets != -100).sum() for _, targets in micro_batches)
#     for ids, targets in micro_batches:
#         logits = model(ids).flatten(0, 1)
#         total = F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")
#         (total / counted).backward()  # a sum over few tokens weighs little, as it should
# ```
#
# </details>

# %% [markdown]
# The mean of means was in a much-used trainer until October 2024, when users compared accumulation with the full
# batch ([transformers#34191](https://github.com/huggingface/transformers/pull/34191)). Lesson 05 meets it again,
# between ranks.

# %% [markdown]
# ## On the cluster (MORE, 2 min)
#
# ```bash
# python scripts/01_one_device.py --sequences 64 --repeats 50     # one process, one GPU: inside a job
# python scripts/train.py --preset gpt-7b --ranks 64 --dry-run   # what each of 64 ranks keeps
# ```
#
# **What changes on GPUs.** The formulas stay the same. But on a GPU AdamW updates all tensors at once (`foreach`), and
# may need about 4 bytes per parameter more during the update.
#
# **What to look for.** `torch.cuda.max_memory_allocated()` is the most that your tensors had. `nvidia-smi` shows more: what
# PyTorch's allocator keeps for later, and CUDA itself. A [memory
# snapshot](https://docs.pytorch.org/docs/stable/torch_cuda_memory.html) draws a GPU's tensors over time. If a run ends with
# "out of memory" while much is "reserved but unallocated", `PYTORCH_ALLOC_CONF=expandable_segments:True` may help. Where
# `torch.get_float32_matmul_precision()` is "highest", float32 products do not use TF32, and MFU has a different peak.

# %% [markdown]
# ## Further reading
#
# Tables and papers are in the [handbook](../assets/handbook/01_one_device.md).

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
