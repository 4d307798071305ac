"""Each check of lesson 06 accepts right answers and rejects mutants, several of them from published code, by name."""

import torch
from exercises import AnswersOfRanks, judge_solutions
from manyhands.checks import zero_fsdp as checks
from torch import nn
from torch.distributed.fsdp import fully_shard

LESSON = "06_zero_fsdp"
AROUND = ("all_gather", "gather", "free", "reduce_in_backward")  # what the lines of build D call
PADDED = "F.pad(row_P, (0, padding))"
SCATTER, MEAN = "dist.reduce_scatter(sum_p, pieces)", "sum_p / world_size"
CUTS = SCATTER, "row_P = unit.gradient_row() / world_size\n    dist.all_reduce(row_P)"
GATHER, OWN = "dist.all_gather(pieces, unit.share_p.detach())", "unit.share_p.detach()"
DUE = "len(ready) == len(unit.parameters)"
GO = "        modules[-1].register_forward_hook(go)\n"
COME = "        modules[-1].register_full_backward_pre_hook(come)"
REDUCE, NORM, FACTOR = "    dist.all_reduce(total)", "norm = total.sqrt()", "(max_norm / (norm + 1e-6)).clamp(max=1)"
ADDS = "    for gradient in gradients:\n        total += gradient.square().sum()\n"
HELD, WHOLE, GATHERS = "16 * sum(sizes) // n", "4 * (root + max(inner, default=0))", "2 * len(inner) + 1"
VOLUME, PREDICTED = "4 * (2 * sum(inner) + root) + 4 * sum(sizes)", "return held, whole, gathers, communicated"
ON_META = '    with torch.device("meta"):\n        model = make()'
EMPTY = '    model.to_empty(device="cpu")  # memory for the shares only\n'
LAYERS = "    for layer in model:\n        fully_shard(layer, mesh=mesh)\n"
FILL = "            if k < len(parts):\n                p.to_local().copy_(parts[k])"
DRAW = "torch.empty(p.shape).normal_(std=0.02)"


def all_wait_in(kind):
    """Edits by which all weights are drawn first, and wait in another kind of memory."""
    every = f"        every = [{DRAW}{kind} for p in model.parameters()]\n"
    each = "        for p, kept in zip([*model.parameters()], every):"
    return "        for p in model.parameters():", every + each, f"{DRAW}  # one", "torch.as_tensor(kept)  # one"


