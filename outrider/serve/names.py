"""Tokens as text and bytes, for log-probabilities."""

from functools import lru_cache, partial

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_INCOMPLETE = "\ufffd"
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


class TokenNames:
    """What single tokens stand for. A tokenizer may write a token at the beginning of a text in
    another way than inside it, so a token is decoded after another one.

    Args:
        tokenizer: the target's; None names tokens by their numbers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._anchor: list[int] = []
        if tokenizer is not None:
            self._anchor = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
            self._before = str(tokenizer.decode(self._anchor))
        self.text = lru_cache(maxsize=1 << 16)(self._text)

    def bytes(self, token: int) -> list[int]:
        """The UTF-8 bytes of a token, which may end within a character."""
        text = self.text(token)
        if _INCOMPLETE not in text or self._tokenizer is None:
            return list(text.encode())
        written = str(self._tokenizer.convert_ids_to_tokens(token))
        if len(written) == 6 and written.startswith("<0x"):  # byte fallback: <0x0A>
            return [int(written[3:5], 16)]
        if all(character in _BYTE_OF for character in written):  # byte-level BPE
            return [_BYTE_OF[character] for character in written]
        return list(text.encode())

    def key(self, token: int) -> str:
        """A token's text, or its bytes, as OpenAI writes them, where it is no whole character."""
        text = self.text(token)
        if _INCOMPLETE not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token))

    def _text(self, token: int) -> str:
        if self._tokenizer is None:
            return str(token)
        decode = partial(self._tokenizer.decode, clean_up_tokenization_spaces=False)
        both = str(decode([*self._anchor, token]))
        if both.startswith(self._before):
            return both[len(self._before) :]
        return str(decode([token]))
