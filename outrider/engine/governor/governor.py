"""The governor: how many tokens to draft, and from which sources, round by round.

Before each round it compares the goodput of all draft lengths (``allocation.py``), with the seconds
of a round as measured (``costs.py``) and the acceptance as estimated (``acceptance.py``). Drafting
nothing is one of the lengths; a draft model then reads nothing, and catches up when it is used
again. A head reads the committed tokens all the same, because the target's hidden states are not
kept. Three rules keep the choice calm:

    hysteresis   another length must promise 3 % more than the present one
    catching up  what a draft model that fell behind must read first is spread over 16 rounds
    probing      rounds of another length, to measure it, may cost 1 % of the tokens at most

A length is chosen before the round from what earlier rounds showed. It does not depend on the
round's drafted tokens or random numbers, so every lossless rule stays lossless
(``docs/decisions/0031-lengths-chosen-by-measured-times.md``). It does depend on the clock.

Legend: B rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from threading import Lock

from outrider.engine.governor.acceptance import PositionRates, RowRates, sigmoid
from outrider.engine.governor.allocation import Goodput, goodputs
from outrider.engine.governor.costs import RoundCosts

MOST = 8
"""The longest draft where the user and the drafter set none."""

ALL, FREE = "draft", "free sources"

HYSTERESIS = 1.03
HORIZON = 16
"""Rounds that the seconds of catching up are spread over."""

PROBE_SHARE = 0.01
"""Tokens that probing may cost, as a share of all."""

REPLAN = 2
"""Rounds between two choices, as long as the rows stay the same."""

_FIRST_ROUNDS = 6
"""Rounds of each class that only measure, in turn with a draft and without."""

_FIRST_TOKENS = 32
"""Most tokens of the target's passes in these rounds."""

