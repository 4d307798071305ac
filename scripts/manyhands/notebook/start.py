"""Start the ranks of a notebook; then `%%ranks` at the top of a cell runs it on every rank.

from manyhands.notebook.start import start_ranks
hands = start_ranks("02_collectives", globals())

In a notebook that is no lesson:

%load_ext manyhands
%ranks 4            # starts four ranks, which `hands` then stands for; without a number, all slots of the allocation
%ranks stop
"""

from pathlib import Path

from manyhands.course import lesson_parameters
from manyhands.course.folders import ROOT, script_of
from manyhands.launch import settings
from manyhands.launch.allocation import RanksError
from manyhands.launch.limits import few_processes
from manyhands.launch.ranks import wrapped
from manyhands.notebook import magic
from manyhands.notebook.engine_processes import prepare
from manyhands.notebook.rank_pool import RankPool, current_ranks, replace_ranks


def start_ranks(lesson, namespace, mpi=None):
    """Start the ranks of a lesson and push its parameters to them.

    lesson: "02_collectives"; namespace: the notebook's globals(), which hold the names of the lesson's `parameters`
    cell; `n_ranks` None means all slots of the allocation; mpi: False starts ranks without MPI, None asks
    MANYHANDS_MPI ("off" forbids it). Raises RanksError or ValueError with the cure.
    """
    try:
        script = script_of(lesson)
    except FileNotFoundError as error:
        cure = "start_ranks takes the name of a lesson"
        if str(lesson)[:2].isdecimal():
            cure = f"renamed? `make reset LESSON={lesson[:2]}` brings {lesson} back, yours stays"
        raise RanksError(f"{error}; {cure}") from None
    known = lesson_parameters.read(script)
    values = {p.name: namespace[p.name] for p in known if p.name in namespace}
    lesson_parameters.validate(known, values)
    if notice := other_course():
        print("\n".join(wrapped(notice)))
    here = ranks_here(known, values)
    pool = RankPool(lesson, values | here, mpi)
    notice = parameters_do_not_count(known, namespace | here, pool.world_size, script.name)
    if notice := notice or told_of_ranks(here):
        print("\n".join(wrapped(notice)))
    if few := few_processes(pool.world_size):
        print("\n".join(wrapped(few)))
    replace_ranks(pool)
    pool.start()
    magic.register_lesson()
    return pool


def register_for_own_work(shell):
    """Register `%%ranks`, and `%ranks`, which starts the ranks of a notebook that is no lesson."""

    def ranks(line):
        """%ranks 4: start four ranks. %ranks: as many as the allocation has slots. %ranks stop: end them."""
        asked = line.partition("#")[0].strip()
        if asked == "stop":
            current_ranks().stop()
        elif asked and not (asked.isdecimal() and int(asked)):
            raise RanksError(f"%ranks takes the number of ranks to start, or stop, not {asked!r}")
        else:
            pool = RankPool("", {"n_ranks": int(asked)} if asked else {})
            replace_ranks(pool)
            pool.start()
            shell.user_ns["hands"] = pool

    shell.register_magic_function(ranks, "line")
    magic.register(shell)
    prepare()


def other_course(root=ROOT):
    """A sentence if this notebook lies in one copy of the course and its kernel runs another one's package, else "".

    A user has one kernel "Many Hands"; `make kernel` in a second copy points it there. A shared one is nobody's.
    """
    here = Path.cwd().resolve().parent
    if not (root / "pyproject.toml").is_file() or not (here / "scripts" / "manyhands").is_dir() or here == root:
        return ""
    return (
        f'This notebook lies in {here}, but its kernel "Many Hands" runs the course in {root}. '
        f"`make kernel` in {here} points the kernel here; restart it then."
    )


def ranks_here(known, values):
    """{"n_ranks": what MANYHANDS_RANKS says} where the parameters cell has the course's own number, else {}."""
    asked, n_ranks = settings.value("MANYHANDS_RANKS", ""), lesson_parameters.LAUNCHERS_OWN
    if not asked:
        return {}
    if not (asked.isdecimal() and int(asked)):
        raise RanksError(f"MANYHANDS_RANKS={asked!r} is no number of ranks; use 1 or more")
    usual = next((p.default for p in known if p.name == n_ranks), None)
    if int(asked) < (least := lesson_parameters.least_ranks(known)):
        needs = f"MANYHANDS_RANKS={asked} does not count: this lesson needs at least {least} ranks. Where a node has"
        print("\n".join(wrapped(f"{needs} fewer GPUs they stay on the CPUs.")))
        return {}
    return {n_ranks: int(asked)} if usual is not None and values.get(n_ranks, usual) == usual != int(asked) else {}


def told_of_ranks(here):
    """Return a sentence on `ranks_here`, "" where there is nothing to say."""
    if not here:
        return ""
    n = here[lesson_parameters.LAUNCHERS_OWN]
    starts = f"MANYHANDS_RANKS={n}: this starts {n} rank{'s' * (n > 1)}"
    return f"{starts}; another n_ranks in the cell with the parameters counts first."


def parameters_do_not_count(known, namespace, world_size, script):
    """A sentence if the numbers of the notebook's parameters cell do not count, else "".

    Either the cell has not been run, or it was emptied and saved: its names are no parameters of `script` any more.
    """
    n_ranks = lesson_parameters.LAUNCHERS_OWN
    wanted = next((p.default for p in known if p.name == n_ranks), None)
    if n_ranks in namespace:
        if any(p.name == n_ranks for p in known) or namespace[n_ranks] in (None, world_size):
            return ""
        return (
            f"{n_ranks} = {namespace[n_ranks]!r} does not count, so this starts {world_size} ranks: the cell with the "
            f"parameters in {script} does not set it. Set {n_ranks} in that cell, save the notebook, and run both "
            f"cells again; `make reset LESSON={script[:2]}` brings a cell back that is gone."
        )
    if wanted is None:
        return ""
    return (
        f"The cell with the parameters has not been run, so this starts {world_size} ranks where it says {wanted}: "
        "run that cell, then this one again."
    )
