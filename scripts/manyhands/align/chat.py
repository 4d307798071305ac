"""Define the training texts: the chat template, a task whose answers a program can judge, speeches. No torch.

    render([{"role": "user", "content": "sort dbca"}], reply=True)     # '<|user|>sort dbca<|end|><|assistant|>'
    vocab = with_markers(alphabet)                                      # the alphabet, and four markers behind it
    ids, answer = encode(messages, vocab)                               # answer[i]: does the assistant write ids[i]?

    task = LetterTask("sort", letters=12, length=4)
    words = task.draw(96, seed=1, held_out=False)           # "jbcg", ...: never one that is held out
    task.messages("jbcg", task.answer("jbcg"))              # user: "sort jbcg", assistant: "bcgj"
    task.right("jbcg", "bcgj"), task.chance                 # True, 1/24

A message is its role's marker, its content, and the end marker:

    <|system|>You are ROMEO.<|end|><|user|>Speak.<|end|><|assistant|>Here's much to do with hate.<|end|>

Each marker is **one** token of the vocabulary. A text never becomes a marker: a user who types `<|end|>` sends seven
characters, and ends nothing. There is no token for the beginning; the first marker is the beginning.

Whether a word of the task is held out is written in the word itself: a checksum decides. So no rank and no stage of the
alignment can learn from a word on which accuracy is measured, whatever it draws.
"""

import re
import zlib
from dataclasses import dataclass
from itertools import pairwise, takewhile
from math import factorial, perm

import numpy as np

ROLES = ("system", "user", "assistant")
END = "<|end|>"
MARKERS = (*(f"<|{role}|>" for role in ROLES), END)  # in the order of their ids
HELD_OUT_SHARE = 8  # one word in 8 is never trained on
ANSWERS = {"sort": lambda word: "".join(sorted(word)), "reverse": lambda word: word[::-1]}


def with_markers(alphabet: list[str]) -> list[str]:
    """The tokens of a chat model: `alphabet`, a list of strings, and behind it the markers that it lacks."""
    return [*alphabet, *(marker for marker in MARKERS if marker not in alphabet)]


def refuse_messages(messages: list[dict]) -> None:
    """Raise ValueError unless `messages`, each a dict of role and content, are in an order that the template knows.

    The system's comes first, if there is one; then user and assistant take turns, the user first.
    """
    turn = "user"
    for i, role in enumerate(message["role"] for message in messages):
        if role not in ROLES:
            raise ValueError(f"message {i} has the role {role!r}; use one of {', '.join(ROLES)}")
        if role == "system":
            if i:
                raise ValueError(f"message {i} is the system's; it comes first, or not at all")
            continue
        if role != turn:
            raise ValueError(f"message {i} is the {role}'s and should be the {turn}'s; they take turns, the user first")
        turn = "assistant" if role == "user" else "user"


def pieces(messages: list[dict], reply: bool = False) -> list[tuple[str, bool, bool]]:
    """[(text, is it a marker?, does the assistant write it?)] in order. Raise ValueError: see `refuse_messages`.

    `reply`: the marker of the assistant follows at the end, and the model goes on from there; the last message is then
    the user's. The assistant writes its contents and the end marker after each, but not its own role's marker: that one
    is always given, so there is nothing to learn from it.
    """
    refuse_messages(messages)
    found = []
    for message in messages:
        own = message["role"] == "assistant"
        found += [(f"<|{message['role']}|>", True, False), (message["content"], False, own), (END, True, own)]
    if reply:
        if messages[-1]["role"] != "user":
            raise ValueError(f"the last message is the {messages[-1]['role']}'s; a reply follows the user's")
        found.append(("<|assistant|>", True, False))
    return found


def render(messages: list[dict], reply: bool = False) -> str:
    """The messages as one text, to look at, which cannot tell a marker from its spelling: a model reads `encode`."""
    return "".join(text for text, _, _ in pieces(messages, reply))


