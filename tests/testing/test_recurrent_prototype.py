"""A recurrent model after ``core.SequenceState``: as target, as draft model and as a stage's
target, with the package's own drafters and rules. Nothing but the toy's state knows that it cannot
be cut back.

Legend: B rows.
"""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from outrider.core import (
    Budget,
    Context,
    Drafter,
    Lengths,
    SequenceState,
    Verifier,
    commit_round,
    run_round,
)
from outrider.drafters import ModelDrafter, NoDraft
from outrider.drafters.chain.staged import StagedDrafter
from outrider.drafters.lookup.prompt_lookup import PromptLookup
from outrider.testing import (
    RecurrentState,
    RecurrentToy,
    SoftmaxDistribution,
    ToyDrafter,
    ToyModel,
    check_drafter,
    check_model,
    chi2,
    enumerate_round,
)
from outrider.verifiers import Greedy, Rejection

V = 3
TABLE, OTHER = ToyModel.random(V, seed=1), ToyModel.random(V, seed=2)
TARGET, DRAFT = RecurrentToy(TABLE), RecurrentToy(OTHER)
PROMPTS = [[0, 1], [2], [1, 1, 2, 0, 2]]


def drafter_over(toy: RecurrentToy, **settings: Any) -> ModelDrafter:
    """The package's drafter, which knows its model by ``start``, ``extend`` and ``join`` alone."""
    return ModelDrafter(cast(Any, toy), V, **settings)


def staged_over(toy: RecurrentToy) -> StagedDrafter:
    return StagedDrafter(cast(Any, toy), V, PromptLookup(), Rejection(), Greedy())


def decoded(drafter: Drafter[Any], rule: Verifier, greedy: bool, γ: Sequence[int]) -> list[Any]:
    """Tokens of three rows after rounds of these draft lengths; a row leaves and one joins."""

    def started(prompts: list[list[int]], first: int) -> tuple[Context, Any, Any]:
        B = len(prompts)
        requests = range(first, first + B)
        context = Context.start(prompts, SoftmaxDistribution(greedy), [5] * B, requests)
        return context, TARGET.start(context), drafter.start(context)

    context, cache, state = started(PROMPTS, 0)
    for number, num_tokens in enumerate(γ):
        parts = context, TARGET, cache, drafter, state
        round_ = run_round(*parts, rule, Budget(num_tokens))
        commit_round(*parts, round_, round_.verdict.num_accepted_B.tolist())
        if number == len(γ) // 2:
            for each in (cache, state, context):
                each.keep([2, 1])
            newcomer, their_cache, their_state = started([[1, 0]], 7)
            TARGET.join(cache, their_cache)
            drafter.join(state, their_state)
            context.join(newcomer)
    return [row[:n].tolist() for row, n in zip(context.tokens_BT, context.lengths, strict=True)]


def test_the_state_has_the_interface_and_the_model_keeps_its_contract() -> None:
    """Chains and trees: scores equal those from scratch after commit, keep and join."""
    context = Context.start(PROMPTS, SoftmaxDistribution(), [0] * 3, range(3))
    state: SequenceState = TARGET.start(context)
    assert state.sequence_lengths.host == [1, 0, 4]
    check_model(TARGET, V)


def test_a_snapshot_is_returned_to() -> None:
    """Also past snapshots that a rollback has dropped, and beyond those that are kept."""
    context = Context.start([[0] * 30, [1] * 20], SoftmaxDistribution(), [0, 0], [0, 1])
    state = TARGET.start(context)
    wanted = TARGET.extend(state, torch.tensor([[1], [2]]))
    snapshot = state.snapshot()
    for step in range(20):
        state.run(torch.full((2, 2), step % V))
        state.append(Lengths.of([2, 1]))
    state.rollback(snapshot.lengths + 1)
    state.restore(snapshot)
    assert state.lengths == [29, 19]
    assert torch.equal(TARGET.extend(state, torch.tensor([[1], [2]])), wanted)
    fresh = TARGET.start(Context.start([[0] * 4, [1] * 3], SoftmaxDistribution(), [0, 0], [0, 1]))
    state.rollback(Lengths.of([3, 2]))
    tokens_BN = torch.tensor([[1, 2], [2, 0]])
    assert torch.equal(TARGET.extend(state, tokens_BN), TARGET.extend(fresh, tokens_BN))


@pytest.mark.parametrize("make", [drafter_over, staged_over])
def test_the_drafter_keeps_its_contract(make: Any) -> None:
    """False alarms: see ``check_drafter``, below 1e-6."""
    check_drafter(make(DRAFT), V)


def test_a_round_has_exactly_the_targets_distribution() -> None:
    """ENUM, in either role; the draft is worth as much as the same table without recurrence."""
    plain = enumerate_round(TABLE, ToyDrafter(OTHER), Rejection(), 2)
    for drafter in (ToyDrafter(OTHER), ToyDrafter(OTHER, 2), drafter_over(DRAFT)):
        done = enumerate_round(TARGET, drafter, Rejection(), 2)
        assert done.total_variation < 1e-12
        if not isinstance(drafter, ToyDrafter) or drafter.width == 1:
            assert done.acceptance_length == pytest.approx(plain.acceptance_length)


def test_many_rounds_have_the_targets_distribution() -> None:
    """CHI2. A correct model fails with probability 1e-4 (seed fixed)."""
    assert chi2(TARGET, drafter_over(DRAFT), Rejection(), 3, num_rows=30_000) > 1e-4


@pytest.mark.parametrize("drafter", [drafter_over(DRAFT), staged_over(DRAFT), drafter_over(TARGET)])
def test_greedy_decoding_equals_plain_decoding(drafter: Drafter[Any]) -> None:
    """Token for token, in rounds that accept all, some or nothing, while rows leave and join."""
    plain = decoded(NoDraft(), Greedy(), True, [0] * 24)
    found = decoded(drafter, Greedy(), True, [3, 0, 4, 1, 2, 5])
    for row, wanted in zip(found, plain, strict=True):
        assert row == wanted[: len(row)]


def test_a_state_that_is_not_replayed_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """MUT."""

    def wrong(self: RecurrentState) -> None:
        self._num_read = self.lengths

    monkeypatch.setattr(RecurrentState, "_replay", wrong)
    with pytest.raises(AssertionError, match="differ from scoring each path from scratch"):
        check_model(TARGET, V)
