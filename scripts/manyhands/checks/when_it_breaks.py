"""Checks of lesson 11: who did not make which call, a save that is whole or not there, what a resumed run has
forgotten, which rank's copy of the model is not that of the others.

One of them communicates here, the one of a save by all ranks; in the others every rank judges the answer on the same
cases, drawn from fixed seeds.
"""

import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import tempfile
import time
from pathlib import Path
from unittest import mock

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from manyhands.checks import Wrong, exercise
from manyhands.checks.expect import plain, shown
from manyhands.checks.witness import said
from manyhands.launch import recorded_runs

LAYOUTS = (  # the groups of a made-up hang: one, a grid's, two of different sizes that overlap, and chains
    ((0, 1, 2, 3),),
    ((0, 1, 2, 3), (0, 1), (2, 3)),
    ((0, 1, 2, 3), (2, 3, 4)),
    ((0, 1, 2), (2, 3)),
    ((0, 1), (1, 2), (2, 3, 4)),
)
NAMES = ["data", "tensor", "pipe", "expert", "context", "left", "right", "all"]


# ---- build A ----


@exercise("A", "the call that was not made")
def missing_call(answer, ranks=None):
    """`answer(calls)`, [{number: call} of each rank] -> (number, ranks that did not make it as most did), or None."""
    for name, calls, truth in _sequences():
        given = _number_and_ranks(answer([dict(made) for made in calls]), name, truth)
        if given != truth:
            raise Wrong(f"{name}: {_not_that_call(given, truth, calls)}")


def _number_and_ranks(given, name, truth):
    """What came back, as (number, sorted ranks) or None."""
    if given is None and truth is not None:
        number, missing = truth
        raise Wrong(f"{name}: you found nothing, and call {number} was not made alike by all (see ranks {missing})")
    if given is None:
        return None
    number, found = given
    number, found = plain(number), plain(list(found))
    if any(type(one) is not int for one in (number, *found)):
        raise Wrong(f"{name}: return (number, ranks), which are whole numbers, not {shown(given)}")
    return number, sorted(set(found))


def _not_that_call(given, truth, calls):
    number, found = given
    made = [of_rank.get(number) for of_rank in calls]
    begins = [min(of_rank, default=1) for of_rank in calls]
    if number < max(begins):
        late = begins.index(max(begins))
        return (
            f"the buffer of rank {late} begins with call {max(begins)}, so it says nothing about call {number}; begin "
            "where every buffer has begun"
        )
    if len(set(made)) == 1:
        what = f"all ranks made call {number} alike" if made[0] else f"nobody made call {number}"
        return f"{what}; name the first number at which they differ"
    wanted_number, wanted = truth
    if number != wanted_number:
        return f"call {number} is not the first at which the ranks differ: look at call {wanted_number}"
    if found == sorted(set(range(len(calls))) - set(wanted)):
        return f"ranks {found} made call {number} and wait in it; return those that did not"
    for r in set(wanted) - set(found):
        if made[r] is not None:
            return f"rank {r} made another call than most, {made[r]}, as number {number}: it is missing, too"
    return f"call {number} was not made by ranks {wanted}, not {found}"


def _sequences():
    """(name, calls, truth): the recorded hangs of one group, and a number that are made up from seeds."""
    for i, hang in enumerate(recorded_runs.numbers("11_hangs.json")["hangs"][:2]):
        rank, group, number = hang["culprit"]
        calls = [{i: call for name, i, call, _ in record if name == group} for record in hang["calls"]]
        yield f"hang {i}", calls, (number, [rank])
    for seed in range(60):
        yield f"another hang (seed {seed})", *_made_up_sequence(seed)


