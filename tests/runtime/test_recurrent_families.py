"""Every family of recurrent and hybrid models gives, through the engine, what it gives through
``transformers``, and returns to the state after any number of accepted tokens.

Legend: B rows, N query tokens.
"""

from typing import Any

import pytest
import torch
from tiny_models import engine_of, greedy, hf_generate, ragged_prompts, token_ids, uniform_method
from tiny_recurrent import FAMILIES, tiny_recurrent

from outrider.core import Context, Draft, Lengths
from outrider.drafters.chain.model import ModelDrafter
from outrider.engine.round_times import measure_round_times
from outrider.runtime import RecurrentCache, RecurrentModel
from outrider.runtime.prefill import unsampled_context
from outrider.testing import SoftmaxDistribution, check_model

LENGTHS = [1, 14, 5, 23]  # the sliding windows are 8 wide
NUM = 12


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def target(family: str) -> RecurrentModel:
    return tiny_recurrent(family, name="target")


@pytest.fixture(scope="module")
def expected(target: RecurrentModel) -> list[tuple[int, ...]]:
    """What ``transformers`` continues each prompt with, alone."""
    texts = [hf_generate(target.module, p, NUM) for p in ragged_prompts(LENGTHS)]
    assert all(len(set(text)) >= 6 for text in texts), "degenerate outputs prove nothing"
    return texts


def test_plain_batch_equals_transformers(
    target: RecurrentModel, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts that take several forward passes, in which some rows end before others."""
    monkeypatch.setattr("outrider.runtime.prefill.PREFILL_WIDTH", 6)
    results = engine_of(target).generate(ragged_prompts(LENGTHS), greedy(NUM))
    assert token_ids(results) == expected


@pytest.mark.parametrize("quality", ["good", "bad", "random"])
def test_speculative_equals_plain(
    family: str, target: RecurrentModel, expected: list[tuple[int, ...]], quality: str
) -> None:
    """The draft model is recurrent, too, where there is one."""
    if quality == "random":
        engine = engine_of(target, None, uniform_method(), 3)
    else:
        draft = target.in_role("draft") if quality == "good" else tiny_recurrent(family, seed=1)
        engine = engine_of(target, draft, γ=3)
    results = engine.generate(ragged_prompts(LENGTHS), greedy(NUM))
    assert token_ids(results) == expected
    assert (results.stats.acceptance_rate > 0.9) == (quality == "good")


def test_governed_drafts_are_not_reviewed(
    family: str,
    target: RecurrentModel,
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither when the times of rounds are measured nor while requests run: the states of a
    recurrent draft model are those of all tokens."""
    monkeypatch.setattr("outrider.engine.round_times._LARGEST", 1)  # one batch size is enough
    auto: Any = "auto"
    engine = engine_of(target, tiny_recurrent(family, seed=1), γ=auto, max_batch_size=len(LENGTHS))
    assert engine.governor is not None
    measure_round_times(engine)
    results = engine.generate(ragged_prompts(LENGTHS), greedy(NUM))
    assert token_ids(results) == expected
    context = unsampled_context(target, list(range(2, 40)))
    assert isinstance(engine.drafter, ModelDrafter)
    assert engine.drafter.review(None, context, 4) is None


def close(found: RecurrentCache, wanted: RecurrentCache) -> None:
    """Asserts that two caches hold the same states."""
    assert found.lengths == wanted.lengths
    assert found._states.keys() == wanted._states.keys()
    for key, states in wanted._states.items():
        for one, other in zip(found._states[key], states, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=str(key))


@torch.inference_mode()
def from_scratch(target: RecurrentModel, tokens: list[list[int]]) -> RecurrentCache:
    """A cache of these tokens, of each row read alone."""
    caches = [target.start(unsampled_context(target, [*row, 0])) for row in tokens]
    for cache in caches[1:]:
        target.join(caches[0], cache)
    assert isinstance(caches[0], RecurrentCache)
    return caches[0]


@torch.inference_mode()
def test_rollback_after_any_number_of_accepted_tokens(target: RecurrentModel) -> None:
    """Rows that keep k and 4 - k of 4 query tokens, for every k, have the states that the kept
    tokens alone lead to. So after one forward pass over all 4, and after four passes over one."""
    prompts, queries_BN = [[3, 1, 4], [1, 5, 9, 2, 6]], torch.tensor([[5, 3, 5, 8], [9, 7, 9, 3]])
    for k in range(5):
        kept = [k, 4 - k]
        rows = [p + q[:n].tolist() for p, q, n in zip(prompts, queries_BN, kept, strict=True)]
        wanted = from_scratch(target, rows)
        cache = target.start(
            Context.start([[*p, 0] for p in prompts], SoftmaxDistribution(), [9] * 2, [0, 1])
        )
        target.extend(cache, queries_BN)
        cache.append(Lengths.of(kept))
        close(cache, wanted)
        cache.rollback(Lengths.of([3, 5]))
        for token_B in queries_BN.unbind(1):
            target.extend(cache, token_B[:, None])
            cache.append(1)
        cache.rollback(Lengths.of([3 + k, 9 - k]))
        close(cache, wanted)


@torch.inference_mode()
def test_logits_do_not_depend_on_how_tokens_share_passes(target: RecurrentModel) -> None:
    """Several tokens after others, in two rows, against one pass of ``transformers`` over all of
    each row: a layer that begins with an empty state, or with another row's, would show."""
    tokens = ragged_prompts([12, 9], seed=3)
    context = Context.start(
        [row[:n] for row, n in zip(tokens, (5, 2), strict=True)],
        SoftmaxDistribution(),
        [9] * 2,
        [0, 1],
    )
    cache = target.start(context)
    found_BNV = target.extend(cache, torch.tensor([tokens[0][4:12], tokens[1][1:9]]))
    for row, (text, first) in enumerate(zip(tokens, (4, 1), strict=True)):
        whole_NV = target.module(input_ids=torch.tensor([text]), use_cache=True).logits[0]
        torch.testing.assert_close(found_BNV[row], whole_NV[first:], rtol=1e-3, atol=1e-4)


@torch.inference_mode()
def test_hidden_states_are_recorded(target: RecurrentModel) -> None:
    """Of the first layer and after the final norm, which is the last that ``transformers`` hands
    out; from several tokens after others."""
    (tokens,) = ragged_prompts([9], seed=4)
    recording = target.with_hidden_states([1, target.num_layers])
    cache = recording.start(Context.start([tokens[:4]], SoftmaxDistribution(), [9], [0]))
    draft = Draft.chain(torch.tensor([tokens[3:]]), None, None, "chosen")
    found_BNH = recording.score(cache, draft).hidden_BNH
    ids = torch.tensor([tokens])
    whole = target.module(input_ids=ids, use_cache=True, output_hidden_states=True)
    assert found_BNH is not None
    last_NH = whole.hidden_states[-1][0, 3:]
    torch.testing.assert_close(found_BNH[0, :, last_NH.shape[1] :], last_NH, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_scores_after_commits_keeps_and_joins(family: str) -> None:
    check_model(tiny_recurrent(family, vocab_size=7), 7, trees=False, atol=1e-4)
