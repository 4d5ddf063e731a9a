"""What was measured, for a plan: α of a benchmark, times of passes of a profile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from outrider.core.errors import InvalidParameterError
from outrider.lab.bench import read_cells
from outrider.lab.cell_view import CellView, views_of
from outrider.lab.plan.passes import MeasuredPasses


def measured_alpha(path: Path) -> tuple[float, str]:
    """α of a benchmark's cells, averaged over the cells by their rounds, and a sentence about it.

    Args:
        path: a ``cells.jsonl`` or the folder of ``outrider bench`` that holds one.

    Raises:
        InvalidParameterError: no cell has an α, or several methods have one.
    """
    views = [
        each
        for each in views_of(read_cells(path))
        if each.measured and each.alpha is not None and each.rounds
    ]
    titles = sorted({each.title for each in views})
    if not views:
        raise InvalidParameterError(f"alpha={path}: no measured cell there has drafts")
    if len(titles) > 1:
        found = ", ".join(
            f"{title} {_mean_alpha([each for each in views if each.title == title]):.3f}"
            for title in titles
        )
        raise InvalidParameterError(
            f"alpha={path}: several methods were measured ({found}); pass the number of one"
        )
    return _mean_alpha(views), f"measured, {titles[0]} in {path}"


def _mean_alpha(views: Sequence[CellView]) -> float:
    rounds = sum(each.rounds for each in views)
    return sum(min(1.0, each.alpha or 0.0) * each.rounds for each in views) / rounds


def measured_passes(path: Path) -> dict[str, MeasuredPasses]:
    """The times of passes that ``outrider profile --json`` measured, by ``target`` and ``draft``.

    Raises:
        InvalidParameterError: the file cannot be read, or is no profile.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        models = document["models"]
        found = {
            name: MeasuredPasses({int(n): float(s) for n, s in each["pass_seconds"].items()})
            for name, each in models.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidParameterError(
            f"passes={path}: is not what `outrider profile --json` prints: {error}"
        ) from error
    if "target" not in found:
        raise InvalidParameterError(f"passes={path}: has no times of the target")
    return found
