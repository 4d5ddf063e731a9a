"""Conversations as prompts, encoded by the tokenizer's chat template."""

from typing import Any

import pytest
from real_tokenizers import model, tokenizer
from tiny_models import engine_of, greedy
from transformers import PreTrainedTokenizerBase

from outrider import Sampling
from outrider.core.errors import PromptError
from outrider.engine import Engine
from outrider.runtime import HFModel

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}"
    "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('users begin') }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve?"}]
TEXT = "<system>Be brief.\n<user>naïve?\n<assistant>"


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> PreTrainedTokenizerBase:
    made = tokenizer("byte")
    monkeypatch.setattr(made, "chat_template", TEMPLATE, raising=False)
    return made


@pytest.fixture
def engine(words: PreTrainedTokenizerBase) -> Engine:
    return engine_of(model("byte", 1), model("byte", 2), "speculative", 3)


def test_a_conversation_is_the_text_that_its_template_writes(engine: Engine) -> None:
    wanted = engine.generate(TEXT, greedy(12), add_special_tokens=False)
    found = engine.chat(CHAT, greedy(12))
    assert found.prompt_ids == wanted.prompt_ids
    assert found.token_ids == wanted.token_ids
    assert list(found.prompt) == CHAT
    assert engine.generate(CHAT, greedy(12)).token_ids == wanted.token_ids
    events = list(engine.stream(CHAT, greedy(12)))
    assert tuple(token for event in events for token in event.token_ids) == wanted.token_ids


def test_conversations_and_texts_share_a_batch(engine: Engine) -> None:
    found = engine.generate([CHAT, TEXT, [CHAT[1]]], greedy(8), add_special_tokens=False)
    assert len(found) == 3
    assert found[0].token_ids == found[1].token_ids
    assert len(found[2].prompt_ids) < len(found[0].prompt_ids)


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize("place", [0, 1])
def test_an_answer_ends_at_any_end_token_of_the_generation_config(place: int) -> None:
    """Chat models have several: the end of a text, and the end of a turn, which need not be the
    tokenizer's."""
    target = model("byte", 1)
    assert target.tokenizer is not None
    free = engine_of(target).chat(CHAT, greedy(20))
    third = free.token_ids[2]
    assert third not in free.token_ids[:2]
    other = next(token for token in range(target.num_tokens) if token not in free.token_ids)
    target.module.generation_config.eos_token_id = [[third, other], [other, third]][place]
    assert third != target.tokenizer.eos_token_id
    engine = engine_of(target, model("byte", 2), "speculative", 5)
    assert engine.eos_ids == {third, other}
    found = engine.chat(CHAT, Sampling(temperature=0, max_new_tokens=20))
    assert found.finish_reason == "eos"
    assert found.token_ids == free.token_ids[:3]


def test_without_end_tokens_in_the_generation_config_the_tokenizer_says() -> None:
    target = model("byte", 1)
    assert target.tokenizer is not None
    target.module.generation_config.eos_token_id = None
    wanted = target.tokenizer.eos_token_id
    assert engine_of(target).eos_ids == (set() if wanted is None else {wanted})


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "has no messages"),
        (["hello"], r"messages\[0\]='hello': must be such as"),
        ([CHAT[0], {"role": "user"}], r"messages\[1\]\['content'\]=None: must be a string"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]\['role'\]=3"),
        ([{"role": "assistant", "content": "x"}], "refuses these messages: users begin"),
    ],
)
def test_what_is_no_conversation(engine: Engine, messages: list[Any], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        engine.chat(messages)


def test_a_model_without_a_template_or_a_tokenizer_cannot_chat() -> None:
    base = model("unigram")
    with pytest.raises(PromptError, match="has no chat template, so it was not trained to chat"):
        engine_of(base).chat(CHAT)
    with pytest.raises(PromptError, match="has no tokenizer"):
        engine_of(HFModel(base.module, name="target")).chat(CHAT)
