"""Methods that draft with Medusa heads."""

from outrider.drafters.heads.medusa import MedusaDrafter, MedusaHead
from outrider.drafters.tree.topology import Topology
from outrider.methods.heads import head_of
from outrider.methods.method import Method, Parts
from outrider.verifiers import Traversal, Typical

_TREE = Topology.expansion([4, 2, 1, 1])


def _best(parts: Parts, *, topology: Topology = _TREE) -> MedusaDrafter:
    return MedusaDrafter(head_of(parts, MedusaHead), parts.target, topology)


def _drawn(parts: Parts, *, topology: Topology = _TREE) -> MedusaDrafter:
    return MedusaDrafter(head_of(parts, MedusaHead), parts.target, topology, "distinct")


_MEDUSA = "Cai et al. (Medusa), ICML 2024"

MEDUSA = (
    Method(
        "medusa",
        "A tree of the Medusa heads' top tokens; keeps the longest path of typical tokens.",
        _MEDUSA,
        "head: medusa",
        Typical,
        _best,
        stops_when_unsure=False,
    ),
    Method(
        "medusa-lossless",
        "A tree of draws from the Medusa heads, verified from its leaves to its root.",
        f"{_MEDUSA}; Weng et al., NeurIPS 2025",
        "head: medusa",
        Traversal,
        _drawn,
        stops_when_unsure=False,
    ),
)
