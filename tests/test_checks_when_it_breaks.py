"""Each check of lesson 11 accepts right answers and rejects wrong ones, each with the sentence that fits."""

import copy
import hashlib
import json
import math
import os
import shutil
import zlib

import numpy as np
import pytest
import torch
from exercises import Answers, AnswersOfRanks, FromLesson, heard_alike
from manyhands import fingerprint
from manyhands.checks import when_it_breaks as checks
from manyhands.course.catch_up import taken_from

LESSON = "11_when_it_breaks"
OWN = (
    "calls_in", "usual", "missing_call", "where_it_stands", "culprit", "write", "save_whole", "damaged", "state_of",
    "go_on", "all_of", "put_back",
)  # fmt: skip
ours = FromLesson(LESSON, *OWN)


# ---- build A: answers name (number, ranks) ----


def missing_has_fewest_calls(calls):
    fewest = min(len(made) for made in calls)
    return fewest + 1, [r for r, made in enumerate(calls) if len(made) == fewest]


def missing_begins_at_1(calls):
    for number in range(1, max(max(made, default=0) for made in calls) + 1):
        odd = [r for r, made in enumerate(calls) if number not in made]
        if odd:
            return number, odd


def missing_but(change):
    """The right answer, changed: change(number, ranks, calls)."""

    def answer(calls):
        found = ours.missing_call(calls)
        return found and change(*found, calls)

    return answer


def missing_is_the_last_number(calls):
    last = max(max(made, default=0) for made in calls)
    return last, [r for r, made in enumerate(calls) if last not in made]


# ---- exercise 1: answers name (rank, group, number) ----


def _numbers(records, group):
    return [[number for name, number, _, _ in record if name == group] for record in records]


def culprit_has_fewest_calls(records, members):
    numbers = _numbers(records, "world")
    rank = min(range(4), key=lambda r: max(numbers[r], default=0))
    return rank, "world", max(numbers[rank], default=0) + 1


def culprit_but(change):
    """The right answer, changed: change(rank, group, number, the numbers of each rank's calls in the group)."""

    def answer(records, members):
        rank, group, number = ours.culprit(records, members)
        return change(rank, group, number, _numbers(records, group))

    return answer


def culprit_only_looks_at_the_world(records, members):
    return ours.culprit(records, {"world": members["world"]}) or (0, "world", 1)


def culprit_names_the_last_miss(records, members):
    return ours.culprit(records, members)[0], "world", max(map(max, _numbers(records, "world")))


def culprit_is_no_member(records, members):
    rank, group, number = ours.culprit(records, members)
    outside = [r for r in range(4) if r not in members[group]]
    return (outside or [rank])[0], group, number


def culprit_compares_only_numbers(records, members):  # another call under the same number looks like a match
    renamed = [[(name, number, "call", length) for name, number, _, length in record] for record in records]
    return ours.culprit(renamed, members)


def _last_calls(records, members, groups):
    """(rank, group, number) for each rank that did not make a group's last call as most did, group by group."""
    for group in groups:
        calls = [{n: call for name, n, call, _ in records[r] if name == group} for r in members[group]]
        last = max(max(made) for made in calls if made)
        made = [of_rank.get(last) for of_rank in calls]
        usual = max(set(made) - {None}, key=made.count)
        yield from ((r, group, last) for r, call in zip(members[group], made, strict=True) if call != usual)


def culprit_knows_the_groups_names(records, members):  # and never asks who waits
    return next(_last_calls(records, members, [g for g in ("row 0", "row 1", "world") if g in members]), None)


def culprit_takes_the_first_miss_of_the_smallest_group(records, members):  # nor does this one ask
    return next(_last_calls(records, members, sorted(members, key=lambda group: len(members[group]))))


def _waits_nowhere(records, members, groups):
    missing = list(_last_calls(records, members, groups))
    stuck = {r for group in {g for _, g, _ in missing} for r in members[group]
             if (r, group) not in {(one, g) for one, g, _ in missing}}  # fmt: skip
    return next(fault for fault in missing if fault[0] not in stuck)


