"""A hint appears if a chat model, prompted without its template, ends at once."""

import warnings
from typing import Any

import pytest
import torch
from real_tokenizers import words
from tiny_models import engine_of, tiny_module
from transformers import PreTrainedTokenizerBase

from outrider import Engine, Sampling
from outrider.core.errors import OutriderWarning
from outrider.runtime import HFModel

TEMPLATE = "{% for m in messages %}<|start|> {{ m['role'] }} {{ m['content'] }}{% endfor %}"
VOCABULARY = ["<eos>", "<|start|>", "[INST]", "user", "hello", "<unk>"]
GREEDY = Sampling(temperature=0, max_new_tokens=3)


def chat_tokenizer(template: Any = TEMPLATE) -> PreTrainedTokenizerBase:
    made = words(VOCABULARY)
    made.chat_template = template
    return made


def ending(tokenizer: PreTrainedTokenizerBase | None, *, at_once: bool = True) -> Engine:
    """An engine whose model ends every output at once, or never."""
    module = tiny_module(vocab_size=len(VOCABULARY), eos_token_id=0)
    with torch.no_grad():
        module.get_output_embeddings().weight.zero_()  # ties: the argmax is token 0
    if not at_once:
        module.generation_config.eos_token_id = module.config.eos_token_id = 4
    return engine_of(HFModel(module, tokenizer))


def hints(engine: Engine, *prompts: Any, stream: bool = False) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for prompt in prompts:
            if stream:
                list(engine.stream(prompt, GREEDY))
            else:
                engine.generate(prompt, GREEDY)
    return [str(each.message) for each in caught if issubclass(each.category, OutriderWarning)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", [TEMPLATE, {"default": TEMPLATE}])
def test_one_hint_per_engine(template: Any, stream: bool) -> None:
    engine = ending(chat_tokenizer(template))
    (hint,) = hints(engine, "hello", "user hello", stream=stream)
    assert "engine.chat([{'role': 'user', 'content': ...}])" in hint
    assert hints(engine, "hello", stream=stream) == []
    assert len(hints(ending(chat_tokenizer(template)), "hello")) == 1


def test_no_hint_without_a_reason() -> None:
    tokenizer = chat_tokenizer()
    assert hints(ending(tokenizer), "<|start|> user hello", [[4, 3]], []) == []
    assert hints(ending(tokenizer, at_once=False), "hello") == []
    assert hints(ending(chat_tokenizer(None)), "hello") == []
    assert hints(ending(None), [[4]]) == []
    assert hints(ending(chat_tokenizer("[INST] {{ messages }} [/INST]")), "[INST] hello") == []
