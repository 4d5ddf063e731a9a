"""The loss over a row's logits has the same value and gradients, whether the logits exist at once.

Legend: N positions, V vocabulary, C positions of a chunk.
"""

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, tiny_module
from torch.nn.functional import cross_entropy

from outrider.train.distill import logits_loss
from outrider.train.distill.logits_loss import loss_over_row, multiplies_hidden_states
from outrider.train.distill.packing import logits_of, pack
from outrider.train.distill.sample import Sample
from outrider.train.fused_linear_loss import fused_linear_loss

CAPPED = "gemma2"  # its logits are capped after the output layer


def row():
    return pack([Sample((5, 6, 7, 8, 9, 3), 2), Sample((9, 3, 4, 1), 1)])


@pytest.mark.parametrize("family", FAMILIES)
def test_models_with_other_logits_are_found_out(family):
    assert multiplies_hidden_states(tiny_module(family)) == (family != CAPPED)


def test_an_output_layer_with_a_bias_is_found_out():
    model = tiny_module()
    model.lm_head.bias = torch.nn.Parameter(torch.ones(VOCAB))
    assert not multiplies_hidden_states(model)


@pytest.mark.parametrize("width", [None, VOCAB - 7])
@pytest.mark.parametrize("family", ["llama", CAPPED])
def test_value_and_gradients_are_those_of_all_logits(family, width, monkeypatch):
    """In chunks of two positions, whose logits are few enough."""
    model, given = tiny_module(family), row()

    def in_twos(hidden_NH, weight_VH, loss_of):
        return fused_linear_loss(hidden_NH, weight_VH, loss_of, 2 * len(weight_VH))

    monkeypatch.setattr(logits_loss, "fused_linear_loss", in_twos)
    chunks = []

    def loss_of(logits_CV, chunk):
        chunks.append(len(logits_CV))
        return cross_entropy(logits_CV, given.labels_N[chunk], reduction="sum")

    def gradients(loss):
        parameters = {
            "embedding": model.get_input_embeddings().weight,
            "output": model.get_output_embeddings().weight,
            "layer": model.model.layers[0].mlp.up_proj.weight,
        }
        found = torch.autograd.grad(loss, list(parameters.values()))
        return dict(zip(parameters, found, strict=True))

    expected = loss_of(logits_of(model, given)[:, :width], slice(0, 7))
    wanted = gradients(expected)
    chunks.clear()
    found = loss_over_row(model, width)(given, loss_of)
    assert chunks == ([7] if family == CAPPED else [2, 2, 2, 1])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found), wanted, atol=1e-5, rtol=1e-4)
