"""Zhou et al., "DistillSpec: Improving Speculative Decoding via Knowledge Distillation", ICLR 2024:
divergences and data for distilling a draft.

https://arxiv.org/abs/2310.08461
"""

from __future__ import annotations

import json
from typing import Any

from recipes import distill_grid
from recipes.reproduce.effect import certain
from recipes.reproduce.lab import Lab
from recipes.reproduce.recipe import Findings, Recipe, Table


def measure(lab: Lab) -> Findings:
    """The recipe ``recipes.distill_grid``: four divergences times four kinds of data."""
    lab.require_full("it trains 17 drafts")
    out = lab.folder / "distill-grid"
    arguments = ["--out", str(out)]
    if lab.subject.target != "embedded":
        arguments += ["--target", lab.subject.target]
    distill_grid.main(arguments)
    return evaluate(json.loads((out / "grid.json").read_text()))


def evaluate(document: dict[str, Any]) -> Findings:
    """Compares the best distilled cell with training on the ground truth alone; intervals are over
    prompts."""
    cells: dict[tuple[str, str], Any] = {
        (each["divergence"], each["data"]): each for each in document["cells"]
    }
    base = cells[distill_grid.BASELINE]
    chosen = cells[distill_grid.COMPARED]
    gain = chosen["acceptance_length"] / base["acceptance_length"] - 1
    difference = document["differences"][0]
    effects = [
        certain(
            f"distilling ({difference['distilled']}) raises α above {difference['baseline']}: the "
            "95 % interval of the difference is above 0",
            f"{difference['difference']:+.3f} ({difference['low']:+.3f} to "
            f"{difference['high']:+.3f})",
            difference["low"] > 0,
        )
    ]
    rows = [
        [
            f"{divergence}, {data}",
            f"{each['alpha']:.3f}",
            f"{each['low']:.3f} to {each['high']:.3f}",
            f"{each['acceptance_length']:.2f}",
        ]
        for (divergence, data), each in cells.items()
    ]
    head = ["divergence, data", "α", "95 % interval", "tokens per round"]
    return Findings(
        effects,
        [_grid(cells), Table("After equal training", head, rows)],
        notes=[
            f"Tokens per round: {gain:+.0%} of training on the ground truth. The paper: 10 to 45 %."
        ],
    )


def _grid(cells: dict[tuple[str, str], Any]) -> Table:
    """α by divergence and data; the baseline has a divergence of its own."""
    kinds = list(dict.fromkeys(data for _, data in cells))
    divergences = list(dict.fromkeys(divergence for divergence, _ in cells))
    rows = [
        [
            divergence,
            *(
                f"{cells[divergence, data]['alpha']:.3f}" if (divergence, data) in cells else "–"
                for data in kinds
            ),
        ]
        for divergence in divergences
    ]
    return Table("α by divergence and data", ["divergence", *kinds], rows)


RECIPE = Recipe(
    "distill-grid",
    "Distillation: divergences and data",
    "Zhou et al. (DistillSpec), ICLR 2024",
    "10 to 45 % faster than with a draft trained on the data alone.",
    measure,
)
