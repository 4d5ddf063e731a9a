"""A catalogue of the methods that needs no torch: names, summaries, guarantees and options.

Methods refer to classes that import torch. Help, completion and ``outrider methods`` only need a
description, which ``python -m outrider.methods.catalogue`` writes to a file. A test fails if the
file is out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.methods.method import Method

FILE = Path(__file__).with_name("catalogue.json")


@dataclass(frozen=True)
class Entry:
    """A method as ``outrider methods`` shows it.

    Attributes:
        name, summary, paper, needs: those of :class:`Method`.
        lossless: whether the output follows the target distribution exactly.
        bound: the fields of the rule's :class:`outrider.core.Bound` under default options.
        greedy_only: whether it is defined only at temperature 0.
        options: the default of each option, and its possible values if they can be listed.
    """

    name: str
    summary: str
    paper: str
    lossless: bool
    bound: dict[str, Any]
    needs: str
    greedy_only: bool
    options: dict[str, dict[str, Any]]

    @property
    def needs_draft(self) -> bool:
        """Whether it needs a draft model."""
        return self.needs == "draft model"

    @property
    def needs_head(self) -> bool:
        """Whether it needs a head."""
        return self.needs.startswith("head: ")


@cache
def entries() -> dict[str, Entry]:
    """All methods by name."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))
    return {row["name"]: Entry(**row) for row in rows}


def describe(method: Method) -> Entry:
    """The entry of a method."""
    recipe = method.recipe()
    return Entry(
        method.name,
        method.summary,
        method.paper,
        method.lossless,
        asdict(recipe.verifier.bound),
        method.needs,
        recipe.greedy_only,
        {
            option.name: {"default": option.plain, "choices": list(option.choices)}
            for option in method.options.values()
        },
    )


def as_json(methods: Iterable[Method]) -> str:
    """The content of the catalogue file: a JSON list of entries."""
    rows = [asdict(describe(method)) for method in methods]
    return json.dumps(rows, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    from outrider.methods.registry import METHODS

    FILE.write_text(as_json(METHODS.values()), encoding="utf-8")
    sys.stdout.write(f"wrote {FILE.name}\n")
