"""Requests of different settings in one batch: each row is what it is in an engine of its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids

from outrider import Sampling, Speculation
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.engine.running_batch import RunningBatch

TARGET = tiny(dtype=torch.float64, std=0.2)
DRAFT = tiny(dtype=torch.float64, seed=1, std=0.2)
PROMPTS = ragged_prompts([5, 1, 9, 3, 6, 4])
SAMPLING = Sampling(temperature=0.8, max_new_tokens=24, ignore_eos=True)

EACH = [
    None,
    Speculation(method="plain"),
    Speculation(method="block"),
    Speculation(method="mentored", divergence_budget=0.2),
    Speculation(method="mentored", options={"budget": 0.6}, num_speculative_tokens=2),
    Speculation(num_speculative_tokens=0),
]
ALONE: list[tuple[str, int, dict[str, Any]]] = [
    ("speculative", 4, {}),
    ("plain", 4, {}),
    ("block", 4, {}),
    ("mentored", 4, {"budget": 0.2}),
    ("mentored", 2, {"budget": 0.6}),
]


def test_each_row_equals_the_row_of_an_engine_with_its_settings(
    batches: list[RunningBatch],
) -> None:
    """Token for token at the same seed, and in one batch."""
    mixed = engine_of(TARGET, DRAFT).generate(PROMPTS, SAMPLING, speculation=EACH)
    assert len(batches) == 1
    for row, (method, γ, options) in enumerate(ALONE):
        draft = None if method == "plain" else DRAFT
        alone = engine_of(TARGET, draft, method, γ, options=options)
        assert alone.generate([PROMPTS[row]], SAMPLING)[0].token_ids == mixed[row].token_ids
    assert mixed[1].stats.drafted == mixed[5].stats.drafted == 0
    assert mixed[0].stats.drafted > 0


def test_only_rows_of_lossy_rules_diverge() -> None:
    mixed = engine_of(TARGET, DRAFT).generate(PROMPTS, SAMPLING, speculation=EACH)
    alone = engine_of(TARGET, DRAFT, "mentored", options={"budget": 0.2})
    assert mixed[3].stats.kl == pytest.approx(alone.generate([PROMPTS[3]], SAMPLING)[0].stats.kl)
    assert mixed[3].stats.measured > 0
    assert 0 < mixed[3].stats.kl_per_token <= 0.2
    for row in (0, 1, 2, 5):
        assert (mixed[row].stats.measured, mixed[row].stats.kl) == (0, 0.0)


def test_lossless_rows_of_a_lossy_engine() -> None:
    lossy = engine_of(TARGET, DRAFT, "mentored", options={"budget": 0.5})
    own = [None, Speculation(method="speculative")]
    found = lossy.generate(PROMPTS[:2], SAMPLING, speculation=own)
    (exact,) = engine_of(TARGET, DRAFT).generate(PROMPTS[1:2], SAMPLING)
    assert found[1].token_ids == exact.token_ids
    assert found[0].stats.measured > 0 == found[1].stats.measured


def test_greedy_rows_are_plain_decodings_whatever_their_rule() -> None:
    plain = token_ids(engine_of(TARGET).generate(PROMPTS, greedy(18)))
    found = engine_of(TARGET, DRAFT).generate(PROMPTS, greedy(18), speculation=EACH)
    assert token_ids(found) == plain
    mixed = [greedy(18) if row % 2 else SAMPLING for row in range(6)]
    rows = engine_of(TARGET, DRAFT).generate(PROMPTS, mixed, speculation=EACH)
    assert [row.token_ids for row in rows][1::2] == plain[1::2]


def test_streams_and_requests_take_settings_too() -> None:
    engine = engine_of(TARGET, DRAFT)
    off = Speculation(num_speculative_tokens=0)
    assert engine.generate(PROMPTS[:1], SAMPLING, speculation=off).stats.drafted == 0
    origins = [e.origins for e in engine.stream(PROMPTS[0], SAMPLING, speculation=off)]
    assert {origin for each in origins for origin in each} == {"plain"}
    assert engine.request(PROMPTS[0], speculation=off).num_speculative_tokens == 0
    assert engine.request(PROMPTS[0], num_speculative_tokens=3).num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("method", "own", "error", "words"),
    [
        ("speculative", Speculation(num_speculative_tokens=5), InvalidParameterError, "to 4"),
        ("speculative", Speculation(num_speculative_tokens=True), InvalidParameterError, "whole"),
        ("speculative", Speculation(method="nothing"), ValueError, "nothing"),
        ("speculative", Speculation(method="prompt-lookup"), IncompatibleError, "one drafter"),
        ("speculative", Speculation(method="ensemble"), IncompatibleError, "one drafter"),
        ("speculative", Speculation(divergence_budget=0.1), InvalidParameterError, "mentored"),
        ("speculative", Speculation(method="mentored", divergence_budget=-1), ValueError, "budget"),
        ("speculative", Speculation(options={"budget": 1}), ValueError, "budget"),
        ("speculative", Speculation(method="relaxed"), IncompatibleError, "whole batches"),
        ("plain", Speculation(method="speculative"), IncompatibleError, "one drafter"),
        ("prompt-lookup", Speculation(options={"prompt_lookup_max": 2}), ValueError, "drafts"),
    ],
)
def test_settings_that_do_not_fit_the_engine(
    method: str, own: Speculation, error: type[Exception], words: str
) -> None:
    draft = DRAFT if method == "speculative" else None
    with pytest.raises(error, match=words):
        engine_of(TARGET, draft, method).generate(PROMPTS[:1], SAMPLING, speculation=own)


@pytest.mark.parametrize("given", ["off", 0, [Speculation()], [None, 1]])
def test_what_is_no_speculation(given: Any) -> None:
    generate: Callable[..., Any] = engine_of(TARGET, DRAFT).generate
    with pytest.raises(InvalidParameterError, match="speculation"):
        generate(PROMPTS[:2], SAMPLING, speculation=given)
