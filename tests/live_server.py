"""`with Live(...) as live`: a server in a thread of this process, on loopback, with a tiny model of random weights."""

import asyncio
import json
import threading
import time
from dataclasses import asdict

import httpx
import torch
from manyhands.align.chat import with_markers
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.gpt.sampling import Sampling
from manyhands.serve.engine import generate
from manyhands.serve.http import Server, address_of, listen, make_app
from manyhands.serve.schema import Limits
from manyhands.serve.service import Service

TOKEN = "a-token-that-only-the-tests-know"
LETTERS = list("\n ABCDEFGHIJKLMNOPQRSTUVWXYZ!?:,.")
VOCAB = with_markers(LETTERS)
CONFIG = GPTConfig(vocab_size=len(VOCAB), block_size=96, n_layer=2, n_head=2, n_embd=16)


def make_model(seed=1, config=CONFIG):
    """A model with opinions, in float64: the same text in any company, whatever the order of additions."""
    torch.manual_seed(seed)
    model = GPT(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def quiet(model):
    """Never writes a marker, so that a reply is as long as asked."""
    with torch.no_grad():
        if model.head.bias is None:  # a llama's: what each token adds to the stream reads the markers' rows as a bias
            model.tokens.weight[:, 0], model.head.weight[-4:, 0] = 3.0, -20.0
        else:
            model.head.bias[-4:] = -50.0
    return model


def metadata_of(step=10, config=CONFIG, vocab=VOCAB):
    return {
        "config": asdict(config), "corpus": {"name": "test", "alphabet": vocab}, "step": step, "val_loss": 2.5,
        "source": "test",
    }  # fmt: skip


def written(model, text, n, seed, sampling=Sampling(), vocab=VOCAB):  # noqa: B008
    """What the model alone writes after a text, up to its first marker."""
    ids = [vocab.index(c) for c in text]
    new = generate(model, torch.tensor([ids]), n, sampling, seed)[0, len(ids) :].tolist()
    ends = [i for i, token in enumerate(new) if len(vocab[token]) > 1]
    return "".join(vocab[i] for i in new[: ends[0] if ends else n])


class Live:
    """A running server; `address`, `service`. `loads`: what POST /admin/checkpoint finds, step -> (model, metadata)."""

    def __init__(self, model=None, metadata=None, loads=None, held_out_ids=None, tolerance=100.0, drain_s=5, **limits):
        self.model = model if model is not None else make_model()
        ids = torch.randint(len(LETTERS), (400,), generator=torch.Generator().manual_seed(3))
        self.loads = {} if loads is None else loads
        self.service = Service(
            self.model, metadata or metadata_of(), TOKEN, ids if held_out_ids is None else held_out_ids,
            lambda step: self.loads[step], tolerance=tolerance,
            limits=Limits(**{"block_size": 8} | limits),
        )  # fmt: skip
        self.app = make_app(self.service)
        self.server = Server(self.app, drain_s)
        self.ended = False

    def __enter__(self):
        self.bound = listen("127.0.0.1", 0)
        self.address = address_of(self.bound)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        deadline = time.monotonic() + 30
        while not self.server.started:
            assert time.monotonic() < deadline and self.thread.is_alive(), "the server does not start"
            time.sleep(0.01)
        return self

    def _run(self):
        torch.set_num_threads(1)
        with asyncio.Runner() as runner:
            self.loop = runner.get_loop()
            runner.run(self.server.serve(sockets=[self.bound]))
        self.ended = True

    def __exit__(self, *error):
        self.server.should_exit = True
        self.thread.join(30)
        assert self.ended and self.service.writing.done(), "the server does not end"

    @property
    def port(self):
        return int(self.address.rpartition(":")[2])

    def wait_until(self, condition, timeout_s=30):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it does not come true"
            time.sleep(0.01)

    def idle(self):
        """Nothing runs, waits, or is held."""
        scheduler = self.service.engine.scheduler
        empty = not (scheduler.running or scheduler.waiting or self.service.waited_for or self.service.changes)
        return empty and self.service.engine.pool.held() == 0


def token_header(token=TOKEN):
    return {} if token is None else {"Authorization": f"Bearer {token}"}


async def ask(live, path, body, token=TOKEN, method="POST", headers=(), timeout_s=60):
    """(status, bytes of the body) by a client that knows only HTTP; a body of bytes is sent as it is."""
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    async with httpx.AsyncClient(base_url=live.address, timeout=timeout_s, trust_env=False, verify=False) as client:
        answer = await client.request(method, path, content=content, headers=token_header(token) | dict(headers))
        return answer.status_code, answer.content


async def begin(live, path, body, length=None):
    """(reader, writer) of a connection on which a request has been sent, perhaps with less than it says."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    writer.write(f"{head}Content-Length: {length or len(content)}\r\n\r\n".encode() + content)
    return reader, writer


def events(body):
    """The JSON of a stream's events; the last one must be [DONE]."""
    parts = [part.removeprefix(b"data: ") for part in body.strip().split(b"\n\n")]
    assert parts[-1] == b"[DONE]", parts[-1]
    return [json.loads(part) for part in parts[:-1]]


def text_of(body):
    """What a streamed or whole answer says."""
    chunks = events(body) if body.startswith(b"data: ") else [json.loads(body)]
    found = ""
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        part = choice.get("delta") or choice.get("message") or {}
        found += choice.get("text") or part.get("content") or ""
    return found
