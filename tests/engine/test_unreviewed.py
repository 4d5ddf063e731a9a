"""The tokens that a review of the draft model compares."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.engine.reviewing import Unreviewed
from outrider.verifiers import Greedy, Rejection


class Reviewer:
    """A drafter that finds each token as probable as 0.2; or cannot tell."""

    capabilities = SimpleNamespace(reviews=True)
    refuses = False

    def review(self, state: Any, context: Any, num_tokens: int) -> Tensor | None:
        num_rows: int = context
        return None if self.refuses else torch.full((num_rows, num_tokens), 0.2)


def round_of(num_rows: int, num_nodes: int = 1) -> Any:
    """A round that emits token 1 in each row, of probability 0.4."""
    return SimpleNamespace(
        draft=SimpleNamespace(num_nodes=num_nodes),
        p_BNV=torch.tensor([0.6, 0.4]).expand(num_rows, num_nodes, 2),
        emitted_BK=torch.ones(num_rows, 1, dtype=torch.int64),
    )


@pytest.fixture
def reviewer() -> Reviewer:
    return Reviewer()


@pytest.fixture
def unreviewed(reviewer: Reviewer) -> Unreviewed:
    return Unreviewed(reviewer)  # type: ignore[arg-type]


def test_sampled_tokens_are_compared_with_the_targets_probabilities(
    unreviewed: Unreviewed,
) -> None:
    for _ in range(3):
        unreviewed.add(round_of(2), Rejection(), drafted=False)
    labels_BK = unreviewed.review(None, 2)  # type: ignore[arg-type]
    assert labels_BK is not None
    torch.testing.assert_close(labels_BK, torch.full((2, 3), 0.5))
    assert unreviewed.num == 0


def test_tokens_of_other_rows_are_not_compared(unreviewed: Unreviewed) -> None:
    unreviewed.add(round_of(2), Rejection(), drafted=False)
    unreviewed.change_rows()
    unreviewed.add(round_of(1), Rejection(), drafted=False)
    labels_BK = unreviewed.review(None, 1)  # type: ignore[arg-type]
    assert labels_BK is not None
    assert labels_BK.shape == (1, 1)


@pytest.mark.parametrize(("num_nodes", "drafted"), [(1, True), (3, False)])
def test_a_draft_ends_what_came_before(
    unreviewed: Unreviewed, num_nodes: int, drafted: bool
) -> None:
    unreviewed.add(round_of(1), Greedy(), drafted=False)
    assert unreviewed.num == 1
    unreviewed.add(round_of(1, num_nodes), Greedy(), drafted=drafted)
    assert unreviewed.num == 0


def test_a_refusal_holds_until_other_rows_run(reviewer: Reviewer, unreviewed: Unreviewed) -> None:
    reviewer.refuses = True
    unreviewed.add(round_of(1), Greedy(), drafted=False)
    assert unreviewed.review(None, 1) is None  # type: ignore[arg-type]
    unreviewed.add(round_of(1), Greedy(), drafted=False)
    assert unreviewed.num == 0
    unreviewed.change_rows()
    unreviewed.add(round_of(1), Greedy(), drafted=False)
    assert unreviewed.num == 1
