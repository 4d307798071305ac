"""The package is a house with floors: a module imports from its own package and from those below it, and from nowhere else."""

import ast
import functools
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "scripts" / "manyhands"
# from the ground up: a package imports only those before it in this list
ORDER = (
    "course", "launch", "plots", "measure", "gpt", "config", "parallel", "predict", "data", "checkpoint", "train", "align",
    "serve", "notebook", "checks", "widgets", "jobs", "doctor", "preflight", "bench",
)  # fmt: skip
GROUND = {"course": (), "gpt": (), "plots": ("course",)}  # these stand alone, or nearly
FACE = "manyhands"  # what lessons take from `manyhands` itself; it stands above all


@functools.cache
def tree_of(text):
    return ast.parse(text)


def sources(folder=PACKAGE):
    """{"manyhands.launch.screen": its text} of every module below `folder`; a package is named after itself."""
    found = {}
    for path in folder.rglob("*.py"):
        parts = [folder.name, *path.relative_to(folder).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text("utf-8")
    return found


def imports(texts):
    """[(module, line, where from, name)] of all imports of ours, those inside functions too; name None: `import module`."""
    found = []
    for module, text in texts.items():
        for node in ast.walk(tree_of(text)):
            if isinstance(node, ast.Import):
                found += [(module, node.lineno, a.name, None) for a in node.names if ours(a.name)]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{module}:{node.lineno} imports by dots; say the whole name"
                if ours(node.module):
                    found += [(module, node.lineno, node.module, a.name) for a in node.names]
    return found


def ours(name):
    return name.split(".")[0] == "manyhands"


def package_of(module):
    return module.split(".")[1] if "." in module else FACE


def target(texts, base, name):
    """The module that `from base import name` needs."""
    return f"{base}.{name}" if name and f"{base}.{name}" in texts else base


def upward(texts):
    """Imports of a package that stands above, as "module:line imports other"."""
    floors = {name: floor for floor, name in enumerate(ORDER)} | {FACE: len(ORDER)}
    found = []
    for module, line, base, name in imports(texts):
        other = target(texts, base, name)
        here, there = package_of(module), package_of(other)
        allowed = GROUND.get(here)
        if floors[there] > floors[here] or (allowed is not None and there not in (here, *allowed)):
            found.append(f"{module}:{line} imports {other}")
    return found


def circle(texts):
    """The modules of one circle of imports, in order; [] if there is none."""
    needs = {module: set() for module in texts}
    for module, _, base, name in imports(texts):
        other = target(texts, base, name)
        if other != module and package_of(module) != FACE:
            needs[module].add(other)
    done, trail = set(), []

    def walk(module):
        if module in trail:
            return trail[trail.index(module) :]
        if module in done:
            return []
        trail.append(module)
        for other in sorted(needs[module]):
            if found := walk(other):
                return found
        done.add(trail.pop())
        return []

    return next((found for module in sorted(texts) if (found := walk(module))), [])


def private_names(texts):
    """Uses of a `_name` of another module: imported, or as an attribute of an imported module of ours."""
    found = [
        f"{module}:{line} imports {name} of {base}"
        for module, line, base, name in imports(texts)
        if name and name.startswith("_")
    ]
    for module, text in texts.items():
        tree = tree_of(text)
        aliases = {
            a.asname or a.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module and ours(node.module)
            for a in node.names
            if f"{node.module}.{a.name}" in texts
        }
        for node in ast.walk(tree):
            private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr[:2] != "__"
            if private and isinstance(node.value, ast.Name) and node.value.id in aliases:
                found.append(f"{module}:{node.lineno} uses {node.value.id}.{node.attr}")
    return found


@functools.cache
def defined(text):
    """The names that a module makes itself, at its top level."""
    found = set()
    for node in tree_of(text).body:
        for part in [node, *ast.walk(node)] if isinstance(node, (ast.If, ast.Try, ast.With)) else [node]:
            if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(part.name)
            elif isinstance(part, (ast.Assign, ast.AnnAssign)):
                targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                found |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return found


def second_hand(texts, users):
    """Imports of a name from a module that has it from elsewhere: each name has one path, and the face, `manyhands`."""
    return [
        f"{module}:{line} takes {name} from {base}, which does not define it"
        for module, line, base, name in imports(users)
        if name and base in texts and base != FACE and f"{base}.{name}" not in texts
        if name not in defined(texts[base])
    ]


def looked_up_by_string(texts):
    """Modules of ours that are sought in sys.modules by their names: after a renaming they are silently not found."""
    return [
        f"{module}:{node.lineno}"
        for module, text in texts.items()
        if "sys.modules" in text
        for node in ast.walk(tree_of(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("manyhands.")
    ]


@pytest.fixture(scope="module")
def package():
    return sources()


@pytest.fixture(scope="module")
def everything(package, root):
    """The package, the programs, the lessons and the tests."""
    outside = [*root.glob("scripts/*.py"), *root.glob("tests/*.py")]
    return package | {path.stem: path.read_text("utf-8") for path in outside}


def test_every_module_lives_in_a_package_of_the_list(package):
    assert {package_of(module) for module in package} == {*ORDER, FACE}
    assert [m for m in package if m.count(".") == 1 and not (PACKAGE / m.split(".")[1]).is_dir()] == []


def test_no_package_imports_one_above_it(package):
    assert upward(package) == []


def test_there_is_no_circle_of_imports(package):
    assert circle(package) == []


def test_what_begins_with_an_underscore_stays_in_its_module(package, root):
    programs = {path.stem: path.read_text("utf-8") for path in root.glob("scripts/*.py")}
    assert private_names(package | programs) == []


def test_every_public_name_has_one_import_path(package, everything):
    assert second_hand(package, everything) == []
    assert [m for m in package if "__all__" in package[m] and m != FACE] == []


def test_no_module_is_looked_up_by_a_string(package):
    assert looked_up_by_string(package) == []


# ------------------------------------------------------------------ these would be found

HOUSE = {"manyhands.course.pairs": "", "manyhands.launch": "", "manyhands.launch.screen": "def say(): _quiet = 1"}


@pytest.mark.parametrize(
    ("judge", "module", "text", "found"),
    [
        (upward, "manyhands.course.cores", "from manyhands.launch.screen import say", "imports manyhands.launch.screen"),
        (upward, "manyhands.course.a", "def f():\n    from manyhands.launch import screen", "imports manyhands.launch.screen"),
        (upward, "manyhands.gpt.model", "from manyhands.course import pairs", "imports manyhands.course.pairs"),
        (private_names, "manyhands.train.run", "from manyhands.launch.screen import _quiet", "imports _quiet"),
        (private_names, "manyhands.train.run", "from manyhands.launch import screen\nscreen._quiet", "uses screen._quiet"),
        (looked_up_by_string, "manyhands.train.run", "import sys\nsys.modules['manyhands.launch']", "manyhands.train.run:2"),
    ],
)  # fmt: skip
def test_a_fault_that_is_planted_is_found(judge, module, text, found):
    assert judge(HOUSE) == []
    assert [sentence for sentence in judge(HOUSE | {module: text}) if found in sentence]


def test_a_circle_that_is_planted_is_found():
    assert circle(HOUSE) == []
    around = {
        "manyhands.data.a": "from manyhands.data.b import B",
        "manyhands.data.b": "def f():\n    import manyhands.data.a",
    }
    assert circle(HOUSE | around) == ["manyhands.data.a", "manyhands.data.b"]


def test_a_second_import_path_that_is_planted_is_found():
    detour = {"manyhands.data.a": "from manyhands.launch.screen import say"}
    user = {"lesson": "from manyhands.data.a import say\nfrom manyhands.launch.screen import say"}
    assert second_hand(HOUSE | detour, detour) == []
    assert second_hand(HOUSE | detour, user) == ["lesson:1 takes say from manyhands.data.a, which does not define it"]
