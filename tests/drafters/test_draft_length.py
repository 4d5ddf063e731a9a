"""Draft lengths: every policy preserves the target's distribution, and stops or grows as specified.

Legend: B rows, N nodes.
"""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, ragged_prompts, tiny

from outrider import Sampling
from outrider.core import Budget, Capabilities, Context, Draft, Scores, Stream, Verdict, Verifier
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.drafters import ModelDrafter
from outrider.drafters.chain.draft_length import (
    DraftLength,
    HeuristicLength,
    LengthByRows,
    LengthState,
    Stopped,
)
from outrider.drafters.chain.length_table import LengthTable
from outrider.drafters.chain.stop import Both, Confidence, Stop, Survival
from outrider.sampling import Warp
from outrider.testing import (
    SoftmaxDistribution,
    ToyDrafter,
    ToyModel,
    check_drafter,
    chi2,
    enumerate_round,
)
from outrider.verifiers import Block, Rejection

TARGET, DRAFT = ToyModel.random(3, seed=1), ToyModel.random(3, seed=2)
STOPS = [Confidence(0.3), Survival(0.7), Both(Confidence(0.2), Survival(0.6))]


@functools.cache
def acceptance_length(rule: Verifier, width: int) -> float:
    """For drafts that are not cut: a chain of two tokens, or a tree of two with one below."""
    return enumerate_round(TARGET, ToyDrafter(DRAFT, width), rule, width + 1).acceptance_length


@pytest.mark.parametrize(
    ("stop", "rule", "width"),
    [
        (STOPS[0], Rejection(), 1),
        (STOPS[1], Rejection(), 1),
        (STOPS[1], Block(), 1),
        (STOPS[0], Rejection(), 2),
        (STOPS[2], Rejection(), 2),
    ],
)
def test_a_round_that_stops_has_exactly_the_targets_distribution(
    stop: Stop, rule: Verifier, width: int
) -> None:
    """ENUM. Some drafts are cut, others are not."""
    done = enumerate_round(TARGET, Stopped(ToyDrafter(DRAFT, width), stop), rule, width + 1)
    assert done.total_variation < 1e-12
    assert done.acceptance_length < acceptance_length(rule, width) - 1e-3
    assert max(len(tokens) for tokens in done.emitted) == 3


class Dropping(Stopped):
    """Wrong: the token that stops the draft is removed from it."""

    def propose(self, state: Any, context: Context, budget: Budget, rng: Stream) -> Draft:
        draft = super().propose(state, context, budget, rng)
        assert draft.probs_BNV is not None
        q_BD = draft.probs_BNV[:, :-1].gather(2, draft.tokens_BN[:, 1:, None])[..., 0]
        sure_BD = self.stop.goes_on(q_BD, q_BD.cumprod(1))
        sure_BN = torch.nn.functional.pad(sure_BD, (1, 0), value=True)
        return replace(draft, mask_BN=draft.mask_BN & sure_BN)


@pytest.mark.parametrize("stop", STOPS)
def test_dropping_the_stopping_token_would_show(stop: Stop) -> None:
    """MUT."""
    done = enumerate_round(TARGET, Dropping(ToyDrafter(DRAFT), stop), Rejection(), 2)
    assert done.total_variation > 1e-3


@pytest.mark.parametrize("stop", STOPS)
def test_a_cut_draft_keeps_the_contract(stop: Stop) -> None:
    """False alarms: see ``check_drafter``, below 1e-6."""
    model = ToyModel.random(5, seed=3)
    check_drafter(Stopped(ToyDrafter(model), stop), 5)
    check_drafter(Stopped(ToyDrafter(model, 2, "distinct"), stop), 5, 6)


