"""Speculative cascades: emit the draft distribution where it is good enough, else the target's.

Narasimhan, Jitkrittum, Rawat, Kim, Gupta, Menon and Kumar, "Faster Cascades via Speculative
Decoding", ICLR 2025, arXiv 2405.19261 (q the small and p the large model, as here); equations as in
the authors' notebook (google-research/speculative_cascades), which calls α the lenience.

    chow      (2)    keep q        iff  max q >= 1 - α
    diff      (5)    keep q        iff  max q >= max p - α
    opt       (10)   keep q        iff  max q >= max p - α TV(p, q)
    token_v1  (13)   keep token v  iff  q(v) >= max p - α
    token_v2  (14)   keep token v  iff  p(v) >= max p - α
    token_v3  (15)   keep token v  iff  p(v) >= (1 - α) max p

    π(v) = q(v) 1[v kept] + (1 - Σ_u q(u) 1[u kept]) p(v)
    accept x ~ q   iff   u q(x) < π(x);   else draw from  norm(max(π - q, 0))

The first three rules decide for a whole position, so they emit either q or p. π sums to one: if κ
is the kept mass of q, the sum is κ + (1 - κ) Σ p. The output distribution is π, as in any
speculative sampling towards a distribution. The token after a fully accepted draft is drawn from p.
The notebook takes the maxima from the distributions before temperature, this file from the warped
distributions; at temperature 1 without truncation they are equal.

Extreme values of α. At its maximum everything is kept, and every draft is fully accepted. At α =
-1, diff, token_v1 and token_v2 keep nothing (max p + 1 > 1) and equal ``Rejection``, token for
token. chow at α = 0 also equals ``Rejection``, except where q is a point mass, which it keeps; so
does opt where α TV <= -1. token_v3 at α = 0, which the notebook calls plain speculative decoding,
still keeps the target's most probable token, and so does token_v2 at α = 0.

At temperature 0 the distributions are point masses and carry no information, so
:class:`CascadeGreedy` verifies by the softmax of the logits: it accepts x iff x is the target's
argmax or kept; after a rejection or a fully accepted draft it emits the target's argmax.

Preserves: the deferral rule. No divergence from p is bounded, and every rule except token_v3 with
α < 1 may emit tokens outside the target's support. Accepts i.i.d. chains; at temperature 0, any
chain that carries logits.

Legend: B rows, N nodes, D drafted tokens (N-1), V vocabulary; leading dimensions broadcast.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from outrider.core import (
    Bound,
    Draft,
    Drawn,
    Needs,
    Stream,
    Verdict,
    candidates_equal,
    match,
    require_chain,
    walk,
)
from outrider.core.errors import InvalidParameterError
from outrider.verifiers.rejection import Rejection

Deferral = Literal["chow", "diff", "opt", "token_v1", "token_v2", "token_v3"]

_DOMAINS = {
    "chow": (0.0, 1.0),
    "diff": (-1.0, 1.0),
    "opt": (-math.inf, math.inf),
    "token_v1": (-1.0, 1.0),
    "token_v2": (-1.0, 1.0),
    "token_v3": (0.0, 1.0),
}
_WORDS = {
    "chow": "the draft's distribution where max q >= 1 - {0:g}, else the target's",
    "diff": "the draft's distribution where max q >= max p - {0:g}, else the target's",
    "opt": "the draft's distribution where max q >= max p - {0:g} TV(p, q), else the target's",
    "token_v1": "draft tokens with q(x) >= max p - {0:g} stay, the target's distribution fills "
    "the rest",
    "token_v2": "draft tokens with p(x) >= max p - {0:g} stay, the target's distribution fills "
    "the rest",
    "token_v3": "draft tokens with p(x) >= (1 - {0:g}) max p stay, the target's distribution "
    "fills the rest",
}


@dataclass(frozen=True)
class Cascade:
    """Speculative sampling towards the distribution of a cascade (Narasimhan et al.).

    Attributes:
        deferral: the rule that decides which tokens are kept.
        alpha: α; a larger value keeps more. In [0, 1] for ``chow`` and ``token_v3``, in [-1, 1] for
            ``diff``, ``token_v1`` and ``token_v2``, any finite number for ``opt``.

    Raises:
        InvalidParameterError: an unknown deferral rule, or an alpha outside its domain.
    """

    deferral: Deferral = "token_v3"
    alpha: float = 0.5

    lossless: ClassVar[bool] = False
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid"})
    needs: ClassVar[Needs] = "distribution"
    traceable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self.deferral, self.alpha)

    @property
    def bound(self) -> Bound:
        return Bound(_WORDS[self.deferral].format(self.alpha), threshold=self.alpha)

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        require_chain(self, draft)
        return walk(self, draft, p_BNV, rng)

    def accept(self, p_V: Tensor, q_V: Tensor | None, x: Tensor, u: Tensor) -> Tensor:
        """``u q(x) < π(x)``, strictly. A kept x is always accepted, because then π(x) >= q(x)."""
        assert q_V is not None, "a chosen token has no draft distribution to keep"
        kept_V = self.kept(p_V, q_V)
        deferred = _deferred(kept_V, q_V)[..., 0]
        return _at(kept_V, x) | (u * _at(q_V, x) < deferred * _at(p_V, x))

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        return Rejection().acceptance(self.distribution(p_V, q_V), q_V)

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual ``max(π - q, 0)``, unnormalised."""
        assert q_V is not None, "a chosen token has no draft distribution to keep"
        return Rejection().reject(self.distribution(p_V, q_V), q_V, x)

    def distribution(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        """π."""
        kept_V = self.kept(p_V, q_V)
        return torch.where(kept_V, q_V, 0.0) + _deferred(kept_V, q_V) * p_V

    def kept(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        """Which tokens the deferral rule keeps, shape of ``p_V``."""
        α = self.alpha
        match self.deferral:
            case "chow":
                kept_V = _max(q_V) >= 1 - α
            case "diff":
                kept_V = _max(q_V) >= _max(p_V) - α
            case "opt":
                distance = (p_V - q_V).clamp_(min=0).sum(-1, keepdim=True)
                kept_V = _max(q_V) >= _max(p_V) - α * distance
            case "token_v1":
                kept_V = q_V >= _max(p_V) - α
            case "token_v2":
                kept_V = p_V >= _max(p_V) - α
            case "token_v3":
                kept_V = p_V >= (1 - α) * _max(p_V)
        return kept_V.expand_as(p_V)


@dataclass(frozen=True)
class CascadeGreedy:
    """The same deferral rules at temperature 0. The drafter must provide its logits.

    Attributes and errors as in :class:`Cascade`.
    """

    deferral: Deferral = "token_v3"
    alpha: float = 0.5

    lossless: ClassVar[bool] = False
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "chosen"})
    needs: ClassVar[Needs] = "logits"
    traceable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self.deferral, self.alpha)

    @property
    def bound(self) -> Bound:
        return Cascade(self.deferral, self.alpha).bound

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        """Verifies a batch of chains; ``p_BNV`` holds the target's logits."""
        require_chain(self, draft)
        argmax_BN = p_BNV.argmax(-1)
        fits_BD = candidates_equal(draft, argmax_BN)
        if draft.num_nodes > 1:
            assert draft.logits_BNV is not None, "the drafter provides no logits"
            p_BDV, q_BDV = (z_BNV[:, :-1].softmax(-1) for z_BNV in (p_BNV, draft.logits_BNV))
            kept_BDV = Cascade(self.deferral, self.alpha).kept(p_BDV, q_BDV)
            fits_BD = fits_BD | _at(kept_BDV, draft.tokens_BN[:, 1:])
        return match(draft, fits_BD, argmax_BN)


def _deferred(kept_V: Tensor, q_V: Tensor) -> Tensor:
    """``1 - Σ_u q(u) 1[u kept]``, the mass that defers to the target; exactly 1 if none is kept."""
    return (1 - torch.where(kept_V, q_V, 0.0).sum(-1, keepdim=True)).clamp_(min=0)


def _max(probs_V: Tensor) -> Tensor:
    return probs_V.amax(-1, keepdim=True)


def _at(probs_V: Tensor, x: Tensor) -> Tensor:
    return probs_V.gather(-1, x[..., None])[..., 0]


def _check(deferral: str, alpha: float) -> None:
    if deferral not in _DOMAINS:
        raise InvalidParameterError(f"deferral={deferral!r}: must be one of {', '.join(_DOMAINS)}")
    low, high = _DOMAINS[deferral]
    if not (low <= alpha <= high and math.isfinite(alpha)):
        domain = "a finite number" if deferral == "opt" else f"in [{low:g}, {high:g}]"
        raise InvalidParameterError(f"alpha={alpha!r}: must be {domain} for {deferral}")
