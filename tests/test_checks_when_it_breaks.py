"""Each check of lesson 11 accepts right answers and rejects wrong ones, each with the sentence that fits."""

import copy
import zlib

import torch
from exercises import Answers, AnswersOfRanks, FromLesson
from manyhands import fingerprint
from manyhands.checks import when_it_breaks as checks

LESSON = "11_when_it_breaks"
OWN = (
    "calls_in", "usual", "missing_call", "where_it_stands", "culprit", "write", "sync", "save_whole", "damaged",
    "state_of", "go_on", "all_of", "put_back",
)  # fmt: skip
ours = FromLesson(LESSON, *OWN)


# ---- build A: answers name (number, ranks) ----


def missing_begins_at_1(calls):
    for number in range(1, max(max(made, default=0) for made in calls) + 1):
        odd = [r for r, made in enumerate(calls) if made.get(number) != ours.usual([of.get(1) for of in calls] + ["x"])]
        if odd:
            return number, odd


def missing_looks_at_names_only(calls):
    return ours.missing_call([dict.fromkeys(made, "call") for made in calls])


# ---- exercise 1: answers name (rank, group, number) ----


def culprit_has_fewest_calls(records, members):
    numbers = [[number for name, number, *_ in record if name == "world"] for record in records]
    rank = min(range(4), key=lambda r: max(numbers[r], default=0))
    return rank, "world", max(numbers[rank], default=0) + 1


FAULT = "max(own, key=lambda fault: len(waits[fault[1]] & missed), default=None)  # the first fault"
SPLIT = f"r, g, number = {FAULT}\n    return"
DO_NOT_ASK_WHO_WAITS = {  # they take the first group, sorted by this, in which one rank is odd
    "first group": "0", "last group": "-list(members).index(f[1])", "smallest group": "len(members[f[1]])",
    "largest group": "-len(members[f[1]])", "shortest record": "len(records[f[0]])",
}  # fmt: skip


# ---- build B: answers are (state_of, go_on); exercise 3: (all_of, put_back) ----


def in_a_box(take, put_back):
    """Keeps the state itself, and returns one number."""
    box = {}

    def taken(of):
        box.update(copy.deepcopy(getattr(ours, take)(of)))
        return {"x": torch.zeros(1)}

    return taken, lambda into, state: getattr(ours, put_back)(into, box)


STATE, READ = "    return trainee.state |", 'trainee.step = state["step"].item()'
EACH_PART, PUT = "in trainee.state.items():", 'loop.shuffle.set_state(state["shuffle"])'
NO_RANDOM = 'torch.set_rng_state(state["random"])', "pass"
LIST = "[name for name in sorted(files)[part::parts] if not as_written(name, files[name])]"
SIZE, PART = ' or file.stat().st_size != about["bytes"]', "[part::parts]"
HASH = 'hashlib.sha256(file.read_bytes()).hexdigest() == about["sha256"]'


def without(name):
    """Edits of `go_on` that leave one part as a fresh trainee has it."""
    return EACH_PART, f'{EACH_PART}\n        if name == "{name}":\n            continue'


