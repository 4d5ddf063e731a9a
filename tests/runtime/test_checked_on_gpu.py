"""Kernels for GPUs give way to torch where they fail or compute something else."""

from collections.abc import Callable

import pytest

from outrider.core.errors import OutriderWarning
from outrider.runtime.kernels import checked_on_gpu
from outrider.runtime.kernels.checked_on_gpu import kernel_or_torch


def by_torch(x: int) -> int:
    return x + 1


def kernel(x: int) -> int:
    return 1 + x


def wrong(x: int) -> int:
    return x


def agree(found: Callable[[int], int], wanted: Callable[[int], int]) -> bool:
    return found(3) == wanted(3)


def fails() -> Callable[[int], int]:
    raise RuntimeError("no C compiler\nand a long trace")


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_on_gpu, "find_spec", lambda name: name)


def test_a_kernel_that_agrees() -> None:
    assert kernel_or_torch(lambda: kernel, by_torch, agree, "adds") is kernel


@pytest.mark.parametrize(
    ("make", "reason"),
    [(fails, "RuntimeError: no C compiler$"), (lambda: wrong, "it computes something else$")],
)
def test_a_kernel_that_does_not(make: Callable[[], Callable[[int], int]], reason: str) -> None:
    with pytest.warns(OutriderWarning, match=f"the kernel that adds .*{reason}"):
        assert kernel_or_torch(make, by_torch, agree, "adds") is by_torch


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_on_gpu, "find_spec", lambda name: None)
    assert kernel_or_torch(fails, by_torch, agree, "adds") is by_torch
