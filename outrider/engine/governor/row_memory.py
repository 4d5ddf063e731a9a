"""What a governor remembers of a row: its class, and its acceptance by source."""

from collections.abc import Sequence

from outrider.engine.governor.acceptance import Kind
from outrider.engine.governor.repetition import Repetition
from outrider.engine.governor.row_rates import RowRates


class RowMemory:
    """What the governor remembers of a row.

    Args:
        greedy: whether the row is at temperature 0.
        prompt: the tokens that its output continues.
        output: its output, which grows.
        repeatable: whether its output must be repeatable, and depends on draft lengths.

    Attributes:
        repeatable: as given.
        kind: the class whose estimates it shares.
        rates: by source, the row's acceptance.
        has_changed: whether it began or ceased to repeat itself since its drafts were looked at.
    """

    __slots__ = (
        "_num_followed",
        "_output",
        "_repetition",
        "has_changed",
        "kind",
        "rates",
        "repeatable",
    )

    def __init__(
        self,
        greedy: bool,
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
        repeatable: bool = False,
    ) -> None:
        self.repeatable = repeatable
        self.rates: dict[int, RowRates] = {}
        self._repetition = Repetition(prompt if greedy else ())
        self.has_changed = self._repetition.is_on
        self.kind = Kind(greedy, self._repetition.is_on)
        self._output, self._num_followed = output, 0

    def follow(self) -> None:
        """Reads what was added to the output since the last call; of greedy rows only."""
        if not self.kind.greedy:
            return
        repetition = self._repetition
        if repetition.take(self._output[self._num_followed :]):
            self.has_changed = True
            self.kind = Kind(self.kind.greedy, repetition.is_on)
            for rates in self.rates.values():
                rates.begin()
        self._num_followed = len(self._output)

    def of(self, source: int) -> RowRates:
        """The row's acceptance of a source."""
        if source not in self.rates:
            self.rates[source] = RowRates()
        return self.rates[source]


def have_changed(rows: Sequence[RowMemory]) -> bool:
    """Whether at least half of the rows have."""
    return 2 * sum([row.has_changed for row in rows]) >= len(rows)
