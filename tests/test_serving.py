"""The server as its clients meet it: OpenAI's own, wrong requests, many at once, slow ones, and those that leave."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import math
import random
import threading
from unittest.mock import Mock

import pytest
import torch
from live_server import (
    CONFIG,
    LETTERS,
    TOKEN,
    VOCAB,
    Live,
    ask,
    begin,
    make_model,
    metadata_of,
    quiet,
    text_of,
    written,
)
from manyhands.data.tokenizer import SEPARATOR, train_bpe
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.sampling import Sampling
from manyhands.serve.client import Client
from manyhands.serve.engine import generate
from manyhands.serve.http import watch
from manyhands.serve.service import Metrics
from manyhands.serve.vocabulary import TextSoFar, Vocabulary

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def live():
    with Live(running=16, queue=300, body_s=100, body_bytes=50_000) as live:
        yield live


@pytest.fixture
def client(live):
    import openai  # a second

    return openai.OpenAI(base_url=f"{live.address}/v1", api_key=TOKEN, max_retries=0, timeout=30)


def one(live, path, body, **how):
    return asyncio.run(ask(live, path, body, **how))


def complete(live, prompt, n, seed=0, **more):
    """To be awaited: (status, bytes) of n tokens after a prompt."""
    return ask(live, "/v1/completions", {"prompt": prompt, "max_tokens": n, "seed": seed, **more}, timeout_s=100)


def said(live, prompt, n, seed=0):
    """What the server writes, when nobody else asks."""
    return text_of(asyncio.run(complete(live, prompt, n, seed))[1])


def seed_of(model, prompt, n):
    """A seed with which the model writes n tokens and no marker."""
    return next(seed for seed in range(500) if len(written(model, prompt, n, seed)) == n)


def refused(answer):
    """(status, sentence, code, param) of an error as OpenAI's clients read it."""
    status, body = answer
    error = json.loads(body)["error"]
    return status, error["message"], error["code"], error["param"]


# ---------------------------------------------------------------- OpenAI's own client


def test_the_official_client_gets_the_models_own_text_whole_and_as_a_stream(live, client):
    seed = seed_of(live.model, "WHO IS", 15)
    expected = written(live.model, "WHO IS", 40, seed)
    asked = {"model": "manyhands", "prompt": "WHO IS", "max_tokens": 40, "seed": seed}
    whole = client.completions.create(**asked)
    assert whole.choices[0].text == expected
    pieces = list(client.completions.create(**asked, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == expected
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage.prompt_tokens == 6 and len(pieces) >= 3, "the first token, the others, the end"


def test_a_chat_is_the_template_of_lesson_13_and_counts_its_tokens(live, client):
    messages = [{"role": "system", "content": "BE BRIEF."}, {"role": "user", "content": "HELLO?"}]
    in_parts = [messages[0], {"role": "user", "content": [{"type": "text", "text": t} for t in ("HE", "LLO?")]}]
    asked = {"model": "manyhands", "seed": 9, "max_tokens": 30}
    asks_for_nothing = {"presence_penalty": 0.0, "n": 1, "user": "me", "tools": [], "logprobs": None}
    reply = client.chat.completions.create(**asked, **asks_for_nothing, messages=in_parts)
    ids, *_ = live.service.words.encode_chat(messages)
    assert [VOCAB[i] for i in ids if len(VOCAB[i]) > 1] == [
        "<|system|>", "<|end|>", "<|user|>", "<|end|>", "<|assistant|>",
    ]  # fmt: skip
    new = generate(live.model, torch.tensor([ids]), 30, Sampling(), 9)[0, len(ids) :].tolist()
    marker = next((i for i, token in enumerate(new) if token in live.service.words.markers), 30)
    assert reply.choices[0].message.content == "".join(VOCAB[i] for i in new[:marker])
    assert reply.usage.prompt_tokens == 9 + 6 + 5
    assert reply.usage.completion_tokens == min(marker + 1, 30)
    assert reply.choices[0].finish_reason == ("stop" if marker < 30 else "length")


def test_the_official_client_raises_its_own_errors_with_our_sentences(live, client):
    import openai

    with pytest.raises(openai.AuthenticationError, match="the token is missing or wrong"):
        client.with_options(api_key="wrong" * 5).models.list()
    with pytest.raises(openai.BadRequestError, match="context of 96; ask for at most 94 more"):
        client.completions.create(model="manyhands", prompt="AB", max_tokens=95)
    with pytest.raises(openai.NotFoundError, match="unknown model; use manyhands"):
        client.completions.create(model="gpt-4", prompt="AB")
    with pytest.raises(openai.BadRequestError, match="'z' is not among the vocabulary's 37 tokens"):
        client.chat.completions.create(model="manyhands", messages=[{"role": "user", "content": "Az"}])
    assert [(m.id, m.context) for m in client.models.list()] == [("manyhands", 96)]
    assert client.models.retrieve("manyhands").context == 96
    with pytest.raises(openai.NotFoundError, match="unknown model; use manyhands") as unknown:
        client.models.retrieve("gpt-4")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError, match="this server writes text and makes no embeddings") as unsupported:
        client.embeddings.create(model="manyhands", input="AB")
    assert unsupported.value.code == "unsupported"


def test_stop_strings_and_usage_in_a_stream(live, client):
    seed = seed_of(live.model, "O", 12)
    whole = written(live.model, "O", 60, seed)
    stop = whole[9:12]
    cut = whole[: whole.index(stop)]
    asked = {"model": "manyhands", "prompt": "O", "max_tokens": 60, "seed": seed, "stop": ["ZZZZ", stop]}
    assert client.completions.create(**asked).choices[0].text == cut
    stream = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in stream if c.choices) == cut
    assert stream[-1].usage.prompt_tokens == 1 and not stream[-1].choices
    assert [c.choices[0].finish_reason for c in stream if c.choices][-1] == "stop"
    live.wait_until(live.idle)


