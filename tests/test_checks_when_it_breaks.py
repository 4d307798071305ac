"""Each check of lesson 11 accepts right answers and rejects wrong ones, each with the sentence that fits."""

import copy
import hashlib
import json
import os
import shutil
import zlib

import numpy as np
import torch
from exercises import Answers, AnswersOfRanks, FromLesson, heard_alike
from manyhands import fingerprint
from manyhands.checks import when_it_breaks as checks

LESSON = "11_when_it_breaks"
OWN = (
    "calls_in", "usual", "missing_call", "where_it_stands", "culprit", "write", "sync", "save_whole", "damaged",
    "state_of", "go_on", "all_of", "put_back",
)  # fmt: skip
ours = FromLesson(LESSON, *OWN)


# ---- build A: answers name (number, ranks) ----


def missing_but(change):
    """The right answer, changed: change(number, ranks, calls)."""

    def answer(calls):
        found = ours.missing_call(calls)
        return found and change(*found, calls)

    return answer


def missing_begins_at_1(calls):
    for number in range(1, max(max(made, default=0) for made in calls) + 1):
        odd = [r for r, made in enumerate(calls) if made.get(number) != ours.usual([of.get(1) for of in calls] + ["x"])]
        if odd:
            return number, odd


def missing_looks_at_names_only(calls):
    return ours.missing_call([dict.fromkeys(made, "call") for made in calls])


def missing_is_who_made_no_call(calls):
    return missing_but(lambda number, ranks, calls: (number, [r for r in ranks if number not in calls[r]]))(calls)


# ---- exercise 1: answers name (rank, group, number) ----


def culprit_but(change):
    """The right answer, changed: change(rank, group, number, the numbers of each rank's calls in the group)."""

    def answer(records, members):
        rank, group, number = ours.culprit(records, members)
        return change(rank, group, number, [[n for name, n, *_ in record if name == group] for record in records])

    return answer


def culprit_has_fewest_calls(records, members):
    numbers = [[number for name, number, *_ in record if name == "world"] for record in records]
    rank = min(range(4), key=lambda r: max(numbers[r], default=0))
    return rank, "world", max(numbers[rank], default=0) + 1


def culprit_only_looks_at_the_world(records, members):
    return ours.culprit(records, {"world": members["world"]}) or (0, "world", 1)


def culprit_of_a_group_with_one_odd_rank(order):
    """An answer that takes the first group, sorted by `order`, in which one rank is odd, and never asks who waits."""

    def answer(records, members):
        stands = {g: ours.where_it_stands(records, g, its_ranks) for g, its_ranks in members.items()}
        found = [(g, *stand) for g, stand in stands.items() if stand and len(stand[1]) == 1]
        group, number, (rank,) = min(found, key=lambda one: order(*one, members, records))
        return rank, group, number

    return answer


DO_NOT_ASK_WHO_WAITS = {
    "first group": lambda group, number, odd, members, records: 0,
    "last group": lambda group, number, odd, members, records: -list(members).index(group),
    "smallest group": lambda group, number, odd, members, records: len(members[group]),
    "largest group": lambda group, number, odd, members, records: -len(members[group]),
    "shortest record": lambda group, number, odd, members, records: len(records[odd[0]]),
}


def culprit_is_the_first_that_waits_nowhere(records, members):
    """It never asks which of two faults came first."""
    stands = {g: ours.where_it_stands(records, g, its_ranks) for g, its_ranks in members.items()}
    stands = {g: stand for g, stand in sorted(stands.items(), key=lambda one: len(members[one[0]])) if stand}
    waiting = {r for g, (_, odd) in stands.items() for r in members[g] if r not in odd}
    return next((r, g, number) for g, (number, odd) in stands.items() for r in odd if r not in waiting)


def culprit_uses_up_what_it_was_given(records, members):
    found = ours.culprit(records, members)
    records.clear()
    members.clear()
    return found


# ---- build B: answers are (state_of, go_on); exercise 3: (all_of, put_back) ----


