"""Loops of unknown length: captured ones stop where eager ones do, and none exceeds its bound.

Legend: B rows, N nodes, V vocabulary, R numbers that are searched for.
"""

from dataclasses import dataclass, replace
from importlib import import_module

import pytest
import torch
from operator_tape import record_on_tape
from torch import Tensor
from toy_trees import stream

from outrider.core import Draft, at_node, race, walk_tree
from outrider.core.loop_operator import LoopState
from outrider.core.overlap import overlap_down
from outrider.core.recording import CaptureError, capturing
from outrider.core.repeat import apply_if, narrow, repeat_while


def spied(monkeypatch: pytest.MonkeyPatch, module: str) -> list[tuple[int, int]]:
    """The number of steps that each loop of a module of ``core`` takes, and its bound; added as
    the loops run."""
    taken: list[tuple[int, int]] = []

    def loop(goes_on, step, state: LoopState, *, at_most: int) -> LoopState:
        num_steps = 0

        def counted(*state: Tensor) -> LoopState:
            nonlocal num_steps
            num_steps += 1
            return step(*state)

        state = repeat_while(goes_on, counted, state, at_most=at_most)
        taken.append((num_steps, at_most))
        return state

    monkeypatch.setattr(import_module(f"outrider.core.{module}"), "repeat_while", loop)
    return taken


def halved(x_B: Tensor) -> Tensor:
    """Halves all numbers while one of them is above 1."""
    return repeat_while(lambda x: (x > 1).any(), lambda x: (x / 2,), (x_B,), at_most=5)[0]


def test_captured_loops_stop_where_eager_ones_do() -> None:
    x_B = torch.tensor([3.0, 9.0])
    with capturing():
        replay, (found_B,) = record_on_tape(lambda: [halved(x_B)])
    for values in ([3.0, 9.0], [1.0, 0.25], [32.0, 1.0], [2.0, 2.0], [17.0, 0.0]):
        x_B.copy_(torch.tensor(values))
        replay()
        assert found_B.tolist() == halved(x_B).tolist()


def test_loops_without_a_bound_are_not_captured() -> None:
    with capturing(), pytest.raises(CaptureError, match="unknown length"):
        repeat_while(lambda x: x > 1, lambda x: (x / 2,), (torch.tensor(4.0),))


class Loops(torch.nn.Module):
    """A loop within a loop. From outside they read a tensor that only the condition reads, one that
    only the inner loop reads, a constant, and the size of another tensor, but not its numbers; the
    number of small elements, which a step finds, is the size of an intermediate result."""

    def forward(self, x_B: Tensor, most_1: Tensor, other_N: Tensor) -> Tensor:
        limit_1, extra_1 = most_1 + 1, most_1 * 0.25
        size = other_N.shape[0]

        def is_below(x_B: Tensor) -> Tensor:
            return (x_B.max() < limit_1)[0]

        def grow(x_B: Tensor) -> tuple[Tensor]:
            small_Z = (x_B < 2).nonzero()
            x_B = x_B + small_Z.shape[0] + size + ONE
            return apply_if((x_B > 4).any(), lambda x: (x + extra_1,), (x_B,))

        return repeat_while(is_below, grow, (x_B,))[0]


ONE = torch.tensor(1.0)


def test_traced_loops_read_tensors_from_outside() -> None:
    """With other numbers and sizes than those of the examples; the third takes no step."""
    rows, size = torch.export.Dim("rows"), torch.export.Dim("size")
    example = torch.rand(3), torch.tensor([9.0]), torch.zeros(4)
    with torch.no_grad():
        program = torch.export.export(
            Loops(), example, dynamic_shapes=({0: rows}, None, {0: size}), strict=False
        )
    operator = torch.ops.higher_order.while_loop
    (loop,) = (node for node in program.graph.nodes if node.target is operator)
    assert [isinstance(each.meta["val"], Tensor) for each in loop.args[3]] == [True, True, False]
    for num, most, others in ((1, 30.0, 2), (5, 7.0, 3), (4, -9.0, 2), (2, 0.5, 9)):
        given = torch.rand(num) * 3, torch.tensor([most]), torch.zeros(others)
        assert torch.equal(program.module()(*given), Loops()(*given))


