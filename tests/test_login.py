"""A login node is told from a laptop and from a compute node, by name, by scheduler, or because somebody said so."""

import pytest
from manyhands.launch.login_node import login_node, refuse_on_login_node

SINFO = "node1 node1\nnode2 node2\n"
PBSNODES = "Name=x3004c0s1b0n0|Mom=x3004c0s1b0n0.hsn|state=free\n"


def cluster(**answers):
    """A machine on which these programs answer, and all others are missing."""
    return lambda command: answers.get(command[0])


@pytest.mark.parametrize(
    "hostname", ["login12", "polaris-login-04", "aurora-uan-0010", "login3.frontier.olcf.ornl.gov", "submit-2"]
)
def test_the_name_of_a_login_node_gives_it_away(hostname):
    assert hostname in login_node({}, hostname, cluster())


@pytest.mark.parametrize("hostname", ["nid001234", "x3004c0s1b0n0", "adas-laptop", "blogin", "vm"])
def test_other_names_do_not(hostname):
    assert login_node({}, hostname, cluster()) is None


def test_a_host_that_sees_a_scheduler_but_is_none_of_its_nodes_is_a_login_node():
    assert "no compute node head" in login_node({}, "head", cluster(sinfo=SINFO))
    assert "no compute node head" in login_node({}, "head", cluster(pbsnodes=PBSNODES))


def test_a_compute_node_is_none_also_without_a_job():
    assert login_node({}, "node2.cluster", cluster(sinfo=SINFO)) is None
    assert login_node({}, "x3004c0s1b0n0", cluster(pbsnodes=PBSNODES)) is None


def test_inside_a_job_nobody_is_asked():
    def never(command):
        raise AssertionError(command)

    for variable in ("SLURMD_NODENAME", "PBS_NODEFILE", "PBS_JOBID"):
        assert login_node({variable: "x"}, "login12", never) is None


def test_a_scheduler_that_is_installed_but_does_not_answer_is_no_cluster():
    assert login_node({}, "workstation", cluster(sinfo=None, pbsnodes="")) is None


def test_the_variable_has_the_last_word(monkeypatch):
    assert login_node({"MANYHANDS_LOGIN_NODE": "0"}, "login12", cluster()) is None
    assert login_node({"MANYHANDS_LOGIN_NODE": "1"}, "laptop", cluster())
    monkeypatch.setenv("MANYHANDS_LOGIN_NODE", "1")
    assert "make test runs many processes" in refuse_on_login_node("make test")
    monkeypatch.setenv("MANYHANDS_LOGIN_NODE", "0")
    assert refuse_on_login_node("make test") == ""
