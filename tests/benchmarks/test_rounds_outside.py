"""The table of times outside the forward passes."""

import pytest
from tiny_models import engine_of, tiny

from benchmarks.rounds_outside import METHODS, SAMPLINGS, markdown, milliseconds
from outrider import METHODS as ALL
from outrider.sampling import Sampling


def test_every_row_names_a_method() -> None:
    assert {name.split(",")[0] for name in METHODS} <= set(ALL)


def test_the_time_outside_is_a_part_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tiny(), tiny(seed=1))
    monkeypatch.setattr(type(engine), "encode", lambda self, prompt: [5, 6, 7])
    assert milliseconds(engine, Sampling(temperature=1), rounds=3, repeats=1) > 0


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
