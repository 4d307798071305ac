"""Checkpoints on real ranks: any number reads what any number wrote, and nothing damaged is ever read."""

import errno
import json
import math
import os
import re
import shutil
import subprocess
import threading
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from manyhands.checkpoint import checkpoints as checkpoint_module
from manyhands.checkpoint import manifest
from manyhands.checkpoint.checkpoints import Checkpoints, whole_tensors
from manyhands.checkpoint.manifest import CheckpointError
from manyhands.course import folders
from manyhands.gpt.config import GPTConfig
from rank_pool import run_on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.ranks

# 65 and 7 do not split evenly, 2 leaves some of 4 ranks without a share
SHAPES = {
    "model.tokens.weight": ([65, 8], torch.float32),
    "model.norm.bias": ([7], torch.float64),
    "model.head.bias": ([2], torch.bfloat16),
    "optimizer.tokens.weight.exp_avg": ([65, 8], torch.float32),
    "optimizer.tokens.weight.step": ([], torch.float32),
}
WAYS = ("plain", "sharded", "uneven")
OF_ONE = "model-00001-of-00001.safetensors"
ABOUT = {"config": asdict(GPTConfig(65)), "corpus": {"name": "test", "sha256": "0" * 64}}


def about(ranks, step, **more):
    """The metadata of a run."""
    return about_of(ranks.world_size, step) | more


def about_of(world_size, step):
    return ABOUT | {"step": step, "world_size": world_size, "layout": f"shard {world_size}"}


def whole(name):
    """The one right value of a tensor."""
    shape, dtype = SHAPES[name]
    drawn = torch.Generator().manual_seed(sorted(SHAPES).index(name))
    return torch.randn(shape, dtype=torch.float64, generator=drawn).to(dtype)


def held(ranks, way, value):
    """{name: what this rank holds}: copies everywhere, DTensors, or each name on one rank only."""
    if way == "sharded":
        mesh = init_device_mesh("cpu", (ranks.world_size,))
        return {
            name: distribute_tensor(value(name), mesh, [Shard(0) if SHAPES[name][0] else Replicate()])
            for name in SHAPES
        }
    names = [n for i, n in enumerate(SHAPES) if way == "plain" or i % ranks.world_size == ranks.rank]
    return {name: value(name) for name in names}


def blank(name):
    shape, dtype = SHAPES[name]
    return torch.full(shape, -1.0, dtype=dtype)


def saved(ranks, folder, step=1, val_loss=None, value=whole, way="plain", keep=2, **metadata):
    """Save once and let go of the folder."""
    checkpoints = Checkpoints(folder, ranks, keep=keep)
    checkpoints.save(step, held(ranks, way, value), about(ranks, step, **metadata), val_loss=val_loss)
    checkpoints.close()


def error_of(action):
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return None


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir() if not path.name.startswith("."))


def _save_each_way(ranks, folder):
    for way in WAYS:
        saved(ranks, folder / f"{ranks.world_size}-{way}", way=way)


@pytest.fixture(scope="module")
def written(pool, tmp_path_factory):
    """Checkpoints of 1, 2 and 4 ranks, each in three ways."""
    folder = tmp_path_factory.mktemp("written")
    for n in (1, 2, 4):
        pool.run(n, _save_each_way, folder)
    return folder


def _read_each_way(ranks, folder):
    wrong = []
    for path in sorted(folder.iterdir()):
        for way in WAYS:
            checkpoints, tensors = Checkpoints(path, ranks), held(ranks, way, blank)
            checkpoints.load(checkpoints.newest(), tensors)
            right = held(ranks, way, whole)
            for name, tensor in tensors.items():
                got, expected = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, right[name]))
                if not torch.equal(got, expected):
                    wrong.append((path.name, way, name))
            checkpoints.close()
    return wrong


@pytest.mark.parametrize("m", [1, pytest.param(2, marks=pytest.mark.full), 4])
def test_m_ranks_read_bit_for_bit_what_1_2_or_4_ranks_wrote_in_any_way(pool, m, written):
    assert len(list(written.iterdir())) == 9
    assert pool.run(m, _read_each_way, written) == [[]] * m


def _save_two_axes(ranks, folder):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 65), torch.nn.Linear(65, 7))  # nothing splits evenly
    right = {f"model.{name}": p.detach().clone() for name, p in model.named_parameters()}
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    checkpoints = Checkpoints(folder, ranks)
    tensors = {f"model.{name}": p for name, p in model.named_parameters()}
    checkpoints.save(1, tensors, about(ranks, 1))
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
    checkpoints.load(checkpoints.newest(), tensors)
    again = {name: tensor.full_tensor().detach() for name, tensor in tensors.items()}
    return right, all(torch.equal(again[name], right[name]) for name in right)


