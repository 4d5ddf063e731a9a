"""Dynamic trees: against the definition, against the target, and in batches.

Legend: B rows, N nodes, V vocabulary.
"""

from typing import Any

import pytest
import torch
from tiny_models import (
    VOCAB,
    engine_of,
    full_logits,
    greedy,
    ragged_prompts,
    tiny,
    token_ids,
)

from outrider import Sampling
from outrider.core import Budget, Context, Distribution, Draft, Verifier
from outrider.core.errors import InvalidParameterError
from outrider.drafters.tree.dynamic import DynamicTreeDrafter
from outrider.methods import Method, Parts
from outrider.runtime import HFModel
from outrider.sampling import Warp
from outrider.testing import check_drafter, enumerate_round
from outrider.verifiers import Greedy, Rejection, SampleMatch
from outrider.verifiers.distinct import Distinct

V = 3
RULES: dict[str, Verifier] = {
    "rejection": Rejection(),
    "distinct": Distinct(),
    "sample-match": SampleMatch(),
}


def toy(seed: int, num_tokens: int = V) -> HFModel:
    small = {"vocab_size": num_tokens, "num_hidden_layers": 1, "std": 0.25}
    return tiny("llama", seed, dtype=torch.float64, **small)


def distribution(num_rows: int) -> Distribution:
    """A distribution with every kind of sampling parameter, so that it depends on a node's path."""
    sampling = Sampling(temperature=0.8, frequency_penalty=0.9, logit_bias={0: 0.5})
    return Warp([sampling] * num_rows, V)


def truncated_distribution(num_rows: int) -> Distribution:
    return Warp([Sampling(top_k=2, frequency_penalty=0.9)] * num_rows, V)


def greedy_distribution(num_rows: int) -> Distribution:
    return Warp([Sampling(temperature=0, frequency_penalty=0.9)] * num_rows, V)


