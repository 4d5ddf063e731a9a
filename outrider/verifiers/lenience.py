"""Lenience: speculative sampling with the acceptance threshold lowered by a constant factor.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML
2023, appendix A.5. Their lenience is the factor l itself: l = 1 is exact, and smaller values accept
more. Other authors, among them those of speculative cascades (``verifiers/cascade.py``), call 1 - l
the lenience.

    accept x ~ q   iff   u l q(x) < p(x)
    else           draw from  norm(max(p - q, 0))     residual="target-draft", as the paper states
                   or from    norm(max(p/l - q, 0))   residual="scaled"

Bound: π <= p/l at every token, hence KL(π‖p) = Σ π ln(π/p) <= -ln l, and TV(p, π) = Σ (π - p)+
<= (1 - l) Σ π = 1 - l. Proof: π = min(q, p/l) + ρ s with ρ = Σ (q - p/l)+ and s the residual.
Where q >= p/l, s = 0 and π = p/l. Elsewhere ρ s is at most
    "target-draft":  (p - q)+, as ρ <= Σ (q - p)+ = Σ (p - q)+;   so π <= max(p, q) <= p/l.
    "scaled":        p/l - q, as Σ (p/l - q)+ = ρ + 1/l - 1 >= ρ;  so π <= p/l.
The paper's residual stays closer to p. Both accept equally often, and l = 1 is ``Rejection`` for
both.

For a chosen candidate, q is the point mass at x, and either residual is p without x.

Preserves: p up to this bound. Accepts chains, i.i.d. or chosen.

Legend: B rows, N nodes, V vocabulary; leading dimensions broadcast.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from outrider.core import LOSSLESS, Bound, Draft, Drawn, Needs, Stream, Verdict, require_chain, walk
from outrider.core.errors import InvalidParameterError
from outrider.verifiers.rejection import Rejection

Residual = Literal["target-draft", "scaled"]


@dataclass(frozen=True)
class Lenience:
    """Rejection sampling with the draft's distribution scaled down (Leviathan et al., A.5).

    Attributes:
        lenience: l, in (0, 1]; 1 is lossless rejection sampling.
        residual: the distribution drawn from after a rejection: ``target-draft`` or ``scaled``.

    Raises:
        InvalidParameterError: the lenience lies outside (0, 1], or the residual is unknown.
    """

    lenience: float = 0.8
    residual: Residual = "target-draft"

    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "chosen"})
    needs: ClassVar[Needs] = "distribution"
    traceable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.lenience <= 1:
            raise InvalidParameterError(
                f"lenience={self.lenience!r}: must be in (0, 1]; 1 is lossless"
            )
        if self.residual not in ("target-draft", "scaled"):
            raise InvalidParameterError(
                f"residual={self.residual!r}: must be 'target-draft' or 'scaled'"
            )

    @property
    def lossless(self) -> bool:
        return self.lenience == 1

    @property
    def bound(self) -> Bound:
        if self.lossless:
            return LOSSLESS
        most, distance = 1 / self.lenience, 1 - self.lenience
        words = f"at most {most:g} times p at every token, so total variation at most {distance:g}"
        return Bound(words, "rkl", -math.log(self.lenience))

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        require_chain(self, draft)
        return walk(self, draft, p_BNV, rng)

    def accept(self, p_V: Tensor, q_V: Tensor | None, x: Tensor, u: Tensor) -> Tensor:
        """``u l q(x) < p(x)``, strictly."""
        return Rejection().accept(p_V, q_V, x, u * self.lenience)

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        """``min(1, p / (l q))``; 0 wherever p = 0, however small l q is."""
        ratio_V = p_V / (self.lenience * q_V)
        return torch.where(p_V > 0, ratio_V.clamp(max=1), 0.0)

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual, unnormalised; the scaled one is computed as ``max(p - l q, 0)``."""
        scale = self.lenience if self.residual == "scaled" else 1.0
        left_V, _ = Rejection().reject(p_V, None if q_V is None else scale * q_V, x)
        return left_V, q_V
