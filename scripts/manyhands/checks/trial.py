"""A process group for one answer, thrown away with all that the answer left in it."""

from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_NAMES_OF_ONE_TRIAL = 1000  # groups that one answer may make; no name may come twice in a store


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
