"""The benchmark of online adaptation: the ratio and its interval, the pairs of bursts, the page."""

import argparse
from dataclasses import replace
from typing import Any

import pytest
from tiny_models import engine_of, ragged_prompts, tiny

from benchmarks import online as benchmark
from benchmarks.online import BAR, arguments, markdown, measure, ratio
from recipes.online_shift import SETTINGS


def pair(online: float, frozen: float) -> dict[str, float]:
    """Bursts of 10 tokens that took these seconds."""
    found = {"online tokens": 10.0, "online seconds": online, "online α": 0.5}
    return found | {"frozen tokens": 10.0, "frozen seconds": frozen, "frozen α": 0.25}


def test_the_ratio_is_that_of_all_tokens_and_seconds() -> None:
    assert ratio([pair(2, 1), pair(2, 3)])["ratio"] == 1
    same = ratio([pair(2.0, 1.0)] * 5)
    assert same == {"ratio": 0.5, "low": 0.5, "high": 0.5}
    found = ratio([pair(2.0, 1.0), pair(1.0, 2.0)])
    assert (found["low"], found["high"]) == (0.5, 2.0)


def test_bursts_run_on_both_engines_and_one_of_them_learns() -> None:
    target, draft = tiny(vocab_size=11), tiny(seed=1, vocab_size=11)
    engines = [engine_of(target, draft, "speculative", max_batch_size=2) for _ in range(2)]
    bursts = [ragged_prompts([5, 7], 11), ragged_prompts([6, 4], 11)]
    settings = replace(SETTINGS, where="idle")
    found = measure(engines[0], engines[1], bursts, settings, num_tokens=12)
    assert len(found["pairs"]) == 2
    assert {p[f"{name} tokens"] for p in found["pairs"] for name in ("frozen", "online")} == {24.0}
    assert found["positions"] > 0


def report(**changes: Any) -> dict[str, Any]:
    names = ("date", "hardware", "threads", "torch", "command", "dtype", "cores", "machine_cores")
    about: dict[str, Any] = dict.fromkeys(names, "x") | {"load": 3.0, "note": "", "nice": 0}
    options = arguments([])
    about |= {n: getattr(options, n) for n in ("target", "compile", "gamma", "bursts", "burst")}
    about["tokens"] = options.tokens
    row = {"niceness": 10, "ratio": BAR, "low": 0.8, "high": 1.0, "steps": 3, "positions": 70}
    return {"about": about, "rows": [row | {"pairs": [pair(2.0, 1.0)]} | changes]}


def test_the_page_has_the_speeds_and_the_bar() -> None:
    text = markdown(report())
    assert "| 10 | 10 | 5 | 0.90 (0.80–1.00) | 3 | 70 | 0.250 and 0.500 |" in text
    assert "| niceness 10: at least 0.9 of the frozen engine | 0.90 | yes |" in text
    assert "| 0.89 | no |" in markdown(report(ratio=0.89))


def test_each_niceness_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measured(frozen: Any, online: Any, bursts: Any, settings: Any, num: int) -> dict[str, Any]:
        asked.append((settings.where, settings.niceness, len(bursts), num))
        return {"ratio": 1.0}

    engine = engine_of(tiny(vocab_size=11))
    monkeypatch.setattr(benchmark, "measure", measured)
    monkeypatch.setattr(benchmark, "load", lambda *_, **__: engine)
    monkeypatch.setattr(benchmark, "prompts_of", lambda *_: [[1, 2]] * 6)
    options: argparse.Namespace = arguments(["--bursts", "3", "--burst", "2"])
    assert [row["niceness"] for row in benchmark.run(options)["rows"]] == [10, 19]
    assert asked == [("process", 10, 3, 48), ("process", 19, 3, 48)]
