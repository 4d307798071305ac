"""Each check of lesson 01 accepts right answers and rejects mutants with the sentence that names their fault."""

import contextlib
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from exercises import Answers, FromLesson
from manyhands.checks import one_device

ours = FromLesson("01_one_device", "choose", "accumulate_uneven")


# ---- build A: parameters ----


def exact(V, T, D, N):
    return N * (12 * D**2 + 10 * D) + D * (V + T) + 2 * D + V * (D + 1)


# ---- build B: the ledger ----


def booked(**other):
    """The right ledger, with other expressions for some kinds."""

    def answer(config, sequences):
        P = config.num_params()
        right = {"parameters": 4 * P, "gradients": 4 * P, "optimizer": 8 * P}
        layer, top = 16 * config.n_embd + config.n_head + 4, 2 * config.n_embd + 2 + config.vocab_size
        right["activations"] = 4 * sequences * config.block_size * (config.n_layer * layer + top)
        return right | {kind: make(P) for kind, make in other.items()}

    return answer


def kept_by(numbers):
    """The right ledger, with another count of numbers kept for a token."""

    def answer(config, sequences):
        layer, top = 16 * config.n_embd + config.n_head + 4, 2 * config.n_embd + 2 + config.vocab_size
        kept = 4 * sequences * config.block_size * numbers(layer, config.n_layer, top)
        return booked()(config, sequences) | {"activations": kept}

    return answer


# ---- build C: sequences ----


def fits(config, device_bytes, per_parameter=16, itemsize=2, vectors=16):
    left = device_bytes - per_parameter * config.num_params()
    return left // (itemsize * vectors * config.n_embd * config.n_layer * config.block_size)


# ---- build D: recompute_backward ----


def recomputed(
    into=lambda x: x.detach().requires_grad_(), grad=torch.enable_grad, backward=lambda y, dy: y.backward(dy)
):
    """The right answer, with another x, with or without autograd, or with another start of backward."""

    def answer(block, x, dy):
        x = into(x)
        with grad():
            backward(block(x), dy)
        return x.grad

    return answer


def recomputes_by_autograd_grad(block, x, dy):
    x = x.clone().detach().requires_grad_()
    with torch.enable_grad():
        given, *others = torch.autograd.grad(block(x), [x, *block.parameters()], dy)
    for p, part in zip(block.parameters(), others, strict=True):
        p.grad = part if p.grad is None else p.grad + part
    return given


def forgets_the_parameters(block, x, dy):
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(block(x), x, dy)[0]


def runs_the_block_twice(block, x, dy):
    with torch.enable_grad():
        block(x.detach())
    return recomputed()(block, x, dy)


kept_graphs = []


# ---- exercise 2: accumulate ----


def _in_pieces(model, x, y, pieces, share):
    for ids, targets in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
        (model(ids, targets)[1] * share).backward()


def stacks_the_losses(model, x, y, pieces):
    pairs = zip(x.chunk(pieces), y.chunk(pieces), strict=True)
    (sum(model(*pair)[1] for pair in pairs) / pieces).backward()


def slices_instead_of_chunks(model, x, y, pieces):
    size = len(x) // pieces
    for i in range(pieces):
        rows = slice(i * size, (i + 1) * size)
        _, loss = model(x[rows], y[rows])
        loss.div(pieces).backward()


def divides_the_gradients_at_the_end(model, x, y, pieces):
    _in_pieces(model, x, y, pieces, 1)
    for p in model.parameters():
        p.grad /= pieces


def zeroes_the_gradients_between(model, x, y, pieces):
    for ids, targets in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
        model.zero_grad()
        (model(ids, targets)[1] / pieces).backward()


# ---- exercise 1: master_step ----


def _steps(parameters, masters, adam, down=True, up=False):
    with torch.no_grad():
        for p, master in zip(parameters, masters, strict=True):
            if up:
                master.copy_(p)
            master.grad = p.grad.float()
        adam.step()
        for p, master in zip(parameters, masters, strict=True):
            if down:
                p.copy_(master)
            master.grad = None


def master_keeps_gradients(parameters, masters, adam):
    for p, master in zip(parameters, masters, strict=True):
        master.grad = p.grad.float()
    adam.step()
    for p, master in zip(parameters, masters, strict=True):
        p.data.copy_(master)


def master_replaces_the_parameters(parameters, masters, adam):
    _steps(parameters, masters, adam)
    for p, master in zip(parameters, masters, strict=True):
        p.data = master


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


def _loss(model, ids, targets, **how):
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=-100, **how)


