"""Which parameters each optimiser updates."""

import pytest
import torch
from tiny_models import tiny_module

from outrider.train.optim import build_optimizers


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
