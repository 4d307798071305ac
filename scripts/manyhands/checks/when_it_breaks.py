"""Checks of lesson 11: which rank missed which call, an atomic save, the state that a resumed run needs, which rank's
copy of the model differs.

The check of a save and that of the copies communicate. In the others every rank judges the answer on the same cases,
drawn from fixed seeds.
"""

import contextlib
import copy
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Set
from pathlib import Path
from unittest import mock

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from manyhands.checks import Wrong, exercise
from manyhands.checks.drawn import flat, luck, normal, seeded
from manyhands.checks.expect import expect_equal, plain
from manyhands.checks.witness import said, shown
from manyhands.launch import recorded_runs

LAYOUTS = (  # groups of generated hangs: one group, a grid, two overlapping groups of different sizes, and chains
    ((0, 1, 2, 3),),
    ((0, 1, 2, 3), (0, 1), (2, 3)),
    ((0, 1, 2, 3), (2, 3, 4)),
    ((0, 1, 2), (2, 3)),
    ((0, 1), (1, 2), (2, 3, 4)),
)
NAMES = ["data", "tensor", "pipe", "expert", "context", "left", "right", "all"]


@exercise("A", "the call that was not made")
def missing_call(answer, ranks=None):
    """`answer(calls)`, [{number: call} of each rank] -> (number, ranks that did not make it as most did), or None."""
    for name, calls, truth in _hangs_of_one_group():
        found = answer([dict(made) for made in calls])
        begins = [min(made, default=1) for made in calls]
        if found is not None:
            number, odd = plain(found)
            found = number, sorted(odd)
            if number < max(begins):
                raise Wrong(f"{name}: one buffer begins with call {max(begins)}; it says nothing about call {number}")
        number, odd = truth or (0, [])
        waiting, silent = set(range(len(calls))) - set(odd), [r for r in odd if number not in calls[r]]
        if truth and found is None:
            raise Wrong(f"{name}: as call {number}, ranks {odd} made another one or none, and you find nobody")
        slips = {
            "those made it, and wait in it; return the ranks that did not": (number, sorted(waiting)),
            "they differ there, too; return the first such call": (number + 1, odd),
            "a rank that made a different call under this number counts as missing too": (number, silent),
        }
        expect_equal(found, truth, f"{name}: the call and the ranks without it", slips)


@exercise(1, "three hangs, find the culprit")
def culprit(answer, ranks=None):
    """`answer(records, members)` -> (rank, group, number): the call that was missed, and the rank that missed it."""
    for name, members, records, truth in _hangs():
        found = answer(records, {group: list(its_ranks) for group, its_ranks in members.items()})
        why = _overlooked(plain(found), truth, members, records)
        expect_equal(found, truth, f"{name}: (rank, group, number)", {why: found} if why else None)


def _overlooked(found, truth, members, records):
    """Return a sentence on what a wrong (rank, group, number) overlooks, or "" if that is unclear."""
    if not (isinstance(found, list) and len(found) == 3 and found[1] in members and found[0] in members[found[1]]):
        return ""
    rank, group, number = found
    if isinstance(rank, float) or isinstance(number, float):
        return ""  # the values say it
    if found == [*truth[:2], truth[2] - 1]:
        return f"that is the last call that rank {rank} made with the others; the next one is missing"
    if (rank, group) == truth[:2] and number != truth[2]:
        return "compare the numbers in the records, not places in a list, which begins where the buffer does"
    calls = _calls_in(group, records)
    made = calls[rank]
    if number in made:
        return f"rank {rank} did call {made[number]}, number {number} of {group!r}; look for the rank that did not"
    if number < min(made, default=0):
        return f"the buffer of rank {rank} no longer holds call {number} of {group!r}, so its absence says nothing"
    if number > max(number for of_rank in calls for number in of_rank):
        return f"nobody in {group!r} made a call number {number}, so no rank waits for it"
    if rank == truth[0]:
        return f"rank {rank} is missing in {group!r} because of what it left out before, in {truth[1]!r}"
    return f"rank {rank} did not make call {number} of {group!r}, but only because it waits in another group"


def _calls_in(group, records):
    """Return each rank's calls in this group: [{number: call}]."""
    return [{number: call for name, number, call, _ in record if name == group} for record in records]


