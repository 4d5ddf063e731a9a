"""Arithmetic of symbolic sizes, each result computed once.

torch traces a tensor of symbolic sizes by some thirty sums, products and comparisons of these:
300,000 for a model of 16 layers, of which 3,000 differ.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import Lock

from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode

_Binary = Callable[[SymNode, SymNode], SymNode]

_OPERATORS: dict[str, _Binary] = {
    name: getattr(SymNode, name)
    for name in (
        *("_add", "_sub", "_mul", "_sym_max", "_sym_min"),
        *("_eq", "_ne", "_lt", "_le", "_gt", "_ge", "_and_", "_or_"),
    )
}
"""torch's own."""

_CHANGING = Lock()
_num_users = 0  # threads, and calls within calls, that trace now


@contextmanager
def size_arithmetic_kept() -> Iterator[None]:
    """Until the last of those that are within it leaves, torch keeps the results of arithmetic of
    symbolic sizes. A graph that records such arithmetic has one node for each result, too."""
    _add_users(1)
    try:
        yield
    finally:
        _add_users(-1)


def _add_users(num: int) -> None:
    global _num_users
    with _CHANGING:
        before, _num_users = _num_users, _num_users + num
        if not before or not _num_users:
            for name, operator in _OPERATORS.items():
                setattr(SymNode, name, _kept(operator) if _num_users else operator)


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
