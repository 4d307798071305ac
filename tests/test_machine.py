"""What may still be used is the least of what the machine, the control groups above us and ulimit leave; and a login
node is told from a laptop and from a compute node, by name, by scheduler, or because somebody said so."""

import math

import pytest
from manyhands.launch import machine

GIB = 2**30


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(folder, memory__max=1): files of control groups; we are in /user/job."""
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("0::/user/job\n")

    def write_files(folder, **files):
        (tmp_path / "fs" / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / "fs" / folder / name.replace("__", ".")).write_text(f"{text}\n")

    return write_files


def test_a_group_without_a_limit_leaves_the_one_above_to_decide(write):
    write("user/job", memory__max="max", memory__current=GIB, cpu__max="max 100000")
    assert machine.cgroup_headroom("memory.max", "memory.current") is None and machine.quota_cores() == math.inf
    write("user", memory__max=8 * GIB, memory__current=3 * GIB, cpu__max="150000 100000")
    assert machine.cgroup_headroom("memory.max", "memory.current") == 5 * GIB and machine.quota_cores() == 1.5


def test_version_1_of_control_groups_grants_cores_too(write, tmp_path):
    (tmp_path / "cgroup").write_text("4:cpu,cpuacct:/user/job\n1:name=systemd:/user/job\n")
    write("cpu,cpuacct/user/job", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert machine.quota_cores() == math.inf
    write("cpu,cpuacct/user", cpu__cfs_quota_us=200000, cpu__cfs_period_us=100000)
    assert machine.quota_cores() == 2.0
    write("cpu,cpuacct", cpu__cfs_quota_us=150000, cpu__cfs_period_us=100000)
    assert machine.quota_cores() == 1.5


def test_the_narrowest_group_counts_and_never_goes_below_zero(write):
    write("user", pids__max=1000, pids__current=900)
    write("user/job", pids__max=64, pids__current=70)
    assert machine.cgroup_headroom("pids.max", "pids.current") == 0


SINFO = "node1 node1\nnode2 node2\n"
PBSNODES = "Name=x3004c0s1b0n0|Mom=x3004c0s1b0n0.hsn|state=free\n"


@pytest.mark.parametrize(
    ("hostname", "answers", "why"),
    [
        *((name, {}, f"its name is {name}") for name in ("login12", "polaris-login-04", "aurora-uan-0010", "submit-2",
                                                        "login3.frontier.olcf.ornl.gov")),
        *((name, {}, None) for name in ("nid001234", "x3004c0s1b0n0", "adas-laptop", "blogin", "vm")),
        ("head", {"sinfo": SINFO}, "Slurm answers here and has no compute node head"),
        ("node", {"sinfo": SINFO}, "Slurm answers here and has no compute node node"),
        ("head", {"pbsnodes": PBSNODES}, "PBS answers here and has no compute node head"),
        ("node2.cluster", {"sinfo": SINFO}, None),
        ("x3004c0s1b0n0", {"pbsnodes": PBSNODES}, None),
        ("workstation", {"sinfo": ""}, None),  # a scheduler that is installed and does not answer
        ("login12", {"MANYHANDS_LOGIN_NODE": "0"}, None),
        ("laptop", {"MANYHANDS_LOGIN_NODE": "1"}, "MANYHANDS_LOGIN_NODE says so"),
        *(("login12", {inside: "x"}, None) for inside in ("SLURMD_NODENAME", "PBS_NODEFILE", "PBS_JOBID")),
    ],
)  # fmt: skip
def test_a_login_node_is_known_by_its_name_or_by_a_scheduler_that_does_not_know_it(monkeypatch, hostname, answers, why):
    """`answers`: what the scheduler's programs print, and variables."""
    monkeypatch.setattr(machine.socket, "gethostname", lambda: hostname)
    monkeypatch.setattr(machine.settings, "environment", lambda: answers)
    monkeypatch.setattr(machine, "_ask", lambda command: answers.get(command[0], ""))
    assert machine.login_node() == why
    refusal = machine.refuse_on_login_node("make test")
    assert refusal.startswith("make test runs many processes, and this is a login node") == (why is not None)
