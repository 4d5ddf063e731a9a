"""From tokens to text, piece by piece, without ever splitting a character."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_CONTEXT = 6
_LONGEST = 12  # tokens; a window that is longer begins anew with the next tokens
_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Decodes a growing output after a prompt.

    Some tokenizers decode a token differently at the beginning of a text, and a character may span
    several tokens. So each piece is the difference between decoding a short window with and without
    the new tokens, and text that ends in an incomplete character is held back. A window serves
    several pieces: its text with one of them is its text without the next.

    Args:
        tokenizer: the model's.
        prompt: the prompt's token ids; its last tokens are decoded, too, as context.
        special: whether special tokens are part of the text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], *, special: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._tokens = list(prompt[-_CONTEXT:])
        self._window = 0
        self._read = len(self._tokens)
        self._text: str | None = None  # of the window's tokens that are read; None if not decoded

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete, perhaps none."""
        self._tokens.extend(tokens)
        text, piece = self._difference()
        if not piece or text.endswith(_INCOMPLETE):
            return ""
        self._advance(text)
        return piece

    def flush(self) -> str:
        """What is still held back, incomplete characters replaced."""
        text, piece = self._difference()
        self._advance(text)
        return piece

    def _difference(self) -> tuple[str, str]:
        """The window's text, and what the unread tokens add to it or, where the tokens before end
        inside a character, complete."""
        if self._text is None:
            self._text = self._decode(self._read)
        before, after = self._text, self._decode(None)
        if not after.startswith(before):
            before = before.rstrip(_INCOMPLETE)
        return after, after[len(before) :]

    def _advance(self, text: str) -> None:
        """All tokens are read; the window has this text."""
        before, self._read = self._read, len(self._tokens)
        self._text = text
        if self._read - self._window > _LONGEST:
            self._window, self._text = before, None

    def _decode(self, end: int | None) -> str:
        text = self._tokenizer.decode(
            self._tokens[self._window : end],
            skip_special_tokens=not self._special,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)
        return text
