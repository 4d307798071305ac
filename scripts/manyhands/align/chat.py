"""Define the training texts: chat templates, a task whose answers a program can judge, speeches. No torch.

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

A model from a folder of transformers' brings a template of its own, and special tokens for markers:

    chat = chat_of(tokenizer)                                           # by markers, or by the model's own template
    ids, answer = chat.encode(messages)                                 # as above; a text never becomes a special token
    chat.answered(ids), chat.ends                                       # the text up to an end; the ids that end it
    talks = conversations("talks.jsonl")                                # [(line, messages)]

Whether a word of the task is held out is written in the word itself: a checksum decides. So no rank and no stage of the
alignment can learn from a word on which accuracy is measured, whatever it draws.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise, takewhile
from math import factorial, perm
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from manyhands.data.chat_template import rendered
from manyhands.data.schema import Partly, read_regular
from manyhands.data.shakespeare import DataError
from manyhands.launch.program import explained

if TYPE_CHECKING:
    from manyhands.data.tokenizer import Tokenizer  # it brings torch, which --help does without

ROLES = ("system", "user", "assistant")
END = "<|end|>"
MARKERS = (*(f"<|{role}|>" for role in ROLES), END)  # in the order of their ids
HELD_OUT_SHARE = 8  # one word in 8 is never trained on
JOINT = "\ufdd0"  # no character: it keeps what spells a special token from being one
ANSWERS = {"sort": lambda word: "".join(sorted(word)), "reverse": lambda word: word[::-1]}


def with_markers(alphabet: list[str]) -> list[str]:
    """The tokens of a chat model: `alphabet`, a list of strings, and behind it the markers that it lacks."""
    return [*alphabet, *(marker for marker in MARKERS if marker not in alphabet)]


def refuse_messages(messages: list[dict], reply: bool = False) -> None:
    """Raise ValueError unless `messages`, each a dict of role and content, are in an order that a template knows.

    The system's comes first, if there is one; then user and assistant take turns, the user first. `reply`: the last one
    must be the user's.
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
    if reply and messages[-1]["role"] != "user":
        raise ValueError(f"the last message is the {messages[-1]['role']}'s; a reply follows the user's")


def pieces(messages: list[dict], reply: bool = False) -> list[tuple[str, bool, bool]]:
    """[(text, is it a marker?, does the assistant write it?)] in order. Raise ValueError: see `refuse_messages`.

    `reply`: the marker of the assistant follows at the end, and the model goes on from there; the last message is then
    the user's. The assistant writes its contents and the end marker after each, but not its own role's marker: that one
    is always given, so there is nothing to learn from it.
    """
    refuse_messages(messages, reply)
    found = []
    for message in messages:
        own = message["role"] == "assistant"
        found += [(f"<|{message['role']}|>", True, False), (message["content"], False, own), (END, True, own)]
    if reply:
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


class Markers:
    """The conversations of a model of characters: `encode` and `answered` with its vocabulary."""

    def __init__(self, tokenizer: Tokenizer):
        self.vocab, self.ends = tokenizer.vocab, set(tokenizer.ends)

    def encode(self, messages: list[dict], reply: bool = False) -> tuple[list[int], list[bool]]:
        return encode(messages, self.vocab, reply)

    def answered(self, ids: list[int]) -> str:
        return answered(ids, self.vocab)

    def knows(self, text: str) -> bool:
        """Return whether a message can hold `text`."""
        return set(text) <= set(self.vocab)


class Template:
    """Conversations by a model's own template: see `data.chat_template`.

    What the assistant writes stands between two beginnings of the text: with the messages before its answer, and with
    this one, too. It reaches to the first end token, and is refused without one, for a model that never learns to end.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.ends = tokenizer, set(tokenizer.ends)
        spelled = sorted((token for token in tokenizer.special if len(token) > 1), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, spelled)) or '(?!)'})")

    def encode(self, messages: list[dict], reply: bool = False) -> tuple[list[int], list[bool]]:
        """(ids, answer): see `chat.encode`. Raise ValueError where the template refuses the messages or disagrees."""
        refuse_messages(messages, reply)
        messages = [m | {"content": self._as_text(m["content"])} for m in messages]
        now = self.tokenizer.now or datetime.now()  # noqa: DTZ005 - one moment for all that is compared
        ids = self._ids(now, messages, reply)
        answer = [False] * len(ids)
        for i in [i for i, message in enumerate(messages) if message["role"] == "assistant"]:
            before, after = self._ids(now, messages[:i], True), self._ids(now, messages[: i + 1])
            if ids[: len(before)] != before or ids[: len(after)] != after:
                why = f"the chat template writes message {i} in another way once more follows"
                raise ValueError(f"{why}, so nobody can say what the assistant wrote; use another template")
            end = next((k for k in range(len(before), len(after)) if ids[k] in self.ends), None)
            if end is None:
                known = ", ".join(self.tokenizer.vocab[k] for k in sorted(self.ends)) or "none is known"
                why = f"the chat template writes no end token ({known}) behind message {i}"
                raise ValueError(f"{why}: a model would never learn to stop; name it in generation_config.json")
            answer[len(before) : end + 1] = [True] * (end + 1 - len(before))
        return ids, answer

    def answered(self, ids: list[int]) -> str:
        """See `chat.answered`; without the spaces that a template may put around."""
        return self.tokenizer.decode(list(takewhile(lambda i: i not in self.ends, ids))).strip()

    def knows(self, text: str) -> bool:
        return True

    def _as_text(self, text):
        text = text.replace(JOINT, "").encode("utf-8", "replace").decode()  # of half a surrogate pair, "?"
        return self._special.sub(lambda found: f"{found[0][0]}{JOINT}{found[0][1:]}", text)

    def _ids(self, now, messages, reply=False):
        tokenizer = self.tokenizer
        named = tokenizer.named | {"strftime_now": now.strftime}
        text = rendered(tokenizer.template, messages, reply, **named)
        if JOINT not in text:
            return tokenizer.encode(text, special=True).tolist()
        ids = []
        for piece in self._special.split(text):
            found = tokenizer.special.get(piece)
            ids += [found] if found is not None else tokenizer.encode(piece.replace(JOINT, "")).tolist()
        return ids


def chat_of(tokenizer: Tokenizer) -> Markers | Template:
    """Return how a model with this tokenizer reads conversations. Raise ValueError if it reads none."""
    if tokenizer.kind != "char" and tokenizer.template is None:
        raise ValueError("the model has no chat template; put its chat_template.jinja into the folder it came from")
    return (Markers if tokenizer.kind == "char" else Template)(tokenizer)


class Conversation(Partly):
    """A line of a file of conversations."""

    messages: list[Annotated[dict[Literal["role", "content"], str], Field(min_length=2)]] = Field(min_length=1)


def conversations(path: Path | str) -> list[tuple[int, list[dict]]]:
    """[(line, messages)] of a file of JSON lines, {"messages": [{"role": ..., "content": ...}, ...]}.

    Raise DataError, with the number of the line, for one that is none or in which the assistant writes nothing.
    """
    found = []
    with explained(DataError, "name another file", path):
        lines = read_regular(Path(path).expanduser()).removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            with explained(DataError, "mend the line, or take it out", f"{path}, line {number},"):
                talk = Conversation.parsed(line).messages
                refuse_messages(talk)
                if talk[-1]["role"] != "assistant":
                    raise ValueError("the last message is not the assistant's, so there is nothing to learn")
                found.append((number, talk))
    if not found:
        raise DataError(f"{path} holds no conversation; write one on each line")
    return found


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
