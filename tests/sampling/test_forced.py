"""Forced tokens appear at their position in the output, in chains and trees, and nowhere else."""

import pytest
import torch

from outrider.core import Context, Draft, Lengths, Prefix
from outrider.core.errors import InvalidParameterError
from outrider.sampling import Sampling, Warp
from outrider.testing import SoftmaxDistribution

V = 9
PARENTS = [-1, 0, 0, 1, 3, 2]


def warped(forced: list[dict[int, int]], output: list[int], temperature: float) -> torch.Tensor:
    """Distributions at the nodes of a tree, for rows with the given numbers of output tokens, (B,
    N, V)."""
    B = len(forced)
    context = Context.start(
        [[1] * (b + 1) for b in range(B)], SoftmaxDistribution(), [0] * B, range(B)
    )
    context.append(torch.full((B, max(output)), 2), Lengths.of(output))
    tokens_BN = torch.full((B, len(PARENTS)), 3)
    parents_BN = torch.tensor(PARENTS).expand(B, -1)
    draft = Draft(tokens_BN, parents_BN, torch.ones_like(tokens_BN).bool(), None, "chosen")
    generator = torch.Generator().manual_seed(0)
    logits_BNV = torch.randn(B, len(PARENTS), V, generator=generator)
    samplings = [
        Sampling(temperature=temperature, forced=f, logit_bias={4: -torch.inf}) for f in forced
    ]
    return Warp(samplings, V)(logits_BNV, Prefix.of_draft(context, draft))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_token_is_forced_at_its_position_only(temperature: float) -> None:
    """Node i has output position ``output + depth``; a forbidden token can be forced."""
    forced = [{3: 4, 4: 8}, {}, {0: 5}]
    output = [2, 0, 0]
    p_BNV = warped(forced, output, temperature)
    free_BNV = warped([{}, {}, {}], output, temperature)
    depth = [0, 1, 1, 2, 3, 2]
    for b, row in enumerate(forced):
        for i in range(len(PARENTS)):
            token = row.get(output[b] + depth[i])
            if token is None:
                torch.testing.assert_close(p_BNV[b, i], free_BNV[b, i])
            else:
                wanted_V = torch.nn.functional.one_hot(torch.tensor(token), V)
                torch.testing.assert_close(p_BNV[b, i], wanted_V.to(p_BNV))


def test_a_token_outside_the_vocabulary() -> None:
    with pytest.raises(InvalidParameterError, match=r"forced=\{0: 9\}: token ids go up to 8"):
        Warp([Sampling(forced={0: V})], V)
