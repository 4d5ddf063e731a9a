"""Hybrid drafts: every round has the target's distribution, and models follow other sources.

Legend: B rows, N nodes, D drafted tokens.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, ragged_prompts, tiny

from outrider.core import (
    Budget,
    Capabilities,
    Context,
    Draft,
    Drafter,
    Drawn,
    Scores,
    Stream,
    Verdict,
    Verifier,
)
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.drafters import ModelDrafter
from outrider.drafters.chain.none import NoState
from outrider.drafters.lookup.prompt_lookup import PromptLookup
from outrider.drafters.lookup.suffix import SuffixDecoding
from outrider.drafters.sources.bandit import Bandit
from outrider.drafters.sources.hybrid import Hybrid, Order
from outrider.drafters.sources.merge import BEST, Merged, union
from outrider.drafters.sources.sources import NO_SOURCE, Choice, Outcome, Source
from outrider.testing import (
    SoftmaxDistribution,
    ToyDrafter,
    ToyModel,
    check_drafter,
    chi2,
    enumerate_round,
)
from outrider.verifiers import Block, Rejection, SampleMatch

TARGET, DRAFT = ToyModel.random(3, seed=1), ToyModel.random(3, seed=2)
COPIES, NEW = (0, 1, 2, 0, 1), (0, 1)  # the first repeats itself, the second does not


class Reading:
    """A toy drafter that reads the whole context in every round, as a source must."""

    def __init__(self, inner: ToyDrafter) -> None:
        self.inner = inner

    @property
    def drawn(self) -> Drawn:
        return self.inner.drawn

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(rewindable=True)

    def start(self, context: Context) -> NoState:
        return NoState()

    def propose(self, state: NoState, context: Context, budget: Budget, rng: Stream) -> Draft:
        return self.inner.propose(self.inner.start(context), context, budget, rng)

    def commit(self, state: NoState, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        pass

    def join(self, state: NoState, other: NoState) -> None:
        pass


def toy(drawn: Drawn = "iid", model: ToyModel = DRAFT, confidence: float = 0.0) -> Reading:
    return Reading(ToyDrafter(model, 1, drawn, confidence=confidence))


def copies() -> list[Source]:
    return [Source(PromptLookup(), 3), Source(SuffixDecoding(corpus_tokens=0), 3)]


def hybrid(choice: Choice, *more: Source, vocab: int = 3) -> Hybrid:
    return Hybrid([*copies(), *more], choice, vocab)


MODEL = Source(toy(), 2, 0.2)


# ---------------------------------------------------------------------------------------- the
# distribution


@pytest.mark.parametrize("rule", [Rejection(), Block()])
@pytest.mark.parametrize(
    ("choice", "prompt"),
    [
        (Order([1, 1, 1]), COPIES),
        (Order([1, 1, 1]), NEW),
        (Bandit([0.0, 0.0, 0.2]), COPIES),
        (Bandit([9.0, 9.0, 0.1]), COPIES),
    ],
    ids=["order", "order, nothing to copy", "bandit", "bandit, dear copies"],
)
def test_a_round_has_exactly_the_targets_distribution(
    choice: Choice, rule: Verifier, prompt: tuple[int, ...]
) -> None:
    """ENUM, with copied and drawn rounds."""
    done = enumerate_round(TARGET, hybrid(choice, MODEL), rule, 2, prompt=prompt)
    assert done.total_variation < 1e-12
    assert done.acceptance_length > 1.01


@pytest.mark.parametrize("rule", [Rejection(), Block()])
def test_a_round_of_copies_has_exactly_the_targets_distribution(rule: Verifier) -> None:
    """ENUM: chosen drafts, without distributions."""
    assert hybrid(Order([1, 1])).drawn == "chosen"
    done = enumerate_round(TARGET, hybrid(Order([1, 1])), rule, 3, prompt=COPIES)
    assert done.total_variation < 1e-12
    assert done.acceptance_length > 1.01


@pytest.mark.parametrize(("rule", "prompt"), [(Rejection(), COPIES), (SampleMatch(), NEW)])
def test_a_round_of_merged_trees_has_the_targets_distribution(
    rule: Verifier, prompt: tuple[int, ...]
) -> None:
    """ENUM. A merged tree accepts at least as much as each of its parts."""
    best = Source(toy("chosen"), 2)
    drafter = Merged([*copies(), best])
    done = enumerate_round(TARGET, drafter, rule, 2, prompt=prompt)
    parts = [
        enumerate_round(TARGET, Merged([part]), rule, 2, prompt=prompt)
        for part in (*copies(), best)
    ]
    assert done.total_variation < 1e-12
    assert done.acceptance_length > max(part.acceptance_length for part in parts) - 1e-12


@dataclass(frozen=True)
class Peeked(Source):
    """Wrong: a drawn draft is read before a source is picked."""

    free: bool = True  # type: ignore[assignment]


def test_a_choice_that_depends_on_drawn_tokens_would_show() -> None:
    """MUT: a draft that stops at an unsure token is taken only if it is long."""
    unsure, other = toy(confidence=0.3), Source(toy("chosen"), 2, 0.2)
    for kind, biased in ((Source, False), (Peeked, True)):
        drafter = Hybrid([kind(unsure, 2, 0.2), other], Order([2, 1]), 3)
        done = enumerate_round(TARGET, drafter, Rejection(), 2, length=3)
        assert (done.total_variation > 1e-3) == biased


class Unmarked(Hybrid):
    """Wrong: copied tokens beside drawn ones keep the model's distributions."""

    def _distributions(self, tokens_BN: Any, taken: Any) -> Any:
        q_BNV = super()._distributions(tokens_BN, taken)
        return (q_BNV + 0.5).softmax(-1)


