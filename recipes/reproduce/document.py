"""A recipe's result as a JSON document, which its page and figure are made of.

A document of a full run is never replaced by one of a quick run, nor one that has measured
something by one that found nothing to measure with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.lab.frontier.document import dumps
from recipes.reproduce.figure import draw
from recipes.reproduce.page import index_page, page
from recipes.reproduce.recipe import Outcome
from recipes.reproduce.subject import SUBJECTS

RESULTS = Path("benchmarks/results/reproduce")
PAGES = Path("docs/reproduce")


def document_of(outcome: Outcome) -> dict[str, Any]:
    """The result as JSON."""
    recipe, findings = outcome.recipe, outcome.findings
    return {
        "name": recipe.name,
        "title": recipe.title,
        "source": recipe.source,
        "claim": recipe.claim,
        "verdict": outcome.verdict,
        "reason": outcome.reason,
        "effects": [] if findings is None else [each.as_dict() for each in findings.effects],
        "tables": [] if findings is None else [asdict(each) for each in findings.tables],
        "figures": [] if findings is None else [asdict(each) for each in findings.figures],
        "notes": [] if findings is None else list(findings.notes),
        "shortfalls": [] if findings is None else list(findings.shortfalls),
        "about": dict(outcome.about),
    }


def publish(outcome: Outcome, results: Path = RESULTS, pages: Path = PAGES) -> bool:
    """Writes the document, the page and the figures; False if those that are there say more: of a
    full run where this is a quick one, or of any where this one could not run."""
    document = document_of(outcome)
    file = results / f"{outcome.recipe.name}.json"
    if file.is_file() and _says_more(json.loads(file.read_text(encoding="utf-8")), document):
        return False
    results.mkdir(parents=True, exist_ok=True)
    file.write_text(dumps(document) + "\n", encoding="utf-8")
    write_page(document, pages)
    write_index(results, pages)
    return True


def write_page(document: Mapping[str, Any], pages: Path = PAGES) -> None:
    """The page of a document, and its figures beside it."""
    pages.mkdir(parents=True, exist_ok=True)
    name = document["name"]
    files = []
    for number, figure in enumerate(document["figures"], 1):
        files.append(f"{name}-{number}.svg")
        draw(figure, pages / files[-1], document["about"].get("lossy", ()))
    others = [each for each in SUBJECTS if each and (pages / each / f"{name}.md").is_file()]
    (pages / f"{name}.md").write_text(page(document, files, others), encoding="utf-8")


def write_index(results: Path = RESULTS, pages: Path = PAGES) -> None:
    """The list of all recipes with their verdicts; in the folder of a subject, of those that were
    run on it."""
    pages.mkdir(parents=True, exist_ok=True)
    subject = pages.name if pages.name in SUBJECTS else ""
    others = [name for name in SUBJECTS if name and (pages / name / "README.md").is_file()]
    text = index_page(read_documents(results), subject, others)
    (pages / "README.md").write_text(text, encoding="utf-8")


def read_documents(results: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """All documents by the name of their recipe."""
    files = sorted(results.glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def _says_more(known: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    if new["verdict"] == "not testable here":
        return bool(known["verdict"] != "not testable here")
    return bool(known["about"].get("size") == "full" and new["about"].get("size") == "quick")
