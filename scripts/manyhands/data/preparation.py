"""From files of text to a folder that `train.py --data.folder` reads; on any number of ranks, with the same bytes.

    report = prepare_text(["essays/"], "data/mine", PrepareConfig(tokenizer="bpe", vocab_size=4096), ranks)  # all ranks
    print(shown_report(report))

Every rank cuts all files into documents, which is cheap, and works on its own ones: document i is looked at by rank
i mod n (decoded, judged, hashed), shard s is encoded and written by rank s mod n. What was noted goes to rank 0, which
decides what stays and learns the tokenizer: one place, so that the answer does not depend on n. (A MinHash signature
takes 512 bytes: a million documents need half a gigabyte there.)
"""

import contextlib
import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from pydantic import Field

from manyhands.course.folders import WRITER, lock, write_whole
from manyhands.data import documents
from manyhands.data.corpus import MANIFEST, SPLITS, TOKENIZER, Manifest, TokenizerFile
from manyhands.data.documents import REASONS, Quality, copies_among
from manyhands.data.schema import visible
from manyhands.data.shakespeare import DataError
from manyhands.data.token_files import write_tokens
from manyhands.data.tokenizer import characters_of, tokenizer_from, tokenizer_of_folder, train_bpe
from manyhands.launch.program import explained
from manyhands.launch.ranks import Agreement
from manyhands.launch.run_folder import save_figure

# what we write into the folder, also where writing it was interrupted: see `write_whole`
OURS = r"\.?((manifest|tokenizer|report)\.json|report\.png|(train|validation)-\d{5,}\.bin(\.json)?)(\.\d+\.[0-9a-f]+)?"
EXCERPT = 60  # characters
FATES = ("kept", *REASONS, "exact copy", "near copy")


@dataclass(frozen=True)
class PrepareConfig:
    """The options for preparing a text."""

    tokenizer: str = "bpe"  # or char, or the folder of a model
    vocab_size: Annotated[int, Field(ge=257, le=10**6)] = 4096  # of bpe: the separator, 256 bytes, and merges
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.1  # share of the documents
    held_out: tuple[str, ...] = ()  # names of files that validate, instead of such a share
    blank_lines: Annotated[int, Field(ge=0, le=1000)] = 2  # that end a document of plain text; 0: a file is one
    text_field: str = "text"  # of JSON lines
    near: Annotated[float, Field(ge=0.5, allow_inf_nan=False)] = 0.8  # copies' similarity; 2: only equal ones
    quality: Quality = field(default_factory=Quality)
    shard_bytes: int = 8 * 2**20  # of text: enough shards for many ranks, and few files
    sample_bytes: int = 100 * 10**6  # BPE training sample; a larger one barely changes the merges

    def cut(self, paths):
        """Return the documents of `paths` in order: see `raw_documents`."""
        return documents.raw_documents(paths, self.blank_lines, self.text_field)


class Seen(NamedTuple):
    """A document's record."""

    number: int  # among all documents of all files, from 0
    num_bytes: int
    characters: int
    verdict: str | None  # one of REASONS
    hash: bytes
    signature: np.ndarray


def prepare_text(names, folder, config, ranks, replace=False, tell=print):
    """Write the folder, and return what report.json holds. All ranks call it; `tell` gets the progress on rank 0.

    Raise DataError on all ranks alike, and leaves no manifest behind: what is half written is not a prepared text.
    """
    agreement, held = Agreement(ranks, None, DataError), contextlib.ExitStack()
    if ranks.world_size > 1:  # ranks share the cores; alone, the library learns on all of them
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    folder = Path(os.path.expanduser(folder))
    with held:  # the lock, on rank 0
        paths = agreement.on_rank_0(lambda: _begin(names, folder, replace, held, ranks.host))
        say = tell if ranks.rank == 0 else lambda text: None
        say(f"reading {len(paths)} file{'s' * (len(paths) != 1)}")
        seen = agreement.all(lambda: _look(paths, config, ranks))
        gathered = [None] * ranks.world_size if ranks.rank == 0 else None
        dist.gather_object(seen, gathered, dst=0)
        plan, report, content = agreement.on_rank_0(lambda: _decide(gathered, paths, config, say))
        own = agreement.all(lambda: _written(folder, _write_shards, paths, config, plan, content, ranks))
        shards = [shard for one in agreement.gather(own) for shard in one]
        return agreement.on_rank_0(lambda: _written(folder, _finish, shards, report, content))


def _begin(names, folder, replace, held, host):
    """The files, and a folder without any text of ours, which nobody else writes while `held` lasts."""
    paths = documents.find_files(names)
    _written(folder, _ours, replace)  # before a file of ours is put into somebody else's folder
    held.enter_context(_written(folder, lock, f"process {os.getpid()} on {host}"))
    # the manifest first: from there on it is not a prepared text
    for path in sorted(_ours(folder, replace), key=lambda path: path.name != MANIFEST):
        path.unlink()
    return paths


