"""Text to ids and back, for a model that is served; and messages to ids, where it was trained on the chat template.

    words = Vocabulary(metadata)                   # of a checkpoint
    ids = words.encode("Who goes there?")          # ValueError for a character that the model has no token for
    ids, stop_ids = words.encode_chat(messages)    # the template of lesson 13, or plain text for a base model
    text = TextSoFar(words, stop_strings); text.add([4, 8]); text.end()    # what can be shown, as tokens come

Which way a text becomes ids is the checkpoint's own: its characters, or the tokenizer of a text of one's own.
"""

from manyhands.align import chat
from manyhands.checkpoint.export import tokenizer_of

ROLE_NAMES = {"system": "", "user": "User: ", "assistant": "Assistant: "}


class Vocabulary:
    """The tokens of a checkpoint: characters, or pieces of words. `markers` are those that no text becomes.

    They are the chat template's, and the one between documents; to draw one of them ends a text.
    """

    def __init__(self, metadata: dict):
        self.tokenizer = tokenizer_of(metadata)
        self.vocab = self.tokenizer.vocab
        self.by_character = self.tokenizer.kind == "char"  # else the tokenizer has ids for every text
        self.speaks_template = self.by_character and set(chat.MARKERS) <= set(self.vocab)
        self.markers = {self.vocab.index(m) for m in chat.MARKERS} if self.speaks_template else set()
        if self.tokenizer.separator is not None:
            self.markers.add(self.tokenizer.separator)

    def __len__(self):
        return len(self.vocab)

    def encode(self, text: str) -> list[int]:
        """The ids of a text. Raises ValueError for a character that is no token."""
        if not self.by_character:
            text = text.encode("utf-8", "replace").decode()  # of half a surrogate pair, "?"
        return self.tokenizer.encode(text).tolist()

    def known(self, text: str) -> str:
        """The text without the characters that are no tokens."""
        return "".join(filter(set(self.vocab).__contains__, text)) if self.by_character else text

    def encode_chat(self, messages: list[dict]) -> tuple[list[int], set[int]]:
        """(ids, ids that end the reply). Raises ValueError for messages that the template refuses.

        A base model knows no roles: it gets a text in which "User: " and "Assistant: " stand before what they say.
        """
        if self.speaks_template:
            ids, _ = chat.encode(messages, self.vocab, reply=True)
            return ids, self.markers
        chat.pieces(messages, reply=True)  # the same order of roles, and the same sentences
        lines = [ROLE_NAMES[m["role"]] + m["content"] for m in messages]
        return self.encode("\n".join([*lines, ROLE_NAMES["assistant"].rstrip()])), self.markers

    def chat_stops(self) -> tuple[str, ...]:
        """Strings that end a reply besides markers: a base model goes on with the user's next line."""
        return () if self.speaks_template else ("\n" + ROLE_NAMES["user"].rstrip(),)

    def writer(self):
        """A function (id, final) -> text, for ids that come one at a time; of None, what the last ones began."""
        write = self.tokenizer.writer()
        return lambda i, final=False: "" if i in self.markers else write(i, final)


class TextSoFar:
    """Ids become text; what may turn out to be the beginning of a stop string is held back. `stopped`: one was met."""

    def __init__(self, words: Vocabulary, stop_strings=()):
        self.write, self.stops = words.writer(), tuple(stop_strings)
        self.held, self.stopped = "", False

    def add(self, ids: list[int]) -> str:
        """The text that can be shown now. What follows a stop string, and the string itself, never is."""
        return self._show("".join(self.write(i) for i in ids))

    def end(self) -> str:
        """The rest: nothing more comes."""
        shown = self._show(self.write(None, True))
        rest, self.held = self.held, ""
        return shown + rest

    def _show(self, text):
        text = "" if self.stopped else self.held + text
        met = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if met:
            self.stopped, self.held = True, ""
            return text[: min(met)]
        # the longest end of the text that begins a stop string
        keep = max((n for stop in self.stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]