def test_fsdp_over_tensor_parallel_comes_back_whole_in_one_process(pool, tmp_path):
    right, same = pool.run(4, _save_two_axes, tmp_path)[0]
    assert same
    (path,) = manifest.steps_in(tmp_path)
    found = whole_tensors(path, "model.")
    assert {name.removeprefix("model.") for name in right} == found.keys()
    assert all(torch.equal(found[name.removeprefix("model.")], right[name]) for name in right)


def _save_in_the_background(ranks, folder):
    value = held(ranks, "sharded", whole)
    now, later = Checkpoints(folder / "now", ranks), Checkpoints(folder / "later", ranks, asynchronous=True)
    now.save(3, value, about(ranks, 3, a=1), {"rng": torch.tensor([ranks.rank])}, val_loss=2.0)
    gate, write = threading.Event(), checkpoint_module.write_tensors
    checkpoint_module.write_tensors = lambda *about: gate.wait(60) and write(*about)
    later.save(3, value, about(ranks, 3, a=1), {"rng": torch.tensor([ranks.rank])}, val_loss=2.0)
    unfinished = manifest.steps_in(folder / "later")
    for tensor in value.values():  # training goes on
        tensor.zero_()
    gate.set()
    later.wait()
    return unfinished, len(manifest.steps_in(folder / "later"))


def test_a_save_in_the_background_holds_what_a_save_in_the_foreground_does(tmp_path):
    assert run_on_ranks(2, _save_in_the_background, tmp_path) == [([], 1)] * 2
    tensors = {}
    for way in ("now", "later"):
        (path,) = manifest.steps_in(tmp_path / way)
        manifest.verify(path)
        tensors[way] = whole_tensors(path)
        found = manifest.read_manifest(path)
        assert (found.metadata, found.val_loss, found.step) == (about_of(2, 3) | {"a": 1}, 2.0, 3)
    assert tensors["now"].keys() == tensors["later"].keys() == {*SHAPES, "rank.0.rng", "rank.1.rng"}
    assert all(torch.equal(tensors["now"][name], tensors["later"][name]) for name in tensors["now"])
    assert all(torch.equal(tensors["now"][name], whole(name)) for name in SHAPES)


def _fail_in_the_background(ranks, folder):
    checkpoints = Checkpoints(folder, ranks, asynchronous=True)
    checkpoints.save(1, held(ranks, "plain", whole), about(ranks, 1))
    checkpoints.wait()
    if ranks.rank == 1:
        checkpoint_module.describe_file = lambda path: 1 / 0
    first = error_of(lambda: checkpoints.save(2, held(ranks, "plain", whole), about(ranks, 2)))
    second = error_of(lambda: checkpoints.save(3, held(ranks, "plain", whole), about(ranks, 3)))
    return first, second, checkpoints.newest().name


def test_a_save_that_failed_in_the_background_is_told_to_all_ranks_at_the_next_call(tmp_path):
    for first, second, newest in run_on_ranks(2, _fail_in_the_background, tmp_path):
        assert (first, newest) == (None, "step-00000001")
        assert second == "rank 1: ZeroDivisionError: division by zero"
    assert names_in(tmp_path) == ["step-00000001"], "the partial one is removed"


def _save_rank_state(ranks, folder):
    checkpoints = Checkpoints(folder, ranks)
    checkpoints.save(1, held(ranks, "plain", whole), about(ranks, 1), {"cpu": torch.tensor([10 + ranks.rank, 7])})
    checkpoints.close()


def _load_rank_state(ranks, folder, layout):
    checkpoints, state = Checkpoints(folder, ranks), {"cpu": torch.zeros(2, dtype=torch.int64)}
    metadata = checkpoints.load(checkpoints.newest(), held(ranks, "plain", blank), state, layout)
    return state["cpu"].tolist(), metadata["rank_state_restored"]


def test_random_state_returns_to_its_rank_and_only_to_the_same_layout(pool, tmp_path):
    pool.run(2, _save_rank_state, tmp_path)
    assert pool.run(2, _load_rank_state, tmp_path, "shard 2") == [([10, 7], True), ([11, 7], True)]
    assert pool.run(2, _load_rank_state, tmp_path, None) == [([10, 7], True), ([11, 7], True)]
    assert pool.run(2, _load_rank_state, tmp_path, "tensor 2") == [([0, 0], False)] * 2
    assert pool.run(1, _load_rank_state, tmp_path, None) == [([0, 0], False)]


