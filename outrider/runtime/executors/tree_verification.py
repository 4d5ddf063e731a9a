"""The program of a rule that verifies trees by the target's distributions.

The target has computed the logits of query tokens, one per distinct path
(``core/query_tokens.py``), and the program reads them as they are. For a rule that reads some nodes
only (``core.ReadsNodes``) it computes the distributions of these nodes, and of the first children
for the statistics, unless the vocabulary is so small that computing all takes less time.

Legend: B rows, N nodes, Q query tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from outrider.core import Draft, NodeDistributions, Stream, Verdict, at_node
from outrider.core.overlap import estimated_overlap, overlap_down
from outrider.core.walk import LOOPS_FROM
from outrider.runtime.executors.verification_program import (
    FusedVerification,
    GivenNumbers,
    decisions,
)
from outrider.runtime.kernels.truncation import truncated
from outrider.sampling.warp import RowParameters, distributions

VerifyAt = Callable[[Draft, NodeDistributions, Stream], Verdict]
"""``ReadsNodes.verify_at``, looked up by name as ``core.round.BindLogits`` is."""


class FusedTreeVerification(FusedVerification):
    """The program of a rule for trees. Arguments as of ``FusedVerification``."""

    reads_queries: ClassVar[bool] = True

    def forward(  # type: ignore[override]
        self,
        logits_BQV: Tensor,
        nodes: list[Tensor],
        numbers: list[Tensor],
        keys: list[Tensor],
        parameters: list[Tensor],
        of_model_BNV: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Accepted tokens and the next one, both (B,), the path (B, D), the emitted tokens (B, N),
        ``DraftCounts``, and the two parts of the overlap, each (B, D).

        Args:
            logits_BQV: as ``Warp.sampling_logits`` returns them, of the query tokens.
            nodes: those of ``DraftKind.draft``, and the query token of each node, each (B, N).
            numbers, keys, parameters, of_model_BNV: as of ``FusedVerification``.
        """
        *of_draft, query_BN = nodes
        target = QueryDistributions(logits_BQV, query_BN, RowParameters(*parameters))
        draft = self.kind.draft(of_draft, of_model_BNV)
        stream = GivenNumbers.of(keys, *numbers)
        verify_at: VerifyAt | None = getattr(self.verifier, "verify_at", None)
        chooses = logits_BQV.device.type == "cpu" and logits_BQV.shape[2] >= LOOPS_FROM
        if verify_at is not None and chooses:
            verdict = verify_at(draft, target.at, stream)
            return *decisions(draft, verdict), *overlap_down(draft, target.at)
        p_BQV = target.of_queries()
        p_BNV = target.to_nodes(p_BQV)
        if verify_at is None:
            verdict = self.verifier(draft, p_BNV, stream)
        else:
            verdict = verify_at(draft, partial(target.at_node, p_BQV), stream)
        return *decisions(draft, verdict), *estimated_overlap(draft, p_BNV)


@dataclass(frozen=True)
class QueryDistributions:
    """The target's distributions at the nodes of a tree.

    Attributes:
        logits_BQV: of the query tokens.
        query_BN: the query token of each node.
        parameters: of the rows.
    """

    logits_BQV: Tensor
    query_BN: Tensor
    parameters: RowParameters

    def at(self, node_B: Tensor) -> Tensor:
        """The distribution at one node of each row, (B, V)."""
        z_BV = self.at_node(self.logits_BQV, node_B)
        return distributions(z_BV[:, None], self.parameters, truncated)[:, 0]

    def at_node(self, each_BQV: Tensor, node_B: Tensor) -> Tensor:
        """What one node of each row has of what query tokens have, (B, V)."""
        return at_node(each_BQV, self.query_BN.gather(1, node_B[:, None])[:, 0])

    def of_queries(self) -> Tensor:
        """The distributions of all query tokens, (B, Q, V)."""
        return distributions(self.logits_BQV, self.parameters, truncated)

    def to_nodes(self, p_BQV: Tensor) -> Tensor:
        """The distributions at all nodes, (B, N, V)."""
        V = p_BQV.shape[2]
        return p_BQV.gather(1, self.query_BN[..., None].expand(-1, -1, V))

    def at_all(self) -> Tensor:
        """The same, computed."""
        return self.to_nodes(self.of_queries())
