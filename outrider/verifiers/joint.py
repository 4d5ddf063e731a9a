"""Joint decoding: accepts the longest prefix that is jointly likely under the target too.

Qin, Hu, He, Prakriya, Cong and Sun, "Multi-Token Joint Speculative Decoding for Accelerating Large
Language Model Inference", 2024, Algorithm 1; with strict comparison as in its successor MTAD,
"Optimized Multi-Token Joint Decoding with Auxiliary Model for LLM Inference", ICLR 2025.

    P_i = Π_{j<=i} p_j(x_j),   Q_i = Π_{j<=i} q_j(x_j)
    η   = max { i : min(1, P_i / Q_i) > τ },   0 if there is none
    accept x_1 … x_η, then draw one token from p_{η+1}

Every i is tested: a prefix that fails does not end the scan, because a longer one may pass. The
next token is drawn from the *full* target distribution, not from a residual: the method aims at a
likely output and does not preserve the target distribution. The draft should be the best beam of a
beam search under the draft model; a sampled chain is verified by the same quantities.

Corrections to the paper's Algorithm 1: η is set to i (in the paper: j) and starts at 0, with P_1
the first prefix (in the paper: -1).

τ = 0 accepts as long as P_i > 0. τ >= 1 accepts nothing, which is plain sampling. After truncation
p(x_i) may be 0, and then all longer prefixes fail. The products are computed as sums of logarithms,
so long drafts do not underflow.

``quantity="step"`` replaces Q_i by what the released code calls Q_i: the probability of x_1 … x_i
relative to all continuations that step i of the search considered, which the drafter provides
(``Draft.step_probs_BN``):

    S_i = Q_i / Σ_b Q(beam b before step i)

The released code runs with ``tau=0.9``; its function's default and the paper say 0.1. It also
starts from w copies of one beam (w the beam width), so that S_1 = q_1(x_1)/w and equal paths count
w times; without the copies S_i >= Q_i. The drafter reproduces the copies with ``search="copies"``.
The released code also confuses the histories of its beams; that error is not reproduced.

``distributions="raw"`` compares the models' own distributions, i.e. the softmax of the logits
before bias, penalties, temperature and truncation; the next token is still drawn from the warped p.
Accepted tokens may then lie outside the support of the warped distribution.

Preserves: P > τ Q for every accepted prefix as a whole. Nothing is bounded per token. Accepts
chains, searched or i.i.d.

Legend: B rows, N nodes, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core import (
    Bound,
    Draft,
    Drawn,
    Needs,
    Role,
    Stream,
    Verdict,
    Verifier,
    draw,
    require_chain,
)
from outrider.core.errors import IncompatibleError, InvalidParameterError

Quantity = Literal["joint", "step"]
Distributions = Literal["warped", "raw"]


@dataclass(frozen=True)
class Joint:
    """Joint verification of a chain (MJSD).

    Attributes:
        tau: τ, the lower limit, exclusive, of the ratio of target to draft probability of an
            accepted prefix.
        quantity: what P is compared with: ``joint`` (Q), or ``step`` (S, as in the released code).
        distributions: which distributions P and Q are products of: ``warped`` or ``raw``.

    Raises:
        InvalidParameterError: τ is negative or not finite, or another option is unknown.
    """

    tau: float = 0.1
    quantity: Quantity = "joint"
    distributions: Distributions = "warped"
    lossless: ClassVar[bool] = False
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "searched"})
    needs: ClassVar[Needs] = "distribution"

    def __post_init__(self) -> None:
        check_tau(self.tau)
        if self.quantity not in get_args(Quantity):
            raise InvalidParameterError(f"quantity={self.quantity!r}: must be 'joint' or 'step'")
        if self.distributions not in get_args(Distributions):
            raise InvalidParameterError(
                f"distributions={self.distributions!r}: must be 'warped' or 'raw'"
            )

    @property
    def traceable(self) -> bool:
        """Whether programs may verify by the rule: they know neither raw logits nor steps."""
        return self.quantity == "joint" and self.distributions == "warped"

    @property
    def bound(self) -> Bound:
        other = "Q" if self.quantity == "joint" else "its share of the search's last step"
        before = "" if self.distributions == "warped" else ", before temperature and truncation"
        words = f"P > {self.tau:g} {other} for the accepted tokens as a whole{before}, "
        return Bound(words + "nothing per token", threshold=self.tau)

    def with_raw_logits(self, logits_BNV: Tensor) -> Verifier:
        """The rule for a round in which the target has these raw logits."""
        if self.distributions == "warped":
            return self
        return _Raw(self.tau, self.quantity, self.distributions, logits_BNV)

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        """Verifies a batch of chains.

        Raises:
            IncompatibleError: the draft has branches, or lacks what the options require.
        """
        require_chain(self, draft)
        B, N = draft.tokens_BN.shape
        log_P_BN, log_Q_BN = self.path_logs(draft, p_BNV)
        if self.quantity == "step" and N > 1:
            log_Q_BN = _required(draft.step_probs_BN, "quantity='step'", "search steps").log()
        good_BN = draft.mask_BN & passes(log_P_BN - log_Q_BN, self.tau)
        good_BN[:, 0].fill_(True)  # the empty prefix
        depth_N = torch.arange(N, device=p_BNV.device)
        num_accepted_B = torch.where(good_BN, depth_N, 0).amax(1)
        p_BV = p_BNV[torch.arange(B, device=p_BNV.device), num_accepted_B]
        next_B = draw(p_BV, rng.uniform(Role.NEXT, 1)[:, 0])
        return Verdict(depth_N[1:].expand(B, N - 1), num_accepted_B, next_B)

    def path_logs(self, draft: Draft, p_BNV: Tensor) -> tuple[Tensor, Tensor]:
        """log P and log Q of each prefix, (B, N) each."""
        if self.distributions == "raw":
            raise IncompatibleError(
                "distributions='raw': the target's logits are missing; see with_raw_logits()"
            )
        return path_logs(draft, p_BNV)


@dataclass(frozen=True, eq=False)
class _Raw(Joint):
    """The rule for a round in which the target has these raw logits."""

    target_BNV: Tensor | None = None

    def path_logs(self, draft: Draft, p_BNV: Tensor) -> tuple[Tensor, Tensor]:
        assert self.target_BNV is not None
        log_P_BN = _sums(draft, _log_softmax(draft, self.target_BNV))
        if draft.num_nodes == 1:
            return log_P_BN, torch.zeros_like(log_P_BN)
        draft_BNV = _required(draft.logits_BNV, "distributions='raw'", "logits")
        return log_P_BN, _sums(draft, _log_softmax(draft, draft_BNV))


def check_tau(tau: float) -> None:
    """Raises InvalidParameterError unless τ is finite and at least 0."""
    if not 0 <= tau < math.inf:
        raise InvalidParameterError(f"tau={tau!r}: must be finite and at least 0")


def passes(log_ratio: Tensor, tau: float) -> Tensor:
    """``min(1, exp(log_ratio)) > τ``. NaN, which a token outside both supports produces, fails."""
    log_tau = math.log(tau) if tau > 0 else -math.inf
    return (log_ratio > log_tau) & (tau < 1)


def path_logs(draft: Draft, p_BNV: Tensor) -> tuple[Tensor, Tensor]:
    """log P and log Q of the path from the root to each node, shapes (B, N); chains and trees.

    Sums run in float64 where the device has it.
    """
    if draft.probs_BNV is None:  # an empty draft, or chosen tokens: q(x) = 1
        q_BNV = torch.ones_like(p_BNV)
    else:
        q_BNV = draft.probs_BNV
    return _sums(draft, _at(draft, p_BNV).log()), _sums(draft, _at(draft, q_BNV).log())


def _at(draft: Draft, probs_BNV: Tensor) -> Tensor:
    """The entry of each node's token in its parent's row, (B, N); arbitrary at the root."""
    dtype = torch.float32 if probs_BNV.device.type == "mps" else torch.float64
    rows_B1 = torch.arange(draft.tokens_BN.shape[0], device=probs_BNV.device)[:, None]
    return probs_BNV[rows_B1, draft.parents_BN.clamp(min=0), draft.tokens_BN].to(dtype)


def _log_softmax(draft: Draft, logits_BNV: Tensor) -> Tensor:
    """Log-probability of each node's token given its parent, (B, N)."""
    wide_BNV = logits_BNV.to(torch.promote_types(logits_BNV.dtype, torch.float32))
    total_BN = wide_BNV.logsumexp(-1).gather(1, draft.parents_BN.clamp(min=0))
    return _at(draft, wide_BNV) - total_BN


def _sums(draft: Draft, log_BN: Tensor) -> Tensor:
    """Sums along the path from the root to each node; 0 at the root."""
    log_BN = pad(log_BN[:, 1:], (1, 0))
    if draft.is_chain:
        return log_BN.cumsum(1)
    return torch.where(draft.ancestors_BNN, log_BN[:, None, :], 0.0).sum(2)


def _required(found: Tensor | None, option: str, what: str) -> Tensor:
    if found is None:
        raise IncompatibleError(
            f"{option}: the drafter provides no {what}; use one that does, such as BeamDrafter"
        )
    return found