def test_a_base_model_gets_its_messages_as_plain_text_and_stops_at_the_users_next_line():
    words = Vocabulary(metadata_of(vocab=sorted({*"\n UserAitan:BE HO"})))
    messages = [{"role": "system", "content": "BE"}, {"role": "user", "content": "HO"}]
    ids, stop_ids, _ = words.encode_chat(messages)
    assert "".join(words.vocab[i] for i in ids) == "BE\nUser: HO\nAssistant:"
    assert (stop_ids, words.chat_stops()) == (set(), ("\nUser:",))


@functools.cache
def of_own_text():
    """(tokenizer, vocabulary) of a model of one's own text."""
    tokenizer = train_bpe(["O Rosalind, Rosalind, all is well: sieh, ein Kätzchen! " * 20], 300)
    return tokenizer, Vocabulary(metadata_of() | {"corpus": {"name": "mine", "vocabulary": tokenizer.content}})


def test_a_model_of_ones_own_text_is_served_by_its_tokenizer_and_the_mark_ends_a_text():
    tokenizer, words = of_own_text()
    text = f"Rosalind ☃ {SEPARATOR} é"
    ids = words.encode(text)
    assert tokenizer.separator not in ids and words.known(text) == text
    so_far = TextSoFar(words)
    shown = [so_far.add([i]) for i in [*ids, tokenizer.separator]]
    assert "".join(shown) + so_far.end() == text and "\ufffd" not in "".join(shown), "a character comes whole"
    asked, stop_ids, _ = words.encode_chat([{"role": "user", "content": "☃"}])
    assert stop_ids == {tokenizer.separator} and tokenizer.decode(asked) == "User: ☃\nAssistant:"
    assert words.encode("\ud800") == words.encode("?"), "half of a character is no error of the server"


def test_a_text_that_cannot_fit_is_refused_by_its_characters_and_never_encoded(live, monkeypatch):
    """The event loop waits for an encoder: 990,000 characters would take it half a second."""
    monkeypatch.setattr(live.service.words.tokenizer, "encode", Mock(side_effect=AssertionError))
    found = refused(one(live, TEXT, {"prompt": "A" * 45_000}))
    sentence = "45,000 characters do not fit into the model's context of 96; no text of more than 96 does"
    assert found == (400, sentence, "context_length_exceeded", "prompt")


