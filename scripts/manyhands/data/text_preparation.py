"""From files of text to a folder that `train.py --data.folder` reads; on any number of ranks, with the same bytes.

    report = prepare_text(["essays/"], "data/mine", Wishes(tokenizer="bpe", vocab_size=4096), ranks)     # all ranks

Every rank cuts all files into documents, which is cheap, and works on its own ones: document i is looked at by rank
i mod n (decoded, judged, sketched), shard s is encoded and written by rank s mod n. Hashes and sketches go to rank 0, which
decides what stays and learns the tokenizer: one place, so that the answer does not depend on n. (A sketch takes 512 bytes: a
million documents need half a gigabyte there.)
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch.distributed as dist

from manyhands.course.folders import write_whole
from manyhands.data import text_tokenizer
from manyhands.data.near_duplicates import ORDERS, content_hash, copies_among, normalised, sketch
from manyhands.data.own_text import FORMAT, MANIFEST, SPLITS, TOKENIZER, identity
from manyhands.data.shakespeare import DataError
from manyhands.data.text_files import find_files, raw_documents, text_of
from manyhands.data.text_quality import REASONS, Quality
from manyhands.data.text_report import REPORT, excerpt, write_report
from manyhands.data.token_file import write_tokens
from manyhands.launching.agreement import Agreement

SHARD_BYTES = 8 * 2**20  # of text: enough shards for many ranks, and few files
SAMPLE_BYTES = 100 * 10**6  # of text that BPE learns from; more changes hardly a merge


@dataclass(frozen=True)
class Wishes:
    """How a text is to be prepared."""

    tokenizer: str = "bpe"  # or "char"
    vocab_size: int = 4096  # of bpe
    validation: float = 0.1  # share of the documents
    blank_lines: int = 2  # that end a document of plain text; 0: a file is one
    text_field: str = "text"  # of JSON lines
    near: float = 0.8  # documents as similar as this are copies; above 1, only equal ones are
    quality: Quality = field(default_factory=Quality)
    shard_bytes: int = SHARD_BYTES
    sample_bytes: int = SAMPLE_BYTES


@dataclass
class _Seen:
    """What a rank noted of its documents, in their order."""

    numbers: list = field(default_factory=list)
    num_bytes: list = field(default_factory=list)
    characters: list = field(default_factory=list)
    verdicts: list = field(default_factory=list)  # one of REASONS, or None
    hashes: list = field(default_factory=list)
    sketches: list = field(default_factory=list)


def prepare_text(names, folder, wishes, ranks, replace=False, tell=print):
    """Write the folder, and return what report.json holds. All ranks call it; `tell` hears of the progress on rank 0.

    Raises DataError on all ranks alike, and leaves no manifest behind: what is half written is no prepared text.
    """
    agreement = Agreement(ranks, None, DataError)
    if ranks.world_size > 1:
        os.environ["TOKENIZERS_PARALLELISM"] = (
            "false"  # ranks share the cores; alone, the library takes them all
        )
    folder = Path(folder).expanduser()
    paths = agreement.on_rank_0(lambda: _begin(names, folder, replace))
    say = tell if ranks.rank == 0 else lambda text: None
    say(f"reading {len(paths)} file{'s' * (len(paths) != 1)}")
    seen = agreement.all(lambda: _look(paths, wishes, ranks))
    gathered = [None] * ranks.world_size if ranks.rank == 0 else None
    dist.gather_object(seen, gathered, dst=0)
    plan, report, content = agreement.on_rank_0(lambda: _decide(gathered, paths, wishes, say))
    own = agreement.all(lambda: _write_shards(paths, folder, wishes, plan, content, ranks))
    shards = [shard for one in agreement.gather(own) for shard in one]
    return agreement.on_rank_0(lambda: _finish(folder, wishes, shards, report, content))


def _begin(names, folder, replace):
    """The files, and an empty folder."""
    paths = find_files(names)
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; name another folder with --to")
    if folder.is_dir() and any(folder.iterdir()):
        if not (replace and (folder / MANIFEST).exists()):
            cure = (
                "--replace writes it anew" if (folder / MANIFEST).exists() else "name another one with --to"
            )
            raise DataError(f"{folder} holds something already; {cure}")
        (folder / MANIFEST).unlink()  # first: from here on it is no prepared text
        for old in folder.iterdir():
            if old.name.startswith(("train-", "validation-")) or old.name in (TOKENIZER, *REPORT):
                old.unlink()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be made ({error.strerror}); name another one with --to") from None
    return paths


def _look(paths, wishes, ranks):
    """Judge this rank's documents."""
    seen = _Seen()
    for raw in raw_documents(paths, wishes.blank_lines, wishes.text_field):
        if raw.number % ranks.world_size != ranks.rank:
            continue
        text = text_of(raw)
        verdict = wishes.quality.why_dropped(text)
        clean = normalised(text) if verdict is None else ""
        seen.numbers.append(raw.number)
        seen.num_bytes.append(len(text.encode()))
        seen.characters.append(len(text))
        seen.verdicts.append(verdict)
        seen.hashes.append(content_hash(clean))
        wanted = verdict is None and wishes.near <= 1
        seen.sketches.append(sketch(clean) if wanted else np.zeros(ORDERS, np.uint32))
    return seen


