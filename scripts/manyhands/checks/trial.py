"""Run one answer in a temporary process group, and compare the ranks' calls before they run.

gloo aborts a process that receives into less than was sent, or that sends to a rank that does not exist. A notebook
would lose all its variables. So each rank announces its next call in the store of the trial's group, and a call that
does not match raises an exception with an explanation.

A collective waits for the other ranks' announcements. A send or receive cannot wait: a rank may post its receive long
before it sends what its peer waits for. There each end announces its bytes and then looks up its peer's, so at least
the end that comes second sees both.
"""

import json
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyhands.checks.witness import listed
from manyhands.launch.ranks import name_ranks

_NAMES_OF_ONE_TRIAL = 1000  # limit of groups that one answer may create; a name must not repeat in a store
_LOOK_EVERY_S = 0.002
STUCK_S = 30.0  # all ranks are in the barrier, and it does not end
_ANY_SIZE = 2**62  # bytes: no receive from any source is waiting
_WAYS_TO_WAIT = ("wait", "synchronize", "is_completed", "get_future")
# the dispatcher's names that differ from torch.distributed's
_NAMES = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor", "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor", "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor", "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single", "monitored_barrier_": "barrier",
}  # fmt: skip


class Stuck(Exception):
    """All ranks have come, and the barrier of their main group does not end."""


def meet():
    """Wait for all ranks, in a barrier of the main group: without a limit for one that works, but not for a broken one.

    Each rank notes in the store that it has come. Raise Stuck if all have and the barrier has not ended STUCK_S later.
    """
    store = dist.PrefixStore("meet", c10d._get_default_store())
    keys, began = [str(rank) for rank in range(dist.get_world_size())], None
    work = dist.barrier(async_op=True)
    store.set(str(dist.get_rank()), "here")
    try:
        while not work.is_completed():
            if began is None and store.check(keys):
                began = time.monotonic()
            if began is not None and time.monotonic() - began > STUCK_S:
                raise Stuck(
                    f"all {len(keys)} ranks are in the check, and the barrier of their process group has not ended "
                    f"after {STUCK_S:g} s, as after a message that was lost: restart the ranks"
                )
            time.sleep(_LOOK_EVERY_S)
        work.wait()
    finally:
        store.delete_key(str(dist.get_rank()))


@contextmanager
def trial_group(ranks, timeout_s):
    """Replace the default process group by a fresh one (gloo, short time-out), so that plain dist calls use it.

    Yield it, or None if there are no other ranks.
    """
    if ranks is None or not dist.is_initialized():
        yield None
        return
    meet()  # not in the trial's group: waiting for a rank that draws a figure must not use up its time-out
    registry = _Registry()
    trial = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    c10d._update_default_pg(trial)
    registry.hide_names()
    made = []
    try:
        try:
            yield trial
        finally:
            made = registry.put_back()
        meet()  # no rank closes its connections while another waits for its message
    finally:  # also after an interrupt, when the others cannot be waited for
        for group in {trial, *made}:
            group.abort()


def groups_of(ranks):
    """Create the groups to try an answer in, all ranks and this rank's part: [(group, its ranks, "in which group, ")].

    On four ranks the parts are 0, 2 and 1, 3; on two or three, each rank is a part. All groups are created before one
    is used, so that no rank waits here for one that has found a fault.
    """
    n, world = ranks.world_size, dist.group.WORLD
    parts = [list(range(first, n, 2 if n % 2 == 0 else n)) for first in range(2 if n % 2 == 0 else n)]
    timeout = world._get_backend(torch.device("cpu")).options._timeout
    made = [(dist.new_group(part, timeout, "gloo"), part) for part in parts if n > 1]
    own = [(group, part, f"in the group of {name_ranks(part)}, ") for group, part in made if ranks.rank in part]
    return [(world, list(range(n)), ""), *own]


class _Registry:
    """A record of torch.distributed's process groups, to register them again if an answer destroys them.

    An answer, or a notebook's control line that frees a rank, may destroy all groups, including the session's. torch
    destroys groups that have names, so the names are hidden. It also forgets all groups, so they are registered again.
    """

    def __init__(self):
        world = c10d._world
        self._default, self._count = world.default_pg, world.group_count
        self._kept = {
            name: dict(getattr(world, name))
            for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag")
        }
        self._tags = {tag: list(groups) for tag, groups in world.tags_to_pg.items()}

    def hide_names(self):
        for group in self._kept["pg_names"]:
            del c10d._world.pg_names[group]

    def put_back(self):
        """Restore the recorded groups; return those that were created since."""
        world, before = c10d._world, self._kept["pg_names"]
        made = [group for group in list(world.pg_map) if group not in before]
        c10d._unregister_all_process_groups()
        for name, kept in [*self._kept.items(), ("tags_to_pg", self._tags)]:
            getattr(world, name).clear()
            getattr(world, name).update(kept)
        for group, name in before.items():
            c10d._register_process_group(name, group)
        world.group_count = self._count + _NAMES_OF_ONE_TRIAL
        c10d._update_default_pg(self._default)
        return made