def _load_what_is_broken(ranks, folder):
    """What is said of a checkpoint with NaN or infinity in one place, or with no random state for rank 1."""
    broken = {
        "model.norm.bias": math.nan, "model.tokens.weight": math.inf, "optimizer.tokens.weight.exp_avg": math.nan,
        "cpu": 0,
    }  # fmt: skip
    said = []
    for i, (name, bad) in enumerate(broken.items(), 1):
        checkpoints, tensors = Checkpoints(folder / str(i), ranks), held(ranks, "sharded", whole)
        state = {"cpu": torch.ones(2 if name != "cpu" or ranks.rank == 0 else 0)}
        if name != "cpu" and len(own := tensors[name].to_local()) and ranks.rank == 1:
            own[-1] = bad
        checkpoints.save(1, tensors, about(ranks, 1), state)
        tensors, state = held(ranks, "sharded", blank), {"cpu": torch.zeros(2)}
        said.append(error_of(lambda: checkpoints.load(checkpoints.newest(), tensors, state)))  # noqa: B023
        checkpoints.close()
    return said


def test_nan_and_a_random_state_of_no_length_are_refused_by_name_on_all_ranks(pool, tmp_path):
    first, second = pool.run(2, _load_what_is_broken, tmp_path)
    assert first == second
    cure = "; remove this checkpoint, and the run goes on from the one before it"
    for sentence, why in zip(
        first,
        (
            "model.norm.bias holds NaN or infinity", "model.tokens.weight holds NaN or infinity",
            "optimizer.tokens.weight.exp_avg holds NaN or infinity",
            "the state of its random numbers is damaged (rank.1.cpu is [0] torch.float32, not [2] torch.float32)",
        ),
        strict=True,
    ):  # fmt: skip
        assert sentence.endswith(f"step-00000001 cannot be resumed from: {why}{cure}")


def _save_steps(ranks, folder, *steps):
    for step in steps:
        saved(ranks, folder, step, way="sharded", keep=9)


