"""The weights that an EAGLE-3 head starts training with.

Legend: N tokens, H width, V vocabulary.
"""

from typing import Any

import pytest
import torch
from tiny_heads import target_of
from tiny_models import tiny
from transformers import DynamicCache

from outrider.core.errors import InvalidParameterError
from outrider.drafters.heads.eagle3_network import FirstLayer
from outrider.runtime import HFModel
from outrider.train.heads.eagle3 import Eagle3Training
from outrider.train.heads.initial import OUTPUT_SCALE, copy_layer
from outrider.train.heads.kind import Ground
from outrider.train.heads.kinds import find_kind

TARGET = target_of()


def built(target: HFModel = TARGET, **options: object) -> Eagle3Training:
    """A head in its first state. Tokens of even ids are the most frequent."""
    kind = find_kind("eagle3")
    counts_V = torch.arange(target.num_tokens) % 2 * -1 + 1
    training = kind.build(Ground(target, counts_V, seed=0), **kind.values(options))
    assert isinstance(training, Eagle3Training)
    return training


def test_output_layer_and_final_norm_begin_as_the_targets_at_the_drafted_tokens() -> None:
    network = built(draft_vocab_size=6).network
    even_D = torch.arange(0, 12, 2)
    wanted_DH = TARGET.module.get_output_embeddings().weight[even_D]
    torch.testing.assert_close(network.lm_head.weight.data, OUTPUT_SCALE * wanted_DH.data)
    norm: Any = TARGET.module.get_decoder().norm
    torch.testing.assert_close(network.norm.weight.data, norm.weight.data)


def test_the_feature_begins_as_the_last_layer_that_is_read() -> None:
    network = built(norm_before_fc=False).network
    H, F = network.fc.weight.shape
    hidden_NF = torch.randn(5, F, generator=torch.Generator().manual_seed(0))
    error = network.fuse(hidden_NF) - hidden_NF[:, -H:]
    assert float(error.detach().std()) < 0.3  # std=0.02 of F columns


@torch.no_grad()
def test_a_copied_layer_computes_what_the_targets_layer_does() -> None:
    """Where the embedding is not read, the head's layer is the target's, for any residual of unit
    size, since the head's norm in front of the attention then changes nothing."""
    network = built(from_layer=2).network
    first, source = network.layers[0], TARGET.module.get_decoder().layers[1]
    assert isinstance(first, FirstLayer)
    H = network.fc.weight.shape[0]
    for name in ("q_proj", "k_proj", "v_proj"):
        first.self_attn.get_submodule(name).weight[:, :H].zero_()
    generator = torch.Generator().manual_seed(0)
    x_1NH = torch.randn(1, 6, H, generator=generator)
    x_1NH = x_1NH / x_1NH.pow(2).mean(-1, keepdim=True).sqrt()
    positions_1N = torch.arange(6)[None]
    mask_11NN = torch.ones(6, 6).tril().bool()[None, None]
    wanted_1NH = source(
        x_1NH,
        attention_mask=torch.where(mask_11NN, 0.0, -torch.inf),
        position_embeddings=TARGET.module.get_decoder().rotary_emb(x_1NH, positions_1N),
    )
    embedded_1NH = torch.randn(1, 6, H, generator=generator)
    network.config.layer._attn_implementation = "sdpa"
    rotary = network._rotary(positions_1N, torch.float32)
    found_1NH = first(embedded_1NH, x_1NH, rotary, mask_11NN, DynamicCache())
    torch.testing.assert_close(found_1NH, wanted_1NH, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("number", "message"), [(9, "layers 1 to 4"), (-1, "layers 1 to 4")])
def test_a_layer_that_the_target_lacks_is_refused(number: int, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"from_layer={number}: .*{message}"):
        built(from_layer=number)


def test_a_layer_of_another_size_or_kind_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="another kind or size"):
        built(from_layer=1, intermediate_size=24)
    other = tiny("gpt_neox", vocab_size=23, num_hidden_layers=4)
    first = built().network.layers[0]
    assert isinstance(first, FirstLayer)
    with pytest.raises(InvalidParameterError, match="another kind or size"):
        copy_layer(first, other, 1)
