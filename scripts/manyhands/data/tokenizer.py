"""From text to ids and back: by characters, or by byte-pair encoding (BPE). A separator begins each document.

    tokenizer = characters_of(texts)  or  train_bpe(texts, vocab_size=4096)
    ids = tokenizer.encode("any text")                   # torch.long [N]; the separator is in no text
    tokenizer.decode(ids), tokenizer.content             # the text again; what tokenizer.json holds
    tokenizer = tokenizer_from(content)

A document is [separator, its tokens]: the separator predicts the first token, the last token the next separator.

BPE (Sennrich et al. 2016) here is over bytes, as in GPT-2: 256 tokens spell every text there is, and each merge adds
one. Text is cut into pieces first, which no merge crosses. We cut by ranges of characters that are written out, so that
every regular-expression engine cuts alike, and remember the ids of short pieces: English repeats itself, and a known
piece costs a look-up instead of its merges. The library, `tokenizers`, does the training and encodes new pieces.
"""

import codecs
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from pydantic import AfterValidator, Field

from manyhands.data.chat_template import OWN, rendered, template_in
from manyhands.data.schema import Partly, Schema
from manyhands.data.shakespeare import DataError
from manyhands.launch.program import explained

SEPARATOR = "<|document|>"
CHARACTERS = "manyhands characters 1"
FOREIGN = "manyhands foreign tokenizer 1"
KEPT_PIECES, KEPT_LENGTH = 2**16, 16  # whose ids are remembered, and the characters of one: 50 MB at most
# contractions | letters and all beyond ASCII | up to three digits | other signs | blanks, without a word's first space
PIECES = (
    "'(?:[sdmt]|ll|ve|re)"
    "| ?[^\\x00-@\\[-`{-\\x7f]+"
    "| ?[0-9]{1,3}"
    "| ?[\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f!-/:-@\\[-`{-\\x7f]+"
    "|[\\t\\n\\r ]+(?![^\\t\\n\\r ])"
    "|[\\t\\n\\r ]+"
)
_cut = re.compile(PIECES).findall


def _each_once(tokens):
    if len(set(tokens)) < len(tokens):
        raise ValueError("a token stands in it twice")
    return tokens


Tokens = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1), AfterValidator(_each_once)]


class Characters(Schema):
    """The content of a CharTokenizer's file."""

    format: Literal["manyhands characters 1"] = CHARACTERS
    symbols: Tokens


class Foreign(Schema):
    """The content of a ForeignTokenizer, in a checkpoint or a prepared text."""

    format: Literal["manyhands foreign tokenizer 1"]
    tokenizer: dict[str, Any]  # its tokenizer.json
    separator: Annotated[int, Field(ge=0)] | None
    template: str | None = None  # of conversations: see `data.chat_template`
    named: dict[str, str] = {}  # {"bos_token": "<s>", ...}: the tokens that it may name
    ends: list[Annotated[int, Field(ge=0)]] = []  # ids that end an answer


class Tokenizer(Protocol):
    """The interface of a tokenizer for texts, models and servers."""

    kind: str  # "char" or "bpe"
    vocab: list[str]  # token i as text
    separator: int | None  # the id that begins a document
    content: dict  # what a file keeps of it: see `tokenizer_from`
    begin: Sequence[int]  # what a model expects before a prompt
    template: str | None  # of conversations
    ends: Sequence[int]  # the ids that end an answer

    def encode(self, text: str) -> torch.Tensor:
        """The ids of `text`, torch.long [N]. Raise ValueError for a character that has none."""

    def decode(self, ids: torch.Tensor | Iterable[int]) -> str:
        """The text of `ids`."""

    def writer(self) -> Callable[..., str]:
        """A function (id, final=False) -> text, for ids that come one at a time; of None, what the last ones began."""


class CharTokenizer:
    """Each character is a token. Longer ones in `vocab` (markers, the separator if it comes first) are in no text."""

    kind, begin = "char", ()

    def __init__(self, vocab):
        self.vocab = list(vocab)
        self.separator = 0 if self.vocab[:1] == [SEPARATOR] else None
        self.ends = [i for i, token in enumerate(self.vocab) if token == "<|end|>"]  # of `align.chat`'s markers
        self.template = OWN if self.ends else None
        self._id = {token: i for i, token in enumerate(self.vocab) if len(token) == 1}

    @property
    def content(self):
        return {"format": CHARACTERS, "symbols": self.vocab}

    def encode(self, text):
        try:
            return torch.from_numpy(np.fromiter(map(self._id.__getitem__, text), np.int64, len(text)))
        except KeyError as error:
            why = f"{error.args[0]!r} is not among the vocabulary's {len(self.vocab)} tokens; leave it out"
            raise ValueError(why) from None

    def decode(self, ids):
        return "".join(map(self.vocab.__getitem__, _list(ids)))

    def writer(self):
        return lambda i, final=False: "" if i is None else self.vocab[i]