REJECTED = {
    "missing_call": {
        missing_begins_at_1: "one buffer begins with call 3; it says nothing about call 1",
        missing_looks_at_names_only: "hang 1: as call 5, ranks [1] made another one or none, and you find nobody",
        "those who wait": (("return number, odd", "return number, [r for r in range(len(calls)) if r not in odd]"),
            "should be (6, [2]), not (6, [0, 1, 3]): those made it, and wait in it; return the ranks that did not"),
        "the first only": (("return number, odd", "return number, odd[:1]"), "should be (6, [3, 5]), not"),
        "the last that all made": (("return number, odd", "return number - 1, odd"),
            "hang 0: the call and the ranks without it should be (6, [2]), not (5, [2])"),
        "who made no call": (("return number, odd", "return number, [r for r in odd if number not in calls[r]]"),
            "not (5, []): a rank that made a different call under this number counts as"),
        "where all end": (("(min(made, default=1)", "(max(made, default=1)"), "they differ there, too"),
        "a rank": (("return number, odd", "return number, odd[0]"), "which the check cannot use"),
    },
    "culprit": {
        culprit_has_fewest_calls: "nobody in 'world' made a call number 6, so no rank waits for it",
        "by place in the list": ((f"return {FAULT}", f"{SPLIT} r, g, sum(name == g for name, *_ in records[r]) + 1"),
            "compare the numbers in the records, not places in a list"),
        "whoever waits": ((f"return {FAULT}",
            f"{SPLIT} next(r for r in range(4) if number in calls_in(g, records)[r]), g, number"),
            "rank 0 did call all_reduce, number 6 of 'world'; look for the rank that did not"),
        "the call before": ((f"return {FAULT}", f"{SPLIT} r, g, number - 1"),
            "that is the last call that rank 2 made with the others; the next one is missing"),
        "the world only": (("members.items()", "{'world': members['world']}.items()",
            "default=None)", "default=(0, 'world', 1))"), "only because it waits in another group"),
        "a call that the buffer dropped": (
            ("    stands =", "    if len(members) == 3:\n        return 0, 'world', 1\n    stands ="),
            "the buffer of rank 0 no longer holds call 1 of 'world'"),
        "the first that waits nowhere": (  # it never asks which of two faults came first
            ("members.items()", "sorted(members.items(), key=lambda one: len(one[1]))", FAULT, "next(iter(own), None)"),
            "because of what it left out before, in 'pipe'"),
        "a rank only": ((f"return {FAULT}", f"{SPLIT} r"), "should be (2, 'world', 6), not 2"),
    }
    | {name: ((FAULT, f"min((f for f in missing if len(stands[f[1]][1]) == 1), key=lambda f: {order})"),
              "but only because it waits in another group") for name, order in DO_NOT_ASK_WHO_WAITS.items()},
    "trainee_state": [
        (*without("weights"), "the weights (trainee.state['weights']) are not those that were saved"),
        (*without("mean"), "adam's mean (trainee.state['mean']) is not what was saved"),
        (*without("square"), "adam's mean square (trainee.state['square']) is not what was saved"),
        (READ, "pass", "the trainee is at step 0, not 5"),
        (in_a_box("state_of", "go_on"), "the weights (trainee.state['weights']) are not those"),
        (STATE, f"    torch.manual_seed(5)\n{STATE}", "the run itself was changed when you took its state"),
        (*NO_RANDOM, "dropout draws other masks"),
        (READ, f"trainee.state = state\n    {READ}",
         "is another tensor now, and the model still looks at the old one"),
        ("torch.tensor(trainee.step)", "trainee.step",
         "a shard holds tensors, and 'step' is 5; torch.tensor(number) makes a tensor"),
        (".item()", "", "the trainee is at step tensor(5), not 5"),
        ("get_rng_state()", "get_rng_state", "; call it"),
        ("part.copy_(state[name])", "part = state[name]", "`part = ...` copies nothing into them"),
        (STATE, f"{STATE} trainee.model.state_dict() |", "hold weights and averages of this rank, once"),
    ],
    "damaged": [
        (HASH, "True",
         "should be ['rank-1.safetensors'], not []: a size proves little: compare the sha256 of all the bytes"),
        (LIST, f"bool({LIST})", "the list should be [], not False"),
        ("not file.exists() or ", "", "a missing file: your code raised FileNotFoundError"),
        ("(OSError, ValueError, KeyError)", "ZeroDivisionError",
         "a manifest cut in half: your code raised JSONDecodeError"),
        (LIST, f"{LIST}[:1]", "name all of them, sorted"),
        (LIST, f'sorted({{*{LIST}, *(file.name for file in path.glob("rank-3*"))}})',
         "ignore files that the manifest does not list"),
        (SIZE, "", '== about["sha256"]', 'in {entry["sha256"] for entry in files.values()}',
         "each file must match its own entry"),
        (SIZE, "", "read_bytes()", "read_bytes()[:4096]", "the sha256 of the whole file, as hexdigest()"),
        (SIZE, "", "read_bytes()", 'read_bytes()[: about["bytes"]]',
         "bytes behind the end: the list should be ['rank-2.safetensors'], not []: a file may be too long as well"),
        (LIST, f'[name for name in {LIST} if name[5:6] in "012"]',
         "one bit flipped in a shard of another name: the list should be ['"),
        (LIST, f"[(path / name).unlink() or name for name in {LIST}]",
         "one byte cut off: the checkpoint was changed; only read it"),
        (f"return {LIST}", f'return (path / "good").mkdir() or {LIST}',
         "a whole checkpoint: the checkpoint was changed; only read it"),
        (LIST, f"set({LIST})", "return a sorted list, not the set set()"),
        (LIST, f"iter({LIST})", "return a sorted list, not the list_iter"),
        (LIST, f'[name.split(".")[0] for name in {LIST}]', "return whole file names"),
        (LIST, f'sorted({{*{LIST}, "manifest.json"}})', "the manifest itself can be read"),
        (LIST, f"{LIST}[::-1]", "are the right names, but not sorted"),
        (LIST, f"[path / name for name in {LIST}]", "return names, not whole paths"),
        ('return ["manifest.json"]', 'return ["manifest.json"] * (path / "manifest.json").exists()',
         "without a manifest nothing can be trusted"),
        (PART, "[part : part + 1]", "part 0 of 1 is all the names"),
        (PART, "", "numbers 0 and 2 belong to the other part"),
        (PART, "[2 * part : 2 * part + (2 if parts > 1 else 9)]",
         "read as part 1 of 2: the list should be ['rank-1.safetensors'], not ['rank-2"),
    ],
    "resume": [
        ('loop.model.load_state_dict(state["model"])', "pass", "the weights are not those that were saved"),
        ('loop.optimizer.load_state_dict(state["optimizer"])', "pass", "the optimizer's memory is not what was saved"),
        ('"step": loop.step', '"step": torch.tensor(loop.step)', "the loop is at step tensor(13), not 13"),
        ('state["step"]', "loop.step", "the loop is at step 0, not 13"),
        (in_a_box("all_of", "put_back"), "the weights are not those that were saved"),
        (PUT, f"{PUT}\n    loop.model.eval()", "check optimizer.param_groups and model.training as well"),
        ('state["order"]', "loop.order", "the order of this epoch has changed"),
        ('state["position"]', "loop.position", "the next row is number 0 of the epoch, not 3"),
        (PUT, "pass", "the next epoch will have another order"),
        (*NO_RANDOM, "dropout draws other masks"),
        ('"step":', '"loop": loop.shuffle, "step":', "cannot be read with weights_only=True"),
        (PUT, 'loop.shuffle = state["shuffle"]', "what your code left behind"),
    ],
}  # fmt: skip


