"""The shipped models write what one can read, are small, and have not read what the lessons validate on."""

import re
from functools import cache

import pytest
import torch
from manyhands.checkpoint import export
from manyhands.checkpoint.export import load_model, read_export, tokenizer_of
from manyhands.data import plays
from manyhands.gpt.model import GPT
from manyhands.gpt.sampling import Sampling
from manyhands.serve.engine import generate

NAMES = ["plays", "plays-draft"]


@pytest.fixture(autouse=True)
def _plays_of_the_environment(monkeypatch):
    """Whatever corpus is asked for: these models were made from the plays, which every set-up installs."""
    monkeypatch.delenv("MANYHANDS_PLAYS", raising=False)


@pytest.fixture(scope="module")
def models(root):
    return {name: load_model(root / "assets" / "models" / f"{name}.safetensors") for name in NAMES}


@cache
def texts():
    """(what the models learned from, the end of Tiny Shakespeare)."""
    every, tiny = plays.all_plays(plays.folder()), plays.tiny_shakespeare(plays.folder()).decode()
    return "\n".join(text for name, text in every.items() if name not in plays.HELD_OUT), tiny[-100_000:]


def words(text):
    return re.findall(r"[a-z']+", text.lower())


def written(model, metadata, count, texts=1):
    tokenizer = tokenizer_of(metadata)
    begin = tokenizer.encode("\n").expand(texts, 1)
    return [tokenizer.decode(ids) for ids in generate(model, begin, count, Sampling(0.8), seed=3)]


@pytest.mark.parametrize(("name", "least"), [("plays", 0.95), ("plays-draft", 0.95)])
def test_nearly_every_word_that_a_model_writes_is_one_of_shakespeares(models, name, least):
    """Of about 100 words, the last one of each text left out, which breaks off. An untrained model reaches 0.16."""
    known = set(words(texts()[0]))
    own = [word for text in written(*models[name], 250, texts=2) for word in words(text)[:-1]]
    assert sum(word in known for word in own) / len(own) >= least, " ".join(own)


@pytest.mark.parametrize(("name", "most"), [("plays", 4.2), ("plays-draft", 4.5)])
def test_of_held_out_text_each_character_is_one_of_four_guesses(models, name, most):
    """Perplexity; untrained it is 65, as many as there are characters."""
    model, metadata = models[name]
    ids = tokenizer_of(metadata).encode(texts()[1][: 40 * 257]).view(40, 257)
    torch.manual_seed(0)
    untrained = GPT(model.config).eval()
    with torch.no_grad():
        loss, none = (one(ids[:, :-1], ids[:, 1:])[1] for one in (model, untrained))
    assert loss.exp() < most and none.exp() > 55


def test_they_speak_the_lessons_alphabet_and_fit_into_ten_megabytes(models, root):
    tiny = plays.tiny_shakespeare(plays.folder()).decode()
    for model, metadata in models.values():
        assert tokenizer_of(metadata).vocab == sorted(set(tiny)) and model.config.vocab_size == 65
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(file.stat().st_size for file in (root / "assets" / "models").iterdir()) < 10e6


def test_what_they_were_made_from_has_nothing_of_the_text_that_validates(root):
    learned, held_out = texts()
    lines = {line for line in held_out.splitlines() if len(line) > 30}
    assert len(lines) > 1000 and len(lines & set(learned.splitlines())) < 5


def test_an_export_in_half_precision_with_fewer_characters_is_the_same_model(models, root, tmp_path, capsys):
    source, text = root / "assets" / "models" / "plays-draft.safetensors", tmp_path / "text.txt"
    text.write_text("to be, or not to be")
    assert export.main([str(source), str(tmp_path / "m.safetensors"), "--half", "--characters", str(text)]) == 0
    assert {tensor.dtype for tensor in read_export(tmp_path / "m.safetensors")[0].values()} == {torch.float16}
    model, metadata = load_model(tmp_path / "m.safetensors")
    few, (whole, about) = tokenizer_of(metadata), models["plays-draft"]
    assert few.vocab == sorted(set("to be, or not"))
    ids = few.encode("to be")[None], tokenizer_of(about).encode("to be")[None]
    kept = tokenizer_of(about).encode("".join(few.vocab))
    with torch.no_grad():
        torch.testing.assert_close(model(ids[0])[0], whole(ids[1])[0][..., kept])
    text.write_text("é")
    with pytest.raises(export.CheckpointError, match="'é' is not among"):
        export.main([str(source), str(tmp_path / "m.safetensors"), "--characters", str(text)])
