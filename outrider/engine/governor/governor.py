"""What an engine has learned of its times and of its drafts' acceptance, and what that promises.

Legend: B rows.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from math import sqrt
from threading import Lock

from outrider.core import REVIEW_WIDTH
from outrider.engine.governor.acceptance import Kind, PositionRates, probability
from outrider.engine.governor.allocation import Promise, expected_tokens
from outrider.engine.governor.costs import RoundCosts
from outrider.engine.governor.outcomes import Label, Outcome
from outrider.engine.governor.row_memory import RowMemory
from outrider.engine.governor.saved_times import ReviewTime, RoundTime
from outrider.engine.governor.sources import Sources

PROBE_SHARE = 0.01
"""Tokens that probing may cost, as a share of all."""

MOST_CREDIT = 1.0
"""Most tokens that probes may cost at once."""

RETRY_SHARE = 0.018
"""Tokens that trying a draft model again may cost, as a share of all."""

REVIEW_SHARE = 0.01
"""Rounds that reviews may take, as a share of all."""

GAIN_SHARE = 0.05
"""Rounds that reviews may take besides, as a share of those that drafts have saved."""

HOPE = 2.0
"""Standard deviations by which rows may accept more than is believed of them."""

START_SHARE = 0.002
"""Rounds that a draft model may take to read prompts of which it is not expected to be of use, as a
share of all."""

_FIRST_RETRY = 0.5  # tokens
_FIRST_REVIEWS = 1.0  # rounds that reviews may take at first
_MOST_REVIEWS = 4.0  # rounds that reviews may take at once


class Governor:
    """What an engine has learned of its times and of its drafts' acceptance; all of its batches
    share it. A :class:`BatchGovernor` chooses by it.

    Args:
        sources: what there is to choose from.

    Attributes:
        now: rounds of all batches so far.
        times_forgotten: how often :meth:`forget_times` was called.
        probe_credit: tokens that may be spent on probes.
        retry_credit: tokens that may be spent on trying a draft model again.
        review_credit: rounds that may be spent on reviews.
        start_credit: rounds that may be spent on reading prompts to no use.
        drafted: of greedy batches and of all others, the last round that drafted.
        compared: of the same, the last round that drafted or was reviewed.
        is_suspended: whether all rounds draft ``Sources.fixed_length``, if there is one, whatever
            pays: something learns from drafts.
        lock: held by whoever reads or writes what was learned.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._costs: dict[tuple[bool, int], RoundCosts] = {}
        self._rates: dict[tuple[Kind, int], PositionRates] = {}
        self.now = self.times_forgotten = 0
        self.probe_credit = MOST_CREDIT
        self.retry_credit = _FIRST_RETRY
        self.review_credit = _FIRST_REVIEWS
        self.start_credit = 0.0
        self.drafted = {True: 0, False: 0}
        self.compared = {True: 0, False: 0}
        self.is_suspended = False
        self.lock: AbstractContextManager[object] = Lock()

    def costs(self, greedy: bool, source: int) -> RoundCosts:
        """The seconds of rounds that draft from a source, of all greedy batches or of all others,
        whose distributions take time."""
        key = greedy, source
        if key not in self._costs:
            self._costs[key] = RoundCosts(self.sources.draft_ratio if source == 0 else 0.0)
        return self._costs[key]

    def rates(self, kind: Kind, source: int) -> PositionRates:
        """The acceptance of a class of rows."""
        key = kind, source
        if key not in self._rates:
            self._rates[key] = PositionRates()
        return self._rates[key]

    def pay_start(self, rounds: float) -> bool:
        """Whether the credit pays for reading prompts that takes so many rounds; takes it from the
        credit if it does. What is left over is lost, so that no credit is saved up for a series of
        them. The caller holds the lock."""
        if self.start_credit < rounds:
            return False
        self.start_credit = 0.0
        return True

    def earn_reviews(self, rounds: float) -> None:
        """Lets reviews have a share of what drafts have gained, in rounds without drafts. The
        caller holds the lock."""
        earned = self.review_credit + GAIN_SHARE * rounds
        self.review_credit = min(_MOST_REVIEWS, earned)

    def fixed_length(self, rows: Sequence[RowMemory]) -> int | None:
        """The draft length of a batch of these rows if it may not be chosen; None if it may."""
        fixed = self.sources.fixed_length
        if fixed is None or self.is_suspended:
            return fixed
        return fixed if any(row.repeatable for row in rows) else None

    # ------------------------------------------------------------------------------------ learning

    def assume(self, times: Iterable[RoundTime], reviews: Iterable[ReviewTime] = ()) -> None:
        """Takes the times of rounds and reviews that were measured before the first request.
        Sources without a draft model take as long but for its passes."""
        with self.lock:
            for each in times:
                for source in range(len(self.sources.names)):
                    draft = each.draft if source == 0 else 0.0
                    self.costs(each.greedy, source).assume(
                        each.rows, each.length, draft, each.total - each.draft + draft
                    )
            for review in reviews:
                costs = self.costs(review.greedy, 0)
                costs.observe_reading(review.rows, REVIEW_WIDTH, review.seconds)

    def forget_times(self) -> None:
        """Forgets how long rounds take: from now on, other code runs them."""
        with self.lock:
            self._costs.clear()
            self.times_forgotten += 1

    def change_rows(self, greedy: bool) -> None:
        """The next rounds have none of the rows of those before. The caller holds the lock.

        Args:
            greedy: whether all rows are.
        """
        for source in range(len(self.sources.names)):
            self.costs(greedy, source).change_rows()

    def learn(self, outcomes: Iterable[Outcome], with_times: bool) -> None:
        """Learns from consecutive rounds of a batch. The caller holds the lock.

        Args:
            outcomes: what the rounds showed.
            with_times: whether their seconds count; those of rounds that other code ran do not.
        """
        labels: dict[tuple[Kind, int], list[Label]] = {}
        for outcome in outcomes:
            self._earn(1)
            if with_times:
                self._learn_times(outcome)
            if outcome.reviewed:
                self.compared[outcome.greedy] = self.now
                self._learn_review(outcome)
            if outcome.length:
                self.drafted[outcome.greedy] = self.compared[outcome.greedy] = self.now
                source = outcome.asked.source
                for label in outcome.labels(self.now):
                    row, _, _ = label
                    labels.setdefault((row.kind, source), []).append(label)
        for (kind, source), found in labels.items():
            self._learn_acceptance(kind, source, found)

    def rest(self, greedy: bool, rows: int, seconds: Sequence[float], with_times: bool) -> None:
        """Learns from consecutive rounds of a batch that drafted nothing. The caller holds the
        lock.

        Args:
            greedy: whether all rows are.
            rows: B.
            seconds: of each round.
            with_times: as of :meth:`learn`.
        """
        self._earn(len(seconds))
        if with_times:
            for source in range(len(self.sources.names)):
                self.costs(greedy, source).observe_plain(rows, seconds)

    def _earn(self, rounds: int) -> None:
        """Counts rounds, and what they earn for looks at drafts."""
        self.now += rounds
        self.probe_credit = min(MOST_CREDIT, self.probe_credit + rounds * PROBE_SHARE)
        self.retry_credit += rounds * RETRY_SHARE
        self.review_credit = min(_MOST_REVIEWS, self.review_credit + rounds * REVIEW_SHARE)
        self.start_credit += rounds * START_SHARE

    def _learn_times(self, outcome: Outcome) -> None:
        num, length = len(outcome.rows), outcome.length
        width = max(length, *outcome.forced) if outcome.forced else length
        if length:
            self.costs(outcome.greedy, outcome.asked.source).observe(
                num,
                length,
                outcome.draft,
                outcome.total,
                outcome.asked.behind,
                width,
                changes=outcome.changes,
            )
        elif outcome.reviewed:
            self.costs(outcome.greedy, 0).observe_reading(
                num, outcome.asked.num_read, outcome.draft
            )
        else:
            for source in range(len(self.sources.names)):
                self.costs(outcome.greedy, source).observe(
                    num, 0, 0.0, outcome.total, width=width, changes=outcome.changes
                )

    def _learn_review(self, outcome: Outcome) -> None:
        labels: dict[Kind, list[float]] = {}
        for row, found in zip(outcome.rows, outcome.reviewed, strict=True):
            of_class = self.rates(row.kind, 0)
            row.of(0).review(of_class.odds(1)[0], found, self.now, of_class.spread)
            labels.setdefault(row.kind, []).extend(found)
        for kind, labels_of_class in labels.items():
            self.rates(kind, 0).review(labels_of_class, self.now)

    def _learn_acceptance(self, kind: Kind, source: int, labels: Sequence[Label]) -> None:
        of_class = self.rates(kind, source)
        odds = of_class.odds(max([len(draft.tried) for _, draft, _ in labels]))
        for row, draft, now in labels:
            row.of(source).learn(odds, draft, now, of_class.spread)
        of_class.learn([draft for _, draft, _ in labels], self.now)

    # --------------------------------------------------------------------------------- predictions

    def promise(
        self,
        source: int,
        rows: Sequence[RowMemory],
        limits: Sequence[int],
        greedy: bool,
        lengths: tuple[int, ...],
    ) -> Promise:
        """What each draft length of a source promises. Where drafting nothing promises most, a
        draft may still be hopeful: if the rows accept more than is believed of them, by ``HOPE``
        standard deviations of what they accept together. The caller holds the lock.

        Args:
            source: which of ``Sources.names``.
            rows: what is remembered of the rows.
            limits: by row, the most tokens that it may draft.
            greedy: whether all rows are.
            lengths: the draft lengths, ascending from 0.
        """
        costs, most = self.costs(greedy, source), lengths[-1]
        rates = {kind: self.rates(kind, source) for kind in {row.kind for row in rows}}
        odds = {kind: of_class.odds(most) for kind, of_class in rates.items()}
        survivals = [
            row.of(source).survival(odds[row.kind][:limit], self.now)
            for row, limit in zip(rows, limits, strict=True)
        ]
        late = costs.catch_up(len(rows), self.behind(source, rows))
        tokens = expected_tokens(survivals, len(rows), lengths)
        promise = Promise(source, lengths, tokens, costs.curve(len(rows), lengths), late)
        if most and not promise.best.length:
            hope, index = HOPE / sqrt(len(rows)), promise.best_draft
            length = lengths[index]
            survivals = [
                row.of(source).survival(
                    odds[row.kind][: min(limit, length)],
                    self.now,
                    hope * row.of(source).deviation(rates[row.kind].spread),
                )
                for row, limit in zip(rows, limits, strict=True)
            ]
            (hoped,) = expected_tokens(survivals, len(rows), [length])
            promise.hope(index, hoped)
        return promise

    def behind(self, source: int, rows: Sequence[RowMemory]) -> int:
        """Committed tokens that the draft model lacks, of the row that lacks most; 0 for sources
        that run none."""
        if source > 0 or not self.sources.lags:
            return 0
        return max([row.of(source).undrafted for row in rows])

    def beliefs(self, rows: int, greedy: bool = False) -> dict[str, list[float]]:
        """What the governor believes now: by source, the acceptance of each position; and, once
        rounds were measured, the seconds of a round of so many rows by draft length.

        Args:
            rows: B.
            greedy: of which class of rows.
        """
        lengths = self.sources.lengths
        found: dict[str, list[float]] = {"draft lengths": [float(n) for n in lengths]}
        with self.lock:
            for source, name in enumerate(self.sources.names):
                for kind, suffix in _classes(greedy):
                    odds = self.rates(kind, source).odds(lengths[-1])
                    found[f"acceptance, {name}{suffix}"] = list(map(probability, odds))
                costs = self.costs(greedy, source)
                if not costs.is_empty:
                    found[f"seconds, {name}"] = costs.curve(rows, lengths)
        return found


def _classes(greedy: bool) -> list[tuple[Kind, str]]:
    """The classes of greedy rows, or that of all others, with what tells them apart."""
    found = [(Kind(greedy), "")]
    return [*found, (Kind(True, repeats=True), ", repeating")] if greedy else found
