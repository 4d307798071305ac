"""What the model is taught: a task whose answers a program can judge, and lines that the corpus's speakers say. No
torch.

    task = LetterTask("sort", letters=12, length=4)
    words = task.draw(96, seed=1, held_out=False)           # "jbcg", ...: never one that is held out
    task.messages("jbcg", task.answer("jbcg"))              # user: "sort jbcg", assistant: "bcgj"
    task.right("jbcg", "bcgj"), task.chance                 # True, 1/24

Whether a word is held out is written in the word itself: a checksum decides. So no rank and no stage of the alignment
can learn from a word on which accuracy is measured, whatever it draws.
"""

import zlib
from dataclasses import dataclass
from math import factorial, perm

import numpy as np

HELD_OUT_SHARE = 8  # one word in so many is never learned from
ANSWERS = {"sort": lambda word: "".join(sorted(word)), "reverse": lambda word: word[::-1]}


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
            raise ValueError(
                f"words of {self.length} different letters out of {self.letters} cannot be drawn; use 2 letters or more"
                " per word, and at least as many to choose from, at most 26"
            )
        if perm(self.letters, self.length) < 10 * HELD_OUT_SHARE:
            raise ValueError(
                f"there are only {perm(self.letters, self.length)} words of {self.length} out of {self.letters}"
                " letters; use longer words or more letters"
            )

    @property
    def chance(self):
        """The accuracy of someone who repeats the word's letters in an order that is drawn at random."""
        return 1 / factorial(self.length)

    def question(self, word):
        return f"{self.name} {word}"

    def answer(self, word):
        return ANSWERS[self.name](word)

    def messages(self, word, answer=None):
        """The question, and with `answer` the assistant's message behind it."""
        asked = [{"role": "user", "content": self.question(word)}]
        return asked if answer is None else [*asked, {"role": "assistant", "content": answer}]

    def right(self, word, text):
        """Is `text` the answer? This is the verifier: it needs no model."""
        return text == self.answer(word)

    def in_order(self, word, text):
        """A reward that looks like the task and is not: the share of neighbouring letters of `text` that ascend.

        It asks for as many letters as the word has, and forgets to ask *which*.
        """
        if len(text) != self.length:
            return 0.0
        return sum(a < b for a, b in zip(text, text[1:], strict=False)) / (self.length - 1)

    def draw(self, n, seed, held_out):
        """`n` words, the same for the same seed, an int or several; with repeats, as the draw has them."""
        draw = np.random.default_rng(np.random.SeedSequence(seed))
        words = []
        while len(words) < n:
            places = draw.permuted(np.tile(np.arange(self.letters), (2 * n, 1)), axis=1)[:, : self.length]
            drawn = ("".join(chr(ord("a") + i) for i in row) for row in places)
            words += [word for word in drawn if is_held_out(word) == held_out]
        return words[:n]


def is_held_out(word):
    return zlib.crc32(word.encode()) % HELD_OUT_SHARE == 0


def speeches(text, longest=40, most_name=16):
    """[(speaker, first line)] of the speeches of a play: "ROMEO:", a line feed, what he says, an empty line."""
    found = []
    for speech in text.split("\n\n"):
        speaker, colon, lines = speech.partition(":\n")
        line = lines.split("\n")[0]
        if colon and line and len(line) <= longest and "\n" not in speaker and 0 < len(speaker) <= most_name:
            found.append((speaker, line))
    return found


def speech_messages(speaker, line):
    """The system says who the assistant is, the user asks for a word, the assistant says the line."""
    return [
        {"role": "system", "content": f"You are {speaker}."},
        {"role": "user", "content": "Speak."},
        {"role": "assistant", "content": line},
    ]