def _made_up_sequence(seed):
    """(calls, truth): 3 to 7 ranks; at the last number less than half of them make no call, or another, or all do."""
    luck = random.Random(f"calls {seed}")
    n, last = luck.randrange(3, 8), luck.randrange(5, 12)
    odd = sorted(luck.sample(range(n), luck.randrange(1, (n + 1) // 2)))
    kind = ("missing", "another", "both", "alike", "silent")[seed % 5]
    names = {number: luck.choice(["all_reduce", "broadcast", "all_gather"]) for number in range(1, last + 1)}
    if kind == "silent":  # they called nothing in this group, and the others wait in the first call
        return [{} if r in odd else {1: names[1]} for r in range(n)], (1, odd)
    calls = []
    for r in range(n):
        made = dict(names)
        if r in odd and kind != "alike":
            del made[last]
            if kind == "another" or kind == "both" and r == odd[0]:
                made[last] = "reduce_scatter"
        keep = luck.choice([3, 4, 100])
        calls.append({number: made[number] for number in sorted(made)[-keep:]})
    return calls, None if kind == "alike" else (last, odd)


# ---- exercise 1 ----


@exercise(1, "three hangs, find the culprit")
def culprit(answer, ranks=None):
    """`answer(records, members)` -> (rank, group, number): the call that was not made, and who did not make it."""
    for name, members, records, truth in _hangs():
        own = {group: list(its_ranks) for group, its_ranks in members.items()}  # the answer may do what it likes
        given = answer([[tuple(call) for call in calls] for calls in records], own)
        rank, group, number = _fault(given, name)
        if (rank, group, number) != truth:
            raise Wrong(f"{name}: {_why_not(rank, group, number, truth, members, records)}")


def _fault(given, hang):
    """What came back, as (rank, group, number)."""
    if not (isinstance(given, tuple) and len(given) == 3):
        raise Wrong(f"{hang}: return a tuple (rank, group, number), not {shown(given)}")
    rank, group, number = plain(given[0]), given[1], plain(given[2])
    if not isinstance(group, str) or type(rank) is not int or type(number) is not int:
        raise Wrong(f"{hang}: rank and number are whole numbers, the group is a name, not {shown(given)}")
    return rank, group, number


def _why_not(rank, group, number, truth, members, records):
    culprit, in_group, missed = truth
    if group not in members:
        return f"there is no group {group!r}"
    if rank not in members[group]:
        return f"rank {rank} is no member of {group!r} ({list(members[group])}), so it need not call anything there"
    if rank == culprit and group == in_group:
        return (
            f"the rank and the group are right; the call is number {missed}, not {number}: compare the numbers in the"
            " records, not places in a list, which begins where the buffer does"
        )
    made = {r: {i: call for name, i, call, _ in records[r] if name == group} for r in members[group]}
    if number > max(i for calls in made.values() for i in calls):
        return f"nobody in {group!r} made a call number {number}, so nobody waits for it"
    if not made[rank] and records[rank] or number < min(made[rank], default=number):
        return f"the buffer of rank {rank} no longer holds call {number} of {group!r}, so its absence says nothing"
    if number in made[rank]:
        others = [calls.get(number) for r, calls in made.items() if r != rank and number >= min(calls, default=0)]
        waits = not all(others)
        return f"rank {rank} did call {made[rank][number]}, number {number} of {group!r}; " + (
            "it waits there for another rank" if waits else "and so did the others, so nobody waits there"
        )
    if rank == culprit:
        return f"rank {rank} is missing in {group!r} because of what it left out before, in {in_group!r}"
    return (
        f"rank {rank} did not make call {number} of {group!r}, but only because it waits in another group; the culprit "
        "is missing somewhere and waits nowhere"
    )


def _hangs():
    """(name, members, records, truth): the three that were recorded, and a number that are made up from seeds."""
    for i, hang in enumerate(recorded_runs.numbers("11_hangs.json")["hangs"]):
        yield f"hang {i}", hang["members"], hang["calls"], tuple(hang["culprit"])
    for seed in range(100):
        yield f"another hang (seed {seed})", *_made_up(seed, LAYOUTS[seed % len(LAYOUTS)])


def _made_up(seed, layout):
    """(members, records, truth) of a hang: in each step a rank calls all-reduce in each of its groups, in one order.

    Drawn are the groups' names and their order, the rank at fault, and the group in which it stops: it makes no call
    there, or another one, and none after it. The others go on until each of them waits.
    """
    luck = random.Random(f"hang {seed}")
    order = list(zip(luck.sample(NAMES, len(layout)), luck.sample(layout, len(layout)), strict=True))
    all_ranks = sorted({r for its_ranks in layout for r in its_ranks})
    groups_of = {r: [name for name, its_ranks in order if r in its_ranks] for r in all_ranks}
    # who is in two groups may be missing in both, the harder case, and is drawn twice as often
    culprit = luck.choice([r for r in all_ranks for _ in groups_of[r] if _can_be_told(r, layout)])
    group = luck.choice(groups_of[culprit])
    fault, keep = luck.randrange(4, 10), luck.choice([4, 6, 100])
    # None: it makes no call at all; of two ranks with different calls nobody could say which one is wrong
    other = luck.choice(["broadcast", "all_gather", None]) if len(dict(order)[group]) > 2 else None
    records = [[] for _ in groups_of]
    stuck, number = set(), 0
    while len(stuck) < len(records):
        number += 1
        for name, its_ranks in order:
            calling = [r for r in its_ranks if r not in stuck]
            here = number == fault and name == group
            for r in calling:
                call = other if here and r == culprit else "all_reduce"
                records[r] += [(name, number, call, 50)] if call else []
            if here or len(calling) < len(its_ranks):  # one is missing: who has called waits
                stuck |= set(calling)
    return dict(sorted(order)), [calls[-keep:] for calls in records], (culprit, group, fault)


def _can_be_told(rank, layout):
    """Whether records show where this rank stopped: of two groups only if another rank of both waits in the first."""
    own = [set(its_ranks) for its_ranks in layout if rank in its_ranks]
    return all(len(one & other) > 1 for one in own for other in own)


# ---- build B ----


class Trainee:
    """Like the lesson's, of one rank: a row of weights that the model looks at, Adam's averages, dropout, a step."""

    def __init__(self, seed, rank=0):
        torch.manual_seed(1000 * seed + rank)
        self.rank, self.n, self.group, self.step = rank, 1, None, 0
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 1)).double()
        self.row_P = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        self.num_params = len(self.row_P)
        views = self.row_P.split([p.numel() for p in self.model.parameters()])
        for p, view in zip(self.model.parameters(), views, strict=True):
            p.data = view.view_as(p)
        self.state = {
            "weights": self.row_P[:],
            "mean": torch.zeros_like(self.row_P),
            "square": torch.zeros_like(self.row_P),
        }

    def train_step(self):
        """The loss of one step: batch k is drawn from k alone, dropout from torch's generator."""
        data = torch.Generator().manual_seed(100 * self.rank + self.step)
        x_B4 = torch.randn(8, 4, generator=data, dtype=torch.float64)
        self.model.zero_grad()
        loss = (self.model(x_B4) - x_B4.sum(1, keepdim=True).sin()).square().mean()
        loss.backward()
        gradient_P = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        self.step += 1
        mean, square = self.state["mean"], self.state["square"]
        mean.lerp_(gradient_P, 0.1)
        square.lerp_(gradient_P**2, 0.05)
        size_P = (square / (1 - 0.95**self.step)).sqrt() + 1e-8
        self.state["weights"] -= 0.05 * mean / (1 - 0.9**self.step) / size_P
        return loss.item()


STEPS_BEFORE, STEPS_AFTER = 5, 6
ROOM = 1000  # bytes of a shard beyond the state itself: names, and a number or two


@exercise("B", "what a step reads")
def trainee_state(answer, ranks=None):
    """`answer` is (state_of, go_on): a fresh trainee that takes the state must go on alike, bit for bit."""
    state_of, go_on = answer
    rank = ranks.rank if ranks else 0
    trainee = Trainee(1, rank)
    for _ in range(STEPS_BEFORE):
        trainee.train_step()
    shard = _shard_of(state_of(trainee), trainee)
    random_then, then = torch.get_rng_state(), {name: part.clone() for name, part in trainee.state.items()}
    wanted = [trainee.train_step() for _ in range(STEPS_AFTER)]
    _shard_of(state_of(Trainee(3, rank)), trainee)  # what is kept aside, and not in the file, is now another one's

    fresh = Trainee(2, rank)  # a new process: other weights, other random numbers
    memory = {name: part.data_ptr() for name, part in fresh.state.items()}
    go_on(fresh, safetensors.torch.load(shard))
    random_now = torch.get_rng_state()
    _compare_trainee(fresh, then, memory)
    if not torch.equal(random_now, random_then):
        raise Wrong("dropout draws other masks: the state of torch's random numbers is not restored")
    given = [fresh.train_step() for _ in range(STEPS_AFTER)]
    if given != wanted:
        raise Wrong(f"all parts are restored, but the next losses are {given[:2]} ... and not {wanted[:2]} ...")


def _shard_of(state, trainee):
    """The bytes of a shard with this state; raises Wrong where it cannot be one."""
    if not isinstance(state, dict):
        raise Wrong(f"state_of returned {shown(state)}; return a dictionary")
    for name, part in state.items():
        if not (isinstance(name, str) and torch.is_tensor(part)):
            raise Wrong(
                f"a shard holds tensors with names, and {name!r} is {shown(part)}; torch.tensor(number) makes a tensor"
            )
    shard = safetensors.torch.save({name: part.detach().clone().contiguous() for name, part in state.items()})
    enough = sum(part.nbytes for part in trainee.state.values()) + torch.get_rng_state().nbytes
    if len(shard) > enough + ROOM:
        raise Wrong(
            f"your state has {len(shard):,} bytes, and {enough:,} hold it all: the weights and Adam's averages of this "
            "rank, once, and the random numbers"
        )
    return shard


def _compare_trainee(fresh, then, memory):
    """Raises Wrong with the first part of the trainee that is not as it was."""
    names = {"weights": "the weights", "mean": "Adam's mean", "square": "Adam's mean square"}
    for name, what in names.items():
        part = fresh.state.get(name) if isinstance(fresh.state, dict) else None
        if not torch.is_tensor(part):
            raise Wrong(f"trainee.state[{name!r}] is no tensor any more: copy into the tensors that are there")
        if name == "weights" and part.data_ptr() != memory[name]:
            raise Wrong(
                "trainee.state['weights'] is another tensor now, and the model still looks at the old one: copy into "
                "the tensor that is there"
            )
        if not torch.equal(part, then[name]):
            raise Wrong(f"{what} (trainee.state[{name!r}]) is not what was saved")
    if not isinstance(fresh.step, int):
        raise Wrong(f"trainee.step is {shown(fresh.step)}; it was a whole number")
    if fresh.step != STEPS_BEFORE:
        raise Wrong(f"the trainee is at step {fresh.step}, not {STEPS_BEFORE}: Adam and the next batch depend on it")


# ---- build C ----

SHARD_BYTES = 20_000
LATE_S = 0.15  # so late is one rank's disk


@exercise("C", "whole, or not there")
def save_whole(answer, ranks, folder):
    """`answer(path, name, content, rank, gather)`: all shards and a manifest under `path`, in one moment.

    `folder` is one that all ranks see. First the last rank's disk is slow, then that of rank 0.
    """
    for slow in dict.fromkeys((ranks.world_size - 1, 0)):
        own = Path(folder) / f"build C, slow {slow}"
        path = own / "step-0006"
        if ranks.rank == 0:
            shutil.rmtree(own, ignore_errors=True)
            own.mkdir(parents=True)
        dist.barrier()
        disk = _Disk(path, LATE_S if ranks.rank == slow else 0.0, ranks)
        with mock.patch.object(os, "fsync", disk.fsync):
            answer(path, _shard(ranks.rank), _content(ranks.rank), ranks.rank, disk.gather)
        disk.judge(_shard(ranks.rank))


def _content(rank):
    return random.Random(rank).randbytes(SHARD_BYTES)


class _Disk:
    """What one rank does while it saves: it is watched whenever a file is forced onto the disk, and when it gathers."""

    def __init__(self, path, late_s, ranks):
        self._path, self._late_s, self._ranks = path, late_s, ranks
        self._real, self._synced, self._early, self._largest = os.fsync, 0, None, 0

    def fsync(self, handle):
        self._synced += 1
        for moment in (0.0, self._late_s):
            time.sleep(moment)
            if self._path.exists() and self._early is None:
                self._early = self._synced
        self._real(handle)

    def gather(self, mine):
        self._largest = max(self._largest, len(pickle.dumps(mine)))
        of_all = [None] * self._ranks.world_size
        dist.all_gather_object(of_all, mine)
        return of_all

    def judge(self, shard):
        """Raises Wrong with what this rank saw, at once after its answer has returned."""
        path, rank, n = self._path, self._ranks.rank, self._ranks.world_size
        there = path.is_dir()
        if self._early:
            what = "its shard" if self._early == 1 else "the manifest"
            raise Wrong(
                f"{path.name} was there, under its final name, before rank {rank} had {what} on the disk: whoever "
                "reads it then takes a part for the whole"
            )
        if self._largest > SHARD_BYTES // 2:
            raise Wrong(
                f"you gathered {self._largest:,} bytes: each rank writes its own shard of {SHARD_BYTES:,} bytes, and "
                "only names and sums travel"
            )
        if not there:
            left = sorted(file.name for file in path.parent.iterdir())
            why = "nobody has renamed anything to it" if rank == 0 else "a rank that is done must not find it missing"
            raise Wrong(
                f"{path.name} was not there when rank {rank} returned (in the folder: "
                f"{', '.join(left) or 'nothing'}): {why}"
            )
        if self._synced < 1 + (rank == 0):
            raise Wrong(
                f"rank {rank} forced {self._synced} of its {1 + (rank == 0)} files onto the disk: `write` does, other "
                "ways to write leave them in a cache"
            )
        if rank and self._synced > 1:
            raise Wrong(f"rank {rank} wrote {self._synced} files; one shard is its own, and the manifest is rank 0's")
        found = {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}
        wanted = {_shard(r): _content(r) for r in range(n)}
        for name, content in wanted.items():
            if found.get(name) != content:
                raise Wrong(f"{path.name} holds {sorted(found)}, and {name} is not there as its rank handed it over")
        self._judge_manifest(found, wanted)
        left = sorted(file.name for file in path.parent.iterdir() if file != path)
        if left:
            raise Wrong(f"{left[0]} is still there beside {path.name}: rename it, do not copy it")

    def _judge_manifest(self, found, wanted):
        files = None
        with contextlib.suppress(KeyError, ValueError, TypeError):
            files = json.loads(found["manifest.json"])["files"]
        if not isinstance(files, dict):
            raise Wrong(f"{self._path.name} has no manifest.json with an entry 'files', a dictionary by file name")
        missing = sorted(set(wanted) - set(files))
        if missing:
            raise Wrong(f"the manifest lists {len(files)} of {len(wanted)} shards; {missing[0]} is not in it")
        for name, content in wanted.items():
            if files[name] != {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}:
                raise Wrong(
                    f"the manifest says {shown(files[name])} of {name}, and that is not what write() returned for it"
                )


# ---- exercise 2 ----


@exercise(2, "is it damaged?")
def damaged(answer, ranks=None):
    """`answer(path, part, parts)` -> the sorted names of files that are not as the manifest says, of this part."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, harm, expected, hint, *part in DAMAGES:
            path = _checkpoint(Path(scratch))
            harm(path)
            before = _contents(path)
            try:
                given = answer(path, *part)
            except NotImplementedError:
                raise
            except Exception as error:
                raise Wrong(f"{name}: your code raised {said(error)}; say what is damaged, whatever it is") from None
            if _contents(path) != before:
                raise Wrong(f"{name}: your code changed the checkpoint; only read it")
            _judge_names(given, expected, name, hint)


def _contents(path):
    return {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def _judge_names(given, expected, case, hint):
    if not isinstance(given, (list, tuple)):
        raise Wrong(f"{case}: return a list of names, not {shown(given)}")
    if strange := [one for one in given if not isinstance(one, (str, Path))]:
        raise Wrong(f"{case}: the list holds {shown(strange[0])}; return names of files, as text")
    names = [str(one) for one in given]
    if names == expected:
        return
    if [Path(name).name for name in names] == expected:
        raise Wrong(f"{case}: return names such as {expected[0]!r}, not whole paths such as {names[0]!r}")
    if sorted(names) == expected:
        raise Wrong(f"{case}: {names} are the right names, but not sorted")
    raise Wrong(f"{case}: expected {expected}, got {names}; {hint}")


def _checkpoint(scratch):
    """A whole checkpoint of three ranks in a fresh folder."""
    path = scratch / "step-0006"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    luck, files = random.Random(6), {}
    for rank in (2, 0, 1):  # as they came: nothing says that a manifest is sorted
        files[_shard(rank)] = _write(path, rank, luck.randbytes(400))
    _write_manifest(path, files)
    return path


def _write(path, rank, content):
    """The manifest's entry of a shard that has just been written."""
    (path / _shard(rank)).write_bytes(content)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _write_manifest(path, files):
    (path / "manifest.json").write_text(json.dumps({"step": 6, "n": 3, "files": files}, indent=1))


def _shard(rank):
    return f"rank-{rank}.safetensors"


def _cut(path, rank, left):
    content = (path / _shard(rank)).read_bytes()
    (path / _shard(rank)).write_bytes(content[:left])


def _flip(path, rank, at=200):
    content = bytearray((path / _shard(rank)).read_bytes())
    content[at] ^= 1
    (path / _shard(rank)).write_bytes(content)


def _enlarge(path, rank):
    """This shard becomes a large one, as its entry in the manifest says."""
    files = json.loads((path / "manifest.json").read_text())["files"]
    _write_manifest(path, files | {_shard(rank): _write(path, rank, bytes(LARGE))})


def _swap(path):
    first, second = path / _shard(0), path / _shard(1)
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])


