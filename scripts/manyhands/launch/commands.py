"""Build the command that starts ranks here; `scripts/launch.py` prints it and runs it with `processes.keep`.

Commands are lists throughout, so a user's flags are never interpreted by a shell.

    python -m manyhands.launch.commands FLAGS     # torchrun, without its long report when a rank fails
"""

import logging
import os
import platform
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from manyhands.course.folders import SCRIPTS
from manyhands.launch import settings
from manyhands.launch.allocation import (
    TORCHRUN,
    Allocation,
    RanksError,
    find_mpiexec,
    find_site_mpiexec,
    hydra_launcher,
    in_image,
    is_open_mpi,
    pyxis_flags,
    torchrun_here,
    words_of,
)
from manyhands.launch.flags import Flags
from manyhands.launch.launchers import LaunchError
from manyhands.launch.limits import cure, few_processes, sweep_shared_memory
from manyhands.launch.machine import cores_here
from manyhands.launch.processes import keep
from manyhands.launch.program import MEMORY, NOT_AGAIN, REFUSED, STATUS_FILE, end_by, read_end, read_status, told, write

TRAIN = SCRIPTS / "train.py"
ON_NODES = Path(__file__).with_name("on_nodes.sh")
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")  # torchrun forwards these instead of dying
# glibc asks Linux for 2 MB pages: each step frees and allocates activations again, page by page
HUGE_PAGES = "glibc.malloc.hugetlb=1"
RENDEZVOUS = "--rdzv-backend=c10d"  # with several nodes
QUIET_TORCHRUN = "manyhands.launch.commands"
PER_NODE = ("-ppn", "--ppn", "-N", "--npernode", "-npernode", "--map-by", "-map-by")  # flags of various mpiexecs
SAVE_S = 120  # torchrun kills its ranks this long after it forwards a signal: time to write a checkpoint


def command_for(
    program: Sequence[str],
    environ: Mapping[str, str] | None = None,
    nproc: int | None = None,
    starter: str | None = None,
) -> list[str]:
    """Return the command, a list, that starts `program` (a script and its flags) on every node. Raise RanksError.

    `nproc`: ranks per node (None: NPROC_PER_NODE, else one per GPU, else the scheduler's number, else one per core and
    at most four). `starter`: torchrun (one per node), mpiexec, srun, or None for the default here.
    """
    environ = settings.environment() if environ is None else environ
    where = Allocation.find(environ)
    nodes = where.num_nodes
    slurm = where.kind.startswith("slurm")
    starter = starter or ("srun" if slurm else "mpiexec" if nodes > 1 else "torchrun")
    nproc = nproc or ranks_on_a_node(where, environ)
    python, in_srun = in_image(environ), pyxis_flags(environ)
    if in_srun and (not slurm or starter == "mpiexec"):
        raise RanksError("ENGINE=pyxis starts ranks only by srun, in a Slurm job; use another ENGINE, or no IMAGE")
    if starter == "torchrun":
        if nodes == 1:
            here = torchrun_here(nproc, *_torchrun_flags(environ), python=python)
            return [*(_srun(where, 1, environ) if in_srun else []), *here, *program]
        torchrun = [*python, "-m", TORCHRUN, f"--nproc-per-node={nproc}", *_torchrun_flags(environ)]
        meet = [f"--nnodes={nodes}", RENDEZVOUS, f"--rdzv-id={where.job}"]
        meet.append(f"--rdzv-endpoint={where.hosts[0]}{environ.get('HOST_SUFFIX', '')}:{_port(where)}")
        return [*_one_per_node(where, environ), *torchrun, *meet, *program]
    if starter == "srun":
        if not slurm:
            cure = "use salloc or sbatch, or another --starter"
            raise RanksError(f"srun starts ranks only inside a Slurm job; {cure}")
        return [*_srun(where, nproc, environ), *python, *program]
    return [*mpiexec_over(where, nproc, environ), *python, *program]


def _torchrun_flags(environ):
    """Return flags that make torchrun forward a request to stop (torch 2.9 has none of them), and a site's own."""
    heard = [name for name in SIGNALS if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN]  # nohup
    wanted = [f"--signals-to-handle={','.join(heard)}", f"--shutdown-timeout={SAVE_S}"]
    # an image has a torch of its own, which `quiet_torchrun` asks there
    return [*(wanted if environ.get("IMAGE") else _known(wanted)), *words_of(environ, "TORCHRUN_FLAGS")]


