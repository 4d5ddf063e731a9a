"""A beam search by one program equals the search step by step, and outputs are the same."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted_graphs import InterpretedDrafts, untraced, without_compiler
from tiny_models import VOCAB, engine_of, greedy, ragged_prompts, tiny, token_ids

from outrider import Sampling
from outrider.drafters.search.fused import BeamPlan, SampledBeams
from outrider.methods import METHODS
from outrider.runtime.executors.parity import compare

SAMPLED = Sampling(temperature=1.0, seed=3, max_new_tokens=20, ignore_eos=True)
SAMPLINGS = {
    "greedy": greedy(20),
    "truncated": replace(SAMPLED, temperature=0.6, top_p=0.8, top_k=9),
    "penalised": replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={3: 2}),
}
METHOD_OPTIONS = [
    ("mjsd", {"beams": 3}),
    ("mjsd", {"beams": 3, "search": "greedy"}),
    ("mtad", {"beams": 2}),
]


def engine(
    name: str, options: dict[str, Any], batch: int, compiled: bool = False
) -> tuple[Any, Any]:
    """An engine that drafts by beam search, and the executor of its draft model."""
    target, draft = tiny(), tiny(seed=1)
    executor = InterpretedDrafts(draft)
    draft.compiled = executor if compiled else None
    found = engine_of(target, draft, METHODS[name], γ=3, max_batch_size=batch, options=options)
    return (without_compiler(found) if compiled else found), executor


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(("name", "options"), METHOD_OPTIONS, ids=str)
def test_outputs_are_the_same(name: str, options: dict[str, Any], sampling: Sampling) -> None:
    """In a ragged batch, whose rows end one after the other: alone in the end, the last one has
    rounds with a smaller budget."""
    prompts = ragged_prompts([9, 3, 14])
    samplings = [replace(sampling, max_new_tokens=20 - 3 * row) for row in range(3)]
    wanted = engine(name, options, 3)[0].generate(prompts, samplings)
    by_program, executor = engine(name, options, 3, compiled=True)
    found = by_program.generate(prompts, samplings)
    assert token_ids(found) == token_ids(wanted)
    assert executor.drafts > 3
    for one, other in zip(found, wanted, strict=True):
        assert one.stats.accepted == other.stats.accepted
        assert one.stats.alpha == pytest.approx(other.stats.alpha, abs=1e-5)


@pytest.mark.parametrize("name", ["mjsd", "mtad"])
def test_greedy_rows_among_sampled_ones(name: str) -> None:
    prompts, samplings = ragged_prompts([9, 3, 14]), [SAMPLED, SAMPLED, greedy(20)]
    wanted = engine(name, {"beams": 2}, 3)[0].generate(prompts, samplings)
    by_program, executor = engine(name, {"beams": 2}, 3, compiled=True)
    assert token_ids(by_program.generate(prompts, samplings)) == token_ids(wanted)
    assert executor.drafts > 3


@pytest.mark.parametrize(
    "options",
    [{"search": "copies"}, {"distributions": "raw"}, {"beams": VOCAB // 2 + 1}],
    ids=str,
)
def test_searches_without_a_program(options: dict[str, Any]) -> None:
    """Several roots, logits for the rule, and more draws than there are tokens."""
    wanted = engine("mjsd", options, 1)[0].generate(ragged_prompts([9]), SAMPLED)
    by_program, executor = engine("mjsd", options, 1, compiled=True)
    assert token_ids(by_program.generate(ragged_prompts([9]), SAMPLED)) == token_ids(wanted)
    assert executor.drafts == 0


def test_a_program_that_finds_other_beams_is_found() -> None:
    model, plan = tiny(), BeamPlan(3, 2, samples=True)
    each = SampledBeams(model.module, model.spec, plan)
    in_use = model.example_cache().in_use()
    half = len(in_use) // 2
    buffers = in_use[:half], in_use[half:]
    program = untraced(each)

    def wrong(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        found = program(inputs)
        found[2][:, -1] += 1
        return found

    assert compare(each, program, buffers) == ""
    assert "do not follow" in compare(each, wrong, buffers)
