"""Combine model, paged cache and scheduler: a step computes a batch and draws a token for each sequence.

    engine = Engine(model, "step 300", num_blocks=256)
    sequence = engine.add(prompt_ids, max_tokens=40, sampling=Sampling(0.8), seed=7)
    while engine.step():                           # [(sequence, its new token, or None)]
        ...                                        # sequence.finish: why the sequence ended, or None

One process, no server, no clock. A step sends the positions of all sequences, prefilling and decoding, through the
layers as one row (Yu et al. 2022, Orca, section 3.2, selective batching).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from manyhands.gpt.model import GPT
from manyhands.gpt.sampling import Sampling, uniforms, write_next
from manyhands.serve.decoder import run
from manyhands.serve.paged_cache import BlockPool, PagedCache
from manyhands.serve.scheduler import CachedSequence, Scheduler

NOT_FINITE = "not_finite"  # finish reason of a sequence whose logits are NaN or infinite; others are unaffected


class Row(NamedTuple):
    """The new positions of all sequences, one behind another: what a step computes, on each rank of the model."""

    taken: list[int]  # blocks in which other sequences' numbers may be left
    tables: list[list[int]]  # the blocks of each sequence
    lengths: list[int]  # and how many of the positions are its own
    ids_N: list[int]
    positions_N: list[int]
    starts_N: list[int]  # of each position's document


class Runner:
    """A model with its cache of `num_blocks` blocks; of `tensor` ranks each has its share of the heads."""

    def __init__(self, model: GPT, num_blocks: int, block_size: int, tensor: int = 1):
        self.model, weight = model.eval(), next(model.parameters())
        heads = max(1, model.config.kv_heads // tensor)
        self.cache = PagedCache(model.config, num_blocks, block_size, weight.dtype, weight.device, heads)

    @torch.inference_mode()
    def logits(self, row: Row) -> torch.Tensor:
        """Return the logits [N, V] of a row's positions. The layers see one sequence; only attention differs."""
        device = self.cache.device
        self.cache.clear(row.taken)
        positions_N = torch.tensor(row.positions_N, device=device)
        starts_N = torch.tensor(row.starts_N, device=device)
        attend = self.cache.attend_for(row.tables, row.lengths, positions_N, starts_N)
        return run(self.model, torch.tensor([row.ids_N], device=device), positions_N[None], attend)[0]