def _ours(folder, replace):
    """The files of a text that may go. Raise DataError where that was not asked for: a text is whole, or foreign."""
    there = [path for path in folder.iterdir() if path.name != WRITER] if folder.is_dir() else []
    ours = [path for path in there if re.fullmatch(OURS, path.name)]
    killed = (folder / WRITER).exists() and not (folder / MANIFEST).exists()
    if there and not (ours and (replace or killed)):
        cure = "--replace writes it anew" if ours else "name another one with --to"
        raise DataError(f"{folder} holds something already; {cure}")
    return ours


def _written(folder, action, *about):
    """`action(folder, *about)`. Raise DataError for what the disk says, or for another who writes there."""
    with explained(DataError, "mend that, or name another folder with --to", folder, "written"):
        return action(folder, *about)


def _look(paths, config, ranks):
    """Judge this rank's documents: [Seen]."""
    seen = []
    for raw in config.cut(paths):
        if raw.number % ranks.world_size != ranks.rank:
            continue
        text = documents.text_of(raw)
        verdict = config.quality.why_dropped(text)
        clean = documents.normalised(text) if verdict is None else ""
        compared = verdict is None and config.near <= 1
        signature = documents.minhash(clean) if compared else np.zeros(documents.ORDERS, np.uint32)
        seen.append(Seen(raw.number, len(text.encode()), len(text), verdict, documents.content_hash(clean), signature))
    return seen


def _decide(gathered, paths, config, say):
    """({document: (split, shard)}, report, the tokenizer's content)."""
    seen = sorted((one for part in gathered for one in part), key=lambda one: one.number)
    fates, original = _fates(seen, config.near)
    kept = [one for one in seen if fates[one.number] == "kept"]
    say(f"{len(seen):,} document{'s' * (len(seen) != 1)}, {len(kept):,} of them kept")
    held_out = (
        {raw.number for raw in config.cut(paths) if raw.path.name in config.held_out} if config.held_out else None
    )
    plan = _dealt(kept, config.validation, held_out, config.shard_bytes)
    first = {why: fates.index(why) for why in FATES[1:] if why in fates}
    shown = {*first.values(), *(original[n] for n in first.values() if n in original)}
    found, content = _learn(paths, config, kept, shown)
    of_fate = {why: [one for one, fate in zip(seen, fates, strict=True) if fate == why] for why in FATES}
    splits = {}
    for split in SPLITS:
        own = [one for one in kept if plan[one.number][0] == split]
        totals = (len(own), sum(one.characters for one in own), sum(one.num_bytes for one in own))
        splits[split] = dict(zip(("documents", "characters", "bytes"), totals, strict=True))
    examples = {why: found[n] | ({"like": found[original[n]]} if n in original else {}) for why, n in first.items()}
    report = {
        "documents": {why: len(own) for why, own in of_fate.items()},
        "characters": {why: sum(one.characters for one in own) for why, own in of_fate.items()},
        "splits": splits,
        "files": [{"name": path.name, "bytes": path.stat().st_size} for path in paths],
        "wishes": asdict(config),
        "examples": examples,
    }
    return plan, report, content


def _fates(seen, near):
    """([one of FATES], {copy: the earlier document that it is like}). Raise DataError if nothing stays."""
    good = [one for one in seen if one.verdict is None]
    fates, original = [one.verdict or "kept" for one in seen], {}
    if not good:
        why = next(why for why in REASONS if why in fates)
        why = f"none of {len(seen):,} document{'s' * (len(seen) != 1)} is left ({fates.count(why)} are {why})"
        raise DataError(f"{why}; give more text, or loosen a limit (--help lists them)")
    copies = copies_among([one.hash for one in good], np.stack([one.signature for one in good]), near)
    for place, (earlier, why) in copies.items():
        number = good[place].number
        fates[number], original[number] = why, good[earlier].number
    return fates, original


def _dealt(kept, validation, held_out, shard_bytes):
    """{number: (split, shard)}: a document's own hash says whether it validates, and the text before it the shard.

    `held_out`: the numbers of those that validate instead; None: the hashes decide. Neither split is empty. Raises
    DataError for a single document.
    """
    if len(kept) == 1:
        why = "only one document is left, and validation needs another: give more text, or cut it with --blank-lines 1"
        raise DataError(why)
    fraction = {one.number: int.from_bytes(one.hash[:8], "big") / 2**64 for one in kept}
    if held_out is not None:
        fraction = {number: 0.0 if number in held_out else 1.0 for number in fraction}
    least, most = min(fraction, key=fraction.get), max(fraction, key=fraction.get)
    plan, before = {}, dict.fromkeys(SPLITS, 0)
    for n, num_bytes, *_ in kept:
        split = SPLITS[n == least or (fraction[n] < validation and n != most)]
        plan[n] = split, before[split] // shard_bytes
        before[split] += num_bytes
    # a document larger than a shard leaves gaps: number those that are there
    there = {split: sorted({shard for name, shard in plan.values() if name == split}) for split in SPLITS}
    place = {(split, shard): i for split, shards in there.items() for i, shard in enumerate(shards)}
    return {n: (where[0], place[where]) for n, where in plan.items()}


