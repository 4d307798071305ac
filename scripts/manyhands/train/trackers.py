"""Log to TensorBoard and Weights & Biases: opt-in, on rank 0, never stopping the training.

    trackers = Trackers(options, folder, world_size, say)     # --log.tensorboard, --log.wandb PROJECT
    trackers.log(row); trackers.text(step, text); trackers.close()

A failure is reported once, by `say`, and disables that tracker. W&B works offline if the user is not logged in or its
server does not answer within seconds: its files are then in the run's folder, and `wandb sync` uploads them later.
"""

import os
import threading

from manyhands.config.options import to_dict

REACH_S = 20  # seconds for the server to answer at the start
FINISH_S = 30  # seconds for uploads at the end


class Trackers:
    """The trackers that the options ask for. `say(sentence)` shows errors."""

    def __init__(self, options, folder, world_size, say):
        self.say, self.open = say, {}
        about = to_dict(options) | {"world_size": world_size}
        if options.log.tensorboard:
            self._try("TensorBoard", lambda: _TensorBoard(folder))
        if options.log.wandb:
            self._try("W&B", lambda: _WandB(options.log.wandb, folder, about, say))

    def log(self, row):
        """Log the numbers of a report's row, without None."""
        numbers = {k: v for k, v in row.items() if k != "step" and isinstance(v, (int, float))}
        self._each("log", row["step"], numbers)

    def text(self, step, text):
        """Log a sample after `step`."""
        self._each("text", step, text)

    def close(self):
        self._each("close")

    def _each(self, method, *args):
        for name, tracker in list(self.open.items()):
            self._try(name, lambda tracker=tracker: getattr(tracker, method)(*args) or tracker)

    def _try(self, name, call):
        """Keep the tracker that `call()` returns. A failure is reported and disables it."""
        try:
            self.open[name] = call()
            return
        except ImportError as error:
            extra = {"TensorBoard": "tensorboard", "W&B": "wandb"}[name]
            why = f"is not used: {error}; install it by: pip install -e '.[{extra}]'"
        except Exception as error:  # noqa: BLE001 - any error of a tracker
            why = f"is disabled: {type(error).__name__}: {str(error).split(chr(10))[0]}"
        self.open.pop(name, None)
        self.say(f"{name} {why}. Training continues")


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

        wanted = {
            "project": project, "dir": str(folder), "config": about, "name": folder.name,
            "settings": wandb.Settings(init_timeout=REACH_S, console="off", silent=True),
        }  # fmt: skip
        try:
            if not os.environ.get("WANDB_MODE") and not wandb.login(prompt=False):
                raise wandb.Error("not logged in")
            self.run = wandb.init(**wanted)
        except wandb.Error as error:  # also on a compute node without a network
            why, offline = str(error).splitlines()[0], folder / "wandb" / "offline-run-*"
            say(f"W&B works offline: {why}. Upload later: wandb sync {offline}")
            self.run = wandb.init(**wanted, mode="offline")

    def log(self, step, numbers):
        self.run.log(numbers, step=step)

    def text(self, step, text):
        self.run.log({"sample": text}, step=step)

    def close(self):
        """End the run, abandoning an upload that is retried forever."""
        ending = threading.Thread(target=self.run.finish, daemon=True)
        ending.start()
        ending.join(FINISH_S)
        if ending.is_alive():
            raise TimeoutError(f"its uploads did not end within {FINISH_S:g} s")
