"""A process group for one answer: thrown away with all that the answer left in it, watched while it lasts.

gloo ends a process that receives into less than was sent, or that sends to a rank which does not exist: all variables
of its notebook would be gone. So the ranks tell each other, over the store of the trial's group, what they are about to
call, and a call that does not match is an exception with a sentence instead.

A collective waits for what the other ranks say of theirs. A message cannot: a rank may post its receive long before it
sends what the other one waits for. There each end says its bytes and then looks for the other's, so that the end which
comes second, at least, sees both.
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

_NAMES_OF_ONE_TRIAL = 1000  # groups that one answer may make; no name may come twice in a store
_LOOK_EVERY_S = 0.002
_ANY_SIZE = 2**62  # bytes: no receive from anybody is waiting
_WAYS_TO_WAIT = ("wait", "synchronize", "is_completed", "get_future")
# The dispatcher's names, where they are not those of torch.distributed
_NAMES = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor", "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor", "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor", "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single", "monitored_barrier_": "barrier",
}  # fmt: skip


@contextmanager
def trial_group(ranks, timeout_s):
    """Swap the default process group for a fresh one (gloo, short time-out), so that plain dist calls use it.

    Yields it; None where there is nobody to talk to.
    """
    if ranks is None or not dist.is_initialized():
        yield None
        return
    dist.barrier()  # with the group's own patience: a rank that still draws a figure must not use up the trial's
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
        dist.barrier()  # nobody hangs up while another still waits for its message
    finally:  # also on the way out of an interrupt, when the others cannot be waited for
        for group in {trial, *made}:
            group.abort()


def groups_of(ranks):
    """[(group, its ranks, "in which group, ")] to try an answer in: all ranks, and this rank's part of them.

    On four ranks the parts are 0, 2 and 1, 3; on two or three each rank is one. All are made before one is used, so
    that nobody waits here for a rank that has found a fault.
    """
    n, world = ranks.world_size, dist.group.WORLD
    parts = [list(range(first, n, 2 if n % 2 == 0 else n)) for first in range(2 if n % 2 == 0 else n)]
    timeout = world._get_backend(torch.device("cpu")).options._timeout
    made = [(dist.new_group(part, timeout, "gloo"), part) for part in parts if n > 1]
    own = [(group, part, f"in the group of {name_ranks(part)}, ") for group, part in made if ranks.rank in part]
    return [(world, list(range(n)), ""), *own]


class _Registry:
    """The process groups that torch.distributed knows by now, to be known again after an answer has destroyed them.

    An answer, or the control line of a notebook that frees a rank, may end "all groups", and with them those of the
    session: torch ends those that have names, so these are hidden, and forgets all, so they are registered again.
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
        """Only the groups of before are known; returns those that were made since."""
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
    """What the ranks call does not match: one sentence, the same on all ranks that see it."""


class NobodyCalls(Exception):
    """A rank waits in a collective that another one does not call. `by_answer`: the learner's code does."""

    def __init__(self, sentence, by_answer):
        super().__init__(sentence)
        self.by_answer = by_answer


