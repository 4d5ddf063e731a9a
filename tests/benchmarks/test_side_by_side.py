"""Engines that generate at the same time, a few tokens of one after a few of another."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny

from benchmarks import side_by_side
from outrider import Sampling
from outrider.engine.scheduler import Scheduler


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> list[Scheduler]:
    """The scheduler of each step, which takes a second."""
    stepped: list[Scheduler] = []
    step = Scheduler.step

    def logged(self: Scheduler) -> Any:
        progress = step(self)
        stepped.append(self)
        return progress

    monkeypatch.setattr(Scheduler, "step", logged)
    monkeypatch.setattr("time.perf_counter", lambda: float(len(stepped)))
    return stepped


def shown(stepped: list[Scheduler]) -> str:
    """The steps, each as the number of its scheduler in the order of their first steps."""
    numbers = {id(each): number for number, each in enumerate(dict.fromkeys(stepped))}
    return "".join(str(numbers[id(each)]) for each in stepped)


def test_the_engine_that_is_behind_steps_and_its_own_steps_count(
    stepped: list[Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target drafts for itself, so two rows emit 2 tokens by plain decoding, and 8 with drafts
    of three."""
    monkeypatch.setattr(side_by_side, "BURST", 2)
    target = tiny(dtype=torch.float64)
    engines = {"plain": engine_of(target), "3": engine_of(target, target, γ=3)}
    sampling = replace(greedy(12), seed=0)
    speeds = side_by_side.speeds(engines, ragged_prompts([4, 5]), sampling)
    assert speeds == {"plain": 2.0, "3": 8.0}
    assert shown(stepped) == "011110111111011"


def test_engines_that_are_level_take_turns_at_random(stepped: list[Scheduler]) -> None:
    """Each goes on for sixteen tokens, after each of the others about as often."""
    target = tiny(dtype=torch.float64)
    engines = {name: engine_of(target) for name in "abc"}
    side_by_side.speeds(engines, ragged_prompts([4]), replace(greedy(96), seed=3))
    bursts = shown(stepped)[::16]
    assert shown(stepped) == "".join(each * 16 for each in bursts)
    laps = [bursts[lap : lap + 3] for lap in range(0, len(bursts), 3)]
    assert all(sorted(lap) == ["0", "1", "2"] for lap in laps)
    assert len(laps) == 6
    assert len(set(laps)) > 2


def test_the_error_of_a_row_is_raised() -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    engines = {"plain": engine_of(tiny())}
    sampling = Sampling(max_new_tokens=4, processors=[fail])
    with pytest.raises(ZeroDivisionError):
        side_by_side.speeds(engines, ragged_prompts([4]), sampling)
