"""A section gets the definitions it needs from the lesson's own cells, and keeps what is there already."""

from types import SimpleNamespace

import pytest
from manyhands.course import catch_up as module
from manyhands.course.catch_up import catch_up

LESSON = '''
import math

# %%
def answer(x):
    """The stub of an exercise."""
    raise NotImplementedError

# %%
def answer(x):
    return scale * math.floor(x)

class Box:
    size = 3

raise SystemExit("the lesson itself was run")
'''


@pytest.fixture
def lesson(tmp_path, monkeypatch):
    (tmp_path / "99_try.py").write_text(LESSON)
    monkeypatch.setattr(module, "script_of", lambda lesson: tmp_path / f"{lesson}.py")
    return {"ranks": SimpleNamespace(lesson="99_try"), "math": __import__("math"), "scale": 2}


def test_missing_definitions_come_from_the_lessons_cells_and_the_solution_wins(lesson):
    catch_up(lesson, "answer", "Box")
    assert lesson["answer"](1.5) == 2
    assert lesson["Box"].size == 3


@pytest.mark.parametrize(
    "stub", ["def answer(x):\n    return scale * ____", "def answer(x):\n    return [math.____(y) for y in [x]]"]
)
def test_a_function_with_a_blank_is_a_stub_in_the_file_and_as_it_was_run(lesson, tmp_path, stub):
    path = tmp_path / "99_try.py"
    path.write_text(LESSON.replace("    raise NotImplementedError", stub.partition("\n")[2]))
    exec(stub, lesson)
    catch_up(lesson, "answer")
    assert lesson["answer"](1.5) == 2


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


def test_what_is_defined_already_stays(lesson):
    mine = lesson["answer"] = object()
    catch_up(lesson, "answer")
    assert lesson["answer"] is mine


def test_a_name_that_the_lesson_does_not_define_is_refused_with_those_it_does(lesson):
    with pytest.raises(NameError, match=r"99_try.py defines no 'ring'; it defines Box, answer"):
        catch_up(lesson, "ring")
