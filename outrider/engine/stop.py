"""Where an output ends: end-of-sequence, stop token, stop string, length or a full context.

Applied after acceptance, token by token, so that a round that runs past the end is cut exactly.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from outrider.engine.detokenize import Detokenizer
from outrider.engine.special_stops import SpecialStops, overlap
from outrider.sampling import Sampling


@dataclass
class Ending:
    """Follows one output and decides where it ends.

    Attributes:
        sampling: the sampling parameters.
        eos_ids: end-of-sequence tokens of the model.
        room: tokens the context still has room for.
        detokenizer: turns tokens into text; None when there is no tokenizer.
        special: the stop strings that have special tokens in them; None if there are none.
        reason: ``eos``, ``stop``, ``length``, ``context``, or None while it goes on.
    """

    sampling: Sampling
    eos_ids: Collection[int]
    room: int
    detokenizer: Detokenizer | None
    special: SpecialStops | None = None
    reason: str | None = None
    _text: str = field(default="", repr=False)
    _unread: list[int] = field(default_factory=list, repr=False)
    _shown: int = field(default=0, repr=False)
    _emitted: int = field(default=0, repr=False)

    @property
    def left(self) -> int:
        """Tokens that may still be emitted."""
        return min(self.sampling.max_new_tokens - self._emitted, self.room)

    @property
    def token_ids(self) -> frozenset[int]:
        """The tokens that end the output."""
        stop_ids = self.sampling.stop_token_ids
        return stop_ids if self.sampling.ignore_eos else stop_ids.union(self.eos_ids)

    @property
    def text(self) -> str:
        """All text so far, cut before a stop string; decoded on request."""
        if self._unread and self.detokenizer is not None:
            self._text += self.detokenizer.push(self._unread)
            self._unread = []
            if self.reason is not None:
                self._text += self.detokenizer.flush()
        return self._text

    def take(self, tokens: list[int]) -> int:
        """Takes a round's tokens; returns how many are kept, up to and including the one that ends
        the output."""
        if not self.sampling.stop_strings:
            kept, self.reason = self._scan(tokens)
            self._unread += tokens[:kept]
            return kept
        kept = 0
        while kept < len(tokens) and self.reason is None:
            _, self.reason = self._scan(tokens[kept : kept + 1])
            self._search(tokens[kept])
            kept += 1
        return kept

    def shown(self) -> str:
        """The text that is certain and was not shown before.

        What might be the beginning of a stop string is held back until it is decided.
        """
        text = self.text
        end = len(text)
        if self.reason is None:
            end -= max((overlap(text, s) for s in self.sampling.stop_strings), default=0)
            end = end if self.special is None else min(end, self.special.certain)
        end = max(end, self._shown)
        delta = text[self._shown : end]
        self._shown = end
        return delta

    def _scan(self, tokens: list[int]) -> tuple[int, str | None]:
        """How many tokens are kept up to and including the first one that ends the output, and
        why it does."""
        stop_ids = self.sampling.stop_token_ids
        for kept, token in enumerate(tokens, 1):
            self._emitted += 1
            self.room -= 1
            if token in self.eos_ids and not self.sampling.ignore_eos:
                return kept, "eos"
            if token in stop_ids:
                return kept, "stop"
            if self._emitted == self.sampling.max_new_tokens:
                return kept, "length"
            if self.room == 0:
                return kept, "context"
        return len(tokens), None

    def _search(self, token: int) -> None:
        """Appends one token's text and cuts it before the first stop string in it."""
        if self.detokenizer is None:
            return
        longest = max(len(s) for s in self.sampling.stop_strings)
        first = max(0, len(self._text) - longest + 1)
        self._text += self.detokenizer.push([token])
        if self.reason is not None:
            self._text += self.detokenizer.flush()
        found = [at for s in self.sampling.stop_strings if (at := self._text.find(s, first)) >= 0]
        if self.special is not None:
            found += self.special.push(token, len(self._text), over=self.reason is not None)
        if found:
            self._text = self._text[: min(found)]
            self.reason = "stop"
