"""The table of times outside the forward passes."""

from typing import Any

import pytest
from tiny_models import engine_of, tiny

from benchmarks import rounds_outside
from benchmarks.rounds_outside import METHODS, SAMPLINGS, in_turns, markdown, milliseconds
from outrider import METHODS as ALL
from outrider.sampling import Sampling


def test_every_row_names_a_method() -> None:
    assert {name.split(",")[0] for name in METHODS} <= set(ALL)


def test_the_time_outside_is_a_part_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tiny(), tiny(seed=1))
    monkeypatch.setattr(type(engine), "encode", lambda self, prompt: [5, 6, 7])
    assert (milliseconds(engine, Sampling(temperature=1), rounds=3) or 0) > 0


def test_parameters_that_a_method_does_not_decode_with_have_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(tiny(), tiny(seed=1), "beam-search")
    monkeypatch.setattr(type(engine), "encode", lambda self, prompt: [5, 6, 7])
    assert milliseconds(engine, Sampling(temperature=1), rounds=3) is None


def test_methods_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first turn is left out."""
    asked: list[tuple[object, Sampling]] = []
    times = iter([9.0, 9.0, 9.0, None, 1.0, 2.0, 3.0, None, 5.0, 4.0, 7.0, None])

    def milliseconds(engine: object, sampling: Sampling, rounds: int) -> float | None:
        asked.append((engine, sampling))
        return next(times)

    monkeypatch.setattr(rounds_outside, "milliseconds", milliseconds)
    engines: Any = {"one": "engine 1", "other": "engine 2"}
    found = list(in_turns(engines, ["T0", "T1"], rounds=3, turns=2))
    assert [engine for engine, _ in asked] == ["engine 1", "engine 1", "engine 2", "engine 2"] * 3
    assert found == [
        {"one": {"T0": 1.0, "T1": 2.0}, "other": {"T0": 3.0, "T1": None}},
        {"one": {"T0": 3.0, "T1": 3.0}, "other": {"T0": 5.0, "T1": None}},
    ]


def test_the_page_compares_with_speculative_sampling() -> None:
    about = {
        "date": "2026-01-01",
        "hardware": "a processor",
        "threads": 2,
        "torch": "x",
        "target": "one",
        "draft": "another",
        "command": "C",
    }
    rows = {"speculative": {"T1": 0.5, "top-p": 0.55}, "bild": {"T1": None, "top-p": 1.0}}
    page = markdown({"about": about, "milliseconds": {"auto": rows}})
    assert "| speculative | 0.50 (1.00) | 0.55 (1.10) |" in page
    assert "| bild | - | 1.00 (2.00) |" in page
    assert set(SAMPLINGS) >= {"T0", "T1", "top-p"}
