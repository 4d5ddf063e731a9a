"""What a forward pass is given, and what it returns.

Legend: B rows, N query tokens, V vocabulary, H hidden width (times the layers asked for).
"""

from typing import NamedTuple

from torch import Tensor

from outrider.core.lengths import Lengths
from outrider.runtime.attention_metadata import Nodes
from outrider.runtime.kv_cache.cache import KVCache


class ForwardBatch(NamedTuple):
    """Query tokens to run after the committed slots of a KV cache.

    Attributes:
        cache: its lengths say where the query tokens go; their keys and values are written there.
        tokens_BN: the query tokens, as many in each row.
        nodes: their topology, and the nodes that earlier forward passes wrote; None where each
            query token follows the one before.
        num_logits: compute the logits of the last so many query tokens only; 0 for all.
        hidden_layers: which hidden states to return. Layer l, from 1 to the number of layers L,
            stands for the output of the first l layers, and L for that of the final norm, which
            the head reads: ``hidden_states[l]`` of ``transformers``.
        needs_logits: whether anybody reads the logits. An executor may leave out the head
            otherwise; the logits are then zeros, of any width.
        kept: how many query tokens each row is known to keep, so that a recurrent model need not
            be able to return to the state after fewer; None where that is decided afterwards.
    """

    cache: KVCache
    tokens_BN: Tensor
    nodes: Nodes | None = None
    num_logits: int = 0
    hidden_layers: tuple[int, ...] = ()
    needs_logits: bool = True
    kept: Lengths | None = None

    def begin(self) -> None:
        """Tells the cache which slots the forward pass writes. Mutates the cache."""
        first = 0 if self.nodes is None else self.nodes.first
        self.cache.begin(self.tokens_BN.shape[1], first, self.kept)

    def asked(self, logits_BNV: Tensor) -> Tensor:
        """Of the logits of all query tokens, those that the batch asks for."""
        return logits_BNV[:, -self.num_logits :] if self.num_logits else logits_BNV


class ForwardOutput(NamedTuple):
    """What a forward pass computed.

    Attributes:
        logits_BNV: in the model's dtype; of the last ``num_logits`` query tokens where the batch
            asked for these only.
        health_B: a number per row, finite iff all logits of the row are healthy
            (``core/health.py``).
        hidden_BNH: the hidden states of all query tokens, side by side in the order in which the
            batch asked for the layers; None where it asked for none.
    """

    logits_BNV: Tensor
    health_B: Tensor
    hidden_BNH: Tensor | None = None

    @property
    def finite_B(self) -> Tensor:
        """Whether all logits of each row are healthy."""
        return self.health_B.isfinite()
