"""What it takes a draft model to read the committed tokens that it lacks.

    seconds = s (a + b n)        n tokens of all rows; s: a draft step of one row

After rounds without drafts the processor's caches have lost the draft model's weights, so the first
step takes longer however few tokens it reads (a); each token adds b. Both are fitted to what was
measured, by least squares, and to an assumption: that reading tokens takes as long as a draft step
of as many rows. Tokens of all rows are counted, since batches of all sizes share the estimates: on
a processor whose passes are bound by computation, four rows take four times as long to read as one.
"""

_KEPT = 0.8
"""Weight of a measurement relative to the next one."""

_MOST = 16
"""Measurements that are kept."""

ASSUMED = 64
"""Tokens whose reading is assumed to take as long as a draft step of as many rows."""

_WEIGHT = 0.25
"""Weight of what is assumed, and of reading nothing in no time."""


class CatchUp:
    """The estimates a and b."""

    def __init__(self) -> None:
        self._measured: list[tuple[int, float]] = []
        self._assumed = 1.2  # steps, until one was measured
        self._line = self._fitted()

    def observe(self, tokens: int, steps: float) -> None:
        """Takes a measurement: that reading so many tokens took so many draft steps of one row."""
        self._measured = [*self._measured[1 - _MOST :], (tokens, min(steps, float(tokens)))]
        self._line = self._fitted()

    def assume(self, steps: float) -> None:
        """Takes how many draft steps of one row one of ``ASSUMED`` rows takes."""
        self._assumed = steps
        self._line = self._fitted()

    def steps(self, tokens: int) -> float:
        """How many draft steps it takes to read so many tokens."""
        level, slope = self._line
        return max(0.0, level + slope * tokens)

    def _fitted(self) -> tuple[float, float]:
        newest_first = enumerate(reversed(self._measured))
        points = [(_KEPT**age, n, steps) for age, (n, steps) in newest_first]
        points += [(_WEIGHT, 0, 0.0), (_WEIGHT, ASSUMED, self._assumed)]
        total = sum(w for w, _, _ in points)
        mean_n = sum(w * n for w, n, _ in points) / total
        mean_steps = sum(w * steps for w, _, steps in points) / total
        spread = sum(w * (n - mean_n) ** 2 for w, n, _ in points)
        joint = sum(w * (n - mean_n) * (steps - mean_steps) for w, n, steps in points)
        slope = max(0.0, joint / spread)
        return mean_steps - slope * mean_n, slope