def culprit_is_looked_for_in_the_smallest_group_first(records, members):
    return _waits_nowhere(records, members, sorted(members, key=lambda group: len(members[group])))


def culprit_is_looked_for_in_the_largest_group_first(records, members):
    return _waits_nowhere(records, members, sorted(members, key=lambda group: -len(members[group])))


def culprit_names_a_call_that_the_buffer_dropped(records, members):
    return (0, "world", 1) if len(members) == 3 else ours.culprit(records, members)


def culprit_of_a_group_with_one_odd_rank(name, order):
    """An answer that takes the first group, sorted by `order`, in which one rank is odd, and never asks who waits."""

    def answer(records, members):
        stands = {g: ours.where_it_stands(records, g, its_ranks) for g, its_ranks in members.items()}
        found = [(g, *stand) for g, stand in stands.items() if stand and len(stand[1]) == 1]
        group, number, (rank,) = min(found, key=lambda one: order(*one, members, records))
        return rank, group, number

    answer.__name__ = f"culprit_is_the_odd_one_of_the_{name}"
    return answer


DO_NOT_ASK_WHO_WAITS = [
    culprit_of_a_group_with_one_odd_rank(name, order)
    for name, order in {
        "first group": lambda group, number, odd, members, records: 0,
        "last group": lambda group, number, odd, members, records: -list(members).index(group),
        "smallest group": lambda group, number, odd, members, records: len(members[group]),
        "largest group": lambda group, number, odd, members, records: -len(members[group]),
        "earliest call": lambda group, number, odd, members, records: number,
        "earliest call of a large group": lambda group, number, odd, members, _: (number, -len(members[group])),
        "lowest rank": lambda group, number, odd, members, records: odd[0],
        "highest rank": lambda group, number, odd, members, records: -odd[0],
        "shortest record": lambda group, number, odd, members, records: len(records[odd[0]]),
    }.items()
]


# ---- exercise 2: answers list the damaged files ----


def _files(path):
    return json.loads((path / "manifest.json").read_text())["files"]


def damaged_unless(as_written):
    """An answer that trusts a file if as_written(its path, its entry in the manifest, all entries)."""

    def answer(path):
        try:
            files = _files(path)
        except (OSError, ValueError):
            return ["manifest.json"]
        return sorted(n for n in files if not (path / n).exists() or not as_written(path / n, files[n], files))

    return answer


def by_a_hash_of_the_beginning(length):
    def as_written(file, about, files):
        content = file.read_bytes()
        return (len(content), hashlib.sha256(content[:length]).hexdigest()) == tuple(about.values())

    return damaged_unless(as_written)


def damaged_raises_for_a_missing_file(path):
    return [n for n, a in _files(path).items() if hashlib.sha256((path / n).read_bytes()).hexdigest() != a["sha256"]]


def damaged_trusts_the_manifest(path):
    files = _files(path)
    return sorted(n for n in files if not (path / n).exists() or _sum(path / n) != files[n]["sha256"])


