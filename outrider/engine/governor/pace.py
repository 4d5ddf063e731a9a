"""How slow the machine is now, relative to what was measured on the whole.

Other work, a lower clock frequency or a longer context slow rounds of all draft lengths by about as
much, while only one of them runs. If each length knew only its own rounds, the one that runs would
look slow beside those that were measured in better times. So times are learned after division by
the pace, and read after multiplication by it. What the lengths are relative to each other is
learned slowly, the pace fast:

    pace += (seconds / expected - pace) / 8        by each round of a kind that was measured before

After all rows have been replaced by others, whose contexts may be longer or shorter, the first
rounds count for more: 1/2, 1/3, 1/4, and so on to 1/8.
"""

_FOLLOWED = 1 / 8
_MOST = 2.0
"""How often a round's seconds may be those that are expected at the present pace, or the other way
round: more, and something else delayed it."""


class Pace:
    """The machine's pace.

    Attributes:
        now: what measured seconds are multiplied by; 1 at first.
    """

    __slots__ = ("_followed", "now")

    def __init__(self) -> None:
        self.now = 1.0
        self._followed = _FOLLOWED

    def follow(self, seconds: float, expected: float) -> None:
        """Takes the seconds of a round, and those that were expected at a pace of 1."""
        ratio = min(max(seconds / (expected * self.now), 1 / _MOST), _MOST)
        self.now *= 1 + self._followed * (ratio - 1)
        self._followed = max(_FOLLOWED, self._followed / (1 + self._followed))

    def change_rows(self) -> None:
        """The next rounds have none of the rows of those before."""
        self._followed = 1 / 2
