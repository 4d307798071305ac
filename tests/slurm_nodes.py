"""Two Slurm "nodes" on this machine, node1 and node2, all on loopback, for the tests of the job files.

    with SlurmNodes() as slurm:                      # about 2 s; needs root and Debian's packages
        slurm.run("srun", "-N2", "-n4", "hostname")
        job = slurm.submit("sbatch", "jobs/ddp_shakespeare.slurm")
        state = slurm.wait(job)

Each slurmd has host and mount names of its own, so that `hostname` differs per node while the machine's /etc/hosts
stays as it is. The daemons are children in the foreground and get SIGTERM when the process that started them dies.
Ports are free ones, the folder and the first job's number (from which the job files derive their port) are random, so
two of these can run at once.
"""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PROGRAMS = ["munged", "slurmctld", "slurmd", "sbatch", "qsub", "generate_pbs_nodefile", "unshare", "setpriv"]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")

# MPI sees through two names of one machine and shares memory between them, which at times fails; nodes do not share any
APART = {"UCX_TLS": "tcp,self"}

SLURM_CONF = """\
ClusterName=hands
SlurmctldHost={me}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/ctld
SlurmdSpoolDir={folder}/d/%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2
EnforcePartLimits=ALL
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=120
FirstJobId={first_job}
PlugStackConfig={folder}/plugstack.conf
TaskProlog={folder}/task_prolog.sh
NodeName=node1 NodeHostname=node1 NodeAddr=127.0.0.2 Port={ports[1]} CPUs=2 RealMemory=4000
NodeName=node2 NodeHostname=node2 NodeAddr=127.0.0.3 Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=debug Nodes=node[1-2] Default=YES MaxTime=01:00:00 OverSubscribe=EXCLUSIVE
"""

# What the prolog prints as "export A=B" enters the environment of the batch script and of every task: the variables
# that a job file would find under PBS. They are there in jobs that came through Debian's qsub, and only there.
TASK_PROLOG = """\
#!/bin/bash
[ -n "$PBS_O_WORKDIR" ] || exit 0
file=$(generate_pbs_nodefile) && mv -f "$file" {folder}/nodefile.$SLURM_JOB_ID
echo "export PBS_NODEFILE={folder}/nodefile.$SLURM_JOB_ID"
echo "export PBS_ENVIRONMENT=PBS_BATCH"
"""