def test_copies_with_the_models_distributions_would_show() -> None:
    """MUT."""
    drafter = Unmarked([*copies(), MODEL], Order([1, 1, 1]), 3)
    done = enumerate_round(TARGET, drafter, Rejection(), 2, prompt=COPIES, length=3)
    assert done.total_variation > 1e-3


class Turns:
    """Rows pick sources in turn, so that a batch holds every mixture."""

    def start(self, context: Context) -> list[Any]:
        return [itertools.count(row) for row in range(context.num_rows)]

    def pick(self, memory: Any, lengths: Sequence[int]) -> int:
        return next(memory) % (len(lengths) + 1) - 1

    def learn(self, memory: Any, outcomes: Sequence[Outcome]) -> None:
        pass


def test_mixed_batches_over_many_rounds_have_the_targets_distribution() -> None:
    """CHI2: copied rows beside drawn ones and rows without a draft. A correct drafter fails with
    probability 1e-4 (seed fixed)."""
    sources = [Source(toy("chosen", ToyModel.random(3, seed=5)), 2), MODEL]
    assert chi2(TARGET, Hybrid(sources, Turns(), 3), Block(), 2, length=3) > 1e-4


def test_rounds_chosen_by_what_was_accepted_have_the_targets_distribution() -> None:
    """CHI2: the bandit's choice depends on earlier rounds. A correct drafter fails with
    probability 1e-4 (seed fixed)."""
    sources = [Source(toy("chosen", ToyModel.random(3, seed=5)), 2), MODEL]
    drafter = Hybrid(sources, Bandit([0.1, 0.2], 0.5), 3)
    assert chi2(TARGET, drafter, Rejection(), 2, length=3) > 1e-4


# ------------------------------------------------------------------------------------ the contract

TOY5 = ToyModel.random(5, seed=3)


@pytest.mark.parametrize(
    "drafter",
    [
        hybrid(Order([1, 1, 1]), Source(toy(model=TOY5), 3, 0.2), vocab=5),
        hybrid(Bandit([0.0, 0.0, 0.2]), Source(toy(model=TOY5), 3, 0.2), vocab=5),
        hybrid(Bandit([9.0, 9.0, 0.1]), Source(toy(model=TOY5), 3, 0.2), vocab=5),
        Merged([*copies(), Source(toy("chosen", TOY5), 3, 0.2)]),
    ],
    ids=["order", "bandit", "dear copies", "tree"],
)
def test_contract(drafter: Drafter[Any]) -> None:
    """False alarms: see ``check_drafter``, below 1e-6."""
    check_drafter(drafter, 5)


