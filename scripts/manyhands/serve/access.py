"""Who may ask: the token, from the header to the comparison, and the file in which its owner finds it.

The token is never in a URL's path or query, which proxies and browsers write down; the page takes it from the fragment, which
browsers do not send. Loopback is shared with everybody on a login node: there is no server without a token.
"""

import hmac
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path

from manyhands.serve.limits import Refusal

VARIABLE = "MANYHANDS_SERVE_TOKEN"
LEAST = 16  # characters


def make_token(environ):
    """The token of this server: the variable's, else a new one. Raises ValueError for one that can be guessed.

    There is no flag for it: every user of a machine sees the flags of every process.
    """
    token = environ.get(VARIABLE)
    if token is None:
        return secrets.token_urlsafe(24)
    if len(token) < LEAST or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"{VARIABLE} has less than {LEAST} characters, or blanks; unset it, and one is made")
    return token


def authorise(headers, token):
    """Raises Refusal (401) unless the headers carry the token, as `Authorization: Bearer` or `X-Api-Key`.

    The page sends the second: behind a hub the first is the hub's own.
    """
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [bearer.strip()] if scheme.lower() == "bearer" else []
    given.append(headers.get("x-api-key", ""))
    # every one is compared, in a time that does not depend on where they differ
    matches = [hmac.compare_digest(one.encode("utf-8", "replace"), token.encode()) for one in given]
    if not any(matches):
        raise Refusal(
            401,
            "the token is missing or wrong; the server's terminal, or the file that it names there, has it",
            "invalid_api_key",
        )


def write_address(folder, address, token):
    """`folder`/serving-PORT.json with mode 0600: where the server is, and its token. Returns the path."""
    path = Path(folder) / f"serving-{address.rpartition(':')[2]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        path.unlink()  # of an earlier server, perhaps with another mode
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"address": address, "token": token, "pid": os.getpid()}, file)
    return path


def read_address(path):
    """(address, token) of a file that `write_address` wrote."""
    content = json.loads(Path(path).read_text())
    return content["address"], content["token"]