LARGE = 3 * 2**20 + 7  # bytes: more than one reads at once
DAMAGES = [
    ("a whole checkpoint", lambda path: None, [], "nothing is wrong with it"),
    ("one byte cut off", lambda path: _cut(path, 1, 399), [_shard(1)], "compare the size with the manifest's"),
    ("an empty file", lambda path: _cut(path, 2, 0), [_shard(2)], "compare the size with the manifest's"),
    ("a missing file", lambda path: (path / _shard(0)).unlink(), [_shard(0)], "what the manifest lists must be there"),
    (
        "one bit flipped, the size unchanged",
        lambda path: _flip(path, 1),
        [_shard(1)],
        "a size proves little: compare the sha256 of the bytes",
    ),
    (
        "a whole checkpoint, one of its files large",
        lambda path: _enlarge(path, 1),
        [],
        "hash the whole file, not its beginning",
    ),
    (
        "one bit flipped near the end of a large file",
        lambda path: (_enlarge(path, 1), _flip(path, 1, at=LARGE - 5)),
        [_shard(1)],
        "hash every file, however large",
    ),
    (
        "two files at once",
        lambda path: (_cut(path, 2, 10), _flip(path, 0)),
        [_shard(0), _shard(2)],
        "name all of them, sorted",
    ),
    (
        "two shards exchanged",
        _swap,
        [_shard(0), _shard(1)],
        "each file must match its own entry of the manifest",
    ),
    (
        "a file too many, left over from another run",
        lambda path: (path / "rank-3.safetensors").write_bytes(b"old"),
        [],
        "what the manifest does not list is nobody's business",
    ),
    (
        "a manifest cut in half",
        lambda path: (path / "manifest.json").write_text((path / "manifest.json").read_text()[:90]),
        ["manifest.json"],
        "half a JSON cannot be read",
    ),
    (
        "no manifest",
        lambda path: (path / "manifest.json").unlink(),
        ["manifest.json"],
        "without a manifest nothing can be trusted",
    ),
    (
        "two files damaged, read as part 1 of 2",
        lambda path: (_flip(path, 0), _flip(path, 1)),
        [_shard(1)],
        "this part is number 1 of the sorted names; numbers 0 and 2 are somebody else's",
        1,
        2,
    ),
    (
        "three files damaged, read as part 0 of 2",
        lambda path: [_flip(path, r) for r in range(3)],
        [_shard(0), _shard(2)],
        "this part is numbers 0 and 2 of the sorted names",
        0,
        2,
    ),
    (
        "no manifest, read as part 1 of 2",
        lambda path: (path / "manifest.json").unlink(),
        ["manifest.json"],
        "without a manifest nothing can be trusted",
        1,
        2,
    ),
]  # fmt: skip