def all_but(name):
    """The solution without one part of the state, which a fresh trainee keeps."""

    def go_on(trainee, state):
        own = {name: part.clone() for name, part in ours.state_of(trainee).items()}
        ours.go_on(trainee, own | {key: part for key, part in state.items() if key != name})

    return ours.state_of, go_on


def with_state(change):
    return (lambda trainee: change(ours.state_of(trainee), trainee)), ours.go_on


def in_a_box(take, put_back):
    """Keeps the state itself, and returns one number."""
    box = {}

    def taken(of):
        box.update(copy.deepcopy(getattr(ours, take)(of)))
        return {"x": torch.zeros(1)}

    return taken, lambda into, state: getattr(ours, put_back)(into, box)


def go_on_and(then):
    """The solution, and then then(trainee, state)."""

    def go_on(trainee, state):
        ours.go_on(trainee, state)
        then(trainee, state)

    return ours.state_of, go_on


def state_of_other_names(trainee):
    return {f"part {name}": part for name, part in trainee.state.items()} | {
        "rng": torch.get_rng_state(), "n": torch.tensor([trainee.step]),
    }  # fmt: skip


def go_on_from_other_names(trainee, state):
    for name in trainee.state:
        trainee.state[name][:] = state[f"part {name}"]
    trainee.step = int(state["n"])
    torch.set_rng_state(state["rng"])


def without(name):
    """The solution, with one part of the state left as a fresh loop has it."""

    def put_back(loop, state):
        own = ours.all_of(loop)
        ours.put_back(loop, {key: (own if key == name else state)[key] for key in state})

    return ours.all_of, put_back


def resume_and(name, value):
    return ours.all_of, lambda loop, state: ours.put_back(loop, state) or setattr(loop, name, value(state))


# ---- exercise 2: answers list the damaged files ----


def damaged_unless(as_written):
    """An answer that trusts a file if as_written(its path, its entry in the manifest, all entries)."""

    def answer(path, part=0, parts=1):
        try:
            files = json.loads((path / "manifest.json").read_text())["files"]
        except (OSError, ValueError):
            return ["manifest.json"]
        names = sorted(files)[part::parts]
        return [n for n in names if not (path / n).exists() or not as_written(path / n, files[n], files)]

    return answer


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def damaged_trusts_that_files_exist(path, part=0, parts=1):
    files = json.loads((path / "manifest.json").read_text())["files"]
    return [n for n, about in files.items() if sha256((path / n).read_bytes()) != about["sha256"]]


def damaged_trusts_the_manifest(path, part=0, parts=1):
    return json.loads((path / "manifest.json").read_text()) and ours.damaged(path, part, parts)


def damaged_counts_strangers(path, part=0, parts=1):
    return sorted({*ours.damaged(path), *(file.name for file in path.glob("rank-3*"))})


def damaged_guesses_names(path, part=0, parts=1):
    names = [f"rank-{r}.safetensors" for r in range(3)][part::parts]
    return [name for name in ours.damaged(path, part, parts) if name in (*names, "manifest.json")]


def damaged_in_a_stretch(path, part=0, parts=1):
    if not parts > 1:
        return ours.damaged(path)
    names = [f"rank-{r}.safetensors" for r in range(3)][2 * part : 2 * part + 2]
    return [name for name in names if name in ours.damaged(path)]


