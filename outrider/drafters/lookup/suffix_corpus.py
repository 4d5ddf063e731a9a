"""Earlier texts, as two suffix automata, and where a running text stands in them.

Memory is bounded by generations: texts go to the young automaton; when that holds half of what is
allowed it becomes the old one, and what was old is dropped. So between half of the memory budget
and all of it is remembered, the newest texts, and nothing is ever rebuilt.

Batches in other threads read and extend the same automata, so whoever does holds the corpus's lock.
"""

from collections.abc import Sequence
from threading import RLock

from outrider.drafters.lookup.suffix_index import SEPARATOR, SuffixIndex

_LOOK_BACK = 32


class Cursor:
    """The longest suffix of a running text that an automaton knows.

    Attributes:
        index: the automaton.
        matched: tokens of that suffix.
    """

    def __init__(self, index: SuffixIndex) -> None:
        self.index = index
        self.matched = 0
        self._state = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Reads the next tokens of the running text; amortised O(1) each."""
        step, link, length = self.index.step, self.index.link, self.index.length
        for token in tokens:
            state = self.settled()
            while not (target := step(state, token)) and state:
                state = link[state]
                self.matched = length[state]
            self.matched = self.matched + 1 if target else 0
            self._state = target

    def settled(self) -> int:
        """The suffix's state, which may have been split since the last time."""
        index = self.index
        while self._state and self.matched <= index.length[index.link[self._state]]:
            self._state = index.link[self._state]
        return self._state


class Corpus:
    """The outputs of requests that have ended.

    Args:
        num_tokens: most tokens held.

    Attributes:
        indices: the young automaton and the old one, as far as there are any.
        lock: to be held while automata or cursors into them are used.
    """

    def __init__(self, num_tokens: int) -> None:
        self.indices: list[SuffixIndex] = []
        self.lock = RLock()
        self._half = num_tokens // 2

    def add(self, tokens: Sequence[int]) -> None:
        """Takes in a text; of one too long for its generation, the end."""
        kept = tokens[max(len(tokens) - self._half + 1, 0) :]
        if not kept or self._half < 2:
            return
        if not self.indices or len(self.indices[0].text) + len(kept) + 1 > self._half:
            self.indices = [SuffixIndex(), *self.indices[:1]]
        index = self.indices.pop(0)
        index.extend([*kept, SEPARATOR])
        self.indices.insert(0, index)  # unless that was interrupted, as by Ctrl-C

    def cursors(self, known: list[Cursor], text: Sequence[int]) -> list[Cursor]:
        """A cursor for each automaton: those known, and new ones that have read the text's end."""
        if [cursor.index for cursor in known] == self.indices:
            return known
        by_index = {id(cursor.index): cursor for cursor in known}
        cursors = []
        for index in self.indices:
            cursor = by_index.get(id(index))
            if cursor is None:
                cursor = Cursor(index)
                cursor.extend(text[-_LOOK_BACK:])
            cursors.append(cursor)
        return cursors

    @property
    def num_tokens(self) -> int:
        """Tokens held, separators included."""
        return sum(len(index.text) for index in self.indices)

    @property
    def num_bytes(self) -> int:
        """Memory of the automata."""
        return sum(index.num_bytes for index in self.indices)