def _hangs_of_one_group():
    """Yield (name, calls, truth): recorded hangs of one group, and generated ones with a minority of ranks at fault."""
    for i, hang in enumerate(recorded_runs.numbers("11_hangs.json")["hangs"][:2]):
        rank, group, number = hang["culprit"]
        yield f"hang {i}", _calls_in(group, hang["calls"]), (number, [rank])
    for seed in range(60):
        luck = random.Random(f"calls {seed}")
        n, last = luck.randrange(3, 8), luck.randrange(5, 12)
        odd = sorted(luck.sample(range(n), luck.randrange(1, (n + 1) // 2)))
        odd = [] if seed % 5 == 0 else odd  # all made the same calls
        last = 1 if seed % 5 == 1 else last  # these ranks called nothing in this group
        instead = {r: luck.choice([None, "reduce_scatter"]) for r in odd}
        calls = _calls_in("all", _records([("all", range(n))], instead, "all", last, luck))
        for r in set(range(n)) - set(odd) if odd and seed % 2 else ():  # they call without waiting, as with async_op
            calls[r][last + 1] = "all_reduce"
        yield f"another hang (seed {seed})", calls, (last, odd) if odd else None


def _hangs():
    """Yield (name, members, records, truth) of the three recorded hangs and of hangs generated from seeds."""
    for i, hang in enumerate(recorded_runs.numbers("11_hangs.json")["hangs"]):
        records = [list(map(tuple, calls)) for calls in hang["calls"]]
        yield f"hang {i}", hang["members"], records, tuple(hang["culprit"])
    for seed in range(100):
        yield f"another hang (seed {seed})", *_made_up(seed, LAYOUTS[seed % len(LAYOUTS)])


def _made_up(seed, layout):
    """Return (members, records, truth) of a hang with random group names and order, rank at fault and place to stop."""
    luck = random.Random(f"hang {seed}")
    order = list(zip(luck.sample(NAMES, len(layout)), luck.sample(layout, len(layout)), strict=True))
    members = dict(sorted(order))
    # a rank in two groups may be missing in both, the harder case, so it is drawn twice as often
    culprit, group = luck.choice([(r, name) for name, its in order for r in its if _can_be_told(r, layout)])
    number = luck.randrange(4, 10)
    # with two ranks and different calls, it is undecidable which one is wrong
    other = luck.choice(["broadcast", "all_gather", None]) if len(members[group]) > 2 else None
    return members, _records(order, {culprit: other}, group, number, luck), (culprit, group, number)


def _can_be_told(rank, layout):
    """Return whether records show where this rank stopped: another rank of its two groups must wait in the first."""
    own = [set(its_ranks) for its_ranks in layout if rank in its_ranks]
    return all(len(one & other) > 1 for one in own for other in own)


def _records(order, instead, where, last, luck):
    """Return each rank's recorder, [(group, number, call, length)], limited to its last calls.

    In each step a rank calls all-reduce in each of its groups, [(group, its ranks)], in a fixed order. As call number
    `last` of the group `where`, the ranks of `instead`, {rank: call or None}, make that call or none, and then stop.
    The other ranks continue until each of them waits.
    """
    records = {r: [] for _, its_ranks in order for r in its_ranks}
    stuck, number = set(), 0
    while len(stuck) < len(records) and (instead or number < last):
        number += 1
        for name, its_ranks in order:
            calling = [r for r in its_ranks if r not in stuck]
            here = instead if (name, number) == (where, last) else {}
            for r in calling:
                if call := here.get(r, "all_reduce"):
                    records[r].append((name, number, call, 50))
            if here or len(calling) < len(its_ranks):  # a rank is missing, so those that have called wait
                stuck |= set(calling)
    return [records[r][-luck.choice([4, 6, 100]) :] for r in sorted(records)]


class Trainee:
    """A trainee of one rank, like the lesson's: weights viewed by the model, Adam's averages, dropout, a step."""

    num_params = 100

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.rank, self.n, self.group, self.step = 0, 1, None, 0
        self.model = nn.Sequential(nn.Dropout(0.5), nn.Linear(99, 1)).double()
        self.row_P = flat(self.model.parameters())
        for p, part in zip(self.model.parameters(), self.row_P.split([99, 1]), strict=True):
            p.data = part.view_as(p)
        averages = {name: torch.zeros_like(self.row_P) for name in ("mean", "square")}
        self.state = {"weights": self.row_P[:]} | averages

    def train_step(self):
        """Train one step and return its loss: batch k is drawn from k alone, dropout from torch's generator."""
        x_B99 = normal(self.step, 8, 99)
        self.model.zero_grad()
        loss = (self.model(x_B99) - x_B99.sin().sum(1, keepdim=True)).square().mean()
        loss.backward()
        gradient_P = flat(p.grad for p in self.model.parameters())
        self.step += 1
        mean, square = self.state["mean"], self.state["square"]
        mean.lerp_(gradient_P, 0.1)
        square.lerp_(gradient_P**2, 0.05)
        size_P = (square / (1 - 0.95**self.step)).sqrt() + 1e-8
        self.state["weights"] -= 0.05 * mean / (1 - 0.9**self.step) / size_P
        return loss.item()


class Loop:
    """A training loop with all state that can be forgotten: 10 rows per epoch, one per step, reshuffled each epoch."""

    rows = 10

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 1)).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.shuffle = torch.Generator().manual_seed(seed)
        self.order, self.position, self.step = torch.randperm(self.rows, generator=self.shuffle), 0, 0
        self.x = normal(0, self.rows, 4)
        self.y = self.x.sum(1, keepdim=True).sin()

    def train_step(self):
        """Train on the next row and return its loss."""
        if self.position == self.rows:
            self.order, self.position = torch.randperm(self.rows, generator=self.shuffle), 0
        row = self.order[self.position]
        self.position += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + 0.05 * self.step)
        self.optimizer.zero_grad()
        loss = (self.model(self.x[row]) - self.y[row]).square().mean()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item()