REJECTED = {
    "missing_call": {
        missing_begins_at_1: "one buffer begins with call 3; it says nothing about call 1",
        missing_looks_at_names_only: "hang 1: the call and the ranks without it should be [5, [1]], not None",
        "those who wait": (
            missing_but(lambda number, ranks, calls: (number, [r for r in range(len(calls)) if r not in ranks])),
            "should be [6, [2]], not [6, [0, 1, 3]]: those made it, and wait in it; return the ranks that did not"),
        "the first only": (missing_but(lambda number, ranks, calls: (number, ranks[:1])), "should be [6, [3, 5]], not"),
        "the last that all made": (missing_but(lambda number, ranks, calls: (number - 1, ranks)),
            "hang 0: the call and the ranks without it should be [6, [2]], not [5, [2]]"),
        missing_is_who_made_no_call: "not [5, []]: a rank that made a different call under this number counts as",
        "a rank": (missing_but(lambda number, ranks, calls: (number, ranks[0])), "which the check cannot use"),
    },
    "culprit": {
        culprit_has_fewest_calls: "nobody in 'world' made a call number 6, so no rank waits for it",
        "by place in the list": (culprit_but(lambda rank, group, number, made: (rank, group, len(made[rank]) + 1)),
            "compare the numbers in the records, not places in a list"),
        "whoever waits": (culprit_but(
            lambda rank, group, number, made: (next(r for r in range(4) if number in made[r]), group, number)),
            "rank 0 did call all_reduce, number 6 of 'world'; look for the rank that did not"),
        "the call before": (culprit_but(lambda rank, group, number, made: (rank, group, number - 1)),
            "that is the last call that rank 2 made with the others; the next one is missing"),
        culprit_only_looks_at_the_world: "only because it waits in another group",
        "a call that the buffer dropped": (
            lambda records, members: (0, "world", 1) if len(members) == 3 else ours.culprit(records, members),
            "the buffer of rank 0 no longer holds call 1 of 'world'"),
        culprit_is_the_first_that_waits_nowhere: "because of what it left out before, in 'pipe'",
        "a rank only": (lambda records, members: ours.culprit(records, members)[0], "should be [2, 'world', 6], not 2"),
    }
    | {name: (culprit_of_a_group_with_one_odd_rank(order), "but only because it waits in another group")
       for name, order in DO_NOT_ASK_WHO_WAITS.items()},
    "trainee_state": {
        "no weights": (all_but("weights"), "the weights (trainee.state['weights']) are not those that were saved"),
        "no mean": (all_but("mean"), "adam's mean (trainee.state['mean']) is not what was saved"),
        "no square": (all_but("square"), "adam's mean square (trainee.state['square']) is not what was saved"),
        "no step": (all_but("step"), "the trainee is at step 0, not 5"),
        "a box of its own": (in_a_box("state_of", "go_on"), "the weights (trainee.state['weights']) are not those"),
        "a seed at the save": (with_state(lambda state, trainee: (torch.manual_seed(5), ours.state_of(trainee))[1]),
            "the run itself was changed when you took its state"),
        "no random numbers": (all_but("random"), "dropout draws other masks"),
        "new tensors": (go_on_and(lambda trainee, state: setattr(trainee, "state", state)),
            "is another tensor now, and the model still looks at the old one"),
        "a plain step": (with_state(lambda state, trainee: state | {"step": trainee.step}),
            "a shard holds tensors, and 'step' is 5; torch.tensor(number) makes a tensor"),
        "a step that is a tensor": (go_on_and(lambda trainee, state: setattr(trainee, "step", state["step"])),
            "the trainee is at step tensor(5), not 5"),
        "the whole model": (with_state(lambda state, trainee: state | trainee.model.state_dict()),
            "hold weights and averages of this rank, once"),
    },
    "damaged": {
        "by size only": (damaged_unless(lambda file, about, files: file.stat().st_size == about["bytes"]),
            "should be ['rank-1.safetensors'], not []: a size proves little: compare the sha256 of all the bytes"),
        "yes or no": (lambda path, *part: bool(ours.damaged(path)), "the list should be [], not False"),
        damaged_trusts_that_files_exist: "a missing file: your code raised FileNotFoundError",
        damaged_trusts_the_manifest: "a manifest cut in half: your code raised JSONDecodeError",
        "the first only": (lambda path, *part: ours.damaged(path, *part)[:1], "name all of them, sorted"),
        damaged_counts_strangers: "ignore files that the manifest does not list",
        "any known sum": (damaged_unless(
            lambda file, about, files: sha256(file.read_bytes()) in {entry["sha256"] for entry in files.values()}),
            "each file must match its own entry"),
        "a hash of the beginning": (damaged_unless(
            lambda file, about, files: sha256(file.read_bytes()[:4096]) == about["sha256"]),
            "take the sha256 of the whole file, not of its beginning"),
        "the bytes that should be there": (damaged_unless(
            lambda file, about, files: sha256(file.read_bytes()[: about["bytes"]]) == about["sha256"]),
            "bytes behind the end: the list should be ['rank-2.safetensors'], not []: a file may be too long as well"),
        damaged_guesses_names: "one bit flipped in a shard of another name: the list should be ['",
        "and removes it": (lambda path, *part: [(path / n).unlink() or n for n in ours.damaged(path) if "rank" in n],
            "one byte cut off: the checkpoint was changed; only read it"),
        "and makes a folder": (lambda path, *part: (path / "good").mkdir() or ours.damaged(path, *part),
            "a whole checkpoint: the checkpoint was changed; only read it"),
        "a set": (lambda path, *part: set(ours.damaged(path, *part)), "return a sorted list, not the set set()"),
        "an iterator": (lambda path, *part: iter(ours.damaged(path, *part)), "return a sorted list, not the list_iter"),
        "no suffix": (lambda path, *part: [n.split(".")[0] for n in ours.damaged(path, *part)],
            "return whole file names"),
        "the manifest too": (lambda path, *part: sorted({*ours.damaged(path, *part), "manifest.json"}),
            "the manifest itself can be read"),
        "not sorted": (lambda path, *part: ours.damaged(path, *part)[::-1], "are the right names, but not sorted"),
        "whole paths": (lambda path, *part: [path / name for name in ours.damaged(path, *part)],
            "return names, not whole paths"),
        "no missing manifest": (
            lambda path, *part: ours.damaged(path, *part) if (path / "manifest.json").exists() else [],
            "without a manifest nothing can be trusted"),
        "all files": (lambda path, part=0, parts=1: ours.damaged(path), "numbers 0 and 2 belong to the other part"),
        damaged_in_a_stretch: "read as part 1 of 2: the list should be ['rank-1.safetensors'], not ['rank-2",
    },
    "resume": {
        "no weights": (without("model"), "the weights are not those that were saved"),
        "no optimizer": (without("optimizer"), "the optimizer's memory is not what was saved"),
        "no step": (without("step"), "the loop is at step 0, not 13"),
        "a box of its own": (in_a_box("all_of", "put_back"), "the weights are not those that were saved"),
        "an eval": ((ours.all_of, lambda loop, state: ours.put_back(loop, state) or loop.model.eval()),
            "check optimizer.param_groups and model.training as well"),
        "no order": (without("order"), "the order of this epoch has changed"),
        "no position": (without("position"), "the next row is number 0 of the epoch, not 3"),
        "no shuffle": (without("shuffle"), "the next epoch will have another order"),
        "no random numbers": (without("random"), "dropout draws other masks"),
        "the loop itself": ((lambda loop: {"loop": loop.shuffle}, ours.put_back),
            "cannot be read with weights_only=True"),
        "a state for the generator": (resume_and("shuffle", lambda state: state["shuffle"]),
            "what your code left behind"),
    },
}  # fmt: skip