def weighted(weight, reduction="sum"):
    """An answer that runs backward on each micro-batch's losses times weight(its targets, all, counted targets)."""

    def answer(model, micro_batches):
        counted = sum((targets != -100).sum() for _, targets in micro_batches)
        for ids, targets in micro_batches:
            if reduction == "mean" and not (targets != -100).any():
                (model(ids).sum() * 0).backward()
            else:
                loss = _loss(model, ids, targets, reduction=reduction)
                (loss * weight(targets, [t for _, t in micro_batches], counted)).backward()

    return answer


def weighs_means_that_may_not_exist(model, micro_batches):
    counted = sum((targets != -100).sum() for _, targets in micro_batches)
    for ids, targets in micro_batches:
        counts = (targets != -100).flatten()
        losses = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten().clamp(min=0), reduction="none")
        mean = (losses * counts).sum() / counts.sum()
        (mean * counts.sum() / counted).backward()


def whole_batch_at_once(model, micro_batches):
    ids, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    _loss(model, ids, targets).backward()


def one_backward_at_the_end(model, micro_batches):
    counted = sum((targets != -100).sum() for _, targets in micro_batches)
    losses = [_loss(model, ids, targets, reduction="sum") for ids, targets in micro_batches]
    (sum(losses) / counted).backward()


def backward_that_keeps_the_graphs(model, micro_batches):
    counted, losses = sum((targets != -100).sum() for _, targets in micro_batches), []
    for ids, targets in micro_batches:
        losses.append(_loss(model, ids, targets, reduction="sum") / counted)
        losses[-1].backward(retain_graph=True)


def takes_the_step_too(model, micro_batches):
    ours.accumulate_uneven(model, micro_batches)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def a_forward_pass_to_count(model, micro_batches):
    counted = sum(
        (targets != -100).sum() for ids, targets in micro_batches if (model(ids) * 0).sum().backward() is None
    )
    for ids, targets in micro_batches:
        (_loss(model, ids, targets, reduction="sum") / counted).backward()


def never_calls_backward(model, micro_batches):
    for ids, targets in micro_batches:
        _loss(model, ids, targets)


def in_another_order(pieces, budget):  # right
    chosen = ours.choose(pieces[::-1], budget)
    return chosen if chosen is None else sorted(chosen)


def counts_tokens_without_a_graph(model, micro_batches):  # right
    with torch.no_grad():
        model(micro_batches[0][0])
    ours.accumulate_uneven(model, micro_batches)


def keeps_names_of_freed_graphs(model, micro_batches):  # right
    counted, losses = sum((targets != -100).sum() for _, targets in micro_batches), []
    for ids, targets in micro_batches:
        losses.append(_loss(model, ids, targets, reduction="sum") / counted)
        losses[-1].backward()


def by_autograd_grad(model, micro_batches):  # right
    counted, parameters = (sum((targets != -100).sum() for _, targets in micro_batches), [*model.parameters()])
    for p in parameters:
        p.grad = torch.zeros_like(p)
    for ids, targets in micro_batches:
        loss = _loss(model, ids, targets, reduction="sum") / counted
        for p, part in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad += part


def weighs_by_a_float32(model, micro_batches):  # right
    counts = [(targets != -100).sum() for _, targets in micro_batches]
    for (ids, targets), count in zip(micro_batches, counts, strict=True):
        if count:
            (_loss(model, ids, targets) * (count / sum(counts))).backward()


