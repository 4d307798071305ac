"""Tokens on disk reach every rank unchanged, whoever reads them, and what is damaged is refused by name."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from manyhands.data.shakespeare import DataError
from manyhands.data.token_files import (
    describe_tokens,
    memory_map,
    read_own_file,
    scatter_from_readers,
    share,
    verify_tokens,
    write_own_files,
    write_tokens,
)
from manyhands.measure import wire

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
MPIEXEC = Path(sys.prefix) / "bin" / "mpiexec"
LENGTHS = (0, 1, 2, 3, 7, 1001)


def tokens(length, largest=64, seed=0):
    return torch.randint(0, largest + 1, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{length: path} of files of tokens; those of uneven length have ids of four bytes."""
    folder = tmp_path_factory.mktemp("tokens")
    for length in LENGTHS:
        write_tokens(folder / f"{length}.bin", tokens(length, 64 if length % 2 else 10**9))
    return {length: str(folder / f"{length}.bin") for length in LENGTHS}


# The file


@given(st.one_of(st.lists(st.integers(0, 2**16 - 1), max_size=50), st.lists(st.integers(0, 2**32 - 1), max_size=50)))
@example([2**16 - 1])
@example([2**16])
def test_what_was_written_is_read_in_two_or_four_bytes_per_token(tmp_path_factory, ids):
    path = tmp_path_factory.getbasetemp() / "any.bin"
    written = write_tokens(path, torch.tensor(ids, dtype=torch.long))
    mapped = memory_map(path)
    assert mapped.tolist() == ids
    assert mapped.dtype == (torch.uint16 if max(ids, default=0) < 2**16 else torch.uint32)
    assert verify_tokens(path) == written == describe_tokens(path)
    assert (written.count, written.largest) == (len(ids), max(ids, default=-1))
    content = path.read_bytes()
    assert content == b"".join(i.to_bytes(written.itemsize, "little") for i in ids)
    assert written.sha256 == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ([0, -1], "ids from 0 to 4294967295, not .* from -1 to 0"),
        ([0.5], "not float64 of shape"),
        ([[1, 2]], r"not int64 of shape \(1, 2\)"),
    ],
)
def test_what_is_no_row_of_ids_is_refused_and_the_old_file_stays(tmp_path, ids, sentence):
    write_tokens(tmp_path / "t.bin", [1, 2, 3])
    with pytest.raises(ValueError, match=sentence):
        write_tokens(tmp_path / "t.bin", ids)
    assert memory_map(tmp_path / "t.bin").tolist() == [1, 2, 3]


def flipped(content):
    return content[:101] + bytes([content[101] ^ 1]) + content[102:]


def described(**change):
    return lambda content: json.dumps(json.loads(content) | change).encode()


@pytest.mark.parametrize(
    ("name", "damaged", "sentence"),
    [
        ("t.bin", lambda content: content[:-1], r"t\.bin has 199 bytes, but 100 tokens of 2 bytes were written"),
        ("t.bin.json", None, r"t\.bin\.json cannot be read \(No such file"),
        ("t.bin.json", lambda content: b"{", r"t\.bin\.json cannot be used \(invalid JSON"),
        ("t.bin.json", described(count=50), r"t\.bin has 200 bytes, but 50 tokens"),
    ],
)
def test_a_damaged_file_is_refused_by_its_name(tmp_path, name, damaged, sentence):
    path, file = tmp_path / "t.bin", tmp_path / name
    write_tokens(path, tokens(100))
    content = file.read_bytes()
    file.unlink()
    if damaged is not None:
        file.write_bytes(damaged(content))
    for read in (memory_map, verify_tokens):
        with pytest.raises(DataError, match=sentence):
            read(path)


def test_a_flipped_bit_is_found_by_who_reads_the_whole_file(tmp_path):
    write_own_files(tmp_path, tokens(300), 3)
    path = tmp_path / "tokens-00001-of-00003.bin"
    path.write_bytes(flipped(path.read_bytes()))
    for read in (lambda: verify_tokens(path), lambda: read_own_file(tmp_path, 1, 3)):
        with pytest.raises(DataError, match=r"tokens-00001-of-00003\.bin has changed since it was written"):
            read()
    assert len(read_own_file(tmp_path, 0, 3)) == 100


# Shares


@given(st.integers(0, 10**6), st.integers(1, 300))
def test_shares_are_in_order_differ_by_one_at_most_and_together_are_all(n, world_size):
    parts = [share(n, rank, world_size) for rank in range(world_size)]
    assert parts[0].start == 0 and parts[-1].stop == n
    assert all(left.stop == right.start for left, right in zip(parts, parts[1:], strict=False))
    lengths = [part.stop - part.start for part in parts]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1


@given(st.integers(0, 40), st.integers(1, 9))
def test_files_of_the_ranks_together_are_the_tokens(tmp_path_factory, length, n):
    folder = tmp_path_factory.getbasetemp() / f"own-{length}-{n}"
    write_own_files(folder, tokens(length), n)
    shares = [read_own_file(folder, rank, n).tolist() for rank in range(n)]
    assert [i for part in shares for i in part] == tokens(length).tolist()
    assert shares == [tokens(length)[share(length, rank, n)].tolist() for rank in range(n)]


