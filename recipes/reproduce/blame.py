"""Which factor a speed-up falls short of the published one for: α, dependence between positions, c,
β or overhead; and which one makes a method faster or slower than another.

The division is that of ``outrider.lab.analysis.prediction``. In a run that measures times, all
factors come from the same cells as the speed-up, prefill taken out; otherwise c is counted, β is 1
and there is no overhead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.lab.analysis.prediction import Factors, Shortfall, if_reference, shortfall
from outrider.lab.analysis.tokens_per_round import expected_tokens
from outrider.lab.bench import CellResult
from outrider.lab.cell_view import view
from outrider.lab.prediction import factors_of
from recipes.reproduce.effect import mean
from recipes.reproduce.lab import Lab
from recipes.reproduce.outputs import tokens_per_round, values
from recipes.reproduce.recipe import Table

NAMES = {
    "alpha": "α, the acceptance",
    "dependence": "the dependence between positions",
    "c": "c, the draft passes",
    "beta": "β, the verifying pass",
    "overhead": "overhead outside the passes",
}
COSTS = "What each factor multiplies the {} by"


@dataclass(frozen=True)
class Compared:
    """A measured speed-up beside a published one.

    Attributes:
        name: of the row.
        cell, plain: the method's cell, and plain decoding's of the same setting.
        c: counted cost of a draft pass.
        published: the speed-up that the paper prints.
        reference: the paper's factors; None where it does not print them.
    """

    name: str
    cell: CellResult
    plain: CellResult
    c: float
    published: float
    reference: Factors | None = None


def blamed(lab: Lab, rows: Sequence[Compared]) -> tuple[list[Table], list[str]]:
    """Tables of the factors and of what each one costs, and a sentence for each row.

    Args:
        lab: says whether times were measured.
        rows: to explain; those whose cells have no factors are left out of the tables.
    """
    sizes, costs, sentences = [], [], []
    for row in rows:
        found = factors(lab, row)
        if found is None:
            sentences.append(f"{row.name}: too few rounds to tell the factors apart")
            continue
        explained = shortfall(found, row.reference)
        sizes.append(_sizes(row.name, found))
        if row.reference is not None:
            sizes.append(_sizes(f"{row.name}, the paper", row.reference))
        ratios = [f"×{explained.ratios[name]:.2f}" for name in NAMES]
        costs.append([row.name, f"{explained.reference.speedup:.2f}×", *ratios])
        sentences.append(_sentence(row, explained))
    if not sizes:
        return [], sentences
    head = ["", "speed-up", "γ", "α", "tokens per round", "c", "β", "overhead"]
    of = ["", "reference", "α", "dependence", "c", "β", "overhead"]
    return [
        Table("What the speed-up of a round is made of", head, sizes),
        Table(COSTS.format("reference"), of, costs),
    ], sentences


@dataclass(frozen=True)
class Rivals:
    """Two methods of the same run.

    Attributes:
        name, other_name: of the method, and of the one that it is compared with.
        cell, other: their cells.
        plain: plain decoding's of the same setting.
        published: the ratio of their speeds that the paper prints; None if it prints none.
    """

    name: str
    cell: CellResult
    other_name: str
    other: CellResult
    plain: CellResult
    published: float | None = None


def against(lab: Lab, rows: Sequence[Rivals]) -> tuple[list[Table], list[str]]:
    """What each factor makes of the ratio of two methods' speeds: a table, and a sentence for each
    row; nothing in runs that measure no times, where rounds of both cost the same by definition.
    """
    if not lab.size.timed:
        return [], []
    costs, sentences = [], []
    for row in rows:
        plain = view(row.plain.as_dict())
        mine, theirs = (factors_of(view(each.as_dict()), plain) for each in (row.cell, row.other))
        title = f"{row.name} to {row.other_name}"
        if mine is None or theirs is None:
            sentences.append(f"{title}: too few rounds to tell the factors apart")
            continue
        explained = shortfall(mine, theirs)
        ratio = mine.speedup / theirs.speedup
        costs.append(
            [title, f"{ratio:.2f}×", *(f"×{explained.ratios[each]:.2f}" for each in NAMES)]
        )
        sentences.append(_rivals_sentence(title, ratio, row.published, explained))
    if not costs:
        return [], sentences
    head = ["", "ratio of speeds", "α", "dependence", "c", "β", "overhead"]
    return [Table(COSTS.format("other method's speed"), head, costs)], sentences


def _rivals_sentence(
    title: str, ratio: float, published: float | None, explained: Shortfall
) -> str:
    """Which factor costs most and which gains most."""
    paper = "" if published is None else f", the paper {published:.2f}×"
    lost, gained = explained.largest, max(NAMES, key=lambda name: explained.ratios[name])
    parts = [f"{title}: {ratio:.2f}× per round{paper}"]
    if lost is not None:
        parts.append(f"most is lost to {NAMES[lost]} (×{explained.ratios[lost]:.2f})")
    if explained.ratios[gained] > 1:
        parts.append(f"most is gained by {NAMES[gained]} (×{explained.ratios[gained]:.2f})")
    return "; ".join(parts)


def factors(lab: Lab, row: Compared) -> Factors | None:
    """The factors of a cell; None if it has too few rounds, or no α."""
    if lab.size.timed:
        return factors_of(view(row.cell.as_dict()), view(row.plain.as_dict()))
    alpha, gamma = row.cell.speed["alpha"], row.cell.cell.gamma
    if alpha is None or not gamma:
        return None
    tokens = mean(values(row.cell, tokens_per_round))
    alpha = min(1.0, alpha)
    return Factors(alpha, gamma, tokens / expected_tokens(alpha, gamma), row.c)


def _sizes(name: str, found: Factors) -> list[str]:
    return [
        name,
        f"{found.speedup:.2f}×",
        f"{found.gamma:.3g}",
        f"{found.alpha:.2f}",
        f"{found.tokens:.2f}",
        f"{found.c:.3f}",
        f"{found.beta:.2f}",
        f"{found.overhead:.2f}",
    ]


def _sentence(row: Compared, explained: Shortfall) -> str:
    """Which factor costs most, or that none falls short."""
    found, reference = explained.measured, explained.reference
    speeds = f"{row.name}: {found.speedup:.2f}× per round, the paper {row.published:.2f}×"
    largest = explained.largest
    if found.speedup >= row.published or largest is None:
        return f"{speeds}: nothing falls short"
    ratio, hope = explained.ratios[largest], if_reference(found, reference)[largest]
    blame = f"most is lost to {NAMES[largest]} (×{ratio:.2f}"
    if row.reference is not None:
        return f"{speeds}; {blame}); with the paper's it would be {hope:.2f}×"
    return (
        f"{speeds}; the paper does not print its factors; of what the limit of γ + 1 tokens per "
        f"round at no cost would give, {blame} of {reference.speedup:.2f}×); without that loss it "
        f"would be {hope:.2f}×"
    )