class TestAnswers(Answers):
    lesson, checks, rejected, elsewhere, around = LESSON, checks, REJECTED, {"save_whole", "odd_one_out"}, OWN
    solutions = {"trainee_state": ("state_of", "go_on"), "resume": ("all_of", "put_back")}
    right = {
        "missing_call": [missing_but(lambda number, ranks, calls: [np.int64(number), tuple(reversed(ranks))])],
        "culprit": [culprit_uses_up_what_it_was_given,
                    culprit_but(lambda rank, group, number, made: [np.int64(rank), group, torch.tensor(number)])],
        "trainee_state": [(state_of_other_names, go_on_from_other_names)],
        "damaged": [lambda path, *part: tuple(ours.damaged(path, *part))],
        "resume": [(ours.all_of, ours.put_back), resume_and("order", lambda state: state["order"].tolist())],
    }  # fmt: skip


def test_the_lessons_solution_names_the_culprit_of_any_hang_that_may_be_drawn():
    for seed in range(300):
        for layout in checks.LAYOUTS:
            members, records, truth = checks._made_up(seed, layout)
            assert ours.culprit(records, members) == truth, (seed, layout)


# ---- build C: answers save; exercise 4: which copy is wrong. All ranks call them ----


def _partial(path):
    return path.with_suffix(".partial")


