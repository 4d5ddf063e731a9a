"""The choices of one running batch: how many tokens to draft, and from which sources.

Before each round it compares the goodput of all draft lengths (``allocation.py``), with the seconds
of a round as measured (``costs.py``) and the acceptance as estimated (``acceptance.py``). Drafting
nothing is one of the lengths; a draft model then reads nothing, and catches up when it is used
again. A head reads the committed tokens all the same, because the target's hidden states are not
kept. These rules keep the choice calm and cheap:

    hysteresis   another length must promise 3 % more than the present one, and 5 % more than none
    hope         where drafting nothing promises most, the best draft is chosen all the same if it
                 may pay: if the rows accept more than is believed of them, by two standard
                 deviations (``spread.py``). Rounds without drafts would not show it
    catching up  what a draft model that fell behind must read first is spread over 32 rounds
    probing      rounds of another length, to measure it, may cost 1 % of the tokens at most, or
                 1.8 % where a draft model must catch up first. Some go on (``probes.py``). None is
                 made instead of a hopeful draft, which itself is only tried
    reviews      where it can, a draft model that catches up is compared with what the target has
                 emitted, and no round drafts for it (``reviews.py``)
    standing     a choice stands for one round, and for twice as many, up to 8, each time that it
                 comes out again, unless rows come or go, or a probe is the first of its kind
    rest         drafting nothing stands for 8 rounds, or until a review may be due, up to 64. No
                 choice is made meanwhile, and what the rounds took is learned together, so that
                 each of them is a round of plain decoding. A rest ends where half of the rows have
                 begun or ceased to repeat themselves, so that a review is due (``repetition.py``)
    balance      where reviews are possible, eight rounds that drafted and together were slower than
                 rounds without drafts are followed by 16 without, or until a review, and by twice
                 as many each time that it happens again, up to 128, unless later rounds have made
                 good for them. Acceptance and times may be overestimated; the clock sees both. A
                 review begins the count of rounds anew, and so does a first draft after half of
                 the rows have begun or ceased to repeat themselves. Rounds that gained earn reviews
"""

from collections.abc import Sequence
from math import ceil
from typing import Protocol

from outrider.engine.governor.allocation import Option, Promise
from outrider.engine.governor.governor import Governor
from outrider.engine.governor.outcomes import Asked, Outcome
from outrider.engine.governor.probes import NEVER, ROUNDS_OF_NONE, Probes
from outrider.engine.governor.reviews import Reviews
from outrider.engine.governor.row_memory import RowMemory, have_changed

HYSTERESIS = 1.03
_TO_START = 1.05

LONGEST_STAND = 8
"""Most rounds that a choice stands for; what they showed is learned together."""

LONGEST_REST = 64
"""Most rounds that drafting nothing stands for, where a review may end it."""

HEED = 4
"""Rounds of a rest between two looks at what its rows repeat."""

_BALANCED = 8  # rounds
_PAUSE, _LONGEST_PAUSE = 16, 128  # rounds
_AS_USUAL = 2  # tokens that a draft model lacks in a run of drafts

_FIRST_ROUNDS = 6
"""Rounds of each class that only measure, in turn with a draft and without."""

_FIRST_TOKENS = 24
"""Most tokens of the target's passes in these rounds."""

_FIRST_WIDTH = 4


class LengthChooser(Protocol):
    """Chooses the draft length of each round of a running batch."""

    def ask(
        self, rows: list[RowMemory], limits: Sequence[int], greedy: bool, reviewable: int = 0
    ) -> Asked:
        """What the next round shall draft; as :meth:`BatchGovernor.ask`."""

    def reads_prompts(
        self, rows: list[RowMemory], limits: Sequence[int], greedy: bool, num_tokens: int
    ) -> bool:
        """Whether the draft model reads new prompts; as :meth:`BatchGovernor.reads_prompts`."""

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
        reviewed: Sequence[Sequence[float]] = (),
        overlaps: Sequence[Sequence[Sequence[float]]] = (),
    ) -> None:
        """Takes what a round showed; as :meth:`BatchGovernor.learn`."""


