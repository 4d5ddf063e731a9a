"""Probes: rounds that measure another option than the best one, within a share of the tokens.

A credit in tokens bounds what probes may cost. It is the engine's (``Governor.probe_credit``), so
that many short outputs cost no more than a long one, and earns 1 % of a token per round. Where a
draft model first has to read what it lacks, another credit pays for the probe
(``Governor.retry_credit``).

Some probes go on, since one round says too little:

    a retry          a draft model that read what it lacked drafts on while that pays
    longer drafts    while they pay. In an output that repeats itself, the draft is often wrong at
                     the same tokens each time. Drafts of one token then alternate between right and
                     wrong ones, where drafts of two would all be accepted: they begin elsewhere
    none             for 4 rounds, which are paid together, where drafting nothing promises nearly
                     as much: the first round without a draft takes longer than the next ones
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from outrider.engine.governor.allocation import Goodput, Option, Promise
from outrider.engine.governor.governor import MOST_CREDIT, Governor

NEVER = float("inf")
"""Rounds since an option was measured that never was."""

ROUNDS_OF_NONE = 4
"""Rounds that a probe of drafting nothing may go on for."""

_PROBE_AGE = 48
_RETRY_AGE = 12
_HOPEFUL = 0.9  # of the best rate, where reviews or longer drafts show acceptance
_HOPEFUL_AGE, _HOPELESS_AGE = 96, 512
_NEARLY = 0.9  # of the best rate, by drafting nothing
_EARNED, _EARNED_LONG = 0.5, 0.7  # share of the cost of a retry that comes first, below and above 1
_LEAST_LOSS = 0.02


class Retry(NamedTuple):
    """A probe that may go on.

    Attributes:
        option: what its rounds draft.
        instead: what is expected of the rounds in whose place they are.
        cost: what the first of them is expected to lose, in tokens, by ``Governor.retry_credit``; 0
            where the other credit has paid.
        left: most rounds that are left.
    """

    option: Option
    instead: Goodput
    cost: float = 0.0
    left: float = float("inf")


class Probes:
    """The probes of one running batch.

    Args:
        governor: what the engine has learned.

    Attributes:
        retry: the retry that goes on; None if there is none.
    """

    def __init__(self, governor: Governor) -> None:
        self._governor = governor
        self.retry: Retry | None = None

    def choose(
        self,
        best: Option,
        promises: Sequence[Promise],
        num_rows: int,
        greedy: bool,
        is_reviewed: bool = False,
    ) -> Option | None:
        """The option whose measurement is oldest, if it can be afforded: of the next shorter and
        the next longer draft and none; of the best length of another source; after rounds without
        drafts, of the shortest. Where reviews show acceptance, the latter is seldom tried, unless
        little is missing: their times may be wrong. So are shorter drafts and none beside longer
        ones, which show all that the shorter ones accept."""
        candidates = []
        for promise, index in _neighbours(best, promises):
            option = promise.option(index)
            age = self.age(option.source, option.length, best, num_rows, greedy)
            if age >= _oldest(option, best, is_reviewed):
                candidates.append((age, option))
        for _, option in sorted(candidates, key=lambda pair: -pair[0]):
            if is_reviewed and _reads_long(option, best):
                continue
            option.probe = True
            if self._can_pay(option, best):
                return option
        return None

    def wait(self, greedy: bool) -> int:
        """Rounds until a draft model that is not reviewed may be tried again."""
        return _RETRY_AGE - (self._governor.now - self._governor.drafted[greedy])

    def age(self, source: int, length: int, best: Option, num_rows: int, greedy: bool) -> float:
        """Rounds since a length was measured; where the best one drafts nothing, since anything
        was."""
        if not best.length:
            return self._governor.now - self._governor.drafted[greedy]
        age = self._governor.costs(greedy, source).age(num_rows, length)
        return NEVER if age is None else age

    def _can_pay(self, option: Option, best: Option) -> bool:
        """Whether the credit pays for a probe; takes it from the credit if it does.

        Costs are tokens that the round loses to rounds of the best option, in rounds of those. All
        credit pays for the slowest round, since the option may look slow only because something
        delayed it when it was measured. What a draft model has to read first is slow without
        doubt. Such probes have a credit without a limit, so that a long pause does not end all
        probing: where reading is dear, the next probe comes later. They pay afterwards, by the
        clock.
        """
        assert option.believed is not None
        assert best.believed is not None
        tokens, seconds = option.believed
        lost = (seconds * best.rate - tokens) / best.believed.tokens
        loss = max(min(max(0.0, lost), MOST_CREDIT), _LEAST_LOSS)
        late = option.catch_up * best.rate / best.believed.tokens
        if late:
            cost = loss + late
            earned = _EARNED if cost < 1 else _EARNED_LONG
            affordable = self._governor.retry_credit >= earned * cost
            if affordable:
                self.retry = Retry(option, best.believed, cost)
        else:
            going_on = _going_on(option, best)
            if going_on is not None and not option.length:
                loss *= going_on.left
            affordable = self._governor.probe_credit >= loss
            if affordable:
                self._governor.probe_credit -= loss
                self.retry = going_on
        return affordable

    def pay_retry(self, retry: Retry, tokens: int, seconds: float) -> None:
        """Charges a round with the tokens that it lost, but no more than twice what was expected,
        since something else may have delayed it. Rounds that draft go on while they pay but for the
        reading of what the draft model lacked."""
        if retry.cost:
            lost = (seconds * retry.instead.rate - tokens) / retry.instead.tokens
            self._governor.retry_credit -= max(min(lost, 2 * retry.cost), _LEAST_LOSS)
        believed = retry.option.believed
        assert believed is not None
        pays = not retry.option.length or tokens >= believed.seconds * retry.instead.rate
        goes_on = pays and retry.left > 1
        self.retry = retry._replace(left=retry.left - 1) if goes_on else None


def _going_on(option: Option, best: Option) -> Retry | None:
    """How a probe whose cost is paid goes on; None if it is over after a round."""
    assert best.believed is not None
    if option.length > best.length > 0:
        return Retry(option, best.believed)
    if not option.length and option.rate > _NEARLY * best.rate:
        return Retry(option, best.believed, left=ROUNDS_OF_NONE)
    return None


def _oldest(option: Option, best: Option, is_reviewed: bool) -> int:
    """Rounds after which an option is measured again."""
    is_hopeful = option.rate > _HOPEFUL * best.rate
    if best.length:
        is_part = option.source == best.source and option.length < best.length
        return _HOPELESS_AGE if is_part and not is_hopeful else _PROBE_AGE
    if not is_reviewed:
        return _RETRY_AGE
    return _HOPEFUL_AGE if is_hopeful else _HOPELESS_AGE


def _reads_long(option: Option, best: Option) -> bool:
    """Whether a draft model first reads for longer than a round takes."""
    assert best.believed is not None
    return option.catch_up > best.believed.seconds


def _neighbours(best: Option, promises: Sequence[Promise]) -> Iterator[tuple[Promise, int]]:
    """What may be probed: promises, and indices of their lengths."""
    lengths = promises[best.source].draft_lengths
    at = lengths.index(best.length)
    for index in {max(at - 1, 0), min(at + 1, len(lengths) - 1), 0} - {at}:
        yield promises[best.source], index
    for promise in promises:
        if promise.source != best.source and len(lengths) > 1:
            yield promise, promise.best_draft
