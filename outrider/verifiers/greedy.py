"""Greedy verification: accepts drafted tokens while they are the target's argmax.

The limit of speculative sampling at temperature 0 (Leviathan et al., ICML 2023, section 2.3), and
SpecInfer's greedy tree verification (Miao et al., ASPLOS 2024, Algorithm 2, ``VerifyGreedy``).

    accept x   iff   x = argmax p

Preserves: the greedy output of the target. Accepts any draft. Computes no probabilities.

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
    Stream,
    Verdict,
    argmax,
    match_picks,
)


@dataclass(frozen=True)
class Greedy:
    """Accepts tokens equal to the target's argmax, on chains and trees."""

    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "distinct", "chosen", "searched"})
    needs: ClassVar[Needs] = "argmax"
    traceable: ClassVar[bool] = True
    walks: ClassVar[bool] = False
    bound: ClassVar[Bound] = LOSSLESS

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        argmax_BN = argmax(p_BNV)
        return match_picks(draft, argmax_BN)