def _in_order(gathered):
    """One _Seen of all documents, in the order of their numbers."""
    order = np.argsort([n for seen in gathered for n in seen.numbers])
    joined = {}
    for name in asdict(_Seen()):
        values = [value for seen in gathered for value in getattr(seen, name)]
        joined[name] = [values[i] for i in order]
    return _Seen(**joined)


def _decide(gathered, paths, wishes, say):
    """(plan, report, tokenizer's content); plan: {number of a kept document: (split, shard)}."""
    seen = _in_order(gathered)
    good = [n for n in seen.numbers if seen.verdicts[n] is None]
    sketches = np.stack([seen.sketches[n] for n in good]) if good else np.zeros((0, ORDERS), np.uint32)
    copies = copies_among([seen.hashes[n] for n in good], sketches, wishes.near)
    fate = list(seen.verdicts)
    for place, (_, why) in copies.items():
        fate[good[place]] = why
    original = {good[place]: good[earlier] for place, (earlier, _) in copies.items()}
    kept = [n for n in seen.numbers if fate[n] is None]
    reasons = [*REASONS, "exact copy", "near copy"]
    say(f"{len(seen.numbers):,} documents, {len(kept):,} of them kept")
    if not kept:
        first = next(reason for reason in reasons if reason in fate)
        raise DataError(
            f"none of the {len(fate)} documents is left ({fate.count(first)} are {first}); "
            "give more text, or loosen a limit (--help lists them)"
        )
    plan = _shards(seen, kept, wishes)
    examples = {reason: fate.index(reason) for reason in reasons if reason in fate}
    found, content = _learn(
        paths, wishes, seen, kept, set(examples.values()) | set(map(original.get, examples.values()))
    )
    report = {
        "files": [{"name": path.name, "bytes": path.stat().st_size} for path in paths],
        "wishes": asdict(wishes),
        "documents": {"kept": len(kept)} | {reason: fate.count(reason) for reason in reasons},
        "characters": {
            (reason or "kept"): sum(c for c, f in zip(seen.characters, fate, strict=True) if f == reason)
            for reason in (None, *reasons)
        },
        "examples": {
            reason: found[n] | ({"like": found[original[n]]} if n in original else {})
            for reason, n in examples.items()
        },
        "splits": {
            split: {
                "documents": sum(plan[n][0] == split for n in kept),
                "characters": sum(seen.characters[n] for n in kept if plan[n][0] == split),
                "bytes": sum(seen.num_bytes[n] for n in kept if plan[n][0] == split),
            }
            for split in SPLITS
        },
    }
    return plan, report, content


