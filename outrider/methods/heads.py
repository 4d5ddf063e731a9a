"""Methods that draft with a head on the target, from the target's hidden states."""

from typing import TypeVar

from outrider.drafters.heads.eagle3 import (
    Eagle3Drafter,
    Eagle3DynamicTreeDrafter,
    Eagle3Head,
    Eagle3Model,
    Eagle3TreeDrafter,
)
from outrider.drafters.heads.head import Head
from outrider.drafters.tree.static import Children
from outrider.drafters.tree.topology import Topology
from outrider.methods.method import Method, Parts
from outrider.verifiers import Rejection, SampleMatch, Traversal

H = TypeVar("H", bound=Head)

TREE = Topology.parse("5/3,1,1/1,1,0,1/1/1")
"""Fifteen drafted tokens, as many as a pass of a matrix unit computes beside the root."""


def head_of(parts: Parts, kind: type[H]) -> H:
    """The head of the parts, which is of that kind (``Method.check_draft``)."""
    assert isinstance(parts.head, kind)
    return parts.head


def _model(parts: Parts) -> Eagle3Model:
    return Eagle3Model(head_of(parts, Eagle3Head), parts.target)


def _chain(parts: Parts) -> Eagle3Drafter:
    model, num_tokens = _model(parts), parts.target.num_tokens
    return Eagle3Drafter(
        model,
        num_tokens,
        parts.stop,
        num_fused=parts.fixed_length,
        has_short_program=parts.governed,
    )


def _tree(
    parts: Parts, *, topology: Topology = TREE, children: Children = "distinct"
) -> Eagle3TreeDrafter:
    return Eagle3TreeDrafter(_model(parts), parts.target.num_tokens, topology, children)


def _dynamic(
    parts: Parts, *, num_nodes: int = 60, width: int = 10, depth: int = 6
) -> Eagle3DynamicTreeDrafter:
    model = _model(parts)
    return Eagle3DynamicTreeDrafter(model, parts.target.num_tokens, num_nodes, width, depth)


_EAGLE3 = "Li et al. (EAGLE-3), NeurIPS 2025"
_NEEDS = "head: eagle3"

HEADS = (
    Method(
        "eagle3",
        "An EAGLE-3 head's chain, drafted from the target's hidden states.",
        _EAGLE3,
        _NEEDS,
        Rejection,
        _chain,
    ),
    Method(
        "eagle3-tree",
        "An EAGLE-3 head's tree of fixed shape, verified from its leaves to its root.",
        f"{_EAGLE3}; Weng et al., NeurIPS 2025",
        _NEEDS,
        Traversal,
        _tree,
        stops_when_unsure=False,
    ),
    Method(
        "eagle3-dynamic-tree",
        "An EAGLE-3 head's tree of most probable paths, as its authors draft.",
        f"{_EAGLE3}; Li et al. (EAGLE-2), EMNLP 2024",
        _NEEDS,
        SampleMatch,
        _dynamic,
        stops_when_unsure=False,
    ),
)
