"""How a drafter takes a token from its distribution.

``independent`` draws with numbers of the draft's own: the tokens are i.i.d. draws, and a rule may
rely on it. ``coupled`` races with the noise of the token's place in the text, which the target may
use too: for every rule but ``Coupled`` such a token counts as chosen, not as drawn.

Legend: B rows, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from outrider.core import Drawn, Role, Stream, draw, race

Pick = Callable[[Tensor, int], Tensor]
"""From the distribution at the i-th drafted place (B, V) and i to one token per row (B,)."""


@dataclass(frozen=True)
class Picker:
    """A way to take tokens.

    Attributes:
        drawn: what the tokens are to a verifier.
        start: makes a round's :data:`Pick` from its random numbers and the most tokens drafted.
        draws: whether a token has the probability that its distribution says.
    """

    drawn: Drawn
    start: Callable[[Stream, int], Pick]
    draws: bool = True


def _independent(rng: Stream, num_tokens: int) -> Pick:
    u_BD = rng.uniform(Role.DRAFT, max(num_tokens, 1))
    return lambda q_BV, i: draw(q_BV, u_BD[:, i])


def _coupled(rng: Stream, num_tokens: int) -> Pick:
    return lambda q_BV, i: race(q_BV, rng.at(rng.position_B + i))


INDEPENDENT = Picker("iid", _independent)
COUPLED = Picker("chosen", _coupled)
