"""A loss over a model's logits at the positions of a row that are trained on.

Where the logits are a product of the last hidden states and the output layer's weight, they exist
for a few positions at a time (``fused_linear_loss.py``). Models that scale or cap their logits, or
add a bias, get all of a row's logits at once.

Shapes: N positions, V vocabulary, H hidden width, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.train.distill.packing import Row, logits_of, pack
from outrider.train.distill.sample import Sample
from outrider.train.fused_linear_loss import LossOfChunk, fused_linear_loss

LossOverRow = Callable[[Row, LossOfChunk], Tensor]
"""Maps a row and a loss of logits [C, V] at some of its positions, which a slice of N names, to the
sum over all of its positions."""


def loss_over_row(model: PreTrainedModel, width: int | None = None) -> LossOverRow:
    """How to sum a loss of a model's logits over the positions of a row.

    Args:
        model: whose logits.
        width: entries of the vocabulary that count, the first ones; None for all.
    """
    over = _over_chunks if multiplies_hidden_states(model) else _over_all
    return partial(over, model, width)


@torch.no_grad()
def multiplies_hidden_states(model: PreTrainedModel) -> bool:
    """Whether the model's logits are its output layer's weight times its last hidden states."""
    layer: Any = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear) or layer.bias is not None:
        return False
    vocab = model.config.get_text_config().vocab_size
    row = pack([Sample(tuple(token % vocab for token in range(1, 10)), 1)]).to(model.device)
    logits_NV = logits_of(model, row).float()
    hidden_NH = _hidden_of(model, row)
    if hidden_NH.shape[-1] != layer.weight.shape[-1]:
        return False
    product_NV = (hidden_NH @ layer.weight.T).float()
    scale = logits_NV.abs().max().clamp(min=1.0)
    return bool((product_NV - logits_NV).abs().max() / scale <= 64 * torch.finfo(model.dtype).eps)


def _hidden_of(model: PreTrainedModel, row: Row) -> Tensor:
    """The last hidden states [N, H], after the final norm, at the positions trained on."""
    base: Any = model.base_model
    output = base(input_ids=row.tokens_T[None], position_ids=row.positions_T[None], use_cache=False)
    hidden_NH: Tensor = output.last_hidden_state[0, row.predicts_N]
    return hidden_NH


def _over_chunks(
    model: PreTrainedModel, width: int | None, row: Row, loss_of: LossOfChunk
) -> Tensor:
    layer: Any = model.get_output_embeddings()
    return fused_linear_loss(_hidden_of(model, row), layer.weight[:width], loss_of)


def _over_all(model: PreTrainedModel, width: int | None, row: Row, loss_of: LossOfChunk) -> Tensor:
    return loss_of(logits_of(model, row)[:, :width], slice(0, len(row.predicts_N)))
