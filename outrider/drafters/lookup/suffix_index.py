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
through a hash table.

Tokens can be taken back, the last one first: of each of the last ``MAX_FORGOTTEN`` is known what it
overwrote. What it added stands at the ends of the arrays, and transitions leave the table in the
opposite order of their coming, so that no other is lost behind them.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from sys import getsizeof

MAX_LINKS = 64
MAX_CHILDREN = 256
MAX_FORGOTTEN = 64
SEPARATOR = -1
_FIRST_SIZE = 64

_Overwritten = tuple[int, int, int, list[int]]
"""Of a token, what there was before it: the state of the whole text and the number of transitions;
the state that it split, or 0; and the latest places of the text's suffixes, from the longest on."""


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
        self._token = array("i", [0])
        self._target = array("i", [0])
        self._sibling = array("i", [0])
        self._slots = array("i", [0]) * _FIRST_SIZE
        self._log: deque[_Overwritten] = deque(maxlen=MAX_FORGOTTEN)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens."""
        for token in tokens:
            self._append(token)

    @property
    def num_forgettable(self) -> int:
        """Tokens that can be taken back."""
        return len(self._log)

    def forget(self, num: int) -> None:
        """Takes the last so many tokens back, ``num_forgettable`` at most."""
        for _ in range(num):
            self._take_back(*self._log.pop())

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
        for edge in self._edges(state):
            yield self._target[edge]

    def likeliest_child(self, state: int) -> int:
        """The state behind a state with the most places, of equals the latest; 0 if there is none.
        Of more than ``MAX_CHILDREN`` the newest are considered, and the first."""
        best, edge = self._next[state], self._more[state]
        if not edge:
            return best
        count, end, targets, siblings = self.count, self.end, self._target, self._sibling
        most, majority = count[best], self.num_followed(state) // 2
        for _ in range(MAX_CHILDREN - 1):
            if most > majority:
                break
            child = targets[edge]
            places = count[child]
            if places > most or (places == most and end[child] > end[best]):
                best, most = child, places
            edge = siblings[edge]
            if not edge:
                break
        return best

    def likeliest_children(self, state: int, num: int) -> list[int]:
        """The same for so many states, the likeliest first."""
        first, edge = self._next[state], self._more[state]
        if not edge:
            return [first] if first else []
        count, end, targets, siblings = self.count, self.end, self._target, self._sibling
        found = [(count[first], end[first], first)]
        while edge and len(found) < MAX_CHILDREN:
            child = targets[edge]
            found.append((count[child], end[child], child))
            edge = siblings[edge]
        found.sort(reverse=True)
        return [child for _, _, child in found[:num]]

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
        text, link, end, first = self.text, self.link, self.end, self._next
        text.append(token)
        place, before, num_edges = len(text), self.last, len(self._source)
        new = self._state(place, 0, place, 1)
        state, split, ends = before, 0, []
        while state >= 0:
            target = first[state]
            if not target:
                first[state] = new
            elif text[end[target] - 1] == token:
                break
            else:
                slot = self._slot(state, token)
                if edge := self._slots[slot]:
                    target = self._target[edge]
                    break
                self._connect(state, token, new, slot)
            state = link[state]
        if state >= 0:
            if self.length[target] != self.length[state] + 1:
                split = target
                target = self._split(state, token, target)
            link[new] = target
            ends = self._count(target, place)
        self.last = new
        self._log.append((before, num_edges, split, ends))

    def _take_back(self, before: int, num_edges: int, split: int, ends: Sequence[int]) -> None:
        """Undoes the last ``_append``."""
        token, new = self.text[-1], self.last
        state = self.link[new]
        for end in ends:
            self.end[state] = end
            self.count[state] -= 1
            state = self.link[state]
        state = before
        while state >= 0 and self.step(state, token) == new:
            if self._next[state] == new:
                self._next[state] = 0
            state = self.link[state]
        if split:
            clone = new + 1
            self._redirect(state, token, clone, split)
            self.link[split] = self.link[clone]
        for edge in range(len(self._source) - 1, num_edges - 1, -1):
            state = self._source[edge]
            self._slots[self._slot(state, self._token[edge])] = 0
            self._more[state] = self._sibling[edge]
        for column in (self._source, self._token, self._target, self._sibling):
            del column[num_edges:]
        for column in (self.length, self.link, self.end, self.count, self._next, self._more):
            del column[new:]
        del self.text[-1]
        self.last = before

    def _split(self, state: int, token: int, target: int) -> int:
        """Gives the shorter strings of a target, which have a new place, a state of their own."""
        length, link = self.length[state] + 1, self.link[target]
        clone = self._state(length, link, self.end[target], self.count[target])
        self._next[clone] = self._next[target]
        for edge in reversed(list(self._edges(target))):
            x = self._token[edge]
            self._connect(clone, x, self._target[edge], self._slot(clone, x))
        self.link[target] = clone
        self._redirect(state, token, target, clone)
        return clone

    def _redirect(self, state: int, token: int, target: int, other: int) -> None:
        """Leads a state and its suffixes to another target, as far as they led to this one."""
        while state >= 0 and self.step(state, token) == target:
            if self._next[state] == target:
                self._next[state] = other
            else:
                self._target[self._slots[self._slot(state, token)]] = other
            state = self.link[state]

    def _count(self, state: int, place: int) -> list[int]:
        """Adds a place to a state and to all shorter suffixes; their latest places before."""
        link, end, count = self.link, self.end, self.count
        ends: list[int] = []
        while state > 0 and len(ends) < MAX_LINKS:
            ends.append(end[state])
            end[state] = place
            count[state] += 1
            state = link[state]
        return ends

    def _state(self, length: int, link: int, end: int, count: int) -> int:
        self.length.append(length)
        self.link.append(link)
        self.end.append(end)
        self.count.append(count)
        self._next.append(0)
        self._more.append(0)
        return len(self.length) - 1

    def _edges(self, state: int) -> Iterator[int]:
        """The transitions of a state but the first, newest first."""
        edge = self._more[state]
        while edge:
            yield edge
            edge = self._sibling[edge]

    def _connect(self, state: int, token: int, target: int, slot: int) -> None:
        """Adds a transition to those behind the first; ``slot`` is where the table has it."""
        edge = len(self._source)
        self._source.append(state)
        self._token.append(token)
        self._target.append(target)
        self._sibling.append(self._more[state])
        self._more[state] = edge
        if 3 * edge + 3 > 2 * len(self._slots):
            self._grow()
        else:
            self._slots[slot] = edge

    def _slot(self, state: int, token: int) -> int:
        """Where that transition is in the table, or would be."""
        slots, source, tokens = self._slots, self._source, self._token
        mask = len(slots) - 1
        slot = hash((state, token)) & mask
        while (edge := slots[slot]) and (source[edge] != state or tokens[edge] != token):
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        self._slots = array("i", [0]) * (2 * len(self._slots))
        for edge in range(1, len(self._source)):
            self._slots[self._slot(self._source[edge], self._token[edge])] = edge