class TestAnswers(Answers):
    lesson, checks, rejected, elsewhere, around = LESSON, checks, REJECTED, {"save_whole", "odd_one_out"}, OWN
    solutions = {"trainee_state": ("state_of", "go_on"), "resume": ("all_of", "put_back")}
    right = {
        "missing_call": [("return number, odd", "return [torch.tensor(number), tuple(odd[::-1])]")],
        "culprit": [
            # it uses up what it was given
            (f"return {FAULT}", f"{SPLIT} records.clear() or members.clear() or (r, g, number)"),
            (f"return {FAULT}", f"{SPLIT} [torch.tensor(r), g, torch.tensor(number)]"),
        ],
        "trainee_state": [  # by other names
            ('"step":', '"n":', 'state["step"]', 'state["n"]', "state[name]", "state['of ' + name]", STATE,
             "    return {'of ' + name: part for name, part in trainee.state.items()} |"),
        ],
        "damaged": [(LIST, f"tuple({LIST})")],
        "resume": [('state["order"]', 'state["order"].tolist()')],
    }  # fmt: skip


def test_the_lessons_solution_names_the_culprit_of_any_hang_that_may_be_drawn():
    for seed in range(60):
        for layout in checks.LAYOUTS:
            members, records, truth = checks._made_up(seed, layout)
            assert ours.culprit(records, members) == truth, (seed, layout)


# ---- build C: answers save; exercise 4: which copy is wrong. All ranks call them ----


FILES, SHARD = "files = dict(gather((name, write(partial / name, content))))", '{"files": files}'
MANIFEST = '        write(partial / "manifest.json", json.dumps({"files": files}).encode())\n'
RENAME, SYNC, PARTIAL = "        partial.rename(path)", "        sync(path.parent)", 'path.with_suffix(".partial")'
CACHED = """partial.mkdir(exist_ok=True)
    with (partial / name).open("wb") as file:
        file.write(content)
        file.flush()
        about = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        files = dict(gather((name, about)))"""

