"""What killed ranks leave on a node goes at the next start, and nothing else does."""

import mmap
import os
import subprocess
import sys
import time

from manyhands.notebook import engine_processes as left_over


def test_folders_of_kernels_that_are_gone_are_removed_and_no_others(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name in (f"{left_over.OURS}{ended.pid}-ab", f"{left_over.OURS}{os.getpid()}-ab", "manyhands-elsewhere-1-ab"):
        (tmp_path / name / "profile").mkdir(parents=True)
    (tmp_path / f"{left_over.OURS}x").mkdir()
    assert left_over.sweep_folders(tmp_path) == [tmp_path / f"{left_over.OURS}{ended.pid}-ab"]
    assert len(list(tmp_path.iterdir())) == 3


def test_segments_of_mpi_go_when_they_are_old_and_nobody_maps_them(tmp_path):
    long_ago = time.time() - 2 * left_over.OLD_S
    for name in ("mpich_shm_1_0", "mpich_shm_2_0", "mpich_shm_3_0", "torch_1"):
        (tmp_path / name).write_bytes(b"x" * 8192)
        if name != "mpich_shm_3_0":  # a young one: its ranks may be starting
            os.utime(tmp_path / name, (long_ago, long_ago))
    with open(tmp_path / "mpich_shm_2_0", "r+b") as file, mmap.mmap(file.fileno(), 0):
        os.utime(tmp_path / "mpich_shm_2_0", (long_ago, long_ago))
        assert left_over.sweep_shared_memory(tmp_path) == [tmp_path / "mpich_shm_1_0"]
    assert left_over.sweep_shared_memory(tmp_path) == [tmp_path / "mpich_shm_2_0"]