# ---- exercise 3 ----

PARTS = {
    "model": nn.Module, "optimizer": torch.optim.Optimizer, "shuffle": torch.Generator,
    "order": (torch.Tensor, list, tuple),
}  # fmt: skip
BEFORE, AFTER = 13, 24  # steps: the state is taken in the second epoch, and two more epochs follow


class Loop:
    """A training loop with all that one may forget: 10 rows per epoch, one per step, in a new order each epoch."""

    rows = 10

    def __init__(self, seed, rank=0):
        torch.manual_seed(1000 * seed + rank)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 1)).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.shuffle = torch.Generator().manual_seed(seed)
        self.order, self.position, self.step = torch.randperm(self.rows, generator=self.shuffle), 0, 0
        data = torch.Generator().manual_seed(rank)
        self.x = torch.randn(self.rows, 4, generator=data, dtype=torch.float64)
        self.y = self.x.sum(1, keepdim=True).sin()

    def train_step(self):
        """The loss of the next row."""
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


@exercise(3, "nothing forgotten")
def resume(answer, ranks=None):
    """`answer` is (all_of, put_back): a fresh loop that takes the state must train on as the first, bit for bit."""
    all_of, put_back = answer
    rank = ranks.rank if ranks else 0
    loop = Loop(seed=1, rank=rank)
    for _ in range(BEFORE):
        loop.train_step()
    taken = all_of(loop)
    if not isinstance(taken, dict):
        raise Wrong(f"all_of returned {shown(taken)}; return a dict")
    file = io.BytesIO()
    torch.save(taken, file)
    random_then = torch.get_rng_state()
    wanted = [loop.train_step() for _ in range(AFTER)]
    all_of(Loop(seed=3, rank=rank))  # what is kept aside, and not in the file, is now another loop's

    fresh = Loop(seed=2, rank=rank)  # a new process: other weights, another order, other random numbers
    put_back(fresh, _read(file))
    torch_random = torch.get_rng_state()
    original = Loop(seed=1, rank=rank)  # once more up to the moment of saving, to compare part by part
    for _ in range(BEFORE):
        original.train_step()
    _compare(fresh, original, torch_random, random_then)
    torch.set_rng_state(torch_random)
    given = [fresh.train_step() for _ in range(AFTER)]
    for i, (ours, theirs) in enumerate(zip(given, wanted, strict=True)):
        if ours != theirs:
            raise Wrong(
                f"all parts are restored, but loss {i + 1} after the restart is {ours:.6f} and not {theirs:.6f}: "
                "what was loaded is not what the loop goes on with"
            )


