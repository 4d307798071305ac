"""The chat page in real Chromium behind the real jupyter-server-proxy: a reply, the token, a refusal, a reload."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from lab import chromium
from live_server import TOKEN, Live, make_model, quiet
from manyhands.gpt.sampling import Sampling
from manyhands.serve.engine import generate

pytestmark = [pytest.mark.browser, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def live():
    with Live(quiet(make_model()), running=4, queue=4) as live:
        yield live


@pytest.fixture(scope="module")
def jupyter(tmp_path_factory):
    """The address of a Jupyter server as a hub starts one, and its token: it has jupyter-server-proxy."""
    folder = tmp_path_factory.mktemp("jupyter")
    command = [sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root", "--ServerApp.port=0"]
    command += [f"--ServerApp.root_dir={folder}", "--ServerApp.base_url=/user/rosalind/"]
    environ = os.environ | {f"JUPYTER_{name}_DIR": str(folder / name) for name in ("RUNTIME", "DATA", "CONFIG")}
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while not (found := list(folder.glob("RUNTIME/jpserver-*.json"))):
            assert server.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        about = json.loads(found[0].read_text())
        yield f"http://127.0.0.1:{about['port']}/user/rosalind", about["token"]
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture
def context(browser, jupyter):
    """A browser whose user is logged in."""
    address, token = jupyter
    context = browser.new_context()
    assert context.request.get(f"{address}/api/status?token={token}").ok
    yield context
    context.close()


@pytest.fixture(scope="module")
def address(jupyter, live):
    return f"{jupyter[0]}/proxy/{live.port}/"


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import expect

    expect.set_options(timeout=60_000)
    with chromium() as browser:
        yield browser


class Page:
    """The page as a reader sees it."""

    def __init__(self, context, address):
        self.page = context.new_page()
        self.page.set_default_timeout(60_000)
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

        expect(self.page.get_by_role("button", name="Send")).to_be_enabled(timeout=60_000)

    def wait_until(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "it does not come true"
            self.page.wait_for_timeout(20)

    def told(self):
        return self.page.get_by_role("status")


@pytest.fixture
def page(context, address):
    return Page(context, f"{address}#token={TOKEN}")


def test_a_message_gets_the_models_reply_and_the_next_one_follows_it(page, live):
    from playwright.sync_api import expect

    page.page.get_by_label("temperature").fill("0")
    page.page.get_by_label("at most, tokens").fill("12")
    page.say("HELLO")
    page.done()
    expect(page.messages("assistant")).to_have_count(1)
    first = page.messages("assistant").first.inner_text()
    ids, *_ = live.service.words.encode_chat([{"role": "user", "content": "HELLO"}])
    new = generate(live.model, torch.tensor([ids]), 12, Sampling(0))[0, len(ids) :].tolist()
    expected = "".join(live.service.words.vocab[i] for i in new)
    assert page.messages("assistant").first.evaluate("e => e.textContent") == expected
    expect(page.told()).to_contain_text("12 tokens in")
    page.say("AND THEN?")
    page.done()
    expect(page.messages("assistant")).to_have_count(2)
    expect(page.told()).to_contain_text(f"of {len(ids) + 12 + 1 + 11 + 1} of the prompt were cached")
    assert first and not page.faults


def test_the_token_leaves_the_address_at_once_and_is_in_no_request_line(page, address):
    page.say("HELLO")
    page.done()
    assert page.page.url == address and TOKEN not in page.page.content()
    assert all(TOKEN not in url.partition("#")[0] for url in page.urls)
    assert all(url.startswith((address, "data:")) for url in page.urls), "nothing from elsewhere"
    assert not page.faults


def test_stop_ends_the_reply_on_the_server_too(context, live, monkeypatch):
    """The engine makes no step that the test does not allow: the reply cannot end by itself.

    Not behind the proxy: jupyter-server-proxy reads a reply to its end when its client has left.
    """
    from playwright.sync_api import expect

    page = Page(context, f"{live.address}/#token={TOKEN}")
    monkeypatch.setattr("manyhands.serve.service.EVENT_S", 0)  # each token is an event of its own
    allowed, step = threading.Semaphore(0), live.service.engine.step
    live.service.engine.step = lambda: (allowed.acquire(timeout=60), step())[1]
    try:
        page.say("HELLO")
        allowed.release(2)
        page.wait_until(lambda: "".join(page.messages("assistant").all_text_contents()))
        page.page.get_by_role("button", name="Stop").click()
        expect(page.told()).to_have_text("stopped")
        live.wait_until(lambda: live.service.changes or live.idle())
        allowed.release(2)
        live.wait_until(live.idle)
    finally:
        live.service.engine.step = step
        allowed.release(100)
    page.page.get_by_role("button", name="New chat").click()
    expect(page.messages("message")).to_have_count(0)
    page.say("HO")
    page.done()
    expect(page.messages("assistant")).to_have_count(1)


def test_what_is_refused_is_said_and_the_message_which_stays_text_goes_back_to_the_field(page):
    from playwright.sync_api import expect

    page.say("<b onmouseover=alert(1)>HO</b>")
    page.done()
    expect(page.messages("error")).to_have_text("'<' is not among the vocabulary's 37 tokens; leave it out")
    expect(page.page.locator(".message b")).to_have_count(0)
    expect(page.page.get_by_label("message")).to_have_value("<b onmouseover=alert(1)>HO</b>")
    page.say("HELLO")
    page.done()
    expect(page.messages("assistant")).to_have_count(1)
    expect(page.messages("error")).to_have_count(0)


def test_a_reload_keeps_the_token_and_the_talk_until_a_new_one_is_begun(page):
    from playwright.sync_api import expect

    page.say("HELLO")
    page.done()
    said = page.messages("assistant").first.evaluate("e => e.textContent")
    page.page.reload()
    expect(page.messages("user")).to_have_text("HELLO")
    assert page.messages("assistant").first.evaluate("e => e.textContent") == said
    page.say("AND THEN?")
    page.done()
    expect(page.messages("assistant")).to_have_count(2)
    page.page.get_by_role("button", name="New chat").click()
    page.page.reload()
    expect(page.messages("message")).to_have_count(0)
