"""What the tests of all lessons' checks share: their answers are judged once, and each has a test of its own.

class TestAnswers(AnswersOfRanks):
    lesson, checks, world = "07_tensor_parallel", tensor_parallel, 3
    rejected, right, solutions = REJECTED, RIGHT, SOLUTIONS

Most wrong answers are the lesson's own with a slip, ("the lesson's text", "what stands there instead", sentence):

REJECTED = {"bits_per_byte": [("/ math.log(2)", "* math.log(2)", "divide by ln 2, do not multiply")]}

`make test` judges the first FEW wrong answers of each check and one right one, `make test-full` all of them. Only what
is asked for is judged: `pytest tests/test_checks_x.py -k NAME` is quick.
"""

import dataclasses
import functools
import importlib
import inspect
import os
import sys
from collections import Counter

import pytest
import torch.distributed as dist
from definitions import taken_from
from strange_results import CHANGES, changed

FEW = 2  # wrong answers of each check that are judged without `full`


def exercises_of(checks):
    """The names of the checks in one of the modules of `manyhands.checks`."""
    own = {name: it for name, it in vars(checks).items() if inspect.isfunction(it) and it.__module__ == checks.__name__}
    return {name for name, check in own.items() if hasattr(check, "__wrapped__")}


def not_attempted(*_, **given):
    """An exercise as it is handed out."""
    raise NotImplementedError


def heard_alike(results):
    """The verdicts of one rank, after all ranks have heard the same."""
    assert all(result == results[0] for result in results), "all ranks must hear the same verdict"
    return results[0]


def _folder(is_needed):
    return {"folder": os.environ["MANYHANDS_OUTPUTS"]} if is_needed else {}


def own_answers(lesson, solutions, around=(), ranks=None, **given):
    """{check: the lesson's own answer} for solutions {check: name or names in the lesson}.

    around: further names of the lesson, which the solutions use; `given`: further globals.
    """
    names = [name for named in solutions.values() for name in ([named] if isinstance(named, str) else named)]
    rank, n = (ranks.rank, ranks.world_size) if ranks else (0, 1)
    given = {"rank": rank, "world_size": n, "left": (rank - 1) % n, "right": (rank + 1) % n} | given
    ours = taken_from(lesson, *dict.fromkeys((*around, *names)), **given)
    return {
        check: getattr(ours, named) if isinstance(named, str) else tuple(getattr(ours, name) for name in named)
        for check, named in solutions.items()
    }


def judge_solutions(ranks, checks, lesson, solutions, around=(), in_a_folder=(), **given):
    """The verdict on each of the lesson's own solutions by this world."""
    module = importlib.import_module(checks)
    own = own_answers(lesson, solutions, around, ranks, **given)
    return {
        check: getattr(module, check)(answer, ranks, **_folder(check in in_a_folder)) for check, answer in own.items()
    }


def judge_on_gpus(ranks, *of_lesson, **given):
    """The same where each rank has a GPU of its own, a stand-in."""
    from stand_in_device import GPU, StandIn  # it brings torch._dynamo

    with StandIn():
        return judge_solutions(dataclasses.replace(ranks, device=GPU), *of_lesson, **given)


def edited(answer, *edits):
    """A function of a lesson, or a tuple of them, with other text: edits are old, new, old, new, ..."""
    functions = answer if isinstance(answer, tuple) else (answer,)
    source = "\n\n".join(map(inspect.getsource, functions))
    for old, new in zip(edits[::2], edits[1::2], strict=True):
        assert old in source, f"the lesson's answer has no {old!r}:\n{source}"
        source = source.replace(old, new)
    space = dict(functions[0].__globals__)
    exec(compile(source, "<an answer>", "exec"), space)  # noqa: S102
    found = tuple(space[function.__name__] for function in functions)
    return found if isinstance(answer, tuple) else found[0]


def is_edit(answer):
    return isinstance(answer, tuple) and all(isinstance(part, str) for part in answer)


def asked(request, cls, kinds):
    """The answers of these kinds that this run of pytest looks at: [(check, name)]."""
    items = [item for item in request.session.items if getattr(item, "cls", None) is cls]
    return [item.callspec.params[kind] for kind in kinds for item in items if kind in item.fixturenames]


