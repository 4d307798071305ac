"""Judge whether a new checkpoint is not worse than the serving one, by the loss on the same text and tokens.

    text_ids = held_out(words, file)                        # the text for both
    verdict = judge(candidate, metadata, live, live_metadata, text_ids, tolerance=0.02)
    verdict.passed, verdict.sentence                        # "1.712 against 1.730 nats per token of 8,192: not worse"

A lower training loss or a later step does not count: a run may have diverged or been trained on another text.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from manyhands.checkpoint.export import not_finite, tokenizer_of
from manyhands.data import shakespeare
from manyhands.gpt.model import GPT
from manyhands.launch.program import Refused, explained
from manyhands.serve.vocabulary import Vocabulary

TOKENS = 8192  # tokens of the held-out text, in windows as long as in training


@dataclass(frozen=True)
class Verdict:
    """The verdict on a candidate: whether it may serve, the reason in one sentence, and its loss if it was computed."""

    passed: bool
    sentence: str
    loss: float | None = None


def held_out(words: Vocabulary, file: Path | None = None) -> torch.Tensor:
    """Return the ids of the text that judges candidates: of `file`, else of the last tenth of the course's corpus.

    Characters without a token are omitted. Raise ValueError if fewer than 256 tokens remain, or for an unreadable file.
    """
    if file is not None:
        with explained(Refused, "name another --gate-text", file):
            text = file.read_text(encoding="utf-8")
    else:  # the course's text only if it is on this machine: a server downloads nothing
        found = shakespeare.at_hand()
        text = found[1].decode() if found else shakespeare.offline_text()
        text = text[len(text) * 9 // 10 :]
    ids = words.tokenizer.encode(words.known(text[: 16 * TOKENS]))[:TOKENS]
    if len(ids) < 256:
        why = f"{len(ids)} tokens of {file or 'the corpus'} are known to the model; name a text by --gate-text"
        raise ValueError(why)
    return ids


@torch.inference_mode()
def loss_on(model: GPT, ids: torch.Tensor) -> float:
    """Return the mean cross-entropy in nats per token of `ids` [n], in windows that do not overlap."""
    ids = ids.to(next(model.parameters()).device)
    block = min(model.config.block_size, len(ids) - 1)
    count = (len(ids) - 1) // block
    inputs = ids[: count * block].view(count, block)
    targets = ids[1 : count * block + 1].view(count, block)
    losses = [model(x[None], y[None])[1].item() for x, y in zip(inputs, targets, strict=True)]
    return sum(losses) / count


def judge(
    candidate: GPT, metadata: dict, live: GPT, live_metadata: dict, ids: torch.Tensor, tolerance: float
) -> Verdict:
    """Return the Verdict on `candidate` without changing anything. `tolerance`: nats by which it may be worse."""
    if tokenizer_of(metadata).content != tokenizer_of(live_metadata).content:
        return Verdict(False, "its vocabulary differs from the serving model's: requests could not be read")
    context, room = candidate.config.context, live.config.context
    if context != room:
        why = f"its context is {context}, but this server was started for {room}; start another server"
        return Verdict(False, why)
    if (name := not_finite(candidate)) is not None:
        return Verdict(False, f"{name} holds NaN or infinity")
    loss, live_loss = loss_on(candidate, ids), loss_on(live, ids)
    passed = loss <= live_loss + tolerance  # a loss of NaN does not
    numbers = f"{loss:.4f} against {live_loss:.4f} nats per token"
    return Verdict(passed, f"{numbers}: {'not worse' if passed else f'worse by more than {tolerance}'}", loss)
