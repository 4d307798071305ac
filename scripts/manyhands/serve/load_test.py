"""Load a server, and measure what a cache and batching gain on this machine.

    python -m manyhands.serve.load_test                         # starts a server and a model: three ratios
    python -m manyhands.serve.load_test --address-file outputs/serve/serving-8000.json --clients 64
    python -m manyhands.serve.load_test --model outputs/train/latest --tensor 2     # starts a server of it, on two GPUs

Without a server or a model named, one is started with random weights (speed does not depend on them), and you should
see: tokens/s of 16 clients against one; generating 256 tokens with a KV cache and without; the time to the first token
of a prompt whose beginning is cached, against a new one. Else: tokens/s and times of its answers with this number of
clients at once. Five interleaved samples each; medians, with minimum and maximum. Status 1: an answer is missing.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

if __name__ == "__main__":  # first, so that Ctrl-C in the imports below prints one sentence
    from manyhands.launch import entry

import torch

from manyhands.checkpoint.export import weights_of, write_export
from manyhands.config.command_line import parsed
from manyhands.course.folders import SCRIPTS
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.serve.client import Client
from manyhands.serve.engine import generate

VOCAB = list("\n !,.:?") + [chr(c) for c in range(ord("A"), ord("Z") + 1)] + [chr(c) for c in range(97, 123)]
SAMPLES = 5  # samples of each measurement
SIZES: dict = {"block_size": 512, "n_layer": 6, "n_head": 4, "n_embd": 192}  # sizes of the model that is started


@dataclass(frozen=True)
class Options:
    address_file: Path | None = None  # address file of a running server; none: start one
    model: Path | None = None  # what the started server serves, where serve.py finds a device; none: random weights
    tensor: int = 1  # ranks that share this model
    clients: int = 16  # simultaneous clients
    tokens: int = 64  # tokens per request


class Answered(NamedTuple):
    """The client's measurements of one streamed answer."""

    tokens: int
    first_s: float
    reused: int


def streamed(client: Client, prompt: str, tokens: int, seed: int = 0) -> Answered:
    """Request a completion on a separate connection. Raise RuntimeError for an incomplete answer."""
    body = {"prompt": prompt, "max_tokens": tokens, "seed": seed, "stream": True}
    began_s = time.perf_counter()
    with client.open("/v1/completions", body | {"stream_options": {"include_usage": True}}) as response:
        text = response.readline()
        first_s = time.perf_counter() - began_s
        text += response.read()  # parsed afterwards, to leave the processor to the server
    events = text.split(b"data: ")
    if events[-1].strip() != b"[DONE]":
        raise RuntimeError("a stream ended early")
    usage = json.loads(events[-2])["usage"]
    return Answered(usage["completion_tokens"], first_s, usage["prompt_tokens_details"]["cached_tokens"])