class FromLesson:
    """The lesson's own functions, taken out of it when one of them is called: `ours.culprit(records, members)`.

    given: {name: function of this process} for the globals that they use.
    """

    def __init__(self, lesson, *names, **given):
        self._found = functools.cache(lambda: taken_from(lesson, *names, **{k: make() for k, make in given.items()}))

    def __getattr__(self, name):
        return lambda *args, **kwargs: getattr(self._found(), name)(*args, **kwargs)


class Answers:
    """Tests of a lesson's checks, for a subclass that holds answers; judged in this process, without ranks.

    rejected: {check: [(wrong answer, part of its sentence)]}; also {answer: part} or {name: (answer, part)}.
    right: {check: [answers in other styles]}. An answer is a function, or edits of the lesson's own: old, new, ...
    solutions: {check: name or names in the lesson}, where it is not the check's own; `around`, `given`: further
        names and {global: value} that they use.
    elsewhere: checks that other tests look at. worlds: further numbers of ranks by which solutions are judged.
    in_a_folder: checks that are given a folder of all ranks. patient: checks that draw more than a stand-in for a GPU
        computes in their time.
    """

    lesson = checks = None
    rejected, right, solutions, around, given, elsewhere, worlds = {}, {}, {}, (), {}, (), (2,)
    in_a_folder = patient = ()

    @classmethod
    def wrong_answers(cls):
        """{(check, name): (answer, part of the sentence)}"""
        found = {}
        for check, answers in cls.rejected.items():
            cases = answers.items() if isinstance(answers, dict) else ((case[:-1], case[-1]) for case in answers)
            for i, (first, case) in enumerate(cases):
                answer, sentence = case if isinstance(case, tuple) else (first, case)
                if isinstance(answer, tuple) and len(answer) == 1:
                    (answer,) = answer
                name = answer[1] if is_edit(answer) else getattr(answer, "__name__", "")
                found[check, first if isinstance(first, str) else f"{i}-{name}"] = answer, sentence
        return found

    @classmethod
    def named_solutions(cls):
        return {check: cls.solutions.get(check, check) for check in sorted(exercises_of(cls.checks) - {*cls.elsewhere})}

    @classmethod
    def judge(cls, cases, ranks=None):
        """The wrong answers, then the right ones, in the same processes: none poisons the next."""
        answers = {case: answer for case, (answer, _) in cls.wrong_answers().items()}
        answers |= {(check, i): answer for check, right in cls.right.items() for i, answer in enumerate(right)}
        answers = {case: answer for case, answer in answers.items() if case in cases}
        for check, named in cls.named_solutions().items():
            answers[check, "stub"] = not_attempted if isinstance(named, str) else (not_attempted,) * len(named)
        own, verdicts = own_answers(cls.lesson, cls.named_solutions(), cls.around, ranks, **cls.given), {}
        answers |= {(check, "solution"): answer for check, answer in own.items()}
        for (check, name), answer in answers.items():
            answer = edited(own[check], *answer) if is_edit(answer) else answer
            verdicts[check, name] = getattr(cls.checks, check)(answer, ranks, **_folder(check in cls.in_a_folder))
        return verdicts

    @classmethod
    def judge_forms(cls, cases, ranks=None):
        """{case: (the verdict on the solution whose results are changed, whether they were on any rank)}"""
        own, found = own_answers(cls.lesson, cls.named_solutions(), cls.around, ranks, **cls.given), {}
        for check, form in cases:
            touched = []
            answer = changed(own[check], CHANGES[form][0], touched)
            verdict = getattr(cls.checks, check)(answer, ranks, **_folder(check in cls.in_a_folder))
            everyone = [any(touched)] * (ranks.world_size if ranks else 1)
            if ranks:
                dist.all_gather_object(everyone, any(touched))
            found[check, form] = str(verdict), any(everyone)
        return found

    @classmethod
    def judged(cls, request, judge, *kinds):
        return getattr(cls, judge)(asked(request, cls, kinds))

    @pytest.fixture(scope="class")
    @classmethod
    def verdicts(cls, request):
        return cls.judged(request, "judge", "wrong", "right")

    @pytest.fixture(scope="class")
    @classmethod
    def forms(cls, request):
        return cls.judged(request, "judge_forms", "form")

    def pytest_generate_tests(self, metafunc):
        counted, wrong = Counter(), []
        for case in self.wrong_answers():
            counted[case[0]] += 1
            wrong.append(pytest.param(case, marks=[pytest.mark.full] if counted[case[0]] > FEW else []))
        cases = {
            "wrong": wrong,
            "right": [
                pytest.param((check, i), marks=[pytest.mark.full] if i else [])
                for check, answers in self.right.items()
                for i in range(len(answers))
            ],
            "form": [
                pytest.param(
                    (check, form),
                    marks=[] if i < FEW and j == (i + len(self.lesson + check)) % len(CHANGES) else [pytest.mark.full],
                )
                for i, check in enumerate(self.named_solutions())
                for j, form in enumerate(CHANGES)
            ],
            "check": sorted(self.rejected),
            # `verdicts` has the solutions on several ranks, and in one process where the check communicates nothing
            "world": [
                pytest.param(n, marks=[] if n == 1 and hasattr(self, "world") else [pytest.mark.full])
                for n in self.worlds
            ],
        }
        for name in cases.keys() & set(metafunc.fixturenames):
            metafunc.parametrize(
                name, cases[name], ids=lambda case: "-".join(map(str, case)) if type(case) is tuple else None
            )

    def test_a_wrong_answer_is_rejected_with_the_sentence_that_names_its_fault(self, verdicts, wrong):
        _, sentence = self.wrong_answers()[wrong]
        heard = verdicts[wrong]
        assert sentence.lower() in heard.lower() and heard != "correct", f"{heard!r} does not say {sentence!r}"

    def test_a_right_answer_in_another_style_is_accepted(self, verdicts, right):
        assert verdicts[right] == "correct"

    def test_a_result_in_another_form_is_accepted_and_a_wrong_thing_refused_with_a_sentence(self, forms, form):
        (heard, was_changed), may_be_accepted = forms[form], CHANGES[form[1]][1]
        if heard == "correct":
            assert may_be_accepted or not was_changed
        else:
            assert was_changed and heard.endswith((".", "?")) and "cannot use" not in heard, heard

    def test_the_solution_is_accepted_and_what_is_not_attempted_is_no_fault(self, verdicts, check):
        assert (verdicts[check, "solution"], verdicts[check, "stub"]) == ("correct", "not attempted")

    def test_every_check_has_four_wrong_answers_or_more_and_a_right_one(self):
        assert exercises_of(self.checks) - {*self.elsewhere} == set(self.rejected) == set(self.right)
        assert all(len(answers) >= 4 for answers in self.rejected.values()) and all(self.right.values())

    def test_the_lessons_solutions_are_accepted_on_other_numbers_of_ranks(self, pool, world, tmp_path):
        self.judge_in(pool, world, judge_solutions, tmp_path, self.named_solutions())

    @pytest.mark.full
    def test_the_lessons_solutions_are_accepted_where_each_rank_has_a_gpu(self, pool, tmp_path):
        quick = {check: named for check, named in self.named_solutions().items() if check not in self.patient}
        self.judge_in(pool, 2, judge_on_gpus, tmp_path, quick)

    def judge_in(self, pool, world, judge, folder, solutions):
        environ = {"MANYHANDS_OUTPUTS": str(folder)}
        of_lesson = self.checks.__name__, self.lesson, solutions, self.around, self.in_a_folder
        for found in pool.run(world, functools.partial(judge, **self.given), *of_lesson, environ=environ):
            assert found == dict.fromkeys(solutions, "correct")


class AnswersOfRanks(Answers):
    """The same, judged by `world` ranks of the pool."""

    world, worlds = 3, (1, 2)  # three: not a power of two, nothing splits evenly

    @classmethod
    def judged(cls, request, judge, *kinds):
        environ = {"MANYHANDS_OUTPUTS": str(request.getfixturevalue("tmp_path_factory").mktemp("outputs"))}
        there = cls.world, _judge_there, cls.__module__, cls.__name__, judge, asked(request, cls, kinds)
        return heard_alike(request.getfixturevalue("pool").run(*there, timeout_s=280, environ=environ))


def _judge_there(ranks, module, name, judge, cases):
    """The same class, as the process of a rank imports it."""
    importlib.import_module(module)
    return getattr(getattr(sys.modules[module], name), judge)(cases, ranks)
