"""Warm-up reports every program that it compiles, and no request needs another one."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted_graphs import untraced
from tiny_models import engine_of, greedy, ragged_prompts, tiny
from torch import Tensor, nn

import outrider
from outrider import Engine, Sampling
from outrider.core import Draft
from outrider.engine import assembly
from outrider.engine.warming import warm_up
from outrider.methods import METHODS
from outrider.runtime import HFModel
from outrider.runtime.executors.compile_cache import Program
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.executors.fused_verification import CompiledVerifier

γ = 4
SAMPLED = Sampling(max_new_tokens=9, seed=1, ignore_eos=True)
PROMPTS = [[5, 6, 7] * 6, *ragged_prompts([100, 40, 2])]


class Making:
    """Compiles graphs, and counts them and their calls."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, module: nn.Module, trace: Any, own: bool = False) -> Program:
        self.graphs += 1
        graph = untraced(module)

        def counted(inputs: list[Tensor]) -> list[Tensor]:
            self.calls += 1
            return graph(inputs)

        return counted

    def give(self, model: HFModel) -> HFModel:
        """The model with graphs from this compiler."""
        model.compiled = CompiledExecutor(model.module, model.spec, "graph", self)
        return model


def compiled(
    method: str, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[Engine, Making]:
    making = Making()
    draft = making.give(tiny(seed=1, dtype=dtype)) if METHODS[method].needs_draft else None
    engine = engine_of(making.give(tiny(dtype=dtype)), draft, method, γ, **settings)
    if engine.verification is not None:
        shape = engine.drafter.capabilities.tree_shape
        engine.verification = CompiledVerifier(making, shape)
    return engine, making


def unseal(engine: Engine) -> None:
    """Lets the engine compile again, so that a missing program would be compiled and counted."""
    assert engine.verification is not None
    engine.verification.sealed = False
    for model in filter(None, (engine.target, engine.draft)):
        assert model.compiled is not None
        model.compiled.sealed = False


def every_request(engine: Engine, samplings: Iterable[Sampling]) -> None:
    """Runs requests of every kind that needs a program.

    Alone and in ragged batches that rows leave, with short and long prompts, all lengths of the
    last draft, repetitions that can be copied, and all kinds of distributions.
    """
    for sampling in samplings:
        engine.generate(PROMPTS[:1], sampling)
        engine.generate(PROMPTS, [replace(sampling, max_new_tokens=4 + n) for n in range(4)])


@pytest.mark.parametrize(("method", "graphs"), [("speculative", 6), ("plain", 2)])
def test_all_graphs_are_compiled_and_reported(method: str, graphs: int) -> None:
    """The target, draft steps, fused drafts at temperature 0 and above, and a rule for each; of
    plain decoding the target and its rule above temperature 0."""
    engine, making = compiled(method)
    told: list[tuple[str, float]] = []
    warm_up(engine, lambda what, share: told.append((what, share)))
    assert making.graphs == graphs
    assert [share for _, share in told] == [n / graphs for n in range(graphs)]
    for sampling in (greedy(9), SAMPLED):
        engine.generate(ragged_prompts([9]), sampling)
    warm_up(engine)
    assert making.graphs == graphs


GREEDY = (greedy(9), greedy(9, repetition_penalty=1.2))
DISTRIBUTIONS = (SAMPLED, replace(SAMPLED, top_p=0.9, logprobs=2))
CASES = [
    ("speculative", 6),
    ("plain", 2),
    ("prompt-lookup", 3),
    ("block", 6),
    ("coupled", 6),
    ("ensemble", 6),
    ("top-k-tree", 7),
    ("dynamic-tree", 8),
    ("mjsd", 7),
    ("mtad", 8),
]


@pytest.mark.parametrize(("method", "graphs"), CASES)
def test_no_request_needs_another_program(method: str, graphs: int) -> None:
    """For several kinds of drafters; also in bfloat16, whose distributions are in float32."""
    engine, making = compiled(method, torch.bfloat16, max_batch_size=3)
    warm_up(engine)
    assert making.graphs == graphs
    unseal(engine)
    every_request(engine, (*GREEDY, *DISTRIBUTIONS))
    assert making.graphs == graphs


@pytest.mark.parametrize(
    "settings",
    [{"draft_confidence": 0.4}, {"draft_length": "heuristic:2"}, {"draft_length": "survival"}],
    ids=str,
)
def test_no_request_needs_another_program_with_drafts_that_stop_early(settings: Any) -> None:
    engine, making = compiled("speculative", max_batch_size=3, **settings)
    warm_up(engine)
    graphs = making.graphs
    unseal(engine)
    every_request(engine, (GREEDY[0], DISTRIBUTIONS[0]))
    assert making.graphs == graphs == 6


def test_copied_drafts_use_fused_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, making = compiled("prompt-lookup")
    warm_up(engine)
    assert engine.verification is not None
    program, found = engine.verification._program, []

    def recorded(verifier: Any, draft: Draft, *rest: Any) -> Program | None:
        made = program(verifier, draft, *rest)
        found.extend([made] * (draft.num_nodes > 1))
        return made

    monkeypatch.setattr(engine.verification, "_program", recorded)
    for sampling in (greedy(6), *DISTRIBUTIONS):
        engine.generate([[5, 6, 7, 8, 9, 10] * 3], sampling)
        assert found
        assert None not in found
        found.clear()
    assert making.graphs == 3


def test_a_request_never_compiles_a_missing_program() -> None:
    """It runs eagerly, with the same outputs."""
    engine, making = compiled("top-k-tree")
    wanted = engine_of(tiny(), tiny(seed=1), "top-k-tree", γ).generate(PROMPTS, greedy(6))
    warm_up(engine)
    graphs, calls = making.graphs, making.calls
    for model in (engine.target, engine.draft):
        assert model is not None
        assert model.compiled is not None
        model.compiled._programs.clear()
    assert engine.verification is not None
    engine.verification._programs.clear()
    found = engine.generate(PROMPTS, greedy(6))
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    assert (making.graphs, making.calls) == (graphs, calls)


def test_a_model_that_is_loaded_again_gets_the_programs_of_the_other_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loading compiles programs for models that other engines have sealed."""
    engine, making = compiled("speculative")
    warm_up(engine)
    assert making.graphs == 6
    assert engine.target.compiled is not None
    monkeypatch.setattr(assembly, "_verification", lambda target, shape: None)
    again = outrider.load(engine.target, engine.draft, "top-k-tree", compile="off")
    assert making.graphs == 9  # trees of both models, and the fused one
    assert again.target.compiled is not None
    assert again.target.compiled.sealed


def test_eager_engines_report_nothing() -> None:
    told: list[str] = []
    warm_up(engine_of(tiny(), tiny(seed=1)), lambda what, share: told.append(what))
    assert not told
