"""The benchmark of first tokens: both modes are really used, and the page shows them."""

from typing import Any

import pytest
from tiny_models import engine_of, tiny

from benchmarks.first_token import eagerly, markdown, measure
from outrider.runtime import runner


def test_both_modes_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    engine = engine_of(tiny())
    generate = engine.generate

    def watched(*arguments: Any) -> Any:
        taken.append(runner.compiled_prefill_pays(engine.target, 5))
        return generate(*arguments)

    monkeypatch.setattr(engine, "generate", watched)
    found = measure(engine, 5, 2)
    assert taken == [False, True] * 3
    for mode in ("eager", "graph"):
        median, least, most = found[mode]
        assert 0 < least <= median <= most


def test_the_graph_is_turned_on_again_after_an_error() -> None:
    kept = runner.compiled_prefill_pays
    with pytest.raises(KeyError), eagerly():
        raise KeyError
    assert kept is runner.compiled_prefill_pays


def test_the_page_shows_the_measurements() -> None:
    about = dict.fromkeys(("date", "hardware", "threads", "torch", "command", "repeats"), "x")
    row = {"tokens": 5, "eager": [14.0, 13.0, 20.0], "graph": [4.0, 3.5, 5.0]}
    page = markdown({"about": about, "rows": [row]})
    assert "| 5 | 14.0 (13.0–20.0) | 4.0 (3.5–5.0) | 3.50× |" in page