def _shards(seen, kept, wishes):
    """{number: (split, shard)}: a document's own hash says whether it validates, and the text before it the shard."""
    fraction = {n: int.from_bytes(seen.hashes[n][:8], "big") / 2**64 for n in kept}
    least = min(kept, key=fraction.get)
    if len(kept) == 1:
        raise DataError(
            "only one document is left, and validation needs another: give more text, or cut it with --blank-lines 1"
        )
    plan, before = {}, dict.fromkeys(SPLITS, 0)
    most = max(kept, key=fraction.get)
    for n in kept:
        validates = n == least or (fraction[n] < wishes.validation and n != most)  # neither part is empty
        split = SPLITS[validates]
        plan[n] = split, before[split] // wishes.shard_bytes
        before[split] += seen.num_bytes[n]
    # a document larger than a shard leaves gaps: number those that are there
    names = {
        where: i
        for split in SPLITS
        for i, where in enumerate(sorted({w for w in plan.values() if w[0] == split}))
    }
    return {n: (where[0], names[where]) for n, where in plan.items()}


def _learn(paths, wishes, seen, kept, examples):
    """({number: excerpt} of the examples, the tokenizer's content), in one pass over the files."""
    found, wanted = {}, set(kept)
    if wishes.tokenizer == "bpe":  # those with the lowest hashes: a sample that leans to no file
        total = 0
        wanted = set()
        for n in sorted(kept, key=lambda n: seen.hashes[n]):
            if wanted and total + seen.num_bytes[n] > wishes.sample_bytes:
                break
            wanted.add(n)
            total += seen.num_bytes[n]

    def texts():
        for raw in raw_documents(paths, wishes.blank_lines, wishes.text_field):
            if raw.number in examples or raw.number in wanted:
                text = text_of(raw)
                if raw.number in examples:
                    found[raw.number] = excerpt(raw, text)
                if raw.number in wanted:
                    yield text

    if wishes.tokenizer == "char":
        return found, text_tokenizer.characters_of(texts()).content
    return found, text_tokenizer.train_bpe(texts(), wishes.vocab_size).content


def _write_shards(paths, folder, wishes, plan, content, ranks):
    """Encode this rank's shards and write them: [{"split", "shard", "file", "tokens", ...}]."""
    tokenizer = text_tokenizer.tokenizer_from(content)
    every = {split: sorted({s for where, s in plan.values() if where == split}) for split in SPLITS}
    dealt = [(split, shard) for split in SPLITS for shard in every[split]]
    mine = set(dealt[ranks.rank :: ranks.world_size])
    last = {where: n for n, where in plan.items() if where in mine}
    held, written, mark = {where: [] for where in mine}, [], np.array([tokenizer.mark], np.uint32)
    for raw in raw_documents(paths, wishes.blank_lines, wishes.text_field) if mine else ():
        where = plan.get(raw.number)
        if where not in mine:
            continue
        held[where] += [mark, tokenizer.encode(text_of(raw))]
        if raw.number == last[where]:
            split, shard = where
            name = f"{split}-{shard:05d}.bin"
            try:
                tokens = write_tokens(folder / name, np.concatenate(held.pop(where)))
            except OSError as error:
                raise DataError(f"{folder / name} cannot be written ({error.strerror}); make room") from None
            written.append(
                {
                    "split": split,
                    "file": name,
                    "tokens": tokens.count,
                    "dtype": tokens.dtype,
                    "sha256": tokens.sha256,
                }
            )
    return written


def _finish(folder, wishes, shards, report, content):
    """tokenizer.json, report.*, and last manifest.json."""
    import hashlib

    text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    try:
        write_whole(folder / TOKENIZER, text)
        tokenizer = text_tokenizer.tokenizer_from(content)
        described = {
            "kind": tokenizer.kind, "symbols": len(tokenizer.symbols), "mark": tokenizer.mark,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        }  # fmt: skip
        splits = {}
        for split in SPLITS:
            own = sorted((s for s in shards if s["split"] == split), key=lambda s: s["file"])
            splits[split] = report["splits"][split] | {
                "tokens": sum(s["tokens"] for s in own),
                "shards": [{k: v for k, v in s.items() if k != "split"} for s in own],
            }
        manifest = {"format": FORMAT, "tokenizer": described, "splits": splits}
        report |= {
            "tokenizer": described,
            "splits": {s: {k: v for k, v in about.items() if k != "shards"} for s, about in splits.items()},
        }
        write_report(folder, report)
        write_whole(folder / MANIFEST, json.dumps(manifest | {"sha256": identity(manifest)}, indent=1) + "\n")
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written ({error.strerror}); make room, or name another"
        ) from None
    return report
