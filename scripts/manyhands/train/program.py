"""What train.py and align.py do before their runs: signals wait, and one rank complains about options that all have
read.

Imports no torch before the options are read: a wrong flag is said at once.
"""

import contextlib
import os
import sys

from manyhands.launch.program import is_first_rank
from manyhands.train.preemption import defer_signals


def act_on_options(prog, read, act):
    """The status of `act(options)` for the options of the command line, or of their refusal.

    `read(words)` may raise OptionError (status 2); `act(options)` returns the exit status.
    """
    defer_signals()  # a scheduler's SIGUSR1 may come while torch is still being imported
    from manyhands.config.options import OptionError
    from manyhands.launch.join import end

    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as quiet:
        if not is_first_rank():  # all ranks read the same flags: one says what is wrong with them
            quiet.enter_context(contextlib.redirect_stdout(nowhere))
            quiet.enter_context(contextlib.redirect_stderr(nowhere))
        status, why = None, ""
        try:
            options = read(sys.argv[1:])
        except OptionError as error:
            status, why = 2, f"{prog}: {error}"
        except SystemExit as ended:  # tyro has printed its help, or what it did not understand
            status = ended.code or 0
    if status is not None:
        end(why, status)
    return act(options)