@pytest.mark.parametrize("stop", STOPS)
def test_cutting_equals_stopping_inside_the_drafter(stop: Stop) -> None:
    """``Stopped`` and the stop inside ``ModelDrafter`` agree, and stop at the expected token."""
    model, B = tiny("llama", 1), 48
    distribution = Warp([Sampling(temperature=0.6)] * B, VOCAB)
    context = Context.start(ragged_prompts([4] * B), distribution, [0] * B, range(B))
    drafters = (ModelDrafter(model, VOCAB, stop), Stopped(ModelDrafter(model, VOCAB), stop))
    with torch.inference_mode():
        itself, cut = (
            drafter.propose(drafter.start(context), context, Budget(6), context.rng)
            for drafter in drafters
        )
    assert itself.num_drafted_B.tolist() == cut.num_drafted_B.tolist()
    assert len(set(cut.num_drafted_B.tolist())) > 2
    assert cut.probs_BNV is not None
    q_BD = cut.probs_BNV[:, :-1].gather(2, cut.tokens_BN[:, 1:, None])[..., 0]
    goes_BD = stop.goes_on(q_BD, q_BD.cumprod(1))
    for goes, n in zip(goes_BD.tolist(), cut.num_drafted_B.tolist(), strict=True):
        assert n == next((i + 1 for i, on in enumerate(goes) if not on), cut.num_nodes - 1)


def test_survival_is_the_product() -> None:
    q = torch.tensor([0.9, 0.9, 0.9, 0.9])
    assert Survival(0.3).goes_on(q, q.cumprod(0)).tolist() == [True, True, True, False]
    assert bool(Survival(1.0).goes_on(q, torch.zeros(4)).all())
    assert Confidence(0.9).goes_on(torch.tensor([0.95, 0.85]), q[:2]).tolist() == [True, False]


# ---------------------------------------------------------------------------------- the heuristic


@pytest.mark.parametrize("start", [1, 2, 9])
@pytest.mark.parametrize("rule", [Rejection(), Block()])
def test_a_round_of_any_length_has_exactly_the_targets_distribution(
    start: int, rule: Verifier
) -> None:
    """ENUM at every length that a row may have reached; longer ones end at the budget."""
    done = enumerate_round(TARGET, HeuristicLength(ToyDrafter(DRAFT), start), rule, 2)
    plain = enumerate_round(TARGET, ToyDrafter(DRAFT), rule, min(start, 2), length=3)
    assert done.total_variation < 1e-12
    assert done.acceptance_length == pytest.approx(plain.acceptance_length)


def test_many_rounds_of_changing_length_have_the_targets_distribution() -> None:
    """CHI2: lengths of later rounds depend on what earlier ones accepted. A correct drafter
    fails with probability 1e-4 (seed fixed)."""
    drafter = HeuristicLength(ToyDrafter(DRAFT), 1)
    assert chi2(TARGET, drafter, Rejection(), 2, length=3, num_rows=200_000) > 1e-4


def run(drafter: HeuristicLength, state: LengthState, context: Context, accepted: list[int]) -> Any:
    """One round that accepts these numbers of tokens per row, or all drafted ones if fewer."""
    draft = drafter.propose(state, context, Budget(8), context.rng)
    drafted = draft.num_drafted_B.tolist()
    count_B = torch.minimum(draft.num_drafted_B, torch.tensor(accepted))
    path_BD = torch.arange(1, draft.num_nodes).expand(len(drafted), -1)
    verdict = Verdict(path_BD, count_B, torch.zeros_like(count_B)).read()
    drafter.commit(state, draft, verdict, Scores(torch.zeros(1)))
    context.append(verdict.emitted(draft), verdict.num_emitted)
    return drafted


def test_lengths_follow_their_rows() -> None:
    """+2 if all was accepted, else -1, between 1 and the budget; rows keep their lengths as others
    leave and join."""

    def started(B: int) -> tuple[Context, LengthState]:
        context = Context.start([[0, 1]] * B, SoftmaxDistribution(), [0] * B, range(B))
        return context, drafter.start(context)

    drafter = HeuristicLength(ToyDrafter(DRAFT), 3)
    context, state = started(3)
    assert run(drafter, state, context, [9, 2, 0]) == [3, 3, 3]
    assert run(drafter, state, context, [9, 1, 0]) == [5, 2, 2]
    assert run(drafter, state, context, [9, 0, 9]) == [7, 1, 1]
    assert run(drafter, state, context, [0, 1, 0]) == [8, 1, 3]  # 9, but for the budget
    state.keep([2, 1])
    context.keep([2, 1])
    newcomers, joining = started(1)
    context.join(newcomers)
    drafter.join(state, joining)
    assert run(drafter, state, context, [9, 9, 9]) == [2, 3, 3]
    assert run(drafter, state, context, [0, 0, 0]) == [4, 5, 5]