class CallsDiffer(Exception):
    """The ranks' calls do not match: one sentence, the same on all ranks that see it."""


class NobodyCalls(Exception):
    """A rank waits in a collective that another one does not call. `by_answer`: the learner's code does."""

    def __init__(self, sentence, by_answer):
        super().__init__(sentence)
        self.by_answer = by_answer


class Matching(TorchDispatchMode):
    """Compare each communication of this rank with the other ranks'. All ranks of `group` enter and leave the block.

    `by_answer()`: whether the learner's code makes the running call. `given_group()`: the group that it should use,
    None for any. `begins_async()`: whether the call is asynchronous. `fault`: the first sentence, kept even if an
    answer swallowed the exception. `not_waited_for`: the names of unfinished collectives.
    """

    def __init__(self, group, patience_s, by_answer, given_group=lambda: None, begins_async=lambda: False):
        super().__init__()
        _, store = c10d._world.pg_map[group]
        self._store, self._rank = dist.PrefixStore("calls", store), group.rank()
        self._patience_s, self._by_answer, self._given_group = patience_s, by_answer, given_group
        self._begins_async, self._begun = begins_async, {}  # {id of a handle: (the handle, name of its collective)}
        self._made, self.fault = Counter(), None
        # receives without a source: [(channel, this rank, ranks in the group)]
        self._from_anybody, source_of = [], dist.Work._source_rank

        def noted(work):
            self._has_come(source := source_of(work))
            return source

        self._patches = ExitStack()
        self._patched = {"_source_rank": noted}  # dist.recv calls it
        self._new_group = dist.new_group
        self._patched |= {name: self._waiting(getattr(dist.Work, name)) for name in _WAYS_TO_WAIT}

    @property
    def not_waited_for(self):
        return [name for _, name in self._begun.values()]

    def _waiting(self, wait):
        """Wrap one of the ways to wait for a handle, so that it records the end of the wait."""

        def noted(work, *args, **kwargs):
            ended = wait(work, *args, **kwargs)
            if ended is not False:
                self._begun.pop(id(work), None)
            return ended

        return noted

    def __enter__(self):
        for name, noted in self._patched.items():
            self._patches.enter_context(mock.patch.object(dist.Work, name, noted))
        for module in (dist, c10d):
            self._patches.enter_context(mock.patch.object(module, "new_group", self._announced_group))
        return super().__enter__()

    def __exit__(self, *error):
        self._patches.close()
        self._store.set(f"left/{self._rank}", "1")
        return super().__exit__(*error)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operator.namespace not in ("c10d", "_c10d_functional"):
            return operator(*args, **kwargs)
        names = [argument.name for argument in operator._schema.arguments]
        called = operator._schema.name.split("::")[1]
        self._compare(called, dict(zip(names, args, strict=False)) | kwargs)
        found = operator(*args, **kwargs)
        if self._begins_async():
            work = dist.Work.unbox(found if isinstance(found, torch.ScriptObject) else found[-1])
            self._begun[id(work)] = work, _name(called)
        return found

    def _announced_group(self, *args, **kwargs):
        """Announce a new group like a collective: by default all ranks must create it, even those outside it."""
        world = dist.group.WORLD
        if self._by_answer() and not kwargs.get("use_local_synchronization") and world.size() > 1:
            if self.fault is not None:
                raise self.fault
            try:
                self._collective("new_group", {"tensors": []}, world)
            except (CallsDiffer, NobodyCalls) as fault:
                self.fault = fault
                raise
        return self._new_group(*args, **kwargs)

    def _compare(self, operator, given):
        """Raise CallsDiffer or NobodyCalls if the call of `operator` with these arguments must not run."""
        group = _group_of(given)
        if group is None:
            return
        if self.fault is not None:  # after a fault, the ranks are no longer at the same call
            raise self.fault
        try:
            name = _name(operator)
            for tensor in tree_leaves(list(given.values())):
                if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":  # gloo may not support it
                    what = f"rank {self._rank} hands {name} a tensor of {tensor.device}"
                    raise CallsDiffer(f"{what}, and here the ranks communicate over gloo: create it on the CPU")
            self._in_its_group(name, group)
            if {"dst", "src", "tag"} & given.keys():
                self._message(given, group)
            elif group.size() > 1:
                self._collective(name, given, group)
        except (CallsDiffer, NobodyCalls) as fault:
            self.fault = fault
            raise

    def _in_its_group(self, name, group):
        asked = self._given_group()
        if asked is not None and self._by_answer():
            wanted, ranks = map(dist.get_process_group_ranks, (asked, group))
            if ranks != wanted:
                raise CallsDiffer(
                    f"your code calls {name} on {name_ranks(ranks)}, and the group that it was given is "
                    f"{name_ranks(wanted)}: hand on `group=group`"
                )

    def _message(self, given, group):
        ranks, me, sends = dist.get_process_group_ranks(group), group.rank(), "dst" in given
        peer, channel = given.get("dst", given.get("src")), f"{group.group_name}/{given['tag']}"
        n_bytes = _bytes(given.get("tensors", given.get("tensor")))
        if peer is None:  # from any source: it may take any message on its way
            self._from_anybody.append((channel, me, len(ranks)))
            for source in range(len(ranks)):
                self._meet(channel, source, me, ranks, n_bytes, sends)
            return
        what = f"rank {ranks[me]} {'sends to' if sends else 'receives from'}"
        _must_exist(peer, ranks, what)
        if peer == me:
            raise CallsDiffer(f"{what} itself; a message must go to another rank")
        source, target = (me, peer) if sends else (peer, me)
        self._meet(channel, source, target, ranks, n_bytes, sends)
        self._made[f"{channel}/{source} to {target}"] += 1

    def _meet(self, channel, source, target, ranks, n_bytes, sends):
        """Raise CallsDiffer if the other end of a message has announced its bytes and they do not match ours."""
        key = f"{channel}/{source} to {target}"
        number, (ours, theirs) = self._made[key], ("sent", "room") if sends else ("room", "sent")
        self._store.set(f"{key}/{ours} {number}", str(n_bytes))
        if self._store.check([f"{key}/{theirs} {number}"]):
            said = int(self._store.get(f"{key}/{theirs} {number}"))
            sent, room = (n_bytes, said) if sends else (said, n_bytes)
            if sent > room:
                raise CallsDiffer(
                    f"rank {ranks[source]} sends {sent} bytes to rank {ranks[target]}, which receives into {room}"
                )

    def _has_come(self, source):
        """Count a message that a receive without a source took as one from its actual source."""
        if self._from_anybody:
            channel, me, n = self._from_anybody.pop(0)
            self._made[f"{channel}/{source} to {me}"] += 1
            if not self._from_anybody:  # it no longer takes the next message of another rank
                for key in [f"{channel}/{other} to {me}" for other in range(n)]:
                    self._store.set(f"{key}/room {self._made[key]}", str(_ANY_SIZE))

    def _collective(self, name, given, group):
        ranks, me, key = dist.get_process_group_ranks(group), group.rank(), f"{group.group_name}/all"
        number, root = self._made[key], given.get("root_rank")
        self._made[key] += 1
        if root is not None:
            _must_exist(root, ranks, f"rank {ranks[me]} calls {name} with the root")
        by_answer = self._by_answer()
        mine = {"call": name, "root": root, "by answer": by_answer} | _communicated(name, given, group)
        self._store.set(f"{key}/{number}/{me}", json.dumps(mine))
        keys = {r: f"{key}/{number}/{i}" for i, r in enumerate(ranks)}
        if missing := self._wait_for(keys):
            sentence = f"rank {ranks[me]} waits in {name}, which {name_ranks(missing)} did not call"
            done = f"rank {ranks[me]} has finished your code, and {name_ranks(missing)} has not"
            raise NobodyCalls(sentence if by_answer else done, by_answer)
        calls = {r: json.loads(self._store.get(keys[r])) for r in ranks}
        if sentence := _difference(calls):
            raise CallsDiffer(sentence)

    def _wait_for(self, keys):
        """Return the ranks that have not set their key, {rank: key}, within the time-out or before they left."""
        deadline = time.monotonic() + self._patience_s
        while not self._store.check(list(keys.values())):
            patient = time.monotonic() < deadline
            gone = [r for r in keys if self._store.check([f"left/{r}"])]  # first: it announces, then leaves
            missing = [r for r, key in keys.items() if not self._store.check([key])]
            if missing and (not patient or set(missing) & set(gone)):
                return missing
            time.sleep(_LOOK_EVERY_S)
        return []


