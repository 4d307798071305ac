"""Render a conversation by a model's chat template, which is Jinja, as the library transformers does.

    template = template_in("SmolLM2-135M-Instruct", tokenizer_config)     # None: the folder has none
    rendered(template, [{"role": "user", "content": "Who goes there?"}], reply=True, bos_token="<s>")

A template comes from a stranger: it runs in jinja2's sandbox, which reaches neither files nor other objects, and its
loops go round MOST_ROUNDS times in all.
"""

import functools
import itertools
import json
from datetime import datetime
from pathlib import Path
from typing import Any

MOST_ROUNDS = 10**6  # of all loops and macros while a conversation is written: half a second
ROUND = "go_round"  # what is called in each
LONGEST_PRODUCT = 10**6  # characters of a text that is repeated
# the course's own, of `align.chat`, whose markers are tokens
OWN = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def template_in(folder: Path, about: dict[str, Any]) -> str | None:
    """Return a folder's template: chat_template.jinja, or what `about`, its tokenizer_config.json, has, or None.

    Of several by name it is the default one. Raise OSError or ValueError.
    """
    file = folder / "chat_template.jinja"
    found = file.read_text("utf-8") if file.is_file() else about.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        if "default" not in named:
            raise ValueError(f"of its templates ({', '.join(map(str, named))}) none is the default; write that one")
        found = named["default"]
    if found is not None and not isinstance(found, str):
        raise ValueError("its chat_template is no text")
    return found and found.replace("\r\n", "\n").replace("\r", "\n")


def rendered(template: str, messages: list[dict], reply: bool = False, **tokens: Any) -> str:
    """Return the messages as text; with `reply`, what the assistant's answer follows. `tokens`: bos_token and others.

    `strftime_now` among them: a function for that name, of a moment that several texts share.

    Raise ValueError, in one sentence, where the template refuses them or is none.
    """
    rounds = itertools.count(1)

    def go_round():
        if next(rounds) > MOST_ROUNDS:
            raise ValueError(f"its loops go round more than {MOST_ROUNDS:,} times")
        return ""

    try:
        of_all = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": reply}
        of_all[ROUND] = go_round
        return _compiled(template).render(**tokens | of_all)
    except Exception as error:  # noqa: BLE001 - a template may do anything
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"the chat template refuses these messages ({why}); change them") from None


@functools.lru_cache
def _compiled(template):
    import jinja2  # late: most programs need none of it
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}, around what the assistant writes: it changes no text."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class World(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context, operator, left, right):
            if operator == "**":
                raise ValueError("it raises to a power")
            for text, times in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and len(text) * times > LONGEST_PRODUCT:
                    raise ValueError(f"it repeats a text {times:,} times")
            return super().call_binop(context, operator, left, right)

        def _parse(self, source, name, filename):
            if ROUND in source:  # it would hide ours
                raise jinja2.TemplateError(f"it has the name {ROUND}")
            tree = super()._parse(source, name, filename)
            for part in tree.find_all((jinja2.nodes.For, jinja2.nodes.Macro)):
                going = jinja2.nodes.Call(jinja2.nodes.Name(ROUND, "load"), [], [], None, None)
                part.body.insert(0, jinja2.nodes.Output([going]).set_lineno(part.lineno))
            return tree

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):  # jinja's own is for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    world = World(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    world.filters["tojson"] = tojson
    world.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),  # noqa: DTZ005 - as transformers has it
    }
    return world.from_string(template)
