"""Engines for tests of the server: a tiny target and a draft model with tokenizer and template."""

from typing import Any

from tiny_models import byte_tokenizer, engine_of, tiny_module

from outrider import Engine
from outrider.runtime import HFModel

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_target(seed: int = 0, std: float = 0.2, **settings: Any) -> HFModel:
    """A random model with a byte-level tokenizer and a chat template."""
    module = tiny_module(seed=seed, std=std, vocab_size=280, eos_token_id=0, **settings)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return HFModel(module, tokenizer, name="tiny")


def tiny_engine(method: str = "speculative", **settings: Any) -> Engine:
    """A target with a draft model that often agrees with it."""
    return engine_of(tiny_target(), tiny_target(std=0.19), method, **settings)
