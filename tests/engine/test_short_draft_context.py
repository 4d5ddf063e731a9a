"""A draft model with a shorter context than the target's: outputs are not shortened.

Tokens are drafted as long as the draft's context has room.
"""

from typing import Any

import pytest
import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids
from tiny_seq2seq import tiny_seq2seq

from outrider import Engine, Sampling, Speculation
from outrider.core.errors import IncompatibleError, NonFiniteLogitsError
from outrider.methods import METHODS

LIMIT, CONTEXT, NUM = 16, 64, 24
TARGET = tiny(max_position_embeddings=CONTEXT)
PROMPTS = ragged_prompts([3, 13, 15, 16, 30])
METHODS_WITH_A_MODEL = {
    "speculative": {},
    "block": {},
    "coupled": {},
    "sequoia": {},
    "specinfer": {},
    "top-k-tree": {},
    "dynamic-tree": {},
    "traversal": {},
    "spectr": {},
    "staged": {},
    "hybrid": {},
    "hybrid, tree": {"mode": "tree"},
    "hybrid, bandit": {"mode": "bandit"},
}


def short(seed: int = 0, limit: int = LIMIT, std: float = 0.28) -> Any:
    """A draft model whose tokens are often accepted."""
    return tiny(seed=seed, max_position_embeddings=limit, std=std, name="draft")


def engine(method: str, **settings: Any) -> Engine:
    options = METHODS_WITH_A_MODEL[method]
    return engine_of(TARGET, short(), method.split(",")[0], γ=3, options=options, **settings)


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    return token_ids(engine_of(TARGET).generate(PROMPTS, greedy(NUM)))


@pytest.mark.parametrize("method", METHODS_WITH_A_MODEL)
def test_outputs_equal_plain_decoding(method: str, expected: list[tuple[int, ...]]) -> None:
    each = engine(method, max_batch_size=3)  # rows leave the draft, and others join the batch
    assert (each.limit, each.shared_limit) == (CONTEXT, LIMIT)
    results = each.generate(PROMPTS, greedy(NUM))
    assert token_ids(results) == expected
    if "bandit" not in method:  # the bandit tries the cheaper sources first
        assert results[0].stats.accepted > 0, "the draft helps while it has room"
    assert results[0].origins[-5:] == ("plain",) * 5 or "hybrid" in method
    if "hybrid" not in method:
        assert results[4].stats.drafted == 0, "the prompt is longer than the draft's context"


def test_hybrids_copy_beyond_the_draft_models_context() -> None:
    prompt = ragged_prompts([6])[0] * 5
    result = engine("hybrid").generate([prompt], greedy(20))[0]
    assert result.stats.drafted > 0


@pytest.mark.parametrize("draft_length", ["heuristic", "confidence:0.2"])
def test_with_a_policy(draft_length: str, expected: list[tuple[int, ...]]) -> None:
    results = engine("speculative", draft_length=draft_length).generate(PROMPTS, greedy(NUM))
    assert token_ids(results) == expected


def test_sampled_outputs_do_not_depend_on_their_batch() -> None:
    """Rows that stay in the draft's batch keep their random numbers."""
    each = engine("speculative")
    sampling = Sampling(temperature=0.8, repetition_penalty=1.2, max_new_tokens=NUM)
    samplings = [sampling if i % 2 else Sampling(max_new_tokens=NUM) for i in range(len(PROMPTS))]
    together = each.generate(PROMPTS, samplings)
    alone = [each.generate([p], s)[0] for p, s in zip(PROMPTS, samplings, strict=True)]
    assert token_ids(together) == token_ids(alone)
    assert [r.finish_reason for r in together] == ["length"] * len(PROMPTS)


@pytest.mark.parametrize("method", METHODS_WITH_A_MODEL)
def test_all_rows_that_the_draft_sees_may_draft_nothing(method: str) -> None:
    """While a row beyond its context may draft."""
    each, sampling = engine(method), Sampling(temperature=0.8, max_new_tokens=8, ignore_eos=True)
    prompts, none = [PROMPTS[0], PROMPTS[4]], Speculation(num_speculative_tokens=0)
    results = each.generate(prompts, sampling, speculation=[none, None])
    alone = each.generate(prompts[:1], sampling, speculation=none)[0]
    assert results[0].token_ids == alone.token_ids
    assert results[0].stats.drafted == 0


@pytest.mark.parametrize("method", METHODS_WITH_A_MODEL)
def test_rows_that_the_draft_sees_may_all_be_greedy(
    method: str, expected: list[tuple[int, ...]]
) -> None:
    """While a row beyond its context samples, so that the batch's rule verifies draws."""
    sampled = Sampling(temperature=0.8, max_new_tokens=NUM, ignore_eos=True)
    results = engine(method).generate([PROMPTS[0], PROMPTS[4]], [greedy(NUM), sampled])
    assert results[0].token_ids == expected[0]


def test_a_damaged_draft_ends_its_row_only() -> None:
    """Beside a row beyond its context."""
    draft = short()
    with torch.no_grad():
        draft.module.get_input_embeddings().weight[PROMPTS[0][-1]] = torch.nan
    each = engine_of(TARGET, draft, "speculative", γ=3)
    with pytest.raises(NonFiniteLogitsError, match="draft") as caught:
        each.generate([PROMPTS[0], PROMPTS[4]], greedy(4))
    first, other = caught.value.results  # type: ignore[attr-defined]
    assert first is None
    assert len(other.token_ids) == 4


def test_outputs_of_coupled_sampling_depend_on_the_seed_only() -> None:
    sampling = Sampling(temperature=0.8, max_new_tokens=NUM)
    both = [engine_of(TARGET, method="coupled", draft=short(), γ=3), engine("coupled")]
    plain = engine_of(TARGET, tiny(seed=5, max_position_embeddings=CONTEXT), "coupled")
    wanted = token_ids(plain.generate(PROMPTS, sampling))
    assert [token_ids(each.generate(PROMPTS, sampling)) for each in both] == [wanted, wanted]


@pytest.mark.parametrize("method", ["mjsd", "mtad"])
def test_joint_methods_continue_beyond_the_draft_context(method: str) -> None:
    each = engine_of(TARGET, short(), METHODS[method], γ=3)
    results = each.generate(PROMPTS, Sampling(max_new_tokens=NUM, ignore_eos=True))
    assert [len(result.token_ids) for result in results] == [NUM] * len(PROMPTS)


def test_encoder_decoders() -> None:
    """With outputs and sources longer than the draft's context."""
    target = tiny_seq2seq("bart", max_position_embeddings=64)
    draft = tiny_seq2seq("bart", max_position_embeddings=16, std=0.19)
    sources = ragged_prompts([5, 16, 17, 30])
    wanted = token_ids(engine_of(target).generate(sources, greedy(30)))
    results = engine_of(target, draft).generate(sources, greedy(30))
    assert token_ids(results) == wanted
    assert results[0].stats.drafted > 0
    assert results[2].stats.drafted == 0


def test_memory_is_reserved_for_the_targets_context() -> None:
    each = engine("speculative", max_memory="4MiB")
    results = each.generate(PROMPTS, greedy(NUM))
    assert [len(result.token_ids) for result in results] == [NUM] * len(PROMPTS)


def test_a_context_of_one_token_is_too_short() -> None:
    with pytest.raises(IncompatibleError, match="draft has a context of 1 token"):
        engine_of(TARGET, short(limit=1))
