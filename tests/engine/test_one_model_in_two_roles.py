"""A model that drafts for itself: everything is accepted, and each role has its own clock. Whatever
role a model plays, and whatever cache it has, it keeps its executors."""

from typing import Any

import pytest
import torch
from interpreted_graphs import interpreted, without_compiler
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids

from outrider import load
from outrider.runtime import HFModel
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.forward_batch import ForwardBatch, ForwardOutput


class Counted(CompiledExecutor):
    """Counts what runs by compiled programs."""

    forwards = drafts = 0

    def forward(self, batch: ForwardBatch) -> ForwardOutput | None:
        output = super().forward(batch)
        self.forwards += output is not None
        return output

    def draft(self, *arguments: Any) -> Any:
        found = super().draft(*arguments)
        self.drafts += found is not None
        return found


def compiled(dtype: torch.dtype = torch.float32) -> tuple[HFModel, Counted]:
    model = tiny(dtype=dtype)
    model.compiled = executor = Counted(model.module, model.spec, "graph", interpreted)
    return model, executor


def test_clocks_and_health_are_separate() -> None:
    model = tiny()
    engine = load(model, model, num_speculative_tokens=3)
    assert engine.draft is not None
    assert engine.draft is not model
    assert engine.draft.module is model.module
    stats = engine.generate([[1, 2, 3]], greedy(12)).stats
    assert stats.acceptance_rate == 1
    assert 0 < stats.draft_seconds == pytest.approx(engine.draft.watch.seconds())
    assert 0 < stats.target_seconds == pytest.approx(engine.target.watch.seconds())
    assert stats.other_seconds > 0


def test_the_draft_of_itself_is_made_by_the_models_own_programs() -> None:
    model, executor = compiled()
    prompts = ragged_prompts([9, 3])
    wanted = token_ids(engine_of(tiny()).generate(prompts, greedy(12)))
    engine = without_compiler(engine_of(model, model))
    assert engine.draft is not None
    assert engine.draft.name == "draft model"
    assert token_ids(engine.generate(prompts, greedy(12))) == wanted
    assert executor.drafts > 1
    assert not executor.failed


def test_beam_search_runs_the_models_own_programs() -> None:
    """Its second role is a search over the target, with a cache of its own."""
    model, executor = compiled()
    prompts = ragged_prompts([9, 3])
    wanted = token_ids(engine_of(tiny(), None, "beam-search").generate(prompts, greedy(8)))
    engine = without_compiler(engine_of(model, None, "beam-search"))
    (searcher,) = engine.drafter.capabilities.models
    assert searcher.compiled is executor
    assert token_ids(engine.generate(prompts, greedy(8))) == wanted
    assert {each.kind for each in executor._programs} == {"chain", "tree"}
    assert not executor.failed


def test_a_cache_that_stores_the_same_numbers_keeps_the_programs() -> None:
    """A model in bfloat16 computes what ``kv_dtype='bfloat16'`` stores."""
    texts, executors = [], []
    for kv_dtype in ("auto", "bfloat16"):
        model, executor = compiled(torch.bfloat16)
        engine = without_compiler(engine_of(model, kv_dtype=kv_dtype, max_memory="1GB"))
        assert engine.target is not model
        texts.append(token_ids(engine.generate(ragged_prompts([9, 3]), greedy(12))))
        executors.append(executor)
    assert texts[0] == texts[1]
    assert executors[0].forwards == executors[1].forwards > 10


def test_an_exact_model_is_exact_in_both_roles() -> None:
    model = tiny()
    model.exact = True
    engine = engine_of(model, model)
    assert engine.draft is not None
    assert engine.draft.exact
