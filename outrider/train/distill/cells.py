"""The target's distribution as its k most probable tokens and one cell for all others.

Storing p for a position takes k token ids and k + 1 log-probabilities instead of V.  The tail cell
holds the mass of all other tokens:

    cells(p) = (p(x_1), …, p(x_k), 1 - Σ_i p(x_i)),     x_1 … x_k the k most probable under p

and the draft's distribution is compared over the *same* cells, its own tail summed the same way.
A divergence over the cells is the divergence between two coarser random variables, so for every
f-divergence (both KL, Jensen-Shannon, total variation, and with it NLA) it is a lower bound of the
divergence over the vocabulary, by the data processing inequality; it is zero where p = q, and
equal to it for k = V, where no tail is needed.  What it cannot see is how the draft distributes its
mass inside the tail.  (Renormalising p over the k tokens instead, as is often done, is no bound and
has its minimum elsewhere: it asks the draft for mass that the target has in the tail.)

Reverse KL is better computed over the whole vocabulary: a draft with all of its mass in the tail,
as an untrained one has, is at -ln(tail), 3.5 nats for a tail of 3 %, wherever in the tail the mass
is, and the gradient towards the k tokens is proportional to the mass that the draft has there.

Shapes: N positions, V vocabulary, k tokens, C cells: k + 1, or V if k = V.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cells:
    """A distribution at each of N positions.

    Attributes:
        ids_Nk: int32, the most probable tokens, best first.
        log_p_NC: float32, their log-probabilities, then the tail's.
    """

    ids_Nk: Tensor
    log_p_NC: Tensor

    def __len__(self) -> int:
        return len(self.ids_Nk)

    def to(self, device: torch.device) -> Cells:
        return Cells(self.ids_Nk.to(device), self.log_p_NC.to(device))

    @classmethod
    def cat(cls, parts: list[Cells]) -> Cells:
        return cls(
            torch.cat([part.ids_Nk for part in parts]),
            torch.cat([part.log_p_NC for part in parts]),
        )


def top_cells(p_logits_NV: Tensor, k: int, temperature: float = 1.0) -> Cells:
    """The target's cells at a decoding temperature.

    Args:
        p_logits_NV: the target's logits.
        k: tokens to keep, at least 1; all are kept if the vocabulary is no larger.
        temperature: above zero.
    """
    k = min(k, p_logits_NV.shape[-1])
    ids_Nk = p_logits_NV.topk(k, dim=-1).indices
    return Cells(ids_Nk.int(), log_cells(p_logits_NV, ids_Nk, temperature))


def log_cells(logits_NV: Tensor, ids_Nk: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities [N, C] of the given tokens and of the tail, in float32 or better."""
    dtype = torch.promote_types(logits_NV.dtype, torch.float32)
    logits_NV, ids_Nk = logits_NV.to(dtype) / temperature, ids_Nk.long()
    top_Nk = logits_NV.gather(-1, ids_Nk)
    if ids_Nk.shape[-1] == logits_NV.shape[-1]:
        return top_Nk.log_softmax(-1)
    tail_N1 = logits_NV.scatter(-1, ids_Nk, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([top_Nk, tail_N1], -1).log_softmax(-1)
