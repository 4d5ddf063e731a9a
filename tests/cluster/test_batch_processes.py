"""Worker processes: deaths cost nothing, errors reach the caller."""

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from outrider.cluster.batch import processes
from outrider.cluster.batch.processes import WorkerDiedError, in_processes
from outrider.core.errors import PromptError


@dataclass(frozen=True)
class Squares:
    """Squares numbers; the process dies at some of them, the first time or always.

    Attributes:
        folder: notes the deaths.
        dies_once, dies_always: at these numbers.
        fails: at these numbers an error is raised.
        starts: how many processes die before they are ready.
    """

    folder: Path
    dies_once: frozenset[int] = frozenset()
    dies_always: frozenset[int] = frozenset()
    fails: frozenset[int] = frozenset()
    starts: int = 0

    def __call__(self, slot: int) -> Callable[[int], int]:
        if self.started() < self.starts:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.square

    def started(self) -> int:
        """How many processes started before this one; processes may start at the same time."""
        for before in count():
            with suppress(FileExistsError):
                (self.folder / f"start{before}").touch(exist_ok=False)
                return before
        raise AssertionError("unreachable")

    def square(self, number: int) -> int:
        died = self.folder / f"died{number}"
        if number in self.dies_always or (number in self.dies_once and not died.exists()):
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if number in self.fails:
            raise PromptError(f"{number} is no prompt")
        return number * number


def test_workers_that_die_are_replaced_and_no_task_is_lost(tmp_path: Path) -> None:
    squares = Squares(tmp_path, dies_once=frozenset((0, 5)), starts=1)
    told: list[list[int]] = []
    results = list(in_processes(squares, ((n, n) for n in range(12)), 2, told.append))
    assert sorted(results) == [(n, n * n) for n in range(12)]
    assert len(told) == 1 + 3, "the workers at the start, and after each death"
    for pid in told[-1]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_a_task_at_which_workers_always_die_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MOST_DEATHS", 2)
    squares = Squares(tmp_path, dies_always=frozenset((1,)))
    results: list[tuple[int, int]] = []
    found = in_processes(squares, ((n, n) for n in range(6)), 2)
    with pytest.raises(WorkerDiedError, match="2 workers died at block 1"):
        results.extend(found)
    assert Counter(dict(results)) == Counter({n: n * n for n in (0, 2, 3, 4, 5)})


def test_workers_that_never_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MOST_DEATHS", 2)
    squares = Squares(tmp_path, starts=1000)
    with pytest.raises(WorkerDiedError, match="before they were ready, the last one by signal 9"):
        list(in_processes(squares, [(0, 0)], 1))


def test_an_error_reaches_the_caller_with_its_type(tmp_path: Path) -> None:
    squares = Squares(tmp_path, fails=frozenset((2,)))
    with pytest.raises(PromptError, match="2 is no prompt"):
        list(in_processes(squares, ((n, n) for n in range(3)), 1))


def test_no_tasks(tmp_path: Path) -> None:
    assert list(in_processes(Squares(tmp_path), [], 1)) == []


@pytest.mark.slow
def test_random_kills_from_outside(tmp_path: Path) -> None:
    choose, pids = random.Random(0), []
    results = []
    tasks = ((n, n) for n in range(300))
    for found in in_processes(
        Squares(tmp_path), tasks, 2, lambda now: pids.__setitem__(slice(None), now)
    ):
        results.append(found)
        if found[0] % 60 == 30:
            os.kill(choose.choice(pids), signal.SIGKILL)
    assert sorted(results) == [(n, n * n) for n in range(300)]