def _name(operator):
    return _NAMES.get(operator, operator.rstrip("_"))


def _group_of(given):
    """Return the process group among an operator's arguments, given as an object or by name, or None."""
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    group = given.get("group_name")
    return c10d._resolve_process_group(group) if isinstance(group, str) else group


def _must_exist(peer, ranks, what):
    """Raise CallsDiffer if `peer` is not a rank of the group."""
    if not 0 <= peer < len(ranks):
        raise CallsDiffer(f"{what} rank {peer}, and there are {len(ranks)} ranks: 0 to {len(ranks) - 1}")


def _communicated(name, given, group):
    """Return {"bytes", "dtype"}, equal on all ranks; for an all-to-all, {"to": [...], "from": [...]} in bytes."""
    if name.startswith("all_to_all"):
        sources = given.get("input_tensors", given.get("input"))
        if not isinstance(sources, torch.Tensor):
            return {"to": list(map(_bytes, sources)), "from": list(map(_bytes, given["output_tensors"]))}
        targets = given.get("output", sources)
        return {
            "to": _split(sources, given["input_split_sizes"], group.size()),
            "from": _split(targets, given["output_split_sizes"], group.size()),
        }
    side = "output" if "scatter" in name else "input"
    names = (f"{side}_tensors", f"{side}_tensor", f"{side}s", "input_list", "input", "inputs", "tensors", "tensor")
    tensors = tree_leaves(next(given[name] for name in names if name in given))
    dtype = str(tensors[0].dtype).removeprefix("torch.") if "reduce" in name and tensors else None
    return {"bytes": _bytes(tensors), "dtype": dtype}


