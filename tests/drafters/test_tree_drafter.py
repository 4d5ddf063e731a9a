"""Token trees of a draft model: draws, verified rounds, and the cache.

Legend: B rows, N nodes, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import (
    FAMILIES,
    VOCAB,
    engine_of,
    greedy,
    ragged_prompts,
    tiny,
    token_ids,
)

from outrider import Sampling
from outrider.core import Budget, Context, Distribution, Draft, Drawn, Stream, Verifier
from outrider.core.errors import InvalidParameterError
from outrider.drafters import ModelDrafter
from outrider.drafters.tree.static import TreeDrafter
from outrider.drafters.tree.topology import Topology
from outrider.methods import Method, Parts
from outrider.runtime import HFModel
from outrider.sampling import Warp
from outrider.testing import check_drafter, chi2, enumerate_round
from outrider.verifiers import Greedy, Rejection, SampleMatch
from outrider.verifiers.distinct import Distinct

V = 3
KINDS: list[Drawn] = ["iid", "distinct", "chosen"]
MEDUSA = Topology.rank_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
TALL = Topology.rank_paths([[0], [1], [0, 0]])  # a leaf beside an inner node
LATE = Topology.rank_paths([[0], [1], [1, 0]])
RULES: dict[str, tuple[Drawn, Verifier]] = {
    "rejection of draws": ("iid", Rejection()),
    "distinct": ("distinct", Distinct()),
    "rejection of chosen": ("chosen", Rejection()),
    "distinct, chosen": ("chosen", Distinct()),
    "sample-match": ("chosen", SampleMatch()),
}


def toy(seed: int, num_tokens: int = V) -> HFModel:
    """A real transformer so small that its rounds can be enumerated."""
    return tiny("llama", seed, dtype=torch.float64, vocab_size=num_tokens, std=0.25)


def distribution(num_rows: int) -> Distribution:
    """A distribution with every kind of sampling parameter, so that it depends on a node's path."""
    sampling = Sampling(temperature=0.8, frequency_penalty=0.9, logit_bias={0: 0.5})
    return Warp([sampling] * num_rows, V)


def truncated_distribution(num_rows: int) -> Distribution:
    """Two tokens at most, so that the third child of a node is missing."""
    return Warp([Sampling(top_k=2, frequency_penalty=0.9)] * num_rows, V)


def greedy_distribution(num_rows: int) -> Distribution:
    return Warp([Sampling(temperature=0, frequency_penalty=0.9)] * num_rows, V)


def method(drawn: Drawn, rule: Any, topology: Topology = MEDUSA) -> Method:
    """Trees as a method of the engine."""

    def drafter(parts: Parts) -> TreeDrafter:
        assert parts.draft is not None
        return TreeDrafter(parts.draft, parts.target.num_tokens, topology, drawn)

    return Method("tree", "A tree.", "tests", "draft model", rule, drafter)


@pytest.mark.parametrize("drawn", KINDS)
@pytest.mark.parametrize(
    "topology", [MEDUSA, Topology.k_ary(2, 2), Topology.chain(3)], ids=["medusa", "binary", "chain"]
)
def test_contract(topology: Topology, drawn: Drawn) -> None:
    """False alarms: see ``check_drafter``, below 1e-6."""
    with torch.inference_mode():
        check_drafter(TreeDrafter(toy(1, 6), 6, topology, drawn), 6)


@pytest.mark.parametrize("drawn", KINDS)
def test_contract_where_distributions_run_out(drawn: Drawn) -> None:
    """Two possible tokens, three children; the same false alarms."""

    def two(num_rows: int) -> Distribution:
        return Warp([Sampling(top_k=2)] * num_rows, 6)

    with torch.inference_mode():
        check_drafter(TreeDrafter(toy(1, 6), 6, MEDUSA, drawn), 6, distribution=two)


def _cases() -> Iterator[Any]:
    """Untruncated distributions are expensive if children are drawn: one tree, marked slow."""
    for rule, (drawn, _) in RULES.items():
        for name, topology in (("tall", TALL), ("late", LATE)):
            if drawn != "chosen":
                yield pytest.param(
                    rule, topology, truncated_distribution, id=f"{rule}-{name}-truncated"
                )
            if drawn == "chosen" or topology == TALL:
                marks = pytest.mark.slow if drawn != "chosen" else ()
                yield pytest.param(rule, topology, distribution, id=f"{rule}-{name}", marks=marks)


