"""Each check of lesson 01 accepts right answers and rejects mutants with the sentence that names their fault."""

import numpy as np
import torch
import torch.nn.functional as F
from exercises import Answers, FromLesson
from manyhands.checks import one_device

ours = FromLesson("01_one_device", "accumulate_uneven")


def exact(V, T, D, N):
    return N * (12 * D**2 + 10 * D) + D * (V + T) + 2 * D + V * (D + 1)


def recomputes_by_autograd_grad(block, x, dy):
    x = x.clone().detach().requires_grad_()
    with torch.enable_grad():
        given, *others = torch.autograd.grad(block(x), [x, *block.parameters()], dy)
    for p, part in zip(block.parameters(), others, strict=True):
        p.grad = part if p.grad is None else p.grad + part
    return given


def divides_the_gradients_at_the_end(model, x, y, pieces):  # right
    for ids, targets in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
        model(ids, targets)[1].backward()
    for p in model.parameters():
        p.grad /= pieces


# ---- exercise 3: names to recompute ----


def _greedy(pieces, budget, price):
    chosen, kept = set(), sum(piece.kept for piece in pieces)
    for piece in sorted(pieces, key=price):
        if kept <= budget:
            return chosen
        if piece.input < piece.kept:
            chosen.add(piece.name)
            kept += piece.input - piece.kept
    return chosen if kept <= budget else None


def best_of_greedies(pieces, budget):
    def cost(names):
        return sum(piece.flops for piece in pieces if piece.name in names)

    prices = (
        lambda piece: piece.flops, lambda piece: piece.input - piece.kept,
        lambda piece: piece.flops / max(piece.kept - piece.input, 1e-9),
    )  # fmt: skip
    found = [names for price in prices if (names := _greedy(pieces, budget, price)) is not None]
    return min(found, key=cost, default=None)


# ---- exercise 4: accumulate ----


def takes_the_step_too(model, micro_batches):
    ours.accumulate_uneven(model, micro_batches)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def by_autograd_grad(model, micro_batches):  # right
    counted, parameters = (sum((targets != -100).sum() for _, targets in micro_batches), [*model.parameters()])
    for p in parameters:
        p.grad = torch.zeros_like(p)
    for ids, targets in micro_batches:
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        for p, part in zip(parameters, torch.autograd.grad(loss / counted, parameters), strict=True):
            p.grad += part