class BpeTokenizer:
    """Byte-level BPE by `tokenizers`; `content` is its tokenizer.json, as dict. It has ids for every Unicode text."""

    kind, begin, template, ends = "bpe", (), None, ()

    def __init__(self, content):
        """Raise DataError for what is no such tokenizer."""
        signs = _signs()
        with _refused("not a byte-level BPE of prepare_data.py's"):
            self.inner, by_id = _read(content)
            self.separator = self.inner.token_to_id(SEPARATOR)
            byte = {sign: value for value, sign in enumerate(signs)}
            self.vocab = [by_id[i] for i in range(len(by_id))]
            self._bytes = [bytes(byte[sign] for sign in token) for token in self.vocab if token != SEPARATOR]
            self._bytes.insert(self.separator, SEPARATOR.encode())
        self.inner.encode_special_tokens = True  # a text that spells the separator is text, and no separator
        self.content = content
        tokenize = self.inner.model.tokenize  # the merges alone: the piece is cut already

        class Known(dict):
            def __missing__(self, piece):
                # half a surrogate pair, as of bytes in a command line that are no UTF-8, is a UnicodeEncodeError
                ids = [token.id for token in tokenize("".join([signs[value] for value in piece.encode()]))]
                if len(piece) <= KEPT_LENGTH:
                    if len(self) >= KEPT_PIECES:
                        self.clear()
                    self[piece] = ids
                return ids

        self.known = Known()

    def encode(self, text):
        found = itertools.chain.from_iterable(map(self.known.__getitem__, _cut(text)))
        return torch.from_numpy(np.fromiter(found, np.int64))

    def decode(self, ids):
        return b"".join(map(self._bytes.__getitem__, _list(ids))).decode(errors="replace")

    def writer(self):  # a character appears with its last byte
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        return lambda i, final=False: decode(b"" if i is None else self._bytes[i], final)


class ForeignTokenizer:
    """Any tokenizer that the library `tokenizers` reads, such as that of a model in transformers' format."""

    kind = "bpe"
    now: datetime | None = None  # the moment that a chat template writes; None: the one at which it writes

    def __init__(self, content):
        """Raise DataError for what is no such tokenizer."""
        with _refused("no tokenizer.json of the library tokenizers"):
            about = Foreign.parsed(json.dumps(content))
            self.inner, by_id = _read(about.tokenizer)
        self.inner.no_truncation()
        self.inner.no_padding()
        # what it puts before a text; found before it takes special tokens in a text for text
        letter, full = (self.inner.encode("a", add_special_tokens=special).ids for special in (False, True))
        self.begin = full[: full.index(letter[0])] if letter and letter[0] in full else []
        self.special = {str(t.content): i for i, t in self.inner.get_added_tokens_decoder().items() if t.special}
        self.vocab = [by_id.get(i, f"<unused {i}>") for i in range(max(by_id, default=-1) + 1)]
        self.separator, self.content = about.separator, about.model_dump()
        self.template, self.named, self.ends = about.template, about.named, about.ends

    def encode(self, text, special=False):
        """The ids of `text`. `special`: special tokens in it are tokens, and not their spelling."""
        self.inner.encode_special_tokens = not special
        return torch.tensor(self.inner.encode(text, add_special_tokens=False).ids, dtype=torch.long)

    def decode(self, ids):
        return self.inner.decode(list(_list(ids)), skip_special_tokens=False)

    def writer(self):
        from tokenizers.decoders import DecodeStream

        stream, held = DecodeStream(skip_special_tokens=False), []

        def write(i, final=False):
            if i is None:  # what the last tokens began
                return self.decode(held)
            held.append(i)
            text = stream.step(self.inner, i) or ""
            if text:
                held.clear()
            return text

        return write


@contextmanager
def _refused(what):
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the library raises bare Exceptions
        raise DataError(f"this is {what} ({str(error).splitlines()[0][:200]}); use another") from None


def _read(content):
    """Return (the library's tokenizer of a tokenizer.json, {id: token})."""
    from tokenizers import Tokenizer

    inner = Tokenizer.from_str(json.dumps(content))
    return inner, {i: token for token, i in inner.get_vocab().items()}


def _list(ids):
    return ids.tolist() if isinstance(ids, torch.Tensor | np.ndarray) else ids


def _signs():
    """The characters that stand for the 256 bytes in GPT-2's vocabulary: what cannot be seen is moved up."""
    seen, moved = {*range(33, 127), *range(161, 173), *range(174, 256)}, itertools.count(256)
    return [chr(value if value in seen else next(moved)) for value in range(256)]