def _split(tensor, sizes, n):
    """Return the bytes of each of the n parts of an all-to-all; equal parts if no sizes are given."""
    rows = tensor.shape[0] if tensor.dim() else 1
    return [_bytes(tensor) * size // max(rows, 1) for size in (sizes or [rows // n] * n)]


def _bytes(tensors):
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))


def _difference(calls):
    """Return a sentence on what does not match among the calls of one collective, {rank: announcement}, or ""."""
    first, *others = calls
    asked = ("call", "root", "bytes", "dtype")
    alike = all(calls[r].get(part) == calls[first].get(part) for r in others for part in asked)
    if not alike and len({c["by answer"] for c in calls.values()}) > 1:
        still, done = ([r for r in calls if calls[r]["by answer"] is by] for by in (True, False))
        return (
            f"{name_ranks(still)} {'call' if len(still) > 1 else 'calls'} {calls[still[0]]['call']} when "
            f"{name_ranks(done)} {'have' if len(done) > 1 else 'has'} no call left to make: each collective needs all "
            "ranks"
        )
    for r in others:
        if calls[r]["call"] != calls[first]["call"]:
            return f"rank {first} calls {calls[first]['call']} while rank {r} calls {calls[r]['call']}"
    name = calls[first]["call"]
    if len({c["root"] for c in calls.values()}) > 1:
        roots = listed(c["root"] for c in calls.values())
        return f"{name_ranks(list(calls))} call {name} with different roots: {roots}"
    if "bytes" in calls[first]:
        for part, unit in (("bytes", "bytes"), ("dtype", "numbers")):
            values = [c[part] for c in calls.values()]
            if len(set(values)) > 1:
                return f"{name_ranks(list(calls))} call {name} with {listed(values)} {unit}"
        return ""
    for i, source in enumerate(calls):
        for j, target in enumerate(calls):
            sent, room = calls[source]["to"][j], calls[target]["from"][i]
            if sent != room:
                return f"in {name} rank {source} sends {sent} bytes to rank {target}, which receives into {room}"
    return ""


@contextmanager
def waits(calls):
    """Record when this process waits for a message inside the block, directly or inside another call.

    calls: the growing list of watched calls (`wire.watch`). Yield a list with the number of calls made before each
    wait, in order; it is empty if there was no wait.
    """
    after, wait = [], dist.Work.wait

    def noted(work, *args, **kwargs):
        after.append(len(calls))
        return wait(work, *args, **kwargs)

    with mock.patch.object(dist.Work, "wait", noted):
        yield after
