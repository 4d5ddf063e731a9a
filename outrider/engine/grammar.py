"""Compiles grammars with llguidance (https://github.com/guidance-ai/llguidance), and masks tokens.

The same object masks the draft's and the target's logits of a request, at any position of a draft,
in any order: it keeps one matcher, which it takes back to the common prefix of the position that it
was last at and the one that is asked for, and the masks of the last positions, since draft and
target ask for the same ones.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.engine.schema_place import schema_place
from outrider.sampling.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MASKS = 128
"""Positions whose masks are remembered."""

_tokenizers: WeakKeyDictionary[PreTrainedTokenizerBase, dict[Any, LLTokenizer]] = (
    WeakKeyDictionary()
)


class GrammarProcessor:
    """A logits processor that allows the tokens with which the output stays within a grammar.

    For a prefix that the grammar does not contain, which is never sampled, the scores stay as they
    are.

    Args:
        matcher: at the beginning of the output.
        first: tokens before the output.
    """

    def __init__(self, matcher: LLMatcher, first: int) -> None:
        self._matcher = matcher
        self._first = first
        self._read: list[int] = []
        self._masks: OrderedDict[tuple[int, ...], Tensor | None] = OrderedDict()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        allowed_V = self._allowed(tuple(input_ids[0, self._first :].tolist()))
        if allowed_V is None:
            return scores
        V = scores.shape[1]
        return scores.masked_fill(~allowed_V[:V].to(scores.device), -torch.inf)

    def forced(self, sequence_T: Tensor) -> list[int]:
        """The tokens of the only continuation of a sequence, prompt and output; empty where there
        is a choice, and where the output may end."""
        if not self._go_to(tuple(sequence_T[self._first :].tolist())):
            return []
        return list(self._matcher.compute_ff_tokens())

    def _allowed(self, output: tuple[int, ...]) -> Tensor | None:
        """Which tokens may follow, (V,); None if the grammar does not contain the output."""
        if output in self._masks:
            self._masks.move_to_end(output)
            return self._masks[output]
        self._masks[output] = mask = self._bits() if self._go_to(output) else None
        if len(self._masks) > _MASKS:
            self._masks.popitem(last=False)
        return mask

    def _go_to(self, output: tuple[int, ...]) -> bool:
        """Takes the matcher after an output; whether it got there."""
        common = 0
        for mine, theirs in zip(self._read, output, strict=False):
            if mine != theirs:
                break
            common += 1
        if common < len(self._read):
            self._matcher.rollback(len(self._read) - common)
        consumed = self._matcher.try_consume_tokens(list(output[common:]))
        self._read = list(output[: common + consumed])
        return len(self._read) == len(output)

    def _bits(self) -> Tensor:
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        if self._matcher.is_error():
            raise InvalidParameterError(f"grammar: {' '.join(self._matcher.get_error().split())}")
        return (packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).bool().flatten()


def compile_grammar(
    grammar: Grammar,
    tokenizer: PreTrainedTokenizerBase | None,
    num_tokens: int,
    eos_ids: Collection[int],
) -> LLMatcher:
    """A matcher at the beginning of an output.

    Args:
        grammar: the grammar.
        tokenizer: the target's.
        num_tokens: the target's vocabulary.
        eos_ids: its end-of-sequence tokens.

    Raises:
        IncompatibleError: llguidance is not installed, or the model has no tokenizer whose tokens
            are known as bytes, or no end-of-sequence token.
        InvalidParameterError: the grammar is wrong; the message says where.
    """
    llguidance = _library()
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise IncompatibleError(
            "grammars need a model with a fast tokenizer, whose tokens are known as bytes"
        )
    if not eos_ids:
        raise IncompatibleError(
            "grammars need a model with an end-of-sequence token, by which a complete output ends"
        )
    text = _notation(grammar)
    ll_tokenizer = _tokenizer(tokenizer, num_tokens, tuple(sorted(eos_ids)))
    if problem := llguidance.LLMatcher.validate_grammar(text, ll_tokenizer):
        raise _invalid(grammar, problem)
    matcher: LLMatcher = llguidance.LLMatcher(ll_tokenizer, text, log_level=0)
    return matcher


def check_grammar(grammar: Grammar) -> None:
    """Checks a grammar without a model.

    Raises:
        IncompatibleError: llguidance is not installed.
        InvalidParameterError: the grammar is wrong; the message says where.
    """
    if problem := _library().LLMatcher.validate_grammar(_notation(grammar)):
        raise _invalid(grammar, problem)


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise IncompatibleError(
            "grammars need llguidance: pip install 'outrider[grammar]'"
        ) from None
    return llguidance


def _notation(grammar: Grammar) -> str:
    """The grammar in llguidance's own notation."""
    try:
        return str(_library().grammar_from(grammar.kind, grammar.source))
    except ValueError as error:
        raise _invalid(grammar, str(error)) from None


def _invalid(grammar: Grammar, problem: str) -> InvalidParameterError:
    line = " ".join(problem.split())
    if grammar.kind == "json_schema":
        place = schema_place(grammar.source, problem, _schema_problem)
        line = f"at {place}: {line}" if place else line
    return InvalidParameterError(f"{grammar.kind}: {line}")


def _schema_problem(source: str) -> str:
    """What is wrong with a JSON schema; empty if nothing."""
    library = _library()
    try:
        notation = str(library.grammar_from("json_schema", source))
    except ValueError as error:
        return str(error)
    return str(library.LLMatcher.validate_grammar(notation))


def _tokenizer(
    tokenizer: PreTrainedTokenizerFast, num_tokens: int, eos_ids: tuple[int, ...]
) -> LLTokenizer:
    """llguidance's view of a tokenizer, which takes a second to make."""
    from llguidance.hf import from_tokenizer

    known = _tokenizers.setdefault(tokenizer, {})
    key = num_tokens, eos_ids
    if key not in known:
        known[key] = from_tokenizer(
            tokenizer, n_vocab=max(num_tokens, len(tokenizer)), eos_token=list(eos_ids)
        )
    return known[key]
