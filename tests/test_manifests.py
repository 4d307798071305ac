"""Files that say what lies beside them, forged and damaged: what was written is read, or one sentence says why not."""

import copy
import hashlib
import json
import os
import shutil
import struct
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from manyhands.checkpoint.checkpoints import Checkpoints
from manyhands.checkpoint.export import load_model, newest_in, write_export
from manyhands.checkpoint.manifest import MANIFEST, CheckpointError, read_manifest
from manyhands.data.corpus import open_text, verify_text
from manyhands.data.documents import find_files, raw_documents
from manyhands.data.preparation import PrepareConfig, prepare_text
from manyhands.data.shakespeare import DataError
from manyhands.data.token_files import verify_tokens
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.lora import add_lora
from manyhands.gpt.model import GPT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("one_thread")]
ALPHABET = list("\n abcdefg")
CONFIG = GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=4)
BOMB = "~bomb~"  # stands for lists in lists, too deep for any parser


NUMBERS = st.sampled_from([0, -1, 1.5, 10**30, 2**31, 2**53, -0.0, 1e308, float("nan"), float("inf")]) | st.integers()
WORDS = st.sampled_from(["", "\0", "../x", "one rank", "\ud800", "a\nb", "shard 2", BOMB, "9" * 5000]) | st.text()
JUNK = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


def places(values, depth=4):
    """Each (container, key) in nested values, as far down as names differ."""
    keys = list(values) if isinstance(values, dict) else range(min(2, len(values)))
    for key in keys:
        yield values, key
        if depth and isinstance(values[key], dict | list):
            yield from places(values[key], depth - 1)


@st.composite
def forged(draw, values):
    """`values` with one to three places replaced, removed, added to, or exchanged for another's value."""
    values = copy.deepcopy(values)
    for _ in range(draw(st.integers(1, 3))):
        inside, key = draw(st.sampled_from(list(places(values)) or [({"": 0}, "")]))
        how = draw(st.sampled_from(["replace", "replace", "remove", "add", "exchange"]))
        if how == "remove":
            del inside[key]
        elif how == "add" and isinstance(inside, dict):
            inside[draw(WORDS)] = draw(JUNK)
        elif how == "exchange":
            other, name = draw(st.sampled_from(list(places(values))))
            inside[key] = copy.deepcopy(other[name])
        else:
            inside[key] = draw(JUNK)
    return values


@st.composite
def damaged(draw, content):
    """`content` cut, or with some bytes changed, doubled or put in."""
    begin = draw(st.integers(0, len(content) - 1))
    end = draw(st.integers(begin, min(len(content), begin + 40)))
    return content[:begin] + draw(st.sampled_from([b"", b"\xff", b"[", b"9" * 400])) + content[end:]


def signed(values):
    """With the sha256 that fits, as somebody who can write the folder would compute it."""
    if not isinstance(values, dict):
        return values
    values = {name: value for name, value in values.items() if name != "sha256"}
    return values | {"sha256": hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()}


def json_of(values):
    return json.dumps(values).replace(f'"{BOMB}"', "[" * 50_000 + "]" * 50_000).encode()


def sentence_of(action, kind):
    """(what it gave, None), or (None, the sentence): no other error is raised, and nothing with a line break."""
    try:
        return action(), None
    except kind as error:
        assert "\n" not in str(error) and len(str(error)) < 900, str(error)
        return None, str(error)


def gpt(lora=0):
    torch.manual_seed(1)
    model = GPT(CONFIG)
    return add_lora(model, lora, 8.0) if lora else model


def metadata_of(lora=0):
    corpus = {"name": "test", "sha256": "0" * 64, "vocab_size": len(ALPHABET), "alphabet": ALPHABET}
    options = {"train": {"steps": 3, "seed": 1}, "data": {"folder": None}, "config": None}
    return {
        "step": 3, "config": asdict(CONFIG), "corpus": corpus, "val_loss": 2.5, "tokens": 100, "options": options,
        "layout": "shard 2", "world_size": 2, "loss_scale": {"scale": 2.0**16, "good_steps": 1},
        "lora": {"rank": lora, "alpha": 8.0} if lora else None, "alignment": {"method": "sft"},
    }  # fmt: skip