@pytest.fixture(scope="module")
def two_steps(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_steps")
    pool.run(2, _save_steps, folder, 10, 20)
    return folder


SHARD_1, SHARD_2 = (f"shard-0000{n}-{OF_ONE}" for n in (1, 2))


def _flipped(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def _damage(path, name, change):
    """Change a file's bytes; remove it if `change` is None; put an earlier step in its place if `name` is None."""
    if name is None:
        shutil.rmtree(path)
        shutil.copytree(path.parent / "step-00000010", path)
        return
    content = (path / name).read_bytes()
    (path / name).unlink()
    if change:
        (path / name).write_bytes(change(content))


NOT_THERE = "cannot be read (No such file or directory)"
DAMAGES = {
    "a flipped byte": (SHARD_2, _flipped, f"{SHARD_2} has changed since it was written (other sha256)"),
    "a cut file": (
        SHARD_1, lambda content: content[:-1],
        rf"{SHARD_1} has \d+ bytes, but was written with \d+: it is cut or changed",
    ),
    "a lost file": (SHARD_2, None, f"{SHARD_2} {NOT_THERE}"),
    "no manifest": ("manifest.json", None, f"manifest.json {NOT_THERE}; .*step-00000020 is not a complete"),
    "an edited manifest": (
        "manifest.json", lambda content: content.replace(b'"world_size": 2', b'"world_size": 1'),
        "manifest.json cannot be used",
    ),
    "a cut manifest": ("manifest.json", lambda content: content[:100], "manifest.json cannot be used"),
    "another step": (None, None, "manifest.json is of step 10, but its folder says step 20"),
}  # fmt: skip


def _newest(ranks, folders):
    """For each folder: the step that newest() finds, what it says, and what load() of the damaged one says."""
    found = []
    for folder in folders:
        told, checkpoints = [], Checkpoints(folder, ranks)
        checkpoint_module.say = told.append
        newest = checkpoints.newest()
        tensors = held(ranks, "plain", blank)
        refused = error_of(lambda: checkpoints.load(folder / "step-00000020", tensors))  # noqa: B023
        untouched = all(torch.equal(tensors[name], blank(name)) for name in SHAPES)
        found.append((newest.name, told, refused, untouched))
        checkpoints.close()
    return found


def test_a_damaged_checkpoint_is_refused_by_the_name_of_its_file_and_the_previous_one_is_used(two_steps, tmp_path):
    folders = []
    for damage, (name, change, _) in DAMAGES.items():
        folders.append(tmp_path / damage)
        shutil.copytree(two_steps, folders[-1])
        _damage(folders[-1] / "step-00000020", name, change)
    rank_0, rank_1 = run_on_ranks(2, _newest, folders)
    for (damage, (_, _, sentence)), first, second in zip(DAMAGES.items(), rank_0, rank_1, strict=True):
        sentence = re.compile(sentence.replace("(", r"\(").replace(")", r"\)"))
        newest, told, refused, untouched = first
        assert newest == second[0] == "step-00000010", damage
        assert len(told) == 1 and told[0].startswith("step 20 is passed over: ") and sentence.search(told[0]), told
        assert second[1] == [], "one rank speaks"
        assert refused == second[2] and sentence.search(refused), refused
        assert untouched and second[3]
        with pytest.raises(CheckpointError, match=sentence):
            manifest.verify(tmp_path / damage / "step-00000020")


def test_a_shard_that_an_older_copy_has_left_is_refused(two_steps, tmp_path):
    path = tmp_path / "step-00000020"
    shutil.copytree(two_steps / path.name, path)
    shutil.copy(path / f"shard-00001-{OF_ONE}", path / f"shard-00003-{OF_ONE}")
    with pytest.raises(CheckpointError, match=f"shard-00003-{OF_ONE} is not in the manifest; remove it"):
        manifest.verify(path)


def test_no_file_of_a_checkpoint_is_a_pickle_and_one_that_is_put_beside_them_is_not_read(two_steps, tmp_path):
    path = tmp_path / "step-00000020"
    shutil.copytree(two_steps / path.name, path)
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
    (path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "proof").encode() + b"'\ntR.")
    assert whole_tensors(path).keys() >= SHAPES.keys() and not (tmp_path / "proof").exists()


def _misfits(ranks, folder):
    checkpoints = Checkpoints(folder, ranks)
    path, sentences = checkpoints.newest(), []
    for change in (
        {"model.new": torch.ones(3)},
        {"model.norm.bias": torch.full((8,), -1.0, dtype=torch.float64)},
        {"model.norm.bias": torch.full((7,), -1.0)},
        {"model.norm.bias": None},
    ):
        tensors = held(ranks, "plain", blank)
        if ranks.rank == 1:  # on one rank only
            tensors |= change
        if change.get("model.norm.bias", 0) is None:
            del tensors["model.norm.bias"]
        sentences.append(error_of(lambda: checkpoints.load(path, tensors)))  # noqa: B023
        assert all(torch.equal(tensors[name], blank(name)) for name in tensors.keys() - change.keys())
    return sentences


def test_foreign_and_missing_names_other_shapes_and_other_types_are_named(pool, two_steps):
    first, second = pool.run(2, _misfits, two_steps)
    assert first == second
    parts = [
        "model.new is missing there and [3] torch.float32 here",
        "model.norm.bias is [7] torch.float64 there and [8] torch.float64 here",
        "model.norm.bias is [7] torch.float64 there and [7] torch.float32 here",
        "model.norm.bias is [7] torch.float64 there and missing here",
    ]
    for sentence, part in zip(first, parts, strict=True):
        assert "step-00000020 does not fit this run: " + part in sentence


def _after_a_kill(ranks, folder):
    checkpoints = Checkpoints(folder, ranks)
    newest, before = checkpoints.newest().name, names_in(folder)
    checkpoints.save(30, held(ranks, "plain", whole), about(ranks, 30))
    return newest, before


def test_a_partial_folder_is_no_checkpoint_and_the_next_save_removes_it(pool, two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / "step-00000020", tmp_path / "step-00000025.partial")  # complete, but never renamed
    (tmp_path / "step-00000026.partial").mkdir()
    before = ["step-00000010", "step-00000020", "step-00000025.partial", "step-00000026.partial"]
    assert pool.run(2, _after_a_kill, tmp_path)[0] == ("step-00000020", before), "a reader removes nothing"
    assert names_in(tmp_path) == ["step-00000020", "step-00000030"]


def _save_with_losses(ranks, folder, losses):
    for step, loss in losses.items():
        saved(ranks, folder, step, loss)
        yield names_in(folder)


def _retain(ranks, folder):
    losses = {1: 3.0, 2: 1.5, 3: None, 4: float("nan"), 5: 2.0, 6: 1.5, 7: 9.0, 8: 8.0}
    return list(_save_with_losses(ranks, folder, losses))


def test_the_last_two_and_the_best_are_kept(pool, tmp_path):
    (kept,) = pool.run(1, _retain, tmp_path)
    steps = [[int(name.removeprefix("step-")) for name in names] for names in kept]
    assert steps == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [5, 6], [6, 7], [6, 7, 8]], "of equals the newest"


