"""TensorBoard and Weights & Biases: opt-in, on rank 0, and never a reason for training to stop.

    trackers = Trackers(options, folder, world_size, say)     # --log.tensorboard, --log.wandb PROJECT
    trackers.log(row); trackers.text(step, text); trackers.close()

Whatever fails is said once, by `say`, and that tracker is used no more. W&B works offline where nobody is logged in or its
server does not answer within a few seconds: its files then lie in the run's folder, and `wandb sync` uploads them later.
"""

import netrc
import os
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from urllib.parse import urlparse

from manyhands.config.options import to_dict

REACH_S = 5  # for the server to answer at the start
FINISH_S = 30  # for uploads at the end


class Trackers:
    """Those that the options ask for. `say(sentence)` shows what went wrong."""

    def __init__(self, options, folder, world_size, say):
        self.say, self.open = say, {}
        about = to_dict(options) | {"world_size": world_size}
        if options.log.tensorboard:
            self._try("TensorBoard", lambda: _TensorBoard(folder))
        if options.log.wandb:
            self._try("W&B", lambda: _WandB(options.log.wandb, folder, about, say))

    def log(self, row):
        """The numbers of a line, as `report` makes it: those that are none are left out."""
        numbers = {k: v for k, v in row.items() if k != "step" and isinstance(v, (int, float))}
        self._each(lambda tracker: tracker.log(row["step"], numbers))

    def text(self, step, text):
        """A sample after `step`."""
        self._each(lambda tracker: tracker.text(step, text))

    def close(self):
        self._each(lambda tracker: tracker.close())
        self.open.clear()

    def _each(self, call):
        for name, tracker in list(self.open.items()):
            self._try(name, lambda tracker=tracker: call(tracker) or tracker)

    def _try(self, name, call):
        """Keep the tracker that `call()` returns. A failure is said, and ends its use."""
        try:
            self.open[name] = call()
            return
        except ImportError as error:
            extra = {"TensorBoard": "tensorboard", "W&B": "wandb"}[name]
            why = f"is not used: {error}; install it by: pip install -e '.[{extra}]'"
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises
            why = f"is not used any more: {type(error).__name__}: {str(error).split(chr(10))[0]}"
        self.open.pop(name, None)
        self.say(f"{name} {why}. Training goes on")


class _TensorBoard:
    def __init__(self, folder):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))
        self.close = self.writer.close

    def log(self, step, numbers):
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def text(self, step, text):
        self.writer.add_text("sample", f"```\n{text}\n```", step)


class _WandB:
    def __init__(self, project, folder, about, say):
        import wandb

        mode, why = wandb_mode(os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url)
        if why:
            say(f"W&B works offline: {why}. Upload later: wandb sync {folder / 'wandb' / 'offline-run-*'}")
        self.run = wandb.init(
            project=project, dir=str(folder), config=about, name=folder.name, mode=mode,
            settings=wandb.Settings(init_timeout=REACH_S * 4, console="off", silent=True),
        )  # fmt: skip

    def log(self, step, numbers):
        self.run.log(numbers, step=step)

    def text(self, step, text):
        self.run.log({"sample": text}, step=step)

    def close(self):
        _within(FINISH_S, self.run.finish, "its uploads did not end")


def wandb_mode(server):
    """("online" | "offline" | what WANDB_MODE says, why it is offline or ""): decided here, for W&B would ask and wait."""
    host = urlparse(server).hostname or server
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"], ""
    if not os.environ.get("WANDB_API_KEY") and not _in_netrc(host):
        return "offline", f"nobody is logged in to {host}"
    try:
        _within(REACH_S, lambda: _reach(server), "no answer")
    except Exception as error:  # noqa: BLE001
        return "offline", f"{host} cannot be reached ({error})"
    return "online", ""


def _in_netrc(host):
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _reach(server):
    """Raises unless something answers at `server`, through the proxy that the environment names, if it does."""
    with suppress(urllib.error.HTTPError):  # an answer, whatever it says
        urllib.request.urlopen(server, timeout=REACH_S).close()


def _within(seconds, call, otherwise):
    """Run `call()` for at most so long. Raises what it raises, or TimeoutError with the words `otherwise`.

    A silent name server, or an upload that retries for ever, knows no time-out of its own: its thread is left behind.
    """
    raised = []

    def run():
        try:
            call()
        except Exception as error:  # noqa: BLE001
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"{otherwise} within {seconds:g} s")
    if raised:
        raise raised[0]
