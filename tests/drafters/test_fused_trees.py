"""A tree grown by one program equals the tree grown level by level, and outputs are the same."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from interpreted_graphs import InterpretedDrafts
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids

from outrider import Sampling
from outrider.drafters.tree.fused import GreedyTreeDraft, SampledTreeDraft, TreePlan
from outrider.drafters.tree.grow import Children
from outrider.drafters.tree.static import TreeDrafter
from outrider.drafters.tree.topology import Topology
from outrider.methods import Method, Parts
from outrider.runtime import HFModel
from outrider.runtime.executors.parity import compare
from outrider.verifiers import Distinct, Rejection

PATHS = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 0, 0)]
TOPOLOGY = Topology.rank_paths(PATHS)
FLAT = Topology.rank_paths([path for path in PATHS if len(path) < 3])
"""For distinct children, whose program differs in how siblings are drawn: a level less to trace."""
SAMPLED = Sampling(temperature=1.0, seed=3, max_new_tokens=14, ignore_eos=True)


def draft_model() -> HFModel:
    """Of one layer: tracing takes time by the layer. ``test_fused_dynamic.py`` traces trees of a
    head and of a model of two."""
    return tiny(seed=1, num_hidden_layers=1)


def engine(children: Children, batch: int, compiled: bool = False) -> tuple[Any, Any]:
    """An engine that drafts trees, and the executor of its draft model."""
    target, draft = tiny(), draft_model()
    executor = InterpretedDrafts(draft)
    draft.compiled = executor if compiled else None

    def build(parts: Parts) -> TreeDrafter:
        assert parts.draft is not None
        topology = FLAT if children == "distinct" else TOPOLOGY
        return TreeDrafter(parts.draft, parts.target.num_tokens, topology, children)

    rule = Distinct if children == "distinct" else Rejection
    method = Method("tree", "", "", "draft model", rule, build)
    return engine_of(target, draft, method, γ=3, max_batch_size=batch), executor


SAMPLINGS = {
    "greedy": greedy(14),
    "sampled": SAMPLED,
    "truncated": replace(SAMPLED, temperature=0.6, top_p=0.8, top_k=9),
}


CASES = [
    ("greedy", "iid"),  # at temperature 0 all children are the best tokens by rank
    *((name, each) for name in ("sampled", "truncated") for each in get_args(Children)),
]


@pytest.mark.parametrize(("name", "children"), CASES)
def test_outputs_equal_those_of_trees_grown_level_by_level(name: str, children: Children) -> None:
    """Alone, and in ragged batches whose rows leave."""
    sampling = SAMPLINGS[name]
    for batch, lengths in ((1, [9]), (3, [9, 3, 14])):
        prompts = ragged_prompts(lengths)
        wanted = engine(children, batch)[0].generate(prompts, sampling)
        by_program, executor = engine(children, batch, compiled=True)
        found = by_program.generate(prompts, sampling)
        assert token_ids(found) == token_ids(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert one.origins == other.origins
            assert one.stats.drafted == other.stats.drafted
            assert one.stats.alpha == pytest.approx(other.stats.alpha, abs=1e-5)
        assert executor.drafts > 3
        assert not executor.failed


def test_greedy_programs_of_a_shape_are_one_whatever_is_sampled() -> None:
    model = tiny()
    plans = [TreePlan(TOPOLOGY, each, model.device) for each in get_args(Children)]
    greedy_names, sampled_names = (
        {repr(kind(model.module, model.spec, each)) for each in plans}
        for kind in (GreedyTreeDraft, SampledTreeDraft)
    )
    assert (len(greedy_names), len(sampled_names)) == (1, len(plans))


def test_rows_of_different_budgets_share_a_program() -> None:
    """A row that may emit few tokens more has the nodes down to its budget only."""
    samplings = [replace(SAMPLED, max_new_tokens=num) for num in (3, 17, 30)]
    prompts = ragged_prompts([9, 3, 14])
    wanted = engine("iid", 3)[0].generate(prompts, samplings)
    by_program, executor = engine("iid", 3, compiled=True)
    found = by_program.generate(prompts, samplings)
    assert token_ids(found) == token_ids(wanted)
    assert [one.stats.drafted for one in found] == [one.stats.drafted for one in wanted]
    assert executor.drafts > 3


@pytest.mark.parametrize("children", ["iid", "distinct"])
def test_penalties_and_biases_are_grown_by_the_same_program(children: Children) -> None:
    """In a ragged batch, one row of which has neither and is greedy."""
    sampling = replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.2, logit_bias={3: 2.0})
    prompts, samplings = ragged_prompts([9, 3, 14]), [sampling, sampling, greedy(20)]
    wanted = engine(children, 3)[0].generate(prompts, samplings)
    by_program, executor = engine(children, 3, compiled=True)
    found = by_program.generate(prompts, samplings)
    assert token_ids(found) == token_ids(wanted)
    assert executor.drafts > 3
    for one, other in zip(found, wanted, strict=True):
        assert one.stats.alpha == pytest.approx(other.stats.alpha, abs=1e-5)


def test_the_best_tokens_under_penalties_are_found_level_by_level() -> None:
    """The program of trees by rank knows the model's logits only."""
    sampling = replace(greedy(20), repetition_penalty=1.3)
    wanted = engine("iid", 1)[0].generate(ragged_prompts([9]), sampling)
    by_program, executor = engine("iid", 1, compiled=True)
    assert token_ids(by_program.generate(ragged_prompts([9]), sampling)) == token_ids(wanted)
    assert executor.drafts == 0


@pytest.mark.parametrize("kind", [GreedyTreeDraft, SampledTreeDraft])
def test_a_program_that_draws_other_children_is_found(kind: Any) -> None:
    model = tiny()
    plan = TreePlan(TOPOLOGY, "iid", torch.device("cpu"))
    each = kind(model.module, model.spec, plan)
    in_use = model.example_cache().in_use()
    half = len(in_use) // 2
    buffers = in_use[:half], in_use[half:]

    def program(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        moving, kv = inputs[: each.num_moving], inputs[each.num_moving :]
        if kind is SampledTreeDraft:
            moving = [*moving[:3], moving[3:-1], moving[-1]]
        return list(each(*moving, kv[:half], kv[half:]))

    def wrong(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        recorded_BNV, health_B, tokens_BN, mask_BN = program(inputs)
        tokens_BN[:, -2] += 1
        return [recorded_BNV, health_B, tokens_BN, mask_BN]

    assert compare(each, program, buffers) == ""
    assert "do not follow" in compare(each, wrong, buffers)
