"""Cells of uniform numbers: exact volumes, and an error where the assumptions do not hold."""

import pytest
import torch

from outrider.core import draw
from outrider.testing import partition


def test_volumes_of_a_threshold_are_exact():
    boxes = partition(lambda u_BJ: (u_BJ[:, 0] < 0.3125).long(), 1)
    assert boxes.volume_C.tolist() == [0.3125, 0.6875]


def test_a_sliver_of_one_number_is_found():
    boxes = partition(lambda u_BJ: (u_BJ[:, 0] < 2.0**-52).long(), 1)
    assert boxes.volume_C.tolist() == [2.0**-52, 1 - 2.0**-52]


def test_a_sliver_between_two_others_is_found():
    """Too thin for the coarse search, which finds one change where there are two."""

    def decide(u_BJ):
        first = (u_BJ[:, 0] >= 0.3).long() + (u_BJ[:, 0] >= 0.3 + 2.0**-40).long()
        return first * 2 + (u_BJ[:, 1] < 0.25 * (1 + first)).long()

    volumes = partition(decide, 2).volume_C.view(3, 2)
    assert volumes.sum(1).tolist() == pytest.approx([0.3, 2.0**-40, 0.7 - 2.0**-40], rel=1e-3)
    shares = (volumes / volumes.sum(1, keepdim=True))[:, 0]
    assert shares.tolist() == pytest.approx([0.25, 0.5, 0.75], rel=1e-12)


def test_a_program_without_numbers_is_one_cell():
    assert partition(lambda u_BJ: torch.zeros(len(u_BJ), dtype=torch.int64), 0).volume_C.item() == 1


def test_inverse_cdf_draws_have_the_weights_as_volumes():
    weights_V = torch.tensor([0.1, 0.0, 0.25, 0.65], dtype=torch.float64)
    boxes = partition(lambda u_BJ: draw(weights_V.expand(len(u_BJ), 4), u_BJ[:, 0]), 1)
    assert torch.allclose(boxes.volume_C, weights_V[[0, 2, 3]], rtol=0, atol=1e-15)


def test_later_cuts_depend_on_earlier_numbers():
    def decide(u_BJ):
        first = u_BJ[:, 0] < 0.25
        return first.long() * 2 + (u_BJ[:, 1] < torch.where(first, 0.5, 0.125)).long()

    volumes = sorted(partition(decide, 2).volume_C.tolist())
    assert volumes == sorted([0.125, 0.125, 0.75 * 0.125, 0.75 * 0.875])


def test_the_largest_winner_takes_all():
    """As in block verification: a number matters only where later ones fail."""
    h_J = torch.tensor([0.9, 0.5, 0.2], dtype=torch.float64)

    def decide(u_BJ):
        return ((u_BJ < h_J) * torch.arange(1, 4)).amax(1)

    boxes = partition(decide, 3)
    distribution = torch.zeros(4).double().scatter_add(0, decide(boxes.middle_CJ), boxes.volume_C)
    expected = [0.1 * 0.5 * 0.8, 0.9 * 0.5 * 0.8, 0.5 * 0.8, 0.2]
    assert distribution.tolist() == pytest.approx(expected, abs=1e-15)
    assert float(boxes.volume_C.sum()) == pytest.approx(1, abs=1e-15)


def test_decisions_that_mix_numbers_are_an_error():
    with pytest.raises(AssertionError, match="threshold function of its own uniform number"):
        partition(lambda u_BJ: u_BJ.argmax(1), 2)
