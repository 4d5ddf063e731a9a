"""Siblings drawn without replacement: a rejected token leaves the draft distribution too.

Yang, Huang, Dai and Chen, "Multi-Candidate Speculative Decoding", 2024; Chen, May, Svirschevski,
Huang, Ryabinin, Jia and Chen, "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding",
2024, Algorithm 2. For each child c of a node, in draw order:

    accept c   iff   u q(c) < p(c)
    else       p <- norm(max(p - q, 0)),   q(c) <- 0,   q <- norm(q)
    when q has no mass left:   q <- the uniform distribution over the tokens not rejected yet

The second line is speculative sampling's; the third is what makes q the distribution of the next
draw. The last is Sequoia's cover property: a draft distribution of small support still gets all its
children tried, and as many children as there are tokens always contain an accepted one. A drafter
that stops where its distribution runs out is verified rightly as well, for the line is then never
reached.

A rejected c has p(c) < q(c), so the residual has no mass at c, and a second independent draw of c
would be wasted: what q has there is better spent on the other tokens. So of two siblings, distinct
ones are accepted at least as often as independent ones under ``Rejection``.

Departure from Sequoia's code, which draws by the top k of ``log(u)/q`` and ends the generation
where a residual has no mass: here ``walk`` goes on with the target's distribution.

Preserves: the target's distribution, exactly. Accepts distinct and chosen drafts (a chosen sibling
is a point mass, of which nothing is left after a rejection: as in ``Rejection``). Independent draws
are distinct only where every node has one child; for these there is ``Rejection``.

Legend: V vocabulary; leading dimensions broadcast.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.core import LOSSLESS, Bound, Draft, Drawn, Needs, Stream, Verdict, walk
from outrider.verifiers.rejection import Rejection


@dataclass(frozen=True)
class Distinct:
    """Multi-step rejection over siblings drawn without replacement (MCSD, Sequoia)."""

    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"distinct", "chosen"})
    needs: ClassVar[Needs] = "distribution"
    bound: ClassVar[Bound] = LOSSLESS

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        return walk(self, draft, p_BNV, rng)

    def accept(self, p_V: Tensor, q_V: Tensor | None, x: Tensor, u: Tensor) -> Tensor:
        """As ``Rejection``; q is the distribution that x was drawn from, its earlier siblings
        removed."""
        return Rejection().accept(p_V, q_V, x, u)

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        """``min(1, p/q)``, for the first sibling."""
        return Rejection().acceptance(p_V, q_V)

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual ``max(p - q, 0)``, unnormalised, and the distribution of the next
        sibling."""
        left_V, _ = Rejection().reject(p_V, q_V, x)
        return left_V, None if q_V is None else without(q_V, x)


def without(q_V: Tensor, x: Tensor) -> Tensor:
    """q without x, renormalised; with no mass left, uniform over the tokens not rejected yet.

    The weight of a rejected token becomes -0.0. That is zero wherever numbers are added or
    compared, but its sign sets the token apart from those that q never had, which the cover needs
    to know.
    """
    left_V = q_V.scatter(-1, x[..., None], -0.0)
    mass = left_V.sum(-1, keepdim=True)
    if mass.device.type == "cpu" and (mass > 0).all():  # elsewhere a look back costs more
        return left_V / mass
    open_V = ~left_V.signbit()
    cover_V = torch.where(open_V, 1 / open_V.sum(-1, keepdim=True, dtype=q_V.dtype), left_V)
    return torch.where(mass > 0, left_V / mass, cover_V)
