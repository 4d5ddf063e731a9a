"""How a drafter takes a token from its distribution.

``independent`` draws with random numbers that only the draft uses: the tokens are i.i.d. draws, and
a rule may rely on it. ``coupled`` runs an exponential race with the noise of the token's position,
which the target may use too: for every rule but ``Coupled`` such a token is chosen, not drawn.

Legend: B rows, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from outrider.core import Drawn, Role, Stream, draw, race
from outrider.runtime.executors.coupled_draft import race_numbers

Pick = Callable[[Tensor, int], Tensor]
"""Takes the distribution of the i-th drafted token (B, V) and i; returns one token per row (B,)."""


@dataclass(frozen=True)
class Picker:
    """A way to take tokens.

    Attributes:
        drawn: how a verifier has to treat the tokens.
        start: makes a round's :data:`Pick` from its random numbers and the most tokens drafted.
        numbers: what compiled programs draw so many tokens with (``HFModel.draft``); None where no
            program takes tokens so.
        draws: whether a token is taken with the probability that its distribution gives it.
    """

    drawn: Drawn
    start: Callable[[Stream, int], Pick]
    numbers: Callable[[Stream, int], Tensor] | None = None
    draws: bool = True


def _independent(rng: Stream, num_tokens: int) -> Pick:
    u_BD = rng.uniform(Role.DRAFT, max(num_tokens, 1))
    return lambda q_BV, i: draw(q_BV, u_BD[:, i])


def _uniform(rng: Stream, num_tokens: int) -> Tensor:
    return rng.uniform(Role.DRAFT, num_tokens)


def _coupled(rng: Stream, num_tokens: int) -> Pick:
    return lambda q_BV, i: race(q_BV, rng.at(rng.position_B + i))


INDEPENDENT = Picker("iid", _independent, _uniform)
COUPLED = Picker("chosen", _coupled, race_numbers)
