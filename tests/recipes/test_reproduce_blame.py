"""The factor that a page blames, on cells with known factors."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.lab.analysis.prediction import Factors
from recipes.reproduce.blame import NAMES, Compared, blamed, factors
from recipes.reproduce.page import page
from recipes.reproduce.papers import chen_table_1, leviathan_tables
from recipes.reproduce.subject import FULL

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


def test_a_page_lists_the_shortfalls_below_its_verdict() -> None:
    document: dict[str, Any] = {
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
            "size": "full",
            "prompts": 1,
            "tokens": 1,
            "repeats": 1,
            "versions": {},
        },
    }
    lines = page(document, []).splitlines()
    assert lines[lines.index("**Not reproduced.** Why.") + 2] == "- Most is lost to c."
    del document["shortfalls"]
    assert "- Most" not in page(document, [])
