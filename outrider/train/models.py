"""Builds the Llama models that the trainer trains, target and draft, from a few numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel


@dataclass(frozen=True)
class Architecture:
    """The sizes of a Llama; embeddings and output head are tied."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 16
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    max_position_embeddings: int = 1024

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden size {self.hidden_size} is not a multiple of {self.num_attention_heads} "
                "heads; choose another number of heads"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} heads are not a multiple of "
                f"{self.num_key_value_heads} key-value heads; choose a divisor"
            )


def build_llama(architecture: Architecture, seed: int, end_token: int = 0) -> LlamaForCausalLM:
    """A freshly initialised float32 Llama; output projections are scaled by 1/sqrt(2 layers)."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **asdict(architecture),
        tie_word_embeddings=True,
        bos_token_id=end_token,
        eos_token_id=end_token,
        pad_token_id=end_token,
        initializer_range=0.02,
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.mul_((2 * architecture.num_hidden_layers) ** -0.5)
    return model


def num_parameters(model: PreTrainedModel) -> int:
    """Number of distinct parameters; a tied head counts once."""
    return sum(parameter.numel() for parameter in model.parameters())
