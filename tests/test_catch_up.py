"""A cell gets the functions and classes that it needs and nobody has defined, as the course has them, no more."""

import dis
import subprocess

import pytest
import shortest
from manyhands import checks
from manyhands.course import catch_up as module
from manyhands.course.catch_up import bring, lacking, original, outline_of, reads, whose
from manyhands.course.folders import ROOT
from manyhands.course.lesson_parameters import read as read_parameters
from manyhands.course.lessons import find_lessons
from notebook_kernel import JOIN, TINY, Kernel

KNOWN = outline_of(TINY, "90_tiny")


@pytest.mark.parametrize(
    ("cell", "names"),
    [
        ("y = f(x)", {"f", "x"}),
        ("x = 1\nprint(x)", {"print"}),
        ("print(x)\nx = 1", {"print", "x"}),
        ("def g():\n    return f(later)\nlater = 1\ng()", {"f"}),
        ("def g():\n    return f(later)", set()),
        ("def g():\n    return f()\ndef h():\n    return g()\ny.hook(h)", {"f", "y"}),
        ("class A(Base):\n    size = n\n    def m(self):\n        return self.f + size", {"Base", "__name__", "n"}),
        ("class A(Base):\n    size = 3\n    def m(self):\n        return size\nA()", {"Base", "__name__", "size"}),
        ("y = [f(i) for i in range(3)]", {"f", "range"}),
        ("x += 1", {"x"}),
        ("'f(x)'; y.f; y.f.g(z=1)", {"y"}),
        ("import f\nfrom m import g as h\nf.x; h()", set()),
        ("for f in []:\n    f", set()),
        ("with f() as g:\n    g(lambda: h)", {"f", "h"}),
        ("await f()", {"f"}),
    ],
)
def test_a_name_counts_if_its_first_use_is_a_read_or_a_function_that_the_cell_uses_reads_it(cell, names):
    assert reads(cell)[0] == names


def test_an_import_of_all_names_leaves_those_names_alone():
    names, stars = reads("from math import *\nsqrt(base())")
    assert stars == {"math"} and lacking({}, names, stars, KNOWN.graph()) == ["base", "indent"]


def test_what_is_brought_brings_what_it_reads_and_the_learners_own_stays():
    space = {"__name__": "__main__"}
    assert bring(space, "90_tiny", "Box().full()") == ["Box", "base", "handed_on", "indent"]
    assert space["Box"]().full() == 42 and "weight" not in space, "no values"
    assert bring(space, "90_tiny", "Box().full()") == []
    exec("def base():\n    return 1", space)
    assert bring(space, "90_tiny", "Box().full()") == [] and space["Box"]().full() == 3
    del space["handed_on"]
    assert bring(space, "90_tiny", "Box()") == ["handed_on"], "a class that is there reads it"
    exec("def mine():\n    return [sqrt(i) for i in (1, 2)]", space)
    assert bring(space, "90_tiny", "mine()") == ["sqrt"]
    exec("def handed_on():\n    x = 1\n    return ____", space)
    assert bring(space, "90_tiny", "handed_on()") == ["handed_on"], "a blank that nobody has filled in"


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    known = module.outline
    monkeypatch.setattr(module, "outline", lambda lesson: KNOWN if lesson == "90_tiny" else known(lesson))


def test_a_stub_that_a_check_finds_not_attempted_gives_way_to_the_lessons_own(capsys):
    class Place:
        lesson = "90_tiny"

    space = {"ranks": Place}
    exec("def base():\n    return 40\ndef handed_on():\n    y = 1\n    raise NotImplementedError", space)
    judged = checks.exercise(1, "answer")(lambda answer, ranks: answer())
    assert judged(space["handed_on"]) == "not attempted"
    assert space["handed_on"]() == 42
    assert capsys.readouterr().out.endswith("not attempted. The cells below use the lesson's own handed_on.\n")


