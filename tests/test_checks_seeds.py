"""Whatever a check draws: each lesson's solutions stay right, and its wrong answers wrong, under any seed of a check.

A world of one in one process; the other tests of the checks have the ranks, and the sentences of the first seed.
"""

import importlib
import inspect
from pathlib import Path

import pytest
from exercises import Answers, AnswersOfRanks, _folder, edited, is_edit, own_answers

SEEDS = range(20)  # the first is that of the lessons
WRONG, WRONG_SEEDS = 3, (1, 8)  # answers of each check, and the seeds under which they are judged


def tables():
    """The classes of answers of all lessons' tests."""
    for path in sorted(Path(__file__).parent.glob("test_checks_*.py")):
        if path.stem != Path(__file__).stem:
            for found in vars(importlib.import_module(path.stem)).values():
                if inspect.isclass(found) and issubclass(found, Answers) and found.lesson:
                    yield found


def judge(ranks, module, name):
    """[(check, answer, seed, verdict)] of those that were misjudged."""
    table = next(found for found in tables() if (found.__module__, found.__name__) == (module, name))
    own = own_answers(table.lesson, table.named_solutions(), table.around, ranks, **table.given)
    misjudged = []
    for check, solution in own.items():
        wrong = [] if issubclass(table, AnswersOfRanks) else _some_wrong(table, check, solution)
        asked = [("solution", solution, seed) for seed in SEEDS]
        asked += [(*case, seed) for case in wrong for seed in WRONG_SEEDS]
        for what, answer, seed in asked:
            heard = getattr(table.checks, check)(answer, ranks, seed=seed, **_folder(check in table.in_a_folder))
            if (heard == "correct") != (what == "solution"):
                misjudged.append((check, what, seed, str(heard)))
    return misjudged


def _some_wrong(table, check, solution):
    """A handful, evenly from the table; with one rank alone, those that need others may well be right."""
    cases = [(name, answer) for (of, name), (answer, _) in table.wrong_answers().items() if of == check]
    return [
        (name, edited(solution, *answer) if is_edit(answer) else answer)
        for name, answer in cases[:: max(1, len(cases) // WRONG)][:WRONG]
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("table", list(tables()), ids=lambda table: f"{table.lesson}-{table.__name__}")
def test_under_any_seed_solutions_are_right_and_wrong_answers_wrong(pool, table, tmp_path):
    environ = {"MANYHANDS_OUTPUTS": str(tmp_path)}
    assert pool.run(1, judge, table.__module__, table.__name__, timeout_s=250, environ=environ) == [[]]
