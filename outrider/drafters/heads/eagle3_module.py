"""An EAGLE-3 head with embeddings and vocabulary, as programs consist of it.

Legend: B rows, K tokens to read, N tokens, D draft vocabulary, S slots, H width of the head,
F width of the target times the layers read, V vocabulary of the target.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from outrider.core.chain import Step
from outrider.core.health import health_of
from outrider.drafters.heads.draft_vocabulary import DraftingModule, DraftVocabulary
from outrider.drafters.heads.eagle3_network import Eagle3Network, LayerConfig
from outrider.drafters.heads.fused_draft import Slots
from outrider.drafters.heads.fused_tree import NodeLogits
from outrider.drafters.heads.newest import at_last
from outrider.runtime import Nodes
from outrider.runtime.attention_metadata import AttentionSpec
from outrider.runtime.executors.traced_cache import TracedKVCache


class HeadModule(DraftingModule):
    """A head with embeddings and vocabulary: tokens and features in, logits of the target's
    vocabulary out.

    Args:
        network: the weights.
        embedding: the embeddings of the target's tokens.
        vocabulary: the tokens that the head drafts.
    """

    def __init__(
        self, network: Eagle3Network, embedding: nn.Module, vocabulary: DraftVocabulary
    ) -> None:
        super().__init__(vocabulary)
        self.network = network
        self.embedding = embedding
        self.dtype = network.lm_head.weight.dtype

    def extra_repr(self) -> str:
        """All that a program of it depends on besides its parts (``compile_cache.py``)."""
        config = self.network.config
        flags = config.norm_before_residual, config.norm_before_fc, config.fc_norm
        return f"{flags}, {config.norm_output}, {self.num_tokens}"

    @property
    def config(self) -> LayerConfig:
        """The decoder layer's."""
        return self.network.config.layer

    def set_attn_implementation(self, name: str) -> None:
        """Chooses the attention function of all layers, by its name in ``transformers``."""
        self.config._attn_implementation = name

    def forward(
        self,
        tokens_BN: Tensor,
        feature_BNH: Tensor,
        positions_BN: Tensor,
        mask_BNS: Tensor,
        cache: Cache,
    ) -> Tensor:
        """The head's outputs, (B, N, H); arguments as of :class:`Eagle3Network`."""
        output_BNH: Tensor = self.network(
            self.embedding(tokens_BN), feature_BNH, positions_BN, mask_BNS, cache
        )
        return output_BNH

    def logits(self, output_BNH: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, N, V), -inf for tokens that the head cannot draft, and their health (B,)."""
        logits_BND = self.network.logits(output_BNH)
        return self.vocabulary.widened(logits_BND), health_of(logits_BND)

    @property
    def fused_size(self) -> int:
        """F."""
        return self.network.config.fused_size

    def num_drafting(self, depth: int) -> int:
        """Slots of a draft: nobody reads its last token."""
        return depth - 1

    def fill(self, spec: AttentionSpec, tokens_BS: Tensor, hidden_BSF: Tensor, to: Slots) -> None:
        """See ``HeadProgram``."""
        self._read(spec, tokens_BS, self.network.fuse(hidden_BSF), to)

    def begin_draft(
        self,
        spec: AttentionSpec,
        tokens_BK: Tensor,
        hidden_BKF: Tensor,
        num_B: Tensor,
        slots: Slots,
    ) -> tuple[Step, Tensor]:
        """See ``HeadProgram``: one pass over the newest tokens, and one over each drafted token but
        the last."""
        output_BKH = self._read(spec, tokens_BK, self.network.fuse(hidden_BKF), slots)
        root_B1H = feature_B1H = at_last(output_BKH, num_B)
        slots = slots._replace(length_B=slots.length_B + num_B)

        def step(tokens: Sequence[Tensor]) -> Tensor:
            nonlocal feature_B1H, slots
            if len(tokens) > 1:
                feature_B1H = self._read(spec, tokens[-1][:, None], feature_B1H, slots)
                slots = slots._replace(length_B=slots.length_B + 1)
            return self.network.logits(feature_B1H)

        return step, root_B1H[:, 0]

    def begin_tree(
        self,
        spec: AttentionSpec,
        tokens_BK: Tensor,
        hidden_BKF: Tensor,
        num_B: Tensor,
        slots: Slots,
    ) -> tuple[Tensor, NodeLogits, Tensor]:
        """See ``TreeHeadProgram``: one pass over the newest tokens, and one over the nodes of each
        level that have children. A node is read with the head's output for its parent."""
        output_BKH = self._read(spec, tokens_BK, self.network.fuse(hidden_BKF), slots)
        outputs = [at_last(output_BKH, num_B)]
        slots = slots._replace(length_B=slots.length_B + num_B)

        def after(tokens_Bn: Tensor, above_Bn: Tensor, nodes: Nodes) -> Tensor:
            output_BMH = torch.cat(outputs, 1)
            index_BnH = above_Bn[..., None].expand(-1, -1, output_BMH.shape[2])
            feature_BnH = output_BMH.gather(1, index_BnH)
            outputs.append(self._read(spec, tokens_Bn, feature_BnH, slots, nodes))
            return self.network.logits(outputs[-1])

        return self.network.logits(outputs[0]), after, outputs[0][:, 0]

    def _read(
        self,
        spec: AttentionSpec,
        tokens_BN: Tensor,
        feature_BNH: Tensor,
        slots: Slots,
        nodes: Nodes | None = None,
    ) -> Tensor:
        """The head's outputs for tokens after the committed ones, or for nodes, (B, N, H)."""
        metadata = spec.metadata(slots.length_B, tokens_BN.shape[1], slots.span, nodes)
        cache = TracedKVCache(slots.keys, slots.values, metadata.slots_BN, slots.span)
        (mask_B1NS,) = metadata.masks.values()
        return self(tokens_BN, feature_BNH, metadata.positions_BN, mask_B1NS, cache)