def _known(words):
    """Return `words` without those flags that make torchrun forward a request to stop and that it does not know."""
    from torch.distributed.run import get_args_parser  # imported late because it imports torch

    known = {flag for action in get_args_parser()._actions for flag in action.option_strings}
    ours = ("--signals-to-handle=", "--shutdown-timeout=")
    return [word for word in words if not word.startswith(ours) or word.partition("=")[0] in known]


def _one_per_node(where, environ):
    """Return the command that starts one process on each node. It needs the scheduler but not MPI."""
    if where.kind.startswith("slurm"):
        return _srun(where, 1, environ)
    mpiexec = words_of(environ, "MPIEXEC") or find_site_mpiexec(environ)
    if mpiexec is None and (tmrsh := shutil.which("pbs_tmrsh", path=environ.get("PATH"))):
        return ["bash", str(ON_NODES), tmrsh, " ".join(where.hosts)]
    return mpiexec_over(where, 1, environ, mpiexec)


def _port(where):
    """Return the first free port from 20000 + the job's id: torchrun waits silently at a port that is taken."""
    first = 20000 + where.job % 10000
    if where.hosts[0].partition(".")[0] != platform.node().partition(".")[0]:
        return first  # another node's ports cannot be checked from here
    for port in range(first, first + 100):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is usable
            probe.bind(("", port))
            return port
    raise RanksError(f"ports {first} to {first + 99} of {where.hosts[0]} are all taken: submit the job again")


def _srun(where, ranks_per_node, environ):
    flags = [*words_of(environ, "SRUN_FLAGS"), *pyxis_flags(environ)]
    return where.srun(where.num_nodes * ranks_per_node, "--kill-on-bad-exit=1", *flags)


def mpiexec_over(where: Allocation, nproc: int, environ: Mapping[str, str], mpiexec=None) -> list[str]:
    """Return the mpiexec command for `nproc` ranks per node, filled node by node. Raise RanksError if there is none.

    `mpiexec`: a command, maybe with flags; None: MPIEXEC of `environ`, else the one found here.
    """
    mpiexec = mpiexec or words_of(environ, "MPIEXEC") or find_mpiexec()
    if not mpiexec:
        raise RanksError("found no mpiexec: `pip install mpich`, load the site's MPI module, or use --starter torchrun")
    flags = words_of(environ, "MPIEXEC_FLAGS")
    per_node = ["--map-by", f"ppr:{nproc}:node"] if is_open_mpi(mpiexec) else ["-ppn", str(nproc)]
    if any(word.partition("=")[0] in PER_NODE for word in [*mpiexec, *flags]):  # set by the site
        per_node = []
    return [*mpiexec, "-n", str(where.num_nodes * nproc), *per_node, *hydra_launcher(mpiexec, environ), *flags]


def ranks_on_a_node(where: Allocation, environ: Mapping[str, str]) -> int:
    """Return NPROC_PER_NODE, else one rank per GPU, else the scheduler's number, else one per core."""
    asked = environ.get("NPROC_PER_NODE") or environ.get("SLURM_GPUS_ON_NODE") or ""
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    return _gpus_here(environ) or where.ranks_per_node or min(4, cores_here())


def _gpus_here(environ):
    from manyhands.launch.devices import gpus_here  # imported late because it imports torch

    return gpus_here(environ)[1]


