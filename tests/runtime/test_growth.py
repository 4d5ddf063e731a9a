"""A tree grown level by level has the logits of one that is scored at once.

Legend: B rows, N nodes of a level, M nodes so far, V vocabulary.
"""

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, ragged_prompts, tiny
from torch import Tensor

from outrider.core import Context, Draft
from outrider.runtime import Nodes
from outrider.testing import SoftmaxDistribution

PARENTS = [-1, 0, 0, 0, 1, 1, 2, 3, 4, 7]
LEVELS = [(0, 1), (1, 4), (4, 8), (8, 10)]


def grown(family: str, lengths: list[int], **settings: int) -> tuple[Tensor, Tensor]:
    model = tiny(family, **settings)
    context = Context.start(
        ragged_prompts(lengths), SoftmaxDistribution(), [0] * len(lengths), range(len(lengths))
    )
    B, M = len(lengths), len(PARENTS)
    generator = torch.Generator().manual_seed(0)
    tokens_BM = torch.randint(VOCAB, (B, M), generator=generator)
    tokens_BM[:, 0] = context.root_B
    parents_BM = torch.tensor(PARENTS).expand(B, M)
    mask_BM = torch.ones_like(tokens_BM, dtype=torch.bool)
    draft = Draft(tokens_BM, parents_BM, mask_BM, None, "chosen")
    with torch.inference_mode():
        at_once_BMV = model.score(model.start(context), draft).logits_BNV
        cache = model.start(context)
        levels = [
            model.extend(
                cache,
                tokens_BM[:, first:last],
                Nodes(draft.ancestors_BNN[:, first:last, :last], draft.depth_BN[:, :last]),
            )
            for first, last in LEVELS
        ]
    return torch.cat(levels, 1), at_once_BMV


def check(grown_BMV: Tensor, at_once_BMV: Tensor) -> None:
    """Equal in float32 but for its rounding: 1e-5 of the largest logit."""
    largest = float(at_once_BMV.abs().max())
    assert float((grown_BMV - at_once_BMV).abs().max()) <= 1e-5 * largest


@pytest.mark.parametrize("lengths", [[5, 5], [3, 9, 1]], ids=["uniform", "ragged"])
@pytest.mark.parametrize("family", FAMILIES)
def test_level_by_level_is_at_once(family: str, lengths: list[int]) -> None:
    check(*grown(family, lengths))


def test_beyond_a_sliding_window() -> None:
    check(*grown("mistral", [40, 23]))
