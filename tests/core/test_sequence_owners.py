"""A sequence's length is written by the object that owns the sequence, and by nobody else."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import outrider
from outrider.core import Context, Lengths
from outrider.runtime import KVCache, RecurrentCache
from outrider.testing import RecurrentState, SoftmaxDistribution

OWNERS = {owner.__name__ for owner in (Context, KVCache, RecurrentCache, RecurrentState)}
LENGTHS = {"lengths", "length_B", "sequence_lengths"}


def writes(source: str) -> list[str]:
    """Every assignment to a sequence's length that its owner does not make on itself, as
    ``class:line``."""
    return list(_writes(ast.parse(source), ""))


def _writes(tree: ast.AST, owner: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.ClassDef) else owner
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            allowed = node.attr == "sequence_lengths" and own and owner in OWNERS
            if node.attr in LENGTHS and not allowed:
                yield f"{owner}:{node.lineno}"
        if isinstance(node, ast.Call) and _name(node.func) in ("setattr", "__setattr__"):
            constants = {a.value for a in node.args if isinstance(a, ast.Constant)}
            if constants & LENGTHS:
                yield f"{owner}:{node.lineno}"
        yield from _writes(node, inside)


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def test_no_other_class_writes_a_length() -> None:
    package = Path(outrider.__file__).parent
    found = {
        str(file.relative_to(package)): lines
        for file in sorted(package.rglob("*.py"))
        if (lines := writes(file.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "cache.length_B = cache.length_B + 1",
        "cache.length_B, cache.lengths = before",
        "state.cache.lengths += [1]",
        "self.sequence_lengths = lengths",
        "setattr(context, 'length_B', length_B)",
        "object.__setattr__(cache, 'sequence_lengths', lengths)",
    ],
)
def test_such_a_write_would_be_found(line: str) -> None:
    """MUT: as drafters wrote them; the owner itself may, on itself alone."""
    found = writes(f"class Drafter:\n    def commit(self):\n        {line}")
    assert set(found) == {"Drafter:3"}
    own = "class KVCache:\n    def keep(self):\n        {}.sequence_lengths = lengths"
    assert writes(own.format("self")) == []
    assert writes(own.format("other")) == ["KVCache:3"]


def test_the_properties_cannot_be_written() -> None:
    context = Context.start([[1, 2]], SoftmaxDistribution(), [0], [0])
    for name in ("lengths", "length_B"):
        with pytest.raises(AttributeError):
            setattr(context, name, getattr(context, name))


def test_host_and_device_agree_after_each_operation() -> None:
    one, other = Lengths.of([3, 1, 2]), Lengths.of([1, 4, 2])
    made = [
        (one + other, [4, 5, 4]),
        (one - 1, [2, 0, 1]),
        (one + other - one, [1, 4, 2]),
        (one.at_most(other), [1, 1, 2]),
        (one.at_most(one + 1), [3, 1, 2]),
        ((one + 1).at_most(one), [3, 1, 2]),
        (one.keep([2, 0]), [2, 3]),
        (one.keep([]), []),
        (one.join(other), [3, 1, 2, 1, 4, 2]),
        (Lengths.read(other.device_B), [1, 4, 2]),
    ]
    for lengths, wanted in made:
        assert lengths.host == lengths.device_B.tolist() == wanted
