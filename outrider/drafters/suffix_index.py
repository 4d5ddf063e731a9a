"""A suffix automaton of a growing text: every substring it ever had, and how often.

Blumer et al., "The smallest automaton recognizing the subwords of a text", Theoretical Computer
Science 40, 1985; the online construction, amortised O(1) per token. A state stands for a class of
substrings that end at the same places of the text; its suffix link leads to the longest shorter one
that also ends elsewhere. So the link of the whole text's state is the longest suffix that occurred
before: the longest match of any length, without a search.

Each state counts its places. A new token adds a place to all its suffixes, one step per link; where
a text is so repetitive that there are more than ``MAX_LINKS``, the shortest are not counted.

States and transitions are rows of arrays of 32-bit integers. Most states have one transition,
which is kept with the state (``next``); the others are chained (``more``, ``sibling``) and found
through a hash table. The token of a transition needs no room: it is the one before any place of its
target.
"""

from array import array
from collections.abc import Iterator, Sequence
from sys import getsizeof

MAX_LINKS = 64
SEPARATOR = -1
_FIRST_SIZE = 64


class SuffixIndex:
    """The automaton. State 0 is the empty string.

    Attributes:
        text: the tokens. Texts are kept apart by ``SEPARATOR``.
        last: the state of the whole text.
        length: of each state, the tokens of its longest string.
        link: of each state, its suffix link; -1 from the empty string.
        end: of each state, the latest place in the text behind its strings.
        count: of each state, the number of these places.
    """

    def __init__(self) -> None:
        self.text = array("i")
        self.last = 0
        self.length = array("i", [0])
        self.link = array("i", [-1])
        self.end = array("i", [0])
        self.count = array("i", [0])
        self._next = array("i", [0])
        self._more = array("i", [0])
        self._source = array("i", [0])  # transition 0 is none
        self._target = array("i", [0])
        self._sibling = array("i", [0])
        self._slots = array("i", [0]) * _FIRST_SIZE

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens."""
        for token in tokens:
            self._append(token)

    def step(self, state: int, token: int) -> int:
        """The state of the string with one more token; 0 if the text has no such string."""
        target = self._next[state]
        if not target or self.text[self.end[target] - 1] == token:
            return target
        return self._target[self._slots[self._slot(state, token)]] if self._more[state] else 0

    def children(self, state: int) -> Iterator[int]:
        """The states behind a state, one per token that ever followed it; the newest tokens first,
        but for the very first."""
        if self._next[state]:
            yield self._next[state]
        edge = self._more[state]
        while edge:
            yield self._target[edge]
            edge = self._sibling[edge]

    def only_child(self, state: int) -> int:
        """The state behind a state that was always followed by the same token; else 0."""
        return 0 if self._more[state] else self._next[state]

    def token(self, state: int) -> int:
        """The last token of a state's strings."""
        return self.text[self.end[state] - 1]

    def num_followed(self, state: int) -> int:
        """Places of a state that have a token behind them: all but the end of the text."""
        return self.count[state] - (self.end[state] == len(self.text))

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays, with what they hold in reserve."""
        return sum(getsizeof(value) for value in vars(self).values() if isinstance(value, array))

    def _append(self, token: int) -> None:
        self.text.append(token)
        end = len(self.text)
        new = self._state(end, 0, end, 1)
        state = self.last
        while state >= 0 and not (target := self.step(state, token)):
            self._connect(state, token, new)
            state = self.link[state]
        if state >= 0:
            if self.length[target] != self.length[state] + 1:
                target = self._split(state, token, target)
            self.link[new] = target
            self._count(target, end)
        self.last = new

    def _split(self, state: int, token: int, target: int) -> int:
        """Gives the shorter strings of a target, which have a new place, a state of their own."""
        length, link = self.length[state] + 1, self.link[target]
        clone = self._state(length, link, self.end[target], self.count[target])
        for child in reversed(list(self.children(target))):
            self._connect(clone, self.token(child), child)
        self.link[target] = clone
        while state >= 0 and self.step(state, token) == target:
            self._redirect(state, token, clone)
            state = self.link[state]
        return clone

    def _count(self, state: int, end: int) -> None:
        """Adds a place to a state and to all shorter suffixes."""
        link, ends, count = self.link, self.end, self.count
        for _ in range(MAX_LINKS):
            if state <= 0:
                return
            ends[state] = end
            count[state] += 1
            state = link[state]

    def _state(self, length: int, link: int, end: int, count: int) -> int:
        self.length.append(length)
        self.link.append(link)
        self.end.append(end)
        self.count.append(count)
        self._next.append(0)
        self._more.append(0)
        return len(self.length) - 1

    def _connect(self, state: int, token: int, target: int) -> None:
        if not self._next[state]:
            self._next[state] = target
            return
        self._source.append(state)
        self._target.append(target)
        self._sibling.append(self._more[state])
        self._more[state] = len(self._source) - 1
        if 3 * len(self._source) > 2 * len(self._slots):
            self._grow()
        else:
            self._slots[self._slot(state, token)] = self._more[state]

    def _redirect(self, state: int, token: int, target: int) -> None:
        if self.token(self._next[state]) == token:
            self._next[state] = target
        else:
            self._target[self._slots[self._slot(state, token)]] = target

    def _slot(self, state: int, token: int) -> int:
        """Where that transition is in the table, or would be."""
        slots, source, target = self._slots, self._source, self._target
        end, text = self.end, self.text
        mask = len(slots) - 1
        slot = hash((state, token)) & mask
        while (edge := slots[slot]) and not (
            source[edge] == state and text[end[target[edge]] - 1] == token
        ):
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        self._slots = array("i", [0]) * (2 * len(self._slots))
        for edge in range(1, len(self._source)):
            token = self.token(self._target[edge])
            self._slots[self._slot(self._source[edge], token)] = edge
