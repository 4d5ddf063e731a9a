"""Arithmetic of symbolic sizes while programs are traced."""

from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from outrider.runtime.executors.size_arithmetic import size_arithmetic_kept


def sizes(*values: int) -> list[torch.SymInt]:
    """Symbolic sizes of one tensor."""
    env = ShapeEnv()
    found = []
    for number, value in enumerate(values):
        source = ConstantSource(f"size{number}")
        symbol = env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
        found.append(env.create_symintnode(symbol, hint=value, source=source))
    return found


def test_equal_results_are_one_result_of_the_same_value() -> None:
    with size_arithmetic_kept():
        a, b = sizes(5, 7)
        kept = [a + b, a * b, a - b, a == b, a < b, a >= 2 * b, torch.sym_max(a, b)]
        again = [a + b, a * b, a - b, a == b, a < b, a >= 2 * b, torch.sym_max(a, b)]
    new = [a + b, a * b, a - b, a == b, a < b, a >= 2 * b, torch.sym_max(a, b)]
    for first, second, other in zip(kept, again, new, strict=True):
        assert first.node is second.node
        assert first.node is not other.node
        assert (first.node.expr, first.node.hint) == (other.node.expr, other.node.hint)


def test_each_tensors_sizes_have_results_of_their_own() -> None:
    with size_arithmetic_kept():
        (a,), (b,) = sizes(5), sizes(9)
        assert a.node.expr == b.node.expr
        assert ((a * 2).node.hint, (b * 2).node.hint) == (10, 18)


def test_a_kept_result_knows_what_is_found_out_later() -> None:
    with size_arithmetic_kept():
        a, b = sizes(5, 5)
        before, same = a * 2, a == b
        assert not before.node.expr.is_number
        assert a == 5  # from here on, it is
        assert (a * 2).node.expr == before.node.expr == 10
        assert b == 5
        assert (a == b) == same == True  # noqa: E712 symbolic, too


def test_results_are_kept_until_the_last_user_leaves() -> None:
    """As where one program is traced while another one is compiled."""
    with size_arithmetic_kept():
        a, b = sizes(5, 7)
        first = a + b
        with size_arithmetic_kept():
            assert (a + b).node is first.node
        assert (a + b).node is first.node
    assert (a + b).node is not first.node


@pytest.mark.parametrize("name", ["_add", "_eq"])
def test_torchs_own_operators_come_back(name: str) -> None:
    before = getattr(SymNode, name)
    with suppress(KeyError), size_arithmetic_kept():
        assert getattr(SymNode, name) is not before
        raise KeyError
    assert getattr(SymNode, name) is before


class Mixed(nn.Module):
    """Reads sizes in many ways."""

    def forward(self, x_BN: Tensor, y_BM: Tensor) -> tuple[Tensor, Tensor]:
        num = x_BN.shape[1] + y_BM.shape[1]
        both = torch.cat([x_BN, y_BM], 1).reshape(-1)
        places = torch.arange(num * x_BN.shape[0])
        return (both * places).view(x_BN.shape[0], num)[:, x_BN.shape[1] :].cumsum(1), both[None]


def shapes(program: ExportedProgram) -> list[str]:
    """The shapes of a program's tensors."""
    found = [node.meta.get("val") for node in program.graph.nodes]
    return [str(value.shape) for value in found if isinstance(value, torch.Tensor)]


def test_a_traced_program_is_the_same() -> None:
    def program() -> ExportedProgram:
        dims = {0: Dim("B", min=1), 1: Dim("N", min=1)}, {0: Dim("B", min=1), 1: Dim("M", min=2)}
        inputs = torch.zeros(2, 3), torch.zeros(2, 4)
        return torch.export.export(Mixed(), inputs, dynamic_shapes=dims, strict=False)

    before = program()
    with size_arithmetic_kept():
        first, second = program(), program()
    for kept in (first, second):
        assert str(kept.graph) == str(before.graph)
        assert kept.range_constraints == before.range_constraints
        assert shapes(kept) == shapes(before)


def test_graphs_record_the_arithmetic_of_their_sizes() -> None:
    def run(x_N: Tensor) -> tuple[Tensor, Tensor]:
        num = x_N.shape[0] * 3
        return x_N.new_zeros(num), x_N.new_ones(x_N.shape[0] * 3 + num)

    with size_arithmetic_kept():
        graphs = [make_fx(run, tracing_mode="symbolic")(torch.zeros(4)) for _ in range(2)]
    for graph in graphs:
        assert [len(found) for found in graph(torch.zeros(5))] == [15, 30]
