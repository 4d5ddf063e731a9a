"""Joint decoding: accept the longest prefix that the target, too, finds likely as a whole.

Qin, Hu, He, Prakriya, Cong and Sun, "Multi-Token Joint Speculative Decoding for Accelerating Large
Language Model Inference", 2024, Algorithm 1; with strict comparison as in its successor MTAD,
"Optimized Multi-Token Joint Decoding with Auxiliary Model for LLM Inference", ICLR 2025.

    P_i = Π_{j<=i} p_j(x_j),   Q_i = Π_{j<=i} q_j(x_j)
    η   = max { i : min(1, P_i / Q_i) > τ },   0 if there is none
    accept x_1 … x_η, then draw one token from p_{η+1}

Every i is tested: a prefix that fails does not stop the scan, for a longer one may make up for it.
The next token comes from the *full* law of the target, not from a residual: the aim is a likely
text, and no attempt is made to keep the target's law. The draft is meant to be the best beam of a
beam search under the draft model; a sampled chain is judged by the same numbers.

Corrections to the paper's Algorithm 1: η becomes i (there: j), and starts at 0 with P_1 the first
prefix (there: -1). Departure from the released code: its Q_i is no product of conditionals but the
last step's probability among all beams and tokens, which no draft hands over; and it runs with
``tau=0.9``, where the paper and the function's default say 0.1.

τ = 0 accepts as long as P_i > 0; τ >= 1 accepts nothing, which is plain sampling. After truncation
p(x_i) may be 0: then all longer prefixes fail. Sums of logarithms, so long drafts do not underflow.

Preserves: of every accepted prefix as a whole, P > τ Q. Nothing is bounded per token. Accepts
chains, searched or i.i.d.

Legend: B rows, N nodes, D candidates (N-1), V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.core import (
    Bound,
    Draft,
    Drawn,
    Needs,
    Role,
    Stream,
    Verdict,
    draw,
    require_chain,
)
from outrider.core.errors import InvalidParameterError


@dataclass(frozen=True)
class Joint:
    """Joint verification of a chain (MJSD).

    Attributes:
        tau: τ, the least ratio of target to draft probability of an accepted prefix, exclusive.
    """

    tau: float = 0.1
    lossless: ClassVar[bool] = False
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "searched"})
    needs: ClassVar[Needs] = "law"

    def __post_init__(self) -> None:
        check_tau(self.tau)

    @property
    def bound(self) -> Bound:
        words = f"P > {self.tau:g} Q for the accepted tokens as a whole, nothing per token"
        return Bound(words, threshold=self.tau)

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        """Judges a batch of chains.

        Raises:
            IncompatibleError: a draft with branches.
        """
        require_chain(self, draft)
        B, N = draft.tokens_BN.shape
        log_P_BN, log_Q_BN = path_logs(draft, p_BNV)
        good_BN = draft.mask_BN & passes(log_P_BN - log_Q_BN, self.tau)
        good_BN[:, 0] = True  # the empty prefix
        depth_N = torch.arange(N, device=p_BNV.device)
        num_accepted_B = torch.where(good_BN, depth_N, 0).amax(1)
        p_BV = p_BNV[torch.arange(B, device=p_BNV.device), num_accepted_B]
        next_B = draw(p_BV, rng.uniform(Role.NEXT, 1)[:, 0])
        return Verdict(depth_N[1:].expand(B, N - 1), num_accepted_B, next_B)


def check_tau(tau: float) -> None:
    """Raises InvalidParameterError unless τ is a finite number of at least 0."""
    if not 0 <= tau < math.inf:
        raise InvalidParameterError(f"tau={tau!r}: must be finite and at least 0")


def passes(log_ratio: Tensor, tau: float) -> Tensor:
    """``min(1, exp(log_ratio)) > τ``; NaN, from a token that neither law allows, does not pass."""
    log_tau = math.log(tau) if tau > 0 else -math.inf
    return (log_ratio > log_tau) & (tau < 1)


def path_logs(draft: Draft, p_BNV: Tensor) -> tuple[Tensor, Tensor]:
    """log P and log Q of the path from the root to each node, shapes (B, N); chains and trees.

    Sums run in float64 where the device has it.
    """
    if draft.probs_BNV is None:  # an empty draft, or chosen tokens: certain as far as q goes
        q_BNV = torch.ones_like(p_BNV)
    else:
        q_BNV = draft.probs_BNV
    return _log_of_path(draft, p_BNV), _log_of_path(draft, q_BNV)


def _log_of_path(draft: Draft, law_BNV: Tensor) -> Tensor:
    dtype = torch.float32 if law_BNV.device.type == "mps" else torch.float64
    rows_B1 = torch.arange(draft.tokens_BN.shape[0], device=law_BNV.device)[:, None]
    parents_BN = draft.parents_BN.clamp(min=0)
    log_BN = law_BNV[rows_B1, parents_BN, draft.tokens_BN].to(dtype).log()
    log_BN[:, 0] = 0.0
    if draft.is_chain:
        return log_BN.cumsum(1)
    return torch.where(draft.ancestors_BNN, log_BN[:, None, :], 0.0).sum(2)
