"""The tree plan of a pair: acceptance by rank, pass times, and the planned tree."""

import pytest
import torch
from tiny_models import VOCAB, full_logits, ragged_prompts, tiny
from toy_trees import expected_tokens

from outrider import Sampling
from outrider.drafters.tree.topology import Topology
from outrider.lab.analysis.tree_plan import best_tree
from outrider.lab.tree_plan import count_ranks, plan_for_pair
from outrider.runtime import HFModel

GREEDY = Sampling(temperature=0)


def ranks_by_definition(
    target: HFModel, draft: HFModel, prompt: list[int], width: int, num_rounds: int
) -> list[int]:
    """Counts the rank of the target's argmax in the draft's order, round by round."""
    counts, tokens = [0] * (width + 1), list(prompt)
    for _ in range(num_rounds):
        token = int(full_logits(target.module, tokens)[-1].argmax())
        order = full_logits(draft.module, tokens)[-1].argsort(descending=True).tolist()
        rank = min(order.index(token), width)
        counts[rank] += 1
        tokens.append(token)
        if rank < width:
            tokens.append(int(full_logits(target.module, tokens)[-1].argmax()))
    return counts


def test_ranks_are_counted_as_defined() -> None:
    """Greedy rounds of ragged prompts, against forward passes over the whole sequence."""
    target, draft = tiny(seed=0, std=0.2), tiny(seed=0, std=0.2)
    with torch.no_grad():
        for weight in draft.module.parameters():
            weight += 0.04 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    prompts, width, num_rounds = ragged_prompts([4, 9, 6]), 7, 12
    with torch.inference_mode():
        counts = count_ranks(target, draft, prompts, GREEDY, width, num_rounds)
        expected = [ranks_by_definition(target, draft, p, width, num_rounds) for p in prompts]
    assert counts == [sum(column) for column in zip(*expected, strict=True)]
    assert sum(counts) == 3 * num_rounds
    assert sum(count > 0 for count in counts) > 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_always_accepts_its_own_first_draw(temperature: float) -> None:
    model = tiny(seed=0)
    with torch.inference_mode():
        sampling = Sampling(temperature=temperature)
        counts = count_ranks(model, model, ragged_prompts([3, 5]), sampling, 4, 10)
    assert counts == [20, 0, 0, 0, 0]


def test_rows_end_at_an_end_token_or_a_full_context() -> None:
    """A finished row is no longer counted; the other rows go on."""
    model = tiny(seed=0)
    prompts = ragged_prompts([3, 100, 60])
    with torch.inference_mode():
        counts = count_ranks(model, model, prompts, GREEDY, 2, 1000)
        ended = count_ranks(model, model, prompts, GREEDY, 2, 1000, frozenset(range(VOCAB)))
    room = [-(-(128 - 2 - len(prompt)) // 2) for prompt in prompts]
    assert counts == [sum(room), 0, 0]
    assert ended == [3, 0, 0]


def test_the_plan_of_a_pair() -> None:
    """The plan is consistent with the measurements."""
    target, draft = tiny(seed=0), tiny(seed=1)
    with torch.inference_mode():
        plan = plan_for_pair(
            target,
            draft,
            ragged_prompts([4, 9]),
            Sampling(),
            num_nodes=20,
            depth=4,
            width=6,
            num_rounds=40,
        )
    assert plan.num_positions == 80
    assert len(plan.acceptance) == 6
    assert list(plan.target_seconds) == [1, 2, 4, 8, 12, 16, 20]
    assert min(plan.target_seconds.values()) > 0
    assert plan.draft_seconds > 0
    assert plan.tree.num_nodes <= 20
    assert plan.tree.depth <= 4
    for each in (plan.tree, plan.chain):
        assert each.tokens == pytest.approx(expected_tokens(each.paths, plan.acceptance))
    assert plan.tree.tokens <= best_tree(plan.acceptance, 20, 4).tokens + 1e-12
    if plan.tree.paths:
        assert Topology(plan.tree.paths).paths == plan.tree.paths
