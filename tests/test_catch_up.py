"""A section gets the definitions it needs from the lesson's own cells, and keeps what is there already."""

from types import SimpleNamespace

import pytest
from manyhands import checks
from manyhands.course import catch_up as module
from manyhands.course.catch_up import catch_up

LESSON = '''
# %%
def answer(x):
    """The stub of an exercise."""
    raise NotImplementedError

# %% [markdown] tags=["solution"]
# <details><summary>Solution 1</summary>
#
# ```python
# import math
#
#
# def answer(x):
#     return scale * floor(x)
#
#
# def floor(x):
#     return math.floor(x)
# ```
#
# </details>

# %%
class Box:
    size = 3

raise SystemExit("the lesson itself was run")
'''


@pytest.fixture
def lesson(tmp_path, monkeypatch):
    (tmp_path / "99_try.py").write_text(LESSON)
    monkeypatch.setattr(module, "script_of", lambda lesson: tmp_path / f"{lesson}.py")
    return {"ranks": SimpleNamespace(lesson="99_try"), "scale": 2}


def test_missing_definitions_come_from_the_lessons_cells_and_the_solution_wins(lesson):
    catch_up(lesson, "answer", "Box")
    assert lesson["answer"](1.5) == 2
    assert lesson["Box"].size == 3


def test_a_helper_of_ones_own_stays_where_a_solution_brings_one_of_that_name(lesson):
    lesson["floor"] = lambda x: 10
    catch_up(lesson, "answer")
    assert lesson["answer"](1.5) == 20


def test_a_stub_that_a_check_finds_not_attempted_gives_way_to_the_lessons_own(lesson, capsys):
    exec("def answer(x):\n    y = x + 1\n    raise NotImplementedError", lesson)
    judged = checks.exercise(1, "answer")(lambda answer, ranks: answer(1.5))
    assert judged(lesson["answer"]) == "not attempted"
    assert lesson["answer"](1.5) == 2
    assert capsys.readouterr().out.endswith("not attempted. The cells below use the lesson's own answer.\n")


def test_rank_0_says_what_was_defined_and_what_was_kept(lesson, capsys):
    for rank, kept, said in (
        (0, {}, "catch_up: answer, Box as the course has it\n"),
        (0, {"Box": object()}, "catch_up: answer as the course has it; Box as you have it\n"),
        (0, {"Box": object(), "answer": object()}, ""),
        (1, {}, ""),
    ):
        here = {**lesson, **kept, "ranks": SimpleNamespace(lesson="99_try", rank=rank)}
        catch_up(here, "answer", "Box")
        assert capsys.readouterr().out == said


def test_a_name_that_the_lesson_does_not_define_is_refused_with_those_it_does(lesson):
    with pytest.raises(NameError, match=r"99_try.py defines no 'ring'; it defines Box, answer, floor"):
        catch_up(lesson, "ring")
