"""A bandit that asks the source with the largest expected speed-up.

    speed-up(a, γ, c) = (1 - a^(γ+1)) / ((1 - a)(γ c + 1))

is Theorem 3.8 of Leviathan et al., ICML 2023: what a draft of γ tokens gains if each is accepted
with probability a behind accepted ones and costs c passes of the target, what its place in the
target's own pass costs included. The empty draft gains 1, and is an arm too. γ is what the source
has found, or may draft; c is given; a is learned:

    a = (accepted + w a₀) / (verified + w),    all counts ← discount · counts  in every round

Discounted as in Garivier and Moulines, "On Upper-Confidence Bound Policies for Switching Bandit
Problems", ALT 2011, since texts change their manner midway. In place of their bonus the prior a₀ is
optimistic, and what is known of a source fades towards it while it is not asked, until it is asked
again. So nothing is random, and nothing hangs on a clock: costs are ratios given beforehand.

Copying sources are verified in every round, taken or not: their drafts cost nothing, and the text
shows how far each was right. At temperature 1 too, as emitted tokens follow p whatever was drafted:
a copied x is found in the text with probability p(x), which is its acceptance.

Each request learns by itself, so that its text does not depend on its neighbours. Or requests of a
class learn together: then a text depends on those before it, in its randomness though not its
distribution.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from outrider.core import Context
from outrider.core.errors import InvalidParameterError
from outrider.drafters.sources.sources import NOBODY, Outcome

PRIOR = 0.7
WEIGHT = 4.0


@dataclass
class Odds:
    """Discounted counts of each source's tokens."""

    accepted: list[float]
    verified: list[float]


@dataclass
class Bandit:
    """Picks by expected speed-up, and learns from what came of the drafts.

    Attributes:
        costs: of a token of each source, in passes of the target: drafting and verifying it.
        discount: weight of a round against the one after it.
        classify: the class of a row of a new batch; None lets every request learn by itself.

    Raises:
        InvalidParameterError: fewer than two sources, a discount outside (0, 1].
    """

    costs: Sequence[float]
    discount: float = 0.9
    classify: Callable[[Context, int], Hashable] | None = None
    classes: dict[Hashable, Odds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.costs) < 2:
            raise InvalidParameterError(
                f"a bandit with {len(self.costs)} source(s) has nothing to choose from: give it "
                f"two or more, or take a fixed order"
            )
        if not 0 < self.discount <= 1:
            raise InvalidParameterError(f"discount={self.discount!r}: must be above 0, at most 1")

    def start(self, context: Context) -> list[Odds]:
        rows = range(context.num_rows)
        if self.classify is None:
            return [self._unknown() for _ in rows]
        keys = [self.classify(context, row) for row in rows]
        return [self.classes.setdefault(key, self._unknown()) for key in keys]

    def pick(self, memory: Odds, lengths: Sequence[int]) -> int:
        best, most = NOBODY, 1.0
        for source, (length, cost) in enumerate(zip(lengths, self.costs, strict=True)):
            gain = speedup(self.acceptance(memory, source), length, cost)
            if gain > most:
                best, most = source, gain
        return best

    def learn(self, memory: Odds, outcomes: Sequence[Outcome]) -> None:
        for source, (accepted, verified) in enumerate(outcomes):
            memory.accepted[source] = self.discount * memory.accepted[source] + accepted
            memory.verified[source] = self.discount * memory.verified[source] + verified

    def acceptance(self, memory: Odds, source: int) -> float:
        """a, as far as it is known."""
        verified = memory.verified[source] + WEIGHT
        return (memory.accepted[source] + WEIGHT * PRIOR) / verified

    def _unknown(self) -> Odds:
        return Odds([0.0] * len(self.costs), [0.0] * len(self.costs))


def speedup(acceptance: float, length: int, cost: float) -> float:
    """Leviathan's Theorem 3.8, as a sum; 1 for no draft."""
    tokens = sum(acceptance**depth for depth in range(length + 1))
    return tokens / (length * cost + 1)
