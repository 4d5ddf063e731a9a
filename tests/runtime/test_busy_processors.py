"""Fewer threads compute while other processes want the processors, and all of them afterwards."""

import threading
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
    ThreadTimes,
    Times,
    sharing_processors,
    thread_times,
    waiting,
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
        sleeper: share of the time that a thread waits which runs for a twentieth of it.
        now: seconds.
        slow: seconds of steps with more threads than processors are free.
    """

    def __init__(self, num_processors: int) -> None:
        self.num_processors, self.busy, self.sleeper = num_processors, 0, 0.0
        self.now = self.slow = self._ran = self._waited = self._slept = 0.0
        self.found = BusyProcessors(lambda: self.now, self.times)

    def times(self) -> Times:
        return {
            "caller": ThreadTimes(self._ran, 0.0),
            "worker": ThreadTimes(self._ran - self._waited, self._waited),
            "sleeper": ThreadTimes(self.now / 20, self._slept),
        }

    def run(self, seconds: float) -> list[int]:
        """Runs steps; the number of threads in each."""
        threads = []
        ends = self.now + seconds
        while self.now < ends:
            threads.append(self.found.num_threads(self.num_processors))
            surplus = max(0, threads[-1] + self.busy - self.num_processors)
            self._ran += STEP
            self._waited += surplus * STEP / 2
            self._slept += self.sleeper * STEP
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
    assert slow_first < 8 * 3 * WINDOW
    assert 0 < machine.slow < 12 * 3 * WINDOW
    machine.busy = 0
    assert machine.run(62)[-1] == 2
    machine.busy = 1  # later, trying is cheap again
    machine.run(1)
    machine.busy = 0
    assert machine.run(1.2)[-1] == 2


def test_steps_of_seconds_are_seen() -> None:
    """Those of a larger model beside another process; no step ends in between."""
    now = 0.0
    found = BusyProcessors(lambda: now, lambda: {"caller": ThreadTimes(now / 2, now / 2)})
    threads = []
    for _ in range(3):
        threads.append(found.num_threads(2))
        now += 5.0
    assert threads == [2, 2, 1]


def test_trying_becomes_rare_where_a_step_takes_longer_than_a_trial() -> None:
    """Beside a process of another session a step took that long."""
    now = waited = 0.0
    found = BusyProcessors(lambda: now, lambda: {"caller": ThreadTimes(now - waited, waited)})
    tries = 0
    while now < 60:
        slow = found.num_threads(2) == 2
        tries += slow
        waited += 0.3 * slow
        now += 0.3 if slow else STEP
    assert tries < 3 * 8


def test_a_pause_between_requests_says_nothing() -> None:
    """Threads of other engines may have waited in it, or none at all."""
    machine = Machine(2)
    machine.busy = 1
    machine.run(1)
    machine.busy, before = 0, machine.found._fewer
    machine.now += 30
    assert machine.run(STEP) == [1] == [2 - before]
    assert machine.run(0.2)[-1] == 2


def test_a_thread_that_seldom_runs_delays_nobody() -> None:
    """Such as one that reads requests, however long it waits for a processor."""
    machine = Machine(2)
    machine.sleeper = 0.4
    assert set(machine.run(10)) == {2}


def test_a_single_window_is_no_reason_to_give_way() -> None:
    machine = Machine(2)
    machine.run(1)
    machine.busy = 1
    machine.run(WINDOW)
    machine.busy = 0
    assert set(machine.run(1)) == {2}


@pytest.mark.parametrize(("most", "gives_way"), [(2, False), (3, True), (8, True)])
def test_the_more_threads_the_less_one_of_them_is_worth(most: int, gives_way: bool) -> None:
    """A waiting time of 0.15 costs less than one of two threads."""
    now = 0.0

    def times() -> Times:
        return {"caller": ThreadTimes(0.85 * now, 0.15 * now)}

    found, threads = BusyProcessors(lambda: now, times), set()
    while now < 3:
        threads.add(found.num_threads(most))
        now += STEP
    assert (min(threads) < most) == gives_way


def test_threads_that_begin_or_end_meanwhile_do_not_count() -> None:
    before = {"a": ThreadTimes(1.0, 1.0), "b": ThreadTimes(0.0, 0.0)}
    after = {"b": ThreadTimes(0.75, 0.125), "c": ThreadTimes(9.0, 9.0)}
    assert waiting(before, after, 1.0) == 0.125
    assert waiting(before, after, 2.0) is None  # b ran for less than half of the time


@pytest.mark.parametrize("times", [lambda: None, iter([{}, None, {}]).__next__])
def test_all_threads_compute_where_nobody_counts_how_long_they_wait(
    times: Callable[[], Times | None],
) -> None:
    """Not even where some counts are missing."""
    now = iter(range(1000))
    found = BusyProcessors(lambda: 0.1 * next(now), times)
    assert found.num_threads(3) == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found, "_times", lambda: None)
        assert {found.num_threads(3) for _ in range(50)} == {3}


def test_one_thread_is_never_counted() -> None:
    def times() -> Times:
        looks.append(1)
        return {}

    looks: list[int] = []
    now = iter(range(1000))
    found = BusyProcessors(lambda: float(next(now)), times)
    assert {found.num_threads(1) for _ in range(9)} == {1}
    assert len(looks) == 1  # the first one


def test_looking_takes_a_hundredth_of_the_time_at_most() -> None:
    now = 0.0

    def times() -> Times:
        nonlocal now
        now += 0.01
        looks.append(now)
        return {}

    looks: list[float] = []
    found = BusyProcessors(lambda: now, times)
    while now < 60:
        found.num_threads(2)
        now += STEP
    assert 50 < len(looks) < 65


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="nobody counts waiting here")
def test_linux_counts_how_long_threads_run_and_wait() -> None:
    before = thread_times()
    assert before is not None
    after = thread_times()
    assert after is not None
    own = str(threading.get_native_id())
    assert after[own].ran >= before[own].ran > 0
    assert after[own].waited >= before[own].waited >= 0


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
    found = BusyProcessors(lambda: 0.0, dict)
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
