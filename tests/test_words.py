"""The course speaks the field's words: our own words are gone from code, help, prose, drawings and glossary."""

import re

import pytest

# the field's word: (a pattern of ours, a line in which it would be found)
WORDS = {
    "tokens": (r"\bsymbols?\b(?![\"'=:]| =)(?<!\.symbols)", "a vocabulary of 65 symbols"),
    "replicas": (r"parallel[._-]copies|\bcopies of (?:the|a|one) model\b", "--parallel.copies flat"),
    "separator": (r"\bdocument marks?\b|\bcorpus\.mark\b|\bmark begins\b", "a mark begins each document"),
    "full_tensor": (r"\.whole\(\)", "weight = layer.whole()"),
    "unshard, reshard": (r"\blet_go\b|\bhold_whole\b", "unit.let_go()"),
    "activation checkpointing": (r"parallel[._-]recompute|gpt[./]recompute\b", "--parallel.recompute block"),
    "dp_mode": (r"\bdata_by\b", "data_by='replicate'"),
    "RankPool": (r"(?<!Many )\bHands\b(?! On)", "with Hands(4) as hands:"),
    "RankInfo": (r"\bPlace\b", "Place(rank=0)"),
    "PrepareConfig": (r"\bWishes\b", "wishes: Wishes"),
    "metadata": (r"\bfacts\b", "facts['step']"),
    "heartbeat": (r"\bHeard\b|\bTalk\b", "Talk(store)"),
    "PreemptionHandler": (r"\bStopping\b", "with Stopping(ranks):"),
    "CompletionRequest": (r"\bAsked\(|class Asked\b", "class Asked(BaseModel):"),
    "NoParallel": (r"\bAlone\(|class Alone\b", "class Alone(Strategy):"),
    "prompt loss": (r"\bprompt[ _]surprise\b", "the prompt surprise"),
    "eval_pending": (r"\bowes_evaluation\b", "self.owes_evaluation"),
    "partial sums": (r"\bterms to sum\b|\bterms? of the sum\b", "four terms to sum"),
    "communicates, sends": (
        r"\bhanded_over\b|\bhands? over (?:[\d.]+|its|the) (?:[kMG]?B|bytes)\b",
        "it hands over 12 MB",
    ),
    "workspace, unsharded parameters": (r"\bmomentary\b", "momentary bytes"),
    "MinHash signature": (r"\bsketch(?:es)?\b", "the sketch of a document"),
    "draft tokens": (r"\b(?:four|k|its|kept|the) guesses\b", "it keeps two of the four guesses"),
    "invalid port 70000": (r"\"--?[\w-]+ \{\w+\} is none\b", '"--port {port} is none"'),
}
WHERE = (
    "scripts/**/*.py", "scripts/**/*.html", "assets/src/*.py", "assets/*.md", "assets/*.svg", "assets/site/*.md",
    "jobs/*.*", "data/README.md", "README.md", "CONTRIBUTING.md",
)  # fmt: skip


def ours(text):
    """[(the field's word, the line)] of what is not called as the field calls it."""
    return [
        (word, line.strip()) for word, (pattern, _) in WORDS.items() if re.search(pattern, text)
        for line in text.splitlines() if re.search(pattern, line)
    ]  # fmt: skip


def test_no_file_has_a_word_of_our_own_for_what_the_field_has_named(root):
    found = [
        (path.relative_to(root).as_posix(), *one)
        for pattern in WHERE
        for path in sorted(root.glob(pattern))
        if path.is_file()
        for one in ours(path.read_text("utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize("word", WORDS)
def test_a_word_of_our_own_is_found(word):
    assert word in [found for found, _ in ours(WORDS[word][1])]
