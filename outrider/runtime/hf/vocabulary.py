"""The bytes that each token of a vocabulary stands for, so that two vocabularies can be compared.

Tokenizers write the same text in many ways: a space as ``Ġ``, as ``▁`` or not at all, a byte as
``<0x0A>`` or as a letter of a 256-letter alphabet, the rest of a word as ``##ing``. So a token is
represented here by the bytes that it adds in the middle of a text, as its own tokenizer decodes it.
A special token adds none; it is identified by its name, and the end-of-sequence token by its role.
"""

import codecs
import re
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_END_OF_TEXT = "end of text"  # a role, whatever the token is called


class Vocabulary:
    """A tokenizer as a table of byte strings.

    Args:
        tokenizer: the model's tokenizer.
        num_tokens: width of the model's logits; ids that the tokenizer does not have are padding.

    Attributes:
        forms: the id of each token, by the tokenizer's own spelling.
        pieces: the bytes that each id adds within a text; empty for special tokens, padding, and
            parts of characters that only the tokenizer can join.
        ids: the id of each piece, and of each special token by its name. Where several ids have the
            same piece, one that is not a byte fallback.
        decoder_prompt: special tokens that the tokenizer puts before a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> None:
        self._tokenizer = tokenizer
        self.num_tokens = num_tokens
        forms = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        self.forms = {form: token for form, token in forms if token < num_tokens}
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {*tokenizer.all_special_ids, *(i for i, t in added.items() if t.special)}
        self.pieces = [b""] * num_tokens
        self.ids: dict[bytes | str, int] = {}
        spell = _speller(tokenizer)
        fallbacks: dict[bytes | str, int] = {}
        for form, token in self.forms.items():
            if token in self._special:
                self.ids[_END_OF_TEXT if token == tokenizer.eos_token_id else form] = token
                continue
            piece, is_fallback = (form.encode(), False) if token in added else spell(form)
            self.pieces[token] = piece
            if piece:
                (fallbacks if is_fallback else self.ids).setdefault(piece, token)
        self.ids = {**fallbacks, **self.ids}
        self.decoder_prompt = self._decoder_prompt()

    @property
    def beginning(self) -> int:
        """The token that stands for an empty text."""
        for token in (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        return 0

    def is_special(self, token: int) -> bool:
        return token in self._special

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        """The bytes that the tokens add within a text."""
        return b"".join(self.pieces[token] for token in tokens)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without the tokenizer's special tokens."""
        done = self._tokenizer(text, add_special_tokens=False, verbose=False)
        return [token for token in done["input_ids"] if token < self.num_tokens]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens that begin a text."""
        text = self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def encode_after(self, before: str, text: str) -> list[int] | None:
        """The tokens of a text after another one; None where a token straddles the border."""
        tokens, wanted = self.encode(before + text), text.encode()
        first, left = len(tokens), len(wanted)
        while first and left > 0:
            first -= 1
            left -= len(self.pieces[tokens[first]])
        return tokens[first:] if self.bytes_of(tokens[first:]) == wanted else None

    def spell(self, text: str, before: str = "\n") -> list[int]:
        """The tokens of a text within another one.

        They are those after ``before``; where a token would straddle the border, those after a
        line break; else (with a tokenizer that changes its text, say to lower case) those of the
        text alone.
        """
        for border in (before, "\n"):
            tokens = self.encode_after(border, text)
            if tokens is not None:
                return tokens
        return self.encode(text)

    def _decoder_prompt(self) -> list[int]:
        plain, full = self.encode("a"), self._tokenizer("a")["input_ids"]
        offsets = range(len(full) - len(plain) + 1)
        first = next((i for i in offsets if full[i : i + len(plain)] == plain), 0)
        return list(full[:first]) if plain else []


def complete(data: bytes) -> tuple[str, bytes]:
    """The text in these bytes, and the bytes of a last, incomplete character.

    Bytes that cannot be part of a character are left out.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    text = decoder.decode(data)
    return text, decoder.getstate()[0]


def _speller(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], tuple[bytes, bool]]:
    """A function from a token's form in the vocabulary to its bytes (empty if it has no text of its
    own) and whether it is a byte fallback."""
    join = tokenizer.convert_tokens_to_string
    byte_of = _byte_alphabet() if join(["a", "Ġa"]) == "a a" else None
    falls_back = join(["a", "<0x41>"]) == "aA"

    def spell(form: str) -> tuple[bytes, bool]:
        if byte_of is not None and all(letter in byte_of for letter in form):
            return bytes(byte_of[letter] for letter in form), False
        byte = _FALLBACK.fullmatch(form) if falls_back else None
        if byte is not None:
            return bytes([int(byte[1], 16)]), True
        text = join(["a", form])
        if not text.startswith("a") or "\ufffd" in text:
            return b"", False
        return text[1:].encode(), False

    return spell


def _byte_alphabet() -> dict[str, int]:
    """The bytes by the letters that byte-level vocabularies (GPT-2) write them with: printable
    bytes are written as themselves, the others as letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }
