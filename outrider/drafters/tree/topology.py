"""The shape of a static token tree: the parent of each node and its rank among its siblings.

Four notations are in use: width and depth; lists of expansions (Miao et al., "SpecInfer", ASPLOS
2024: every node of level i-1 has k_i children); the number of children of each node, level by
level, such as ``3/2,1``: the root has three children, the first of these two and the second one;
and lists of rank paths (Cai et al., "Medusa", ICML 2024: ``[0, 2]`` is the third child of the first
child of the root). A topology file contains rank paths:

    {"format": "outrider-topology", "version": 1, "paths": [[0], [1], [0, 0]]}

The root is implied. Nodes are numbered in breadth-first order, siblings by rank, so that a tree cut
at some depth is a prefix of the whole one.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from outrider.core.errors import InvalidParameterError

FORMAT, VERSION = "outrider-topology", 1
MAX_DRAFTED = 255
MAX_DEPTH = 64

RankPath = tuple[int, ...]
"""The ranks of the nodes on the path from the root's child down to a node."""


@dataclass(frozen=True)
class Topology:
    """A static tree; build it with one of the constructors below.

    Attributes:
        paths: the rank path of each drafted node, breadth first: node i+1 is ``paths[i]``.
    """

    paths: tuple[RankPath, ...]

    def __post_init__(self) -> None:
        if list(self.paths) != sorted(_checked(self.paths), key=_breadth_first):
            raise InvalidParameterError("paths: must be in breadth-first order; use rank_paths")

    @classmethod
    def rank_paths(cls, paths: Iterable[Sequence[int]]) -> "Topology":
        """A tree of Medusa's rank paths, in any order.

        Raises:
            InvalidParameterError: paths that are no tree; the message names the path and the
                remedy.
        """
        return cls(tuple(sorted(_checked(paths), key=_breadth_first)))

    @classmethod
    def expansion(cls, widths: Sequence[int]) -> "Topology":
        """A tree by SpecInfer's widths: every node of level i has ``widths[i]`` children.

        Raises:
            InvalidParameterError: a width below 1, or a tree that is too large.
        """
        widths = list(widths)
        for level, width in enumerate(widths):
            _check_whole(f"widths[{level}]", width)
        _check_size(_num_drafted(widths), len(widths))
        levels: list[list[RankPath]] = [[()]]
        for width in widths:
            levels.append([(*path, rank) for path in levels[-1] for rank in range(width)])
        return cls(tuple(path for level in levels[1:] for path in level))

    @classmethod
    def children(cls, levels: Sequence[Sequence[int]]) -> "Topology":
        """A tree by the number of children of each node, level by level from the root's; the last
        nodes of a level may be left out if they have none.

        Raises:
            InvalidParameterError: more numbers than a level has nodes, or a tree that is too large.
        """
        above: list[RankPath] = [()]
        paths: list[RankPath] = []
        for number, counts in enumerate(levels):
            if len(counts) > len(above):
                raise InvalidParameterError(
                    f"level {number} has {len(counts)} numbers and {len(above)} nodes: give a "
                    f"number per node at most"
                )
            _check_size(len(paths) + sum(counts), number + 1)
            pairs = zip(above, counts, strict=False)
            above = [(*path, rank) for path, count in pairs for rank in range(count)]
            paths += above
        return cls.rank_paths(paths)

    @classmethod
    def k_ary(cls, width: int, depth: int) -> "Topology":
        """A tree in which every node above the last level has ``width`` children."""
        _check_whole("depth", depth)
        return cls.expansion([width] * depth)

    @classmethod
    def chain(cls, length: int) -> "Topology":
        """A tree with one child per node."""
        return cls.k_ary(1, length)

    @classmethod
    def bundle(cls, num_chains: int, length: int) -> "Topology":
        """Chains that share the root alone: the candidate sequences of SpecTr."""
        _check_whole("num_chains", num_chains)
        _check_whole("length", length)
        if num_chains * length > MAX_DRAFTED:
            raise InvalidParameterError(
                f"{num_chains} chains of {length} tokens: {MAX_DRAFTED} nodes are the most; take "
                f"fewer or shorter ones"
            )
        tails = [(0,) * depth for depth in range(length)]
        return cls.rank_paths((first, *tail) for first in range(num_chains) for tail in tails)

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """A tree from widths by level, ``"4,2,1"``, from the children of each node, level by level,
        ``"4/2,1/1"``, or from the name of a topology file.

        Raises:
            InvalidParameterError: any other text, an unreadable file, or paths that are no tree;
                the message names the remedy.
        """
        if not isinstance(text, str) or not text:
            raise InvalidParameterError("must be widths such as '4,2,1', a file, or a Topology")
        levels = [level.split(",") for level in text.split("/")]
        if all(word.strip().isdecimal() for level in levels for word in level):
            numbers = [[int(word) for word in level] for level in levels]
            return cls.expansion(numbers[0]) if len(levels) == 1 else cls.children(numbers)
        file = Path(os.path.expanduser(text))
        if "," in text and not os.path.exists(file):
            raise InvalidParameterError(
                "must be whole numbers such as '4,2,1' (children of all nodes of a level) or "
                "'4/2,1/1' (of each node of a level), or a file"
            )
        return cls.rank_paths(_paths_in(file))

    @classmethod
    def read(cls, file: str | Path) -> "Topology":
        """A tree from a topology file.

        Raises:
            InvalidParameterError: an unreadable file, or paths that are no tree; the message names
                the file, the path and the remedy.
        """
        try:
            return cls.rank_paths(_paths_in(Path(os.path.expanduser(file))))
        except InvalidParameterError as error:
            raise InvalidParameterError(f"topology {str(file)!r}: {error}") from None

    def write(self, file: str | Path) -> None:
        """Writes a topology file."""
        paths = json.dumps([list(path) for path in self.paths])
        Path(os.path.expanduser(file)).write_text(
            f'{{"format": "{FORMAT}", "version": {VERSION}, "paths": {paths}}}\n', encoding="utf-8"
        )

    def __str__(self) -> str:
        """Widths by level if they define the tree, else the children of each node, as
        :meth:`parse` reads them."""
        levels = range(1, self.depth + 1)
        sizes = [1, *(sum(depth == level for depth in self.depths) for level in levels)]
        widths = [below // above for above, below in pairwise(sizes)]
        if 0 not in widths and self == Topology.expansion(widths):
            return ",".join(map(str, widths))
        of_level: list[list[int]] = [[] for _ in range(self.depth + 1)]
        for depth, number in zip(self.depths, self.num_children, strict=True):
            of_level[depth].append(number)
        for numbers in of_level[:-1]:
            while not numbers[-1]:
                numbers.pop()
        return "/".join(",".join(map(str, numbers)) for numbers in of_level[:-1])

    @property
    def num_nodes(self) -> int:
        """Number of nodes, root included."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @property
    def is_chain(self) -> bool:
        return self.depth == len(self.paths)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Parent of each node; -1 for the root."""
        number = {path: node for node, path in enumerate(((), *self.paths))}
        return (-1, *(number[path[:-1]] for path in self.paths))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each node among its siblings; 0 for the root."""
        return (0, *(path[-1] for path in self.paths))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; 0 for the root."""
        return (0, *(len(path) for path in self.paths))

    @cached_property
    def walk_steps(self) -> tuple[int, ...]:
        """The step at which a walk down from the root visits each node (``Draft.walk_step_BN``)."""
        walk_steps = [0]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            walk_steps.append(walk_steps[parent] + rank + 1)
        return tuple(walk_steps)

    @cached_property
    def num_children(self) -> tuple[int, ...]:
        counts = [0] * self.num_nodes
        for parent in self.parents[1:]:
            counts[parent] += 1
        return tuple(counts)

    @cached_property
    def ancestors(self) -> tuple[tuple[bool, ...], ...]:
        """``[i][j]`` is true iff j is i or an ancestor of i."""
        paths = [(), *self.paths]
        return tuple(tuple(path[: len(above)] == above for above in paths) for path in paths)


def _breadth_first(path: RankPath) -> tuple[int, RankPath]:
    return len(path), path


def _num_drafted(widths: Sequence[int]) -> int:
    total, level = 0, 1
    for width in widths:
        level *= width
        total += level
        if total > MAX_DRAFTED:
            break
    return total


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidParameterError(f"{name}={value!r}: must be a whole number, at least 1")


def _check_size(num_drafted: int, depth: int) -> None:
    if num_drafted == 0:
        raise InvalidParameterError("the tree is empty: give it at least the path [0]")
    if depth > MAX_DEPTH:
        raise InvalidParameterError(f"the tree is deeper than {MAX_DEPTH} levels: remove the lower")
    if num_drafted > MAX_DRAFTED:
        raise InvalidParameterError(
            f"the tree has more than {MAX_DRAFTED} nodes besides the root: remove some"
        )


def _checked(paths: Iterable[Sequence[int]]) -> list[RankPath]:
    """The paths as tuples, after checking that the parent and the lower siblings of each are among
    them."""
    found: dict[RankPath, int] = {}
    for index, path in enumerate(paths):
        if isinstance(path, str) or not isinstance(path, Sequence):
            raise InvalidParameterError(f"paths[{index}]={path!r}: must be a list of ranks")
        for rank in path:
            if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
                raise InvalidParameterError(
                    f"paths[{index}]={list(path)}: rank {rank!r} must be a whole number, at least 0"
                )
        if not path:
            raise InvalidParameterError(f"paths[{index}]=[]: the root is implied; remove it")
        if tuple(path) in found:
            raise InvalidParameterError(
                f"paths[{index}]={list(path)}: the same as paths[{found[tuple(path)]}]; remove one"
            )
        found[tuple(path)] = index
    _check_size(len(found), max(map(len, found), default=0))
    for path, index in found.items():
        *above, rank = path
        if above and tuple(above) not in found:
            raise InvalidParameterError(
                f"paths[{index}]={list(path)}: its parent {above} is missing; add it"
            )
        if rank and (*above, rank - 1) not in found:
            raise InvalidParameterError(
                f"paths[{index}]={list(path)}: a gap in the ranks; add its sibling "
                f"{[*above, rank - 1]}, or number the siblings from 0 on"
            )
    return list(found)


def _paths_in(file: Path) -> list[list[int]]:
    """The ``paths`` of a topology file, of which only the type list has been checked."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidParameterError(f"cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError(f"is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InvalidParameterError(f'must be a JSON object with "format": "{FORMAT}"')
    if content.get("version") != VERSION or isinstance(content["version"], bool):
        raise InvalidParameterError(
            f"version={content.get('version')!r}: this release reads version {VERSION}"
        )
    paths = content.get("paths")
    if not isinstance(paths, list):
        raise InvalidParameterError('"paths" must be a list of rank paths like [[0], [1], [0, 0]]')
    return paths