def _learn(paths, config, kept, shown):
    """({number: where it is and how it begins} of `shown`, the tokenizer's content), in one pass over the files."""
    found, wanted, total = {}, set(), 0
    for one in sorted(kept, key=lambda one: one.hash):  # those with the lowest hashes: a sample that leans to no file
        total += one.num_bytes
        if config.tokenizer == "bpe" and wanted and total > config.sample_bytes:
            break
        wanted.add(one.number)

    def texts():
        for raw in config.cut(paths):
            if raw.number in shown:
                begins = " ".join(documents.text_of(raw)[: 4 * EXCERPT].split())[:EXCERPT]
                found[raw.number] = {"file": raw.path.name, "line": raw.line, "begins": begins}
            if raw.number in wanted:
                yield documents.text_of(raw)

    if config.tokenizer == "char":
        return found, characters_of(texts()).content
    if config.tokenizer == "bpe":
        return found, train_bpe(texts(), config.vocab_size).content
    for _ in texts():  # for what is shown of them
        pass
    tokenizer = tokenizer_of_folder(config.tokenizer)
    if tokenizer.separator is None:
        raise DataError(f"the tokenizer of {config.tokenizer} has neither BOS nor EOS to begin a document; add one")
    return found, tokenizer.content


def _write_shards(folder, paths, config, plan, content, ranks):
    """Encode this rank's shards and write them: [((split, number), what their Tokens hold)]."""
    tokenizer = tokenizer_from(content)
    mine = set(sorted(set(plan.values()))[ranks.rank :: ranks.world_size])
    last = {where: n for n, where in plan.items() if where in mine}
    held, written, separator = {where: [] for where in mine}, [], torch.tensor([tokenizer.separator])
    for raw in config.cut(paths) if mine else ():
        if (where := plan.get(raw.number)) not in mine:
            continue
        held[where] += [separator, tokenizer.encode(documents.text_of(raw))]
        if raw.number == last[where]:
            split, shard = where
            tokens = write_tokens(folder / f"{split}-{shard:05d}.bin", torch.cat(held.pop(where)))
            written.append((where, tokens.model_dump()))
    return written


def _finish(folder, shards, report, content):
    """Write tokenizer.json, report.json, and last what makes them a prepared text, manifest.json. Returns the report.

    Its picture, report.png, comes after that: a text is not lost for a picture that cannot be drawn.
    """
    text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    tokenizer = tokenizer_from(content)
    about = {"symbols": len(tokenizer.vocab), "mark": tokenizer.separator}
    described = TokenizerFile(kind=tokenizer.kind, **about, sha256=hashlib.sha256(text.encode()).hexdigest())
    splits = {}
    for split, counts in report["splits"].items():
        own = [about for (name, _), about in sorted(shards, key=lambda one: one[0]) if name == split]
        counts["tokens"] = sum(about["count"] for about in own)
        splits[split] = counts | {"shards": own}
    manifest = Manifest.signed(format="manyhands text 3", tokenizer=described.model_dump(), splits=splits)
    report["tokenizer"] = described.model_dump()
    write_whole(folder / TOKENIZER, text)
    write_whole(folder / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    write_whole(folder / MANIFEST, manifest.content())
    try:
        _draw(report, folder / "report.png")
    except Exception as error:
        print(f"the text is prepared, but report.png cannot be drawn: {error}")
    return report


def _draw(report, path):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from manyhands.plots.bars import kept_and_dropped

    figure = kept_and_dropped(report["documents"], report["characters"], "What was kept, and what was dropped")
    FigureCanvasAgg(figure)
    save_figure(figure, path, dpi=120)


def shown_report(report):
    """The table that people see, a str: what was dropped and why, with an example of each."""

    def place(example):
        return f"{visible(example['file'])} line {example['line']:,}"

    lines = [f"{'':<16}{'documents':>10}{'characters':>14}"]
    for name, count in report["documents"].items():
        if count or name == "kept":
            lines.append(f"{name:<16}{count:>10,}{report['characters'][name]:>14,}")
        if example := report["examples"].get(name):
            lines.append(f"  such as {place(example)}: {visible(example['begins'])!r}")
            if "like" in example:
                lines.append(f"  which is like {place(example['like'])}")
    tokenizer = report["tokenizer"]
    lines += ["", f"tokenizer: {tokenizer['kind']}, a vocabulary of {tokenizer['symbols']:,}"]
    for split, about in report["splits"].items():
        each = f"{about['tokens']:,} tokens of {about['bytes'] / max(1, about['tokens']):.2f} bytes on average"
        several = "s" * (about["documents"] != 1)
        lines.append(f"{split + ':':<12}{about['documents']:,} document{several}, {each}")
    return "\n".join(lines)
