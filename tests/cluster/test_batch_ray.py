"""Batches through Ray Data: the same results and errors as by worker processes."""

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider.cluster.batch.ray_data import Actor, Failed, through_ray
from outrider.core.errors import ModelLoadError, OutriderError, PromptError


@dataclass(frozen=True)
class Squares:
    """Squares numbers.

    Attributes:
        starts: whether there is a model.
        fails: at this number an error is raised.
    """

    starts: bool = True
    fails: int | None = None

    def __call__(self, slot: int) -> Callable[[int], int]:
        if not self.starts:
            raise ModelLoadError("no model here")
        return self.square

    def square(self, number: int) -> int:
        if number == self.fails:
            raise PromptError(f"{number} is no prompt")
        return number * number


def mapped(start: Squares, *tasks: int) -> list[object]:
    """What an actor makes of tasks."""
    batch = {"number": list(tasks), "task": [pickle.dumps(task) for task in tasks]}
    return [pickle.loads(result) for result in Actor(start)(batch)["result"]]


def test_an_actor_returns_errors_with_their_types() -> None:
    first, second = mapped(Squares(fails=3), 2, 3)
    assert first == 4
    assert isinstance(second, Failed)
    assert isinstance(second.error, PromptError)


def test_an_actor_that_does_not_start_fails_each_task() -> None:
    """Ray would start it again and again, and not say why."""
    for result in mapped(Squares(starts=False), 2, 3):
        assert isinstance(result, Failed)
        assert isinstance(result.error, ModelLoadError)


@pytest.mark.slow
def test_through_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs the extra 'cluster'")
    folders = str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))  # for Ray's own processes
    tasks = [(number, number) for number in range(4)]
    assert sorted(through_ray(Squares(), tasks, 1)) == [(n, n * n) for n in range(4)]
    failing: list[tuple[Squares, type[OutriderError]]] = [
        (Squares(fails=3), PromptError),
        (Squares(starts=False), ModelLoadError),
    ]
    for start, kind in failing:
        with pytest.raises(kind):
            list(through_ray(start, tasks, 1))
