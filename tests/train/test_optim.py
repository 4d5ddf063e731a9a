"""Which parameters each optimiser updates, and learning rates."""

import pytest
import torch
from tiny_models import tiny_module

from outrider.train.optim import Schedule, build_optimizers


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "opt"])
def test_muon_updates_the_layers_matrices_and_nothing_else(family):
    model = tiny_module(family)
    muon, adamw = build_optimizers(model, 1e-3)
    by_muon = {id(each) for group in muon.param_groups for each in group["params"]}
    by_adamw = {id(each) for group in adamw.param_groups for each in group["params"]}
    assert by_muon | by_adamw == {id(each) for each in model.parameters()}
    assert not by_muon & by_adamw
    layers = next(part for part in model.modules() if isinstance(part, torch.nn.ModuleList))
    assert by_muon == {id(each) for each in layers.parameters() if each.ndim == 2}


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_learning_rates_that_are_none(rate):
    with pytest.raises(ValueError, match=f"learning rate is {rate}; it must be a finite number"):
        Schedule(rate, 10)