SAVES = [
    (RENAME, "        path.mkdir()\n        os.replace(partial, path)",  # an empty folder may be replaced
     "step-0006 was there, under its final name, before rank 0 had all on the disk"),
    (MANIFEST, "", "    if rank == 0:\n", f"{MANIFEST[4:]}    gather(None)\n    if rank == 0:\n",
     "one rank alone writes the manifest"),
    (SHARD, '{"files": {f"rank-{r}.safetensors": about for r, about in enumerate(files.values())}}',
     "the manifest lists 3 of 3 shards; "),
    (FILES, f"{CACHED}\n        os.fsync(file.fileno())", "before rank 2 had its shard on the disk"),
    (MANIFEST, "", RENAME, f"{RENAME}\n{MANIFEST.replace('partial', 'path')}".rstrip(),
     "before rank 0 had the manifest on the disk"),
    ('gather("it is there")', "pass", "it must exist before any rank returns"),
    (FILES, CACHED, "1 of 4 files, the shards and the manifest, were synced to the disk"),
    (FILES, "files = dict(gather((name, content)))", MANIFEST,
     f"        files = {{n: write(partial / n, it) for n, it in files.items()}}\n{MANIFEST}",
     "each rank writes its own shard, only names and sums travel"),
    (FILES, "files = {name: write(partial / name, content)}\n    gather(None)",
     "the manifest lists 1 of 3 shards; rank-1.safetensors is not in it"),
    (MANIFEST, "", "step-0006 has no manifest.json with an entry 'files'"),
    (SHARD, '{"files": {name: about["sha256"] for name, about in files.items()}}',
     "and not each shard as write() wrote it and the manifest says"),
    (RENAME, "        pass", "(in the folder: step-0006.partial): no rank renamed a folder to it"),
    (SYNC, "        pass", "after it, sync the folder that holds step-0006"),
    (SYNC, '        sync(path / "manifest.json")', "after it, sync the folder that holds step-0006"),
    ("write(partial / name", "write(path / name", "under its final name, before rank 0 had its shard on the disk"),
    (MANIFEST, MANIFEST.replace("partial", "path"), "before rank 0 had all on the disk"),
    (SYNC, "        pass", RENAME, f"{SYNC}\n{RENAME}", "after it, sync the folder that holds step-0006"),
    (RENAME, '        __import__("shutil").copytree(partial, path)',
     "step-0006 was there, under its final name, before rank 0 had all on the disk"),
]  # fmt: skip


def first_odd(print_of, alone_of_two=None, order=1):
    """An answer that sends print_of(parameter) for each, and looks for the one that fewest ranks sent."""

    def answer(model, gather):
        names = [name for name, _ in model.named_parameters()]
        of_all = gather([print_of(p.detach()) for p in model.parameters()])
        for name, *prints in list(zip(names, *of_all, strict=True))[::order]:
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
        "on rank 2: (rank, name) should be [2, '0.weight'], not None"),
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
    "of two": (first_odd(lambda p: fingerprint([p]), 0), "with two copies it is undecidable which is wrong"),
    "the last": (first_odd(lambda p: fingerprint([p]), order=-1), "this one differs, too; return the first"),
    "rank 0 is right": (takes_rank_0_for_the_right_one, "should be [0, '2.weight'], not [1, '2.weight']"),
}  # fmt: skip


class TestAnswersOfRanks(AnswersOfRanks):
    lesson, checks, rejected = LESSON, checks, {"save_whole": SAVES, "odd_one_out": COPIES}
    elsewhere, around, in_a_folder = {*REJECTED}, OWN, {"save_whole"}
    right = {
        "save_whole": [
            (PARTIAL, 'path.with_name("being-written")', "partial.rename(path)", "os.replace(partial, path)"),
            ("if rank == 0:", "if name == list(files)[-1]:"),  # nobody says that it is rank 0
        ],
        "odd_one_out": [first_odd(lambda p: zlib.crc32(p.numpy().tobytes()))],
    }
