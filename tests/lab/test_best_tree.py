"""The best tree by the dynamic program, against brute force and against other algorithms."""

import heapq
from collections.abc import Iterator, Sequence

import pytest
import torch
from toy_trees import expected_tokens

from outrider.core.errors import InvalidParameterError
from outrider.drafters.tree.topology import Topology
from outrider.lab.analysis.tree_plan import TreePlan, best_tree, fastest_tree

RankPath = tuple[int, ...]


def acceptances(num: int, ranks: int, seed: int, *, falling: bool) -> list[list[float]]:
    generator = torch.Generator().manual_seed(seed)
    p_MR = torch.rand(num, ranks + 1, generator=generator, dtype=torch.float64) ** 2
    p_MR = (p_MR / p_MR.sum(1, keepdim=True))[:, :ranks]
    return (p_MR.sort(1, descending=True).values if falling else p_MR).tolist()


def every_tree(num_drafted: int, depth: int, ranks: int) -> Iterator[list[RankPath]]:
    """All trees with exactly ``num_drafted`` drafted nodes."""

    def forests(count: int, levels: int, first: int) -> Iterator[list[RankPath]]:
        """All sets of children of one node from rank ``first`` on, with their subtrees."""
        if count == 0:
            yield []
        if count == 0 or levels == 0 or first == ranks:
            return
        for below in range(count):
            for subtree in forests(below, levels - 1, 0):
                for rest in forests(count - 1 - below, levels, first + 1):
                    yield [(first,), *((first, *path) for path in subtree), *rest]

    return forests(num_drafted, depth, 0)


def test_the_number_of_trees_is_the_catalan_number() -> None:
    assert [len(list(every_tree(n, n, n))) for n in range(7)] == [1, 1, 2, 5, 14, 42, 132]


@pytest.mark.parametrize("falling", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_no_tree_is_better(depth: int, falling: bool) -> None:
    """Brute force over all trees up to six drafted nodes, with one to five ranks."""
    for ranks in (1, 2, 3, 5):
        for acceptance in acceptances(6, ranks, depth, falling=falling):
            best = 1.0
            for num_drafted in range(1, 7):
                trees = every_tree(num_drafted, depth, ranks)
                best = max([best, *(expected_tokens(tree, acceptance) for tree in trees)])
                plan = best_tree(acceptance, num_drafted + 1, depth)
                assert plan.tokens == pytest.approx(best, abs=1e-12)
                assert expected_tokens(plan.paths, acceptance) == pytest.approx(best, abs=1e-12)
                assert plan.num_nodes <= num_drafted + 1
                assert plan.depth <= depth


def likeliest_paths(acceptance: Sequence[float], num: int, depth: int) -> list[float]:
    """If p_b decreases with b, the best tree consists of the likeliest paths."""
    heap: list[tuple[float, RankPath]] = [(-acceptance[0], (0,))]
    taken = []
    while heap and len(taken) < num:
        value, path = heapq.heappop(heap)
        taken.append(-value)
        if path[-1] + 1 < len(acceptance):
            rank = path[-1]
            heapq.heappush(
                heap, (value / acceptance[rank] * acceptance[rank + 1], (*path[:-1], rank + 1))
            )
        if len(path) < depth:
            heapq.heappush(heap, (value * acceptance[0], (*path, 0)))
    return taken


@pytest.mark.parametrize(("num_nodes", "depth"), [(64, 10), (128, 4), (256, 64)])
def test_large_trees_consist_of_the_likeliest_paths(num_nodes: int, depth: int) -> None:
    for acceptance in acceptances(3, 8, 7, falling=True):
        plan = best_tree(acceptance, num_nodes, depth)
        expected = 1 + sum(likeliest_paths(acceptance, num_nodes - 1, depth))
        assert plan.tokens == pytest.approx(expected, rel=1e-12)
        assert expected_tokens(plan.paths, acceptance) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("falling", [True, False])
def test_more_nodes_and_levels_are_never_worse(falling: bool) -> None:
    for acceptance in acceptances(3, 4, 11, falling=falling):
        by_nodes = [best_tree(acceptance, m, 5).tokens for m in range(2, 40)]
        by_depth = [best_tree(acceptance, 30, depth).tokens for depth in range(1, 12)]
        assert by_nodes == sorted(by_nodes)
        assert by_depth == sorted(by_depth)


@pytest.mark.parametrize("falling", [True, False])
def test_the_plan_is_a_valid_topology(falling: bool) -> None:
    for acceptance in acceptances(4, 5, 3, falling=falling):
        plan = best_tree(acceptance, 40, 6)
        assert Topology.rank_paths([list(path) for path in plan.paths]).paths == plan.paths


def test_expected_tokens_are_those_of_a_simulated_walk() -> None:
    """A round descends to child b with probability p_b: 200 000 walks, 5 standard deviations.

    A correct formula fails with probability 6e-7; the seed is fixed.
    """
    acceptance = [0.5, 0.2, 0.1]
    plan = best_tree(acceptance, 12, 4)
    generator = torch.Generator().manual_seed(0)
    ranks = torch.multinomial(torch.tensor([*acceptance, 0.2]), 800_000, True, generator=generator)
    tree, lengths = set(plan.paths), []
    for walk in ranks.view(-1, 4).tolist():
        depth = 0
        while depth < 4 and tuple(walk[: depth + 1]) in tree:
            depth += 1
        lengths.append(depth + 1)
    lengths_B = torch.tensor(lengths, dtype=torch.float64)
    error = float(lengths_B.std()) / len(lengths) ** 0.5
    assert abs(float(lengths_B.mean()) - plan.tokens) < 5 * error


def test_special_cases() -> None:
    assert best_tree([0.7], 5, 9).paths == ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))
    assert best_tree([0.7, 0.2], 9, 1).paths == ((0,), (1,))
    assert best_tree([0.0, 0.0], 9, 3) == TreePlan((), 1.0)
    assert best_tree([0.0, 0.5], 3, 3).paths == ((0,), (1,))  # a rank needs those before it
    assert expected_tokens([(0,), (3,)], [0.5]) == 1.5


