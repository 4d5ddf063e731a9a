"""The benchmark of exact outputs: differences, sums over pieces, and the page."""

from typing import Any

import pytest
from tiny_models import engine_of, greedy, ragged_prompts, tiny

from benchmarks import exact
from benchmarks.exact import against_plain, bars, markdown, total


def row(exact: bool, batch: int, equal: int, first: int | None, seconds: float) -> dict[str, Any]:
    """A row of a piece with ten prompts and 100 tokens."""
    found = {"exact": exact, "batch": batch, "prompts": 10, "equal": equal, "first": first}
    return found | {"tokens": 100, "plain_seconds": 4.0, "seconds": seconds}


@pytest.fixture
def part() -> dict[str, Any]:
    """Two pieces; in the second one, exact is slower and one output differs."""
    first = [row(False, 8, 9, 41, 1.0), row(True, 8, 10, None, 1.0)]
    second = [row(True, 8, 9, 7, 1.3), row(False, 8, 8, 12, 1.0)]
    about = dict.fromkeys(("date", "hardware", "threads", "torch", "note"), "x")
    return {
        "asked": {"gamma": 5, "tokens": 10},
        "about": about | {"command": "python -m benchmarks.exact"},
        "pieces": {"0": first, "1": second},
    }


def test_outputs_are_compared_with_plain_decoding_alone_and_in_batches() -> None:
    engine = engine_of(tiny(), tiny(seed=1), "speculative")
    work = ragged_prompts([9, 3, 14])
    alone, together = against_plain(engine, (1, 2), work, greedy(6))
    for found, batch in ((alone, 1), (together, 2)):
        assert found["batch"] == batch
        assert (found["prompts"], found["equal"], found["first"]) == (3, 3, None)
        assert found["tokens"] == 18
        assert found["seconds"] > 0


def test_the_first_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([None, [(5, 6), (7, 8)], None, [(5, 6), (7, 9)]])  # warm-up, plain; the same
    monkeypatch.setattr(exact, "timed", lambda *_: (next(answers), 1.0))
    engine = engine_of(tiny(), tiny(seed=1), "speculative")
    (found,) = against_plain(engine, [1], [[3], [4]], greedy(2))
    assert (found["equal"], found["first"]) == (1, 1)


def test_pieces_add_up(part: dict[str, Any]) -> None:
    loose, strict = total(part)
    assert (loose["prompts"], loose["equal"], loose["first"]) == (20, 17, 12)
    assert (loose["plain"], loose["speed"]) == (25, 100)
    assert (strict["exact"], strict["equal"], strict["first"]) == (True, 19, 7)
    assert [met for _, _, met in bars([loose, strict])] == [False, False]
    assert [met for _, _, met in bars([loose, strict | {"equal": 20, "speed": 95}])] == [True, True]


def test_the_page(part: dict[str, Any]) -> None:
    page = markdown({"embedded target, eager, bfloat16": part})
    assert "## Embedded target, eager, bfloat16" in page
    assert "| exact | 8 | 19 of 20 | 7 | 25 | 87 |" in page
    assert "| batch 8: costs at most 10% | +15% | no |" in page