def _read(file):
    file.seek(0)
    try:
        return torch.load(file, weights_only=True)
    except Exception as error:
        first_line = str(error).split("\n")[0][:90]
        raise Wrong(
            f"your state cannot be read with weights_only=True ({first_line}); save tensors, numbers and dicts of them"
        ) from None


def _compare(fresh, original, random_now, random_then):
    """Raises Wrong with the first part of the loop that is not as it was."""
    for name, kind in PARTS.items():
        part = getattr(fresh, name, None)
        if not isinstance(part, kind):
            raise Wrong(
                f"loop.{name} is now of the type {type(part).__name__}, and was a "
                f"{type(getattr(original, name)).__name__}: load the state into what is there"
            )
    if not _equal(fresh.model.state_dict(), original.model.state_dict()):
        raise Wrong("the weights are not those that were saved")
    if not fresh.optimizer.state:
        raise Wrong("the optimizer's memory is lost: AdamW begins again with averages of zero")
    mine = {id(p) for group in fresh.optimizer.param_groups for p in group["params"]}
    if mine != {id(p) for p in fresh.model.parameters()}:
        raise Wrong("the optimizer updates other tensors than the model's: load into what is there")
    if not _equal(fresh.optimizer.state_dict()["state"], original.optimizer.state_dict()["state"]):
        raise Wrong("the optimizer's memory is not what was saved")
    if fresh.step != original.step:
        raise Wrong(f"the loop is at step {fresh.step}, not {original.step}: the learning rate follows it")
    if not torch.equal(torch.as_tensor(fresh.order), original.order):
        raise Wrong("the order of this epoch is another one: some rows come twice and some not at all")
    if fresh.position != original.position:
        raise Wrong(
            f"the next row is number {fresh.position} of the epoch, not {original.position}: rows come twice or never"
        )
    if not torch.equal(fresh.shuffle.get_state(), original.shuffle.get_state()):
        raise Wrong("the next epoch will have another order: the generator `shuffle` is not where it was")
    if not torch.equal(random_now, random_then):
        raise Wrong("dropout draws other masks: the state of torch's own random numbers is not restored")


