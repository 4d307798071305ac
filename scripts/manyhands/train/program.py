"""What train.py and align.py are around their runs: options that one rank complains about, Ctrl-C, the exit status.

    run_program("train.py", lambda words: read_options(words, ...), lambda options: train(options))

Imports no torch before the options are read: a wrong flag is said at once.
"""

import contextlib
import os
import signal
import sys

from manyhands.train.preemption import defer_signals, exit_process


def run_program(prog, read, act):
    """Read the options from the command line, act on them, and end this process. It does not return.

    `read(words)` may raise OptionError (status 2); `act(options)` returns the exit status.
    """
    try:
        status = _status(prog, read, act)
    except SystemExit as ended:  # it has said why
        status = ended.code
    except KeyboardInterrupt:  # Ctrl-C before the training began, or for the second time
        from manyhands.launch.exit_status import INTERRUPTED, say_status

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's and the launcher's: it is said once
        if not _some_other_rank():
            why = f"{prog}: ended by Ctrl-C"
            say_status(INTERRUPTED, why)
            print(why, file=sys.stderr)
        status = INTERRUPTED
    from manyhands.launch.ranks import joined

    exit_process(status, joined())


def _status(prog, read, act):
    defer_signals()  # a scheduler's SIGUSR1 may come while torch is still being imported
    from manyhands.config.options import OptionError
    from manyhands.launch.join import end

    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as quiet:
        if _some_other_rank():  # all ranks read the same flags: one says what is wrong with them
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
        end(why, status, sys.stderr)
    return act(options)


def _some_other_rank():
    from manyhands.launch.launchers import LaunchError, resolve

    try:
        return resolve(os.environ).rank != 0
    except LaunchError:
        return False
