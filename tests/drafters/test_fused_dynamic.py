"""A dynamic tree by one program equals the tree grown level by level, and outputs are the same."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted_graphs import InterpretedDrafts, interpreted, untraced, without_compiler
from tiny_heads import CountedHeadExecutor, target_of, tiny_head
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids

from outrider import Sampling
from outrider.drafters.heads import eagle3_model, head_model
from outrider.drafters.heads.fused_dynamic_tree import HeadDynamicTreePlan
from outrider.drafters.tree.fused_dynamic import DynamicTreePlan
from outrider.engine import Engine
from outrider.engine.warming import warm_up
from outrider.methods import METHODS
from outrider.runtime.executors import parity
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.executors.parity import compare
from outrider.runtime.executors.traced_cache import halves

SHAPE = {"num_nodes": 8, "width": 2, "depth": 3}
SAMPLED = Sampling(temperature=1.0, seed=3, max_new_tokens=20, ignore_eos=True)
SAMPLINGS = {
    "greedy": greedy(20),
    "truncated": replace(SAMPLED, temperature=0.6, top_p=0.8, top_k=9),
    "penalised": replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={3: 2}),
}


def of_model(batch: int, *, compiled: bool) -> tuple[Engine, Any]:
    """An engine that drafts by a model, and the executor that counts the drafts of programs."""
    target, draft = tiny(), tiny(seed=1)
    executor = InterpretedDrafts(draft)
    draft.compiled = executor if compiled else None
    settings: dict[str, Any] = {"γ": 3, "max_batch_size": batch, "options": SHAPE}
    found = engine_of(target, draft, METHODS["dynamic-tree"], **settings)
    return (without_compiler(found, traces_rules=False) if compiled else found), executor


def of_head(batch: int, *, compiled: bool) -> tuple[Engine, Any]:
    """The same by a head, whose draft vocabulary is a part of the target's."""
    target = target_of()
    if compiled:
        target.compiled = CompiledExecutor(target.module, target.spec, "target", interpreted)
        target.compiled.sealed = True  # the head's programs are what is tested
    made = Engine(
        target,
        tiny_head(target, 17),
        METHODS["eagle3-dynamic-tree"],
        num_speculative_tokens=3,
        max_batch_size=batch,
        options=SHAPE,
    )
    if compiled:
        warm_up(without_compiler(made))
    (model,) = made.drafter.capabilities.models
    return made, model.compiled


def drafts_of(executor: Any) -> int:
    """How many drafts programs have made."""
    is_head = isinstance(executor, CountedHeadExecutor)
    return CountedHeadExecutor.calls if is_head else executor.drafts


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("engine", [of_model, of_head])
def test_outputs_equal_those_of_trees_grown_level_by_level(
    engine: Any, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a ragged batch whose rows end one after the other: a row that may emit few tokens more has
    the most probable nodes down to its budget. A head knows nothing of a prompt of one token."""
    monkeypatch.setattr(head_model, "HeadExecutor", CountedHeadExecutor)
    prompts = ragged_prompts([9, 3, 1, 14], 23)
    samplings = [replace(sampling, max_new_tokens=20 - 3 * row) for row in range(4)]
    wanted = engine(3, compiled=False)[0].generate(prompts, samplings)
    by_program, executor = engine(3, compiled=True)
    before = drafts_of(executor)
    found = by_program.generate(prompts, samplings)
    assert token_ids(found) == token_ids(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.origins == other.origins
        assert one.stats.drafted == other.stats.drafted
        assert one.stats.alpha == pytest.approx(other.stats.alpha, abs=1e-5)
    assert drafts_of(executor) > before + 3
    assert not executor.failed


@pytest.mark.parametrize("engine", [of_model, of_head])
def test_the_tokens_of_changed_logits_are_found_level_by_level(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program of greedy rows knows the model's logits only."""
    monkeypatch.setattr(head_model, "HeadExecutor", CountedHeadExecutor)
    sampling = replace(greedy(20), repetition_penalty=1.3)
    prompts = ragged_prompts([9], 23)
    wanted = engine(1, compiled=False)[0].generate(prompts, sampling)
    by_program, executor = engine(1, compiled=True)
    before = drafts_of(executor)
    assert token_ids(by_program.generate(prompts, sampling)) == token_ids(wanted)
    assert drafts_of(executor) == before


def test_a_tree_wider_than_the_draft_vocabulary_has_no_program() -> None:
    target = target_of()
    options = {"num_nodes": 40, "width": 20, "depth": 2}
    method = METHODS["eagle3-dynamic-tree"]
    engine = Engine(target, tiny_head(target, 17), method, options=options)
    assert engine.drafter.capabilities.fused_tree is None
    assert token_ids(engine.generate(ragged_prompts([9], 23), greedy(6)))


def passes_of(kind: str, *, sampled: bool) -> tuple[Any, Any]:
    """A program's forward pass, and KV buffers for it."""
    target = target_of()
    if kind == "head":
        model: Any = eagle3_model.Eagle3Model(tiny_head(target, 17), target)
        plan: DynamicTreePlan = HeadDynamicTreePlan(3, 2)
    else:
        model, plan = target, DynamicTreePlan(3, 2)
    each = plan.programs(model.module, model.spec)[sampled]
    return each, halves(model.example_cache().in_use())


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_program_that_expands_other_nodes_is_found(kind: str, sampled: bool) -> None:
    each, buffers = passes_of(kind, sampled=sampled)
    program = untraced(each)

    def another_node(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        found = program(inputs)
        found[2][:, 2] = found[2][:, 1]
        return found

    def another_candidate(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        found = program(inputs)
        found[2][:, -1] = found[2][:, 0]
        return found

    def other_distributions(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        found = program(inputs)
        found[0] *= 1.1
        return found

    assert compare(each, program, buffers) == ""
    for wrong in (another_node, another_candidate):
        assert "do not follow" in compare(each, wrong, buffers)
    assert compare(each, other_distributions, buffers)


def test_nodes_that_rounding_exchanges_are_not_compared() -> None:
    """Two nodes of almost the same value may change places, and have the same token."""
    each, buffers = passes_of("model", sampled=False)
    program = untraced(each)

    def exchanged(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The two nodes below the root, each with the recorded row of the other."""
        recorded_BNV, health_B, tokens_BN, token_BC, parent_BC, score_BC = program(inputs)
        recorded_BNV[:, 1:3] = recorded_BNV[:, 1:3].flip(1)
        tokens_BN[:, 1:3] = 5
        score_BC[:, :2] = score_BC[:, :2].flip(1)
        return [recorded_BNV, health_B, tokens_BN, token_BC, parent_BC, score_BC]

    inputs = list(parity._examples(each, buffers, (3, 4, 9, 12)))
    wanted = each(*inputs)
    wanted[2][:, 1:3] = 5
    found = exchanged(parity.flat(inputs))
    same_BD = each.same(wanted, found)
    assert same_BD[:, 0].all()
    assert not same_BD[:, 1:].any()
    assert each.same(wanted, wanted).all()
