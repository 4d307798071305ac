"""What may still be used is the least of what the machine, the control groups above us and ulimit leave."""

from types import SimpleNamespace

import pytest
from manyhands.launch import limits

GIB = 2**30


@pytest.fixture
def groups(tmp_path):
    """Write files of control groups below tmp_path; returns (write, headroom)."""
    own = tmp_path / "cgroup"
    own.write_text("0::/user/job\n")

    def write(folder, **files):
        path = tmp_path / "fs" / folder
        path.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (path / name.replace("__", ".")).write_text(f"{text}\n")

    return write, lambda limit, usage: limits.cgroup_headroom(limit, usage, tmp_path / "fs", own), own


def test_a_group_without_a_limit_leaves_the_one_above_to_decide(groups):
    write, headroom, _ = groups
    write("user/job", memory__max="max", memory__current=GIB)
    assert headroom("memory.max", "memory.current") is None
    write("user", memory__max=8 * GIB, memory__current=3 * GIB)
    assert headroom("memory.max", "memory.current") == 5 * GIB


def test_the_narrowest_group_counts_and_never_goes_below_zero(groups):
    write, headroom, _ = groups
    write("user", pids__max=1000, pids__current=900)
    write("user/job", pids__max=64, pids__current=70)
    assert headroom("pids.max", "pids.current") == 0


def test_version_1_is_read_by_its_own_names(groups):
    write, headroom, own = groups
    own.write_text("4:memory:/job\n9:name=systemd:/\n")
    write("memory/job", memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=GIB)
    write("memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=GIB)
    assert headroom("memory.max", "memory.current") == 3 * GIB


def test_available_memory_is_the_machines_or_the_groups(monkeypatch):
    monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: SimpleNamespace(available=6 * GIB))
    monkeypatch.setattr(limits, "cgroup_headroom", lambda *_: None)
    assert limits.available_memory_bytes() == 6 * GIB
    monkeypatch.setattr(limits, "cgroup_headroom", lambda *_: GIB // 2)
    assert limits.available_memory_bytes() == GIB // 2


def test_available_processes_are_what_ulimit_and_the_group_leave(monkeypatch):
    monkeypatch.setattr(limits, "cgroup_headroom", lambda *_: None)
    monkeypatch.setattr(limits, "own_threads", lambda: 40)
    monkeypatch.setattr(limits.os, "getuid", lambda: 1000)
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (100, 100))
    assert limits.available_processes() == 60
    monkeypatch.setattr(limits, "cgroup_headroom", lambda *_: 7)
    assert limits.available_processes() == 7
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (limits.resource.RLIM_INFINITY,) * 2)
    monkeypatch.setattr(limits, "cgroup_headroom", lambda *_: None)
    assert limits.available_processes() is None
