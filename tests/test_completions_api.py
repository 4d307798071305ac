"""What OpenAI's clients may ask for, by their own client: several texts, log p, penalties, long talks; and what not."""

import asyncio
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import LETTERS, TOKEN, VOCAB, Live, ask, make_model, metadata_of, quiet, written
from manyhands.config.options import ModelOptions
from manyhands.gpt.config import GPTConfig
from manyhands.serve import schema
from manyhands.serve.client import Client

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("one_thread")]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "HO"}


@pytest.fixture(scope="module")
def live():
    with Live(quiet(make_model()), running=16, queue=300, body_s=100) as live:
        yield live


@pytest.fixture(scope="module")
def client(live):
    import openai  # a second

    return openai.OpenAI(base_url=f"{live.address}/v1", api_key=TOKEN, max_retries=0, timeout=60)


def complete(client, prompt, n=12, seed=3, **more):
    return client.completions.create(model="manyhands", prompt=prompt, max_tokens=n, seed=seed, **more)


def answer(live, path, body):
    """(status, JSON) of one request."""
    status, content = asyncio.run(ask(live, path, body))
    return status, json.loads(content)


def log_p_of(model, prompt, text):
    """log p [n, V] by the model alone, of each character of a text behind a prompt."""
    ids = [VOCAB.index(c) for c in prompt + text]
    return model(torch.tensor([ids]))[0][0, len(prompt) - 1 : -1].log_softmax(-1).detach()


# ---------------------------------------------------------------- several texts


def test_a_list_of_prompts_gets_the_texts_that_each_gets_alone_in_their_order(live, client):
    prompts = ["WHO", "WHO IS", "A", "WHO"]
    together = complete(client, prompts)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in together.choices] == [written(live.model, prompt, 12, 3) for prompt in prompts]
    assert (together.usage.prompt_tokens, together.usage.completion_tokens) == (13, 48)
    ids = [live.service.words.encode(prompt) for prompt in prompts]
    assert [choice.text for choice in complete(client, ids).choices] == [choice.text for choice in together.choices]
    assert complete(client, ids[1]).choices[0].text == together.choices[1].text, "one list of ids is one prompt"


def test_n_texts_differ_repeat_with_their_seed_and_the_first_is_the_one_that_is_written_alone(live, client):
    asked = {"extra_body": {"n": 3}}
    texts = [choice.text for choice in complete(client, ["WHO", "A"], **asked).choices]
    assert texts == [choice.text for choice in complete(client, ["WHO", "A"], **asked).choices]
    assert len(set(texts)) == 6 and texts[::3] == [written(live.model, prompt, 12, 3) for prompt in ("WHO", "A")]
    greedy = complete(client, "WHO", temperature=0, **asked).choices
    assert len({choice.text for choice in greedy}) == 1
    usage = complete(client, ["WHO", "A"], **asked).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (4, 72), "a prompt counts once"


def test_a_stream_of_several_texts_tells_them_apart_and_each_ends_once(live, client):
    asked = {"extra_body": {"n": 2}, "stop": ["E"]}
    whole = [choice.text for choice in complete(client, ["WHO", "A"], 40, **asked).choices]
    said, ends = [""] * 4, [None] * 4
    for chunk in complete(client, ["WHO", "A"], 40, **asked, stream=True):
        (choice,) = chunk.choices
        assert ends[choice.index] is None, "nothing follows the end"
        said[choice.index] += choice.text
        ends[choice.index] = choice.finish_reason
    assert said == whole and all(ends)
    chats = client.chat.completions.create(model="manyhands", messages=[USER], n=2, seed=1, max_tokens=9, stream=True)
    roles = [chunk.choices[0].delta.role for chunk in chats]
    assert roles.count("assistant") == 2
    live.wait_until(live.idle)


def test_echo_repeats_the_prompt_before_each_answer(live, client):
    echoed = complete(client, ["WHO", "A"], echo=True).choices
    assert [choice.text for choice in echoed] == [p + written(live.model, p, 12, 3) for p in ("WHO", "A")]
    streamed = complete(client, "WHO", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == echoed[0].text


# ---------------------------------------------------------------- what is told of tokens, and how they are weighed


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_text_are_the_models_own_in_openais_shape(live, client, stream):
    stop = complete(client, "WHO", temperature=0.5).choices[0].text[5:8]
    found = complete(client, ["WHO", "A"], logprobs=2, temperature=0.5, stream=stream, stop=[stop])
    chunks = list(found) if stream else [found]
    for index, prompt in enumerate(("WHO", "A")):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        text = "".join(choice.text for choice in choices)
        told = [choice.logprobs for choice in choices]
        tokens, log_p, tops, offsets = (
            sum((getattr(one, name) for one in told), [])
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        )
        expected = log_p_of(live.model, prompt, text)
        assert len(text) == 5 or prompt == "A"
        assert "".join(tokens) == text and offsets == list(range(len(text))), "and nothing of the stop string"
        for i, token in enumerate(tokens):
            best = expected[i].topk(2)
            likeliest = {VOCAB[j]: value for j, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)}
            assert log_p[i] == pytest.approx(expected[i, VOCAB.index(token)].item())
            assert tops[i] == pytest.approx(likeliest | {token: log_p[i]})


