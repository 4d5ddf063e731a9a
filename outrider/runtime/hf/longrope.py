"""LongRoPE in ragged batches: short or long rotary factors per row, not per forward pass.

LongRoPE (Ding et al., 2024; Phi-3, Phi-3.5 and Phi-4-mini) has two sets of rotary factors: one for
sequences of up to ``original_max_position_embeddings`` tokens, one for longer ones. The rotary
embeddings of ``transformers`` choose by the largest position of a forward pass, so a short row of a
batch would get the factors of a long one, and the first part of a long prompt those of a short one.

Here the logits after n tokens are those of one forward pass over these n tokens, whatever else is
in the batch and however the tokens are split among forward passes. Hence all keys of a row have
the same factors, and the keys of a row that grows past the original length are recomputed
(``recompute_long_rows`` in ``prefill.py``), as ``generate`` does for Phi-3. A draft must not cross
that length, since one forward pass cannot verify both sides of it: see ``HFModel.draft_room``.

The loaded model is not changed. Forward passes run a view of it (``views.py``) with other rotary
embeddings, which read a position p with long factors as ~p = -p-1.

Legend: B rows, N query tokens, C width of a rotation.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.core import Context, to_device
from outrider.core.errors import UnsupportedModelError
from outrider.runtime.hf.views import with_parts


def original_length(config: Any) -> int | None:
    """The longest sequence for which a model uses its short factors; None without LongRoPE."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "longrope":
        return None
    length: int = parameters["original_max_position_embeddings"]
    return length


def long_rows(context: Context, original: int) -> list[bool]:
    """Which rows have long factors: those longer than ``original``."""
    return [length > original for length in context.lengths]


def marked(positions_BN: Tensor, long: Sequence[bool], original: int) -> Tensor:
    """Positions as :class:`RowFactors` reads them.

    Args:
        positions_BN: the positions.
        long: which rows have long factors. The other rows have them only beyond the original
            length, where none of their committed tokens is.
        original: longest sequence with short factors.
    """
    long_BN = positions_BN >= original
    if any(long):
        long_BN = long_BN | to_device(torch.tensor(long), positions_BN.device)[:, None]
    return torch.where(long_BN, ~positions_BN, positions_BN)


class RowFactors(nn.Module):
    """A rotary embedding that chooses its factors position by position.

    Args:
        rotary: the model's own, which uses long factors iff a position reaches ``original``.
        original: longest sequence for which it uses short factors.
    """

    def __init__(self, rotary: nn.Module, original: int) -> None:
        super().__init__()
        self.short, self.long = _frozen(rotary, original - 1), _frozen(rotary, original)
        self.original = original

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each (B, N, C), at positions (B, N); a negative number is the position
        ~p with long factors."""
        long_BN = position_ids < 0
        short_BN = torch.where(long_BN, 0, position_ids).clamp(max=self.original - 1)
        last_B1 = torch.full_like(position_ids[:, :1], self.original)
        far_BN = torch.cat([torch.where(long_BN, ~position_ids, 0), last_B1], 1)
        cos, sin = self.short(x, short_BN)
        long_cos, long_sin = (each[:, :-1] for each in self.long(x, far_BN))
        long_BN1 = long_BN[..., None]
        return torch.where(long_BN1, long_cos, cos), torch.where(long_BN1, long_sin, sin)


@torch.no_grad()
def _frozen(rotary: nn.Module, position: int) -> nn.Module:
    """A copy that keeps the factors it uses at this position, whatever the position."""
    frozen: Any = copy.deepcopy(rotary)
    position_11 = torch.tensor([[position]], device=frozen.inv_freq.device)
    frozen(frozen.inv_freq, position_11)
    frozen.rope_type = "default"
    return frozen


def with_factors_per_row(module: PreTrainedModel, original: int, name: str) -> PreTrainedModel:
    """A view of a model that reads marked positions.

    Args:
        module: the model; not changed.
        original: longest sequence for which it uses short factors.
        name: how messages call it.

    Raises:
        UnsupportedModelError: the model has no rotary embedding of ``transformers``, or its forward
            pass is wrapped, which a copy would not be.
    """
    rotaries = [each for each in module.modules() if getattr(each, "rope_type", None) == "longrope"]
    kind = type(module).__name__
    if not rotaries:
        raise UnsupportedModelError(
            f"{name} ({kind}) has LongRoPE but no rotary embedding of transformers, so short and "
            f"long sequences cannot share a batch; load it without trust_remote_code"
        )
    if "forward" in vars(module):
        raise UnsupportedModelError(
            f"{name} ({kind}) has LongRoPE, and its forward method is replaced by a wrapper "
            f"(of accelerate, say) that cannot be copied; load it without device_map"
        )
    return with_parts(module, {rotary: RowFactors(rotary, original) for rotary in rotaries})