def _twice(ranks, folder):
    saved(ranks, folder, 5, val_loss=1.0, value=blank)
    saved(ranks, folder, 5, val_loss=2.0)
    checkpoints, tensors = Checkpoints(folder, ranks), held(ranks, "plain", blank)
    checkpoints.load(checkpoints.newest(), tensors)
    return all(torch.equal(tensors[name], whole(name)) for name in SHAPES)


def test_a_second_save_of_a_step_replaces_the_first(pool, tmp_path):
    assert pool.run(2, _twice, tmp_path) == [True, True]
    assert names_in(tmp_path) == ["step-00000005"]
    assert manifest.read_manifest(tmp_path / "step-00000005").val_loss == 2.0


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_kill_between_two_renames_leaves_the_old_one_or_the_new_one(renames, tmp_path, two_steps, monkeypatch):
    class Killed(BaseException):
        pass

    folder = tmp_path / "run"
    shutil.copytree(two_steps, folder)
    unfinished = manifest.make_partial(folder, 20, set())
    shutil.copytree(folder / "step-00000020", unfinished, dirs_exist_ok=True)
    files = manifest.read_manifest(unfinished).files
    (unfinished / "manifest.json").unlink()
    left = [renames]
    rename = Path.rename

    def renamed_until_killed(path, target):
        if not left[0]:
            raise Killed
        left[0] -= 1
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed_until_killed)
    try:
        manifest.complete(unfinished, 20, None, about_of(2, 20) | {"new": True}, files, keep=9)
        assert renames == 2
    except Killed:
        assert renames < 2
    monkeypatch.undo()
    newest = manifest.steps_in(folder)[0]
    manifest.verify(newest)
    assert manifest.step_of(newest) == 20
    assert manifest.read_manifest(newest).metadata.get("new", False) == (renames == 2)
    manifest.make_partial(folder, 20, set())  # the next save tidies up
    assert names_in(folder) == ["step-00000010", "step-00000020", "step-00000020.partial"]


def _broken_then_later(ranks, folder):
    checkpoint_module.say = lambda text: None
    checkpoints = Checkpoints(folder, ranks)
    assert checkpoints.newest().name == "step-00000010"
    checkpoints.save(15, held(ranks, "plain", whole), about(ranks, 15))
    checkpoints.close()
    fresh = Checkpoints(folder, ranks)
    return error_of(lambda: fresh.save(12, held(ranks, "plain", whole), about(ranks, 12)))