@pytest.mark.parametrize("cuts", [1, 2, 3, 50])
def test_what_may_begin_a_stop_string_is_held_back_and_never_lost(cuts):
    words = Vocabulary(metadata_of(vocab=list("abcx")))
    for text, stops, shown in (
        ("aabcab", ["abc"], "a"),
        ("aabaab", ["abc"], "aabaab"),
        ("xxab", ["abc", "bx"], "xxab"),
        ("abxabc", ["abc", "bx"], "a"),
    ):
        so_far, ids, found = TextSoFar(words, stops), words.encode(text), ""
        for i in range(0, len(ids), cuts):
            found += so_far.add(ids[i : i + cuts])
        assert (found + so_far.end(), so_far.stopped) == (shown, shown != text)


@pytest.mark.parametrize(
    "style",
    [
        {},
        {
            "style": "llama",
            "n_head": 4,
            "n_kv_head": 2,
            "n_hidden": 20,
            "head_dim": 6,
            "clip_qkv": 0.5,
            "block_size": 24,
            "max_positions": 96,
        },
    ],
    ids=["gpt", "llama"],
)
def test_ids_with_separators_are_answered_as_the_models_own_forward_alone_and_in_a_batch(style):
    """Prompts in pieces of 8 tokens, blocks of 8; the model writes separators, too."""
    config = dataclasses.replace(CONFIG, separator=VOCAB.index("Q"), **style)
    model, draw = quiet(make_model(2, config)), random.Random(3)
    prompts = [[config.separator], [config.separator, 3, 4], [3, 4, config.separator]]
    prompts += [[draw.choice([config.separator, *range(8)]) for _ in range(draw.randint(2, 60))] for _ in range(17)]
    body = {"max_tokens": 12, "logprobs": 0, "seed": 1, "logit_bias": {str(config.separator): 3}}
    with Live(model, metadata_of(config=config), prefill_tokens=8, running=8) as live:
        alone = [json.loads(one(live, TEXT, body | {"prompt": ids})[1])["choices"][0] for ids in prompts]
        together = json.loads(one(live, TEXT, body | {"prompt": prompts})[1])["choices"]
    for ids, *answers in zip(prompts, alone, together, strict=True):
        assert answers[0]["text"] == answers[1]["text"]
        for answer in answers:
            drawn = [VOCAB.index(token) for token in answer["logprobs"]["tokens"]]
            log_p_TV = model(torch.tensor([ids + drawn]))[0][0, len(ids) - 1 : -1].log_softmax(-1)
            right = log_p_TV.gather(1, torch.tensor(drawn)[:, None])[:, 0].tolist()
            assert answer["logprobs"]["token_logprobs"] == pytest.approx(right, abs=1e-9)
    assert any("Q" in answer["text"] for answer in alone), "one begins another document"