def method(**settings: int) -> Method:
    def drafter(parts: Parts) -> DynamicTreeDrafter:
        assert parts.draft is not None
        return DynamicTreeDrafter(parts.draft, parts.target.num_tokens, **settings)

    return Method("dynamic", "A tree.", "tests", "draft model", Rejection, drafter)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_nodes": 9, "width": 3, "depth": 3},
        {"num_nodes": 256, "width": 6, "depth": 4},
        {"num_nodes": 4, "width": 2, "depth": 4},
        {"num_nodes": 20, "width": 1, "depth": 3},
        {"num_nodes": 20, "width": 4, "depth": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("top_k", [0, 2])
def test_contract(settings: dict[str, int], top_k: int) -> None:
    def some(num_rows: int) -> Distribution:
        return Warp([Sampling(top_k=top_k)] * num_rows, 6)

    with torch.inference_mode():
        check_drafter(DynamicTreeDrafter(toy(1, 6), 6, **settings), 6, distribution=some)


@pytest.mark.parametrize("row_tokens", [None, 2, 1, 0])
@pytest.mark.parametrize("distributions", [distribution, truncated_distribution])
@pytest.mark.parametrize("rule", RULES)
def test_a_round_has_exactly_the_targets_distribution(
    rule: str, distributions: Any, row_tokens: int | None
) -> None:
    """ENUM: all decisions of one round, completed by the target, against the target."""
    with torch.inference_mode():
        done = enumerate_round(
            toy(0),
            DynamicTreeDrafter(toy(1), V, num_nodes=6, width=2, depth=3),
            RULES[rule],
            3,
            prompt=(0, 1, 2),
            row_tokens=row_tokens,
            distribution=distributions,
        )
    assert done.total_variation < 1e-12


def test_greedy_rounds_are_the_targets() -> None:
    with torch.inference_mode():
        drafter = DynamicTreeDrafter(toy(1), V, num_nodes=6, width=2, depth=3)
        done = enumerate_round(toy(0), drafter, Greedy(), 3, distribution=greedy_distribution)
    assert done.total_variation == 0


def by_definition(
    model: HFModel, prompt: list[int], temperature: float, depth: int, num_nodes: int, width: int
) -> set[tuple[int, ...]]:
    """EAGLE-2 by its definition, with a plain pass per node: the tokens of each kept path."""
    value: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        grown: dict[tuple[int, ...], float] = {}
        for path in frontier:
            logits_V = full_logits(model.module, [*prompt, *path])[-1]
            q_V = (logits_V / (temperature or 1.0)).softmax(0)
            for token in q_V.argsort(descending=True)[:width].tolist():
                grown[(*path, token)] = value.get(path, 1.0) * float(q_V[token])
        value |= grown
        frontier = sorted(grown, key=lambda path: -grown[path])[:width]
    return set(sorted(value, key=lambda path: -value[path])[: num_nodes - 1])


def paths_of(draft: Draft, row: int) -> list[tuple[int, ...]]:
    return [
        tuple(draft.tokens_BN[row, draft.ancestors_BNN[row, i]][1:].tolist())
        for i in range(1, draft.num_nodes)
        if draft.mask_BN[row, i]
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("num_nodes", "width"), [(12, 3), (6, 2), (30, 3), (256, 4)])
def test_the_tree_is_that_of_the_definition(num_nodes: int, width: int, temperature: float) -> None:
    """Rows of different lengths and budgets, and so of different shapes, in one batch."""
    model, prompts = tiny(seed=1, dtype=torch.float64, std=0.25), ragged_prompts([4, 9, 6, 2])
    sampling = Sampling(temperature=temperature)
    context = Context.start(prompts, Warp([sampling] * 4, VOCAB), [0] * 4, range(4))
    depths = [4, 3, 1, 0]
    drafter = DynamicTreeDrafter(model, VOCAB, num_nodes, width, depth=9)
    with torch.inference_mode():
        budget = Budget(4, torch.tensor(depths))
        draft = drafter.propose(drafter.start(context), context, budget, context.rng)
    shapes = set()
    for row, (prompt, depth) in enumerate(zip(prompts, depths, strict=True)):
        paths = paths_of(draft, row)
        expected = by_definition(model, prompt, temperature, depth, num_nodes, width)
        assert sorted(paths) == sorted(expected)
        assert [len(path) for path in paths] == sorted(len(path) for path in paths)
        shapes.add(tuple(draft.parents_BN[row].tolist()))
    assert len(shapes) > 1


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mistral"])
def test_greedy_output_is_the_targets_own(family: str) -> None:
    """Token for token, in ragged batches whose rows end at different times, past the windows."""
    target, draft = tiny(family, 0), tiny(family, 1)
    prompts = ragged_prompts([3, 17, 9])
    sampling = [greedy(n) for n in (26, 11, 19)]
    plain = engine_of(target).generate(prompts, sampling)
    trees = engine_of(target, draft, method(num_nodes=10, width=3, depth=4), max_batch_size=2)
    assert token_ids(trees.generate(prompts, sampling)) == token_ids(plain)


def test_a_row_has_the_same_output_in_any_batch() -> None:
    """Sampled, with float64 models: alone, in a batch, and in a batch whose rows join and leave."""
    target, draft = tiny(seed=0, dtype=torch.float64), tiny(seed=1, dtype=torch.float64)
    prompts = ragged_prompts([5, 2, 9, 4, 7])
    sampling = [
        Sampling(max_new_tokens=n, ignore_eos=True, frequency_penalty=0.2, top_p=0.9)
        for n in (12, 20, 7, 16, 3)
    ]
    settings = {"num_nodes": 14, "width": 3, "depth": 3}
    engine = engine_of(target, draft, method(**settings))
    alone = [
        engine.generate([prompt], one)[0].token_ids
        for prompt, one in zip(prompts, sampling, strict=True)
    ]
    few = engine_of(target, draft, method(**settings), max_batch_size=2)
    assert token_ids(engine.generate(prompts, sampling)) == alone
    assert token_ids(few.generate(prompts, sampling)) == alone


def test_wide_trees_to_the_end_of_the_context() -> None:
    """Up to the last token of a context, where most of a tree lies beyond it."""
    model = tiny(seed=0)
    engine = engine_of(model, model, method(num_nodes=256, width=50, depth=6), γ=5)
    done = engine.generate(ragged_prompts([3, 9]), greedy(500))
    assert [len(result.token_ids) for result in done] == [125, 119]
    assert token_ids(done) == token_ids(
        engine_of(model).generate(ragged_prompts([3, 9]), greedy(500))
    )


def test_more_children_than_tokens() -> None:
    """A draft model with fewer logits than the target, and wider trees than it has tokens."""
    context = Context.start(ragged_prompts([3, 4], 5), Warp([Sampling()] * 2, 9), [0, 0], [0, 1])
    drafter = DynamicTreeDrafter(tiny(seed=1, vocab_size=5), 9, num_nodes=100, width=8, depth=2)
    with torch.inference_mode():
        draft = drafter.propose(drafter.start(context), context, Budget(2), context.rng)
    assert int(draft.tokens_BN[draft.mask_BN].max()) < 5
    assert draft.num_drafted_B.tolist() == [5 + 5 * 5] * 2


def test_declaring_the_kept_nodes_as_draws_would_show() -> None:
    """The mutant that ENUM must reject: the same nodes declared as draws without replacement."""

    class Passed(DynamicTreeDrafter):
        def propose(self, state: Any, context: Context, *args: Any) -> Draft:
            draft = super().propose(state, context, *args)
            probs_BNV = torch.full((*draft.tokens_BN.shape, V), 1 / V, dtype=torch.float64)
            return Draft(draft.tokens_BN, draft.parents_BN, draft.mask_BN, probs_BNV, "distinct")

    with torch.inference_mode():
        drafter = Passed(toy(1), V, num_nodes=4, width=2, depth=2)
        done = enumerate_round(toy(0), drafter, Distinct(), 2, distribution=distribution)
    assert done.total_variation > 1e-3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_nodes": 1}, "num_nodes=1: must be a whole number from 2 to 256"),
        ({"num_nodes": 257}, "num_nodes=257"),
        ({"width": 0}, "width=0: must be a whole number from 1 to 51"),
        ({"width": 52}, "width=52"),
        ({"depth": 65}, "depth=65: must be a whole number from 1 to 64"),
        ({"depth": True}, "depth=True"),
    ],
)
def test_numbers_outside_their_range(settings: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        DynamicTreeDrafter(tiny(), VOCAB, **settings)
