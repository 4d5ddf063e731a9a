"""Where the n-grams of a growing text have occurred: hash tables that hold nothing but places.

A table of dictionaries would cost some 200 bytes per token. Here a slot is one 32-bit integer, the
place behind an n-gram, and the tokens themselves, kept once, say whether it is the right one. With
tables between a third and two thirds full, a token costs 4 bytes and 6 to 12 for each length n.
The last ``MAX_FORGOTTEN`` n-grams can be taken back.

Not to be confused with ``ngram_table``: that one is a language model, this one a text's index.
"""

from array import array
from collections import deque
from sys import getsizeof

MAX_FORGOTTEN = 64
_FIRST_SIZE = 64


class NgramIndex:
    """The places of the n-grams of one length in a text.

    Args:
        text: the tokens, appended to by its owner.
        n: tokens of an n-gram.
        latest: remember where it occurred last; otherwise where it occurred first.
    """

    def __init__(self, text: "array[int]", n: int, latest: bool) -> None:
        self._text = text
        self._n = n
        self._latest = latest
        self._slots = array("i", [0]) * _FIRST_SIZE
        self._used = 0
        self._log: deque[tuple[int, int]] = deque(maxlen=MAX_FORGOTTEN)  # slots, what was in them

    def put(self, ends: range) -> None:
        """Notes the n-grams of the tokens before each of these ends."""
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
        """N-grams that can be taken back: of those put last, since the table was last rebuilt."""
        return len(self._log)

    def forget(self, num: int) -> None:
        """Takes the last so many n-grams back, ``num_forgettable`` at most."""
        for _ in range(num):
            slot, before = self._log.pop()
            self._slots[slot] = before
            self._used -= not before

    def find(self, end: int) -> int:
        """The place behind another occurrence of the n-gram before ``end``; 0 if none is known."""
        return self._slots[self._slot(end)]

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return getsizeof(self._slots)

    def _slot(self, end: int) -> int:
        """Where that n-gram is, or would be."""
        text, n, slots = self._text, self._n, self._slots
        gram = text[end - n : end]
        mask = len(slots) - 1
        slot = hash(gram.tobytes()) & mask
        while (other := slots[slot]) and text[other - n : other] != gram:
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        self._log.clear()
        places = [place for place in self._slots if place]
        self._slots = array("i", [0]) * (2 * len(self._slots))
        for place in places:
            self._slots[self._slot(place)] = place
