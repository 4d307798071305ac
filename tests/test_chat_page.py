"""The chat page in real Chromium: the token from the fragment, a streamed reply, stopping, errors, a hub's prefix."""

import re

import pytest
import torch
from lab import chromium
from live_server import TOKEN, Live, make_model, quiet

pytestmark = [pytest.mark.browser, pytest.mark.timeout(200)]
PREFIX = "/user/rosalind/proxy/8123"


def proxied(app, outside):
    """`app` as jupyter-server-proxy shows it: below PREFIX, which is cut off; `outside` gets the hub's own requests."""

    async def hub(scope, receive, send):
        if scope["type"] == "http":
            if not scope["path"].startswith(PREFIX):
                outside.append(scope["path"])
            scope = scope | {"path": scope["path"].removeprefix(PREFIX) or "/"}
        await app(scope, receive, send)

    return hub


@pytest.fixture(scope="module")
def live():
    live = Live(quiet(make_model()), running=4, queue=4)
    live.outside = []
    live.server.config.app = proxied(live.app, live.outside)
    with live:
        yield live


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


class Page:
    """The page as a reader sees it."""

    def __init__(self, browser, address):
        self.page = browser.new_page()
        self.page.set_default_timeout(20_000)
        self.faults, self.urls = [], []
        self.page.on("console", lambda m: self.faults.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.goto(address)

    def say(self, text):
        self.page.get_by_label("message").fill(text)
        self.page.keyboard.press("Enter")

    def messages(self, kind):
        return self.page.get_by_role("log").locator(f".{kind}")

    def done(self):
        from playwright.sync_api import expect

        expect(self.page.get_by_role("button", name="Send")).to_be_enabled(timeout=20_000)

    def told(self):
        return self.page.get_by_role("status")


@pytest.fixture
def page(browser, live):
    page = Page(browser, f"{live.address}{PREFIX}/#token={TOKEN}")
    yield page
    page.page.close()
    live.outside.clear()


def test_a_message_gets_the_models_reply_and_the_next_one_follows_it(page, live):
    from playwright.sync_api import expect

    page.page.get_by_label("temperature").fill("0")
    page.page.get_by_label("at most, tokens").fill("12")
    page.say("HELLO")
    page.done()
    expect(page.messages("assistant")).to_have_count(1)
    first = page.messages("assistant").first.inner_text()
    ids, *_ = live.service.words.encode_chat([{"role": "user", "content": "HELLO"}])
    from manyhands.gpt.sampling import Sampling
    from manyhands.serve.engine import generate

    new = generate(live.model, torch.tensor([ids]), 12, Sampling(0))[0, len(ids) :].tolist()
    expected = "".join(live.service.words.vocab[i] for i in new)
    assert page.messages("assistant").first.evaluate("e => e.textContent") == expected
    expect(page.told()).to_contain_text("12 tokens in")
    page.say("AND THEN?")
    page.done()
    expect(page.messages("assistant")).to_have_count(2)
    expect(page.told()).to_contain_text(f"of {len(ids) + 12 + 1 + 11 + 1} of the prompt were cached")
    assert first and not page.faults


def test_the_token_leaves_the_address_at_once_and_is_in_no_request_line(page, live):
    page.say("HELLO")
    page.done()
    assert page.page.url == f"{live.address}{PREFIX}/" and TOKEN not in page.page.content()
    assert all(TOKEN not in url.partition("#")[0] for url in page.urls)
    assert all(url.startswith((f"{live.address}{PREFIX}/", "data:")) for url in page.urls), "nothing from elsewhere"
    assert live.outside == [] and not page.faults


def test_what_is_refused_is_said_and_the_message_goes_back_to_the_field(page):
    from playwright.sync_api import expect

    page.say("hello")
    page.done()
    expect(page.messages("error")).to_have_text("'h' is not among the vocabulary's 37 tokens; leave it out")
    expect(page.page.get_by_label("message")).to_have_value("hello")
    page.say("HELLO")
    page.done()
    expect(page.messages("assistant")).to_have_count(1)


def test_markup_that_a_user_or_a_model_writes_stays_text(page):
    from playwright.sync_api import expect

    page.say("<b onmouseover=alert(1)>HO</b>")
    page.done()
    expect(page.page.locator(".message b")).to_have_count(0)
    expect(page.messages("error")).to_contain_text("'<' is not among the vocabulary")


def test_without_a_token_the_page_asks_for_one_and_a_wrong_one_is_asked_for_again(browser, live):
    from playwright.sync_api import expect

    context = browser.new_context()
    page = Page(context, f"{live.address}{PREFIX}/")
    field = page.page.get_by_label("token", exact=True)
    for token, seen in (("wrong", 0), (TOKEN, 1)):
        expect(field).to_be_visible()
        field.fill(token)
        page.say("HELLO")
        page.done()
        expect(page.messages("assistant")).to_have_count(seen)
    expect(page.messages("error")).to_have_text(
        "the token is missing or wrong; the server's terminal, or the file that it names there, has it"
    )
    expect(field).to_be_hidden()
    context.close()


def test_stop_ends_the_reply_on_the_server_too(page, live):
    from playwright.sync_api import expect

    step = live.service.engine.step

    def slowly():
        import time

        time.sleep(0.2)
        return step()

    live.service.engine.step = slowly
    try:
        page.say("HELLO")
        expect(page.messages("assistant")).to_have_text(re.compile(r"\S"), timeout=20_000)
        page.page.get_by_role("button", name="Stop").click()
        expect(page.told()).to_have_text("stopped")
        live.wait_until(live.idle)
    finally:
        live.service.engine.step = step
    page.page.get_by_role("button", name="New chat").click()
    expect(page.messages("message")).to_have_count(0)
    page.say("HO")
    page.done()
    expect(page.messages("assistant")).to_have_count(1)
