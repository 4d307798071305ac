"""Are you ready for the course? Six small functions in PyTorch, ten minutes, checked here.

make ready        # the first time: writes outputs/ready.py; then: says of each function whether it is right
"""

import copy
import importlib.util
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from manyhands.launch.run_folder import outputs_folder

TASKS = '''"""Six small functions, ten minutes. Write one in place of each `...`, save, and type `make ready` again."""

import torch
import torch.nn.functional as F


def loss_of(model, x, y):
    """Return the mean squared error of model(x) and y, a tensor with one number."""
    ...


def step(model, optimizer, x, y):
    """Train one step on x and y with the mean squared error. Return the loss before the step."""
    ...


def sizes(model):
    """Return (the number of parameters that are trained, their bytes)."""
    ...


def in_two_halves(model, x, y):
    """Call backward for the first half of the rows and then for the second.

    Afterwards the gradients are those of the mean squared error of the whole batch. No step is made.
    """
    ...


def evaluate(model, x, y):
    """Return the mean squared error without dropout and without a graph. The model then trains as before."""
    ...


def save(model, optimizer, path):
    """Write all into the file `path` that `load` needs."""
    ...


def load(model, optimizer, path):
    """Bring another model and its optimizer into the state that was saved."""
    ...
'''
NOT_YET = "not written yet"


def batch():
    """Return a network with dropout, x [8, 3], y [8, 1], drawn anew."""
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 1)).double(),
        torch.randn(8, 3).double(),
        torch.randn(8, 1).double(),
    )


def plain(model, x, y):
    return (model(x) - y).square().mean()


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def equal(found, wanted):
    pairs = zip(found, wanted, strict=True) if len(found) == len(wanted) else [(None, None)]
    return all(a is not None and a.shape == b.shape and torch.allclose(a, b, atol=1e-9) for a, b in pairs)


def check_loss_of(answer):
    """Say what is wrong with a loss; "" if it is right."""
    model, x, y = batch()
    model.eval()
    found, wanted = answer.loss_of(model, x, y), plain(model, x, y).detach()
    if found is None:
        return NOT_YET
    if not isinstance(found, torch.Tensor):
        return f"it returns {type(found).__name__}: without the tensor nobody can call backward"
    if found.numel() != 1:
        return f"it returns {tuple(found.shape)} numbers, and the mean is one"
    found = found.detach().double()
    if torch.isclose(found, len(x) * wanted):
        return "it adds the squares up: divide by their number"
    return "" if torch.isclose(found, wanted) else "it is another number than the mean of the squares"


def check_step(answer):
    """Say what is wrong with two steps; "" if they are right."""
    model, x, y = batch()
    model.eval()
    mine, other = copy.deepcopy(model), copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (mine, other)]
    found, wanted = [], []
    for _ in range(2):
        found.append(answer.step(mine, optimizers[0], x, y))
        wanted.append(loss := plain(other, x, y))
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
    if found[0] is None and equal(list(mine.parameters()), list(model.parameters())):
        return NOT_YET
    if equal(list(mine.parameters()), list(model.parameters())):
        return "the weights are as before: is there a backward, and a step of the optimizer?"
    if not equal(list(mine.parameters()), list(other.parameters())):
        return "the second step differs: does it begin with gradients of zero?"
    if found[0] is None or not torch.isclose(torch.as_tensor(found[0]).double(), wanted[0].detach()):
        return "the weights are right; return the loss before the step"
    return ""


def check_sizes(answer):
    """Say what is wrong with the sizes; "" if they are right."""
    model, _, _ = batch()
    model[2].bias.requires_grad_(False)
    found = answer.sizes(model)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if found is None:
        return NOT_YET
    if not isinstance(found, (tuple, list)):
        return f"it returns {found!r}: return two numbers, parameters and bytes"
    if tuple(found) == (count + 1, 8 * (count + 1)):
        return "it counts a parameter that is not trained: see requires_grad"
    if tuple(found) == (count, 4 * count):
        return "these parameters are float64: ask each for its element_size()"
    return "" if tuple(found) == (count, 8 * count) else f"it returns {tuple(found)}, and {count, 8 * count} is right"


