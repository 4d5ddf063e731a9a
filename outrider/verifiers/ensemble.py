"""Ensemble: speculative sampling towards a mixture of target and draft.

Wang, Kasa, M S, Kasa, Zou, Negi, Zhang, Jiang and Song, "DIVERSED: Relaxed Speculative Decoding via
Dynamic Ensemble Verification", AISTATS 2026, arXiv 2604.07622. This is their static ensemble (they
also learn a weight that depends on the context); in transformers it is
``assistant_ensemble_weight``, and π is called v.

    π = w p + (1 - w) q
    accept x ~ q   iff   u q(x) < π(x),   i.e. with probability min(1, 1 - w + w p(x)/q(x))
    else           draw from  norm(max(p - q, 0))  =  norm(max(π - q, 0))

since π - q = w (p - q). Speculative sampling towards π emits π. The token after a fully accepted
draft is drawn from p, because there is no q. For a chosen candidate, q is the point mass at x.

At temperature 0, :class:`EnsembleGreedy` uses the same mixture of the distributions before
temperature, as transformers does:

    accept x   iff   x = argmax π;   if rejected, emit argmax π;   after the draft, emit argmax p

When sampling, transformers accepts iff ``u <= ratio``, and this rule iff ``u < ratio``, like every
rule here; π(x) > 0 wherever q(x) > 0, so the two differ with probability zero.

Bound: π >= w p, hence KL(p‖π) <= -ln w; and TV(p, π) = (1 - w) TV(p, q) <= 1 - w. Tokens outside
the target's support are emitted if the draft proposes them: there π(x) = (1 - w) q(x).

Preserves: p up to that bound. Accepts chains, i.i.d. or chosen.

Legend: B rows, N nodes, D drafted tokens (N-1), V vocabulary; leading dimensions broadcast.
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
    Stream,
    Verdict,
    match_picks,
    require_chain,
    walk,
)
from outrider.core.errors import InvalidParameterError
from outrider.verifiers.rejection import Rejection


@dataclass(frozen=True)
class Ensemble:
    """Speculative sampling towards ``w p + (1 - w) q``.

    Attributes:
        weight: w, the weight of the target, in the open interval (0, 1) as in transformers; 1 would
            be rejection sampling, 0 the draft model alone.

    Raises:
        InvalidParameterError: the weight lies outside (0, 1).
    """

    weight: float = 0.9

    lossless: ClassVar[bool] = False
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "chosen"})
    needs: ClassVar[Needs] = "distribution"
    traceable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_weight(self.weight)

    @property
    def bound(self) -> Bound:
        w = self.weight
        words = f"at least {w:g} times p at every token; total variation at most {1 - w:g}"
        return Bound(words, "kl", -math.log(w))

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        require_chain(self, draft)
        return walk(self, draft, p_BNV, rng)

    def accept(self, p_V: Tensor, q_V: Tensor | None, x: Tensor, u: Tensor) -> Tensor:
        """``u q(x) < π(x)``, strictly."""
        p_x = p_V.gather(-1, x[..., None])[..., 0]
        q_x = torch.ones_like(p_x) if q_V is None else q_V.gather(-1, x[..., None])[..., 0]
        return u * q_x < _mixture(self.weight, p_x, q_x)

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        return Rejection().acceptance(_mixture(self.weight, p_V, q_V), q_V)

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """``max(p - q, 0)``, proportional to ``max(π - q, 0)`` but without the rounding of π."""
        return Rejection().reject(p_V, q_V, x)


@dataclass(frozen=True)
class EnsembleGreedy:
    """Equality with the argmax of the mixture, at temperature 0 (transformers).

    The drafter must provide its logits. Attributes and errors as in :class:`Ensemble`.
    """

    weight: float = 0.9

    lossless: ClassVar[bool] = False
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "chosen"})
    needs: ClassVar[Needs] = "logits"
    traceable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_weight(self.weight)

    @property
    def bound(self) -> Bound:
        w = self.weight
        words = f"only argmaxes of {w:g} p + {1 - w:g} q, so p >= max p - {1 / w - 1:g}"
        return Bound(words, threshold=1 / w - 1)

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        """Verifies a batch of chains; ``p_BNV`` holds the target's logits."""
        require_chain(self, draft)
        argmax_BN = p_BNV.argmax(-1)
        if draft.num_nodes > 1:
            argmax_BN = self._mixed(draft, p_BNV, argmax_BN)
        return match_picks(draft, argmax_BN)

    def _mixed(self, draft: Draft, p_BNV: Tensor, argmax_BN: Tensor) -> Tensor:
        """The argmax of the mixture where there is a drafted token, the target's elsewhere."""
        assert draft.logits_BNV is not None, "the drafter provides no logits"
        p_BDV = p_BNV[:, :-1].softmax(-1)
        q_BDV = draft.logits_BNV[:, :-1].softmax(-1)
        mixed_BD = _mixture(self.weight, p_BDV, q_BDV).argmax(-1)
        mixed_BD = torch.where(draft.mask_BN[:, 1:], mixed_BD, argmax_BN[:, :-1])
        return torch.cat([mixed_BD, argmax_BN[:, -1:]], 1)


def _mixture(weight: float, p: Tensor, q: Tensor) -> Tensor:
    """``w p + (1 - w) q``, written so that it is exactly p where p = q."""
    return q + weight * (p - q)


def _check_weight(weight: float) -> None:
    if not 0 < weight < 1:
        raise InvalidParameterError(
            f"weight={weight!r}: must be in (0, 1), ends excluded; 1 would be lossless"
        )
