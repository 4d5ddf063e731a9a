"""A bandit that picks the source with the largest expected speed-up.

    speed-up(a, γ, c) = (1 - a^(γ+1)) / ((1 - a)(γ c + 1))

is Theorem 3.8 of Leviathan et al., ICML 2023: the gain of a draft of γ tokens, each accepted with
probability a after accepted ones, at a cost of c target passes per token, which includes what one
more token costs in the target's own pass. The empty draft, with gain 1, is an arm too. γ is the
number of tokens that the source has found, or may draft; c is given; a is estimated:

    a = (accepted + w a₀) / (verified + w),    all counts ← discount · counts  in every round

The counts are discounted as in Garivier and Moulines, "On Upper-Confidence Bound Policies for
Switching Bandit Problems", ALT 2011, since a source's acceptance changes within a sequence. Their
exploration bonus is replaced by an optimistic prior a₀: the estimate of a source that is not picked
decays towards the prior until it is picked again. So the choice is deterministic, and it reads no
clock: costs are ratios given in advance.

Free sources are scored in every round, whether picked or not: their drafts cost nothing, and the
committed tokens show how many of them were right. This holds at temperature 1 too: emitted tokens
follow p whatever was drafted, so a copied x is emitted with probability p(x), its acceptance.

By default each request learns by itself, so that its output does not depend on other requests.
With ``classify`` the requests of a class share their estimates: an output then depends on earlier
requests through the random numbers that it meets, but its distribution does not.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from outrider.core import Context
from outrider.core.errors import InvalidParameterError
from outrider.drafters.sources.sources import NO_SOURCE, Outcome

PRIOR = 0.7
WEIGHT = 4.0


@dataclass
class Odds:
    """Discounted counts of accepted and verified tokens, by source."""

    accepted: list[float]
    verified: list[float]


@dataclass
class Bandit:
    """Picks by expected speed-up, and learns from the outcomes of drafts.

    Attributes:
        costs: cost of drafting and verifying one token of each source, in target passes.
        discount: weight of a round relative to the next one.
        classify: the class of a row of a new batch; None lets every request learn by itself.
        classes: the estimates of each class.

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
        picked, most = NO_SOURCE, 1.0
        for source, (length, cost) in enumerate(zip(lengths, self.costs, strict=True)):
            gain = speedup(self.acceptance(memory, source), length, cost)
            if gain > most:
                picked, most = source, gain
        return picked

    def learn(self, memory: Odds, outcomes: Sequence[Outcome]) -> None:
        for source, (accepted, verified) in enumerate(outcomes):
            memory.accepted[source] = self.discount * memory.accepted[source] + accepted
            memory.verified[source] = self.discount * memory.verified[source] + verified

    def acceptance(self, memory: Odds, source: int) -> float:
        """The estimate of a."""
        verified = memory.verified[source] + WEIGHT
        return (memory.accepted[source] + WEIGHT * PRIOR) / verified

    def _unknown(self) -> Odds:
        return Odds([0.0] * len(self.costs), [0.0] * len(self.costs))


def speedup(acceptance: float, length: int, cost: float) -> float:
    """Leviathan et al.'s Theorem 3.8, as a sum; 1 for an empty draft."""
    tokens = sum(acceptance**depth for depth in range(length + 1))
    return tokens / (length * cost + 1)