_FIRST_WIDTH = 4
_PROBE_AGE = 12
_CREDIT = 1.0
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
    """

    lengths: tuple[int, ...] = tuple(range(MOST + 1))
    names: tuple[str, ...] = (ALL,)
    draft_ratio: float = 0.1
    lags: bool = True


@dataclass(frozen=True, slots=True)
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
        lock: held by whoever reads or writes what was learned.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._costs: dict[tuple[bool, int], RoundCosts] = {}
        self._rates: dict[tuple[bool, int], PositionRates] = {}
        self.now = 0
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
                logits = self.rates(greedy, source).logits(lengths[-1])
                found[f"acceptance, {name}"] = [sigmoid(b) for b in logits]
                costs = self.costs(greedy, source)
                if not costs.is_empty:
                    found[f"seconds, {name}"] = costs.curve(rows, lengths)
        return found


class BatchGovernor:
    """The choices for one running batch.

    Args:
        governor: what the engine has learned.
    """

    def __init__(self, governor: Governor) -> None:
        self._governor = governor
        self._now = 0
        self._credit = _CREDIT
        self._present: Option | None = None
        self._next: Option | None = None
        self._planned = 0
        self._rows: list[RowMemory] = []
        self._drafted = 0

    def ask(self, rows: list[RowMemory], limits: Sequence[int], greedy: bool) -> Asked:
        """What the next round shall draft.

        Args:
            rows: what is remembered of the rows.
            limits: by row, the most tokens that it may draft.
            greedy: whether all rows are.
        """
        with self._governor.lock:
            self._now += 1
            self._credit = min(_CREDIT, self._credit + PROBE_SHARE)
            option = self._next
            if option is None or rows != self._rows or self._now - self._planned >= REPLAN:
                option = self._plan(rows, limits, greedy)
            self._next = None if option.probe or option.believed is None else option
            length = min(option.length, max(limits))
            behind = self._behind(option.source, rows) if length else 0
            return Asked(
                option.source,
                length,
                [min(length, limit) for limit in limits],
                option.probe,
                option.believed,
                behind,
            )

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
        governor, source = self._governor, asked.source
        with governor.lock:
            governor.now += 1
            num, length = len(rows), asked.length if ran_drafter else 0
            width = max(length, *forced) if forced else length
            if length:
                self._drafted = self._now
                governor.costs(greedy, source).observe(
                    num, length, draft, total, asked.behind, width
                )
            else:
                for each in range(len(governor.sources.names)):
                    governor.costs(greedy, each).observe(num, 0, 0.0, total, width=width)
            lengths = asked.lengths
            if forced:
                lengths = [0 if n else most for n, most in zip(forced, lengths, strict=True)]
            self._learn_acceptance(source if length else None, lengths, rows, accepted)

    def _learn_acceptance(
        self,
        drafted: int | None,
        lengths: Sequence[int],
        rows: Sequence[RowMemory],
        accepted: Sequence[int | None],
    ) -> None:
        """Takes a round's outcomes.

        Args:
            drafted: the source that drafted; None if none did.
            lengths: by row, the tokens that it was asked to draft; 0 where it teaches nothing.
            rows, accepted: as of :meth:`learn`.
        """
        outcomes: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        logits: dict[bool, list[float]] = {}
        for row, length, num in zip(rows, lengths, accepted, strict=True):
            if num is None:
                continue
            for source in range(len(self._governor.sources.names)):
                rates = row.of(source)
                rates.undrafted = 0 if source == drafted else rates.undrafted + num + 1
            if drafted is None or not length:
                continue
            if row.greedy not in logits:
                of_class = self._governor.rates(row.greedy, drafted)
                logits[row.greedy] = of_class.logits(max(lengths))
            num = min(num, length)
            row.of(drafted).learn(logits[row.greedy], length, num, self._governor.now)
            outcomes[row.greedy].append((length, num))
        for greedy, found in outcomes.items():
            if found and drafted is not None:
                self._governor.rates(greedy, drafted).learn(found, self._governor.now)

    def _plan(self, rows: list[RowMemory], limits: Sequence[int], greedy: bool) -> Option:
        """The option for the next rounds, or for the next one if it is a probe."""
        self._planned, self._rows = self._now, rows
        sources, most = self._governor.sources, max(limits)
        lengths = tuple(length for length in sources.lengths if length <= most)
        num_measured = self._governor.costs(greedy, 0).now
        if num_measured < _FIRST_ROUNDS:
            widest = 1 if num_measured % 2 else min(_FIRST_TOKENS // len(rows), _FIRST_WIDTH)
            return Option(0, max(each for each in lengths if each < max(1, widest)), None)
        table = {
            (option.source, option.length): option
            for source in range(len(sources.names))
            for option in self._options(source, rows, limits, greedy, lengths)
        }
        best = max(table.values(), key=lambda option: option.rate)
        present = None
        if self._present is not None:
            present = table.get((self._present.source, self._present.length))
        if present is not None and best.rate < HYSTERESIS * present.rate:
            best = present
        self._present = best
        probe = self._probe(best, table, lengths, len(rows), greedy)
        return best if probe is None else probe

    def _options(
        self,
        source: int,
        rows: Sequence[RowMemory],
        limits: Sequence[int],
        greedy: bool,
        lengths: tuple[int, ...],
    ) -> Iterator[Option]:
        governor = self._governor
        costs, most = governor.costs(greedy, source), lengths[-1]
        logits: dict[bool, list[float]] = {}
        survivals = []
        for row, limit in zip(rows, limits, strict=True):
            if row.greedy not in logits:
                logits[row.greedy] = governor.rates(row.greedy, source).logits(most)
            survivals.append(row.of(source).survival(logits[row.greedy][:limit]))
        behind = self._behind(source, rows)
        late = costs.catch_up(len(rows), behind)
        found = goodputs(survivals, lengths, costs.curve(len(rows), lengths))
        for length, each in zip(lengths, found, strict=True):
            yield Option(source, length, each, late if length else 0.0)

    def _behind(self, source: int, rows: Sequence[RowMemory]) -> int:
        """Committed tokens that the draft model lacks, of the row that lacks most; 0 for sources
        that run none."""
        if source > 0 or not self._governor.sources.lags:
            return 0
        return max(row.of(source).undrafted for row in rows)

    def _probe(
        self,
        best: Option,
        table: dict[tuple[int, int], Option],
        lengths: tuple[int, ...],
        num_rows: int,
        greedy: bool,
    ) -> Option | None:
        """The option whose measurement is oldest, if it can be afforded: of the next shorter and
        the next longer draft and none; of the best length of another source; after rounds without
        drafts, of the shortest."""
        candidates = [
            (self._age(option, num_rows, greedy), option)
            for option in self._neighbours(best, table, lengths)
        ]
        for age, option in sorted(candidates, key=lambda pair: -pair[0]):
            loss = self._loss(option, best)
            if age >= _PROBE_AGE and self._credit >= loss:
                self._credit -= max(loss, _LEAST_LOSS)
                return replace(option, probe=True)
        return None

    def _neighbours(
        self, best: Option, table: dict[tuple[int, int], Option], lengths: tuple[int, ...]
    ) -> Iterator[Option]:
        place = lengths.index(best.length)
        nearby = {lengths[max(place - 1, 0)], lengths[min(place + 1, len(lengths) - 1)], 0}
        for length in nearby - {best.length}:
            yield table[best.source, length]
        for source in range(len(self._governor.sources.names)):
            if source != best.source and len(lengths) > 1:
                ours = [table[source, length] for length in lengths if length]
                yield max(ours, key=lambda option: option.rate)

    def _age(self, option: Option, num_rows: int, greedy: bool) -> float:
        """Rounds since an option was measured; where nothing is drafted, since anything was."""
        present = self._present
        if present is not None and not present.length:
            return self._now - self._drafted
        age = self._governor.costs(greedy, option.source).age(num_rows, option.length)
        return float("inf") if age is None else age

    def _loss(self, option: Option, best: Option) -> float:
        """Tokens that a round of an option loses to rounds of the best one, in rounds of those. All
        credit pays for the slowest round, since the option may look slow only because something
        delayed it when it was measured; catching up is slow without doubt."""
        assert option.believed is not None
        assert best.believed is not None
        tokens, seconds = option.believed
        lost = (seconds * best.rate - tokens) / best.believed.tokens
        late = option.catch_up * best.rate / best.believed.tokens
        return min(max(0.0, lost), _CREDIT) + late


@dataclass(frozen=True, slots=True)
class Option:
    """A source and a draft length, with what is expected of them.

    Attributes:
        source: which of ``Sources.names``.
        length: the draft length.
        believed: tokens and seconds of a round; None before any round was measured.
        catch_up: seconds in which the draft model first reads what it lacks.
        probe: whether it is only tried.
    """

    source: int
    length: int
    believed: Goodput | None
    catch_up: float = 0.0
    probe: bool = False

    @property
    def rate(self) -> float:
        """Tokens per second of the next rounds."""
        if self.believed is None:
            return 0.0
        seconds = self.believed.seconds + self.catch_up / HORIZON
        return self.believed.tokens / seconds if seconds > 0 else 0.0