# What must be restored, in the order of checking: (sentence if it is not, how to read it)
DROPOUT = (
    "dropout draws other masks: the state of torch's random numbers is not restored",
    lambda _: torch.get_rng_state(),
)
OF_TRAINEE = [
    ("trainee.state['weights'] is another tensor now, and the model still looks at the old one: copy into the tensor "
        "that is there", lambda trainee: trainee.state["weights"].data_ptr() == trainee.row_P.data_ptr()),
    ("the weights (trainee.state['weights']) are not those that were saved: `part = ...` copies nothing into them",
        lambda trainee: trainee.state["weights"]),
    ("Adam's mean (trainee.state['mean']) is not what was saved", lambda trainee: trainee.state["mean"]),
    ("Adam's mean square (trainee.state['square']) is not what was saved", lambda trainee: trainee.state["square"]),
    ("the trainee is at step {now!r}, not {then}: Adam and the next batch depend on it", lambda trainee: trainee.step),
    DROPOUT,
]  # fmt: skip
OF_LOOP = [
    ("the weights are not those that were saved", lambda loop: loop.model.state_dict()),
    ("the optimizer's memory is not what was saved: AdamW continues with other averages",
        lambda loop: loop.optimizer.state_dict()["state"]),
    ("the loop is at step {now!r}, not {then}: the learning rate follows it", lambda loop: loop.step),
    ("the order of this epoch has changed: some rows come twice and some not at all",
        lambda loop: torch.as_tensor(loop.order)),
    ("the next row is number {now} of the epoch, not {then}: rows are repeated or skipped",
        lambda loop: int(loop.position)),
    ("the next epoch will have another order: the generator `shuffle` is not where it was",
        lambda loop: loop.shuffle.get_state()),
    DROPOUT,
]  # fmt: skip


@exercise("B", "what a step reads")
def trainee_state(answer, ranks=None):
    """`answer` is (state_of, go_on): a fresh trainee that loads the state must continue identically, bit for bit."""
    _goes_on(Trainee, 5, answer, _through_a_shard, OF_TRAINEE, "model.training")


@exercise(3, "nothing forgotten")
def resume(answer, ranks=None):
    """`answer` is (all_of, put_back): a fresh loop that loads the state must continue like the first, bit for bit."""
    besides = "optimizer.param_groups and model.training"
    _goes_on(Loop, 13, answer, _through_a_file, OF_LOOP, besides)  # saved in the second epoch; two more follow


def _goes_on(make, steps, answer, through, parts, besides):
    """Raise Wrong unless a fresh make(seed) that loads another's state after some steps makes the same next steps."""
    take, put_back = answer
    first = make(1)
    for _ in range(steps):
        first.train_step()
    before = [copy.deepcopy(read(first)) for _, read in parts]
    state = through(take(first))
    if not all(_equal(read(first), then) for (_, read), then in zip(parts, before, strict=True)):
        raise Wrong("the run itself was changed when you took its state (its numbers, or torch's generator): only read")
    wanted = [first.train_step() for _ in range(2 * steps)]
    another = make(3)
    another.train_step()
    take(another)  # an answer that keeps state outside its return value now has only this one
    fresh = make(2)  # a new process: other weights, other random numbers
    put_back(fresh, state)
    for (sentence, read), then in zip(parts, before, strict=True):
        now = read(fresh)
        if not _equal(now, then):
            raise Wrong(sentence.format(now=now, then=then))
    losses = [fresh.train_step() for _ in range(2 * steps)]
    if losses != wanted:
        differ = f"the next losses are {losses[:2]} ..., not {wanted[:2]} ..."
        raise Wrong(f"everything that the check compares is restored, but {differ}: check {besides} as well")


