"""Checks of lesson 11: who did not make which call, which files are damaged, what a resumed run has forgotten.

None of them communicates: every rank judges the answer on the same cases, drawn from fixed seeds.
"""

import hashlib
import io
import json
import random
import shutil
import tempfile
from pathlib import Path

import torch
from torch import nn

from manyhands.checks import Wrong, exercise
from manyhands.runs import recorded_runs

LAYOUTS = [  # the groups of a made-up hang: one, a grid's, and two of different sizes that overlap
    [[0, 1, 2, 3]],
    [[0, 1, 2, 3], [0, 1], [2, 3]],
    [[0, 1, 2, 3], [2, 3, 4]],
]
NAMES = ["data", "tensor", "pipe", "expert", "context", "left", "right", "all"]


# ---- exercise 1 ----


@exercise(1, "three hangs, find the culprit")
def culprit(answer, ranks=None):
    """`answer(records, members)` -> (rank, group, number): the call that was not made, and who did not make it."""
    for name, members, records, truth in _hangs():
        given = answer([[tuple(call) for call in calls] for calls in records], dict(members))
        if not (isinstance(given, tuple) and len(given) == 3):
            raise Wrong(f"{name}: return (rank, group, number), not {given!r}")
        if given != truth:
            raise Wrong(f"{name}: {_why_not(given, truth, members, records)}")


def _why_not(given, truth, members, records):
    rank, group, number = given
    culprit, in_group, missed = truth
    if group not in members:
        return f"there is no group {group!r}"
    if rank not in members[group]:
        return f"rank {rank} is no member of {group!r} ({members[group]}), so it need not call anything there"
    made = {(name, index): call for name, index, call, _ in records[rank]}
    if rank == culprit and group == in_group:
        return (
            f"the rank and the group are right; the call is number {missed}, not {number}: compare the numbers in the"
            " records, not places in a list, which begins where the buffer does"
        )
    if (group, number) in made and rank != culprit:
        return f"rank {rank} did call {made[group, number]}, number {number} of {group!r}; it waits there for another rank"
    if rank != culprit and len(members) > 1:
        return (
            f"rank {rank} did not make call {number} of {group!r}, but only because it waits in another group; the culprit is"
            " missing somewhere and waits nowhere"
        )
    if rank == culprit:
        return f"rank {rank} is missing in {group!r} because of what it left out before, in {in_group!r}"
    return f"rank {rank} made call {number} of {group!r} as most others did, or its buffer has dropped it; somebody else is missing"


def _hangs():
    """(name, members, records, truth): the three that were recorded, and a number that are made up from seeds."""
    for i, hang in enumerate(recorded_runs.numbers("11_hangs.json")["hangs"]):
        yield f"hang {i}", hang["members"], hang["calls"], tuple(hang["culprit"])
    for seed in range(24):
        yield f"another hang (seed {seed})", *_made_up(seed, LAYOUTS[seed % 3])


def _made_up(seed, layout):
    """(members, records, truth) of a hang: in each step a rank calls all-reduce in each of its groups, in one order.

    Drawn are the groups' names and their order, the rank at fault, and the group in which it stops: it makes no call
    there, or another one, and none after it. The others go on until each of them waits.
    """
    luck = random.Random(f"hang {seed}")
    order = list(zip(luck.sample(NAMES, len(layout)), luck.sample(layout, len(layout)), strict=True))
    groups_of = {r: [name for name, its_ranks in order if r in its_ranks] for r in sum(layout, [])}
    most = max(map(len, groups_of.values()))  # who is in two groups may be missing in both
    culprit = luck.choice([r for r, names in groups_of.items() if len(names) == most])
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


# ---- exercise 2 ----


@exercise(2, "is it damaged?")
def damaged(answer, ranks=None):
    """`answer(path)` -> the sorted names of files that are not as the manifest says."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, harm, expected, hint in DAMAGES:
            path = _checkpoint(Path(scratch))
            harm(path)
            before = {file.name: file.read_bytes() for file in path.iterdir()}
            try:
                given = answer(path)
            except NotImplementedError:
                raise
            except Exception as error:
                raise Wrong(
                    f"{name}: your code raised {type(error).__name__}: {error}; say what is damaged, whatever it is"
                ) from None
            if {file.name: file.read_bytes() for file in path.iterdir()} != before:
                raise Wrong(f"{name}: your code changed the checkpoint; only read it")
            if isinstance(given, (bool, str)) or not isinstance(given, (list, tuple)):
                raise Wrong(f"{name}: return a list of names, not {given!r}")
            if [str(one) for one in given] != expected:
                raise Wrong(f"{name}: expected {expected}, got {list(map(str, given))}; {hint}")


def _checkpoint(scratch):
    """A whole checkpoint of three ranks in a fresh folder."""
    path = scratch / "step-0006"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    luck, files = random.Random(6), {}
    for rank in range(3):
        content = luck.randbytes(400)
        (path / f"rank-{rank}.safetensors").write_bytes(content)
        files[f"rank-{rank}.safetensors"] = {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    (path / "manifest.json").write_text(json.dumps({"step": 6, "n": 3, "files": files}, indent=1))
    return path


def _shard(rank):
    return f"rank-{rank}.safetensors"


def _cut(path, rank, left):
    content = (path / _shard(rank)).read_bytes()
    (path / _shard(rank)).write_bytes(content[:left])


def _flip(path, rank):
    content = bytearray((path / _shard(rank)).read_bytes())
    content[200] ^= 1
    (path / _shard(rank)).write_bytes(content)


def _swap(path):
    first, second = path / _shard(0), path / _shard(1)
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])


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
]  # fmt: skip


# ---- exercise 3 ----

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
    """`answer` is (state_of, go_on): a fresh loop that takes the state must train on as the first one does, bit for bit."""
    state_of, go_on = answer
    rank = ranks.rank if ranks else 0
    loop = Loop(seed=1, rank=rank)
    for _ in range(BEFORE):
        loop.train_step()
    taken = state_of(loop)
    if not isinstance(taken, dict):
        raise Wrong(f"state_of returned a {type(taken).__name__}; return a dict")
    file = io.BytesIO()
    torch.save(taken, file)
    random_then = torch.get_rng_state()
    wanted = [loop.train_step() for _ in range(AFTER)]

    fresh = Loop(seed=2, rank=rank)  # a new process: other weights, another order, other random numbers
    go_on(fresh, _read(file))
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
                f"all parts are restored, but loss {i + 1} after the restart is {ours:.6f} and not {theirs:.6f}: what was"
                " loaded is not what the loop goes on with"
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
            f"the next row is number {fresh.position} of the epoch, not {original.position}: rows are read again or left out"
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