def main(
    argv: Sequence[str] | None = None, description: str | None = None, refuse_flags: Callable | None = None
) -> int:
    """Run `scripts/launch.py`'s program and return its exit status.

    `refuse_flags(flags)` checks the flags of scripts/train.py before ranks start, and raises Refused.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    at = argv.index("--") if "--" in argv else len(argv)
    usage = "launch.py [options] [program.py] [-- the program's own flags]"
    parser = Flags(prog="launch.py", usage=usage, description=description)
    says = "a script (default: scripts/train.py)"
    parser.add_argument("program", nargs="?", type=Path, default=TRAIN, help=says)
    parser.add_argument("--nproc", type=int, metavar="N", help="ranks per node")
    parser.add_argument("--dry-run", action="store_true", help="print the command without running it")
    parser.add_argument("--timeout", type=int, metavar="S", help="end a run that prints nothing for S seconds")
    parser.add_argument("--retries", type=int, default=0, metavar="K", help="start a failed run again, up to K times")
    parser.add_argument("--starter", choices=("torchrun", "mpiexec", "srun"), help="launcher (default: one that suits)")
    args = parser.parse_args(argv[:at])
    for name, given, least in (("nproc", args.nproc, 1), ("timeout", args.timeout, 1), ("retries", args.retries, 0)):
        if given is not None and given < least:
            parser.error(f"argument --{name}: {given} is less than {least}")
    if not args.program.is_file():
        parser.error(f"no such program: {args.program}; put the program's flags after `--`")
    try:
        command = command_for([str(args.program), *argv[at + 1 :]], None, args.nproc, args.starter)
    except (RanksError, LaunchError) as error:
        parser.error(str(error))
    if refuse_flags and args.program.resolve() == TRAIN.resolve():
        refuse_flags(argv[at + 1 :])
    write(f"$ {shlex.join(command)}\n")
    if args.dry_run:
        return 0
    environ = settings.environment()
    if few := few_processes(args.nproc or ranks_on_a_node(Allocation.find(environ), environ)):
        print(f"launch.py: {few}", file=sys.stderr)
    return run(command, args.timeout, args.retries)


def run(command: Sequence[str], idle_s: float | None, retries: int) -> int:
    """Run `command`, start it again up to `retries` times if that may help, and return its exit status."""
    environ = settings.for_python({"GLIBC_TUNABLES": HUGE_PAGES, **settings.environment()}, SCRIPTS)
    if "--nproc-per-node=1" not in command:
        environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would print a long message about it
    under_torchrun = TORCHRUN in command
    if "--standalone" in command:  # torchrun lets its settings in the environment overrule that, and waits for nodes
        environ = {name: value for name, value in environ.items() if not name.startswith("PET_")}
    command = [QUIET_TORCHRUN if word == TORCHRUN else word for word in command]
    for attempt in range(retries + 1):
        began_s = time.time()
        with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
            status_file = Path(folder) / "status"
            status, heard = keep(command, {**environ, STATUS_FILE: str(status_file)}, idle_s)
            refused, why = read_end(status_file)
        if not under_torchrun and status in (signal.SIGKILL, 128 + signal.SIGKILL):  # as mpiexec and srun report it
            print(f"launch.py: status {status}: a rank was killed (signal 9): {MEMORY}", file=sys.stderr)
        if not under_torchrun and status:
            sweep_shared_memory(older_s=0, since_s=began_s)
        if not under_torchrun and status in (signal.SIGBUS, 128 + signal.SIGBUS):
            print(f"launch.py: status {status}: a rank died of a bus error; {cure('Bus error')}", file=sys.stderr)
        if status in NOT_AGAIN or heard or attempt == retries:
            break
        print(f"launch.py: status {status}; retry {attempt + 1} of {retries}", file=sys.stderr)
    if status and refused == REFUSED and RENDEZVOUS in command:
        print(why, file=sys.stderr)  # repeated, because other nodes' output came after it
    return status


def blame(failures: list[tuple[int, int, int]]) -> tuple[int, str]:
    """Return (exit status, sentence) for failures [(rank, exit status, negative for a signal, second of detection)].

    torchrun ends the other ranks with SIGTERM and later SIGKILL, and lists them too.
    """
    first = min(second for _, _, second in failures)
    causes = [(rank, status) for rank, status, second in failures if second == first]
    causes = [cause for cause in causes if cause[1] != -signal.SIGTERM] or causes
    # a killed rank is the cause; the other ranks' lost connections are its effect
    rank, status = min(causes, key=lambda cause: (cause[1] != -signal.SIGKILL, cause[1] >= 0))
    if status == -signal.SIGKILL:
        return 128 + signal.SIGKILL, f"rank {rank} was killed (signal 9): {MEMORY}"
    if status < 0:
        return 128 - status, f"rank {rank} died of signal {-status} ({signal.Signals(-status).name})"
    return status, f"rank {rank} ended with status {status}; the reason stands above"


def after_signal(number: int, own: int | None) -> tuple[int, str]:
    """Return (exit status, sentence or "") after torchrun died of a forwarded signal; `own`: its program's status."""
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    if own == 0:
        return 0, f"stopped cleanly on {name}"
    return (own, "") if own else (128 + number, f"ended by {name}")