def _through_a_shard(state):
    """Save this rank's state with safetensors and load it; raise Wrong if that is impossible or it is too large."""
    for name, part in state.items():
        if not torch.is_tensor(part):
            cure = "call it" if callable(part) else "torch.tensor(number) makes a tensor"
            raise Wrong(f"a shard holds tensors, and {name!r} is {shown(part)}; {cure}")
    shard = safetensors.torch.save({name: part.detach().clone().contiguous() for name, part in state.items()})
    enough = 3 * 8 * Trainee.num_params + torch.get_rng_state().nbytes
    if len(shard) > enough + 700:  # names, and a number or two
        raise Wrong(f"your state has {len(shard):,} bytes; {enough:,} hold weights and averages of this rank, once")
    return safetensors.torch.load(shard)


def _through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    try:
        return torch.load(file, weights_only=True)
    except pickle.UnpicklingError:
        raise Wrong("your state cannot be read with weights_only=True; save tensors, numbers and dicts") from None


def _equal(a, b):
    """Return whether two nested dicts hold bitwise equal tensors and numbers."""
    if isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in b)
    return type(a) is type(b) and (torch.equal(a, b) if torch.is_tensor(b) else a == b)


SHARD_BYTES = 100_003
LATE_S = 0.15  # delay of the slow rank's disk


@exercise("C", "whole, or not there")
def save_whole(answer, ranks, folder):
    """`answer(path, name, content, rank, gather)`: all shards and a manifest appear under `path` atomically.

    `folder` is visible to all ranks. First the last rank's disk is slow, then rank 0's.
    """
    for slow in dict.fromkeys((ranks.world_size - 1, 0)):
        own = Path(folder) / f"build C, slow {slow}"
        path = own / "step-0006"
        if ranks.rank == 0:
            shutil.rmtree(own, ignore_errors=True)
            own.mkdir(parents=True)
        dist.barrier()
        disk, gather = _Disk(path, ranks.rank, LATE_S if ranks.rank == slow else 0.0), _Gather(ranks.world_size)
        names = [_shard(r) if slow else f"{luck(r).randrange(10**6)}-of-{r}.bin" for r in range(ranks.world_size)]
        with mock.patch.object(os, "fsync", disk.fsync), mock.patch.object(os, "mkdir", disk.mkdir):
            answer(path, names[ranks.rank], _content(ranks.rank), ranks.rank, gather)
        _judge_save(path, ranks.rank, names, gather.sent_bytes)
        of_all, n, renames = [None] * ranks.world_size, ranks.world_size, [None] * ranks.world_size
        dist.all_gather_object(of_all, disk.synced)
        dist.all_gather_object(renames, disk.rename_synced)
        if sum(of_all) < n + 1:
            raise Wrong(
                f"{sum(of_all)} of {n + 1} files, the shards and the manifest, were synced to the disk: use `write`"
            )
        if sum(of_all) > n + 1:
            raise Wrong(f"the ranks wrote {of_all} files, and {n + 1} are needed: one rank alone writes the manifest")
        if not any(renames):
            raise Wrong(f"a power cut may still undo the rename: after it, sync the folder that holds {path.name}")


class _Disk:
    """A slow disk that refuses an early `path`, counts synced files, and notes if a folder was after the rename."""

    def __init__(self, path, rank, late_s):
        self._path, self._rank, self._late_s, self._fsync, self._mkdir = path, rank, late_s, os.fsync, os.mkdir
        self._files, self.rename_synced = set(), False

    @property
    def synced(self):
        return len(self._files)

    def fsync(self, handle):
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            if self._path.exists() and os.path.samestat(status, self._path.parent.stat()):
                self.rename_synced = True
            return self._fsync(handle)
        for moment in (0.0, self._late_s) if status.st_ino not in self._files else ():
            time.sleep(moment)
            self._not_yet("the manifest" if self._files else "its shard")
        self._files.add(status.st_ino)
        self._fsync(handle)

    def mkdir(self, path, *args, **kwargs):
        self._mkdir(path, *args, **kwargs)
        self._not_yet("all" if self._files else "its shard")

    def _not_yet(self, what):
        if self._path.exists():
            name, rank = self._path.name, self._rank
            raise Wrong(f"{name} was there, under its final name, before rank {rank} had {what} on the disk")


