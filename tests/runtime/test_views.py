"""Views share everything with a module but what they replace, and never change it."""

from functools import partial, update_wrapper
from types import MethodType
from typing import Any

import pytest
import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny_module, token_ids
from torch import Tensor, nn

from outrider.core.errors import UnsupportedModelError
from outrider.runtime import HFModel
from outrider.runtime.hf.views import StandIn, with_parts

PROMPTS = ragged_prompts([4, 2])


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(float(factor)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_what_is_not_replaced_is_shared() -> None:
    two, three = Scale(2), Scale(3)
    inner = nn.Sequential(two, three)
    module = nn.ModuleDict({"a": nn.Sequential(inner, two), "b": nn.Sequential(three)})
    view = with_parts(module, {two: StandIn(two, lambda x: x + 10)})
    assert view["b"] is module["b"]
    assert view["a"] is not module["a"]
    assert view["a"][0][1] is three
    x = torch.tensor(1.0)
    assert view["a"](x) == (1 + 10) * 3 + 10
    assert module["a"](x) == 1 * 2 * 3 * 2
    with torch.no_grad():
        three.factor.fill_(5)
    assert view["a"](x) == (1 + 10) * 5 + 10
    assert view["a"][1].factor is two.factor  # to whoever asks, a stand-in is what it replaces
    assert not list(view["a"][1].parameters())


def test_nothing_to_replace_is_the_module_itself() -> None:
    module = nn.Sequential(Scale(2))
    assert with_parts(module, {}) is module


def hooked_as_by_accelerate(module: nn.Module) -> None:
    """Every part's forward becomes a function that is given the part and runs its old forward."""

    def new_forward(part: Any, *args: Any, **kwargs: Any) -> Any:
        return part._old_forward(*args, **kwargs)

    for part in list(module.modules()):
        old = part.forward
        vars(part)["_old_forward"] = old
        vars(part)["forward"] = update_wrapper(partial(new_forward, part), old)


def test_methods_set_on_instances_run_on_the_view() -> None:
    module = tiny_module()
    wanted = token_ids(engine_of(HFModel(module)).generate(PROMPTS, greedy(6)))
    hooked_as_by_accelerate(module)
    vars(module)["forward"] = MethodType(type(module).forward, module)
    early = engine_of(HFModel(module), None, "early-exit")
    done = early.generate(PROMPTS, greedy(6))
    assert token_ids(done) == wanted
    assert done.stats.drafted > 0


def test_a_function_that_knows_the_original_only_is_refused() -> None:
    module = tiny_module()
    own = module.model.forward
    vars(module.model)["forward"] = lambda *args, **kwargs: own(*args, **kwargs)
    with pytest.raises(UnsupportedModelError, match="LlamaModel has a forward function of its own"):
        engine_of(HFModel(module), None, "early-exit")