# ---------------------------------------------------------------- wrong requests

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "HO"}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (TEXT, b"", 400, "Invalid JSON"),
        (TEXT, b'{"prompt": "HO", "temperature": NaN}', 400, "temperature: Input should be a"),
        (TEXT, {"prompt": ["HO", ""]}, 400, "prompt: use a text or a list of texts, none of them empty"),
        (TEXT, {"prompt": "A" * 96}, 400, "96 tokens of the prompt and 1 more do not fit"),
        (TEXT, {"prompt": "A" * 60_000}, 413, "the body has more than 50,000 bytes"),
        (TEXT, {"prompt": "HO", "stop": ["A"] * 5}, 400, "stop: List should have at most 4 items"),
        (TEXT, {"prompt": "HO", "temprature": 0.5}, 400, "temprature is not a field of this request; leave it out"),
        (CHAT, {"messages": [USER, USER]}, 400, "they take turns"),
        ("/admin/checkpoint", {"step": "../../etc"}, 400, "step: use newest, best or a number"),
        ("/nowhere", {}, 404, "Not Found"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_one_sentence_with_its_status_and_touches_nothing(live, path, body, status, words):
    found = refused(one(live, path, body))
    assert found[0] == status and words in found[1], found
    assert live.idle()


def test_idle_sockets_slow_heads_and_half_bodies_hinder_nobody_and_are_closed(monkeypatch):
    monkeypatch.setattr("manyhands.serve.http.HEAD_S", 1)
    with Live(running=8, queue=300, body_s=3) as live:
        asked = mixed_requests(10, seed=6)

        async def slow(reader, writer):  # a head that never ends
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\nGET / HTTP/1.1\r\n")  # one answer, then slowly
            while not reader.at_eof():
                writer.write(b"X-Slow: 1\r\n")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1), 0.2)

        async def all_at_once():
            halves = [await begin(live, TEXT, b"{", length=100) for _ in range(8)]
            while len(live.server.server_state.tasks) < 8:
                await asyncio.sleep(0.01)
            sockets = [await asyncio.open_connection("127.0.0.1", live.port) for _ in range(60)]
            slowly = [asyncio.ensure_future(slow(*socket)) for socket in sockets[::2]]
            good = await asyncio.gather(*(complete(live, *request) for request in asked))
            ended = await asyncio.gather(*(reader.read() for reader, _ in sockets[1::2]), return_exceptions=True)
            await asyncio.gather(*slowly, return_exceptions=True)
            assert len(ended) == 30, "each idle socket was closed"
            return good, await asyncio.gather(*(reader.read() for reader, _ in halves))

        good, halves = asyncio.run(asyncio.wait_for(all_at_once(), 60))
        for request, (status, body) in zip(asked, good, strict=True):
            assert (status, text_of(body)) == (200, written(live.model, *request))
        assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in halves), "who has the token is told"
        live.wait_until(lambda: not live.server.server_state.connections)


# ---------------------------------------------------------------- sockets without a request


def test_idle_sockets_and_half_bodies_are_closed(monkeypatch):
    monkeypatch.setattr("manyhands.serve.http.HEAD_S", 1)
    with Live(body_s=1) as live:

        async def both():
            half, writer = await begin(live, TEXT, b"{", length=100)
            idle, other = await asyncio.open_connection("127.0.0.1", live.port)
            return await half.read(), await idle.read()

        half, _ = asyncio.run(asyncio.wait_for(both(), 60))
        assert half.startswith(b"HTTP/1.1 408 "), "who has the token is told"
        live.wait_until(lambda: not live.server.server_state.connections)


# ---------------------------------------------------------------- the token


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/metrics"), ("GET", "/nowhere"), ("POST", TEXT), ("POST", "/admin/checkpoint")]
)
def test_without_the_token_nothing_is_told_and_nothing_read(live, method, path):
    wrong = [
        {"token": None},
        {"token": TOKEN[:-1]},
        {"token": TOKEN + "x"},
        {"token": None, "headers": {"Authorization": f"Basic {TOKEN}"}},
        {"token": None, "headers": {"X-Api-Key": b"\xff"}},
    ]
    for how in wrong:
        assert one(live, path, b"{not even JSON", method=method, **how)[0] == 401, how
    assert one(live, f"{path}?token={TOKEN}", b"{}", method=method, token=None)[0] == 401, "never from a query"
    key = {"token": None, "headers": {"X-Api-Key": TOKEN}}
    assert one(live, path, b"{}", method=method, **key)[0] != 401


def test_the_page_and_the_health_need_no_token_and_hold_no_secret(live):
    status, page = one(live, "/", None, token=None, method="GET")
    assert status == 200 and TOKEN.encode() not in page
    assert b"http://" not in page and b"https://" not in page, "nothing from elsewhere"
    assert one(live, "/healthz", None, token=None, method="GET") == (200, b'{"status":"ok"}')


# ---------------------------------------------------------------- many at once


def mixed_requests(n, seed=0):
    """[(prompt, tokens, seed)], many with a common beginning."""
    source = random.Random(seed)
    common = "".join(source.choice(LETTERS[2:]) for _ in range(24))
    found = []
    for i in range(n):
        own = "".join(source.choice(LETTERS[2:]) for _ in range(source.randint(1, 9)))
        found.append((common[: source.randint(0, 24)] + own, source.randint(1, 30), i))
    return found


