"""Splits an output's text into the pieces of its tokens, each with the token's origin."""

from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from outrider.engine.detokenize import Detokenizer
from outrider.engine.request import Event, Origin


class TokenTexts:
    """Splits the text of events, in their order.

    An event's text covers a whole round, and the engine holds text back while a stop string or a
    character is incomplete. So each token is decoded by itself, and the decoded pieces are consumed
    by length as text arrives.

    Args:
        tokenizer: the target's.
        prompt_ids: the tokens that the output continues.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._waiting: list[tuple[str, Origin]] = []

    def split(self, event: Event) -> Iterator[tuple[str, Origin]]:
        """Yields the event's text piece by piece, each with its origin. The pieces concatenate to
        the text; one may be only a part of what its token stands for."""
        for token, origin in zip(event.token_ids, event.origins, strict=True):
            self._waiting.append((self._detokenizer.push([token]), origin))
        text = event.text
        while text and self._waiting:
            piece, source = self._waiting.pop(0)
            if len(piece) > len(text):
                self._waiting.insert(0, (piece[len(text) :], source))
            if piece:
                yield text[: len(piece)], source
            text = text[len(piece) :]
        if text:  # the replacement character for a character that stayed incomplete
            yield text, event.origins[-1] if event.origins else "plain"
