"""Engines that generate at the same time, a step of one after a step of another."""

from typing import Any

import pytest
import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny

from benchmarks import side_by_side
from outrider import Sampling
from outrider.engine.scheduler import Scheduler


def test_the_engine_that_is_behind_steps_and_its_own_steps_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step takes a second. The target drafts for itself, so two rows emit 2 tokens by plain
    decoding, and 8 with drafts of three."""
    target = tiny(dtype=torch.float64)
    engines = {"plain": engine_of(target), "3": engine_of(target, target, γ=3)}
    stepped: list[Scheduler] = []
    step = Scheduler.step

    def logged(self: Scheduler) -> Any:
        progress = step(self)
        stepped.append(self)
        return progress

    monkeypatch.setattr(Scheduler, "step", logged)
    monkeypatch.setattr("time.perf_counter", lambda: float(len(stepped)))
    speeds = side_by_side.speeds(engines, ragged_prompts([4, 5]), greedy(12))
    assert speeds == {"plain": 2.0, "3": 8.0}
    assert "".join("p" if each is stepped[0] else "3" for each in stepped) == "p3pppp3pppp3ppp"


def test_the_error_of_a_row_is_raised() -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    engines = {"plain": engine_of(tiny())}
    sampling = Sampling(max_new_tokens=4, processors=[fail])
    with pytest.raises(ZeroDivisionError):
        side_by_side.speeds(engines, ragged_prompts([4]), sampling)
