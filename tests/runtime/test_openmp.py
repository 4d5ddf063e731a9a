"""OpenMP's threads end where another thread may go on."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from tiny_models import engine_of, tiny

from outrider import Sampling
from outrider.runtime import openmp

HAS_GNU = openmp.release_threads is not int
COUNT = """
import os, threading, time
import torch
from outrider.runtime.openmp import release_threads
torch.set_num_threads(3)
numbers = torch.randn(1000, 1000)
def num_threads():
    return len(os.listdir("/proc/self/task"))
def compute():
    before = num_threads()
    numbers.sigmoid()
    during = num_threads()
    release_threads()
    deadline = time.monotonic() + 60
    while num_threads() > before and time.monotonic() < deadline:  # they end by themselves
        pass
    after = num_threads()
    numbers.sigmoid()
    print(during - before, after - before, num_threads() - before)
    release_threads()
compute()
thread = threading.Thread(target=compute)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not HAS_GNU, reason="torch has another OpenMP runtime than GNU's")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc to count threads in")
def test_the_threads_of_a_pool_end_and_start_anew() -> None:
    found = subprocess.run(
        [sys.executable, "-c", COUNT], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.split("\n")[:2] == ["2 0 2", "2 0 2"]


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A list that grows with each release."""
    found: list[int] = []
    monkeypatch.setattr("outrider.engine.dispatcher.release_threads", lambda: found.append(1))
    return found


def test_a_call_releases_its_threads_at_its_end(releases: list[int]) -> None:
    engine = engine_of(tiny(), None, "plain", 3)
    engine.generate([[1, 2, 3]], Sampling(max_new_tokens=4))
    assert len(releases) == 1
    stream = engine.stream([1, 2, 3], Sampling(max_new_tokens=4, ignore_eos=True))
    next(stream)
    assert len(releases) == 1
    stream.close()
    assert len(releases) == 2


def test_a_thread_releases_its_threads_where_another_one_waits(releases: list[int]) -> None:
    engine = engine_of(tiny(), None, "plain", 3, max_batch_size=2)
    begun, waits = Event(), Event()

    class Holding:
        """A logits processor that lets no step end before the other thread waits."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            begun.set()
            assert waits.wait(60)
            return scores

    holding = Sampling(max_new_tokens=2, ignore_eos=True, processors=[Holding()])
    first = Thread(target=engine.generate, args=([[1, 2, 3]], holding))
    first.start()
    assert begun.wait(60)
    second = Thread(
        target=engine.generate, args=([[4, 5]], Sampling(max_new_tokens=6, ignore_eos=True))
    )
    second.start()
    while engine._dispatcher._num_waiting == 0:
        assert first.is_alive()  # it gives up after a minute
    waits.set()
    first.join()
    second.join()
    assert len(releases) >= 3  # besides one at the end of each call


def test_threads_that_take_turns_release_theirs(releases: list[int]) -> None:
    engine = engine_of(tiny(), None, "plain", 3)
    stream = engine.stream([1, 2, 3], Sampling(max_new_tokens=9, ignore_eos=True))
    # Both threads live throughout, since a new thread may get the id of one that has ended.
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for thread in (first, second) * 3:
            thread.submit(next, stream).result()
    assert len(releases) == 5


@pytest.mark.skipif(not HAS_GNU, reason="torch has another OpenMP runtime than GNU's")
@pytest.mark.parametrize(("most", "expected"), [(0, 1), (1, 1), (2, 2), (3, 3), (9, 3)])
def test_the_calling_thread_alone_computes_with_fewer_threads(most: int, expected: int) -> None:
    """Until the end of the block, however it ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(1) as other:
            other.submit(torch.get_num_threads).result()
            with suppress(KeyError), openmp.at_most_threads(most):
                assert torch.get_num_threads() == expected
                assert other.submit(torch.get_num_threads).result() == 3
                raise KeyError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(openmp._set_mkl_threads is int, reason="torch comes without MKL")
@pytest.mark.skipif(not HAS_GNU, reason="torch has another OpenMP runtime than GNU's")
def test_mkl_computes_with_fewer_threads_too() -> None:
    """Until the end of the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with suppress(KeyError), openmp.at_most_threads(2):
            inside = openmp._set_mkl_threads(2)
            raise KeyError
        assert (inside, openmp._set_mkl_threads(3)) == (2, 3)
    finally:
        torch.set_num_threads(before)


def test_all_threads_compute_without_gnus_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_RUNTIME", None)
    before = torch.get_num_threads()
    with openmp.at_most_threads(1):
        assert torch.get_num_threads() == before
