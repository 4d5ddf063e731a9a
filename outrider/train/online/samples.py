"""What is learned from: stretches of sequences with the target's distributions at verified
positions.

Of a distribution, the k most probable tokens are kept; all others are one more cell, the tail. The
divergence of two distributions over such cells is at most that of the distributions themselves, and
zero where they are equal.

Legend: T tokens, P positions, K top tokens, C cells (the top tokens, and the tail if there is one),
V vocabulary, D draft vocabulary of a head, H its width, F width of the layers that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """A stretch of one sequence.

    Attributes:
        tokens_T: its tokens; those before the first position are context.
        positions_P: indices into the tokens. The distribution at a position is that of the token
            *after* it, given the tokens up to and including it.
        ids_PK: the target's most probable tokens there, best first.
        log_p_PK: their log-probabilities under the target at temperature 1, before penalties and
            truncation.
        num_tokens: V, the tokens among which the target's probabilities are divided.
    """

    tokens_T: Tensor
    positions_P: Tensor
    ids_PK: Tensor
    log_p_PK: Tensor
    num_tokens: int

    @property
    def log_p_PC(self) -> Tensor:
        """The target's log-probabilities of the cells."""
        return with_tail(self.log_p_PK, self.num_tokens)

    @property
    def num_positions(self) -> int:
        """P."""
        return len(self.positions_P)


@dataclass(frozen=True)
class HeadSample:
    """A stretch of one output, without a gap, for a head.

    Attributes:
        embedded_TH: embeddings of its tokens, bfloat16.
        hidden_TF: the target's hidden states at them, bfloat16.
        ids_TK: draft ids of the most probable tokens after each, best first.
        log_p_TK: their log-probabilities under the target at temperature 1, divided among the
            tokens that the head drafts.
        log_mass_T: log of the probability that the target has in these tokens.
        num_tokens: D.
    """

    embedded_TH: Tensor
    hidden_TF: Tensor
    ids_TK: Tensor
    log_p_TK: Tensor
    log_mass_T: Tensor
    num_tokens: int

    @property
    def num_positions(self) -> int:
        """Positions whose distribution the head learns: all but the first."""
        return len(self.ids_TK) - 1


AnySample = Sample | HeadSample


def with_tail(log_p_PK: Tensor, num_tokens: int) -> Tensor:
    """Log-probabilities of the cells, (P, C), from those of the top tokens; there is no tail where
    these are all tokens."""
    if log_p_PK.shape[1] == num_tokens:
        return log_p_PK
    tail_P1 = (1 - log_p_PK.double().exp().sum(1, keepdim=True)).clamp(min=0)
    return torch.cat([log_p_PK, tail_P1.log().to(log_p_PK.dtype)], 1)


def log_q_of_cells(logits_PV: Tensor, sample: Sample) -> Tensor:
    """The draft's log-probabilities of a sample's cells, (P, C), from its logits there."""
    return log_q_at(sample.ids_PK, logits_PV[:, : sample.num_tokens])


def log_q_at(ids_PK: Tensor, logits_PV: Tensor) -> Tensor:
    """The draft's log-probabilities of the cells of these top tokens, (P, C), from its logits."""
    log_q_PV = logits_PV.float().log_softmax(-1)
    ids_PK = ids_PK.long()
    log_q_PK = log_q_PV.gather(1, ids_PK)
    if ids_PK.shape[1] == log_q_PV.shape[1]:
        return log_q_PK
    others_PV = log_q_PV.scatter(1, ids_PK, -torch.inf)
    return torch.cat([log_q_PK, others_PV.logsumexp(1, keepdim=True)], 1)
