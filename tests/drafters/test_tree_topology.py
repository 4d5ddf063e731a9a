"""Static trees: constructors, files, and the errors of malformed ones."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider.core import Draft
from outrider.core.errors import InvalidParameterError
from outrider.drafters.tree.topology import Topology

SHAPES = {
    "chain": Topology.chain(4),
    "binary": Topology.k_ary(2, 3),
    "expansion": Topology.expansion([3, 1, 2]),
    "paths": Topology.rank_paths([[0, 1], [1], [0], [0, 0], [0, 1, 0], [1, 0]]),
}


def test_numbering_is_breadth_first() -> None:
    tree = SHAPES["paths"]
    assert tree.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0))
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 4)
    assert tree.ranks == (0, 0, 1, 0, 1, 0, 0)
    assert tree.depths == (0, 1, 1, 2, 2, 2, 3)
    assert tree.num_children == (2, 2, 1, 0, 1, 0, 0)
    assert (tree.num_nodes, tree.depth) == (7, 3)


def test_expansions_are_those_of_specinfer() -> None:
    """<1, 1, 3, 1>, the shape in the paper's figure: a chain of two, then three chains of two."""
    tree = Topology.expansion([1, 1, 3, 1])
    assert tree.num_children == (1, 1, 3, 1, 1, 1, 0, 0, 0)
    assert tree.parents == (-1, 0, 1, 2, 2, 2, 3, 4, 5)
    assert Topology.k_ary(2, 3) == Topology.expansion([2, 2, 2])
    assert Topology.chain(3).paths == ((0,), (0, 0), (0, 0, 0))
    assert [shape.is_chain for shape in SHAPES.values()] == [True, False, False, False]


@pytest.mark.parametrize("shape", SHAPES)
def test_ancestors_depths_and_walk_steps_are_those_of_the_draft(shape: str) -> None:
    tree = SHAPES[shape]
    parents_BN = torch.tensor([tree.parents])
    draft = Draft(parents_BN, parents_BN, parents_BN >= -1, None, "chosen")
    assert draft.ancestors_BNN[0].tolist() == [list(row) for row in tree.ancestors]
    assert draft.depth_BN[0].tolist() == list(tree.depths)
    assert draft.walk_step_BN[0].tolist() == list(tree.walk_steps)


def test_texts_round_trip() -> None:
    """Widths where they define the tree, else the children of each node; of the first two, both
    have three nodes in two levels."""
    texts = ["2/1", "2/0,1", "2,1", "12/10,0,1/1", "3/2,1", "1"]
    for text in texts:
        assert str(Topology.parse(text)) == text
    assert Topology.parse("2/0,1") == Topology.rank_paths([(0,), (1,), (1, 0)])
    assert Topology.parse("2/1,0") == Topology.parse("2/1")
    assert str(Topology.parse("2/1,1")) == "2,1"
    for shape in SHAPES.values():
        assert Topology.parse(str(shape)) == shape


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2/1,1,1", "level 1 has 3 numbers and 2 nodes"),
        ("2/0,0/1", "level 2 has 1 numbers and 0 nodes"),
        ("0/1", "the tree is empty"),
        ("99/99,99", "more than 255 nodes"),
        ("2/", "must be whole numbers such as '4,2,1'|cannot be read"),
    ],
)
def test_texts_that_are_no_tree(text: str, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        Topology.parse(text)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_file_round_trips(shape: str, tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    SHAPES[shape].write(file)
    assert Topology.read(file) == SHAPES[shape]
    assert json.loads(file.read_text())["format"] == "outrider-topology"


def _file(paths: object, **changed: object) -> str:
    return json.dumps({"format": "outrider-topology", "version": 1, "paths": paths} | changed)


MALFORMED = {
    "not JSON": ("{", "is not JSON: .* line 1"),
    "endless": ("[" * 100_000, "is not JSON"),
    "a list": ("[]", 'must be a JSON object with "format": "outrider-topology"'),
    "format": (_file([[0]], format="medusa"), 'must be a JSON object with "format"'),
    "version": (_file([[0]], version=2), "version=2: this release reads version 1"),
    "no version": (_file([[0]], version=None), "version=None"),
    "true version": (_file([[0]], version=True), "version=True"),
    "no paths": (_file(None), '"paths" must be a list of rank paths'),
    "no tree": (_file([]), "the tree is empty: give it at least the path"),
    "the root": (_file([[], [0]]), r"paths\[0\]=\[\]: the root is implied; remove it"),
    "a number": (_file([[0], 1]), r"paths\[1\]=1: must be a list of ranks"),
    "a word": (_file([[0], "00"]), r"paths\[1\]='00': must be a list of ranks"),
    "no parent": (
        _file([[0], [1, 0]]),
        r"paths\[1\]=.*: its parent \[1\] is missing; add it",
    ),
    "twice": (_file([[0], [1], [0]]), r"paths\[2\]=\[0\]: the same as paths\[0\]; remove one"),
    "negative": (_file([[0], [-1]]), r"paths\[1\]=\[-1\]: rank -1 must be a whole number"),
    "half": (_file([[0.5]]), r"paths\[0\]=\[0.5\]: rank 0.5 must be a whole number"),
    "true": (_file([[True]]), "rank True must be a whole number"),
    "gap": (_file([[0], [2]]), r"paths\[1\]=\[2\]: a gap in the ranks; add its sibling \[1\]"),
    "deep gap": (_file([[0], [0, 1]]), r"paths\[1\]=\[0, 1\]: a gap .* add its sibling \[0, 0\]"),
    "wide": (_file([[i] for i in range(256)]), "more than 255 nodes besides the root"),
    "deep": (_file([[0] * i for i in range(1, 66)]), "deeper than 64 levels"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_file_is_reported_with_path_and_remedy(kind: str, tmp_path: Path) -> None:
    content, message = MALFORMED[kind]
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(InvalidParameterError, match=message) as caught:
        Topology.read(file)
    assert str(caught.value).startswith(f"topology {str(file)!r}: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="cannot be read: No such file"):
        Topology.read(tmp_path / "missing.json")
    with pytest.raises(InvalidParameterError, match="cannot be read: Is a directory"):
        Topology.read(tmp_path)
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidParameterError, match="is not JSON"):
        Topology.read(tmp_path / "latin")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Topology.k_ary(0, 3), r"widths\[0\]=0: must be a whole number, at least 1"),
        (lambda: Topology.k_ary(2, 0), "depth=0: must be a whole number, at least 1"),
        (lambda: Topology.expansion([2, True]), r"widths\[1\]=True"),
        (lambda: Topology.expansion([]), "the tree is empty"),
        (lambda: Topology.expansion([10**9, 10**9]), "more than 255 nodes"),
        (lambda: Topology.chain(65), "deeper than 64 levels"),
        (lambda: Topology(((1,), (0,))), "breadth-first order"),
    ],
)
def test_bad_arguments(build: Callable[[], Topology], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        build()


def test_the_largest_trees() -> None:
    assert Topology.expansion([255]).num_nodes == 256
    assert Topology.chain(64).depth == 64
