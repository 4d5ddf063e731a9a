"""The sampling parameters of a request."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from outrider.core.errors import InvalidParameterError
from outrider.core.values import (
    as_python,
    check_choice,
    check_flag,
    is_finite,
    is_id,
    is_whole,
    shown,
)
from outrider.sampling.grammar import Grammar

Processor = Callable[[Tensor, Tensor], Tensor]
"""``transformers`` convention: (input_ids (1, T), scores (1, V)) -> scores (1, V).

The returned scores must be a function of the arguments, because processors are also called for
drafted positions: in any order, repeatedly, and for tokens that are never emitted. A processor may
change ``scores`` in place and may keep caches. A processor whose results depend on its earlier
calls needs ``Sampling(stateless=False)``.
"""

DEFAULTS: Mapping[str, float] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""The values of these parameters if neither the request nor a generation config sets them."""

_SCALARS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_new_tokens",
    "ignore_eos",
    "logprobs",
)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request, applied identically to draft and target.

    Numbers may be numpy scalars. None for a collection means an empty one.

    Order of application: logit bias, repetition, presence and frequency penalties, user
    processors, forced tokens, temperature, top-k, top-p, min-p (the order of ``transformers``).

    A parameter that is None takes the value of the target's generation config. If that has none, or
    is ignored (``generation_config=False``), Outrider's own default applies. A value given here
    overrides the generation config. ``engine.settled(sampling)`` returns the resulting parameters.

    Attributes:
        temperature: 0 takes the argmax; otherwise logits are divided by the temperature. Default 1.
        top_k: keep the k most probable tokens, including ties; 0, the default, turns it off.
        top_p: keep the smallest set of most probable tokens with at least this mass, relative to
            the mass that top-k leaves; 1, the default, turns it off.
        min_p: keep tokens at least this fraction as probable as the most probable one; 0, the
            default, turns it off.
        repetition_penalty: divides positive and multiplies negative logits of every token in
            prompt and output (Keskar et al., CTRL, 2019); 1, the default, turns it off.
        presence_penalty: subtracted from the logits of tokens that occur in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        logit_bias: token id -> number added to its logit.
        seed: seed of the request's random numbers; None draws one for each request, whose output
            is then not repeatable, so that an engine may choose draft lengths by the clock
            (``num_speculative_tokens="auto-repeatable"``).
        max_new_tokens: maximum number of tokens to emit.
        stop: strings and token ids that end the output. A stop string is removed from the output, a
            stop token id is kept.
        ignore_eos: continue past the end-of-sequence token.
        logprobs: report the log-probability of each emitted token and the n most probable tokens at
            its position (the whole vocabulary if n exceeds it); 0 reports the emitted tokens only,
            None nothing. They are the target's own, before any parameter above is applied.
        processors: additional logits processors, such as a ``transformers.LogitsProcessorList``;
            :data:`Processor` states their contract. They are called only for prefixes that plain
            decoding could produce: without an end token, within the maximum length, and without a
            token that they themselves forbid, unless it is forced.
        stateless: whether the processors' results depend on their arguments alone. With None this
            is checked by a few calls before anything is drafted; True asserts it. With False the
            processors are called exactly as in plain decoding, once per emitted token and in order,
            and the request runs without drafts.
        forced: position in the output, starting at 0 -> token that is emitted there whatever the
            models predict (such as the language token of an encoder-decoder).
        grammar: the strings that the output may be; see ``sampling/grammar.py``.
        top_p_convention: ``hf`` drops a token if the mass ranked before it is at least ``top_p``;
            ``paper`` (Holtzman et al., ICLR 2020) only if that mass exceeds ``top_p``.

    Raises:
        InvalidParameterError: a value lies outside its domain.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = 0
    max_new_tokens: int = 128
    stop: str | int | Sequence[str | int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    processors: Sequence[Processor] = ()
    stateless: bool | None = None
    forced: Mapping[int, int] = field(default_factory=dict)
    grammar: Grammar | None = None
    top_p_convention: Literal["hf", "paper"] = "hf"

    def __post_init__(self) -> None:
        for name in _SCALARS:
            object.__setattr__(self, name, as_python(getattr(self, name)))
        for name in ("logit_bias", "forced"):
            object.__setattr__(self, name, _mapping(name, getattr(self, name)))
        for name in ("stop", "processors"):
            object.__setattr__(self, name, _listed(name, getattr(self, name)))
        _require(
            self.temperature is None
            or (
                is_finite(self.temperature) and (self.temperature == 0 or self.temperature >= 1e-6)
            ),
            "temperature",
            self.temperature,
            "must be 0 (greedy) or at least 1e-6",
        )
        _require(
            self.top_k is None or (is_whole(self.top_k) and self.top_k >= 0),
            "top_k",
            self.top_k,
            "must be a whole number, 0 (off) or greater",
        )
        _require(
            self.top_p is None or (is_finite(self.top_p) and 0 < self.top_p <= 1),
            "top_p",
            self.top_p,
            "must be in (0, 1]; 1 is off",
        )
        _require(
            self.min_p is None or (is_finite(self.min_p) and 0 <= self.min_p <= 1),
            "min_p",
            self.min_p,
            "must be in [0, 1]; 0 is off",
        )
        _require(
            self.repetition_penalty is None
            or (is_finite(self.repetition_penalty) and self.repetition_penalty > 0),
            "repetition_penalty",
            self.repetition_penalty,
            "must be above 0; 1 is off",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require(is_finite(getattr(self, name)), name, getattr(self, name), "must be finite")
        for token, bias in self.logit_bias.items():
            _require(
                is_id(token) and _is_bias(bias),
                "logit_bias",
                {token: bias},
                "must map token ids to finite numbers or -inf",
            )
        for position, token in self.forced.items():
            _require(
                is_id(position) and is_id(token),
                "forced",
                {position: token},
                "must map positions, starting at 0, to token ids",
            )
        _require(
            self.seed is None or is_whole(self.seed),
            "seed",
            self.seed,
            "must be a whole number, or None",
        )
        _require(
            is_whole(self.max_new_tokens) and self.max_new_tokens >= 1,
            "max_new_tokens",
            self.max_new_tokens,
            "must be a whole number, 1 or greater",
        )
        for item in _items(self.stop):
            _require(
                (isinstance(item, str) and item != "") or is_id(item),
                "stop",
                item,
                "must be non-empty strings or token ids",
            )
        _require(
            self.logprobs is None or (is_whole(self.logprobs) and self.logprobs >= 0),
            "logprobs",
            self.logprobs,
            "must be None or a whole number, 0 or greater",
        )
        for processor in self.processors:
            _require(callable(processor), "processors", processor, "must be callable")
        check_flag("ignore_eos", self.ignore_eos)
        _require(
            self.grammar is None or isinstance(self.grammar, Grammar),
            "grammar",
            self.grammar,
            "must be outrider.Grammar, such as Grammar.json_object()",
        )
        _require(
            self.grammar is None or not (self.ignore_eos or self.forced),
            "grammar",
            self.grammar,
            "decides where the output ends: leave out ignore_eos and forced",
        )
        check_choice("top_p_convention", self.top_p_convention, ("hf", "paper"))
        if self.stateless is not None:
            check_flag("stateless", self.stateless)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def with_defaults(self, defaults: Mapping[str, float] | None = None) -> "Sampling":
        """A copy in which every parameter that is None and has a default takes that default.

        Args:
            defaults: defaults by name that override Outrider's own.
        """
        known = {**DEFAULTS, **(defaults or {})}
        unset = {name: value for name, value in known.items() if getattr(self, name) is None}
        return replace(self, **unset) if unset else self  # type: ignore[arg-type]

    @cached_property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(item for item in _items(self.stop) if isinstance(item, str))

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        return frozenset(item for item in _items(self.stop) if isinstance(item, int))

    @property
    def in_order(self) -> bool:
        """Whether processors must be called once per emitted token, in order."""
        return self.stateless is False and len(self.processors) > 0

    @property
    def penalises(self) -> bool:
        """Whether the distribution depends on which tokens came before."""
        return (
            self.repetition_penalty not in (None, 1)
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


def _items(stop: str | int | Sequence[str | int]) -> Sequence[str | int]:
    return (stop,) if isinstance(stop, str | int) else stop


def _mapping(name: str, value: object) -> dict[Any, Any]:
    """A mapping from a mapping, from pairs, or from None (empty)."""
    try:
        pairs = dict(() if value is None else value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise InvalidParameterError(
            f"{name}={shown(value)}: must be a mapping, such as {{42: 1}}"
        ) from None
    return {as_python(key): as_python(number) for key, number in pairs.items()}


def _listed(name: str, value: object) -> tuple[Any, ...]:
    """A tuple from a collection, from a single stop string or token id, or from None (empty)."""
    value = as_python(value)
    if value is None:
        return ()
    if name == "stop" and isinstance(value, str | int):
        return (value,)
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidParameterError(f"{name}={shown(value)}: must be a list")
    return tuple(as_python(item) for item in value)


def _is_bias(value: object) -> bool:
    return is_finite(value) or (isinstance(value, float) and value == -math.inf)


def _require(ok: bool, name: str, value: object, remedy: str) -> None:
    if not ok:
        raise InvalidParameterError(f"{name}={shown(value)}: {remedy}")