def test_a_later_step_is_put_aside_if_it_was_found_broken_and_else_it_is_another_runs(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    _damage(tmp_path / "step-00000020", SHARD_2, _flipped)
    told = "holds step 15 of another run, later than this run's step 12; name another folder"
    assert all(told in sentence for sentence in run_on_ranks(2, _broken_then_later, tmp_path))
    assert names_in(tmp_path) == ["step-00000010", "step-00000015", "step-00000020.broken"]


def _refuse(number, *_, **__):
    raise OSError(number, os.strerror(number))


def _one_rank_fails(ranks, folder):
    saved(ranks, folder, 1)
    checkpoints, sentences = Checkpoints(folder, ranks), []
    tensors = held(ranks, "plain", whole)
    for module, name, number in (
        (safetensors.torch, "save", errno.EIO),  # while DCP writes
        (checkpoint_module, "describe_file", errno.EIO),  # while it is hashed
        (manifest, "write_manifest", errno.EIO),  # at the very end, on rank 0 only
        (safetensors.torch, "save", errno.ENOSPC),
    ):
        right = getattr(module, name)
        if ranks.rank == 1 or name == "write_manifest":
            setattr(module, name, partial(_refuse, number))
        sentences.append(error_of(lambda: checkpoints.save(2, tensors, about(ranks, 2))))
        setattr(module, name, right)
    return sentences, checkpoints.newest().name


def test_a_rank_that_fails_fails_the_save_on_all_and_the_older_one_stays(tmp_path):
    first, *others = run_on_ranks(3, _one_rank_fails, tmp_path, timeout_s=30)
    assert others == [first] * 2
    sentences, newest = first
    assert newest == "step-00000001" and names_in(tmp_path) == ["step-00000001"]
    assert sentences[0].endswith("could not be saved in " + str(tmp_path) + ": rank 1: Input/output error")
    assert sentences[1] == "rank 1: Input/output error"
    assert sentences[2] == "rank 0: Input/output error"
    assert re.match(rf"{tmp_path} is full: step 2 needs more, and [\d.]+ MB are free; free some, keep", sentences[3])


def _save_beside_another_run(ranks, folder):
    folders.PATIENCE_S = 0.3
    return error_of(lambda: saved(ranks, folder))


def test_a_folder_into_which_another_run_writes_is_refused_until_that_run_ends(tmp_path):
    ours = folders.lock(tmp_path, "process 123 on host7")
    told = f"{tmp_path} cannot be written (another program writes there until it ends: process 123 on host7); name"
    assert all(told in sentence for sentence in run_on_ranks(2, _save_beside_another_run, tmp_path))
    assert names_in(tmp_path) == []
    ours.close()
    assert run_on_ranks(2, _save_beside_another_run, tmp_path) == [None, None]


def _remove_between_and_within_saves(ranks, folder):
    checkpoints, write, found = Checkpoints(folder, ranks), checkpoint_module.write_tensors, []

    def remove(*about):
        dist.barrier()
        if ranks.rank == 0:
            shutil.rmtree(folder)
        dist.barrier()
        return about and write(*about)

    for step in (1, 2, 3):
        if step == 2:
            remove()
        checkpoint_module.write_tensors = remove if step == 3 else write
        checkpoints.save(step, held(ranks, "plain", whole), about(ranks, step))
        found.append(names_in(folder))
    manifest.verify(folder / "step-00000003")
    return found


def test_a_folder_whose_name_safetensors_cannot_read_is_refused_before_the_first_step(two_steps, tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    assert all("rename it, or name another folder" in said for said in run_on_ranks(2, _claim, folder))
    shutil.copytree(two_steps, folder)
    with pytest.raises(CheckpointError, match="its name is not UTF-8, in which safetensors reads names"):
        whole_tensors(folder / "step-00000020")


def _claim(ranks, folder):
    return error_of(lambda: Checkpoints(folder, ranks).claim())


def test_a_folder_that_is_removed_under_a_run_is_made_anew(tmp_path):
    for found in run_on_ranks(2, _remove_between_and_within_saves, tmp_path / "c"):
        assert found == [["step-00000001"], ["step-00000002"], ["step-00000003"]]


def _save_in_odd_places(ranks, folder):
    (folder / "file").write_text("") if ranks.rank == 0 else None
    blocked = error_of(lambda: saved(ranks, folder / "file"))
    # each node its own disk: rank 1 does not see what rank 0 makes; it names another folder, too, which does not count
    if ranks.rank == 1:
        Path.is_dir = lambda path: False
    elsewhere = Checkpoints(folder / f"of-rank-{ranks.rank}", ranks)
    return (
        blocked,
        error_of(lambda: elsewhere.save(1, held(ranks, "plain", whole), about(ranks, 1))),
        str(elsewhere.folder),
    )


def test_a_folder_that_cannot_be_made_or_is_not_shared_is_refused_on_all_ranks(tmp_path):
    first, second = run_on_ranks(2, _save_in_odd_places, tmp_path)
    assert first == second
    assert f"{tmp_path}/file cannot be written (File exists); name another folder" in first[0]
    assert "rank 1 on here does not see " in first[1] and "of-rank-0/step-00000001.partial" in first[1]
    assert first[2] == f"{tmp_path}/of-rank-0", "rank 0's counts"
    assert not (tmp_path / "of-rank-1").exists()


def test_the_manifest_is_json_that_anyone_can_check_with_sha256sum(two_steps):
    path = two_steps / "step-00000020"
    about = json.loads((path / "manifest.json").read_text())
    assert about["files"].keys() == {f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2)}
    lines = "".join(f"{f['sha256']}  {path / name}\n" for name, f in about["files"].items())
    subprocess.run(["sha256sum", "--check", "--quiet"], input=lines, text=True, check=True)
    assert manifest.read_manifest(path).metadata == about_of(2, 20)