def test_logprobs_of_a_chat_are_openais_list_and_absent_unless_asked_for(live, client):
    asked = {"model": "manyhands", "messages": [USER], "max_tokens": 9, "seed": 2}
    reply = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0]
    assert "".join(one.token for one in reply.logprobs.content) == reply.message.content
    for one in reply.logprobs.content:
        assert bytes(one.bytes).decode() == one.token and one.logprob <= one.top_logprobs[0].logprob <= 0
        assert len(one.top_logprobs) == 3
    bare = client.chat.completions.create(**asked, logprobs=True).choices[0].logprobs.content
    assert [one.logprob for one in bare] == [one.logprob for one in reply.logprobs.content]
    assert all(one.top_logprobs == [] for one in bare)
    assert client.chat.completions.create(**asked).choices[0].logprobs is None


def test_penalties_and_biases_do_what_openais_formula_says(live, client):
    def expected(prompt, n, presence=0.0, frequency=0.0, bias=None):
        ids = live.service.words.encode(prompt)
        for i in range(n):
            logits = live.model(torch.tensor([ids]))[0][0, -1].clone()
            for j in range(len(VOCAB)):
                count = ids[len(ids) - i :].count(j) if i else 0
                logits[j] += (bias or {}).get(j, 0) - frequency * count - presence * (count > 0)
            ids.append(int(logits.argmax()))
        return "".join(VOCAB[j] for j in ids[len(prompt) :])

    plain, e = expected("WHO", 30), VOCAB.index("E")
    assert len(set(plain)) < 20, "a model that repeats itself"
    for how in ({"presence": 2.0}, {"frequency": 1.5}, {"presence": -2.0, "frequency": 0.5}, {"bias": {e: -3.5}}):
        ours = {f"{name}_penalty": value for name, value in how.items() if name != "bias"}
        ours |= {"logit_bias": {str(j): value for j, value in how["bias"].items()}} if "bias" in how else {}
        assert complete(client, "WHO", 30, temperature=0, **ours).choices[0].text == expected("WHO", 30, **how), how
    assert expected("WHO", 30, presence=2.0) != plain != expected("WHO", 30, frequency=1.5)
    assert complete(client, "WHO", 5, logit_bias={str(e): 100}).choices[0].text == "EEEEE"
    assert "E" not in complete(client, "WHO", 80, logit_bias={str(e): -100}).choices[0].text


def test_no_text_is_changed_by_what_its_neighbours_ask_for(live):
    wishes = [
        {"logit_bias": {str(VOCAB.index("E")): 50}}, {"presence_penalty": 2, "frequency_penalty": -1}, {"logprobs": 5},
        {"n": 3}, {"temperature": 0}, {"temperature": 1e-320}, {"top_k": 1}, {"top_p": 0.1}, {"echo": True}, {},
    ]  # fmt: skip
    bodies = [{"prompt": "WHO IS"[: 2 + i % 5], "max_tokens": 20, "seed": i} | wish for i, wish in enumerate(wishes)]

    async def together():
        return await asyncio.gather(*(ask(live, TEXT, body, timeout_s=100) for body in bodies))

    for body, (status, content) in zip(bodies, asyncio.run(together()), strict=True):
        alone = asyncio.run(ask(live, TEXT, body))[1]
        found, expected = (json.loads(one)["choices"] for one in (content, alone))
        assert status == 200 and [one["text"] for one in found] == [one["text"] for one in expected], body
        for one, other in zip(found, expected, strict=True):
            told = [(which["logprobs"] or {}).get("token_logprobs") for which in (one, other)]
            assert told[0] == pytest.approx(told[1]), "but for the order of additions"


# ---------------------------------------------------------------- a long talk


@pytest.fixture(scope="module")
def default():
    """A server of a model of the size that lesson 13 and scripts/align.py leave, which `make serve` finds."""
    asked = ModelOptions()
    config = GPTConfig(len(VOCAB), asked.block_size, 1, 1, 16)
    with Live(quiet(make_model(2, config)), metadata_of(1, config), running=4) as live:
        yield live


