"""A beam search by one program equals the search step by step, and outputs are the same."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted_graphs import InterpretedDrafts, untraced, without_compiler
from tiny_models import VOCAB, engine_of, greedy, ragged_prompts, tiny, token_ids

from outrider import Engine, Sampling
from outrider.drafters.search.beam import MjgdDrafter
from outrider.drafters.search.fused import BeamPlan, BlockPlan, SampledBeams
from outrider.methods import METHODS
from outrider.runtime import HFModel
from outrider.runtime.executors.parity import compare
from outrider.runtime.executors.prepare import stages
from outrider.runtime.executors.traced_cache import halves
from outrider.sampling.warp import DraftParameters

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


def of_one_layer(seed: int = 0) -> HFModel:
    """A model whose programs are traced: tracing takes time by the layer."""
    return tiny(seed=seed, num_hidden_layers=1)


def engine(
    name: str, options: dict[str, Any], batch: int, compiled: bool = False
) -> tuple[Any, Any]:
    """An engine that drafts by beam search, and the executor of its draft model."""
    target, draft = tiny(), of_one_layer(seed=1)
    executor = InterpretedDrafts(draft)
    draft.compiled = executor if compiled else None
    γ = 2 if options.get("search") == "greedy" else 3  # the beams of two steps have ancestors, too
    found = engine_of(target, draft, METHODS[name], γ=γ, max_batch_size=batch, options=options)
    return (without_compiler(found, traces_rules=False) if compiled else found), executor


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


BLOCKS = {
    "greedy": greedy(20),
    "penalised": greedy(20, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={3: 2}),
    "truncated": greedy(20, top_k=2, top_p=0.1),  # which no search of the target applies
}


def of_blocks(batch: int, *, compiled: bool = False) -> tuple[Engine, Any]:
    """An engine for ``mjgd``, and the executor of its target."""
    target = of_one_layer()
    executor = InterpretedDrafts(target)
    target.compiled = executor if compiled else None
    found = engine_of(target, None, "mjgd", γ=3, max_batch_size=batch, options={"beams": 3})
    return (without_compiler(found, traces_rules=False) if compiled else found), executor


@pytest.mark.parametrize("sampling", BLOCKS.values(), ids=BLOCKS)
def test_blocks_of_the_target_are_the_same(sampling: Sampling) -> None:
    """In a ragged batch. Blocks at the ends of outputs are shorter, and no program runs them."""
    prompts = ragged_prompts([9, 3, 14])
    samplings = [replace(sampling, max_new_tokens=20 - 3 * row) for row in range(3)]
    wanted = of_blocks(3)[0].generate(prompts, samplings)
    by_program, executor = of_blocks(3, compiled=True)
    assert token_ids(by_program.generate(prompts, samplings)) == token_ids(wanted)
    assert executor.drafts > 3
    assert executor.refused == []


def test_blocks_of_one_beam_are_greedy_decoding() -> None:
    """A search at temperature 0 does not take the argmax chain's program for more beams."""
    target = of_one_layer()
    target.compiled = executor = InterpretedDrafts(target)
    settings: dict[str, Any] = {"γ": 3, "max_batch_size": 1}
    one, many = (
        engine_of(target, None, "mjgd", options={"beams": beams}, **settings) for beams in (1, 3)
    )
    for each in (one, many):
        without_compiler(each, traces_rules=False)
    prompts = ragged_prompts([9, 3, 14])
    argmax = token_ids(engine_of(of_one_layer()).generate(prompts, greedy(20)))
    assert token_ids(one.generate(prompts, greedy(20))) == argmax
    assert token_ids(many.generate(prompts, greedy(20))) != argmax
    assert executor.drafts > 6


def test_exact_models_search_blocks_without_a_program() -> None:
    """The bits of a fused draft depend on its rows, and here they decide the output."""
    model = tiny()
    assert MjgdDrafter(model, VOCAB, 3, num_fused=4).capabilities.fused_tree is not None
    model.exact = True
    assert MjgdDrafter(model, VOCAB, 3, num_fused=4).capabilities.fused_tree is None


def test_the_programs_of_blocks_are_compiled_ahead() -> None:
    """Without one for the argmax chain, which no row takes."""
    engine, executor = of_blocks(1, compiled=True)
    (drafter,) = engine.drafter.capabilities.models
    plan = engine.drafter.capabilities.fused_tree
    found = stages(drafter, trees=True, plan=plan)
    assert [name for name, _ in found] == [
        "forward passes",
        "forward passes over trees",
        "searches",
    ]
    for _, make in found:
        make()
    executor.sealed, executor.drafts = True, 0
    engine.generate(ragged_prompts([9]), greedy(20))
    assert executor.drafts == 5


@pytest.mark.parametrize("name", ["mjsd", "mtad"])
def test_greedy_rows_among_sampled_ones(name: str) -> None:
    prompts, samplings = ragged_prompts([9, 3, 14]), [SAMPLED, SAMPLED, greedy(20)]
    options = {"beams": 3 if name == "mjsd" else 2}  # as above, so that programs are shared
    wanted = engine(name, options, 3)[0].generate(prompts, samplings)
    by_program, executor = engine(name, options, 3, compiled=True)
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


def test_a_block_that_is_scored_by_other_numbers_is_found() -> None:
    """Without the bias, as if the search scored the model's own logits."""
    model = tiny()
    each = BlockPlan(3, 2, samples=False).programs(model.module, model.spec)[1]
    in_use = model.example_cache().in_use()
    buffers = halves(in_use)
    program = untraced(each)
    bias = 3 + DraftParameters._fields.index("bias_BV")

    def wrong(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return program([*inputs[:bias], torch.zeros_like(inputs[bias]), *inputs[bias + 1 :]])

    assert compare(each, program, buffers) == ""
    assert "differ" in compare(each, wrong, buffers)
