"""Engines for tests of the server: a tiny target and a draft model with tokenizer and template."""

import asyncio
from collections.abc import Callable
from typing import Any

from tiny_models import byte_tokenizer, engine_of, tiny_module

from outrider import Engine
from outrider.runtime import HFModel

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


HERMES = (
    "{%- if tools %}<system>Tools:\n{%- for tool in tools %}{{ tool | tojson }}\n{%- endfor %}"
    'Answer <tool_call>{"name": …, "arguments": …}</tool_call>\n{%- endif %}'
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEMPLATES = {
    "hermes": HERMES,
    "llama3": HERMES.replace("<tool_call>", "")
    .replace("</tool_call>", "")
    .replace('"arguments"', '"parameters"'),
    "mistral": HERMES.replace("</tool_call>", "").replace("<tool_call>", "[TOOL_CALLS]"),
}


def tiny_target(seed: int = 0, std: float = 0.2, **settings: Any) -> HFModel:
    """A random model with a byte-level tokenizer and a chat template."""
    module = tiny_module(seed=seed, std=std, vocab_size=280, eos_token_id=0, **settings)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return HFModel(module, tokenizer, name="tiny")


def tiny_engine(method: str = "speculative", **settings: Any) -> Engine:
    """A target with a draft model that often agrees with it."""
    return engine_of(tiny_target(), tiny_target(std=0.19), method, **settings)


def calling_engine(format: str = "hermes", context: int = 1024, **settings: Any) -> Engine:
    """A target whose chat template tells it of tools, in a format of calls."""
    room = {"max_position_embeddings": context}
    engine = engine_of(tiny_target(**room), tiny_target(std=0.19, **room), **settings)
    engine.target.tokenizer.chat_template = TEMPLATES[format]  # type: ignore[union-attr]
    return engine


class AtOnce(asyncio.AbstractEventLoop):
    """An event loop that is never busy."""

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, **_: Any) -> Any:
        callback(*args)
