"""Each check of lesson 05 accepts right answers and rejects mutants, several of them from published code, by name."""

import os

import numpy as np
from exercises import AnswersOfRanks
from manyhands.checks import same_science as checks

OF_THIS_PROCESS = int.from_bytes(os.urandom(4), "big")
LOSES, ALIKE = "len({i for mine in epoch for i in mine}) < length", "all(epoch == read[0] for epoch in read)"
KEY, ORDER = "np.random.SeedSequence(0, spawn_key=(epoch,))", "np.random.default_rng(key).permutation(length)"
DEAL = "order[done:][rank::n].tolist()"
SENDS, MEAN = "    dist.all_reduce(tokens)", "world_size * total / tokens"
COUNT, MINE = "(y_bT != -100).sum()", "(y != -100).sum()"
RULE, CLIMB = '(k if kind == "SGD" else k**0.5)', "full * min(1, (step + 1) / warm_up)"
LAST = "    backward(*micro_batches[-1])"
LOSS = 'F.cross_entropy(ddp(x), y, ignore_index=-100, reduction="sum")'
LIMIT = "1000 * eps * abs(a)"
ONE_ORDER = "all ranks must cut one and the same order"

REJECTED = {
    "diagnose": [
        ("    for epoch in read:", "    return 'fine'\n    for epoch in read:",
         "(every rank reads the same list in every epoch) should be 'same order', not 'fine'"),
        # one rank has no other to give a sequence to
        (ALIKE, "all(len({r for e in read for r, mine in enumerate(e) if i in mine}) == 1 for i in range(length))",
         "one rank reads every sequence in every epoch. Look at the order too"),
        (LOSES, f"len(sum(epoch, [])) != length or {LOSES}",  # the library reads some twice
         "the library deals 3 sequences twice, so that all have as many; none is lost"),
        (LOSES, "len({i for e in read for mine in e for i in mine}) < length",  # what one lacks, another has twice
         "one rank is in another epoch than the rest"),
        ("in read:", "in read[:1]:", "from epoch 2 on one rank is in another epoch than the rest"),
        ("in read:", "in read[-1:]:", "in epoch 1 alone one rank is in another epoch than the rest"),
        (LOSES, "len(epoch) > 1 and length % len(epoch) == 0 and {*epoch[0]} & {*epoch[-1]}",
         "in epoch 1 alone one rank is in another epoch than the rest"),
    ],
    "sharded_order": [
        (DEAL, "np.resize(order, -(-length // n) * n)[rank::n].tolist()", "read twice"),  # as the library pads
        (DEAL, "order[done:][: (length - done) // n * n][rank::n].tolist()", "never read"),
        (DEAL, "np.array_split(order[done:], n)[rank].tolist()", "deal what is left as it lies"),
        (KEY, "0", "epochs 0 and 1 have the same order"),
        (ORDER, "np.random.permutation(length)", ONE_ORDER),
        (ORDER, 'np.array(__import__("random").sample(range(length), length))', ONE_ORDER),
        (KEY, "(epoch, rank)", ONE_ORDER),
        (KEY, 'hash(f"epoch {epoch}") % 2**32', ONE_ORDER),
        (KEY, 'hash(("order", epoch)) % 2**32', ONE_ORDER),
        (KEY, '(epoch, int(__import__("time").time()))', ONE_ORDER),
        (KEY, '(epoch, __import__("os").getpid())', ONE_ORDER),
        (DEAL, "order[rank::n].tolist()", "after the stop all 64 are read again"),
        (DEAL, "order[rank::n][done:].tolist()", "never read"),
        (DEAL, "order[rank::n][done // n :].tolist()", "read twice"),  # right where done comes out even
        (DEAL, "(order[rank::n] if not done else order[done:] if rank == 0 else order[:0]).tolist()",
         "so some would wait; sizes may differ by at most one"),
        (ORDER, "np.arange(length)", "in the order of the file; shuffle"),
        # each rank keeps its cards for ever
        (DEAL, "np.random.default_rng(key).permutation(np.arange(length)[rank::n]).tolist()",
         "after the stop all 64 are read again"),
        (DEAL, "order[done:][rank::n].astype(float)", "0.0 is not a sequence; they are 0 to"),
        (DEAL, "(order[done:][rank::n] + 1).tolist()", "is not a sequence; they are 0 to"),
        ("(epoch,)", "(epoch % 2,)", "epochs 0 and 2 have the same order"),
        ("(epoch,)", "(min(epoch, 5),)", "epochs 5 and 6 have the same order"),
        (lambda length, epoch, done, rank, n: np.random.default_rng((epoch, OF_THIS_PROCESS)).permutation(length)[
            done:][rank::n], "this process has another order than that of rank 0"),
        (DEAL, "(np.random.default_rng((epoch, done)).permutation(order[done:]) if done else order)[rank::n].tolist()",
         "After a second stop some are read twice"),
        ("    return", "    deck = torch.from_numpy(order)\n    dist.broadcast(deck, src=0)\n    return",
         "every rank can compute it by itself"),
    ],
    "token_mean": [
        (SENDS, "    pass", MEAN, "total / tokens", "the mean of the ranks' means"),
        (MEAN, "total / tokens", "3 times too small: DDP takes the mean over the ranks"),
        (MEAN, "total / tokens / world_size", "9 times too small: DDP takes the mean over the ranks"),
        (SENDS, "    pass", "that is the sum of the ranks' means: divide by the count of all ranks"),
        (MEAN, "total", "divides the sum of the losses, and the number of ranks multiplies it"),
        (MEAN, f"world_size * (total / {COUNT}) * {COUNT} / tokens", "is nan: of a rank without a token, 0 / 0"),
        ("    return", "    (total / tokens).backward()\n    return", "leave backward() to the check"),
        (COUNT, "torch.tensor(len(y_bT))", "targets were counted, and"),
        (MEAN, f"world_size * total * {COUNT} / tokens", "element [0] should be -0.0006768, not -0.0616"),
        (MEAN, "torch.tensor(world_size * total.item() / tokens.item())",
         "the loss has no graph, so backward finds nothing"),
        (MEAN, "world_size * total.item() / tokens.item()",
         "The loss should be one number with its graph, a tensor, not 2.04913272930996"),
        ("    return", f"    if not {COUNT}:\n        return torch.zeros((), requires_grad=True)\n    return",
         "without a token return 0 * total"),
        (SENDS, "    rows = [torch.empty_like(y_bT) for _ in range(world_size)]\n    dist.all_gather(rows, y_bT)\n"
         "    tokens = sum((row != -100).sum() for row in rows)", "a count is 8 bytes"),
        ("    return", "    y_bT.fill_(-100)\n    return", "y_bT was changed; leave it as it is"),
    ],
    "gain": {
        "linear": (lambda k, batch, noise: k, "that is k, the linear rule: it holds only far below the noise scale"),
        "square root": (lambda k, batch, noise: k**0.5, "that is the square root of k"),
        "upside down": (lambda k, batch, noise: (1 + noise / (k * batch)) / (1 + noise / batch),
            "that is the factor upside down: the larger batch has the larger rate"),
        "of the large batch": (lambda k, batch, noise: 1 / (1 + noise / (k * batch)),
            "that is the large batch's own factor; divide by the small one's"),
        "changed places": (lambda k, batch, noise: (1 + batch / noise) / (1 + k * batch / noise),
            "batch and noise have changed places"),
        "changed places, once": (lambda k, batch, noise: (noise + k * batch) / (noise + batch), "have changed places"),
        "forgets the batch": (lambda k, batch, noise: (1 + noise) / (1 + noise / k),
            "k = 8, batch 4, noise 12: the factor should be 2.909, not 5.2"),
    },
    "rate_rule": [
        (RULE, "1", "that is the base itself; the rule is linear: k times"),
        (RULE, "k", "that is k times the base; the rule is the square root"),
        (RULE, '(k**0.5 if kind == "SGD" else k)', "that is the square root of k times the base; the rule is"),
        ("updates // 10", "1", "update 0 has the rate 0.4; begin near 0, at about 0.04"),
        ("step + 1", "step", "update 0 has the rate 0, so it learns nothing; begin with step + 1"),
        ("max(1, updates // 10)", "10", "the warm-up lasts 4 updates, and the rate of update 4 should be"),
        ("updates // 10", "updates // 2", "the warm-up lasts 10 updates, and the rate of update 10 should be"),
        (CLIMB, CLIMB.replace("full *", "base + (full - base) *"), "begin near 0, at about 0.04"),  # as Goyal et al. do
        (CLIMB, f"{CLIMB}**2", "climb in equal steps of 0.04"),
        ("    return", "    dist.broadcast(torch.tensor(full, dtype=torch.float64), src=0)\n    return",
         "every rank can compute them by itself"),
    ],
    "token_weighted": [
        ('"sum"', '"mean"', MEAN, "total / len(micro_batches)", "the mean of the micro-batches' means"),
        (SENDS, "    pass", MEAN, "total / max(1, int(tokens))", "the mean of the ranks' means"),
        (MEAN, "total / tokens", "3 times too small: DDP takes the mean over the ranks"),
        (MEAN, "total / sum(len(y) for _, y in micro_batches)", "768 targets were counted, and"),
        (SENDS, "    mine = torch.cat([y for _, y in micro_batches])\n"
         "    of_all = [torch.empty_like(mine) for _ in range(world_size)]\n    dist.all_gather(of_all, mine)\n"
         "    tokens = (torch.cat(of_all) != -100).sum()", "and send counts, not tokens"),
        (MEAN, f"{MEAN} / len(micro_batches)", "4 times too small: that is the number of micro-batches"),
        (MEAN, f"{MEAN} * len(micro_batches)", "4 times too large: that is the number of micro-batches"),
        (MEAN, "world_size * total", "the number of tokens divides the sum of the losses"),
        (LOSS, "-(F.log_softmax(ddp(x), -1).gather(1, y.clamp(min=0)[:, None])[:, 0] * (y != -100)).sum() / "
         f"{MINE} * {MINE}", "became nan: where a micro-batch has no token, its mean is 0/0"),
        (LAST, f"{LAST}\n    for p in ddp.parameters():\n        p.data -= 0.1 * p.grad",
         "leave gradients only, a later step is the optimizer's"),
        ("with ddp.no_sync():", "if True:", "keep all but the last micro-batch inside no_sync"),
        ("    tokens = sum", "    micro_batches = [tuple(map(torch.cat, zip(*micro_batches)))]\n    tokens = sum",
         "the model was given 256 rows at once, and a micro-batch has 64"),
        ("    with ddp", f"    micro_batches = [(x, y) for x, y in micro_batches if {MINE}]\n    with ddp",
         LAST, "    [backward(x, y) for x, y in micro_batches[-1:]]", "also where a micro-batch has no token"),
    ],
    "betrays": [
        (LIMIT, "0", "training A is right, in torch.float32: the first update that differs should be None, not 0"),
        (LIMIT, "1e-10", "training A is right, in torch.float32: the first update that differs should be None, not 0"),
        (LIMIT, 'float("inf")',
         "training B is wrong, in torch.float32: the first update that differs should be 1, not None"),
        ("return update", "return update + 1",
         "training B is wrong, in torch.float32: the first update that differs should be 1, not 2"),
        (LIMIT, "1.2e-4 * a", "and later ones are not: the first update that differs should be 7, not None"),
        (LIMIT, "1000 * eps", "a loss of 4,000 rounds a thousand times as far as one of 4: the first update that "
         "differs should be None, not 0"),
        ("not abs(a - b) <=", "abs(a - b) >",
         "nan is not a rounding error: the first update that differs should be 5, not None"),
        ("abs(a - b) <=", "b - a <=", "the first update that differs should be 1, not 11"),
        ("return update", "return max(range(len(one)), key=lambda i: abs(one[i] - many[i]) / one[i])",
         "the first update that differs should be 1, not 5"),
        ("return update", "return update or None",
         "start alike: the first update that differs should be 0, not None"),
    ],
}  # fmt: skip
RIGHT = {
    "diagnose": [(ALIKE, "read[0] == read[1]")],
    "sharded_order": [
        (ORDER, "torch.randperm(length, generator=torch.Generator().manual_seed(1000 + epoch))", ".tolist()", ""),
        (KEY, "hash((7, epoch)) % 2**32"),  # numbers have one hash in all processes
        (DEAL, "[i for at, i in enumerate(order.tolist()) if at >= done and at % n == rank]"),
        (f"return {DEAL}", f"yield from {DEAL}"),
    ],
    "token_mean": [
        (COUNT, f"torch.stack([total.detach(), {COUNT}.double()])", "/ tokens", "/ tokens[1]"),
        (SENDS, "    counts = [torch.zeros_like(tokens) for _ in range(world_size)]\n"
         "    dist.all_gather(counts, tokens)\n    tokens = sum(counts)"),
    ],
    "gain": [lambda k, batch, noise: k * (batch + noise) / (k * batch + noise)],
    "rate_rule": [("return full", "return np.float64(full)")],
    "token_weighted": [
        # a few bytes more than needed, and the gradients travel once
        (SENDS, "    counts = [None] * world_size\n    dist.all_gather_object(counts, tokens)\n"
         "    tokens = sum(counts)"),
        (MEAN, f"world_size * {MINE} * (total / {MINE}) / tokens"),  # of no token the loss is nan, its gradient zero
        (MEAN, "total * (world_size * (1 / tokens))"),  # 1 / an integer tensor has seven digits
    ],
    "betrays": [("return update", "return np.int64(update)"), (LIMIT, "2000 * eps * abs(a)")],
}  # fmt: skip


class TestAnswers(AnswersOfRanks):
    lesson, checks, rejected, right = "05_same_science", checks, REJECTED, RIGHT
    world = 3  # does not divide 13, and means over it round
    solutions = {"sharded_order": "remaining", "rate_rule": "learning_rate", "token_weighted": "weighted_backward"}
