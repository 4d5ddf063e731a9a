"""The call of a ``transformers`` decoder: the same from eager code and from compiled programs."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from outrider.runtime.attention_metadata import AttentionMetadata


def decoder_logits(
    module: Any, tokens_BN: Tensor, metadata: AttentionMetadata, cache: Cache, **more: Any
) -> Tensor:
    """The logits (B, N, V) of a decoder-only model; the model writes to the cache.

    Args:
        module: the model, or a view of it.
        tokens_BN: query tokens.
        metadata: their positions and masks.
        cache: where the model writes and reads keys and values.
        more: further arguments of the model's forward method.
    """
    logits_BNV: Tensor = module(
        input_ids=tokens_BN,
        position_ids=metadata.positions_BN,
        attention_mask=metadata.mask,
        past_key_values=cache,
        use_cache=True,
        **more,
    ).logits
    return logits_BNV