@pytest.mark.parametrize("make", ["order", "tree"])
def test_contract_with_a_model(make: str) -> None:
    model, prompts = tiny("llama", 1), ragged_prompts([6, 2, 4])
    prompts = [[*prompt, *prompt[:4]] for prompt in prompts]  # something to copy
    if make == "tree":
        drafter: Drafter[Any] = Merged(
            [*copies(), Source(ModelDrafter(model, VOCAB, picker=BEST), 3, 0.2)]
        )
    else:
        drafter = hybrid(Order([1, 1, 1]), Source(ModelDrafter(model, VOCAB), 3, 0.2), vocab=VOCAB)
    with torch.inference_mode():
        check_drafter(drafter, VOCAB, num_samples=0, prompts=prompts)


class Script:
    """Picks the model in all rows when told to, else a source per row in turn."""

    def __init__(self) -> None:
        self.probe = False
        self._turns = Turns()

    def start(self, context: Context) -> list[Any]:
        return self._turns.start(context)

    def pick(self, memory: Any, lengths: Sequence[int]) -> int:
        return len(lengths) - 1 if self.probe else self._turns.pick(memory, lengths)

    def learn(self, memory: Any, outcomes: Sequence[Outcome]) -> None:
        pass


def test_a_model_follows_the_tokens_of_other_sources() -> None:
    """In every round the model's draft equals one made from scratch, although its own tokens were
    accepted in some rows and rounds only; proposals without a commit change nothing."""
    model, choice, generator = tiny("llama", 1, dtype=torch.float64), Script(), torch.Generator()
    source = Source(ModelDrafter(model, VOCAB), 4, 0.2)
    drafter = hybrid(choice, source, vocab=VOCAB)
    prompts = [[*p, *p] for p in ragged_prompts([5, 2, 3, 7])]
    with torch.inference_mode():
        context = Context.start(prompts, SoftmaxDistribution(), [0] * 4, range(4))
        state = drafter.start(context)
        for round_ in range(14):
            choice.probe = True
            drafts = [
                drafter.propose(state, context, Budget(5), context.rng),
                source.drafter.propose(
                    source.drafter.start(context), context, Budget(4), context.rng
                ),
            ]
            assert torch.equal(drafts[0].tokens_BN, drafts[1].tokens_BN)
            torch.testing.assert_close(drafts[0].probs_BNV, drafts[1].probs_BNV)
            choice.probe = round_ % 5 == 4
            draft = drafter.propose(state, context, Budget(5), context.rng)
            most_B = draft.num_drafted_B
            num_B = (torch.rand(len(most_B), generator=generator) * (most_B + 1)).long()
            path_BD = torch.arange(1, draft.num_nodes).expand(len(most_B), -1)
            verdict = Verdict(path_BD, num_B, torch.full_like(num_B, round_)).read()
            drafter.commit(state, draft, verdict, Scores(torch.zeros(1)))
            context.append(verdict.emitted(draft), verdict.num_emitted)
            if round_ == 8:
                state.keep([3, 1, 2])
                context.keep([3, 1, 2])


# ------------------------------------------------------------------------------------------- trees


def chains(rows: Sequence[Sequence[int]]) -> Draft:
    """Root 9, then these tokens."""
    N = 1 + max(map(len, rows))
    tokens_BN = torch.tensor([[9, *row, *[0] * (N - 1 - len(row))] for row in rows])
    mask_BN = torch.tensor([[True] * (1 + len(row)) + [False] * (N - 1 - len(row)) for row in rows])
    return Draft.chain(tokens_BN, mask_BN, None, "chosen")


def paths(draft: Draft, row: int) -> list[tuple[int, ...]]:
    """The tokens from the root to every node."""
    found: list[tuple[int, ...]] = []
    tokens, parents = draft.tokens_BN[row].tolist(), draft.parents_BN[row].tolist()
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return [p for p, there in zip(found, draft.mask_BN[row].tolist(), strict=True) if there]


def test_a_merged_tree_has_every_path_once() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        lists = [
            [torch.randint(2, (n,), generator=generator).tolist() for n in lengths]
            for lengths in ((3, 0, 2), (2, 4, 0), (4, 4, 1))
        ]
        tree = union([chains(rows) for rows in lists])
        for row in range(3):
            wanted = {(9, *rows[row][:n]) for rows in lists for n in range(len(rows[row]) + 1)}
            assert set(paths(tree, row)) == wanted
        least = max(len(set(paths(tree, row))) for row in range(3))
        assert tree.num_nodes == least or tree.num_nodes == 11


