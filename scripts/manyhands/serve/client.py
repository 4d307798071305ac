"""A client that needs only the standard library: for a notebook behind a hub, a script, or a machine without `openai`.

    client = Client.from_file("outputs/serve/serving-8000.json")          # or Client(address, token)
    for piece in client.chat([{"role": "user", "content": "sort dbca"}], max_tokens=20):
        print(piece, end="", flush=True)
    client.show_chat()                              # in a notebook: a field, and the conversation below it

With the official client: OpenAI(base_url=address + "/v1", api_key=token).
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path


class ServerSaid(RuntimeError):
    """The server's refusal with its reason; `status` is HTTP's, or None for an error in the middle of a stream."""

    def __init__(self, status: int | None, sentence: str):
        super().__init__(f"{sentence} (status {status})" if status else sentence)
        self.status = status


class Client:
    """A client of one server. It ignores the environment's proxies, because the server is on this machine."""

    def __init__(self, address: str, token: str, timeout_s: float = 120):
        self.address, self.token, self.timeout_s = address.rstrip("/"), token, timeout_s
        self.dropped_messages = 0  # in the last chat
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @classmethod
    def from_file(cls, path: str | Path, timeout_s: float = 120) -> "Client":
        """Return a client for the address file that a server writes when it starts."""
        content = json.loads(Path(path).read_text())
        return cls(content["address"], content["token"], timeout_s)

    def __repr__(self):
        return f"Client({self.address!r}, token=...)"

    def chat(self, messages: list[dict], **options) -> Iterator[str]:
        """Yield the reply's text, piece by piece; `options` are OpenAI's. Raise ServerSaid.

        `dropped_messages` is then the number of oldest messages that did not fit into the model's context.
        """
        body = {"messages": messages, "stream": True, **options}
        with self.open("/v1/chat/completions", body) as response:
            for line in response:
                data = line.decode().removeprefix("data: ").strip()
                if not data:
                    continue
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ServerSaid(None, event["error"]["message"])
                self.dropped_messages = event.get("dropped_messages", 0)
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        yield piece
        raise ServerSaid(None, "the answer broke off; ask again")

    def complete(self, prompt: str, **options) -> str:
        """Return the complete text after a prompt. Raise ServerSaid."""
        with self.open("/v1/completions", {"prompt": prompt, **options}) as response:
            return json.load(response)["choices"][0]["text"]

    def metrics(self) -> dict[str, float]:
        """Return the server's counters as {name with labels: value}. Raise ServerSaid."""
        with self.open("/metrics") as response:
            lines = [line for line in response.read().decode().splitlines() if not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    def show_chat(self) -> None:
        """Show a chat in a notebook's output, for machines whose ports no browser can reach."""
        import ipywidgets
        from IPython.display import display

        messages: list[dict] = []
        output = ipywidgets.Output()
        field = ipywidgets.Text(description="you", placeholder="a message, then Enter", continuous_update=False)

        def send(change):
            if not (text := change["new"]):
                return
            asked, said = {"role": "user", "content": text}, ""
            field.value = ""
            with output:
                print(f"you: {text}\nmodel: ", end="")
                try:
                    for piece in self.chat([*messages, asked]):
                        said += piece
                        print(piece, end="", flush=True)
                    if self.dropped_messages:
                        oldest = f"the oldest {self.dropped_messages} messages were left out"
                        print(f"\n[{oldest}: they do not fit into the model's context]", end="")
                except (ServerSaid, OSError) as error:
                    print(f"[{error}]", end="")
                print()
            if said:
                messages.extend([asked, {"role": "assistant", "content": said}])

        field.observe(send, "value")
        display(ipywidgets.VBox([field, output]))

    def open(self, path: str, body: dict | None = None) -> http.client.HTTPResponse:
        """Return the HTTP response to a GET, or to a POST of `body` as JSON. Raise ServerSaid for an error."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        content = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.address + path, content, headers)
            return self.opener.open(request, timeout=self.timeout_s)
        except urllib.error.HTTPError as error:
            try:
                sentence = json.load(error)["error"]["message"]
            except (ValueError, KeyError, TypeError):  # from a proxy, not from our server
                sentence = error.reason
            raise ServerSaid(error.code, sentence) from None