def encode(messages: list[dict], vocab: list[str], reply: bool = False) -> tuple[list[int], list[bool]]:
    """(ids, answer): a list of ids into `vocab`, and as many truth values: does the assistant write this one?

    Contents go character by character, markers as one token each. Raise ValueError for a character that is no token,
    for a vocabulary without the markers, and as `refuse_messages` does.
    """
    place = {token: i for i, token in enumerate(vocab)}
    if missing := [marker for marker in MARKERS if marker not in place]:
        why = f"the model has no token {missing[0]}; it was never trained on the chat template (scripts/align.py sft)"
        raise ValueError(why)
    ids, answer = [], []
    for text, is_marker, own in pieces(messages, reply):
        for token in [text] if is_marker else text:
            if token not in place:
                raise ValueError(f"{token!r} is not among the vocabulary's {len(vocab)} tokens; leave it out")
            ids.append(place[token])
            answer.append(own)
    return ids, answer


def answered(ids: list[int], vocab: list[str]) -> str:
    """Return the text that a model wrote after `encode(..., reply=True)`: up to the end marker, or all of it.

    Another marker, which the assistant has no business to write, is spelled out.
    """
    return "".join(takewhile(lambda token: token != END, (vocab[i] for i in ids)))


@dataclass(frozen=True)
class LetterTask:
    """Do something with a word of `length` different letters out of the alphabet's first `letters`.

    Raises ValueError, with the numbers, for a task that has too few words.
    """

    name: str = "sort"  # sort or reverse
    letters: int = 12
    length: int = 4

    def __post_init__(self):
        if self.name not in ANSWERS:
            raise ValueError(f"the task {self.name!r} is unknown; use one of {', '.join(ANSWERS)}")
        if not 2 <= self.length <= self.letters <= 26:
            why = f"words of {self.length} different letters out of {self.letters} cannot be drawn"
            raise ValueError(f"{why}; use 2 letters or more per word, and at least as many to choose from, at most 26")
        if (words := perm(self.letters, self.length)) < 10 * HELD_OUT_SHARE:
            why = f"there are only {words} words of {self.length} out of {self.letters} letters"
            raise ValueError(f"{why}; use longer words or more letters")

    @property
    def chance(self):
        """The accuracy of someone who repeats the word's letters in an order that is drawn at random."""
        return 1 / factorial(self.length)

    def question(self, word):
        return f"{self.name} {word}"

    def answer(self, word):
        return ANSWERS[self.name](word)

    def messages(self, word, answer=None):
        """Return the question, and with `answer` the assistant's message after it."""
        asked = [{"role": "user", "content": self.question(word)}]
        return asked if answer is None else [*asked, {"role": "assistant", "content": answer}]

    def right(self, word, text):
        """Return whether `text` is the answer. This is the verifier; it needs no model."""
        return text == self.answer(word)

    def in_order(self, word, text):
        """A reward that looks like the task and is not: the share of neighbouring letters of `text` that ascend.

        It asks for as many letters as the word has, and forgets to ask *which*.
        """
        if len(text) != self.length:
            return 0.0
        return sum(a < b for a, b in pairwise(text)) / (self.length - 1)

    def draw(self, n, seed, held_out):
        """`n` words, the same for the same seed, an int or several; with repeats, as the draw has them."""
        draw = np.random.default_rng(np.random.SeedSequence(seed))
        words = []
        while len(words) < n:
            places = draw.permuted(np.tile(np.arange(self.letters), (2 * n, 1)), axis=1)[:, : self.length]
            drawn = ("".join(chr(ord("a") + i) for i in row) for row in places)
            words += [word for word in drawn if is_held_out(word) == held_out]
        return words[:n]


def is_held_out(word: str) -> bool:
    return zlib.crc32(word.encode()) % HELD_OUT_SHARE == 0


def speeches(text: str, longest: int = 40, most_name: int = 16) -> list[tuple[str, str]]:
    """[(speaker, first line)] of the speeches of a play: "ROMEO:", a line feed, what he says, an empty line."""
    whole = re.compile(rf"([^\n]{{1,{most_name}}}):\n([^\n]{{1,{longest}}})(?:\n|\Z)")
    return [found.groups() for speech in text.split("\n\n") if (found := whole.match(speech))]


def speech_messages(speaker: str, line: str) -> list[dict]:
    """Return a chat in which the system names a character, the user sends a word, the assistant speaks the line."""
    return [
        {"role": "system", "content": f"You are {speaker}."},
        {"role": "user", "content": "Speak."},
        {"role": "assistant", "content": line},
    ]