class BatchGovernor:
    """The choices for one running batch.

    Args:
        governor: what the engine has learned.
    """

    def __init__(self, governor: Governor) -> None:
        self._governor = governor
        self._probes = Probes(governor)
        self._reviews = Reviews(governor)
        self._balance = Balance()
        self._is_reviewed = False
        self._now = 0
        self._present: tuple[int, int] | None = None
        self._standing: Option | None = None
        self._planned_at, self._stands = 0, 1
        self._rows: list[RowMemory] = []
        self._outcomes: list[Outcome] = []
        self._times_forgotten = governor.times_forgotten
        self._drafted = 0
        self._rest: Asked | None = None
        self._rested: list[float] = []
        self._rests_greedy = self._heeds_changes = False

    def ask(
        self, rows: list[RowMemory], limits: Sequence[int], greedy: bool, reviewable: int = 0
    ) -> Asked:
        """What the next round shall draft.

        Args:
            rows: what is remembered of the rows.
            limits: by row, the most tokens that it may draft.
            greedy: whether all rows are.
            reviewable: how many of the newest tokens of each row a review would compare with the
                draft model; 0 where it cannot.
        """
        self._now += 1
        if self._rest is not None:
            if rows is self._rows and not self._is_rest_over():
                return self._rest
            self._end_rest()
            self._standing = None
        fixed = self._governor.fixed_length(rows)
        if fixed is not None:
            choice = Option(0, fixed, None)
        else:
            choice = self._choice(rows, limits, greedy, reviewable)
        if not choice.length and not choice.reviews:
            asked = Asked(choice.source, 0, [0] * len(limits), choice.probe, choice.believed)
            if choice is self._standing:
                self._rest, self._rests_greedy = asked, greedy
            return asked
        length = min(choice.length, max(limits))
        return Asked(
            choice.source,
            length,
            [min(length, limit) for limit in limits],
            choice.probe,
            choice.believed,
            self._governor.behind(choice.source, rows) if length or choice.reviews else 0,
            choice.reviews,
        )

    def reads_prompts(
        self, rows: list[RowMemory], limits: Sequence[int], greedy: bool, num_tokens: int
    ) -> bool:
        """Whether the draft model reads the prompts of rows that are about to join: because
        drafting is expected to pay, or to find out whether it does, for which there is a credit of
        its own. Otherwise it reads them when it first drafts.

        Args:
            rows: what is remembered of all rows, new ones included.
            limits: by row, the most tokens that it may draft.
            greedy: whether all rows are.
            num_tokens: of the longest new prompt.
        """
        self._end_rest()
        governor, sources = self._governor, self._governor.sources
        with governor.lock:
            costs = governor.costs(greedy, 0)
            if costs.is_empty or governor.fixed_length(rows) is not None:
                return True
            lengths = sources.up_to(max(limits))
            promise = governor.promise(0, rows, limits, greedy, lengths)
            reading = costs.catch_up(len(rows), num_tokens)
            plain, best = promise.option(0), (promise.hopeful or promise.best).after(reading)
            assert plain.believed is not None
            if best.length and best.rate > _TO_START * plain.rate:
                return True
            return governor.pay_start(reading / plain.believed.seconds)

    def _choice(
        self, rows: list[RowMemory], limits: Sequence[int], greedy: bool, reviewable: int
    ) -> Option:
        """The choice for the next round: a new one where the standing one is due."""
        standing, due = self._standing, self._now - self._planned_at >= self._stands
        if standing is not None and not due and rows is self._rows:
            return standing if self._probes.retry is None else self._probes.retry.option
        with self._governor.lock:
            self._learn_outcomes()
            return self._plan(rows, limits, greedy, reviewable)

    def _plan(
        self, rows: list[RowMemory], limits: Sequence[int], greedy: bool, reviewable: int
    ) -> Option:
        """The choice for the next rounds, or for the next one if it is a probe or a review."""
        governor, sources = self._governor, self._governor.sources
        changed = rows is not self._rows
        if set(rows).isdisjoint(self._rows):
            governor.change_rows(greedy)
        self._planned_at, self._rows = self._now, rows
        self._standing = self._probes.retry = None
        for row in rows:
            row.follow()
        lengths, first = sources.up_to(max(limits)), governor.costs(greedy, 0)
        num_measured = first.now
        if num_measured < _FIRST_ROUNDS and not first.is_prepared:
            widest = 1 if num_measured % 2 else min(_FIRST_TOKENS // len(rows), _FIRST_WIDTH)
            return Option(0, max(each for each in lengths if each < max(1, widest)), None)
        promises = [
            governor.promise(source, rows, limits, greedy, lengths)
            for source in range(len(sources.names))
        ]
        best = max((each.best for each in promises), key=lambda option: option.rate)
        if self._present is not None and self._present[1] in lengths:
            source, length = self._present
            index = lengths.index(length)
            present_rate = promises[source].rates[index]
            if best.rate < (HYSTERESIS if length else _TO_START) * present_rate:
                best = promises[source].option(index)
        if not best.length:
            best = self._hopeful(promises, best)
        self._is_reviewed = self._is_reviewed or reviewable > 0
        if best.length and self._is_reviewed and self._balance.forbids(self._now, rows):
            best = promises[0].option(0)
        self._balance.plain_rate = promises[0].rates[0]
        before, self._present = self._present, (best.source, best.length)
        self._standing = best
        probe, is_hopeful = None, any(best is each.hopeful for each in promises)
        if self._present == before and not is_hopeful:
            is_reviewed = reviewable > 0 or (changed and self._is_reviewed)
            probe = self._probes.choose(best, promises, len(rows), greedy, is_reviewed)
        is_new = probe is not None and self._is_new(probe, best, len(rows), greedy)
        wait = 0.0
        if probe is None and not best.length:
            wait = self._wait(best, rows, greedy, reviewable)
            if reviewable and wait <= 0:
                probe = self._reviews.begin(best, rows, greedy)
                is_new = True  # the next choice is made with what it shows
        if not best.length and probe is None:
            longest = LONGEST_REST if reviewable else LONGEST_STAND
            self._stands = ceil(min(wait, longest)) if wait > 0 else longest
            self._heeds_changes = reviewable > 0 and not have_changed(rows)
        else:
            is_confirmed = self._present == before and not is_new
            self._stands = min(2 * self._stands, LONGEST_STAND) if is_confirmed else 1
        if self._probes.retry is not None and not self._probes.retry.cost:
            self._stands = max(self._stands, ROUNDS_OF_NONE)
        return probe or best

    def _hopeful(self, promises: Sequence[Promise], none: Option) -> Option:
        """The best hopeful draft, if it promises enough; else ``none``, which drafts nothing."""
        rests = self._present is not None and not self._present[1]
        least = (_TO_START if rests else 1.0) * none.rate
        found = [each.hopeful for each in promises if each.hopeful is not None]
        best = max(found, key=lambda option: option.rate, default=none)
        return best if best.rate > least else none

    def _is_new(self, probe: Option, best: Option, num_rows: int, greedy: bool) -> bool:
        """Whether a probe is the first of its kind."""
        age = self._probes.age(probe.source, probe.length, best, num_rows, greedy)
        return age == NEVER

    def _wait(
        self, best: Option, rows: Sequence[RowMemory], greedy: bool, reviewable: int
    ) -> float:
        """Rounds until the next look at the draft model, of which rounds without drafts show
        nothing."""
        if reviewable:
            return self._reviews.wait(best, rows, greedy, reviewable)
        return self._probes.wait(greedy)

    def _is_rest_over(self) -> bool:
        rounds = self._now - self._planned_at
        if rounds >= self._stands:
            return True
        if rounds % HEED or not self._heeds_changes:
            return False
        for row in self._rows:
            row.follow()
        return have_changed(self._rows)

    def _end_rest(self) -> None:
        """Counts and learns the rounds of the last rest."""
        self._rest = None
        if self._rested:
            for source in range(len(self._governor.sources.names)):
                for row in self._rows:
                    row.of(source).undrafted += len(self._rested)
            with self._governor.lock:
                self._learn_outcomes()

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
        reviewed: Sequence[Sequence[float]] = (),
        overlaps: Sequence[Sequence[Sequence[float]]] = (),
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
            reviewed: by row, the labels of a review, as many in each; empty if there was none.
            overlaps: by row, the probabilities that each position of the draft was verified, and
                that its token was accepted (``Counts.expected``); empty if only what was accepted
                is known.
        """
        if asked is self._rest and not forced:
            self._rested.append(total)
            if None in accepted:
                self._end_rest()
            return
        self._end_rest()
        length = asked.length if ran_drafter else 0
        changes = (length > 0) != (self._drafted == self._now - 1) and self._now > 1
        if length:
            self._drafted = self._now
        if length or reviewed:
            if reviewed or have_changed(rows):
                self._balance.lift()
            for row in rows:
                row.has_changed = False
        if length and not reviewed:
            tokens = len(rows) + sum([n or 0 for n in accepted])
            gained = self._balance.add(self._now, asked, rows, tokens, total)
            if gained > 0 and self._is_reviewed:
                with self._governor.lock:
                    self._governor.earn_reviews(gained / len(rows))
        self._outcomes.append(
            Outcome(
                *(asked, length, rows, accepted, greedy, draft, total, forced, changes, reviewed),
                overlaps,
            )
        )
        if reviewed:
            with self._governor.lock:
                self._reviews.pay(asked, total)
        if reviewed and asked.catches_up:
            for row in rows:
                row.of(0).undrafted = 0
        self._count_undrafted(asked.source if length else None, rows, accepted)
        if (retry := self._probes.retry) is not None:
            with self._governor.lock:
                tokens = len(rows) + sum([n or 0 for n in accepted])
                self._probes.pay_retry(retry, tokens, total)
        if len(self._outcomes) >= LONGEST_STAND or None in accepted:
            with self._governor.lock:
                self._learn_outcomes()

    def _count_undrafted(
        self, drafted: int | None, rows: Sequence[RowMemory], accepted: Sequence[int | None]
    ) -> None:
        """Counts the tokens that were committed; ``drafted`` is the source that has read all."""
        for source in range(len(self._governor.sources.names)):
            if source == drafted:
                for row in rows:
                    row.of(source).undrafted = 0
            else:
                for row, num in zip(rows, accepted, strict=True):
                    row.of(source).undrafted += (num or 0) + 1

    def _learn_outcomes(self) -> None:
        """Lets the engine's governor learn from the rounds since it last did."""
        governor = self._governor
        with_times = self._times_forgotten == governor.times_forgotten
        governor.learn(self._outcomes, with_times)
        if self._rested:
            governor.rest(self._rests_greedy, len(self._rows), self._rested, with_times)
        self._times_forgotten = governor.times_forgotten
        self._outcomes.clear()
        self._rested.clear()


class Balance:
    """What the last rounds that drafted gained over rounds without drafts, by the clock.

    Attributes:
        plain_rate: tokens per second of rounds without drafts.
    """

    def __init__(self) -> None:
        self.plain_rate = 0.0
        self._rows: Sequence[RowMemory] = ()
        self._num_rounds = 0
        self._gained = self._lost = 0.0
        self._pause, self._ends = _PAUSE, 0

    def add(
        self, now: int, asked: Asked, rows: Sequence[RowMemory], tokens: int, seconds: float
    ) -> float:
        """Takes a round that drafted; after some rounds that lost a pause begins. Probes do not
        count, nor do rounds in which the draft model read much.

        Returns:
            Tokens that the last rounds gained, each counted once: 0 until there are enough.
        """
        if asked.probe or asked.behind > _AS_USUAL:
            return 0.0
        if rows is not self._rows:
            self._rows, self._num_rounds, self._gained = rows, 0, 0.0
            self._pause, self._ends = _PAUSE, 0
        self._num_rounds += 1
        self._gained += tokens - seconds * self.plain_rate
        if self._num_rounds < _BALANCED:
            return 0.0
        gained = self._gained
        if gained < 0:
            self._ends, self._lost = now + self._pause, -gained
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        else:
            self._pause, self._ends = _PAUSE, 0
        self._num_rounds, self._gained = 0, 0.0
        return gained

    def forbids(self, now: int, rows: Sequence[RowMemory]) -> bool:
        """Whether these rows are in a pause. They are not where rounds for which a choice still
        stood have made good for what was lost."""
        if rows is not self._rows or now >= self._ends or have_changed(rows):
            return False
        return self._gained < self._lost

    def lift(self) -> None:
        """Ends the pause and forgets the rounds before it: they tell nothing of the next ones."""
        self._ends = self._num_rounds = 0
        self._gained = 0.0
