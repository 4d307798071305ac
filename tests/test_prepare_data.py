"""A text of one's own becomes tokens: what is read, refused, dropped and kept, and that ranks make no difference."""

import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from manyhands.course import folders
from manyhands.data import preparation
from manyhands.data.corpus import open_text, read_manifest, verify_text
from manyhands.data.documents import (
    Quality,
    content_hash,
    copies_among,
    find_files,
    minhash,
    normalised,
    raw_documents,
    text_of,
)
from manyhands.data.preparation import PrepareConfig, prepare_text, shown_report
from manyhands.data.shakespeare import DataError
from manyhands.data.token_files import memory_map
from manyhands.data.tokenizer import SEPARATOR, characters_of, tokenizer_from, train_bpe
from rank_pool import run_on_ranks

ROOT = Path(__file__).resolve().parents[1]
WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in ("n", "r", "st", "ll", "ck")]


def essay(seed, words=150):
    """A document of lines that nobody else writes."""
    draw = random.Random(seed)
    lines = [" ".join(draw.choices(WORDS, k=10)) for _ in range(words // 10)]
    return "\n".join(lines)


TEXTS = [essay(i) for i in range(20)] + ["Grüße, 你好! It's 1234.\n\n  x"] * 2 + [" 1234" * 3000]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, 400)


def documents(path, **config):
    return [(raw.line, text_of(raw)) for raw in raw_documents([path], **config)]


@pytest.mark.parametrize("packed", [False, True])
def test_a_plain_text_is_cut_where_so_many_blank_lines_follow_each_other(tmp_path, packed):
    content = b"\xef\xbb\xbf\n\none\r\nmore\r\n\r\nstill one\n\n \t\ntwo\n\n\n\n\nthree"
    path = tmp_path / ("a.txt.gz" if packed else "a.txt")
    path.write_bytes(gzip.compress(content) if packed else content)
    assert documents(path) == [(3, "one\nmore\n\nstill one"), (9, "two"), (14, "three")]
    assert len(documents(path, blank_lines=1)) == 4
    assert len(documents(path, blank_lines=0)) == 1


def test_json_lines_give_the_named_field_of_each_line(tmp_path):
    path = tmp_path / "posts.jsonl.gz"
    lines = [{"id": i, "body": f"text {i}\n\n\nsame document"} for i in range(2)]
    path.write_bytes(gzip.compress("\n\n".join(map(json.dumps, lines)).encode()))
    assert documents(path, text_field="body") == [(i + i + 1, lines[i]["body"]) for i in range(2)]


def test_a_folder_stands_for_its_text_files_in_the_order_of_their_paths(tmp_path):
    for name in ("b.txt", "a/z.md", "a/k.jsonl.gz", "picture.png", "data.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = [path.relative_to(tmp_path).as_posix() for path in find_files([tmp_path])]
    assert found == ["a/k.jsonl.gz", "a/z.md", "b.txt"]


BAD = {
    "a zero": (b"text\n\n\n\nmore \0", "a.txt", r"a.txt is not text: byte 13 is zero; extract its text first"),
    "Latin-1": ("Grüße\n".encode("latin1"), "a.txt", r"not UTF-8: byte 2 is 0xfc; .*iconv -f latin1 -t utf-8"),
    "UTF-16": ("text".encode("utf-16"), "a.txt", r"a.txt is UTF-16, not UTF-8; convert it: iconv -f UTF-16"),
    "blank": (b" \n\n\n", "a.txt", r"a.txt is empty; leave it out"),
    "cut gzip": (gzip.compress(os.urandom(500))[:-20], "a.txt.gz", r"a.txt.gz cannot be unpacked \(.*again"),
    "no JSON": (b'{"text": "x"}\nhello\n', "a.jsonl", r"a.jsonl line 2 is not JSON \(.*rename the file to .txt"),
    "Windows-1252": (b"the \x93smart\x94 quotes\n", "a.txt", r"is 0x93; if it is Windows-1252, .*iconv -f cp1252"),
    "both": (b"Gr\xfc\xdfe \x96 caf\xe9\n", "a.txt", r"byte 2 is 0xfc; if it is Windows-1252, .*iconv -f cp1252"),
    "an array": (b'[{"text": "x"}]\n', "a.jsonl", r"line 1 is a JSON array, not a record; jq -c '.\[\]' .*a.jsonl >"),
    "an array on lines": (b'[\n{"text": "x"}\n]\n', "a.jsonl", r"line 1 begins a JSON array; jq -c '\.\[\]'"),
    "no text": (b'{"body": "x", "id": 3}', "a.jsonl", r"line 1 has no text in its field 'text' \(it has: body, id\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_one_sentence_with_the_cure(case, tmp_path):
    content, name, sentence = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=sentence) as raised:
        documents(tmp_path / name)
    assert "\n" not in str(raised.value)


def test_a_name_that_is_not_there_and_a_folder_without_text_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"nowhere.txt cannot be read \(No such file or directory\); check the name"):
        find_files([tmp_path / "nowhere.txt"])
    with pytest.raises(DataError, match=r"is a folder without text files \(.txt, .*name the files themselves"):
        find_files([tmp_path])


@pytest.mark.parametrize(
    ("why", "text"),
    [
        ("too short", "Too few words."),
        ("too short", " \n" * 200),
        ("few letters", "12.5 | 13.9 | 40.0 | 33\n" * 3 + "3.1415926 " * 20),
        ("repeated lines", "All rights reserved by us.\n" * 6 + essay(1, 20)),
        ("long runs", essay(2, 20) + "\n" + "a" * 100),
        (None, essay(3)),
        # half of these are marks on letters
        (None, "पृथ्वी सूर्य के चारों ओर घूमती है और चन्द्रमा पृथ्वी के चारों ओर। " * 4),
        (None, "".join(chr(0x4E00 + i) for i in range(150))),
        (None, "def f():\n" + "".join(" " * 30 + f"return {word}\n" for word in WORDS[:30])),
    ],
)
def test_each_rule_drops_what_it_is_for_and_nothing_else(why, text):
    assert Quality().why_dropped(text) == why


def changed(text, count, seed):
    """`text` with `count` of its words replaced."""
    draw, words = random.Random(seed), text.split(" ")
    for place in draw.sample(range(len(words)), count):
        words[place] = "elsewhere"
    return " ".join(words)


def test_planted_copies_are_found_and_everything_else_stays():
    texts = [essay(i, 400) for i in range(60)]
    planted = {60 + i: (i, changed(texts[i], 3, i)) for i in range(0, 60, 3)}
    texts += [planted[i][1] if i in planted else essay(i, 400) for i in range(60, 118)]
    texts += [texts[7].replace(" ", "  \n"), texts[9].upper()]
    clean = [normalised(text) for text in texts]
    found = copies_among(list(map(content_hash, clean)), np.stack(list(map(minhash, clean))))
    expected = {place: (original, "near copy") for place, (original, _) in planted.items()}
    assert found == expected | {118: (7, "exact copy"), 119: (9, "near copy")}


def test_a_signature_is_the_same_on_every_machine():
    found = minhash("to be or not to be that is the question")
    assert found[:3].tolist() == [312500760, 146977432, 1321509412]


@given(st.text())
@example("\x00 a\u00a0\r\n\ufeff\U0001f600\x00")
def test_bpe_gives_any_unicode_back(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text


@settings(max_examples=300)
@given(st.text(alphabet=st.one_of(st.sampled_from(" \n\t\r'\u00a0\u2003aZ1239_.s"), st.characters(codec="utf-8"))))
@example("4412 it's 12")
def test_the_pieces_that_we_cut_are_those_that_the_library_cuts(bpe, text):
    assert bpe.encode(text).tolist() == bpe.inner.encode(text).ids


@given(st.lists(st.text(), min_size=1, max_size=4))
def test_characters_give_back_every_text_they_were_made_from(texts):
    tokenizer = characters_of([*texts, "ab"])
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.separator not in tokenizer.encode(text)


def test_a_text_that_spells_the_separator_has_none(bpe):
    for tokenizer in (bpe, characters_of([SEPARATOR])):
        ids = tokenizer.encode(f"one{SEPARATOR}two" if tokenizer is bpe else SEPARATOR)
        assert tokenizer.separator not in ids
        assert SEPARATOR in tokenizer.decode(ids)
        assert tokenizer.decode([tokenizer.separator]) == SEPARATOR


def test_the_same_texts_give_the_same_merges_and_a_tokenizer_survives_its_file(bpe):
    again = train_bpe(TEXTS, 400)
    assert again.content == bpe.content
    copy = tokenizer_from(json.loads(json.dumps(bpe.content)))
    assert copy.encode(essay(99)).tolist() == bpe.encode(essay(99)).tolist()
    assert len(bpe.vocab) == 400
    assert bpe.separator == 0


def test_the_merges_are_the_golden_ones():
    tokenizer = train_bpe(["the cat and the hat and that bat sat", "the bat is that hat"], 257 + 8)
    merges = [a + b for a, b in tokenizer.content["model"]["merges"]]
    assert merges == ["at", "th", "Ġth", "an", "bat", "hat", "Ġan", "Ġbat"], "Ġ is the space"
    assert tokenizer.encode("that cat").tolist() == [258, 257, 221, 67, 257]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Plain text and packed JSON lines with copies of it, and documents that are dropped."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "book.txt").write_text("\n\n\n".join(essay(i) for i in range(30)), "utf-8")
    posts = [essay(i) for i in range(25, 55)] + [changed(essay(3), 1, 3), "short", "0 " * 200]
    content = "\n".join(json.dumps({"text": f"{text}\nÆsop {i}" if i > 40 else text}) for i, text in enumerate(posts))
    (folder / "posts.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    return folder


CONFIG = PrepareConfig(vocab_size=300, shard_bytes=9000, validation=0.2)


def prepare(ranks, files, folder, config=CONFIG, replace=False):
    return prepare_text([files], folder, config, ranks, replace, tell=lambda text: None)


def all_bytes(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in ("report.png", ".writer")}


@pytest.fixture(scope="module")
def prepared(pool, files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "mine"
    return folder, pool.run(1, prepare, files, folder)[0]


@pytest.mark.parametrize("n_ranks", [pytest.param(2, marks=pytest.mark.full), 4])
def test_any_number_of_ranks_writes_the_same_bytes_and_merges(pool, files, prepared, tmp_path, n_ranks):
    reports = pool.run(n_ranks, prepare, files, tmp_path / "mine")
    assert reports == [prepared[1]] * n_ranks
    assert all_bytes(tmp_path / "mine") == all_bytes(prepared[0])


def test_the_report_says_what_was_dropped_and_why_with_an_example(prepared):
    folder, report = prepared
    assert {why: count for why, count in report["documents"].items() if count} == {
        "kept": 55, "too short": 1, "few letters": 1, "exact copy": 5, "near copy": 1
    }  # fmt: skip
    example = report["examples"]["near copy"]
    assert (example["file"], example["line"], example["like"]["file"]) == ("posts.jsonl.gz", 31, "book.txt")
    text = shown_report(report)
    assert "such as posts.jsonl.gz line 32: 'short'" in text
    assert f"train:      {report['splits']['train']['documents']} documents, " in text
    alone = {"train": report["splits"]["train"] | {"documents": 1}}
    assert "train:      1 document, " in shown_report(report | {"splits": alone})
    assert json.loads((folder / "report.json").read_text())["documents"] == report["documents"]
    assert (folder / "report.png").read_bytes()[:4] == b"\x89PNG"


def test_the_tokens_are_the_kept_documents_each_begun_by_the_separator(prepared, files):
    folder, report = prepared
    text = open_text(folder)
    found = []
    for row in (text.train_ids, text.val_ids):
        parts = text.decode(row[:]).split(SEPARATOR)
        assert parts[0] == ""
        found += parts[1:]
    raws = list(raw_documents(find_files([files])))
    kept = [text_of(raw) for i, raw in enumerate(raws) if i < 30 or 35 <= i < 60]
    assert sorted(found) == sorted(kept)
    assert len(list(folder.glob("train-*.bin"))) > 2
    assert read_manifest(folder).splits.validation.documents == report["splits"]["validation"]["documents"] > 3
    assert verify_text(folder) == 2 * (len(text.train_ids) + len(text.val_ids))


def damaged(prepared, tmp_path, name, change):
    folder = shutil.copytree(prepared[0], tmp_path / "copy")
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    return folder


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("train-00001.bin", lambda b: b[:-2], r"train-00001.bin has \d+ bytes, but .* copy it again"),
        ("tokenizer.json", lambda b: b + b" ", r"tokenizer.json cannot be used \(it has changed since it was"),
        ("manifest.json", lambda b: b[:-9], r"manifest.json cannot be used"),
    ],
)  # fmt: skip
def test_a_damaged_folder_is_refused_when_it_is_opened(prepared, tmp_path, name, change, sentence):
    with pytest.raises(DataError, match=sentence):
        open_text(damaged(prepared, tmp_path, name, change))


def test_a_flipped_byte_is_found_by_reading_everything(prepared, tmp_path):
    folder = damaged(prepared, tmp_path, "train-00001.bin", lambda b: bytes([b[0] ^ 1]) + b[1:])
    open_text(folder)
    with pytest.raises(DataError, match=r"train-00001.bin has changed since it was written"):
        verify_text(folder)


@pytest.mark.parametrize("left", [0, 1, 40])
def test_a_shard_that_is_cut_while_it_is_read_is_a_sentence(prepared, tmp_path, left):
    """Under a memory map it would end the process, with SIGBUS and no word."""
    folder = shutil.copytree(prepared[0], tmp_path / "copy")
    ids, first = open_text(folder).train_ids, len(memory_map(folder / "train-00000.bin"))
    window = torch.arange(first - 3, first + 30)
    ids[window]
    os.truncate(folder / "train-00001.bin", left)
    with pytest.raises(
        DataError, match=r"train-00001.bin ends before token 30 of [\d,]+: it was cut since this run ope"
    ):
        ids[window]


def test_a_text_that_is_written_anew_under_a_run_does_not_change_what_the_run_reads(prepared, tmp_path):
    folder = shutil.copytree(prepared[0], tmp_path / "copy")
    ids = open_text(folder).train_ids
    before = ids[:]
    for file in folder.glob("*.bin"):
        file.with_suffix(".new").write_bytes(bytes(file.stat().st_size))
        file.with_suffix(".new").replace(file)
    assert torch.equal(ids[:], before)


def refusals(ranks, files, tmp_path):
    """What each of two configurations is answered, on this rank."""
    said = []
    for names, folder in ((files, tmp_path / "full"), (tmp_path / "bad.txt", tmp_path / "new")):
        with pytest.raises(DataError) as raised:
            prepare(ranks, names, folder)
        said.append(str(raised.value))
    return said


def test_what_cannot_be_prepared_is_the_same_sentence_on_all_ranks(pool, files, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("my own")
    (tmp_path / "bad.txt").write_bytes(essay(1).encode() + b"\n\n\n" + essay(2).encode() + b"\xff")
    one, *others = pool.run(2, refusals, files, tmp_path)
    assert others == [one]
    assert one[0].endswith("holds something already; name another one with --to")
    assert "bad.txt is not UTF-8: byte" in one[1]  # only rank 1 has decoded it
    assert (tmp_path / "full" / "mine.txt").exists()
    assert not list(tmp_path.glob("*/manifest.json"))


def test_a_text_is_written_anew_only_where_that_is_asked_for(pool, files, tmp_path):
    folder = tmp_path / "mine"
    pool.run(1, prepare, files, folder)
    (folder / "notes.txt").write_text("kept")
    with pytest.raises(AssertionError, match="--replace writes it anew"):
        pool.run(1, prepare, files, folder)
    pool.run(1, prepare, files, folder, PrepareConfig(tokenizer="char"), True)
    assert open_text(folder).tokenizer.kind == "char"
    assert len(list(folder.glob("train-*.bin"))) == 1
    assert (folder / "notes.txt").read_text() == "kept"


def test_what_a_killed_preparation_left_is_written_anew_without_a_word(pool, files, prepared, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in (".writer", ".train-00000.bin.4711.0a1b2c3d", "train-00001.bin", "tokenizer.json"):
        (folder / name).write_text("half")
    pool.run(1, prepare, files, folder)
    assert all_bytes(folder) == all_bytes(prepared[0])


def test_a_file_of_somebody_elses_that_is_named_like_ours_stays(pool, files, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("theirs")
    for _ in range(2):
        with pytest.raises(AssertionError, match="holds something already; --replace writes it anew"):
            pool.run(1, prepare, files, tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["tokenizer.json"]


def refused_beside_another(ranks, files, folder):
    folders.PATIENCE_S = 0.1
    with pytest.raises(DataError) as raised:
        prepare(ranks, files, folder, CONFIG, True)
    return str(raised.value)


def test_two_preparations_do_not_write_into_one_folder(files, prepared, tmp_path):
    folder = shutil.copytree(prepared[0], tmp_path / "copy")
    with folders.lock(folder, "process 7 on host7"):
        for sentence in run_on_ranks(2, refused_beside_another, files, folder):
            assert sentence.startswith(
                f"{folder} cannot be written (another program writes there until it ends: process"
            )
    assert all_bytes(folder) == all_bytes(prepared[0])


def prepared_without_a_picture(ranks, files, folder):
    preparation._draw = lambda report, path: 1 / 0
    return prepare(ranks, files, folder)


def test_a_picture_that_cannot_be_drawn_costs_no_prepared_text(files, prepared, tmp_path):
    run_on_ranks(1, prepared_without_a_picture, files, tmp_path / "mine")
    assert all_bytes(tmp_path / "mine") == all_bytes(prepared[0]) and verify_text(tmp_path / "mine") > 0
    assert not (tmp_path / "mine" / "report.png").exists()


@pytest.mark.ranks
def test_names_that_are_no_utf_8_and_a_matplotlibrc_that_wants_latex_cost_nothing(root, tmp_path):
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    texts, folder = tmp_path / os.fsdecode(b"t\xe9"), tmp_path / os.fsdecode(b"to\xe9")
    texts.mkdir()
    for i in range(3):
        (texts / os.fsdecode(b"caf\xe9%d.txt" % i)).write_text(f"{essay(i)}\n\n\n\nshort\n")
    environ = {**os.environ, "MATPLOTLIBRC": str(tmp_path), "PATH": str(Path(sys.executable).parent)}
    words = [sys.executable, root / "scripts" / "prepare_data.py", texts, "--to", folder]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "6 documents, 3 of them kept" in done.stdout, done.stderr
    assert "such as caf.0.txt line" in done.stdout and "cannot be drawn" not in done.stdout
    assert verify_text(folder) > 0 and (folder / "report.png").read_bytes()[:4] == b"\x89PNG"
    report = json.loads((folder / "report.json").read_text("utf-8"))
    assert [about["name"] for about in report["files"]] == sorted(path.name for path in texts.iterdir())


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("a.txt", "--to FOLDER says where"),
        ("a.txt --to x --vocab-size 200", "vocab_size=200 is too small; use at least 257"),
        ("a.txt --to x --vocab-size 500 --tokenizer char", "--vocab-size is for bpe"),
        ("a.txt --to x --validation 1", "validation=1.0 is too large; use less than 1"),
        ("a.txt --to x --near 0.2", "near=0.2 is too small; use at least 0.5"),
        ("a.txt --to x", None),
        ("", None),
    ],
)
def test_a_flag_that_makes_no_sense_is_a_sentence(program, flags, sentence):
    prepare_data = program("prepare_data")
    said = prepare_data.wrong_value(prepare_data.arguments_of(flags.split()))
    assert said is None if sentence is None else re.match(sentence, said)


@pytest.mark.ranks
def test_mpiexec_prepares_what_one_process_would(files, prepared, tmp_path):
    command = [
        str(Path(sys.executable).parent / "mpiexec"), "-n", "2", sys.executable, "scripts/prepare_data.py", str(files),
        "--to", str(tmp_path / "mine"), "--vocab-size", "300", "--validation", "0.2",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("exact copy") == 1
    assert f"train.py --data.folder {tmp_path / 'mine'}" in done.stdout
    assert (tmp_path / "mine" / "tokenizer.json").read_bytes() == (prepared[0] / "tokenizer.json").read_bytes()


def test_the_plays_of_the_course_become_a_text_with_a_document_for_each(root, tmp_path):
    """Three plays, so that it takes a moment; the rules that make speeches of them are tested in test_data.py.

    The Tempest validates, as it does in the lessons: a model that has read it would look better there than it is.
    """
    plays = tmp_path / "plays"
    for name in ("tragedies/hamlet", "comedies/as-you-like-it", "romances/the-tempest"):
        path = plays / f"{name}.md"
        path.parent.mkdir(parents=True)
        path.write_text("# Title\n\n**HAMLET**\n\n" + f"To be, or not to be: {name}.\n" * 9)
    command = [sys.executable, "scripts/prepare_data.py", "--corpus", "plays", "--tokenizer", "char"]
    environ = os.environ | {"MANYHANDS_PLAYS": str(plays)}
    flags = ["--to", str(tmp_path / "text"), "--max-repeated", "1", "--near", "2"]
    done = subprocess.run([*command, *flags], cwd=root, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "text" / "report.json").read_text())
    assert report["documents"]["kept"] == 3
    names = ["comedies-as-you-like-it.txt", "romances-the-tempest.txt", "tragedies-hamlet.txt"]
    assert [file["name"] for file in report["files"]] == names
    text = open_text(tmp_path / "text")
    assert text.decode(text.val_ids[:]).count("tempest") == 9 and "tempest" not in text.decode(text.train_ids[:])
