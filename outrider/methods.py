"""The named methods: the one place where a command-line string meets a class."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import IncompatibleError, UnknownMethodError
from outrider.core.protocols import Drafter, Verifier
from outrider.core.round import check_compatible
from outrider.drafters import ModelDrafter, NoDraft
from outrider.models import HFModel
from outrider.verifiers import Block, Greedy, Rejection


@dataclass(frozen=True)
class Parts:
    """What a method may be built from."""

    target: HFModel
    draft: HFModel | None = None
    draft_confidence: float = 0.0


@dataclass(frozen=True)
class Method:
    """A drafter and a verification rule under a name.

    Attributes:
        name: what users type.
        summary: one line for them.
        paper: where it was published.
        lossless: whether the output has exactly the target's law.
        needs: what it needs besides a target.
        greedy_only: whether it is defined at temperature 0 alone.
        drafter: builds the drafter.
        verifier: the rule.
        greedy_verifier: the rule when every row of the batch is at temperature 0.
    """

    name: str
    summary: str
    paper: str
    lossless: bool
    needs: str
    drafter: Callable[[Parts], Drafter[Any]]
    verifier: Verifier
    greedy_verifier: Verifier
    greedy_only: bool = False

    def build(self, parts: Parts) -> Drafter[Any]:
        """The drafter, checked against the rules.

        Raises:
            IncompatibleError: no draft model where one is needed, or a rule that cannot judge it.
        """
        if self.needs == "draft model" and parts.draft is None:
            raise IncompatibleError(
                f"method {self.name!r} needs a draft model: pass draft=..., or take method='plain'"
            )
        drafter = self.drafter(parts)
        check_compatible(drafter, self.verifier)
        return drafter


def _model_drafter(parts: Parts) -> ModelDrafter:
    assert parts.draft is not None
    return ModelDrafter(parts.draft, parts.target.num_tokens, parts.draft_confidence)


_LEVIATHAN = "Leviathan et al., ICML 2023; Chen et al., 2023"

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "plain",
            "The target alone, one token per pass.",
            "autoregressive sampling",
            True,
            "nothing",
            lambda parts: NoDraft(),
            Rejection(),
            Greedy(),
        ),
        Method(
            "speculative",
            "A draft model's chain, judged by rejection sampling.",
            _LEVIATHAN,
            True,
            "draft model",
            _model_drafter,
            Rejection(),
            Greedy(),
        ),
        Method(
            "block",
            "A draft model's chain, judged as a whole; no rule keeps more of it on average.",
            "Sun et al., ICLR 2025",
            True,
            "draft model",
            _model_drafter,
            Block(),
            Greedy(),
        ),
        Method(
            "greedy",
            "A draft model's chain, kept while it is the target's argmax; temperature 0 only.",
            _LEVIATHAN,
            True,
            "draft model",
            _model_drafter,
            Greedy(),
            Greedy(),
            greedy_only=True,
        ),
    )
}


def find_method(name: str) -> Method:
    """The method of that name.

    Raises:
        UnknownMethodError: naming the nearest one.
    """
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.3)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownMethodError(f"unknown method {name!r}: {hint}known: {', '.join(METHODS)}")