def test_ten_turns_with_the_default_models_context_are_all_answered_by_leaving_out_the_oldest(default):
    client, messages, dropped = Client(default.address, TOKEN), [], []
    for turn in range(10):
        asked = {"role": "user", "content": f"SORT {LETTERS[5 + turn % 20]}BA"}
        said = "".join(client.chat([*messages, asked], seed=turn))
        dropped.append(client.dropped_messages)
        kept = [*messages, asked][client.dropped_messages :]
        assert said == "".join(client.chat(kept, seed=turn)) and client.dropped_messages == 0
        assert len(said) >= default.service.context // 2, "half of the context is the reply's"
        messages += [asked, {"role": "assistant", "content": said[:4]}]
    assert dropped[:2] == [0, 0] and dropped == sorted(dropped) and dropped[-1] == 18 - 2 * 1
    body = {"messages": [*messages, USER], "max_tokens": 4}
    status, whole = answer(default, CHAT, body)
    assert status == 200 and whole["usage"]["prompt_tokens"] <= default.service.context - 4
    assert 0 < whole["dropped_messages"] < dropped[-1], "a shorter reply leaves room for more turns"


def test_the_systems_words_and_the_last_message_are_never_left_out(default):
    words, context = default.service.words, default.service.context
    system = {"role": "system", "content": "BE BRIEF"}
    talk = [system, *[{"role": role, "content": "A" * 8} for role in ("user", "assistant")] * 9, USER]
    ids, _, dropped = words.encode_chat(talk, room=40)
    assert ids == words.encode_chat([system, *talk[1 + dropped :]])[0] and len(ids) <= 40 < len(ids) + 20
    assert words.encode_chat(talk, room=1)[0] == words.encode_chat([system, USER])[0]
    huge = {"role": "user", "content": "A" * 100_000}  # as long as no context ever is
    status, body = answer(default, CHAT, {"messages": [huge, {"role": "assistant", "content": "A"}, USER]})
    assert (status, body["dropped_messages"]) == (200, 2)
    long = {"messages": [{"role": "user", "content": "A" * context}]}
    status, body = answer(default, CHAT, long)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    status, body = answer(default, CHAT, {"messages": [*talk, USER]})
    assert status == 400 and "they take turns" in body["error"]["message"], "the order is that of all messages"


