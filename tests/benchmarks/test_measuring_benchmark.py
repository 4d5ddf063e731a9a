"""The page that says what measuring costs, and how well two runs agree."""

from dataclasses import replace

from tiny_bench import repeat

from benchmarks.measuring import markdown, plan
from benchmarks.page import parser
from outrider.lab.bench import Cell, CellResult, speedup


def result(title: str, tokens: int, *, odd: int, share: float) -> CellResult:
    """A cell whose even and odd repeats have so many tokens in a second; plain decoding has 10."""
    repeats = tuple(repeat(number, (1.0, (tokens, odd)[number % 2])) for number in range(2))
    plain = [repeat(number, (1.0, 10)) for number in range(2)]
    lone = title == "plain"
    cell = Cell(title, title, None, None, 0.0, "code", 1, True, lone, {})
    found = None if lone else speedup(repeats, plain)
    return CellResult(cell, {}, repeats, {"measuring_share": share}, found, {}, [], "", {})


def test_the_page_compares_both_runs() -> None:
    about = {
        "date": "2026-01-01", "hardware": "a processor", "threads": 1, "command": "command",
        "dtype": "float32", "versions": {"torch": "2"}, "note": "Busy.",
        "plan": {"repeats": 2, "max_repeats": 8},
    }  # fmt: skip
    first = [
        result("plain", 10, odd=10, share=0.001),
        result("steady", 20, odd=20, share=0.002),
        result("unsteady", 20, odd=40, share=0.02),
    ]
    second = [
        first[0],
        result("steady", 21, odd=21, share=0.001),
        result("unsteady", 20, odd=20, share=0.001),
    ]
    text = markdown(about, [first, second])
    assert "5 % even so. Busy." in text
    assert "| steady | code | 2.00× | 2.10× | 1.050 | 2 and 2 | 0.2000 % |" in text
    assert "| unsteady | code | ~3.00× | 2.00× | 1.500 | 2 and 2 | 2.0000 % |" in text
    assert "| share of measuring at most 1 % | 2.0000 % | no |" in text
    assert "| steady speed-ups of two runs within 5 % of each other | 1 of 1 | yes |" in text
    apart = [*second[:1], replace(second[1], speedup=result("s", 30, odd=30, share=0).speedup)]
    assert "| 0 of 1 | no |" in markdown(about, [first[:2], apart])


def test_the_plan_is_valid() -> None:
    options = parser("A benchmark.", threads=1).parse_args([])
    options.repeats, options.max_repeats = 2, 3
    assert len(plan(options).all_methods) == 5
