"""Fewer threads compute while other processes want the processors, and all of them afterwards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tiny_models import engine_of, tiny

from outrider.runtime import busy_processors
from outrider.runtime.busy_processors import (
    WINDOW,
    BusyProcessors,
    sharing_processors,
    waited_seconds,
)
from outrider.runtime.executors.prepare import prepare
from outrider.runtime.kernels import ignores_threads

STEP = 0.01  # seconds of a step, four of which wait in vain for a fifth


class Machine:
    """A machine on which other processes come and go.

    Args:
        num_processors: of the machine.

    Attributes:
        busy: how many of them other processes want.
        now: seconds.
        slow: seconds of steps with more threads than processors are free.
    """

    def __init__(self, num_processors: int) -> None:
        self.num_processors, self.busy = num_processors, 0
        self.now = self.slow = self._waited = 0.0
        self.found = BusyProcessors(lambda: self.now, lambda: self._waited)

    def run(self, seconds: float) -> list[int]:
        """Runs steps; the number of threads in each."""
        threads = []
        ends = self.now + seconds
        while self.now < ends:
            threads.append(self.found.num_threads(self.num_processors))
            surplus = max(0, threads[-1] + self.busy - self.num_processors)
            self._waited += surplus * STEP / 2
            self.slow += STEP * (surplus > 0)
            self.now += STEP
        return threads


def test_all_threads_compute_where_nobody_else_does() -> None:
    assert set(Machine(4).run(10)) == {4}


@pytest.mark.parametrize("busy", [1, 2, 3])
def test_threads_give_way_to_other_processes_and_come_back(busy: int) -> None:
    """Each within a tenth of a second, one after the other; and all within two pauses of a second
    and a little, once the processors are free again."""
    machine = Machine(4)
    machine.run(1)
    machine.busy = busy
    threads = machine.run(0.2 * busy)
    assert threads[0] == 4
    assert threads[-1] == 4 - busy
    machine.busy = 0
    assert machine.run(1.5 + 0.2 * busy)[-1] == 4


def test_one_thread_is_left_however_busy_the_processors_are() -> None:
    machine = Machine(2)
    machine.busy = 2
    assert set(machine.run(5)[20:]) == {1}


def test_trying_one_more_thread_becomes_rare() -> None:
    """While another process stays: after 1, 2, 4, … seconds, a minute at most."""
    machine = Machine(2)
    machine.busy = 1
    machine.run(60)
    slow_first, machine.slow = machine.slow, 0.0
    machine.run(600)
    assert slow_first < 8 * 2 * WINDOW
    assert 0 < machine.slow < 12 * 2 * WINDOW
    machine.busy = 0
    assert machine.run(62)[-1] == 2
    machine.busy = 1  # later, trying is cheap again
    machine.run(1)
    machine.busy = 0
    assert machine.run(1.2)[-1] == 2


def test_a_pause_between_requests_says_nothing() -> None:
    """Threads of other engines may have waited in it, or none at all."""
    machine = Machine(2)
    machine.busy = 1
    machine.run(1)
    machine.busy, before = 0, machine.found._fewer
    machine.now += 30
    assert machine.run(STEP) == [1] == [2 - before]
    assert machine.run(0.2)[-1] == 2


@pytest.mark.parametrize("waited", [lambda: None, iter([1.0, None, 900.0]).__next__])
def test_all_threads_compute_where_nobody_counts_how_long_they_wait(
    waited: Callable[[], float | None],
) -> None:
    """Not even where some counts are missing."""
    now = iter(range(1000))
    found = BusyProcessors(lambda: 0.1 * next(now), waited)
    assert found.num_threads(3) == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found, "_waited", lambda: None)
        assert {found.num_threads(3) for _ in range(50)} == {3}


def test_one_thread_is_never_counted() -> None:
    def waited() -> float:
        looks.append(1)
        return 0.0

    looks: list[int] = []
    now = iter(range(1000))
    found = BusyProcessors(lambda: float(next(now)), waited)
    assert {found.num_threads(1) for _ in range(9)} == {1}
    assert len(looks) == 1  # the first one


def test_looking_takes_a_hundredth_of_the_time_at_most() -> None:
    now = 0.0

    def waited() -> float:
        nonlocal now
        now += 0.01
        looks.append(now)
        return 0.0

    looks: list[float] = []
    found = BusyProcessors(lambda: now, waited)
    while now < 60:
        found.num_threads(2)
        now += STEP
    assert 50 < len(looks) < 65


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="nobody counts waiting here")
def test_linux_counts_how_long_threads_wait() -> None:
    before = waited_seconds()
    assert before is not None
    after = waited_seconds()
    assert after is not None
    assert after >= before >= 0


@pytest.mark.parametrize(("processors", "others", "most"), [(8, 0, 3), (8, 2, 3), (4, 2, 2)])
@pytest.mark.parametrize("looks", [True, False])
def test_known_processes_are_left_processors_at_once(
    processors: int, others: int, most: int, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more where it is looked for others, since threads have waited before."""
    asked: list[int] = []

    @contextmanager
    def at_most_threads(num: int) -> Iterator[None]:
        asked.append(num)
        yield

    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(busy_processors, "num_processors", lambda: processors)
    monkeypatch.setattr(busy_processors, "at_most_threads", at_most_threads)
    found = BusyProcessors(lambda: 0.0, lambda: 0.0)
    found._fewer = 1
    monkeypatch.setattr(busy_processors, "_PROCESSORS", found)
    with sharing_processors(others, looks=looks):
        assert asked == [most - looks]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engines_look_where_the_kernels_compute_all_products(dtype: torch.dtype) -> None:
    """Of the target and of the draft; other products may have other bits with other threads."""
    target, draft = tiny(dtype=dtype), tiny(seed=1, dtype=dtype)
    assert not engine_of(target, draft)._ignores_threads
    prepare(target, "auto", own=True)
    assert not engine_of(target, draft)._ignores_threads
    prepare(draft, "auto", own=True)
    assert engine_of(target, draft)._ignores_threads
    assert not engine_of(target, None, "medusa")._ignores_threads


@pytest.mark.parametrize(
    ("family", "settings", "expected"),
    [
        ("llama", {"own": True}, True),
        ("llama", {"own": False}, False),
        ("llama", {"exact": True}, True),
        ("gpt2", {"own": True}, False),
        ("mixtral", {"own": True}, False),
    ],
)
def test_which_models_compute_by_kernels_alone(
    family: str, settings: dict[str, bool], expected: bool
) -> None:
    model = tiny(family)
    prepare(model, "auto", **settings)
    assert ignores_threads(model.module) == expected