def by_search(
    acceptance: Sequence[float], num_nodes: int, depth: int, times: Sequence[float], draft: float
) -> float:
    """The least seconds per token over all sizes and depths."""
    seconds = [times[0]]
    for m in range(2, num_nodes + 1):
        for levels in range(1, depth + 1):
            tokens = best_tree(acceptance, m, levels).tokens
            seconds.append((levels * draft + times[m - 1]) / tokens)
    return min(seconds)


@pytest.mark.parametrize("draft", [0.0, 0.05, 0.3, 5.0])
@pytest.mark.parametrize("knee", [4, 16, 99])
def test_the_fastest_tree(knee: int, draft: float) -> None:
    """Target passes whose time is flat up to a knee and grows beyond it, as on real hardware."""
    acceptance = [0.55, 0.2, 0.08, 0.04]
    times = [1 + max(m - knee, 0) / knee for m in range(1, 33)]
    plan = fastest_tree(acceptance, 32, 8, lambda m: times[m - 1], draft)
    assert plan.seconds is not None
    per_token = by_search(acceptance, 32, 8, times, draft)
    assert plan.seconds / plan.tokens == pytest.approx(per_token)
    assert plan.tokens == pytest.approx(expected_tokens(plan.paths, acceptance))
    assert plan.seconds == pytest.approx(plan.depth * draft + times[plan.num_nodes - 1])
    if draft == 5.0:
        assert plan == TreePlan((), 1.0, 1.0)
    else:
        assert per_token < 1


@pytest.mark.parametrize(
    ("acceptance", "num_nodes", "depth", "message"),
    [
        ([], 5, 2, r"acceptance=\[\]: must be probabilities by rank"),
        ([0.5, -0.1], 5, 2, "acceptance="),
        ([0.9, 0.2], 5, 2, "in total at most 1"),
        ([float("nan")], 5, 2, "acceptance="),
        ([0.5], 1, 2, "num_nodes=1: must be a whole number from 2 to 256"),
        ([0.5], 5, 0, "depth=0: must be a whole number from 1 to 64"),
    ],
)
def test_numbers_out_of_range_raise_errors(
    acceptance: list[float], num_nodes: int, depth: int, message: str
) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        best_tree(acceptance, num_nodes, depth)
