"""Draft-length policies in the engine: by name, with any method, independently for each row."""

import pytest
import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids

from outrider import Sampling, load
from outrider.core.errors import IncompatibleError, InvalidParameterError

TARGET = tiny("llama", 0, dtype=torch.float64)
DRAFT = tiny("llama", 3, dtype=torch.float64)
PROMPTS = ragged_prompts([5, 1, 9, 3, 6])
SAMPLING = Sampling(temperature=0.7, max_new_tokens=24, ignore_eos=True)
POLICIES = ["heuristic:3", "confidence:0.4", "survival:0.6"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("draft", [DRAFT, tiny("llama", 0, dtype=torch.float64)])
def test_greedy_output_equals_plain_decoding(policy: str, draft: object) -> None:
    plain = token_ids(engine_of(TARGET).generate(PROMPTS, greedy(18)))
    drafted = engine_of(TARGET, draft, γ=8, draft_length=policy)  # type: ignore[arg-type]
    assert token_ids(drafted.generate(PROMPTS, greedy(18))) == plain


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_of_a_batch_equal_rows_alone(policy: str) -> None:
    """The lengths decide where rounds begin, and so which random numbers a row uses.

    They must therefore depend on the row alone, although rows finish and join at different times.
    """
    sampling = [
        Sampling(temperature=0.7, max_new_tokens=n, ignore_eos=True) for n in (30, 7, 19, 12, 25)
    ]
    texts = [
        token_ids(
            engine_of(TARGET, DRAFT, γ=8, draft_length=policy, max_batch_size=rows).generate(
                PROMPTS, sampling
            )
        )
        for rows in (1, 3)
    ]
    assert texts[0] == texts[1]


def test_the_heuristic_lengthens_good_drafts_and_shortens_poor_ones() -> None:
    """A perfect draft gets longer from round to round, a poor one shorter."""
    perfect = engine_of(
        TARGET, tiny("llama", 0, dtype=torch.float64), γ=12, draft_length="heuristic:2"
    )
    poor = engine_of(TARGET, DRAFT, γ=12, draft_length="heuristic:8")
    long, short = (e.generate(PROMPTS[0:1], greedy(60)).stats for e in (perfect, poor))
    assert long.rounds == 7  # 3 + 5 + 7 + 9 + 11 + 13 tokens, and the 12 that are left
    assert short.drafted / short.rounds < 4


def test_the_confidence_policy_equals_draft_confidence() -> None:
    named = engine_of(TARGET, DRAFT, γ=6, draft_length="confidence:0.5")
    given = engine_of(TARGET, DRAFT, γ=6, draft_confidence=0.5)
    assert token_ids(named.generate(PROMPTS, SAMPLING)) == token_ids(
        given.generate(PROMPTS, SAMPLING)
    )


def test_the_heuristic_may_exceed_the_default_length() -> None:
    assert engine_of(TARGET, DRAFT, γ=None, draft_length="heuristic").num_speculative_tokens == 20
    assert engine_of(TARGET, DRAFT, γ=None).num_speculative_tokens == 5


def test_bad_policies_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(InvalidParameterError, match="draft_length='longer'"):
        load("/nowhere", draft_length="longer")
    with pytest.raises(IncompatibleError, match="no probabilities to stop by"):
        engine_of(TARGET, None, "plain", draft_length="survival")
