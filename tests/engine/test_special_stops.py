"""Stop strings that are, or contain, special tokens of the tokenizer."""

from typing import Any

import pytest
from real_tokenizers import tokenizer
from tiny_models import ForcedTokens, engine_of, tiny_module

from outrider import Engine, Result, Sampling
from outrider.runtime import HFModel

WRITTEN = "Hello you<|im_start|>, and\n<|im_start|>user: é<|im_start|>"


def model(kind: str) -> HFModel:
    words = tokenizer(kind)
    return HFModel(tiny_module(vocab_size=len(words), num_hidden_layers=1), words, "target")


@pytest.fixture(scope="module")
def target() -> HFModel:
    return model("byte")


def engine_with(target: HFModel, γ: int) -> Engine:
    return engine_of(target, HFModel(target.module) if γ else None, γ=γ or 1)


def sampling_of(target: HFModel, **settings: Any) -> Sampling:
    """Parameters that force the model to generate the text."""
    assert target.tokenizer is not None
    ids = target.tokenizer(WRITTEN, add_special_tokens=False)["input_ids"]
    script = ForcedTokens(target.tokenizer("def")["input_ids"], ids)
    settings = {"max_new_tokens": len(ids), "ignore_eos": True} | settings
    return Sampling(temperature=0, processors=[script], **settings)


def written(target: HFModel, γ: int, stop: str | list[str]) -> Result:
    return engine_with(target, γ).generate("def", sampling_of(target, stop=stop))


@pytest.mark.parametrize("γ", [0, 5])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("<|im_start|>", "Hello you"),
        ("\n<|im_start|>", "Hello you, and"),
        ("<|im_start|>user", "Hello you, and\n"),
        ("é<|im_start|>", "Hello you, and\nuser: "),
        (["user", "and\n<|im_start|>"], "Hello you, "),
        (["nd", "and\n<|im_start|>"], "Hello you, a"),
    ],
)
def test_the_text_ends_before_them(target: HFModel, γ: int, stop: Any, text: str) -> None:
    result = written(target, γ, stop)
    assert (result.text, result.finish_reason) == (text, "stop")


def test_with_a_tokenizer_that_puts_spaces_between_tokens() -> None:
    result = written(model("fallback"), 3, "<|im_start|>")
    assert (result.text.strip(), result.finish_reason) == ("Hello you", "stop")


@pytest.mark.parametrize("γ", [0, 5])
def test_strings_without_special_tokens_still_match_across_them(target: HFModel, γ: int) -> None:
    result = written(target, γ, "you, and")
    assert (result.text, result.finish_reason) == ("Hello ", "stop")


@pytest.mark.parametrize("γ", [0, 3])
def test_a_possible_stop_string_is_held_back(target: HFModel, γ: int) -> None:
    sampling = sampling_of(target, stop="and\n<|im_start|>")
    shown = ""
    for event in engine_with(target, γ).stream("def", sampling):
        shown += event.text
        assert "Hello you, ".startswith(shown)
    assert shown == "Hello you, "


def test_a_stop_string_that_is_the_end_of_sequence_token(target: HFModel) -> None:
    """It ends the text, whether or not the token is ignored."""
    assert target.tokenizer is not None
    end = target.tokenizer.convert_tokens_to_ids("<|im_start|>")
    target.module.generation_config.eos_token_id = end
    for settings in ({}, {"ignore_eos": False}):
        sampling = sampling_of(target, stop="<|im_start|>", **settings)
        result = engine_with(target, 3).generate("def", sampling)
        assert (result.text, result.finish_reason) == ("Hello you", "stop")
