"""The exercises of a lesson's checks, so that none is without wrong answers."""

import importlib
import inspect

from manyhands.course.catch_up import taken_from


def exercises_of(checks):
    """The names of the checks in one of the modules of `manyhands.checks`."""
    return {name for name, check in vars(checks).items() if inspect.isfunction(check) and hasattr(check, "__wrapped__")}


def not_attempted(*_):
    """An exercise as it is handed out."""
    raise NotImplementedError


def heard_alike(results):
    """The verdicts of one rank, after all ranks have heard the same."""
    assert all(result == results[0] for result in results), "all ranks must hear the same verdict"
    return results[0]


def judge_solutions(ranks, checks, lesson, solutions):
    """The verdict on each of the lesson's own solutions, {check: name in the lesson}, by this world."""
    taken = {name: taken_from(lesson, name, world_size=ranks.world_size) for name in solutions.values()}
    module = importlib.import_module(checks)
    return {n: getattr(module, check)(getattr(taken[n], n), ranks, solution=True) for check, n in solutions.items()}