def test_definitions_come_from_the_original_or_the_commit_not_from_the_script_that_holds_answers(tmp_path):
    script = tmp_path / "scripts" / "90_tiny.py"
    script.parent.mkdir()
    script.write_text(TINY)
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    script.write_text("def handed_on(:\n    my own")
    assert original(script) == TINY
    kept = tmp_path / ".originals" / "scripts" / "90_tiny.py"
    kept.parent.mkdir(parents=True)
    kept.write_text("# as it was handed out\n")
    assert original(script) == "# as it was handed out\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("weight", 'weight is defined below "And weigh it": run the cells there first.'),
        ("started", 'started is defined below "Start": run the cells there first.'),
        ("handed_on", "handed_on is Build B's: run that cell."),
        ("handed_onn", "handed_onn is not defined; handed_on is. Is it misspelt?"),
        ("something", ""),
    ],
)
def test_a_name_that_stays_missing_is_said_with_its_cells_or_the_nearest_one(name, said):
    assert whose("90_tiny", name) == said


@pytest.mark.parametrize("lesson", find_lessons(ROOT, own=False), ids=lambda lesson: lesson.name)
def test_fresh_ranks_get_all_that_a_lessons_start_binds_but_for_its_parameters(lesson):
    text = lesson.script.read_text("utf-8")
    bound = module._add({}, outline_of(text).begin, "")
    parameters = {parameter.name for parameter in read_parameters(lesson.script)}
    assert "ranks" in bound and bound >= outline_of(text).start - parameters
    assert "n_ranks" not in bound, "they keep the numbers that somebody has chosen"


def test_every_lesson_parses_cell_by_cell_and_each_build_has_a_solution_to_bring():
    for lesson in find_lessons(ROOT, own=False):
        text = lesson.script.read_text("utf-8")
        known = outline_of(text, lesson.name)
        assert "join" in known.start, lesson.name
        for lines in module.solutions(text).values():
            made = {name for node in module.ast.parse(lines).body for name in module._bound_by(node)
                    if isinstance(node, (module.ast.FunctionDef, module.ast.ClassDef))}  # fmt: skip
            assert made <= known.pieces.keys(), lesson.name


# ------------------------------------------------------------------ in a real kernel, on real ranks

BROUGHT = "not there yet, so as the course has it: "


@pytest.fixture(scope="module")
def notebook(tmp_path_factory, root):
    with Kernel(tmp_path_factory.mktemp("course"), root) as kernel:
        kernel.start(n_ranks=2)
        assert kernel.run(JOIN + "\ndef started():\n    return length").error is None
        yield kernel


@pytest.mark.ranks
def test_a_cell_begun_in_the_middle_runs_and_one_line_says_what_came(notebook):
    output = notebook.run("%%ranks\nlines = !echo here\nprint(Box().full(), lines[0])")
    assert output.text.splitlines() == [f"{BROUGHT}handed_on, base, Box", "all ranks | 42 here"]
    assert notebook.run("%%ranks\nprint(Box().full())").text == "all ranks | 42\n"
    notebook.run("%%ranks\ndel base")
    assert notebook.run("%%ranks\nprint(Box().full())").text.startswith(f"{BROUGHT}base\n")


@pytest.mark.ranks
def test_a_learners_own_is_kept_and_a_builds_own_cell_keeps_its_stub(notebook):
    notebook.run("%%ranks\ndef base():\n    return 1")
    assert notebook.run("%%ranks\nprint(handed_on())").text.splitlines()[-1] == "all ranks | 3"
    stub = "def handed_on():\n    raise NotImplementedError"
    assert notebook.run(f"%%ranks\n{stub}\nhanded_on()").error[1] == "rank 0: NotImplementedError: "
    assert notebook.run("%%ranks\nprint(handed_on())").text.splitlines() == [f"{BROUGHT}handed_on", "all ranks | 3"]


