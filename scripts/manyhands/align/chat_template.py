"""The chat template: messages of a system, a user and an assistant as one sequence of tokens. Plain Python, no torch.

    render([{"role": "user", "content": "sort dbca"}], reply=True)     # '<|user|>sort dbca<|end|><|assistant|>'
    vocab = with_markers(alphabet)                                      # the alphabet, and four markers behind it
    ids, answer = encode(messages, vocab)                               # answer[i]: does the assistant write ids[i]?

A message is its role's marker, its content, and the end marker:

    <|system|>You are ROMEO.<|end|><|user|>Speak.<|end|><|assistant|>Here's much to do with hate.<|end|>

Each marker is **one** token of the vocabulary. A text never becomes a marker: a user who types `<|end|>` sends seven
characters, and ends nothing. There is no token for the beginning; the first marker is the beginning.
"""

ROLES = ("system", "user", "assistant")
END = "<|end|>"
MARKERS = (*(f"<|{role}|>" for role in ROLES), END)  # in the order of their ids


def with_markers(alphabet):
    """The tokens of a chat model: `alphabet`, a list of strings, and behind it the markers that it lacks."""
    return [*alphabet, *(marker for marker in MARKERS if marker not in alphabet)]


def refuse_messages(messages):
    """Raises ValueError unless `messages` are dicts of role and content, in an order that the template knows.

    The system's comes first, if there is one; then user and assistant take turns, the user first.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError('there are no messages; send at least [{"role": "user", "content": "..."}]')
    turn = "user"
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise ValueError(f"message {i} is {message!r}; use a dict with role and content, and nothing else")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise ValueError(f"message {i} has the role {role!r}; use one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ValueError(f"message {i}: its content is {type(content).__name__}; use a string")
        if role == "system":
            if i:
                raise ValueError(f"message {i} is the system's; it comes first, or not at all")
            continue
        if role != turn:
            raise ValueError(f"message {i} is the {role}'s and should be the {turn}'s; they take turns, the user first")
        turn = "assistant" if role == "user" else "user"


def pieces(messages, reply=False):
    """[(text, is it a marker?, does the assistant write it?)] in order. Raises ValueError: see `refuse_messages`.

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


def render(messages, reply=False):
    """The messages as one text, to look at, which cannot tell a marker from its spelling: a model reads `encode`."""
    return "".join(text for text, _, _ in pieces(messages, reply))


def encode(messages, vocab, reply=False):
    """(ids, answer): a list of ids into `vocab`, and as many truth values: does the assistant write this one?

    Contents go character by character, markers as one token each. Raises ValueError for a character that is no token,
    for a vocabulary without the markers, and as `refuse_messages` does.
    """
    place = {token: i for i, token in enumerate(vocab)}
    if missing := [marker for marker in MARKERS if marker not in place]:
        raise ValueError(
            f"the model has no token {missing[0]}; it was never trained on the chat template (scripts/align.py sft)"
        )
    ids, answer = [], []
    for text, is_marker, own in pieces(messages, reply):
        for token in [text] if is_marker else text:
            if token not in place:
                raise ValueError(f"{token!r} is none of the vocabulary's {len(vocab)} tokens; leave it out")
            ids.append(place[token])
            answer.append(own)
    return ids, answer


def answered(ids, vocab):
    """The text of what a model has written after `encode(..., reply=True)`: up to the end marker, or all of it.

    Another marker, which the assistant has no business to write, is spelled out.
    """
    text = []
    for i in ids:
        if vocab[i] == END:
            break
        text.append(vocab[i])
    return "".join(text)
