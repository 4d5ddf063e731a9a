"""The class of each token of an output, by the text that it stands for.

special       end of sequence and the like
space         spaces and tabs alone
newline       white space with a line break
digit         digits
word start    letters that begin a word
word rest     letters that continue one
punctuation   everything else that is printed
fragment      bytes that are no character by themselves
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

CLASSES = (
    "word start",
    "word rest",
    "digit",
    "punctuation",
    "space",
    "newline",
    "fragment",
    "special",
)
_MARKERS = ("Ġ", "▁")  # a space before the token, in byte-level and in sentencepiece vocabularies
_REPLACEMENT = "\ufffd"


class TokenClasses:
    """Classifies the tokens of a vocabulary.

    Args:
        tokenizer: the target's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._known: dict[int, tuple[str, bool]] = {}

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """The class of each token of an output, in order."""
        found = []
        in_word = False
        for token in token_ids:
            text, spaced = self._text(token)
            found.append(self._class(token, text, in_word and not spaced))
            in_word = text[-1:].isalnum() or text[-1:] == "_"
        return found

    def _class(self, token: int, text: str, continues: bool) -> str:
        bare = text.strip()
        if token in self._special:
            return "special"
        if _REPLACEMENT in text:
            return "fragment"
        if not bare:
            return "newline" if "\n" in text else "space"
        if bare.isdigit():
            return "digit"
        if bare[0].isalpha() or (bare[0] == "_" and len(bare) > 1):
            return "word rest" if continues else "word start"
        return "punctuation"

    def _text(self, token: int) -> tuple[str, bool]:
        """A token's text by itself, and whether a space comes before it."""
        if token not in self._known:
            tokenizer: Any = self._tokenizer
            form = str(tokenizer.convert_ids_to_tokens(token))
            text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
            self._known[token] = text, text[:1].isspace() or form.startswith(_MARKERS)
        return self._known[token]


def acceptance_by_class(
    classes: TokenClasses, outputs: Sequence[tuple[Sequence[int], str]]
) -> Mapping[str, Mapping[str, float]]:
    """Of the tokens of each class that were emitted at verified positions, the share that was
    drafted.

    A verified position is one where a drafted token was accepted or corrected. The class is that of
    the emitted token: of a rejected token nothing is recorded.

    Args:
        classes: of the target's vocabulary.
        outputs: token ids and origins (see ``RequestRecord``) of each output.
    """
    verified = dict.fromkeys(CLASSES, 0)
    accepted = dict.fromkeys(CLASSES, 0)
    for token_ids, origins in outputs:
        for kind, origin in zip(classes.of(token_ids), origins, strict=True):
            verified[kind] += origin in "ac"
            accepted[kind] += origin == "a"
    return {
        kind: {"verified": number, "accepted": accepted[kind], "rate": accepted[kind] / number}
        for kind, number in verified.items()
        if number
    }
