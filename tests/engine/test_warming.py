"""What is compiled before the first request is told, and is all that the first request needs."""

from typing import Any

import pytest
from interpreted_graphs import interpreted
from tiny_models import engine_of, greedy, ragged_prompts, tiny
from torch import nn

from outrider import Engine, Sampling
from outrider.engine.judged import CompiledJudge
from outrider.engine.warming import warm_up
from outrider.models import HFModel
from outrider.models.compiled import CompiledPass


class Making:
    """Makes graphs, and keeps count."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: nn.Module, trace: Any, own: bool = False) -> Any:
        self.graphs += 1
        return interpreted(module, trace)

    def give(self, model: HFModel) -> HFModel:
        """The model, with graphs."""
        model.compiled = CompiledPass(model.module, model.windows, model.limit, "graph", self)
        return model


def compiled(method: str) -> tuple[Engine, Making]:
    making = Making()
    draft = making.give(tiny(seed=1)) if method == "speculative" else None
    engine = engine_of(making.give(tiny()), draft, method)
    if engine.judge is not None:
        engine.judge = CompiledJudge(making, engine.num_speculative_tokens)
    return engine, making


@pytest.mark.parametrize(("method", "graphs"), [("speculative", 6), ("plain", 1)])
def test_all_graphs_are_made_and_told(method: str, graphs: int) -> None:
    """Target, the draft's steps, its drafts at temperature 0 and above, and a rule for each."""
    engine, making = compiled(method)
    told: list[tuple[str, float]] = []
    warm_up(engine, lambda what, share: told.append((what, share)))
    assert making.graphs == graphs
    assert [share for _, share in told] == [n / graphs for n in range(graphs)]
    for sampling in (greedy(9), Sampling(max_new_tokens=9, seed=1)):
        engine.generate(ragged_prompts([9]), sampling)
    warm_up(engine)
    assert making.graphs == graphs


def test_nothing_is_told_of_eager_engines() -> None:
    told: list[str] = []
    warm_up(engine_of(tiny(), tiny(seed=1)), lambda what, share: told.append(what))
    assert not told
