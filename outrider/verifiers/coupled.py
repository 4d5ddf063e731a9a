"""Drafter-invariant coupling: draft and target race with the same noise.

Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative
Decoding", 2024 (Gumbel coupling, Theorem 1). With Gumbel noise G keyed by the token's place in the
text and by the token,

    x = argmax_v ( log q(v) + G_v ),   y = argmax_v ( log p(v) + G_v ),   accept x   iff   x = y

and y is emitted in any case. So the text is the one that plain decoding with the same noise writes,
token for token, whatever the draft: a better draft makes it come faster, and cannot change it.
x = y with probability at least (1 - TV) / (1 + TV), somewhat less than the 1 - TV of rejection
sampling, the price of not knowing q.

``method="plain"`` is this rule with an empty draft.

Preserves: the target's distribution, exactly, and the text of plain decoding with the same seed.
Accepts any draft; only one that races with the same noise agrees often.

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
    candidates_equal,
    match,
    race,
)


@dataclass(frozen=True)
class Coupled:
    """Equality with the target's draws under noise keyed by the place in the text."""

    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "distinct", "chosen"})
    needs: ClassVar[Needs] = "distribution"
    bound: ClassVar[Bound] = LOSSLESS

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        place_BN = rng.position_B[:, None] + draft.depth_BN
        key_BN = rng.key_B[:, None].expand_as(place_BN)
        y_BN = race(p_BNV.flatten(0, 1), Stream(key_BN.flatten(), place_BN.flatten()))
        y_BN = y_BN.view_as(draft.tokens_BN)
        return match(draft, candidates_equal(draft, y_BN), y_BN)
