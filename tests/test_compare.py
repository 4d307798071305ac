"""A variable of all ranks side by side: equal, or how they differ. The ranks are namespaces of this process."""

import types

import pytest
import torch
from manyhands.notebook import compare as compare_module
from manyhands.notebook.compare import compare


@pytest.fixture
def ranks_with(monkeypatch):
    """ranks_with(values, ...): stand-ins for ipyparallel's views; rank r has the variable x = values[r]."""

    def view(value):
        def call(function, *args):
            here = {} if value is MISSING else {"x": value}
            monkeypatch.setattr(compare_module, "get_ipython", lambda: types.SimpleNamespace(user_ns=here))
            return function(*args)

        return types.SimpleNamespace(
            apply_async=lambda *call_of: types.SimpleNamespace(get=lambda: call(*call_of)), apply_sync=call
        )

    return lambda *values: [view(value) for value in values]


MISSING = object()
NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.5, 0.5, 0.5], "x is equal on all ranks: float 0.5"),
        ([torch.ones(2, 3)] * 2, "x is equal on all ranks: tensor of shape (2, 3), float32, cpu"),
        ([torch.tensor([NAN, 1.0])] * 2, "x is equal on all ranks: tensor of shape (2,), float32, cpu"),
    ],
)
def test_equal_values_are_said_to_be_equal(ranks_with, values, said):
    result = compare(ranks_with(*values), "x")
    assert result and result.lines == (said,)


def with_change(index, by):
    x = torch.arange(12.0).reshape(3, 4)
    x[index] += by
    return x


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        ([1.5, 1.5, 2.5], ["ranks 0-1: float", "rank 2: 2.5, on rank 0 1.5"]),
        (
            [with_change((0, 0), 0), with_change((1, 2), 0.5), with_change((0, 0), 0)],
            ["ranks 0, 2: tensor of shape (3, 4), float32, cpu",
             "rank 1: 1 of 12 elements differ from rank 0, first at [1, 2]: 6.5 on rank 1, 6 on rank 0; "
             "largest difference 0.5"],
        ),
        (
            [torch.ones(2), torch.tensor([1.0, NAN])],
            ["rank 0: tensor of shape (2,), float32, cpu",
             "rank 1: 1 of 2 elements differ from rank 0, first at [1]: nan on rank 1, 1 on rank 0; NaN on one side"],
        ),
        ([torch.ones(2), torch.ones(3)],
         ["rank 0: tensor of shape (2,), float32, cpu", "rank 1: tensor of shape (3,), float32, cpu"]),
    ],
)  # fmt: skip
def test_values_that_differ_say_on_which_ranks_and_by_how_much(ranks_with, values, lines):
    result = compare(ranks_with(*values), "x")
    assert not result
    assert repr(result).splitlines() == ["x differs:", *(f"  {line}" for line in lines)]


def test_a_model_is_compared_parameter_by_parameter(ranks_with):
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    assert compare(ranks_with(*models), "x").lines == ("x is equal on all ranks: 2 parts",)
    with torch.no_grad():
        models[1].bias += 1
    result = compare(ranks_with(*models), "x")
    assert result.lines[:2] == ("x differs in 1 of 2 parts:", "['bias']:")
    assert "first at [0]" in repr(result) and "weight" not in repr(result)


@pytest.mark.parametrize(("ranks", "said"), [([0, 3], "there is no rank 3"), ([1, 1], "at least two ranks")])
def test_ranks_that_cannot_be_compared_are_refused(ranks_with, ranks, said):
    with pytest.raises(ValueError, match=said):
        compare(ranks_with(1.0, 2.0), "x", ranks)
    assert compare(ranks_with(1.0, 2.0, 1.0), "x", [0, 2]), "rank 1 is left out"