REJECTED = {
    "parameters": {
        "matrices alone": (lambda V, T, D, N: 12 * N * D**2, "that is the matrices of the layers alone"),
        "no bias in the head": (lambda *s: exact(*s) - s[0], "the head has a bias: a number for each token"),
        "a tied head": (lambda *s: exact(*s) - s[0] * (s[2] + 1), "the head has a matrix and a bias of its own"),
        "no last norm": (lambda *s: exact(*s) - 2 * s[2], "there is a LayerNorm between the last layer and the head"),
        "no positions": (lambda *s: exact(*s) - s[1] * s[2], "positions have an embedding, too"),
        "half a norm": (lambda *s: exact(*s) - s[2], "a LayerNorm has a scale and a shift"),
        "GPT-2": (lambda *s: exact(*s) + 3 * s[3] * s[2], "query, key and value have no bias here"),
        "one norm in a layer": (lambda *s: exact(*s) - 2 * s[3] * s[2], "each layer has two LayerNorms"),
        "no biases": (lambda *s: exact(*s) - 6 * s[3] * s[2], "the biases of attention out (D), MLP up (4 D)"),
        "one layer": (lambda V, T, D, N: exact(V, T, D, 1), "there are 3 layers, not one"),
        "half an MLP": (lambda *s: exact(*s) - 4 * s[3] * s[2] ** 2, "the MLP has two matrices"),
    },
    "does_it_fit": {
        "weights only": (lambda c, b: fits(c, b, per_parameter=2), "training keeps 16 bytes per parameter, not 2"),
        "no state": (lambda c, b: fits(c, b, per_parameter=0), "gave all of the device to activations"),
        "float32": (lambda c, b: max(0, fits(c, b, itemsize=4)), "that is with 4 bytes a number, and bf16 has 2"),
        "one vector": (lambda c, b: max(0, fits(c, b, vectors=1)), "a layer keeps 16 vectors for each token"),
        "one layer": (lambda c, b: max(0, fits(c, b, itemsize=2 / c.n_layer)), "every layer keeps its 16 vectors"),
        "tokens": (lambda c, b: max(0, fits(c, b, itemsize=2 / c.block_size)), "that is tokens, and a sequence has"),
        "below zero": (lambda c, b: fits(c, b), "so the answer is 0 sequences"),
        "rounded up": (lambda c, b: max(0, 1 + fits(c, b - 1)), "the last one does not fit whole"),
        "a part": (lambda c, b: max(0, fits(c, b) + 0.25), "round down to whole sequences"),
    },
    "recompute": {
        "autograd off": (recomputed(grad=contextlib.nullcontext), "run it under torch.enable_grad()"),
        "x.grad": (recomputed(into=lambda x: x), "x belongs to the graph above: detach it first"),
        "no gradient of x": (recomputed(into=torch.Tensor.detach),
            "what comes back should be the gradient of x, not None"),
        "ones": (recomputed(backward=lambda y, dy: y.sum().backward()), "backward must start from dy"),
        "dy": (lambda block, x, dy: (recomputed()(block, x, dy), dy)[1],
            "it is dy, the gradient of the block's output"),
        "never run": (lambda block, x, dy: dy, "the block was never run"),
        "no parameters": (forgets_the_parameters, "the block's parameters must learn, too"),
        "overwritten": (lambda block, *given: (block.zero_grad(), recomputed()(block, *given))[1],
            "add to their existing grad"),
        "twice": (runs_the_block_twice, "right, but the block was run 2 times"),
        "graph kept": (recomputed(backward=lambda y, dy: kept_graphs.append(y) or y.backward(dy, retain_graph=True)),
            "what the block kept is still in memory"),
    },
    "ledger": {
        "counts, not bytes": (booked(gradients=lambda P: P), "that is how many; each takes 4 bytes"),
        "one moment": (booked(optimizer=lambda P: 4 * P), "Adam keeps two numbers per parameter, not one"),
        "a master copy": (booked(optimizer=lambda P: 12 * P), "a master copy is for 16-bit weights"),
        "one layer": (kept_by(lambda layer, N, top: layer + top), "all N layers keep theirs"),
        "no top": (kept_by(lambda layer, N, top: N * layer), "what the top keeps is missing"),
        "top in each layer": (kept_by(lambda layer, N, top: N * (layer + top)), "the top is there once, not in every"),
        "a number": (lambda config, sequences: 16 * config.num_params(), "return a dictionary of parameters, gradie"),
    },
    "accumulation": {
        "sum of means": (lambda m, x, y, k: _in_pieces(m, x, y, k, 1), "3 times too large: that is the number of"),
        "divided twice": (lambda m, x, y, k: _in_pieces(m, x, y, k, 1 / k**2), "3 times too small"),
        "at once": (lambda m, x, y, k: m(x, y)[1].backward(), "the model was given 6 rows at once"),
        "one backward": (stacks_the_losses, "the activations of 3 micro-batches were in memory at once"),
        "zeroed between": (zeroes_the_gradients_between, "should be that of the mean over all tokens: element ["),
        "never backward": (lambda m, x, y, k: m(x, y), "run a backward pass for each micro-batch"),
    },
    "master_copy": {
        "not copied down": (lambda *given: _steps(*given, down=False), "a parameter is not its master, rounded"),
        "copied up": (lambda *given: _steps(*given, up=True), "after 2 steps the masters should be one step of adam f"),
        "gradients kept": (master_keeps_gradients, "the masters keep their gradients: 4 bytes per parameter more"),
        "no gradient": (lambda parameters, masters, adam: adam.step(), "they have not moved; give each its parameter'"),
        "tensors": (master_replaces_the_parameters, "copy numbers, not tensors"),
    },
    "recompute_trade_off": {
        "everything": (lambda pieces, budget: {piece.name for piece in pieces}, "FLOPs; recomputing nothing fits"),
        "nothing": (lambda pieces, budget: set(), "keeps 64 bytes of 34"),
        "the largest first": (lambda *given: _greedy(*given, lambda piece: piece.input - piece.kept),
            "costs 100 FLOPs; recomputing other, small fits for 90"),
        "the cheapest per byte": (
            lambda *given: _greedy(*given, lambda piece: piece.flops / max(piece.kept - piece.input, 1e-9)),
            "FLOPs;"),
        "the best of several greedy choices": (best_of_greedies, "ten unequal pieces: recomputing p"),
        "inputs forgotten": (lambda pieces, budget: ours.choose([replace(piece, input=0) for piece in pieces], budget),
            "a piece that is recomputed keeps its input"),
        "None": (lambda pieces, budget: None if pieces else set(), "the answer was None"),
        "an empty set for None": (lambda pieces, budget: ours.choose(pieces, budget) or set(),
            "no choice fits into 3.5 bytes: return None, not the set set()"),
        "indices": (lambda pieces, budget: set(range(len(pieces))), "is the name of no piece"),
    },
    "uneven_accumulation": {
        # transformers#34191
        "mean of means": (weighted(lambda _, of_all, counted: 1 / len(of_all), "mean"),
            "the mean of the micro-batches' means"),
        "not a number": (weighs_means_that_may_not_exist, "where a micro-batch has no token, its mean is 0/0"),
        "sum of means": (weighted(lambda *_: 1, "mean"), "3 times too large: that is the number of micro-batches"),
        "sum of sums": (weighted(lambda *_: 1), "the number of tokens divides the sum of the losses"),
        "padding counted": (weighted(lambda _, of_all, counted: 1 / sum(t.numel() for t in of_all)),
            "30 targets were counted, and 14 of them are not -100"),
        "weighs by sequences": (weighted(lambda t, of_all, counted: len(t) / sum(map(len, of_all)), "mean"),
            "the mean of the micro-batches' means"),
        "divides twice": (weighted(lambda _, of_all, counted: 1 / counted.double() / len(of_all)),
            "3 times too small: that is the number of micro-batches"),
        "whole batch at once": (whole_batch_at_once, "the model was given 6 rows at once"),
        "one backward at the end": (one_backward_at_the_end, "the activations of 3 micro-batches were in memory at on"),
        "graphs retained": (backward_that_keeps_the_graphs, "the activations of 3 micro-batches were in memory at onc"),
        "a step": (takes_the_step_too, "a weight was changed; leave it as it is: leave gradients, and no step"),
        "a forward pass to count": (a_forward_pass_to_count, "right, but 6 forward passes; count the tokens"),
        "never backward": (never_calls_backward, "run a backward pass for each micro-batch"),
    },
}  # fmt: skip
SOLUTIONS = {
    "parameters": "count_parameters",
    "ledger": "ledger",
    "does_it_fit": "sequences_that_fit",
    "recompute": "recompute_backward",
    "accumulation": "accumulate",
    "master_copy": "master_step",
    "recompute_trade_off": "choose",
    "uneven_accumulation": "accumulate_uneven",
}
RIGHT = {
    "parameters": [
        exact, lambda V, T, D, N: float(exact(V, T, D, N)), lambda *sizes: torch.tensor(exact(*sizes)),
        lambda V, T, D, N: np.int64(exact(V, T, D, N)),
    ],
    "ledger": [booked(), booked(gradients=lambda P: float(4 * P))],
    "does_it_fit": [
        lambda config, device_bytes: max(0, fits(config, device_bytes)),
        lambda config, device_bytes: torch.tensor(max(0, fits(config, device_bytes))),
    ],
    "recompute": [recomputes_by_autograd_grad, recomputed(backward=lambda y, dy: (y * dy).sum().backward())],
    "accumulation": [slices_instead_of_chunks, divides_the_gradients_at_the_end],
    "master_copy": [_steps],
    "recompute_trade_off": [in_another_order],
    "uneven_accumulation": [
        counts_tokens_without_a_graph, keeps_names_of_freed_graphs, by_autograd_grad, weighs_by_a_float32,
    ],
}  # fmt: skip


class TestAnswers(Answers):
    lesson, checks = "01_one_device", one_device
    rejected, right, solutions, worlds = REJECTED, RIGHT, SOLUTIONS, (1,)