class _Gather:
    """The `gather` passed to an answer: it returns every rank's object, or a pair's, to all, and counts its bytes."""

    def __init__(self, n, pair=False):
        self._n, self._pair, self.sent_bytes = n, pair, 0

    def __call__(self, mine):
        self.sent_bytes += len(pickle.dumps(mine))
        of_all = [None] * self._n
        dist.all_gather_object(of_all, mine)
        return [of_all[0], of_all[-1]] if self._pair else of_all


def _judge_save(path, rank, names, sent_bytes):
    """Raise Wrong for any fault that this rank sees immediately after its answer has returned."""
    n = len(names)
    there, left = path.is_dir(), sorted(file.name for file in path.parent.iterdir() if file != path)
    if sent_bytes > SHARD_BYTES // 2:
        raise Wrong(f"you gathered {sent_bytes:,} bytes: each rank writes its own shard, only names and sums travel")
    if not there:
        why = "no rank renamed a folder to it" if rank == 0 else "it must exist before any rank returns"
        beside = ", ".join(left) or "nothing"
        raise Wrong(f"{path.name} was not there when rank {rank} returned (in the folder: {beside}): {why}")
    found = {file.name: file.read_bytes() for file in path.iterdir()}
    files = None
    with contextlib.suppress(KeyError, ValueError, TypeError):
        files = json.loads(found.pop("manifest.json"))["files"]
    if not isinstance(files, dict):
        raise Wrong(f"{path.name} has no manifest.json with an entry 'files', a dictionary by file name")
    wanted = {name: _content(r) for r, name in enumerate(names)}
    if missing := sorted(wanted.keys() - files.keys()):
        raise Wrong(f"the manifest lists {len(files)} of {n} shards; {missing[0]} is not in it")
    if found != wanted or files != {name: _about(content) for name, content in wanted.items()}:
        raise Wrong(f"{path.name} holds {sorted(found)}, and not each shard as write() wrote it and the manifest says")


def _shard(rank):
    return f"rank-{rank}.safetensors"


def _content(rank):
    return random.Random(rank).randbytes(SHARD_BYTES)


def _manifest(contents):
    return json.dumps({"step": 6, "files": {name: _about(content) for name, content in contents.items()}}).encode()


def _about(content):
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@exercise(2, "is it damaged?")
def damaged(answer, ranks=None):
    """`answer(path, part, parts)` -> the sorted names of files that are not as the manifest says, of this part."""
    whole = {_shard(r): _content(r) for r in (2, 0, 1)}  # a manifest need not be sorted
    manifest = _manifest(whole)
    flipped = [_content(r)[:-5] + bytes([_content(r)[-5] ^ 1]) + _content(r)[-4:] for r in range(3)]
    cut = {_shard(1): _content(1)[:-1]}
    other = f"{luck(1).randrange(10**6)}.bin"
    of_another_name = {other: flipped[0], "manifest.json": _manifest({other: _content(0)})}
    for case, changed, wrong, hint, *part in (
        ("a whole checkpoint", {}, [], "take the names from 'files', and the sha256 of the whole file, as hexdigest()"),
        ("one byte cut off", cut, [1], "part 0 of 1 is all the names; compare each size with the manifest's"),
        ("bytes behind the end", {_shard(2): _content(2) + b"more"}, [2], "a file may be too long as well"),
        ("a missing file", {_shard(0): None}, [0], "what the manifest lists must be there"),
        ("one bit flipped, the size unchanged", {_shard(1): flipped[1]}, [1],
            "a size proves little: compare the sha256 of all the bytes"),
        ("one bit flipped in a shard of another name", of_another_name, [other], "take the names from the manifest"),
        ("two files at once", {_shard(2): b"", _shard(0): flipped[0]}, [0, 2], "name all of them, sorted"),
        ("two shards exchanged", {_shard(0): _content(1), _shard(1): _content(0)}, [0, 1],
            "each file must match its own entry of the manifest"),
        ("a file too many, left over from another run", {_shard(3): b"old"}, [],
            "ignore files that the manifest does not list"),
        ("a manifest cut in half", {"manifest.json": manifest[:90]}, None, "half a JSON file cannot be parsed"),
        ("no manifest", {"manifest.json": None}, None, "without a manifest nothing can be trusted"),
        ("three files damaged, read as part 1 of 2", {_shard(r): flipped[r] for r in range(3)}, [1],
            "this part is number 1 of the sorted names; numbers 0 and 2 belong to the other part", 1, 2),
    ):  # fmt: skip
        wanted = ["manifest.json"] if wrong is None else [w if isinstance(w, str) else _shard(w) for w in wrong]
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch)
            for name, content in (whole | {"manifest.json": manifest} | changed).items():
                if content is not None:
                    (path / name).write_bytes(content)
            before = {file.name: file.read_bytes() for file in path.iterdir()}
            try:
                found = answer(path, *part)
            except NotImplementedError:
                raise
            except Exception as error:
                raise Wrong(f"{case}: your code raised {said(error)}; say what is damaged, whatever it is") from None
            if not path.is_dir() or {f.name: f.is_file() and f.read_bytes() for f in path.iterdir()} != before:
                raise Wrong(f"{case}: the checkpoint was changed; only read it")
        if isinstance(found, (Set, dict, Iterator)):
            raise Wrong(f"{case}: return a sorted list, not {shown(found)}")
        found = list(map(str, found)) if isinstance(found, (list, tuple)) else found
        slips = {
            "return whole file names, with what follows the point": [Path(name).stem for name in wanted] or None,
            "the manifest itself can be read": sorted({*wanted, "manifest.json"}),
            "return names, not whole paths": [str(path / name) for name in wanted],
            "these are the right names, but not sorted": found if found and sorted(found) == wanted else None,
            hint: found,
        }
        expect_equal(found, wanted, f"{case}: the list", slips)


