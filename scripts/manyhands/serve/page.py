"""The chat page: one file of the package, and the headers under which a browser runs its script and no other."""

import base64
import hashlib
import re
from importlib.resources import files

CONTENT = files("manyhands.serve").joinpath("page.html").read_text("utf-8")


def _hashes(element):
    found = re.findall(rf"<{element}>(.*?)</{element}>", CONTENT, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