def missing():
    """Why two nodes cannot be started here, as a sentence, or None."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "starting slurmd needs Linux and root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin") is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install slurm-wlm slurm-wlm-torque munge"
    return None


def _free_ports(n):
    sockets = [socket.create_server(("", 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class SlurmNodes:
    """A Slurm of two nodes with two CPUs each; `environ` is what its clients need.

    `settings` go into slurm.conf, instead of its own: {"EnforcePartLimits": "NO"}.
    """

    def __init__(self, settings=None):
        self.settings = settings or {}
        self.folder = self.environ = self._janitor = None
        self._daemons = {}

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="two-nodes-"))  # short: it holds a Unix socket
        self.environ = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), **APART}
        self.environ["PATH"] = os.environ["PATH"] + ":/usr/sbin"
        # whose standard input ends when this process does, however it ends
        self._janitor = subprocess.Popen(
            [sys.executable, __file__, "clean-up", self.folder], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            self._write_configuration()
            self._start_daemons()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error):
        self.stop()

    def _write_configuration(self):
        folder, me = self.folder, socket.gethostname().split(".")[0]
        for name in ("munge", "ctld", "d", "log"):
            (folder / name).mkdir()
        folder.chmod(0o711)
        (folder / "munge").chmod(0o711)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.0.1 {me}\n127.0.0.2 node1\n127.0.0.3 node2\n")
        values = {"me": me, "folder": folder, "ports": _free_ports(3), "first_job": random.randrange(1, 60_000)}
        lines = SLURM_CONF.format(**values).splitlines()
        lines = [line for line in lines if line.partition("=")[0] not in self.settings]
        lines += [f"{name}={value}" for name, value in self.settings.items()]
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (folder / "plugstack.conf").write_text("optional spank_pbs.so\n")
        (folder / "task_prolog.sh").write_text(TASK_PROLOG.format(folder=folder))
        (folder / "task_prolog.sh").chmod(0o755)

    def _start(self, name, *command, hostname=None):
        """Start a daemon in the foreground, with the two nodes' names in its own /etc/hosts."""
        inside = f"mount --bind {self.folder}/hosts /etc/hosts && " + (f"hostname {hostname} && " if hostname else "")
        with open(self.folder / "log" / f"{name}.log", "wb") as log:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", "unshare", "--uts", "--mount", "--propagation", "private"]
                + ["bash", "-c", f'{inside} exec "$@"', "bash", *command],
                env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _start_daemons(self):
        munge = self.folder / "munge"
        self._start(
            "munged", "munged", "--foreground", f"--key-file={munge}/key", f"--socket={munge}/socket",
            f"--pid-file={munge}/pid", f"--seed-file={munge}/seed", f"--log-file={munge}/log",
        )  # fmt: skip
        self._until((munge / "socket").exists, 60, "munged made no socket")
        self._start("slurmctld", "slurmctld", "-D", "-f", self.environ["SLURM_CONF"])
        for node in ("node1", "node2"):
            self._start(node, "slurmd", "-D", "-f", self.environ["SLURM_CONF"], "-N", node, hostname=node)
        self._until(lambda: self._output("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", 120, "no two idle nodes")

    def _until(self, true, seconds, complaint):
        deadline = time.monotonic() + seconds
        while not true():
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = "".join(log.read_text(errors="replace")[-800:] for log in self.folder.glob("log/*.log"))
                raise RuntimeError(f"{complaint} (ended: {dead or 'none'})\n{logs}")
            time.sleep(0.1)

    def _output(self, *command):
        return self.run(*command).stdout.strip()

    def run(self, *command, environ=None, timeout_s=120, **options):
        """`command` with this Slurm's environment: subprocess.CompletedProcess with its text output."""
        return subprocess.run(
            [str(part) for part in command], env={**self.environ, **(environ or {})}, capture_output=True,
            text=True, timeout=timeout_s, check=False, **options,
        )  # fmt: skip

    def submit(self, *command, **options):
        """The number of the job that `sbatch ...` or `qsub ...` submitted. Raises with what they said otherwise."""
        done = self.run(*command, **options)
        number = re.search(r"\d+", done.stdout)
        if done.returncode or not number:
            raise AssertionError(f"{' '.join(map(str, command))} said: {done.stdout}{done.stderr}")
        return number.group()

    def state(self, job):
        deadline = time.monotonic() + 60
        while not (found := re.search(r"JobState=(\w+)", self._output("scontrol", "show", "job", job))):
            assert time.monotonic() < deadline, f"slurmctld says nothing about job {job}"
            time.sleep(0.5)
        return found.group(1)

    def drain(self, timeout_s=120):
        """Wait until no job is left, not even one whose processes are still ending."""
        deadline = time.monotonic() + timeout_s
        while (queue := self.run("squeue", "-h")).returncode or queue.stdout.strip():
            assert time.monotonic() < deadline, f"these jobs do not end:\n{queue.stdout}{queue.stderr}"
            time.sleep(0.2)

    def wait(self, job, timeout_s=120):
        """The job's last state; cancelled after `timeout_s`. (`sbatch --wait` polls ever more slowly: not used.)"""
        deadline = time.monotonic() + timeout_s
        while (state := self.state(job)) not in ENDED:
            if time.monotonic() > deadline:
                self.run("scancel", job)
                return f"still {state} after {timeout_s} s"
            time.sleep(0.25)
        return state

    def stop(self):
        """End every job, daemon and process of this Slurm, and remove its folder."""
        if self.folder is None:
            return
        if "slurmctld" in self._daemons:
            self._output("scancel", "--user=root")
            deadline = time.monotonic() + 10
            while self._output("squeue", "-h") and time.monotonic() < deadline:
                time.sleep(0.2)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._janitor.communicate(timeout=120)
        self.folder, self._daemons = None, {}


def processes_of(folder, word=b""):
    """The ids of all processes that carry this Slurm's folder in their environment, jobs and daemons; with `word`: of
    those whose command holds it."""
    mine, found = f"SLURM_CONF={folder}/".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if mine in (entry / "environ").read_bytes() and word in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def wait_until_gone(folder, word, patience_s=120):
    """Wait until no process of this Slurm has `word` in its command."""
    deadline = time.monotonic() + patience_s
    while left := processes_of(folder, word):
        assert time.monotonic() < deadline, f"these processes stay: {left}"
        time.sleep(0.3)


def slurm_of_this_machine():
    """SlurmNodes, or a skipped test where there cannot be any; in the project's CI, which has it, that is a failure."""
    import pytest

    if why := missing():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)
    return SlurmNodes()


def clean_up(folder):
    """End what this Slurm left behind, and remove its folder."""
    deadline = time.monotonic() + 60
    while (left := processes_of(folder)) and time.monotonic() < deadline:  # one that still ends may still write
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__" and sys.argv[1:2] == ["clean-up"]:
    sys.stdin.read()
    clean_up(sys.argv[2])
