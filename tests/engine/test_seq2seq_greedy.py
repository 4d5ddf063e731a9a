"""Greedy outputs of encoder-decoders equal those of transformers, by any method, in any batch."""

from typing import Any

import pytest
from tiny_models import VOCAB, engine_of, greedy, ragged_prompts, token_ids, uniform_method
from tiny_seq2seq import SEQ2SEQ, seq2seq_generate, tiny_seq2seq, tiny_seq2seq_module
from transformers import PreTrainedModel

from outrider import Sampling
from outrider.runtime import Seq2SeqModel

SOURCES = ragged_prompts([4, 19, 9], seed=7)
NUM = 14


def texts_of(module: PreTrainedModel, num: int = NUM, **settings: Any) -> list[tuple[int, ...]]:
    """The output of ``transformers`` for each source alone."""
    return [seq2seq_generate(module, source, num, **settings) for source in SOURCES]


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_plain_and_speculative_equal_transformers(family: str) -> None:
    """Small post-norm models repeat one token for ever, so a penalty makes their output vary."""
    target, sampling = tiny_seq2seq(family, name="target"), greedy(NUM, repetition_penalty=2.0)
    expected = texts_of(target.module, repetition_penalty=2.0)
    assert all(len(set(text)) >= 6 for text in expected), "degenerate outputs prove nothing"
    assert token_ids(engine_of(target).generate(SOURCES, sampling)) == expected
    good = engine_of(target, Seq2SeqModel(target.module)).generate(SOURCES, sampling)
    assert token_ids(good) == expected
    assert good.stats.acceptance_rate > 0.9
    bad = engine_of(target, tiny_seq2seq(family, 1)).generate(SOURCES, sampling)
    assert token_ids(bad) == expected
    assert bad.stats.acceptance_rate < 0.9


@pytest.mark.parametrize("family", ["t5", "marian", "bart"])
def test_trees_and_refilled_batches(family: str) -> None:
    """A small vocabulary, so that paths off the first child are often accepted.

    Batches of two rows, so that rows leave and join.
    """
    target = tiny_seq2seq(family, vocab_size=7)
    sources = ragged_prompts([4, 1, 19, 9, 2], 7)
    expected = [seq2seq_generate(target.module, source, NUM) for source in sources]
    trees = engine_of(target, None, uniform_method(width=3), γ=12, max_batch_size=2)
    results = trees.generate(sources, [greedy(n) for n in (NUM, 3, NUM, 9, NUM)])
    for result, text, num in zip(results, expected, (NUM, 3, NUM, 9, NUM), strict=True):
        assert result.token_ids == text[:num]
    assert results.stats.accepted > 5


DEMANDS: dict[str, dict[str, Any]] = {
    "language token": {"forced_bos_token_id": 9},
    "end": {"forced_eos_token_id": 5},
    "both": {"forced_bos_token_id": 9, "forced_eos_token_id": 5},
    "padding": {"bad_words_ids": [[76], [31], [69, 71]]},
    "suppressed": {"suppress_tokens": [71, 31, 32], "begin_suppress_tokens": [76, 50]},
    "suppressed behind a language token": {
        "forced_bos_token_id": 9,
        "begin_suppress_tokens": list(range(60)),
    },
    "n-grams": {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 1},
    "lengths": {"min_length": 12, "eos_token_id": list(range(40))},
    "new tokens": {"min_new_tokens": 7, "eos_token_id": list(range(40))},
    "penalties": {"repetition_penalty": 1.5, "encoder_repetition_penalty": 2.0},
    "decay": {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": list(range(8))},
    "bias": {"sequence_bias": [[[76], -3.0], [[71, 71], -5.0]]},
}


@pytest.mark.parametrize("demand", DEMANDS)
def test_the_rules_of_the_generation_config_apply(demand: str) -> None:
    """To every output, drafted or not."""
    module = tiny_seq2seq_module("mbart", bos_token_id=3)
    free = texts_of(module)
    for field, value in DEMANDS[demand].items():
        setattr(module.generation_config, field, value)
    expected = texts_of(module, pad_token_id=1)
    assert expected != free, "the demand must matter here"
    target = Seq2SeqModel(module)
    sampling = Sampling(temperature=0, max_new_tokens=NUM)
    for draft in (None, Seq2SeqModel(module)):
        results = engine_of(target, draft).generate(SOURCES, sampling)
        assert token_ids(results) == expected
    assert results.stats.acceptance_rate > 0.9, "a draft obeys the target's rules"


def test_an_output_does_not_depend_on_its_batch() -> None:
    target, draft = tiny_seq2seq("t5"), tiny_seq2seq("t5", std=0.19)
    sampling = Sampling(temperature=0.5, top_k=20, max_new_tokens=12, ignore_eos=True)
    for method in ("speculative", "coupled"):
        engine = engine_of(target, draft, method)
        together = engine.generate(SOURCES, sampling)
        assert token_ids(together) == [
            engine.generate([source], sampling)[0].token_ids for source in SOURCES
        ]
        assert 0 < together.stats.acceptance_rate < 1


def test_the_end_of_the_context() -> None:
    target = tiny_seq2seq("bart", max_position_embeddings=16)
    assert target.limit == 16
    result = engine_of(target, tiny_seq2seq("bart", 1)).generate([[5] * 16], greedy(50))[0]
    assert (len(result.token_ids), result.finish_reason) == (15, "context")
    assert result.token_ids == seq2seq_generate(target.module, [5] * 16, 15)
    assert max(result.token_ids) < VOCAB