def test_files_for_another_number_of_ranks_are_refused_not_read_in_part(tmp_path):
    write_own_files(tmp_path, tokens(10), 4)
    assert torch.equal(read_own_file(tmp_path, 3, 4).long(), tokens(10)[8:])
    with pytest.raises(
        DataError, match="no tokens-00001-of-00002.bin for this rank but tokens-00001-of-00004.bin; write"
    ):
        read_own_file(tmp_path, 1, world_size=2)
    with pytest.raises(DataError, match="no tokens-00004-of-00005.bin for this rank but none; write"):
        read_own_file(tmp_path, 4, 5)


# Readers that scatter


def _scattered(ranks, paths, n_readers):
    found = []
    for path in paths:
        with wire.watch() as seen:
            ids = scatter_from_readers(path, n_readers, ranks)
        found.append((str(ids.dtype), ids.tolist(), seen.messages, seen.sent_bytes))
    return found


@pytest.mark.parametrize(("n", "n_readers"), [(1, 1), (3, 2), (4, 1), (4, 4)])
def test_readers_give_every_rank_its_share_in_one_message(pool, files, n, n_readers):
    results = pool.run(n, _scattered, list(files.values()), n_readers)
    for i, (length, path) in enumerate(files.items()):
        whole = memory_map(path)
        of_ranks = [result[i] for result in results]
        assert [ids for _, ids, _, _ in of_ranks] == [whole[share(length, r, n)].tolist() for r in range(n)]
        assert {dtype for dtype, *_ in of_ranks} == {str(whole.dtype)}
        readers = {share(n, reader, n_readers).start for reader in range(n_readers)}
        sent_on = [r for r in range(n) if r not in readers and len(of_ranks[r][1])]
        assert sum(messages for *_, messages, _ in of_ranks) == len(sent_on)
        sent_bytes = sum(sent for *_, sent in of_ranks)
        assert sent_bytes == whole.itemsize * sum(len(of_ranks[r][1]) for r in sent_on)


def _scattered_from(ranks, path_of_rank, n_readers):
    try:
        return scatter_from_readers(path_of_rank[ranks.rank], n_readers, ranks).tolist()
    except ValueError as error:
        return str(error)


def test_ranks_that_do_not_read_need_no_file_and_an_error_of_one_reader_is_every_ranks_error(pool, files, tmp_path):
    def scattered(*paths, n_readers=2):
        return pool.run(4, _scattered_from, paths, n_readers)

    assert [i for part in scattered(files[7], "", files[7], "") for i in part] == memory_map(files[7]).tolist()
    write_tokens(tmp_path / "7.bin", tokens(7, seed=1))
    for errors, sentence in (
        (scattered(files[7], "", "/nowhere/t.bin", ""), "/nowhere/t.bin.json cannot be read (No such file"),
        (scattered(files[7], "", str(tmp_path / "7.bin"), ""), "differs between the nodes of ranks [0, 2]; copy it ag"),
        (scattered(*[files[7]] * 4, n_readers=5), "n_readers=5 of 4 ranks cannot read; use 1 to 4"),
    ):
        assert len(set(errors)) == 1 and sentence in errors[0]


# MPI-IO

MPI_RUN = """
import json, sys
from manyhands.data import token_files
from manyhands.data.token_files import read_mpi_io
from mpi4py import MPI

comm, (folder, paths) = MPI.COMM_WORLD, (sys.argv[1], sys.argv[2:])
def attempt(path):
    try:
        return read_mpi_io(path, comm).tolist()
    except ValueError as error:
        return str(error)
found = {"shares": [attempt(path) for path in paths]}
found["nowhere"] = attempt("/nowhere/t.bin")
described = token_files.describe_tokens(paths[-1])
token_files.describe_tokens = lambda path: described.model_copy(update={"count": 1007})
found["cut behind our back"] = attempt(paths[-1])
with open(f"{folder}/{comm.rank}.json", "w") as file:
    json.dump(found, file)
"""


@pytest.mark.skipif(not MPIEXEC.exists(), reason="needs an MPI: pip install mpich")
def test_mpi_io_gives_every_rank_its_share_and_every_rank_the_same_error(files, tmp_path):
    script, n = tmp_path / "run.py", 2
    script.write_text(MPI_RUN)
    command = [MPIEXEC, "-n", str(n), sys.executable, script, tmp_path, *files.values()]
    environ = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(n)]
    wholes = [memory_map(path) for path in files.values()]
    for rank, found in enumerate(ranks):
        expected = [whole[share(len(whole), rank, n)].tolist() for whole in wholes]
        assert found["shares"] == expected
    path = files[LENGTHS[-1]]
    for name, sentence in [
        ("nowhere", "/nowhere/t.bin.json cannot be read (No such file"),
        ("cut behind our back", f"{path} ends 12 bytes before the share of rank 1 does; copy it again"),
    ]:
        errors = {found[name] for found in ranks}
        assert len(errors) == 1 and errors.pop().startswith(sentence), name