class Engine:
    """An engine that serves one model at a time. Ids from `vocab_size` on are not tokens and are never drawn.

    `runner` makes the Runner of a model; tensor ranks have their own. Raise ValueError if the blocks cannot hold one
    sequence of full length.
    """

    def __init__(
        self, model, version, num_blocks=256, block_size=16, max_running=32, prefill_tokens=256, vocab_size=None,
        runner: Callable[[GPT, int, int], Runner] = Runner,
    ):  # fmt: skip
        if num_blocks * block_size < (context := model.config.context):
            why = f"{num_blocks} blocks of {block_size} positions do not hold one sequence of {context}"
            raise ValueError(f"{why}; use {-(-context // block_size)} or more")
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler, self.make_runner = Scheduler(self.pool, max_running, prefill_tokens), runner
        self.prompt_nats, self.prompt_tokens = 0.0, 0  # the summed loss on prompts: see `service.Metrics`
        self.change_model(model, version, vocab_size)

    def change_model(self, model: GPT, version: str, vocab_size: int | None = None) -> None:
        """Serve another model from the next step on. All sequences of the old model must be finished."""
        # first the steps that may fail, so that a failure changes nothing
        runner = self.make_runner(model, self.pool.num_blocks, self.pool.block_size)
        assert not self.scheduler.unfinished(), "sequences of the old model are unfinished"
        self.pool.forget_all()
        self.runner, self.config, self.version = runner, model.config, version
        self.vocab_size = vocab_size or model.config.vocab_size

    @property
    def cache(self) -> PagedCache:
        """Return the cache of the model's keys and values."""
        return self.runner.cache

    def new_sequence(
        self, prompt: list[int], max_tokens: int, sampling: Sampling | None = None, seed: int | None = None,
        stop_ids=(), which: int = 0,
    ) -> CachedSequence:  # fmt: skip
        """Return a sequence that starts with `prompt` (at least one id); `which` numbers the sequences of one seed.

        Raise ValueError if it exceeds the model's context.
        """
        context = self.config.context
        if not prompt:
            raise ValueError("the prompt is empty; send at least one token")
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        if (room := context - len(prompt)) < max_tokens:
            cure = f"ask for at most {room} more" if room > 0 else f"shorten the prompt to {context - 1} or fewer"
            why = f"{len(prompt)} tokens of the prompt and {max_tokens} more"
            raise ValueError(f"{why} do not fit into the model's context of {context}; {cure}")
        numbers = uniforms(seed if seed is None else seed % 2**64, max_tokens, which)
        return CachedSequence(list(prompt), max_tokens, sampling or Sampling(), numbers, stop_ids)

    def add(self, *args, **kwargs) -> CachedSequence:
        """Queue a `new_sequence` and return it."""
        sequence = self.new_sequence(*args, **kwargs)
        self.scheduler.add(sequence)
        return sequence

    @torch.inference_mode()
    def step(self) -> list[tuple[CachedSequence, int | None]]:
        """Compute one step for all running sequences and return [(sequence, its new token)].

        If logits are NaN or infinite, the token is None and `finish` is NOT_FINITE.
        """
        works = sorted(self.scheduler.plan(), key=lambda work: work.stop - work.start)
        failed, drawing, rows = [], [], []
        for work, logits_TV, finite in self._logits(works):
            if not finite:  # do not share its blocks: a mask does not remove NaN of earlier positions
                self.scheduler.cancel(work.sequence)
                work.sequence.finish = NOT_FINITE
                failed.append((work.sequence, None))
                continue
            self._note_prompt_loss(work, logits_TV)
            if work.draws:
                drawing.append(work.sequence)
                rows.append(logits_TV[-1, : self.vocab_size])
        ids = write_next(drawing, torch.stack(rows)) if drawing else []
        for work in works:
            if work.sequence.finish != NOT_FINITE:
                self.scheduler.computed(work)
        return failed + list(zip(drawing, ids, strict=True))

    def idle(self) -> bool:
        """Return whether no sequence waits or runs."""
        return not self.scheduler.waiting and not self.scheduler.running

    def _logits(self, works):
        """Return (work, logits [T, V], all finite?) for each."""
        if not works:
            return []
        taken, self.pool.taken = self.pool.taken, []
        lengths, separator = [work.stop - work.start for work in works], self.config.separator
        logits_NV = self.runner.logits(Row(
            taken, [work.sequence.block_table[: self.pool.blocks_for(work.stop)] for work in works], lengths,
            [i for w in works for i in w.sequence.ids[w.start : w.stop]],
            [i for w in works for i in range(w.start, w.stop)],
            [start for w in works for start in w.sequence.starts_of_documents(separator)[w.start : w.stop]],
        ))  # fmt: skip
        finite_N = iter(logits_NV.isfinite().all(-1).tolist())
        finite = [all([next(finite_N) for _ in range(length)]) for length in lengths]
        return zip(works, logits_NV.split(lengths), finite, strict=True)

    def _note_prompt_loss(self, work, logits_TV):
        """Add -log p of the prompt's tokens that this work predicted; the logits are available anyway."""
        stop = min(work.stop, work.sequence.prompt_length - 1)
        if stop <= work.start:
            return
        targets_T = torch.tensor(work.sequence.ids[work.start + 1 : stop + 1], device=logits_TV.device)
        nats = F.cross_entropy(logits_TV[: stop - work.start].float(), targets_T, reduction="sum")
        self.prompt_nats += nats.item()
        self.prompt_tokens += stop - work.start


@torch.inference_mode()
def generate(model, ids_BT, n, sampling=Sampling(), seed=0, use_cache=True):  # noqa: B008 - it is frozen
    """Return `ids_BT` and n tokens after it: [B, T + n], each row with separate random numbers of one seed.

    `use_cache=False` recomputes all positions for each token, by the model's forward, and draws the same tokens.
    Raise ValueError if T + n exceeds the model's context.
    """
    B, T = ids_BT.shape
    blocks = max(B * -(-(T + n) // 16), -(-model.config.context // 16))
    engine = Engine(model, "", blocks, max_running=B, prefill_tokens=B * T)
    sequences = [engine.add(ids, n, sampling) for ids in ids_BT.tolist()]
    for b, sequence in enumerate(sequences):
        sequence.uniforms = uniforms(seed, n * B)[b::B]
    for _ in range(n):
        if use_cache:
            engine.step()
        else:
            write_next(sequences, model(torch.tensor([s.ids for s in sequences], device=ids_BT.device))[0][:, -1])
    return torch.tensor([sequence.ids for sequence in sequences], device=ids_BT.device)