def characters_of(texts: Iterable[str]) -> CharTokenizer:
    """A tokenizer of all characters in `texts`, with the separator as token 0."""
    return CharTokenizer([SEPARATOR, *sorted(set().union(*map(set, texts)))])


def train_bpe(texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
    """BPE of at most `vocab_size` tokens, learned from `texts`; fewer where no pair occurs twice any more.

    The same texts give the same merges. Raise ValueError for a size that has no room for the separator and 256 bytes.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size={vocab_size} has no room for 256 bytes and the separator; use 257 or more")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PIECES), "isolated"), as_bytes])
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=[SEPARATOR], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    inner.train_from_iterator(texts, trainer)
    return BpeTokenizer(json.loads(inner.to_str()))


def byte_encoder(merges: list[tuple[int, int]], pieces: re.Pattern) -> Callable[[str], list[int]]:
    """Return a function from a text to its tokens under these merges; number i makes the token 256 + i.

    pieces: what a text is cut into first, which no merge crosses. The library applies the merges.
    """
    from tokenizers import Tokenizer, models

    signs = [chr(value) for value in range(256)]  # the library works on characters: one for each byte
    for a, b in merges:
        signs.append(signs[a] + signs[b])
    pairs = [(signs[a], signs[b]) for a, b in merges]
    bpe = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(signs)}, merges=pairs))

    def encode(text):
        words = (bpe.encode(word.encode().decode("latin-1")).ids for word in pieces.findall(text))
        return [i for ids in words for i in ids]

    return encode


def tokenizer_from(content: dict) -> Tokenizer:
    """The tokenizer that `content`, of its `.content`, describes. Raise DataError for what is none."""
    kind = content.get("format") if isinstance(content, dict) else None
    if kind == CHARACTERS:
        with explained(DataError, "use others", "a file of characters of prepare_data.py's"):
            return CharTokenizer(Characters.parsed(json.dumps(content)).symbols)
    return (ForeignTokenizer if kind == FOREIGN else BpeTokenizer)(content)


def cut_alike(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether two tokenizers make the same ids of a text, however they write conversations."""
    of_chats = ("template", "named", "ends")
    one, other = ({name: v for name, v in t.content.items() if name not in of_chats} for t in (one, other))
    return one == other


def tokenizer_of_folder(folder: Path | str) -> Tokenizer:
    """The tokenizer in a folder as transformers writes it. Raise DataError.

    Its documents begin with its BOS, without one with its EOS. One that we have exported is ours again. An answer ends
    with any EOS of generation_config.json, else of the others, or with the special token that the chat template writes.
    """
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise DataError(f"{folder} has no tokenizer.json, so nobody can say what its tokens are; add the model's own")

    def read(name):
        with explained(DataError, "copy the folder again", folder / name):
            return Partly.read(folder / name).model_dump() if (folder / name).is_file() else {}

    content, about, config, generation, older = (
        read(f"{name}.json")
        for name in ("tokenizer", "tokenizer_config", "config", "generation_config", "special_tokens_map")
    )
    about = older | about
    if own := about.get("manyhands"):
        return tokenizer_from(own if own.get("format") == CHARACTERS else content)
    with explained(DataError, "mend it, or take it away", f"the chat template in {folder}"):
        template = template_in(folder, about)
    foreign = ForeignTokenizer({"format": FOREIGN, "tokenizer": content, "separator": None})
    named = {name: t.get("content") if isinstance(t, dict) else t for name, t in about.items() if name[-6:] == "_token"}
    named = {name: token for name, token in named.items() if isinstance(token, str)}

    def known(*said):
        flat = [i for one in said for i in (one if isinstance(one, list) else [one])]
        return [i for i in flat if type(i) is int and 0 <= i < len(foreign.vocab)]

    bos, eos = (
        foreign.inner.token_to_id(named[name]) if name in named else None for name in ("bos_token", "eos_token")
    )
    separator = next(iter(known(bos, eos, config.get("bos_token_id"), config.get("eos_token_id"))), None)
    ends = known(generation.get("eos_token_id")) or known(config.get("eos_token_id"), eos)
    if template is not None:
        ends += _end_in(template, foreign, named)
    more = {"separator": separator, "template": template, "named": named, "ends": list(dict.fromkeys(ends))}
    return ForeignTokenizer(foreign.content | more)


def _end_in(template, tokenizer, named):
    """Return [the first special token that a template writes behind an answer]; [] without one, or if it is broken."""
    behind = ""
    with suppress(ValueError):
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "z_z"}]
        behind = rendered(template, talk, **named).rpartition("z_z")[2]
    return [i for i in tokenizer.encode(behind, special=True).tolist() if i in tokenizer.special.values()][:1]
