"""Encoder-decoders through ``load``: folders, prompts, compatible and incompatible pairs."""

from pathlib import Path

import pytest
import torch
from tiny_models import (
    VOCAB,
    byte_tokenizer,
    engine_of,
    greedy,
    ragged_prompts,
    tiny,
    tiny_module,
    token_ids,
)
from tiny_ngrams import tiny_file
from tiny_seq2seq import seq2seq_generate, tiny_seq2seq, tiny_seq2seq_module

import outrider
from outrider import Sampling
from outrider.core.errors import (
    IncompatibleError,
    PromptError,
    UnsupportedModelError,
)
from outrider.methods import METHODS
from outrider.runtime import Seq2SeqModel, load_model

SOURCES = ["def f(x):\n", "print(hello world)", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved T5 with a tokenizer; token 0 begins and ends a text."""
    tokenizer = byte_tokenizer()
    module = tiny_seq2seq_module("t5", 2, vocab_size=len(tokenizer), eos_token_id=0)
    module.lm_head.weight = module.shared.weight  # as its class saves it
    path: Path = tmp_path_factory.mktemp("t5")
    module.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_a_folder_of_an_encoder_decoder(folder: Path) -> None:
    """The prompt is the source, and the output is the decoder's alone, as in ``generate``."""
    engine = outrider.load(str(folder), str(folder), dtype="float32", device="cpu")
    assert isinstance(engine.target, Seq2SeqModel)
    sampling = Sampling(temperature=0, max_new_tokens=12, ignore_eos=True)
    results = engine.generate(SOURCES, sampling)
    tokenizer, module = engine.target.tokenizer, engine.target.module
    module.generation_config.eos_token_id = None
    for source, result in zip(SOURCES, results, strict=True):
        ids = tuple(tokenizer(source)["input_ids"])
        assert result.prompt_ids == ids
        assert result.token_ids == seq2seq_generate(module, ids, 12)
        assert result.text == tokenizer.decode(result.token_ids, skip_special_tokens=True)
    assert "".join(event.text for event in engine.stream(SOURCES[0], sampling)) == results[0].text


def test_one_model_in_two_roles() -> None:
    target = tiny_seq2seq("bart")
    engine = engine_of(target, target)
    assert isinstance(engine.draft, Seq2SeqModel)
    assert engine.draft is not target
    module = tiny_seq2seq_module("marian")
    assert isinstance(load_model(module), Seq2SeqModel)
    assert not isinstance(load_model(tiny_module()), Seq2SeqModel)


def test_pairs_of_different_kinds_raise_an_error() -> None:
    with pytest.raises(IncompatibleError, match=r"is an encoder-decoder, the draft decoder-"):
        engine_of(tiny_seq2seq("t5"), tiny())
    with pytest.raises(IncompatibleError, match=r"is decoder-only, the draft an encoder-dec"):
        engine_of(tiny(), tiny_seq2seq("t5"))
    with pytest.raises(IncompatibleError) as caught:
        engine_of(tiny(), tiny_seq2seq("t5"), "block")
    assert "\n" not in str(caught.value)


def test_invalid_sources_raise_an_error() -> None:
    engine = engine_of(tiny_seq2seq("bart", max_position_embeddings=16))
    with pytest.raises(PromptError, match="the prompt is empty"):
        engine.generate([[]], greedy(3))
    with pytest.raises(PromptError, match=r"has 20 tokens, the encoder reads 16: shorten .* by 4$"):
        engine.generate([[1] * 20], greedy(3))
    with pytest.raises(PromptError, match=f"token id {VOCAB} is out of range"):
        engine.generate([[VOCAB]], greedy(3))


def test_a_draft_with_a_shorter_context_limits_neither_source_nor_output() -> None:
    engine = engine_of(tiny_seq2seq("t5"), tiny_seq2seq("bart", max_position_embeddings=16))
    results = engine.generate([[1] * 17, [1] * 16], greedy(30))
    assert [len(result.token_ids) for result in results] == [30, 30]
    assert [result.stats.drafted > 0 for result in results] == [False, True]


@pytest.mark.parametrize("method", [name for name in METHODS if not METHODS[name].needs_head])
def test_every_method_equals_plain_decoding(method: str) -> None:
    """At temperature 0, with a draft that is often wrong."""
    sources, tokenizer = ragged_prompts([3, 11], seed=5), byte_tokenizer()
    target, draft = (
        Seq2SeqModel(tiny_seq2seq_module(std=std, vocab_size=len(tokenizer)), tokenizer)
        for std in (0.2, 0.19)
    )
    with torch.no_grad():
        draft.module.lm_head.weight.copy_(target.module.lm_head.weight)
    sampling = greedy(8, repetition_penalty=2.0)
    plain = engine_of(target).generate(sources, sampling)
    row = METHODS[method]
    if not row.recipe().greedy_verifier.lossless:
        pytest.skip("another distribution at temperature 0")
    options = {"file": tiny_file(len(tokenizer))} if method == "ngram" else {}
    try:
        engine = engine_of(target, draft, row, options=options)
    except UnsupportedModelError as error:
        pytest.skip(f"no such models: {error}")
    assert token_ids(engine.generate(sources, sampling)) == token_ids(plain)


@pytest.mark.parametrize("method", ["prompt-lookup", "suffix"])
def test_lookups_copy_from_the_source(method: str) -> None:
    """An output that is forced to repeat its source is drafted from the source."""
    target = tiny_seq2seq("bart")
    sources = [list(range(10, 34)), list(range(40, 61))]
    samplings = [greedy(len(s), forced=dict(enumerate(s))) for s in sources]
    results = engine_of(target, None, method).generate(sources, samplings)
    assert token_ids(results) == [tuple(source) for source in sources]
    assert results.stats.acceptance_length > 3
