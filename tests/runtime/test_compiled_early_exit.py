"""Early exit compiled: each half is a program, and outputs are those of the eager halves."""

from typing import Any

import pytest
import torch
from interpreted_graphs import interpreted, without_compiler
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids

from outrider import Engine, Sampling
from outrider.engine.warming import warm_up
from outrider.methods.self_draft import SELF_DRAFTS
from outrider.runtime import HFModel
from outrider.runtime.executors.compile_cache import dependencies
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.executors.traced import ChainForward, ResumedForward
from outrider.runtime.hf.early_exit import EarlyExit

METHOD = SELF_DRAFTS[1]
LAYERS, γ = 4, 3
SAMPLED = Sampling(temperature=0.9, seed=3, max_new_tokens=14, ignore_eos=True)


class Interpreting:
    """Interprets programs, and counts their calls by kind."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def __call__(self, each: Any, trace: Any) -> Any:
        graph, name = interpreted(each, trace), f"{each.kind} {each.hidden_layers}"
        self.calls[name] = 0

        def counted(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            self.calls[name] += 1
            return graph(inputs)

        return counted


def exiting(layer: int, maker: Any = None, **settings: Any) -> Engine:
    target = tiny(num_hidden_layers=LAYERS)
    if maker is not None:
        target.compiled = CompiledExecutor(
            target.module, target.spec, "target", maker, recording=target.eager.recording
        )
    return engine_of(target, None, METHOD, γ=γ, options={"layer": layer}, **settings)


@pytest.mark.parametrize("batch", [1, 3])
def test_outputs_equal_those_of_the_eager_halves(batch: int) -> None:
    """Alone, and in ragged batches that rows leave, greedy and sampled; every pass of a round is a
    program, which is traced once for both."""
    prompts = ragged_prompts([9, 3, 14])
    eager_halves = exiting(2, max_batch_size=batch)
    maker = Interpreting()
    engine = without_compiler(exiting(2, maker, max_batch_size=batch))
    warm_up(engine)
    eager: list[Any] = []
    for model in (engine.target, *engine.drafter.capabilities.models):
        find = model.eager_executor
        model.eager_executor = lambda batch, find=find: eager.append(batch) or find(batch)
    for sampling in (greedy(14), SAMPLED):
        wanted = eager_halves.generate(prompts, sampling)
        calls = dict(maker.calls)
        eager.clear()
        found = engine.generate(prompts, sampling)
        assert token_ids(found) == token_ids(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert one.stats.accepted == other.stats.accepted
            assert one.stats.alpha == pytest.approx(other.stats.alpha, abs=1e-5)
        used = {name for name, count in maker.calls.items() if count > calls[name]}
        assert used >= {"chain (2,)", "headless chain (2,)", "resumed chain ()"}
        assert not [each for each in eager if not each.num_logits], "only prefills are eager"


def test_each_exit_layer_and_half_has_its_own_program() -> None:
    """The compile cache looks programs up by these names."""
    names = []
    for k in (1, 2, 3):
        target = EarlyExit(tiny(num_hidden_layers=LAYERS), k)
        halves = target.first.eager.module, target.first._headless.module
        names += [str(dependencies(ChainForward(each, target.spec))) for each in halves]
        names.append(str(dependencies(ResumedForward(target._rest.module, target.spec))))
    names.append(str(dependencies(ChainForward(target.module, target.spec))))
    assert len(names) == len(set(names)) == 10


def test_an_eager_target_exits_eagerly() -> None:
    target = EarlyExit(HFModel(tiny(num_hidden_layers=LAYERS).module), 2)
    assert target.compiled is None
    assert target.first.compiled is None
