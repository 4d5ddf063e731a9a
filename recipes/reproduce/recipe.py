"""A recipe, what it finds, and the verdict that follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

from recipes.reproduce.effect import Effect

if TYPE_CHECKING:
    from recipes.reproduce.lab import Lab

Verdict = Literal["reproduced in shape", "not reproduced", "not testable here"]


class NotTestableError(Exception):
    """What a recipe needs is missing; the message says what."""


class MissingDraftError(NotTestableError):
    """The subject has no draft model, and the recipe needs one."""


class UntimedError(NotTestableError):
    """An effect of times in a run that measures none, or one that takes too long for it."""


@dataclass(frozen=True)
class PaperModels:
    """The models of a paper as far as they are public.

    Attributes:
        target: hub id.
        drafts: hub ids, the smallest first.
    """

    target: str
    drafts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Attributes:
        title: above it.
        head: names of the columns; the first is of text, the others of numbers.
        rows: cells as text.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """Lines over a common x axis.

    Attributes:
        title, x, y: of the figure and its axes.
        lines: points (x, y) of each line by its name.
    """

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Findings:
    """What a recipe has measured.

    Attributes:
        effects: the claims; all of them must be shown.
        tables: the numbers behind them.
        figures: the same as drawings.
        notes: what a reader must know, one paragraph each.
        shortfalls: of each speed-up, how it compares with the published one and which factor is to
            blame; see ``blame.py``.
    """

    effects: Sequence[Effect]
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()
    shortfalls: Sequence[str] = ()


@dataclass(frozen=True)
class Recipe:
    """One published result.

    Attributes:
        name: on the command line, and of the page.
        title: of the page.
        source: paper, table or figure.
        claim: what the paper reports.
        run: measures it.
        models: the paper's own; None where they are not public.
    """

    name: str
    title: str
    source: str
    claim: str
    run: Callable[[Lab], Findings]
    models: PaperModels | None = None

    @property
    def seed(self) -> int:
        """Of its first repeat: a hash of its name, so that results have no part in its choice."""
        return int.from_bytes(sha256(self.name.encode()).digest()[:3])


def verdict_of(effects: Sequence[Effect]) -> tuple[Verdict, str]:
    """The verdict and its reason: reproduced in shape iff every effect is shown. The reason has
    the measured size of each other effect."""
    missing = [_missing(effect) for effect in effects if not _shown(effect)]
    if missing:
        return "not reproduced", "; ".join(missing)
    worst = max((effect.error for effect in effects), default=1.0)
    return "reproduced in shape", f"error probability at most {worst:.2g}"


def _missing(effect: Effect) -> str:
    text = f"{effect.claim}: {effect.outcome}, {effect.size}"
    if effect.interval:
        text += f" ({effect.interval})"
    return text


def _shown(effect: Effect) -> bool:
    return effect.outcome == "shown"


@dataclass(frozen=True)
class Outcome:
    """A recipe that has been run.

    Attributes:
        recipe: what was run.
        findings: None where the recipe could not run.
        verdict, reason: see :func:`verdict_of`.
        about: models, sizes and machine, as JSON.
        lacks_draft: whether it could not run for want of a draft model.
    """

    recipe: Recipe
    findings: Findings | None
    verdict: Verdict
    reason: str
    about: Mapping[str, Any] = field(default_factory=dict)
    lacks_draft: bool = False

    @property
    def failures(self) -> list[str]:
        """The effects that every run must show and this one did not; or why it could not run."""
        if self.findings is None:
            return [self.reason]
        return [
            f"{each.claim}: {each.outcome} (error probability {each.error:.2g})"
            for each in self.findings.effects
            if not each.expected and not _shown(each)
        ]
