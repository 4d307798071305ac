"""What was recorded on other machines, and is shown where they are not at hand: the files in assets/recorded.

recorded.text("04_pending.out")        # what a program printed
recorded.numbers("04_queue.json")      # a dict; its "conditions" say on what and when it was made
"""

import json
from pathlib import Path

RECORDED = Path(__file__).resolve().parents[2] / "assets" / "recorded"


def text(name):
    """The text of assets/recorded/<name>."""
    return (RECORDED / name).read_text(encoding="utf-8")


def numbers(name):
    """The content of a JSON file in assets/recorded."""
    return json.loads(text(name))
