"""Methods that draft with a block head: several tokens by one pass over the target's states."""

from typing import Any

from outrider.core import Drafter
from outrider.drafters.chain.draft_length import Stopped
from outrider.drafters.heads.block import BlockDrafter
from outrider.drafters.heads.block_head import BlockHead
from outrider.drafters.heads.peagle import PEagleHead
from outrider.drafters.tree.grow import Children
from outrider.drafters.tree.topology import Topology
from outrider.methods.heads import head_of
from outrider.methods.method import Method, Parts
from outrider.verifiers import Rejection, Traversal

_TREE = Topology.expansion([3, 2, 1, 1])


def _chain(parts: Parts) -> Drafter[Any]:
    """A head that predicts its confidence stops in front of an unsure token; of another, the token
    after which a draft stops is part of it."""
    head, stop = head_of(parts, BlockHead), parts.stop
    if stop is None or head.config.has_confidence:
        num = parts.fixed_length and (parts.num_speculative_tokens or head.config.num_slots)
        return BlockDrafter(head, parts.target, stop, num_fused=num)
    return Stopped(BlockDrafter(head, parts.target), stop)


def _tree(
    parts: Parts, *, topology: Topology = _TREE, children: Children = "distinct"
) -> BlockDrafter:
    head = head_of(parts, BlockHead)
    return BlockDrafter(head, parts.target, topology=topology, children=children)


def _peagle(parts: Parts) -> Drafter[Any]:
    """A head without confidence: the token after which a draft stops is part of it."""
    head, stop = head_of(parts, PEagleHead), parts.stop
    if stop is not None:
        return Stopped(BlockDrafter(head, parts.target), stop)
    num = parts.fixed_length and (parts.num_speculative_tokens or head.config.num_slots)
    return BlockDrafter(head, parts.target, num_fused=num)


def _peagle_tree(
    parts: Parts, *, topology: Topology = _TREE, children: Children = "distinct"
) -> BlockDrafter:
    head = head_of(parts, PEagleHead)
    return BlockDrafter(head, parts.target, topology=topology, children=children)


_DFLASH = "DFlash, arXiv 2602.06036, 2026"
_DSPARK = "DSpark, DeepSeek, 2026"
_PEAGLE = "Hui et al. (P-EAGLE), arXiv 2602.01469, 2026"

BLOCK_HEADS = (
    Method(
        "dflash",
        "A DFlash head's block of tokens, drafted by one pass over the target's hidden states.",
        _DFLASH,
        "head: dflash",
        Rejection,
        _chain,
    ),
    Method(
        "dspark",
        "A DSpark head's block, each token corrected by the one before; stops by its confidence.",
        _DSPARK,
        "head: dspark",
        Rejection,
        _chain,
    ),
    Method(
        "dflash-tree",
        "A tree from the slots of a DFlash head's block, verified from its leaves to its root.",
        f"{_DFLASH}; Weng et al., NeurIPS 2025",
        "head: dflash",
        Traversal,
        _tree,
        stops_when_unsure=False,
    ),
    Method(
        "dspark-tree",
        "The same of a DSpark head, each token corrected by the one before on its path.",
        f"{_DSPARK}; Weng et al., NeurIPS 2025",
        "head: dspark",
        Traversal,
        _tree,
        stops_when_unsure=False,
    ),
    Method(
        "peagle",
        "A P-EAGLE head's chain: an EAGLE-3 head that drafts all tokens in one pass.",
        _PEAGLE,
        "head: peagle",
        Rejection,
        _peagle,
    ),
    Method(
        "peagle-tree",
        "A tree from a P-EAGLE head's pass, verified from its leaves to its root.",
        f"{_PEAGLE}; Weng et al., NeurIPS 2025",
        "head: peagle",
        Traversal,
        _peagle_tree,
        stops_when_unsure=False,
    ),
)
