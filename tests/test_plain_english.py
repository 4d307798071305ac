"""The package is in plain English: docstrings begin with a verb or a noun, and phrases of ours have a cure."""

import ast
import re

import pytest

# a docstring's first word, and what to write instead
OPENINGS = {
    "What": "Return, or a noun", "Whether": "Return whether", "How": "Return how", "Of": "the noun first",
    "Where": "Return where", "Who": "Return which rank", "Whatever": "a noun", "As": "a verb", "For ever": "Loop",
    "Afterwards": "a verb and `on exit`", "Inside it": "a verb",
}  # fmt: skip
# (a phrase, its cure, a sentence in which it is found)
PHRASES = [
    (r"is none of\b", "unknown ..., use one of ...", "stage=5 is none of ZeRO's"),
    (r"\bso many\b", "the argument's name, or `this number of`", "the so many likeliest"),
    (r"\bso long\b(?! as)", "the argument's name", "nothing printed for so long"),
    (r"\bof one's own\b", "private, separate", "a text of one's own"),
    (r"\bas often as\b", "equally often", "all call it as often as others"),
    (r"\b[Ww]ho(?:ever)? (?:waits(?! for whom)|sends|has nothing|pressed)\b", "the rank that ...", "who waits gets it"),
    (r"\bis said\b|\bis told (?:that|to)\b", "is printed, is passed", "the reason is said once"),
    (r"\bknows nothing of\b", "does not depend on", "a rank knows nothing of it"),
    (r"\bgood order\b", "cleanly", "left in good order on Ctrl-C"),
    (r"\bin vain\b", "without result", "waited in vain"),
    (r"\bfor ever\b", "forever", "it waits for ever"),
]


def faults(source):
    """Return [(what was found, its cure)] for a module: openings of its docstrings, then phrases anywhere."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docs = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    begins = [(doc, cure) for doc in docs for first, cure in OPENINGS.items() if re.match(rf"{first}\b", doc)]
    return begins + [(found[0], cure) for phrase, cure, _ in PHRASES for found in re.finditer(phrase, source)]


def test_the_package_is_in_plain_english(root):
    files = sorted((root / "scripts/manyhands").rglob("*.py"))
    assert [(path.name, *fault) for path in files for fault in faults(path.read_text("utf-8"))] == []


@pytest.mark.parametrize(("cure", "text"), [*((cure, f"{first} it is") for first, cure in OPENINGS.items()),
                                            *((cure, text) for _, cure, text in PHRASES)])  # fmt: skip
def test_an_opening_or_a_phrase_is_found(cure, text):
    assert cure in [found for _, found in faults(repr(text))]