REJECTED = {
    "my_share": [
        (f"{PADDED}.chunk(n)[rank]", "row_P[rank * (len(row_P) // n) :][: len(row_P) // n]", "leave out the last"),
        ("-len(row_P) % n", "n - len(row_P) % n", "n divides 38, so add no zeros"),
        (f"{PADDED}.chunk", "row_P.tensor_split", "pieces must be equally long on all ranks"),
        ("(0, padding)", "(padding, 0)", "the zeros belong at the end of the row"),
        (".chunk(n)[rank]", "[rank::n]", "you took every n-th number"),
        (".clone()", "", "is right, but it is a view of 304 bytes, which all stay"),
        ("[rank]", "[0]", "that is the piece of rank 0"),
        (".chunk(n)[rank].clone()", "", "that is the whole row; keep this rank's piece"),
        (".clone()", ".float()", "should be float64, as what you were given, not float32"),
    ],
    "reduce_scatter": [
        (MEAN, "sum_p", "that is the sum over the ranks; divide by 3"),
        (MEAN, f"{MEAN}**2", "it was divided by 3 twice"),
        (SCATTER, "pass", MEAN, "pieces[rank].clone()", "the piece of this rank's own gradients"),
        ("reduce_scatter(sum_p", "all_gather(sum_p", "a reduce-scatter takes a piece, then a list of pieces"),
        ("        p.grad = None", "        pass",
         "the parameters still hold 152 bytes of gradients: set each p.grad to None"),
        ("        p.grad = None", "        p.grad.zero_()", "a parameter that nobody used has the grad None: set each"),
        (*CUTS, MEAN, "row_P.chunk(world_size)[rank].clone()",
         "432 bytes were communicated in 1 call of all_reduce (an all_reduce counts twice)"),
        (*CUTS, MEAN, "row_P.chunk(world_size)[rank]", "but it is a view of 216 bytes, which all stay"),
        ("(sum_p, pieces)", "(sum_p, pieces[::-1])", "that is the average of piece 2, not of piece 0"),
        ("    for p in", "    unit.share_p.data -= 0.1 * unit.share_p.grad\n    for p in",
         "leave the update to the optimizer"),
        ("    pieces =", "    [dist.all_reduce(p.grad) for p in unit.parameters if p.grad is not None]\n    pieces =",
         SCATTER, "pass", MEAN, "pieces[rank] / world_size", "one reduce_scatter of the row (1 P)"),
        (SCATTER, "sum_p = sum_p.float()\n    dist.reduce_scatter(sum_p, [p.float() for p in pieces])",
         MEAN, "sum_p.double() / world_size", "which is float32's accuracy"),
    ],
    "all_gather": [
        ("whole_P.chunk", "whole_P.clone().chunk", "fill unit.whole_P, not a copy"),
        (OWN, "pieces[rank].clone()", "they are the old weights"),
        (OWN, "unit.whole_P", "all_gather takes the list of pieces and this rank's own piece, unit.share_p, not"),
        (GATHER, f"for piece in pieces:\n        piece.copy_({OWN})\n        dist.broadcast(piece, 0)",
         "every piece is that of rank 0"),
        (GATHER, f"unit.whole_P.zero_()\n    pieces[rank].copy_({OWN})\n    dist.all_reduce(unit.whole_P)",
         "one all_gather of the shares (1 P)"),
    ],
    "reduce_in_backward": [
        (DUE, "True", "6 reduce-scatters for 2 units"),
        (DUE, "p is unit.parameters[0]", "should be the average of all the unit's gradients"),
        (DUE, "ready == unit.parameters", "== of two tensors compares their numbers, in lists too: compare how many"),
        (DUE, "False", "has no gradient in its share: call reduce_scatter(unit)"),
        ("ready.clear()", "pass", "in the second backward the unit of"),
        ("            reduce_scatter(unit)\n            then()", "            then()\n            reduce_scatter(unit)",
         "0 of them after its reduction"),
        ("reduce_scatter(unit)", "pass", "has no gradient in its share"),
        ("            then()", "            pass", "then() was called 0 times"),
    ],
    "gather_when_needed": [
        (GO, "", "after forward block 0 is still whole: free it"),
        (GO, GO.replace("-1", "0"), "in forward, the unit of blocks 1 and 2 was used while its row has no memory"),
        ("modules[0]", "modules[-1]", "in forward, the unit of blocks 1 and 2 was used while its row has no"),
        (COME, "        pass", "in backward, the unit of blocks 1 and 2 was used while its row has no"),
        ("if not stays", "if True", "a step made 6 all-gathers where 5 do"),
        ("reduce_in_backward(unit, then=go)", "pass",
         "share has no gradient: reduce_in_backward(unit, ...) does that"),
        (", then=go", "", "after backward block 0 is still whole"),
        ("then=go", "then=go()", "hooks and `then` are called later: pass the function, without parentheses"),
        ("    modules[0]", "    gather(unit)\n    modules[0]", "bytes were whole at once; root and largest unit are"),
        ("        gather(unit)", "        all_gather(unit)",
         "in forward, the root was used while its row has no memory: gather() it"),
        ("def come(*_)", "def come()", "a module hands its hooks arguments"),
    ],
    "clip_by_global_norm": [
        (REDUCE, "    pass", "the norm of this rank's shares alone"),
        (REDUCE, f"    total = total.sqrt()\n{REDUCE}", NORM, "norm = total",
         "the sum of the ranks' norms; sum their squares"),
        (NORM, "norm = (total / world_size).sqrt()", "the squares were averaged over the ranks"),
        (NORM, f"{NORM}\n    dist.all_reduce(norm)\n    norm /= world_size",
         "16 bytes were communicated in 2 calls of all_reduce, where 1 call and 8 bytes are enough"),
        ("total.sqrt()", "total", "take the root"),
        ("return norm", "return norm.clamp(max=max_norm)", "before clipping, should be 13.09, not 1.309"),
        (f"gradient *= {FACTOR}", "pass", "they are unchanged; scale share.grad in place"),
        (".clamp(max=1)", "", "scale only gradients with a larger norm, and never up"),
        (REDUCE, f"    mine = total.sqrt()\n{REDUCE}", "(norm + 1e-6)", "(mine + 1e-6)",
         "max_norm / (the norm of all + 1e-6): what came is 3.512 times that"),
        (FACTOR, "((max_norm / norm).clamp(max=1) if norm else max_norm * norm / norm)",
         "where all gradients are 0, they became nan: add 1e-6 to the norm"),
        (REDUCE, "    everyone = [None] * world_size\n    dist.all_gather_object(everyone, gradients)\n"
         "    total = sum(g.square().sum() for of_one in everyone for g in of_one)",
         "1 call and 8 bytes are enough: add up one sum of squares"),
        (ADDS, "    for share in shares:\n        one = share.new_zeros(()) if share.grad is None else "
         "share.grad.square().sum()\n        dist.all_reduce(one)\n        total += one\n", REDUCE, "    pass",
         "add up one sum of squares"),
        ("    gradients =", "    for share in shares:\n"
         "        share.grad = torch.zeros_like(share) if share.grad is None else share.grad\n    gradients =",
         "leave a gradient of None unchanged"),
        ("    total = torch", "    if not gradients:\n        return torch.zeros(())\n    total = torch",
         "Rank 2: where rank 2 has no gradient at all, the norm of all gradients, before clipping, should be 5.192, "
         "not 0: all ranks call all_reduce, also one with a sum of 0"),
        (ADDS, "    total += torch.cat([g.flatten() for g in gradients]).square().sum()\n",
         "Error: torch.cat(): expected a non-empty list"),
    ],
    "predict": [
        (HELD, "16 * sum(sizes)", "every rank's under DDP"),
        (HELD, "4 * sum(sizes) // n", "gradients and two moments belong to it"),
        (HELD, "8 * sum(sizes) // n", "Adam's two moments belong to it"),
        (HELD, "4 * sum(sizes) + 12 * sum(sizes) // n", "this is ZeRO-3"),
        (WHOLE, "4 * max(inner, default=0)", "the root stays whole from forward"),
        ("max(inner, default=0)", "max(inner)", "the root may be the only unit, and then max() has nothing to choose"),
        (WHOLE, "4 * sum(sizes)", "freed after computing"),
        (WHOLE, f"{WHOLE} // n", "what is gathered is whole, not a share"),
        (GATHERS, "2 * len(sizes)", "the root is not gathered twice"),
        (GATHERS, "len(sizes)", "backward has to gather it again"),
        (VOLUME, "12 * sum(sizes)", "the root is not gathered twice"),
        (VOLUME, "8 * sum(sizes)", "for forward and again for backward"),
        (VOLUME, "4 * (2 * sum(inner) + root)", "the reduce-scatters of the gradients belong to it"),
    ],
    "sharded_from_meta": [
        (ON_META, "    model = make()\n    torch.manual_seed(7)\n    for p in model.parameters():\n"
         "        p.data.normal_(std=0.02)", EMPTY, "    return model\n",
         "the numbers are right, but at one moment you held"),
        (LAYERS, "", "    fully_shard(model, mesh=mesh)\n", "", FILL, "            p.copy_(whole)",
         "is whole on every rank; call fully_shard"),
        (EMPTY, "", "is still on the meta device, without numbers"),
        (f"whole = {DRAW}", "p.to_local().normal_(std=0.02)\n            continue",
         "it was drawn as a share, the same on every rank"),
        ("std=0.02", "std=1.0", "element [0, 0] should be -0.0164, not -0.8201"),
        ("in model.parameters():", "in [*model.parameters()][::-1]:",
         "draw whole weights in its order, after torch.manual_seed(7)"),
        (LAYERS, "    layers = list(model)\n    for i in range(0, len(layers), 4):\n"
         "        fully_shard(layers[i : i + 4], mesh=mesh)\n",
         "8 layers are 2 units: call fully_shard for each layer, not for several"),
        (*all_wait_in(".numpy().copy()"), "the numbers are right, but lists or numpy's arrays held"),
        (*all_wait_in(".tolist()"), "the numbers are right, but lists or numpy's arrays held"),
        (LAYERS, "", "is no unit of its own"),
    ],
}  # fmt: skip
RIGHT = {
    "my_share": [
        (f"{PADDED}.chunk(n)", "torch.cat([row_P, row_P.new_zeros(padding)]).view(n, -1)"),
        (f"{PADDED}.chunk(n)[rank]", f"{PADDED}.view(n, -1)[rank]"),
    ],
    "reduce_scatter": [("(sum_p, pieces)", "(sum_p, [p / world_size for p in pieces])", MEAN, "sum_p")],
    "all_gather": [
        (GATHER, f"new_P = torch.empty_like(unit.whole_P)\n    dist.all_gather([*new_P.chunk(world_size)], {OWN})\n"
         "    unit.whole_P.copy_(new_P)"),
    ],
    "reduce_in_backward": [
        ("ready = []", "left = list(unit.parameters)", "ready.append(p)", "left.pop()", DUE, "not left",
         "ready.clear()", "left.extend(unit.parameters)"),
    ],
    "gather_when_needed": [  # on all modules: what is whole is not gathered again
        ("    modules[0].register_forward_pre_hook(come)", "    for module in modules:\n"
         "        module.register_forward_pre_hook(come)\n        module.register_full_backward_pre_hook(come)",
         COME, "        pass"),
    ],
    "sharded_from_meta": [
        # it leaves the default where it is
        (ON_META, '    torch.set_default_device("meta")\n    model = make()', "(p.shape)", '(p.shape, device="cpu")'),
        (FILL, "            p.copy_(distribute_tensor(whole, mesh, p.placements, src_data_rank=None))",
         "    k = ", "    from torch.distributed.tensor import distribute_tensor\n\n    k = "),
    ],
    "clip_by_global_norm": [
        (REDUCE, f"    total = total.float()\n{REDUCE}", NORM, f"{NORM}.double()"),  # as float32 rounds
        ("return norm", "return norm.item()"), ("return norm", "return norm.numpy()"),
        ("return norm", 'return __import__("fractions").Fraction(norm.item())'),
    ],
    "predict": [
        (PREDICTED, 'return __import__("numpy").int64(held), torch.tensor(whole), float(gathers), '
         '__import__("decimal").Decimal(communicated)'),
        (PREDICTED, "return torch.tensor([held, whole, gathers, communicated])"),
    ],
}  # fmt: skip


class TestAnswers(AnswersOfRanks):
    lesson, checks, rejected, right, around = LESSON, checks, REJECTED, RIGHT, AROUND


def shard_after_the_check(ranks):
    """The lesson goes on with a mesh of its own: what the check's has left behind must not be taken for it."""
    from torch.distributed.device_mesh import init_device_mesh

    judge_solutions(ranks, checks.__name__, LESSON, {"sharded_from_meta": "sharded_from_meta"})
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks.world_size,)))
    model(torch.ones(2, 8)).sum().backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()


def test_the_check_leaves_nothing_behind_that_the_lessons_own_mesh_would_take(pool):
    lengths = pool.run(2, shard_after_the_check)
    assert lengths[0] == lengths[1] > 0