def test_an_uncommitted_proposal_changes_no_length() -> None:
    drafter = HeuristicLength(ToyDrafter(DRAFT), 4)
    context = Context.start([[0, 1]], SoftmaxDistribution(), [0], [0])
    state = drafter.start(context)
    lengths = [
        drafter.propose(state, context, Budget(n), context.rng).num_nodes - 1 for n in (6, 2, 0, 6)
    ]
    assert lengths == [4, 2, 0, 4]


def test_a_row_that_drafted_nothing_keeps_its_length() -> None:
    drafter = HeuristicLength(ToyDrafter(DRAFT), 4)
    context = Context.start([[0, 1]], SoftmaxDistribution(), [0], [0])
    state = drafter.start(context)
    draft = drafter.propose(state, context, Budget(0), context.rng)
    zero_B = torch.zeros(1, dtype=torch.int64)
    verdict = Verdict(zero_B[:, None], zero_B, zero_B).read()
    drafter.commit(state, draft, verdict, Scores(torch.zeros(1)))
    assert state.next_B.tolist() == [4]


def test_wrappers_declare_the_capabilities_of_the_wrapped_drafter() -> None:
    own = Capabilities(
        models=("m",),
        target="t",
        depth=7,
        max_nodes=lambda num_tokens: 33,
        drafts_trees=True,
        runs_trees=True,
        fused_lengths=(7,),
        rewindable=True,
    )
    inner: Any = SimpleNamespace(drawn="iid", capabilities=own)
    stopped = Stopped(inner, Confidence())
    heuristic = HeuristicLength(inner)
    assert stopped.drawn == heuristic.drawn == "iid"
    assert stopped.capabilities == replace(own, fused_lengths=(), stops_early=True)
    assert heuristic.capabilities == replace(own, fused_lengths=(), rewindable=False)
    bare: Any = SimpleNamespace(drawn="iid", capabilities=Capabilities())
    assert HeuristicLength(bare).capabilities.depth == 20
    assert Stopped(bare, Confidence()).capabilities.depth is None


# ---------------------------------------------------------------------------------------- by name


def test_names() -> None:
    parse = DraftLength.parse
    assert parse("fixed") == DraftLength()
    assert parse("heuristic") == DraftLength(start=5)
    assert parse("heuristic:7") == DraftLength(start=7)
    assert parse("confidence") == DraftLength(Confidence(0.4))
    assert parse("survival:0.25") == DraftLength(Survival(0.25))
    assert parse("survival").and_confidence(0.0) == Survival(0.3)
    assert parse("survival").and_confidence(0.2) == Both(Survival(0.3), Confidence(0.2))
    assert parse("heuristic").and_confidence(0.2) == Confidence(0.2)


@pytest.mark.parametrize(
    "text",
    "fixed:3 heuristic:0 heuristic:x confidence:2 survival:-1 survival:nan survival: long".split(),
)
def test_bad_names_are_refused(text: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"^draft_length='{text}': must be fixed, heur"):
        DraftLength.parse(text)


@pytest.mark.parametrize("drawn", ["chosen", "searched"])
def test_drafts_that_are_not_drawn_cannot_be_cut(drawn: Any) -> None:
    with pytest.raises(IncompatibleError, match="no probabilities to stop by"):
        Stopped(ToyDrafter(DRAFT, 1, drawn), Confidence())


def test_a_policy_wraps_drafters_that_do_not_stop_by_themselves() -> None:
    toy, model = ToyDrafter(DRAFT), ModelDrafter(tiny(), VOCAB, Survival())
    assert DraftLength().around(toy) is toy
    assert isinstance(DraftLength(Survival()).around(toy), Stopped)
    assert DraftLength(Survival()).around(model) is model
    grows = DraftLength(start=3).around(toy)
    assert isinstance(grows, HeuristicLength)
    assert (grows.drafter, grows.first) == (toy, 3)


@pytest.mark.parametrize("make", [Confidence, Survival])
def test_thresholds_outside_their_range(make: Any) -> None:
    for number in (-0.1, 1.5, float("nan")):
        with pytest.raises(InvalidParameterError, match=r"must be in \[0, 1\]"):
            make(number)
    with pytest.raises(InvalidParameterError, match="1 or more"):
        HeuristicLength(ToyDrafter(DRAFT), 0)


