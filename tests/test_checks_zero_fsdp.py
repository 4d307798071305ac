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
AROUND = ("all_gather", "gather", "free", "reduce_in_backward")  # what the lines of build D call


def summed(x, op=dist.ReduceOp.SUM):
    dist.all_reduce(x, op=op)
    return x


# ---- build A: answers cut a row ----


def _padded(row_P, n):
    return F.pad(row_P, (0, -len(row_P) % n))


def drops_the_rest(row_P, n, rank):
    size = len(row_P) // n
    return row_P[rank * size : (rank + 1) * size].clone()


def by_reshape(row_P, n, rank):  # right
    return torch.cat([row_P, row_P.new_zeros(-len(row_P) % n)]).view(n, -1)[rank].clone()


def copied_into_zeros(row_P, n, rank):  # right
    size = math.ceil(len(row_P) / n)
    mine, out = row_P[rank * size : (rank + 1) * size], row_P.new_zeros(size)
    out[: len(mine)] = mine
    return out


# ---- build B: answers hand in gradients ----


def pieces(unit, row_P=None):
    return list((unit.gradient_row() if row_P is None else row_P).chunk(dist.get_world_size()))


def scattered(parts):
    total_p = torch.empty_like(parts[0])
    dist.reduce_scatter(total_p, parts)
    return total_p


def averaged_piece(unit):
    return scattered(pieces(unit)) / dist.get_world_size()


def cut_from_the_average(unit):
    return pieces(unit, summed(unit.gradient_row() / dist.get_world_size()))[dist.get_rank()]


def handing_in(piece=averaged_piece, lets_go=True):
    """An answer that makes piece(unit) the gradient of its share, and lets the others go."""

    def answer(unit):
        unit.share_p.grad = piece(unit)
        for p in unit.parameters if lets_go else ():
            p.grad = None

    return answer


def updates_at_once(unit):
    handing_in()(unit)
    unit.share_p.data -= 0.1 * unit.share_p.grad


def a_call_for_each_parameter(unit):
    for p in unit.parameters:
        if p.grad is not None:
            dist.all_reduce(p.grad)
    handing_in(lambda unit: pieces(unit)[dist.get_rank()] / dist.get_world_size())(unit)


# ---- build B: answers bring the weights back ----


def gathering(pieces_of, share_of):
    """An answer that all-gathers share_of(unit) into pieces_of(unit)."""

    def answer(unit):
        dist.all_gather(pieces_of(unit), share_of(unit))

    return answer


def views(unit):
    return pieces(unit, unit.whole_P)


def own(unit):
    return unit.share_p.detach()


def by_all_reduce(unit):
    unit.whole_P.zero_()
    views(unit)[dist.get_rank()].copy_(own(unit))
    dist.all_reduce(unit.whole_P)


def through_a_new_row(unit):  # right
    new_P = torch.empty_like(unit.whole_P)
    dist.all_gather(pieces(unit, new_P), own(unit))
    unit.whole_P.copy_(new_P)


def from_rank_0(unit):
    for piece in views(unit):
        piece.copy_(own(unit))
        dist.broadcast(piece, 0)


# ---- build C: answers reduce in backward ----


def reducing(is_due=lambda ready, unit: len(ready) == len(unit.parameters), clears=True, after=True, reduces=True):
    """The right answer, but for when it reduces, and what it does then."""

    def answer(unit, then=lambda: None):
        ready = []

        def gradient_is_there(p):
            ready.append(p)
            if is_due(ready, unit):
                if clears:
                    ready.clear()
                if not after:
                    then()
                if reduces:
                    ours.reduce_scatter(unit)
                if after:
                    then()

        for p in unit.parameters:
            p.register_post_accumulate_grad_hook(gradient_is_there)

    return answer


def counts_down(unit, then=lambda: None):  # right
    left = [len(unit.parameters)]

    def gradient_is_there(_):
        left[0] -= 1
        if not left[0]:
            left[0] = len(unit.parameters)
            ours.reduce_scatter(unit)
            then()

    for p in unit.parameters:
        p.register_post_accumulate_grad_hook(gradient_is_there)


def never_calls_then(unit, then=lambda: None):
    reducing()(unit)


