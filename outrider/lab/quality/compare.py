"""Two cells of a benchmark compared on the same prompts, by the paired bootstrap."""

import math
import statistics
from collections import defaultdict
from typing import Any

from outrider.core.errors import InvalidParameterError
from outrider.lab.bench import CellResult
from outrider.lab.quality.bootstrap import Difference, paired_bootstrap


def compare_cells(
    a: CellResult, b: CellResult, metric: str, name: str, **settings: Any
) -> Difference:
    """The difference a - b of a metric's values, with its interval over prompts.

    All outputs of an example, of every turn and repeat, are one item: their mean. Outputs without a
    value, such as the perplexity of an empty one, are left out. Metrics of a corpus (BLEU,
    distinct-n) are compared by their values on single outputs.

    Args:
        a, b: two cells on the same data.
        metric: a registered metric, such as ``rouge``.
        name: one of the names in its ``each``, such as ``rougeL``.
        settings: of :func:`paired_bootstrap`.

    Raises:
        InvalidParameterError: cells on other data, or without the metric.
    """
    if a.data["sha256"] != b.data["sha256"]:
        raise InvalidParameterError(
            f"{a.cell} and {b.cell} have other prompts: a paired comparison needs the same data"
        )
    of_a, of_b = (_by_example(cell, metric, name) for cell in (a, b))
    shared = sorted(of_a.keys() & of_b.keys())
    return paired_bootstrap(
        [of_a[index] for index in shared], [of_b[index] for index in shared], **settings
    )


def _by_example(result: CellResult, metric: str, name: str) -> dict[int, float]:
    """The mean value of each example's outputs."""
    values = result.metrics.get(metric, {}).get("each", {}).get(name)
    if values is None:
        raise InvalidParameterError(
            f"{result.cell} has no {metric!r} by output with the name {name!r}: run the benchmark "
            f"with --metric {metric}"
        )
    requests = [request for repeat in result.repeats for request in repeat.requests]
    found: dict[int, list[float]] = defaultdict(list)
    for request, value in zip(requests, values, strict=False):  # divergences: one run's outputs
        if math.isfinite(float(value)):
            found[request.example].append(float(value))
    return {index: statistics.fmean(each) for index, each in found.items()}
