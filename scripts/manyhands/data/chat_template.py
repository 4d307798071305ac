"""Render a conversation by a model's chat template, which is Jinja, as the library transformers does.

    template = template_in("SmolLM2-135M-Instruct", tokenizer_config)     # None: the folder has none
    rendered(template, [{"role": "user", "content": "Who goes there?"}], reply=True, bos_token="<s>")

A template comes from a stranger: it runs in jinja2's sandbox, which reaches neither files nor other objects.
"""

import functools
import json
from datetime import datetime
from pathlib import Path
from typing import Any

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


def rendered(template: str, messages: list[dict], reply: bool = False, **tokens: str) -> str:
    """Return the messages as text; with `reply`, what the assistant's answer follows. `tokens`: bos_token and others.

    Raise ValueError, in one sentence, where the template refuses them or is none.
    """
    try:
        of_all = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": reply}
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

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):  # jinja's own is for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    world.filters["tojson"] = tojson
    world.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),  # noqa: DTZ005 - as transformers has it
    }
    return world.from_string(template)
