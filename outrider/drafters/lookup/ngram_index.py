"""An index of the positions of all n-grams of a growing token sequence.

Dictionaries would cost some 200 bytes per token. Here a hash table stores one 32-bit integer per
slot, the position after an n-gram; whether a slot holds the wanted n-gram is checked against the
tokens themselves, which are stored once. Tables are between a third and two thirds full, so a token
costs 4 bytes plus 6 to 12 bytes for each length n. The last ``MAX_FORGOTTEN`` insertions can be
undone.

Not to be confused with ``ngram.table``, a language model: this is an index of one sequence.
"""

from array import array
from collections import deque
from sys import getsizeof

MAX_FORGOTTEN = 64
_FIRST_SIZE = 64


class NgramIndex:
    """The positions of the n-grams of one length in a sequence.

    Args:
        tokens: the sequence; its owner appends to it.
        n: length of an n-gram.
        latest: store the last position of an n-gram; otherwise the first.
    """

    def __init__(self, tokens: "array[int]", n: int, latest: bool) -> None:
        self._tokens = tokens
        self._n = n
        self._latest = latest
        self._slots = array("i", [0]) * _FIRST_SIZE
        self._used = 0
        self._log: deque[tuple[int, int]] = deque(maxlen=MAX_FORGOTTEN)  # (slot, content before)

    def put(self, ends: range) -> None:
        """Inserts the n-grams that end before each of these positions."""
        log, latest = self._log, self._latest
        for end in ends:
            slot = self._slot(end)
            before = self._slots[slot]
            log.append((slot, before))
            if not before:
                self._slots[slot] = end
                self._used += 1
                if 3 * self._used > 2 * len(self._slots):
                    self._grow()
            elif latest:
                self._slots[slot] = end

    @property
    def num_forgettable(self) -> int:
        """How many of the last insertions can be undone: those since the table was rebuilt."""
        return len(self._log)

    def forget(self, num: int) -> None:
        """Undoes the last ``num`` insertions, ``num_forgettable`` at most."""
        for _ in range(num):
            slot, before = self._log.pop()
            self._slots[slot] = before
            self._used -= not before

    def find(self, end: int) -> int:
        """The position after another occurrence of the n-gram that ends before ``end``; 0 if there
        is none."""
        return self._slots[self._slot(end)]

    @property
    def num_bytes(self) -> int:
        """Memory of the table in bytes."""
        return getsizeof(self._slots)

    def _slot(self, end: int) -> int:
        """The slot of the n-gram that ends before ``end``, whether it is there or not."""
        tokens, n, slots = self._tokens, self._n, self._slots
        gram = tokens[end - n : end]
        mask = len(slots) - 1
        slot = hash(gram.tobytes()) & mask
        while (other := slots[slot]) and tokens[other - n : other] != gram:
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        self._log.clear()
        positions = [position for position in self._slots if position]
        self._slots = array("i", [0]) * (2 * len(self._slots))
        for position in positions:
            self._slots[self._slot(position)] = position
