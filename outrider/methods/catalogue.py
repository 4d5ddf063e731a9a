"""What the methods are, without the methods: names, summaries, promises, options.

Methods are made of classes that need torch. Help, completion and ``outrider methods`` need only
their description, which ``python -m outrider.methods.catalogue`` writes to a file; a test holds
the file current.
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
        bound: the fields of the rule's :class:`outrider.core.Bound`, with the options' defaults.
        greedy_only: whether it is defined at temperature 0 alone.
        options: the default of each option and the values it may have, where they can be listed.
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


def written(methods: Iterable[Method]) -> str:
    """The file's content: one JSON list."""
    rows = [asdict(describe(method)) for method in methods]
    return json.dumps(rows, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    from outrider.methods.registry import METHODS

    FILE.write_text(written(METHODS.values()), encoding="utf-8")
    sys.stdout.write(f"wrote {FILE.name}\n")
