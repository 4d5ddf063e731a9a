"""Draft lengths by the number of running rows, in the form that vLLM reads.

A table is a list of ``[first, last, γ]``: while ``first`` to ``last`` rows run, each of them drafts
γ tokens. This is ``num_speculative_tokens_per_batch_size`` of vLLM's speculative configuration: the
ranges begin at 1, rise and do not overlap; numbers of rows between two ranges, and above the last
one, have the γ of the range before them; γ may be 0.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from outrider.core.errors import InvalidParameterError
from outrider.core.values import is_whole, shown

Range = tuple[int, int, int]
"""First and last number of rows, and their γ."""

MOST_TOKENS = 64


@dataclass(frozen=True)
class LengthTable:
    """γ by the number of running rows.

    Attributes:
        ranges: first and last number of rows, and their γ.

    Raises:
        InvalidParameterError: no ranges, a first range that does not begin at 1, ranges that
            overlap or fall, a γ outside 0 to 64.
    """

    ranges: tuple[Range, ...]

    def __post_init__(self) -> None:
        if not self.ranges:
            raise self._error("has no ranges; write at least [1, 1, γ]")
        for first, last, gamma in self.ranges:
            if not 1 <= first <= last:
                raise self._error(f"[{first}, {last}, {gamma}] is no range of numbers from 1")
            if not 0 <= gamma <= MOST_TOKENS:
                raise self._error(f"γ of [{first}, {last}, {gamma}] must be 0 to {MOST_TOKENS}")
        if self.ranges[0][0] != 1:
            raise self._error(f"the first range must begin at 1, not at {self.ranges[0][0]}")
        for (_, last, _), (first, _, _) in pairwise(self.ranges):
            if first <= last:
                raise self._error(f"a range that begins at {first} follows one that ends at {last}")

    @classmethod
    def of(cls, value: object) -> "LengthTable":
        """A table from lists of three whole numbers.

        Raises:
            InvalidParameterError: anything else, or numbers that make no table.
        """
        if isinstance(value, Sequence) and not isinstance(value, str):
            rows = [tuple(each) if isinstance(each, Sequence) else () for each in value]
            if all(len(row) == 3 and all(map(is_whole, row)) for row in rows):
                return cls(
                    tuple((int(first), int(last), int(gamma)) for first, last, gamma in rows)
                )
        raise InvalidParameterError(
            f"draft_length={shown(value)}: a table is a list of [FIRST, LAST, γ], such as "
            f"[[1, 4, 6], [5, 16, 3], [17, 64, 0]]"
        )

    @classmethod
    def parse(cls, text: str) -> "LengthTable":
        """A table from JSON, such as ``[[1, 4, 6], [5, 16, 3]]``.

        Raises:
            InvalidParameterError: no JSON, or no table.
        """
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        return cls.of(value)

    @classmethod
    def of_measured(cls, gammas: Mapping[int, int], largest: int | None = None) -> "LengthTable":
        """The table with these γ at these numbers of rows. A number of rows in between has the γ of
        the next larger one, for which it was measured to pay.

        Args:
            gammas: γ by number of rows, at least one.
            largest: the last number of rows of the table; None takes that of ``gammas``.
        """
        ranges: list[Range] = []
        first = 1
        for last in sorted(gammas):
            if ranges and ranges[-1][2] == gammas[last]:
                ranges[-1] = (ranges[-1][0], last, gammas[last])
            else:
                ranges.append((first, last, gammas[last]))
            first = last + 1
        if largest is not None and largest >= first:
            begin, _, gamma = ranges[-1]
            ranges[-1] = (begin, largest, gamma)
        return cls(tuple(ranges))

    @property
    def most(self) -> int:
        """The longest draft of any number of rows."""
        return max(gamma for _, _, gamma in self.ranges)

    @property
    def as_lists(self) -> list[list[int]]:
        """The table as vLLM reads it."""
        return [list(each) for each in self.ranges]

    def length(self, num_rows: int) -> int:
        """γ while this many rows run."""
        index = bisect_right([first for first, _, _ in self.ranges], num_rows) - 1
        return self.ranges[max(index, 0)][2]

    def __str__(self) -> str:
        return json.dumps(self.as_lists)

    def _error(self, problem: str) -> InvalidParameterError:
        return InvalidParameterError(f"draft_length='table:{self}': {problem}")