@pytest.mark.ranks
def test_what_only_some_ranks_have_is_said_and_not_brought(notebook):
    notebook.run("%%ranks\ndel base")
    notebook.run("%%ranks 1\ndef base():\n    return 7")
    output = notebook.run("%%ranks\nprint(base())")
    assert output.text.startswith("base is there on some of these ranks only: run the cell that defines it on all\n")
    assert output.error[1].startswith("rank 0: NameError")
    assert notebook.run("%%ranks 0\nprint(base())").text == f"{BROUGHT}base\nrank 0 | 40\n"


@pytest.mark.ranks
def test_names_that_the_cell_binds_or_does_not_read_bring_nothing(notebook):
    notebook.run("%%ranks\nfor name in ('base', 'handed_on', 'Box', 'sqrt'): globals().pop(name, None)")
    cell = "%%ranks\nfrom math import *\nbase = 3\nprint(sqrt(base + 1), 'handed_on()', rank.real)"
    assert notebook.run(cell).text.splitlines() == ["rank 0 | 2.0 handed_on() 0", "rank 1 | 2.0 handed_on() 1"]
    assert notebook.run("%%ranks\nhalf a cell (").error[1].startswith("rank 0: SyntaxError")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("cell", "hint"),
    [
        ("print(weight)", 'weight is defined below "And weigh it": run the cells there first.'),
        ("handed_onn()", "handed_onn is not defined; handed_on is. Is it misspelt?"),
        ("del started\nstarted()", 'started is defined below "Start": run the cells there first.'),
    ],
)
def test_a_value_a_misspelt_name_and_one_of_the_start_stay_a_name_error_with_a_hint(notebook, cell, hint):
    kind, value, lines = notebook.run(f"%%ranks\n{cell}").error
    assert "NameError" in value and hint in " ".join(lines.split())


@pytest.mark.ranks
def test_after_a_restart_the_start_cells_run_by_themselves(notebook):
    assert notebook.run("hands.restart()").error is None
    output = notebook.run("%%ranks\nprint(started(), handed_on(), dist.get_world_size())")
    lines = ["the ranks are fresh: the start cells were run again", f"{BROUGHT}handed_on, base", "all ranks | 3 42 2"]
    assert output.text.splitlines() == lines
    assert notebook.run("%%ranks\nprint(rank)").text == "rank 0 | 0\nrank 1 | 1\n", "once"


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("lesson", find_lessons(ROOT, own=False), ids=lambda lesson: lesson.name)
def test_after_a_rank_has_died_the_next_cell_of_every_lesson_finds_what_start_defines(tmp_path, root, lesson):
    steps = dis.get_instructions(compile(outline_of(lesson.script.read_text("utf-8")).begin, "start", "exec"))
    bound = {step.argval for step in steps if step.opname == "STORE_NAME"}
    assert len(bound) > 5
    parameters = {one.name: one.default for one in read_parameters(lesson.script)}
    given = parameters | shortest.values(lesson) | {"n_ranks": 2}
    with Kernel(tmp_path, root, {"MANYHANDS_OUTPUTS": str(tmp_path)}) as kernel:
        path = f"import sys; sys.path.insert(0, {str(root / 'scripts')!r})"
        start = f"from manyhands.notebook.start import start_ranks\nhands = start_ranks({lesson.name!r}, globals())"
        assert kernel.run(f"{path}\nglobals().update({given})\n{start}").error is None
        died = kernel.run("%%ranks 1\nimport os\nos.kill(os.getpid(), 9)").error[2]
        assert "The next cell runs those of Start by itself." in " ".join(died.split())
        output = kernel.run(f"%%ranks\nprint(sorted({bound} - globals().keys()))")
        assert output.text == "the ranks are fresh: the start cells were run again\nall ranks | []\n", output.error


@pytest.mark.ranks
def test_a_plain_cell_of_the_kernel_gets_what_it_needs_too(notebook):
    assert notebook.run("print(base())").text == f"{BROUGHT}base\n40\n"
