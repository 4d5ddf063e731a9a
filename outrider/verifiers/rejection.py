"""Speculative sampling: accepts with probability min(1, p/q), else draws from the residual.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML
2023, Algorithm 1; Chen et al., "Accelerating Large Language Model Decoding with Speculative
Sampling", 2023, Algorithm 2 (which writes q for the target and p for the draft). Iterated over
i.i.d. siblings it is SpecInfer's multi-step speculative sampling (Miao et al., ASPLOS 2024,
Algorithm 2).

    accept x ~ q   iff   u q(x) < p(x)
    else           p <- norm(max(p - q, 0))

For a chosen candidate x (from prompt lookup or top-k), q is the point mass at x: x is accepted with
probability p(x), and after a rejection p without x remains.

Preserves: the target distribution exactly. Accepts i.i.d. and chosen drafts.

Legend: B rows, N nodes, V vocabulary; leading dimensions broadcast.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.core import (
    LOSSLESS,
    Bound,
    Draft,
    Drawn,
    Needs,
    NodeDistributions,
    Stream,
    Verdict,
    walk,
    walk_down,
)


@dataclass(frozen=True)
class Rejection:
    """Token-level rejection sampling (Leviathan et al., Chen et al.; over siblings: SpecInfer)."""

    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "chosen"})
    needs: ClassVar[Needs] = "distribution"
    traceable: ClassVar[bool] = True
    bound: ClassVar[Bound] = LOSSLESS

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        return walk(self, draft, p_BNV, rng)

    def verify_at(self, draft: Draft, p_at: NodeDistributions, rng: Stream) -> Verdict:
        """As ``ReadsNodes``: a walk reads the nodes that it descends to."""
        return walk_down(self, draft, p_at, rng)

    def accept(self, p_V: Tensor, q_V: Tensor | None, x: Tensor, u: Tensor) -> Tensor:
        """``u q(x) < p(x)``, strictly, so that a token of target probability zero is never
        accepted."""
        p_x = p_V.gather(-1, x[..., None])[..., 0]
        if q_V is None:
            return u < p_x
        return u * q_V.gather(-1, x[..., None])[..., 0] < p_x

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        """``min(1, p/q)``; 1 where neither distribution has mass."""
        return torch.where(q_V > p_V, p_V / q_V, 1.0)

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual ``max(p - q, 0)``, unnormalised. The next sibling is still drawn from q."""
        if q_V is None:
            return p_V.scatter(-1, x[..., None], 0.0), None
        return (p_V - q_V).clamp_(min=0), q_V
