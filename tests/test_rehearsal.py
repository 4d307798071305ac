"""The rehearsal of an event: what to submit next, and what was not healthy."""

import json
import os

from manyhands.jobs.rehearsal import report


def job(outputs, name, status, number=1):
    file = outputs / "jobs" / f"{name}.{number}.status"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{status}\n")
    os.utime(file, (number, number))


def test_each_step_follows_a_healthy_one_and_a_fault_is_named_with_what_to_do(tmp_path):
    root, outputs = tmp_path, tmp_path / "outputs"

    def said(via="slurm"):
        lines, well = report(root, outputs, via)
        assert well == lines[-1].startswith("all three")
        return "\n".join(lines)

    assert (
        said() == "next: sbatch jobs/doctor.slurm    # cores, GPUs and channels of the nodes; then make rehearsal again"
    )
    assert said("pbs").startswith("next: qsub jobs/doctor.pbs")
    assert said(None).startswith("no scheduler answers here") and "next: bash jobs/doctor.pbs" in said(None)
    job(outputs, "doctor", 1)
    assert "doctor: it ended with status 1" in said() and "then again: sbatch jobs/doctor.slurm" in said()
    job(outputs, "doctor", 0, 2)
    (root / "doctor.o2").write_text("4 channels via NET/Socket/0\n")
    assert "doctor: NCCL goes over sockets (NET/Socket): load the site's plug-in" in said()
    (root / "doctor.o2").write_text("4 channels via NET/IB/0/GDRDMA\n")
    assert said().endswith(
        "next: sbatch jobs/ddp_shakespeare.slurm    # lesson 03 on all nodes; then make rehearsal again"
    )
    job(outputs, "ddp_shakespeare", 0)
    assert "ddp_shakespeare: it left no metrics.json" in said()
    run = outputs / "03_data_parallel" / "latest" / "metrics.json"
    run.parent.mkdir(parents=True)
    run.write_text(json.dumps({"conditions": {"hardware": "8 x NVIDIA H100"}}))
    assert "ddp_shakespeare: it ran on one node: 8 x NVIDIA H100" in said()
    run.write_text(json.dumps({"conditions": {"hardware": "8 x NVIDIA H100 on 2 nodes"}}))
    job(outputs, "preflight", 0)
    flight = outputs / "preflight" / "flight.json"
    flight.parent.mkdir()
    runs = {"a": {"name": "03_data_parallel torchrun", "error": "it hung"}, "b": {"name": "04", "error": ""}}
    flight.write_text(json.dumps({"finished": True, "runs": runs}))
    assert "preflight: 1 runs failed, the first of them 03_data_parallel torchrun" in said()
    flight.write_text(json.dumps({"finished": True, "runs": {"b": runs["b"]}}))
    assert said().startswith("doctor: healthy\nddp_shakespeare: healthy\npreflight: healthy\nall three were healthy")