class Matching(TorchDispatchMode):
    """Inside it each communication of this rank is compared with the others'. All ranks of `group` enter and leave it.

    `by_answer()` says whether the learner's code makes the call that runs now, `given_group()` in which group it was
    asked to, None if in any, `begins_async()` whether it does not wait for it; `fault` is the first sentence, also
    where an answer has swallowed the exception; `not_waited_for` names the collectives on their way.
    """

    def __init__(self, group, patience_s, by_answer, given_group=lambda: None, begins_async=lambda: False):
        super().__init__()
        _, store = c10d._world.pg_map[group]
        self._store, self._rank = dist.PrefixStore("calls", store), group.rank()
        self._patience_s, self._by_answer, self._given_group = patience_s, by_answer, given_group
        self._begins_async, self._begun = begins_async, {}  # {id of a handle: (the handle, name of its collective)}
        self._made, self.fault = Counter(), None
        # of receives without a source: [(channel, this rank, ranks in the group)]
        self._from_anybody, source_of = [], dist.Work._source_rank

        def noted(work):
            self._has_come(source := source_of(work))
            return source

        self._patches = ExitStack()
        self._patched = {"_source_rank": noted}  # which dist.recv asks for
        self._new_group = dist.new_group
        self._patched |= {name: self._waiting(getattr(dist.Work, name)) for name in _WAYS_TO_WAIT}

    @property
    def not_waited_for(self):
        return [name for _, name in self._begun.values()]

    def _waiting(self, wait):
        """One of the ways to wait for a handle, which notes that it came to an end."""

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
        """A new group, as a collective: all ranks make it, also those that are not in it, unless it says otherwise."""
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
        """Raises CallsDiffer or NobodyCalls where the call of `operator` with these arguments must not run."""
        group = _group_of(given)
        if group is None:
            return
        if self.fault is not None:  # the ranks are no longer at the same call
            raise self.fault
        try:
            name = _name(operator)
            for tensor in tree_leaves(list(given.values())):
                if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":  # which gloo may not take
                    what = f"rank {self._rank} hands {name} a tensor of {tensor.device}"
                    raise CallsDiffer(f"{what}, and here the ranks talk over gloo: make it on the CPU")
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
        if peer is None:  # from anybody: it may take whichever message is on its way
            self._from_anybody.append((channel, me, len(ranks)))
            for source in range(len(ranks)):
                self._meet(channel, source, me, ranks, n_bytes, sends)
            return
        what = f"rank {ranks[me]} {'sends to' if sends else 'receives from'}"
        _must_exist(peer, ranks, what)
        if peer == me:
            raise CallsDiffer(f"{what} itself; a message goes to another rank")
        source, target = (me, peer) if sends else (peer, me)
        self._meet(channel, source, target, ranks, n_bytes, sends)
        self._made[f"{channel}/{source} to {target}"] += 1

    def _meet(self, channel, source, target, ranks, n_bytes, sends):
        """Raises CallsDiffer where the other end of a message has said its bytes, and they do not fit with ours."""
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
        """A message has come to a receive without a source: it counts as one from there, and the next needs its own."""
        if self._from_anybody:
            channel, me, n = self._from_anybody.pop(0)
            self._made[f"{channel}/{source} to {me}"] += 1
            if not self._from_anybody:  # none of the others' next messages is for it
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
            done = f"rank {ranks[me]} has come to the end of your code, and {name_ranks(missing)} did not"
            raise NobodyCalls(sentence if by_answer else done, by_answer)
        calls = {r: json.loads(self._store.get(keys[r])) for r in ranks}
        if sentence := _difference(calls):
            raise CallsDiffer(sentence)

    def _wait_for(self, keys):
        """The ranks that have not set their key, {rank: key}, within our patience or before they left."""
        deadline = time.monotonic() + self._patience_s
        while not self._store.check(list(keys.values())):
            patient = time.monotonic() < deadline
            gone = [r for r in keys if self._store.check([f"left/{r}"])]  # first this: who leaves has called before
            missing = [r for r, key in keys.items() if not self._store.check([key])]
            if missing and (not patient or set(missing) & set(gone)):
                return missing
            time.sleep(_LOOK_EVERY_S)
        return []


def _name(operator):
    return _NAMES.get(operator, operator.rstrip("_"))


def _group_of(given):
    """The process group among an operator's arguments: itself, or by its name; None without one."""
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    group = given.get("group_name")
    return c10d._resolve_process_group(group) if isinstance(group, str) else group


def _must_exist(peer, ranks, what):
    """Raises CallsDiffer where `peer` is no place in a group of these ranks."""
    if not 0 <= peer < len(ranks):
        raise CallsDiffer(f"{what} rank {peer}, and there are {len(ranks)} ranks: 0 to {len(ranks) - 1}")


def _communicated(name, given, group):
    """{"bytes", "dtype"}, which all ranks must have alike; of an all-to-all {"to": [...], "from": [...]} in bytes."""
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
    """Bytes of each of the n parts of an all-to-all; equal ones where no sizes are given."""
    rows = tensor.shape[0] if tensor.dim() else 1
    return [_bytes(tensor) * size // max(rows, 1) for size in (sizes or [rows // n] * n)]


def _bytes(tensors):
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))


def _difference(calls):
    """What does not match among the calls of one collective, {rank: what it said}: a sentence, or ""."""
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
    """Notes when this process waits for a message while the block runs, itself or in a call that does so.

    calls: the calls that were watched so far, a list that grows (`wire.watch`). Yields a list of how many of them had
    been made at each wait, in order; empty if there was none.
    """
    after, wait = [], dist.Work.wait

    def noted(work, *args, **kwargs):
        after.append(len(calls))
        return wait(work, *args, **kwargs)

    with mock.patch.object(dist.Work, "wait", noted):
        yield after
