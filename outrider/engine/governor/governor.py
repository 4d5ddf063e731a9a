"""The governor: how many tokens to draft, and from which sources, round by round.

Before each round it compares the goodput of all draft lengths (``allocation.py``), with the seconds
of a round as measured (``costs.py``) and the acceptance as estimated (``acceptance.py``). Drafting
nothing is one of the lengths; a draft model then reads nothing, and catches up when it is used
again. A head reads the committed tokens all the same, because the target's hidden states are not
kept. Four rules keep the choice calm and cheap:

    hysteresis   another length must promise 3 % more than the present one
    catching up  what a draft model that fell behind must read first is spread over 16 rounds
    probing      rounds of another length, to measure it, may cost 1 % of the tokens at most, or
                 1.8 % where a draft model must catch up first; such a retry goes on while it
                 pays
    standing     a choice stands for one round, and for twice as many, up to 8, each time that it
                 comes out again, unless rows come or go, or a probe is the first of its kind

A length is chosen before the round from what earlier rounds showed. It does not depend on the
round's drafted tokens or random numbers, so every lossless rule stays lossless
(``docs/decisions/0031-lengths-chosen-by-measured-times.md``). It does depend on the clock.

Legend: B rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import NamedTuple, Protocol

from outrider.engine.governor.acceptance import PositionRates, RowRates, probability
from outrider.engine.governor.allocation import Goodput, expected_tokens
from outrider.engine.governor.costs import RoundCosts
from outrider.engine.governor.saved_times import RoundTime

MOST = 8
"""The longest draft where the user and the drafter set none."""

ALL, FREE = "draft", "free sources"

HYSTERESIS = 1.03
HORIZON = 16
"""Rounds that the seconds of catching up are spread over."""

PROBE_SHARE = 0.01
"""Tokens that probing may cost, as a share of all."""

RETRY_SHARE = 0.018
"""Tokens that probing may cost where a draft model first has to read what it lacks."""

LONGEST_STAND = 8
"""Most rounds that a choice stands for; what they showed is learned together."""

_FIRST_ROUNDS = 6
"""Rounds of each class that only measure, in turn with a draft and without."""

_FIRST_TOKENS = 24
"""Most tokens of the target's passes in these rounds."""

NEVER = float("inf")
"""Rounds since an option was measured that never was."""

_FIRST_WIDTH = 4
_PROBE_AGE = 24
_RETRY_AGE = 12
_CREDIT = 1.0
_FIRST_RETRY = 0.5
_EARNED = 0.5  # share of what a retry is expected to cost; the rest is earned before the next one
_LEAST_LOSS = 0.02