@pytest.mark.parametrize(("rule", "topology", "distributions"), list(_cases()))
def test_a_round_has_exactly_the_targets_distribution(
    rule: str, topology: Topology, distributions: Any
) -> None:
    """ENUM: all trees and decisions of one round, completed by the target, against the target."""
    drawn, verifier = RULES[rule]
    with torch.inference_mode():
        drafter = TreeDrafter(toy(1), V, topology, drawn)
        done = enumerate_round(
            toy(0), drafter, verifier, 2, prompt=(0, 1, 2), distribution=distributions
        )
    assert done.total_variation < 1e-12
    assert sum(mass for tokens, mass in done.emitted.items() if len(tokens) == 3) > 0.01


@pytest.mark.parametrize(
    ("rule", "row_tokens"),
    [("rejection of draws", 1), ("distinct", 1), ("distinct", 0), ("distinct, chosen", 1)],
)
def test_a_smaller_budget_has_exactly_the_targets_distribution(rule: str, row_tokens: int) -> None:
    drawn, verifier = RULES[rule]
    with torch.inference_mode():
        done = enumerate_round(
            toy(0),
            TreeDrafter(toy(1), V, TALL, drawn),
            verifier,
            2,
            prompt=(0, 1, 2),
            row_tokens=row_tokens,
            distribution=distribution,
        )
    assert done.total_variation < 1e-12
    assert max(map(len, done.emitted)) == row_tokens + 1


@pytest.mark.parametrize("drawn", KINDS)
def test_greedy_rounds_are_the_targets(drawn: Drawn) -> None:
    with torch.inference_mode():
        done = enumerate_round(
            toy(0),
            TreeDrafter(toy(1), V, MEDUSA, drawn),
            Greedy(),
            3,
            distribution=greedy_distribution,
        )
    assert done.total_variation == 0


def test_a_chain_equals_that_of_the_model_drafter() -> None:
    """The same numbers draw the same tokens from the same distributions."""
    model, prompts = tiny(seed=1), ragged_prompts([4, 9, 2])
    sampling = [Sampling(), Sampling(temperature=0.5, top_k=9), Sampling(frequency_penalty=0.5)]
    context = Context.start(prompts, Warp(sampling, VOCAB), [0] * 3, range(3))
    drafts = []
    for drafter in (ModelDrafter(model, VOCAB), TreeDrafter(model, VOCAB, Topology.chain(4))):
        with torch.inference_mode():
            state = drafter.start(context)
            drafts.append(drafter.propose(state, context, Budget(4), context.rng))
    chain, tree = drafts
    assert chain.is_chain
    assert tree.is_chain
    assert torch.equal(chain.tokens_BN, tree.tokens_BN)
    torch.testing.assert_close(chain.probs_BNV, tree.probs_BNV)


@pytest.mark.parametrize("drawn", KINDS)
def test_distributions_are_those_behind_each_path(drawn: Drawn) -> None:
    """Level by level under a mask, against a plain pass over each path."""
    model, prompts = tiny(seed=1, dtype=torch.float64), ragged_prompts([4, 9])
    samplings = [Sampling(temperature=0.7), Sampling(repetition_penalty=1.5)]
    context = Context.start(prompts, Warp(samplings, VOCAB), [0] * 2, range(2))
    drafter = TreeDrafter(model, VOCAB, MEDUSA, drawn)
    with torch.inference_mode():
        draft = drafter.propose(drafter.start(context), context, Budget(8), context.rng)
        for b, prompt in enumerate(prompts):
            for i in range(1, draft.num_nodes):
                above_N = draft.ancestors_BNN[b, draft.parents_BN[b, i]]
                text = prompt + draft.tokens_BN[b, above_N][1:].tolist()
                alone = Context.start([text], Warp([samplings[b]], VOCAB), [0], [0])
                alone.prompt_length_B = torch.tensor([len(prompt)])
                chain = ModelDrafter(model, VOCAB)
                one = chain.propose(chain.start(alone), alone, Budget(1), alone.rng)
                assert one.probs_BNV is not None
                q_V = one.probs_BNV[0, 0]
                if draft.probs_BNV is None:
                    best = q_V.argsort(descending=True)[MEDUSA.ranks[i]]
                    assert int(draft.tokens_BN[b, i]) == int(best)
                else:
                    found_V = draft.probs_BNV[b, draft.parents_BN[b, i]]
                    torch.testing.assert_close(found_V, q_V)


