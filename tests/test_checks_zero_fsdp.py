"""Each check of lesson 06 accepts right answers and rejects mutants, several of them from published code, by name."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercises import AnswersOfRanks, FromLesson, judge_solutions
from manyhands.checks import zero_fsdp as checks
from torch import nn
from torch.distributed.fsdp import fully_shard

LESSON = "06_zero_fsdp"
AROUND = ("all_gather", "gather", "free", "reduce_in_backward")  # what the lines of build C call


# ---- build A: answers cut a row ----


def _padded(row_P, n):
    return F.pad(row_P, (0, -len(row_P) % n))


def drops_the_rest(row_P, n, rank):
    size = len(row_P) // n
    return row_P[rank * size : (rank + 1) * size].clone()


def fills_with_its_last(row_P, n, rank):
    return torch.cat([row_P, row_P[-1:].expand(-len(row_P) % n)]).chunk(n)[rank].clone()


def zeroes_the_row(row_P, n, rank):
    mine = _padded(row_P, n).chunk(n)[rank].clone()
    row_P.zero_()
    return mine


def by_reshape(row_P, n, rank):  # right
    return torch.cat([row_P, row_P.new_zeros(-len(row_P) % n)]).view(n, -1)[rank].clone()


def copied_into_zeros(row_P, n, rank):  # right
    size = math.ceil(len(row_P) / n)
    mine, out = row_P[rank * size : (rank + 1) * size], row_P.new_zeros(size)
    out[: len(mine)] = mine
    return out


# ---- build B: answers hand in gradients ----


def _handed_in(unit, average=lambda total_p: total_p / dist.get_world_size(), row=lambda row_P: row_P):
    total_p = torch.empty_like(unit.share_p)
    dist.reduce_scatter(total_p, list(row(unit.gradient_row()).chunk(dist.get_world_size())))
    unit.share_p.grad = average(total_p)


def _let_go(unit):
    for p in unit.parameters:
        p.grad = None


def adds_up_only(unit):
    _handed_in(unit, average=lambda total_p: total_p)
    _let_go(unit)


def divides_twice(unit):
    _handed_in(unit, row=lambda row_P: row_P / dist.get_world_size())
    _let_go(unit)


def keeps_its_own(unit):
    unit.share_p.grad = unit.gradient_row().chunk(dist.get_world_size())[dist.get_rank()].clone()
    _let_go(unit)


def keeps_all_gradients(unit):
    _handed_in(unit)


def all_reduces_and_cuts(unit):
    row_P = unit.gradient_row() / dist.get_world_size()
    dist.all_reduce(row_P)
    unit.share_p.grad = row_P.chunk(dist.get_world_size())[dist.get_rank()].clone()
    _let_go(unit)


def all_reduces_and_keeps_a_view(unit):
    row_P = unit.gradient_row() / dist.get_world_size()
    dist.all_reduce(row_P)
    unit.share_p.grad = row_P.chunk(dist.get_world_size())[dist.get_rank()]
    _let_go(unit)


def pieces_backwards(unit):
    n = dist.get_world_size()
    total_p = torch.empty_like(unit.share_p)
    dist.reduce_scatter(total_p, list(unit.gradient_row().chunk(n))[::-1])
    unit.share_p.grad = total_p / n
    _let_go(unit)


def updates_at_once(unit):
    _handed_in(unit)
    _let_go(unit)
    unit.share_p.data -= 0.1 * unit.share_p.grad


def nowhere_to_be_found(unit):
    grad = torch.empty_like(unit.share_p)
    dist.reduce_scatter(grad, list(unit.gradient_row().chunk(dist.get_world_size())))
    _let_go(unit)


def a_call_for_each_parameter(unit):
    for p in unit.parameters:
        if p.grad is not None:
            dist.all_reduce(p.grad)
    row_P = unit.gradient_row() / dist.get_world_size()
    unit.share_p.grad = row_P.chunk(dist.get_world_size())[dist.get_rank()].clone()
    _let_go(unit)


def sums_in_float32(unit):
    n = dist.get_world_size()
    total_p = torch.empty(len(unit.share_p))
    dist.reduce_scatter(total_p, list(unit.gradient_row().float().chunk(n)))
    unit.share_p.grad = total_p.double() / n
    _let_go(unit)


def divides_first(unit):  # right
    _handed_in(unit, average=lambda total_p: total_p, row=lambda row_P: row_P / dist.get_world_size())
    _let_go(unit)


# ---- build C: answers hook a unit to its modules ----


ours = FromLesson(LESSON, "reduce_scatter", *AROUND, rank=dist.get_rank, world_size=dist.get_world_size)


def hooked(gather_at=0, free_at=-1, again_at=-1, stays_count=True, reduces=True, then=True):
    """The right answer, but for the module that each hook is on (None: no hook)."""

    def answer(unit, modules, stays=False):
        stays = stays and stays_count
        modules[gather_at].register_forward_pre_hook(lambda *_: ours.gather(unit))
        if not stays and free_at is not None:
            modules[free_at].register_forward_hook(lambda *_: ours.free(unit))
        if not stays and again_at is not None:
            modules[again_at].register_full_backward_pre_hook(lambda *_: ours.gather(unit))
        if reduces:
            ours.reduce_in_backward(unit, **({"then": lambda: ours.free(unit)} if then else {}))

    return answer


def gathers_at_once(unit, modules, stays=False):
    ours.gather(unit)
    hooked()(unit, modules, stays)


def calls_instead_of_hooking(unit, modules, stays=False):
    modules[0].register_forward_pre_hook(ours.gather(unit))


def fills_without_memory(unit, modules, stays=False):
    modules[0].register_forward_pre_hook(lambda *_: ours.all_gather(unit))


def forgets_the_arguments(unit, modules, stays=False):
    modules[0].register_forward_pre_hook(lambda: ours.gather(unit))


def on_all_modules(unit, modules, stays=False):  # right: what is whole is not gathered again
    def come(*_):
        ours.gather(unit)

    def go(*_):
        ours.free(unit)

    for module in modules:
        module.register_forward_pre_hook(come)
        module.register_full_backward_pre_hook(come)
    if not stays:
        modules[-1].register_forward_hook(go)
    ours.reduce_in_backward(unit, go)


HOOKS = {
    "never_freed_after_forward": (hooked(free_at=None), "after forward block 0 is still whole, 336 bytes"),
    "freed_after_the_first": (hooked(free_at=0),
            "in forward, the unit of blocks 1 and 2 was used while its row has no memory"),
    "gathered_by_the_last": (hooked(gather_at=-1),
            "in forward, the unit of blocks 1 and 2 was used while its row has no"),
    "not_back_for_backward": (hooked(again_at=None),
            "in backward, the unit of blocks 1 and 2 was used while its row has no"),
    "again_at_the_first": (hooked(again_at=0),
            "in backward, the unit of blocks 1 and 2 was used while its row has no memory"),
    "root_like_any": (hooked(stays_count=False), "a step made 6 all-gathers where 5 do"),
    "never_reduced": (hooked(reduces=False), "share has no gradient: reduce_in_backward(unit, ...) does that"),
    "never_freed_in_backward": (hooked(then=False), "after backward block 0 is still whole"),
    "gathers_at_once": (gathers_at_once, "bytes of rows were whole, where the root and the largest unit are"),
    "calls_instead_of_hooking": (calls_instead_of_hooking, "TypeError: 'NoneType' object is not callable"),
    "fills_without_memory": (fills_without_memory,
            "in forward, the root was used while its row has no memory: gather() it"),
    "forgets_the_arguments": (forgets_the_arguments, "TypeError"),
}  # fmt: skip


# ---- build D: answers clip shares ----


def _gradients(shares):
    return [share.grad for share in shares if share.grad is not None]


def _scale(shares, max_norm, norm):
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)
    for gradient in _gradients(shares):
        gradient *= factor
    return norm


def _square(shares):
    return sum((g.square().sum() for g in _gradients(shares)), torch.zeros((), dtype=torch.float64))


def _global(shares):
    total = _square(shares)
    dist.all_reduce(total)
    return total.sqrt()


def norm_of_the_share(shares, max_norm):  # torchtitan#766
    return _scale(shares, max_norm, _square(shares).sqrt())


def norms_added_up(shares, max_norm):
    total = _square(shares).sqrt()
    dist.all_reduce(total)
    return _scale(shares, max_norm, total)


def squares_averaged(shares, max_norm):
    total = _square(shares)
    dist.all_reduce(total)
    return _scale(shares, max_norm, (total / dist.get_world_size()).sqrt())


def adds_up_in_float32(shares, max_norm):
    total = _square(shares).float()
    dist.all_reduce(total)
    return _scale(shares, max_norm, total.sqrt().double())


def root_forgotten(shares, max_norm):
    total = _square(shares)
    dist.all_reduce(total)
    return _scale(shares, max_norm, total)


def longest_rank(shares, max_norm):
    total = _square(shares).sqrt()
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return _scale(shares, max_norm, total)


def norm_after_clipping(shares, max_norm):
    norm = _scale(shares, max_norm, _global(shares))
    return norm.clamp(max=max_norm)


def clipped_into_the_air(shares, max_norm):
    norm = _global(shares)
    for gradient in _gradients(shares):
        gradient = gradient * (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm


def scaled_up(shares, max_norm):
    norm = _global(shares)
    for gradient in _gradients(shares):
        gradient *= max_norm / (norm + 1e-6)
    return norm


def right_norm_own_factor(shares, max_norm):
    norm = _global(shares)
    _scale(shares, max_norm, _square(shares).sqrt())
    return norm


def divides_by_zero(shares, max_norm):
    norm = _global(shares)
    for gradient in _gradients(shares):
        gradient *= (max_norm / norm).clamp(max=1) if norm else max_norm * norm / norm
    return norm


def gathers_all_gradients(shares, max_norm):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, torch.cat(_gradients(shares)))
    return _scale(shares, max_norm, torch.cat(everyone).norm())


def a_call_for_each_share(shares, max_norm):
    total = torch.zeros((), dtype=torch.float64)
    for share in shares:
        square = torch.zeros_like(total) if share.grad is None else share.grad.square().sum()
        dist.all_reduce(square)
        total += square
    return _scale(shares, max_norm, total.sqrt())


def gives_zeros_to_none(shares, max_norm):
    for share in shares:
        if share.grad is None:
            share.grad = torch.zeros_like(share)
    return _scale(shares, max_norm, _global(shares))


def goes_home_without_a_gradient(shares, max_norm):
    return _scale(shares, max_norm, _global(shares)) if _gradients(shares) else torch.zeros(())


def puts_all_gradients_together(shares, max_norm):
    total = torch.cat([g.flatten() for g in _gradients(shares)]).square().sum()
    dist.all_reduce(total)
    return _scale(shares, max_norm, total.sqrt())


def zeroes_the_weights(shares, max_norm):
    norm = _scale(shares, max_norm, _global(shares))
    with torch.no_grad():
        for share in shares:
            share.zero_()
    return norm


def returns(what):
    """An answer that clips as it should and returns `what(norm)`."""

    def answer(shares, max_norm):
        return what(_scale(shares, max_norm, _global(shares)))

    answer.__name__ = f"returns_{what.__name__}"
    return answer


def as_nan(norm):
    return norm * float("nan")


def never_zero(norm):
    return norm if norm else norm + 1


def as_array(norm):
    return norm.numpy()


def as_fraction(norm):
    return Fraction(norm.item())


# ---- exercise 1: answers predict ----


def _predict(held=None, whole=None, gathers=None, communicated=None):
    def answer(sizes, n):
        *inner, root = sizes
        total, largest = sum(sizes), max(inner, default=0)
        right = (16 * total // n, 4 * (root + largest), 2 * len(inner) + 1, 4 * (2 * sum(inner) + root) + 4 * total)
        given = (held, whole, gathers, communicated)
        return tuple(w if f is None else f(sizes, n) for f, w in zip(given, right, strict=True))

    return answer


PREDICTIONS = {
    "nothing_is_cut": (_predict(held=lambda s, n: 16 * sum(s)), "every rank's under DDP"),
    "only_weights": (_predict(held=lambda s, n: 4 * sum(s) // n), "gradients and two moments belong to it"),
    "no_moments": (_predict(held=lambda s, n: 8 * sum(s) // n), "Adam's two moments belong to it"),
    "weights_stay_whole": (_predict(held=lambda s, n: 4 * sum(s) + 12 * sum(s) // n), "this is ZeRO-3"),
    "root_is_freed": (_predict(whole=lambda s, n: 4 * max(s[:-1], default=0)), "the root stays whole from forward"),
    "all_units_whole": (_predict(whole=lambda s, n: 4 * sum(s)), "freed when they have computed"),
    "gathers_a_share": (
        _predict(whole=lambda s, n: 4 * (s[-1] + max(s[:-1], default=0)) // n),
        "what is gathered is whole, not a share",
    ),
    "root_twice": (_predict(gathers=lambda s, n: 2 * len(s)), "the root is not gathered twice"),
    "never_gathered_again": (_predict(gathers=lambda s, n: len(s)), "backward has to gather it again"),
    "ideal_volume": (_predict(communicated=lambda s, n: 12 * sum(s)), "the root is not gathered twice"),
    "two_volumes": (_predict(communicated=lambda s, n: 8 * sum(s)), "for forward and again for backward"),
    "no_reduce_scatter": (
        _predict(communicated=lambda s, n: 4 * (2 * sum(s) - s[-1])),
        "the reduce-scatters of the gradients belong to it",
    ),
    "three_numbers": (lambda sizes, n: (1, 2, 3), "return four numbers"),
    "nan": (_predict(whole=lambda s, n: float("nan")), "Return a number, not nan"),
}  # fmt: skip


def every_kind_of_number(sizes, n):
    held, whole, gathers, communicated = _predict()(sizes, n)
    return np.int64(held), torch.tensor(whole), Fraction(gathers), Decimal(communicated)


def an_array_of_numbers(sizes, n):
    return np.array(_predict()(list(map(int, sizes)), n))


# ---- exercise 2: answers build a sharded model ----


def _draw_shares(model, mesh, seed=7, std=0.02, names=None):
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in names or model.parameters():
            mine = torch.empty(p.shape).normal_(std=std).chunk(mesh.size())
            if mesh.get_local_rank() < len(mine):
                p.to_local().copy_(mine[mesh.get_local_rank()])
    return model


def _on_meta(make, mesh, per_layer=True):
    with torch.device("meta"):
        model = make()
    for layer in model if per_layer else ():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    return model


def whole_then_cut(make, mesh):  # init_device: cuda
    model = make()
    torch.manual_seed(7)
    for p in model.parameters():
        p.data.normal_(std=0.02)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def all_weights_drawn_first(make, mesh):
    model = _on_meta(make, mesh)
    torch.manual_seed(7)
    whole = [torch.empty(p.shape).normal_(std=0.02) for p in model.parameters()]
    with torch.no_grad():
        for p, w in zip(model.parameters(), whole, strict=True):
            mine = w.chunk(mesh.size())
            if mesh.get_local_rank() < len(mine):
                p.to_local().copy_(mine[mesh.get_local_rank()])
    return model


def never_sharded(make, mesh):
    model = make()
    torch.manual_seed(7)
    for p in model.parameters():
        p.data.normal_(std=0.02)
    return model


def left_on_meta(make, mesh):
    with torch.device("meta"):
        model = make()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def never_drawn(make, mesh):
    model = _on_meta(make, mesh)
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().zero_()
    return model


def draws_its_share(make, mesh):
    model = _on_meta(make, mesh)
    torch.manual_seed(7)
    for p in model.parameters():
        p.data.to_local().normal_(std=0.02)
    return model


def in_another_order(make, mesh):
    model = _on_meta(make, mesh)
    return _draw_shares(model, mesh, names=list(model.parameters())[::-1])


def meta_by_default(make, mesh):  # right as well, though it leaves the default where it is
    torch.set_default_device("meta")
    model = _on_meta(make, mesh)
    with torch.device("cpu"):
        return _draw_shares(model, mesh)


def meta_by_default_and_a_slip(make, mesh):
    torch.set_default_device("meta")
    return make().no_such_thing


def by_distribute_tensor(make, mesh):  # right as well
    from torch.distributed.tensor import distribute_tensor

    model = _on_meta(make, mesh)
    torch.manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            whole = torch.empty(p.shape).normal_(std=0.02)
            p.copy_(distribute_tensor(whole, mesh, p.placements, src_data_rank=None))
    return model


# ---- exercise 3: answers list groups ----


def _grid(num_nodes, per_node):
    return torch.arange(num_nodes * per_node).view(num_nodes, per_node)


def other_way_round(num_nodes, per_node):
    grid = _grid(num_nodes, per_node)
    return grid.T.tolist(), grid.tolist(), 1 / per_node


def everybody_shards(num_nodes, per_node):
    return ([_grid(num_nodes, per_node).flatten().tolist()], _grid(num_nodes, per_node).T.tolist(), 1 / per_node)


def neighbours_are_copies(num_nodes, per_node):
    grid = _grid(num_nodes, per_node)
    return grid.tolist(), grid.reshape(per_node, num_nodes).tolist(), 1 / per_node


def whole_gradient_between(num_nodes, per_node):
    grid = _grid(num_nodes, per_node)
    return grid.tolist(), grid.T.tolist(), 1.0


def cut_by_nodes(num_nodes, per_node):
    grid = _grid(num_nodes, per_node)
    return grid.tolist(), grid.T.tolist(), 1 / num_nodes


def a_rank_is_missing(num_nodes, per_node):
    grid = _grid(num_nodes, per_node)
    return grid[:, :-1].tolist(), grid.T.tolist(), 1 / per_node


def only_groups(num_nodes, per_node):
    grid = _grid(num_nodes, per_node)
    return grid.tolist(), grid.T.tolist()


def flat_lists(num_nodes, per_node):
    grid = _grid(num_nodes, per_node)
    return grid.flatten().tolist(), grid.T.tolist(), 1 / per_node


def hybrid_with(shard=None, copies=None, share=None):
    """The right answer, but for one part of it."""

    def answer(num_nodes, per_node):
        grid = _grid(num_nodes, per_node)
        right = (grid.tolist(), grid.T.tolist(), 1 / per_node)
        return tuple(w if f is None else f(w) for f, w in zip((shard, copies, share), right, strict=True))

    return answer


HYBRIDS = {
    "share_nan": (hybrid_with(share=lambda _: math.nan), "Return a number, not nan"),
    "ranks_in_halves": (
        hybrid_with(shard=lambda groups: [[rank + 0.5 for rank in group] for group in groups]),
        "within a node, should be [[0, 1, 2, 3], [4, 5, 6, 7]], not",
    ),
    "groups_turned_round": (hybrid_with(shard=lambda groups: groups[::-1]), "are right, but not in order of rank"),
}  # fmt: skip


def hybrid_of_arrays(num_nodes, per_node):  # right
    grid = _grid(num_nodes, per_node)
    return grid, grid.T.numpy(), Fraction(1, per_node)


REJECTED = {
    "my_share": {
        drops_the_rest: "leave out the last",
        "pads what fits": (lambda row_P, n, rank: F.pad(row_P, (0, n - len(row_P) % n)).chunk(n)[rank].clone(),
            "n divides 38, so no zeros are needed"),
        "unequal pieces": (lambda row_P, n, rank: row_P.tensor_split(n)[rank].clone(),
            "pieces must be equally long on all ranks"),
        "zeros in front": (lambda row_P, n, rank: F.pad(row_P, (-len(row_P) % n, 0)).chunk(n)[rank].clone(),
            "the zeros belong at the end of the row"),
        "every nth": (lambda row_P, n, rank: _padded(row_P, n)[rank::n].clone(), "you took every n-th number"),
        "a view": (lambda row_P, n, rank: _padded(row_P, n).chunk(n)[rank],
            "is right, but a view of 304 bytes, all of which stay"),
        "always the first": (lambda row_P, n, rank: _padded(row_P, n).chunk(n)[0].clone(),
            "that is the piece of rank 0"),
        "all pieces": (lambda row_P, n, rank: _padded(row_P, n).chunk(n),
            "of rank 0 should be 19 numbers, equally many on all ranks, not"),
        "the whole row": (lambda row_P, n, rank: _padded(row_P, n), "that is the whole row; keep this rank's piece"),
        "in float32": (lambda row_P, n, rank: _padded(row_P, n).chunk(n)[rank].float(),
            "should be float64, as what you were given, not float32"),
        fills_with_its_last: "what fills the end up should be zeros",
        zeroes_the_row: "the row itself was changed",
    },
    "reduce_scatter": {
        adds_up_only: "that is the sum over the ranks; divide by 3",
        divides_twice: "it was divided by 3 twice",
        keeps_its_own: "the piece of this rank's own gradients",
        keeps_all_gradients: "the parameters still hold 152 bytes of gradients, where the share is 72",
        all_reduces_and_cuts: "432 bytes were communicated in 1 call of all_reduce (an all_reduce counts twice)",
        all_reduces_and_keeps_a_view: "but a view of 216 bytes, all of which stay",
        pieces_backwards: "that is the average of piece 2, not of piece 0",
        updates_at_once: "leave the update to the optimizer",
        nowhere_to_be_found: "unit.share_p.grad should be the average of this rank's piece,",
        a_call_for_each_parameter: "one reduce_scatter of the row, 1 P",
        sums_in_float32: "which is float32's accuracy",
    },
    "gather_when_needed": HOOKS,
    "clip_by_global_norm": {
        norm_of_the_share: "the norm of this rank's shares alone",
        norms_added_up: "the sum of the ranks' norms; their squares add up",
        squares_averaged: "the squares were averaged over the ranks",
        adds_up_in_float32: "that is as near as float32 comes, so compute in float64",
        root_forgotten: "the root is missing",
        longest_rank: "the norm of the rank that has the longest",
        norm_after_clipping: "gradients, before clipping, should be 12.6, not 1.26",
        "nothing clipped": (lambda shares, max_norm: _global(shares),
            "the gradients are as they were: scale share.grad in place"),
        clipped_into_the_air: "the gradients are as they were: scale share.grad in place",
        scaled_up: "scale only what is too long, never up",
        right_norm_own_factor: "times as long as they should be",
        divides_by_zero: "became nan: the norm is 0 there",
        gathers_all_gradients: "1 call and 8 bytes are enough: add up one sum of squares",
        a_call_for_each_share: "add up one sum of squares",
        gives_zeros_to_none: "leave None alone",
        goes_home_without_a_gradient: "it made no call, and the other 2 wait for it",
        puts_all_gradients_together: "Error: torch.cat(): expected a non-empty list",
        zeroes_the_weights: "the weights were changed; scale share.grad",
        returns(as_nan): "Return a number, not the Tensor tensor(nan, dtype=torch.float64)",
        returns(never_zero): "gradients of zeros should be 0, not 1",
    },
    "predict": PREDICTIONS,
    "sharded_from_meta": {
        whole_then_cut: "the numbers are right, but at one moment you held",
        all_weights_drawn_first: "the numbers are right, but at one moment you held",
        never_sharded: "is whole on every rank; call fully_shard",
        left_on_meta: "is still on the meta device, without numbers",
        never_drawn: "share of 0.weight should be the full model's: draw whole weights",
        draws_its_share: "it was drawn as a share, the same on every rank",
        "forgets std": (lambda make, mesh: _draw_shares(_on_meta(make, mesh), mesh, std=1.0),
            "the full model's weights have std=0.02"),
        in_another_order: "draw whole weights in its order, after torch.manual_seed(7)",
        "one unit": (lambda make, mesh: _draw_shares(_on_meta(make, mesh, per_layer=False), mesh),
            "is no unit of its own"),
        "returns no model": (lambda make, mesh: list(_draw_shares(_on_meta(make, mesh), mesh).parameters()),
            "return the model"),
        meta_by_default_and_a_slip: "your code raised AttributeError",
    },
    "hybrid": {
        other_way_round: "the two are the wrong way round",
        everybody_shards: "within a node, should be [[0, 1, 2, 3], [4, 5, 6, 7]], not [[0,",
        neighbours_are_copies: "the same share, should be [[0, 4], [1, 5], [2, 6], [3, 7]], not",
        whole_gradient_between: "each rank has only its share to send",
        cut_by_nodes: "communicates between nodes should be 0.25, not 0.5",
        a_rank_is_missing: "within a node, should be [[0, 1, 2, 3], [4, 5, 6, 7]], not [[0,",
        only_groups: "return three things",
        flat_lists: "within a node, should be [[0, 1, 2, 3], [4, 5, 6, 7]], not [0,",
    }
    | HYBRIDS,
}  # fmt: skip
RIGHT = {
    "my_share": [by_reshape, copied_into_zeros],
    "reduce_scatter": [divides_first],
    "gather_when_needed": [on_all_modules],
    "sharded_from_meta": [meta_by_default, by_distribute_tensor],
    "clip_by_global_norm": [returns(float), returns(as_array), returns(as_fraction)],
    "predict": [every_kind_of_number, an_array_of_numbers],
    "hybrid": [hybrid_of_arrays],
}


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
