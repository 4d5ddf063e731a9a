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


TABLE = [[1, 2, 4], [3, 3, 0], [4, 9, 2]]


@pytest.mark.parametrize("width", [64, 3])
@pytest.mark.parametrize("same", [True, False])
def test_greedy_output_by_a_table_equals_plain_decoding(
    width: int, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows end at different times, so that the draft's cache falls behind and catches up."""
    monkeypatch.setattr("outrider.drafters.chain.model.BACKLOG_WIDTH", width)
    draft = tiny("llama", 0 if same else 3, dtype=torch.float64)
    sampling = [greedy(n) for n in (90, 4, 60, 11, 75)]
    plain = token_ids(engine_of(TARGET).generate(PROMPTS, sampling))
    engine = engine_of(TARGET, draft, γ=None, draft_length=TABLE)
    assert engine.num_speculative_tokens == 4
    results = engine.generate(PROMPTS, sampling)
    assert token_ids(results) == plain
    if same:
        assert results[1].stats.drafted  # five rows: two tokens
        assert results[0].stats.accepted_at[3]  # at last alone: four tokens


def test_rounds_of_length_0_run_no_draft_model() -> None:
    engine = engine_of(TARGET, DRAFT, γ=None, draft_length=[[1, 1, 3], [2, 8, 0]])
    assert engine.draft is not None
    results = engine.generate(PROMPTS[:2], greedy(20))
    assert [result.stats.drafted for result in results] == [0, 0]


def test_a_table_falls_back_to_a_cache_read_anew() -> None:
    """A short row joins while the others' drafts are far behind."""
    table = [[1, 2, 0], [3, 8, 3]]
    engine = engine_of(TARGET, DRAFT, γ=None, draft_length=table, max_batch_size=3)
    prompts = [*PROMPTS[:2], PROMPTS[1]]
    scheduler = engine.new_scheduler()
    rows = {}
    for prompt in prompts[:2]:
        scheduler.add(engine.request(prompt, greedy(80)))
    for step in range(100):
        if step == 60:
            scheduler.add(engine.request(prompts[2], greedy(20)))
        rows |= dict(scheduler.step())
    plain = token_ids(engine_of(TARGET).generate(prompts, [greedy(80), greedy(80), greedy(20)]))
    assert [list(row.token_ids) for row in rows.values()] == [list(ids) for ids in plain]
    assert list(rows.values())[2].stats.drafted


@pytest.mark.parametrize(
    "method", ["eagle3", "dflash", "medusa", "prompt-lookup", "suffix", "early-exit", "sequoia"]
)
def test_a_table_bounds_the_drafts_of_any_method(method: str) -> None:
    """Greedy output stays that of plain decoding, through rounds without drafts."""
    target = tiny("llama", 0, dtype=torch.float64, num_hidden_layers=4)
    sampling = [greedy(n) for n in (40, 4, 22, 9)]
    plain = token_ids(engine_of(target).generate(PROMPTS[:4], sampling))
    draft = DRAFT if method == "sequoia" else None
    engine = engine_of(target, draft, method, γ=None, draft_length=[[1, 2, 2], [3, 8, 0]])
    results = engine.generate(PROMPTS[:4], sampling)
    assert token_ids(results) == plain
    assert results[1].stats.drafted == 0
    assert results[0].stats.rounds
