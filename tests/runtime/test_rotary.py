"""Rotary positions of networks of our own.

Legend: B rows, N tokens, H heads, C width of a head.
"""

import pytest
import torch
from tiny_block_heads import tiny_block_head
from tiny_heads import target_of
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from outrider.runtime.hf.rotary import RotaryEmbedding

LONG = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 10000.0}, LONG])
def test_queries_turn_as_those_of_transformers(rope: dict[str, object]) -> None:
    config = LlamaConfig(head_dim=8, rope_parameters=rope, max_position_embeddings=512)
    x_BHNC, position_BN = torch.randn(2, 3, 5, 8), torch.randint(500, (2, 5))
    cos, sin = LlamaRotaryEmbedding(config)(x_BHNC, position_BN)
    wanted, _ = apply_rotary_pos_emb(x_BHNC, x_BHNC, cos, sin)
    found = RotaryEmbedding(config)(position_BN, torch.float32)(x_BHNC)
    torch.testing.assert_close(found, wanted)


def test_frequencies_move_to_the_device_of_the_positions() -> None:
    """MUT: if they stayed, each pass would copy them, which a CUDA graph cannot capture."""
    rotary = RotaryEmbedding(LlamaConfig(head_dim=8))
    position_12 = torch.zeros(1, 2, dtype=torch.int64)
    assert rotary(position_12, torch.float32).cos_BNC.device.type == "cpu"
    for _ in range(2):
        assert rotary(position_12.to("meta"), torch.float32).cos_BNC.is_meta
        assert rotary._embedding.inv_freq.is_meta


def test_angles_keep_their_precision_when_a_network_is_cast() -> None:
    """MUT: as a module, the frequencies would be rounded to bfloat16 with the weights."""
    network = tiny_block_head(target_of()).network
    position_11 = torch.tensor([[1000]])
    before = network._rotary(position_11, torch.float32).cos_BNC
    after = network.to(torch.bfloat16)._rotary(position_11, torch.float32).cos_BNC
    assert torch.equal(before, after)
    rounded = nn.ModuleList([LlamaRotaryEmbedding(network.config.layers)]).to(torch.bfloat16)
    off = rounded[0](torch.zeros(1), position_11)[0] - before
    assert float(off.abs().max()) > 0.01