@pytest.mark.parametrize("drawn", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_targets_own(family: str, drawn: Drawn) -> None:
    """Token for token, in ragged batches whose rows end at different times, past the windows."""
    target, draft = tiny(family, 0), tiny(family, 1)
    prompts = ragged_prompts([3, 17, 9])
    sampling = [greedy(n) for n in (26, 11, 19)]
    plain = engine_of(target).generate(prompts, sampling)
    rule = Distinct if drawn == "distinct" else Rejection
    trees = engine_of(target, draft, method(drawn, rule), max_batch_size=2)
    assert token_ids(trees.generate(prompts, sampling)) == token_ids(plain)


def test_a_target_accepts_its_own_tree() -> None:
    """With the target as the draft every round emits a whole path, also to the end of a context."""
    model, prompts = tiny(seed=0), ragged_prompts([3, 9])
    engine = engine_of(model, model, method("chosen", Rejection), γ=3)
    done = engine.generate(prompts, Sampling(temperature=0, max_new_tokens=500, ignore_eos=True))
    assert [len(result.token_ids) for result in done] == [125, 119]
    assert token_ids(done) == token_ids(engine_of(model).generate(prompts, greedy(500)))
    rounds = [result.stats.rounds for result in done]
    assert rounds == [-(-125 // 4), -(-119 // 4)]


@pytest.mark.parametrize(("drawn", "rule"), [("iid", Rejection), ("distinct", Distinct)])
def test_a_row_has_the_same_output_in_any_batch(drawn: Drawn, rule: Any) -> None:
    """Sampled, with float64 models: alone, in a batch, and in a batch whose rows join and leave."""
    target, draft = tiny(seed=0, dtype=torch.float64), tiny(seed=1, dtype=torch.float64)
    prompts = ragged_prompts([5, 2, 9, 4, 7])
    sampling = [
        Sampling(max_new_tokens=n, ignore_eos=True, frequency_penalty=0.2, top_p=0.9)
        for n in (12, 20, 7, 16, 3)
    ]
    engine = engine_of(target, draft, method(drawn, rule))
    alone = [
        engine.generate([prompt], one)[0].token_ids
        for prompt, one in zip(prompts, sampling, strict=True)
    ]
    few = engine_of(target, draft, method(drawn, rule), max_batch_size=2)
    assert token_ids(engine.generate(prompts, sampling)) == alone
    assert token_ids(few.generate(prompts, sampling)) == alone


def test_one_pass_per_level() -> None:
    """The next round's first pass takes the accepted path with the new root; leaves and nodes of
    other levels are never fed."""
    widths: list[int] = []
    draft = tiny(seed=0, name="draft")
    model = TreeDrafter(draft, VOCAB, MEDUSA, "chosen")
    target, prompts = tiny(seed=0), ragged_prompts([5, 5])
    context = Context.start(prompts, Warp([greedy(9)] * 2, VOCAB), [0, 0], [0, 1])

    def count(module: torch.nn.Module, inputs: object, kwargs: dict[str, Any]) -> None:
        widths.append(kwargs["input_ids"].shape[1])

    with torch.inference_mode():
        cache, state = target.start(context), model.start(context)
        draft.module.register_forward_pre_hook(count, with_kwargs=True)
        for γ in (3, 0, 2, 1):
            drawn = model.propose(state, context, Budget(γ), context.rng)
            widths, seen = [], widths
            fresh = model.start(context)
            again = model.propose(fresh, context, Budget(γ), context.rng)
            assert torch.equal(drawn.tokens_BN, again.tokens_BN)
            widths = seen
            scores = target.score(cache, drawn)
            verdict = Greedy()(drawn, scores.logits_BNV, context.rng).read()
            assert verdict.num_accepted_B.tolist() == [γ, γ]
            target.commit(cache, drawn, verdict)
            model.commit(state, drawn, verdict, scores)
            context.append(verdict.emitted(drawn), verdict.num_emitted)
    # inner nodes of the levels are the root, two, one; four tokens were emitted, one, three
    assert widths == [1, 2, 1, 4 + 1, 2, 3]


def test_equal_siblings_stay_separate_draws() -> None:
    """Independent draws may be equal; each is a node of its own, with children of its own."""
    context = Context.start([[0, 1]] * 64, distribution(64), [0] * 64, range(64))
    drafter = TreeDrafter(toy(1), V, Topology.k_ary(2, 2), "iid")
    with torch.inference_mode():
        draft = drafter.propose(drafter.start(context), context, Budget(2), context.rng)
    assert bool(draft.mask_BN.all())
    assert bool((draft.tokens_BN[:, 1] == draft.tokens_BN[:, 2]).any())


def test_siblings_end_with_the_support() -> None:
    """If only two tokens are possible, a third draw without replacement does not exist, nor do its
    descendants; the first two are the support."""
    context = Context.start([[0, 1]] * 8, truncated_distribution(8), [0] * 8, range(8))
    drafter = TreeDrafter(toy(1), V, Topology.k_ary(3, 2), "distinct")
    with torch.inference_mode():
        draft = drafter.propose(drafter.start(context), context, Budget(2), context.rng)
    assert draft.mask_BN[0].long().tolist() == [1, 1, 1, 0, 1, 1, 0, 1, 1, 0, 0, 0, 0]
    assert draft.probs_BNV is not None
    support_BV = draft.probs_BNV[:, 0] > 0
    assert bool(support_BV.gather(1, draft.tokens_BN[:, 1:3]).all())


@pytest.mark.parametrize("drawn", KINDS)
def test_padding_of_the_vocabulary_is_never_drafted(drawn: Drawn) -> None:
    """A draft model with fewer logits than the target, and more children than it has tokens."""
    draft = tiny(seed=1, vocab_size=5)
    context = Context.start(ragged_prompts([3, 4], 5), Warp([Sampling()] * 2, 9), [0, 0], [0, 1])
    drafter = TreeDrafter(draft, 9, Topology.k_ary(7, 2), drawn)
    with torch.inference_mode():
        made = drafter.propose(drafter.start(context), context, Budget(2), context.rng)
    assert int(made.tokens_BN[made.mask_BN].max()) < 5
    first_BK = made.mask_BN[:, 1:8]
    assert first_BK.sum(1).tolist() == ([7, 7] if drawn == "iid" else [5, 5])


@pytest.mark.slow
def test_declaring_the_wrong_kind_would_show() -> None:
    """Mutants that ENUM must reject: draws without replacement verified as independent ones, and
    the distributions of unpenalised logits (paths forgotten)."""

    class Misdeclared(TreeDrafter):
        def propose(self, *args: Any) -> Draft:
            draft = super().propose(*args)
            return Draft(draft.tokens_BN, draft.parents_BN, draft.mask_BN, draft.probs_BNV, "iid")

    class Pathless(TreeDrafter):
        def propose(self, state: Any, context: Context, *args: Any) -> Draft:
            draft = super().propose(state, context, *args)
            assert draft.probs_BNV is not None
            probs_BNV = draft.probs_BNV.clone()
            probs_BNV[:, 1] = probs_BNV[:, 0]
            return Draft(draft.tokens_BN, draft.parents_BN, draft.mask_BN, probs_BNV, draft.drawn)

    with torch.inference_mode():
        for drafter in (
            Misdeclared(toy(1), V, Topology.expansion([2]), "distinct"),
            Pathless(toy(1), V, TALL, "iid"),
        ):
            distributions = (
                distribution if isinstance(drafter, Misdeclared) else truncated_distribution
            )
            done = enumerate_round(
                toy(0), drafter, Rejection(), 2, prompt=(0, 1, 2), distribution=distributions
            )
            assert done.total_variation > 1e-4, drafter


def test_a_tree_deeper_than_its_budget_is_named() -> None:
    class Deep(TreeDrafter):
        def propose(self, state: Any, context: Context, budget: Budget, rng: Stream) -> Draft:
            return super().propose(state, context, replace(budget, max_tokens=3), rng)

    class RowsForgotten(TreeDrafter):
        def propose(self, state: Any, context: Context, budget: Budget, rng: Stream) -> Draft:
            return super().propose(state, context, replace(budget, tokens_B=None), rng)

    with torch.inference_mode():
        for kind, message in ((Deep, "a path exceeds 2"), (RowsForgotten, "its own budget")):
            with pytest.raises(AssertionError, match=message):
                check_drafter(kind(toy(1, 6), 6, MEDUSA), 6, num_tokens=2)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection of draws", "distinct"])
def test_many_rounds_have_the_targets_distribution(rule: str) -> None:
    """CHI2 over several rounds; a correct drafter fails with probability 1e-4 (seed fixed)."""
    drawn, verifier = RULES[rule]
    with torch.inference_mode():
        p = chi2(
            toy(0),
            TreeDrafter(toy(1), V, MEDUSA, drawn),
            verifier,
            2,
            length=3,
            num_rows=10_000,
            distribution=distribution,
        )
    assert p > 1e-4


def test_other_kinds_of_children() -> None:
    with pytest.raises(InvalidParameterError, match="children='best': must be one of iid, dist"):
        TreeDrafter(tiny(), VOCAB, MEDUSA, "best")  # type: ignore[arg-type]
