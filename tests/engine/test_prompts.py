"""Accepted kinds of prompts: text, token ids, tensors, arrays, tokenizer output; and errors."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from real_tokenizers import tokenizer as tokenizer_of
from tiny_models import byte_tokenizer, engine_of, greedy, ragged_prompts, tiny_module
from transformers import BatchEncoding, PreTrainedTokenizerBase

from outrider import Engine, Result, Results
from outrider.core.errors import InvalidParameterError, PromptError
from outrider.runtime import HFModel

IDS = [5, 6, 7, 8]


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    made = byte_tokenizer()
    made.pad_token = made.eos_token
    return made


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of(HFModel(tiny_module(vocab_size=len(tokenizer())), tokenizer()))


def padded(texts: list[str], side: str) -> BatchEncoding:
    words = tokenizer()
    words.padding_side = side
    return words(texts, padding=True, return_tensors="pt")


SINGLES: dict[str, Any] = {
    "int64 tensor": torch.tensor(IDS),
    "int32 tensor": torch.tensor(IDS, dtype=torch.int32),
    "array": np.array(IDS),
    "uint16 array": np.array(IDS, dtype=np.uint16),
    "dict": {"input_ids": IDS},
    "dict of a tensor": {"input_ids": torch.tensor(IDS)},
    "padded": {"input_ids": [0, *IDS, 0, 0], "attention_mask": [0, 1, 1, 1, 1, 0, 0]},
    "batch encoding": BatchEncoding({"input_ids": IDS, "attention_mask": [1] * 4}),
}
BATCHES: dict[str, Any] = {
    "list": [IDS],
    "tuple of tuples": (tuple(IDS),),
    "range": [range(5, 9)],
    "tensor": torch.tensor([IDS]),
    "array": np.array([IDS]),
    "tensors": [torch.tensor(IDS)],
    "tensors of one row": [torch.tensor([IDS])],
    "numpy numbers": [[np.int64(5), np.int32(6), np.uint8(7), 8]],
    "tensors for numbers": [list(torch.tensor(IDS))],
    "dict of lists": {"input_ids": [IDS]},
    "dict of tensors": {"input_ids": [torch.tensor(IDS)]},
    "dict of a tensor": {"input_ids": torch.tensor([IDS]), "token_type_ids": torch.zeros(1, 4)},
    "dicts": [{"input_ids": torch.tensor([IDS]), "attention_mask": torch.ones(1, 4)}],
    "iterator": lambda: iter([IDS]),
    "generator": lambda: (prompt for prompt in [IDS]),
}


@pytest.mark.parametrize("prompts", SINGLES.values(), ids=SINGLES.keys())
def test_one_prompt_gives_one_result(engine: Engine, prompts: Any) -> None:
    wanted = engine.generate([IDS], greedy(5))[0]
    result = engine.generate(prompts, greedy(5))
    assert isinstance(result, Result)
    assert (result.prompt_ids, result.token_ids) == (tuple(IDS), wanted.token_ids)
    assert tuple(result.prompt) == tuple(IDS)
    streamed = [token for event in engine.stream(prompts, greedy(5)) for token in event.token_ids]
    assert tuple(streamed) == wanted.token_ids
    assert engine.encode(prompts) == tuple(IDS)
    *_, row = engine.run(prompts, greedy(5))
    assert tuple(row.token_ids) == wanted.token_ids


@pytest.mark.parametrize("prompts", BATCHES.values(), ids=BATCHES.keys())
def test_a_batch_gives_results(engine: Engine, prompts: Any) -> None:
    results = engine.generate(prompts() if callable(prompts) else prompts, greedy(5))
    assert isinstance(results, Results)
    assert [result.prompt_ids for result in results] == [tuple(IDS)]


@pytest.mark.parametrize("side", ["left", "right"])
def test_tokenizer_output_without_its_padding(engine: Engine, side: str) -> None:
    """It was once read as the strings ``input_ids`` and ``attention_mask``."""
    texts = ["def f(x):", "print(hello world) # and more", "x"]
    wanted = engine.generate(texts, greedy(6))
    results = engine.generate(padded(texts, side), greedy(6))
    assert [r.prompt_ids for r in results] == [r.prompt_ids for r in wanted]
    assert [r.token_ids for r in results] == [r.token_ids for r in wanted]
    ragged = tokenizer()(texts)
    assert [r.token_ids for r in engine.generate(ragged, greedy(6))] == [
        r.token_ids for r in wanted
    ]
    single = engine.generate(tokenizer()(texts[0]), greedy(6))
    assert isinstance(single, Result)
    assert single.token_ids == wanted[0].token_ids


def test_texts_in_an_array(engine: Engine) -> None:
    texts = ["def f", "print("]
    results = engine.generate(np.array(texts), greedy(2))
    assert [result.prompt for result in results] == texts


def test_a_mixed_batch(engine: Engine) -> None:
    one, two = ragged_prompts([3, 6])
    results = engine.generate([one, "def f", torch.tensor(two)], greedy(2))
    assert results[0].prompt_ids == tuple(one)
    assert results[1].prompt == "def f"
    assert results[2].prompt_ids == tuple(two)


def test_an_empty_batch_of_every_kind(engine: Engine) -> None:
    for prompts in ([], (), iter(()), torch.zeros(0, 3, dtype=torch.int64)):
        assert list(engine.generate(prompts, greedy(2))) == []


CHAT = [{"role": "user", "content": "Hello"}]
NO_PROMPTS: dict[str, tuple[Any, str]] = {
    "None": (None, "None is no prompt"),
    "int": (5, "5 is no prompt"),
    "float": (0.5, "0.5 is no prompt"),
    "bool": (True, "True is no prompt"),
    "bytes": (b"text", r"decode them first"),
    "bytes in a list": ([b"text"], r"decode them first"),
    "object": (object(), "is no prompt: a prompt is a string"),
    "a set": ({"a", "b"}, "is no prompt"),
    "None in a list": ([None], "None is no prompt"),
    "floats in a list": ([[1.7, 2.2]], "1.7 is no token id"),
    "truth values": ([[True, False]], "True is no token id"),
    "words in a list": ([["a", "b"]], "'a' is no token id"),
    "a scalar tensor": (torch.tensor(3), "3 is no prompt"),
    "a float tensor": (torch.rand(1, 3), "is no token id"),
    "a truth tensor": (torch.tensor([True]), "is no token id"),
    "embeddings": (torch.rand(1, 3, 8), "1 dimension for one prompt or 2 for a batch, not 3"),
    "a 3-D array": (np.ones((1, 1, 1), dtype=int), "not 3"),
    "a nested list": ([[[1, 2]]], r"\[1, 2\] is no token id"),
    "several rows in a list": ([torch.tensor([[1], [2]])], "2 prompts in the place of one"),
    "a generator in a list": ([(i for i in IDS)], "is no prompt"),
    "a lone surrogate": ("a\ud800", r"lone surrogate, '\\ud800', at character 1"),
    "a lone surrogate in a list": (["\udcff"], "lone surrogate"),
    "messages without a template": (CHAT, "has no chat template|has no tokenizer"),
    "batch of messages": ([CHAT, CHAT], "has no chat template|has no tokenizer"),
    "one message": (CHAT[0], r"give the conversation, \[message\]"),
    "an unknown dict": ({"text": "x"}, "no 'input_ids'"),
    "an empty dict": ({}, "no 'input_ids'"),
    "an image": ({"input_ids": IDS, "pixel_values": 1}, "'pixel_values' beside its 'input_ids'"),
    "ids that are a text": ({"input_ids": "abc"}, "input_ids='abc'"),
    "ids that are none": ({"input_ids": None}, "input_ids=None"),
    "ids of texts": ({"input_ids": ["abc"]}, "input_ids='abc'"),
    "3-D ids": ({"input_ids": [[[1, 2]]]}, "not 3"),
    "another mask": ({"input_ids": IDS, "attention_mask": [1, 1]}, "differ in shape"),
    "a number for a mask": ({"input_ids": IDS, "attention_mask": 1}, "attention_mask=1"),
    "a mask with holes": ({"input_ids": IDS, "attention_mask": [1, 0, 1, 1]}, "zeros between"),
    "padding only": ({"input_ids": IDS, "attention_mask": [0] * 4}, "the prompt is empty"),
    "no tokens": ({"input_ids": []}, "the prompt is empty"),
}


@pytest.mark.parametrize(("prompts", "message"), NO_PROMPTS.values(), ids=NO_PROMPTS.keys())
def test_other_values_raise_an_error(engine: Engine, prompts: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message) as caught:
        engine.generate(prompts, greedy(3))
    assert "\n" not in str(caught.value)
    one: list[Callable[[Any], object]] = [engine.stream, engine.run, engine.encode]
    for call in one:
        with pytest.raises(PromptError):
            call(prompts)


def test_a_flat_list_is_one_prompt_and_not_a_batch(engine: Engine) -> None:
    for flat in (IDS, [np.int64(token) for token in IDS]):
        assert engine.encode(flat) == tuple(IDS)
        with pytest.raises(PromptError, match=r"write \[\[1, 2, 3\]\]"):
            engine.generate(flat, greedy(3))


def test_several_prompts_where_one_is_expected(engine: Engine) -> None:
    for several in (["a"], [IDS], torch.tensor([IDS, IDS]), iter([IDS])):
        with pytest.raises(PromptError):
            engine.stream(several)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, [{"temperature": 0}], "greedy", 5, [0]])
def test_other_values_for_sampling_raise_an_error(engine: Engine, sampling: Any) -> None:
    for call in (engine.generate, engine.stream):
        with pytest.raises(InvalidParameterError, match=r"^sampling=.*Sampling\(temp") as caught:
            call("x", sampling)
        if not isinstance(sampling, list | str | int):
            assert "Sampling(temperature=0)" in str(caught.value)
    with pytest.raises(InvalidParameterError, match="must be True or False"):
        engine.generate("x", greedy(1), add_special_tokens=None)  # type: ignore[call-overload]


def test_samplings_from_an_iterator(engine: Engine) -> None:
    samplings: Iterator[Any] = (greedy(n) for n in (1, 2))
    results = engine.generate(["a", "b"], samplings)
    assert [len(result.token_ids) for result in results] == [1, 2]


@cache
def begun() -> HFModel:
    """A model whose tokenizer puts a special token before every text."""
    words = tokenizer_of("fallback")
    return HFModel(tiny_module(vocab_size=len(words)), words)


@pytest.mark.parametrize("kind", ["fallback", "unigram"])
def test_a_text_that_begins_with_the_special_token_gets_no_second_one(kind: str) -> None:
    words = tokenizer_of(kind)
    engine = engine_of(HFModel(tiny_module(vocab_size=len(words)), words))
    bos = words.bos_token_id
    assert words("<s>def")["input_ids"][:2] == [bos, bos]
    assert engine.encode("<s>def")[0] == bos
    assert bos not in engine.encode("<s>def")[1:]
    assert engine.generate("<s>def", greedy(2)).prompt_ids == engine.encode("<s>def")
    assert engine.encode("def")[0] == bos
    assert engine.encode("<s><s>def")[:2] == (bos, bos)
    assert bos not in engine.encode("<s><s>def")[2:]
    assert engine.encode([bos, bos, 9]) == (bos, bos, 9)  # token ids are not changed


def test_special_tokens_can_be_left_out() -> None:
    engine, bos = engine_of(begun()), tokenizer_of("fallback").bos_token_id
    bare = tuple(tokenizer_of("fallback")("def", add_special_tokens=False)["input_ids"])
    assert engine.encode("def") == (bos, *bare)
    assert engine.encode("def", add_special_tokens=False) == bare
    assert engine.encode("<s>def", add_special_tokens=False)[0] == bos
    assert engine.generate("def", greedy(1), add_special_tokens=False).prompt_ids == bare
    assert engine.generate(["def"], greedy(1), add_special_tokens=False)[0].prompt_ids == bare
    *_, row = engine.run("def", greedy(1), add_special_tokens=False)
    assert row.request.prompt_ids == bare
    assert list(engine.stream("def", greedy(1), add_special_tokens=False))
