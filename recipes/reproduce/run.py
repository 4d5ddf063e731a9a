"""Runs one recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.core.errors import OutriderError
from outrider.lab.bench import DataSpec
from outrider.runtime.executors.compiled import Compile
from recipes.reproduce.lab import Lab
from recipes.reproduce.recipe import (
    MissingDraftError,
    NotTestableError,
    Outcome,
    Recipe,
    UntimedError,
    verdict_of,
)
from recipes.reproduce.subject import Size, Subject, of_paper


def run_recipe(recipe: Recipe, lab: Lab, command: str) -> Outcome:
    """The outcome of a recipe. What it needs and does not find is a verdict, not an error.

    Args:
        recipe: to run.
        lab: models, prompts and sizes.
        command: what runs it again.

    Raises:
        UntimedError: its effects are all of times, and the run measures none.
    """
    about = lab.about(command)
    try:
        findings = recipe.run(lab)
    except UntimedError:
        raise
    except (NotTestableError, OutriderError) as error:
        lacks_draft = isinstance(error, MissingDraftError)
        return Outcome(recipe, None, "not testable here", str(error), about, lacks_draft)
    about = {**about, **steadiness(lab), "lossy": lossy(lab)}
    return Outcome(recipe, findings, *verdict_of(findings.effects), about)


def steadiness(lab: Lab) -> dict[str, int]:
    """How many speed-ups were measured repeatedly, and how many of them another run may find more
    than 5 % apart; nothing where no times were measured."""
    speedups = [each.speedup for each in lab.cells if each.speedup] if lab.size.timed else []
    found = [each for each in speedups if len(each["repeats"]) > 1]
    unsteady = sum(not each["steady"] for each in found)
    return {"speedups": len(found), "unsteady": unsteady} if found else {}


def lossy(lab: Lab) -> dict[str, str]:
    """The methods whose outputs do not have the target's distribution, by their titles."""
    cells = (each.cell for each in lab.cells)
    return {each.title: each.method.partition(":")[0] for each in cells if not each.lossless}


def run_on_first(recipe: Recipe, labs: Sequence[Lab], command: str) -> tuple[Outcome, Lab]:
    """The outcome on the first subject that has the draft model that the recipe needs, or on the
    last one; arguments as those of :func:`run_recipe`."""
    *others, last = labs
    for lab in others:
        outcome = run_recipe(recipe, lab, command)
        if not outcome.lacks_draft:
            return outcome, lab
    return run_recipe(recipe, last, command), last


def run_on_paper_models(
    recipe: Recipe,
    size: Size,
    folder: Path,
    command: str,
    report: Callable[[str], None] = lambda stage: None,
    compile: Compile = "auto",
) -> tuple[Outcome, Lab]:
    """The outcome on the paper's own models, where they are public; arguments as those of ``Lab``,
    :func:`run_recipe` and ``outrider.load``."""
    if recipe.models is None:
        nothing = Subject("none", "", (), {}, DataSpec("builtin:code"))
        lab = Lab(nothing, size, folder, report, recipe.seed)
        reason = "the models of the paper are not public, or it has none"
        return Outcome(recipe, None, "not testable here", reason, lab.about(command)), lab
    lab = Lab(of_paper(recipe.models, compile), size, folder, report, recipe.seed)
    return run_recipe(recipe, lab, command), lab
