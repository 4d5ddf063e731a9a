"""Sample and match: the target draws its own tokens; drafted tokens are kept while they agree.

The rule of assisted generation in transformers when it samples without draft distributions, and the
sampled form of SpecInfer's greedy tree verification (Miao et al., ASPLOS 2024).

    y_i ~ p_i,   accept x   iff   x = y,   the next token is y at the end of the accepted path

The emitted tokens are the y themselves, so they have the target distribution for any draft. A draw
x ~ q is accepted with probability Σ p q, which never exceeds the Σ min(p, q) of rejection sampling;
for a chosen candidate the two are equal. The rule needs no q.

Preserves: the target distribution exactly. Accepts any draft; all siblings are compared with the
one draw at their parent.

Legend: B rows, N nodes, V vocabulary.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from outrider.core import (
    LOSSLESS,
    Bound,
    Draft,
    Drawn,
    Needs,
    Role,
    Stream,
    Verdict,
    draw,
    match_picks,
)


@dataclass(frozen=True)
class SampleMatch:
    """Accepts tokens equal to the target's own draws, on chains and trees."""

    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "distinct", "chosen"})
    needs: ClassVar[Needs] = "distribution"
    traceable: ClassVar[bool] = True
    walks: ClassVar[bool] = False
    bound: ClassVar[Bound] = LOSSLESS

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        u_BN = rng.uniform(Role.NEXT, draft.num_nodes).gather(1, draft.depth_BN)
        y_BN = draw(p_BNV.flatten(0, 1), u_BN.flatten()).view_as(draft.tokens_BN)
        return match_picks(draft, y_BN)
