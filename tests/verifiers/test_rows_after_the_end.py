"""An end token keeps its probability, whatever the rows after it hold.

Legend: B rows, N nodes, D drafted tokens (N-1), V vocabulary.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.core import Context, Draft, Drawn, Role, Verifier
from outrider.testing import SoftmaxDistribution
from outrider.verifiers import (
    BestOfK,
    Block,
    Coupled,
    Distinct,
    Mtad,
    Rejection,
    SampleMatch,
    Spectr,
    Traversal,
)

END, NUM_ROWS = 0, 20_000
P_V, Q_V = torch.tensor([0.3, 0.7]).double(), torch.tensor([0.9, 0.1]).double()
RULES: list[tuple[Any, Drawn]] = [
    (Rejection(), "iid"),
    (Block(), "iid"),
    (Traversal(), "iid"),
    (Traversal(), "distinct"),
    (Distinct(), "distinct"),
    (Spectr(), "iid"),
    (BestOfK(), "iid"),
    (SampleMatch(), "iid"),
    (Coupled(), "iid"),
]


@pytest.mark.parametrize(("rule", "drawn"), RULES, ids=lambda x: str(x))
def test_rule_alone(rule: Verifier, drawn: Drawn) -> None:
    """A chain of two tokens whose first may be an end token, with NaN after it and no mask.
    False-alarm probability 6e-7 per rule."""
    context = Context.start(
        [[1]] * NUM_ROWS, SoftmaxDistribution(), [0] * NUM_ROWS, range(NUM_ROWS)
    )
    u_BD = context.rng.uniform(Role.DRAFT, 2)
    tokens_BN = torch.cat([context.root_B[:, None], (u_BD >= Q_V[END]).long()], 1)
    p_BNV, q_BNV = (probs_V.expand(NUM_ROWS, 3, 2).clone() for probs_V in (P_V, Q_V))
    ended_B = tokens_BN[:, 1] == END
    p_BNV[ended_B, 1:] = q_BNV[ended_B, 1:] = torch.nan
    verdict = rule(Draft.chain(tokens_BN, None, q_BNV, drawn), p_BNV, context.rng)
    first_B = torch.where(verdict.num_accepted_B > 0, tokens_BN[:, 1], verdict.next_token_B)
    share = float((first_B == END).double().mean())
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / NUM_ROWS) ** 0.5


def test_a_beam_that_ended_does_not_affect_the_others() -> None:
    """MTAD compares every beam with the best one of its depth."""
    tokens_BN = torch.tensor([[1, END, 1, 1, 1]])
    parents_BN = torch.tensor([[-1, 0, 0, 1, 2]])
    everything_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
    q_BNV = torch.full((1, 5, 2), 0.5).double()
    draft = Draft(tokens_BN, parents_BN, everything_BN, q_BNV, "searched")
    p_BNV = torch.tensor([0.2, 0.8]).double().expand(1, 5, 2).clone()
    context = Context.start([[1]], SoftmaxDistribution(), [0], [0])
    healthy = Mtad(0.5)(draft, p_BNV, context.rng)
    poisoned_BNV = q_BNV.clone()
    p_BNV[:, [1, 3]] = poisoned_BNV[:, [1, 3]] = torch.nan
    found = Mtad(0.5)(replace(draft, probs_BNV=poisoned_BNV), p_BNV, context.rng)
    assert found.path_BD[0, :2].tolist() == healthy.path_BD[0, :2].tolist() == [2, 4]
    assert int(found.num_accepted_B) == int(healthy.num_accepted_B) == 2
