"""Drafter-invariant coupling: draft and target sample with the same noise.

Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative
Decoding", 2024 (Gumbel coupling, Theorem 1). With Gumbel noise G keyed by position and token,

    x = argmax_v ( log q(v) + G_v ),   y = argmax_v ( log p(v) + G_v ),   accept x   iff   x = y

and y is emitted in either case. The output therefore equals that of plain decoding with the same
noise, token for token, for any draft: a better draft makes decoding faster but cannot change the
output. x = y with probability at least (1 - TV) / (1 + TV). Rejection sampling reaches 1 - TV; the
difference is the price of not knowing q.

``method="plain"`` is this rule with an empty draft.

Preserves: the target distribution exactly, and the output of plain decoding with the same seed.
Accepts any draft, but only drafts sampled with the same noise agree often.

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
    match_picks,
    race,
)


@dataclass(frozen=True)
class Coupled:
    """Accepts tokens equal to the target's own draws, with noise keyed by position."""

    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "distinct", "chosen"})
    needs: ClassVar[Needs] = "distribution"
    traceable: ClassVar[bool] = True
    walks: ClassVar[bool] = False
    bound: ClassVar[Bound] = LOSSLESS

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        position_BN = rng.position_B[:, None] + draft.depth_BN
        key_BN = rng.key_B[:, None].expand_as(position_BN)
        y_BN = race(p_BNV.flatten(0, 1), Stream(key_BN.flatten(), position_BN.flatten()))
        y_BN = y_BN.view_as(draft.tokens_BN)
        return match_picks(draft, y_BN)
