"""Stands in for scripts/train.py where a test is about signals, stalls and jobs: the same promises, no model.

    python -m torch.distributed.run --standalone --nproc-per-node 2 tests/fake_train.py --checkpoint.folder F
        --train.steps 40 --step-s 0.1 --stall-s 0 --fault hang:1:5

It adds up numbers over all ranks, so that a run that was stopped and resumed ends with the sum of one that was not. It
saves (sum.json) when it ends or is stopped, and goes on from there. Flags of the trainer that it does not know it
ignores. Faults: hang:R:S (rank R sleeps for ever at step S), stop:R:S (rank R stops its own process), slow-save:S
(saving takes S seconds), kill:R:S (rank R dies), exit:R:S (rank R raises). With --linger S a run that began at step 0
waits at step S until it is told to leave: a test that tells it so has all the time it needs, however busy the machine.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, os.environ.get("MANYHANDS_SCRIPTS", str(Path(__file__).resolve().parents[1] / "scripts")))

import torch
import torch.distributed as dist
from manyhands.launch.entry import run_program
from manyhands.launch.join import join, leave
from manyhands.train.preemption import PreemptionHandler, clear_requeue, defer_signals, write_requeue
from manyhands.train.stalls import StallWatch


def main():
    defer_signals()
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint.folder", dest="folder", default=None)
    parser.add_argument("--train.steps", dest="steps", type=int, default=40)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--stall-s", type=float, default=0)
    parser.add_argument("--fault", default="none:0:0")
    parser.add_argument("--linger", type=int, default=None)
    args, _ = parser.parse_known_args()
    fault, who, when = [*args.fault.split(":"), "0"][:3]
    ranks = join(name="train")
    folder = Path(args.folder) if args.folder else None
    saved = folder / "sum.json" if folder else None
    step, total = json.loads(saved.read_text()) if saved and saved.exists() else (0, 0)
    if ranks.rank == 0:
        print(f"from step {step}", flush=True)
    if folder:
        clear_requeue(folder, ranks)
    lingers_at, stop = None if step else args.linger, None
    with PreemptionHandler(ranks) as preemption, StallWatch(ranks, args.stall_s) as watch:
        while step < args.steps and stop is None:
            watch.at(step, "training")
            if int(who) == ranks.rank and step == int(when):
                misbehave(fault)
            time.sleep(args.step_s)
            if step != lingers_at:
                term = torch.tensor([(step + 1) * (ranks.rank + 1)])
                dist.all_reduce(term)
                step, total = step + 1, total + int(term)
                if ranks.rank == 0 and step % 10 == 0:
                    print(f"step {step}", flush=True)
            stop = preemption.agreed()
        watch.at(step, "checkpoint")
        if fault == "slow-save":
            time.sleep(float(who))
        if folder and ranks.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            saved.write_text(json.dumps([step, total]))
        dist.barrier()
    if folder and stop:
        write_requeue(folder, stop, step, ranks)
    if ranks.rank == 0:
        print(f"stopped by {stop} and saved at step {step}" if stop else f"done, sum {total}", flush=True)
    leave()
    return 0


def misbehave(fault):
    if fault == "hang":
        time.sleep(1000)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)  # it is continued, and its stack should show where it stood
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exit":
        raise RuntimeError("this rank gives up")


if __name__ == "__main__":
    run_program("train.py", main)