def _sum(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def damaged_counts_strangers(path):
    found = ours.damaged(path)
    if found == ["manifest.json"]:
        return found
    return sorted({*found, *(f.name for f in path.iterdir() if f.name not in {*_files(path), "manifest.json"})})


def damaged_removes_what_it_finds(path):
    found = ours.damaged(path)
    for name in found:
        (path / name).unlink(missing_ok=True)
    return found


def damaged_does_not_hash_what_is_large(path):
    found = ours.damaged(path)
    return [name for name in found if not (path / name).exists() or (path / name).stat().st_size < 2**20]


def damaged_in_the_manifests_order(path):
    found = ours.damaged(path)
    return found if len(found) < 2 else [name for name in _files(path) if name in found]


def damaged_says_no_more(path):
    if not all((path / name).exists() for name in _files(path)):
        raise FileNotFoundError
    return ours.damaged(path)


def damaged_in_a_stretch(path, part=0, parts=1):
    found = ours.damaged(path)
    if found == ["manifest.json"]:
        return found
    names = sorted(_files(path))
    stretch = -(-len(names) // parts)
    return [name for name in names[part * stretch : (part + 1) * stretch] if name in found]


def damaged_removes_the_checkpoint(path):
    found = ours.damaged(path)
    if found:
        shutil.rmtree(path)
    return found


def damaged_makes_a_folder_of_its_own(path):
    (path / "sums").mkdir()
    (path / "sums" / "all").write_text("")
    return ours.damaged(path)


# ---- build B: answers are (state_of, go_on) ----


def only(*names):
    """The solution, with a state of these parts alone; what is not in it, a fresh trainee keeps."""

    def state_of(trainee):
        state = ours.state_of(trainee)
        return {name: state[name] for name in names}

    def go_on(trainee, state):
        ours.go_on(trainee, ours.state_of(trainee) | state)

    return state_of, go_on


PARTS = ("weights", "mean", "square", "step", "random")


def all_but(name):
    return only(*(part for part in PARTS if part != name))


def go_on_in_new_tensors(trainee, state):
    ours.go_on(trainee, state)
    trainee.state = {name: state[name] for name in trainee.state}


def go_on_with_a_step_that_is_a_tensor(trainee, state):
    ours.go_on(trainee, state)
    trainee.step = state["step"]


def with_state(change):
    return (lambda trainee: change(ours.state_of(trainee), trainee)), ours.go_on


def trainee_state_is_kept_in_memory():
    kept = {}

    def state_of(trainee):
        kept.update(copy.deepcopy(ours.state_of(trainee)))
        return {"nothing": torch.zeros(1)}

    return state_of, lambda trainee, state: ours.go_on(trainee, kept)


# ---- exercise 3: answers are (all_of, put_back) ----


def without(*forgotten):
    """The solution, with some parts of the state left as a fresh loop has them."""

    def put_back(loop, state):
        keep = checks.Loop.__new__(checks.Loop)
        keep.__dict__.update(loop.__dict__)
        own = ours.all_of(loop) | {"random": torch.get_rng_state()}
        own = {k: (v.clone() if torch.is_tensor(v) else v) for k, v in own.items()}
        if "optimizer" in forgotten:
            loop.model.load_state_dict(state["model"])
            own["model"] = state["model"]
        state = state | {name: own[name] for name in forgotten}
        ours.put_back(loop, state)

    return ours.all_of, put_back


def resume_with_another_optimizer():
    def put_back(loop, state):
        loop.model = torch.nn.Sequential(*[type(m)(*_arguments(m)) for m in loop.model]).double()
        ours.put_back(loop, state)

    return ours.all_of, put_back


def _arguments(module):
    return (module.in_features, module.out_features) if isinstance(module, torch.nn.Linear) else ()


def resume_swaps_the_moments():
    def put_back(loop, state):
        for one in state["optimizer"]["state"].values():
            one["exp_avg"], one["exp_avg_sq"] = one["exp_avg_sq"], one["exp_avg"]
        ours.put_back(loop, state)

    return ours.all_of, put_back


def resume_puts(name, *value):
    """An answer that puts the part of the state, or `value`, in the place of what should have taken it."""

    def put_back(loop, state):
        ours.put_back(loop, state)
        setattr(loop, name, value[0] if value else state[name])

    return ours.all_of, put_back


def resume_from_a_copy_in_memory():
    kept = {}

    def all_of(loop):
        kept.update(copy.deepcopy(ours.all_of(loop)))
        return {}

    return all_of, lambda loop, state: ours.put_back(loop, kept)


REJECTED = {
    "missing_call": {
        missing_has_fewest_calls: "nobody made call 6; name the first number at which they differ",
        missing_begins_at_1: "hang 1: you found nothing, and call 5 was not made alike by all (see ranks [1])",
        "missing compares only numbers": (
            lambda calls: ours.missing_call([dict.fromkeys(made, "call") for made in calls]),
            "hang 1: you found nothing, and call 5 was not made alike by all (see"),
        "missing names those who wait": (missing_but(
            lambda number, ranks, calls: (number, [r for r in range(len(calls)) if r not in ranks])),
            "ranks [0, 1, 3] made call 6 and wait in it; return those that did not"),
        "missing names the first only": (missing_but(lambda number, ranks, calls: (number, ranks[:1])),
            "was not made by ranks"),
        "missing is one too many": (missing_but(lambda number, ranks, calls: (number - 1, ranks)),
            "hang 0: all ranks made call 5 alike; name the first number at which they differ"),
        missing_is_the_last_number: "another call than most, broadcast, as number 5: it is missing, too",
        "missing is a rank": (missing_but(lambda number, ranks, calls: (number, ranks[0])),
            "which the check cannot use (TypeError: 'int' object is not iterable)"),
    },
    "trainee_state": {
        all_but("weights"): "the weights (trainee.state['weights']) is not what was saved",
        all_but("mean"): "adam's mean (trainee.state['mean']) is not what was saved",
        all_but("square"): "adam's mean square (trainee.state['square']) is not what was saved",
        all_but("step"): "the trainee is at step 0, not 5",
        all_but("random"): "dropout draws other masks",
        "new tensors": ((ours.state_of, go_on_in_new_tensors),
            "is another tensor now, and the model still looks at the old one"),
        "a plain step": (with_state(lambda state, trainee: state | {"step": trainee.step}),
            "a shard holds tensors with names, and 'step' is 5; torch.tensor(number)"),
        "a step that is a tensor": ((ours.state_of, go_on_with_a_step_that_is_a_tensor),
            "trainee.step is the Tensor tensor(5); it was a whole number"),
        "the whole model": (
            with_state(lambda state, trainee: state | {"row": trainee.row_P, "model": torch.zeros(10_000)}),
            "hold it all: the weights and adam's averages of this rank, once"),
        "a list": (with_state(lambda state, trainee: list(state.values())), "state_of returned the list [tensor("),
        trainee_state_is_kept_in_memory(): "the weights (trainee.state['weights']) is not what was saved",
        "swapped averages": (
            with_state(lambda state, trainee: state | {"mean": state["square"], "square": state["mean"]}),
            "adam's mean (trainee.state['mean']) is not what was saved"),
    },
    "culprit": {
        culprit_has_fewest_calls: "nobody in 'world' made a call number 6, so nobody waits for it",
        "culprit by place in the list": (
            culprit_but(lambda rank, group, number, made: (rank, group, len(made[rank]) + 1)),
            "compare the numbers in the records, not places in a list"),
        "culprit is whoever waits": (culprit_but(
            lambda rank, group, number, made: (next(r for r in range(4) if number in made[r]), group, number)),
            "it waits there for another rank"),
        culprit_only_looks_at_the_world: "only because it waits in another group",
        culprit_names_the_last_miss: "rank 3 is missing in 'world' because of what it left out before, in 'row 1'",
        culprit_is_no_member: "rank 0 is no member of 'row 1'",
        culprit_compares_only_numbers: "hang 1: return a tuple (rank, group, number), not None",
        "culprit is a rank only": (lambda records, members: ours.culprit(records, members)[0],
            "return a tuple (rank, group, number), not 2"),
        "culprit invents a group": (culprit_but(lambda rank, group, number, made: (rank, "default_pg", number)),
            "there is no group 'default_pg'"),
        culprit_knows_the_groups_names: "another hang (seed 0): return a tuple (rank, group, number), not None",
        culprit_takes_the_first_miss_of_the_smallest_group: "only because it waits in another group",
        culprit_is_looked_for_in_the_smallest_group_first: "because of what it left out before, in 'data'",
        culprit_is_looked_for_in_the_largest_group_first: "because of what it left out before, in 'row 1'",
        "culprit as a list": (lambda records, members: list(ours.culprit(records, members)),
            "hang 0: return a tuple (rank, group, number), not the list [2, 'world', 6]"),
        "culprit as text": (culprit_but(lambda rank, group, number, made: (str(rank), group, number)),
            "rank and number are whole numbers, the group is a name, not the"),
        "culprit names a call that all made": (lambda records, members: (0, "world", 3),
            "did call all_reduce, number 3 of 'world'; and so did the others"),
        culprit_names_a_call_that_the_buffer_dropped: "the buffer of rank 0 no longer holds call 1 of 'world'",
    }
    | dict.fromkeys(DO_NOT_ASK_WHO_WAITS, "but only because it waits in another group"),
    "damaged": {
        "damaged by size only": (damaged_unless(lambda file, about, files: file.stat().st_size == about["bytes"]),
            "compare the sha256 of the bytes"),
        "damaged says yes or no": (lambda path: bool(ours.damaged(path)), "return a list of names, not False"),
        damaged_raises_for_a_missing_file: "a missing file: your code raised FileNotFoundError",
        damaged_trusts_the_manifest: "a manifest cut in half: your code raised JSONDecodeError",
        "damaged names the first only": (lambda path: ours.damaged(path)[:1], "name all of them, sorted"),
        damaged_counts_strangers: "what the manifest does not list is nobody's business",
        "damaged takes any known sum": (damaged_unless(
            lambda file, about, files: _sum(file) in {entry["sha256"] for entry in files.values()}),
            "each file must match its own entry"),
        damaged_removes_what_it_finds: "your code changed the checkpoint",
        "damaged by a hash of 512 bytes": (by_a_hash_of_the_beginning(2**9),
            "one of its files large: expected [], got ['rank-1.safetensors']"),
        "damaged by a hash of 1 MiB": (by_a_hash_of_the_beginning(2**20),
            "hash the whole file, not its beginning"),
        damaged_does_not_hash_what_is_large: "one bit flipped near the end of a large file",
        damaged_in_the_manifests_order: "are the right names, but not sorted",
        "damaged with whole paths": (lambda path: [path / name for name in ours.damaged(path)],
            "return names such as 'rank-1.safetensors', not whole paths"),
        "damaged returns a set": (lambda path: set(ours.damaged(path)), "return a list of names, not the set set()"),
        "damaged lists numbers": (lambda path: [int(name[5]) for name in ours.damaged(path)],
            "the list holds 1; return names of files"),
        damaged_says_no_more: "a missing file: your code raised FileNotFoundError; say what is damaged",
        damaged_removes_the_checkpoint: "your code changed the checkpoint",
        damaged_makes_a_folder_of_its_own: "your code changed the checkpoint",
        "damaged ignores a missing manifest": (
            lambda path: ours.damaged(path) if (path / "manifest.json").exists() else [],
            "without a manifest nothing can be trusted"),
        "damaged in all files": (lambda path, part=0, parts=1: ours.damaged(path),
            "read as part 1 of 2: expected ['rank-1.safetensors']"),
        damaged_in_a_stretch: "read as part 1 of 2: expected ['rank-1.safetensors'], got []",
    },
    "resume": {
        without("model"): "the weights are not those that were saved",
        without("optimizer"): "the optimizer's memory is lost",
        without("step"): "the loop is at step 0, not 13",
        without("order"): "the order of this epoch is another one",
        without("position"): "the next row is number 0 of the epoch, not 3",
        without("shuffle"): "the next epoch will have another order",
        without("random"): "dropout draws other masks",
        "the loop itself": ((lambda loop: {"loop": loop.shuffle, "order": loop.order}, ours.put_back),
            "cannot be read with weights_only=True"),
        "a list": ((lambda loop: list(ours.all_of(loop).items()), ours.put_back), "all_of returned the list [('model'"),
        resume_with_another_optimizer(): "the optimizer updates other tensors than the model's",
        "the start of the epoch": ((ours.all_of, lambda loop, state: ours.put_back(loop, state | {"position": 0})),
            "the next row is number 0 of the epoch, not 3"),
        resume_swaps_the_moments(): "the optimizer's memory is not what was saved",
        resume_puts("shuffle"): "loop.shuffle is now of the type Tensor, and was a Generator",
        resume_puts("model"): "loop.model is now of the type OrderedDict, and was a Sequential",
        resume_puts("optimizer"): "loop.optimizer is now of the type dict, and was a AdamW",
        resume_puts("order", None): "loop.order is now of the type NoneType, and was a Tensor",
        resume_puts("step", None): "the loop is at step None, not 13",
        resume_from_a_copy_in_memory(): "the weights are not those that were saved",
    },
}  # fmt: skip


# ---- build C: answers save; all ranks call them ----


def _partial(path):
    return path.with_suffix(".partial")


def written(path, name, content, gather):
    return dict(gather((name, ours.write(_partial(path) / name, content))))


def written_to_a_cache(path, name, content, gather, when_told=lambda file: None):
    _partial(path).mkdir(exist_ok=True)
    with (_partial(path) / name).open("wb") as file:
        file.write(content)
        file.flush()
        about = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        files = dict(gather((name, about)))
        when_told(file)
    return files


def a_manifest(folder, files):
    ours.write(folder / "manifest.json", json.dumps({"files": files}).encode())


def renamed(path, files):
    a_manifest(_partial(path), files)
    _partial(path).rename(path)


def renamed_in_a_cache(path, files):
    (_partial(path) / "manifest.json").write_text(json.dumps({"files": files}))
    _partial(path).rename(path)


def saving(write=written, finish=renamed, waits=True):
    """An answer: all write(path, name, content, gather) what becomes the manifest; rank 0 does finish(path, that)."""

    def answer(path, name, content, rank, gather):
        files = write(path, name, content, gather)
        if rank == 0:
            finish(path, files)
        if waits:
            gather(None)

    return answer


def saves_a_manifest_of_one(path, name, content, gather):
    files = {name: ours.write(_partial(path) / name, content)}
    gather(None)
    return files


def saves_and_renames_on_all(path, name, content, rank, gather):
    saving(finish=lambda path, files: a_manifest(_partial(path), files))(path, name, content, rank, gather)
    _partial(path).rename(path)
    gather(None)


SAVES = {
    "under the final name": (
        saving(lambda path, name, content, gather: dict(gather((name, ours.write(path / name, content)))), a_manifest),
        "step-0006 was there, under its final name, before rank 0 had its shard on the disk"),
    "before all have written": (
        saving(lambda *given: written_to_a_cache(*given, when_told=lambda file: os.fsync(file.fileno()))),
        "before rank 2 had its shard on the disk"),
    "the manifest last": (
        saving(finish=lambda path, files: (_partial(path).rename(path), a_manifest(path, files))),
        "before rank 0 had the manifest on the disk"),
    "and does not wait": (saving(waits=False), "a rank that is done must not find it missing"),
    "into a cache": (saving(written_to_a_cache, renamed_in_a_cache), "rank 0 forced 0 of its 2 files onto the disk"),
    "all on rank 0": (
        saving(lambda path, name, content, gather: dict(gather((name, content))),
            lambda path, all_of: renamed(path, {n: ours.write(_partial(path) / n, it) for n, it in all_of.items()})),
        "each rank writes its own shard of 20,000 bytes, and only names and sums travel"),
    "a manifest of one": (saving(saves_a_manifest_of_one),
        "the manifest lists 1 of 3 shards; rank-1.safetensors is not in it"),
    "without a manifest": (
        saving(finish=lambda path, files: (a_manifest(path.with_name("other"), {}), _partial(path).rename(path))),
        "step-0006 has no manifest.json with an entry 'files'"),
    "and never renames": (saving(finish=lambda path, files: a_manifest(_partial(path), files)),
        "nobody has renamed anything to it"),
    "and renames on all": (saves_and_renames_on_all, "your code raised"),
    "a copy": (
        saving(finish=lambda path, files: (a_manifest(_partial(path), files), shutil.copytree(_partial(path), path))),
        "step-0006.partial is still there beside step-0006: rename it, do not copy it"),
    "nothing": (lambda path, name, content, rank, gather: gather(None) and None,
        "step-0006 was not there when rank 0 returned (in the folder: nothing)"),
}  # fmt: skip


def saves_in_a_folder_of_another_name(path, name, content, rank, gather):  # right, by another way to rename
    started = path.with_name("being-written")
    entries = dict(gather([name, ours.write(started / name, content)]))
    if not rank:
        ours.write(started / "manifest.json", json.dumps({"step": 6, "files": entries}, indent=1).encode())
        os.replace(started, path)
    gather(0)
    return path


def judge_saves(ranks, folder):
    checks.save_whole(taken_from(LESSON, *OWN).save_whole, ranks, solution=True, folder=folder)
    answers = {name: answer for name, (answer, _) in SAVES.items()} | {"right": saves_in_a_folder_of_another_name}
    of_world = answers if ranks.world_size == 3 else {}
    return {name: checks.save_whole(answer, ranks, folder=folder) for name, answer in of_world.items()}


@pytest.fixture(scope="module")
def saves(pool, tmp_path_factory):
    return heard_alike(pool.run(3, judge_saves, tmp_path_factory.mktemp("saves"), timeout_s=280))


@pytest.mark.parametrize("answer", SAVES)
def test_a_save_that_is_not_safe_is_told_why(saves, answer):
    assert SAVES[answer][1].lower() in saves[answer].lower()


def test_a_save_may_use_another_name_and_another_way_to_rename(saves):
    assert saves["right"] == "correct"


@pytest.mark.parametrize("n", [1, 2])
def test_the_lessons_save_is_accepted_by_every_world(pool, tmp_path, n):
    assert pool.run(n, judge_saves, tmp_path) == [{}] * n


# ---- exercise 4: answers say which copy is wrong; all ranks call them ----


def first_odd(print_of, alone_of_two=None):
    """An answer that sends print_of(parameter) for each, and looks for the one that fewest ranks sent."""

    def answer(model, gather):
        names = [name for name, _ in model.named_parameters()]
        of_all = gather([print_of(p.detach()) for p in model.parameters()])
        for name, *prints in zip(names, *of_all, strict=True):
            if any(given != prints[0] for given in prints):
                alone = min(range(len(prints)), key=lambda r: prints.count(prints[r]))
                return (alone if len(prints) > 2 else alone_of_two), name
        return None

    return answer


def finds_nothing(model, gather):
    gather(None)


def names_no_parameter(model, gather):
    found = first_odd(lambda p: fingerprint([p]))(model, gather)
    return found and found[0]


def takes_rank_0_for_the_right_one(model, gather):
    prints = {name: fingerprint([p]) for name, p in model.named_parameters()}
    of_all = gather(prints)
    return next(((r, n) for n in prints for r, of in enumerate(of_all) if of[n] != of_all[0][n]), None)


def heals_the_model(model, gather):
    found = first_odd(lambda p: fingerprint([p]))(model, gather)
    with torch.no_grad():
        model[0].weight.zero_()
    return found


bits = torch.int32
WRONG_COPIES = {
    "finds nothing": (finds_nothing, "bit 20 of one weight is flipped on rank 2, in 0.weight, and you found nothing"),
    "sums": (first_odd(lambda p: p.sum().item()),
             "all copies are equal, and you found (0, '2.bias') (nan is not equal to"),
    "sums without nan": (first_odd(lambda p: p.nan_to_num().sum().item()), "and you found nothing: compare all bits"),
    "sums of bits": (
        first_odd(lambda p: p.view(bits).sum().item()), "two weights have changed places on rank 1",
    ),
    "sums of squares and places": (
        first_odd(lambda p: sum(i * x * x for i, x in enumerate(p.nan_to_num().double().view(-1).tolist()))),
        "a zero has become -0.0 on rank 2",
    ),
    "weights": (first_odd(lambda p: p.view(bits).tolist()),
                "bytes for 6 tensors: weights travelled; fingerprints fit into"),
    "rank 0 is right": (takes_rank_0_for_the_right_one,
            "is flipped on rank 0, in 2.weight: the answer is (0, '2.weight'), not (1"),
    "no name": (names_no_parameter, "cannot unpack non-iterable int object)"),
    "heals": (heals_the_model, "your function changed the model; look at it only"),
}  # fmt: skip
RIGHT_COPIES = [
    first_odd(lambda p: zlib.crc32(p.numpy().tobytes())),
    first_odd(lambda p: bytes.fromhex(fingerprint([p]))),
]


class TestAnswersOnACopy(AnswersOfRanks):
    lesson, checks, rejected, right = LESSON, checks, {"odd_one_out": WRONG_COPIES}, {"odd_one_out": RIGHT_COPIES}
    elsewhere = {"save_whole", *REJECTED}


def one_of_two(ranks):
    return checks.odd_one_out(first_odd(lambda p: fingerprint([p]), alone_of_two=0), ranks)


def test_of_two_copies_nobody_can_say_which_is_wrong(pool):
    sentence = "with two copies nobody can say which is the wrong one; return (None, '0.weight')"
    assert sentence in heard_alike(pool.run(2, one_of_two))


# ---- right answers in another style ----


def calls_as_a_list_in_any_order(calls):
    found = ours.missing_call(calls)
    return found and [np.int64(found[0]), tuple(reversed(found[1]))]


def state_of_other_names(trainee):
    numbers = {f"part {name}": part for name, part in trainee.state.items()}
    return numbers | {"rng": torch.get_rng_state(), "n": torch.tensor([trainee.step])}


def go_on_from_other_names(trainee, state):
    for name in trainee.state:
        trainee.state[name][:] = state[f"part {name}"]
    trainee.step = int(state["n"])
    torch.set_rng_state(state["rng"])


def forgets_who_is_who(records, members):
    found = ours.culprit(records, members)
    for its_ranks in members.values():
        its_ranks.clear()
    members.clear()
    records.clear()
    return found


def with_numbers_of(kind):
    def answer(records, members):
        rank, group, call = ours.culprit(records, members)
        return kind(rank), group, kind(call)

    return answer


class TestAnswers(Answers):
    lesson, checks, rejected, elsewhere, around = LESSON, checks, REJECTED, {"save_whole", "odd_one_out"}, OWN
    solutions = {"trainee_state": ("state_of", "go_on"), "resume": ("all_of", "put_back")}
    right = {
        "missing_call": [calls_as_a_list_in_any_order],
        "trainee_state": [(state_of_other_names, go_on_from_other_names)],
        "culprit": [forgets_who_is_who, *map(with_numbers_of, (int, np.int64, torch.tensor, np.array))],
        "damaged": [lambda path, *part: tuple(ours.damaged(path, *part))],
        "resume": [(ours.all_of, ours.put_back)],
    }


def test_the_made_up_hangs_hold_all_three_difficulties():
    hangs = list(checks._hangs())
    assert len(hangs) >= 10
    calls = [[call for name, _, call, _ in record] for _, _, records, _ in hangs for record in records]
    assert any(set(record) - {"all_reduce"} for record in calls), "another call"
    assert any(records[0][0][1] > 1 for _, _, records, _ in hangs), "a buffer that does not begin at 1"
    assert any(len(members) > 1 for _, members, _, _ in hangs), "several groups"
    assert len({truth[0] for _, _, _, truth in hangs}) == 5 and not any(math.isnan(t[2]) for *_, t in hangs)


def test_the_fault_of_a_made_up_hang_lies_in_the_smaller_and_in_the_larger_of_a_ranks_groups():
    made_up = [(members, truth) for name, members, _, truth in checks._hangs() if "seed" in name]
    sizes = [
        (len(members[group]), *sorted(len(its_ranks) for its_ranks in members.values() if rank in its_ranks))
        for members, (rank, group, _) in made_up
    ]
    assert {(2, 2, 4), (4, 2, 4), (3, 3, 4), (4, 3, 4)} < set(sizes)
    assert len({name for members, _ in made_up for name in members}) > 4, "names are drawn"


def test_the_lessons_solution_names_the_culprit_of_any_hang_that_may_be_drawn():
    for seed in range(500):
        for layout in checks.LAYOUTS:
            members, records, truth = checks._made_up(seed, layout)
            assert ours.culprit(records, members) == truth, (seed, layout)
