"""Start the ranks of a notebook; then `%%ranks` at the top of a cell runs it on every rank.

from manyhands.notebook.start import start_ranks
hands = start_ranks("02_collectives", globals())
"""

from manyhands.course import lesson_parameters
from manyhands.course.folders import script_of
from manyhands.launching.allocation import RanksError
from manyhands.notebook import magic
from manyhands.notebook.hands import Hands, replace_ranks


def start_ranks(lesson, namespace, mpi=None):
    """Start the ranks of a lesson and push its parameters to them.

    lesson: "02_collectives"; namespace: the notebook's globals(), which hold the names of the lesson's `parameters`
    cell; `n_ranks` None means all slots of the allocation; mpi: False starts ranks without MPI, None asks
    MANYHANDS_MPI ("off" forbids it). Raises RanksError or ValueError with the cure.
    """
    try:
        script = script_of(lesson)
    except FileNotFoundError as error:
        raise RanksError(f"{error}; start_ranks takes the name of a lesson") from None
    known = lesson_parameters.read(script)
    values = {p.name: namespace[p.name] for p in known if p.name in namespace}
    lesson_parameters.validate(known, values)
    hands = Hands(lesson, values, mpi)
    replace_ranks(hands)
    hands.start()
    magic.register()
    return hands