@pytest.mark.parametrize(("num_sections", "num_steps"), [(2, 30), (8, 10), (1024, 3)])
def test_an_interval_is_narrowed_as_by_bisection(num_sections: int, num_steps: int) -> None:
    """To the same bits, between whole numbers; 30 halvings are within 1e-9."""
    wanted_R1 = 9 * torch.rand(50, 1, dtype=torch.float64)
    low_R1, high_R1 = torch.zeros_like(wanted_R1), torch.full_like(wanted_R1, 9.0)
    found_R1 = narrow(lambda x: x < wanted_R1, low_R1, high_R1, num_sections, num_steps)
    for _ in range(30):
        middle_R1 = (low_R1 + high_R1) / 2
        below_R1 = middle_R1 < wanted_R1
        low_R1 = torch.where(below_R1, middle_R1, low_R1)
        high_R1 = torch.where(below_R1, high_R1, middle_R1)
    assert torch.equal(found_R1, high_R1)
    assert bool(((found_R1 >= wanted_R1) & (found_R1 <= wanted_R1 + 1e-8)).all())


def test_narrowing_ends_at_either_end_of_the_interval() -> None:
    low_R1, high_R1 = torch.full((2, 1), 0.1), torch.full((2, 1), 0.7)
    always, never = (narrow(lambda x, y=y: x < y, low_R1, high_R1, 8, 9) for y in (1, 0))
    assert torch.equal(always, high_R1)
    assert bool((never >= low_R1).all())
    torch.testing.assert_close(never, low_R1)


@dataclass(frozen=True)
class Some:
    """Accepts a share of the candidates."""

    share: float

    def accept(self, p_V: Tensor, q_V: Tensor | None, x: Tensor, u: Tensor) -> Tensor:
        return u < self.share

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return p_V, q_V


def trees(reach: int, seed: int, *, are_whole: bool) -> tuple[Draft, Tensor]:
    """Trees of 9 nodes, each a child of one of the ``reach`` before it (1: chains; many: stars),
    with their target distributions."""
    generator = torch.Generator().manual_seed(seed)
    B, N, V = 6, 9, 5
    p_BNV = torch.rand(B, N, V, generator=generator).softmax(-1)
    back_BN = torch.randint(1, reach + 1, (B, N), generator=generator)
    parents_BN = (torch.arange(N) - back_BN).clamp(min=0)
    parents_BN[:, 0] = -1
    mask_BN = (torch.rand(B, N, generator=generator) < 0.9) | are_whole
    mask_BN[:, 0] = True
    for i in range(1, N):
        mask_BN[:, i] &= mask_BN.gather(1, parents_BN[:, i : i + 1])[:, 0]
    tokens_BN = torch.randint(V, (B, N), generator=generator)
    draft = Draft(tokens_BN, parents_BN, mask_BN, p_BNV.roll(1, 1), "iid")
    return replace(draft, max_walk_length=int(draft.walk_step_BN.max())), p_BNV


@pytest.mark.parametrize("are_whole", [False, True])
def test_walks_take_no_more_steps_than_is_said(
    are_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In trees from chains to stars, of whose candidates none, some or all are accepted."""
    taken, down = spied(monkeypatch, "walk"), spied(monkeypatch, "overlap")
    for seed in range(20):
        for reach in (1, 2, 4, 100):
            draft, p_BNV = trees(reach, seed, are_whole=are_whole)
            for share in (0.0, 0.5, 1.0):
                walk_tree(Some(share), draft, p_BNV, stream(6, seed))
            overlap_down(draft, lambda node_B, p_BNV=p_BNV: at_node(p_BNV, node_B))
    for each in (taken, down):
        assert all(num <= most for num, most in each)
        assert not are_whole or any(num == most for num, most in each)


def test_a_race_opens_all_blocks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = spied(monkeypatch, "race")
    for scale in (0.0, 1.0, 4.0):
        race((scale * torch.randn(300, 5000)).softmax(-1), stream(300))
    race(torch.zeros(3, 5000), stream(3))  # no block has won before all are opened
    assert {num for num, _ in taken} == {0, 1}
    assert {most for _, most in taken} == {1}
