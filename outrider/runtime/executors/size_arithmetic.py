"""Arithmetic of symbolic sizes, each result computed once.

torch traces a tensor of symbolic sizes by some thirty sums, products and comparisons of these:
300,000 for a model of 16 layers, of which 3,000 differ.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from unittest.mock import patch

from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode

_OPERATORS = (
    *("_add", "_sub", "_mul", "_sym_max", "_sym_min"),
    *("_eq", "_ne", "_lt", "_le", "_gt", "_ge", "_and_", "_or_"),
)

_Binary = Callable[[SymNode, SymNode], SymNode]


@contextmanager
def size_arithmetic_kept() -> Iterator[None]:
    """Within it, torch keeps the results of arithmetic of symbolic sizes. A graph that records such
    arithmetic has one node for each result, too."""
    with ExitStack() as stack:
        for name in _OPERATORS:
            stack.enter_context(patch.object(SymNode, name, _kept(getattr(SymNode, name))))
        yield


def _kept(operator: _Binary) -> _Binary:
    results: dict[tuple[object, ...], SymNode] = {}

    @wraps(operator)
    def kept(a: SymNode, b: SymNode) -> SymNode:
        if get_proxy_mode():
            return operator(a, b)
        key = a.shape_env, _value(a), _value(b)
        if (found := results.get(key)) is None:
            found = results[key] = operator(a, b)
        return found

    return kept


def _value(node: SymNode) -> tuple[object, ...]:
    return node._expr, node.pytype, node._hint, node.constant