# ------------------------------------------------------------------------- by the number of rows


def test_a_table_has_a_length_for_every_number_of_rows() -> None:
    """Gaps and what lies above the last range have the length of the range before."""
    table = LengthTable.parse("[[1, 4, 6], [8, 16, 3], [17, 64, 0]]")
    lengths = {rows: table.length(rows) for rows in (1, 4, 5, 7, 8, 16, 17, 64, 65, 1000)}
    assert lengths == {1: 6, 4: 6, 5: 6, 7: 6, 8: 3, 16: 3, 17: 0, 64: 0, 65: 0, 1000: 0}
    assert table.most == 6
    assert LengthTable.parse(str(table)) == LengthTable.of(table.as_lists) == table


def test_a_table_of_measured_lengths_joins_equal_ones() -> None:
    made = LengthTable.of_measured({1: 6, 4: 6, 16: 3, 32: 0})
    assert made.as_lists == [[1, 4, 6], [5, 16, 3], [17, 32, 0]]
    assert LengthTable.of_measured({2: 5}, 256).as_lists == [[1, 256, 5]]
    assert LengthTable.of_measured({1: 5, 2: 0}, 8).as_lists == [[1, 1, 5], [2, 8, 0]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "has no ranges"),
        ("[[2, 4, 3]]", "must begin at 1, not at 2"),
        ("[[1, 4, 3], [4, 8, 2]]", "begins at 4 follows one that ends at 4"),
        ("[[1, 4, 65]]", "must be 0 to 64"),
        ("[[1, 4, -1]]", "must be 0 to 64"),
        ("[[4, 1, 3]]", "no range of numbers from 1"),
        ("[[1, 4]]", "a list of"),
        ("[[1, 4, 2.5]]", "a list of"),
        ("nonsense", "a list of"),
    ],
)
def test_bad_tables_are_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidParameterError, match=problem):
        DraftLength.parse(f"table:{text}")


def test_a_table_bounds_the_drafts_of_all_rows() -> None:
    """And leaves shorter budgets as they are."""
    drafter = DraftLength.of([[1, 1, 4], [2, 2, 2], [3, 9, 0]]).around(ToyDrafter(DRAFT))
    assert isinstance(drafter, LengthByRows)
    for B, longest in ((1, 4), (2, 2), (3, 0)):
        context = Context.start([[0, 1]] * B, SoftmaxDistribution(), [0] * B, range(B))
        state = drafter.start(context)
        assert drafter.propose(state, context, Budget(8), context.rng).num_nodes == longest + 1
        uneven = Budget(3, torch.tensor([3, 1, 1][:B]))
        drafted = drafter.propose(state, context, uneven, context.rng).num_drafted_B.tolist()
        assert drafted == [min(longest, most) for most in (3, 1, 1)[:B]]


@pytest.mark.parametrize("rule", [Rejection(), Block()])
@pytest.mark.parametrize("gamma", [0, 1, 2])
def test_a_round_by_a_table_has_exactly_the_targets_distribution(
    gamma: int, rule: Verifier
) -> None:
    """ENUM."""
    by_rows = LengthByRows(ToyDrafter(DRAFT), LengthTable(((1, 1, gamma),)))
    done = enumerate_round(TARGET, by_rows, rule, 2)
    assert done.total_variation < 1e-12


def test_a_table_keeps_what_a_budget_says_of_sources() -> None:
    asked: list[Budget] = []
    inner: Any = SimpleNamespace(propose=lambda state, context, budget, rng: asked.append(budget))
    context: Any = SimpleNamespace(num_rows=2)
    stream: Any = None
    by_rows = LengthByRows(inner, LengthTable(((1, 4, 3),)))
    by_rows.propose(None, context, Budget(5, free_only=True), stream)
    assert asked == [Budget(3, None, free_only=True)]


def test_a_table_declares_its_longest_length() -> None:
    own = Capabilities(fused_lengths=(3,), depth=7)
    inner: Any = SimpleNamespace(drawn="iid", capabilities=own)
    table = LengthTable(((1, 4, 3), (5, 9, 0)))
    assert LengthByRows(inner, table).capabilities == replace(own, depth=3)
    nothing = LengthTable(((1, 4, 0),))
    assert LengthByRows(inner, nothing).capabilities.depth == 7
