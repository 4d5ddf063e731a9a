"""Heads that draft with weights of few bits: their q is their own, and outputs are the target's.

Legend: B rows, N nodes, D drafted tokens, V vocabulary.
"""

import copy
from typing import Any

import pytest
import torch
from test_eagle3 import rounds
from tiny_heads import RANDOM_HEADS, target_of, tiny_head
from tiny_models import greedy, ragged_prompts, token_ids
from torch import nn

import outrider
from outrider.core.errors import InvalidParameterError, UnsupportedModelError
from outrider.drafters.heads.eagle3 import Eagle3Drafter, Eagle3Head, Eagle3Model
from outrider.drafters.heads.kinds import FORMATS
from outrider.engine import Engine
from outrider.methods import METHODS
from outrider.train.online.adaptable import subject_of

V, D = 23, 17
KINDS = ("int8", "int8:32", "int8:32+a8", "int4", "int4+a8")
METHOD_OF = {each.kind: each.method for each in FORMATS}


@torch.no_grad()
def with_plain_weights(head: Eagle3Head, network: nn.Module) -> Eagle3Head:
    """The head with the weights of a quantised network as plain tensors: outputs for the rows of
    the identity matrix."""
    plain = copy.deepcopy(head)
    for name, layer in plain.network.named_modules():
        if isinstance(layer, nn.Linear):
            layer.weight.copy_(network.get_submodule(name)(torch.eye(layer.in_features)).T)
    return plain


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["int8:32", "int4"])
def test_q_is_that_of_the_head_with_the_rounded_weights(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not that of the head as it was loaded, so verification stays exact."""
    target = target_of(V)
    monkeypatch.setattr("test_eagle3.TARGET", target)
    head = tiny_head(target, D)
    drafter = Eagle3Drafter(Eagle3Model(head.in_few_bits(kind), target), V)
    of_loaded = Eagle3Drafter(Eagle3Model(head, target), V)
    drafter.model.head = with_plain_weights(head, drafter.model.network)
    of_loaded.model.head = drafter.model.head
    prompts = ragged_prompts([9, 3, 6], V)
    for q_BNV, draft in rounds(drafter, prompts, 3):
        assert draft.probs_BNV is not None
        torch.testing.assert_close(draft.probs_BNV[:, :3], q_BNV[:, :3], rtol=1e-3, atol=1e-4)
    errors = [
        (q - draft.probs_BNV)[:, :3].abs().max() for q, draft in rounds(of_loaded, prompts, 3)
    ]
    assert max(errors) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of_head", RANDOM_HEADS)
def test_outputs_are_those_of_plain_decoding(of_head: str, kind: str) -> None:
    target = target_of(V)
    prompts = ragged_prompts([9, 3, 1, 14], V)
    head = RANDOM_HEADS[of_head](target)
    wanted = Engine(target, None, METHODS["plain"]).generate(prompts, greedy(16))
    engine = Engine(
        target, head.in_few_bits(kind), METHODS[METHOD_OF[of_head]], num_speculative_tokens=3
    )
    found = engine.generate(prompts, greedy(16))
    assert token_ids(found) == token_ids(wanted)
    assert found.stats.drafted > 0


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_all_linear_layers_that_can_be_are_quantized_and_the_head_keeps_its_own(kind: str) -> None:
    target = target_of(V)
    head = tiny_head(target, D)
    before = copy.deepcopy(head.network.state_dict())
    quantized = head.in_few_bits(kind)
    network = Eagle3Model(quantized, target).network
    assert (head.quantized, quantized.quantized) == (None, kind)
    left = [each for each in network.modules() if type(each) is nn.Linear]
    assert all(each.in_features % 16 for each in left)
    for name, weight in head.network.state_dict().items():
        assert torch.equal(weight, before[name])


@torch.inference_mode()
def test_output_layers_have_eight_bits_where_the_others_have_four() -> None:
    target = target_of(V)
    network = Eagle3Model(tiny_head(target, D).in_few_bits("int4"), target).network
    plain = tiny_head(target, D).network

    def error(name: str) -> float:
        layer: Any = plain.get_submodule(name)
        found = network.get_submodule(name)(torch.eye(layer.in_features)).T
        return float((found - layer.weight).abs().max() / layer.weight.abs().max())

    assert error("lm_head") < 1 / 250
    assert error("layers.0.mlp.gate_proj") > 1 / 50


def test_a_loaded_head_is_quantized(tmp_path: Any) -> None:
    from outrider.drafters.heads.formats.eagle3 import save_eagle3

    target = target_of(V)
    save_eagle3(tiny_head(target, D), tmp_path, torch.float32)
    for draft in (str(tmp_path), tiny_head(target, D)):
        engine = outrider.load(target, draft, "eagle3", 3, quantize_draft="int8:32+a8")
        model: Any = next(iter(engine.drafter.capabilities.models))
        assert model.head.quantized == "int8:32+a8"


def test_what_heads_cannot_have_is_refused() -> None:
    target = target_of(V)
    head = tiny_head(target, D)
    with pytest.raises(InvalidParameterError, match=r"keep.* tiny head is none: take another kind"):
        Eagle3Model(head.in_few_bits("keep+a8"), target)
    with pytest.raises(InvalidParameterError, match="must be one of int8"):
        Eagle3Model(head.in_few_bits("int5"), target)
    exact = target_of(V, dtype=torch.float64)
    with pytest.raises(InvalidParameterError, match=r"tiny head has torch.float64 weights"):
        Eagle3Model(head.in_few_bits("int8"), exact)
    with pytest.raises(InvalidParameterError, match="'suffix' has no draft model or head here"):
        outrider.load(target, None, "suffix", quantize_draft="int8")


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_head_is_not_adapted(kind: str) -> None:
    target = target_of(V)
    head = tiny_head(target, D).in_few_bits(kind)
    engine = Engine(target, head, METHODS["eagle3"], num_speculative_tokens=3)
    with pytest.raises(UnsupportedModelError, match="tiny head has quantized weights"):
        subject_of(engine)
