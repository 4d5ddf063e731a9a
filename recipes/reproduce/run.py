"""Runs recipes one after the other; a recipe that fails does not stop the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from outrider.core.errors import OutriderError
from recipes.reproduce.lab import Lab
from recipes.reproduce.recipe import (
    NotTestableError,
    Outcome,
    Recipe,
    UntimedError,
    verdict_of,
)
from recipes.reproduce.subject import Size, Subject, of_paper

Report = Callable[[str], None]


def run_recipe(recipe: Recipe, lab: Lab, command: str) -> Outcome:
    """Runs one recipe. What it needs and does not find is a verdict, not an error.

    Raises:
        UntimedError: its effects are all of times, and the run measures none.
    """
    about = lab.about(command)
    try:
        findings = recipe.run(lab)
    except UntimedError:
        raise
    except (NotTestableError, OutriderError) as error:
        return Outcome(recipe, None, "not testable here", str(error), about)
    return Outcome(recipe, findings, *verdict_of(findings.effects), about)


def run_recipes(
    recipes: Sequence[Recipe],
    subject: Subject,
    size: Size,
    folder: Path,
    command: Callable[[Recipe], str],
    *,
    paper_models: bool = False,
    report: Report = lambda stage: None,
) -> Iterator[tuple[Outcome, Lab]]:
    """The outcomes of recipes, each as soon as it is there.

    Args:
        recipes: to run.
        subject: models and prompts.
        size: how much.
        folder: for what is measured; all recipes share it, so that equal cells are measured once.
        command: what runs a recipe alone.
        paper_models: run each recipe on its paper's own models.
        report: called with what is being done.
    """
    for recipe in recipes:
        chosen = subject
        if paper_models:
            if recipe.models is None:
                lab = Lab(subject, size, folder)
                reason = "the models of the paper are not public"
                about = lab.about(command(recipe))
                yield Outcome(recipe, None, "not testable here", reason, about), lab
                continue
            chosen = of_paper(recipe.models)
        lab = Lab(chosen, size, folder, lambda stage, name=recipe.name: report(f"{name}: {stage}"))
        try:
            yield run_recipe(recipe, lab, command(recipe)), lab
        except UntimedError as error:
            report(f"{recipe.name}: left out, {error}")