# ---- build D: answers hook a unit to its modules ----


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
    "never_freed_after_forward": (hooked(free_at=None), "after forward block 0 is still whole: free it"),
    "freed_after_the_first": (hooked(free_at=0),
            "in forward, the unit of blocks 1 and 2 was used while its row has no memory"),
    "gathered_by_the_last": (hooked(gather_at=-1),
            "in forward, the unit of blocks 1 and 2 was used while its row has no"),
    "not_back_for_backward": (hooked(again_at=None),
            "in backward, the unit of blocks 1 and 2 was used while its row has no"),
    "root_like_any": (hooked(stays_count=False), "a step made 6 all-gathers where 5 do"),
    "never_reduced": (hooked(reduces=False), "share has no gradient: reduce_in_backward(unit, ...) does that"),
    "never_freed_in_backward": (hooked(then=False), "after backward block 0 is still whole"),
    "gathers_at_once": (gathers_at_once, "bytes were whole at once; root and largest unit are"),
    "fills_without_memory": (fills_without_memory,
            "in forward, the root was used while its row has no memory: gather() it"),
    "forgets_the_arguments": (forgets_the_arguments, "TypeError"),
}  # fmt: skip


# ---- exercise 1: answers clip shares ----


def _gradients(shares):
    return [share.grad for share in shares if share.grad is not None]


def _scale(shares, max_norm, norm, at_most=1):
    factor = (max_norm / (norm + 1e-6)).clamp(max=at_most)
    for gradient in _gradients(shares):
        gradient *= factor
    return norm


def _square(shares):
    return sum((g.square().sum() for g in _gradients(shares)), torch.zeros((), dtype=torch.float64))


def _global(shares):
    return summed(_square(shares)).sqrt()


def clips_by(norm_of, then=lambda norm, max_norm: norm):
    """An answer that takes norm_of(shares) for the norm."""
    return lambda shares, max_norm: then(_scale(shares, max_norm, norm_of(shares)), max_norm)


def divides_by_zero(shares, max_norm):
    norm = _global(shares)
    for gradient in _gradients(shares):
        gradient *= (max_norm / norm).clamp(max=1) if norm else max_norm * norm / norm
    return norm


def gathers_all_gradients(shares, max_norm):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, torch.cat(_gradients(shares)))
    return _scale(shares, max_norm, torch.cat(everyone).norm())


def a_call_for_each_share(shares):
    none = torch.zeros((), dtype=torch.float64)
    return sum(summed(none.clone() if share.grad is None else share.grad.square().sum()) for share in shares).sqrt()


def gives_zeros_to_none(shares, max_norm):
    for share in shares:
        if share.grad is None:
            share.grad = torch.zeros_like(share)
    return _scale(shares, max_norm, _global(shares))


def goes_home_without_a_gradient(shares, max_norm):
    return _scale(shares, max_norm, _global(shares)) if _gradients(shares) else torch.zeros(())


# ---- exercise 2: answers predict ----


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
    "all_units_whole": (_predict(whole=lambda s, n: 4 * sum(s)), "freed after computing"),
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
}  # fmt: skip


def every_kind_of_number(sizes, n):
    held, whole, gathers, communicated = _predict()(sizes, n)
    return np.int64(held), torch.tensor(whole), Fraction(gathers), Decimal(communicated)


def an_array_of_numbers(sizes, n):
    return np.array(_predict()(list(map(int, sizes)), n))


# ---- exercise 3: answers build a sharded model ----


def _draw_shares(model, mesh, seed=7, std=0.02, names=None):
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in names or model.parameters():
            mine = torch.empty(p.shape).normal_(std=std).chunk(mesh.size())
            if mesh.get_local_rank() < len(mine):
                p.to_local().copy_(mine[mesh.get_local_rank()])
    return model


def _drawn(model, local=False):
    torch.manual_seed(7)
    for p in model.parameters():
        (p.data.to_local() if local else p.data).normal_(std=0.02)
    return model


def _sharded(model, mesh, per_layer=True):
    for layer in model if per_layer else ():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _left_on_meta(make, mesh, per_layer=True):
    with torch.device("meta"):
        model = make()
    return _sharded(model, mesh, per_layer)


def _in_pieces(make, mesh, num_layers):
    """Some layers together are a unit."""
    with torch.device("meta"):
        model = make()
    layers = list(model)
    for first in range(0, len(layers), num_layers):
        fully_shard(layers[first : first + num_layers], mesh=mesh)
    return _draw_shares(fully_shard(model, mesh=mesh).to_empty(device="cpu"), mesh)


def _copied(make, mesh, copy):
    """All weights are drawn first, and wait in another kind of memory."""
    model = _on_meta(make, mesh)
    torch.manual_seed(7)
    every = [copy(torch.empty(p.shape).normal_(std=0.02)) for p in model.parameters()]
    for p, whole in zip(model.parameters(), every, strict=True):
        mine = torch.as_tensor(whole).chunk(mesh.size())
        if mesh.get_local_rank() < len(mine):
            p.data.to_local().copy_(mine[mesh.get_local_rank()])
    return model