def written(path, name, content, gather):
    return dict(gather((name, ours.write(_partial(path) / name, content))))


def written_to_a_cache(path, name, content, gather, when_told=lambda file: None):
    _partial(path).mkdir(exist_ok=True)
    with (_partial(path) / name).open("wb") as file:
        file.write(content)
        file.flush()
        files = dict(gather((name, {"bytes": len(content), "sha256": sha256(content)})))
        when_told(file)
    return files


def a_manifest(folder, files):
    ours.write(folder / "manifest.json", json.dumps({"files": files}).encode())


def renamed(path, files):
    a_manifest(_partial(path), files)
    _partial(path).rename(path)
    ours.sync(path.parent)


def saving(write=written, finish=renamed, waits=True):
    """An answer: all write(path, name, content, gather) what becomes the manifest; rank 0 does finish(path, that)."""

    def answer(path, name, content, rank, gather):
        files = write(path, name, content, gather)
        if rank == 0:
            finish(path, files)
        if waits:
            gather(None)

    return answer


def of_this_rank_alone(path, name, content, gather):
    files = {name: ours.write(_partial(path) / name, content)}
    gather(None)
    return files


def saves_in_a_folder_of_another_name(path, name, content, rank, gather):  # right, by another way to rename
    started = path.with_name("being-written")
    entries = dict(gather([name, ours.write(started / name, content)]))
    if not rank:
        ours.write(started / "manifest.json", json.dumps({"step": 6, "files": entries}, indent=1).encode())
        os.replace(started, path)
        ours.sync(path.parent)
    gather(0)
    return path


def the_last_rank_finishes(path, name, content, rank, gather):  # right: nobody says that it is rank 0
    files = written(path, name, content, gather)
    if name == list(files)[-1]:
        renamed(path, files)
    gather(None)


def every_rank_writes_the_manifest(path, name, content, rank, gather):
    a_manifest(_partial(path), written(path, name, content, gather))
    gather(None)
    if rank == 0:
        _partial(path).rename(path)
        ours.sync(path.parent)
    gather(None)


def makes_the_folder_first(path, files):
    """An empty folder may be replaced, and until then it is there."""
    a_manifest(_partial(path), files)
    path.mkdir()
    os.replace(_partial(path), path)


def guesses_names(path, files):
    renamed(path, {f"rank-{r}.safetensors": about for r, about in enumerate(files.values())})


