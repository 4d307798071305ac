"""The doctor in a job: each of the four questions on made-up ranks, and all of them on real ones."""

import json
import subprocess
import sys
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from manyhands.jobs import stamp
from manyhands.launch import recorded_runs
from manyhands.tools import doctor, doctor_in_job

NAMES = list(doctor_in_job.JUDGES)


def rank(number, host="node1", **changes):
    """What one rank says; two ranks per node, with two cores and one GPU each."""
    local = number % 2
    said = {
        "host": host, "rank": number, "cores": [2 * local, 2 * local + 1], "backend": "cpu:gloo,cuda:nccl",
        "gpu": "NVIDIA H100", "gpu_id": f"{host}-{local}", "free_bytes": 79 * 2**30, "visible": 2,
        "near": [2 * local, 2 * local + 1], "import_s": 3.0, "inherited": [], "ways": {"NET/IB/0/GDRDMA": 4},
        "fabric": "",
    }  # fmt: skip
    return said | changes


def job(**changes):
    """Four ranks on two nodes, with the same changes in each."""
    return [rank(number, **{"host": f"node{1 + number // 2}"} | changes) for number in range(4)]


def finding(question, said):
    (found,) = doctor.examine({question: lambda: doctor_in_job.JUDGES[question](said)})
    return found["status"], f"{found['says']} -> {found['remedy']}"


@pytest.mark.parametrize("question", NAMES)
def test_a_job_that_got_what_it_asked_for_is_well(question):
    assert finding(question, job())[0] == "ok"
    if question == "channels":
        said = finding("channels", job(inherited=["NCCL_IB_DISABLE"]))[1]
        assert said.startswith("16 via NET/IB/GDRDMA; set before the job: NCCL_IB_DISABLE")
        assert "gloo, TCP over 2 nodes" in finding("channels", job(ways={}))[1], "without GPUs"


@pytest.mark.parametrize(
    ("question", "said", "words"),
    [
        ("cores", job(cores=[0], near=[]), "node1: 2 ranks take turns on 1 core (core 0)"),
        ("GPUs", job(gpu_id="the same"), "node1: 2 ranks share 1 GPU"),
        ("channels", job(ways={"NET/Socket/0": 2, "P2P/CUMEM": 8}), "8 via NET/Socket"),
        ("imports", [*job()[:3], rank(3, "node2", import_s=95.0)], "3.0 to 95.0 s, slowest on node2"),
    ],
)
def test_what_is_wrong_is_a_warning_that_names_the_node_and_the_remedy(question, said, words):
    status, text = finding(question, said)
    assert status == "warning" and words in text


def test_ways_are_those_of_channels_and_not_of_what_nccl_has_found():
    log = (
        "a:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>\n"
        "a:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
        "a:1:2 [0] NCCL INFO Channel 01/0 : 1[1] -> 2[0] [send] via NET/AWS Libfabric/0/GDRDMA\n"
    )
    assert doctor_in_job.ways(log) == ["P2P/CUMEM", "NET/AWS Libfabric/0/GDRDMA"]
    assert set(doctor_in_job.ways(recorded_runs.text("15_nccl_sockets.out"))) == {"NET/Socket/0"}


def test_sockets_between_nodes_fail_the_job_where_the_site_has_a_fabric_for_nccl(monkeypatch, capsys):
    monkeypatch.setenv("FABRIC", "Slingshot")
    own = doctor_in_job._look(SimpleNamespace(host="node1", rank=0, backend="gloo", device=torch.device("cpu")))
    log = recorded_runs.text("15_nccl_sockets.out")
    logs = (log, log.replace("Socket/0", "OFI/0/GDRDMA"))
    socket, plugin = (dict(Counter(doctor_in_job.ways(text))) for text in logs)
    for status, ways in ((1, socket), (0, plugin)):
        said = job(fabric=own["fabric"], ways=ways)
        look = partial(doctor.examine, {"channels": partial(doctor_in_job.channels, said)})
        assert doctor.main(["--job"], examine_job=lambda look=look: list(look())) == status
        printed = capsys.readouterr().out
        assert ("12 via NET/OFI/GDRDMA; " in printed) != bool(status)
        assert ("12 via NET/Socket over 2 nodes, which Slingshot connects" in printed) == bool(status)
        assert ("-> load NCCL's plug-in for Slingshot in site_setup" in printed) == bool(status)
    assert finding("channels", job(ways=socket))[0] == "warning", "a site that says nothing of its network"
    assert finding("channels", job(fabric="Slingshot", host="node1", ways=socket))[0] == "warning", "one node"
    for name in ("perlmutter", "polaris", "frontier", "lumi"):
        assert " FABRIC=Slingshot" in stamp.site_named(name).settings["site_setup"]


@pytest.mark.ranks
def test_two_ranks_answer_once_and_the_output_is_json_on_request(root):
    command = [sys.executable, "scripts/launch.py", "--nproc", "2", "scripts/doctor.py", "--", "--job", "--json"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=180, check=True)
    found = json.loads(done.stdout[done.stdout.index("[\n") :])
    assert [one["check"] for one in found] == NAMES
    assert "2 ranks" in found[0]["says"] and all(one["expect"] for one in found)