def quiet_torchrun() -> int:
    """Run torchrun with this process's flags and return its exit status.

    The ranks' output is unchanged. A failure ends with one sentence that names the rank, and with the status of the
    rank that caused it. A forwarded signal ends without a traceback, with status 0 if the program stopped cleanly.
    """
    for number in (getattr(signal, name) for name in SIGNALS if name != "SIGINT"):
        if signal.getsignal(number) == signal.SIG_DFL:  # until torchrun handles it: torch takes seconds to import
            signal.signal(number, lambda number, frame: end_by(number))
    with _quiet_store():
        from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError
    from torch.distributed.run import main as torchrun

    # they repeat failures that the traceback shows
    for name in ("agent.server.api", "multiprocessing.api", "rendezvous.dynamic_rendezvous"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    sys.argv[1:] = _known(sys.argv[1:])
    sys.argv[1:1] = own_address(sys.argv, os.environ.get("HOST_SUFFIX", ""))
    try:
        with told(_waiting_for_nodes):
            torchrun()
        return 0
    except (SignalException, KeyboardInterrupt) as stop:
        status, sentence = after_signal(getattr(stop, "sigval", signal.SIGINT), read_status())
    except ChildFailedError as error:
        status, sentence = read_status() or 0, ""  # its program printed the reason, unless it failed late
        if status in (0, 128 + signal.SIGTERM):  # SIGTERM came from torchrun, after the failure
            status, sentence = blame([(rank, one.exitcode, one.timestamp) for rank, one in error.failures.items()])
    except RendezvousTimeoutError:
        status, sentence = 1, f"{platform.node()} timed out waiting for the run's other nodes; check their output"
    except RendezvousError:
        status, sentence = 1, f"{platform.node()} lost the run's first node, which has ended; see its output"
    if sentence:
        print(f"launch.py: {sentence}", file=sys.stderr)
    return status


def own_address(flags: Sequence[str], suffix: str = "") -> list[str]:
    """Return the flags of a torchrun over nodes that name this node by the address from which it reaches the first one.

    Else torchrun takes the address of the node's name, which may belong to another network. `suffix`: what the site
    adds to a node's name for that network, so that the first node does not know itself by it (pytorch#73656).
    """
    place = next((flag.partition("=")[2] for flag in flags if flag.startswith("--rdzv-endpoint=")), "")
    if RENDEZVOUS not in flags or not place or any(flag.startswith("--local-addr") for flag in flags):
        return []
    host, _, port = place.rpartition(":")
    try:
        first = socket.gethostbyname(host)
        own = _address_towards(first, int(port))
    except OSError:
        return []  # torchrun says what is wrong with the name
    is_first = [f"--rdzv-conf=is_host={int(own == first)}"] if suffix else []
    return [*([] if own.startswith("127.") else [f"--local-addr={own}"]), *is_first]


def _address_towards(host, port):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((host, port or 1))
        return probe.getsockname()[0]


def _waiting_for_nodes():
    """Return a sentence while torchrun has started no rank, because other nodes' torchruns have not come."""
    import psutil  # imported late: most runs need none

    if RENDEZVOUS not in sys.argv or psutil.Process().children():
        return ""
    where = " ".join(word for word in sys.argv if word.startswith(("--nnodes=", "--rdzv-endpoint=")))
    return f"launch.py: {platform.node()} waits for the run's other nodes ({where}); do they start, and reach it?"


@contextmanager
def _quiet_store():
    """Import torch so that its store, in this process only, prints no C++ frames when the first node has ended."""
    name = "TORCH_CPP_LOG_LEVEL"
    named = settings.value(name)
    settings.set_default(**{name: "ERROR"})
    yield
    if named is None:
        del os.environ[name]  # ranks must not inherit it


if __name__ == "__main__":
    from manyhands.launch.entry import run_program

    run_program("launch.py", quiet_torchrun)
