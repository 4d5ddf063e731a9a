"""Methods that draft a tree or several chains with a draft model."""

from outrider.drafters.tree.dynamic import DynamicTreeDrafter
from outrider.drafters.tree.grow import Children
from outrider.drafters.tree.static import TreeDrafter
from outrider.drafters.tree.topology import Topology
from outrider.methods.method import Method, Parts
from outrider.verifiers import BestOfK, Distinct, Rejection, SampleMatch, Spectr, Traversal

_TREE = Topology.expansion([3, 2, 1, 1])
_LENGTH = 5
_DRAFT = "draft model"


def _static(parts: Parts, topology: Topology, children: Children) -> TreeDrafter:
    return TreeDrafter(parts.draft_model, parts.target.num_tokens, topology, children)


def _independent(parts: Parts, *, topology: Topology = _TREE) -> TreeDrafter:
    return _static(parts, topology, "iid")


def _distinct(parts: Parts, *, topology: Topology = _TREE) -> TreeDrafter:
    return _static(parts, topology, "distinct")


def _best(parts: Parts, *, topology: Topology = _TREE) -> TreeDrafter:
    return _static(parts, topology, "chosen")


def _any(
    parts: Parts, *, topology: Topology = _TREE, children: Children = "distinct"
) -> TreeDrafter:
    return _static(parts, topology, children)


def _dynamic(
    parts: Parts, *, num_nodes: int = 60, width: int = 10, depth: int = 6
) -> DynamicTreeDrafter:
    draft = parts.draft_model
    return DynamicTreeDrafter(draft, parts.target.num_tokens, num_nodes, width, depth)


def _sequences(parts: Parts, *, num_sequences: int = 4) -> TreeDrafter:
    length = parts.num_speculative_tokens or _LENGTH
    return _static(parts, Topology.bundle(num_sequences, length), "iid")


TREES = (
    Method(
        "specinfer",
        "A tree of independent draws, verified by rejection sampling, sibling by sibling.",
        "Miao et al. (SpecInfer), ASPLOS 2024",
        _DRAFT,
        Rejection,
        _independent,
        stops_when_unsure=False,
    ),
    Method(
        "sequoia",
        "A tree of draws without replacement, which accepts more than one of independent draws.",
        "Chen et al. (Sequoia), 2024; Yang et al. (MCSD), 2024",
        _DRAFT,
        Distinct,
        _distinct,
        stops_when_unsure=False,
    ),
    Method(
        "top-k-tree",
        "A tree of the draft's top tokens, kept while they equal what the target draws.",
        "Miao et al. (SpecInfer), ASPLOS 2024; Cai et al. (Medusa), ICML 2024",
        _DRAFT,
        SampleMatch,
        _best,
        stops_when_unsure=False,
    ),
    Method(
        "dynamic-tree",
        "A tree of the draft's most probable paths, shaped anew in every round.",
        "Li et al. (EAGLE-2), EMNLP 2024",
        _DRAFT,
        SampleMatch,
        _dynamic,
        stops_when_unsure=False,
    ),
    Method(
        "traversal",
        "A tree verified from its leaves to its root: block verification for trees.",
        "Weng et al., NeurIPS 2025",
        _DRAFT,
        Traversal,
        _any,
        stops_when_unsure=False,
    ),
    Method(
        "spectr",
        "Several independent chains, verified together at every position (K-SEQ).",
        "Sun et al. (SpecTr), NeurIPS 2023",
        _DRAFT,
        Spectr,
        _sequences,
        stops_when_unsure=False,
    ),
    Method(
        "best-of-k",
        "Not for use: several chains, each verified alone, the longest kept. Biased; a baseline "
        "for tables of results. Use spectr.",
        "the code released with Qin et al. (MJSD), 2024, under the name Spectr",
        _DRAFT,
        BestOfK,
        _sequences,
        stops_when_unsure=False,
    ),
)
