"""A program that computes slots, positions and masks of trees runs over them as the eager model.

Legend: B rows, N query tokens, M nodes after the committed tokens, V vocabulary.
"""

import pytest
import torch
from interpreted_graphs import interpreted
from tiny_models import ragged_prompts, tiny
from torch import Tensor

from outrider.runtime import HFModel, Nodes
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.forward_batch import ForwardBatch
from outrider.runtime.prefill import unsampled_context

PARENTS = [[-1, -1, 0, 2, 1, 1], [-1, 0, 1, 1, 0, -1]]


def levels(rows: int) -> list[tuple[Tensor, Nodes]]:
    """Query tokens and nodes of two passes, the second of which goes on from the first."""
    above = torch.zeros(rows, 6, 6, dtype=torch.bool)
    for b in range(rows):
        for i, parent in enumerate(PARENTS[b % 2]):
            above[b, i] = above[b, parent] if parent >= 0 else False
            above[b, i, i] = True
    tokens_BM = torch.arange(6 * rows).view(rows, 6) % 7
    depth_BM = above.sum(2) - 1
    first, second = Nodes(above[:, :2, :2], depth_BM[:, :2]), Nodes(above[:, 2:], depth_BM)
    return [(tokens_BM[:, :2], first), (tokens_BM[:, 2:], second)]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("lengths", [[9], [5, 5], [3, 9]])
def test_logits_equal_those_of_the_eager_model(family: str, lengths: list[int]) -> None:
    """With sliding windows and without, in rows of one length and of several."""
    model = tiny(family)
    executor = CompiledExecutor(model.module, model.spec, "model", interpreted)
    found = []
    for compiled in (None, executor):
        model.compiled = compiled
        found.append(logits_of(model, lengths))
    assert any(each.kind == "tree" for each, program in executor._programs.items() if program)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def logits_of(model: HFModel, lengths: list[int]) -> list[Tensor]:
    """Of the query tokens of both passes."""
    rows = len(lengths)
    context = unsampled_context(model, ragged_prompts([max(lengths)])[0], rows)
    cache = model.start(context)
    for b, length in enumerate(lengths):
        cache.sequence_lengths.host[b] = length - 1
    cache.sequence_lengths = type(cache.sequence_lengths).of(cache.lengths)
    batches = (ForwardBatch(cache, tokens_BN, nodes) for tokens_BN, nodes in levels(rows))
    return [model.forward(batch).logits_BNV for batch in batches]
