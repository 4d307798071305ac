"""`make ready`: its answers pass, and natural slips get a sentence."""

import pytest
from manyhands.tools import ready
from manyhands.tools.ready import NOT_YET, TASKS, verdicts

RIGHT = """
import torch
import torch.nn.functional as F

def loss_of(model, x, y):
    return F.mse_loss(model(x), y)

def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    optimizer.step()
    return loss.item()

def sizes(model):
    mine = [p for p in model.parameters() if p.requires_grad]
    return sum(p.numel() for p in mine), sum(p.numel() * p.element_size() for p in mine)

def in_two_halves(model, x, y):
    for part, wanted in zip(x.chunk(2), y.chunk(2)):
        (loss_of(model, part, wanted) / 2).backward()

def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, x, y)
    model.train()
    return loss

def save(model, optimizer, path):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

def load(model, optimizer, path):
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
"""


def said(folder, text):
    path = folder / "ready.py"
    path.write_text(text)
    return verdicts(path)


def test_right_answers_are_right_and_the_file_as_it_is_given_is_not_written_yet(tmp_path):
    assert set(said(tmp_path, RIGHT).values()) == {""}
    assert set(said(tmp_path, TASKS).values()) == {NOT_YET}


@pytest.mark.parametrize(
    ("old", "new", "name", "sentence"),
    [
        ("F.mse_loss(model(x), y)", "F.mse_loss(model(x), y).item()", "loss_of", "nobody can call backward"),
        ("F.mse_loss(model(x), y)", "F.mse_loss(model(x), y, reduction='sum')", "loss_of", "divide by their number"),
        ("F.mse_loss(model(x), y)", "(model(x) - y) ** 2", "loss_of", "(8, 1) numbers, and the mean is one"),
        ("    optimizer.zero_grad()\n", "", "step", "does it begin with gradients of zero?"),
        ("    optimizer.step()\n", "", "step", "the weights are as before"),
        ("    return loss.item()", "    pass", "step", "return the loss before the step"),
        (" if p.requires_grad", "", "sizes", "see requires_grad"),
        ("p.element_size()", "4", "sizes", "float64"),
        ("(loss_of(model, part, wanted) / 2).backward()", "loss_of(model, part, wanted).backward()", "in_two_halves",
         "each half's mean counts half"),
        ("        (loss_of(model, part", "        model.zero_grad(); (loss_of(model, part", "in_two_halves",
         "the second half alone"),
        ("    with torch.no_grad():\n", "    if True:\n", "evaluate", "torch.no_grad()"),
        ("    model.eval()\n", "", "evaluate", "is dropout off?"),
        ("    model.train()\n", "", "evaluate", "left in eval()"),
        ('    optimizer.load_state_dict(state["optimizer"])\n', "", "save and load", "the optimizer has a state, too"),
        ('    model.load_state_dict(state["model"])\n', "", "save and load", "has not the weights"),
        ("return sum(p.numel() for p in mine), ", "return ", "sizes", "return two numbers, parameters and bytes"),
        ("return F.mse_loss(model(x), y)", "return torch.zeros(())", "loss_of", "another number than the mean"),
        ("def sizes(model):", "def sizes(network):", "sizes", "it raised NameError: name 'model' is not defined"),
    ],
)  # fmt: skip
def test_a_natural_slip_gets_a_sentence_and_leaves_the_others_alone(tmp_path, old, new, name, sentence):
    assert old in RIGHT
    found = said(tmp_path, RIGHT.replace(old, new, 1))
    assert sentence in found[name]
    assert name == "loss_of" or [one for one, wrong in found.items() if wrong] == [name]


def test_a_file_that_does_not_run_is_one_sentence_and_the_first_start_writes_it(tmp_path, monkeypatch, capsys):
    assert said(tmp_path, "def (") == {"ready.py": "it does not run: SyntaxError: invalid syntax (ready.py, line 1)"}
    monkeypatch.setenv("MANYHANDS_OUTPUTS", str(tmp_path / "outputs"))
    assert ready.main() == 0 and "written: " in capsys.readouterr().out
    assert (tmp_path / "outputs" / "ready.py").read_text() == TASKS
    assert ready.main() == 0 and "step: not written yet" in capsys.readouterr().out