def _equal(a, b):
    """Whether two nested dicts hold the same tensors and numbers, to the last bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


# ---- exercise 4 ----

PRINT_BYTES = 160  # for each tensor and rank, its name included: a sha256 in hexadecimal digits fits


@exercise(4, "which copy is wrong?")
def odd_one_out(answer, ranks):
    """`answer(model, gather)` is (rank, name) of the parameter in which one rank differs from the others, or None.

    With two ranks the rank is None: nobody can say which of two copies is the wrong one.
    """
    n = ranks.world_size
    for what, culprit, name, change in _wrong_copies(n):
        model = _model()
        if ranks.rank == culprit:
            change(model.get_parameter(name))
        before = [p.detach().clone() for p in model.parameters()]
        exchange = _Exchange(n)
        given = answer(model, exchange)
        if any(not torch.equal(_bits(p), _bits(q)) for p, q in zip(model.parameters(), before, strict=True)):
            raise Wrong(f"{what}: your function changed the model; look at it only")
        _compare_copy(what, given, None if culprit is None or n == 1 else (culprit if n > 2 else None, name), n)
        exchange.judge(len(before))


def _wrong_copies(n):
    """(what happened, the rank, the parameter, what happens to it) of some worlds of n ranks."""

    def flipped(index, bit):
        return lambda p: _bits(p).view(-1)[index].bitwise_xor_(1 << bit)

    def swapped(p):
        flat = p.detach().view(-1)
        flat[:2] = flat[:2].flip(0)

    last, biases = n - 1, "1.bias"
    yield "all copies are equal", None, biases, None
    yield f"bit 20 of one weight is flipped on rank {last}", last, "0.weight", flipped(100, 20)
    yield "the lowest bit of one weight is flipped on rank 0", 0, "2.weight", flipped(7, 0)
    yield (
        f"two weights have changed places on rank {last // 2}, so that their sum is as before",
        last // 2,
        "0.weight",
        swapped,
    )
    yield (f"a zero has become -0.0 on rank {last}: equal to the eye, one bit apart", last, biases, flipped(0, 31))


def _model():
    """The same on all ranks: weights drawn by themselves, a bias of zeros, and one that is nan on every rank."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 24), nn.LayerNorm(24), nn.Linear(24, 16))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
        model[1].bias.zero_()
        model[2].bias.fill_(float("nan"))
    return model