def test_forty_streams_among_wrong_and_leaving_clients_are_all_answered_right(live):
    """None wrong, none dropped, and nothing is held afterwards."""
    asked = mixed_requests(40)
    bytes_before = live.service.engine.cache.num_bytes()

    async def nuisance(i):
        if i % 2:
            return await ask(live, TEXT, b"{")
        reader, writer = await begin(live, TEXT, {"prompt": "HO", "max_tokens": 90, "stream": True})
        await reader.read(20)  # a little, and leaves
        writer.transport.abort()

    async def all_at_once():
        good = [complete(live, *request, stream=True) for request in asked]
        return (await asyncio.gather(*good, *(nuisance(i) for i in range(12))))[:40]

    for request, (status, body) in zip(asked, asyncio.run(all_at_once()), strict=True):
        assert (status, text_of(body)) == (200, written(live.model, *request))
    live.wait_until(live.idle)
    assert live.service.engine.cache.num_bytes() == bytes_before
    told = Client(live.address, TOKEN).metrics()
    assert told['manyhands_tokens_total{kind="reused"}'] > 0
    assert told["manyhands_running"] == told["manyhands_waiting"] == told["manyhands_blocks_held"] == 0


def test_greedy_answers_under_load_are_equal_beside_requests_whose_numbers_are_nan():
    model = quiet(make_model())
    with Live(model, running=8, queue=300, blocks=40) as live:
        with torch.no_grad():  # one symbol's row, which no held-out text and no answer of the others needs
            model.tokens.weight[VOCAB.index("Q")] = math.nan
            model.head.bias[VOCAB.index("Q")] = -50.0
        asked = [(prompt.replace("Q", "O"), n) for prompt, n, _ in mixed_requests(24, seed=5)]

        async def all_at_once():
            good = [complete(live, prompt, n, stream=i % 2 == 0, temperature=0) for i, (prompt, n) in enumerate(asked)]
            bad = [complete(live, prompt + "Q", n, stream=i % 2 == 0) for i, (prompt, n) in enumerate(asked)]
            found = await asyncio.gather(*(one for pair in zip(good, bad, strict=True) for one in pair))
            return found[::2], found[1::2]

        good, bad = asyncio.run(all_at_once())
        for (prompt, n), (status, body) in zip(asked, good, strict=True):
            assert (status, text_of(body)) == (200, written(model, prompt, n, 0, Sampling(temperature=0)))
        assert {refused(answer)[::2] for answer in bad} == {(500, "not_finite")}
        assert one(live, "/healthz", None, method="GET")[0] == 200
        live.wait_until(live.idle)
        assert math.isfinite(live.service.metrics.prompt_nats())


def test_a_model_with_a_weight_that_is_no_number_never_starts_to_serve():
    for bad in (math.nan, -math.inf):
        model = make_model()
        with torch.no_grad():
            model.tokens.weight[VOCAB.index("Q"), 3] = bad
        with pytest.raises(ValueError, match="tokens.weight of step 10 holds NaN or infinity; serve another"):
            Live(model)


def test_who_leaves_is_out_of_the_batch_at_once_streaming_or_not_running_or_waiting():
    with Live(quiet(make_model()), running=16, queue=300) as live:
        go = hold_engine(live)

        async def ask_and_leave():
            body = {"prompt": "HO", "max_tokens": 90}
            writers = [(await begin(live, TEXT, body | {"seed": i, "stream": i % 2 == 0}))[1] for i in range(40)]
            while len(live.service.waited_for) < 40:  # more than run at once
                await asyncio.sleep(0.01)
            for writer in writers:
                writer.close()

        asyncio.run(ask_and_leave())
        live.wait_until(lambda: not live.service.waited_for)
        go.set()
        live.wait_until(live.idle)
        assert Client(live.address, TOKEN).metrics()['manyhands_generations_total{reason="gone"}'] == 40


def hold_engine(live):
    """The engine does nothing until the returned event is set."""
    go, step = threading.Event(), live.service.engine.step
    live.service.engine.step = lambda: (go.wait(60), step())[1]
    return go


