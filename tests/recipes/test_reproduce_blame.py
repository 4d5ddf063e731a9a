"""The factor that a page blames, on cells with known factors."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.lab.analysis.prediction import Factors
from recipes.reproduce.blame import NAMES, Compared, Rivals, against, blamed, factors
from recipes.reproduce.page import machine_of, page
from recipes.reproduce.papers import chen_table_1, leviathan_tables
from recipes.reproduce.run import steadiness
from recipes.reproduce.subject import FULL, QUICK

sys.path.insert(0, str(Path(__file__).parents[1] / "lab"))
import bench_cells

LAB: Any = SimpleNamespace(size=FULL)


def result(values: dict[str, Any]) -> Any:
    return SimpleNamespace(as_dict=lambda: values, speed=values["speed"])


def compared(published: float, reference: Factors | None = None) -> Compared:
    plain, fast = bench_cells.cell("plain"), bench_cells.cell("fast", alpha=0.7, gamma=4)
    return Compared("row", result(fast), result(plain), 0.0, published, reference)


def test_measured_factors_come_from_the_cells() -> None:
    found = factors(LAB, compared(2.0))
    assert found is not None
    assert found.gamma == 4
    assert found.c == pytest.approx(bench_cells.DRAFT / bench_cells.PASS, rel=0.05)
    assert found.beta == pytest.approx(1.2, rel=0.05)
    assert found.overhead != 0


@pytest.mark.parametrize(
    ("name", "better"), [("alpha", 0.95), ("c", 0.0), ("beta", 0.6), ("overhead", -0.3)]
)
def test_the_one_factor_in_which_the_paper_is_better_is_blamed(name: str, better: float) -> None:
    found = factors(LAB, compared(2.0))
    assert found is not None
    reference = Factors(**{**vars(found), name: better})
    tables, (sentence,) = blamed(LAB, [compared(reference.speedup, reference)])
    assert f"most is lost to {NAMES[name]}" in sentence
    assert sentence.endswith(f"with the paper's it would be {reference.speedup:.2f}×")
    assert [row[0] for row in tables[0].rows] == ["row", "row, the paper"]
    ratios = dict(zip(NAMES, tables[1].rows[0][2:], strict=True))
    assert all(ratio == "×1.00" for each, ratio in ratios.items() if each != name)


def test_without_the_papers_factors_the_limit_is_the_reference() -> None:
    tables, (sentence,) = blamed(LAB, [compared(4.0)])
    assert "the paper does not print its factors" in sentence
    assert tables[1].rows[0][1] == "5.00×"


def test_nothing_is_blamed_where_the_speedup_is_reached() -> None:
    _, (sentence,) = blamed(LAB, [compared(0.5)])
    assert sentence.endswith("nothing falls short")


def test_a_cell_without_drafts_has_no_factors() -> None:
    plain = bench_cells.cell("plain")
    row = Compared("row", result(plain), result(plain), 0.0, 2.0)
    assert blamed(LAB, [row]) == ([], ["row: too few rounds to tell the factors apart"])


def rivals(published: float | None = None) -> Rivals:
    """Two methods with the same passes; the one that accepts less verifies more slowly, too."""
    plain, better = bench_cells.cell("plain"), bench_cells.cell("better", alpha=0.8, gamma=4)
    worse = bench_cells.cell("worse", alpha=0.4, gamma=4, beta=1.3)
    return Rivals("worse", result(worse), "better", result(better), result(plain), published)


def test_of_two_methods_the_factor_that_differs_most_is_named() -> None:
    (table,), (sentence,) = against(LAB, [rivals(published=1.2)])
    (row,) = table.rows
    ratio, *ratios = (float(each.strip("×")) for each in row[1:])
    assert row[0] == "worse to better"
    assert ratio == pytest.approx(math.prod(ratios), rel=0.05)  # of rounded numbers
    assert min(ratios) == ratios[0]
    assert sentence.startswith(f"worse to better: {ratio:.2f}× per round, the paper 1.20×; ")
    assert f"most is lost to {NAMES['alpha']}" in sentence
    assert "the paper" not in against(LAB, [rivals()])[1][0]


def test_methods_are_not_compared_where_rounds_are_counted_or_too_few() -> None:
    assert against(SimpleNamespace(size=QUICK), [rivals()]) == ([], [])  # type: ignore[arg-type]
    plain = result(bench_cells.cell("plain"))
    assert against(LAB, [Rivals("a", plain, "b", plain, plain)]) == (
        [],
        ["a to b: too few rounds to tell the factors apart"],
    )


def test_published_factors_are_those_of_the_papers() -> None:
    """Chen et al.: 2.83 and 3.72 tokens per loop of 21.3 ms; Leviathan et al.: 3.4× and 2.6×."""
    free, code = chen_table_1.published("free"), chen_table_1.published("code")
    assert (free.tokens, code.tokens) == (
        pytest.approx(2.83, abs=0.01),
        pytest.approx(3.72, abs=0.01),
    )
    assert free.speedup == pytest.approx(1.875, abs=1e-3)
    assert code.speedup == pytest.approx(2.46, abs=1e-2)
    assert free.dependence == pytest.approx(1)
    assert [round(each.speedup, 1) for each in leviathan_tables.PUBLISHED.values()] == [3.4, 2.6]


def document_of(size: str) -> dict[str, Any]:
    """A document with a shortfall."""
    return {
        "title": "T",
        "source": "S",
        "claim": "C.",
        "verdict": "not reproduced",
        "reason": "why",
        "shortfalls": ["most is lost to c"],
        "effects": [],
        "tables": [],
        "figures": [],
        "notes": [],
        "about": {
            **dict.fromkeys(("hardware", "date", "threads", "subject", "command"), "x"),
            "size": size,
            "prompts": 1,
            "tokens": 1,
            "repeats": 1,
            "versions": {},
        },
    }


def test_a_page_lists_the_shortfalls_below_its_verdict() -> None:
    document = document_of("full")
    lines = page(document, []).splitlines()
    assert lines[lines.index("**Not reproduced.** Why.") + 2] == "- Most is lost to c."
    del document["shortfalls"]
    assert "- Most" not in page(document, [])


@pytest.mark.parametrize(("size", "outcome"), [("full", "reversed"), ("quick", "shown")])
def test_a_page_says_why_an_effect_may_be_missing(size: str, outcome: str) -> None:
    effect = {"claim": "larger", "outcome": outcome, "size": "1", "interval": "", "error": 1.0}
    effect |= {"wins": 0, "losses": 0, "expected": "few outputs"}
    document = document_of(size)
    text = page(document | {"effects": [effect]}, [])
    begin = "Not required of the quick run" if size == "quick" else "Reversed"
    assert f"{begin}: larger. Why it may be missing" in text
    shown = effect | {"outcome": "shown"}
    assert ("few outputs" in page(document | {"effects": [shown]}, [])) == (size == "quick")


def test_a_page_counts_the_speed_ups_that_are_not_steady() -> None:
    """One repeat has no halves, and does not count."""
    speedups = [
        None,
        {"steady": True, "repeats": [1.5]},
        {"steady": True, "repeats": [1.5, 1.5]},
        {"steady": False, "repeats": [1.5, 2.5]},
    ]
    cells = [SimpleNamespace(speedup=each) for each in speedups]
    found = steadiness(SimpleNamespace(cells=cells, size=FULL))  # type: ignore[arg-type]
    assert found == {"speedups": 2, "unsteady": 1}
    document = document_of("full")
    text = page(document | {"about": document["about"] | found}, [])
    assert "Of 2 speed-ups, 1 may differ by more than 5 %" in text
    assert "differ by more" not in page(document, [])
    assert not steadiness(SimpleNamespace(cells=cells, size=QUICK))  # type: ignore[arg-type]


def test_the_machine_is_named_with_its_instructions() -> None:
    assert machine_of({"hardware": "EPYC", "instructions": "AVX512"}) == "EPYC (AVX512)"
    assert machine_of({"hardware": "EPYC"}) == "EPYC"