def check_in_two_halves(answer):
    """Say what is wrong with gradients in two halves; "" if they are right."""
    model, x, y = batch()
    model.eval()
    before = copy.deepcopy(model.state_dict())
    plain(model, x, y).backward()
    wanted = gradients(model)
    model.zero_grad()
    second = x[4:], y[4:]
    answer.in_two_halves(model, x, y)
    found = gradients(model)
    if all(one is None for one in found):
        return NOT_YET
    if not equal(list(model.state_dict().values()), list(before.values())):
        return "the weights have changed: no step here"
    if equal(found, wanted):
        return ""
    if equal(found, [2 * one for one in wanted]):
        return "they are twice as large: each half's mean counts half"
    model.zero_grad()
    plain(model, *second).backward()
    if any(equal(found, [factor * one for one in gradients(model)]) for factor in (1, 0.5)):
        return "they are those of the second half alone: the gradients of the first were set to zero"
    return "they are not those of the whole batch"


def check_evaluate(answer):
    """Say what is wrong with an evaluation; "" if it is right."""
    model, x, y = batch()
    found = answer.evaluate(model, x, y)
    if found is None:
        return NOT_YET
    if isinstance(found, torch.Tensor) and found.requires_grad:
        return "its result has a graph: use torch.no_grad()"
    if not model.training:
        return "the model is left in eval(): dropout stays off when the training goes on"
    wanted = plain(copy.deepcopy(model).eval(), x, y).detach()
    if not torch.isclose(torch.as_tensor(found).double(), wanted):
        return "it is another number: is dropout off?"
    return ""


def check_save_and_load(answer):
    """Say what is wrong with a checkpoint; "" if it is right."""
    model, x, y = batch()
    model.eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def train(model, optimizer):
        optimizer.zero_grad()
        plain(model, x, y).backward()
        optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    train(model, optimizer)
    other = batch()[0].eval()
    for p in other.parameters():
        nn.init.zeros_(p)
    its = torch.optim.Adam(other.parameters(), lr=0.1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"
        answer.save(model, optimizer, path)
        if not path.exists():
            return NOT_YET
        saved = [p.detach().clone() for p in model.parameters()]
        wanted = train(model, optimizer)  # what goes on must not change what was saved
        answer.load(other, its, path)
    if not equal(list(other.parameters()), saved):
        return "the other model has not the weights that were saved"
    if not equal(train(other, its), wanted):
        return "the next step differs: the optimizer has a state, too"
    return ""


CHECKS = {
    "loss_of": check_loss_of, "step": check_step, "sizes": check_sizes, "in_two_halves": check_in_two_halves,
    "evaluate": check_evaluate, "save and load": check_save_and_load,
}  # fmt: skip


def verdicts(path: Path) -> dict[str, str]:
    """Return {function: what is wrong with it, "" where it is right} of a file; one sentence if it cannot run."""
    spec = importlib.util.spec_from_file_location("ready", path)
    answer = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(answer)
    except Exception as error:  # noqa: BLE001 - whatever somebody has typed
        return {path.name: f"it does not run: {type(error).__name__}: {error}"}
    found = {}
    for name, check in CHECKS.items():
        try:
            found[name] = check(answer)
        except Exception as error:  # noqa: BLE001
            found[name] = f"it raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return found


def main() -> int:
    """Write the file, or check it."""
    path = outputs_folder() / "ready.py"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TASKS)
        print(f"written: {path}\nFill in its six functions with any editor, then type `make ready` again.")
        return 0
    found = verdicts(path)
    for name, wrong in found.items():
        print(f"{name}: {wrong or 'right'}")
    if not any(found.values()):
        print("You are ready.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
