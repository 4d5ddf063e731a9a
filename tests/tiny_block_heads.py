"""Random DFlash and DSpark heads for tiny targets, and their network run anew without a cache.

Legend: T tokens of the context, N slots of the block, E width of the hidden states read.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tiny_heads import hidden_states
from torch import Tensor
from transformers import Qwen3Config

from outrider.drafters.heads.block_head import BlockHead
from outrider.drafters.heads.block_network import BlockConfig, BlockNetwork
from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.runtime import HFModel

DSPARK = {
    "sample_from_anchor": True,
    "markov_rank": 3,
    "has_confidence": True,
    "confidence_reads_markov": True,
}


def tiny_block_head(
    target: HFModel,
    draft_vocab_size: int | None = None,
    seed: int = 7,
    block_size: int = 4,
    num_layers: int = 2,
    target_layers: tuple[int, ...] = (1, 3),
    **options: Any,
) -> BlockHead:
    """A random head; its draft vocabulary takes every token but the first ones of the target."""
    width, V = target.module.config.hidden_size, target.num_tokens
    D = V if draft_vocab_size is None else draft_vocab_size
    layers = Qwen3Config(
        vocab_size=V,
        hidden_size=width,
        intermediate_size=40,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )
    config = BlockConfig(layers, block_size, V - 1, target_layers, D, width, **options)
    network = BlockNetwork(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise if parameter.ndim > 1 else 1 + 0.3 * noise)
    return BlockHead(network, DraftVocabulary(torch.arange(V - D, V), V), "tiny head")


@torch.no_grad()
def reference_block(head: BlockHead, target: HFModel, tokens: Sequence[int]) -> Tensor:
    """The network's outputs behind a context whose last token is the root, (N, H), by one pass over
    the true hidden states of all tokens before it, in the target's precision."""
    config, network = head.config, head.network.to(target.dtype)
    root = len(tokens) - 1
    hidden_TE = hidden_states(target, tokens, head.target_layers)[:root]
    slots = [tokens[-1]] + [config.mask_token_id] * (config.block_size - 1)
    noise_1NH = target.module.get_input_embeddings()(torch.tensor([slots]))
    context_1TH = network.context(hidden_TE[None])
    before = network.context_keys_values(context_1TH, torch.arange(root)[None])

    def remember(key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return torch.cat([before[layer][0], key], 2), torch.cat([before[layer][1], value], 2)

    position_1N = root + torch.arange(config.block_size)[None]
    output_NH: Tensor = network(noise_1NH, position_1N, remember)[0]
    return output_NH


@torch.no_grad()
def reference_logits(
    head: BlockHead, target: HFModel, tokens: Sequence[int], drafted: Sequence[int]
) -> Tensor:
    """Logits over the target's vocabulary behind a context and some drafted tokens, (V,)."""
    slot = len(drafted)
    h_H = reference_block(head, target, tokens)[head.config.first_slot + slot]
    network = head.network
    logits_D = (network.lm_head or target.module.get_output_embeddings())(h_H)
    if head.config.markov_rank:
        previous = torch.tensor(drafted[-1] if drafted else tokens[-1])
        row_R = network.markov_head.markov_w1.weight[previous]
        logits_D = logits_D + network.markov_head.markov_w2.weight @ row_R
    logits_V = torch.full((target.num_tokens,), -torch.inf, dtype=logits_D.dtype)
    logits_V[head.vocabulary.target_ids_D] = logits_D
    return logits_V
