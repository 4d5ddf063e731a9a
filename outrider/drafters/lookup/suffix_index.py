"""A suffix automaton of a growing token sequence: all of its substrings and how often each occurs.

Blumer et al., "The smallest automaton recognizing the subwords of a text", Theoretical Computer
Science 40, 1985; the online construction, amortised O(1) per token. A state stands for a class of
substrings that end at the same positions; its suffix link leads to the class of the longest shorter
suffix that also ends elsewhere. So the suffix link of the state of the whole sequence is the
longest suffix that occurred before: the longest match of any length, without a search.

Each state counts its occurrences. A new token adds an occurrence to each of its suffixes, one step
per suffix link; if a repetitive sequence has more than ``MAX_LINKS``, the shortest suffixes are not
counted.

States and transitions are rows of arrays of 32-bit integers. Most states have one transition, which
is stored with the state (``next``). Further transitions form a linked list (``more``, ``sibling``)
and are found through a hash table.

The last ``MAX_FORGOTTEN`` tokens can be undone, the newest first: a log holds what each of them
overwrote. The rows that a token added are at the ends of the arrays, and its transitions leave the
hash table in the reverse order of insertion, so that no probe sequence is broken.
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
"""What a token replaced: the state of the whole sequence and the number of transitions before it;
the state that it split, or 0; the latest positions of the suffixes, from the longest on."""


class SuffixIndex:
    """The automaton. State 0 is the empty string.

    Attributes:
        tokens: the sequence; ``SEPARATOR`` stands between joined sequences.
        last: the state of the whole sequence.
        length: of each state, the length of its longest string in tokens.
        link: of each state, its suffix link; -1 from the empty string.
        end: of each state, the latest position after one of its occurrences.
        count: of each state, the number of its occurrences.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
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
        """How many of the last tokens can be undone."""
        return len(self._log)

    def forget(self, num: int) -> None:
        """Undoes the last ``num`` tokens, ``num_forgettable`` at most."""
        for _ in range(num):
            self._take_back(*self._log.pop())

    def step(self, state: int, token: int) -> int:
        """The state of the string with one more token; 0 if it does not occur."""
        target = self._next[state]
        if not target or self.tokens[self.end[target] - 1] == token:
            return target
        return self._target[self._slots[self._slot(state, token)]] if self._more[state] else 0

    def children(self, state: int) -> Iterator[int]:
        """The successors of a state, one per token that ever followed it: the first one, then the
        others from the newest on."""
        if self._next[state]:
            yield self._next[state]
        for edge in self._edges(state):
            yield self._target[edge]

    def likeliest_child(self, state: int) -> int:
        """The successor of a state with the most occurrences, the latest of equals; 0 if it has no
        successor. Of more than ``MAX_CHILDREN`` only the first and the newest are considered."""
        best, edge = self._next[state], self._more[state]
        if not edge:
            return best
        count, end, targets, siblings = self.count, self.end, self._target, self._sibling
        most, majority = count[best], self.num_followed(state) // 2
        for _ in range(MAX_CHILDREN - 1):
            if most > majority:
                break
            child = targets[edge]
            occurrences = count[child]
            if occurrences > most or (occurrences == most and end[child] > end[best]):
                best, most = child, occurrences
            edge = siblings[edge]
            if not edge:
                break
        return best

    def likeliest_children(self, state: int, num: int) -> list[int]:
        """The ``num`` successors with the most occurrences, in order; see ``likeliest_child``."""
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
        return self.tokens[self.end[state] - 1]

    def num_followed(self, state: int) -> int:
        """Occurrences of a state that a token follows: all but one at the end of the sequence."""
        return self.count[state] - (self.end[state] == len(self.tokens))

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays in bytes, spare capacity included."""
        return sum(getsizeof(value) for value in vars(self).values() if isinstance(value, array))

    def _append(self, token: int) -> None:
        tokens, link, end, first = self.tokens, self.link, self.end, self._next
        tokens.append(token)
        position, before, num_edges = len(tokens), self.last, len(self._source)
        new = self._state(position, 0, position, 1)
        state, split, ends = before, 0, []
        while state >= 0:
            target = first[state]
            if not target:
                first[state] = new
            elif tokens[end[target] - 1] == token:
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
            ends = self._count(target, position)
        self.last = new
        self._log.append((before, num_edges, split, ends))

    def _take_back(self, before: int, num_edges: int, split: int, ends: Sequence[int]) -> None:
        """Undoes the last ``_append``."""
        token, new = self.tokens[-1], self.last
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
        del self.tokens[-1]
        self.last = before

    def _split(self, state: int, token: int, target: int) -> int:
        """Moves the shorter strings of a target, which have a new occurrence, to a new state."""
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
        """Redirects the transitions of a state and its suffixes from ``target`` to ``other``."""
        while state >= 0 and self.step(state, token) == target:
            if self._next[state] == target:
                self._next[state] = other
            else:
                self._target[self._slots[self._slot(state, token)]] = other
            state = self.link[state]

    def _count(self, state: int, position: int) -> list[int]:
        """Adds an occurrence to a state and all shorter suffixes; returns their latest positions
        before."""
        link, end, count = self.link, self.end, self.count
        ends: list[int] = []
        while state > 0 and len(ends) < MAX_LINKS:
            ends.append(end[state])
            end[state] = position
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
        """All transitions of a state but the first, from the newest on."""
        edge = self._more[state]
        while edge:
            yield edge
            edge = self._sibling[edge]

    def _connect(self, state: int, token: int, target: int, slot: int) -> None:
        """Adds a transition after the first one; ``slot`` is its index in the hash table."""
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
        """The slot of that transition in the hash table, whether it is there or not."""
        slots, source, labels = self._slots, self._source, self._token
        mask = len(slots) - 1
        slot = hash((state, token)) & mask
        while (edge := slots[slot]) and (source[edge] != state or labels[edge] != token):
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        self._slots = array("i", [0]) * (2 * len(self._slots))
        for edge in range(1, len(self._source)):
            self._slots[self._slot(self._source[edge], self._token[edge])] = edge
