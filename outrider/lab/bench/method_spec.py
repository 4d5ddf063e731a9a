"""A method with its parameters, as users write it: ``mjsd:beams=8,threshold=0.1``.

The first colon ends the method's name; commas separate parameters. A part without ``=`` belongs to
the value before it, so that ``sequoia:topology=3,2,1,gamma=3`` has two parameters. Besides the
method's own options there are

    gamma             draft length of this method, instead of those of the plan
    draft             its draft model or head, instead of those of the plan
    draft_length      the policy of the draft length, such as survival:0.3
    draft_confidence  stops a draft after a token less probable than this
    label             the name in tables
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.core.errors import InvalidParameterError
from outrider.core.values import shown
from outrider.engine.settings import check_speculative_tokens
from outrider.methods import Method, find_method
from outrider.options import Option

OWN = {
    "gamma": Option("gamma", int, None),
    "draft": Option("draft", str, None),
    "draft_length": Option("draft_length", str, "fixed"),
    "draft_confidence": Option("draft_confidence", float, 0.0),
    "label": Option("label", str, ""),
}
"""The parameters that every method has here."""

_SYNONYMS = {"threshold": "tau", "num_speculative_tokens": "gamma"}
"""Names of the papers for options that are named otherwise here."""


@dataclass(frozen=True)
class MethodSpec:
    """A method with its parameters.

    Attributes:
        name: the method's name.
        options: its own options, by name; the others have their defaults.
        gamma: its draft length; None takes those of the plan.
        draft: its draft; None takes those of the plan.
        draft_length, draft_confidence: as the arguments of ``Engine``.
        label: the name in tables; empty for the text form.

    Raises:
        UnknownMethodError: there is no such method.
        InvalidParameterError: an option that it does not have, or a value outside its domain.
    """

    name: str
    options: Mapping[str, object] = field(default_factory=dict)
    gamma: int | None = None
    draft: str | None = None
    draft_length: str = "fixed"
    draft_confidence: float = 0.0
    label: str = ""

    def __post_init__(self) -> None:
        self.method.recipe(self.options)
        check_speculative_tokens(self.gamma, "gamma")

    @classmethod
    def parse(cls, text: str) -> MethodSpec:
        """Reads ``NAME`` or ``NAME:OPTION=VALUE,…``.

        Raises:
            InvalidParameterError, UnknownMethodError: see the class; or another form.
        """
        name, colon, rest = text.partition(":")
        method = find_method(name.strip())
        values: dict[str, object] = {}
        last = ""
        for part in rest.split(",") if colon else ():
            key, equals, value = part.partition("=")
            if equals:
                last = key.strip().replace("-", "_")
                values[last] = value.strip()
            elif last:
                values[last] = f"{values[last]},{part.strip()}"
            else:
                raise InvalidParameterError(
                    f"method {shown(text)}: write NAME:OPTION=VALUE,OPTION=VALUE, such as "
                    f"mentored:budget=0.2"
                )
        return cls.of(method.name, values)

    @classmethod
    def of(cls, name: str, values: Mapping[str, object]) -> MethodSpec:
        """A method with its own options and those of ``OWN`` in one mapping, as texts or values."""
        known = find_method(name).options
        given = {_name_of(key, known): value for key, value in values.items()}
        own = {key: OWN[key].parse(given[key]) for key in OWN if key in given and key not in known}
        options = {key: value for key, value in given.items() if key not in own}
        parsed = {
            key: known[key].parse(value) if key in known else value
            for key, value in options.items()
        }
        settings: dict[str, Any] = dict(own)
        return cls(name, parsed, **settings)

    @property
    def method(self) -> Method:
        """The row of ``outrider.methods``."""
        return find_method(self.name)

    @property
    def drafts(self) -> bool:
        """Whether it drafts, so that it has a draft length."""
        return self.name != "plain"

    def lossless_at(self, temperature: float) -> bool:
        """Whether the output has exactly the target's distribution at this temperature."""
        recipe = self.method.recipe(self.options)
        return (recipe.verifier if temperature else recipe.greedy_verifier).lossless

    def __str__(self) -> str:
        """The text form, which :meth:`parse` reads, without the label."""
        defaults = {key: option.default for key, option in OWN.items()}
        own = {key: getattr(self, key) for key in OWN if key != "label"}
        given = {key: value for key, value in own.items() if value != defaults[key]}
        pairs = ",".join(
            f"{key}={_text(value)}" for key, value in {**self.options, **given}.items()
        )
        return f"{self.name}:{pairs}" if pairs else self.name

    @property
    def title(self) -> str:
        """The label, or the text form."""
        return self.label or str(self)


def _name_of(key: str, known: Mapping[str, Option]) -> str:
    synonym = _SYNONYMS.get(key, key)
    return synonym if key not in known and (synonym in known or synonym in OWN) else key


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