def _bits(p):
    return p.detach().view(torch.int32)


class _Exchange:
    """The `gather` of an answer: each rank's object comes back to all, in rank order, and its bytes are counted."""

    def __init__(self, n):
        self._n, self._bytes, self._calls = n, 0, 0

    def __call__(self, mine):
        self._calls += 1
        self._bytes += len(pickle.dumps(mine))
        of_all = [None] * self._n
        dist.all_gather_object(of_all, mine)
        return of_all

    def judge(self, num_tensors):
        enough = num_tensors * PRINT_BYTES
        if self._bytes > enough:
            raise Wrong(
                f"right, but this rank communicated {self._bytes:,} bytes for {num_tensors} tensors: "
                f"weights travelled; fingerprints fit into {enough:,}"
            )


def _compare_copy(what, given, wanted, n):
    if given is not None:
        odd, name = given
        given = plain(odd), str(name)
        if type(given[0]) not in (int, type(None)):
            raise Wrong(f"return (rank, name) or None, not {shown(given)}")
    if given == wanted:
        return
    if wanted is None:
        alike = " (nan is not equal to itself, but its bits are)" if given[1] == "2.bias" else ""
        raise Wrong(f"{what}, and you found {given}{alike}")
    if given is None:
        raise Wrong(f"{what}, in {wanted[1]}, and you found nothing: compare all bits")
    if n == 2 and given[1] == wanted[1]:
        raise Wrong(f"{what}: with two copies nobody can say which is the wrong one; return (None, {wanted[1]!r})")
    raise Wrong(f"{what}, in {wanted[1]}: the answer is {wanted}, not {given}")
