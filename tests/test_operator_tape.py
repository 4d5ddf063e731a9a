"""The stand-in for CUDA graphs refers to tensors by address, and rejects what capture rejects."""

from collections.abc import Callable

import pytest
import torch
from operator_tape import Tape, record_on_tape
from torch import Tensor


def test_replays_on_the_same_tensors() -> None:
    x_N, sum_N = torch.tensor([1.0, 2.0]), torch.zeros(2)

    def run() -> list[Tensor]:
        sum_N.add_(x_N)
        head, tail = (x_N.view(2, 1) * 10).split(1)
        return [torch.cat([tail, head]).squeeze(1), sum_N[1:]]

    replay, (swapped, last) = record_on_tape(run)
    assert (swapped.tolist(), last.tolist()) == ([20, 10], [2])
    x_N.copy_(torch.tensor([5.0, 6.0]))
    assert swapped.tolist() == [20, 10]
    replay()
    assert (swapped.tolist(), last.tolist(), sum_N.tolist()) == ([60, 50], [8], [6, 8])


def test_views_do_not_count_as_computing() -> None:
    x_N = torch.ones(2)
    with Tape() as tape:
        (x_N.view(2, 1).expand(2, 3)[:, 1:] * 10).sum(1).unsqueeze(0)
        x_N.add_(1)
    assert tape.num_computing == 3


def test_branches_taken_in_python_are_fixed() -> None:
    """As with a CUDA graph, another branch would need another recording."""
    x_N, turns = torch.ones(2), iter([2, 3])
    replay, (result,) = record_on_tape(lambda: [x_N * next(turns)])
    replay()
    assert result.tolist() == [2, 2]
    assert next(turns) == 3


@pytest.mark.parametrize(
    "look",
    [
        lambda x_N: x_N[0].item(),
        lambda x_N: bool((x_N > 0).all()),
        lambda x_N: torch.equal(x_N, x_N),
        lambda x_N: x_N[x_N > 0],
        lambda x_N: x_N.nonzero(),
        lambda x_N: x_N.unique(),
        lambda x_N: x_N.masked_select(x_N > 0),
        lambda x_N: x_N + torch.tensor([1.0, 2.0]),
    ],
)
def test_reading_on_the_host_and_copying_from_it_are_errors(
    look: Callable[[Tensor], object],
) -> None:
    x_N = torch.tensor([1.0, 2.0])
    with pytest.raises(RuntimeError, match="not permitted while recording"):
        record_on_tape(lambda: [look(x_N)])  # type: ignore[list-item]