def test_a_chain_beside_a_shallow_tree_knows_its_ancestors() -> None:
    """Though no walk down the tree visits as many nodes."""
    context = Context.start([(1,), (2,)], SoftmaxDistribution(), [0] * 2, range(2))
    tokens_BN = context.root_B[:, None].repeat(1, 10)
    chain = Draft.chain(tokens_BN, None, None, "chosen")
    tree = Draft.tree((-1, 0, 0), tokens_BN[:, :3], chain.mask_BN[:, :3], None, "chosen", 2)
    rows_B = torch.tensor([True, False])
    draft = hybrid(Order([1, 1]))._together(context, [(chain, rows_B), (tree, ~rows_B)], "chosen")
    assert torch.equal(draft.ancestors_BNN[0], chain.ancestors_BNN[0])
    assert torch.equal(draft.ancestors_BNN[1, :3, :3], tree.ancestors_BNN[1])


def test_sources_that_agree_make_a_chain() -> None:
    tree = union([chains([[1, 2, 3], [4]]), chains([[1, 2], [4, 5]])])
    assert tree.is_chain
    assert tree.num_nodes == 4
    assert [paths(tree, 0)[-1], paths(tree, 1)[-1]] == [(9, 1, 2, 3), (9, 4, 5)]
    alone = chains([[1]])
    assert union([chains([[]]), alone]) is alone


# --------------------------------------------------------------------------------- what is refused


def test_bad_sources() -> None:
    with pytest.raises(InvalidParameterError, match="give one or more"):
        Hybrid([], Order([]), 3)
    with pytest.raises(InvalidParameterError, match="tokens=0"):
        Source(PromptLookup(), 0)
    with pytest.raises(InvalidParameterError, match="cost=-1"):
        Source(PromptLookup(), 1, -1)
    with pytest.raises(InvalidParameterError, match="least=\\[0\\]"):
        Order([0])
    with pytest.raises(IncompatibleError, match="'searched' candidates"):
        Source(ToyDrafter(DRAFT, 2, "searched"), 2)
    drawing = [Source(ToyDrafter(DRAFT, 2, drawn), 2) for drawn in ("distinct", "iid")]
    with pytest.raises(IncompatibleError, match=r"different ways \(distinct, iid\)"):
        Hybrid(drawing, Order([1, 1]), 3)
    with pytest.raises(IncompatibleError, match="picker=BEST"):
        Merged([Source(ToyDrafter(DRAFT), 2)])
    trees = Source(SuffixDecoding("tree"), 3)
    with pytest.raises(IncompatibleError, match="SuffixDecoding and SuffixDecoding both draft"):
        Hybrid([trees, trees], Order([1, 1]), 3)


def test_a_source_that_cannot_forget_is_refused() -> None:
    """A toy's state follows verdicts, not the context."""
    drafter = Hybrid([Source(ToyDrafter(DRAFT), 2, 0.2)], Order([1]), 3)
    with pytest.raises(IncompatibleError, match="needs a method rollback"):
        drafter.start(Context.start([[0]], SoftmaxDistribution(), [0], [0]))


def test_rows_without_a_match_have_no_draft() -> None:
    """And rows end at their own budgets."""
    context = Context.start([NEW, COPIES, COPIES], SoftmaxDistribution(), [0] * 3, range(3))
    drafter = hybrid(Order([1, 1]))
    budget = Budget(3, torch.tensor([3, 1, 3]))
    draft = drafter.propose(drafter.start(context), context, budget, context.rng)
    assert draft.num_drafted_B.tolist() == [0, 1, 3]
    nobody = Hybrid(copies(), Order([4, 4]), 3)
    assert nobody.propose(nobody.start(context), context, budget, context.rng).num_nodes == 1
    assert Order([4, 4]).pick(None, [3, 3]) == NO_SOURCE
    assert replace(MODEL, tokens=1).budget(Budget(3)).max_tokens == 1
