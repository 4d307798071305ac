"""Every link of a lesson to the glossary arrives, and every picture of glossary and lessons exists."""

import re

from manyhands.course.lessons import find_lessons


def anchors(root):
    text = (root / "assets" / "glossary.md").read_text()
    return {title.lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", text, re.MULTILINE)}


def test_every_link_to_the_glossary_arrives(root):
    for lesson in find_lessons(root, own=False):
        linked = set(re.findall(r"glossary\.md#([\w-]+)", lesson.script.read_text()))
        assert linked - anchors(root) == set(), lesson.name


def test_every_term_has_one_line_and_one_picture_that_exists(root):
    blocks = re.split(r"^## ", (root / "assets" / "glossary.md").read_text(), flags=re.MULTILINE)[1:]
    for block in blocks:
        title, _, line, _, picture, *_ = block.split("\n")
        assert line.strip(), title
        name = re.fullmatch(r"!\[.+\]\((.+\.svg)\)", picture)[1]
        assert (root / "assets" / name).exists(), f"{title}: {name}"


def test_every_picture_of_a_lesson_exists_and_says_in_words_what_it_shows(root):
    for lesson in find_lessons(root, own=False):
        text = re.sub(r"\n# ?", "\n", lesson.script.read_text())
        for alt, path in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", text):
            assert (lesson.script.parent / path).resolve().exists(), path
            assert len(alt.split()) >= 5, f"{path}: {alt!r}"
