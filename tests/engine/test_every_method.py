"""What all named methods have in common: batches, streams, confidence stops, temperature 0."""

from functools import cache

import pytest
from real_tokenizers import worded
from tiny_models import engine_of, greedy, ragged_prompts, token_ids
from tiny_ngrams import tiny_file

from outrider import Engine, Sampling
from outrider.core.errors import IncompatibleError
from outrider.methods import METHODS

TARGET = worded(0)
DRAFT = worded(3)
PROMPTS = ragged_prompts([5, 1, 9, 3])
NUM = 8
SAMPLING = Sampling(
    temperature=0.9,
    top_k=40,
    top_p=0.95,
    frequency_penalty=0.3,
    max_new_tokens=NUM,
    ignore_eos=True,
)
GREEDY_ONLY = [name for name, method in METHODS.items() if method.recipe().greedy_only]


def engine(method: str, **settings: object) -> Engine:
    options = {"bild": {"mode": "mjsd"}, "ngram": {"file": tiny_file()}}.get(method, {})
    return engine_of(TARGET, DRAFT, method, 4, options=options, **settings)


@cache
def plain() -> list[tuple[int, ...]]:
    """Greedy outputs of plain decoding, which those of lossless methods equal."""
    return token_ids(engine_of(TARGET).generate(PROMPTS, greedy(NUM)))


@pytest.mark.parametrize("method", METHODS)
def test_rows_of_a_batch_equal_rows_alone(method: str) -> None:
    sampling = greedy(NUM) if method in GREEDY_ONLY else SAMPLING
    together = token_ids(engine(method).generate(PROMPTS, sampling))
    one_by_one = token_ids(engine(method, max_batch_size=1).generate(PROMPTS, sampling))
    assert together == one_by_one
    streamed = [t for e in engine(method).stream(PROMPTS[0], sampling) for t in e.token_ids]
    assert tuple(streamed) == together[0]


STOPPED = [m.name for m in METHODS.values() if m.stops_when_unsure]


@pytest.mark.parametrize("method", [m for m in STOPPED if m not in ("plain", "bild")])
def test_drafts_that_stop_when_unsure(method: str) -> None:
    """Fewer tokens are drafted; outputs of lossless methods at temperature 0 do not change."""
    sampling = greedy(NUM) if method in GREEDY_ONLY else SAMPLING
    long = engine(method).generate(PROMPTS, sampling).stats
    short = engine(method, draft_confidence=0.5).generate(PROMPTS, sampling).stats
    assert short.drafted / short.rounds < long.drafted / long.rounds
    if engine(method).verifier_at(0).lossless:
        unsure = engine(method, draft_confidence=0.5).generate(PROMPTS, greedy(NUM))
        assert token_ids(unsure) == plain()


@pytest.mark.parametrize("method", [m for m in METHODS if m not in STOPPED])
def test_methods_without_draft_confidence_raise_an_error(method: str) -> None:
    with pytest.raises(IncompatibleError, match=f"draft_confidence=0.5.*{method}"):
        engine(method, draft_confidence=0.5)


@pytest.mark.parametrize("method", METHODS)
def test_temperature_zero_gives_the_argmax_for_lossless_rules(method: str) -> None:
    """Also in a batch with sampled rows, where greedy rows have point masses."""
    verified = engine(method)
    if not verified.verifier_at(0).lossless:
        pytest.skip("verifies by more than the argmax: test_greedy_by_logits.py")
    assert token_ids(verified.generate(PROMPTS, greedy(NUM))) == plain()
    if method not in GREEDY_ONLY:
        mixed = verified.generate(PROMPTS, [greedy(NUM), SAMPLING, greedy(NUM), SAMPLING])
        assert token_ids(mixed)[::2] == plain()[::2]


def test_a_verifier_of_the_users_own() -> None:
    """It replaces the method's verifier, at temperature 0 too."""
    from outrider.verifiers import Lenience

    own = engine_of(TARGET, DRAFT, "speculative", 4, verifier=Lenience(0.5))
    named = engine_of(TARGET, DRAFT, "lenience", 4, options={"lenience": 0.5})
    for sampling in (SAMPLING, greedy(NUM)):
        texts = [token_ids(e.generate(PROMPTS, sampling)) for e in (own, named)]
        assert texts[0] == texts[1]