FITS, LEFT = "max(0, int(left // a_sequence))", "int(left // a_sequence)"
BACK, SEVERAL, ALL_KEPT = "y_BTD.backward(dy_BTD)", "(loss / pieces).backward()", "N * layer + top"
EACH, COUNTED, MEANS = "(total / counted).backward()", "total / counted", ('"sum"', '"mean"')
LOSSES = "    for", "    losses = []\n    for"
NOT_COUNTED = 'targets.flatten(), ignore_index=-100, reduction="sum")'
REJECTED = {
    "parameters": {
        "matrices alone": (lambda V, T, D, N: 12 * N * D**2, "that is the matrices of the layers alone"),
        "no bias in the head": (lambda *s: exact(*s) - s[0], "the head has a bias: a number for each token"),
        "a tied head": (lambda *s: exact(*s) - s[0] * (s[2] + 1), "the head has a matrix and a bias of its own"),
        "no last norm": (lambda *s: exact(*s) - 2 * s[2], "there is a LayerNorm between the last layer and the head"),
        "no positions": (lambda *s: exact(*s) - s[1] * s[2], "positions have an embedding, too"),
        "half a norm": (lambda *s: exact(*s) - s[2], "a LayerNorm has a scale and a shift"),
        "GPT-2": (lambda *s: exact(*s) + 3 * s[3] * s[2], "have no bias here, and that of MLP down has D"),
        "one norm in a layer": (lambda *s: exact(*s) - 2 * s[3] * s[2], "each layer has two LayerNorms"),
        "no biases": (lambda *s: exact(*s) - 6 * s[3] * s[2], "the biases of attention out (D), MLP up (4 D)"),
        "no biases in the MLP": (lambda *s: exact(*s) - 5 * s[3] * s[2], "the biases of MLP up (4 D) and MLP down"),
        "one bias less": (lambda *s: exact(*s) - s[3] * s[2], "MLP down have a bias of D each, and one of the two"),
        "one layer": (lambda V, T, D, N: exact(V, T, D, 1), "there are 3 layers, not one"),
        "half an MLP": (lambda *s: exact(*s) - 4 * s[3] * s[2] ** 2, "the MLP has two matrices"),
    },
    "does_it_fit": [
        ("- 16 *", "- 2 *", "14 sequences: training keeps 16 bytes per parameter"),
        ("- 16 *", "- 0 *", "gave all of the device to activations"),
        ("2 * 16 *", "4 * 16 *", "a number in bf16 takes 2 bytes"),
        ("2 * 16 *", "16 *", "7 sequences: a number in bf16 takes 2 bytes"),
        ("2 * 16 *", "2 *", "a layer keeps 16 vectors for each token"),
        (" * config.n_layer", "", "every layer keeps its 16 vectors"),
        (" * config.block_size", "", "that is tokens, and a sequence has"),
        (FITS, LEFT, "not even the state fits, so the answer is 0 sequences"),
        ("left // a_sequence", "-(-left // a_sequence)", "the last one does not fit whole"),
        (LEFT, "left // a_sequence + 0.25", "round down to whole sequences"),
    ],
    "recompute": [
        ("torch.enable_grad", "torch.no_grad", "run it under torch.enable_grad()"),
        ("x_BTD.detach().requires_grad_()", "x_BTD", "x belongs to the graph above: detach it first"),
        (".requires_grad_()", "", "backward fills if the detached x asks for it"),
        ("= block(x_BTD)", "= block(x_BTD).sum()", "(dy_BTD)", "()", "backward must start from dy"),
        ("return x_BTD.grad", "return dy_BTD", "it is dy, the gradient of the block's output"),
        (lambda block, x, dy: dy, "the block was never run"),
        (BACK, "return torch.autograd.grad(y_BTD, x_BTD, dy_BTD)[0]", "the block's parameters must learn, too"),
        ("    x_BTD =", "    block.zero_grad()\n    x_BTD =", "add to their existing grad"),
        ("        y_BTD", "        block(x_BTD)\n        y_BTD", "right, but the block was run 2 times"),
        (BACK, "y_BTD.backward(dy_BTD, retain_graph=True)\n    block.kept = y_BTD",
         "what the block kept is still in memory"),
    ],
    "ledger": [
        ('"gradients": 4 *', '"gradients":', "of 128, gradients should be 3,266,820 bytes, not 816,705 bytes: that is"),
        ("4 * tokens *", "tokens *", "each number takes 4 bytes"),
        ("2 * 4 * P", "4 * P", "Adam keeps two numbers per parameter, not one"),
        ("2 * 4 * P", "12 * P", "a master copy is for 16-bit weights"),
        (ALL_KEPT, "layer + top", "all N layers keep theirs"),
        (ALL_KEPT, "N * layer", "what the top keeps is missing"),
        (ALL_KEPT, "N * (layer + top)", "the top is there once, not in every"),
        (lambda config, sequences: 16 * config.num_params(), "return a dictionary of parameters, gradie"),
    ],
    "accumulation": [
        ("loss / pieces", "loss", "3 times too large: that is the number of"),
        ("loss / pieces", "loss / pieces**2", "3 times too small"),
        (lambda m, x, y, k: m(x, y)[1].backward(), "the model was given 6 rows at once"),
        (SEVERAL, "losses.append(loss / pieces)\n        if len(losses) == pieces:\n            sum(losses).backward()",
         *LOSSES, "the activations of 3 micro-batches were in memory at once"),
        ("        _, loss", "        model.zero_grad()\n        _, loss",
         "should be that of the mean over all tokens: element ["),
        (SEVERAL, "loss / pieces", "run a backward pass for each micro-batch"),
    ],
    "master_copy": [
        ("p.copy_(master)", "pass", "a parameter is not its master, rounded"),
        ("            master.grad = p", "            master.copy_(p)\n            master.grad = p",
         "after 2 steps the masters should be one step of adam f"),
        ("master.grad = None", "pass", "the masters keep their gradients: 4 bytes per parameter more"),
        (lambda parameters, masters, adam: adam.step(), "they have not moved; give each its parameter'"),
        ("p.copy_(master)", "p.data = master", "copy numbers, not tensors"),
    ],
    "recompute_trade_off": [
        (lambda pieces, budget: {piece.name for piece in pieces}, "FLOPs; recomputing nothing fits"),
        (lambda pieces, budget: set(), "keeps 64 bytes of 34"),
        (lambda *given: _greedy(*given, lambda piece: piece.input - piece.kept),
         "costs 100 FLOPs; recomputing other, small fits for 90"),
        (best_of_greedies, "ten unequal pieces: recomputing p"),
        (lambda *given: _greedy(*given, lambda piece: piece.flops / max(piece.kept - piece.input, 1e-9)), "FLOPs;"),
        ("piece.input if a", "0 if a", "a piece that is recomputed keeps its input"),
        (lambda pieces, budget: None if pieces else set(), "the answer was None"),
        ("return best", "return best or set()", "no choice fits into 3.5 bytes: return None, not the set set()"),
        (lambda pieces, budget: set(range(len(pieces))), "is the name of no piece"),
    ],
    "uneven_accumulation": [
        # transformers#34191
        (*MEANS, COUNTED, "(total / len(micro_batches)).nan_to_num()", "the mean of the micro-batches' means"),
        (NOT_COUNTED, 'targets.flatten().clamp(min=0), reduction="none")\n        n = (targets != -100).flatten()\n'
         "        total = (total * n).sum() / n.sum() * n.sum()", "where a micro-batch has no token, its mean is 0/0"),
        (*MEANS, COUNTED, "total.nan_to_num()", "3 times too large: that is the number of micro-batches"),
        (COUNTED, "total", "the number of tokens divides the sum of the losses"),
        ("(targets != -100).sum()", "targets.numel()", "30 targets were counted, and 14 of them are not -100"),
        (*MEANS, COUNTED, "(total * len(targets) / sum(len(t) for _, t in micro_batches)).nan_to_num()",
         "the mean of the micro-batches' means"),
        (COUNTED, "total / counted / len(micro_batches)", "3 times too small: that is the number of micro-batches"),
        ("    counted", "    micro_batches = [tuple(map(torch.cat, zip(*micro_batches)))]\n    counted",
         "the model was given 6 rows at once"),
        (EACH, "losses.append(total / counted)\n        if len(losses) == len(micro_batches):\n"
         "            sum(losses).backward()", *LOSSES, "the activations of 3 micro-batches were in memory at on"),
        (EACH, "losses.append(total / counted) or losses[-1].backward(retain_graph=True)", *LOSSES,
         "the activations of 3 micro-batches were in memory at onc"),
        (takes_the_step_too, "a weight was changed; leave it as it is: leave gradients, and no step"),
        ("for _, targets in micro_batches", "for ids, targets in micro_batches "
         "if (model(ids) * 0).sum().backward() is None", "right, but 6 forward passes; count the tokens"),
        (EACH, COUNTED, "run a backward pass for each micro-batch"),
    ],
}  # fmt: skip
SOLUTIONS = {
    "parameters": "count_parameters", "does_it_fit": "sequences_that_fit", "recompute": "recompute_backward",
    "accumulation": "accumulate", "master_copy": "master_step", "recompute_trade_off": "choose",
    "uneven_accumulation": "accumulate_uneven",
}  # fmt: skip
RIGHT = {
    "parameters": [
        exact, lambda V, T, D, N: float(exact(V, T, D, N)), lambda *sizes: torch.tensor(exact(*sizes)),
        lambda V, T, D, N: np.int64(exact(V, T, D, N)),
    ],
    "ledger": [('"gradients": 4 * P', '"gradients": float(4 * P)')],
    "does_it_fit": [(LEFT, "left // a_sequence"), (FITS, f"torch.tensor({FITS})")],
    "recompute": [
        recomputes_by_autograd_grad,
        ("= block(x_BTD)", "= (block(x_BTD) * dy_BTD).sum()", "(dy_BTD)", "()"),
    ],
    "accumulation": [
        ("x_BT.chunk(pieces), y_BT.chunk(pieces)", "x_BT.split(len(x_BT) // pieces), y_BT.split(len(y_BT) // pieces)"),
        divides_the_gradients_at_the_end,
    ],
    "master_copy": [("p.copy_(master)", "p.data.copy_(master.data)")],
    "recompute_trade_off": [("return best", "return best and sorted(best)[::-1]")],
    "uneven_accumulation": [
        ("    counted", "    with torch.no_grad():\n        model(micro_batches[0][0])\n    counted"),
        (EACH, "losses.append(total / counted) or losses[-1].backward()", *LOSSES),  # names of freed graphs
        by_autograd_grad,
        # by a float32
        ("        logits", "        if not (targets != -100).any():\n            continue\n        logits", *MEANS,
         EACH, "(total * ((targets != -100).sum() / counted)).backward()"),
    ],
}  # fmt: skip


class TestAnswers(Answers):
    lesson, checks = "01_one_device", one_device
    rejected, right, solutions, worlds = REJECTED, RIGHT, SOLUTIONS, (1,)