def _on_meta(make, mesh, per_layer=True):
    return _left_on_meta(make, mesh, per_layer).to_empty(device="cpu")


def in_another_order(make, mesh):
    model = _on_meta(make, mesh)
    return _draw_shares(model, mesh, names=list(model.parameters())[::-1])


def meta_by_default(make, mesh):  # right as well, though it leaves the default where it is
    torch.set_default_device("meta")
    model = _on_meta(make, mesh)
    with torch.device("cpu"):
        return _draw_shares(model, mesh)


def by_distribute_tensor(make, mesh):  # right as well
    from torch.distributed.tensor import distribute_tensor

    model = _on_meta(make, mesh)
    torch.manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            whole = torch.empty(p.shape).normal_(std=0.02)
            p.copy_(distribute_tensor(whole, mesh, p.placements, src_data_rank=None))
    return model


REJECTED = {
    "my_share": {
        drops_the_rest: "leave out the last",
        "pads what fits": (lambda row_P, n, rank: F.pad(row_P, (0, n - len(row_P) % n)).chunk(n)[rank].clone(),
            "n divides 38, so add no zeros"),
        "unequal pieces": (lambda row_P, n, rank: row_P.tensor_split(n)[rank].clone(),
            "pieces must be equally long on all ranks"),
        "zeros in front": (lambda row_P, n, rank: F.pad(row_P, (-len(row_P) % n, 0)).chunk(n)[rank].clone(),
            "the zeros belong at the end of the row"),
        "every nth": (lambda row_P, n, rank: _padded(row_P, n)[rank::n].clone(), "you took every n-th number"),
        "a view": (lambda row_P, n, rank: _padded(row_P, n).chunk(n)[rank],
            "is right, but it is a view of 304 bytes, which all stay"),
        "always the first": (lambda row_P, n, rank: _padded(row_P, n).chunk(n)[0].clone(),
            "that is the piece of rank 0"),
        "the whole row": (lambda row_P, n, rank: _padded(row_P, n), "that is the whole row; keep this rank's piece"),
        "in float32": (lambda row_P, n, rank: _padded(row_P, n).chunk(n)[rank].float(),
            "should be float64, as what you were given, not float32"),
    },
    "reduce_scatter": {
        "adds up only": (handing_in(lambda unit: scattered(pieces(unit))),
            "that is the sum over the ranks; divide by 3"),
        "divides twice": (handing_in(lambda unit: averaged_piece(unit) / dist.get_world_size()),
            "it was divided by 3 twice"),
        "keeps its own": (handing_in(lambda unit: pieces(unit)[dist.get_rank()].clone()),
            "the piece of this rank's own gradients"),
        "keeps all gradients": (handing_in(lets_go=False),
            "the parameters still hold 152 bytes of gradients: set each p.grad to None"),
        "all reduces and cuts": (handing_in(lambda unit: cut_from_the_average(unit).clone()),
            "432 bytes were communicated in 1 call of all_reduce (an all_reduce counts twice)"),
        "all reduces and keeps a view": (handing_in(cut_from_the_average),
            "but it is a view of 216 bytes, which all stay"),
        "pieces backwards": (handing_in(lambda unit: scattered(pieces(unit)[::-1]) / dist.get_world_size()),
            "that is the average of piece 2, not of piece 0"),
        updates_at_once: "leave the update to the optimizer",
        a_call_for_each_parameter: "one reduce_scatter of the row (1 P)",
        "sums in float32": (
            handing_in(lambda unit: scattered([p.float() for p in pieces(unit)]).double() / dist.get_world_size()),
            "which is float32's accuracy"),
    },
    "all_gather": {
        "into a copy": (gathering(lambda unit: pieces(unit, unit.whole_P.clone()), own),
            "fill unit.whole_P, not a copy"),
        "the piece of the row": (gathering(views, lambda unit: views(unit)[dist.get_rank()].clone()),
            "they are the old weights"),
        "of rank 0 for all": (from_rank_0, "every piece is that of rank 0"),
        by_all_reduce: "one all_gather of the shares (1 P)",
    },
    "reduce_in_backward": {
        "with each gradient": (reducing(lambda ready, unit: True), "6 reduce-scatters for 2 units"),
        "never due": (reducing(lambda ready, unit: False), "has no gradient in its share: call reduce_scatter(unit)"),
        "never cleared": (reducing(clears=False), "in the second backward the unit of"),
        "then before": (reducing(after=False), "0 of them after its reduction"),
        "never reduces": (reducing(reduces=False), "has no gradient in its share"),
        never_calls_then: "then() was called 0 times",
    },
    "gather_when_needed": HOOKS,
    "clip_by_global_norm": {
        "norm of the share": (clips_by(lambda shares: _square(shares).sqrt()), "the norm of this rank's shares alone"),
        "norms added up": (clips_by(lambda shares: summed(_square(shares).sqrt())),
            "the sum of the ranks' norms; sum their squares"),
        "squares averaged": (clips_by(lambda shares: (summed(_square(shares)) / dist.get_world_size()).sqrt()),
            "the squares were averaged over the ranks"),
        "a call more where it clips": (clips_by(lambda shares: summed(_global(shares)) / dist.get_world_size()),
            "16 bytes were communicated in 2 calls of all_reduce, where 1 call and 8 bytes are enough"),
        "root forgotten": (clips_by(lambda shares: summed(_square(shares))), "take the root"),
        "norm after clipping": (clips_by(_global, lambda norm, max_norm: norm.clamp(max=max_norm)),
            "before clipping, should be 13.09, not 1.309"),
        "nothing clipped": (lambda shares, max_norm: _global(shares),
            "they are unchanged; scale share.grad in place"),
        "scaled up": (lambda shares, max_norm: _scale(shares, max_norm, _global(shares), at_most=math.inf),
            "scale only gradients with a larger norm, and never up"),
        "right norm own factor": (
            lambda shares, max_norm: (_global(shares), _scale(shares, max_norm, _square(shares).sqrt()))[0],
            "max_norm / (the norm of all + 1e-6): what came is 3.512 times that"),
        divides_by_zero: "where all gradients are 0, they became nan: add 1e-6 to the norm",
        gathers_all_gradients: "1 call and 8 bytes are enough: add up one sum of squares",
        "a call for each share": (clips_by(a_call_for_each_share), "add up one sum of squares"),
        gives_zeros_to_none: "leave a gradient of None unchanged",
        goes_home_without_a_gradient: 
            "Rank 2: where rank 2 has no gradient at all, the norm of all gradients, before clipping, should be 5.192, "
            "not 0: all ranks call all_reduce, also one with a sum of 0",
        "puts all gradients together": (clips_by(
            lambda shares: summed(torch.cat([g.flatten() for g in _gradients(shares)]).square().sum()).sqrt()),
            "Error: torch.cat(): expected a non-empty list"),
    },
    "predict": PREDICTIONS,
    "sharded_from_meta": {
        "whole then cut": (lambda make, mesh: _sharded(_drawn(make()), mesh),
            "the numbers are right, but at one moment you held"),
        "never sharded": (lambda make, mesh: _drawn(make()), "is whole on every rank; call fully_shard"),
        "left on meta": (_left_on_meta, "is still on the meta device, without numbers"),
        "draws its share": (lambda make, mesh: _drawn(_on_meta(make, mesh), local=True),
            "it was drawn as a share, the same on every rank"),
        "forgets std": (lambda make, mesh: _draw_shares(_on_meta(make, mesh), mesh, std=1.0),
            "element [0, 0] should be -0.0164, not -0.8201"),
        in_another_order: "draw whole weights in its order, after torch.manual_seed(7)",
        "two units": (lambda make, mesh: _in_pieces(make, mesh, 4),
            "8 layers are 2 units: call fully_shard for each layer, not for several"),
        "whole in numpy": (lambda make, mesh: _copied(make, mesh, lambda whole: whole.numpy().copy()),
            "the numbers are right, but lists or numpy's arrays held"),
        "whole in lists": (lambda make, mesh: _copied(make, mesh, torch.Tensor.tolist),
            "the numbers are right, but lists or numpy's arrays held"),
        "one unit": (lambda make, mesh: _draw_shares(_on_meta(make, mesh, per_layer=False), mesh),
            "is no unit of its own"),
    },
}  # fmt: skip
RIGHT = {
    "my_share": [by_reshape, copied_into_zeros],
    "reduce_scatter": [handing_in(lambda unit: scattered([p / dist.get_world_size() for p in pieces(unit)]))],
    "all_gather": [through_a_new_row],
    "reduce_in_backward": [counts_down],
    "gather_when_needed": [on_all_modules],
    "sharded_from_meta": [meta_by_default, by_distribute_tensor],
    "clip_by_global_norm": [
        clips_by(lambda shares: summed(_square(shares).float()).sqrt().double()),  # as float32 rounds
        *(
            clips_by(_global, lambda norm, _, kind=kind: kind(norm))
            for kind in (float, torch.Tensor.numpy, lambda norm: Fraction(norm.item()))
        ),
    ],
    "predict": [every_kind_of_number, an_array_of_numbers],
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