def test_the_chat_of_a_notebook_keeps_the_conversation_and_says_what_was_refused_or_left_out(
    default, monkeypatch, capsys
):
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", shown.append)
    Client(default.address, TOKEN).show_chat()
    field, _ = shown[0].children
    field.value = "HO"
    assert capsys.readouterr().out.startswith("you: HO\nmodel: ") and field.value == ""
    field.value = "az"
    refusal = "['a' is not among the vocabulary's 37 tokens; leave it out (status 400)]\n"
    assert capsys.readouterr().out.endswith(refusal)
    for _ in range(3):  # the refused message is forgotten: two of the user's in a row are no conversation
        field.value = "HELLO AGAIN"
    told = capsys.readouterr().out
    assert "status" not in told and "messages were left out: they do not fit into the model's context]" in told


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (TEXT, {"min_p": 0.1}, "min_p"), (TEXT, {"best_of": 3}, "best_of"), (TEXT, {"best_of": True}, "best_of"),
        (TEXT, {"top_p": 0}, "top_p"), (TEXT, {"top_p": "1"}, "top_p"), (TEXT, {"top_k": 0}, "top_k"),
        (TEXT, {"presence_penalty": 2.1}, "presence_penalty"), (TEXT, {"frequency_penalty": "a"}, "frequency_penalty"),
        (TEXT, {"logit_bias": {"01": 1, "1": 2}}, "logit_bias"), (TEXT, {"logit_bias": {"1": 101}}, "logit_bias.1"),
        *[(TEXT, {"logit_bias": {key: 1}}, "logit_bias") for key in ("E", "37", "-1", "9" * 5000, "²")],
        (TEXT, {"echo": True, "logprobs": 1}, "echo"),
        (TEXT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        *[(TEXT, {"prompt": it}, "prompt") for it in ([], [[]], [1, "A"], [True], [37], [-1], ["A"] * 65)],
        (TEXT, {"prompt": ["A"] * 9, "n": 9}, "prompt"),
        (TEXT, {"stream_options": {"include_use": True}}, "stream_options.include_use"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"), (CHAT, {"tools": [{}]}, "tools"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"), (CHAT, {"echo": True}, "echo"),
        (CHAT, {"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
        (CHAT, {"messages": [USER | {"tool_calls": [{}]}]}, "messages.0.tool_calls"),
        (CHAT, {"messages": [USER | {"content": [{"type": "image_url", "text": "HO"}]}]}, "messages.0.content"),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_or_contradicts_itself_is_refused_by_its_name(live, path, more, param):
    base = {TEXT: {"prompt": "HO", "max_tokens": 1}, CHAT: {"messages": [USER], "max_tokens": 1}}.get(path, {})
    status, body = answer(live, path, base | more)
    assert (status, body["error"]["param"]) == (400, param) and param.split(".")[0] in body["error"]["message"], body


def test_what_changes_no_answer_is_taken_and_ignored(live):
    for path, base in ((TEXT, {"prompt": "HO"}), (CHAT, {"messages": [USER]})):
        base = base | {"max_tokens": 9, "seed": 4}
        nothing = {
            "user": "me", "metadata": {"a": [1]}, "store": False, "service_tier": "auto", "presence_penalty": 0.0,
            "frequency_penalty": 0, "logit_bias": {}, "n": 1, "logprobs": None, "tools": [], "tool_choice": "auto",
            "parallel_tool_calls": True, "stream_options": {"include_usage": True, "include_obfuscation": False},
            "response_format": {"type": "text"}, "best_of": 1, "max_completion_tokens": 9, "stop": [], "min_p": 0.0,
        }  # fmt: skip
        plain, same = (answer(live, path, base | more)[1]["choices"] for more in ({}, nothing))
        assert plain == same


FIELDS = sorted({*schema.CompletionRequest.model_fields, *schema.ChatRequest.model_fields} - {"stream"})
plain_json = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
huge = st.sampled_from(
    [10**400, -(10**400), 2**64, 1e308, -0.0, 5e-324, "A" * 70_000, "\ud800", "\0", [[]] * 500, ["A"] * 500]
)
any_json = st.recursive(
    plain_json | huge,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
turns = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.just("HO")})
near = {  # what may well be accepted, so that combinations are met
    "prompt": st.sampled_from(["HO", ["HO", "A"], [1, 2], [[1], [2, 3]], ["A", [1]]]),
    "messages": st.lists(turns, max_size=4),
    "logprobs": st.sampled_from([True, False, 0, 3]), "top_logprobs": st.integers(-1, 4), "n": st.integers(0, 70),
    "max_tokens": st.integers(0, 100), "max_completion_tokens": st.integers(0, 100), "echo": st.booleans(),
    "logit_bias": st.dictionaries(st.integers(-2, 40).map(str), st.floats(-120, 120), max_size=3),
    "temperature": st.floats(0, 2.1), "top_p": st.floats(0, 1.1), "stop": st.sampled_from(["E", ["E", "A"], "", []]),
    "tool_choice": st.sampled_from(["none", "auto", "required"]), "model": st.sampled_from(["manyhands", "x"]),
}  # fmt: skip
fields = st.one_of(
    st.tuples(st.sampled_from(FIELDS), any_json),
    st.tuples(st.sampled_from([*schema.NEUTRAL, *schema.HARMLESS]), any_json),
    st.tuples(st.text(max_size=12), any_json),
    *[st.tuples(st.just(name), values) for name, values in near.items()],
)


def check_error(body):
    """It is an error in OpenAI's shape, of one short sentence."""
    error = body["error"]
    assert set(body) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert 5 < len(error["message"]) < 400 and "\n" not in error["message"] and "Traceback" not in error["message"]
    assert error["type"] == "invalid_request_error" and len(error["param"] or "") <= 80


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(chat=st.booleans(), more=st.lists(fields, max_size=5), alone=st.none() | any_json)
def test_any_request_is_answered_or_refused_in_a_sentence_and_nothing_strange_is_accepted(live, chat, more, alone):
    path, base = (CHAT, {"messages": [USER]}) if chat else (TEXT, {"prompt": "HO"})
    asked = alone if alone is not None and not more else base | {"max_tokens": 2} | dict(more)
    status, body = answer(live, path, asked)
    if status != 200:
        assert status in (400, 404), (status, body)
        return check_error(body)
    asked = {name: value for name, value in asked.items() if value is not None}
    kind = schema.ChatRequest if chat else schema.CompletionRequest
    assert set(asked) <= {*kind.model_fields, *schema.NEUTRAL, *schema.HARMLESS}
    assert not any(
        isinstance(asked.get(name), bool) for name in ("n", "temperature", "top_p", "top_k", "seed", "max_tokens")
    )
    assert asked.get("tool_choice") != "required" and asked.get("model", "manyhands") == "manyhands"
    most = {asked[name] for name in ("max_tokens", "max_completion_tokens") if name in asked}
    prompts = asked["prompt"] if not chat and isinstance(asked["prompt"], list) else [0]
    prompts = [0] if isinstance(prompts[0], int) else prompts
    assert len(most) < 2 and len(body["choices"]) == asked.get("n", 1) * len(prompts)
    assert body["usage"]["completion_tokens"] <= len(body["choices"]) * min(most, default=96)
    for choice in body["choices"]:
        wanted = asked.get("logprobs", False) if chat else "logprobs" in asked
        assert (choice["logprobs"] is not None) == bool(wanted) and choice["finish_reason"] in ("stop", "length")
    assert chat or not (asked.get("echo") and "logprobs" in asked)
    assert not chat or not asked.get("top_logprobs") or asked.get("logprobs")
