"""Stop strings with special tokens in them, such as ``<|im_end|>``, which the text does not show.

They are searched for in a second text, decoded with special tokens. Positions in it are mapped to
positions in the text that is shown.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from outrider.engine.detokenize import Detokenizer


class SpecialStops:
    """Follows one output and finds the stop strings in it.

    Args:
        stops: the strings.
        detokenizer: turns tokens into text, special ones too.
    """

    def __init__(self, stops: Sequence[str], detokenizer: Detokenizer) -> None:
        self._stops = stops
        self._longest = max(map(len, stops))
        self._detokenizer = detokenizer
        self._text = ""
        self._lengths = [0]
        self._shown = [0]

    @classmethod
    def among(
        cls, stops: Sequence[str], tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]
    ) -> SpecialStops | None:
        """For those of the strings that have a special token of the tokenizer in them, if any."""
        added = tokenizer.added_tokens_decoder.values()
        names = {token.content for token in added if token.special} | {
            *tokenizer.all_special_tokens
        }
        found = [stop for stop in stops if any(name in stop for name in names)]
        if not found:
            return None
        return cls(found, Detokenizer(tokenizer, prompt, special=True))

    def push(self, token: int, num_shown: int, *, over: bool) -> list[int]:
        """Reads the next token; returns where in the shown text the strings that it completes
        begin.

        Args:
            token: the token.
            num_shown: characters of the shown text with it.
            over: whether it is the last one.
        """
        first = max(0, len(self._text) - self._longest + 1)
        self._text += self._detokenizer.push([token])
        if over:
            self._text += self._detokenizer.flush()
        self._lengths.append(len(self._text))
        self._shown.append(num_shown)
        positions = (self._text.find(stop, first) for stop in self._stops)
        return [self._in_shown(position) for position in positions if position >= 0]

    @property
    def certain(self) -> int:
        """Characters of the shown text that no stop string can take back."""
        longest = max(overlap(self._text, stop) for stop in self._stops)
        return self._in_shown(len(self._text) - longest)

    def _in_shown(self, position: int) -> int:
        """The position in the shown text that corresponds to one in the text with special
        tokens."""
        last = bisect_right(self._lengths, position) - 1
        shown = self._shown[last] + position - self._lengths[last]
        return min([shown, *self._shown[last + 1 : last + 2]])


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a proper beginning of the stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
