"""A model that ranks share serves what one process serves, and what goes wrong on a rank is no silent wrong answer."""

import re
import signal
import threading
import time
from dataclasses import replace
from unittest.mock import Mock

import psutil
import pytest
import torch
from live_server import make_model, metadata_of, quiet
from manyhands.checkpoint.export import write_export
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.sampling import Sampling
from manyhands.serve import load_test
from manyhands.serve.client import Client
from manyhands.serve.engine import Engine
from manyhands.serve.tensor_ranks import Leader, TensorRanks
from test_serve_program import start

LLAMA = GPTConfig(
    vocab_size=35, block_size=24, n_layer=2, n_head=4, n_embd=16, style="llama", n_kv_head=2, n_hidden=24
)  # fmt: skip
GPT_2 = GPTConfig(vocab_size=65, block_size=24, n_layer=2, n_head=4, n_embd=16, tie=True, qkv_bias=True)
MODELS = [
    LLAMA,  # of 4 ranks, two hold one head of keys alike
    replace(LLAMA, tie=True, max_positions=40, norm="layer", clip_qkv=0.5),
    replace(LLAMA, experts=4, top_k=2),
    GPT_2,
    replace(GPT_2, separator=3, experts=4),
]


class Kept(Engine):
    """An engine that keeps the logits from which it draws."""

    def _logits(self, works):
        found = list(super()._logits(works))
        self.kept = getattr(self, "kept", []) + [logits for _, logits, _ in found]
        return found


def write(model, runner=None):
    """Five texts of unequal lengths in few blocks, pieces of 5 tokens, three at a time: some give their blocks back."""
    sizes = dict(num_blocks=12, block_size=4, max_running=3, prefill_tokens=5)
    engine = Kept(model, "", **sizes, **({} if runner is None else {"runner": runner}))
    asked = [[i % 7, 3, 5, i % 3, 1, 6, 2][: 2 + i] for i in range(5)]
    sequences = [engine.add(ids, 16, Sampling(), seed=1) for ids in asked]
    while not engine.idle():
        engine.step()
    return [sequence.ids for sequence in sequences], torch.cat(engine.kept), engine.cache.store.shape[3]


def written_on_ranks(ranks, configs):
    found = []
    for config in configs:
        shared = TensorRanks(ranks, lambda config=config: (make_model(1, config), {}))
        if ranks.rank > 0:
            shared.follow()
            continue
        try:
            found.append(write(shared.model, shared.lead))
        finally:
            shared.end()
    return found


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_write_with_the_logits_of_one_process_and_share_the_cache(pool, n):
    found = pool.run(n, written_on_ranks, MODELS)[0]
    for config, (ids, logits, heads) in zip(MODELS, found, strict=True):
        alone_ids, alone_logits, alone_heads = write(make_model(1, config))
        assert ids == alone_ids, config
        torch.testing.assert_close(logits, alone_logits, rtol=0, atol=1e-10)
        assert (heads, alone_heads) == (max(1, config.kv_heads // n), config.kv_heads)


def refusal(ranks, config, missing):
    def load():
        if ranks.rank == missing:
            raise OSError(2, "No such file or directory", "model")
        return make_model(1, config), {}

    try:
        TensorRanks(ranks, load)
    except ValueError as error:
        return str(error)


def test_what_does_not_split_or_is_missing_on_one_rank_is_refused_alike_on_all(pool):
    uneven = replace(LLAMA, n_head=9, n_kv_head=3, n_embd=18)
    why = "model.n_head=9 with model.n_kv_head=3 does not split over 2 tensor ranks; use 1, 3 or 9"
    assert pool.run(2, refusal, uneven, None) == [why] * 2
    assert pool.run(2, refusal, LLAMA, 1) == [str(OSError(2, "No such file or directory", "model"))] * 2


def test_after_an_error_no_row_is_computed_any_more():
    """The others may still wait in the row that failed: their sums would be added to those of another one."""
    ranks = Mock()
    engine = Engine(make_model(1, LLAMA), "", 12, 4, runner=lambda *sizes: Leader(ranks, *sizes))
    engine.cache.clear = Mock(side_effect=[MemoryError("no room")])
    for error, words in ((MemoryError, "no room"), (RuntimeError, "an earlier step failed on one of the ranks")):
        sequence = engine.add([1, 2, 3], 2)
        with pytest.raises(error, match=words):
            engine.step()
        engine.scheduler.cancel(sequence)
    assert ranks.send.call_count == 1, "the second row went nowhere"


@pytest.fixture
def served(root, tmp_path, real_python):
    """(the launcher of a server on two ranks, its client, its log): a model that never writes a marker."""
    model = quiet(make_model()).float()
    write_export(dict(model.named_parameters()), metadata_of(), tmp_path / "model.safetensors")
    words = ["launch.py", "--nproc", "2", str(root / "scripts" / "serve.py"), "--", str(tmp_path / "model.safetensors")]
    process, address_file = start(root, None, tmp_path, *words[1:], "--port", "0", "--tensor", "2", program=words[0])
    yield process, Client.from_file(address_file), tmp_path / "log"
    for one in [*psutil.Process(process.pid).children(recursive=True), process] if process.poll() is None else []:
        one.kill()


def ranks_of(launcher):
    children = psutil.Process(launcher.pid).children(recursive=True)
    return [one for one in children if one.name().startswith("python") and "RANK" in one.environ()]


def test_a_signal_lets_ranks_finish_what_was_asked_and_end_with_status_0(served):
    process, client, log = served
    ranks, texts = ranks_of(process), {}
    thread = threading.Thread(target=lambda: texts.update(all=client.complete("HO", max_tokens=80, seed=1)))
    thread.start()
    while client.metrics()["manyhands_running"] < 1:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, log.read_text()
    thread.join(10)
    assert len("".join(texts["all"])) == 80
    assert "MiB on each of 2 ranks" in log.read_text() and "Traceback" not in log.read_text()
    assert not psutil.wait_procs(ranks, timeout=10)[1]


@pytest.mark.full
def test_the_load_test_measures_a_model_on_its_ranks_and_leaves_none(tmp_path, capsys, real_python, one_thread):
    load_test.random_model(tmp_path / "model.safetensors")
    words = ["--model", str(tmp_path / "model.safetensors"), "--clients", "3", "--tokens", "5", "--tensor"]
    assert load_test.main([*words, "2"]) == 0
    assert re.findall(r"^(\w+ clients?):", capsys.readouterr().out, re.M) == ["1 client", "3 clients"]
    assert load_test.main([*words, "3"]) == 1
    assert "the server did not start" in (said := capsys.readouterr().err) and "n_head=4" in said
    assert not [one for one in psutil.process_iter(["cmdline"]) if words[1] in (one.info["cmdline"] or [])]


@pytest.mark.full
def test_a_killed_rank_ends_the_server_with_its_name_and_status(served):
    process, client, log = served
    assert client.complete("HO", max_tokens=5)
    ranks = ranks_of(process)
    next(one for one in ranks if one.environ()["RANK"] == "1").kill()
    assert process.wait(60) == 128 + signal.SIGKILL
    assert "rank 1" in log.read_text()
    assert not psutil.wait_procs(ranks, timeout=10)[1]