def save(ranks, folder):
    for lora in (0, 2):
        checkpoints, mesh = Checkpoints(folder / str(lora), ranks), init_device_mesh("cpu", (ranks.world_size,))
        named = gpt(lora).named_parameters()
        tensors = {f"model.{name}": distribute_tensor(p.detach(), mesh, [Shard(0)]) for name, p in named}
        checkpoints.save(3, tensors, metadata_of(lora), val_loss=2.5)
        checkpoints.close()


@pytest.fixture(scope="module")
def written(pool, tmp_path_factory):
    """{name: what `load_model` reads}: two checkpoints of two ranks, one with adapters, and an export."""
    folder = tmp_path_factory.mktemp("written")
    pool.run(2, save, folder)
    write_export(dict(gpt().named_parameters()), metadata_of(), folder / "m.safetensors")
    return {"plain": folder / "0/step-00000003", "lora": folder / "2/step-00000003", "export": folder / "m.safetensors"}


def manifest_of(path):
    return path / MANIFEST if path.is_dir() else path.with_suffix(".json")


def copied(written, which, tmp_path_factory):
    source, target = written[which], tmp_path_factory.mktemp("copy")
    if source.is_dir():
        return shutil.copytree(source, target / source.name)
    for file in source.parent.glob(f"{source.stem}.*"):
        shutil.copy(file, target)
    return target / source.name


def weights_of(model):
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def read_or_refused(path, content, right):
    """Nothing but the right weights, in a model of the sizes that the file says."""
    manifest_of(path).write_bytes(content)
    found, sentence = sentence_of(lambda: load_model(path), CheckpointError)
    if sentence is None:
        model, metadata = found
        said = json.loads(content)["metadata"]
        assert model.config == GPTConfig(**said["config"]) == GPTConfig(**metadata["config"])
        assert len(metadata["corpus"]["alphabet"]) <= model.config.vocab_size
        assert 0 <= metadata["step"] < 2**53 and type(metadata["step"]) is int
        if path.is_dir():
            assert read_manifest(path).step == metadata["step"]
        theirs = weights_of(model)
        assert theirs.keys() == right.keys() and all(torch.equal(theirs[name], right[name]) for name in right)
    return sentence


@pytest.mark.parametrize("which", ["plain", "lora", "export"])
def test_a_forged_or_damaged_manifest_gives_its_model_or_one_sentence(which, written, tmp_path_factory):
    path = copied(written, which, tmp_path_factory)
    right, content = weights_of(load_model(path)[0]), manifest_of(path).read_bytes()

    @settings(max_examples=100)
    @given(forged(json.loads(content)) | damaged(content), st.booleans())
    def attack(found, sign):
        if not isinstance(found, bytes):
            found = json_of(signed(found) if sign else found)
        read_or_refused(path, found, right)

    attack()


CONTRADICTIONS = {  # what is said, and what is wrong in metadata or above; the sha256 fits
    "format: 'manyhands checkpoint 1' was found, and 'manyhands checkpoint 2' is": {"format": "manyhands checkpoint 1"},
    r"files...+elsewhere.safetensors": {"files": {"../elsewhere.safetensors": {"bytes": 1, "sha256": "0" * 64}}},
    "layout: string should match pattern": {"layout": "shard 2\n\x1b[2J"},
    "config: input should be": {"config": "nano"},
    "corpus.sha256: field required": {"corpus": {"name": "mine"}},
    "metadata.step is 4, and step is 3": {"step": 4},
    "metadata.val_loss is 2.0, and val_loss is 2.5": {"val_loss": 2.0},
    "step: input should be less than": {"step": 10**30},
    "tokens: input should be greater": {"tokens": -1},
    "corpus.alphabet: a token stands in it twice": {"corpus": {"name": "x", "sha256": "y", "alphabet": ["a", "a"]}},
    "corpus.vocab_size is 9, with an alphabet of 2, config.vocab_size 11": {
        "corpus": {"name": "x", "sha256": "y", "alphabet": ["a", "b"], "vocab_size": 9}
    },
    "an alphabet and a vocabulary": {"corpus": {"name": "x", "sha256": "y", "alphabet": ["a"], "vocabulary": {}}},
    "corpus.vocab_size is 99, with an alphabet of 0, config.vocab_size 11": {
        "corpus": {"name": "x", "sha256": "y", "vocab_size": 99}
    },
    "layout is shard 2, and world_size is 3": {"world_size": 3},
    "loss_scale.scale: input should be greater than 0": {"loss_scale": {"scale": 0.0, "good_steps": 1}},
    "options.train: input should be": {"options": {"train": 3}},
    "alignment.method: field required": {"alignment": {}},
    "lora.rank: input should be greater": {"lora": {"rank": 0, "alpha": 1.0}},
    "with adapters of rank None": {"lora": {"rank": 2, "alpha": 1.0}},
}


