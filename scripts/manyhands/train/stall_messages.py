"""What the ranks tell each other about where they are, over the process group's store. `stalls` says when and why."""

import json
import time
from itertools import count

import torch.distributed as dist

from manyhands.train.stall_rules import Heard, judged

_watches = count()  # a store outlives a watch: each has a corner of its own in it


class Talk:
    """One rank's end of the conversation. Used by one thread at a time; a call may wait for ever if the store is gone."""

    def __init__(self, ranks, stall_s, beat_s):
        self.ranks, self.stall_s, self.beat_s = ranks, stall_s, beat_s
        shared = dist.distributed_c10d._get_default_store()
        if hasattr(shared, "clone"):  # else the main thread's calls and ours take turns on one connection
            shared = shared.clone()
        self._store = dist.PrefixStore(f"stalls{next(_watches)}", shared)
        self._beats = 0
        self.first_rank = None  # what rank 0 last said
        self.forget()

    def forget(self):
        """Begin to listen: from now on silence counts."""
        self._seen, self._since = (
            {},
            time.monotonic(),
        )  # {rank: (number of its last beat, when that was heard)}

    def tell(self, here):
        """Tell the others what this rank says about itself (a Heard)."""
        self._beats += 1
        here.beats = self._beats
        self._store.set(f"rank{here.rank}", json.dumps(vars(here)))

    def verdict(self):
        """None while all is well, else {"silent": [Heard]}, and for the one rank that says it also {"sentence": ...}.

        Rank 0 judges. If it is silent itself, or has left, the next ranks do, each a little later than the one before.
        """
        if self._store.check(["verdict"]):
            return _read(self._store.get("verdict"))
        if self.ranks.rank:
            (self.first_rank,) = self._listen([0])
            if self.first_rank.silent_s < self.stall_s + 2 * self.beat_s * self.ranks.rank:
                return None
        sentence, silent = judged(self._listen(range(self.ranks.world_size)), self.stall_s)
        if sentence is None:
            return None
        own = json.dumps([vars(one) for one in silent] + [self.ranks.rank])
        first = self._store.compare_set("verdict", "", own).decode()  # of two that judge at once one is heard
        return _read(first) | ({"sentence": sentence} if first == own else {})

    def _listen(self, ranks):
        """[Heard] of these ranks, with the seconds since each said something new."""
        keys = [f"rank{rank}" for rank in ranks]
        if self._store.check(keys):
            answers = self._store.multi_get(keys)
        else:
            answers = [self._store.get(key) if self._store.check([key]) else None for key in keys]
        heard, now = [], time.monotonic()
        for rank, answer in zip(ranks, answers, strict=True):
            said = Heard(**json.loads(answer)) if answer else Heard(rank, patience_s=self.stall_s)
            if self._seen.get(rank, (0, 0))[0] != said.beats:
                self._seen[rank] = (said.beats, now)
            said.silent_s = now - self._seen.get(rank, (0, self._since))[1]
            heard.append(said)
        return heard

    def wait_for_the_others(self, num_silent):
        """Return when all ranks but the silent ones have got here."""
        self._store.add("printed", 1)
        while self._store.add("printed", 0) < self.ranks.world_size - num_silent:
            time.sleep(0.05)
        time.sleep(0.2)  # others still ask this


def _read(verdict):
    return {"silent": [Heard(**one) for one in json.loads(verdict)[:-1]]}