def test_a_full_queue_is_said_with_429_and_more_texts_than_it_ever_holds_with_400():
    with Live(running=2, queue=3) as live:
        many = refused(one(live, TEXT, {"prompt": ["A"] * 6, "max_tokens": 1}))
        assert many[::2] == (400, "too_many_texts") and "this server holds 5" in many[1]
        assert one(live, TEXT, {"prompt": ["A"] * 5, "max_tokens": 1})[0] == 200
        go = hold_engine(live)

        async def ask_eight():
            tasks = [asyncio.ensure_future(complete(live, "HO", 5, i)) for i in range(8)]
            while sum(task.done() for task in tasks) < 3:
                await asyncio.sleep(0.01)
            go.set()
            return await asyncio.gather(*tasks)

        found = asyncio.run(ask_eight())
        assert sorted(status for status, _ in found) == [200] * 5 + [429] * 3
        sentence = "2 requests run and 3 wait, which is all the room; try again later"
        assert {refused(answer)[1:3] for answer in found if answer[0] == 429} == {(sentence, "queue_full")}
        for i, (status, body) in enumerate(found):
            assert status == 429 or text_of(body) == written(live.model, "HO", 5, i)


def test_what_takes_too_long_is_ended_by_a_status_or_an_event_and_frees_its_place():
    with Live(quiet(make_model()), request_s=1.0, running=2) as live:
        go, steps, step = threading.Event(), [], live.service.engine.step

        def stuck_after_three():
            steps.append(None)
            return step() if len(steps) <= 3 or go.wait(60) else []

        live.service.engine.step = stuck_after_three
        status, body = one(live, TEXT, {"prompt": "HO", "max_tokens": 50, "stream": True})
        assert status == 200 and b'"code": "timeout"' in body and b"[DONE]" not in body
        found = refused(one(live, TEXT, {"prompt": "HO", "max_tokens": 5}))
        assert found[0] == 504 and "not finished within 1 s" in found[1]
        go.set()
        live.wait_until(live.idle)


def test_when_the_engine_fails_everybody_hears_it_and_the_next_is_served(monkeypatch, caplog):
    with Live() as live:
        with monkeypatch.context() as patch:
            patch.setattr(live.service.engine, "step", Mock(side_effect=MemoryError("no room")))
            found = refused(one(live, TEXT, {"prompt": "HO", "max_tokens": 5}))
            assert found[0] == 500 and "try again" in found[1] and "no room" in caplog.text
            assert one(live, "/healthz", None, method="GET") == (503, b'{"status":"failed"}')
        assert said(live, "HO", 5, 1) == written(live.model, "HO", 5, 1)
        assert one(live, "/healthz", None, method="GET")[0] == 200


# ---------------------------------------------------------------- the gate


def test_a_better_checkpoint_goes_live_in_the_middle_and_no_answer_mixes_two_models():
    other = make_model(7)
    with Live(loads={"newest": (other, metadata_of(20))}, running=8, queue=200, body_s=100) as live:
        asked, steps, step = mixed_requests(30, seed=4), [], live.service.engine.step

        def held_in_the_middle():  # the engine writes on only when the swap waits for it
            steps.append(None)
            if len(steps) == 20:
                live.wait_until(lambda: live.service.engine.scheduler.hold_new)
            return step()

        live.service.engine.step = held_in_the_middle

        async def all_and_a_swap():
            tasks = [asyncio.ensure_future(complete(live, *request)) for request in asked]
            while len(steps) < 20:
                await asyncio.sleep(0.002)
            verdict = await ask(live, "/admin/checkpoint", {"step": "newest"})
            return await asyncio.gather(*tasks), verdict

        answers, (status, verdict) = asyncio.run(all_and_a_swap())
        assert status == 200 and json.loads(verdict)["passed"]
        versions = [json.loads(body)["system_fingerprint"] for _, body in answers]
        assert {live.service.live.version} < set(versions) and len(set(versions)) == 2, "the swap was not in the middle"
        for request, version, (code, body) in zip(asked, versions, answers, strict=True):
            model = other if version == live.service.live.version else live.model
            assert (code, text_of(body)) == (200, written(model, *request))


