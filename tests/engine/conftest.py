"""Fixtures that note what the scheduler does."""

from typing import Any

import pytest

from outrider.engine import Row
from outrider.engine.running_batch import RunningBatch


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[RunningBatch]:
    """The running batches that are made."""
    made: list[RunningBatch] = []
    init = RunningBatch.__init__

    def noting(self: RunningBatch, *args: Any, **settings: Any) -> None:
        init(self, *args, **settings)
        made.append(self)

    monkeypatch.setattr(RunningBatch, "__init__", noting)
    return made


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[list[Row]]:
    """The rows of each round."""
    seen: list[list[Row]] = []
    step = RunningBatch.step

    def noting(self: RunningBatch) -> None:
        seen.append(list(self.rows))
        step(self)

    monkeypatch.setattr(RunningBatch, "step", noting)
    return seen