SAVES = {
    "an empty folder first": (saving(finish=makes_the_folder_first),
        "step-0006 was there, under its final name, before rank 0 had all on the disk"),
    "all write the manifest": (every_rank_writes_the_manifest, "one rank alone writes the manifest"),
    "names that are guessed": (saving(finish=guesses_names), "the manifest lists 3 of 3 shards; "),
    "under the final name": (
        saving(lambda path, name, content, gather: dict(gather((name, ours.write(path / name, content)))), a_manifest),
        "step-0006 was there, under its final name, before rank 0 had its shard on the disk"),
    "before all have written": (
        saving(lambda *given: written_to_a_cache(*given, when_told=lambda file: os.fsync(file.fileno()))),
        "before rank 2 had its shard on the disk"),
    "the manifest last": (
        saving(finish=lambda path, files: (_partial(path).rename(path), a_manifest(path, files))),
        "before rank 0 had the manifest on the disk"),
    "and does not wait": (saving(waits=False), "it must exist before any rank returns"),
    "into a cache": (saving(written_to_a_cache), "synced no file to the disk"),
    "all on rank 0": (
        saving(lambda path, name, content, gather: dict(gather((name, content))),
            lambda path, all_of: renamed(path, {n: ours.write(_partial(path) / n, it) for n, it in all_of.items()})),
        "each rank writes its own shard, only names and sums travel"),
    "a manifest of one": (saving(of_this_rank_alone),
        "the manifest lists 1 of 3 shards; rank-1.safetensors is not in it"),
    "no manifest": (
        saving(finish=lambda path, files: (a_manifest(path.with_name("other"), {}), _partial(path).rename(path))),
        "step-0006 has no manifest.json with an entry 'files'"),
    "sums without sizes": (
        saving(finish=lambda path, files: renamed(path, {name: about["sha256"] for name, about in files.items()})),
        "and not each shard as write() wrote it and the manifest says"),
    "and never renames": (saving(finish=lambda path, files: a_manifest(_partial(path), files)),
        "(in the folder: step-0006.partial): no rank renamed a folder to it"),
    "no sync of the folder": (
        saving(finish=lambda path, files: (a_manifest(_partial(path), files), _partial(path).rename(path))),
        "after it, sync the folder that holds step-0006"),
    "a sync before the rename": (
        saving(finish=lambda path, files: (
            a_manifest(_partial(path), files), ours.sync(path.parent), _partial(path).rename(path))),
        "after it, sync the folder that holds step-0006"),
    "a copy": (
        saving(finish=lambda path, files: (a_manifest(_partial(path), files), shutil.copytree(_partial(path), path))),
        "step-0006 was there, under its final name, before rank 0 had all on the disk"),
}  # fmt: skip


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


def takes_rank_0_for_the_right_one(model, gather):
    prints = {name: fingerprint([p]) for name, p in model.named_parameters()}
    of_all = gather(prints)
    return next(((r, n) for n in prints for r, of in enumerate(of_all) if of[n] != of_all[0][n]), None)


bits = torch.int32
COPIES = {
    "finds nothing": (lambda model, gather: gather(None) and None,
        "bit 20 of one weight is flipped on rank 2: (rank, name) should be [2, '0.weight'], not None"),
    "sums": (first_odd(lambda p: p.sum().item()),
        "all copies are equal: (rank, name) should be None, not the list [0, '2.bias']: nan is not equal to itself"),
    "sums without nan": (first_odd(lambda p: p.nan_to_num().sum().item()),
        "the lowest bit of one weight is flipped on rank 0: (rank, name) should be [0, '2.weight'], not None"),
    "sums of bits": (first_odd(lambda p: p.view(bits).sum().item()), "two weights have changed places on rank 1"),
    "sums of squares and places": (
        first_odd(lambda p: sum(i * x * x for i, x in enumerate(p.nan_to_num().double().view(-1).tolist()))),
        "a zero has become -0.0 on rank 2"),
    "weights": (first_odd(lambda p: p.view(bits).tolist()),
        "bytes: weights; fingerprints fit into 960"),
    "rank 0 is right": (takes_rank_0_for_the_right_one, "should be [0, '2.weight'], not [1, '2.weight']"),
}  # fmt: skip


class TestAnswersOfRanks(AnswersOfRanks):
    lesson, checks, rejected = LESSON, checks, {"save_whole": SAVES, "odd_one_out": COPIES}
    elsewhere, around, in_a_folder = {*REJECTED}, OWN, {"save_whole"}
    right = {
        "save_whole": [saves_in_a_folder_of_another_name, the_last_rank_finishes],
        "odd_one_out": [first_odd(lambda p: zlib.crc32(p.numpy().tobytes()))],
    }


def one_of_two(ranks):
    return checks.odd_one_out(first_odd(lambda p: fingerprint([p]), alone_of_two=0), ranks)


def test_of_two_copies_nobody_can_say_which_is_wrong(pool):
    sentence = "with two copies it is undecidable which is wrong; return (None, '0.weight')"
    assert sentence in heard_alike(pool.run(2, one_of_two))