def draft_lengths(most: int) -> tuple[int, ...]:
    """The lengths to choose from: all up to 8, then ever fewer."""
    found = list(range(min(most, MOST) + 1))
    while found[-1] < most:
        found.append(min(most, found[-1] * 3 // 2))
    return tuple(found)


@dataclass(frozen=True)
class Sources:
    """What the governor may choose from.

    Attributes:
        names: the sets of sources that may draft: all of them, and where there are some without
            a draft model, these alone.
        lengths: draft lengths in ascending order, 0 first.
        draft_ratio: seconds of a draft step over those of a target pass, before any is measured.
        lags: whether a draft model has a cache of its own, which falls behind in rounds without
            drafts. A head follows the target's hidden states in every round, and an early exit
            shares the target's cache.
        sampled_length: the draft length of batches with sampled rows, whose tokens depend on it;
            None chooses that, too.
    """

    lengths: tuple[int, ...] = tuple(range(MOST + 1))
    names: tuple[str, ...] = (ALL,)
    draft_ratio: float = 0.1
    lags: bool = True
    sampled_length: int | None = None

    def up_to(self, most: int) -> tuple[int, ...]:
        """The draft lengths that are not longer than this."""
        if most >= self.lengths[-1]:
            return self.lengths
        return tuple(length for length in self.lengths if length <= most)


@dataclass(slots=True)
class Asked:
    """What a round is asked to draft.

    Attributes:
        source: which of ``Sources.names``.
        length: the longest draft of any row.
        lengths: by row.
        probe: whether the length is only tried, to measure it.
        believed: what the governor expects of the round; None in the first one.
        behind: committed tokens that the draft model has to read first.
    """

    source: int
    length: int
    lengths: Sequence[int]
    probe: bool = False
    believed: Goodput | None = None
    behind: int = 0

    @property
    def free_only(self) -> bool:
        """Whether the draft model is left out."""
        return self.source > 0


class Label(NamedTuple):
    """How much of a row's draft was accepted.

    Attributes:
        row: what is remembered of the row.
        length: how many tokens it was asked to draft, at least 1.
        accepted: how many of them were accepted.
        now: number of the round.
    """

    row: RowMemory
    length: int
    accepted: int
    now: int


@dataclass(slots=True)
class Outcome:
    """What a round showed; the other attributes are as of :meth:`BatchGovernor.learn`.

    Attributes:
        asked: what it was asked to draft.
        length: the longest draft of any row that the drafter made.
        resumes: whether it drafted and the round before did not.
    """

    asked: Asked
    length: int
    rows: Sequence[RowMemory]
    accepted: Sequence[int | None]
    greedy: bool
    draft: float
    total: float
    forced: Sequence[int]
    resumes: bool

    def labels(self, now: int) -> Iterator[Label]:
        """What the round, whose number is ``now``, teaches of acceptance: nothing in rows that are
        over or that had forced tokens."""
        forced = self.forced or [0] * len(self.rows)
        each = zip(self.rows, self.asked.lengths, self.accepted, forced, strict=True)
        for row, length, accepted, num_forced in each:
            if accepted is not None and length and not num_forced:
                yield Label(row, length, min(accepted, length), now)


@dataclass(eq=False)
class RowMemory:
    """What the governor remembers of a row.

    Attributes:
        rates: by source, the row's acceptance.
        greedy: whether the row is at temperature 0: the class whose estimates it shares.
    """

    greedy: bool
    rates: dict[int, RowRates] = field(default_factory=dict)

    def of(self, source: int) -> RowRates:
        """The row's acceptance of a source."""
        if source not in self.rates:
            self.rates[source] = RowRates()
        return self.rates[source]


class Governor:
    """What an engine has learned of its times and of its drafts' acceptance; all of its batches
    share it.

    Args:
        sources: what there is to choose from.

    Attributes:
        now: rounds of all batches so far.
        times_forgotten: how often :meth:`forget_times` was called.
        retry_credit: tokens that may be spent on trying a draft model again.
        drafted: of greedy batches and of all others, the last round that drafted.
        lock: held by whoever reads or writes what was learned.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._costs: dict[tuple[bool, int], RoundCosts] = {}
        self._rates: dict[tuple[bool, int], PositionRates] = {}
        self.now = self.times_forgotten = 0
        self.retry_credit = _FIRST_RETRY
        self.drafted = {True: 0, False: 0}
        self.lock: AbstractContextManager[object] = Lock()

    def costs(self, greedy: bool, source: int) -> RoundCosts:
        """The seconds of rounds that draft from a source, of all greedy batches or of all others,
        whose distributions take time."""
        key = greedy, source
        if key not in self._costs:
            self._costs[key] = RoundCosts(self.sources.draft_ratio if source == 0 else 0.0)
        return self._costs[key]

    def rates(self, greedy: bool, source: int) -> PositionRates:
        """The acceptance of a class of rows."""
        key = greedy, source
        if key not in self._rates:
            self._rates[key] = PositionRates()
        return self._rates[key]

    def assume(self, times: Iterable[RoundTime]) -> None:
        """Takes the times of rounds that were measured before the first request. Sources without a
        draft model take as long but for its passes."""
        with self.lock:
            for each in times:
                for source in range(len(self.sources.names)):
                    draft = each.draft if source == 0 else 0.0
                    self.costs(each.greedy, source).assume(
                        each.rows, each.length, draft, each.total - each.draft + draft
                    )

    def forget_times(self) -> None:
        """Forgets how long rounds take: from now on, other code runs them."""
        with self.lock:
            self._costs.clear()
            self.times_forgotten += 1

    def of_batch(self) -> BatchGovernor:
        """The choices for a new running batch."""
        return BatchGovernor(self)

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
                odds = self.rates(greedy, source).odds(lengths[-1])
                found[f"acceptance, {name}"] = list(map(probability, odds))
                costs = self.costs(greedy, source)
                if not costs.is_empty:
                    found[f"seconds, {name}"] = costs.curve(rows, lengths)
        return found


class LengthChooser(Protocol):
    """Chooses the draft length of each round of a running batch."""

    def ask(self, rows: list[RowMemory], limits: Sequence[int], greedy: bool) -> Asked:
        """What the next round shall draft; as :meth:`BatchGovernor.ask`."""

    def learn(
        self,
        asked: Asked,
        rows: Sequence[RowMemory],
        accepted: Sequence[int | None],
        greedy: bool,
        draft: float,
        total: float,
        forced: Sequence[int] = (),
        ran_drafter: bool = True,
    ) -> None:
        """Takes what a round showed; as :meth:`BatchGovernor.learn`."""


class BatchGovernor:
    """The choices for one running batch.

    Args:
        governor: what the engine has learned.
    """

    def __init__(self, governor: Governor) -> None:
        self._governor = governor
        self._now = 0
        self._credit = _CREDIT
        self._present: tuple[int, int] | None = None
        self._standing: Option | None = None
        self._planned_at, self._stands = 0, 1
        self._rows: list[RowMemory] = []
        self._outcomes: list[Outcome] = []
        self._times_forgotten = governor.times_forgotten
        self._drafted = 0
        self._retry: Retry | None = None

    def ask(self, rows: list[RowMemory], limits: Sequence[int], greedy: bool) -> Asked:
        """What the next round shall draft.

        Args:
            rows: what is remembered of the rows.
            limits: by row, the most tokens that it may draft.
            greedy: whether all rows are.
        """
        self._now += 1
        self._credit = min(_CREDIT, self._credit + PROBE_SHARE)
        fixed = self._governor.sources.sampled_length
        if not greedy and fixed is not None:
            choice = Option(0, fixed, None)
        else:
            choice = self._choice(rows, limits, greedy)
        length = min(choice.length, max(limits))
        return Asked(
            choice.source,
            length,
            [min(length, limit) for limit in limits],
            choice.probe,
            choice.believed,
            self._behind(choice.source, rows) if length else 0,
        )

    def _choice(self, rows: list[RowMemory], limits: Sequence[int], greedy: bool) -> Option:
        """The choice for the next round: a new one where the standing one is due."""
        standing, due = self._standing, self._now - self._planned_at >= self._stands
        if standing is not None and not due and rows == self._rows:
            return standing if self._retry is None else self._retry.option
        with self._governor.lock:
            self._learn_outcomes()
            return self._plan(rows, limits, greedy)

    def learn(
        self,
        asked: Asked,
        rows: Sequence[RowMemory],
        accepted: Sequence[int | None],
        greedy: bool,
        draft: float,
        total: float,
        forced: Sequence[int] = (),
        ran_drafter: bool = True,
    ) -> None:
        """Takes what a round showed.

        Args:
            asked: what :meth:`ask` returned.
            rows: what is remembered of the rows.
            accepted: by row, how many tokens were accepted; None where the row's output ended.
            greedy: whether all rows are.
            draft: seconds in the draft model's forward passes.
            total: seconds of the round.
            forced: by row, how many tokens of its draft a grammar had forced; empty if none. Such
                rows tell nothing of the acceptance of drafts.
            ran_drafter: whether the drafter took part; False where all drafts were forced.
        """
        length = asked.length if ran_drafter else 0
        resumes = length > 0 and self._drafted != self._now - 1
        if length:
            self._drafted = self._now
        self._outcomes.append(
            Outcome(asked, length, rows, accepted, greedy, draft, total, forced, resumes)
        )
        self._count_undrafted(asked.source if length else None, rows, accepted)
        if self._retry is not None:
            with self._governor.lock:
                self._pay_retry(self._retry, len(rows) + sum([n or 0 for n in accepted]), total)
        if len(self._outcomes) >= LONGEST_STAND or None in accepted:
            with self._governor.lock:
                self._learn_outcomes()

    def _count_undrafted(
        self, drafted: int | None, rows: Sequence[RowMemory], accepted: Sequence[int | None]
    ) -> None:
        """Counts the tokens that were committed; ``drafted`` is the source that has read all."""
        for source in range(len(self._governor.sources.names)):
            for row, num in zip(rows, accepted, strict=True):
                rates = row.of(source)
                rates.undrafted = 0 if source == drafted else rates.undrafted + (num or 0) + 1

    def _pay_retry(self, retry: Retry, tokens: int, seconds: float) -> None:
        """Charges a round of a retry with the tokens that it lost, but no more than twice what was
        expected, since something else may have delayed it. Such rounds go on while they pay but for
        the reading of what the draft model lacked."""
        lost = (seconds * retry.instead.rate - tokens) / retry.instead.tokens
        self._governor.retry_credit -= max(min(lost, 2 * retry.cost), _LEAST_LOSS)
        believed = retry.option.believed
        assert believed is not None
        if tokens < believed.seconds * retry.instead.rate:
            self._retry = None

    def _learn_outcomes(self) -> None:
        """Learns from the rounds since it last did."""
        governor = self._governor
        times_count = self._times_forgotten == governor.times_forgotten
        self._times_forgotten = governor.times_forgotten
        labels: dict[tuple[bool, int], list[Label]] = {}
        for outcome in self._outcomes:
            governor.now += 1
            governor.retry_credit += RETRY_SHARE
            if times_count:
                self._learn_times(outcome)
            if outcome.length:
                governor.drafted[outcome.greedy] = governor.now
                for label in outcome.labels(governor.now):
                    labels.setdefault((label.row.greedy, outcome.asked.source), []).append(label)
        self._outcomes.clear()
        for (greedy, source), found in labels.items():
            of_class = governor.rates(greedy, source)
            odds = of_class.odds(max([label.length for label in found]))
            for row, length, accepted, now in found:
                row.of(source).learn(odds, length, accepted, now)
            of_class.learn([(label.length, label.accepted) for label in found], governor.now)

    def _learn_times(self, outcome: Outcome) -> None:
        governor, num, length = self._governor, len(outcome.rows), outcome.length
        width = max(length, *outcome.forced) if outcome.forced else length
        if length:
            governor.costs(outcome.greedy, outcome.asked.source).observe(
                num,
                length,
                outcome.draft,
                outcome.total,
                outcome.asked.behind,
                width,
                resumes=outcome.resumes,
            )
        else:
            for each in range(len(governor.sources.names)):
                governor.costs(outcome.greedy, each).observe(
                    num, 0, 0.0, outcome.total, width=width
                )

    # ------------------------------------------------------------------------------------ choices

    def _plan(self, rows: list[RowMemory], limits: Sequence[int], greedy: bool) -> Option:
        """The choice for the next rounds, or for the next one if it is a probe."""
        self._planned_at, self._rows = self._now, rows
        self._standing = self._retry = None
        governor, sources = self._governor, self._governor.sources
        lengths, first = sources.up_to(max(limits)), governor.costs(greedy, 0)
        num_measured = first.now
        if num_measured < _FIRST_ROUNDS and not first.is_prepared:
            widest = 1 if num_measured % 2 else min(_FIRST_TOKENS // len(rows), _FIRST_WIDTH)
            return Option(0, max(each for each in lengths if each < max(1, widest)), None)
        promises = [
            self._promise(source, rows, limits, greedy, lengths)
            for source in range(len(sources.names))
        ]
        best = max((each.best for each in promises), key=lambda option: option.rate)
        if self._present is not None and self._present[1] in lengths:
            source, length = self._present
            present = promises[source].option(lengths.index(length))
            if best.rate < HYSTERESIS * present.rate:
                best = present
        before, self._present = self._present, (best.source, best.length)
        self._standing = best
        probe = None
        if self._present == before:
            probe = self._probe(best, promises, len(rows), greedy)
        is_new = probe is not None and self._age(probe, len(rows), greedy) == NEVER
        is_confirmed = self._present == before and not is_new
        self._stands = min(2 * self._stands, LONGEST_STAND) if is_confirmed else 1
        return probe or best

    def _promise(
        self,
        source: int,
        rows: Sequence[RowMemory],
        limits: Sequence[int],
        greedy: bool,
        lengths: tuple[int, ...],
    ) -> Promise:
        """What each draft length of a source promises."""
        governor = self._governor
        costs, most = governor.costs(greedy, source), lengths[-1]
        odds = {each: governor.rates(each, source).odds(most) for each in {r.greedy for r in rows}}
        survivals = [
            row.of(source).survival(odds[row.greedy][:limit])
            for row, limit in zip(rows, limits, strict=True)
        ]
        late = costs.catch_up(len(rows), self._behind(source, rows))
        tokens = expected_tokens(survivals, len(rows), lengths)
        return Promise(source, lengths, tokens, costs.curve(len(rows), lengths), late)

    def _behind(self, source: int, rows: Sequence[RowMemory]) -> int:
        """Committed tokens that the draft model lacks, of the row that lacks most; 0 for sources
        that run none."""
        if source > 0 or not self._governor.sources.lags:
            return 0
        return max([row.of(source).undrafted for row in rows])

    # ------------------------------------------------------------------------------------- probes

    def _probe(
        self, best: Option, promises: Sequence[Promise], num_rows: int, greedy: bool
    ) -> Option | None:
        """The option whose measurement is oldest, if it can be afforded: of the next shorter and
        the next longer draft and none; of the best length of another source; after rounds without
        drafts, of the shortest."""
        oldest = _PROBE_AGE if best.length else _RETRY_AGE
        candidates = [
            (age, option)
            for option in self._neighbours(best, promises)
            if (age := self._age(option, num_rows, greedy)) >= oldest
        ]
        for _, option in sorted(candidates, key=lambda pair: -pair[0]):
            tried = replace(option, probe=True)
            if self._can_pay(tried, best):
                return tried
        return None

    def _neighbours(self, best: Option, promises: Sequence[Promise]) -> Iterator[Option]:
        lengths = promises[best.source].draft_lengths
        place = lengths.index(best.length)
        for each in {max(place - 1, 0), min(place + 1, len(lengths) - 1), 0} - {place}:
            yield promises[best.source].option(each)
        for promise in promises:
            if promise.source != best.source and len(lengths) > 1:
                yield promise.best_draft

    def _age(self, option: Option, num_rows: int, greedy: bool) -> float:
        """Rounds since an option was measured; where nothing is drafted, since anything was."""
        present = self._present
        if present is not None and not present[1]:
            return self._governor.now - self._governor.drafted[greedy]
        age = self._governor.costs(greedy, option.source).age(num_rows, option.length)
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
        loss = max(min(max(0.0, lost), _CREDIT), _LEAST_LOSS)
        late = option.catch_up * best.rate / best.believed.tokens
        if late:
            affordable = self._governor.retry_credit >= _EARNED * (loss + late)
            if affordable:
                self._retry = Retry(option, best.believed, loss + late)
        else:
            affordable = self._credit >= loss
            self._credit -= loss if affordable else 0.0
        return affordable


@dataclass(slots=True)
class Option:
    """A source and a draft length, with what is expected of them.

    Attributes:
        source: which of ``Sources.names``.
        length: the draft length.
        believed: tokens and seconds of a round; None before any round was measured.
        catch_up: seconds in which the draft model first reads what it lacks.
        probe: whether it is only tried.
        rate: tokens per second of the next rounds.
    """

    source: int
    length: int
    believed: Goodput | None
    catch_up: float = 0.0
    probe: bool = False
    rate: float = 0.0


class Retry(NamedTuple):
    """Rounds that try a draft model again.

    Attributes:
        option: what they draft.
        instead: what is expected of rounds without drafts.
        cost: what the first of them is expected to lose, in tokens.
    """

    option: Option
    instead: Goodput
    cost: float


class Promise:
    """What the draft lengths of a source promise.

    Args:
        source: which of ``Sources.names``.
        lengths: the draft lengths, ascending from 0.
        tokens: of a round, by length.
        seconds: of a round, by length.
        catch_up: seconds in which the draft model first reads what it lacks.
    """

    def __init__(
        self,
        source: int,
        lengths: tuple[int, ...],
        tokens: Sequence[float],
        seconds: Sequence[float],
        catch_up: float,
    ) -> None:
        self.source = source
        self.draft_lengths = lengths
        self._tokens, self._seconds, self._catch_up = tokens, seconds, catch_up
        late = catch_up / HORIZON
        self._rates = [n / (s + late) for n, s in zip(tokens, seconds, strict=True)]
        self._rates[0] = tokens[0] / seconds[0]

    @property
    def best(self) -> Option:
        """The length with the most tokens per second."""
        return self.option(self._rates.index(max(self._rates)))

    @property
    def best_draft(self) -> Option:
        """The best length above 0."""
        drafting = self._rates[1:]
        return self.option(1 + drafting.index(max(drafting)))

    def option(self, place: int) -> Option:
        """The option of a length."""
        return Option(
            self.source,
            self.draft_lengths[place],
            Goodput(self._tokens[place], self._seconds[place]),
            self._catch_up if place else 0.0,
            rate=self._rates[place],
        )
