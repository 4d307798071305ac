"""Checks of lesson 11: who did not make which call, which files are damaged, what a resumed run has forgotten.

None of them communicates: every rank judges the answer on the same cases, drawn from fixed seeds.
"""

import hashlib
import io
import json
import operator
import random
import shutil
import tempfile
from pathlib import Path

import torch
from torch import nn

from manyhands.checks import Wrong, exercise
from manyhands.checks.values import plain
from manyhands.runs import recorded_runs

LAYOUTS = (  # the groups of a made-up hang: one, a grid's, two of different sizes that overlap, and chains
    ((0, 1, 2, 3),),
    ((0, 1, 2, 3), (0, 1), (2, 3)),
    ((0, 1, 2, 3), (2, 3, 4)),
    ((0, 1, 2), (2, 3)),
    ((0, 1), (1, 2), (2, 3, 4)),
)
NAMES = ["data", "tensor", "pipe", "expert", "context", "left", "right", "all"]


# ---- exercise 1 ----


@exercise(1, "three hangs, find the culprit")
def culprit(answer, ranks=None):
    """`answer(records, members)` -> (rank, group, number): the call that was not made, and who did not make it."""
    for name, members, records, truth in _hangs():
        shown = {
            group: list(its_ranks) for group, its_ranks in members.items()
        }  # the answer may do what it likes
        given = answer([[tuple(call) for call in calls] for calls in records], shown)
        rank, group, number = _fault(given, name)
        if (rank, group, number) != truth:
            raise Wrong(f"{name}: {_why_not(rank, group, number, truth, members, records)}")


def _fault(given, hang):
    """What came back, as (rank, group, number); raises Wrong if it is something else."""
    if not (isinstance(given, tuple) and len(given) == 3):
        raise Wrong(f"{hang}: return a tuple (rank, group, number), not {plain(given)}")
    rank, group, number = given
    if not isinstance(group, str):
        raise Wrong(f"{hang}: the group is {plain(group)}; return its name, as in `members`")
    try:
        return operator.index(rank), group, operator.index(number)
    except TypeError:
        raise Wrong(
            f"{hang}: rank and number are whole numbers, not {plain(rank)} and {plain(number)}"
        ) from None


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
        others = [
            calls.get(number) for r, calls in made.items() if r != rank and number >= min(calls, default=0)
        ]
        waits = not all(others)
        return f"rank {rank} did call {made[rank][number]}, number {number} of {group!r}; " + (
            "it waits there for another rank" if waits else "and so did the others, so nobody waits there"
        )
    if rank == culprit:
        return f"rank {rank} is missing in {group!r} because of what it left out before, in {in_group!r}"
    return (
        f"rank {rank} did not make call {number} of {group!r}, but only because it waits in another group; the culprit is"
        " missing somewhere and waits nowhere"
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


# ---- exercise 2 ----


@exercise(2, "is it damaged?")
def damaged(answer, ranks=None):
    """`answer(path)` -> the sorted names of files that are not as the manifest says."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, harm, expected, hint in DAMAGES:
            path = _checkpoint(Path(scratch))
            harm(path)
            before = _contents(path)
            try:
                given = answer(path)
            except NotImplementedError:
                raise
            except Exception as error:
                said = ": ".join([type(error).__name__, *str(error).split("\n")[:1]]).removesuffix(": ")
                raise Wrong(f"{name}: your code raised {said}; say what is damaged, whatever it is") from None
            if _contents(path) != before:
                raise Wrong(f"{name}: your code changed the checkpoint; only read it")
            _judge_names(given, expected, name, hint)


def _contents(path):
    return {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def _judge_names(given, expected, case, hint):
    if not isinstance(given, (list, tuple)):
        raise Wrong(f"{case}: return a list of names, not {plain(given)}")
    if strange := [one for one in given if not isinstance(one, (str, Path))]:
        raise Wrong(f"{case}: the list holds {plain(strange[0])}; return names of files, as text")
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
    """`answer` is (state_of, go_on): a fresh loop that takes the state must train on as the first one does, bit for bit."""
    state_of, go_on = answer
    rank = ranks.rank if ranks else 0
    loop = Loop(seed=1, rank=rank)
    for _ in range(BEFORE):
        loop.train_step()
    taken = state_of(loop)
    if not isinstance(taken, dict):
        raise Wrong(f"state_of returned {plain(taken)}; return a dict")
    file = io.BytesIO()
    torch.save(taken, file)
    random_then = torch.get_rng_state()
    wanted = [loop.train_step() for _ in range(AFTER)]
    state_of(Loop(seed=3, rank=rank))  # what is kept aside, and not in the file, is now another loop's

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
    for name, kind in PARTS.items():
        part = getattr(fresh, name, None)
        if not isinstance(part, kind):
            raise Wrong(
                f"loop.{name} is now of the type {type(part).__name__}, and was a {type(getattr(original, name)).__name__}: "
                "load the state into what is there"
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
