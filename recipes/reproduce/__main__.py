"""The command line: see the package's docstring.

Exit status 1 if a recipe raises an error, or in a quick run does not show an effect that it must
show.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import transformers

from outrider.lab.report import write_report
from recipes.reproduce.catalogue import RECIPES
from recipes.reproduce.document import (
    PAGES,
    RESULTS,
    publish,
    read_documents,
    write_index,
    write_page,
)
from recipes.reproduce.lab import Lab
from recipes.reproduce.recipe import Outcome, Recipe, UntimedError
from recipes.reproduce.run import run_on_first, run_on_paper_models
from recipes.reproduce.subject import FULL, QUICK, SUBJECTS, Size, Subject, of_models


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the options, runs the recipes, writes results and pages, and prints the verdicts."""
    options = _parser().parse_args(arguments)
    options.results = options.results or RESULTS / options.subject
    options.page_folder = options.page_folder or PAGES / options.subject
    if options.list:
        for recipe in RECIPES:
            print(f"{recipe.name:24} {recipe.source}")
        return 0
    if options.pages:
        for document in read_documents(options.results).values():
            write_page(document, options.page_folder)
        write_index(options.results, options.page_folder)
        return 0
    transformers.logging.set_verbosity_error()
    size = replace(QUICK if options.quick else FULL, **_given(options))
    subjects = SUBJECTS[options.subject](options.quick, options.compile)
    if options.target:
        subjects = [of_models(options.target, options.target, options.draft, options.compile)]
    recipes = _chosen(options.names)
    failed = [recipe.name for recipe in recipes if not _run(recipe, subjects, size, options)]
    if failed:
        print(f"not as expected: {', '.join(failed)}")
        return 1
    print(f"recipes: {len(recipes)}, {time.process_time():.0f} s of processor time")
    return 0


def _given(options: argparse.Namespace) -> dict[str, int]:
    """The numbers of the size that the user sets."""
    numbers = {name: getattr(options, name) for name in ("prompts", "tokens", "repeats")}
    return {name: number for name, number in numbers.items() if number is not None}


def _run(
    recipe: Recipe, subjects: Sequence[Subject], size: Size, options: argparse.Namespace
) -> bool:
    """Runs a recipe and writes its results; whether it showed all that it must. A recipe that
    raises an error does not stop the others."""
    began, command = time.process_time(), _command(recipe, options)
    folder = options.out / size.name

    def report(stage: str) -> None:
        _show(f"{recipe.name}: {stage}")

    try:
        if options.paper_models:
            outcome, lab = run_on_paper_models(
                recipe, size, folder, command, report, options.compile
            )
        else:
            labs = [Lab(each, size, folder, report, recipe.seed) for each in subjects]
            outcome, lab = run_on_first(recipe, labs, command)
        _finish(outcome, lab, options, time.process_time() - began)
    except UntimedError as error:
        print(f"{recipe.name}: left out: {error}", flush=True)
        return True
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command goes on from {folder}")
        raise SystemExit(130) from None
    except Exception:
        print(f"{recipe.name}: failed", flush=True)
        traceback.print_exc()
        return False
    return not (options.quick and outcome.failures)


def _finish(outcome: Outcome, lab: Lab, options: argparse.Namespace, seconds: float) -> None:
    name = outcome.recipe.name
    clear = "\r\033[K" if sys.stdout.isatty() else ""
    print(
        f"{clear}{name}: {outcome.verdict} ({outcome.reason}); {seconds:.0f} s of processor time",
        flush=True,
    )
    for failure in outcome.failures:
        print(f"  {failure}")
    if not options.dry and not publish(outcome, options.results, options.page_folder):
        print(f"  {options.page_folder / name}.md says more and stays")
    if lab.cells and lab.size.timed:
        write_report(lab.cells, lab.folder / f"{name}.html", outcome.recipe.title)


def _chosen(names: Sequence[str]) -> list[Recipe]:
    known = {recipe.name: recipe for recipe in RECIPES}
    for name in names:
        if name not in known:
            raise SystemExit(f"no recipe {name!r}; known: {', '.join(known)}")
    return [known[name] for name in names] if names else list(RECIPES)


def _command(recipe: Recipe, options: argparse.Namespace) -> str:
    parts = ["python -m recipes.reproduce", recipe.name]
    parts += ["--quick"] if options.quick else []
    parts += [f"--compile {options.compile}"] if options.compile != "auto" else []
    parts += ["--paper-models"] if options.paper_models else []
    parts += [f"--subject {options.subject}"] if options.subject else []
    parts += [f"--{name} {number}" for name, number in _given(options).items()]
    if options.target:
        parts += [f"--target {options.target}", *(f"--draft {each}" for each in options.draft)]
    return " ".join(parts)


def _show(stage: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{stage[:110]}", end="", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m recipes.reproduce", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes; default all")
    parser.add_argument("--list", action="store_true", help="list the recipes")
    parser.add_argument("--quick", action="store_true", help="small, untimed, embedded pair")
    parser.add_argument("--dry", action="store_true", help="write no documents and pages")
    parser.add_argument("--pages", action="store_true", help="only write the pages again")
    parser.add_argument("--paper-models", action="store_true", help="the papers' own models")
    parser.add_argument(
        "--subject",
        choices=[name for name in SUBJECTS if name],
        default="",
        help="always the embedded pair, or SmolLM2 at the cost of a billion parameters; pages and "
        "documents are written into a folder of that name",
    )
    parser.add_argument("--target", default="", help="a target of your own: folder or hub id")
    parser.add_argument("--draft", action="append", default=[], help="its drafts, smallest first")
    for name in ("prompts", "tokens", "repeats"):
        parser.add_argument(f"--{name}", type=int, help="in place of the size's own number")
    parser.add_argument("--compile", choices=("off", "auto", "max"), default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"), help="measurements")
    parser.add_argument("--results", type=Path, help=f"documents; default {RESULTS}")
    parser.add_argument("--page-folder", type=Path, help=f"pages; default {PAGES}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
