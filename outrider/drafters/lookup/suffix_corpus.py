"""A corpus of earlier outputs in two suffix automata, and cursors that match running rows in them.

Memory is bounded by generations: outputs are added to the young automaton; when it holds half of
the token budget it becomes the old one, and the old one is dropped. So the newest outputs are kept,
between half of the budget and all of it, and nothing is ever rebuilt.

Batches in several threads read and extend the same automata: hold the corpus's lock meanwhile.
"""

from collections.abc import Sequence
from threading import RLock

from outrider.drafters.lookup.suffix_index import SEPARATOR, SuffixIndex

_LOOK_BACK = 32


class Cursor:
    """The longest suffix of a running row that occurs in an automaton.

    Attributes:
        index: the automaton.
        matched: length of that suffix in tokens.
    """

    def __init__(self, index: SuffixIndex) -> None:
        self.index = index
        self.matched = 0
        self._state = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Reads the next tokens of the row; amortised O(1) each."""
        step, link, length = self.index.step, self.index.link, self.index.length
        for token in tokens:
            state = self.state()
            while not (target := step(state, token)) and state:
                state = link[state]
                self.matched = length[state]
            self.matched = self.matched + 1 if target else 0
            self._state = target

    def state(self) -> int:
        """The state of the suffix, which the automaton may have split since the last call."""
        index = self.index
        while self._state and self.matched <= index.length[index.link[self._state]]:
            self._state = index.link[self._state]
        return self._state


class Corpus:
    """The outputs of requests that have ended.

    Args:
        num_tokens: most tokens held.

    Attributes:
        indices: the young automaton and the old one; fewer while there are none.
        lock: hold it while using automata or cursors into them.
    """

    def __init__(self, num_tokens: int) -> None:
        self.indices: list[SuffixIndex] = []
        self.lock = RLock()
        self._half = num_tokens // 2

    def add(self, tokens: Sequence[int]) -> None:
        """Adds an output; only the end of one that is too long for a generation."""
        kept = tokens[max(len(tokens) - self._half + 1, 0) :]
        if not kept or self._half < 2:
            return
        if not self.indices or len(self.indices[0].tokens) + len(kept) + 1 > self._half:
            self.indices = [SuffixIndex(), *self.indices[:1]]
        index = self.indices.pop(0)
        index.extend([*kept, SEPARATOR])
        self.indices.insert(0, index)  # not reached if interrupted, as by Ctrl-C

    def cursors(self, known: list[Cursor], tokens: Sequence[int]) -> list[Cursor]:
        """A cursor for each automaton: the known ones, and new ones that have read the row's last
        tokens."""
        if [cursor.index for cursor in known] == self.indices:
            return known
        by_index = {id(cursor.index): cursor for cursor in known}
        cursors = []
        for index in self.indices:
            cursor = by_index.get(id(index))
            if cursor is None:
                cursor = Cursor(index)
                cursor.extend(tokens[-_LOOK_BACK:])
            cursors.append(cursor)
        return cursors

    def clear(self) -> None:
        """Drops all outputs."""
        self.indices = []

    @property
    def num_tokens(self) -> int:
        """Tokens held, separators included."""
        return sum(len(index.tokens) for index in self.indices)

    @property
    def num_bytes(self) -> int:
        """Memory of the automata in bytes."""
        return sum(index.num_bytes for index in self.indices)