@pytest.mark.parametrize("said", CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself_is_refused(said, written, tmp_path_factory):
    path = copied(written, "plain", tmp_path_factory)
    values = json.loads(manifest_of(path).read_text())
    for name, wrong in CONTRADICTIONS[said].items():
        (values if name in ("format", "files") else values["metadata"])[name] = wrong
    manifest_of(path).write_bytes(json_of(signed(values)))
    with pytest.raises(CheckpointError, match=said):
        load_model(path)


def test_adapters_of_another_rank_than_is_said_are_refused(written, tmp_path_factory):
    path = copied(written, "lora", tmp_path_factory)
    for lora in ({"rank": 4, "alpha": 8.0}, None):
        values = json.loads(manifest_of(written["lora"]).read_text())
        values["metadata"]["lora"] = lora
        manifest_of(path).write_bytes(json_of(signed(values)))
        with pytest.raises(CheckpointError, match=r"with adapters of rank \{2\}"):
            load_model(path)


def rewritten(path, change):
    """Change the header of the first shard, `change(header, sharding)` in place, so that all hashes fit."""
    file = min(path.glob("*.safetensors"))
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    about = header.get("__metadata__", {})
    sharding = json.loads(about.get("DCP_SHARDING_INFO", "{}"))
    header, sharding = change(header, sharding)
    if isinstance(header, dict) and isinstance(about := header.get("__metadata__"), dict):
        about["DCP_SHARDING_INFO"] = json_of(sharding).decode()
    new = json_of(header)
    file.write_bytes(struct.pack("<Q", len(new)) + new + content[8 + size :])
    about = {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    values = json.loads((path / MANIFEST).read_text())
    values["files"][file.name] = about
    (path / MANIFEST).write_bytes(json_of(signed(values)))


def test_forged_headers_of_shards_are_one_sentence(written, tmp_path_factory):
    path = copied(written, "plain", tmp_path_factory)
    file = min(path.glob("*.safetensors"))
    content, manifest, found = file.read_bytes(), (path / MANIFEST).read_bytes(), []
    rewritten(path, lambda header, sharding: found.extend([header, sharding]) or (header, sharding))

    @settings(max_examples=60)
    @given(st.data())
    def attack(data):
        file.write_bytes(content)
        (path / MANIFEST).write_bytes(manifest)
        rewritten(path, lambda *both: [data.draw(forged(one)) if data.draw(st.booleans()) else one for one in both])
        sentence_of(lambda: load_model(path), CheckpointError)

    attack()


def test_a_tensor_of_which_a_piece_is_missing_or_there_twice_is_refused(written, tmp_path_factory):
    """DCP would leave such a place as it found it: with what was in memory, or in a fresh model."""
    for which in ("missing", "twice"):
        path = copied(written, "plain", tmp_path_factory)
        values = json.loads((path / MANIFEST).read_text())
        first, second = sorted(path.glob("*.safetensors"))
        if which == "missing":
            first.unlink()
            del values["files"][first.name]
        else:
            again = first.with_name("shard-00003-model-00001-of-00001.safetensors")
            shutil.copy(first, again)
            values["files"][again.name] = values["files"][first.name]
        (path / MANIFEST).write_bytes(json_of(signed(values)))
        with pytest.raises(CheckpointError, match=r"does not hold all of model\.[a-z0-9_.]+, or some of it twice"):
            load_model(path)


@pytest.mark.parametrize("kind", ["fifo", "folder", "large"])
def test_what_is_no_file_of_a_sensible_size_is_not_waited_for(kind, written, tmp_path_factory):
    for which in ("plain", "export"):
        for name in ("manifest", "weights"):
            path = copied(written, which, tmp_path_factory)
            file = manifest_of(path) if name == "manifest" else min(path.glob("shard*")) if path.is_dir() else path
            put(kind, file)
            with pytest.raises(CheckpointError, match=r"cannot be read|is missing|was written with"):
                load_model(path)


def put(kind, file):
    """Something else under the name of `file`."""
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        with open(file, "wb") as sparse:
            sparse.truncate(2**40)


@pytest.fixture
def nobody():
    """Who may read none of our files: root may read everything."""
    os.seteuid(65534)
    yield
    os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_what_may_not_be_read_is_a_sentence(written, texts, tmp_path, nobody):
    path = written["plain"]
    reads = (load_model, path), (load_model, path.parent), (load_model, written["export"]), (newest_in, path.parent)
    for read, source in (*reads, (open_text, texts / "char"), (verify_text, texts / "char")):
        _, sentence = sentence_of(lambda: read(source), (CheckpointError, DataError))  # noqa: B023
        assert "cannot be read (Permission denied)" in sentence
    for name in (tmp_path, tmp_path / "a.txt"):
        _, sentence = sentence_of(lambda: list(raw_documents(find_files([name]))), DataError)  # noqa: B023
        assert sentence == f"{name} cannot be read (Permission denied); check the name, or leave it out"


def prepare(ranks, folder):
    for kind in ("char", "bpe"):
        source = folder / "a.txt"
        source.write_text(
            "\n\n\n".join(f"{'bcd'[i]} some words that nobody else has {i}" * 9 for i in range(3)), "utf-8"
        )
        config = PrepareConfig(tokenizer=kind, vocab_size=300, shard_bytes=300, near=2)
        prepare_text([source], folder / kind, config, ranks, tell=lambda text: None)


@pytest.fixture(scope="module")
def texts(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    pool.run(1, prepare, folder)
    return folder


@pytest.mark.parametrize("kind", ["char", "bpe"])
@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json", "train-00000.bin.json"])
def test_a_forged_file_of_a_prepared_text_gives_the_text_or_one_sentence(kind, name, texts, tmp_path):
    folder = shutil.copytree(texts / kind, tmp_path / "text")
    manifest, content = (folder / "manifest.json").read_bytes(), (folder / name).read_bytes()
    right = open_text(folder)
    train, val = right.train_ids[:], right.val_ids[:]
    first = right.train_ids.files[0].model_copy(update={"largest": 0})

    @settings(max_examples=60)
    @given(forged(json.loads(content)) | damaged(content), st.booleans())
    def attack(found, sign):
        (folder / "manifest.json").write_bytes(manifest)
        if name == "manifest.json" and isinstance(found, dict) and sign:
            found = signed(found)
        (folder / name).write_bytes(found if isinstance(found, bytes) else json_of(found))
        if name == "train-00000.bin.json":  # others read such a file by itself
            tokens, sentence = sentence_of(lambda: verify_tokens(right.train_ids.files[0].path), DataError)
            assert sentence or tokens.model_copy(update={"largest": 0}) == first
            return
        if name == "tokenizer.json" and sign:
            values = json.loads(manifest)
            values["tokenizer"]["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
            (folder / "manifest.json").write_bytes(json_of(signed(values)))
        text, sentence = sentence_of(lambda: open_text(folder), DataError)
        if sentence is None:
            assert torch.equal(text.train_ids[:], train) and torch.equal(text.val_ids[:], val)
            assert len(text.vocab) == len(right.vocab) and text.separator == right.separator

    attack()
