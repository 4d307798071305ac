"""From files of text to a folder that `train.py --data.folder` reads; on any number of ranks, with the same bytes.

    report = prepare_text(["essays/"], "data/mine", PrepareConfig(tokenizer="bpe", vocab_size=4096), ranks)  # all ranks

Every rank cuts all files into documents, which is cheap, and works on its own ones: document i is looked at by rank
i mod n (decoded, judged, hashed), shard s is encoded and written by rank s mod n. Hashes and MinHash signatures go to rank 0, which
decides what stays and learns the tokenizer: one place, so that the answer does not depend on n. (A signature takes 512 bytes: a
million documents need half a gigabyte there.)
"""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch.distributed as dist

from manyhands.course.folders import write_whole
from manyhands.data import text_tokenizer
from manyhands.data.near_duplicates import ORDERS, content_hash, minhash, normalised
from manyhands.data.own_text import FORMAT, MANIFEST, SPLITS, TOKENIZER, identity
from manyhands.data.shakespeare import DataError
from manyhands.data.text_choice import Seen, choose, counted, dealt, in_order
from manyhands.data.text_files import find_files, raw_documents, text_of
from manyhands.data.text_quality import Quality
from manyhands.data.text_report import REPORT, excerpt, write_report
from manyhands.data.token_file import write_tokens
from manyhands.launch.agreement import Agreement

SHARD_BYTES = 8 * 2**20  # of text: enough shards for many ranks, and few files
SHARD = r"(train|validation)-\d{5,}\.bin(\.json)?"
SAMPLE_BYTES = 100 * 10**6  # of text that BPE learns from; more changes hardly a merge


@dataclass(frozen=True)
class PrepareConfig:
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


def prepare_text(names, folder, config, ranks, replace=False, tell=print):
    """Write the folder, and return what report.json holds. All ranks call it; `tell` hears of the progress on rank 0.

    Raises DataError on all ranks alike, and leaves no manifest behind: what is half written is no prepared text.
    """
    agreement = Agreement(ranks, None, DataError)
    if ranks.world_size > 1:  # ranks share the cores; alone, the library learns on all of them
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    folder = Path(folder).expanduser()
    paths = agreement.on_rank_0(lambda: _begin(names, folder, replace))
    say = tell if ranks.rank == 0 else lambda text: None
    say(f"reading {len(paths)} file{'s' * (len(paths) != 1)}")
    seen = agreement.all(lambda: _look(paths, config, ranks))
    gathered = [None] * ranks.world_size if ranks.rank == 0 else None
    dist.gather_object(seen, gathered, dst=0)
    plan, report, content = agreement.on_rank_0(lambda: _decide(gathered, paths, config, say))
    own = agreement.all(lambda: _write_shards(paths, folder, config, plan, content, ranks))
    shards = [shard for one in agreement.gather(own) for shard in one]
    return agreement.on_rank_0(lambda: _finish(folder, config, shards, report, content))


def _begin(names, folder, replace):
    """The files, and an empty folder."""
    paths = find_files(names)
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; name another folder with --to")
    there = list(folder.iterdir()) if folder.is_dir() else []
    ours = [path for path in there if _is_ours(path.name)]
    if there and not (replace and ours):
        cure = "--replace writes it anew" if ours else "name another one with --to"
        raise DataError(f"{folder} holds something already; {cure}")
    # the manifest first: from there on it is no prepared text
    for path in sorted(ours, key=lambda path: path.name != MANIFEST):
        path.unlink()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be made ({error.strerror}); name another one with --to") from None
    return paths


def _is_ours(name):
    return name in (MANIFEST, TOKENIZER, *REPORT) or bool(re.fullmatch(SHARD, name))


def _look(paths, config, ranks):
    """Judge this rank's documents."""
    seen = Seen()
    for raw in raw_documents(paths, config.blank_lines, config.text_field):
        if raw.number % ranks.world_size != ranks.rank:
            continue
        text = text_of(raw)
        verdict = config.quality.why_dropped(text)
        clean = normalised(text) if verdict is None else ""
        seen.numbers.append(raw.number)
        seen.num_bytes.append(len(text.encode()))
        seen.characters.append(len(text))
        seen.verdicts.append(verdict)
        seen.hashes.append(content_hash(clean))
        wanted = verdict is None and config.near <= 1
        seen.signatures.append(minhash(clean) if wanted else np.zeros(ORDERS, np.uint32))
    return seen


