"""A draft with shared noise by one program equals the draft made step by step.

Outputs of the rule ``Coupled`` do not depend on the draft, so that what is accepted shows whether
drafts are the same.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted_graphs import untraced, without_compiler
from test_fused_drafts import SAMPLED, draft_model, drafting, governed
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids

from outrider import Sampling
from outrider.engine.warming import programs_of
from outrider.runtime.executors.coupled_draft import CoupledDraft, CoupledPlan
from outrider.runtime.executors.fused_draft import ChainPlan
from outrider.runtime.executors.parity import compare
from outrider.runtime.executors.traced_cache import halves

PROMPTS = ragged_prompts([9, 3, 14])


def assert_same(found: Any, wanted: Any) -> None:
    assert token_ids(found) == token_ids(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.origins == other.origins
        assert one.stats.drafted == other.stats.drafted
        assert one.stats.alpha == pytest.approx(other.stats.alpha, abs=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [
        SAMPLED,
        replace(SAMPLED, temperature=0.6, top_p=0.8),
        replace(SAMPLED, repetition_penalty=1.3, logit_bias={3: 2.0}),
    ],
    ids=["sampled", "top-p", "penalties"],
)
def test_what_is_accepted_equals_that_of_step_by_step_drafts(sampling: Sampling) -> None:
    """In a ragged batch, one row of which is greedy, and whose rows leave."""
    samplings = [sampling, sampling, greedy(20)]
    steps = engine_of(tiny(), draft_model(), "coupled", γ=3, max_batch_size=3)
    wanted = steps.generate(PROMPTS, samplings)
    draft, graph = drafting()
    engine = engine_of(tiny(), draft, "coupled", γ=3, max_batch_size=3)
    assert_same(engine.generate(PROMPTS, samplings), wanted)
    assert set(graph._drafts) == {CoupledPlan(3)}
    assert graph.calls > 3


def test_drafts_of_the_target_itself_are_accepted() -> None:
    """Draft and rule draw with the same noise, which programs generate by themselves."""
    draft, graph = drafting(seed=0)
    sampling = replace(SAMPLED, max_new_tokens=21)
    engine = engine_of(draft_model(seed=0), draft, "coupled", γ=3, max_batch_size=3)
    for one in without_compiler(engine).generate(PROMPTS, sampling):
        assert one.stats.accepted == one.stats.drafted == 15
    assert set(graph._drafts) == {CoupledPlan(3)}


def test_greedy_rows_take_the_program_of_other_chains() -> None:
    draft, graph = drafting()
    engine_of(tiny(), draft, "coupled", γ=3).generate(PROMPTS[:1], greedy(12))
    assert set(graph._drafts) == {ChainPlan(3)}


@pytest.mark.parametrize("settings", [{"draft_confidence": 0.02}, {"draft_length": "survival:0.9"}])
def test_drafts_that_stop_take_one_program_per_token(settings: dict[str, Any]) -> None:
    steps = engine_of(tiny(), draft_model(), "coupled", max_batch_size=3, **settings)
    wanted = steps.generate(PROMPTS, SAMPLED)
    draft, graph = drafting()
    engine = engine_of(tiny(), draft, "coupled", max_batch_size=3, **settings)
    assert_same(engine.generate(PROMPTS, SAMPLED), wanted)
    assert set(graph._drafts) == {CoupledPlan(1)}


def test_governed_drafts_are_put_together_from_few_programs() -> None:
    """Later programs draw with the noise of later positions."""
    steps = engine_of(tiny(), draft_model(), "coupled", γ=4, max_batch_size=3)
    wanted = steps.generate(PROMPTS, SAMPLED)
    draft, graph = drafting()
    assert_same(governed(draft, 4, "coupled").generate(PROMPTS, SAMPLED), wanted)
    assert graph.made[:6] == [3, 1] * 3


def test_programs_are_compiled_ahead() -> None:
    draft, graph = drafting()
    engine = engine_of(tiny(), draft, "coupled", γ=3)
    for stage in programs_of(engine):
        if "drafts of" in stage.what:
            stage.make()
    graph.sealed, graph.calls = True, 0
    engine.generate(PROMPTS[:1], SAMPLED)
    assert graph.calls > 3


def test_a_program_that_draws_with_other_noise_is_found() -> None:
    model = tiny()
    each = CoupledDraft(model.module, model.spec, 3)
    buffers, program = halves(model.example_cache().in_use()), untraced(each)
    numbers = each.num_moving - 1

    def wrong(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """With the noise of the next position."""
        return program([*inputs[:numbers], inputs[numbers] + 1, *inputs[numbers + 1 :]])

    assert compare(each, program, buffers) == ""
    assert "do not follow" in compare(each, wrong, buffers)
