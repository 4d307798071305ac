"""Which documents stay, which part of the text each belongs to, and what a report says of it. One rank decides, for all.

seen = in_order(gathered)                                # what the ranks noted of their documents
choice = choose(seen, near=0.8)                          # drops copies, and what the rules refuse
plan = dealt(seen, choice.kept, 0.1, shard_bytes)        # {document: (split, shard)}
report = counted(seen, choice, plan)
"""

from dataclasses import dataclass, field, fields

import numpy as np

from manyhands.data.near_duplicates import ORDERS, copies_among
from manyhands.data.own_text import SPLITS
from manyhands.data.shakespeare import DataError
from manyhands.data.text_quality import REASONS

ALL_REASONS = (*REASONS, "exact copy", "near copy")


@dataclass
class Seen:
    """What was noted of documents: one entry for each in every list."""

    numbers: list = field(default_factory=list)  # of all documents of all files, from 0
    num_bytes: list = field(default_factory=list)
    characters: list = field(default_factory=list)
    verdicts: list = field(default_factory=list)  # one of REASONS, or None
    hashes: list = field(default_factory=list)  # see `near_duplicates`
    signatures: list = field(default_factory=list)


@dataclass(frozen=True)
class Choice:
    """What becomes of each document."""

    fate: list  # one of ALL_REASONS, or None: it stays
    original: dict  # {copy: the earlier document that it is like}

    @property
    def kept(self):
        """The numbers of those that stay, in order."""
        return [number for number, why in enumerate(self.fate) if why is None]

    @property
    def examples(self):
        """{reason: the first document that was dropped for it}."""
        return {why: self.fate.index(why) for why in ALL_REASONS if why in self.fate}


def in_order(gathered):
    """One Seen of all documents, in the order of their numbers, from those of the ranks."""
    order = np.argsort([number for seen in gathered for number in seen.numbers])
    joined = {}
    for name in (one.name for one in fields(Seen)):
        values = [value for seen in gathered for value in getattr(seen, name)]
        joined[name] = [values[i] for i in order]
    return Seen(**joined)


def choose(seen, near):
    """The Choice among all documents; `near`: see `copies_among`. Raises DataError if none stays."""
    good = [number for number in seen.numbers if seen.verdicts[number] is None]
    signatures = np.stack([seen.signatures[n] for n in good]) if good else np.zeros((0, ORDERS), np.uint32)
    copies = copies_among([seen.hashes[n] for n in good], signatures, near)
    fate = list(seen.verdicts)
    for place, (_, why) in copies.items():
        fate[good[place]] = why
    choice = Choice(fate, {good[place]: good[earlier] for place, (earlier, _) in copies.items()})
    if not good:
        first = next(iter(choice.examples))
        raise DataError(
            f"none of the {len(fate)} documents is left ({fate.count(first)} are {first}); "
            "give more text, or loosen a limit (--help lists them)"
        )
    return choice


def dealt(seen, kept, validation, shard_bytes):
    """{number: (split, shard)}: a document's own hash says whether it validates, and the text before it the shard.

    Neither split is empty. Raises DataError for a single document.
    """
    if len(kept) == 1:
        raise DataError(
            "only one document is left, and validation needs another: give more text, or cut it with --blank-lines 1"
        )
    fraction = {n: int.from_bytes(seen.hashes[n][:8], "big") / 2**64 for n in kept}
    least, most = min(kept, key=fraction.get), max(kept, key=fraction.get)
    plan, before = {}, dict.fromkeys(SPLITS, 0)
    for n in kept:
        split = SPLITS[n == least or (fraction[n] < validation and n != most)]
        plan[n] = split, before[split] // shard_bytes
        before[split] += seen.num_bytes[n]
    # a document larger than a shard leaves gaps: number those that are there
    numbers = {}
    for split in SPLITS:
        there = sorted({where for where in plan.values() if where[0] == split})
        numbers |= {where: i for i, where in enumerate(there)}
    return {n: (where[0], numbers[where]) for n, where in plan.items()}


def counted(seen, choice, plan):
    """Documents and characters by what became of them, and the splits: the beginning of a report."""
    names = {None: "kept"} | {why: why for why in ALL_REASONS}
    documents, characters = dict.fromkeys(names.values(), 0), dict.fromkeys(names.values(), 0)
    splits = {split: {"documents": 0, "characters": 0, "bytes": 0} for split in SPLITS}
    for number, why in enumerate(choice.fate):
        documents[names[why]] += 1
        characters[names[why]] += seen.characters[number]
        if why is None:
            own = splits[plan[number][0]]
            own["documents"] += 1
            own["characters"] += seen.characters[number]
            own["bytes"] += seen.num_bytes[number]
    return {"documents": documents, "characters": characters, "splits": splits}