def _decide(gathered, paths, config, say):
    """(plan, report, the tokenizer's content), on rank 0; see `text_choice`."""
    seen = in_order(gathered)
    choice = choose(seen, config.near)
    say(f"{len(choice.fate):,} documents, {len(choice.kept):,} of them kept")
    plan = dealt(seen, choice.kept, config.validation, config.shard_bytes)
    examples, original = choice.examples, choice.original
    shown = {*examples.values(), *(original[n] for n in examples.values() if n in original)}
    found, content = _learn(paths, config, seen, choice.kept, shown)
    report = {
        "files": [{"name": path.name, "bytes": path.stat().st_size} for path in paths],
        "wishes": asdict(config),
        "examples": {
            why: found[n] | ({"like": found[original[n]]} if n in original else {}) for why, n in examples.items()
        },
    }
    return plan, counted(seen, choice, plan) | report, content


def _learn(paths, config, seen, kept, examples):
    """({number: excerpt} of the examples, the tokenizer's content), in one pass over the files."""
    found, wanted = {}, set(kept)
    if config.tokenizer == "bpe":  # those with the lowest hashes: a sample that leans to no file
        total = 0
        wanted = set()
        for n in sorted(kept, key=lambda n: seen.hashes[n]):
            if wanted and total + seen.num_bytes[n] > config.sample_bytes:
                break
            wanted.add(n)
            total += seen.num_bytes[n]

    def texts():
        for raw in raw_documents(paths, config.blank_lines, config.text_field):
            if raw.number in examples or raw.number in wanted:
                text = text_of(raw)
                if raw.number in examples:
                    found[raw.number] = excerpt(raw, text)
                if raw.number in wanted:
                    yield text

    if config.tokenizer == "char":
        return found, text_tokenizer.characters_of(texts()).content
    return found, text_tokenizer.train_bpe(texts(), config.vocab_size).content


def _write_shards(paths, folder, config, plan, content, ranks):
    """Encode this rank's shards and write them: [{"split", "file", "tokens", "dtype", "sha256"}]."""
    tokenizer = text_tokenizer.tokenizer_from(content)
    mine = set(sorted(set(plan.values()))[ranks.rank :: ranks.world_size])
    last = {where: n for n, where in plan.items() if where in mine}
    held, written, separator = {where: [] for where in mine}, [], np.array([tokenizer.separator], np.uint32)
    for raw in raw_documents(paths, config.blank_lines, config.text_field) if mine else ():
        where = plan.get(raw.number)
        if where not in mine:
            continue
        held[where] += [separator, tokenizer.encode(text_of(raw))]
        if raw.number == last[where]:
            split, shard = where
            name = f"{split}-{shard:05d}.bin"
            try:
                tokens = write_tokens(folder / name, np.concatenate(held.pop(where)))
            except OSError as error:
                raise DataError(f"{folder / name} cannot be written ({error.strerror}); make room") from None
            about = {"tokens": tokens.count, "dtype": tokens.dtype, "sha256": tokens.sha256}
            written.append({"split": split, "file": name} | about)
    return written


def _finish(folder, config, shards, report, content):
    """tokenizer.json, report.*, and last manifest.json."""
    text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    try:
        write_whole(folder / TOKENIZER, text)
        tokenizer = text_tokenizer.tokenizer_from(content)
        described = {
            "kind": tokenizer.kind, "symbols": len(tokenizer.vocab), "mark": tokenizer.separator,
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
        for split, about in splits.items():
            report["splits"][split] |= {"tokens": about["tokens"]}
        report |= {"tokenizer": described}
        write_report(folder, report)
        write_whole(folder / MANIFEST, json.dumps(manifest | {"sha256": identity(manifest)}, indent=1) + "\n")
    except OSError as error:
        raise DataError(f"{folder} cannot be written ({error.strerror}); make room, or name another") from None
    return report
