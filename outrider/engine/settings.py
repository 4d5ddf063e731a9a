"""An engine's settings besides its models; checked before any model is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.core.protocols import Verifier
from outrider.core.values import as_python, check_flag, is_finite, is_whole, shown
from outrider.drafters.chain.draft_length import DraftLength
from outrider.engine.admission import parse_bytes
from outrider.methods import Method, Recipe
from outrider.runtime.kv_cache.storage import KvDtype, MemoryBudget, check_kv_dtype

_VERIFIER = ("lossless", "accepts", "needs", "bound", "__call__")


MAX_SPECULATIVE_TOKENS = 64

AUTO: Final = "auto"
"""Stands for a choice that the engine makes by what it measures."""

AUTO_REPEATABLE: Final = "auto-repeatable"
"""The same for the draft lengths of batches whose outputs do not depend on them, or need not be
repeatable; a batch with a sampled row that has a seed has a fixed length."""

LengthPolicy = Literal["auto", "auto-repeatable"]

FIXED: Final = "fixed"
"""Stands for the draft length of the drafter, if it has one, else 5, as None does; for ``load``,
whose None lets a governor choose."""

_GOVERNED = AUTO, AUTO_REPEATABLE


@dataclass(frozen=True)
class Settings:
    """An engine's settings, each within its domain; attributes as the arguments of ``Engine``.

    Attributes:
        recipe: the method with its options, or the user's own verifier in place of the method's.
        governed: whether a governor chooses the draft lengths (``num_speculative_tokens="auto"``);
            ``num_speculative_tokens`` is then None.
        governs_seeds: whether it also chooses those of batches with a sampled row that has a seed.
        memory_budget: the bytes that ``max_memory`` allows; None without a bound.
        prefix_bytes: the bytes that ``prefix_cache`` allows; None without prefix reuse.
    """

    recipe: Recipe
    num_speculative_tokens: int | None
    governed: bool
    governs_seeds: bool
    draft_confidence: float
    draft_length: DraftLength
    max_batch_size: int
    memory_budget: MemoryBudget | None
    prefix_bytes: int | None
    kv_dtype: KvDtype
    measure: bool
    generation_config: bool

    @property
    def stops(self) -> bool:
        """Whether a rule of the user's ends drafts or sets their lengths."""
        return bool(self.draft_confidence) or self.draft_length != DraftLength()

    @classmethod
    def checked(
        cls,
        method: Method,
        *,
        num_speculative_tokens: int | str | None,
        draft_confidence: float,
        draft_length: str | Sequence[Sequence[int]] | DraftLength | None,
        max_batch_size: int,
        max_memory: int | str | None,
        prefix_cache: int | str | None,
        kv_dtype: KvDtype,
        options: Mapping[str, object] | None,
        verifier: Verifier | None,
        measure: bool,
        generation_config: bool,
    ) -> "Settings":
        """The settings from what the user gave.

        Raises:
            InvalidParameterError: a value of another type or outside its range, an option the
                method has not.
            IncompatibleError: a draft that could stop early, of a method whose drafts cannot; two
                policies that both choose the draft length.
        """
        recipe = method.recipe(options)
        word = _word(as_python(num_speculative_tokens))
        governed = word in _GOVERNED
        num_tokens: Any = None if word is not None else as_python(num_speculative_tokens)
        max_batch_size = as_python(max_batch_size)
        check_speculative_tokens(num_tokens)
        check_range("max_batch_size", max_batch_size, 65536)
        check_kv_dtype(kv_dtype)
        check_flag("measure", measure)
        check_flag("generation_config", generation_config)
        if verifier is not None:
            _check_verifier(verifier)
            recipe = replace(recipe, verifier=verifier, greedy_verifier=verifier)
        confidence = as_python(draft_confidence)
        if not is_finite(confidence):
            raise InvalidParameterError(
                f"draft_confidence={shown(confidence)}: must be a number in [0, 1]; 0 never stops "
                f"early"
            )
        length = DraftLength.of(draft_length)
        if length.and_confidence(confidence) and not method.stops_when_unsure:
            raise IncompatibleError(
                f"draft_confidence={confidence}, draft_length={str(draft_length)!r}: method "
                f"{method.name!r} drafts no chain that could stop when it is unsure; leave them at "
                f"0 and 'fixed'"
            )
        if governed and (length.start is not None or length.table is not None):
            raise IncompatibleError(
                f"num_speculative_tokens={word!r} and draft_length={str(draft_length)!r} both "
                f"choose the draft length: leave one out"
            )
        memory, prefixes = as_python(max_memory), as_python(prefix_cache)
        return cls(
            recipe,
            num_tokens,
            governed,
            word == AUTO,
            confidence,
            length,
            max_batch_size,
            None if memory is None else MemoryBudget(parse_bytes(memory)),
            None if prefixes is None else parse_bytes(prefixes, "prefix_cache"),
            kv_dtype,
            measure,
            generation_config,
        )


def _word(number: object) -> str | None:
    """The word in place of a number; None for a number. Raises InvalidParameterError for any other
    word."""
    if not isinstance(number, str):
        return None
    if number not in (*_GOVERNED, FIXED):
        raise InvalidParameterError(
            f"num_speculative_tokens={shown(number)}: must be a whole number from 1 to "
            f"{MAX_SPECULATIVE_TOKENS}, 'auto', 'auto-repeatable' or 'fixed'"
        )
    return number


def _check_verifier(verifier: object) -> None:
    missing = [name for name in _VERIFIER if not hasattr(verifier, name)]
    if isinstance(verifier, type) or missing:
        raise InvalidParameterError(
            f"verifier={shown(verifier)}: must be a verification rule with lossless, accepts, "
            f"needs, bound and a call, such as outrider.verifiers.Rejection()"
        )


def check_speculative_tokens(number: int | None, name: str = "num_speculative_tokens") -> None:
    """Raises InvalidParameterError unless the number, which the user knows by this name, is None or
    a valid γ."""
    if number is not None:
        check_range(name, number, MAX_SPECULATIVE_TOKENS)


def check_range(name: str, value: int, most: int) -> None:
    """Raises InvalidParameterError unless the value is a whole number from 1 to the most."""
    if not is_whole(value) or not 1 <= value <= most:
        raise InvalidParameterError(
            f"{name}={shown(value)}: must be a whole number from 1 to {most}"
        )