def throughput(client: Client, clients: int, tokens: int) -> tuple[float, list[Answered]]:
    """Return (tokens per second, answers) of `clients` clients that start together."""
    prompts = [made_up(12, random.Random(i)) for i in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        began_s = time.perf_counter()
        answers = list(pool.map(lambda i: streamed(client, prompts[i], tokens, i), range(clients)))
        return sum(a.tokens for a in answers) / (time.perf_counter() - began_s), answers


def made_up(length: int, source: random.Random) -> str:
    return "".join(source.choices(VOCAB, k=length))


def spread(values: list[float], unit: str, digits: int = 0) -> str:
    """Format the median, with minimum and maximum in brackets."""
    return f"{median(values):,.{digits}f} {unit} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def compare_clients(client: Client, options: Options) -> None:
    """Measure tokens per second of one client and of many, in turn; print both and their ratio."""
    one, many, firsts = [], [], []
    for _ in range(SAMPLES):
        one.append(throughput(client, 1, options.tokens)[0])
        rate, answers = throughput(client, options.clients, options.tokens)
        many.append(rate)
        firsts += [answer.first_s * 1e3 for answer in answers]
    print(f"1 client:   {spread(one, 'tokens/s')}")
    print(f"{options.clients} clients: {spread(many, 'tokens/s')}, first token after {spread(firsts, 'ms', 1)}")
    times = median(many) / median(one)
    print(f"batching: {options.clients} clients get {times:.1f} times the tokens/s of one", flush=True)


def compare_prefixes(client: Client) -> None:
    """Measure the time to the first token of mostly cached prompts and of new ones; print the ratio."""
    length, source = SIZES["block_size"] - 32, random.Random()
    times: dict[bool, list[float]] = {False: [], True: []}  # {whether the beginning is cached: ...}
    for _ in range(SAMPLES):
        beginning = made_up(length, source)
        for cached, least in ((False, 0), (True, length - 16)):  # the last block is not full
            answer = streamed(client, beginning + made_up(8, source), 1)
            assert answer.reused >= least, "the cached beginning was not found"
            times[cached].append(answer.first_s * 1e3)
    new, seen = spread(times[False], "ms", 1), spread(times[True], "ms", 1)
    print(f"first token after {length + 8} new ones: {new}; {length} of them cached: {seen}")
    ratio = median(times[True]) / median(times[False])
    print(f"prefix reuse: the first token comes after {ratio:.2f} of the time", flush=True)


def compare_cache(model, n: int = 256) -> None:
    """Measure the seconds to generate n tokens with and without a KV cache, in turn; print the ratio."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for cached in [True, False] * SAMPLES:
        began_s = time.perf_counter()
        generate(model, torch.zeros(1, 1, dtype=torch.long), n, use_cache=cached)
        times[cached].append(time.perf_counter() - began_s)
    print(f"{n} tokens with a KV cache: {spread(times[True], 's', 2)}; without: {spread(times[False], 's', 2)}")
    print(f"KV cache: {median(times[False]) / median(times[True]):.1f} times as fast", flush=True)


def random_model(file: Path) -> GPT:
    """Export a GPT with random weights to `file`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=len(VOCAB), **SIZES)).eval()
    corpus = {"name": "none", "alphabet": VOCAB}
    write_export(weights_of(model), {"config": asdict(model.config), "corpus": corpus, "step": 0}, file)
    print(f"a model of {model.num_params():,} parameters, {SIZES}, one thread")
    return model


@contextmanager
def started(source: Path, folder: Path, device: str = "cpu", tensor: int = 1) -> Iterator[Path]:
    """Start scripts/serve.py on `source`, on `tensor` ranks, and yield the file with its address."""
    environ = {**os.environ, "MANYHANDS_OUTPUTS": str(folder), "OMP_NUM_THREADS": "1"}
    ranks = [str(SCRIPTS / "launch.py"), f"--nproc={tensor}"] if tensor > 1 else []
    server = [str(SCRIPTS / "serve.py"), *["--"] * (tensor > 1), str(source), f"--tensor={tensor}"]
    command = [sys.executable, *ranks, *server, "--port=0", f"--device={device}"]
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 120
            while not (found := list((folder / "serve").glob("serving-*.json"))):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start: {(folder / 'server.log').read_text()[-500:]}")
                time.sleep(0.1)
            yield found[0]
        finally:
            process.terminate()
            process.wait(60)


def main(argv: list[str] | None = None) -> int:
    options = parsed(Options, sys.argv[1:] if argv is None else argv, "load_test", __doc__)
    try:
        if options.address_file is not None:
            compare_clients(Client.from_file(options.address_file), options)
            return 0
        with tempfile.TemporaryDirectory() as name:
            folder, given = Path(name), options.model
            source = given or folder / "random.safetensors"
            if not given:
                compare_cache(random_model(source))
            with started(source, folder, "auto" if given else "cpu", options.tensor) as address_file:
                client = Client.from_file(address_file)
                throughput(client, 2, 8)  # the first requests warm up
                compare_clients(client, options)
                if not given:
                    compare_prefixes(client)
    except (RuntimeError, OSError, ValueError) as error:
        print(f"load_test: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    entry.run_program("load_test", main)
