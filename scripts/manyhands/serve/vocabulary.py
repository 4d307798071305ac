"""Convert text to ids and back for a served model, and messages to ids by its chat template.

    words = Vocabulary(metadata)                   # of a checkpoint
    ids = words.encode("Who goes there?")          # ValueError for a character that the model has no token for
    ids, stop_ids, dropped = words.encode_chat(messages, room=64)    # by its template; without one, as plain text
    text = TextSoFar(words, stop_strings); text.add([4, 8]); text.end()    # text that can be shown, as tokens arrive

The checkpoint determines the encoding: its characters, or the tokenizer of a user's text.
"""

import math
from bisect import bisect_left

from manyhands.align import chat
from manyhands.checkpoint.export import tokenizer_of

ROLE_NAMES = {"system": "", "user": "User: ", "assistant": "Assistant: "}


class TooLong(ValueError):
    """A text that is too long for any tokenization to fit."""


class Vocabulary:
    """A checkpoint's tokens: characters, or pieces of words. `markers` are tokens that no text encodes to.

    They are those of lesson 13's template, the ends of answers and the separator; drawing one of them ends a text.
    """

    def __init__(self, metadata: dict):
        self.tokenizer = tokenizer_of(metadata)
        self.vocab = self.tokenizer.vocab
        self.by_character = self.tokenizer.kind == "char"  # a tokenizer has ids for every text
        self.speaks_template = self.tokenizer.template is not None
        self.chat = chat.chat_of(self.tokenizer) if self.speaks_template else None
        own = set(chat.MARKERS) if self.by_character else ()
        self.markers = {*self.tokenizer.ends, *(i for i, token in enumerate(self.vocab) if token in own)}
        if self.tokenizer.separator is not None:
            self.markers.add(self.tokenizer.separator)
        self.context = metadata["config"].get("max_positions") or metadata["config"]["block_size"]
        longest = 1 if self.by_character else max(len(t) for i, t in enumerate(self.vocab) if i not in self.markers)
        self.most_characters = self.context * longest

    def __len__(self):
        return len(self.vocab)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, behind what the tokenizer puts before one.

        Raise ValueError for a character without a token, and TooLong before encoding.
        """
        self._refuse_longer(text)
        if not self.by_character:
            text = text.encode("utf-8", "replace").decode()  # of half a surrogate pair, "?"
        return [*self.tokenizer.begin, *self.tokenizer.encode(text).tolist()]

    def _refuse_longer(self, text):
        if len(text) > self.most_characters:
            why = f"{len(text):,} characters do not fit into the model's context of {self.context}"
            raise TooLong(f"{why}; no text of more than {self.most_characters:,} does")

    def known(self, text: str) -> str:
        """Return the text without characters that have no token."""
        return "".join(filter(set(self.vocab).__contains__, text)) if self.by_character else text

    def known_ids(self, ids: list[int]) -> list[int]:
        """Return the ids. Raise ValueError for one that is not a token."""
        if strange := [i for i in ids if not 0 <= i < len(self)]:
            raise ValueError(f"prompt: {str(strange[0])[:20]} is no token's id; use 0 to {len(self) - 1}")
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, without markers."""
        return self.tokenizer.decode([i for i in ids if i not in self.markers])

    def name(self, i: int) -> tuple[str, list[int] | None]:
        """Return (a token as text, its bytes). A part of a character has the tokenizer's spelling and no bytes."""
        text = self.tokenizer.decode([i])
        return (self.vocab[i], None) if "\ufffd" in text else (text, list(text.encode()))

    def encode_chat(self, messages: list[dict], room: float = math.inf) -> tuple[list[int], set[int], int]:
        """Return (ids, ids that end the reply, number of dropped messages). Raise ValueError for wrong roles.

        The oldest questions and their answers are dropped until at most `room` ids remain, but never the system message
        or the last one. A base model has no roles: it gets a text with "User: " and "Assistant: " before each message.
        """
        chat.refuse_messages(messages, reply=True)
        begin = 1 if messages[0]["role"] == "system" else 0
        start = len(messages) - 1
        ids = self._conversation(messages[:begin] + messages[start:])
        while start > begin:
            try:
                longer = self._conversation(messages[:begin] + messages[start - 2 :])
            except TooLong:
                break
            if len(longer) > room:
                break
            start, ids = start - 2, longer
        return ids, self.markers, start - begin

    def _conversation(self, messages):
        if self.chat is None:
            lines = [f"{ROLE_NAMES[message['role']]}{message['content']}\n" for message in messages]
            return self.encode("".join([*lines, "Assistant:"]))
        self._refuse_longer("".join(message["content"] for message in messages))
        return self.chat.encode(messages, reply=True)[0]

    def chat_stops(self) -> tuple[str, ...]:
        """Return strings that end a reply in addition to markers: a base model continues with the user's next line."""
        return () if self.speaks_template else ("\n" + ROLE_NAMES["user"].rstrip(),)

    def writer(self):
        """Return a function (id, final) -> text for ids that arrive one at a time; None flushes the rest."""
        write = self.tokenizer.writer()
        return lambda i, final=False: "" if i in self.markers else write(i, final)


class TextSoFar:
    """Decode ids incrementally, holding back a possible beginning of a stop string. `stopped`: one was found."""

    def __init__(self, words: Vocabulary, stop_strings=()):
        self.write, self.stops = words.writer(), tuple(stop_strings)
        self.held, self.stopped = "", False
        self.written = self.shown = 0  # characters of all ids; and of what `add` and `end` have returned
        self.starts: list[int] = []  # where the text of each id begins

    def add(self, ids: list[int]) -> str:
        """Return the text that can be shown now, never a stop string or text after it."""
        text = ""
        for i in ids:
            self.starts.append(self.written + len(text))
            text += self.write(i)
        return self._show(text)

    def end(self) -> str:
        """Return the remaining text, at the end of the ids."""
        shown = self._show(self.write(None, True))
        rest, self.held = self.held, ""
        self.shown += len(rest)
        return shown + rest

    def ids_shown(self) -> int:
        """Return how many of the added ids have text that was shown."""
        return bisect_left(self.starts, self.shown)

    def _show(self, text):
        self.written += len(text)
        text = "" if self.stopped else self.held + text
        met = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        # the longest suffix of the text that begins a stop string
        keep = max((n for stop in self.stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        shown = text[: min(met)] if met else text[: len(text) - keep]
        self.stopped = self.stopped or bool(met)
        self.held = "" if self.stopped else text[len(shown) :]
        self.shown += len(shown)
        return shown