def test_a_worse_a_strange_or_an_unreadable_checkpoint_does_not_come_through():
    good, broken = make_model(), make_model()
    with torch.no_grad():
        broken.head.bias.fill_(math.nan)
    short = GPTConfig(len(VOCAB), 48, 1, 1, 8)
    loads = {
        "1": (make_model(7), metadata_of(1)),
        "2": (broken, metadata_of(2)),
        "3": (make_model(1, short), metadata_of(3, short)),
        "4": (make_model(), metadata_of(4, vocab=VOCAB[::-1])),
        "5": (good, metadata_of(5)),
    }
    ids = generate(good, torch.zeros(1, 1, dtype=torch.long), 90, Sampling(0.5), 1)[0]  # what it likes
    with Live(good, loads=loads, held_out_ids=ids.repeat(4), tolerance=0.02) as live:
        before = live.service.live.version
        for step, words in (
            (1, "worse by more than 0.02"),
            (2, "head.bias holds NaN or infinity"),
            (3, "its context is 48, but this server was started for 96"),
            (4, "its vocabulary differs"),
        ):
            status, body = one(live, "/admin/checkpoint", {"step": step})
            verdict = json.loads(body)
            assert status == 409 and not verdict["passed"] and words in verdict["sentence"], verdict
            assert verdict["serves"] == before
        assert json.loads(one(live, "/admin/checkpoint", {"step": 5})[1])["passed"], "the same weights are not worse"


def test_a_checkpoint_that_is_copied_in_while_it_is_watched_is_considered_when_it_is_whole(tmp_path):
    """Half of it lies still for a while: it is looked at in vain, and again when the rest has come."""
    seen = []

    class Service:
        async def consider(self, step):
            seen.append(sorted(file.name for file in tmp_path.glob("*10/*")))
            if len(seen) == 1:
                raise OSError("half a file")

    async def copy():
        (tmp_path / "step-00000005").mkdir()
        task = asyncio.ensure_future(watch(Service(), tmp_path, 0.01))
        await asyncio.sleep(0.1)
        assert seen == [], "what is there at the start serves already"
        (tmp_path / "step-00000010").mkdir()
        for n, name in enumerate(("rank-0.safetensors", "manifest.json"), 1):
            (tmp_path / "step-00000010" / name).write_text("{}")
            while len(seen) < n or name not in seen[-1]:
                await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(asyncio.wait_for(copy(), 30))


# ---------------------------------------------------------------- what is measured, what is logged


def test_prompts_unlike_the_training_text_raise_the_drift_gauge():
    engine = Mock(prompt_nats=3000.0, prompt_tokens=2000)
    drift = Metrics(engine)
    assert drift.prompt_nats() == pytest.approx(1.5)
    engine.prompt_nats, engine.prompt_tokens = 3000.0 + 4 * 700, 2700
    assert 2.5 < drift.prompt_nats() < 3.5


def test_neither_the_token_nor_what_people_write_is_ever_logged_or_measured(live, caplog):
    secret = "THE SECRET OF ROSALIND"
    with caplog.at_level(logging.DEBUG, logger="manyhands.serve"), caplog.at_level(logging.DEBUG, logger="uvicorn"):
        one(live, TEXT, {"prompt": secret, "max_tokens": 3})
        one(live, f"{TEXT}?token={TOKEN}", {"prompt": secret}, token="wrong-" + TOKEN)
        one(live, f"/{TOKEN}/x", {"prompt": secret})
        one(live, CHAT, {"messages": [{"role": "user", "content": secret + "{}"}]})
        one(live, TEXT, b"{" + TOKEN.encode())
        # a line is written when its answer has gone; none without the token
        live.wait_until(lambda: len([r for r in caplog.records if r.name.startswith("manyhands.serve")]) >= 4)
    for text in (caplog.text, live.service.metrics.content().decode()):
        assert TOKEN not in text and "ROSALIND" not in text and "?" not in text.replace("?token", "")
