"""The penalties for repetition: what they do to logits, and how often tokens have occurred.

Legend: B rows, M positions, V vocabulary, K drafted tokens, T context length.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core import Context


class Penalties(NamedTuple):
    """The penalties of each row, (B,)."""

    repetition_B: Tensor
    presence_B: Tensor
    frequency_B: Tensor


def penalised(z_BMV: Tensor, by: Penalties, prompt_BV: Tensor, output_BMV: Tensor) -> Tensor:
    """Logits after the penalties. Repetition counts prompt and output; presence and frequency count
    the output only.

    Args:
        z_BMV: logits, (B, M, V).
        by: the penalties, in the dtype of the logits.
        prompt_BV: which tokens occur in the prompt.
        output_BMV: how often each occurs in the output before each position.
    """
    repetition, presence, frequency = (x_B.view(-1, 1, 1) for x_B in by)
    is_in_output_BMV = output_BMV > 0
    repeated_BMV = torch.where(z_BMV > 0, z_BMV / repetition, z_BMV * repetition)
    z_BMV = torch.where(is_in_output_BMV | prompt_BV[:, None], repeated_BMV, z_BMV)
    return z_BMV - presence * is_in_output_BMV - frequency * output_BMV


def occurrences(tokens_BK: Tensor, on_path_BMK: Tensor, num_tokens: int) -> Tensor:
    """How often each token occurs among the drafted tokens before each position, (B, M, V)."""
    B, M, _ = on_path_BMK.shape
    zeros_BMV = torch.zeros(B, M, num_tokens, device=tokens_BK.device)
    index_BMK = tokens_BK[:, None].expand(on_path_BMK.shape)
    return zeros_BMV.scatter_add(2, index_BMK, on_path_BMK.float())


def occurrences_in_chain(tokens: Sequence[Tensor], token_V: Tensor) -> Tensor:
    """How often each token of ``token_V`` occurs among those drafted, each (B,): (B, V). A compiler
    fuses these comparisons with what reads the numbers."""
    found_BV = torch.zeros(1, len(token_V), device=token_V.device)
    for x_B in tokens:
        found_BV = found_BV + (x_B[:, None] == token_V)
    return found_BV


def counts(context: Context, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The number of occurrences of each token in prompt and output, both (B, V)."""
    index_T = torch.arange(context.tokens_BT.shape[1], device=context.device)
    in_prompt_BT = index_T < context.prompt_length_B[:, None]
    in_output_BT = (index_T < context.length_B[:, None]) & ~in_prompt_BT
    zeros_BV = torch.zeros(context.num_rows, num_tokens, device=context.device)
    tokens_BT = context.tokens_BT.clamp(max=num_tokens - 1)
    return (
        zeros_BV.scatter_add(1, tokens_BT, in_prompt_BT.float()),
        zeros_BV.scatter_add(1, tokens_BT, in_output_BT.float()),
    )