PRINT_BYTES = 160  # per tensor and rank, including its name: enough for a hexadecimal sha256


@exercise(4, "which copy is wrong?")
def odd_one_out(answer, ranks):
    """`answer(model, gather)` is (rank, name) of the parameter in which one rank differs from the others, or None.

    With two ranks the rank is None, because it is undecidable which of two copies is wrong.
    """
    n, rank, last = ranks.world_size, ranks.rank, ranks.world_size - 1
    for case, odd, names, change, *pair in (
        ("all copies are equal", None, "", None),
        (f"bit 20 is flipped in a weight of two layers on rank {last}", last, "0.weight 2.weight",
            lambda bits: bits[100].bitwise_xor_(1 << 20)),
        ("the lowest bit of one weight is flipped on rank 0", 0, "2.weight", lambda bits: bits[7].bitwise_xor_(1)),
        (f"two weights have changed places on rank {last // 2}, so that their sum is as before", last // 2, "0.weight",
            lambda bits: bits[:2].copy_(bits[:2].flip(0))),
        (f"a zero has become -0.0 on rank {last}: equal to the eye, one bit apart", last, "1.bias",
            lambda bits: bits[0].bitwise_xor_(1 << 31)),
        (f"the gather returns two copies, and a bit is flipped on rank {last}", last, "0.weight",
            lambda bits: bits[9].bitwise_xor_(1), True),
    ):  # fmt: skip
        model, gather, name = _model(), _Gather(n, *pair), names.partition(" ")[0]
        for one in names.split() if rank == odd else ():
            change(model.get_parameter(one).detach().view(torch.int32).view(-1))
        found, of_two = plain(answer(model, gather)), n == 2 or pair
        wanted = None if odd is None or n == 1 else [None if of_two else odd, name]
        slips = {
            f"with two copies it is undecidable which is wrong; return (None, {name!r})": (
                found if of_two and found in ([0, name], [1, name], [last, name]) else None
            ),
            "this one differs, too; return the first": [odd, "2.weight"],
            "nan is not equal to itself, but its bits are": found if found and found[1] == "2.bias" else None,
        }
        expect_equal(found, wanted, f"{case}: (rank, name)", slips)
        enough = PRINT_BYTES * len(list(model.parameters()))
        if gather.sent_bytes > enough:
            raise Wrong(f"right, but you sent {gather.sent_bytes:,} bytes: weights; fingerprints fit into {enough:,}")


def _model():
    """Return a model that is identical on all ranks, with a bias of zeros and one that is nan."""
    model = seeded(lambda: nn.Sequential(nn.Linear(32, 24), nn.LayerNorm(24), nn.Linear(24, 16)), 3)
    model[2].bias.data.fill_(float("nan"))
    return model
